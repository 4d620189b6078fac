// The portable kernel for float16 caches.

#include "cuda/portable/portable.cuh"

namespace jax_fa::cuda::portable {

cudaError_t LaunchFloat16(const AttentionParams& params, cudaStream_t stream) {
  return LaunchForCache<__half>(params, stream);
}

}  // namespace jax_fa::cuda::portable
