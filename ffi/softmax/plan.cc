#include "softmax/plan.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <string_view>

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {

std::string refusal_of_rows(const Problem& problem) {
  if (problem.inner != 1) return "supports only the last axis; 'strided' supports any axis";
  if (!is_aligned(problem)) {
    return "requires arrays aligned to 16 bytes; 'strided' supports any alignment";
  }
  return "";
}

std::string refusal_of_held_rows(const Problem& problem, bool fit, std::string_view where,
                                 std::string_view instead) {
  std::string why = refusal_of_rows(problem);
  if (!why.empty() || fit) return why;
  return "cannot hold " + columns_text(problem) + std::string(where) + "; '" +
         std::string(instead) + "' supports any length";
}

namespace {

// ---- The steps of the ladder, and the kernel without a reduction ----

// block_shared keeps the row in its own dtype; beside it there is room for one pack of alignment
// padding, and a few numbers per warp.
constexpr std::size_t kBlockSharedOverhead = 1024;

std::string refusal_of_step(Algorithm algorithm, const Problem& problem, const Device& device) {
  if (algorithm < Algorithm::kBlockShared && problem.function != Function::kSoftmax) {
    return "computes softmax only";
  }
  if (problem.function > Function::kLogSumExp) {
    return "computes softmax, log_softmax and logsumexp only";
  }
  if (problem.has_mask()) return "does not support a mask or causal";
  if (problem.scaled) return "does not support a scale other than 1";
  const std::size_t capacity =
      (device.shared_bytes_per_block - kBlockSharedOverhead) / info(problem.dtype).bytes;
  if (algorithm != Algorithm::kBlockShared ||
      problem.columns <= static_cast<std::int64_t>(capacity)) {
    return "";
  }
  return "cannot hold " + columns_text(problem) + " in " +
         std::to_string(device.shared_bytes_per_block) +
         " bytes of shared memory; 'block_uncached' supports any length";
}

Config configure_ladder(Algorithm algorithm, const Problem& problem) {
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

// The kernel for rows whose elements have a stride. Threads share a chunk of the axis so that they
// access kContiguousBytes together, but each has kLeastTaken elements of a row, if there are as
// many: what a row needs for them takes more time than four elements. Where a multiprocessor would
// have less than kFewThreads, threads take single rows instead of packs, and then fewer elements.
// Rows that allow no packs have kUnpackedRounds times the elements that a thread holds.
constexpr std::int64_t kContiguousBytes = 512;
constexpr int kMostStride = 64;
constexpr std::int64_t kLeastTaken = 8;
constexpr int kUnpackedRounds = 2;
constexpr std::int64_t kFewThreads = 256;

Config configure_elementwise_columns(const Problem& problem, const Device& device) {
  Config config;
  config.threads = kElementwiseThreads;
  const std::int64_t bytes = problem.inner * element_bytes(problem);
  config.lanes = power_of_two_from(
      std::min(divide_up(kContiguousBytes, bytes), problem.columns / kLeastTaken), kMostStride);
  const auto steps = [&] { return elementwise_steps(config.pack, element_bytes(problem)); };
  const auto chunks = [&](int taken) {
    return divide_up(problem.columns, std::int64_t{taken} * config.lanes);
  };
  const auto threads = [&](int taken) {
    return problem.rows() / config.pack * config.lanes * chunks(taken);
  };
  const std::int64_t few = kFewThreads * device.multiprocessors;
  config.pack = pack_side_by_side(problem);
  if (threads(steps()) < few) config.pack = 1;
  int taken = (pack_side_by_side(problem) == 1 ? kUnpackedRounds : 1) * steps();
  while (taken > 1 && threads(taken) < few) taken /= 2;
  config.steps = chunks(taken);
  config.packs = static_cast<int>(divide_up(problem.columns, config.steps * config.lanes));
  // Fewer than 2^31 blocks, since no GPU has memory for 2^39 elements.
  config.blocks = at_most_blocks(divide_up(threads(taken), kElementwiseThreads));
  return config;
}

Config configure_elementwise(const Problem& problem, const Device& device) {
  const RowLayout layout = layout_of(problem);
  if (layout == RowLayout::kStrided) return configure_elementwise_columns(problem, device);
  Config config;
  config.layout = layout;
  config.threads = kElementwiseThreads;
  config.packs = kElementwisePacks;
  config.lanes = power_of_two_from(divide_up(most_packs(problem), 4), 64);
  config.steps = divide_up(most_packs(problem), config.lanes * kElementwisePacks);
  // Fewer than 2^31 blocks, since each moves at least 512 bytes and no GPU has 1 TiB of memory.
  config.blocks =
      at_most_blocks(divide_up(problem.rows(), kElementwiseThreads / config.lanes) * config.steps);
  return config;
}

std::string refusal_of_flat(const Problem& problem) {
  if (problem.inner != 1) return "supports only the last axis; 'elementwise' supports any axis";
  if (problem.has_mask()) return "does not support a mask or causal; 'elementwise' does";
  if (!is_aligned(problem)) {
    return "requires arrays aligned to 16 bytes; 'elementwise' supports any alignment";
  }
  if (problem.rows() * problem.columns > std::numeric_limits<std::int32_t>::max()) {
    return "supports fewer than 2^31 elements; 'elementwise' supports any number";
  }
  return "";
}

Config configure_flat(const Problem& problem) {
  Config config;
  config.threads = kFlatThreads;
  config.blocks = divide_up(problem.rows() * problem.columns,
                            std::int64_t{config.threads} * pack_elements(problem));
  return config;
}

// Whether flat is faster than elementwise: if latency counts, for rows of up to 128 bytes, and for
// up to kFlatColumns elements if warps of elementwise would write parts of lines. Aligned rows of
// 16 bits do not suffer from that, nor do arrays in the L2 cache. elementwise alone is invariant,
// since the results of the two may differ in their last bit.
constexpr std::int64_t kFlatColumns = 1024;
constexpr std::int64_t kFlatBytes = std::int64_t{1} << 25;
bool prefers_flat(const Problem& problem) {
  if (problem.batch_invariant || !refusal_of_flat(problem).empty()) return false;
  const std::int64_t row_bytes = problem.columns * element_bytes(problem);
  if (is_little_work(problem) || row_bytes <= 128) return true;
  if (problem.columns > kFlatColumns) return false;
  if (!has_whole_packs(problem)) return true;
  return row_bytes % 128 != 0 && element_bytes(problem) >= 4 &&
         problem.rows() * row_bytes >= kFlatBytes;
}

// ---- All algorithms ----

// Why an algorithm cannot take a problem; empty if it can.
std::string refusal(Algorithm algorithm, const Problem& problem, const Device& device) {
  const bool has_no_reduction =
      algorithm == Algorithm::kElementwise || algorithm == Algorithm::kFlat;
  if (has_no_reduction != is_elementwise(problem.function)) {
    return has_no_reduction
               ? "computes only the gradients of logsumexp and cross entropy"
               : "does not compute the gradients of logsumexp and cross entropy; 'elementwise' "
                 "does";
  }
  if (is_ladder(algorithm)) return refusal_of_step(algorithm, problem, device);
  switch (algorithm) {
    case Algorithm::kWarp:
      return refusal_of_held_rows(problem, fits_warp(problem), " in registers", "block_two_pass");
    case Algorithm::kStaged:
      return refusal_of_staged(problem, device);
    case Algorithm::kSmallBlock:
      return refusal_of_small_block(problem);
    case Algorithm::kBlock:
      return refusal_of_held_rows(problem, fits_block(problem), " in registers", "block_two_pass");
    case Algorithm::kBlockTwoPass:
    case Algorithm::kSplit:
      return refusal_of_rows(problem);
    case Algorithm::kCluster:
      return refusal_of_cluster(problem, device);
    case Algorithm::kClusterShared:
      return refusal_of_cluster_shared(problem, device);
    case Algorithm::kSplitPipelined:
      return refusal_of_split_pipelined(problem, device);
    case Algorithm::kColumn:
      return refusal_of_column(problem);
    case Algorithm::kColumnTwoPass:
    case Algorithm::kColumnSplit:
      return refusal_of_column_two_pass(problem);
    case Algorithm::kStrip:
      return refusal_of_strip(problem, device);
    case Algorithm::kFlat:
      return refusal_of_flat(problem);
    default:
      return "";
  }
}

Config config_of(Algorithm algorithm, const Problem& problem, std::string_view name,
                 const Device& device) {
  if (problem.columns == 0) return {};  // nothing is launched
  switch (algorithm) {
    case Algorithm::kWarp:
      return configure_warp(problem);
    case Algorithm::kStaged:
      return configure_staged(problem);
    case Algorithm::kSmallBlock:
      return configure_small_block(problem);
    case Algorithm::kBlock:
      return configure_block(problem);
    case Algorithm::kBlockTwoPass:
      return configure_block_two_pass(problem, layout_of(problem));
    case Algorithm::kStrided:
      return configure_block_two_pass(problem, RowLayout::kStrided);
    case Algorithm::kCluster:
      return configure_cluster(problem, device);
    case Algorithm::kClusterShared:
      return configure_cluster_shared(problem, device);
    case Algorithm::kSplit:
      return configure_split(problem, name, device);
    case Algorithm::kSplitPipelined:
      return configure_split_pipelined(problem, device);
    case Algorithm::kColumn:
      return configure_column(problem, device);
    case Algorithm::kColumnTwoPass:
      return configure_column_two_pass(problem);
    case Algorithm::kColumnSplit:
      return configure_column_split(problem, name, device);
    case Algorithm::kStrip:
      return configure_strip(problem);
    case Algorithm::kElementwise:
      return configure_elementwise(problem, device);
    case Algorithm::kFlat:
      return configure_flat(problem);
    default:
      return configure_ladder(algorithm, problem);
  }
}

struct Choice {
  Algorithm algorithm;
  std::string reason;
};

Choice choose_column(const Problem& problem, const Device& device) {
  if (prefers_strip(problem, device)) {
    return {Algorithm::kStrip, "the axis is not the last; blocks hold strips of the array"};
  }
  if (refusal_of_column(problem).empty()) return {Algorithm::kColumn, "the axis is not the last"};
  if (prefers_column_split(problem, device)) {
    return {Algorithm::kColumnSplit,
            "the axis is not the last, too long for a block to hold, and there are few rows"};
  }
  return {Algorithm::kColumnTwoPass, "the axis is not the last, and too long for a block to hold"};
}

Choice choose(const Problem& problem, const Device& device) {
  if (is_elementwise(problem.function)) {
    return prefers_flat(problem)
               ? Choice{Algorithm::kFlat,
                        "the function needs no reduction, and rows are short or few"}
               : Choice{Algorithm::kElementwise, "the function needs no reduction"};
  }
  const std::string rows = columns_text(problem);
  if (problem.inner != 1) return choose_column(problem, device);
  if (!is_even(problem) && fits_staged(problem) && prefers_staged(problem)) {
    return {Algorithm::kStaged,
            rows + " are short and do not begin and end at multiples of 16 bytes"};
  }
  if (layout_of(problem) == RowLayout::kStrided) {
    return {Algorithm::kStrided, "an array is not aligned to 16 bytes"};
  }
  if (prefers_small_block(problem)) {
    return {Algorithm::kSmallBlock, rows + " fit the registers of a block, and are not many"};
  }
  if (prefers_cluster_of_few(problem, device)) {
    return {Algorithm::kCluster, rows + " fit the registers of a cluster of blocks, and are few"};
  }
  if (fits_warp(problem) && !prefers_block(problem)) {
    return {Algorithm::kWarp, rows + " fit the registers of a warp"};
  }
  if (fits_block(problem)) return {Algorithm::kBlock, rows + " fit the registers of a block"};
  if (reduces(problem.function)) {
    if (prefers_block_two_pass(problem, device)) {
      return {Algorithm::kBlockTwoPass,
              rows + " are too long for the registers of a block, which reads them in parts"};
    }
    return {Algorithm::kSplit, rows + " are split into slices that fit the registers of a block"};
  }
  if (device.runs_hopper_code() && fits_cluster_shared(problem)) {
    if (prefers_cluster(problem, device)) {
      return {Algorithm::kCluster, rows + " fit the registers of a cluster of blocks"};
    }
    return {Algorithm::kClusterShared, rows + " fit the shared memory of a cluster of blocks"};
  }
  if (prefers_split_pipelined(problem, device)) {
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
  if (is_elementwise(problem.function)) return 0;
  const std::int64_t state = problem.dtype == DType::kFloat64 ? 16 : 8;
  if (problem.inner != 1) {
    // column holds the fewest elements of large arrays at odd addresses.
    Problem least_held = problem, alone = problem;
    least_held.alignment = 1;
    least_held.outer = std::int64_t{1} << 32;
    alone.outer = 1;
    const bool may_be_chosen = algorithm.empty() && !refusal_of_column(least_held).empty();
    if (!may_be_chosen && algorithm != name_of(Algorithm::kColumnSplit)) return 0;
    return column_parts(alone, nominal_device()) * state;
  }
  const bool is_invariant = algorithm == kBatchInvariant;
  const bool is_chosen = (algorithm.empty() || is_invariant) && !fits_block(problem);
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
