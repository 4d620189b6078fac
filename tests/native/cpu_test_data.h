// What the CPU kernel's test computes with: 16-bit floats spelt out, arrays that end at a page no
// one may touch, a problem with its data, and the definition of attention as a double-precision
// loop.

#ifndef JAX_FA_TESTS_NATIVE_CPU_TEST_DATA_H_
#define JAX_FA_TESTS_NATIVE_CPU_TEST_DATA_H_

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include "attention/problem.h"

namespace jax_fa::test {

constexpr double kInf = std::numeric_limits<double>::infinity();

inline double DecodeBits(DType dtype, uint16_t bits) {
  const int mantissa_bits = dtype == DType::kFloat16 ? 10 : 7;
  const int exponent_mask = dtype == DType::kFloat16 ? 0x1f : 0xff;
  const int exponent = bits >> mantissa_bits & exponent_mask;
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  const double sign = bits & 0x8000 ? -1.0 : 1.0;
  if (exponent == exponent_mask) return mantissa != 0 ? std::nan("") : sign * kInf;
  const int implicit = exponent == 0 ? 0 : 1 << mantissa_bits;
  const int power = (exponent == 0 ? 1 : exponent) - exponent_mask / 2 - mantissa_bits;
  return sign * std::ldexp(mantissa + implicit, power);
}

inline double Decode(DType dtype, const void* array, int64_t i) {
  if (dtype != DType::kFloat32) {
    return DecodeBits(dtype, static_cast<const uint16_t*>(array)[i]);
  }
  float value;
  std::memcpy(&value, static_cast<const char*>(array) + 4 * i, sizeof(value));
  return value;
}

// Towards zero for the 16-bit types: the data need be representable, not well rounded.
inline void Encode(DType dtype, void* array, int64_t i, double value) {
  const float single = static_cast<float>(value);
  if (dtype == DType::kFloat32) {
    std::memcpy(static_cast<char*>(array) + 4 * i, &single, sizeof(single));
    return;
  }
  uint32_t wide;
  std::memcpy(&wide, &single, sizeof(wide));
  uint16_t bits = static_cast<uint16_t>(wide >> 16);
  if (dtype == DType::kFloat16) {
    int exponent = 0;
    const double magnitude = std::fabs(value);
    if (!std::isfinite(value)) {
      bits = std::isnan(value) ? 0x7e00 : 0x7c00;
    } else {
      std::frexp(magnitude, &exponent);
      exponent = magnitude == 0 ? -14 : std::max(exponent - 1, -14);
      const int steps = static_cast<int>(std::ldexp(magnitude, 10 - exponent));
      bits = static_cast<uint16_t>(((exponent + 14) << 10) + steps);
    }
    if (std::signbit(value)) bits |= 0x8000;
  }
  std::memcpy(static_cast<char*>(array) + 2 * i, &bits, sizeof(bits));
}

// Bytes that end where an unmapped page begins: reading or writing past them faults. The start is
// then aligned to the element only, as the contract allows.
class Array {
 public:
  Array() = default;
  explicit Array(int64_t bytes) : bytes_(bytes) {
    const int64_t page = sysconf(_SC_PAGESIZE);
    mapped_bytes_ = (bytes + page - 1) / page * page + page;
    mapped_ = static_cast<char*>(
        mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (mapped_ == MAP_FAILED || mprotect(mapped_ + mapped_bytes_ - page, page, PROT_NONE) != 0) {
      std::perror("mmap");
      std::exit(2);
    }
    data_ = mapped_ + mapped_bytes_ - page - bytes;
    // NaN in every dtype.
    std::memset(data_, 0xff, bytes);
  }
  Array(Array&& other) noexcept { *this = std::move(other); }
  Array& operator=(Array&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(mapped_, other.mapped_);
    std::swap(mapped_bytes_, other.mapped_bytes_);
    return *this;
  }
  ~Array() {
    if (mapped_ != nullptr) munmap(mapped_, mapped_bytes_);
  }

  void* data() const { return data_; }
  const char* at(int64_t byte) const { return data_ + byte; }
  int64_t bytes() const { return bytes_; }
  bool SameBits(const Array& other) const {
    return bytes_ == other.bytes_ && std::memcmp(data_, other.data_, bytes_) == 0;
  }

 private:
  char* data_ = nullptr;
  int64_t bytes_ = 0;
  char* mapped_ = nullptr;
  int64_t mapped_bytes_ = 0;
};

template <class T>
int64_t Size(const std::vector<T>& values) {
  return static_cast<int64_t>(values.size());
}

// A problem with its data: unit-normal, positions 0, 1, .. in each sequence, NaN in out and lse.
struct Data {
  AttentionProblem problem;
  Array q, k, v, positions, out, lse;
  std::vector<int32_t> starts;  // none, [batch] or [batch, q_len]
  std::vector<float> sinks;     // none, [q_heads] or [batch, q_heads]

  explicit Data(const AttentionProblem& p, bool filled = true) : problem(p) {
    const int64_t q_count = p.rows() * p.head_dim;
    const int64_t kv_count = p.batch * p.kv_len * p.kv_heads * p.head_dim;
    q = Array(q_count * DTypeBytes(p.q_dtype));
    k = Array(kv_count * DTypeBytes(p.kv_dtype));
    v = Array(kv_count * DTypeBytes(p.kv_dtype));
    positions = Array(tokens() * 4);
    ResetOutputs();
    if (!filled) return;
    std::mt19937 random(1);
    std::normal_distribution<double> normal;
    for (int64_t i = 0; i < q_count; ++i) Encode(p.q_dtype, q.data(), i, normal(random));
    for (int64_t i = 0; i < kv_count; ++i) Encode(p.kv_dtype, k.data(), i, normal(random));
    for (int64_t i = 0; i < kv_count; ++i) Encode(p.kv_dtype, v.data(), i, normal(random));
    for (int64_t i = 0; i < tokens(); ++i) position(i) = static_cast<int>(i % p.q_len);
  }

  // Tokens [begin, begin + count) of the one sequence, with the whole cache.
  Data Chunk(int64_t begin, int64_t count) const {
    AttentionProblem chunk_problem = problem;
    chunk_problem.q_len = count;
    Data chunk(chunk_problem, false);
    const int64_t token_bytes = problem.q_heads * problem.head_dim * DTypeBytes(problem.q_dtype);
    std::memcpy(chunk.q.data(), q.at(begin * token_bytes), chunk.q.bytes());
    std::memcpy(chunk.k.data(), k.data(), k.bytes());
    std::memcpy(chunk.v.data(), v.data(), v.bytes());
    std::memcpy(chunk.positions.data(), positions.at(begin * 4), chunk.positions.bytes());
    chunk.starts = starts;
    if (StartsByRow()) chunk.starts = {&starts[begin], &starts[begin] + count};
    chunk.sinks = sinks;
    return chunk;
  }

  void ResetOutputs() {
    out = Array(problem.rows() * problem.head_dim * DTypeBytes(problem.q_dtype));
    lse = Array(problem.rows() * 4);
  }
  int32_t& position(int64_t token) { return static_cast<int32_t*>(positions.data())[token]; }
  int64_t tokens() const { return problem.batch * problem.q_len; }
  bool StartsByRow() const { return Size(starts) > problem.batch; }
  bool SinksBySequence() const { return Size(sinks) > problem.q_heads; }

  // Writes `value` to all elements of slot `slot` of k or v.
  void FillSlot(Array& cache, int64_t b, int64_t slot, double value) {
    const int64_t step = problem.kv_heads * problem.head_dim;
    for (int64_t i = 0; i < step; ++i) {
      Encode(problem.kv_dtype, cache.data(), (b * problem.kv_len + slot) * step + i, value);
    }
  }

  AttentionParams Params() const {
    AttentionParams params;
    static_cast<AttentionProblem&>(params) = problem;
    params.q = q.data();
    params.k = k.data();
    params.v = v.data();
    params.positions = static_cast<const int32_t*>(positions.data());
    params.has_starts = !starts.empty();
    params.starts = starts.empty() ? nullptr : starts.data();
    params.starts_by_row = StartsByRow();
    params.has_sinks = !sinks.empty();
    params.sinks = sinks.empty() ? nullptr : sinks.data();
    params.sinks_by_sequence = SinksBySequence();
    params.out = out.data();
    params.lse = static_cast<float*>(lse.data());
    return params;
  }
};

// The slots [first, end) that a token sees (contract C1), here a second time and in other words
// than the kernels'.
struct SeenSlots {
  int64_t first;
  int64_t end;
};

inline SeenSlots Seen(const Data& data, int64_t token) {
  const AttentionProblem& p = data.problem;
  const int64_t position = static_cast<const int32_t*>(data.positions.data())[token];
  const int64_t start =
      data.starts.empty() ? 0 : data.starts[data.StartsByRow() ? token : token / p.q_len];
  const int64_t window_start = p.sliding_window == 0 ? 0 : position - p.sliding_window + 1;
  const int64_t end = std::min(position, p.kv_len - 1) + 1;
  return {std::max({int64_t{0}, start, window_start}), std::max<int64_t>(end, 0)};
}

struct RowReference {
  std::vector<double> out;
  double lse = -kInf;
  double out_bound = 0;  // on |out - reference| before out is rounded to its dtype
  double lse_bound = 0;
};

// The definition (contract C1, C2; then cap, then sink) for row `row` of [batch, q_len, q_heads],
// and bounds on the error of any float32 computation of it: a sum of n terms is off by at most n
// eps times the sum of their magnitudes, and an error e of the scores changes the probabilities by
// a factor within exp(+-2e). A soft cap adds at most 1e-5 of itself, and widens no error before it.
inline RowReference Reference(const Data& data, int64_t row) {
  const AttentionProblem& p = data.problem;
  const int64_t token = row / p.q_heads;
  const int64_t b = token / p.q_len;
  const int64_t head = row % p.q_heads;
  const int64_t kv_head = head / p.q_heads_per_kv_head();
  const SeenSlots seen = Seen(data, token);
  const int64_t visible = seen.end - seen.first;
  const auto at = [&](const Array& cache, int64_t slot, int64_t d) {
    return Decode(p.kv_dtype, cache.data(),
                  ((b * p.kv_len + seen.first + slot) * p.kv_heads + kv_head) * p.head_dim + d);
  };
  const double cap = p.logits_soft_cap;
  const double sink =
      data.sinks.empty() ? -kInf : data.sinks[(data.SinksBySequence() ? b * p.q_heads : 0) + head];

  RowReference reference;
  reference.out.assign(p.head_dim, 0.0);
  reference.lse = sink;
  if (visible <= 0) return reference;
  constexpr double kEps = 6e-8;
  std::vector<double> scores(visible);
  double max = -kInf, score_error = 0, largest_v = 0, sum = 0;
  for (int64_t s = 0; s < visible; ++s) {
    double magnitude = 0;
    for (int64_t d = 0; d < p.head_dim; ++d) {
      const double term = Decode(p.q_dtype, data.q.data(), row * p.head_dim + d) * at(data.k, s, d);
      scores[s] += p.scale * term;
      magnitude += std::fabs(p.scale * term);
    }
    if (cap > 0) scores[s] = cap * std::tanh(scores[s] / cap);
    max = std::max(max, scores[s]);
    score_error = std::max(score_error, (p.head_dim + 8) * kEps * magnitude + 1e-5 * cap);
  }
  // The sink's own error is its rounding to log2 units, and that of the maximum it is measured
  // from.
  sum = std::exp(sink - max);
  if (sum > 0) score_error += 8 * kEps * (std::fabs(sink) + std::fabs(max));
  for (int64_t s = 0; s < visible; ++s) {
    const double prob = std::exp(scores[s] - max);
    sum += prob;
    for (int64_t d = 0; d < p.head_dim; ++d) {
      reference.out[d] += prob * at(data.v, s, d);
      largest_v = std::max(largest_v, std::fabs(at(data.v, s, d)));
    }
  }
  for (double& element : reference.out) element /= sum;
  reference.lse = max + std::log(sum);
  const double sum_error = (visible + 16) * kEps;
  reference.out_bound = largest_v * (std::expm1(2 * score_error) + 2 * sum_error);
  reference.lse_bound = score_error + sum_error + 4 * kEps * std::fabs(reference.lse);
  return reference;
}

}  // namespace jax_fa::test

#endif  // JAX_FA_TESTS_NATIVE_CPU_TEST_DATA_H_
