// Shared by all reduction kernels: the values that are combined, how a thread folds many elements,
// and where results are stored. A kernel is written once for any Reducer, whatever its function.
//
//     elements (T) --Fold--> a thread's Partial --Combine--> a block's Partial --store--> result
//
// Partials that blocks write to the workspace are the elements of the next launch, whose reducer
// has T = Partial; `multiple` has only one launch.
#pragma once

#include <cstdint>
#include <limits>
#include <type_traits>

#include "core/collectives.h"
#include "core/cuda.h"
#include "core/dtype.h"
#include "core/numeric.h"
#include "core/vector.h"
#include "reduce/moments.cuh"
#include "reduce/reduce.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace reduce {

// An element and its column: what argmax and argmin combine.
template <class A, class Index = std::int64_t>
struct Indexed {
  A value;
  Index index;
};

template <class>
inline constexpr bool kIsIndexed = false;
template <class A, class Index>
inline constexpr bool kIsIndexed<Indexed<A, Index>> = true;

template <class A, class Index>
__device__ inline Indexed<A, Index> shuffle_xor(Indexed<A, Index> value, int distance) {
  return {JAX_GPUOPS_NAMESPACE::shuffle_xor(value.value, distance),
          JAX_GPUOPS_NAMESPACE::shuffle_xor(value.index, distance)};
}

using JAX_GPUOPS_NAMESPACE::group_reduce;

// Whether a value is `best`, the best of several values. NaN always is: `best` is then NaN, too.
template <class A>
__device__ inline bool is_best(A value, A best) {
  return value == best || value != value;
}

// group_reduce() of collectives.h, which does not compare both members at each level: it finds
// first the best value, then the smallest column that has it.
template <class A, class Index, class FindBest, class FindSmallest>
__device__ __forceinline__ Indexed<A, Index> find_indexed(Indexed<A, Index> own,
                                                          FindBest&& find_best,
                                                          FindSmallest&& find_smallest) {
  const A best = find_best(own.value);
  constexpr auto kNone = std::numeric_limits<Index>::max();
  return {best, find_smallest(is_best(own.value, best) ? own.index : kNone)};
}

template <int kLanes, class A, class Index, class Combine>
__device__ inline Indexed<A, Index> group_reduce(Indexed<A, Index> own, Combine) {
  using Best = typename Combine::Best;
  if constexpr (kLanes == kWarpSize) {
    return find_indexed(
        own, [](A value) { return warp_extreme<Best>(value); },
        [](Index index) { return warp_smallest(index); });
  } else {
    return find_indexed(
        own, [](A value) { return group_reduce<kLanes>(value, Best{}); },
        [](Index index) { return group_reduce<kLanes>(index, Minimum{}); });
  }
}

template <int kMost = kWarpSize, class A, class Index, class Combine>
__device__ inline Indexed<A, Index> group_reduce(Indexed<A, Index> own, Combine combine, int lanes,
                                                 int stride = 1) {
  using Best = typename Combine::Best;
  if (kMost == kWarpSize && lanes == kWarpSize) return group_reduce<kWarpSize>(own, combine);
  return find_indexed(
      own, [&](A value) { return group_reduce<kMost>(value, Best{}, lanes, stride); },
      [&](Index index) { return group_reduce<kMost>(index, Minimum{}, lanes, stride); });
}

// Maps integers to signed keys, such that each function looks for the largest key: flipping the
// sign bit maps unsigned integers to signed ones in the same order, and flipping all bits reverses
// the order. The same operation maps keys back.
//
//                      signed        unsigned
//     max, argmax      x             x ^ sign bit
//     min, argmin      ~x            ~(x ^ sign bit)
struct IntegerOrder {
  std::uint8_t sign_bit;   // its position in the elements
  std::int8_t flips_sign;  // all bits set, or none: faster in kernels than a branch
  std::int8_t flips_all;   // likewise

  // The bits to flip in an element, or in its widened value, which is sign-extended.
  template <class T>
  __device__ T flipped() const {
    using Bits = std::make_unsigned_t<T>;
    const auto sign = static_cast<Bits>(static_cast<Bits>(flips_sign) << sign_bit);
    return static_cast<T>(sign ^ static_cast<Bits>(flips_all));
  }
};

// Where a launch writes: the results, or partials for the next launch. The dtype of results and the
// order of elements are run-time arguments, which saves a kernel for each. A row has only one
// result, so the branch on its dtype costs nothing.
struct Target {
  void* data;
  DType dtype;
  bool partials;
  IntegerOrder order;
  bool divides = false;  // sum of floats: divide by `divisor`, for a mean
  double divisor = 1;
  void* variance = nullptr;  // mean_and_var: the second result
  void* low = nullptr;       // mean_and_var: the third result, or null
  double correction = 0;     // mean_and_var: the divisor is the number of elements minus this
};

// Whether a reducer that computes in A compares keys in place of its elements.
template <Function kFunction, class A>
inline constexpr bool kComparesKeys =
    std::is_integral_v<A> && kFunction != Function::kSum && kFunction != Function::kProd;

// Converts elements of T, or partials of an earlier launch, to values. In memory, both have their
// original values; they become keys here, if the reducer compares keys.
template <class T, class A, bool kKeys>
class Reader {
 public:
  using Value = Accumulator<T>;

  __device__ explicit Reader(const Target& target) {
    if constexpr (kKeys) flipped_ = target.order.template flipped<Flipped>();
  }

  __device__ Value operator()(const T& element) const {
    Value value = JAX_GPUOPS_NAMESPACE::widen(element);
    if constexpr (kIsPartial) {
      if constexpr (kKeys) value.value ^= flipped_;
    } else if constexpr (kKeys) {
      value = static_cast<T>(value ^ flipped_);
    }
    return value;
  }

  // A pack of elements.
  template <int kSize>
  __device__ void widen(RegisterPack<T, kSize> pack, Value (&to)[kSize]) const {
    if constexpr (kKeys) {
      const auto flipped = filled_register<typename RegisterPack<T, kSize>::Register>();
#pragma unroll
      for (auto& reg : pack.reg) reg ^= flipped;
    }
    JAX_GPUOPS_NAMESPACE::widen(pack, to);
  }

 private:
  static constexpr bool kIsPartial = std::is_same_v<T, Indexed<A>>;
  using Flipped = std::conditional_t<kIsPartial, A, T>;

  // `flipped_` for all elements that share a register.
  template <class Register>
  __device__ Register filled_register() const {
    if constexpr (sizeof(Register) == sizeof(T)) {
      return flipped_;
    } else {
      using Bits = std::make_unsigned_t<T>;
      constexpr auto kEach = static_cast<Register>(-1) / std::numeric_limits<Bits>::max();
      return static_cast<Register>(kEach * static_cast<Bits>(flipped_));
    }
  }

  Flipped flipped_{};
};

// Stores the low bits of an integer: sums and products modulo 2^64 are also correct modulo smaller
// powers of two.
template <class A>
__device__ inline void store_result(const Target& target, std::int64_t index, A value) {
  if constexpr (std::is_same_v<A, float>) {
    switch (target.dtype) {
      case DType::kFloat16:
        static_cast<__half*>(target.data)[index] = narrow<__half>(value);
        break;
      case DType::kBFloat16:
        static_cast<__nv_bfloat16*>(target.data)[index] = narrow<__nv_bfloat16>(value);
        break;
      default:
        static_cast<float*>(target.data)[index] = value;
        break;
    }
  } else if constexpr (std::is_same_v<A, double>) {
    static_cast<double*>(target.data)[index] = value;
  } else {
    switch (target.dtype) {
      case DType::kInt8:
      case DType::kUInt8:
        static_cast<std::uint8_t*>(target.data)[index] = static_cast<std::uint8_t>(value);
        break;
      case DType::kInt16:
      case DType::kUInt16:
        static_cast<std::uint16_t*>(target.data)[index] = static_cast<std::uint16_t>(value);
        break;
      case DType::kInt32:
      case DType::kUInt32:
        static_cast<std::uint32_t*>(target.data)[index] = static_cast<std::uint32_t>(value);
        break;
      default:
        static_cast<std::uint64_t*>(target.data)[index] = static_cast<std::uint64_t>(value);
        break;
    }
  }
}

// sum, prod, max and min of elements of T, computed in A.
template <Function kFunction, class T, class A>
struct ValueReducer {
  using Element = T;
  using Partial = A;
  using Combine = std::conditional_t<
      kFunction == Function::kSum, Add,
      std::conditional_t<kFunction == Function::kProd, Multiply,
                         std::conditional_t<kFunction == Function::kMax, Maximum, Minimum>>>;
  static constexpr bool kFloat = std::is_floating_point_v<A>;

  __device__ static A identity() {
    using Limits = std::numeric_limits<A>;
    if constexpr (kFunction == Function::kSum) {
      return 0;
    } else if constexpr (kFunction == Function::kProd) {
      return 1;
    } else if constexpr (kFunction == Function::kMax) {
      return kFloat ? -Limits::infinity() : Limits::lowest();
    } else {
      return kFloat ? Limits::infinity() : Limits::max();
    }
  }

  static constexpr bool kKeys = kComparesKeys<kFunction, A>;
  using Reader = reduce::Reader<T, A, kKeys>;
  static constexpr int kChunk = 1;  // elements that Fold should get at a time, at least

  __device__ static void store(const Target& target, std::int64_t index, A value) {
    if constexpr (kKeys) value ^= target.order.template flipped<A>();
    if (target.partials) {
      static_cast<A*>(target.data)[index] = value;
      return;
    }
    if constexpr (kFunction == Function::kSum && kFloat) {
      value += A(0);  // a sum begins with 0, which makes -0 a 0
      if (target.divides) value /= static_cast<A>(target.divisor);
    }
    store_result(target, index, value);
  }

  // The partial result of one thread. Sums of floats are compensated, once per call of add(): the
  // error stays that of the trees, however many elements a thread folds.
  class Fold {
   public:
    // Elements of kCount columns: first, first + step, ...
    template <int kCount>
    __device__ void add(const Accumulator<T> (&value)[kCount], std::int64_t, std::int64_t) {
      add_kept(value, ~0u, 0, 0);
    }

    // The same, but ignores elements whose bit in `kept` is clear.
    template <int kCount>
    __device__ void add_kept(const Accumulator<T> (&value)[kCount], unsigned kept, std::int64_t,
                             std::int64_t) {
      Term terms[kCount];
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        terms[i] = static_cast<Term>((kept >> i & 1) != 0 ? static_cast<A>(value[i]) : identity());
      }
      state_.add(static_cast<A>(tree<Combine>(terms)));
    }

    __device__ A value() const { return state_.value(); }

   private:
    struct Plain {
      A partial = identity();

      __device__ void add(A term) { partial = Combine{}(partial, term); }
      __device__ A value() const { return partial; }
    };

    static constexpr bool kSum = kFunction == Function::kSum;
    // A few small integers cannot overflow 32 bits, which a GPU adds twice as fast as 64 bits.
    static constexpr bool kSmall = kSum && std::is_integral_v<T> && sizeof(T) <= 2;
    using Term = std::conditional_t<kSmall, std::int32_t, A>;

    std::conditional_t<kSum && kFloat, CompensatedSum<A>, Plain> state_;
  };
};

// argmax and argmin of elements of T, computed in A, or of the Indexed<A> of an earlier launch.
// `Index` is the type of a column.
template <Function kFunction, class T, class A, class Index = std::int64_t>
struct ArgReducer {
  using Element = T;
  using Partial = Indexed<A, Index>;

  struct Combine {
    using Best = std::conditional_t<kFunction == Function::kArgMax, Maximum, Minimum>;

    // The better value, and the smallest column that has it. Without branches, which a warp would
    // take both ways.
    __device__ Partial operator()(Partial a, Partial b) const {
      const A best = Best{}(a.value, b.value);
      constexpr Index kNone = std::numeric_limits<Index>::max();
      const Index of_a = is_best(a.value, best) ? a.index : kNone;
      const Index of_b = is_best(b.value, best) ? b.index : kNone;
      return {best, of_a < of_b ? of_a : of_b};
    }
  };

  // Loses against every element, even one of the same value.
  __device__ static Partial identity() {
    constexpr Function kExtreme = kFunction == Function::kArgMax ? Function::kMax : Function::kMin;
    return {ValueReducer<kExtreme, A, A>::identity(), std::numeric_limits<Index>::max()};
  }

  static constexpr bool kKeys = kComparesKeys<kFunction, A>;
  using Reader = reduce::Reader<T, A, kKeys>;
  static constexpr int kChunk = 1;  // elements that Fold should get at a time, at least

  __device__ static void store(const Target& target, std::int64_t index, Partial value) {
    if (target.partials) {  // the next launch reads 64-bit indices
      if constexpr (kKeys) value.value ^= target.order.template flipped<A>();
      static_cast<Indexed<A>*>(target.data)[index] = {value.value, value.index};
    } else {
      store_result(target, index, std::int64_t{value.index});
    }
  }

  class Fold {
   public:
    // Elements of kCount columns: first, first + step, ..., all after those of earlier calls.
    // Without branches: nearly every call finds a new best element in some thread of a warp.
    template <int kCount>
    __device__ void add(const Accumulator<T> (&value)[kCount], std::int64_t first,
                        std::int64_t step) {
      if constexpr (std::is_same_v<T, Partial>) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) best_ = Combine{}(best_, value[i]);
      } else {
        add_kept(value, ~0u, first, step);
      }
    }

    // The same, but ignores elements whose bit in `kept` is clear.
    template <int kCount>
    __device__ void add_kept(const Accumulator<T> (&value)[kCount], unsigned kept,
                             std::int64_t first, std::int64_t step) {
      const auto keeps = [&](int i) { return (kept >> i & 1) != 0; };
      A terms[kCount];
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        terms[i] = keeps(i) ? static_cast<A>(value[i]) : identity().value;
      }
      const Placed found = first_best<0, kCount>(terms);
      const A best = Best{}(best_.value, found.value);
      const bool is_better = !is_best(best_.value, best) || best_.index == identity().index;
      if (is_better && kept != 0) {
        // An ignored element is found only if all kept ones have the identity's value.
        const int position = keeps(found.position) ? found.position : __ffs(kept) - 1;
        best_ = {best, static_cast<Index>(first + position * step)};
      }
    }

    __device__ Partial value() const { return best_; }

   private:
    using Best = typename Combine::Best;

    // An element and its position in a call.
    struct Placed {
      A value;
      int position;
    };

    // The best of kCount elements from position kFirst on; of equal ones, the first.
    template <int kFirst, int kCount, int kAll>
    __device__ static Placed first_best(const A (&value)[kAll]) {
      if constexpr (kCount == 1) {
        return {value[kFirst], kFirst};
      } else {
        const Placed a = first_best<kFirst, kCount / 2>(value);
        const Placed b = first_best<kFirst + kCount / 2, kCount / 2>(value);
        const A best = Best{}(a.value, b.value);
        return {best, is_best(a.value, best) ? a.position : b.position};
      }
    }

    Partial best_ = identity();
  };
};

// mean_and_var of elements of T, computed in A, or of the Moments<A> of an earlier launch.
template <class T, class A>
struct MomentsReducer {
  using Element = T;
  using Partial = Moments<A>;
  using Combine = MergeMoments;
  using Reader = reduce::Reader<T, A, false>;
  using Fold = std::conditional_t<std::is_same_v<T, Partial>, PartialMoments<A>, ElementMoments<A>>;
  static constexpr int kChunk = 16;

  __device__ static Partial identity() { return {}; }

  __device__ static void store(const Target& target, std::int64_t index, Partial value) {
    if (target.partials) {
      static_cast<Partial*>(target.data)[index] = value;
      return;
    }
    const A nan = std::numeric_limits<A>::quiet_NaN();
    const A divisor = value.count - static_cast<A>(target.correction);
    const auto store_in = [&](void* data, A result) {
      Target other = target;
      other.data = data;
      store_result(other, index, result);
    };
    store_result(target, index, value.count > 0 ? value.mean : nan);
    store_in(target.variance, divisor > 0 ? value.squares / divisor : nan);
    if (target.low != nullptr) store_in(target.low, value.low);
  }
};

// How many of `loaded` packs of a thread a reducer folds at a time.
template <class Reducer>
constexpr int packs_folded(int loaded, int pack) {
  const int packs = Reducer::kChunk > pack ? Reducer::kChunk / pack : 1;
  return packs < loaded ? packs : loaded;
}

template <Function kFunction, class T, class A, class Index = std::int64_t>
using Reducer =
    std::conditional_t<kFunction == Function::kMeanAndVar, MomentsReducer<T, A>,
                       std::conditional_t<is_arg(kFunction), ArgReducer<kFunction, T, A, Index>,
                                          ValueReducer<kFunction, T, A>>>;

// Partials in shared memory, kPer of each thread. There is a gap after those of a thread: else the
// threads of a warp would store their first partials, and then each of the others, in the same few
// banks. Partials of 4 bytes have no gaps: that was slower.
template <class Partial, int kPer>
class SpacedPartials {
 public:
  __device__ explicit SpacedPartials(Partial* memory) : memory_(memory) {}
  __device__ Partial& operator[](int i) const {
    return memory_[spaced_partials(i, kPer, sizeof(Partial))];
  }

 private:
  Partial* memory_;
};

// Combines up to kMost of the partials first, first + apart, ... before `end` in shared memory, in
// the same order each time. Several are loaded at once: as many as there are registers for, besides
// those that the kernels' loops need.
inline constexpr int kMostApart = 8;

template <class Reducer, int kMost = kMostApart, class Partials>
__device__ inline typename Reducer::Partial combine_apart(const Partials& partials, int first,
                                                          int end, int apart) {
  using Partial = typename Reducer::Partial;
  using Combine = typename Reducer::Combine;
  constexpr int kAtOnce = sizeof(Partial) > 16 ? 1 : 32 / static_cast<int>(sizeof(Partial));
  static_assert(kMost % kAtOnce == 0);
  const auto next = [&](int i) {
    Partial terms[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int at = first + (i + j) * apart;
      terms[j] = at < end ? partials[at] : Reducer::identity();
    }
    return tree<Combine>(terms);
  };
  Partial all = next(0);
#pragma unroll 1
  for (int i = kAtOnce; i < kMost && first + i * apart < end; i += kAtOnce) {
    all = Combine{}(all, next(i));
  }
  return all;
}

// The block's threads combine `count` partials of each of `rows` rows in shared memory: row r has
// partials[r], partials[r + rows], ..., and its result is in partials[r]. Each level leaves kMost
// times fewer partials. It begins and ends with a barrier of the block.
template <class Reducer, int kMost = kMostApart, class Partials>
__device__ inline void combine_rows(const Partials& partials, int rows, int count) {
  __syncthreads();
  while (count > 1) {
    const int left = (count + kMost - 1) / kMost;
#pragma unroll 1
    for (int slot = threadIdx.x; slot < left * rows; slot += blockDim.x) {
      partials[slot] = combine_apart<Reducer, kMost>(partials, slot, count * rows, left * rows);
    }
    __syncthreads();
    count = left;
  }
}

// The shared memory of block_reduce().
template <class Reducer>
struct BlockStorage {
  typename Reducer::Partial warps[kMaxWarpsPerBlock];
};

}  // namespace reduce
}  // namespace JAX_GPUOPS_NAMESPACE
