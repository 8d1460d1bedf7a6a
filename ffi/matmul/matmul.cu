// Instantiates the matmul kernels and launches them.

#include <stdexcept>

#include "core/dispatch.h"
#include "matmul/gemm.cuh"
#include "matmul/ladder/01_naive.cuh"
#include "matmul/ladder/02_coalesced.cuh"
#include "matmul/ladder/03_shared.cuh"
#include "matmul/ladder/04_block_tiled.cuh"
#include "matmul/ladder/05_bank_conflict_free.cuh"
#include "matmul/ladder/06_double_buffered.cuh"
#include "matmul/matmul.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {
namespace {

template <class T>
void launch_algorithm(Algorithm algorithm, const Call<T>& call) {
  switch (algorithm) {
    case Algorithm::kNaive:
      return launch_naive(call);
    case Algorithm::kCoalesced:
      return launch_coalesced(call);
    case Algorithm::kShared:
      return launch_shared(call);
    case Algorithm::kBlockTiled:
      return launch_block_tiled(call);
    case Algorithm::kBankConflictFree:
      return launch_bank_conflict_free(call);
    case Algorithm::kDoubleBuffered:
      return launch_double_buffered(call);
    case Algorithm::kTensorCore:
    case Algorithm::kSplitK:
    case Algorithm::kParallelSplitK:
    case Algorithm::kWgmmaBatched:
    case Algorithm::kSkinny:
    case Algorithm::kBF16X6:
    case Algorithm::kFP16X3:
    case Algorithm::kFmaPipelined:
    case Algorithm::kFmaSliced:
    case Algorithm::kFmaBatched:
    case Algorithm::kFmaSkinny:
    case Algorithm::kMmaPipelined:
    case Algorithm::kMmaBatched:
    case Algorithm::kCublas:
      throw std::logic_error("not a kernel of this source");
  }
}

}  // namespace

void launch_where_flagged(const Queue& queue, const Config& config, const Problem& problem,
                          const Buffers& buffers, const std::int32_t* flag) {
  Config own = config;
  own.threads = kTileThreads;
  own.tile_rows = kTile;
  own.tile_cols = kTile;
  Gemm<float> gemm = make_gemm<float>(own, problem, buffers);
  gemm.flag = flag;
  launch_double_buffered<float>({queue, own, problem.batch, gemm});
}

void launch(const Queue& queue, const Plan& plan, const Problem& problem, const Buffers& buffers) {
  if (plan.algorithm == Algorithm::kCublas) return launch_cublas(queue, problem, buffers);
  if (has_scales(problem)) {  // only tensor_core takes them
    dispatch<__nv_fp8_e4m3, __nv_fp8_e5m2, std::int8_t>(problem.dtype, [&](auto type) {
      launch_scaled_tensor_core<typename decltype(type)::type>(queue, plan.config, problem,
                                                               buffers);
    });
    return;
  }
  if (plan.algorithm == Algorithm::kTensorCore) {
    dispatch<__half, __nv_bfloat16, float, __nv_fp8_e4m3, __nv_fp8_e5m2, std::int8_t>(
        problem.dtype, [&](auto type) {
          launch_tensor_core<typename decltype(type)::type>(queue, plan.config, problem, buffers);
        });
    return;
  }
  if (plan.algorithm == Algorithm::kSplitK) {
    dispatch<__half, __nv_bfloat16, float>(problem.dtype, [&](auto type) {
      launch_split_k<typename decltype(type)::type>(queue, plan.config, problem, buffers);
    });
    return;
  }
  if (plan.algorithm == Algorithm::kParallelSplitK) {
    dispatch<__half, __nv_bfloat16, float>(problem.dtype, [&](auto type) {
      launch_parallel_split_k<typename decltype(type)::type>(queue, plan.config, problem, buffers);
    });
    return;
  }
  if (plan.algorithm == Algorithm::kWgmmaBatched) {
    dispatch<__half, __nv_bfloat16>(problem.dtype, [&](auto type) {
      launch_wgmma_batched<typename decltype(type)::type>(queue, plan.config, problem, buffers);
    });
    return;
  }
  if (plan.algorithm == Algorithm::kSkinny) {
    dispatch<__half, __nv_bfloat16>(problem.dtype, [&](auto type) {
      launch_skinny<typename decltype(type)::type>(queue, plan.config, problem, buffers);
    });
    return;
  }
  if (plan.algorithm == Algorithm::kMmaBatched) {
    dispatch<__half, __nv_bfloat16, float>(problem.dtype, [&](auto type) {
      launch_mma_batched<typename decltype(type)::type>(queue, plan.config, problem, buffers);
    });
    return;
  }
  if (plan.algorithm == Algorithm::kBF16X6) {
    return launch_bf16_x6(queue, plan.config, problem, buffers);
  }
  if (plan.algorithm == Algorithm::kFP16X3) {
    return launch_fp16_x3(queue, plan.config, problem, buffers);
  }
  if (plan.algorithm == Algorithm::kFmaPipelined) {
    return launch_fma_pipelined(queue, plan.config, problem, buffers);
  }
  if (plan.algorithm == Algorithm::kFmaSliced) {
    return launch_fma_sliced(queue, plan.config, problem, buffers);
  }
  if (plan.algorithm == Algorithm::kFmaBatched) {
    return launch_fma_batched(queue, plan.config, problem, buffers);
  }
  if (plan.algorithm == Algorithm::kFmaSkinny) {
    return launch_fma_skinny(queue, plan.config, problem, buffers);
  }
  dispatch<__half, __nv_bfloat16, float, double>(problem.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if (plan.algorithm == Algorithm::kMmaPipelined) {
      return launch_mma_pipelined<T>(queue, plan.config, problem, buffers);
    }
    launch_algorithm<T>(plan.algorithm, {queue, plan.config, problem.batch,
                                         make_gemm<T>(plan.config, problem, buffers)});
  });
}

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
