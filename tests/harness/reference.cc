// Host reference and its error bound.
//
// The bound, first order in the roundings. With w_s the exact weights and e_s the error of score s,
//   d out = sum_s w_s e_s (v_s - out)            scores
//         + sum_s w_s r_s v_s                    r_s: rounding of the probability
//         + n eps sum_s w_s |v_s| + u_out |out|  float32 sums, rounding of out
// A sink is a score of its own, with a v of 0 and no error but exp's. A soft cap is no steeper than
// 1, so e_s passes it no larger, and adds its own error.
// each term taken in absolute value, so no correct kernel can exceed it but by second-order terms.

#include "tests/harness/reference.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace jax_fa::harness {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kFloat32Roundoff = 0x1p-24;
// Matrix units may truncate where float32 arithmetic rounds.
constexpr double kAccumulateRoundoff = 0x1p-23;
// exp by the hardware's 2^x (2 ulp), with an argument rounded in float32.
constexpr double kExpError = 0x1p-21;
constexpr double kCapError = 1e-5;                 // of the cap
constexpr double kSmallestFloat16Error = 0x1p-25;  // half of the smallest subnormal
constexpr double kSecondOrder = 1.1;

double Roundoff(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return kFloat32Roundoff;
    case DType::kFloat16:
      return 0x1p-11;
    case DType::kBFloat16:
      return 0x1p-8;
  }
  return 0.0;
}

struct Scores {
  std::vector<double> score;
  std::vector<double> error;  // largest error of the score in the kernel
};

Scores ComputeScores(const AttentionProblem& p, const float* q, const float* k, int64_t slots,
                     Arithmetic arithmetic) {
  const double scale = p.scale;
  const double q_roundoff = arithmetic == Arithmetic::kMixed ? Roundoff(p.kv_dtype) : 0.0;
  const double q_smallest = arithmetic == Arithmetic::kMixed ? kSmallestFloat16Error : 0.0;
  Scores scores;
  for (int64_t s = 0; s < slots; ++s, k += p.kv_heads * p.head_dim) {
    double dot = 0.0;
    double magnitude = 0.0;
    double k_sum = 0.0;
    for (int64_t d = 0; d < p.head_dim; ++d) {
      const double product = static_cast<double>(q[d]) * k[d];
      dot += product;
      magnitude += std::fabs(product);
      k_sum += std::fabs(static_cast<double>(k[d]));
    }
    magnitude *= std::fabs(scale);
    const double cap = p.logits_soft_cap;
    scores.score.push_back(cap > 0.0 ? cap * std::tanh(scale * dot / cap) : scale * dot);
    scores.error.push_back((q_roundoff + (p.head_dim + 2) * kAccumulateRoundoff) * magnitude +
                           q_smallest * std::max(1.0, std::fabs(scale)) * k_sum + kCapError * cap);
  }
  return scores;
}

}  // namespace

RowReference ComputeRow(const Case& c, const Inputs& inputs, int64_t row, Arithmetic arithmetic) {
  const AttentionProblem& p = c.problem;
  const int64_t head = row % p.q_heads;
  const int64_t token = row / p.q_heads;
  const int64_t kv_head = head / p.q_heads_per_kv_head();
  const SeenSlots seen = Seen(c, inputs, token / p.q_len, token % p.q_len);
  const int64_t slots = seen.end - seen.first;
  const double sink = Sink(c, inputs, token / p.q_len, head);
  const int64_t slot_pitch = p.kv_heads * p.head_dim;
  const int64_t sequence = StackedSequence(c, token / p.q_len);
  const int64_t cache_offset =
      ((sequence * p.kv_len + seen.first) * p.kv_heads + kv_head) * p.head_dim;

  RowReference reference;
  reference.out.assign(p.head_dim, 0.0);
  reference.out_bound.assign(p.head_dim, 0.0);
  reference.lse = sink;
  if (slots <= 0) return reference;

  const Scores scores = ComputeScores(p, inputs.q.values.data() + row * p.head_dim,
                                      inputs.k.values.data() + cache_offset, slots, arithmetic);
  double max = -kInf;
  for (double score : scores.score) max = std::max(max, score);
  std::vector<double> weights(slots);
  double sum = std::exp(sink - max);
  const double sink_weight_unscaled = sum;
  for (int64_t s = 0; s < slots; ++s) sum += weights[s] = std::exp(scores.score[s] - max);
  for (double& weight : weights) weight /= sum;
  reference.lse = max + std::log(sum);

  const float* v = inputs.v.values.data() + cache_offset;
  for (int64_t s = 0; s < slots; ++s) {
    for (int64_t d = 0; d < p.head_dim; ++d) {
      reference.out[d] += weights[s] * v[s * slot_pitch + d];
    }
  }

  const bool is_mixed = arithmetic == Arithmetic::kMixed;
  const double prob_roundoff = is_mixed ? Roundoff(p.kv_dtype) : 0.0;
  const double sums_roundoff = (slots + 64) * kFloat32Roundoff;
  for (int64_t s = 0; s < slots; ++s) {
    const double score_error =
        scores.error[s] + kExpError * (2.0 + std::fabs(scores.score[s] - max));
    // A probability is a float16 at least, between 0 and 1, against a sum of at least 1.
    const double prob_error =
        prob_roundoff * weights[s] + (is_mixed ? kSmallestFloat16Error / sum : 0.0);
    reference.lse_bound += kSecondOrder * weights[s] * score_error;
    for (int64_t d = 0; d < p.head_dim; ++d) {
      const double value = v[s * slot_pitch + d];
      reference.out_bound[d] +=
          kSecondOrder * weights[s] * score_error * std::fabs(value - reference.out[d]) +
          (prob_error + sums_roundoff * weights[s]) * std::fabs(value);
    }
  }
  const double sink_weight = sink_weight_unscaled / sum;
  const double sink_error =
      sink_weight == 0.0 ? 0.0
                         : kSecondOrder * sink_weight * kExpError * (2.0 + std::fabs(sink - max));
  reference.lse_bound +=
      sink_error + sums_roundoff + 4 * kFloat32Roundoff * std::fabs(reference.lse);
  for (int64_t d = 0; d < p.head_dim; ++d) {
    reference.out_bound[d] += sink_error * std::fabs(reference.out[d]) +
                              Roundoff(p.q_dtype) * std::fabs(reference.out[d]) +
                              kSmallestFloat16Error;
  }
  return reference;
}

}  // namespace jax_fa::harness
