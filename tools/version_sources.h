#ifndef KEDGE_TOOLS_VERSION_SOURCES_H_
#define KEDGE_TOOLS_VERSION_SOURCES_H_

// What `kedge init` and `kedge publish` give the writer to read: the tensors of
// a checkpoint, and a version of a store rebuilt from anchor and deltas. Both
// prove, within the read that completes them and so before anything is
// published, that what was read is what it claims to be.

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kedge/engine/cpu/l61_sum.h"
#include "kedge/format/manifest.h"
#include "kedge/format/tensor_table.h"
#include "kedge/reader/version_reader.h"
#include "kedge/tools/checkpoint.h"
#include "kedge/writer/tensor_source.h"

namespace kedge {

// Metadata keys under which a version carries its checkpoint's files, byte for
// byte: this and the file's name to its header, and the index if there is one.
inline constexpr absl::string_view kHeaderKeyPrefix = "safetensors:";
inline constexpr absl::string_view kIndexKey = "safetensors-index";

// The tensors of `checkpoint` as a table without ties: two names that share
// storage cannot be told from a checkpoint, and are never guessed.
absl::StatusOr<TensorTable> TableOf(const Checkpoint& checkpoint);

// `base` with the checkpoint's headers and index in place of those it has.
// kInvalidArgument, naming the largest file, if that is more than a version can
// carry.
absl::StatusOr<Metadata> MetadataOf(const Checkpoint& checkpoint,
                                    const Metadata& base);

// That `checkpoint` holds the tensors of `table` and no others: names, dtypes,
// shapes; the bytes of a tied tensor equal its owner's. kFailedPrecondition
// counts all offenders and names the first few. `version` is for messages.
absl::Status CheckSameModel(const Checkpoint& checkpoint,
                            const TensorTable& table,
                            absl::string_view version);

// S of every tensor of a table, summed while each of its bytes is read once.
//
// Thread safety: all methods may run concurrently.
class SumsInFlight {
 public:
  // Both are borrowed.
  SumsInFlight(const TensorTable* table, const L61Summer* summer);

  // Takes the bytes of tensor `ordinal` from `byte_begin` on. True if that was
  // the last of the tensor.
  bool Add(std::uint32_t ordinal, std::uint64_t byte_begin,
           std::span<const std::byte> bytes);
  // S of `ordinal`; of a tied tensor its owner's.
  std::uint64_t Of(std::uint32_t ordinal) const;

 private:
  const TensorTable* table_;
  const L61Summer* summer_;
  mutable std::mutex mutex_;
  std::vector<std::uint64_t> sums_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::uint64_t> missing_bytes_ ABSL_GUARDED_BY(mutex_);
};

// Hears how many bytes each read was, from several threads.
using ReadListener = std::function<void(std::uint64_t bytes)>;

// One pass over a mapped checkpoint. The bytes are copied out of the mapping
// before anybody looks at them, so that a file that changes meanwhile cannot
// show two contents to one encoder. The read that completes the table, and with
// it the publish, fails with kDataLoss if any file is no longer the one that
// was opened.
class CheckpointSource : public TensorSource {
 public:
  // Everything is borrowed. `table` is TableOf(checkpoint), or one that
  // CheckSameModel accepted.
  CheckpointSource(const Checkpoint* checkpoint, const TensorTable* table,
                   const L61Summer* summer, ReadListener listener = nullptr);

  absl::StatusOr<std::span<const std::byte>> Read(
      std::uint32_t ordinal, std::uint64_t byte_begin, std::uint64_t byte_count,
      std::vector<std::byte>* scratch) override;

  // What was read, for comparison with what was published.
  const SumsInFlight& sums() const { return sums_; }

 private:
  const Checkpoint* checkpoint_;
  const std::uint64_t total_bytes_;
  ReadListener listener_;
  std::vector<const std::byte*> data_;  // by ordinal
  SumsInFlight sums_;
  std::atomic<std::uint64_t> copied_bytes_{0};
};

// One pass over a version in a store. The read that completes a tensor fails
// with kDataLoss if the bytes do not have the S that the version's manifest
// says.
class VersionSource : public TensorSource {
 public:
  // Everything is borrowed.
  VersionSource(VersionReader* reader, const L61Summer* summer);

  absl::StatusOr<std::span<const std::byte>> Read(
      std::uint32_t ordinal, std::uint64_t byte_begin, std::uint64_t byte_count,
      std::vector<std::byte>* scratch) override;

 private:
  VersionReader* reader_;
  SumsInFlight sums_;
};

// The kDataLoss of a tensor whose bytes are not those of `version`.
absl::Status WrongTensor(const VersionId& version, absl::string_view tensor,
                         std::uint64_t expected_l61, std::uint64_t found_l61);

}  // namespace kedge

#endif  // KEDGE_TOOLS_VERSION_SOURCES_H_
