// matmul, algorithm `mma_pipelined`: the tensor cores of any GPU from compute capability 8.0 on, by
// mma.sync; factors of 16 bits, of floats, which are multiplied in TF32, or of doubles.
//
// A block computes a tile of the result, and each of its warps a part of the tile. Slices of both
// factors are copied asynchronously by cp.async to a ring of stages in shared memory. While the
// warps multiply one stage, the copies of the next ones are in flight:
//
//     copies           | slice 3      | slice 4      | slice 5      |
//     multiplications  | slice 0      | slice 1      | slice 2      |
//     ring of stages   | 0 1 2 <- 3   | 1 2 3 <- 4   | 2 3 0 <- 5
//                      ^ barrier      ^ barrier      ^ barrier: slice 2 is there for all threads,
//                                                    and none reads the stage of slice 1 any more
//
// A slice in shared memory has the factor's order in global memory, so nothing is transposed: its
// lines are rows of the factor if that is deep (K-major), else it is wide and each line is one k.
// The 16-byte pieces of a line are swizzled: piece p of line l is at p ^ key(l). So neither the
// copies of a warp nor its loads, of one piece of several lines, have bank conflicts:
//
//     deep, of 16 bits, 64 bytes of the depth      wide, of 16 bits
//     row 0  | 0 1 2 3 |   row 1  | 0 1 2 3 |      k 0  | 0 1 2 3 4 5 6 7 | 8 ...
//     row 2  | 1 0 3 2 |   row 3  | 1 0 3 2 |      k 1  | 1 0 3 2 5 4 7 6 | 9 ...
//     row 4  | 2 3 0 1 |   row 5  | 2 3 0 1 |      k 2  | 2 3 0 1 6 7 4 5 | ...
//
// A warp reads both factors in the same way, as tiles of 16 rows (rows of a or columns of b) by the
// depth of one mma. A lane holds four words of such a tile, at these rows and k's, in the registers
// where mma has them: the words of a are the left operand of one mma, those of b the right operands
// of two.
//
//     a            k 0 ..   from the half on      b              k 0 ..   from the half on
//     rows 0 - 7   | word 0 | word 2 |            cols 0 - 7     | word 0 | word 1 |
//     rows 8 - 15  | word 1 | word 3 |            cols 8 - 15    | word 2 | word 3 |
//
// They are loaded by ldmatrix, which can transpose elements of 16 bits; wider elements of wide
// slices, and all doubles, by plain loads. Products are added in the order of k, and the depth of
// an instruction depends on the type alone, not on the tile.
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

template <class T_, Order kOrderA_, Order kOrderB_, int kVectorBytes_, int kTileIndex>
struct MmaPipelined {
  using T = T_;
  using Word = MmaWord<T>;
  using Sum = MmaSum<T>;
  static constexpr Order kOrderA = kOrderA_;
  static constexpr Order kOrderB = kOrderB_;
  static constexpr int kVectorBytes = kVectorBytes_;  // that a copy moves

  static constexpr MmaTile kTable = kMmaTiles[kTileIndex];
  static constexpr int kRows = kTable.rows;
  static constexpr int kCols = kTable.cols;
  static constexpr int kWarpRows = kTable.warp_rows;
  static constexpr int kWarpCols = kTable.warp_cols;
  static constexpr int kWarpsDown = kRows / kWarpRows;
  static constexpr int kSliceBytes = kTable.slice_bytes;
  static constexpr int kSliceDepth = kSliceBytes / static_cast<int>(sizeof(T));
  static constexpr int kStages = kTable.stages;
  static constexpr int kThreads = kTable.threads();
  static constexpr int kBlocks = kTable.resident;

  static constexpr int kSteps = kSliceDepth / kMmaDepth<T>;
  static constexpr int kRowTiles = kWarpRows / 16;
  static constexpr int kColTiles = kWarpCols / 16;

  static_assert(kTable.element_bytes == sizeof(T));
  static_assert(kSteps % 2 == 0 && kRowTiles % 2 == 0, "slices begin with the same registers");
  static_assert(kWarpRows % 32 == 0 && kWarpCols % 32 == 0,
                "warps begin at whole groups of pieces");
};

// ---- Slices in shared memory ----

// A slice of kExtent rows or columns of a factor in the order kOrder.
template <class Kernel, Order kOrder, int kExtent>
struct Slice {
  using T = typename Kernel::T;
  static constexpr int kElementBytes = sizeof(T);
  static constexpr int kDeepLine = Kernel::kSliceBytes;
  static constexpr int kWideLine = kExtent * kElementBytes;
  static constexpr int kBytes = kExtent * Kernel::kSliceBytes;
  static_assert(kWideLine % 128 == 0, "depths begin at the same bank");
  static_assert(kElementBytes != 8 || kDeepLine == 128, "rows of doubles do so too");

  // Whether it is read by ldmatrix, one piece of each of 8 lines at a time. Otherwise lanes load
  // elements, those of two pieces of each of 4 lines at a time.
  __device__ static constexpr bool is_read_by_lines(bool deep) {
    return kElementBytes == 2 || (kElementBytes == 4 && deep);
  }

  __device__ static constexpr int key(bool deep, int line) {
    if (!is_read_by_lines(deep)) return line % 4 * 2;
    constexpr int kPieces = kDeepLine / kPieceBytes;
    return deep ? line / (8 / kPieces) % kPieces : line % 8;
  }

  // Where byte `byte` of a line is.
  __device__ static constexpr int place(bool deep, int line, int byte) {
    const int piece = byte / kPieceBytes ^ key(deep, line);
    return line * (deep ? kDeepLine : kWideLine) + piece * kPieceBytes + byte % kPieceBytes;
  }
};

template <Order kOrder>
__device__ __forceinline__ bool is_deep(bool known_at_run_time) {
  return kOrder == Order::kAny ? known_at_run_time : kOrder == Order::kDeep;
}

// Copies one slice after the other. All vectors of a thread are at the same place in their lines.
// Elements beyond the factor's edges are 0.
template <class Kernel, Order kOrder, int kExtent>
class SliceCopier {
 public:
  using T = typename Kernel::T;
  using Layout = Slice<Kernel, kOrder, kExtent>;
  static constexpr int kVectorBytes = Kernel::kVectorBytes;
  static constexpr int kCopies = Layout::kBytes / kVectorBytes / Kernel::kThreads;
  static_assert(kCopies * kVectorBytes * Kernel::kThreads == Layout::kBytes);

  // The factor is a parameter of the kernel, so its members take no registers.
  __device__ __forceinline__ SliceCopier(const Factor<T>& factor, std::int64_t batch,
                                         std::int64_t first_row)
      : factor_(factor) {
    const int per_line = (deep() ? Layout::kDeepLine : Layout::kWideLine) / kVectorBytes;
    const int thread = threadIdx.x;
    line_ = thread / per_line;
    step_ = Kernel::kThreads / per_line;
    byte_ = thread % per_line * kVectorBytes;
    const std::int64_t left = factor.extent - first_row;
    rows_ = left < kExtent ? static_cast<int>(left) : kExtent;
    next_ = factor.data + batch * factor.batch_stride + first_row * factor.row_stride +
            line_ * line_stride() + byte_ / static_cast<int>(sizeof(T));
  }

  // Issues the copies of the next slice, of which `depth` k's lie in the factor.
  __device__ __forceinline__ void copy(unsigned char* to, int depth) {
    const int lines = deep() ? rows_ : depth;
    const int length = deep() ? depth : rows_;
    const bool in_line = byte_ < length * static_cast<int>(sizeof(T));
    const auto valid = [&](int i) { return in_line && line_ + i * step_ < lines; };
    const auto place = [&](int i) { return to + Layout::place(deep(), line_ + i * step_, byte_); };
    const T* from = next_;
    if constexpr (kVectorBytes >= 4) {
      // If many copies were unrolled, their addresses would take all registers.
      [[maybe_unused]] constexpr int kUnrolled = kCopies <= 8 ? kCopies : 4;
#pragma unroll kUnrolled
      for (int i = 0; i < kCopies; ++i) {
        copy_async<kVectorBytes>(place(i), from, valid(i));
        from += step_ * line_stride();
      }
    } else {
      // Elements of 16 bits at any address are copied by the thread, with a few loads in flight at
      // a time.
      constexpr int kAtATime = 8;
#pragma unroll 1
      for (int first = 0; first < kCopies; first += kAtATime) {
        T element[kAtATime];
#pragma unroll
        for (int i = 0; i < kAtATime; ++i) {
          element[i] = valid(first + i) ? *from : T{};
          from += step_ * line_stride();
        }
#pragma unroll
        for (int i = 0; i < kAtATime; ++i) *reinterpret_cast<T*>(place(first + i)) = element[i];
      }
      static_assert(kVectorBytes >= 4 || kCopies % kAtATime == 0);
    }
    next_ += deep() ? Kernel::kSliceDepth : Kernel::kSliceDepth * factor_.depth_stride;
  }

 private:
  __device__ __forceinline__ bool deep() const { return is_deep<kOrder>(factor_.deep); }
  __device__ __forceinline__ std::int64_t line_stride() const {
    return deep() ? factor_.row_stride : factor_.depth_stride;
  }

  const Factor<T>& factor_;
  const T* next_;
  int line_;  // of the thread's first vector
  int step_;  // lines from one of its vectors to the next
  int byte_;  // in the line
  int rows_;  // that lie in the factor
};

// Loads a warp's tiles of 16 rows of a slice. Everything that depends on the lane is in one offset:
// what is added to it for a tile or a step does not change the swizzle.
template <class Kernel, Order kOrder, int kExtent, bool kLeft>
class SliceReader {
 public:
  using T = typename Kernel::T;
  using Word = typename Kernel::Word;
  using Layout = Slice<Kernel, kOrder, kExtent>;

  __device__ __forceinline__ SliceReader(const Factor<T>& factor, int first_row) : factor_(factor) {
    const int lane = threadIdx.x % kWarpSize;
    constexpr int kElementBytes = Layout::kElementBytes;
    // For ldmatrix the lane gives the address of a line of the 8 x 8 elements of one word.
    if (Layout::is_read_by_lines(deep())) {
      const int row = first_row + 8 * row_half(lane / 8);
      const int k_piece = depth_half(lane / 8);
      offset_ = deep() ? Layout::place(true, row + lane % 8, k_piece * kPieceBytes)
                       : Layout::place(false, 8 * k_piece + lane % 8, row * kElementBytes);
    } else {
      const int row = first_row + lane / 4;
      const int k = lane % 4;
      offset_ = deep() ? Layout::place(true, row, k * kElementBytes)
                       : Layout::place(false, k, row * kElementBytes);
    }
  }

  // Loads tile `tile` of the warp at step `step` of the slice, both constants once loops are
  // unrolled.
  __device__ __forceinline__ void load(const unsigned char* slice, int step, int tile,
                                       Word (&words)[4]) const {
    if constexpr (kOrder != Order::kWide) {
      if (deep()) load<true>(slice, step, tile, words);
    }
    if constexpr (kOrder != Order::kDeep) {
      if (!deep()) load<false>(slice, step, tile, words);
    }
    if constexpr (std::is_same_v<T, float>) {
#pragma unroll
      for (Word& word : words) word = round_to_tf32(word);
    }
  }

 private:
  static constexpr int kDepth = kMmaDepth<T>;

  // In which half of a tile's rows, and of its depth, a word is.
  __device__ static constexpr int row_half(int word) { return kLeft ? word % 2 : word / 2; }
  __device__ static constexpr int depth_half(int word) { return kLeft ? word / 2 : word % 2; }

  __device__ __forceinline__ bool deep() const { return is_deep<kOrder>(factor_.deep); }

  template <bool kDeep>
  __device__ __forceinline__ void load(const unsigned char* slice, int step, int tile,
                                       Word (&words)[4]) const {
    constexpr int kElementBytes = Layout::kElementBytes;
    // The offset of the lane's word at a row and a k.
    const auto at = [&](int row, int k) {
      return kDeep ? (offset_ ^ k * kElementBytes) + row * Layout::kDeepLine
                   : (offset_ ^ row * kElementBytes) + k * Layout::kWideLine;
    };
    if constexpr (Layout::is_read_by_lines(kDeep)) {
      load_matrices<!kDeep>(shared_address(slice) + at(16 * tile, kDepth * step), words);
    } else {
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        const int row = 16 * tile + 8 * row_half(word);
        const int k = kDepth * step + kDepth / 2 * depth_half(word);
        words[word] = *reinterpret_cast<const Word*>(slice + at(row, k));
      }
    }
  }

  const Factor<T>& factor_;
  int offset_;
};

// ---- Products ----

template <class Kernel>
using WarpSums = typename Kernel::Sum[Kernel::kRowTiles][2 * Kernel::kColTiles][4];

// Multiplies one tile of a with all tiles of b.
template <class Kernel>
__device__ __forceinline__ void multiply_row(
    const typename Kernel::Word (&a)[4], const typename Kernel::Word (&b)[Kernel::kColTiles][4],
    typename Kernel::Sum (&sums)[2 * Kernel::kColTiles][4]) {
  using Word = typename Kernel::Word;
#pragma unroll
  for (int j = 0; j < 2 * Kernel::kColTiles; ++j) {
    const Word right[2] = {b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]};
    multiply_add_warp<typename Kernel::T>(sums[j], a, right);
  }
}

// ---- Shared memory ----

template <class Kernel>
struct MmaStage {
  unsigned char a[Kernel::kRows * Kernel::kSliceBytes];
  unsigned char b[Kernel::kCols * Kernel::kSliceBytes];
};

// The sums that a warp writes at a time. The padding spreads the lanes' pairs of sums over the
// banks.
inline constexpr int kSumRows = 32;
template <class Kernel>
struct alignas(16) SumRows {
  typename Kernel::Sum row[kSumRows][Kernel::kWarpCols + 8];
};

template <class Kernel>
union MmaStorage {
  MmaStage<Kernel> ring[Kernel::kStages];
  SumRows<Kernel> sums[Kernel::kThreads / kWarpSize];  // after all products
};

// ---- The kernel ----

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kBlocks)
    mma_pipelined_kernel(const Gemm<typename Kernel::T> gemm) {
  using Word = typename Kernel::Word;
  using Sum = typename Kernel::Sum;
  constexpr int kStages = Kernel::kStages;
  auto& storage = shared<MmaStorage<Kernel>>();
  const Tile tile = locate_tile<Kernel::kRows, Kernel::kCols>(gemm);
  // The shuffle tells the compiler that the value is the same for all threads of a warp.
  const int warp = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / kWarpSize, 0);
  const int lane = threadIdx.x % kWarpSize;
  const int warp_row = warp % Kernel::kWarpsDown * Kernel::kWarpRows;
  const int warp_col = warp / Kernel::kWarpsDown * Kernel::kWarpCols;

  // -- Copies: the first slices --
  SliceCopier<Kernel, Kernel::kOrderA, Kernel::kRows> a_copier(gemm.a, tile.batch, tile.row);
  SliceCopier<Kernel, Kernel::kOrderB, Kernel::kCols> b_copier(gemm.b, tile.batch, tile.col);
  const auto slices =
      static_cast<int>((gemm.depth + Kernel::kSliceDepth - 1) / Kernel::kSliceDepth);
  const auto copy_slice = [&](int slice, int stage) {
    if (slice < slices) {
      constexpr auto kMask = Kernel::kSliceDepth - 1;
      const int depth =
          slice + 1 < slices ? Kernel::kSliceDepth : static_cast<int>((gemm.depth - 1) & kMask) + 1;
      a_copier.copy(storage.ring[stage].a, depth);
      b_copier.copy(storage.ring[stage].b, depth);
    }
    end_copy_group();  // may be empty, so that the wait counts slices
  };
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) copy_slice(stage, stage);

  // -- Products, while the slice kStages - 1 further on is copied --
  const SliceReader<Kernel, Kernel::kOrderA, Kernel::kRows, /*kLeft=*/true> a_reader(gemm.a,
                                                                                     warp_row);
  const SliceReader<Kernel, Kernel::kOrderB, Kernel::kCols, /*kLeft=*/false> b_reader(gemm.b,
                                                                                      warp_col);
  WarpSums<Kernel> sums = {};
  // While tile a[i % 2] is multiplied with all tiles of b of its step, the next tile of a is
  // loaded; during the last one of a step, the tiles of the next step.
  Word a[2][4];
  Word b[2][Kernel::kColTiles][4];
  const auto load_step = [&](int stage, int step) {
    a_reader.load(storage.ring[stage].a, step, 0, a[0]);
#pragma unroll
    for (int j = 0; j < Kernel::kColTiles; ++j) {
      b_reader.load(storage.ring[stage].b, step, j, b[step % 2][j]);
    }
  };
  const auto await_slice = [&] {
    wait_for_copy_groups<kStages - 2>();
    __syncthreads();
  };
  await_slice();
  load_step(0, 0);
  int stage = 0;
#pragma unroll 1
  for (int slice = 0; slice < slices; ++slice) {
    const int next_stage = stage + 1 == kStages ? 0 : stage + 1;
    // After the barrier no thread reads the stage before this one any more.
    copy_slice(slice + kStages - 1, stage == 0 ? kStages - 1 : stage - 1);
#pragma unroll
    for (int step = 0; step < Kernel::kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < Kernel::kRowTiles; ++i) {
        if (i + 1 < Kernel::kRowTiles) {
          a_reader.load(storage.ring[stage].a, step, i + 1, a[(i + 1) % 2]);
        } else if (step + 1 < Kernel::kSteps) {
          load_step(stage, step + 1);
        } else {  // after the last slice, what is loaded here is not used
          await_slice();
          load_step(next_stage, 0);
        }
        multiply_row<Kernel>(a[i % 2], b[step % 2], sums[i]);
      }
    }
    stage = next_stage;
  }
  wait_for_copy_groups<0>();
  __syncthreads();

  // -- Results: they pass through shared memory, some of the warp's rows at a time, to be written
  // in packs --
  SumRows<Kernel>& rows = storage.sums[warp];
#pragma unroll
  for (int first = 0; first < Kernel::kRowTiles; first += kSumRows / 16) {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kSumRows / 16; ++i) {
#pragma unroll
      for (int j = 0; j < 2 * Kernel::kColTiles; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const Sum(&sum)[4] = sums[first + i][j];
          const Sum pair[2] = {sum[2 * half], sum[2 * half + 1]};
          store<2>(pair, &rows.row[16 * i + 8 * half + lane / 4][8 * j + lane % 4 * 2]);
        }
      }
    }
    __syncwarp();
    constexpr int kPacks = Kernel::kWarpCols / kPack;
#pragma unroll 1
    for (int pack = lane; pack < kSumRows * kPacks; pack += kWarpSize) {
      const int row = pack / kPacks;
      const int col = pack % kPacks * kPack;
      Sum sum[kPack];
      load<kPack>(&rows.row[row][col], sum);
      store_results(gemm, tile.batch, tile.row + warp_row + 16 * first + row,
                    tile.col + warp_col + col, sum);
    }
  }
}

// ---- Launches ----

template <class T>
Order order_of(const Factor<T>& factor) {
  return factor.deep ? Order::kDeep : Order::kWide;
}

// Calls f(Constant<bytes>{}) for the plan's size of vectors.
template <class T, class F>
void dispatch_mma_vector(int bytes, F&& f) {
  if constexpr (sizeof(T) == 2) {
    dispatch_value<16, 4, 2>(bytes, f);
  } else {
    dispatch_value<16, static_cast<int>(sizeof(T))>(bytes, f);
  }
}

// The largest tile, copied in the widest vectors, has a kernel for each pair of orders.
template <class T>
void launch_mma_pipelined(const Queue& queue, const Config& config, const Problem& problem,
                          const Buffers& buffers) {
  const Call<T> call{queue, config, problem.batch, make_gemm<T>(config, problem, buffers)};
  const auto matches = [&](const MmaTile& tile) {
    return tile.element_bytes == static_cast<int>(sizeof(T)) && tile.rows == config.tile_rows &&
           tile.cols == config.tile_cols;
  };
  const auto run = [&](auto index, auto vector_bytes, auto order_a, auto order_b) {
    constexpr int kIndex = decltype(index)::value;
    using Kernel = MmaPipelined<T, decltype(order_a)::value, decltype(order_b)::value,
                                decltype(vector_bytes)::value, kIndex>;
    static_assert(sizeof(MmaStorage<Kernel>) == kMmaTiles[kIndex].shared_bytes());
    launch_tiles<mma_pipelined_kernel<Kernel>>(call, static_cast<std::size_t>(config.shared_bytes));
  };
  dispatch_instance<kMmaTiles>(matches, [&](auto index) {
    constexpr const MmaTile& kTile = kMmaTiles[decltype(index)::value];
    if constexpr (kTile.element_bytes == sizeof(T)) {
      dispatch_mma_vector<T>(config.vector_bytes, [&](auto vector_bytes) {
        if constexpr (kTile.is_largest() && decltype(vector_bytes)::value == 16) {
          dispatch_value<Order::kDeep, Order::kWide>(order_of(call.gemm.a), [&](auto order_a) {
            dispatch_value<Order::kDeep, Order::kWide>(order_of(call.gemm.b), [&](auto order_b) {
              run(index, vector_bytes, order_a, order_b);
            });
          });
        } else {
          run(index, vector_bytes, Constant<Order::kAny>{}, Constant<Order::kAny>{});
        }
      });
    }
  });
}

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
