// What the Hopper kernel serves, and the way to its builds.

#include "cuda/hopper/hopper.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>

#include "attention/rules.h"
#include "cuda/hopper/choice.h"
#include "cuda/refusal.h"

namespace jax_fa::cuda {
namespace {

constexpr char kArchitectures[] = "90a-real";  // as cuda/hopper/CMakeLists.txt says
// TMA strides stay below 2^40 bytes, its coordinates and extents in int32.
constexpr int64_t kMaxStrideBytes = int64_t{1} << 40;
constexpr int64_t kMaxExtent = INT32_MAX - 4096;

// Query tiles are numbered in int32; the margin is for the last round of a grid.
constexpr int64_t kMaxTiles = int64_t{1} << 30;

bool FitsTensorMap(int64_t rows, int64_t heads, int64_t head_dim) {
  return rows <= kMaxExtent && heads <= kMaxExtent && rows * heads * head_dim * 2 < kMaxStrideBytes;
}

int64_t QueryTiles(const AttentionProblem& problem) {
  return (problem.q_len + 63) / 64 * problem.batch * problem.q_heads;
}

}  // namespace

std::string HopperRefusal(const AttentionProblem& problem, ComputeCapability cc) {
  const std::string outside = OutsideContract(problem);
  if (!outside.empty()) return outside;
  if (problem.head_dim % 8 != 0) {
    return "head_dim is " + std::to_string(problem.head_dim) +
           "; TMA takes rows of whole 16 bytes: multiples of 8";
  }
  if (problem.head_dim > hopper::MaxHeadDim()) {
    return "head_dim is " + std::to_string(problem.head_dim) + "; hopper is built for up to " +
           std::to_string(hopper::MaxHeadDim());
  }
  if (!(problem.scale > 0.0f)) {
    return "scale is " + std::to_string(problem.scale) +
           "; hopper finds the row maximum before scaling, which takes a positive one";
  }
  if (problem.logits_soft_cap > 0.0f &&
      !(std::isfinite(problem.logits_soft_cap * static_cast<float>(M_LOG2E)) &&
        std::isfinite(std::max(problem.scale, 1.0f) / problem.logits_soft_cap))) {
    return "logits_soft_cap is " + std::to_string(problem.logits_soft_cap) +
           "; hopper computes scale / cap and cap * log2(e) in float32, which must be finite";
  }
  if (!FitsTensorMap(problem.q_len, problem.q_heads, problem.head_dim) ||
      !FitsTensorMap(problem.kv_len, problem.kv_heads, problem.head_dim)) {
    return "a sequence of q or k takes 2^40 bytes or more, which a tensor map cannot describe";
  }
  if (problem.layers > kMaxExtent / std::max<int64_t>(problem.batch, 1)) {
    return "k holds " + std::to_string(problem.batch) + " sequences in each of " +
           std::to_string(problem.layers) + " layers; a tensor map numbers up to " +
           std::to_string(kMaxExtent) + " in all";
  }
  if (QueryTiles(problem) > kMaxTiles) {
    return "the call has " + std::to_string(QueryTiles(problem)) +
           " query tiles of 64 rows; hopper numbers up to " + std::to_string(kMaxTiles);
  }
  return MissingCode(kArchitectures, 90, cc);
}

bool HopperServesPointers(const AttentionParams& params) {
  for (const void* pointer : {params.q, params.k, params.v, static_cast<const void*>(params.out)}) {
    if (reinterpret_cast<uintptr_t>(pointer) % 16 != 0) return false;
  }
  return true;
}

cudaError_t LaunchHopper(const AttentionParams& params, cudaStream_t stream) {
  if (!HopperServesPointers(params)) return cudaErrorMisalignedAddress;
  int sm_count = 0;
  const cudaError_t error = hopper::CountSms(&sm_count);
  if (error != cudaSuccess) return error;
  return hopper::ChooseBuild(params, sm_count).launch(params, stream);
}

}  // namespace jax_fa::cuda
