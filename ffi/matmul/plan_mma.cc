// The plans of mma_pipelined and mma_batched.

#include <algorithm>
#include <cstdlib>
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

const MmaBatchedTile& best_mma_batched_tile(const Problem& problem) {
  if (const char* forced = std::getenv("MMAB")) return kMmaBatchedTiles[forced[0] - '0'];
  const std::int64_t most = std::max(problem.m, problem.n);
  if (most <= 32) return kMmaBatchedTiles[3];
  if (problem.n <= 64) return kMmaBatchedTiles[problem.m <= 64 ? 2 : 1];
  return kMmaBatchedTiles[most <= 80 ? 2 : 0];
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
  if (problem.dtype == DType::kFloat64)
    return "supports float16, bfloat16 and float32, not float64";
  if (problem.has_c) return "does not support c";
  if (problem.scaled) return "supports only alpha = 1";
  if (problem.alignment < kPieceBytes) return "requires arrays aligned to 16 bytes";
  return refusal_of_mma_pipelined(problem, device);
}

Config configure_mma_batched(const Problem& problem, const Device&) {
  const MmaBatchedTile& tile = best_mma_batched_tile(problem);
  const auto element_bytes = static_cast<int>(bytes_of(problem.dtype));
  Config config;
  config.threads = tile.threads();
  config.tile_rows = tile.rows;
  config.tile_cols = tile.cols;
  config.blocks = problem.batch * divide_up(problem.m, tile.rows) * divide_up(problem.n, tile.cols);
  config.stages = problem.k * element_bytes > kMmaBatchedSliceBytes ? 2 : 1;
  config.shared_bytes = tile.shared_bytes(config.stages, element_bytes,
                                          static_cast<int>(bytes_of(problem.result_dtype)));
  return config;
}

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
