// The kernel of `column` for rows of few elements, or of up to 1024 in many rows: a thread reduces
// whole rows.
//
// Neighbouring threads have neighbouring rows: one each, or two if elements have 16 bits. There are
// no tiles: threads are numbered through all rows, so that only the array's last block may lack
// rows.
//
//                 thread 0     thread 1     thread 2     ...      16-bit elements
//     column 0:   r0 r1        r2 r3        r4 r5
//     column 1:   r0 r1        r2 r3        r4 r5
//     ...
//
// A small array takes as long as its instructions are fetched and memory is waited for. So a thread
// waits once for up to kWholeLoads loads, and combines with no other thread: no shared memory, no
// barrier.
//
// Two rows are a word of each column, and are compared in words. But if `inner` is odd, only every
// other column has aligned words, so a thread loads their halves one by one. The last thread of an
// outer then has its last two rows, of which the thread before it has one too.
#pragma once

#include <algorithm>

#include "core/integer.h"
#include "core/ptx/memory.cuh"
#include "reduce/few_elements.cuh"
#include "reduce/instance.cuh"
#include "reduce/reducer.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace reduce {

inline constexpr int kWholeLoads = 32;  // of a thread, before it folds a column
inline constexpr int kWholeGroup = 8;   // columns between two branches

struct WholeColumns {
  unsigned inner;
  unsigned size;  // elements per outer
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

// The elements of a column in a thread's rows. The halves of a word that is not aligned are loaded
// one by one, and stay apart until all loads have been issued.
template <class T, int kRows, bool kAligned>
struct Loaded {
  RegisterPack<T, kRows> pack;

  __device__ void fill(T value) { pack = filled<kRows>(value); }
  __device__ void load(const T* from) { pack = load_global<kRows>(from); }
  __device__ RegisterPack<T, kRows> elements() const { return pack; }
};

template <class T>
struct Loaded<T, 2, false> {
  T low;
  T high;

  __device__ void fill(T value) { low = high = value; }
  __device__ void load(const T* from) {
    low = load_global<1>(from).reg[0];
    high = load_global<1>(from + 1).reg[0];
  }
  __device__ RegisterPack<T, 2> elements() const { return {{pair_of(low, high)}}; }
};

// The fold of a thread's rows. The columns between begin() and join() are folded apart from those
// before them: sums then have few terms one after the other.
template <class Reducer, int kRows, bool = kRows == 2 && kComparesPairs<Reducer>>
struct WholeFold {
  using Element = typename Reducer::Element;
  using Elements = RegisterPack<Element, kRows>;
  using Partial = typename Reducer::Partial;

  ShortFold<Reducer> fold[kRows];

  __device__ void begin() {
    if constexpr (!kIsIndexed<Partial>) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) fold[i].partial = Reducer::identity();
    }
  }

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

  // `before`: the fold before begin(), since when columns have been counted from `first` on.
  __device__ void join(int first, const WholeFold& before) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if constexpr (kIsIndexed<Partial>) {
        fold[i].count_from(first, before.fold[i]);
      } else {
        fold[i].partial = typename Reducer::Combine{}(before.fold[i].partial, fold[i].partial);
      }
    }
  }

  __device__ Partial of_row(int i) const { return fold[i].partial; }
};

template <class Reducer>
struct WholeFold<Reducer, 2, true> {
  using Elements = RegisterPack<typename Reducer::Element, 2>;

  PairFold<Reducer> fold;

  __device__ void begin() {}

  __device__ void add(const typename Reducer::Reader&, const Elements* column, int first) {
#pragma unroll
    for (int u = 0; u < kWholeGroup; ++u) fold.add(column[u].reg[0], first + u);
  }

  __device__ void join(int first, const WholeFold& before) { fold.count_from(first, before.fold); }

  __device__ typename Reducer::Partial of_row(int i) const { return fold.of_half(i); }
};

// kRows: of a thread. kAligned: whether they are a word in each column.
template <class Reducer, int kRows, bool kAligned>
__global__ void __launch_bounds__(kColumnThreads)
    whole_column_kernel(const typename Reducer::Element* __restrict__ x, WholeColumns shape,
                        Target y) {
  using Element = typename Reducer::Element;
  using Partial = typename Reducer::Partial;
  using Column = Loaded<Element, kRows, kAligned>;
  constexpr int kColumns = kAligned ? kWholeLoads : kWholeLoads / kRows;  // loaded before a fold
  const typename Reducer::Reader read(y);
  const unsigned thread = blockIdx.x * blockDim.x + threadIdx.x;
  if (thread >= shape.threads) return;
  const Division place = shape.of_outer.divide(thread);
  unsigned inner = place.remainder * kRows;
  if constexpr (!kAligned) inner = min(inner, shape.inner - kRows);
  const Element* const own = x + (std::uint64_t{place.quotient} * shape.size + inner);

  // -- Load, then fold --
  const int columns = shape.columns;
  WholeFold<Reducer, kRows> fold;
  Column loaded[kColumns];
  Column last[kWholeGroup];  // fewer columns than a group
  const Element* from = own;
  int first = 0;
  const auto fold_group = [&](const Column* columns_of_group, int position) {
    RegisterPack<Element, kRows> elements[kWholeGroup];
#pragma unroll
    for (int u = 0; u < kWholeGroup; ++u) elements[u] = columns_of_group[u].elements();
    fold.add(read, elements, position);
  };
#pragma unroll 1
  for (int left = columns;; left -= kColumns) {
#pragma unroll
    for (int group = 0; group < kColumns; group += kWholeGroup) {
      if (left < group + kWholeGroup) break;
#pragma unroll
      for (int u = group; u < group + kWholeGroup; ++u) {
        loaded[u].load(from);
        from = computed_once(from + shape.inner);
      }
    }
    const bool is_last = left < kColumns + kWholeGroup;
    const int lasts = is_last ? left & (kWholeGroup - 1) : 0;
    if (lasts != 0) {
#pragma unroll
      for (int u = 0; u < kWholeGroup; ++u) {
        last[u].fill(absent_element<Reducer>());
        if (u < lasts) last[u].load(from);
        from = computed_once(from + shape.inner);
      }
    }
    const WholeFold<Reducer, kRows> before = fold;
    fold.begin();
#pragma unroll
    for (int group = 0; group < kColumns; group += kWholeGroup) {
      if (left < group + kWholeGroup) break;
      fold_group(loaded + group, group);
    }
    fold.join(first, before);
    if (lasts != 0) {
      const WholeFold<Reducer, kRows> before_last = fold;
      fold.begin();
      fold_group(last, 0);
      fold.join(columns - lasts, before_last);
    }
    if (is_last && left <= kColumns + lasts) break;
    first += kColumns;
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
          from += shape.inner;
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
    if constexpr (kRows == 2 && kAligned) {
      const std::uint32_t words[2] = {static_cast<std::uint32_t>(result[0].index),
                                      static_cast<std::uint32_t>(result[1].index)};
      store_words(words, to);
    } else {
#pragma unroll
      for (int i = 0; i < kRows; ++i) to[i] = result[i].index;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kRows; ++i) Reducer::store(y, row + i, result[i]);
  }
}

template <class Instance>
void launch_whole_column(const Call& call) {
  const Problem& problem = call.problem;
  constexpr int kRows = 4 / static_cast<int>(sizeof(typename Instance::Element));
  const bool aligned = kRows == 1 || (problem.inner % kRows == 0 && problem.alignment >= 4);
  dispatch_value<kRows == 1, true>(aligned, [&](auto is_aligned) {
    constexpr bool kAligned = decltype(is_aligned)::value;
    const std::int64_t of_outer = divide_up(problem.inner, kRows);
    const std::int64_t threads = problem.outer * of_outer;
    const auto narrow = [](std::int64_t number) { return static_cast<unsigned>(number); };
    launch_kernel<whole_column_kernel<typename Instance::OfShortRows, kRows, kAligned>>(
        call.queue,
        {grid_extent(divide_up(threads, call.config.threads)),
         static_cast<unsigned>(call.config.threads)},
        Instance::elements(call),
        WholeColumns{narrow(problem.inner), narrow(problem.columns * problem.inner),
                     static_cast<int>(problem.columns), narrow(threads), Divisor(of_outer)},
        call.result());
  });
}

}  // namespace reduce
}  // namespace JAX_GPUOPS_NAMESPACE
