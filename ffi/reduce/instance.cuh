// Maps a problem to the types of its kernels, and has the common parts of their launches.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <type_traits>
#include <utility>

#include "core/dispatch.h"
#include "core/integer.h"
#include "core/launch.h"
#include "core/row_masks.cuh"
#include "reduce/reduce.h"
#include "reduce/reducer.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace reduce {

// A contiguous array of `count` rows of `columns` elements.
struct ContiguousRows {
  std::int64_t count;
  std::int64_t columns;
};

// A launch of one problem.
struct Call {
  const Queue& queue;
  const Config& config;
  const Problem& problem;
  const Buffers& buffers;

  ContiguousRows rows() const { return {problem.rows(), problem.columns}; }
  Target result() const {
    return {buffers.y,       problem.result,   false,       order(),           buffers.divisor != 1,
            buffers.divisor, buffers.variance, buffers.low, buffers.correction};
  }
  Target partials(void* data) const { return {data, DType{}, true, order()}; }

 private:
  IntegerOrder order() const {
    const auto all_bits = [](bool flips) { return static_cast<std::int8_t>(flips ? -1 : 0); };
    const auto [function, dtype] = std::pair(problem.function, problem.dtype);
    return {static_cast<std::uint8_t>(8 * info(dtype).bytes - 1),
            all_bits(dtype >= DType::kUInt8 && dtype <= DType::kUInt64),
            all_bits(function == Function::kMin || function == Function::kArgMin)};
  }
};

// The reducers of a function of elements of T, computed in A: for the first launch, and for the one
// that combines its partials.
template <Function kFunction_, class T, class A, class Masks_ = NoMasks>
struct Instance {
  static constexpr Function kFunction = kFunction_;
  using Masks = Masks_;
  using Element = T;
  using Value = A;
  using First = Reducer<kFunction, T, A>;
  using OfShortRows = Reducer<kFunction, T, A, int>;  // fewer than 2^31 elements each
  using Partial = typename First::Partial;
  using Last = Reducer<kFunction, Partial, A>;

  static const T* elements(const Call& call) { return static_cast<const T*>(call.buffers.x); }
  static Partial* partials(const Call& call) {
    return static_cast<Partial*>(call.buffers.workspace);
  }
  static Target partial_target(const Call& call) { return call.partials(call.buffers.workspace); }
  static Masks masks(const Call& call) {
    if constexpr (Masks::kMasks) {
      return Masks(call.buffers.mask, call.problem.rows());
    } else {
      return {};
    }
  }
};

// Calls f(instance) for the instance of a problem of floats.
template <Function kFunction, class Masks, class F>
void dispatch_float(DType dtype, F&& f) {
  dispatch<__half, __nv_bfloat16, float, double>(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    f(Instance<kFunction, T, Accumulator<T>, Masks>{});
  });
}

// Calls f(type) for an integer type.
template <class F>
void dispatch_integer(DType dtype, F&& f) {
  dispatch<std::int8_t, std::uint8_t, std::int16_t, std::uint16_t, std::int32_t, std::uint32_t,
           std::int64_t, std::uint64_t>(dtype, f);
}

// As dispatch_float(), for sums and products of integers, which wrap around and so are computed in
// unsigned types at least as wide as the result; the truncated result does not depend on the sign.
template <Function kFunction, class F>
void dispatch_modular(DType dtype, DType result, F&& f) {
  dispatch_integer(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if constexpr (sizeof(T) == 8) {
      f(Instance<kFunction, std::uint64_t, std::uint64_t>{});
    } else {
      if constexpr (sizeof(T) == 4) {
        if (info(result).bytes <= 4) return f(Instance<kFunction, std::uint32_t, std::uint32_t>{});
      }
      f(Instance<kFunction, T, std::uint64_t>{});
    }
  });
}

// The same for integers that are compared, in 32 or 64 bits: kernels look for the largest key.
template <Function kFunction, class F>
void dispatch_ordered(DType dtype, F&& f) {
  dispatch_integer(dtype, [&](auto type) {
    constexpr Function kLargest = is_arg(kFunction) ? Function::kArgMax : Function::kMax;
    using Key = std::make_signed_t<typename decltype(type)::type>;
    f(Instance<kLargest, Key, std::conditional_t<sizeof(Key) == 8, Key, std::int32_t>>{});
  });
}

template <Function kFunction, class F>
void dispatch_dtype(const Problem& problem, F&& f) {
  if (problem.dtype >= DType::kFloat16) return dispatch_float<kFunction, NoMasks>(problem.dtype, f);
  if constexpr (kFunction == Function::kSum || kFunction == Function::kProd) {
    dispatch_modular<kFunction>(problem.dtype, problem.result, f);
  } else if constexpr (kFunction == Function::kMeanAndVar) {
    throw std::logic_error("the plan takes a mean and a variance of floats only");
  } else {
    dispatch_ordered<kFunction>(problem.dtype, f);
  }
}

// Calls f(instance) for the instance of a problem without a mask.
template <class F>
void dispatch_unmasked(const Problem& problem, F&& f) {
  dispatch_value<Function::kSum, Function::kProd, Function::kMax, Function::kMin, Function::kArgMax,
                 Function::kArgMin, Function::kMeanAndVar>(problem.function, [&](auto function) {
    dispatch_dtype<decltype(function)::value>(problem, f);
  });
}

// Calls f(instance) for the instance of a problem.
template <class F>
void dispatch_reduction(const Problem& problem, F&& f) {
  if (!problem.masked) return dispatch_unmasked(problem, f);
  dispatch_value<Function::kSum, Function::kProd, Function::kMax, Function::kMin,
                 Function::kMeanAndVar>(problem.function, [&](auto function) {
    dispatch_float<decltype(function)::value, RowMasks>(problem.dtype, f);
  });
}

}  // namespace reduce
}  // namespace JAX_GPUOPS_NAMESPACE
