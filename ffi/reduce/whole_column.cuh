// The kernel of `column` for rows of so few elements that a thread reduces whole rows.
//
// Neighbouring threads have neighbouring rows: one each, or two if elements have 16 bits, which are
// a word of each column. There are no tiles: threads are numbered through all rows, so that only
// the array's last block may lack rows.
//
//                 thread 0     thread 1     thread 2     ...      16-bit elements
//     column 0:   r0 r1        r2 r3        r4 r5
//     column 1:   r0 r1        r2 r3        r4 r5
//     ...
//
// A small array takes as long as its instructions are fetched and memory is waited for. So a thread
// waits once for kWholeLoads columns, and combines with no other thread: no shared memory, no
// barrier. If `inner` is odd, words are not aligned, and a thread has one row.
#pragma once

#include <algorithm>

#include "core/integer.h"
#include "core/ptx/memory.cuh"
#include "reduce/few_elements.cuh"
#include "reduce/instance.cuh"
#include "reduce/reducer.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace reduce {

inline constexpr int kWholeLoads = 32;  // columns that a thread loads before it folds one
inline constexpr int kWholeGroup = 8;   // of these, between two branches

struct WholeColumns {
  unsigned inner;
  unsigned size;   // elements per outer
  unsigned apart;  // elements from a row to the next one
  unsigned step;   // elements from a column to the next one
  int columns;
  unsigned threads;  // of all blocks
  Divisor of_outer;  // threads per outer
};

// A pack, which the compiler does not see to be in global memory.
template <int kSize, class T>
__device__ __forceinline__ RegisterPack<T, kSize> load_global(const T* from) {
#ifdef JAX_GPUOPS_INTERPRET
  return read_pack<kSize>(from);
#else
  using Result = RegisterPack<T, kSize>;
  using Word = typename WordOf<sizeof(Result)>::type;
  return __builtin_bit_cast(Result, __ldg(reinterpret_cast<const Word*>(from)));
#endif
}

// The fold of a thread's rows.
template <class Reducer, int kRows, bool = kRows == 2 && kComparesPairs<Reducer>>
struct WholeFold {
  using Element = typename Reducer::Element;
  using Elements = RegisterPack<Element, kRows>;
  using Partial = typename Reducer::Partial;

  ShortFold<Reducer> fold[kRows];

  // A group of columns.
  __device__ void add(const typename Reducer::Reader& read, const Elements* column, int first) {
    Accumulator<Element> value[kWholeGroup][kRows];
#pragma unroll
    for (int u = 0; u < kWholeGroup; ++u) read.widen(column[u], value[u]);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      Accumulator<Element> of_row[kWholeGroup];
#pragma unroll
      for (int u = 0; u < kWholeGroup; ++u) of_row[u] = value[u][i];
      fold[i].add(of_row, first, 1);
    }
  }

  // What has been folded since `before` was counted from column `first` on.
  __device__ void count_from(int first, const WholeFold& before) {
    if constexpr (kIsIndexed<Partial>) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) fold[i].count_from(first, before.fold[i]);
    }
  }

  __device__ Partial of_row(int i) const { return fold[i].partial; }
};

template <class Reducer>
struct WholeFold<Reducer, 2, true> {
  using Elements = RegisterPack<typename Reducer::Element, 2>;

  PairFold<Reducer> fold;

  __device__ void add(const typename Reducer::Reader&, const Elements* column, int first) {
#pragma unroll
    for (int u = 0; u < kWholeGroup; ++u) fold.add(column[u].reg[0], first + u);
  }

  __device__ void count_from(int first, const WholeFold& before) {
    fold.count_from(first, before.fold);
  }

  __device__ typename Reducer::Partial of_row(int i) const { return fold.of_half(i); }
};

// kRows: of a thread.
template <class Reducer, int kRows>
__global__ void __launch_bounds__(kColumnThreads)
    whole_column_kernel(const typename Reducer::Element* __restrict__ x, WholeColumns shape,
                        Target y) {
  using Element = typename Reducer::Element;
  using Partial = typename Reducer::Partial;
  using Elements = RegisterPack<Element, kRows>;
  const typename Reducer::Reader read(y);
  const unsigned thread = blockIdx.x * blockDim.x + threadIdx.x;
  if (thread >= shape.threads) return;
  const Division place = shape.of_outer.divide(thread);
  const unsigned inner = place.remainder * kRows;
  const Element* const own =
      x + (std::uint64_t{place.quotient} * shape.size + std::uint64_t{inner} * shape.apart);

  // -- Load, then fold --
  const int columns = shape.columns;
  WholeFold<Reducer, kRows> fold;
  Elements elements[kWholeLoads];
  Elements last[kWholeGroup];  // fewer columns than a group
  const Element* from = own;
  int first = 0;
  const auto load_next = [&] {
    const Elements column = load_global<kRows>(from);
    from = computed_once(from + shape.step);
    return column;
  };
#pragma unroll 1
  for (int left = columns;; left -= kWholeLoads) {
#pragma unroll
    for (int group = 0; group < kWholeLoads; group += kWholeGroup) {
      if (left < group + kWholeGroup) break;
#pragma unroll
      for (int u = group; u < group + kWholeGroup; ++u) elements[u] = load_next();
    }
    const bool is_last = left < kWholeLoads + kWholeGroup;
    const int lasts = is_last ? left & (kWholeGroup - 1) : 0;
    if (lasts != 0) {
#pragma unroll
      for (int u = 0; u < kWholeGroup; ++u) {
        last[u] = filled<kRows>(absent_element<Reducer>());
        if (u < lasts) last[u] = load_global<kRows>(from);
        from = computed_once(from + shape.step);
      }
    }
    const WholeFold<Reducer, kRows> before = fold;
#pragma unroll
    for (int group = 0; group < kWholeLoads; group += kWholeGroup) {
      if (left < group + kWholeGroup) break;
      fold.add(read, elements + group, group);
    }
    fold.count_from(first, before);
    if (lasts != 0) {
      const WholeFold<Reducer, kRows> before_last = fold;
      fold.add(read, last, 0);
      fold.count_from(columns - lasts, before_last);
    }
    if (is_last && left <= kWholeLoads + lasts) break;
    first += kWholeLoads;
  }

  // -- Store --
  const std::int64_t row = std::int64_t{place.quotient} * shape.inner + inner;
  Partial result[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    result[i] = fold.of_row(i);
    if constexpr (kIsIndexed<Partial>) {
      if (result[i].value != result[i].value) {  // find the first NaN
        result[i].index = 0;
        for (from = own + i; result[i].index + 1 < columns; ++result[i].index) {
          const Accumulator<Element> value = read(*from);
          if (value != value) break;
          from += shape.step;
        }
      }
    }
  }
  if constexpr (kIsIndexed<Partial>) {
    if (y.dtype == DType::kInt64) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) static_cast<std::int64_t*>(y.data)[row + i] = result[i].index;
      return;
    }
    std::int32_t* const to = static_cast<std::int32_t*>(y.data) + row;
    if constexpr (kRows == 2) {
      const std::uint32_t words[2] = {static_cast<std::uint32_t>(result[0].index),
                                      static_cast<std::uint32_t>(result[1].index)};
      store_words(words, to);
    } else {
      to[0] = result[0].index;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kRows; ++i) Reducer::store(y, row + i, result[i]);
  }
}

template <class Instance>
void launch_whole_column(const Call& call) {
  const Problem& problem = call.problem;
  const bool contiguous = problem.inner == 1;
  const std::int64_t inner = contiguous ? problem.rows() : problem.inner;
  constexpr int kMostRows = 4 / static_cast<int>(sizeof(typename Instance::Element));
  const bool has_words = !contiguous && inner % kMostRows == 0 && problem.alignment >= 4;
  dispatch_power_of_two<1, kMostRows>(has_words ? kMostRows : 1, [&](auto rows) {
    constexpr int kRows = decltype(rows)::value;
    const std::int64_t of_outer = inner / kRows;
    const std::int64_t threads = problem.rows() / kRows;
    const auto narrow = [](std::int64_t number) { return static_cast<unsigned>(number); };
    launch_kernel<whole_column_kernel<typename Instance::OfShortRows, kRows>>(
        call.queue,
        {grid_extent(divide_up(threads, call.config.threads)),
         static_cast<unsigned>(call.config.threads)},
        Instance::elements(call),
        WholeColumns{narrow(inner), narrow(problem.columns * problem.inner),
                     narrow(contiguous ? problem.columns : 1), narrow(problem.inner),
                     static_cast<int>(problem.columns), narrow(threads), Divisor(of_outer)},
        call.result());
  });
}

}  // namespace reduce
}  // namespace JAX_GPUOPS_NAMESPACE
