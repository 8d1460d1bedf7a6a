// softmax, algorithm `split`: rows too long for the registers of a block or a cluster are divided
// into slices, each a block's work.
//
// Rows that the shared memory of blocks running together holds are read once, if there is so much
// of them that the L2 cache does not hold it. A group of as many blocks as a row has slices stays
// on the GPU and takes row after row; each block posts the state of its slice in global memory, and
// waits for those of the others:
//
//     block 0    | read slice 0 | post, wait | write and send for the next row's slice 0 | ...
//     block 1    | read slice 1 | post, wait | write and send for the next row's slice 1 | ...
//
// Others take two launches. Where there are no elements to write, the second has a warp for a row:
//
//     launch 1: block (row, slice) reduces its slice          -> workspace[row][slice]
//     launch 2: block (row, slice) combines workspace[row][*], reads its slice again, writes it
//
// The second launch goes backwards: what the first one read last may still be in the L2 cache.
#pragma once

#include "core/ptx.cuh"
#include "core/shared.h"
#include "softmax/block.cuh"
#include "softmax/slice.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {

// ---- Rows that shared memory holds ----

#ifndef JAX_GPUOPS_INTERPRET
// Where the blocks of a group post the states of their slices: a word for each word of a state,
// with the number of the row in the group's work. Since a word comes with its number, no thread
// waits for its earlier writes, the last row's results among them, as it would to order them with a
// flag. (NCCL sends short messages this way.) A block that has all states of a row knows that the
// others have read those of the row before: two sets of slots, used in turns, are enough.
template <class State>
class Board {
 public:
  static constexpr int kWords = sizeof(State) / sizeof(std::uint32_t);

  // The slots of `blocks` blocks must be 0 at first.
  __device__ __forceinline__ Board(std::uint64_t* slots, int blocks, int rank)
      : slots_(slots), blocks_(blocks), rank_(rank) {}

  static std::size_t bytes(std::int64_t groups, std::int64_t blocks) {
    return sizeof(std::uint64_t) * static_cast<std::size_t>(groups * 2 * blocks * kWords);
  }

  // The state of all warps of the group, from that of the calling one.
  template <class T>
  __device__ __forceinline__ State combine(const Exponents<T>& exponents, State state,
                                           BlockStorage<State>& storage) {
    state = combine_block(exponents, state, storage.slots[0]);
    ++number_;
    std::uint64_t* const slots = slots_ + static_cast<int>(number_ % 2) * blocks_ * kWords;
    if (threadIdx.x == 0) {
      const Words words = __builtin_bit_cast(Words, state);
#pragma unroll
      for (int w = 0; w < kWords; ++w) post(slots + rank_ * kWords + w, words.word[w], number_);
    }
    State total = State::none();
    for (int slot = threadIdx.x; slot < blocks_; slot += blockDim.x) {
      Words words;
#pragma unroll
      for (int w = 0; w < kWords; ++w) words.word[w] = await(slots + slot * kWords + w, number_);
      total = combined(exponents, total, __builtin_bit_cast(State, words));
    }
    total = combine_lanes<kWarpSize>(exponents, total);
    return combine_block(exponents, total, storage.slots[1]);
  }

 private:
  struct Words {
    std::uint32_t word[kWords];
  };

  std::uint64_t* slots_;
  int blocks_;
  int rank_;
  std::uint32_t number_ = 0;
};

// For functions with results for the elements.
//
// Of their time, the warps spend 45 % waiting for other blocks' states and 11 % for loads (ncu,
// rows of 4 MB): the slowest of 60 blocks is late. What was tried against it, in parts of what a
// copy does, which is 0.76 for 100 rows of 1M floats: to reduce the next row while states are on
// their way, with slices half as long, 0.68, since then it is the loads that are late (at 1 MiB a
// row 0.85, where clusters do 0.95); slices in registers and the next row's on their way to shared
// memory, 0.63; half as many bytes again in registers, 0.72.
template <class Share>
__global__ void __launch_bounds__(kSliceThreads, kSlicesResident)
    split_kernel(const __grid_constant__ Tensors<typename Share::Element> tensors, int slices,
                 std::int64_t size, std::uint64_t* slots) {
#if JAX_GPUOPS_HAS_CLUSTERS
  using State = typename Share::State;
  using Storage = SliceStorage<BlockStorage<State>>;
  const Exponents<typename Share::Element> exponents(tensors.function, tensors.scale);
  const int group = blockIdx.x / slices;
  const int groups = gridDim.x / slices;
  const int rank = blockIdx.x - group * slices;
  auto& storage = shared<Storage>();
  Board<State> board(slots + std::int64_t{2} * group * slices * Board<State>::kWords, slices, rank);
  const Slices<Share> own(tensors, storage, rank, size);
  own.start(group);
  own.take(exponents, group, groups,
           [&](State state) { return board.combine(exponents, state, storage.own); });
#else
  __trap();
#endif
}
#endif

// ---- Longer rows ----

// With slices that the registers hold, `piece` packs a warp. Blocks take rows along x and slices
// along y: a division takes longer than a load.
template <class Share, int kMostThreads, int kLeastBlocks>
__global__ void __launch_bounds__(kMostThreads, kLeastBlocks)
    split_reduce_held_kernel(const __grid_constant__ Tensors<typename Share::Element> tensors,
                             std::int64_t size, int piece,
                             typename Share::State* __restrict__ workspace) {
  using T = typename Share::Element;
  using State = typename Share::State;
  auto& storage = shared<BlockStorage<State>>();
  const Exponents<T> exponents(tensors.function, tensors.scale);
  int turn = 0;
  for (std::int64_t number = blockIdx.x; number < tensors.rows.count; number += gridDim.x) {
    const Part<Share> part(tensors, number, blockIdx.y, size);
    Share share;
    share.load(tensors, part.held(piece));
    State state = share.template reduce<kWarpSize>(tensors);
    let_next_kernel_start();
    state = combine_block(exponents, state, storage.slots[turn]);
    if (threadIdx.x == 0) workspace[number * gridDim.y + blockIdx.y] = state;
    turn ^= 1;
  }
}

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
  int turn = 0;
  for (std::int64_t unit = tensors.rows.count * slices - 1 - blockIdx.x; unit >= 0;
       unit -= gridDim.x) {
    const std::int64_t number = unit / slices;
    State state = State::none();
    for (std::int64_t slice = threadIdx.x; slice < slices; slice += blockDim.x) {
      state = combined(exponents, state, workspace[number * slices + slice]);
    }
    state = combine_lanes<kWarpSize>(exponents, state);
    state = combine_block(exponents, state, storage.slots[turn]);
    const LongPart<Share> part(tensors, number, unit % slices, size);
    part.write_again(part.end, state);
    if (unit % slices == 0 && threadIdx.x == 0) write_row(tensors, number, state);
    turn ^= 1;
  }
}

// Without elements to write, a row's states are all there is to read: a warp takes them. They are
// not __restrict__, since the kernel that writes them may still run when this one starts.
template <class T, class State>
__global__ void __launch_bounds__(kFinishThreads)
    split_combine_kernel(const __grid_constant__ Tensors<T> tensors, std::int64_t slices,
                         const State* workspace) {
  constexpr int kWarps = kFinishThreads / kWarpSize;
  const Exponents<T> exponents(tensors.function, tensors.scale);
  const int lane = threadIdx.x % kWarpSize;
  const std::int64_t first = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarpSize;
  for (std::int64_t number = first; number < tensors.rows.count;
       number += std::int64_t{gridDim.x} * kWarps) {
    const RowResult<State> row_result(tensors, number, lane == 0);
    wait_for_kernel_before();
    State state = State::none();
    for (std::int64_t slice = lane; slice < slices; slice += kWarpSize) {
      state = combined(exponents, state, workspace[number * slices + slice]);
    }
    row_result.write(tensors, number, combine_lanes<kWarpSize>(exponents, state));
  }
}

}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
