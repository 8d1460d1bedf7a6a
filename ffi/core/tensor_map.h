// Tensor maps: they describe tensors to the copy engine of a Hopper GPU (core/ptx/tensor_copy.cuh).
#pragma once

#include <cuda.h>

#include <cstdint>

#ifdef JAX_GPUOPS_INTERPRET
#include "simt/simt.h"
#endif

namespace JAX_GPUOPS_NAMESPACE {

#ifdef JAX_GPUOPS_INTERPRET
using TensorMap = simt::TensorMap;
#else
using TensorMap = CUtensorMap;
#endif

// Three dimensions, the first contiguous. A box in shared memory is lines of box[0] elements, with
// the 128-byte swizzle. Floats of type TFLOAT32 are rounded to TF32 as they are copied there.
struct BoxedTensor {
  CUtensorMapDataType type;
  const void* data;
  std::int64_t extent[3];
  std::int64_t stride_bytes[2];  // of the second and third dimension
  int box[3];
};

// Throws std::runtime_error that names what the driver would refuse: an address or a stride that is
// no multiple of 16 bytes, an extent of 0 or above 2^32, a stride of 2^40 or more, an extent of the
// box of 0 or above 256, a line of the box that is no multiple of 16 bytes or longer than 128.
TensorMap make_tensor_map(const BoxedTensor& tensor);

}  // namespace JAX_GPUOPS_NAMESPACE
