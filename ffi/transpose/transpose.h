// Permutations of the dimensions of an array.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/algorithm.h"
#include "core/device.h"
#include "core/fields.h"
#include "core/queue.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace transpose {

// Dimension i of the result is dimension permutation[i] of the operand. Elements are opaque words
// of 1, 2, 4, 8 or 16 bytes.
struct Problem {
  int element_bytes;
  Fields::Integers shape;
  Fields::Integers permutation;
  std::int64_t alignment;  // of operand and result, in bytes

  template <class Self, class Visit>
  static void fields(Self& self, Visit&& visit) {
    visit("element_bytes", self.element_bytes);
    visit("shape", self.shape);
    visit("permutation", self.permutation);
    visit("alignment", self.alignment);
  }
};

inline std::int64_t least_alignment(const Problem& problem) { return problem.element_bytes; }

enum class Algorithm { kNaive, kTiled, kSwizzled, kShifted, kNarrow, kCopy };

inline constexpr std::string_view kReductionAndTranspose =
    "Notes on CUDA matrix reduction and transpose: naive and shared-memory kernels";

inline constexpr AlgorithmInfo kAlgorithms[] = {
    {"naive", "A thread per element: reads are coalesced, writes are scattered.",
     kReductionAndTranspose, "none", "naive_kernel"},
    {"tiled", "A block transposes a tile in shared memory, padded so that columns use all banks.",
     kReductionAndTranspose,
     "permutations that move data and keep no contiguous runs of 64 bytes or more", "tiled_kernel"},
    {"swizzled",
     "Threads transpose small blocks in registers and access shared memory in 16-byte chunks.",
     "Notes on transpose kernels for Hopper: vector accesses and an XOR swizzle",
     "permutations that move data and keep no contiguous runs, or runs of 2, 4, 8 or 16 bytes "
     "that are aligned to their size",
     "swizzled_kernel"},
    {"shifted",
     "Lanes read columns into packs of the result's rows; packs that are aligned in the result are "
     "put together from two of them.",
     "This project",
     "permutations that move data and keep no contiguous runs, or runs of 2, 4 or 8 bytes that are "
     "aligned to their size; elements of up to 8 bytes",
     "shifted_kernel"},
    {"narrow",
     "Runs of pixels are contiguous where their channels are interleaved, and accessed there in "
     "packs of 16 bytes; planes are accessed in packs of one channel each.",
     "This project",
     "permutations that transpose matrices of at most 31 columns, contiguous in the operand, or of "
     "at most 31 rows, contiguous in the result, and keep no contiguous runs, or runs of 2, 4 or 8 "
     "bytes that are aligned to their size; elements of up to 8 bytes, at most 2^31 - 1 words",
     "narrow_kernel"},
    {"copy", "Threads write the result in its order, in words of up to 16 bytes.",
     "The vectorised copy of CUDA practice", "none", "copy_kernel"},
};

inline std::string_view name_of(Algorithm algorithm) {
  return kAlgorithms[static_cast<int>(algorithm)].name;
}

inline constexpr int kNoDim = -1;

// How a kernel is launched. Words are the elements, or wider words that consist of runs of
// elements.
struct Config {
  int word_bytes = 0;
  int threads = 0;  // of a block
  // The tile of a block, in words; each a power of two, but not for `shifted`. Blocks without tiles
  // take consecutive words.
  int tile_rows = 0;
  int tile_columns = 0;
  int tile_depth = 0;
  int depth = kNoDim;    // `tiled`: the dimension of the movement along which tiles have a depth
  int dims = 0;          // `copy`: those for which its kernel is compiled, or 0: any number
  bool aligned = false;  // `narrow`: all rows and planes are whole packs at multiples of 16 bytes

  template <class Self, class Visit>
  static void fields(Self& self, Visit&& visit) {
    visit("word_bytes", self.word_bytes);
    visit("threads", self.threads);
    visit("tile_rows", self.tile_rows);
    visit("tile_columns", self.tile_columns);
    visit("tile_depth", self.tile_depth);
    visit("depth", self.depth);
    visit("dims", self.dims);
    visit("aligned", self.aligned);
  }
};

// One dimension of a movement: its size, and its strides in operand and result.
struct Dim {
  std::int64_t size;
  std::int64_t in_stride;
  std::int64_t out_stride;
};

inline constexpr std::int64_t kLongRunBytes = 64;

// Kernels count words and tiles in 32 bits. A movement of more words is launched in parts.
inline constexpr std::int64_t kMaxWords = (std::int64_t{1} << 31) - 1;

// The most dimensions of a movement. Each has at least size 2, so an array with more dimensions
// would have over 2^40 words.
inline constexpr std::size_t kMaxRank = 40;

// A problem in canonical form: it moves words, dimensions of size 1 are removed, and dimensions
// that stay neighbours are merged. The dimensions are in the order of the operand, minor last;
// strides are in words. Words are the elements, or the widest words that divide the runs of
// elements that stay contiguous; a run of several words is the last dimension.
struct Movement {
  int word_bytes;
  std::vector<Dim> dims;

  std::int64_t words() const;
  // The outermost dimension that can be halved.
  Dim& outermost();
  bool has_runs() const { return dims.empty() || dims.back().out_stride == 1; }
  // Runs of kLongRunBytes or more are read and written efficiently without a tile.
  bool has_long_runs() const {
    return dims.size() <= 1 || (has_runs() && dims.back().size * word_bytes >= kLongRunBytes);
  }
};

struct Plan {
  Algorithm algorithm;
  std::string reason;
  Config config;
  Movement movement;
};

// Throws std::invalid_argument if the permutation or the element size is not valid.
void check(const Problem& problem);

// The algorithm called `algorithm`, or the best one for the problem if it is empty. Throws
// std::invalid_argument if the problem is not valid or the named algorithm cannot take it.
Plan plan(const Problem& problem, std::string_view algorithm, const Device& device);

inline std::int64_t workspace_bytes(const Problem&, std::string_view) { return 0; }

// Runs the plan: x and y have as many elements as the problem's shape says, at least one.
void launch(const Queue& queue, const Plan& plan, const void* x, void* y);

// Sizes on which both plans and kernels depend.

inline constexpr int kThreads = 256;  // of a block

// The words of a thread of `copy`, which are in flight together, and of a block.
inline constexpr int kCopyWords = 4;
inline constexpr int kCopyBlockWords = kThreads * kCopyWords;
// The numbers of dimensions for which it has kernels of its own, with offsets of 32 bits.
inline constexpr int kFewestCopyDims = 2;
inline constexpr int kMostCopyDims = 6;

// The elements in a tile of `tiled`, as a power of two: 64 x 64, or 32 x 32 if these would exceed
// 48 KiB of shared memory.
constexpr int tiled_words_log2(int word_bytes) { return word_bytes <= 4 ? 12 : 10; }

// How many words `swizzled` moves at a time: 16 bytes of them, or 8 single bytes. A thread
// transposes blocks of vector x vector words, and 16 x 16 would overflow its registers.
constexpr int vector_words(int word_bytes) { return word_bytes == 1 ? 8 : 16 / word_bytes; }

// The rows and columns in a tile of `swizzled`: lines of at least 128 bytes on both sides, and at
// least 64 bytes in flight in each thread. Tiles for small matrices have half as many.
constexpr int swizzled_side(int word_bytes) {
  return word_bytes <= 2 ? 128 : word_bytes <= 8 ? 64 : 32;
}

// The threads of its block: each transposes at least one block of vector x vector words.
constexpr int swizzled_threads(int word_bytes, int side) {
  const int blocks = side / vector_words(word_bytes) * (side / vector_words(word_bytes));
  return blocks < kThreads ? blocks : kThreads;
}

// `shifted` reads strips of as many rows as 16 bytes have words, each by one warp.
constexpr int strip_rows(int word_bytes) { return 16 / word_bytes; }

// The most columns of its tile: at least 128 bytes of a row, and 4 for each lane.
constexpr int shifted_columns(int word_bytes) {
  return word_bytes == 1 ? 128 : word_bytes <= 4 ? 64 : 32;
}

// The words that a lane loads at a time: 4 bytes and more. If a row begins within them, its words
// and those of the others together fill one load less.
constexpr int words_per_load(int word_bytes) { return word_bytes < 4 ? 4 / word_bytes : 1; }

// The most strips of a warp: 64 bytes in flight in each thread.
constexpr int strips_per_warp(int word_bytes) { return 128 / shifted_columns(word_bytes); }

// The most warps of its block, and how many such blocks a multiprocessor has registers for.
inline constexpr int kMostShiftedWarps = 16;
inline constexpr int kShiftedBlocks = 3;

// The dimensions that a movement transposes: the column index is contiguous in the operand, the row
// index in the result, where a short run counts as one element. `run` is null if there is none.
struct TurnedDims {
  const Dim* row;
  const Dim* column;
  const Dim* run;
};

// The movement must have no long runs.
TurnedDims turned_dims(const Movement& movement);

// `narrow` takes matrices one side of which has at most this many words, called channels; the words
// along the other side are pixels.
inline constexpr int kMostChannels = 31;

// The dimensions of such a matrix. The channels of all pixels are contiguous in the operand if
// `to_planar` is true, and otherwise in the result.
struct NarrowDims {
  const Dim* pixel;  // null if `narrow` cannot take the matrix
  const Dim* channel;
  bool to_planar;
};

// The movement must have no runs.
NarrowDims narrow_dims(const Movement& movement);

// With at most so many channels it may transpose in registers. Each has its kernels.
inline constexpr int kMostRegisterChannels = 4;

// The packs of 16 bytes of a thread otherwise: at most so many, and a warp has as many packs of a
// plane as slots, from as many planes.
inline constexpr int kNarrowPacks = 4;
inline constexpr int kNarrowSlots = 8;
inline constexpr int kNarrowPlanes = 4;

inline constexpr int kWidestWord = 16;
inline constexpr int kWidestNarrowWord = 8;
inline constexpr int kWidestShiftedWord = 8;  // rows of wider ones begin at multiples of 16 bytes

}  // namespace transpose
}  // namespace JAX_GPUOPS_NAMESPACE
