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

#include "softmax/block.cuh"

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

// One lane sends for a warp's piece of a row's operands: as many packs from `begin` on as the lanes
// hold, as far as they come before `end`, lie whole in the array and are read at all. The operands
// come one behind the other.
template <class Share>
__device__ __forceinline__ void copy_packs(const Tensors<typename Share::Element>& tensors,
                                           const Row<typename Share::Element, Share::kKind>& row,
                                           std::int64_t begin, std::int64_t end,
                                           typename Share::Element* to, CopyBarrier* copied) {
  constexpr int kPack = Share::kPack;
  constexpr int kPiece = kWarpSize * Share::kHeld;
  const std::int64_t first = row.begin - row.phase + begin * kPack;
  std::int64_t packs = (tensors.size - first) / kPack;
  if (packs > end - begin) packs = end - begin;
  if (packs > kPiece) packs = kPiece;
  if constexpr (kHasMask<Share::kKind>) {
    const std::int64_t read = (row.selection.readable() + kPack - 1) / kPack - begin;
    if (packs > read) packs = read;
  }
  const auto bytes = static_cast<unsigned>(packs > 0 ? packs * 16 : 0);
  announce(copied, Share::kOperands * bytes);
  if (bytes == 0) return;
#pragma unroll
  for (int o = 0; o < Share::kOperands; ++o) {
    copy_bulk(to + o * kPiece * kPack, Share::operand(tensors, o) + first, bytes, copied);
  }
}

template <class State>
struct alignas(kSharedAlignment) SliceStorage {
  BlockStorage<State> own;
  CopyBarrier copied[kSliceStretches][kSliceThreads / kWarpSize];
};

// For functions with results for the elements. A slice has `size` packs, in kSliceStretches
// stretches, of each of which a warp has a piece.
//
// Of their time, the warps spend 45 % waiting for other blocks' states and 11 % for loads (ncu,
// rows of 4 MB): the slowest of 60 blocks is late. What was tried against it, in parts of what a
// copy does, which is 0.76 for 100 rows of 1M floats: to reduce the next row while states are on
// their way, with slices half as long, 0.68, since then it is the loads that are late (at 1 MiB a
// row 0.85, where clusters do 0.91); slices in registers and the next row's on their way to shared
// memory, 0.63; half as many bytes again in registers, 0.72.
template <class Share>
__global__ void __launch_bounds__(kSliceThreads, kSlicesResident)
    split_kernel(const __grid_constant__ Tensors<typename Share::Element> tensors, int slices,
                 std::int64_t size, std::uint64_t* slots) {
#if JAX_GPUOPS_HAS_CLUSTERS
  using T = typename Share::Element;
  using State = typename Share::State;
  constexpr int kWarps = kSliceThreads / kWarpSize;
  constexpr int kPiece = kWarpSize * Share::kHeld;  // packs
  constexpr int kPieceElements = Share::kOperands * kPiece * Share::kPack;
  auto& storage = shared<SliceStorage<State>>();
  T* const memory = reinterpret_cast<T*>(&storage + 1);
  const Exponents<T> exponents(tensors.function, tensors.scale);
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  const int group = blockIdx.x / slices;
  const int groups = gridDim.x / slices;
  const int rank = blockIdx.x - group * slices;
  Board<State> board(slots + std::int64_t{2} * group * slices * Board<State>::kWords, slices, rank);

  const auto copied = [&](int stretch) { return &storage.copied[stretch][warp]; };
  const auto copy = [&](int stretch) {
    return memory + (stretch * kWarps + warp) * kPieceElements;
  };
  const auto first_pack = [&](const Part<Share>& part, int stretch) {
    return part.begin + (stretch * kWarps + warp) * kPiece;
  };
  const auto packs = [&](const Part<Share>& part, int stretch) {
    const std::int64_t first = first_pack(part, stretch);
    const std::int64_t end = first + kPiece < part.end ? first + kPiece : part.end;
    return typename Share::Packs(tensors, part.row, first + lane, end, kWarpSize);
  };
  const auto request = [&](std::int64_t number, int stretch) {
    __syncwarp();  // all lanes have loaded what was there
    if (lane != 0 || number >= tensors.rows.count) return;
    const Part<Share> part(tensors, number, rank, size);
    copy_packs<Share>(tensors, part.row, first_pack(part, stretch), part.end, copy(stretch),
                      copied(stretch));
  };

  for (int s = 0; s < kSliceStretches; ++s) {
    if (lane == 0) initialise(copied(s));
    request(group, s);
  }
  unsigned phase = 0;
  for (std::int64_t number = group; number < tensors.rows.count; number += groups) {
    const Part<Share> part(tensors, number, rank, size);
    Running<State> running;
#pragma unroll 1
    for (int s = 0; s < kSliceStretches; ++s) {
      wait(copied(s), phase);
      Share share;
      share.load(tensors, packs(part, s), copy(s) + lane * Share::kPack);
      running.add(exponents, share.template reduce<1>(tensors));
    }
    State state = combine_lanes<kWarpSize>(exponents, running.value());
    state = board.combine(exponents, state, storage.own);
#pragma unroll 1
    for (int s = 0; s < kSliceStretches; ++s) {
      Share share;
      share.load(tensors, packs(part, s), copy(s) + lane * Share::kPack);
      share.write_fresh(tensors, packs(part, s), state);
      request(number + groups, s);
    }
    phase ^= 1;
  }
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
