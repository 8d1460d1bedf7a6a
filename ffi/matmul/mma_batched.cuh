// matmul, algorithm `mma_batched`: batches of small products, and rows of any alignment, on the
// tensor cores of any GPU from compute capability 8.0 on.
//
// Such products read and write much for each multiplication, so a multiprocessor has several blocks
// with a tile each: while one waits for its factors, others multiply or write results. A block
// copies slices of both factors to shared memory by cp.async, the next slice while it multiplies
// this one, and multiplies them by mma.sync.
//
// Rows of 197 elements begin at any address, but copies and stores of 16 bytes are fast. So all
// lines, of factors and results, keep their place within 16 bytes in shared memory, and what moves
// between it and global memory is whole aligned pieces:
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
// apart have the same phase, so each lane has one of at most two phases.
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
    end_ = matrix + factor.extent * depth;
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

  // Issues the copies of the next slice, of which `depth` k's lie in the factor. Lines of further
  // k's become 0.
  __device__ __forceinline__ void copy(unsigned char* to, int depth) {
    if (deep()) {
      constexpr int kPieces = kMmaBatchedSliceBytes / kPieceBytes;
      copy_lines<kPieces, kDeepPitch>(to, rows_, rows_, depth);
      next_ += Kernel::kSliceDepth;
    } else {
      constexpr int kPieces = kExtent * static_cast<int>(sizeof(T)) / kPieceBytes;
      const int zeroed = (depth + kMmaDepth<T> - 1) / kMmaDepth<T> * kMmaDepth<T>;
      copy_lines<kPieces, kWidePitch>(to, depth, zeroed, rows_);
      next_ += Kernel::kSliceDepth * factor_.depth_stride;
    }
  }

  // Sets the elements of a slice's deep lines that lie beyond `depth`, but take part in products,
  // to 0: a copy of the line's last piece brought others there.
  __device__ __forceinline__ void clear_beyond(unsigned char* slice, int depth) const {
    if (!deep()) return;
    const int past = kMmaDepth<T> - depth % kMmaDepth<T>;
    for (int i = threadIdx.x; i < rows_ * kMmaDepth<T>; i += Kernel::kThreads) {
      const int line = i / kMmaDepth<T>;
      const int k = i % kMmaDepth<T>;
      if (k < past) {
        reinterpret_cast<T*>(slice + line * kDeepPitch + phase(line))[depth + k] = T{};
      }
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

  template <int kPieces, int kPitch>
  __device__ __forceinline__ void copy_lines(unsigned char* to, int lines, int zeroed,
                                             int length) const {
    if (aligned()) {
      copy_pieces<kPieces, kPitch>(to, lines, zeroed, length);
    } else {
      copy_pieces<kPieces + 1, kPitch>(to, lines, zeroed, length);
    }
  }

  template <int kPieces, int kPitch>
  __device__ __forceinline__ void copy_pieces(unsigned char* to, int lines, int zeroed,
                                              int length) const {
    const auto* const first = reinterpret_cast<const unsigned char*>(next_);
    const std::int64_t line_bytes = stride() * static_cast<int>(sizeof(T));
    const int bytes = length * static_cast<int>(sizeof(T));
#pragma unroll 4
    for (int i = threadIdx.x; i < zeroed * kPieces; i += Kernel::kThreads) {
      const int line = i / kPieces;
      const int piece = i % kPieces * kPieceBytes;
      const unsigned char* const begin = first + line * line_bytes;
      const unsigned char* const from = begin - phase_of(begin) + piece;
      unsigned char* const place = to + line * kPitch + piece;
      const bool exists = line < lines && piece < phase_of(begin) + bytes;
      if (!exists && line < lines) continue;
      if (exists && from + kPieceBytes > reinterpret_cast<const unsigned char*>(end_)) {
        copy_last(place, reinterpret_cast<const T*>(from));
      } else {
        copy_async<kPieceBytes>(place, from, exists);
      }
    }
  }

  // No byte beyond the matrix is read: there may be none.
  __device__ __forceinline__ void copy_last(unsigned char* to, const T* from) const {
    for (int i = 0; from + i < end_; ++i) reinterpret_cast<T*>(to)[i] = from[i];
  }

  const Factor<T>& factor_;
  const T* next_;  // the tile's first element of the next slice
  const T* end_;   // of the matrix
  int rows_;       // that lie in the factor
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

  // Loads tile `tile` of the warp at step `step` of the slice.
  __device__ __forceinline__ void load(const unsigned char* slice, int step, int tile,
                                       MmaWord<T> (&words)[4]) const {
    if (by_matrices_) {
      const unsigned line = shared_address(slice) + offset_;
      if (deep_) {
        load_matrices<false>(line + at<true>(16 * tile, kDepth * step), words);
      } else {
        load_matrices<true>(line + at<false>(16 * tile, kDepth * step), words);
      }
    } else if (deep_) {
      load_elements<true>(slice, step, tile, words);
    } else {
      load_elements<false>(slice, step, tile, words);
    }
    if constexpr (std::is_same_v<T, float>) {
#pragma unroll
      for (MmaWord<T>& word : words) word = round_to_tf32(word);
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

// A tile of the result, in lines of kCols elements of type R.
template <class Kernel, class R>
struct ResultLines {
  using T = typename Kernel::T;
  static constexpr int kPitch = mma_batched_result_pitch(Kernel::kCols, sizeof(R));

  const Gemm<T>& gemm;
  const Tile& tile;
  unsigned char* lines;

  __device__ __forceinline__ R* place() const {
    return static_cast<R*>(gemm.epilogue.result) +
           (tile.batch * gemm.a.extent + tile.row) * gemm.b.extent + tile.col;
  }

  // Writes two neighbouring sums of a row to shared memory.
  __device__ __forceinline__ void put(int row, int col, float first, float second) const {
    const Epilogue<T>& epilogue = gemm.epilogue;
    float value[2] = {first, second};
    if (epilogue.finishes) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float bias = bias_of<R>(epilogue.finish, tile.batch, tile.col + col + i);
        value[i] = activated(epilogue.finish.op, value[i] + bias);
      }
    }
    auto* const to = reinterpret_cast<R*>(lines + row * kPitch + phase(row)) + col;
    if (sizeof(R) == 2 && gemm.b.extent % 2 == 0) {
      write_pack(narrow<R, 2>(value), to);
    } else {
      to[0] = narrow<R>(value[0]);
      to[1] = narrow<R>(value[1]);
    }
  }

  // After a barrier: writes the lines to global memory.
  __device__ __forceinline__ void write() const {
    constexpr int kBytes = sizeof(R);
    constexpr int kPieces = kPitch / kPieceBytes;
    const std::int64_t rows_left = gemm.a.extent - tile.row;
    const std::int64_t cols_left = gemm.b.extent - tile.col;
    const int rows = rows_left < Kernel::kRows ? static_cast<int>(rows_left) : Kernel::kRows;
    const int cols = cols_left < Kernel::kCols ? static_cast<int>(cols_left) : Kernel::kCols;
    auto* const result = reinterpret_cast<unsigned char*>(place());
    const std::int64_t stride = gemm.b.extent * kBytes;
#pragma unroll 2
    for (int i = threadIdx.x; i < rows * kPieces; i += Kernel::kThreads) {
      const int row = i / kPieces;
      const int piece = i % kPieces * kPieceBytes;
      const int begin = phase(row);
      const int end = begin + cols * kBytes;
      const auto* const from = reinterpret_cast<const R*>(lines + row * kPitch + piece);
      auto* const to = reinterpret_cast<R*>(result + row * stride - begin + piece);
      constexpr int kSize = kPieceBytes / kBytes;
      if (piece >= begin && piece + kPieceBytes <= end) {
        write_global_pack(read_pack<kSize>(from), to);
      } else {
#pragma unroll
        for (int e = 0; e < kSize; ++e) {
          const int at = piece + e * kBytes;
          if (at >= begin && at < end) to[e] = from[e];
        }
      }
    }
  }

 private:
  __device__ __forceinline__ int phase(int row) const {
    const auto step = static_cast<int>(gemm.b.extent % kPieceBytes) * static_cast<int>(sizeof(R));
    return (phase_of(place()) + row * step) % kPieceBytes;
  }
};

// ---- The kernel ----

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kTable.resident)
    mma_batched_kernel(const Gemm<typename Kernel::T> gemm, int stages) {
  using T = typename Kernel::T;
  using LinesA = Lines<Kernel, Kernel::kRows>;
  using LinesB = Lines<Kernel, Kernel::kCols>;
  constexpr int kStageBytes = LinesA::kBytes + LinesB::kBytes;
  unsigned char* const memory = shared_array<unsigned char>();
  const Tile tile = locate_tile<Kernel::kRows, Kernel::kCols>(gemm);
  // The shuffle tells the compiler that the value is the same for all threads of a warp.
  const int warp = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / kWarpSize, 0);
  const int lane = threadIdx.x % kWarpSize;
  const int warp_row = warp % Kernel::kWarpsDown * Kernel::kWarpRows;
  const int warp_col = warp / Kernel::kWarpsDown * Kernel::kWarpCols;

  // -- Copies: the first slice --
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
  unsigned char* stage = memory;
  unsigned char* other_stage = memory + (stages - 1) * kStageBytes;
  int depth = copy_slice(stage);

  // -- Products, while the next slice is copied --
  float sums[Kernel::kRowTiles][2 * Kernel::kColTiles][4] = {};
  while (depth > 0) {
    wait_for_copy_groups<0>();
    __syncthreads();  // the slice is there for all threads, and none reads the one before any more
    const int following = copy_slice(other_stage);
    if (depth % kMmaDepth<T> != 0) {
      a_lines.clear_beyond(stage, depth);
      b_lines.clear_beyond(stage + LinesA::kBytes, depth);
      __syncthreads();
    }
#pragma unroll 1
    for (int step = 0; step * kMmaDepth<T> < depth; ++step) {
      MmaWord<T> b[Kernel::kColTiles][4];
#pragma unroll
      for (int j = 0; j < Kernel::kColTiles; ++j) {
        b_reader.load(stage + LinesA::kBytes, step, j, b[j]);
      }
#pragma unroll
      for (int i = 0; i < Kernel::kRowTiles; ++i) {
        MmaWord<T> a[4];
        a_reader.load(stage, step, i, a);
#pragma unroll
        for (int j = 0; j < 2 * Kernel::kColTiles; ++j) {
          const MmaWord<T> right[2] = {b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]};
          multiply_add_warp<T>(sums[i][j], a, right);
        }
      }
    }
    depth = following;
    unsigned char* const finished = stage;
    stage = other_stage;
    other_stage = finished;
  }

  // -- Results --
  __syncthreads();  // no thread reads factors any more
  const auto write = [&](auto type) {
    const ResultLines<Kernel, typename decltype(type)::type> results{gemm, tile, memory};
#pragma unroll
    for (int i = 0; i < Kernel::kRowTiles; ++i) {
#pragma unroll
      for (int j = 0; j < 2 * Kernel::kColTiles; ++j) {
        const int row = warp_row + 16 * i + lane / 4;
        const int col = warp_col + 8 * j + lane % 4 * 2;
        const float (&sum)[4] = sums[i][j];
        results.put(row, col, sum[0], sum[1]);
        results.put(row + 8, col, sum[2], sum[3]);
      }
    }
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
  const Call<T> call{queue, config, problem.batch, make_gemm<T>(config, problem, buffers)};
  const auto matches = [&](const MmaBatchedTile& tile) {
    return tile.rows == config.tile_rows && tile.cols == config.tile_cols;
  };
  dispatch_instance<kMmaBatchedTiles>(matches, [&](auto index) {
    using Kernel = MmaBatched<T, decltype(index)::value>;
    launch_tiles<mma_batched_kernel<Kernel>>(call, static_cast<std::size_t>(config.shared_bytes),
                                             config.stages);
  });
}

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
