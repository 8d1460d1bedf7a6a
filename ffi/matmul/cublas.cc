#include "matmul/matmul.h"

#ifdef JAX_GPUOPS_INTERPRET

#include <stdexcept>

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {

void launch_cublas(const Queue&, const Problem&, const Buffers&) {
  throw std::invalid_argument("algorithm 'cublas' is CUDA only: the host has no cuBLAS");
}

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE

#else

#include <dlfcn.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>

#include "core/errors.h"
#include "matmul/cublas.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {
namespace {

struct Library {
  CublasCreate create;
  CublasSetStream set_stream;
  CublasGetStatusString status_string;
  CublasGemmStridedBatchedEx gemm;
};

// The library that JAX has loaded for itself. Another copy, such as one of the system, would be
// of another version, and its handles take memory from XLA's pool.
void* loaded_library() {
  for (const char* name : {"libcublas.so.13", "libcublas.so.12"}) {
    if (void* library = dlopen(name, RTLD_NOLOAD | RTLD_LAZY)) return library;
  }
  throw std::runtime_error(
      "algorithm 'cublas' uses the cuBLAS library that JAX loads, and none is loaded; install "
      "JAX with its CUDA libraries, as jax[cuda13] does");
}

template <class Function>
Function find(void* library, const char* name) {
  void* const symbol = dlsym(library, name);
  if (symbol == nullptr) {
    throw std::runtime_error(std::string("the loaded cuBLAS has no function ") + name);
  }
  return reinterpret_cast<Function>(symbol);
}

const Library& library() {
  static const Library loaded = [] {
    void* const handle = loaded_library();
    return Library{find<CublasCreate>(handle, "cublasCreate_v2"),
                   find<CublasSetStream>(handle, "cublasSetStream_v2"),
                   find<CublasGetStatusString>(handle, "cublasGetStatusString"),
                   find<CublasGemmStridedBatchedEx>(handle, "cublasGemmStridedBatchedEx_64")};
  }();
  return loaded;
}

void check_cublas(CublasStatus status, const char* doing) {
  if (status == CublasStatus::kSuccess) return;
  throw std::runtime_error(std::string("cuBLAS error while ") + doing + ": " +
                           library().status_string(status));
}

// A handle belongs to the device that was current when it was created; XLA makes the device of a
// handler current. Its stream is a state of the handle, so setting it and the call that uses it
// happen under one lock.
struct DeviceHandle {
  std::mutex mutex;
  CublasHandle handle = nullptr;
};

DeviceHandle& device_handle(int ordinal) {
  static std::mutex mutex;
  static auto& handles = *new std::map<int, DeviceHandle>;  // never freed: see core/device.cc
  std::lock_guard lock(mutex);
  DeviceHandle& entry = handles[ordinal];
  if (entry.handle == nullptr) {
    check_cublas(library().create(&entry.handle), "creating a handle");
  }
  return entry;
}

cudaDataType_t data_type(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return CUDA_R_16F;
    case DType::kBFloat16:
      return CUDA_R_16BF;
    case DType::kFloat32:
      return CUDA_R_32F;
    case DType::kFloat64:
      return CUDA_R_64F;
    default:
      throw std::invalid_argument("algorithm 'cublas' does not support dtype " +
                                  std::string(info(dtype).name));
  }
}

CublasComputeType compute_type(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return CublasComputeType::kFloat32Pedantic;
    case DType::kFloat64:
      return CublasComputeType::kFloat64;
    default:
      return CublasComputeType::kFloat32;
  }
}

CublasOperation operation(bool transpose) {
  return transpose ? CublasOperation::kTranspose : CublasOperation::kNone;
}

}  // namespace

void launch_cublas(const Queue& queue, const Problem& problem, const Buffers& buffers) {
  DeviceHandle& entry = device_handle(queue.device->ordinal);
  if (queue.preparing) return;

  // cuBLAS adds to c in place.
  const std::int64_t elements = problem.batch * problem.m * problem.n;
  if (buffers.c != nullptr) {
    check_cuda(
        cudaMemcpyAsync(buffers.result, buffers.c, elements * info(problem.result_dtype).bytes,
                        cudaMemcpyDeviceToDevice, queue.stream),
        "copying c");
  }
  // cuBLAS reads scalars in the compute type.
  const float alpha_float = static_cast<float>(buffers.alpha);
  const float beta_float = buffers.c != nullptr ? static_cast<float>(buffers.beta) : 0;
  const double alpha_double = buffers.alpha;
  const double beta_double = buffers.c != nullptr ? buffers.beta : 0;
  const bool is_double = problem.dtype == DType::kFloat64;
  const auto scalar = [&](const double& wide, const float& narrow) -> const void* {
    if (is_double) return &wide;
    return &narrow;
  };

  // Its matrices are column-major: it sees row-major matrices as their transposes. So it computes
  // the transposed result, op(b)^T op(a)^T.
  const std::int64_t deep = std::max<std::int64_t>(1, problem.k);  // a leading dimension is not 0
  std::lock_guard lock(entry.mutex);
  check_cublas(library().set_stream(entry.handle, queue.stream), "setting the stream");
  check_cublas(
      library().gemm(entry.handle, operation(problem.transpose_b), operation(problem.transpose_a),
                     problem.n, problem.m, problem.k, scalar(alpha_double, alpha_float), buffers.b,
                     data_type(problem.dtype), problem.transpose_b ? deep : problem.n,
                     problem.share_b ? 0 : problem.n * problem.k, buffers.a,
                     data_type(problem.dtype), problem.transpose_a ? problem.m : deep,
                     problem.share_a ? 0 : problem.m * problem.k, scalar(beta_double, beta_float),
                     buffers.result, data_type(problem.result_dtype), problem.n,
                     problem.m * problem.n, problem.batch, compute_type(problem.dtype),
                     CublasAlgorithm::kDefault),
      "multiplying");
}

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE

#endif
