// Whether this build holds code for a device, in the words that `explain` prints. Host code.

#ifndef JAX_FA_CUDA_REFUSAL_H_
#define JAX_FA_CUDA_REFUSAL_H_

#include <string>

#include "cuda/kernel.h"

namespace jax_fa::cuda {

// Why no code in this build, compiled for `oldest` or newer, runs on a device of capability `cc`;
// empty when some does. `architectures` is a list as CMake takes it:
//   "90-real"    machine code for 9.0, runs on 9.x with x >= 0
//   "90-virtual" PTX for 9.0, which the driver compiles for any newer device
//   "90"         both
//   "90a..."     machine code or PTX for exactly 9.0 ("90f" is read as narrowly)
std::string MissingCode(const char* architectures, ComputeCapability oldest, ComputeCapability cc);

}  // namespace jax_fa::cuda

#endif  // JAX_FA_CUDA_REFUSAL_H_
