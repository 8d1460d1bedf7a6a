// Masked rows as production kernels read them, element by element, where the mask begins at any
// address: arrays of JAX's begin at multiples of 16 bytes. AddressSanitizer checks that nothing
// beyond the arrays is read.

#include "softmax/row.cuh"

#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "core/integer.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {
namespace {

constexpr std::int64_t kLeading = 2;
constexpr std::int64_t kRows = 3;

std::int64_t checks = 0;
std::int64_t failures = 0;

// The dims that a mask has, beside the columns: all, or one of them, or none. Or there is no mask.
enum class Layout { kNone, kFull, kRows, kLeading, kColumns };

Mask mask_of(Layout layout, std::int64_t columns) {
  Mask mask;
  mask.column_stride = layout == Layout::kNone ? 0 : 1;
  if (layout == Layout::kNone) return mask;
  mask.dims = 2;
  mask.size[0] = kRows;
  mask.size[1] = kLeading;
  if (layout == Layout::kFull || layout == Layout::kRows) mask.stride[0] = columns;
  if (layout == Layout::kFull) mask.stride[1] = kRows * columns;
  if (layout == Layout::kLeading) mask.stride[1] = columns;
  return mask;
}

template <class T, int kPacks>
void check_stretch(const Tensors<T>& tensors, std::int64_t number, std::int64_t first, int lanes) {
  constexpr Kind kKind = Kind::kMaskedRagged;
  constexpr int kPack = kWidestPack<T>;
  const Row<T, kKind> row(tensors, number);
  const Selection<T> selection(tensors, number);
  const Stretch<T, kKind> stretch(tensors, row, first, row.packs, lanes);
  const T fill = narrow<T>(Accumulator<T>(-7));
  RegisterPack<T, kPack> packs[2][kPacks];
  stretch.template read<false>(tensors, tensors.x, tensors.x + stretch.begin(), fill, packs[0]);
  stretch.template read<true>(tensors, tensors.x, tensors.x + stretch.begin(), fill, packs[1]);
  for (int p = 0; p < kPacks; ++p) {
    if (!stretch.has(p)) continue;
    const unsigned kept = stretch.kept(tensors, p);
    for (int i = 0; i < kPack; ++i) {
      const std::int64_t column = (first + std::int64_t{p} * lanes) * kPack - row.phase + i;
      const bool exists = column >= 0 && column < tensors.rows.columns;
      const bool keeps = exists && selection(column);
      const T expected = keeps ? tensors.x[row.begin + column] : fill;
      for (const auto& read : packs) {
        Pack<T, kPack> elements;
        std::memcpy(&elements, &read[p], sizeof(elements));
        ++checks;
        if (std::memcmp(&elements.element[i], &expected, sizeof(T)) != 0) ++failures;
      }
      if ((kept >> i & 1) != (keeps ? 1u : 0u)) ++failures;
    }
  }
}

// phase: of the mask's address.
template <class T, int kPacks>
void check_rows(std::int64_t columns, Layout layout, std::size_t phase, bool causal, int lanes) {
  Tensors<T> tensors{};
  tensors.rows = {kLeading * kRows, columns, 1};
  tensors.size = tensors.rows.count * columns;
  tensors.queries = causal ? kRows : 0;
  tensors.by_queries = Divisor(tensors.queries);
  const auto x = std::make_unique<T[]>(static_cast<std::size_t>(tensors.size));
  for (std::int64_t i = 0; i < tensors.size; ++i) x[i] = narrow<T>(Accumulator<T>(i % 120));
  tensors.x = x.get();
  tensors.mask = mask_of(layout, columns);
  tensors.mask_bytes = (columns - 1) * tensors.mask.column_stride + 1;
  for (int d = 0; d < tensors.mask.dims; ++d) {
    tensors.by_mask_size[d] = Divisor(tensors.mask.size[d]);
    tensors.mask_bytes += (tensors.mask.size[d] - 1) * tensors.mask.stride[d];
  }
  const std::size_t bytes = phase + static_cast<std::size_t>(tensors.mask_bytes);
  const auto flags = std::make_unique<std::uint8_t[]>(bytes);
  std::mt19937 random(1);
  for (std::size_t i = 0; i < bytes; ++i) flags[i] = random() % 5 < 3;
  if (layout != Layout::kNone) tensors.mask.data = flags.get() + phase;
  for (std::int64_t number = 0; number < tensors.rows.count; ++number) {
    const std::int64_t packs = Row<T, Kind::kMaskedRagged>(tensors, number).packs;
    for (std::int64_t first = 0; first < packs; first += std::int64_t{lanes} * kPacks) {
      for (int lane = 0; lane < lanes; ++lane) {
        check_stretch<T, kPacks>(tensors, number, first + lane, lanes);
      }
    }
  }
}

template <class T>
void check_dtype() {
  for (const std::int64_t columns : {1, 2, 3, 4, 5, 7, 8, 9, 13, 15, 16, 17, 23, 33, 40, 63, 131}) {
    for (const Layout layout :
         {Layout::kNone, Layout::kFull, Layout::kRows, Layout::kLeading, Layout::kColumns}) {
      for (std::size_t phase = 0; phase < 8; ++phase) {
        for (const bool causal : {false, true}) {
          for (const int lanes : {1, 2, 8}) {
            check_rows<T, 1>(columns, layout, phase, causal, lanes);
            check_rows<T, 5>(columns, layout, phase, causal, lanes);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE

int main() {
  namespace softmax = JAX_GPUOPS_NAMESPACE::softmax;
  softmax::check_dtype<__half>();
  softmax::check_dtype<__nv_bfloat16>();
  softmax::check_dtype<float>();
  softmax::check_dtype<double>();
  std::printf("%lld elements, %lld failed\n", static_cast<long long>(softmax::checks),
              static_cast<long long>(softmax::failures));
  return softmax::failures == 0 ? 0 : 1;
}
