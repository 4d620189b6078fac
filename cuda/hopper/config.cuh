// Sizes of the Hopper kernel: tiles, stages, registers, shared memory. The kernel itself is in
// prefill_kernel.cuh; docs/hopper.md draws the schedule and the memory map.

#ifndef JAX_FA_CUDA_HOPPER_CONFIG_CUH_
#define JAX_FA_CUDA_HOPPER_CONFIG_CUH_

#include <cuda.h>

#include <cstdint>
#include <type_traits>

#include "cuda/hopper/divisor.h"

namespace jax_fa::cuda::hopper {

constexpr int kWarpgroup = 128;      // threads
constexpr int kSwizzleColumns = 64;  // 16-bit columns in a 128-byte swizzled row
constexpr int kConsumerRows = 64;    // query rows of a consumer warpgroup
constexpr int kConsumerPanelBytes = kConsumerRows * 2 * kSwizzleColumns;

// What may be tuned; docs/hopper.md has what each choice gained. A row's bits depend on kTileKV
// alone, so that is one value per (element, head dim) on the chunk-invariant path.
struct Tuning128 {
  static constexpr int kConsumers = 2;  // warpgroups of 64 query rows each
  static constexpr int kTileKV = 128;   // slots in a KV tile
  static constexpr int kKvStages = 4;   // KV tiles, K or V, in the ring
  static constexpr int kQStages = 2;    // query tiles in flight
  static constexpr int kBlocksPerSm = 1;
  // A 16-bit output leaves through the tile's Q stage and TMA, or straight from registers.
  static constexpr bool kStagesOutput = true;
  // The softmax of a KV tile runs under the product P.V of the one before, not after it.
  static constexpr bool kSoftmaxUnderOutput = true;
  // A query tile has all query heads of a KV head: row = head * box_tokens + token.
  static constexpr bool kPacksHeads = false;
  // The KV tiles of a query tile are shared out over the blocks of a cluster; see split.cuh.
  static constexpr bool kSharesSlots = false;
  // What the call's rows may ask for beside a causal mask; see Bounded and Capped.
  static constexpr bool kHasBounds = false;
  static constexpr bool kHasCap = false;
};

// Query tiles of 64 rows, two blocks on an SM: for few query rows.
struct Tuning128Small : Tuning128 {
  static constexpr int kConsumers = 1;
  static constexpr int kKvStages = 3;
  static constexpr int kQStages = 1;
  static constexpr int kBlocksPerSm = 2;
};

// Tiles of all query heads of a KV head, whose KV tiles are split over a cluster of one or more.
struct Tuning128Split : Tuning128 {
  static constexpr int kQStages = 1;
  static constexpr bool kStagesOutput = false;
  static constexpr bool kPacksHeads = true;
  static constexpr bool kSharesSlots = true;
};

// The same where a consumer's rows are enough.
struct Tuning128SplitSmall : Tuning128Small {
  static constexpr bool kStagesOutput = false;
  static constexpr bool kPacksHeads = true;
  static constexpr bool kSharesSlots = true;
};

// Half the products for the same exponentials: a third consumer hides more of them, and leaves no
// registers to spare.
struct Tuning64 : Tuning128 {
  static constexpr int kConsumers = 3;
  static constexpr bool kSoftmaxUnderOutput = false;
};

// Three consumers on smaller KV tiles, for many and long query tiles; another KV tile, so only for
// callers who do without chunk invariance.
struct Tuning128Wide : Tuning128 {
  static constexpr int kConsumers = 3;
  static constexpr int kTileKV = 64;
  static constexpr int kKvStages = 8;
};

struct Tuning64Small : Tuning128Small {
  static constexpr int kKvStages = 4;
};

struct Tuning64Split : Tuning128Split {};

struct Tuning64SplitSmall : Tuning64Small {
  static constexpr bool kStagesOutput = false;
  static constexpr bool kPacksHeads = true;
  static constexpr bool kSharesSlots = true;
};

// The output takes 128 registers a thread, and Q 64 KB: there is one stage, free for the next Q
// before the tile's end since the output does not go through it.
struct Tuning256 : Tuning128 {
  static constexpr int kTileKV = 80;
  static constexpr int kQStages = 1;
  static constexpr bool kStagesOutput = false;
};

// The same for rows with a lower bound (windows, starts), and with sinks.
template <typename Tuning>
struct Bounded : Tuning {
  static constexpr bool kHasBounds = true;
};

// And with a soft cap.
template <typename Tuning>
struct Capped : Bounded<Tuning> {
  static constexpr bool kHasCap = true;
};

// One build of the kernel. `Element` is the type of k and v, `Query` that of q and out: Element or
// float. kHeadDim is the padded head dim; columns past the true one are filled with zeros.
template <typename Element_, typename Query_, int kHeadDim_, typename Tuning>
struct Config : Tuning {
  using Element = Element_;
  using Query = Query_;
  static constexpr bool kFloatQuery = std::is_same_v<Query, float>;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kPanels = kHeadDim / kSwizzleColumns;  // 64-column panels of a tile
  static constexpr int kTileQ = kConsumerRows * Tuning::kConsumers;
  static constexpr int kConsumerThreads = kWarpgroup * Tuning::kConsumers;
  static constexpr int kThreads = kWarpgroup + kConsumerThreads;

  // Warps of the first warpgroup: one issues the copies, three inspect V.
  static constexpr int kInspectorWarps = 3;

  // The pool is what the launch gives, kLaunchRegisters a thread: a sum over it hangs.
  static constexpr int kLaunchRegisters = 65536 / (kThreads * Tuning::kBlocksPerSm) / 8 * 8;
  static constexpr int kProducerRegisters = kThreads == 512 ? 32 : 40;
  static constexpr int kConsumerRegisters =
      ((kLaunchRegisters * (1 + Tuning::kConsumers) - kProducerRegisters) / Tuning::kConsumers) /
      8 * 8;

  static constexpr int kQPanelBytes = kTileQ * kSwizzleColumns * 2;
  static constexpr int kKvPanelBytes = Tuning::kTileKV * kSwizzleColumns * 2;
  static constexpr int kQBytes = kQPanelBytes * kPanels;
  static constexpr int kKvBytes = kKvPanelBytes * kPanels;

  // The first scores are multiplied before the tile is described, and their first kFirstPanels
  // panels before the others have arrived. A float32 Q is found by the description; at D = 256
  // there are no registers to spare. Where a block's share of the KV tiles begins, or the first of
  // them that some row sees, is known by it.
  static constexpr bool kStartsAtSlot0 = !Tuning::kSharesSlots && !Tuning::kHasBounds;
  static constexpr bool kStartsEarly = !kFloatQuery && kHeadDim <= 128 && kStartsAtSlot0;
  static constexpr int kFirstPanels = kStartsEarly ? kPanels / 2 : 0;

  static constexpr bool kStoresThroughShared = Tuning::kStagesOutput && !kFloatQuery;

  static constexpr int kScoreRegisters = Tuning::kTileKV / 2;
  static constexpr int kProbRegisters = Tuning::kTileKV / 4;
  static constexpr int kOutRegisters = kHeadDim / 2;

  static_assert(!Tuning::kHasCap || Tuning::kHasBounds, "a soft cap comes with lower bounds");
  static_assert(!(Tuning::kHasBounds && Tuning::kSharesSlots),
                "shares of slots are not described with lower bounds");
  static_assert(kHeadDim % kSwizzleColumns == 0, "a tile is made of 64-column panels");
  static_assert(kKvPanelBytes % 1024 == 0, "a swizzled panel starts at a multiple of 1024 bytes");
  static_assert(Tuning::kTileKV % 16 == 0, "P.V multiplies 16 slots at a time");
  static_assert(kConsumerRegisters <= 240 && kLaunchRegisters * kThreads <= 65536,
                "setmaxnreg takes at most 256, and the pool is the SM's register file");
};

// A query tile as its consumers need to know it, written by the producer but for the last word.
// Slots are counted from the first of the block's share (SharedStorage::first_slot), or of the
// first KV tile that some row sees (LowerBounds::first_slot).
struct TileInfo {
  int32_t q_start;  // first token
  int32_t q_head;
  int32_t kv_sequence;  // in k and v, counted over their layers
  int32_t kv_tiles;     // at least 1
  int32_t whole_tiles;  // of these, the end of those that every row sees whole; others are masked
  int32_t kv_end;       // slots that some row sees
  int32_t poisoned;     // set by the inspectors: some V row that some row sees is not finite
};

// What is further known of a query tile whose rows have lower bounds.
template <int kRows>
struct LowerBounds {
  int32_t lo[2][kRows];  // first slot each row sees; 0: an empty row
  int32_t first_slot[2];
  int32_t whole_begin[2];  // first KV tile that every row sees whole
  int32_t last_start[2];   // last KV tile in which a row sees its first slot
};
struct NoLowerBounds {};

// Tiles are [panel][row][64 columns], each 128-byte row swizzled (the TMA mode SWIZZLE_128B).
template <typename C>
struct alignas(1024) SharedStorage {
  uint8_t q[C::kQStages][C::kQBytes];  // the epilogue stages the output in its own rows of it
  uint8_t kv[C::kKvStages][C::kKvBytes];
  TileInfo tile[2];
  int32_t visible[2][C::kTileQ];  // slots each row sees; 0: an empty row
  // Of a query tile: the kFirstPanels of consumer 0's Q and of K0, whose other panels arrive at
  // K0's kv_full; the other consumers' Q; TileInfo and row limits.
  uint64_t first_panels_full[C::kQStages];
  uint64_t other_q_full[C::kQStages];
  uint64_t info_full[C::kQStages];
  uint64_t q_free[C::kQStages];
  uint64_t kv_full[C::kKvStages];
  uint64_t kv_free[C::kKvStages];
  uint64_t v_raw[C::kKvStages];  // a V tile to be inspected has arrived
  // The tile's sequence in q and out. Only the epilogue wants it; an eighth word in TileInfo would
  // change the addresses that the main loop computes.
  int32_t q_sequence[2];
  int32_t first_slot;  // of the block's share of the KV tiles; written where they are split
  std::conditional_t<C::kHasBounds, LowerBounds<C::kTileQ>, NoLowerBounds> lower;
};

// The launch's arguments beside its tensor maps.
struct KernelParams {
  const void* q;  // read by threads only when it is float32
  const void* k;  // read by threads only in rare paths, as is v
  const void* v;
  const int32_t* positions;
  void* out;  // written by threads, not by TMA, when it is float32, and by some builds
  float* lse;
  int32_t q_len;
  int32_t kv_len;
  int32_t q_heads;
  int32_t kv_heads;
  int32_t head_dim;
  int32_t q_tiles;  // of a head
  int32_t tiles;    // q_tiles * heads of all sequences
  // The order of the query tiles; see PlaceOfTile.
  int32_t sections;
  Divisor section_tiles;
  Divisor section_heads;
  Divisor last_section_heads;  // it may have fewer
  Divisor heads_of_sequence;   // query heads; where a tile packs them, KV heads
  Divisor group;               // query heads of a KV head
  float query_factor;          // a float32 q is multiplied by it before it is rounded
  float score_factor;          // scores * score_factor are logarithms to base 2 of the weights
  int32_t layers;              // as in AttentionParams, and so are the next two
  int32_t layer_batch;
  const int32_t* layer;
  // Where a tile packs heads, a consumer's rows are `group` heads of box_tokens tokens each.
  Divisor box_tokens;
  // As in AttentionParams, for builds with lower bounds and sinks.
  const int32_t* starts;
  const float* sinks;
  int32_t window;
  bool starts_by_row;
  bool sinks_by_sequence;
  // For builds with a soft cap, whose score_factor is 1: a score becomes
  // cap_outer * tanh(score * cap_inner), in logarithms to base 2.
  float cap_inner;
  float cap_outer;
};

struct TensorMaps {
  CUtensorMap q;  // box [64 columns, kConsumerRows tokens], or all heads of box_tokens tokens
  CUtensorMap k;  // box [64 columns, kTileKV slots]
  CUtensorMap v;
  CUtensorMap out;  // box [64 columns, 16 tokens]: a warp's rows; not where a tile packs heads
};

}  // namespace jax_fa::cuda::hopper

#endif  // JAX_FA_CUDA_HOPPER_CONFIG_CUH_
