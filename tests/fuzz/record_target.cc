// Goal: the plain decoder of format/codec.h and the fast one of engine/cpu give
// one verdict and one change of weights for any bytes, never read beyond the
// record (and its slack, for the fast one) and never write outside the box.
//
// Input: what tensor, slice and box (see TakePlace), then by the first byte
//   raw      the record
//   tiles    tiles' headers and payloads, put into a record that hangs
//            together, so that every byte reaches the tile decoders
//   encode   changes of weights, which both encoders must turn into one record

#include <algorithm>
#include <cstring>
#include <span>
#include <vector>

#include "kedge/engine/cpu/record_apply.h"
#include "kedge/engine/cpu/slice_encoder.h"
#include "kedge/format/codec.h"
#include "kedge/format/l61.h"
#include "kedge/tests/fuzz/fuzz_input.h"

namespace kedge::fuzz {
namespace {

constexpr std::size_t kGuardBytes = 64;

// A box in memory of its own, with guard bytes before, behind and, where its
// strides leave gaps, inside.
struct BoxMemory {
  std::vector<std::byte> bytes;
  std::size_t origin = 0;  // of unit (row_begin, col_begin)
  BoxTarget box;           // its data is null

  BoxTarget Target() {
    BoxTarget target = box;
    target.data = bytes.data() + origin;
    return target;
  }
};

struct Place {
  std::uint32_t unit_bytes = 1;
  std::uint32_t units_per_element = 1;
  TileGrid grid;
  UnitRange slice;
  BoxMemory box;
};

// What unit `unit` of the tensor holds before it is encoded.
std::uint32_t OldValue(std::uint64_t unit) {
  return static_cast<std::uint32_t>(SplitMix64(unit + 1));
}

// Lays out `box` with one of several kinds of strides.
BoxMemory MakeBox(const Place& place, BoxTarget box, unsigned layout) {
  BoxMemory memory;
  const std::int64_t element = place.unit_bytes * place.units_per_element;
  const auto rows = static_cast<std::int64_t>(box.row_end - box.row_begin);
  const auto cols = static_cast<std::int64_t>((box.col_end - box.col_begin) /
                                              place.units_per_element);
  box.unit_bytes = place.unit_bytes;
  box.units_per_element = place.units_per_element;
  box.col_stride_bytes = element;
  box.row_stride_bytes = cols * element;
  switch (layout % 5) {
    case 1:  // a view into a wider matrix
      box.row_stride_bytes += 3 * element;
      break;
    case 2:  // transposed
      box.col_stride_bytes = rows * element;
      box.row_stride_bytes = element;
      break;
    case 3:  // upside down
      box.row_stride_bytes = -box.row_stride_bytes;
      break;
    case 4:  // every other column
      box.col_stride_bytes = 2 * element;
      box.row_stride_bytes *= 2;
      break;
    default:
      break;
  }
  const std::int64_t to_last_row = (rows - 1) * box.row_stride_bytes;
  const std::int64_t to_last_col = (cols - 1) * box.col_stride_bytes;
  memory.origin = kGuardBytes + static_cast<std::size_t>(
                                    std::max<std::int64_t>(0, -to_last_row));
  const auto size =
      2 * kGuardBytes +
      static_cast<std::size_t>(std::abs(to_last_row) + to_last_col + element);
  // Neighbours differ, so that a change in the wrong place is one.
  static const auto* const pattern = [] {
    auto* const bytes = new std::vector<std::byte>(std::size_t{1} << 20);
    for (std::size_t i = 0; i < bytes->size(); ++i) {
      (*bytes)[i] = static_cast<std::byte>(i * 37 + (i >> 8));
    }
    return bytes;
  }();
  KEDGE_CHECK(size <= pattern->size());
  memory.bytes.assign(pattern->begin(), pattern->begin() + size);
  memory.box = box;
  return memory;
}

// Calls visit(address) for every unit of the box.
template <class Visit>
void ForEachUnit(BoxMemory& memory, const Visit& visit) {
  const BoxTarget target = memory.Target();
  for (std::uint64_t row = target.row_begin; row < target.row_end; ++row) {
    for (std::uint64_t col = target.col_begin; col < target.col_end; ++col) {
      visit(target.At(row, col));
    }
  }
}

Place TakePlace(Input& input) {
  Place place;
  const auto unit = input.Take<std::uint8_t>() % 4;
  place.unit_bytes = unit == 0 ? 1 : unit == 1 ? 2 : 4;
  place.units_per_element = unit == 3 ? 2 : 1;
  // Up to four tiles, or three in one row.
  const std::uint64_t rows = input.TakeBetween<std::uint16_t>(1, 150);
  const std::uint64_t shape[] = {
      rows, input.TakeBetween<std::uint16_t>(1, rows == 1 ? 40'000 : 150)};
  place.grid = MakeTileGrid(shape, place.units_per_element);
  const std::uint64_t step = place.units_per_element;
  const std::uint64_t elements = place.grid.unit_count() / step;
  const std::uint64_t begin = input.TakeBetween<std::uint32_t>(0, elements - 1);
  place.slice.begin = begin * step;
  place.slice.end =
      (begin + input.TakeBetween<std::uint32_t>(1, elements - begin)) * step;
  BoxTarget box;
  box.row_begin = input.TakeBetween<std::uint16_t>(0, place.grid.rows - 1);
  box.row_end =
      input.TakeBetween<std::uint16_t>(box.row_begin + 1, place.grid.rows);
  const std::uint64_t cols = place.grid.cols / step;
  box.col_begin = input.TakeBetween<std::uint16_t>(0, cols - 1) * step;
  box.col_end =
      input.TakeBetween<std::uint16_t>(box.col_begin / step + 1, cols) * step;
  place.box = MakeBox(place, box, input.Take<std::uint8_t>());
  return place;
}

std::vector<std::byte> BuildFromTiles(Input& input, const Place& place) {
  const TileRange tiles = place.grid.TilesOf(place.slice);
  RecordBuilder builder;
  builder.Start(tiles);
  std::uint64_t tile = tiles.first;
  while (input.size() > 0) {
    tile += input.Take<std::uint8_t>() % 4;
    if (tile >= tiles.first + tiles.count) break;
    TileHeader header;
    header.mode = static_cast<TileMode>(input.Take<std::uint8_t>() % 2);
    header.a = input.Take<std::uint16_t>();
    header.b = input.Take<std::uint16_t>();
    const auto nnz = input.Take<std::uint16_t>();
    const auto payload = input.TakeBytes(input.Take<std::uint16_t>());
    header.bytes = static_cast<std::uint32_t>(payload.size());
    builder.payload()->insert(builder.payload()->end(), payload.begin(),
                              payload.end());
    builder.AddTile(tile++, header,
                    header.mode == TileMode::kSparse && nnz == 0
                        ? header.a + header.b
                        : nnz);
  }
  std::vector<std::byte> record;
  if (!builder.empty()) record.resize(builder.Finish(&record));
  return record;
}

// The changes that the rest of `input` says, made by both encoders.
std::vector<std::byte> Encode(Input& input, const Place& place,
                              const L61Key& key) {
  const std::uint64_t count = place.slice.count();
  const std::uint64_t mask = (std::uint64_t{1} << (8 * place.unit_bytes)) - 1;
  std::vector<std::byte> old_bytes(count * place.unit_bytes);
  for (std::uint64_t i = 0; i < count; ++i) {
    const std::uint32_t value = OldValue(place.slice.begin + i);
    std::memcpy(old_bytes.data() + i * place.unit_bytes, &value,
                place.unit_bytes);
  }
  std::vector<std::byte> new_bytes = old_bytes;
  std::vector<Change> changes;
  std::uint64_t at = 0;
  while (input.size() > 0) {
    at += input.Take<std::uint16_t>();
    const auto op = input.Take<std::uint8_t>();
    // How many units in a row change alike.
    const std::uint64_t run = (op & 4) != 0 ? 8u * (op >> 3) : op >> 3;
    const auto by = input.Take<std::uint32_t>();
    for (std::uint64_t i = 0; i <= run && at < count; ++i, ++at) {
      const std::uint64_t old_value = OldValue(place.slice.begin + at) & mask;
      std::uint64_t new_value = old_value;
      if ((op & 3) == 0) new_value += 1;
      if ((op & 3) == 1) new_value -= 1;
      if ((op & 3) == 2) new_value += by >> 24;
      if ((op & 3) == 3) new_value = by + i * 0x01010101u;
      new_value &= mask;
      if (new_value == old_value) continue;
      std::memcpy(new_bytes.data() + at * place.unit_bytes, &new_value,
                  place.unit_bytes);
      changes.push_back({static_cast<std::uint32_t>(at),
                         static_cast<std::int64_t>(new_value) -
                             static_cast<std::int64_t>(old_value)});
    }
    if (at >= count) break;
  }
  static SliceEncoder& encoder = *new SliceEncoder(key);
  std::vector<std::byte> record;
  const EncodedSlice encoded =
      encoder.Encode(place.grid, place.slice, place.unit_bytes,
                     old_bytes.data(), new_bytes.data(), &record);
  KEDGE_CHECK(encoded.nnz == changes.size());
  record.resize(encoded.record_bytes);
  KEDGE_CHECK(record == EncodeRecordScalar(place.grid, place.slice,
                                           place.unit_bytes, changes));
  if (record.empty()) return record;
  std::size_t next = 0;
  Require(VisitRecord(record, place.grid, place.slice, place.unit_bytes,
                      [&](std::uint64_t, std::int64_t) { ++next; }),
          "decode what was encoded");
  KEDGE_CHECK(next == changes.size());
  std::vector<std::byte> padded = record;
  padded.resize(record.size() + kRecordSlackBytes);
  const auto summary =
      CheckRecord(std::span(padded).first(record.size()), place.grid,
                  place.slice, place.unit_bytes, key);
  Require(summary.status(), "check what was encoded");
  KEDGE_CHECK(summary->nnz == encoded.nnz && summary->l61 == encoded.l61);
  return record;
}

// A record with slack of which nothing may depend.
std::vector<std::byte> WithSlack(std::span<const std::byte> record,
                                 std::byte slack) {
  std::vector<std::byte> bytes(record.size() + kRecordSlackBytes, slack);
  std::copy(record.begin(), record.end(), bytes.begin());
  return bytes;
}

struct FlatChange {
  std::uint64_t unit;
  std::int64_t difference;
};

// Applies the record to `memory` with engine/cpu and, if it is sound, with the
// plain `changes`, and compares every byte.
void CheckApply(std::span<const std::byte> record, const Place& place,
                bool sound, std::span<const FlatChange> changes,
                BoxMemory memory) {
  const std::vector<std::byte> before = memory.bytes;
  const std::vector<std::byte> padded = WithSlack(record, std::byte{0x5a});
  const BoxTarget target = memory.Target();
  const auto written =
      ApplyRecord(std::span(padded).first(record.size()), place.grid,
                  place.slice, place.unit_bytes, std::span(&target, 1));
  if (sound) {
    Require(written.status(), "apply a sound record");
    BoxMemory expected = memory;
    expected.bytes = before;
    const BoxTarget plain = expected.Target();
    std::uint64_t count = 0;
    for (const FlatChange& change : changes) {
      const std::uint64_t row = change.unit / place.grid.cols;
      const std::uint64_t col = change.unit % place.grid.cols;
      if (!plain.Contains(row, col)) continue;
      std::uint64_t value = 0;
      std::memcpy(&value, plain.At(row, col), place.unit_bytes);
      value += static_cast<std::uint64_t>(change.difference);
      std::memcpy(plain.At(row, col), &value, place.unit_bytes);
      ++count;
    }
    KEDGE_CHECK(*written == count);
    KEDGE_CHECK(memory.bytes == expected.bytes);
    return;
  }
  const bool whole = target.unit_count() == place.grid.unit_count();
  // Tiles that no box touches are not looked at, nor what is wrong with them.
  if (whole) KEDGE_CHECK(!written.ok());
  if (!written.ok()) RequireRefusal(written.status());
  if (memory.bytes == before) return;
  // Sound tiles before the bad one: with their units set back, the rest is as
  // it was.
  ForEachUnit(memory, [&](std::byte* at) {
    std::memcpy(at, before.data() + (at - memory.bytes.data()),
                place.unit_bytes);
  });
  KEDGE_CHECK(memory.bytes == before);
}

void CheckRecordBytes(const std::vector<std::byte>& record, Place& place,
                      const L61Key& key) {
  std::vector<FlatChange> changes;
  std::uint64_t l61 = 0;
  const absl::Status verdict = VisitRecord(
      record, place.grid, place.slice, place.unit_bytes,
      [&](std::uint64_t unit, std::int64_t difference) {
        KEDGE_CHECK(unit >= place.slice.begin && unit < place.slice.end);
        KEDGE_CHECK(difference != 0);
        changes.push_back({unit, difference});
        l61 = L61Add(l61, L61OfChange(key, unit, place.unit_bytes, difference));
      });
  if (!verdict.ok()) RequireRefusal(verdict);
  for (const std::byte slack : {std::byte{0}, std::byte{0xff}}) {
    const std::vector<std::byte> padded = WithSlack(record, slack);
    const auto summary =
        CheckRecord(std::span(padded).first(record.size()), place.grid,
                    place.slice, place.unit_bytes, key);
    if (summary.ok() != verdict.ok()) {
      std::fprintf(stderr, "plain: %s\nengine/cpu: %s\n",
                   verdict.ToString().c_str(),
                   summary.status().ToString().c_str());
    }
    KEDGE_CHECK(summary.ok() == verdict.ok());
    if (!summary.ok()) {
      RequireRefusal(summary.status());
      continue;
    }
    KEDGE_CHECK(summary->nnz == changes.size());
    KEDGE_CHECK(summary->l61 == l61);
  }
  BoxTarget all;
  all.row_end = place.grid.rows;
  all.col_end = place.grid.cols;
  CheckApply(record, place, verdict.ok(), changes, MakeBox(place, all, 0));
  CheckApply(record, place, verdict.ok(), changes, place.box);
}

}  // namespace
}  // namespace kedge::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data,
                                      std::size_t size) {
  using namespace kedge;        // NOLINT: the whole file is one function
  using namespace kedge::fuzz;  // NOLINT
  Input input(data, size);
  const L61Key key = L61Key::FromSeed(61);
  const auto mode = input.Take<std::uint8_t>() % 3;
  Place place = TakePlace(input);
  std::vector<std::byte> record;
  if (mode == 0) record = input.TakeRest();
  if (mode == 1) record = BuildFromTiles(input, place);
  if (mode == 2) record = Encode(input, place, key);
  CheckRecordBytes(record, place, key);
  return 0;
}
