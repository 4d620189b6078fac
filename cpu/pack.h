// From the caller's arrays to the float32 layouts the micro-kernels read.

#ifndef JAX_FA_CPU_PACK_H_
#define JAX_FA_CPU_PACK_H_

#include "cpu/elements.h"
#include "cpu/matmul.h"

namespace jax_fa::cpu {
namespace {

inline int64_t Min(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t Max(int64_t a, int64_t b) { return a < b ? b : a; }
inline int64_t RoundUp(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

// One row of q to a column of its group: packed[d * kGroupRows], d < head_dim.
template <class Type>
void PackQueryRow(const void* q, int64_t index, int64_t head_dim, float* packed) {
  const auto* row = static_cast<const typename Type::Stored*>(q) + index * head_dim;
  for (int64_t d = 0; d < head_dim; d += kLanes) {
    const int64_t count = Min(kLanes, head_dim - d);
    float lanes[kLanes];
    Store(count == kLanes ? Type::Read(row + d) : ReadFirst<Type>(row + d, count), lanes);
    for (int64_t i = 0; i < count; ++i) packed[(d + i) * kGroupRows] = lanes[i];
  }
}

// K^T of `slots` slots: packed[panel][d][kPanel], a panel being kPanel consecutive slots. Lanes
// past the last slot, up to the next multiple of kLanes, are 0.
template <class Type>
void PackKeys(const uint16_t* k, int64_t slot_step, int64_t slots, int64_t head_dim,
              float* packed) {
  for (int64_t slot = 0; slot < slots; slot += kLanes) {
    float* panel = packed + slot / kPanel * kPanel * head_dim + slot % kPanel;
    const int64_t square_slots = Min(kLanes, slots - slot);
    for (int64_t d = 0; d < head_dim; d += kLanes) {
      const int64_t count = Min(kLanes, head_dim - d);
      const uint16_t* corner = k + slot * slot_step + d;
      Vec square[kLanes];
      if (count == kLanes && square_slots == kLanes) {
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) square[i] = Type::Read(corner + i * slot_step);
      } else {
        for (int i = 0; i < kLanes; ++i) {
          square[i] = i < square_slots ? ReadFirst<Type>(corner + i * slot_step, count) : Vec{};
        }
      }
      Transpose(square);
      if (count == kLanes) {
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) Store(square[i], panel + (d + i) * kPanel);
      } else {
        for (int64_t i = 0; i < count; ++i) Store(square[i], panel + (d + i) * kPanel);
      }
    }
  }
}

// V of `slots` slots: packed[panel][slot][kPanel], a panel being kPanel columns of V and panels
// being panel_step floats apart. Columns past head_dim, up to the next multiple of kLanes, are 0.
template <class Type>
void PackValues(const uint16_t* v, int64_t slot_step, int64_t slots, int64_t head_dim,
                int64_t panel_step, float* packed) {
  for (int64_t slot = 0; slot < slots; ++slot) {
    const uint16_t* row = v + slot * slot_step;
    float* to = packed + slot * kPanel;
    for (int64_t d = 0; d < head_dim; d += kLanes) {
      const int64_t count = Min(kLanes, head_dim - d);
      const Vec value = count == kLanes ? Type::Read(row + d) : ReadFirst<Type>(row + d, count);
      Store(value, to + d / kPanel * panel_step + d % kPanel);
    }
  }
}

}  // namespace
}  // namespace jax_fa::cpu

#endif  // JAX_FA_CPU_PACK_H_
