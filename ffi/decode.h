// From what XLA hands a handler (buffers, attributes) to AttentionParams. Everything is checked
// again here, because an exported program or a direct ffi_call never went through jax_fa's Python.

#ifndef JAX_FA_FFI_DECODE_H_
#define JAX_FA_FFI_DECODE_H_

#include <string>
#include <string_view>

#include "attention/problem.h"
#include "xla/ffi/api/ffi.h"

namespace jax_fa {

// The optional operands of a call without the attribute `operands`: of the current target none. A
// stacked call of version 1 had a target of its own instead, and a layer as its fifth operand.
inline constexpr char kNoOperands[] = "";
inline constexpr char kLayerOperand[] = "layer";

// A call as it arrives: operands and results by place, attributes by name.
//
// Operands: q, k, v, positions, then the optional ones that the attribute `operands` names, in its
// order. Results: out, and lse where it is wanted. Their shapes are in decode.cc. Attributes, each
// with the default of jax_fa.prefill_attention:
//   operands         string: names of optional operands, a space between them: of "layer",
//                    "starts", "sinks"
//   implementation   string: a kernel's name; empty: the best one that serves
//   scale            float32, finite
//   chunk_invariant  bool: contract C5
//   sliding_window   int32, at least 1; 0, or absent: none
//   logits_soft_cap  float32, finite, above 0; 0, or absent: none
struct CallFrame {
  xla::ffi::RemainingArgs operands;
  xla::ffi::RemainingRets results;
  xla::ffi::Dictionary attributes;
};

struct Call {
  AttentionParams params;
  std::string implementation;
};

// Fills `call`, or says which rule is broken by which values.
xla::ffi::Error Decode(const CallFrame& frame, std::string_view default_operands, Call* call);

// True when there is nothing to compute: an output without elements.
bool IsEmpty(const AttentionProblem& problem);

// The binding that the platforms' handlers share, less the platform's context argument.
inline auto BindCall() { return xla::ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs(); }

}  // namespace jax_fa

#endif  // JAX_FA_FFI_DECODE_H_
