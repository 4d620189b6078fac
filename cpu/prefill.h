// The CPU kernel: tiled prefill attention with an online softmax, one SIMD build per instruction
// set, chosen at run time. No XLA in here: the caller brings the threads.

#ifndef JAX_FA_CPU_PREFILL_H_
#define JAX_FA_CPU_PREFILL_H_

#include <cstdint>
#include <functional>
#include <string>

#include "attention/problem.h"

namespace jax_fa::cpu {

// Runs fn(0) .. fn(count - 1), in any order, on any threads, and returns when all are done.
using ParallelFor = std::function<void(int64_t count, const std::function<void(int64_t)>& fn)>;

// Why the CPU kernel cannot serve `problem`; empty when it can.
std::string Refusal(const AttentionProblem& problem);

// Computes params.out (and params.lse). Any extent may be zero. `num_threads` is a hint for how
// finely to cut the work; it changes no bit of the result.
void PrefillAttention(const AttentionParams& params, int num_threads,
                      const ParallelFor& parallel_for);

// The instruction set that serves this process: "avx512", "avx2", "neon" or "plain".
// JAX_FA_CPU_ISA=avx2 (say) in the environment forces one the processor has; for tests.
const char* ActiveIsa();

}  // namespace jax_fa::cpu

#endif  // JAX_FA_CPU_PREFILL_H_
