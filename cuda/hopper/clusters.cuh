// The host's side of shared-out slots: how many blocks to a cluster, the launch. For which calls:
// choice.h. What the blocks do is in split.cuh.

#ifndef JAX_FA_CUDA_HOPPER_CLUSTERS_CUH_
#define JAX_FA_CUDA_HOPPER_CLUSTERS_CUH_

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>

#include "attention/problem.h"
#include "cuda/hopper/choice.h"
#include "cuda/hopper/prefill_kernel.cuh"

namespace jax_fa::cuda::hopper {

// Blocks of a cluster, which every Hopper device grants. (16 take asking, and are no faster.)
constexpr int kMaxClusterBlocks = 8;
// Slots of the cache for each block, at least; fewer cost more than they spare.
constexpr int64_t kLeastSlots = 512;

template <typename C>
cudaLaunchConfig_t ClusterLaunch(int blocks, int tiles, cudaLaunchAttribute* attribute) {
  attribute->id = cudaLaunchAttributeClusterDimension;
  attribute->val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(tiles * blocks);
  config.blockDim = dim3(C::kThreads);
  config.dynamicSmemBytes = sizeof(SharedStorage<C>);
  config.attrs = attribute;
  config.numAttrs = 1;
  return config;
}

// Clusters of `blocks` blocks that `device`, the current one, holds at once: fewer than its SMs
// would, since a cluster stays within a GPC. Asked once per device, build and size.
template <typename C>
cudaError_t CountClusters(int device, int blocks, int* clusters) {
  constexpr int kRememberedDevices = 64;
  static std::atomic<int> remembered[kRememberedDevices][kMaxClusterBlocks + 1] = {};  // 0: not yet
  const bool can_remember = device < kRememberedDevices;
  if (can_remember) {
    *clusters = remembered[device][blocks].load(std::memory_order_relaxed) - 1;
    if (*clusters >= 0) return cudaSuccess;
  }
  cudaLaunchAttribute attribute = {};
  const cudaLaunchConfig_t config = ClusterLaunch<C>(blocks, 1, &attribute);
  const cudaError_t error = cudaOccupancyMaxActiveClusters(clusters, PrefillKernel<C>, &config);
  if (error != cudaSuccess) return error;
  if (can_remember) remembered[device][blocks].store(*clusters + 1, std::memory_order_relaxed);
  return cudaSuccess;
}

// The most blocks to a query tile with which all `tiles` are worked on at once, and each block has
// some slots.
template <typename C>
cudaError_t ChooseClusterBlocks(const AttentionProblem& problem, int tiles, int device,
                                int sm_count, int* blocks) {
  *blocks = 1;
  if (!SharesSlots(problem, sm_count)) return cudaSuccess;
  for (*blocks = kMaxClusterBlocks; *blocks > 1; --*blocks) {
    if (problem.kv_len < *blocks * kLeastSlots) continue;
    int clusters = 0;
    const cudaError_t error = CountClusters<C>(device, *blocks, &clusters);
    if (error != cudaSuccess) return error;
    if (tiles <= clusters) break;
  }
  return cudaSuccess;
}

template <typename C>
cudaError_t LaunchClusters(int blocks, const TensorMaps& maps, const KernelParams& params,
                           cudaStream_t stream) {
  cudaLaunchAttribute attribute = {};
  cudaLaunchConfig_t config = ClusterLaunch<C>(blocks, params.tiles, &attribute);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, PrefillKernel<C>, maps, params);
}

}  // namespace jax_fa::cuda::hopper

#endif  // JAX_FA_CUDA_HOPPER_CLUSTERS_CUH_
