// Compiled for each of: __half __nv_bfloat16
#include "core/dispatch.h"
#include "core/integer.h"
#include "core/launch.h"
#include "core/tensor_map.h"
#include "matmul/hopper/persistent.cuh"
#include "matmul/matmul.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {
namespace {

template <class T>
constexpr CUtensorMapDataType kMapType = CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
template <>
constexpr CUtensorMapDataType kMapType<__half> = CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
template <>
constexpr CUtensorMapDataType kMapType<__nv_bfloat16> = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;

// Matrices of `rows` rows of `row` adjacent elements, in boxes of 128 bytes by `box_rows`.
template <class T>
TensorMap map_of(const void* data, std::int64_t batch, std::int64_t rows, std::int64_t row,
                 int box_rows) {
  constexpr auto kBytes = static_cast<std::int64_t>(sizeof(T));
  return make_tensor_map({kMapType<T>,
                          data,
                          {row, rows, batch},
                          {row * kBytes, row * rows * kBytes},
                          {kLineBytes / static_cast<int>(kBytes), box_rows, 1}});
}

// `extent` rows of a or columns of b, of which a block copies `box` at a time.
template <class T, bool kDeep>
TensorMap map_of_factor(const void* data, std::int64_t batch, std::int64_t extent,
                        std::int64_t depth, int box) {
  return kDeep ? map_of<T>(data, batch, extent, depth, box)
               : map_of<T>(data, batch, depth, extent, kStageDepth);
}

template <class Kernel>
void launch_persistent(const Queue& queue, const Config& config, const Problem& problem,
                       const Buffers& buffers) {
  using T = typename Kernel::Factor;
  const LaunchShape shape{dim3(static_cast<unsigned>(config.blocks)),
                          static_cast<unsigned>(config.threads),
                          static_cast<std::size_t>(config.shared_bytes), config.cluster_rows};
  TensorMap a{}, b{}, result{};
  TileOrder order{};
  if (!queue.preparing) {
    a = map_of_factor<T, Kernel::kDeepA>(buffers.a, problem.share_a ? 1 : problem.batch, problem.m,
                                         problem.k, Kernel::kRows / Kernel::kClusterCols);
    b = map_of_factor<T, Kernel::kDeepB>(buffers.b, problem.share_b ? 1 : problem.batch, problem.n,
                                         problem.k, Kernel::kCols / Kernel::kClusterRows);
    result = map_of<typename Kernel::Result>(buffers.result, problem.batch, problem.m, problem.n,
                                             kProductRows);
    order.rows = static_cast<unsigned>(divide_up(problem.m, Kernel::kRows * Kernel::kClusterRows));
    order.cols = static_cast<unsigned>(divide_up(problem.n, Kernel::kCols * Kernel::kClusterCols));
    order.tiles = order.rows * order.cols * static_cast<unsigned>(problem.batch);
    order.group = static_cast<unsigned>(config.group);
    order.steps = static_cast<int>(divide_up(problem.k, kStageDepth));
    order.a_batch_stride = problem.share_a ? 0 : 1;
    order.b_batch_stride = problem.share_b ? 0 : 1;
  }
  launch_kernel<persistent_kernel<Kernel>>(queue, shape, a, b, result, order);
}

template <class T, bool kDeepA, bool kDeepB>
void launch_layout(const Queue& queue, const Config& config, const Problem& problem,
                   const Buffers& buffers) {
  const int result_bytes = static_cast<int>(info(problem.result_dtype).bytes);
  const auto matches = [&](const TensorCoreTile& tile) {
    return tile.result_bytes == result_bytes && tile.rows == config.tile_rows &&
           tile.cols == config.tile_cols;
  };
  dispatch_instance<kTensorCoreTiles>(matches, [&](auto index) {
    constexpr const TensorCoreTile& kTile = kTensorCoreTiles[decltype(index)::value];
    using Result = std::conditional_t<kTile.result_bytes == 4, float, T>;
    using Kernel = Persistent<T, Result, kDeepA, kDeepB, kTile.rows, kTile.cols, kTile.consumers,
                              kTile.stages, kTile.cluster_rows, /*kClusterCols=*/1, /*kPending=*/1,
                              /*kLead=*/0, kTile.late_stores>;
    static_assert(Kernel::kThreads == kTile.threads());
    static_assert(kPersistentBytes<Kernel> == kTile.shared_bytes());
    launch_persistent<Kernel>(queue, config, problem, buffers);
  });
}

}  // namespace

template <class T>
void launch_tensor_core(const Queue& queue, const Config& config, const Problem& problem,
                        const Buffers& buffers) {
  if (problem.k == 0) {
    const std::int64_t elements = problem.batch * problem.m * problem.n;
    return clear(queue, buffers.result, elements * info(problem.result_dtype).bytes);
  }
  dispatch_value<false, true>(problem.transpose_a, [&](auto transpose_a) {
    dispatch_value<false, true>(problem.transpose_b, [&](auto transpose_b) {
      launch_layout<T, !decltype(transpose_a)::value, decltype(transpose_b)::value>(
          queue, config, problem, buffers);
    });
  });
}

template void launch_tensor_core<JAX_GPUOPS_ELEMENT>(const Queue&, const Config&, const Problem&,
                                                     const Buffers&);

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
