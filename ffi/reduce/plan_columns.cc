// The plan of `column` and `interleaved`: rows whose elements have a stride.

#include <algorithm>
#include <limits>
#include <numeric>
#include <string>

#include "reduce/plan.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace reduce {
namespace {

// The smallest part of a column that is worth a block of its own.
constexpr std::int64_t kSplitColumns = 256;
constexpr std::int64_t kInterleavedSplitColumns = 64;  // columns of few rows

// column, interleaved: the fewest packs per thread for which a row is split over the blocks of a
// cluster: as many as it loads at once, or more if there are enough blocks without the split.
constexpr std::int64_t kLeastPartLoads = kLoads;
constexpr std::int64_t kSomePartLoads = 6 * kLoads;  // if most multiprocessors have a block
constexpr std::int64_t kManyPartLoads = 8 * kLoads;  // if the blocks keep the GPU busy
// Threads per multiprocessor that have 40 KiB of loads in flight, which hides memory latency.
constexpr std::int64_t kBusyPartThreads = 640;
// The bytes of an array per multiprocessor for which a second launch is worth its time although
// most multiprocessors have a block without it.
constexpr std::int64_t kSecondLaunchShare = 512 * 1024;
// If some have none, how many times as many blocks make a second launch worth its time.
constexpr std::int64_t kSecondLaunchGain = 4;

// column: blocks get fewer lanes only if these still read this many contiguous bytes of a column,
// or this many elements, of which they read one at a time. With few columns, less is enough.
constexpr std::int64_t kLeastLaneBytes = 128;
constexpr std::int64_t kLeastLaneBytesOfFewColumns = 64;
constexpr int kLeastElementLanes = 8;
// They get fewer for more blocks only if a thread has at most this many columns: reading more of
// them is bound by memory, for which blocks of a cluster are as good and combine less.
constexpr std::int64_t kFewColumns = 64;

// column: the most elements per multiprocessor of an array whose rows are read one at a time by a
// thread, although a pack of them is contiguous. A thread computes the rows of a pack one after the
// other, and there are enough threads for so few elements. Moments take long to compute, sums do
// not.
constexpr std::int64_t kSmallShareOfMoments = 32 * 1024;
constexpr std::int64_t kSmallShareOfIndices = 2 * 1024;

// column, rows of few elements (short_column_kernel, whole_column_kernel): the most elements of a
// row. More are worth a cluster.
constexpr std::int64_t kMostShortColumns = 1024;
// Of arrays that column_kernel reads in packs, the most elements per multiprocessor for each byte
// of an element: the time of single elements grows with their number, that of packs with their
// bytes. For argmax and argmin, which compute longer, the most elements.
constexpr std::int64_t kShortColumnShare = 16 * 1024;
constexpr std::int64_t kShortColumnShareOfIndices = 96 * 1024;
// A thread reduces whole rows (whole_column_kernel) if they have at most as many columns as it
// loads at once, or if there are this many rows per multiprocessor.
constexpr std::int64_t kWholeColumnLoads = 32;
constexpr std::int64_t kWholeColumnRows = 160;
// The most columns of whole rows in arrays that column_kernel reads in packs. In arrays beyond the
// share above there must be some, so that enough loads are in flight, and sums, max and min have at
// most kWholeColumnLoads.
constexpr std::int64_t kMostWholeColumns = 100;
constexpr std::int64_t kMostWholeColumnsOfIndices = 256;
constexpr std::int64_t kLeastWholeColumns = 16;
// The fewest threads of a block with whole rows.
constexpr int kLeastWholeThreads = 64;
// short_column_kernel: the most columns of a thread, if there is room for more threads.
constexpr std::int64_t kShortColumnsOfThread = 20;
// Threads per multiprocessor for which there is room.
constexpr std::int64_t kShortColumnRoom = 1024;
// Lanes for a run of memory of at least 32 bytes, and fewer where multiprocessors would be idle.
constexpr int kLeastShortColumnLanes = 16;
constexpr int kFewestShortColumnLanes = 2;

// column: the most indices for argmax and argmin, of 32 bits; kAlgorithms states it.
constexpr std::int64_t kMostColumnIndices = std::numeric_limits<std::int32_t>::max();

// interleaved with a second launch: blocks per multiprocessor if a thread then has at most
// kManyPartLoads packs. More blocks take longer in both launches, unless the array is too large for
// the L2 cache and needs more loads in flight. Moments, which take long to compute, get more.
constexpr std::int64_t kFewPartsBlocks = 2;

// combine: parts per thread, which it loads all at once.
constexpr std::int64_t kCombineThreadParts = 4;

// interleaved: the longest interleaved_period(), which a block reads at a time. With longer ones,
// a column has enough rows for all lanes of `column`.
constexpr std::int64_t kInterleavedPacks = kInterleavedThreads;
// With this many whole packs in a column, `column` is faster, unless there are more columns.
constexpr std::int64_t kInterleavedWholePacks = 4;
constexpr std::int64_t kInterleavedColumns = 8192;
// With a whole pack for each lane of a warp, it is always as fast, and it takes masks.
constexpr std::int64_t kInterleavedWarpPacks = kWarpLanes;
// The shortest run of memory that is worth a block.
constexpr std::int64_t kInterleavedRunBytes = 16 * 1024;
// Packs that a block reads at a time, about.
constexpr std::int64_t kInterleavedStride = 256;
// The most elements of a run, which threads count in 32 bits.
constexpr std::int64_t kMostInterleavedRun = std::numeric_limits<std::int32_t>::max();

// A partial result in shared memory, where an index has 32 bits.
std::int64_t block_partial_bytes(const Problem& problem) {
  return is_arg(problem.function) ? 2 * accumulator_bytes(problem) : partial_bytes(problem);
}

// The number of packs after which a column begins at the start of a pack again.
std::int64_t interleaved_period(const Problem& problem) {
  return problem.inner / std::gcd(problem.inner, pack_of(problem));
}

// The packs that a block of `interleaved` reads at a time, and the shared memory to combine them.
std::int64_t interleaved_stride(const Problem& problem) {
  const std::int64_t period = interleaved_period(problem);
  return period * std::max<std::int64_t>(1, kInterleavedStride / period);
}

std::int64_t interleaved_bytes(const Problem& problem) {
  return interleaved_partials_bytes(static_cast<int>(interleaved_stride(problem)),
                                    static_cast<int>(pack_of(problem)),
                                    block_partial_bytes(problem));
}

bool keeps_busy(std::int64_t blocks, int threads, const Device& device) {
  return blocks * threads >= kBusyPartThreads * device.multiprocessors;
}

// Whether most multiprocessors have a block.
bool has_enough_blocks(std::int64_t blocks, const Device& device) {
  return 4 * blocks >= std::int64_t{3} * device.multiprocessors;
}

// The rows that a thread of `column` reads at a time.
int pack_of_columns(const Problem& problem, const Device& device) {
  const int pack = column_pack(problem.function, bytes_of(problem.dtype), problem.masked);
  if (problem.inner % pack != 0 || !is_aligned(problem)) return 1;
  const std::int64_t small_share = problem.function == Function::kMeanAndVar ? kSmallShareOfMoments
                                   : is_arg(problem.function)                ? kSmallShareOfIndices
                                                                             : 0;
  const bool is_small = problem.rows() * problem.columns <= small_share * device.multiprocessors;
  return is_small ? 1 : pack;
}

int least_column_lanes(const Problem& problem, int pack, std::int64_t least_bytes) {
  return pack == 1 ? kLeastElementLanes
                   : static_cast<int>(least_bytes / (pack * bytes_of(problem.dtype)));
}

// Up to 32 lanes along `inner`, so that loads are coalesced. Fewer lanes, for more blocks, if
// multiprocessors would be idle, and a thread would have more columns than it loads at once, but
// not many. More lanes, for further rows, if the remaining threads per row still load all columns
// at once, or keep the GPU busy: there is less to combine then.
int column_lanes(const Problem& problem, int pack, const Device& device) {
  const std::int64_t packs = problem.inner / pack;
  const auto loads_all = [&](int lanes) {
    return kLoads * (kColumnThreads / lanes) >= problem.columns;
  };
  const auto suffices = [&](int lanes) {
    const std::int64_t depths = kColumnThreads / lanes;
    return loads_all(lanes) ||
           keeps_busy(problem.outer * packs * depths / kColumnThreads, kColumnThreads, device);
  };
  int lanes = power_of_two_from(packs, kWarpLanes);
  while (!loads_all(lanes) &&
         lanes > least_column_lanes(problem, pack, kLeastLaneBytesOfFewColumns) &&
         problem.columns <= kFewColumns * (2 * kColumnThreads / lanes) &&
         !has_enough_blocks(divide_up(problem.outer * packs, lanes), device)) {
    lanes /= 2;
  }
  while (lanes < kColumnThreads && suffices(2 * lanes)) lanes *= 2;
  return lanes;
}

// column, interleaved: whether to launch `blocks` blocks in place of half as many, where the blocks
// of a cluster reduce parts of the same rows. `loads`: packs that a thread then loads. `resident`:
// how many such blocks are resident at a time. The blocks of one wave finish together.
bool parts_are_worth_it(std::int64_t blocks, std::int64_t loads, std::int64_t resident, int threads,
                        const Device& device) {
  const bool is_idle = !has_enough_blocks(blocks / 2, device);
  if (blocks > resident || loads < (is_idle ? kLeastPartLoads : kSomePartLoads)) return false;
  return loads >= kManyPartLoads || !keeps_busy(blocks / 2, threads, device);
}

// Whether a second launch is worth its time: the blocks of the clusters do not keep the GPU busy,
// and are fewer than the `in_workspace` blocks that would write partials for it.
bool clusters_are_too_few(const Problem& problem, int cluster, std::int64_t blocks,
                          std::int64_t in_workspace, int threads, const Device& device) {
  if (cluster == 1 || blocks >= in_workspace || keeps_busy(blocks, threads, device)) return false;
  if (!has_enough_blocks(blocks, device)) return in_workspace >= kSecondLaunchGain * blocks;
  return problem.rows() * row_bytes(problem) >= kSecondLaunchShare * device.multiprocessors;
}

void configure_combine(const Problem& problem, Config* config) {
  config->last_threads = kCombineThreads;
  const std::int64_t lanes = divide_up(config->parts, kCombineThreadParts);
  config->last_lanes = lanes > kWarpLanes ? kCombineThreads : power_of_two_from(lanes, kWarpLanes);
  config->workspace = problem.rows() * config->parts * partial_bytes(problem);
}

// Splits rows over the blocks of a cluster, if that is worth it. If the largest cluster is not
// enough, blocks get fewer lanes and so more threads per row. Returns false if there are no
// clusters or a second launch is better, which combines the partials of `in_workspace` blocks.
bool configure_column_cluster(const Problem& problem, std::int64_t in_workspace,
                              const Device& device, Config* config) {
  if (!device.runs_hopper_code()) return false;
  const std::int64_t packs = problem.outer * (problem.inner / config->pack);
  const auto blocks_of = [&](int lanes, int cluster) { return divide_up(packs, lanes) * cluster; };
  const auto is_worth_it = [&](int lanes, int cluster) {
    const std::int64_t resident =
        resident_column_blocks(problem, config->pack, lanes, cluster, device);
    const std::int64_t loads = problem.columns / (cluster * (kColumnThreads / lanes));
    return parts_are_worth_it(blocks_of(lanes, cluster), loads, resident, kColumnThreads, device);
  };
  int cluster = 1;
  while (cluster < kMostReducingBlocks && is_worth_it(config->lanes, 2 * cluster)) cluster *= 2;
  const int least_lanes = least_column_lanes(problem, config->pack, kLeastLaneBytes);
  int lanes = config->lanes;
  if (cluster == kMostReducingBlocks) {
    while (lanes > least_lanes && is_worth_it(lanes / 2, cluster)) lanes /= 2;
  }
  const std::int64_t blocks = blocks_of(lanes, cluster);
  if (clusters_are_too_few(problem, cluster, blocks, in_workspace, kColumnThreads, device)) {
    return false;
  }
  config->lanes = lanes;
  config->cluster = cluster;
  config->parts = cluster;
  return true;
}

// The same for runs.
bool configure_interleaved_cluster(const Problem& problem, std::int64_t in_workspace,
                                   const Device& device, Config* config) {
  if (!device.runs_hopper_code()) return false;
  const std::int64_t steps = problem.columns * problem.inner / (config->stride * pack_of(problem));
  const auto bytes_with = [&](int cluster) {
    return interleaved_bytes(problem) +
           cluster_parts_bytes(problem.inner, cluster, block_partial_bytes(problem));
  };
  const auto is_worth_it = [&](int cluster) {
    const auto most_bytes = static_cast<std::int64_t>(device.shared_bytes_per_block);
    if (bytes_with(cluster) > most_bytes) return false;
    const std::int64_t resident =
        resident_interleaved_blocks(problem, config->threads, bytes_with(cluster), cluster, device);
    return parts_are_worth_it(problem.outer * cluster, steps / cluster, resident, config->threads,
                              device);
  };
  int cluster = 1;
  while (cluster < kMostReducingBlocks && is_worth_it(2 * cluster)) cluster *= 2;
  const std::int64_t blocks = problem.outer * cluster;
  if (clusters_are_too_few(problem, cluster, blocks, in_workspace, config->threads, device)) {
    return false;
  }
  config->shared_bytes = bytes_with(cluster);
  config->cluster = cluster;
  config->parts = cluster;
  return true;
}

// Whether a thread reduces whole rows in place of parts of them.
bool reduces_whole_columns(const Problem& problem, const Device& device) {
  return problem.columns <= kWholeColumnLoads ||
         problem.rows() >= kWholeColumnRows * device.multiprocessors;
}

// Whether short_column_kernel or whole_column_kernel takes the problem, and is faster than
// column_kernel.
bool is_short(const Problem& problem, const Device& device) {
  const auto most = std::numeric_limits<std::int32_t>::max();
  const Function function = problem.function;
  if (function == Function::kProd || function == Function::kMeanAndVar || problem.masked ||
      !(is_16_bit_float(problem.dtype) || problem.dtype == DType::kFloat32) ||
      problem.columns > kMostShortColumns || problem.inner < kWarpLanes ||
      problem.columns * problem.inner > most || problem.rows() > most) {
    return false;
  }
  if (!is_aligned(problem) || problem.inner % pack_of(problem) != 0) return true;
  const std::int64_t share =
      is_arg(function) ? kShortColumnShareOfIndices : kShortColumnShare * bytes_of(problem.dtype);
  const bool is_small = problem.rows() * problem.columns <= share * device.multiprocessors;
  if (!reduces_whole_columns(problem, device)) return is_small;
  const std::int64_t most_columns = is_arg(function) ? kMostWholeColumnsOfIndices
                                    : is_small       ? kMostWholeColumns
                                                     : kWholeColumnLoads;
  return problem.columns <= most_columns && (is_small || problem.columns >= kLeastWholeColumns);
}

// whole_column_kernel. Blocks of half as many threads are faster if not all are resident at a time.
void configure_whole_column(const Problem& problem, const Device& device, Config* config) {
  const std::int64_t threads = problem.rows() / (is_16_bit_float(problem.dtype) ? 2 : 1);
  const bool is_one_wave = threads <= kShortColumnRoom * device.multiprocessors;
  config->column_kernel = ColumnKernel::kWholeColumn;
  config->threads = is_one_wave ? kColumnThreads : kColumnThreads / 2;
  while (config->threads > kLeastWholeThreads &&
         threads < config->threads * std::int64_t{device.multiprocessors}) {
    config->threads /= 2;
  }
  config->lanes = config->threads;
}

void configure_short_column(const Problem& problem, const Device& device, Config* config) {
  const auto tiles = [&] { return problem.outer * divide_up(problem.inner, config->lanes); };
  config->column_kernel = ColumnKernel::kShortColumn;
  config->lanes = kWarpLanes;
  config->threads = kColumnThreads;
  while ((config->lanes > kLeastShortColumnLanes && !has_enough_blocks(tiles(), device)) ||
         (config->lanes > kFewestShortColumnLanes && 4 * tiles() < device.multiprocessors)) {
    config->lanes /= 2;
  }
  while (config->threads < kMostShortColumnThreads &&
         problem.columns > kShortColumnsOfThread * (config->threads / config->lanes) &&
         tiles() * 2 * config->threads <= kShortColumnRoom * device.multiprocessors) {
    config->threads *= 2;
  }
}

}  // namespace

std::string refusal_of_column(const Problem& problem) {
  if (is_arg(problem.function) && problem.columns > kMostColumnIndices) {
    return "computes argmax and argmin only of axes of fewer than 2^31 elements";
  }
  return "";
}

std::int64_t column_parts(const Problem& problem) {
  return std::min(kMostParts, divide_up(problem.columns, kSplitColumns));
}

void configure_column(const Problem& problem, std::int64_t workspace, const Device& device,
                      Config* config) {
  if (is_of_moments_column(problem, device)) {
    return configure_moments_column(problem, workspace, device, config);
  }
  if (is_short(problem, device)) {
    if (reduces_whole_columns(problem, device)) {
      return configure_whole_column(problem, device, config);
    }
    return configure_short_column(problem, device, config);
  }
  config->pack = pack_of_columns(problem, device);
  const std::int64_t packs_per_outer = problem.inner / config->pack;
  config->threads = kColumnThreads;
  config->lanes = column_lanes(problem, config->pack, device);
  const std::int64_t resident =
      resident_column_blocks(problem, config->pack, config->lanes, 1, device);
  const std::int64_t tiles = divide_up(problem.outer * packs_per_outer, config->lanes);
  const std::int64_t room = workspace / partial_bytes(problem) / problem.rows();
  const std::int64_t parts =
      std::max<std::int64_t>(1, std::min({resident / tiles, column_parts(problem), room}));
  if (configure_column_cluster(problem, tiles * parts, device, config) || parts == 1) return;
  config->parts = parts;
  configure_combine(problem, config);
}

std::string refusal_of_interleaved(const Problem& problem, const Device& device) {
  if (problem.inner <= 1) {  // or 0 for an array without elements
    return "does not support rows that are contiguous in memory; 'row' does";
  }
  if (problem.masked) return "does not support a mask; 'column' does";
  if (problem.outer > std::numeric_limits<std::int32_t>::max() / kMostReducingBlocks ||
      problem.columns * problem.inner > kMostInterleavedRun) {
    return "supports less than 2^28 as the product of the dimensions before the axis, and less "
           "than 2^31 as that of the others; 'column' supports any size";
  }
  if (interleaved_period(problem) > kInterleavedPacks ||
      interleaved_bytes(problem) > static_cast<std::int64_t>(device.shared_bytes_per_block)) {
    return "does not support rows whose elements are " + std::to_string(problem.inner) +
           " elements apart; 'column' does";
  }
  return "";
}

bool prefers_interleaved(const Problem& problem) {
  if (problem.columns * problem.inner * bytes_of(problem.dtype) < kInterleavedRunBytes)
    return false;
  const std::int64_t packs = problem.inner / pack_of(problem);
  const bool has_whole = is_aligned(problem) && problem.inner % pack_of(problem) == 0;
  if (!has_whole || packs < kInterleavedWholePacks) return true;
  return packs < kInterleavedWarpPacks && problem.columns > kInterleavedColumns;
}

std::int64_t interleaved_parts(const Problem& problem) {
  return std::min(kMostParts, divide_up(problem.columns, kInterleavedSplitColumns));
}

void configure_interleaved(const Problem& problem, std::int64_t workspace, const Device& device,
                           Config* config) {
  config->stride = static_cast<int>(interleaved_stride(problem));
  config->threads = static_cast<int>(divide_up(config->stride, kWarpLanes) * kWarpLanes);
  config->shared_bytes = interleaved_bytes(problem);
  const std::int64_t resident =
      resident_interleaved_blocks(problem, config->threads, config->shared_bytes, 1, device);
  const std::int64_t room = workspace / partial_bytes(problem) / problem.rows();
  const std::int64_t parts = std::max<std::int64_t>(
      1, std::min({resident / problem.outer, interleaved_parts(problem), room}));
  if (configure_interleaved_cluster(problem, problem.outer * parts, device, config)) return;
  if (parts == 1) return;
  const std::int64_t steps =
      divide_up(problem.columns * problem.inner, std::int64_t{config->stride} * pack_of(problem));
  const std::int64_t few =
      std::max<std::int64_t>(2, kFewPartsBlocks * device.multiprocessors / problem.outer);
  const bool needs_all = problem.function == Function::kMeanAndVar || steps > kManyPartLoads * few;
  config->parts = needs_all ? parts : std::min(parts, few);
  configure_combine(problem, config);
}

}  // namespace reduce
}  // namespace JAX_GPUOPS_NAMESPACE
