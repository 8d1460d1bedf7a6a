// The plan of kernels for rows that are contiguous in memory.

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

#include "reduce/plan.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace reduce {
namespace {

// multiple: one block reads a shorter row in a few microseconds, so several are not worth it.
constexpr std::int64_t kMultipleBytes = 256 * 1024;
// With this many rows per multiprocessor, one block per row keeps all multiprocessors busy.
constexpr std::int64_t kMultipleRows = 2;
// One block per row also takes less time for shorter rows than these, of which most multiprocessors
// have one and none has two.
constexpr std::int64_t kMultipleBytesOfMany = 512 * 1024;
// Blocks have fewer threads, down to these, while there are no more than so many blocks: about one
// for each multiprocessor.
constexpr int kLeastMultipleThreads = 128;
constexpr std::int64_t kFewMultipleBlocks = 128;

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
// `cluster` is faster for argmax and argmin of long rows of 16-bit elements if there is at most one
// for so many multiprocessors.
constexpr int kMultiprocessorsOf16BitArg = 8;

// staged: the longest row that it is chosen for: longer rows keep a group of lanes busy, and take
// much shared memory.
constexpr std::int64_t kStagedBytes = 512;
// With fewer rows per multiprocessor, `held`, with several threads per row, is faster than a lane
// per row, unless rows have few elements. Of 16-bit elements half as many suffice: in short rows,
// or in any for argmax and argmin.
constexpr std::int64_t kLeastStagedRows = 128;
constexpr std::int64_t kLeastStagedRowsOf16Bits = 64;
constexpr std::int64_t kFewStagedColumns = 32;
constexpr std::int64_t kFewStagedColumnsOf16Bits = 96;
// The longest rows of 16-bit elements for which it is faster for sums and moments; for moments of
// at most so many rows per multiprocessor, shorter ones.
constexpr std::int64_t kStagedSumColumns = 224;
constexpr std::int64_t kStagedMomentsColumns = 160;
constexpr std::int64_t kFewStagedMoments = 256;
// The longest row whose tile fits every GPU's shared memory; kAlgorithms states it.
constexpr std::int64_t kMostStagedBytes = 1024;
// The size of a warp's tile, if rows are short and many: the tiles of all warps of a multiprocessor
// fit in shared memory.
constexpr std::int64_t kStagedTileBytes = 3328;
// Warps per multiprocessor that hide memory latency; tiles become larger only beyond these.
constexpr std::int64_t kBusyStagedWarps = 16;
// About the shared memory per block, so that several blocks are resident on a multiprocessor.
constexpr std::int64_t kStagedBlockBytes = 48 * 1024;

// cluster: one block reads a shorter row fast enough; the 16-bit elements of argmax and argmin are
// more work. A longer row takes `multiple`, which is slower for several rows.
constexpr std::int64_t kLeastClusterBytes = 64 * 1024;
constexpr std::int64_t kLeastClusterBytesOf16BitArg = 48 * 1024;
constexpr std::int64_t kClusterBytes = 256 * 1024;
constexpr std::int64_t kSeveralRows = 4;
constexpr std::int64_t kClusterBytesOfSeveral = 2048 * 1024;
constexpr std::int64_t kClusterColumnsOfSeveralArg = 192 * 1024;
// The most blocks per multiprocessor. Moments take longer to combine.
constexpr std::int64_t kClusterBlocks = 2;
constexpr std::int64_t kClusterBlocksOfMoments = 1;
// Threads count packs and columns in 32 bits; kAlgorithms states the limit.
constexpr std::int64_t kMostClusterColumns = std::int64_t{1} << 30;
// Packs per thread: with more, fewer blocks start and exchange partial results.
constexpr std::int64_t kClusterThreadPacks = 2;

bool is_moments(const Problem& problem) { return problem.function == Function::kMeanAndVar; }
bool is_16_bit(const Problem& problem) { return bytes_of(problem.dtype) == 2; }

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

// held: the threads of a row.
int held_lanes(const Problem& problem, const Device& device) {
  const bool by_elements = holds_elements(problem, device);
  const std::int64_t packs = by_elements ? problem.columns : problem.columns / pack_of(problem);
  const std::int64_t busy = kBusyThreads * device.multiprocessors;
  const std::int64_t most = by_elements                ? kHeldElements
                            : packs <= kShortHeldPacks ? kMostPacksOfShortHeldRows
                                                       : kHeldPacks;
  const std::int64_t least = divide_up(packs, most);
  // Within a warp, a power of two, and enough for the edges; else whole warps.
  int lanes = least <= kWarpLanes ? power_of_two_from(least, kWarpLanes)
                                  : static_cast<int>(divide_up(least, kWarpLanes) * kWarpLanes);
  if (by_elements) return lanes;  // each runs the code for kHeldElements, even if it has fewer
  if (!has_whole_packs(problem)) {
    lanes = std::max(lanes, power_of_two_from(2 * pack_of(problem) - 2, kWarpLanes));
  }
  // More threads load faster, but only those of one warp combine fast.
  while (lanes < std::min<std::int64_t>(packs, kWarpLanes) &&
         expected_rows(problem) * lanes < busy) {
    lanes *= 2;
  }
  return lanes;
}

// held, mean and variance: whether `row` is faster. It takes longer to combine its partial results.
// But it has fewer threads per row if rows have edges or few packs, and a thread of `held` does the
// work for kHeldPacks packs even if it has fewer: in arrays of more threads than are resident, this
// takes more time.
bool moments_prefer_row(const Problem& problem, const Device& device) {
  const int lanes = held_lanes(problem, device);
  // Lanes of 32-bit elements that have three quarters of the packs they could hold, or more.
  const bool are_filled = bytes_of(problem.dtype) >= 4 &&
                          4 * problem.columns >= 3 * pack_of(problem) * kHeldPacks * lanes;
  const bool has_more_threads = has_whole_packs(problem)
                                    ? problem.columns <= kShortHeldPacks * pack_of(problem)
                                    : !are_filled;
  return has_more_threads &&
         expected_rows(problem) * lanes > kResidentThreads * device.multiprocessors;
}

// How many threads should reduce a row.
std::int64_t row_threads(const Problem& problem, const Device& device) {
  const std::int64_t packs = divide_up(problem.columns, pack_of(problem));
  const std::int64_t busy = kBusyThreads * device.multiprocessors;
  const std::int64_t short_row = is_moments(problem) ? kShortRowPacksOfMoments : kShortRowPacks;
  std::int64_t threads = divide_up(packs, !has_whole_packs(problem) ? kMostThreadPacksWithEdges
                                          : packs > short_row       ? kMostThreadPacks
                                                                    : kMostThreadPacksOfShortRows);
  while (threads < packs && expected_rows(problem) * threads < busy) threads *= 2;
  const std::int64_t most = std::max<std::int64_t>(kWarpLanes, divide_up(packs, kLeastThreadPacks));
  return std::min(threads, most);
}

// multiple: the most parts of a row that are worth a block of `threads` threads each. Each thread
// has the packs that it loads at once.
std::int64_t parts_of(const Problem& problem, int threads) {
  const std::int64_t part = pack_of(problem) * kMultipleLoads * threads;
  return std::min(kMostParts, divide_up(problem.columns, part));
}

// multiple: threads per block, for `rows` rows.
int multiple_threads(const Problem& problem, std::int64_t rows) {
  int threads = kMultipleThreads;
  while (threads > kLeastMultipleThreads &&
         rows * parts_of(problem, threads / 2) <= kFewMultipleBlocks) {
    threads /= 2;
  }
  return threads;
}

// Threads of a block that reduces one row: whole warps.
int block_threads(const Problem& problem, const Device& device) {
  const std::int64_t warps = divide_up(row_threads(problem, device), kWarpLanes);
  return static_cast<int>(std::min<std::int64_t>(warps * kWarpLanes, kMultipleThreads));
}

}  // namespace

std::string refusal_of_held(const Problem& problem, const Device& device) {
  if (problem.masked) return "does not support a mask; 'row' does";
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
}

bool prefers_held(const Problem& problem, const Device& device) {
  if (holds_elements(problem, device)) return true;
  if (is_moments(problem) && moments_prefer_row(problem, device)) return false;
  if (kMultiprocessorsOf16BitArg * expected_rows(problem) <= device.multiprocessors &&
      is_arg(problem.function) && is_16_bit(problem) && prefers_cluster(problem, device) &&
      refusal_of_cluster(problem, device).empty()) {
    return false;
  }
  if (!prefers_staged(problem, device)) return true;
  const bool takes_fewer = is_16_bit(problem) && (is_arg(problem.function) ||
                                                  problem.columns <= kFewStagedColumnsOf16Bits);
  const std::int64_t least = takes_fewer ? kLeastStagedRowsOf16Bits : kLeastStagedRows;
  return problem.columns > kFewStagedColumns &&
         expected_rows(problem) < least * device.multiprocessors;
}

void configure_held(const Problem& problem, const Device& device, Config* config) {
  const bool by_elements = holds_elements(problem, device);
  config->pack = by_elements ? 1 : static_cast<int>(pack_of(problem));
  config->edges = !by_elements && !has_whole_packs(problem);
  config->lanes = held_lanes(problem, device);
  const std::int64_t packs = problem.columns / config->pack;
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

std::string refusal_of_staged(const Problem& problem) {
  if (problem.masked) return "does not support a mask; 'row' does";
  if (!is_aligned(problem)) return "requires an array aligned to 16 bytes; 'row' does not";
  if (row_bytes(problem) > kMostStagedBytes) {
    return "supports rows of at most " + std::to_string(kMostStagedBytes) + " bytes, got " +
           std::to_string(row_bytes(problem)) + "; 'row' supports any length";
  }
  return "";
}

bool prefers_staged(const Problem& problem, const Device& device) {
  if (row_bytes(problem) > kStagedBytes || has_whole_packs(problem)) return false;
  const bool adds = problem.function == Function::kSum || is_moments(problem);
  if (!adds || !is_16_bit(problem)) return true;
  const bool are_few =
      is_moments(problem) && expected_rows(problem) <= kFewStagedMoments * device.multiprocessors;
  return problem.columns <= (are_few ? kStagedMomentsColumns : kStagedSumColumns);
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

std::string refusal_of_cluster(const Problem& problem, const Device& device) {
  if (!device.runs_hopper_code()) return "requires a GPU of compute capability 9.0";
  if (problem.rows() > std::numeric_limits<std::int32_t>::max() / kMostReducingBlocks) {
    return "supports fewer than 2^28 rows; 'row' supports any number";
  }
  if (problem.columns > kMostClusterColumns) {
    return "supports rows of at most 2^30 elements; 'multiple' supports any length";
  }
  return "";
}

bool prefers_cluster(const Problem& problem, const Device& device) {
  const std::int64_t rows = expected_rows(problem);
  const bool arg = is_arg(problem.function);
  const std::int64_t least =
      arg && is_16_bit(problem) ? kLeastClusterBytesOf16BitArg : kLeastClusterBytes;
  const std::int64_t most = rows < kSeveralRows ? kClusterBytes
                            : arg ? kClusterColumnsOfSeveralArg * bytes_of(problem.dtype)
                                  : kClusterBytesOfSeveral;
  if (row_bytes(problem) < least || row_bytes(problem) > most) return false;
  Config config;
  configure_cluster(problem, &config);
  const std::int64_t blocks = is_moments(problem) ? kClusterBlocksOfMoments : kClusterBlocks;
  return rows * config.cluster <= blocks * device.multiprocessors;
}

void configure_cluster(const Problem& problem, Config* config) {
  const std::int64_t packs = divide_up(problem.columns, pack_of(problem));
  const std::int64_t threads = divide_up(packs, kClusterThreadPacks);
  config->cluster =
      std::max(2, power_of_two_from(divide_up(threads, kClusterThreads), kMostReducingBlocks));
  config->threads =
      std::max(kWarpLanes, power_of_two_from(divide_up(threads, config->cluster), kClusterThreads));
}

bool prefers_multiple(const Problem& problem, const Device& device) {
  const std::int64_t rows = expected_rows(problem);
  const bool have_one_each =
      3 * rows >= 2 * device.multiprocessors && rows <= device.multiprocessors;
  return row_bytes(problem) >= (have_one_each ? kMultipleBytesOfMany : kMultipleBytes + 1) &&
         rows < kMultipleRows * device.multiprocessors;
}

std::int64_t multiple_parts(const Problem& problem) {
  // One row is divided into the most parts.
  return parts_of(problem, multiple_threads(problem, 1));
}

// The size of a partial result in a slot: words of 8 bytes, each with a tag of 8 bytes.
std::int64_t slot_bytes(const Problem& problem) {
  return 16 * divide_up(partial_bytes(problem), 8);
}

void configure_multiple(const Problem& problem, std::int64_t workspace, const Device& device,
                        Config* config) {
  // One wave of blocks for all rows: they finish together, and there are few partials.
  const std::int64_t rows = expected_rows(problem);
  const int threads = multiple_threads(problem, rows);
  const std::int64_t resident = resident_multiple_blocks(problem, device);
  const std::int64_t wanted = std::min(resident / rows, parts_of(problem, threads));
  const std::int64_t room = workspace / slot_bytes(problem) / problem.rows();
  if (problem.batch_invariant && wanted > std::max<std::int64_t>(1, room)) {
    throw std::invalid_argument("the workspace is too small");
  }
  const std::int64_t parts = std::min(wanted, room);
  if (parts <= 1) {
    config->threads = block_threads(problem, device);
    return;
  }
  config->threads = threads;
  config->parts = parts;
  config->groups = resident / parts;
  config->workspace = problem.rows() * parts * slot_bytes(problem);
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

}  // namespace reduce
}  // namespace JAX_GPUOPS_NAMESPACE
