// Instantiates the transpose kernels and launches them.

#include <algorithm>
#include <stdexcept>

#include "core/dtype.h"
#include "core/launch.h"
#include "transpose/ladder/01_naive.cuh"
#include "transpose/ladder/02_tiled.cuh"
#include "transpose/matrices.cuh"
#include "transpose/swizzled.cuh"
#include "transpose/transpose.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace transpose {
namespace {

template <class Word>
struct Call {
  const Queue& queue;
  const Word* x;
  Word* y;
  Movement movement;  // may have dimensions of size 1 where a part was cut
};

std::int64_t divide_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

std::uint32_t tiles(std::uint32_t size, int log2_tile) {
  return static_cast<std::uint32_t>(divide_up(size, std::int64_t{1} << log2_tile));
}

int log2_up(std::int64_t value) {
  int log2 = 0;
  while ((std::int64_t{1} << log2) < value) ++log2;
  return log2;
}

// All dimensions but the given ones, minor first.
Walk walk(const Movement& movement, std::initializer_list<const Dim*> except) {
  Walk walk;
  for (auto dim = movement.dims.rbegin(); dim != movement.dims.rend(); ++dim) {
    if (std::find(except.begin(), except.end(), &*dim) == except.end()) walk.push(*dim);
  }
  return walk;
}

template <class Word>
void launch_naive(const Call<Word>& call) {
  const std::int64_t words = call.movement.words();
  launch(call.queue, {grid_extent(divide_up(words, kNaiveWordsPerBlock)), kNaiveThreads},
         naive_kernel<Word>, call.x, call.y, static_cast<std::uint32_t>(words),
         walk(call.movement, {}));
}

// The matrices of a movement, in tiles of the given shape.
Matrices matrices_of(const Movement& movement, const Dim& row, const Dim& column, const Dim& depth,
                     const Bits& log2_size) {
  Matrices result;
  result.rows = static_cast<std::uint32_t>(row.size);
  result.columns = static_cast<std::uint32_t>(column.size);
  result.depth = static_cast<std::uint32_t>(depth.size);
  result.in_row_stride = row.in_stride;
  result.in_column_stride = column.in_stride;
  result.in_depth_stride = depth.in_stride;
  result.out_row_stride = row.out_stride;
  result.out_column_stride = column.out_stride;
  result.out_depth_stride = depth.out_stride;
  result.others = walk(movement, {&row, &column, &depth});
  const std::uint32_t column_tiles = tiles(result.columns, log2_size.column);
  result.row_tiles = tiles(result.rows, log2_size.row);
  result.depth_tiles = Divisor(tiles(result.depth, log2_size.depth));
  result.band_tiles = Divisor(kBandHeight * column_tiles);
  result.matrix_tiles = Divisor(result.row_tiles * column_tiles);
  return result;
}

unsigned tile_count(const Matrices& matrices) {
  std::uint32_t count = matrices.matrix_tiles.value() * matrices.depth_tiles.value();
  for (int i = 0; i < matrices.others.rank; ++i) count *= matrices.others.size[i].value();
  return count;
}

// For matrices without other dimensions: farther away than anything, so that it is the highest
// field.
const Dim kNoDepth{1, std::int64_t{1} << 48, std::int64_t{1} << 48};

// The innermost of the other dimensions: its steps are the nearest to the matrix's own.
const Dim& lent_depth(const Movement& movement, const TurnedDims& turned) {
  const std::vector<Dim>& dims = movement.dims;
  const auto found = std::find_if(dims.rbegin(), dims.rend(), [&](const Dim& dim) {
    return &dim != turned.row && &dim != turned.column;
  });
  return found == dims.rend() ? kNoDepth : *found;
}

// The fields of an index whose lowest is the one of the smallest stride.
Bits shifts(const Bits& log2_size, std::int64_t row, std::int64_t column, std::int64_t depth) {
  const auto shift = [&](std::int64_t stride) {
    return (row < stride ? log2_size.row : 0) + (column < stride ? log2_size.column : 0) +
           (depth < stride ? log2_size.depth : 0);
  };
  return {shift(row), shift(column), shift(depth)};
}

// A tile of 2^log2_elements, as near to a square as the matrix allows. What a narrow matrix leaves
// of it goes to the long side, and what a small one leaves to the depth.
Box box_for(const TurnedDims& turned, const Dim& depth, int log2_elements) {
  const int rows = log2_up(turned.row->size);
  const int columns = log2_up(turned.column->size);
  const int run = turned.run == nullptr ? 0 : log2_up(turned.run->size);
  const int matrix = log2_elements - run;
  Box box;
  box.log2_size.row = std::min(matrix / 2, rows);
  box.log2_size.column = std::min(matrix - box.log2_size.row, columns);
  box.log2_size.row = std::min(matrix - box.log2_size.column, rows);
  box.log2_size.depth = log2_elements - box.log2_size.row - box.log2_size.column;
  box.in_shift =
      shifts(box.log2_size, turned.row->in_stride, turned.column->in_stride, depth.in_stride);
  box.out_shift =
      shifts(box.log2_size, turned.row->out_stride, turned.column->out_stride, depth.out_stride);
  box.pad_shift = std::max(kMinPadShift, box.out_shift.column);
  return box;
}

template <class Word>
void launch_tiled(const Call<Word>& call) {
  const TurnedDims turned = turned_dims(call.movement);
  const Dim& depth = turned.run == nullptr ? lent_depth(call.movement, turned) : *turned.run;
  Box box = box_for(turned, depth, 2 * kTileSideLog2<Word>);
  box.pad = kTilePad<Word>;
  const Matrices matrices =
      matrices_of(call.movement, *turned.row, *turned.column, depth, box.log2_size);
  for (int i = 0; i < kMaxTiledSteps; ++i) {
    box.step[i] = box.step_of(i * kTiledThreads, matrices);
  }
  launch(call.queue, {tile_count(matrices), kTiledThreads, sizeof(TileStorage<Word>)},
         tiled_kernel<Word>, call.x, call.y, matrices, box);
}

template <class Word>
void launch_swizzled(const Call<Word>& call) {
  using Storage = SwizzledTile<Word>;
  const int log2_side = log2_up(Storage::kSide);
  const TurnedDims turned = turned_dims(call.movement);
  const Matrices matrices =
      matrices_of(call.movement, *turned.row, *turned.column, kNoDepth, {log2_side, log2_side, 0});
  launch(call.queue, {tile_count(matrices), kSwizzledThreads, sizeof(Storage)},
         swizzled_kernel<Word>, call.x, call.y, matrices);
}

// Kernels count in 32 bits. A larger movement goes in parts, halves of its outermost dimension, so
// that a part's words are neighbours in the operand.
template <class Word>
void launch_parts(Algorithm algorithm, Call<Word> call) {
  const Movement& movement = call.movement;
  if (movement.words() > kMaxWords) {
    std::vector<Dim>& dims = call.movement.dims;
    Dim& outermost =
        *std::find_if(dims.begin(), dims.end(), [](const Dim& dim) { return dim.size > 1; });
    const std::int64_t half = outermost.size / 2;
    outermost.size -= half;
    launch_parts(algorithm, call);
    call.x += outermost.size * outermost.in_stride;
    call.y += outermost.size * outermost.out_stride;
    outermost.size = half;
    return launch_parts(algorithm, call);
  }
  const bool turns = algorithm == Algorithm::kTiled || algorithm == Algorithm::kSwizzled;
  if (!turns || movement.has_long_runs()) return launch_naive(call);
  if (algorithm == Algorithm::kTiled || movement.has_runs()) return launch_tiled(call);
  launch_swizzled(call);
}

bool is_aligned_to(const void* pointer, int bytes) {
  return reinterpret_cast<std::uintptr_t>(pointer) % bytes == 0;
}

}  // namespace

void launch(const Plan& plan, const Problem& problem, const void* x, void* y, const Queue& queue) {
  const auto run = [&](const Movement& movement) {
    if (movement.dims.size() > kMaxRank) {
      throw std::invalid_argument("the permutation has too many dimensions");
    }
    dispatch_power_of_two<1, kWidestWord>(movement.word_bytes, [&](auto bytes) {
      using Word = typename WordOf<bytes>::type;
      launch_parts<Word>(plan.algorithm,
                         {queue, static_cast<const Word*>(x), static_cast<Word*>(y), movement});
    });
  };
  const int element = problem.element_bytes;
  const Movement movement =
      canonicalize(problem, plan.algorithm == Algorithm::kNaive ? element : kWidestWord);
  const bool aligned =
      is_aligned_to(x, movement.word_bytes) && is_aligned_to(y, movement.word_bytes);
  // Addresses are not known while preparing, so both kernels a call may need are loaded then.
  if (movement.word_bytes > element && (queue.preparing || !aligned)) {
    run(canonicalize(problem, element));
    if (!queue.preparing) return;
  }
  run(movement);
}

}  // namespace transpose
}  // namespace JAX_GPUOPS_NAMESPACE
