// The table of cases.

#include "tests/harness/cases.h"

#include <climits>
#include <cmath>

namespace jax_fa::harness {
namespace {

constexpr DType kF32 = DType::kFloat32;
constexpr DType kF16 = DType::kFloat16;
constexpr DType kBF16 = DType::kBFloat16;

struct Shape {
  int64_t batch, q_len, kv_len, q_heads, kv_heads, head_dim;
};

Case Make(const char* name, Shape shape, DType q_dtype, DType kv_dtype) {
  Case c;
  c.name = name;
  c.problem.batch = shape.batch;
  c.problem.q_len = shape.q_len;
  c.problem.kv_len = shape.kv_len;
  c.problem.q_heads = shape.q_heads;
  c.problem.kv_heads = shape.kv_heads;
  c.problem.head_dim = shape.head_dim;
  c.problem.q_dtype = q_dtype;
  c.problem.kv_dtype = kv_dtype;
  c.problem.scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim));
  return c;
}

Case With(Case c, Positions positions, int64_t n_past = 0) {
  c.positions = positions;
  c.n_past = n_past;
  return c;
}

Case WithScale(Case c, float scale) {
  c.problem.scale = scale;
  return c;
}

Case WithoutLse(Case c) {
  c.with_lse = false;
  return c;
}

Case WithMisalignment(Case c, int64_t elements) {
  c.misalignment = elements;
  return c;
}

Case WithNanSlot(Case c, int64_t slot) {
  c.nan_slot = slot;
  return c;
}

// k and v become stacks of `layers`, `layer_batch` sequences in each.
Case Stacked(Case c, int64_t layers, int64_t layer_batch, int32_t layer) {
  c.problem.layers = layers;
  c.layer_batch = layer_batch;
  c.layer = layer;
  return c;
}

// Frees the choice of tiles: few rows over many slots are then split over blocks.
Case WithoutChunkInvariance(Case c) {
  c.problem.chunk_invariant = false;
  return c;
}

Case WithWindow(Case c, int32_t window) {
  c.problem.sliding_window = window;
  return c;
}

Case WithStarts(Case c, Starts starts) {
  c.problem.has_starts = true;
  c.starts = starts;
  return c;
}

Case WithCap(Case c, float cap) {
  c.problem.logits_soft_cap = cap;
  return c;
}

Case WithSinks(Case c, Sinks sinks) {
  c.problem.has_sinks = true;
  c.sinks = sinks;
  return c;
}

Case WithAllOptions(Case c, int32_t window) {
  return WithSinks(WithCap(WithStarts(WithWindow(c, window), Starts::kByRow), 5.0f),
                   Sinks::kBySequence);
}

Case Large(Case c) {
  c.is_small = false;
  return c;
}

}  // namespace

const std::vector<Case>& AllCases() {
  using P = Positions;
  static const std::vector<Case> cases = {
      // Shape: batch, q_len, kv_len, q_heads, kv_heads, head_dim.
      With(Make("one_query", {1, 1, 70, 2, 1, 64}, kF32, kF16), P::kIncreasing, 33),
      Make("one_slot", {2, 1, 1, 3, 3, 128}, kF16, kF16),
      Make("tile_minus_one", {1, 63, 63, 2, 1, 128}, kF16, kF16),
      Make("tile", {1, 64, 64, 2, 1, 64}, kBF16, kBF16),
      Make("tile_plus_one", {1, 65, 130, 2, 1, 128}, kF32, kBF16),
      Make("tiles_2", {1, 128, 128, 1, 1, 128}, kF32, kF16),
      Make("tiles_4_plus_one", {1, 257, 257, 2, 2, 128}, kF16, kF16),
      WithoutLse(Make("gqa_3_no_lse", {1, 100, 100, 9, 3, 64}, kBF16, kBF16)),
      Make("gqa_7", {1, 70, 80, 14, 2, 128}, kF16, kF16),
      With(Make("mqa_16_n_past", {1, 40, 400, 16, 1, 64}, kF32, kF16), P::kIncreasing, 350),
      With(Make("batch_shuffled", {2, 130, 200, 4, 2, 128}, kF16, kF16), P::kShuffled, 37),
      With(Make("batch_padded", {3, 70, 100, 4, 2, 64}, kF32, kBF16), P::kPadded, 11),
      With(Make("any_order", {2, 100, 150, 4, 2, 128}, kF32, kF16), P::kAnyOrder),
      With(Make("any_order_bf16", {2, 100, 150, 4, 2, 64}, kBF16, kBF16), P::kAnyOrder),
      With(Make("all_padding", {1, 66, 64, 2, 1, 64}, kF16, kF16), P::kIncreasing, -1000),
      Make("no_slots", {2, 65, 0, 2, 1, 128}, kF32, kF16),
      WithNanSlot(Make("nan_seen_by_some", {1, 130, 130, 2, 1, 128}, kF16, kF16), 70),
      WithNanSlot(With(Make("nan_shuffled", {1, 130, 130, 2, 1, 64}, kF32, kBF16), P::kShuffled),
                  70),
      WithMisalignment(Make("misaligned_1", {1, 66, 100, 4, 2, 128}, kF16, kF16), 1),
      WithMisalignment(Make("misaligned_4", {1, 66, 100, 4, 2, 64}, kF32, kBF16), 4),
      WithScale(Make("scale_2", {1, 66, 66, 2, 1, 64}, kF16, kF16), 2.0f),
      WithScale(Make("scale_negative", {1, 66, 66, 2, 1, 128}, kF32, kF16), -0.125f),
      WithScale(Make("scale_zero", {1, 66, 66, 2, 1, 64}, kF32, kF16), 0.0f),
      Stacked(Make("layer_1_of_3", {2, 66, 70, 4, 2, 128}, kF16, kF16), 3, 2, 1),
      Stacked(With(Make("stacks_2_bf16", {4, 66, 130, 2, 1, 64}, kBF16, kBF16), P::kPadded), 2, 2,
              1),
      Stacked(With(Make("layer_past_end", {2, 40, 100, 4, 2, 128}, kF32, kF16), P::kAnyOrder), 3, 1,
              INT32_MAX),
      Stacked(Make("layer_negative", {1, 66, 66, 2, 1, 256}, kF16, kF16), 2, 1, -5),
      Make("head_dim_256", {1, 66, 66, 2, 1, 256}, kF16, kF16),
      Make("head_dim_80", {1, 66, 66, 4, 2, 80}, kF32, kBF16),
      With(Make("head_dim_5", {2, 33, 66, 4, 2, 5}, kBF16, kBF16), P::kAnyOrder),
      Make("head_dim_600", {1, 9, 300, 2, 1, 600}, kF32, kF16),
      // Slots split over blocks, by one consumer and by two; all heads in one tile, not split.
      WithoutChunkInvariance(With(Make("split_one_query", {1, 1, 2100, 8, 2, 128}, kBF16, kBF16),
                                  P::kIncreasing, 2060)),
      WithoutChunkInvariance(
          With(Make("split_gqa_7", {2, 20, 4200, 14, 2, 64}, kF16, kF16), P::kAnyOrder)),
      WithoutChunkInvariance(
          With(Make("split_f32", {1, 33, 4100, 4, 2, 128}, kF32, kBF16), P::kPadded, 4000)),
      WithoutChunkInvariance(WithNanSlot(
          With(Make("split_nan", {1, 40, 4200, 2, 1, 72}, kF16, kF16), P::kShuffled, 3900), 3930)),
      WithoutChunkInvariance(
          Stacked(With(Make("split_layer", {2, 5, 2100, 4, 2, 64}, kBF16, kBF16), P::kPadded, 2050),
                  2, 2, 1)),
      With(Make("heads_in_one_tile", {70, 1, 300, 4, 2, 64}, kBF16, kBF16), P::kAnyOrder),
      WithWindow(Make("window_1", {1, 66, 66, 2, 1, 64}, kF16, kF16), 1),
      WithWindow(Make("window_64", {1, 200, 200, 2, 1, 128}, kBF16, kBF16), 64),
      WithWindow(
          With(Make("window_n_past", {2, 100, 500, 4, 2, 64}, kF32, kF16), P::kIncreasing, 380),
          100),
      WithWindow(With(Make("window_any_order", {2, 100, 260, 4, 2, 128}, kF16, kF16), P::kAnyOrder),
                 70),
      WithWindow(WithNanSlot(Make("window_nan", {1, 260, 260, 2, 1, 64}, kF16, kF16), 70), 90),
      WithWindow(Make("window_hides_none", {1, 130, 130, 2, 1, 128}, kF32, kBF16), INT32_MAX),
      WithStarts(Make("starts", {3, 130, 200, 4, 2, 128}, kF16, kF16), Starts::kBySequence),
      WithStarts(
          With(Make("starts_any_order", {3, 100, 150, 4, 2, 64}, kBF16, kBF16), P::kAnyOrder),
          Starts::kBySequence),
      WithStarts(With(Make("starts_by_row", {2, 140, 200, 4, 2, 80}, kF32, kF16), P::kShuffled, 50),
                 Starts::kByRow),
      WithCap(Make("cap_50", {1, 130, 130, 4, 2, 128}, kF16, kF16), 50.0f),
      WithCap(With(Make("cap_half", {2, 70, 100, 2, 1, 64}, kBF16, kBF16), P::kShuffled, 20), 0.5f),
      WithCap(WithScale(Make("cap_scale_2", {1, 66, 66, 2, 1, 64}, kF32, kF16), 2.0f), 30.0f),
      WithSinks(Make("sinks", {1, 130, 130, 7, 1, 64}, kF16, kF16), Sinks::kByHead),
      WithSinks(With(Make("sinks_padded", {3, 70, 100, 4, 2, 128}, kF32, kBF16), P::kPadded, 11),
                Sinks::kBySequence),
      WithSinks(Make("sinks_no_slots", {2, 65, 0, 4, 2, 64}, kF16, kF16), Sinks::kByHead),
      WithAllOptions(Make("all_options", {2, 200, 200, 4, 2, 128}, kF16, kF16), 70),
      WithAllOptions(
          With(Make("all_options_order", {3, 100, 260, 4, 2, 64}, kBF16, kBF16), P::kAnyOrder), 50),
      WithAllOptions(
          With(Make("all_options_d80", {2, 70, 300, 4, 2, 80}, kF32, kF16), P::kPadded, 200), 128),
      WithAllOptions(
          Stacked(Make("all_options_layer", {2, 66, 70, 4, 2, 128}, kF16, kF16), 3, 2, 1), 20),
      Large(WithSinks(WithWindow(Make("gpt_oss_2k", {1, 2048, 2048, 64, 8, 64}, kBF16, kBF16), 128),
                      Sinks::kByHead)),
      Large(WithCap(
          WithWindow(Make("capped_window_2k", {1, 2048, 2048, 16, 8, 128}, kF16, kF16), 1024),
          50.0f)),
      Large(WithoutChunkInvariance(
          With(Make("spec_16_at_32k", {1, 16, 32768, 32, 8, 128}, kBF16, kBF16), P::kIncreasing,
               32752))),
      Large(Make("qwen7b_2k", {1, 2048, 2048, 28, 4, 128}, kF16, kF16)),
      Large(With(Make("chunk_256_at_4k", {1, 256, 4200, 32, 8, 128}, kF32, kBF16), P::kIncreasing,
                 3840)),
      Large(With(Make("batch_4_d64", {4, 500, 520, 32, 8, 64}, kF32, kF16), P::kPadded, 3)),
      Large(With(Make("shuffled_1k", {1, 1024, 1024, 16, 2, 128}, kBF16, kBF16), P::kShuffled)),
  };
  return cases;
}

}  // namespace jax_fa::harness
