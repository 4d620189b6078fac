// The tile kernel for NEON, which every AArch64 processor has.
// CMakeLists.txt gives this file its own compiler flags.

#define JAX_FA_SIMD_NEON

#include "cpu/query_tile.h"
#include "cpu/tile_kernel.h"

namespace jax_fa::cpu {

extern const TileKernel kNeonKernel;
const TileKernel kNeonKernel = {"neon", kGroupRows, ScratchBytes, RunTile};

}  // namespace jax_fa::cpu
