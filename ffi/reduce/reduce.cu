// Instantiates the reduction kernels and launches them.

#include <algorithm>
#include <stdexcept>
#include <type_traits>

#include "core/integer.h"
#include "core/launch.h"
#include "reduce/column.cuh"
#include "reduce/ladder/01_naive.cuh"
#include "reduce/ladder/02_stride.cuh"
#include "reduce/ladder/03_sequential.cuh"
#include "reduce/ladder/04_first_add.cuh"
#include "reduce/ladder/05_unroll.cuh"
#include "reduce/ladder/06_multiple.cuh"
#include "reduce/reduce.h"
#include "reduce/reducer.cuh"
#include "reduce/row.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace reduce {
namespace {

// The longest row that a warp takes; it reads 16 packs a lane then.
constexpr std::int64_t kWarpRowPacks = 16 * kWarpSize;

struct Call {
  const Queue& queue;
  const Problem& problem;
  Target result;
  Workspace workspace;
};

// How many partials of each row the workspace can hold.
template <class Partial>
std::int64_t workspace_partials(const Call& call) {
  return static_cast<std::int64_t>(call.workspace.bytes / sizeof(Partial)) / call.problem.rows();
}

// Ladder

template <class Reducer>
void launch_step(Algorithm algorithm, const Queue& queue, const typename Reducer::Element* x,
                 const Target& y, ContiguousRows rows, std::int64_t tiles) {
  const LaunchShape shape{dim3(grid_extent(tiles), grid_extent_beyond_x(rows.count)),
                          kLadderThreads, sizeof(TreeStorage<Reducer>)};
  switch (algorithm) {
    case Algorithm::kNaive:
      return launch(queue, shape, naive_kernel<Reducer>, x, y, rows);
    case Algorithm::kStride:
      return launch(queue, shape, stride_kernel<Reducer>, x, y, rows);
    case Algorithm::kSequential:
      return launch(queue, shape, sequential_kernel<Reducer>, x, y, rows);
    case Algorithm::kFirstAdd:
      return launch(queue, shape, first_add_kernel<Reducer>, x, y, rows);
    default:
      return launch(queue, shape, unroll_kernel<Reducer>, x, y, rows);
  }
}

// Launches a step again and again, each time on what it left in the workspace before, until one
// element of each row is left.
template <Function kFunction, class T, class A>
void launch_ladder(Algorithm algorithm, const Call& call, const T* x, std::int64_t columns,
                   Workspace free) {
  const ContiguousRows rows{call.problem.rows(), columns};
  const std::int64_t tiles = divide_up(columns, ladder_block_columns(algorithm));
  using Step = Reducer<kFunction, T, A>;
  if (tiles == 1) {
    return launch_step<Step>(algorithm, call.queue, x, call.result, rows, tiles);
  }
  const std::size_t bytes = static_cast<std::size_t>(rows.count * tiles) * sizeof(A);
  if (bytes > free.bytes) throw std::invalid_argument("the workspace is too small");
  A* const partials = static_cast<A*>(free.data);
  launch_step<Step>(algorithm, call.queue, x, {partials, kDTypeOf<A>, true}, rows, tiles);
  launch_ladder<kFunction, A, A>(algorithm, call, partials, tiles,
                                 {static_cast<char*>(free.data) + bytes, free.bytes - bytes});
}

// Blocks over rows

// One block for each row, no larger than the row.
template <class Reducer>
void launch_block_rows(const Call& call, const typename Reducer::Element* x, ContiguousRows rows) {
  constexpr int kPack = kWidestPack<typename Reducer::Element>;
  const int threads =
      std::max(kWarpSize, power_of_two_from(divide_up(rows.columns, kPack), kMultipleThreads));
  launch(call.queue,
         {dim3(1, grid_extent_beyond_x(rows.count)), static_cast<unsigned>(threads),
          sizeof(MultipleStorage<Reducer>)},
         multiple_kernel<Reducer>, x, call.result, rows);
}

template <Function kFunction, class T, class A>
void launch_multiple(const Call& call, const T* x) {
  using First = Reducer<kFunction, T, A>;
  using Partial = typename First::Partial;
  using Second = Reducer<kFunction, Partial, A>;
  constexpr std::size_t kSharedBytes = sizeof(MultipleStorage<First>);
  const ContiguousRows rows{call.problem.rows(), call.problem.columns};

  // One wave of blocks over all rows: they finish together, and few partials are left.
  const std::int64_t resident =
      std::int64_t{call.queue.device->multiprocessors} *
      resident_blocks(call.queue, multiple_kernel<First>, kMultipleThreads, kSharedBytes);
  const std::int64_t worth = divide_up(rows.columns * std::int64_t{sizeof(T)}, kSplitBytes);
  const std::int64_t blocks =
      std::min({resident / rows.count, worth, kMaxSplits, workspace_partials<Partial>(call)});
  if (blocks <= 1) return launch_block_rows<First>(call, x, rows);

  auto* const partials = static_cast<Partial*>(call.workspace.data);
  launch(call.queue,
         {dim3(static_cast<unsigned>(blocks), grid_extent_beyond_x(rows.count)), kMultipleThreads,
          kSharedBytes},
         multiple_kernel<First>, x, Target{partials, DType{}, true}, rows);
  launch_block_rows<Second>(call, partials, {rows.count, blocks});
}

template <class Reducer>
void launch_row(const Call& call, const typename Reducer::Element* x) {
  constexpr int kPack = kWidestPack<typename Reducer::Element>;
  const ContiguousRows rows{call.problem.rows(), call.problem.columns};
  const std::int64_t packs = divide_up(rows.columns, kPack);
  if (packs > kWarpRowPacks) return launch_block_rows<Reducer>(call, x, rows);

  // A lane for every pack. Rows that are no whole number of packs begin at any phase and are partly
  // read one by one, which wants more lanes.
  const std::int64_t wanted = rows.columns % kPack == 0 ? packs : divide_up(rows.columns, 2);
  int lanes_log2 = 0;
  while (lanes_log2 < 5 && (1 << lanes_log2) < wanted) ++lanes_log2;
  const std::int64_t rows_per_block = kRowThreads >> lanes_log2;
  launch(call.queue, {grid_extent(divide_up(rows.count, rows_per_block)), kRowThreads},
         row_kernel<Reducer>, x, call.result, rows, lanes_log2);
}

// Columns

template <class Reducer, int kPack>
void launch_column_part(const Queue& queue, const typename Reducer::Element* x, const Target& y,
                        const StridedRows& rows, std::int64_t parts) {
  const std::int64_t packs = rows.outer * (rows.inner / kPack);
  launch(queue,
         {dim3(grid_extent(divide_up(packs, rows.lanes)), static_cast<unsigned>(parts)),
          kColumnThreads, sizeof(ColumnStorage<Reducer, kPack>)},
         column_kernel<Reducer, kPack>, x, y, rows);
}

// Up to 32 lanes lie along `inner`, as memory is read in lines. More take further rows where the
// columns are too few for the threads below them.
int column_lanes(std::int64_t packs_per_outer, std::int64_t columns) {
  int lanes = power_of_two_from(packs_per_outer, kWarpSize);
  while (lanes < kColumnThreads && 4 * (kColumnThreads / lanes) > columns) lanes *= 2;
  return lanes;
}

template <Function kFunction, class T, class A, int kPack>
void launch_column_packs(const Call& call, const T* x) {
  using First = Reducer<kFunction, T, A>;
  using Partial = typename First::Partial;
  using Second = Reducer<kFunction, Partial, A>;
  const auto& [function, dtype, result, outer, columns, inner] = call.problem;
  const int lanes = column_lanes(inner / kPack, columns);
  const StridedRows rows{outer, columns, inner, lanes};

  // Twice what fits at a time: blocks of unlike speed then share the work evenly.
  const std::int64_t resident =
      std::int64_t{call.queue.device->multiprocessors} *
      resident_blocks(call.queue, column_kernel<First, kPack>, kColumnThreads,
                      sizeof(ColumnStorage<First, kPack>));
  const std::int64_t tiles = divide_up(outer * (inner / kPack), lanes);
  const std::int64_t parts = std::min({2 * resident / tiles, divide_up(columns, kSplitColumns),
                                       kMaxSplits, workspace_partials<Partial>(call)});
  if (parts <= 1) {
    return launch_column_part<First, kPack>(call.queue, x, call.result, rows, 1);
  }
  auto* const partials = static_cast<Partial*>(call.workspace.data);
  launch_column_part<First, kPack>(call.queue, x, Target{partials, DType{}, true}, rows, parts);
  const StridedRows left{outer, parts, inner, column_lanes(inner, parts)};
  launch_column_part<Second, 1>(call.queue, partials, call.result, left, 1);
}

template <Function kFunction, class T, class A>
void launch_column(const Call& call, const T* x) {
  constexpr int kPack = kWidestPack<T>;
  const bool packed = call.problem.inner % kPack == 0;
  // Addresses are not known while preparing, so both kernels a call may need are loaded then.
  if (call.queue.preparing || !(packed && is_aligned<kPack>(x))) {
    launch_column_packs<kFunction, T, A, 1>(call, x);
    if (!call.queue.preparing) return;
  }
  if (packed) launch_column_packs<kFunction, T, A, kPack>(call, x);
}

// Dispatch

template <Function kFunction, class T, class A>
void launch_typed(Algorithm algorithm, const Call& call, const void* data) {
  const T* const x = static_cast<const T*>(data);
  switch (algorithm) {
    case Algorithm::kMultiple:
      return launch_multiple<kFunction, T, A>(call, x);
    case Algorithm::kRow:
      return launch_row<Reducer<kFunction, T, A>>(call, x);
    case Algorithm::kColumn:
      return launch_column<kFunction, T, A>(call, x);
    default:
      if constexpr (!is_arg(kFunction)) {
        launch_ladder<kFunction, T, A>(algorithm, call, x, call.problem.columns, call.workspace);
      }
  }
}

// Sums and products of integers wrap around, and so are computed in unsigned types, of at least
// the width of the result; what remains after truncation does not depend on the sign.
template <Function kFunction>
void launch_modular(Algorithm algorithm, const Call& call, const void* x) {
  dispatch<std::int8_t, std::uint8_t, std::int16_t, std::uint16_t, std::int32_t, std::uint32_t,
           std::int64_t, std::uint64_t>(call.problem.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if constexpr (sizeof(T) == 8) {
      return launch_typed<kFunction, std::uint64_t, std::uint64_t>(algorithm, call, x);
    } else if constexpr (sizeof(T) == 4) {
      if (info(call.problem.result).bytes <= 4) {
        return launch_typed<kFunction, std::uint32_t, std::uint32_t>(algorithm, call, x);
      }
    }
    launch_typed<kFunction, T, std::uint64_t>(algorithm, call, x);
  });
}

// Integers are compared in 32 or 64 bits of their own sign.
template <Function kFunction>
void launch_ordered(Algorithm algorithm, const Call& call, const void* x) {
  dispatch<std::int8_t, std::uint8_t, std::int16_t, std::uint16_t, std::int32_t, std::uint32_t,
           std::int64_t, std::uint64_t>(call.problem.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using Narrow = std::conditional_t<std::is_signed_v<T>, std::int32_t, std::uint32_t>;
    launch_typed<kFunction, T, std::conditional_t<sizeof(T) == 8, T, Narrow>>(algorithm, call, x);
  });
}

template <Function kFunction>
void launch_function(Algorithm algorithm, const Call& call, const void* x) {
  switch (call.problem.dtype) {
    case DType::kFloat16:
    case DType::kBFloat16:
    case DType::kFloat32:
    case DType::kFloat64:
      return dispatch<__half, __nv_bfloat16, float, double>(call.problem.dtype, [&](auto type) {
        using T = typename decltype(type)::type;
        launch_typed<kFunction, T, Accumulator<T>>(algorithm, call, x);
      });
    default:
      if constexpr (kFunction == Function::kSum || kFunction == Function::kProd) {
        return launch_modular<kFunction>(algorithm, call, x);
      } else {
        return launch_ordered<kFunction>(algorithm, call, x);
      }
  }
}

}  // namespace

void launch(const Plan& plan, const Problem& problem, const void* x, void* y, Workspace workspace,
            const Queue& queue) {
  const Call call{queue, problem, Target{y, problem.result, false}, workspace};
  switch (problem.function) {
    case Function::kSum:
      return launch_function<Function::kSum>(plan.algorithm, call, x);
    case Function::kProd:
      return launch_function<Function::kProd>(plan.algorithm, call, x);
    case Function::kMax:
      return launch_function<Function::kMax>(plan.algorithm, call, x);
    case Function::kMin:
      return launch_function<Function::kMin>(plan.algorithm, call, x);
    case Function::kArgMax:
      return launch_function<Function::kArgMax>(plan.algorithm, call, x);
    case Function::kArgMin:
      return launch_function<Function::kArgMin>(plan.algorithm, call, x);
  }
}

}  // namespace reduce
}  // namespace JAX_GPUOPS_NAMESPACE
