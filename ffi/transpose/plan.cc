#include <algorithm>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

#include "core/integer.h"
#include "transpose/transpose.h"

namespace JAX_GPUOPS_NAMESPACE {
namespace transpose {
namespace {

// Below this extent of the matrix, most of a vectorised tile would be empty.
constexpr std::int64_t kSwizzledExtent = 32;
// Tiles are smaller if there would be fewer per multiprocessor,
constexpr std::int64_t kTilesPerMultiprocessor = 8;
// and those of `swizzled` if they cover at most this part of what the larger ones cover.
constexpr double kSmallerCover = 0.9;
// How much of a row of the result a tile of `shifted` has at least, unless rows are shorter.
constexpr std::int64_t kShortestLineBytes = 128;
// The smallest matrices for which `narrow` is chosen: each takes a block.
constexpr std::int64_t kLeastNarrowWords = 384;
// `copy` is chosen rather than `tiled`, and for words of one or two bytes than `shifted`, for
// arrays of so few words. It is also chosen rather than `tiled` if it reads at most so many times
// the bytes that it writes, from the L2 cache or from memory, and tiles do not fit exactly.
constexpr std::int64_t kFewWords = std::int64_t{1} << 18;
constexpr std::int64_t kCachedBytes = std::int64_t{1} << 25;
constexpr double kMostReadsFromCache = 5;
constexpr double kMostReadsFromMemory = 2;
// The most threads of a block of `narrow` in registers. 64 to 256 differ little; with 32, problems
// of a few microseconds take a third more, since a multiprocessor has at most 32 blocks.
constexpr std::int64_t kMostRegisterThreads = 128;
// Through shared memory, its blocks are smaller if there would be fewer than so many per
// multiprocessor. A thread still has several packs, which are in flight together.
constexpr std::int64_t kNarrowBlocksPerMultiprocessor = 2;
constexpr int kFewNarrowThreads = 128;
constexpr int kFewNarrowPacks = 2;
constexpr int kLeastNarrowThreads = 64;
constexpr int kSectorBytes = 32;
constexpr int kWarpLanes = 32;

// True if all rows of the operand, or of the result, begin at multiples of `words` words, a power
// of two: `stride` names those of the rows.
bool rows_begin_at(std::int64_t words, std::int64_t Dim::* stride, const Movement& movement,
                   const Problem& problem) {
  if (problem.alignment < words * movement.word_bytes) return false;
  return std::all_of(movement.dims.begin(), movement.dims.end(),
                     [&](const Dim& dim) { return dim.*stride == 1 || dim.*stride % words == 0; });
}

// True if every row of the operand and of the result starts at a multiple of the swizzled kernel's
// vectors.
bool vectors_fit(const Movement& movement, const Problem& problem) {
  const int vector = vector_words(movement.word_bytes);
  return rows_begin_at(vector, &Dim::in_stride, movement, problem) &&
         rows_begin_at(vector, &Dim::out_stride, movement, problem);
}

// The canonical form, with words of at most `max_word_bytes`, a power of two.
Movement canonicalize(const Problem& problem, int max_word_bytes) {
  // In bytes first. The bytes of an element are one more dimension, which stays minor.
  const std::size_t rank = problem.shape.size();
  std::vector<Dim> all(rank);
  std::int64_t stride = problem.element_bytes;
  for (std::size_t i = rank; i-- > 0;) {
    Dim& dim = all[problem.permutation[i]];
    dim.size = problem.shape[problem.permutation[i]];
    dim.out_stride = stride;
    stride *= dim.size;
  }
  stride = problem.element_bytes;
  for (std::size_t i = rank; i-- > 0;) {
    all[i].in_stride = stride;
    stride *= all[i].size;
  }
  all.push_back({problem.element_bytes, 1, 1});

  // Merge dimensions that are neighbours in both the operand and the result.
  Movement movement{1, {}};
  std::vector<Dim>& dims = movement.dims;
  for (const Dim& dim : all) {
    if (dim.size == 1) continue;
    if (!dims.empty() && dims.back().out_stride == dim.size * dim.out_stride) {
      dims.back() = {dims.back().size * dim.size, dim.in_stride, dim.out_stride};
    } else {
      dims.push_back(dim);
    }
  }
  if (dims.empty() || dims.back().out_stride != 1) return movement;  // elements of one byte

  // The minor dimension consists of runs that stay contiguous: use the widest words. All other
  // strides are multiples of a run.
  Dim& run = dims.back();
  while (movement.word_bytes < max_word_bytes && run.size % 2 == 0) {
    movement.word_bytes *= 2;
    run.size /= 2;
  }
  if (run.size == 1) dims.pop_back();
  for (Dim& dim : dims) {
    if (dim.in_stride == 1) continue;
    dim.in_stride /= movement.word_bytes;
    dim.out_stride /= movement.word_bytes;
  }
  return movement;
}

// The movement in the widest words that strides and addresses allow. Otherwise the words are
// elements: few problems would use the widths in between, and each would need kernels to be loaded.
Movement in_widest_words(const Problem& problem) {
  Movement movement = canonicalize(problem, kWidestWord);
  if (movement.word_bytes <= problem.alignment) return movement;
  return canonicalize(problem, problem.element_bytes);
}

// Why `narrow` cannot take a movement without runs; empty if it can.
std::string why_not_narrow(const Movement& movement) {
  if (movement.word_bytes > kWidestNarrowWord) {
    return "transposes words of up to " + std::to_string(kWidestNarrowWord) +
           " bytes, and here they have " + std::to_string(movement.word_bytes) +
           "; 'tiled' supports these";
  }
  if (movement.words() > kMaxWords) {
    return "transposes at most 2^31 - 1 words, and here there are " +
           std::to_string(movement.words()) + "; 'tiled' supports this";
  }
  if (narrow_dims(movement).pixel == nullptr) {
    const TurnedDims turned = turned_dims(movement);
    return "requires at most " + std::to_string(kMostChannels) +
           " columns, contiguous in the operand, or as many rows, contiguous in the result; here "
           "matrices of " +
           std::to_string(turned.row->size) + " x " + std::to_string(turned.column->size) +
           " are transposed, and 'tiled' supports these";
  }
  return "";
}

// Throws unless the algorithm takes the movement.
void check(Algorithm algorithm, const Movement& movement) {
  const auto refuse = [&](const std::string& why) {
    throw std::invalid_argument("algorithm '" + std::string(name_of(algorithm)) + "' " + why);
  };
  switch (algorithm) {
    case Algorithm::kNaive:
    case Algorithm::kCopy:
      return;
    case Algorithm::kTiled:
    case Algorithm::kSwizzled:
    case Algorithm::kShifted:
    case Algorithm::kNarrow:
      if (movement.dims.size() <= 1) {
        refuse(
            "requires a permutation that moves elements, and here all elements stay where they "
            "are; 'copy' supports this");
      }
      if (movement.has_long_runs()) {
        refuse(
            "supports only permutations without long contiguous runs, and this one keeps runs "
            "of " +
            std::to_string(movement.dims.back().size * movement.word_bytes) +
            " bytes; 'copy' supports these");
      }
      if (algorithm != Algorithm::kTiled && movement.has_runs()) {
        refuse("transposes single words, and this permutation keeps runs of " +
               std::to_string(movement.dims.back().size) + " words of " +
               std::to_string(movement.word_bytes) +
               " bytes, the widest that sizes and addresses allow; 'tiled' supports these");
      }
      if (algorithm == Algorithm::kShifted && movement.word_bytes > kWidestShiftedWord) {
        refuse("transposes words of up to " + std::to_string(kWidestShiftedWord) +
               " bytes, and here they have " + std::to_string(movement.word_bytes) +
               "; 'swizzled' supports these");
      }
      if (algorithm == Algorithm::kNarrow) {
        const std::string why = why_not_narrow(movement);
        if (!why.empty()) refuse(why);
      }
      return;
  }
}

// The words of a part of the array that lie side by side, in the order that `stride` names. The
// part has these extents along the dimensions.
std::int64_t words_side_by_side(const Movement& movement, std::int64_t Dim::* stride,
                                const std::vector<std::int64_t>& extents) {
  const std::vector<Dim>& dims = movement.dims;
  for (std::int64_t words = 1;;) {
    const auto next = std::find_if(dims.begin(), dims.end(), [&](const Dim& dim) {
      return dim.size > 1 && dim.*stride == words;
    });
    if (next == dims.end()) return words;
    const std::int64_t extent = extents[next - dims.begin()];
    if (extent < next->size) return words * extent;
    words *= next->size;
  }
}

// The tile of `tiled`, of a given number of words. A third dimension fills it up: a run, or the one
// that makes reads or writes longer where the matrix has few rows or few columns, such as the 20 of
// 3 x 20 x 56 x 4664 -> 4664 x 56 x 20 x 3. Chosen is the tile with the least cost: the sectors
// that reads and writes touch but do not use, and the part of the tile outside of the array.
// Returns the words of all tiles, relative to those of the array.
double choose_tile(const Movement& movement, int words_log2, Config* config) {
  const TurnedDims turned = turned_dims(movement);
  const std::vector<Dim>& dims = movement.dims;
  const auto index_of = [&](const Dim* dim) { return static_cast<int>(dim - dims.data()); };
  const int row = index_of(turned.row);
  const int column = index_of(turned.column);
  std::vector<int> depths;
  for (int i = static_cast<int>(dims.size()) - 1; i >= 0; --i) {
    if (i != row && i != column) depths.push_back(i);
  }
  if (turned.run != nullptr) depths = {index_of(turned.run)};
  if (depths.empty()) depths = {kNoDim};
  const double sector = static_cast<double>(kSectorBytes) / movement.word_bytes;
  double least = std::numeric_limits<double>::infinity();
  double covered = 1;
  const int most_rows = std::min(words_log2, log2_up(turned.row->size));
  const int most_columns = std::min(words_log2, log2_up(turned.column->size));
  for (const int depth : depths) {
    for (int rows = 0; rows <= most_rows; ++rows) {
      for (int columns = 0; columns <= std::min(most_columns, words_log2 - rows); ++columns) {
        std::vector<std::int64_t> extents(dims.size(), 1);
        double cover = 1;
        const auto extend = [&](int dim, int log2) {
          const std::int64_t extent = std::int64_t{1} << log2;
          const std::int64_t size = dim == kNoDim ? 1 : dims[dim].size;
          cover *= static_cast<double>(divide_up(size, extent) * extent) / size;
          if (dim != kNoDim) extents[dim] = std::min(extent, size);
        };
        extend(row, rows);
        extend(column, columns);
        extend(depth, words_log2 - rows - columns);
        const double cost = sector / words_side_by_side(movement, &Dim::in_stride, extents) +
                            sector / words_side_by_side(movement, &Dim::out_stride, extents) +
                            cover;
        if (cost >= least) continue;
        least = cost;
        covered = cover;
        config->tile_rows = 1 << rows;
        config->tile_columns = 1 << columns;
        config->tile_depth = 1 << (words_log2 - rows - columns);
        config->depth = depth;
      }
    }
  }
  return covered;
}

// How many times the bytes that a block of `copy` writes it reads in whole sectors. It writes
// consecutive words, which in the operand are near each other along some dimensions; those that
// share sectors come from the L1 cache.
double sectors_per_byte(const Movement& movement) {
  const std::vector<Dim>& dims = movement.dims;
  std::vector<std::size_t> order(dims.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  const auto sort_by = [&](std::int64_t Dim::* stride) {
    std::sort(order.begin(), order.end(),
              [&](std::size_t a, std::size_t b) { return dims[a].*stride < dims[b].*stride; });
  };
  std::vector<std::int64_t> extents(dims.size(), 1);
  std::int64_t rest = kCopyBlockWords;
  sort_by(&Dim::out_stride);
  for (const std::size_t i : order) {
    extents[i] = std::min(rest, dims[i].size);
    rest /= extents[i];
  }
  double words = 1, groups = 1;
  double span = movement.word_bytes;  // of words that are less than a sector apart
  sort_by(&Dim::in_stride);
  for (const std::size_t i : order) {
    const auto extent = static_cast<double>(extents[i]);
    const double step = static_cast<double>(dims[i].in_stride) * movement.word_bytes;
    words *= extent;
    if (step <= std::max<double>(span, kSectorBytes)) {
      span += (extent - 1) * step;
    } else {
      groups *= extent;
    }
  }
  const double sectors = groups * (1 + (span - movement.word_bytes) / kSectorBytes);
  return sectors * kSectorBytes / (words * movement.word_bytes);
}

// Whether `copy` is faster than `tiled` for more than kFewWords.
bool prefers_copy(const Movement& movement) {
  if (movement.words() > kMaxWords) return false;
  Config config;
  if (choose_tile(movement, tiled_words_log2(movement.word_bytes), &config) == 1) return false;
  const bool cached = movement.words() * movement.word_bytes <= kCachedBytes;
  return sectors_per_byte(movement) <= (cached ? kMostReadsFromCache : kMostReadsFromMemory);
}

// The side of a tile of `swizzled`: half as long if there would be too few tiles for all
// multiprocessors to be busy, or if much of the tiles would lie outside the matrix.
int choose_side(const Movement& movement, const Device& device) {
  const TurnedDims turned = turned_dims(movement);
  const std::int64_t rows = turned.row->size;
  const std::int64_t columns = turned.column->size;
  const std::int64_t matrices = movement.words() / (rows * columns);
  const auto tiles = [&](int side) {
    return matrices * divide_up(rows, side) * divide_up(columns, side);
  };
  const int side = swizzled_side(movement.word_bytes);
  const std::int64_t count = tiles(side);
  const bool few = count < kTilesPerMultiprocessor * device.multiprocessors;
  const bool wasteful = tiles(side / 2) <= kSmallerCover * 4 * count;
  return few || wasteful ? side / 2 : side;
}

// The tile of `shifted`. Across the matrix there are as few as possible, of about the same width,
// so that none lies mostly outside. If they are few, the busiest multiprocessor gets the fewest
// rows; otherwise they are as high as possible.
void choose_shifted_tile(const Movement& movement, const Problem& problem, const Device& device,
                         bool in_parts, Config* config) {
  const TurnedDims turned = turned_dims(movement);
  const std::int64_t rows = turned.row->size;
  const std::int64_t columns = turned.column->size;
  const std::int64_t matrices = movement.words() / (rows * columns);
  const int word_bytes = movement.word_bytes;
  const int vector = strip_rows(word_bytes);
  // Parts begin at any word.
  const auto begin_at = [&](std::int64_t words, std::int64_t Dim::* stride) {
    return !in_parts && rows_begin_at(words, stride, movement, problem);
  };

  int aligned = 1;
  while (begin_at(2 * aligned, &Dim::in_stride)) aligned *= 2;
  const int load = words_per_load(word_bytes);
  const int most_columns = shifted_columns(word_bytes) - (load - std::min(load, aligned));
  const auto width = [&](std::int64_t most) {
    const std::int64_t width = divide_up(columns, divide_up(columns, most));
    return static_cast<int>(divide_up(width, aligned) * aligned);
  };
  config->tile_columns = width(most_columns);
  config->tile_depth = 1;

  // The packs of a line that only packs of the result that begin within them need.
  const int additional = begin_at(vector, &Dim::out_stride) ? 0 : 1;
  const int most_strips = kMostShiftedWarps * strips_per_warp(word_bytes);
  // An even number of strips, so that tiles begin at multiples of a sector.
  const std::int64_t most_rows = (most_strips - additional) / 2 * 2 * vector;
  const auto tiles = [&] {
    return matrices * divide_up(columns, config->tile_columns) * divide_up(rows, config->tile_rows);
  };
  std::int64_t least = std::numeric_limits<std::int64_t>::max();
  int best = 0;
  for (std::int64_t parts = divide_up(rows, most_rows);; ++parts) {
    const int step = parts == 1 ? vector : kSectorBytes / word_bytes;
    const std::int64_t height = divide_up(divide_up(rows, parts), step) * step;
    config->tile_rows = static_cast<int>(height);
    const std::int64_t busiest =
        divide_up(tiles(), device.multiprocessors) * (height + additional * vector);
    if (busiest < least) {
      least = busiest;
      best = config->tile_rows;
    }
    if (tiles() >= kTilesPerMultiprocessor * device.multiprocessors ||
        height * word_bytes <= kShortestLineBytes) {
      break;
    }
  }
  config->tile_rows = best;

  // Tiles of half the width, if each multiprocessor still has at most one.
  const int whole = config->tile_columns;
  config->tile_columns = width(most_columns / 2);
  if (tiles() > device.multiprocessors) config->tile_columns = whole;

  // A warp for each strip, if all of them are resident.
  const int strips = config->tile_rows / vector + additional;
  const int most_warps = std::min(strips, kMostShiftedWarps);
  const std::int64_t resident =
      std::int64_t{device.multiprocessors} * kShiftedBlocks * kMostShiftedWarps;
  const std::int64_t warps = tiles() * most_warps <= resident
                                 ? most_warps
                                 : divide_up(strips, strips_per_warp(word_bytes));
  config->threads = static_cast<int>(warps) * kWarpLanes;
}

// The tile of `narrow`: a range of pixels.
void choose_narrow_tile(const Movement& movement, const Problem& problem, const Device& device,
                        Config* config) {
  const NarrowDims narrow = narrow_dims(movement);
  const std::int64_t pixels = narrow.pixel->size;
  const std::int64_t channels = narrow.channel->size;
  const std::int64_t matrices = movement.words() / (pixels * channels);
  const int vector = kWidestWord / movement.word_bytes;
  const auto is_whole = [&](std::int64_t words) { return words % vector == 0; };
  config->aligned = problem.alignment >= kWidestWord && is_whole(pixels) &&
                    std::all_of(movement.dims.begin(), movement.dims.end(), [&](const Dim& dim) {
                      if (&dim == narrow.pixel) return true;
                      if (&dim == narrow.channel)
                        return is_whole(narrow.to_planar ? dim.out_stride : dim.in_stride);
                      return is_whole(dim.in_stride) && is_whole(dim.out_stride);
                    });
  // A thread for each pack of a plane.
  const std::int64_t warps_of_plane = divide_up(pixels, std::int64_t{kWarpLanes} * vector);
  config->threads = static_cast<int>(std::min(warps_of_plane * kWarpLanes, kMostRegisterThreads));
  std::int64_t tile = std::int64_t{config->threads} * vector;
  if (!config->aligned || channels > kMostRegisterChannels) {
    // A tile has groups of slots of each plane. Unless all packs are whole, one of each plane
    // begins before the tile, and so does one of the interleaved array.
    const std::int64_t group = kNarrowSlots * divide_up(channels, kNarrowPlanes) * kNarrowPlanes;
    const int before = config->aligned ? 0 : 1;
    const auto pixels_of = [&](std::int64_t groups) {
      return (groups * kNarrowSlots - before) * vector;
    };
    const auto groups_of = [&](int threads, int packs) {
      return std::max<std::int64_t>((threads * packs - before) / group, 1);
    };
    const auto tiles = [&](std::int64_t groups) {
      return matrices * divide_up(pixels, pixels_of(groups));
    };
    int packs = kNarrowPacks;
    std::int64_t groups = groups_of(kThreads, packs);
    if (tiles(groups) < kNarrowBlocksPerMultiprocessor * device.multiprocessors) {
      packs = kFewNarrowPacks;
      groups = groups_of(kFewNarrowThreads, packs);
    }
    while (groups > 1 && tiles(groups - 1) == tiles(groups)) --groups;
    tile = pixels_of(groups);
    const auto warps =
        static_cast<int>(divide_up(groups * group + before, std::int64_t{packs} * kWarpLanes));
    config->threads = std::max(warps * kWarpLanes, kLeastNarrowThreads);
  }
  config->tile_rows = static_cast<int>(narrow.to_planar ? tile : channels);
  config->tile_columns = static_cast<int>(narrow.to_planar ? channels : tile);
  config->tile_depth = 1;
}

Config configure(Algorithm algorithm, Movement movement, const Problem& problem,
                 const Device& device) {
  Config config;
  config.word_bytes = movement.word_bytes;
  config.threads = kThreads;
  // The tile is chosen for the first of the parts into which the launcher divides the movement.
  const bool in_parts = movement.words() > kMaxWords;
  while (movement.words() > kMaxWords) {
    Dim& outermost = movement.outermost();
    outermost.size -= outermost.size / 2;
  }
  if (algorithm == Algorithm::kCopy) {
    const auto rank = static_cast<int>(movement.dims.size());
    config.dims = in_parts || rank > kMostCopyDims ? 0 : std::max(rank, kFewestCopyDims);
  } else if (algorithm == Algorithm::kTiled) {
    choose_tile(movement, tiled_words_log2(config.word_bytes), &config);
  } else if (algorithm == Algorithm::kSwizzled) {
    config.tile_rows = config.tile_columns = choose_side(movement, device);
    config.tile_depth = 1;
    config.threads = swizzled_threads(config.word_bytes, config.tile_rows);
  } else if (algorithm == Algorithm::kShifted) {
    choose_shifted_tile(movement, problem, device, in_parts, &config);
  } else if (algorithm == Algorithm::kNarrow) {
    choose_narrow_tile(movement, problem, device, &config);
  }
  return config;
}

// The best algorithm for a movement, and why.
std::pair<Algorithm, std::string> choose(const Movement& movement, const Problem& problem) {
  const std::string words = std::to_string(movement.word_bytes) + "-byte words";
  if (movement.has_long_runs()) {
    return {Algorithm::kCopy, "contiguous runs are kept, and are copied in " + words};
  }
  const auto [row, column, run] = turned_dims(movement);
  const bool is_few = movement.words() <= kFewWords;
  const std::string matrices =
      "matrices of " + std::to_string(row->size) + " x " + std::to_string(column->size) + " ";
  if (run != nullptr || std::min(row->size, column->size) < kSwizzledExtent) {
    if (run == nullptr && why_not_narrow(movement).empty() &&
        row->size * column->size >= kLeastNarrowWords) {
      return {Algorithm::kNarrow, matrices + words + " are interleaved channels of pixels"};
    }
    const std::string what = run == nullptr
                                 ? matrices + words
                                 : matrices + "runs of " + std::to_string(run->size) + " " + words;
    if (is_few) return {Algorithm::kCopy, what + " are small"};
    if (prefers_copy(movement)) {
      return {Algorithm::kCopy, what + " are near in the operand where they are in the result"};
    }
    return {Algorithm::kTiled, what + " are too narrow for square tiles"};
  }
  if (!vectors_fit(movement, problem)) {
    if (is_few && movement.word_bytes <= 2) {
      return {Algorithm::kCopy, matrices + words + " are small"};
    }
    return {Algorithm::kShifted,
            matrices + words + " have rows that cannot be read and written in vectors"};
  }
  return {Algorithm::kSwizzled,
          matrices + words + " have rows that can be read and written in vectors"};
}

}  // namespace

void check(const Problem& problem) {
  const std::size_t rank = problem.shape.size();
  std::vector<bool> seen(rank);
  for (const std::int64_t axis : problem.permutation) {
    if (axis < 0 || axis >= static_cast<std::int64_t>(rank) || seen[axis]) {
      throw std::invalid_argument("permutation must name each dimension of x once");
    }
    seen[axis] = true;
  }
  if (problem.permutation.size() != rank) {
    throw std::invalid_argument("permutation must have one entry for each dimension of x");
  }
  const int bytes = problem.element_bytes;
  if (bytes < 1 || bytes > 16 || (bytes & (bytes - 1)) != 0) {
    throw std::invalid_argument("elements must have 1, 2, 4, 8 or 16 bytes, got " +
                                std::to_string(bytes));
  }
  if (problem.alignment < bytes) {
    throw std::invalid_argument("operand and result must be aligned to their elements");
  }
}

Dim& Movement::outermost() {
  return *std::find_if(dims.begin(), dims.end(), [](const Dim& dim) { return dim.size > 1; });
}

std::int64_t Movement::words() const {
  std::int64_t words = 1;
  for (const Dim& dim : dims) words *= dim.size;
  return words;
}

TurnedDims turned_dims(const Movement& movement) {
  const std::vector<Dim>& dims = movement.dims;
  const Dim* const run = movement.has_runs() ? &dims.back() : nullptr;
  const std::int64_t unit = run == nullptr ? 1 : run->size;
  const auto with = [&](std::int64_t Dim::* stride) {
    return &*std::find_if(dims.begin(), dims.end(),
                          [&](const Dim& dim) { return &dim != run && dim.*stride == unit; });
  };
  return {with(&Dim::out_stride), with(&Dim::in_stride), run};
}

NarrowDims narrow_dims(const Movement& movement) {
  const TurnedDims turned = turned_dims(movement);
  const std::int64_t rows = turned.row->size;
  const std::int64_t columns = turned.column->size;
  const bool columns_fit = columns <= kMostChannels && turned.row->in_stride == columns;
  const bool rows_fit = rows <= kMostChannels && turned.column->out_stride == rows;
  if (columns_fit && !(rows_fit && rows < columns)) return {turned.row, turned.column, true};
  if (rows_fit) return {turned.column, turned.row, false};
  return {nullptr, nullptr, false};
}

Plan plan(const Problem& problem, std::string_view algorithm, const Device& device) {
  check(problem);
  Movement movement = in_widest_words(problem);
  if (movement.dims.size() > kMaxRank) {
    throw std::invalid_argument("the permutation has too many dimensions");
  }
  const bool is_empty = movement.words() == 0;
  if (algorithm.empty()) {
    if (is_empty) return {Algorithm::kCopy, "there is nothing to move", {}, std::move(movement)};
    auto [chosen, reason] = choose(movement, problem);
    const Config config = configure(chosen, movement, problem, device);
    return {chosen, std::move(reason), config, std::move(movement)};
  }
  const auto named = algorithm_from_name<Algorithm>(kAlgorithms, algorithm);
  if (is_empty) return {named, "the caller named the algorithm", {}, std::move(movement)};
  check(named, movement);
  if (named == Algorithm::kNaive) movement = canonicalize(problem, problem.element_bytes);
  const Config config = configure(named, movement, problem, device);
  return {named, "the caller named the algorithm", config, std::move(movement)};
}

}  // namespace transpose
}  // namespace JAX_GPUOPS_NAMESPACE
