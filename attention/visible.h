// What a row sees, and what the rows of a tile see together: contract C1 and C2, here and nowhere
// else. A row's only mask is one interval of slots.

#ifndef JAX_FA_ATTENTION_VISIBLE_H_
#define JAX_FA_ATTENTION_VISIBLE_H_

#include <cstdint>

#include "attention/problem.h"

namespace jax_fa {

// The slots [lo, hi) that a row sees; an empty row has lo = hi = 0.
struct Visible {
  int32_t lo;
  int32_t hi;

  constexpr JAX_FA_HOST_DEVICE bool IsEmpty() const { return hi == 0; }
};

// Of the row at `position`. Written so that position = INT32_MAX cannot overflow.
constexpr JAX_FA_HOST_DEVICE Visible VisibleSlots(int32_t position, int32_t kv_len) {
  return {0, position < 0 ? 0 : (position < kv_len ? position + 1 : kv_len)};
}

// The same with a first slot and a window (0: none), whose lower bound goes by the position as it
// is, not cut to the cache.
constexpr JAX_FA_HOST_DEVICE Visible VisibleSlots(int32_t position, int32_t start, int32_t window,
                                                  int32_t kv_len) {
  const int32_t hi = VisibleSlots(position, kv_len).hi;
  int32_t lo = start > 0 ? start : 0;
  if (position >= 0 && window > 0 && position - window + 1 > lo) lo = position - window + 1;
  return lo < hi ? Visible{lo, hi} : Visible{0, 0};
}

// Of token `t` of sequence `b`.
constexpr JAX_FA_HOST_DEVICE Visible VisibleSlots(const AttentionParams& params, int64_t b,
                                                  int64_t t) {
  const int64_t row = b * params.q_len + t;
  const int32_t start =
      params.starts == nullptr ? 0 : params.starts[params.starts_by_row ? row : b];
  return VisibleSlots(params.positions[row], start, params.sliding_window,
                      static_cast<int32_t>(params.kv_len));
}

// KV tiles, of `kTile` slots counted from slot 0, of a tile of rows: those in [first, end) are
// seen by some row, and of these the ones in [whole_begin, whole_end) are seen whole by every row
// that is not empty. whole_begin <= whole_end, and both lie in [first, end].
struct KvSpan {
  int32_t first;
  int32_t whole_begin;
  int32_t whole_end;
  int32_t end;
};

// The bounds of the rows of a tile, by four reductions. Empty rows bound nothing.
struct VisibleBounds {
  int32_t least_lo = INT32_MAX;
  int32_t most_lo = 0;
  int32_t least_hi = INT32_MAX;
  int32_t most_hi = 0;

  constexpr JAX_FA_HOST_DEVICE void Add(const Visible& row) {
    if (row.IsEmpty()) return;
    least_lo = row.lo < least_lo ? row.lo : least_lo;
    most_lo = row.lo > most_lo ? row.lo : most_lo;
    least_hi = row.hi < least_hi ? row.hi : least_hi;
    most_hi = row.hi > most_hi ? row.hi : most_hi;
  }

  // With no row that sees anything, a span of no tiles.
  constexpr JAX_FA_HOST_DEVICE KvSpan Span(int32_t tile) const {
    if (most_hi == 0) return {0, 0, 0, 0};
    const int32_t first = least_lo / tile;
    const int32_t end = (most_hi + tile - 1) / tile;
    const int32_t whole_begin = (most_lo + tile - 1) / tile;
    const int32_t whole_end = least_hi / tile;
    if (whole_begin >= whole_end) return {first, end, end, end};
    return {first, whole_begin, whole_end, end};
  }
};

}  // namespace jax_fa

#endif  // JAX_FA_ATTENTION_VISIBLE_H_
