// Warp and warpgroup instructions without a home in CCCL's cuda::ptx: election, register budgets,
// named barriers, the waiting form of an mbarrier test, stmatrix, exp2. One instruction per
// function.

#ifndef JAX_FA_CUDA_PTX_WARP_CUH_
#define JAX_FA_CUDA_PTX_WARP_CUH_

#include <cstdint>

namespace jax_fa::cuda::ptx {

// True in one lane of the warp, whose lanes must all be here. ptxas knows that it is one, and need
// not see to it by a loop around each TMA instruction. PTX ISA, "elect.sync".
__device__ __forceinline__ bool elect_sync() {
  uint32_t elected;
  asm volatile(
      "{\n"
      ".reg .pred elected;\n"
      "elect.sync _|elected, 0xffffffff;\n"
      "selp.b32 %0, 1, 0, elected;\n"
      "}"
      : "=r"(elected)
      :
      : "memory");
  return elected != 0;
}

// Raises the registers of each thread of this warpgroup to kCount, waiting until the block's pool
// has them. The pool is what the launch allocated: a sum over it waits for ever.
// PTX ISA, "setmaxnreg".
template <int kCount>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

// Gives registers above kCount back to the block's pool. PTX ISA, "setmaxnreg".
template <int kCount>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

// Waits at named barrier `id` until `threads` threads have arrived, this one among them. Warps that
// wait at the same time do so by the same instruction of the program, or synccheck takes them for
// divergent. PTX ISA, "barrier.cta", form .sync.aligned.
__device__ __forceinline__ void barrier_sync(int id, int threads) {
  asm volatile("barrier.cta.sync.aligned %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// barrier_sync that also tells each thread whether any of them said `condition`.
// PTX ISA, "barrier.cta", form .red.or.
__device__ __forceinline__ bool barrier_or(int id, int threads, bool condition) {
  uint32_t any;
  asm volatile(
      "{\n"
      ".reg .pred in, out;\n"
      "setp.ne.b32 in, %3, 0;\n"
      "barrier.cta.red.or.aligned.pred out, %1, %2, in;\n"
      "selp.b32 %0, 1, 0, out;\n"
      "}"
      : "=r"(any)
      : "r"(id), "r"(threads), "r"(static_cast<int>(condition))
      : "memory");
  return any != 0;
}

// Counts this warp in at named barrier `id` and goes on. PTX ISA, "barrier.cta", form .arrive.
__device__ __forceinline__ void barrier_arrive(int id, int threads) {
  asm volatile("barrier.cta.arrive.aligned %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Returns once the phase of parity `parity` of the mbarrier at `bar` is complete. The loop stays in
// one asm so that the compiler does not see a divergent branch. PTX ISA, "mbarrier.try_wait".
__device__ __forceinline__ void mbarrier_wait_parity(uint64_t* bar, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "wait:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\n"
      "bra wait;\n"
      "finished:\n"
      "}" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(bar))),
      "r"(parity)
      : "memory");
}

// Arrives once at the mbarrier at `bar` with release semantics; the state word is dropped.
// PTX ISA, "mbarrier.arrive".
__device__ __forceinline__ void mbarrier_arrive(uint64_t* bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(bar)))
               : "memory");
}

// Fetches the tensor map at `map` (a kernel parameter) ahead of the first copy that needs it.
// PTX ISA, "prefetch", form .tensormap.
__device__ __forceinline__ void prefetch_tensormap(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Stores four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix
// l / 8. PTX ISA, "stmatrix".
__device__ __forceinline__ void stmatrix_x4(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2,
                                            uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(r0), "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}

// 2^x to about 2 ulp; results below 2^-126 are 0. PTX ISA, "ex2.approx".
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x to about 1 ulp. PTX ISA, "rcp.approx".
__device__ __forceinline__ float rcp_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// log2(x), absolute error about 2^-22. PTX ISA, "lg2.approx".
__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace jax_fa::cuda::ptx

#endif  // JAX_FA_CUDA_PTX_WARP_CUH_
