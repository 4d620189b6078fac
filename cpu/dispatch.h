// The CPU kernels that were built and can run here, and the driver with the kernel named; the
// native tests use it to test each instruction set in one process.

#ifndef JAX_FA_CPU_DISPATCH_H_
#define JAX_FA_CPU_DISPATCH_H_

#include <vector>

#include "cpu/prefill.h"
#include "cpu/query_tile.h"

namespace jax_fa::cpu {

// Best first; the last is "plain", which is always there.
const std::vector<const TileKernel*>& AvailableKernels();

// PrefillAttention() with the kernel given.
void PrefillAttentionWith(const TileKernel& kernel, const AttentionParams& params, int num_threads,
                          const ParallelFor& parallel_for);

}  // namespace jax_fa::cpu

#endif  // JAX_FA_CPU_DISPATCH_H_
