#include "cuda/hopper/choice.h"

#include "cuda/hopper/config.cuh"

namespace jax_fa::cuda::hopper {

// Each row's launch, of every dtype; CMake writes the files that define them.
#define BUILD(name, head_dim, tuning, shape, options) \
  cudaError_t Launch_##name(const AttentionParams& params, cudaStream_t stream);
#include "cuda/hopper/builds.def"
#undef BUILD

namespace {

#define BUILD(name, head_dim, tuning, shape, options) \
  {#name, head_dim, Shape::shape, Options::options, Launch_##name},
constexpr Build kBuilds[] = {
#include "cuda/hopper/builds.def"
};
#undef BUILD

// Whether one consumer's rows are enough for all tokens of a KV head.
bool FitsOneConsumer(const AttentionProblem& problem) {
  return problem.q_len <= BoxTokens(problem);
}

// Where slots are shared out, and, as it changes no bit, where tiles of one query head each are
// more than the device holds at once, two to an SM.
bool PrefersPackedTiles(const AttentionProblem& problem, int sm_count) {
  return SharesSlots(problem, sm_count) ||
         (FitsOneConsumer(problem) && problem.q_heads > problem.kv_heads &&
          problem.batch * problem.q_heads > 2 * sm_count);
}

// Whether query tiles of 64 rows fill the device better, which changes no bit: where they leave SMs
// idle even so, and, two to an SM, where the short tiles of a causal triangle end early enough to
// make up for the worse use of K and V.
bool PrefersSmallTiles(const AttentionProblem& problem, int sm_count) {
  const int64_t tiles = CeilDiv(problem.q_len, 64) * problem.batch * problem.q_heads;
  if (tiles <= sm_count) return true;
  return tiles <= 2 * sm_count && problem.kv_len < 2 * problem.q_len;
}

// Query tiles of 192 rows on smaller KV tiles pay for many rows over long caches.
bool PrefersWideTiles(const AttentionProblem& problem) {
  constexpr int64_t kQLen = 8192;
  constexpr int64_t kKvLen = 16384;
  constexpr int64_t kRows = 4 * kQLen;  // of all heads; fewer would leave SMs idle
  return !problem.chunk_invariant && problem.rows() >= kRows && problem.q_len >= kQLen &&
         problem.kv_len >= kKvLen;
}

Options ChooseOptions(const AttentionProblem& problem) {
  if (problem.logits_soft_cap > 0.0f) return Options::kCapped;
  const bool bounded = problem.sliding_window > 0 || problem.has_starts || problem.has_sinks;
  return bounded ? Options::kBounded : Options::kPlain;
}

// Tiles of 64 rows also where the window is so short that larger ones would mostly be masked.
bool HasShortWindow(const AttentionProblem& problem) {
  constexpr int32_t kShort = 256;
  return problem.sliding_window > 0 && problem.sliding_window <= kShort;
}

Shape ChooseShape(const AttentionProblem& problem, Options options, int sm_count) {
  if (options != Options::kPlain) {
    return HasShortWindow(problem) || PrefersSmallTiles(problem, sm_count) ? Shape::kSmall
                                                                           : Shape::kLarge;
  }
  if (PrefersWideTiles(problem)) return Shape::kWide;
  if (PrefersPackedTiles(problem, sm_count)) {
    return FitsOneConsumer(problem) ? Shape::kPackedSmall : Shape::kPacked;
  }
  return PrefersSmallTiles(problem, sm_count) ? Shape::kSmall : Shape::kLarge;
}

// The row with the smallest head dim that serves `head_dim`, of this shape; null where none is
// built.
const Build* FindBuild(int64_t head_dim, Shape shape, Options options) {
  const Build* found = nullptr;
  for (const Build& build : kBuilds) {
    if (build.shape != shape || build.options != options) continue;
    if (build.head_dim < head_dim) continue;
    if (found == nullptr || build.head_dim < found->head_dim) found = &build;
  }
  return found;
}

}  // namespace

int64_t MaxHeadDim() {
  int64_t most = 0;
  for (const Build& build : kBuilds) most = build.head_dim > most ? build.head_dim : most;
  return most;
}

const Build& ChooseBuild(const AttentionProblem& problem, int sm_count) {
  const Options options = ChooseOptions(problem);
  const Build* any = FindBuild(problem.head_dim, Shape::kLarge, options);
  const Shape shape = ChooseShape(problem, options, sm_count);
  const Build* fitting = FindBuild(problem.head_dim, shape, options);
  // A wider build's other shape would cost more than it gains.
  return fitting != nullptr && fitting->head_dim == any->head_dim ? *fitting : *any;
}

cudaError_t CountSms(int* count) {
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  return cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device);
}

int BoxTokens(const AttentionProblem& problem) {
  return static_cast<int>(kConsumerRows / problem.q_heads_per_kv_head());
}

// Not under chunk invariance: each share has a shift and sums of its own, and how many there are
// depends on the rows. Otherwise where tiles are so few that the device holds two blocks for each
// (two blocks of one consumer on an SM, one of two consumers), and slots so many that it pays.
bool SharesSlots(const AttentionProblem& problem, int sm_count) {
  if (problem.chunk_invariant || BoxTokens(problem) == 0) return false;
  const int64_t tiles_of_64 =
      CeilDiv(problem.q_len, BoxTokens(problem)) * problem.batch * problem.kv_heads;
  return tiles_of_64 <= sm_count && problem.kv_len >= (FitsOneConsumer(problem) ? 2048 : 4096);
}

}  // namespace jax_fa::cuda::hopper
