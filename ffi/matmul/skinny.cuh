// matmul, algorithm `skinny`: one factor, the skinny one, has few rows or columns, and a block
// takes at most 16 of them. The time is that of reading the other factor, the large one, once, with
// many loads in flight. Warps multiply by mma.sync.
//
// The large factor's rows (rows of a or columns of b) are the 16 rows of an mma, and those of the
// skinny factor its 8 columns:
//
//     large factor                   skinny factor                    sums
//     | kRows x depth |      x       | depth x kCols |        =       | kRows x kCols |
//       warp 0 1 .. 7 0 1 ..           warp 0 1 .. 7 0 1 ..            of each warp, then added
//
// Each warp of a block multiplies kRows rows over an eighth of the depth. In the end the warps'
// sums are added through shared memory, always in the same order. Dividing the depth among the
// blocks of a cluster, so that each reads less of the skinny factor, took longer with 2 to 32 of
// its columns.
//
// If both factors consist of whole vectors of 16 bytes and the skinny one is deep (K-major), they
// are copied to shared memory by cp.async, into a ring of stages for each warp. A stage is refilled
// as soon as it is multiplied, so all others are in flight all the time, and ldmatrix loads the
// operands of mma. Otherwise lanes load to registers, several chunks at a time, and multiply them
// all.
//
// Products can be added in any order of k, and rows permuted, so any element may be in any register
// as long as both factors agree. In a chunk, 32 elements of k, lane 4 g + t has k = 8 t .. 8 t + 7
// of mma's row g and of its column g. If the factor is deep, that is a load of 16 bytes, and the
// lane gives half h of it, four elements, to product h:
//
//     deep         k 0 .. 7    8 .. 15   16 .. 23   24 .. 31      lane 4 g + t loads row g, 8 t ..
//     row g      |  t = 0   |  t = 1   |  t = 2   |  t = 3   |    words of product 0: 0 and 1,
//     row g + 8  |  t = 0   |  t = 1   |  t = 2   |  t = 3   |    of product 1: 2 and 3
//
// If the large factor is not deep, a lane loads kRows / 8 neighbouring rows at each of its 8 k's.
// The words of two k's are transposed to words that have both k's of one row:
//
//     not deep     rows 0 ..      kRows / 8 ..                    lane 4 g + t loads k 8 t + j
//     k 8 t + j  |  g = 0   |      g = 1       | ..  g = 7  |     for j = 0 .. 7
#pragma once

#include <cstdint>

#include "core/collectives.h"
#include "core/cuda.h"
#include "core/integer.h"
#include "core/ptx/async_copy.cuh"
#include "core/ptx/memory.cuh"
#include "core/ptx/mma.cuh"
#include "core/shared.h"
#include "core/vector.h"
#include "matmul/epilogue.cuh"
#include "matmul/matmul.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {

// How a lane reads the skinny factor: by copies of 8 neighbours along k; by loads of 2 neighbouring
// columns at each k; or element by element, in any layout.
enum class SkinnyReads { kDepths, kColumns, kElements };

inline constexpr int kChunkDepth = kSkinnyStepDepth;
inline constexpr int kLaneDepth = 8;  // of a chunk

template <class Factor_, bool kDeep_, bool kPacked_, SkinnyReads kReads_, int kRows_, int kCols_>
struct Skinny {
  using Factor = Factor_;
  static constexpr bool kDeep = kDeep_;      // the large factor's depth is contiguous
  static constexpr bool kPacked = kPacked_;  // it is read in packs
  static constexpr SkinnyReads kReads = kReads_;
  static constexpr int kRows = kRows_;
  static constexpr int kCols = kCols_;

  // Whether steps are copied to shared memory, which takes no registers, so that a stage is
  // refilled as soon as it is multiplied. With other reads the copies would be of few bytes.
  static constexpr bool kCopies = kReads == SkinnyReads::kDepths;
  static constexpr int kStages = skinny_stages(kRows, kCols);

  static constexpr int kWarps = kSkinnyThreads / kWarpSize;
  static constexpr int kRowTiles = kRows / 16;
  static constexpr int kColTiles = kCols / 8;
  static constexpr int kLaneRows = kRows / 8;
  // Words of a chunk that a lane holds, of the large factor and of the skinny one.
  static constexpr int kLargeWords = kLaneRows * kLaneDepth / 2;
  static constexpr int kSkinnyWords = kColTiles * kLaneDepth / 2;

  // A warp has the loads of kSlots steps in flight: as many as 128 registers have room for, so that
  // a multiprocessor holds two blocks, each with up to 64 KiB in flight. It multiplies all of them
  // before the next loads: if loads are in flight from one iteration of a loop to the next, ptxas
  // makes a warp wait for all of them together.
  static constexpr int slots() {
    if (!kPacked) return 1;
    if (kReads == SkinnyReads::kElements) return kRows == 64 ? 1 : 2;
    return kRows == 64 ? 1 : kRows == 32 ? 3 : 4;
  }
  static constexpr int kSlots = slots();

  static_assert(kReads != SkinnyReads::kColumns || kCols == 16, "a pair of columns for each of 8");
  static_assert(!kCopies || (kPacked && kStages >= 2));

  // The block's row of element e of a lane, and the block's column of mma's column `slot`, 0 to 7,
  // in tile c.
  __device__ static int row(int group, int e) {
    return kDeep || !kPacked || kCopies ? group + 8 * e : group * kLaneRows + e;
  }
  __device__ static int col(int slot, int c) {
    return kReads == SkinnyReads::kColumns ? 2 * slot + c : 8 * c + slot;
  }
};

template <class T>
struct SkinnyOperand {
  const T* data;
  std::int64_t batch_stride;  // 0 if the batch shares the factor
  bool deep;                  // the depth is contiguous
  std::int64_t stride;        // from one row or column to the next; if not deep, from one k
  int extent;                 // rows of the large factor, columns of the skinny one
};

struct SkinnyResult {
  void* data;
  std::int64_t batch_stride;
  std::int64_t row_stride;
  std::int64_t col_stride;
  bool is_float;  // else of the factors' type
  bool large_is_a;
  bool finishes;  // with a bias or an activation
  Finish finish;
};

template <class T>
struct SkinnyProduct {
  SkinnyOperand<T> large;
  SkinnyOperand<T> skinny;
  SkinnyResult result;
  int depth;
  Divisor tiles;  // how many, along the rows, a matrix of the batch has
};

// A lane's words of a step, which is a chunk.
template <class Config>
struct SkinnyStep {
  std::uint32_t large[Config::kLargeWords];
  std::uint32_t skinny[Config::kSkinnyWords];
};

// A stage of a warp's ring.
template <class Config, bool kCopies = Config::kCopies>
struct SkinnyStage {
  unsigned char large[Config::kRows * kChunkDepth * 2];
  unsigned char skinny[Config::kCols * kChunkDepth * 2];
};
template <class Config>
struct SkinnyStage<Config, false> {};

// In shared memory: the warps' rings, or their sums after all products. The padding spreads mma's
// columns over the banks.
template <class Config>
union SkinnyStorage {
  SkinnyStage<Config> ring[Config::kWarps][Config::kStages];
  float sums[Config::kWarps][Config::kCols][Config::kRows + 4];
};

// ---- Loads ----

// Two elements as a word; one that is not valid is 0.
template <class T>
__device__ __forceinline__ std::uint32_t read_pair(const T* low, const T* high, bool low_valid,
                                                   bool high_valid) {
  const T zero = narrow<T>(0.0f);
  return pair_of(low_valid ? *low : zero, high_valid ? *high : zero);
}

// Loads kWords words of the large factor, or zeros if not `valid`.
template <int kWords, class T>
__device__ __forceinline__ void read_pack_once(const T* from, bool valid, std::uint32_t* to) {
  std::uint32_t word[kWords] = {};
  if (valid) read_once(from, word);
#pragma unroll
  for (int i = 0; i < kWords; ++i) to[i] = word[i];
}

// Reads a lane's rows and columns, step by step. Instead of those beyond an edge it reads the last
// ones within, and the sums are not stored: no row or column affects another's sums. Elements
// beyond the end of k, which would affect all sums, are read as 0.
template <class Config>
class SkinnyReader {
 public:
  using T = typename Config::Factor;

  __device__ SkinnyReader(const SkinnyProduct<T>& product, std::int64_t matrix, int first_row,
                          int first_col, int lane)
      : product_(product), lane_depth_(lane % 4 * kLaneDepth) {
    const int group = lane / 4;
    large_ = product.large.data + matrix * product.large.batch_stride;
    skinny_ = product.skinny.data + matrix * product.skinny.batch_stride;
    const int last_row = product.large.extent - (kRowsByPack ? Config::kLaneRows : 1);
#pragma unroll
    for (int e = 0; e < kLargeRows; ++e) {
      const int row = min(first_row + Config::row(group, e), last_row);
      row_offset_[e] = Config::kDeep ? row * product.large.stride : row;
    }
    const int last_col = product.skinny.extent - (kColsByPair ? 2 : 1);
#pragma unroll
    for (int c = 0; c < kSkinnyCols; ++c) {
      const int col = min(first_col + Config::col(group, c), last_col);
      col_offset_[c] = product.skinny.deep ? col * product.skinny.stride : col;
    }
  }

  // Sets the step that read() reads next.
  __device__ __forceinline__ void seek(int step) {
    const std::int64_t k = std::int64_t{step} * kChunkDepth + lane_depth_;
    large_at_ = large_ + k * large_stride();
    skinny_at_ = skinny_ + k * skinny_stride();
    left_ = product_.depth - static_cast<int>(k);
  }

  // Issues the loads of the step, and advances to the next. If `kWhole`, all of it lies within the
  // depth.
  template <bool kWhole>
  __device__ __forceinline__ void read(SkinnyStep<Config>& step) {
    read_skinny<kWhole>(step.skinny);
    read_large<kWhole>(step.large);
    large_at_ += kChunkDepth * large_stride();
    skinny_at_ += kChunkDepth * skinny_stride();
  }

 private:
  static constexpr bool kRowsByPack = !Config::kDeep && Config::kPacked;
  static constexpr bool kColsByPair = Config::kReads == SkinnyReads::kColumns;
  static constexpr int kLargeRows = kRowsByPack ? 1 : Config::kLaneRows;
  static constexpr int kSkinnyCols = kColsByPair ? 1 : Config::kColTiles;

  // From one k to the next.
  __device__ __forceinline__ std::int64_t large_stride() const {
    return Config::kDeep ? 1 : product_.large.stride;
  }
  __device__ __forceinline__ std::int64_t skinny_stride() const {
    return !kColsByPair && product_.skinny.deep ? 1 : product_.skinny.stride;
  }

  template <bool kWhole>
  __device__ __forceinline__ bool valid(int j) const {
    return kWhole || j < left_;
  }

  template <bool kWhole>
  __device__ __forceinline__ void read_large(std::uint32_t (&word)[Config::kLargeWords]) const {
    const auto at = [&](int e, int j) { return large_at_ + row_offset_[e] + j * large_stride(); };
    if constexpr (Config::kDeep) {
#pragma unroll
      for (int e = 0; e < Config::kLaneRows; ++e) {
        if constexpr (Config::kPacked) {
          read_pack_once<4>(at(e, 0), valid<kWhole>(0), &word[4 * e]);
        } else {
#pragma unroll
          for (int w = 0; w < 4; ++w) {
            word[4 * e + w] = read_pair(at(e, 2 * w), at(e, 2 * w + 1), valid<kWhole>(2 * w),
                                        valid<kWhole>(2 * w + 1));
          }
        }
      }
    } else {
      constexpr int kPerDepth = Config::kLaneRows / 2;
#pragma unroll
      for (int j = 0; j < kLaneDepth; ++j) {
        if constexpr (Config::kPacked) {
          read_pack_once<kPerDepth>(at(0, j), valid<kWhole>(j), &word[kPerDepth * j]);
        } else {
#pragma unroll
          for (int w = 0; w < kPerDepth; ++w) {
            word[kPerDepth * j + w] =
                read_pair(at(2 * w, j), at(2 * w + 1, j), valid<kWhole>(j), valid<kWhole>(j));
          }
        }
      }
    }
  }

  template <bool kWhole>
  __device__ __forceinline__ void read_skinny(std::uint32_t (&word)[Config::kSkinnyWords]) const {
    const auto at = [&](int c, int j) { return skinny_at_ + col_offset_[c] + j * skinny_stride(); };
    if constexpr (kColsByPair) {
#pragma unroll
      for (int j = 0; j < kLaneDepth; ++j) {
        word[j] = valid<kWhole>(j) ? read_pack<2>(at(0, j)).reg[0] : 0;
      }
    } else {
#pragma unroll
      for (int c = 0; c < Config::kColTiles; ++c) {
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          word[4 * c + w] = read_pair(at(c, 2 * w), at(c, 2 * w + 1), valid<kWhole>(2 * w),
                                      valid<kWhole>(2 * w + 1));
        }
      }
    }
  }

  const SkinnyProduct<T>& product_;
  int lane_depth_;
  const T* large_;
  const T* skinny_;
  const T* large_at_;
  const T* skinny_at_;
  int left_;  // of the depth
  std::int64_t row_offset_[kLargeRows];
  std::int64_t col_offset_[kSkinnyCols];
};

// ---- Products ----

// From two words that each hold two rows at one k, the word with both k's of the first or second
// row.
__device__ __forceinline__ std::uint32_t transpose_pair(std::uint32_t even, std::uint32_t odd,
                                                        int second) {
  return __byte_perm(even, odd, second != 0 ? 0x7632 : 0x5410);
}

template <class Config>
using SkinnySums = float[Config::kRowTiles][Config::kColTiles][4];

template <class Config>
__device__ __forceinline__ void multiply(const SkinnyStep<Config>& step, SkinnySums<Config>& sums) {
  const auto& large = step.large;
  const auto& skinny = step.skinny;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    std::uint32_t right[Config::kColTiles][2];
#pragma unroll
    for (int c = 0; c < Config::kColTiles; ++c) {
#pragma unroll
      for (int w = 0; w < 2; ++w) {
        if constexpr (Config::kReads == SkinnyReads::kColumns) {
          const int j = 4 * half + 2 * w;
          right[c][w] = transpose_pair(skinny[j], skinny[j + 1], c);
        } else {
          right[c][w] = skinny[4 * c + 2 * half + w];
        }
      }
    }
#pragma unroll
    for (int r = 0; r < Config::kRowTiles; ++r) {
      std::uint32_t left[4];  // elements 2 r and 2 r + 1 of the lane's rows, two words of each
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        if constexpr (Config::kDeep) {
          left[w] = large[4 * (2 * r + w % 2) + 2 * half + w / 2];
        } else {
          constexpr int kPerDepth = Config::kLaneRows / 2;
          const int j = 4 * half + w / 2 * 2;
          left[w] = transpose_pair(large[kPerDepth * j + r], large[kPerDepth * (j + 1) + r], w % 2);
        }
      }
#pragma unroll
      for (int c = 0; c < Config::kColTiles; ++c) {
        multiply_add_warp<typename Config::Factor>(sums[r][c], left, right[c]);
      }
    }
  }
}

// Adds the products of the warp's steps, from `step` to `end`, kSlots at a time.
template <class Config>
__device__ __forceinline__ void multiply_steps(SkinnyReader<Config>& reader, int step, int end,
                                               SkinnySums<Config>& sums) {
  constexpr int kSlots = Config::kSlots;
  SkinnyStep<Config> slot[kSlots];
  reader.seek(step);
#pragma unroll 1
  for (; step + kSlots <= end; step += kSlots) {
#pragma unroll
    for (int i = 0; i < kSlots; ++i) reader.template read<true>(slot[i]);
#pragma unroll
    for (int i = 0; i < kSlots; ++i) multiply<Config>(slot[i], sums);
  }
#pragma unroll
  for (int i = 0; i < kSlots - 1; ++i) {
    if (step + i < end) reader.template read<true>(slot[i]);
  }
#pragma unroll
  for (int i = 0; i < kSlots - 1; ++i) {
    if (step + i < end) multiply<Config>(slot[i], sums);
  }
}

// ---- The same through shared memory ----

// A stage holds a chunk of both factors in their own order: if deep, a line is the 32 k's of a row
// or column, else all rows at one k. The 16-byte pieces of a line are swizzled, so that neither the
// copies of a warp nor its loads, of one piece of each of 8 lines, have bank conflicts.
template <int kLineBytes>
__device__ __forceinline__ constexpr int place_in_stage(int line, int piece) {
  return line * kLineBytes + (piece ^ (line * kLineBytes / 128 % (kLineBytes / 16))) * 16;
}

// A warp's ring of stages: its copies, one step after the other, and its products.
template <class Config>
class SkinnyRing {
 public:
  using T = typename Config::Factor;

  __device__ SkinnyRing(SkinnyStage<Config>* ring, const SkinnyProduct<T>& product,
                        std::int64_t matrix, int first_row, int first_col, int lane)
      : ring_(ring), product_(product), lane_(lane) {
    large_ = product.large.data + matrix * product.large.batch_stride;
    skinny_ = product.skinny.data + matrix * product.skinny.batch_stride;
    if constexpr (Config::kDeep) {
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        const int row = min(first_row + line() + i * kLinesAtATime, product.large.extent - 1);
        row_offset_[i] = row * product.large.stride + piece() * 8;
      }
    } else {
      row_offset_[0] = min(first_row + piece() * 8, product.large.extent - 8);
    }
    const int col = first_col + lane / 4;
    skinny_ += col * product.skinny.stride + lane % 4 * 8;
    cols_ = product.skinny.extent - col;

    // For ldmatrix, a lane gives the address of line lane % 8 of matrix lane / 8. The four matrices
    // are 8 rows or the next 8, at 8 k's or the next 8.
    const int matrix_of_lane = lane / 8, line_of_lane = lane % 8;
    const int upper_rows = matrix_of_lane % 2, upper_depths = matrix_of_lane / 2;
    const unsigned address = shared_address(ring);
    large_from_ =
        address + (Config::kDeep
                       ? place_in_stage<kLine>(upper_rows * 8 + line_of_lane, upper_depths)
                       : place_in_stage<kLine>(upper_depths * 8 + line_of_lane, upper_rows));
    // Those of the skinny factor are 8 columns at each 8 of the 32 k's of a chunk.
    skinny_from_ = address + sizeof(ring->large) + place_in_stage<64>(line_of_lane, matrix_of_lane);
  }

  // Sets the step that copy() copies next.
  __device__ __forceinline__ void seek(int step) {
    const std::int64_t k = std::int64_t{step} * kChunkDepth;
    large_at_ = large_ + k * (Config::kDeep ? 1 : product_.large.stride);
    skinny_at_ = skinny_ + k;
    left_ = product_.depth - static_cast<int>(k);
  }

  // Issues the copies of a step. Elements beyond the end of k are 0. Columns beyond the last are
  // not copied: stale data is multiplied for them, but the results are not stored.
  __device__ __forceinline__ void copy(int stage) {
    SkinnyStage<Config>& to = ring_[stage];
    const std::int64_t stride = product_.large.stride;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int at_line = line() + i * kLinesAtATime;
      const T* const from = Config::kDeep ? large_at_ + row_offset_[i]
                                          : large_at_ + row_offset_[0] + at_line * stride;
      copy_async<16>(to.large + place_in_stage<kLine>(at_line, piece()), from,
                     (Config::kDeep ? piece() * 8 : at_line) < left_);
    }
#pragma unroll
    for (int c = 0; c < Config::kColTiles; ++c) {
      if (8 * c < cols_) {
        copy_async<16, true>(to.skinny + place_in_stage<64>(8 * c + lane_ / 4, lane_ % 4),
                             skinny_at_ + 8 * c * product_.skinny.stride, lane_ % 4 * 8 < left_);
      }
    }
    large_at_ += kChunkDepth * (Config::kDeep ? 1 : stride);
    skinny_at_ += kChunkDepth;
    left_ -= kChunkDepth;
  }

  __device__ __forceinline__ void multiply(int stage, SkinnySums<Config>& sums) const {
    const unsigned offset = stage * static_cast<unsigned>(sizeof(SkinnyStage<Config>));
    std::uint32_t right[Config::kColTiles][4];
#pragma unroll
    for (int c = 0; c < Config::kColTiles; ++c) {
      load_matrices<false>(skinny_from_ + offset + 8 * c * 64, right[c]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int r = 0; r < Config::kRowTiles; ++r) {
        std::uint32_t left[4];
        // Offsets of 16 lines are added, which leaves the swizzle as it is; offsets of pieces are
        // xored.
        const unsigned from = Config::kDeep ? (large_from_ ^ half * 32) + 16 * r * kLine
                                            : (large_from_ ^ r * 32) + 16 * half * kLine;
        load_matrices<!Config::kDeep>(from + offset, left);
#pragma unroll
        for (int c = 0; c < Config::kColTiles; ++c) {
          const std::uint32_t words[2] = {right[c][2 * half], right[c][2 * half + 1]};
          multiply_add_warp<T>(sums[r][c], left, words);
        }
      }
    }
  }

 private:
  static constexpr int kLine = Config::kDeep ? kChunkDepth * 2 : Config::kRows * 2;
  static constexpr int kPieces = kLine / 16;
  static constexpr int kLinesAtATime = kWarpSize / kPieces;
  static constexpr int kCopies = Config::kRows * kChunkDepth / 8 / kWarpSize;

  __device__ __forceinline__ int line() const { return lane_ / kPieces; }
  __device__ __forceinline__ int piece() const { return lane_ % kPieces; }

  SkinnyStage<Config>* ring_;
  const SkinnyProduct<T>& product_;
  int lane_;
  const T* large_;
  const T* skinny_;  // of the lane
  const T* large_at_;
  const T* skinny_at_;
  int left_;  // of the depth
  int cols_;  // from the lane's first column to the last
  std::int64_t row_offset_[Config::kDeep ? kCopies : 1];
  unsigned large_from_;
  unsigned skinny_from_;
};

// Adds the products of the warp's steps, from `step` to `end`, with kStages of them in flight.
template <class Config>
__device__ __forceinline__ void multiply_copies(SkinnyRing<Config>& ring, int step, int end,
                                                SkinnySums<Config>& sums) {
  constexpr int kStages = Config::kStages;
  ring.seek(step);
#pragma unroll
  for (int stage = 0; stage < kStages; ++stage) {
    if (step + stage < end) ring.copy(stage);
    end_copy_group();  // may be empty, so that the wait counts steps
  }
  int stage = 0;
#pragma unroll 1
  for (; step < end; ++step) {
    wait_for_copy_groups<kStages - 1>();
    __syncwarp();  // for the copies of the other lanes
    ring.multiply(stage, sums);
    __syncwarp();  // all lanes have read the stage
    if (step + kStages < end) ring.copy(stage);
    end_copy_group();
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
}

// ---- Sums ----

// A block's part of the result: rows of the large factor and columns of the skinny one.
struct SkinnyPlace {
  unsigned matrix;
  int first_row;
  int first_col;
  int rows;  // from there to the result's edge
  int cols;
};

template <class T>
__device__ __forceinline__ void write_result(const SkinnyResult& result, const SkinnyPlace& place,
                                             int row, int col, float sum) {
  if (result.finishes) {
    const int at_col = result.large_is_a ? place.first_col + col : place.first_row + row;
    sum += result.is_float ? bias_of<float>(result.finish, place.matrix, at_col)
                           : bias_of<T>(result.finish, place.matrix, at_col);
    dispatch_activation(result.finish.op, [&](auto op) {
      sum = activated<decltype(op)::value, /*kFast=*/false>(sum);
    });
  }
  const std::int64_t at = place.matrix * result.batch_stride +
                          (place.first_row + row) * result.row_stride +
                          (place.first_col + col) * result.col_stride;
  if (result.is_float) {
    static_cast<float*>(result.data)[at] = sum;
  } else {
    static_cast<T*>(result.data)[at] = narrow<T>(sum);
  }
}

// ---- The kernel ----

template <class Config>
__global__ void __launch_bounds__(kSkinnyThreads, 2)
    skinny_kernel(const __grid_constant__ SkinnyProduct<typename Config::Factor> product) {
  auto& storage = shared<SkinnyStorage<Config>>();
  // The shuffle tells the compiler that the value is the same for all threads of a warp.
  const int warp = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / kWarpSize, 0);
  const int lane = threadIdx.x % kWarpSize;
  const int group = lane / 4;
  const Division tile = product.tiles.divide(blockIdx.x);
  const int first_row = static_cast<int>(tile.remainder) * Config::kRows;
  const int first_col = static_cast<int>(blockIdx.y) * Config::kCols;

  // -- Products --
  constexpr unsigned kParts = Config::kWarps;  // of the depth
  const auto part = static_cast<unsigned>(warp);
  const auto first_step = [&](unsigned of, int steps) {
    return static_cast<int>(of * static_cast<unsigned>(steps) / kParts);
  };
  SkinnySums<Config> sums = {};
  if constexpr (Config::kCopies) {
    SkinnyRing<Config> ring(storage.ring[warp], product, tile.quotient, first_row, first_col, lane);
    const int steps = (product.depth + kChunkDepth - 1) / kChunkDepth;
    multiply_copies<Config>(ring, first_step(part, steps), first_step(part + 1, steps), sums);
    __syncthreads();  // no warp needs its ring any more
  } else {
    SkinnyReader<Config> reader(product, tile.quotient, first_row, first_col, lane);
    const int steps = product.depth / kChunkDepth;
    multiply_steps<Config>(reader, first_step(part, steps), first_step(part + 1, steps), sums);
    // The last warp also multiplies the rest of the depth.
    if (part == kParts - 1 && steps * kChunkDepth < product.depth) {
      SkinnyStep<Config> rest;
      reader.seek(steps);
      reader.template read<false>(rest);
      multiply<Config>(rest, sums);
    }
  }

  // -- Sums of all warps --
#pragma unroll
  for (int r = 0; r < Config::kRowTiles; ++r) {
#pragma unroll
    for (int c = 0; c < Config::kColTiles; ++c) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = Config::row(group, 2 * r + i / 2);
        const int col = Config::col(lane % 4 * 2 + i % 2, c);
        storage.sums[warp][col][row] = sums[r][c][i];
      }
    }
  }
  __syncthreads();

  // -- Results: neighbouring threads write neighbours --
  const SkinnyResult& result = product.result;
  const SkinnyPlace place{tile.quotient, first_row, first_col, product.large.extent - first_row,
                          product.skinny.extent - first_col};
  for (int i = threadIdx.x; i < Config::kRows * Config::kCols; i += kSkinnyThreads) {
    const bool down = result.row_stride == 1;
    const int row = down ? i % Config::kRows : i / Config::kCols;
    const int col = down ? i / Config::kRows : i % Config::kCols;
    if (row >= place.rows || col >= place.cols) continue;
    float sum = 0;
#pragma unroll
    for (int w = 0; w < Config::kWarps; ++w) sum += storage.sums[w][col][row];
    write_result<typename Config::Factor>(result, place, row, col, sum);
  }
}

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
