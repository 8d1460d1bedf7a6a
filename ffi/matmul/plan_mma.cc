// The plans of mma_pipelined and mma_batched.

#include <algorithm>
#include <string>

#include "core/integer.h"
#include "matmul/plan.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {
namespace {

// Slices are counted by ints.
constexpr std::int64_t kMostMmaDepth = std::int64_t{1} << 34;

// The tile with the shortest estimated time. A multiprocessor with several resident blocks
// multiplies no faster, so a wave is one tile per multiprocessor.
const MmaTile& best_mma_tile(const Problem& problem, const Device& device) {
  const MmaTile* best = nullptr;
  double least = 0;
  for (const MmaTile& tile : kMmaTiles) {
    if (tile.element_bytes != bytes_of(problem.dtype)) continue;
    const std::int64_t tiles =
        problem.batch * divide_up(problem.m, tile.rows) * divide_up(problem.n, tile.cols);
    const double time = static_cast<double>(divide_up(tiles, device.multiprocessors)) * tile.rows *
                        tile.cols / tile.speed;
    if (best == nullptr || time < least) {
      best = &tile;
      least = time;
    }
  }
  return *best;
}

// The bytes of the widest vector that divides the length and the alignment of both factors' rows,
// as stored. 16-bit elements that do not form aligned pairs are read one by one.
int mma_vector_bytes(const Problem& problem) {
  const auto element_bytes = static_cast<int>(bytes_of(problem.dtype));
  const auto fits = [&](int bytes) {
    const auto consists = [&](const StoredFactor& factor) {
      return factor.length * element_bytes % bytes == 0;
    };
    return problem.alignment >= bytes && consists(stored_a(problem)) && consists(stored_b(problem));
  };
  if (fits(16)) return 16;
  return element_bytes == 2 && fits(4) ? 4 : element_bytes;
}

// mma_batched: what it takes from tensor_core and mma_pipelined.
//
// Products with an extent of at most this many, of factors whose rows begin anywhere: the other
// kernels read these from a copy, or element by element.
constexpr std::int64_t kMostBatchedExtent = 64;
// Results with at most so many rows and columns, which leave most of a larger tile empty.
constexpr std::int64_t kMostSmallExtent = 80;
constexpr std::int64_t kMostBatchedDepth = 512;
// The fewest tiles, of small results and of others: with fewer, most multiprocessors are idle, and
// the larger tiles of tensor_core take no longer.
constexpr std::int64_t kLeastSmallTiles = 32;
constexpr std::int64_t kLeastBatchedTiles = 128;

std::int64_t tiles_of(const Problem& problem, const MmaBatchedTile& tile) {
  return problem.batch * divide_up(problem.m, tile.rows) * divide_up(problem.n, tile.cols);
}

// The tile with the shortest estimated time.
const MmaBatchedTile& best_mma_batched_tile(const Problem& problem) {
  const std::int64_t slices = divide_up(problem.k * bytes_of(problem.dtype), kMmaBatchedSliceBytes);
  const auto time = [&](const MmaBatchedTile& tile) {
    return static_cast<double>(tiles_of(problem, tile)) *
           static_cast<double>(tile.tile_time + slices * tile.slice_time);
  };
  return *std::min_element(
      std::begin(kMmaBatchedTiles), std::end(kMmaBatchedTiles),
      [&](const MmaBatchedTile& a, const MmaBatchedTile& b) { return time(a) < time(b); });
}

}  // namespace

// Why mma_pipelined does not take the problem; empty if it does.
std::string refusal_of_mma_pipelined(const Problem& problem, const Device& device) {
  if (problem.dtype == DType::kFloat32 && !may_use_tf32(problem)) {
    return "multiplies float32 in TF32, which precision " +
           text(kPrecisions[static_cast<int>(problem.precision)]) + " excludes";
  }
  if (device.compute_capability < 80) return "requires a GPU of compute capability 8.0 or later";
  return problem.k > kMostMmaDepth ? "supports a depth k of at most 2^34" : "";
}

Config configure_mma_pipelined(const Problem& problem, const Device& device) {
  const MmaTile& tile = best_mma_tile(problem, device);
  Config config;
  config.threads = tile.threads();
  config.tile_rows = tile.rows;
  config.tile_cols = tile.cols;
  config.stages = tile.stages;
  config.vector_bytes = mma_vector_bytes(problem);
  config.shared_bytes = tile.shared_bytes();
  return config;
}

// Why mma_batched does not take the problem; empty if it does.
std::string refusal_of_mma_batched(const Problem& problem, const Device& device) {
  if (problem.dtype == DType::kFloat64) {
    return "supports float16, bfloat16 and float32, not float64";
  }
  const std::string why = refusal_of_mma_pipelined(problem, device);
  if (!why.empty()) return why;
  if (problem.has_c) return "does not support c";
  if (problem.scaled) return "supports only alpha = 1";
  if (problem.alignment < kPieceBytes) return "requires arrays aligned to 16 bytes";
  const double smallest = static_cast<double>(problem.batch) *
                          static_cast<double>(divide_up(problem.m, 32)) *
                          static_cast<double>(divide_up(problem.n, 32));
  return smallest > static_cast<double>(kMostTensorExtent)
             ? "supports at most 2^30 tiles of 32 x 32"
             : "";
}

bool suits_mma_batched(const Problem& problem) {
  if (problem.batch == 1 || problem.dtype == DType::kFloat64 || problem.has_c || problem.scaled ||
      is_8_bit(problem.dtype) || problem.gated ||
      (problem.dtype == DType::kFloat32 && !may_use_tf32(problem))) {
    return false;
  }
  const auto [least, most] = std::minmax(problem.m, problem.n);
  const std::int64_t least_tiles = most <= kMostSmallExtent ? kLeastSmallTiles : kLeastBatchedTiles;
  if (tiles_of(problem, best_mma_batched_tile(problem)) < least_tiles) return false;
  const auto begins_anywhere = [](const StoredFactor& factor) {
    return factor.length * factor.element_bytes % kPieceBytes != 0;
  };
  const bool reads_anywhere =
      begins_anywhere(stored_a(problem)) || begins_anywhere(stored_b(problem));
  return (reads_anywhere && std::min(least, problem.k) <= kMostBatchedExtent) ||
         (most <= kMostSmallExtent && problem.k <= kMostBatchedDepth);
}

Config configure_mma_batched(const Problem& problem) {
  const MmaBatchedTile& tile = best_mma_batched_tile(problem);
  const auto element_bytes = static_cast<int>(bytes_of(problem.dtype));
  Config config;
  config.threads = tile.threads();
  config.tile_rows = tile.rows;
  config.tile_cols = tile.cols;
  config.blocks = tiles_of(problem, tile);
  config.stages = problem.k * element_bytes > kMmaBatchedSliceBytes ? 2 : 1;
  config.shared_bytes = tile.shared_bytes(config.stages, element_bytes,
                                          static_cast<int>(bytes_of(problem.result_dtype)));
  return config;
}

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
