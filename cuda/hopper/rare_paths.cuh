// What a consumer does when a row's weights outgrow its shift, and when V is not finite in a masked
// tile. Entered by a vote of the warp, decided for each row by that row alone, so that no row's
// bits depend on its neighbours. Slow where that is simple; typical data come here seldom or never.

#ifndef JAX_FA_CUDA_HOPPER_RARE_PATHS_CUH_
#define JAX_FA_CUDA_HOPPER_RARE_PATHS_CUH_

#include <cstdint>

#include "cuda/hopper/cap.cuh"
#include "cuda/hopper/config.cuh"
#include "cuda/hopper/seat.cuh"
#include "cuda/hopper/softmax.cuh"
#include "cuda/tile/convert.h"

namespace jax_fa::cuda::hopper {

// q . k of row `row` of the tile and `slot`, from Q in shared memory and K in device memory.
template <typename C>
__device__ __forceinline__ float Score(const Seat<C>& seat, int row, int32_t slot) {
  const auto* k_row = reinterpret_cast<const uint4*>(seat.KvRow(seat.params.k, slot));
  float score = 0.0f;
#pragma unroll 1
  for (int chunk = 0; chunk < seat.params.head_dim / 8; ++chunk) {
    const uint4 q = *reinterpret_cast<const uint4*>(
        &seat.shared.q[seat.q_stage][SwizzledOffset(C::kQPanelBytes, row, chunk)]);
    const uint4 k = k_row[chunk];
    const uint32_t qs[4] = {q.x, q.y, q.z, q.w};
    const uint32_t ks[4] = {k.x, k.y, k.z, k.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 a = Unpack2<typename C::Element>(qs[i]);
      const float2 b = Unpack2<typename C::Element>(ks[i]);
      score = __fmaf_rn(a.x, b.x, __fmaf_rn(a.y, b.y, score));
    }
  }
  if constexpr (C::kHasCap) return CapScore(score, seat.params);
  return score;
}

// Raises the shift of those rows whose weights of this tile (sum `tile_sum` in a lane) outgrew it,
// and brings weights and sums to the new shift; `factor` is what is left to do to the rows' output.
// Whole steps of the exponent: multiplying by 2^-n is exact. Only weights past 2^127 are lost;
// their scores are then computed again.
template <typename C>
__device__ __forceinline__ void RaiseShifts(const Seat<C>& seat, int32_t first_slot, RowState& rows,
                                            float (&weights)[C::kScoreRegisters],
                                            float (&tile_sum)[2], float (&factor)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const bool raise = AnyInQuad(tile_sum[r] > kRaiseAbove);
    const float largest = RowMax(weights, r);
    const bool lost = raise && largest == INFINITY;
    factor[r] = 1.0f;
    if (raise && !lost) {
      const int steps = min(max((__float_as_int(largest) >> 23) - 127, 1), 126);
      factor[r] = __int_as_float((127 - steps) << 23);
      rows.negative_shift[r] = __fsub_rn(rows.negative_shift[r], static_cast<float>(steps));
#pragma unroll
      for (int i = 0; i < C::kScoreRegisters / 2; ++i) {
        float& weight = weights[i / 2 * 4 + 2 * r + i % 2];
        weight = __fmul_rn(weight, factor[r]);
      }
      tile_sum[r] = __fmul_rn(tile_sum[r], factor[r]);
    }
    if (__any_sync(~0u, lost)) {
      const int32_t limit = min(SlotLimit(seat.Visible()[8 * r]), seat.KvLen());
      float top = -INFINITY;
      // One copy of the dot product; the register that takes it is found by comparing.
#pragma unroll 1
      for (int column = 0; column < C::kScoreRegisters / 2; ++column) {
        const int32_t slot = first_slot + column / 2 * 8 + 2 * (threadIdx.x % 4) + column % 2;
        const bool counts = lost && slot < limit && (!C::kHasBounds || slot >= seat.Lo()[8 * r]);
        const float score = counts ? Score<C>(seat, seat.Row() + 8 * r, slot) : -INFINITY;
        top = fmaxf(top, score);
#pragma unroll
        for (int i = 0; i < C::kScoreRegisters / 2; ++i) {
          if (lost && i == column) weights[i / 2 * 4 + 2 * r + i % 2] = score;
        }
      }
      const float raised = NegativeShift(QuadMax(top), seat.params.score_factor);
      if (lost) {
        factor[r] = ptx::exp2_approx(__fsub_rn(raised, rows.negative_shift[r]));
        rows.negative_shift[r] = raised;
        tile_sum[r] = 0.0f;
#pragma unroll
        for (int i = 0; i < C::kScoreRegisters / 2; ++i) {
          float& weight = weights[i / 2 * 4 + 2 * r + i % 2];
          weight = ptx::exp2_approx(__fmaf_rn(weight, seat.params.score_factor, raised));
          tile_sum[r] = __fadd_rn(tile_sum[r], weight);
        }
      }
    }
    rows.sum[r] = __fmul_rn(rows.sum[r], factor[r]);
  }
}

// Brings outputs to the shifts that RaiseShifts has raised.
template <typename C>
__device__ __forceinline__ void ScaleOutput(const float (&factor)[2],
                                            float (&out)[C::kOutRegisters]) {
#pragma unroll
  for (int i = 0; i < C::kOutRegisters; ++i) out[i] = __fmul_rn(out[i], factor[i / 2 % 2]);
}

// Adds the elements of V that are not finite, of the slots in masked KV tiles, to the rows that see
// them: what the inspectors took out of the tiles. Their weight is positive, so it changes nothing.
template <typename C>
__device__ __forceinline__ void AddUnfiniteSlots(const Seat<C>& seat,
                                                 float (&out)[C::kOutRegisters]) {
  const int32_t visible[2] = {seat.Visible()[0], seat.Visible()[8]};
  int32_t lo[2] = {0, 0};
  const int32_t whole_end = seat.Tile().whole_tiles * C::kTileKV;
  int32_t whole_begin = 0;
  if constexpr (C::kHasBounds) {
    lo[0] = seat.Lo()[0];
    lo[1] = seat.Lo()[8];
    whole_begin = seat.shared.lower.whole_begin[seat.info_stage] * C::kTileKV;
  }
#pragma unroll 1
  for (int32_t slot = whole_begin == 0 ? whole_end : 0; slot < seat.Tile().kv_end; ++slot) {
    if (C::kHasBounds && slot == whole_begin) slot = whole_end;
    if (C::kHasBounds && slot >= seat.Tile().kv_end) break;
    const auto* v_row = seat.KvRow(seat.params.v, slot);
#pragma unroll
    for (int i = 0; i < C::kOutRegisters / 4; ++i) {
      const int column = 8 * i + 2 * (threadIdx.x % 4);
      if (column >= seat.params.head_dim) continue;
      const float2 pair =
          Unpack2<typename C::Element>(*reinterpret_cast<const uint32_t*>(v_row + column));
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (slot >= visible[r] || (C::kHasBounds && slot < lo[r])) continue;
        if (!isfinite(pair.x)) out[4 * i + 2 * r] += pair.x;
        if (!isfinite(pair.y)) out[4 * i + 2 * r + 1] += pair.y;
      }
    }
  }
}

}  // namespace jax_fa::cuda::hopper

#endif  // JAX_FA_CUDA_HOPPER_RARE_PATHS_CUH_
