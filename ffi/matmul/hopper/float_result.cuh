// The result of the kernels on Hopper that multiply floats and take c: alpha sum + beta c.
#pragma once

#include "matmul/matmul.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {

struct FloatResult {
  float* data;
  const float* c;  // may be null
  float alpha;
  float beta;
  int rows;
  int cols;
  bool packed;  // packs of kPack begin at aligned addresses and never straddle an edge
};

inline FloatResult float_result(const Config& config, const Problem& problem,
                                const Buffers& buffers) {
  return {static_cast<float*>(buffers.result),
          static_cast<const float*>(buffers.c),
          static_cast<float>(buffers.alpha),
          static_cast<float>(buffers.beta),
          static_cast<int>(problem.m),
          static_cast<int>(problem.n),
          config.pack_result};
}

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
