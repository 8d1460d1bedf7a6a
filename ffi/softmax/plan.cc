#include <algorithm>
#include <iterator>
#include <limits>
#include <stdexcept>
#include <string>
#include <string_view>

#include "core/dispatch.h"
#include "core/integer.h"
#include "softmax/instances.h"
#include "softmax/softmax.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {
namespace {

// block_shared keeps the row in its own dtype; beside it there is room for one pack of alignment
// padding, and a few numbers per warp.
constexpr std::size_t kBlockSharedOverhead = 1024;

// About as many packs as the threads of a GPU can load at once. Smaller problems are bound by
// latency, and 32-bit indices are enough for them.
constexpr std::int64_t kSmallPacks = 132 * 512;
// Problems of more packs take far longer to read than to launch.
constexpr std::int64_t kManyPacks = std::int64_t{1} << 21;

constexpr std::int64_t kStagedTileBytes = 32 * 1024;

constexpr std::int64_t kMostSlices = 2048;

constexpr std::int64_t kMostBlocks = std::numeric_limits<std::int32_t>::max();

constexpr int kWarpThreads = 32;

// ---- The problem ----

int element_bytes(const Problem& problem) { return static_cast<int>(info(problem.dtype).bytes); }
int pack_elements(const Problem& problem) { return 16 / element_bytes(problem); }

bool has_mask(const Problem& problem) { return problem.masked || problem.queries != 0; }

// Whether the addresses of the arrays allow loads of packs.
bool is_aligned(const Problem& problem) { return problem.alignment >= 16; }

bool has_whole_packs(const Problem& problem) {
  return problem.columns % pack_elements(problem) == 0;
}

bool is_even(const Problem& problem) { return has_whole_packs(problem) && !has_mask(problem); }

RowLayout layout_of(const Problem& problem) {
  if (problem.inner != 1 || !is_aligned(problem)) return RowLayout::kStrided;
  if (has_mask(problem)) {
    return has_whole_packs(problem) ? RowLayout::kMasked : RowLayout::kMaskedUnaligned;
  }
  return has_whole_packs(problem) ? RowLayout::kAligned : RowLayout::kUnaligned;
}

// The layout for kernels that index aligned rows with 32-bit numbers.
RowLayout small_layout_of(const Problem& problem) {
  const RowLayout layout = layout_of(problem);
  return layout == RowLayout::kAligned ? RowLayout::kSmall : layout;
}

bool is_plain_softmax(const Problem& problem) {
  return problem.function == Function::kSoftmax && !problem.scaled;
}

int operands(const Problem& problem) { return is_linear_in_t(problem.function) ? 2 : 1; }

// How many packs of a row a thread with room for `packs` holds of each operand.
int packs_held(const Problem& problem, int packs) { return std::max(1, packs / operands(problem)); }

// The bytes of a row's state: one number for functions that are linear in t, else two.
std::int64_t state_bytes(const Problem& problem) {
  const std::int64_t number = problem.dtype == DType::kFloat64 ? 8 : 4;
  return is_linear_in_t(problem.function) ? number : 2 * number;
}

// The most packs of 16 bytes that cover a row: unaligned rows may begin and end inside a pack.
std::int64_t most_packs(const Problem& problem) {
  const int elements = pack_elements(problem);
  const std::int64_t phase = problem.inner == 1 && !has_whole_packs(problem) ? elements - 1 : 0;
  return divide_up(problem.columns + phase, elements);
}

std::string columns_text(const Problem& problem) {
  return "rows of " + std::to_string(problem.columns) + " " +
         std::string(info(problem.dtype).name) + " elements";
}

std::int64_t expected_rows(const Problem& problem) {
  return JAX_GPUOPS_NAMESPACE::expected_rows(problem.batch_invariant, problem.rows(),
                                             most_packs(problem) * 16);
}

// ---- Which algorithms can take a problem ----

bool is_little_work(const Problem& problem) {
  return expected_rows(problem) * most_packs(problem) <= kSmallPacks;
}

bool fits_shared(const Problem& problem, const Device& device) {
  const std::size_t capacity =
      (device.shared_bytes_per_block - kBlockSharedOverhead) / info(problem.dtype).bytes;
  return problem.columns <= static_cast<std::int64_t>(capacity);
}

bool fits_warp(const Problem& problem) {
  return most_packs(problem) <= kWarpThreads * packs_held(problem, 16);
}

bool fits_small_block(const Problem& problem) {
  return most_packs(problem) <= kSmallBlockThreads * kMostSmallBlockPacks;
}

// The most packs of a row that a thread of a block holds: of rows read once, and of rows read
// twice.
int most_held(const Problem& problem) { return packs_held(problem, kMostBlockPacks); }
int passing_held(const Problem& problem) { return packs_held(problem, kPassingPacks); }

bool fits_block(const Problem& problem) {
  return most_packs(problem) <= kBlockThreads * most_held(problem);
}

bool fits_cluster(const Problem& problem) {
  const int held = packs_held(problem, kClusterPacks);
  return divide_up(most_packs(problem), kMostClusterBlocks) <= kClusterThreads * held;
}

bool fits_cluster_shared(const Problem& problem) {
  return most_packs(problem) <= kMostClusterBlocks * packs_held(problem, kSlicePacks);
}

bool fits_staged(const Problem& problem) {
  return problem.inner == 1 && problem.columns <= kStagedColumns && !has_mask(problem);
}

// The blocks of split_pipelined that run concurrently, and the packs of a row that each has room
// for.
std::int64_t blocks_together(const Device& device) {
  return device.runs_hopper_code() ? device.multiprocessors : 0;
}
std::int64_t held_by_ring(const Problem& problem) {
  const int bytes = element_bytes(problem);
  return std::int64_t{kWarpThreads} * ring_warps(bytes) * packs_held(problem, ring_held(bytes));
}

// Whether all these blocks can hold a row, and a single one cannot. Longer rows, of which the
// shared memory of the GPU holds one but not three, take the two launches of split: blocks with
// only one row in flight are slower (docs/tuning.md).
bool fits_ring(const Problem& problem, const Device& device) {
  const std::int64_t held = held_by_ring(problem);
  const std::int64_t packs = most_packs(problem);
  return !reduces(problem.function) && packs > held && packs <= blocks_together(device) * held;
}

// How `column` divides the axis among threads.
struct ColumnSizes {
  int held;             // elements of the axis per thread
  int threads;          // of a block
  std::int64_t groups;  // of threads that hold the axis

  bool fits_block() const { return groups * kFewestColumnLanes <= threads; }
};

// Longer axes take more elements per thread, and more threads so that kColumnLanes lie side by
// side.
ColumnSizes column_sizes(const Problem& problem, bool holds_axis) {
  constexpr int kLongest = 2;
  static_assert(std::size(kColumnHeld) == kLongest + 1);
  const auto held = [&](int index) { return packs_held(problem, kColumnHeld[index]); };
  int index = problem.columns <= held(0) ? 0 : problem.columns <= 4 * held(1) ? 1 : kLongest;
  if (!holds_axis) index = kLongest;
  ColumnSizes sizes{};
  sizes.held = kColumnHeld[index];
  sizes.groups = divide_up(problem.columns, held(index));
  sizes.threads = index < kLongest ? 128 : 256;
  while (sizes.threads < kColumnThreads && sizes.groups * kColumnLanes > sizes.threads) {
    sizes.threads *= 2;
  }
  return sizes;
}

std::int64_t strip_blocks(const Problem& problem) {
  const std::int64_t blocks =
      divide_up(problem.columns, kStripWarps * packs_held(problem, kStripSteps));
  return blocks > kMostUnevenStripBlocks ? kMostClusterBlocks : blocks;
}

std::int64_t strip_steps(const Problem& problem) {
  return divide_up(problem.columns, strip_blocks(problem) * kStripWarps);
}

// Why the rows cannot be read in packs along the last axis; empty if they can.
std::string refusal_of_rows(const Problem& problem) {
  if (problem.inner != 1) return "supports only the last axis; 'strided' supports any axis";
  if (!is_aligned(problem)) {
    return "requires arrays aligned to 16 bytes; 'strided' supports any alignment";
  }
  return "";
}

std::string refusal_of_column(const Problem& problem) {
  return problem.inner != 1 ? "" : "does not support the last axis; 'strided' supports any axis";
}

std::string refusal_of_strip(const Problem& problem, const Device& device) {
  if (std::string why = refusal_of_column(problem); !why.empty()) return why;
  if (!device.runs_hopper_code()) return "requires a GPU of compute capability 9.0";
  if (!is_aligned(problem)) return "requires arrays aligned to 16 bytes";
  if (problem.masked) return "does not support a mask; 'column' does";
  if (problem.inner % pack_elements(problem) != 0) {
    return "requires dimensions after the axis of a multiple of 16 bytes; 'column' supports any "
           "size";
  }
  if (problem.outer > kMostBlocksBeyondX) {
    return "supports dimensions before the axis of at most " + std::to_string(kMostBlocksBeyondX) +
           " elements; 'column' supports any size";
  }
  if (divide_up(problem.columns, kStripWarps * packs_held(problem, kStripSteps)) >
      kMostClusterBlocks) {
    return "cannot hold " + columns_text(problem) + "; 'column_two_pass' supports any length";
  }
  if (strip_steps(problem) <= strip_held(is_linear_in_t(problem.function))) {
    return "requires a longer axis; 'column' supports short ones";
  }
  return "";
}

Config staged_config(const Problem& problem);

// Why an algorithm cannot take a problem; empty if it can.
std::string refusal(Algorithm algorithm, const Problem& problem, const Device& device) {
  if ((algorithm == Algorithm::kElementwise) != is_elementwise(problem.function)) {
    return algorithm == Algorithm::kElementwise
               ? "computes only the gradients of logsumexp and cross entropy"
               : "does not compute the gradients of logsumexp and cross entropy; 'elementwise' "
                 "does";
  }
  if (is_ladder(algorithm)) {
    if (algorithm < Algorithm::kBlockShared && problem.function != Function::kSoftmax) {
      return "computes softmax only";
    }
    if (problem.function > Function::kLogSumExp) {
      return "computes softmax, log_softmax and logsumexp only";
    }
    if (has_mask(problem)) return "does not support a mask or causal";
    if (problem.scaled) return "does not support a scale other than 1";
  }
  const auto packed_rows_that = [&](bool fit, const std::string& where, const char* instead) {
    std::string why = refusal_of_rows(problem);
    if (!why.empty() || fit) return why;
    return "cannot hold " + columns_text(problem) + where + "; '" + instead +
           "' supports any length";
  };
  const auto on_hopper = [&](std::string why) {
    return why.empty() && !device.runs_hopper_code() ? "requires a GPU of compute capability 9.0"
                                                     : why;
  };
  switch (algorithm) {
    case Algorithm::kBlockShared:
      if (fits_shared(problem, device)) return "";
      return "cannot hold " + columns_text(problem) + " in " +
             std::to_string(device.shared_bytes_per_block) +
             " bytes of shared memory; 'block_uncached' supports any length";
    case Algorithm::kWarp:
      return packed_rows_that(fits_warp(problem), " in registers", "block_two_pass");
    case Algorithm::kStaged:
      if (fits_staged(problem)) {
        if (staged_config(problem).shared_bytes + kStagedOwnBytes <=
            static_cast<std::int64_t>(device.shared_bytes_per_block)) {
          return "";
        }
        return "cannot hold " + columns_text(problem) + " in " +
               std::to_string(device.shared_bytes_per_block) +
               " bytes of shared memory; 'strided' supports any length";
      }
      return "supports only rows of at most " + std::to_string(kStagedColumns) +
             " elements along the last axis, without a mask";
    case Algorithm::kSmallBlock:
      if (problem.rows() * problem.columns > std::numeric_limits<std::int32_t>::max()) {
        return "supports only arrays of fewer than 2^31 elements; 'block' supports any number";
      }
      return packed_rows_that(fits_small_block(problem), " in registers", "block_two_pass");
    case Algorithm::kBlock:
      return packed_rows_that(fits_block(problem), " in registers", "block_two_pass");
    case Algorithm::kBlockTwoPass:
    case Algorithm::kSplit:
      return refusal_of_rows(problem);
    case Algorithm::kCluster:
      return on_hopper(packed_rows_that(fits_cluster(problem), " in registers", "split"));
    case Algorithm::kClusterShared:
      return on_hopper(packed_rows_that(fits_cluster_shared(problem), "", "split"));
    case Algorithm::kSplitPipelined: {
      const std::string why = on_hopper(refusal_of_rows(problem));
      if (!why.empty() || fits_ring(problem, device)) return why;
      if (reduces(problem.function)) {
        return "does not compute logsumexp and cross entropy; 'split' does";
      }
      return "supports only rows that fit in the shared memory of the GPU but not in that of one "
             "block, got " +
             columns_text(problem) + "; 'split' supports any length";
    }
    case Algorithm::kColumn:
      if (std::string why = refusal_of_column(problem); !why.empty()) return why;
      if (column_sizes(problem, true).fits_block()) return "";
      return "cannot hold " + columns_text(problem) + "; 'column_two_pass' supports any length";
    case Algorithm::kColumnTwoPass:
      return refusal_of_column(problem);
    case Algorithm::kStrip:
      return refusal_of_strip(problem, device);
    default:
      return "";
  }
}

// ---- How each is launched ----

// The blocks of a grid in which each block, or cluster of blocks, takes one row at a time.
std::int64_t blocks_on_rows(const Problem& problem, int cluster = 1) {
  return std::min(problem.rows(), kMostBlocks / cluster) * cluster;
}

std::int64_t at_most_blocks(std::int64_t blocks) { return std::min(blocks, kMostBlocks); }

// The threads, in whole warps, that hold `packs` packs with up to `held` per thread.
int threads_for(std::int64_t packs, int held) {
  const std::int64_t warps = divide_up(packs, std::int64_t{kWarpThreads} * held);
  return static_cast<int>(std::max<std::int64_t>(2, warps) * kWarpThreads);
}

// The most packs in each of `parts` parts, rounded up to whole lines of 128 bytes.
std::int64_t packs_of_part(std::int64_t packs, std::int64_t parts) {
  return divide_up(divide_up(packs, parts), kPacksOfLine) * kPacksOfLine;
}

int piece_of_warp(std::int64_t packs, int threads) {
  return static_cast<int>(packs_of_part(packs, threads / kWarpThreads));
}

Config ladder_config(Algorithm algorithm, const Problem& problem) {
  Config config;
  const auto of_warps = [&](int rows, int pack) {
    config.threads = kWarpThreads;
    config.rows = rows;
    config.pack = pack;
    config.blocks = at_most_blocks(divide_up(problem.rows(), rows));
    return config;
  };
  switch (algorithm) {
    case Algorithm::kBaseline:
      config.threads = kBaselineThreads;
      config.blocks = 1;
      return config;
    case Algorithm::kOneWarpOneRow:
      return of_warps(1, 1);
    case Algorithm::kOneWarpTwoRows:
      return of_warps(2, 1);
    case Algorithm::kOneWarpFourRows:
      return of_warps(4, 1);
    case Algorithm::kOneWarpOneRowFloat4:
      return of_warps(1, 4);
    case Algorithm::kOneWarpTwoRowsFloat4:
      return of_warps(2, 4);
    case Algorithm::kOneWarpFourRowsFloat4:
      return of_warps(4, 4);
    case Algorithm::kBlockUncached:
      config.threads = kMaxBlockThreads;
      break;
    default:
      break;
  }
  config.blocks = blocks_on_rows(problem);
  return config;
}

Config warp_config(const Problem& problem) {
  Config config;
  config.layout = warp_layout(layout_of(problem), operands(problem), info(problem.dtype).bytes,
                              problem.columns);
  config.threads = kWarpBlockThreads;
  const bool takes_packs = config.layout != RowLayout::kElements;
  const std::int64_t length = takes_packs ? most_packs(problem) : problem.columns;
  const bool takes_warps = config.layout == RowLayout::kMaskedUnaligned && is_little_work(problem);
  const auto take_from = [&](const auto& table) {
    for (const WarpInstance& each : table) {
      if (takes_warps && each.lanes != kWarpThreads) continue;
      const int held = takes_packs ? packs_held(problem, each.packs) : each.packs;
      if (config.lanes != 0 || each.lanes * held < length) continue;
      config.lanes = each.lanes;
      config.packs = each.packs;
      config.rows = each.rows;
    }
  };
  if (!takes_packs) {
    take_from(kElementsWarpInstances);
  } else if (config.layout == RowLayout::kMasked) {
    dispatch_value<2, 4, 8>(
        masked_packs(operands(problem), info(problem.dtype).bytes),
        [&](auto packs) { take_from(kMaskedWarpInstances<decltype(packs)::value>); });
  } else if (config.layout == RowLayout::kMaskedUnaligned) {
    dispatch_value<1, 2>(operands(problem), [&](auto count) {
      take_from(kMaskedUnalignedWarpInstances<decltype(count)::value>);
    });
  } else if (config.layout == RowLayout::kUnaligned) {
    take_from(kUnalignedWarpInstances);
  } else {
    if (is_little_work(problem)) {
      take_from(kSmallWarpInstances);
      if (config.lanes != 0) {
        config.layout = RowLayout::kSmall;
        if (problem.function == Function::kSoftmax) config.variant = Variant::kSoftmax;
      }
    }
    take_from(kWarpInstances);
  }
  const std::int64_t rows = kWarpBlockThreads / config.lanes * config.rows;
  config.blocks = at_most_blocks(divide_up(problem.rows(), rows));
  return config;
}

Config staged_config(const Problem& problem) {
  Config config;
  config.layout = layout_of(problem);
  config.threads = kStagedThreads;
  for (const StagedInstance& each : kStagedInstances) {
    if (each.lanes * each.per_lane >= problem.columns) {
      config.lanes = each.lanes;
      config.packs = each.per_lane;
      break;
    }
  }
  // A multiple of both the groups of a block and the elements of a pack, which are powers of two.
  const std::int64_t unit = std::max(kStagedThreads / config.lanes, pack_elements(problem));
  const std::int64_t row_bytes = problem.columns * element_bytes(problem);
  config.rows = unit * std::max<std::int64_t>(1, kStagedTileBytes / row_bytes / unit);
  config.blocks = at_most_blocks(divide_up(problem.rows(), config.rows));
  config.shared_bytes = config.rows * row_bytes * operands(problem);
  return config;
}

Config small_block_config(const Problem& problem) {
  const std::int64_t packs = most_packs(problem);
  Config config;
  config.layout = small_layout_of(problem);
  config.blocks = blocks_on_rows(problem);
  int held = kMostSmallBlockPacks;
  if (config.layout == RowLayout::kSmall) {
    for (const int each : kSmallBlockPacks) {
      held = each;
      if (packs <= kSmallBlockThreads * each) break;
    }
    if (problem.function == Function::kSoftmax) config.variant = Variant::kSoftmax;
  }
  config.packs = held * operands(problem);
  config.threads = threads_for(packs, held);
  return config;
}

Config block_config(const Problem& problem) {
  const std::int64_t packs = most_packs(problem);
  Config config;
  config.layout = layout_of(problem);
  config.blocks = blocks_on_rows(problem);
  const int few = config.layout == RowLayout::kUnaligned ? kUnalignedBlockPacks[0] : kBlockPacks[0];
  const bool takes_few =
      is_forward(problem.function) && !reduces(problem.function) && packs <= kFewPacksThreads * few;
  config.packs = takes_few ? few : kMostBlockPacks;
  config.threads = threads_for(packs, packs_held(problem, config.packs));
  config.piece = piece_of_warp(packs, config.threads);
  return config;
}

Config block_two_pass_config(const Problem& problem, RowLayout layout) {
  Config config;
  config.layout = layout;
  config.blocks = blocks_on_rows(problem);
  config.threads = kBlockThreads;
  config.packs = layout == RowLayout::kStrided ? kStridedPacks : kPassingPacks;
  return config;
}

// How many blocks per row fill the GPU, if there are few rows.
std::int64_t blocks_to_fill(const Problem& problem, const Device& device) {
  return device.multiprocessors / expected_rows(problem);
}

// As few warps as possible, in blocks of which several fit on a multiprocessor. `blocks` is 0 if
// the registers of `most_blocks` blocks cannot hold a row.
Config cluster_config(const Problem& problem, const Device& device, int most_blocks) {
  const std::int64_t packs = most_packs(problem);
  const int held = packs_held(problem, kClusterPacks);
  const std::int64_t least = blocks_to_fill(problem, device);
  Config config;
  config.layout = layout_of(problem);
  config.packs = kClusterPacks;
  int fewest = 0;
  for (int blocks = std::max(2, static_cast<int>(std::min<std::int64_t>(least, most_blocks)));
       blocks <= most_blocks; ++blocks) {
    const int threads = threads_for(divide_up(packs, blocks), held);
    if (threads > kClusterThreads || (fewest != 0 && blocks * threads >= fewest)) continue;
    fewest = blocks * threads;
    config.cluster = blocks;
    config.threads = threads;
  }
  if (fewest == 0) return config;
  config.blocks = blocks_on_rows(problem, config.cluster);
  config.slice = packs_of_part(packs, config.cluster);
  config.piece = piece_of_warp(config.slice, config.threads);
  if (is_plain_softmax(problem) && has_plain_cluster(problem.dtype, config.layout)) {
    config.variant = Variant::kPlainSoftmax;
  }
  return config;
}

Config cluster_config(const Problem& problem, const Device& device) {
  const Config config = cluster_config(problem, device, kMostClusterBlocks / 2);
  return config.blocks != 0 ? config : cluster_config(problem, device, kMostClusterBlocks);
}

// Registers are faster than shared memory if those of a cluster hold a row, except where 16-bit
// elements need more than 8 blocks (docs/tuning.md).
bool cluster_is_faster(const Problem& problem, const Device& device) {
  if (cluster_config(problem, device, kMostClusterBlocks / 2).blocks != 0) return true;
  return fits_cluster(problem) &&
         !(is_forward(problem.function) && is_even(problem) && pack_elements(problem) == 8);
}

// For kernels that keep rows in shared memory.
Variant variant_in_shared(const Problem& problem) {
  return is_plain_softmax(problem) && has_plain_in_shared(problem.dtype, layout_of(problem))
             ? Variant::kPlainSoftmax
             : Variant::kGeneral;
}

Config cluster_shared_config(const Problem& problem, const Device& device) {
  const std::int64_t packs = most_packs(problem);
  const std::int64_t fewest =
      std::max<std::int64_t>(2, divide_up(packs, packs_held(problem, kSlicePacks)));
  Config config;
  config.layout = layout_of(problem);
  config.variant = variant_in_shared(problem);
  config.threads = kSliceThreads;
  config.packs = slice_held(element_bytes(problem));
  config.cluster = static_cast<int>(
      std::clamp<std::int64_t>(blocks_to_fill(problem, device), fewest, kMostClusterBlocks));
  config.blocks = blocks_on_rows(problem, config.cluster);
  config.slice = packs_of_part(packs, config.cluster);
  config.shared_bytes = std::int64_t{16} * kSlicePacks;
  return config;
}

// Less than 8 MiB of each operand stay in the L2 cache of an H200, and reading them twice is faster
// than letting blocks wait for each other. The limit scales with the number of multiprocessors.
bool ring_is_faster(const Problem& problem, const Device& device) {
  const std::int64_t kept =
      (std::int64_t{1} << 19) * device.multiprocessors / nominal_device().multiprocessors;
  return fits_ring(problem, device) && expected_rows(problem) * most_packs(problem) >= kept;
}

// A slice need not be smaller than a quarter of what a block has room for.
std::int64_t most_ring_slices(const Problem& problem, const Device& device) {
  return std::min(blocks_together(device),
                  divide_up(most_packs(problem), held_by_ring(problem) / 4));
}

// As many rows at a time as there is room for, or fewer if that takes no more turns, with as many
// blocks per row as possible.
Config split_pipelined_config(const Problem& problem, const Device& device) {
  const int bytes = element_bytes(problem);
  const std::int64_t packs = most_packs(problem);
  const std::int64_t rows = expected_rows(problem);
  const std::int64_t fewest = divide_up(packs, held_by_ring(problem));
  const std::int64_t turns = divide_up(rows, blocks_together(device) / fewest);
  const std::int64_t wanted_groups = divide_up(rows, turns);
  Config config;
  config.layout = layout_of(problem);
  config.variant = variant_in_shared(problem);
  config.threads = ring_threads(bytes);
  config.packs = ring_held(bytes);
  config.slices =
      std::min(blocks_together(device) / wanted_groups, most_ring_slices(problem, device));
  config.slice = packs_of_part(packs, config.slices * ring_warps(bytes));
  const std::int64_t groups =
      std::min(std::max<std::int64_t>(1, problem.rows()), blocks_together(device) / config.slices);
  config.blocks = groups * config.slices;
  config.workspace_bytes = groups * mailbox_bytes(config.slices, state_bytes(problem));
  return config;
}

// Whether blocks hold slices in registers: for functions that need only the state of a row.
bool holds_slices(const Problem& problem) {
  return reduces(problem.function) &&
         most_packs(problem) <= kMostSlices * kBlockThreads * most_held(problem);
}

std::int64_t split_slices(const Problem& problem, const Device& device) {
  const std::int64_t packs = most_packs(problem);
  const std::int64_t rows = expected_rows(problem);
  std::int64_t slices = 0;
  if (holds_slices(problem)) {
    // Two blocks per multiprocessor, with slices of at least a quarter of what a block holds.
    const std::int64_t held = std::int64_t{kBlockThreads} * most_held(problem);
    const std::int64_t wanted = divide_up(std::int64_t{2} * device.multiprocessors, rows);
    const std::int64_t fewest = divide_up(packs, held);
    slices = std::clamp(wanted, fewest, std::max(fewest, divide_up(packs, held / 4)));
  } else {
    const std::int64_t least = kBlockThreads * passing_held(problem);
    const std::int64_t wanted = divide_up(std::int64_t{16} * device.multiprocessors, rows);
    slices =
        std::clamp<std::int64_t>(wanted, 1, std::max<std::int64_t>(1, divide_up(packs, least)));
  }
  return std::min(slices, kMostSlices);
}

Config split_config(const Problem& problem, std::string_view algorithm, const Device& device) {
  const std::int64_t rows = problem.rows();
  // On a GPU with more multiprocessors than the nominal one, the workspace limits the slices.
  const std::int64_t room = workspace_bytes(problem, algorithm) / state_bytes(problem);
  Config config;
  config.layout = layout_of(problem);
  config.threads = kBlockThreads;
  config.slices = std::min(split_slices(problem, device), room);
  config.slice = packs_of_part(most_packs(problem), config.slices);
  config.workspace_bytes = rows * config.slices * state_bytes(problem);
  if (holds_slices(problem)) {
    config.packs = kMostBlockPacks;
    config.piece = piece_of_warp(config.slice, config.threads);
    config.blocks = at_most_blocks(rows);
    config.blocks_along_y = config.slices;
  } else {
    config.packs = kPassingPacks;
    config.blocks = at_most_blocks(rows * config.slices);
  }
  if (reduces(problem.function)) {  // a warp for each row
    config.finish_threads = kFinishThreads;
    config.finish_blocks = at_most_blocks(divide_up(rows, kFinishThreads / kWarpThreads));
  } else {
    config.finish_threads = config.threads;
    config.finish_blocks = at_most_blocks(rows * config.slices);
  }
  return config;
}

Config column_config(const Problem& problem, bool holds_axis) {
  const ColumnSizes sizes = column_sizes(problem, holds_axis);
  const int pack = column_pack(element_bytes(problem));
  const std::int64_t most_lanes =
      power_of_two_from(divide_up(problem.inner, problem.masked ? 1 : pack), kColumnThreads);
  Config config;
  config.layout = layout_of(problem);
  config.threads = sizes.threads;
  config.packs = sizes.held;
  config.pack = problem.inner % pack == 0 && !problem.masked && is_aligned(problem) ? pack : 1;
  if (holds_axis) {
    config.lanes = kFewestColumnLanes;
    while (sizes.groups * config.lanes * 2 <= config.threads && config.lanes < most_lanes) {
      config.lanes *= 2;
    }
  } else {
    config.lanes = static_cast<int>(
        std::clamp<std::int64_t>(most_lanes, kFewestColumnLanes, 2 * kColumnLanes));
  }
  const int groups = config.threads / config.lanes;
  const int slots = std::min(groups, config.threads / kWarpThreads);
  config.rows = std::int64_t{config.lanes} * config.pack;
  config.steps = divide_up(problem.columns, groups);
  config.shared_bytes = state_bytes(problem) * (slots + 1) * config.rows;
  config.blocks = at_most_blocks(divide_up(problem.inner, config.rows));
  config.blocks_along_y = std::min(problem.outer, kMostBlocksBeyondX);
  return config;
}

Config strip_config(const Problem& problem) {
  Config config;
  config.layout = layout_of(problem);
  config.variant = variant_in_shared(problem);
  config.threads = kStripThreads;
  config.cluster = static_cast<int>(strip_blocks(problem));
  config.steps = strip_steps(problem);
  config.rows = kStripBytes / element_bytes(problem);
  config.blocks = at_most_blocks(divide_up(problem.inner, config.rows) * config.cluster);
  config.blocks_along_y = problem.outer;
  config.shared_bytes = (config.steps - strip_held(is_linear_in_t(problem.function))) *
                        operands(problem) * kStripWarps * kStripBytes;
  return config;
}

Config elementwise_config(const Problem& problem) {
  Config config;
  config.layout = layout_of(problem);
  config.threads = kElementwiseThreads;
  config.packs = kElementwisePacks;
  // If neighbouring elements belong to neighbouring rows, neighbouring threads take those rows.
  const bool side_by_side = problem.inner >= 32;
  config.lanes = side_by_side ? 1 : power_of_two_from(divide_up(most_packs(problem), 4), 64);
  config.steps = divide_up(most_packs(problem), config.lanes * kElementwisePacks);
  // Fewer than 2^31 blocks, since each moves at least 512 bytes and no GPU has 1 TiB of memory.
  config.blocks =
      at_most_blocks(divide_up(problem.rows(), kElementwiseThreads / config.lanes) * config.steps);
  return config;
}

Config config_of(Algorithm algorithm, const Problem& problem, std::string_view name,
                 const Device& device) {
  if (problem.columns == 0) return {};  // nothing is launched
  switch (algorithm) {
    case Algorithm::kWarp:
      return warp_config(problem);
    case Algorithm::kStaged:
      return staged_config(problem);
    case Algorithm::kSmallBlock:
      return small_block_config(problem);
    case Algorithm::kBlock:
      return block_config(problem);
    case Algorithm::kBlockTwoPass:
      return block_two_pass_config(problem, layout_of(problem));
    case Algorithm::kStrided:
      return block_two_pass_config(problem, RowLayout::kStrided);
    case Algorithm::kCluster:
      return cluster_config(problem, device);
    case Algorithm::kClusterShared:
      return cluster_shared_config(problem, device);
    case Algorithm::kSplit:
      return split_config(problem, name, device);
    case Algorithm::kSplitPipelined:
      return split_pipelined_config(problem, device);
    case Algorithm::kColumn:
      return column_config(problem, /*holds_axis=*/true);
    case Algorithm::kColumnTwoPass:
      return column_config(problem, /*holds_axis=*/false);
    case Algorithm::kStrip:
      return strip_config(problem);
    case Algorithm::kElementwise:
      return elementwise_config(problem);
    default:
      return ladder_config(algorithm, problem);
  }
}

// ---- Which is the fastest ----

// For rows that fit a warp, as measured on an H200.
bool block_is_faster(const Problem& problem) {
  const std::int64_t packs = most_packs(problem);
  const std::int64_t all = expected_rows(problem) * packs;
  if (all <= kSmallPacks) return packs > 128;
  if (has_mask(problem)) return is_linear_in_t(problem.function) && packs >= 256;
  if (reduces(problem.function)) return false;
  return is_even(problem) && packs >= 256 && all > kManyPacks;
}

struct Choice {
  Algorithm algorithm;
  std::string reason;
};

Choice choose_column(const Problem& problem, const Device& device) {
  const ColumnSizes sizes = column_sizes(problem, true);
  // Where a block of column would cover less than 256 bytes side by side, clusters hold strips of
  // the array, if it is at least half a strip wide.
  if (sizes.groups * kColumnLanes > kColumnThreads &&
      2 * problem.inner * element_bytes(problem) >= kStripBytes &&
      refusal_of_strip(problem, device).empty()) {
    return {Algorithm::kStrip, "the axis is not the last; blocks hold strips of the array"};
  }
  if (sizes.fits_block()) return {Algorithm::kColumn, "the axis is not the last"};
  return {Algorithm::kColumnTwoPass, "the axis is not the last, and too long for a block to hold"};
}

Choice choose(const Problem& problem, const Device& device) {
  if (is_elementwise(problem.function)) {
    return {Algorithm::kElementwise, "the function needs no reduction"};
  }
  const std::string rows = columns_text(problem);
  if (problem.inner != 1) return choose_column(problem, device);
  if (!is_even(problem) && fits_staged(problem) && problem.columns <= 256) {
    return {Algorithm::kStaged,
            rows + " are short and do not begin and end at multiples of 16 bytes"};
  }
  if (layout_of(problem) == RowLayout::kStrided) {
    return {Algorithm::kStrided, "an array is not aligned to 16 bytes"};
  }
  if (fits_warp(problem) && !block_is_faster(problem)) {
    return {Algorithm::kWarp, rows + " fit the registers of a warp"};
  }
  if (fits_block(problem)) {
    const bool is_small = is_little_work(problem) && fits_small_block(problem);
    return {is_small ? Algorithm::kSmallBlock : Algorithm::kBlock,
            rows + " fit the registers of a block"};
  }
  if (reduces(problem.function)) {
    return {Algorithm::kSplit, rows + " are split into slices that fit the registers of a block"};
  }
  if (device.runs_hopper_code() && fits_cluster_shared(problem)) {
    if (cluster_is_faster(problem, device)) {
      return {Algorithm::kCluster, rows + " fit the registers of a cluster of blocks"};
    }
    return {Algorithm::kClusterShared, rows + " fit the shared memory of a cluster of blocks"};
  }
  if (ring_is_faster(problem, device)) {
    return {Algorithm::kSplitPipelined,
            rows + " fit the shared memory of blocks that run concurrently"};
  }
  if (expected_rows(problem) < 16 * device.multiprocessors) {
    return {Algorithm::kSplit, "few " + rows + ", too long for a cluster"};
  }
  return {Algorithm::kBlockTwoPass,
          rows + " are too long for the registers of a block, which reads them twice"};
}

}  // namespace

Plan plan(const Problem& problem, std::string_view algorithm, const Device& device) {
  Problem planned = problem;
  Choice choice;
  if (algorithm.empty()) {
    choice = choose(planned, device);
  } else if (algorithm == kBatchInvariant) {
    if (!is_elementwise(problem.function) &&
        !(has_whole_packs(problem) && problem.inner == 1 && is_aligned(problem))) {
      throw std::invalid_argument(
          "batch_invariant requires rows along the last axis, each of a multiple of 16 bytes, in "
          "arrays aligned to 16 bytes");
    }
    planned.batch_invariant = true;
    choice = choose(planned, device);
  } else {
    choice = {algorithm_from_name<Algorithm>(kAlgorithms, algorithm),
              "the caller named the algorithm"};
    const std::string why = problem.columns == 0 ? "" : refusal(choice.algorithm, problem, device);
    if (!why.empty()) {
      throw std::invalid_argument("algorithm '" + std::string(algorithm) + "' " + why);
    }
  }
  return {choice.algorithm, choice.reason, config_of(choice.algorithm, planned, algorithm, device)};
}

// A state for each slice of a row, or for split_pipelined the memory through which blocks exchange
// states. Neither the number of rows nor the GPU is known here: a row has the most slices if it is
// the only one, and no GPU that runs_hopper_code() has more multiprocessors than the nominal one.
// Exported programs pass 2^40 for an unknown length, which is too long for split_pipelined. When
// they run, a row may be short enough for it, and their workspace must suffice, as is asserted
// here.
static_assert(mailbox_bytes(132, 8) <= 8 * kMostSlices &&
              mailbox_bytes(132, 16) <= 16 * kMostSlices);
std::int64_t workspace_bytes(const Problem& problem, std::string_view algorithm) {
  if (is_elementwise(problem.function) || problem.inner != 1) return 0;
  const bool is_invariant = algorithm == kBatchInvariant;
  const bool is_chosen = (algorithm.empty() || is_invariant) && !fits_block(problem);
  const std::int64_t state = problem.dtype == DType::kFloat64 ? 16 : 8;
  std::int64_t bytes = 0;
  if (is_chosen || algorithm == name_of(Algorithm::kSplit)) {
    Problem one_row = problem;
    one_row.outer = 1;
    one_row.batch_invariant = is_invariant;
    bytes = split_slices(one_row, nominal_device()) * state;
  }
  if ((is_chosen && !fits_cluster_shared(problem)) ||
      algorithm == name_of(Algorithm::kSplitPipelined)) {
    if (fits_ring(problem, nominal_device())) {
      const std::int64_t slices = most_ring_slices(problem, nominal_device());
      bytes = std::max(bytes, mailbox_bytes(slices, state));
    }
  }
  return bytes;
}

}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
