// Between arrays of float32, float16 or bfloat16 and vectors of float32. Narrowing rounds to
// nearest, ties to even. Included after simd.h's instruction set is chosen.

#ifndef JAX_FA_CPU_ELEMENTS_H_
#define JAX_FA_CPU_ELEMENTS_H_

#include <stddef.h>

#include "cpu/query_tile.h"
#include "cpu/simd.h"

namespace jax_fa::cpu {
namespace {

inline UintVec Widen(HalfVec bits) { return __builtin_convertvector(bits, UintVec); }
inline HalfVec Narrow(UintVec bits) { return __builtin_convertvector(bits, HalfVec); }

#if defined(JAX_FA_SIMD_AVX512)
inline Vec FromFloat16(HalfVec x) { return _mm512_cvtph_ps(BitCast<__m256i>(x)); }
inline HalfVec ToFloat16(Vec x) {
  return BitCast<HalfVec>(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#elif defined(JAX_FA_SIMD_AVX2)
inline Vec FromFloat16(HalfVec x) { return _mm256_cvtph_ps(BitCast<__m128i>(x)); }
inline HalfVec ToFloat16(Vec x) {
  return BitCast<HalfVec>(_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#elif defined(JAX_FA_SIMD_NEON)
inline Vec FromFloat16(HalfVec x) { return BitCast<Vec>(vcvt_f32_f16(BitCast<float16x4_t>(x))); }
inline HalfVec ToFloat16(Vec x) { return BitCast<HalfVec>(vcvt_f16_f32(BitCast<float32x4_t>(x))); }
#else
inline Vec FromFloat16(HalfVec x) {
  const UintVec bits = Widen(x);
  const UintVec magnitude = (bits & 0x7fffu) << 13;
  // Read as a float32 the magnitude is 2^112 too small, also when it is denormal.
  const Vec finite = BitCast<Vec>(magnitude) * Splat(0x1p112f);
  const UintVec special = magnitude | 0x7f800000u;
  const UintVec value =
      BitCast<IntVec>(magnitude) >= 0x0f800000 ? special : BitCast<UintVec>(finite);
  return BitCast<Vec>(value | (bits & 0x8000u) << 16);
}
inline HalfVec ToFloat16(Vec x) {
  const UintVec bits = BitCast<UintVec>(x);
  const UintVec magnitude = bits & 0x7fffffffu;
  const IntVec order = BitCast<IntVec>(magnitude);  // orders as the magnitudes do
  // Rebias the exponent and round at bit 13; a carry out of the mantissa is the right next value.
  const UintVec normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // Adding 0.5 leaves the float16 denormal in the low bits, rounded by the adder.
  const UintVec denormal =
      BitCast<UintVec>(BitCast<Vec>(magnitude) + Splat(0.5f)) - BitCast<UintVec>(Splat(0.5f));
  const UintVec infinity = UintVec{} + 0x7c00u;
  const UintVec nan = UintVec{} + 0x7e00u;
  UintVec value = order < 0x38800000 ? denormal : normal;
  value = order >= 0x47800000 ? infinity : value;
  value = order > 0x7f800000 ? nan : value;
  return Narrow(value | (bits >> 16 & 0x8000u));
}
#endif

inline Vec FromBFloat16(HalfVec x) { return BitCast<Vec>(Widen(x) << 16); }
inline HalfVec ToBFloat16(Vec x) {
  const UintVec bits = BitCast<UintVec>(x);
  const UintVec rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  const UintVec nan = (bits >> 16) | 0x40u;
  return Narrow(BitCast<IntVec>(bits & 0x7fffffffu) > 0x7f800000 ? nan : rounded);
}

// Element types of arrays: storage, and the way from and to a vector.
struct Float32 {
  using Stored = float;
  static Vec Read(const float* from) { return Load(from); }
  static void Write(Vec value, float* to) { Store(value, to); }
};
struct Float16 {
  using Stored = uint16_t;
  static Vec Read(const uint16_t* from) { return FromFloat16(LoadAs<HalfVec>(from)); }
  static void Write(Vec value, uint16_t* to) {
    const HalfVec bits = ToFloat16(value);
    __builtin_memcpy(to, &bits, sizeof(bits));
  }
};
struct BFloat16 {
  using Stored = uint16_t;
  static Vec Read(const uint16_t* from) { return FromBFloat16(LoadAs<HalfVec>(from)); }
  static void Write(Vec value, uint16_t* to) {
    const HalfVec bits = ToBFloat16(value);
    __builtin_memcpy(to, &bits, sizeof(bits));
  }
};

// As Read and Write, of the first `count` < kLanes elements: nothing past them is touched, since a
// row may end where the caller's buffer does. Lanes past `count` are 0.
template <class Type>
inline Vec ReadFirst(const typename Type::Stored* from, int64_t count) {
  typename Type::Stored padded[kLanes] = {};
  __builtin_memcpy(padded, from, static_cast<size_t>(count) * sizeof(padded[0]));
  return Type::Read(padded);
}
template <class Type>
inline void WriteFirst(Vec value, int64_t count, typename Type::Stored* to) {
  typename Type::Stored padded[kLanes];
  Type::Write(value, padded);
  __builtin_memcpy(to, padded, static_cast<size_t>(count) * sizeof(padded[0]));
}

}  // namespace
}  // namespace jax_fa::cpu

#endif  // JAX_FA_CPU_ELEMENTS_H_
