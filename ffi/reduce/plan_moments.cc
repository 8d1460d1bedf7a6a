// The plan of moments_column_kernel: `column` for mean and variance of packs without a mask.

#include <algorithm>

#include "reduce/plan.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace reduce {
namespace {

// The most elements per multiprocessor, and the most columns, of arrays that are left to
// column_kernel.
constexpr std::int64_t kSmallMoments = 8 * 1024;
constexpr std::int64_t kSmallMomentsColumns = 4096;
// Also these, for which column_kernel took less time or as much (docs/tuning.md): few columns, and
// many long ones, of which a block's share is far from contiguous.
constexpr std::int64_t kLeastMomentsColumns = 256;
constexpr std::int64_t kLongMomentsColumns = 65536;
constexpr std::int64_t kManyLongMoments = 512;
constexpr std::int64_t kManyMomentsOfFloats = 65536;
// Threads per block. Registers suffice for two such blocks on a multiprocessor, or for one of
// kMostMomentsThreads.
constexpr int kMomentsThreads = 256;
// The packs of a block: at least 64 contiguous bytes, and 512 or, of few columns, 2048.
constexpr int kLeastMomentsLanes = 4;
constexpr int kMomentsLanes = 32;
constexpr int kMostMomentsLanes = 128;
// The fewest loads of a thread for which a row is split if the blocks keep the GPU busy.
constexpr std::int64_t kManyMomentsLoads = 32;
// The bytes per multiprocessor that a second launch has to save.
constexpr std::int64_t kMomentsSecondLaunch = 192 * 1024;
// Then blocks have 128 contiguous bytes, and every multiprocessor has one block, or two for more
// bytes: they have twice as many loads in flight, but also twice as much to combine.
constexpr int kSplitMomentsLanes = 8;
constexpr std::int64_t kMomentsOfOneBlock = 256 * 1024;
// Of arrays with more bytes, which exceed the cache, blocks with fewer contiguous bytes read a
// third less in the same time (docs/tuning.md).
constexpr std::int64_t kMomentsBeyondCache = 128 * 1024 * 1024;

// Whether most multiprocessors have a block.
bool has_blocks_for_most(std::int64_t blocks, const Device& device) {
  return 4 * blocks >= std::int64_t{3} * device.multiprocessors;
}

}  // namespace

bool is_of_moments_column(const Problem& problem, const Device& device) {
  if (problem.function != Function::kMeanAndVar || problem.masked || !is_aligned(problem) ||
      problem.inner % pack_of(problem) != 0) {
    return false;
  }
  const std::int64_t rows = problem.rows();
  const bool is_small = rows * problem.columns <= kSmallMoments * device.multiprocessors &&
                        problem.columns <= kSmallMomentsColumns;
  const bool are_many = (problem.columns >= kLongMomentsColumns && rows >= kManyLongMoments) ||
                        (bytes_of(problem.dtype) >= 4 && rows >= kManyMomentsOfFloats);
  return problem.columns >= kLeastMomentsColumns && !is_small && !are_many;
}

void configure_moments_column(const Problem& problem, std::int64_t workspace, const Device& device,
                              Config* config) {
  config->column_kernel = ColumnKernel::kMomentsColumn;
  config->pack = static_cast<int>(pack_of(problem));
  config->threads = kMomentsThreads;
  const std::int64_t multiprocessors = device.multiprocessors;
  const std::int64_t packs = problem.outer * (problem.inner / config->pack);
  const auto tiles_of = [&](int lanes) { return divide_up(packs, lanes); };
  // The lanes that make as many tiles, of about the same size.
  const auto even = [&](int lanes) { return static_cast<int>(divide_up(packs, tiles_of(lanes))); };
  const auto up_to = [&](int lanes) {
    return static_cast<int>(std::min<std::int64_t>(packs, lanes));
  };
  const auto loads_of = [&](int lanes) { return problem.columns * lanes / kMomentsThreads; };

  // Fewer lanes, where multiprocessors would be idle; more, where a thread would have few columns.
  int lanes = up_to(kMomentsLanes);
  while (lanes > kLeastMomentsLanes && !has_blocks_for_most(tiles_of(lanes), device) &&
         loads_of(lanes) > kMomentsLoads / 2) {
    lanes = (lanes + 1) / 2;
  }
  while (2 * lanes <= up_to(kMostMomentsLanes) && loads_of(2 * lanes) <= kMomentsLoads &&
         tiles_of(2 * lanes) >= 4 * multiprocessors) {
    lanes *= 2;
  }
  config->lanes = even(lanes);
  const std::int64_t tiles = tiles_of(config->lanes);
  const auto are_resident = [&](int threads, int cluster) {
    Config tried = *config;
    tried.threads = threads;
    tried.cluster = cluster;
    return tiles * cluster <= resident_moments_blocks(problem, tried, device);
  };

  // A cluster, if that leaves its threads as many columns as they load at once, in one wave.
  const auto is_worth_it = [&](int cluster) {
    const bool is_busy = has_blocks_for_most(tiles * cluster / 2, device);
    return loads_of(config->lanes) / cluster >= (is_busy ? kManyMomentsLoads : kMomentsLoads) &&
           are_resident(kMomentsThreads, cluster);
  };
  while (device.runs_hopper_code() && config->cluster < kMostReducingBlocks &&
         is_worth_it(2 * config->cluster)) {
    config->cluster *= 2;
  }
  config->parts = config->cluster;

  // A second launch, if that saves more than it costs.
  const std::int64_t bytes = problem.rows() * row_bytes(problem);
  const auto share_of = [&](std::int64_t blocks) {
    return bytes / std::min(blocks, multiprocessors);
  };
  const std::int64_t blocks = share_of(multiprocessors) > kMomentsOfOneBlock ? 2 : 1;
  const int split_lanes = even(up_to(kSplitMomentsLanes));
  const std::int64_t split_tiles = tiles_of(split_lanes);
  const std::int64_t room = workspace / partial_bytes(problem) / problem.rows();
  const std::int64_t parts =
      std::min({std::max<std::int64_t>(1, blocks * multiprocessors / split_tiles),
                loads_of(split_lanes) / kMomentsLoads, room, kMostParts});
  const bool has_few_bytes = config->lanes < split_lanes && bytes > kMomentsBeyondCache;
  if (parts > 1 &&
      (has_few_bytes ||
       share_of(tiles * config->parts) - share_of(split_tiles * parts) > kMomentsSecondLaunch)) {
    config->lanes = split_lanes;
    config->cluster = 1;
    config->parts = parts;
    config->last_threads = kCombineThreads;
    config->last_lanes = parts > 4 * kWarpLanes ? kCombineThreads : kWarpLanes;
    config->workspace = problem.rows() * parts * partial_bytes(problem);
  } else if (loads_of(config->lanes) / config->cluster >= 2 * kMomentsLoads &&
             are_resident(kMostMomentsThreads, config->cluster)) {
    config->threads = kMostMomentsThreads;
  }
  // No more depths than leave a thread a few columns, of which the origin is the mean.
  const std::int64_t columns = divide_up(problem.columns, config->parts);
  const std::int64_t depths =
      std::min<std::int64_t>(config->threads / config->lanes, divide_up(columns, 4));
  config->threads = static_cast<int>(divide_up(config->lanes * depths, kWarpLanes) * kWarpLanes);
}

}  // namespace reduce
}  // namespace JAX_GPUOPS_NAMESPACE
