// The plan of bf16_x6 and fp16_x3: whether six or three products on tensor cores are faster than
// one by FMAs.

#include <algorithm>
#include <string>

#include "core/integer.h"
#include "matmul/plan.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {
namespace {

constexpr int kSliceDepth = kTensorLineBytes / 2;
// How many rows of tiles share columns of b in the L2 cache.
constexpr std::int64_t kPartsGroup = 8;

// With less than two slices of depth, splitting the factors and writing the results takes longer
// than the products; and for sums of few terms FMAs have the smaller errors.
constexpr std::int64_t kLeastBF16X6Depth = 2 * kSliceDepth;
// With fewer terms its errors may be larger than those of FMAs; with this many, of normal or
// uniform data, they are a third of those of FMAs.
constexpr std::int64_t kLeastFP16X3Depth = 256;
// Counts of small elements, in which a tiny element counts 17 times, are ints.
constexpr std::int64_t kMostFP16X3Depth = 1 << 26;
// Fewer rows or columns leave most of a tile empty.
constexpr std::int64_t kLeastPartsExtent = 64;
// For fewer products its launches alone take as long as FMAs, and workspace would be reserved for
// nothing.
constexpr double kLeastPartsWork = 1 << 25;

// The times of one kind of parts, in nanoseconds.
struct PartsTimes {
  double slice;          // of a multiprocessor for one slice of a tile
  double split;          // per element of a deep factor
  double strided_split;  // per element of another factor
  double launches;       // before and after the products
};
constexpr double kSliceOperations = 2.0 * kPartsTile * kPartsTile * kSliceDepth;
constexpr double kTileEndTime = 1000;
// Products of one turn end before the GPU's power limits its clock.
constexpr double kOneTurnFactor = 0.85;
constexpr double kSplitLaunchTime = 2500;
// The same for fp16_x3, half of whose launches find nothing to do.
constexpr double kFP16LaunchTime = 1800;
// To read and write an element of the result once more, for the epilogue.
constexpr double kFinishTime = 8.0 / 3500;
// From measurements on an H200: 132 multiprocessors do 142 TFLOP/s.
constexpr PartsTimes kBF16X6Times{kSliceOperations / 1075, 0.0025, 0.005, 3 * kSplitLaunchTime};
// The products do 240 to 250 TFLOP/s; two parts are written instead of three; three more launches
// follow, which find nothing to do.
constexpr PartsTimes kFP16X3Times{kSliceOperations / 1820, 0.002, 0.0045, 6 * kFP16LaunchTime};

// Blocks of a cluster share columns of b; with a single row of tiles there is no second block to
// share them.
int cluster_rows_of(const Problem& problem) { return problem.m > kPartsTile ? 2 : 1; }

std::int64_t clusters_of(const Problem& problem) {
  return problem.batch * divide_up(problem.m, kPartsTile * cluster_rows_of(problem)) *
         divide_up(problem.n, kPartsTile);
}

double parts_time(const Problem& problem, const Device& device, const PartsTimes& times) {
  double splitting = 0;
  for (const StoredFactor& factor : {stored_a(problem), stored_b(problem)}) {
    splitting += static_cast<double>(factor.batch * factor.rows) *
                 static_cast<double>(factor.length) *
                 (factor.deep ? times.split : times.strided_split);
  }
  const auto turns = static_cast<double>(
      divide_up(clusters_of(problem), device.multiprocessors / cluster_rows_of(problem)));
  const double slice = times.slice * (turns == 1 ? kOneTurnFactor : 1);
  const auto slices = static_cast<double>(divide_up(problem.k, kSliceDepth));
  const double finishing =
      has_epilogue(problem)
          ? kSplitLaunchTime +
                static_cast<double>(problem.batch * problem.m * problem.n) * kFinishTime
          : 0;
  return kLaunchTime + times.launches + splitting + turns * (slices * slice + kTileEndTime) +
         finishing;
}

// Why neither kind of parts takes the problem; empty if either may.
std::string refusal_of_parts(const Problem& problem, const Device& device) {
  if (!device.runs_hopper_code()) return "requires a GPU of compute capability 9.0";
  if (problem.k == 0 && (problem.has_c || has_epilogue(problem))) {
    return "supports c, a bias and an activation only for a depth k of at least 1";
  }
  const std::int64_t most = kMostTensorExtent;
  const std::int64_t longest_row = (std::int64_t{1} << 38) / std::max<std::int64_t>(problem.k, 1);
  if (std::max({problem.m, problem.n, problem.k}) > most || problem.batch > most / kBF16Parts ||
      std::max(problem.m, problem.n) + kTensorLineBytes > longest_row) {
    return "supports sizes of at most 2^30, a batch of at most a third of that, and factors of "
           "less than 1 TiB";
  }
  const double tiles =
      static_cast<double>(problem.batch) *
      static_cast<double>(divide_up(problem.m, kPartsTile) * divide_up(problem.n, kPartsTile));
  if (tiles > static_cast<double>(most)) return "supports at most 2^30 tiles";
  const std::int64_t needed = problem.k == 0 ? 0 : parts_workspace(problem).bytes;
  if (problem.workspace != kWorkspaceAsAsked && problem.workspace < needed) {
    return "requires " + std::to_string(needed) +
           " bytes of workspace for the parts of its factors, and has " +
           std::to_string(problem.workspace);
  }
  return "";
}

}  // namespace

// Why bf16_x6 does not take the problem; empty if it does.
std::string refusal_of_bf16_x6(const Problem& problem, const Device& device) {
  if (problem.dtype != DType::kFloat32) {
    return "supports only float32, not " + text(info(problem.dtype).name);
  }
  if (problem.precision == Precision::kF32F32F32 || problem.precision == Precision::kTF32TF32F32) {
    return "multiplies float32 with precision BF16_BF16_F32_X6, not " +
           text(kPrecisions[static_cast<int>(problem.precision)]);
  }
  return refusal_of_parts(problem, device);
}

// Why fp16_x3 does not take the problem; empty if it does.
std::string refusal_of_fp16_x3(const Problem& problem, const Device& device) {
  if (problem.dtype != DType::kFloat32) {
    return "supports only float32, not " + text(info(problem.dtype).name);
  }
  if (problem.precision > Precision::kHighest) {
    return "multiplies float32 by three float16 products, which no preset names, and does not "
           "support precision " +
           text(kPrecisions[static_cast<int>(problem.precision)]);
  }
  if (problem.k > kMostFP16X3Depth) return "supports a depth k of at most 2^26";
  return refusal_of_parts(problem, device);
}

bool suits_bf16_x6(const Problem& problem) {
  return problem.dtype == DType::kFloat32 && problem.precision == Precision::kHighest &&
         !problem.gated && problem.k >= kLeastBF16X6Depth &&
         std::min(problem.m, problem.n) > kLeastPartsExtent && work_of(problem) >= kLeastPartsWork;
}

bool prefers_bf16_x6(const Problem& problem, const Device& device) {
  return suits_bf16_x6(problem) && refusal_of_bf16_x6(problem, device).empty() &&
         parts_time(problem, device, kBF16X6Times) < fma_time(problem, device);
}

bool prefers_fp16_x3(const Problem& problem, const Device& device) {
  const double time = parts_time(problem, device, kFP16X3Times);
  return suits_bf16_x6(problem) && problem.k >= kLeastFP16X3Depth &&
         refusal_of_fp16_x3(problem, device).empty() &&
         time < parts_time(problem, device, kBF16X6Times) && time < fma_time(problem, device);
}

Config configure_parts(const Problem& problem, const Device& device) {
  Config config;
  config.threads = kPartsThreads;
  config.tile_rows = kPartsTile;
  config.tile_cols = kPartsTile;
  config.cluster_rows = cluster_rows_of(problem);
  config.blocks = blocks_of(clusters_of(problem), config.cluster_rows, device);
  config.stages = kPartsStages;
  config.group = kPartsGroup;
  config.shared_bytes = kPartsSharedBytes;
  config.workspace_bytes = problem.k == 0 ? 0 : parts_workspace(problem).bytes;
  return config;
}

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
