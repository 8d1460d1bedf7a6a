// Permutations of the dimensions of an array.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/device.h"
#include "core/queue.h"
#include "core/registry.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace transpose {

// Dimension i of the result is dimension permutation[i] of the operand. Elements are opaque words
// of 1, 2, 4, 8 or 16 bytes.
struct Problem {
  int element_bytes;
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> permutation;
};

enum class Algorithm { kNaive, kTiled, kSwizzled, kCopy };

inline constexpr std::string_view kReductionAndTranspose =
    "Notes on CUDA matrix reduction and transpose: naive and shared-memory kernels";

inline constexpr AlgorithmInfo kAlgorithms[] = {
    {"naive", "A thread per element: reads are coalesced, writes are scattered.",
     kReductionAndTranspose, "none"},
    {"tiled", "A block transposes a tile in shared memory, padded so that columns use all banks.",
     kReductionAndTranspose,
     "none; permutations that keep long contiguous runs are copied as by copy"},
    {"swizzled",
     "Threads transpose small blocks in registers and access shared memory in 16-byte chunks.",
     "Notes on transpose kernels for Hopper: vector accesses and an XOR swizzle",
     "none; permutations that keep long contiguous runs are as copy, short ones as tiled"},
    {"copy", "Runs of elements that stay contiguous move in words of up to 16 bytes.",
     "The vectorised copy of CUDA practice",
     "none; if the minor dimension moves, a word is one element, as in naive"},
};

struct Plan {
  Algorithm algorithm;
  std::string reason;
};

// The algorithm called `algorithm`, or the best one for the problem if it is empty. Throws
// std::invalid_argument if there is no such algorithm or the problem is not valid.
Plan plan(const Problem& problem, std::string_view algorithm, const Device& device);

// Runs the plan: x and y have as many elements as the problem's shape says, at least one. They may
// be aligned to their elements only.
void launch(const Plan& plan, const Problem& problem, const void* x, void* y, const Queue& queue);

// How many words `swizzled` moves at a time: 16 bytes, or 8 of single bytes, of which a thread
// turns as many rows as a vector has elements; 16 x 16 would overflow its registers.
constexpr int vector_words(int word_bytes) { return word_bytes == 1 ? 8 : 16 / word_bytes; }

// One dimension of a movement: how many steps, and how far a step goes in operand and result.
struct Dim {
  std::int64_t size;
  std::int64_t in_stride;
  std::int64_t out_stride;
};

// A problem in canonical form: what moves are words; dimensions of size 1 are gone, and so are
// borders between dimensions that stay neighbours. In the order of the operand, minor last; the
// strides are in words. Either the words are the elements, or they are the widest that divide the
// runs of neighbours that stay neighbours; a run of several words is the last dimension.
struct Movement {
  int word_bytes;
  std::vector<Dim> dims;

  std::int64_t words() const;
  bool has_runs() const { return dims.empty() || dims.back().out_stride == 1; }
  // Runs as long as what memory moves at a time need no turning to be read and written well.
  bool has_long_runs() const {
    return dims.size() <= 1 || (has_runs() && dims.back().size * word_bytes >= 64);
  }
};

// The dimensions that a movement turns: columns are the nearest neighbours in the operand, rows in
// the result, a short run being taken as one. `run` is null if there is none.
struct TurnedDims {
  const Dim* row;
  const Dim* column;
  const Dim* run;
};

// The movement must not have long runs.
TurnedDims turned_dims(const Movement& movement);

inline constexpr int kWidestWord = 16;

// The canonical form, with words of at most `max_word_bytes`, a power of two.
Movement canonicalize(const Problem& problem, int max_word_bytes);

}  // namespace transpose
}  // namespace JAX_GPUOPS_NAMESPACE
