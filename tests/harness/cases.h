// The harness's named cases: problems around tile edges, GQA ratios, every order of positions, and
// options of the mask and the softmax,
// a few of real size. A case is a value; its data come from inputs.h.

#ifndef JAX_FA_TESTS_HARNESS_CASES_H_
#define JAX_FA_TESTS_HARNESS_CASES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "attention/problem.h"

namespace jax_fa::harness {

enum class Positions {
  kIncreasing,  // n_past + t
  kShuffled,    // the same, in random order
  kPadded,      // the same, with negative positions at the end of each sequence
  kAnyOrder,    // random, repeated, negative, at and past kv_len, INT32_MAX and INT32_MIN
};

enum class Starts {
  kNone,
  kBySequence,  // random, 0 in the first sequence, so that the others have poison below
  kByRow,       // random, INT32_MAX and INT32_MIN and negative ones among them
};

enum class Sinks { kNone, kByHead, kBySequence };  // around 1, every third -inf

struct Case {
  std::string name;
  AttentionProblem problem;
  Positions positions = Positions::kIncreasing;
  int64_t n_past = 0;
  bool with_lse = true;
  // Elements by which the bases of q, k, v and out are moved off their 256-byte alignment.
  int64_t misalignment = 0;
  // A slot holding NaN in K and V that some rows see and others do not; -1: none.
  int64_t nan_slot = -1;
  // Sequences a layer of k and v holds, which are then stacks of problem.layers; 0: no stacks.
  int64_t layer_batch = 0;
  // The layer to read, as data; outside the stack it is the nearest one.
  int32_t layer = 0;
  Starts starts = Starts::kNone;
  Sinks sinks = Sinks::kNone;
  // Small cases are few tiles each: what the sanitizers can run in seconds.
  bool is_small = true;
};

const std::vector<Case>& AllCases();

}  // namespace jax_fa::harness

#endif  // JAX_FA_TESTS_HARNESS_CASES_H_
