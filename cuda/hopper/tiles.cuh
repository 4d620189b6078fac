// The query tiles of a launch: in which order a block works on them, where each lies, and what its
// rows are.

#ifndef JAX_FA_CUDA_HOPPER_TILES_CUH_
#define JAX_FA_CUDA_HOPPER_TILES_CUH_

#include <cstdint>
#include <cuda/ptx>

#include "attention/kv_layout.h"
#include "cuda/hopper/config.cuh"

namespace jax_fa::cuda::hopper {

namespace cptx = ::cuda::ptx;

// Blocks that share a query tile's KV tiles, and this block's number among them.
__device__ __forceinline__ int32_t ClusterBlocks() {
  return static_cast<int32_t>(cptx::get_sreg_cluster_nctarank());
}
__device__ __forceinline__ int32_t ClusterRank() {
  return static_cast<int32_t>(cptx::get_sreg_cluster_ctarank());
}

// Which query tiles this block works on, and in what order. Each round gives every block one tile,
// forwards and backwards in turn, so that the block with the longest tile of one round has the
// shortest of the next. A fixed order needs no counter in device memory, and no zeroing of one.
// Where slots are shared out, a cluster has one query tile.
template <typename C>
class TileOrder {
 public:
  __device__ explicit TileOrder(int32_t tiles) : tiles_(tiles) {}

  __device__ bool Done() const {
    if constexpr (C::kSharesSlots) return round_ > 0;
    return Index() >= tiles_;
  }
  __device__ void Next() { ++round_; }
  __device__ int32_t Index() const {
    if constexpr (C::kSharesSlots) return static_cast<int32_t>(cptx::get_sreg_clusterid_x());
    const int32_t grid = gridDim.x;
    const int32_t block = blockIdx.x;
    return round_ * grid + (round_ % 2 == 0 ? block : grid - 1 - block);
  }

  // The Q stage of this round's tile, and the parity of that stage's use.
  __device__ uint32_t QStage() const { return round_ % C::kQStages; }
  __device__ uint32_t QParity() const { return round_ / C::kQStages % 2; }
  // The place of its TileInfo and row limits: two, also where there is one Q stage, since those of
  // a tile are read until its end.
  __device__ uint32_t InfoStage() const { return round_ % 2; }
  // The stage of the round before; there is one from the second on.
  __device__ bool HasPrevious() const { return round_ > 0; }
  __device__ uint32_t PreviousQStage() const { return (round_ - 1) % C::kQStages; }

 private:
  int32_t tiles_;
  uint32_t round_ = 0;
};

// Where a query tile lies.
struct TilePlace {
  int32_t sequence;
  int32_t q_head;
  int32_t kv_head;
  int32_t q_start;      // first token
  int32_t kv_sequence;  // in k and v, counted over their layers
};

// Tile `index` of the launch. Heads are worked on in sections, whose K and V stay in L2, and within
// a section fastest, so that the query heads of one KV head run side by side. For growing positions
// the last tokens have the longest tiles: the last section goes from them to the first, and
// sections alternate, so that lengths never jump and the launch ends with short tiles.
template <typename C>
__device__ __forceinline__ TilePlace PlaceOfTile(const KernelParams& params, int32_t index) {
  const int32_t section = params.section_tiles.Quotient(index);
  const int32_t sections_after = params.sections - 1 - section;
  const int32_t in_section = index - section * params.section_tiles.value;
  // Query heads; where a tile has all of a KV head's, KV heads.
  const Divisor heads = sections_after == 0 ? params.last_section_heads : params.section_heads;
  const int32_t turn = heads.Quotient(in_section);
  const int32_t q_tile = sections_after % 2 == 0 ? params.q_tiles - 1 - turn : turn;
  // Of all sequences' heads.
  const int32_t head = section * params.section_heads.value + in_section - turn * heads.value;
  TilePlace place;
  place.sequence = params.heads_of_sequence.Quotient(head);
  const int32_t in_sequence = head - place.sequence * params.heads_of_sequence.value;
  if constexpr (C::kPacksHeads) {
    place.q_head = in_sequence * params.group.value;
    place.kv_head = in_sequence;
    place.q_start = q_tile * C::kConsumers * params.box_tokens.value;
  } else {
    place.q_head = in_sequence;
    place.kv_head = params.group.Quotient(in_sequence);
    place.q_start = q_tile * C::kTileQ;
  }
  place.kv_sequence =
      CacheSequence(params.layer, params.layers, params.layer_batch, place.sequence);
  return place;
}

// What row `row` of a query tile is: a token, counted from the tile's first, and a head, counted
// from the tile's first. Rows past the last whole token are none.
struct RowPlace {
  int32_t token;
  int32_t head;
};

template <typename C>
__device__ __forceinline__ RowPlace PlaceOfRow(const KernelParams& params, int row) {
  if constexpr (!C::kPacksHeads) return {row, 0};
  const int32_t tokens = params.box_tokens.value;
  const int32_t in_box = row % kConsumerRows;
  const int32_t head = params.box_tokens.Quotient(in_box);
  return {row / kConsumerRows * tokens + in_box - head * tokens, head};
}

template <typename C>
__device__ __forceinline__ bool RowExists(const KernelParams& params, int32_t q_start, int row) {
  const RowPlace place = PlaceOfRow<C>(params, row);
  return q_start + place.token < params.q_len &&
         (!C::kPacksHeads || place.head < params.group.value);
}

}  // namespace jax_fa::cuda::hopper

#endif  // JAX_FA_CUDA_HOPPER_TILES_CUH_
