#ifndef KEDGE_WRITER_SNAPSHOT_SOURCE_H_
#define KEDGE_WRITER_SNAPSHOT_SOURCE_H_

// A copy of published bytes in host memory, which deltas start from. Private to
// writer/.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "kedge/engine/cpu/l61_sum.h"
#include "kedge/format/tensor_table.h"
#include "kedge/writer/store_writer.h"
#include "kedge/writer/tensor_source.h"

namespace kedge {

// The last published bytes of what this rank holds of every untied tensor.
//
// Thread safety: Read and Owned may run concurrently; Apply is alone.
class SnapshotSource : public TensorSource {
 public:
  // What `live` holds, copied. Fills `held`, if given, with S of the copy: what
  // is vouched for is what later deltas start from.
  static absl::StatusOr<std::unique_ptr<SnapshotSource>> Copy(
      const TensorTable& table, TensorSource& live, const L61Summer* summer,
      StoreWriter::HeldPart* held);

  std::optional<std::vector<UnitRange>> Owned(
      std::uint32_t ordinal) const override;
  absl::StatusOr<std::span<const std::byte>> Read(
      std::uint32_t ordinal, std::uint64_t byte_begin, std::uint64_t byte_count,
      std::vector<std::byte>* scratch) override;

  // Adds a record of `slice`, which lies within one part.
  void Apply(std::uint32_t ordinal, const TensorSpec& spec,
             const UnitRange& slice, std::span<const std::byte> record);

  std::uint64_t total_bytes() const { return total_bytes_; }
  // Of one tensor.
  std::uint64_t BytesOf(std::uint32_t ordinal) const;

 private:
  struct Part {
    UnitRange units;
    std::uint32_t unit_bytes = 0;
    std::vector<std::byte> bytes;
  };

  SnapshotSource() = default;
  Part& PartOf(std::uint32_t ordinal, std::uint64_t byte);

  std::vector<std::vector<Part>> parts_;  // by ordinal; ascending
  std::uint64_t total_bytes_ = 0;
};

// Records of a step, kept until it is published: only then does the snapshot
// move on, by exactly what was published.
//
// Thread safety: sink() may be called from several threads at once.
class KeptRecords {
 public:
  StoreWriter::RecordSink sink();
  void ApplyTo(const TensorTable& table, SnapshotSource* snapshot);

 private:
  struct Kept {
    std::uint32_t tensor;
    UnitRange slice;
    std::vector<std::byte> bytes;
    std::uint64_t record_bytes;
  };
  std::mutex mutex_;
  std::vector<Kept> kept_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kedge

#endif  // KEDGE_WRITER_SNAPSHOT_SOURCE_H_
