// Builds of the Hopper kernel for head dims up to 128: few query rows of a sequence.

#include "cuda/hopper/builds.h"
#include "cuda/hopper/launch.cuh"

namespace jax_fa::cuda::hopper {

cudaError_t LaunchHeadDim128Split(const AttentionParams& params, cudaStream_t stream) {
  return FitsOneConsumer(params) ? LaunchDTypes<128, Tuning128SplitSmall>(params, stream)
                                 : LaunchDTypes<128, Tuning128Split>(params, stream);
}

}  // namespace jax_fa::cuda::hopper
