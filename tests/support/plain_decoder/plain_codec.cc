#include "plain_codec.h"

#include <algorithm>
#include <map>
#include <stdexcept>

namespace kedge_plain {
namespace {

[[noreturn]] void Fail(const std::string& what) {
  throw std::runtime_error("record: " + what);
}
void Require(bool holds, const std::string& what) {
  if (!holds) Fail(what);
}
std::string Str(std::uint64_t value) { return std::to_string(value); }

std::uint64_t CeilDiv(std::uint64_t x, std::uint64_t y) {
  return x / y + (x % y != 0 ? 1 : 0);
}

std::uint32_t UnitBits(std::uint32_t element_bytes) {
  return element_bytes == 8 ? 32 : 8 * element_bytes;
}

// Number of bits of a value; 0 for 0.
std::uint32_t BitCount(std::uint64_t value) {
  std::uint32_t bits = 0;
  for (; value != 0; value >>= 1) ++bits;
  return bits;
}

// "Bits": one bit at a time.
class Bits {
 public:
  Bits(const Bytes& bytes, std::uint64_t begin, std::uint64_t end)
      : bytes_(bytes), bit_(8 * begin), end_(8 * end) {}

  std::uint64_t Field(std::uint32_t width) {
    std::uint64_t value = 0;
    for (std::uint32_t i = 0; i < width; ++i) value |= Next() << i;
    return value;
  }
  std::uint64_t Unary() {
    std::uint64_t q = 0;
    while (Next() == 0) ++q;
    return q;
  }
  void ZeroToWholeByte() {
    while (bit_ % 8 != 0) Require(Next() == 0, "padding bits are not zero");
  }
  void AtEnd(const std::string& what) {
    Require(bit_ == end_, what + " leave bytes over");
  }

 private:
  std::uint64_t Next() {
    Require(bit_ < end_, "planes or packed headers run past their end");
    const std::uint64_t bit = (bytes_[bit_ / 8] >> (bit_ % 8)) & 1;
    ++bit_;
    return bit;
  }
  const Bytes& bytes_;
  std::uint64_t bit_;
  std::uint64_t end_;
};

class BitSink {
 public:
  void Field(std::uint64_t value, std::uint32_t width) {
    for (std::uint32_t i = 0; i < width; ++i) Put((value >> i) & 1);
  }
  void Unary(std::uint64_t q) {
    for (std::uint64_t i = 0; i < q; ++i) Put(0);
    Put(1);
  }
  const Bytes& bytes() const { return bytes_; }
  std::uint64_t bit_count() const { return count_; }

 private:
  void Put(std::uint64_t bit) {
    if (count_ % 8 == 0) bytes_.push_back(0);
    bytes_.back() |= static_cast<std::uint8_t>(bit << (count_ % 8));
    ++count_;
  }
  Bytes bytes_;
  std::uint64_t count_ = 0;
};

std::uint64_t Little(const Bytes& bytes, std::uint64_t at, int size) {
  Require(at <= bytes.size() &&
              static_cast<std::uint64_t>(size) <= bytes.size() - at,
          "a header runs past the record");
  std::uint64_t value = 0;
  for (int i = 0; i < size; ++i) {
    value |= static_cast<std::uint64_t>(bytes[at + i]) << (8 * i);
  }
  return value;
}
void PutLittle(std::uint64_t value, int size, Bytes* out) {
  for (int i = 0; i < size; ++i) {
    out->push_back(static_cast<std::uint8_t>(value >> (8 * i)));
  }
}

std::uint32_t RiceK(std::uint64_t n, std::uint64_t u) {
  const std::uint64_t q = (77 * (2 * u - n)) / (160 * n);
  return q == 0 ? 0 : BitCount(q) - 1;
}

std::uint64_t Magnitude(std::int64_t d) {
  return d < 0 ? static_cast<std::uint64_t>(-d) : static_cast<std::uint64_t>(d);
}

struct Tile {
  std::uint64_t number = 0;  // in the tensor's grid
  std::uint64_t mode = 0;
  std::uint64_t a = 0;
  std::uint64_t b = 0;
};

// The box of a tile.
struct Box {
  std::uint64_t row = 0;
  std::uint64_t col = 0;
  std::uint64_t height = 0;
  std::uint64_t width = 0;
};
Box BoxOf(const Grid& grid, std::uint64_t tile) {
  Box box;
  box.row = tile / grid.tiles_per_band * grid.tile_rows;
  box.col = tile % grid.tiles_per_band * grid.tile_cols;
  box.height = std::min(grid.tile_rows, grid.rows - box.row);
  box.width = std::min(grid.tile_cols, grid.cols - box.col);
  return box;
}

// Local index -> difference.
using Local = std::map<std::uint64_t, std::int64_t>;

Local DecodeSparse(Bits bits, const Tile& tile, std::uint64_t u,
                   std::uint32_t w) {
  Require(tile.a + tile.b >= 1 && tile.a + tile.b <= u,
          "sparse tile with " + Str(tile.a) + " + " + Str(tile.b) +
              " changes of " + Str(u) + " units");
  struct Entry {
    std::uint64_t gap = 0;
    bool negative = false;
    std::uint64_t index = 0;
    std::uint64_t e = 0;
  };
  std::vector<Entry> lists[2] = {std::vector<Entry>(tile.a),
                                 std::vector<Entry>(tile.b)};
  std::uint32_t k[2] = {0, 0};
  for (int i = 0; i < 2; ++i) {
    if (lists[i].empty()) continue;
    k[i] = RiceK(lists[i].size(), u);
    for (Entry& entry : lists[i]) {
      entry.gap = bits.Field(k[i]);
      entry.negative = bits.Field(1) == 1;
    }
  }
  for (int i = 0; i < 2; ++i) {
    std::uint64_t next = 0;
    for (Entry& entry : lists[i]) {
      entry.gap += bits.Unary() << k[i];
      entry.index = next + entry.gap;
      Require(entry.index < u,
              "local index " + Str(entry.index) + " of " + Str(u) + " units");
      next = entry.index + 1;
    }
  }
  for (Entry& entry : lists[1]) {
    entry.e = bits.Unary();
    Require(entry.e < w, "exponent " + Str(entry.e));
  }
  Local changes;
  for (const Entry& entry : lists[0]) {
    changes[entry.index] = entry.negative ? -1 : 1;
  }
  for (const Entry& entry : lists[1]) {
    const std::uint64_t magnitude =
        ((std::uint64_t{1} << entry.e) | bits.Field(entry.e)) + 1;
    Require(magnitude < std::uint64_t{1} << w,
            "difference of magnitude " + Str(magnitude));
    const auto d = static_cast<std::int64_t>(magnitude);
    const bool added =
        changes.emplace(entry.index, entry.negative ? -d : d).second;
    Require(added, "local index " + Str(entry.index) + " in both lists");
  }
  bits.ZeroToWholeByte();
  bits.AtEnd("sparse planes");
  return changes;
}

Local DecodeDense(Bits bits, const Tile& tile, std::uint64_t u,
                  std::uint32_t w) {
  const auto k = static_cast<std::uint32_t>(tile.a);
  Require(tile.a <= w + 1, "dense parameter " + Str(tile.a));
  std::vector<std::uint64_t> z(u);
  for (std::uint64_t& value : z) value = bits.Field(k);
  std::vector<std::uint64_t> escapes;
  if (k <= w) {
    for (std::uint64_t i = 0; i < u; ++i) {
      const std::uint64_t q = bits.Unary();
      Require(q <= 15, "dense quotient " + Str(q));
      if (q == 15) {
        escapes.push_back(i);
      } else {
        z[i] += q << k;
      }
    }
  }
  Require(escapes.size() == tile.b,
          Str(escapes.size()) + " escapes, expected " + Str(tile.b));
  for (const std::uint64_t i : escapes) {
    const std::uint64_t value = bits.Field(w + 1);
    Require(value >> k >= 15, "an escape that needed none");
    Require(value % (std::uint64_t{1} << k) == z[i],
            "an escape that contradicts its low bits");
    z[i] = value;
  }
  bits.ZeroToWholeByte();
  bits.AtEnd("dense planes");
  Local changes;
  for (std::uint64_t i = 0; i < u; ++i) {
    if (z[i] == 0) continue;
    Require(z[i] != (std::uint64_t{2} << w) - 1, "a difference of -2^w");
    const auto half = static_cast<std::int64_t>(z[i] / 2);
    changes[i] = z[i] % 2 == 0 ? half : -half - 1;
  }
  Require(!changes.empty(), "a listed tile without a change");
  return changes;
}

Bytes EncodeSparse(const Local& changes, std::uint64_t u, Tile* tile,
                   std::uint64_t* bit_count) {
  std::vector<std::pair<std::uint64_t, std::int64_t>> gaps[2];  // (gap, d)
  std::uint64_t next[2] = {0, 0};
  for (const auto& [index, d] : changes) {
    const int list = Magnitude(d) == 1 ? 0 : 1;
    gaps[list].emplace_back(index - next[list], d);
    next[list] = index + 1;
  }
  tile->mode = 0;
  tile->a = gaps[0].size();
  tile->b = gaps[1].size();
  std::uint32_t k[2] = {0, 0};
  BitSink out;
  for (int i = 0; i < 2; ++i) {
    if (!gaps[i].empty()) k[i] = RiceK(gaps[i].size(), u);
    for (const auto& [gap, d] : gaps[i]) {
      out.Field(gap, k[i]);
      out.Field(d < 0 ? 1 : 0, 1);
    }
  }
  for (int i = 0; i < 2; ++i) {
    for (const auto& [gap, d] : gaps[i]) out.Unary(gap >> k[i]);
  }
  for (const auto& [gap, d] : gaps[1]) {
    out.Unary(BitCount(Magnitude(d) - 1) - 1);
  }
  for (const auto& [gap, d] : gaps[1]) {
    out.Field(Magnitude(d) - 1, BitCount(Magnitude(d) - 1) - 1);
  }
  *bit_count = out.bit_count();
  return out.bytes();
}

Bytes EncodeDense(const Local& changes, std::uint64_t u, std::uint32_t w,
                  std::uint32_t k, Tile* tile, std::uint64_t* bit_count) {
  std::vector<std::uint64_t> z(u, 0);
  for (const auto& [index, d] : changes) {
    z[index] = d > 0 ? 2 * Magnitude(d) : 2 * Magnitude(d) - 1;
  }
  tile->mode = 1;
  tile->a = k;
  tile->b = 0;
  BitSink out;
  for (const std::uint64_t value : z) out.Field(value, k);
  if (k != w + 1) {
    for (const std::uint64_t value : z) {
      out.Unary(std::min<std::uint64_t>(value >> k, 15));
    }
    for (const std::uint64_t value : z) {
      if (value >> k < 15) continue;
      out.Field(value, w + 1);
      ++tile->b;
    }
  }
  *bit_count = out.bit_count();
  return out.bytes();
}

Bytes EncodeTile(const Local& changes, std::uint64_t u, std::uint32_t w,
                 Tile* tile) {
  std::uint64_t bits = 0;
  Bytes best = EncodeSparse(changes, u, tile, &bits);
  if (changes.size() <= u / 4) return best;
  Tile dense_tile;
  Bytes dense;
  std::uint64_t dense_bits = UINT64_MAX;
  for (std::uint32_t k = 0; k <= w + 1; ++k) {
    Tile with;
    Bytes bytes = EncodeDense(changes, u, w, k, &with, &bits);
    if (bits >= dense_bits) continue;
    dense_bits = bits;
    dense = std::move(bytes);
    dense_tile = with;
  }
  if (dense.size() < best.size()) {
    dense_tile.number = tile->number;
    *tile = dense_tile;
    return dense;
  }
  return best;
}

std::uint64_t FirstTile(const Grid& grid, std::uint64_t unit) {
  return unit / (grid.cols * grid.tile_rows) * grid.tiles_per_band;
}

}  // namespace

std::uint32_t ElementBytes(std::uint8_t dtype) {
  static constexpr std::uint8_t kBytes[] = {8, 4, 2, 2, 1, 1, 1, 8,
                                            4, 2, 1, 8, 4, 2, 1, 1};
  if (dtype < 1 || dtype > 16) Fail("dtype " + Str(dtype));
  return kBytes[dtype - 1];
}

std::string DTypeName(std::uint8_t dtype) {
  static constexpr const char* kNames[] = {
      "f64", "f32", "f16", "bf16", "f8_e4m3", "f8_e5m2", "f8_e8m0", "i64",
      "i32", "i16", "i8",  "u64",  "u32",     "u16",     "u8",      "bool"};
  if (dtype < 1 || dtype > 16) Fail("dtype " + Str(dtype));
  return kNames[dtype - 1];
}

Grid GridOf(const std::vector<std::uint64_t>& shape,
            std::uint32_t element_bytes) {
  const std::uint64_t e = element_bytes == 8 ? 2 : 1;
  Grid grid;
  grid.rows = 1;
  std::size_t left = shape.size();
  if (left == 0) {
    grid.cols = e;
  } else {
    grid.cols = shape[--left] * e;
    while (grid.cols < 128 && left > 1) grid.cols *= shape[--left];
    for (std::size_t i = 0; i < left; ++i) grid.rows *= shape[i];
  }
  if (grid.rows == 0 || grid.cols == 0) return Grid{};
  if (grid.cols < 128) {
    grid.tile_cols = grid.cols;
    grid.tile_rows = std::min(grid.rows, 16384 / grid.cols);
  } else {
    grid.tile_rows = std::min<std::uint64_t>(grid.rows, 128);
    grid.tile_cols = 128 * (128 / grid.tile_rows);
  }
  grid.tiles_per_band = CeilDiv(grid.cols, grid.tile_cols);
  grid.bands = CeilDiv(grid.rows, grid.tile_rows);
  return grid;
}

std::vector<FlatChange> DecodeRecord(const Bytes& record,
                                     const std::vector<std::uint64_t>& shape,
                                     std::uint32_t element_bytes,
                                     std::uint64_t begin, std::uint64_t end) {
  const Grid grid = GridOf(shape, element_bytes);
  Require(begin < end && end <= grid.rows * grid.cols,
          "the slice is not one of the tensor");
  const std::uint32_t w = UnitBits(element_bytes);
  const std::uint64_t first_tile = FirstTile(grid, begin);
  const std::uint64_t tile_count =
      FirstTile(grid, end - 1) + grid.tiles_per_band - first_tile;

  const std::uint64_t listed = Little(record, 0, 4);
  Require(listed >= 1 && listed <= tile_count,
          "tile_count " + Str(listed) + " of " + Str(tile_count));
  Require(Little(record, 4, 4) == 0, "reserved bytes are not zero");
  const std::uint64_t nnz = Little(record, 8, 8);
  const std::uint64_t groups = CeilDiv(listed, 64);
  Require(28 * groups <= record.size() - 16, "group headers past the record");

  std::vector<FlatChange> result;
  std::uint64_t at = 16 + 28 * groups;
  std::uint64_t next_relative = 0;
  for (std::uint64_t g = 0; g < groups; ++g) {
    const std::uint64_t header = 16 + 28 * g;
    const std::uint64_t in_group = std::min<std::uint64_t>(64, listed - 64 * g);
    Require(Little(record, header, 4) == at, "group offset");
    Require(Little(record, header + 4, 4) == next_relative, "first_tile");
    // In the order of the packed headers: gap, mode, a, b, bytes.
    const std::uint64_t minimum[5] = {
        Little(record, header + 8, 4), Little(record, header + 20, 1),
        Little(record, header + 16, 2), Little(record, header + 18, 2),
        Little(record, header + 12, 4)};
    std::uint32_t widths[5];
    std::uint64_t width_sum = 0;
    for (int f = 0; f < 5; ++f) {
      widths[f] =
          static_cast<std::uint32_t>(Little(record, header + 21 + f, 1));
      Require(widths[f] <= 32, "a width above 32");
      width_sum += widths[f];
    }
    Require(Little(record, header + 26, 2) == 0, "reserved bytes are not zero");
    const std::uint64_t packed_bytes = CeilDiv(in_group * width_sum, 8);
    Require(packed_bytes <= record.size() - at,
            "packed headers past the record");
    Bits packed(record, at, at + packed_bytes);
    at += packed_bytes;
    std::uint64_t above_min[5] = {UINT64_MAX, UINT64_MAX, UINT64_MAX,
                                  UINT64_MAX, UINT64_MAX};
    std::uint64_t above_max[5] = {0, 0, 0, 0, 0};
    for (std::uint64_t i = 0; i < in_group; ++i) {
      std::uint64_t value[5];
      for (int f = 0; f < 5; ++f) {
        const std::uint64_t above = packed.Field(widths[f]);
        above_min[f] = std::min(above_min[f], above);
        above_max[f] = std::max(above_max[f], above);
        value[f] = minimum[f] + above;
      }
      const std::uint64_t relative = next_relative + value[0];
      Require(relative < tile_count,
              "tile " + Str(relative) + " of " + Str(tile_count));
      next_relative = relative + 1;
      Tile tile;
      tile.number = first_tile + relative;
      tile.mode = value[1];
      tile.a = value[2];
      tile.b = value[3];
      const std::uint64_t bytes = value[4];
      Require(tile.mode <= 1 && tile.a <= 16384 && tile.b <= 16384 &&
                  bytes >= 1 && bytes <= 67584,
              "tile header out of range");
      Require(bytes <= record.size() - at, "payload past the record");
      const Box box = BoxOf(grid, tile.number);
      const Bits payload(record, at, at + bytes);
      const std::uint64_t u = box.height * box.width;
      const Local changes = tile.mode == 0 ? DecodeSparse(payload, tile, u, w)
                                           : DecodeDense(payload, tile, u, w);
      for (const auto& [index, d] : changes) {
        const std::uint64_t unit = (box.row + index / box.width) * grid.cols +
                                   box.col + index % box.width;
        Require(unit >= begin && unit < end,
                "unit " + Str(unit) + " outside the slice");
        result.emplace_back(unit, d);
      }
      at += bytes;
    }
    packed.ZeroToWholeByte();
    packed.AtEnd("packed headers");
    for (int f = 0; f < 5; ++f) {
      Require(above_min[f] == 0 && BitCount(above_max[f]) == widths[f],
              "a minimum or width is not the tightest");
    }
  }
  Require(at == record.size(), "bytes after the last payload");
  Require(nnz == result.size(),
          "nnz " + Str(nnz) + ", found " + Str(result.size()));
  std::sort(result.begin(), result.end());
  return result;
}

Bytes EncodeRecord(const std::vector<FlatChange>& changes,
                   const std::vector<std::uint64_t>& shape,
                   std::uint32_t element_bytes, std::uint64_t begin,
                   std::uint64_t end) {
  const Grid grid = GridOf(shape, element_bytes);
  const std::uint32_t w = UnitBits(element_bytes);
  std::map<std::uint64_t, Local> by_tile;
  for (const auto& [unit, d] : changes) {
    Require(unit >= begin && unit < end && d != 0, "a change not of the slice");
    const std::uint64_t row = unit / grid.cols;
    const std::uint64_t col = unit % grid.cols;
    const std::uint64_t tile =
        row / grid.tile_rows * grid.tiles_per_band + col / grid.tile_cols;
    const Box box = BoxOf(grid, tile);
    by_tile[tile][(row - box.row) * box.width + (col - box.col)] = d;
  }
  struct Listed {
    std::uint64_t value[5];
    Bytes payload;
  };
  std::vector<Listed> listed;
  std::uint64_t next_relative = 0;
  const std::uint64_t first_tile = FirstTile(grid, begin);
  for (const auto& [number, local] : by_tile) {
    const Box box = BoxOf(grid, number);
    Tile tile;
    Listed entry;
    entry.payload = EncodeTile(local, box.height * box.width, w, &tile);
    const std::uint64_t relative = number - first_tile;
    entry.value[0] = relative - next_relative;
    entry.value[1] = tile.mode;
    entry.value[2] = tile.a;
    entry.value[3] = tile.b;
    entry.value[4] = entry.payload.size();
    next_relative = relative + 1;
    listed.push_back(std::move(entry));
  }
  Bytes headers;
  Bytes groups;
  const std::uint64_t group_count = CeilDiv(listed.size(), 64);
  PutLittle(listed.size(), 4, &headers);
  PutLittle(0, 4, &headers);
  PutLittle(changes.size(), 8, &headers);
  next_relative = 0;
  for (std::uint64_t g = 0; g < group_count; ++g) {
    const auto from = listed.begin() + static_cast<std::ptrdiff_t>(64 * g);
    const auto to = listed.end() - from > 64 ? from + 64 : listed.end();
    std::uint64_t low[5];
    std::uint64_t high[5];
    for (int f = 0; f < 5; ++f) {
      low[f] = UINT64_MAX;
      high[f] = 0;
      for (auto it = from; it != to; ++it) {
        low[f] = std::min(low[f], it->value[f]);
        high[f] = std::max(high[f], it->value[f]);
      }
    }
    PutLittle(16 + 28 * group_count + groups.size(), 4, &headers);
    PutLittle(next_relative, 4, &headers);
    PutLittle(low[0], 4, &headers);
    PutLittle(low[4], 4, &headers);
    PutLittle(low[2], 2, &headers);
    PutLittle(low[3], 2, &headers);
    PutLittle(low[1], 1, &headers);
    for (int f = 0; f < 5; ++f) {
      PutLittle(BitCount(high[f] - low[f]), 1, &headers);
    }
    PutLittle(0, 2, &headers);
    BitSink packed;
    for (auto it = from; it != to; ++it) {
      for (int f = 0; f < 5; ++f) {
        packed.Field(it->value[f] - low[f], BitCount(high[f] - low[f]));
      }
      next_relative += it->value[0] + 1;
    }
    groups.insert(groups.end(), packed.bytes().begin(), packed.bytes().end());
    for (auto it = from; it != to; ++it) {
      groups.insert(groups.end(), it->payload.begin(), it->payload.end());
    }
  }
  headers.insert(headers.end(), groups.begin(), groups.end());
  return headers;
}

void Apply(const std::vector<FlatChange>& changes, std::uint32_t element_bytes,
           Bytes* tensor) {
  const std::uint32_t unit_bytes = UnitBits(element_bytes) / 8;
  for (const auto& [unit, d] : changes) {
    Require(unit < tensor->size() / unit_bytes, "a unit past the tensor");
    std::uint64_t bits = Little(*tensor, unit * unit_bytes, unit_bytes);
    bits += static_cast<std::uint64_t>(d);
    for (std::uint32_t i = 0; i < unit_bytes; ++i) {
      (*tensor)[unit * unit_bytes + i] =
          static_cast<std::uint8_t>(bits >> 8 * i);
    }
  }
}

std::vector<FlatChange> Difference(const Bytes& before, const Bytes& after,
                                   std::uint32_t element_bytes) {
  Require(before.size() == after.size(), "tensors of different sizes");
  const std::uint32_t unit_bytes = UnitBits(element_bytes) / 8;
  std::vector<FlatChange> changes;
  for (std::uint64_t unit = 0; unit < before.size() / unit_bytes; ++unit) {
    const auto was = static_cast<std::int64_t>(
        Little(before, unit * unit_bytes, unit_bytes));
    const auto is =
        static_cast<std::int64_t>(Little(after, unit * unit_bytes, unit_bytes));
    if (was != is) changes.emplace_back(unit, is - was);
  }
  return changes;
}

// ------------------------------------------------------------------------ L61
namespace {

constexpr std::uint64_t kP = (std::uint64_t{1} << 61) - 1;
constexpr std::uint64_t kG = 0x9e3779b97f4a7c15;

std::uint64_t Mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

std::uint64_t MulModP(std::uint64_t a, std::uint64_t b) {
  return static_cast<std::uint64_t>(static_cast<unsigned __int128>(a) * b % kP);
}

std::uint64_t Weight(std::uint64_t seed, std::uint64_t word) {
  const std::uint64_t seed_a = Mix(seed + kG);
  const std::uint64_t seed_b = Mix(seed + 2 * kG);
  std::uint64_t a = Mix(seed_a + (word % 4096 + 1) * kG) >> 6;
  if (a == 0) a = 1;
  std::uint64_t b = Mix(seed_b + (word / 4096 + 1) * kG) >> 3;
  if (b == 0 || b == kP) b = 1;
  return MulModP(a, b);
}

}  // namespace

std::uint64_t L61Sum(std::uint64_t a, std::uint64_t b) { return (a + b) % kP; }

std::uint64_t L61(std::uint64_t seed, const Bytes& bytes,
                  std::uint64_t offset) {
  std::uint64_t sum = 0;
  std::size_t i = 0;
  while (i < bytes.size()) {
    const std::uint64_t word = (offset + i) / 4;
    std::uint64_t u = 0;
    for (; i < bytes.size() && (offset + i) / 4 == word; ++i) {
      u += static_cast<std::uint64_t>(bytes[i]) << (8 * ((offset + i) % 4));
    }
    sum = L61Sum(sum, MulModP(Weight(seed, word), u));
  }
  return sum;
}

std::uint64_t L61OfChanges(std::uint64_t seed,
                           const std::vector<FlatChange>& changes,
                           std::uint32_t element_bytes) {
  const std::uint32_t unit_bytes = UnitBits(element_bytes) / 8;
  std::uint64_t sum = 0;
  for (const auto& [unit, d] : changes) {
    const std::uint64_t offset = unit * unit_bytes;
    const std::uint64_t term =
        MulModP(Weight(seed, offset / 4),
                MulModP(Magnitude(d), std::uint64_t{1} << (8 * (offset % 4))));
    sum = L61Sum(sum, d < 0 && term != 0 ? kP - term : term);
  }
  return sum;
}

}  // namespace kedge_plain
