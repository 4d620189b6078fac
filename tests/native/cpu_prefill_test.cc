// Tests the CPU kernel of every instruction set this machine has: values against a double-precision
// loop, and the contract's bit-for-bit promises. Prints each check; returns 1 when one fails.

#include <algorithm>
#include <functional>
#include <string>
#include <thread>

#include "cpu/dispatch.h"
#include "cpu_test_data.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace jax_fa::test {
namespace {

int g_failures = 0;

void Check(bool ok, const std::string& what, const std::string& detail = "") {
  std::printf("%s %s%s%s\n", ok ? "ok  " : "FAIL", what.c_str(), ok ? "" : ": ",
              ok ? "" : detail.c_str());
  if (!ok) ++g_failures;
}

void Threads(int64_t count, const std::function<void(int64_t)>& fn) {
  std::vector<std::thread> threads;
  for (int64_t i = 0; i < count; ++i) threads.emplace_back(fn, i);
  for (std::thread& thread : threads) thread.join();
}
void LastFirst(int64_t count, const std::function<void(int64_t)>& fn) {
  while (count > 0) fn(--count);
}

using Kernel = cpu::TileKernel;

void Run(const Kernel& kernel, Data* data, int num_threads = 2,
         const cpu::ParallelFor& parallel_for = Threads) {
  data->ResetOutputs();
  cpu::PrefillAttentionWith(kernel, data->Params(), num_threads, parallel_for);
}

bool SameOutputs(const Data& a, const Data& b) {
  return a.out.SameBits(b.out) && a.lse.SameBits(b.lse);
}

AttentionProblem Problem(int64_t batch, int64_t q_len, int64_t kv_len, int64_t q_heads,
                         int64_t kv_heads, int64_t head_dim, DType q_dtype = DType::kFloat32,
                         DType kv_dtype = DType::kFloat16) {
  AttentionProblem problem;
  problem.batch = batch;
  problem.q_len = q_len;
  problem.kv_len = kv_len;
  problem.q_heads = q_heads;
  problem.kv_heads = kv_heads;
  problem.head_dim = head_dim;
  problem.q_dtype = q_dtype;
  problem.kv_dtype = kv_dtype;
  problem.scale = 1.0f / std::sqrt(static_cast<float>(std::max<int64_t>(head_dim, 1)));
  return problem;
}

// Half a unit in the last place of out's dtype at |value|.
double RoundingBound(DType dtype, double value) {
  if (dtype == DType::kFloat32) return 0;  // inside the bound of the row
  const int mantissa_bits = dtype == DType::kFloat16 ? 10 : 7;
  const int lowest = dtype == DType::kFloat16 ? -14 : -126;
  int exponent = 0;
  std::frexp(value, &exponent);
  return std::ldexp(0.5, std::max(exponent - 1, lowest) - mantissa_bits);
}

void CheckValues(const Data& data, const std::string& what) {
  const AttentionProblem& p = data.problem;
  double worst = 0;  // error as a share of its bound
  std::string where;
  const auto compare = [&](double got, double want, double bound, int64_t row, int64_t d) {
    const double error = got == want ? 0 : std::fabs(got - want);
    const double share = error == 0 ? 0 : std::isnan(error) ? kInf : error / bound;
    if (share <= worst) return;
    worst = share;
    where = "row " + std::to_string(row) + (d < 0 ? " lse" : " d " + std::to_string(d)) + " is " +
            std::to_string(got) + ", want " + std::to_string(want) + " within " +
            std::to_string(bound);
  };
  for (int64_t row = 0; row < p.rows(); ++row) {
    const RowReference want = Reference(data, row);
    for (int64_t d = 0; d < p.head_dim; ++d) {
      const double got = Decode(p.q_dtype, data.out.data(), row * p.head_dim + d);
      const double rounding = want.out_bound == 0 ? 0 : RoundingBound(p.q_dtype, got);
      compare(got, want.out[d], want.out_bound + rounding, row, d);
    }
    compare(Decode(DType::kFloat32, data.lse.data(), row), want.lse, want.lse_bound, row, -1);
  }
  Check(worst <= 1, what, where);
}

void Shuffle(Data* data, uint32_t seed) {
  std::mt19937 random(seed);
  for (int64_t i = 0; i < data->tokens(); ++i) {
    data->position(i) = static_cast<int32_t>(random() % data->problem.kv_len);
  }
}

// Negative, repeated, at tile edges, at and past the end of the cache.
void SetOddPositions(Data* data) {
  const int32_t kv_len = static_cast<int32_t>(data->problem.kv_len);
  const int32_t odd[] = {-1,
                         kv_len - 1,
                         kv_len,
                         100000,
                         std::numeric_limits<int32_t>::max(),
                         std::numeric_limits<int32_t>::min(),
                         0,
                         0,
                         255,
                         256};
  for (int64_t i = 0; i < data->tokens(); ++i) data->position(i) = odd[i * 7 % 10];
}

void TestShapes(const Kernel& kernel) {
  for (const int64_t head_dim : {1, 3, 46, 64, 80, 128, 256, 300}) {
    Data data(Problem(2, 37, 41, 6, 2, head_dim));
    Run(kernel, &data);
    CheckValues(data, "head_dim " + std::to_string(head_dim));
  }
  for (const int64_t ratio : {1, 3, 7, 8, 71}) {
    Data data(Problem(1, 29, 29, 2 * ratio, 2, 64));
    Run(kernel, &data);
    CheckValues(data, "q heads per KV head " + std::to_string(ratio));
  }
  for (const int64_t kv_len : {1, 2, 63, 64, 65, 255, 256, 257, 512, 700}) {
    Data data(Problem(1, 19, kv_len, 3, 1, 64));
    for (int64_t t = 0; t < 19; ++t) data.position(t) = static_cast<int>(kv_len - 19 + t);
    Run(kernel, &data);
    CheckValues(data, "kv_len " + std::to_string(kv_len));
  }
  Data decode(Problem(3, 1, 300, 8, 2, 128));
  for (int64_t b = 0; b < 3; ++b) decode.position(b) = static_cast<int>(299 - 50 * b);
  Run(kernel, &decode);
  CheckValues(decode, "one query");
  Data several_tiles(Problem(1, 500, 500, 4, 1, 16));
  Run(kernel, &several_tiles, 1);
  CheckValues(several_tiles, "several query tiles");
}

void TestDtypes(const Kernel& kernel) {
  for (const DType kv_dtype : {DType::kFloat16, DType::kBFloat16}) {
    for (const DType q_dtype : {DType::kFloat32, kv_dtype}) {
      Data data(Problem(1, 40, 300, 4, 2, 46, q_dtype, kv_dtype));
      Shuffle(&data, 7);
      Run(kernel, &data);
      CheckValues(data, std::string("q ") + DTypeName(q_dtype) + ", cache " + DTypeName(kv_dtype));
    }
  }
}

// Every float16 value through V and out: a row that sees one slot returns it as it is.
void TestEveryFloat16(const Kernel& kernel) {
  Data data(Problem(1, 1, 1, 1, 1, 65536, DType::kFloat16));
  auto* v = static_cast<uint16_t*>(data.v.data());
  for (int64_t i = 0; i < 65536; ++i) v[i] = static_cast<uint16_t>(i);
  data.problem.scale = 0;
  Run(kernel, &data);
  const auto* out = static_cast<const uint16_t*>(data.out.data());
  int64_t wrong = 0;
  for (int64_t i = 0; i < 65536; ++i) {
    const bool is_nan = (i & 0x7fff) > 0x7c00;
    // -0 comes back as +0: it was added to 0.
    const int64_t want = i == 0x8000 ? 0 : i;
    if (is_nan ? (out[i] & 0x7fff) <= 0x7c00 : out[i] != want) ++wrong;
  }
  Check(wrong == 0, "every float16 through v", std::to_string(wrong) + " differ");
}

// out in 16 bits is the float32 out of the same q, rounded to the nearest, once.
void TestOutputRounding(const Kernel& kernel) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    Data narrow(Problem(1, 60, 60, 4, 2, 48, dtype, dtype));
    for (int64_t s = 0; s < 60; s += 7) narrow.FillSlot(narrow.v, 0, s, s % 2 ? 6e-6 : 3e-5);
    Data wide(Problem(1, 60, 60, 4, 2, 48, DType::kFloat32, dtype));
    for (int64_t i = 0; i < wide.problem.rows() * 48; ++i) {
      Encode(DType::kFloat32, wide.q.data(), i, Decode(dtype, narrow.q.data(), i));
    }
    std::memcpy(wide.k.data(), narrow.k.data(), wide.k.bytes());
    std::memcpy(wide.v.data(), narrow.v.data(), wide.v.bytes());
    Run(kernel, &narrow);
    Run(kernel, &wide);
    int64_t wrong = 0;
    for (int64_t i = 0; i < wide.problem.rows() * 48; ++i) {
      const double exact = Decode(DType::kFloat32, wide.out.data(), i);
      const uint16_t bits = static_cast<const uint16_t*>(narrow.out.data())[i];
      const double error = std::fabs(DecodeBits(dtype, bits) - exact);
      if (!(error <= std::fabs(DecodeBits(dtype, bits - 1) - exact)) ||
          !(error <= std::fabs(DecodeBits(dtype, bits + 1) - exact))) {
        ++wrong;
      }
    }
    Check(wrong == 0 && narrow.lse.SameBits(wide.lse),
          std::string("out rounded once to ") + DTypeName(dtype), std::to_string(wrong) + " wrong");
  }
}

void TestScales(const Kernel& kernel) {
  for (const float scale : {0.0f, -0.25f, 1000.0f, -1000.0f, 1e-30f}) {
    Data data(Problem(1, 33, 270, 4, 2, 64));
    Shuffle(&data, 3);
    data.problem.scale = scale;
    Run(kernel, &data);
    CheckValues(data, "scale " + std::to_string(scale));
  }
  // All keys 0: whatever the scale, every score is 0 and out is the mean of what is seen.
  Data data(Problem(1, 33, 33, 2, 1, 64));
  for (int64_t s = 0; s < 33; ++s) data.FillSlot(data.k, 0, s, 0.0);
  data.problem.scale = std::numeric_limits<float>::max();
  Run(kernel, &data);
  CheckValues(data, "scale FLT_MAX with keys of 0");
}

void TestPositions(const Kernel& kernel) {
  Data data(Problem(2, 50, 300, 3, 1, 64));
  Shuffle(&data, 11);
  Run(kernel, &data);
  CheckValues(data, "shuffled positions");

  SetOddPositions(&data);
  Run(kernel, &data);
  CheckValues(data, "padding rows, repeats and positions past the cache");

  for (int64_t i = 0; i < data.tokens(); ++i) data.position(i) = -5;
  Run(kernel, &data);
  CheckValues(data, "padding rows only");
}

void TestEmpty(const Kernel& kernel) {
  const AttentionProblem empty[] = {Problem(0, 4, 4, 2, 1, 8), Problem(2, 0, 4, 2, 1, 8),
                                    Problem(2, 4, 4, 0, 0, 8), Problem(2, 4, 4, 2, 1, 0),
                                    Problem(2, 4, 0, 2, 1, 8)};
  const char* const names[] = {"batch", "q_len", "q_heads", "head_dim", "kv_len"};
  for (int i = 0; i < 5; ++i) {
    Data data(empty[i]);
    Run(kernel, &data);
    CheckValues(data, std::string(names[i]) + " 0");
  }
}

// All of `from` but k and v, which are the same as long as no one writes to them.
void CopyRows(const Data& from, Data* to) {
  std::memcpy(to->q.data(), from.q.data(), from.q.bytes());
  std::memcpy(to->positions.data(), from.positions.data(), from.positions.bytes());
  to->starts = from.starts;
  to->sinks = from.sinks;
}

std::vector<int32_t> RandomStarts(int64_t count, int64_t kv_len, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<int32_t> starts(count);
  for (int32_t& start : starts) start = static_cast<int32_t>(random() % (kv_len + 10)) - 5;
  if (count > 4) starts[2] = std::numeric_limits<int32_t>::max();
  if (count > 4) starts[3] = std::numeric_limits<int32_t>::min();
  return starts;
}

std::vector<float> RandomSinks(int64_t count) {
  std::mt19937 random(17);
  std::normal_distribution<float> normal(2.0f, 3.0f);
  std::vector<float> sinks(count);
  for (float& sink : sinks) sink = normal(random);
  if (count > 2) sinks[2] = -std::numeric_limits<float>::infinity();
  return sinks;
}

void TestWindows(const Kernel& kernel) {
  constexpr int32_t kLargest = std::numeric_limits<int32_t>::max();
  for (const int32_t window : {1, 2, 31, 64, 100, 256, 257, 299, 300, kLargest}) {
    for (const int64_t head_dim : {7, 260}) {
      if (head_dim == 260 && window != 100) continue;
      Data data(Problem(1, 330, 320, 1, 1, head_dim));
      data.problem.sliding_window = window;
      const std::string what =
          "window " + std::to_string(window) + ", head_dim " + std::to_string(head_dim);
      Run(kernel, &data);
      CheckValues(data, what);
      Shuffle(&data, 19);
      Run(kernel, &data);
      CheckValues(data, what + ", shuffled");
      SetOddPositions(&data);
      Run(kernel, &data, 7);
      CheckValues(data, what + ", odd positions");
    }
  }
}

void TestStarts(const Kernel& kernel) {
  Data data(Problem(6, 40, 300, 2, 1, 30));
  for (const int64_t count : {data.problem.batch, data.tokens()}) {
    data.starts = RandomStarts(count, 300, 23);
    const std::string what = count == data.tokens() ? "starts by row" : "starts by sequence";
    Shuffle(&data, 29);
    Run(kernel, &data);
    CheckValues(data, what);
    data.problem.sliding_window = 50;
    SetOddPositions(&data);
    Run(kernel, &data);
    CheckValues(data, what + ", a window, odd positions");
    data.problem.sliding_window = 0;
  }
}

void TestCaps(const Kernel& kernel) {
  for (const float cap : {0.5f, 5.0f, 50.0f}) {
    for (const float scale : {0.125f, -1.0f, 0.0f, 100.0f}) {
      Data data(Problem(1, 33, 300, 2, 1, 64));
      data.problem.logits_soft_cap = cap;
      data.problem.scale = scale;
      Shuffle(&data, 31);
      Run(kernel, &data);
      CheckValues(data, "cap " + std::to_string(cap) + ", scale " + std::to_string(scale));
    }
  }
}

// A row that sees one slot gives its capped score out as its lse. The score's own relative error
// moves tanh by no more than that.
void TestCapError(const Kernel& kernel) {
  constexpr int64_t kRows = 100000;
  constexpr double kCap = 50.0;
  Data data(Problem(1, kRows, 1, 1, 1, 1));
  data.problem.scale = kCap;
  data.problem.logits_soft_cap = kCap;
  data.FillSlot(data.k, 0, 0, 1.0);
  for (int64_t i = 0; i < kRows; ++i) {
    // From 2^-60 on, then both sides of where the formula changes, then far out.
    const double x = i < 60      ? std::ldexp(1.0, static_cast<int>(i) - 60)
                     : i < 90000 ? 1.25 * i / 90000
                                 : 1.25 + 0.003 * (i - 90000);
    Encode(DType::kFloat32, data.q.data(), i, i % 2 ? x : -x);
  }
  Encode(DType::kFloat32, data.q.data(), 0, 0.0);
  Encode(DType::kFloat32, data.q.data(), 1, kInf);
  Encode(DType::kFloat32, data.q.data(), 2, -kInf);
  Encode(DType::kFloat32, data.q.data(), 3, std::nan(""));
  Run(kernel, &data);
  double worst = 0;
  for (int64_t i = 0; i < kRows; ++i) {
    const double want = std::tanh(Decode(DType::kFloat32, data.q.data(), i));
    const double got = Decode(DType::kFloat32, data.lse.data(), i) / kCap;
    if (std::isnan(want) != std::isnan(got)) worst = kInf;
    if (want != got && !std::isnan(want)) {
      worst = std::max(worst, std::fabs(got - want) / std::fabs(want));
    }
  }
  Check(worst <= 5e-7, "relative error of the soft cap", std::to_string(worst * 1e6) + "e-6");
  std::printf("     it is %.2e\n", worst);
}

void TestSinks(const Kernel& kernel) {
  Data data(Problem(3, 40, 300, 6, 2, 16));
  for (const int64_t count : {data.problem.q_heads, 3 * data.problem.q_heads}) {
    data.sinks = RandomSinks(count);
    const std::string what = count == 6 ? "sinks by head" : "sinks by sequence and head";
    Shuffle(&data, 37);
    Run(kernel, &data);
    CheckValues(data, what);
    SetOddPositions(&data);
    Run(kernel, &data);
    CheckValues(data, what + ", empty rows");
  }
  for (const float sink : {-200.0f, 200.0f}) {
    data.sinks.assign(6, sink);
    Run(kernel, &data);
    CheckValues(data, "sinks of " + std::to_string(sink));
  }
}

void TestAllOptions(const Kernel& kernel) {
  for (const DType q_dtype : {DType::kFloat32, DType::kBFloat16}) {
    Data data(Problem(2, 150, 400, 6, 2, 24, q_dtype, DType::kBFloat16));
    data.problem.sliding_window = 70;
    data.problem.logits_soft_cap = 3.0f;
    data.starts = RandomStarts(data.tokens(), 400, 41);
    data.sinks = RandomSinks(12);
    SetOddPositions(&data);
    Run(kernel, &data);
    CheckValues(data, "all options, odd positions");
    Shuffle(&data, 43);
    Run(kernel, &data);
    CheckValues(data, "all options, shuffled");
  }
}

// Options that change nothing change no bit.
void TestIdleOptions(const Kernel& kernel) {
  Data plain(Problem(2, 70, 300, 3, 1, 46));
  Shuffle(&plain, 47);
  plain.position(5) = -1;
  Run(kernel, &plain);
  const auto check = [&](const std::string& what, const auto& set) {
    Data data(plain.problem);
    CopyRows(plain, &data);
    set(&data);
    Run(kernel, &data);
    Check(SameOutputs(plain, data), "same bits with " + what);
  };
  const float kMinusInf = -std::numeric_limits<float>::infinity();
  check("a window of the cache's length", [](Data* d) { d->problem.sliding_window = 300; });
  check("starts of 0", [](Data* d) { d->starts.assign(2, 0); });
  check("starts below 0", [](Data* d) { d->starts.assign(140, -7); });
  check("sinks of -inf", [&](Data* d) { d->sinks.assign(3, kMinusInf); });
}

// As TestPoison, of the slots below what a row sees.
void TestPoisonBelow(const Kernel& kernel) {
  for (const int32_t first : {1, 31, 40, 100, 256, 270}) {
    Data data(Problem(1, 60, 400, 3, 1, 46));
    data.problem.sliding_window = 64;
    data.problem.logits_soft_cap = 20.0f;
    data.starts = RandomStarts(60, 300, 53);
    Shuffle(&data, 59);
    data.position(7) = first + 63;
    data.position(8) = first + 62;
    data.starts[7] = data.starts[8] = 0;
    Run(kernel, &data);
    Data poisoned(data.problem);
    CopyRows(data, &poisoned);
    for (int32_t s = 0; s < first; ++s) {
      poisoned.FillSlot(poisoned.k, 0, s, s % 2 ? kInf : std::nan(""));
      poisoned.FillSlot(poisoned.v, 0, s, s % 3 ? std::nan("") : -kInf);
    }
    Run(kernel, &poisoned);
    bool clean_rows_same = true;
    int64_t clean = 0;
    for (int64_t t = 0; t < 60; ++t) {
      const SeenSlots seen = Seen(data, t);
      if (seen.first < first && seen.first < seen.end) continue;
      ++clean;
      const int64_t row_bytes = 3 * 46 * 4;
      clean_rows_same &=
          std::memcmp(data.out.at(t * row_bytes), poisoned.out.at(t * row_bytes), row_bytes) == 0;
      clean_rows_same &= std::memcmp(data.lse.at(t * 12), poisoned.lse.at(t * 12), 12) == 0;
    }
    const std::string what = ", slots below " + std::to_string(first) + " poisoned";
    Check(clean_rows_same && clean > 5, "rows that see no poison keep their bits" + what);
    Check(std::isnan(Decode(DType::kFloat32, poisoned.out.data(), 8 * 3 * 46)),
          "a row that sees NaN is NaN" + what);
  }
}

// Contract C3 and its sharper form: what a row does not see changes none of its bits, also where
// another row of its tile sees it.
void TestPoison(const Kernel& kernel) {
  constexpr double kPoison[] = {std::numeric_limits<double>::quiet_NaN(), kInf, -kInf};
  for (const int64_t head_dim : {46, 64}) {
    for (const int32_t seen : {0, 5, 100, 255, 256, 290}) {
      Data data(Problem(1, 48, 320, 3, 1, head_dim));
      Shuffle(&data, 5);
      data.position(3) = seen;
      data.position(4) = seen + 1;
      Run(kernel, &data);
      Data poisoned(data.problem);
      std::memcpy(poisoned.positions.data(), data.positions.data(), data.positions.bytes());
      for (int32_t s = seen + 1; s < 320; ++s) {
        poisoned.FillSlot(poisoned.k, 0, s, kPoison[s % 3]);
        poisoned.FillSlot(poisoned.v, 0, s, kPoison[(s + 1) % 3]);
      }
      Run(kernel, &poisoned);
      bool clean_rows_same = true, others_nan = true;
      for (int64_t t = 0; t < 48; ++t) {
        const int64_t row_bytes = 3 * head_dim * 4;
        const char* a = data.out.at(t * row_bytes);
        const char* b = poisoned.out.at(t * row_bytes);
        if (data.position(t) <= seen) {
          clean_rows_same &= std::memcmp(a, b, row_bytes) == 0;
        } else if (data.position(t) > seen + 3) {
          others_nan &= std::isnan(Decode(DType::kFloat32, b, 0));
        }
      }
      const std::string what = ", head_dim " + std::to_string(head_dim) + ", slots past " +
                               std::to_string(seen) + " poisoned";
      Check(clean_rows_same, "rows that see no poison keep their bits" + what);
      Check(others_nan, "rows that see NaN are NaN" + what);
    }
  }
}

// Cuts the tokens of `whole` into chunks and demands its bits (contract C5).
void CheckChunks(const Kernel& kernel, const Data& whole, const std::vector<int64_t>& sizes) {
  const AttentionProblem& p = whole.problem;
  const int64_t token_bytes = p.q_heads * p.head_dim * DTypeBytes(p.q_dtype);
  bool same = true;
  int64_t begin = 0;
  for (size_t i = 0; begin < p.q_len; ++i) {
    const int64_t count = std::min(sizes[i % sizes.size()], p.q_len - begin);
    Data chunk = whole.Chunk(begin, count);
    Run(kernel, &chunk, 1 + i % 3);
    const char* out = whole.out.at(begin * token_bytes);
    const char* lse = whole.lse.at(begin * p.q_heads * 4);
    same &= std::memcmp(chunk.out.data(), out, chunk.out.bytes()) == 0;
    same &= std::memcmp(chunk.lse.data(), lse, chunk.lse.bytes()) == 0;
    begin += count;
  }
  std::string what = p.sliding_window == 0 ? "chunks of" : "all options, chunks of";
  for (const int64_t size : sizes) what += " " + std::to_string(size);
  Check(same, what + ", head_dim " + std::to_string(p.head_dim) + ", " +
                  std::to_string(p.q_heads_per_kv_head()) + " q heads per KV head");
}

void TestChunks(const Kernel& kernel) {
  for (const auto& [q_heads, head_dim] : {std::pair{3, 64}, std::pair{7, 128}, std::pair{1, 80}}) {
    Data whole(Problem(1, 530, 600, q_heads, 1, head_dim));
    Run(kernel, &whole);
    for (const std::vector<int64_t>& sizes :
         {std::vector<int64_t>{1}, {7}, {64}, {256}, {100, 3, 1, 77}}) {
      CheckChunks(kernel, whole, sizes);
    }
    Shuffle(&whole, 13);
    Run(kernel, &whole);
    CheckChunks(kernel, whole, {64, 9});
    whole.problem.sliding_window = 90;
    whole.problem.logits_soft_cap = 5.0f;
    whole.starts = RandomStarts(530, 300, 61);
    whole.sinks = RandomSinks(q_heads);
    Run(kernel, &whole);
    CheckChunks(kernel, whole, {64, 9, 1});
    for (int64_t t = 0; t < 530; ++t) whole.position(t) = static_cast<int>(t);
    whole.starts = {40};
    Run(kernel, &whole);
    CheckChunks(kernel, whole, {100, 3, 1, 77});
  }
}

void TestThreads(const Kernel& kernel) {
  Data once(Problem(2, 200, 300, 6, 2, 64));
  Run(kernel, &once, 1);
  for (int threads = 1; threads <= 8; ++threads) {
    Data again(once.problem);
    Run(kernel, &again, threads);
    Check(SameOutputs(once, again), std::to_string(threads) + " threads, same bits");
  }
  Data reversed(once.problem);
  Run(kernel, &reversed, 5, LastFirst);
  Check(SameOutputs(once, reversed), "workers one after another, last first, same bits");
#if defined(__x86_64__)
  Data flushing(once.problem), plain(once.problem);
  for (Data* data : {&flushing, &plain}) {
    for (int64_t s = 0; s < 300; s += 2) data->FillSlot(data->v, 0, s, 1e-7);
    for (int64_t i = 0; i < 64; ++i) Encode(DType::kFloat32, data->q.data(), i, 1e-40);
  }
  Run(kernel, &plain);
  Run(kernel, &flushing, 2, [](int64_t count, const std::function<void(int64_t)>& fn) {
    Threads(count, [&](int64_t i) {
      _mm_setcsr(_mm_getcsr() | 0x8040);  // flush denormals, both ways
      fn(i);
    });
  });
  Check(SameOutputs(plain, flushing), "threads that flush denormals, same bits");
#endif
}

}  // namespace
}  // namespace jax_fa::test

// The one argument, if any, names the only instruction set to test.
int main(int argc, char** argv) {
  using namespace jax_fa::test;
  std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);  // so that a crash shows the checks before it
  for (const jax_fa::cpu::TileKernel* kernel : jax_fa::cpu::AvailableKernels()) {
    if (argc > 1 && std::string(argv[1]) != kernel->name) continue;
    std::printf("-- %s\n", kernel->name);
    TestShapes(*kernel);
    TestDtypes(*kernel);
    TestEveryFloat16(*kernel);
    TestOutputRounding(*kernel);
    TestScales(*kernel);
    TestPositions(*kernel);
    TestEmpty(*kernel);
    TestWindows(*kernel);
    TestStarts(*kernel);
    TestCaps(*kernel);
    TestCapError(*kernel);
    TestSinks(*kernel);
    TestAllOptions(*kernel);
    TestIdleOptions(*kernel);
    TestPoison(*kernel);
    TestPoisonBelow(*kernel);
    TestChunks(*kernel);
    TestThreads(*kernel);
  }
  std::printf("%d checks failed\n", g_failures);
  return g_failures == 0 ? 0 : 1;
}
