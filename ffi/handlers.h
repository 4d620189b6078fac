// The FFI handlers as XLA's C ABI sees them: one a platform, and the same again for stacked calls
// of version 1, which did not name their operands. ffi/module.cc hands them to Python.

#ifndef JAX_FA_FFI_HANDLERS_H_
#define JAX_FA_FFI_HANDLERS_H_

#include "xla/ffi/api/c_api.h"

extern "C" {

XLA_FFI_Error* JaxFaPrefillAttentionCpu(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JaxFaStackedPrefillAttentionCpu(XLA_FFI_CallFrame* call_frame);

// In a build without CUDA these answer with an error that says so.
XLA_FFI_Error* JaxFaPrefillAttentionCuda(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JaxFaStackedPrefillAttentionCuda(XLA_FFI_CallFrame* call_frame);

}  // extern "C"

#endif  // JAX_FA_FFI_HANDLERS_H_
