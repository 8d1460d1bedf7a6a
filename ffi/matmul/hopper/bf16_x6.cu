// Splits the factors of bf16_x6, multiplies their parts, and has another kernel behind for factors
// that cannot be split.
#include "core/dispatch.h"
#include "core/integer.h"
#include "core/launch.h"
#include "matmul/hopper/bf16_x6.cuh"
#include "matmul/hopper/factors.cuh"
#include "matmul/hopper/split_bf16.cuh"
#include "matmul/matmul.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {
namespace {

// A factor, and where its parts and exponents lie.
struct SplitFactor {
  StoredFactor stored;
  const void* data;
  __nv_bfloat16* parts;
  std::int32_t* exponents;
  std::int32_t* span;
};

void split_factor(const Queue& queue, const SplitFactor& factor, bool packed) {
  const StoredFactor& stored = factor.stored;
  launch_split_bf16(queue,
                    {static_cast<const float*>(factor.data), factor.parts, factor.exponents,
                     factor.span, stored.batch, stored.rows, stored.length, pitch_of_parts(stored)},
                    stored.deep, packed);
}

// One part's matrices lie behind another's. `box` rows of a or columns of b are what a block copies
// at a time.
template <bool kDeep>
TensorMap map_of_parts(const SplitFactor& factor, int box) {
  const StoredFactor& stored = factor.stored;
  return map_of<__nv_bfloat16>(kFactorType<__nv_bfloat16>, factor.parts, kBF16Parts * stored.batch,
                               stored.rows, stored.length, pitch_of_parts(stored),
                               kDeep ? box : kStageDepth<__nv_bfloat16>);
}

template <class Kernel>
void launch_products(const Queue& queue, const Config& config, const Problem& problem,
                     const Buffers& buffers, const SplitFactor& factor_a,
                     const SplitFactor& factor_b, BF16X6Report* report) {
  static_assert(Kernel::kThreads == kBF16X6Threads);
  static_assert(kSharedBytes<BF16X6Storage<Kernel>> == kBF16X6SharedBytes);
  TensorMap a{}, b{};
  BF16X6Result result{};
  TileOrder order{};
  if (!queue.preparing) {
    a = map_of_parts<Kernel::kDeepA>(factor_a, Kernel::kRows);
    b = map_of_parts<Kernel::kDeepB>(factor_b, Kernel::kCols / Kernel::kClusterRows);
    result = {static_cast<float*>(buffers.result),
              static_cast<const float*>(buffers.c),
              static_cast<float>(buffers.alpha),
              static_cast<float>(buffers.beta),
              static_cast<int>(problem.m),
              static_cast<int>(problem.n),
              config.pack_result,
              factor_a.exponents,
              factor_b.exponents};
    order = order_of_tiles<Kernel>(problem, config, kStageDepth<__nv_bfloat16>);
  }
  const LaunchShape shape{dim3(static_cast<unsigned>(config.blocks)),
                          static_cast<unsigned>(config.threads),
                          static_cast<std::size_t>(config.shared_bytes), config.cluster_rows};
  launch_kernel<bf16_x6_kernel<Kernel>>(queue, shape, a, b, result, order,
                                        static_cast<int>(factor_a.stored.batch),
                                        static_cast<int>(factor_b.stored.batch), report);
}

}  // namespace

void launch_bf16_x6(const Queue& queue, const Config& config, const Problem& problem,
                    const Buffers& buffers) {
  if (problem.k == 0) {
    return clear(queue, buffers.result, problem.batch * problem.m * problem.n * sizeof(float));
  }
  const BF16X6Workspace at = bf16_x6_workspace(problem);
  auto* const workspace = static_cast<unsigned char*>(buffers.workspace);
  auto* const report = reinterpret_cast<BF16X6Report*>(workspace);
  const auto factor_at = [&](const StoredFactor& stored, const void* data, std::int64_t parts,
                             std::int64_t exponents, std::int32_t* span) {
    return SplitFactor{stored, data, reinterpret_cast<__nv_bfloat16*>(workspace + parts),
                       reinterpret_cast<std::int32_t*>(workspace + exponents), span};
  };
  const SplitFactor a =
      factor_at(stored_a(problem), buffers.a, at.parts_a, at.exponents_a, &report->span_a);
  const SplitFactor b =
      factor_at(stored_b(problem), buffers.b, at.parts_b, at.exponents_b, &report->span_b);

  clear(queue, report, sizeof(BF16X6Report));
  split_factor(queue, a, config.pack_a);
  split_factor(queue, b, config.pack_b);
  dispatch_value<false, true>(a.stored.deep, [&](auto deep_a) {
    dispatch_value<false, true>(b.stored.deep, [&](auto deep_b) {
      dispatch_power_of_two<1, 2>(config.cluster_rows, [&](auto cluster_rows) {
        launch_products<BF16X6<decltype(deep_a)::value, decltype(deep_b)::value,
                               decltype(cluster_rows)::value>>(queue, config, problem, buffers, a,
                                                               b, report);
      });
    });
  });
  launch_where_flagged(queue, config, problem, buffers, &report->refused);
}

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
