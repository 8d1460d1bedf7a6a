// The plan of skinny.

#include <algorithm>
#include <limits>
#include <string>

#include "core/integer.h"
#include "matmul/plan.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {
namespace {

// With less, most warps of skinny's blocks have nothing to multiply.
constexpr std::int64_t kLeastSkinnyDepth = 256;
// The same for products that are small in both m and n, whose time is mostly that before and after
// their few loads.
constexpr std::int64_t kLeastSmallDepth = 128;

// The time of a multiprocessor to read an element of the large factor, in nanoseconds: alone, and
// with its share of the memory bandwidth when all read, 60 and 34 bytes per nanosecond.
constexpr double kSkinnyReadTime = 2.0 / 60;
constexpr double kMemoryReadTime = 2.0 / 34;
// A block that copies takes more than a third of a multiprocessor's shared memory, so that only two
// blocks are resident: with three, 1x8192 by 8192x28672 took 118 us instead of 107.
constexpr int kLeastSkinnySharedBytes = 80 * 1024;
// Times of a product that is small in both m and n: of a launch; of a block, and of each of its
// rows, before and after its loads; and for each element that one multiprocessor reads from the L2
// cache, and that all read.
constexpr double kSmallLaunchTime = 1400;
constexpr double kSmallBlockTime = 200;
constexpr double kSmallRowTime = 8;
constexpr double kSmallReadTime = 2.0 / 78;
constexpr double kCacheReadTime = 2.0 / 8000;
// How much longer reads take than copies to shared memory: loads of pairs of columns, of single
// elements of the skinny factor, and of the large one; and of a large factor that is not deep, if
// its rows do not begin at whole sectors of the L2 cache.
constexpr double kColumnsFactor = 1.4;
constexpr double kElementsFactor = 3;
constexpr double kUnpackedFactor = 6;
constexpr double kUnalignedFactor = 2.2;
constexpr int kSectorBytes = 32;
// Other kernels divide a larger depth among more blocks: than one for each multiprocessor, whose
// reads are not slowed down by unaligned rows, and than others.
constexpr std::int64_t kMostDepthOfOneTurn = 2048;
constexpr std::int64_t kMostSmallDepth = 1024;

std::int64_t skinny_col_tiles(const SkinnyFactors& factors) {
  return divide_up(factors.skinny.extent, kSkinnyExtent);
}

// The rows of a warp. With more rows, warps read the skinny factor less often, and longer runs of a
// large factor that is not deep; but 32 rows are used only if some multiprocessor would have two
// blocks of 16. Blocks of 64 rows that run at the same time have equally many bytes in flight, and
// so end together, whether a multiprocessor has one or two. With fewer of them than
// multiprocessors, 32 rows are used if they divide the large factor more evenly: 16x14336 by
// 14336x4096 takes 29 us with 32 rows and 33 with 64, but 16x13824 by 13824x5120 45 and 35.
int skinny_rows(const SkinnyFactors& factors, std::int64_t batch, const Device& device) {
  const auto tiles = [&](int rows) {
    return batch * skinny_col_tiles(factors) * divide_up(factors.large.extent, rows);
  };
  if (4 * tiles(64) >= std::int64_t{5} * device.multiprocessors) return 64;
  const auto rows_of_one = [&](int rows) {
    return divide_up(tiles(rows), device.multiprocessors) * rows;
  };
  if (skinny_col_tiles(factors) == 1 && rows_of_one(64) <= rows_of_one(32)) return 64;
  return 2 * tiles(32) > device.multiprocessors ? 32 : 16;
}

// Whether rows of `length` elements are whole, aligned packs of `pack` elements.
bool fits_skinny_packs(const Problem& problem, std::int64_t length, int pack) {
  return length % pack == 0 && problem.alignment >= std::int64_t{2} * pack;
}

// The time of skinny, which is that of its reads. `least` is the time of any kernel that reads the
// large factor from memory.
struct SkinnyEstimate {
  double time;
  double least;
};
SkinnyEstimate estimate_skinny(const Problem& problem, const Device& device) {
  const SkinnyFactors factors = skinny_factors(problem);
  const int rows = skinny_rows(factors, problem.batch, device);
  const auto depth = static_cast<double>(problem.k);
  const std::int64_t blocks = problem.batch * divide_up(factors.large.extent, rows);
  const double own = static_cast<double>(divide_up(blocks, device.multiprocessors) * rows) * depth *
                     kSkinnyReadTime;
  const std::int64_t all_rows = (factors.large.shared ? 1 : problem.batch) * factors.large.extent;
  const double least =
      static_cast<double>(all_rows) * depth * kMemoryReadTime / device.multiprocessors;
  return {kLaunchTime + std::max(own, least), kLaunchTime + least};
}

// How much longer the reads of a small product take than copies to shared memory.
double reads_factor(const SkinnyFactors& factors, const SkinnyConfig& config) {
  if (!config.packs_large) return kUnpackedFactor;
  if (!config.packs_skinny) return kElementsFactor;
  if (!factors.skinny.deep) return kColumnsFactor;
  const bool begins_sectors = factors.large.deep || factors.large.extent * 2 % kSectorBytes == 0;
  return begins_sectors ? 1 : kUnalignedFactor;
}

// The time of skinny for more rows and columns than a block has, if its blocks run at the same time
// and read both factors from the L2 cache; infinite if they do not, or if there is too much depth.
double estimate_small(const Problem& problem, const Device& device) {
  const SkinnyFactors factors = skinny_factors(problem);
  const Config launch = configure_skinny(problem, device);
  const SkinnyConfig config = skinny_config(launch, factors);
  const std::int64_t turns = divide_up(launch.blocks, device.multiprocessors);
  const double factor = reads_factor(factors, config);
  const bool is_slow = turns > 1 || factor == kUnalignedFactor;
  if (turns > 2 || problem.k > (is_slow ? kMostSmallDepth : kMostDepthOfOneTurn)) {
    return std::numeric_limits<double>::infinity();
  }
  const double reads = (config.rows + config.cols) * factor * static_cast<double>(problem.k);
  return kSmallLaunchTime +
         static_cast<double>(turns) * (kSmallBlockTime + config.rows * kSmallRowTime) +
         reads * std::max(static_cast<double>(turns) * kSmallReadTime,
                          static_cast<double>(launch.blocks) * kCacheReadTime);
}

}  // namespace

std::string refusal_of_skinny_sizes(const Problem& problem, std::int64_t most_extent,
                                    std::int64_t least_rows) {
  if (std::min(problem.m, problem.n) > most_extent) {
    return "supports at most " + std::to_string(most_extent) + " rows or columns";
  }
  const std::int64_t most = kMostTensorExtent;
  if (std::max({problem.batch, problem.m, problem.n, problem.k}) > most) {
    return "supports sizes of at most 2^30";
  }
  const auto tiles = static_cast<double>(problem.batch) *
                     static_cast<double>(divide_up(std::max(problem.m, problem.n), least_rows));
  if (tiles <= static_cast<double>(most)) return "";
  return "supports at most 2^30 tiles of " + std::to_string(least_rows) + " rows";
}

// Why skinny does not take the problem; empty if it does.
std::string refusal_of_skinny(const Problem& problem, const Device& device) {
  if (!is_16_bit_float(problem.dtype)) {
    return "supports only float16 and bfloat16, not " + text(info(problem.dtype).name);
  }
  if (device.compute_capability < 80) return "requires a GPU of compute capability 8.0 or later";
  if (problem.has_c) return "does not support c";
  if (problem.scaled) return "supports only alpha = 1";
  return refusal_of_skinny_sizes(problem, kMostSkinnyExtent, 16);
}

Config configure_skinny(const Problem& problem, const Device& device) {
  const SkinnyFactors factors = skinny_factors(problem);
  // The packs of a thread: 8 elements of k of a deep factor; else tile.rows / 8 rows of the large
  // factor, or 2 columns of the skinny one.
  const auto fits = [&](std::int64_t length, int pack) {
    return fits_skinny_packs(problem, length, pack);
  };
  SkinnyTile tile{skinny_rows(factors, problem.batch, device), kSkinnyExtent};
  bool packs_large = false;
  if (factors.large.deep) {
    packs_large = fits(problem.k, 8);
  } else {
    while (tile.rows > 16 && !fits(factors.large.extent, tile.rows / 8)) tile.rows /= 2;
    packs_large = fits(factors.large.extent, tile.rows / 8);
  }
  bool packs_skinny = false;
  if (packs_large) {
    // Copies to shared memory are vectors of 16 bytes.
    packs_skinny = factors.skinny.deep
                       ? fits(problem.k, 8) && (factors.large.deep || fits(factors.large.extent, 8))
                       : fits(factors.skinny.extent, 2);
    if (packs_skinny && factors.skinny.deep) {
      if (factors.skinny.extent <= 8) tile.cols = 8;
      // Blocks of some GPUs have less shared memory; then lanes load the elements themselves.
      packs_skinny = skinny_shared_bytes(tile.rows, tile.cols, true) <=
                     static_cast<std::int64_t>(device.shared_bytes_per_block);
      if (!packs_skinny) tile.cols = kSkinnyExtent;
    }
  } else {
    tile = kSkinnyUnpackedTile;
  }
  Config config;
  config.threads = kSkinnyThreads;
  config.tile_rows = factors.large_is_a ? tile.rows : tile.cols;
  config.tile_cols = factors.large_is_a ? tile.cols : tile.rows;
  config.pack_a = factors.large_is_a ? packs_large : packs_skinny;
  config.pack_b = factors.large_is_a ? packs_skinny : packs_large;
  config.blocks = problem.batch * divide_up(factors.large.extent, tile.rows) *
                  divide_up(factors.skinny.extent, tile.cols);
  const bool copies = packs_skinny && factors.skinny.deep;
  config.shared_bytes = skinny_shared_bytes(tile.rows, tile.cols, copies);
  if (copies) {
    config.stages = skinny_stages(tile.rows, tile.cols);
    config.shared_bytes = std::max<std::int64_t>(config.shared_bytes, kLeastSkinnySharedBytes);
  }
  return config;
}

bool suits_skinny(const Problem& problem) {
  return is_16_bit_float(problem.dtype) && std::min(problem.m, problem.n) <= kSkinnyExtent &&
         problem.k >= kLeastSkinnyDepth;
}

// Yes for few rows or columns of a large enough depth, unless most of the GPU would be idle while
// other kernels divide the depth among more blocks, or have fewer products to wait for. No other
// kernel is as fast if it has to copy a factor. Also yes for products small in both m and n, for
// which other kernels have too few tiles, or would have to copy a factor.
bool prefers_skinny(const Problem& problem, const Device& device) {
  if (!is_16_bit_float(problem.dtype) || !refusal_of_skinny(problem, device).empty()) return false;
  const bool copies = copies_bytes(problem) > 0;
  if (suits_skinny(problem)) {
    if (copies || !refusal_of_tensor_core(problem, device).empty()) return true;
    const SkinnyEstimate skinny = estimate_skinny(problem, device);
    return skinny.time <= std::max(tensor_core_or_split_k_time(problem, device), skinny.least);
  }
  return std::min(problem.m, problem.n) > kSkinnyExtent && problem.k >= kLeastSmallDepth &&
         refusal_of_tensor_core(problem, device).empty() &&
         !(copies && suits_mma_batched(problem)) &&
         estimate_small(problem, device) < std::min(tensor_core_or_splits_time(problem, device),
                                                    wgmma_batched_time(problem, device));
}

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
