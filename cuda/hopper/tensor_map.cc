#include "cuda/hopper/tensor_map.h"

namespace jax_fa::cuda::hopper {
namespace {

using Encoder = decltype(&cuTensorMapEncodeTiled);

// Null where the driver has none. Function-local static: looked up once, by the first caller.
Encoder FindEncoder() {
  static const Encoder encoder = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                               12000, cudaEnableDefault, &found);
    const bool usable = error == cudaSuccess && found == cudaDriverEntryPointSuccess;
    return usable ? reinterpret_cast<Encoder>(function) : nullptr;
  }();
  return encoder;
}

}  // namespace

cudaError_t EncodeTensorMap(const void* base, const HeadedArray& array, TensorMapType type,
                            int box_rows, int box_heads, CUtensorMap* map) {
  const Encoder encode = FindEncoder();
  if (encode == nullptr) return cudaErrorNotSupported;
  constexpr cuuint64_t kElementBytes = 2;
  const cuuint64_t head_bytes = array.columns * kElementBytes;
  const cuuint64_t row_bytes = array.heads * head_bytes;
  const cuuint64_t extents[4] = {
      static_cast<cuuint64_t>(array.columns), static_cast<cuuint64_t>(array.rows),
      static_cast<cuuint64_t>(array.heads), static_cast<cuuint64_t>(array.sequences)};
  const cuuint64_t strides[3] = {row_bytes, head_bytes, array.rows * row_bytes};
  const cuuint32_t box[4] = {64, static_cast<cuuint32_t>(box_rows),
                             static_cast<cuuint32_t>(box_heads), 1};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  const CUresult result =
      encode(map,
             type == TensorMapType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                             : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
             4, const_cast<void*>(base), extents, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace jax_fa::cuda::hopper
