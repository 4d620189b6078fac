// Few query rows of a sequence. A query tile has all query heads of a KV head, so that K and V
// are read once for them: row = head * box_tokens + token. Its KV tiles are shared out over the
// blocks of a cluster: each computes out and log2-sum-exp of its share of the slots, for all rows
// of the tile; then it weighs and adds all shares of some rows, through the cluster's shared
// memory, and stores them. With one block to a cluster, the bits are those of the builds that do
// not split.

#ifndef JAX_FA_CUDA_HOPPER_SPLIT_CUH_
#define JAX_FA_CUDA_HOPPER_SPLIT_CUH_

#include <cooperative_groups.h>

#include <cuda/ptx>

#include "cuda/hopper/config.cuh"
#include "cuda/hopper/epilogue.cuh"
#include "cuda/hopper/pipeline.cuh"
#include "cuda/hopper/rare_paths.cuh"
#include "cuda/hopper/seat.cuh"
#include "cuda/hopper/softmax.cuh"
#include "cuda/ptx/warp.cuh"

namespace jax_fa::cuda::hopper {

namespace cptx = ::cuda::ptx;

// Makes the rows of a 16-bit Q that its box does not fill zeros: what shared memory holds might
// send them down the rare paths with each tile.
template <typename C>
__device__ __forceinline__ void ZeroMissingRows(const Seat<C>& seat, uint8_t* q_tile) {
  constexpr int kRowChunks = C::kHeadDim / 8;
  const int filled = seat.params.group.value * seat.params.box_tokens.value;
  if (filled == kConsumerRows) return;
  for (int i = threadIdx.x % kWarpgroup; i < (kConsumerRows - filled) * kRowChunks;
       i += kWarpgroup) {
    const int row = kConsumerRows * seat.consumer + filled + i / kRowChunks;
    const int offset = SwizzledOffset(C::kQPanelBytes, row, i % kRowChunks);
    *reinterpret_cast<uint4*>(q_tile + offset) = make_uint4(0, 0, 0, 0);
  }
  // Ordinary stores of the whole warpgroup, read by wgmma through the async proxy.
  cptx::fence_proxy_async(cptx::space_shared);
  ptx::barrier_sync(kWarpgroupBarrier + seat.consumer, kWarpgroup);
}

// What a block found in its share of the slots, in shared memory. Eight columns more than there
// are: lanes that store columns of four neighbouring rows then meet different banks.
template <typename C>
struct ShareOfRows {
  float out[C::kTileQ][C::kHeadDim + 8];
  float log2_sum[C::kTileQ];  // -inf: the row sees none of it
};

// The weighted sum of row `row` over the shares of all blocks of the cluster, by a warp.
template <typename C>
__device__ __forceinline__ void MergeRow(const Seat<C>& seat, ShareOfRows<C>& mine, int row) {
  namespace cg = ::cooperative_groups;
  constexpr int kColumns = C::kHeadDim / 32;
  using Vector = std::conditional_t<kColumns == 4, float4, float2>;
  static_assert(sizeof(Vector) == kColumns * sizeof(float), "one vector load a lane and share");
  if (!seat.Exists(row)) return;
  const KernelParams& params = seat.params;
  const cg::cluster_group cluster = cg::this_cluster();
  const int blocks = ClusterBlocks();
  const int lane = threadIdx.x % 32;
  // Lane i holds the weight of share i, relative to the largest; a row that no share sees has none.
  const float log2_sum =
      lane < blocks ? cluster.map_shared_rank(&mine, lane)->log2_sum[row] : -INFINITY;
  float largest = log2_sum;
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
  }
  const float shift = largest == -INFINITY ? 0.0f : largest;
  const float weight = blocks == 1 ? 1.0f : ptx::exp2_approx(__fsub_rn(log2_sum, shift));
  float total = 0.0f;
  alignas(16) float merged[kColumns];
  for (int block = 0; block < blocks; ++block) {
    const Vector part = *reinterpret_cast<const Vector*>(
        &cluster.map_shared_rank(&mine, block)->out[row][kColumns * lane]);
    const float* parts = reinterpret_cast<const float*>(&part);
    const float share = __shfl_sync(~0u, weight, block);
    total = __fadd_rn(total, share);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      // An infinite element of V that a row sees has a positive weight, however small.
      const float term = share == 0.0f && isinf(parts[i]) ? parts[i] : __fmul_rn(share, parts[i]);
      merged[i] = block == 0 ? term : __fadd_rn(merged[i], term);
    }
  }
  const float inverse = Inverse(total);
#pragma unroll
  for (int i = 0; i < kColumns; ++i) merged[i] = __fmul_rn(merged[i], inverse);
  const int column = kColumns * lane;
  if (column < params.head_dim) {
    const int64_t at = seat.GlobalRow(row) * params.head_dim + column;
    if constexpr (C::kFloatQuery) {
      *reinterpret_cast<Vector*>(static_cast<float*>(params.out) + at) =
          *reinterpret_cast<const Vector*>(merged);
    } else {
      alignas(8) uint32_t packed[kColumns / 2];
      PackWeights<typename C::Element>(merged, packed);
      using Packed = std::conditional_t<kColumns == 4, uint2, uint32_t>;
      *reinterpret_cast<Packed*>(static_cast<typename C::Element*>(params.out) + at) =
          *reinterpret_cast<const Packed*>(packed);
    }
  }
  if (params.lse != nullptr && lane == 0) {
    const float merged_log2_sum =
        blocks == 1 ? log2_sum : __fadd_rn(ptx::log2_approx(total), shift);
    params.lse[seat.GlobalRow(row)] = __fmul_rn(merged_log2_sum, kLn2);
  }
}

// The end of a block's share. Its result goes where the KV tiles were, which are all used up.
template <typename C>
__device__ __forceinline__ void FinishShare(SharedStorage<C>& shared, const Seat<C>& seat,
                                            const RowState& rows, float (&out)[C::kOutRegisters]) {
  static_assert(sizeof(ShareOfRows<C>) <= sizeof(shared.kv),
                "a share fits where the KV tiles were");
  auto& share = *reinterpret_cast<ShareOfRows<C>*>(shared.kv);
  if (seat.Tile().poisoned != 0) {
    AddUnfiniteSlots<C>(seat, out);
  }
  float inverse[2];
  float log2_sum[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const bool empty = seat.Visible()[8 * r] == 0;
    const float total = QuadSum(rows.sum[r]);
    inverse[r] = Inverse(total);
    log2_sum[r] = empty ? -INFINITY : Log2Sum(total, rows.negative_shift[r]);
  }
  FinishRows<C>(seat, inverse, out);
  // The other warps' products may still read the last tiles.
  ptx::barrier_sync(kConsumersBarrier, C::kConsumerThreads);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = seat.Row() + 8 * r;
#pragma unroll
    for (int i = 0; i < C::kOutRegisters / 4; ++i) {
      *reinterpret_cast<float2*>(&share.out[row][8 * i + 2 * (threadIdx.x % 4)]) =
          make_float2(out[4 * i + 2 * r], out[4 * i + 2 * r + 1]);
    }
    if (threadIdx.x % 4 == 0) share.log2_sum[row] = log2_sum[r];
  }
  // Written: each block's share, by its consumers, who read it next. (Producers may have exited:
  // the barrier counts threads that have not.)
  cptx::barrier_cluster_arrive(cptx::sem_release);
  cptx::barrier_cluster_wait(cptx::sem_acquire);
  const int first_row = C::kTileQ * ClusterRank() / ClusterBlocks();
  const int end_row = C::kTileQ * (ClusterRank() + 1) / ClusterBlocks();
  for (int row = first_row + threadIdx.x / 32 - kWarpgroup / 32; row < end_row;
       row += C::kConsumerThreads / 32) {
    MergeRow<C>(seat, share, row);
  }
  // A block's shared memory must outlive the other blocks' reads of it.
  cptx::barrier_cluster_arrive(cptx::sem_release);
  cptx::barrier_cluster_wait(cptx::sem_acquire);
}

}  // namespace jax_fa::cuda::hopper

#endif  // JAX_FA_CUDA_HOPPER_SPLIT_CUH_
