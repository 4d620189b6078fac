// The builds of the Hopper kernel, one file a padded head dim, so that they compile side by side.

#ifndef JAX_FA_CUDA_HOPPER_BUILDS_H_
#define JAX_FA_CUDA_HOPPER_BUILDS_H_

#include <cuda_runtime_api.h>

#include "attention/problem.h"

namespace jax_fa::cuda::hopper {

// Each serves every dtype, and head dims up to its own.
cudaError_t LaunchHeadDim64(const AttentionParams& params, cudaStream_t stream);
cudaError_t LaunchHeadDim128(const AttentionParams& params, cudaStream_t stream);
// The same bits, unless the caller does without chunk invariance.
cudaError_t LaunchHeadDim64Split(const AttentionParams& params, cudaStream_t stream);
cudaError_t LaunchHeadDim128Split(const AttentionParams& params, cudaStream_t stream);
// Other bits: for callers who do without.
cudaError_t LaunchHeadDim128Wide(const AttentionParams& params, cudaStream_t stream);
cudaError_t LaunchHeadDim256(const AttentionParams& params, cudaStream_t stream);

}  // namespace jax_fa::cuda::hopper

#endif  // JAX_FA_CUDA_HOPPER_BUILDS_H_
