// Tensor maps (TMA descriptors) of the arrays of an attention call. The driver's encoder is looked
// up through the runtime, so that nothing links libcuda.

#ifndef JAX_FA_CUDA_HOPPER_TENSOR_MAP_H_
#define JAX_FA_CUDA_HOPPER_TENSOR_MAP_H_

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace jax_fa::cuda::hopper {

enum class TensorMapType { kFloat16, kBFloat16 };

// A contiguous [sequences, rows, heads, columns] array.
struct HeadedArray {
  int64_t columns;
  int64_t rows;
  int64_t heads;
  int64_t sequences;
};

// Describes boxes of 64 columns by `box_rows` rows by `box_heads` heads of one sequence, in this
// order, swizzled by 128 bytes.
// What lies outside the array reads as zero and is not written. `base` and the strides must be
// multiples of 16 bytes.
cudaError_t EncodeTensorMap(const void* base, const HeadedArray& array, TensorMapType type,
                            int box_rows, int box_heads, CUtensorMap* map);

}  // namespace jax_fa::cuda::hopper

#endif  // JAX_FA_CUDA_HOPPER_TENSOR_MAP_H_
