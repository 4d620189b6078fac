// The table itself, and the choice through it.

#include "cuda/kernels.h"

#ifdef JAX_FA_WITH_HOPPER
#include "cuda/hopper/hopper.h"
#endif
#include "cuda/naive/naive.h"
#include "cuda/portable/portable.h"

namespace jax_fa::cuda {
const std::vector<Kernel>& Kernels() {
  static const std::vector<Kernel> kernels = {
#ifdef JAX_FA_WITH_HOPPER
      {"hopper", HopperRefusal, LaunchHopper, HopperServesPointers,
       "q, k, v and out must start at multiples of 16 bytes"},
#endif
      {"portable", PortableRefusal, LaunchPortable, nullptr, ""},
      {"naive", NaiveRefusal, LaunchNaive, nullptr, ""},
  };
  return kernels;
}

const Kernel* FindKernel(const std::string& name) {
  for (const Kernel& kernel : Kernels()) {
    if (name == kernel.name) return &kernel;
  }
  return nullptr;
}

bool ServesPointers(const Kernel& kernel, const AttentionParams& params) {
  return kernel.serves_pointers == nullptr || kernel.serves_pointers(params);
}

const Kernel* ChooseKernel(const AttentionParams& params, ComputeCapability cc) {
  for (const Kernel& kernel : Kernels()) {
    if (kernel.refusal(params, cc).empty() && ServesPointers(kernel, params)) return &kernel;
  }
  return nullptr;
}

}  // namespace jax_fa::cuda
