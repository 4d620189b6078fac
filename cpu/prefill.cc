// The driver: picks the instruction set, cuts the problem into tiles of query rows and lets a few
// workers take them, the longest first. The arithmetic is in tile_kernel.h.

#include "cpu/prefill.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "attention/kv_layout.h"
#include "attention/rules.h"
#include "attention/sinks.h"
#include "attention/visible.h"
#include "cpu/dispatch.h"
#include "cpu/query_tile.h"

namespace jax_fa::cpu {

#if defined(JAX_FA_CPU_X86)
extern const TileKernel kAvx512Kernel;
extern const TileKernel kAvx2Kernel;
#elif defined(JAX_FA_CPU_AARCH64)
extern const TileKernel kNeonKernel;
#endif
extern const TileKernel kPlainKernel;

namespace {

constexpr char kIsaVariable[] = "JAX_FA_CPU_ISA";

// Rows of a tile. Many, since a KV tile is packed once for all of them: 384 rows are 4 % faster
// than 96 (head_dim 64 and 128, Zen 4). Not more, so that the tiles stay many enough to share out.
constexpr int64_t kMaxTileRows = 384;
constexpr int64_t kMinTileRows = 24;
// So that the last tiles to finish are a small part of each worker's share.
constexpr int64_t kTilesPerThread = 4;

constexpr double kLog2E = 1.4426950408889634;

struct Selection {
  const TileKernel* kernel;
  std::string refusal;  // why the one that the environment asks for is not it
};

Selection SelectKernel() {
  const std::vector<const TileKernel*>& kernels = AvailableKernels();
  const char* wanted = std::getenv(kIsaVariable);
  if (wanted == nullptr || *wanted == '\0') return {kernels.front(), ""};
  std::string names;
  for (const TileKernel* kernel : kernels) {
    if (std::string(wanted) == kernel->name) return {kernel, ""};
    names += (names.empty() ? "" : ", ") + std::string(kernel->name);
  }
  return {kernels.front(), std::string(kIsaVariable) + " is '" + wanted +
                               "'; this processor and build have: " + names +
                               "; or leave it unset for the best"};
}

// The environment is read once: another thread may change it later.
const Selection& Selected() {
  static const Selection selection = SelectKernel();
  return selection;
}

Element ToElement(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return Element::kFloat32;
    case DType::kFloat16:
      return Element::kFloat16;
    case DType::kBFloat16:
      return Element::kBFloat16;
  }
  return Element::kFloat32;
}

// The tokens of each sequence in the order of what they see: neighbours in a tile then see nearly
// the same slots, also when positions come shuffled. Increasing positions stay as they are.
class TokenOrder {
 public:
  struct Token {
    int64_t index;  // counted over the whole batch
    Visible visible;
  };

  explicit TokenOrder(const AttentionParams& params)
      : q_len_(params.q_len), tokens_(params.batch * params.q_len) {
    for (int64_t b = 0; b < params.batch; ++b) {
      Token* begin = tokens_.data() + b * q_len_;
      for (int64_t t = 0; t < q_len_; ++t) begin[t] = {b * q_len_ + t, VisibleSlots(params, b, t)};
      const auto sees_less = [](const Token& x, const Token& y) {
        return std::pair(x.visible.hi, x.visible.lo) < std::pair(y.visible.hi, y.visible.lo);
      };
      if (!std::is_sorted(begin, begin + q_len_, sees_less)) {
        std::stable_sort(begin, begin + q_len_, sees_less);
      }
    }
  }

  // The rank-th token of sequence b.
  const Token& Ranked(int64_t b, int64_t rank) const { return tokens_[b * q_len_ + rank]; }

 private:
  int64_t q_len_;
  std::vector<Token> tokens_;
};

// Rows [row_begin, row_end) of one sequence and KV head, counted token by token in TokenOrder, the
// q heads of a token side by side.
struct Task {
  int64_t b;
  int64_t kv_head;
  int64_t row_begin;
  int64_t row_end;
  int64_t cost;  // score elements, to order by
};

int64_t TileRows(const AttentionParams& params, const TileKernel& kernel, int64_t num_threads) {
  const int64_t tiles = kTilesPerThread * std::max<int64_t>(num_threads, 1);
  const int64_t rows = std::clamp((params.rows() + tiles - 1) / tiles, kMinTileRows, kMaxTileRows);
  return (rows + kernel.row_group - 1) / kernel.row_group * kernel.row_group;
}

std::vector<Task> CutIntoTasks(const AttentionParams& params, const TokenOrder& order,
                               int64_t tile_rows) {
  const int64_t q_per_kv = params.q_heads_per_kv_head();
  const int64_t rows = params.q_len * q_per_kv;
  std::vector<Task> tasks;
  for (int64_t b = 0; b < params.batch; ++b) {
    for (int64_t begin = 0; begin < rows; begin += tile_rows) {
      const int64_t end = std::min(begin + tile_rows, rows);
      const Visible& middle = order.Ranked(b, (begin + end) / 2 / q_per_kv).visible;
      const int64_t cost = (end - begin) * (middle.hi - middle.lo);
      for (int64_t kv_head = 0; kv_head < params.kv_heads; ++kv_head) {
        tasks.push_back({b, kv_head, begin, end, cost});
      }
    }
  }
  std::stable_sort(tasks.begin(), tasks.end(),
                   [](const Task& x, const Task& y) { return x.cost > y.cost; });
  return tasks;
}

// A factor of scores: an infinite one would make NaN of a score of 0.
float Clamped(double factor) {
  constexpr double kLargest = std::numeric_limits<float>::max();
  return static_cast<float>(std::clamp(factor, -kLargest, kLargest));
}

// Runs tasks for one worker, with memory of its own.
class Worker {
 public:
  Worker(const TileKernel& kernel, const AttentionParams& params, const TokenOrder& order,
         int64_t tile_rows)
      : kernel_(kernel),
        params_(params),
        order_(order),
        rows_(tile_rows),
        scratch_(::operator new(kernel.scratch_bytes(params.head_dim, tile_rows), kAlignment)) {
    tile_.rows = rows_.data();
    tile_.head_dim = params.head_dim;
    tile_.q = params.q;
    tile_.slot_step = SlotPitch(params);
    tile_.out = params.out;
    tile_.lse = params.lse;
    tile_.q_element = ToElement(params.q_dtype);
    tile_.kv_element = ToElement(params.kv_dtype);
    const double cap = params.logits_soft_cap;
    tile_.is_capped = cap > 0;
    tile_.cap_scale = tile_.is_capped ? Clamped(params.scale / cap) : 0.0f;
    tile_.scale_log2 = Clamped((tile_.is_capped ? cap : params.scale) * kLog2E);
  }

  void Run(const Task& task) {
    const int64_t q_per_kv = params_.q_heads_per_kv_head();
    VisibleBounds bounds;
    for (int64_t row = task.row_begin; row < task.row_end; ++row) {
      const TokenOrder::Token& token = order_.Ranked(task.b, row / q_per_kv);
      const int64_t head = task.kv_head * q_per_kv + row % q_per_kv;
      rows_[row - task.row_begin] = {token.index * params_.q_heads + head, token.visible.lo,
                                     token.visible.hi, SinkLogit(params_, task.b, head)};
      bounds.Add(token.visible);
    }
    tile_.row_count = task.row_end - task.row_begin;
    tile_.begin = std::min(bounds.least_lo, bounds.most_hi);
    tile_.end = bounds.most_hi;
    const int64_t first = CacheOffset(params_, task.b, task.kv_head);
    tile_.k = static_cast<const uint16_t*>(params_.k) + first;
    tile_.v = static_cast<const uint16_t*>(params_.v) + first;
    kernel_.run(tile_, scratch_.get());
  }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Free {
    void operator()(void* memory) const { ::operator delete(memory, kAlignment); }
  };

  const TileKernel& kernel_;
  const AttentionParams& params_;
  const TokenOrder& order_;
  std::vector<QueryRow> rows_;
  std::unique_ptr<void, Free> scratch_;
  QueryTile tile_ = {};
};

}  // namespace

const std::vector<const TileKernel*>& AvailableKernels() {
  static const std::vector<const TileKernel*> kernels = [] {
    std::vector<const TileKernel*> found;
#if defined(JAX_FA_CPU_X86)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
      if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
        found.push_back(&kAvx512Kernel);
      }
      found.push_back(&kAvx2Kernel);  // every processor with AVX2 has F16C
    }
#elif defined(JAX_FA_CPU_AARCH64)
    found.push_back(&kNeonKernel);
#endif
    found.push_back(&kPlainKernel);
    return found;
  }();
  return kernels;
}

void PrefillAttentionWith(const TileKernel& kernel, const AttentionParams& params, int num_threads,
                          const ParallelFor& parallel_for) {
  if (params.rows() == 0) return;
  const TokenOrder order(params);
  const int64_t tile_rows = TileRows(params, kernel, num_threads);
  const std::vector<Task> tasks = CutIntoTasks(params, order, tile_rows);
  const int64_t task_count = static_cast<int64_t>(tasks.size());

  // All memory is taken here, where running out of it can still be thrown to the caller.
  std::vector<Worker> workers;
  const int64_t worker_count = std::clamp<int64_t>(num_threads, 1, task_count);
  workers.reserve(worker_count);
  for (int64_t i = 0; i < worker_count; ++i) workers.emplace_back(kernel, params, order, tile_rows);

  // Which worker runs a task changes no bit: tasks share no row and workers share no memory.
  std::atomic<int64_t> next{0};
  parallel_for(worker_count, [&](int64_t worker) {
    for (int64_t i = next++; i < task_count; i = next++) workers[worker].Run(tasks[i]);
  });
}

std::string Refusal(const AttentionProblem& problem) {
  if (!Selected().refusal.empty()) return Selected().refusal;
  return OutsideContract(problem);
}

void PrefillAttention(const AttentionParams& params, int num_threads,
                      const ParallelFor& parallel_for) {
  PrefillAttentionWith(*Selected().kernel, params, num_threads, parallel_for);
}

const char* ActiveIsa() { return Selected().kernel->name; }

}  // namespace jax_fa::cpu
