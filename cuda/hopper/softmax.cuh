// The online softmax of a consumer warpgroup, in registers. A thread holds, of the wgmma
// accumulator layout, two rows (r = 0 and 1, eight rows apart) of which four neighbouring lanes
// share each: scores[4 * i + 2 * r + e] is column 8 * i + 2 * (lane % 4) + e of row r.

#ifndef JAX_FA_CUDA_HOPPER_SOFTMAX_CUH_
#define JAX_FA_CUDA_HOPPER_SOFTMAX_CUH_

#include <cstdint>

#include "cuda/hopper/config.cuh"
#include "cuda/ptx/warp.cuh"
#include "cuda/tile/convert.h"

namespace jax_fa::cuda::hopper {

// The state of a thread's two rows. Weights are 2^(score * score_factor + negative_shift).
struct RowState {
  float negative_shift[2];
  float sum[2];  // of this thread's columns; the row's sum is over its four lanes
};

// Slots below which a row's scores count. An empty row (visible == 0) computes as if it saw
// everything, and its output is dropped.
__device__ __forceinline__ int32_t SlotLimit(int32_t visible) {
  return visible == 0 ? INT32_MAX : visible;
}

// A shift is kept until a lane's weights of one tile add up to more than this: the shift is then
// raised. It bounds a weight in float16, whose largest number is 65,504.
constexpr float kRaiseAbove = 1024.0f;

__device__ __forceinline__ float QuadMax(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ __forceinline__ float QuadSum(float x) {
  x = __fadd_rn(x, __shfl_xor_sync(~0u, x, 1));
  return __fadd_rn(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ __forceinline__ bool AnyInQuad(bool condition) {
  return (__ballot_sync(~0u, condition) >> (threadIdx.x & 28) & 15) != 0;
}

// Scores of slots that a row does not see become -inf, by selection: they may be NaN. `visible` is
// of the thread's rows, which are 8 apart.
template <int kCount>
__device__ __forceinline__ void MaskScores(float (&scores)[kCount], const int32_t* visible,
                                           int32_t first_slot) {
  const int32_t first_column = first_slot + 2 * (threadIdx.x % 4);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int32_t limit = SlotLimit(visible[8 * r]) - first_column;
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& score = scores[4 * i + 2 * r + e];
        score = 8 * i + e < limit ? score : -INFINITY;
      }
    }
  }
}

// The same with lower bounds `lo`.
template <int kCount>
__device__ __forceinline__ void MaskScores(float (&scores)[kCount], const int32_t* lo,
                                           const int32_t* visible, int32_t first_slot) {
  const int32_t first_column = first_slot + 2 * (threadIdx.x % 4);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int32_t begin = lo[8 * r] - first_column;
    const int32_t limit = SlotLimit(visible[8 * r]) - first_column;
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& score = scores[4 * i + 2 * r + e];
        score = 8 * i + e >= begin && 8 * i + e < limit ? score : -INFINITY;
      }
    }
  }
}

// The largest score of row r over the tile, in all four lanes.
template <int kCount>
__device__ __forceinline__ float RowMax(const float (&scores)[kCount], int r) {
  float largest = -INFINITY;
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
    largest = fmaxf(largest, fmaxf(scores[4 * i + 2 * r], scores[4 * i + 2 * r + 1]));
  }
  return QuadMax(largest);
}

// -shift for a row whose largest score is `largest`. A row without a finite one gets 0, which keeps
// NaN out of -inf - (-inf).
__device__ __forceinline__ float NegativeShift(float largest, float score_factor) {
  return largest == -INFINITY ? 0.0f : -__fmul_rn(largest, score_factor);
}

// Turns scores into weights and adds them to `sum`.
template <int kCount>
__device__ __forceinline__ void Exponentiate(float (&scores)[kCount], const RowState& rows,
                                             float score_factor, float (&sum)[2]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int r = i / 2 % 2;
    const float x = __fmaf_rn(scores[i], score_factor, rows.negative_shift[r]);
    scores[i] = ptx::exp2_approx(x);
    sum[r] = __fadd_rn(sum[r], scores[i]);
  }
}

// The first tile's weights: its largest scores set the rows' shifts.
template <int kCount>
__device__ __forceinline__ void StartRows(float (&scores)[kCount], float score_factor,
                                          RowState& rows) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    rows.negative_shift[r] = NegativeShift(RowMax(scores, r), score_factor);
    rows.sum[r] = 0.0f;
  }
  Exponentiate(scores, rows, score_factor, rows.sum);
}

// Starts the rows that see their first slot in KV tile `tile` and none before, each by its own
// scores. Their sums and outputs are 0, to which the tiles before have added zeros.
template <int kCount>
__device__ __forceinline__ void StartLateRows(const float (&scores)[kCount], const int32_t* lo,
                                              int32_t tile, int32_t tile_slots, float score_factor,
                                              RowState& rows) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const bool starts = lo[8 * r] >= tile * tile_slots && lo[8 * r] < (tile + 1) * tile_slots;
    if (!__any_sync(~0u, starts)) continue;
    const float shift = NegativeShift(RowMax(scores, r), score_factor);
    if (starts) rows.negative_shift[r] = shift;
  }
}

// Logarithms are to base 2 until they are given out.
constexpr float kLn2 = 0.693147181f;
constexpr float kLog2E = 1.442695041f;

// One over a row's sum of weights. Scores of -inf alone sum to 0; their output stays 0.
__device__ __forceinline__ float Inverse(float sum) { return sum == 0.0f ? 0.0f : __frcp_rn(sum); }

// Logarithm to base 2 of the sum of a row's weights, the shift taken out; of 0, -inf.
__device__ __forceinline__ float Log2Sum(float sum, float negative_shift) {
  return __fsub_rn(ptx::log2_approx(sum), negative_shift);
}

// Rounds the weights to the operand of P.V: pair i of the accumulator is register i of the A
// fragments, in order.
template <typename Element, int kCount>
__device__ __forceinline__ void PackWeights(const float (&weights)[kCount],
                                            uint32_t (&probs)[kCount / 2]) {
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    probs[i] = Pack2<Element>(weights[2 * i], weights[2 * i + 1]);
  }
}

}  // namespace jax_fa::cuda::hopper

#endif  // JAX_FA_CUDA_HOPPER_SOFTMAX_CUH_
