// The definition of prefill attention in double precision on the host, a row at a time, with a
// bound on how far a correct kernel may be from it.

#ifndef JAX_FA_TESTS_HARNESS_REFERENCE_H_
#define JAX_FA_TESTS_HARNESS_REFERENCE_H_

#include <cstdint>
#include <vector>

#include "tests/harness/cases.h"
#include "tests/harness/inputs.h"

namespace jax_fa::harness {

// Which roundings to 16 bits a kernel makes between its inputs and its output.
enum class Arithmetic {
  kFloat32,  // none
  kMixed,    // scaled q and probabilities are rounded to the cache's dtype
};

struct RowReference {
  std::vector<double> out;        // [head_dim]
  std::vector<double> out_bound;  // [head_dim], largest allowed |kernel - out|
  double lse = 0.0;
  double lse_bound = 0.0;
};

// Row (b, t, h) numbered (b * q_len + t) * q_heads + h.
RowReference ComputeRow(const Case& c, const Inputs& inputs, int64_t row, Arithmetic arithmetic);

}  // namespace jax_fa::harness

#endif  // JAX_FA_TESTS_HARNESS_REFERENCE_H_
