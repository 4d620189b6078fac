// Builds of the Hopper kernel for head dims up to 128 and many long query tiles.

#include "cuda/hopper/builds.h"
#include "cuda/hopper/launch.cuh"

namespace jax_fa::cuda::hopper {

cudaError_t LaunchHeadDim128Wide(const AttentionParams& params, cudaStream_t stream) {
  return LaunchDTypes<128, Tuning128Wide>(params, stream);
}

}  // namespace jax_fa::cuda::hopper
