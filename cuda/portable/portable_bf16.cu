// The portable kernel for bfloat16 caches (sm_80 and up: Turing has no bfloat16 matrix units).

#include "cuda/portable/portable.cuh"

namespace jax_fa::cuda::portable {

cudaError_t LaunchBFloat16(const AttentionParams& params, cudaStream_t stream) {
  return LaunchForCache<__nv_bfloat16>(params, stream);
}

}  // namespace jax_fa::cuda::portable
