// The arithmetic of tensor cores. It accesses only arrays of its callers, which know their bounds,
// and takes most of the time of matrix products; so it is always compiled with optimization and
// without sanitizers.
#pragma once

#include <cstdint>

#include "simt/simt.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace simt {

inline constexpr unsigned kProductWords = 16;  // of 16 bits, per row of a factor
inline constexpr unsigned kColumnBlock = 8;    // columns that are computed together

constexpr bool is_byte(FactorType type) {
  return type == FactorType::kFloat8E4M3 || type == FactorType::kFloat8E5M2 ||
         type == FactorType::kInt8;
}

// The elements per row of a factor.
constexpr unsigned depth_of(FactorType type) {
  if (type == FactorType::kTf32) return kProductWords / 2;
  return is_byte(type) ? kProductWords * 2 : kProductWords;
}

// The elements of a factor's rows, fractions[i] * 2^exponents[i], in arrays of the caller: row
// after row, or by columns, with element k of all rows before element k + 1. Integers use only
// fractions.
struct Elements {
  float* fractions;
  std::int16_t* exponents;
  unsigned char* finite;  // per row: whether all of its elements are finite
};

// Decodes rows of kProductWords words. If by_columns, `rows` must be a multiple of kColumnBlock.
void decode(const std::uint16_t* words, unsigned rows, FactorType type, bool by_columns,
            const Elements& to);

// sums[i] += the row `left` times row i of `right`. The arrays of `right` hold `cols` rows by
// columns, and its pointers are at the row for sums[0].
//
// Adds like Hopper (the model of MMA-Sim, arXiv 2511.10909): all terms are aligned to the largest
// exponent, truncated to 25 bits of fraction, added exactly, and rounded toward zero. For 8-bit
// floating-point factors, the terms and the sum keep 13 bits of fraction. The sums are the bits of
// floats, or of integers, which are added modulo 2^32.
void add_products(FactorType type, const Elements& left, const Elements& right, unsigned cols,
                  std::uint32_t (&sums)[kColumnBlock]);

}  // namespace simt
}  // namespace JAX_GPUOPS_NAMESPACE
