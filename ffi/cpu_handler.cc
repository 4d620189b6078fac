// The CPU handler: decoded parameters to cpu/prefill.h, on XLA's own thread pool.

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <string>

#include "cpu/prefill.h"
#include "ffi/decode.h"
#include "ffi/handlers.h"

namespace jax_fa {
namespace {

namespace ffi = ::xla::ffi;

// One parallel loop: an item counter that helpers and the caller draw from. Helpers may start after
// the loop has ended (the pool was busy), so they own the state jointly and touch `fn` only after
// drawing an item, which none is left of then.
struct Loop {
  explicit Loop(int64_t count, const std::function<void(int64_t)>& fn) : count(count), fn(&fn) {}

  void Work() {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) {
      (*fn)(i);
      // Release: the item's output is written before the caller, who acquires, sees it counted.
      if (done.fetch_add(1, std::memory_order_acq_rel) + 1 == count) {
        std::lock_guard<std::mutex> lock(mutex);
        all_done.notify_one();
      }
    }
  }

  // The caller works too and then waits for items, not for helpers: a pool whose threads are all
  // blocked in such loops still makes progress.
  void WaitForItems() {
    std::unique_lock<std::mutex> lock(mutex);
    all_done.wait(lock, [&] { return done.load(std::memory_order_acquire) == count; });
  }

  const int64_t count;
  const std::function<void(int64_t)>* const fn;
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> done{0};
  std::mutex mutex;
  std::condition_variable all_done;
};

cpu::ParallelFor OnPool(ffi::ThreadPool pool, int num_threads) {
  return [pool, num_threads](int64_t count, const std::function<void(int64_t)>& fn) mutable {
    if (count == 0) return;
    auto loop = std::make_shared<Loop>(count, fn);
    for (int64_t i = 1; i < num_threads && i < count; ++i) pool.Schedule([loop] { loop->Work(); });
    loop->Work();
    loop->WaitForItems();
  };
}

ffi::Error Serve(const Call& call, ffi::ThreadPool pool) {
  const auto& [params, implementation] = call;
  if (!implementation.empty() && implementation != "cpu") {
    return ffi::Error::InvalidArgument("jax_fa.prefill_attention: implementation='" +
                                       implementation +
                                       "' is not a CPU kernel, and the call is placed on a CPU; "
                                       "use implementation=None or 'cpu'.");
  }
  if (const std::string refusal = cpu::Refusal(params); !refusal.empty()) {
    return ffi::Error::InvalidArgument("jax_fa.prefill_attention: " + refusal);
  }
  if (IsEmpty(params)) return ffi::Error::Success();
  const int num_threads = static_cast<int>(std::max<int64_t>(pool.num_threads(), 1));
  try {
    cpu::PrefillAttention(params, num_threads, OnPool(pool, num_threads));
  } catch (const std::bad_alloc&) {
    // Nothing may be thrown across the FFI.
    return ffi::Error(ffi::ErrorCode::kResourceExhausted,
                      "jax_fa.prefill_attention: out of host memory for the CPU kernel's tiles.");
  }
  return ffi::Error::Success();
}

template <const char* kDefaultOperands>
ffi::Error Run(ffi::RemainingArgs operands, ffi::RemainingRets results, ffi::Dictionary attributes,
               ffi::ThreadPool pool) {
  Call call;
  ffi::Error error = Decode({operands, results, attributes}, kDefaultOperands, &call);
  return error.failure() ? error : Serve(call, pool);
}

}  // namespace
}  // namespace jax_fa

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxFaPrefillAttentionCpu, jax_fa::Run<jax_fa::kNoOperands>,
                              jax_fa::BindCall().Ctx<xla::ffi::ThreadPool>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxFaStackedPrefillAttentionCpu, jax_fa::Run<jax_fa::kLayerOperand>,
                              jax_fa::BindCall().Ctx<xla::ffi::ThreadPool>());
