// softmax, algorithm `split`: rows too long for the registers of a block or a cluster are divided
// into slices, each a block's work.
//
// It takes two launches. Where there are no elements to write, the second has a warp for a row:
//
//     launch 1: block (row, slice) reduces its slice          -> workspace[row][slice]
//     launch 2: block (row, slice) combines workspace[row][*], reads its slice again, writes it
//
// The second launch goes backwards: what the first one read last may still be in the L2 cache.
// hopper/split_pipelined.cuh reads rows once, where shared memory holds them.
#pragma once

#include "core/ptx/early_launch.cuh"
#include "core/shared.h"
#include "softmax/block.cuh"
#include "softmax/launcher.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {

// With slices that the registers hold, `piece` packs a warp. Blocks take rows along x and slices
// along y: a division takes longer than a load.
template <class Fragment, int kMostThreads, int kLeastBlocks>
__global__ void __launch_bounds__(kMostThreads, kLeastBlocks)
    split_reduce_held_kernel(const __grid_constant__ KernelArgs<typename Fragment::Element> args,
                             std::int64_t size, int piece,
                             typename Fragment::State* __restrict__ workspace) {
  using T = typename Fragment::Element;
  using State = typename Fragment::State;
  auto& storage = shared<BlockStorage<State>>();
  const Exponents<T> exponents(args.function, args.scale);
  int turn = 0;
  for (std::int64_t number = blockIdx.x; number < args.rows.count; number += gridDim.x) {
    const RowSlice<Fragment> row_slice(args, number, blockIdx.y, size);
    Fragment fragment;
    fragment.load(args, row_slice.held(piece));
    State state = fragment.template reduce<kWarpSize>(args);
    let_next_kernel_start();
    state = combine_block(exponents, state, storage.slots[turn]);
    if (threadIdx.x == 0) workspace[number * gridDim.y + blockIdx.y] = state;
    turn ^= 1;
  }
}

template <class Fragment, int kMostThreads, int kLeastBlocks>
__global__ void __launch_bounds__(kMostThreads, kLeastBlocks)
    split_reduce_kernel(const __grid_constant__ KernelArgs<typename Fragment::Element> args,
                        std::int64_t slices, std::int64_t size,
                        typename Fragment::State* __restrict__ workspace) {
  using T = typename Fragment::Element;
  using State = typename Fragment::State;
  auto& storage = shared<BlockStorage<State>>();
  const Exponents<T> exponents(args.function, args.scale);
  int turn = 0;
  for (std::int64_t unit = blockIdx.x; unit < args.rows.count * slices; unit += gridDim.x) {
    const TwoPassRow<Fragment> row_slice(args, unit / slices, unit % slices, size);
    const State seen = row_slice.reduce(exponents, row_slice.end, State::none());
    const State state = combine_block(exponents, seen, storage.slots[turn]);
    if (threadIdx.x == 0) workspace[unit] = state;
    turn ^= 1;
  }
}

template <class Fragment, int kMostThreads, int kLeastBlocks>
__global__ void __launch_bounds__(kMostThreads, kLeastBlocks)
    split_finish_kernel(const __grid_constant__ KernelArgs<typename Fragment::Element> args,
                        std::int64_t slices, std::int64_t size,
                        const typename Fragment::State* __restrict__ workspace) {
  using T = typename Fragment::Element;
  using State = typename Fragment::State;
  auto& storage = shared<BlockStorage<State>>();
  const Exponents<T> exponents(args.function, args.scale);
  int turn = 0;
  for (std::int64_t unit = args.rows.count * slices - 1 - blockIdx.x; unit >= 0;
       unit -= gridDim.x) {
    const std::int64_t number = unit / slices;
    State state = State::none();
    for (std::int64_t slice = threadIdx.x; slice < slices; slice += blockDim.x) {
      state = combined(exponents, state, workspace[number * slices + slice]);
    }
    state = combine_lanes<kWarpSize>(exponents, state);
    state = combine_block(exponents, state, storage.slots[turn]);
    const TwoPassRow<Fragment> row_slice(args, number, unit % slices, size);
    row_slice.write_again(row_slice.end, state);
    if (unit % slices == 0 && threadIdx.x == 0) write_row(args, number, state);
    turn ^= 1;
  }
}

// Without elements to write, a row's states are all there is to read: a warp takes them. They are
// not __restrict__, since the kernel that writes them may still run when this one starts.
template <class T, class State>
__global__ void __launch_bounds__(kFinishThreads)
    split_combine_kernel(const __grid_constant__ KernelArgs<T> args, std::int64_t slices,
                         const State* workspace) {
  constexpr int kWarps = kFinishThreads / kWarpSize;
  const Exponents<T> exponents(args.function, args.scale);
  const int lane = threadIdx.x % kWarpSize;
  const std::int64_t first = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarpSize;
  for (std::int64_t number = first; number < args.rows.count;
       number += std::int64_t{gridDim.x} * kWarps) {
    const RowResult<State> row_result(args, number, lane == 0);
    wait_for_kernel_before();
    State state = State::none();
    for (std::int64_t slice = lane; slice < slices; slice += kWarpSize) {
      state = combined(exponents, state, workspace[number * slices + slice]);
    }
    row_result.write(args, number, combine_lanes<kWarpSize>(exponents, state));
  }
}

template <class Functions, class T, RowLayout kLayout>
void launch_split_reduce(const Call& call, void* memory) {
  const Config& config = call.config;
  using Passing = FragmentOf<Functions, T, kPassingPacks, kLayout>;
  using State = typename Passing::State;
  const LaunchShape shape = launch_shape(call, sizeof(BlockStorage<State>));
  auto* const workspace = static_cast<State*>(memory);
  if constexpr (!Functions::kIsLinearInT) {
    if (config.packs == kMostBlockPacks) {
      using Held = FragmentOf<Functions, T, kMostBlockPacks, kLayout>;
      return launch_kernel<split_reduce_held_kernel<Held, kBlockThreads, kBlocksResident>>(
          call.queue, shape, kernel_args<T>(call), config.slice, config.piece, workspace);
    }
  }
  launch_kernel<split_reduce_kernel<Passing, kBlockThreads, kBlocksResident>>(
      call.queue, shape, kernel_args<T>(call), config.slices, config.slice, workspace);
}

template <class Functions, class T, RowLayout kLayout>
void launch_split_finish(const Call& call, const void* memory) {
  const Config& config = call.config;
  using Fragment = FragmentOf<Functions, T, kPassingPacks, kLayout>;
  using State = typename Fragment::State;
  const auto* const workspace = static_cast<const State*>(memory);
  LaunchShape shape{grid_extent(config.finish_blocks),
                    static_cast<unsigned>(config.finish_threads)};
  if constexpr (!Functions::kIsLinearInT) {
    if (reduces(call.problem.function)) {
      shape.early = true;
      return launch_kernel<split_combine_kernel<T, State>>(call.queue, shape, kernel_args<T>(call),
                                                           config.slices, workspace);
    }
  }
  shape.shared_bytes = sizeof(BlockStorage<State>);
  launch_kernel<split_finish_kernel<Fragment, kBlockThreads, kBlocksResident>>(
      call.queue, shape, kernel_args<T>(call), config.slices, config.slice, workspace);
}

template <class Functions, class T>
void launch_split(const Call& call) {
  void* const workspace = call.buffers.workspace;
  dispatch_value<RowLayout::kAligned, RowLayout::kMasked, RowLayout::kUnaligned,
                 RowLayout::kMaskedUnaligned>(call.config.layout, [&](auto layout) {
    launch_split_reduce<Functions, T, layout>(call, workspace);
    launch_split_finish<Functions, T, layout>(call, workspace);
  });
}

}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
