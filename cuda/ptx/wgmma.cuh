// The wgmma instructions that attention needs, one function per form: both operands in shared
// memory (scores = Q.K^T) and A in registers (O += P.V), f16 or bf16 inputs, f32 accumulators. PTX
// ISA, "Asynchronous Warpgroup Level Matrix Instructions". CCCL's cuda::ptx does not cover them.

#ifndef JAX_FA_CUDA_PTX_WGMMA_CUH_
#define JAX_FA_CUDA_PTX_WGMMA_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace jax_fa::cuda::ptx {

// Orders register and shared-memory accesses of the warpgroup before the wgmma that follow. Needed
// before the first wgmma and whenever an accumulator or an A register was written since the last.
// PTX ISA, "wgmma.fence".
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// Closes the batch of wgmma issued since the last commit. PTX ISA, "wgmma.commit_group".
__device__ __forceinline__ void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most kPending of the newest batches are unfinished. PTX ISA, "wgmma.wait_group".
template <int kPending>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Tells the compiler, not the hardware, that `r` may have changed here: a wgmma writes its
// accumulators until its wait, so no use of them may move above it.
template <typename T, int kCount>
__device__ __forceinline__ void pin_registers(T (&r)[kCount]) {
  static_assert(sizeof(T) == 4, "one 32-bit register each");
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if constexpr (std::is_same_v<T, float>) {
      asm volatile("" : "+f"(r[i])::"memory");
    } else {
      asm volatile("" : "+r"(r[i])::"memory");
    }
  }
}

// Register lists of the accumulator: an m64nNk16 product leaves N / 2 floats in each thread.

#define JAX_FA_R32                                                         \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define JAX_FA_R40 JAX_FA_R32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define JAX_FA_R64                                                                     \
  JAX_FA_R32                                                                           \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define JAX_FA_R128                                                                            \
  JAX_FA_R64                                                                                   \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "         \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "           \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, "     \
  "%111, "                                                                                     \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, " \
  "%127"
#define JAX_FA_D8(i)                                                                          \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define JAX_FA_D32(i) JAX_FA_D8(i), JAX_FA_D8(i + 8), JAX_FA_D8(i + 16), JAX_FA_D8(i + 24)
#define JAX_FA_O32 JAX_FA_D32(0)
#define JAX_FA_O40 JAX_FA_D32(0), JAX_FA_D8(32)
#define JAX_FA_O64 JAX_FA_D32(0), JAX_FA_D32(32)
#define JAX_FA_O128 JAX_FA_D32(0), JAX_FA_D32(32), JAX_FA_D32(64), JAX_FA_D32(96)

// `n` columns, `regs` = n / 2, and the operand numbers that follow the accumulator's.
#define JAX_FA_WGMMA_SS(n, type, regs, i0, i1, i2)                                                 \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #i2                                            \
               ", 0;\n"                                                                            \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" JAX_FA_R##regs \
               "}, %" #i0 ", %" #i1 ", p, 1, 1, 0, 0;\n}"                                          \
               : JAX_FA_O##regs                                                                    \
               : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)))
#define JAX_FA_WGMMA_RS(n, type, regs, i0, i1, i2, i3, i4)                                         \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" JAX_FA_R##regs \
               "}, {%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 "}, %" #i4 ", 1, 1, 1, 1;"                \
               : JAX_FA_O##regs                                                                    \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define JAX_FA_WGMMA_TYPED(form, n, ...)            \
  if constexpr (std::is_same_v<T, __nv_bfloat16>) { \
    form(n, "bf16", __VA_ARGS__);                   \
  } else {                                          \
    form(n, "f16", __VA_ARGS__);                    \
  }

// d = a . b^T (+ d when `accumulate`): a is 64 x 16 and b kColumns x 16, both K-major in shared
// memory, given by their descriptors. PTX ISA, "wgmma.mma_async", form with descriptors.
template <typename T, int kRegisters>
__device__ __forceinline__ void wgmma_ss(float (&d)[kRegisters], uint64_t a, uint64_t b,
                                         bool accumulate) {
  if constexpr (kRegisters == 32) {
    JAX_FA_WGMMA_TYPED(JAX_FA_WGMMA_SS, 64, 32, 32, 33, 34)
  } else if constexpr (kRegisters == 40) {
    JAX_FA_WGMMA_TYPED(JAX_FA_WGMMA_SS, 80, 40, 40, 41, 42)
  } else if constexpr (kRegisters == 64) {
    JAX_FA_WGMMA_TYPED(JAX_FA_WGMMA_SS, 128, 64, 64, 65, 66)
  } else {
    static_assert(kRegisters < 0, "no wgmma_ss of this width is written");
  }
}

// d += a . b: a is 64 x 16 in registers (the accumulator's own row layout, packed in pairs), b is
// 16 x kColumns, stored with its columns contiguous (MN-major), in shared memory.
// PTX ISA, "wgmma.mma_async", form with A in registers and a transposed B.
template <typename T, int kRegisters>
__device__ __forceinline__ void wgmma_rs_transposed_b(float (&d)[kRegisters], const uint32_t* a,
                                                      uint64_t b) {
  if constexpr (kRegisters == 32) {
    JAX_FA_WGMMA_TYPED(JAX_FA_WGMMA_RS, 64, 32, 32, 33, 34, 35, 36)
  } else if constexpr (kRegisters == 64) {
    JAX_FA_WGMMA_TYPED(JAX_FA_WGMMA_RS, 128, 64, 64, 65, 66, 67, 68)
  } else if constexpr (kRegisters == 128) {
    JAX_FA_WGMMA_TYPED(JAX_FA_WGMMA_RS, 256, 128, 128, 129, 130, 131, 132)
  } else {
    static_assert(kRegisters < 0, "no wgmma_rs_transposed_b of this width is written");
  }
}

#undef JAX_FA_WGMMA_TYPED
#undef JAX_FA_WGMMA_RS
#undef JAX_FA_WGMMA_SS
#undef JAX_FA_O128
#undef JAX_FA_O64
#undef JAX_FA_O40
#undef JAX_FA_O32
#undef JAX_FA_D32
#undef JAX_FA_D8
#undef JAX_FA_R128
#undef JAX_FA_R64
#undef JAX_FA_R40
#undef JAX_FA_R32

}  // namespace jax_fa::cuda::ptx

#endif  // JAX_FA_CUDA_PTX_WGMMA_CUH_
