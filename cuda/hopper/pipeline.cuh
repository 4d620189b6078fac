// What the roles of the Hopper kernel share: the position in the KV ring, the named barriers, and
// the turns of the consumers on the tensor cores.

#ifndef JAX_FA_CUDA_HOPPER_PIPELINE_CUH_
#define JAX_FA_CUDA_HOPPER_PIPELINE_CUH_

#include <cstdint>

#include "cuda/hopper/config.cuh"
#include "cuda/ptx/warp.cuh"

namespace jax_fa::cuda::hopper {

// Address of `pointer`'s target in the block's shared memory.
__device__ __forceinline__ uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// A place in a ring of kCount stages and the parity of its current use.
template <int kCount>
struct RingPlace {
  uint32_t stage = 0;
  uint32_t parity = 0;

  __device__ void Advance() {
    if (++stage == kCount) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Named barriers; 0 is __syncthreads.
enum NamedBarrier : int {
  kTurnBarrier = 1,
  kWarpgroupBarrier = 5,
  kInspectorBarrier = 9,
  kConsumersBarrier = 10
};

// The turns of two or more consumers: a warpgroup issues the products of a step only after the one
// before it has issued its own, so that the softmax of one runs under the products of another.
// Wait() and Pass() alternate in each warpgroup, and all make the same number of turns.
template <int kConsumers>
class Turns {
 public:
  // The last warpgroup hands the first turn to warpgroup 0.
  __device__ explicit Turns(int consumer) : consumer_(consumer) {
    if (kConsumers > 1 && consumer == kConsumers - 1) Pass();
  }
  // Read: the barrier that warpgroup consumer_ - 1 arrives at.
  __device__ void Wait() const {
    if constexpr (kConsumers > 1) ptx::barrier_sync(kTurnBarrier + consumer_, 2 * kWarpgroup);
  }
  __device__ void Pass() const {
    if constexpr (kConsumers > 1) {
      const int next = consumer_ == kConsumers - 1 ? 0 : consumer_ + 1;
      ptx::barrier_arrive(kTurnBarrier + next, 2 * kWarpgroup);
    }
  }
  // Takes the last turn, which nobody uses, so that no barrier is left half full.
  __device__ void Finish() const {
    if (consumer_ == 0) Wait();
  }

 private:
  int consumer_;
};

}  // namespace jax_fa::cuda::hopper

#endif  // JAX_FA_CUDA_HOPPER_PIPELINE_CUH_
