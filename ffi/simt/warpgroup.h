// The state of a block's warpgroups for Hopper's instructions for them. Blocks that use none do not
// have it.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "simt/arithmetic.h"
#include "simt/launch.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace simt {

inline constexpr unsigned kWarpgroupThreads = 128;
inline constexpr unsigned kWarpgroupWarps = kWarpgroupThreads / kWarpSize;

// ---- Products ----

inline constexpr unsigned kProductRows = 64;

// A thread's part of the sums of products, from the first product until the wait for the last. They
// are in its registers: on the host, memory that is taken until the products are complete.
struct Sums {
  Sums(const char* function, Site site, void* registers, std::size_t count)
      : function(function), site(site), registers(registers), values(count) {}
  ~Sums() {
    if (!landed) release_memory(registers, bytes());
  }
  Sums(const Sums&) = delete;
  Sums& operator=(const Sums&) = delete;

  std::size_t bytes() const { return values.size() * sizeof(std::uint32_t); }

  const char* const function;  // of the product that took them
  const Site site;
  void* const registers;
  std::vector<std::uint32_t> values;  // the bits of floats or ints
  std::uint64_t last = 0;             // product that changes them
  bool landed = true;                 // the registers have the values
};

// An operand of a product as in its descriptor: `rows` rows of 32 bytes, in pieces of 16.
struct Operand {
  unsigned address = 0;
  unsigned panel_stride = 0;  // from 64 rows to the next 64, if not deep
  unsigned atom_stride = 0;   // from eight lines to the next
  unsigned rows = 0;
  bool deep = false;
  unsigned begin = 0;  // of its addresses
  unsigned end = 0;

  unsigned pieces() const { return 2 * rows; }
  unsigned piece_address(unsigned piece) const;
};

// The values of an operand when the first thread called its product.
struct Factor {
  std::vector<std::uint16_t> bits;  // rows x kProductWords; of two bytes, the first is the low one
  std::vector<float> fractions;     // by columns for the right operand
  std::vector<std::int16_t> exponents;
  std::vector<unsigned char> finite;
};

struct Product {
  const char* function;
  Site site;
  ProductCall call;
  const Thread* first;  // the first thread that called it
  Operand left;         // without rows if it is in registers
  Operand right;
  unsigned callers = 0;
  Factor left_factor{};
  Factor right_factor{};
  Sums* sums[kWarpgroupThreads] = {};
  const std::uint32_t* left_words[kWarpgroupThreads] = {};
};

struct Warpgroup {
  struct Member {
    std::uint64_t called = 0;          // products
    std::deque<std::uint64_t> groups;  // for each that has not been waited for, `called` at its end
    Thread* thread = nullptr;          // set by its first product
    bool ordered = false;              // begin_products() was called since the last wait
    std::vector<std::unique_ptr<Sums>> sums;
  };

  Member members[kWarpgroupThreads];
  std::deque<Product> products;  // that some warp has not done
  std::uint64_t first = 0;       // number of the first of them
  std::uint64_t issued = 0;      // products that all threads have called
  std::uint64_t done[kWarpgroupWarps] = {};

  Product& product(std::uint64_t number) { return products[number - first]; }
};

// ---- Blocks ----

struct NamedBarrier {
  unsigned threads = 0;  // that it expects
  unsigned arrived = 0;
  bool fenced = true;  // all that arrived had called proxy_fence()
  std::vector<Thread*> waiting;
};

inline constexpr int kNamedBarriers = 16;

struct Warpgroups {
  NamedBarrier barriers[kNamedBarriers];
  std::vector<unsigned> registers;  // of each thread
  unsigned free_registers = 0;
  std::vector<Warpgroup> groups;
};

}  // namespace simt
}  // namespace JAX_GPUOPS_NAMESPACE
