#include "matmul/plan.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "core/integer.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {
namespace {

// A 128 x 128 tile that is mostly empty is slower than small tiles.
constexpr std::int64_t kLeastTiledExtent = 64;
// Below about 100^3 multiplications the barriers of a tiled kernel cost more than it saves.
constexpr double kLeastSharedWork = 1 << 20;
// Below about 64^3 multiplications the copies of a tile's slices take longer than the elements do.
constexpr double kLeastTensorCoreWork = 1 << 18;

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

void check(const Problem& problem) {
  const Precision own = own_precision(problem.dtype);
  // What a user says of precision in general is a least, which the kernels exceed.
  if (problem.precision > Precision::kHighest && problem.precision != own &&
      !asks_for_tf32(problem)) {
    throw std::invalid_argument("matmul kernels multiply " + text(info(problem.dtype).name) +
                                " by " + text(kPrecisions[static_cast<int>(own)]) + ", not by " +
                                text(kPrecisions[static_cast<int>(problem.precision)]));
  }
  if (has_epilogue(problem) && (problem.has_c || problem.scaled)) {
    throw std::invalid_argument("matmul kernels have no bias and no activation with c or alpha");
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

// Whether tensor cores are worth their start, or all that the precision allows.
bool wants_tensor_cores(const Problem& problem) {
  return work_of(problem) >= kLeastTensorCoreWork || asks_for_tf32(problem);
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
  if (problem.gated) {
    const std::string why = refusal_of_tensor_core(problem, device);
    if (why.empty()) return {Algorithm::kTensorCore, "it alone has a gate"};
    throw std::invalid_argument("of the matmul kernels 'tensor_core' alone has a gate, and " + why);
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
      if (split_k_time(problem, device) < tensor_core_time(problem, device)) {
        const int splits = configure_split_k(problem, device).splits;
        return {Algorithm::kSplitK, "so few tiles that " + std::to_string(splits) +
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
  if (problem.gated && named != Algorithm::kTensorCore) {
    throw std::invalid_argument("algorithm '" + text(name_of(named)) + "' has no gate");
  }
  if (named == Algorithm::kCublas && has_epilogue(problem)) {
    throw std::invalid_argument("algorithm 'cublas' has no bias and no activation");
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
