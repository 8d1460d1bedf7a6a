// softmax, algorithm `split`: few rows, too long for the registers of a cluster, are divided into
// slices, each a block's work.
//
//     launch 1: block (row, slice) reduces its slice          -> workspace[row][slice]
//     launch 2: block (row, slice) combines workspace[row][*], reads its slice again, writes it
//
// Three passes over memory in place of two, but with the whole GPU on any number of rows. The
// second launch goes backwards: what the first one read last may still be in the L2 cache.
#pragma once

#include "softmax/block.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {

template <class Share, int kMostThreads, int kLeastBlocks>
__global__ void __launch_bounds__(kMostThreads, kLeastBlocks)
    split_reduce_kernel(const __grid_constant__ Tensors<typename Share::Element> tensors,
                        std::int64_t slices, std::int64_t size,
                        typename Share::State* __restrict__ workspace) {
  using T = typename Share::Element;
  using State = typename Share::State;
  auto& storage = shared<BlockStorage<State>>();
  const Exponents<T> exponents(tensors.function, tensors.scale);
  int turn = 0;
  for (std::int64_t unit = blockIdx.x; unit < tensors.rows.count * slices; unit += gridDim.x) {
    const LongPart<Share> part(tensors, unit / slices, unit % slices, size);
    const State seen = part.reduce(exponents, part.end, State::none());
    const State state = combine_block(exponents, seen, storage.slots[turn]);
    if (threadIdx.x == 0) workspace[unit] = state;
    turn ^= 1;
  }
}

template <class Share, int kMostThreads, int kLeastBlocks>
__global__ void __launch_bounds__(kMostThreads, kLeastBlocks)
    split_finish_kernel(const __grid_constant__ Tensors<typename Share::Element> tensors,
                        std::int64_t slices, std::int64_t size,
                        const typename Share::State* __restrict__ workspace) {
  using T = typename Share::Element;
  using State = typename Share::State;
  auto& storage = shared<BlockStorage<State>>();
  const Exponents<T> exponents(tensors.function, tensors.scale);
  const std::int64_t parts = tensors.y == nullptr ? 1 : slices;
  const std::int64_t units = tensors.rows.count * parts;
  int turn = 0;
  for (std::int64_t unit = units - 1 - blockIdx.x; unit >= 0; unit -= gridDim.x) {
    const std::int64_t number = unit / parts;
    State state = State::none();
    for (std::int64_t slice = threadIdx.x; slice < slices; slice += blockDim.x) {
      state = combined(exponents, state, workspace[number * slices + slice]);
    }
    state = combine_lanes<kWarpSize>(exponents, state);
    state = combine_block(exponents, state, storage.slots[turn]);
    if (tensors.y != nullptr) {
      const LongPart<Share> part(tensors, number, unit % parts, size);
      part.write_again(part.end, state);
    }
    if (unit % parts == 0 && threadIdx.x == 0) write_row(tensors, number, state);
    turn ^= 1;
  }
}

}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
