// The portable kernel's first half: which rows and slots a block works on, and the copies of its
// tiles from global to shared memory. The arithmetic is in kernel.cuh.

#ifndef JAX_FA_CUDA_PORTABLE_STAGING_CUH_
#define JAX_FA_CUDA_PORTABLE_STAGING_CUH_

#include "attention/kv_layout.h"
#include "attention/visible.h"
#include "cuda/portable/config.h"
#include "cuda/tile/convert.h"

namespace jax_fa::cuda::portable {

#ifdef __CUDA_ARCH__
constexpr int kCompiledFor = __CUDA_ARCH__ / 10;
#else
constexpr int kCompiledFor = 90;  // the host pass parses the kernel and generates nothing from it
#endif

template <typename KvT, int kHeadDim>
using DeviceStorage = SharedStorage<KvT, kHeadDim, RowPadding(kCompiledFor)>;

// One block's share of the call.
struct Work {
  int64_t first_row;  // row of q, out and lse of the tile's first token; tokens are q_heads apart
  int64_t sequence;
  int64_t first_token;  // of the sequence
  int64_t head;
  int64_t cache_offset;  // element of K and V where slot 0 of the head lies
  int rows;              // tokens in the tile, 1 .. kTileQ
};

// Last tiles first: with growing positions they are the longest, and a long tile that starts late
// would leave the other multiprocessors idle. Heads run together, so they share K and V in L2.
__device__ inline Work LocateWork(const AttentionParams& params) {
  Work work;
  work.head = blockIdx.x % params.q_heads;
  work.sequence = blockIdx.x / params.q_heads % params.batch;
  const int64_t tiles = (params.q_len + kTileQ - 1) / kTileQ;
  const int64_t tile = tiles - 1 - blockIdx.x / params.q_heads / params.batch;
  const int64_t kv_head = work.head / (params.q_heads / params.kv_heads);
  work.first_token = tile * kTileQ;
  work.first_row = (work.sequence * params.q_len + work.first_token) * params.q_heads + work.head;
  work.cache_offset = CacheOffset(params, work.sequence, kv_head);
  const int64_t left = params.q_len - tile * kTileQ;
  work.rows = left < kTileQ ? static_cast<int>(left) : kTileQ;
  return work;
}

__device__ inline Visible VisibleSlotsOfRow(const AttentionParams& params, const Work& work,
                                            int row) {
  return row < work.rows ? VisibleSlots(params, work.sequence, work.first_token + row)
                         : Visible{0, 0};
}

// The first and the last slot that any row of the tile sees; positions come in any order. Each warp
// computes them for itself, so no shared memory and no barrier is needed.
__device__ inline VisibleBounds BoundsOfTile(const AttentionParams& params, const Work& work) {
  const int lane = threadIdx.x % kWarpSize;
  VisibleBounds bounds;
  for (int row = lane; row < kTileQ; row += kWarpSize) {
    bounds.Add(VisibleSlotsOfRow(params, work, row));
  }
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    bounds.least_lo = min(bounds.least_lo, __shfl_xor_sync(0xffffffffu, bounds.least_lo, distance));
    bounds.most_hi = max(bounds.most_hi, __shfl_xor_sync(0xffffffffu, bounds.most_hi, distance));
  }
  return bounds;
}

// s.q[row][d] = q * q_scale, rounded; zeros in rows past the last token.
template <typename QT, typename KvT, int kHeadDim>
__device__ void StageQ(DeviceStorage<KvT, kHeadDim>& s, const Args& args, const Work& work) {
  const QT* g_q = static_cast<const QT*>(args.params.q) + work.first_row * kHeadDim;
  const int64_t token_pitch = args.params.q_heads * kHeadDim;
#pragma unroll 4
  for (int i = threadIdx.x; i < kTileQ * kHeadDim; i += kThreads) {
    const int row = i / kHeadDim;
    const int d = i % kHeadDim;
    const float q = row < work.rows ? ToFloat(g_q[row * token_pitch + d]) : 0.0f;
    s.q[row][d] = FromFloat<KvT>(q * args.q_scale);
  }
}

// kChunk 16-bit elements, in memory order.
template <bool kAligned>
__device__ __forceinline__ uint4 LoadChunk(const uint16_t* g_chunk) {
  if constexpr (kAligned) {
    return __ldg(reinterpret_cast<const uint4*>(g_chunk));
  } else {
    uint32_t pairs[kChunk / 2];
#pragma unroll
    for (int i = 0; i < kChunk / 2; ++i) {
      pairs[i] = __ldg(g_chunk + 2 * i) | static_cast<uint32_t>(__ldg(g_chunk + 2 * i + 1)) << 16;
    }
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
}

// How the block's threads share a copy of kTileKv rows: chunk `column` of rows first_row,
// first_row + kRowsPerPass, ...
template <int kHeadDim>
struct CopyPlan {
  static constexpr int kChunksPerRow = kHeadDim / kChunk;
  static constexpr int kRowsPerPass = kThreads / kChunksPerRow;
  static constexpr int kPasses = kTileKv / kRowsPerPass;
  static __device__ int FirstRow() { return threadIdx.x / kChunksPerRow; }
  static __device__ int Column() { return threadIdx.x % kChunksPerRow * kChunk; }
};

// s_tile = the tile at g_slots, kTileKv slots of K or V; zeros from row `slots` on, so that what
// the cache holds there is never met, nor read past its end.
template <bool kAligned, typename KvT, int kHeadDim, int kRow>
__device__ __forceinline__ void StageSlots(KvT (*s_tile)[kRow], const uint16_t* g_slots,
                                           int64_t slot_pitch, int slots) {
  using Plan = CopyPlan<kHeadDim>;
  // Copies under way before the first store waits for one. An unaligned copy takes the registers
  // of eight loads, so those go one by one.
  constexpr int kBatch = kAligned ? Plan::kPasses : 1;
#pragma unroll 1
  for (int first = 0; first < Plan::kPasses; first += kBatch) {
    const int first_row = Plan::FirstRow() + first * Plan::kRowsPerPass;
    uint4 r_chunks[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int row = first_row + i * Plan::kRowsPerPass;
      r_chunks[i] = make_uint4(0, 0, 0, 0);
      if (row < slots) {
        r_chunks[i] = LoadChunk<kAligned>(g_slots + row * slot_pitch + Plan::Column());
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int row = first_row + i * Plan::kRowsPerPass;
      *reinterpret_cast<uint4*>(&s_tile[row][Plan::Column()]) = r_chunks[i];
    }
  }
}

// K and V are copied one after the other: both at once would take the registers of the third block
// on a multiprocessor, and it is the other blocks that hide the latency.
template <bool kAligned, typename KvT, int kHeadDim>
__device__ __forceinline__ void StageKv(DeviceStorage<KvT, kHeadDim>& s,
                                        const AttentionParams& params, int64_t offset, int slots) {
  const int64_t slot_pitch = params.kv_heads * kHeadDim;
  const uint16_t* g_k = static_cast<const uint16_t*>(params.k) + offset;
  const uint16_t* g_v = static_cast<const uint16_t*>(params.v) + offset;
  StageSlots<kAligned, KvT, kHeadDim>(s.k, g_k, slot_pitch, slots);
  StageSlots<kAligned, KvT, kHeadDim>(s.v, g_v, slot_pitch, slots);
}

}  // namespace jax_fa::cuda::portable

#endif  // JAX_FA_CUDA_PORTABLE_STAGING_CUH_
