// Division by a number that the host knows, without the device's long integer division.

#ifndef JAX_FA_CUDA_HOPPER_DIVISOR_H_
#define JAX_FA_CUDA_HOPPER_DIVISOR_H_

#include <cstdint>

namespace jax_fa::cuda::hopper {

// n / value for 0 <= n < 2^31, by a multiplication. With 2^bits >= value, the multiplier
// floor(2^(31 + bits) / value) + 1 is too large by at most value / 2^(31 + bits) of itself, which
// n times cannot reach the next quotient. T. Granlund and P. Montgomery, "Division by Invariant
// Integers using Multiplication", 1994.
struct Divisor {
  int32_t value = 1;
  uint32_t multiplier = 0;
  uint32_t shift = 0;

  Divisor() = default;
  explicit Divisor(int32_t divisor) : value(divisor) {
    uint32_t bits = 0;
    while ((int64_t{1} << bits) < divisor) ++bits;
    shift = 31 + bits;
    multiplier = static_cast<uint32_t>((uint64_t{1} << shift) / static_cast<uint32_t>(divisor) + 1);
  }

#ifdef __CUDACC__
  __host__ __device__
#endif
      int32_t Quotient(int32_t n) const {
    return static_cast<int32_t>(static_cast<uint64_t>(static_cast<uint32_t>(n)) * multiplier >>
                                shift);
  }
};

}  // namespace jax_fa::cuda::hopper

#endif  // JAX_FA_CUDA_HOPPER_DIVISOR_H_
