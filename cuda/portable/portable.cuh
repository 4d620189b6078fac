// The host's side of the portable kernel, as a template over the cache's dtype: the choice of an
// instance, its shared memory and its launch. The kernel itself is in kernel.cuh.

#ifndef JAX_FA_CUDA_PORTABLE_PORTABLE_CUH_
#define JAX_FA_CUDA_PORTABLE_PORTABLE_CUH_

#include <cmath>

#include "cuda/kernel.h"
#include "cuda/portable/config.h"
#include "cuda/portable/kernel.cuh"
#include "cuda/portable/portable.h"

namespace jax_fa::cuda::portable {

// What a launch may use without asking for more.
constexpr int kSharedWithoutOptIn = 48 * 1024;

inline bool IsAligned16(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

inline Args MakeArgs(const AttentionParams& params) {
  // A scale above 1 could take q out of float16's range, so it waits for the float32 scores.
  const bool fold = std::fabs(params.scale) <= 1.0f;
  Args args;
  args.params = params;
  args.q_scale = fold ? params.scale : 1.0f;
  args.score_scale = fold ? 1.0f : params.scale;
  args.is_capped = params.logits_soft_cap > 0.0f;
  args.cap_scale = 0.0f;
  if (args.is_capped) {
    args.cap_scale = args.score_scale / params.logits_soft_cap;
    args.score_scale = params.logits_soft_cap;
  }
  args.kv_aligned = IsAligned16(params.k) && IsAligned16(params.v);
  args.out_aligned = IsAligned16(params.out);
  return args;
}

template <typename QT, typename KvT, int kHeadDim>
cudaError_t LaunchInstance(const AttentionParams& params, cudaStream_t stream) {
  ComputeCapability cc = 0;
  cudaError_t error = CurrentComputeCapability(&cc);
  if (error != cudaSuccess) return error;
  const int smem_bytes = RowPadding(cc) == 0
                             ? static_cast<int>(sizeof(SharedStorage<KvT, kHeadDim, 0>))
                             : static_cast<int>(sizeof(SharedStorage<KvT, kHeadDim, kChunk>));
  const auto kernel = PortableKernel<QT, KvT, kHeadDim>;
  if (smem_bytes > kSharedWithoutOptIn) {
    // Asked at each launch: the setting belongs to the current device, and asking costs less than
    // remembering which devices, across threads, have it.
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
    if (error != cudaSuccess) return error;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(GridBlocks(params)));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = smem_bytes;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, MakeArgs(params));
}

template <typename QT, typename KvT>
cudaError_t LaunchForHeadDim(const AttentionParams& params, cudaStream_t stream) {
  if (params.head_dim == 64) return LaunchInstance<QT, KvT, 64>(params, stream);
  if (params.head_dim == 128) return LaunchInstance<QT, KvT, 128>(params, stream);
  return cudaErrorInvalidValue;
}

template <typename KvT>
cudaError_t LaunchForCache(const AttentionParams& params, cudaStream_t stream) {
  return params.q_dtype == DType::kFloat32 ? LaunchForHeadDim<float, KvT>(params, stream)
                                           : LaunchForHeadDim<KvT, KvT>(params, stream);
}

}  // namespace jax_fa::cuda::portable

#endif  // JAX_FA_CUDA_PORTABLE_PORTABLE_CUH_
