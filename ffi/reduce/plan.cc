#include <algorithm>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

#include "core/integer.h"
#include "reduce/reduce.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace reduce {
namespace {

constexpr std::int64_t kPackBytes = 16;
constexpr int kWarpLanes = 32;

// multiple: one block reads a shorter row in a few microseconds, so several are not worth it.
constexpr std::int64_t kMultipleBytes = 256 * 1024;
// With this many rows per multiprocessor, one block per row keeps all multiprocessors busy.
constexpr std::int64_t kMultipleRows = 2;
// The smallest part of a row that is worth a block of its own.
constexpr std::int64_t kSplitBytes = 16 * 1024;
constexpr std::int64_t kSplitColumns = 256;
constexpr std::int64_t kInterleavedSplitColumns = 64;  // columns of few rows
constexpr std::int64_t kMaxSplits = 2048;

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
// The most elements per multiprocessor of an array whose rows are read one at a time by a thread,
// although a pack of them is contiguous. A thread computes the rows of a pack one after the other,
// and there are enough threads for so few elements. Moments take long to compute, sums do not.
constexpr std::int64_t kSmallShareOfMoments = 32 * 1024;
constexpr std::int64_t kSmallShareOfIndices = 2 * 1024;

// column: the most indices for argmax and argmin, of 32 bits; kAlgorithms states it.
constexpr std::int64_t kMostColumnIndices = std::numeric_limits<std::int32_t>::max();

// combine: parts per thread, which it loads all at once.
constexpr std::int64_t kCombineThreadParts = 4;

// row: the most packs per thread, if each multiprocessor then has enough threads to keep memory
// busy. With fewer threads per row there is less to combine; and if rows share packs with their
// neighbours, fewer threads wait while two of them read the edges, which is slow.
constexpr std::int64_t kMostThreadPacks = 8;
constexpr std::int64_t kMostThreadPacksWithEdges = 16;
constexpr std::int64_t kBusyThreads = 128;
// The same for rows of at most kShortRowPacks whole packs: with fewer threads per row, the lanes of
// a warp read with a larger stride, which keeps memory less busy. Moments take longer to combine.
constexpr std::int64_t kMostThreadPacksOfShortRows = 4;
constexpr std::int64_t kShortRowPacks = 32;
constexpr std::int64_t kShortRowPacksOfMoments = 8;
// The fewest packs per thread if a row has several warps: as many as a thread loads at once. Within
// a warp, more threads cost less.
constexpr std::int64_t kLeastThreadPacks = 4;

// About the number of resident threads per multiprocessor. If there are more, blocks run in waves:
// a block of several rows makes room for the next only when its last row is done, so rows of more
// than a warp then get a block each. If all blocks are resident, fewer blocks start sooner.
constexpr std::int64_t kResidentThreads = 1024;

// held: threads per block, unless a row has more, or some multiprocessors would get no block.
constexpr int kHeldThreads = 256;
// Rows of so few packs have fewer packs per thread: else the lanes of a warp would read with a
// larger stride, which keeps memory less busy.
constexpr std::int64_t kShortHeldPacks = 8;
constexpr std::int64_t kMostPacksOfShortHeldRows = 2;

// staged: the longest row that it is chosen for: longer rows keep a group of lanes busy, and take
// much shared memory.
constexpr std::int64_t kStagedBytes = 512;
// With fewer rows per multiprocessor, `held`, with several threads per row, is faster than a lane
// per row, unless rows have few elements.
constexpr std::int64_t kLeastStagedRows = 128;
constexpr std::int64_t kFewStagedColumns = 32;
// The longest row whose tile fits every GPU's shared memory; kAlgorithms states it.
constexpr std::int64_t kMostStagedBytes = 1024;
// The size of a warp's tile, if rows are short and many: the tiles of all warps of a multiprocessor
// fit in shared memory.
constexpr std::int64_t kStagedTileBytes = 3328;
// Warps per multiprocessor that hide memory latency; tiles become larger only beyond these.
constexpr std::int64_t kBusyStagedWarps = 16;
// About the shared memory per block, so that several blocks are resident on a multiprocessor.
constexpr std::int64_t kStagedBlockBytes = 48 * 1024;

// cluster: one block reads a shorter row fast enough; a longer row is bound by memory bandwidth.
constexpr std::int64_t kLeastClusterBytes = 64 * 1024;
constexpr std::int64_t kClusterBytes = 256 * 1024;
// Threads count packs and columns in 32 bits; kAlgorithms states the limit.
constexpr std::int64_t kMostClusterColumns = std::int64_t{1} << 30;
// Packs per thread: with more, fewer blocks start and exchange partial results.
constexpr std::int64_t kClusterThreadPacks = 2;

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

std::int64_t bytes_of(DType dtype) { return static_cast<std::int64_t>(info(dtype).bytes); }

std::int64_t row_bytes(const Problem& problem) { return problem.columns * bytes_of(problem.dtype); }

std::int64_t expected_rows(const Problem& problem) {
  return JAX_GPUOPS_NAMESPACE::expected_rows(problem.batch_invariant, problem.rows(),
                                             row_bytes(problem));
}

// Problems that kernels take

bool is_float(DType dtype) { return dtype >= DType::kFloat16 && dtype <= DType::kFloat64; }

bool is_integer(DType dtype) { return dtype >= DType::kInt8 && dtype <= DType::kUInt64; }

bool is_16_bit_float(DType dtype) { return dtype == DType::kFloat16 || dtype == DType::kBFloat16; }

void check(const Problem& problem) {
  const auto [function, dtype, result] =
      std::tuple(problem.function, problem.dtype, problem.result);
  for (const DType each : {dtype, result}) {
    if (!is_float(each) && !is_integer(each)) {
      throw std::invalid_argument("reduction kernels do not support dtype " +
                                  std::string(info(each).name));
    }
  }
  bool right = dtype == result;
  if (is_arg(function)) {
    right = result == DType::kInt32 || result == DType::kInt64;
  } else if (function == Function::kSum || function == Function::kProd) {
    right |= is_16_bit_float(dtype) && result == DType::kFloat32;
    right |= is_integer(dtype) && is_integer(result);
  } else if (function == Function::kMeanAndVar) {
    right &= is_float(dtype);
    right |= is_16_bit_float(dtype) && result == DType::kFloat32;
  }
  if (!right) {
    throw std::invalid_argument("reduction kernels do not compute a result of dtype " +
                                std::string(info(result).name) + " from x of dtype " +
                                std::string(info(dtype).name));
  }
  if (problem.masked && (is_arg(function) || !is_float(dtype))) {
    throw std::invalid_argument(
        "reduction kernels support a mask only for floating-point x, and not for argmax and "
        "argmin; apply the mask to x first");
  }
}

// Partial results

// The bytes of the type that a kernel computes in: see dispatch_reduction().
std::int64_t accumulator_bytes(const Problem& problem) {
  const bool wide = bytes_of(problem.dtype) == 8;
  const bool modular = problem.function == Function::kSum || problem.function == Function::kProd;
  if (is_float(problem.dtype) || !modular) return wide ? 8 : 4;
  return bytes_of(problem.dtype) == 4 && bytes_of(problem.result) <= 4 ? 4 : 8;
}

// A partial result in the workspace: a value, a value and its index, or Moments.
std::int64_t partial_bytes(const Problem& problem) {
  if (problem.function == Function::kMeanAndVar) return 4 * accumulator_bytes(problem);
  return is_arg(problem.function) ? 16 : accumulator_bytes(problem);
}

// The same in shared memory, where an index has 32 bits.
std::int64_t block_partial_bytes(const Problem& problem) {
  return is_arg(problem.function) ? 2 * accumulator_bytes(problem) : partial_bytes(problem);
}

// The size of a partial result in a slot: words of 8 bytes, each with a tag of 8 bytes.
std::int64_t slot_bytes(const Problem& problem) {
  return 16 * divide_up(partial_bytes(problem), 8);
}

std::int64_t multiple_partials(const Problem& problem) {
  return std::min(kMaxSplits, divide_up(row_bytes(problem), kSplitBytes));
}

std::int64_t column_partials(const Problem& problem) {
  return std::min(kMaxSplits, divide_up(problem.columns, kSplitColumns));
}

std::int64_t interleaved_partials(const Problem& problem) {
  return std::min(kMaxSplits, divide_up(problem.columns, kInterleavedSplitColumns));
}

// Each launch of a ladder step leaves one element per row and block.
std::int64_t step_partials(const Problem& problem, Algorithm algorithm) {
  const std::int64_t block_columns = step_columns(algorithm);
  std::int64_t total = 0;
  for (std::int64_t left = divide_up(problem.columns, block_columns); left > 1;
       left = divide_up(left, block_columns)) {
    total += left;
  }
  return total;
}

// What each algorithm takes

std::int64_t pack_of(const Problem& problem) { return kPackBytes / bytes_of(problem.dtype); }

bool is_aligned(const Problem& problem) { return problem.alignment >= kPackBytes; }

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

// Whether rows begin and end at the boundaries of packs.
bool has_whole_packs(const Problem& problem) {
  return is_aligned(problem) && problem.columns % pack_of(problem) == 0;
}

// held: whether rows are read element by element. An element is as much work as a pack, but short
// rows take no longer if the GPU has a resident thread for each element.
bool holds_elements(const Problem& problem, const Device& device) {
  return !has_whole_packs(problem) && holds_edges(problem.dtype) &&
         problem.columns <= kHeldElements * kMostElementLanes &&
         problem.rows() * problem.columns <=
             std::int64_t{device.multiprocessors} * device.threads_per_multiprocessor;
}

// held: the fewest columns. Rows with edges need a whole pack between them at any alignment.
std::int64_t least_held_columns(const Problem& problem, const Device& device) {
  return has_whole_packs(problem) || holds_elements(problem, device) ? 0 : 2 * pack_of(problem) - 1;
}

// held: the most rows. Threads count them in 32 bits, those of the last block included. Rows of
// more than 16 packs have a warp or more, and so may have a block each.
std::int64_t most_held_rows(const Problem& problem) {
  if (row_bytes(problem) > kPackBytes * kWarpLanes / 2) {
    return std::numeric_limits<std::int32_t>::max();  // the most blocks of a grid
  }
  return std::int64_t{std::numeric_limits<std::uint32_t>::max()} - kMostHeldThreads;
}

std::int64_t most_held_columns(const Problem& problem) {
  return pack_of(problem) * kHeldPacks * kMostHeldThreads;
}

// Why an algorithm cannot take a problem; empty if it can.
std::string refusal(Algorithm algorithm, const Problem& problem, const Device& device) {
  const bool takes_apart = algorithm == Algorithm::kColumn || algorithm == Algorithm::kInterleaved;
  if (!takes_apart && problem.inner != 1) {
    return "requires rows that are contiguous in memory, but their elements are " +
           std::to_string(problem.inner) + " elements apart; 'column' supports these";
  }
  if (is_step(algorithm)) {
    if (!is_value(problem.function)) {
      return "computes only sum, prod, max and min; 'multiple', 'row' and 'column' compute all "
             "functions";
    }
    if (problem.masked) return "does not support a mask; 'multiple', 'row' and 'column' do";
  }
  switch (algorithm) {
    case Algorithm::kHeld:
      if (problem.masked) return "does not support a mask; 'row' does";
      if (problem.function == Function::kMeanAndVar) {
        return "does not compute mean and variance; 'row' does";
      }
      if (const auto most = most_held_rows(problem); problem.rows() > most) {
        return "supports at most " + std::to_string(most) + " rows of " +
               std::to_string(row_bytes(problem)) + " bytes; 'row' supports any number";
      }
      if (!has_whole_packs(problem) && !holds_edges(problem.dtype)) {
        return "requires rows of a multiple of 16 bytes, in an array aligned to 16 bytes, unless x "
               "is float32, float16 or bfloat16; 'row' does not";
      }
      if (const auto least = least_held_columns(problem, device); problem.columns < least) {
        return "supports rows of fewer than " + std::to_string(least) +
               " elements only in smaller arrays; 'row' supports any size";
      }
      if (problem.columns > most_held_columns(problem)) {
        return "supports rows of at most " + std::to_string(most_held_columns(problem)) +
               " elements, got " + std::to_string(problem.columns) + "; 'row' supports any length";
      }
      return "";
    case Algorithm::kStaged:
      if (problem.masked) return "does not support a mask; 'row' does";
      if (!is_aligned(problem)) return "requires an array aligned to 16 bytes; 'row' does not";
      if (row_bytes(problem) > kMostStagedBytes) {
        return "supports rows of at most " + std::to_string(kMostStagedBytes) + " bytes, got " +
               std::to_string(row_bytes(problem)) + "; 'row' supports any length";
      }
      return "";
    case Algorithm::kCluster:
      if (!device.runs_hopper_code()) return "requires a GPU of compute capability 9.0";
      if (problem.rows() > std::numeric_limits<std::int32_t>::max() / kMostReducingBlocks) {
        return "supports fewer than 2^28 rows; 'row' supports any number";
      }
      if (problem.columns > kMostClusterColumns) {
        return "supports rows of at most 2^30 elements; 'multiple' supports any length";
      }
      return "";
    case Algorithm::kColumn:
      if (is_arg(problem.function) && problem.columns > kMostColumnIndices) {
        return "computes argmax and argmin only of axes of fewer than 2^31 elements";
      }
      return "";
    case Algorithm::kInterleaved:
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
    default:
      return "";
  }
}

// Configurations

// How many threads should reduce a row.
std::int64_t row_threads(const Problem& problem, const Device& device) {
  const std::int64_t packs = divide_up(problem.columns, pack_of(problem));
  const std::int64_t busy = kBusyThreads * device.multiprocessors;
  const std::int64_t short_row =
      problem.function == Function::kMeanAndVar ? kShortRowPacksOfMoments : kShortRowPacks;
  std::int64_t threads = divide_up(packs, !has_whole_packs(problem) ? kMostThreadPacksWithEdges
                                          : packs > short_row       ? kMostThreadPacks
                                                                    : kMostThreadPacksOfShortRows);
  while (threads < packs && expected_rows(problem) * threads < busy) threads *= 2;
  const std::int64_t most = std::max<std::int64_t>(kWarpLanes, divide_up(packs, kLeastThreadPacks));
  return std::min(threads, most);
}

// Threads of a block that reduces one row: whole warps.
int block_threads(const Problem& problem, const Device& device) {
  const std::int64_t warps = divide_up(row_threads(problem, device), kWarpLanes);
  return static_cast<int>(std::min<std::int64_t>(warps * kWarpLanes, kMultipleThreads));
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

void configure_step(const Problem& problem, Algorithm algorithm, std::int64_t workspace,
                    Config* config) {
  config->threads = kLadderThreads;
  config->parts = divide_up(problem.columns, step_columns(algorithm));
  config->last_threads = config->parts > 1 ? kLadderThreads : 0;
  config->workspace = problem.rows() * step_partials(problem, algorithm) * partial_bytes(problem);
  if (config->workspace > workspace) {
    throw std::invalid_argument("the workspace is too small");
  }
}

void configure_row(const Problem& problem, const Device& device, Config* config) {
  const int threads = power_of_two_from(row_threads(problem, device), kMultipleThreads);
  const bool takes_turns =
      expected_rows(problem) * threads > kResidentThreads * device.multiprocessors;
  if (threads > kRowThreads || (threads > kWarpLanes && takes_turns)) {
    config->threads = block_threads(problem, device);
    return;
  }
  config->threads = kRowThreads;
  config->lanes = has_whole_packs(problem) ? threads : std::max(threads, 2);  // one per edge
}

void configure_held(const Problem& problem, const Device& device, Config* config) {
  const bool by_elements = holds_elements(problem, device);
  config->pack = by_elements ? 1 : static_cast<int>(pack_of(problem));
  config->edges = !by_elements && !has_whole_packs(problem);
  const std::int64_t packs = problem.columns / config->pack;
  const std::int64_t busy = kBusyThreads * device.multiprocessors;
  const std::int64_t most = by_elements                ? kHeldElements
                            : packs <= kShortHeldPacks ? kMostPacksOfShortHeldRows
                                                       : kHeldPacks;
  const std::int64_t lanes = divide_up(packs, most);
  // Within a warp, a power of two, and enough for the edges; else whole warps.
  config->lanes = lanes <= kWarpLanes ? power_of_two_from(lanes, kWarpLanes)
                                      : static_cast<int>(divide_up(lanes, kWarpLanes) * kWarpLanes);
  if (config->edges) {
    config->lanes =
        std::max(config->lanes, power_of_two_from(2 * pack_of(problem) - 2, kWarpLanes));
  }
  // More threads load faster, but only those of one warp combine fast. A thread that reads elements
  // runs the code for kHeldElements of them, even if it has fewer.
  while (!by_elements && config->lanes < std::min<std::int64_t>(packs, kWarpLanes) &&
         expected_rows(problem) * config->lanes < busy) {
    config->lanes *= 2;
  }
  const bool has_one = config->edges && is_arg(problem.function) && packs <= config->lanes;
  config->packs = by_elements ? kHeldElements : has_one ? 1 : kHeldPacks;
  // Blocks are large even if a row needs few threads, since many small blocks take long to start;
  // they are smaller if some multiprocessors would get no block.
  int rows = std::max(1, kHeldThreads / config->lanes);
  while (rows > 1 && rows * config->lanes > kWarpLanes &&
         expected_rows(problem) < device.multiprocessors * rows) {
    rows /= 2;
  }
  config->threads = rows * config->lanes;
}

void configure_staged(const Problem& problem, const Device& device, Config* config) {
  const std::int64_t warp_rows_bytes = kWarpLanes * row_bytes(problem);
  const std::int64_t most = std::max<std::int64_t>(1, kStagedTileBytes / warp_rows_bytes);
  const std::int64_t busy = kBusyStagedWarps * device.multiprocessors;
  config->lane_rows = static_cast<int>(
      std::min(most, std::max<std::int64_t>(1, problem.rows() / (kWarpLanes * busy))));
  const std::int64_t tiles = divide_up(problem.rows(), kWarpLanes * config->lane_rows);
  const std::int64_t tile_bytes = config->lane_rows * warp_rows_bytes;
  const std::int64_t warps = std::max<std::int64_t>(
      1, std::min<std::int64_t>({kStagedThreads / kWarpLanes, kStagedBlockBytes / tile_bytes,
                                 tiles / device.multiprocessors}));
  config->threads = static_cast<int>(warps * kWarpLanes);
  config->shared_bytes = warps * tile_bytes;
  config->blocks = divide_up(tiles, warps);
}

void configure_cluster(const Problem& problem, Config* config) {
  const std::int64_t packs = divide_up(problem.columns, pack_of(problem));
  const std::int64_t threads = divide_up(packs, kClusterThreadPacks);
  config->cluster =
      std::max(2, power_of_two_from(divide_up(threads, kClusterThreads), kMostReducingBlocks));
  config->threads =
      std::max(kWarpLanes, power_of_two_from(divide_up(threads, config->cluster), kClusterThreads));
}

void configure_combine(const Problem& problem, Config* config) {
  config->last_threads = kCombineThreads;
  const std::int64_t lanes = divide_up(config->parts, kCombineThreadParts);
  config->last_lanes = lanes > kWarpLanes ? kCombineThreads : power_of_two_from(lanes, kWarpLanes);
  config->workspace = problem.rows() * config->parts * partial_bytes(problem);
}

void configure_multiple(const Problem& problem, std::int64_t workspace, const Device& device,
                        Config* config) {
  // One wave of blocks for all rows: they finish together, and there are few partials.
  const std::int64_t resident = resident_multiple_blocks(problem, device);
  const std::int64_t room = workspace / slot_bytes(problem) / problem.rows();
  const std::int64_t wanted =
      std::min(resident / expected_rows(problem), multiple_partials(problem));
  if (problem.batch_invariant && wanted > std::max<std::int64_t>(1, room)) {
    throw std::invalid_argument("the workspace is too small");
  }
  const std::int64_t parts = std::min(wanted, room);
  if (parts <= 1) {
    config->threads = block_threads(problem, device);
    return;
  }
  config->threads = kMultipleThreads;
  config->parts = parts;
  config->groups = resident / parts;
  config->workspace = problem.rows() * parts * slot_bytes(problem);
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

void configure_column(const Problem& problem, std::int64_t workspace, const Device& device,
                      Config* config) {
  config->pack = pack_of_columns(problem, device);
  const std::int64_t packs_per_outer = problem.inner / config->pack;
  config->threads = kColumnThreads;
  config->lanes = column_lanes(problem, config->pack, device);
  const std::int64_t resident =
      resident_column_blocks(problem, config->pack, config->lanes, 1, device);
  const std::int64_t tiles = divide_up(problem.outer * packs_per_outer, config->lanes);
  const std::int64_t room = workspace / partial_bytes(problem) / problem.rows();
  const std::int64_t parts =
      std::max<std::int64_t>(1, std::min({resident / tiles, column_partials(problem), room}));
  if (configure_column_cluster(problem, tiles * parts, device, config) || parts == 1) return;
  config->parts = parts;
  configure_combine(problem, config);
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

void configure_interleaved(const Problem& problem, std::int64_t workspace, const Device& device,
                           Config* config) {
  config->stride = static_cast<int>(interleaved_stride(problem));
  config->threads = static_cast<int>(divide_up(config->stride, kWarpLanes) * kWarpLanes);
  config->shared_bytes = interleaved_bytes(problem);
  const std::int64_t resident =
      resident_interleaved_blocks(problem, config->threads, config->shared_bytes, 1, device);
  const std::int64_t room = workspace / partial_bytes(problem) / problem.rows();
  const std::int64_t parts = std::max<std::int64_t>(
      1, std::min({resident / problem.outer, interleaved_partials(problem), room}));
  if (configure_interleaved_cluster(problem, problem.outer * parts, device, config)) return;
  if (parts == 1) return;
  config->parts = parts;
  configure_combine(problem, config);
}

Config configure(const Problem& problem, Algorithm algorithm, std::int64_t workspace,
                 const Device& device) {
  Config config;
  if (problem.rows() == 0 || problem.columns == 0) return config;  // nothing is launched
  switch (algorithm) {
    case Algorithm::kMultiple:
      configure_multiple(problem, workspace, device, &config);
      break;
    case Algorithm::kRow:
      configure_row(problem, device, &config);
      break;
    case Algorithm::kHeld:
      configure_held(problem, device, &config);
      break;
    case Algorithm::kStaged:
      configure_staged(problem, device, &config);
      break;
    case Algorithm::kCluster:
      configure_cluster(problem, &config);
      break;
    case Algorithm::kColumn:
      configure_column(problem, workspace, device, &config);
      break;
    case Algorithm::kInterleaved:
      configure_interleaved(problem, workspace, device, &config);
      break;
    default:
      configure_step(problem, algorithm, workspace, &config);
      break;
  }
  return config;
}

// Whether an algorithm that can take a problem is the best

bool staged_is_best(const Problem& problem) {
  return row_bytes(problem) <= kStagedBytes && !has_whole_packs(problem);
}

bool staged_is_better_than_held(const Problem& problem, const Device& device) {
  return staged_is_best(problem) && !holds_elements(problem, device) &&
         (problem.columns <= kFewStagedColumns ||
          expected_rows(problem) >= kLeastStagedRows * device.multiprocessors);
}

bool cluster_is_best(const Problem& problem, const Device& device) {
  if (row_bytes(problem) < kLeastClusterBytes || row_bytes(problem) > kClusterBytes) return false;
  Config config;
  configure_cluster(problem, &config);
  return expected_rows(problem) * config.cluster <= device.multiprocessors;
}

bool interleaved_is_best(const Problem& problem) {
  if (problem.columns * problem.inner * bytes_of(problem.dtype) < kInterleavedRunBytes)
    return false;
  const std::int64_t packs = problem.inner / pack_of(problem);
  const bool has_whole = is_aligned(problem) && problem.inner % pack_of(problem) == 0;
  if (!has_whole || packs < kInterleavedWholePacks) return true;
  return packs < kInterleavedWarpPacks && problem.columns > kInterleavedColumns;
}

std::pair<Algorithm, std::string> choose(const Problem& problem, const Device& device) {
  const auto takes = [&](Algorithm algorithm) {
    return refusal(algorithm, problem, device).empty();
  };
  if (problem.inner != 1) {
    const std::string apart =
        "the elements of a row are " + std::to_string(problem.inner) + " elements apart";
    if (takes(Algorithm::kInterleaved) && interleaved_is_best(problem)) {
      return {Algorithm::kInterleaved, apart + ", which is few bytes or not a multiple of 16"};
    }
    return {Algorithm::kColumn, apart};
  }
  const std::string rows = problem.batch_invariant ? "rows"
                           : problem.rows() == 1   ? "1 row"
                                                   : std::to_string(problem.rows()) + " rows";
  const std::string rows_of = rows + " of " + std::to_string(problem.columns);
  if (takes(Algorithm::kHeld) && !staged_is_better_than_held(problem, device)) {
    return {Algorithm::kHeld, rows_of + " elements, each held by a group of threads"};
  }
  if (takes(Algorithm::kCluster) && cluster_is_best(problem, device)) {
    return {Algorithm::kCluster, rows_of + " elements, each read by a cluster of blocks"};
  }
  if (row_bytes(problem) > kMultipleBytes &&
      expected_rows(problem) < kMultipleRows * device.multiprocessors) {
    return {Algorithm::kMultiple, rows + " would leave multiprocessors idle with one block each"};
  }
  if (takes(Algorithm::kStaged) && staged_is_best(problem)) {
    return {Algorithm::kStaged, rows_of + " elements, short and not a multiple of 16 bytes"};
  }
  return {Algorithm::kRow, rows_of + " elements that are contiguous in memory"};
}

}  // namespace

Plan plan(const Problem& problem, std::string_view algorithm, const Device& device) {
  check(problem);
  Problem planned = problem;
  std::pair<Algorithm, std::string> chosen;
  if (algorithm.empty()) {
    chosen = choose(planned, device);
  } else if (algorithm == kBatchInvariant) {
    if (problem.inner != 1 || !has_whole_packs(problem)) {
      throw std::invalid_argument(
          "batch_invariant requires rows along the last axis, each of a multiple of 16 bytes, in "
          "an array aligned to 16 bytes");
    }
    planned.batch_invariant = true;
    chosen = choose(planned, device);
  } else {
    chosen = {algorithm_from_name<Algorithm>(kAlgorithms, algorithm),
              "the caller named the algorithm"};
    if (const std::string why = refusal(chosen.first, problem, device); !why.empty()) {
      throw std::invalid_argument("algorithm '" + std::string(name_of(chosen.first)) + "' " + why);
    }
  }
  const std::int64_t workspace = problem.workspace == kWorkspaceAsAsked
                                     ? problem.rows() * workspace_bytes(problem, algorithm)
                                     : problem.workspace;
  return {chosen.first, std::move(chosen.second),
          configure(planned, chosen.first, workspace, device)};
}

std::int64_t workspace_bytes(const Problem& problem, std::string_view algorithm) {
  const auto bytes = [](std::int64_t parts, std::int64_t each) {
    return parts > 1 ? parts * each : 0;
  };
  const auto of_multiple = bytes(multiple_partials(problem), slot_bytes(problem));
  const auto of_column = bytes(column_partials(problem), partial_bytes(problem));
  const auto of_interleaved = bytes(interleaved_partials(problem), partial_bytes(problem));
  if (algorithm.empty() || algorithm == kBatchInvariant) {
    return problem.inner == 1 ? of_multiple : std::max({of_multiple, of_column, of_interleaved});
  }
  const auto named = algorithm_from_name<Algorithm>(kAlgorithms, algorithm);
  switch (named) {
    case Algorithm::kMultiple:
      return of_multiple;
    case Algorithm::kRow:
    case Algorithm::kHeld:
    case Algorithm::kStaged:
    case Algorithm::kCluster:
      return 0;
    case Algorithm::kColumn:
      return of_column;
    case Algorithm::kInterleaved:
      return of_interleaved;
    default:
      return bytes(step_partials(problem, named), partial_bytes(problem));
  }
}

}  // namespace reduce
}  // namespace JAX_GPUOPS_NAMESPACE
