// Compiled for each of: __half __nv_bfloat16 float+__nv_fp8_e4m3+__nv_fp8_e5m2+int8_t
#include <type_traits>

#include "core/dispatch.h"
#include "matmul/hopper/launch_persistent.cuh"
#include "matmul/matmul.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {
namespace {

// Calls function(Type<Result>{}) for the type of the result, one of those for factors of T.
template <class T, class Function>
void dispatch_result(DType result, Function&& function) {
  if constexpr (std::is_integral_v<T>) {
    dispatch<std::int32_t>(result, function);
  } else if constexpr (sizeof(T) == 1) {
    dispatch<__half, __nv_bfloat16, float>(result, function);
  } else if constexpr (sizeof(T) == 2) {
    dispatch<T, float>(result, function);
  } else {
    dispatch<float>(result, function);
  }
}

template <class T, bool kDeepA, bool kDeepB, bool kFinishes = false, bool kGated = false,
          bool kAdds = false>
void launch_layout(const Queue& queue, const Config& config, const Problem& problem,
                   const Buffers& buffers) {
  const auto launch_result = [&](auto type) {
    using Result = typename decltype(type)::type;
    if constexpr (sizeof(T) == 1) {
      launch_tile<T, Result, kDeepA, kDeepB, kFinishes, kGated, Scaling::kNone,
                  kTensorCoreByteTiles>(queue, config, problem, buffers);
    } else {
      launch_tile<T, Result, kDeepA, kDeepB, kFinishes, kGated, Scaling::kNone, kTensorCoreTiles,
                  kAdds>(queue, config, problem, buffers);
    }
  };
  if constexpr (kGated || kAdds) {
    dispatch<T>(problem.result_dtype, launch_result);
  } else {
    dispatch_result<T>(problem.result_dtype, launch_result);
  }
}

}  // namespace

template <class T>
void launch_tensor_core(const Queue& queue, const Config& config, const Problem& problem,
                        const Buffers& buffers) {
  if (problem.k == 0) return clear_result(queue, problem, buffers);
  if constexpr (sizeof(T) == 2) {
    if (problem.gated) {
      return launch_layout<T, true, false, true, true>(queue, config, problem, buffers);
    }
    if (problem.has_c) {
      return launch_layout<T, true, false, true, false, true>(queue, config, problem, buffers);
    }
  }
  if constexpr (sizeof(T) == 2) {
    if (config.turned) {
      return dispatch_value<false, true>(stored_b(problem).deep, [&](auto deep_b) {
        constexpr bool kDeepB = decltype(deep_b)::value;
        if (config.splits > 1) {
          launch_turned_tile<T, float, kDeepB, kSplitTurnedTiles>(queue, config, problem, buffers);
        } else {
          launch_turned_tile<T, T, kDeepB, kTensorCoreTurnedTiles>(queue, config, problem, buffers);
        }
      });
    }
  }
  if constexpr (std::is_same_v<T, float>) {
    if (config.turned) {
      return dispatch_value<false, true>(
          has_epilogue(problem) || problem.has_c, [&](auto finishes) {
            launch_turned_float_tile<decltype(finishes)::value>(queue, config, problem, buffers);
          });
    }
  }
  if constexpr (sizeof(T) > 1) {
    if (has_epilogue(problem)) {  // factors of 16 bits are not transposed, floats are deep
      return launch_layout<T, true, sizeof(T) == 4, true>(queue, config, problem, buffers);
    }
  }
  dispatch_layouts<T>(problem, [&](auto deep_a, auto deep_b) {
    launch_layout<T, decltype(deep_a)::value, decltype(deep_b)::value>(queue, config, problem,
                                                                       buffers);
  });
}

#define JAX_GPUOPS_INSTANTIATE(T) \
  template void launch_tensor_core<T>(const Queue&, const Config&, const Problem&, const Buffers&);
JAX_GPUOPS_EACH_ELEMENT(JAX_GPUOPS_INSTANTIATE)
#undef JAX_GPUOPS_INSTANTIATE

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
