// The tile kernel for any processor: vectors of four floats, and no fused multiply-add.
// CMakeLists.txt gives this file its own compiler flags.

#include "cpu/query_tile.h"
#include "cpu/tile_kernel.h"

namespace jax_fa::cpu {

extern const TileKernel kPlainKernel;
const TileKernel kPlainKernel = {"plain", kGroupRows, ScratchBytes, RunTile};

}  // namespace jax_fa::cpu
