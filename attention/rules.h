// What no kernel serves, on any processor: the rules of dtypes and lengths, with the values met.
// Host code. What one kernel alone does not serve is its own refusal.

#ifndef JAX_FA_ATTENTION_RULES_H_
#define JAX_FA_ATTENTION_RULES_H_

#include <string>

#include "attention/problem.h"

namespace jax_fa {

// Why `problem` is outside every kernel's contract; empty when it is not.
inline std::string OutsideContract(const AttentionProblem& problem) {
  if (problem.kv_dtype == DType::kFloat32) {
    return "the cache is float32; it must be float16 or bfloat16";
  }
  if (problem.q_dtype != DType::kFloat32 && problem.q_dtype != problem.kv_dtype) {
    return std::string("q is ") + DTypeName(problem.q_dtype) + ", the cache is " +
           DTypeName(problem.kv_dtype) + "; q must be float32 or have the cache's dtype";
  }
  if (problem.kv_len > kMaxKvLen) {
    return "kv_len is " + std::to_string(problem.kv_len) + "; the longest cache is " +
           std::to_string(kMaxKvLen) + " slots";
  }
  if (problem.kv_heads == 0 ? problem.q_heads != 0 : problem.q_heads % problem.kv_heads != 0) {
    return "q_heads is " + std::to_string(problem.q_heads) + " and kv_heads " +
           std::to_string(problem.kv_heads) + "; query heads must be a multiple of kv heads";
  }
  return "";
}

}  // namespace jax_fa

#endif  // JAX_FA_ATTENTION_RULES_H_
