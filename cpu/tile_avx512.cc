// The tile kernel for AVX-512 (F, BW, DQ, VL).
// CMakeLists.txt gives this file its own compiler flags.

#define JAX_FA_SIMD_AVX512

#include "cpu/query_tile.h"
#include "cpu/tile_kernel.h"

namespace jax_fa::cpu {

extern const TileKernel kAvx512Kernel;
const TileKernel kAvx512Kernel = {"avx512", kGroupRows, ScratchBytes, RunTile};

}  // namespace jax_fa::cpu
