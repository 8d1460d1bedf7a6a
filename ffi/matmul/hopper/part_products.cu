// Launches bf16_x6 and fp16_x3: splits the factors, multiplies their parts, and then launches other
// kernels for factors that cannot be split so.
#include "core/dispatch.h"
#include "core/integer.h"
#include "core/launch.h"
#include "matmul/hopper/factors.cuh"
#include "matmul/hopper/finish_results.cuh"
#include "matmul/hopper/part_products.cuh"
#include "matmul/hopper/split_parts.cuh"
#include "matmul/matmul.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {
namespace {

// A factor, and where its parts and exponents lie.
template <class Parts>
struct SplitFactor {
  StoredFactor stored;
  const void* data;
  typename Parts::Part* parts;
  std::int32_t* exponents;
  std::uint32_t* worst;
};

// The matrices of one part follow those of another. `rows`: how many rows of a or columns of b a
// block copies at a time, if the factor is deep.
template <bool kDeep, class Parts>
FactorMaps maps_of_parts(const SplitFactor<Parts>& factor, int rows) {
  StoredFactor parts = factor.stored;
  parts.batch *= Parts::kParts;
  const ReadFactor read{factor.parts, parts, pitch_of_parts(factor.stored)};
  return maps_of_factor<typename Parts::Part, kDeep>(read, rows);
}

template <class Kernel>
void launch_products(const Queue& queue, const Config& config, const Problem& problem,
                     const Buffers& buffers, const SplitFactor<typename Kernel::Parts>& factor_a,
                     const SplitFactor<typename Kernel::Parts>& factor_b, PartsReport* report) {
  static_assert(Kernel::kThreads == kPartsThreads);
  static_assert(kSharedBytes<RingStorage<Kernel>> == kPartsSharedBytes);
  FactorMaps a{}, b{};
  PartsResult result{};
  TileOrder order{};
  if (!queue.preparing) {
    a = maps_of_parts<Kernel::kDeepA>(factor_a, Kernel::kRows);
    b = maps_of_parts<Kernel::kDeepB>(factor_b, Kernel::kCols / Kernel::kClusterRows);
    result = {float_result(config, problem, buffers), factor_a.exponents, factor_b.exponents};
    order = order_of_tiles<Kernel>(problem, config, kStageDepth<typename Kernel::Factor>);
  }
  const LaunchShape shape{dim3(static_cast<unsigned>(config.blocks)),
                          static_cast<unsigned>(config.threads),
                          static_cast<std::size_t>(config.shared_bytes), config.cluster_rows};
  launch_kernel<part_products_kernel<Kernel>>(
      queue, shape, a, b, result, order, static_cast<int>(factor_a.stored.batch),
      static_cast<int>(factor_b.stored.batch), report, problem.k);
}

PartsReport* report_in(const Buffers& buffers) {
  return static_cast<PartsReport*>(buffers.workspace);
}

// Splits both factors and multiplies their parts, unless `done` is not null and *done is not 0.
template <class Parts>
void launch_parts(const Queue& queue, const Config& config, const Problem& problem,
                  const Buffers& buffers, const std::int32_t* done) {
  const PartsWorkspace at = parts_workspace(problem);
  auto* const workspace = static_cast<unsigned char*>(buffers.workspace);
  PartsReport* const report = report_in(buffers);
  const auto split = [&](const StoredFactor& stored, const void* data, std::int64_t parts,
                         std::int64_t exponents, std::uint32_t* worst, bool packed) {
    const SplitFactor<Parts> factor{stored, data,
                                    reinterpret_cast<typename Parts::Part*>(workspace + parts),
                                    reinterpret_cast<std::int32_t*>(workspace + exponents), worst};
    launch_split<Parts>(queue,
                        {static_cast<const float*>(data), factor.parts, factor.exponents, worst,
                         done, stored.batch, stored.rows, stored.length, pitch_of_parts(stored)},
                        stored.deep, packed);
    return factor;
  };
  constexpr bool kSpans = kCountsSpan<Parts>;
  const SplitFactor<Parts> a = split(stored_a(problem), buffers.a, at.parts_a, at.exponents_a,
                                     kSpans ? &report->span_a : &report->small_a, config.pack_a);
  const SplitFactor<Parts> b = split(stored_b(problem), buffers.b, at.parts_b, at.exponents_b,
                                     kSpans ? &report->span_b : &report->small_b, config.pack_b);

  dispatch_value<false, true>(a.stored.deep, [&](auto deep_a) {
    dispatch_value<false, true>(b.stored.deep, [&](auto deep_b) {
      dispatch_power_of_two<1, 2>(config.cluster_rows, [&](auto cluster_rows) {
        launch_products<PartProducts<Parts, decltype(deep_a)::value, decltype(deep_b)::value,
                                     decltype(cluster_rows)::value>>(queue, config, problem,
                                                                     buffers, a, b, report);
      });
    });
  });
}

// Calls multiply(problem, buffers, report) for the product without its epilogue, and then applies
// the epilogue.
template <class Multiply>
void multiply_and_finish(const Queue& queue, const Config& config, const Problem& problem,
                         const Buffers& buffers, Multiply&& multiply) {
  if (problem.k == 0) return clear_result(queue, problem, buffers);
  PartsReport* const report = report_in(buffers);
  clear(queue, report, sizeof(PartsReport));
  if (!has_epilogue(problem)) return multiply(problem, buffers, report);
  Problem product = problem;
  product.has_bias = false;
  product.epilogue = EpilogueOp::kNone;
  product.has_c = false;
  Buffers product_buffers = buffers;
  product_buffers.bias = nullptr;
  product_buffers.c = nullptr;
  multiply(product, product_buffers, report);
  launch_finish_results(queue, config, problem, buffers);
}

}  // namespace

void launch_bf16_x6(const Queue& queue, const Config& config, const Problem& problem,
                    const Buffers& buffers) {
  multiply_and_finish(queue, config, problem, buffers,
                      [&](const Problem& product, const Buffers& of_product, PartsReport* report) {
                        launch_parts<BF16Parts>(queue, config, product, of_product,
                                                /*done=*/nullptr);
                        launch_where_flagged(queue, config, product, of_product, &report->refused);
                      });
}

void launch_fp16_x3(const Queue& queue, const Config& config, const Problem& problem,
                    const Buffers& buffers) {
  multiply_and_finish(queue, config, problem, buffers,
                      [&](const Problem& product, const Buffers& of_product, PartsReport* report) {
                        launch_parts<FP16Parts>(queue, config, product, of_product,
                                                /*done=*/nullptr);
                        launch_parts<BF16Parts>(queue, config, product, of_product, &report->done);
                        launch_where_flagged(queue, config, product, of_product, &report->refused);
                      });
}

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
