// The logit that a query head joins to the softmax of its rows.

#ifndef JAX_FA_ATTENTION_SINKS_H_
#define JAX_FA_ATTENTION_SINKS_H_

#include <cmath>
#include <cstdint>

#include "attention/problem.h"

namespace jax_fa {

// Of head `q_head` in sequence `b`; -inf, which changes no bit, where the call has no sinks.
constexpr JAX_FA_HOST_DEVICE float SinkLogit(const AttentionParams& params, int64_t b,
                                             int64_t q_head) {
  if (params.sinks == nullptr) return -INFINITY;
  return params.sinks[(params.sinks_by_sequence ? b * params.q_heads : 0) + q_head];
}

}  // namespace jax_fa

#endif  // JAX_FA_ATTENTION_SINKS_H_
