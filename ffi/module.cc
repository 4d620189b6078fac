// jax_fa._native: the handlers as capsules, and the table of kernels as questions that
// jax_fa/dispatch.py asks. Nothing here computes attention.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>

#include "attention/problem.h"
#include "cpu/prefill.h"
#include "ffi/handlers.h"
#ifdef JAX_FA_WITH_CUDA
#include "cuda/kernels.h"
#endif

namespace nb = nanobind;

namespace jax_fa {
namespace {

nb::capsule Handler(XLA_FFI_Error* (*handler)(XLA_FFI_CallFrame*)) {
  return nb::capsule(reinterpret_cast<void*>(handler));
}

// Platform to the handlers of the targets that jax_fa/native.py lists: the current one, which is
// version 1's too, and version 1's for stacked calls.
nb::dict Registrations() {
  nb::dict handlers;
  const nb::capsule cpu = Handler(JaxFaPrefillAttentionCpu);
  const nb::capsule cuda = Handler(JaxFaPrefillAttentionCuda);
  handlers["cpu"] = nb::make_tuple(cpu, cpu, Handler(JaxFaStackedPrefillAttentionCpu));
  handlers["CUDA"] = nb::make_tuple(cuda, cuda, Handler(JaxFaStackedPrefillAttentionCuda));
  return handlers;
}

// Names of the kernels of this build for "cpu" or "cuda", the preferred one first.
nb::list KernelNames(const std::string& platform) {
  nb::list names;
  if (platform == "cpu") names.append("cpu");
#ifdef JAX_FA_WITH_CUDA
  if (platform == "cuda") {
    for (const cuda::Kernel& kernel : cuda::Kernels()) names.append(kernel.name);
  }
#endif
  return names;
}

// Why `kernel` cannot serve `problem`; empty when it can. `compute_capability` is 90 for 9.0 and is
// not looked at for the CPU kernel.
std::string Refusal(const std::string& kernel, const AttentionProblem& problem,
                    int compute_capability) {
  if (kernel == "cpu") return cpu::Refusal(problem);
#ifdef JAX_FA_WITH_CUDA
  if (const cuda::Kernel* row = cuda::FindKernel(kernel)) {
    return row->refusal(problem, compute_capability);
  }
#else
  (void)compute_capability;
#endif
  return "it is not a kernel of this build";
}

void BindProblem(nb::module_& m) {
  nb::enum_<DType>(m, "DType")
      .value("float32", DType::kFloat32)
      .value("float16", DType::kFloat16)
      .value("bfloat16", DType::kBFloat16);
  nb::class_<AttentionProblem>(m, "AttentionProblem")
      .def(nb::init<>())
      .def_rw("batch", &AttentionProblem::batch)
      .def_rw("q_len", &AttentionProblem::q_len)
      .def_rw("kv_len", &AttentionProblem::kv_len)
      .def_rw("q_heads", &AttentionProblem::q_heads)
      .def_rw("kv_heads", &AttentionProblem::kv_heads)
      .def_rw("head_dim", &AttentionProblem::head_dim)
      .def_rw("layers", &AttentionProblem::layers)
      .def_rw("q_dtype", &AttentionProblem::q_dtype)
      .def_rw("kv_dtype", &AttentionProblem::kv_dtype)
      .def_rw("scale", &AttentionProblem::scale)
      .def_rw("chunk_invariant", &AttentionProblem::chunk_invariant)
      .def_rw("sliding_window", &AttentionProblem::sliding_window)
      .def_rw("logits_soft_cap", &AttentionProblem::logits_soft_cap)
      .def_rw("has_starts", &AttentionProblem::has_starts)
      .def_rw("has_sinks", &AttentionProblem::has_sinks);
}

}  // namespace
}  // namespace jax_fa

NB_MODULE(_native, m) {
  using namespace jax_fa;
  BindProblem(m);
  m.attr("max_kv_len") = kMaxKvLen;
  m.attr("ffi_api_version") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
#ifdef JAX_FA_WITH_CUDA
  m.attr("cuda_architectures") = cuda::BuiltArchitectures();
#else
  m.attr("cuda_architectures") = nb::none();
#endif
  m.def("registrations", &Registrations);
  m.def("kernel_names", &KernelNames, nb::arg("platform"));
  m.def("refusal", &Refusal, nb::arg("kernel"), nb::arg("problem"), nb::arg("compute_capability"));
  m.def("cpu_isa", [] { return std::string(cpu::ActiveIsa()); });
}
