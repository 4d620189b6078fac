// The table of CUDA kernels: what each generation is called, what it serves, how it is launched.
// Host code only; a plain C++ compiler includes it. The FFI handler, `explain` and the standalone
// harness all choose through this table, so they cannot disagree.
//
// To add a generation: a folder beside this file with a function of each kind below, and one row
// in cuda/kernels.cc, placed before the rows it should win against.

#ifndef JAX_FA_CUDA_KERNELS_H_
#define JAX_FA_CUDA_KERNELS_H_

#include <string>
#include <vector>

#include "attention/problem.h"
#include "cuda/kernel.h"

namespace jax_fa::cuda {

// All kernels of this build, the preferred one first.
const std::vector<Kernel>& Kernels();

// The row called `name`, or null.
const Kernel* FindKernel(const std::string& name);

// Whether `kernel` can read and write the arrays of `params` where they lie.
bool ServesPointers(const Kernel& kernel, const AttentionParams& params);

// The first row that serves `params` on `cc`, or null (naive serves everything it was built for).
const Kernel* ChooseKernel(const AttentionParams& params, ComputeCapability cc);

}  // namespace jax_fa::cuda

#endif  // JAX_FA_CUDA_KERNELS_H_
