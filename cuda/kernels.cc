// The table itself, the choice through it, and what this build was compiled for.

#include "cuda/kernels.h"

#include <atomic>

#ifdef JAX_FA_WITH_HOPPER
#include "cuda/hopper/hopper.h"
#endif
#include "cuda/naive/naive.h"
#include "cuda/portable/portable.h"

namespace jax_fa::cuda {
namespace {

// Devices beyond this many are asked each time instead of being remembered.
constexpr int kRememberedDevices = 64;

}  // namespace

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

cudaError_t CurrentComputeCapability(ComputeCapability* cc) {
  // 0: not asked yet. Threads that ask at once store the same value, so relaxed order is enough.
  static std::atomic<int> remembered[kRememberedDevices] = {};
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  const bool can_remember = device < kRememberedDevices;
  if (can_remember) {
    *cc = remembered[device].load(std::memory_order_relaxed);
    if (*cc != 0) return cudaSuccess;
  }
  int major = 0;
  int minor = 0;
  error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  if (error != cudaSuccess) return error;
  *cc = major * 10 + minor;
  if (can_remember) remembered[device].store(*cc, std::memory_order_relaxed);
  return cudaSuccess;
}

const char* BuiltArchitectures() { return JAX_FA_CUDA_ARCHITECTURES; }

}  // namespace jax_fa::cuda
