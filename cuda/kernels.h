// The table of CUDA kernels: what each generation is called, what it serves, how it is launched.
// Host code only; a plain C++ compiler includes it. The FFI handler, `explain` and the standalone
// harness all choose through this table, so they cannot disagree.
//
// To add a generation: a folder beside this file with a function of each kind below, and one row
// in cuda/kernels.cc, placed before the rows it should win against.

#ifndef JAX_FA_CUDA_KERNELS_H_
#define JAX_FA_CUDA_KERNELS_H_

#include <cuda_runtime_api.h>

#include <string>
#include <vector>

#include "ffi/attention_params.h"

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
};

// All kernels of this build, the preferred one first.
const std::vector<Kernel>& Kernels();

// The row called `name`, or null.
const Kernel* FindKernel(const std::string& name);

// The first row that serves `problem` on `cc`, or null (naive serves everything it was built for).
const Kernel* ChooseKernel(const AttentionProblem& problem, ComputeCapability cc);

// Compute capability of the current device, cached per device ordinal.
cudaError_t CurrentComputeCapability(ComputeCapability* cc);

// The architectures this build holds code for, as CMake was given them, e.g. "75-real;90a-real".
const char* BuiltArchitectures();

}  // namespace jax_fa::cuda

#endif  // JAX_FA_CUDA_KERNELS_H_
