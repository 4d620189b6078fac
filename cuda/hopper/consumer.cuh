// A consumer warpgroup: 64 query rows against the KV tiles of their query tile. Scores, weights and
// output stay in registers; only Q, K, V and the finished output pass through shared memory.

#ifndef JAX_FA_CUDA_HOPPER_CONSUMER_CUH_
#define JAX_FA_CUDA_HOPPER_CONSUMER_CUH_

#include <cuda/ptx>

#include "cuda/hopper/config.cuh"
#include "cuda/hopper/epilogue.cuh"
#include "cuda/hopper/pipeline.cuh"
#include "cuda/hopper/rare_paths.cuh"
#include "cuda/hopper/seat.cuh"
#include "cuda/hopper/softmax.cuh"
#include "cuda/hopper/split.cuh"
#include "cuda/ptx/wgmma.cuh"

namespace jax_fa::cuda::hopper {

namespace cptx = ::cuda::ptx;

// Matrix descriptors of panels of rows of 64 columns under the 128-byte swizzle. Groups of 8 rows
// are 1024 bytes apart, which is all the upper half says; the lower half holds the address and,
// where the columns are the operand's M or N dimension (V), the way to the next panel. Address
// arithmetic stays in 32 bits, in uniform registers. PTX ISA, "Matrix descriptor format" of wgmma.
__device__ __forceinline__ uint32_t DescriptorLow(uint32_t address, uint32_t panel_bytes) {
  return (panel_bytes >> 4) << 16 | (address & 0x3FFFF) >> 4;
}

__device__ __forceinline__ uint64_t Descriptor(uint32_t low, uint32_t further_bytes) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  constexpr uint64_t kEightRows = uint64_t{1024 >> 4} << 32;
  return kSwizzle128 | kEightRows | (low + (further_bytes >> 4));
}

// scores = Q . K^T, or their part from the panels kFrom to kTo - 1: 16 columns of the head dim a
// step, 32 bytes of a swizzled row.
template <typename C, int kFrom, int kTo>
__device__ __forceinline__ void IssueScores(float (&scores)[C::kScoreRegisters], uint32_t q_address,
                                            uint32_t k_address) {
  const uint32_t q = DescriptorLow(q_address, 0);
  const uint32_t k = DescriptorLow(k_address, 0);
#pragma unroll
  for (int step = 4 * kFrom; step < 4 * kTo; ++step) {
    const uint64_t q_step = Descriptor(q, step / 4 * C::kQPanelBytes + step % 4 * 32);
    const uint64_t k_step = Descriptor(k, step / 4 * C::kKvPanelBytes + step % 4 * 32);
    ptx::wgmma_ss<typename C::Element>(scores, q_step, k_step, step > 0);
  }
}

// out += P . V: 16 slots a step, 2048 bytes of a panel.
template <typename C>
__device__ __forceinline__ void IssueOutput(float (&out)[C::kOutRegisters],
                                            const uint32_t (&probs)[C::kProbRegisters],
                                            uint32_t v_address) {
  const uint32_t v = DescriptorLow(v_address, C::kKvPanelBytes);
#pragma unroll
  for (int step = 0; step < C::kTileKV / 16; ++step) {
    ptx::wgmma_rs_transposed_b<typename C::Element>(out, &probs[4 * step],
                                                    Descriptor(v, step * 2048));
  }
  ptx::wgmma_commit_group();
}

// Reads the warpgroup's rows of a float32 Q, multiplies and rounds them, and lays them out in
// shared memory as TMA would.
template <typename C>
__device__ __forceinline__ void ConvertQuery(const Seat<C>& seat, uint8_t* q_tile) {
  const KernelParams& params = seat.params;
  constexpr int kRowChunks = C::kHeadDim / 8;
  for (int i = threadIdx.x % kWarpgroup; i < kConsumerRows * kRowChunks; i += kWarpgroup) {
    const int row = kConsumerRows * seat.consumer + i / kRowChunks;
    const int chunk = i % kRowChunks;
    float values[8] = {};
    if (seat.Exists(row) && 8 * chunk < params.head_dim) {
      const float* from =
          static_cast<const float*>(params.q) + seat.GlobalRow(row) * params.head_dim + 8 * chunk;
#pragma unroll
      for (int j = 0; j < 8; ++j) values[j] = __fmul_rn(from[j], params.query_factor);
    }
    uint32_t packed[4];
    PackWeights<typename C::Element>(values, packed);
    *reinterpret_cast<uint4*>(q_tile + SwizzledOffset(C::kQPanelBytes, row, chunk)) =
        make_uint4(packed[0], packed[1], packed[2], packed[3]);
  }
  // Ordinary stores of the whole warpgroup, read by wgmma through the async proxy.
  cptx::fence_proxy_async(cptx::space_shared);
  ptx::barrier_sync(kWarpgroupBarrier + seat.consumer, kWarpgroup);
}

// Frees a Q stage for the producer: this thread has no more use for its Q, and none for the row
// limits of the tile before.
template <typename C>
__device__ __forceinline__ void FreeQStage(SharedStorage<C>& shared, uint32_t stage) {
  ptx::mbarrier_arrive(&shared.q_free[stage]);
}

// Frees a KV stage. One lane speaks for its warp, whose wgmma have been waited for.
template <typename C>
__device__ __forceinline__ void FreeKvStage(SharedStorage<C>& shared, uint32_t stage) {
  if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&shared.kv_free[stage]);
}

// A consumer's life: query tile by query tile, each warpgroup issuing products in its turn.
template <typename C>
__device__ __forceinline__ void ConsumeTiles(SharedStorage<C>& shared, const TensorMaps& maps,
                                             const KernelParams& params, int consumer) {
  const Turns<C::kConsumers> turns(consumer);
  const float score_factor = params.score_factor;
  // Broadcast, as kv_tiles and whole_tiles below, so that the compiler takes what follows from them
  // for uniform: descriptors then stay in uniform registers.
  const uint32_t tiles_base = __shfl_sync(~0u, SharedAddress(&shared), 0);
  const uint32_t q_base = tiles_base + kConsumerPanelBytes * consumer;
  const uint32_t kv_base = tiles_base + static_cast<uint32_t>(offsetof(SharedStorage<C>, kv));
  RingPlace<C::kKvStages> ring;

  for (TileOrder<C> order(params.tiles); !order.Done(); order.Next()) {
    const Seat<C> seat = {shared, params, order.QStage(), order.InfoStage(), consumer};
    int32_t kv_tiles = 0;
    int32_t whole_tiles = 0;
    auto read_info = [&] {
      // Written: by the producer warp (TileInfo, row limits).
      ptx::mbarrier_wait_parity(&shared.info_full[order.QStage()], order.QParity());
      kv_tiles = __shfl_sync(~0u, seat.Tile().kv_tiles, 0);
      whole_tiles = __shfl_sync(~0u, seat.Tile().whole_tiles, 0);
    };
    const uint32_t q_address = q_base + order.QStage() * C::kQBytes;
    if constexpr (!C::kStartsEarly) read_info();
    if constexpr (C::kFloatQuery) {
      ConvertQuery<C>(seat, shared.q[order.QStage()]);
    } else if constexpr (C::kPacksHeads) {
      ZeroMissingRows<C>(seat, shared.q[order.QStage()]);
    }

    RowState rows;
    float scores[C::kScoreRegisters];
    float out[C::kOutRegisters];
    uint32_t probs[C::kProbRegisters];
#pragma unroll
    for (int i = 0; i < C::kOutRegisters; ++i) out[i] = 0.0f;

    // Written: by TMA, or for V of a masked tile by the inspectors.
    auto wait_for_kv = [&] { ptx::mbarrier_wait_parity(&shared.kv_full[ring.stage], ring.parity); };

    // First tile: its largest scores set the rows' shifts. Written, by TMA: the first panels of K0
    // and of consumer 0's Q, or all of both; the other consumers' Q, for which they wait alone (at
    // D = 256 consumer 0 does too, for want of registers for the branch).
    if constexpr (C::kFirstPanels > 0) {
      ptx::mbarrier_wait_parity(&shared.first_panels_full[order.QStage()], order.QParity());
    } else {
      wait_for_kv();
    }
    if constexpr (!C::kFloatQuery && C::kConsumers > 1) {
      if (!C::kStartsEarly || consumer > 0) {
        ptx::mbarrier_wait_parity(&shared.other_q_full[order.QStage()], order.QParity());
      }
    }
    turns.Wait();
    ptx::wgmma_fence();
    const uint32_t k0_address = kv_base + ring.stage * C::kKvBytes;
    if constexpr (C::kFirstPanels > 0) {
      IssueScores<C, 0, C::kFirstPanels>(scores, q_address, k0_address);
      wait_for_kv();       // the other panels
      ptx::wgmma_fence();  // ptxas would put one here itself, and warn
    }
    IssueScores<C, C::kFirstPanels, C::kPanels>(scores, q_address, k0_address);
    ptx::wgmma_commit_group();
    turns.Pass();
    if constexpr (C::kStartsEarly) read_info();
    if (C::kQStages > 1 && order.HasPrevious()) {
      if constexpr (C::kStoresThroughShared) WaitForStore();  // of the tile before: long done
      FreeQStage<C>(shared, order.PreviousQStage());
    }
    ptx::wgmma_wait_group<0>();
    ptx::pin_registers(scores);
    FreeKvStage<C>(shared, ring.stage);
    ring.Advance();
    if (whole_tiles == 0) MaskScores(scores, seat.Visible(), 0);
    StartRows(scores, score_factor, rows);
    PackWeights<typename C::Element>(scores, probs);

    // Step `tile`: the scores of this tile and the output of the one before are multiplied while
    // the other warpgroup does its exponentials, and the other way round.
    //
    // A raised shift reaches the output a step later: what is raised is known while P.V may still
    // write the output, and a wait for it must be the whole warpgroup's, not a raising warp's.
    bool raised = false;
    float factor[2] = {1.0f, 1.0f};
    for (int32_t tile = 1; tile < kv_tiles; ++tile) {
      wait_for_kv();
      const uint32_t k_stage = ring.stage;
      turns.Wait();
      ptx::wgmma_fence();
      IssueScores<C, 0, C::kPanels>(scores, q_address, kv_base + k_stage * C::kKvBytes);
      ptx::wgmma_commit_group();
      ring.Advance();
      if (raised) ScaleOutput<C>(factor, out);
      wait_for_kv();
      const uint32_t v_stage = ring.stage;
      ring.Advance();
      ptx::wgmma_fence();
      IssueOutput<C>(out, probs, kv_base + v_stage * C::kKvBytes);
      turns.Pass();

      ptx::wgmma_wait_group<1>();
      ptx::pin_registers(scores);
      FreeKvStage<C>(shared, k_stage);
      if constexpr (!C::kSoftmaxUnderOutput) {
        ptx::wgmma_wait_group<0>();
        ptx::pin_registers(out);
        FreeKvStage<C>(shared, v_stage);
      }
      if (tile >= whole_tiles) MaskScores(scores, seat.Visible(), tile * C::kTileKV);
      float tile_sum[2] = {0.0f, 0.0f};
      Exponentiate(scores, rows, score_factor, tile_sum);
      // ptxas moves a wait up past arithmetic, but not past this branch, which needs all of it.
      raised = __any_sync(~0u, fmaxf(tile_sum[0], tile_sum[1]) > kRaiseAbove);
      if (raised) RaiseShifts<C>(seat, tile * C::kTileKV, rows, scores, tile_sum, factor);
      if constexpr (C::kSoftmaxUnderOutput) {
        ptx::wgmma_wait_group<0>();
        ptx::pin_registers(out);
        FreeKvStage<C>(shared, v_stage);
      }
      rows.sum[0] = __fadd_rn(rows.sum[0], tile_sum[0]);
      rows.sum[1] = __fadd_rn(rows.sum[1], tile_sum[1]);
      PackWeights<typename C::Element>(scores, probs);
    }

    // One Q stage: the next Q is loaded under this tile's last product and its end, unless the
    // output is to pass through the stage.
    if constexpr (C::kQStages == 1 && !C::kStoresThroughShared) FreeQStage<C>(shared, 0);
    if (raised) ScaleOutput<C>(factor, out);
    wait_for_kv();
    ptx::wgmma_fence();
    IssueOutput<C>(out, probs, kv_base + ring.stage * C::kKvBytes);
    float inverse[2];
    if constexpr (!C::kSharesSlots) FinishSums<C>(seat, rows, inverse);  // under the last product
    ptx::wgmma_wait_group<0>();
    ptx::pin_registers(out);
    FreeKvStage<C>(shared, ring.stage);
    ring.Advance();
    if constexpr (C::kSharesSlots) {
      FinishShare<C>(shared, seat, rows, out);
    } else {
      FinishTile<C>(shared, seat, maps.out, inverse, out);
    }
    if constexpr (C::kQStages == 1 && C::kStoresThroughShared) {
      WaitForStore();
      FreeQStage<C>(shared, 0);
    }
  }
  turns.Finish();
  // Shared memory must outlive the last store's reads of it.
  if constexpr (C::kStoresThroughShared) WaitForStore();
}

}  // namespace jax_fa::cuda::hopper

#endif  // JAX_FA_CUDA_HOPPER_CONSUMER_CUH_
