// Algorithm `column`: the elements of a row lie `inner` apart.
//
// The lanes of a warp take neighbouring rows, whose elements of one column are neighbours in
// memory, kPack rows a lane; the threads of a block that have the same lane number share the
// columns of these rows, and combine in shared memory at the end.
//
//                 lane 0    lane 1    lane 2   ...
//     column 0:   depth 0   depth 0   depth 0
//     column 1:   depth 1   depth 1   depth 1
//     ...
//     column d:   depth 0   depth 0   depth 0        d = threads / lanes
//
// Where there are fewer rows than keep the GPU busy, blocks with different blockIdx.y take parts of
// the columns and leave partials, again `inner` apart, for combine.cuh.
#pragma once

#include "core/ptx/early_launch.cuh"
#include "core/shared.h"
#include "reduce/instance.cuh"
#include "reduce/reducer.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace reduce {

struct StridedRows {
  std::int64_t outer;
  std::int64_t columns;
  std::int64_t inner;
  int lanes;  // a power of two
};

template <class Reducer, int kPack>
struct ColumnStorage {
  typename Reducer::Partial upper[kPack][kColumnThreads / 2];
};

template <class Reducer, int kPack, class Masks>
__global__ void __launch_bounds__(kColumnThreads)
    column_kernel(const typename Reducer::Element* __restrict__ x, Target y, StridedRows rows,
                  Masks masks) {
  using Element = typename Reducer::Element;
  using Value = Accumulator<Element>;
  auto& upper = shared<ColumnStorage<Reducer, kPack>>().upper;
  const typename Reducer::Combine combine;
  const typename Reducer::Reader read(y);
  const int lane = threadIdx.x % rows.lanes;
  const int depth = threadIdx.x / rows.lanes;
  const int depths = kColumnThreads / rows.lanes;

  const std::int64_t packs_per_outer = rows.inner / kPack;
  const std::int64_t packs = rows.outer * packs_per_outer;
  const std::int64_t part = (rows.columns + gridDim.y - 1) / gridDim.y;
  const std::int64_t begin = blockIdx.y * part;
  const std::int64_t end = begin + part < rows.columns ? begin + part : rows.columns;

  // The loop's bounds are those of the block, so that all threads reach every barrier.
  for (std::int64_t first = std::int64_t{blockIdx.x} * rows.lanes; first < packs;
       first += std::int64_t{gridDim.x} * rows.lanes) {
    const std::int64_t pack = first + lane;
    const std::int64_t outer = pack / packs_per_outer;
    const std::int64_t inner = pack % packs_per_outer * kPack;

    // Fold the thread's columns.
    typename Reducer::Fold fold[kPack];
    if (pack < packs) {
      const Element* const row = x + outer * rows.columns * rows.inner + inner;
      std::int64_t column = begin + depth;
      Value value[kLoads][kPack] = {};  // g++ does not see that what is not loaded is not read
      typename Masks::Row mask[kPack];
      unsigned kept[kPack] = {};  // of each row the columns that take part, bit u for value[u]
      if constexpr (Masks::kMasks) {
#pragma unroll
        for (int i = 0; i < kPack; ++i) mask[i] = masks.of(outer * rows.inner + inner + i);
      }
      const auto load_column = [&](int u) {
        read.load(row + (column + u * depths) * rows.inner, value[u]);
        if constexpr (Masks::kMasks) {
#pragma unroll
          for (int i = 0; i < kPack; ++i) {
            const unsigned keeps = mask[i](column + u * depths) ? 1u << u : 0;
            kept[i] = (kept[i] & ~(1u << u)) | keeps;
          }
        }
      };
      const auto fold_columns = [&](unsigned present) {  // again a bit for each value[u]
#pragma unroll
        for (int i = 0; i < kPack; ++i) {
          Value of_row[kLoads];
#pragma unroll
          for (int u = 0; u < kLoads; ++u) of_row[u] = value[u][i];
          fold[i].add_kept(of_row, Masks::kMasks ? present & kept[i] : present, column, depths);
        }
      };
      for (; column + (kLoads - 1) * depths < end; column += kLoads * depths) {
#pragma unroll
        for (int u = 0; u < kLoads; ++u) load_column(u);
        fold_columns((1u << kLoads) - 1);
      }
      if (column < end) {
        unsigned present = 0;
#pragma unroll
        for (int u = 0; u < kLoads; ++u) {
          if (column + u * depths >= end) continue;
          load_column(u);
          present |= 1u << u;
        }
        fold_columns(present);
      }
    }

    let_next_kernel_start();

    // Combine over the depths: the upper half hands its partials to the lower, and again.
    typename Reducer::Partial partial[kPack];
#pragma unroll
    for (int i = 0; i < kPack; ++i) partial[i] = fold[i].value();
    for (int half = depths / 2; half > 0; half /= 2) {
      const int slot = static_cast<int>(threadIdx.x) - half * rows.lanes;
      if (depth >= half && depth < 2 * half) {
#pragma unroll
        for (int i = 0; i < kPack; ++i) upper[i][slot] = partial[i];
      }
      __syncthreads();
      if (depth < half) {
#pragma unroll
        for (int i = 0; i < kPack; ++i) {
          partial[i] = combine(partial[i], upper[i][threadIdx.x]);
        }
      }
      __syncthreads();
    }

    if (depth == 0 && pack < packs) {
      const std::int64_t result = (outer * gridDim.y + blockIdx.y) * rows.inner + inner;
#pragma unroll
      for (int i = 0; i < kPack; ++i) Reducer::store(y, result + i, partial[i]);
    }
  }
}

template <class Instance>
void launch_column(const Call& call) {
  using First = typename Instance::First;
  const auto& [queue, config, problem, buffers] = call;
  const StridedRows rows{problem.outer, problem.columns, problem.inner, config.lanes};
  const Target to = config.parts == 1 ? call.result() : Instance::partial_target(call);
  dispatch_value<1, kWidestPack<typename Instance::Element>>(config.pack, [&](auto pack) {
    constexpr int kPack = decltype(pack)::value;
    const std::int64_t packs = rows.outer * (rows.inner / kPack);
    const dim3 grid(grid_extent(divide_up(packs, rows.lanes)),
                    static_cast<unsigned>(call.config.parts));
    launch_kernel<column_kernel<First, kPack, typename Instance::Masks>>(
        call.queue, {grid, kColumnThreads, sizeof(ColumnStorage<First, kPack>)},
        Instance::elements(call), to, rows, Instance::masks(call));
  });
}

}  // namespace reduce
}  // namespace JAX_GPUOPS_NAMESPACE
