#ifndef KEDGE_READER_ANCHOR_LOAD_H_
#define KEDGE_READER_ANCHOR_LOAD_H_

// Weights from an anchor's files straight to their places.

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kedge/engine/io/store.h"
#include "kedge/reader/binding.h"
#include "kedge/reader/data_files.h"
#include "kedge/reader/delta_load.h"
#include "kedge/reader/read_context.h"

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
// each once, those of small tensors many at a time; every one is hashed before
// a byte of it reaches the weights. Memory: one piece for each I/O thread.
class AnchorLoad {
 public:
  // Plans the reads and opens the files; weights are not touched. All
  // arguments outlive the load.
  static absl::StatusOr<std::unique_ptr<AnchorLoad>> Open(
      const ReadContext* context, const Binding& binding,
      const TensorMask& mask, const PublishedAnchor& anchor);

  // Writes every needed unit into the bound boxes and adds their number to
  // `*units_written`. An error leaves the weights in part written.
  absl::Status Run(const Binding& binding, std::uint64_t* units_written);

 private:
  struct Read {  // neighbouring pieces of a file
    std::size_t first = 0;
    std::size_t count = 0;
  };
  AnchorLoad(const ReadContext* context, const PublishedAnchor& anchor);

  const ReadContext* context_;
  DataFiles files_;
  std::vector<AnchorPiece> pieces_;  // the needed ones
  std::vector<Read> reads_;
};

}  // namespace kedge

#endif  // KEDGE_READER_ANCHOR_LOAD_H_
