// The plan of skinny.

#include <algorithm>
#include <limits>
#include <string>

#include "core/integer.h"
#include "matmul/plan.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {
namespace {

// Below it most warps of skinny's blocks have nothing to multiply.
constexpr std::int64_t kLeastSkinnyDepth = 256;
// The same of products that are small both ways, where all that counts is what comes before and
// behind the few loads.
constexpr std::int64_t kLeastSmallDepth = 128;

// How long a multiprocessor takes for an element of the large factor, in nanoseconds: what it could
// read by itself, and its share of what memory gives to all, 60 and 34 bytes a nanosecond.
constexpr double kSkinnyReadTime = 2.0 / 60;
constexpr double kMemoryReadTime = 2.0 / 34;
// A block that copies has more than a third of a multiprocessor's shared memory, which so holds two
// of them: with three, 1x8192 by 8192x28672 took 118 us in place of 107.
constexpr int kLeastSkinnySharedBytes = 80 * 1024;
// Of a product that is small both ways: others divide a deeper one among more blocks.
constexpr std::int64_t kMostSmallDepth = 1024;
// Predictions: what a small product takes before and after its loads, and for an element that some
// block reads from the L2 cache.
constexpr double kSmallLaunchTime = 2000;
constexpr double kCacheReadTime = 2.0 / 6500;

std::int64_t skinny_col_tiles(const SkinnyFactors& factors) {
  return divide_up(factors.skinny.extent, kSkinnyExtent);
}

// Warps of many rows read the skinny factor less often, and longer runs of a large one whose rows
// are contiguous; but of 32 rows only if some multiprocessor had two blocks of 16. All blocks of 64
// rows that run at once have as much on their way, and so are done together, two on a
// multiprocessor or one.
int skinny_rows(const SkinnyFactors& factors, std::int64_t batch, const Device& device) {
  const auto tiles = [&](int rows) {
    return batch * skinny_col_tiles(factors) * divide_up(factors.large.extent, rows);
  };
  if (4 * tiles(64) >= std::int64_t{5} * device.multiprocessors) return 64;
  return 2 * tiles(32) > device.multiprocessors ? 32 : 16;
}

// Whether whole packs of so many elements begin at aligned addresses.
bool fits_skinny_packs(const Problem& problem, std::int64_t length, int pack) {
  return length % pack == 0 && problem.alignment >= std::int64_t{2} * pack;
}

// What skinny takes, of problems that it takes: reading is all there is to it. `least` is what any
// kernel takes that reads the large factor from memory.
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

// The same of a product with more rows and columns than a block of skinny has, whose blocks all run
// at the same time and read both factors from the L2 cache; infinite if they do not.
double estimate_small(const Problem& problem, const Device& device) {
  const SkinnyFactors factors = skinny_factors(problem);
  const int rows = skinny_rows(factors, problem.batch, device);
  const std::int64_t blocks =
      problem.batch * skinny_col_tiles(factors) * divide_up(factors.large.extent, rows);
  if (blocks > std::int64_t{2} * device.multiprocessors)
    return std::numeric_limits<double>::infinity();
  const double of_block = (rows + kSkinnyExtent) * static_cast<double>(problem.k);
  const auto turns = static_cast<double>(divide_up(blocks, device.multiprocessors));
  return kSmallLaunchTime + std::max(turns * of_block * kSkinnyReadTime,
                                     static_cast<double>(blocks) * of_block * kCacheReadTime);
}

// What the others on tensor cores take.
double other_time(const Problem& problem, const Device& device) {
  const double time = tensor_core_time(problem, device);
  return refusal_of_split_k(problem, device).empty() ? std::min(time, split_k_time(problem, device))
                                                     : time;
}

}  // namespace

// Why skinny does not take the problem; empty if it does.
std::string refusal_of_skinny(const Problem& problem, const Device& device) {
  if (!is_16_bit_float(problem.dtype)) {
    return "takes float16 and bfloat16, not " + text(info(problem.dtype).name);
  }
  if (device.compute_capability < 80) return "needs a GPU of compute capability 8.0";
  if (problem.has_c) return "adds no c";
  if (problem.scaled) return "has no alpha other than 1";
  if (std::min(problem.m, problem.n) > kMostSkinnyExtent) {
    return "takes at most " + std::to_string(kMostSkinnyExtent) + " rows or columns";
  }
  const std::int64_t most = kMostTensorExtent;
  if (std::max({problem.batch, problem.m, problem.n, problem.k}) > most) {
    return "takes extents of at most 2^30";
  }
  // As many blocks as the least of them make, along x of the grid.
  const auto blocks = static_cast<double>(problem.batch) *
                      static_cast<double>(divide_up(std::max(problem.m, problem.n), 16));
  return blocks > static_cast<double>(most) ? "takes at most 2^30 tiles of 16 rows" : "";
}

Config configure_skinny(const Problem& problem, const Device& device) {
  const SkinnyFactors factors = skinny_factors(problem);
  // A thread reads 8 elements of the depth, or one for each 8 of a block's rows, if these are whole
  // packs; 2 of the skinny factor's columns.
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
    // What is copied in steps, is in vectors of 16 bytes.
    packs_skinny = factors.skinny.deep
                       ? fits(problem.k, 8) && (factors.large.deep || fits(factors.large.extent, 8))
                       : fits(factors.skinny.extent, 2);
    if (packs_skinny && factors.skinny.deep) {
      if (factors.skinny.extent <= 8) tile.cols = 8;
      // Of some GPUs a block has less shared memory; then lanes read the elements themselves.
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

// For long enough depths, unless few rows leave most of the GPU idle while others divide the depth
// among more blocks, or have fewer products to wait for. No other kernel is as fast where it has to
// copy a factor. And for what is small both ways, of which others have too few tiles.
bool prefers_skinny(const Problem& problem, const Device& device) {
  if (!is_16_bit_float(problem.dtype) || !refusal_of_skinny(problem, device).empty()) return false;
  const bool others_take_it =
      copies_bytes(problem) == 0 && refusal_of_tensor_core(problem, device).empty();
  const bool suits = suits_skinny(problem);
  if (!others_take_it) return suits;
  if (suits) {
    const SkinnyEstimate skinny = estimate_skinny(problem, device);
    return skinny.time <= std::max(other_time(problem, device), skinny.least);
  }
  return std::min(problem.m, problem.n) > kSkinnyExtent && problem.k >= kLeastSmallDepth &&
         problem.k <= kMostSmallDepth &&
         estimate_small(problem, device) < other_time(problem, device);
}

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
