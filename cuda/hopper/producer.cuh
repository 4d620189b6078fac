// The first warpgroup: one warp issues every TMA load, the others inspect V in masked tiles.

#ifndef JAX_FA_CUDA_HOPPER_PRODUCER_CUH_
#define JAX_FA_CUDA_HOPPER_PRODUCER_CUH_

#include <cuda/ptx>

#include "attention/visible.h"
#include "cuda/hopper/config.cuh"
#include "cuda/hopper/pipeline.cuh"
#include "cuda/hopper/tiles.cuh"

namespace jax_fa::cuda::hopper {

namespace cptx = ::cuda::ptx;

// Where a K or V tile begins in the cache.
struct KvOrigin {
  int32_t slot;
  int32_t kv_head;
  int32_t sequence;
};

// Loads one K or V tile into the ring's next stage, once its last reader has freed it. The barrier
// that its arrival completes is that stage's of `arrivals`.
template <typename C>
__device__ __forceinline__ void LoadKvTile(SharedStorage<C>& shared, RingPlace<C::kKvStages>& ring,
                                           const CUtensorMap& map, const KvOrigin& origin,
                                           uint64_t (&arrivals)[C::kKvStages]) {
  // Written: by the consumers' warps. Without it the copy overwrites a tile being multiplied.
  ptx::mbarrier_wait_parity(&shared.kv_free[ring.stage], ring.parity ^ 1);
  // By thread 0: ptxas does not know that it is one lane, and loops around each copy. Copies so
  // spaced gain 1-2 % from 4k on (docs/hopper.md).
  if (threadIdx.x == 0) {
    uint64_t* full = &arrivals[ring.stage];
    cptx::mbarrier_arrive_expect_tx(cptx::sem_release, cptx::scope_cta, cptx::space_shared, full,
                                    C::kKvBytes);
#pragma unroll
    for (int panel = 0; panel < C::kPanels; ++panel) {
      const int32_t coordinates[4] = {panel * kSwizzleColumns, origin.slot, origin.kv_head,
                                      origin.sequence};
      cptx::cp_async_bulk_tensor(cptx::space_cluster, cptx::space_global,
                                 &shared.kv[ring.stage][panel * C::kKvPanelBytes], &map,
                                 coordinates, full);
    }
  }
  ring.Advance();
}

// The positions of a query tile's rows: of rows lane, lane + 32, .. in each lane of the producer
// warp, and -1, which sees nothing, for rows that do not exist.
template <typename C>
struct TilePositions {
  int32_t of_row[C::kTileQ / 32];
  int32_t start_of_row[C::kTileQ / 32];  // where rows have lower bounds

  // What row 32 * i + lane sees.
  __device__ Visible Sees(const KernelParams& params, int i) const {
    if constexpr (C::kHasBounds) {
      return VisibleSlots(of_row[i], start_of_row[i], params.window, params.kv_len);
    }
    return VisibleSlots(of_row[i], params.kv_len);
  }
};

template <typename C>
__device__ __forceinline__ TilePositions<C> ReadPositions(const KernelParams& params,
                                                          const TilePlace& place) {
  const int32_t* positions = params.positions + static_cast<int64_t>(place.sequence) * params.q_len;
  TilePositions<C> tile;
#pragma unroll
  for (int i = 0; i < C::kTileQ / 32; ++i) {
    const int row = 32 * i + threadIdx.x % 32;
    const int32_t token = place.q_start + PlaceOfRow<C>(params, row).token;
    const bool exists = RowExists<C>(params, place.q_start, row);
    tile.of_row[i] = exists ? positions[token] : -1;
    if constexpr (C::kHasBounds) {
      const int64_t sequence = place.sequence;
      const int64_t at = params.starts_by_row ? sequence * params.q_len + token : sequence;
      tile.start_of_row[i] = exists && params.starts != nullptr ? params.starts[at] : 0;
    }
  }
  return tile;
}

// A consumer's part of a 16-bit Q.
struct QueryBox {
  int32_t tokens = kConsumerRows;
  int panel_bytes = kConsumerPanelBytes;
};

// Loads what a query tile begins with, in the order in which it is used: the kFirstPanels of
// consumer 0's Q and of K0, the other panels of both, the other consumers' Q. Without lower
// bounds slot 0 is visible to every row that sees any, so K0 is wanted whatever the positions are;
// otherwise K0 is the first KV tile of the block's share, or that some row sees. All lanes of the
// producer warp call it; one loads.
template <typename C>
__device__ __forceinline__ void LoadTileStart(SharedStorage<C>& shared, uint32_t q_stage,
                                              uint32_t kv_stage, const TensorMaps& maps,
                                              const TilePlace& place, const QueryBox& box = {},
                                              int32_t first_slot = 0) {
  if (!ptx::elect_sync()) return;
  auto load_q = [&](int consumer, int panel, uint64_t* full) {
    const int32_t coordinates[4] = {panel * kSwizzleColumns, place.q_start + box.tokens * consumer,
                                    place.q_head, place.sequence};
    uint8_t* to = &shared.q[q_stage][panel * C::kQPanelBytes + consumer * kConsumerPanelBytes];
    cptx::cp_async_bulk_tensor(cptx::space_cluster, cptx::space_global, to, &maps.q, coordinates,
                               full);
  };
  auto load_panels = [&](int from, int to, uint64_t* full) {
    const int bytes = C::kKvPanelBytes + (C::kFloatQuery ? 0 : box.panel_bytes);
    cptx::mbarrier_arrive_expect_tx(cptx::sem_release, cptx::scope_cta, cptx::space_shared, full,
                                    (to - from) * bytes);
#pragma unroll
    for (int panel = from; panel < to; ++panel) {
      if constexpr (!C::kFloatQuery) load_q(0, panel, full);
      const int32_t coordinates[4] = {panel * kSwizzleColumns, first_slot, place.kv_head,
                                      place.kv_sequence};
      cptx::cp_async_bulk_tensor(cptx::space_cluster, cptx::space_global,
                                 &shared.kv[kv_stage][panel * C::kKvPanelBytes], &maps.k,
                                 coordinates, full);
    }
  };
  if constexpr (C::kFirstPanels > 0) {
    load_panels(0, C::kFirstPanels, &shared.first_panels_full[q_stage]);
  }
  load_panels(C::kFirstPanels, C::kPanels, &shared.kv_full[kv_stage]);
  if constexpr (!C::kFloatQuery && C::kConsumers > 1) {
    uint64_t* full = &shared.other_q_full[q_stage];
    cptx::mbarrier_arrive_expect_tx(cptx::sem_release, cptx::scope_cta, cptx::space_shared, full,
                                    (C::kConsumers - 1) * C::kPanels * box.panel_bytes);
#pragma unroll
    for (int consumer = 1; consumer < C::kConsumers; ++consumer) {
#pragma unroll
      for (int panel = 0; panel < C::kPanels; ++panel) load_q(consumer, panel, full);
    }
  }
}

// A block's share of the slots of a query tile, in whole KV tiles.
struct KvShare {
  int32_t first_slot = 0;
  int32_t slots = 0;  // may be 0: the block then works on what lies behind, which no row sees
};

template <typename C>
__device__ __forceinline__ KvShare ShareOfBlock(const KernelParams& params,
                                                const TilePositions<C>& positions) {
  int32_t most = 0;
#pragma unroll
  for (int i = 0; i < C::kTileQ / 32; ++i) {
    most = max(most, positions.Sees(params, i).hi);
  }
  const int32_t tiles = (__reduce_max_sync(~0u, most) + C::kTileKV - 1) / C::kTileKV;
  // Fewer than 2^24 tiles, so that the products stay in 32 bits.
  const int32_t begin = tiles * ClusterRank() / ClusterBlocks();
  const int32_t end = tiles * (ClusterRank() + 1) / ClusterBlocks();
  KvShare share;
  share.first_slot = begin * C::kTileKV;
  share.slots = (end - begin) * C::kTileKV;
  return share;
}

// Where a query tile's KV tiles begin in the cache, and which is the first that all rows see whole.
struct KvStart {
  int32_t slot = 0;
  int32_t whole_begin = 0;
};

// What the tile's positions decide: the slots each row sees, which it stores, and the KV tiles to
// visit, all within the block's share where KV tiles are split. All lanes of the producer warp call
// it.
template <typename C>
__device__ __forceinline__ TileInfo DescribeTile(SharedStorage<C>& shared, uint32_t stage,
                                                 const KernelParams& params, const TilePlace& place,
                                                 const TilePositions<C>& positions,
                                                 const KvShare& share = {}) {
  TileInfo info;
  info.q_start = place.q_start;
  info.q_head = place.q_head;
  info.kv_sequence = place.kv_sequence;
  info.poisoned = 0;
  int32_t most = 0;
  int32_t least = params.kv_len;
#pragma unroll
  for (int i = 0; i < C::kTileQ / 32; ++i) {
    int32_t visible = positions.Sees(params, i).hi;
    if constexpr (C::kSharesSlots) visible = min(max(visible - share.first_slot, 0), share.slots);
    shared.visible[stage][32 * i + threadIdx.x % 32] = visible;
    // Empty rows bound nothing: their output is zero whatever they compute.
    most = max(most, visible);
    if (visible > 0) least = min(least, visible);
  }
  info.kv_end = __reduce_max_sync(~0u, most);
  info.kv_tiles = max((info.kv_end + C::kTileKV - 1) / C::kTileKV, 1);
  info.whole_tiles = min(__reduce_min_sync(~0u, least) / C::kTileKV, info.kv_tiles);
  if (threadIdx.x == 0) {
    shared.tile[stage] = info;
    shared.q_sequence[stage] = place.sequence;
    if constexpr (C::kSharesSlots) shared.first_slot = share.first_slot;
  }
  return info;
}

// The same for rows with lower bounds: KV tiles, and slots, are counted from the first that some
// row sees.
template <typename C>
__device__ __forceinline__ TileInfo DescribeBoundedTile(SharedStorage<C>& shared, uint32_t stage,
                                                        const KernelParams& params,
                                                        const TilePlace& place,
                                                        const TilePositions<C>& positions,
                                                        KvStart* start) {
  VisibleBounds bounds;
#pragma unroll
  for (int i = 0; i < C::kTileQ / 32; ++i) bounds.Add(positions.Sees(params, i));
  bounds.least_lo = __reduce_min_sync(~0u, bounds.least_lo);
  bounds.most_lo = __reduce_max_sync(~0u, bounds.most_lo);
  bounds.least_hi = __reduce_min_sync(~0u, bounds.least_hi);
  bounds.most_hi = __reduce_max_sync(~0u, bounds.most_hi);
  const KvSpan span = bounds.Span(C::kTileKV);
  start->slot = span.first * C::kTileKV;
  start->whole_begin = span.whole_begin - span.first;
#pragma unroll
  for (int i = 0; i < C::kTileQ / 32; ++i) {
    const Visible row = positions.Sees(params, i);
    const int at = 32 * i + threadIdx.x % 32;
    // An empty row computes as if it saw everything, from the first tile on.
    shared.lower.lo[stage][at] = row.IsEmpty() ? 0 : row.lo - start->slot;
    shared.visible[stage][at] = row.IsEmpty() ? 0 : row.hi - start->slot;
  }
  TileInfo info;
  info.q_start = place.q_start;
  info.q_head = place.q_head;
  info.kv_sequence = place.kv_sequence;
  info.poisoned = 0;
  info.kv_end = bounds.most_hi - start->slot;
  info.kv_tiles = max(span.end - span.first, 1);
  info.whole_tiles = span.whole_end - span.first;
  if (threadIdx.x == 0) {
    shared.tile[stage] = info;
    shared.q_sequence[stage] = place.sequence;
    shared.lower.first_slot[stage] = start->slot;
    shared.lower.whole_begin[stage] = start->whole_begin;
    shared.lower.last_start[stage] = bounds.most_lo / C::kTileKV - span.first;
  }
  return info;
}

// The loads of a query tile after its Q and K0: K1 V0 K2 V1 .. V(n-1), which is the order in which
// the consumers use them, so that one ring serves both K and V.
template <typename C>
__device__ __forceinline__ void LoadTileRest(SharedStorage<C>& shared,
                                             RingPlace<C::kKvStages>& ring, const TensorMaps& maps,
                                             const TilePlace& place, const TileInfo& info,
                                             const KvStart& start) {
  for (int32_t tile = 0; tile < info.kv_tiles; ++tile) {
    const int32_t slot = start.slot + tile * C::kTileKV;
    if (tile + 1 < info.kv_tiles) {
      LoadKvTile<C>(shared, ring, maps.k, {slot + C::kTileKV, place.kv_head, place.kv_sequence},
                    shared.kv_full);
    }
    // A masked tile's V goes to the inspectors, who pass it on.
    LoadKvTile<C>(
        shared, ring, maps.v, {slot, place.kv_head, place.kv_sequence},
        tile >= start.whole_begin && tile < info.whole_tiles ? shared.kv_full : shared.v_raw);
  }
}

// Of the block's first tile, the kernel has read the positions, and loaded Q and K0 where these lie
// at slot 0.
template <typename C>
__device__ __forceinline__ void ProduceTiles(SharedStorage<C>& shared, const TensorMaps& maps,
                                             const KernelParams& params,
                                             TilePositions<C> positions) {
  RingPlace<C::kKvStages> ring;
  for (TileOrder<C> order(params.tiles); !order.Done(); order.Next()) {
    const TilePlace place = PlaceOfTile<C>(params, order.Index());
    if (order.HasPrevious()) {
      positions = ReadPositions<C>(params, place);
      // Written: by every thread that reads this stage's Q or stores from it, or reads the TileInfo
      // and row limits of two tiles ago.
      ptx::mbarrier_wait_parity(&shared.q_free[order.QStage()], order.QParity() ^ 1);
      // Written: by the consumers' warps. Without it the copy overwrites a tile being multiplied.
      ptx::mbarrier_wait_parity(&shared.kv_free[ring.stage], ring.parity ^ 1);
      if constexpr (C::kStartsAtSlot0) {
        LoadTileStart<C>(shared, order.QStage(), ring.stage, maps, place);
      }
    }
    TileInfo info;
    KvStart start;
    if constexpr (C::kStartsAtSlot0) {
      info = DescribeTile<C>(shared, order.InfoStage(), params, place, positions);
    } else {
      info = DescribeBoundedTile<C>(shared, order.InfoStage(), params, place, positions, &start);
      LoadTileStart<C>(shared, order.QStage(), ring.stage, maps, place, {}, start.slot);
    }
    ring.Advance();
    ptx::mbarrier_arrive(&shared.info_full[order.QStage()]);  // each lane for what it wrote
    LoadTileRest<C>(shared, ring, maps, place, info, start);
  }
}

// The same where KV tiles are split: one query tile, whose positions say where its K0 lies.
template <typename C>
__device__ __forceinline__ void ProduceShare(SharedStorage<C>& shared, const TensorMaps& maps,
                                             const KernelParams& params, const TilePlace& place,
                                             const TilePositions<C>& positions) {
  RingPlace<C::kKvStages> ring;
  const KvShare share = ShareOfBlock<C>(params, positions);
  const TileInfo info = DescribeTile<C>(shared, 0, params, place, positions, share);
  ptx::mbarrier_arrive(&shared.info_full[0]);  // each lane for what it wrote
  const int32_t tokens = params.box_tokens.value;
  const QueryBox box = {tokens, params.group.value * tokens * 2 * kSwizzleColumns};
  LoadTileStart<C>(shared, 0, 0, maps, place, box, share.first_slot);
  ring.Advance();
  LoadTileRest<C>(shared, ring, maps, place, info, {share.first_slot, 0});
}

// A row's probability for a slot that it does not see is 0, and 0 times a finite V is nothing. So
// in masked tiles the inspectors make V finite, and say whether a slot that some row sees was not;
// the consumers then add what such slots hold to the rows that see them (AddUnfiniteSlots).
template <typename C>
__device__ __forceinline__ void InspectVTile(SharedStorage<C>& shared, uint32_t stage, int thread,
                                             TileInfo& info, int32_t visible_rows) {
  using Pair =
      std::conditional_t<std::is_same_v<typename C::Element, __half>, __half2, __nv_bfloat162>;
  constexpr int kThreads = 32 * C::kInspectorWarps;
  constexpr int kChunks = C::kKvBytes / 16;
  constexpr uint32_t kExponent = std::is_same_v<typename C::Element, __half> ? 0x7C00 : 0x7F80;
  uint4* chunks = reinterpret_cast<uint4*>(shared.kv[stage]);
  const Pair zero = {typename C::Element(0.0f), typename C::Element(0.0f)};
  Pair seen = zero;  // stays 0 as long as all is finite: 0 * x is NaN otherwise
#pragma unroll 4
  for (int i = thread; i < kChunks; i += kThreads) {
    uint4 chunk = chunks[i];
    const Pair* pairs = reinterpret_cast<const Pair*>(&chunk);
#pragma unroll
    for (int j = 0; j < 4; ++j) seen = __hfma2(pairs[j], zero, seen);
  }
  bool poisoned = false;
  if (!__hbeq2(seen, zero)) {
    for (int i = thread; i < kChunks; i += kThreads) {
      const int row = i % (C::kTileKV * 8) / 8;  // 8 chunks of 16 bytes in a panel's row
      uint16_t* elements = reinterpret_cast<uint16_t*>(&chunks[i]);
      for (int j = 0; j < 8; ++j) {
        if ((elements[j] & kExponent) != kExponent) continue;
        elements[j] = 0;
        poisoned |= row < visible_rows;
      }
    }
  }
  // Zeros by ordinary stores, read by wgmma through the async proxy.
  cptx::fence_proxy_async(cptx::space_shared);
  __syncwarp();
  // All inspectors have finished the tile before one of them passes it on.
  poisoned = ptx::barrier_or(kInspectorBarrier, kThreads, poisoned);
  if (thread == 0) {
    if (poisoned) info.poisoned = 1;
    ptx::mbarrier_arrive(&shared.kv_full[stage]);
  }
}

template <typename C>
__device__ __forceinline__ void InspectTiles(SharedStorage<C>& shared, const KernelParams& params) {
  const int thread = threadIdx.x - 32;
  uint32_t loaded = 0;    // KV tiles before this query tile's, K and V
  uint32_t parities = 0;  // bit s: parity of the next V tile to inspect in stage s
  for (TileOrder<C> order(params.tiles); !order.Done(); order.Next()) {
    // Written: by the producer warp.
    ptx::mbarrier_wait_parity(&shared.info_full[order.QStage()], order.QParity());
    TileInfo& shared_info = shared.tile[order.InfoStage()];
    const TileInfo info = shared_info;
    int32_t whole_begin = 0;
    if constexpr (C::kHasBounds) whole_begin = shared.lower.whole_begin[order.InfoStage()];
    ptx::mbarrier_arrive(&shared.q_free[order.QStage()]);
    for (int32_t tile = whole_begin == 0 ? info.whole_tiles : 0; tile < info.kv_tiles; ++tile) {
      const bool last = tile + 1 == info.kv_tiles;
      const uint32_t stage = (loaded + 2 * tile + (last ? 1 : 2)) % C::kKvStages;
      // Written: by TMA. No phase is missed: the stage is not filled again before it is passed on.
      ptx::mbarrier_wait_parity(&shared.v_raw[stage], parities >> stage & 1);
      parities ^= 1u << stage;
      InspectVTile<C>(shared, stage, thread, shared_info, info.kv_end - tile * C::kTileKV);
      if (C::kHasBounds && tile + 1 == whole_begin) tile = info.whole_tiles - 1;
    }
    loaded += 2 * info.kv_tiles;
  }
}

}  // namespace jax_fa::cuda::hopper

#endif  // JAX_FA_CUDA_HOPPER_PRODUCER_CUH_
