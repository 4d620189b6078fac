// The soft cap of scores, cap * tanh(s / cap), in the units of logarithms to base 2 that the
// softmax takes. Up to |s| = cap by a polynomial on the FMA units, beyond it by 2^x and a
// reciprocal, chosen element by element, so that no row's bits depend on its neighbours.
// tanh.approx alone would be 2^-11 off, relatively: 0.02 in a logit at cap 50.

#ifndef JAX_FA_CUDA_HOPPER_CAP_CUH_
#define JAX_FA_CUDA_HOPPER_CAP_CUH_

#include "cuda/hopper/config.cuh"
#include "cuda/ptx/warp.cuh"

namespace jax_fa::cuda::hopper {

// tanh(x) / x as a polynomial in x^2 for |x| <= 1, by least squares reweighted towards the smallest
// largest error: |x P(x^2) - tanh(x)| <= 2.8e-6.
__device__ __forceinline__ float TanhOverX(float x) {
  const float square = __fmul_rn(x, x);
  float p = __fmaf_rn(0.00836590203f, square, -0.0432999033f);
  p = __fmaf_rn(p, square, 0.129220704f);
  p = __fmaf_rn(p, square, -0.332658244f);
  return __fmaf_rn(p, square, 0.999968471f);
}

// 1 - 2 / (1 + e^(2|x|)), with the sign of x; absolute error below 2^-20.
__device__ __forceinline__ float TanhBeyond1(float x) {
  constexpr float kTwoLog2E = 2.88539008f;
  const float power = ptx::exp2_approx(__fmul_rn(fabsf(x), kTwoLog2E));
  return copysignf(__fmaf_rn(-2.0f, ptx::rcp_approx(__fadd_rn(1.0f, power)), 1.0f), x);
}

__device__ __forceinline__ float CapNear(float score, const KernelParams& params) {
  const float x = __fmul_rn(score, params.cap_inner);
  return __fmul_rn(__fmul_rn(x, params.cap_outer), TanhOverX(x));
}

__device__ __forceinline__ float CapFar(float score, const KernelParams& params) {
  return __fmul_rn(params.cap_outer, TanhBeyond1(__fmul_rn(score, params.cap_inner)));
}

__device__ __forceinline__ bool IsFar(float score, const KernelParams& params) {
  return fabsf(__fmul_rn(score, params.cap_inner)) > 1.0f;
}

// One score, with the bits that CapScores gives it.
__device__ __forceinline__ float CapScore(float score, const KernelParams& params) {
  return IsFar(score, params) ? CapFar(score, params) : CapNear(score, params);
}

template <int kCount>
__device__ __forceinline__ void CapScores(float (&scores)[kCount], const KernelParams& params) {
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < kCount; ++i) largest = fmaxf(largest, fabsf(scores[i]));
  // Seldom true: a cap is meant for outliers.
  if (__any_sync(~0u, IsFar(largest, params))) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) scores[i] = CapScore(scores[i], params);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) scores[i] = CapNear(scores[i], params);
  }
}

}  // namespace jax_fa::cuda::hopper

#endif  // JAX_FA_CUDA_HOPPER_CAP_CUH_
