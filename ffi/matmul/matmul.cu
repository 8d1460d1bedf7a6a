// Instantiates the matmul kernels and launches them.

#include <limits>
#include <stdexcept>

#include "core/integer.h"
#include "core/launch.h"
#include "matmul/gemm.cuh"
#include "matmul/ladder/01_naive.cuh"
#include "matmul/ladder/02_coalesced.cuh"
#include "matmul/ladder/03_shared.cuh"
#include "matmul/ladder/04_block_tiled.cuh"
#include "matmul/ladder/05_bank_conflict_free.cuh"
#include "matmul/ladder/06_double_buffered.cuh"
#include "matmul/matmul.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {
namespace {

template <class T>
using Kernel = void (*)(Gemm<T>);

template <class T>
struct Call {
  const Queue& queue;
  std::int64_t batch;
  Gemm<T> gemm;
};

// `rows_first`: a step along the rows is a step of one element in memory.
template <class T>
Factor<T> make_factor(const void* data, std::int64_t extent, std::int64_t depth, bool rows_first,
                      bool is_shared) {
  const T* const first = static_cast<const T*>(data);
  const std::int64_t run = rows_first ? extent : depth;
  return {first,
          extent,
          rows_first ? 1 : depth,
          rows_first ? extent : 1,
          is_shared ? 0 : extent * depth,
          !rows_first,
          run % kPack == 0 && is_aligned<kPack>(first)};
}

// One block a tile. A grid has 2^31 - 1 blocks at most; further tiles take another launch.
template <class T>
void launch_tiles(const Call<T>& call, int tile_rows, int tile_cols, int threads,
                  std::size_t shared_bytes, Kernel<T> kernel) {
  Gemm<T> gemm = call.gemm;
  const std::int64_t tiles =
      call.batch * divide_up(gemm.a.extent, tile_rows) * divide_up(gemm.b.extent, tile_cols);
  for (; gemm.first_tile < tiles; gemm.first_tile += std::numeric_limits<std::int32_t>::max()) {
    launch(call.queue,
           {grid_extent(tiles - gemm.first_tile), static_cast<unsigned>(threads), shared_bytes},
           kernel, gemm);
  }
}

// Chooses between the kernel for aligned row-major matrices and the one for all others.
template <class T>
void launch_tiled(const Call<T>& call, std::size_t shared_bytes, Kernel<T> row_major,
                  Kernel<T> any) {
  const Factor<T>& a = call.gemm.a;
  const Factor<T>& b = call.gemm.b;
  const bool is_row_major = a.deep && a.packed && !b.deep && b.packed;
  // Addresses are not known while preparing, so both kernels a call may need are loaded then.
  if (call.queue.preparing || !is_row_major) {
    launch_tiles(call, kTile, kTile, kTileThreads, shared_bytes, any);
  }
  if (call.queue.preparing || is_row_major) {
    launch_tiles(call, kTile, kTile, kTileThreads, shared_bytes, row_major);
  }
}

template <class T>
void launch_algorithm(Algorithm algorithm, const Call<T>& call) {
  using A = Accumulator<T>;
  constexpr Order kDeep = Order::kDeep, kWide = Order::kWide, kAny = Order::kAny;
  switch (algorithm) {
    case Algorithm::kNaive:
      return launch_tiles(call, kNaiveRows, kNaiveCols, kElementThreads, 0, naive_kernel<T>);
    case Algorithm::kCoalesced:
      return launch_tiles(call, kCoalescedRows, kCoalescedCols, kElementThreads, 0,
                          coalesced_kernel<T>);
    case Algorithm::kShared:
      return launch_tiles(call, kSharedTile, kSharedTile, kSharedThreads, sizeof(SharedStorage<A>),
                          shared_kernel<T>);
    case Algorithm::kBlockTiled:
      return launch_tiled(call, sizeof(BlockTiledStorage<A>), block_tiled_kernel<T, kDeep, kWide>,
                          block_tiled_kernel<T, kAny, kAny>);
    case Algorithm::kBankConflictFree:
      return launch_tiled(call, sizeof(BankConflictFreeStorage<A>),
                          bank_conflict_free_kernel<T, kDeep, kWide>,
                          bank_conflict_free_kernel<T, kAny, kAny>);
    case Algorithm::kDoubleBuffered:
      return launch_tiled(call, sizeof(DoubleBufferedStorage<A>),
                          double_buffered_kernel<T, kDeep, kWide>,
                          double_buffered_kernel<T, kAny, kAny>);
    case Algorithm::kCublas:
      throw std::logic_error("cublas is a library call, not a kernel");
  }
}

}  // namespace

void launch(const Plan& plan, const Problem& problem, const Buffers& buffers, const Queue& queue) {
  dispatch<__half, __nv_bfloat16, float, double>(problem.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using A = Accumulator<T>;
    const bool is_wide = problem.result_dtype != problem.dtype;
    const auto is_result_aligned = [&](const void* data) {
      return is_wide ? is_aligned<kPack>(static_cast<const A*>(data))
                     : is_aligned<kPack>(static_cast<const T*>(data));
    };
    const Epilogue<T> epilogue{buffers.result,
                               buffers.c,
                               static_cast<A>(buffers.alpha),
                               static_cast<A>(buffers.beta),
                               is_wide,
                               problem.n % kPack == 0 && is_result_aligned(buffers.result) &&
                                   is_result_aligned(buffers.c)};
    const Gemm<T> gemm{
        make_factor<T>(buffers.a, problem.m, problem.k, problem.transpose_a, problem.share_a),
        make_factor<T>(buffers.b, problem.n, problem.k, !problem.transpose_b, problem.share_b),
        epilogue, problem.k, /*first_tile=*/0};
    launch_algorithm<T>(plan.algorithm, {queue, problem.batch, gemm});
  });
}

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
