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
// How many rows of tiles of tensor_core share columns of b in the L2 cache.
constexpr std::int64_t kTensorCoreGroup = 8;
// Coordinates of tensor copies and numbers of tiles are ints, and a matrix is at most what a stride
// of a tensor map spans.
constexpr std::int64_t kMostTensorExtent = 1 << 30;
constexpr std::int64_t kMostTensorBytes = std::int64_t{1} << 39;

std::string text(std::string_view view) { return std::string(view); }

// What the kernels compute for operands of a dtype: operands, products and sums.
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

void check(const Problem& problem) {
  const Precision own = own_precision(problem.dtype);
  // What a user says of precision in general is a least, which the kernels exceed.
  if (problem.precision > Precision::kHighest && problem.precision != own) {
    throw std::invalid_argument("matmul kernels multiply " + text(info(problem.dtype).name) +
                                " by " + text(kPrecisions[static_cast<int>(own)]) + ", not by " +
                                text(kPrecisions[static_cast<int>(problem.precision)]));
  }
  const bool is_half = problem.dtype == DType::kFloat16 || problem.dtype == DType::kBFloat16;
  if (problem.result_dtype != problem.dtype &&
      !(is_half && problem.result_dtype == DType::kFloat32)) {
    throw std::invalid_argument("matmul kernels have no result of dtype " +
                                text(info(problem.result_dtype).name) + " for operands of " +
                                text(info(problem.dtype).name));
  }
}

// True if rows of `run` elements begin at multiples of a pack.
bool fits_packs(const Problem& problem, DType dtype, std::int64_t run) {
  const auto pack_bytes = kPack * static_cast<std::int64_t>(info(dtype).bytes);
  return run % kPack == 0 && problem.alignment >= std::min<std::int64_t>(pack_bytes, 16);
}

std::int64_t row_of_a(const Problem& problem) {
  return problem.transpose_a ? problem.m : problem.k;
}
std::int64_t row_of_b(const Problem& problem) {
  return problem.transpose_b ? problem.k : problem.n;
}

std::int64_t clusters_of(const Problem& problem, const TensorCoreTile& tile) {
  return problem.batch * divide_up(problem.m, tile.rows * tile.cluster_rows) *
         divide_up(problem.n, tile.cols);
}

// Why tensor_core does not take the problem; empty if it does.
std::string refusal_of_tensor_core(const Problem& problem, const Device& device) {
  if (problem.dtype != DType::kFloat16 && problem.dtype != DType::kBFloat16) {
    return "takes float16 and bfloat16, not " + text(info(problem.dtype).name);
  }
  if (!device.runs_hopper_code()) return "needs a GPU of compute capability 9.0";
  if (problem.has_c) return "adds no c";
  if (problem.scaled) return "has no alpha other than 1";
  if (problem.alignment < 16) return "takes arrays aligned to 16 bytes";
  const auto bytes = static_cast<std::int64_t>(info(problem.dtype).bytes);
  const auto result_bytes = static_cast<std::int64_t>(info(problem.result_dtype).bytes);
  const auto of_row = [](const char* name, std::int64_t elements, std::int64_t each) {
    return elements * each % 16 == 0
               ? std::string()
               : std::string("takes rows of whole 16 bytes, and as it is stored a row of ") + name +
                     " has " + std::to_string(elements * each) + " bytes";
  };
  for (const std::string& why :
       {of_row("a", row_of_a(problem), bytes), of_row("b", row_of_b(problem), bytes),
        of_row("the result", problem.n, result_bytes)}) {
    if (!why.empty()) return why;
  }
  const std::int64_t most = kMostTensorExtent;
  if (std::max({problem.batch, problem.m, problem.n, problem.k}) > most ||
      std::max(problem.m, problem.n) * problem.k > kMostTensorBytes / bytes ||
      problem.m * problem.n > kMostTensorBytes / result_bytes) {
    return "takes extents of at most 2^30 and matrices of at most 512 GiB";
  }
  // As many tiles as the least of them make.
  const double tiles = static_cast<double>(problem.batch) *
                       static_cast<double>(divide_up(problem.m, 64) * divide_up(problem.n, 128));
  if (tiles > static_cast<double>(most)) return "takes at most 2^30 tiles";
  return "";
}

// The tile by which the multiprocessors are done first: each takes tile after tile.
const TensorCoreTile& best_tile(const Problem& problem, const Device& device) {
  constexpr int kAlignedRow = 64;  // elements, of 128 bytes
  const bool aligned = row_of_a(problem) % kAlignedRow == 0 && row_of_b(problem) % kAlignedRow == 0;
  const TensorCoreTile* best = nullptr;
  double least = 0;
  for (const TensorCoreTile& tile : kTensorCoreTiles) {
    if (tile.result_bytes != static_cast<int>(info(problem.result_dtype).bytes)) continue;
    const std::int64_t turns =
        divide_up(clusters_of(problem, tile), device.multiprocessors / tile.cluster_rows);
    const double time = static_cast<double>(turns) * tile.rows * tile.cols /
                        (aligned ? tile.speed : tile.unaligned_speed);
    if (best == nullptr || time < least) {
      best = &tile;
      least = time;
    }
  }
  return *best;
}

Config configure_tensor_core(const Problem& problem, const Device& device) {
  const TensorCoreTile& tile = best_tile(problem, device);
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
  return config;
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
  const double work = static_cast<double>(problem.batch) * static_cast<double>(problem.m) *
                      static_cast<double>(problem.n) * static_cast<double>(problem.k);
  const std::int64_t tiles =
      problem.batch * divide_up(problem.m, kTile) * divide_up(problem.n, kTile);
  if (work >= kLeastTensorCoreWork && refusal_of_tensor_core(problem, device).empty()) {
    return {Algorithm::kTensorCore, "tensor cores take the problem"};
  }
  if (work < kLeastSharedWork) {
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
  if (named == Algorithm::kTensorCore) {
    const std::string why = refusal_of_tensor_core(problem, device);
    if (!why.empty()) throw std::invalid_argument("algorithm 'tensor_core' " + why);
  }
  return {named, "named by the caller", configure(problem, named, device)};
}

std::int64_t workspace_bytes(const Problem&, std::string_view) { return 0; }

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
