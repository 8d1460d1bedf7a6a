// Shared by the sources of the plan: properties of problems, and for each kernel why it refuses a
// problem, and how it is launched.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>

#include "core/device.h"
#include "core/integer.h"
#include "softmax/instances.h"
#include "softmax/softmax.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {

inline constexpr std::int64_t kMostBlocks = std::numeric_limits<std::int32_t>::max();

inline constexpr int kWarpThreads = 32;

// ---- The problem ----

inline int element_bytes(const Problem& problem) {
  return static_cast<int>(info(problem.dtype).bytes);
}
inline int pack_elements(const Problem& problem) { return 16 / element_bytes(problem); }

// Whether the addresses of the arrays allow loads of packs.
inline bool is_aligned(const Problem& problem) { return problem.alignment >= 16; }

inline bool has_whole_packs(const Problem& problem) {
  return problem.columns % pack_elements(problem) == 0;
}

inline bool is_even(const Problem& problem) {
  return has_whole_packs(problem) && !problem.has_mask();
}

inline RowLayout layout_of(const Problem& problem) {
  if (problem.inner != 1 || !is_aligned(problem)) return RowLayout::kStrided;
  if (problem.has_mask()) {
    return has_whole_packs(problem) ? RowLayout::kMasked : RowLayout::kMaskedUnaligned;
  }
  return has_whole_packs(problem) ? RowLayout::kAligned : RowLayout::kUnaligned;
}

inline bool is_plain_softmax(const Problem& problem) {
  return problem.function == Function::kSoftmax && !problem.scaled;
}

inline int operands(const Problem& problem) { return is_linear_in_t(problem.function) ? 2 : 1; }

// How many packs of a row a thread with room for `packs` holds of each operand.
inline int packs_held(const Problem& problem, int packs) {
  return std::max(1, packs / operands(problem));
}

// The bytes of a row's state: one number for functions that are linear in t, else two.
inline std::int64_t state_bytes(const Problem& problem) {
  const std::int64_t number = problem.dtype == DType::kFloat64 ? 8 : 4;
  return is_linear_in_t(problem.function) ? number : 2 * number;
}

// The most packs of 16 bytes that cover a row: unaligned rows may begin and end inside a pack.
inline std::int64_t most_packs(const Problem& problem) {
  const int elements = pack_elements(problem);
  const std::int64_t phase = problem.inner == 1 && !has_whole_packs(problem) ? elements - 1 : 0;
  return divide_up(problem.columns + phase, elements);
}

inline std::string columns_text(const Problem& problem) {
  return "rows of " + std::to_string(problem.columns) + " " +
         std::string(info(problem.dtype).name) + " elements";
}

inline std::int64_t expected_rows(const Problem& problem) {
  return JAX_GPUOPS_NAMESPACE::expected_rows(problem.batch_invariant, problem.rows(),
                                             most_packs(problem) * 16);
}

// About as many packs as the threads of a GPU can load at once. Smaller problems are bound by
// latency, and 32-bit indices are enough for them.
inline constexpr std::int64_t kSmallPacks = 132 * 512;

inline bool is_little_work(const Problem& problem) {
  return expected_rows(problem) * most_packs(problem) <= kSmallPacks;
}

// ---- How rows are divided ----

// The most packs of a row that a thread of a block holds: of rows read once, and of rows read
// twice.
inline int most_held(const Problem& problem) { return packs_held(problem, kMostBlockPacks); }
inline int passing_held(const Problem& problem) { return packs_held(problem, kPassingPacks); }

// The blocks of a grid in which each block, or cluster of blocks, takes one row at a time.
inline std::int64_t blocks_on_rows(const Problem& problem, int cluster = 1) {
  return std::min(problem.rows(), kMostBlocks / cluster) * cluster;
}

inline std::int64_t at_most_blocks(std::int64_t blocks) { return std::min(blocks, kMostBlocks); }

// The threads, in whole warps, that hold `packs` packs with up to `held` per thread.
inline int threads_for(std::int64_t packs, int held) {
  const std::int64_t warps = divide_up(packs, std::int64_t{kWarpThreads} * held);
  return static_cast<int>(std::max<std::int64_t>(2, warps) * kWarpThreads);
}

// The most packs in each of `parts` parts, rounded up to whole lines of 128 bytes.
inline std::int64_t packs_of_part(std::int64_t packs, std::int64_t parts) {
  return divide_up(divide_up(packs, parts), kPacksOfLine) * kPacksOfLine;
}

inline int piece_of_warp(std::int64_t packs, int threads) {
  return static_cast<int>(packs_of_part(packs, threads / kWarpThreads));
}

// For kernels that keep rows in shared memory.
inline Variant variant_in_shared(const Problem& problem) {
  return is_plain_softmax(problem) && has_plain_in_shared(problem.dtype, layout_of(problem))
             ? Variant::kPlainSoftmax
             : Variant::kGeneral;
}

// ---- The kernels ----
//
// A refusal says why a kernel does not take a problem, and is empty if it does. Configurations are
// only for problems that the kernel takes.

// Why the rows cannot be read in packs along the last axis.
std::string refusal_of_rows(const Problem& problem);
// The same, and why a kernel that holds whole rows `where` cannot hold these, unless they fit.
std::string refusal_of_held_rows(const Problem& problem, bool fit, std::string_view where,
                                 std::string_view instead);

// The kernels that give a row a block or less, in plan_rows.cc.

bool fits_warp(const Problem& problem);
// Whether block is faster for rows that fit a warp and do not take small_block.
bool prefers_block(const Problem& problem);
Config configure_warp(const Problem& problem);

bool fits_staged(const Problem& problem);
bool prefers_staged(const Problem& problem);
std::string refusal_of_staged(const Problem& problem, const Device& device);
Config configure_staged(const Problem& problem);

// Whether small_block is faster than warp and block.
bool prefers_small_block(const Problem& problem);
std::string refusal_of_small_block(const Problem& problem);
Config configure_small_block(const Problem& problem);

bool fits_block(const Problem& problem);
Config configure_block(const Problem& problem);

Config configure_block_two_pass(const Problem& problem, RowLayout layout);

// The kernels that divide a row among blocks, in plan_split.cc.

std::string refusal_of_cluster(const Problem& problem, const Device& device);
// Whether cluster is faster than block, or than split for functions that reduce: where blocks with
// a row each would leave most multiprocessors idle.
bool prefers_cluster_of_few(const Problem& problem, const Device& device);
// Whether cluster is faster than cluster_shared.
bool prefers_cluster(const Problem& problem, const Device& device);
Config configure_cluster(const Problem& problem, const Device& device);

bool fits_cluster_shared(const Problem& problem);
std::string refusal_of_cluster_shared(const Problem& problem, const Device& device);
Config configure_cluster_shared(const Problem& problem, const Device& device);

// The most parts of a row.
inline constexpr std::int64_t kMostSlices = 2048;

std::int64_t split_slices(const Problem& problem, const Device& device);
// Whether block_two_pass is faster than split for functions that reduce.
bool prefers_block_two_pass(const Problem& problem, const Device& device);
// `algorithm`: as in plan().
Config configure_split(const Problem& problem, std::string_view algorithm, const Device& device);

// Whether the blocks of split_pipelined that run concurrently can hold a row, and one cannot.
bool fits_ring(const Problem& problem, const Device& device);
std::string refusal_of_split_pipelined(const Problem& problem, const Device& device);
// Whether split_pipelined is faster than split.
bool prefers_split_pipelined(const Problem& problem, const Device& device);
// The most slices of a row.
std::int64_t most_ring_slices(const Problem& problem, const Device& device);
Config configure_split_pipelined(const Problem& problem, const Device& device);

// The kernels of rows whose elements have a stride, in plan_columns.cc.

// The elements side by side that a thread takes.
int pack_side_by_side(const Problem& problem);

std::string refusal_of_column(const Problem& problem);
std::string refusal_of_column_two_pass(const Problem& problem);
std::string refusal_of_strip(const Problem& problem, const Device& device);
// Whether to take strip rather than column and column_two_pass.
bool prefers_strip(const Problem& problem, const Device& device);
Config configure_column(const Problem& problem, const Device& device);
Config configure_column_two_pass(const Problem& problem);
// How many blocks share an axis in column_split.
std::int64_t column_parts(const Problem& problem, const Device& device);
// Whether to take column_split rather than column_two_pass.
bool prefers_column_split(const Problem& problem, const Device& device);
// `algorithm`: as in plan().
Config configure_column_split(const Problem& problem, std::string_view algorithm,
                              const Device& device);
Config configure_strip(const Problem& problem);

}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
