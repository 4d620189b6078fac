// The tile kernel for AVX2 with FMA and F16C.
// CMakeLists.txt gives this file its own compiler flags.

#define JAX_FA_SIMD_AVX2

#include "cpu/query_tile.h"
#include "cpu/tile_kernel.h"

namespace jax_fa::cpu {

extern const TileKernel kAvx2Kernel;
const TileKernel kAvx2Kernel = {"avx2", kGroupRows, ScratchBytes, RunTile};

}  // namespace jax_fa::cpu
