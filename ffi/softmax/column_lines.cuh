// softmax, algorithm `column`, for rows that cannot be read in packs, such as the 513 x 513 pixels
// of an image: the elements of a step begin at any address.
//
// Threads would read and write such elements one by one, and parts of memory sectors. So a block
// copies its tile to shared memory in packs of 16 bytes, a line for each element of the axis
// (core/phased_lines.cuh), computes it there, and writes it back in packs:
//
//                  rows of the tile ->
//     axis   | pad | 0 | 1 | 2 | ...           a line begins at its phase
//      |     | 0 | 1 | 2 | ...
//      v     | padding   | 0 | 1 | 2 | ...
//
// A thread has kPack rows, a warp's width apart, so that the lanes of a warp access neighbouring
// elements. It computes them in pieces of kLineSteps steps, and reads these again for the results:
// registers would not hold as many elements as memory must have in flight. If the axis is long, the
// threads of several groups share it, as in column.cuh.
#pragma once

#include "core/phased_lines.cuh"
#include "softmax/column.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {

// Steps along the lines of a tile: `begin` and `hop` are those of lines without phases.
struct LineSteps : Steps {
  int phase;      // of the line of step 0
  int phase_hop;  // from the line of a step to that of the next
};

// The elements of a thread's rows in one step, which lie a warp's width apart in a line.
struct RowsApart {
  using Steps = LineSteps;

  template <int kPack, class T>
  __device__ __forceinline__ static RegisterPack<T, kPack> read(const T* x, const Steps& steps,
                                                                int k) {
    Pack<T, kPack> pack;
#pragma unroll
    for (int i = 0; i < kPack; ++i) pack.element[i] = x[phase<T>(steps, k) + i * kWarpSize];
    return __builtin_bit_cast(RegisterPack<T, kPack>, pack);
  }
  template <int kPack, class T>
  __device__ __forceinline__ static void write(const RegisterPack<T, kPack>& pack, T* to,
                                               const Steps& steps, int k) {
    const auto elements = __builtin_bit_cast(Pack<T, kPack>, pack);
#pragma unroll
    for (int i = 0; i < kPack; ++i) to[phase<T>(steps, k) + i * kWarpSize] = elements.element[i];
  }

 private:
  template <class T>
  __device__ __forceinline__ static int phase(const Steps& steps, int k) {
    return (steps.phase + k * steps.phase_hop) & (kWidestPack<T> - 1);
  }
};

// Blocks take tiles of `lanes` times kPack rows, a multiple of a warp's width, along the grid's x,
// for each `outer` index along y. A group has up to `most` steps.
template <class T, class Functions>
__global__ void __launch_bounds__(kLineThreads, kLineBlocksResident)
    column_lines_kernel(const __grid_constant__ KernelArgs<T> args, int lanes, std::int64_t outers,
                        int most) {
  constexpr int kPack = line_rows(sizeof(T), Functions::kOperands);
  using Piece = ColumnFragment<T, Functions, kPack, kLineSteps, /*kSelects=*/false, RowsApart>;
  using State = typename Piece::State;
  const Exponents<T> exponents(args.function, args.scale);
  const std::int64_t inner = args.rows.inner;
  const int columns = static_cast<int>(args.rows.columns);
  const int lane = threadIdx.x % lanes;
  const int group = threadIdx.x / lanes;
  const int groups = blockDim.x / lanes;
  const int rows = lanes * kPack;
  const int pitch = phased_pitch<T>(rows);
  const ColumnStorage<State> storage(groups, rows);
  T* const x_lines = reinterpret_cast<T*>(storage.totals + rows);
  T* const t_lines = x_lines + columns * pitch;
  const std::int64_t first_row = std::int64_t{blockIdx.x} * rows;
  const std::int64_t rows_left = inner - first_row;
  // The thread's steps, and its first row in the tile.
  const int first = group * most;
  const int end = first + most < columns ? first + most : columns;
  const int at = lane / kWarpSize * kWarpSize * kPack + lane % kWarpSize;
  const auto exists = [&](int i) { return at + i * kWarpSize < rows_left; };

  for (std::int64_t outer = blockIdx.y; outer < outers; outer += gridDim.y) {
    // Copy.
    const std::int64_t begin = outer * columns * inner + first_row;
    const PhasedLines<T> lines(inner, columns,
                               rows_left < rows ? static_cast<int>(rows_left) : rows, rows);
    lines.copy(args.x + begin, args.x + args.size, x_lines);
    if constexpr (Piece::kTangent) lines.copy(args.t + begin, args.t + args.size, t_lines);
    end_copy_group();
    wait_for_copy_groups<0>();
    __syncthreads();

    // Reduce.
    const int phase = elements_past_alignment<kWidestPack<T>>(args.x + begin);
    const int phase_hop = static_cast<int>(inner % kWidestPack<T>);
    const auto steps_from = [&](int step) {
      LineSteps steps{};
      steps.begin = step * pitch + at;
      steps.hop = pitch;
      steps.count = end - step < kLineSteps ? end - step : kLineSteps;
      steps.phase = phase + step * phase_hop;
      steps.phase_hop = phase_hop;
      return steps;
    };
    State states[kPack];
#pragma unroll
    for (State& state : states) state = State::none();
#pragma unroll 1
    for (int step = first; step < end; step += kLineSteps) {
      Piece piece;
      piece.load(args, x_lines, t_lines, steps_from(step), RowMask<T>());
      piece.add(args, exponents, states);
    }

    // Combine the groups.
    if (groups > 1) {
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        storage.slots[group * rows + lane * kPack + i] = states[i];
      }
      __syncthreads();
      for (int r = threadIdx.x; r < rows; r += blockDim.x) {
        storage.totals[r] = combine_column(exponents, storage.slots + r, groups, rows);
      }
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kPack; ++i) states[i] = storage.totals[lane * kPack + i];
    }

    // Write.
    if (args.y != nullptr) {
#pragma unroll 1
      for (int step = first; step < end; step += kLineSteps) {
        Piece piece;
        piece.load(args, x_lines, t_lines, steps_from(step), RowMask<T>());
        piece.write(args, x_lines, exponents, steps_from(step), RowMask<T>(), states);
      }
      __syncthreads();
      lines.write(x_lines, args.y + begin);
    }
    const std::int64_t number = outer * inner + first_row + at;  // of the thread's first row
    if (args.reduces()) {
      write_rows(args, number, begin + at, kWarpSize, states, group, groups, exists);
    }

    // After the barrier, rows are computed again in place of what other threads have written, and
    // the lines are free.
    unsigned large = 0;  // a bit for each row
    if constexpr (Piece::kRedoes) {
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        large |= unsigned{exists(i) && Piece::is_large(states[i])} << i;
      }
    }
    if (!__syncthreads_or(static_cast<int>(large)) || group != 0) continue;
#pragma unroll 1
    for (int i = 0; i < kPack; ++i) {
      if ((large >> i & 1) != 0) redo_row(args, number + i * kWarpSize, true, 0, 1);
    }
  }
}

// Launches `column`: this kernel, or that of column.cuh.
template <class Functions, class T>
void launch_column(const Call& call) {
  if constexpr (column_pack(sizeof(T)) > 1) {
    if (call.config.lines) {
      return launch_kernel<column_lines_kernel<T, Functions>>(
          call.queue, launch_shape(call), kernel_args<T>(call), call.config.lanes,
          call.problem.outer, static_cast<int>(call.config.steps));
    }
  }
  launch_column_once<Functions, T>(call);
}

}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
