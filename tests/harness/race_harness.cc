// The standalone race harness: runs kernels of the table hundreds of times on the same seeded
// inputs and demands equal bits, then compares the first run with a double-precision reference.
// It exists because races that depend on scheduling survive end-to-end comparisons. No JAX, no
// Python. Exit status: 0 all well, 1 a difference, 2 wrong usage or nothing that could run.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "cuda/kernels.h"
#include "tests/harness/cases.h"
#include "tests/harness/device_runs.h"
#include "tests/harness/inputs.h"
#include "tests/harness/reference.h"

namespace jax_fa::harness {
namespace {

// The original's gate for float16 caches on unit-normal data at the usual scale.
constexpr double kFloat16Gate = 5e-3;
// Multiply-adds of host reference a case may cost.
constexpr double kReferenceBudget = 1.5e8;

struct Options {
  std::string kernel = "all";
  std::string case_name = "all";
  int64_t runs = 300;
  uint64_t seed = 1;
  bool list = false;
};

struct Verdict {
  int64_t rows_checked = 0;
  double max_error = 0.0;
  double max_error_of_bound = 0.0;  // largest |error| / bound
  std::string failure;
};

Arithmetic ArithmeticOf(const cuda::Kernel& kernel) {
  return std::strcmp(kernel.name, "naive") == 0 ? Arithmetic::kFloat32 : Arithmetic::kMixed;
}

// All rows where the host can afford them, else the first, the last and random ones between.
std::vector<int64_t> RowsToCheck(const AttentionProblem& p, uint64_t seed) {
  const double row_cost = 3.0 * std::max<double>(p.kv_len, 1) * p.head_dim;
  const int64_t affordable =
      std::max<int64_t>(static_cast<int64_t>(kReferenceBudget / row_cost), 8);
  std::vector<int64_t> rows;
  if (p.rows() <= affordable) {
    for (int64_t row = 0; row < p.rows(); ++row) rows.push_back(row);
    return rows;
  }
  std::mt19937_64 bits(seed);
  rows = {0, p.rows() - 1};
  while (static_cast<int64_t>(rows.size()) < affordable) {
    rows.push_back(static_cast<int64_t>(bits() % static_cast<uint64_t>(p.rows())));
  }
  return rows;
}

// Compares one value; NaN is expected exactly where the reference has it, and so is -inf.
void CheckValue(double actual, double expected, double bound, const std::string& where,
                Verdict& verdict) {
  bool is_right;
  if (std::isfinite(expected)) {
    const double error = std::fabs(actual - expected);
    is_right = error <= bound;  // false for NaN
    verdict.max_error = std::max(verdict.max_error, error);
    if (bound > 0.0) {
      verdict.max_error_of_bound = std::max(verdict.max_error_of_bound, error / bound);
    }
  } else {
    is_right = std::isnan(expected) ? std::isnan(actual) : actual == expected;
  }
  if (!is_right && verdict.failure.empty()) {
    char text[256];
    std::snprintf(text, sizeof(text), "%s is %.9g, the reference %.9g, allowed error %.3g",
                  where.c_str(), actual, expected, bound);
    verdict.failure = text;
  }
}

Verdict CheckAgainstReference(const Case& c, const Inputs& inputs, const RunsResult& result,
                              Arithmetic arithmetic, uint64_t seed) {
  const AttentionProblem& p = c.problem;
  const bool has_gate =
      p.kv_dtype == DType::kFloat16 &&
      std::fabs(p.scale - 1.0f / std::sqrt(static_cast<float>(p.head_dim))) < 1e-6;
  Verdict verdict;
  Verdict lse_verdict;
  for (int64_t row : RowsToCheck(p, seed)) {
    const RowReference reference = ComputeRow(c, inputs, row, arithmetic);
    const int64_t token = row / p.q_heads;
    const std::string coordinates = "[" + std::to_string(token / p.q_len) + ", " +
                                    std::to_string(token % p.q_len) + ", " +
                                    std::to_string(row % p.q_heads);
    for (int64_t d = 0; d < p.head_dim; ++d) {
      const double bound =
          has_gate ? std::min(reference.out_bound[d], kFloat16Gate) : reference.out_bound[d];
      CheckValue(result.out.values[row * p.head_dim + d], reference.out[d], bound,
                 "out" + coordinates + ", " + std::to_string(d) + "]", verdict);
    }
    if (c.with_lse) {
      CheckValue(result.lse[row], reference.lse, reference.lse_bound, "lse" + coordinates + "]",
                 lse_verdict);
    }
    ++verdict.rows_checked;
  }
  if (verdict.failure.empty()) verdict.failure = lse_verdict.failure;
  return verdict;
}

std::string DescribeDifference(const Case& c, const RunsResult& result) {
  const int64_t out_size = c.problem.rows() * c.problem.head_dim;
  const int64_t element = result.first_differing_element;
  return std::to_string(result.differing_runs) + " of " + std::to_string(result.runs) +
         " runs differ from the first, from element " +
         (element < out_size ? std::to_string(element) + " of out"
                             : std::to_string(element - out_size) + " of lse") +
         " on";
}

enum class Outcome { kPassed, kFailed, kSkipped };

Outcome RunCase(const cuda::Kernel& kernel, const Case& c, cuda::ComputeCapability cc,
                const Options& options) {
  std::printf("%-10s %-18s ", kernel.name, c.name.c_str());
  const std::string refusal = kernel.refusal(c.problem, cc);
  if (!refusal.empty()) {
    std::printf("skipped: %s\n", refusal.c_str());
    return Outcome::kSkipped;
  }
  const Inputs inputs = MakeInputs(c, options.seed);
  const RunsResult result = RunRepeatedly(kernel, c, inputs, options.runs);
  if (result.refused_alignment) {
    std::printf("skipped: arrays %lld elements off their alignment, refused at launch\n",
                static_cast<long long>(c.misalignment));
    return Outcome::kSkipped;
  }
  if (!result.error.empty()) {
    std::printf("FAILED: %s\n", result.error.c_str());
    return Outcome::kFailed;
  }
  const Verdict verdict =
      CheckAgainstReference(c, inputs, result, ArithmeticOf(kernel), options.seed);
  const bool passed = result.differing_runs == 0 && verdict.failure.empty();
  std::printf("%-6s %5lld %9lld %8lld %10.2e %9.3f %9.4f %9.4f\n", passed ? "ok" : "FAILED",
              static_cast<long long>(result.runs), static_cast<long long>(result.differing_runs),
              static_cast<long long>(verdict.rows_checked), verdict.max_error,
              verdict.max_error_of_bound, result.best_ms, result.median_ms);
  if (result.differing_runs != 0) std::printf("    %s\n", DescribeDifference(c, result).c_str());
  if (!verdict.failure.empty()) std::printf("    %s\n", verdict.failure.c_str());
  return passed ? Outcome::kPassed : Outcome::kFailed;
}

bool IsChosen(const Case& c, const std::string& word) {
  if (word == "all") return true;
  if (word == "small") return c.is_small;
  if (word == "large") return !c.is_small;
  return word == c.name;
}

int RunAll(const Options& options) {
  cuda::ComputeCapability cc = 0;
  const cudaError_t error = cuda::CurrentComputeCapability(&cc);
  if (error != cudaSuccess) {
    std::fprintf(stderr, "no usable GPU: %s\n", cudaGetErrorString(error));
    return 2;
  }
  std::printf("compute capability %d.%d, built for %s, seed %llu\n", cc / 10, cc % 10,
              cuda::BuiltArchitectures(), static_cast<unsigned long long>(options.seed));
  std::printf("%-10s %-18s %-6s %5s %9s %8s %10s %9s %9s %9s\n", "kernel", "case", "result", "runs",
              "differing", "rows", "max error", "of bound", "best ms", "median ms");
  int counts[3] = {};
  for (const cuda::Kernel& kernel : cuda::Kernels()) {
    if (options.kernel != "all" && options.kernel != kernel.name) continue;
    for (const Case& c : AllCases()) {
      if (!IsChosen(c, options.case_name)) continue;
      ++counts[static_cast<int>(RunCase(kernel, c, cc, options))];
      std::fflush(stdout);
    }
  }
  const int passed = counts[static_cast<int>(Outcome::kPassed)];
  const int failed = counts[static_cast<int>(Outcome::kFailed)];
  std::printf("%d passed, %d failed, %d skipped\n", passed, failed,
              counts[static_cast<int>(Outcome::kSkipped)]);
  if (failed != 0) return 1;
  if (passed == 0) {
    std::fprintf(stderr, "nothing ran: no case \"%s\" for kernel \"%s\"\n",
                 options.case_name.c_str(), options.kernel.c_str());
    return 2;
  }
  return 0;
}

int PrintUsage() {
  std::fprintf(stderr,
               "race_harness [--kernel NAME|all] [--case NAME|small|large|all] [--runs N] "
               "[--seed N] [--list]\n"
               "--list prints the names of the kernels, one a line\n");
  return 2;
}

bool ParseOptions(int argc, char** argv, Options& options) {
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "--list") {
      options.list = true;
      continue;
    }
    if (i + 1 == argc) return false;
    const char* value = argv[++i];
    if (word == "--kernel") {
      options.kernel = value;
    } else if (word == "--case") {
      options.case_name = value;
    } else if (word == "--runs") {
      options.runs = std::atoll(value);
    } else if (word == "--seed") {
      options.seed = std::strtoull(value, nullptr, 10);
    } else {
      return false;
    }
  }
  return options.runs > 0;
}

int Main(int argc, char** argv) {
  Options options;
  if (!ParseOptions(argc, argv, options)) return PrintUsage();
  if (options.list) {
    for (const cuda::Kernel& kernel : cuda::Kernels()) std::printf("%s\n", kernel.name);
    return 0;
  }
  return RunAll(options);
}

}  // namespace
}  // namespace jax_fa::harness

int main(int argc, char** argv) { return jax_fa::harness::Main(argc, argv); }
