// The plan of tensor_core, split_k and parallel_split_k: the tiles with the shortest estimated
// time.

#include <algorithm>
#include <cmath>
#include <string>

#include "core/integer.h"
#include "matmul/plan.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {
namespace {

// How many rows of tiles of tensor_core share columns of b in the L2 cache.
constexpr std::int64_t kTensorCoreGroup = 8;
// The fraction of the time that a tail or a transposed product must save: less is within the error
// of the estimates.
constexpr double kLeastGain = 0.015;
// The largest matrix, so that its stride fits a tensor map.
constexpr std::int64_t kMostTensorBytes = std::int64_t{1} << 39;

// In a gated problem half of a tile's columns belong to `up`.
std::int64_t result_cols(const Problem& problem, std::int64_t cols) {
  return problem.gated ? cols / 2 : cols;
}

// The rows and the columns of the tiles of a cluster together.
std::int64_t cluster_tile_rows(const TensorCoreTile& tile) {
  return tile.floats ? tile.rows : tile.rows * tile.cluster_rows;
}
std::int64_t cluster_tile_cols(const TensorCoreTile& tile) {
  return tile.floats ? tile.cols * tile.cluster_rows : tile.cols;
}

std::int64_t clusters_of(const Problem& problem, const TensorCoreTile& tile) {
  return problem.batch * divide_up(problem.m, cluster_tile_rows(tile)) *
         divide_up(problem.n, result_cols(problem, cluster_tile_cols(tile)));
}

// Whether floats are multiplied by turned_kernel, which needs no copy of b.
bool turns_floats(const Problem& problem) {
  return problem.dtype == DType::kFloat32 && stored_a(problem).deep && !stored_b(problem).deep &&
         fits_tensor_copies(problem.n * bytes_of(problem.dtype));
}

// Estimates: the time of a multiprocessor for a step of 64 x 128 sums, 128 bytes deep, at the speed
// of the largest tile: at its highest clock, and while all others multiply too.
constexpr double kStepTime = 126;
constexpr double kBusyStepTime = 166;
// How long the tensor cores wait between two tiles, unless the consumers take turns; how much
// longer with a bias or an activation; and, for 64 x 128 sums, with one of gelu and silu.
constexpr double kTurnTime = 300;
constexpr double kEpilogueTime = 800;
constexpr double kSmoothActivationTime = 550;
// Bytes of results that are written per nanosecond while all multiprocessors write: of one by
// tensor copies, and of a consumer by its threads if the rows of the result are not aligned.
constexpr double kWriteRate = 22;
constexpr double kThreadWriteRate = 6;
// The part of the time of copies to shared memory that adds to that of writing results.
constexpr double kCopyShare = 0.5;
// The latency of the exchange of a cluster's sums, and the bytes of sums that a block sends per
// nanosecond.
constexpr double kExchangeTime = 3000;
constexpr double kExchangeRate = 10;
// Bytes of factors read per nanosecond: from memory by all multiprocessors together, and by one
// alone, which also writes results at this rate; from the L2 cache, of data that another tile has
// read; in total from the L2 cache by tiles that do not begin together, and by the blocks of
// split_k, which do. Last, the latency of a copy.
constexpr double kMemoryRate = 4500;
constexpr double kOwnMemoryRate = 60;
constexpr double kRereadRate = 30000;
constexpr double kCacheRate = 12500;
constexpr double kSplitKCacheRate = 8500;
constexpr double kCopyLatency = 900;
// parallel_split_k: the time of its second launch apart from the partial sums, and the bytes of
// these that are written and read again per nanosecond. If they and the factors do not fit the L2
// cache, they pass through memory.
constexpr double kReduceTime = 1300;
constexpr double kPartialRate = 3200;
// The size of the L2 cache of an H100 and an H200.
constexpr double kCacheBytes = 50e6;
// The fewest steps of a split, if there are more than two; the most splits, and the most tiles of
// 128 x 128 of all splits, two turns of an H200, if there are more than two; the most bytes of
// partial sums.
constexpr std::int64_t kLeastSplitSteps = 4;
constexpr std::int64_t kMostParallelSplits = 16;
constexpr std::int64_t kMostSplitTiles = 264;
constexpr std::int64_t kMostPartialBytes = std::int64_t{64} << 20;
// The least products that the plan gives to it: few rows are split_k's and skinny's. Of float32,
// split_k needs a transposed copy of b.
constexpr std::int64_t kLeastParallelSplitRows = 49;
constexpr std::int64_t kLeastParallelSplitRowsOfFloats = 17;
constexpr std::int64_t kLeastParallelSplitSteps = 16;

std::int64_t depth_steps(const Problem& problem) {
  const auto bytes = bytes_of(problem.dtype);
  return divide_up(problem.k * bytes, kTensorLineBytes);
}

// The time in which each of `busy` multiprocessors multiplies `turns` tiles one after the other.
// The more multiprocessors are busy, the lower the clock that the GPU's power allows.
double time_of(std::int64_t turns, std::int64_t steps, int rows, int cols, int speed,
               std::int64_t busy, const Device& device) {
  const double share = static_cast<double>(busy) / device.multiprocessors;
  const double step = std::max(kStepTime, kBusyStepTime * std::sqrt(share));
  return static_cast<double>(turns * steps) * (rows * cols / (64.0 * 128.0)) * step * 100 / speed;
}

// The rows of a and the columns of b, of all matrices that are not shared.
double lines_of_factors(const Problem& problem) {
  return static_cast<double>((problem.share_a ? 1 : problem.batch) * problem.m +
                             (problem.share_b ? 1 : problem.batch) * problem.n);
}

// The time in which the factors that tensor copies cannot read are copied, from memory to memory.
double copies_time(const Problem& problem, bool copies_b) {
  double bytes = 0;
  const auto add = [&](const StoredFactor& factor) {
    if (needs_copy(factor)) bytes += 2 * static_cast<double>(copy_bytes(factor));
  };
  add(stored_a(problem));
  if (copies_b) add(stored_b(problem));
  return bytes > 0 ? kLaunchTime + bytes / kMemoryRate : 0;
}

// The time of `steps` consecutive copies, if it is only latency, with `stages` of them in flight.
double latency_of(std::int64_t steps, int stages) {
  return static_cast<double>(steps) * kCopyLatency / stages;
}

// The cluster tiles, in the order of TileOrder.
struct Grid {
  std::int64_t rows;
  std::int64_t cols;
  std::int64_t group;

  std::int64_t rows_of(std::int64_t of_group) const {
    return std::min(group, rows - of_group * group);
  }
  // The number of tiles before a column of a group.
  std::int64_t before(std::int64_t matrix, std::int64_t of_group, std::int64_t col) const {
    return (matrix * rows + of_group * group) * cols + col * rows_of(of_group);
  }
};

Grid grid_of(const Problem& problem, const TensorCoreTile& tile, std::int64_t group) {
  return {divide_up(problem.m, tile.rows * tile.cluster_rows),
          divide_up(problem.n, result_cols(problem, tile.cols)), group};
}

// Whether a cluster tile divides into whole cluster tiles of `tail`, which can then be the tile of
// a second launch.
bool is_made_of(const TensorCoreTile& tile, const TensorCoreTile& tail) {
  return !tail.ping_pong && tail.rows * tail.cols < tile.rows * tile.cols &&
         tile.rows * tile.cluster_rows % (tail.rows * tail.cluster_rows) == 0 &&
         tile.cols % tail.cols == 0;
}

// How a product is divided between two launches. The tiles of the second subdivide those of the
// first.
struct Cut {
  std::int64_t tiles;       // cluster tiles of the first launch
  std::int64_t tail_first;  // tile of the second launch
  std::int64_t tail_tiles;
  std::int64_t tail_group;
};

// The last cut, at the beginning of a column of a group, that gives the first launch at most
// `tiles` tiles, which must be fewer than all.
Cut cut_at(const Problem& problem, const TensorCoreTile& tile, const TensorCoreTile& tail,
           std::int64_t tiles) {
  const Grid grid = grid_of(problem, tile, kTensorCoreGroup);
  const std::int64_t matrix = tiles / (grid.rows * grid.cols);
  const std::int64_t of_group = (tiles - grid.before(matrix, 0, 0)) / (grid.group * grid.cols);
  const std::int64_t col = (tiles - grid.before(matrix, of_group, 0)) / grid.rows_of(of_group);
  const int down = tile.rows * tile.cluster_rows / (tail.rows * tail.cluster_rows);
  const int right = tile.cols / tail.cols;
  const Grid tail_grid = grid_of(problem, tail, grid.group * down);
  const std::int64_t first = tail_grid.before(matrix, of_group, col * right);
  return {grid.before(matrix, of_group, col), first, clusters_of(problem, tail) - first,
          tail_grid.group};
}

// Calls visit(tile) for each tile that has a kernel for the problem and may have a tail.
template <class Visit>
void each_tile(const Problem& problem, Visit&& visit) {
  const auto visit_those = [&](const auto& tiles) {
    for (const TensorCoreTile& tile : tiles) {
      if (tile.result_bytes == static_cast<int>(info(problem.result_dtype).bytes) &&
          tile.promotes == promotes_sums(problem) && (tile.gates() || !problem.gated) &&
          (stored_a(problem).deep || !tile.ping_pong)) {
        visit(tile);
      }
    }
  };
  if (is_8_bit(problem.dtype)) {
    visit_those(kTensorCoreByteTiles);
  } else if (turns_floats(problem)) {
    visit_those(kTurnedFloatTiles);
  } else {
    visit_those(kTensorCoreTiles);
  }
}

// Whether the transposed product has kernels: of 16-bit floats, without an epilogue, for an a that
// is K-major and a result that tensor copies write.
bool may_turn(const Problem& problem) {
  return is_16_bit_float(problem.dtype) && problem.result_dtype == problem.dtype &&
         !has_epilogue(problem) && !problem.has_c && stored_a(problem).deep &&
         fits_tensor_copies(problem.n * bytes_of(problem.result_dtype));
}

// Whether both factors are read in rows that begin at multiples of 128 bytes.
bool begins_lines(const Problem& problem) {
  const auto begins = [](const StoredFactor& factor) {
    return needs_copy(factor) || factor.length * factor.element_bytes % kTensorLineBytes == 0;
  };
  return begins(stored_a(problem)) && begins(stored_b(problem));
}

// The speed of a tile with `busy` multiprocessors. The L2 cache limits it for rows that do not
// begin lines, and all busy multiprocessors share it. The effect of fewer of them was measured only
// for tiles of transposed products.
int speed_of(const Problem& problem, const TensorCoreTile& tile, std::int64_t busy,
             const Device& device) {
  if (begins_lines(problem)) return tile.speed;
  if (!tile.turned) return tile.unaligned_speed;
  const std::int64_t sharers = std::max<std::int64_t>(busy, 1);  // none for an empty product
  const auto alone = static_cast<int>(tile.unaligned_speed * device.multiprocessors / sharers);
  return std::min(tile.speed, alone);
}

// How long the tensor cores wait between two tiles.
double turn_time(const Problem& problem, const TensorCoreTile& tile) {
  if (tile.ping_pong) return 0;
  double time = kTurnTime;
  if (has_epilogue(problem)) time += kEpilogueTime;
  if (problem.epilogue != EpilogueOp::kNone && problem.epilogue != EpilogueOp::kRelu) {
    time += kSmoothActivationTime * tile.rows * tile.cols / (64 * 128);
  }
  return time;
}

bool writes_elements(const Problem& problem) {
  return !fits_tensor_copies(problem.n * bytes_of(problem.result_dtype));
}

// The time of `tiles` cluster tiles of `steps` steps: of products, of copies to shared memory, and
// of writing results while other tiles are multiplied.
double tiles_time(const Problem& problem, const TensorCoreTile& tile, std::int64_t tiles,
                  std::int64_t steps, const Device& device) {
  const std::int64_t turns = divide_up(tiles, device.multiprocessors / tile.cluster_rows);
  const std::int64_t busy = blocks_of(tiles, tile.cluster_rows, device);
  const double products = time_of(turns, steps, tile.rows, tile.cols,
                                  speed_of(problem, tile, busy, device), busy, device);
  const auto lines =
      static_cast<double>(tiles * steps * (cluster_tile_rows(tile) + cluster_tile_cols(tile)));
  const double copies = turns > 1 ? lines * kTensorLineBytes / kCacheRate : 0;
  const double latency = latency_of(turns * steps, tile.stages - tile.pending);
  const double write_rate =
      writes_elements(problem) ? kThreadWriteRate * tile.consumers : kWriteRate;
  const double writes =
      static_cast<double>((turns - 1) * tile.rows * tile.cols) * tile.result_bytes / write_rate;
  const double between = static_cast<double>(turns - 1) * turn_time(problem, tile);
  // Results and factors pass the L2 cache together. In a long run of tiles, late stores go on while
  // the tensor cores wait.
  const double computes = std::max({products, copies, latency}) + between;
  const bool goes_on = tile.late_stores && turns > 2;
  const double moves = writes + kCopyShare * copies + (goes_on ? 0 : between);
  return std::max(computes, moves);
}

struct TensorCoreChoice {
  const TensorCoreTile* tile;
  const TensorCoreTile* tail;  // null: one launch takes all tiles
  Cut cut;
  double time;
};

// The tiles with the shortest estimated time. The choice counts products and copies to shared
// memory; the time is that of these or of the reads from memory, whichever is longer.
TensorCoreChoice best_tile(const Problem& problem, const Device& device) {
  const std::int64_t steps = depth_steps(problem);
  const auto at_a_time = [&](const TensorCoreTile& tile) {
    return device.multiprocessors / tile.cluster_rows;
  };
  const auto estimated = [&](TensorCoreChoice choice) {
    choice.time += tiles_time(problem, *choice.tile, choice.cut.tiles, steps, device);
    if (choice.tail != nullptr) {
      choice.time += tiles_time(problem, *choice.tail, choice.cut.tail_tiles, steps, device);
      choice.time += kLaunchTime;
    }
    // The last results are written when there is nothing left to multiply.
    const TensorCoreTile& last = choice.tail == nullptr ? *choice.tile : *choice.tail;
    const int writers = last.ping_pong ? 1 : 2;
    choice.time += last.rows * last.cols * last.result_bytes * 2 / (kOwnMemoryRate * writers);
    return choice;
  };
  TensorCoreChoice best{};
  each_tile(problem, [&](const TensorCoreTile& tile) {
    const Cut all{clusters_of(problem, tile), 0, 0, 0};
    const TensorCoreChoice choice = estimated({&tile, nullptr, all, 0});
    if (best.tile == nullptr || choice.time < best.time) best = choice;
  });
  if (problem.dtype != DType::kFloat32) {  // turned_kernel has no tails
    const double most = best.time * (1 - kLeastGain);
    each_tile(problem, [&](const TensorCoreTile& tile) {
      const std::int64_t tiles = clusters_of(problem, tile);
      const std::int64_t left_over = tiles % at_a_time(tile);
      if (left_over == 0) return;
      each_tile(problem, [&](const TensorCoreTile& tail) {
        if (!is_made_of(tile, tail)) return;
        const Cut cut = cut_at(problem, tile, tail, tiles - left_over);
        if (cut.tiles == 0) return;
        const TensorCoreChoice choice = estimated({&tile, &tail, cut, 0});
        if (choice.time < std::min(best.time, most)) best = choice;
      });
    });
  }
  if (may_turn(problem)) {
    const double most = best.time * (1 - kLeastGain);
    for (const TensorCoreTile& tile : kTensorCoreTurnedTiles) {
      const TensorCoreChoice choice =
          estimated({&tile, nullptr, {clusters_of(problem, tile), 0, 0, 0}, 0});
      if (choice.time < std::min(best.time, most)) best = choice;
    }
  }
  const TensorCoreTile& tile = *best.tile;
  const std::int64_t tiles = clusters_of(problem, tile) * tile.cluster_rows;
  const double reads = read_time(problem, tiles, tile.rows, tile.cols,
                                 std::min<std::int64_t>(tiles, device.multiprocessors));
  best.time = kLaunchTime + std::max(best.time, reads);
  return best;
}

// Sets what a launch takes from its tile.
void configure_tile(const TensorCoreTile& tile, Config& config) {
  config.threads = tile.threads();
  config.tile_rows = tile.rows;
  config.tile_cols = tile.cols;
  config.cluster_rows = tile.cluster_rows;
  config.stages = tile.stages;
  config.shared_bytes = tile.shared_bytes();
  config.promotes = tile.promotes;
  config.turned = tile.turned;
  config.ping_pong = tile.ping_pong;
}

// Sets which factors are copied first, because tensor copies cannot read them.
void configure_copies(const Problem& problem, Config& config) {
  config.copies_a = needs_copy(stored_a(problem));
  config.copies_b = needs_copy(stored_b(problem));
  config.workspace_bytes = copies_bytes(problem);
}

// The same for turned_kernel, which reads b as it is stored.
void leave_b(const Problem& problem, Config& config) {
  config.copies_b = false;
  config.workspace_bytes -= copy_bytes(stored_b(problem));
}

// Why the workspace is too small for `needed` bytes of copies; empty if it is not.
std::string refusal_of_copies(const Problem& problem, std::int64_t needed) {
  if (problem.workspace == kWorkspaceAsAsked || problem.workspace >= needed) return "";
  return "requires " + std::to_string(needed) +
         " bytes of workspace for copies of factors that tensor copies cannot read, and has " +
         std::to_string(problem.workspace);
}

struct SplitKChoice {
  const SplitKTile* tile;
  int splits;
  int stages;
  std::int64_t blocks;
  double time;
};

// The tile and the number of blocks per tile with the shortest estimated time. Clusters of more
// than two blocks are hard to place, and leave some multiprocessors idle: the estimate gives them
// three quarters of all. Further blocks must share a multiprocessor, and if they still do not fit,
// only two splits are tried. Blocks that have a multiprocessor to themselves use all of its shared
// memory for stages.
SplitKChoice best_split_k(const Problem& problem, const Device& device) {
  const std::int64_t depth = depth_steps(problem);
  SplitKChoice best{};
  const auto consider = [&](const SplitKTile& tile, std::int64_t tiles, int splits) {
    const std::int64_t blocks = splits * tiles;
    const std::int64_t places = std::int64_t{device.multiprocessors} * (splits > 2 ? 3 : 4) / 4;
    if (splits > 2 && (blocks > places * tile.resident || splits > depth)) return;
    const int resident = blocks <= places ? 1 : tile.resident;
    const int stages = std::min(tile.stages(resident), kMostSplitKStages);
    const std::int64_t steps = divide_up(depth, splits);
    const std::int64_t rows = std::min<std::int64_t>(tile.rows, divide_up(problem.m, 16) * 16);
    const auto sent = static_cast<double>(rows * tile.cols * 4 * (splits - 1)) / splits;
    const double products =
        time_of(divide_up(blocks, places), steps, tile.rows, tile.cols, tile.speed,
                std::min<std::int64_t>(blocks, device.multiprocessors), device);
    const double latency = latency_of(divide_up(blocks, places * resident) * steps, stages);
    const double reads = read_time(problem, tiles, tile.rows, tile.cols,
                                   std::min<std::int64_t>(blocks, device.multiprocessors));
    const auto lines = static_cast<double>(blocks * steps * (tile.rows + tile.cols));
    const double copies = lines * kTensorLineBytes / kSplitKCacheRate;
    const auto turns = static_cast<double>(divide_up(blocks, places * resident));
    const double time = kLaunchTime + turns * (kExchangeTime + sent / kExchangeRate) +
                        std::max({products, copies, latency, reads});
    if (best.tile == nullptr || time < best.time) best = {&tile, splits, stages, blocks, time};
  };
  for (const SplitKTile& tile : kSplitKTiles) {
    if ((tile.rows > 64) != (problem.m > 64)) continue;
    const std::int64_t tiles =
        problem.batch * divide_up(problem.m, tile.rows) * divide_up(problem.n, tile.cols);
    for (int splits = 2; splits <= kMostSplits; splits *= 2) consider(tile, tiles, splits);
  }
  return best;
}

// The tiles of a split, if they are of 128 x 128.
double split_tiles(const Problem& problem) {
  return static_cast<double>(problem.batch) * static_cast<double>(divide_up(problem.m, kTile)) *
         static_cast<double>(divide_up(problem.n, kTile));
}

// How many splits parallel_split_k has at most. It depends on the problem alone, since workspace is
// reserved for them.
std::int64_t most_parallel_splits(const Problem& problem) {
  const auto at_least_one = [](std::int64_t x) { return std::max<std::int64_t>(x, 1); };
  const auto tiles = static_cast<std::int64_t>(split_tiles(problem));
  const std::int64_t least = 2;
  return std::min({kMostParallelSplits, std::max(least, depth_steps(problem) / kLeastSplitSteps),
                   std::max(least, kMostSplitTiles / at_least_one(tiles)),
                   kMostPartialBytes / at_least_one(partial_bytes(problem))});
}

struct ParallelSplitKChoice {
  const TensorCoreTile* tile;
  std::int64_t splits;
  double time;
};

// The tile and the number of splits with the shortest estimated time.
ParallelSplitKChoice best_parallel_split_k(const Problem& problem, const Device& device) {
  const std::int64_t depth = depth_steps(problem);
  const std::int64_t most = most_parallel_splits(problem);
  const double factors =
      lines_of_factors(problem) * static_cast<double>(problem.k * bytes_of(problem.dtype));
  ParallelSplitKChoice best{};
  const auto consider = [&](const TensorCoreTile& tile) {
    const std::int64_t tiles = clusters_of(problem, tile);
    const double reads =
        read_time(problem, tiles * tile.cluster_rows, tile.rows, tile.cols, device.multiprocessors);
    for (std::int64_t splits = 2; splits <= most; ++splits) {
      const std::int64_t turns =
          divide_up(tiles * splits, device.multiprocessors / tile.cluster_rows);
      const double products =
          tiles_time(problem, tile, tiles * splits, divide_up(depth, splits), device);
      // A block writes its sums before it multiplies the next tile.
      const double writes = static_cast<double>(turns * tile.rows * tile.cols * 4) / kOwnMemoryRate;
      const auto partials = static_cast<double>(splits * partial_bytes(problem));
      const double memory = factors + partials > kCacheBytes ? 2 * partials / kMemoryRate : 0;
      const double reduction = kReduceTime + partials / kPartialRate + memory;
      const double time = kLaunchTime + std::max(products + writes, reads) + reduction;
      if (best.tile == nullptr || time < best.time) best = {&tile, splits, time};
    }
  };
  if (problem.dtype == DType::kFloat32) {
    for (const TensorCoreTile& tile : kTurnedFloatTiles) consider(tile);
    return best;
  }
  for (const TensorCoreTile& tile : kTensorCoreTiles) {
    if (tile.result_bytes == 4) consider(tile);
  }
  if (stored_a(problem).deep) {
    for (const TensorCoreTile& tile : kSplitTurnedTiles) consider(tile);
  }
  return best;
}

}  // namespace

double read_time(const Problem& problem, std::int64_t tiles, std::int64_t rows, std::int64_t cols,
                 std::int64_t readers) {
  const auto depth = static_cast<double>(problem.k * bytes_of(problem.dtype));
  const double once = lines_of_factors(problem);
  const auto all =
      static_cast<double>(tiles * (std::min(rows, problem.m) + std::min(cols, problem.n)));
  const double rate = std::min(kMemoryRate, static_cast<double>(readers) * kOwnMemoryRate);
  return depth * (once / rate + std::max(all - once, 0.0) / kRereadRate);
}

std::int64_t tensor_core_copies_bytes(const Problem& problem) {
  return copies_bytes(problem) - (turns_floats(problem) ? copy_bytes(stored_b(problem)) : 0);
}

// Why tensor_core does not add the problem's c; empty if it does, or there is none.
std::string refusal_of_c(const Problem& problem) {
  if (!problem.has_c) return "";
  if (is_8_bit(problem.dtype) || problem.dtype == DType::kFloat64 ||
      problem.result_dtype != problem.dtype) {
    return "supports c only for float16, bfloat16 and float32, with a result of the same dtype";
  }
  if (problem.gated) return "does not support c in a gated product";
  if (problem.transpose_a || problem.transpose_b) {
    return "supports c only for factors that are not transposed";
  }
  if (problem.dtype == DType::kFloat32 && !turns_floats(problem)) {
    return "supports c of float32 only if the rows of b are a multiple of 16 bytes";
  }
  return problem.k == 0 ? "supports c only for a depth k of at least 1" : "";
}

std::string refusal_of_tensor_sizes(const Problem& problem, std::int64_t least_cols) {
  if (problem.alignment < 16) return "requires arrays aligned to 16 bytes";
  const std::int64_t most = kMostTensorExtent;
  if (std::max({problem.batch, problem.m, problem.n, problem.k}) > most ||
      std::max(problem.m, problem.n) * problem.k > kMostTensorBytes / bytes_of(problem.dtype) ||
      problem.m * problem.n > kMostTensorBytes / bytes_of(problem.result_dtype)) {
    return "supports sizes of at most 2^30 and matrices of at most 512 GiB";
  }
  // The number of tiles if they are the smallest.
  const double tiles =
      static_cast<double>(problem.batch) *
      static_cast<double>(divide_up(problem.m, 64) * divide_up(problem.n, least_cols));
  return tiles > static_cast<double>(most) ? "supports at most 2^30 tiles" : "";
}

// Why tensor_core does not take the problem; empty if it does.
std::string refusal_of_tensor_core(const Problem& problem, const Device& device) {
  if (problem.dtype == DType::kFloat64) {
    return "supports float16, bfloat16, float32, float8_e4m3fn, float8_e5m2 and int8, not float64";
  }
  if (problem.dtype == DType::kFloat32 && !may_use_tf32(problem)) {
    return "multiplies float32 in TF32, which precision " +
           text(kPrecisions[static_cast<int>(problem.precision)]) + " excludes";
  }
  if (!device.runs_hopper_code()) return "requires a GPU of compute capability 9.0";
  if (problem.scaled) return "supports only alpha = 1";
  const std::string why = refusal_of_c(problem);
  if (!why.empty()) return why;
  if (has_epilogue(problem)) {
    if (is_8_bit(problem.dtype)) {
      return "does not support a bias or an activation for 8-bit factors";
    }
    if (problem.k == 0) return "supports a bias or an activation only for a depth k of at least 1";
    const bool transposed = problem.transpose_a || problem.transpose_b;
    if (transposed && is_16_bit_float(problem.dtype)) {
      return "supports a bias or an activation of 16-bit floats only for factors that are not "
             "transposed";
    }
  }
  if (problem.gated) {
    if (!is_16_bit_float(problem.dtype) || problem.result_dtype != problem.dtype) {
      return "supports gated products only of float16 and bfloat16, with a result of the same "
             "dtype";
    }
    if (problem.has_bias) return "does not support a bias in a gated product";
    if (copies_bytes(problem) > 0) {
      return "supports gated products only of factors whose rows are a multiple of 16 bytes";
    }
  }
  if (scales_blocks(problem)) {
    if (problem.dtype == DType::kInt8) {
      return "supports scales of blocks only for 8-bit floats, not for int8";
    }
    if (problem.b_scale == ScaleKind::kVector) {
      return "does not support scales of the columns of b together with those of blocks of a";
    }
  }
  const std::string sizes = refusal_of_tensor_sizes(problem, result_cols(problem, 128));
  return sizes.empty() ? refusal_of_copies(problem, tensor_core_copies_bytes(problem)) : sizes;
}

double tensor_core_time(const Problem& problem, const Device& device) {
  return copies_time(problem, !turns_floats(problem)) + best_tile(problem, device).time;
}

Config configure_tensor_core(const Problem& problem, const Device& device) {
  const TensorCoreChoice best = best_tile(problem, device);
  const TensorCoreTile& tile = *best.tile;
  Config config;
  configure_tile(tile, config);
  config.blocks = blocks_of(best.cut.tiles, tile.cluster_rows, device);
  config.group = kTensorCoreGroup;
  if (best.tail != nullptr) {
    config.tiles = best.cut.tiles;
    config.tail_rows = best.tail->rows;
    config.tail_cols = best.tail->cols;
    config.tail_blocks = blocks_of(best.cut.tail_tiles, best.tail->cluster_rows, device);
  }
  config.writes_elements = writes_elements(problem);
  // A result that the L2 cache cannot hold must not displace factors that other tiles read again. A
  // smaller one is left there for its reader.
  const auto result = static_cast<double>(problem.batch * problem.m * problem.n);
  config.streams_result = result * bytes_of(problem.result_dtype) > kCacheBytes;
  configure_copies(problem, config);
  if (tile.floats) leave_b(problem, config);
  return config;
}

Tail tail_of(const Problem& problem, const Config& config) {
  const TensorCoreTile* tile = nullptr;
  const TensorCoreTile* tail = nullptr;
  each_tile(problem, [&](const TensorCoreTile& each) {
    if (each.rows == config.tile_rows && each.cols == config.tile_cols &&
        each.ping_pong == config.ping_pong) {
      tile = &each;
    }
    if (each.rows == config.tail_rows && each.cols == config.tail_cols && !each.ping_pong) {
      tail = &each;
    }
  });
  const Cut cut = cut_at(problem, *tile, *tail, config.tiles);
  Config launch = config;
  configure_tile(*tail, launch);
  launch.blocks = config.tail_blocks;
  launch.group = static_cast<int>(cut.tail_group);
  launch.tiles = 0;
  return {launch, cut.tail_first};
}

// The same as refusal_of_split_k(), apart from the workspace.
std::string refusal_of_splits(const Problem& problem, const Device& device) {
  const std::string why = refusal_of_tensor_core(problem, device);
  if (!why.empty()) return why;
  if (is_8_bit(problem.dtype)) return "does not support " + text(info(problem.dtype).name);
  if (problem.has_c) return "does not support c";
  if (depth_steps(problem) >= 2) return "";
  const auto bytes = bytes_of(problem.dtype);
  return "requires a depth k of more than " + std::to_string(kTensorLineBytes / bytes);
}

// Why split_k does not take the problem; empty if it does.
std::string refusal_of_split_k(const Problem& problem, const Device& device) {
  const std::string why = refusal_of_splits(problem, device);
  return why.empty() ? refusal_of_copies(problem, copies_bytes(problem)) : why;
}

double split_k_time(const Problem& problem, const Device& device) {
  return copies_time(problem, true) + best_split_k(problem, device).time;
}

double tensor_core_or_split_k_time(const Problem& problem, const Device& device) {
  const double time = tensor_core_time(problem, device);
  return refusal_of_split_k(problem, device).empty() ? std::min(time, split_k_time(problem, device))
                                                     : time;
}

Config configure_split_k(const Problem& problem, const Device& device) {
  const SplitKChoice choice = best_split_k(problem, device);
  Config config;
  config.threads = choice.tile->threads();
  config.tile_rows = choice.tile->rows;
  config.tile_cols = choice.tile->cols;
  config.stages = choice.stages;
  config.splits = choice.splits;
  config.blocks = choice.blocks;
  config.shared_bytes = choice.tile->shared_bytes(choice.stages);
  configure_copies(problem, config);
  return config;
}

std::int64_t parallel_split_k_workspace(const Problem& problem) {
  return tensor_core_copies_bytes(problem) + most_parallel_splits(problem) * partial_bytes(problem);
}

// Why parallel_split_k does not take the problem; empty if it does.
std::string refusal_of_parallel_split_k(const Problem& problem, const Device& device) {
  if (!is_16_bit_float(problem.dtype) && problem.dtype != DType::kFloat32) {
    return "supports float16, bfloat16 and float32, not " + text(info(problem.dtype).name);
  }
  const std::string why = refusal_of_splits(problem, device);
  if (!why.empty()) return why;
  if (problem.dtype == DType::kFloat32 && !turns_floats(problem)) {
    return "supports float32 only if a is K-major and b is not, with rows of b that are a multiple "
           "of 16 bytes";
  }
  const std::int64_t most = kMostPartialBytes / 2 / 4;
  const double rows = static_cast<double>(problem.batch) * static_cast<double>(problem.m);
  const double elements = rows * static_cast<double>(partial_pitch(problem));
  if (elements > static_cast<double>(most)) {
    return "supports results of at most " + std::to_string(most) +
           " elements, with n rounded up to a multiple of 8";
  }
  const std::int64_t needed = parallel_split_k_workspace(problem);
  if (problem.workspace != kWorkspaceAsAsked && problem.workspace < needed) {
    return "requires " + std::to_string(needed) + " bytes of workspace for partial sums, and has " +
           std::to_string(problem.workspace);
  }
  return "";
}

bool suits_parallel_split_k(const Problem& problem) {
  const bool is_float32 = turns_floats(problem) && may_use_tf32(problem);
  const std::int64_t least_rows =
      is_float32 ? kLeastParallelSplitRowsOfFloats : kLeastParallelSplitRows;
  return (is_16_bit_float(problem.dtype) || is_float32) && !problem.gated && !problem.has_c &&
         !problem.scaled && !suits_skinny(problem) && problem.m >= least_rows &&
         depth_steps(problem) >= kLeastParallelSplitSteps && split_tiles(problem) >= 1 &&
         split_tiles(problem) <= kMostSplitTiles / 2;
}

double parallel_split_k_time(const Problem& problem, const Device& device) {
  return copies_time(problem, !turns_floats(problem)) + best_parallel_split_k(problem, device).time;
}

bool prefers_parallel_split_k(const Problem& problem, const Device& device) {
  return suits_parallel_split_k(problem) && refusal_of_parallel_split_k(problem, device).empty() &&
         parallel_split_k_time(problem, device) <
             std::min(tensor_core_time(problem, device), split_k_time(problem, device));
}

double tensor_core_or_splits_time(const Problem& problem, const Device& device) {
  return prefers_parallel_split_k(problem, device) ? parallel_split_k_time(problem, device)
                                                   : tensor_core_or_split_k_time(problem, device);
}

Config configure_parallel_split_k(const Problem& problem, const Device& device) {
  const ParallelSplitKChoice choice = best_parallel_split_k(problem, device);
  const TensorCoreTile& tile = *choice.tile;
  Config config;
  configure_tile(tile, config);
  config.blocks = blocks_of(clusters_of(problem, tile) * choice.splits, tile.cluster_rows, device);
  config.group = kTensorCoreGroup;
  config.splits = static_cast<int>(choice.splits);
  config.writes_elements = tile.turned && !tile.floats;
  configure_copies(problem, config);
  if (tile.floats) leave_b(problem, config);
  config.workspace_bytes += choice.splits * partial_bytes(problem);
  return config;
}

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
