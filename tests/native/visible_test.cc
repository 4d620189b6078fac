// What a row sees, and the span of a tile of rows, against counting slot by slot.

#include "attention/visible.h"

#include <cstdint>
#include <cstdio>
#include <random>
#include <vector>

namespace jax_fa {
namespace {

constexpr int32_t kInt32Max = INT32_MAX;
constexpr int32_t kInt32Min = INT32_MIN;

int failures = 0;

void Expect(bool condition, const char* what, int64_t a, int64_t b, int64_t c, int64_t d) {
  if (condition) return;
  ++failures;
  std::printf("%s: %lld %lld %lld %lld\n", what, static_cast<long long>(a),
              static_cast<long long>(b), static_cast<long long>(c), static_cast<long long>(d));
}

// Contract C1, in 64 bits.
bool Sees(int64_t position, int64_t start, int64_t window, int64_t kv_len, int64_t slot) {
  if (slot < 0 || slot >= kv_len || slot > position || slot < start) return false;
  return window == 0 || slot > position - window;
}

void CheckRow(int32_t position, int32_t start, int32_t window, int32_t kv_len) {
  const Visible row = VisibleSlots(position, start, window, kv_len);
  bool any = false;
  for (int32_t slot = 0; slot < kv_len; ++slot) {
    const bool sees = Sees(position, start, window, kv_len, slot);
    any |= sees;
    Expect(sees == (slot >= row.lo && slot < row.hi), "VisibleSlots", position, start, window,
           slot);
  }
  Expect(any != row.IsEmpty(), "IsEmpty", position, start, window, kv_len);
  if (!any) Expect(row.lo == 0 && row.hi == 0, "an empty row", position, start, window, kv_len);
  if (start <= 0 && window == 0) {
    Expect(VisibleSlots(position, kv_len).hi == row.hi, "without options", position, row.hi, 0, 0);
  }
}

void CheckSpan(const std::vector<Visible>& rows, int32_t tile, int32_t tiles) {
  VisibleBounds bounds;
  for (const Visible& row : rows) bounds.Add(row);
  const KvSpan span = bounds.Span(tile);
  Expect(span.first <= span.whole_begin && span.whole_begin <= span.whole_end &&
             span.whole_end <= span.end,
         "order", span.first, span.whole_begin, span.whole_end, span.end);
  for (int32_t t = 0; t < tiles; ++t) {
    bool some = false, all = true;
    for (const Visible& row : rows) {
      if (row.IsEmpty()) continue;
      some |= row.lo < (t + 1) * tile && row.hi > t * tile;
      all &= row.lo <= t * tile && row.hi >= (t + 1) * tile;
    }
    if (some) Expect(t >= span.first && t < span.end, "a tile that some row sees", t, tile, 0, 0);
    if (t >= span.whole_begin && t < span.whole_end) {
      Expect(all, "a tile that all rows see whole", t, tile, span.first, span.end);
    } else if (some) {
      Expect(!all, "a whole tile that is missed", t, tile, span.whole_begin, span.whole_end);
    }
  }
}

}  // namespace
}  // namespace jax_fa

int main() {
  using namespace jax_fa;
  std::mt19937 random(20261207);
  const auto draw = [&](int32_t low, int32_t high) {
    return std::uniform_int_distribution<int32_t>(low, high)(random);
  };
  const int32_t edges[] = {kInt32Min, kInt32Min + 1, -1, 0, 1, 7, 8, 30, kInt32Max - 1, kInt32Max};
  for (int32_t position : edges) {
    for (int32_t start : edges) {
      for (int32_t window : {0, 1, 2, 8, 31, kInt32Max}) {
        for (int32_t kv_len : {0, 1, 8, 30}) CheckRow(position, start, window, kv_len);
      }
    }
  }
  for (int i = 0; i < 20000; ++i) CheckRow(draw(-3, 40), draw(-3, 40), draw(0, 40), draw(0, 40));
  for (int i = 0; i < 20000; ++i) {
    const int32_t kv_len = draw(1, 64);
    const int32_t window = draw(0, 1) == 0 ? 0 : draw(1, 40);
    std::vector<Visible> rows(draw(1, 6));
    for (Visible& row : rows) {
      row = VisibleSlots(draw(-10, 70), draw(0, 2) == 0 ? draw(0, 60) : 0, window, kv_len);
    }
    CheckSpan(rows, draw(1, 9), 70);
  }
  std::printf("%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}
