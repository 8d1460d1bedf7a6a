// softmax, algorithm `strip`: a long axis that is not the last. Blocks, or clusters of up to 16
// blocks, hold strips of the array, so that it is read from memory once.
//
// A strip is as wide as a warp: 256 bytes, 8 per lane. Each warp of a cluster has a slice of it
// along the axis. Registers hold the first steps of the slice, and shared memory the others, in
// pieces that fit in the remaining registers:
//
//                         256 bytes: 64 rows of float32
//     block 0   warp 0    | registers     |    11 steps along the axis
//               ...       | shared memory |    21 steps, in pieces of 7
//               warp 15   | ...           |
//     block 1   warp 0    | ...           |    and so on
//
// Gradients have 7 and 9 steps of each operand, in pieces of 3.
//
// Each warp reduces its slice to one state per row, and each block combines the states of its
// warps. Each row has an owner block in the cluster: all other blocks send it their states, and it
// sends them the state of the row. A multiprocessor has room for two blocks, one of which reads
// while the other writes. No cluster takes a second strip, since the next cluster starts as soon as
// one ends.
//
// The limit is the order of memory accesses; docs/tuning.md has the measurements. They determine
// the sizes:
// - Strips of 256 bytes. Narrower ones are slower to copy, and wider ones no faster.
// - The L1 cache, through which loads to registers pass, has the space that shared memory leaves:
// blocks use less than 97 KiB. Sending each block's states to all others would use more where there
// are 128 rows of 16-bit elements.
// - As many steps in registers as fit without spills, such that all pieces have the same length.
#pragma once

#include "core/ptx/bulk_copy.cuh"
#include "core/ptx/cluster.cuh"
#include "core/shared.h"
#include "softmax/column.cuh"
#include "softmax/launcher.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {

// Rows that lie side by side in a strip.
template <class T>
inline constexpr int kStripRows = kStripBytes / static_cast<int>(sizeof(T));

// The part of shared memory before the copies.
template <class State, int kRows>
struct alignas(kSharedAlignment) StripStorage {
  static constexpr int kThreads = kStripThreads / kRows;  // per row, to combine its states
  static constexpr int kSlots = kStripWarps / 2;          // each for two warps, to save room
  // Avoids bank conflicts between slots that threads read at the same time.
  static constexpr int kPitch = kRows + kWarpSize / kThreads;
  State warps[kSlots][kPitch];
  State parts[kRows + kMostClusterBlocks];  // of the block's own rows, from each block
  State totals[kRows];
  Mbarrier copied[kStripWarps][kStripPieces];
  Mbarrier gathered;  // the parts
  Mbarrier known;     // the totals
};

// The rows of a strip that one of `blocks` blocks owns.
template <int kRows>
struct OwnRows {
  int most;   // rows per block
  int first;  // the first row of the block
  int count;

  __device__ __forceinline__ OwnRows(int rank, int blocks)
      : most((kRows + blocks - 1) / blocks), first(rank * most) {
    const int left = kRows - first;
    count = left < 0 ? 0 : left < most ? left : most;
  }
};

// Combines `count` slots, which lie `pitch` apart, into the state of a row. All of its kThreads
// neighbouring threads get it; the whole warp must call it.
template <int kThreads, class T, class State>
__device__ __forceinline__ State combine_slots(const Exponents<T>& exponents, const State* slots,
                                               int count, int pitch, int thread) {
  State state = thread < count ? slots[thread * pitch] : State::none();
  for (int slot = thread + kThreads; slot < count; slot += kThreads) {
    state = combined(exponents, state, slots[slot * pitch]);
  }
  return combine_lanes<kThreads>(exponents, state);
}

// Neighbouring clusters take strips that lie a 16th of the array apart. If the stride along the
// axis is a large power of two, the elements of neighbouring strips are not spread over all memory
// channels.
__device__ __forceinline__ int strip_of(int cluster, int strips) {
  constexpr int kParts = 16;
  const int part = cluster % kParts;
  const int longer = strips % kParts;  // parts that have a strip more
  return part * (strips / kParts) + (part < longer ? part : longer) + cluster / kParts;
}

// Clusters of `blocks` blocks take the strips along the grid's x, for each `outer` index along y. A
// warp takes up to `most_steps` steps.
template <class T, class Functions, Variant kVariant>
__global__ void __launch_bounds__(kStripThreads, kStripsResident)
    strip_kernel(const __grid_constant__ KernelArgs<T> args, int blocks, int most_steps) {
#if JAX_GPUOPS_HAS_CLUSTERS
  constexpr int kPack = column_pack(sizeof(T));
  constexpr int kRows = kStripRows<T>;
  static_assert(kRows == kWarpSize * kPack);
  constexpr bool kTangent = Functions::kIsLinearInT;
  constexpr int kOperands = Functions::kOperands;
  constexpr bool kPlainSoftmax = kVariant == Variant::kPlainSoftmax;
  constexpr bool kSelects = false;  // no masks
  constexpr int kHeld = strip_held(kTangent);
  constexpr int kCopies = kStripSteps / kOperands - kHeld;
  constexpr int kPiece = kCopies / kStripPieces;
  static_assert(kCopies % kStripPieces == 0 && kCopies <= kWarpSize);
  using Fragment = ColumnFragment<T, Functions, kPack, kHeld, kSelects>;
  using Piece = ColumnFragment<T, Functions, kPack, kPiece, kSelects>;
  using State = typename Fragment::State;
  using Storage = StripStorage<State, kRows>;
  auto& storage = shared<Storage>();
  const Exponents<T> exponents(kPlainSoftmax ? Function::kSoftmax : args.function, args.scale,
                               kPlainSoftmax);
  const int rank = blocks > 1 ? cluster_rank() : 0;
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;

  // The warp has the steps first, first + 1 ... first + count - 1 of the rows from first_row on.
  const std::int64_t inner = args.rows.inner;
  const std::int64_t columns = args.rows.columns;
  const int strip = strip_of(blockIdx.x / blocks, gridDim.x / blocks);
  const std::int64_t first_row = std::int64_t{strip} * kRows;
  const std::int64_t first = std::int64_t{rank * kStripWarps + warp} * most_steps;
  const std::int64_t left = columns - first;
  const int count = left < 0 ? 0 : left < most_steps ? static_cast<int>(left) : most_steps;
  const int most_copies = most_steps - kHeld;
  const std::int64_t begin = (blockIdx.y * columns + first) * inner + first_row;
  const bool exists = first_row + lane * kPack < inner;  // whether the lane has rows

  // Issue the copies and loads.
  T* const copies = reinterpret_cast<T*>(&storage + 1) + warp * kOperands * most_copies * kRows;
  Mbarrier* const copied = storage.copied[warp];
  const std::int64_t width = inner - first_row < kRows ? inner - first_row : kRows;
  const auto bytes = static_cast<unsigned>(width * sizeof(T));
  if (lane < kStripPieces) initialise(copied + lane);
  __syncwarp();
  if (kHeld + lane * kPiece < count) {
    const int steps = count - kHeld - lane * kPiece;
    announce(copied + lane, (steps < kPiece ? steps : kPiece) * kOperands * bytes);
  }
  __syncwarp();
  // At most one iteration, but with an `if` the compiler spills seven more registers for bfloat16.
  for (int s = lane; kHeld + s < count; s += kWarpSize) {
    const std::int64_t at = begin + (kHeld + s) * inner;
    copy_bulk(copies + s * kRows, args.x + at, bytes, copied + s / kPiece);
    if constexpr (kTangent) {
      copy_bulk(copies + (most_copies + s) * kRows, args.t + at, bytes, copied + s / kPiece);
    }
  }
  // Up to `most` steps from `step` on, in the array and in the copies.
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
    piece.load(args, copies, copies + most_copies * kRows,
               Steps{(step - kHeld) * kRows + lane * kPack, kRows, first + step, 1,
                     steps_there(step, kPiece)},
               RowMask<T>());
    return piece;
  };
  Fragment fragment;
  fragment.load(args, steps(0, kHeld), RowMask<T>());
  if (blocks > 1) {
    if (threadIdx.x == 0) {
      const OwnRows<kRows> own(rank, blocks);
      initialise(&storage.gathered);
      initialise(&storage.known);
      announce(&storage.gathered, static_cast<unsigned>(own.count * blocks * sizeof(State)));
      announce(&storage.known, static_cast<unsigned>(kRows * sizeof(State)));
    }
    __syncthreads();
    cluster_arrive();
  }

  // Reduce: the pieces, which arrive first, then the steps in registers.
  State states[kPack];
#pragma unroll
  for (State& state : states) state = State::none();
#pragma unroll 1
  for (int step = kHeld; step < count; step += kPiece) {
    wait(copied + (step - kHeld) / kPiece, 0);
    load_piece(step).add(args, exponents, states);
  }
  fragment.add(args, exponents, states);

  // Combine: the warps of the block, the blocks of the cluster.
  State* const slot = &storage.warps[warp % Storage::kSlots][lane * kPack];
  if (warp < Storage::kSlots) {
#pragma unroll
    for (int i = 0; i < kPack; ++i) slot[i] = states[i];
  }
  __syncthreads();
  if (warp >= Storage::kSlots) {
#pragma unroll
    for (int i = 0; i < kPack; ++i) slot[i] = combined(exponents, slot[i], states[i]);
  }
  __syncthreads();
  const int row = threadIdx.x / Storage::kThreads;
  const int thread = threadIdx.x % Storage::kThreads;
  State total = combine_slots<Storage::kThreads>(exponents, &storage.warps[0][row], Storage::kSlots,
                                                 Storage::kPitch, thread);
  if (blocks > 1) {
    cluster_wait();
    const OwnRows<kRows> own(rank, blocks);
    if (thread == 0) {
      State* const part = storage.parts + rank * own.most + row % own.most;
      send(total, part, &storage.gathered, row / own.most);
    }
    wait(&storage.gathered, 0);
    const bool is_own = row < own.count;
    total = combine_slots<Storage::kThreads>(exponents, storage.parts + row, is_own ? blocks : 0,
                                             own.most, thread);
    for (int block = thread; is_own && block < blocks; block += Storage::kThreads) {
      send(total, storage.totals + own.first + row, &storage.known, block);
    }
    wait(&storage.known, 0);
  } else {
    if (thread == 0) storage.totals[row] = total;
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < kPack; ++i) states[i] = storage.totals[lane * kPack + i];

  const std::int64_t number = blockIdx.y * inner + first_row + lane * kPack;
  const bool writes_rows = rank == 0 && warp == 0 && exists;
  if constexpr (Fragment::kRedoes) {
    if (Fragment::any_large(states)) {
      if (writes_rows) Fragment::redo(args, number);
      return;
    }
  }

  // Write.
  if (args.y != nullptr) {
    fragment.write(args, exponents, steps(0, kHeld), RowMask<T>(), states);
#pragma unroll 1
    for (int step = kHeld; step < count; step += kPiece) {
      load_piece(step).write(args, exponents, steps(step, kPiece), RowMask<T>(), states);
    }
  }
  if constexpr (!kPlainSoftmax && !kTangent) {
    if (args.reduces() && rank == 0 && exists) {
      write_rows(args, number, number + blockIdx.y * inner * (columns - 1), 1,
                 storage.totals + lane * kPack, kPack, warp, kStripWarps);
    }
  }
#else
  __trap();
#endif
}

template <class Functions, class T>
void launch_strip(const Call& call) {
  using State = typename Functions::template State<T>;
  dispatch_variant<Functions, kVariantInShared<T, RowLayout::kStrided>>(call, [&](auto variant) {
    launch_kernel<strip_kernel<T, Functions, variant>>(
        call.queue, launch_shape(call, sizeof(StripStorage<State, kStripRows<T>>)),
        kernel_args<T>(call), call.config.cluster, static_cast<int>(call.config.steps));
  });
}

}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
