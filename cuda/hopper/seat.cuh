// What a consumer thread works on: its rows, and where they and their slots lie.

#ifndef JAX_FA_CUDA_HOPPER_SEAT_CUH_
#define JAX_FA_CUDA_HOPPER_SEAT_CUH_

#include <cstdint>

#include "cuda/hopper/config.cuh"
#include "cuda/hopper/tiles.cuh"

namespace jax_fa::cuda::hopper {

// What a consumer thread works on. Little is held in registers: what only the rare paths and the
// epilogue need is read again from shared memory.
template <typename C>
struct Seat {
  const SharedStorage<C>& shared;
  const KernelParams& params;
  uint32_t q_stage;
  uint32_t info_stage;
  int consumer;

  __device__ const TileInfo& Tile() const { return shared.tile[info_stage]; }
  // This thread's first row in the query tile; its second is 8 further.
  __device__ int Row() const {
    return kConsumerRows * consumer + threadIdx.x % kWarpgroup / 32 * 16 + threadIdx.x % 32 / 4;
  }
  // Slots that its rows see: [0] and [8].
  __device__ const int32_t* Visible() const { return &shared.visible[info_stage][Row()]; }
  // The first slots that they see, where they have lower bounds: [0] and [8].
  __device__ const int32_t* Lo() const {
    if constexpr (C::kHasBounds) return &shared.lower.lo[info_stage][Row()];
    return nullptr;
  }
  __device__ int32_t QSequence() const { return shared.q_sequence[info_stage]; }
  __device__ bool Exists(int row) const { return RowExists<C>(params, Tile().q_start, row); }
  // Row of q, out and lse in device memory of row `row` of the tile.
  __device__ int64_t GlobalRow(int row) const {
    const TileInfo& tile = Tile();
    const RowPlace place = PlaceOfRow<C>(params, row);
    return (static_cast<int64_t>(QSequence()) * params.q_len + tile.q_start + place.token) *
               params.q_heads +
           tile.q_head + place.head;
  }
  // The block's first slot of the cache, from which the tile counts, and the slots from there on.
  __device__ int32_t FirstSlot() const {
    if constexpr (C::kSharesSlots) return shared.first_slot;
    if constexpr (C::kHasBounds) return shared.lower.first_slot[info_stage];
    return 0;
  }
  __device__ int32_t KvLen() const { return params.kv_len - FirstSlot(); }
  __device__ const typename C::Element* KvRow(const void* cache, int32_t slot) const {
    const TileInfo& tile = Tile();
    const int32_t kv_head = params.group.Quotient(tile.q_head);
    const int64_t row =
        (static_cast<int64_t>(tile.kv_sequence) * params.kv_len + FirstSlot() + slot) *
            params.kv_heads +
        kv_head;
    return static_cast<const typename C::Element*>(cache) + row * params.head_dim;
  }
};

// Byte offset in a tile of swizzled panels of the 16-byte chunk `chunk` of row `row`.
__device__ __forceinline__ int SwizzledOffset(int panel_bytes, int row, int chunk) {
  return chunk / 8 * panel_bytes + row * 128 + (chunk % 8 ^ row % 8) * 16;
}

}  // namespace jax_fa::cuda::hopper

#endif  // JAX_FA_CUDA_HOPPER_SEAT_CUH_
