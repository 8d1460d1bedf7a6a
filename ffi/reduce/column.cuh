// Algorithm `column`, for rows whose elements have the stride `inner`.
//
// The lanes of a warp take neighbouring rows, kPack rows per lane, so that the elements that they
// load of a column are contiguous in memory. The threads of a block that have the same lane number
// divide the columns of these rows, and combine their partials in shared memory at the end.
//
//                 lane 0    lane 1    lane 2   ...
//     column 0:   depth 0   depth 0   depth 0
//     column 1:   depth 1   depth 1   depth 1
//     ...
//     column d:   depth 0   depth 0   depth 0        d = threads / lanes
//
// If there are too few rows to keep the GPU busy, several blocks take parts of the columns. They
// form a cluster, and send each other their partials (cluster_parts.cuh):
//
//     cluster 0, rows of all lanes                                cluster 1, the rows after them
//     block 0: columns 0 ...      block 1: columns c / n ...      block 0: columns 0 ...
//
// or, if there are more parts than a cluster has blocks, they are blocks with different blockIdx.y,
// and write partials, again with the stride `inner`, for combine.cuh.
#pragma once

#include "core/integer.h"
#include "core/ptx/early_launch.cuh"
#include "core/shared.h"
#include "reduce/cluster_parts.cuh"
#include "reduce/instance.cuh"
#include "reduce/reducer.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace reduce {

// The host divides, since a small array would wait for divisions in the kernel.
struct StridedRows {
  std::int64_t packs;  // of neighbouring rows
  std::int64_t columns;
  std::int64_t inner;
  std::int64_t part;        // columns per block
  Divisor packs_per_outer;  // valid if `packs` is small enough for a Divisor
  int lanes_log2;
  // log2 of the blocks per cluster, which have parts of the columns; 0 without clusters.
  int cluster_log2;
};

struct PackPlace {
  std::int64_t outer;
  std::int64_t number;  // among the packs of the same outer
};

template <class Rows>
__device__ inline PackPlace place_of(std::int64_t pack, const Rows& rows, int pack_rows) {
  if (rows.packs <= std::numeric_limits<std::int32_t>::max()) {
    const Division place = rows.packs_per_outer.divide(static_cast<std::uint32_t>(pack));
    return {place.quotient, place.remainder};
  }
  const std::int64_t packs_per_outer = rows.inner / pack_rows;
  return {pack / packs_per_outer, pack % packs_per_outer};
}

// The partials of the lanes' rows, one depth after the other. The memory of ClusterParts follows.
template <class Reducer, int kPack>
struct alignas(8) ColumnStorage {
  using Partial = typename Reducer::Partial;
  Partial partials[spaced_partials(kColumnThreads * kPack, kPack, sizeof(Partial))];
};

template <class Reducer, int kPack>
constexpr std::size_t column_bytes(int lanes, int cluster) {
  const std::int64_t for_cluster =
      cluster_parts_bytes(lanes * kPack, cluster, sizeof(typename Reducer::Partial));
  return sizeof(ColumnStorage<Reducer, kPack>) + static_cast<std::size_t>(for_cluster);
}

template <class Reducer, int kPack, class Masks>
__global__ void __launch_bounds__(kColumnThreads)
    column_kernel(const typename Reducer::Element* __restrict__ x, StridedRows rows, Target y,
                  Masks masks) {
  using Element = typename Reducer::Element;
  using Partial = typename Reducer::Partial;
  using Elements = RegisterPack<Element, kPack>;
  constexpr int kPer = Elements::kPer;
  auto& storage = shared<ColumnStorage<Reducer, kPack>>();
  const typename Reducer::Reader read(y);
  const int thread = threadIdx.x;
  const int lanes = 1 << rows.lanes_log2;
  const int lane = thread & (lanes - 1);
  const int depth = thread >> rows.lanes_log2;
  const int depths = kColumnThreads >> rows.lanes_log2;
  const int cluster = JAX_GPUOPS_HAS_CLUSTERS ? 1 << rows.cluster_log2 : 1;

  const std::int64_t first = std::int64_t{blockIdx.x >> rows.cluster_log2} << rows.lanes_log2;
  const std::int64_t pack = first + lane;
  const int own_part = cluster > 1 ? blockIdx.x & (cluster - 1) : blockIdx.y;
  const std::int64_t begin = own_part * rows.part;
  const std::int64_t end = begin + rows.part < rows.columns ? begin + rows.part : rows.columns;

  ClusterParts<Reducer> cluster_parts(&storage + 1, cluster);
  if (cluster > 1) cluster_parts.begin();

  // Fold the thread's columns.
  typename Reducer::Fold fold[kPack];
  if (pack < rows.packs) {
    const PackPlace place = place_of(pack, rows, kPack);
    const std::int64_t inner = place.number * kPack;
    std::int64_t column = begin + depth;
    const Element* from = x + (place.outer * rows.columns + column) * rows.inner + inner;
    const std::int64_t step = depths * rows.inner;
    Elements elements[kLoads] = {};  // g++ does not see that only loaded packs are used
    typename Masks::Row mask[kPack];
    unsigned kept[kPack] = {};  // for each row, bit u: its element of elements[u] takes part
    if constexpr (Masks::kMasks) {
#pragma unroll
      for (int i = 0; i < kPack; ++i) mask[i] = masks.of(place.outer * rows.inner + inner + i);
    }
    const auto load_column = [&](int u) {
      elements[u] = read_pack<kPack>(from + u * step);
      if constexpr (Masks::kMasks) {
#pragma unroll
        for (int i = 0; i < kPack; ++i) {
          const unsigned keeps = mask[i](column + u * depths) ? 1u << u : 0;
          kept[i] = (kept[i] & ~(1u << u)) | keeps;
        }
      }
    };
    const auto fold_columns = [&](unsigned present) {  // bit u: elements[u] is loaded
#pragma unroll
      for (int r = 0; r < kPack / kPer; ++r) {  // one register at a time, so that few are live
        Accumulator<Element> value[kLoads][kPer];
#pragma unroll
        for (int u = 0; u < kLoads; ++u) {
          read.widen(RegisterPack<Element, kPer>{{elements[u].reg[r]}}, value[u]);
        }
#pragma unroll
        for (int e = 0; e < kPer; ++e) {
          const int i = r * kPer + e;
          Accumulator<Element> of_row[kLoads];
#pragma unroll
          for (int u = 0; u < kLoads; ++u) of_row[u] = value[u][e];
          fold[i].add_kept(of_row, Masks::kMasks ? present & kept[i] : present, column, depths);
        }
      }
    };
    for (; column + (kLoads - 1) * depths < end; column += kLoads * depths, from += kLoads * step) {
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

  // Combine over the depths.
  const SpacedPartials<Partial, kPack> of_block(storage.partials);
#pragma unroll
  for (int i = 0; i < kPack; ++i) of_block[thread * kPack + i] = fold[i].value();
  const int lanes_rows = lanes * kPack;
  combine_rows<Reducer>(of_block, lanes_rows, depths);

  // Store, or combine over the cluster.
  const std::int64_t packs_left = rows.packs - first;
  const int block_rows = packs_left < lanes ? static_cast<int>(packs_left) * kPack : lanes_rows;
  const std::int64_t first_row = first * kPack;
  if (cluster > 1) {
    const auto own = [&](int row) { return of_block[row]; };
    cluster_parts.combine(block_rows, own, [&](int row, const Partial& of_cluster) {
      Reducer::store(y, first_row + row, of_cluster);
    });
    return;
  }
#pragma unroll 1
  for (int row = thread; row < block_rows; row += kColumnThreads) {
    std::int64_t result = first_row + row;
    if (gridDim.y > 1) {
      result = (result / rows.inner * gridDim.y + blockIdx.y) * rows.inner + result % rows.inner;
    }
    Reducer::store(y, result, of_block[row]);
  }
}

// column_pack() of an instance.
template <class Instance>
inline constexpr int kColumnPack =
    column_pack(Instance::kFunction, sizeof(typename Instance::Element), Instance::Masks::kMasks);

template <class Instance>
void launch_column(const Call& call) {
  using First = typename Instance::OfShortRows;
  const Config& config = call.config;
  const Problem& problem = call.problem;
  const bool combines = config.parts == config.cluster;
  const Target to = combines ? call.result() : Instance::partial_target(call);
  dispatch_value<1, kColumnPack<Instance>>(config.pack, [&](auto pack) {
    constexpr int kPack = decltype(pack)::value;
    const std::int64_t packs_per_outer = problem.inner / kPack;
    const StridedRows rows{problem.outer * packs_per_outer,
                           problem.columns,
                           problem.inner,
                           divide_up(problem.columns, config.parts),
                           Divisor(packs_per_outer),
                           log2_of(config.lanes),
                           log2_of(config.cluster)};
    const dim3 grid(grid_extent(divide_up(rows.packs, config.lanes) * config.cluster),
                    static_cast<unsigned>(config.parts / config.cluster));
    launch_kernel<column_kernel<First, kPack, typename Instance::Masks>>(
        call.queue,
        {grid, kColumnThreads, column_bytes<First, kPack>(config.lanes, config.cluster),
         config.cluster},
        Instance::elements(call), rows, to, Instance::masks(call));
  });
}

}  // namespace reduce
}  // namespace JAX_GPUOPS_NAMESPACE
