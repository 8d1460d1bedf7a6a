// The plan of kernels for rows whose elements have a stride.

#include <algorithm>
#include <iterator>
#include <string>

#include "softmax/plan.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {

int pack_side_by_side(const Problem& problem) {
  const int pack = column_pack(element_bytes(problem));
  return problem.inner % pack == 0 && !problem.has_mask() && is_aligned(problem) ? pack : 1;
}

namespace {

// Threads of column side by side: they cover 256 bytes if possible, and at least 64, or 32 in small
// arrays.
constexpr int kColumnLanes = 32;
constexpr int kFewestColumnLanes = 8;
constexpr int kFewestColumnLanesOfSmall = 4;
constexpr double kSmallArrayBytes = 8 << 20;

// The threads that cover all rows side by side, as a power of two.
int lanes_of_inner(const Problem& problem) {
  return power_of_two_from(divide_up(problem.inner, pack_side_by_side(problem)), kColumnThreads);
}

// Whether the array is small enough for narrow tiles: it stays in the L2 cache, and its latency
// counts more than whole lines.
bool is_small(const Problem& problem) {
  // Sizes that stand for unknown ones have a product of more than 64 bits.
  double bytes = operands(problem) * element_bytes(problem);
  for (const std::int64_t size : {problem.outer, problem.columns, problem.inner}) {
    bytes *= static_cast<double>(size);
  }
  return bytes <= kSmallArrayBytes;
}

// The fewest threads side by side. If fewer cover all rows, the steps of neighbouring groups are
// neighbours in memory.
int fewest_lanes(const Problem& problem) {
  return std::min(is_small(problem) ? kFewestColumnLanesOfSmall : kFewestColumnLanes,
                  lanes_of_inner(problem));
}

// How `column` divides the axis among threads.
struct ColumnSizes {
  int held;             // elements of the axis per thread
  int threads;          // of a block
  std::int64_t groups;  // of threads that hold the axis

  bool fits_block(const Problem& problem) const {
    return groups * fewest_lanes(problem) <= threads;
  }
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
  const std::int64_t lanes = std::min(kColumnLanes, lanes_of_inner(problem));
  while (sizes.threads < kColumnThreads && sizes.groups * lanes > sizes.threads) sizes.threads *= 2;
  return sizes;
}

// column: the threads of a multiprocessor that suffice.
constexpr std::int64_t kEnoughThreads = 128;
// column_split: the threads of a block, the blocks of a multiprocessor, as many as run at a time,
// and the fewest elements of a part.
constexpr int kSplitThreads = 256;
constexpr std::int64_t kSplitBlocks = 2;
constexpr std::int64_t kLeastPartElements = 128;

// The tiles of rows of column, column_two_pass and column_split.
std::int64_t tiles_of(const Problem& problem, int lanes) {
  return problem.outer * divide_up(problem.inner, lanes * pack_side_by_side(problem));
}

// Sets the members of a configuration of column, column_two_pass or column_split whose blocks have
// config.threads, of which config.lanes side by side, for one of `parts` parts of the axis.
void configure_tiles(const Problem& problem, std::int64_t parts, Config& config) {
  config.layout = layout_of(problem);
  config.pack = pack_side_by_side(problem);
  config.rows = std::int64_t{config.lanes} * config.pack;
  const int groups = config.threads / config.lanes;
  const int slots = std::min(groups, config.threads / kWarpThreads);
  config.steps = divide_up(problem.columns, parts * groups);
  config.shared_bytes = state_bytes(problem) * (slots + 1) * config.rows;
  config.blocks = at_most_blocks(divide_up(problem.inner, config.rows) * parts);
  config.blocks_along_y = std::min(problem.outer, kMostBlocksBeyondX);
}

// column_two_pass and column_split: the threads side by side.
int passing_lanes(const Problem& problem) {
  return std::min(lanes_of_inner(problem), is_small(problem) ? kColumnLanes / 2 : 2 * kColumnLanes);
}

// column, for rows that cannot be read in packs: tiles are narrower if they would have more than
// kLinesBytes, so that several fit on a multiprocessor. Threads of several groups share an axis of
// more than kGroupSteps, and others so that a multiprocessor has at least kFewestLineThreads, as
// long as a group has kFewestGroupSteps.
constexpr int kLineBytes = 512;
constexpr std::int64_t kLinesBytes = 40 * 1024;
constexpr std::int64_t kMostLinesBytes = 80 * 1024;
constexpr int kGroupSteps = 32;
constexpr int kFewestGroupSteps = 4;
constexpr std::int64_t kFewestLineThreads = 384;

// column: the shared memory of the lines of a tile of `rows` rows.
std::int64_t lines_bytes(const Problem& problem, std::int64_t rows) {
  return operands(problem) * problem.columns * (rows + pack_elements(problem)) *
         element_bytes(problem);
}

int thread_rows(const Problem& problem) {
  return line_rows(element_bytes(problem), operands(problem));
}

// column: whether blocks copy their tiles to shared memory, in lines: if rows without a mask cannot
// be read in packs, but fill half of the narrowest tile, and this fits. A thread holds a few
// columns without lines, and so do the threads that a few tiles would leave idle.
bool takes_lines(const Problem& problem, const Device& device) {
  const std::int64_t least_rows = std::int64_t{thread_rows(problem)} * kWarpThreads;
  return !problem.masked && is_aligned(problem) &&
         problem.inner % column_pack(element_bytes(problem)) != 0 &&
         2 * problem.inner >= least_rows && lines_bytes(problem, least_rows) <= kMostLinesBytes &&
         problem.columns > packs_held(problem, kColumnHeld[0]) &&
         problem.outer * divide_up(problem.inner, least_rows) >= device.multiprocessors;
}

Config configure_lines(const Problem& problem, const Device& device) {
  Config config;
  config.layout = layout_of(problem);
  config.lines = true;
  config.pack = thread_rows(problem);
  std::int64_t groups = divide_up(problem.columns, kGroupSteps);
  const auto rows = [&](int lanes) { return std::int64_t{lanes} * config.pack; };
  const auto tiles = [&](int lanes) {
    return problem.outer * divide_up(problem.inner, rows(lanes));
  };
  config.lanes = kLineBytes / (config.pack * element_bytes(problem));
  while (config.lanes > kWarpThreads && (lines_bytes(problem, rows(config.lanes)) > kLinesBytes ||
                                         groups * config.lanes > kLineThreads ||
                                         tiles(config.lanes) < 2 * device.multiprocessors)) {
    config.lanes /= 2;
  }
  // If the tiles that run at a time have few threads, more groups share the axis.
  const std::int64_t room =
      device.multiprocessors * (static_cast<std::int64_t>(device.shared_bytes_per_block) /
                                lines_bytes(problem, rows(config.lanes)));
  const std::int64_t lanes_at_a_time = config.lanes * std::min(tiles(config.lanes), room);
  while (groups * lanes_at_a_time < kFewestLineThreads * device.multiprocessors &&
         2 * groups * config.lanes <= kLineThreads &&
         2 * groups * kFewestGroupSteps <= problem.columns) {
    groups *= 2;
  }
  config.threads = static_cast<int>(groups * config.lanes);
  config.rows = rows(config.lanes);
  config.steps = divide_up(problem.columns, groups);
  config.shared_bytes =
      state_bytes(problem) * (groups + 1) * config.rows + lines_bytes(problem, config.rows);
  config.blocks = at_most_blocks(divide_up(problem.inner, config.rows));
  config.blocks_along_y = std::min(problem.outer, kMostBlocksBeyondX);
  return config;
}

// Larger clusters, except those of 16 blocks, leave many multiprocessors without a block.
constexpr int kMostUnevenStripBlocks = 9;

std::int64_t strip_blocks(const Problem& problem) {
  const std::int64_t blocks =
      divide_up(problem.columns, kStripWarps * packs_held(problem, kStripSteps));
  return blocks > kMostUnevenStripBlocks ? kMostClusterBlocks : blocks;
}

std::int64_t strip_steps(const Problem& problem) {
  return divide_up(problem.columns, strip_blocks(problem) * kStripWarps);
}

}  // namespace

std::string refusal_of_column_two_pass(const Problem& problem) {
  return problem.inner != 1 ? "" : "does not support the last axis; 'strided' supports any axis";
}

std::string refusal_of_column(const Problem& problem) {
  if (std::string why = refusal_of_column_two_pass(problem); !why.empty()) return why;
  if (column_sizes(problem, true).fits_block(problem)) return "";
  return "cannot hold " + columns_text(problem) + "; 'column_two_pass' supports any length";
}

Config configure_column(const Problem& problem, const Device& device) {
  if (takes_lines(problem, device)) return configure_lines(problem, device);
  const ColumnSizes sizes = column_sizes(problem, /*holds_axis=*/true);
  Config config;
  config.threads = sizes.threads;
  config.packs = sizes.held;
  config.lanes = fewest_lanes(problem);
  while (sizes.groups * config.lanes * 2 <= config.threads &&
         config.lanes < lanes_of_inner(problem)) {
    config.lanes *= 2;
  }
  // Threads that all rows side by side leave without work hold fewer elements each, or are left out
  // where the others are enough.
  const std::int64_t tiles = tiles_of(problem, config.lanes);
  while (sizes.groups * config.lanes <= config.threads / 2 && config.threads > kWarpThreads &&
         tiles * config.threads / 2 >= kEnoughThreads * device.multiprocessors) {
    config.threads /= 2;
  }
  configure_tiles(problem, 1, config);
  return config;
}

Config configure_column_two_pass(const Problem& problem) {
  const ColumnSizes sizes = column_sizes(problem, /*holds_axis=*/false);
  Config config;
  config.threads = sizes.threads;
  config.packs = sizes.held;
  config.lanes = passing_lanes(problem);
  configure_tiles(problem, 1, config);
  return config;
}

// As many parts as run at a time, all blocks together: more states would take longer to combine.
std::int64_t column_parts(const Problem& problem, const Device& device) {
  const std::int64_t tiles = std::max<std::int64_t>(1, tiles_of(problem, passing_lanes(problem)));
  const std::int64_t most =
      std::max<std::int64_t>(1, divide_up(problem.columns, kLeastPartElements));
  return std::clamp<std::int64_t>(kSplitBlocks * device.multiprocessors / tiles, 1, most);
}

// If its blocks are at most as many as the multiprocessors.
bool prefers_column_split(const Problem& problem, const Device& device) {
  return column_parts(problem, device) > 1;
}

Config configure_column_split(const Problem& problem, std::string_view algorithm,
                              const Device& device) {
  Config config;
  config.threads = kSplitThreads;
  config.packs = kColumnHeld[2];
  config.lanes = passing_lanes(problem);
  // On a GPU with more multiprocessors than the nominal one, the workspace limits the parts.
  const std::int64_t room = workspace_bytes(problem, algorithm) / state_bytes(problem);
  config.slices = std::min(column_parts(problem, device), room);
  configure_tiles(problem, config.slices, config);
  config.workspace_bytes = problem.rows() * config.slices * state_bytes(problem);
  return config;
}

std::string refusal_of_strip(const Problem& problem, const Device& device) {
  if (std::string why = refusal_of_column_two_pass(problem); !why.empty()) return why;
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

// Where a block of column would cover less than 256 bytes side by side, clusters hold strips of the
// array, if it is at least three quarters of a strip wide: a half is faster to read twice. In small
// arrays narrow tiles of column are faster.
bool prefers_strip(const Problem& problem, const Device& device) {
  if (is_small(problem) && refusal_of_column(problem).empty()) return false;
  return column_sizes(problem, true).groups * kColumnLanes > kColumnThreads &&
         4 * problem.inner * element_bytes(problem) >= 3 * kStripBytes &&
         refusal_of_strip(problem, device).empty();
}

Config configure_strip(const Problem& problem) {
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

}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
