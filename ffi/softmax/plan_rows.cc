// The plan of kernels that give a row a block or less.

#include <algorithm>
#include <limits>
#include <string>

#include "core/dispatch.h"
#include "softmax/plan.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {
namespace {

// Problems of more packs take far longer to read than to launch.
constexpr std::int64_t kManyPacks = std::int64_t{1} << 21;
// From here on, and below the second number, `warp` is faster than blocks for long rows too.
constexpr std::int64_t kWarpPacks = std::int64_t{3} << 18;
constexpr std::int64_t kWarpPacksEnd = std::int64_t{5} << 18;

// small_block: the fewest packs of a row for which it is chosen; functions that are linear in t
// have as many of a second operand. A lane of `warp` has 16 packs of rows of more than
// kLongWarpPacks, and most lanes have all 16 of rows with masks of more than kFullWarpPacks.
constexpr std::int64_t kLeastSmallBlockPacks = 129;
constexpr std::int64_t kLeastSmallBlockPacksOfTwo = 96;
constexpr std::int64_t kLongWarpPacks = 256;
constexpr std::int64_t kFullWarpPacks = 448;

// Rows of one or two packs take the kernels for little work up to this many packs, of one operand
// and of two: those kernels execute fewer instructions per row.
constexpr std::int64_t kShortRowPacks = 16 * kSmallPacks;
constexpr std::int64_t kShortRowPacksOfTwo = 4 * kSmallPacks;

constexpr std::int64_t kStagedTileBytes = 32 * 1024;
// Tiles are smaller if there would be fewer blocks than these, about as many as a GPU holds at a
// time.
constexpr std::int64_t kStagedBlocks = 8 * 132;
// For short rows that do not begin and end at multiples of 16 bytes: the longest for `staged`, and
// the largest arrays for which shorter ones are left to `warp`, as measured (docs/tuning.md).
constexpr std::int64_t kMostStagedColumns = 256;
constexpr std::int64_t kLargeArrayBytes = 160 << 20;
constexpr std::int64_t kLargeArrayBytesByPacks = 20 << 20;  // if `warp` reads and writes packs
constexpr std::int64_t kFewRows = 8192;  // for which `warp` is faster if it reads by elements

// Whether `warp` is faster than blocks for rows of which a lane has 16 packs.
bool takes_long_warp(std::int64_t all_packs) {
  return all_packs >= kWarpPacks && all_packs < kWarpPacksEnd;
}

// The layout for kernels that index aligned rows with 32-bit numbers.
RowLayout small_layout_of(const Problem& problem) {
  const RowLayout layout = layout_of(problem);
  return layout == RowLayout::kAligned ? RowLayout::kSmall : layout;
}

// Whether `warp` uses the instances for little work. Their 32-bit indices are not enough for any
// number of batch-invariant rows.
bool is_little_for_warp(const Problem& problem) {
  if (most_packs(problem) > 2 || problem.batch_invariant) return is_little_work(problem);
  const std::int64_t most = operands(problem) == 1 ? kShortRowPacks : kShortRowPacksOfTwo;
  return problem.rows() * most_packs(problem) <= most;
}

RowLayout warp_layout_of(const Problem& problem) {
  return warp_layout(layout_of(problem), operands(problem), info(problem.dtype).bytes,
                     problem.columns);
}

bool fits_small_block(const Problem& problem) {
  return most_packs(problem) <= kSmallBlockThreads * kMostSmallBlockPacks;
}

// The most packs of all rows for which small_block is faster than `warp` and `block`, as measured
// on an H200 (docs/tuning.md); float64 was not.
std::int64_t most_small_block_packs(const Problem& problem) {
  const auto power_of_two = [](int exponent) { return std::int64_t{1} << exponent; };
  const bool is_long = most_packs(problem) > kLongWarpPacks;
  const bool is_narrow = element_bytes(problem) == 2;
  const bool has_mask = problem.has_mask();
  if (element_bytes(problem) == 8) return kSmallPacks;
  if (is_linear_in_t(problem.function)) {
    return has_mask ? kSmallPacks : power_of_two(is_long ? 21 : 18);
  }
  if (!has_whole_packs(problem)) {
    if (!fits_warp(problem)) return is_narrow ? kSmallPacks : power_of_two(has_mask ? 24 : 20);
    return is_narrow && reduces(problem.function) && !has_mask ? 0 : kSmallPacks;
  }
  if (reduces(problem.function)) {
    return is_long && !has_mask ? power_of_two(19) - 1 : kSmallPacks;
  }
  if (has_mask) {
    return power_of_two(most_packs(problem) > kFullWarpPacks ? 23 : is_long ? 19 : 18);
  }
  if (problem.function == Function::kSoftmax) return power_of_two(is_long ? 21 : 18);
  return power_of_two(is_long && !is_narrow ? 20 : 17);
}

}  // namespace

bool fits_warp(const Problem& problem) {
  return most_packs(problem) <= kWarpThreads * packs_held(problem, 16);
}

// For rows that fit a warp, as measured on an H200.
bool prefers_block(const Problem& problem) {
  const std::int64_t packs = most_packs(problem);
  const bool is_measured = element_bytes(problem) < 8;
  if (reduces(problem.function)) return false;
  if (problem.has_mask()) {
    if (is_linear_in_t(problem.function)) return packs >= kLongWarpPacks;
    return is_measured && has_whole_packs(problem) && packs > kFullWarpPacks;
  }
  if (!is_even(problem)) return false;
  const std::int64_t all = expected_rows(problem) * packs;
  if (packs > kLongWarpPacks && is_measured) return !takes_long_warp(all);
  return packs >= kLongWarpPacks && all > kManyPacks;
}

Config configure_warp(const Problem& problem) {
  Config config;
  config.layout = warp_layout_of(problem);
  config.threads = kWarpBlockThreads;
  const bool takes_packs = config.layout != RowLayout::kElements;
  const std::int64_t length = takes_packs ? most_packs(problem) : problem.columns;
  const bool takes_lanes = config.layout == RowLayout::kMaskedUnaligned && is_little_work(problem);
  const auto take_from = [&](const auto& table) {
    for (const WarpInstance& each : table) {
      const bool is_one_pack = packs_of_each(each, operands(problem)) == 1;
      if (takes_lanes && each.lanes != kWarpThreads && !is_one_pack) continue;
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
    if (is_little_for_warp(problem)) {
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

bool fits_staged(const Problem& problem) {
  return problem.inner == 1 && problem.columns <= kStagedColumns && !problem.has_mask();
}

bool prefers_staged(const Problem& problem) {
  if (problem.columns > kMostStagedColumns) return false;
  if (layout_of(problem) == RowLayout::kStrided) return true;  // `warp` does not support them
  const bool by_elements = warp_layout_of(problem) == RowLayout::kElements;
  if (by_elements && problem.rows() <= kFewRows) return false;
  const bool by_packs = !by_elements && !reduces(problem.function);
  const std::int64_t bytes = problem.rows() * problem.columns * element_bytes(problem);
  if (bytes > (by_packs ? kLargeArrayBytesByPacks : kLargeArrayBytes)) return true;
  return problem.columns <= (by_packs || operands(problem) == 2 ? 128 : 64);
}

std::string refusal_of_staged(const Problem& problem, const Device& device) {
  if (!fits_staged(problem)) {
    return "supports only rows of at most " + std::to_string(kStagedColumns) +
           " elements along the last axis, without a mask";
  }
  if (configure_staged(problem).shared_bytes + kStagedOwnBytes <=
      static_cast<std::int64_t>(device.shared_bytes_per_block)) {
    return "";
  }
  return "cannot hold " + columns_text(problem) + " in " +
         std::to_string(device.shared_bytes_per_block) +
         " bytes of shared memory; 'strided' supports any length";
}

Config configure_staged(const Problem& problem) {
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
  const std::int64_t units = std::min(kStagedTileBytes / row_bytes / unit,
                                      divide_up(problem.rows(), unit * kStagedBlocks));
  config.rows = unit * std::max<std::int64_t>(1, units);
  config.blocks = at_most_blocks(divide_up(problem.rows(), config.rows));
  config.shared_bytes = config.rows * row_bytes * operands(problem);
  return config;
}

// Its 32-bit indices are not enough for any number of batch-invariant rows.
bool prefers_small_block(const Problem& problem) {
  const std::int64_t packs = most_packs(problem);
  const bool has_two = operands(problem) == 2 && !problem.has_mask();
  const std::int64_t least = has_two ? kLeastSmallBlockPacksOfTwo : kLeastSmallBlockPacks;
  const std::int64_t all = problem.rows() * packs;
  const bool is_for_warp = fits_warp(problem) && is_even(problem) &&
                           !is_linear_in_t(problem.function) && takes_long_warp(all);
  return !problem.batch_invariant && fits_small_block(problem) && packs >= least &&
         all <= most_small_block_packs(problem) && !is_for_warp;
}

std::string refusal_of_small_block(const Problem& problem) {
  if (problem.rows() * problem.columns > std::numeric_limits<std::int32_t>::max()) {
    return "supports only arrays of fewer than 2^31 elements; 'block' supports any number";
  }
  return refusal_of_held_rows(problem, fits_small_block(problem), " in registers",
                              "block_two_pass");
}

Config configure_small_block(const Problem& problem) {
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

bool fits_block(const Problem& problem) {
  return most_packs(problem) <= kBlockThreads * most_held(problem);
}

Config configure_block(const Problem& problem) {
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

Config configure_block_two_pass(const Problem& problem, RowLayout layout) {
  Config config;
  config.layout = layout;
  config.blocks = blocks_on_rows(problem);
  config.threads = kBlockThreads;
  config.packs = layout == RowLayout::kStrided ? kStridedPacks : kPassingPacks;
  return config;
}

}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
