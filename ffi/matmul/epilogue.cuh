// The epilogue of a sum, before it is rounded: a bias and an activation.
#pragma once

#include <cstdint>

#include "core/cuda.h"
#include "core/dtype.h"
#include "core/numeric.h"
#include "core/vector.h"
#include "matmul/matmul.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {

// The bias and the activation of a launch. The bias has n elements of the result's dtype for each
// matrix of the batch, or is null.
struct Finish {
  const void* bias;
  std::int64_t bias_stride;  // between those of two matrices: 0 if the batch shares one
  std::int64_t cols;         // n
  EpilogueOp op;
};

inline Finish finish_of(const Problem& problem, const Buffers& buffers) {
  return {buffers.bias, problem.share_bias ? 0 : problem.n, problem.n, problem.epilogue};
}

// The activation of x. With `kFast` x is a float, and the result is exact enough for 16 bits.
//
// gelu's 0.5 x (1 + tanh(u)), u = sqrt(2 / pi) (x + 0.044715 x^3), is x times the logistic function
// of 2 u: this form stays exact where tanh(u) is close to -1.
template <EpilogueOp kOp, bool kFast, class A>
__device__ __forceinline__ A activated(A x) {
  constexpr double kLinear = 1.5957691216057308;  // 2 sqrt(2 / pi)
  constexpr double kCubic = 0.044715 * kLinear;
  constexpr double kLog2E = 1.4426950408889634;
  if constexpr (kOp == EpilogueOp::kNone) {
    return x;
  } else if constexpr (kOp == EpilogueOp::kRelu) {
    return x < 0 ? A(0) : x;  // NaN stays
  } else if constexpr (kOp == EpilogueOp::kGelu) {
    if constexpr (kFast) {
      constexpr auto kOne = static_cast<A>(kLinear * kLog2E);
      constexpr auto kThree = static_cast<A>(kCubic * kLog2E);
      return x * fast_logistic_of_log2(x * (kOne + kThree * x * x));
    } else {
      return x * logistic(x * (static_cast<A>(kLinear) + static_cast<A>(kCubic) * x * x));
    }
  } else if constexpr (kOp == EpilogueOp::kGeluExact) {
    if constexpr (kFast) {
      return x * fast_normal_distribution(x);
    } else {
      return x * normal_distribution(x);
    }
  } else {
    static_assert(kOp == EpilogueOp::kSilu);
    if constexpr (kFast) {
      return x * fast_logistic_of_log2(x * static_cast<A>(kLog2E));
    } else {
      return x * logistic(x);
    }
  }
}

// Calls f(Constant<op>{}).
template <class F>
__device__ __forceinline__ void dispatch_activation(EpilogueOp op, F&& f) {
  switch (op) {
    case EpilogueOp::kNone:
      break;
    case EpilogueOp::kRelu:
      return f(std::integral_constant<EpilogueOp, EpilogueOp::kRelu>{});
    case EpilogueOp::kGelu:
      return f(std::integral_constant<EpilogueOp, EpilogueOp::kGelu>{});
    case EpilogueOp::kGeluExact:
      return f(std::integral_constant<EpilogueOp, EpilogueOp::kGeluExact>{});
    case EpilogueOp::kSilu:
      return f(std::integral_constant<EpilogueOp, EpilogueOp::kSilu>{});
  }
}

// Not inlined, so that kernels that call it often stay small.
template <class A>
__device__ __noinline__ A activated(EpilogueOp op, A x) {
  A result = x;
  dispatch_activation(op, [&](auto constant) {
    result = activated<decltype(constant)::value, /*kFast=*/false>(x);
  });
  return result;
}

// The activation of four sums, after their bias is added.
template <bool kFast>
__device__ __forceinline__ float4 finished(EpilogueOp op, float4 sum, const float (&bias)[4]) {
  sum = make_float4(sum.x + bias[0], sum.y + bias[1], sum.z + bias[2], sum.w + bias[3]);
  dispatch_activation(op, [&](auto constant) {
    constexpr EpilogueOp kOp = decltype(constant)::value;
    sum = make_float4(activated<kOp, kFast>(sum.x), activated<kOp, kFast>(sum.y),
                      activated<kOp, kFast>(sum.z), activated<kOp, kFast>(sum.w));
  });
  return sum;
}

// The bias of a column of a matrix of the batch; 0 if there is none, or no such column.
template <class Result>
__device__ __forceinline__ Accumulator<Result> bias_of(const Finish& finish, std::int64_t matrix,
                                                       std::int64_t col) {
  if (finish.bias == nullptr || col >= finish.cols) return 0;
  return widen(static_cast<const Result*>(finish.bias)[matrix * finish.bias_stride + col]);
}

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
