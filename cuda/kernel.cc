// What kernels ask about the device and the build.

#include "cuda/kernel.h"

#include <atomic>

namespace jax_fa::cuda {

// Devices beyond this many are asked each time instead of being remembered.
constexpr int kRememberedDevices = 64;

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
