// The Hopper kernel's row of the table in cuda/kernels.h. Host code only.

#ifndef JAX_FA_CUDA_HOPPER_HOPPER_H_
#define JAX_FA_CUDA_HOPPER_HOPPER_H_

#include <cuda_runtime_api.h>

#include <string>

#include "attention/problem.h"
#include "cuda/kernel.h"

namespace jax_fa::cuda {

// Why the Hopper kernel cannot serve `problem` on a device of capability `cc`; empty when it can.
std::string HopperRefusal(const AttentionProblem& problem, ComputeCapability cc);

// Whether the arrays lie where TMA can read them: q, k, v and out at multiples of 16 bytes. A
// problem that is not refused may still come with a slice of a larger buffer.
bool HopperServesPointers(const AttentionParams& params);

// Enqueues the kernel. cudaErrorMisalignedAddress, with nothing enqueued, where
// HopperServesPointers is false.
cudaError_t LaunchHopper(const AttentionParams& params, cudaStream_t stream);

}  // namespace jax_fa::cuda

#endif  // JAX_FA_CUDA_HOPPER_HOPPER_H_
