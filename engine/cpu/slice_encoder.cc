#include "kedge/engine/cpu/slice_encoder.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <memory>
#include <type_traits>
#include <vector>

#include "kedge/format/codec.h"
#include "kedge/format/status.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kedge/engine/cpu/slice_encoder.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

// What all targets share.
#ifndef KEDGE_ENGINE_CPU_SLICE_ENCODER_ONCE_
#define KEDGE_ENGINE_CPU_SLICE_ENCODER_ONCE_
namespace kedge::internal {

// Units that are compared before their changes are looked at: small enough for
// the first-level cache, large enough for long loops.
inline constexpr std::uint32_t kChunkUnits = 2048;
// Units of whose masks all are zero or not is one decision: at 1 % density it
// nearly always goes one way, at 0.01 % the other.
inline constexpr std::uint32_t kGroupUnits = 256;
// Tiles side by side whose rows are streamed together. 64 tiles of 128 columns
// of 2 bytes are 16 KiB of a row.
inline constexpr std::uint32_t kStripTiles = 64;
// Vector loads and stores may pass the end of a list by this many entries.
inline constexpr std::uint32_t kListPadding = 64;

// A list of unit index << 1 | negative, ascending. The entry before the first
// reads as index -1, so that every gap has one formula.
struct EntryList {
  static constexpr std::uint32_t kFront = 32;
  std::uint16_t slots[kFront + kTileUnits + kListPadding];

  void Clear() { slots[kFront - 1] = 0xffff; }
  std::uint16_t* entries() { return slots + kFront; }
  const std::uint16_t* entries() const { return slots + kFront; }
};

// A change as it is noted while memory streams by: difference << 15 | entry.
// 17 signed bits and 15 fit in 32 bits, 33 and 15 do not.
template <typename Unit>
using Note = std::conditional_t<sizeof(Unit) == 4, std::int64_t, std::int32_t>;
inline constexpr int kEntryBits = 15;
inline constexpr std::uint32_t kEntryMask =
    (std::uint32_t{1} << kEntryBits) - 1;

// The notes of a tile. Pages that no tile fills are never touched; the odd size
// keeps the tiles' beginnings in different cache sets.
struct TileNotes {
  std::int64_t notes[kTileUnits + kListPadding + 8];
};

struct EncoderScratch {
  EncoderScratch() : strip(new TileNotes[kStripTiles]) {
    a_entries.Clear();
    b_entries.Clear();
  }

  // For each unit of a row of the key's A what its difference is multiplied
  // by: A[t] shifted to the unit's place in the word, mod p. Filled for one
  // unit size at a time.
  std::uint32_t weights_unit_bytes = 0;
  std::uint64_t weights[4 * kL61TileWords];
  std::unique_ptr<TileNotes[]> strip;
  std::byte* cursors[kStripTiles];  // the ends of the tiles' notes
  std::uint64_t masks[kChunkUnits / 64 + kGroupUnits / 64];
  std::uint16_t positions[kChunkUnits + 64];
  // One tile's changes, by list.
  EntryList a_entries;
  EntryList b_entries;
  std::uint32_t b_magnitude[kTileUnits + kListPadding];  // |d| - 1
  std::uint16_t lows[kTileUnits + kListPadding];
  std::uint16_t highs[kTileUnits + kListPadding];
  // For tiles of which more than a quarter changed.
  std::uint64_t zigzags[kTileUnits];
  std::uint32_t zigzags_clamped[kTileUnits];
  std::uint32_t zigzags_halved[kTileUnits];
  RecordBuilder builder;
};

struct EncodeJob {
  TileGrid grid;  // runs are one row here, see OneRowOfRuns
  UnitRange slice;
  const std::uint8_t* old_bytes;
  const std::uint8_t* new_bytes;
  const L61Key* key;
  EncoderScratch* scratch;
};

}  // namespace kedge::internal
#endif  // KEDGE_ENGINE_CPU_SLICE_ENCODER_ONCE_

HWY_BEFORE_NAMESPACE();
namespace kedge::internal {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Writes bit fields, least significant bit first, by whole words: up to 8 bytes
// beyond the last bit are overwritten.
class WordWriter {
 public:
  explicit WordWriter(std::uint8_t* out) : out_(out) {}

  // value < 2^width, width <= 56.
  HWY_INLINE void Put(std::uint64_t value, std::uint32_t width) {
    word_ |= value << used_;
    used_ += width;
    std::memcpy(out_, &word_, 8);
    out_ += used_ >> 3;
    word_ >>= used_ & 56;
    used_ &= 7;
  }
  HWY_INLINE void PutUnary(std::uint32_t zeros) {
    for (; HWY_UNLIKELY(zeros >= 48); zeros -= 48) Put(0, 48);
    Put(std::uint64_t{1} << zeros, zeros + 1);
  }
  // The end of the bytes in use, the last one padded with zeros.
  std::uint8_t* end() const { return out_ + (used_ > 0 ? 1 : 0); }

 private:
  std::uint8_t* out_;
  std::uint64_t word_ = 0;
  std::uint32_t used_ = 0;
};

// Bit i says whether old[i] and new[i] differ; count <= 64.
template <typename Unit>
HWY_INLINE std::uint64_t DifferenceMask(const std::uint8_t* old_units,
                                        const std::uint8_t* new_units,
                                        std::uint32_t count) {
  const hn::CappedTag<Unit, 64> d;
  const std::uint32_t lanes = static_cast<std::uint32_t>(hn::Lanes(d));
  std::uint64_t mask = 0;
  std::uint32_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const auto before =
        hn::LoadU(d, reinterpret_cast<const Unit*>(old_units) + i);
    const auto after =
        hn::LoadU(d, reinterpret_cast<const Unit*>(new_units) + i);
    std::uint64_t bits = 0;
    hn::StoreMaskBits(d, hn::Ne(before, after),
                      reinterpret_cast<std::uint8_t*>(&bits));
    mask |= bits << i;
  }
  for (; i < count; ++i) {
    const bool differs =
        std::memcmp(old_units + i * sizeof(Unit), new_units + i * sizeof(Unit),
                    sizeof(Unit)) != 0;
    mask |= std::uint64_t{differs} << i;
  }
  return mask;
}

template <typename Unit>
HWY_INLINE std::int64_t Difference(const std::uint8_t* old_unit,
                                   const std::uint8_t* new_unit) {
  Unit before;
  Unit after;
  std::memcpy(&before, old_unit, sizeof(Unit));
  std::memcpy(&after, new_unit, sizeof(Unit));
  return static_cast<std::int64_t>(after) - static_cast<std::int64_t>(before);
}

// L of the changes seen so far: products with A add up in 128 bits as long as
// the words share their B.
class ChangeSum {
 public:
  explicit ChangeSum(const L61Key& key) : key_(key) {}

  void Add(std::uint64_t q, __int128 sum) {
    if (q != q_) {
      Fold();
      q_ = q;
    }
    sum_ += sum;
  }
  std::uint64_t Finish() {
    Fold();
    return total_;
  }

 private:
  void Fold() {
    if (sum_ == 0) return;
    const bool negative = sum_ < 0;
    const auto magnitude =
        static_cast<unsigned __int128>(negative ? -sum_ : sum_);
    // |sum| < 2^104: at most 2^14 products below 2^90.
    const std::uint64_t residue =
        L61Reduce(L61Reduce(static_cast<std::uint64_t>(magnitude) & kL61Prime) +
                  L61Reduce(static_cast<std::uint64_t>(magnitude >> 61)));
    const std::uint64_t term = L61Mul(residue, key_.B(q_));
    total_ = negative ? L61Sub(total_, term) : L61Add(total_, term);
    sum_ = 0;
  }

  const L61Key& key_;
  std::uint64_t q_ = 0;
  __int128 sum_ = 0;
  std::uint64_t total_ = 0;
};

// Splits the entries of a list into the Rice code's parts: lows[i] is the gap's
// low k bits with the sign above them, highs[i] the rest of the gap. May write
// kListPadding entries too many.
HWY_INLINE void SplitGaps(const std::uint16_t* HWY_RESTRICT entries,
                          std::uint32_t count, std::uint32_t k,
                          std::uint16_t* HWY_RESTRICT lows,
                          std::uint16_t* HWY_RESTRICT highs) {
  const hn::ScalableTag<std::uint16_t> d;
  const auto gap_mask = hn::Set(d, std::uint16_t{0x3fff});
  const auto low_mask =
      hn::Set(d, static_cast<std::uint16_t>((std::uint32_t{1} << k) - 1));
  const auto one = hn::Set(d, std::uint16_t{1});
  for (std::uint32_t i = 0; i < count; i += hn::Lanes(d)) {
    const auto entry = hn::LoadU(d, entries + i);
    const auto before = hn::LoadU(d, entries + i - 1);
    const auto gap = hn::And(
        hn::Sub(hn::Sub(hn::ShiftRight<1>(entry), hn::ShiftRight<1>(before)),
                one),
        gap_mask);
    const auto sign =
        hn::ShiftLeftSame(hn::And(entry, one), static_cast<int>(k));
    hn::StoreU(hn::Or(hn::And(gap, low_mask), sign), d, lows + i);
    hn::StoreU(hn::ShiftRightSame(gap, static_cast<int>(k)), d, highs + i);
  }
}

// `width` <= 14.
HWY_INLINE void PutLows(const std::uint16_t* lows, std::uint32_t count,
                        std::uint32_t width, WordWriter* writer) {
  constexpr std::uint64_t kHalves = 0x0000ffff0000ffffu;
  std::uint32_t i = 0;
  for (; i + 4 <= count; i += 4) {
    std::uint64_t four;
    std::memcpy(&four, lows + i, 8);
    const std::uint64_t pairs = (four & kHalves) | ((four >> 16) & kHalves)
                                                       << width;
    writer->Put((pairs & 0xffffffffu) | (pairs >> 32) << (2 * width),
                4 * width);
  }
  for (; i < count; ++i) writer->Put(lows[i], width);
}

HWY_INLINE void PutHighs(const std::uint16_t* highs, std::uint32_t count,
                         WordWriter* writer) {
  std::uint32_t i = 0;
  for (; i + 4 <= count; i += 4) {
    const std::uint32_t first = highs[i];
    const std::uint32_t second = first + 1 + highs[i + 1];
    const std::uint32_t third = second + 1 + highs[i + 2];
    const std::uint32_t fourth = third + 1 + highs[i + 3];
    if (HWY_LIKELY(fourth < 56)) {
      writer->Put(std::uint64_t{1} << first | std::uint64_t{1} << second |
                      std::uint64_t{1} << third | std::uint64_t{1} << fourth,
                  fourth + 1);
    } else {
      for (std::uint32_t j = 0; j < 4; ++j) writer->PutUnary(highs[i + j]);
    }
  }
  for (; i < count; ++i) writer->PutUnary(highs[i]);
}

// Makes room for `bytes` more and returns where they go.
std::uint8_t* Grow(std::vector<std::byte>* out, std::size_t bytes) {
  const std::size_t size = out->size();
  out->resize(size + bytes);
  return reinterpret_cast<std::uint8_t*>(out->data()) + size;
}

// How many changes a tile has in each list.
struct TileCounts {
  std::uint32_t a;
  std::uint32_t b;
};

// Sorts a tile's notes into the scratch's lists. `tile_cols` and `width` differ
// for the tile that the matrix's edge clips: notes have indices of a whole
// tile's width.
template <typename Unit>
TileCounts SplitNotes(const Note<Unit>* HWY_RESTRICT notes, std::uint32_t count,
                      std::uint32_t tile_cols, std::uint32_t width,
                      EncoderScratch* HWY_RESTRICT scratch) {
  std::uint16_t* const a_entries = scratch->a_entries.entries();
  std::uint16_t* const b_entries = scratch->b_entries.entries();
  std::uint32_t* const b_magnitude = scratch->b_magnitude;
  const std::uint32_t missing = tile_cols - width;
  TileCounts counts = {0, 0};
  for (std::uint32_t i = 0; i < count; ++i) {
    const Note<Unit> d = notes[i] >> kEntryBits;
    std::uint32_t entry = static_cast<std::uint32_t>(notes[i]) & kEntryMask;
    if (HWY_UNLIKELY(missing != 0)) {
      entry -= 2 * ((entry >> 1) / tile_cols) * missing;
    }
    // Both lists take every change; only the one that it belongs to moves on,
    // which costs less than a branch.
    a_entries[counts.a] = static_cast<std::uint16_t>(entry);
    b_entries[counts.b] = static_cast<std::uint16_t>(entry);
    b_magnitude[counts.b] = static_cast<std::uint32_t>((d < 0 ? -d : d) - 1);
    // 1 and -1 become 2 and 0.
    const bool is_one = ((d + 1) & ~Note<Unit>{2}) == 0;
    counts.a += is_one;
    counts.b += !is_one;
  }
  return counts;
}

// Encodes the scratch's lists.
TileHeader EncodeSparse(TileCounts counts, std::uint32_t units,
                        std::uint32_t unit_bytes, EncoderScratch* scratch) {
  const std::uint32_t ka = counts.a == 0 ? 0 : RiceParameter(counts.a, units);
  const std::uint32_t kb = counts.b == 0 ? 0 : RiceParameter(counts.b, units);
  std::vector<std::byte>* out = scratch->builder.payload();
  const std::size_t start = out->size();
  const std::size_t bound_bits =
      std::size_t{counts.a} * (ka + 2) + (units >> ka) +
      std::size_t{counts.b} * (kb + 2 + 16 * unit_bytes) + (units >> kb);
  std::uint8_t* const begin = Grow(out, bound_bits / 8 + 16);
  WordWriter writer(begin);

  std::uint16_t* const lows = scratch->lows;
  std::uint16_t* const highs = scratch->highs;
  const std::uint32_t* const b_magnitude = scratch->b_magnitude;
  // B's parts stand behind A's.
  SplitGaps(scratch->a_entries.entries(), counts.a, ka, lows, highs);
  SplitGaps(scratch->b_entries.entries(), counts.b, kb, lows + counts.a,
            highs + counts.a);
  PutLows(lows, counts.a, ka + 1, &writer);
  PutLows(lows + counts.a, counts.b, kb + 1, &writer);
  PutHighs(highs, counts.a + counts.b, &writer);
  for (std::uint32_t i = 0; i < counts.b; ++i) {
    const auto e =
        static_cast<std::uint32_t>(31 - __builtin_clz(b_magnitude[i]));
    writer.Put(std::uint64_t{1} << e, e + 1);
  }
  for (std::uint32_t i = 0; i < counts.b; ++i) {
    const auto e =
        static_cast<std::uint32_t>(31 - __builtin_clz(b_magnitude[i]));
    writer.Put(b_magnitude[i] ^ (std::uint64_t{1} << e), e);
  }
  TileHeader header;
  header.a = counts.a;
  header.b = counts.b;
  header.bytes = static_cast<std::uint32_t>(writer.end() - begin);
  out->resize(start + header.bytes);
  return header;
}

struct DenseParameter {
  std::uint32_t k = 0;
  std::uint32_t escapes = 0;
  std::uint64_t bits = 0;
};

// What quotients cost with parameter k: their sum, each at most
// kDenseEscapeQuotient, and how many reach that. `shifted` >> `shift` are the
// quotients; at most kTileUnits of them.
HWY_INLINE void SumQuotients(const std::uint32_t* HWY_RESTRICT shifted,
                             std::uint32_t units, std::uint32_t shift,
                             std::uint64_t* quotients, std::uint64_t* escapes) {
  const hn::ScalableTag<std::uint32_t> d;
  const auto lanes = static_cast<std::uint32_t>(hn::Lanes(d));
  const auto most = hn::Set(d, kDenseEscapeQuotient);
  const auto one = hn::Set(d, 1u);
  auto sum = hn::Zero(d);
  auto count = hn::Zero(d);
  std::uint32_t i = 0;
  for (; i + lanes <= units; i += lanes) {
    const auto q = hn::Min(
        hn::ShiftRightSame(hn::LoadU(d, shifted + i), static_cast<int>(shift)),
        most);
    sum = hn::Add(sum, q);
    count = hn::Add(count, hn::IfThenElseZero(hn::Eq(q, most), one));
  }
  *quotients = hn::GetLane(hn::SumOfLanes(d, sum));
  *escapes = hn::GetLane(hn::SumOfLanes(d, count));
  for (; i < units; ++i) {
    const std::uint32_t q = std::min(shifted[i] >> shift, kDenseEscapeQuotient);
    *quotients += q;
    *escapes += q == kDenseEscapeQuotient ? 1 : 0;
  }
}

// The parameter with the shortest payload, the smallest of equals.
DenseParameter ChooseDenseParameter(std::uint32_t units,
                                    std::uint32_t unit_bits,
                                    EncoderScratch* scratch) {
  // Zigzags have up to 33 bits. Without shift, what does not fit in 32 is
  // beyond the escape all the same; with a shift, one bit of it comes first.
  std::uint32_t* const whole = scratch->zigzags_clamped;
  std::uint32_t* const halved = scratch->zigzags_halved;
  for (std::uint32_t i = 0; i < units; ++i) {
    const std::uint64_t z = scratch->zigzags[i];
    whole[i] = static_cast<std::uint32_t>(
        z | (z >> 32 != 0 ? std::uint64_t{0xffffffff} : 0));
    halved[i] = static_cast<std::uint32_t>(z >> 1);
  }
  DenseParameter best;
  best.bits = std::numeric_limits<std::uint64_t>::max();
  for (std::uint32_t k = 0; k <= unit_bits; ++k) {
    // Each unit takes at least its low bits and one more.
    if (std::uint64_t{units} * (k + 1) >= best.bits) return best;
    std::uint64_t quotients = 0;
    std::uint64_t escapes = 0;
    SumQuotients(k == 0 ? whole : halved, units, k == 0 ? 0 : k - 1, &quotients,
                 &escapes);
    const std::uint64_t bits =
        std::uint64_t{units} * (k + 1) + quotients + escapes * (unit_bits + 1);
    if (bits < best.bits) {
      best = {k, static_cast<std::uint32_t>(escapes), bits};
    }
  }
  if (std::uint64_t{units} * (unit_bits + 1) < best.bits) {
    best = {unit_bits + 1, 0, std::uint64_t{units} * (unit_bits + 1)};
  }
  return best;
}

TileHeader EncodeDense(const DenseParameter& choice, std::uint32_t units,
                       std::uint32_t unit_bits, EncoderScratch* scratch) {
  std::vector<std::byte>* out = scratch->builder.payload();
  const std::size_t start = out->size();
  std::uint8_t* const begin = Grow(out, choice.bits / 8 + 16);
  WordWriter writer(begin);
  const std::uint64_t* const zigzags = scratch->zigzags;
  const std::uint64_t low_mask = (std::uint64_t{1} << choice.k) - 1;
  for (std::uint32_t i = 0; i < units; ++i) {
    writer.Put(zigzags[i] & low_mask, choice.k);
  }
  if (choice.k <= unit_bits) {
    for (std::uint32_t i = 0; i < units; ++i) {
      writer.PutUnary(static_cast<std::uint32_t>(std::min<std::uint64_t>(
          zigzags[i] >> choice.k, kDenseEscapeQuotient)));
    }
    for (std::uint32_t i = 0; i < units && choice.escapes > 0; ++i) {
      if (zigzags[i] >> choice.k >= kDenseEscapeQuotient) {
        writer.Put(zigzags[i], unit_bits + 1);
      }
    }
  }
  TileHeader header;
  header.mode = TileMode::kDense;
  header.a = choice.k;
  header.b = choice.escapes;
  header.bytes = static_cast<std::uint32_t>(writer.end() - begin);
  out->resize(start + header.bytes);
  return header;
}

// Encodes a tile from the scratch's lists.
TileHeader EncodeCollected(TileCounts counts, std::uint32_t units,
                           std::uint32_t unit_bytes, EncoderScratch* scratch) {
  if (counts.a + counts.b <= units / 4) {
    return EncodeSparse(counts, units, unit_bytes, scratch);
  }

  // Both modes are possible: the shorter one.
  const std::uint32_t unit_bits = 8 * unit_bytes;
  const std::uint16_t* const a_entries = scratch->a_entries.entries();
  const std::uint16_t* const b_entries = scratch->b_entries.entries();
  std::uint64_t* const zigzags = scratch->zigzags;
  std::fill(zigzags, zigzags + units, std::uint64_t{0});
  std::uint64_t sparse_bits = 0;
  for (std::uint32_t i = 0; i < counts.a; ++i) {
    zigzags[a_entries[i] >> 1] = 2 - (a_entries[i] & 1);
  }
  for (std::uint32_t i = 0; i < counts.b; ++i) {
    // 2m - 1 for -m, 2m for m.
    zigzags[b_entries[i] >> 1] =
        2 * std::uint64_t{scratch->b_magnitude[i]} + 2 - (b_entries[i] & 1);
    sparse_bits += 2 * (32 - __builtin_clz(scratch->b_magnitude[i])) - 1;
  }
  const DenseParameter dense = ChooseDenseParameter(units, unit_bits, scratch);
  for (const bool is_b : {false, true}) {
    const std::uint32_t count = is_b ? counts.b : counts.a;
    if (count == 0) continue;
    const std::uint32_t k = RiceParameter(count, units);
    SplitGaps(is_b ? b_entries : a_entries, count, k, scratch->lows,
              scratch->highs);
    sparse_bits += std::uint64_t{count} * (k + 2);
    for (std::uint32_t i = 0; i < count; ++i) sparse_bits += scratch->highs[i];
  }
  if ((dense.bits + 7) / 8 < (sparse_bits + 7) / 8) {
    return EncodeDense(dense, units, unit_bits, scratch);
  }
  return EncodeSparse(counts, units, unit_bytes, scratch);
}

// A part of a row of a strip, within one row of A.
struct Chunk {
  const std::uint8_t* old_units;
  const std::uint8_t* new_units;
  std::uint32_t count;
  const std::uint64_t* weights;   // of the first unit
  std::ptrdiff_t prefetch_bytes;  // from here to what is wanted next
  // How its units fall into the strip's tiles.
  std::uint32_t tile;       // of the first unit
  std::uint32_t tile_col;   // of the first unit, in its tile
  std::uint32_t row_start;  // index of the row's start in a whole tile
  std::uint32_t tile_cols;
  std::uint64_t reciprocal;  // ceil(2^48 / tile_cols)
};

// How tiles lie in a strip.
enum class StripKind { kOneTile, k128, kAnyWidth };

// Writes the numbers of the units that differ, counted from the beginning of
// the tile in which the chunk begins, to `positions`; may write 4 too many.
template <typename Unit>
HWY_INLINE std::uint32_t FindDifferences(
    const Chunk& chunk, std::uint64_t* HWY_RESTRICT masks,
    std::uint16_t* HWY_RESTRICT positions) {
  constexpr std::uint32_t kLineUnits = 64 / sizeof(Unit);
  constexpr std::uint32_t kGroupWords = kGroupUnits / 64;
  const std::uint32_t full_words = chunk.count / 64;
  for (std::uint32_t w = 0; w < full_words; ++w) {
    const std::uint8_t* const old_units =
        chunk.old_units + w * 64 * sizeof(Unit);
    const std::uint8_t* const new_units =
        chunk.new_units + w * 64 * sizeof(Unit);
    for (std::uint32_t line = 0; line < 64; line += kLineUnits) {
      const std::uintptr_t ahead = line * sizeof(Unit) + chunk.prefetch_bytes;
      __builtin_prefetch(
          reinterpret_cast<const void*>(
              reinterpret_cast<std::uintptr_t>(old_units) + ahead),
          0, 2);
      __builtin_prefetch(
          reinterpret_cast<const void*>(
              reinterpret_cast<std::uintptr_t>(new_units) + ahead),
          0, 2);
    }
    masks[w] = DifferenceMask<Unit>(old_units, new_units, 64);
  }
  std::uint32_t words = full_words;
  if (chunk.count % 64 != 0) {
    masks[words++] = DifferenceMask<Unit>(
        chunk.old_units + full_words * 64 * sizeof(Unit),
        chunk.new_units + full_words * 64 * sizeof(Unit), chunk.count % 64);
  }
  for (std::uint32_t w = 0; w < kGroupWords - 1; ++w) masks[words + w] = 0;

  std::uint32_t count = 0;
  for (std::uint32_t group = 0; group < words; group += kGroupWords) {
    std::uint64_t any = 0;
    for (std::uint32_t w = 0; w < kGroupWords; ++w) any |= masks[group + w];
    if (any == 0) continue;
    for (std::uint32_t w = 0; w < kGroupWords; ++w) {
      std::uint64_t mask = masks[group + w];
      const std::uint32_t base = chunk.tile_col + (group + w) * 64;
      const auto found = static_cast<std::uint32_t>(__builtin_popcountll(mask));
      constexpr std::uint64_t kTopBit = std::uint64_t{1} << 63;
      // Four at once, wanted or not: a branch for each would be mispredicted.
      // Those beyond the last are overwritten.
      const auto put_four = [&](std::uint32_t at) HWY_ATTR {
        for (std::uint32_t i = 0; i < 4; ++i) {
          positions[count + at + i] = static_cast<std::uint16_t>(
              base + __builtin_ctzll(mask | kTopBit));
          mask &= mask - 1;
        }
      };
      put_four(0);
      for (std::uint32_t at = 4; HWY_UNLIKELY(at < found); at += 4) {
        put_four(at);
      }
      count += found;
    }
  }
  return count;
}

// Appends the chunk's changes to their tiles' notes. Returns the sum of their
// differences times weights.
template <typename Unit, StripKind kind>
__int128 CollectChanges(const Chunk& chunk,
                        EncoderScratch* HWY_RESTRICT scratch) {
  std::uint16_t* const positions = scratch->positions;
  const std::uint32_t count =
      FindDifferences<Unit>(chunk, scratch->masks, positions);
  // Positions count from the beginning of the first unit's tile. These are
  // addresses that may lie outside of the arrays, hence integers.
  const std::uintptr_t old_units =
      reinterpret_cast<std::uintptr_t>(chunk.old_units) -
      chunk.tile_col * sizeof(Unit);
  const std::uintptr_t new_units =
      reinterpret_cast<std::uintptr_t>(chunk.new_units) -
      chunk.tile_col * sizeof(Unit);
  const std::uintptr_t weights =
      reinterpret_cast<std::uintptr_t>(chunk.weights) - 8 * chunk.tile_col;
  std::byte** const cursors = scratch->cursors + chunk.tile;
  std::byte* one = *cursors;
  // Copies: the compiler must assume that a note overwrites the chunk.
  const std::uint32_t row_start = chunk.row_start;
  const std::uint32_t tile_cols = chunk.tile_cols;
  const std::uint64_t reciprocal = chunk.reciprocal;
  __int128 sum = 0;
  for (std::uint32_t i = 0; i < count; ++i) {
    const std::size_t x = positions[i];
    const std::int64_t d = Difference<Unit>(
        reinterpret_cast<const std::uint8_t*>(old_units + x * sizeof(Unit)),
        reinterpret_cast<const std::uint8_t*>(new_units + x * sizeof(Unit)));
    sum += static_cast<__int128>(static_cast<std::int64_t>(
               *reinterpret_cast<const std::uint64_t*>(weights + 8 * x))) *
           d;
    std::size_t tile = 0;
    std::size_t index = x;
    if constexpr (kind == StripKind::k128) {
      tile = x >> 7;
      index = (x & 127) + row_start;
    } else if constexpr (kind == StripKind::kAnyWidth) {
      tile = (x * reciprocal) >> 48;
      index = x - tile * tile_cols + row_start;
    }
    const std::uint64_t negative = static_cast<std::uint64_t>(d) >> 63;
    const auto note = static_cast<Note<Unit>>(
        static_cast<std::uint64_t>(d) << kEntryBits | index << 1 | negative);
    std::byte*& cursor = kind == StripKind::kOneTile ? one : cursors[tile];
    std::memcpy(cursor, &note, sizeof(note));
    cursor += sizeof(note);
  }
  if constexpr (kind == StripKind::kOneTile) *cursors = one;
  return sum;
}

template <typename Unit>
void FillWeights(const L61Key& key, EncoderScratch* scratch) {
  if (scratch->weights_unit_bytes == sizeof(Unit)) return;
  constexpr std::uint32_t kPerWord = 4 / sizeof(Unit);
  for (std::uint32_t t = 0; t < kL61TileWords; ++t) {
    for (std::uint32_t i = 0; i < kPerWord; ++i) {
      scratch->weights[t * kPerWord + i] =
          L61Mul(key.A(t), std::uint64_t{1} << (8 * sizeof(Unit) * i));
    }
  }
  scratch->weights_unit_bytes = sizeof(Unit);
}

// The part of a slice in one band: rows [row_begin, row_end), a strip of tiles.
struct Strip {
  std::uint64_t band;
  std::uint64_t row_begin;
  std::uint64_t row_end;
  std::uint64_t tile_begin;  // in the band
  std::uint64_t tile_end;
};

template <typename Unit, StripKind kind>
void StreamStrip(const EncodeJob& job, const Strip& strip, ChangeSum* sum) {
  constexpr std::ptrdiff_t kPrefetchBytes = 4096;
  constexpr std::uint64_t kRowUnits = 4 * kL61TileWords / sizeof(Unit);
  const TileGrid& grid = job.grid;
  const UnitRange& slice = job.slice;
  const std::uint64_t col_begin = strip.tile_begin * grid.tile_cols;
  const std::uint64_t col_end =
      std::min(grid.cols, strip.tile_end * grid.tile_cols);
  const std::ptrdiff_t row_gap_bytes = static_cast<std::ptrdiff_t>(
      (grid.cols - (col_end - col_begin)) * sizeof(Unit));
  Chunk chunk;
  chunk.tile_cols = grid.tile_cols;
  chunk.reciprocal =
      ((std::uint64_t{1} << 48) + grid.tile_cols - 1) / grid.tile_cols;
  for (std::uint64_t row = strip.row_begin; row < strip.row_end; ++row) {
    const std::uint64_t row_unit = row * grid.cols;
    std::uint64_t unit = std::max(slice.begin, row_unit + col_begin);
    const std::uint64_t unit_end = std::min(slice.end, row_unit + col_end);
    chunk.row_start = static_cast<std::uint32_t>(
        (row - strip.band * grid.tile_rows) * grid.tile_cols);
    while (unit < unit_end) {
      const std::uint64_t in_row = unit % kRowUnits;
      chunk.count = static_cast<std::uint32_t>(std::min(
          {std::uint64_t{kChunkUnits}, unit_end - unit, kRowUnits - in_row}));
      chunk.old_units = job.old_bytes + (unit - slice.begin) * sizeof(Unit);
      chunk.new_units = job.new_bytes + (unit - slice.begin) * sizeof(Unit);
      chunk.weights = job.scratch->weights + in_row;
      const bool wraps =
          (unit_end - unit - chunk.count) * sizeof(Unit) < kPrefetchBytes;
      chunk.prefetch_bytes = kPrefetchBytes + (wraps ? row_gap_bytes : 0);
      const std::uint64_t col = unit - row_unit - col_begin;
      chunk.tile = static_cast<std::uint32_t>(col / grid.tile_cols);
      chunk.tile_col = static_cast<std::uint32_t>(col % grid.tile_cols);
      sum->Add(unit / kRowUnits,
               CollectChanges<Unit, kind>(chunk, job.scratch));
      unit += chunk.count;
    }
  }
}

template <typename Unit>
std::uint64_t EncodeUnits(const EncodeJob& job) {
  const TileGrid& grid = job.grid;
  const UnitRange& slice = job.slice;
  EncoderScratch* const scratch = job.scratch;
  FillWeights<Unit>(*job.key, scratch);
  ChangeSum sum(*job.key);

  // Strips of about 8,192 columns.
  const std::uint64_t strip_tiles =
      std::clamp<std::uint64_t>(8192 / grid.tile_cols, 1, kStripTiles);
  const std::uint64_t first_row = slice.begin / grid.cols;
  const std::uint64_t last_row = (slice.end - 1) / grid.cols;
  Strip strip;
  for (strip.band = first_row / grid.tile_rows;
       strip.band <= last_row / grid.tile_rows; ++strip.band) {
    strip.row_begin = std::max(first_row, strip.band * grid.tile_rows);
    strip.row_end = std::min(last_row + 1, (strip.band + 1) * grid.tile_rows);
    std::uint64_t tile_begin = 0;
    std::uint64_t tile_end = grid.tiles_per_band;
    if (strip.row_end - strip.row_begin == 1) {
      if (strip.row_begin == first_row) {
        tile_begin = slice.begin % grid.cols / grid.tile_cols;
      }
      if (strip.row_begin == last_row) {
        tile_end = (slice.end - 1) % grid.cols / grid.tile_cols + 1;
      }
    }
    for (std::uint64_t t = tile_begin; t < tile_end; t += strip_tiles) {
      strip.tile_begin = t;
      strip.tile_end = std::min(t + strip_tiles, tile_end);
      const auto count =
          static_cast<std::uint32_t>(strip.tile_end - strip.tile_begin);
      for (std::uint32_t i = 0; i < count; ++i) {
        scratch->cursors[i] =
            reinterpret_cast<std::byte*>(scratch->strip[i].notes);
      }
      if (count == 1 && grid.rows == 1) {
        StreamStrip<Unit, StripKind::kOneTile>(job, strip, &sum);
      } else if (grid.tile_cols == 128) {
        StreamStrip<Unit, StripKind::k128>(job, strip, &sum);
      } else {
        StreamStrip<Unit, StripKind::kAnyWidth>(job, strip, &sum);
      }
      for (std::uint32_t i = 0; i < count; ++i) {
        const auto* const notes =
            reinterpret_cast<const Note<Unit>*>(scratch->strip[i].notes);
        const auto nnz = static_cast<std::uint32_t>(
            reinterpret_cast<const Note<Unit>*>(scratch->cursors[i]) - notes);
        if (nnz == 0) continue;
        const std::uint64_t tile =
            strip.band * grid.tiles_per_band + strip.tile_begin + i;
        const TileBox box = grid.Box(tile);
        const bool one_row = box.height == 1;
        const TileCounts counts =
            SplitNotes<Unit>(notes, nnz, grid.tile_cols,
                             one_row ? grid.tile_cols : box.width, scratch);
        scratch->builder.AddTile(
            tile,
            EncodeCollected(counts, box.unit_count(), sizeof(Unit), scratch),
            nnz);
      }
    }
  }
  return sum.Finish();
}

std::uint64_t EncodeSlice(const EncodeJob& job, std::uint32_t unit_bytes) {
  switch (unit_bytes) {
    case 1:
      return EncodeUnits<std::uint8_t>(job);
    case 2:
      return EncodeUnits<std::uint16_t>(job);
    default:
      return EncodeUnits<std::uint32_t>(job);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace kedge::internal
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kedge {
namespace internal {
HWY_EXPORT(EncodeSlice);

namespace {

// Tiles that are runs of the tensor have the same numbers and the same
// tile-local indices as runs of one long row; that view streams longest.
TileGrid OneRowOfRuns(const TileGrid& grid) {
  if (!grid.tiles_are_runs() || grid.rows == 1) return grid;
  TileGrid view;
  view.rows = 1;
  view.cols = grid.unit_count();
  view.tile_rows = 1;
  view.tile_cols = grid.tile_rows * static_cast<std::uint32_t>(grid.cols);
  view.tiles_per_band = grid.tile_count();
  view.band_count = 1;
  return view;
}

}  // namespace
}  // namespace internal

struct SliceEncoder::Impl {
  L61Key key;
  internal::EncoderScratch scratch;
};

SliceEncoder::SliceEncoder(const L61Key& key)
    : impl_(std::make_unique<Impl>()) {
  impl_->key = key;
}
SliceEncoder::~SliceEncoder() = default;

EncodedSlice SliceEncoder::Encode(const TileGrid& grid, const UnitRange& slice,
                                  std::uint32_t unit_bytes,
                                  const std::byte* old_bytes,
                                  const std::byte* new_bytes,
                                  std::vector<std::byte>* out) {
  KEDGE_CHECK(slice.begin < slice.end && slice.end <= grid.unit_count());
  KEDGE_CHECK(slice.count() <= kMaxSliceUnits);
  KEDGE_CHECK(unit_bytes == 1 || unit_bytes == 2 || unit_bytes == 4);
  internal::EncodeJob job;
  job.grid = internal::OneRowOfRuns(grid);
  job.slice = slice;
  job.old_bytes = reinterpret_cast<const std::uint8_t*>(old_bytes);
  job.new_bytes = reinterpret_cast<const std::uint8_t*>(new_bytes);
  job.key = &impl_->key;
  job.scratch = &impl_->scratch;

  RecordBuilder& builder = impl_->scratch.builder;
  builder.Start(grid.TilesOf(slice));
  EncodedSlice result;
  result.l61 = HWY_DYNAMIC_DISPATCH(internal::EncodeSlice)(job, unit_bytes);
  if (builder.empty()) return result;
  result.nnz = builder.nnz();
  result.record_bytes = builder.Finish(out);
  return result;
}

}  // namespace kedge
#endif  // HWY_ONCE
