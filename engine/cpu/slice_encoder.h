#ifndef KEDGE_ENGINE_CPU_SLICE_ENCODER_H_
#define KEDGE_ENGINE_CPU_SLICE_ENCODER_H_

// Old and new weights in, one record out: diff, encode and the checksum of the
// difference in one pass over memory. The bytes equal those of the plain code
// in format/codec.h.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kedge/format/l61.h"
#include "kedge/format/limits.h"
#include "kedge/format/tile_grid.h"

namespace kedge {

// A slice has at most this many units, so that its record stays below
// kMaxRecordBytes whatever it holds.
inline constexpr std::uint64_t kMaxSliceUnits = std::uint64_t{1} << 27;

struct EncodedSlice {
  std::uint64_t nnz = 0;
  // Bytes of the record without its padding; 0 if nothing changed, in which
  // case nothing was appended.
  std::uint64_t record_bytes = 0;
  std::uint64_t l61 = 0;  // L(record), in [0, p)
};

// Thread safety: none; one encoder a thread. Holds scratch that is reused:
// about 1 MiB at densities of a few percent, at most 10 MiB when everything
// changes (pages that no change needs are never touched).
class SliceEncoder {
 public:
  explicit SliceEncoder(const L61Key& key);
  ~SliceEncoder();
  SliceEncoder(const SliceEncoder&) = delete;
  SliceEncoder& operator=(const SliceEncoder&) = delete;

  // Compares `slice.count()` units at `old_bytes` and `new_bytes`, which are
  // the units [slice.begin, slice.end) of the tensor, contiguous and in order,
  // at any alignment, and appends the record, zero-padded to kRecordAlignment,
  // to `out`. 1 <= slice.count() <= kMaxSliceUnits. unit_bytes is 1, 2 or 4.
  EncodedSlice Encode(const TileGrid& grid, const UnitRange& slice,
                      std::uint32_t unit_bytes, const std::byte* old_bytes,
                      const std::byte* new_bytes, std::vector<std::byte>* out);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kedge

#endif  // KEDGE_ENGINE_CPU_SLICE_ENCODER_H_
