#ifndef KEDGE_READER_FSCK_FINDINGS_H_
#define KEDGE_READER_FSCK_FINDINGS_H_

// How the parts of fsck say what they found. Private to reader/.

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "kedge/reader/fsck.h"

namespace kedge::fsck {

// Places in FsckCatalogue().
enum class Id : int {
  kStoreFileMissing,
  kStoreFileBad,
  kHeadMissing,
  kHeadBad,
  kHeadBehind,
  kHeadAhead,
  kHeadOtherVersion,
  kEpochBad,
  kEpochGap,
  kEpochMissing,
  kEpochResume,
  kTableMissing,
  kTableBad,
  kTableUnused,
  kV0Digest,
  kCommitMissing,
  kCommitBad,
  kCommitOtherRun,
  kCommitOtherStep,
  kManifestMissing,
  kManifestSize,
  kManifestHash,
  kManifestBad,
  kNewerFormat,
  kStepFenced,
  kBaseMissing,
  kBaseFork,
  kBaseTable,
  kDigestChain,
  kDigestWrong,
  kStateSum,
  kNotJoinable,
  kDataFileMissing,
  kDataFileSize,
  kDataFileExtra,
  kDataFileNotRegular,
  kDataFileHeader,
  kPieceHash,
  kPaddingNotZero,
  kRecordBad,
  kRecordNnz,
  kRecordL61,
  kAnchorManifestBad,
  kAnchorVersion,
  kAnchorL61,
  kAnchorChain,
  kAnchorMetadata,
  kNotADirectory,
  kUnreadable,
  kUnknownName,
  kNameCase,
  kLeaseBad,
  kLeaseOtherRun,
  kLeaseFuture,
  kLeaseExpired,
  kLeaseLeftover,
  kStagingLeftover,
  kTrash,
  kCount,
};

const FindingType& TypeOf(Id id);

// A finding with the severity and advice of the catalogue. `offset` < 0: none.
Finding MakeFinding(Id id, absl::string_view file, std::string message,
                    std::int64_t offset = -1);
Finding WithSeverity(Finding finding, FindingSeverity severity);
// From the error of a function that was told to call the file `file`, or knows
// it under `path`: takes path and offset out of the message, and the advice to
// run this program. A storage error gives kUnreadable instead of `id`, a newer
// format kNewerFormat, and, if `missing` is given, a file that is not there
// gives that.
Finding FromStatus(Id id, absl::string_view file, absl::string_view path,
                   const absl::Status& status,
                   std::optional<Id> missing = std::nullopt);

// A name from a directory or a tensor, safe to print.
std::string Shown(absl::string_view name);

// Findings about one directory, from several threads. Bounded: what is left out
// is counted.
class FindingList {
 public:
  void Add(Finding finding);
  void Clear();
  bool empty() const;
  bool has_error() const;
  std::vector<Finding> Take();

 private:
  // Of one directory: a million stray files need no million lines.
  static constexpr std::size_t kMost = 500;
  mutable std::mutex mutex_;
  std::vector<Finding> findings_ ABSL_GUARDED_BY(mutex_);
  std::uint64_t left_out_ ABSL_GUARDED_BY(mutex_) = 0;
  std::optional<Finding> last_left_out_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kedge::fsck

#endif  // KEDGE_READER_FSCK_FINDINGS_H_
