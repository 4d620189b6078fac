// What the driver (prefill.cc) hands to the kernel of one instruction set: a tile of query rows
// that share a KV head. Plain data only. The files built with extra instruction flags include no
// header with inline functions in it: the linker keeps one copy of such a function for the whole
// library, and it could be the copy that needs AVX-512.

#ifndef JAX_FA_CPU_QUERY_TILE_H_
#define JAX_FA_CPU_QUERY_TILE_H_

#include <stdint.h>

namespace jax_fa::cpu {

enum class Element : int32_t { kFloat32, kFloat16, kBFloat16 };

struct QueryRow {
  int64_t index;  // of the row in q and out, counted in rows of head_dim; of its lse
  int32_t begin;  // it sees the slots [begin, end)
  int32_t end;    // 0: an empty row
  float sink;     // a logit more, in natural units, of value 0; -inf: none
};

struct QueryTile {
  const QueryRow* rows;  // [row_count], any order; fastest where both ends of what is seen grow
  int64_t row_count;
  int32_t begin;  // all slots that a row of the tile sees lie in [begin, end)
  int32_t end;
  int64_t head_dim;

  const void* q;      // row `index` starts at element index * head_dim
  const uint16_t* k;  // slot s of this sequence and KV head starts at element s * slot_step
  const uint16_t* v;
  int64_t slot_step;
  void* out;   // as q
  float* lse;  // by `index`; may be null

  Element q_element;
  Element kv_element;  // kFloat16 or kBFloat16
  // Probabilities are exp2(scale_log2 * s - max), s being q.k, or tanh(cap_scale * q.k) with a soft
  // cap.
  float scale_log2;
  float cap_scale;
  bool is_capped;
};

// The kernel of one instruction set.
struct TileKernel {
  const char* name;
  int64_t row_group;  // rows that one micro-kernel call serves; tiles are best a multiple of it
  // Bytes of scratch for tiles of at most `row_count` rows. They must be 64-byte aligned.
  int64_t (*scratch_bytes)(int64_t head_dim, int64_t row_count);
  // Writes out and lse of all rows of `tile`. Each row's bits depend on that row alone.
  void (*run)(const QueryTile& tile, void* scratch);
};

}  // namespace jax_fa::cpu

#endif  // JAX_FA_CPU_QUERY_TILE_H_
