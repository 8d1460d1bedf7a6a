// Tensor maps of factors and results, shared by the launchers of the kernels on Hopper's tensor
// cores.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "core/dispatch.h"
#include "core/integer.h"
#include "core/launch.h"
#include "core/ptx/wgmma.cuh"
#include "core/queue.h"
#include "core/tensor_map.h"
#include "matmul/hopper/align_rows.cuh"
#include "matmul/hopper/stages.cuh"
#include "matmul/hopper/transpose_bytes.cuh"
#include "matmul/hopper/transpose_rows.cuh"
#include "matmul/matmul.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace matmul {

// The tensor map types of factors and results. Tensor copies round float factors to TF32; 8-bit
// factors are copied as bytes.
template <class T>
inline constexpr CUtensorMapDataType kFactorType =
    sizeof(T) == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_TFLOAT32;
template <>
inline constexpr CUtensorMapDataType kFactorType<__half> = CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
template <>
inline constexpr CUtensorMapDataType kFactorType<__nv_bfloat16> = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
template <class T>
inline constexpr CUtensorMapDataType kResultType =
    sizeof(T) == 4 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : kFactorType<T>;
template <>
inline constexpr CUtensorMapDataType kResultType<std::int32_t> = CU_TENSOR_MAP_DATA_TYPE_INT32;

static_assert(kTensorLineBytes == kLineBytes);

// A tensor map of matrices of `rows` rows of `length` elements, with leading dimension `pitch`, in
// boxes of 128 bytes by `box_rows` rows.
template <class T>
inline TensorMap map_of(CUtensorMapDataType type, const void* data, std::int64_t batch,
                        std::int64_t rows, std::int64_t length, std::int64_t pitch, int box_rows) {
  constexpr auto kBytes = static_cast<std::int64_t>(sizeof(T));
  return make_tensor_map({type,
                          data,
                          {length, rows, batch},
                          {pitch * kBytes, pitch * rows * kBytes},
                          {kLineBytes / static_cast<int>(kBytes), box_rows, 1}});
}

// A factor in the array that tensor copies read: its own or its copy.
struct ReadFactor {
  const void* data;
  StoredFactor stored;
  std::int64_t pitch;
};

// `part`: how many rows of a or columns of b a block copies at a time, if the factor is deep.
template <class T, bool kDeep>
FactorMaps maps_of_factor(const ReadFactor& factor, int part) {
  const StoredFactor& stored = factor.stored;
  const auto map = [&](int box) {
    return map_of<T>(kFactorType<T>, factor.data, stored.batch, stored.rows, stored.length,
                     factor.pitch, box);
  };
  if constexpr (kDeep) {
    const int rows = static_cast<int>(stored.rows);
    part = std::min(part, rows);
    const int left_over = rows % part;
    return {map(part), map(left_over == 0 ? part : left_over), rows, part};
  } else {
    const TensorMap all = map(kStageDepth<T>);
    return {all, all, static_cast<int>(stored.length), part};
  }
}

// The factor that tensor copies read: itself or, if `copies`, a copy at the beginning of
// `workspace`, which is advanced past it. Launches the transposition; a copy that only aligns rows
// is returned in `aligned`, for the caller to launch.
template <class T, class Aligned>
ReadFactor read_factor(const Queue& queue, const void* data, const StoredFactor& stored,
                       bool copies, unsigned char*& workspace, RowCopy<Aligned>& aligned) {
  if (!copies) return {data, stored, stored.length};
  void* const copy = workspace;
  workspace += copy_bytes(stored);
  if (!is_transposed(stored)) {
    aligned = row_copy<Aligned>(data, copy, stored);
  } else if constexpr (sizeof(T) == 4) {
    launch_transpose_rows<T>(queue, data, copy, stored);
  } else if constexpr (sizeof(T) == 1) {
    launch_transpose_bytes<T>(queue, data, copy, stored);
  }
  return {copy, copy_of(stored), pitch_of_copy(stored)};
}

struct ReadFactors {
  ReadFactor a;
  ReadFactor b;
};

template <class T>
ReadFactors read_factors(const Queue& queue, const Config& config, const Problem& problem,
                         const Buffers& buffers) {
  auto* workspace = static_cast<unsigned char*>(buffers.workspace);
  RowCopy<std::conditional_t<sizeof(T) == 1, std::uint8_t, T>> aligned_a{}, aligned_b{};
  const ReadFactor a =
      read_factor<T>(queue, buffers.a, stored_a(problem), config.copies_a, workspace, aligned_a);
  const ReadFactor b =
      read_factor<T>(queue, buffers.b, stored_b(problem), config.copies_b, workspace, aligned_b);
  if (aligned_a.count + aligned_b.count > 0) launch_align_rows(queue, aligned_a, aligned_b);
  return {a, b};
}

// The launch of a kernel that reads the factors. After copies, which are launched in stream order,
// it is launched early: it sets itself up while they end.
inline LaunchShape shape_behind_copies(const Config& config, int cluster) {
  LaunchShape shape{dim3(static_cast<unsigned>(config.blocks)),
                    static_cast<unsigned>(config.threads),
                    static_cast<std::size_t>(config.shared_bytes), cluster};
  shape.early = config.copies_a || config.copies_b;
  return shape;
}

// Calls function(deep_a, deep_b), std::integral_constants that say whether the kernel reads deep
// factors. Factors of 8 and 32 bits are all deep once they have been copied.
template <class T, class Function>
void dispatch_layouts(const Problem& problem, Function&& function) {
  if constexpr (sizeof(T) != 2) {
    function(std::true_type{}, std::true_type{});
  } else {
    dispatch_value<false, true>(stored_a(problem).deep, [&](auto deep_a) {
      dispatch_value<false, true>(stored_b(problem).deep,
                                  [&](auto deep_b) { function(deep_a, deep_b); });
    });
  }
}

// Writes the zeros of a product with k = 0, which has no factors to copy.
inline void clear_result(const Queue& queue, const Problem& problem, const Buffers& buffers) {
  const std::int64_t elements = problem.batch * problem.m * problem.n;
  clear(queue, buffers.result, elements * info(problem.result_dtype).bytes);
}

}  // namespace matmul
}  // namespace JAX_GPUOPS_NAMESPACE
