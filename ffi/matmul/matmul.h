// Matrix multiplication: BLAS's gemm over a batch.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "core/device.h"
#include "core/dtype.h"
#include "core/queue.h"
#include "core/registry.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {

// result[i] = alpha op(a[i]) op(b[i]) + beta c[i] for each i in the batch, all row-major:
// op(a) is m x k and stored k x m if `transpose_a`; op(b) is k x n and stored n x k if
// `transpose_b`; c and the result are m x n. A shared factor is one matrix for the whole batch.
struct Problem {
  DType dtype;         // of a and b
  DType result_dtype;  // of c and the result: that of a and b, or their accumulator's
  std::int64_t batch;
  std::int64_t m;
  std::int64_t n;
  std::int64_t k;
  bool transpose_a;
  bool transpose_b;
  bool share_a;
  bool share_b;
};

struct Buffers {
  const void* a;
  const void* b;
  const void* c;  // null: there is no c, and beta is ignored
  void* result;
  double alpha;
  double beta;
};

enum class Algorithm {
  kNaive,
  kCoalesced,
  kShared,
  kBlockTiled,
  kBankConflictFree,
  kDoubleBuffered,
  kCublas,
};

inline constexpr std::string_view kGemmLadder =
    "CUDA general matrix multiplication: from entry to mastery, a ladder of sgemm kernels";
inline constexpr std::string_view kSgemmNotes =
    "Notes on sgemm: naive, coalesced and shared-memory kernels, August 2024";

inline constexpr AlgorithmInfo kAlgorithms[] = {
    {"naive", "A thread per element; the lanes of a warp read different rows of a.", kGemmLadder,
     "none"},
    {"coalesced", "A thread per element; the lanes of a warp read adjacent elements of b.",
     kSgemmNotes, "none"},
    {"shared", "Tiles of 32 x 32 in shared memory: each element is read 32 times less often.",
     kSgemmNotes, "none"},
    {"block_tiled", "A 128 x 128 tile per block, 8 x 8 elements per thread, in registers.",
     kGemmLadder, "none"},
    {"bank_conflict_free",
     "block_tiled with a transposed in shared memory, and quarters that the lanes read without "
     "bank conflicts.",
     kGemmLadder, "none"},
    {"double_buffered",
     "bank_conflict_free with two buffers: the next tile loads while this one is multiplied.",
     kGemmLadder, "none"},
    {"cublas", "cuBLAS, from the library that JAX has loaded: what the ladder is measured against.",
     "NVIDIA cuBLAS, cublasGemmStridedBatchedEx", "CUDA only"},
};

struct Plan {
  Algorithm algorithm;
  std::string reason;
};

// The algorithm called `algorithm`, or the best one for the problem if it is empty. Throws
// std::invalid_argument if the named one cannot take the problem.
Plan plan(const Problem& problem, std::string_view algorithm, const Device& device);

// Runs one of our kernels.
void launch(const Plan& plan, const Problem& problem, const Buffers& buffers, const Queue& queue);

// Runs cuBLAS. While the queue prepares, loads the library and creates its handle.
void launch_cublas(const Problem& problem, const Buffers& buffers, const Queue& queue);

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
