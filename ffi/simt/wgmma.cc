// Products of matrices: those of warpgroups, beside the threads, with what belongs to them, and
// those of one warp.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <string>
#include <utility>

#include "simt/cuda.h"
#include "simt/warpgroup.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace simt {
namespace {

constexpr unsigned kLineBytes = 128;
constexpr unsigned kAtomBytes = 1024;
constexpr unsigned kPieceBytes = 16;
constexpr unsigned kWarpRows = kProductRows / kWarpgroupWarps;

bool writes_shared(const Copy& copy) {
  return copy.kind == Copy::Kind::kToShared || copy.kind == Copy::Kind::kToCluster;
}

std::string product_text(const Product& product) {
  return Caller{*product.first, product.function, product.site} + "";
}

// ---- Arithmetic ----

// A zero's, so that its product with anything is below all others.
constexpr std::int16_t kZeroExponent = -8000;
constexpr int kNoExponent = kZeroExponent / 2;

constexpr bool is_byte(FactorType type) {
  return type == FactorType::kFloat8E4M3 || type == FactorType::kFloat8E5M2 ||
         type == FactorType::kInt8;
}

// How many elements of a row a product takes.
constexpr unsigned depth_of(FactorType type) {
  if (type == FactorType::kTf32) return kProductWords / 2;
  return is_byte(type) ? kProductWords * 2 : kProductWords;
}

void decode_byte(std::uint8_t byte, FactorType type, double& value, std::int16_t& exponent,
                 bool& finite) {
  if (type == FactorType::kInt8) {
    value = static_cast<std::int8_t>(byte);
    return;
  }
  const bool is_e4m3 = type == FactorType::kFloat8E4M3;
  const __half_raw raw = __nv_cvt_fp8_to_halfraw(byte, is_e4m3 ? __NV_E4M3 : __NV_E5M2);
  value = __half2float(raw);
  finite = finite && std::isfinite(value);
  const int field = is_e4m3 ? byte >> 3 & 15 : byte >> 2 & 31;
  const int bias = is_e4m3 ? 7 : 15;
  exponent = value == 0 ? kZeroExponent : static_cast<std::int16_t>(std::max(field, 1) - bias);
}

// Of element i: its value, exact, and its exponent, for subnormals the least. Of a float, the lower
// 13 bits do not count.
void decode(const std::uint16_t* bits, std::size_t i, FactorType type, double& value,
            std::int16_t& exponent, bool& finite) {
  if (is_byte(type)) {
    const auto byte = static_cast<std::uint8_t>(bits[i / 2] >> (i % 2 * 8));
    return decode_byte(byte, type, value, exponent, finite);
  }
  const bool half = type == FactorType::kFloat16;
  const int bias = half ? 15 : 127;
  const int most = half ? 31 : 255;
  int field;
  if (half) {
    __half_raw raw;
    raw.x = bits[i];
    value = __half2float(raw);
    field = raw.x >> 10 & most;
  } else {
    const std::uint32_t word = type == FactorType::kBFloat16
                                   ? std::uint32_t{bits[i]} << 16
                                   : std::uint32_t{bits[2 * i + 1]} << 16 | (bits[2 * i] & 0xe000);
    float wide;
    std::memcpy(&wide, &word, sizeof(wide));
    value = wide;
    field = static_cast<int>(word >> 23) & most;
  }
  finite = finite && field != most;
  exponent = value == 0 ? kZeroExponent : static_cast<std::int16_t>(std::max(field, 1) - bias);
}

void decode(Factor& factor, FactorType type) {
  const unsigned depth = depth_of(type);
  const std::size_t rows = factor.bits.size() / kProductWords;
  factor.values.resize(rows * depth);
  factor.exponents.resize(rows * depth);
  factor.finite.resize(rows);
  for (std::size_t row = 0; row < rows; ++row) {
    bool finite = true;
    for (std::size_t i = row * depth; i < (row + 1) * depth; ++i) {
      decode(factor.bits.data(), i, type, factor.values[i], factor.exponents[i], finite);
    }
    factor.finite[row] = finite;
  }
}

std::uint32_t bits_of(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

float float_of(std::uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

int exponent_of(float x) {
  if (x == 0) return kZeroExponent;
  return std::max<int>(bits_of(x) >> 23 & 255, 1) - 127;
}

double power_of_two(int exponent) {
  const std::uint64_t bits = static_cast<std::uint64_t>(1023 + exponent) << 52;
  double result;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}

float round_toward_zero(double x) {
  auto result = static_cast<float>(x);
  if (std::isfinite(result) && std::abs(static_cast<double>(result)) > std::abs(x)) {
    result = std::nextafter(result, 0.0f);
  }
  return result;
}

// The same, to a float of which 13 of the 23 bits of fraction are kept.
float round_toward_zero_to_13_bits(double x) {
  return float_of(bits_of(round_toward_zero(x)) & ~((1u << (23 - 13)) - 1));
}

// sum + a b as Hopper adds (the model of MMA-Sim, arXiv 2511.10909): all terms are aligned to the
// largest exponent, truncated to 25 bits of fraction, added exactly, and rounded toward zero. Of
// factors of 8 bits the terms keep 13 bits of fraction, and so does the sum.
template <unsigned kDepth>
float dot(const double* a, const std::int16_t* a_exponent, const double* b,
          const std::int16_t* b_exponent, float sum, bool finite) {
  if (!finite || !std::isfinite(sum)) {
    float total = sum;
    for (unsigned k = 0; k < kDepth; ++k) total += static_cast<float>(a[k] * b[k]);
    return std::isnan(total) ? std::numeric_limits<float>::quiet_NaN() : total;
  }
  std::int16_t most = kZeroExponent;
  for (unsigned k = 0; k < kDepth; ++k) {
    const auto exponent = static_cast<std::int16_t>(a_exponent[k] + b_exponent[k]);
    most = most < exponent ? exponent : most;
  }
  const int exponent = std::max<int>(most, exponent_of(sum));
  if (exponent < kNoExponent) return 0;
  constexpr bool kOfBytes = kDepth == depth_of(FactorType::kFloat8E4M3);
  constexpr int kFractionBits = kOfBytes ? 13 : 25;
  const double scale = power_of_two(kFractionBits - exponent);
  auto total = static_cast<std::int64_t>(sum * scale);
  for (unsigned k = 0; k < kDepth; ++k) {
    total += static_cast<std::int32_t>(a[k] * b[k] * scale);  // below 2^27, truncated
  }
  const double exact = static_cast<double>(total) * power_of_two(exponent - kFractionBits);
  return kOfBytes ? round_toward_zero_to_13_bits(exact) : round_toward_zero(exact);
}

// The same of integers, modulo 2^32.
std::uint32_t dot_of_integers(const double* a, const double* b, std::uint32_t sum) {
  std::int32_t total = 0;
  for (unsigned k = 0; k < depth_of(FactorType::kInt8); ++k) {
    total += static_cast<std::int32_t>(a[k]) * static_cast<std::int32_t>(b[k]);
  }
  return sum + static_cast<std::uint32_t>(total);
}

// ---- Operands ----

// The fields of PTX's matrix descriptor, in bytes.
Operand decode_operand(const Caller& caller, const char* which, std::uint64_t descriptor, bool deep,
                       unsigned rows) {
  const auto field = [&](unsigned first, unsigned bits) {
    return static_cast<unsigned>(descriptor >> first & ((std::uint64_t{1} << bits) - 1));
  };
  const auto refuse = [&](const std::string& what) {
    throw Error(caller + ": the descriptor of the " + which + " operand " + what);
  };
  if (field(62, 2) != 1) {
    refuse("has swizzle mode " + std::to_string(field(62, 2)) +
           "; the executor knows 1 alone, the 128-byte swizzle");
  }
  if (field(14, 2) != 0 || field(30, 2) != 0 || field(46, 3) != 0 || field(52, 10) != 0) {
    refuse("has bits set that mean nothing");
  }
  Operand operand;
  operand.address = field(0, 14) * 16;
  operand.panel_stride = field(16, 14) * 16;
  operand.atom_stride = field(32, 14) * 16;
  operand.rows = rows;
  operand.deep = deep;
  if (field(49, 3) != 0 || operand.address / kLineBytes % 8 != 0) {
    refuse("begins at address " + std::to_string(operand.address) + " with base offset " +
           std::to_string(field(49, 3)) +
           "; the executor knows operands alone whose atoms lie at multiples of 1024 bytes");
  }
  if (operand.atom_stride == 0 || operand.atom_stride % kAtomBytes != 0) {
    refuse("has a stride offset of " + bytes_text(operand.atom_stride) +
           ", which is no whole number of atoms of 1024 bytes");
  }
  if (deep) {
    if (operand.panel_stride != 16) {
      refuse("has a leading offset of " + bytes_text(operand.panel_stride) +
             "; a swizzled operand with contiguous depth has none, by convention 16");
    }
    if (operand.address % kLineBytes > kLineBytes - kProductWords * 2) {
      refuse("begins " + bytes_text(operand.address % kLineBytes) +
             " into lines of 128 bytes, and reaches beyond them");
    }
  } else {
    if (operand.address % kAtomBytes != 0) refuse("begins within a line");
    const unsigned panel = kProductWords / 8 * operand.atom_stride;
    if (rows > 64 && (operand.panel_stride % kAtomBytes != 0 || operand.panel_stride < panel)) {
      refuse("has a leading offset of " + bytes_text(operand.panel_stride) +
             ", but a panel of 64 " + "rows has " + bytes_text(panel));
    }
  }
  operand.begin = std::numeric_limits<unsigned>::max();
  for (unsigned piece = 0; piece < operand.pieces(); ++piece) {
    const unsigned address = operand.piece_address(piece);
    operand.begin = std::min(operand.begin, address);
    operand.end = std::max(operand.end, address + kPieceBytes);
  }
  return operand;
}

// Copies pieces to rows of kProductWords.
void read_operand(const unsigned char* shared, unsigned first_address, const Operand& operand,
                  std::vector<std::uint16_t>& bits) {
  bits.resize(std::size_t{operand.rows} * kProductWords);
  for (unsigned piece = 0; piece < operand.pieces(); ++piece) {
    const unsigned char* const from = shared + (operand.piece_address(piece) - first_address);
    if (operand.deep) {
      std::memcpy(&bits[piece * 8], from, kPieceBytes);
    } else {
      std::uint16_t of_rows[8];
      std::memcpy(of_rows, from, kPieceBytes);
      const unsigned in_line = operand.rows / 8;
      for (unsigned i = 0; i < 8; ++i) {
        bits[(piece % in_line * 8 + i) * kProductWords + piece / in_line] = of_rows[i];
      }
    }
  }
}

// Whether some rows of an operand are what read_operand() read.
bool holds_the_same(const unsigned char* shared, unsigned first_address, const Operand& operand,
                    unsigned first_row, unsigned rows, const std::vector<std::uint16_t>& bits) {
  const std::uint16_t* const expected = bits.data();
  if (operand.deep) {
    for (unsigned piece = 2 * first_row; piece < 2 * (first_row + rows); ++piece) {
      const unsigned char* const from = shared + (operand.piece_address(piece) - first_address);
      if (std::memcmp(expected + piece * 8, from, kPieceBytes) != 0) return false;
    }
    return true;
  }
  for (unsigned k = 0; k < kProductWords; ++k) {
    for (unsigned row = first_row; row < first_row + rows; row += 8) {
      const unsigned piece = (k * operand.rows + row) / 8;
      std::uint16_t of_rows[8];
      std::memcpy(of_rows, shared + (operand.piece_address(piece) - first_address), kPieceBytes);
      for (unsigned i = 0; i < 8; ++i) {
        if (of_rows[i] != expected[(row + i) * kProductWords + k]) return false;
      }
    }
  }
  return true;
}

bool overlaps(const Operand& operand, unsigned begin, unsigned end) {
  if (operand.end <= begin || end <= operand.begin) return false;
  for (unsigned piece = 0; piece < operand.pieces(); ++piece) {
    const unsigned address = operand.piece_address(piece);
    if (address < end && begin < address + kPieceBytes) return true;
  }
  return false;
}

// ---- Sums ----

// Where thread `member` of a warpgroup has its sum i: a row of its warp's 16, and a column.
unsigned sum_row(unsigned lane, unsigned i) { return lane / 4 + i / 2 % 2 * 8; }
unsigned sum_col(unsigned lane, unsigned i) { return i / 4 * 8 + lane % 4 * 2 + i % 2; }

bool is_intact(const Sums& sums) {
  if (sums.landed) return std::memcmp(sums.registers, sums.values.data(), sums.bytes()) == 0;
#ifdef JAX_GPUOPS_ASAN
  return true;  // AddressSanitizer reports any access
#else
  const auto* const begin = reinterpret_cast<const unsigned char*>(sums.registers);
  return std::all_of(begin, begin + sums.bytes(), [](unsigned char byte) { return byte == 0xff; });
#endif
}

void give_back(Sums& sums) {
  release_memory(sums.registers, sums.bytes());
  std::memcpy(sums.registers, sums.values.data(), sums.bytes());
  sums.landed = true;
}

void check_intact(const Thread& thread, const Sums& sums) {
  if (is_intact(sums)) return;
  throw Error(describe(thread) + ": the sums of " + to_string(sums.function, sums.site) +
              " were written to while it was under way");
}

// ---- Products ----

// What a warp's part of the product adds to its threads' sums.
template <unsigned kDepth>
void compute(Product& product, unsigned warp) {
  const ProductCall call = product.call;
  const Factor& left = product.left_factor;
  const Factor& right = product.right_factor;
  const double* const left_values = left.values.data();
  const double* const right_values = right.values.data();
  const std::int16_t* const left_exponents = left.exponents.data();
  const std::int16_t* const right_exponents = right.exponents.data();
  for (unsigned lane = 0; lane < kWarpSize; ++lane) {
    std::vector<std::uint32_t>& values = product.sums[warp * kWarpSize + lane]->values;
    const auto count = static_cast<unsigned>(values.size());
    for (unsigned i = 0; i < count; ++i) {
      const unsigned row = warp * kWarpRows + sum_row(lane, i);
      const unsigned col = sum_col(lane, i);
      const std::size_t a = std::size_t{row} * kDepth;
      const std::size_t b = std::size_t{col} * kDepth;
      const std::uint32_t before = call.add ? values[i] : 0;
      if (call.type == FactorType::kInt8) {
        values[i] = dot_of_integers(left_values + a, right_values + b, before);
      } else {
        values[i] = bits_of(dot<kDepth>(left_values + a, left_exponents + a, right_values + b,
                                        right_exponents + b, float_of(before),
                                        left.finite[row] && right.finite[col]));
      }
    }
  }
}

}  // namespace

unsigned Operand::piece_address(unsigned piece) const {
  if (deep) {
    const unsigned row = piece / 2;
    return swizzled(address + row / 8 * atom_stride + row % 8 * kLineBytes +
                    piece % 2 * kPieceBytes);
  }
  const unsigned k = piece / (rows / 8);
  const unsigned rows_8 = piece % (rows / 8);
  return swizzled(address + rows_8 / 8 * panel_stride + k / 8 * atom_stride + k % 8 * kLineBytes +
                  rows_8 % 8 * kPieceBytes);
}

namespace {

// A block's shared memory, by PTX's addresses.
struct Window {
  const Block& block;
  unsigned first_address;

  unsigned address(const void* shared) const {
    return first_address +
           static_cast<unsigned>(static_cast<const unsigned char*>(shared) - block.shared);
  }

  void note_operands(Product& product) const {
    read_operand(block.shared, first_address, product.left, product.left_factor.bits);
    read_operand(block.shared, first_address, product.right, product.right_factor.bits);
    decode(product.left_factor, product.call.type);
    decode(product.right_factor, product.call.type);
  }

  // The operands hold what they held when the first thread called the product.
  void check_unchanged(const Product& product, unsigned warp) const {
    const bool same = holds_the_same(block.shared, first_address, product.right, 0,
                                     product.right.rows, product.right_factor.bits) &&
                      holds_the_same(block.shared, first_address, product.left, warp * kWarpRows,
                                     kWarpRows, product.left_factor.bits);
    if (same) return;
    throw Error(product_text(product) + ": an operand was written to while it was under way");
  }

  // A warp does its part of its next product.
  void run(Warpgroup& group, unsigned warp) const {
    Product& product = group.product(group.done[warp]);
    check_unchanged(product, warp);
    if (product.call.type == FactorType::kTf32) {
      compute<depth_of(FactorType::kTf32)>(product, warp);
    } else if (is_byte(product.call.type)) {
      compute<depth_of(FactorType::kFloat8E4M3)>(product, warp);
    } else {
      compute<kProductWords>(product, warp);
    }
    ++group.done[warp];
    while (!group.products.empty() &&
           std::all_of(group.done, group.done + kWarpgroupWarps,
                       [&](std::uint64_t done) { return done > group.first; })) {
      group.products.pop_front();
      ++group.first;
    }
  }
};

// Gives a warp's threads those sums that no product is to change any more.
void land_sums(Warpgroup& group, unsigned warp) {
  for (unsigned lane = 0; lane < kWarpSize; ++lane) {
    Warpgroup::Member& member = group.members[warp * kWarpSize + lane];
    for (const auto& sums : member.sums) {
      if (sums->landed || sums->last >= group.done[warp]) continue;
      check_intact(*member.thread, *sums);
      give_back(*sums);
    }
  }
}

}  // namespace

void Launch::begin_products(const char* function, Site site) {
  if (cancelled_) throw Cancelled();
  Warpgroups& state = warpgroups({*thread_, function, site}, *thread_->block);
  const std::size_t n = number(*thread_);
  state.groups[n / kWarpgroupThreads].members[n % kWarpgroupThreads].ordered = true;
}

void Launch::multiply_add(const char* function, Site site, void* sums, const ProductCall& call) {
  if (cancelled_) throw Cancelled();
  const Caller caller{*thread_, function, site};
  Block& block = *thread_->block;
  Warpgroup& group = warpgroups(caller, block).groups[number(*thread_) / kWarpgroupThreads];
  const std::size_t index = number(*thread_) % kWarpgroupThreads;
  Warpgroup::Member& member = group.members[index];
  has_warpgroups_ = true;
  const Window window{block, static_cast<unsigned>(kFirstSharedAddress + shared_offset_)};

  // The threads of a warpgroup call the same products, one after the other.
  const std::uint64_t number = member.called++;
  if (number == group.first + group.products.size()) {
    group.products.push_back(
        {function, site, call, thread_,
         decode_operand(caller, "left", call.left, call.deep_left, kProductRows),
         decode_operand(caller, "right", call.right, call.deep_right, call.cols)});
    const Product& product = group.products.back();
    for (const Operand* const operand : {&product.left, &product.right}) {
      at_shared_address(caller, operand->begin, operand->end - operand->begin);
      for (const Copy& copy : copies_) {
        if (copy.block != &block || !writes_shared(copy)) continue;
        const unsigned begin = window.address(copy.to);
        if (!overlaps(*operand, begin, begin + static_cast<unsigned>(copy.data.size()))) continue;
        throw Error(caller + ": an operand lies where a copy has not landed yet, " +
                    copy_text(copy));
      }
    }
    window.note_operands(group.products.back());
  }
  Product& product = group.product(number);
  const auto same = [](const ProductCall& a, const ProductCall& b) {
    return a.cols == b.cols && a.type == b.type && a.deep_left == b.deep_left &&
           a.deep_right == b.deep_right && a.add == b.add && a.left == b.left && a.right == b.right;
  };
  if (!same(product.call, call) || product.site.line != site.line) {
    throw Error(caller +
                ": the threads of a warpgroup call different products; this differs from " +
                product_text(product));
  }

  // The sums leave the registers, if they have not left before.
  const auto found = std::find_if(member.sums.begin(), member.sums.end(),
                                  [&](const auto& other) { return other->registers == sums; });
  Sums* own;
  if (found != member.sums.end()) {
    own = found->get();
    check_intact(*thread_, *own);
  } else {
    if (!member.ordered) {
      throw Error(caller +
                  ": the thread may have used its sums since it last waited for products; it must "
                  "call begin_products() first");
    }
    member.sums.push_back(std::make_unique<Sums>(function, site, sums, call.cols / 2));
    member.thread = thread_;
    own = member.sums.back().get();
    if (call.add) std::memcpy(own->values.data(), sums, own->bytes());
  }
  if (own->landed) take_memory(own->registers, own->bytes());
  own->landed = false;
  own->last = number;
  product.sums[index] = own;
  if (++product.callers < kWarpgroupThreads) return;

  // All threads have called it.
  ++group.issued;
  if (timing_ == Timing::kEarly) {
    for (unsigned warp = 0; warp < kWarpgroupWarps; ++warp) {
      while (group.done[warp] < group.issued) window.run(group, warp);
      land_sums(group, warp);
    }
  }
  wake(block, Scope::kProducts);
}

void Launch::end_products(const char* function, Site site) {
  if (cancelled_) throw Cancelled();
  Warpgroups& state = warpgroups({*thread_, function, site}, *thread_->block);
  const std::size_t n = number(*thread_);
  Warpgroup::Member& member = state.groups[n / kWarpgroupThreads].members[n % kWarpgroupThreads];
  member.groups.push_back(member.called);
}

void Launch::wait_for_products(const char* function, Site site, unsigned pending) {
  if (cancelled_) throw Cancelled();
  Block& block = *thread_->block;
  const std::size_t n = number(*thread_);
  const auto warp = static_cast<unsigned>(n % kWarpgroupThreads / kWarpSize);
  Warpgroup& group = warpgroups({*thread_, function, site}, block).groups[n / kWarpgroupThreads];
  Warpgroup::Member& member = group.members[n % kWarpgroupThreads];
  if (member.groups.size() <= pending) return;
  std::uint64_t target = 0;
  while (member.groups.size() > pending) {
    target = member.groups.front();
    member.groups.pop_front();
  }
  while (group.issued < target) {
    Call call{function, site, Scope::kProducts};
    call.number = target;
    wait(call);
  }
  const Window window{block, static_cast<unsigned>(kFirstSharedAddress + shared_offset_)};
  while (group.done[warp] < target) window.run(group, warp);
  for (std::size_t i = 0; i < member.sums.size();) {
    Sums& sums = *member.sums[i];
    if (sums.last >= target) {
      ++i;
      continue;
    }
    check_intact(*thread_, sums);
    if (!sums.landed) give_back(sums);
    member.sums.erase(member.sums.begin() + static_cast<std::ptrdiff_t>(i));
  }
  member.ordered = false;
}

// At any time: some warps do some of the products that are issued, and see the sums.
void Launch::run_some_products() {
  try {
    for (Block& block : blocks_) {
      if (block.warpgroups == nullptr) continue;
      const Window window{block, static_cast<unsigned>(kFirstSharedAddress + shared_offset_)};
      for (Warpgroup& group : block.warpgroups->groups) {
        for (unsigned warp = 0; warp < kWarpgroupWarps; ++warp) {
          if (group.done[warp] == group.issued || random_.below(4) != 0) continue;
          window.run(group, warp);
          land_sums(group, warp);
        }
      }
    }
  } catch (...) {
    error_ = std::current_exception();
  }
}

// The copy does not write what a product has yet to read.
void Launch::check_not_read(const Copy& copy) const {
  const Block& block = *copy.block;
  if (!writes_shared(copy)) return;
  const Window window{block, static_cast<unsigned>(kFirstSharedAddress + shared_offset_)};
  const unsigned begin = window.address(copy.to);
  const unsigned end = begin + static_cast<unsigned>(copy.data.size());
  for (Warpgroup& group : block.warpgroups->groups) {
    for (const Product& product : group.products) {
      if (!overlaps(product.left, begin, end) && !overlaps(product.right, begin, end)) continue;
      throw Error(copy_text(copy) + ": the destination is an operand of a product under way, " +
                  product_text(product));
    }
  }
}

void Launch::check_exit(const Thread& thread) const {
  const std::size_t n = number(thread);
  Warpgroup& group = thread.block->warpgroups->groups[n / kWarpgroupThreads];
  if (group.members[n % kWarpgroupThreads].sums.empty()) return;
  throw Error(describe(thread) + ": exited without a wait for the products that it called");
}

// ---- Storing matrices ----

void Launch::store_matrices(const char* function, Site site, unsigned address,
                            const std::array<std::uint32_t, 4>& words) {
  if (cancelled_) throw Cancelled();
  const Caller caller{*thread_, function, site};
  const int own = lane();
  unsigned char* rows[4];
  for (int matrix = 0; matrix < 4; ++matrix) {
    unsigned row = address;
    wait({function, site, Scope::kLanes, 0xffffffff, false, 8 * matrix + own / 4, &row,
          sizeof(row)});
    if (row % 16 != 0) {
      throw Error(caller + ": a row of a matrix lies at address " + std::to_string(row) +
                  ", which is not a multiple of 16");
    }
    rows[matrix] = at_shared_address(caller, row, 16);
  }
  for (int matrix = 0; matrix < 4; ++matrix) {
    std::memcpy(rows[matrix] + own % 4 * 4, &words[matrix], sizeof(std::uint32_t));
  }
}

// ---- Products of one warp ----

namespace {

// An operand of mma.sync that the lanes put together: rows of left, or columns of right.
template <int kLines>
struct WarpOperand {
  double values[kLines][kProductWords];
  std::int16_t exponents[kLines][kProductWords];
  bool finite[kLines][kProductWords];

  // Two neighbours in k, or one of TF32.
  void put(int line, int k, std::uint32_t word, FactorType type) {
    const std::uint16_t bits[] = {static_cast<std::uint16_t>(word),
                                  static_cast<std::uint16_t>(word >> 16)};
    for (int i = 0; i < (type == FactorType::kTf32 ? 1 : 2); ++i) {
      finite[line][k + i] = true;
      decode(bits, i, type, values[line][k + i], exponents[line][k + i], finite[line][k + i]);
    }
  }

  bool is_finite(int line, unsigned depth) const {
    return std::all_of(finite[line], finite[line] + depth, [](bool each) { return each; });
  }
};

struct WarpOperands {
  WarpOperand<16> left;
  WarpOperand<8> right;
};

struct DoubleOperands {
  static constexpr int kDepth = 8;
  double left[16][kDepth];
  double right[8][kDepth];
};

// What the lanes of a warp share while they execute an instruction together. They meet three times:
// to learn where lane 0 has room for it, when all have written there, and when all have read.
template <class Room, class Write, class Read>
void together(const char* function, Site site, Write&& write, Read&& read) {
  constexpr unsigned kAllLanes = 0xffffffff;
  Room own;
  Room* room = &own;
  warp_shuffle(function, site, kAllLanes, 0, &room, sizeof(room));
  write(*room);
  warp_vote(function, site, kAllLanes, true);
  read(*room);
  warp_vote(function, site, kAllLanes, true);
}

template <unsigned kDepth>
void add_products(const WarpOperands& operands, float (&sums)[4]) {
  for (int i = 0; i < 4; ++i) {
    const int row = lane() / 4 + i / 2 * 8;
    const int col = lane() % 4 * 2 + i % 2;
    sums[i] =
        dot<kDepth>(operands.left.values[row], operands.left.exponents[row],
                    operands.right.values[col], operands.right.exponents[col], sums[i],
                    operands.left.is_finite(row, kDepth) && operands.right.is_finite(col, kDepth));
  }
}

}  // namespace

void multiply_add_warp(const char* function, Site site, float (&sums)[4],
                       const std::uint32_t (&left)[4], const std::uint32_t (&right)[2],
                       FactorType type) {
  const int per_word = type == FactorType::kTf32 ? 1 : 2;
  const int group = lane() / 4;
  const int k = lane() % 4 * per_word;
  together<WarpOperands>(
      function, site,
      [&](WarpOperands& operands) {
        for (int i = 0; i < 4; ++i) {
          operands.left.put(group + i % 2 * 8, k + i / 2 * 4 * per_word, left[i], type);
        }
        for (int i = 0; i < 2; ++i) operands.right.put(group, k + i * 4 * per_word, right[i], type);
      },
      [&](const WarpOperands& operands) {
        if (type == FactorType::kTf32) {
          add_products<depth_of(FactorType::kTf32)>(operands, sums);
        } else {
          add_products<kProductWords>(operands, sums);
        }
      });
}

// Each product and sum is rounded as one FMA, in the order of the depth.
void multiply_add_warp(const char* function, Site site, double (&sums)[4], const double (&left)[4],
                       const double (&right)[2]) {
  const int group = lane() / 4;
  const int k = lane() % 4;
  together<DoubleOperands>(
      function, site,
      [&](DoubleOperands& operands) {
        for (int i = 0; i < 4; ++i) operands.left[group + i % 2 * 8][k + i / 2 * 4] = left[i];
        for (int i = 0; i < 2; ++i) operands.right[group][k + i * 4] = right[i];
      },
      [&](const DoubleOperands& operands) {
        for (int i = 0; i < 4; ++i) {
          const double* const a = operands.left[group + i / 2 * 8];
          const double* const b = operands.right[k * 2 + i % 2];
          for (int j = 0; j < DoubleOperands::kDepth; ++j) sums[i] = std::fma(a[j], b[j], sums[i]);
        }
      });
}

// ---- Loading matrices ----

void Launch::load_matrices(const char* function, Site site, unsigned address, bool transposed,
                           std::uint32_t (&words)[4]) const {
  if (cancelled_) throw Cancelled();
  using Rows = std::array<const unsigned char*, kWarpSize>;
  const Caller caller{*thread_, function, site};
  if (address % kPieceBytes != 0) {
    throw Error(caller + ": a row of a matrix lies at address " + std::to_string(address) +
                ", which is not a multiple of 16");
  }
  const unsigned char* const row = at_shared_address(caller, address, kPieceBytes);
  const int own = lane();
  together<Rows>(
      function, site, [&](Rows& rows) { rows[own] = row; },
      [&](const Rows& rows) {
        for (int matrix = 0; matrix < 4; ++matrix) {
          const auto* const first = &rows[8 * matrix];
          if (!transposed) {
            std::memcpy(&words[matrix], first[own / 4] + own % 4 * 4, sizeof(words[matrix]));
            continue;
          }
          std::uint16_t pair[2];
          for (int i = 0; i < 2; ++i) {
            std::memcpy(&pair[i], first[own % 4 * 2 + i] + own / 4 * 2, sizeof(pair[i]));
          }
          std::memcpy(&words[matrix], pair, sizeof(pair));
        }
      });
}

// ---- For code in kernels ----

void begin_products(const char* function, Site site) {
  active_launch().begin_products(function, site);
}
void multiply_add(const char* function, Site site, void* sums, const ProductCall& call) {
  active_launch().multiply_add(function, site, sums, call);
}
void end_products(const char* function, Site site) { active_launch().end_products(function, site); }
void wait_for_products(const char* function, Site site, unsigned pending) {
  active_launch().wait_for_products(function, site, pending);
}
void store_matrices(const char* function, Site site, unsigned address,
                    std::array<std::uint32_t, 4> words) {
  active_launch().store_matrices(function, site, address, words);
}
void load_matrices(const char* function, Site site, unsigned address, bool transposed,
                   std::uint32_t (&words)[4]) {
  active_launch().load_matrices(function, site, address, transposed, words);
}

}  // namespace simt
}  // namespace JAX_GPUOPS_NAMESPACE
