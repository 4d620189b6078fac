// Runs one kernel many times on one set of inputs and compares all outputs with those of the first
// run on the device, so that hundreds of runs cost no copies.

#ifndef JAX_FA_TESTS_HARNESS_DEVICE_RUNS_H_
#define JAX_FA_TESTS_HARNESS_DEVICE_RUNS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "cuda/kernels.h"
#include "tests/harness/cases.h"
#include "tests/harness/inputs.h"

namespace jax_fa::harness {

struct RunsResult {
  // The kernel does not take arrays that lie as this case's do, and said so without running.
  bool refused_alignment = false;
  std::string error;       // of CUDA; empty when all runs were made
  HostArray out;           // of the first run
  std::vector<float> lse;  // of the first run; empty without lse
  int64_t runs = 0;
  int64_t differing_runs = 0;
  int64_t first_differing_element = -1;  // of out, or out's size + index into lse
  double best_ms = 0.0;
  double median_ms = 0.0;
};

RunsResult RunRepeatedly(const cuda::Kernel& kernel, const Case& c, const Inputs& inputs,
                         int64_t runs);

}  // namespace jax_fa::harness

#endif  // JAX_FA_TESTS_HARNESS_DEVICE_RUNS_H_
