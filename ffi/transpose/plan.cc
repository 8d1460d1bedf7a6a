#include <algorithm>
#include <stdexcept>
#include <string>

#include "transpose/transpose.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace transpose {
namespace {

// Below this extent of the turned matrix most of a vectorised tile would be empty.
constexpr std::int64_t kSwizzledExtent = 32;

void check(const Problem& problem) {
  const std::size_t rank = problem.shape.size();
  std::vector<bool> seen(rank);
  for (const std::int64_t axis : problem.permutation) {
    if (axis < 0 || axis >= static_cast<std::int64_t>(rank) || seen[axis]) {
      throw std::invalid_argument("permutation must name each dimension of x once");
    }
    seen[axis] = true;
  }
  if (problem.permutation.size() != rank) {
    throw std::invalid_argument("permutation must have one entry for each dimension of x");
  }
  const int bytes = problem.element_bytes;
  if (bytes < 1 || bytes > 16 || (bytes & (bytes - 1)) != 0) {
    throw std::invalid_argument("elements must have 1, 2, 4, 8 or 16 bytes, not " +
                                std::to_string(bytes));
  }
}

// True if every row of the operand and of the result starts at a multiple of the swizzled kernel's
// vectors, as far as strides decide it.
bool vectors_fit(const Movement& movement) {
  const int vector = vector_words(movement.word_bytes);
  return std::all_of(movement.dims.begin(), movement.dims.end(), [&](const Dim& dim) {
    return (dim.in_stride == 1 || dim.in_stride % vector == 0) &&
           (dim.out_stride == 1 || dim.out_stride % vector == 0);
  });
}

}  // namespace

std::int64_t Movement::words() const {
  std::int64_t words = 1;
  for (const Dim& dim : dims) words *= dim.size;
  return words;
}

TurnedDims turned_dims(const Movement& movement) {
  const std::vector<Dim>& dims = movement.dims;
  const Dim* const run = movement.has_runs() ? &dims.back() : nullptr;
  const std::int64_t unit = run == nullptr ? 1 : run->size;
  const auto with = [&](std::int64_t Dim::* stride) {
    return &*std::find_if(dims.begin(), dims.end(),
                          [&](const Dim& dim) { return &dim != run && dim.*stride == unit; });
  };
  return {with(&Dim::out_stride), with(&Dim::in_stride), run};
}

Movement canonicalize(const Problem& problem, int max_word_bytes) {
  // In bytes first. The bytes of an element are one more dimension, which stays minor.
  const std::size_t rank = problem.shape.size();
  std::vector<Dim> all(rank);
  std::int64_t stride = problem.element_bytes;
  for (std::size_t i = rank; i-- > 0;) {
    Dim& dim = all[problem.permutation[i]];
    dim.size = problem.shape[problem.permutation[i]];
    dim.out_stride = stride;
    stride *= dim.size;
  }
  stride = problem.element_bytes;
  for (std::size_t i = rank; i-- > 0;) {
    all[i].in_stride = stride;
    stride *= all[i].size;
  }
  all.push_back({problem.element_bytes, 1, 1});

  // Neighbours in the operand that are neighbours in the result are one dimension.
  Movement movement{1, {}};
  std::vector<Dim>& dims = movement.dims;
  for (const Dim& dim : all) {
    if (dim.size == 1) continue;
    if (!dims.empty() && dims.back().out_stride == dim.size * dim.out_stride) {
      dims.back() = {dims.back().size * dim.size, dim.in_stride, dim.out_stride};
    } else {
      dims.push_back(dim);
    }
  }
  if (dims.empty() || dims.back().out_stride != 1) return movement;  // elements of one byte

  // The minor dimension is made of runs that stay as they are: the wider the words, the better.
  // All other strides are multiples of a run.
  Dim& run = dims.back();
  while (movement.word_bytes < max_word_bytes && run.size % 2 == 0) {
    movement.word_bytes *= 2;
    run.size /= 2;
  }
  if (run.size == 1) dims.pop_back();
  for (Dim& dim : dims) {
    if (dim.in_stride == 1) continue;
    dim.in_stride /= movement.word_bytes;
    dim.out_stride /= movement.word_bytes;
  }
  return movement;
}

Plan plan(const Problem& problem, std::string_view algorithm, const Device&) {
  check(problem);
  if (!algorithm.empty()) {
    return {algorithm_from_name<Algorithm>(kAlgorithms, algorithm), "named by the caller"};
  }
  const Movement movement = canonicalize(problem, kWidestWord);
  if (movement.words() == 0) return {Algorithm::kCopy, "there is nothing to move"};
  const std::string words = std::to_string(movement.word_bytes) + "-byte words";
  if (movement.has_long_runs()) {
    return {Algorithm::kCopy, "contiguous runs are kept, and move in " + words};
  }
  const auto [row, column, run] = turned_dims(movement);
  const std::string matrices =
      "matrices of " + std::to_string(row->size) + " x " + std::to_string(column->size) + " ";
  if (run != nullptr) {
    return {Algorithm::kTiled,
            matrices + "runs of " + std::to_string(run->size) + " " + words + " need tiles"};
  }
  if (std::min(row->size, column->size) < kSwizzledExtent) {
    return {Algorithm::kTiled, matrices + words + " need tiles of their own shape"};
  }
  if (!vectors_fit(movement)) {
    return {Algorithm::kTiled, matrices + words + " have rows that vectors do not divide"};
  }
  return {Algorithm::kSwizzled, matrices + words + " have rows that vectors divide"};
}

}  // namespace transpose
}  // namespace JAX_GPUOPS_NAMESPACE
