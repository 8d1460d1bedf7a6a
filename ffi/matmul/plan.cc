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
// Below about 64^3 multiplications copying the slices of a tile takes longer than computing each
// element by a thread.
constexpr double kLeastTensorCoreWork = 1 << 18;

// The types of operands, products and sums in the kernels for a dtype. The kernels on tensor cores
// multiply float32 in TF32.
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
    case DType::kFloat8E4M3FN:
    case DType::kFloat8E5M2:
      return Precision::kAnyF8AnyF8F32;
    case DType::kInt8:  // no preset names it
      return Precision::kDefault;
    default:
      throw std::invalid_argument(
          "matmul kernels support float16, bfloat16, float32, float64, float8_e4m3fn, float8_e5m2 "
          "and int8, not " +
          text(info(dtype).name));
  }
}

// Whether the kernels implement the problem's preset.
bool implements(const Problem& problem) {
  switch (problem.precision) {
    case Precision::kTF32TF32F32:
    case Precision::kBF16BF16F32X6:
      return problem.dtype == DType::kFloat32;
    case Precision::kAnyF8AnyF8F32:
    case Precision::kAnyF8AnyF8F32FastAccum:
      return is_8_bit_float(problem.dtype);
    case Precision::kAnyF8AnyF8Any:  // the sums have the type of the result
    case Precision::kAnyF8AnyF8AnyFastAccum:
      return is_8_bit_float(problem.dtype) && problem.result_dtype == DType::kFloat32;
    default:
      return problem.precision == own_precision(problem.dtype);
  }
}

void check(const Problem& problem) {
  const Precision own = own_precision(problem.dtype);
  // A jax.lax.Precision is a lower bound, which the kernels may exceed; a preset is not.
  if (problem.precision > Precision::kHighest && !implements(problem)) {
    if (problem.dtype == DType::kInt8) {
      throw std::invalid_argument("matmul kernels multiply int8 exactly, not with precision " +
                                  text(kPrecisions[static_cast<int>(problem.precision)]));
    }
    throw std::invalid_argument("matmul kernels multiply " + text(info(problem.dtype).name) +
                                " with precision " + text(kPrecisions[static_cast<int>(own)]) +
                                ", not " + text(kPrecisions[static_cast<int>(problem.precision)]));
  }
  if (has_epilogue(problem) && problem.scaled) {
    throw std::invalid_argument("matmul kernels do not support a bias or an activation with alpha");
  }
  if (has_scales(problem)) {
    if (!is_8_bit(problem.dtype)) {
      throw std::invalid_argument("matmul kernels support scales only for 8-bit factors, not for " +
                                  text(info(problem.dtype).name));
    }
    if (problem.has_c || problem.scaled || has_epilogue(problem)) {
      throw std::invalid_argument(
          "matmul kernels do not support scales with c, alpha, a bias, an activation or a gate");
    }
  }
  if (!takes_result(problem)) {
    throw std::invalid_argument("matmul kernels do not support a result of dtype " +
                                text(info(problem.result_dtype).name) + " for operands of dtype " +
                                text(info(problem.dtype).name));
  }
}

// True if rows of `run` elements begin at multiples of a pack.
bool fits_packs(const Problem& problem, DType dtype, std::int64_t run) {
  const auto pack_bytes = kPack * bytes_of(dtype);
  return run % kPack == 0 && problem.alignment >= std::min<std::int64_t>(pack_bytes, 16);
}

// Whether only kernels on tensor cores take the dtype and the precision.
bool needs_tensor_cores(const Problem& problem) {
  return asks_for_tf32(problem) || is_8_bit(problem.dtype);
}

// Whether the work is worth the overhead of tensor cores, or nothing else takes the problem.
bool wants_tensor_cores(const Problem& problem) {
  return work_of(problem) >= kLeastTensorCoreWork || needs_tensor_cores(problem);
}

bool chooses_mma_batched(const Problem& problem) {
  return wants_tensor_cores(problem) && suits_mma_batched(problem);
}

// Whether the plan may choose fma_skinny, on some device.
bool may_choose_fma_skinny(const Problem& problem) {
  return work_of(problem) >= kLeastTensorCoreWork && suits_fma_skinny(problem);
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
    case Algorithm::kParallelSplitK:
      return configure_parallel_split_k(problem, device);
    case Algorithm::kWgmmaBatched:
      return configure_wgmma_batched(problem, device);
    case Algorithm::kSkinny:
      return configure_skinny(problem, device);
    case Algorithm::kBF16X6:
    case Algorithm::kFP16X3:
      config = configure_parts(problem, device);
      break;
    case Algorithm::kFmaPipelined:
      config = configure_fma_pipelined(problem, device);
      break;
    case Algorithm::kFmaSliced:
      config = configure_fma_sliced(problem, device);
      break;
    case Algorithm::kFmaBatched:
      config = configure_fma_batched(problem, device);
      break;
    case Algorithm::kFmaSkinny:
      return configure_fma_skinny(problem, device);
    case Algorithm::kMmaPipelined:
      config = configure_mma_pipelined(problem, device);
      break;
    case Algorithm::kMmaBatched:
      return configure_mma_batched(problem);
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

// Why the algorithm does not take the problem; empty if it does.
std::string refusal_of(Algorithm algorithm, const Problem& problem, const Device& device) {
  if (problem.gated && algorithm != Algorithm::kTensorCore) {
    return "does not support gated products; 'tensor_core' does";
  }
  if (is_8_bit(problem.dtype) && algorithm != Algorithm::kTensorCore) {
    return "does not support " + text(info(problem.dtype).name) + "; 'tensor_core' does";
  }
  std::string why;
  switch (algorithm) {
    case Algorithm::kTensorCore:
      return refusal_of_tensor_core(problem, device);
    case Algorithm::kSplitK:
      return refusal_of_split_k(problem, device);
    case Algorithm::kParallelSplitK:
      return refusal_of_parallel_split_k(problem, device);
    case Algorithm::kWgmmaBatched:
      return refusal_of_wgmma_batched(problem, device);
    case Algorithm::kSkinny:
      return refusal_of_skinny(problem, device);
    case Algorithm::kBF16X6:
      return refusal_of_bf16_x6(problem, device);
    case Algorithm::kFP16X3:
      return refusal_of_fp16_x3(problem, device);
    case Algorithm::kFmaPipelined:
      why = refusal_of_fma_pipelined(problem, device);
      break;
    case Algorithm::kFmaSliced:
      why = refusal_of_fma_sliced(problem, device);
      break;
    case Algorithm::kFmaBatched:
      why = refusal_of_fma_batched(problem, device);
      break;
    case Algorithm::kFmaSkinny:
      why = refusal_of_fma_skinny(problem, device);
      break;
    case Algorithm::kMmaPipelined:
      return refusal_of_mma_pipelined(problem, device);
    case Algorithm::kMmaBatched:
      return refusal_of_mma_batched(problem, device);
    case Algorithm::kCublas:
      if (device.simulated) why = "is CUDA only: the host has no cuBLAS";
      if (has_epilogue(problem)) why = "does not support a bias or an activation";
      break;
    default:
      break;
  }
  if (!why.empty()) return why;
  if (asks_for_tf32(problem) || asks_for_bf16_x6(problem)) {
    return "multiplies float32 with precision F32_F32_F32, not " +
           text(kPrecisions[static_cast<int>(problem.precision)]);
  }
  return "";
}

// For problems that only one algorithm computes: throws if it cannot take this one.
void require(Algorithm algorithm, const std::string& what, const Problem& problem,
             const Device& device) {
  const std::string why = refusal_of(algorithm, problem, device);
  if (why.empty()) return;
  throw std::invalid_argument("no algorithm computes this " + what + ": '" +
                              text(name_of(algorithm)) + "' " + why);
}

// The best of our kernels, and why.
std::pair<Algorithm, std::string> choose(const Problem& problem, const Device& device) {
  if (is_8_bit(problem.dtype)) {
    require(Algorithm::kTensorCore, "product of " + text(info(problem.dtype).name), problem,
            device);
  }
  if (asks_for_tf32(problem)) {
    require(Algorithm::kMmaPipelined, "product of float32 with precision TF32_TF32_F32", problem,
            device);
  }
  if (asks_for_bf16_x6(problem)) {
    require(Algorithm::kBF16X6, "product of float32 with precision BF16_BF16_F32_X6", problem,
            device);
    return {Algorithm::kBF16X6, "the only algorithm for precision BF16_BF16_F32_X6"};
  }
  if (problem.gated) {
    require(Algorithm::kTensorCore, "gated product", problem, device);
    return {Algorithm::kTensorCore, "the only algorithm for gated products"};
  }
  const std::int64_t tiles =
      problem.batch * divide_up(problem.m, kTile) * divide_up(problem.n, kTile);
  if (work_of(problem) >= kLeastTensorCoreWork && prefers_skinny(problem, device)) {
    return {Algorithm::kSkinny,
            "so few rows or columns that reading the other factor takes most of the time"};
  }
  if (wants_tensor_cores(problem) && prefers_wgmma_batched(problem, device)) {
    return {Algorithm::kWgmmaBatched,
            "so few steps along k that blocks of one tile each are faster"};
  }
  if (chooses_mma_batched(problem) && refusal_of_mma_batched(problem, device).empty()) {
    return {Algorithm::kMmaBatched,
            "a batch of products that are small, or have rows that begin at any address"};
  }
  if (may_choose_fma_skinny(problem) && prefers_fma_skinny(problem, device)) {
    return {Algorithm::kFmaSkinny,
            "so few rows or columns that reading the other factor takes most of the time"};
  }
  if (wants_tensor_cores(problem) && refusal_of_tensor_core(problem, device).empty()) {
    if (prefers_parallel_split_k(problem, device)) {
      const int splits = configure_parallel_split_k(problem, device).splits;
      return {Algorithm::kParallelSplitK, "so few tiles that " + std::to_string(splits) +
                                              " blocks multiply parts of the depth of each, on "
                                              "tensor cores"};
    }
    // Where the plan may choose fma_skinny, no workspace is reserved for copies.
    const bool may_copy = !may_choose_fma_skinny(problem) || copies_bytes(problem) == 0;
    if (may_copy && refusal_of_split_k(problem, device).empty()) {
      if (split_k_time(problem, device) < tensor_core_time(problem, device)) {
        const int splits = configure_split_k(problem, device).splits;
        return {Algorithm::kSplitK, "so few tiles that " + std::to_string(splits) +
                                        " blocks share each, on tensor cores"};
      }
    }
    return {Algorithm::kTensorCore, "tensor cores support the problem"};
  }
  if (wants_tensor_cores(problem) && refusal_of_mma_pipelined(problem, device).empty()) {
    return {Algorithm::kMmaPipelined, problem.dtype == DType::kFloat64
                                          ? "tensor cores multiply float64 with the same accuracy"
                                          : "tensor cores support the problem, by mma.sync"};
  }
  if (prefers_fp16_x3(problem, device)) {
    return {
        Algorithm::kFP16X3,
        "three products of float16 parts on tensor cores are faster than six of bfloat16, where "
        "the data allows them"};
  }
  if (prefers_bf16_x6(problem, device)) {
    return {Algorithm::kBF16X6,
            "six products of bfloat16 parts on tensor cores are faster than one of float32"};
  }
  const bool is_small = work_of(problem) < kLeastSharedWork;
  if (is_small ? prefers_fma_batched_to_coalesced(problem, device)
               : prefers_fma_batched(problem, device)) {
    return {Algorithm::kFmaBatched, "small tiles fit the problem best"};
  }
  if (is_small ? prefers_fma_sliced_to_coalesced(problem, device)
               : prefers_fma_sliced(problem, device)) {
    const int splits = configure_fma_sliced(problem, device).splits;
    return {Algorithm::kFmaSliced,
            "so few tiles that " +
                (splits == 1 ? "the warps of a block"
                             : "the warps of " + std::to_string(splits) + " blocks") +
                " share the depth of each"};
  }
  if (is_small) return {Algorithm::kCoalesced, "the problem is too small to benefit from tiles"};
  if (prefers_fma_pipelined(problem, device)) {
    return {Algorithm::kFmaPipelined, "tensor copies (TMA) can supply the FMAs with data"};
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
  const std::string why = refusal_of(named, problem, device);
  if (!why.empty()) {
    throw std::invalid_argument("algorithm '" + text(name_of(named)) + "' " + why);
  }
  return {named, "the caller named the algorithm", configure(problem, named, device)};
}

std::int64_t workspace_bytes(const Problem& problem, std::string_view algorithm) {
  const bool may_split = algorithm.empty() ? suits_bf16_x6(problem) || asks_for_bf16_x6(problem)
                                           : algorithm == name_of(Algorithm::kBF16X6) ||
                                                 algorithm == name_of(Algorithm::kFP16X3);
  if (may_split && problem.dtype == DType::kFloat32 && problem.k > 0) {
    return parts_workspace(problem).bytes;
  }
  if (algorithm.empty() && chooses_mma_batched(problem)) return 0;
  const bool may_copy = algorithm.empty() ? wants_tensor_cores(problem) && !suits_skinny(problem) &&
                                                !may_choose_fma_skinny(problem)
                                          : algorithm == name_of(Algorithm::kTensorCore) ||
                                                algorithm == name_of(Algorithm::kSplitK);
  const bool takes =
      (is_16_bit_float(problem.dtype) || is_8_bit(problem.dtype) || may_use_tf32(problem)) &&
      refusal_of_c(problem).empty() && !problem.scaled && problem.k > 0;
  const bool splits_k = algorithm.empty() ? suits_parallel_split_k(problem) &&
                                                (!may_choose_fma_skinny(problem) ||
                                                 tensor_core_copies_bytes(problem) == 0)
                                          : algorithm == name_of(Algorithm::kParallelSplitK);
  if (!takes) return 0;
  std::int64_t bytes = splits_k ? parallel_split_k_workspace(problem) : 0;
  if (may_copy) {
    // Only split_k copies a row-major b of floats, and it adds no c.
    const bool splits = algorithm != name_of(Algorithm::kTensorCore) && !problem.has_c;
    bytes = std::max(bytes, splits ? copies_bytes(problem) : tensor_core_copies_bytes(problem));
  }
  return bytes;
}

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
