// transpose, algorithm `shifted`: rows that begin at any word.
//
// A warp reads strips of the tile: as many rows as a pack of 16 bytes has words. Its lanes read
// neighbouring columns, 4 bytes at a time if the rows of the operand allow it. Then each has, for
// its columns, packs of rows of the result, which it stores to lines of shared memory:
//
//     strip     a e i m     lane 0 | a b c d |  to line 0
//               b f j n     lane 1 | e f g h |  to line 1
//               c g k o     lane 2 | i j k l |  to line 2
//               d h l p     ...
//
// Lines begin with a pack, but rows of the result may begin within one. The packs that are stored
// to it are aligned, so that each is put together from two neighbours of the line:
//
//     line 0              | a b c d | q r s t | u v w x | ...
//     row of the result     . . a b | c d q r | s t u v | ...
//
// A block stores the packs that begin in its tile. The last of them has words of the next tile: so
// a line has an additional pack. After the last row of the matrix, a line goes on with the words of
// the next one, if the rows of the result are contiguous. The words before the first whole pack of
// a row then belong to the last pack of the row before, and only the beginning of the tile's first
// row and the end of its last one are stored word by word.
#pragma once

#include <cstring>
#include <type_traits>

#include "core/collectives.h"
#include "core/dispatch.h"
#include "core/launch.h"
#include "core/shared.h"
#include "core/shifted_packs.cuh"
#include "core/vector.h"
#include "transpose/matrices.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace transpose {

// kLoad: the words that a lane loads at a time.
template <class Word_, int kLoad_>
struct ShiftedLayout {
  using Word = Word_;
  static constexpr int kLoad = kLoad_;
  static constexpr int kVector = strip_rows(sizeof(Word));
  static constexpr int kLines = shifted_columns(sizeof(Word));
  static constexpr int kStrips = strips_per_warp(sizeof(Word));
  static constexpr int kColumns = kLines / kWarpSize;  // of a lane
  static constexpr int kLoads = kColumns / kLoad;      // of a lane, from each row
  // Loads from a row that are in flight together: those of single bytes would take more than 32
  // registers.
  static constexpr int kLoadsAtOnce = sizeof(Word) == 1 && kLoad == 1 ? 2 : kLoads;
  // Blocks on a multiprocessor. Each word of a load of its own takes a register.
  static constexpr int kBlocks = kLoad == 1 && sizeof(Word) < 4 ? 2 : 3;
  static_assert(kLoads * kLoad == kColumns && kLoads % kLoadsAtOnce == 0);

  using Pack = JAX_GPUOPS_NAMESPACE::Pack<Word, kVector>;
  // Has the words of a load.
  using Register = std::conditional_t<sizeof(Word) == 8, std::uint64_t, std::uint32_t>;

  // The column of the tile at which load `i` of a lane begins.
  __device__ static int column(int i) {
    return (i * kWarpSize + static_cast<int>(threadIdx.x) % kWarpSize) * kLoad;
  }
  // The line of a column: those that the lanes store at the same time are neighbours, which are an
  // odd number of packs apart, so that there are no bank conflicts.
  __device__ static unsigned line(unsigned column) {
    return column % kLoad * (kLines / kLoad) + column / kLoad;
  }
};

// The tile of a block.
struct ShiftedTile {
  int rows;
  int columns;
  int pitch;           // packs from one line to the next, odd
  Divisor line_packs;  // the packs that begin in a line
  bool continues;      // each row of the result is followed by the next one
};

// Loads the words of one row.
template <class Layout, class Word = typename Layout::Word>
__device__ inline typename Layout::Register load_words(const Word* from) {
  if constexpr (Layout::kLoad == 1) {
    return *from;
  } else {
    return *reinterpret_cast<const typename Layout::Register*>(from);
  }
}

// The pack of the words with number `kIndex` of each register.
template <class Layout, int kIndex>
__device__ inline typename Layout::Pack column_pack(
    const typename Layout::Register (&row)[Layout::kVector]) {
  constexpr int kWordBytes = sizeof(typename Layout::Word);
  using Pack = typename Layout::Pack;
  if constexpr (kWordBytes >= 4) {
    Pack pack;
    std::memcpy(&pack, row, sizeof(pack));
    return pack;
  } else {
    std::uint32_t word[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kWordBytes == 2) {
        word[i] = __byte_perm(row[2 * i], row[2 * i + 1], kIndex == 0 ? 0x5410 : 0x7632);
      } else {
        constexpr unsigned kPair = kIndex | (kIndex + 4) << 4;
        word[i] = __byte_perm(__byte_perm(row[4 * i], row[4 * i + 1], kPair),
                              __byte_perm(row[4 * i + 2], row[4 * i + 3], kPair), 0x5410);
      }
    }
    Pack pack;
    std::memcpy(&pack, word, sizeof(pack));
    return pack;
  }
}

// Stores the packs of columns kIndex, kIndex + 1, ... of a load.
template <class Layout, int kIndex = 0>
__device__ inline void store_columns(const typename Layout::Register (&row)[Layout::kVector],
                                     int column, typename Layout::Pack* strip, int pitch) {
  if constexpr (kIndex < Layout::kLoad) {
    strip[Layout::line(column + kIndex) * pitch] = column_pack<Layout, kIndex>(row);
    store_columns<Layout, kIndex + 1>(row, column, strip, pitch);
  }
}

// The part of the operand that a block reads, from the tile's first word on. Rows from `rows` up to
// `last` are the first ones of the matrix, a column further.
template <class Word>
struct Source {
  const Word* x;
  std::int64_t row_stride;
  std::int64_t back;  // from the row after the last one to the first one
  int rows;           // of the matrix, from the tile on
  int last;           // `rows` if no rows follow
  int columns;        // of the tile
};

// Loads the words of a lane from each row of a strip. Where there are none, they are any.
template <class Layout, class Word = typename Layout::Word>
__device__ __forceinline__ void load_strip(const Source<Word>& source, int first, int column,
                                           typename Layout::Register (&word)[Layout::kVector]) {
  constexpr int kVector = Layout::kVector;
  constexpr int kLoad = Layout::kLoad;
  column = min(column, source.columns - kLoad);
  if (first + kVector <= source.rows) {
    const Word* const from = source.x + first * source.row_stride + column;
#pragma unroll
    for (int i = 0; i < kVector; ++i) word[i] = load_words<Layout>(from + i * source.row_stride);
    return;
  }
  int row = min(first, source.last - 1);
  const Word* from = source.x + row * source.row_stride + column;
  const std::int64_t back = source.back + (kLoad == 1 && column + 1 < source.columns ? 1 : 0);
  if (row >= source.rows) from += back;
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    word[i] = load_words<Layout>(from);
    row = first + i + 1;
    if (row < source.last) from += source.row_stride;
    if (row == source.rows) from += back;
  }
}

// Loads of several words begin at the same column in every row. Here the words of the rows after
// the matrix's last one move by a column.
template <class Layout>
__device__ __forceinline__ void move_columns(int first, int rows,
                                             typename Layout::Register (&word)[Layout::kVector]) {
  if constexpr (Layout::kLoad > 1) {
    constexpr int kWordBits = 32 / Layout::kLoad;
    if (first + Layout::kVector <= rows) return;
#pragma unroll
    for (int i = 0; i < Layout::kVector; ++i) {
      const std::uint32_t next = __shfl_down_sync(kFullWarp, word[i], 1);
      if (first + i >= rows) word[i] = word[i] >> kWordBits | next << (32 - kWordBits);
    }
  }
}

// Loads `strips` strips into shared memory.
template <class Layout, class Word = typename Layout::Word>
__device__ inline void load_strips(const Source<Word>& source, int strips, int pitch) {
  constexpr int kStrips = Layout::kStrips;
  constexpr int kAtOnce = Layout::kLoadsAtOnce;
  constexpr int kVector = Layout::kVector;
  const int warp = threadIdx.x / kWarpSize;
  const int warps = blockDim.x / kWarpSize;
  auto* const packs = shared_array<typename Layout::Pack>();
#pragma unroll 1
  for (int load = 0; load < Layout::kLoads; load += kAtOnce) {
    // All loads are issued before the first use, so that they are in flight together.
    typename Layout::Register word[kStrips][kAtOnce][kVector];
#pragma unroll
    for (int s = 0; s < kStrips; ++s) {
      const int strip = warp + s * warps;
      if (strip >= strips) break;
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        load_strip<Layout>(source, strip * kVector, Layout::column(load + j), word[s][j]);
      }
    }
#pragma unroll
    for (int s = 0; s < kStrips; ++s) {
      const int strip = warp + s * warps;
      if (strip >= strips) break;
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        move_columns<Layout>(strip * kVector, source.rows, word[s][j]);
        store_columns<Layout>(word[s][j], Layout::column(load + j), packs + strip, pitch);
      }
    }
  }
}

// Stores the packs that begin in the tile, which begins at y.
template <class Layout, class Word = typename Layout::Word>
__device__ inline void store_lines(Word* __restrict__ y, const Matrices& matrices,
                                   const ShiftedTile& tile, int rows, unsigned columns) {
  constexpr int kVector = Layout::kVector;
  const auto* const packs = shared_array<typename Layout::Pack>();
  const unsigned count = tile.line_packs.divisor * columns;
#pragma unroll 1
  for (unsigned index = threadIdx.x; index < count; index += blockDim.x) {
    const Division place = tile.line_packs.divide(index);
    const unsigned column = place.quotient;
    Word* const to = y + column * matrices.out_column_stride;
    const int past = elements_to_alignment<kVector>(to);
    const int row = static_cast<int>(place.remainder) * kVector + past;
    if (row >= rows) continue;
    const auto* const from = packs + Layout::line(column) * tile.pitch + place.remainder;
    if (row + kVector <= rows || (tile.continues && column + 1 < columns)) {
      write_shifted(__builtin_bit_cast(uint4, from[0]), __builtin_bit_cast(uint4, from[1]),
                    past * sizeof(Word), to + row);
    } else {
#pragma unroll 1
      for (int i = row; i < rows; ++i) {
        const int in_pack = past + i - row;
        to[i] = from[in_pack / kVector].element[in_pack % kVector];
      }
    }
  }
}

// Stores the words of the first row of tiles that are before the first whole packs.
template <class Layout, class Word = typename Layout::Word>
__device__ inline void store_heads(Word* __restrict__ y, const Matrices& matrices,
                                   const ShiftedTile& tile, int rows, int lines) {
  constexpr int kVector = Layout::kVector;
  const auto* const packs = shared_array<typename Layout::Pack>();
  for (int index = threadIdx.x; index < lines * kVector; index += blockDim.x) {
    const int column = index / kVector;
    const int row = index % kVector;
    Word* const to = y + column * matrices.out_column_stride;
    if (row < rows && row < elements_to_alignment<kVector>(to)) {
      to[row] = packs[Layout::line(column) * tile.pitch].element[row];
    }
  }
}

template <class Word, int kLoad>
__global__ void __launch_bounds__(kMostShiftedThreads, ShiftedLayout<Word, kLoad>::kBlocks)
    shifted_kernel(const Word* __restrict__ x, Word* __restrict__ y, Matrices matrices,
                   ShiftedTile shape) {
  using Layout = ShiftedLayout<Word, kLoad>;
  const Tile tile = block_tile(matrices);
  const unsigned first_row = tile.row * shape.rows;
  const unsigned first_column = tile.column * shape.columns;
  // More rows than the lines reach make no difference.
  const int rows = static_cast<int>(
      min(matrices.rows - first_row, static_cast<unsigned>(shape.rows + Layout::kVector)));
  const int columns =
      static_cast<int>(min(matrices.columns - first_column, static_cast<unsigned>(shape.columns)));
  x += tile.matrix.in + first_row * matrices.in_row_stride + first_column;
  y += tile.matrix.out + first_column * matrices.out_column_stride + first_row;

  const bool aligned =
      is_aligned<Layout::kVector>(y) && matrices.out_column_stride % Layout::kVector == 0;
  const Source<Word> source{x,
                            matrices.in_row_stride,
                            shape.continues ? -(matrices.rows * matrices.in_row_stride) : 0,
                            rows,
                            rows + (shape.continues ? Layout::kVector - 1 : 0),
                            columns};
  load_strips<Layout>(source, shape.rows / Layout::kVector + (aligned ? 0 : 1), shape.pitch);
  __syncthreads();
  store_lines<Layout>(y, matrices, shape, rows, columns);
  if (first_row == 0 && !aligned) {
    store_heads<Layout>(y, matrices, shape, rows, shape.continues ? 1 : columns);
  }
}

template <class Word>
void launch_shifted(const Call<Word>& call, const Config& config) {
  const TurnedDims turned = turned_dims(call.movement);
  const Matrices matrices =
      matrices_of(call.movement, *turned.row, *turned.column, kNoDepth, config);
  dispatch_value<1, most_load_words(sizeof(Word))>(config.load_words, [&](auto load) {
    using Layout = ShiftedLayout<Word, decltype(load)::value>;
    const int line_packs = config.tile_rows / Layout::kVector;
    const ShiftedTile tile{
        config.tile_rows, config.tile_columns, (line_packs + 1) | 1, Divisor(line_packs),
        matrices.out_column_stride == matrices.rows && matrices.rows >= Layout::kVector};
    const std::size_t shared_bytes =
        std::size_t{Layout::kLines} * tile.pitch * sizeof(typename Layout::Pack);
    launch_kernel<shifted_kernel<Word, Layout::kLoad>>(
        call.queue, {tile_count(matrices), static_cast<unsigned>(config.threads), shared_bytes},
        call.x, call.y, matrices, tile);
  });
}

}  // namespace transpose
}  // namespace JAX_GPUOPS_NAMESPACE
