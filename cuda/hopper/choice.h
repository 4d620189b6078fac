// Which build of the Hopper kernel a call gets: by its shape, and by what is built. Host code.

#ifndef JAX_FA_CUDA_HOPPER_CHOICE_H_
#define JAX_FA_CUDA_HOPPER_CHOICE_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "attention/problem.h"

namespace jax_fa::cuda::hopper {

// What calls a build is for. All but kWide give a row the same bits, as long as slots are not
// shared out.
enum class Shape {
  kLarge,        // any
  kSmall,        // few query tiles: they have 64 rows, two blocks to an SM
  kPacked,       // few tokens: a tile has all query heads of a KV head; its slots may be shared out
  kPackedSmall,  // the same where one consumer's rows are enough
  kWide,         // many long tiles, without chunk invariance: another KV tile
};

// What a build does beside a causal mask, each more than the one before.
enum class Options {
  kPlain,    // nothing
  kBounded,  // rows with lower bounds (windows, starts); sinks
  kCapped,   // a soft cap
};

// A row of builds.def.
struct Build {
  const char* name;
  int64_t head_dim;  // the largest that it serves
  Shape shape;
  Options options;
  cudaError_t (*launch)(const AttentionParams& params, cudaStream_t stream);
};

// The largest head dim of any build.
int64_t MaxHeadDim();

// The build for `problem`, whose head dim is at most MaxHeadDim(), on a device of `sm_count` SMs.
const Build& ChooseBuild(const AttentionProblem& problem, int sm_count);

// SMs of the current device.
cudaError_t CountSms(int* count);

inline int32_t CeilDiv(int64_t a, int64_t b) { return static_cast<int32_t>((a + b - 1) / b); }

// Tokens of which a consumer has all query heads of a KV head; 0: they are too many.
int BoxTokens(const AttentionProblem& problem);

// Whether the slots of a query tile are to be shared out over a cluster.
bool SharesSlots(const AttentionProblem& problem, int sm_count);

}  // namespace jax_fa::cuda::hopper

#endif  // JAX_FA_CUDA_HOPPER_CHOICE_H_
