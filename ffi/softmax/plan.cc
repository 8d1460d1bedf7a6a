#include <algorithm>
#include <stdexcept>
#include <string>

#include "core/integer.h"
#include "softmax/instances.h"
#include "softmax/softmax.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {
namespace {

// block_shared keeps the row in its own type, with room for one pack of alignment, and a few
// numbers for each warp.
constexpr std::size_t kBlockSharedOverhead = 1024;

// The packs that all threads of a small GPU could load at once: with less, latency is what counts,
// and 32-bit numbers are enough.
constexpr std::int64_t kSmallPacks = 132 * 512;
// What takes longer to read than to launch, by far.
constexpr std::int64_t kManyPacks = std::int64_t{1} << 21;

constexpr std::int64_t kStagedTileBytes = 32 * 1024;

constexpr std::int64_t kMostSlices = 2048;

int pack_elements(const Problem& problem) {
  return 16 / static_cast<int>(info(problem.dtype).bytes);
}

bool is_even(const Problem& problem) {
  return problem.columns % pack_elements(problem) == 0 && !problem.masked && problem.queries == 0;
}

bool is_linear_in_t(Function function) {
  return function == Function::kSoftmaxTangent || function == Function::kLogSoftmaxCotangent;
}

std::string columns_text(const Problem& problem) {
  return "rows of " + std::to_string(problem.columns) + " " +
         std::string(info(problem.dtype).name) + " elements";
}

// ---- Which algorithms can take a problem ----

bool fits_shared(const Problem& problem, const Device& device) {
  const std::size_t capacity =
      (device.shared_bytes_per_block - kBlockSharedOverhead) / info(problem.dtype).bytes;
  return problem.columns <= static_cast<std::int64_t>(capacity);
}

bool fits_warp(const Problem& problem) {
  return most_packs(problem) <= 32 * packs_held(problem.function, 16);
}

bool has_mask(const Problem& problem) { return problem.masked || problem.queries != 0; }

// The packs that a thread of a block holds at most: alone, and of rows that are read again.
int most_held(const Problem& problem) { return packs_held(problem.function, kMostBlockPacks); }
int passing_held(const Problem& problem) { return packs_held(problem.function, kPassingPacks); }

// For block, without reading a row twice.
bool fits_block(const Problem& problem) {
  return most_packs(problem) <= kBlockThreads * most_held(problem);
}

bool fits_cluster(const Problem& problem) {
  return most_packs(problem) <= kMostClusterBlocks * packs_held(problem.function, kSlicePacks);
}

bool fits_staged(const Problem& problem) {
  return problem.inner == 1 && problem.columns <= kStagedColumns && !has_mask(problem);
}

// Why an algorithm cannot take a problem; empty if it can.
std::string refusal(Algorithm algorithm, const Problem& problem, const Device& device) {
  if ((algorithm == Algorithm::kElementwise) != is_elementwise(problem.function)) {
    return algorithm == Algorithm::kElementwise
               ? "computes only the gradients of logsumexp and cross entropy"
               : "has a reduction, which the gradients of logsumexp and cross entropy do not need";
  }
  if (is_ladder(algorithm)) {
    if (algorithm < Algorithm::kBlockShared && problem.function != Function::kSoftmax) {
      return "computes softmax only";
    }
    if (problem.function > Function::kLogSumExp) {
      return "computes softmax, log_softmax and logsumexp only";
    }
    if (problem.masked || problem.queries != 0) return "takes no mask";
    if (problem.scaled) return "takes no scale";
  }
  switch (algorithm) {
    case Algorithm::kBlockShared:
      if (fits_shared(problem, device)) return "";
      return "cannot hold " + columns_text(problem) + " in " +
             std::to_string(device.shared_bytes_per_block) +
             " bytes of shared memory; 'block' takes any length";
    case Algorithm::kWarp:
      if (problem.inner != 1) return "takes rows along the last axis only";
      if (fits_warp(problem)) return "";
      return "cannot hold " + columns_text(problem) + " in registers; 'block' takes any length";
    case Algorithm::kStaged:
      if (fits_staged(problem)) return "";
      return "takes rows of at most " + std::to_string(kStagedColumns) +
             " neighbouring elements without a mask";
    case Algorithm::kCluster:
      if (problem.inner != 1) return "takes rows along the last axis only";
      if (!device.runs_hopper_code()) return "needs a GPU of compute capability 9.0";
      if (fits_cluster(problem)) return "";
      return "cannot hold " + columns_text(problem) + "; 'split' takes any length";
    case Algorithm::kSplit:
      return problem.inner == 1 ? "" : "takes rows along the last axis only";
    case Algorithm::kColumn:
      return problem.inner != 1 ? "" : "takes another axis than the last; 'block' takes any";
    default:
      return "";
  }
}

// ---- How each spreads over threads ----

Shape warp_shape(const Problem& problem) {
  const std::int64_t packs = most_packs(problem);
  Shape shape;
  const auto take = [&](const WarpInstance& each) {
    if (shape.lanes != 0 || each.lanes * packs_held(problem.function, each.packs) < packs) return;
    shape.lanes = each.lanes;
    shape.packs = each.packs;
    shape.rows = each.rows;
  };
  if (problem.rows() * packs <= kSmallPacks) {
    for (const WarpInstance& each : kSmallWarpInstances) take(each);
    shape.small = shape.lanes != 0;
  }
  for (const WarpInstance& each : kWarpInstances) take(each);
  return shape;
}

Shape staged_shape(const Problem& problem) {
  Shape shape;
  for (const StagedInstance& each : kStagedInstances) {
    if (each.lanes * each.per_lane >= problem.columns) {
      shape.lanes = each.lanes;
      shape.packs = each.per_lane;
      break;
    }
  }
  // Whole rounds of the block's groups, and whole packs: both are powers of two.
  const std::int64_t unit = std::max(256 / shape.lanes, pack_elements(problem));
  const std::int64_t row_bytes =
      problem.columns * static_cast<std::int64_t>(info(problem.dtype).bytes);
  shape.rows =
      static_cast<int>(unit * std::max<std::int64_t>(1, kStagedTileBytes / row_bytes / unit));
  return shape;
}

// Whole warps, for `packs` packs of which a thread holds up to `held`.
int threads_for(std::int64_t packs, int held) {
  return static_cast<int>(std::max<std::int64_t>(2, divide_up(packs, 32 * held)) * 32);
}

Shape block_shape(const Problem& problem) {
  const std::int64_t packs = most_packs(problem);
  Shape shape;
  if (problem.rows() * packs <= kSmallPacks && packs <= kSmallBlockThreads * kMostSmallBlockPacks) {
    shape.small = true;
    for (const int each : kSmallBlockPacks) {
      shape.packs = each;
      if (is_even(problem) && packs <= kSmallBlockThreads * each) break;
    }
    shape.threads = threads_for(packs, shape.packs);
    return shape;
  }
  shape.whole = fits_block(problem);
  if (!shape.whole) {
    shape.threads = kBlockThreads;
    return shape;
  }
  const int few = is_even(problem) || has_mask(problem) ? kBlockPacks[0] : kRaggedBlockPacks[0];
  const bool takes_few =
      is_forward(problem.function) && !reduces(problem.function) && packs <= kFewPacksThreads * few;
  shape.packs = takes_few ? few : kMostBlockPacks;
  shape.threads = threads_for(packs, packs_held(problem.function, shape.packs));
  return shape;
}

Shape cluster_shape(const Problem& problem, const Device& device) {
  const std::int64_t packs = most_packs(problem);
  const int held = packs_held(problem.function, kClusterPacks);
  const std::int64_t least = device.multiprocessors / std::max<std::int64_t>(1, problem.rows());
  Shape shape;
  // As few warps as possible, in blocks of which a multiprocessor takes several.
  const auto try_up_to = [&](int most_blocks) {
    int fewest = 0;
    for (int blocks = std::max(2, static_cast<int>(std::min<std::int64_t>(least, most_blocks)));
         blocks <= most_blocks; ++blocks) {
      const int threads = threads_for(divide_up(packs, blocks), held);
      if (threads > kClusterThreads || (fewest != 0 && blocks * threads >= fewest)) continue;
      fewest = blocks * threads;
      shape.cluster = blocks;
      shape.threads = threads;
    }
    return fewest != 0;
  };
  if (try_up_to(kMostClusterBlocks / 2)) return shape;
  // Where registers of 16 blocks hold it, slices take 1 % more time, with 16-bit elements 2 % less.
  const bool prefers_slices =
      is_forward(problem.function) && is_even(problem) && pack_elements(problem) == 8;
  if (!prefers_slices && try_up_to(kMostClusterBlocks)) return shape;
  const std::int64_t fewest = divide_up(packs, packs_held(problem.function, kSlicePacks));
  shape.whole = false;
  shape.threads = kSliceThreads;
  shape.cluster = static_cast<int>(std::clamp<std::int64_t>(least, fewest, kMostClusterBlocks));
  return shape;
}

// The blocks of split that can run together, and the packs of a row that each has room for.
std::int64_t blocks_together(const Device& device) {
  return device.runs_hopper_code() ? device.multiprocessors : 0;
}
std::int64_t held_by_ring(const Problem& problem) {
  const int bytes = static_cast<int>(info(problem.dtype).bytes);
  return std::int64_t{32} * ring_warps(bytes) * packs_held(problem.function, ring_held(bytes));
}

// Whether they hold a row, and one of them does not. Longer rows, of which shared memory holds one
// and not three, take two launches: blocks with one row under way each took 1.2 times as long.
bool can_wait(const Problem& problem, const Device& device) {
  const std::int64_t held = held_by_ring(problem);
  const std::int64_t packs = most_packs(problem);
  return !reduces(problem.function) && packs > held && packs <= blocks_together(device) * held;
}

// Less than 8 MiB of each operand stay in the L2 cache, and to read them twice is faster than that
// blocks wait for each other.
bool waits(const Problem& problem, const Device& device) {
  return can_wait(problem, device) && problem.rows() * most_packs(problem) >= std::int64_t{1} << 19;
}

// For a slice, a quarter of what there is room for is enough.
std::int64_t most_slices(const Problem& problem, const Device& device) {
  return std::min(blocks_together(device),
                  divide_up(most_packs(problem), held_by_ring(problem) / 4));
}

Shape split_shape(const Problem& problem, const Device& device) {
  const std::int64_t packs = most_packs(problem);
  const std::int64_t rows = std::max<std::int64_t>(1, problem.rows());
  Shape shape;
  shape.waits = waits(problem, device);
  if (shape.waits) {
    // As many rows at a time as there is room for, or fewer if they take as many turns, and as many
    // blocks on each.
    const std::int64_t fewest = divide_up(packs, held_by_ring(problem));
    const std::int64_t turns = divide_up(rows, blocks_together(device) / fewest);
    const std::int64_t groups = divide_up(rows, turns);
    shape.threads = ring_threads(static_cast<int>(info(problem.dtype).bytes));
    shape.slices = std::min(blocks_together(device) / groups, most_slices(problem, device));
    return shape;
  }
  shape.threads = kBlockThreads;
  const std::int64_t held = std::int64_t{kBlockThreads} * most_held(problem);
  if (reduces(problem.function) && packs <= kMostSlices * held) {
    // Slices that registers hold, and a block for each multiprocessor at least.
    const std::int64_t wanted = divide_up(std::int64_t{2} * device.multiprocessors, rows);
    const std::int64_t fewest = divide_up(packs, held);
    shape.slices = std::clamp(wanted, fewest, std::max(fewest, divide_up(packs, held / 4)));
    shape.slices = std::min(shape.slices, kMostSlices);
    return shape;
  }
  shape.whole = false;
  const std::int64_t least = kBlockThreads * passing_held(problem);
  const std::int64_t wanted = divide_up(std::int64_t{16} * device.multiprocessors, rows);
  shape.slices = std::clamp<std::int64_t>(wanted, 1, divide_up(packs, least));
  shape.slices = std::min(shape.slices, kMostSlices);
  return shape;
}

Shape column_shape(const Problem& problem, const Device& device) {
  const std::int64_t columns = problem.columns;
  const auto held = [&](int index) { return packs_held(problem.function, kColumnHeld[index]); };
  // As many threads as possible, unless the axis is so long that little would lie side by side.
  const int index = columns <= held(0) ? 0 : columns <= 4 * held(1) ? 1 : 2;
  const std::int64_t groups = divide_up(columns, held(index));
  Shape shape;
  shape.packs = kColumnHeld[index];
  shape.threads = index < 2 ? 128 : 256;
  while (shape.threads < kColumnThreads && groups * kColumnLanes > shape.threads) {
    shape.threads *= 2;
  }
  const int bytes = static_cast<int>(info(problem.dtype).bytes);
  const int pack = problem.masked ? 1 : column_pack(bytes);
  const std::int64_t most_lanes = power_of_two_from(divide_up(problem.inner, pack), kColumnThreads);
  // Where a block would hold less than 256 bytes side by side, clusters hold strips of the array,
  // if it is as wide as half a strip.
  const int warp_steps = packs_held(problem.function, kStripSteps);
  std::int64_t blocks = divide_up(columns, kStripWarps * warp_steps);
  if (device.runs_hopper_code() && groups * kColumnLanes > kColumnThreads && !problem.masked &&
      problem.inner % pack_elements(problem) == 0 && 2 * problem.inner * bytes >= kStripBytes &&
      blocks <= kMostClusterBlocks && problem.outer <= kMostBlocksBeyondX) {
    if (blocks > kMostUnevenStripBlocks) blocks = kMostClusterBlocks;
    shape.cluster = static_cast<int>(blocks);
    shape.steps = static_cast<int>(divide_up(columns, blocks * kStripWarps));
  }
  shape.whole = groups * kFewestColumnLanes <= shape.threads;
  if (!shape.whole) {
    shape.lanes = static_cast<int>(
        std::clamp<std::int64_t>(most_lanes, kFewestColumnLanes, 2 * kColumnLanes));
    return shape;
  }
  shape.lanes = kFewestColumnLanes;
  while (groups * shape.lanes * 2 <= shape.threads && shape.lanes < most_lanes) shape.lanes *= 2;
  return shape;
}

Shape elementwise_shape(const Problem& problem) {
  Shape shape;
  // Where neighbours in memory belong to neighbouring rows, neighbouring threads take these.
  const bool side_by_side = problem.inner >= 32;
  shape.lanes = side_by_side ? 1 : power_of_two_from(divide_up(most_packs(problem), 4), 64);
  return shape;
}

Shape shape_of(Algorithm algorithm, const Problem& problem, const Device& device) {
  switch (algorithm) {
    case Algorithm::kWarp:
      return warp_shape(problem);
    case Algorithm::kStaged:
      return staged_shape(problem);
    case Algorithm::kBlock:
      return block_shape(problem);
    case Algorithm::kCluster:
      return cluster_shape(problem, device);
    case Algorithm::kSplit:
      return split_shape(problem, device);
    case Algorithm::kColumn:
      return column_shape(problem, device);
    case Algorithm::kElementwise:
      return elementwise_shape(problem);
    default:
      return {};
  }
}

// ---- Which is the fastest ----

// Of rows that a warp could take, as measured on the H200.
bool block_is_faster(const Problem& problem) {
  const std::int64_t packs = most_packs(problem);
  const std::int64_t all = problem.rows() * packs;
  if (all <= kSmallPacks) return packs > 128;
  if (has_mask(problem)) return is_linear_in_t(problem.function) && packs >= 256;
  if (reduces(problem.function)) return false;
  return is_even(problem) && packs >= 256 && all > kManyPacks;
}

Plan choose(const Problem& problem, const Device& device) {
  if (is_elementwise(problem.function)) {
    return {Algorithm::kElementwise, "no element waits for another", {}};
  }
  const std::string rows = columns_text(problem);
  if (problem.inner != 1) {
    return {Algorithm::kColumn, "the axis is not the last", {}};
  }
  if (!is_even(problem) && fits_staged(problem) && problem.columns <= 256) {
    return {Algorithm::kStaged, rows + " share packs of 16 bytes with their neighbours", {}};
  }
  if (fits_warp(problem) && !block_is_faster(problem)) {
    return {Algorithm::kWarp, rows + " fit the registers of a warp", {}};
  }
  if (fits_block(problem)) {
    return {Algorithm::kBlock, rows + " fit the registers of a block", {}};
  }
  if (reduces(problem.function)) {
    return {Algorithm::kSplit, rows + " are cut into slices that fit the registers of a block", {}};
  }
  if (device.runs_hopper_code() && fits_cluster(problem)) {
    return {Algorithm::kCluster, rows + " fit a cluster of blocks", {}};
  }
  if (waits(problem, device)) {
    return {Algorithm::kSplit, rows + " fit the shared memory of blocks that run together", {}};
  }
  if (problem.rows() < 16 * device.multiprocessors) {
    return {Algorithm::kSplit, "few " + rows + ", too long for a cluster", {}};
  }
  return {Algorithm::kBlock, rows + " fit no registers: blocks read them twice", {}};
}

}  // namespace

std::int64_t most_packs(const Problem& problem) {
  const int elements = pack_elements(problem);
  // Uneven rows may begin and end inside a pack.
  const std::int64_t phase =
      problem.inner == 1 && problem.columns % elements != 0 ? elements - 1 : 0;
  return divide_up(problem.columns + phase, elements);
}

int packs_held(Function function, int packs) {
  return is_linear_in_t(function) ? std::max(1, packs / 2) : packs;
}

Plan plan(const Problem& problem, std::string_view algorithm, const Device& device) {
  Plan result;
  if (algorithm.empty()) {
    result = choose(problem, device);
  } else {
    result.algorithm = algorithm_from_name<Algorithm>(kAlgorithms, algorithm);
    result.reason = "named by the caller";
    const std::string why = refusal(result.algorithm, problem, device);
    if (!why.empty()) {
      throw std::invalid_argument("algorithm '" + std::string(algorithm) + "' " + why);
    }
  }
  result.shape = shape_of(result.algorithm, problem, device);
  if (result.shape.steps != 0) result.reason += "; blocks hold it in strips";
  return result;
}

// Only split has any: a state of two numbers for each slice of a row, or where blocks wait for each
// other, what they tell each other states by. Neither the number of rows nor the GPU is known here;
// a row has the most slices where it is the only one, and no GPU that runs_hopper_code() has more
// multiprocessors than the nominal one. A length that is not known, as in exported programs, comes
// as one that is too long to wait: what it needs must be enough for rows that do.
static_assert(board_bytes(132, 8) <= 8 * kMostSlices && board_bytes(132, 16) <= 16 * kMostSlices);
std::int64_t workspace_bytes(const Problem& problem, std::string_view algorithm) {
  const bool is_named = algorithm == kAlgorithms[static_cast<int>(Algorithm::kSplit)].name;
  if (is_elementwise(problem.function) || problem.inner != 1) return 0;
  if (!is_named && (!algorithm.empty() || fits_block(problem))) return 0;
  Problem one_row = problem;
  one_row.outer = 1;
  Device without_clusters = nominal_device();
  without_clusters.compute_capability = 80;
  const std::int64_t state = problem.dtype == DType::kFloat64 ? 16 : 8;
  const std::int64_t bytes = split_shape(one_row, without_clusters).slices * state;
  const bool may_wait = can_wait(problem, nominal_device()) && (is_named || !fits_cluster(problem));
  if (!may_wait) return bytes;
  return std::max(bytes, board_bytes(most_slices(problem, nominal_device()), state));
}

}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
