// Tests of tensor copies and of products of matrices (wgmma) on the host executor: that they work
// as on a GPU, that each kind of fault in their use is detected, and that the matmul that uses them
// is right.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <set>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "check.h"
#include "core/cuda.h"
#include "core/ptx/bulk_copy.cuh"
#include "core/ptx/cluster.cuh"
#include "core/ptx/mbarrier.cuh"
#include "core/ptx/mma.cuh"
#include "core/ptx/tensor_copy.cuh"
#include "core/ptx/warpgroup.cuh"
#include "core/ptx/wgmma.cuh"
#include "core/shared.h"
#include "core/tensor_map.h"
#include "matmul/hopper/factors.cuh"
#include "matmul/hopper/persistent.cuh"
#include "matmul/hopper/split_k_reduce.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace {

// With seeds 0, 3 ... copies and products complete late, with 1, 4 ... early, with others at any
// time.
constexpr std::uint64_t kSeeds = 9;

bool comes_late() { return simt::schedule_seed() % 3 == 0; }

// Aligned to 16 bytes.
template <class T>
class Array {
 public:
  explicit Array(std::int64_t size) : memory_((size * sizeof(T) + 15) / 16) {
    std::memset(memory_.data(), 0xff, memory_.size() * 16);
  }
  T* data() { return reinterpret_cast<T*>(memory_.data()); }
  const T* data() const { return reinterpret_cast<const T*>(memory_.data()); }
  T& operator[](std::int64_t i) { return data()[i]; }
  const T& operator[](std::int64_t i) const { return data()[i]; }

 private:
  std::vector<float4> memory_;
};

template <class T>
CUtensorMapDataType type_of() {
  if (sizeof(T) == 1) return CU_TENSOR_MAP_DATA_TYPE_UINT8;
  if (std::is_same_v<T, int>) return CU_TENSOR_MAP_DATA_TYPE_INT32;
  if (std::is_same_v<T, float>) return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  return std::is_same_v<T, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                   : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
}

float to_float(float x) { return x; }
float to_float(__half x) { return __half2float(x); }
float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
template <class T>
float to_float(T x) {  // a float of 8 bits, or an integer
  return static_cast<float>(x);
}
// Rounds numbers up to 1 to numbers that TF32 represents.
void from_float(float x, float& to) { to = std::nearbyint(x * 0x1p10f) * 0x1p-10f; }
void from_float(float x, __half& to) { to = __float2half_rn(x); }
void from_float(float x, __nv_bfloat16& to) { to = __float2bfloat16_rn(x); }
void from_float(float x, __nv_fp8_e4m3& to) {
  to.__x = __nv_cvt_float_to_fp8(x, __NV_NOSAT, __NV_E4M3);
}
void from_float(float x, __nv_fp8_e5m2& to) {
  to.__x = __nv_cvt_float_to_fp8(x, __NV_NOSAT, __NV_E5M2);
}
void from_float(float x, std::int8_t& to) { to = static_cast<std::int8_t>(std::floor(x * 128)); }

// From -1 to 1.
float noise(std::uint64_t i) {
  i = (i + 1) * 0x9e3779b97f4a7c15;
  i = (i ^ (i >> 29)) * 0xbf58476d1ce4e5b9;
  return static_cast<float>(i >> 40) * 0x1p-23f - 1;
}

// Shared memory aligned to an atom, as the swizzle requires.
template <class Storage>
Storage& aligned() {
  auto* const memory = shared_array<unsigned char>();
  const unsigned past = shared_address(memory) % kAtomBytes;
  return *reinterpret_cast<Storage*>(memory + (kAtomBytes - past) % kAtomBytes);
}
template <class Storage>
constexpr std::size_t kAlignedBytes = sizeof(Storage) + kAtomBytes - kSharedAlignment;

// ---- Tensor maps ----

void test_tensor_maps() {
  Array<__nv_bfloat16> x(64);
  const BoxedTensor good{
      CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, x.data(), {8, 4, 2}, {16, 64}, {8, 4, 1}};
  const auto error = [&](auto&& change) -> std::string {
    BoxedTensor tensor = good;
    change(tensor);
    try {
      make_tensor_map(tensor);
    } catch (const std::runtime_error& error) {
      return error.what();
    }
    return "";
  };
  CHECK(error([](BoxedTensor&) {}).empty());
  check_contains(error([&](BoxedTensor& t) { t.data = x.data() + 4; }), {"address", "of 16"});
  check_contains(error([&](BoxedTensor& t) { t.data = nullptr; }), {"address 0"});
  check_contains(error([](BoxedTensor& t) { t.stride_bytes[0] = 24; }), {"stride", "24"});
  check_contains(error([](BoxedTensor& t) { t.stride_bytes[1] = std::int64_t{1} << 40; }),
                 {"stride", "below 2^40"});
  check_contains(error([](BoxedTensor& t) { t.extent[2] = 0; }), {"extent of 0", "1 to 2^32"});
  check_contains(error([](BoxedTensor& t) { t.box[1] = 257; }), {"box extent of 257"});
  check_contains(error([](BoxedTensor& t) { t.box[0] = 4; }), {"box lines", "8", "128"});
  check_contains(error([](BoxedTensor& t) { t.box[0] = 72; }), {"box lines", "144", "128"});
  check_contains(error([](BoxedTensor& t) { t.type = CU_TENSOR_MAP_DATA_TYPE_FLOAT64; }),
                 {"data type"});
}

// ---- Boxes ----

struct BoxStorage {
  alignas(kAtomBytes) unsigned char box[2 * 24 * kLineBytes];
  Mbarrier copied;
};

// A tensor of (3, 10, 70) floats with lines of 76: boxes of (2, 12, 32) are loaded at any place,
// with zeros beyond the tensor, and stored at the same place of another tensor.
void test_boxes() {
  constexpr int kExtent[3] = {70, 10, 3};
  constexpr int kLine = 76;
  constexpr int kCount = kLine * 10 * 3;
  const auto map_of = [&](const Array<float>& x) {
    return make_tensor_map({CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
                            x.data(),
                            {kExtent[0], kExtent[1], kExtent[2]},
                            {kLine * 4, kLine * 40},
                            {32, 12, 2}});
  };
  Array<float> x(kCount);
  for (int i = 0; i < kCount; ++i) x[i] = i + 1;
  const auto within = [&](int a, int b, int c) {
    return a >= 0 && a < kExtent[0] && b >= 0 && b < kExtent[1] && c >= 0 && c < kExtent[2];
  };
  const int places[][3] = {{0, 0, 0}, {64, 4, 2}, {-4, -3, -1}, {32, 0, 1}, {80, 0, 0}, {0, 10, 0}};
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    const Seed seeded(seed);
    for (const auto& at : places) {
      Array<float> y(kCount);
      const TensorMap from = map_of(x);
      const TensorMap to = map_of(y);
      int wrong = 0;
      simt::launch(1, 128, kAlignedBytes<BoxStorage>, [&] {
        auto& storage = aligned<BoxStorage>();
        if (threadIdx.x == 0) initialise(&storage.copied);
        __syncthreads();
        if (threadIdx.x == 0) {
          announce(&storage.copied, 24 * kLineBytes);
          copy_tensor(storage.box, from, at[0], at[1], at[2], &storage.copied);
        }
        wait(&storage.copied, 0);
        for (int i = threadIdx.x; i < 24 * 32; i += 128) {
          const int line = i / 32;
          const int piece = i % 32 / 4 ^ line % 8;
          const float value =
              reinterpret_cast<const float*>(storage.box + line * kLineBytes + piece * 16)[i % 4];
          const int a = at[0] + i % 32;
          const int b = at[1] + line % 12;
          const int c = at[2] + line / 12;
          wrong += value != (within(a, b, c) ? x[(c * 10 + b) * kLine + a] : 0);
        }
        finish_writes_before_copies();
        __syncthreads();
        if (threadIdx.x == 0) {
          write_tensor(to, at[0], at[1], at[2], storage.box);
          wait_until_read<0>();
        }
      });
      CHECK(wrong == 0);
      for (int i = 0; i < kCount; ++i) {
        const int a = i % kLine - at[0];
        const int b = i / kLine % 10 - at[1];
        const int c = i / kLine / 10 - at[2];
        const bool in_box = a >= 0 && a < 32 && b >= 0 && b < 12 && c >= 0 && c < 2;
        // The 16 bytes that contain the line's last element are written whole.
        if (in_box && i % kLine >= 70 && i % kLine < 72) continue;
        wrong += in_box && i % kLine < 70 ? y[i] != x[i] : !std::isnan(y[i]);
      }
      CHECK(wrong == 0);
    }
  }
}

// Each of four blocks multicasts its box to the blocks whose rank has the same lowest bit.
void test_multicast() {
  struct Storage {
    alignas(kAtomBytes) unsigned char box[4][8 * kLineBytes];
    Mbarrier copied;
  };
  Array<float> x(32 * 32);
  for (int i = 0; i < 32 * 32; ++i) x[i] = i;
  const TensorMap map = make_tensor_map(
      {CU_TENSOR_MAP_DATA_TYPE_FLOAT32, x.data(), {32, 32, 1}, {128, 4096}, {32, 8, 1}});
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    const Seed seeded(seed);
    int right = 0;
    simt::launch({8, 32, kAlignedBytes<Storage>, 4}, [&] {
      auto& storage = aligned<Storage>();
      const int rank = cluster_rank();
      if (threadIdx.x == 0) initialise(&storage.copied);
      __syncthreads();
      cluster_arrive();
      cluster_wait();
      if (threadIdx.x == 0) {
        announce(&storage.copied, 2 * 8 * kLineBytes);
        copy_tensor(storage.box[rank], map, 0, 8 * rank, 0, &storage.copied, 5 << rank % 2);
      }
      wait(&storage.copied, 0);
      for (int from = rank % 2; from < 4; from += 2) {
        const float value =
            reinterpret_cast<const float*>(storage.box[from] + 3 * kLineBytes + (2 ^ 3) * 16)[1];
        right += value == static_cast<float>((8 * from + 3) * 32 + 9);
      }
      cluster_arrive();
      cluster_wait();
    });
    CHECK(right == 8 * 32 * 2);
  }
}

enum class CopyFault {
  kNone,
  kNoFence,
  kEarlyReuse,
  kMisaligned,
  kNoMap,
  kNoBlock,
  kNoWait,
  kReadWithinPiece,
  kMulticastWithinPiece,
  kWriteWithinPiece,
};

void test_copy_faults() {
  Array<float> x(32 * 48);
  const TensorMap map = make_tensor_map(
      {CU_TENSOR_MAP_DATA_TYPE_FLOAT32, x.data(), {32, 48, 1}, {128, 6144}, {32, 24, 1}});
  const auto error = [&](CopyFault fault) {
    return error_of(1, 128, kAlignedBytes<BoxStorage>, [&] {
      auto& storage = aligned<BoxStorage>();
      const bool leads = threadIdx.x == 0;
      if (leads) initialise(&storage.copied);
      for (int turn = 0; turn < 2; ++turn) {
        unsigned char* const box = storage.box + turn * 24 * kLineBytes;
        for (int i = threadIdx.x; i < 24 * 128; i += 128) box[i] = static_cast<unsigned char>(turn);
        // All threads must call it: a single one that does not is a fault.
        if (fault != CopyFault::kNoFence || threadIdx.x != 77) finish_writes_before_copies();
        meet(3, 128);
        if (leads && fault != CopyFault::kNoWait) {
          write_tensor(map, 0, 24 * turn, 0, box);
          wait_until_read<1>();
        }
      }
      if (leads && fault == CopyFault::kEarlyReuse) {
        wait_until_read<1>();  // for the first copy only, from the other half
        storage.box[24 * kLineBytes] = 9;
      }
      if (leads && fault == CopyFault::kMisaligned) {
        write_tensor(map, 0, 0, 0, storage.box + 64);
      }
      if (leads && fault == CopyFault::kNoMap) write_tensor(TensorMap(), 0, 0, 0, storage.box);
      if (leads && fault == CopyFault::kNoBlock) {
        copy_tensor(storage.box, map, 0, 0, 0, &storage.copied, 2);
      }
      if (leads && fault == CopyFault::kReadWithinPiece) {
        copy_tensor(storage.box, map, 30, 0, 0, &storage.copied);
      }
      if (leads && fault == CopyFault::kMulticastWithinPiece) {
        copy_tensor(storage.box, map, 5, 0, 0, &storage.copied, 1);
      }
      if (leads && fault == CopyFault::kWriteWithinPiece) write_tensor(map, -1, 0, 0, storage.box);
      if (leads && fault == CopyFault::kNoWait) write_tensor(map, 0, 0, 0, storage.box);
      if (leads && fault != CopyFault::kNoWait) wait_until_read<0>();
    });
  };
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    const Seed seeded(seed);
    CHECK(error(CopyFault::kNone).empty());
    check_contains(error(CopyFault::kNoFence),
                   {"write_tensor()", "not all threads", "finish_writes_before_copies()"});
    if (seed == 0) {  // with others the second copy may be first
      check_contains(error(CopyFault::kEarlyReuse),
                     {"write_tensor()", "the source was written to while the copy was under way"});
    }
    if (comes_late()) {
      check_contains(error(CopyFault::kNoWait), {"the block exited while the copy was under way"});
    }
    check_contains(error(CopyFault::kMisaligned), {"write_tensor()", "a multiple of 128 bytes"});
    check_contains(error(CopyFault::kNoMap), {"not made by make_tensor_map()"});
    check_contains(error(CopyFault::kNoBlock), {"copy_tensor()", "no block 1 in a cluster of 1"});
    check_contains(error(CopyFault::kReadWithinPiece),
                   {"copy_tensor()", "a multiple of 16 bytes, not at byte 120,"});
    check_contains(error(CopyFault::kMulticastWithinPiece),
                   {"copy_tensor()", "a multiple of 16 bytes, not at byte 20,"});
    check_contains(error(CopyFault::kWriteWithinPiece),
                   {"write_tensor()", "a multiple of 16 bytes, not at byte -4,"});
  }
}

// ---- Warpgroups ----

// Barriers at which some warps wait and others only arrive: in each round the first warpgroup runs
// before the second, which runs before the first one's next round.
void test_named_barriers() {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    const Seed seeded(seed);
    std::vector<int> order;
    simt::launch(1, 256, 0, [&] {
      const int group = threadIdx.x / 128;
      for (int round = 0; round < 4; ++round) {
        if (round > 0 || group == 1) meet(1 + group, 256);
        order.push_back(2 * round + group);
        if (round < 3 || group == 0) pass(2 - group, 256);
      }
    });
    bool right = order.size() == 1024;
    for (std::size_t i = 0; i < order.size(); ++i)
      right = right && order[i] == static_cast<int>(i / 128);
    CHECK(right);
  }
  check_contains(error_of(128,
                          [] {
                            if (threadIdx.x < 32) meet(2, 64);
                          }),
                 {"deadlock", "meet()", "for barrier 2, where 32 of 64 threads have come"});
  check_contains(error_of(128, [] { meet(2, threadIdx.x < 32 ? 64 : 128); }),
                 {"meet()", "barrier 2 of ", "threads, where others have come to one of "});
  check_contains(error_of(128, [] { meet(16, 128); }), {"meet()", "1 to 15, not 16"});
  check_contains(error_of(128, [] { meet(1, 100); }), {"100 threads", "no whole warps"});
}

void test_registers() {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    const Seed seeded(seed);
    // 384 threads have 168 registers each: 40 + 2 x 232 = 3 x 168.
    CHECK(error_of(384, [] {
            if (threadIdx.x < 128) {
              give_up_registers<40>();
            } else {
              take_registers<232>();
            }
          }).empty());
    check_contains(error_of(384,
                            [] {
                              if (threadIdx.x < 128) {
                                give_up_registers<40>();
                              } else {
                                take_registers<240>();
                              }
                            }),
                   {"deadlock", "take_registers()", "to have 240 registers in place of 168",
                    "are free in the block"});
  }
  check_contains(error_of(384, [] { give_up_registers<176>(); }), {"has 168 registers", "give up"});
  check_contains(error_of(384, [] { take_registers<160>(); }), {"has 168 registers", "take"});
}

// ---- Products ----

enum class Fault {
  kNone,
  kWrongPhase,
  kTooFewBytes,
  kCopiedOver,
  kWrittenOver,
  kSumsRead,
  kSumsWritten,
  kNotBegun,
  kNoSwizzle,
  kLeadingTooSmall,
  kLeadingTooLarge,
  kStride,
  kWithinAtom,
  kNotWaited,
  kMissingThread,
  kDifferent
};

constexpr int kProductCols = 128;

// The product of 64 x 64 by 64 x kProductCols.
struct ProductStorage {
  alignas(kAtomBytes) unsigned char left[kPanelBytes];
  unsigned char right[2 * kPanelBytes];
  Mbarrier copied[2];
};

template <bool kDeepA, bool kDeepB>
void multiply_tiles(const TensorMap& left, const TensorMap& right, float* result, float* early,
                    Fault fault) {
  using T = __nv_bfloat16;
  auto& storage = aligned<ProductStorage>();
  const int thread = threadIdx.x;
  const auto copy_left = [&](Mbarrier* barrier) {
    copy_tensor(storage.left, left, 0, 0, 0, barrier);
  };
  if (thread == 0) {
    initialise(&storage.copied[0]);
    initialise(&storage.copied[1]);
    announce(&storage.copied[0], 3 * kPanelBytes - (fault == Fault::kTooFewBytes ? 1024 : 0));
    copy_left(&storage.copied[0]);
    copy_tensor(storage.right, right, 0, 0, 0, &storage.copied[0]);
    if (!kDeepB) copy_tensor(storage.right + kPanelBytes, right, 64, 0, 0, &storage.copied[0]);
  }
  __syncthreads();
  wait(&storage.copied[0], fault == Fault::kWrongPhase);
  float sums[kProductCols / 2];
  if (fault != Fault::kNotBegun) begin_products();
  const std::uint64_t a = matrix_descriptor<kDeepA>(storage.left);
  std::uint64_t b = matrix_descriptor<kDeepB>(storage.right);
  const std::uint64_t leading = std::uint64_t{0x3fff} << 16;
  if (fault == Fault::kNoSwizzle) b &= ~(std::uint64_t{3} << 62);
  if (fault == Fault::kLeadingTooSmall) b = (b & ~leading) | 64 << 16;
  if (fault == Fault::kLeadingTooLarge) b = (b & ~leading) | kPanelBytes / 8 << 16;
  if (fault == Fault::kStride) b += std::uint64_t{8} << 32;
  if (fault == Fault::kWithinAtom) b += 8;
  for (int k = 0; k < 4; ++k) {
    if (fault == Fault::kMissingThread && thread == 9 && k == 3) continue;
    const int step = fault == Fault::kDifferent && thread == 9 ? 0 : k;
    multiply_add<T, kDeepA, kDeepB>(sums, a + step * kDepthStepBytes<kDeepA> / 16,
                                    b + step * kDepthStepBytes<kDeepB> / 16, k > 0);
  }
  end_products();
  if (fault == Fault::kNotWaited) return;
  if (fault == Fault::kCopiedOver && thread == 0) {
    announce(&storage.copied[1], kPanelBytes);
    copy_left(&storage.copied[1]);
  }
  if (fault == Fault::kCopiedOver) wait(&storage.copied[1], 0);
  if (fault == Fault::kWrittenOver && thread == 0) storage.left[5] ^= 1;
  if (fault == Fault::kSumsRead) __syncthreads();  // all threads have issued the products
  if (fault == Fault::kSumsRead && thread == 0) *early = sums[7];
  if (fault == Fault::kSumsWritten && thread == 0) sums[7] = 1234;
  wait_for_products<0>();
  hold(sums);
  for (int i = 0; i < kProductCols / 2; ++i) {
    const int row = thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8;
    const int col = i / 4 * 8 + thread % 4 * 2 + i % 2;
    result[row * kProductCols + col] = sums[i];
  }
}

template <bool kDeepA, bool kDeepB>
class ProductTest {
 public:
  ProductTest() {
    for (int i = 0; i < 64 * 64; ++i) from_float(noise(i), a_[i]);
    for (int i = 0; i < kProductCols * 64; ++i) from_float(noise(i + 1000000), b_[i]);
  }

  std::string error(Fault fault) {
    const auto map = [](const Array<__nv_bfloat16>& x, bool deep, int rows) {
      return make_tensor_map({CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                              x.data(),
                              {deep ? 64 : rows, deep ? rows : 64, 1},
                              {2 * (deep ? 64 : rows), 2 * 64 * rows},
                              {64, deep ? rows : 64, 1}});
    };
    const TensorMap left = map(a_, kDeepA, 64);
    const TensorMap right = map(b_, kDeepB, kProductCols);
    return error_of(1, 128, kAlignedBytes<ProductStorage>, [&] {
      multiply_tiles<kDeepA, kDeepB>(left, right, result_.data(), &early, fault);
    });
  }

  bool is_right() const {
    for (int row = 0; row < 64; ++row) {
      for (int col = 0; col < kProductCols; ++col) {
        double sum = 0;
        for (int k = 0; k < 64; ++k) {
          sum += double{to_float(a_[kDeepA ? row * 64 + k : k * 64 + row])} *
                 to_float(b_[kDeepB ? col * 64 + k : k * kProductCols + col]);
        }
        if (!(std::abs(sum - result_[row * kProductCols + col]) < 1e-4)) return false;
      }
    }
    return true;
  }

  float early = 0;

 private:
  Array<__nv_bfloat16> a_{64 * 64};
  Array<__nv_bfloat16> b_{kProductCols * 64};
  Array<float> result_{64 * kProductCols};
};

void test_products() {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    const Seed seeded(seed);
    const auto check = [](auto&& test) {
      const std::string error = test.error(Fault::kNone);
      CHECK(error.empty());
      if (!error.empty()) std::printf("%s\n", error.c_str());
      CHECK(test.is_right());
    };
    check(ProductTest<true, true>());
    check(ProductTest<true, false>());
    check(ProductTest<false, true>());
    check(ProductTest<false, false>());
  }
}

// A product of small integers whose left operand is in registers; `write` changes one of these
// while the product is in flight.
std::string product_of_registers(bool write, bool& is_right) {
  constexpr int kCols = 256;
  constexpr int kDepth = kProductBytes / 4;
  struct Storage {
    alignas(kAtomBytes) unsigned char right[kCols * kLineBytes];
    Mbarrier copied;
  };
  const auto left_of = [](int row, int k) { return static_cast<float>((row * 5 + k * 3) % 17); };
  Array<float> right(kCols * 32);
  Array<float> result(64 * kCols);
  for (int i = 0; i < kCols * 32; ++i) right[i] = static_cast<float>(i % 13 - 6);
  const TensorMap map = make_tensor_map({CU_TENSOR_MAP_DATA_TYPE_TFLOAT32,
                                         right.data(),
                                         {32, kCols, 1},
                                         {kLineBytes, kLineBytes * kCols},
                                         {32, kCols, 1}});
  const std::string error = error_of(1, 128, kAlignedBytes<Storage>, [&] {
    auto& storage = aligned<Storage>();
    const int thread = threadIdx.x;
    if (thread == 0) {
      initialise(&storage.copied);
      announce(&storage.copied, kCols * kLineBytes);
      copy_tensor(storage.right, map, 0, 0, 0, &storage.copied);
    }
    __syncthreads();
    wait(&storage.copied, 0);
    const int row = thread / 32 * 16 + thread % 32 / 4;
    std::uint32_t left[4];
    for (int i = 0; i < 4; ++i) {
      const float x = left_of(row + i % 2 * 8, thread % 4 + i / 2 * 4);
      std::memcpy(&left[i], &x, sizeof(x));
    }
    float sums[kCols / 2];
    begin_products();
    multiply_add(sums, left, matrix_descriptor<true>(storage.right), false);
    end_products();
    if (write && thread == 77) left[2] ^= 1u << 30;
    wait_for_products<0>();
    hold(sums);
    for (int i = 0; i < kCols / 2; ++i) {
      result[(row + i / 2 % 2 * 8) * kCols + i / 4 * 8 + thread % 4 * 2 + i % 2] = sums[i];
    }
  });
  is_right = true;
  for (int i = 0; i < 64 * kCols; ++i) {
    float sum = 0;
    for (int k = 0; k < kDepth; ++k) sum += left_of(i / kCols, k) * right[i % kCols * 32 + k];
    is_right = is_right && sum == result[i];
  }
  return error;
}

void test_products_of_registers() {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    const Seed seeded(seed);
    bool is_right = false;
    CHECK(product_of_registers(false, is_right).empty());
    CHECK(is_right);
    // Products that complete early have read their operands.
    if (comes_late()) {
      check_contains(product_of_registers(true, is_right),
                     {"multiply_add()", "an operand was written to"});
    }
  }
}

void test_product_faults() {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    const Seed seeded(seed);
    ProductTest<true, false> test;
    const auto check = [&](Fault fault, const std::vector<std::string>& parts) {
      check_contains(test.error(fault), parts);
    };
    check(Fault::kTooFewBytes, {"copy_tensor()", "too few bytes are expected in phase 0"});
    check(Fault::kNotBegun, {"multiply_add()", "must call begin_products() first"});
    check(Fault::kNoSwizzle, {"multiply_add()", "the right operand has swizzle mode 0"});
    check(Fault::kLeadingTooSmall, {"right operand has a leading offset of 1024 bytes", "2048"});
    check(Fault::kLeadingTooLarge, {"multiply_add()", "not in the block's shared memory"});
    check(Fault::kStride, {"right operand has a stride offset of 1152 bytes"});
    check(Fault::kWithinAtom, {"right operand begins at address", "multiples of 1024 bytes"});
    check(Fault::kNotWaited, {"exited without a wait for the products"});
    check(Fault::kMissingThread, {"deadlock", "wait_for_products()", "for multiply_add()",
                                  "which 127 of the warpgroup's 128 threads have called"});
    check(Fault::kDifferent, {"call different products"});
    // Products that complete early have read their operands.
    if (comes_late()) {
      check(Fault::kWrongPhase, {"multiply_add()", "has not landed yet", "copy_tensor()"});
      check(Fault::kCopiedOver,
            {"copy_tensor()", "an operand of a product under way", "multiply_add()"});
      check(Fault::kWrittenOver, {"multiply_add()", "an operand was written to"});
    }
    if (seed % 3 == 1) {
      check(Fault::kWrongPhase, {"deadlock", "wait()", "for phase 1 of the mbarrier"});
    }
#ifdef JAX_GPUOPS_ASAN
    if (comes_late()) {
      check_contains(asan_report([&] { test.error(Fault::kSumsRead); }),
                     {"use-after-poison", "READ of size 4", "thread (0, 0, 0)"});
    }
#else
    check(Fault::kSumsWritten, {"thread (0, 0, 0): the sums of multiply_add()", "were written to"});
    CHECK(test.error(Fault::kSumsRead).empty());
    if (comes_late()) CHECK(std::isnan(test.early));
    if (seed % 3 == 1) CHECK(!std::isnan(test.early));
#endif
  }
}

// The product of a row and a column, added to `before`: the bits of each term below 2^-25 of the
// largest one are dropped, and the sum is rounded toward zero.
template <class T = __half>
ProductSum<T> dot(const std::vector<float>& a, const std::vector<float>& b,
                  ProductSum<T> before = 0) {
  using Sum = ProductSum<T>;
  constexpr int kLine = kLineBytes / sizeof(T);
  Array<T> left(64 * kLine);
  Array<T> right(64 * kLine);
  std::memset(left.data(), 0, kPanelBytes);
  std::memset(right.data(), 0, kPanelBytes);
  for (std::size_t k = 0; k < a.size(); ++k) {
    from_float(a[k], left[static_cast<int>(k)]);
    from_float(b[k], right[static_cast<int>(k)]);
  }
  struct Storage {
    alignas(kAtomBytes) unsigned char operands[2][kPanelBytes];
    Mbarrier copied;
  };
  const auto map = [](Array<T>& x) {
    return make_tensor_map({type_of<T>(), x.data(), {kLine, 64, 1}, {128, 8192}, {kLine, 64, 1}});
  };
  const TensorMap maps[2] = {map(left), map(right)};
  Sum result = 0;
  simt::launch(1, 128, kAlignedBytes<Storage>, [&] {
    auto& storage = aligned<Storage>();
    if (threadIdx.x == 0) {
      initialise(&storage.copied);
      announce(&storage.copied, 2 * kPanelBytes);
      for (int i = 0; i < 2; ++i) {
        copy_tensor(storage.operands[i], maps[i], 0, 0, 0, &storage.copied);
      }
    }
    __syncthreads();
    wait(&storage.copied, 0);
    Sum sums[32];
    for (Sum& sum : sums) sum = before;
    begin_products();
    multiply_add<T, true, true>(sums, matrix_descriptor<true>(storage.operands[0]),
                                matrix_descriptor<true>(storage.operands[1]), before != 0);
    end_products();
    wait_for_products<0>();
    hold(sums);
    if (threadIdx.x == 0) result = sums[0];
  });
  return result;
}

void test_product_arithmetic() {
  CHECK(dot({1, 2, 3}, {4, 5, 6}) == 32);
  const float tiny = 0x1p-13f;
  CHECK(dot({1, tiny}, {1, tiny * 2}) == 1);  // 2^-25, rounded
  CHECK(dot({1, tiny, tiny, tiny, tiny}, {1, tiny * 2, tiny * 2, tiny * 2, tiny * 2}) ==
        1 + 0x1p-23f);                                                        // four of them
  CHECK(dot({1, tiny, tiny, tiny, tiny}, {1, tiny, tiny, tiny, tiny}) == 1);  // 2^-26, lost
  CHECK(dot({-1, -tiny}, {1, tiny * 2}) == -1);
  CHECK(dot({0x1p-24f}, {0x1p-24f}) == 0x1p-48f);  // subnormal numbers count
  const float infinity = std::numeric_limits<float>::infinity();
  CHECK(dot({infinity, 1}, {1, 1}) == infinity);
  CHECK(std::isnan(dot({infinity, 1}, {0, 1})));
  CHECK(dot({}, {}) == 0);
}

// The faults whose checks depend on the types of factors and sums.
template <class T>
std::string fault_of_8_bits(Fault fault) {
  struct Storage {
    alignas(kAtomBytes) unsigned char operands[2][kPanelBytes];
  };
  return error_of(1, 128, kAlignedBytes<Storage>, [&] {
    auto& storage = aligned<Storage>();
    for (int i = threadIdx.x; i < 2 * kPanelBytes; i += 128) {
      storage.operands[i / kPanelBytes][i % kPanelBytes] = 56;
    }
    finish_writes_before_copies();
    __syncthreads();
    ProductSum<T> sums[32];
    if (fault != Fault::kNotBegun) begin_products();
    const int other = fault == Fault::kDifferent && threadIdx.x == 9;
    multiply_add<T, true, true>(sums, matrix_descriptor<true>(storage.operands[other]),
                                matrix_descriptor<true>(storage.operands[1]), false);
    end_products();
    if (fault == Fault::kNotWaited) return;
    if (fault == Fault::kWrittenOver && threadIdx.x == 0) storage.operands[0][5] ^= 1;
    if (fault == Fault::kSumsWritten && threadIdx.x == 0) sums[7] = 1234;
    wait_for_products<0>();
    hold(sums);
  });
}

template <class T>
void check_faults_of_8_bits() {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    const Seed seeded(seed);
    CHECK(fault_of_8_bits<T>(Fault::kNone).empty());
    check_contains(fault_of_8_bits<T>(Fault::kNotBegun), {"must call begin_products() first"});
    check_contains(fault_of_8_bits<T>(Fault::kDifferent), {"call different products"});
    check_contains(fault_of_8_bits<T>(Fault::kNotWaited), {"exited without a wait"});
    if (comes_late()) {
      check_contains(fault_of_8_bits<T>(Fault::kWrittenOver), {"an operand was written to"});
    }
#ifndef JAX_GPUOPS_ASAN
    check_contains(fault_of_8_bits<T>(Fault::kSumsWritten),
                   {"thread (0, 0, 0): the sums of multiply_add()", "were written to"});
#endif
  }
}

// With 8-bit floats, terms keep 13 fraction bits relative to the largest one, and so does the sum.
void test_product_arithmetic_of_8_bits() {
  using E4M3 = __nv_fp8_e4m3;
  using E5M2 = __nv_fp8_e5m2;
  CHECK(dot<E4M3>({1, 2, 3}, {4, 5, 6}) == 32);
  CHECK(dot<E5M2>({1, 2, 3}, {4, 5, 6}) == 32);
  const float small = 0x1p-6f;
  CHECK(dot<E4M3>({1, small}, {1, small * 0.5f}) == 1 + 0x1p-13f);
  CHECK(dot<E4M3>({1, small, small}, {1, small * 0.25f, small * 0.25f}) == 1);  // each is lost
  CHECK(dot<E4M3>({-1, -small}, {1, small * 0.25f}) == -1);
  CHECK(dot<E4M3>({small}, {small}, 1) == 1 + 0x1p-12f);
  CHECK(dot<E4M3>({small * 0.25f}, {small}, 1) == 1);
  // The sum is larger than each term, and keeps 13 fraction bits relative to its own exponent.
  CHECK(dot<E4M3>({1, 1, 1, 1, small}, {1, 1, 1, 1, small * 0.5f}) == 4);
  CHECK(dot<E4M3>({1, 1, 1, 1, 1, 0.25f}, {1, 1, 1, 1, 1, 0x1p-9f}) == 5 + 0x1p-11f);
  CHECK(dot<E4M3>({0x1p-9f}, {0x1p-9f}) == 0x1p-18f);  // subnormal numbers count
  CHECK(dot<E5M2>({0x1p-16f}, {0x1p-16f}) == 0x1p-32f);
  CHECK(dot<E4M3>({448}, {448}) == 448 * 448);
  CHECK(std::isnan(dot<E4M3>({NAN, 1}, {1, 1})));
  const float infinity = std::numeric_limits<float>::infinity();
  CHECK(dot<E5M2>({infinity, 1}, {1, 1}) == infinity);
  CHECK(std::isnan(dot<E5M2>({infinity, 1}, {0, 1})));
  CHECK(dot<E4M3>({}, {}) == 0);

  using Int = std::int8_t;
  CHECK(dot<Int>({-1, 0.5f}, {-1, 0.25f}) == 128 * 128 + 64 * 32);
  CHECK(dot<Int>({-1}, {-1}, -7) == 128 * 128 - 7);
  constexpr int kLargest = std::numeric_limits<int>::max();
  CHECK(dot<Int>({-1}, {-1}, kLargest) == std::numeric_limits<int>::min() + 128 * 128 - 1);
}

// ---- Products of one warp ----

// sums += left right^T with a depth of 16, by all lanes of a warp or by all but one.
template <class T>
std::string multiply_by_warp(const Array<T>& left, const Array<T>& right, Array<float>& sums,
                             unsigned missing_lane = 32) {
  return error_of(32, [&] {
    const unsigned lane = threadIdx.x;
    if (lane == missing_lane) return;
    const unsigned group = lane / 4;
    const unsigned pair = lane % 4 * 2;
    std::uint32_t a[4];
    std::uint32_t b[2];
    float own[4];
    for (unsigned i = 0; i < 4; ++i) {
      std::memcpy(&a[i], &left[(group + i % 2 * 8) * 16 + pair + i / 2 * 8], 4);
      own[i] = sums[(group + i / 2 * 8) * 8 + pair + i % 2];
    }
    for (unsigned i = 0; i < 2; ++i) std::memcpy(&b[i], &right[group * 16 + pair + i * 8], 4);
    multiply_add_warp<T>(own, a, b);
    for (unsigned i = 0; i < 4; ++i) sums[(group + i / 2 * 8) * 8 + pair + i % 2] = own[i];
  });
}

template <class T>
void check_product_of_warp() {
  Array<T> left(16 * 16);
  Array<T> right(8 * 16);
  for (int i = 0; i < 16 * 16; ++i) from_float(noise(i), left[i]);
  for (int i = 0; i < 8 * 16; ++i) from_float(noise(i + 1000), right[i]);
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    const Seed seeded(seed);
    Array<float> sums(16 * 8);
    for (int i = 0; i < 16 * 8; ++i) sums[i] = noise(i + 2000);
    CHECK(multiply_by_warp(left, right, sums).empty());
    int wrong = 0;
    for (int row = 0; row < 16; ++row) {
      for (int col = 0; col < 8; ++col) {
        double sum = noise(row * 8 + col + 2000);
        for (int k = 0; k < 16; ++k) {
          sum += double{to_float(left[row * 16 + k])} * to_float(right[col * 16 + k]);
        }
        wrong += !(std::abs(sum - sums[row * 8 + col]) < 4e-6);
      }
    }
    CHECK(wrong == 0);
  }
}

void test_products_of_warp() {
  check_product_of_warp<__half>();
  check_product_of_warp<__nv_bfloat16>();

  // Rounded as by wgmma: bits below 2^-25 of the largest term are lost. Each row has its own terms.
  const float infinity = std::numeric_limits<float>::infinity();
  Array<__half> left(16 * 16);
  Array<__half> right(8 * 16);
  for (int i = 0; i < 16 * 16; ++i) from_float(i % 16 == 0 ? 1 : 0x1p-13f, left[i]);
  for (int i = 0; i < 8 * 16; ++i) from_float(i % 16 == 0 ? 1 : 0x1p-13f, right[i]);
  from_float(infinity, left[3 * 16 + 5]);
  Array<float> sums(16 * 8);
  for (int i = 0; i < 16 * 8; ++i) sums[i] = 0;
  CHECK(multiply_by_warp(left, right, sums).empty());
  for (int i = 0; i < 16 * 8; ++i) CHECK(sums[i] == (i / 8 == 3 ? infinity : 1.0f));

  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    const Seed seeded(seed);
    check_contains(multiply_by_warp(left, right, sums, 9),
                   {"multiply_add_warp()", "absent lanes 0x00000200"});
  }
}

// The same for TF32 and for doubles, with a depth of 8.
template <class T>
std::string multiply_wide_by_warp(const Array<T>& left, const Array<T>& right,
                                  Array<MmaSum<T>>& sums) {
  return error_of(32, [&] {
    const unsigned group = threadIdx.x / 4;
    const unsigned k = threadIdx.x % 4;
    MmaWord<T> a[4];
    MmaWord<T> b[2];
    MmaSum<T> own[4];
    for (unsigned i = 0; i < 4; ++i) {
      std::memcpy(&a[i], &left[(group + i % 2 * 8) * 8 + k + i / 2 * 4], sizeof(T));
      own[i] = sums[(group + i / 2 * 8) * 8 + 2 * k + i % 2];
    }
    for (unsigned i = 0; i < 2; ++i) std::memcpy(&b[i], &right[group * 8 + k + i * 4], sizeof(T));
    multiply_add_warp<T>(own, a, b);
    for (unsigned i = 0; i < 4; ++i) sums[(group + i / 2 * 8) * 8 + 2 * k + i % 2] = own[i];
  });
}

// Sums of doubles are bitwise equal to a chain of FMAs; the lower 13 bits of floats are ignored.
void test_wide_products_of_warp() {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    const Seed seeded(seed);
    Array<double> left(16 * 8);
    Array<double> right(8 * 8);
    Array<double> sums(16 * 8);
    for (int i = 0; i < 16 * 8; ++i) left[i] = 1 / (3.0 + noise(i));
    for (int i = 0; i < 8 * 8; ++i) right[i] = 1 / (3.0 + noise(i + 1000));
    for (int i = 0; i < 16 * 8; ++i) sums[i] = noise(i + 2000) / 7.0;
    CHECK(multiply_wide_by_warp(left, right, sums).empty());
    for (int row = 0; row < 16; ++row) {
      for (int col = 0; col < 8; ++col) {
        double sum = noise(row * 8 + col + 2000) / 7.0;
        for (int k = 0; k < 8; ++k) sum = std::fma(left[row * 8 + k], right[col * 8 + k], sum);
        CHECK(sum == sums[row * 8 + col]);
      }
    }
  }

  Array<float> left(16 * 8);
  Array<float> right(8 * 8);
  Array<float> sums(16 * 8);
  for (int i = 0; i < 16 * 8; ++i) {
    left[i] = 1 + 0x1p-10f + 0x1p-11f;
    sums[i] = static_cast<float>(i);
  }
  for (int i = 0; i < 8 * 8; ++i) right[i] = static_cast<float>(i / 8);
  CHECK(multiply_wide_by_warp(left, right, sums).empty());
  for (int i = 0; i < 16 * 8; ++i) {
    CHECK(sums[i] == static_cast<float>(i) + 8 * static_cast<float>(i % 8) * (1 + 0x1p-10f));
  }
}

void test_rounding_to_tf32() {
  const auto rounded = [](float x) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, sizeof(bits));
    bits = round_to_tf32(bits);
    std::memcpy(&x, &bits, sizeof(x));
    return x;
  };
  constexpr float kUnit = 0x1p-10f;
  CHECK(rounded(1 + 0.49f * kUnit) == 1);
  CHECK(rounded(1 + 0.5f * kUnit) == 1 + kUnit);
  CHECK(rounded(-1 - 1.5f * kUnit) == -1 - 2 * kUnit);
  CHECK(rounded(2 - 0.5f * kUnit) == 2);
  const float infinity = std::numeric_limits<float>::infinity();
  CHECK(rounded(infinity) == infinity);
  CHECK(rounded(-infinity) == -infinity);
  CHECK(std::isnan(rounded(NAN)));
}

// Where a row of four matrices is in shared memory: it may be at any place.
unsigned place(unsigned row) { return row * 5 % 32; }

// Each lane of a warp gets its elements of four matrices.
template <bool kTransposed>
void check_loading_matrices() {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    const Seed seeded(seed);
    int wrong = 0;
    const std::string error = error_of(1, 32, 32 * 16, [&] {
      auto* const rows = shared_array<std::uint16_t>();
      const unsigned lane = threadIdx.x;
      for (unsigned i = 0; i < 8; ++i) {
        rows[place(lane) * 8 + i] = static_cast<std::uint16_t>(lane * 8 + i);
      }
      __syncthreads();
      std::uint32_t words[4];
      load_matrices<kTransposed>(shared_address(rows + place(lane) * 8), words);
      for (unsigned matrix = 0; matrix < 4; ++matrix) {
        for (unsigned i = 0; i < 2; ++i) {
          const unsigned outer = lane / 4;
          const unsigned inner = lane % 4 * 2 + i;
          const unsigned row = kTransposed ? inner : outer;
          const unsigned col = kTransposed ? outer : inner;
          wrong += (words[matrix] >> (16 * i) & 0xffff) != matrix * 64 + row * 8 + col;
        }
      }
    });
    CHECK(error.empty());
    CHECK(wrong == 0);
    check_contains(error_of(1, 32, 32 * 16 + 16,
                            [] {
                              std::uint32_t words[4];
                              load_matrices<kTransposed>(
                                  shared_address(shared_array<float>() + threadIdx.x), words);
                            }),
                   {"load_matrices()", "which is not a multiple of 16"});
    check_contains(error_of(1, 32, 31 * 16,
                            [] {
                              std::uint32_t words[4];
                              load_matrices<kTransposed>(
                                  shared_address(shared_array<float>()) + threadIdx.x * 16, words);
                            }),
                   {"load_matrices()", "thread (31, 0, 0)", "not in the block's shared memory"});
    check_contains(error_of(1, 32, 32 * 16,
                            [] {
                              if (threadIdx.x == 9) return;
                              std::uint32_t words[4];
                              load_matrices<kTransposed>(
                                  shared_address(shared_array<float>()) + threadIdx.x * 16, words);
                            }),
                   {"load_matrices()", "absent lanes 0x00000200"});
  }
}

// Each lane of a warp gives its elements of four matrices.
template <bool kTransposed>
void check_storing_matrices() {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    const Seed seeded(seed);
    int wrong = 0;
    const std::string error = error_of(1, 32, 32 * 16, [&] {
      auto* const rows = shared_array<std::uint16_t>();
      const unsigned lane = threadIdx.x;
      std::uint32_t words[4];
      for (unsigned matrix = 0; matrix < 4; ++matrix) {
        const unsigned first = matrix * 64 + lane / 4 * 8 + lane % 4 * 2;
        words[matrix] = first | (first + 1) << 16;
      }
      store_matrices<kTransposed>(shared_address(rows + place(lane) * 8), words[0], words[1],
                                  words[2], words[3]);
      __syncthreads();
      for (unsigned i = 0; i < 8; ++i) {
        const unsigned own = lane % 8;
        const unsigned expected = lane / 8 * 64 + (kTransposed ? i * 8 + own : own * 8 + i);
        wrong += rows[place(lane) * 8 + i] != expected;
      }
    });
    CHECK(error.empty());
    CHECK(wrong == 0);
    check_contains(error_of(1, 32, 32 * 16 + 16,
                            [] {
                              store_matrices<kTransposed>(
                                  shared_address(shared_array<float>() + threadIdx.x), 0, 0, 0, 0);
                            }),
                   {"store_matrices()", "which is not a multiple of 16"});
  }
}

// ---- Matmul ----

struct Shape {
  int rows;
  int cols;
  int depth;
  int batch = 1;
  bool shares_b = false;  // one b for the whole batch
};

int round_up(int x, int to) { return (x + to - 1) / to * to; }

// Lines of `inner` numbers with the stride `stride`, and NaN between them.
template <class T>
Array<T> random_lines(std::int64_t lines, int inner, int stride, std::uint64_t seed) {
  Array<T> result(lines * stride);
  for (std::int64_t line = 0; line < lines; ++line) {
    for (int i = 0; i < inner; ++i) {
      from_float(noise((seed << 32) + static_cast<std::uint64_t>(line * inner + i)),
                 result[line * stride + i]);
    }
  }
  return result;
}

// The same numbers as doubles.
template <class T>
std::vector<double> widened(const Array<T>& x, std::int64_t size) {
  std::vector<double> result(size);
  for (std::int64_t i = 0; i < size; ++i) result[i] = to_float(x[i]);
  return result;
}

// Runs the kernel once with each seed.
template <class Config>
void check_matmul(const Shape& shape, unsigned clusters, std::vector<std::uint64_t> seeds) {
  using Factor = typename Config::Factor;
  using Result = typename Config::Result;
  constexpr bool kDeepA = Config::kDeepA;
  constexpr bool kDeepB = Config::kDeepB;
  const auto [rows, cols, depth, batch, shares_b] = shape;
  const int b_batch = shares_b ? 1 : batch;
  const int a_inner = kDeepA ? depth : rows;
  const int a_lines = kDeepA ? rows : depth;
  const int b_inner = kDeepB ? depth : cols;
  const int b_lines = kDeepB ? cols : depth;
  constexpr int kAligned = sizeof(Factor) == 1 ? 16 : 8;
  const int a_stride = round_up(a_inner, kAligned) + kAligned;
  const int b_stride = round_up(b_inner, kAligned) + kAligned;
  constexpr int kPerSector = 16 / sizeof(Result);
  const int result_rows = Config::kTurned ? cols : rows;
  const int result_cols = Config::kTurned ? rows : cols;
  const int stride = round_up(result_cols, kPerSector) + kPerSector;
  const auto a = random_lines<Factor>(a_lines * batch, a_inner, a_stride, 1);
  const auto b = random_lines<Factor>(b_lines * b_batch, b_inner, b_stride, 2);

  constexpr int kBytes = sizeof(Factor);
  const auto a_maps = matmul::maps_of_factor<Factor, kDeepA>(
      {a.data(), {batch, a_lines, a_inner, kDeepA, kBytes}, a_stride}, Config::kRows);
  const auto b_maps = matmul::maps_of_factor<Factor, kDeepB>(
      {b.data(), {b_batch, b_lines, b_inner, kDeepB, kBytes}, b_stride},
      Config::kCols / Config::kClusterRows);
  matmul::TileOrder order{};
  order.rows = static_cast<unsigned>(round_up(rows, Config::kRows * Config::kClusterRows) /
                                     (Config::kRows * Config::kClusterRows));
  order.cols = static_cast<unsigned>(round_up(cols, Config::kCols) / Config::kCols);
  order.group = 2;
  order.steps = round_up(depth, matmul::kStageDepth<Factor>) / matmul::kStageDepth<Factor>;
  const int splits = Config::kSplits ? std::min(order.steps, 3) : 1;
  order.tiles = order.rows * order.cols * static_cast<unsigned>(batch * splits);
  order.split_steps = matmul::shares_of(order.steps, splits);
  order.batch = batch;
  order.a_batch_stride = 1;
  order.b_batch_stride = shares_b ? 0 : 1;

  // A step of 16 terms, or of 8 for floats, truncates each term and the sum at 2^-25, and rounds
  // toward zero at 2^-23; one of 8-bit floats, at 2^-13. Promoted sums do that only within a stage.
  constexpr bool kExact = std::is_same_v<typename Config::Sum, int>;
  constexpr int kStep = kProductBytes / sizeof(Factor);
  const double per_step = kExact                ? 0
                          : sizeof(Factor) == 1 ? (kStep + 2) * 0x1p-13
                                                : (kStep + 1) * 0x1p-25 + 0x1p-23;
  const int steps = Config::kPromotes ? 4 : depth / kStep + 1;
  const double per_term = steps * per_step + (Config::kPromotes ? order.steps * 0x1p-24 : 0);
  const double rounding = sizeof(Result) == 4              ? 0
                          : std::is_same_v<Result, __half> ? 0x1p-11
                                                           : 0x1p-8;
  struct Expected {
    double sum = 0;
    double size = 0;
  };
  std::vector<Expected> expected;
  const auto wide_a = widened(a, std::int64_t{a_lines} * batch * a_stride);
  const auto wide_b = widened(b, std::int64_t{b_lines} * b_batch * b_stride);
  for (int matrix = 0; matrix < batch; ++matrix) {
    const double* const x = wide_a.data() + std::int64_t{matrix} * a_lines * a_stride;
    const double* const y =
        wide_b.data() + std::int64_t{shares_b ? 0 : matrix} * b_lines * b_stride;
    for (int row = 0; row < rows; ++row) {
      for (int col = 0; col < cols; ++col) {
        Expected one;
        for (int k = 0; k < depth; ++k) {
          const double term = x[kDeepA ? row * a_stride + k : k * a_stride + row] *
                              y[kDeepB ? col * b_stride + k : k * b_stride + col];
          one.sum += term;
          one.size += std::abs(term);
        }
        expected.push_back(one);
      }
    }
  }

  for (const std::uint64_t seed : seeds) {
    const Seed seeded(seed);
    const std::int64_t split_size = std::int64_t{batch} * result_rows * stride;
    Array<Result> result(splits * split_size);
    const TensorMap result_map =
        matmul::map_of<Result>(matmul::kResultType<Result>, result.data(), splits * batch,
                               result_rows, result_cols, stride, Config::kPanelRows);
    matmul::ResultArray<Result> array;
    if (Config::kWritesSums) array = {result.data(), result_rows, stride};
    const std::string error = error_of(
        {std::min(clusters, order.tiles) * Config::kBlocks, Config::kThreads,
         matmul::kSharedBytes<matmul::StorageOf<Config>>, Config::kBlocks},
        [&] {
          matmul::persistent_kernel<Config>(a_maps, b_maps, result_map, array, order, {}, {});
        });
    CHECK(error.empty());
    if (!error.empty()) std::printf("%s\n", error.c_str());

    std::int64_t wrong = 0;
    for (int row = 0; row < batch * result_rows; ++row) {
      const Result* const line = result.data() + std::int64_t{row} * stride;
      for (int col = 0; col < result_cols; ++col) {
        const int in_matrix = row % result_rows;
        const std::int64_t of_matrix = std::int64_t{row / result_rows} * rows * cols;
        const auto [sum, size] = expected[of_matrix + (Config::kTurned ? col * cols + in_matrix
                                                                       : in_matrix * cols + col)];
        double actual = 0;
        for (int split = 0; split < splits; ++split)
          actual += to_float(line[split * split_size + col]);
        wrong += !(std::abs(actual - sum) <= per_term * size + rounding * std::abs(sum));
      }
      if (Config::kWritesSums) continue;
      // Elements after the last multiple of 16 bytes are not part of the result.
      const Array<Result> untouched(1);
      for (int col = round_up(result_cols, kPerSector); col < stride; ++col) {
        wrong += std::memcmp(&line[col], untouched.data(), sizeof(Result)) != 0;
      }
    }
    CHECK(wrong == 0);
    if (wrong != 0) {
      std::printf("  %d x %d x %d, batch %d: %lld wrong\n", rows, cols, depth, batch,
                  static_cast<long long>(wrong));
    }
  }
}

template <class Config>
void check_matmul() {
  check_matmul<Config>({1, 3, 5}, 1, {0, 1, 2, 3, 4, 5});
  check_matmul<Config>({130, 200, 200}, 1, {0, 1, 2, 3, 4, 5});
  check_matmul<Config>({70, 264, 64, 3, true}, 2, {7});
  check_matmul<Config>({300, 72, 392, 2}, 1, {7});
}

void test_matmul() {
  using B = __nv_bfloat16;
  using H = __half;
  // Layouts (is k contiguous in a, in b), tile, consumers, stages, cluster, pending, late.
  check_matmul<matmul::Persistent<B, B, true, false, 128, 128, 2, 3, 2, 1, false>>();
  check_matmul<matmul::Persistent<B, B, true, true, 128, 128, 2, 3, 1, 1, true>>();
  check_matmul<matmul::Persistent<B, B, false, false, 256, 128, 2, 2, 1, 1, true>>();
  check_matmul<matmul::Persistent<B, float, false, true, 128, 128, 2, 3, 2, 1, false>>();
  check_matmul<matmul::Persistent<H, H, false, false, 128, 192, 2, 2, 1, 0, true>>();
  check_matmul<matmul::Persistent<H, H, true, true, 128, 256, 2, 2, 2, 1, false>>();
  check_matmul<matmul::Persistent<H, float, true, false, 64, 64, 1, 2, 1, 0, false>>();
  check_matmul<matmul::Persistent<float, float, true, true, 128, 256, 2, 2, 2, 1, false>>();
  // Results that are stored transposed.
  using matmul::Scaling;
  check_matmul<matmul::Persistent<B, B, false, true, 128, 160, 2, 2, 1, 0, true, false, false,
                                  false, Scaling::kNone, false, true>>();
  check_matmul<matmul::Persistent<H, H, true, true, 128, 208, 2, 2, 1, 0, true, false, false, false,
                                  Scaling::kNone, false, true>>();
  check_matmul<matmul::Persistent<B, B, true, true, 128, 96, 2, 2, 1, 1, true, false, false, false,
                                  Scaling::kNone, false, true>>();
  // Partial sums that are.
  check_matmul<matmul::Persistent<B, float, false, true, 128, 160, 2, 2, 1, 0, false, false, false,
                                  false, Scaling::kNone, false, true>>();
  check_matmul<matmul::Persistent<H, float, true, true, 128, 96, 2, 2, 1, 1, false, false, false,
                                  false, Scaling::kNone, false, true>>();
  using E4M3 = __nv_fp8_e4m3;
  using E5M2 = __nv_fp8_e5m2;
  using I = std::int8_t;
  check_matmul<matmul::Persistent<E4M3, B, true, true, 128, 256, 2, 2, 2, 1, true>>();
  check_matmul<matmul::Persistent<E5M2, H, true, true, 64, 128, 1, 2, 1, 1, false>>();
  check_matmul<matmul::Persistent<I, int, true, true, 128, 256, 2, 2, 2, 1, false>>();
  // Promoted sums.
  check_matmul<matmul::Persistent<E4M3, B, true, true, 128, 256, 2, 2, 2, 0, false, true>>();
  check_matmul<matmul::Persistent<E4M3, float, true, true, 256, 64, 2, 2, 1, 0, false, true>>();
  check_matmul<matmul::Persistent<E5M2, B, true, true, 64, 128, 1, 2, 1, 0, false, true>>();
}

// More splits than the plan has for the executor's few multiprocessors; with an odd number of them,
// a bias for each matrix, and relu.
void test_split_k_reduce() {
  for (const int splits : {2, 4, 5, 9, 16}) {
    for (const int cols : {5, 64}) {
      matmul::Problem problem{};
      problem.batch = 2;
      problem.m = 9;
      problem.n = cols;
      problem.has_bias = splits % 2 == 1;
      problem.epilogue = problem.has_bias ? matmul::EpilogueOp::kRelu : matmul::EpilogueOp::kNone;
      const std::int64_t pitch = matmul::partial_pitch(problem);
      const std::int64_t rows = problem.batch * problem.m;
      const auto partials = random_lines<float>(splits * rows, cols, static_cast<int>(pitch), 3);
      Array<float> result(rows * cols + 1);
      const auto bias = random_lines<float>(problem.batch, cols, cols, 4);
      matmul::Buffers buffers{};
      buffers.result = result.data();
      buffers.bias = problem.has_bias ? bias.data() : nullptr;
      matmul::launch_split_k_reduce<float>(Queue{}, splits, problem, partials.data(), buffers);
      std::int64_t wrong = 0;
      for (std::int64_t row = 0; row < rows; ++row) {
        for (int col = 0; col < cols; ++col) {
          float sum = 0;
          for (int split = 0; split < splits; ++split) {
            sum += partials[(split * rows + row) * pitch + col];
          }
          if (problem.has_bias) sum = std::max(sum + bias[row / problem.m * cols + col], 0.0f);
          wrong += result[row * cols + col] != sum;
        }
      }
      CHECK(wrong == 0);
      CHECK(std::isnan(result[rows * cols]));
    }
  }
}

}  // namespace

void test_tensor() {
  test_tensor_maps();
  test_boxes();
  test_multicast();
  test_copy_faults();
  test_named_barriers();
  test_registers();
  test_products();
  test_products_of_registers();
  test_product_faults();
  test_product_arithmetic();
  check_faults_of_8_bits<__nv_fp8_e4m3>();
  check_faults_of_8_bits<std::int8_t>();
  test_product_arithmetic_of_8_bits();
  test_products_of_warp();
  test_wide_products_of_warp();
  test_rounding_to_tf32();
  check_loading_matrices<false>();
  check_loading_matrices<true>();
  check_storing_matrices<false>();
  check_storing_matrices<true>();
  test_matmul();
  test_split_k_reduce();
}

}  // namespace JAX_GPUOPS_NAMESPACE
