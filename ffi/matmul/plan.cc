#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "core/integer.h"
#include "matmul/matmul.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {
namespace {

// A 128 x 128 tile that is mostly empty is slower than small tiles.
constexpr std::int64_t kLeastTiledExtent = 64;
// Below about 100^3 multiplications the barriers of a tiled kernel cost more than it saves.
constexpr double kLeastSharedWork = 1 << 20;
// Below about 64^3 multiplications the copies of a tile's slices take longer than the elements do.
constexpr double kLeastTensorCoreWork = 1 << 18;
// Below it most warps of skinny's blocks have nothing to multiply.
constexpr std::int64_t kLeastSkinnyDepth = 256;
// As TensorCoreTile has it.
constexpr int kSplitKSpeed = 86;
// How many rows of tiles of tensor_core share columns of b in the L2 cache.
constexpr std::int64_t kTensorCoreGroup = 8;
// Coordinates of tensor copies and numbers of tiles are ints, and a matrix is at most what a stride
// of a tensor map spans.
constexpr std::int64_t kMostTensorExtent = 1 << 30;
constexpr std::int64_t kMostTensorBytes = std::int64_t{1} << 39;

std::string text(std::string_view view) { return std::string(view); }

std::int64_t bytes_of(DType dtype) { return static_cast<std::int64_t>(info(dtype).bytes); }

bool is_16_bit_float(DType dtype) { return dtype == DType::kFloat16 || dtype == DType::kBFloat16; }

// What the kernels compute for operands of a dtype: operands, products and sums. Those on tensor
// cores multiply float32 in TF32.
Precision own_precision(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return Precision::kF16F16F32;
    case DType::kBFloat16:
      return Precision::kBF16BF16F32;
    case DType::kFloat32:
      return Precision::kF32F32F32;
    case DType::kFloat64:
      return Precision::kF64F64F64;
    default:
      throw std::invalid_argument(
          "matmul kernels take float16, bfloat16, float32 and float64, not " +
          text(info(dtype).name));
  }
}

bool asks_for_tf32(const Problem& problem) {
  return problem.dtype == DType::kFloat32 && problem.precision == Precision::kTF32TF32F32;
}

// As with XLA: jax.lax.Precision.HIGH is what "tensorfloat32" means.
bool may_use_tf32(const Problem& problem) {
  return problem.dtype == DType::kFloat32 &&
         (problem.precision == Precision::kDefault || problem.precision == Precision::kHigh ||
          problem.precision == Precision::kTF32TF32F32);
}

void check(const Problem& problem) {
  const Precision own = own_precision(problem.dtype);
  // What a user says of precision in general is a least, which the kernels exceed.
  if (problem.precision > Precision::kHighest && problem.precision != own &&
      !asks_for_tf32(problem)) {
    throw std::invalid_argument("matmul kernels multiply " + text(info(problem.dtype).name) +
                                " by " + text(kPrecisions[static_cast<int>(own)]) + ", not by " +
                                text(kPrecisions[static_cast<int>(problem.precision)]));
  }
  if (problem.result_dtype != problem.dtype &&
      !(is_16_bit_float(problem.dtype) && problem.result_dtype == DType::kFloat32)) {
    throw std::invalid_argument("matmul kernels have no result of dtype " +
                                text(info(problem.result_dtype).name) + " for operands of " +
                                text(info(problem.dtype).name));
  }
}

// True if rows of `run` elements begin at multiples of a pack.
bool fits_packs(const Problem& problem, DType dtype, std::int64_t run) {
  const auto pack_bytes = kPack * bytes_of(dtype);
  return run % kPack == 0 && problem.alignment >= std::min<std::int64_t>(pack_bytes, 16);
}

std::int64_t copies_bytes(const Problem& problem) {
  std::int64_t bytes = 0;
  for (const StoredFactor& each : {stored_a(problem), stored_b(problem)}) {
    if (needs_copy(each)) bytes += copy_bytes(each);
  }
  return bytes;
}

double work_of(const Problem& problem) {
  return static_cast<double>(problem.batch) * static_cast<double>(problem.m) *
         static_cast<double>(problem.n) * static_cast<double>(problem.k);
}

// Whether tensor cores are worth their start, or all that the precision allows.
bool wants_tensor_cores(const Problem& problem) {
  return work_of(problem) >= kLeastTensorCoreWork || asks_for_tf32(problem);
}

std::int64_t clusters_of(const Problem& problem, const TensorCoreTile& tile) {
  return problem.batch * divide_up(problem.m, tile.rows * tile.cluster_rows) *
         divide_up(problem.n, tile.cols);
}

// Why no kernel on tensor cores takes what is done to the product; empty if they do.
std::string refusal_of_epilogue(const Problem& problem) {
  if (problem.has_c) return "adds no c";
  return problem.scaled ? "has no alpha other than 1" : "";
}

// Why tensor_core does not take the problem; empty if it does.
std::string refusal_of_tensor_core(const Problem& problem, const Device& device) {
  if (!is_16_bit_float(problem.dtype) && problem.dtype != DType::kFloat32) {
    return "takes float16, bfloat16 and float32, not " + text(info(problem.dtype).name);
  }
  if (problem.dtype == DType::kFloat32 && !may_use_tf32(problem)) {
    return "multiplies float32 in TF32, which precision " +
           text(kPrecisions[static_cast<int>(problem.precision)]) + " excludes";
  }
  if (!device.runs_hopper_code()) return "needs a GPU of compute capability 9.0";
  const std::string why = refusal_of_epilogue(problem);
  if (!why.empty()) return why;
  if (problem.alignment < 16) return "takes arrays aligned to 16 bytes";
  const std::int64_t most = kMostTensorExtent;
  if (std::max({problem.batch, problem.m, problem.n, problem.k}) > most ||
      std::max(problem.m, problem.n) * problem.k > kMostTensorBytes / bytes_of(problem.dtype) ||
      problem.m * problem.n > kMostTensorBytes / bytes_of(problem.result_dtype)) {
    return "takes extents of at most 2^30 and matrices of at most 512 GiB";
  }
  // As many tiles as the least of them make.
  const double tiles = static_cast<double>(problem.batch) *
                       static_cast<double>(divide_up(problem.m, 64) * divide_up(problem.n, 128));
  if (tiles > static_cast<double>(most)) return "takes at most 2^30 tiles";
  const std::int64_t needed = copies_bytes(problem);
  if (problem.workspace != kWorkspaceAsAsked && problem.workspace < needed) {
    return "needs " + std::to_string(needed) +
           " bytes of workspace for copies of factors that tensor copies cannot read, and has " +
           std::to_string(problem.workspace);
  }
  return "";
}

// Estimates of the kernels on tensor cores, in nanoseconds, for an H200: what a launch takes before
// and after its products, with a cluster's exchange of sums and without, and what a multiprocessor
// takes for a step of 64 x 128 sums, 64 deep, at the speed of the largest tile.
constexpr double kLaunchTime = 2700;
constexpr double kExchangeTime = 2500;
constexpr double kStepTime = 126;

std::int64_t depth_steps(const Problem& problem) {
  const auto bytes = bytes_of(problem.dtype);
  return divide_up(problem.k * bytes, kTensorLineBytes);
}

// How long `turns` tiles take that a multiprocessor multiplies one after the other.
double time_of(std::int64_t turns, std::int64_t steps, int rows, int cols, int speed) {
  return static_cast<double>(turns * steps) * (rows * cols / (64.0 * 128.0)) * kStepTime * 100 /
         speed;
}

struct TensorCoreChoice {
  const TensorCoreTile* tile;
  double time;
};

// The tile by which the multiprocessors are done first: each takes tile after tile.
TensorCoreChoice best_tile(const Problem& problem, const Device& device) {
  const auto begins_lines = [](const StoredFactor& factor) {
    return needs_copy(factor) || factor.length * factor.element_bytes % kTensorLineBytes == 0;
  };
  const bool aligned = begins_lines(stored_a(problem)) && begins_lines(stored_b(problem));
  TensorCoreChoice best{};
  for (const TensorCoreTile& tile : kTensorCoreTiles) {
    if (tile.result_bytes != static_cast<int>(info(problem.result_dtype).bytes)) continue;
    const std::int64_t turns =
        divide_up(clusters_of(problem, tile), device.multiprocessors / tile.cluster_rows);
    const double time = kLaunchTime + time_of(turns, depth_steps(problem), tile.rows, tile.cols,
                                              aligned ? tile.speed : tile.unaligned_speed);
    if (best.tile == nullptr || time < best.time) best = {&tile, time};
  }
  return best;
}

// What both kernels on tensor cores do with factors that tensor copies cannot take.
void configure_copies(const Problem& problem, Config& config) {
  config.copies_a = needs_copy(stored_a(problem));
  config.copies_b = needs_copy(stored_b(problem));
  config.workspace_bytes = copies_bytes(problem);
}

Config configure_tensor_core(const Problem& problem, const Device& device) {
  const TensorCoreTile& tile = *best_tile(problem, device).tile;
  Config config;
  config.threads = tile.threads();
  config.tile_rows = tile.rows;
  config.tile_cols = tile.cols;
  config.blocks =
      tile.cluster_rows * std::min<std::int64_t>(clusters_of(problem, tile),
                                                 device.multiprocessors / tile.cluster_rows);
  config.cluster_rows = tile.cluster_rows;
  config.stages = tile.stages;
  config.group = kTensorCoreGroup;
  config.shared_bytes = tile.shared_bytes();
  config.writes_elements = !fits_tensor_copies(problem.n * bytes_of(problem.result_dtype));
  configure_copies(problem, config);
  return config;
}

// Why split_k does not take the problem; empty if it does.
std::string refusal_of_split_k(const Problem& problem, const Device& device) {
  const std::string why = refusal_of_tensor_core(problem, device);
  if (!why.empty()) return why;
  if (depth_steps(problem) >= 2) return "";
  const auto bytes = bytes_of(problem.dtype);
  return "takes a depth of more than " + std::to_string(kTensorLineBytes / bytes);
}

const SplitKTile& split_k_tile(const Problem& problem) {
  return kSplitKTiles[problem.m <= kSplitKTiles[0].rows ? 0 : 1];
}

struct SplitKChoice {
  int splits;
  double time;
};

// Among how many blocks split_k divides the depth, to be done first. Clusters have to be placed on
// neighbouring multiprocessors, so that some of these stay idle: of more blocks than three quarters
// of what fits, some would wait until others are done, and two splits are all that is tried then.
SplitKChoice best_splits(const Problem& problem, const Device& device) {
  const SplitKTile& tile = split_k_tile(problem);
  const std::int64_t tiles =
      problem.batch * divide_up(problem.m, tile.rows) * divide_up(problem.n, kSplitKCols);
  const std::int64_t most_blocks = std::int64_t{device.multiprocessors} * tile.resident * 3 / 4;
  SplitKChoice best{};
  for (int splits = 2; splits <= kMostSplits; splits *= 2) {
    const std::int64_t blocks = splits * tiles;
    if (splits > 2 && (blocks > most_blocks || splits > depth_steps(problem))) break;
    const double time =
        kLaunchTime + kExchangeTime +
        time_of(divide_up(blocks, device.multiprocessors), divide_up(depth_steps(problem), splits),
                tile.rows, kSplitKCols, kSplitKSpeed);
    if (best.splits == 0 || time < best.time) best = {splits, time};
  }
  return best;
}

Config configure_split_k(const Problem& problem, const Device& device) {
  const SplitKTile& tile = split_k_tile(problem);
  Config config;
  config.threads = tile.threads();
  config.tile_rows = tile.rows;
  config.tile_cols = kSplitKCols;
  config.stages = tile.stages;
  config.splits = best_splits(problem, device).splits;
  config.blocks = config.splits * problem.batch * divide_up(problem.m, tile.rows) *
                  divide_up(problem.n, kSplitKCols);
  config.shared_bytes = tile.shared_bytes();
  configure_copies(problem, config);
  return config;
}

// Why skinny does not take the problem; empty if it does.
std::string refusal_of_skinny(const Problem& problem, const Device& device) {
  if (!is_16_bit_float(problem.dtype)) {
    return "takes float16 and bfloat16, not " + text(info(problem.dtype).name);
  }
  if (device.compute_capability < 80) return "needs a GPU of compute capability 8.0";
  const std::string why = refusal_of_epilogue(problem);
  if (!why.empty()) return why;
  if (std::min(problem.m, problem.n) > kSkinnyExtent) {
    return "takes at most " + std::to_string(kSkinnyExtent) + " rows or columns";
  }
  const std::int64_t most = kMostTensorExtent;
  if (std::max({problem.batch, problem.m, problem.n, problem.k}) > most) {
    return "takes extents of at most 2^30";
  }
  // As many blocks as the least of them make.
  const auto blocks = static_cast<double>(problem.batch) *
                      static_cast<double>(divide_up(std::max(problem.m, problem.n), 16));
  return blocks > static_cast<double>(most) ? "takes at most 2^30 tiles of 16 rows" : "";
}

// How long a multiprocessor takes for an element of the large factor, in nanoseconds: what it could
// read by itself, and its share of what memory gives to all, 60 and 34 bytes a nanosecond.
constexpr double kSkinnyReadTime = 2.0 / 60;
constexpr double kMemoryReadTime = 2.0 / 34;

// Blocks of many rows read the skinny factor less often, and longer runs of a large one whose rows
// are contiguous; but each multiprocessor should have some, and every one something to do.
int skinny_rows(const SkinnyFactors& factors, std::int64_t batch, const Device& device) {
  const auto tiles = [&](int rows) { return batch * divide_up(factors.large.extent, rows); };
  if (tiles(64) >= std::int64_t{3} * device.multiprocessors) return 64;
  return 4 * tiles(32) >= std::int64_t{3} * device.multiprocessors ? 32 : 16;
}

Config configure_skinny(const Problem& problem, const Device& device) {
  const SkinnyFactors factors = skinny_factors(problem);
  // A thread reads 8 elements of the depth, or one for each 8 of a block's rows, if these are whole
  // packs; 2 of the skinny factor's columns.
  const auto fits = [&](std::int64_t length, int pack) {
    return length % pack == 0 && problem.alignment >= std::int64_t{2} * pack;
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
    packs_skinny = factors.skinny.deep ? fits(problem.k, 8) : fits(factors.skinny.extent, 2);
    if (packs_skinny && factors.skinny.deep && factors.skinny.extent <= 8) tile.cols = 8;
  } else {
    tile = kSkinnyUnpackedTile;
  }
  Config config;
  config.threads = kSkinnyThreads;
  config.tile_rows = factors.large_is_a ? tile.rows : tile.cols;
  config.tile_cols = factors.large_is_a ? tile.cols : tile.rows;
  config.pack_a = factors.large_is_a ? packs_large : packs_skinny;
  config.pack_b = factors.large_is_a ? packs_skinny : packs_large;
  config.blocks = problem.batch * divide_up(factors.large.extent, tile.rows);
  config.shared_bytes = skinny_shared_bytes(tile.rows, tile.cols);
  return config;
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

// Whether skinny may be the plan's, by the problem alone.
bool suits_skinny(const Problem& problem) {
  return is_16_bit_float(problem.dtype) && std::min(problem.m, problem.n) <= kSkinnyExtent &&
         problem.k >= kLeastSkinnyDepth;
}

// Whether to take skinny rather than the other kernels on tensor cores, where these take the
// problem: for long enough depths, unless few rows leave most of the GPU idle while others divide
// the depth among more blocks, or have fewer products to wait for. No other kernel is as fast where
// it has to copy a factor.
bool prefers_skinny(const Problem& problem, const Device& device) {
  if (!suits_skinny(problem) || !refusal_of_skinny(problem, device).empty()) return false;
  if (copies_bytes(problem) > 0 || !refusal_of_tensor_core(problem, device).empty()) return true;
  const SkinnyEstimate skinny = estimate_skinny(problem, device);
  double other = best_tile(problem, device).time;
  if (refusal_of_split_k(problem, device).empty()) {
    other = std::min(other, best_splits(problem, device).time);
  }
  return skinny.time <= std::max(other, skinny.least);
}

Config configure(const Problem& problem, Algorithm algorithm, const Device& device) {
  Config config;
  const auto tile = [&](int threads, int rows, int cols) {
    config.threads = threads;
    config.tile_rows = rows;
    config.tile_cols = cols;
  };
  switch (algorithm) {
    case Algorithm::kNaive:
      tile(kElementThreads, kNaiveRows, kNaiveCols);
      break;
    case Algorithm::kCoalesced:
      tile(kElementThreads, kCoalescedRows, kCoalescedCols);
      break;
    case Algorithm::kShared:
      tile(kSharedThreads, kSharedTile, kSharedTile);
      break;
    case Algorithm::kBlockTiled:
    case Algorithm::kBankConflictFree:
    case Algorithm::kDoubleBuffered:
      tile(kTileThreads, kTile, kTile);
      break;
    case Algorithm::kTensorCore:
      return configure_tensor_core(problem, device);
    case Algorithm::kSplitK:
      return configure_split_k(problem, device);
    case Algorithm::kSkinny:
      return configure_skinny(problem, device);
    case Algorithm::kCublas:
      return config;
  }
  config.pack_a = fits_packs(problem, problem.dtype, problem.transpose_a ? problem.m : problem.k);
  config.pack_b = fits_packs(problem, problem.dtype, problem.transpose_b ? problem.k : problem.n);
  config.pack_result = fits_packs(problem, problem.result_dtype, problem.n);
  config.row_major = config.tile_rows == kTile && config.pack_a && config.pack_b &&
                     !problem.transpose_a && !problem.transpose_b;
  return config;
}

// The best of our kernels, and why.
std::pair<Algorithm, std::string> choose(const Problem& problem, const Device& device) {
  if (asks_for_tf32(problem)) {
    const std::string why = refusal_of_tensor_core(problem, device);
    if (!why.empty()) {
      throw std::invalid_argument(
          "matmul kernels multiply float32 by TF32_TF32_F32 on tensor cores alone, and "
          "'tensor_core' " +
          why);
    }
  }
  const std::int64_t tiles =
      problem.batch * divide_up(problem.m, kTile) * divide_up(problem.n, kTile);
  if (work_of(problem) >= kLeastTensorCoreWork && prefers_skinny(problem, device)) {
    return {Algorithm::kSkinny,
            "so few rows or columns that reading the other factor is what takes "
            "the time"};
  }
  if (wants_tensor_cores(problem) && refusal_of_tensor_core(problem, device).empty()) {
    if (refusal_of_split_k(problem, device).empty()) {
      const SplitKChoice split = best_splits(problem, device);
      if (split.time < best_tile(problem, device).time) {
        return {Algorithm::kSplitK, "so few tiles that " + std::to_string(split.splits) +
                                        " blocks can share each, on tensor cores"};
      }
    }
    return {Algorithm::kTensorCore, "tensor cores take the problem"};
  }
  if (work_of(problem) < kLeastSharedWork) {
    return {Algorithm::kCoalesced, "the problem is too small for tiles to pay"};
  }
  if (std::min(problem.m, problem.n) > kLeastTiledExtent && 2 * tiles >= device.multiprocessors) {
    return {Algorithm::kDoubleBuffered,
            std::to_string(tiles) + " tiles of 128 x 128 keep the GPU busy"};
  }
  return {Algorithm::kShared, std::to_string(tiles) +
                                  " tiles of 128 x 128 would leave most of the "
                                  "GPU idle"};
}

}  // namespace

Plan plan(const Problem& problem, std::string_view algorithm, const Device& device) {
  check(problem);
  if (algorithm.empty()) {
    auto [chosen, reason] = choose(problem, device);
    return {chosen, std::move(reason), configure(problem, chosen, device)};
  }
  const auto named = algorithm_from_name<Algorithm>(kAlgorithms, algorithm);
  if (named == Algorithm::kCublas && device.simulated) {
    throw std::invalid_argument("algorithm 'cublas' is CUDA only: the host has no cuBLAS");
  }
  if (asks_for_tf32(problem) && named != Algorithm::kTensorCore && named != Algorithm::kSplitK) {
    throw std::invalid_argument("algorithm '" + text(name_of(named)) +
                                "' multiplies float32 by F32_F32_F32, not by TF32_TF32_F32");
  }
  if (named == Algorithm::kTensorCore) {
    const std::string why = refusal_of_tensor_core(problem, device);
    if (!why.empty()) throw std::invalid_argument("algorithm 'tensor_core' " + why);
  }
  if (named == Algorithm::kSplitK) {
    const std::string why = refusal_of_split_k(problem, device);
    if (!why.empty()) throw std::invalid_argument("algorithm 'split_k' " + why);
  }
  if (named == Algorithm::kSkinny) {
    const std::string why = refusal_of_skinny(problem, device);
    if (!why.empty()) throw std::invalid_argument("algorithm 'skinny' " + why);
  }
  return {named, "named by the caller", configure(problem, named, device)};
}

std::int64_t workspace_bytes(const Problem& problem, std::string_view algorithm) {
  const bool may_copy = algorithm.empty() ? wants_tensor_cores(problem) && !suits_skinny(problem)
                                          : algorithm == name_of(Algorithm::kTensorCore) ||
                                                algorithm == name_of(Algorithm::kSplitK);
  const bool takes = (is_16_bit_float(problem.dtype) || may_use_tf32(problem)) && !problem.has_c &&
                     !problem.scaled && problem.k > 0;
  return may_copy && takes ? copies_bytes(problem) : 0;
}

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
