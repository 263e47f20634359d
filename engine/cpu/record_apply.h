#ifndef KEDGE_ENGINE_CPU_RECORD_APPLY_H_
#define KEDGE_ENGINE_CPU_RECORD_APPLY_H_

// A record in, weights changed in place; or only checked.

#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kedge/format/box_target.h"
#include "kedge/format/l61.h"
#include "kedge/format/limits.h"
#include "kedge/format/tile_grid.h"

namespace kedge {

// Decoders load whole words: this many bytes after a record must be readable
// (their values do not matter). A segment's tail has them.
inline constexpr std::uint64_t kRecordSlackBytes = kSegmentTailBytes;

// What a record says about itself, against the manifest's columns.
struct RecordSummary {
  std::uint64_t nnz = 0;
  std::uint64_t l61 = 0;
};

// Decodes a record completely, writing nothing: every rule of spec/segment.md,
// nnz and L(record). kDataLoss names the first rule that is broken.
absl::StatusOr<RecordSummary> CheckRecord(std::span<const std::byte> record,
                                          const TileGrid& grid,
                                          const UnitRange& slice,
                                          std::uint32_t unit_bytes,
                                          const L61Key& key);

// Adds a record into `targets`, boxes of the tensor that the record belongs to:
// w += difference modulo 2^(8 unit_bytes) for every unit that lies in a box.
// Units outside every box are skipped, and tiles outside every box are not
// decoded. Boxes may overlap (replicas): each gets the change. O(nnz) time, no
// allocation that grows with the tensor.
//
// Returns how many units were written (a unit in two boxes counts twice).
// kDataLoss if the record is malformed; tiles before the bad one have then been
// applied. Never writes outside a box, whatever the bytes say.
absl::StatusOr<std::uint64_t> ApplyRecord(std::span<const std::byte> record,
                                          const TileGrid& grid,
                                          const UnitRange& slice,
                                          std::uint32_t unit_bytes,
                                          std::span<const BoxTarget> targets);

// Copies the units of `slice` (contiguous at `bytes`) that lie in `target`.
// Returns how many units were written.
std::uint64_t CopySliceToBox(const std::byte* bytes, const TileGrid& grid,
                             const UnitRange& slice, const BoxTarget& target);

// The inverse: copies the units of `slice` that lie in `target` to their places
// in the contiguous `bytes`.
std::uint64_t CopyBoxToSlice(const BoxTarget& target, const TileGrid& grid,
                             const UnitRange& slice, std::byte* bytes);

}  // namespace kedge

#endif  // KEDGE_ENGINE_CPU_RECORD_APPLY_H_
