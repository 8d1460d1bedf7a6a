// softmax, algorithm `column`: an axis that is not the last, read where it lies.
//
// The rows' elements are `inner` apart, and neighbours in memory belong to neighbouring rows. So
// `lanes` threads stand side by side, each on kPack rows, and walk along the axis together; the
// threads of a block that stand on the same rows (a column of groups) take every groups-th step:
//
//                  inner ->
//     axis   group 0   | lane 0 | lane 1 | ... |      <- element 0 of lanes * kPack rows
//      |     group 1   | lane 0 | lane 1 | ... |      <- element 1
//      v     group 0   | lane 0 | lane 1 | ... |      <- element 2 ...
//
// A thread holds up to kHeld steps in registers; a longer axis is read twice. States are combined
// by shuffles between the groups of a warp, then through shared memory between warps. An axis of
// 8192 divided among up to 16 blocks of a cluster, to be read once, was slower by 4 to 30 %.
#pragma once

#include "core/shared.h"
#include "softmax/share.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {

inline constexpr int kColumnThreads = 512;

// Which elements of the axis a thread has: at(0), at(1) ... as long as there are some left.
struct Span {
  std::int64_t first;
  std::int64_t end;
  int stride;

  __device__ __forceinline__ std::int64_t at(int k) const {
    return first + std::int64_t{k} * stride;
  }
  __device__ __forceinline__ bool has(int k) const { return at(k) < end; }
};

// Where a call's elements lie for a thread: step j of its rows begins at x[begin + j * inner].
template <class T>
struct Steps {
  std::int64_t begin;
  std::int64_t row;  // the first of its kPack rows
  bool exists;
};

// What a thread holds of its kPack rows: steps first, first + stride ... below end. Elements that
// do not take part are replaced as in row.cuh. With a mask kPack is 1, for each row has its own.
template <class T, bool kTangent, int kPack, int kHeld>
class ColumnShare {
 public:
  using A = Accumulator<T>;
  using State = std::conditional_t<kTangent, Total<T>, MaxSum<T>>;

  __device__ __forceinline__ void load(const Tensors<T>& tensors, const Steps<T>& steps,
                                       const Selection<T>& selection, const Span& span) {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      leave_out(tensors, k);
      bool kept = steps.exists && span.has(k);
      if constexpr (kPack == 1) kept = kept && selection(span.at(k));
      if (!kept) continue;
      const std::int64_t at = steps.begin + span.at(k) * tensors.rows.inner;
      x_[k] = read_pack<kPack>(tensors.x + at);
      if constexpr (kTangent) t_[k] = read_pack<kPack>(tensors.t + at);
    }
  }

  __device__ __forceinline__ void reduce(const Tensors<T>& tensors, const Exponents<T>& exponents,
                                         State (&states)[kPack]) const {
    if constexpr (kTangent) {
      const bool logarithm = tensors.function == Function::kLogSoftmaxCotangent;
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        A sum = 0;
#pragma unroll
        for (int k = 0; k < kHeld; ++k) sum += (logarithm ? A(1) : x(k, i)) * t(k, i);
        states[i] = {sum};
      }
    } else {
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        A largest = -infinity<A>();
#pragma unroll
        for (int k = 0; k < kHeld; ++k) largest = fmax(largest, A(x(k, i) * exponents.factor));
        const A anchor = exponents.anchor(largest);
        const A subtrahend = exponents.subtrahend(anchor);
        A sum = 0;
#pragma unroll
        for (int k = 0; k < kHeld; ++k) sum += exponents.power(x(k, i), subtrahend);
        states[i] = {anchor, sum};
      }
    }
  }

  __device__ __forceinline__ void write(const Tensors<T>& tensors, const Exponents<T>& exponents,
                                        const Steps<T>& steps, const Selection<T>& selection,
                                        const Span& span, const State (&totals)[kPack]) const {
    if constexpr (kTangent) {
      const bool regular = kPack > 1 || is_finite(totals[0].sum);
      if (tensors.function == Function::kSoftmaxTangent) {
        write_each(tensors, steps, selection, span, regular, A(0), [&](int k, int i) {
          return TangentResult<T>{tensors.scale, totals[i].sum}.softmax(x(k, i), t(k, i));
        });
      } else {
        write_each(tensors, steps, selection, span, regular, A(0), [&](int k, int i) {
          return TangentResult<T>{tensors.scale, totals[i].sum}.log_softmax(x(k, i), t(k, i));
        });
      }
    } else {
      const bool regular = kPack > 1 || (is_finite(totals[0].anchor) && is_finite(totals[0].sum));
      if (tensors.function == Function::kSoftmax) {
        write_results<FreshPowers<T>>(tensors, exponents, steps, selection, span, regular, A(0),
                                      totals);
      } else {
        write_results<Logarithms<T>>(tensors, exponents, steps, selection, span, regular,
                                     -infinity<A>(), totals);
      }
    }
  }

 private:
  // What changes no maximum and no sum.
  __device__ __forceinline__ void leave_out(const Tensors<T>& tensors, int k) {
    const bool logarithm = tensors.function == Function::kLogSoftmaxCotangent;
    const A lowest = tensors.scale < 0 ? infinity<A>() : -infinity<A>();
    const A fill = !kTangent ? lowest : logarithm ? -infinity<A>() : A(0);
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      x_[k].element[i] = narrow<T>(fill);
      if constexpr (kTangent) t_[k].element[i] = narrow<T>(A(0));
    }
  }

  __device__ __forceinline__ A x(int k, int i) const { return widen(x_[k].element[i]); }
  __device__ __forceinline__ A t(int k, int i) const { return widen(t_[k].element[i]); }

  template <class Result>
  __device__ __forceinline__ void write_results(const Tensors<T>& tensors,
                                                const Exponents<T>& exponents,
                                                const Steps<T>& steps,
                                                const Selection<T>& selection, const Span& span,
                                                bool regular, A left_out,
                                                const State (&totals)[kPack]) const {
    const auto result_of = [&](int i) { return Result(exponents, totals[i]); };
    if constexpr (kPack == 1) {
      const Result results[] = {result_of(0)};
      write_each(tensors, steps, selection, span, regular, left_out,
                 [&](int k, int i) { return results[i](x(k, i)); });
    } else if constexpr (kPack == 2) {
      const Result results[] = {result_of(0), result_of(1)};
      write_each(tensors, steps, selection, span, regular, left_out,
                 [&](int k, int i) { return results[i](x(k, i)); });
    } else {
      const Result results[] = {result_of(0), result_of(1), result_of(2), result_of(3)};
      write_each(tensors, steps, selection, span, regular, left_out,
                 [&](int k, int i) { return results[i](x(k, i)); });
    }
  }

  template <class Result>
  __device__ __forceinline__ void write_each(const Tensors<T>& tensors, const Steps<T>& steps,
                                             const Selection<T>& selection, const Span& span,
                                             bool regular, A left_out, Result&& result) const {
    if (!steps.exists) return;
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      if (!span.has(k)) continue;
      Pack<T, kPack> pack;
#pragma unroll
      for (int i = 0; i < kPack; ++i) pack.element[i] = narrow<T>(result(k, i));
      if constexpr (kPack == 1) {
        if (!regular && !selection(span.at(k))) pack.element[0] = narrow<T>(left_out);
      }
      write_pack(pack, tensors.y + steps.begin + span.at(k) * tensors.rows.inner);
    }
  }

  Pack<T, kPack> x_[kHeld];
  Pack<T, kPack> t_[kTangent ? kHeld : 1];
};

// Slots have one state for each row of the block.
template <class State>
struct ColumnStorage {
  State* slots;   // [warps of the block, or groups if these are larger][rows]
  State* totals;  // [rows]

  __device__ ColumnStorage(int groups, int rows)
      : slots(shared_array<State>()), totals(slots + groups * rows) {}

  static std::size_t bytes(int groups, int rows) {
    return sizeof(State) * static_cast<std::size_t>(groups + 1) * rows;
  }
};

template <class T, class State>
__device__ inline State combine_column(const Exponents<T>& exponents, const State* slots, int count,
                                       int rows) {
  State state = slots[0];
  for (int slot = 1; slot < count; ++slot) state = combined(exponents, state, slots[slot * rows]);
  return state;
}

template <class T, bool kTangent, int kPack, int kHeld>
__global__ void __launch_bounds__(kColumnThreads)
    column_kernel(const __grid_constant__ Tensors<T> tensors, int lanes) {
  using Share = ColumnShare<T, kTangent, kPack, kHeld>;
  using State = typename Share::State;
  const Exponents<T> exponents(tensors.function, tensors.scale);
  const std::int64_t inner = tensors.rows.inner;
  const std::int64_t columns = tensors.rows.columns;
  const int threads = blockDim.x;
  const int lane = threadIdx.x % lanes;
  const int group = threadIdx.x / lanes;
  const int groups = threads / lanes;
  const int rows = lanes * kPack;
  const int slot_groups = lanes < kWarpSize ? threads / kWarpSize : groups;
  const ColumnStorage<State> storage(slot_groups, rows);
  const std::int64_t tiles_of_outer = (inner + rows - 1) / rows;
  const std::int64_t tiles = tensors.rows.count / inner * tiles_of_outer;

  const std::int64_t stretch = std::int64_t{groups} * kHeld;
  const auto span_from = [&](std::int64_t from) { return Span{from + group, columns, groups}; };

  for (std::int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const std::int64_t outer = tile / tiles_of_outer;
    const std::int64_t at = tile % tiles_of_outer * rows + lane * kPack;
    const Steps<T> steps{outer * columns * inner + at, outer * inner + at, at < inner};
    Selection<T> selection;
    if (kPack == 1 && steps.exists) selection = Selection<T>(tensors, steps.row);

    // Reduce. The last stretch stays in registers.
    State states[kPack];
    std::int64_t rest = 0;
    Share share;
    if (columns <= stretch) {
      share.load(tensors, steps, selection, span_from(0));
      share.reduce(tensors, exponents, states);
    } else {
      Running<State> running[kPack];
      for (; rest < columns; rest += stretch) {
        share.load(tensors, steps, selection, span_from(rest));
        share.reduce(tensors, exponents, states);
#pragma unroll
        for (int i = 0; i < kPack; ++i) running[i].add(exponents, states[i]);
      }
      rest -= stretch;
#pragma unroll
      for (int i = 0; i < kPack; ++i) states[i] = running[i].value();
    }

    // Combine: the groups of a warp, the warps of the block.
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      for (int distance = lanes; distance < kWarpSize; distance *= 2) {
        states[i] = combined(exponents, states[i], shuffle_xor(states[i], distance));
      }
    }
    if (slot_groups > 1) {
      const int slot = lanes < kWarpSize ? threadIdx.x / kWarpSize : group;
      if (lanes >= kWarpSize || static_cast<int>(threadIdx.x) % kWarpSize < lanes) {
#pragma unroll
        for (int i = 0; i < kPack; ++i) storage.slots[slot * rows + lane * kPack + i] = states[i];
      }
      __syncthreads();
      for (int r = threadIdx.x; r < rows; r += threads) {
        storage.totals[r] = combine_column(exponents, storage.slots + r, slot_groups, rows);
      }
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kPack; ++i) states[i] = storage.totals[lane * kPack + i];
    }

    // Write.
    if (tensors.y != nullptr) {
      share.write(tensors, exponents, steps, selection, span_from(rest), states);
      for (std::int64_t again = 0; again < rest; again += stretch) {
        share.load(tensors, steps, selection, span_from(again));
        share.write(tensors, exponents, steps, selection, span_from(again), states);
      }
    }
    if (group == 0 && steps.exists) {
#pragma unroll
      for (int i = 0; i < kPack; ++i) write_row(tensors, steps.row + i, states[i]);
    }
  }
}

}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
