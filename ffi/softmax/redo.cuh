// Recomputes rows with large anchors (numerics.cuh), so that `warp`, `column` and `strip` take
// fewer instructions for all other rows.
#pragma once

#include <cstdint>

#include "core/collectives.h"
#include "core/numeric.h"
#include "softmax/functions.cuh"
#include "softmax/row.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {

// Recomputes a row with a large anchor. It is not inlined, so that its registers are not at the
// expense of other rows. If `lanes` is more than 1, the whole warp must call it: each group of
// `lanes` lanes with a row of its own, or with none, if `exists` is false.
template <class T>
__device__ __noinline__ void redo_row(const KernelArgs<T>& args, std::int64_t number, bool exists,
                                      int lane, int lanes) {
  using A = Accumulator<T>;
  const Exponents<T> exponents(args.function, args.scale);
  const RowMask<T> row_mask = exists ? RowMask<T>(args, number) : RowMask<T>();
  const std::int64_t begin = exists ? args.rows.begin(number) : 0;
  const auto each = [&](auto&& visit) {
    for (std::int64_t column = lane; exists && column < args.rows.columns; column += lanes) {
      visit(begin + column * args.rows.inner, row_mask(column));
    }
  };

  A largest = -infinity<A>();
  each([&](std::int64_t at, bool kept) {
    if (kept) largest = fmax(largest, exponents.scaled(widen(args.x[at])));
  });
  const A anchor = exponents.anchor(group_reduce(largest, Largest{}, lanes));
  const auto powers = exponents.powers_of_part(anchor);
  CompensatedSum<A> sum;
  each([&](std::int64_t at, bool kept) {
    if (kept) sum.add(powers(widen(args.x[at])));
  });
  const MaxSum<T> total{anchor, group_reduce(sum.value(), Add{}, lanes)};
  const auto powers_of_row = exponents.powers_of_row(anchor);
  if (args.y != nullptr) {
    ForwardFunctions::dispatch<T>(args.function, [&](auto type) {
      using Result = typename decltype(type)::Result;
      const Result result(total, powers_of_row);
      each([&](std::int64_t at, bool kept) {
        args.y[at] = narrow<T>(kept ? result(widen(args.x[at])) : Result::left_out());
      });
    });
  }
  if (lane == 0 && exists) write_row(args, number, total);
}

}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
