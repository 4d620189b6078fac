// Reading the list of architectures.

#include "cuda/refusal.h"

#include <cstdlib>

namespace jax_fa::cuda {
namespace {

std::string CapabilityText(ComputeCapability cc) {
  return std::to_string(cc / 10) + "." + std::to_string(cc % 10);
}

// Whether code for one word of the list, such as "80-real", runs on `cc`.
bool WordServes(const std::string& word, ComputeCapability oldest, ComputeCapability cc) {
  char* end = nullptr;
  const int arch = static_cast<int>(std::strtol(word.c_str(), &end, 10));
  std::string kind = end;
  if (arch < oldest) return false;
  if (!kind.empty() && (kind[0] == 'a' || kind[0] == 'f')) return cc == arch;
  const bool has_machine_code = kind != "-virtual";
  const bool has_ptx = kind != "-real";
  if (has_machine_code && cc / 10 == arch / 10 && cc % 10 >= arch % 10) return true;
  return has_ptx && cc >= arch;
}

}  // namespace

std::string MissingCode(const char* architectures, ComputeCapability oldest, ComputeCapability cc) {
  const std::string list = architectures;
  for (size_t begin = 0; begin < list.size();) {
    size_t end = list.find(';', begin);
    if (end == std::string::npos) end = list.size();
    if (WordServes(list.substr(begin, end - begin), oldest, cc)) return "";
    begin = end + 1;
  }
  return "this build holds no code for compute capability " + CapabilityText(cc) +
         " (built: " + list + "); rebuild with JAX_FA_CUDA_ARCHITECTURES naming " +
         std::to_string(cc);
}

}  // namespace jax_fa::cuda
