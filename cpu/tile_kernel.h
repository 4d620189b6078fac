// The attention of one tile of query rows, for the instruction set of the including file.
//
//   for each KV tile, counted from slot 0, between the first slot any row sees and the last:
//     keys, values <- K^T and V of the tile, float32                          pack.h
//     for each group of kGroupRows rows that sees a slot of the tile:
//       scores <- q K^T          each panel for the rows that see some of it    matmul.h
//       scores <- tanh(scores)                               with a soft cap
//       probs  <- exp2(scores - row_max), row_max and row_sum updated
//       output <- alpha * output + probs V       each row between its own first and last slot
//   out <- output / row_sum                      the sink in the sum
//
// Rows come sorted by what they see, so the rows that see a slot are neighbours, and a product over
// "the slots this row sees" is a few block products. A row therefore multiplies only what it sees:
// garbage in any other slot, NaN included, cannot reach it.

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
  int64_t rows;  // of the group
  // Each row sees the slots [begins, ends) of this KV tile; 0, 0 where none.
  int64_t begins[kGroupRows];
  int64_t ends[kGroupRows];
  const float* keys;
  const float* values;
  const float* queries;  // of the group, as the pieces of Scratch below
  float* output;
  float* scores;
  float* row_max;
  float* row_sum;
};

// fn(row, rows) for each run of neighbouring rows that see some of the slots [begin, end), one at
// least.
template <class Fn>
inline void ForRuns(const GroupStep& step, int64_t begin, int64_t end, const Fn& fn) {
  const auto sees = [&](int64_t row) { return step.begins[row] < end && begin < step.ends[row]; };
  for (int64_t row = 0; row < step.rows; ++row) {
    if (!sees(row)) continue;
    const int64_t first = row;
    while (row < step.rows && sees(row)) ++row;
    fn(first, row - first);
  }
}

int64_t GroupEnd(const GroupStep& step) {
  int64_t end = 0;
  for (int64_t row = 0; row < step.rows; ++row) end = Max(end, step.ends[row]);
  return end;
}

// The first slot past `slot` from which other rows see than before; -1: none.
int64_t NextChange(const GroupStep& step, int64_t slot) {
  int64_t next = -1;
  const auto consider = [&](int64_t change) {
    if (change > slot && (next < 0 || change < next)) next = change;
  };
  for (int64_t row = 0; row < step.rows; ++row) {
    if (step.begins[row] == step.ends[row]) continue;
    consider(step.begins[row]);
    consider(step.ends[row]);
  }
  return next;
}

void ComputeScores(const GroupStep& step) {
  const int64_t end = GroupEnd(step);
  for (int64_t slot = 0; slot < end; slot += kPanel) {
    ForRuns(step, slot, slot + kPanel, [&](int64_t row, int64_t rows) {
      const Product product = {step.queries + row,
                               step.keys + slot * step.head_dim,
                               kPanel,
                               step.head_dim,
                               nullptr,
                               step.scores + row * kScoreStep + slot,
                               kScoreStep};
      Multiply<1, kGroupRows>(product, rows, end - slot > kLanes ? kPanelVecs : 1);
    });
  }
}

void CapScores(float* scores, int64_t count, float cap_scale) {
  const Vec scale = Splat(cap_scale);
  for (int64_t i = 0; i < count; i += kLanes) Store(Tanh(Load(scores + i) * scale), scores + i);
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
  int64_t slot = 0;
  for (int64_t next = NextChange(step, 0); next > 0; slot = next, next = NextChange(step, slot)) {
    ForRuns(step, slot, next, [&](int64_t row, int64_t rows) {
      for (int64_t d = 0; d < padded_dim; d += kPanel) {
        const Product product = {step.scores + row * kScoreStep + slot,
                                 step.values + d * step.kv_tile + slot * kPanel,
                                 kPanel,
                                 next - slot,
                                 alphas + row,
                                 step.output + row * padded_dim + d,
                                 padded_dim};
        Multiply<kScoreStep, 1>(product, rows, padded_dim - d > kLanes ? kPanelVecs : 1);
      }
      for (int64_t i = row; i < row + rows; ++i) alphas[i] = 1.0f;
    });
  }
}

void AttendGroup(const GroupStep& step, const QueryTile& tile) {
  ComputeScores(step);
  float alphas[kGroupRows];
  for (int64_t row = 0; row < step.rows; ++row) {
    const int64_t count = step.ends[row] - step.begins[row];
    if (count == 0) continue;
    float* scores = step.scores + row * kScoreStep + step.begins[row];
    if (tile.is_capped) CapScores(scores, count, tile.cap_scale);
    alphas[row] =
        SoftmaxRow(scores, count, tile.scale_log2, step.row_max + row, step.row_sum + row);
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

// Slots [begin, end) of the KV tile that starts at `slot`.
template <class Type>
void PackKvTile(const QueryTile& tile, int64_t slot, int64_t begin, int64_t end,
                const Scratch& scratch) {
  begin = begin / kPanel * kPanel;
  const int64_t first = (slot + begin) * tile.slot_step;
  PackKeys<Type>(tile.k + first, tile.slot_step, end - begin, tile.head_dim,
                 scratch.keys + begin * tile.head_dim);
  PackValues<Type>(tile.v + first, tile.slot_step, end - begin, tile.head_dim,
                   KvTile(tile.head_dim) * kPanel, scratch.values + begin * kPanel);
}

// Writes one row of out, factor * output; zeros where `output` is null.
template <class Type>
void WriteRow(const float* output, float factor, int64_t head_dim, int64_t index, void* out) {
  auto* row = static_cast<typename Type::Stored*>(out) + index * head_dim;
  for (int64_t d = 0; d < head_dim; d += kLanes) {
    const Vec value = output == nullptr ? Splat(0.0f) : Load(output + d) * Splat(factor);
    if (head_dim - d >= kLanes) {
      Type::Write(value, row + d);
    } else {
      WriteFirst<Type>(value, head_dim - d, row + d);
    }
  }
}

struct SoftmaxEnd {
  float factor;  // out is the row's output so far times this
  float lse;
};

// A row's softmax, `max` in log2 units, with its sink joined to it.
SoftmaxEnd JoinSink(float max, float sum, float sink) {
  constexpr float kLn2 = 0x1.62e430p-1f;
  constexpr float kLog2E = 0x1.715476p+0f;
  if (sink == -__builtin_inff()) return {1.0f / sum, max * kLn2 + __builtin_logf(sum)};
  const float sink_log2 = sink * kLog2E;
  const float shift = sink_log2 > max ? sink_log2 : max;
  const float alpha = Exp2(Splat(max - shift))[0];
  const float total = sum * alpha + Exp2(Splat(sink_log2 - shift))[0];
  return {alpha / total, shift * kLn2 + __builtin_logf(total)};
}

void WriteRows(const QueryTile& tile, const Scratch& scratch) {
  const int64_t padded_dim = RoundUp(tile.head_dim, kLanes);
  for (int64_t i = 0; i < tile.row_count; ++i) {
    const QueryRow& row = tile.rows[i];
    // Nothing is seen, or all scores are -inf: `output` is then 0, or 0 times a NaN of V.
    const bool is_empty = scratch.row_sum[i] == 0.0f;
    const SoftmaxEnd end = is_empty ? SoftmaxEnd{0.0f, row.sink}
                                    : JoinSink(scratch.row_max[i], scratch.row_sum[i], row.sink);
    const float* output = is_empty ? nullptr : scratch.output + i * padded_dim;
    switch (tile.q_element) {
      case Element::kFloat32:
        WriteRow<Float32>(output, end.factor, tile.head_dim, row.index, tile.out);
        break;
      case Element::kFloat16:
        WriteRow<Float16>(output, end.factor, tile.head_dim, row.index, tile.out);
        break;
      case Element::kBFloat16:
        WriteRow<BFloat16>(output, end.factor, tile.head_dim, row.index, tile.out);
        break;
    }
    if (tile.lse != nullptr) tile.lse[row.index] = end.lse;
  }
}

// The group of rows from `row` on before the KV tile that starts at `slot`; false where none of
// them sees any of it.
bool LocateGroup(const QueryTile& tile, const Scratch& scratch, int64_t row, int64_t slot,
                 GroupStep* step) {
  step->head_dim = tile.head_dim;
  step->kv_tile = KvTile(tile.head_dim);
  step->rows = Min(kGroupRows, tile.row_count - row);
  bool sees_any = false;
  for (int64_t i = 0; i < step->rows; ++i) {
    const int64_t begin = Max(tile.rows[row + i].begin - slot, 0);
    const int64_t end = Min(tile.rows[row + i].end - slot, step->kv_tile);
    step->begins[i] = begin < end ? begin : 0;
    step->ends[i] = begin < end ? end : 0;
    sees_any |= begin < end;
  }
  step->keys = scratch.keys;
  step->values = scratch.values;
  step->queries = scratch.queries + row * tile.head_dim;
  step->output = scratch.output + row * RoundUp(tile.head_dim, kLanes);
  step->scores = scratch.scores;
  step->row_max = scratch.row_max + row;
  step->row_sum = scratch.row_sum + row;
  return sees_any;
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
  for (int64_t slot = tile.begin / kv_tile * kv_tile; slot < tile.end; slot += kv_tile) {
    const int64_t begin = Max(tile.begin - slot, 0);
    const int64_t end = Min(tile.end - slot, kv_tile);
    if (tile.kv_element == Element::kFloat16) {
      PackKvTile<Float16>(tile, slot, begin, end, scratch);
    } else {
      PackKvTile<BFloat16>(tile, slot, begin, end, scratch);
    }
    for (int64_t row = 0; row < tile.row_count; row += kGroupRows) {
      GroupStep step;
      if (LocateGroup(tile, scratch, row, slot, &step)) AttendGroup(step, tile);
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
