#include "simt/arithmetic.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace JAX_GPUOPS_NAMESPACE {
namespace simt {
namespace {

// The exponent of zero, so that its products have smaller exponents than all others.
constexpr std::int16_t kZeroExponent = -8000;

constexpr int kFloatFraction = 23;  // bits
constexpr int kFloatBias = 127;
constexpr int kDoubleFraction = 52;
constexpr int kDoubleBias = 1023;

template <class To, class From>
To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

// SIMD vectors of eight numbers.
constexpr unsigned kLanes = kColumnBlock;
using Floats = float [[gnu::vector_size(kLanes * 4)]];
using Ints = std::int32_t [[gnu::vector_size(kLanes * 4)]];
using Shorts = std::int16_t [[gnu::vector_size(kLanes * 2)]];

template <class Vector, class T>
Vector load(const T* from) {
  Vector result;
  std::memcpy(&result, from, sizeof(result));
  return result;
}

template <class Vector, class T>
void store(Vector vector, T* to) {
  std::memcpy(to, &vector, sizeof(vector));
}

bool any(Ints mask) {
  bool result = false;
  for (unsigned i = 0; i < kLanes; ++i) result |= mask[i] != 0;
  return result;
}

struct Numbers {
  Floats fractions;
  Shorts exponents;
};

// Decodes numbers with a sign bit, kExponentBits of exponent and kFractionBits of fraction.
template <int kExponentBits, int kFractionBits>
Numbers decode_finite(Ints bits) {
  constexpr int kBias = (1 << (kExponentBits - 1)) - 1;
  constexpr int kOne = 1 << kFractionBits;
  const Ints fields = bits >> kFractionBits & ((1 << kExponentBits) - 1);
  const Ints magnitudes = (bits & (kOne - 1)) + (fields == 0 ? Ints{} : Ints{} + kOne);
  const Ints signs = bits >> (kExponentBits + kFractionBits) << 31;
  const Floats fractions = __builtin_convertvector(magnitudes, Floats) * (1.0f / kOne);
  const Ints exponents = (fields == 0 ? Ints{} + 1 : fields) - kBias;
  return {bit_cast<Floats>(bit_cast<Ints>(fractions) | signs),
          __builtin_convertvector(magnitudes == 0 ? Ints{} + kZeroExponent : exponents, Shorts)};
}

// ---- Factors ----

// Floating-point factors. The low byte of a word comes before the high one.
template <int kExponentBits, int kFractionBits, bool kHasInfinity = true>
struct Format {
  static constexpr int kBits = 1 + kExponentBits + kFractionBits;
  static constexpr unsigned kDepth = kBits == 8    ? kProductWords * 2
                                     : kBits == 16 ? kProductWords
                                                   : kProductWords / 2;
  static Numbers decode(Ints bits, Ints& infinite) {
    constexpr int kMostField = (1 << kExponentBits) - 1;
    constexpr int kMostRest = (1 << kFractionBits) - 1;
    const Ints rests = bits & kMostRest;
    Numbers result = decode_finite<kExponentBits, kFractionBits>(bits);
    Ints special = (bits >> kFractionBits & kMostField) == kMostField;
    if (!kHasInfinity) special &= rests == kMostRest;
    infinite |= special;
    if (any(special)) {
      constexpr float kInfinity = std::numeric_limits<float>::infinity();
      for (unsigned i = 0; i < kLanes; ++i) {
        if (special[i] == 0) continue;
        result.fractions[i] = kHasInfinity && rests[i] == 0
                                  ? std::copysign(kInfinity, result.fractions[i])
                                  : std::numeric_limits<float>::quiet_NaN();
      }
    }
    return result;
  }
};

struct Integer {
  static constexpr unsigned kDepth = kProductWords * 2;
  static Numbers decode(Ints bits, Ints&) {
    return {__builtin_convertvector(bits << 24 >> 24, Floats), Shorts{}};
  }
};

// Element k of a row.
template <class Format>
unsigned element(const std::uint16_t* words, unsigned k) {
  if (Format::kDepth == kProductWords) return words[k];
  if (Format::kDepth > kProductWords) return words[k / 2] >> (k % 2 * 8) & 255;
  return (std::uint32_t{words[2 * k + 1]} << 16 | words[2 * k]) >> 13;  // other bits are ignored
}

template <class Format>
void decode_rows(const std::uint16_t* words, unsigned rows, const Elements& to) {
  for (unsigned row = 0; row < rows; ++row) {
    Ints infinite{};
    for (unsigned k = 0; k < Format::kDepth; k += kLanes) {
      Ints bits;
      for (unsigned i = 0; i < kLanes; ++i) {
        bits[i] = static_cast<std::int32_t>(element<Format>(words + row * kProductWords, k + i));
      }
      const Numbers numbers = Format::decode(bits, infinite);
      store(numbers.fractions, to.fractions + row * Format::kDepth + k);
      store(numbers.exponents, to.exponents + row * Format::kDepth + k);
    }
    to.finite[row] = !any(infinite);
  }
}

template <class Format>
void decode_columns(const std::uint16_t* words, unsigned cols, const Elements& to) {
  for (unsigned col = 0; col < cols; col += kLanes) {
    Ints infinite{};
    for (unsigned k = 0; k < Format::kDepth; ++k) {
      Ints bits;
      for (unsigned i = 0; i < kLanes; ++i) {
        bits[i] = static_cast<std::int32_t>(element<Format>(words + (col + i) * kProductWords, k));
      }
      const Numbers numbers = Format::decode(bits, infinite);
      store(numbers.fractions, to.fractions + k * cols + col);
      store(numbers.exponents, to.exponents + k * cols + col);
    }
    for (unsigned i = 0; i < kLanes; ++i) to.finite[col + i] = infinite[i] == 0;
  }
}

template <class Format>
void decode_as(const std::uint16_t* words, unsigned rows, bool by_columns, const Elements& to) {
  if (by_columns) {
    decode_columns<Format>(words, rows, to);
  } else {
    decode_rows<Format>(words, rows, to);
  }
}

// ---- Sums ----

double power_of_two(int exponent) {
  return bit_cast<double>(static_cast<std::uint64_t>(kDoubleBias + exponent) << kDoubleFraction);
}

float round_toward_zero(double x) {
  auto result = static_cast<float>(x);
  if (std::isfinite(result) && std::abs(static_cast<double>(result)) > std::abs(x)) {
    result = std::nextafter(result, 0.0f);
  }
  return result;
}

// total * 2^exponent, rounded toward zero to a float with kFraction bits of fraction.
template <int kFraction>
std::uint32_t rounded(std::int64_t total, int exponent) {
  if (total == 0) return 0;
  const double exact = static_cast<double>(total) * power_of_two(exponent);
  const auto bits = bit_cast<std::uint64_t>(exact);
  const int field = static_cast<int>(bits >> kDoubleFraction) & (2 * kDoubleBias + 1);
  constexpr std::uint32_t kKept = ~((1u << (kFloatFraction - kFraction)) - 1);
  // Neither subnormal as a float nor near the largest float, so that bits can be truncated.
  if (field > kDoubleBias - kFloatBias && field < kDoubleBias + kFloatBias) {
    constexpr int kLost = kDoubleFraction - kFloatFraction;
    const auto result = static_cast<float>(bit_cast<double>(bits >> kLost << kLost));
    return bit_cast<std::uint32_t>(result) & kKept;
  }
  return bit_cast<std::uint32_t>(round_toward_zero(exact)) & kKept;
}

Shorts larger(Shorts a, Shorts b) { return a > b ? a : b; }

// fractions * 2^exponents as multiples of 2^units, truncated.
Ints aligned(Floats fractions, Shorts exponents, Shorts units) {
  const Shorts fields = larger(exponents - units + std::int16_t{kFloatBias}, Shorts{});
  return __builtin_convertvector(
      fractions * bit_cast<Floats>(__builtin_convertvector(fields, Ints) << kFloatFraction), Ints);
}

// For finite numbers.
template <unsigned kDepth, int kTermFraction, int kSumFraction>
void add_finite(const Elements& left, const Elements& right, unsigned cols,
                std::uint32_t (&sums)[kColumnBlock]) {
  const Numbers before = decode_finite<8, kFloatFraction>(load<Ints>(sums));
  Shorts most = before.exponents;
  for (unsigned k = 0; k < kDepth; ++k) {
    most = larger(most, left.exponents[k] + load<Shorts>(right.exponents + k * cols));
  }
  // Each term is below 4 * 2^kTermFraction, so that kDepth terms fit in 32 bits.
  static_assert(kTermFraction == 25 ? kDepth <= 16 : kTermFraction == 13 && kDepth <= 32);
  const Shorts units = most - std::int16_t{kTermFraction};
  Ints totals{};
  for (unsigned k = 0; k < kDepth; ++k) {
    // Factors have at most 11 bits, so that their product is exact.
    totals += aligned(left.fractions[k] * load<Floats>(right.fractions + k * cols),
                      left.exponents[k] + load<Shorts>(right.exponents + k * cols), units);
  }
  const Ints others = aligned(before.fractions, before.exponents, units);
  for (unsigned col = 0; col < kColumnBlock; ++col) {
    sums[col] = rounded<kSumFraction>(std::int64_t{totals[col]} + others[col], units[col]);
  }
}

double value_of(const Elements& elements, unsigned i) {
  const float fraction = elements.fractions[i];
  if (fraction == 0 || !std::isfinite(fraction)) return fraction;
  return fraction * power_of_two(elements.exponents[i]);
}

// For a row, column or sum that is not finite.
template <unsigned kDepth>
std::uint32_t add_infinite(const Elements& left, const Elements& right, unsigned cols, unsigned col,
                           std::uint32_t sum) {
  auto total = bit_cast<float>(sum);
  for (unsigned k = 0; k < kDepth; ++k) {
    total += static_cast<float>(value_of(left, k) * value_of(right, k * cols + col));
  }
  if (std::isnan(total)) total = std::numeric_limits<float>::quiet_NaN();
  return bit_cast<std::uint32_t>(total);
}

template <unsigned kDepth, int kTermFraction, int kSumFraction>
void add_floats(const Elements& left, const Elements& right, unsigned cols,
                std::uint32_t (&sums)[kColumnBlock]) {
  const auto finite = [&](unsigned col) {
    return left.finite[0] != 0 && right.finite[col] != 0 &&
           std::isfinite(bit_cast<float>(sums[col]));
  };
  unsigned columns = 0;
  for (unsigned col = 0; col < kColumnBlock; ++col) columns += finite(col);
  if (columns == kColumnBlock) {
    return add_finite<kDepth, kTermFraction, kSumFraction>(left, right, cols, sums);
  }
  // Columns that are not finite are computed separately, with zeros in their place here.
  float fractions[kDepth * kColumnBlock] = {};
  std::int16_t exponents[kDepth * kColumnBlock] = {};
  std::uint32_t finite_sums[kColumnBlock] = {};
  for (unsigned col = 0; col < kColumnBlock; ++col) {
    if (!finite(col)) continue;
    finite_sums[col] = sums[col];
    for (unsigned k = 0; k < kDepth; ++k) {
      fractions[k * kColumnBlock + col] = right.fractions[k * cols + col];
      exponents[k * kColumnBlock + col] = right.exponents[k * cols + col];
    }
  }
  if (columns > 0) {
    const Elements others{fractions, exponents, right.finite};
    add_finite<kDepth, kTermFraction, kSumFraction>(left, others, kColumnBlock, finite_sums);
  }
  for (unsigned col = 0; col < kColumnBlock; ++col) {
    sums[col] =
        finite(col) ? finite_sums[col] : add_infinite<kDepth>(left, right, cols, col, sums[col]);
  }
}

void add_integers(const Elements& left, const Elements& right, unsigned cols,
                  std::uint32_t (&sums)[kColumnBlock]) {
  Floats totals{};  // below 2^20, so exact
  for (unsigned k = 0; k < depth_of(FactorType::kInt8); ++k) {
    totals += left.fractions[k] * load<Floats>(right.fractions + k * cols);
  }
  const Ints integers = __builtin_convertvector(totals, Ints);
  for (unsigned col = 0; col < kColumnBlock; ++col) {
    sums[col] += static_cast<std::uint32_t>(integers[col]);
  }
}

}  // namespace

void decode(const std::uint16_t* words, unsigned rows, FactorType type, bool by_columns,
            const Elements& to) {
  switch (type) {
    case FactorType::kFloat16:
      return decode_as<Format<5, 10>>(words, rows, by_columns, to);
    case FactorType::kBFloat16:
      return decode_as<Format<8, 7>>(words, rows, by_columns, to);
    case FactorType::kTf32:
      return decode_as<Format<8, 10>>(words, rows, by_columns, to);
    case FactorType::kFloat8E4M3:
      return decode_as<Format<4, 3, /*kHasInfinity=*/false>>(words, rows, by_columns, to);
    case FactorType::kFloat8E5M2:
      return decode_as<Format<5, 2>>(words, rows, by_columns, to);
    case FactorType::kInt8:
      return decode_as<Integer>(words, rows, by_columns, to);
  }
}

void add_products(FactorType type, const Elements& left, const Elements& right, unsigned cols,
                  std::uint32_t (&sums)[kColumnBlock]) {
  switch (type) {
    case FactorType::kFloat16:
    case FactorType::kBFloat16:
      return add_floats<kProductWords, 25, 23>(left, right, cols, sums);
    case FactorType::kTf32:
      return add_floats<kProductWords / 2, 25, 23>(left, right, cols, sums);
    case FactorType::kFloat8E4M3:
    case FactorType::kFloat8E5M2:
      return add_floats<2 * kProductWords, 13, 13>(left, right, cols, sums);
    case FactorType::kInt8:
      return add_integers(left, right, cols, sums);
  }
}

}  // namespace simt
}  // namespace JAX_GPUOPS_NAMESPACE
