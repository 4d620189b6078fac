// The `naive` generation: one thread block per (token, query head). Any head_dim, any GPU. It is
// the oracle of the tests and the yardstick of the benchmarks, so it stays as plain as it is.

#ifndef JAX_FA_CUDA_NAIVE_NAIVE_H_
#define JAX_FA_CUDA_NAIVE_NAIVE_H_

#include <cuda_runtime_api.h>

#include <string>

#include "attention/problem.h"
#include "cuda/kernel.h"

namespace jax_fa::cuda {

std::string NaiveRefusal(const AttentionProblem& problem, ComputeCapability cc);
cudaError_t LaunchNaive(const AttentionParams& params, cudaStream_t stream);

}  // namespace jax_fa::cuda

#endif  // JAX_FA_CUDA_NAIVE_NAIVE_H_
