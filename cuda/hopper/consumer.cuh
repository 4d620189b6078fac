// A consumer warpgroup: 64 query rows against the KV tiles of their query tile. Scores, weights and
// output stay in registers; only Q, K, V and the finished output pass through shared memory.

#ifndef JAX_FA_CUDA_HOPPER_CONSUMER_CUH_
#define JAX_FA_CUDA_HOPPER_CONSUMER_CUH_

#include <cuda/ptx>

#include "cuda/hopper/cap.cuh"
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

// A consumer's end of the ring of K and V tiles, which it reads in the order K0 K1 V0 K2 V1 ..
template <typename C>
struct KvReader {
  SharedStorage<C>& shared;
  uint32_t base;  // address of the ring's first stage
  RingPlace<C::kKvStages> place;

  // Written: by TMA, or for V of a masked tile by the inspectors. Without it a tile is multiplied
  // before it is there.
  __device__ void Wait() const {
    ptx::mbarrier_wait_parity(&shared.kv_full[place.stage], place.parity);
  }
  __device__ uint32_t Address() const { return base + place.stage * C::kKvBytes; }
  // Goes on to the next tile; returns the stage of this one, which is to be freed.
  __device__ uint32_t Take() {
    const uint32_t stage = place.stage;
    place.Advance();
    return stage;
  }
};

// What a thread holds of a query tile, in registers.
template <typename C>
struct TileRegisters {
  RowState rows;
  float scores[C::kScoreRegisters];  // then the weights
  float out[C::kOutRegisters];
  uint32_t probs[C::kProbRegisters];
  // A raised shift reaches the output a step later: what is raised is known while P.V may still
  // write the output, and a wait for it must be the whole warpgroup's, not a raising warp's.
  bool raised = false;
  float factor[2] = {1.0f, 1.0f};
};

// The KV tiles of a query tile, as the producer describes them. Broadcast, so that the compiler
// takes what follows from them for uniform: descriptors then stay in uniform registers.
struct KvTiles {
  int32_t count = 0;
  int32_t whole_begin =
      0;  // of these, those in [whole_begin, whole_end) are seen whole by every row
  int32_t whole_end = 0;
  int32_t last_start = 0;  // the last in which a row sees its first slot

  __device__ bool IsMasked(int32_t tile) const { return tile < whole_begin || tile >= whole_end; }
};

template <typename C>
__device__ __forceinline__ KvTiles ReadInfo(SharedStorage<C>& shared, const Seat<C>& seat,
                                            uint32_t parity) {
  // Written: by the producer warp (TileInfo, row limits).
  ptx::mbarrier_wait_parity(&shared.info_full[seat.q_stage], parity);
  KvTiles tiles;
  tiles.count = __shfl_sync(~0u, seat.Tile().kv_tiles, 0);
  tiles.whole_end = __shfl_sync(~0u, seat.Tile().whole_tiles, 0);
  if constexpr (C::kHasBounds) {
    tiles.whole_begin = __shfl_sync(~0u, shared.lower.whole_begin[seat.info_stage], 0);
    tiles.last_start = __shfl_sync(~0u, shared.lower.last_start[seat.info_stage], 0);
  }
  return tiles;
}

// Scores as the softmax takes them: capped, and -inf where a row does not see the slot.
template <typename C>
__device__ __forceinline__ void PrepareScores(const Seat<C>& seat, int32_t tile, bool masked,
                                              float (&scores)[C::kScoreRegisters]) {
  if constexpr (C::kHasCap) CapScores(scores, seat.params);
  if (!masked) return;
  if constexpr (C::kHasBounds) {
    MaskScores(scores, seat.Lo(), seat.Visible(), tile * C::kTileKV);
  } else {
    MaskScores(scores, seat.Visible(), tile * C::kTileKV);
  }
}

// Issues the first scores. Written, by TMA: the first panels of K0 and of consumer 0's Q, or all of
// both; the other consumers' Q, for which they wait alone (at D = 256 consumer 0 does too, for want
// of registers for the branch).
template <typename C>
__device__ __forceinline__ void IssueFirstScores(const Seat<C>& seat, const KvReader<C>& kv,
                                                 uint32_t q_address, uint32_t q_parity,
                                                 const Turns<C::kConsumers>& turns,
                                                 float (&scores)[C::kScoreRegisters]) {
  SharedStorage<C>& shared = kv.shared;
  if constexpr (C::kFirstPanels > 0) {
    ptx::mbarrier_wait_parity(&shared.first_panels_full[seat.q_stage], q_parity);
  } else {
    kv.Wait();
  }
  if constexpr (!C::kFloatQuery && C::kConsumers > 1) {
    if (!C::kStartsEarly || seat.consumer > 0) {
      ptx::mbarrier_wait_parity(&shared.other_q_full[seat.q_stage], q_parity);
    }
  }
  turns.Wait();
  ptx::wgmma_fence();
  const uint32_t k0_address = kv.Address();
  if constexpr (C::kFirstPanels > 0) {
    IssueScores<C, 0, C::kFirstPanels>(scores, q_address, k0_address);
    kv.Wait();           // the other panels
    ptx::wgmma_fence();  // ptxas would put one here itself, and warn
  }
  IssueScores<C, C::kFirstPanels, C::kPanels>(scores, q_address, k0_address);
  ptx::wgmma_commit_group();
  turns.Pass();
}

// Step `tile`: the scores of this tile and the output of the one before are multiplied while the
// other warpgroup does its exponentials, and the other way round.
template <typename C>
__device__ __forceinline__ void StepTile(const Seat<C>& seat, KvReader<C>& kv, uint32_t q_address,
                                         const Turns<C::kConsumers>& turns, const KvTiles& tiles,
                                         int32_t tile, TileRegisters<C>& r) {
  SharedStorage<C>& shared = kv.shared;
  const float score_factor = seat.params.score_factor;
  kv.Wait();
  const uint32_t k_address = kv.Address();
  turns.Wait();
  ptx::wgmma_fence();
  IssueScores<C, 0, C::kPanels>(r.scores, q_address, k_address);
  ptx::wgmma_commit_group();
  const uint32_t k_stage = kv.Take();
  if (r.raised) ScaleOutput<C>(r.factor, r.out);
  kv.Wait();
  const uint32_t v_address = kv.Address();
  const uint32_t v_stage = kv.Take();
  ptx::wgmma_fence();
  IssueOutput<C>(r.out, r.probs, v_address);
  turns.Pass();

  ptx::wgmma_wait_group<1>();
  ptx::pin_registers(r.scores);
  FreeKvStage<C>(shared, k_stage);
  auto finish_output = [&] {
    ptx::wgmma_wait_group<0>();
    ptx::pin_registers(r.out);
    FreeKvStage<C>(shared, v_stage);
  };
  if constexpr (!C::kSoftmaxUnderOutput) finish_output();
  PrepareScores<C>(seat, tile, tiles.IsMasked(tile), r.scores);
  if constexpr (C::kHasBounds) {
    if (tile <= tiles.last_start) {
      StartLateRows(r.scores, seat.Lo(), tile, C::kTileKV, score_factor, r.rows);
    }
  }
  float tile_sum[2] = {0.0f, 0.0f};
  Exponentiate(r.scores, r.rows, score_factor, tile_sum);
  // ptxas moves a wait up past arithmetic, but not past this branch, which needs all of it.
  r.raised = __any_sync(~0u, fmaxf(tile_sum[0], tile_sum[1]) > kRaiseAbove);
  if (r.raised) RaiseShifts<C>(seat, tile * C::kTileKV, r.rows, r.scores, tile_sum, r.factor);
  if constexpr (C::kSoftmaxUnderOutput) finish_output();
  r.rows.sum[0] = __fadd_rn(r.rows.sum[0], tile_sum[0]);
  r.rows.sum[1] = __fadd_rn(r.rows.sum[1], tile_sum[1]);
  PackWeights<typename C::Element>(r.scores, r.probs);
}

// The last product, and the query tile's end under and behind it.
template <typename C>
__device__ __forceinline__ void FinishProducts(const Seat<C>& seat, KvReader<C>& kv,
                                               const CUtensorMap& out_map, TileRegisters<C>& r) {
  if (r.raised) ScaleOutput<C>(r.factor, r.out);
  kv.Wait();
  ptx::wgmma_fence();
  IssueOutput<C>(r.out, r.probs, kv.Address());
  float inverse[2];
  if constexpr (!C::kSharesSlots) FinishSums<C>(seat, r.rows, inverse);  // under the last product
  ptx::wgmma_wait_group<0>();
  ptx::pin_registers(r.out);
  FreeKvStage<C>(kv.shared, kv.Take());
  if constexpr (C::kSharesSlots) {
    FinishShare<C>(kv.shared, seat, r.rows, r.out);
  } else {
    FinishTile<C>(kv.shared, seat, out_map, inverse, r.out);
  }
}

// A consumer's life: query tile by query tile, each warpgroup issuing products in its turn.
template <typename C>
__device__ __forceinline__ void ConsumeTiles(SharedStorage<C>& shared, const TensorMaps& maps,
                                             const KernelParams& params, int consumer) {
  const Turns<C::kConsumers> turns(consumer);
  // Broadcast for the reason that KvTiles are.
  const uint32_t tiles_base = __shfl_sync(~0u, SharedAddress(&shared), 0);
  const uint32_t q_base = tiles_base + kConsumerPanelBytes * consumer;
  KvReader<C> kv = {shared, tiles_base + static_cast<uint32_t>(offsetof(SharedStorage<C>, kv)), {}};

  for (TileOrder<C> order(params.tiles); !order.Done(); order.Next()) {
    const Seat<C> seat = {shared, params, order.QStage(), order.InfoStage(), consumer};
    const uint32_t q_address = q_base + order.QStage() * C::kQBytes;
    KvTiles tiles;
    if constexpr (!C::kStartsEarly) tiles = ReadInfo<C>(shared, seat, order.QParity());
    if constexpr (C::kFloatQuery) {
      ConvertQuery<C>(seat, shared.q[order.QStage()]);
    } else if constexpr (C::kPacksHeads) {
      ZeroMissingRows<C>(seat, shared.q[order.QStage()]);
    }

    TileRegisters<C> r;
#pragma unroll
    for (int i = 0; i < C::kOutRegisters; ++i) r.out[i] = 0.0f;

    // The first tile's largest scores set the rows' shifts.
    IssueFirstScores<C>(seat, kv, q_address, order.QParity(), turns, r.scores);
    if constexpr (C::kStartsEarly) tiles = ReadInfo<C>(shared, seat, order.QParity());
    if (C::kQStages > 1 && order.HasPrevious()) {
      if constexpr (C::kStoresThroughShared) WaitForStore();  // of the tile before: long done
      FreeQStage<C>(shared, order.PreviousQStage());
    }
    ptx::wgmma_wait_group<0>();
    ptx::pin_registers(r.scores);
    FreeKvStage<C>(shared, kv.Take());
    PrepareScores<C>(seat, 0, tiles.IsMasked(0), r.scores);
    StartRows(r.scores, params.score_factor, r.rows);
    PackWeights<typename C::Element>(r.scores, r.probs);

    for (int32_t tile = 1; tile < tiles.count; ++tile) {
      StepTile<C>(seat, kv, q_address, turns, tiles, tile, r);
    }

    // One Q stage: the next Q is loaded under this tile's last product and its end, unless the
    // output is to pass through the stage.
    if constexpr (C::kQStages == 1 && !C::kStoresThroughShared) FreeQStage<C>(shared, 0);
    FinishProducts<C>(seat, kv, maps.out, r);
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
