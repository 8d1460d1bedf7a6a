// softmax, algorithm `split`: rows too long for the registers of a block or a cluster are divided
// into slices, one per block.
//
// It takes two launches:
//
//     launch 1: block (row, slice) reduces its slice          -> workspace[row][slice]
//     launch 2: block (row, slice) combines workspace[row][*], reads its slice again, writes it
//
// The second launch goes backwards: what the first one read last may still be in the L2 cache. For
// functions without results for the elements, the second launch, and the first for slices that fit
// in registers, are in split_rows.cuh.
//
// hopper/split_pipelined.cuh reads rows once, where shared memory holds them.
#pragma once

#include "core/shared.h"
#include "softmax/block.cuh"
#include "softmax/launcher.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {

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
    Fragment fragment;
    const State seen = row_slice.reduce(exponents, fragment);
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
    row_slice.write(state);
    if (unit % slices == 0 && threadIdx.x == 0) write_row(args, number, state);
    turn ^= 1;
  }
}

// Defined in split_rows.cuh, for functions without results for the elements; the first is for
// slices that fit in registers.
template <class T>
void launch_split_reduce_held(const Call& call);
template <class T>
void launch_split_combine(const Call& call);

template <class Functions, class T, RowLayout kLayout>
void launch_split_passing(const Call& call) {
  const Config& config = call.config;
  using Fragment = FragmentOf<Functions, T, kPassingPacks, kLayout>;
  using State = typename Fragment::State;
  auto* const workspace = static_cast<State*>(call.buffers.workspace);
  if (config.packs == kPassingPacks) {
    launch_kernel<split_reduce_kernel<Fragment, kBlockThreads, kBlocksResident>>(
        call.queue, launch_shape(call, sizeof(BlockStorage<State>)), kernel_args<T>(call),
        config.slices, config.slice, workspace);
  }
  if (reduces(call.problem.function)) return;
  const LaunchShape shape{grid_extent(config.finish_blocks),
                          static_cast<unsigned>(config.finish_threads),
                          sizeof(BlockStorage<State>)};
  launch_kernel<split_finish_kernel<Fragment, kBlockThreads, kBlocksResident>>(
      call.queue, shape, kernel_args<T>(call), config.slices, config.slice, workspace);
}

template <class Functions, class T>
void launch_split(const Call& call) {
  if (call.config.packs == kMostBlockPacks) launch_split_reduce_held<T>(call);
  dispatch_packed_layout(call,
                         [&](auto layout) { launch_split_passing<Functions, T, layout>(call); });
  if (reduces(call.problem.function)) launch_split_combine<T>(call);
}

}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
