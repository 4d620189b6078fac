// The attention of one tile of query rows, for the instruction set of the including file.
//
//   for each KV tile, from slot 0:
//     keys, values <- K^T and V of the tile, float32                          pack.h
//     for each group of kGroupRows rows that sees a slot of the tile:
//       scores <- q K^T          up to the last slot any row of the group sees  matmul.h
//       probs  <- exp2(scores - row_max), row_max and row_sum updated
//       output <- alpha * output + probs V       each row up to its own last slot
//   out <- output / row_sum
//
// Rows come sorted by what they see, so the rows that see a slot are the last ones of a group, and
// a product over "the slots this row sees" is a few block products. A row therefore multiplies only
// what it sees: garbage in any other slot, NaN included, cannot reach it.

#ifndef JAX_FA_CPU_TILE_KERNEL_H_
#define JAX_FA_CPU_TILE_KERNEL_H_

#include "cpu/pack.h"

namespace jax_fa::cpu {
namespace {

constexpr int64_t kMaxKvTile = 256;
// Scores of neighbouring rows lie one cache line off a power of two, so 12 rows share no L1 set.
constexpr int kScoreStep = kMaxKvTile + 16;

// Slots of a KV tile: keys and values, float32, then fit half of a 512 KiB L2 up to head_dim 256.
// It may depend on nothing else: the tile decides where a row's sums are cut (contract C5).
int64_t KvTile(int64_t head_dim) {
  if (head_dim <= 128) return kMaxKvTile;
  return head_dim <= 256 ? 128 : 64;
}

struct Scratch {
  float* keys;     // [kv_tile / kPanel][head_dim][kPanel]
  float* values;   // [padded_dim / kPanel, rounded up][kv_tile][kPanel]
  float* queries;  // [row_count / kGroupRows, rounded up][head_dim][kGroupRows]
  float* output;   // [row_count][padded_dim]
  float* scores;   // [kGroupRows][kScoreStep], then the probabilities
  float* row_max;  // [row_count], of the scores in log2 units
  float* row_sum;  // [row_count]
  int64_t bytes;   // of all of them
};

Scratch CarveScratch(float* base, int64_t head_dim, int64_t row_count) {
  constexpr int64_t kLine = 16;  // floats
  const int64_t kv_tile = KvTile(head_dim);
  int64_t used = 0;
  const auto take = [&](int64_t floats) {
    float* piece = base == nullptr ? nullptr : base + used;
    used += RoundUp(floats, kLine);
    return piece;
  };
  Scratch scratch;
  scratch.keys = take(kv_tile * head_dim);
  scratch.values = take(kv_tile * RoundUp(head_dim, kPanel));
  scratch.queries = take(RoundUp(row_count, kGroupRows) * head_dim);
  scratch.output = take(row_count * RoundUp(head_dim, kLanes));
  scratch.scores = take(kGroupRows * kScoreStep);
  scratch.row_max = take(row_count);
  scratch.row_sum = take(row_count);
  scratch.bytes = used * static_cast<int64_t>(sizeof(float));
  return scratch;
}

// A KV tile as packed, and the rows of one group before it.
struct GroupStep {
  int64_t head_dim;
  int64_t kv_tile;
  int64_t rows;                // of the group
  int64_t limits[kGroupRows];  // slots of this KV tile that each row sees, ascending
  int64_t first;               // the first row that sees any
  const float* keys;
  const float* values;
  const float* queries;  // of the group, as the pieces of Scratch below
  float* output;
  float* scores;
  float* row_max;
  float* row_sum;
};

void ComputeScores(const GroupStep& step) {
  const int64_t end = step.limits[step.rows - 1];
  int64_t row = step.first;
  for (int64_t slot = 0; slot < end; slot += kPanel) {
    while (step.limits[row] <= slot) ++row;
    const Product product = {step.queries + row,
                             step.keys + slot * step.head_dim,
                             kPanel,
                             step.head_dim,
                             nullptr,
                             step.scores + row * kScoreStep + slot,
                             kScoreStep};
    Multiply<1, kGroupRows>(product, step.rows - row, end - slot > kLanes ? kPanelVecs : 1);
  }
}

// Turns the first `count` scores of a row into probabilities, updates its maximum and sum, and
// returns alpha: what the row's output so far must be multiplied by.
float SoftmaxRow(float* scores, int64_t count, float scale_log2, float* row_max, float* row_sum) {
  const Vec scale = Splat(scale_log2);
  const Vec lowest = Splat(-__builtin_inff());
  const int64_t whole = count / kLanes * kLanes;
  const int64_t rest = count - whole;

  Vec max_lanes = lowest;
  for (int64_t i = 0; i < whole; i += kLanes) {
    max_lanes = Max(max_lanes, Load(scores + i) * scale);
  }
  if (rest > 0) {
    max_lanes = Max(max_lanes, KeepFirst(Load(scores + whole) * scale, rest, lowest));
  }
  const float tile_max = ReduceMax(max_lanes);
  const float new_max = tile_max > *row_max ? tile_max : *row_max;
  // All scores so far are -inf: subtract 0, as -inf - -inf would be NaN and stay.
  const float shift = new_max == -__builtin_inff() ? 0.0f : new_max;

  const Vec shift_lanes = Splat(shift);
  Vec sum_lanes = {};
  for (int64_t i = 0; i < whole; i += kLanes) {
    const Vec prob = Exp2(Load(scores + i) * scale - shift_lanes);
    sum_lanes += prob;
    Store(prob, scores + i);
  }
  if (rest > 0) {
    const Vec prob = Exp2(Load(scores + whole) * scale - shift_lanes);
    sum_lanes += KeepFirst(prob, rest, Vec{});
    Store(prob, scores + whole);
  }
  const float alpha = Exp2(Splat(*row_max - shift))[0];
  *row_sum = *row_sum * alpha + ReduceSum(sum_lanes);
  *row_max = new_max;
  return alpha;
}

// Consumes alphas, one a row.
void AddProbsTimesValues(const GroupStep& step, float* alphas) {
  const int64_t padded_dim = RoundUp(step.head_dim, kLanes);
  int64_t done = 0;  // slots that the rows from `row` on have added
  for (int64_t row = step.first; row < step.rows; ++row) {
    const int64_t slots = step.limits[row] - done;
    if (slots == 0) continue;
    for (int64_t d = 0; d < padded_dim; d += kPanel) {
      const Product product = {step.scores + row * kScoreStep + done,
                               step.values + d * step.kv_tile + done * kPanel,
                               kPanel,
                               slots,
                               alphas + row,
                               step.output + row * padded_dim + d,
                               padded_dim};
      Multiply<kScoreStep, 1>(product, step.rows - row, padded_dim - d > kLanes ? kPanelVecs : 1);
    }
    for (int64_t i = row; i < step.rows; ++i) alphas[i] = 1.0f;
    done = step.limits[row];
  }
}

void AttendGroup(const GroupStep& step, float scale_log2) {
  ComputeScores(step);
  float alphas[kGroupRows];
  for (int64_t row = step.first; row < step.rows; ++row) {
    alphas[row] = SoftmaxRow(step.scores + row * kScoreStep, step.limits[row], scale_log2,
                             step.row_max + row, step.row_sum + row);
  }
  AddProbsTimesValues(step, alphas);
}

void PackQueries(const QueryTile& tile, const Scratch& scratch) {
  for (int64_t row = 0; row < tile.row_count; ++row) {
    const int64_t group = row / kGroupRows;
    float* packed = scratch.queries + group * kGroupRows * tile.head_dim + row % kGroupRows;
    const int64_t index = tile.rows[row].index;
    switch (tile.q_element) {
      case Element::kFloat32:
        PackQueryRow<Float32>(tile.q, index, tile.head_dim, packed);
        break;
      case Element::kFloat16:
        PackQueryRow<Float16>(tile.q, index, tile.head_dim, packed);
        break;
      case Element::kBFloat16:
        PackQueryRow<BFloat16>(tile.q, index, tile.head_dim, packed);
        break;
    }
  }
}

template <class Type>
void PackKvTile(const QueryTile& tile, int64_t slot, int64_t slots, const Scratch& scratch) {
  const int64_t first = slot * tile.slot_step;
  PackKeys<Type>(tile.k + first, tile.slot_step, slots, tile.head_dim, scratch.keys);
  PackValues<Type>(tile.v + first, tile.slot_step, slots, tile.head_dim,
                   KvTile(tile.head_dim) * kPanel, scratch.values);
}

// Writes one row of out; `inverse_sum` is 0 for an empty row, whose `output` need not be: scores of
// -inf alone have weights of 0, and 0 times a NaN of V is NaN.
template <class Type>
void WriteRow(const float* output, float inverse_sum, int64_t head_dim, int64_t index, void* out) {
  auto* row = static_cast<typename Type::Stored*>(out) + index * head_dim;
  for (int64_t d = 0; d < head_dim; d += kLanes) {
    const Vec value = inverse_sum == 0.0f ? Splat(0.0f) : Load(output + d) * Splat(inverse_sum);
    if (head_dim - d >= kLanes) {
      Type::Write(value, row + d);
    } else {
      WriteFirst<Type>(value, head_dim - d, row + d);
    }
  }
}

void WriteRows(const QueryTile& tile, const Scratch& scratch) {
  constexpr float kLn2 = 0x1.62e430p-1f;
  const int64_t padded_dim = RoundUp(tile.head_dim, kLanes);
  for (int64_t i = 0; i < tile.row_count; ++i) {
    const QueryRow& row = tile.rows[i];
    const float* output = scratch.output + i * padded_dim;
    const float sum = scratch.row_sum[i];
    // 0 where nothing is seen, and where all scores are -inf.
    const float inverse_sum = sum == 0.0f ? 0.0f : 1.0f / sum;
    switch (tile.q_element) {
      case Element::kFloat32:
        WriteRow<Float32>(output, inverse_sum, tile.head_dim, row.index, tile.out);
        break;
      case Element::kFloat16:
        WriteRow<Float16>(output, inverse_sum, tile.head_dim, row.index, tile.out);
        break;
      case Element::kBFloat16:
        WriteRow<BFloat16>(output, inverse_sum, tile.head_dim, row.index, tile.out);
        break;
    }
    if (tile.lse != nullptr) {
      // An empty row's maximum is -inf, and so is its logarithm of 0.
      tile.lse[row.index] = scratch.row_max[i] * kLn2 + __builtin_logf(sum);
    }
  }
}

void RunTile(const QueryTile& tile, void* scratch_memory) {
  const DefaultFloatMode float_mode;
  const Scratch scratch =
      CarveScratch(static_cast<float*>(scratch_memory), tile.head_dim, tile.row_count);
  const int64_t padded_dim = RoundUp(tile.head_dim, kLanes);
  for (int64_t i = 0; i < tile.row_count * padded_dim; ++i) scratch.output[i] = 0.0f;
  for (int64_t i = 0; i < tile.row_count; ++i) {
    scratch.row_max[i] = -__builtin_inff();
    scratch.row_sum[i] = 0.0f;
  }
  PackQueries(tile, scratch);

  const int64_t kv_tile = KvTile(tile.head_dim);
  const int64_t kv_end = tile.rows[tile.row_count - 1].visible;
  for (int64_t slot = 0; slot < kv_end; slot += kv_tile) {
    const int64_t slots = Min(kv_tile, kv_end - slot);
    if (tile.kv_element == Element::kFloat16) {
      PackKvTile<Float16>(tile, slot, slots, scratch);
    } else {
      PackKvTile<BFloat16>(tile, slot, slots, scratch);
    }
    for (int64_t row = 0; row < tile.row_count; row += kGroupRows) {
      GroupStep step;
      step.head_dim = tile.head_dim;
      step.kv_tile = kv_tile;
      step.rows = Min(kGroupRows, tile.row_count - row);
      step.first = 0;
      for (int64_t i = 0; i < step.rows; ++i) {
        step.limits[i] = Min(slots, tile.rows[row + i].visible - slot);
        if (step.limits[i] <= 0) step.first = i + 1;
      }
      if (step.first == step.rows) continue;
      step.keys = scratch.keys;
      step.values = scratch.values;
      step.queries = scratch.queries + row * tile.head_dim;
      step.output = scratch.output + row * padded_dim;
      step.scores = scratch.scores;
      step.row_max = scratch.row_max + row;
      step.row_sum = scratch.row_sum + row;
      AttendGroup(step, tile.scale_log2);
    }
  }
  WriteRows(tile, scratch);
}

int64_t ScratchBytes(int64_t head_dim, int64_t row_count) {
  return CarveScratch(nullptr, head_dim, row_count).bytes;
}

}  // namespace
}  // namespace jax_fa::cpu

#endif  // JAX_FA_CPU_TILE_KERNEL_H_
