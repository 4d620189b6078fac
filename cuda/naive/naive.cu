// The `naive` kernel. Nothing is staged and nothing is rounded: every block reads all K and V its
// row sees, one element a load, and all arithmetic is float32.
//
//   a block, one row of out:   for each tile of 128 slots that the row sees some of
//     thread s:  score of slot s      = scale * sum over d of q[d] * k[s][d], capped
//     block:     row_max, probs, row_sum of the tile (online softmax)
//     thread d:  out[d]               = out[d] * alpha + sum over s of probs[s] * v[s][d]
//
// A slot the row does not see is never loaded, so nothing in it can reach the row (contract C3).
// A row's arithmetic knows nothing of other rows (C5) and its order is fixed (C6).

#include <algorithm>
#include <cmath>

#include "attention/kv_layout.h"
#include "attention/rules.h"
#include "attention/sinks.h"
#include "attention/visible.h"
#include "cuda/naive/naive.h"
#include "cuda/refusal.h"
#include "cuda/tile/convert.h"
#include "cuda/tile/sink.cuh"

namespace jax_fa::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarpSize = 32;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kTileKv = kThreads;  // one slot a thread
// Columns of out a thread holds at once; more would cost occupancy, or spill. A head wider than
// 256 is served in several passes over K, each computing the same scores again: slow, but without
// a limit on head_dim.
constexpr int kColumnsPerThread = 2;
constexpr int kColumnsPerPass = kThreads * kColumnsPerThread;
constexpr int64_t kMaxGrid = (int64_t{1} << 31) - 1;

struct SharedStorage {
  float probs[kTileKv];
  float warp_partial[kWarps];
};

struct Max {
  static __device__ float Apply(float a, float b) { return fmaxf(a, b); }
};
struct Sum {
  static __device__ float Apply(float a, float b) { return a + b; }
};

// Op over the block's values, in one fixed order; every thread gets the result.
template <typename Op>
__device__ float BlockReduce(float value, float* s_warp_partial) {
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    value = Op::Apply(value, __shfl_xor_sync(0xffffffffu, value, distance));
  }
  if (threadIdx.x % kWarpSize == 0) s_warp_partial[threadIdx.x / kWarpSize] = value;
  // Written by lane 0 of each warp, read by all threads below: without it a thread may add a
  // partial of the previous reduction.
  __syncthreads();
  float result = s_warp_partial[0];
  for (int warp = 1; warp < kWarps; ++warp) result = Op::Apply(result, s_warp_partial[warp]);
  // All threads have read the partials; without it the next reduction's writes overtake the reads.
  __syncthreads();
  return result;
}

template <typename QT, typename KvT>
__device__ float Dot(const QT* q, const KvT* k, int64_t head_dim) {
  float sum = 0.0f;
  for (int64_t d = 0; d < head_dim; ++d) sum = fmaf(ToFloat(q[d]), ToFloat(k[d]), sum);
  return sum;
}

// What one block computes: a row of q and out, and the head of the cache it reads.
template <typename QT, typename KvT>
struct Row {
  const QT* q;   // [head_dim]
  QT* out;       // [head_dim]
  float* lse;    // one value, or null
  const KvT* k;  // slot s at k + s * slot_pitch
  const KvT* v;  // slot s at v + s * slot_pitch
  int64_t slot_pitch;
  int64_t head_dim;
  Visible visible;
  float scale;
  float cap;          // 0: none
  float inverse_cap;  // since a division beside tanhf spills on sm_80
  float sink;         // -inf: none
};

template <typename QT, typename KvT>
__device__ Row<QT, KvT> LocateRow(const AttentionParams& params, int64_t row) {
  const int64_t q_head = row % params.q_heads;
  const int64_t token = row / params.q_heads;  // b * q_len + t
  const int64_t sequence = token / params.q_len;
  const int64_t kv_head = q_head / (params.q_heads / params.kv_heads);
  const int64_t cache_offset = CacheOffset(params, sequence, kv_head);
  Row<QT, KvT> r;
  r.q = static_cast<const QT*>(params.q) + row * params.head_dim;
  r.out = static_cast<QT*>(params.out) + row * params.head_dim;
  r.lse = params.lse == nullptr ? nullptr : params.lse + row;
  r.k = static_cast<const KvT*>(params.k) + cache_offset;
  r.v = static_cast<const KvT*>(params.v) + cache_offset;
  r.slot_pitch = SlotPitch(params);
  r.head_dim = params.head_dim;
  r.visible = VisibleSlots(params, sequence, token % params.q_len);
  r.scale = params.scale;
  r.cap = params.logits_soft_cap;
  r.inverse_cap = 1.0f / r.cap;
  r.sink = SinkLogit(params, sequence, q_head);
  return r;
}

template <typename QT, typename KvT>
__device__ float Score(const Row<QT, KvT>& row, int64_t slot) {
  const float score = row.scale * Dot(row.q, row.k + slot * row.slot_pitch, row.head_dim);
  return row.cap > 0.0f ? row.cap * tanhf(score * row.inverse_cap) : score;
}

// Columns column_begin .. column_begin + kColumnsPerPass of one row of out.
template <typename QT, typename KvT>
__device__ void AttendColumns(const Row<QT, KvT>& row, int64_t column_begin, SharedStorage& s) {
  float row_max = -INFINITY;
  float row_sum = 0.0f;
  float r_out[kColumnsPerThread] = {};

  const int32_t first_tile = row.visible.lo / kTileKv;
  for (int32_t kv_start = first_tile * kTileKv; kv_start < row.visible.hi; kv_start += kTileKv) {
    const int begin = max(row.visible.lo - kv_start, 0);
    const int end = min(row.visible.hi - kv_start, kTileKv);
    const int thread = static_cast<int>(threadIdx.x);
    const bool has_slot = begin <= thread && thread < end;
    const float score = has_slot ? Score(row, kv_start + thread) : -INFINITY;
    const float new_max = fmaxf(row_max, BlockReduce<Max>(score, s.warp_partial));
    // Scores of -inf only (K holds -inf): subtract 0, not -inf, which would give NaN.
    const float base = new_max == -INFINITY ? 0.0f : new_max;
    const float alpha = expf(row_max - base);
    const float prob = has_slot ? expf(score - base) : 0.0f;
    // The barriers of the Max reduction above lie between this write and the last tile's reads of
    // s.probs; those of the Sum reduction below between this write and this tile's reads.
    s.probs[threadIdx.x] = prob;
    row_sum = row_sum * alpha + BlockReduce<Sum>(prob, s.warp_partial);
    row_max = new_max;

    const KvT* v_tile = row.v + kv_start * row.slot_pitch;
#pragma unroll
    for (int i = 0; i < kColumnsPerThread; ++i) {
      const int64_t column = column_begin + i * kThreads + threadIdx.x;
      if (column >= row.head_dim) continue;
      float sum = r_out[i] * alpha;
      for (int slot = begin; slot < end; ++slot) {
        sum = fmaf(s.probs[slot], ToFloat(v_tile[slot * row.slot_pitch + column]), sum);
      }
      r_out[i] = sum;
    }
  }

  const SoftmaxEnd end = JoinSink(row_max, row_sum, row.sink);
#pragma unroll
  for (int i = 0; i < kColumnsPerThread; ++i) {
    const int64_t column = column_begin + i * kThreads + threadIdx.x;
    if (column >= row.head_dim) continue;
    // + 0.0f: an exact zero is +0 whatever the signs in V.
    const float value = r_out[i] * end.alpha / end.sum + 0.0f;
    row.out[column] = FromFloat<QT>(row_sum == 0.0f ? 0.0f : value);
  }
  if (row.lse != nullptr && column_begin == 0 && threadIdx.x == 0) *row.lse = end.lse;
}

template <typename QT, typename KvT>
__global__ void __launch_bounds__(kThreads) NaiveKernel(AttentionParams params, int64_t rows) {
  __shared__ SharedStorage s;
  for (int64_t index = blockIdx.x; index < rows; index += gridDim.x) {
    const Row<QT, KvT> row = LocateRow<QT, KvT>(params, index);
    for (int64_t column = 0; column < row.head_dim; column += kColumnsPerPass) {
      AttendColumns(row, column, s);
    }
  }
}

template <typename QT, typename KvT>
cudaError_t LaunchInstance(const AttentionParams& params, cudaStream_t stream) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(std::min(params.rows(), kMaxGrid)));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, NaiveKernel<QT, KvT>, params, params.rows());
}

template <typename KvT>
cudaError_t LaunchForCache(const AttentionParams& params, cudaStream_t stream) {
  return params.q_dtype == DType::kFloat32 ? LaunchInstance<float, KvT>(params, stream)
                                           : LaunchInstance<KvT, KvT>(params, stream);
}

}  // namespace

std::string NaiveRefusal(const AttentionProblem& problem, ComputeCapability cc) {
  const std::string outside = OutsideContract(problem);
  return outside.empty() ? MissingCode(BuiltArchitectures(), 75, cc) : outside;
}

cudaError_t LaunchNaive(const AttentionParams& params, cudaStream_t stream) {
  return params.kv_dtype == DType::kFloat16 ? LaunchForCache<__half>(params, stream)
                                            : LaunchForCache<__nv_bfloat16>(params, stream);
}

}  // namespace jax_fa::cuda
