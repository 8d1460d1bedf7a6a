// transpose, algorithm `swizzled`: 16-byte accesses everywhere.
//
// A thread reads a vector from each of as many rows as a vector has elements, and transposes this
// small block in its registers. It then holds chunks of the result's rows, each of which passes
// through shared memory in one access: an eighth of the accesses of `tiled` for 16-bit elements, a
// quarter for float32.
//
//     operand            registers                shared memory, a line per row of the result
//     a b c d            a e i m                  line 0   chunk 0 1 2 3 4 5 6 7
//     e f g h   ------>  b f j n   chunk of  -->  line 4   chunk 1 0 3 2 5 4 7 6
//     i j k l   turn     c g k o   one line       line 8   chunk 2 3 0 1 6 7 4 5
//     m n o p            d h l p
//
// Padding would break the alignment of chunks. Instead the index of a chunk within its line is
// XOR-ed with the number of the block of columns it came from. The lanes of an access, which read
// one line or write the same chunk of many lines, then have no bank conflicts.
#pragma once

#include <algorithm>

#include "core/dispatch.h"
#include "core/launch.h"
#include "core/shared.h"
#include "core/vector.h"
#include "transpose/matrices.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace transpose {

template <class Word, int kSide_>
struct SwizzledTile {
  static constexpr int kSide = kSide_;
  static constexpr int kVector = vector_words(sizeof(Word));
  using Chunk = Pack<Word, kVector>;

  static constexpr int kThreads = swizzled_threads(sizeof(Word), kSide);
  static constexpr int kChunksPerLine = kSide / kVector;
  static constexpr int kBlocksPerThread = kChunksPerLine * kChunksPerLine / kThreads;
  static constexpr int kChunksPerThread = kSide * kChunksPerLine / kThreads;
  // The xor must stay within a line.
  static constexpr int kSwizzleMask = std::min<int>(128 / sizeof(Chunk), kChunksPerLine) - 1;
  static_assert(kChunksPerLine % (kSwizzleMask + 1) == 0);
  static_assert(kBlocksPerThread >= 1, "each thread must have a block");
  static_assert(kSide * kSide * sizeof(Word) <= 48 * 1024, "a tile must fit shared memory");

  Chunk chunk[kSide][kChunksPerLine];

  // Chunk `index` of the line for `column` of the tile.
  __device__ Chunk& at(int column, int index) {
    return chunk[column][index ^ (column / kVector & kSwizzleMask)];
  }
};

// Which chunks of a tile there are. Where the matrix ends within a tile, the accesses of a thread
// are in flight together only if none of them is a branch to a loop over words.
enum class Chunks {
  kAll,            // the whole tile lies in the matrix
  kWholeOrAbsent,  // no chunk crosses the end of the matrix
  kAny,            // chunks may be cut, or begin at addresses that are not aligned
};

// Reads the first `count` words of a chunk, with one access if it is whole and aligned.
template <Chunks kChunks, class Word, int kVector = vector_words(sizeof(Word))>
__device__ inline Pack<Word, kVector> load_chunk(const Word* from, int count) {
  using Chunk = Pack<Word, kVector>;
  Chunk chunk = {};
  if constexpr (kChunks == Chunks::kAll) {
    chunk = *reinterpret_cast<const Chunk*>(from);
  } else if constexpr (kChunks == Chunks::kWholeOrAbsent) {
    if (count > 0) chunk = *reinterpret_cast<const Chunk*>(from);
  } else if (count >= kVector && is_aligned<kVector>(from)) {
    chunk = *reinterpret_cast<const Chunk*>(from);
  } else {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      if (i < count) chunk.element[i] = from[i];
    }
  }
  return chunk;
}

template <Chunks kChunks, class Word, int kVector>
__device__ inline void store_chunk(const Pack<Word, kVector>& chunk, Word* to, int count) {
  using Chunk = Pack<Word, kVector>;
  if constexpr (kChunks == Chunks::kAll) {
    *reinterpret_cast<Chunk*>(to) = chunk;
  } else if constexpr (kChunks == Chunks::kWholeOrAbsent) {
    if (count > 0) *reinterpret_cast<Chunk*>(to) = chunk;
  } else if (count >= kVector && is_aligned<kVector>(to)) {
    *reinterpret_cast<Chunk*>(to) = chunk;
  } else {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      if (i < count) to[i] = chunk.element[i];
    }
  }
}

// Moves the tile that begins at x and y; `rows` and `columns` of it lie in the matrix.
template <class Storage, Chunks kChunks, class Word>
__device__ inline void turn_swizzled(const Word* __restrict__ x, Word* __restrict__ y,
                                     const Matrices& matrices, int rows, int columns) {
  using Chunk = typename Storage::Chunk;
  constexpr int kVector = Storage::kVector;
  constexpr int kThreads = Storage::kThreads;
  constexpr int kChunksPerLine = Storage::kChunksPerLine;
  auto& storage = shared<Storage>();

  // Load blocks of kVector x kVector words.
  Chunk block[Storage::kBlocksPerThread][kVector];
#pragma unroll
  for (int b = 0; b < Storage::kBlocksPerThread; ++b) {
    const int index = b * kThreads + threadIdx.x;
    const int column = index % kChunksPerLine * kVector;
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const int row = index / kChunksPerLine * kVector + i;
      const Word* const from = x + row * matrices.in_row_stride + column;
      block[b][i] = load_chunk<kChunks>(from, row < rows ? columns - column : 0);
    }
  }

  // Transpose them, and store each chunk of a line of the result to shared memory.
#pragma unroll
  for (int b = 0; b < Storage::kBlocksPerThread; ++b) {
    const int index = b * kThreads + threadIdx.x;
    const int column = index % kChunksPerLine * kVector;
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      Chunk turned;
#pragma unroll
      for (int i = 0; i < kVector; ++i) turned.element[i] = block[b][i].element[j];
      storage.at(column + j, index / kChunksPerLine) = turned;
    }
  }
  __syncthreads();

  // Store lines of the result.
#pragma unroll
  for (int c = 0; c < Storage::kChunksPerThread; ++c) {
    const int index = c * kThreads + threadIdx.x;
    const int row = index % kChunksPerLine * kVector;
    const int column = index / kChunksPerLine;
    const Chunk chunk = storage.at(column, index % kChunksPerLine);
    Word* const to = y + column * matrices.out_column_stride + row;
    store_chunk<kChunks>(chunk, to, column < columns ? rows - row : 0);
  }
}

template <class Word, int kSide>
__global__ void __launch_bounds__(SwizzledTile<Word, kSide>::kThreads)
    swizzled_kernel(const Word* __restrict__ x, Word* __restrict__ y, Matrices matrices) {
  using Storage = SwizzledTile<Word, kSide>;
  constexpr int kVector = Storage::kVector;
  const Tile tile = block_tile(matrices);
  const unsigned first_row = tile.row * kSide;
  const unsigned first_column = tile.column * kSide;
  const int rows = static_cast<int>(min(matrices.rows - first_row, unsigned{kSide}));
  const int columns = static_cast<int>(min(matrices.columns - first_column, unsigned{kSide}));
  x += tile.matrix.in + first_row * matrices.in_row_stride + first_column;
  y += tile.matrix.out + first_column * matrices.out_column_stride + first_row;

  const bool aligned = is_aligned<kVector>(x) && is_aligned<kVector>(y) &&
                       matrices.in_row_stride % kVector == 0 &&
                       matrices.out_column_stride % kVector == 0;
  if (aligned && rows == kSide && columns == kSide) {
    turn_swizzled<Storage, Chunks::kAll>(x, y, matrices, rows, columns);
  } else if (aligned && rows % kVector == 0 && columns % kVector == 0) {
    turn_swizzled<Storage, Chunks::kWholeOrAbsent>(x, y, matrices, rows, columns);
  } else {
    turn_swizzled<Storage, Chunks::kAny>(x, y, matrices, rows, columns);
  }
}

template <class Word>
void launch_swizzled(const Call<Word>& call, const Config& config) {
  const TurnedDims turned = turned_dims(call.movement);
  const Matrices matrices =
      matrices_of(call.movement, *turned.row, *turned.column, kNoDepth, config);
  constexpr int kSide = swizzled_side(sizeof(Word));
  dispatch_value<kSide, kSide / 2>(config.tile_rows, [&](auto side) {
    using Storage = SwizzledTile<Word, decltype(side)::value>;
    launch_kernel<swizzled_kernel<Word, Storage::kSide>>(
        call.queue, {tile_count(matrices), Storage::kThreads, sizeof(Storage)}, call.x, call.y,
        matrices);
  });
}

}  // namespace transpose
}  // namespace JAX_GPUOPS_NAMESPACE
