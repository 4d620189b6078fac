// The one description of a prefill-attention call that every kernel takes: the problem (what a
// kernel is chosen by) and the problem with its data. No XLA, no CUDA, no Python in this room: the
// CPU kernel, the CUDA kernels, the binding and the standalone harness all stand on it.
// What a row sees is in visible.h, where a slot lies in kv_layout.h, what no kernel serves in
// rules.h.

#ifndef JAX_FA_ATTENTION_PROBLEM_H_
#define JAX_FA_ATTENTION_PROBLEM_H_

#include <cstdint>

// Of what kernels call too.
#ifdef __CUDACC__
#define JAX_FA_HOST_DEVICE __host__ __device__
#else
#define JAX_FA_HOST_DEVICE
#endif

namespace jax_fa {

enum class DType : int32_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };

constexpr const char* DTypeName(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kFloat16:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
  }
  return "unknown";
}

constexpr int64_t DTypeBytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// Positions are int32, so a slot index is one too. The margin lets a kernel round a length up to
// its tile and add one tile without leaving int32.
constexpr int64_t kMaxKvLen = (int64_t{1} << 31) - 4096;

// What the choice of a kernel may depend on. Nothing here lives on a device.
struct AttentionProblem {
  int64_t batch = 0;
  int64_t q_len = 0;
  int64_t kv_len = 0;   // slots of the cache; at most kMaxKvLen
  int64_t q_heads = 0;  // a multiple of kv_heads
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t layers = 1;                // stacked in k and v; one of them is read
  DType q_dtype = DType::kFloat32;   // also the dtype of out
  DType kv_dtype = DType::kFloat16;  // float16 or bfloat16; equals q_dtype when that is 16-bit
  float scale = 1.0f;                // finite, any sign; scores = scale * q.k
  bool chunk_invariant = true;       // contract C5: a row's bits depend on that row alone
  int32_t sliding_window = 0;        // W: a row at p sees at most the slots p-W+1 .. p; 0: all
  float logits_soft_cap = 0.0f;      // finite, > 0: s -> cap * tanh(s / cap) after scale; 0: none
  bool has_starts = false;           // rows have a first slot
  bool has_sinks = false;            // query heads have a sink

  int64_t q_heads_per_kv_head() const { return q_heads / kv_heads; }
  // Rows of output: one per (sequence, token, query head).
  int64_t rows() const { return batch * q_len * q_heads; }
};

// A problem and its arrays, all contiguous and row-major. Row (b, t, h) of `q` starts at
// ((b * q_len + t) * q_heads + h) * head_dim; products of extents may pass 2^31, so offsets are
// int64_t. Bases are aligned to the element only: XLA may pass a slice of a larger buffer.
//
// k and v may be stacks of layers, so that a scan over layers need not cut one out. They are then
// [batch / layer_batch, layers, layer_batch, kv_len, kv_heads, head_dim], and `layer`, which lies
// where they do, says which layer to read.
struct AttentionParams : AttentionProblem {
  const void* q = nullptr;             // [batch, q_len, q_heads, head_dim]   q_dtype
  const void* k = nullptr;             // [batch, kv_len, kv_heads, head_dim] kv_dtype
  const void* v = nullptr;             // [batch, kv_len, kv_heads, head_dim] kv_dtype
  const int32_t* positions = nullptr;  // [batch, q_len]
  const int32_t* layer = nullptr;      // one value, any; null: k and v are no stacks
  int64_t layer_batch = 0;             // read only where layer is not null
  // First slot that a row may see, any value; null: 0. [batch], or [batch, q_len] with
  // starts_by_row.
  const int32_t* starts = nullptr;
  bool starts_by_row = false;
  // A logit a query head, natural units, joined to the row's capped logits with the value 0; null:
  // none. [q_heads], or [batch, q_heads] with sinks_by_sequence.
  const float* sinks = nullptr;
  bool sinks_by_sequence = false;
  void* out = nullptr;   // [batch, q_len, q_heads, head_dim]   q_dtype
  float* lse = nullptr;  // [batch, q_len, q_heads], natural log; null: not wanted
};

}  // namespace jax_fa

#endif  // JAX_FA_ATTENTION_PROBLEM_H_
