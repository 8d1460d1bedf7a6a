// Matrix products: those of warpgroups, which are asynchronous (wgmma), and those of one warp
// (mma.sync), with its loads and stores of matrices.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "simt/arithmetic.h"
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

// ---- Operands ----

// Decodes PTX's matrix descriptor; offsets are in bytes.
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

// Copies the pieces of an operand to rows of kProductWords words.
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

constexpr unsigned kLeftWords = 4;  // per thread, of an operand in registers

// The index of a thread's word in rows of kProductWords words: words 0 and 1 are in rows `row` and
// `row` + 8 in the first half of the depth, words 2 and 3 in the second half.
unsigned place_of_left_word(unsigned thread, unsigned word) {
  const unsigned row = thread / kWarpSize * kWarpRows + thread % kWarpSize / 4 + word % 2 * 8;
  return row * kProductWords + (thread % 4 + word / 2 * 4) * 2;
}

// Whether a warp's registers are unchanged since its threads called the product.
bool registers_hold_the_same(const Product& product, unsigned warp) {
  for (unsigned lane = 0; lane < kWarpSize; ++lane) {
    const unsigned thread = warp * kWarpSize + lane;
    for (unsigned word = 0; word < kLeftWords; ++word) {
      if (std::memcmp(&product.left_words[thread][word],
                      &product.left_factor.bits[place_of_left_word(thread, word)],
                      sizeof(std::uint32_t)) != 0) {
        return false;
      }
    }
  }
  return true;
}

// Whether some rows of an operand are unchanged since read_operand() read them.
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

void decode_factor(Factor& factor, FactorType type, bool by_columns) {
  const std::size_t rows = factor.bits.size() / kProductWords;
  factor.fractions.resize(rows * depth_of(type));
  factor.exponents.resize(rows * depth_of(type));
  factor.finite.resize(rows);
  decode(factor.bits.data(), static_cast<unsigned>(rows), type, by_columns,
         {factor.fractions.data(), factor.exponents.data(), factor.finite.data()});
}

// Adds a warp's part of the product to the sums of its threads.
void compute(Product& product, unsigned warp) {
  const ProductCall call = product.call;
  const unsigned depth = depth_of(call.type);
  Factor& left = product.left_factor;
  Factor& right = product.right_factor;
  for (unsigned own_row = 0; own_row < kWarpRows; ++own_row) {
    const unsigned row = warp * kWarpRows + own_row;
    const Elements a{&left.fractions[row * depth], &left.exponents[row * depth], &left.finite[row]};
    Sums* const* const of_row = &product.sums[warp * kWarpSize + own_row % 8 * 4];
    for (unsigned col = 0; col < call.cols; col += kColumnBlock) {
      // Each of four threads has two of the sums.
      const unsigned first = col / 2 + own_row / 8 * 2;
      std::uint32_t sums[kColumnBlock] = {};
      if (call.add) {
        for (unsigned i = 0; i < kColumnBlock; ++i) sums[i] = of_row[i / 2]->values[first + i % 2];
      }
      add_products(call.type, a, {&right.fractions[col], &right.exponents[col], &right.finite[col]},
                   call.cols, sums);
      for (unsigned i = 0; i < kColumnBlock; ++i) of_row[i / 2]->values[first + i % 2] = sums[i];
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

// A block's shared memory, with PTX's addresses.
struct Window {
  const Block& block;
  unsigned first_address;

  unsigned address(const void* shared) const {
    return first_address +
           static_cast<unsigned>(static_cast<const unsigned char*>(shared) - block.shared);
  }

  void note_operands(Product& product) const {
    read_operand(block.shared, first_address, product.right, product.right_factor.bits);
    if (product.call.left_words == nullptr) {
      read_operand(block.shared, first_address, product.left, product.left_factor.bits);
      decode_factor(product.left_factor, product.call.type, /*by_columns=*/false);
    } else {
      product.left_factor.bits.resize(kProductRows * kProductWords);
    }
    decode_factor(product.right_factor, product.call.type, /*by_columns=*/true);
  }

  // Throws if an operand has changed since the first thread called the product.
  void check_unchanged(const Product& product, unsigned warp) const {
    const bool same = holds_the_same(block.shared, first_address, product.right, 0,
                                     product.right.rows, product.right_factor.bits) &&
                      (product.call.left_words == nullptr
                           ? holds_the_same(block.shared, first_address, product.left,
                                            warp * kWarpRows, kWarpRows, product.left_factor.bits)
                           : registers_hold_the_same(product, warp));
    if (same) return;
    throw Error(product_text(product) + ": an operand was written to while it was under way");
  }

  // Computes a warp's part of its next product.
  void run(Warpgroup& group, unsigned warp) const {
    Product& product = group.product(group.done[warp]);
    check_unchanged(product, warp);
    compute(product, warp);
    ++group.done[warp];
    while (!group.products.empty() &&
           std::all_of(group.done, group.done + kWarpgroupWarps,
                       [&](std::uint64_t done) { return done > group.first; })) {
      group.products.pop_front();
      ++group.first;
    }
  }
};

// Gives the sums that no further product changes back to a warp's threads.
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
  Warpgroups& state = whole_warpgroups({*thread_, function, site}, *thread_->block);
  const std::size_t n = number(*thread_);
  state.groups[n / kWarpgroupThreads].members[n % kWarpgroupThreads].ordered = true;
}

void Launch::multiply_add(const char* function, Site site, void* sums, const ProductCall& call) {
  if (cancelled_) throw Cancelled();
  const Caller caller{*thread_, function, site};
  Block& block = *thread_->block;
  Warpgroup& group = whole_warpgroups(caller, block).groups[number(*thread_) / kWarpgroupThreads];
  const std::size_t index = number(*thread_) % kWarpgroupThreads;
  Warpgroup::Member& member = group.members[index];
  has_warpgroups_ = true;
  const Window window{block, static_cast<unsigned>(kFirstSharedAddress + shared_offset_)};

  // The threads of a warpgroup call the same products, one after the other.
  const std::uint64_t number = member.called++;
  if (number == group.first + group.products.size()) {
    group.products.push_back(
        {function, site, call, thread_,
         call.left_words == nullptr
             ? decode_operand(caller, "left", call.left, call.deep_left, kProductRows)
             : Operand{},
         decode_operand(caller, "right", call.right, call.deep_right, call.cols)});
    const Product& product = group.products.back();
    for (const Operand* const operand : {&product.left, &product.right}) {
      if (operand->rows == 0) continue;
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
           a.deep_right == b.deep_right && a.add == b.add && a.left == b.left &&
           a.right == b.right && (a.left_words == nullptr) == (b.left_words == nullptr);
  };
  if (!same(product.call, call) || product.site.line != site.line) {
    throw Error(caller +
                ": the threads of a warpgroup call different products; this differs from " +
                product_text(product));
  }

  // Takes the sums from the registers, unless an earlier product has.
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
  if (call.left_words != nullptr) {
    product.left_words[index] = call.left_words;
    for (unsigned word = 0; word < kLeftWords; ++word) {
      std::memcpy(&product.left_factor.bits[place_of_left_word(static_cast<unsigned>(index), word)],
                  &call.left_words[word], sizeof(std::uint32_t));
    }
  }
  if (++product.callers < kWarpgroupThreads) return;

  // All threads have called it.
  if (call.left_words != nullptr) {
    decode_factor(product.left_factor, call.type, /*by_columns=*/false);
  }
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
  Warpgroups& state = whole_warpgroups({*thread_, function, site}, *thread_->block);
  const std::size_t n = number(*thread_);
  Warpgroup::Member& member = state.groups[n / kWarpgroupThreads].members[n % kWarpgroupThreads];
  member.groups.push_back(member.called);
}

void Launch::wait_for_products(const char* function, Site site, unsigned pending) {
  if (cancelled_) throw Cancelled();
  Block& block = *thread_->block;
  const std::size_t n = number(*thread_);
  const auto warp = static_cast<unsigned>(n % kWarpgroupThreads / kWarpSize);
  Warpgroup& group =
      whole_warpgroups({*thread_, function, site}, block).groups[n / kWarpgroupThreads];
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

// May be called at any time: some warps compute some of the issued products, and get the sums.
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

// Throws if the copy writes to an operand of a pending product.
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

// ---- Products of one warp ----

namespace {

// The arguments of a lane for a product of its warp.
struct LaneOfProduct {
  FactorType type;
  float* sums;
  const std::uint32_t* left;
  const std::uint32_t* right;
};

void multiply_warp(void* const (&lanes)[kWarpSize]) {
  constexpr unsigned kRows = 16;
  constexpr unsigned kCols = kColumnBlock;
  const auto lane = [&](unsigned i) -> const LaneOfProduct& {
    return *static_cast<const LaneOfProduct*>(lanes[i]);
  };
  const FactorType type = lane(0).type;
  std::uint16_t left[kRows * kProductWords];
  std::uint16_t right[kCols * kProductWords];
  for (unsigned i = 0; i < kWarpSize; ++i) {
    const unsigned group = i / 4;
    const unsigned word = i % 4 * 2;
    for (unsigned j = 0; j < 4; ++j) {
      std::memcpy(&left[(group + j % 2 * 8) * kProductWords + word + j / 2 * 8], &lane(i).left[j],
                  sizeof(std::uint32_t));
    }
    for (unsigned j = 0; j < 2; ++j) {
      std::memcpy(&right[group * kProductWords + word + j * 8], &lane(i).right[j],
                  sizeof(std::uint32_t));
    }
  }
  float left_fractions[kRows * kProductWords];
  float right_fractions[kCols * kProductWords];
  std::int16_t left_exponents[kRows * kProductWords];
  std::int16_t right_exponents[kCols * kProductWords];
  unsigned char left_finite[kRows];
  unsigned char right_finite[kCols];
  decode(left, kRows, type, /*by_columns=*/false, {left_fractions, left_exponents, left_finite});
  decode(right, kCols, type, /*by_columns=*/true, {right_fractions, right_exponents, right_finite});
  const unsigned depth = depth_of(type);
  for (unsigned row = 0; row < kRows; ++row) {
    std::uint32_t sums[kCols];
    const auto each_sum = [&](auto&& visit) {
      for (unsigned col = 0; col < kCols; ++col) {
        visit(lane(row % 8 * 4 + col / 2).sums[row / 8 * 2 + col % 2], sums[col]);
      }
    };
    each_sum([](float& own, std::uint32_t& sum) { std::memcpy(&sum, &own, sizeof(sum)); });
    add_products(type,
                 {left_fractions + row * depth, left_exponents + row * depth, left_finite + row},
                 {right_fractions, right_exponents, right_finite}, kCols, sums);
    each_sum([](float& own, std::uint32_t& sum) { std::memcpy(&own, &sum, sizeof(sum)); });
  }
}

struct LaneOfDoubles {
  double* sums;
  const double* left;
  const double* right;
};

// Each product is added by an FMA, in the order of the depth.
void multiply_warp_of_doubles(void* const (&lanes)[kWarpSize]) {
  const auto lane = [&](int i) -> const LaneOfDoubles& {
    return *static_cast<const LaneOfDoubles*>(lanes[i]);
  };
  for (int i = 0; i < kWarpSize; ++i) {
    for (int j = 0; j < 4; ++j) {
      double& sum = lane(i).sums[j];
      for (int k = 0; k < 8; ++k) {
        const double left = lane(i / 4 * 4 + k % 4).left[j / 2 + k / 4 * 2];
        const double right = lane((i % 4 * 2 + j % 2) * 4 + k % 4).right[k / 4];
        sum = std::fma(left, right, sum);
      }
    }
  }
}

}  // namespace

void multiply_add_warp(const char* function, Site site, float (&sums)[4],
                       const std::uint32_t (&left)[4], const std::uint32_t (&right)[2],
                       FactorType type) {
  LaneOfProduct own{type, sums, left, right};
  warp_together(function, site, &own, multiply_warp);
}

void multiply_add_warp(const char* function, Site site, double (&sums)[4], const double (&left)[4],
                       const double (&right)[2]) {
  LaneOfDoubles own{sums, left, right};
  warp_together(function, site, &own, multiply_warp_of_doubles);
}

// ---- Loading and storing matrices ----

namespace {

// The arguments of a lane: a row of one matrix, and its words of all matrices.
struct LaneOfMatrices {
  unsigned char* row;
  std::uint32_t* words;
};

LaneOfMatrices lane_of_matrices(void* lane) { return *static_cast<LaneOfMatrices*>(lane); }

void load_words(void* const (&lanes)[kWarpSize]) {
  for (int i = 0; i < kWarpSize; ++i) {
    for (int matrix = 0; matrix < 4; ++matrix) {
      const unsigned char* const row = lane_of_matrices(lanes[8 * matrix + i / 4]).row;
      std::memcpy(&lane_of_matrices(lanes[i]).words[matrix], row + i % 4 * 4, 4);
    }
  }
}

void load_transposed_words(void* const (&lanes)[kWarpSize]) {
  for (int i = 0; i < kWarpSize; ++i) {
    for (int matrix = 0; matrix < 4; ++matrix) {
      std::uint16_t pair[2];
      for (int j = 0; j < 2; ++j) {
        const unsigned char* const row = lane_of_matrices(lanes[8 * matrix + i % 4 * 2 + j]).row;
        std::memcpy(&pair[j], row + i / 4 * 2, sizeof(pair[j]));
      }
      std::memcpy(&lane_of_matrices(lanes[i]).words[matrix], pair, sizeof(pair));
    }
  }
}

void store_words(void* const (&lanes)[kWarpSize]) {
  for (int i = 0; i < kWarpSize; ++i) {
    for (int matrix = 0; matrix < 4; ++matrix) {
      unsigned char* const row = lane_of_matrices(lanes[8 * matrix + i / 4]).row;
      std::memcpy(row + i % 4 * 4, &lane_of_matrices(lanes[i]).words[matrix], 4);
    }
  }
}

void store_transposed_words(void* const (&lanes)[kWarpSize]) {
  for (int i = 0; i < kWarpSize; ++i) {
    for (int matrix = 0; matrix < 4; ++matrix) {
      std::uint16_t pair[2];
      std::memcpy(pair, &lane_of_matrices(lanes[i]).words[matrix], sizeof(pair));
      for (int j = 0; j < 2; ++j) {
        unsigned char* const row = lane_of_matrices(lanes[8 * matrix + i % 4 * 2 + j]).row;
        std::memcpy(row + i / 4 * 2, &pair[j], sizeof(pair[j]));
      }
    }
  }
}

}  // namespace

unsigned char* Launch::row_of_matrix(const Caller& caller, unsigned address) const {
  if (address % kPieceBytes != 0) {
    throw Error(caller + ": a row of a matrix lies at address " + std::to_string(address) +
                ", which is not a multiple of 16");
  }
  return at_shared_address(caller, address, kPieceBytes);
}

void Launch::load_matrices(const char* function, Site site, unsigned address, bool transposed,
                           std::uint32_t (&words)[4]) {
  if (cancelled_) throw Cancelled();
  LaneOfMatrices own{row_of_matrix({*thread_, function, site}, address), words};
  together(function, site, &own, transposed ? load_transposed_words : load_words);
}

void Launch::store_matrices(const char* function, Site site, unsigned address, bool transposed,
                            std::array<std::uint32_t, 4> words) {
  if (cancelled_) throw Cancelled();
  LaneOfMatrices own{row_of_matrix({*thread_, function, site}, address), words.data()};
  together(function, site, &own, transposed ? store_transposed_words : store_words);
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
void store_matrices(const char* function, Site site, unsigned address, bool transposed,
                    std::array<std::uint32_t, 4> words) {
  active_launch().store_matrices(function, site, address, transposed, words);
}
void load_matrices(const char* function, Site site, unsigned address, bool transposed,
                   std::uint32_t (&words)[4]) {
  active_launch().load_matrices(function, site, address, transposed, words);
}

}  // namespace simt
}  // namespace JAX_GPUOPS_NAMESPACE
