// The plan of kernels that divide a row among blocks.

#include <algorithm>
#include <string>

#include "softmax/plan.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {
namespace {

// cluster: the most packs of a row for which block is as fast if there are few rows.
constexpr std::int64_t kLeastClusterPacks = 2048;
constexpr std::int64_t kLeastClusterPacksOfTwo = 1024;
// The most packs of all rows for which it is faster than split.
constexpr std::int64_t kClusterPacksOfAll = std::int64_t{1} << 20;

// block_two_pass: the longest row for which it is faster than split.
constexpr std::int64_t kTwoPassPacks = 320 * 1024 / 16;

bool fits_cluster(const Problem& problem) {
  const int held = packs_held(problem, kClusterPacks);
  return divide_up(most_packs(problem), kMostClusterBlocks) <= kClusterThreads * held;
}

// Adds to a refusal that the kernel needs thread block clusters or tensor copies.
std::string or_without_hopper(std::string refusal, const Device& device) {
  const bool refuses = refusal.empty() && !device.runs_hopper_code();
  return refuses ? "requires a GPU of compute capability 9.0" : refusal;
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

// How many blocks per row fill the GPU, if there are few rows.
std::int64_t blocks_to_fill(const Problem& problem, const Device& device) {
  return device.multiprocessors / expected_rows(problem);
}

// As few warps as possible, in blocks of which several fit on a multiprocessor. `blocks` is 0 if
// the registers of `most_blocks` blocks cannot hold a row.
Config configure_cluster(const Problem& problem, const Device& device, int most_blocks) {
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

// Whether blocks hold slices in registers: for functions that need only the state of a row.
bool holds_slices(const Problem& problem) {
  return reduces(problem.function) &&
         most_packs(problem) <= kMostSlices * kBlockThreads * most_held(problem);
}

}  // namespace

std::string refusal_of_cluster(const Problem& problem, const Device& device) {
  return or_without_hopper(
      refusal_of_held_rows(problem, fits_cluster(problem), " in registers", "split"), device);
}

// As measured on an H200 (docs/tuning.md); rows with masks were not. Batch-invariant rows, of which
// any number may come, keep the kernel that is faster for many.
bool prefers_cluster_of_few(const Problem& problem, const Device& device) {
  const std::int64_t packs = most_packs(problem);
  const std::int64_t rows = expected_rows(problem);
  if (problem.has_mask() || !refusal_of_cluster(problem, device).empty()) return false;
  if (reduces(problem.function)) {
    return !fits_block(problem) && 4 * rows <= std::int64_t{3} * device.multiprocessors &&
           rows * packs <= kClusterPacksOfAll;
  }
  const std::int64_t least =
      is_linear_in_t(problem.function) ? kLeastClusterPacksOfTwo : kLeastClusterPacks;
  return !problem.batch_invariant && fits_block(problem) && packs > least &&
         2 * rows <= device.multiprocessors;
}

// Registers are faster than shared memory if those of a cluster hold a row, except for many rows
// of 16-bit elements that need more than 8 blocks (docs/tuning.md).
bool prefers_cluster(const Problem& problem, const Device& device) {
  if (configure_cluster(problem, device, kMostClusterBlocks / 2).blocks != 0) return true;
  const bool are_few = !problem.batch_invariant && problem.rows() <= device.multiprocessors;
  return fits_cluster(problem) && (are_few || !(is_forward(problem.function) && is_even(problem) &&
                                                pack_elements(problem) == 8));
}

Config configure_cluster(const Problem& problem, const Device& device) {
  const Config config = configure_cluster(problem, device, kMostClusterBlocks / 2);
  return config.blocks != 0 ? config : configure_cluster(problem, device, kMostClusterBlocks);
}

bool fits_cluster_shared(const Problem& problem) {
  return most_packs(problem) <= kMostClusterBlocks * packs_held(problem, kSlicePacks);
}

std::string refusal_of_cluster_shared(const Problem& problem, const Device& device) {
  return or_without_hopper(refusal_of_held_rows(problem, fits_cluster_shared(problem), "", "split"),
                           device);
}

Config configure_cluster_shared(const Problem& problem, const Device& device) {
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

Config configure_split(const Problem& problem, std::string_view algorithm, const Device& device) {
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

// As measured on an H200 (docs/tuning.md); rows with masks were not. With fewer rows, blocks with a
// row each would leave multiprocessors idle; with more, some would have one row more than others.
bool prefers_block_two_pass(const Problem& problem, const Device& device) {
  const std::int64_t rows = expected_rows(problem);
  return !problem.has_mask() && most_packs(problem) <= kTwoPassPacks &&
         3 * rows >= std::int64_t{2} * device.multiprocessors &&
         rows <= std::int64_t{2} * device.multiprocessors;
}

// All these blocks can hold the row, and a single one cannot. Longer rows, of which the shared
// memory of the GPU holds one but not three, take the two launches of split: blocks with only one
// row in flight are slower (docs/tuning.md).
bool fits_ring(const Problem& problem, const Device& device) {
  const std::int64_t held = held_by_ring(problem);
  const std::int64_t packs = most_packs(problem);
  return !reduces(problem.function) && packs > held && packs <= blocks_together(device) * held;
}

std::string refusal_of_split_pipelined(const Problem& problem, const Device& device) {
  const std::string why = or_without_hopper(refusal_of_rows(problem), device);
  if (!why.empty() || fits_ring(problem, device)) return why;
  if (reduces(problem.function)) {
    return "does not compute logsumexp and cross entropy; 'split' does";
  }
  return "supports only rows that fit in the shared memory of the GPU but not in that of one "
         "block, got " +
         columns_text(problem) + "; 'split' supports any length";
}

// Less than 8 MiB of an operand stay in the L2 cache of an H200, and reading them twice is faster
// than letting blocks wait for each other. The limit scales with the number of multiprocessors.
// Reading two operands twice is not.
bool prefers_split_pipelined(const Problem& problem, const Device& device) {
  const std::int64_t kept =
      (std::int64_t{1} << 19) * device.multiprocessors / nominal_device().multiprocessors;
  const bool has_two = operands(problem) == 2 && !problem.batch_invariant;
  return fits_ring(problem, device) &&
         (has_two || expected_rows(problem) * most_packs(problem) >= kept);
}

// A slice need not be smaller than a quarter of what a block has room for.
std::int64_t most_ring_slices(const Problem& problem, const Device& device) {
  return std::min(blocks_together(device),
                  divide_up(most_packs(problem), held_by_ring(problem) / 4));
}

// As many rows at a time as there is room for, or fewer if that takes no more turns, with as many
// blocks per row as possible.
Config configure_split_pipelined(const Problem& problem, const Device& device) {
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

}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
