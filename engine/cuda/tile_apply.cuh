#ifndef KEDGE_ENGINE_CUDA_TILE_APPLY_CUH_
#define KEDGE_ENGINE_CUDA_TILE_APPLY_CUH_

// Decodes listed tiles and adds them into weights, or only checks them: the
// bodies of the kernels of tile_apply.cu (phased_group.cuh says what a body
// is).
//
// A sparse tile decodes in parallel because all its unary planes form one
// string of bits with a + 2 b ones, and one r of it (counted from 0), at
// position p, has p - r zeros before it. So one scan over counts of ones places
// every quotient, and one scan over fixed-width low parts gives the indices;
// exponents are differences of such zeros, and these zeros are at the same time
// where each entry's mantissa begins.
//
// A group decodes a tile into shared memory, checks every rule of
// spec/segment.md, and only then touches weights. Three sizes of groups share
// this code, so that the common tile takes one warp and 3 KiB.

#include <cstddef>
#include <cstdint>
#ifndef __CUDACC__
#include <cstdlib>
#endif

#include "kedge/engine/cuda/phased_group.cuh"
#include "kedge/engine/device/kernel_tasks.h"
#include "kedge/format/limits.h"
#include "kedge/format/record_layout.h"

namespace kedge::internal {

// ------------------------------------------------------------ sizes of groups

// What a group of one size can hold: changes of a sparse tile, and those of
// list B among them. Dense tiles take the largest.
template <std::uint32_t threads, std::uint32_t entries,
          std::uint32_t magnitudes>
struct ApplySize {
  static constexpr std::uint32_t kThreads = threads;
  static constexpr std::uint32_t kEntries = entries;
  static constexpr std::uint32_t kMagnitudes = magnitudes;
  static constexpr bool kDense = entries == kTileUnits;
};
using LightApply = ApplySize<32, 768, 384>;
using MediumApply = ApplySize<128, 4096, 2048>;
using HeavyApply = ApplySize<512, kTileUnits, kTileUnits>;

// Which of them (0, 1, 2) takes a tile.
KEDGE_BODY std::uint32_t ApplyClass(const ApplyTile& tile) {
  if (tile.mode != static_cast<std::uint32_t>(TileMode::kSparse)) return 2;
  const std::uint32_t changes = std::uint32_t{tile.a} + tile.b;
  if (changes <= LightApply::kEntries && tile.b <= LightApply::kMagnitudes) {
    return 0;
  }
  return changes <= MediumApply::kEntries && tile.b <= MediumApply::kMagnitudes
             ? 1
             : 2;
}

// Of one group, in shared memory.
template <typename Size>
struct alignas(16) ApplyShared {
  // |d| of list B, or of every unit of a dense tile; before that the zeros of a
  // plane before each entry.
  std::uint32_t magnitudes[Size::kMagnitudes];
  // index << 1 | negative, list A, then list B, or every unit of a dense tile;
  // before that the zeros before each entry, modulo 2^16.
  std::uint16_t entries[Size::kEntries];
  // Zeros before the last one of list A, of list B, and of all planes.
  std::uint32_t zeros[3];
  std::uint32_t listed;  // of `list`
  // Tiles that fall to this group (not used by warps).
  std::uint16_t list[Size::kThreads];
};

// ----------------------------------------------------------------------- bits

// The bits of a payload. Whole aligned words are loaded: up to 3 bytes before
// the payload's begin and up to 8 behind the last bit asked for.
class PayloadBits {
 public:
  KEDGE_BODY PayloadBits(const std::byte* payload) {
    const auto address = reinterpret_cast<std::uintptr_t>(payload);
    words_ =
        reinterpret_cast<const std::uint32_t*>(address & ~std::uintptr_t{3});
    shift_ = 8 * static_cast<std::uint32_t>(address & 3);
  }
  // At least 33 bits from `bit` on.
  KEDGE_BODY std::uint64_t At(std::uint32_t bit) const {
    const std::uint32_t at = bit + shift_;
    const std::uint64_t low = Word(at >> 5);
    const std::uint64_t high = Word((at >> 5) + 1);
    return (high << 32 | low) >> (at & 31);
  }
  KEDGE_BODY std::uint32_t At32(std::uint32_t bit) const {
    return static_cast<std::uint32_t>(At(bit));
  }

 private:
  KEDGE_BODY std::uint32_t Word(std::uint32_t i) const {
#ifdef __CUDACC__
    return __ldg(words_ + i);
#else
    std::uint32_t word;
    std::memcpy(&word, words_ + i, 4);
    return word;
#endif
  }

  const std::uint32_t* words_;
  std::uint32_t shift_;
};

KEDGE_BODY std::uint64_t LowBits(std::uint64_t value, std::uint32_t width) {
  return value & ((std::uint64_t{1} << width) - 1);
}

// Whether a payload of `bytes` ends with bit `end`, and zeros to a whole byte.
KEDGE_BODY bool EndsAt(const PayloadBits& bits, std::uint32_t end,
                       std::uint32_t bytes) {
  if ((end + 7) / 8 != bytes) return false;
  const std::uint32_t rest = 8 * bytes - end;
  return rest == 0 || LowBits(bits.At(end), rest) == 0;
}

// A valid payload is shorter: 16,384 changes of 15 + 2 + 64 bits. Keeps bit
// positions in 32 bits.
inline constexpr std::uint32_t kMaxPayloadBytes = 1u << 18;

// Finds `ones` ones of the bits [begin, end) and calls place(rank, zeros before
// it) for each, by many threads in any order. False if there are fewer.
template <typename Group, typename Place>
KEDGE_BODY bool PlaceOnes(Group& group, const PayloadBits& bits,
                          std::uint32_t begin, std::uint32_t end,
                          std::uint32_t ones, Place&& place) {
  // A warp's tiles have few ones; each lane then takes half a word.
  constexpr std::uint32_t kChunk = Group::kThreads == 32 ? 16 : 32;
  std::uint32_t done = 0;
  for (std::uint32_t at = begin; done < ones; at += kChunk * Group::kThreads) {
    if (at >= end) return false;
    typename Group::template PerThread<std::uint32_t> word;
    typename Group::template PerThread<std::uint32_t> rank;
    group.Phase([&](std::uint32_t t) {
      const std::uint32_t bit = at + kChunk * t;
      word[t] = 0;
      if (bit < end) {
        const std::uint32_t width = end - bit < kChunk ? end - bit : kChunk;
        word[t] = static_cast<std::uint32_t>(LowBits(bits.At(bit), width));
      }
      rank[t] = OnesOf(word[t]);
    });
    const std::uint32_t found = group.ExclusiveSum(rank);
    group.Phase([&](std::uint32_t t) {
      const std::uint32_t position = at + kChunk * t - begin;
      std::uint32_t r = done + rank[t];
      for (std::uint32_t w = word[t]; w != 0 && r < ones; w &= w - 1, ++r) {
        place(r, position + FirstOneOf(w) - r);
      }
    });
    done += found;
  }
  return true;
}

// --------------------------------------------------------------- sparse tiles

// Turns list entries [first, first + count) from zeros (modulo 2^16, counted
// from `zeros_before` less) into index << 1 | negative. `zeros` is the true
// number before the last one. The low parts begin at `low_bit`.
template <typename Group>
KEDGE_BODY TileFault DecodeList(Group& group, const PayloadBits& bits,
                                std::uint32_t low_bit, std::uint32_t k,
                                std::uint32_t count, std::uint32_t units,
                                std::uint32_t zeros_before, std::uint32_t zeros,
                                std::uint16_t* entries) {
  std::uint32_t carry = 0;  // of low parts, each with 1 for the unit itself
  for (std::uint32_t i0 = 0; i0 < count; i0 += Group::kThreads) {
    typename Group::template PerThread<std::uint32_t> field;
    typename Group::template PerThread<std::uint32_t> sum;
    group.Phase([&](std::uint32_t t) {
      const std::uint32_t i = i0 + t;
      field[t] = 0;
      sum[t] = 0;
      if (i < count) {
        field[t] = static_cast<std::uint32_t>(
            LowBits(bits.At(low_bit + i * (k + 1)), k + 1));
        sum[t] = static_cast<std::uint32_t>(LowBits(field[t], k)) + 1;
      }
    });
    const std::uint32_t total = group.ExclusiveSum(sum);
    group.Phase([&](std::uint32_t t) {
      const std::uint32_t i = i0 + t;
      if (i >= count) return;
      const auto high = static_cast<std::uint16_t>(entries[i] - zeros_before);
      const std::uint32_t index =
          (std::uint32_t{high} << k) + carry + sum[t] +
          static_cast<std::uint32_t>(LowBits(field[t], k));
      entries[i] = static_cast<std::uint16_t>(index << 1 | field[t] >> k);
    });
    carry += total;
  }
  // Indices ascend, so the last speaks for all; if it lies in the tile, nothing
  // above was cut off.
  const std::uint64_t last = (std::uint64_t{zeros - zeros_before} << k) + carry;
  return last > units ? TileFault::kIndex : TileFault::kNone;
}

// Whether `index` is one of `count` ascending entries.
KEDGE_BODY bool Lists(const std::uint16_t* entries, std::uint32_t count,
                      std::uint32_t index) {
  std::uint32_t begin = 0;
  while (count > 0) {
    const std::uint32_t half = count / 2;
    if (std::uint32_t{entries[begin + half]} >> 1 < index) {
      begin += half + 1;
      count -= half + 1;
    } else {
      if (std::uint32_t{entries[begin + half]} >> 1 == index) return true;
      count = half;
    }
  }
  return false;
}

template <typename Group, typename Size>
KEDGE_BODY TileFault DecodeSparseTile(Group& group, const PayloadBits& bits,
                                      std::uint32_t bytes, std::uint32_t a,
                                      std::uint32_t b, std::uint32_t units,
                                      std::uint32_t unit_bits,
                                      ApplyShared<Size>* shared) {
  if (a + b == 0 || a + b > units) return TileFault::kCounts;
  const std::uint32_t end = 8 * bytes;
  const std::uint32_t ka = a == 0 ? 0 : RiceParameter(a, units);
  const std::uint32_t kb = b == 0 ? 0 : RiceParameter(b, units);
  const std::uint32_t b_lows = a * (ka + 1);
  const std::uint32_t unary = b_lows + b * (kb + 1);
  const std::uint32_t ones = a + 2 * b;
  if (unary + ones > end) return TileFault::kPlanes;

  const bool enough = PlaceOnes(group, bits, unary, end, ones,
                                [&](std::uint32_t rank, std::uint32_t zeros) {
                                  if (rank < a + b) {
                                    shared->entries[rank] =
                                        static_cast<std::uint16_t>(zeros);
                                  } else {
                                    shared->magnitudes[rank - a - b] = zeros;
                                  }
                                  if (rank + 1 == a) shared->zeros[0] = zeros;
                                  if (rank + 1 == a + b)
                                    shared->zeros[1] = zeros;
                                  if (rank + 1 == ones)
                                    shared->zeros[2] = zeros;
                                });
  if (!enough) return TileFault::kPlanes;
  const std::uint32_t a_zeros = a == 0 ? 0 : shared->zeros[0];
  const std::uint32_t list_zeros = shared->zeros[1];
  const std::uint32_t zeros = shared->zeros[2];
  // Behind the last one; at most `end`.
  const std::uint32_t mantissas = unary + ones + zeros;
  const std::uint32_t mantissa_bits = zeros - list_zeros;
  const bool filled = mantissa_bits <= end - mantissas &&
                      EndsAt(bits, mantissas + mantissa_bits, bytes);

  if (a > 0) {
    const TileFault fault =
        DecodeList(group, bits, 0, ka, a, units, 0, a_zeros, shared->entries);
    if (fault != TileFault::kNone) return fault;
  }
  if (b == 0) return filled ? TileFault::kNone : TileFault::kPlanes;
  const TileFault fault = DecodeList(group, bits, b_lows, kb, b, units, a_zeros,
                                     list_zeros, shared->entries + a);
  if (fault != TileFault::kNone) return fault;

  typename Group::template PerThread<std::uint32_t> bad;
  group.Phase([&](std::uint32_t t) { bad[t] = 0; });
  // From the back, as an entry needs the zeros before the one in front of it.
  for (std::uint32_t round = (b - 1) / Group::kThreads + 1; round-- > 0;) {
    typename Group::template PerThread<std::uint32_t> before;
    typename Group::template PerThread<std::uint32_t> exponent;
    group.Phase([&](std::uint32_t t) {
      const std::uint32_t i = round * Group::kThreads + t;
      if (i >= b) return;
      before[t] = i == 0 ? 0 : shared->magnitudes[i - 1] - list_zeros;
      exponent[t] = shared->magnitudes[i] - list_zeros - before[t];
    });
    group.Phase([&](std::uint32_t t) {
      const std::uint32_t i = round * Group::kThreads + t;
      if (i >= b) return;
      const std::uint32_t e = exponent[t];
      if (e >= unit_bits) {
        bad[t] = 1;
        return;
      }
      if (!filled) return;
      const std::uint64_t magnitude =
          (std::uint64_t{1} << e | LowBits(bits.At(mantissas + before[t]), e)) +
          1;
      if (magnitude >> unit_bits != 0) bad[t] = 1;
      shared->magnitudes[i] = static_cast<std::uint32_t>(magnitude);
    });
  }
  if (group.Max(bad) != 0) return TileFault::kDifference;
  if (!filled) return TileFault::kPlanes;
  if (a == 0) return TileFault::kNone;
  // Each entry of the shorter list is looked for in the longer one.
  const bool a_shorter = a < b;
  const std::uint16_t* const shorter = shared->entries + (a_shorter ? 0 : a);
  const std::uint16_t* const longer = shared->entries + (a_shorter ? a : 0);
  group.Phase([&](std::uint32_t t) {
    for (std::uint32_t i = t; i < (a_shorter ? a : b); i += Group::kThreads) {
      if (Lists(longer, a_shorter ? b : a, std::uint32_t{shorter[i]} >> 1)) {
        bad[t] = 1;
      }
    }
  });
  return group.Max(bad) == 0 ? TileFault::kNone : TileFault::kIndex;
}

// ---------------------------------------------------------------- dense tiles

// Fills entries and magnitudes for every unit, with a magnitude of 0 where
// nothing changed; *nnz is how many did.
template <typename Group, typename Size>
KEDGE_BODY TileFault DecodeDenseTile(Group& group, const PayloadBits& bits,
                                     std::uint32_t bytes, std::uint32_t k,
                                     std::uint32_t b, std::uint32_t units,
                                     std::uint32_t unit_bits,
                                     ApplyShared<Size>* shared,
                                     std::uint32_t* nnz) {
  if (k > unit_bits + 1 || b > units) return TileFault::kCounts;
  const std::uint32_t end = 8 * bytes;
  const std::uint32_t escape_bits = unit_bits + 1;
  const bool unary = k <= unit_bits;
  std::uint32_t plane = units * k;  // behind the planes read so far
  if (plane > end) return TileFault::kPlanes;
  if (unary) {
    const bool enough = PlaceOnes(group, bits, plane, end, units,
                                  [&](std::uint32_t rank, std::uint32_t zeros) {
                                    shared->magnitudes[rank] = zeros;
                                    if (rank + 1 == units) {
                                      shared->zeros[0] = zeros;
                                    }
                                  });
    if (!enough) return TileFault::kPlanes;
    plane += units + shared->zeros[0];
  }
  // The quotient of unit i, from the zeros before it and before the one in
  // front of it.
  const auto quotient_of = [&](std::uint32_t i) -> std::uint32_t {
    if (!unary) return 0;
    return shared->magnitudes[i] - (i == 0 ? 0 : shared->magnitudes[i - 1]);
  };
  typename Group::template PerThread<std::uint32_t> bad;
  typename Group::template PerThread<std::uint32_t> changed;
  typename Group::template PerThread<std::uint32_t> escaped;
  group.Phase([&](std::uint32_t t) {
    bad[t] = 0;
    changed[t] = 0;
    escaped[t] = 0;
    for (std::uint32_t i = t; i < units; i += Group::kThreads) {
      const std::uint32_t quotient = quotient_of(i);
      if (quotient > kDenseEscapeQuotient) bad[t] = 1;
      if (quotient == kDenseEscapeQuotient) ++escaped[t];
    }
  });
  if (group.Max(bad) != 0) return TileFault::kPlanes;
  if (group.ExclusiveSum(escaped) != b) return TileFault::kEscape;
  if (std::uint64_t{b} * escape_bits > end - plane ||
      !EndsAt(bits, plane + b * escape_bits, bytes)) {
    return TileFault::kPlanes;
  }

  std::uint32_t escapes = b;  // in front of what is decoded
  // From the back, as a unit needs the zeros before the one in front of it.
  for (std::uint32_t round = (units - 1) / Group::kThreads + 1; round-- > 0;) {
    typename Group::template PerThread<std::uint32_t> quotient;
    typename Group::template PerThread<std::uint32_t> escape;
    group.Phase([&](std::uint32_t t) {
      const std::uint32_t i = round * Group::kThreads + t;
      quotient[t] = i < units ? quotient_of(i) : 0;
      escape[t] = quotient[t] == kDenseEscapeQuotient ? 1 : 0;
    });
    escapes -= group.ExclusiveSum(escape);
    group.Phase([&](std::uint32_t t) {
      const std::uint32_t i = round * Group::kThreads + t;
      if (i >= units) return;
      const std::uint64_t low = LowBits(bits.At(i * k), k);
      std::uint64_t zigzag = std::uint64_t{quotient[t]} << k | low;
      if (quotient[t] == kDenseEscapeQuotient) {
        const std::uint32_t at = plane + (escapes + escape[t]) * escape_bits;
        zigzag = LowBits(bits.At(at), escape_bits);
        if (zigzag >> k < kDenseEscapeQuotient || LowBits(zigzag, k) != low) {
          bad[t] = static_cast<std::uint32_t>(TileFault::kEscape);
        }
      }
      const std::uint64_t magnitude = (zigzag >> 1) + (zigzag & 1);
      if (magnitude >> unit_bits != 0 && bad[t] == 0) {
        bad[t] = static_cast<std::uint32_t>(TileFault::kDifference);
      }
      changed[t] += magnitude != 0 ? 1 : 0;
      shared->magnitudes[i] = static_cast<std::uint32_t>(magnitude);
      shared->entries[i] = static_cast<std::uint16_t>(
          i << 1 | static_cast<std::uint32_t>(zigzag & 1));
    });
  }
  const std::uint32_t fault = group.Max(bad);
  if (fault != 0) return static_cast<TileFault>(fault);
  *nnz = group.ExclusiveSum(changed);
  return *nnz == 0 ? TileFault::kCounts : TileFault::kNone;
}

// ------------------------------------------------------ what a tile's changes
// do

// A decoded tile: entries [0, count), those from `a` on with magnitudes.
struct DecodedChanges {
  const std::uint16_t* entries;
  const std::uint32_t* magnitudes;
  std::uint32_t a;
  std::uint32_t count;

  KEDGE_BODY std::uint32_t Magnitude(std::uint32_t i) const {
    return i < a ? 1 : magnitudes[i - a];
  }
};

// Splits tile-local indices: index / width == (index * Multiplier(width)) >> 28
// exactly, as index and width are at most 2^14.
struct RowOf {
  std::uint32_t width;
  std::uint32_t multiplier;

  KEDGE_BODY explicit RowOf(std::uint32_t w)
      : width(w), multiplier(((1u << 28) + w - 1) / w) {}
  KEDGE_BODY std::uint32_t operator()(std::uint32_t index) const {
    return static_cast<std::uint32_t>((std::uint64_t{index} * multiplier) >>
                                      28);
  }
};

template <typename Unit>
KEDGE_BODY Unit LoadWeight(std::uintptr_t address) {
#ifdef __CUDACC__
  // Weights are met once: they stay out of L1, which holds payloads.
  return __ldcg(reinterpret_cast<const Unit*>(address));
#else
  if (address % sizeof(Unit) != 0) std::abort();  // would be a fault on a GPU
  Unit unit;
  std::memcpy(&unit, reinterpret_cast<const void*>(address), sizeof(Unit));
  return unit;
#endif
}
template <typename Unit>
KEDGE_BODY void StoreWeight(std::uintptr_t address, Unit unit) {
#ifdef __CUDACC__
  *reinterpret_cast<Unit*>(address) = unit;
#else
  std::memcpy(reinterpret_cast<void*>(address), &unit, sizeof(Unit));
#endif
}

// Adds the changes that lie in `target`; counts them in *written.
template <typename Unit, typename Group>
KEDGE_BODY void Scatter(
    Group& group, const DecodedChanges& changes, const TileBox& box,
    const RowOf& row_of, const BoxTarget& target,
    typename Group::template PerThread<std::uint32_t>& written) {
  // The rows and columns of the tile that lie in the target.
  const std::uint64_t row_begin =
      target.row_begin > box.row ? target.row_begin : box.row;
  const std::uint64_t col_begin =
      target.col_begin > box.col ? target.col_begin : box.col;
  const std::uint64_t row_end = target.row_end < box.row + box.height
                                    ? target.row_end
                                    : box.row + box.height;
  const std::uint64_t col_end = target.col_end < box.col + box.width
                                    ? target.col_end
                                    : box.col + box.width;
  if (row_begin >= row_end || col_begin >= col_end) return;
  const auto first_row = static_cast<std::uint32_t>(row_begin - box.row);
  const auto first_col = static_cast<std::uint32_t>(col_begin - box.col);
  const auto rows = static_cast<std::uint32_t>(row_end - row_begin);
  const auto cols = static_cast<std::uint32_t>(col_end - col_begin);
  const std::uint64_t before = col_begin - target.col_begin;
  const std::uint32_t pair = target.units_per_element - 1;  // 1 for word pairs
  const std::uint32_t odd = static_cast<std::uint32_t>(before) & pair;
  const std::uint64_t row_stride =
      static_cast<std::uint64_t>(target.row_stride_bytes);
  const std::uint64_t col_stride =
      static_cast<std::uint64_t>(target.col_stride_bytes);
  const std::uintptr_t first = reinterpret_cast<std::uintptr_t>(target.data) +
                               (row_begin - target.row_begin) * row_stride +
                               (before >> pair) * col_stride;

  group.Phase([&](std::uint32_t t) {
    // Loads of several changes are under way at a time.
    constexpr std::uint32_t kAtOnce = 4;
    std::uint32_t count = 0;
    for (std::uint32_t i0 = t; i0 < changes.count;
         i0 += kAtOnce * Group::kThreads) {
      std::uintptr_t address[kAtOnce];
      std::uint32_t value[kAtOnce];
      std::uint32_t difference[kAtOnce];
      KEDGE_UNROLL
      for (std::uint32_t n = 0; n < kAtOnce; ++n) {
        const std::uint32_t i = i0 + n * Group::kThreads;
        address[n] = 0;
        if (i >= changes.count) continue;
        const std::uint32_t entry = changes.entries[i];
        const std::uint32_t magnitude = changes.Magnitude(i);
        const std::uint32_t row = row_of(entry >> 1);
        const std::uint32_t r = row - first_row;
        const std::uint32_t c = (entry >> 1) - row * row_of.width - first_col;
        if (magnitude == 0 || r >= rows || c >= cols) continue;
        address[n] = first + r * row_stride + ((c + odd) >> pair) * col_stride +
                     ((c + odd) & pair) * sizeof(Unit);
        difference[n] = (entry & 1) != 0 ? 0 - magnitude : magnitude;
        value[n] = LoadWeight<Unit>(address[n]);
      }
      KEDGE_UNROLL
      for (std::uint32_t n = 0; n < kAtOnce; ++n) {
        if (address[n] == 0) continue;
        StoreWeight<Unit>(address[n],
                          static_cast<Unit>(value[n] + difference[n]));
        ++count;
      }
    }
    written[t] += count;
  });
}

// What a group adds up over its tiles.
template <typename Group>
struct ApplyTally {
  // 32 bits last for 10^8 tiles a thread.
  typename Group::template PerThread<std::uint32_t> written;
  typename Group::template PerThread<std::uint64_t> nnz;  // of thread 0
};

// L of the changes, into the record's sums.
template <typename Group>
KEDGE_BODY void SumChanges(Group& group, const DecodedChanges& changes,
                           const TileBox& box, const RowOf& row_of,
                           const struct ApplyRecord& record,
                           const DeviceL61& l61, std::uint32_t nnz,
                           RecordSums* sums) {
  typename Group::template PerThread<std::uint64_t> low;
  typename Group::template PerThread<std::uint64_t> high;
  const std::uint64_t first = box.row * record.grid.cols + box.col;
  group.Phase([&](std::uint32_t t) {
    std::uint64_t sum = 0;
    for (std::uint32_t i = t; i < changes.count; i += Group::kThreads) {
      const std::uint64_t magnitude = changes.Magnitude(i);
      if (magnitude == 0) continue;
      const std::uint32_t entry = changes.entries[i];
      const std::uint32_t row = row_of(entry >> 1);
      const std::uint64_t unit =
          first + row * record.grid.cols + ((entry >> 1) - row * row_of.width);
      const std::uint64_t offset = unit * record.unit_bytes;
      const std::uint64_t word = offset >> 2;
      const std::uint64_t weight =
          L61Mul(l61.a[word % kL61TileWords], l61.key.B(word / kL61TileWords));
      const std::uint64_t term =
          L61Mul(weight, magnitude << (8 * (offset & 3)));
      sum = (entry & 1) != 0 ? L61Sub(sum, term) : L61Add(sum, term);
    }
    low[t] = sum & 0x7fffffffu;
    high[t] = sum >> 31;
  });
  group.AddSum(low, &sums->l61_low);
  group.AddSum(high, &sums->l61_high);
  group.Phase([&](std::uint32_t t) {
    if (t == 0) AtomicAdd(&sums->nnz, std::uint64_t{nnz});
  });
}

// ----------------------------------------------------------------- whole tiles

// The first rule that a tile breaks goes to the outcome, as index << 8 | fault
// until FinishOutcome.
template <typename Group>
KEDGE_BODY void ReportFault(Group& group, const ApplyBatch& batch,
                            std::uint64_t index, TileFault fault) {
  group.Phase([&](std::uint32_t t) {
    if (t == 0) {
      AtomicMin(&batch.outcome->first_bad_tile,
                index << 8 | static_cast<std::uint64_t>(fault));
    }
  });
}

// Whether every change lies in the record's slice.
template <typename Group>
KEDGE_BODY bool InSlice(Group& group, const DecodedChanges& changes,
                        const TileBox& box, const RowOf& row_of,
                        const struct ApplyRecord& record) {
  const std::uint64_t first = box.row * record.grid.cols + box.col;
  const std::uint64_t last =
      first + (box.height - 1) * record.grid.cols + box.width - 1;
  if (first >= record.slice.begin && last < record.slice.end) return true;
  typename Group::template PerThread<std::uint32_t> outside;
  group.Phase([&](std::uint32_t t) {
    outside[t] = 0;
    for (std::uint32_t i = t; i < changes.count; i += Group::kThreads) {
      if (changes.Magnitude(i) == 0) continue;
      const std::uint32_t index = std::uint32_t{changes.entries[i]} >> 1;
      const std::uint32_t row = row_of(index);
      const std::uint64_t unit =
          first + row * record.grid.cols + (index - row * row_of.width);
      if (unit < record.slice.begin || unit >= record.slice.end) outside[t] = 1;
    }
  });
  return group.Max(outside) == 0;
}

// Decodes, checks and applies tile `index` of the batch, whose mode is `mode`.
template <ApplyMode mode, typename Size, typename Group>
KEDGE_BODY void ApplyOneTile(Group& group, const ApplyBatch& batch,
                             std::uint64_t index, const ApplyTile& tile,
                             ApplyShared<Size>* shared,
                             ApplyTally<Group>* tally) {
  if (tile.record >= batch.record_count || tile.bytes > batch.payload_bytes ||
      tile.payload > batch.payload_bytes - tile.bytes ||
      tile.bytes > kMaxPayloadBytes) {
    ReportFault(group, batch, index, TileFault::kPlanes);
    return;
  }
  const struct ApplyRecord& record = batch.records[tile.record];
  if (tile.tile >= record.grid.tile_count()) {
    ReportFault(group, batch, index, TileFault::kSlice);
    return;
  }
  const TileBox box = record.grid.Box(tile.tile);
  const std::uint32_t units = box.unit_count();
  const std::uint32_t unit_bits = 8 * record.unit_bytes;
  const PayloadBits bits(batch.payloads + tile.payload);

  DecodedChanges changes{shared->entries, shared->magnitudes, 0, 0};
  std::uint32_t nnz = 0;
  TileFault fault = TileFault::kNone;
  if constexpr (Size::kDense) {
    if (tile.mode != static_cast<std::uint32_t>(TileMode::kSparse)) {
      fault = DecodeDenseTile(group, bits, tile.bytes, tile.a, tile.b, units,
                              unit_bits, shared, &nnz);
      changes.count = units;
    }
  }
  if (tile.mode == static_cast<std::uint32_t>(TileMode::kSparse)) {
    fault = DecodeSparseTile(group, bits, tile.bytes, tile.a, tile.b, units,
                             unit_bits, shared);
    changes.a = tile.a;
    changes.count = std::uint32_t{tile.a} + tile.b;
    nnz = changes.count;
  }
  const RowOf row_of(box.width);
  if (fault == TileFault::kNone &&
      !InSlice(group, changes, box, row_of, record)) {
    fault = TileFault::kSlice;
  }
  if (fault != TileFault::kNone) {
    ReportFault(group, batch, index, fault);
    return;
  }
  if constexpr (mode == ApplyMode::kCheck) {
    SumChanges(group, changes, box, row_of, record, batch.l61, nnz,
               batch.sums + tile.record);
  } else {
    for (std::uint32_t n = 0; n < record.box_count; ++n) {
      const BoxTarget& target = batch.boxes[record.first_box + n];
      switch (record.unit_bytes) {
        case 1:
          Scatter<std::uint8_t>(group, changes, box, row_of, target,
                                tally->written);
          break;
        case 2:
          Scatter<std::uint16_t>(group, changes, box, row_of, target,
                                 tally->written);
          break;
        default:
          Scatter<std::uint32_t>(group, changes, box, row_of, target,
                                 tally->written);
      }
    }
  }
  group.Phase([&](std::uint32_t t) {
    if (t == 0) tally->nnz[t] += nnz;
  });
}

KEDGE_BODY std::uint64_t TilesToApply(const ApplyBatch& batch) {
  return batch.tile_count < batch.tile_limit ? batch.tile_count
                                             : batch.tile_limit;
}

template <typename Group>
KEDGE_BODY void AddTally(Group& group, ApplyTally<Group>* tally,
                         ApplyOutcome* outcome) {
  typename Group::template PerThread<std::uint64_t> written;
  group.Phase([&](std::uint32_t t) { written[t] = tally->written[t]; });
  group.AddSum(written, &outcome->units_written);
  group.AddSum(tally->nnz, &outcome->nnz);
}

// ----------------------------------------------------------- bodies of kernels

// Every group_count-th tile from `group_index` on, those of the smallest size.
template <ApplyMode mode, typename Group>
KEDGE_BODY void ApplyLightTiles(Group& group, const ApplyBatch& batch,
                                std::uint64_t group_index,
                                std::uint64_t group_count,
                                ApplyShared<LightApply>* shared) {
  static_assert(Group::kThreads == LightApply::kThreads);
  const std::uint64_t limit = TilesToApply(batch);
  if (group_index >= limit) return;
  ApplyTally<Group> tally;
  ApplyTile next = batch.tiles[group_index];
  for (std::uint64_t i = group_index; i < limit; i += group_count) {
    const ApplyTile tile = next;
    // On its way while this one is decoded.
    if (group_count < limit - i) next = batch.tiles[i + group_count];
    if (ApplyClass(tile) == 0) {
      ApplyOneTile<mode>(group, batch, i, tile, shared, &tally);
    }
  }
  AddTally(group, &tally, batch.outcome);
}

// The tiles of class `tile_class` among every group_count-th tile from
// `group_index` on: neighbours, which tend to be alike, go to different groups.
template <ApplyMode mode, typename Size, typename Group>
KEDGE_BODY void ApplyLargeTiles(Group& group, const ApplyBatch& batch,
                                std::uint32_t tile_class,
                                std::uint64_t group_index,
                                std::uint64_t group_count,
                                ApplyShared<Size>* shared) {
  static_assert(Group::kThreads == Size::kThreads);
  const std::uint64_t limit = TilesToApply(batch);
  if (group_index >= limit) return;
  const std::uint64_t mine = (limit - group_index - 1) / group_count + 1;
  ApplyTally<Group> tally;
  for (std::uint64_t first = 0; first < mine; first += Group::kThreads) {
    group.Phase([&](std::uint32_t t) {
      if (t == 0) shared->listed = 0;
    });
    group.Phase([&](std::uint32_t t) {
      if (first + t >= mine) return;
      const std::uint64_t i = group_index + (first + t) * group_count;
      if (ApplyClass(batch.tiles[i]) != tile_class) return;
      shared->list[AtomicAdd(&shared->listed, 1)] =
          static_cast<std::uint16_t>(t);
    });
    const std::uint32_t listed = shared->listed;
    for (std::uint32_t n = 0; n < listed; ++n) {
      const std::uint64_t i =
          group_index + (first + shared->list[n]) * group_count;
      ApplyOneTile<mode>(group, batch, i, batch.tiles[i], shared, &tally);
    }
    group.Phase([](std::uint32_t) {});  // `listed` is written next
  }
  AddTally(group, &tally, batch.outcome);
}

// One thread, before and behind the others.
KEDGE_BODY void StartOutcome(ApplyOutcome* outcome) {
  *outcome = ApplyOutcome{};
}
KEDGE_BODY void FinishOutcome(ApplyOutcome* outcome) {
  const std::uint64_t bad = outcome->first_bad_tile;
  if (bad == ~std::uint64_t{0}) return;
  outcome->first_bad_tile = bad >> 8;
  outcome->fault = static_cast<TileFault>(bad & 0xff);
}

}  // namespace kedge::internal

#endif  // KEDGE_ENGINE_CUDA_TILE_APPLY_CUH_
