// A row as production kernels see it: packs of 16 bytes that begin at multiples of 16 bytes, so
// that rows of any length and phase load whole packs, and store whole packs but at their ends.
//
//     addresses         |0              |16             |32             |48
//     row (4 bytes)             x0  x1  x2  x3  x4  x5  x6  x7  x8  x9
//     packs             |--- pack 0 ----|--- pack 1 ----|--- pack 2 ----|
//                        .   .  x0  x1   x2  x3  x4  x5   x6  x7  x8  x9
//
// Elements that do not take part, because they belong to the neighbours or a mask says so, are
// replaced by one that changes no maximum and no sum as soon as they are read.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#include "core/integer.h"
#include "core/vector.h"
#include "softmax/rows.cuh"
#include "softmax/softmax.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace softmax {

// Buffers with types, and what else a kernel must know of a problem.
template <class T>
struct Tensors {
  using A = Accumulator<T>;
  // What all kernels need comes first: it fits into two lines of the constant cache, each of which
  // costs a short kernel a noticeable wait.
  const T* x;
  T* y;
  Rows rows;
  A scale;
  Function function;
  bool packed;  // x, t and y begin at multiples of 16 bytes
  RowResults<T> row_results;
  A* loss;
  const T* t;
  const A* maximum;
  const A* log_sum;
  const A* g;
  const void* labels;
  bool wide_labels;
  std::int64_t size;  // elements of x
  std::int64_t queries;
  Mask mask;
  Divisor by_queries;
  Divisor by_mask_size[Mask::kMaxDims];
  std::int64_t mask_bytes;

  // True if there is a result for each row, and none for its elements.
  __device__ bool reduces() const { return y == nullptr; }

  // 0, but the compiler cannot tell.
  __device__ std::uint32_t nothing() const { return static_cast<std::uint32_t>(size >> 63); }

  // The column that the row's label names, or -1 for none: as in numpy, -1 is the last one.
  __device__ std::int64_t label(std::int64_t row) const {
    const std::int64_t given = wide_labels ? static_cast<const std::int64_t*>(labels)[row]
                                           : static_cast<const std::int32_t*>(labels)[row];
    const std::int64_t column = given < 0 ? given + rows.columns : given;
    return column < rows.columns ? column : -1;
  }
};

// Which elements of a row take part.
template <class T>
class Selection {
 public:
  Selection() = default;  // nothing
  __device__ __forceinline__ Selection(const Tensors<T>& tensors, std::int64_t row)
      : readable_(tensors.rows.columns), stride_(tensors.mask.column_stride) {
    // Divisions take as long as a hundred elements, and few problems have so many rows as to need
    // them.
    if (tensors.rows.count <= std::numeric_limits<std::int32_t>::max()) {
      select(tensors, static_cast<std::uint32_t>(row), tensors.by_queries,
             [&](int d) { return tensors.by_mask_size[d]; });
    } else {
      select(tensors, row, Division{tensors.queries},
             [&](int d) { return Division{tensors.mask.size[d]}; });
    }
    if (mask_ != nullptr && stride_ == 0) {
      if (*mask_ == 0) readable_ = 0;
      mask_ = nullptr;
    }
  }

  // Columns from here on do not.
  __device__ std::int64_t readable() const { return readable_; }
  // Of the columns before, those do whose byte at mask() + column * stride() is not 0, or all.
  __device__ const std::uint8_t* mask() const { return mask_; }
  __device__ std::int64_t stride() const { return stride_; }

  __device__ bool operator()(std::int64_t column) const {
    return column < readable_ && (mask_ == nullptr || mask_[column * stride_] != 0);
  }

 private:
  struct Division {
    std::int64_t divisor;
    __device__ std::int64_t quotient(std::int64_t dividend) const { return dividend / divisor; }
  };

  template <class Number, class ByQueries, class BySize>
  __device__ __forceinline__ void select(const Tensors<T>& tensors, Number row,
                                         const ByQueries& by_queries, BySize&& by_size) {
    if (tensors.queries != 0) {
      const std::int64_t query = row - by_queries.quotient(row) * tensors.queries;
      if (query < readable_) readable_ = query + 1;
    }
    if (tensors.mask.data == nullptr) return;
    mask_ = tensors.mask.data;
#pragma unroll
    for (int d = 0; d < Mask::kMaxDims; ++d) {
      if (d == tensors.mask.dims) break;
      // Of the last dim there is no more than what is left.
      const bool last = d + 1 == tensors.mask.dims;
      const Number rest = last ? 0 : by_size(d).quotient(row);
      mask_ += (row - rest * tensors.mask.size[d]) * tensors.mask.stride[d];
      row = rest;
    }
  }

  std::int64_t readable_ = 0;
  std::int64_t stride_ = 0;
  const std::uint8_t* mask_ = nullptr;
};

using Kind = RowLayout;

template <Kind kKind>
inline constexpr bool kIsEven =
    kKind == Kind::kEven || kKind == Kind::kSmall || kKind == Kind::kMasked;
template <Kind kKind>
inline constexpr bool kIsRagged = kKind == Kind::kRagged || kKind == Kind::kMaskedRagged;
template <Kind kKind>
inline constexpr bool kHasMask =
    kKind == Kind::kMasked || kKind == Kind::kMaskedRagged || kKind == Kind::kAny;

// The number of a row, or of an element or a pack. Short kernels spend their time on what comes
// before the first load, of which 64-bit arithmetic is half.
template <Kind kKind>
using Number = std::conditional_t<kKind == Kind::kSmall, std::int32_t, std::int64_t>;

// Row number `row`.
template <class T, Kind kKind>
struct Row {
  static constexpr int kPack = kWidestPack<T>;

  // A row that does not exist has no packs.
  __device__ __forceinline__ Row(const Tensors<T>& tensors, Number<kKind> row, bool exists = true)
      : begin(0), packs(0) {
    if (!exists) return;
    const auto columns = static_cast<Number<kKind>>(tensors.rows.columns);
    begin = kKind == Kind::kAny ? tensors.rows.begin(row) : row * columns;
    if constexpr (kIsEven<kKind>) {
      packs = columns / kPack;
    } else {
      if constexpr (kIsRagged<kKind>) phase = static_cast<int>(begin % kPack);
      packs = (phase + tensors.rows.columns + kPack - 1) / kPack;
    }
    if constexpr (kHasMask<kKind>) selection = Selection<T>(tensors, row);
  }

  Number<kKind> begin;  // of its first element in x
  Number<kKind> packs;  // that cover it
  int phase = 0;        // elements from the first pack's address to the row's
  Selection<T> selection;
};

__device__ inline int clamped_to_int(std::int32_t value) { return value; }
__device__ inline int clamped_to_int(std::int64_t value) {
  constexpr std::int64_t kMost = std::numeric_limits<int>::max();
  return static_cast<int>(value < kMost ? value : kMost);
}

// The packs first, first + stride ... below `end` of a row: a thread's share of a stretch of it.
// Within a stretch positions are 32-bit numbers, relative to the share's first element.
template <class T, Kind kKind>
class Stretch {
 public:
  static constexpr int kPack = kWidestPack<T>;
  using Elements = RegisterPack<T, kPack>;

  // Whether it pays to ask once whether all of a thread's packs lie in the row, before asking for
  // each: moves and predicates are a third of the instructions of masked rows, but ragged rows have
  // threads of both sorts in many warps, and 16-bit rows of clusters need the registers.
  static constexpr bool kAsksOnce =
      kKind == Kind::kMasked || (kKind == Kind::kEven && sizeof(T) >= 4);

  __device__ __forceinline__ Stretch(const Tensors<T>& tensors, const Row<T, kKind>& row,
                                     Number<kKind> first, Number<kKind> end, int stride)
      : stride_(stride * kPack), end_(clamped_to_int((end - first) * kPack)) {
    const Number<kKind> column = first * kPack - row.phase;
    at_ = row.begin + column * (kKind == Kind::kAny ? tensors.rows.inner : 1);
    if constexpr (!kIsEven<kKind>) {
      begin_ = column < 0 ? static_cast<int>(-column) : 0;
      const int row_end = clamped_to_int(tensors.rows.columns - column);
      if (row_end < end_) end_ = row_end;
    }
    if constexpr (kIsRagged<kKind>) safe_ = clamped_to_int(tensors.size - at_);
    if constexpr (kHasMask<kKind>) {
      const std::int64_t left = row.selection.readable() - column;
      const int readable = left > 0 ? clamped_to_int(left) : 0;
      readable_ = readable < end_ ? readable : end_;
      if (row.selection.mask() != nullptr) {
        if constexpr (kKind == Kind::kMaskedRagged) {
          if (readable_ > 0) align_mask(tensors, row.selection.mask() + column);
        } else {
          mask_ = row.selection.mask() + column * row.selection.stride();
        }
      }
    }
  }

  // Where in an array the first pack begins.
  __device__ __forceinline__ Number<kKind> begin() const { return at_; }

  // Whether there is a p-th pack.
  __device__ __forceinline__ bool has(int p) const { return p * stride_ < end_; }

  // The position of element i of pack p.
  __device__ __forceinline__ int position(int p, int i) const { return p * stride_ + i; }

  // Reads the packs of `from`, which is laid out like x, with `fill` in place of elements that do
  // not take part. All loads are issued before any of them is looked at. Packs that lie whole in
  // the array are read from `whole`, where the first one is; it may be a copy.
  template <bool kOnce = kAsksOnce, int kPacks>
  __device__ __forceinline__ void read(const Tensors<T>& tensors, const T* from, const T* whole,
                                       T fill, Elements (&pack)[kPacks]) const {
    if (kOnce && fills<kPacks>(readable())) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) pack[p] = read_pack<kPack>(whole + p * stride_);
      if constexpr (kKind == Kind::kMasked) {
        if (mask_ != nullptr) apply_mask<true>(fill, pack);
      } else if constexpr (kKind == Kind::kMaskedRagged) {
        if (mask_ != nullptr) apply_shifted_mask(fill, pack);
      }
      return;
    }
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      pack[p] = filled<kPack>(fill);
      if (reads_whole(p)) pack[p] = read_pack<kPack>(whole + p * stride_);
    }
    if constexpr (kKind == Kind::kMasked) {
      if (mask_ != nullptr) apply_mask<false>(fill, pack);
    } else if constexpr (kIsRagged<kKind>) {
      // The last row's last pack may reach beyond the array.
      if (safe_ - readable() < kPack && readable() > 0) read_last_of_array(tensors, from, pack);
    }
    if constexpr (kKind == Kind::kMaskedRagged) {
      if (mask_ != nullptr) apply_shifted_mask(fill, pack);
    }
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if constexpr (kKind == Kind::kAny) {
        if (!has(p)) continue;
        pack[p] = read_elements(tensors, from, p);
        replace_unkept(tensors, p, fill, pack[p]);
      } else if constexpr (kKind == Kind::kMasked || kIsRagged<kKind>) {
        const int first = position(p, 0);
        if (first < end_ && first < readable() && !inside(p)) {
          replace_unless([&](int i) { return in_row(first + i); }, fill, pack[p]);
        }
      }
    }
  }

  // One pack after the other, for what is rare.
  template <int kPacks, class PackOf>
  __device__ __forceinline__ void write_rolled(const Tensors<T>& tensors, PackOf&& pack_of) const {
#pragma unroll 1
    for (int p = 0; p < kPacks; ++p) {
      if (!has(p)) continue;
      if constexpr (kIsEven<kKind>) {
        write_global_pack(pack_of(p), tensors.y + at_ + position(p, 0));
      } else {
        write_elements(tensors, position(p, 0), pack_of(p));
      }
    }
  }

  // Which elements of pack p take part: a bit for each.
  __device__ __forceinline__ unsigned kept(const Tensors<T>& tensors, int p) const {
    unsigned bits = within(p, readable());
    if constexpr (kKind == Kind::kMasked) {
      if (mask_ != nullptr && bits != 0) {
        Pack<std::uint8_t, kPack> flags;
        const Flags read = read_pack<kPack>(mask_ + p * stride_);
        std::memcpy(&flags, &read, sizeof(flags));
#pragma unroll
        for (int i = 0; i < kPack; ++i) {
          if (flags.element[i] == 0) bits &= ~(1u << i);
        }
      }
    } else if constexpr (kHasMask<kKind>) {
      if (mask_ != nullptr) {
        // Rare enough to be written for few instructions and registers. Only the row's flags are
        // read.
        const std::uint8_t* const flags = mask_ + mask_phase_;
#pragma unroll 1
        for (int i = 0; i < kPack; ++i) {
          const bool reads = (bits >> i & 1) != 0;
          if (reads && flags[(p * stride_ + i) * tensors.mask.column_stride] == 0) {
            bits &= ~(1u << i);
          }
        }
      }
    }
    return bits;
  }

  // For results of elements that do not take part.
  __device__ __forceinline__ void replace_unkept(const Tensors<T>& tensors, int p, T fill,
                                                 Elements& pack) const {
    const unsigned bits = kept(tensors, p);
    replace_unless([&](int i) { return (bits >> i & 1) != 0; }, fill, pack);
  }

  // Writes the packs of y, which pack_of(p) gives, as far as they lie in the row.
  template <int kPacks, bool kOnce = kAsksOnce, class PackOf>
  __device__ __forceinline__ void write(const Tensors<T>& tensors, PackOf&& pack_of) const {
    if (kOnce && fills<kPacks>(end_)) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        write_global_pack(pack_of(p), tensors.y + at_ + position(p, 0));
      }
      return;
    }
    int cut = 0;  // the pack that the row ends in
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (!has(p)) continue;
      const int first = position(p, 0);
      if constexpr (kIsEven<kKind>) {
        write_global_pack(pack_of(p), tensors.y + at_ + first);
      } else if constexpr (kKind == Kind::kAny) {
        write_elements(tensors, first, pack_of(p));
      } else {
        const Elements pack = pack_of(p);
        if (first >= begin_ && first + kPack <= end_) {
          write_global_pack(pack, tensors.y + at_ + first);
        } else if (p == 0) {
          write_elements(tensors, first, pack);
        } else {
          cut = p;
        }
      }
    }
    // Outside the loop, where the stores of its elements are compiled once and not for each p.
    if (cut != 0) write_elements(tensors, position(cut, 0), pack_of(cut));
  }

 private:
  using Flags = RegisterPack<std::uint8_t, kPack>;
  struct Halves {
    std::uint64_t half[2];
  };
  static constexpr unsigned kWhole = (1u << kPack) - 1;

  template <int kPacks>
  __device__ __forceinline__ bool fills(int end) const {
    return begin_ <= 0 && position(kPacks - 1, kPack) <= end;
  }

  // Where elements that are read end.
  __device__ __forceinline__ int readable() const { return kHasMask<kKind> ? readable_ : end_; }

  __device__ __forceinline__ Number<kKind> offset(const Tensors<T>& tensors, int position) const {
    return at_ + position * (kKind == Kind::kAny ? tensors.rows.inner : 1);
  }

  // Packs may reach into the neighbouring rows, but not beyond the array.
  __device__ __forceinline__ bool reads_whole(int p) const {
    const int first = p * stride_;
    if constexpr (kIsRagged<kKind>) {
      return first < readable() && first + kPack <= safe_;
    } else {
      return kKind != Kind::kAny && first < readable();
    }
  }

  // True if all elements of pack p belong to what is read of the row.
  __device__ __forceinline__ bool inside(int p) const {
    return p * stride_ >= begin_ && p * stride_ + kPack <= readable();
  }

  __device__ __forceinline__ bool in_row(int position) const {
    return position >= begin_ && position < readable();
  }

  // Bit i is set if element i of pack p comes before `end` and not before the row.
  __device__ __forceinline__ unsigned within(int p, int end) const {
    const int before = begin_ - p * stride_;
    const int until = end - p * stride_;
    const unsigned from = before <= 0 ? kWhole : before < kPack ? kWhole << before : 0;
    const unsigned to = until >= kPack ? kWhole : until > 0 ? (1u << until) - 1 : 0;
    return from & to;
  }

  __device__ __forceinline__ void write_elements(const Tensors<T>& tensors, int first,
                                                 const Elements& pack) const {
    Pack<T, kPack> elements;
    std::memcpy(&elements, &pack, sizeof(pack));
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      if (first + i >= begin_ && first + i < end_) {
        tensors.y[offset(tensors, first + i)] = elements.element[i];
      }
    }
  }

  template <int kPacks>
  __device__ __forceinline__ void read_last_of_array(const Tensors<T>& tensors, const T* from,
                                                     Elements (&pack)[kPacks]) const {
    const int last = (readable() - 1) / stride_;
    if (last >= kPacks || reads_whole(last)) return;
    const Elements elements = read_elements(tensors, from, last);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (p == last) pack[p] = elements;
    }
  }

  // One by one, and each into its place by shifts: an index known only at run time would move the
  // pack from registers to memory.
  __device__ __forceinline__ Elements read_elements(const Tensors<T>& tensors, const T* from,
                                                    int p) const {
    const unsigned bits = within(p, readable());
    Halves halves{};
#pragma unroll 1
    for (int i = 0; i < kPack; ++i) {
      if ((bits >> i & 1) == 0) continue;
      typename WordOf<sizeof(T)>::type word;
      const T element = from[offset(tensors, p * stride_ + i)];
      std::memcpy(&word, &element, sizeof(word));
      const std::uint64_t shifted = std::uint64_t{word} << (i * 8 * sizeof(T) % 64);
      halves.half[0] |= i < kPack / 2 ? shifted : 0;
      halves.half[1] |= i < kPack / 2 ? 0 : shifted;
    }
    Elements pack;
    std::memcpy(&pack, &halves, sizeof(pack));
    return pack;
  }

  // For rows with a mask that lies like them.
  template <bool kComplete, int kPacks>
  __device__ __forceinline__ void apply_mask(T fill, Elements (&pack)[kPacks]) const {
    Flags flags[kPacks];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (kComplete || reads_whole(p)) flags[p] = read_pack<kPack>(mask_ + p * stride_);
    }
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (kComplete || reads_whole(p)) replace_unset(flags[p], fill, pack[p]);
    }
  }

  // The flags of a pack of kMaskedRagged, which begin at any byte, are read in aligned words:
  //
  //     words   |--- 0 ---|--- 1 ---|--- 2 ---|
  //     flags        |--------------------|
  //
  // All packs of a stretch have their flags at the same phase.
  static constexpr int kFlagWord = kPack < 4 ? kPack : 4;  // bytes
  static constexpr int kFlagWords = kPack / kFlagWord + 1;
  using FlagWord = typename WordOf<kFlagWord>::type;

  // `first`: the flag of the first pack's first element. Pointers are offsets to what the kernel
  // was given: to one made of an address, the compiler would not know that it is in global memory.
  __device__ __forceinline__ void align_mask(const Tensors<T>& tensors, const std::uint8_t* first) {
    const std::uint8_t* const array = tensors.mask.data;
    const std::int64_t offset = first - array;
    const auto address = reinterpret_cast<std::uintptr_t>(array) + offset;
    mask_phase_ = static_cast<int>(address % kFlagWord);
    const std::int64_t word = offset - mask_phase_;
    mask_ = array + word;
    mask_begin_ = word < 0 ? static_cast<int>(-word) : 0;
    mask_end_ = clamped_to_int(tensors.mask_bytes - word);
  }

  // For rows with a mask of any phase. Of the mask's array no byte before or behind is read.
  template <int kPacks>
  __device__ __forceinline__ void apply_shifted_mask(T fill, Elements (&pack)[kPacks]) const {
    const int needed = readable_ + mask_phase_;
    const int whole = mask_end_ - (kFlagWord - 1);
    const int end = needed < whole ? needed : whole;
    FlagWord words[kPacks][kFlagWords];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
#pragma unroll
      for (int w = 0; w < kFlagWords; ++w) {
        words[p][w] = 0;
        const int at = p * stride_ + w * kFlagWord;
        // Only words of the first two packs may begin before the array.
        const bool begins = p > 1 || at >= mask_begin_;
        const bool has_flags = w + 1 < kFlagWords || mask_phase_ != 0;
        if (begins && at < end && has_flags) {
          words[p][w] = *reinterpret_cast<const FlagWord*>(mask_ + at);
        }
      }
    }
    if (mask_begin_ % kFlagWord != 0) read_cut_word(mask_begin_, words);
    if (mask_end_ % kFlagWord != 0 && whole < needed) read_cut_word(mask_end_, words);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      Flags flags;
#pragma unroll
      for (int w = 0; w + 1 < kFlagWords; ++w) {
        const std::uint64_t both = std::uint64_t{words[p][w + 1]} << (8 * kFlagWord) | words[p][w];
        flags.reg[w] = static_cast<FlagWord>(both >> (8 * mask_phase_));
      }
      replace_unset(flags, fill, pack[p]);
    }
  }

  // The word that the mask's array begins or ends in, at `cut`, for the packs that have it.
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

  Number<kKind> at_;
  int stride_;
  int end_;
  // Where the row begins, the array ends and what takes part does, for the kinds that need it.
  int begin_ = 0;
  int safe_ = 0;
  int readable_ = 0;
  const std::uint8_t* mask_ = nullptr;
  // For kMaskedRagged, in bytes: from mask_ to the first flag, and to where the mask's array
  // begins, if that is behind it, and ends.
  int mask_phase_ = 0;
  int mask_begin_ = 0;
  int mask_end_ = 0;
};

}  // namespace softmax
}  // namespace JAX_GPUOPS_NAMESPACE
