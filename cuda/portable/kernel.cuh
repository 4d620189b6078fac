// The portable kernel: 64 tokens of one query head against the cache, 64 slots at a time.
//
//   256 threads, time runs down; ==== is a block barrier
//     all      q tile: global -> shared, scaled, rounded to the cache's dtype, once
//     for each tile of 64 slots from the first one any row sees to the last:
//     all      K and V tile: global -> shared, 16 bytes a copy, zeros from kv_end on
//     ====     tiles are whole
//     8 warps  scores = Q.K^T by wmma, as 4 x 2: 16 rows x 32 slots a warp -> shared, float32
//     ====     scores are whole
//     4 threads a row (all in one warp): soft cap, row_max, probs, row_sum; probs -> shared,
//     16-bit, over
//              the row's own scores; then out[row, quarter] += probs.V by FMA, in registers
//     ====     tiles are free again
//
// Rows are independent: a row's threads go by the slots that the row itself sees, so neither a
// masked score nor a V row it does not see takes part in its arithmetic (contract C3, C5).

#ifndef JAX_FA_CUDA_PORTABLE_KERNEL_CUH_
#define JAX_FA_CUDA_PORTABLE_KERNEL_CUH_

#include <mma.h>

#include <cmath>
#include <type_traits>

#include "attention/sinks.h"
#include "cuda/portable/config.h"
#include "cuda/portable/staging.cuh"
#include "cuda/tile/convert.h"
#include "cuda/tile/sink.cuh"

namespace jax_fa::cuda::portable {

template <typename KvT>
constexpr bool kHasMatrixUnit = std::is_same_v<KvT, __half> || kCompiledFor >= 80;

// Blocks on a multiprocessor, which decides the registers a thread may have: 80 for three, 128 for
// two. Three hide the copies' latency where shared memory has room for them (Hopper, Blackwell's
// data-centre parts); head_dim 64 spills at 80 registers on the latter.
template <int kHeadDim>
constexpr int kBlocksPerSm = kCompiledFor == 90 || (kCompiledFor == 100 && kHeadDim == 128) ? 3 : 2;

// s.scores = s.q . s.k^T, 16 rows x 32 slots of it by this warp. [kTileQ, kTileKv] f32.
template <typename KvT, int kHeadDim>
__device__ void ComputeScores(DeviceStorage<KvT, kHeadDim>& s) {
  namespace wmma = nvcuda::wmma;
  constexpr int kRow = DeviceStorage<KvT, kHeadDim>::kRow;
  constexpr int kSteps = kSlotsPerWarp / kWmma;
  const int warp = threadIdx.x / kWarpSize;
  const int row = warp / kWarpColumns * kWmma;
  const int slot = warp % kWarpColumns * kSlotsPerWarp;

  wmma::fragment<wmma::accumulator, kWmma, kWmma, kWmma, float> r_scores[kSteps];
#pragma unroll
  for (int step = 0; step < kSteps; ++step) wmma::fill_fragment(r_scores[step], 0.0f);
#pragma unroll
  for (int d = 0; d < kHeadDim; d += kWmma) {
    wmma::fragment<wmma::matrix_a, kWmma, kWmma, kWmma, KvT, wmma::row_major> r_q;
    wmma::load_matrix_sync(r_q, &s.q[row][d], kRow);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      // K as stored, [slot][d], is the column-major form of K^T.
      wmma::fragment<wmma::matrix_b, kWmma, kWmma, kWmma, KvT, wmma::col_major> r_k;
      wmma::load_matrix_sync(r_k, &s.k[slot + step * kWmma][d], kRow);
      wmma::mma_sync(r_scores[step], r_q, r_k, r_scores[step]);
    }
  }
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    wmma::store_matrix_sync(&s.scores[row][slot + step * kWmma], r_scores[step], kTileKv,
                            wmma::mem_row_major);
  }
}

// What a thread holds of its row: the row's statistics (the same in the row's four threads) and
// its quarter of out, the chunks 4 * i + quarter of 8 columns each. In float32, all of it.
template <int kHeadDim>
struct RowState {
  static constexpr int kChunks = kHeadDim / kChunk / kThreadsPerRow;
  float max = -INFINITY;
  float sum = 0.0f;
  float out[kChunks][kChunk] = {};
};

// The thread's 16 of its row's 64 scores: group g holds the 4 from slot (4 * g + quarter) * 4 on.
constexpr int kGroup = 4;
constexpr int kGroups = kTileKv / kThreadsPerRow / kGroup;

__device__ inline int GroupSlot(int group, int quarter) {
  return (group * kThreadsPerRow + quarter) * kGroup;
}

__device__ inline float RowMax(float value) {
  value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 1));
  return fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 2));
}

__device__ inline float RowSum(float value) {
  value += __shfl_xor_sync(0xffffffffu, value, 1);
  return value + __shfl_xor_sync(0xffffffffu, value, 2);
}

// Probabilities of row r lie at byte r * kProbsStrideBytes of the scores, 16 bits each.
//
// With 256 bytes, the size of a row of float32 scores, they cover a part of the row's own scores
// and of no other's. Those scores are read by the row's four threads alone, which sit in one warp:
//   1. each thread has loaded its 16 scores into registers,
//   2. __syncwarp,
//   3. each thread stores its 16 probabilities,
//   4. __syncwarp, then each thread loads all 64.
// With 128 bytes, packed, row r would cover scores of row r / 2, which belongs to another warp that
// may not have loaded them yet: a race that only some schedules show.
template <typename KvT, int kHeadDim>
__device__ char* ProbsOfRow(DeviceStorage<KvT, kHeadDim>& s, int row) {
  return reinterpret_cast<char*>(s.scores) + row * kProbsStrideBytes;
}

// The slots of a tile that a row sees, counted from the tile's first; none where begin = end.
struct TileSlots {
  int begin;
  int end;

  __device__ TileSlots(const Visible& row, int kv_start)
      : begin(min(max(row.lo - kv_start, 0), kTileKv)),
        end(min(max(row.hi - kv_start, begin), kTileKv)) {}
  // One comparison, as what lies below `begin` is a huge number then.
  __device__ bool Has(int slot) const {
    return static_cast<unsigned>(slot - begin) < static_cast<unsigned>(end - begin);
  }
  __device__ bool HasAll(int first, int count) const {
    return begin <= first && first + count <= end;
  }
};

// The thread's scores become tanh(cap_scale * score), which the step below scales by the cap.
template <typename KvT, int kHeadDim>
__device__ void CapScores(DeviceStorage<KvT, kHeadDim>& s, float cap_scale) {
  const int row = threadIdx.x / kThreadsPerRow;
  const int quarter = threadIdx.x % kThreadsPerRow;
#pragma unroll 1
  for (int group = 0; group < kGroups; ++group) {
    float* s_scores = &s.scores[row][GroupSlot(group, quarter)];
#pragma unroll 1
    for (int i = 0; i < kGroup; ++i) s_scores[i] = tanhf(s_scores[i] * cap_scale);
  }
}

// One online-softmax step of the thread's row: the tile's scores become probabilities relative to
// the new row_max, and the state is rescaled to it. `seen`: slots of the tile the row sees.
// A tile it sees nothing of leaves the state exactly as it is (C5): row_max stays, alpha is 1.
template <typename KvT, int kHeadDim>
__device__ void SoftmaxStep(DeviceStorage<KvT, kHeadDim>& s, RowState<kHeadDim>& state,
                            float score_scale, const TileSlots& seen) {
  const int row = threadIdx.x / kThreadsPerRow;
  const int quarter = threadIdx.x % kThreadsPerRow;
  float r_scores[kGroups][kGroup];
  float tile_max = -INFINITY;
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    const int slot = GroupSlot(group, quarter);
    const float4 four = *reinterpret_cast<const float4*>(&s.scores[row][slot]);
    const float loaded[kGroup] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      // A select, not an addition: an unseen slot may hold NaN.
      r_scores[group][i] = seen.Has(slot + i) ? loaded[i] * score_scale : -INFINITY;
      tile_max = fmaxf(tile_max, r_scores[group][i]);
    }
  }
  const float new_max = fmaxf(state.max, RowMax(tile_max));
  // Nothing seen so far, or scores of -inf only: subtract 0, not -inf, which would give NaN.
  const float base = new_max == -INFINITY ? 0.0f : new_max;
  const float alpha = seen.begin < seen.end ? __expf(state.max - base) : 1.0f;

  // The row's four threads have loaded their scores; without it one of them may load what another
  // has already overwritten with probabilities.
  __syncwarp();
  char* s_probs = ProbsOfRow<KvT, kHeadDim>(s, row);
  float sum = 0.0f;
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    const int slot = GroupSlot(group, quarter);
    float probs[kGroup];
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      probs[i] = seen.Has(slot + i) ? __expf(r_scores[group][i] - base) : 0.0f;
      sum += probs[i];
    }
    *reinterpret_cast<uint2*>(s_probs + slot * sizeof(KvT)) =
        make_uint2(Pack2<KvT>(probs[0], probs[1]), Pack2<KvT>(probs[2], probs[3]));
  }
  // The row's four threads have stored their probabilities; AccumulateOut loads all 64 of them.
  __syncwarp();

  state.max = new_max;
  state.sum = state.sum * alpha + RowSum(sum);
#pragma unroll
  for (auto& chunk : state.out) {
#pragma unroll
    for (float& out : chunk) out *= alpha;
  }
}

// Adds slots first .. first + 7 of the tile, those the row sees, to the thread's quarter of out.
template <bool kWhole, typename KvT, int kHeadDim>
__device__ __forceinline__ void AddSlots(DeviceStorage<KvT, kHeadDim>& s, RowState<kHeadDim>& state,
                                         int first, const TileSlots& seen) {
  const int row = threadIdx.x / kThreadsPerRow;
  const int quarter = threadIdx.x % kThreadsPerRow;
  const uint4 eight =
      *reinterpret_cast<const uint4*>(ProbsOfRow<KvT, kHeadDim>(s, row) + first * sizeof(KvT));
  const uint32_t prob_pairs[kChunk / 2] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    if (!kWhole && !seen.Has(first + i)) continue;
    const float2 probs = Unpack2<KvT>(prob_pairs[i / 2]);
    const float prob = i % 2 == 0 ? probs.x : probs.y;
#pragma unroll
    for (int chunk = 0; chunk < RowState<kHeadDim>::kChunks; ++chunk) {
      const int column = (chunk * kThreadsPerRow + quarter) * kChunk;
      const uint4 v = *reinterpret_cast<const uint4*>(&s.v[first + i][column]);
      const uint32_t v_pairs[kChunk / 2] = {v.x, v.y, v.z, v.w};
      float* out = state.out[chunk];
#pragma unroll
      for (int pair = 0; pair < kChunk / 2; ++pair) {
        const float2 values = Unpack2<KvT>(v_pairs[pair]);
        out[2 * pair] = fmaf(prob, values.x, out[2 * pair]);
        out[2 * pair + 1] = fmaf(prob, values.y, out[2 * pair + 1]);
      }
    }
  }
}

// out += probs . V over the slots of the tile that the row sees, in slot order.
template <typename KvT, int kHeadDim>
__device__ void AccumulateOut(DeviceStorage<KvT, kHeadDim>& s, RowState<kHeadDim>& state,
                              const TileSlots& seen) {
  for (int slot = seen.begin / kChunk * kChunk; slot < seen.end; slot += kChunk) {
    if (seen.HasAll(slot, kChunk)) {
      AddSlots<true, KvT, kHeadDim>(s, state, slot, seen);
    } else {
      AddSlots<false, KvT, kHeadDim>(s, state, slot, seen);
    }
  }
}

template <typename QT>
__device__ __forceinline__ void StoreChunk(QT* g_out, const float (&values)[kChunk], bool aligned) {
  alignas(16) QT converted[kChunk];
#pragma unroll
  for (int i = 0; i < kChunk; ++i) converted[i] = FromFloat<QT>(values[i]);
  constexpr int kCopies = sizeof(converted) / sizeof(uint4);
  if (aligned) {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      reinterpret_cast<uint4*>(g_out)[i] = reinterpret_cast<const uint4*>(converted)[i];
    }
  } else {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) g_out[i] = converted[i];
  }
}

// out = state.out / row_sum, the sink in the sum; a row that saw nothing is 0 with lse = sink.
template <typename QT, int kHeadDim>
__device__ void StoreRow(const Args& args, const Work& work, const RowState<kHeadDim>& state) {
  const int row = threadIdx.x / kThreadsPerRow;
  const int quarter = threadIdx.x % kThreadsPerRow;
  if (row >= work.rows) return;
  const int64_t g_row = work.first_row + row * args.params.q_heads;
  QT* g_out = static_cast<QT*>(args.params.out) + g_row * kHeadDim;
  const bool is_empty = state.sum == 0.0f;
  const float sink = SinkLogit(args.params, work.sequence, work.head);
  const SoftmaxEnd end = JoinSink(state.max, state.sum, sink);
  const float inverse = end.alpha / end.sum;
#pragma unroll
  for (int chunk = 0; chunk < RowState<kHeadDim>::kChunks; ++chunk) {
    float values[kChunk];
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      // + 0.0f: an exact zero is +0 whatever the signs in V.
      values[i] = is_empty ? 0.0f : fmaf(state.out[chunk][i], inverse, 0.0f);
    }
    StoreChunk(g_out + (chunk * kThreadsPerRow + quarter) * kChunk, values, args.out_aligned);
  }
  if (args.params.lse != nullptr && quarter == 0) args.params.lse[g_row] = end.lse;
}

template <typename QT, typename KvT, int kHeadDim>
__device__ void Attend(const Args& args, DeviceStorage<KvT, kHeadDim>& s) {
  const AttentionParams& params = args.params;
  const Work work = LocateWork(params);
  const Visible visible = VisibleSlotsOfRow(params, work, threadIdx.x / kThreadsPerRow);
  const VisibleBounds bounds = BoundsOfTile(params, work);
  const int kv_end = bounds.most_hi;
  RowState<kHeadDim> state;

  if (kv_end > 0) StageQ<QT, KvT, kHeadDim>(s, args, work);
  const int kv_first = bounds.Span(kTileKv).first * kTileKv;
  for (int kv_start = kv_first; kv_start < kv_end; kv_start += kTileKv) {
    const int slots = min(kTileKv, kv_end - kv_start);
    const int64_t offset = work.cache_offset + kv_start * params.kv_heads * kHeadDim;
    if (args.kv_aligned) {
      StageKv<true, KvT, kHeadDim>(s, params, offset, slots);
    } else {
      StageKv<false, KvT, kHeadDim>(s, params, offset, slots);
    }
    // All threads wrote a part of K and V (and of Q, the first time), all warps read all of them;
    // without it a warp multiplies rows that are not there yet.
    __syncthreads();
    ComputeScores<KvT, kHeadDim>(s);
    // Two warps wrote the scores of a row, the row's four threads read them; without it they take
    // the last tile's probabilities for scores.
    __syncthreads();
    if (args.is_capped) CapScores<KvT, kHeadDim>(s, args.cap_scale);
    const TileSlots seen(visible, kv_start);
    SoftmaxStep<KvT, kHeadDim>(s, state, args.score_scale, seen);
    AccumulateOut<KvT, kHeadDim>(s, state, seen);
    // All threads have read V and their probabilities, all warps K; without it the next tile's
    // copies overwrite V under a slower warp, and its scores that warp's probabilities.
    __syncthreads();
  }
  StoreRow<QT, kHeadDim>(args, work, state);
}

template <typename QT, typename KvT, int kHeadDim>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm<kHeadDim>)
    PortableKernel(const __grid_constant__ Args args) {
  // The host refuses bfloat16 below sm_80, so an architecture without the unit gets an empty body.
  if constexpr (kHasMatrixUnit<KvT>) {
    extern __shared__ __align__(128) unsigned char s_bytes[];
    Attend<QT, KvT, kHeadDim>(args, *reinterpret_cast<DeviceStorage<KvT, kHeadDim>*>(s_bytes));
  }
}

}  // namespace jax_fa::cuda::portable

#endif  // JAX_FA_CUDA_PORTABLE_KERNEL_CUH_
