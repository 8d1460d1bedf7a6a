// softmax, algorithm `split`, for functions without results for the elements: only the state of a
// row is needed. So blocks hold slices in registers unless these are too long, and in the second
// launch one warp per row combines the states:
//
//     launch 1: block (row, slice) reduces its slice          -> workspace[row][slice]
//     launch 2: warp (row) combines workspace[row][*]
//
// The second launch starts while the first one still runs (programmatic dependent launch). That
// saves only microseconds, but the launches take no more.
#pragma once

#include "core/ptx/early_launch.cuh"
#include "core/shared.h"
#include "softmax/block.cuh"
#include "softmax/launcher.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {

// For slices that fit in registers, `piece` packs per warp. The grid has rows along x and slices
// along y, since a division takes longer than a load.
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

// A warp combines the states of a row. The workspace is not __restrict__, since the kernel that
// writes it may still run when this one starts.
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

template <class T, RowLayout kLayout>
void launch_split_reduce_held_of(const Call& call) {
  using Fragment = FragmentOf<ForwardFunctions, T, kMostBlockPacks, kLayout>;
  using State = typename Fragment::State;
  launch_kernel<split_reduce_held_kernel<Fragment, kBlockThreads, kBlocksResident>>(
      call.queue, launch_shape(call, sizeof(BlockStorage<State>)), kernel_args<T>(call),
      call.config.slice, call.config.piece, static_cast<State*>(call.buffers.workspace));
}

template <class T>
void launch_split_reduce_held(const Call& call) {
  dispatch_packed_layout(call, [&](auto layout) { launch_split_reduce_held_of<T, layout>(call); });
}

template <class T>
void launch_split_combine(const Call& call) {
  const Config& config = call.config;
  using State = ForwardFunctions::State<T>;
  LaunchShape shape{grid_extent(config.finish_blocks),
                    static_cast<unsigned>(config.finish_threads)};
  shape.early = true;
  launch_kernel<split_combine_kernel<T, State>>(call.queue, shape, kernel_args<T>(call),
                                                config.slices,
                                                static_cast<const State*>(call.buffers.workspace));
}

}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
