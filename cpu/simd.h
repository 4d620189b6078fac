// One vector register and what the kernel does with it, for the instruction set that the including
// file was compiled for: JAX_FA_SIMD_AVX512, JAX_FA_SIMD_AVX2, JAX_FA_SIMD_NEON or none of them.
// GCC (12 and up) and Clang vector types carry the arithmetic; only what they cannot say is spelt
// in intrinsics. Compile with -ffp-contract=off: Fma() alone fuses, so every row gets the same
// bits.

#ifndef JAX_FA_CPU_SIMD_H_
#define JAX_FA_CPU_SIMD_H_

#include <stdint.h>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace jax_fa::cpu {
namespace {

#if defined(JAX_FA_SIMD_AVX512)
constexpr int kLanes = 16;
constexpr int kGroupRows = 12;  // 12 x 2 accumulators of the 32 registers
#elif defined(JAX_FA_SIMD_AVX2)
constexpr int kLanes = 8;
constexpr int kGroupRows = 6;  // 6 x 2 accumulators of the 16 registers
#elif defined(JAX_FA_SIMD_NEON)
constexpr int kLanes = 4;
constexpr int kGroupRows = 12;
#else
constexpr int kLanes = 4;
constexpr int kGroupRows = 6;
#endif

using Vec = float __attribute__((vector_size(kLanes * 4)));
using IntVec = int32_t __attribute__((vector_size(kLanes * 4)));
using UintVec = uint32_t __attribute__((vector_size(kLanes * 4)));
using HalfVec = uint16_t __attribute__((vector_size(kLanes * 2)));

// Copies sizeof(To) bytes: bit casts, and loads and stores of any alignment.
template <class To>
inline To LoadAs(const void* from) {
  To value;
  __builtin_memcpy(&value, from, sizeof(To));
  return value;
}
template <class To, class From>
inline To BitCast(From from) {
  static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
  return LoadAs<To>(&from);
}
inline Vec Load(const float* from) { return LoadAs<Vec>(from); }
inline void Store(Vec value, float* to) { __builtin_memcpy(to, &value, sizeof(value)); }

// Max(a, b) is b when either is NaN, except on NEON, where it is NaN then.
#if defined(JAX_FA_SIMD_AVX512)
inline Vec Splat(float x) { return _mm512_set1_ps(x); }
inline Vec Fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec Max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
#elif defined(JAX_FA_SIMD_AVX2)
inline Vec Splat(float x) { return _mm256_set1_ps(x); }
inline Vec Fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec Max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
#elif defined(JAX_FA_SIMD_NEON)
inline Vec Splat(float x) { return Vec{x, x, x, x}; }
inline Vec Fma(Vec a, Vec b, Vec c) {
  return (Vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
inline Vec Max(Vec a, Vec b) { return (Vec)vmaxq_f32((float32x4_t)a, (float32x4_t)b); }
#else
inline Vec Splat(float x) { return Vec{x, x, x, x}; }
inline Vec Fma(Vec a, Vec b, Vec c) { return a * b + c; }
inline Vec Max(Vec a, Vec b) { return a > b ? a : b; }
#endif

// Lanes >= count become `other`.
inline Vec KeepFirst(Vec value, int64_t count, Vec other) {
  constexpr int32_t kIndex[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return LoadAs<IntVec>(kIndex) < static_cast<int32_t>(count) ? value : other;
}

// Halves a vector until one lane is left: the same tree whatever the values.
template <class Combine>
inline float Reduce(Vec value, Combine combine) {
  float lanes[kLanes];
  Store(value, lanes);
#pragma GCC unroll 8
  for (int half = kLanes / 2; half > 0; half /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < half; ++i) lanes[i] = combine(lanes[i], lanes[i + half]);
  }
  return lanes[0];
}
inline float ReduceMax(Vec value) {
  return Reduce(value, [](float a, float b) { return a > b ? a : b; });
}
inline float ReduceSum(Vec value) {
  return Reduce(value, [](float a, float b) { return a + b; });
}

// The perfect shuffle of a and b: lo takes a[0] b[0] a[1] b[1] .., hi goes on from the middle.
inline void Interleave(Vec a, Vec b, Vec* lo, Vec* hi) {
#if defined(JAX_FA_SIMD_AVX512)
  *lo = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  *hi = __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#elif defined(JAX_FA_SIMD_AVX2)
  *lo = __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
  *hi = __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#else
  *lo = __builtin_shufflevector(a, b, 0, 4, 1, 5);
  *hi = __builtin_shufflevector(a, b, 2, 6, 3, 7);
#endif
}

// log2(kLanes) perfect shuffles of the rows transpose the square they form.
inline void Transpose(Vec (&square)[kLanes]) {
#pragma GCC unroll 4
  for (int done = 1; done < kLanes; done *= 2) {
    Vec shuffled[kLanes];
#pragma GCC unroll 8
    for (int i = 0; i < kLanes / 2; ++i) {
      Interleave(square[i], square[i + kLanes / 2], &shuffled[2 * i], &shuffled[2 * i + 1]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) square[i] = shuffled[i];
  }
}

// 2^x for x <= 0: the nearest integer n goes to the exponent, x - n in [-1/2, 1/2] to a minimax
// polynomial of relative error 9.4e-8 that is 1 at 0. From x = -126.5 down it is 0; NaN stays NaN.
inline Vec Exp2(Vec x) {
  x = Max(Splat(-127.0f), x);
  // 1.5 * 2^23 moves n to the low bits; the 127 is the exponent's bias.
  constexpr float kRound = 12582912.0f + 127.0f;
  const Vec shifted = x + Splat(kRound);
  const Vec f = x - (shifted - Splat(kRound));
  Vec p = Splat(0x1.5bda54p-10f);
  p = Fma(p, f, Splat(0x1.3ce8acp-7f));
  p = Fma(p, f, Splat(0x1.c6b6d8p-5f));
  p = Fma(p, f, Splat(0x1.ebf9c2p-3f));
  p = Fma(p, f, Splat(0x1.62e42ap-1f));
  p = Fma(p, f, Splat(1.0f));
  // A product, not a sum of bit patterns, so that NaN stays NaN.
  return p * BitCast<Vec>(BitCast<UintVec>(shifted) << 23);
}

// Of absolute error 3e-7, and of relative error 3e-7 too: near 0, where 1 - e would lose its
// digits, an odd polynomial, minimax on |x| <= 5/8. tanh(+-inf) is +-1; NaN stays NaN.
inline Vec Tanh(Vec x) {
  const UintVec sign = BitCast<UintVec>(x) & 0x80000000u;
  const Vec magnitude = BitCast<Vec>(BitCast<UintVec>(x) ^ sign);
  const Vec square = x * x;
  Vec p = Splat(-0x1.75d1f4p-8f);
  p = Fma(p, square, Splat(0x1.522178p-6f));
  p = Fma(p, square, Splat(-0x1.b83b2ep-5f));
  p = Fma(p, square, Splat(0x1.110718p-3f));
  p = Fma(p, square, Splat(-0x1.555532p-2f));
  const Vec small = Fma(p * square, x, x);
  const Vec e = Exp2(magnitude * Splat(-0x1.715476p+1f));  // exp(-2 |x|)
  const Vec large = (Splat(1.0f) - e) / (Splat(1.0f) + e);
  return magnitude < Splat(0.625f) ? small : BitCast<Vec>(BitCast<UintVec>(large) | sign);
}

// While it lives, this thread computes in the default floating-point mode: round to nearest, with
// denormals. Thread pools flush denormals on some threads, and the bits must not depend on which.
class DefaultFloatMode {
 public:
#if defined(__x86_64__) || defined(__SSE__)
  DefaultFloatMode() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~DefaultFloatMode() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  DefaultFloatMode() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" ::"r"(uint64_t{0}));
  }
  ~DefaultFloatMode() { asm volatile("msr fpcr, %0" ::"r"(saved_)); }

 private:
  uint64_t saved_;
#else
  DefaultFloatMode() {}
  ~DefaultFloatMode() {}
#endif
};

}  // namespace
}  // namespace jax_fa::cpu

#endif  // JAX_FA_CPU_SIMD_H_
