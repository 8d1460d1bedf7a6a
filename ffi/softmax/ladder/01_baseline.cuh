// Ladder, step 1: `baseline`.
//
// One block loops over the rows. It reads each row three times: for the maximum, for the sum of
// exponentials, and for the results; its threads combine their values by a tree reduction in shared
// memory, with a barrier at every level. All later steps are compared with this one.
#pragma once

#include "core/collectives.h"
#include "core/shared.h"
#include "softmax/launcher.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {

template <class A>
struct BaselineStorage {
  A tree[kBaselineThreads];
};

// Combines one value of each thread; every thread gets the result.
template <class A, class Combine>
__device__ A tree_reduce(A value, Combine combine, A* tree) {
  const int thread = threadIdx.x;
  tree[thread] = value;
  __syncthreads();
  for (int half = kBaselineThreads / 2; half > 0; half /= 2) {
    if (thread < half) tree[thread] = combine(tree[thread], tree[thread + half]);
    __syncthreads();
  }
  const A result = tree[0];
  __syncthreads();  // the next call writes where this one reads
  return result;
}

template <class T>
__global__ void __launch_bounds__(kBaselineThreads)
    baseline_kernel(const T* __restrict__ x, T* __restrict__ y, Rows rows) {
  using A = Accumulator<T>;
  auto& storage = shared<BaselineStorage<A>>();

  for (std::int64_t row = 0; row < rows.count; ++row) {
    const T* const source = x + rows.begin(row);
    T* const target = y + rows.begin(row);

    A largest = -infinity<A>();
    for (std::int64_t column = threadIdx.x; column < rows.columns; column += kBaselineThreads) {
      largest = fmax(largest, widen(source[column * rows.inner]));
    }
    largest = tree_reduce(largest, Largest{}, storage.tree);

    CompensatedSum<A> partial;
    for (std::int64_t column = threadIdx.x; column < rows.columns; column += kBaselineThreads) {
      partial.add(fast_exponential(widen(source[column * rows.inner]) - largest));
    }
    const A sum = tree_reduce(partial.value(), Add{}, storage.tree);

    for (std::int64_t column = threadIdx.x; column < rows.columns; column += kBaselineThreads) {
      const A power = fast_exponential(widen(source[column * rows.inner]) - largest);
      target[column * rows.inner] = narrow<T>(power / sum);
    }
  }
}

template <class T>
void launch_baseline(const Call& call) {
  const LaunchShape shape = launch_shape(call, sizeof(BaselineStorage<Accumulator<T>>));
  launch_kernel<baseline_kernel<T>>(call.queue, shape, static_cast<const T*>(call.buffers.x),
                                    static_cast<T*>(call.buffers.y), rows_of(call.problem));
}

}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
