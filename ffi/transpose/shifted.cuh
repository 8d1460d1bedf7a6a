// transpose, algorithm `shifted`: rows that begin at any word.
//
// A warp reads strips of the tile: as many rows as a pack of 16 bytes has words. Its lanes read
// neighbouring columns. Then each has, for its columns, packs of rows of the result, which it
// stores to lines of shared memory:
//
//     strip     a e i m     lane 0 | a b c d |  to line 0
//               b f j n     lane 1 | e f g h |  to line 1
//               c g k o     lane 2 | i j k l |  to line 2
//               d h l p     ...
//
// Words of 1 and 2 bytes are read 4 bytes at a time. If a row begins within 4 bytes, each lane gets
// the rest of its words from the next lane:
//
//     read      . a | b c | d e |     lane 0 | a b |   lane 1 | c d |   ...
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
#include "core/launch.h"
#include "core/ptx/memory.cuh"
#include "core/shared.h"
#include "core/shifted_packs.cuh"
#include "core/vector.h"
#include "transpose/matrices.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace transpose {

template <class Word_>
struct ShiftedLayout {
  using Word = Word_;
  static constexpr int kVector = strip_rows(sizeof(Word));
  static constexpr int kLines = shifted_columns(sizeof(Word));
  static constexpr int kStrips = strips_per_warp(sizeof(Word));
  static constexpr int kLoad = words_per_load(sizeof(Word));   // of a lane
  static constexpr int kLoads = kLines / (kWarpSize * kLoad);  // of a lane, from each row

  using Pack = JAX_GPUOPS_NAMESPACE::Pack<Word, kVector>;
  // Has the words of a load.
  using Register = std::conditional_t<sizeof(Word) == 8, std::uint64_t, std::uint32_t>;

  // The column of the tile at which load `i` of a lane begins, in rows that begin at a load.
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
  const Word* end;  // of the operand
  std::int64_t row_stride;
  std::int64_t back;  // from the row after the last one to the first one, a column further
  int rows;           // of the matrix, from the tile on
  int last;           // `rows` if no rows follow
  int inner;          // rows after which the operand goes on for two loads and more
  int columns;        // of the tile
  bool aligned;       // all rows begin at a load
};

// The load in which the word at `at` is.
template <class Layout, class Word = typename Layout::Word>
__device__ __forceinline__ const typename Layout::Register* load_of(const Word* at) {
  using Register = typename Layout::Register;
  return reinterpret_cast<const Register*>(reinterpret_cast<std::uintptr_t>(at) &
                                           ~std::uintptr_t{sizeof(Register) - 1});
}

// Reads a load, word by word if the operand ends before or within it.
template <class Layout, class Word = typename Layout::Word>
__device__ __forceinline__ typename Layout::Register last_load(
    const typename Layout::Register* from, const Word* end) {
  if constexpr (Layout::kLoad > 1) {
    const auto* const words = reinterpret_cast<const Word*>(from);
    if (words + Layout::kLoad > end) {
      typename Layout::Register result = 0;
#pragma unroll 1
      for (int i = 0; words + i < end; ++i) {
        result |= static_cast<typename Layout::Register>(words[i]) << (8 * sizeof(Word) * i);
      }
      return result;
    }
  }
  return __ldg(from);
}

// Reads the loads of a lane from each row of a strip. Where there are none, they are any.
template <class Layout, class Word = typename Layout::Word>
__device__ __forceinline__ void load_strip(
    const Source<Word>& source, int first,
    typename Layout::Register (&word)[Layout::kLoads][Layout::kVector]) {
  constexpr int kVector = Layout::kVector;
  constexpr int kLoad = Layout::kLoad;
  const Word* const from = source.x + first * source.row_stride + Layout::column(0);
  if (first + kVector <= source.inner) {
#pragma unroll
    for (int j = 0; j < Layout::kLoads; ++j) {
      if (Layout::column(j) >= source.columns + kLoad - 1) break;
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        word[j][i] = __ldg(load_of<Layout>(from + i * source.row_stride) + j * kWarpSize);
      }
    }
    return;
  }
  const Word* at = computed_once(from + (first < source.rows ? 0 : source.back));
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    const int row = first + i;
    if (i > 0) at += source.row_stride + (row == source.rows ? source.back : 0);
#pragma unroll
    for (int j = 0; j < Layout::kLoads; ++j) {
      const auto* const load = load_of<Layout>(at) + j * kWarpSize;
      if (row < source.last && Layout::column(j) < source.columns + kLoad - 1) {
        word[j][i] = last_load<Layout>(load, source.end);
      }
    }
  }
}

// Rows that begin within a load: each lane gets the rest of its words from the next one.
template <class Layout, class Word = typename Layout::Word>
__device__ __forceinline__ void align_strip(
    const Source<Word>& source, int first,
    typename Layout::Register (&word)[Layout::kLoads][Layout::kVector]) {
  if constexpr (Layout::kLoad > 1) {
    if (source.aligned && first + Layout::kVector <= source.rows) return;
    // In bits; the shifts are modulo 32.
    constexpr unsigned kWordBits = 8 * sizeof(Word);
    const unsigned step = kWordBits * static_cast<unsigned>(source.row_stride);
    const unsigned back = kWordBits * static_cast<unsigned>(source.back);
    unsigned past = 8 * static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(source.x));
    past += first * step;
#pragma unroll
    for (int i = 0; i < Layout::kVector; ++i) {
      const std::uint32_t next = __shfl_down_sync(kFullWarp, word[0][i], 1);
      const unsigned shift = first + i < source.rows ? past : past + back;
      word[0][i] = __funnelshift_r(word[0][i], next, shift);
      past += step;
    }
  }
}

// Loads `strips` strips into shared memory.
template <class Layout, class Word = typename Layout::Word>
__device__ inline void load_strips(const Source<Word>& source, int strips, int pitch) {
  constexpr int kStrips = Layout::kStrips;
  constexpr int kVector = Layout::kVector;
  const int warp = threadIdx.x / kWarpSize;
  const int warps = blockDim.x / kWarpSize;
  auto* const packs = shared_array<typename Layout::Pack>();
  // All loads are issued before the first use, so that they are in flight together.
  typename Layout::Register word[kStrips][Layout::kLoads][kVector] = {};
#pragma unroll
  for (int s = 0; s < kStrips; ++s) {
    const int strip = warp + s * warps;
    if (strip >= strips) break;
    load_strip<Layout>(source, strip * kVector, word[s]);
  }
#pragma unroll
  for (int s = 0; s < kStrips; ++s) {
    const int strip = warp + s * warps;
    if (strip >= strips) break;
    align_strip<Layout>(source, strip * kVector, word[s]);
#pragma unroll
    for (int j = 0; j < Layout::kLoads; ++j) {
      store_columns<Layout>(word[s][j], Layout::column(j), packs + strip, pitch);
    }
  }
}

// Stores the whole packs that begin in the tile, which begins at y.
template <class Layout, class Word = typename Layout::Word>
__device__ inline void store_lines(Word* __restrict__ y, const Matrices& matrices,
                                   const ShiftedTile& tile, int rows, unsigned columns,
                                   bool aligned) {
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
    if (row + kVector > rows && !(tile.continues && row < rows && column + 1 < columns)) continue;
    const auto* const from = packs + Layout::line(column) * tile.pitch + place.remainder;
    if (aligned) {
      *reinterpret_cast<uint4*>(to + row) = __builtin_bit_cast(uint4, from[0]);
    } else {
      write_shifted(__builtin_bit_cast(uint4, from[0]), __builtin_bit_cast(uint4, from[1]),
                    past * sizeof(Word), to + row);
    }
  }
}

// Stores the words that are in no whole pack: those before the first one, if the tile is at the
// beginning of the matrix, and those after the last one. If rows of the result are contiguous, only
// the beginning of the first and the end of the last one are left.
template <class Layout, class Word = typename Layout::Word>
__device__ inline void store_edges(Word* __restrict__ y, const Matrices& matrices,
                                   const ShiftedTile& tile, int rows, int columns, bool begins) {
  constexpr int kVector = Layout::kVector;
  const auto* const packs = shared_array<typename Layout::Pack>();
  const int lines = tile.continues ? 1 : columns;
#pragma unroll 1
  for (int index = threadIdx.x; index < lines * 2 * kVector; index += blockDim.x) {
    const bool at_end = index / kVector % 2 != 0;
    const int column = tile.continues && at_end ? columns - 1 : index / (2 * kVector);
    Word* const to = y + column * matrices.out_column_stride;
    const int past = elements_to_alignment<kVector>(to);
    int row = index % kVector;
    if (at_end) {
      const int after = rows - past;
      if (after > tile.rows || row >= after % kVector) continue;
      row = rows - 1 - row;
    } else if (!begins || row >= min(past, rows)) {
      continue;
    }
    to[row] = packs[Layout::line(column) * tile.pitch + row / kVector].element[row % kVector];
  }
}

template <class Word>
__global__ void __launch_bounds__(kMostShiftedWarps* kWarpSize, kShiftedBlocks)
    shifted_kernel(const Word* __restrict__ x, Word* __restrict__ y, const Word* end,
                   ShiftedTile shape, Matrices matrices) {
  using Layout = ShiftedLayout<Word>;
  constexpr int kVector = Layout::kVector;
  constexpr int kLoad = Layout::kLoad;
  const Tile tile = block_tile(matrices);
  const unsigned first_row = tile.row * shape.rows;
  const unsigned first_column = tile.column * shape.columns;
  // More rows than the lines reach make no difference.
  const int rows =
      static_cast<int>(min(matrices.rows - first_row, static_cast<unsigned>(shape.rows + kVector)));
  const int columns =
      static_cast<int>(min(matrices.columns - first_column, static_cast<unsigned>(shape.columns)));
  x += tile.matrix.in + first_row * matrices.in_row_stride + first_column;
  y += tile.matrix.out + first_column * matrices.out_column_stride + first_row;

  const bool aligned = is_aligned<kVector>(y) && matrices.out_column_stride % kVector == 0;
  const bool ends =
      kLoad > 1 && end - x < (rows - 1) * matrices.in_row_stride + columns + 2 * kLoad;
  const Source<Word> source{x,
                            end,
                            matrices.in_row_stride,
                            1 - matrices.rows * matrices.in_row_stride,
                            rows,
                            rows + (shape.continues ? kVector - 1 : 0),
                            ends ? rows - 2 * kLoad : rows,
                            columns,
                            is_aligned<kLoad>(x) && matrices.in_row_stride % kLoad == 0};
  load_strips<Layout>(source, shape.rows / kVector + (aligned ? 0 : 1), shape.pitch);
  __syncthreads();
  store_lines<Layout>(y, matrices, shape, rows, columns, aligned);
  const bool begins = first_row == 0;
  if ((begins && !aligned) || rows < shape.rows + kVector) {
    store_edges<Layout>(y, matrices, shape, rows, columns, begins);
  }
}

template <class Word>
void launch_shifted(const Call<Word>& call, const Config& config) {
  using Layout = ShiftedLayout<Word>;
  const TurnedDims turned = turned_dims(call.movement);
  const Matrices matrices =
      matrices_of(call.movement, *turned.row, *turned.column, kNoDepth, config);
  const int line_packs = config.tile_rows / Layout::kVector;
  const ShiftedTile tile{config.tile_rows, config.tile_columns, (line_packs + 1) | 1,
                         Divisor(line_packs),
                         matrices.out_column_stride == matrices.rows &&
                             matrices.rows >= static_cast<unsigned>(Layout::kVector)};
  const std::size_t shared_bytes =
      std::size_t{Layout::kLines} * tile.pitch * sizeof(typename Layout::Pack);
  launch_kernel<shifted_kernel<Word>>(
      call.queue, {tile_count(matrices), static_cast<unsigned>(config.threads), shared_bytes},
      call.x, call.y, call.x + call.movement.words(), tile, matrices);
}

}  // namespace transpose
}  // namespace JAX_GPUOPS_NAMESPACE
