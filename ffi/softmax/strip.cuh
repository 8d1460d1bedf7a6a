// softmax, algorithm `column`, where the axis is long: blocks, or clusters of up to 16 of them,
// hold strips of the array, so that memory is read once.
//
// A strip is as wide as a warp: 256 bytes, 8 in each lane. Each warp of a cluster has a stretch of
// it along the axis, of which registers hold the first steps and shared memory the others, in
// pieces as long as the registers that are left have room for:
//
//                         256 bytes: 64 rows of float32
//     block 0   warp 0    | registers     |    14 steps along the axis
//               ...       | shared memory |    18 steps, in pieces of 6
//               warp 15   | ...           |
//     block 1   warp 0    | ...           |    and so on
//
// Each warp reduces its stretch to a state for each row, then each block, which sends it to all
// blocks of the cluster. A multiprocessor has room for two blocks, one of which reads while the
// other writes; no cluster takes a second strip, since the next one starts as soon as it ends.
//
// What limits it is the order in which memory is asked: copies in this order do 0.91 of what memcpy
// does where the rows of 8192 x 32768 floats lie 128 KiB apart (in strips of 128 bytes 0.78, of
// 1 KiB 0.91), and softmax 0.88. Then instructions: with expf() and a scale, 50 for 32 elements, it
// did 0.80. In place of copy_bulk() for each 256 bytes, tensor maps took 4 % more time and cp.async
// 2 %; to keep powers in place of elements took 5 % more, and to ask the L2 cache for strips that
// come later 17 to 39 %.
#pragma once

#include "core/ptx.cuh"
#include "core/shared.h"
#include "softmax/column.cuh"
#include "softmax/instances.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {

#ifndef JAX_GPUOPS_INTERPRET
// Rows that lie side by side in a strip.
template <class T>
inline constexpr int kStripRows = kStripBytes / static_cast<int>(sizeof(T));

// What lies before the copies in shared memory.
template <class State, int kRows>
struct alignas(kSharedAlignment) StripStorage {
  static constexpr int kThreads = kStripThreads / kRows;  // that combine the states of a row
  // Slots that they read at once do not all begin in the same bank.
  using Slot = State[kRows + kWarpSize / kThreads];
  Slot warps[kStripWarps];
  Slot blocks[kMostClusterBlocks];
  State totals[kRows];
  Mbarrier copied[kStripWarps][kMostStripPieces];
  Mbarrier arrived;

  // The state of a row from those in `count` slots; `thread` of kThreads neighbours.
  template <class T>
  __device__ __forceinline__ static State combine(const Exponents<T>& exponents, const Slot* slots,
                                                  int count, int row, int thread) {
    State state = thread < count ? slots[thread][row] : State::none();
    for (int slot = thread + kThreads; slot < count; slot += kThreads) {
      state = combined(exponents, state, slots[slot][row]);
    }
    return combine_lanes<kThreads>(exponents, state);
  }
};

// Neighbouring clusters take strips that lie a 16th of the array apart. If rows lie a large power
// of two apart, what neighbouring strips have of all rows is not spread over all of the memory's
// channels: copies in that order take 5 % more time.
__device__ __forceinline__ int strip_of(int cluster, int strips) {
  constexpr int kParts = 16;
  const int part = cluster % kParts;
  const int longer = strips % kParts;  // parts that have a strip more
  return part * (strips / kParts) + (part < longer ? part : longer) + cluster / kParts;
}

// Clusters of `blocks` take the strips of each `outer`, which are along y. A warp takes `size`
// steps. kPlainSoftmax: softmax alone, and the scale is 1.
template <class T, bool kTangent, bool kPlainSoftmax>
__global__ void __launch_bounds__(kStripThreads, kStripsResident)
    strip_kernel(const __grid_constant__ Tensors<T> tensors, int blocks, int size) {
#if JAX_GPUOPS_HAS_CLUSTERS
  constexpr int kPack = column_pack(sizeof(T));
  constexpr int kRows = kStripRows<T>;
  static_assert(kRows == kWarpSize * kPack);
  constexpr int kOperands = kTangent ? 2 : 1;
  constexpr int kHeld = kStripHeld / kOperands;
  constexpr int kPiece = kStripPiece / kOperands;
  using Share = ColumnShare<T, kTangent, kPack, kHeld, false>;
  using Piece = ColumnShare<T, kTangent, kPack, kPiece, false>;
  using State = typename Share::State;
  using Storage = StripStorage<State, kRows>;
  auto& storage = shared<Storage>();
  const Exponents<T> exponents(kPlainSoftmax ? Function::kSoftmax : tensors.function, tensors.scale,
                               kPlainSoftmax);
  const int rank = blocks > 1 ? cluster_rank() : 0;
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;

  // The warp has the steps first, first + 1 ... first + count - 1 of the rows from first_row on.
  const std::int64_t inner = tensors.rows.inner;
  const std::int64_t columns = tensors.rows.columns;
  const int strip = strip_of(blockIdx.x / blocks, gridDim.x / blocks);
  const std::int64_t first_row = std::int64_t{strip} * kRows;
  const std::int64_t first = std::int64_t{rank * kStripWarps + warp} * size;
  const std::int64_t left = columns - first;
  const int count = left < 0 ? 0 : left < size ? static_cast<int>(left) : size;
  const int most_copies = size > kHeld ? size - kHeld : 0;
  const std::int64_t begin = (blockIdx.y * columns + first) * inner + first_row;
  const bool exists = first_row + lane * kPack < inner;  // the lane's own

  // Ask.
  T* const copies = reinterpret_cast<T*>(&storage + 1) + warp * kOperands * most_copies * kRows;
  Mbarrier* const copied = storage.copied[warp];
  const std::int64_t width = inner - first_row < kRows ? inner - first_row : kRows;
  const auto bytes = static_cast<unsigned>(width * sizeof(T));
  if (kHeld + lane * kPiece < count) {
    const int steps = count - kHeld - lane * kPiece;
    initialise(copied + lane);
    announce(copied + lane, (steps < kPiece ? steps : kPiece) * kOperands * bytes);
  }
  __syncwarp();
  for (int s = lane; kHeld + s < count; s += kWarpSize) {
    const std::int64_t at = begin + (kHeld + s) * inner;
    copy_bulk(copies + s * kRows, tensors.x + at, bytes, copied + s / kPiece);
    if constexpr (kTangent) {
      copy_bulk(copies + (most_copies + s) * kRows, tensors.t + at, bytes, copied + s / kPiece);
    }
  }
  // Up to `most` steps from `step` on: where they lie in the array, and among the copies.
  const auto steps_there = [&](int step, int most) {
    if (!exists || step >= count) return 0;
    return count - step < most ? count - step : most;
  };
  const auto steps = [&](int step, int most) {
    return Steps{begin + step * inner + lane * kPack, inner, first + step, 1,
                 steps_there(step, most)};
  };
  const auto load_piece = [&](int step) {
    Piece piece;
    piece.load(tensors, copies, copies + most_copies * kRows,
               Steps{(step - kHeld) * kRows + lane * kPack, kRows, first + step, 1,
                     steps_there(step, kPiece)},
               Selection<T>());
    return piece;
  };
  Share share;
  share.load(tensors, steps(0, kHeld), Selection<T>());
  if (threadIdx.x == 0) initialise(&storage.arrived);
  __syncthreads();
  if (blocks > 1) cluster_arrive();

  // Reduce: the pieces, which arrive first, then what registers hold.
  State states[kPack];
#pragma unroll
  for (State& state : states) state = State::none();
#pragma unroll 1
  for (int step = kHeld; step < count; step += kPiece) {
    wait(copied + (step - kHeld) / kPiece, 0);
    load_piece(step).add(tensors, exponents, states);
  }
  share.add(tensors, exponents, states);

  // Combine: the warps of the block, the blocks of the cluster.
#pragma unroll
  for (int i = 0; i < kPack; ++i) storage.warps[warp][lane * kPack + i] = states[i];
  __syncthreads();
  const int row = threadIdx.x / Storage::kThreads;
  const int thread = threadIdx.x % Storage::kThreads;
  State total = Storage::combine(exponents, storage.warps, kStripWarps, row, thread);
  if (blocks > 1) {
    cluster_wait();
    if (threadIdx.x == 0) {
      announce(&storage.arrived, static_cast<unsigned>(blocks * kRows * sizeof(State)));
    }
    for (int block = thread; block < blocks; block += Storage::kThreads) {
      send(total, &storage.blocks[rank][row], &storage.arrived, block);
    }
    wait(&storage.arrived, 0);
    total = Storage::combine(exponents, storage.blocks, blocks, row, thread);
  }
  if (thread == 0) storage.totals[row] = total;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kPack; ++i) states[i] = storage.totals[lane * kPack + i];

  const std::int64_t number = blockIdx.y * inner + first_row + lane * kPack;
  const bool writes_rows = rank == 0 && warp == 0 && exists;
  if constexpr (Share::kRedoes) {
    if (Share::any_large(states)) {
      if (writes_rows) Share::redo(tensors, number);
      return;
    }
  }

  // Write.
  if (tensors.y != nullptr) {
    share.write(tensors, exponents, steps(0, kHeld), Selection<T>(), states);
#pragma unroll 1
    for (int step = kHeld; step < count; step += kPiece) {
      load_piece(step).write(tensors, exponents, steps(step, kPiece), Selection<T>(), states);
    }
  }
  if (tensors.row_results.data != nullptr && writes_rows) {
#pragma unroll
    for (int i = 0; i < kPack; ++i) write_row(tensors, number + i, states[i]);
  }
#else
  __trap();
#endif
}
#endif

}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
