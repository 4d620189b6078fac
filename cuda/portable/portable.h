// The `portable` generation: the 64 x 64 tiled kernel that runs on every GPU from sm_75 up, with
// K and V tiles in shared memory, scores on the matrix units (wmma) and P.V by FMA.

#ifndef JAX_FA_CUDA_PORTABLE_PORTABLE_H_
#define JAX_FA_CUDA_PORTABLE_PORTABLE_H_

#include <cuda_runtime_api.h>

#include <string>

#include "attention/problem.h"
#include "cuda/kernel.h"

namespace jax_fa::cuda {

std::string PortableRefusal(const AttentionProblem& problem, ComputeCapability cc);
cudaError_t LaunchPortable(const AttentionParams& params, cudaStream_t stream);

namespace portable {

// One translation unit per cache dtype, so that they compile side by side.
cudaError_t LaunchFloat16(const AttentionParams& params, cudaStream_t stream);
cudaError_t LaunchBFloat16(const AttentionParams& params, cudaStream_t stream);

// Thread blocks of a launch: one per (tile of 64 tokens, sequence, query head).
int64_t GridBlocks(const AttentionProblem& problem);

}  // namespace portable
}  // namespace jax_fa::cuda

#endif  // JAX_FA_CUDA_PORTABLE_PORTABLE_H_
