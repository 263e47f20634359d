#include "kedge/reader/anchor_load.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kedge/format/limits.h"
#include "kedge/format/status.h"

namespace kedge {

absl::StatusOr<std::vector<AnchorPiece>> PiecesOf(
    const PublishedAnchor& anchor) {
  const AnchorManifest& manifest = anchor.manifest;
  std::vector<std::uint32_t> order(manifest.slices.size());
  for (std::uint32_t i = 0; i < order.size(); ++i) order[i] = i;
  std::sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) {
    return std::tie(manifest.slices[a].file, manifest.slices[a].offset) <
           std::tie(manifest.slices[b].file, manifest.slices[b].offset);
  });
  std::vector<AnchorPiece> pieces;
  pieces.reserve(order.size());
  std::vector<std::uint32_t> next_number(manifest.files.size(), 0);
  for (const std::uint32_t index : order) {
    const AnchorSlice& slice = manifest.slices[index];
    const std::uint32_t unit_bytes =
        UnitBytes((*anchor.table)[slice.tensor].dtype);
    const std::uint64_t bytes = slice.slice.count() * unit_bytes;
    const DataFile& file = manifest.files[slice.file];
    if (slice.offset > file.bytes || bytes > file.bytes - slice.offset) {
      return DataLoss({.where = anchor.path,
                       .what = absl::StrCat("a slice of tensor ",
                                            (*anchor.table)[slice.tensor].name,
                                            " ends outside its file"),
                       .expected = absl::StrCat("at most ", file.bytes),
                       .found = absl::StrCat(slice.offset, " + ", bytes),
                       .advice = "run `kedge fsck`"});
    }
    for (std::uint64_t done = 0; done < bytes; done += kPieceBytes) {
      AnchorPiece piece;
      piece.tensor = slice.tensor;
      piece.bytes = std::min(kPieceBytes, bytes - done);
      piece.units.begin = slice.slice.begin + done / unit_bytes;
      piece.units.end = piece.units.begin + piece.bytes / unit_bytes;
      piece.file = slice.file;
      piece.number = next_number[slice.file]++;
      piece.offset = slice.offset + done;
      pieces.push_back(piece);
    }
  }
  return pieces;
}

AnchorLoad::AnchorLoad(const ReadContext* context,
                       const PublishedAnchor& anchor)
    : files_(context, anchor.path, anchor.version.step,
             &anchor.manifest.files) {}

absl::StatusOr<std::unique_ptr<AnchorLoad>> AnchorLoad::Open(
    const ReadContext* context, const Binding& binding, const TensorMask& mask,
    const PublishedAnchor& anchor) {
  std::unique_ptr<AnchorLoad> load(new AnchorLoad(context, anchor));
  KEDGE_ASSIGN_OR_RETURN(load->pieces_, PiecesOf(anchor));
  std::vector<AnchorPiece>& pieces = load->pieces_;
  std::erase_if(pieces, [&](const AnchorPiece& piece) {
    if (!mask.empty() && !mask[piece.tensor]) return true;
    const std::vector<BoxTarget>& boxes =
        binding.weights().tensors[piece.tensor].boxes;
    return std::none_of(boxes.begin(), boxes.end(), [&](const BoxTarget& box) {
      return Touches(binding.grid(piece.tensor), piece.units, box);
    });
  });

  std::vector<bool> wanted(anchor.manifest.files.size(), false);
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const AnchorPiece& piece = pieces[i];
    wanted[piece.file] = true;
    if (!load->reads_.empty()) {
      // Between neighbours lies only the padding to the next slice.
      Read& last = load->reads_.back();
      const AnchorPiece& first = pieces[last.first];
      const AnchorPiece& previous = pieces[i - 1];
      if (previous.file == piece.file &&
          piece.offset - (previous.offset + previous.bytes) < kSliceAlignment &&
          piece.offset + piece.bytes - first.offset <= kPieceBytes) {
        ++last.count;
        continue;
      }
    }
    load->reads_.push_back({i, 1});
  }
  // Neighbouring reads go to different files: one file alone is slower.
  std::stable_sort(load->reads_.begin(), load->reads_.end(),
                   [&](const Read& a, const Read& b) {
                     return pieces[a.first].offset < pieces[b.first].offset;
                   });
  KEDGE_RETURN_IF_ERROR(load->files_.Open(wanted));
  return load;
}

void AnchorLoad::Expect(std::size_t read) {
  if (read >= reads_.size()) return;
  const AnchorPiece& first = pieces_[reads_[read].first];
  const AnchorPiece& last =
      pieces_[reads_[read].first + reads_[read].count - 1];
  files_.Expect(first.file, first.offset,
                last.offset + last.bytes - first.offset);
}

}  // namespace kedge
