// Tests that rows with a mask are read right, element by element, by the code of production
// kernels, with masks at any address: arrays of JAX are aligned to 16 bytes. AddressSanitizer
// checks that nothing beyond the arrays is read. Also: a slice writes only its own elements.

#include "softmax/row.cuh"

#include <sys/mman.h>

#include <cstdio>
#include <cstring>
#include <memory>
#include <new>
#include <random>
#include <type_traits>
#include <vector>

#include "core/integer.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {
namespace {

constexpr std::int64_t kLeading = 2;
constexpr std::int64_t kRows = 3;

std::int64_t checks = 0;
std::int64_t failures = 0;

// The dims that a mask has besides the columns: all, one, or none; kNone: there is no mask.
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

// Checks what a slice reads, apart from its writes.
template <class T, RowLayout kLayout, int kPacks>
void check_reads(const KernelArgs<T>& args, const Row<T, kLayout>& row, std::int64_t number,
                 const ThreadSlice<T, kLayout>& slice, std::int64_t first, int lanes) {
  constexpr int kPack = kPackOf<T, kLayout>;
  const RowMask<T> row_mask(args, number);
  const T fill = narrow<T>(Accumulator<T>(-7));
  RegisterPack<T, kPack> packs[2][kPacks];
  constexpr bool kAsksEach = false;
  constexpr bool kAsksOnce = true;
  const T* const whole = args.x + slice.begin();
  slice.template read<kAsksEach>(args, slice.operand(args.x, whole, fill, packs[0]));
  slice.template read<kAsksOnce>(args, slice.operand(args.x, whole, fill, packs[1]));
  for (int p = 0; p < kPacks; ++p) {
    if (!slice.has(p)) continue;
    const unsigned kept = slice.kept(args, p);
    for (int i = 0; i < kPack; ++i) {
      const std::int64_t column = (first + std::int64_t{p} * lanes) * kPack - row.phase + i;
      const bool exists = column >= 0 && column < args.rows.columns;
      const bool keeps = exists && row_mask(column);
      const T expected = keeps ? args.x[row.begin + column] : fill;
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

// Checks the written elements of y, and zeroes y for the next slice.
template <class T, RowLayout kLayout, int kPacks>
void check_writes(const KernelArgs<T>& args, const Row<T, kLayout>& row,
                  const ThreadSlice<T, kLayout>& slice, std::int64_t first, int lanes) {
  constexpr int kPack = kPackOf<T, kLayout>;
  const auto column_of = [&](int p, int i) {
    return (first + std::int64_t{p} * lanes) * kPack - row.phase + i;
  };
  slice.template write<kPacks>(args, [&](int p) {
    Pack<T, kPack> pack;
    for (int i = 0; i < kPack; ++i) {
      pack.element[i] = narrow<T>(Accumulator<T>(column_of(p, i) % 100 + 1));
    }
    RegisterPack<T, kPack> result;
    std::memcpy(&result, &pack, sizeof(result));
    return result;
  });
  std::int64_t written = 0;
  for (int p = 0; p < kPacks; ++p) {
    if (!slice.has(p)) continue;
    for (int i = 0; i < kPack; ++i) {
      const std::int64_t column = column_of(p, i);
      if (column < 0 || column >= args.rows.columns) continue;
      ++written;
      const T expected = narrow<T>(Accumulator<T>(column % 100 + 1));
      if (std::memcmp(&args.y[row.begin + column], &expected, sizeof(T)) != 0) ++failures;
    }
  }
  for (std::int64_t i = 0; i < args.size; ++i) {
    if (widen(args.y[i]) != 0) --written;
    args.y[i] = narrow<T>(Accumulator<T>(0));
  }
  if (written != 0) ++failures;
}

template <class T, RowLayout kLayout, int kPacks>
void check_slice(const KernelArgs<T>& args, std::int64_t number, std::int64_t first, int lanes) {
  const Row<T, kLayout> row(args, number);
  const ThreadSlice<T, kLayout> slice(args, row, first, row.packs, lanes);
  check_reads<T, kLayout, kPacks>(args, row, number, slice, first, lanes);
  check_writes<T, kLayout, kPacks>(args, row, slice, first, lanes);
}

// phase: the offset of the mask's address.
template <class T, RowLayout kLayout, int kPacks>
void check_rows(std::int64_t columns, Layout layout, std::size_t phase, bool causal, int lanes) {
  KernelArgs<T> args{};
  args.rows = {kLeading * kRows, columns, 1};
  args.size = args.rows.count * columns;
  const auto x = std::make_unique<T[]>(static_cast<std::size_t>(args.size));
  for (std::int64_t i = 0; i < args.size; ++i) x[i] = narrow<T>(Accumulator<T>(i % 120));
  args.x = x.get();
  const auto y = std::make_unique<T[]>(static_cast<std::size_t>(args.size));
  for (std::int64_t i = 0; i < args.size; ++i) y[i] = narrow<T>(Accumulator<T>(0));
  args.y = y.get();
  Mask mask = mask_of(layout, columns);
  args.set_masks(mask, causal ? kRows : 0);  // tells the mask's size
  const std::size_t bytes = phase + static_cast<std::size_t>(args.flag_bytes);
  const auto flags = std::make_unique<std::uint8_t[]>(bytes);
  std::mt19937 random(1);
  for (std::size_t i = 0; i < bytes; ++i) flags[i] = random() % 5 < 3;
  if (layout != Layout::kNone) mask.data = flags.get() + phase;
  args.set_masks(mask, causal ? kRows : 0);
  if (args.has_element_flags != (layout != Layout::kNone)) ++failures;
  for (std::int64_t number = 0; number < args.rows.count; ++number) {
    const std::int64_t packs = Row<T, kLayout>(args, number).packs;
    for (std::int64_t first = 0; first < packs; first += std::int64_t{lanes} * kPacks) {
      for (int lane = 0; lane < lanes; ++lane) {
        check_slice<T, kLayout, kPacks>(args, number, first + lane, lanes);
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
            const auto check = [&](auto packs) {
              check_rows<T, RowLayout::kMaskedUnaligned, packs>(columns, layout, phase, causal,
                                                                lanes);
              check_rows<T, RowLayout::kElements, packs>(columns, layout, phase, causal, lanes);
              if (columns % kWidestPack<T> == 0 && phase == 0) {
                check_rows<T, RowLayout::kMasked, packs>(columns, layout, phase, causal, lanes);
              }
            };
            check(std::integral_constant<int, 1>{});
            check(std::integral_constant<int, 5>{});
          }
        }
      }
    }
  }
}

// The positions of rows by division.
template <class Number>
void check_position(const RowPositions<Number>& positions, const Mask& mask, std::int64_t queries,
                    std::int64_t row) {
  std::int64_t rest = row;
  std::int64_t offset = 0;
  for (int d = 0; d < mask.dims; ++d) {
    offset += rest % mask.size[d] * mask.stride[d];
    rest /= mask.size[d];
  }
  const auto number = static_cast<Number>(row);
  ++checks;
  if (positions.offset(number) != static_cast<Number>(offset)) ++failures;
  if (positions.query(number) != static_cast<Number>(queries == 0 ? row : row % queries)) {
    ++failures;
  }
}

// The first and last rows of random masks, and others, up to the largest number of rows.
template <class Number>
void check_positions() {
  constexpr int kBits = sizeof(Number) == 4 ? 31 : 62;
  std::mt19937_64 random(1);
  for (int i = 0; i < 20000; ++i) {
    Mask mask;
    std::int64_t rows = 1;
    std::int64_t flags = 1;
    mask.dims = static_cast<int>(random() % (Mask::kMaxDims + 1));
    int bits = kBits;
    for (int d = 0; d < mask.dims; ++d) {
      const int own = 1 + static_cast<int>(random() % static_cast<unsigned>(bits - mask.dims + d));
      mask.size[d] = 2 + static_cast<std::int64_t>(random() >> (64 - own)) % ((1ll << own) - 1);
      if (own > 1 && random() % 4 == 0) mask.size[d] = std::int64_t{1} << (own - 1);
      bits -= own;
      rows *= mask.size[d];
      if (random() % 2 == 0) {
        mask.stride[d] = flags;
        flags *= mask.size[d];
      }
    }
    const std::int64_t queries =
        i % 3 == 0 ? 0 : 1 + static_cast<std::int64_t>(random() % static_cast<unsigned long>(rows));
    RowPositions<Number> positions;
    positions.set(mask, queries);
    for (std::int64_t row : {std::int64_t{0}, std::int64_t{1}, rows / 2, rows - 2, rows - 1}) {
      if (row >= 0 && row < rows) check_position(positions, mask, queries, row);
    }
    for (int j = 0; j < 5; ++j) {
      const auto row = static_cast<std::int64_t>(random() % static_cast<unsigned long>(rows));
      check_position(positions, mask, queries, row);
      if (queries != 0) check_position(positions, mask, queries, row / queries * queries);
    }
  }
}

// Memory of which only the pages that are touched exist.
template <class T>
class Sparse {
 public:
  explicit Sparse(std::int64_t size) : bytes_(static_cast<std::size_t>(size) * sizeof(T)) {
    void* const pages = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (pages == MAP_FAILED) throw std::bad_alloc();
    data_ = static_cast<T*>(pages);
  }
  ~Sparse() { munmap(data_, bytes_); }
  Sparse(const Sparse&) = delete;
  Sparse& operator=(const Sparse&) = delete;

  T* data() const { return data_; }

 private:
  std::size_t bytes_;
  T* data_;
};

// Rows of more than 2^31 elements, at their beginning, around positions that are no 32-bit numbers,
// and at their end.
template <class T, RowLayout kLayout, int kPacks>
void check_long_rows(std::int64_t columns, bool shares_mask, int lanes) {
  constexpr int kPack = kPackOf<T, kLayout>;
  KernelArgs<T> args{};
  args.rows = {2, columns, 1};
  args.size = args.rows.count * columns;
  const Sparse<T> x(args.size);
  args.x = x.data();
  Mask mask;
  mask.column_stride = 1;
  mask.dims = 1;
  mask.size[0] = args.rows.count;
  mask.stride[0] = shares_mask ? 0 : columns;
  const Sparse<std::uint8_t> flags(shares_mask ? columns : args.size);
  mask.data = flags.data();
  args.set_masks(mask, /*queries_of_a_row=*/0);
  std::mt19937 random(1);
  const std::int64_t step = std::int64_t{lanes} * kPacks;
  for (std::int64_t number = 0; number < args.rows.count; ++number) {
    const Row<T, kLayout> row(args, number);
    const std::int64_t last = (row.packs - 1) / step * step;
    const std::int64_t middle = (std::int64_t{1} << 31) / kPack / step * step;
    for (const std::int64_t first : {std::int64_t{0}, step, middle - step, middle, last}) {
      const std::int64_t begin = row.begin + first * kPack;
      for (std::int64_t at = begin - kPack; at < begin + step * kPack; ++at) {
        if (at < 0 || at >= args.size) continue;
        x.data()[at] = narrow<T>(Accumulator<T>(at % 120));
        const std::int64_t flag = shares_mask ? at - row.begin : at;
        if (flag >= 0 && flag < args.flag_bytes) flags.data()[flag] = random() % 5 < 3;
      }
      for (int lane = 0; lane < lanes; ++lane) {
        const ThreadSlice<T, kLayout> slice(args, row, first + lane, row.packs, lanes);
        check_reads<T, kLayout, kPacks>(args, row, number, slice, first + lane, lanes);
      }
    }
  }
}

}  // namespace
}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE

int main() {
  namespace softmax = JAX_GPUOPS_NAMESPACE::softmax;
  softmax::check_positions<std::uint32_t>();
  softmax::check_positions<std::uint64_t>();
  softmax::check_dtype<__nv_bfloat16>();  // reading depends on sizes alone, also that of __half
  softmax::check_dtype<float>();
  softmax::check_dtype<double>();
  for (const bool shares_mask : {false, true}) {
    for (const int lanes : {1, 32, 1024}) {
      const std::int64_t columns = std::int64_t{1} << 31;
      constexpr auto kUnaligned = softmax::RowLayout::kMaskedUnaligned;
      constexpr auto kAligned = softmax::RowLayout::kMasked;
      softmax::check_long_rows<__nv_bfloat16, kUnaligned, 4>(columns + 5, shares_mask, lanes);
      softmax::check_long_rows<float, kUnaligned, 4>(columns + 5, shares_mask, lanes);
      softmax::check_long_rows<__nv_bfloat16, kAligned, 4>(columns + 8, shares_mask, lanes);
    }
  }
  std::printf("%lld elements, %lld failed\n", static_cast<long long>(softmax::checks),
              static_cast<long long>(softmax::failures));
  return softmax::failures == 0 ? 0 : 1;
}
