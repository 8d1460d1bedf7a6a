#include <algorithm>
#include <stdexcept>
#include <string>

#include "core/integer.h"
#include "matmul/matmul.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {
namespace {

// A 128 x 128 tile that is mostly empty is slower than small tiles.
constexpr std::int64_t kLeastTiledExtent = 64;
// Below about 100^3 multiplications the barriers of a tiled kernel cost more than it saves.
constexpr double kLeastSharedWork = 1 << 20;
constexpr std::int64_t kTile = 128;

}  // namespace

Plan plan(const Problem& problem, std::string_view algorithm, const Device& device) {
  if (!algorithm.empty()) {
    const auto named = algorithm_from_name<Algorithm>(kAlgorithms, algorithm);
    if (named == Algorithm::kCublas && device.compute_capability == 0) {
      throw std::invalid_argument("algorithm 'cublas' is CUDA only: the host has no cuBLAS");
    }
    return {named, "named by the caller"};
  }
  const double work = static_cast<double>(problem.batch) * static_cast<double>(problem.m) *
                      static_cast<double>(problem.n) * static_cast<double>(problem.k);
  const std::int64_t tiles =
      problem.batch * divide_up(problem.m, kTile) * divide_up(problem.n, kTile);
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

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
