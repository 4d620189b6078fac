// Stands in for ffi/cuda_handler.cc in a build without CUDA, so that a call placed on a GPU fails
// with the reason and the way out instead of "no handler registered".

#include "ffi/decode.h"
#include "ffi/handlers.h"

namespace jax_fa {
namespace {

namespace ffi = ::xla::ffi;

ffi::Error Refuse(ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary) {
  return ffi::Error::InvalidArgument(
      "jax_fa.prefill_attention: jax_fa was built without CUDA kernels; reinstall it with "
      "JAX_FA_CUDA=wheels in the environment, or "
      "place the call on a CPU.");
}

}  // namespace
}  // namespace jax_fa

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxFaPrefillAttentionCuda, jax_fa::Refuse, jax_fa::BindCall());

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxFaStackedPrefillAttentionCuda, jax_fa::Refuse, jax_fa::BindCall());
