// Factors and results as tensor copies see them: what the launchers of the kernels on Hopper's
// tensor cores have in common.
#pragma once

#include <cstdint>

#include "core/ptx/wgmma.cuh"
#include "core/queue.h"
#include "core/tensor_map.h"
#include "matmul/hopper/align_rows.cuh"
#include "matmul/hopper/stages.cuh"
#include "matmul/matmul.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {

template <class T>
inline constexpr CUtensorMapDataType kMapType = CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
template <>
inline constexpr CUtensorMapDataType kMapType<__half> = CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
template <>
inline constexpr CUtensorMapDataType kMapType<__nv_bfloat16> = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;

// Matrices of `rows` rows of `length` neighbours, `pitch` apart, in boxes of 128 bytes by
// `box_rows`.
template <class T>
inline TensorMap map_of(const void* data, std::int64_t batch, std::int64_t rows,
                        std::int64_t length, std::int64_t pitch, int box_rows) {
  constexpr auto kBytes = static_cast<std::int64_t>(sizeof(T));
  return make_tensor_map({kMapType<T>,
                          data,
                          {length, rows, batch},
                          {pitch * kBytes, pitch * rows * kBytes},
                          {kLineBytes / static_cast<int>(kBytes), box_rows, 1}});
}

// A factor as it lies where tensor copies read it.
struct ReadFactor {
  const void* data;
  std::int64_t batch;
  StoredFactor stored;
  std::int64_t pitch;
};

// `box` rows of a or columns of b are what a block copies at a time.
template <class T, bool kDeep>
TensorMap map_of_factor(const ReadFactor& factor, int box) {
  return map_of<T>(factor.data, factor.batch, factor.stored.rows / factor.batch,
                   factor.stored.length, factor.pitch, kDeep ? box : kStageDepth);
}

// Copies a factor if the plan says so, to the beginning of `workspace`, which it moves on.
template <class T>
ReadFactor read_factor(const Queue& queue, const void* data, std::int64_t batch,
                       const StoredFactor& stored, bool copies, unsigned char*& workspace) {
  if (!copies) return {data, batch, stored, stored.length};
  void* const copy = workspace;
  launch_align_rows<T>(queue, data, copy, stored.rows, stored.length);
  workspace += copy_bytes(stored);
  return {copy, batch, stored, aligned_length(stored.length)};
}

struct ReadFactors {
  ReadFactor a;
  ReadFactor b;
};

template <class T>
ReadFactors read_factors(const Queue& queue, const Config& config, const Problem& problem,
                         const Buffers& buffers) {
  auto* workspace = static_cast<unsigned char*>(buffers.workspace);
  const ReadFactor a = read_factor<T>(queue, buffers.a, problem.share_a ? 1 : problem.batch,
                                      stored_a(problem), config.copies_a, workspace);
  const ReadFactor b = read_factor<T>(queue, buffers.b, problem.share_b ? 1 : problem.batch,
                                      stored_b(problem), config.copies_b, workspace);
  return {a, b};
}

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
