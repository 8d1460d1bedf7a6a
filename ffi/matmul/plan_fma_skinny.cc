// The plan of fma_skinny.

#include <algorithm>
#include <string>

#include "core/integer.h"
#include "matmul/plan.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {
namespace {

// The plan gives it no less: some warps would have nothing to multiply.
constexpr std::int64_t kLeastFmaSkinnyDepth = 128;
// Blocks that a multiprocessor holds.
constexpr std::int64_t kFmaSkinnyResident = 2;
// Bytes per nanosecond that a multiprocessor reads: alone; with its share of the memory bandwidth
// when all read; the same of a factor whose depth is contiguous, of which a step has only 64 bytes
// of a row; and from the L2 cache.
constexpr double kOwnReadRate = 60;
constexpr double kMemoryReadRate = 34;
constexpr double kDeepReadRate = 20;
constexpr double kCacheReadRate = 49;
// The time of a launch besides its blocks, a prediction. The FMAs of a multiprocessor per
// nanosecond, if a column more stands for the other instructions. A prediction of the time of the
// exchange of a cluster's sums. Relative to the others' estimates and to the time of reading the
// large factor, the time up to which the plan takes it. The same relative to the estimates of
// kernels of FMAs, which are closer to measurements than these predictions.
constexpr double kFmaSkinnyLaunchTime = 1900;
constexpr double kFmaRate = 120;
constexpr double kFmaSkinnyExchangeTime = 1000;
constexpr double kMostFmaSkinnyTime = 1.1;
constexpr double kMostTimeOfFmas = 0.8;

struct FmaSkinnyChoice {
  bool deep;  // the large factor's depth is contiguous
  int rows;
  int cols;
  int splits;
  double time;
};

int fma_skinny_cols(const SkinnyFactors& factors) {
  return power_of_two_from(std::max<std::int64_t>(factors.skinny.extent, 4), kMostFmaSkinnyCols);
}

// Whether the factor's rows, as stored, are whole aligned packs.
bool fits_packs(const Problem& problem, const SkinnyFactor& factor) {
  return problem.alignment >= 16 && (factor.deep ? problem.k : factor.extent) % kPack == 0;
}

std::int64_t tiles_of(const Problem& problem, const SkinnyFactors& factors, int rows) {
  return problem.batch * divide_up(factors.large.extent, rows);
}

// Whether `splits` blocks may divide a tile's depth: there is a step for each of their warps, and
// all clusters run at the same time. Those of more than two blocks do not fill the GPU's groups of
// multiprocessors.
bool has_room_for_splits(const Problem& problem, std::int64_t tiles, int rows, int splits,
                         const Device& device) {
  if (splits == 1) return true;
  const std::int64_t least_depth = kFmaSkinnyThreads / 32 * fma_skinny_step_depth(rows);
  const std::int64_t resident = kFmaSkinnyResident * device.multiprocessors;
  return device.runs_hopper_code() && problem.k >= splits * least_depth &&
         splits * tiles <= (splits == 2 ? resident : resident * 3 / 4);
}

// The time of `blocks` blocks that are resident at the same time: that of their reads from memory,
// of which the batch may share some, or from the L2 cache, or of their FMAs.
double time_of(std::int64_t blocks, const FmaSkinnyChoice& choice, double depth, double columns,
               double unique, const Device& device) {
  const double large = choice.rows * depth * 4;
  const double block = large + columns * depth * 4;
  const auto each = static_cast<double>(divide_up(blocks, device.multiprocessors));
  const double all = static_cast<double>(blocks) / device.multiprocessors;
  const double fmas = choice.rows * depth * (choice.cols + 1) / kFmaRate;
  return std::max({all * large * unique / (choice.deep ? kDeepReadRate : kMemoryReadRate),
                   all * block / kCacheReadRate, each * block / kOwnReadRate, each * fmas});
}

// The rows and the number of blocks per tile with the shortest estimated time.
FmaSkinnyChoice best_fma_skinny(const Problem& problem, const Device& device) {
  const SkinnyFactors factors = skinny_factors(problem);
  const int cols = fma_skinny_cols(factors);
  const int most_rows =
      fma_skinny_most_rows(factors.large.deep, fits_packs(problem, factors.large), cols);
  const double unique =
      factors.large.shared ? 1 / static_cast<double>(std::max<std::int64_t>(problem.batch, 1)) : 1;
  const std::int64_t resident = kFmaSkinnyResident * device.multiprocessors;
  FmaSkinnyChoice best{};
  for (int rows = 32; rows <= most_rows; rows *= 2) {
    const std::int64_t tiles = tiles_of(problem, factors, rows);
    for (int splits = 1; splits <= kMostSlicedSplits; ++splits) {
      if (!has_room_for_splits(problem, tiles, rows, splits, device)) continue;
      FmaSkinnyChoice choice{factors.large.deep, rows, cols, splits, 0};
      const double depth = static_cast<double>(problem.k) / splits;
      const auto columns = static_cast<double>(factors.skinny.extent);
      const auto time = [&](std::int64_t blocks) {
        return time_of(blocks, choice, depth, columns, unique, device);
      };
      const std::int64_t blocks = splits * tiles;
      choice.time = kFmaSkinnyLaunchTime + (splits > 1 ? kFmaSkinnyExchangeTime : 0) +
                    static_cast<double>(blocks / resident) * time(resident) +
                    time(blocks % resident);
      if (best.rows == 0 || choice.time < best.time) best = choice;
    }
  }
  return best;
}

// The time of any kernel that reads the large factor from memory.
double least_time(const Problem& problem, const Device& device) {
  const SkinnyFactors factors = skinny_factors(problem);
  const std::int64_t rows = (factors.large.shared ? 1 : problem.batch) * factors.large.extent;
  return kLaunchTime + static_cast<double>(rows) * static_cast<double>(problem.k) * 4 /
                           (kMemoryReadRate * device.multiprocessors);
}

// Why no device's fma_skinny takes the problem; empty if some do.
std::string refusal_of_problem(const Problem& problem) {
  if (problem.dtype != DType::kFloat32) {
    return "supports only float32, not " + text(info(problem.dtype).name);
  }
  return refusal_of_skinny_sizes(problem, kMostFmaSkinnyCols, 32);
}

}  // namespace

// Why fma_skinny does not take the problem; empty if it does.
std::string refusal_of_fma_skinny(const Problem& problem, const Device& device) {
  const std::string why = refusal_of_problem(problem);
  if (!why.empty()) return why;
  if (device.compute_capability < 80) return "requires a GPU of compute capability 8.0 or later";
  return "";
}

bool suits_fma_skinny(const Problem& problem) {
  return refusal_of_problem(problem).empty() && !problem.gated && !asks_for_tf32(problem) &&
         !asks_for_bf16_x6(problem) && problem.k >= kLeastFmaSkinnyDepth;
}

// Yes if kernels on tensor cores would have to copy a factor, for which no workspace is reserved
// (see workspace_bytes()), or do not take the problem where TF32 may be used. Else if no other
// kernel is estimated to be much faster: its sums are at least as exact as theirs.
bool prefers_fma_skinny(const Problem& problem, const Device& device) {
  if (!suits_fma_skinny(problem) || !refusal_of_fma_skinny(problem, device).empty()) return false;
  const double least = kMostFmaSkinnyTime * least_time(problem, device);
  if (!may_use_tf32(problem)) {
    return best_fma_skinny(problem, device).time <=
           std::max(kMostTimeOfFmas * fma_time(problem, device), least);
  }
  if (tensor_core_copies_bytes(problem) > 0 || !refusal_of_tensor_core(problem, device).empty()) {
    return true;
  }
  const double other = copies_bytes(problem) > 0 ? tensor_core_time(problem, device)
                                                 : tensor_core_or_split_k_time(problem, device);
  return best_fma_skinny(problem, device).time <= std::max(kMostFmaSkinnyTime * other, least);
}

Config configure_fma_skinny(const Problem& problem, const Device& device) {
  const SkinnyFactors factors = skinny_factors(problem);
  const FmaSkinnyChoice choice = best_fma_skinny(problem, device);
  const bool packs_large = fits_packs(problem, factors.large);
  const bool packs_skinny = factors.skinny.deep && fits_packs(problem, factors.skinny);
  Config config;
  config.threads = kFmaSkinnyThreads;
  config.tile_rows = factors.large_is_a ? choice.rows : choice.cols;
  config.tile_cols = factors.large_is_a ? choice.cols : choice.rows;
  config.pack_a = factors.large_is_a ? packs_large : packs_skinny;
  config.pack_b = factors.large_is_a ? packs_skinny : packs_large;
  config.blocks = choice.splits * tiles_of(problem, factors, choice.rows);
  config.splits = choice.splits;
  config.stages = fma_skinny_stages(choice.rows, choice.cols);
  config.shared_bytes = fma_skinny_shared_bytes(choice.rows, choice.cols);
  return config;
}

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
