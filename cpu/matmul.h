// The register-blocked product both matrix products of attention are made of.

#ifndef JAX_FA_CPU_MATMUL_H_
#define JAX_FA_CPU_MATMUL_H_

#include "cpu/simd.h"

namespace jax_fa::cpu {
namespace {

constexpr int kPanelVecs = 2;
constexpr int kPanel = kPanelVecs * kLanes;  // columns that one micro-kernel call serves

// c[r][n] = c_scale[r] * c[r][n] + sum over i of a(r, i) * b[i][n], one column panel wide.
// Each element is a chain of fused multiply-adds in the order of i, so its bits do not depend on
// how rows and columns were cut into calls.
struct Product {
  const float* a;
  const float* b;  // row i starts at i * b_step
  int64_t b_step;
  int64_t depth;         // extent of i
  const float* c_scale;  // [rows]; null: c is not read, the sum starts at 0
  float* c;              // row r starts at r * c_step
  int64_t c_step;
};

// a(r, i) is a[r * kRowStep + i * kDepthStep]: constants, so that one register addresses all rows.
template <int kRows, int kVecs, int kRowStep, int kDepthStep>
__attribute__((noinline)) void MultiplyBlock(const Product& product) {
  Vec sum[kRows][kVecs];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int n = 0; n < kVecs; ++n) {
      sum[r][n] =
          product.c_scale == nullptr
              ? Vec{}
              : Splat(product.c_scale[r]) * Load(product.c + r * product.c_step + n * kLanes);
    }
  }
  const float* a = product.a;
  const float* b = product.b;
  const int64_t b_step = product.b_step;
  for (int64_t i = product.depth; i > 0; --i) {
    Vec b_row[kVecs];
#pragma GCC unroll 2
    for (int n = 0; n < kVecs; ++n) b_row[n] = Load(b + n * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Vec a_element = Splat(a[r * kRowStep]);
#pragma GCC unroll 2
      for (int n = 0; n < kVecs; ++n) sum[r][n] = Fma(a_element, b_row[n], sum[r][n]);
    }
    a += kDepthStep;
    b += b_step;
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int n = 0; n < kVecs; ++n) {
      Store(sum[r][n], product.c + r * product.c_step + n * kLanes);
    }
  }
}

// `rows` in [1, kRows] and `vecs` in [1, kPanelVecs] pick the micro-kernel.
template <int kRowStep, int kDepthStep, int kRows = kGroupRows>
inline void Multiply(const Product& product, int64_t rows, int64_t vecs) {
  if (rows == kRows) {
    if (vecs == kPanelVecs) {
      MultiplyBlock<kRows, kPanelVecs, kRowStep, kDepthStep>(product);
    } else {
      MultiplyBlock<kRows, 1, kRowStep, kDepthStep>(product);
    }
  } else if constexpr (kRows > 1) {
    Multiply<kRowStep, kDepthStep, kRows - 1>(product, rows, vecs);
  }
}

}  // namespace
}  // namespace jax_fa::cpu

#endif  // JAX_FA_CPU_MATMUL_H_
