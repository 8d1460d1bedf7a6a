// Instantiates the transpose kernels and launches them.

#include "transpose/transpose.h"

#include <algorithm>
#include <stdexcept>

#include "core/dtype.h"
#include "core/launch.h"
#include "transpose/ladder/01_naive.cuh"
#include "transpose/ladder/02_tiled.cuh"
#include "transpose/matrices.cuh"
#include "transpose/swizzled.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace transpose {
namespace {

template <class Word>
struct Call {
  const Queue& queue;
  const Word* x;
  Word* y;
  std::vector<Dim> dims;  // canonical; may have sizes of 1 where a part was cut
};

std::int64_t divide_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

std::uint32_t tiles(std::uint32_t size, int log2_tile) {
  return static_cast<std::uint32_t>(divide_up(size, std::int64_t{1} << log2_tile));
}

int log2_up(std::uint32_t value) {
  int log2 = 0;
  while ((std::uint64_t{1} << log2) < value) ++log2;
  return log2;
}

// All dimensions but the given ones, minor first.
Walk walk(const std::vector<Dim>& dims, std::initializer_list<const Dim*> except) {
  Walk walk;
  for (auto dim = dims.rbegin(); dim != dims.rend(); ++dim) {
    if (std::find(except.begin(), except.end(), &*dim) == except.end()) walk.push(*dim);
  }
  return walk;
}

template <class Word>
void launch_naive(const Call<Word>& call) {
  const std::int64_t words = Movement{sizeof(Word), call.dims}.words();
  launch(call.queue, {grid_extent(divide_up(words, kNaiveWordsPerBlock)), kNaiveThreads},
         naive_kernel<Word>, call.x, call.y, static_cast<std::uint32_t>(words),
         walk(call.dims, {}));
}

const Dim kNoDim{1, 0, 0};

// The matrices of a movement; the depth is 1 unless the tiles are to have one.
struct MatrixDims {
  const Dim* row;
  const Dim* column;
  const Dim* depth = &kNoDim;

  explicit MatrixDims(const std::vector<Dim>& dims)
      : row(&*std::find_if(dims.begin(), dims.end(),
                           [](const Dim& dim) { return dim.out_stride == 1; })),
        column(&dims.back()) {}

  // The innermost of the other dimensions: its steps are the nearest to the matrix's own.
  void find_depth(const std::vector<Dim>& dims) {
    for (const Dim& dim : dims) {
      if (&dim != row && &dim != column) depth = &dim;
    }
  }

  Matrices matrices(const std::vector<Dim>& dims, int log2_rows, int log2_columns,
                    int log2_depth) const {
    Matrices result;
    result.rows = static_cast<std::uint32_t>(row->size);
    result.columns = static_cast<std::uint32_t>(column->size);
    result.depth = static_cast<std::uint32_t>(depth->size);
    result.in_row_stride = row->in_stride;
    result.in_depth_stride = depth->in_stride;
    result.out_column_stride = column->out_stride;
    result.out_depth_stride = depth->out_stride;
    result.others = walk(dims, {row, column, depth});
    const std::uint32_t column_tiles = tiles(result.columns, log2_columns);
    result.row_tiles = tiles(result.rows, log2_rows);
    result.depth_tiles = Divisor(tiles(result.depth, log2_depth));
    result.band_tiles = Divisor(kBandHeight * column_tiles);
    result.matrix_tiles = Divisor(result.row_tiles * column_tiles);
    return result;
  }
};

unsigned tile_count(const Matrices& matrices) {
  std::uint32_t count = matrices.matrix_tiles.value() * matrices.depth_tiles.value();
  for (int i = 0; i < matrices.others.rank; ++i) count *= matrices.others.size[i].value();
  return count;
}

// As near to a square as the matrix allows; what a narrow matrix leaves of the tile goes to its long
// side, and what a small one leaves to the depth.
Box box_for(const MatrixDims& dims, int log2_side) {
  const int log2_matrix_rows = log2_up(static_cast<std::uint32_t>(dims.row->size));
  const int log2_matrix_columns = log2_up(static_cast<std::uint32_t>(dims.column->size));
  Box box;
  box.log2_rows = std::min(log2_side, log2_matrix_rows);
  box.log2_columns = std::min(2 * log2_side - box.log2_rows, log2_matrix_columns);
  box.log2_rows = std::min(2 * log2_side - box.log2_columns, log2_matrix_rows);
  box.log2_depth = 2 * log2_side - box.log2_rows - box.log2_columns;
  const bool in_depth_first = dims.depth->in_stride < dims.row->in_stride;
  box.in_row_shift = box.log2_columns + (in_depth_first ? box.log2_depth : 0);
  box.in_depth_shift = box.log2_columns + (in_depth_first ? 0 : box.log2_rows);
  const bool out_depth_first = dims.depth->out_stride < dims.column->out_stride;
  box.out_column_shift = box.log2_rows + (out_depth_first ? box.log2_depth : 0);
  box.out_depth_shift = box.log2_rows + (out_depth_first ? 0 : box.log2_columns);
  box.pad_shift = std::max(kMinPadShift, box.out_column_shift);
  return box;
}

template <class Word>
void launch_tiled(const Call<Word>& call) {
  MatrixDims dims(call.dims);
  dims.find_depth(call.dims);
  Box box = box_for(dims, kTileSideLog2<Word>);
  box.pad = kTilePad<Word>;
  const Matrices matrices =
      dims.matrices(call.dims, box.log2_rows, box.log2_columns, box.log2_depth);
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
  const Matrices matrices = MatrixDims(call.dims).matrices(call.dims, log2_side, log2_side, 0);
  launch(call.queue, {tile_count(matrices), kSwizzledThreads, sizeof(Storage)},
         swizzled_kernel<Word>, call.x, call.y, matrices);
}

// Kernels count in 32 bits. A larger movement goes in parts, halves of its outermost dimension, so
// that a part's words are neighbours in the operand.
template <class Word>
void launch_parts(Algorithm algorithm, Call<Word> call) {
  const Movement movement{sizeof(Word), call.dims};
  if (movement.words() > kMaxWords) {
    const auto outermost = std::find_if(call.dims.begin(), call.dims.end(),
                                        [](const Dim& dim) { return dim.size > 1; });
    const std::int64_t half = outermost->size / 2;
    outermost->size -= half;
    launch_parts(algorithm, call);
    call.x += outermost->size * outermost->in_stride;
    call.y += outermost->size * outermost->out_stride;
    outermost->size = half;
    return launch_parts(algorithm, call);
  }
  if (movement.keeps_minor() || algorithm == Algorithm::kNaive || algorithm == Algorithm::kCopy) {
    return launch_naive(call);
  }
  if (algorithm == Algorithm::kTiled) return launch_tiled(call);
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
      launch_parts<Word>(plan.algorithm, {queue, static_cast<const Word*>(x),
                                          static_cast<Word*>(y), movement.dims});
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
