#ifndef KEDGE_READER_FSCK_H_
#define KEDGE_READER_FSCK_H_

// Judges a store from its files alone: `kedge fsck` as a library. Every finding
// has an id that stays the same over releases; docs/fsck.md has the catalogue.

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kedge/engine/io/file_system.h"
#include "kedge/engine/io/lease.h"
#include "kedge/format/manifest.h"

namespace kedge {

enum class FindingSeverity {
  kInfo,     // worth knowing, nothing is wrong
  kWarning,  // readers go on, somebody should look
  kError,    // something that was published cannot be used or trusted
};
absl::string_view SeverityName(FindingSeverity severity);  // "error", ...

// What every finding of one id has in common.
struct FindingType {
  absl::string_view id;  // kebab-case, never renamed
  FindingSeverity severity = FindingSeverity::kError;  // unless a finding says
  absl::string_view meaning;                           // one line
  absl::string_view advice;                            // what to do
};
// All of them, in the order of docs/fsck.md.
std::span<const FindingType> FsckCatalogue();

struct Finding {
  absl::string_view id;  // of a FindingType
  FindingSeverity severity = FindingSeverity::kError;
  std::string file;  // relative to the store; "." is the store itself
  std::optional<std::uint64_t> offset;  // in the file
  std::string message;                  // what, expected, found
  std::string advice;
};

// Versions that follow from each other without a gap, oldest first. One of them
// can be joined from each anchor that is not above it.
struct FsckChain {
  std::vector<std::uint64_t> versions;
  std::vector<std::uint64_t> anchors;  // sound ones; ascending
  // The first version is v0 and has no anchor: engines boot with it.
  bool external_v0 = false;

  bool Joins(std::uint64_t version) const;
};

struct FsckReport {
  // By file, then offset. At most FsckOptions::max_findings of them; the counts
  // have them all.
  std::vector<Finding> findings;
  std::uint64_t error_count = 0;
  std::uint64_t warning_count = 0;
  std::uint64_t info_count = 0;

  bool deep = false;
  std::uint64_t steps_checked = 0;  // published ones
  std::uint64_t anchors_checked = 0;
  std::uint64_t records_checked = 0;  // decoded
  std::uint64_t bytes_checked = 0;    // read, of all files
  // The newest valid version, and the newest that can be joined. The same in a
  // store that is well.
  std::optional<VersionId> newest;
  std::optional<VersionId> newest_joinable;
  std::vector<FsckChain> chains;  // ascending
  double seconds = 0;

  // No error and no warning.
  bool clean() const { return error_count == 0 && warning_count == 0; }
};

struct FsckOptions {
  std::string store_path;
  FileSystem* fs = nullptr;  // null: PosixFileSystem()
  // false: everything but the bytes of data files: names, sizes, headers,
  //   COMMIT, MANIFEST, tables, epochs, HEAD, the chain, S and digests.
  // true: every byte besides: piece hashes, padding, each record decoded, each
  //   anchor summed.
  bool deep = false;
  int io_threads = 8;
  // Called now and then, never by two threads at once, with bytes of the total;
  // the total is what lay there at the beginning.
  std::function<void(std::uint64_t done, std::uint64_t total)> progress;
  std::uint64_t max_findings = 10'000;
  // A store may be published to, resumed and pruned while it is checked. What
  // looks like damage but may be such an operation halfway is looked at again
  // for this long before it is reported.
  double settle_seconds = 2;
  // As gc has it. Leases are judged by this host's clock, since fsck writes
  // nothing, not even to ask the storage for its time.
  std::chrono::seconds lease_ttl = kDefaultLeaseTtl;
};

// Checks the store and changes nothing in it. Memory: the table and S of one
// version, one manifest, and per thread 8 MiB or one record, whichever is
// larger (one thread at a time holds a record above 64 MiB).
//
// Everything that is wrong in the store is a finding. Errors, when the store
// could not be checked:
//   kNotFound           there is no store at the path
//   kUnimplemented      the whole store needs a newer reader
//   kResourceExhausted  out of descriptors or memory
//   others              the store's directory cannot be read
absl::StatusOr<FsckReport> Fsck(const FsckOptions& options);

// 0 clean, 4 findings (errors or warnings), 8 could not check.
int FsckExitCode(const absl::StatusOr<FsckReport>& report);

// "error piece-hash step_00000019/delta-r000-000.kds:8388608: piece 1: ...;
// ADVICE"
std::string FormatFinding(const Finding& finding);
// The findings and a summary, one a line. The same bytes for the same store.
std::string FormatFsckReport(const FsckReport& report);

// The report as names and plain values, in order, for whoever writes JSON.
struct FsckField {
  enum class Kind { kText, kNumber, kBool, kNull, kList, kObject };
  std::string name;  // empty in a list
  Kind kind = Kind::kNull;
  std::string text;                // kText
  std::uint64_t number = 0;        // kNumber; kBool: 0 or 1
  std::vector<FsckField> members;  // kList, kObject
};
FsckField FsckReportFields(const FsckReport& report);  // a kObject

}  // namespace kedge

#endif  // KEDGE_READER_FSCK_H_
