// Builds of the Hopper kernel for head dims up to 256.

#include "cuda/hopper/builds.h"
#include "cuda/hopper/launch.cuh"

namespace jax_fa::cuda::hopper {

cudaError_t LaunchHeadDim256(const AttentionParams& params, cudaStream_t stream) {
  return LaunchDTypes<256, Tuning256>(params, stream);
}

}  // namespace jax_fa::cuda::hopper
