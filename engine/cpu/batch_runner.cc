#include "kedge/engine/cpu/batch_runner.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "kedge/format/limits.h"
#include "kedge/format/record_layout.h"
#include "kedge/format/status.h"

namespace kedge {

// -------------------------------------------------------------------- decoder

// Bit fields of a payload. Past its end there are zeros, and overrun() is true
// from then on. Loads whole words: 8 bytes beyond the payload are readable.
class TileDecoder::Bits {
 public:
  Bits(const std::byte* bytes, std::uint64_t size)
      : bytes_(bytes), end_(8 * size) {}

  std::uint64_t Get(std::uint32_t width) {  // width <= 33
    if (width > end_ - bit_) {
      Overrun();
      return 0;
    }
    const std::uint64_t value = Word() & ((std::uint64_t{1} << width) - 1);
    bit_ += width;
    return value;
  }
  // Counts 0 bits up to the next 1; more than `limit` of them is an overrun.
  std::uint64_t GetUnary(std::uint64_t limit) {
    std::uint64_t zeros = 0;
    while (bit_ < end_) {
      // A word holds at least 57 bits from here on; zeros come in above them.
      const std::uint64_t seen = std::min<std::uint64_t>(57, end_ - bit_);
      const auto run = static_cast<std::uint64_t>(std::countr_zero(Word()));
      if (run < seen) {
        zeros += run;
        bit_ += run + 1;
        if (zeros <= limit) return zeros;
        break;
      }
      zeros += seen;
      bit_ += seen;
      if (zeros > limit) break;
    }
    Overrun();
    return 0;
  }
  bool overrun() const { return overrun_; }
  // Whether only zero bits of the last byte remain.
  bool AtCanonicalEnd() {
    if (overrun_ || end_ - bit_ >= 8) return false;
    return Get(static_cast<std::uint32_t>(end_ - bit_)) == 0;
  }

 private:
  std::uint64_t Word() const {
    std::uint64_t word;
    std::memcpy(&word, bytes_ + (bit_ >> 3), 8);
    return word >> (bit_ & 7);
  }
  void Overrun() {
    overrun_ = true;
    bit_ = end_;
  }

  const std::byte* bytes_;
  std::uint64_t end_;
  std::uint64_t bit_ = 0;
  bool overrun_ = false;
};

TileDecoder::TileDecoder()
    : changes_(kTileUnits), numbers_(kTileUnits), marks_(kTileUnits / 64) {}

TileFault TileDecoder::Decode(const ApplyTile& tile, const std::byte* payload,
                              std::uint32_t units, std::uint32_t unit_bytes) {
  count_ = 0;
  const Bits bits(payload, tile.bytes);
  const TileFault fault =
      tile.mode == static_cast<std::uint32_t>(TileMode::kSparse)
          ? DecodeSparse(tile, bits, units, 8 * unit_bytes)
          : DecodeDense(tile, bits, units, 8 * unit_bytes);
  if (fault != TileFault::kNone) count_ = 0;
  return fault;
}

TileFault TileDecoder::DecodeSparse(const ApplyTile& tile, Bits bits,
                                    std::uint32_t units,
                                    std::uint32_t unit_bits) {
  const std::uint32_t counts[2] = {tile.a, tile.b};
  const std::uint32_t total = counts[0] + counts[1];
  if (total == 0 || total > units) return TileFault::kCounts;
  // The sign stands in for the difference until magnitudes are known.
  std::uint32_t parameters[2] = {0, 0};
  std::uint32_t at = 0;
  for (int list = 0; list < 2; ++list) {
    if (counts[list] == 0) continue;
    const std::uint32_t k = RiceParameter(counts[list], units);
    parameters[list] = k;
    for (std::uint32_t i = 0; i < counts[list]; ++i, ++at) {
      numbers_[at] = bits.Get(k);
      changes_[at].difference = bits.Get(1) == 1 ? -1 : 1;
    }
  }
  at = 0;
  for (int list = 0; list < 2; ++list) {
    std::uint64_t next = 0;
    for (std::uint32_t i = 0; i < counts[list]; ++i, ++at) {
      next += (bits.GetUnary(units) << parameters[list]) | numbers_[at];
      if (bits.overrun()) return TileFault::kPlanes;
      if (next >= units) return TileFault::kIndex;
      changes_[at].index = static_cast<std::uint32_t>(next++);
    }
  }
  for (std::uint32_t i = counts[0]; i < total; ++i) {
    numbers_[i] = bits.GetUnary(unit_bits);
    if (bits.overrun()) return TileFault::kPlanes;
    if (numbers_[i] >= unit_bits) return TileFault::kDifference;
  }
  for (std::uint32_t i = counts[0]; i < total; ++i) {
    const auto e = static_cast<std::uint32_t>(numbers_[i]);
    const std::uint64_t magnitude = ((std::uint64_t{1} << e) | bits.Get(e)) + 1;
    if (bits.overrun()) return TileFault::kPlanes;
    if (magnitude >= std::uint64_t{1} << unit_bits) {
      return TileFault::kDifference;
    }
    changes_[i].difference *= static_cast<std::int64_t>(magnitude);
  }
  if (!bits.AtCanonicalEnd()) return TileFault::kPlanes;
  if (counts[0] != 0 && counts[1] != 0) {
    std::fill(marks_.begin(), marks_.end(), 0);
    for (std::uint32_t i = 0; i < total; ++i) {
      const std::uint32_t index = changes_[i].index;
      const std::uint64_t bit = std::uint64_t{1} << (index % 64);
      if ((marks_[index / 64] & bit) != 0) return TileFault::kIndex;
      marks_[index / 64] |= bit;
    }
  }
  count_ = total;
  return TileFault::kNone;
}

TileFault TileDecoder::DecodeDense(const ApplyTile& tile, Bits bits,
                                   std::uint32_t units,
                                   std::uint32_t unit_bits) {
  const std::uint32_t k = tile.a;
  if (k > unit_bits + 1 || tile.b > units) return TileFault::kCounts;
  for (std::uint32_t i = 0; i < units; ++i) numbers_[i] = bits.Get(k);
  if (bits.overrun()) return TileFault::kPlanes;
  std::uint32_t escapes = 0;
  if (k <= unit_bits) {
    for (std::uint32_t i = 0; i < units; ++i) {
      const std::uint64_t q = bits.GetUnary(kDenseEscapeQuotient);
      if (bits.overrun()) return TileFault::kPlanes;
      if (q == kDenseEscapeQuotient) {
        changes_[escapes++].index = i;
      } else {
        numbers_[i] |= q << k;
      }
    }
  }
  if (escapes != tile.b) return TileFault::kEscape;
  const std::uint64_t low_mask = (std::uint64_t{1} << k) - 1;
  for (std::uint32_t e = 0; e < escapes; ++e) {
    std::uint64_t& number = numbers_[changes_[e].index];
    const std::uint64_t z = bits.Get(unit_bits + 1);
    if (bits.overrun()) return TileFault::kPlanes;
    if ((z >> k) < kDenseEscapeQuotient || (z & low_mask) != number) {
      return TileFault::kEscape;
    }
    number = z;
  }
  if (!bits.AtCanonicalEnd()) return TileFault::kPlanes;
  std::uint32_t count = 0;
  for (std::uint32_t i = 0; i < units; ++i) {
    if (numbers_[i] == 0) continue;
    const std::int64_t d = Unzigzag(numbers_[i]);
    if (static_cast<std::uint64_t>(d < 0 ? -d : d) >= std::uint64_t{1}
                                                          << unit_bits) {
      return TileFault::kDifference;
    }
    changes_[count++] = {i, d};
  }
  if (count == 0) return TileFault::kCounts;
  count_ = count;
  return TileFault::kNone;
}

// --------------------------------------------------------------------- encode

namespace {

std::uint64_t LoadUnit(const std::byte* at, std::uint32_t unit_bytes) {
  std::uint64_t value = 0;
  switch (unit_bytes) {
    case 1:
      std::memcpy(&value, at, 1);
      break;
    case 2:
      std::memcpy(&value, at, 2);
      break;
    default:
      std::memcpy(&value, at, 4);
  }
  return value;
}

void AddToUnit(std::byte* at, std::uint32_t unit_bytes,
               std::int64_t difference) {
  const std::uint64_t value =
      LoadUnit(at, unit_bytes) + static_cast<std::uint64_t>(difference);
  switch (unit_bytes) {
    case 1:
      std::memcpy(at, &value, 1);
      break;
    case 2:
      std::memcpy(at, &value, 2);
      break;
    default:
      std::memcpy(at, &value, 4);
  }
}

// Whether every unit lies at a multiple of its size, as kernels need it.
bool UnitsAreAligned(const TileGrid& grid, const UnitRange& slice,
                     const StridedUnits& units) {
  const std::uint64_t first_row = slice.begin / grid.cols;
  auto bits = reinterpret_cast<std::uintptr_t>(
      units.At(first_row, slice.begin - first_row * grid.cols));
  if ((slice.end - 1) / grid.cols > first_row) {
    bits |= static_cast<std::uintptr_t>(units.row_stride_bytes);
  }
  if (slice.count() > units.units_per_element) {
    bits |= static_cast<std::uintptr_t>(units.col_stride_bytes);
  }
  return bits % units.unit_bytes == 0;
}
bool UnitsAreAligned(const BoxTarget& box) {
  auto bits = reinterpret_cast<std::uintptr_t>(box.data);
  if (box.row_end - box.row_begin > 1) {
    bits |= static_cast<std::uintptr_t>(box.row_stride_bytes);
  }
  if (box.col_end - box.col_begin > box.units_per_element) {
    bits |= static_cast<std::uintptr_t>(box.col_stride_bytes);
  }
  return bits % box.unit_bytes == 0;
}

// Whether `count` units from (row, col) on lie one after the other.
bool RowsAreContiguous(const StridedUnits& units) {
  return units.col_stride_bytes ==
         static_cast<std::int64_t>(units.unit_bytes * units.units_per_element);
}

void GatherRow(const StridedUnits& from, std::uint64_t row, std::uint64_t col,
               std::uint64_t count, std::byte* to) {
  const std::uint32_t unit_bytes = from.unit_bytes;
  if (RowsAreContiguous(from)) {
    std::memcpy(to, from.At(row, col), count * unit_bytes);
    return;
  }
  for (std::uint64_t i = 0; i < count; ++i) {
    const std::uint64_t value = LoadUnit(from.At(row, col + i), unit_bytes);
    std::memcpy(to + i * unit_bytes, &value, unit_bytes);
  }
}

constexpr std::uint64_t kMaxUnitBytes = 4;

}  // namespace

BatchRunner::BatchRunner()
    // Its own sum is not used: it knows nothing of the tile's place.
    : encoder_(L61Key{}),
      old_tile_(kTileUnits * kMaxUnitBytes),
      new_tile_(kTileUnits * kMaxUnitBytes) {
  record_.reserve(sizeof(RecordHeader) + sizeof(GroupHeader) + kMaxTileBytes +
                  2 * kRecordAlignment);
}

void BatchRunner::Encode(const EncodeBatch& batch) {
  *batch.totals = {};
  for (std::uint32_t s = 0; s < batch.slice_count; ++s) {
    const EncodeSlice& slice = batch.slices[s];
    // A GPU would fault.
    KEDGE_CHECK(UnitsAreAligned(slice.grid, slice.slice, slice.old_units) &&
                UnitsAreAligned(slice.grid, slice.slice, slice.new_units));
    const TileRange tiles = slice.grid.TilesOf(slice.slice);
    for (std::uint64_t i = 0; i < tiles.count; ++i) {
      EncodeOne(batch, slice, tiles.first + i,
                &batch.tiles[slice.first_tile + i]);
    }
  }
}

void BatchRunner::EncodeOne(const EncodeBatch& batch, const EncodeSlice& slice,
                            std::uint64_t tile, EncodedTile* out) {
  *out = {};
  const TileBox box = slice.grid.Box(tile);
  const std::uint32_t unit_bytes = slice.new_units.unit_bytes;
  // Calls visit(row of the tile, column in the tile, units) for each row's part
  // in the slice.
  const auto for_each_row = [&](auto&& visit) {
    for (std::uint32_t r = 0; r < box.height; ++r) {
      const std::uint64_t row_start = (box.row + r) * slice.grid.cols + box.col;
      const std::uint64_t begin = std::max(row_start, slice.slice.begin);
      const std::uint64_t end =
          std::min(row_start + box.width, slice.slice.end);
      if (begin < end) visit(r, begin - row_start, end - begin);
    }
  };
  if (RowsAreContiguous(slice.old_units) &&
      RowsAreContiguous(slice.new_units)) {
    bool differs = false;
    for_each_row([&](std::uint32_t r, std::uint64_t col, std::uint64_t count) {
      differs =
          differs || std::memcmp(slice.old_units.At(box.row + r, box.col + col),
                                 slice.new_units.At(box.row + r, box.col + col),
                                 count * unit_bytes) != 0;
    });
    if (!differs) return;
  }
  // What lies outside the slice is the same in both.
  const std::uint32_t units = box.unit_count();
  std::fill_n(old_tile_.begin(), units * unit_bytes, std::byte{0});
  std::fill_n(new_tile_.begin(), units * unit_bytes, std::byte{0});
  for_each_row([&](std::uint32_t r, std::uint64_t col, std::uint64_t count) {
    const std::uint64_t at = (r * box.width + col) * unit_bytes;
    GatherRow(slice.old_units, box.row + r, box.col + col, count,
              old_tile_.data() + at);
    GatherRow(slice.new_units, box.row + r, box.col + col, count,
              new_tile_.data() + at);
  });

  // As a tensor of one tile: its record is that tile's payload behind headers
  // whose minima are the tile's fields.
  record_.clear();
  const std::uint64_t shape[] = {units};
  const EncodedSlice encoded =
      encoder_.Encode(MakeTileGrid(shape, 1), {0, units}, unit_bytes,
                      old_tile_.data(), new_tile_.data(), &record_);
  if (encoded.nnz == 0) return;
  GroupHeader header;
  std::memcpy(&header, record_.data() + sizeof(RecordHeader), sizeof(header));
  KEDGE_CHECK(header.offset + std::uint64_t{header.min_bytes} ==
              encoded.record_bytes);

  out->nnz = static_cast<std::uint32_t>(encoded.nnz);
  out->bytes = header.min_bytes;
  out->mode = header.min_mode;
  out->a = header.min_a;
  out->b = header.min_b;
  for (std::uint32_t i = 0; i < units; ++i) {
    const auto d = static_cast<std::int64_t>(
        LoadUnit(new_tile_.data() + std::uint64_t{i} * unit_bytes, unit_bytes) -
        LoadUnit(old_tile_.data() + std::uint64_t{i} * unit_bytes, unit_bytes));
    if (d == 0) continue;
    out->l61 = L61Add(out->l61,
                      L61OfChange(batch.l61.key, slice.grid.FlatIndex(box, i),
                                  unit_bytes, d));
  }

  EncodeTotals& totals = *batch.totals;
  const std::uint64_t at = totals.arena_bytes;
  const std::uint64_t taken =
      (out->bytes + kArenaAlignment - 1) / kArenaAlignment * kArenaAlignment;
  totals.arena_bytes += taken;
  totals.nnz += out->nnz;
  ++totals.changed_tiles;
  if (at > batch.arena_bytes || taken > batch.arena_bytes - at ||
      at / kArenaAlignment >= kNoPayload) {
    out->payload = kNoPayload;
    return;
  }
  out->payload = static_cast<std::uint32_t>(at / kArenaAlignment);
  std::memcpy(batch.arena + at, record_.data() + header.offset, out->bytes);
}

// ---------------------------------------------------------------------- apply

void BatchRunner::Apply(const ApplyBatch& batch) {
  ApplyOutcome outcome;
  const bool check = batch.mode == ApplyMode::kCheck;
  if (check) std::fill_n(batch.sums, batch.record_count, RecordSums{});
  const std::uint64_t count = std::min(batch.tile_count, batch.tile_limit);
  for (std::uint64_t t = 0; t < count; ++t) {
    const ApplyTile& tile = batch.tiles[t];
    const struct ApplyRecord& record = batch.records[tile.record];
    const TileBox box = record.grid.Box(tile.tile);
    TileFault fault = TileFault::kPlanes;
    if (tile.payload <= batch.payload_bytes &&
        tile.bytes <= batch.payload_bytes - tile.payload) {
      fault = decoder_.Decode(tile, batch.payloads + tile.payload,
                              box.unit_count(), record.unit_bytes);
    }
    if (fault == TileFault::kNone) {
      for (const Change& change : decoder_.changes()) {
        const std::uint64_t unit = record.grid.FlatIndex(box, change.index);
        if (unit < record.slice.begin || unit >= record.slice.end) {
          fault = TileFault::kSlice;
          break;
        }
      }
    }
    if (fault != TileFault::kNone) {
      if (t < outcome.first_bad_tile) {
        outcome.first_bad_tile = t;
        outcome.fault = fault;
      }
      continue;
    }
    outcome.nnz += decoder_.changes().size();
    if (check) {
      RecordSums& sums = batch.sums[tile.record];
      sums.nnz += decoder_.changes().size();
      for (const Change& change : decoder_.changes()) {
        const std::uint64_t l61 =
            L61OfChange(batch.l61.key, record.grid.FlatIndex(box, change.index),
                        record.unit_bytes, change.difference);
        sums.l61_low += l61 & ((std::uint64_t{1} << 31) - 1);
        sums.l61_high += l61 >> 31;
      }
      continue;
    }
    for (std::uint32_t b = 0; b < record.box_count; ++b) {
      const BoxTarget& target = batch.boxes[record.first_box + b];
      KEDGE_CHECK(UnitsAreAligned(target));
      for (const Change& change : decoder_.changes()) {
        const std::uint32_t r = change.index / box.width;
        const std::uint64_t row = box.row + r;
        const std::uint64_t col = box.col + (change.index - r * box.width);
        if (!target.Contains(row, col)) continue;
        AddToUnit(target.At(row, col), record.unit_bytes, change.difference);
        ++outcome.units_written;
      }
    }
  }
  *batch.outcome = outcome;
}

}  // namespace kedge
