// softmax, algorithm `column`: an axis that is not the last, without a transpose.
//
// The elements of a row have stride `inner`, and neighbouring elements belong to neighbouring rows.
// So a group of `lanes` threads covers neighbouring rows, kPack per thread, and moves along the
// axis; each of the groups of a block takes every groups-th step of the same rows:
//
//                  inner ->
//     axis   group 0   | lane 0 | lane 1 | ... |      <- element 0 of lanes * kPack rows
//      |     group 1   | lane 0 | lane 1 | ... |      <- element 1
//      v     group 0   | lane 0 | lane 1 | ... |      <- element 2 ...
//
// A thread holds up to kHeld steps in registers, so that a block reads a short axis once. Longer
// axes are for strip.cuh, or are read twice if that cannot take them. States are combined by
// shuffles between the groups of a warp, then through shared memory.
//
// `column_split` divides an axis that is read twice into parts, one for each block, and takes two
// launches:
//
//     launch 1: block (rows, part) reduces its part         -> workspace[part][rows]
//     launch 2: block (rows, part) combines workspace[*][rows], reads its part again, writes it
#pragma once

#include "core/shared.h"
#include "softmax/fragment.cuh"
#include "softmax/launcher.cuh"
#include "softmax/redo.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {

// The elements of its rows that a thread processes at a time: `count` steps along the axis,
// `stride` steps apart. Step k of its first row is element `first` + k * stride, which lies at
// x[begin + k * hop].
struct Steps {
  std::int64_t begin;
  std::int64_t hop;
  std::int64_t first;
  int stride;
  int count;
};

// The elements of a thread's rows in one step, which lie side by side.
struct RowsSideBySide {
  using Steps = softmax::Steps;

  template <int kPack, class T>
  __device__ __forceinline__ static RegisterPack<T, kPack> read(const T* x, const Steps&, int) {
    return read_pack<kPack>(x);
  }
  template <int kPack, class T>
  __device__ __forceinline__ static void write(const RegisterPack<T, kPack>& pack, T* to,
                                               const Steps&, int) {
    write_global_pack(pack, to);
  }
};

// The elements of kPack rows that a thread holds, along an axis that is not the last. With a mask
// kPack is 1, since each row has its own mask. kSelects: whether there may be a mask.
template <class T, class Functions, int kPack, int kHeld, bool kSelects = kPack == 1,
          class Rows = RowsSideBySide>
class ColumnFragment {
 public:
  using Steps = typename Rows::Steps;
  using A = Accumulator<T>;
  static constexpr bool kTangent = Functions::kIsLinearInT;
  using State = typename Functions::template State<T>;
  // Whether redo_row() computes rows with anchors beyond +-kLarge, including infinite ones. Then
  // all rows of a thread use one factor for their powers, in one register.
  static constexpr bool kRedoes = !kTangent && kPack > 1 && Exponents<T>::kBaseTwo;

  __device__ __forceinline__ void load(const KernelArgs<T>& args, const Steps& steps,
                                       const RowMask<T>& row_mask) {
    load(args, args.x, args.t, steps, row_mask);
  }

  // The same from copies of parts of x and t, into which `steps` points.
  __device__ __forceinline__ void load(const KernelArgs<T>& args, const T* x, const T* t,
                                       const Steps& steps, const RowMask<T>& row_mask) {
    const A fill = Functions::fill(args);
    const auto each_step = [&](auto&& read) {
      x += steps.begin;
      if constexpr (kTangent) t += steps.begin;
#pragma unroll
      for (int k = 0; k < kHeld; ++k) {
        read(k);
        x += steps.hop;
        if constexpr (kTangent) t += steps.hop;
      }
    };
    const auto read = [&](int k) {
      x_[k] = Rows::template read<kPack>(x, steps, k);
      if constexpr (kTangent) t_[k] = Rows::template read<kPack>(t, steps, k);
    };
    if (is_full(steps)) return each_step(read);
    each_step([&](int k) {
      x_[k] = filled<kPack>(narrow<T>(fill));
      if constexpr (kTangent) t_[k] = filled<kPack>(narrow<T>(A(0)));
      if (keeps(steps, row_mask, k)) read(k);
    });
  }

  __device__ __forceinline__ void reduce(const KernelArgs<T>& args, const Exponents<T>& exponents,
                                         State (&states)[kPack]) const {
#pragma unroll
    for (State& state : states) state = State::none();
    reduce_onto<States::kNone>(args, exponents, states);
  }

  // Adds to the states of earlier elements.
  __device__ __forceinline__ void add(const KernelArgs<T>& args, const Exponents<T>& exponents,
                                      State (&states)[kPack]) const {
    reduce_onto<States::kGiven>(args, exponents, states);
  }

  __device__ __forceinline__ void write(const KernelArgs<T>& args, const Exponents<T>& exponents,
                                        const Steps& steps, const RowMask<T>& row_mask,
                                        const State (&totals)[kPack]) const {
    write(args, args.y, exponents, steps, row_mask, totals);
  }

  // The same to a copy of a part of y.
  __device__ __forceinline__ void write(const KernelArgs<T>& args, T* y,
                                        const Exponents<T>& exponents, const Steps& steps,
                                        const RowMask<T>& row_mask,
                                        const State (&totals)[kPack]) const {
    const bool regular = !kSelects || is_regular(totals[0]);
    if constexpr (kTangent) {
      Functions::template dispatch<T>(args.function, [&](auto type) {
        using Result = typename decltype(type)::Result;
        write_each(args, y, steps, row_mask, regular, Result::left_out(),
                   [&](int i, A x, A t) { return Result{args.scale, totals[i].sum}(x, t); });
      });
    } else {
      Functions::template dispatch<T, Exponential::kShort>(exponents.function, [&](auto type) {
        using Result = typename decltype(type)::Result;
        Result results[kPack];
#pragma unroll
        for (int i = 0; i < kPack; ++i) {
          results[i] =
              Result(totals[i], exponents.template powers_of_row<kAnchors>(totals[i].anchor));
        }
        write_each(args, y, steps, row_mask, regular, Result::left_out(),
                   [&](int i, A x, A) { return results[i](x); });
      });
    }
  }

  // If kRedoes: whether a row must be recomputed.
  __device__ __forceinline__ static bool is_large(const State& total) {
    return fabs(total.anchor) >= Exponents<T>::kLarge;
  }
  // Whether any of the rows must be recomputed; redo() recomputes all of them.
  __device__ __forceinline__ static bool any_large(const State (&totals)[kPack]) {
    bool any = false;
#pragma unroll
    for (const State& total : totals) any = any || is_large(total);
    return any;
  }
  __device__ __forceinline__ static void redo(const KernelArgs<T>& args, std::int64_t first_row) {
#pragma unroll 1
    for (int i = 0; i < kPack; ++i) redo_row(args, first_row + i, true, 0, 1);
  }

 private:
  static constexpr Anchors kAnchors = kRedoes ? Anchors::kNotLarge : Anchors::kAny;

  // What reduce_onto() adds to: empty states, or those of earlier elements.
  enum class States { kNone, kGiven };
  template <States kStates>
  __device__ __forceinline__ void reduce_onto(const KernelArgs<T>& args,
                                              const Exponents<T>& exponents,
                                              State (&states)[kPack]) const {
    if constexpr (kTangent) {
#pragma unroll
      for (int k = 0; k < kHeld; ++k) {
        A y[kPack];
        A t[kPack];
        widen(x_[k], y);
        widen(t_[k], t);
#pragma unroll
        for (int i = 0; i < kPack; ++i) {
          states[i].sum += Functions::term(args.function, y[i], t[i]);
        }
      }
    } else {
      A largest[kPack];
      widen(exponents.descends() ? extreme_of_each<Extreme::kSmallest>()
                                 : extreme_of_each<Extreme::kLargest>(),
            largest);
      typename Exponents<T>::Powers powers[kPack];
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        A anchor = exponents.anchor(exponents.scaled(largest[i]));
        // The sum of a part that is far below this anchor, or all -inf, is 0.
        if constexpr (kRedoes) anchor = fmax(anchor, -Exponents<T>::kLarge);
        if constexpr (kStates == States::kGiven) anchor = fmax(anchor, states[i].anchor);
        const A base = kRedoes ? anchor : exponents.base(anchor);
        if constexpr (kStates == States::kGiven) {
          states[i].sum *= Exponents<T>::rescaling(states[i].anchor, base);
        }
        states[i].anchor = anchor;
        powers[i] = exponents.template powers<kAnchors>(base, exponents.lift());
      }
#pragma unroll
      for (int k = 0; k < kHeld; ++k) {
        A x[kPack];
        widen(x_[k], x);
#pragma unroll
        for (int i = 0; i < kPack; ++i) {
          states[i].sum += powers[i].template of<Exponential::kShort>(x[i]);
        }
      }
    }
  }

  // Whether all steps exist and there is no mask: one branch for all takes fewer instructions than
  // one for each.
  __device__ __forceinline__ static bool is_full(const Steps& steps) {
    return !kSelects && steps.count == kHeld;
  }

  __device__ __forceinline__ static bool keeps(const Steps& steps, const RowMask<T>& row_mask,
                                               int k) {
    if (k >= steps.count) return false;
    return !kSelects || row_mask(steps.first + std::int64_t{k} * steps.stride);
  }

  template <Extreme kExtreme>
  __device__ __forceinline__ RegisterPack<T, kPack> extreme_of_each() const {
    RegisterPack<T, kPack> best = x_[0];
#pragma unroll
    for (int k = 1; k < kHeld; ++k) best = extreme<kExtreme == Extreme::kSmallest>(best, x_[k]);
    return best;
  }

  template <class Result>
  __device__ __forceinline__ void write_each(const KernelArgs<T>& args, T* y, const Steps& steps,
                                             const RowMask<T>& row_mask, bool regular, A left_out,
                                             Result&& result) const {
    // nothing() is 0, but hides from the compiler that these are the addresses of load(), all of
    // which it would keep in registers in between.
    T* to = y + steps.begin + args.nothing();
    const std::int64_t hop = steps.hop + args.nothing();
    const auto results = [&](int k) {
      A x[kPack];
      A t[kPack] = {};
      widen_again(x_[k], args.nothing(), x);
      if constexpr (kTangent) widen_again(t_[k], args.nothing(), t);
#pragma unroll
      for (int i = 0; i < kPack; ++i) x[i] = result(i, x[i], t[i]);
      if (!regular && !keeps(steps, row_mask, k)) x[0] = left_out;
      return narrow<T>(x);
    };
    if (is_full(steps)) {
#pragma unroll
      for (int k = 0; k < kHeld; ++k, to += hop) Rows::write(results(k), to, steps, k);
      return;
    }
#pragma unroll
    for (int k = 0; k < kHeld; ++k, to += hop) {
      if (k < steps.count) Rows::write(results(k), to, steps, k);
    }
  }

  RegisterPack<T, kPack> x_[kHeld];
  RegisterPack<T, kPack> t_[kTangent ? kHeld : 1];
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

// How often a block reads its elements.
enum class Reads { kOnce, kTwice };

// Which of the two readings a launch does.
enum class Launch { kBoth, kReduces, kFinishes };

// The parts of an axis that is read twice.
template <class State>
struct AxisParts {
  unsigned count = 1;  // for each tile of rows
  Launch launch = Launch::kBoth;
  State* states = nullptr;  // [part][row], for two launches
};

// Blocks take tiles of `lanes` packs of rows, and parts of the axis, along the grid's x, for each
// `outer` index along y. `most` is the number of steps of the first group in a part: at most kHeld
// if threads hold the axis and read it once.
template <class T, class Functions, int kPack, int kHeld, Reads kReads>
__global__ void __launch_bounds__(kColumnThreads,
                                  kPack > 1 && kReads == Reads::kOnce ? kColumnBlocksResident : 1)
    column_kernel(const __grid_constant__ KernelArgs<T> args, int lanes, std::int64_t outers,
                  std::int64_t most,
                  const __grid_constant__ AxisParts<typename Functions::template State<T>> parts) {
  using Fragment = ColumnFragment<T, Functions, kPack, kHeld>;
  using State = typename Fragment::State;
  constexpr bool kOnce = kReads == Reads::kOnce;
  const Exponents<T> exponents(args.function, args.scale);
  const std::int64_t inner = args.rows.inner;
  const std::int64_t columns = args.rows.columns;
  const int threads = blockDim.x;
  const int lane = threadIdx.x % lanes;
  const int group = threadIdx.x / lanes;
  const int groups = threads / lanes;
  const int rows = lanes * kPack;
  const int slot_groups = lanes < kWarpSize ? threads / kWarpSize : groups;
  const ColumnStorage<State> storage(slot_groups, rows);
  const Launch launch = kOnce ? Launch::kBoth : parts.launch;
  const unsigned tile = kOnce ? blockIdx.x : blockIdx.x / parts.count;
  const unsigned part = kOnce ? 0 : blockIdx.x % parts.count;
  if (launch == Launch::kFinishes && args.y == nullptr && part > 0) return;
  // The thread's steps: number k is element own_first + k * groups of the axis.
  const std::int64_t own_first = part * most * groups + group;
  const std::int64_t own = kOnce ? (group + (most - 1) * groups < columns ? most : most - 1)
                                 : (columns - own_first + groups - 1) / groups;

  const auto take = [&](std::int64_t outer, std::int64_t first_row) {
    const std::int64_t at = first_row + lane * kPack;
    const std::int64_t number = outer * inner + at;  // of the thread's first row
    const bool exists = at < inner;
    RowMask<T> row_mask;
    if (kPack == 1 && exists) row_mask = RowMask<T>(args, number);
    const auto steps_from = [&](std::int64_t done) {
      const std::int64_t first = own_first + done * groups;
      const std::int64_t left = (kOnce || own < most ? own : most) - done;
      return Steps{(outer * columns + first) * inner + at, groups * inner, first, groups,
                   exists ? static_cast<int>(left < kHeld ? left : kHeld) : 0};
    };

    // Reduce. The last steps stay in registers.
    State states[kPack];
    const std::int64_t last = kOnce ? 0 : (most - 1) / kHeld * kHeld;
    Fragment fragment;
    if constexpr (kOnce) {
      fragment.load(args, steps_from(0), row_mask);
      fragment.reduce(args, exponents, states);
    } else {
      Running<State> running[kPack];
      if (launch != Launch::kFinishes) {
        for (std::int64_t done = 0; done <= last; done += kHeld) {
          fragment.load(args, steps_from(done), row_mask);
          fragment.reduce(args, exponents, states);
#pragma unroll
          for (int i = 0; i < kPack; ++i) running[i].add(exponents, states[i]);
        }
      } else {
        // These loads are in flight while the states are combined.
        fragment.load(args, steps_from(last), row_mask);
        constexpr int kAtOnce = 4;
        for (unsigned first = group; exists && first < parts.count; first += kAtOnce * groups) {
          State of_parts[kAtOnce][kPack];
#pragma unroll
          for (int k = 0; k < kAtOnce; ++k) {
            const unsigned other = first + k * groups;
            const State* const from = parts.states + other * args.rows.count + number;
#pragma unroll
            for (int i = 0; i < kPack; ++i) {
              of_parts[k][i] = other < parts.count ? from[i] : State::none();
            }
          }
#pragma unroll
          for (int k = 0; k < kAtOnce; ++k) {
#pragma unroll
            for (int i = 0; i < kPack; ++i) running[i].add(exponents, of_parts[k][i]);
          }
        }
      }
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
    const bool writes_rows = group == 0 && exists;
    if (launch == Launch::kReduces) {
      if (writes_rows) {
        State* const own_states = parts.states + part * args.rows.count + number;
#pragma unroll
        for (int i = 0; i < kPack; ++i) own_states[i] = states[i];
      }
      return;
    }

    if constexpr (Fragment::kRedoes) {
      if (Fragment::any_large(states)) {
        if (writes_rows && part == 0) Fragment::redo(args, number);
        return;
      }
    }

    // Write.
    if (args.y != nullptr) {
      for (std::int64_t done = last; done >= 0; done -= kHeld) {
        if (!kOnce && done != last) fragment.load(args, steps_from(done), row_mask);
        fragment.write(args, exponents, steps_from(done), row_mask, states);
        if constexpr (kOnce) break;
      }
    }
    if (args.reduces() && part == 0) {
      write_rows(args, number, outer * columns * inner + at, 1, states, group, groups,
                 [&](int) { return exists; });
    }
  };

  // Along x the grid covers all rows: no memory has 2^31 tiles of them. The loop along y keeps only
  // a 32-bit counter in registers, which are scarce.
  for (unsigned turn = 0;; ++turn) {
    const std::int64_t outer = blockIdx.y + std::int64_t{turn} * gridDim.y;
    if (outer >= outers) break;
    take(outer, std::int64_t{tile} * rows);
  }
}

template <class Functions, class T, Reads kReads, int kHeld>
void launch_column_of(const Call& call,
                      const AxisParts<typename Functions::template State<T>>& parts = {}) {
  dispatch_value<column_pack(sizeof(T)), 1>(call.config.pack, [&](auto pack) {
    constexpr int kOwn = kHeld / Functions::kOperands;
    launch_kernel<column_kernel<T, Functions, pack, kOwn, kReads>>(
        call.queue, launch_shape(call), kernel_args<T>(call), call.config.lanes, call.problem.outer,
        call.config.steps, parts);
  });
}

template <class Functions, class T>
void launch_column_once(const Call& call) {
  dispatch_value<kColumnHeld[0], kColumnHeld[1], kColumnHeld[2]>(call.config.packs, [&](auto held) {
    launch_column_of<Functions, T, Reads::kOnce, held>(call);
  });
}

template <class Functions, class T>
void launch_column_two_pass(const Call& call) {
  launch_column_of<Functions, T, Reads::kTwice, kColumnHeld[2]>(call);
}

template <class Functions, class T>
void launch_column_split(const Call& call) {
  using State = typename Functions::template State<T>;
  AxisParts<State> parts{static_cast<unsigned>(call.config.slices), Launch::kReduces,
                         static_cast<State*>(call.buffers.workspace)};
  launch_column_of<Functions, T, Reads::kTwice, kColumnHeld[2]>(call, parts);
  parts.launch = Launch::kFinishes;
  launch_column_of<Functions, T, Reads::kTwice, kColumnHeld[2]>(call, parts);
}

}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
