#include "kedge/reader/anchor_load.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kedge/engine/cpu/record_apply.h"
#include "kedge/format/limits.h"
#include "kedge/format/status.h"
#include "kedge/reader/parallel.h"

namespace kedge {
namespace {

// Buffers of a piece each, reused by whichever thread reads next.
class BufferStack {
 public:
  using Buffer = std::unique_ptr<std::byte[]>;

  Buffer Take() {
    {
      const std::lock_guard lock(mutex_);
      if (!buffers_.empty()) {
        Buffer buffer = std::move(buffers_.back());
        buffers_.pop_back();
        return buffer;
      }
    }
    return std::make_unique_for_overwrite<std::byte[]>(kPieceBytes);
  }
  void Give(Buffer buffer) {
    const std::lock_guard lock(mutex_);
    buffers_.push_back(std::move(buffer));
  }

 private:
  std::mutex mutex_;
  std::vector<Buffer> buffers_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

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
    : context_(context),
      files_(context, anchor.path, anchor.version.step,
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

absl::Status AnchorLoad::Run(const Binding& binding,
                             std::uint64_t* units_written) {
  BufferStack buffers;
  std::atomic<std::uint64_t> written{0};
  const absl::Status status = ParallelFor(
      context_->io_pool, reads_.size(), [&](std::size_t i) -> absl::Status {
        const std::span<const AnchorPiece> pieces(&pieces_[reads_[i].first],
                                                  reads_[i].count);
        const std::uint64_t begin = pieces.front().offset;
        const std::uint64_t bytes =
            pieces.back().offset + pieces.back().bytes - begin;
        // While this is hashed and copied, storage works on what comes next.
        const std::size_t ahead =
            i + static_cast<std::size_t>(context_->io_pool->thread_count());
        if (ahead < reads_.size()) {
          const AnchorPiece& next = pieces_[reads_[ahead].first];
          files_.Expect(next.file, next.offset, next.bytes);
        }
        BufferStack::Buffer buffer;
        if (!files_.mapped()) buffer = buffers.Take();
        KEDGE_ASSIGN_OR_RETURN(
            const std::span<const std::byte> fetched,
            files_.Fetch(pieces.front().file, begin, bytes, buffer.get()));
        for (const AnchorPiece& piece : pieces) {
          const std::span<const std::byte> part =
              fetched.subspan(piece.offset - begin, piece.bytes);
          if (absl::Status checked = files_.CheckPiece(piece.file, piece.number,
                                                       piece.offset, part);
              !checked.ok()) {
            return Annotate(
                checked,
                absl::StrCat("tensor ", binding.table()[piece.tensor].name));
          }
          std::uint64_t units = 0;
          for (const BoxTarget& box :
               binding.weights().tensors[piece.tensor].boxes) {
            if (!Touches(binding.grid(piece.tensor), piece.units, box)) {
              continue;
            }
            units += CopySliceToBox(part.data(), binding.grid(piece.tensor),
                                    piece.units, box);
          }
          written.fetch_add(units, std::memory_order_relaxed);
        }
        if (buffer != nullptr) buffers.Give(std::move(buffer));
        return absl::OkStatus();
      });
  *units_written += written.load();
  return status;
}

}  // namespace kedge
