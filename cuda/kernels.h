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

// All kernels of this build, the preferred one first.
const std::vector<Kernel>& Kernels();

// The row called `name`, or null.
const Kernel* FindKernel(const std::string& name);

// Whether `kernel` can read and write the arrays of `params` where they lie.
bool ServesPointers(const Kernel& kernel, const AttentionParams& params);

// The first row that serves `params` on `cc`, or null (naive serves everything it was built for).
const Kernel* ChooseKernel(const AttentionParams& params, ComputeCapability cc);

// Compute capability of the current device, cached per device ordinal.
cudaError_t CurrentComputeCapability(ComputeCapability* cc);

// The architectures this build holds code for, as CMake was given them, e.g. "75-real;90a-real".
const char* BuiltArchitectures();

}  // namespace jax_fa::cuda

#endif  // JAX_FA_CUDA_KERNELS_H_
