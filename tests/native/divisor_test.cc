// Divisor against the division it stands for, at the quotients' edges and at random.

#include "cuda/hopper/divisor.h"

#include <cstdint>
#include <cstdio>
#include <random>

namespace {

using jax_fa::cuda::hopper::Divisor;

constexpr int32_t kLargest = INT32_MAX;

bool Right(int32_t n, int32_t divisor) {
  const int32_t quotient = Divisor(divisor).Quotient(n);
  if (quotient == n / divisor) return true;
  std::printf("%d / %d: got %d\n", n, divisor, quotient);
  return false;
}

}  // namespace

int main() {
  std::mt19937 random(0);
  std::uniform_int_distribution<int32_t> any(0, kLargest);
  bool right = true;
  auto check = [&](int32_t divisor) {
    const int32_t last = kLargest / divisor * divisor;
    for (const int32_t n : {0, divisor - 1, divisor, last - 1, last, kLargest, any(random)}) {
      right &= Right(n, divisor);
    }
  };
  for (int32_t divisor = 1; divisor < 5000; ++divisor) check(divisor);
  for (int bit = 1; bit < 31; ++bit) {
    for (int32_t offset = -1; offset <= 1; ++offset) check((int32_t{1} << bit) + offset);
  }
  for (int i = 0; i < 100000; ++i) check(any(random) / 2 + 1);
  check(kLargest);
  std::puts(right ? "ok" : "FAILED");
  return right ? 0 : 1;
}
