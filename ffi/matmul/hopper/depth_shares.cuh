// Shared by the kernels that split the depth of a product: its shares, and stores of added sums.
#pragma once

#include "core/cuda.h"
#include "core/vector.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {

// Items divided into shares; the first `left_over` shares have one more.
struct Shares {
  int each;
  int left_over;

  // The first item of a share, which is the number of items of the shares before it.
  __device__ int first(int share) const { return share * each + min(share, left_over); }
  __device__ int of(int share) const { return each + (share < left_over ? 1 : 0); }
};
inline Shares shares_of(int count, int shares) { return {count / shares, count % shares}; }

// Writes sums of four columns, of which the result has `left`. If `packed`, it has all of them, and
// they are aligned.
template <class Result>
__device__ __forceinline__ void write_four(const float4& sum, Result* to, int left, bool packed) {
  const Pack<Result, 4> pack{
      {narrow<Result>(sum.x), narrow<Result>(sum.y), narrow<Result>(sum.z), narrow<Result>(sum.w)}};
  if (packed) {
    *reinterpret_cast<Pack<Result, 4>*>(to) = pack;
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i < left) to[i] = pack.element[i];
  }
}

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
