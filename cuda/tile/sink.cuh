// The end of a row's softmax: its head's sink joins the sum. Device code only.

#ifndef JAX_FA_CUDA_TILE_SINK_CUH_
#define JAX_FA_CUDA_TILE_SINK_CUH_

#include <cmath>

namespace jax_fa::cuda {

// A row's softmax with its sink: out is that so far, times alpha / sum.
struct SoftmaxEnd {
  float alpha;
  float sum;
  float lse;
};

// Joins `sink`, one more logit of value 0, to a softmax of `row_max` and `row_sum` in natural
// units. A sink of -inf gives alpha = 1 and the sum as it was; a row that saw nothing the sink for
// its lse.
__device__ inline SoftmaxEnd JoinSink(float row_max, float row_sum, float sink) {
  const float new_max = fmaxf(row_max, sink);
  // Neither a score nor a sink: subtract 0, not -inf, which would give NaN.
  const float base = new_max == -INFINITY ? 0.0f : new_max;
  SoftmaxEnd end;
  end.alpha = expf(row_max - base);
  end.sum = row_sum * end.alpha + expf(sink - base);
  end.lse = new_max + logf(end.sum);
  return end;
}

}  // namespace jax_fa::cuda

#endif  // JAX_FA_CUDA_TILE_SINK_CUH_
