// The end of a query tile: division by the rows' sums, log-sum-exp, and the output's way to device
// memory, of which there are three: float32, 16-bit through shared memory, 16-bit from registers.

#ifndef JAX_FA_CUDA_HOPPER_EPILOGUE_CUH_
#define JAX_FA_CUDA_HOPPER_EPILOGUE_CUH_

#include <cuda/ptx>

#include "cuda/hopper/config.cuh"
#include "cuda/hopper/pipeline.cuh"
#include "cuda/hopper/rare_paths.cuh"
#include "cuda/hopper/seat.cuh"
#include "cuda/hopper/softmax.cuh"
#include "cuda/ptx/warp.cuh"

namespace jax_fa::cuda::hopper {

namespace cptx = ::cuda::ptx;

// The sink of the tile's query head, a logarithm to base 2; -inf where there is none.
template <typename C>
__device__ __forceinline__ float Log2Sink(const Seat<C>& seat) {
  const KernelParams& params = seat.params;
  if (params.sinks == nullptr) return -INFINITY;
  const int64_t sequence = params.sinks_by_sequence ? seat.QSequence() : 0;
  return __fmul_rn(params.sinks[sequence * params.q_heads + seat.Tile().q_head], kLog2E);
}

// Joins a sink to a row's sum, given as its logarithm: it becomes that of both. Returns the row's
// part of it, which is exactly 1 for a sink of -inf.
__device__ __forceinline__ float JoinSink(float log2_sink, float* log2_sum) {
  if (log2_sink == -INFINITY) return 1.0f;
  const float distance = __fsub_rn(log2_sink, *log2_sum);
  const float both = __fadd_rn(1.0f, ptx::exp2_approx(-fabsf(distance)));
  *log2_sum = __fadd_rn(fmaxf(log2_sink, *log2_sum), ptx::log2_approx(both));
  return __frcp_rn(__fadd_rn(1.0f, ptx::exp2_approx(distance)));
}

// inverse: one over the sums of a thread's two rows, 0 for a sum of 0. Writes the rows' log-sum-exp
// where it is wanted.
template <typename C>
__device__ __forceinline__ void FinishSums(const Seat<C>& seat, const RowState& rows,
                                           float (&inverse)[2]) {
  const KernelParams& params = seat.params;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const bool empty = seat.Visible()[8 * r] == 0;
    const float total = QuadSum(rows.sum[r]);
    inverse[r] = Inverse(total);
    const int row = seat.Row() + 8 * r;
    if constexpr (C::kHasBounds) {
      float log2_sum = empty ? -INFINITY : Log2Sum(total, rows.negative_shift[r]);
      inverse[r] = __fmul_rn(inverse[r], JoinSink(Log2Sink(seat), &log2_sum));
      if (params.lse != nullptr && threadIdx.x % 4 == 0 && seat.Exists(row)) {
        params.lse[seat.GlobalRow(row)] = __fmul_rn(log2_sum, kLn2);
      }
    } else if (params.lse != nullptr && threadIdx.x % 4 == 0 && seat.Exists(row)) {
      const float log2_sum = Log2Sum(total, rows.negative_shift[r]);
      params.lse[seat.GlobalRow(row)] = empty ? -INFINITY : __fmul_rn(log2_sum, kLn2);
    }
  }
}

// Divides the output by its rows' sums, and makes empty rows exact zeros; in builds with lower
// bounds also rows all of whose scores are -inf, whatever the v that they see.
template <typename C>
__device__ __forceinline__ void FinishRows(const Seat<C>& seat, const float (&inverse)[2],
                                           float (&out)[C::kOutRegisters]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const bool empty = seat.Visible()[8 * r] == 0 || (C::kHasBounds && inverse[r] == 0.0f);
#pragma unroll
    for (int i = 0; i < C::kOutRegisters / 2; ++i) {
      float& value = out[i / 2 * 4 + 2 * r + i % 2];
      // + 0: a zero that masked slots left negative would tell of the row's neighbours.
      value = __fmaf_rn(value, inverse[r], 0.0f);
    }
    if (__any_sync(~0u, empty)) {
#pragma unroll
      for (int i = 0; i < C::kOutRegisters / 2; ++i) {
        float& value = out[i / 2 * 4 + 2 * r + i % 2];
        value = empty ? 0.0f : value;
      }
    }
  }
}

// Writes a float32 output, which the rows' lanes hold in whole sectors of 32 bytes.
template <typename C>
__device__ __forceinline__ void StoreFloatRows(const Seat<C>& seat,
                                               const float (&out)[C::kOutRegisters]) {
  const KernelParams& params = seat.params;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = seat.Row() + 8 * r;
    if (!seat.Exists(row)) continue;
    float* to = static_cast<float*>(params.out) + seat.GlobalRow(row) * params.head_dim;
#pragma unroll
    for (int i = 0; i < C::kOutRegisters / 4; ++i) {
      const int column = 8 * i + 2 * (threadIdx.x % 4);
      if (column < params.head_dim) {
        *reinterpret_cast<float2*>(to + column) =
            make_float2(out[4 * i + 2 * r], out[4 * i + 2 * r + 1]);
      }
    }
  }
}

// Writes a 16-bit output through the warp's own 16 rows of the Q stage and a TMA store, which clips
// the rows past the last token. WaitForStore waits until the copy has read them.
template <typename C>
__device__ __forceinline__ void StoreThroughShared(const Seat<C>& seat, const CUtensorMap& out_map,
                                                   uint8_t* q_tile,
                                                   const float (&out)[C::kOutRegisters]) {
  const int lane = threadIdx.x % 32;
  const int warp_row = kConsumerRows * seat.consumer + threadIdx.x % kWarpgroup / 32 * 16;
  uint32_t packed[C::kOutRegisters / 2];
  PackWeights<typename C::Element>(out, packed);
  // The other warps' wgmma of this tile may still read the warpgroup's Q rows.
  ptx::barrier_sync(kWarpgroupBarrier + seat.consumer, kWarpgroup);
#pragma unroll
  for (int i = 0; i < C::kOutRegisters / 8; ++i) {
    // Lanes 0-7 and 8-15 give rows 0-7 and 8-15 of one chunk, lanes 16-31 of the next.
    const int offset = SwizzledOffset(C::kQPanelBytes, warp_row + lane % 16, 2 * i + lane / 16);
    ptx::stmatrix_x4(SharedAddress(q_tile + offset), packed[4 * i], packed[4 * i + 1],
                     packed[4 * i + 2], packed[4 * i + 3]);
  }
  // Ordinary stores of every lane, read by lane 0's copy through the async proxy.
  cptx::fence_proxy_async(cptx::space_shared);
  __syncwarp();
  if (lane == 0) {
    const TileInfo& tile = seat.Tile();
#pragma unroll
    for (int panel = 0; panel < C::kPanels; ++panel) {
      const int32_t coordinates[4] = {panel * kSwizzleColumns, tile.q_start + warp_row, tile.q_head,
                                      seat.QSequence()};
      cptx::cp_async_bulk_tensor(cptx::space_global, cptx::space_shared, &out_map, coordinates,
                                 q_tile + panel * C::kQPanelBytes + warp_row * 128);
    }
    cptx::cp_async_bulk_commit_group();
  }
}

// Until the warp's own TMA stores have read shared memory.
__device__ __forceinline__ void WaitForStore() {
  if (threadIdx.x % 32 == 0) cptx::cp_async_bulk_wait_group_read(cptx::n32_t<0>());
}

// Four neighbouring lanes hold word `lane % 4` of each of four 16-byte chunks; afterwards lane q
// holds the four words of chunk q.
__device__ __forceinline__ void TransposeInQuad(uint32_t (&words)[4]) {
#pragma unroll
  for (int distance = 1; distance <= 2; distance *= 2) {
    const bool upper = (threadIdx.x & distance) != 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t& first = words[distance == 1 ? 2 * i : i];
      uint32_t& second = words[distance == 1 ? 2 * i + 1 : i + 2];
      const uint32_t received = __shfl_xor_sync(~0u, upper ? first : second, distance);
      (upper ? first : second) = received;
    }
  }
}

// Writes a 16-bit output from registers, 64 contiguous bytes of a row by each four lanes: for
// builds whose only Q stage is wanted by the next tile's load.
template <typename C>
__device__ __forceinline__ void StoreFromRegisters(const Seat<C>& seat,
                                                   const float (&out)[C::kOutRegisters]) {
  const KernelParams& params = seat.params;
  uint32_t packed[C::kOutRegisters / 2];
  PackWeights<typename C::Element>(out, packed);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = seat.Row() + 8 * r;
    const bool exists = seat.Exists(row);
    uint4* to = reinterpret_cast<uint4*>(static_cast<typename C::Element*>(params.out) +
                                         seat.GlobalRow(row) * params.head_dim);
#pragma unroll
    for (int group = 0; group < C::kHeadDim / 32; ++group) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = packed[2 * (4 * group + i) + r];
      TransposeInQuad(words);
      const int chunk = 4 * group + threadIdx.x % 4;
      if (exists && 8 * chunk < params.head_dim) {
        to[chunk] = make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }
}

// A query tile with all its products done.
template <typename C>
__device__ __forceinline__ void FinishTile(SharedStorage<C>& shared, const Seat<C>& seat,
                                           const CUtensorMap& out_map, const float (&inverse)[2],
                                           float (&out)[C::kOutRegisters]) {
  if (seat.Tile().poisoned != 0) {
    AddUnfiniteSlots<C>(seat, out);
  }
  FinishRows<C>(seat, inverse, out);
  if constexpr (C::kFloatQuery) {
    StoreFloatRows<C>(seat, out);
  } else if constexpr (C::kStoresThroughShared) {
    StoreThroughShared<C>(seat, out_map, shared.q[seat.q_stage], out);
  } else {
    StoreFromRegisters<C>(seat, out);
  }
}

}  // namespace jax_fa::cuda::hopper

#endif  // JAX_FA_CUDA_HOPPER_EPILOGUE_CUH_
