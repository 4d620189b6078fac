// Builds of the Hopper kernel for head dims up to 64.

#include "cuda/hopper/builds.h"
#include "cuda/hopper/launch.cuh"

namespace jax_fa::cuda::hopper {

cudaError_t LaunchHeadDim64(const AttentionParams& params, cudaStream_t stream) {
  return LaunchSizes<64, Tuning64, Tuning64Small>(params, stream, LaunchHeadDim64Split);
}

}  // namespace jax_fa::cuda::hopper
