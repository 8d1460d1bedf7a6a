// Tests of the arithmetic of tensor cores, which computes eight numbers at a time: for any input
// bits, results are bitwise equal to those of the same rules for one number at a time.

#include "simt/arithmetic.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "check.h"
#include "simt/cuda.h"
#include "simt/launch.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace {

using simt::FactorType;
using simt::kProductWords;

constexpr int kRows = 4;
constexpr int kCols = 2 * simt::kColumnBlock;

// Element k of a row of words, as CUDA's headers convert it.
double value(const std::uint16_t* words, int k, FactorType type) {
  const auto byte = static_cast<unsigned char>(words[k / 2] >> (k % 2 * 8));
  __half_raw half;
  switch (type) {
    case FactorType::kFloat16:
      half.x = words[k];
      return __half2float(half);
    case FactorType::kFloat8E4M3:
      return __half2float(__nv_cvt_fp8_to_halfraw(byte, __NV_E4M3));
    case FactorType::kFloat8E5M2:
      return __half2float(__nv_cvt_fp8_to_halfraw(byte, __NV_E5M2));
    case FactorType::kInt8:
      return static_cast<std::int8_t>(byte);
    default: {
      const bool is_tf32 = type == FactorType::kTf32;  // its lower 13 bits are ignored
      const std::uint32_t bits =
          is_tf32 ? std::uint32_t{words[2 * k + 1]} << 16 | (words[2 * k] & 0xe000)
                  : std::uint32_t{words[k]} << 16;
      float result;
      std::memcpy(&result, &bits, sizeof(result));
      return result;
    }
  }
}

int least_exponent(FactorType type) {
  switch (type) {
    case FactorType::kFloat16:
    case FactorType::kFloat8E5M2:
      return -14;
    case FactorType::kFloat8E4M3:
      return -6;
    default:
      return -126;
  }
}

int exponent_of(double x, int least) { return std::max(std::ilogb(x), least); }

float round_toward_zero(double x) {
  const auto nearest = static_cast<float>(x);
  const bool is_beyond = std::isfinite(nearest) && std::abs(double{nearest}) > std::abs(x);
  return is_beyond ? std::nextafter(nearest, 0.0f) : nearest;
}

float sum_of_floats(const std::uint16_t* left, const std::uint16_t* right, FactorType type,
                    float before) {
  const auto depth = static_cast<int>(simt::depth_of(type));
  const int least = least_exponent(type);
  float special = before;
  bool finite = std::isfinite(before);
  for (int k = 0; k < depth; ++k) {
    const double product = value(left, k, type) * value(right, k, type);
    finite = finite && std::isfinite(product);
    special += static_cast<float>(product);
  }
  if (!finite) return special;
  int most = before == 0 ? std::numeric_limits<int>::min() : exponent_of(before, -126);
  for (int k = 0; k < depth; ++k) {
    const double a = value(left, k, type);
    const double b = value(right, k, type);
    if (a != 0 && b != 0) most = std::max(most, exponent_of(a, least) + exponent_of(b, least));
  }
  if (most == std::numeric_limits<int>::min()) return 0;
  const int fraction = simt::is_byte(type) ? 13 : 25;
  double total = std::trunc(std::ldexp(double{before}, fraction - most));
  for (int k = 0; k < depth; ++k) {
    total += std::trunc(std::ldexp(value(left, k, type) * value(right, k, type), fraction - most));
  }
  const float result = round_toward_zero(std::ldexp(total, most - fraction));
  if (!simt::is_byte(type)) return result;
  std::uint32_t bits;
  std::memcpy(&bits, &result, sizeof(bits));
  bits &= ~((1u << (23 - fraction)) - 1);
  float kept;
  std::memcpy(&kept, &bits, sizeof(kept));
  return kept;
}

std::uint32_t sum_of(const std::uint16_t* left, const std::uint16_t* right, FactorType type,
                     std::uint32_t before) {
  if (type == FactorType::kInt8) {
    for (int k = 0; k < 32; ++k) {
      before += static_cast<std::uint32_t>(
          static_cast<int>(value(left, k, type) * value(right, k, type)));
    }
    return before;
  }
  float sum;
  std::memcpy(&sum, &before, sizeof(sum));
  const float result = sum_of_floats(left, right, type, sum);
  std::uint32_t bits;
  std::memcpy(&bits, &result, sizeof(bits));
  return std::isnan(result) ? 0x7fc00000 : bits;
}

// Random words in which only the bits in `kept` may be set.
std::vector<std::uint16_t> draw(int rows, std::uint16_t kept, simt::Random& random) {
  std::vector<std::uint16_t> words(static_cast<std::size_t>(rows) * kProductWords);
  for (std::uint16_t& word : words) word = static_cast<std::uint16_t>(random.below(65536) & kept);
  return words;
}

void check_bits(FactorType type, std::uint16_t kept, std::uint32_t kept_of_sums,
                simt::Random& random) {
  const unsigned depth = simt::depth_of(type);
  const std::vector<std::uint16_t> left = draw(kRows, kept, random);
  const std::vector<std::uint16_t> right = draw(kCols, kept, random);
  std::vector<float> fractions((kRows + kCols) * depth);
  std::vector<std::int16_t> exponents(fractions.size());
  std::vector<unsigned char> finite(kRows + kCols);
  const auto elements = [&](std::size_t element, std::size_t row) {
    return simt::Elements{&fractions[element], &exponents[element], &finite[row]};
  };
  simt::decode(left.data(), kRows, type, /*by_columns=*/false, elements(0, 0));
  simt::decode(right.data(), kCols, type, /*by_columns=*/true, elements(kRows * depth, kRows));
  int wrong = 0;
  for (int row = 0; row < kRows; ++row) {
    for (int first = 0; first < kCols; first += simt::kColumnBlock) {
      std::uint32_t before[simt::kColumnBlock];
      for (std::uint32_t& each : before) {
        each = static_cast<std::uint32_t>(random.below(std::uint64_t{1} << 32)) & kept_of_sums;
      }
      std::uint32_t sums[simt::kColumnBlock];
      std::memcpy(sums, before, sizeof(sums));
      simt::add_products(type, elements(row * depth, row),
                         elements(kRows * depth + first, kRows + first), kCols, sums);
      for (unsigned i = 0; i < simt::kColumnBlock; ++i) {
        wrong += sums[i] != sum_of(&left[row * kProductWords], &right[(first + i) * kProductWords],
                                   type, before[i]);
      }
    }
  }
  CHECK(wrong == 0);
}

}  // namespace

void test_arithmetic() {
  simt::Random random(1);
  for (const FactorType type :
       {FactorType::kFloat16, FactorType::kBFloat16, FactorType::kTf32, FactorType::kFloat8E4M3,
        FactorType::kFloat8E5M2, FactorType::kInt8}) {
    // Any bits, with infinities and NaN; finite ones; small and subnormal ones; fractions; zeros.
    for (const unsigned kept : {0xffffu, 0xbfbfu, 0xdfdfu, 0x87ffu, 0x83ffu, 0x9f9fu, 0x0000u}) {
      for (const std::uint32_t of_sums : {0xffffffffu, 0xbfffffffu, 0x9fffffffu, 0x807fffffu, 0u}) {
        for (int i = 0; i < 20; ++i) {
          check_bits(type, static_cast<std::uint16_t>(kept), of_sums, random);
        }
      }
    }
  }
}

}  // namespace JAX_GPUOPS_NAMESPACE
