#ifndef KEDGE_READER_ANCHOR_LOAD_H_
#define KEDGE_READER_ANCHOR_LOAD_H_

// What has to be read of an anchor to get weights from its files straight to
// their places.

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kedge/engine/io/store.h"
#include "kedge/reader/binding.h"
#include "kedge/reader/data_files.h"
#include "kedge/reader/read_context.h"
#include "kedge/reader/staged_delta.h"

namespace kedge {

// One piece of an anchor file: a run of units of one tensor.
struct AnchorPiece {
  std::uint32_t tensor = 0;
  UnitRange units;
  std::uint32_t file = 0;
  std::uint32_t number = 0;  // among the file's pieces
  std::uint64_t offset = 0;  // in the file
  std::uint64_t bytes = 0;
};

// All pieces of an anchor, ascending by (file, offset). O(slices log slices).
// kDataLoss if one would lie outside its file.
absl::StatusOr<std::vector<AnchorPiece>> PiecesOf(
    const PublishedAnchor& anchor);

// An anchor about to be loaded. Only pieces that a held box needs are read,
// each once, those of small tensors many at a time. Backends do the reads.
class AnchorLoad {
 public:
  // Plans the reads and opens the files; weights are not touched. All
  // arguments outlive the load.
  static absl::StatusOr<std::unique_ptr<AnchorLoad>> Open(
      const ReadContext* context, const Binding& binding,
      const TensorMask& mask, const PublishedAnchor& anchor);

  // Each at most kPieceBytes of one file, neighbours of different files.
  std::size_t read_count() const { return reads_.size(); }
  // Ascending by offset; between them lies only padding.
  std::span<const AnchorPiece> pieces(std::size_t read) const {
    return {&pieces_[reads_[read].first], reads_[read].count};
  }
  std::span<const AnchorPiece> all_pieces() const { return pieces_; }
  DataFiles& files() { return files_; }
  // Says that `read` is soon to come, so that storage works on it meanwhile.
  void Expect(std::size_t read);

 private:
  struct Read {  // neighbouring pieces of a file
    std::size_t first = 0;
    std::size_t count = 0;
  };
  AnchorLoad(const ReadContext* context, const PublishedAnchor& anchor);

  DataFiles files_;
  std::vector<AnchorPiece> pieces_;  // the needed ones
  std::vector<Read> reads_;
};

}  // namespace kedge

#endif  // KEDGE_READER_ANCHOR_LOAD_H_
