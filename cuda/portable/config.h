// Sizes of the portable kernel and its shared-memory plan, seen by the kernel and by the host.

#ifndef JAX_FA_CUDA_PORTABLE_CONFIG_H_
#define JAX_FA_CUDA_PORTABLE_CONFIG_H_

#include <cstdint>

#include "attention/problem.h"

// The harness builds one broken variant with 128, to show that it catches the race (kernel.cuh).
#ifndef JAX_FA_PORTABLE_PROBS_STRIDE_BYTES
#define JAX_FA_PORTABLE_PROBS_STRIDE_BYTES 256
#endif

namespace jax_fa::cuda::portable {

constexpr int kTileQ = 64;
constexpr int kTileKv = 64;  // tiles start at slot 0 for every call: contract C5
constexpr int kThreads = 256;
constexpr int kWarpSize = 32;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kThreadsPerRow = kThreads / kTileQ;  // one quarter of head_dim each
constexpr int kProbsStrideBytes = JAX_FA_PORTABLE_PROBS_STRIDE_BYTES;

// 16-bit elements in one 16-byte copy.
constexpr int kChunk = 8;

// Scores: 8 warps as 4 x 2, each 16 rows x 32 slots, in wmma steps of 16 x 16 x 16.
constexpr int kWmma = 16;
constexpr int kWarpColumns = 2;
constexpr int kSlotsPerWarp = kTileKv / kWarpColumns;
static_assert(kWarps / kWarpColumns * kWmma == kTileQ, "the warps' row groups must cover the tile");

// Elements added to a row of Q and K so that the 8 rows a matrix load touches lie in different
// banks. Turing's 64 KB hold the tiles of head_dim 128 only without them.
constexpr int RowPadding(int compute_capability) { return compute_capability < 80 ? 0 : kChunk; }

template <typename KvT, int kHeadDim, int kPadding>
struct SharedStorage {
  static constexpr int kRow = kHeadDim + kPadding;
  static_assert(sizeof(KvT) == 2, "tiles hold 16-bit elements");
  static_assert(kRow % kChunk == 0, "wmma's leading dimension and 16-byte copies need this");

  alignas(128) KvT q[kTileQ][kRow];
  alignas(128) KvT k[kTileKv][kRow];
  alignas(128) KvT v[kTileKv][kHeadDim];
  // Also holds the probabilities, see ProbsOfRow.
  alignas(128) float scores[kTileQ][kTileKv];
};

// The call as the kernel takes it.
struct Args {
  AttentionParams params;
  float q_scale;      // applied to q in float32, before it is rounded to the cache's dtype
  float score_scale;  // applied to the float32 scores, after the soft cap's tanh where there is one
  float cap_scale;    // applied before it
  bool is_capped;
  bool kv_aligned;   // K and V may be read 16 bytes at a time
  bool out_aligned;  // out may be written 16 bytes at a time
};

}  // namespace jax_fa::cuda::portable

#endif  // JAX_FA_CUDA_PORTABLE_CONFIG_H_
