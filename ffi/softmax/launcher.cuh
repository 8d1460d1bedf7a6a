// What the launchers at the ends of the kernel files have in common.
//
// A launcher is a function of a `Call`. It turns the decisions of the plan into template arguments
// and launches the kernel; it decides nothing. The sources (*.cu) compile the launchers of some
// algorithms for an element type, and list them in a `RegisterLaunchers`.
#pragma once

#include <cstddef>
#include <initializer_list>

#include "core/dispatch.h"
#include "core/launch.h"
#include "softmax/instances.h"
#include "softmax/row.cuh"
#include "softmax/softmax.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {

// Calls f with the plan's variant as a constant: kGeneral, or for forward functions also kOther.
template <class Functions, Variant kOther, class F>
void dispatch_variant(const Call& call, F&& f) {
  if constexpr (Functions::kIsLinearInT) {
    dispatch_value<Variant::kGeneral>(call.config.variant, f);
  } else {
    dispatch_value<Variant::kGeneral, kOther>(call.config.variant, f);
  }
}

// Calls f with the plan's layout as a constant, for kernels of rows that are read as packs.
template <class F>
void dispatch_packed_layout(const Call& call, F&& f) {
  dispatch_value<RowLayout::kAligned, RowLayout::kMasked, RowLayout::kUnaligned,
                 RowLayout::kMaskedUnaligned>(call.config.layout, f);
}

// The kOther of kernels that keep rows in shared memory.
template <class T, RowLayout kLayout>
inline constexpr Variant kVariantInShared =
    has_plain_in_shared(kDTypeOf<T>, kLayout) ? Variant::kPlainSoftmax : Variant::kGeneral;

// `storage_bytes`: of the kernel's own structures in shared memory.
inline LaunchShape launch_shape(const Call& call, std::size_t storage_bytes = 0) {
  const Config& config = call.config;
  return {dim3(grid_extent(config.blocks), grid_extent_beyond_x(config.blocks_along_y)),
          static_cast<unsigned>(config.threads),
          storage_bytes + static_cast<std::size_t>(config.shared_bytes), config.cluster};
}

inline Rows rows_of(const Problem& problem) {
  return {problem.rows(), problem.columns, problem.inner};
}

template <class T>
KernelArgs<T> kernel_args(const Call& call) {
  using A = Accumulator<T>;
  const Problem& problem = call.problem;
  const Buffers& buffers = call.buffers;
  KernelArgs<T> args{};
  args.x = static_cast<const T*>(buffers.x);
  args.t = static_cast<const T*>(buffers.t);
  args.maximum = static_cast<const A*>(buffers.maximum);
  args.log_sum = static_cast<const A*>(buffers.log_sum);
  args.g = static_cast<const A*>(buffers.g);
  args.labels = buffers.labels;
  args.wide_labels = buffers.wide_labels;
  args.y = static_cast<T*>(buffers.y);
  args.row_results = make_row_results<T>(buffers.logsumexps);
  args.loss = static_cast<A*>(buffers.loss);
  args.function = problem.function;
  args.scale = static_cast<A>(call.scale);
  args.rows = rows_of(problem);
  args.set_masks(buffers.mask, problem.queries);
  args.size = problem.rows() * problem.columns;
  args.packed = problem.alignment >= 16;
  return args;
}

}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
