// Builds of the Hopper kernel for head dims up to 64: few query rows of a sequence.

#include "cuda/hopper/builds.h"
#include "cuda/hopper/launch.cuh"

namespace jax_fa::cuda::hopper {

cudaError_t LaunchHeadDim64Split(const AttentionParams& params, cudaStream_t stream) {
  return FitsOneConsumer(params) ? LaunchDTypes<64, Tuning64SplitSmall>(params, stream)
                                 : LaunchDTypes<64, Tuning64Split>(params, stream);
}

}  // namespace jax_fa::cuda::hopper
