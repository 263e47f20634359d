#ifndef KEDGE_READER_DELTA_LOAD_H_
#define KEDGE_READER_DELTA_LOAD_H_

// Deltas: brought into memory and checked before the pause, then added to the
// weights during it.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kedge/engine/io/store.h"
#include "kedge/format/l61.h"
#include "kedge/reader/binding.h"
#include "kedge/reader/data_files.h"
#include "kedge/reader/read_context.h"

namespace kedge {

// Which owners take part, by ordinal: those that a join has to write. Empty:
// all.
using TensorMask = std::vector<bool>;

// The records of one step that held boxes need, in memory.
//
// Thread safety: immutable after Load.
class LoadedDelta {
 public:
  struct Record {
    std::uint32_t index = 0;           // in the manifest
    std::span<const std::byte> bytes;  // kRecordSlackBytes readable after it
  };

  // Reads each piece that holds a needed record, once, in reads of a piece; all
  // are hashed. `context` and `binding` outlive the result.
  static absl::StatusOr<std::unique_ptr<LoadedDelta>> Load(
      const ReadContext* context, const Binding& binding,
      const TensorMask& mask, std::shared_ptr<const PublishedStep> step);

  const PublishedStep& step() const { return *step_; }
  std::span<const Record> records() const { return records_; }
  const DeltaRecord& info(const Record& record) const {
    return step_->manifest.records[record.index];
  }
  // "file: offset 64: tensor NAME [0, 16384)", for messages.
  std::string Where(const Record& record) const;

 private:
  struct Run {  // consecutive pieces of a file, in a buffer
    std::uint32_t file = 0;
    std::uint64_t offset = 0;
    std::uint64_t bytes = 0;
    std::unique_ptr<std::byte[]> buffer;
  };
  LoadedDelta(const ReadContext* context,
              std::shared_ptr<const PublishedStep> step);

  std::shared_ptr<const PublishedStep> step_;
  DataFiles files_;
  std::vector<Run> runs_;  // ascending by (file, offset); empty if mapped
  std::vector<Record> records_;
};

// Decodes every record and compares nnz and L(record) with the manifest's.
// kDataLoss names file, offset and tensor.
absl::Status CheckRecords(IoPool* pool, const Binding& binding,
                          const L61Key& key, const LoadedDelta& delta);

struct ApplyCounts {
  std::uint64_t records = 0;
  std::uint64_t nnz = 0;
  std::uint64_t units_written = 0;
};
// Adds all deltas into the bound boxes: in parallel over slices that share no
// unit, in the deltas' order where they do. An error (kDataLoss, naming file
// and tensor) leaves the weights in part changed.
absl::Status ApplyDeltas(
    IoPool* pool, const Binding& binding,
    const std::vector<std::unique_ptr<LoadedDelta>>& deltas,
    ApplyCounts* counts);

}  // namespace kedge

#endif  // KEDGE_READER_DELTA_LOAD_H_
