#ifndef KEDGE_READER_DELTA_LOAD_H_
#define KEDGE_READER_DELTA_LOAD_H_

// Deltas in host memory: brought there and checked before the pause, then added
// to the weights during it. What of a step has to be read, for any backend.

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
#include "kedge/reader/staged_delta.h"

namespace kedge {

// What held boxes need of a step.
struct DeltaReads {
  std::vector<std::uint32_t> records;  // indices in the manifest, ascending
  std::vector<bool> wanted;            // by file: holds such a record
  // By file: its pieces with a byte of such a record; empty if it has none.
  std::vector<std::vector<bool>> pieces;
};
// kDataLoss if a record would end outside its file.
absl::StatusOr<DeltaReads> PlanReads(const Binding& binding,
                                     const TensorMask& mask,
                                     const PublishedStep& step);

// "file: offset 64: tensor NAME units [0, 16384)", for messages.
std::string WhereOf(const PublishedStep& step, const DeltaRecord& record);

// The records of one step that held boxes need, in host memory.
//
// Thread safety: immutable after Load.
class LoadedDelta : public StagedDelta {
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

  std::span<const Record> records() const { return records_; }
  const DeltaRecord& info(const Record& record) const {
    return step().manifest.records[record.index];
  }
  std::string Where(const Record& record) const {
    return WhereOf(step(), info(record));
  }

 private:
  struct Run {  // consecutive pieces of a file, in a buffer
    std::uint32_t file = 0;
    std::uint64_t offset = 0;
    std::uint64_t bytes = 0;
    std::unique_ptr<std::byte[]> buffer;
  };
  LoadedDelta(const ReadContext* context,
              std::shared_ptr<const PublishedStep> step);

  DataFiles files_;
  std::vector<Run> runs_;  // ascending by (file, offset); empty if mapped
  std::vector<Record> records_;
};

// Decodes every record and compares nnz and L(record) with the manifest's.
// kDataLoss names file, offset and tensor.
absl::Status CheckRecords(IoPool* pool, const Binding& binding,
                          const L61Key& key, const LoadedDelta& delta);

// Adds all deltas into the bound boxes: in parallel over slices that share no
// unit, in the deltas' order where they do. An error (kDataLoss, naming file
// and tensor) leaves the weights in part changed.
absl::Status ApplyDeltas(IoPool* pool, const Binding& binding,
                         std::span<const LoadedDelta* const> deltas,
                         ApplyCounts* counts);

}  // namespace kedge

#endif  // KEDGE_READER_DELTA_LOAD_H_
