// The few declarations of cuBLAS that `cublas` needs. Neither the library's headers are needed nor
// is it linked: JAX brings it. Values and signatures are those of cublas_api.h of CUDA 12 and 13,
// which promise not to change them.
#pragma once

#include <library_types.h>

#include <cstdint>

#include "core/cuda.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {

struct CublasContext;
using CublasHandle = CublasContext*;

enum class CublasStatus : int { kSuccess = 0 };
enum class CublasOperation : int { kNone = 0, kTranspose = 1 };
enum class CublasAlgorithm : int { kDefault = -1 };

// For float, the pedantic type rules out tf32 and emulation, whatever the environment says.
enum class CublasComputeType : int { kFloat32 = 68, kFloat32Pedantic = 69, kFloat64 = 70 };

using CublasCreate = CublasStatus (*)(CublasHandle* handle);
using CublasSetStream = CublasStatus (*)(CublasHandle handle, cudaStream_t stream);
using CublasGetStatusString = const char* (*)(CublasStatus status);
using CublasGemmStridedBatchedEx = CublasStatus (*)(
    CublasHandle handle, CublasOperation transpose_a, CublasOperation transpose_b, std::int64_t m,
    std::int64_t n, std::int64_t k, const void* alpha, const void* a, cudaDataType_t a_type,
    std::int64_t a_stride, long long a_batch_stride, const void* b, cudaDataType_t b_type,
    std::int64_t b_stride, long long b_batch_stride, const void* beta, void* c,
    cudaDataType_t c_type, std::int64_t c_stride, long long c_batch_stride, std::int64_t batch,
    CublasComputeType compute_type, CublasAlgorithm algorithm);

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
