#include "kedge/format/codec.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>

#include "absl/strings/str_cat.h"
#include "kedge/format/status.h"

namespace kedge {
namespace {

static_assert(std::endian::native == std::endian::little,
              "kedge's files are little-endian and are not converted");

// Appends bit fields, least significant bit first.
class BitWriter {
 public:
  explicit BitWriter(std::vector<std::byte>* out) : out_(out) {}

  void Put(std::uint64_t value, std::uint32_t width) {  // width <= 33
    pending_ |= (value & ((std::uint64_t{1} << width) - 1)) << used_;
    used_ += width;
    while (used_ >= 32) {
      Append(4);
      pending_ >>= 32;
      used_ -= 32;
    }
  }
  void PutUnary(std::uint64_t zeros) {
    for (; zeros >= 32; zeros -= 32) Put(0, 32);
    Put(std::uint64_t{1} << zeros, static_cast<std::uint32_t>(zeros) + 1);
  }
  void PadToByte() {
    Append((used_ + 7) / 8);
    pending_ = 0;
    used_ = 0;
  }

 private:
  void Append(std::size_t bytes) {
    const auto* from = reinterpret_cast<const std::byte*>(&pending_);
    out_->insert(out_->end(), from, from + bytes);
  }
  std::vector<std::byte>* out_;
  std::uint64_t pending_ = 0;
  std::uint32_t used_ = 0;  // bits of it, below 32
};

// Reads bit fields; past the end it returns zeros and remembers that it did.
class BitReader {
 public:
  explicit BitReader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  std::uint64_t Get(std::uint32_t width) {  // width <= 33
    std::uint64_t value = 0;
    for (std::uint32_t got = 0; got < width;) {
      if (bit_ >= 8 * bytes_.size()) {
        overrun_ = true;
        return 0;
      }
      const std::uint32_t shift = bit_ & 7;
      const std::uint32_t take =
          std::min<std::uint32_t>(width - got, 8 - shift);
      const std::uint64_t bits =
          (std::to_integer<std::uint64_t>(bytes_[bit_ >> 3]) >> shift) &
          ((1u << take) - 1);
      value |= bits << got;
      got += take;
      bit_ += take;
    }
    return value;
  }
  // Counts 0 bits up to the next 1; more than `limit` zeros is an overrun.
  std::uint64_t GetUnary(std::uint64_t limit) {
    for (std::uint64_t zeros = 0; zeros <= limit; ++zeros) {
      if (Get(1) == 1) return zeros;
      if (overrun_) return 0;
    }
    overrun_ = true;
    return 0;
  }
  bool overrun() const { return overrun_; }
  // Whether only zero bits of the last byte remain.
  bool AtCanonicalEnd() {
    if (overrun_ || (bit_ + 7) / 8 != bytes_.size()) return false;
    return Get(static_cast<std::uint32_t>(8 * bytes_.size() - bit_)) == 0;
  }

 private:
  std::span<const std::byte> bytes_;
  std::uint64_t bit_ = 0;
  bool overrun_ = false;
};

std::uint64_t Magnitude(std::int64_t d) {
  return static_cast<std::uint64_t>(d < 0 ? -d : d);
}

// The changes of one sparse list: where it stands in `changes`, its parameter.
struct SparseList {
  std::vector<Change> changes;
  std::uint32_t k = 0;

  void ChooseParameter(std::uint32_t units) {
    if (!changes.empty()) {
      k = RiceParameter(static_cast<std::uint32_t>(changes.size()), units);
    }
  }
  template <typename Visit>  // visit(gap, change)
  void ForEachGap(Visit&& visit) const {
    std::uint32_t next = 0;
    for (const Change& change : changes) {
      visit(change.index - next, change);
      next = change.index + 1;
    }
  }
};

struct DenseChoice {
  std::uint32_t k = 0;
  std::uint32_t escapes = 0;
  std::uint64_t bits = std::numeric_limits<std::uint64_t>::max();
};

DenseChoice ChooseDense(std::span<const std::uint64_t> zigzags,
                        std::uint32_t unit_bits) {
  DenseChoice best;
  for (std::uint32_t k = 0; k <= unit_bits + 1; ++k) {
    DenseChoice choice;
    choice.k = k;
    choice.bits = zigzags.size() * k;
    if (k <= unit_bits) {
      for (const std::uint64_t z : zigzags) {
        const std::uint64_t q =
            std::min<std::uint64_t>(z >> k, kDenseEscapeQuotient);
        choice.bits += q + 1;
        if (q == kDenseEscapeQuotient) {
          ++choice.escapes;
          choice.bits += unit_bits + 1;
        }
      }
    }
    if (choice.bits < best.bits) best = choice;
  }
  return best;
}

absl::Status Bad(absl::string_view what) {
  return DataLoss({.where = "tile", .what = what});
}

absl::Status DecodeSparse(const TileView& tile, std::uint32_t units,
                          std::uint32_t unit_bytes,
                          std::vector<Change>* changes) {
  if (tile.a + std::uint64_t{tile.b} > units || tile.a + tile.b == 0) {
    return Bad(absl::StrCat("sparse counts ", tile.a, " + ", tile.b,
                            ": expected 1 to ", units));
  }
  const std::uint32_t unit_bits = 8 * unit_bytes;
  BitReader reader(tile.payload);
  struct Item {
    std::uint32_t low;
    bool negative;
    std::uint32_t index;
  };
  std::array<std::vector<Item>, 2> lists;
  std::array<std::uint32_t, 2> parameters = {0, 0};
  for (int list = 0; list < 2; ++list) {
    const std::uint32_t count = list == 0 ? tile.a : tile.b;
    if (count == 0) continue;
    const std::uint32_t k = RiceParameter(count, units);
    parameters[list] = k;
    for (std::uint32_t i = 0; i < count && !reader.overrun(); ++i) {
      const auto low = static_cast<std::uint32_t>(reader.Get(k));
      lists[list].push_back({low, reader.Get(1) == 1, 0});
    }
  }
  for (int list = 0; list < 2 && !reader.overrun(); ++list) {
    std::uint64_t next = 0;
    for (Item& item : lists[list]) {
      const std::uint64_t gap =
          (reader.GetUnary(units) << parameters[list]) | item.low;
      if (reader.overrun()) break;
      next += gap;
      if (next >= units) {
        return Bad(absl::StrCat("list ", list == 0 ? "A" : "B", " names unit ",
                                next, " of ", units));
      }
      item.index = static_cast<std::uint32_t>(next++);
    }
  }
  std::vector<std::uint32_t> exponents;
  for (std::size_t i = 0; i < lists[1].size() && !reader.overrun(); ++i) {
    const std::uint64_t e = reader.GetUnary(unit_bits);
    if (e >= unit_bits) {
      return Bad(
          absl::StrCat("exponent ", e, " of a ", unit_bits, "-bit difference"));
    }
    exponents.push_back(static_cast<std::uint32_t>(e));
  }
  changes->clear();
  for (const Item& item : lists[0]) {
    changes->push_back({item.index, item.negative ? -1 : 1});
  }
  for (std::size_t i = 0; i < exponents.size() && !reader.overrun(); ++i) {
    const std::uint64_t m =
        (std::uint64_t{1} << exponents[i]) | reader.Get(exponents[i]);
    const auto magnitude = static_cast<std::int64_t>(m + 1);
    if (m + 1 >= std::uint64_t{1} << unit_bits) {
      return Bad(
          absl::StrCat("difference of ", m + 1, " in ", unit_bits, " bits"));
    }
    changes->push_back(
        {lists[1][i].index, lists[1][i].negative ? -magnitude : magnitude});
  }
  if (reader.overrun() || !reader.AtCanonicalEnd()) {
    return Bad(absl::StrCat("sparse planes do not fill ", tile.payload.size(),
                            " payload bytes exactly with zero padding"));
  }
  std::sort(changes->begin(), changes->end(),
            [](const Change& x, const Change& y) { return x.index < y.index; });
  for (std::size_t i = 1; i < changes->size(); ++i) {
    if ((*changes)[i - 1].index == (*changes)[i].index) {
      return Bad(
          absl::StrCat("unit ", (*changes)[i].index, " stands in both lists"));
    }
  }
  return absl::OkStatus();
}

absl::Status DecodeDense(const TileView& tile, std::uint32_t units,
                         std::uint32_t unit_bytes,
                         std::vector<Change>* changes) {
  const std::uint32_t unit_bits = 8 * unit_bytes;
  const std::uint32_t k = tile.a;
  if (k > unit_bits + 1 || tile.b > units) {
    return Bad(absl::StrCat("dense parameter ", k, ", escapes ", tile.b));
  }
  BitReader reader(tile.payload);
  std::vector<std::uint64_t> zigzags(units);
  for (std::uint64_t& z : zigzags) z = reader.Get(k);
  std::vector<std::uint32_t> escaped;
  if (k <= unit_bits) {
    for (std::uint32_t i = 0; i < units && !reader.overrun(); ++i) {
      const std::uint64_t q = reader.GetUnary(kDenseEscapeQuotient);
      if (q == kDenseEscapeQuotient) {
        escaped.push_back(i);
      } else {
        zigzags[i] |= q << k;
      }
    }
  }
  if (!reader.overrun() && escaped.size() != tile.b) {
    return Bad(
        absl::StrCat("escapes: expected ", tile.b, ", found ", escaped.size()));
  }
  for (const std::uint32_t i : escaped) {
    if (reader.overrun()) break;
    const std::uint64_t z = reader.Get(unit_bits + 1);
    const std::uint64_t low_mask = (std::uint64_t{1} << k) - 1;
    if ((z >> k) < kDenseEscapeQuotient || (z & low_mask) != zigzags[i]) {
      return Bad(absl::StrCat("escape of unit ", i, " is not canonical"));
    }
    zigzags[i] = z;
  }
  if (reader.overrun() || !reader.AtCanonicalEnd()) {
    return Bad(absl::StrCat("dense planes do not fill ", tile.payload.size(),
                            " payload bytes exactly with zero padding"));
  }
  changes->clear();
  for (std::uint32_t i = 0; i < units; ++i) {
    if (zigzags[i] == 0) continue;
    const std::int64_t d = Unzigzag(zigzags[i]);
    if (Magnitude(d) >= std::uint64_t{1} << unit_bits) {
      return Bad(absl::StrCat("difference of ", d, " in ", unit_bits, " bits"));
    }
    changes->push_back({i, d});
  }
  if (changes->empty()) return Bad("a listed tile has no change");
  return absl::OkStatus();
}

std::uint64_t AlignUp(std::uint64_t value, std::uint64_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

template <typename T>
void Append(const T& value, std::vector<std::byte>* out) {
  const auto* bytes = reinterpret_cast<const std::byte*>(&value);
  out->insert(out->end(), bytes, bytes + sizeof(T));
}

}  // namespace

TileHeader EncodeTile(std::span<const Change> changes, std::uint32_t units,
                      std::uint32_t unit_bytes, std::vector<std::byte>* out) {
  const std::uint32_t unit_bits = 8 * unit_bytes;
  SparseList a;
  SparseList b;
  for (const Change& change : changes) {
    (Magnitude(change.difference) == 1 ? a : b).changes.push_back(change);
  }
  a.ChooseParameter(units);
  b.ChooseParameter(units);

  const std::size_t start = out->size();
  TileHeader header;
  if (changes.size() > units / 4) {
    std::vector<std::uint64_t> zigzags(units);
    for (const Change& change : changes) {
      zigzags[change.index] = Zigzag(change.difference);
    }
    const DenseChoice dense = ChooseDense(zigzags, unit_bits);
    std::uint64_t sparse_bits = 0;
    for (const SparseList* list : {&a, &b}) {
      list->ForEachGap([&](std::uint32_t gap, const Change& change) {
        sparse_bits += list->k + 1 + (gap >> list->k) + 1;
        const std::uint64_t magnitude = Magnitude(change.difference);
        if (magnitude >= 2)
          sparse_bits += 2 * std::bit_width(magnitude - 1) - 1;
      });
    }
    if ((dense.bits + 7) / 8 < (sparse_bits + 7) / 8) {
      BitWriter writer(out);
      for (const std::uint64_t z : zigzags) writer.Put(z, dense.k);
      if (dense.k <= unit_bits) {
        for (const std::uint64_t z : zigzags) {
          writer.PutUnary(
              std::min<std::uint64_t>(z >> dense.k, kDenseEscapeQuotient));
        }
        for (const std::uint64_t z : zigzags) {
          if (z >> dense.k >= kDenseEscapeQuotient) {
            writer.Put(z, unit_bits + 1);
          }
        }
      }
      writer.PadToByte();
      header.mode = TileMode::kDense;
      header.a = dense.k;
      header.b = dense.escapes;
      header.bytes = static_cast<std::uint32_t>(out->size() - start);
      return header;
    }
  }

  BitWriter writer(out);
  for (const SparseList* list : {&a, &b}) {
    list->ForEachGap([&](std::uint32_t gap, const Change& change) {
      writer.Put(gap, list->k);
      writer.Put(change.difference < 0 ? 1 : 0, 1);
    });
  }
  for (const SparseList* list : {&a, &b}) {
    list->ForEachGap([&](std::uint32_t gap, const Change&) {
      writer.PutUnary(gap >> list->k);
    });
  }
  for (const Change& change : b.changes) {
    writer.PutUnary(std::bit_width(Magnitude(change.difference) - 1) - 1);
  }
  for (const Change& change : b.changes) {
    const std::uint64_t m = Magnitude(change.difference) - 1;
    writer.Put(m, static_cast<std::uint32_t>(std::bit_width(m)) - 1);
  }
  writer.PadToByte();
  header.a = static_cast<std::uint32_t>(a.changes.size());
  header.b = static_cast<std::uint32_t>(b.changes.size());
  header.bytes = static_cast<std::uint32_t>(out->size() - start);
  return header;
}

absl::Status DecodeTile(const TileView& tile, std::uint32_t units,
                        std::uint32_t unit_bytes,
                        std::vector<Change>* changes) {
  return tile.mode == TileMode::kSparse
             ? DecodeSparse(tile, units, unit_bytes, changes)
             : DecodeDense(tile, units, unit_bytes, changes);
}

void RecordBuilder::Start(TileRange tiles) {
  range_ = tiles;
  tiles_.clear();
  payloads_.clear();
  nnz_ = 0;
}

void RecordBuilder::AddTile(std::uint64_t tile, const TileHeader& header,
                            std::uint32_t nnz) {
  KEDGE_DCHECK(tile >= range_.first && tile - range_.first < range_.count);
  const auto relative = static_cast<std::uint32_t>(tile - range_.first);
  KEDGE_DCHECK(tiles_.empty() || tiles_.back().tile < relative);
  tiles_.push_back({relative, header});
  nnz_ += nnz;
}

std::uint64_t RecordBuilder::bound_bytes() const {
  // A tile's packed header is at most 5 x 32 bits.
  return sizeof(RecordHeader) + payloads_.size() + 24 * tiles_.size() +
         sizeof(GroupHeader) * (tiles_.size() / kTilesPerGroup + 1) +
         kRecordAlignment;
}

std::uint64_t RecordBuilder::Finish(std::vector<std::byte>* out) {
  KEDGE_CHECK(!tiles_.empty());
  const std::size_t start = out->size();
  out->reserve(start + bound_bytes());
  RecordHeader record;
  record.tile_count = static_cast<std::uint32_t>(tiles_.size());
  record.nnz = nnz_;
  Append(record, out);
  const std::size_t group_count =
      (tiles_.size() + kTilesPerGroup - 1) / kTilesPerGroup;
  const std::size_t headers_at = out->size();
  out->resize(headers_at + group_count * sizeof(GroupHeader));

  std::size_t payload = 0;
  std::uint32_t next_tile = 0;
  for (std::size_t g = 0; g < group_count; ++g) {
    const std::span<const Entry> group = std::span<const Entry>(tiles_).subspan(
        g * kTilesPerGroup,
        std::min<std::size_t>(kTilesPerGroup,
                              tiles_.size() - g * kTilesPerGroup));
    GroupHeader header;
    header.offset = static_cast<std::uint32_t>(out->size() - start);
    header.first_tile = next_tile;
    std::array<std::array<std::uint32_t, kTileFieldCount>, kTilesPerGroup>
        fields;
    std::array<std::uint32_t, kTileFieldCount> low;
    std::array<std::uint32_t, kTileFieldCount> high;
    low.fill(std::numeric_limits<std::uint32_t>::max());
    high.fill(0);
    for (std::size_t i = 0; i < group.size(); ++i) {
      const TileHeader& tile = group[i].header;
      fields[i] = {group[i].tile - next_tile,
                   static_cast<std::uint32_t>(tile.mode), tile.a, tile.b,
                   tile.bytes};
      next_tile = group[i].tile + 1;
      for (int f = 0; f < kTileFieldCount; ++f) {
        low[f] = std::min(low[f], fields[i][f]);
        high[f] = std::max(high[f], fields[i][f]);
      }
    }
    header.min_gap = low[kTileGap];
    header.min_mode = static_cast<std::uint8_t>(low[kTileMode]);
    header.min_a = static_cast<std::uint16_t>(low[kTileA]);
    header.min_b = static_cast<std::uint16_t>(low[kTileB]);
    header.min_bytes = low[kTileBytes];
    for (int f = 0; f < kTileFieldCount; ++f) {
      header.widths[f] =
          static_cast<std::uint8_t>(std::bit_width(high[f] - low[f]));
    }
    BitWriter writer(out);
    std::size_t group_payload = 0;
    for (std::size_t i = 0; i < group.size(); ++i) {
      for (int f = 0; f < kTileFieldCount; ++f) {
        writer.Put(fields[i][f] - low[f], header.widths[f]);
      }
      group_payload += group[i].header.bytes;
    }
    writer.PadToByte();
    out->insert(out->end(), payloads_.begin() + payload,
                payloads_.begin() + payload + group_payload);
    payload += group_payload;
    std::memcpy(out->data() + headers_at + g * sizeof(GroupHeader), &header,
                sizeof(header));
  }
  KEDGE_CHECK(payload == payloads_.size());
  const std::uint64_t bytes = out->size() - start;
  KEDGE_CHECK(bytes <= kMaxRecordBytes);
  out->resize(start + AlignUp(bytes, kRecordAlignment));
  return bytes;
}

absl::StatusOr<RecordView> RecordView::Parse(std::span<const std::byte> record,
                                             TileRange tiles) {
  const auto bad = [](std::uint64_t offset, const std::string& what) {
    return DataLoss(
        {.where = absl::StrCat("record offset ", offset), .what = what});
  };
  RecordHeader header;
  if (record.size() < sizeof(header) || record.size() > kMaxRecordBytes) {
    return bad(0, absl::StrCat("record of ", record.size(), " bytes: expected ",
                               sizeof(header), " to ", kMaxRecordBytes));
  }
  std::memcpy(&header, record.data(), sizeof(header));
  if (header.tile_count == 0 || header.tile_count > tiles.count) {
    return bad(0, absl::StrCat("tile_count: expected 1 to ", tiles.count,
                               ", found ", header.tile_count));
  }
  if (header.reserved != 0) return bad(4, "reserved bytes are not zero");
  const std::uint64_t group_count =
      (std::uint64_t{header.tile_count} + kTilesPerGroup - 1) / kTilesPerGroup;
  // A listed tile has at least one byte of payload: nothing is reserved for
  // more tiles than the record can hold.
  const std::uint64_t after_header = record.size() - sizeof(header);
  if (group_count > after_header / sizeof(GroupHeader) ||
      header.tile_count > after_header - group_count * sizeof(GroupHeader)) {
    return bad(0, absl::StrCat("tile_count ", header.tile_count,
                               " does not fit in ", record.size(), " bytes"));
  }
  RecordView view;
  view.nnz_ = header.nnz;
  view.tiles_.reserve(header.tile_count);
  std::uint64_t offset = sizeof(header) + group_count * sizeof(GroupHeader);
  std::uint64_t next_tile = 0;
  for (std::uint64_t g = 0; g < group_count; ++g) {
    const std::uint64_t at = sizeof(header) + g * sizeof(GroupHeader);
    GroupHeader group;
    std::memcpy(&group, record.data() + at, sizeof(group));
    const auto count = static_cast<std::uint32_t>(std::min<std::uint64_t>(
        kTilesPerGroup, header.tile_count - g * kTilesPerGroup));
    std::uint32_t width = 0;
    for (const std::uint8_t field_width : group.widths) {
      if (field_width > 32) return bad(at, "a header field over 32 bits");
      width += field_width;
    }
    if (group.reserved != 0) return bad(at + 26, "reserved bytes are not zero");
    if (group.offset != offset) {
      return bad(at, absl::StrCat("group offset: expected ", offset, ", found ",
                                  group.offset));
    }
    if (group.first_tile != next_tile) {
      return bad(at + 4, absl::StrCat("group first_tile: expected ", next_tile,
                                      ", found ", group.first_tile));
    }
    const std::uint64_t packed = (std::uint64_t{count} * width + 7) / 8;
    if (packed > record.size() - offset) {
      return bad(offset, "tile headers run past the record");
    }
    BitReader reader(record.subspan(offset, packed));
    offset += packed;
    std::array<std::uint64_t, kTileFieldCount> low;
    std::array<std::uint64_t, kTileFieldCount> high = {};
    low.fill(std::numeric_limits<std::uint64_t>::max());
    for (std::uint32_t i = 0; i < count; ++i) {
      std::array<std::uint64_t, kTileFieldCount> f = {
          group.min_gap, group.min_mode, group.min_a, group.min_b,
          group.min_bytes};
      for (int k = 0; k < kTileFieldCount; ++k) {
        const std::uint64_t above = reader.Get(group.widths[k]);
        low[k] = std::min(low[k], above);
        high[k] = std::max(high[k], above);
        f[k] += above;
      }
      const std::uint64_t relative = next_tile + f[kTileGap];
      if (relative >= tiles.count) {
        return bad(offset,
                   absl::StrCat("tile ", relative, " of ", tiles.count));
      }
      next_tile = relative + 1;
      if (f[kTileMode] > 1 || f[kTileA] > kTileUnits ||
          f[kTileB] > kTileUnits || f[kTileBytes] > kMaxTileBytes ||
          f[kTileBytes] == 0) {
        return bad(offset, absl::StrCat("tile ", relative, ": mode ",
                                        f[kTileMode], ", a ", f[kTileA], ", b ",
                                        f[kTileB], ", bytes ", f[kTileBytes]));
      }
      if (f[kTileBytes] > record.size() - offset) {
        return bad(offset,
                   absl::StrCat("tile ", relative, " of ", f[kTileBytes],
                                " bytes runs past the record"));
      }
      TileView tile;
      tile.tile = tiles.first + relative;
      tile.mode = static_cast<TileMode>(f[kTileMode]);
      tile.a = static_cast<std::uint32_t>(f[kTileA]);
      tile.b = static_cast<std::uint32_t>(f[kTileB]);
      tile.payload = record.subspan(offset, f[kTileBytes]);
      offset += f[kTileBytes];
      view.tiles_.push_back(tile);
    }
    if (!reader.AtCanonicalEnd()) {
      return bad(at, "tile headers: padding bits are not zero");
    }
    for (int k = 0; k < kTileFieldCount; ++k) {
      if (low[k] != 0 || std::bit_width(high[k]) != group.widths[k]) {
        return bad(at, absl::StrCat("tile header field ", k,
                                    ": minimum or width is not the tightest"));
      }
    }
  }
  if (offset != record.size()) {
    return bad(offset, absl::StrCat(record.size() - offset,
                                    " bytes after the last tile"));
  }
  return view;
}

std::vector<std::byte> EncodeRecordScalar(const TileGrid& grid,
                                          const UnitRange& slice,
                                          std::uint32_t unit_bytes,
                                          std::span<const Change> changes) {
  const TileRange tiles = grid.TilesOf(slice);
  std::vector<std::vector<Change>> by_tile(tiles.count);
  for (const Change& change : changes) {
    const std::uint64_t unit = slice.begin + change.index;
    const std::uint64_t row = unit / grid.cols;
    const std::uint64_t col = unit % grid.cols;
    const std::uint64_t tile =
        row / grid.tile_rows * grid.tiles_per_band + col / grid.tile_cols;
    const TileBox box = grid.Box(tile);
    const auto local = static_cast<std::uint32_t>((row - box.row) * box.width +
                                                  (col - box.col));
    by_tile[tile - tiles.first].push_back({local, change.difference});
  }
  RecordBuilder builder;
  builder.Start(tiles);
  for (std::uint64_t t = 0; t < tiles.count; ++t) {
    if (by_tile[t].empty()) continue;
    const std::uint64_t tile = tiles.first + t;
    const TileHeader header = EncodeTile(
        by_tile[t], grid.Box(tile).unit_count(), unit_bytes, builder.payload());
    builder.AddTile(tile, header,
                    static_cast<std::uint32_t>(by_tile[t].size()));
  }
  std::vector<std::byte> record;
  if (!builder.empty()) {
    const std::uint64_t bytes = builder.Finish(&record);
    record.resize(bytes);
  }
  return record;
}

namespace internal {

absl::Status UnitOutsideSlice(std::uint64_t unit, const UnitRange& slice) {
  return DataLoss(
      {.where = "record",
       .what = absl::StrCat("unit ", unit, " lies outside the slice"),
       .expected = absl::StrCat("[", slice.begin, ", ", slice.end, ")")});
}

absl::Status WrongNnz(std::uint64_t expected, std::uint64_t found) {
  return DataLoss({.where = "record",
                   .what = "nnz",
                   .expected = absl::StrCat(expected),
                   .found = absl::StrCat(found)});
}

}  // namespace internal
}  // namespace kedge
