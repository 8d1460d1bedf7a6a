// matmul, algorithm `mma_batched`: batches of small products, and rows of any alignment, on the
// tensor cores of any GPU from compute capability 8.0 on.
//
// Such products read and write much for each multiplication, so a multiprocessor has several blocks
// with a tile each: while one waits for its factors, others multiply or write results. A block
// copies slices of both factors to shared memory by cp.async, the next slice while it multiplies
// this one, and multiplies them by mma.sync.
//
// Rows of 197 elements begin at any address, but copies and stores of 16 bytes are fast. So each
// line, of factors and results, has the same phase, its offset from a multiple of 16 bytes, in
// shared memory as in global memory, and aligned pieces move between the two:
//
//     global memory   ... | . . . a a a a a | a a a a a a a a | a a . . . . . . | ...
//                           phase             pieces of 16 bytes
//     shared memory       | . . . a a a a a | a a a a a a a a | a a . . . . . . | padding
//
// A piece of a factor also has elements of neighbouring lines, which are not used. A piece of the
// result that is not whole is written element by element.
//
// A factor's lines are its rows (rows of a or columns of b) if it is deep (K-major), else each line
// is one k. Lines whose phases are all 0 are read by ldmatrix: a line has an odd number of pieces,
// so the pieces of 8 lines are in different banks. Other lines are read element by element; lines 8
// apart have the same phase, so a lane reads lines of one phase, or of two if a line is one k.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/collectives.h"
#include "core/dispatch.h"
#include "core/ptx/async_copy.cuh"
#include "core/ptx/mma.cuh"
#include "core/shared.h"
#include "matmul/gemm.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {

template <class T_, int kTileIndex>
struct MmaBatched {
  using T = T_;
  static constexpr MmaBatchedTile kTable = kMmaBatchedTiles[kTileIndex];
  static constexpr int kRows = kTable.rows;
  static constexpr int kCols = kTable.cols;
  static constexpr int kWarpRows = kTable.warp_rows;
  static constexpr int kWarpCols = kTable.warp_cols;
  static constexpr int kWarpsDown = kRows / kWarpRows;
  static constexpr int kThreads = kTable.threads();
  static constexpr int kRowTiles = kWarpRows / 16;
  static constexpr int kColTiles = kWarpCols / 16;
  static constexpr int kSliceDepth = kMmaBatchedSliceBytes / static_cast<int>(sizeof(T));
  static constexpr int kSteps = kSliceDepth / kMmaDepth<T>;
};

__device__ __forceinline__ int phase_of(const void* address) {
  return static_cast<int>(reinterpret_cast<std::uintptr_t>(address) % kPieceBytes);
}

// ---- Factors ----

// The lines of a tile of kExtent rows or columns of a factor.
template <class Kernel, int kExtent>
class Lines {
 public:
  using T = typename Kernel::T;
  static constexpr int kBytes = mma_batched_slice_bytes(kExtent, sizeof(T));

  // The factor is a parameter of the kernel, so its members take no registers.
  __device__ __forceinline__ Lines(const Factor<T>& factor, std::int64_t batch,
                                   std::int64_t first_row, std::int64_t depth)
      : factor_(factor) {
    const T* const matrix = factor.data + batch * factor.batch_stride;
    next_ = matrix + first_row * factor.row_stride;
    end_ = reinterpret_cast<const unsigned char*>(matrix + factor.extent * depth);
    const std::int64_t left = factor.extent - first_row;
    rows_ = left < kExtent ? static_cast<int>(left) : kExtent;
  }

  __device__ __forceinline__ bool deep() const { return factor_.deep; }
  // Whether all lines begin at multiples of 16 bytes.
  __device__ __forceinline__ bool aligned() const {
    return stride() * static_cast<int>(sizeof(T)) % kPieceBytes == 0;
  }
  // The phase of a line of any slice. The first lines of all slices have the same.
  __device__ __forceinline__ int phase(int line) const {
    const auto step = static_cast<int>(stride() % kPieceBytes) * static_cast<int>(sizeof(T));
    return (phase_of(next_) + line * step) % kPieceBytes;
  }

  // Issues the copies of the next slice, of which `depth` k's lie in the factor.
  __device__ __forceinline__ void copy(unsigned char* to, int depth) {
    if (deep()) {
      constexpr int kPieces = kMmaBatchedSliceBytes / kPieceBytes;
      copy_lines<kExtent, kPieces, kDeepPitch>(to, rows_, depth);
      next_ += Kernel::kSliceDepth;
    } else {
      constexpr int kPieces = kExtent * static_cast<int>(sizeof(T)) / kPieceBytes;
      copy_lines<Kernel::kSliceDepth, kPieces, kWidePitch>(to, depth, rows_);
      next_ += Kernel::kSliceDepth * factor_.depth_stride;
    }
  }

  static constexpr int kDeepPitch = kMmaBatchedSliceBytes + kPieceBytes;
  static constexpr int kWidePitch = kExtent * static_cast<int>(sizeof(T)) + kPieceBytes;
  static_assert(kDeepPitch / kPieceBytes % 2 == 1 && kWidePitch / kPieceBytes % 2 == 1,
                "the pieces of 8 lines are in different banks");

 private:
  __device__ __forceinline__ std::int64_t stride() const {
    return deep() ? factor_.row_stride : factor_.depth_stride;
  }

  // Copies `lines` lines of `length` elements.
  template <int kLines, int kPieces, int kPitch>
  __device__ __forceinline__ void copy_lines(unsigned char* to, int lines, int length) const {
    constexpr int kStep = Kernel::kThreads / kPieces;
    const std::int64_t line_bytes = stride() * static_cast<int>(sizeof(T));
    const int bytes = length * static_cast<int>(sizeof(T));
    const auto* const first = reinterpret_cast<const unsigned char*>(next_);
    const int piece = threadIdx.x % kPieces * kPieceBytes;
    int line = threadIdx.x / kPieces;
    const unsigned char* line_begin = first + line * line_bytes;
    // Most slices of aligned factors lie in the matrix as a whole.
    if (aligned() && lines == kLines && bytes == kPieces * kPieceBytes) {
#pragma unroll
      for (int i = 0; i < kLines; i += kStep, line_begin += kStep * line_bytes) {
        copy_async<kPieceBytes>(to + (line + i) * kPitch + piece, line_begin + piece, true);
      }
      return;
    }
    const auto copy_piece = [&](int line, const unsigned char* line_begin, int piece) {
      const int begin = phase_of(line_begin);
      if (piece >= begin + bytes) return;
      const unsigned char* const from = line_begin - begin + piece;
      unsigned char* const place = to + line * kPitch + piece;
      if (from + kPieceBytes <= end_) {
        copy_async<kPieceBytes>(place, from, true);
      } else {
        copy_last(place, from);
      }
    };
#pragma unroll 1
    for (; line < lines; line += kStep, line_begin += kStep * line_bytes) {
      copy_piece(line, line_begin, piece);
    }
    if (aligned()) return;
    // Other lines may have one piece more.
    for (line = threadIdx.x; line < lines; line += Kernel::kThreads) {
      copy_piece(line, first + line * line_bytes, kPieces * kPieceBytes);
    }
  }

  // No byte beyond the matrix is read: there may be none.
  __device__ __forceinline__ void copy_last(unsigned char* to, const unsigned char* from) const {
#pragma unroll 1
    for (; from < end_; from += sizeof(T), to += sizeof(T)) {
      *reinterpret_cast<T*>(to) = *reinterpret_cast<const T*>(from);
    }
  }

  const Factor<T>& factor_;
  const T* next_;             // the tile's first element of the next slice
  const unsigned char* end_;  // of the matrix
  int rows_;                  // that lie in the factor
};

// Loads a warp's tiles of 16 rows by the depth of one mma from a slice: words as
// multiply_add_warp() takes them, of a as its left operand, of b as the right operands of two.
template <class Kernel, int kExtent, bool kLeft>
class TileReader {
 public:
  using T = typename Kernel::T;
  using Slice = Lines<Kernel, kExtent>;

  __device__ __forceinline__ TileReader(const Slice& lines, int first_row)
      : by_matrices_(lines.aligned() && (lines.deep() || sizeof(T) == 2)), deep_(lines.deep()) {
    const int lane = threadIdx.x % kWarpSize;
    if (by_matrices_) {  // the lane gives the address of a line of one word's 8 x 8
      const int row = first_row + 8 * row_half(lane / 8);
      const int half = depth_half(lane / 8);
      offset_ = deep_ ? (row + lane % 8) * Slice::kDeepPitch + half * kPieceBytes
                      : (8 * half + lane % 8) * Slice::kWidePitch + row * kElementBytes;
      next_offset_ = 0;
      return;
    }
    const int row = first_row + lane / 4;
    const int k = lane % 4 * kPerWord;
    if (deep_) {
      offset_ = row * Slice::kDeepPitch + lines.phase(row) + k * kElementBytes;
      next_offset_ = offset_ + kElementBytes;
    } else {
      const auto offset = [&](int at) {
        return at * Slice::kWidePitch + lines.phase(at) + row * kElementBytes;
      };
      offset_ = offset(k);
      next_offset_ = offset(k + 1);
    }
  }

  // Loads the warp's tiles at step `step` of the slice.
  template <int kTiles>
  __device__ __forceinline__ void load(const unsigned char* slice, int step,
                                       MmaWord<T> (&words)[kTiles][4]) const {
    const auto each = [&](auto&& load_tile) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) load_tile(tile, words[tile]);
    };
    if (by_matrices_) {
      const unsigned line = shared_address(slice) + offset_;
      if (deep_) {
        each([&](int tile, MmaWord<T>(&to)[4]) {
          load_matrices<false>(line + at<true>(16 * tile, kDepth * step), to);
        });
      } else {
        each([&](int tile, MmaWord<T>(&to)[4]) {
          load_matrices<true>(line + at<false>(16 * tile, kDepth * step), to);
        });
      }
    } else if (deep_) {
      each([&](int tile, MmaWord<T>(&to)[4]) { load_elements<true>(slice, step, tile, to); });
    } else {
      each([&](int tile, MmaWord<T>(&to)[4]) { load_elements<false>(slice, step, tile, to); });
    }
    if constexpr (std::is_same_v<T, float>) {
      each([](int, MmaWord<T>(&to)[4]) {
#pragma unroll
        for (MmaWord<T>& word : to) word = round_to_tf32(word);
      });
    }
  }

  // Sets the elements of the tiles beyond `depth`, less than that of one mma, to 0. Shared memory
  // has others there: the next elements of a line, or none that were copied.
  template <int kTiles>
  __device__ static __forceinline__ void clear_beyond(int depth, MmaWord<T> (&words)[kTiles][4]) {
    std::uint32_t kept[2];  // bits of the words of each half
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int k = static_cast<int>(threadIdx.x) % 4 * kPerWord + kDepth / 2 * half;
      const int elements = depth - k;
      kept[half] = elements <= 0 ? 0 : elements < kPerWord ? 0xffff : 0xffffffff;
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int word = 0; word < 4; ++word) words[tile][word] &= kept[depth_half(word)];
    }
  }

 private:
  static constexpr int kDepth = kMmaDepth<T>;
  static constexpr int kPerWord = kMmaPerWord<T>;
  static constexpr int kElementBytes = sizeof(T);

  // In which half of a tile's rows, and of its depth, a word is.
  __device__ static constexpr int row_half(int word) { return kLeft ? word % 2 : word / 2; }
  __device__ static constexpr int depth_half(int word) { return kLeft ? word / 2 : word % 2; }

  // How far a row and a k are from the lane's first. Their lines have the same phase: both are
  // multiples of 8, or of 4 for floats.
  template <bool kDeep>
  __device__ static constexpr int at(int row, int k) {
    return kDeep ? row * Slice::kDeepPitch + k * kElementBytes
                 : row * kElementBytes + k * Slice::kWidePitch;
  }

  template <bool kDeep>
  __device__ __forceinline__ void load_elements(const unsigned char* slice, int step, int tile,
                                                MmaWord<T> (&words)[4]) const {
    const unsigned char* const first = slice + offset_;
    [[maybe_unused]] const unsigned char* const second = slice + next_offset_;
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      const int row = 16 * tile + 8 * row_half(word);
      const int k = kDepth * step + kDepth / 2 * depth_half(word);
      if constexpr (kPerWord == 1) {
        words[word] = *reinterpret_cast<const std::uint32_t*>(first + at<kDeep>(row, k));
      } else {
        const auto low = *reinterpret_cast<const std::uint16_t*>(first + at<kDeep>(row, k));
        const auto high = *reinterpret_cast<const std::uint16_t*>(second + at<kDeep>(row, k));
        words[word] = std::uint32_t{high} << 16 | low;
      }
    }
  }

  bool by_matrices_;
  bool deep_;
  int offset_;       // of the lane's line, or of its first element
  int next_offset_;  // of the next along k, if a word has two
};

// ---- Results ----

template <class Kernel>
using BatchedSums = float[Kernel::kRowTiles][2 * Kernel::kColTiles][4];

// A tile of the result, in lines of kCols elements of type R.
template <class Kernel, class R>
class ResultLines {
 public:
  using T = typename Kernel::T;
  static constexpr int kElementBytes = sizeof(R);
  static constexpr int kPitch = mma_batched_result_pitch(Kernel::kCols, kElementBytes);

  __device__ __forceinline__ ResultLines(const Gemm<T>& gemm, const Tile& tile,
                                         unsigned char* lines)
      : lines_(lines), stride_(gemm.b.extent * kElementBytes) {
    const std::int64_t row = tile.batch * gemm.a.extent + tile.row;
    result_ = static_cast<unsigned char*>(gemm.epilogue.result) + row * stride_ +
              tile.col * kElementBytes;
    const std::int64_t rows_left = gemm.a.extent - tile.row;
    const std::int64_t cols_left = gemm.b.extent - tile.col;
    rows_ = rows_left < Kernel::kRows ? static_cast<int>(rows_left) : Kernel::kRows;
    cols_ = cols_left < Kernel::kCols ? static_cast<int>(cols_left) : Kernel::kCols;
  }

  // Writes the sums of a warp's part of the tile to the lines.
  __device__ __forceinline__ void put(const BatchedSums<Kernel>& sums, int first_row,
                                      int first_col) const {
    const int lane = threadIdx.x % kWarpSize;
    const int row = first_row + lane / 4;
    const int col = first_col + lane % 4 * 2;
    // Lines 8 apart have the same phase.
    unsigned char* const to = lines_ + row * kPitch + phase(row) + col * kElementBytes;
    const bool pairs = kElementBytes == 2 && stride_ % 4 == 0;
#pragma unroll
    for (int i = 0; i < Kernel::kRowTiles; ++i) {
#pragma unroll
      for (int j = 0; j < 2 * Kernel::kColTiles; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float pair[2] = {sums[i][j][2 * half], sums[i][j][2 * half + 1]};
          const auto values = narrow<R, 2>(pair);
          R* const place =
              reinterpret_cast<R*>(to + (16 * i + 8 * half) * kPitch + 8 * j * kElementBytes);
          if (pairs) {
            write_pack(values, place);
          } else {
            const auto elements = __builtin_bit_cast(Elements, values);
            place[0] = elements.first;
            place[1] = elements.second;
          }
        }
      }
    }
  }

  // After a barrier: writes the lines to global memory.
  __device__ __forceinline__ void write() const {
    constexpr int kPieces = Kernel::kCols * kElementBytes / kPieceBytes;
    constexpr int kSize = kPieceBytes / kElementBytes;
    constexpr int kStep = Kernel::kThreads / kPieces;
    const int bytes = cols_ * kElementBytes;
    const int piece = threadIdx.x % kPieces * kPieceBytes;
    int row = threadIdx.x / kPieces;
    unsigned char* line = result_ + row * stride_;
    // Whole pieces: a line may have one more than a thread for each.
#pragma unroll 2
    for (; row < rows_; row += kStep, line += kStep * stride_) {
      const int begin = phase_of(line);
      if (piece >= begin && piece + kPieceBytes <= begin + bytes) {
        write_global_pack(read_pack<kSize>(line_at(row, piece)),
                          reinterpret_cast<R*>(line - begin + piece));
      }
    }
    if (phase_of(result_) == 0 && (stride_ | bytes) % kPieceBytes == 0) return;
    // The others: one at the beginning of a line, or one at its end.
    for (int i = threadIdx.x; i < 2 * rows_; i += Kernel::kThreads) {
      row = i / 2;
      line = result_ + row * stride_;
      const int begin = phase_of(line);
      const int end = begin + bytes;
      const int last = end / kPieceBytes * kPieceBytes;
      int from = begin;
      int to = end;
      if (i % 2 == 0) {
        to = begin == 0 ? 0 : end < kPieceBytes ? end : kPieceBytes;
      } else {
        from = last > 0 || begin == 0 ? last : end;
      }
#pragma unroll 1
      for (int at = from; at < to; at += kElementBytes) {
        *reinterpret_cast<R*>(line - begin + at) = *line_at(row, at);
      }
    }
  }

 private:
  struct Elements {
    R first;
    R second;
  };

  __device__ __forceinline__ const R* line_at(int row, int byte) const {
    return reinterpret_cast<const R*>(lines_ + row * kPitch + byte);
  }

  __device__ __forceinline__ int phase(int row) const {
    return (phase_of(result_) + row * static_cast<int>(stride_ % kPieceBytes)) % kPieceBytes;
  }

  unsigned char* lines_;
  unsigned char* result_;  // the tile's first element
  std::int64_t stride_;    // of its rows, in bytes
  int rows_;               // that lie in the result
  int cols_;
};

// Adds the bias and applies the activation.
template <class Kernel>
__device__ __forceinline__ void finish(const Gemm<typename Kernel::T>& gemm, const Tile& tile,
                                       int first_col, BatchedSums<Kernel>& sums) {
  using T = typename Kernel::T;
  const Epilogue<T>& epilogue = gemm.epilogue;
  const std::int64_t col = tile.col + first_col + threadIdx.x % 4 * 2;
#pragma unroll
  for (int j = 0; j < 2 * Kernel::kColTiles; ++j) {
    float bias[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      bias[e] = epilogue.wide ? bias_of<float>(epilogue.finish, tile.batch, col + 8 * j + e)
                              : bias_of<T>(epilogue.finish, tile.batch, col + 8 * j + e);
    }
#pragma unroll
    for (int i = 0; i < Kernel::kRowTiles; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        sums[i][j][e] = activated(epilogue.finish.op, sums[i][j][e] + bias[e % 2]);
      }
    }
  }
}

// ---- The kernel ----

template <class T>
struct BatchedProduct {
  Gemm<T> gemm;
  NumberedTiles tiles;
  int stages;
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kTable.resident)
    mma_batched_kernel(const __grid_constant__ BatchedProduct<typename Kernel::T> product) {
  using T = typename Kernel::T;
  using LinesA = Lines<Kernel, Kernel::kRows>;
  using LinesB = Lines<Kernel, Kernel::kCols>;
  constexpr int kStageBytes = LinesA::kBytes + LinesB::kBytes;
  unsigned char* const memory = shared_array<unsigned char>();
  const Gemm<T>& gemm = product.gemm;
  const Tile tile = product.tiles.template find<Kernel::kRows, Kernel::kCols>(blockIdx.x);
  // The shuffle tells the compiler that the value is the same for all threads of a warp.
  const int warp = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / kWarpSize, 0);
  const int warp_row = warp % Kernel::kWarpsDown * Kernel::kWarpRows;
  const int warp_col = warp / Kernel::kWarpsDown * Kernel::kWarpCols;

  // -- Copies --
  LinesA a_lines(gemm.a, tile.batch, tile.row, gemm.depth);
  LinesB b_lines(gemm.b, tile.batch, tile.col, gemm.depth);
  const TileReader<Kernel, Kernel::kRows, /*kLeft=*/true> a_reader(a_lines, warp_row);
  const TileReader<Kernel, Kernel::kCols, /*kLeft=*/false> b_reader(b_lines, warp_col);
  std::int64_t left = gemm.depth;  // k's that are not copied yet
  const auto next_depth = [&] {
    return left < Kernel::kSliceDepth ? static_cast<int>(left) : Kernel::kSliceDepth;
  };
  const auto copy_slice = [&](unsigned char* stage) {
    const int depth = next_depth();
    if (depth > 0) {
      a_lines.copy(stage, depth);
      b_lines.copy(stage + LinesA::kBytes, depth);
      left -= depth;
    }
    end_copy_group();
    return depth;
  };

  // -- Products of one slice, while the next one is copied --
  BatchedSums<Kernel> sums = {};
  unsigned char* stage = memory;
  unsigned char* other_stage = memory + (product.stages - 1) * kStageBytes;
  int depth = 0;  // of the slice in `stage`: none yet
#pragma unroll 1
  while (true) {
    const int following = copy_slice(other_stage);
#pragma unroll
    for (int step = 0; step < Kernel::kSteps; ++step) {
      const int depth_left = depth - step * kMmaDepth<T>;
      if (depth_left <= 0) break;
      MmaWord<T> a[Kernel::kRowTiles][4];
      MmaWord<T> b[Kernel::kColTiles][4];
      a_reader.load(stage, step, a);
      b_reader.load(stage + LinesA::kBytes, step, b);
      if (depth_left < kMmaDepth<T>) {
        a_reader.clear_beyond(depth_left, a);
        b_reader.clear_beyond(depth_left, b);
      }
#pragma unroll
      for (int i = 0; i < Kernel::kRowTiles; ++i) {
#pragma unroll
        for (int j = 0; j < 2 * Kernel::kColTiles; ++j) {
          const MmaWord<T> right[2] = {b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]};
          multiply_add_warp<T>(sums[i][j], a[i], right);
        }
      }
    }
    if (following == 0) break;
    wait_for_copy_groups<0>();
    __syncthreads();  // the next slice is there for all threads, and none reads this one any more
    depth = following;
    unsigned char* const finished = stage;
    stage = other_stage;
    other_stage = finished;
  }

  // -- Results --
  if (gemm.epilogue.finishes) finish<Kernel>(gemm, tile, warp_col, sums);
  __syncthreads();  // no thread reads factors any more
  const auto write = [&](auto type) {
    const ResultLines<Kernel, typename decltype(type)::type> results(gemm, tile, memory);
    results.put(sums, warp_row, warp_col);
    __syncthreads();
    results.write();
  };
  if (gemm.epilogue.wide) {
    write(Type<float>{});
  } else {
    write(Type<T>{});
  }
}

template <class T>
void launch_mma_batched(const Queue& queue, const Config& config, const Problem& problem,
                        const Buffers& buffers) {
  const BatchedProduct<T> product{make_gemm<T>(config, problem, buffers),
                                  number_tiles(config, problem), config.stages};
  const LaunchShape shape{grid_extent(config.blocks), static_cast<unsigned>(config.threads),
                          static_cast<std::size_t>(config.shared_bytes)};
  const auto matches = [&](const MmaBatchedTile& tile) {
    return tile.rows == config.tile_rows && tile.cols == config.tile_cols;
  };
  dispatch_instance<kMmaBatchedTiles>(matches, [&](auto index) {
    using Kernel = MmaBatched<T, decltype(index)::value>;
    launch_kernel<mma_batched_kernel<Kernel>>(queue, shape, product);
  });
}

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
