#ifndef KEDGE_FORMAT_CODEC_H_
#define KEDGE_FORMAT_CODEC_H_

// Codec 1 ("R2"): how the changes of one slice of a tensor become the bytes of
// a record, and the plain code for it. See spec/segment.md. engine/cpu and
// engine/cuda have fast forms that give the same bytes; what all of them share
// is in format/record_layout.h.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kedge/format/record_layout.h"
#include "kedge/format/tile_grid.h"

namespace kedge {

// One changed unit of a tile: its tile-local index and new - old of the raw
// bits as unsigned integers, never 0, |difference| < 2^(8 * unit_bytes).
struct Change {
  std::uint32_t index = 0;
  std::int64_t difference = 0;

  friend bool operator==(const Change&, const Change&) = default;
};

// One tile of a record, ready to decode.
struct TileView {
  std::uint64_t tile = 0;  // index in the tensor's grid
  TileMode mode = TileMode::kSparse;
  std::uint32_t a = 0;
  std::uint32_t b = 0;
  std::span<const std::byte> payload;
};

// Encodes one tile. `changes` is not empty and ascends in index; `units` is the
// tile's unit count. Appends the payload and returns its header; `tile` is not
// looked at.
struct TileHeader {
  TileMode mode = TileMode::kSparse;
  std::uint32_t a = 0;
  std::uint32_t b = 0;
  std::uint32_t bytes = 0;
};
TileHeader EncodeTile(std::span<const Change> changes, std::uint32_t units,
                      std::uint32_t unit_bytes, std::vector<std::byte>* out);

// Decodes one tile in full and checks every rule of spec/segment.md (a list
// beyond the tile, A and B sharing a unit, a plane beyond the payload, padding
// bits set, a non-canonical escape). Replaces `*changes`, ascending.
// kDataLoss says which rule.
absl::Status DecodeTile(const TileView& tile, std::uint32_t units,
                        std::uint32_t unit_bytes, std::vector<Change>* changes);

// Assembles a record from encoded tiles. Reusable: Start() again.
class RecordBuilder {
 public:
  // `tiles` of the slice (TileGrid::TilesOf); added tiles count from its first.
  void Start(TileRange tiles);
  // The buffer to which the next tile's payload is appended (EncodeTile).
  std::vector<std::byte>* payload() { return &payloads_; }
  // Adds the tile whose payload has just been appended. Ascending. `nnz` >= 1.
  void AddTile(std::uint64_t tile, const TileHeader& header, std::uint32_t nnz);
  bool empty() const { return tiles_.empty(); }
  std::uint64_t nnz() const { return nnz_; }
  // An upper bound of what Finish would append now.
  std::uint64_t bound_bytes() const;
  // Appends the record, zero-padded to kRecordAlignment, to `out`. Returns its
  // size without the padding; that is at most kMaxRecordBytes, which the caller
  // ensures by splitting slices (bound_bytes()).
  std::uint64_t Finish(std::vector<std::byte>* out);

 private:
  struct Entry {
    std::uint32_t tile;
    TileHeader header;
  };
  TileRange range_;
  std::vector<Entry> tiles_;
  std::vector<std::byte> payloads_;
  std::uint64_t nnz_ = 0;
};

// A parsed record: headers checked, tiles found; payloads not yet decoded.
// Borrows the bytes.
class RecordView {
 public:
  // Checks record and group headers against each other and the size: groups in
  // order without holes, every payload inside, tiles ascending and inside
  // `tiles`, the last byte used. kDataLoss says which rule, with the offset in
  // the record.
  static absl::StatusOr<RecordView> Parse(std::span<const std::byte> record,
                                          TileRange tiles);

  std::uint64_t nnz() const { return nnz_; }
  std::span<const TileView> tiles() const { return tiles_; }

 private:
  std::uint64_t nnz_ = 0;
  std::vector<TileView> tiles_;
};

// Encodes a slice from its changes by flat unit index within `slice`, the plain
// way; for tests and tools. `changes[i].index` counts from slice.begin (u32:
// slices of tests are small).
std::vector<std::byte> EncodeRecordScalar(const TileGrid& grid,
                                          const UnitRange& slice,
                                          std::uint32_t unit_bytes,
                                          std::span<const Change> changes);

// Calls `visit(flat unit index, difference)` for every change of a record in
// tile order. Checks everything, also that each unit lies in `slice` and that
// nnz is right.
template <typename Visit>
absl::Status VisitRecord(std::span<const std::byte> record,
                         const TileGrid& grid, const UnitRange& slice,
                         std::uint32_t unit_bytes, Visit&& visit);

// ------------------------------------------------------------------ internals
namespace internal {
absl::Status UnitOutsideSlice(std::uint64_t unit, const UnitRange& slice);
absl::Status WrongNnz(std::uint64_t expected, std::uint64_t found);
}  // namespace internal

template <typename Visit>
absl::Status VisitRecord(std::span<const std::byte> record,
                         const TileGrid& grid, const UnitRange& slice,
                         std::uint32_t unit_bytes, Visit&& visit) {
  auto view = RecordView::Parse(record, grid.TilesOf(slice));
  if (!view.ok()) return view.status();
  std::vector<Change> changes;
  std::uint64_t nnz = 0;
  for (const TileView& tile : view->tiles()) {
    const TileBox box = grid.Box(tile.tile);
    if (absl::Status status =
            DecodeTile(tile, box.unit_count(), unit_bytes, &changes);
        !status.ok()) {
      return status;
    }
    for (const Change& change : changes) {
      const std::uint64_t unit = grid.FlatIndex(box, change.index);
      if (unit < slice.begin || unit >= slice.end) {
        return internal::UnitOutsideSlice(unit, slice);
      }
      visit(unit, change.difference);
    }
    nnz += changes.size();
  }
  if (nnz != view->nnz()) return internal::WrongNnz(view->nnz(), nnz);
  return absl::OkStatus();
}

}  // namespace kedge

#endif  // KEDGE_FORMAT_CODEC_H_
