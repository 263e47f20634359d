#include "kedge/engine/cpu/record_apply.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kedge/format/codec.h"
#include "kedge/format/status.h"

#undef HWY_TARGET_INCLUDE
#define HWY_WANT_AVX3_DL  // compresses bytes, for unary planes
#define HWY_TARGET_INCLUDE "kedge/engine/cpu/record_apply.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#if HWY_ARCH_X86
#include <immintrin.h>
#endif

// What all targets share.
#ifndef KEDGE_ENGINE_CPU_RECORD_APPLY_ONCE_
#define KEDGE_ENGINE_CPU_RECORD_APPLY_ONCE_
namespace kedge::internal {

// Entries that vector code may read and write beyond a list.
inline constexpr std::uint32_t kVectorSlack = 32;

// A decoded and checked tile. An entry is index << 1 | negative; the indices of
// each list ascend and are below the tile's units.
struct DecodedTile {
  std::uint32_t a_count = 0;  // |d| = 1
  std::uint32_t b_count = 0;  // |d| >= 2, and all changes of a dense tile
  std::uint16_t entries[kTileUnits + kVectorSlack];      // list A, then list B
  std::uint32_t b_magnitude[kTileUnits + kVectorSlack];  // |d|

  std::uint16_t* a() { return entries; }
  const std::uint16_t* a() const { return entries; }
  std::uint16_t* b() { return entries + a_count; }
  const std::uint16_t* b() const { return entries + a_count; }
};

// The cache lines of the next tile to change that were not asked for yet, by
// entries that lie in them. A core has few requests under way at a time (16 or
// so) and stalls if asked for more, so they go out a few at a time between the
// computations of decoding and applying.
struct LineRequests {
  const std::uint16_t* next = nullptr;
  const std::uint16_t* end = nullptr;
  std::byte* weights = nullptr;
  std::int64_t unit_bytes = 0;
  std::int64_t row_step = 0;
  std::uint64_t reciprocal = 0;
};

struct DecoderScratch {
  DecodedTile tiles[2];
  LineRequests requests;
  // A bit for each unit: whether list B names it. All zero between tiles.
  std::uint32_t marks[kTileUnits / 32] = {};
  // The parts of a list's gaps.
  std::uint16_t zeros[kTileUnits + kVectorSlack];
  std::uint16_t fields[kTileUnits + kVectorSlack];
  std::uint64_t zigzags[kTileUnits];
};

// The first rule that a tile breaks.
enum class TileProblem {
  kNone,
  kCounts,
  kPlanes,
  kUnitBeyondTile,
  kUnitInBothLists,
  kExponent,
  kDifference,
  kEscapes,
  kNoChange,
};

// Adds the changes of a tile to `weights`; unit i of the tile is the unit at
// row i / width and column i % width from there, rows `row_stride_bytes` apart.
struct TilePlace {
  std::byte* weights;
  std::uint32_t width;
  std::uint32_t height;
  std::int64_t row_stride_bytes;
};

// What a row of the tile adds beyond the units that precede it.
constexpr std::int64_t RowStep(const TilePlace& place,
                               std::uint32_t unit_bytes) {
  return place.row_stride_bytes -
         static_cast<std::int64_t>(place.width) * unit_bytes;
}

// (index * Reciprocal(width)) >> 32 is index / width, exactly, because both
// stay below 2^15.
constexpr std::uint64_t Reciprocal(std::uint32_t width) {
  return ((std::uint64_t{1} << 32) + width - 1) / width;
}

struct ApplyArguments {
  const DecodedTile* tile;
  TilePlace place;
  std::uint32_t unit_bytes;
  LineRequests* requests;  // of the tile after this one
};

}  // namespace kedge::internal
#endif  // KEDGE_ENGINE_CPU_RECORD_APPLY_ONCE_

HWY_BEFORE_NAMESPACE();
namespace kedge::internal {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

HWY_INLINE std::uint64_t LoadWord(const std::uint8_t* at) {
  std::uint64_t word;
  std::memcpy(&word, at, 8);
  return word;
}

// At least 57 bits from bit `bit` on.
HWY_INLINE std::uint64_t LoadBits(const std::uint8_t* bytes,
                                  std::uint64_t bit) {
  return LoadWord(bytes + (bit >> 3)) >> (bit & 7);
}

// Asks for the lines of the next `count` entries.
HWY_INLINE void AskFor(std::uint32_t count, LineRequests* requests) {
  const LineRequests r = *requests;
  const std::uint16_t* const end =
      r.next + std::min<std::ptrdiff_t>(count, r.end - r.next);
  for (const std::uint16_t* at = r.next; at != end; ++at) {
    const std::uint64_t index = *at >> 1;
    const auto row = static_cast<std::int64_t>((index * r.reciprocal) >> 32);
    __builtin_prefetch(r.weights +
                           static_cast<std::int64_t>(index) * r.unit_bytes +
                           row * r.row_step,
                       1, 2);
  }
  requests->next = end;
}

// out[i] = base + the position of one i of `word` - i, for its first `ones` >=
// 1 ones; returns the last. May write kVectorSlack - 1 too many.
template <typename Number>
HWY_INLINE std::uint64_t PlaceOnes(std::uint64_t word, std::uint32_t ones,
                                   std::uint64_t base,
                                   Number* HWY_RESTRICT out) {
#if HWY_TARGET <= HWY_AVX3_DL
  HWY_ALIGN static constexpr std::uint8_t kIota[64] = {
      0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
      16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31,
      32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47,
      48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63};
  const __m512i iota = _mm512_load_si512(kIota);
  const __m512i less =
      _mm512_sub_epi8(_mm512_maskz_compress_epi8(word, iota), iota);
  if constexpr (sizeof(Number) == 2) {
    const __m512i add = _mm512_set1_epi16(static_cast<short>(base));
    _mm512_storeu_si512(
        out, _mm512_add_epi16(
                 _mm512_cvtepu8_epi16(_mm512_castsi512_si256(less)), add));
    if (ones > 32) {
      _mm512_storeu_si512(
          out + 32,
          _mm512_add_epi16(
              _mm512_cvtepu8_epi16(_mm512_extracti64x4_epi64(less, 1)), add));
    }
  } else {
    const __m512i add = _mm512_set1_epi32(static_cast<int>(base));
    const auto part = [&](std::uint32_t at, __m128i bytes) HWY_ATTR {
      _mm512_storeu_si512(out + at,
                          _mm512_add_epi32(_mm512_cvtepu8_epi32(bytes), add));
    };
    part(0, _mm512_castsi512_si128(less));
    if (ones > 16) part(16, _mm512_extracti32x4_epi32(less, 1));
    if (ones > 32) {
      part(32, _mm512_extracti32x4_epi32(less, 2));
      part(48, _mm512_extracti32x4_epi32(less, 3));
    }
  }
  const std::uint64_t last = _pdep_u64(std::uint64_t{1} << (ones - 1), word);
  return base + static_cast<std::uint64_t>(__builtin_ctzll(last)) - (ones - 1);
#else
  std::uint64_t last = 0;
  for (std::uint32_t i = 0; i < ones; ++i) {
    last = base + static_cast<std::uint64_t>(__builtin_ctzll(word)) - i;
    word &= word - 1;
    out[i] = static_cast<Number>(last);
  }
  return last;
#endif
}

// Finds `count` >= 1 ones of a unary plane from bit `*bit` on, which moves
// beyond the last of them. zeros[i] is the number of zeros before one i, modulo
// 2^bits of Number; the return value that before the last one. False if the
// plane ends early. Loads at most 8 bytes beyond the payload.
template <typename Number>
HWY_INLINE bool ReadUnary(const std::uint8_t* bytes, std::uint64_t end_bit,
                          std::uint32_t count, std::uint64_t* bit,
                          Number* HWY_RESTRICT zeros, std::uint64_t* last_zeros,
                          LineRequests* requests) {
  if (*bit >= end_bit) return false;
  const std::uint8_t* at = bytes + (*bit >> 3);
  std::uint64_t word = LoadWord(at) & (~std::uint64_t{0} << (*bit & 7));
  // The number of the word's lowest bit counted from *bit, less the ones so
  // far: wraps below zero in the first word, where the masked bits make up for
  // it.
  std::uint64_t base = 0 - (*bit & 7);
  std::uint32_t done = 0;
  std::uint64_t last = 0;
  for (;;) {
    const std::uint32_t ones = std::min(
        static_cast<std::uint32_t>(__builtin_popcountll(word)), count - done);
    if (ones != 0) last = PlaceOnes(word, ones, base, zeros + done);
    done += ones;
    AskFor(ones / 4, requests);
    if (done == count) break;
    base += 64 - ones;
    at += 8;
    if (at >= bytes + (end_bit >> 3)) return false;
    word = LoadWord(at);
  }
  *last_zeros = last;
  *bit += last + count;
  return *bit <= end_bit;
}

// Spreads `count` fields of `width` <= 14 bits to 16 bits each. May write 3 too
// many.
HWY_INLINE void UnpackLows(const std::uint8_t* bytes, std::uint64_t bit,
                           std::uint32_t width, std::uint32_t count,
                           std::uint16_t* HWY_RESTRICT fields) {
  const std::uint64_t mask = (std::uint64_t{1} << width) - 1;
#if HWY_TARGET <= HWY_AVX3 && !defined(HWY_DISABLE_BMI2_FMA)
  // Every processor with AVX-512 has a fast deposit instruction.
  const std::uint64_t four = mask * 0x0001000100010001u;
  for (std::uint32_t i = 0; i < count; i += 4, bit += 4 * width) {
    const std::uint64_t spread = _pdep_u64(LoadBits(bytes, bit), four);
    std::memcpy(fields + i, &spread, 8);
  }
#else
  for (std::uint32_t i = 0; i < count; i += 4, bit += 4 * width) {
    const std::uint64_t word = LoadBits(bytes, bit);
    const std::uint64_t spread = (word & mask) |
                                 ((word >> width) & mask) << 16 |
                                 ((word >> (2 * width)) & mask) << 32 |
                                 ((word >> (3 * width)) & mask) << 48;
    std::memcpy(fields + i, &spread, 8);
  }
#endif
}

// Turns gaps' parts into entries: entries[i] = index << 1 | negative, where
// index i is the sum of all gaps to i, plus i. fields[i] holds a gap's low k
// bits and the sign above, zeros[i] the sum of the high parts. May read and
// write 7 too many. Returns the sum of all low parts plus `count`: below 2^16,
// as RiceParameter has count << k <= 0.9625 units. Indices may wrap; the caller
// refuses lists whose last one does.
HWY_INLINE std::uint64_t JoinGaps(const std::uint16_t* HWY_RESTRICT fields,
                                  const std::uint16_t* HWY_RESTRICT zeros,
                                  std::uint32_t k, std::uint32_t count,
                                  std::uint16_t* HWY_RESTRICT entries,
                                  LineRequests* requests) {
  const std::uint32_t low_mask = (std::uint32_t{1} << k) - 1;
#if HWY_TARGET == HWY_SCALAR
  std::uint64_t total = 0;
  for (std::uint32_t i = 0; i < count; ++i) {
    if (i % 8 == 0) AskFor(2, requests);
    total += (fields[i] & low_mask) + 1;
    const std::uint64_t index = (std::uint64_t{zeros[i]} << k) + total - 1;
    entries[i] = static_cast<std::uint16_t>(index << 1 | (fields[i] >> k & 1));
  }
  return total;
#else
  const hn::FixedTag<std::uint16_t, 8> d;
  const hn::Repartition<std::uint8_t, decltype(d)> d8;
  HWY_ALIGN static constexpr std::uint8_t kLastLane[16] = {
      14, 15, 14, 15, 14, 15, 14, 15, 14, 15, 14, 15, 14, 15, 14, 15};
  const auto last_lane = hn::Load(d8, kLastLane);
  const auto mask = hn::Set(d, static_cast<std::uint16_t>(low_mask));
  const auto one = hn::Set(d, std::uint16_t{1});
  const int shift = static_cast<int>(k);
  auto carry = hn::Zero(d);  // the sum of the lows so far, plus their count
  auto last = carry;
  for (std::uint32_t i = 0; i < count; i += 8) {
    AskFor(2, requests);
    const auto field = hn::LoadU(d, fields + i);
    auto sum = hn::Add(hn::And(field, mask), one);
    sum = hn::Add(sum, hn::ShiftLeftLanes<1>(d, sum));
    sum = hn::Add(sum, hn::ShiftLeftLanes<2>(d, sum));
    sum = hn::Add(sum, hn::ShiftLeftLanes<4>(d, sum));
    sum = hn::Add(sum, carry);
    last = sum;
    carry =
        hn::BitCast(d, hn::TableLookupBytes(hn::BitCast(d8, sum), last_lane));
    const auto index = hn::Sub(
        hn::Add(hn::ShiftLeftSame(hn::LoadU(d, zeros + i), shift), sum), one);
    const auto sign = hn::And(hn::ShiftRightSame(field, shift), one);
    hn::StoreU(hn::Or(hn::ShiftLeft<1>(index), sign), d, entries + i);
  }
  HWY_ALIGN std::uint16_t last_sums[8];
  hn::Store(last, d, last_sums);
  return last_sums[(count - 1) % 8];
#endif
}

// Whether one of `count` entries is of a unit that `marks` has a bit for.
HWY_INLINE bool AnyMarked(const std::uint16_t* HWY_RESTRICT entries,
                          std::uint32_t count,
                          const std::uint32_t* HWY_RESTRICT marks) {
  std::uint32_t any = 0;
  std::uint32_t i = 0;
#if HWY_TARGET != HWY_SCALAR
  const hn::ScalableTag<std::int32_t> d;
  const hn::RebindToUnsigned<decltype(d)> du;
  const hn::Rebind<std::uint16_t, decltype(d)> half;
  const auto lanes = static_cast<std::uint32_t>(hn::Lanes(d));
  const auto low_bits = hn::Set(du, 31u);
  auto found = hn::Zero(du);
  for (; i + lanes <= count; i += lanes) {
    const auto unit =
        hn::ShiftRight<1>(hn::PromoteTo(du, hn::LoadU(half, entries + i)));
    const auto word =
        hn::GatherIndex(du, marks, hn::BitCast(d, hn::ShiftRight<5>(unit)));
    found = hn::Or(found, hn::Shr(word, hn::And(unit, low_bits)));
  }
  any = hn::GetLane(hn::SumOfLanes(du, hn::And(found, hn::Set(du, 1u))));
#endif
  for (; i < count; ++i) {
    const std::uint32_t unit = entries[i] >> 1;
    any |= marks[unit / 32] >> (unit % 32) & 1;
  }
  return any != 0;
}

// Decodes a list whose lows begin at bit `low_bit` and whose unary part at
// `*unary_bit`, which moves behind it.
TileProblem DecodeList(const std::uint8_t* bytes, std::uint64_t low_bit,
                       std::uint32_t count, std::uint32_t units,
                       std::uint64_t end_bit, std::uint64_t* unary_bit,
                       std::uint16_t* entries, DecoderScratch* scratch) {
  const std::uint32_t k = RiceParameter(count, units);
  std::uint64_t zeros = 0;
  if (!ReadUnary(bytes, end_bit, count, unary_bit, scratch->zeros, &zeros,
                 &scratch->requests)) {
    return TileProblem::kPlanes;
  }
  UnpackLows(bytes, low_bit, k + 1, count, scratch->fields);
  const std::uint64_t lows_and_count = JoinGaps(
      scratch->fields, scratch->zeros, k, count, entries, &scratch->requests);
  // Indices ascend: the last one speaks for all.
  return (zeros << k) + lows_and_count - 1 < units
             ? TileProblem::kNone
             : TileProblem::kUnitBeyondTile;
}

TileProblem DecodeSparseTile(const TileView& view, std::uint32_t units,
                             std::uint32_t unit_bytes, DecodedTile* tile,
                             DecoderScratch* scratch) {
  const std::uint32_t unit_bits = 8 * unit_bytes;
  const std::uint32_t na = view.a;
  const std::uint32_t nb = view.b;
  if (na + nb == 0 || na + nb > units) return TileProblem::kCounts;
  const auto* bytes =
      reinterpret_cast<const std::uint8_t*>(view.payload.data());
  const std::uint64_t end_bit = 8 * std::uint64_t{view.payload.size()};
  const std::uint32_t ka = na == 0 ? 0 : RiceParameter(na, units);
  const std::uint32_t kb = nb == 0 ? 0 : RiceParameter(nb, units);
  const std::uint64_t b_low_bit = std::uint64_t{na} * (ka + 1);
  std::uint64_t bit = b_low_bit + std::uint64_t{nb} * (kb + 1);
  if (bit + na + nb > end_bit) return TileProblem::kPlanes;

  tile->a_count = na;
  tile->b_count = nb;
  if (na > 0) {
    const TileProblem problem =
        DecodeList(bytes, 0, na, units, end_bit, &bit, tile->a(), scratch);
    if (problem != TileProblem::kNone) return problem;
  }
  if (nb > 0) {
    const TileProblem problem = DecodeList(bytes, b_low_bit, nb, units, end_bit,
                                           &bit, tile->b(), scratch);
    if (problem != TileProblem::kNone) return problem;

    // The sums of the exponents, in place of the magnitudes for now.
    std::uint64_t mantissa_bits = 0;
    if (!ReadUnary(bytes, end_bit, nb, &bit, tile->b_magnitude, &mantissa_bits,
                   &scratch->requests)) {
      return TileProblem::kPlanes;
    }
    if (mantissa_bits > end_bit - bit) return TileProblem::kPlanes;
    std::uint64_t largest = 0;
    std::uint32_t highest = 0;
    std::uint32_t before = 0;
    for (std::uint32_t i = 0; i < nb; ++i) {
      const std::uint32_t sum = tile->b_magnitude[i];
      // Beyond 31 it is refused below; until then shifts stay defined.
      const std::uint32_t e = std::min<std::uint32_t>(sum - before, 32);
      highest = std::max(highest, e);
      const std::uint64_t top = std::uint64_t{1} << e;
      const std::uint64_t magnitude =
          (top | (LoadBits(bytes, bit + before) & (top - 1))) + 1;
      before = sum;
      largest = std::max(largest, magnitude);
      tile->b_magnitude[i] = static_cast<std::uint32_t>(magnitude);
    }
    bit += mantissa_bits;
    if (highest >= unit_bits) return TileProblem::kExponent;
    if (largest >> unit_bits != 0) return TileProblem::kDifference;

    for (std::uint32_t n = 0; n < nb; ++n) {
      const std::uint32_t unit = tile->b()[n] >> 1;
      scratch->marks[unit / 32] |= std::uint32_t{1} << (unit % 32);
    }
    const bool both = AnyMarked(tile->a(), na, scratch->marks);
    for (std::uint32_t n = 0; n < nb; ++n) {
      scratch->marks[(tile->b()[n] >> 1) / 32] = 0;
    }
    if (both) return TileProblem::kUnitInBothLists;
  }
  if ((bit + 7) / 8 != view.payload.size()) return TileProblem::kPlanes;
  if ((bit & 7) != 0 && (bytes[bit >> 3] >> (bit & 7)) != 0) {
    return TileProblem::kPlanes;
  }
  return TileProblem::kNone;
}

TileProblem DecodeDenseTile(const TileView& view, std::uint32_t units,
                            std::uint32_t unit_bytes, DecodedTile* tile,
                            DecoderScratch* scratch) {
  const std::uint32_t unit_bits = 8 * unit_bytes;
  const std::uint32_t k = view.a;
  if (k > unit_bits + 1 || view.b > units) return TileProblem::kCounts;
  const auto* bytes =
      reinterpret_cast<const std::uint8_t*>(view.payload.data());
  const std::uint64_t end_bit = 8 * std::uint64_t{view.payload.size()};
  std::uint64_t bit = std::uint64_t{units} * k;
  if (bit > end_bit) return TileProblem::kPlanes;
  std::uint64_t* const zigzags = scratch->zigzags;
  const std::uint64_t low_mask = (std::uint64_t{1} << k) - 1;
  for (std::uint32_t i = 0; i < units; ++i) {
    zigzags[i] = LoadBits(bytes, std::uint64_t{i} * k) & low_mask;
  }
  if (k <= unit_bits) {
    // The sums of the quotients, in place of the magnitudes for now.
    std::uint64_t quotient_sum = 0;
    if (!ReadUnary(bytes, end_bit, units, &bit, tile->b_magnitude,
                   &quotient_sum, &scratch->requests)) {
      return TileProblem::kPlanes;
    }
    std::uint32_t highest = 0;
    std::uint32_t escapes = 0;
    std::uint32_t before = 0;
    for (std::uint32_t i = 0; i < units; ++i) {
      const std::uint32_t q = tile->b_magnitude[i] - before;
      before = tile->b_magnitude[i];
      highest = std::max(highest, q);
      escapes += q == kDenseEscapeQuotient ? 1 : 0;
      zigzags[i] |= std::uint64_t{q} << k;
    }
    if (highest > kDenseEscapeQuotient) return TileProblem::kPlanes;
    if (escapes != view.b) return TileProblem::kEscapes;
    const std::uint32_t escape_bits = unit_bits + 1;
    if (std::uint64_t{escapes} * escape_bits > end_bit - bit) {
      return TileProblem::kPlanes;
    }
    for (std::uint32_t i = 0; i < units && escapes > 0; ++i) {
      if (zigzags[i] >> k != kDenseEscapeQuotient) continue;
      const std::uint64_t z =
          LoadBits(bytes, bit) & ((std::uint64_t{1} << escape_bits) - 1);
      bit += escape_bits;
      if (z >> k < kDenseEscapeQuotient || ((z ^ zigzags[i]) & low_mask) != 0) {
        return TileProblem::kEscapes;
      }
      zigzags[i] = z;
      --escapes;
    }
  } else if (view.b != 0) {
    return TileProblem::kEscapes;
  }
  if ((bit + 7) / 8 != view.payload.size()) return TileProblem::kPlanes;
  if ((bit & 7) != 0 && (bytes[bit >> 3] >> (bit & 7)) != 0) {
    return TileProblem::kPlanes;
  }

  tile->a_count = 0;
  std::uint32_t count = 0;
  std::uint64_t largest = 0;
  for (std::uint32_t i = 0; i < units; ++i) {
    const std::uint64_t z = zigzags[i];
    const std::uint64_t magnitude = (z >> 1) + (z & 1);
    tile->b()[count] = static_cast<std::uint16_t>(i << 1 | (z & 1));
    tile->b_magnitude[count] = static_cast<std::uint32_t>(magnitude);
    count += z != 0 ? 1 : 0;
    largest = std::max(largest, magnitude);
  }
  if (largest >> unit_bits != 0) return TileProblem::kDifference;
  if (count == 0) return TileProblem::kNoChange;
  tile->b_count = count;
  return TileProblem::kNone;
}

TileProblem DecodeWhole(const TileView& view, std::uint32_t units,
                        std::uint32_t unit_bytes, DecodedTile* tile,
                        DecoderScratch* scratch) {
  return view.mode == TileMode::kSparse
             ? DecodeSparseTile(view, units, unit_bytes, tile, scratch)
             : DecodeDenseTile(view, units, unit_bytes, tile, scratch);
}

// How the rows of a tile lie in memory.
enum class Rows { kOneRun, k128, kAnyWidth };

// Where unit `index` of a tile lies.
template <Rows rows>
class UnitAddress {
 public:
  UnitAddress(const TilePlace& place, std::uint32_t unit_bytes)
      : weights_(place.weights),
        unit_bytes_(unit_bytes),
        reciprocal_(Reciprocal(place.width)),
        row_step_(RowStep(place, unit_bytes)) {}

  HWY_INLINE std::byte* operator()(std::uint32_t index) const {
    std::int64_t row = 0;
    if constexpr (rows == Rows::k128) row = index >> 7;
    if constexpr (rows == Rows::kAnyWidth) {
      row = static_cast<std::int64_t>((index * reciprocal_) >> 32);
    }
    return weights_ + std::int64_t{index} * unit_bytes_ + row * row_step_;
  }

 private:
  std::byte* weights_;
  std::int64_t unit_bytes_;
  std::uint64_t reciprocal_;
  std::int64_t row_step_;
};

template <typename Unit, Rows rows>
void AddTile(const DecodedTile& tile, const TilePlace& place,
             LineRequests* requests) {
  const UnitAddress<rows> address(place, sizeof(Unit));
  const auto add = [](std::byte* at, Unit by) HWY_ATTR {
    Unit value;
    std::memcpy(&value, at, sizeof(Unit));
    value = static_cast<Unit>(value + by);
    std::memcpy(at, &value, sizeof(Unit));
  };
  constexpr std::uint32_t kBlock = 8;
  for (std::uint32_t i = 0; i < tile.a_count;) {
    const std::uint32_t end = std::min(i + kBlock, tile.a_count);
    AskFor(kBlock / 2, requests);
    for (; i < end; ++i) {
      const std::uint32_t entry = tile.a()[i];
      add(address(entry >> 1), static_cast<Unit>(1 - 2 * (entry & 1)));
    }
  }
  for (std::uint32_t i = 0; i < tile.b_count; ++i) {
    const std::uint32_t entry = tile.b()[i];
    const std::uint32_t magnitude = tile.b_magnitude[i];
    add(address(entry >> 1),
        static_cast<Unit>((entry & 1) != 0 ? 0 - magnitude : magnitude));
  }
}

template <typename Unit>
void AddUnits(const ApplyArguments& arguments) {
  const TilePlace& place = arguments.place;
  if (place.row_stride_bytes ==
          static_cast<std::int64_t>(place.width * sizeof(Unit)) ||
      place.height == 1) {
    AddTile<Unit, Rows::kOneRun>(*arguments.tile, place, arguments.requests);
  } else if (place.width == 128) {
    AddTile<Unit, Rows::k128>(*arguments.tile, place, arguments.requests);
  } else {
    AddTile<Unit, Rows::kAnyWidth>(*arguments.tile, place, arguments.requests);
  }
}

void AddWhole(const ApplyArguments& arguments) {
  switch (arguments.unit_bytes) {
    case 1:
      return AddUnits<std::uint8_t>(arguments);
    case 2:
      return AddUnits<std::uint16_t>(arguments);
    default:
      return AddUnits<std::uint32_t>(arguments);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace kedge::internal
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kedge {
namespace internal {
HWY_EXPORT(DecodeWhole);
HWY_EXPORT(AddWhole);

namespace {

absl::string_view Text(TileProblem problem) {
  switch (problem) {
    case TileProblem::kNone:
      break;
    case TileProblem::kCounts:
      return "counts or parameter out of range";
    case TileProblem::kPlanes:
      return "planes do not fill the payload exactly with zero padding";
    case TileProblem::kUnitBeyondTile:
      return "a list names a unit beyond the tile";
    case TileProblem::kUnitInBothLists:
      return "a unit stands in both lists";
    case TileProblem::kExponent:
      return "an exponent exceeds the unit's bits";
    case TileProblem::kDifference:
      return "a difference exceeds the unit's bits";
    case TileProblem::kEscapes:
      return "escapes do not match their count or are not canonical";
    case TileProblem::kNoChange:
      return "a listed tile has no change";
  }
  return "";
}

absl::Status BadTile(std::uint64_t tile, TileProblem problem) {
  return DataLoss(
      {.where = absl::StrCat("tile ", tile), .what = Text(problem)});
}

// About 400 KiB a thread, kept: a record of one change must not pay for it.
DecoderScratch& ThreadScratch() {
  thread_local const std::unique_ptr<DecoderScratch> scratch =
      std::make_unique<DecoderScratch>();
  return *scratch;
}

// Calls visit(tile-local index, difference) for every change.
template <typename Visit>
void ForEachChange(const DecodedTile& tile, Visit&& visit) {
  for (std::uint32_t i = 0; i < tile.a_count; ++i) {
    visit(tile.a()[i] >> 1, std::int64_t{1} - 2 * (tile.a()[i] & 1));
  }
  for (std::uint32_t i = 0; i < tile.b_count; ++i) {
    const std::int64_t magnitude = tile.b_magnitude[i];
    visit(tile.b()[i] >> 1, (tile.b()[i] & 1) != 0 ? -magnitude : magnitude);
  }
}

// Decodes a tile and checks that its changes lie in the slice.
absl::Status DecodeInSlice(const TileView& view, const TileGrid& grid,
                           const TileBox& box, const UnitRange& slice,
                           std::uint32_t unit_bytes, DecodedTile* tile,
                           DecoderScratch* scratch) {
  const TileProblem problem = HWY_DYNAMIC_DISPATCH(DecodeWhole)(
      view, box.unit_count(), unit_bytes, tile, scratch);
  if (problem != TileProblem::kNone) return BadTile(view.tile, problem);
  const std::uint64_t first = grid.FlatIndex(box, 0);
  const std::uint64_t last = grid.FlatIndex(box, box.unit_count() - 1);
  if (first >= slice.begin && last < slice.end) return absl::OkStatus();
  absl::Status status;
  ForEachChange(*tile, [&](std::uint32_t index, std::int64_t) {
    const std::uint64_t unit = grid.FlatIndex(box, index);
    if ((unit < slice.begin || unit >= slice.end) && status.ok()) {
      status = UnitOutsideSlice(unit, slice);
    }
  });
  return status;
}

// L of changes that come tile by tile: one sum for each row of a tile, folded
// when that row's B changes. Neighbouring tiles share their rows' B.
class ChangeSums {
 public:
  explicit ChangeSums(const L61Key& key) : key_(key) {}

  void Add(std::size_t slot, std::uint64_t unit, std::uint32_t unit_bytes,
           std::int64_t difference) {
    const std::uint64_t offset = unit * unit_bytes;
    const std::uint64_t word = offset >> 2;
    Slot& s = slots_[slot % kSlots];
    const std::uint64_t q = word / kL61TileWords;
    if (s.q != q) {
      Fold(&s);
      s.q = q;
    }
    // |difference| < 2^32, below 2^24 where a shift is left to do.
    const std::int64_t shifted =
        difference * (std::int64_t{1} << (8 * (offset & 3)));
    s.sum += static_cast<__int128>(static_cast<std::int64_t>(
                 key_.A(static_cast<std::uint32_t>(word % kL61TileWords)))) *
             shifted;
  }
  std::uint64_t Finish() {
    for (Slot& s : slots_) Fold(&s);
    return total_;
  }

 private:
  static constexpr std::size_t kSlots = 128;
  struct Slot {
    std::uint64_t q = 0;
    // At most 2^14 different units share a B, each product is below 2^91.
    __int128 sum = 0;
  };

  void Fold(Slot* s) {
    if (s->sum == 0) return;
    const bool negative = s->sum < 0;
    const auto magnitude =
        static_cast<unsigned __int128>(negative ? -s->sum : s->sum);
    const std::uint64_t residue =
        L61Add(L61Reduce(static_cast<std::uint64_t>(magnitude) & kL61Prime),
               L61Reduce(static_cast<std::uint64_t>(magnitude >> 61)));
    const std::uint64_t term = L61Mul(residue, key_.B(s->q));
    total_ = negative ? L61Sub(total_, term) : L61Add(total_, term);
    s->sum = 0;
  }

  const L61Key& key_;
  Slot slots_[kSlots];
  std::uint64_t total_ = 0;
};

// The part of `target` inside a tile, in tile rows and columns.
struct Overlap {
  std::uint64_t row_begin, row_end, col_begin, col_end;
  bool empty() const { return row_begin >= row_end || col_begin >= col_end; }
};
Overlap Intersect(const TileBox& box, const BoxTarget& target) {
  return {std::max(box.row, target.row_begin),
          std::min(box.row + box.height, target.row_end),
          std::max(box.col, target.col_begin),
          std::min(box.col + box.width, target.col_end)};
}

bool Covers(const TileBox& box, const BoxTarget& target) {
  return target.row_begin <= box.row &&
         box.row + box.height <= target.row_end &&
         target.col_begin <= box.col && box.col + box.width <= target.col_end;
}

TilePlace PlaceIn(const TileBox& box, const BoxTarget& target) {
  return {target.At(box.row, box.col), box.width, box.height,
          target.row_stride_bytes};
}

// One entry for each cache line of a tile of 16,384 units of 1, 2 or 4 bytes
// (index 0, 1, 2).
struct EveryLine {
  std::uint16_t entries[3][kTileUnits * 4 / 64];
};
constexpr EveryLine kEveryLine = [] {
  EveryLine every{};
  for (std::uint32_t log = 0; log < 3; ++log) {
    for (std::uint32_t i = 0; i < (kTileUnits << log) / 64; ++i) {
      every.entries[log][i] = static_cast<std::uint16_t>((i * 64 >> log) << 1);
    }
  }
  return every;
}();

// The lines that applying `tile` changes: those of its changes, or, where they
// are more than its lines, all of them.
LineRequests RequestsFor(const DecodedTile& tile, const TilePlace& place,
                         std::uint32_t unit_bytes) {
  LineRequests requests{.next = tile.entries,
                        .end = tile.entries + tile.a_count + tile.b_count,
                        .weights = place.weights,
                        .unit_bytes = unit_bytes,
                        .row_step = RowStep(place, unit_bytes),
                        .reciprocal = Reciprocal(place.width)};
  const std::uint32_t lines = place.width * place.height * unit_bytes / 64;
  if (tile.a_count + tile.b_count > lines) {
    requests.next = kEveryLine.entries[std::countr_zero(unit_bytes)];
    requests.end = requests.next + lines;
  }
  return requests;
}

// Adds the changes that lie in `target`; returns how many.
std::uint64_t AddInside(const DecodedTile& tile, const TileBox& box,
                        const BoxTarget& target, LineRequests* requests) {
  if (Covers(box, target) && target.rows_are_contiguous()) {
    HWY_DYNAMIC_DISPATCH(AddWhole)
    ({&tile, PlaceIn(box, target), target.unit_bytes, requests});
    return tile.a_count + tile.b_count;
  }
  std::uint64_t written = 0;
  ForEachChange(tile, [&](std::uint32_t index, std::int64_t difference) {
    const std::uint32_t r = index / box.width;
    const std::uint64_t row = box.row + r;
    const std::uint64_t col = box.col + (index - r * box.width);
    if (!target.Contains(row, col)) return;
    std::byte* const at = target.At(row, col);
    std::uint32_t value = 0;
    std::memcpy(&value, at, target.unit_bytes);
    value += static_cast<std::uint32_t>(difference);
    std::memcpy(at, &value, target.unit_bytes);
    ++written;
  });
  return written;
}

}  // namespace
}  // namespace internal

absl::StatusOr<RecordSummary> CheckRecord(std::span<const std::byte> record,
                                          const TileGrid& grid,
                                          const UnitRange& slice,
                                          std::uint32_t unit_bytes,
                                          const L61Key& key) {
  KEDGE_CHECK(slice.begin < slice.end && slice.end <= grid.unit_count());
  KEDGE_ASSIGN_OR_RETURN(const RecordView view,
                         RecordView::Parse(record, grid.TilesOf(slice)));
  internal::DecoderScratch& scratch = internal::ThreadScratch();
  scratch.requests = {};
  internal::DecodedTile& tile = scratch.tiles[0];
  internal::ChangeSums sums(key);
  const bool runs = grid.tiles_are_runs();
  RecordSummary summary;
  for (const TileView& tile_view : view.tiles()) {
    const TileBox box = grid.Box(tile_view.tile);
    KEDGE_RETURN_IF_ERROR(internal::DecodeInSlice(tile_view, grid, box, slice,
                                                  unit_bytes, &tile, &scratch));
    summary.nnz += tile.a_count + tile.b_count;
    const std::uint64_t first = grid.FlatIndex(box, 0);
    internal::ForEachChange(tile, [&](std::uint32_t index, std::int64_t d) {
      if (runs) {
        const std::uint64_t unit = first + index;
        sums.Add(unit * unit_bytes / (4 * kL61TileWords), unit, unit_bytes, d);
      } else {
        const std::uint32_t row = index / box.width;
        sums.Add(row, first + row * grid.cols + (index - row * box.width),
                 unit_bytes, d);
      }
    });
  }
  if (summary.nnz != view.nnz()) {
    return internal::WrongNnz(view.nnz(), summary.nnz);
  }
  summary.l61 = sums.Finish();
  return summary;
}

absl::StatusOr<std::uint64_t> ApplyRecord(std::span<const std::byte> record,
                                          const TileGrid& grid,
                                          const UnitRange& slice,
                                          std::uint32_t unit_bytes,
                                          std::span<const BoxTarget> targets) {
  KEDGE_CHECK(slice.begin < slice.end && slice.end <= grid.unit_count());
  for (const BoxTarget& target : targets) {
    KEDGE_CHECK(target.unit_bytes == unit_bytes);
    KEDGE_CHECK(target.row_end <= grid.rows && target.col_end <= grid.cols);
  }
  KEDGE_ASSIGN_OR_RETURN(const RecordView view,
                         RecordView::Parse(record, grid.TilesOf(slice)));
  internal::DecoderScratch& scratch = internal::ThreadScratch();
  scratch.requests = {};
  std::uint64_t written = 0;
  std::uint64_t decoded = 0;
  std::uint64_t skipped_tiles = 0;
  // One tile is decoded ahead, so that its cache lines arrive meanwhile.
  TileBox waiting_box;
  bool waiting = false;
  int current = 0;
  const auto apply_waiting = [&] {
    if (!waiting) return;
    for (const BoxTarget& target : targets) {
      if (internal::Intersect(waiting_box, target).empty()) continue;
      written += internal::AddInside(scratch.tiles[1 - current], waiting_box,
                                     target, &scratch.requests);
    }
    waiting = false;
  };
  for (const TileView& tile_view : view.tiles()) {
    const TileBox box = grid.Box(tile_view.tile);
    bool wanted = false;
    for (const BoxTarget& target : targets) {
      wanted = wanted || !internal::Intersect(box, target).empty();
    }
    if (!wanted) {
      ++skipped_tiles;
      continue;
    }
    internal::DecodedTile& tile = scratch.tiles[current];
    if (absl::Status status = internal::DecodeInSlice(
            tile_view, grid, box, slice, unit_bytes, &tile, &scratch);
        !status.ok()) {
      apply_waiting();
      return status;
    }
    decoded += tile.a_count + tile.b_count;
    scratch.requests = {};
    for (const BoxTarget& target : targets) {
      if (internal::Covers(box, target) && target.rows_are_contiguous()) {
        scratch.requests = internal::RequestsFor(
            tile, internal::PlaceIn(box, target), unit_bytes);
      }
    }
    apply_waiting();
    waiting_box = box;
    waiting = true;
    current = 1 - current;
  }
  apply_waiting();
  if (skipped_tiles == 0 && decoded != view.nnz()) {
    return internal::WrongNnz(view.nnz(), decoded);
  }
  return written;
}

namespace {

// Calls copy(slice offset in bytes, box address, bytes) for runs of units that
// are contiguous on both sides, or for single elements of strided rows, in an
// order that keeps to few cache lines.
template <typename Copy>
std::uint64_t ForEachSharedRun(const TileGrid& grid, const UnitRange& slice,
                               const BoxTarget& target, Copy&& copy) {
  std::uint64_t units = 0;
  if (slice.begin >= slice.end || grid.cols == 0) return 0;
  const std::uint64_t row_begin =
      std::max(target.row_begin, slice.begin / grid.cols);
  const std::uint64_t row_end =
      std::min(target.row_end, (slice.end - 1) / grid.cols + 1);
  // The columns of a row that lie in box and slice.
  const auto columns = [&](std::uint64_t row) {
    const std::uint64_t first = row * grid.cols;
    std::uint64_t begin = target.col_begin;
    std::uint64_t end = target.col_end;
    if (slice.begin > first) begin = std::max(begin, slice.begin - first);
    if (slice.end < first + grid.cols) end = std::min(end, slice.end - first);
    return std::pair(begin, std::max(begin, end));
  };
  const std::uint64_t unit_bytes = target.unit_bytes;
  if (target.rows_are_contiguous()) {
    for (std::uint64_t row = row_begin; row < row_end; ++row) {
      const auto [begin, end] = columns(row);
      if (begin == end) continue;
      copy((row * grid.cols + begin - slice.begin) * unit_bytes,
           target.At(row, begin), (end - begin) * unit_bytes);
      units += end - begin;
    }
    return units;
  }
  constexpr std::uint64_t kBlock = 64;
  for (std::uint64_t row0 = row_begin; row0 < row_end; row0 += kBlock) {
    const std::uint64_t row1 = std::min(row0 + kBlock, row_end);
    for (std::uint64_t col0 = target.col_begin; col0 < target.col_end;
         col0 += kBlock) {
      for (std::uint64_t row = row0; row < row1; ++row) {
        const auto [row_first, row_last] = columns(row);
        const std::uint64_t begin = std::max(row_first, col0);
        const std::uint64_t end = std::min(row_last, col0 + kBlock);
        for (std::uint64_t col = begin; col < end; ++col) {
          copy((row * grid.cols + col - slice.begin) * unit_bytes,
               target.At(row, col), unit_bytes);
          ++units;
        }
      }
    }
  }
  return units;
}

// A copy whose size is known when it is one unit.
void CopyUnits(std::byte* to, const std::byte* from, std::uint64_t bytes) {
  switch (bytes) {
    case 1:
      std::memcpy(to, from, 1);
      return;
    case 2:
      std::memcpy(to, from, 2);
      return;
    case 4:
      std::memcpy(to, from, 4);
      return;
    default:
      std::memcpy(to, from, bytes);
  }
}

}  // namespace

std::uint64_t CopySliceToBox(const std::byte* bytes, const TileGrid& grid,
                             const UnitRange& slice, const BoxTarget& target) {
  return ForEachSharedRun(
      grid, slice, target,
      [&](std::uint64_t offset, std::byte* at, std::uint64_t count) {
        CopyUnits(at, bytes + offset, count);
      });
}

std::uint64_t CopyBoxToSlice(const BoxTarget& target, const TileGrid& grid,
                             const UnitRange& slice, std::byte* bytes) {
  return ForEachSharedRun(
      grid, slice, target,
      [&](std::uint64_t offset, std::byte* at, std::uint64_t count) {
        CopyUnits(bytes + offset, at, count);
      });
}

}  // namespace kedge
#endif  // HWY_ONCE
