// Rows with large anchors, computed again.
#pragma once

#include <cstdint>

#include "core/collectives.h"
#include "core/numeric.h"
#include "softmax/functions.cuh"
#include "softmax/row.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {

// A row with a large anchor, for the second time, by a function that is called: what it needs is
// not in the way of other rows, of which a short one would take some percent more time. The whole
// warp must call it, each group of `lanes` lanes with a row of its own.
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
  const auto powers = exponents.powers(exponents.base(anchor), exponents.lift());
  CompensatedSum<A> sum;
  each([&](std::int64_t at, bool kept) {
    if (kept) sum.add(powers(widen(args.x[at])));
  });
  const MaxSum<T> total{anchor, group_reduce(sum.value(), Add{}, lanes)};
  const auto write = [&](const auto& result, A left_out) {
    each([&](std::int64_t at, bool kept) {
      args.y[at] = narrow<T>(kept ? result(widen(args.x[at])) : left_out);
    });
  };
  const auto of_total = exponents.powers(anchor, exponents.lift());
  if (args.y != nullptr) {
    if (args.function == Function::kSoftmax) {
      write(FreshPowers<T>(total, of_total), A(0));
    } else {
      write(Logarithms<T>(total, of_total), -infinity<A>());
    }
  }
  if (lane == 0 && exists) write_row(args, number, total);
}

}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
