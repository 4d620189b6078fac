// Where a slot lies: in a cache of its own, or in one layer of a stack of caches.

#ifndef JAX_FA_ATTENTION_KV_LAYOUT_H_
#define JAX_FA_ATTENTION_KV_LAYOUT_H_

#include <cstdint>

#include "attention/problem.h"

namespace jax_fa {

// Which sequence of k and v, counted over all that are stacked there, sequence `b` of q reads. A
// layer outside the stack is the nearest one in it: memory safety cannot rest on data. Where
// `layer` lies on a device, only that device calls this.
template <typename Int>
constexpr JAX_FA_HOST_DEVICE Int CacheSequence(const int32_t* layer, Int layers, Int layer_batch,
                                               Int b) {
  if (layer == nullptr) return b;
  const Int wanted = *layer;
  const Int chosen = wanted < 0 ? 0 : (wanted < layers ? wanted : layers - 1);
  return b + (b / layer_batch * (layers - 1) + chosen) * layer_batch;
}

// Elements from one slot of a KV head to the next.
constexpr JAX_FA_HOST_DEVICE int64_t SlotPitch(const AttentionProblem& problem) {
  return problem.kv_heads * problem.head_dim;
}

// The element of k and v where slot 0 of `kv_head` lies that sequence `b` of q reads.
constexpr JAX_FA_HOST_DEVICE int64_t CacheOffset(const AttentionParams& params, int64_t b,
                                                 int64_t kv_head) {
  const int64_t sequence = CacheSequence(params.layer, params.layers, params.layer_batch, b);
  return (sequence * params.kv_len * params.kv_heads + kv_head) * params.head_dim;
}

}  // namespace jax_fa

#endif  // JAX_FA_ATTENTION_KV_LAYOUT_H_
