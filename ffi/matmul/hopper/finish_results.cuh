// The epilogue of bf16_x6 and fp16_x3, after their products: result = activation(result + bias) +
// beta c, in place. It takes the time of reading and writing the result, which is short compared to
// three or six products, and it follows whichever kernel computed them.
#pragma once

#include <cstdint>

#include "core/dispatch.h"
#include "core/integer.h"
#include "core/launch.h"
#include "core/vector.h"
#include "matmul/epilogue.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {

inline constexpr int kFinishResultsThreads = 256;

struct UnfinishedResults {
  float* data;
  const float* c;  // may be null
  float beta;
  std::int64_t size;
  std::int64_t matrix_size;
  Finish finish;
};

// A thread takes kSize neighbours at a time, which lie in one row.
template <int kSize>
__global__ void __launch_bounds__(kFinishResultsThreads)
    finish_results_kernel(const __grid_constant__ UnfinishedResults results) {
  const std::int64_t cols = results.finish.cols;
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x * kSize;
  const std::int64_t first = (std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * kSize;
  std::int64_t col = first % cols;
  const std::int64_t col_step = step % cols;
  for (std::int64_t at = first; at < results.size; at += step) {
    const std::int64_t matrix = results.finish.bias_stride == 0 ? 0 : at / results.matrix_size;
    float value[kSize];
    load<kSize>(results.data + at, value);
    float added[kSize] = {};
    if (results.c != nullptr) load<kSize>(results.c + at, added);
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const float bias = bias_of<float>(results.finish, matrix, col + i);
      value[i] = activated(results.finish.op, value[i] + bias);
      // Without c nothing is added, so that -0 stays -0.
      if (results.c != nullptr) value[i] += results.beta * added[i];
    }
    store<kSize>(value, results.data + at);
    col += col_step;
    if (col >= cols) col -= cols;
  }
}

inline void launch_finish_results(const Queue& queue, const Config& config, const Problem& problem,
                                  const Buffers& buffers) {
  const std::int64_t matrix_size = problem.m * problem.n;
  const UnfinishedResults results{static_cast<float*>(buffers.result),
                                  static_cast<const float*>(buffers.c),
                                  static_cast<float>(buffers.beta),
                                  problem.batch * matrix_size,
                                  matrix_size,
                                  finish_of(problem, buffers)};
  const auto launch = [&](auto size) {
    constexpr int kSize = decltype(size)::value;
    const std::int64_t blocks = divide_up(results.size, kFinishResultsThreads * kSize);
    launch_kernel<finish_results_kernel<kSize>>(queue, {grid_extent(blocks), kFinishResultsThreads},
                                                results);
  };
  if (config.pack_result) {
    launch(Constant<kPack>{});
  } else {
    launch(Constant<1>{});
  }
}

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
