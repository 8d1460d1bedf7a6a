// transpose, algorithm `narrow`: matrices one side of which is short, like the channels of pixels.
//
// The words of a pixel are neighbours in one array, which is interleaved; in the other, which is
// planar, each channel has a plane:
//
//     interleaved   a e i b f j c g k d h l ...
//     planar        a b c d ...   e f g h ...   i j k l ...
//
// A range of pixels is contiguous in the interleaved array. So it is read or written there in packs
// of 16 bytes, whatever the number of channels, and passes through shared memory.
//
// If there are at most four channels and all packs are aligned, a thread has a pack of each plane.
// These are as many neighbouring packs of the interleaved array, and it transposes them in
// registers. Each warp has pixels and shared memory of its own:
//
//     interleaved   | a e i b | f j c g | k d h l |     three packs of a thread
//     planar        | a b c d |   | e f g h |   | i j k l |
//
// Otherwise a thread has packs of single planes, the words of which it gathers from shared memory,
// or scatters to it. Planes and matrices may begin at any word: all packs are aligned in their
// array, and shared memory holds the interleaved ones as they are.
//
// Bank conflicts: packs that follow each other in a plane are as many packs apart in shared memory
// as there are channels. If this is an odd number, eight of them begin in different fours of banks;
// if it is even, an unused pack makes it odd. The words of four neighbouring channels lie in a four
// of banks, so that the lanes of a warp have eight packs of each of four channels.
#pragma once

#include <cstring>

#include "core/collectives.h"
#include "core/dispatch.h"
#include "core/launch.h"
#include "core/ptx/memory.cuh"
#include "core/shared.h"
#include "core/vector.h"
#include "transpose/index.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace transpose {

// In the order of use: with the arrays, what a block reads before it transposes in registers is
// within 64 bytes, which are fetched at once.
struct NarrowMatrices {
  Divisor tiles;  // of a matrix
  std::uint32_t pixels;
  std::uint32_t tile_pixels;
  std::uint32_t plane_stride;
  // From one matrix to the next; 0 if matrices are numbered along several dimensions, `others`.
  std::uint32_t in_stride;
  std::uint32_t out_stride;
  // In shared memory only.
  Divisor channels;
  int words;            // of the operand
  Divisor slot_groups;  // of a plane in a tile: places of as many packs as kNarrowSlots
  int places;           // of packs in the planes of a tile
  int padding;          // unused packs after as many packs as there are channels
  int halo;             // pixels after a tile of which packs that begin in it may have words
  bool aligned;         // all packs are whole
  Walk others;

  __device__ Offsets offsets(std::uint32_t matrix) const {
    if (in_stride == 0) return others.offsets(matrix);
    return {std::int64_t{matrix} * in_stride, std::int64_t{matrix} * out_stride};
  }
};

// Transposes the packs of a thread: on one side, the neighbouring packs of the interleaved array,
// and on the other, one of each plane.
template <class Word, bool kToPlanar, int kChannels>
__device__ __forceinline__ void turn_packs(const uint4 (&from)[kChannels], uint4 (&to)[kChannels]) {
  constexpr int kVector = kWidestPack<Word>;
  constexpr int kRegisters = 4 * kChannels;
  std::uint32_t in[kRegisters];
  std::uint32_t out[kRegisters];
  std::memcpy(in, from, sizeof(in));
  // Which word of `from` is word i of `to`.
  const auto source = [](int i) {
    return kToPlanar ? i % kVector * kChannels + i / kVector
                     : i % kChannels * kVector + i / kChannels;
  };
#pragma unroll
  for (int r = 0; r < kRegisters; ++r) {
    if constexpr (sizeof(Word) >= 4) {
      constexpr int kPer = sizeof(Word) / 4;
      out[r] = in[source(r / kPer) * kPer + r % kPer];
    } else if constexpr (sizeof(Word) == 2) {
      const int low = source(2 * r);
      const int high = source(2 * r + 1);
      out[r] = __byte_perm(in[low / 2], in[high / 2],
                           (0x10 + 0x22 * (low % 2)) | (0x54 + 0x22 * (high % 2)) << 8);
    } else {
      // Two pairs of bytes, each in one register.
      std::uint32_t pair[2];
      unsigned place[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int low = source(4 * r + 2 * i);
        const int high = source(4 * r + 2 * i + 1);
        const bool together = low / 4 == high / 4;
        const unsigned bytes = low % 4 | (high % 4 + (together ? 0 : 4)) << 4;
        pair[i] = together ? in[low / 4] : __byte_perm(in[low / 4], in[high / 4], bytes);
        place[i] = together ? bytes : 0x10;
      }
      out[r] = __byte_perm(pair[0], pair[1], place[0] | (place[1] + 0x44) << 8);
    }
  }
  std::memcpy(to, out, sizeof(out));
}

// Moves `pixels` pixels in registers; all packs are aligned and whole.
template <bool kToPlanar, int kChannels, class Word>
__device__ inline void turn_in_registers(const Word* __restrict__ x, Word* __restrict__ y,
                                         std::uint32_t plane_stride, unsigned pixels) {
  constexpr int kVector = kWidestPack<Word>;
  constexpr int kPitch = kChannels | 1;
  const unsigned lane = threadIdx.x % kWarpSize;
  const unsigned warp = threadIdx.x / kWarpSize;
  const unsigned first = warp * kWarpSize * kVector;
  if (first >= pixels) return;
  const unsigned threads = min((pixels - first) / kVector, unsigned{kWarpSize});
  const bool exists = lane < threads;
  const unsigned interleaved = first * kChannels + lane * kVector;
  const unsigned planar = first + lane * kVector;
  uint4* const stage = shared_array<uint4>() + warp * kWarpSize * kPitch;
  const auto staged = [&](int i) -> uint4& {
    const unsigned pack = i * kWarpSize + lane;
    return stage[pack + pack / kChannels * (kPitch - kChannels)];
  };
  uint4 pack[kChannels] = {};
  uint4 turned[kChannels];

  if constexpr (kToPlanar) {
    const auto* const from = reinterpret_cast<const uint4*>(x + interleaved);
#pragma unroll
    for (int i = 0; i < kChannels; ++i) {
      if (i * kWarpSize + lane < threads * kChannels) pack[i] = __ldg(from + i * kWarpSize);
    }
#pragma unroll
    for (int i = 0; i < kChannels; ++i) staged(i) = pack[i];
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kChannels; ++i) pack[i] = stage[lane * kPitch + i];
    turn_packs<Word, kToPlanar>(pack, turned);
    if (!exists) return;
#pragma unroll
    for (int i = 0; i < kChannels; ++i) {
      *reinterpret_cast<uint4*>(y + planar + std::uint64_t{plane_stride} * i) = turned[i];
    }
  } else {
    if (exists) {
#pragma unroll
      for (int i = 0; i < kChannels; ++i) {
        pack[i] =
            __ldg(reinterpret_cast<const uint4*>(x + planar + std::uint64_t{plane_stride} * i));
      }
    }
    turn_packs<Word, kToPlanar>(pack, turned);
#pragma unroll
    for (int i = 0; i < kChannels; ++i) stage[lane * kPitch + i] = turned[i];
    __syncwarp();
    auto* const to = reinterpret_cast<uint4*>(y + interleaved);
#pragma unroll
    for (int i = 0; i < kChannels; ++i) {
      if (i * kWarpSize + lane < threads * kChannels) to[i * kWarpSize] = staged(i);
    }
  }
}

// A place of a pack in a plane of a tile.
struct NarrowPlace {
  std::uint32_t channel;
  std::uint32_t plane;  // its first word, from the first plane on
  int pixel;            // of the first word, from the tile on: below 0 if it begins before the tile
  int word;             // of the first word, from the tile on in shared memory

  // Place `index` of the tile that begins at `planar`.
  template <class Word>
  __device__ __forceinline__ NarrowPlace(const NarrowMatrices& matrices, const Word* planar,
                                         unsigned index) {
    constexpr int kVector = kWidestPack<Word>;
    const int channels = static_cast<int>(matrices.channels.divisor);
    const Division group = matrices.slot_groups.divide(index / (kNarrowSlots * kNarrowPlanes));
    const int slot = static_cast<int>(group.remainder * kNarrowSlots + index % kNarrowSlots);
    channel = group.quotient * kNarrowPlanes + index / kNarrowSlots % kNarrowPlanes;
    plane = channel * matrices.plane_stride;
    const int past = elements_past_alignment<kVector>(planar + plane);
    pixel = slot * kVector - past;
    word = slot * kVector * (channels + matrices.padding) - past * channels +
           static_cast<int>(channel);
  }
};

// The words of an array that are in no whole pack, at most kVector at either end, have a thread
// each: returns the word of a thread, counted from the end by the second kVector threads.
template <int kVector>
__device__ __forceinline__ int edge_word(int thread, int words) {
  return thread < kVector ? thread : words - 1 - (thread - kVector);
}

// The operand, which does not consist of whole packs if it begins or ends within one. Its words are
// numbered in 32 bits.
template <class Word>
struct NarrowOperand {
  const Word* begin;
  int words;

  // True if the pack that begins at this word is whole; without branches.
  __device__ __forceinline__ bool has_pack(int word) const {
    return (word >= 0) & (word <= words - kWidestPack<Word>);
  }
  // The word of the thread if it exists and is in no whole pack, otherwise null.
  __device__ __forceinline__ const Word* edge() const {
    constexpr int kVector = kWidestPack<Word>;
    if (threadIdx.x >= 2 * kVector) return nullptr;
    const int word = edge_word<kVector>(threadIdx.x, words);
    if (word < 0 || word >= words) return nullptr;
    return has_pack(word - elements_past_alignment<kVector>(begin + word)) ? nullptr : begin + word;
  }
};

// Interleaved to planar, from x to y, where the tile of `own` pixels begins. Shared memory holds
// `held` of them, those of all packs that begin in the tile; `ends` is true if the last of them is
// the last one of the matrix.
template <class Word>
__device__ inline void separate(const Word* __restrict__ x, Word* __restrict__ y,
                                const NarrowOperand<Word>& operand, const NarrowMatrices& matrices,
                                int own, int held, bool begins, bool ends) {
  constexpr int kVector = kWidestPack<Word>;
  const int channels = static_cast<int>(matrices.channels.divisor);
  auto* const stage = shared_array<uint4>();
  const int threads = blockDim.x;
  const int thread = threadIdx.x;

  // Packs are staged as they are, so that the tile begins within the first one.
  const int past = elements_past_alignment<kVector>(x);
  Word* const words = shared_array<Word>() + past;
  const Word* const packs = x - past;
  const int count = (past + held * channels + kVector - 1) / kVector;
  const int first = packs < operand.begin ? 1 : 0;
  const int stop = packs + count * kVector > operand.begin + operand.words ? count - 1 : count;
  uint4 pack[kNarrowPacks] = {};
#pragma unroll
  for (int i = 0; i < kNarrowPacks; ++i) {
    const int number = i * threads + thread;
    if (number >= first && number < stop) {
      pack[i] = __ldg(reinterpret_cast<const uint4*>(packs) + number);
    }
  }
#pragma unroll
  for (int i = 0; i < kNarrowPacks; ++i) {
    const int number = i * threads + thread;
    if (number >= first && number < stop) {
      stage[number + matrices.padding * matrices.channels.quotient(number)] = pack[i];
    }
  }
  if (first > 0 || stop < count) {
    const Word* const edge = operand.edge();
    if (edge != nullptr && edge >= x && edge - x < held * channels) words[edge - x] = *edge;
  }
  __syncthreads();

  const int whole = min(own, held - kVector + 1);
#pragma unroll 1
  for (int index = thread; index < matrices.places; index += threads) {
    const NarrowPlace place(matrices, y, index);
    if (place.channel >= matrices.channels.divisor || place.pixel < 0 || place.pixel >= whole) {
      continue;
    }
    const Word* const from = words + place.word;
    Pack<Word, kVector> gathered;
#pragma unroll
    for (int j = 0; j < kVector; ++j) gathered.element[j] = from[j * channels];
    std::uint32_t registers[4];
    std::memcpy(registers, &gathered, sizeof(registers));
    store_words(registers, y + place.plane + place.pixel);
  }

  // The words of a plane before its first whole pack and after its last one.
  if (matrices.aligned || !(begins || ends)) return;
#pragma unroll 1
  for (int index = thread; index < 2 * kVector * channels; index += threads) {
    const int channel = index / (2 * kVector);
    Word* const plane = y + std::int64_t{channel} * matrices.plane_stride;
    const int pixel = edge_word<kVector>(index % (2 * kVector), held);
    if (pixel < 0 || pixel >= held) continue;
    const int before = elements_past_alignment<kVector>(plane);
    const int begin = (before + pixel) / kVector * kVector - before;  // of the pixel's pack
    const bool is_last = ends && begin >= 0 && begin < own && begin + kVector > held;
    if ((begins && begin < 0) || is_last) plane[pixel] = words[pixel * channels + channel];
  }
}

// Word `i` of a pack. If packs were arrays of words, the compiler would give each word a register,
// and a thread would wait for one load before the next.
template <class Word>
__device__ __forceinline__ Word word_of(const uint4& pack, int i) {
  std::uint32_t registers[4];
  std::memcpy(registers, &pack, sizeof(pack));
  if constexpr (sizeof(Word) == 8) {
    return std::uint64_t{registers[2 * i + 1]} << 32 | registers[2 * i];
  } else {
    constexpr int kPer = 4 / sizeof(Word);
    return static_cast<Word>(registers[i / kPer] >> i % kPer * (32 / kPer));
  }
}

// Planar to interleaved, from x to y, where the tile of `own` pixels begins.
template <class Word>
__device__ inline void interleave(const Word* __restrict__ x, Word* __restrict__ y,
                                  const NarrowOperand<Word>& operand,
                                  const NarrowMatrices& matrices, int own) {
  constexpr int kVector = kWidestPack<Word>;
  const int channels = static_cast<int>(matrices.channels.divisor);
  const int threads = blockDim.x;
  const int thread = threadIdx.x;

  // Packs of planes may begin before the tile and end after it. Shared memory has room for their
  // words there.
  const int past = elements_past_alignment<kVector>(y);
  uint4* const stage = shared_array<uint4>() + (matrices.aligned ? 0 : channels);
  Word* const words = reinterpret_cast<Word*>(stage) + past;
  const auto tile = static_cast<unsigned>(x - operand.begin);
  uint4 pack[kNarrowPacks] = {};
  int word[kNarrowPacks];
  bool exists[kNarrowPacks] = {};
#pragma unroll
  for (int i = 0; i < kNarrowPacks; ++i) {
    if (i * threads >= matrices.places) break;
    const NarrowPlace place(matrices, x, i * threads + thread);
    const int from = static_cast<int>(tile + place.plane + place.pixel);
    exists[i] =
        (place.channel < matrices.channels.divisor) & (place.pixel < own) & operand.has_pack(from);
    word[i] = place.word;
    if (exists[i]) pack[i] = __ldg(reinterpret_cast<const uint4*>(operand.begin + from));
  }
#pragma unroll
  for (int i = 0; i < kNarrowPacks; ++i) {
    if (!exists[i]) continue;
    Word* const to = words + word[i];
#pragma unroll
    for (int j = 0; j < kVector; ++j) to[j * channels] = word_of<Word>(pack[i], j);
  }
  if (!matrices.aligned) {
    const Word* const edge = operand.edge();
    if (edge != nullptr && edge >= x) {
      const auto number = static_cast<std::uint32_t>(edge - x);
      const std::uint32_t channel = number / matrices.plane_stride;
      const std::uint32_t pixel = number % matrices.plane_stride;
      if (channel < matrices.channels.divisor && pixel < static_cast<unsigned>(own)) {
        words[pixel * channels + channel] = *edge;
      }
    }
  }
  __syncthreads();

  const int count = own * channels;
#pragma unroll
  for (int i = 0; i < kNarrowPacks; ++i) {
    const int number = i * threads + thread;
    const int first = number * kVector - past;
    if (first >= 0 && first + kVector <= count) {
      *reinterpret_cast<uint4*>(y + first) =
          stage[number + matrices.padding * matrices.channels.quotient(number)];
    }
  }
  if (matrices.aligned || thread >= 2 * kVector) return;
  const int edge = edge_word<kVector>(thread, count);
  const int begin = (past + edge) / kVector * kVector - past;  // of the word's pack
  if (edge >= 0 && edge < count && (begin < 0 || begin + kVector > count)) y[edge] = words[edge];
}

// In registers if kChannels is the number of channels, and in shared memory if it is 0.
template <class Word, int kChannels, bool kToPlanar>
__global__ void __launch_bounds__(kThreads)
    narrow_kernel(const Word* __restrict__ x, Word* __restrict__ y, NarrowMatrices matrices) {
  const Division tile = matrices.tiles.divide(blockIdx.x);
  const Offsets matrix = matrices.offsets(tile.quotient);
  const std::uint32_t first = tile.remainder * matrices.tile_pixels;
  const std::uint32_t channels = kChannels > 0 ? kChannels : matrices.channels.divisor;
  const std::int64_t interleaved = std::int64_t{first} * channels;
  const Word* const from = x + matrix.in + (kToPlanar ? interleaved : first);
  Word* const to = y + matrix.out + (kToPlanar ? first : interleaved);
  const std::uint32_t left = matrices.pixels - first;
  const std::uint32_t pixels = min(left, matrices.tile_pixels);
  if constexpr (kChannels > 0) {
    turn_in_registers<kToPlanar, kChannels>(from, to, matrices.plane_stride, pixels);
  } else {
    const int own = static_cast<int>(pixels);
    const NarrowOperand<Word> operand{x, matrices.words};
    if constexpr (kToPlanar) {
      const std::uint32_t held = min(left, matrices.tile_pixels + matrices.halo);
      separate(from, to, operand, matrices, own, static_cast<int>(held), first == 0, held == left);
    } else {
      interleave(from, to, operand, matrices, own);
    }
  }
}

template <class Word>
void launch_narrow(const Call<Word>& call, const Config& config) {
  constexpr int kVector = kWidestPack<Word>;
  const NarrowDims narrow = narrow_dims(call.movement);
  const std::int64_t channels = narrow.channel->size;
  const int tile_pixels = narrow.to_planar ? config.tile_rows : config.tile_columns;
  const bool in_registers = config.aligned && channels <= kMostRegisterChannels;

  NarrowMatrices matrices;
  matrices.tiles = Divisor(divide_up(narrow.pixel->size, tile_pixels));
  matrices.pixels = static_cast<std::uint32_t>(narrow.pixel->size);
  matrices.tile_pixels = static_cast<std::uint32_t>(tile_pixels);
  matrices.plane_stride = static_cast<std::uint32_t>(narrow.to_planar ? narrow.channel->out_stride
                                                                      : narrow.channel->in_stride);
  matrices.others = walk(call.movement, {narrow.pixel, narrow.channel});
  matrices.words = static_cast<int>(call.movement.words());
  matrices.in_stride = matrices.out_stride = matrices.others.rank == 0 ? matrices.words : 0;
  if (matrices.others.rank == 1) {
    matrices.in_stride = static_cast<std::uint32_t>(matrices.others.step[0].in_stride);
    matrices.out_stride = static_cast<std::uint32_t>(matrices.others.step[0].out_stride);
  }
  matrices.channels = Divisor(channels);
  const int slots = tile_pixels / kVector + (config.aligned ? 0 : 1);
  const std::int64_t groups = divide_up(slots, kNarrowSlots);
  matrices.slot_groups = Divisor(groups);
  matrices.places =
      static_cast<int>(groups * kNarrowSlots * divide_up(channels, kNarrowPlanes) * kNarrowPlanes);
  matrices.padding = config.aligned && channels % 2 == 0 ? 1 : 0;
  matrices.halo = narrow.to_planar && !config.aligned ? kVector - 1 : 0;
  matrices.aligned = config.aligned;

  const std::int64_t blocks =
      call.movement.words() / (narrow.pixel->size * channels) * matrices.tiles.divisor;
  // Packs of the tile, and one that its first or its last words may be in. Packs of planes may
  // begin before the tile and end after it.
  const std::int64_t chunks = divide_up(tile_pixels, kVector) + (config.aligned ? 0 : 2);
  const std::size_t shared_bytes = (chunks * (channels + matrices.padding) + 1) * sizeof(uint4);
  const LaunchShape shape{grid_extent(blocks), static_cast<unsigned>(config.threads), shared_bytes};
  dispatch_value<0, 2, 3, 4>(in_registers ? static_cast<int>(channels) : 0, [&](auto in_thread) {
    dispatch_value<true, false>(narrow.to_planar, [&](auto to_planar) {
      launch_kernel<narrow_kernel<Word, decltype(in_thread)::value, decltype(to_planar)::value>>(
          call.queue, shape, call.x, call.y, matrices);
    });
  });
}

}  // namespace transpose
}  // namespace JAX_GPUOPS_NAMESPACE
