// Seeded data of a case, on the host: unit-normal q, K and V, positions, and poison in every slot
// that no row sees and in every layer that is not read.

#ifndef JAX_FA_TESTS_HARNESS_INPUTS_H_
#define JAX_FA_TESTS_HARNESS_INPUTS_H_

#include <cstdint>
#include <vector>

#include "attention/problem.h"
#include "tests/harness/cases.h"

namespace jax_fa::harness {

// An array as it is stored, and the values that stands for.
struct HostArray {
  DType dtype = DType::kFloat32;
  std::vector<uint8_t> bytes;
  std::vector<float> values;
};

struct Inputs {
  HostArray q;                     // [batch, q_len, q_heads, head_dim]
  HostArray k;                     // [batch, kv_len, kv_heads, head_dim], or a stack of layers:
  HostArray v;                     // [stacks, layers, layer_batch, kv_len, kv_heads, head_dim]
  std::vector<int32_t> positions;  // [batch, q_len]
  std::vector<int32_t> starts;     // none, [batch] or [batch, q_len]
  std::vector<float> sinks;        // none, [q_heads] or [batch, q_heads]
};

Inputs MakeInputs(const Case& c, uint64_t seed);

// The slots [first, end) that token `t` of sequence `b` sees; none where end <= first.
struct SeenSlots {
  int64_t first;
  int64_t end;
};
SeenSlots Seen(const Case& c, const Inputs& inputs, int64_t b, int64_t t);

// The logit that joins the rows of `head` in sequence `b`; -inf: none.
double Sink(const Case& c, const Inputs& inputs, int64_t b, int64_t head);

// Which sequence of k and v, counted over all that are stacked there, sequence `b` of q reads.
int64_t StackedSequence(const Case& c, int64_t b);

// Rounds `values` to `dtype`; `values` of the result are the rounded ones.
HostArray Store(std::vector<float> values, DType dtype);
// The values of stored bytes.
HostArray Load(std::vector<uint8_t> bytes, DType dtype);

}  // namespace jax_fa::harness

#endif  // JAX_FA_TESTS_HARNESS_INPUTS_H_
