// Host code only, in a .cu file for the toolkit's 16-bit types.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "tests/harness/inputs.h"

namespace jax_fa::harness {
namespace {

// Own Box-Muller: std::normal_distribution gives other numbers with another standard library.
class Normal {
 public:
  explicit Normal(std::mt19937_64& bits) : bits_(bits) {}

  float Next() {
    constexpr double kTwoPi = 6.283185307179586;
    const double radius = std::sqrt(-2.0 * std::log(Uniform()));
    return static_cast<float>(radius * std::cos(kTwoPi * Uniform()));
  }

 private:
  // In (0, 1).
  double Uniform() { return (static_cast<double>(bits_() >> 12) + 0.5) / 4503599627370496.0; }

  std::mt19937_64& bits_;
};

std::vector<float> NormalValues(int64_t count, std::mt19937_64& bits) {
  Normal normal(bits);
  std::vector<float> values(count);
  for (float& value : values) value = normal.Next();
  return values;
}

int64_t RandomBelow(int64_t bound, std::mt19937_64& bits) {
  return static_cast<int64_t>(bits() % static_cast<uint64_t>(bound));
}

void FillSequence(const Case& c, std::mt19937_64& bits, int32_t* positions) {
  const int64_t q_len = c.problem.q_len;
  for (int64_t t = 0; t < q_len; ++t) positions[t] = static_cast<int32_t>(c.n_past + t);
  switch (c.positions) {
    case Positions::kIncreasing:
      break;
    case Positions::kShuffled:
      for (int64_t t = q_len - 1; t > 0; --t) {
        std::swap(positions[t], positions[RandomBelow(t + 1, bits)]);
      }
      break;
    case Positions::kPadded:
      for (int64_t t = q_len - 1 - RandomBelow(q_len / 2, bits); t < q_len; ++t) {
        positions[t] = t % 2 == 0 ? -1 : INT32_MIN;
      }
      break;
    case Positions::kAnyOrder:
      for (int64_t t = 0; t < q_len; ++t) {
        // Half of kv_len, so that the slots above it are seen by the clamped rows alone.
        positions[t] = static_cast<int32_t>(RandomBelow(c.problem.kv_len / 2 + 4, bits) - 3);
      }
      positions[q_len / 3] = INT32_MAX;
      positions[q_len / 2] = static_cast<int32_t>(c.problem.kv_len);
      break;
  }
}

std::vector<int32_t> MakeStarts(const Case& c, std::mt19937_64& bits) {
  const AttentionProblem& p = c.problem;
  std::vector<int32_t> starts;
  if (c.starts == Starts::kBySequence) {
    for (int64_t b = 0; b < p.batch; ++b) {
      starts.push_back(b == 0 ? 0 : static_cast<int32_t>(RandomBelow(p.kv_len / 2, bits)));
    }
  } else if (c.starts == Starts::kByRow) {
    for (int64_t i = 0; i < p.batch * p.q_len; ++i) {
      starts.push_back(static_cast<int32_t>(RandomBelow(p.kv_len / 2 + 10, bits) - 5));
    }
    starts[p.q_len / 5] = INT32_MAX;
    starts[p.q_len / 4] = INT32_MIN;
  }
  return starts;
}

std::vector<float> MakeSinks(const Case& c, std::mt19937_64& bits) {
  if (c.sinks == Sinks::kNone) return {};
  const int64_t sequences = c.sinks == Sinks::kBySequence ? c.problem.batch : 1;
  std::vector<float> sinks = NormalValues(sequences * c.problem.q_heads, bits);
  for (size_t i = 0; i < sinks.size(); ++i) {
    sinks[i] = i % 3 == 2 ? -std::numeric_limits<float>::infinity() : 1.0f + 2.0f * sinks[i];
  }
  return sinks;
}

// Whether any row of sequence `b` sees each slot.
std::vector<bool> SeenBySome(const Case& c, const Inputs& inputs, int64_t b) {
  std::vector<bool> is_seen(c.problem.kv_len);
  for (int64_t t = 0; t < c.problem.q_len; ++t) {
    const SeenSlots seen = Seen(c, inputs, b, t);
    for (int64_t s = seen.first; s < seen.end; ++s) is_seen[s] = true;
  }
  return is_seen;
}

// Slots that no row sees hold NaN and infinities; slot c.nan_slot holds NaN for those that do.
void Poison(const Case& c, const Inputs& inputs, std::vector<float>& cache) {
  const AttentionProblem& p = c.problem;
  const int64_t slot_size = p.kv_heads * p.head_dim;
  constexpr float kInf = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr float kPoison[] = {kNan, kInf, -kInf};
  for (int64_t b = 0; b < p.batch; ++b) {
    float* sequence = cache.data() + b * p.kv_len * slot_size;
    const std::vector<bool> is_seen = SeenBySome(c, inputs, b);
    for (int64_t s = 0; s < p.kv_len; ++s) {
      if (!is_seen[s]) std::fill_n(sequence + s * slot_size, slot_size, kPoison[s % 3]);
    }
    if (c.nan_slot >= 0) std::fill_n(sequence + c.nan_slot * slot_size, slot_size, kNan);
  }
}

// Puts the sequences of `cache`, [batch, ...], in their layer, between layers of NaN.
std::vector<float> Stack(const Case& c, const std::vector<float>& cache) {
  const AttentionProblem& p = c.problem;
  const int64_t sequence_size = p.kv_len * p.kv_heads * p.head_dim;
  std::vector<float> stack(p.layers * cache.size(), std::numeric_limits<float>::quiet_NaN());
  for (int64_t b = 0; b < p.batch; ++b) {
    std::copy_n(cache.data() + b * sequence_size, sequence_size,
                stack.data() + StackedSequence(c, b) * sequence_size);
  }
  return stack;
}

template <typename T, typename Convert>
void StoreAs(HostArray& array, Convert convert) {
  array.bytes.resize(array.values.size() * sizeof(T));
  for (size_t i = 0; i < array.values.size(); ++i) {
    const T stored = convert(array.values[i]);
    std::memcpy(array.bytes.data() + i * sizeof(T), &stored, sizeof(T));
  }
}

template <typename T, typename Convert>
void LoadAs(HostArray& array, Convert convert) {
  array.values.resize(array.bytes.size() / sizeof(T));
  for (size_t i = 0; i < array.values.size(); ++i) {
    T stored;
    std::memcpy(&stored, array.bytes.data() + i * sizeof(T), sizeof(T));
    array.values[i] = convert(stored);
  }
}

}  // namespace

HostArray Load(std::vector<uint8_t> bytes, DType dtype) {
  HostArray array;
  array.dtype = dtype;
  array.bytes = std::move(bytes);
  switch (dtype) {
    case DType::kFloat32:
      LoadAs<float>(array, [](float x) { return x; });
      break;
    case DType::kFloat16:
      LoadAs<__half>(array, [](__half x) { return __half2float(x); });
      break;
    case DType::kBFloat16:
      LoadAs<__nv_bfloat16>(array, [](__nv_bfloat16 x) { return __bfloat162float(x); });
      break;
  }
  return array;
}

HostArray Store(std::vector<float> values, DType dtype) {
  HostArray array;
  array.values = std::move(values);
  switch (dtype) {
    case DType::kFloat32:
      StoreAs<float>(array, [](float x) { return x; });
      break;
    case DType::kFloat16:
      StoreAs<__half>(array, [](float x) { return __float2half_rn(x); });
      break;
    case DType::kBFloat16:
      StoreAs<__nv_bfloat16>(array, [](float x) { return __float2bfloat16_rn(x); });
      break;
  }
  return Load(std::move(array.bytes), dtype);
}

Inputs MakeInputs(const Case& c, uint64_t seed) {
  const AttentionProblem& p = c.problem;
  std::mt19937_64 bits(seed);
  Inputs inputs;
  inputs.positions.resize(p.batch * p.q_len);
  for (int64_t b = 0; b < p.batch; ++b) {
    FillSequence(c, bits, inputs.positions.data() + b * p.q_len);
  }
  const int64_t cache_size = p.batch * p.kv_len * p.kv_heads * p.head_dim;
  inputs.q = Store(NormalValues(p.rows() * p.head_dim, bits), p.q_dtype);
  std::vector<float> k = NormalValues(cache_size, bits);
  std::vector<float> v = NormalValues(cache_size, bits);
  inputs.starts = MakeStarts(c, bits);
  inputs.sinks = MakeSinks(c, bits);
  Poison(c, inputs, k);
  Poison(c, inputs, v);
  inputs.k = Store(Stack(c, k), p.kv_dtype);
  inputs.v = Store(Stack(c, v), p.kv_dtype);
  return inputs;
}

// By the definition, on purpose not by the kernels' VisibleSlots.
SeenSlots Seen(const Case& c, const Inputs& inputs, int64_t b, int64_t t) {
  const AttentionProblem& p = c.problem;
  const int64_t token = b * p.q_len + t;
  const int64_t position = inputs.positions[token];
  SeenSlots seen = {0, std::min(position, p.kv_len - 1) + 1};
  if (p.has_starts) {
    const int64_t start = inputs.starts[c.starts == Starts::kByRow ? token : b];
    seen.first = std::max(seen.first, start);
  }
  if (p.sliding_window > 0) seen.first = std::max(seen.first, position - p.sliding_window + 1);
  return seen;
}

double Sink(const Case& c, const Inputs& inputs, int64_t b, int64_t head) {
  if (!c.problem.has_sinks) return -std::numeric_limits<double>::infinity();
  return inputs.sinks[(c.sinks == Sinks::kBySequence ? b * c.problem.q_heads : 0) + head];
}

// By the definition, on purpose not by the kernels' CacheSequence.
int64_t StackedSequence(const Case& c, int64_t b) {
  if (c.layer_batch == 0) return b;
  const int64_t layers = c.problem.layers;
  const int64_t layer = std::clamp<int64_t>(c.layer, 0, layers - 1);
  return (b / c.layer_batch * layers + layer) * c.layer_batch + b % c.layer_batch;
}

}  // namespace jax_fa::harness
