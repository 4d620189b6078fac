// Conversions between float32 and the element types of q, K, V and out, one name for all of them,
// so that a kernel is written once for every dtype. Device code only.

#ifndef JAX_FA_CUDA_TILE_CONVERT_H_
#define JAX_FA_CUDA_TILE_CONVERT_H_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace jax_fa::cuda {

__device__ __forceinline__ float ToFloat(float x) { return x; }
__device__ __forceinline__ float ToFloat(__half x) { return __half2float(x); }
__device__ __forceinline__ float ToFloat(__nv_bfloat16 x) { return __bfloat162float(x); }

// Rounds to nearest, ties to even.
template <typename T>
__device__ __forceinline__ T FromFloat(float x);
template <>
__device__ __forceinline__ float FromFloat<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __half FromFloat<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 FromFloat<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// Two 16-bit values in one register, the first in the low half as they lie in memory.
template <typename T>
__device__ __forceinline__ uint32_t Pack2(float first, float second);
template <>
__device__ __forceinline__ uint32_t Pack2<__half>(float first, float second) {
  const __half2 pair = __floats2half2_rn(first, second);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
template <>
__device__ __forceinline__ uint32_t Pack2<__nv_bfloat16>(float first, float second) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

template <typename T>
__device__ __forceinline__ float2 Unpack2(uint32_t pair);
template <>
__device__ __forceinline__ float2 Unpack2<__half>(uint32_t pair) {
  return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}
template <>
__device__ __forceinline__ float2 Unpack2<__nv_bfloat16>(uint32_t pair) {
  return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&pair));
}

}  // namespace jax_fa::cuda

#endif  // JAX_FA_CUDA_TILE_CONVERT_H_
