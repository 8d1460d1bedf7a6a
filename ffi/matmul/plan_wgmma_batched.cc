// The plan of wgmma_batched.

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "core/integer.h"
#include "matmul/plan.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {
namespace {

// The time of a launch, apart from its blocks; of a block with a multiprocessor to itself, of each
// step after its first, and of each further block on the multiprocessor; of a multiprocessor with
// many blocks for each tile, and for each step of a tile.
constexpr double kBatchedLaunchTime = 1500;
constexpr double kBlockTime = 600;
constexpr double kBlockStepTime = 320;
constexpr double kFurtherBlockTime = 450;
constexpr double kSharedTileTime = 300;
constexpr double kSharedStepTime = 150;
// The same for a bias and an activation of each tile.
constexpr double kBatchedFinishTime = 100;
// The kernel counts the bytes of a row by ints.
constexpr std::int64_t kMostBatchedColumns = 1 << 28;
// The most steps for which the plan chooses it, of a batch and of a single product: blocks that
// multiply while they copy are faster.
constexpr std::int64_t kMostBatchedSteps = 16;
constexpr std::int64_t kMostSingleSteps = 8;
// The most stages if not all blocks are resident at the same time: while one waits, others
// multiply.
constexpr int kStagesOfManyBlocks = 3;

std::int64_t batched_tiles(const Problem& problem) {
  return problem.batch * divide_up(problem.m, kWgmmaBatchedTile) *
         divide_up(problem.n, kWgmmaBatchedTile);
}

std::int64_t batched_steps(const Problem& problem) {
  return divide_up(problem.k * bytes_of(problem.dtype), kTensorLineBytes);
}

int stages_of(const Problem& problem, const Device& device) {
  const auto steps = static_cast<int>(
      std::clamp<std::int64_t>(batched_steps(problem), 1, kMostWgmmaBatchedStages));
  const std::int64_t blocks =
      std::max<std::int64_t>(divide_up(batched_tiles(problem), device.multiprocessors), 1);
  if (blocks > kResidentWgmmaBatched) return std::min(steps, kStagesOfManyBlocks);
  return std::min(steps, ring_stages(static_cast<int>(blocks), kWgmmaBatchedLines));
}

}  // namespace

// Why wgmma_batched does not take the problem; empty if it does.
std::string refusal_of_wgmma_batched(const Problem& problem, const Device& device) {
  if (!is_16_bit_float(problem.dtype)) {
    return "supports only float16 and bfloat16, not " + text(info(problem.dtype).name);
  }
  if (problem.has_c) return "does not support c";
  if (has_epilogue(problem) && problem.result_dtype != problem.dtype) {
    return "supports a bias or an activation only for a result of the factors' dtype";
  }
  if (!device.runs_hopper_code()) return "requires a GPU of compute capability 9.0";
  if (problem.scaled) return "supports only alpha = 1";
  if (copies_bytes(problem) > 0) {
    return "supports only factors whose rows are a multiple of 16 bytes";
  }
  if (problem.n > kMostBatchedColumns) return "supports at most 2^28 columns";
  return refusal_of_tensor_sizes(problem, kWgmmaBatchedTile);
}

// Infinite if the plan does not choose it. A single product with more tiles than blocks at a time
// is left to the larger tiles of tensor_core, which read the factors less often.
double wgmma_batched_time(const Problem& problem, const Device& device) {
  const std::int64_t tiles = batched_tiles(problem);
  const bool is_chosen = problem.batch > 1
                             ? batched_steps(problem) <= kMostBatchedSteps
                             : batched_steps(problem) <= kMostSingleSteps &&
                                   tiles <= kResidentWgmmaBatched * device.multiprocessors;
  if (!is_chosen || !refusal_of_wgmma_batched(problem, device).empty()) {
    return std::numeric_limits<double>::infinity();
  }
  const auto steps = static_cast<double>(batched_steps(problem));
  const auto further = static_cast<double>((tiles - 1) / device.multiprocessors);
  const double of_block = kBlockTime + (steps - 1) * kBlockStepTime + further * kFurtherBlockTime;
  const double finish = has_epilogue(problem) ? kBatchedFinishTime : 0;
  const double of_all = static_cast<double>(tiles) / device.multiprocessors *
                        (kSharedTileTime + finish + steps * kSharedStepTime);
  const double reads = read_time(problem, tiles, kWgmmaBatchedTile, kWgmmaBatchedTile,
                                 std::min<std::int64_t>(tiles, device.multiprocessors));
  return kBatchedLaunchTime + std::max({of_block, of_all, reads});
}

bool prefers_wgmma_batched(const Problem& problem, const Device& device) {
  const double time = wgmma_batched_time(problem, device);
  return std::isfinite(time) && time < tensor_core_or_splits_time(problem, device);
}

Config configure_wgmma_batched(const Problem& problem, const Device& device) {
  const auto row_bytes = problem.n * bytes_of(problem.result_dtype);
  Config config;
  config.threads = 128;
  config.tile_rows = kWgmmaBatchedTile;
  config.tile_cols = kWgmmaBatchedTile;
  config.blocks = batched_tiles(problem);
  config.stages = stages_of(problem, device);
  config.shared_bytes = ring_bytes(config.stages, kWgmmaBatchedLines);
  config.vector_bytes = row_bytes % 16 == 0 ? 16 : row_bytes % 4 == 0 ? 4 : 2;
  return config;
}

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
