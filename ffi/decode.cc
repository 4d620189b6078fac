// See decode.h. Messages carry the operand's name, the values met and the rule.

#include "ffi/decode.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

namespace jax_fa {
namespace {

namespace ffi = ::xla::ffi;

using Dims = ffi::AnyBuffer::Dimensions;

// Axes before [q_len, heads, head_dim] are batch axes, any number of them, equal in all operands;
// they are collapsed into AttentionParams::batch.
struct CallBuffers {
  ffi::AnyBuffer q;                                  // [batch..., q_len, q_heads, head_dim]
  ffi::AnyBuffer k;                                  // [batch..., kv_len, kv_heads, head_dim]
  ffi::AnyBuffer v;                                  // [batch..., kv_len, kv_heads, head_dim]
  ffi::AnyBuffer positions;                          // [batch..., q_len] int32
  ffi::AnyBuffer out;                                // like q
  std::optional<ffi::AnyBuffer> lse = std::nullopt;  // [batch..., q_len, q_heads] float32
  // int32, one element. k and v then have exactly the axes
  // [stacks, layers, layer_batch, kv_len, kv_heads, head_dim], and batch is stacks * layer_batch.
  std::optional<ffi::AnyBuffer> layer = std::nullopt;
  std::optional<ffi::AnyBuffer> starts = std::nullopt;  // [batch...] or [batch..., q_len] int32
  std::optional<ffi::AnyBuffer> sinks = std::nullopt;   // [q_heads] or [batch..., q_heads] float32

  // Where the optional operand of this name goes; null: there is none of this name.
  std::optional<ffi::AnyBuffer>* Find(std::string_view name) {
    if (name == "layer") return &layer;
    if (name == "starts") return &starts;
    if (name == "sinks") return &sinks;
    return nullptr;
  }
};

constexpr size_t kRequiredOperands = 4;

std::string ToString(Dims dims) {
  std::ostringstream os;
  os << "[";
  for (size_t i = 0; i < dims.size(); ++i) os << (i ? ", " : "") << dims[i];
  os << "]";
  return os.str();
}

template <typename... Parts>
ffi::Error Invalid(const Parts&... parts) {
  std::ostringstream os;
  os << "jax_fa.prefill_attention: ";
  (os << ... << parts);
  return ffi::Error::InvalidArgument(os.str());
}

// The last `count` axes of `dims`.
Dims Trailing(Dims dims, size_t count) { return Dims(dims.begin() + (dims.size() - count), count); }

bool Equal(Dims a, Dims b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i] != b[i]) return false;
  }
  return true;
}

bool SameBatch(Dims a, size_t a_trailing, Dims b, size_t b_trailing) {
  return a.size() - a_trailing == b.size() - b_trailing &&
         Equal(Dims(a.begin(), a.size() - a_trailing), Dims(b.begin(), b.size() - b_trailing));
}

std::optional<DType> ToDType(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::F32:
      return DType::kFloat32;
    case ffi::DataType::F16:
      return DType::kFloat16;
    case ffi::DataType::BF16:
      return DType::kBFloat16;
    default:
      return std::nullopt;
  }
}

// Attributes by name: one that the call lacks keeps its default, one that nothing reads is refused.
class AttributeReader {
 public:
  explicit AttributeReader(ffi::Dictionary given) : given_(given) {}

  template <typename T>
  void Read(std::string_view name, T* value) {
    known_.push_back(name);
    if (!given_.contains(name)) return;
    const ffi::ErrorOr<T> found = given_.get<T>(name);
    if (found.has_value()) {
      *value = found.value();
    } else if (error_.success()) {
      error_ = Invalid("the attribute ", name, ": ", found.error().message());
    }
  }

  // The first error; to be asked when all that is known has been read.
  ffi::Error Finish() {
    for (const std::string_view name : given_) {
      if (std::find(known_.begin(), known_.end(), name) != known_.end()) continue;
      std::ostringstream known;
      for (const std::string_view other : known_) known << " " << other;
      return Invalid("the attribute ", name, " is unknown; this version knows", known.str(),
                     " (a program that a later version exported needs that version).");
    }
    return error_;
  }

 private:
  ffi::Dictionary given_;
  std::vector<std::string_view> known_;
  ffi::Error error_ = ffi::Error::Success();
};

std::vector<std::string_view> Words(std::string_view text) {
  std::vector<std::string_view> words;
  while (!text.empty()) {
    const size_t end = std::min(text.find(' '), text.size());
    words.push_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return words;
}

// Gives the buffers their names.
ffi::ErrorOr<CallBuffers> NameBuffers(const CallFrame& frame, std::string_view optional_operands) {
  const ffi::RemainingArgs& operands = frame.operands;
  const ffi::RemainingRets& results = frame.results;
  const std::vector<std::string_view> names = Words(optional_operands);
  if (operands.size() != kRequiredOperands + names.size()) {
    return ffi::Unexpected(Invalid("the call has ", operands.size(),
                                   " operands; it must have q, k, v, positions and what operands='",
                                   optional_operands, "' names."));
  }
  if (results.size() != 1 && results.size() != 2) {
    return ffi::Unexpected(Invalid("the call has ", results.size(),
                                   " results; they are out, and lse where it is wanted."));
  }
  // All that XLA passes are buffers, so within these sizes there is a value.
  const auto operand = [&](size_t i) { return operands.get<ffi::AnyBuffer>(i).value(); };
  const auto result = [&](size_t i) { return *results.get<ffi::AnyBuffer>(i).value(); };
  CallBuffers buffers{operand(0), operand(1), operand(2), operand(3), result(0)};
  if (results.size() == 2) buffers.lse = result(1);
  for (size_t i = 0; i < names.size(); ++i) {
    std::optional<ffi::AnyBuffer>* named = buffers.Find(names[i]);
    if (named == nullptr || named->has_value()) {
      return ffi::Unexpected(Invalid("operands='", optional_operands, "' names '", names[i],
                                     named ? "' twice." : "', which this version does not know."));
    }
    *named = operand(kRequiredOperands + i);
  }
  return buffers;
}

ffi::Error CheckDTypes(const CallBuffers& b, AttentionParams* params) {
  const auto q_dtype = ToDType(b.q.element_type());
  const auto kv_dtype = ToDType(b.k.element_type());
  if (!q_dtype) return Invalid("q has an unsupported dtype; float32, float16 or bfloat16 is read.");
  if (!kv_dtype || *kv_dtype == DType::kFloat32) {
    return Invalid("k has an unsupported dtype; the cache must be float16 or bfloat16.");
  }
  if (b.v.element_type() != b.k.element_type()) return Invalid("k and v differ in dtype.");
  if (*q_dtype != DType::kFloat32 && *q_dtype != *kv_dtype) {
    return Invalid("q is ", DTypeName(*q_dtype), " and the cache ", DTypeName(*kv_dtype),
                   "; a 16-bit q must have the cache's dtype.");
  }
  if (b.positions.element_type() != ffi::DataType::S32) return Invalid("positions must be int32.");
  if (b.layer && b.layer->element_type() != ffi::DataType::S32) {
    return Invalid("layer must be int32.");
  }
  if (b.starts && b.starts->element_type() != ffi::DataType::S32) {
    return Invalid("starts must be int32.");
  }
  if (b.sinks && b.sinks->element_type() != ffi::DataType::F32) {
    return Invalid("sinks must be float32.");
  }
  if (b.out.element_type() != b.q.element_type()) return Invalid("out and q differ in dtype.");
  if (b.lse && b.lse->element_type() != ffi::DataType::F32) return Invalid("lse must be float32.");
  params->q_dtype = *q_dtype;
  params->kv_dtype = *kv_dtype;
  return ffi::Error::Success();
}

// The layer, and the first three axes of k and v, which are stacks of layers.
ffi::Error CheckStack(const CallBuffers& b, AttentionParams* params) {
  const Dims k = b.k.dimensions();
  if (b.layer->element_count() != 1) {
    return Invalid("layer has shape ", ToString(b.layer->dimensions()), "; it must be one number.");
  }
  if (k.size() != 6 || k[1] < 1) {
    return Invalid("k has shape ", ToString(k),
                   "; with a layer it must be [stacks, layers, batch, S, Hk, D] with at least one "
                   "layer.");
  }
  if (k[0] * k[2] != params->batch) {
    return Invalid("k has ", k[0], " stacks of ", k[2], " sequences, q has shape ",
                   ToString(b.q.dimensions()), "; its batch must be their product.");
  }
  params->layers = k[1];
  params->layer_batch = k[2];
  return ffi::Error::Success();
}

// Starts and sinks, which may or may not have one of their axes.
ffi::Error CheckMasks(const CallBuffers& b, AttentionParams* params) {
  const Dims q = b.q.dimensions();
  if (b.starts) {
    const Dims starts = b.starts->dimensions();
    params->starts_by_row = Equal(starts, Dims(q.begin(), q.size() - 2));
    if (!params->starts_by_row && !Equal(starts, Dims(q.begin(), q.size() - 3))) {
      return Invalid("starts has shape ", ToString(starts), ", q has ", ToString(q),
                     "; it must have one number a sequence, or one a token.");
    }
  }
  if (b.sinks) {
    const Dims sinks = b.sinks->dimensions();
    const bool of_heads = sinks.size() >= 1 && sinks[sinks.size() - 1] == params->q_heads;
    params->sinks_by_sequence = sinks.size() > 1;
    if (!of_heads || (params->sinks_by_sequence && !SameBatch(q, 3, sinks, 1))) {
      return Invalid("sinks has shape ", ToString(sinks), ", q has ", ToString(q),
                     "; it must have one number a query head, for all sequences or for each.");
    }
  }
  params->has_starts = b.starts.has_value();
  params->has_sinks = b.sinks.has_value();
  return ffi::Error::Success();
}

ffi::Error CheckShapes(const CallBuffers& b, AttentionParams* params) {
  const Dims q = b.q.dimensions(), k = b.k.dimensions(), v = b.v.dimensions();
  const Dims positions = b.positions.dimensions();
  if (q.size() < 3 || k.size() < 3 || positions.size() < 1) {
    return Invalid("q ", ToString(q), ", k ", ToString(k), " and positions ", ToString(positions),
                   " need at least 3, 3 and 1 axes.");
  }
  if (!Equal(k, v)) {
    return Invalid("k has shape ", ToString(k), ", v has ", ToString(v), "; they must be equal.");
  }
  const bool same_batch = b.layer || SameBatch(q, 3, k, 3);
  if (!same_batch || !SameBatch(q, 3, positions, 1)) {
    return Invalid("q ", ToString(q), ", k ", ToString(k), " and positions ", ToString(positions),
                   " differ in their batch axes.");
  }
  const Dims q_tail = Trailing(q, 3), k_tail = Trailing(k, 3);
  params->q_len = q_tail[0];
  params->q_heads = q_tail[1];
  params->head_dim = q_tail[2];
  params->kv_len = k_tail[0];
  params->kv_heads = k_tail[1];
  params->batch = 1;
  for (size_t i = 0; i + 3 < q.size(); ++i) params->batch *= q[i];
  if (b.layer) {
    if (ffi::Error error = CheckStack(b, params); error.failure()) return error;
  }
  if (k_tail[2] != params->head_dim || params->head_dim < 1) {
    return Invalid("q has head_dim ", params->head_dim, ", k has ", k_tail[2],
                   "; they must be equal and at least 1.");
  }
  if (params->kv_heads < 1 || params->q_heads < 1 || params->q_heads % params->kv_heads != 0) {
    return Invalid("q has ", params->q_heads, " heads, k has ", params->kv_heads,
                   "; query heads must be a multiple of kv heads, both at least 1.");
  }
  if (positions[positions.size() - 1] != params->q_len) {
    return Invalid("positions has shape ", ToString(positions), ", q has ", params->q_len,
                   " tokens; there is one position a token.");
  }
  if (params->kv_len > kMaxKvLen) {
    return Invalid("the cache has ", params->kv_len, " slots; int32 positions reach ", kMaxKvLen,
                   ".");
  }
  if (!Equal(b.out.dimensions(), q)) {
    return Invalid("out has shape ", ToString(b.out.dimensions()), ", q has ", ToString(q),
                   "; they must be equal.");
  }
  if (b.lse && !Equal(b.lse->dimensions(), Dims(q.begin(), q.size() - 1))) {
    return Invalid("lse has shape ", ToString(b.lse->dimensions()), "; q's less its last axis, ",
                   ToString(q), ", is needed.");
  }
  return CheckMasks(b, params);
}

// Of what is compiled into the call; the scale of a call without one has been set.
ffi::Error CheckOptions(const AttentionParams& params) {
  if (!std::isfinite(params.scale)) {
    return Invalid("scale is ", params.scale, "; it must be finite.");
  }
  if (params.sliding_window < 0) {
    return Invalid("sliding_window is ", params.sliding_window,
                   "; it must be at least 1, or 0 for none.");
  }
  if (!std::isfinite(params.logits_soft_cap) || params.logits_soft_cap < 0) {
    return Invalid("logits_soft_cap is ", params.logits_soft_cap,
                   "; it must be finite and above 0, or 0 for none.");
  }
  return ffi::Error::Success();
}

}  // namespace

bool IsEmpty(const AttentionProblem& problem) { return problem.rows() == 0; }

ffi::Error Decode(const CallFrame& frame, std::string_view default_operands, Call* call) {
  AttentionParams& params = call->params;
  std::string_view operands = default_operands, implementation;
  AttributeReader attributes(frame.attributes);
  attributes.Read("operands", &operands);
  attributes.Read("implementation", &implementation);
  attributes.Read("scale", &params.scale);
  attributes.Read("chunk_invariant", &params.chunk_invariant);
  attributes.Read("sliding_window", &params.sliding_window);
  attributes.Read("logits_soft_cap", &params.logits_soft_cap);
  if (ffi::Error error = attributes.Finish(); error.failure()) return error;
  call->implementation = implementation;

  const ffi::ErrorOr<CallBuffers> named = NameBuffers(frame, operands);
  if (named.has_error()) return named.error();
  const CallBuffers& buffers = named.value();
  if (ffi::Error error = CheckDTypes(buffers, &params); error.failure()) return error;
  if (ffi::Error error = CheckShapes(buffers, &params); error.failure()) return error;
  if (!frame.attributes.contains("scale")) {
    params.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(params.head_dim)));
  }
  if (ffi::Error error = CheckOptions(params); error.failure()) return error;
  const auto data = [](const std::optional<ffi::AnyBuffer>& buffer) {
    return buffer ? buffer->untyped_data() : nullptr;
  };
  params.q = buffers.q.untyped_data();
  params.k = buffers.k.untyped_data();
  params.v = buffers.v.untyped_data();
  params.positions = static_cast<const int32_t*>(buffers.positions.untyped_data());
  params.layer = static_cast<const int32_t*>(data(buffers.layer));
  params.starts = static_cast<const int32_t*>(data(buffers.starts));
  params.sinks = static_cast<const float*>(data(buffers.sinks));
  params.out = buffers.out.untyped_data();
  params.lse = static_cast<float*>(data(buffers.lse));
  return ffi::Error::Success();
}

}  // namespace jax_fa
