// The arithmetic of tensor cores. It reads and writes nothing but arrays of its callers, which know
// their bounds, and takes most of the time of products; so it is always compiled optimized, and
// without sanitizers.
#pragma once

#include <cstdint>

#include "simt/simt.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace simt {

inline constexpr unsigned kProductWords = 16;  // of 16 bits, of a row of a factor
inline constexpr unsigned kColumnBlock = 8;    // columns that are computed together

constexpr bool is_byte(FactorType type) {
  return type == FactorType::kFloat8E4M3 || type == FactorType::kFloat8E5M2 ||
         type == FactorType::kInt8;
}

// How many elements of a row a product takes.
constexpr unsigned depth_of(FactorType type) {
  if (type == FactorType::kTf32) return kProductWords / 2;
  return is_byte(type) ? kProductWords * 2 : kProductWords;
}

// Elements of rows of a factor, fractions[i] 2^exponents[i], in arrays that belong to the caller:
// row after row, or by columns, which has element k of all rows before element k + 1. Integers are
// fractions alone.
struct Elements {
  float* fractions;
  std::int16_t* exponents;
  unsigned char* finite;  // each row: whether all of its elements are
};

// Decodes rows of kProductWords words; by columns, a multiple of kColumnBlock rows.
void decode(const std::uint16_t* words, unsigned rows, FactorType type, bool by_columns,
            const Elements& to);

// sums[i] += a row of left times row i of right, of which the arrays hold `cols` by columns and
// `right` begins with the first.
//
// As Hopper adds (the model of MMA-Sim, arXiv 2511.10909): all terms are aligned to the largest
// exponent, truncated to 25 bits of fraction, added exactly, and rounded toward zero. Of factors of
// 8 bits the terms keep 13 bits of fraction, and so does the sum. The sums are the bits of floats,
// or of integers, which are added modulo 2^32.
void add_products(FactorType type, const Elements& left, const Elements& right, unsigned cols,
                  std::uint32_t (&sums)[kColumnBlock]);

}  // namespace simt
}  // namespace JAX_GPUOPS_NAMESPACE
