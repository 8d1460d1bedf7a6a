// Ladder, step 2: `tiled`.
//
// A block reads a tile in the order of the operand and writes it in the order of the result, so
// that reads and writes are coalesced; in between, the tile is in shared memory. There it is in the
// order of the result, and each column begins one bank after the previous one:
//
//     shared memory, 64 x 64       column 0   bank  0  1  2 ... 31  0 ... 31   pad
//                                  column 1   bank  1  2  3 ...  0  1 ...  0   pad
//                                  column 2   bank  2  3  4 ...  1  2 ...  1   pad
//
// A warp that writes one element to each of 32 columns accesses 32 banks; without the pad, one
// bank.
//
// For matrices narrower than a tile, and short runs of elements that stay together, the tile has as
// many elements in another shape: Box.
#pragma once

#include "core/launch.h"
#include "core/shared.h"
#include "transpose/matrices.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace transpose {

template <class Word>
inline constexpr int kTileElements = 1 << tiled_words_log2(sizeof(Word));

// The padding in elements: one bank (4 bytes), or one element if that is wider.
template <class Word>
inline constexpr int kTilePad = sizeof(Word) < 4 ? 4 / sizeof(Word) : 1;

inline constexpr int kMinPadShift = 5;  // after as many elements as there are banks

template <class Word>
struct TileStorage {
  Word element[kTileElements<Word> + (kTileElements<Word> >> kMinPadShift) * kTilePad<Word>];
};

// Coordinates within a tile.
struct Place {
  std::uint32_t row;
  std::uint32_t column;
  std::uint32_t depth;
};

// What an index over a tile refers to: when loading, in the order of the operand, and when storing,
// in the order of the result.
struct Step {
  Place in_place;
  Place out_place;
  std::int64_t in_offset;
  std::int64_t out_offset;
  std::uint32_t in_slot;  // in shared memory
  std::uint32_t out_slot;
};

inline constexpr int kMaxTiledSteps = kTileElements<std::uint8_t> / kThreads;

// A number of bits for each coordinate.
struct Bits {
  int row;
  int column;
  int depth;
};

// The shape of a tile, in powers of two. An index over it holds the coordinates as bit fields, in
// the order of their strides.
//
// The index of a thread's i-th element is the thread's number plus i * kThreads. The two share no
// bits, so each member of its Step is the sum of that of the thread and that of the multiple; the
// latter is the same for all threads and computed before the launch.
struct Box {
  Bits log2_size;
  Bits in_shift;
  Bits out_shift;
  int pad_shift;  // a pad follows each run of 2^pad_shift elements
  int pad;
  Step step[kMaxTiledSteps];

  __host__ __device__ Step step_of(std::uint32_t index, const Matrices& matrices) const {
    const Place in = place(index, in_shift);
    const Place out = place(index, out_shift);
    return {in,
            out,
            matrices.in_offset(in.row, in.column, in.depth),
            matrices.out_offset(out.row, out.column, out.depth),
            slot(in),
            slot(out)};
  }

 private:
  __host__ __device__ Place place(std::uint32_t index, const Bits& shift) const {
    const auto field = [index](int shift, int log2_size) {
      return index >> shift & ((1u << log2_size) - 1);
    };
    return {field(shift.row, log2_size.row), field(shift.column, log2_size.column),
            field(shift.depth, log2_size.depth)};
  }

  __host__ __device__ std::uint32_t slot(const Place& place) const {
    const std::uint32_t index = (place.row << out_shift.row) + (place.column << out_shift.column) +
                                (place.depth << out_shift.depth);
    return index + (index >> pad_shift) * pad;
  }
};

// Moves one tile. `in_left` and `out_left` are what is left of the matrix from the thread's places
// on; if kWhole, all of the tile lies in the matrix.
template <bool kWhole, class Word>
__device__ inline void turn_tile(const Word* __restrict__ x, Word* __restrict__ y, const Box& box,
                                 const Step& thread, const Place& in_left, const Place& out_left) {
  constexpr int kSteps = kTileElements<Word> / kThreads;
  auto& storage = shared<TileStorage<Word>>();
  const auto exists = [](const Place& place, const Place& left) {
    return kWhole ||
           (place.row < left.row && place.column < left.column && place.depth < left.depth);
  };

  // All loads are issued before the first use, so that they are in flight together.
  Word element[kSteps] = {};
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    if (exists(box.step[i].in_place, in_left)) element[i] = x[box.step[i].in_offset];
  }
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    storage.element[thread.in_slot + box.step[i].in_slot] = element[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    element[i] = storage.element[thread.out_slot + box.step[i].out_slot];
  }
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    if (exists(box.step[i].out_place, out_left)) y[box.step[i].out_offset] = element[i];
  }
}

// What is left of `size` from `place` on, 0 beyond the end.
__device__ inline std::uint32_t left(std::uint32_t size, std::uint32_t place) {
  return place < size ? size - place : 0;
}

template <class Word>
__global__ void __launch_bounds__(kThreads)
    tiled_kernel(const Word* __restrict__ x, Word* __restrict__ y, Matrices matrices, Box box) {
  const Tile tile = block_tile(matrices);
  const Place first{tile.row << box.log2_size.row, tile.column << box.log2_size.column,
                    tile.depth << box.log2_size.depth};
  const Place end{(tile.row + 1) << box.log2_size.row, (tile.column + 1) << box.log2_size.column,
                  (tile.depth + 1) << box.log2_size.depth};
  const Step thread = box.step_of(threadIdx.x, matrices);
  x += tile.matrix.in + matrices.in_offset(first.row, first.column, first.depth) + thread.in_offset;
  y += tile.matrix.out + matrices.out_offset(first.row, first.column, first.depth) +
       thread.out_offset;
  const auto left_from = [&](const Place& place) -> Place {
    return {left(matrices.rows, first.row + place.row),
            left(matrices.columns, first.column + place.column),
            left(matrices.depth, first.depth + place.depth)};
  };
  if (end.row <= matrices.rows && end.column <= matrices.columns && end.depth <= matrices.depth) {
    turn_tile<true>(x, y, box, thread, {}, {});
  } else {
    turn_tile<false>(x, y, box, thread, left_from(thread.in_place), left_from(thread.out_place));
  }
}

// The positions of the bit fields of an index, of which the lowest has the smallest stride.
inline Bits shifts(const Bits& log2_size, std::int64_t row, std::int64_t column,
                   std::int64_t depth) {
  const auto shift = [&](std::int64_t stride) {
    return (row < stride ? log2_size.row : 0) + (column < stride ? log2_size.column : 0) +
           (depth < stride ? log2_size.depth : 0);
  };
  return {shift(row), shift(column), shift(depth)};
}

// The tile of the configuration.
inline Box box_of(const Config& config, const TurnedDims& turned, const Dim& depth,
                  const Matrices& matrices, int pad) {
  Box box;
  box.log2_size = {log2_of(config.tile_rows), log2_of(config.tile_columns),
                   log2_of(config.tile_depth)};
  box.in_shift =
      shifts(box.log2_size, turned.row->in_stride, turned.column->in_stride, depth.in_stride);
  box.out_shift =
      shifts(box.log2_size, turned.row->out_stride, turned.column->out_stride, depth.out_stride);
  box.pad_shift = std::max(kMinPadShift, box.out_shift.column);
  box.pad = pad;
  for (int i = 0; i < kMaxTiledSteps; ++i) box.step[i] = box.step_of(i * kThreads, matrices);
  return box;
}

template <class Word>
void launch_tiled(const Call<Word>& call, const Config& config) {
  const TurnedDims turned = turned_dims(call.movement);
  const Dim& depth = config.depth == kNoDim ? kNoDepth : call.movement.dims[config.depth];
  const Matrices matrices = matrices_of(call.movement, *turned.row, *turned.column, depth, config);
  const Box box = box_of(config, turned, depth, matrices, kTilePad<Word>);
  launch_kernel<tiled_kernel<Word>>(call.queue,
                                    {tile_count(matrices), kThreads, sizeof(TileStorage<Word>)},
                                    call.x, call.y, matrices, box);
}

}  // namespace transpose
}  // namespace JAX_GPUOPS_NAMESPACE
