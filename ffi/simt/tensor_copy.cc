// Tensor copies, of boxes that are swizzled in shared memory.

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "simt/launch.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace simt {
namespace {

constexpr std::int64_t kLineBytes = 128;
// The granularity of the copy engine's writes to global memory.
constexpr std::int64_t kSectorBytes = 16;
// In the first dimension a box begins at a multiple of these bytes; it may end anywhere.
constexpr std::int64_t kBeginBytes = 16;

std::size_t image_bytes(const TensorMap& map) {
  return static_cast<std::size_t>(kLineBytes * map.box[1] * map.box[2]);
}

// Calls visit(global, line, first, bytes) for the part of each line of the box that lies within the
// tensor, from byte `first` of the line on. The ends of the tensor's lines are rounded up to
// multiples of `granule` bytes.
template <class Visit>
void visit_lines(const Box& box, std::int64_t granule, Visit&& visit) {
  const TensorMap& map = box.map;
  const std::int64_t begin = std::int64_t{box.at[0]} * map.element_bytes;
  const std::int64_t line_bytes = map.extent[0] * map.element_bytes;
  const std::int64_t end = (line_bytes + granule - 1) / granule * granule;
  const std::int64_t first = std::max<std::int64_t>(0, -begin);
  const std::int64_t last = std::min(kLineBytes, end - begin);
  if (first >= last) return;
  for (int line = 0; line < map.box[1] * map.box[2]; ++line) {
    const std::int64_t y = std::int64_t{box.at[1]} + line % map.box[1];
    const std::int64_t z = std::int64_t{box.at[2]} + line / map.box[1];
    if (y < 0 || y >= map.extent[1] || z < 0 || z >= map.extent[2]) continue;
    visit(map.data + (begin + first + y * map.stride_bytes[0] + z * map.stride_bytes[1]), line,
          first, static_cast<std::size_t>(last - first));
  }
}

// Copies one line between its swizzled image and contiguous bytes, in pieces of 16 bytes.
template <class Copy>
void visit_pieces(unsigned address, int line, Copy&& copy) {
  const unsigned begin = address + static_cast<unsigned>(line * kLineBytes);
  for (unsigned piece = 0; piece < kLineBytes; piece += 16) {
    copy(swizzled(begin + piece) - address, piece);
  }
}

void check_map(const Caller& caller, const TensorMap& map, Position at) {
  if (map.data == nullptr) {
    throw Error(caller + ": the tensor map was not made by make_tensor_map()");
  }
  if (map.box[0] * map.element_bytes != kLineBytes) {
    throw Error(caller + ": the executor knows boxes with lines of 128 bytes alone, not of " +
                bytes_text(std::int64_t{map.box[0]} * map.element_bytes));
  }
  const std::int64_t begin = std::int64_t{at[0]} * map.element_bytes;
  if (begin % kBeginBytes != 0) {
    throw Error(caller +
                ": in the first dimension a box begins at a multiple of 16 bytes, not at byte " +
                std::to_string(begin) + ", an illegal instruction on a GPU");
  }
}

void check_aligned(const Caller& caller, unsigned address) {
  if (address % kLineBytes == 0) return;
  throw Error(caller + ": a box lies in shared memory at a multiple of 128 bytes, not at address " +
              std::to_string(address));
}

// Rounds to the nearest TF32 number, which has 13 bits of fraction less; ties to even. NaN stays
// NaN.
void round_to_tf32(unsigned char* floats, std::size_t bytes) {
  for (std::size_t at = 0; at < bytes; at += sizeof(std::uint32_t)) {
    std::uint32_t bits;
    std::memcpy(&bits, floats + at, sizeof(bits));
    constexpr std::uint32_t kLost = (1u << 13) - 1;
    const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
    bits = is_nan ? bits | 0x400000 : bits + kLost / 2 + (bits >> 13 & 1);
    bits &= ~kLost;
    std::memcpy(floats + at, &bits, sizeof(bits));
  }
}

}  // namespace

std::vector<unsigned char> read_box(const Box& box) {
  std::vector<unsigned char> image(image_bytes(box.map));
  visit_lines(box, box.map.element_bytes,
              [&](const unsigned char* global, int line, std::int64_t first, std::size_t bytes) {
                unsigned char ordered[kLineBytes] = {};
                std::memcpy(ordered + first, global, bytes);
                if (box.map.rounds_to_tf32) round_to_tf32(ordered, sizeof(ordered));
                visit_pieces(box.address, line, [&](unsigned at, unsigned piece) {
                  std::memcpy(image.data() + at, ordered + piece, 16);
                });
              });
  return image;
}

void write_box(const Box& box, const unsigned char* image) {
  visit_lines(box, kSectorBytes,
              [&](unsigned char* global, int line, std::int64_t first, std::size_t bytes) {
                unsigned char ordered[kLineBytes];
                visit_pieces(box.address, line, [&](unsigned at, unsigned piece) {
                  std::memcpy(ordered + piece, image + at, 16);
                });
                std::memcpy(global, ordered + first, bytes);
              });
}

void take_box(const Box& box) {
  visit_lines(box, kSectorBytes, [](unsigned char* global, int, std::int64_t, std::size_t bytes) {
    take_memory(global, bytes);
  });
}

void release_box(const Box& box) {
  visit_lines(box, kSectorBytes, [](unsigned char* global, int, std::int64_t, std::size_t bytes) {
    release_memory(global, bytes);
  });
}

// Reads to the blocks of the cluster whose bits are set in *blocks; if null, to the calling block.
void Launch::tensor_read(const char* function, Site site, void* to, const TensorMap& map,
                         Position at, std::uint64_t* barrier, const unsigned* blocks) {
  if (cancelled_) throw Cancelled();
  const Caller caller{*thread_, function, site};
  const unsigned own = 1u << thread_->block->rank;
  const unsigned targets = blocks == nullptr ? own : *blocks;
  check_map(caller, map, at);
  check_shared(caller, to, image_bytes(map));
  check_shared(caller, barrier, sizeof(*barrier));
  const unsigned address = shared_address(to, site);
  check_aligned(caller, address);
  if (targets == 0) throw Error(caller + ": the copy goes to no block of the cluster");
  for (int rank = 0; targets >> rank != 0; ++rank) {
    if ((targets >> rank & 1) == 0) continue;
    Block& target = block_of_cluster(caller, rank);
    find_mbarrier(caller, static_cast<std::uint64_t*>(in_block(barrier, target)), target, *thread_);
  }
  const auto box = std::make_shared<const Box>(Box{map, at, address});
  const std::vector<unsigned char> image = read_box(*box);
  for (int rank = 0; targets >> rank != 0; ++rank) {
    if ((targets >> rank & 1) == 0) continue;
    Block& target = block_of_cluster(caller, rank);
    auto* const counter = static_cast<std::uint64_t*>(in_block(barrier, target));
    issue({&target == thread_->block ? Copy::Kind::kToShared : Copy::Kind::kToCluster, function,
           site, thread_, in_block(to, target), nullptr, image, &target, counter, box});
  }
}

void Launch::tensor_write(const char* function, Site site, const TensorMap& map, Position at,
                          const void* from) {
  if (cancelled_) throw Cancelled();
  const Caller caller{*thread_, function, site};
  check_map(caller, map, at);
  check_shared(caller, from, image_bytes(map));
  const unsigned address = shared_address(from, site);
  check_aligned(caller, address);
  check_fenced(caller);
  const auto* const begin = static_cast<const unsigned char*>(from);
  issue({Copy::Kind::kToGlobal,
         function,
         site,
         thread_,
         nullptr,
         from,
         {begin, begin + image_bytes(map)},
         thread_->block,
         nullptr,
         std::make_shared<const Box>(Box{map, at, address}),
         ++thread_->writes});
}

// ---- For code in kernels ----

void tensor_read(const char* function, Site site, void* to, const TensorMap& map, Position at,
                 std::uint64_t* barrier) {
  active_launch().tensor_read(function, site, to, map, at, barrier, nullptr);
}
void tensor_multicast(const char* function, Site site, void* to, const TensorMap& map, Position at,
                      std::uint64_t* barrier, unsigned blocks) {
  active_launch().tensor_read(function, site, to, map, at, barrier, &blocks);
}
void tensor_write(const char* function, Site site, const TensorMap& map, Position at,
                  const void* from) {
  active_launch().tensor_write(function, site, map, at, from);
}

}  // namespace simt
}  // namespace JAX_GPUOPS_NAMESPACE
