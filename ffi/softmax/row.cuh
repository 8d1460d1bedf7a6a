// A row as production kernels see it: packs of 16 bytes that begin at multiples of 16 bytes, so
// that rows of any length and phase are loaded in whole packs, and stored in whole packs except at
// their ends.
//
//     addresses         |0              |16             |32             |48
//     row (4 bytes)             x0  x1  x2  x3  x4  x5  x6  x7  x8  x9
//     packs             |--- pack 0 ----|--- pack 1 ----|--- pack 2 ----|
//                        .   .  x0  x1   x2  x3  x4  x5   x6  x7  x8  x9
//
// Short rows may use packs of one element: see warp_layout().
//
// Elements that do not take part, because they belong to neighbouring rows or are masked, are
// replaced on load by a value that changes neither the maximum nor the sum.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "core/cuda.h"
#include "core/integer.h"
#include "core/ptx/product.cuh"
#include "core/ptx/shift.cuh"
#include "core/vector.h"
#include "softmax/edges.cuh"
#include "softmax/softmax.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {

// The rows of a Problem as a kernel sees them. Offsets are 64-bit: an array may have more than
// 2^32 elements, and so may a row.
struct Rows {
  std::int64_t count;
  std::int64_t columns;
  std::int64_t inner;

  __device__ std::int64_t begin(std::int64_t row) const {
    return inner == 1 ? row * columns : (row / inner) * columns * inner + row % inner;
  }
};

// LogSumExps with typed pointers.
template <class T>
struct RowResults {
  using A = Accumulator<T>;
  T* logsumexp;
  A* maximum;
  A* log_sum;

  __device__ void write(std::int64_t row, A lse) const {
    if (logsumexp != nullptr) logsumexp[row] = narrow<T>(lse);
  }

  __device__ bool has_parts() const { return log_sum != nullptr; }
  // largest, log_of_sum: the parts, if the row is regular.
  __device__ void write_parts(std::int64_t row, A lse, bool regular, A largest,
                              A log_of_sum) const {
    maximum[row] = regular ? largest : A(0);
    log_sum[row] = regular ? log_of_sum : lse;
  }
};

template <class T>
RowResults<T> make_row_results(const LogSumExps& logsumexps) {
  using A = Accumulator<T>;
  return {static_cast<T*>(logsumexps.result), static_cast<A*>(logsumexps.maximum),
          static_cast<A*>(logsumexps.log_sum)};
}

// The query of a row, and where its flags begin. No quotient waits for another one, and each is a
// multiplication as in Divisor. Exact for numbers of rows, and offsets, of one bit less than
// `Number` has.
template <class Number>
struct RowPositions {
  static constexpr int kBits = 8 * sizeof(Number);
  using Product = std::conditional_t<kBits == 32, std::uint64_t, unsigned __int128>;

  // Of quotient d: by the product of the mask's first d sizes, and for d = 0 by `queries`.
  Number multiplier[Mask::kMaxDims];
  Number step[Mask::kMaxDims];
  Number queries;  // 0: rows have no queries
  std::uint8_t shift[Mask::kMaxDims];

  void set(const Mask& mask, std::int64_t queries_of_a_row) {
    *this = {};
    queries = static_cast<Number>(queries_of_a_row);
    set_divisor(0, queries_of_a_row);
    std::int64_t before = 1;
    for (int d = 0; d < mask.dims; ++d) {
      step[d] = static_cast<Number>(mask.stride[d]);
      if (d > 0) {
        step[d] -= static_cast<Number>(mask.size[d - 1] * mask.stride[d - 1]);
        set_divisor(d, before);
      }
      before *= mask.size[d];
    }
  }

  __device__ __forceinline__ Number query(Number row) const {
    return row - quotient(row, 0) * queries;
  }

  // The sum over d of step[d] times the quotient of the row by the product of the first d sizes.
  __device__ __forceinline__ Number offset(Number row) const {
    Number sum = row * step[0];
#pragma unroll(kBits == 32 ? Mask::kMaxDims : 1)
    for (int d = 1; d < Mask::kMaxDims; ++d) sum += quotient(row, d) * step[d];
    return sum;
  }

 private:
  __device__ __forceinline__ Number quotient(Number row, int d) const {
    return high_product(2 * row, multiplier[d]) >> shift[d];
  }

  void set_divisor(int d, std::int64_t number) {
    if (number < 1) return;  // all quotients are 0
    shift[d] = static_cast<std::uint8_t>(log2_up(number));
    const auto divisor = static_cast<Number>(number);
    const auto power = Product{1} << (kBits - 1 + shift[d]);
    multiplier[d] = static_cast<Number>((power + divisor - 1) / divisor);
  }
};

// Buffers with typed pointers, and what else kernels must know of the problem.
template <class T>
struct KernelArgs {
  using A = Accumulator<T>;
  // Each line of the constant cache that a short kernel reads costs it a noticeable wait. The first
  // two, of 64 bytes, have what kernels of most functions need, with masks too.
  const T* x;
  T* y;
  Rows rows;
  A scale;
  Function function;
  bool packed;  // x, t and y begin at multiples of 16 bytes
  // Whether there is a mask with a flag for each element, or for each row.
  bool has_element_flags;
  bool has_row_flags;
  bool has_small_positions;
  RowPositions<std::uint32_t> small_positions;
  const std::uint8_t* flags;  // the mask; null: there is none
  const T* t;
  // The third line: what rows of no whole packs, labels and elementwise functions need.
  std::int64_t size;        // elements of x
  std::int64_t flag_bytes;  // of the mask
  const A* maximum;
  const A* log_sum;
  const A* g;
  const void* labels;
  bool wide_labels;
  A* loss;
  RowResults<T> row_results;
  std::int64_t flag_stride;  // along the columns
  RowPositions<std::uint64_t> positions;

  // `rows` must be set before.
  void set_masks(const Mask& mask, std::int64_t queries) {
    has_element_flags = mask.data != nullptr && mask.column_stride != 0;
    has_row_flags = mask.data != nullptr && mask.column_stride == 0;
    flags = mask.data;
    flag_stride = mask.column_stride;
    flag_bytes = (rows.columns - 1) * mask.column_stride + 1;
    for (int d = 0; d < mask.dims; ++d) flag_bytes += (mask.size[d] - 1) * mask.stride[d];
    constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
    has_small_positions = rows.count <= kMost && rows.columns <= kMost && flag_bytes <= kMost;
    if (has_small_positions) {
      small_positions.set(mask, queries);
    } else {
      positions.set(mask, queries);
    }
  }

  // True if there is one result per row and none per element.
  __device__ bool reduces() const { return y == nullptr; }

  // 0, which the compiler cannot know.
  __device__ std::uint32_t nothing() const { return static_cast<std::uint32_t>(size >> 63); }

  // The column of the row's label, or a negative number if there is none. As in NumPy, the label -1
  // is the last column.
  __device__ std::int64_t label(std::int64_t row) const {
    const std::int64_t given = wide_labels ? static_cast<const std::int64_t*>(labels)[row]
                                           : static_cast<const std::int32_t*>(labels)[row];
    return column_of(given);
  }

  // The same, and a negative number if there are no labels. A branch around the load would delay it
  // until the loads before it have arrived, so without labels it reads something else.
  __device__ std::int64_t label_if_any(std::int64_t row) const {
    const bool has_labels = labels != nullptr;
    const auto* const words = static_cast<const std::int32_t*>(has_labels ? labels : maximum);
    const std::int32_t low = words[wide_labels ? 2 * row : row];
    const std::int32_t high = wide_labels ? words[2 * row + 1] : low >> 31;
    const auto given = static_cast<std::int64_t>(
        std::uint64_t{static_cast<std::uint32_t>(high)} << 32 | static_cast<std::uint32_t>(low));
    return has_labels ? column_of(given) : -1;
  }

 private:
  __device__ std::int64_t column_of(std::int64_t label) const {
    const std::int64_t column = label < 0 ? label + rows.columns : label;
    return column < rows.columns ? column : -1;
  }
};

// For compute capability 9.0 arguments begin 16 bytes after the beginning of a line.
static_assert(offsetof(KernelArgs<float>, size) == 2 * 64 - 16);

// Which elements of a row take part.
template <class T>
class RowMask {
 public:
  RowMask() = default;  // no element takes part
  __device__ __forceinline__ RowMask(const KernelArgs<T>& args, std::int64_t row)
      : readable_(args.rows.columns), stride_(args.flag_stride), flags_(args.flags) {
    // Branches that few problems would take do not pay: all dims are computed.
    if (args.has_small_positions) {
      place(args.small_positions, row);
    } else {
      place(args.positions, row);
    }
    if (args.has_row_flags && *flags_ == 0) readable_ = 0;
    if (!args.has_element_flags) flags_ = nullptr;
  }

  // Columns from here on do not take part.
  __device__ std::int64_t readable() const { return readable_; }
  // Of the columns before, those take part whose byte at flags() + column * stride() is not 0; all
  // of them if flags() is null.
  __device__ const std::uint8_t* flags() const { return flags_; }
  __device__ std::int64_t stride() const { return stride_; }

  __device__ bool operator()(std::int64_t column) const {
    return column < readable_ && (flags_ == nullptr || flags_[column * stride_] != 0);
  }

 private:
  template <class Number>
  __device__ __forceinline__ void place(const RowPositions<Number>& positions, std::int64_t row) {
    const auto number = static_cast<Number>(row);
    const auto columns = static_cast<Number>(readable_);
    const Number query = positions.query(number);
    const Number readable = positions.queries != 0 && query < columns ? query + 1 : columns;
    readable_ = static_cast<std::int64_t>(readable);
    flags_ += positions.offset(number);
  }

  std::int64_t readable_ = 0;
  std::int64_t stride_ = 0;
  const std::uint8_t* flags_ = nullptr;
};

template <RowLayout kLayout>
inline constexpr bool kIsAligned = kLayout == RowLayout::kAligned || kLayout == RowLayout::kSmall ||
                                   kLayout == RowLayout::kMasked || kLayout == RowLayout::kElements;
template <RowLayout kLayout>
inline constexpr bool kIsUnaligned =
    kLayout == RowLayout::kUnaligned || kLayout == RowLayout::kMaskedUnaligned;
template <RowLayout kLayout>
inline constexpr bool kHasMask =
    kLayout == RowLayout::kMasked || kLayout == RowLayout::kMaskedUnaligned ||
    kLayout == RowLayout::kElements || kLayout == RowLayout::kStrided;

// Elements of a pack: one for kElements, so that rows of any length are aligned.
template <class T, RowLayout kLayout>
inline constexpr int kPackOf = kLayout == RowLayout::kElements ? 1 : kWidestPack<T>;

// The type of the indices of rows, elements and packs. Short kernels spend their time before the
// first load, and half of that on 64-bit arithmetic.
template <RowLayout kLayout>
using Number = std::conditional_t<kLayout == RowLayout::kSmall, std::int32_t, std::int64_t>;

// Row number `row`.
template <class T, RowLayout kLayout>
struct Row {
  static constexpr int kPack = kPackOf<T, kLayout>;

  // A row that does not exist has no packs.
  __device__ __forceinline__ Row(const KernelArgs<T>& args, Number<kLayout> row, bool exists = true)
      : begin(0), packs(0) {
    if constexpr (kHasMask<kLayout>) {
      // The mask of any row will do, and a branch around it would take more instructions.
      if (!exists) row = 0;
    } else {
      if (!exists) return;
    }
    const auto columns = static_cast<Number<kLayout>>(args.rows.columns);
    begin = kLayout == RowLayout::kStrided ? args.rows.begin(row) : row * columns;
    if constexpr (kIsAligned<kLayout>) {
      packs = static_cast<std::make_unsigned_t<Number<kLayout>>>(columns) / kPack;
    } else {
      if constexpr (kIsUnaligned<kLayout>) phase = static_cast<int>(begin) & (kPack - 1);
      packs = static_cast<std::uint64_t>(phase + args.rows.columns + kPack - 1) / kPack;
    }
    if constexpr (kHasMask<kLayout>) {
      mask = RowMask<T>(args, row);
      if (!exists) packs = 0;
    }
  }

  Number<kLayout> begin;  // index of its first element in x
  Number<kLayout> packs;  // number of packs that cover it
  int phase = 0;          // elements from the first pack's address to the row's
  RowMask<T> mask;
};

__device__ inline int clamped_to_int(std::int32_t value) { return value; }
__device__ inline int clamped_to_int(std::int64_t value) {
  constexpr std::int64_t kMost = std::numeric_limits<int>::max();
  return static_cast<int>(value < kMost ? value : kMost);
}

// The packs first, first + stride ... below `end` of a row, which a thread holds at a time.
// Positions within a slice are 32-bit numbers relative to its first element.
template <class T, RowLayout kLayout>
class ThreadSlice {
 public:
  static constexpr int kPack = kPackOf<T, kLayout>;
  using Elements = RegisterPack<T, kPack>;

  // Whether it pays to test first whether all of a thread's packs lie in the row, before testing
  // each: moves and predicates are a third of the instructions of masked rows. But with unaligned
  // rows many warps would diverge, and 16-bit rows of clusters need the registers.
  static constexpr bool kAsksOnce =
      kLayout == RowLayout::kMasked || (kLayout == RowLayout::kAligned && sizeof(T) >= 4);

  // Columns are 32-bit numbers if `first` and `end` are.
  template <class First, class End>
  __device__ __forceinline__ ThreadSlice(const KernelArgs<T>& args, const Row<T, kLayout>& row,
                                         First first, End end, int stride)
      : stride_(stride * kPack) {
    constexpr bool kIsShort = sizeof(first) <= 4 && sizeof(end) <= 4;
    using Column = std::conditional_t<kIsShort, std::int32_t, std::int64_t>;
    const Column column = static_cast<Column>(first) * kPack - row.phase;
    end_ = clamped_to_int((static_cast<Column>(end) - static_cast<Column>(first)) * kPack);
    at_ = row.begin + column * (kLayout == RowLayout::kStrided ? args.rows.inner : 1);
    if constexpr (!kIsAligned<kLayout>) {
      begin_ = column < 0 ? static_cast<int>(-column) : 0;
      const int row_end = clamped_to_int(static_cast<Column>(args.rows.columns) - column);
      if (row_end < end_) end_ = row_end;
    }
    if constexpr (kHasMask<kLayout>) {
      const Column left = static_cast<Column>(row.mask.readable()) - column;
      const int readable = left > 0 ? clamped_to_int(left) : 0;
      readable_ = readable < end_ ? readable : end_;
      if constexpr (kLayout == RowLayout::kMaskedUnaligned) {
        if (args.has_element_flags && readable_ > 0) align_mask(args, row.mask.flags() + column);
      } else if (args.has_element_flags) {
        mask_ =
            row.mask.flags() + column * (kLayout == RowLayout::kStrided ? row.mask.stride() : 1);
      }
    }
    whole_end_ = readable();
    if constexpr (kIsUnaligned<kLayout>) {
      const int safe = clamped_to_int(args.size - at_) - (kPack - 1);
      if (safe < whole_end_) whole_end_ = safe;
    }
  }

  // The index in an array at which the first pack begins.
  __device__ __forceinline__ Number<kLayout> begin() const { return at_; }

  // Whether the slice has a pack p.
  __device__ __forceinline__ bool has(int p) const { return p * stride_ < end_; }

  // The position of element i of pack p.
  __device__ __forceinline__ int position(int p, int i) const { return p * stride_ + i; }

  // An operand of read(): packs of `from`, which is laid out like x, with `fill` in place of
  // elements that do not take part. Packs that lie entirely within the array are loaded from
  // `whole`, the address of the first pack, which may be in a copy.
  template <int kPacks>
  struct Operand {
    const T* from;
    const T* whole;
    T fill;
    Elements (&pack)[kPacks];
  };
  template <int kPacks>
  __device__ __forceinline__ static Operand<kPacks> operand(const T* from, const T* whole, T fill,
                                                            Elements (&pack)[kPacks]) {
    return {from, whole, fill, pack};
  }

  // Reads operands. All loads are issued before any of their values is used.
  template <bool kOnce = kAsksOnce, int kPacks, class... More>
  __device__ __forceinline__ void read(const KernelArgs<T>& args, const Operand<kPacks>& first,
                                       const More&... more) const {
    const auto each = [&](auto&& visit) {
      visit(first);
      (visit(more), ...);
    };
    if (kOnce && fills<kPacks>(readable())) {
      each([&](const auto& operand) {
#pragma unroll
        for (int p = 0; p < kPacks; ++p) {
          operand.pack[p] = read_pack<kPack>(operand.whole + p * stride_);
        }
      });
      if constexpr (kHasFlags) {
        if (args.has_element_flags) apply_mask<kAll, kPacks>(each);
      }
      return;
    }
    each([&](const auto& operand) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        operand.pack[p] = filled<kPack>(operand.fill);
        if (reads_whole(p)) operand.pack[p] = read_pack<kPack>(operand.whole + p * stride_);
      }
    });
    if constexpr (kIsUnaligned<kLayout>) {
      // The last row's last pack may reach beyond the array.
      if (whole_end_ < readable() && readable() > 0) {
        each([&](const auto& operand) { read_last_of_array(args, operand.from, operand.pack); });
      }
    }
    if constexpr (kHasFlags) {
      if (args.has_element_flags) {
        apply_mask<kSome, kPacks>(each);
        if constexpr (kIsUnaligned<kLayout>) return;
      }
    }
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if constexpr (kLayout == RowLayout::kStrided) {
        if (!has(p)) continue;
        each([&](const auto& operand) {
          operand.pack[p] = read_elements(args, operand.from, p);
          replace_unkept(args, p, operand.fill, operand.pack[p]);
        });
      } else if constexpr (kLayout == RowLayout::kMasked || kIsUnaligned<kLayout>) {
        const int first = position(p, 0);
        if (first < readable() && !inside(p)) {
          const Flags flags = read_flags<kPacks>(p);
          each([&](const auto& operand) { replace_unset(flags, operand.fill, operand.pack[p]); });
        }
      }
    }
  }

  // Writes one pack after the other, in a loop that is not unrolled, for rare cases.
  template <int kPacks, class PackOf>
  __device__ __forceinline__ void write_rolled(const KernelArgs<T>& args, PackOf&& pack_of) const {
#pragma unroll 1
    for (int p = 0; p < kPacks; ++p) {
      if (!has(p)) continue;
      if constexpr (kIsAligned<kLayout>) {
        write_global_pack(pack_of(p), args.y + at_ + position(p, 0));
      } else {
        write_elements(args, position(p, 0), pack_of(p));
      }
    }
  }

  // Which elements of pack p take part: a bit for each.
  __device__ __forceinline__ unsigned kept(const KernelArgs<T>& args, int p) const {
    unsigned bits = within(p, readable());
    if constexpr (kMaskLiesAlike) {
      if (args.has_element_flags && bits != 0) {
        Pack<std::uint8_t, kPack> flags;
        const Flags read = read_pack<kPack>(mask_ + p * stride_);
        std::memcpy(&flags, &read, sizeof(flags));
#pragma unroll
        for (int i = 0; i < kPack; ++i) {
          if (flags.element[i] == 0) bits &= ~(1u << i);
        }
      }
    } else if constexpr (kHasMask<kLayout>) {
      if (args.has_element_flags) {
        // Rare, so optimized for few instructions and registers. Only the row's flags are read.
        const std::uint8_t* const flags = mask_ + mask_phase_;
#pragma unroll 1
        for (int i = 0; i < kPack; ++i) {
          const bool reads = (bits >> i & 1) != 0;
          if (reads && flags[(p * stride_ + i) * args.flag_stride] == 0) {
            bits &= ~(1u << i);
          }
        }
      }
    }
    return bits;
  }

  // Replaces elements of pack p that do not take part by `fill`.
  __device__ __forceinline__ void replace_unkept(const KernelArgs<T>& args, int p, T fill,
                                                 Elements& pack) const {
    const unsigned bits = kept(args, p);
    replace_unless([&](int i) { return (bits >> i & 1) != 0; }, fill, pack);
  }

  // Writes the packs pack_of(p) to y, as far as they lie in the row.
  template <int kPacks, bool kOnce = kAsksOnce, class PackOf>
  __device__ __forceinline__ void write(const KernelArgs<T>& args, PackOf&& pack_of) const {
    if (kOnce && fills<kPacks>(end_)) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        write_global_pack(pack_of(p), args.y + at_ + position(p, 0));
      }
      return;
    }
    if constexpr (kLayout == RowLayout::kElements) {
      // Computing a pack that is not stored costs less than a branch for each pack.
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const Elements pack = pack_of(p);
        if (has(p)) write_pack(pack, args.y + at_ + position(p, 0));
      }
      return;
    }
    if constexpr (kIsUnaligned<kLayout>) {
      write_unaligned<kPacks>(args, pack_of);
    } else {
      T* const to = computed_once(args.y + at_);
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        if (!has(p)) continue;
        if constexpr (kLayout == RowLayout::kStrided) {
          write_elements(args, position(p, 0), pack_of(p));
        } else {
          write_global_pack(pack_of(p), to + position(p, 0));
        }
      }
    }
  }

 private:
  // Whether the mask's packs are laid out like those of the row.
  static constexpr bool kMaskLiesAlike =
      kLayout == RowLayout::kMasked || kLayout == RowLayout::kElements;
  // Whether flags are read in packs.
  static constexpr bool kHasFlags = kHasMask<kLayout> && kLayout != RowLayout::kStrided;
  using Flags = RegisterPack<std::uint8_t, kPack>;
  struct Halves {
    std::uint64_t half[2];
  };
  static constexpr unsigned kWhole = (1u << kPack) - 1;

  template <int kPacks>
  __device__ __forceinline__ bool fills(int end) const {
    return begin_ <= 0 && position(kPacks - 1, kPack) <= end;
  }

  // The end of the elements that are read.
  __device__ __forceinline__ int readable() const { return kHasMask<kLayout> ? readable_ : end_; }

  __device__ __forceinline__ Number<kLayout> offset(const KernelArgs<T>& args, int position) const {
    return at_ + position * (kLayout == RowLayout::kStrided ? args.rows.inner : 1);
  }

  // Packs may reach into the neighbouring rows, but not beyond the array.
  __device__ __forceinline__ bool reads_whole(int p) const {
    return kLayout != RowLayout::kStrided && p * stride_ < whole_end_;
  }

  // True if all elements of pack p are in the part of the row that is read.
  __device__ __forceinline__ bool inside(int p) const {
    return p * stride_ >= begin_ && p * stride_ + kPack <= readable();
  }

  // A flag for each element of pack p: a byte of 1 if it is in the part of the row that is read,
  // else 0. `kPacks`: the packs that the thread holds.
  template <int kPacks>
  __device__ __forceinline__ Flags read_flags(int p) const {
    const std::uint64_t ones = 0x0101010101010101;
    // Counted in bits of flags: for a whole row they could overflow an int, but not for the packs
    // of a thread.
    const int end = 8 * (readable() < position(kPacks, 0) ? readable() : position(kPacks, 0));
    const int left = end - 8 * p * stride_;
    std::uint64_t flags = ones & ~shifted_left(~std::uint64_t{0}, left > 0 ? left : 0);
    if (p == 0) flags = shifted_left(flags >> 8 * begin_, 8 * begin_);
    return __builtin_bit_cast(Flags, static_cast<typename WordOf<kPack>::type>(flags));
  }

  // Writes packs that lie entirely in the row with one store each. The partial pack at the end is
  // written after the loop, so that its stores are compiled once and not for each p.
  template <int kPacks, class PackOf>
  __device__ __forceinline__ void write_unaligned(const KernelArgs<T>& args,
                                                  PackOf&& pack_of) const {
    T* const y = computed_once(args.y + at_);
    int last = 0;  // the thread's last pack
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int first = position(p, 0);
      if (first >= end_) continue;
      last = p;
      if (p == 0 && begin_ > 0) {
        if (kPack <= end_) write_last(pack_of(p), kPack - begin_, y + kPack);
      } else if (first + kPack <= end_) {
        write_global_pack(pack_of(p), y + first);
      }
    }
    const int first = position(last, 0);
    const int at_end = end_ - first;
    if (at_end <= 0 || at_end >= kPack) return;
    const Elements pack = pack_of(last);
    if (begin_ > 0 && last == 0) {
      write_elements(args, 0, pack);
    } else {
      write_first(pack, at_end, y + first);
    }
  }

  // Bit i is set if element i of pack p lies in the row and before `end`.
  __device__ __forceinline__ unsigned within(int p, int end) const {
    const int before = begin_ - p * stride_;
    const int until = end - p * stride_;
    const unsigned from = before <= 0 ? kWhole : before < kPack ? kWhole << before : 0;
    const unsigned to = until >= kPack ? kWhole : until > 0 ? (1u << until) - 1 : 0;
    return from & to;
  }

  __device__ __forceinline__ void write_elements(const KernelArgs<T>& args, int first,
                                                 const Elements& pack) const {
    Pack<T, kPack> elements;
    std::memcpy(&elements, &pack, sizeof(pack));
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      if (first + i >= begin_ && first + i < end_) {
        args.y[offset(args, first + i)] = elements.element[i];
      }
    }
  }

  template <int kPacks>
  __device__ __forceinline__ void read_last_of_array(const KernelArgs<T>& args, const T* from,
                                                     Elements (&pack)[kPacks]) const {
    const int last = (readable() - 1) / stride_;
    if (last >= kPacks || reads_whole(last)) return;
    const Elements elements = read_elements(args, from, last);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (p == last) pack[p] = elements;
    }
  }

  // Loads elements one by one and shifts each into its place: an index known only at run time would
  // move the pack from registers to local memory.
  __device__ __forceinline__ Elements read_elements(const KernelArgs<T>& args, const T* from,
                                                    int p) const {
    const unsigned bits = within(p, readable());
    Halves halves{};
#pragma unroll 1
    for (int i = 0; i < kPack; ++i) {
      if ((bits >> i & 1) == 0) continue;
      typename WordOf<sizeof(T)>::type word;
      const T element = from[offset(args, p * stride_ + i)];
      std::memcpy(&word, &element, sizeof(word));
      const std::uint64_t shifted = std::uint64_t{word} << (i * 8 * sizeof(T) % 64);
      halves.half[0] |= i < kPack / 2 ? shifted : 0;
      halves.half[1] |= i < kPack / 2 ? 0 : shifted;
    }
    Elements pack;
    std::memcpy(&pack, &halves, sizeof(pack));
    return pack;
  }

  // Which packs of the slice are read whole: all, or those for which reads_whole() is true.
  static constexpr bool kAll = true;
  static constexpr bool kSome = false;

  // Applies the mask to the operands that each() visits.
  template <bool kWhich, int kPacks, class Each>
  __device__ __forceinline__ void apply_mask(const Each& each) const {
    Flags flags[kPacks];
    if constexpr (kMaskLiesAlike) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        // Packs that are not read have the fill value already.
        if constexpr (kWhich == kSome) flags[p] = {};
        if (kWhich == kAll || reads_whole(p)) flags[p] = read_pack<kPack>(mask_ + p * stride_);
      }
    } else {
      read_shifted_flags(flags);
    }
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if constexpr (kIsUnaligned<kLayout>) {
        const Flags read = read_flags<kPacks>(p);
#pragma unroll
        for (int i = 0; i < kFlagRegisters; ++i) flags[p].reg[i] &= read.reg[i];
      }
      each([&](const auto& operand) { replace_unset(flags[p], operand.fill, operand.pack[p]); });
    }
  }

  // The flags of a pack of kMaskedUnaligned, which begin at any byte, are read in aligned words:
  //
  //     words   |--- 0 ---|--- 1 ---|--- 2 ---|
  //     flags        |--------------------|
  //
  // All packs of a slice have their flags at the same phase.
  static constexpr int kFlagWord = kPack < 4 ? kPack : 4;  // bytes
  static constexpr int kFlagRegisters = kPack / kFlagWord;
  static constexpr int kFlagWords = kFlagRegisters + 1;
  using FlagWord = typename WordOf<kFlagWord>::type;

  // `first`: the flag of the first pack's first element. Pointers are computed as offsets from the
  // kernel's argument: of one made from an integer, the compiler would not know that it points to
  // global memory.
  __device__ __forceinline__ void align_mask(const KernelArgs<T>& args, const std::uint8_t* first) {
    const std::uint8_t* const array = args.flags;
    const std::int64_t offset = first - array;
    const auto address = reinterpret_cast<std::uintptr_t>(array) + offset;
    mask_phase_ = static_cast<int>(address % kFlagWord);
    const std::int64_t word = offset - mask_phase_;
    mask_ = array + word;
    mask_begin_ = word < 0 ? static_cast<int>(-word) : 0;
    mask_end_ = clamped_to_int(args.flag_bytes - word);
  }

  // For rows with a mask of any phase. No byte outside the mask's array is read.
  template <int kPacks>
  __device__ __forceinline__ void read_shifted_flags(Flags (&flags)[kPacks]) const {
    const int held = position(kPacks, 0);
    const int needed = (readable_ < held ? readable_ : held) + mask_phase_;
    const int whole = mask_end_ - (kFlagWord - 1);
    const int end = needed < whole ? needed : whole;
    FlagWord words[kPacks][kFlagWords];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
#pragma unroll
      for (int w = 0; w < kFlagWords; ++w) {
        words[p][w] = 0;
        const int at = p * stride_ + w * kFlagWord;
        // Only words of a row's first pack may begin before the array.
        const bool begins = at >= kPack + kFlagWord || at >= mask_begin_;
        if (begins && at < end) {
          words[p][w] = *reinterpret_cast<const FlagWord*>(mask_ + at);
        }
      }
    }
    if (mask_begin_ % kFlagWord != 0) read_cut_word(mask_begin_, words);
    if (mask_end_ % kFlagWord != 0 && whole < needed) read_cut_word(mask_end_, words);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
#pragma unroll
      for (int w = 0; w + 1 < kFlagWords; ++w) {
        const std::uint64_t both = std::uint64_t{words[p][w + 1]} << (8 * kFlagWord) | words[p][w];
        flags[p].reg[w] = static_cast<FlagWord>(both >> (8 * mask_phase_));
      }
    }
  }

  // Reads the word in which the mask's array begins or ends, at `cut`, for the packs that have it.
  template <int kPacks>
  __device__ __forceinline__ void read_cut_word(int cut,
                                                FlagWord (&words)[kPacks][kFlagWords]) const {
    const int begin = cut - cut % kFlagWord;
    std::uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < kFlagWord; ++i) {
      if (begin + i >= mask_begin_ && begin + i < mask_end_) {
        word |= std::uint32_t{mask_[begin + i]} << (8 * i);
      }
    }
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
#pragma unroll
      for (int w = 0; w < kFlagWords; ++w) {
        if (p * stride_ + w * kFlagWord == begin) words[p][w] = static_cast<FlagWord>(word);
      }
    }
  }

  Number<kLayout> at_;
  int stride_;
  int end_;
  // Where the row begins, and where elements that take part end, for the layouts that need them.
  int begin_ = 0;
  int readable_ = 0;
  // Packs that begin before here are read whole.
  int whole_end_;
  const std::uint8_t* mask_ = nullptr;
  // For kMaskedUnaligned, distances in bytes: from mask_ to the first flag, to the beginning of the
  // mask's array if that comes after mask_, and to its end.
  int mask_phase_ = 0;
  int mask_begin_ = 0;
  int mask_end_ = 0;
};

}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
