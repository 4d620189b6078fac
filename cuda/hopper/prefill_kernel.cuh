// The Hopper kernel: roles, barriers and registers. The algorithm is in consumer.cuh.
//
//   producer warp   | Q K0 K1 V0 K2 V1 ..            | next Q K0 ..
//   inspector warps |              V of masked tiles |
//   consumer 0      | S0 | softmax0 | S1 P0V0 | softmax1 | S2 P1V1 | ..
//   consumer 1      |    | S0 | softmax0      | S1 P0V0  | softmax1 | ..

#ifndef JAX_FA_CUDA_HOPPER_PREFILL_KERNEL_CUH_
#define JAX_FA_CUDA_HOPPER_PREFILL_KERNEL_CUH_

#include <cuda/ptx>

#include "cuda/hopper/config.cuh"
#include "cuda/hopper/consumer.cuh"
#include "cuda/hopper/producer.cuh"
#include "cuda/hopper/tiles.cuh"

namespace jax_fa::cuda::hopper {

template <typename C>
__device__ __forceinline__ void InitBarriers(SharedStorage<C>& shared) {
  constexpr int kConsumerWarps = C::kConsumerThreads / 32;
  constexpr int kInspectorThreads = 32 * C::kInspectorWarps;
  for (int i = 0; i < C::kQStages; ++i) {
    cptx::mbarrier_init(&shared.first_panels_full[i], 1);
    cptx::mbarrier_init(&shared.other_q_full[i], 1);
    cptx::mbarrier_init(&shared.info_full[i], 32);  // each lane has written row limits
    cptx::mbarrier_init(&shared.q_free[i], C::kConsumerThreads + kInspectorThreads);
  }
  for (int i = 0; i < C::kKvStages; ++i) {
    cptx::mbarrier_init(&shared.kv_full[i], 1);
    cptx::mbarrier_init(&shared.kv_free[i], kConsumerWarps);
    cptx::mbarrier_init(&shared.v_raw[i], 1);
  }
  // Written here by ordinary stores, next used by TMA.
  cptx::fence_mbarrier_init(cptx::sem_release, cptx::scope_cluster);
  cptx::fence_proxy_async(cptx::space_shared);
}

// The first copy would otherwise wait for its descriptor from device memory.
template <typename C>
__device__ __forceinline__ void PrefetchTensorMaps(const TensorMaps& maps) {
  if constexpr (!C::kFloatQuery) ptx::prefetch_tensormap(&maps.q);
  ptx::prefetch_tensormap(&maps.k);
  ptx::prefetch_tensormap(&maps.v);
}

template <typename C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocksPerSm)
    PrefillKernel(const __grid_constant__ TensorMaps maps,
                  const __grid_constant__ KernelParams params) {
  extern __shared__ __align__(1024) uint8_t s_bytes[];
  auto& shared = *reinterpret_cast<SharedStorage<C>*>(s_bytes);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  if (warp < kWarpgroup / 32) ptx::setmaxnreg_dec<C::kProducerRegisters>();
  // By inspectors, who have nothing else to do yet.
  if (warp == 1 && ptx::elect_sync()) InitBarriers<C>(shared);
  if (warp == 2 && ptx::elect_sync()) PrefetchTensorMaps<C>(maps);
  // The block waits for its first loads, and they for each instruction and parameter that has to
  // come from L2 before them: so they are here, in one straight piece. There is a first tile, since
  // the grid has no more blocks, or clusters, than there are tiles.
  TilePlace first;
  TilePositions<C> first_positions;
  if (warp == 0) {
    first = PlaceOfTile<C>(params, TileOrder<C>(params.tiles).Index());
    first_positions = ReadPositions<C>(params, first);
  }
  // Written: the mbarriers, by warp 1; no role may use one before. That consumers wait for warp 0
  // too keeps their instructions from being fetched before its own.
  __syncthreads();
  if (C::kStartsAtSlot0 && warp == 0) LoadTileStart<C>(shared, 0, 0, maps, first);

  if (warp >= kWarpgroup / 32) {
    ptx::setmaxnreg_inc<C::kConsumerRegisters>();
    ConsumeTiles<C>(shared, maps, params, warp / 4 - 1);
  } else if (warp == 0) {
    if constexpr (C::kSharesSlots) {
      ProduceShare<C>(shared, maps, params, first, first_positions);
    } else {
      ProduceTiles<C>(shared, maps, params, first_positions);
    }
  } else {
    InspectTiles<C>(shared, params);
  }
}

}  // namespace jax_fa::cuda::hopper

#endif  // JAX_FA_CUDA_HOPPER_PREFILL_KERNEL_CUH_
