// From what XLA hands a handler (buffers, attributes) to AttentionParams. Everything is checked
// again here, because an exported program or a direct ffi_call never went through jax_fa's Python.

#ifndef JAX_FA_FFI_DECODE_H_
#define JAX_FA_FFI_DECODE_H_

#include <optional>
#include <string_view>

#include "attention/problem.h"
#include "xla/ffi/api/ffi.h"

namespace jax_fa {

// The attributes of the custom call; jax_fa/transforms.py writes them, with these names and types.
struct CallAttributes {
  float scale;                      // finite
  bool chunk_invariant;             // contract C5
  std::string_view implementation;  // a kernel's name; empty: the best one that serves
};

// The operands and results of a custom call. Axes before [q_len, heads, head_dim] are batch axes,
// any number of them, equal in all operands; they are collapsed into AttentionParams::batch.
struct CallBuffers {
  xla::ffi::AnyBuffer q;          // [batch..., q_len, q_heads, head_dim]
  xla::ffi::AnyBuffer k;          // [batch..., kv_len, kv_heads, head_dim]
  xla::ffi::AnyBuffer v;          // [batch..., kv_len, kv_heads, head_dim]
  xla::ffi::AnyBuffer positions;  // [batch..., q_len] int32
  // Of the call with stacked caches alone: int32, one element. k and v then have exactly the axes
  // [stacks, layers, layer_batch, kv_len, kv_heads, head_dim], and batch is stacks * layer_batch.
  std::optional<xla::ffi::AnyBuffer> layer;
  xla::ffi::AnyBuffer out;                 // like q
  std::optional<xla::ffi::AnyBuffer> lse;  // [batch..., q_len, q_heads] float32
};

// Fills `params`, or says which rule is broken by which values.
xla::ffi::Error Decode(const CallBuffers& buffers, const CallAttributes& attributes,
                       AttentionParams* params);

// True when there is nothing to compute: an output without elements.
bool IsEmpty(const AttentionProblem& problem);

// The bindings that the platforms' handlers share, less the platform's context argument.
inline auto BindOperands() {
  return xla::ffi::Ffi::Bind()
      .Arg<xla::ffi::AnyBuffer>()          // q
      .Arg<xla::ffi::AnyBuffer>()          // k
      .Arg<xla::ffi::AnyBuffer>()          // v
      .Arg<xla::ffi::AnyBuffer>()          // positions
      .Ret<xla::ffi::AnyBuffer>()          // out
      .OptionalRet<xla::ffi::AnyBuffer>()  // lse
      .Attrs<CallAttributes>();
}

inline auto BindStackedOperands() {
  return xla::ffi::Ffi::Bind()
      .Arg<xla::ffi::AnyBuffer>()          // q
      .Arg<xla::ffi::AnyBuffer>()          // k
      .Arg<xla::ffi::AnyBuffer>()          // v
      .Arg<xla::ffi::AnyBuffer>()          // positions
      .Arg<xla::ffi::AnyBuffer>()          // layer
      .Ret<xla::ffi::AnyBuffer>()          // out
      .OptionalRet<xla::ffi::AnyBuffer>()  // lse
      .Attrs<CallAttributes>();
}

// lse as CallBuffers holds it.
inline std::optional<xla::ffi::AnyBuffer> IfWanted(
    std::optional<xla::ffi::Result<xla::ffi::AnyBuffer>> result) {
  if (!result.has_value()) return std::nullopt;
  return **result;
}

}  // namespace jax_fa

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jax_fa::CallAttributes,
                                      ::xla::ffi::StructMember<float>("scale"),
                                      ::xla::ffi::StructMember<bool>("chunk_invariant"),
                                      ::xla::ffi::StructMember<std::string_view>("implementation"));

#endif  // JAX_FA_FFI_DECODE_H_
