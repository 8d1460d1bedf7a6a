// The plan of bf16_x6: whether six products on tensor cores are done before one by FMAs.

#include <algorithm>
#include <string>

#include "core/integer.h"
#include "matmul/plan.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {
namespace {

constexpr int kSliceDepth = kTensorLineBytes / 2;
// How many rows of tiles share columns of b in the L2 cache.
constexpr std::int64_t kBF16X6Group = 8;

// Less than a slice of the depth leaves most of the products to zeros, and is of few terms, of
// which FMAs have the smaller errors.
constexpr std::int64_t kLeastBF16X6Depth = kSliceDepth;
// Fewer rows or columns leave most of a tile empty.
constexpr std::int64_t kLeastBF16X6Extent = 64;
// Its launches alone take as long as FMAs for fewer products; and workspace is not to be reserved
// in vain.
constexpr double kLeastBF16X6Work = 1 << 25;

// Measured on an H200 (docs/tuning.md), in nanoseconds: what a multiprocessor takes for the six
// products of a slice of a tile, of which it does 142 TFLOP/s with 131 others; the end of a tile;
// the splitting of an element whose neighbours lie along the depth, and of another; and the
// launches before and after the products.
constexpr double kSliceTime = 2.0 * kBF16X6Tile * kBF16X6Tile * kSliceDepth / 1075;
constexpr double kTileEndTime = 1000;
constexpr double kSplitTime = 0.0025;
constexpr double kStridedSplitTime = 0.005;
constexpr double kSplitLaunchTime = 2500;

// Blocks of a cluster share columns of b; without a second row of tiles there is nobody to share
// with.
int cluster_rows_of(const Problem& problem) { return problem.m > kBF16X6Tile ? 2 : 1; }

std::int64_t clusters_of(const Problem& problem) {
  return problem.batch * divide_up(problem.m, kBF16X6Tile * cluster_rows_of(problem)) *
         divide_up(problem.n, kBF16X6Tile);
}

double bf16_x6_time(const Problem& problem, const Device& device) {
  double splitting = 0;
  for (const StoredFactor& factor : {stored_a(problem), stored_b(problem)}) {
    splitting += static_cast<double>(factor.batch * factor.rows) *
                 static_cast<double>(factor.length) *
                 (factor.deep ? kSplitTime : kStridedSplitTime);
  }
  const auto turns = static_cast<double>(
      divide_up(clusters_of(problem), device.multiprocessors / cluster_rows_of(problem)));
  const auto slices = static_cast<double>(divide_up(problem.k, kSliceDepth));
  return kLaunchTime + 3 * kSplitLaunchTime + splitting +
         turns * (slices * kSliceTime + kTileEndTime);
}

}  // namespace

// Why bf16_x6 does not take the problem; empty if it does.
std::string refusal_of_bf16_x6(const Problem& problem, const Device& device) {
  if (problem.dtype != DType::kFloat32) {
    return "takes float32, not " + text(info(problem.dtype).name);
  }
  if (problem.precision == Precision::kF32F32F32 || problem.precision == Precision::kTF32TF32F32) {
    return "multiplies float32 by BF16_BF16_F32_X6, not by " +
           text(kPrecisions[static_cast<int>(problem.precision)]);
  }
  if (!device.runs_hopper_code()) return "needs a GPU of compute capability 9.0";
  if (problem.has_c && problem.k == 0) return "has nothing to add c to without a depth";
  if (has_epilogue(problem)) return "has no bias and no activation";
  const std::int64_t most = kMostTensorExtent;
  const std::int64_t longest_row = (std::int64_t{1} << 38) / std::max<std::int64_t>(problem.k, 1);
  if (std::max({problem.m, problem.n, problem.k}) > most || problem.batch > most / kBF16Parts ||
      std::max(problem.m, problem.n) + kTensorLineBytes > longest_row) {
    return "takes extents of at most 2^30, a third of it for a batch, and factors of less than "
           "1 TiB";
  }
  const double tiles =
      static_cast<double>(problem.batch) *
      static_cast<double>(divide_up(problem.m, kBF16X6Tile) * divide_up(problem.n, kBF16X6Tile));
  if (tiles > static_cast<double>(most)) return "takes at most 2^30 tiles";
  const std::int64_t needed = problem.k == 0 ? 0 : bf16_x6_workspace(problem).bytes;
  if (problem.workspace != kWorkspaceAsAsked && problem.workspace < needed) {
    return "needs " + std::to_string(needed) +
           " bytes of workspace for the parts of its factors, and has " +
           std::to_string(problem.workspace);
  }
  return "";
}

bool suits_bf16_x6(const Problem& problem) {
  return problem.dtype == DType::kFloat32 && problem.precision == Precision::kHighest &&
         !has_epilogue(problem) && problem.k >= kLeastBF16X6Depth &&
         std::min(problem.m, problem.n) > kLeastBF16X6Extent &&
         work_of(problem) >= kLeastBF16X6Work;
}

bool prefers_bf16_x6(const Problem& problem, const Device& device) {
  return suits_bf16_x6(problem) && refusal_of_bf16_x6(problem, device).empty() &&
         bf16_x6_time(problem, device) < fma_time(problem, device);
}

Config configure_bf16_x6(const Problem& problem, const Device& device) {
  Config config;
  config.threads = kBF16X6Threads;
  config.tile_rows = kBF16X6Tile;
  config.tile_cols = kBF16X6Tile;
  config.cluster_rows = cluster_rows_of(problem);
  config.blocks = blocks_of(clusters_of(problem), config.cluster_rows, device);
  config.stages = kBF16X6Stages;
  config.group = kBF16X6Group;
  config.shared_bytes = kBF16X6SharedBytes;
  config.workspace_bytes = problem.k == 0 ? 0 : bf16_x6_workspace(problem).bytes;
  return config;
}

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
