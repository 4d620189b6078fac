// Builds of the Hopper kernel for head dims up to 128.

#include "cuda/hopper/builds.h"
#include "cuda/hopper/launch.cuh"

namespace jax_fa::cuda::hopper {

cudaError_t LaunchHeadDim128(const AttentionParams& params, cudaStream_t stream) {
  return LaunchSizes<128, Tuning128, Tuning128Small>(params, stream, LaunchHeadDim128Split);
}

}  // namespace jax_fa::cuda::hopper
