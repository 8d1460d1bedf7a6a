#include <algorithm>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

#include "core/integer.h"
#include "reduce/reduce.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace reduce {
namespace {

// A row that a block reads in a few microseconds is not worth a second launch.
constexpr std::int64_t kMultipleBytes = 64 * 1024;
// A row is split over several blocks only in parts that are worth one.
constexpr std::int64_t kSplitBytes = 16 * 1024;
constexpr std::int64_t kSplitColumns = 256;
constexpr std::int64_t kMaxSplits = 2048;

constexpr std::int64_t kPackBytes = 16;
constexpr int kWarpLanes = 32;
// The longest row that a warp takes; it reads 16 packs a lane then.
constexpr std::int64_t kWarpRowPacks = 16 * kWarpLanes;

std::int64_t bytes_of(DType dtype) { return static_cast<std::int64_t>(info(dtype).bytes); }

std::int64_t row_bytes(const Problem& problem) { return problem.columns * bytes_of(problem.dtype); }

// Problems that kernels take

bool is_float(DType dtype) { return dtype >= DType::kFloat16 && dtype <= DType::kFloat64; }

bool is_integer(DType dtype) { return dtype >= DType::kInt8 && dtype <= DType::kUInt64; }

bool is_16_bit_float(DType dtype) { return dtype == DType::kFloat16 || dtype == DType::kBFloat16; }

void check(const Problem& problem) {
  const auto [function, dtype, result] =
      std::tuple(problem.function, problem.dtype, problem.result);
  for (const DType each : {dtype, result}) {
    if (!is_float(each) && !is_integer(each)) {
      throw std::invalid_argument("no reduction kernel takes " + std::string(info(each).name));
    }
  }
  bool right = dtype == result;
  if (is_arg(function)) {
    right = result == DType::kInt32 || result == DType::kInt64;
  } else if (function == Function::kSum || function == Function::kProd) {
    right |= is_16_bit_float(dtype) && result == DType::kFloat32;
    right |= is_integer(dtype) && is_integer(result);
  } else if (function == Function::kMeanAndVar) {
    right &= is_float(dtype);
    right |= is_16_bit_float(dtype) && result == DType::kFloat32;
  }
  if (!right) {
    throw std::invalid_argument(
        "the result has a dtype that the kernels do not compute from that of x");
  }
  if (problem.masked && (is_arg(function) || !is_float(dtype))) {
    throw std::invalid_argument(
        "kernels take masks of floats, but not for argmax and argmin; other elements must be "
        "masked "
        "before");
  }
}

void check(Algorithm algorithm, const Problem& problem) {
  const auto refuse = [&](const std::string& why) {
    throw std::invalid_argument("algorithm '" + std::string(name_of(algorithm)) + "' " + why);
  };
  if (is_step(algorithm) && !is_value(problem.function)) {
    refuse("computes sum, prod, max and min; other functions have 'multiple', 'row' and 'column'");
  }
  if (is_step(algorithm) && problem.masked) {
    refuse("takes no mask; 'multiple', 'row' and 'column' do");
  }
  if (algorithm != Algorithm::kColumn && problem.inner != 1) {
    refuse("takes rows whose elements are neighbours in memory, but here they lie " +
           std::to_string(problem.inner) + " elements apart; 'column' takes these");
  }
}

// Partial results

// The bytes of the type that a kernel computes in: see dispatch_reduction().
std::int64_t accumulator_bytes(const Problem& problem) {
  const bool wide = bytes_of(problem.dtype) == 8;
  const bool modular = problem.function == Function::kSum || problem.function == Function::kProd;
  if (is_float(problem.dtype) || !modular) return wide ? 8 : 4;
  return bytes_of(problem.dtype) == 4 && bytes_of(problem.result) <= 4 ? 4 : 8;
}

// A partial result in the workspace: a value, a value and its index, or Moments.
std::int64_t partial_bytes(const Problem& problem) {
  if (problem.function == Function::kMeanAndVar) return 4 * accumulator_bytes(problem);
  return is_arg(problem.function) ? 16 : accumulator_bytes(problem);
}

std::int64_t multiple_partials(const Problem& problem) {
  return std::min(kMaxSplits, divide_up(row_bytes(problem), kSplitBytes));
}

std::int64_t column_partials(const Problem& problem) {
  return std::min(kMaxSplits, divide_up(problem.columns, kSplitColumns));
}

// Every launch of a ladder step leaves one element of a row for each of its blocks.
std::int64_t step_partials(const Problem& problem, Algorithm algorithm) {
  const std::int64_t block_columns = step_columns(algorithm);
  std::int64_t total = 0;
  for (std::int64_t left = divide_up(problem.columns, block_columns); left > 1;
       left = divide_up(left, block_columns)) {
    total += left;
  }
  return total;
}

// Configurations

// The threads of one block on a row, no more than the row has packs.
int block_threads(std::int64_t columns, std::int64_t pack) {
  return std::max(kWarpLanes, power_of_two_from(divide_up(columns, pack), kMultipleThreads));
}

// Up to 32 lanes lie along `inner`, as memory is read in lines. More take further rows where the
// columns are too few for the threads below them.
int column_lanes(std::int64_t packs_per_outer, std::int64_t columns) {
  int lanes = power_of_two_from(packs_per_outer, kWarpLanes);
  while (lanes < kColumnThreads && 4 * (kColumnThreads / lanes) > columns) lanes *= 2;
  return lanes;
}

void configure_step(const Problem& problem, Algorithm algorithm, std::int64_t workspace,
                    Config* config) {
  config->threads = kLadderThreads;
  config->parts = divide_up(problem.columns, step_columns(algorithm));
  config->last_threads = config->parts > 1 ? kLadderThreads : 0;
  config->workspace = problem.rows() * step_partials(problem, algorithm) * partial_bytes(problem);
  if (config->workspace > workspace) {
    throw std::invalid_argument("the workspace is too small");
  }
}

void configure_row(const Problem& problem, Config* config) {
  const std::int64_t pack = kPackBytes / bytes_of(problem.dtype);
  const std::int64_t packs = divide_up(problem.columns, pack);
  if (packs > kWarpRowPacks) {
    config->threads = block_threads(problem.columns, pack);
    return;
  }
  // A lane for every pack. Rows that are no whole number of packs begin at any phase and are partly
  // read one by one, which wants more lanes.
  const std::int64_t wanted = problem.columns % pack == 0 ? packs : divide_up(problem.columns, 2);
  config->threads = kRowThreads;
  config->lanes = power_of_two_from(wanted, kWarpLanes);
}

void configure_multiple(const Problem& problem, std::int64_t workspace, const Device& device,
                        Config* config) {
  // One wave of blocks over all rows: they finish together, and few partials are left.
  const std::int64_t resident =
      std::int64_t{device.multiprocessors} * resident_multiple_blocks(problem, device);
  const std::int64_t room = workspace / partial_bytes(problem) / problem.rows();
  const std::int64_t parts =
      std::min({resident / problem.rows(), multiple_partials(problem), room});
  if (parts <= 1) {
    config->threads = block_threads(problem.columns, kPackBytes / bytes_of(problem.dtype));
    return;
  }
  config->threads = kMultipleThreads;
  config->parts = parts;
  config->last_threads =
      block_threads(parts, std::max<std::int64_t>(1, kPackBytes / partial_bytes(problem)));
  config->workspace = problem.rows() * parts * partial_bytes(problem);
}

void configure_column(const Problem& problem, std::int64_t workspace, const Device& device,
                      Config* config) {
  const std::int64_t pack = kPackBytes / bytes_of(problem.dtype);
  const bool packed = problem.inner % pack == 0 && problem.alignment >= kPackBytes;
  config->pack = packed ? static_cast<int>(pack) : 1;
  const std::int64_t packs_per_outer = problem.inner / config->pack;
  config->threads = kColumnThreads;
  config->lanes = column_lanes(packs_per_outer, problem.columns);
  // Twice what fits at a time: blocks of unlike speed then share the work evenly.
  const std::int64_t resident =
      std::int64_t{device.multiprocessors} * resident_column_blocks(problem, config->pack, device);
  const std::int64_t tiles = divide_up(problem.outer * packs_per_outer, config->lanes);
  const std::int64_t room = workspace / partial_bytes(problem) / problem.rows();
  const std::int64_t parts = std::min({2 * resident / tiles, column_partials(problem), room});
  if (parts <= 1) return;
  config->parts = parts;
  config->last_threads = kColumnThreads;
  config->last_lanes = column_lanes(problem.inner, parts);
  config->workspace = problem.rows() * parts * partial_bytes(problem);
}

Config configure(const Problem& problem, Algorithm algorithm, std::int64_t workspace,
                 const Device& device) {
  Config config;
  if (problem.rows() == 0 || problem.columns == 0) return config;  // nothing is launched
  if (is_step(algorithm)) {
    configure_step(problem, algorithm, workspace, &config);
  } else if (algorithm == Algorithm::kRow) {
    configure_row(problem, &config);
  } else if (algorithm == Algorithm::kMultiple) {
    configure_multiple(problem, workspace, device, &config);
  } else {
    configure_column(problem, workspace, device, &config);
  }
  return config;
}

std::pair<Algorithm, std::string> choose(const Problem& problem, const Device& device) {
  if (problem.inner != 1) {
    return {Algorithm::kColumn,
            "the elements of a row lie " + std::to_string(problem.inner) + " elements apart"};
  }
  if (row_bytes(problem) > kMultipleBytes && problem.rows() < 2 * device.multiprocessors) {
    return {Algorithm::kMultiple, std::to_string(problem.rows()) +
                                      " rows would leave multiprocessors idle if a block took "
                                      "each"};
  }
  return {Algorithm::kRow, std::to_string(problem.rows()) + " rows of " +
                               std::to_string(problem.columns) + " neighbouring elements"};
}

}  // namespace

Plan plan(const Problem& problem, std::string_view algorithm, const Device& device) {
  check(problem);
  std::pair<Algorithm, std::string> chosen;
  if (algorithm.empty()) {
    chosen = choose(problem, device);
  } else {
    chosen = {algorithm_from_name<Algorithm>(kAlgorithms, algorithm), "named by the caller"};
    check(chosen.first, problem);
  }
  const std::int64_t workspace = problem.workspace == kWorkspaceAsAsked
                                     ? problem.rows() * workspace_bytes(problem, algorithm)
                                     : problem.workspace;
  return {chosen.first, std::move(chosen.second),
          configure(problem, chosen.first, workspace, device)};
}

std::int64_t workspace_bytes(const Problem& problem, std::string_view algorithm) {
  std::int64_t partials = 0;
  if (algorithm.empty()) {
    partials = std::max(multiple_partials(problem), column_partials(problem));
  } else {
    const auto named = algorithm_from_name<Algorithm>(kAlgorithms, algorithm);
    switch (named) {
      case Algorithm::kMultiple:
        partials = multiple_partials(problem);
        break;
      case Algorithm::kRow:
        break;
      case Algorithm::kColumn:
        partials = column_partials(problem);
        break;
      default:
        partials = step_partials(problem, named);
        break;
    }
  }
  return partials > 1 ? partials * partial_bytes(problem) : 0;
}

}  // namespace reduce
}  // namespace JAX_GPUOPS_NAMESPACE
