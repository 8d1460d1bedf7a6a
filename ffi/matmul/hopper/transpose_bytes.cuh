// Transposes matrices of bytes to rows that begin at multiples of 128 bytes: factors of 8 bits,
// which the tensor cores take only with k as the contiguous dimension.
//
// A block takes one tile of 128 x 128 after the other. A thread loads 16 neighbours of each of four
// rows, and puts the four bytes of a column into a word; the words of a column, one from each of 32
// threads, make a line of 128 bytes in shared memory, which is a row of the result:
//
//     from   | m 0 .. 15       |      word      line m of shared memory, and of `to`
//     k 0    |a0 a1 a2 ..      |
//     k 1    |b0 b1 b2 ..      |  ->  a0b0c0d0  | k 0-3 | k 4-7 | ..              |
//     k 2    |c0 c1 c2 ..      |      a1b1c1d1  | k 0-3 | k 4-7 | ..              |
//     k 3    |d0 d1 d2 ..      |      ..
//
// The 16-byte piece p of line m lies at p ^ (m / 16) % 8, so that a warp, which has words of four
// threads along k and eight along m, 16 lines apart, writes to 32 banks; and the eight lanes that
// read a line find its pieces in 32 banks too.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/cuda.h"
#include "core/dispatch.h"
#include "core/integer.h"
#include "core/launch.h"
#include "core/ptx/early_launch.cuh"
#include "core/shared.h"
#include "matmul/matmul.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {

inline constexpr int kByteTransposeThreads = 256;
inline constexpr int kByteTransposeTile = 128;  // rows and columns

struct ByteTransposition {
  const std::uint8_t* from;
  std::uint8_t* to;
  std::int64_t rows;  // of a matrix of `from`
  std::int64_t cols;
  std::int64_t to_length;  // of a row of the result
  std::int64_t tiles_down;
  std::int64_t tiles_across;
  std::int64_t tiles;  // of all matrices
};

struct ByteTransposeStorage {
  uint4 piece[kByteTransposeTile][kByteTransposeTile / 16];
};

// Transposes the 4 x 4 matrix of bytes whose rows are the four words.
__device__ __forceinline__ void transpose_words(unsigned& a, unsigned& b, unsigned& c,
                                                unsigned& d) {
  const unsigned ab_low = __byte_perm(a, b, 0x5140);   // a0 b0 a1 b1
  const unsigned ab_high = __byte_perm(a, b, 0x7362);  // a2 b2 a3 b3
  const unsigned cd_low = __byte_perm(c, d, 0x5140);
  const unsigned cd_high = __byte_perm(c, d, 0x7362);
  a = __byte_perm(ab_low, cd_low, 0x5410);
  b = __byte_perm(ab_low, cd_low, 0x7632);
  c = __byte_perm(ab_high, cd_high, 0x5410);
  d = __byte_perm(ab_high, cd_high, 0x7632);
}

// Loads 16 neighbours as four words: by one load, or byte by byte the `count` that exist.
template <bool kPacked>
__device__ __forceinline__ void load_neighbours(unsigned (&words)[4], const std::uint8_t* from,
                                                int count) {
#pragma unroll
  for (int w = 0; w < 4; ++w) words[w] = 0;
  if constexpr (kPacked) {
    if (count <= 0) return;
    const uint4 pack = *reinterpret_cast<const uint4*>(from);
    words[0] = pack.x;
    words[1] = pack.y;
    words[2] = pack.z;
    words[3] = pack.w;
  } else {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if (i < count) words[i / 4] |= unsigned{from[i]} << i % 4 * 8;
    }
  }
}

// kPacked: rows of `from` begin at multiples of 16 bytes.
template <bool kPacked>
__global__ void __launch_bounds__(kByteTransposeThreads)
    transpose_bytes_kernel(const __grid_constant__ ByteTransposition all) {
  constexpr int kTile = kByteTransposeTile;
  let_next_kernel_start();
  auto& storage = shared<ByteTransposeStorage>();
  const int thread = threadIdx.x;
  for (std::int64_t number = blockIdx.x; number < all.tiles; number += gridDim.x) {
    const std::int64_t line = number / all.tiles_across;
    const std::int64_t matrix = line / all.tiles_down;
    const std::int64_t row = (line - matrix * all.tiles_down) * kTile;
    const std::int64_t col = (number - line * all.tiles_across) * kTile;
    const int rows = static_cast<int>(std::min<std::int64_t>(kTile, all.rows - row));
    const int cols = static_cast<int>(std::min<std::int64_t>(kTile, all.cols - col));

    // Load: eight lanes have a line of 128 bytes.
    const int quad = thread / 8;        // of four rows
    const int first = thread % 8 * 16;  // column
    const std::uint8_t* const from =
        all.from + (matrix * all.rows + row + quad * 4) * all.cols + col + first;
    unsigned words[4][4];  // of row i, columns 4 w to 4 w + 3
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int count = quad * 4 + i < rows ? cols - first : 0;
      load_neighbours<kPacked>(words[i], from + i * all.cols, count);
    }

    // Transpose: to column 4 w + i, rows 4 quad to 4 quad + 3.
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      transpose_words(words[0][w], words[1][w], words[2][w], words[3][w]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int piece = quad / 4 ^ first / 16;
        reinterpret_cast<unsigned*>(&storage.piece[first + 4 * w + i][piece])[quad % 4] =
            words[i][w];
      }
    }
    __syncthreads();

    // Store: eight lanes have a row of the result. The last piece extends into the padding.
    std::uint8_t* const to = all.to + (matrix * all.cols + col) * all.to_length + row;
    const int piece = thread % 8;
#pragma unroll
    for (int c = thread / 8; c < kTile; c += kByteTransposeThreads / 8) {
      if (c < cols && piece * 16 < rows) {
        *reinterpret_cast<uint4*>(to + c * all.to_length + piece * 16) =
            storage.piece[c][piece ^ c / 16];
      }
    }
    __syncthreads();  // the next tile is written where this one is read
  }
}

// T: any type of one byte. A template, so that only sources with such a type compile the kernels.
template <class T>
void launch_transpose_bytes(const Queue& queue, const void* from, void* to,
                            const StoredFactor& factor) {
  static_assert(sizeof(T) == 1);
  const std::int64_t down = divide_up(factor.rows, kByteTransposeTile);
  const std::int64_t across = divide_up(factor.length, kByteTransposeTile);
  const std::int64_t tiles = factor.batch * down * across;
  dispatch_value<false, true>(fits_tensor_copies(factor.length), [&](auto packed) {
    launch_kernel<transpose_bytes_kernel<decltype(packed)::value>>(
        queue, {dim3(grid_extent(tiles)), kByteTransposeThreads, sizeof(ByteTransposeStorage)},
        ByteTransposition{static_cast<const std::uint8_t*>(from), static_cast<std::uint8_t*>(to),
                          factor.rows, factor.length, pitch_of_copy(factor), down, across, tiles});
  });
}

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
