// From a plan to the launch of a production kernel; included once for each kind of share.
#pragma once

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <type_traits>

#include "core/integer.h"
#include "core/launch.h"
#include "softmax/block.cuh"
#include "softmax/cluster.cuh"
#include "softmax/column.cuh"
#include "softmax/instances.h"
#include "softmax/share.cuh"
#include "softmax/split.cuh"
#include "softmax/staged.cuh"
#include "softmax/strip.cuh"
#include "softmax/warp.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {

template <class T>
Tensors<T> make_tensors(const Problem& problem, double scale, const Buffers& buffers) {
  using A = Accumulator<T>;
  Tensors<T> tensors{};
  tensors.x = static_cast<const T*>(buffers.x);
  tensors.t = static_cast<const T*>(buffers.t);
  tensors.lse = static_cast<const A*>(buffers.lse);
  tensors.g = static_cast<const A*>(buffers.g);
  tensors.labels = buffers.labels;
  tensors.wide_labels = buffers.wide_labels;
  tensors.y = static_cast<T*>(buffers.y);
  tensors.row_results = {buffers.row_result, buffers.narrow_row_result};
  tensors.loss = static_cast<A*>(buffers.loss);
  tensors.function = problem.function;
  tensors.scale = static_cast<A>(scale);
  tensors.rows = {problem.rows(), problem.columns, problem.inner};
  tensors.mask = buffers.mask;
  tensors.queries = problem.queries;
  tensors.by_queries = Divisor(problem.queries);
  for (int d = 0; d < buffers.mask.dims; ++d) {
    tensors.by_mask_size[d] = Divisor(buffers.mask.size[d]);
  }
  const auto aligned = [](const void* array) {
    return reinterpret_cast<std::uintptr_t>(array) % 16 == 0;
  };
  tensors.size = problem.rows() * problem.columns;
  tensors.packed =
      problem.inner == 1 && aligned(buffers.x) && aligned(buffers.t) && aligned(buffers.y);
  return tensors;
}

// One call, for the launchers below.
template <class T>
struct Launch {
  const Plan& plan;
  const Problem& problem;
  Tensors<T> tensors;
  const Buffers& buffers;
  const Queue& queue;

  std::int64_t rows() const { return tensors.rows.count; }
};

template <Kind kKind>
using KindConstant = std::integral_constant<Kind, kKind>;

// True if the flags of a pack can be read at once, or are all the same.
template <class T>
bool mask_is_packed(const Mask& mask) {
  constexpr int kPack = kWidestPack<T>;
  if (mask.data == nullptr || mask.column_stride == 0) return true;
  bool packed = mask.column_stride == 1 && is_aligned<kPack>(mask.data);
  for (int d = 0; d < mask.dims; ++d) packed = packed && mask.stride[d] % kPack == 0;
  return packed;
}

// Calls run(KindConstant) for the kind of rows that the call has; while preparing, when addresses
// are not known, for all that it may have.
template <class T, class Run>
void for_kind_of_rows(const Launch<T>& call, Run&& run) {
  const Problem& problem = call.problem;
  const bool preparing = call.queue.preparing;
  if (call.tensors.packed || (preparing && problem.inner == 1)) {
    const bool even = problem.columns % kWidestPack<T> == 0;
    if (problem.masked || problem.queries != 0) {
      if (even && (mask_is_packed<T>(call.tensors.mask) || preparing)) {
        run(KindConstant<Kind::kMasked>{});
      }
      if (!even || !mask_is_packed<T>(call.tensors.mask) || preparing) {
        run(KindConstant<Kind::kAny>{});
      }
      return;
    }
    if (even) {
      run(KindConstant<Kind::kEven>{});
    } else {
      run(KindConstant<Kind::kRagged>{});
    }
  }
  if (!call.tensors.packed || preparing) run(KindConstant<Kind::kAny>{});
}

// Launches a kernel whose blocks, or clusters of them, each take a row at a time.
template <class T, class Kernel, class... Arguments>
void launch_on_rows(const Launch<T>& call, LaunchShape shape, Kernel kernel,
                    Arguments... arguments) {
  const std::int64_t most = std::numeric_limits<std::int32_t>::max() / shape.cluster;
  shape.grid = static_cast<unsigned>(std::min(call.rows(), most) * shape.cluster);
  launch(call.queue, shape, kernel, call.tensors, arguments...);
}

// Takes rows of kind kAny, whatever the plan says: these are slow to read in any way.
template <class Family, class T>
void launch_any(const Launch<T>& call) {
  using Share = typename Family::template Share<T, kAnyPacks, Kind::kAny>;
  launch_on_rows(call, {1, kBlockThreads, sizeof(BlockStorage<typename Share::State>)},
                 block_passing_kernel<Share, kBlockThreads, kBlocksResident>);
}

// for_kind_of_rows without kAny, for which it launches the kernel there is.
template <class Family, class T, class Run>
void for_packed_rows(const Launch<T>& call, Run&& run) {
  for_kind_of_rows(call, [&](auto kind) {
    if constexpr (kind == Kind::kAny) {
      launch_any<Family>(call);
    } else {
      run(kind);
    }
  });
}

// Calls f(std::integral_constant<int, i>) for the first table[i] that `matches`.
template <const auto& kTable, int kIndex = 0, class Matches, class F>
void find_instance(Matches&& matches, F&& f) {
  if constexpr (kIndex < std::extent_v<std::remove_reference_t<decltype(kTable)>>) {
    if (matches(kTable[kIndex])) return f(std::integral_constant<int, kIndex>{});
    find_instance<kTable, kIndex + 1>(matches, f);
  } else {
    throw std::logic_error("no kernel was built for the shape of the plan");
  }
}

template <template <class, int, Kind> class Share, Kind kKind, const auto& kTable, class T,
          class Matches>
void launch_warp_from(const Launch<T>& call, Matches&& matches) {
  find_instance<kTable>(matches, [&](auto index) {
    constexpr WarpInstance kInstance = kTable[index];
    constexpr int kRows = kWarpBlockThreads / kInstance.lanes * kInstance.rows;
    launch(call.queue, {grid_extent(divide_up(call.rows(), kRows)), kWarpBlockThreads},
           warp_kernel<Share<T, kInstance.packs, kKind>, kInstance.lanes, kInstance.rows>,
           call.tensors);
  });
}

template <class Family, class T>
void launch_warp(const Launch<T>& call) {
  const Shape& shape = call.plan.shape;
  const auto planned = [&](const WarpInstance& each) {
    return each.lanes == shape.lanes && each.packs == shape.packs && each.rows == shape.rows;
  };
  const auto fits = [&](const WarpInstance& each) {
    return each.lanes * packs_held(call.problem.function, each.packs) >= most_packs(call.problem);
  };
  for_packed_rows<Family>(call, [&](auto kind) {
    if constexpr (kind != Kind::kEven) {
      launch_warp_from<Family::template Share, kind, kRaggedWarpInstances>(call, fits);
    } else if (!shape.small) {
      launch_warp_from<Family::template Share, kind, kWarpInstances>(call, planned);
    } else {
      if constexpr (!Family::kTangent) {
        if (call.problem.function == Function::kSoftmax) {
          return launch_warp_from<Softmax, Kind::kSmall, kSmallWarpInstances>(call, planned);
        }
      }
      launch_warp_from<Family::template Share, Kind::kSmall, kSmallWarpInstances>(call, planned);
    }
  });
}

template <class Family, class T>
void launch_staged(const Launch<T>& call) {
  const Shape& shape = call.plan.shape;
  find_instance<kStagedInstances>(
      [&](const StagedInstance& each) {
        return each.lanes == shape.lanes && each.per_lane == shape.packs;
      },
      [&](auto index) {
        constexpr StagedInstance kInstance = kStagedInstances[index];
        const std::size_t bytes = sizeof(StagedStorage) + static_cast<std::size_t>(shape.rows) *
                                                              call.problem.columns * sizeof(T) *
                                                              (Family::kTangent ? 2 : 1);
        launch(
            call.queue, {grid_extent(divide_up(call.rows(), shape.rows)), kStagedThreads, bytes},
            staged_kernel<T, Family::kTangent, kInstance.lanes, kInstance.per_lane, kInstance.sure>,
            call.tensors, shape.rows);
      });
}

// How many packs each of `parts` parts has at most: whole lines of 128 bytes.
inline std::int64_t packs_of_part(std::int64_t packs, std::int64_t parts) {
  return divide_up(divide_up(packs, parts), kPacksOfLine) * kPacksOfLine;
}

inline int piece_of_warp(std::int64_t packs, int threads) {
  return static_cast<int>(packs_of_part(packs, threads / kWarpSize));
}

template <template <class, int, Kind> class ShareOf, int kPacks, Kind kKind, class T>
void launch_block_of(const Launch<T>& call) {
  using Share = ShareOf<T, kPacks, kKind>;
  const int threads = call.plan.shape.threads;
  launch_on_rows(call,
                 {1, static_cast<unsigned>(threads), sizeof(BlockStorage<typename Share::State>)},
                 block_kernel<Share, kBlockThreads, kBlocksResident>,
                 piece_of_warp(most_packs(call.problem), threads));
}

template <template <class, int, Kind> class ShareOf, Kind kKind, const auto& kTable, class T>
void launch_block_from(const Launch<T>& call) {
  find_instance<kTable>([&](int packs) { return packs == call.plan.shape.packs; },
                        [&](auto index) { launch_block_of<ShareOf, kTable[index], kKind>(call); });
}

template <template <class, int, Kind> class ShareOf, Kind kKind, int kPacks, class T>
void launch_small_block_of(const Launch<T>& call) {
  launch_on_rows(call,
                 {1, static_cast<unsigned>(call.plan.shape.threads),
                  sizeof(typename SmallBlock<Accumulator<T>>::Storage)},
                 small_block_kernel<ShareOf<T, kPacks, kKind>>);
}

template <class Family, class T>
void launch_small_block(const Launch<T>& call) {
  constexpr int kOperands = Family::kTangent ? 2 : 1;
  for_packed_rows<Family>(call, [&](auto kind) {
    if constexpr (kind != Kind::kEven) {
      launch_small_block_of<Family::template Share, kind, kMostSmallBlockPacks * kOperands>(call);
    } else {
      find_instance<kSmallBlockPacks>(
          [&](int packs) { return packs == call.plan.shape.packs; },
          [&](auto index) {
            constexpr int kPacks = kSmallBlockPacks[index];
            if constexpr (!Family::kTangent) {
              if (call.problem.function == Function::kSoftmax) {
                return launch_small_block_of<Softmax, Kind::kSmall, kPacks>(call);
              }
            }
            launch_small_block_of<Family::template Share, Kind::kSmall, kPacks * kOperands>(call);
          });
    }
  });
}

template <class Family, class T>
void launch_block(const Launch<T>& call) {
  const Shape& shape = call.plan.shape;
  if (shape.small) return launch_small_block<Family>(call);
  for_packed_rows<Family>(call, [&](auto kind) {
    if (!shape.whole) {
      using Share = typename Family::template Share<T, kPassingPacks, kind>;
      launch_on_rows(
          call,
          {1, static_cast<unsigned>(shape.threads), sizeof(BlockStorage<typename Share::State>)},
          block_passing_kernel<Share, kBlockThreads, kBlocksResident>);
    } else {
      if constexpr (Family::kTangent) {
        launch_block_of<Family::template Share, kMostBlockPacks, kind>(call);
      } else if constexpr (kind == Kind::kRagged) {
        launch_block_from<Family::template Share, kind, kRaggedBlockPacks>(call);
      } else {
        launch_block_from<Family::template Share, kind, kBlockPacks>(call);
      }
    }
  });
}

template <class T>
bool is_plain_softmax(const Launch<T>& call) {
  return call.problem.function == Function::kSoftmax && call.tensors.scale == 1;
}

#ifndef JAX_GPUOPS_INTERPRET
template <template <class, int, Kind> class ShareOf, Kind kKind, class T>
void launch_cluster_of(const Launch<T>& call) {
  using Share = ShareOf<T, kClusterPacks, kKind>;
  const Shape& shape = call.plan.shape;
  const std::int64_t size = packs_of_part(most_packs(call.problem), shape.cluster);
  const LaunchShape clusters{1, static_cast<unsigned>(shape.threads),
                             sizeof(ClusterStorage<typename Share::State>), shape.cluster};
  launch_on_rows(call, clusters, cluster_kernel<Share>, shape.cluster, size,
                 piece_of_warp(size, shape.threads));
}

// Calls run(Type<Share>) with the shares of blocks that keep rows in shared memory.
template <class Family, int kPacks, Kind kKind, class T, class Run>
void for_share(const Launch<T>& call, Run&& run) {
  // For a shorter way from the state of a row to its results. 16-bit rows gain less, and ragged
  // ones nothing.
  if constexpr (!Family::kTangent && std::is_same_v<T, float>) {
    if (is_plain_softmax(call)) return run(Type<PlainSoftmax<T, kPacks, kKind>>{});
  }
  run(Type<typename Family::template Share<T, kPacks, kKind>>{});
}
#endif

template <class Family, class T>
void launch_cluster([[maybe_unused]] const Launch<T>& call) {
#ifndef JAX_GPUOPS_INTERPRET
  const Shape& shape = call.plan.shape;
  for_packed_rows<Family>(call, [&](auto kind) {
    if (!shape.whole) {
      return for_share<Family, slice_held(sizeof(T)), kind>(call, [&](auto type) {
        using Share = typename decltype(type)::type;
        using Storage = SliceStorage<typename Share::State>;
        const std::int64_t size = packs_of_part(most_packs(call.problem), shape.cluster);
        const LaunchShape blocks{1, kSliceThreads, sizeof(Storage) + std::size_t{16} * kSlicePacks,
                                 shape.cluster};
        launch_on_rows(call, blocks, cluster_slice_kernel<Share>, shape.cluster, size);
      });
    }
    // A kernel of its own: 64 registers are few for what other functions and scales need as well.
    // Even rows of 16-bit elements do with them, and take 1 % more time in such a kernel.
    if constexpr (!Family::kTangent && (kind == Kind::kRagged || std::is_same_v<T, float>)) {
      if (is_plain_softmax(call)) return launch_cluster_of<PlainSoftmax, kind>(call);
    }
    launch_cluster_of<Family::template Share, kind>(call);
  });
#else
  throw std::logic_error("a plan for the host has clusters");
#endif
}

template <class Family, class T>
void launch_waiting_split([[maybe_unused]] const Launch<T>& call) {
#ifndef JAX_GPUOPS_INTERPRET
  const std::int64_t slices = call.plan.shape.slices;
  for_packed_rows<Family>(call, [&](auto kind) {
    for_share<Family, ring_held(sizeof(T)), kind>(call, [&](auto type) {
      using Share = typename decltype(type)::type;
      using State = typename Share::State;
      constexpr int kWarps = ring_warps(sizeof(T));
      const std::int64_t size = packs_of_part(most_packs(call.problem), slices * kWarps);
      const std::int64_t groups =
          std::min<std::int64_t>(call.rows(), call.queue.device->multiprocessors / slices);
      const std::int64_t board = groups * board_bytes(slices, sizeof(State));
      if (groups < 1 || board > static_cast<std::int64_t>(call.buffers.workspace_bytes)) {
        throw std::invalid_argument("the GPU or the workspace is too small for algorithm 'split'");
      }
      auto* const memory = static_cast<std::uint64_t*>(call.buffers.workspace);
      clear(call.queue, memory, static_cast<std::size_t>(board));
      LaunchShape blocks{grid_extent(groups * slices),
                         static_cast<unsigned>(call.plan.shape.threads),
                         sizeof(RingStorage<State, kWarps>) +
                             std::size_t{kWarps} * Pieces<Share, kRingRows>::kBytes};
      blocks.together = true;
      launch(call.queue, blocks, split_ring_kernel<Share>, call.tensors, static_cast<int>(slices),
             size, memory);
    });
  });
#else
  throw std::logic_error("a plan for the host has blocks that wait for each other");
#endif
}

template <class Family, class T>
void launch_split(const Launch<T>& call) {
  using State = typename Family::template Share<T, kPassingPacks, Kind::kEven>::State;
  const Shape& shape = call.plan.shape;
  if (shape.waits) return launch_waiting_split<Family>(call);
  const std::int64_t fit = static_cast<std::int64_t>(call.buffers.workspace_bytes / sizeof(State)) /
                           std::max<std::int64_t>(1, call.rows());
  const std::int64_t slices = std::min(shape.slices, fit);
  if (slices < 1) throw std::invalid_argument("the workspace is too small for algorithm 'split'");
  const std::int64_t size = packs_of_part(most_packs(call.problem), slices);
  auto* const workspace = static_cast<State*>(call.buffers.workspace);
  const auto blocks = [&](std::int64_t count) {
    return LaunchShape{grid_extent(count), static_cast<unsigned>(shape.threads),
                       sizeof(BlockStorage<State>)};
  };
  for_packed_rows<Family>(call, [&](auto kind) {
    using Share = typename Family::template Share<T, kPassingPacks, kind>;
    const auto reduce = [&] {
      if constexpr (!Family::kTangent) {
        if (shape.whole) {
          using Held = typename Family::template Share<T, kMostBlockPacks, kind>;
          LaunchShape grid = blocks(call.rows());
          grid.grid.y = static_cast<unsigned>(slices);
          const int piece = piece_of_warp(size, shape.threads);
          return launch(call.queue, grid,
                        split_reduce_held_kernel<Held, kBlockThreads, kBlocksResident>,
                        call.tensors, size, piece, workspace);
        }
      }
      launch(call.queue, blocks(call.rows() * slices),
             split_reduce_kernel<Share, kBlockThreads, kBlocksResident>, call.tensors, slices, size,
             workspace);
    };
    reduce();
    if constexpr (!Family::kTangent) {
      if (reduces(call.problem.function)) {
        const std::int64_t count = divide_up(call.rows(), kFinishThreads / kWarpSize);
        LaunchShape grid{grid_extent(count), kFinishThreads};
        grid.early = true;
        return launch(call.queue, grid, split_combine_kernel<T, State>, call.tensors, slices,
                      static_cast<const State*>(workspace));
      }
    }
    launch(call.queue, blocks(call.rows() * slices),
           split_finish_kernel<Share, kBlockThreads, kBlocksResident>, call.tensors, slices, size,
           static_cast<const State*>(workspace));
  });
}

template <class Family, int kPack, int kHeld, bool kOnce, class T>
void launch_column_kernel(const Launch<T>& call) {
  using State = typename ColumnShare<T, Family::kTangent, kPack, kHeld>::State;
  const Shape& shape = call.plan.shape;
  const int rows = shape.lanes * kPack;
  const int groups = shape.threads / shape.lanes;
  const int slots = std::min(groups, shape.threads / kWarpSize);
  const dim3 grid(grid_extent(divide_up(call.problem.inner, rows)),
                  grid_extent_beyond_x(call.problem.outer));
  const LaunchShape blocks{grid, static_cast<unsigned>(shape.threads),
                           ColumnStorage<State>::bytes(slots, rows)};
  launch(call.queue, blocks, column_kernel<T, Family::kTangent, kPack, kHeld, kOnce>, call.tensors,
         shape.lanes, call.problem.outer, divide_up(call.problem.columns, std::int64_t{groups}));
}

#ifndef JAX_GPUOPS_INTERPRET
template <class Family, bool kPlainSoftmax, class T>
void launch_strips_of(const Launch<T>& call) {
  constexpr int kOperands = Family::kTangent ? 2 : 1;
  using State = std::conditional_t<Family::kTangent, Total<T>, MaxSum<T>>;
  const Shape& shape = call.plan.shape;
  const int copies = kOperands * (shape.steps - strip_held(Family::kTangent));
  const std::int64_t strips = divide_up(call.problem.inner, kStripRows<T>);
  const dim3 grid(grid_extent(strips * shape.cluster), grid_extent_beyond_x(call.problem.outer));
  const LaunchShape blocks{
      grid, kStripThreads,
      sizeof(StripStorage<State, kStripRows<T>>) + std::size_t{kStripWarps} * copies * kStripBytes,
      shape.cluster};
  launch(call.queue, blocks, strip_kernel<T, Family::kTangent, kPlainSoftmax>, call.tensors,
         shape.cluster, shape.steps);
}

template <class Family, class T>
void launch_strips(const Launch<T>& call) {
  // A scale is an instruction more for each element, twice.
  if constexpr (!Family::kTangent && std::is_same_v<T, float>) {
    if (is_plain_softmax(call)) return launch_strips_of<Family, true>(call);
  }
  launch_strips_of<Family, false>(call);
}
#endif

template <class Family, class T>
void launch_column(const Launch<T>& call) {
  constexpr int kPack = column_pack(sizeof(T));
  const Problem& problem = call.problem;
  const Shape& shape = call.plan.shape;
  const bool preparing = call.queue.preparing;
  const auto aligned = [&](auto size) {
    const Tensors<T>& tensors = call.tensors;
    return is_aligned<size>(tensors.x) && is_aligned<size>(tensors.y) &&
           is_aligned<size>(tensors.t);
  };
#ifndef JAX_GPUOPS_INTERPRET
  if (shape.steps != 0) {
    const bool takes_strips = aligned(std::integral_constant<int, kWidestPack<T>>{});
    if (preparing || takes_strips) launch_strips<Family>(call);
    if (!preparing && takes_strips) return;
  }
#endif
  const bool packed = problem.inner % kPack == 0 && !problem.masked &&
                      (preparing || aligned(std::integral_constant<int, kPack>{}));
  const auto run = [&](auto index, auto once) {
    constexpr int kHeld = Family::kTangent ? kColumnHeld[index] / 2 : kColumnHeld[index];
    if (packed) launch_column_kernel<Family, kPack, kHeld, once>(call);
    if (!packed || preparing) launch_column_kernel<Family, 1, kHeld, once>(call);
  };
  if (!shape.whole) {
    constexpr int kMost = std::extent_v<decltype(kColumnHeld)> - 1;
    return run(std::integral_constant<int, kMost>{}, std::false_type{});
  }
  find_instance<kColumnHeld>([&](int held) { return held == shape.packs; },
                             [&](auto index) { run(index, std::true_type{}); });
}

// Runs a production kernel of a Family, which has the share of its functions.
template <class Family>
void launch_production(const Plan& plan, const Problem& problem, double scale,
                       const Buffers& buffers, const Queue& queue) {
  dispatch<__half, __nv_bfloat16, float, double>(problem.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const Launch<T> call{plan, problem, make_tensors<T>(problem, scale, buffers), buffers, queue};
    switch (plan.algorithm) {
      case Algorithm::kWarp:
        return launch_warp<Family>(call);
      case Algorithm::kStaged:
        return launch_staged<Family>(call);
      case Algorithm::kBlock:
        return launch_block<Family>(call);
      case Algorithm::kCluster:
        return launch_cluster<Family>(call);
      case Algorithm::kSplit:
        return launch_split<Family>(call);
      case Algorithm::kColumn:
        return launch_column<Family>(call);
      default:
        throw std::logic_error("the plan's algorithm is none of production's");
    }
  });
}

}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
