#include "core/tensor_map.h"

#ifndef JAX_GPUOPS_INTERPRET
#include <cudaTypedefs.h>
#include <cuda_runtime.h>
#endif

#include <stdexcept>
#include <string>

namespace JAX_GPUOPS_NAMESPACE {
namespace {

constexpr int kSwizzleBytes = 128;

int element_bytes(CUtensorMapDataType type) {
  switch (type) {
    case CU_TENSOR_MAP_DATA_TYPE_UINT8:
      return 1;
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
    case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16:
      return 2;
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT32:
    case CU_TENSOR_MAP_DATA_TYPE_TFLOAT32:
    case CU_TENSOR_MAP_DATA_TYPE_INT32:
      return 4;
    default:
      throw std::runtime_error("a tensor map of data type " +
                               std::to_string(static_cast<int>(type)) + ", which has no use here");
  }
}

// Checks the driver's rules: the driver itself only says that something is invalid.
void check(const BoxedTensor& tensor) {
  const auto refuse = [](const std::string& what, std::int64_t value, const std::string& rule) {
    throw std::runtime_error("a tensor map with " + what + " " + std::to_string(value) +
                             ", which must be " + rule);
  };
  const auto address = reinterpret_cast<std::uintptr_t>(tensor.data);
  if (address == 0 || address % 16 != 0) {
    refuse("the address", static_cast<std::int64_t>(address), "a multiple of 16 and not 0");
  }
  for (const std::int64_t extent : tensor.extent) {
    if (extent < 1 || extent > std::int64_t{1} << 32) refuse("an extent of", extent, "1 to 2^32");
  }
  for (const std::int64_t stride : tensor.stride_bytes) {
    if (stride < 0 || stride % 16 != 0 || stride >= std::int64_t{1} << 40) {
      refuse("a stride in bytes of", stride, "a multiple of 16 below 2^40");
    }
  }
  for (const int extent : tensor.box) {
    if (extent < 1 || extent > 256) refuse("a box extent of", extent, "1 to 256");
  }
  const int line = tensor.box[0] * element_bytes(tensor.type);
  if (line % 16 != 0 || line > kSwizzleBytes) {
    refuse("box lines in bytes of", line, "a multiple of 16 up to the swizzle's 128");
  }
}

#ifndef JAX_GPUOPS_INTERPRET
// From the driver that is running: nothing links libcuda.
PFN_cuTensorMapEncodeTiled_v12000 find_encode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                             12000, cudaEnableDefault, &found);
  if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) {
    throw std::runtime_error("the CUDA driver has no cuTensorMapEncodeTiled");
  }
  return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
}
#endif

}  // namespace

TensorMap make_tensor_map(const BoxedTensor& tensor) {
  check(tensor);
#ifdef JAX_GPUOPS_INTERPRET
  TensorMap map;
  map.data = static_cast<unsigned char*>(const_cast<void*>(tensor.data));
  map.element_bytes = element_bytes(tensor.type);
  map.rounds_to_tf32 = tensor.type == CU_TENSOR_MAP_DATA_TYPE_TFLOAT32;
  for (int i = 0; i < 3; ++i) {
    map.extent[i] = tensor.extent[i];
    map.box[i] = tensor.box[i];
  }
  for (int i = 0; i < 2; ++i) map.stride_bytes[i] = tensor.stride_bytes[i];
  return map;
#else
  static const PFN_cuTensorMapEncodeTiled_v12000 encode = find_encode();
  cuuint64_t extent[3];
  cuuint32_t box[3];
  for (int i = 0; i < 3; ++i) {
    extent[i] = static_cast<cuuint64_t>(tensor.extent[i]);
    box[i] = static_cast<cuuint32_t>(tensor.box[i]);
  }
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(tensor.stride_bytes[0]),
                                 static_cast<cuuint64_t>(tensor.stride_bytes[1])};
  const cuuint32_t element_strides[3] = {1, 1, 1};
  CUtensorMap map;
  const CUresult result =
      encode(&map, tensor.type, 3, const_cast<void*>(tensor.data), extent, strides, box,
             element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw std::runtime_error("cuTensorMapEncodeTiled failed with error " +
                             std::to_string(static_cast<int>(result)));
  }
  return map;
#endif
}

}  // namespace JAX_GPUOPS_NAMESPACE
