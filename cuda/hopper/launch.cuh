// From a call's parameters to a launch of one build of the kernel: tensor maps, grid, shared
// memory. Included by the .cu files that CMake writes, one a row of builds.def.

#ifndef JAX_FA_CUDA_HOPPER_LAUNCH_CUH_
#define JAX_FA_CUDA_HOPPER_LAUNCH_CUH_

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>

#include "attention/problem.h"
#include "cuda/hopper/choice.h"
#include "cuda/hopper/clusters.cuh"
#include "cuda/hopper/prefill_kernel.cuh"
#include "cuda/hopper/tensor_map.h"

namespace jax_fa::cuda::hopper {

// Lets the kernel have its shared memory on the current device; once per device and build.
template <typename C>
cudaError_t AllowSharedMemory(int device) {
  static std::atomic<uint64_t> allowed{0};  // bit d: done on device d
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if (allowed.load(std::memory_order_acquire) & bit) return cudaSuccess;
  const cudaError_t error =
      cudaFuncSetAttribute(PrefillKernel<C>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(sizeof(SharedStorage<C>)));
  if (error == cudaSuccess) allowed.fetch_or(bit, std::memory_order_release);
  return error;
}

// Tensor maps of the four arrays; a map of no slots is not allowed, so an empty cache is described
// as one slot of q, which is loaded and seen by no row.
template <typename C>
cudaError_t MakeTensorMaps(const AttentionParams& params, TensorMaps* maps) {
  const TensorMapType type = std::is_same_v<typename C::Element, __half> ? TensorMapType::kFloat16
                                                                         : TensorMapType::kBFloat16;
  const bool empty = params.kv_len == 0;
  const HeadedArray cache = {params.head_dim, std::max<int64_t>(params.kv_len, 1), params.kv_heads,
                             empty ? params.batch : params.batch * params.layers};
  const HeadedArray rows = {params.head_dim, params.q_len, params.q_heads, params.batch};
  cudaError_t error =
      EncodeTensorMap(empty ? params.q : params.k, cache, type, C::kTileKV, 1, &maps->k);
  if (error != cudaSuccess) return error;
  error = EncodeTensorMap(empty ? params.q : params.v, cache, type, C::kTileKV, 1, &maps->v);
  if (error != cudaSuccess || C::kFloatQuery) return error;
  if constexpr (C::kPacksHeads) {
    return EncodeTensorMap(params.q, rows, type, BoxTokens(params),
                           static_cast<int>(params.q_heads_per_kv_head()), &maps->q);
  }
  error = EncodeTensorMap(params.q, rows, type, kConsumerRows, 1, &maps->q);
  if (error != cudaSuccess) return error;
  return EncodeTensorMap(params.out, rows, type, 16, 1, &maps->out);
}

// KV heads are worked on in sections whose K and V take half of L2, if that is more than one head:
// each of L2's partitions holds lines of the other too. Sections of few rounds of tiles would pair
// the long tiles of one with those of the next, so they have this many on average: the longest
// block then has at most 3 % more to do than without sections, 0.1 % in the mean (simulated).
constexpr int64_t kSectionRounds = 5;

inline int64_t CountSections(const AttentionProblem& problem, int64_t tiles, int sm_count,
                             int l2_bytes) {
  const int64_t kv_heads = problem.batch * problem.kv_heads;
  const int64_t kv_bytes = std::max<int64_t>(4 * problem.kv_len * problem.head_dim, 1);
  const int64_t fitting = std::clamp<int64_t>(l2_bytes / 2 / kv_bytes, 1, kv_heads);
  return std::clamp<int64_t>(tiles / (kSectionRounds * sm_count), 1, CeilDiv(kv_heads, fitting));
}

template <typename C>
KernelParams MakeKernelParams(const AttentionParams& params, int sm_count, int l2_bytes) {
  KernelParams p = {};
  p.q = params.q;
  p.k = params.k;
  p.v = params.v;
  p.positions = params.positions;
  p.layer = params.layer;
  p.out = params.out;
  p.lse = params.lse;
  p.q_len = static_cast<int32_t>(params.q_len);
  p.kv_len = static_cast<int32_t>(params.kv_len);
  p.q_heads = static_cast<int32_t>(params.q_heads);
  p.kv_heads = static_cast<int32_t>(params.kv_heads);
  p.head_dim = static_cast<int32_t>(params.head_dim);
  p.layers = static_cast<int32_t>(params.layers);
  p.layer_batch = static_cast<int32_t>(params.layer_batch);
  // Heads as query tiles are counted by: a split tile has all query heads of a KV head.
  const int64_t group = params.q_heads_per_kv_head();
  const int64_t heads = params.batch * (C::kPacksHeads ? params.kv_heads : params.q_heads);
  if constexpr (C::kPacksHeads) p.box_tokens = Divisor(BoxTokens(params));
  const int64_t tile_tokens = C::kPacksHeads ? C::kConsumers * BoxTokens(params) : C::kTileQ;
  p.q_tiles = CeilDiv(params.q_len, tile_tokens);
  p.tiles = static_cast<int32_t>(p.q_tiles * heads);
  const int64_t kv_heads = params.batch * params.kv_heads;
  // Split tiles go head by head: neighbouring clusters then read the same slots at the same time.
  const int64_t sections =
      C::kPacksHeads ? kv_heads : CountSections(params, p.tiles, sm_count, l2_bytes);
  const int64_t section_kv_heads = CeilDiv(kv_heads, sections);
  const int32_t section_heads =
      static_cast<int32_t>(section_kv_heads * (C::kPacksHeads ? 1 : group));
  p.sections = CeilDiv(heads, section_heads);
  p.section_tiles = Divisor(section_heads * p.q_tiles);
  p.section_heads = Divisor(section_heads);
  p.last_section_heads = Divisor(static_cast<int32_t>(heads - (p.sections - 1) * section_heads));
  p.heads_of_sequence = Divisor(C::kPacksHeads ? p.kv_heads : p.q_heads);
  p.group = Divisor(static_cast<int32_t>(group));
  // A float32 q takes the scale before it is rounded, unless that could overflow a float16.
  const bool scale_q = C::kFloatQuery && params.scale <= 1.0f;
  p.query_factor = scale_q ? params.scale : 1.0f;
  const float score_scale = scale_q ? 1.0f : params.scale;
  p.score_factor = score_scale * static_cast<float>(M_LOG2E);
  p.starts = params.starts;
  p.starts_by_row = params.starts_by_row;
  p.window = params.sliding_window;
  p.sinks = params.sinks;
  p.sinks_by_sequence = params.sinks_by_sequence;
  if constexpr (C::kHasCap) {
    p.cap_inner = score_scale / params.logits_soft_cap;
    p.cap_outer = params.logits_soft_cap * static_cast<float>(M_LOG2E);
    p.score_factor = 1.0f;
  }
  return p;
}

// Shared memory of an SM, of which each block takes 1 KB more than it asks for.
constexpr size_t kSharedBytesOfSm = 233472;

template <typename C>
cudaError_t Launch(const AttentionParams& params, cudaStream_t stream) {
  static_assert((sizeof(SharedStorage<C>) + 1024) * C::kBlocksPerSm <= kSharedBytesOfSm,
                "the blocks that an SM is meant to hold do not fit");
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = AllowSharedMemory<C>(device);
  if (error != cudaSuccess) return error;
  int sm_count = 0;
  error = cudaDeviceGetAttribute(&sm_count, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  int l2_bytes = 0;
  error = cudaDeviceGetAttribute(&l2_bytes, cudaDevAttrL2CacheSize, device);
  if (error != cudaSuccess) return error;
  TensorMaps maps = {};
  error = MakeTensorMaps<C>(params, &maps);
  if (error != cudaSuccess) return error;
  const KernelParams kernel_params = MakeKernelParams<C>(params, sm_count, l2_bytes);
  if constexpr (C::kSharesSlots) {
    int blocks = 1;
    error = ChooseClusterBlocks<C>(params, kernel_params.tiles, device, sm_count, &blocks);
    if (error != cudaSuccess) return error;
    return LaunchClusters<C>(blocks, maps, kernel_params, stream);
  }
  const int grid = std::min(kernel_params.tiles, sm_count * C::kBlocksPerSm);
  PrefillKernel<C><<<grid, C::kThreads, sizeof(SharedStorage<C>), stream>>>(maps, kernel_params);
  return cudaGetLastError();
}

// The build for the call's dtypes.
template <int kHeadDim, typename Tuning>
cudaError_t LaunchDTypes(const AttentionParams& params, cudaStream_t stream) {
  const bool half = params.kv_dtype == DType::kFloat16;
  if (params.q_dtype == DType::kFloat32) {
    return half ? Launch<Config<__half, float, kHeadDim, Tuning>>(params, stream)
                : Launch<Config<__nv_bfloat16, float, kHeadDim, Tuning>>(params, stream);
  }
  return half ? Launch<Config<__half, __half, kHeadDim, Tuning>>(params, stream)
              : Launch<Config<__nv_bfloat16, __nv_bfloat16, kHeadDim, Tuning>>(params, stream);
}

}  // namespace jax_fa::cuda::hopper

#endif  // JAX_FA_CUDA_HOPPER_LAUNCH_CUH_
