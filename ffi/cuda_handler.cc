// The CUDA handler: decoded parameters to a row of cuda/kernels.h, on the stream and the device
// that XLA gives. It launches and returns: no synchronise, no allocation, no read of device memory,
// so that the call may be captured into a command buffer (contract C7).

#include <cuda_runtime_api.h>

#include <string>

#include "cuda/kernels.h"
#include "ffi/decode.h"
#include "ffi/handlers.h"

namespace jax_fa {
namespace {

namespace ffi = ::xla::ffi;

ffi::Error Invalid(const std::string& message) {
  return ffi::Error::InvalidArgument("jax_fa.prefill_attention: " + message);
}

ffi::Error CudaError(const char* step, cudaError_t error) {
  cudaGetLastError();  // reported once, here; the next launch must not meet it again
  return ffi::Error::Internal(std::string("jax_fa.prefill_attention: ") + step + ": " +
                              cudaGetErrorName(error) + ": " + cudaGetErrorString(error));
}

// The kernel `wanted` names, or the best one if it names none; an error if that cannot serve.
ffi::ErrorOr<const cuda::Kernel*> Choose(const AttentionParams& params, const std::string& wanted,
                                         cuda::ComputeCapability cc) {
  if (wanted.empty()) {
    if (const cuda::Kernel* kernel = cuda::ChooseKernel(params, cc)) return kernel;
    std::string reasons = "no CUDA kernel serves this call:";
    for (const cuda::Kernel& kernel : cuda::Kernels()) {
      reasons += std::string(" ") + kernel.name + ": " + kernel.refusal(params, cc) + ";";
    }
    return ffi::Unexpected(Invalid(reasons));
  }
  const cuda::Kernel* kernel = cuda::FindKernel(wanted);
  if (kernel == nullptr) {
    return ffi::Unexpected(Invalid("implementation='" + wanted +
                                   "' is not a CUDA kernel of this build; use "
                                   "implementation=None or a name that explain() lists."));
  }
  std::string refusal = kernel->refusal(params, cc);
  if (refusal.empty() && !cuda::ServesPointers(*kernel, params)) {
    refusal = std::string(kernel->pointer_rule) + ", and one is a slice of a larger buffer";
  }
  if (!refusal.empty()) {
    return ffi::Unexpected(Invalid("implementation='" + wanted + "' cannot serve this call: " +
                                   refusal + "; use implementation=None."));
  }
  return kernel;
}

ffi::Error Serve(const Call& call, cudaStream_t stream) {
  const auto& [params, implementation] = call;
  cuda::ComputeCapability cc = 0;
  if (cudaError_t error = cuda::CurrentComputeCapability(&cc); error != cudaSuccess) {
    return CudaError("reading the device's compute capability", error);
  }
  auto kernel = Choose(params, implementation, cc);
  if (kernel.has_error()) return kernel.error();
  if (IsEmpty(params)) return ffi::Error::Success();
  if (cudaError_t error = kernel.value()->launch(params, stream); error != cudaSuccess) {
    return CudaError(kernel.value()->name, error);
  }
  return ffi::Error::Success();
}

template <const char* kDefaultOperands>
ffi::Error Run(ffi::RemainingArgs operands, ffi::RemainingRets results, ffi::Dictionary attributes,
               cudaStream_t stream) {
  Call call;
  ffi::Error error = Decode({operands, results, attributes}, kDefaultOperands, &call);
  return error.failure() ? error : Serve(call, stream);
}

}  // namespace
}  // namespace jax_fa

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxFaPrefillAttentionCuda, jax_fa::Run<jax_fa::kNoOperands>,
                              jax_fa::BindCall().Ctx<xla::ffi::PlatformStream<cudaStream_t>>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxFaStackedPrefillAttentionCuda, jax_fa::Run<jax_fa::kLayerOperand>,
                              jax_fa::BindCall().Ctx<xla::ffi::PlatformStream<cudaStream_t>>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
