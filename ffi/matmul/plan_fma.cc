// The plan of float32 products by FMAs: how long the kernels would take, and the tiles of
// fma_pipelined.

#include <algorithm>
#include <string>

#include "core/integer.h"
#include "matmul/plan.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {
namespace {

// How many rows of tiles share columns of b in the L2 cache.
constexpr std::int64_t kFmaGroup = 8;
// Fewer rows or columns leave most of a tile empty.
constexpr std::int64_t kLeastFmaExtent = 64;
// A prediction: the time at the end of a tile in which a multiprocessor does not multiply.
constexpr double kFmaTileEndTime = 2000;

// Times of double_buffered and shared per element of k, in nanoseconds, measured on an H200
// (docs/algorithms.md): with two tiles at a time on each multiprocessor, and with one.
struct BlockKernel {
  std::int64_t tile;
  double two_tiles_time;
  double one_tile_time;
};
constexpr BlockKernel kBlockKernels[] = {{kTile, 211, 128}, {kSharedTile, 86, 53}};
// Bytes of results that a multiprocessor writes per nanosecond while all of them do.
constexpr double kBlockWriteRate = 34;

double block_kernels_time(const Problem& problem, const Device& device) {
  double least = 0;
  for (const BlockKernel& kernel : kBlockKernels) {
    const std::int64_t tiles =
        problem.batch * divide_up(problem.m, kernel.tile) * divide_up(problem.n, kernel.tile);
    const bool is_one = tiles <= device.multiprocessors;
    const auto turns = static_cast<double>(
        is_one ? 1 : divide_up(tiles, std::int64_t{2} * device.multiprocessors));
    const double of_depth = is_one ? kernel.one_tile_time : kernel.two_tiles_time;
    const auto result_bytes = static_cast<double>((is_one ? 1 : 2) * kernel.tile * kernel.tile * 4);
    const double time =
        turns * (of_depth * static_cast<double>(problem.k) + result_bytes / kBlockWriteRate);
    if (least == 0 || time < least) least = time;
  }
  return kLaunchTime + least;
}

std::int64_t tiles_of(const Problem& problem, const FmaTile& tile) {
  return problem.batch * divide_up(problem.m, kFmaRows) * divide_up(problem.n, tile.cols);
}

struct FmaChoice {
  const FmaTile* tile;
  double time;
};

// The tile with the shortest estimated time. Each multiprocessor takes tile after tile.
FmaChoice best_fma_tile(const Problem& problem, const Device& device) {
  FmaChoice best{};
  for (const FmaTile& tile : kFmaTiles) {
    const auto turns =
        static_cast<double>(divide_up(tiles_of(problem, tile), device.multiprocessors));
    const double time =
        kLaunchTime + turns * (tile.time * static_cast<double>(problem.k) + kFmaTileEndTime);
    if (best.tile == nullptr || time < best.time) best = {&tile, time};
  }
  return best;
}

// Times of coalesced in nanoseconds, measured on an H200 with 64 x 64 x 64: of a launch, and per
// element of k, since a thread waits for each of its loads.
constexpr double kCoalescedLaunchTime = 1600;
constexpr double kCoalescedTime = 37;

// Predicted times of fma_sliced: a launch besides its tiles, a tile before and after its products,
// the exchange of a cluster's sums, and the read of an element from the L2 cache.
constexpr double kSlicedLaunchTime = 1100;
constexpr double kSlicedTileTime = 800;
constexpr double kSlicedExchangeTime = 1000;
constexpr double kSlicedReadTime = 4.0 / 6000;
// The measured times relative to the predictions: 1.2 to 1.5 for all but the smallest products.
constexpr double kSlicedFactor = 1.35;
// Beyond so many tiles per multiprocessor larger tiles, which read the factors less often, are
// better.
constexpr std::int64_t kMostSlicedTurns = 2;
// The least depth of a block: with less, some warps have no step to multiply.
constexpr std::int64_t kLeastSlicedDepth = kSlicedThreads / 32 * kFmaStepDepth;
// Steps are counted by ints.
constexpr std::int64_t kMostFmaDepth = std::int64_t{1} << 30;

std::int64_t tiles_of(const Problem& problem, const SlicedTile& tile) {
  return problem.batch * divide_up(problem.m, tile.rows) * divide_up(problem.n, tile.cols);
}

// Bytes per copy: 16 if the rows of both factors, as stored, are aligned multiples of 16 bytes.
int fma_vector_bytes(const Problem& problem) {
  const auto fits = [&](const StoredFactor& factor) { return factor.length % kPack == 0; };
  return problem.alignment >= 16 && fits(stored_a(problem)) && fits(stored_b(problem)) ? 16 : 4;
}

// Whether `splits` blocks may divide a tile's depth. All clusters must run at the same time, with
// one block per multiprocessor. A cluster of more than two lies within one of the GPU's groups of
// multiprocessors (GPCs), and clusters do not fill these: of 132 multiprocessors, 30 clusters of
// four had room.
bool has_room_for_clusters(std::int64_t tiles, int splits, const Problem& problem,
                           const Device& device) {
  if (splits == 1) return true;
  return device.runs_hopper_code() && problem.k >= splits * kLeastSlicedDepth &&
         splits * tiles <= device.multiprocessors * (splits == 2 ? 4 : 3) / 4;
}

struct SlicedChoice {
  const SlicedTile* tile;
  int splits;
  double time;
};

// The tile and the number of blocks per tile with the shortest estimated time: that of the FMAs or
// of the reads from the L2 cache, whichever is longer. Copies of single floats are four times as
// many, and take as long as the FMAs.
SlicedChoice best_sliced_tile(const Problem& problem, const Device& device) {
  const bool by_element = fma_vector_bytes(problem) == 4;
  SlicedChoice best{};
  for (const SlicedTile& tile : kSlicedTiles) {
    if (by_element && !tile.takes_elements) continue;
    if (tile.shared_bytes() > static_cast<std::int64_t>(device.shared_bytes_per_block)) continue;
    const std::int64_t tiles = tiles_of(problem, tile);
    for (int splits = 1; splits <= kMostSlicedSplits; ++splits) {
      if (!has_room_for_clusters(tiles, splits, problem, device)) continue;
      const auto turns = static_cast<double>(divide_up(splits * tiles, device.multiprocessors));
      const double depth =
          static_cast<double>(std::max(problem.k, splits * kLeastSlicedDepth)) / splits;
      const double multiplying = turns * tile.time * (by_element ? 2 : 1) * depth;
      const double reading = static_cast<double>(tiles * (tile.rows + tile.cols)) *
                             kSlicedReadTime * static_cast<double>(problem.k);
      const double time = kSlicedLaunchTime + turns * kSlicedTileTime +
                          (splits > 1 ? kSlicedExchangeTime : 0) + std::max(multiplying, reading);
      if (best.tile == nullptr || time < best.time) best = {&tile, splits, time};
    }
  }
  return best;
}

double fma_sliced_time(const Problem& problem, const Device& device) {
  return kSlicedFactor * best_sliced_tile(problem, device).time;
}

// How much longer products of fma_batched take if single floats are copied, which are four times as
// many copies. The time of a tile of one block alone before and after its products.
constexpr double kBatchedElementFactor = 1.3;
constexpr double kLoneTileTime = 800;
// Of a multiprocessor: its schedulers; and the most tiles of 32 x 32 of a single product, two for
// each scheduler. Of more, larger tiles read the factors less often.
constexpr std::int64_t kSchedulers = 4;
constexpr std::int64_t kMostSingleTiles = 8;

std::int64_t tiles_of(const Problem& problem, const FmaBatchedTile& tile) {
  return problem.batch * divide_up(problem.m, tile.rows) * divide_up(problem.n, tile.cols);
}

struct FmaBatchedChoice {
  const FmaBatchedTile* tile;
  double time;
};

// The tile with the shortest estimated time: that of the products of all blocks of a
// multiprocessor, of one block alone, or of the reads from the L2 cache, whichever is longest. Each
// scheduler issues the FMAs of its warps one after the other, so a fifth warp takes as long as
// eight. The launch and the reads take as long as those of fma_sliced.
FmaBatchedChoice best_fma_batched_tile(const Problem& problem, const Device& device) {
  const double factor = fma_vector_bytes(problem) == 4 ? kBatchedElementFactor : 1;
  const auto depth = static_cast<double>(divide_up(problem.k, kFmaStepDepth) * kFmaStepDepth);
  FmaBatchedChoice best{};
  for (const FmaBatchedTile& tile : kFmaBatchedTiles) {
    const std::int64_t tiles = tiles_of(problem, tile);
    const std::int64_t warps = divide_up(tiles, device.multiprocessors) * tile.threads() / 32;
    const auto turns = static_cast<double>(divide_up(warps, kSchedulers));
    const double multiplying = turns * (tile.tile_time + factor * tile.time * depth);
    const double alone = kLoneTileTime + factor * tile.lone_time * depth;
    const double reading = static_cast<double>(tiles * (tile.rows + tile.cols)) * kSlicedReadTime *
                           static_cast<double>(problem.k);
    const double time = kSlicedLaunchTime + std::max({multiplying, alone, reading});
    if (best.tile == nullptr || time < best.time) best = {&tile, time};
  }
  return best;
}

// Whether fma_batched takes the problem, which is a batch, or has few enough tiles, or too few rows
// or columns for larger ones.
bool suits_fma_batched(const Problem& problem, const Device& device) {
  return refusal_of_fma_batched(problem, device).empty() &&
         (problem.batch > 1 || std::min(problem.m, problem.n) <= kLeastFmaExtent ||
          tiles_of(problem, kFmaBatchedTiles[1]) <= kMostSingleTiles * device.multiprocessors);
}

// The estimated time of coalesced.
double coalesced_time(const Problem& problem) {
  return kCoalescedLaunchTime + kCoalescedTime * static_cast<double>(problem.k);
}

// Whether fma_sliced takes the problem, and the problem has few enough tiles, or too few rows or
// columns for larger ones.
bool suits_fma_sliced(const Problem& problem, const Device& device) {
  return refusal_of_fma_sliced(problem, device).empty() &&
         (std::min(problem.m, problem.n) <= kLeastFmaExtent ||
          tiles_of(problem, kSlicedTiles[0]) <= kMostSlicedTurns * device.multiprocessors);
}

}  // namespace

// Why fma_pipelined does not take the problem; empty if it does.
std::string refusal_of_fma_pipelined(const Problem& problem, const Device& device) {
  if (problem.dtype != DType::kFloat32) {
    return "supports only float32, not " + text(info(problem.dtype).name);
  }
  if (!device.runs_hopper_code()) return "requires a GPU of compute capability 9.0";
  if (has_epilogue(problem)) return "does not support a bias or an activation";
  if (problem.alignment < 16) return "requires arrays aligned to 16 bytes";
  if (problem.k < 1) return "requires a depth k of at least 1";
  for (const StoredFactor& factor : {stored_a(problem), stored_b(problem)}) {
    if (!fits_tensor_copies(factor.length * factor.element_bytes)) {
      return "requires factors whose rows, as stored, are a multiple of 16 bytes";
    }
  }
  const std::int64_t most = kMostTensorExtent;
  if (std::max({problem.batch, problem.m, problem.n, problem.k}) > most ||
      std::max(problem.m, problem.n) > (std::int64_t{1} << 37) / problem.k) {
    return "supports sizes of at most 2^30 and factors of at most 512 GiB";
  }
  const double tiles = static_cast<double>(problem.batch) *
                       static_cast<double>(divide_up(problem.m, kFmaRows)) *
                       static_cast<double>(divide_up(problem.n, kFmaTiles[1].cols));
  return tiles > static_cast<double>(most) ? "supports at most 2^30 tiles" : "";
}

// Why fma_sliced does not take the problem; empty if it does.
std::string refusal_of_fma_sliced(const Problem& problem, const Device& device) {
  if (problem.dtype != DType::kFloat32) {
    return "supports only float32, not " + text(info(problem.dtype).name);
  }
  if (device.compute_capability < 80) return "requires a GPU of compute capability 8.0 or later";
  if (problem.k > kMostFmaDepth) return "supports a depth k of at most 2^30";
  const double tiles = static_cast<double>(problem.batch) *
                       static_cast<double>(divide_up(problem.m, kSlicedTiles[1].rows)) *
                       static_cast<double>(divide_up(problem.n, kSlicedTiles[1].cols));
  return tiles > static_cast<double>(kMostTensorExtent) ? "supports at most 2^30 tiles" : "";
}

// Why fma_batched does not take the problem; empty if it does.
std::string refusal_of_fma_batched(const Problem& problem, const Device& device) {
  if (problem.dtype != DType::kFloat32) {
    return "supports only float32, not " + text(info(problem.dtype).name);
  }
  if (device.compute_capability < 80) return "requires a GPU of compute capability 8.0 or later";
  if (problem.k > kMostFmaDepth) return "supports a depth k of at most 2^30";
  const double smallest = static_cast<double>(problem.batch) *
                          static_cast<double>(divide_up(problem.m, 32)) *
                          static_cast<double>(divide_up(problem.n, 32));
  return smallest > static_cast<double>(kMostTensorExtent)
             ? "supports at most 2^30 tiles of 32 x 32"
             : "";
}

double fma_time(const Problem& problem, const Device& device) {
  double time = block_kernels_time(problem, device);
  if (refusal_of_fma_pipelined(problem, device).empty()) {
    time = std::min(time, best_fma_tile(problem, device).time);
  }
  if (suits_fma_sliced(problem, device)) {
    time = std::min(time, fma_sliced_time(problem, device));
  }
  if (suits_fma_batched(problem, device)) {
    time = std::min(time, best_fma_batched_tile(problem, device).time);
  }
  return time;
}

bool prefers_fma_sliced(const Problem& problem, const Device& device) {
  return suits_fma_sliced(problem, device) &&
         fma_sliced_time(problem, device) <= fma_time(problem, device);
}

bool prefers_fma_sliced_to_coalesced(const Problem& problem, const Device& device) {
  return suits_fma_sliced(problem, device) &&
         best_sliced_tile(problem, device).time < coalesced_time(problem);
}

Config configure_fma_sliced(const Problem& problem, const Device& device) {
  const SlicedChoice choice = best_sliced_tile(problem, device);
  const SlicedTile& tile = *choice.tile;
  Config config;
  config.threads = kSlicedThreads;
  config.tile_rows = tile.rows;
  config.tile_cols = tile.cols;
  config.blocks = choice.splits * tiles_of(problem, tile);
  config.splits = choice.splits;
  config.stages = tile.stages;
  config.vector_bytes = fma_vector_bytes(problem);
  config.shared_bytes = tile.shared_bytes();
  return config;
}

bool prefers_fma_batched(const Problem& problem, const Device& device) {
  return suits_fma_batched(problem, device) &&
         best_fma_batched_tile(problem, device).time <= fma_time(problem, device);
}

bool prefers_fma_batched_to_coalesced(const Problem& problem, const Device& device) {
  return prefers_fma_batched(problem, device) &&
         best_fma_batched_tile(problem, device).time < coalesced_time(problem);
}

Config configure_fma_batched(const Problem& problem, const Device& device) {
  const FmaBatchedTile& tile = *best_fma_batched_tile(problem, device).tile;
  Config config;
  config.threads = tile.threads();
  config.tile_rows = tile.rows;
  config.tile_cols = tile.cols;
  config.blocks = tiles_of(problem, tile);
  config.stages = tile.stages;
  config.vector_bytes = fma_vector_bytes(problem);
  config.shared_bytes = tile.shared_bytes();
  return config;
}

bool prefers_fma_pipelined(const Problem& problem, const Device& device) {
  return std::min(problem.m, problem.n) > kLeastFmaExtent &&
         refusal_of_fma_pipelined(problem, device).empty() &&
         best_fma_tile(problem, device).time < block_kernels_time(problem, device);
}

Config configure_fma_pipelined(const Problem& problem, const Device& device) {
  const FmaTile& tile = *best_fma_tile(problem, device).tile;
  Config config;
  config.threads = kFmaThreads;
  config.tile_rows = kFmaRows;
  config.tile_cols = tile.cols;
  config.blocks = std::min<std::int64_t>(tiles_of(problem, tile), device.multiprocessors);
  config.stages = tile.stages;
  config.group = kFmaGroup;
  config.shared_bytes = tile.shared_bytes();
  return config;
}

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
