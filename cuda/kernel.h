// What a CUDA kernel of this library is: a name, what it serves, how it is launched; and what each
// may ask about the device and the build. Host code only. The table of all kernels is kernels.h.

#ifndef JAX_FA_CUDA_KERNEL_H_
#define JAX_FA_CUDA_KERNEL_H_

#include <cuda_runtime_api.h>

#include <string>

#include "attention/problem.h"

namespace jax_fa::cuda {

// Compute capability as one number: 75, 80, 86, 89, 90, 100, 120.
using ComputeCapability = int;

struct Kernel {
  const char* name;  // the word a caller writes in implementation=
  // Why this kernel cannot serve `problem` on a device of capability `cc`: the value met, the rule.
  // Empty when it can. Never reads a device.
  std::string (*refusal)(const AttentionProblem& problem, ComputeCapability cc);
  // Enqueues the kernel on `stream` of the current device; never synchronises, never allocates.
  // The caller has checked `refusal`, and that no extent but kv_len is zero (kv_len may be 0: every
  // row is then empty, as if its position were negative).
  cudaError_t (*launch)(const AttentionParams& params, cudaStream_t stream);
  // Whether the arrays lie where the kernel can read and write them; null: anywhere will do. Known
  // only when the call runs, so `explain` cannot look at it. XLA aligns all it allocates.
  bool (*serves_pointers)(const AttentionParams& params);
  // What serves_pointers asks for, in words.
  const char* pointer_rule;
};

// Compute capability of the current device, cached per device ordinal.
cudaError_t CurrentComputeCapability(ComputeCapability* cc);

// The architectures this build holds code for, as CMake was given them, e.g. "75-real;90a-real".
const char* BuiltArchitectures();

}  // namespace jax_fa::cuda

#endif  // JAX_FA_CUDA_KERNEL_H_
