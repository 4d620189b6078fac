// What the portable generation serves, and the way to its two translation units.

#include "cuda/portable/portable.h"

#include "attention/rules.h"
#include "cuda/portable/config.h"
#include "cuda/refusal.h"

namespace jax_fa::cuda {
namespace {

constexpr int64_t kMaxGridX = (int64_t{1} << 31) - 1;

}  // namespace

int64_t portable::GridBlocks(const AttentionProblem& problem) {
  return (problem.q_len + kTileQ - 1) / kTileQ * problem.batch * problem.q_heads;
}

std::string PortableRefusal(const AttentionProblem& problem, ComputeCapability cc) {
  const std::string outside = OutsideContract(problem);
  if (!outside.empty()) return outside;
  if (problem.head_dim != 64 && problem.head_dim != 128) {
    return "head_dim " + std::to_string(problem.head_dim) +
           " is not built for portable (built: 64, 128)";
  }
  const bool is_bfloat16 = problem.kv_dtype == DType::kBFloat16;
  if (is_bfloat16 && cc < 80) {
    return "a bfloat16 cache needs compute capability 8.0 or newer (this device: " +
           std::to_string(cc / 10) + "." + std::to_string(cc % 10) + ")";
  }
  if (portable::GridBlocks(problem) > kMaxGridX) {
    return "the call needs " + std::to_string(portable::GridBlocks(problem)) +
           " thread blocks, a CUDA grid holds " + std::to_string(kMaxGridX);
  }
  return MissingCode(BuiltArchitectures(), is_bfloat16 ? 80 : 75, cc);
}

cudaError_t LaunchPortable(const AttentionParams& params, cudaStream_t stream) {
  return params.kv_dtype == DType::kFloat16 ? portable::LaunchFloat16(params, stream)
                                            : portable::LaunchBFloat16(params, stream);
}

}  // namespace jax_fa::cuda
