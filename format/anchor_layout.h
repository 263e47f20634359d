#ifndef KEDGE_FORMAT_ANCHOR_LAYOUT_H_
#define KEDGE_FORMAT_ANCHOR_LAYOUT_H_

// Where every slice of an anchor goes: computed once a run from the table
// alone, so that ranks and threads write without talking. See spec/anchor.md.

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kedge/format/manifest.h"
#include "kedge/format/tensor_table.h"

namespace kedge {

struct AnchorLayoutOptions {
  std::uint64_t anchor_file_bytes = std::uint64_t{1} << 30;  // aimed at
  std::uint64_t slice_bytes = std::uint64_t{32} << 20;       // at most
  std::uint32_t rank = 0;
};

struct AnchorLayout {
  struct PlannedFile {
    FileId id;
    std::uint64_t bytes = 0;
    std::uint32_t slice_count = 0;
    std::uint32_t piece_count = 0;
  };
  std::vector<PlannedFile> files;
  std::vector<AnchorSlice> slices;  // ascending by (tensor, slice.begin)
  // Of each slice: the number, within its file, of its first piece.
  std::vector<std::uint32_t> first_piece;
};

// What a rank holds of a tensor.
struct OwnedSlice {
  std::uint32_t tensor = 0;
  UnitRange slice;
};

// Whether what the ranks hold, by rank, is every unit of every tensor that is
// not tied, once. A rank may hold nothing, and its slices come in any order.
//
// kFailedPrecondition names the tensor, the range, and the ranks at both ends
// of a gap, or both owners of what is held twice.
absl::Status CheckOwnership(std::span<const std::vector<OwnedSlice>> by_rank,
                            const TensorTable& table);

// There are ceil(total / anchor_file_bytes) files (total: of all slices, each
// rounded up to kSliceAlignment), and each slice in turn goes to the one with
// the fewest bytes so far, the lowest number of equals. Slices of one size thus
// go round-robin; where sizes differ, files still stay within one slice of each
// other, which plain round-robin does not give where large and small tensors
// alternate.
//
// `owned` is what the rank holds, in any order; nothing at all gives a layout
// without files. The second form plans for a rank that holds everything.
//
// kInvalidArgument if more than kMaxFilesPerRank files would be needed, an
// option is out of range, or `owned` overlaps or does not fit the table.
absl::StatusOr<AnchorLayout> PlanAnchor(const TensorTable& table,
                                        const AnchorLayoutOptions& options,
                                        const std::vector<OwnedSlice>& owned);
absl::StatusOr<AnchorLayout> PlanAnchor(const TensorTable& table,
                                        const AnchorLayoutOptions& options);

}  // namespace kedge

#endif  // KEDGE_FORMAT_ANCHOR_LAYOUT_H_
