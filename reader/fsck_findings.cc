#include "kedge/reader/fsck_findings.h"

#include <algorithm>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace kedge {
namespace {

using S = FindingSeverity;

constexpr char kRestoreFile[] =
    "restore the file from a copy of this store, or start a new store";
constexpr char kRemoveStep[] =
    "restore the directory from a copy of this store, or move it to .trash and "
    "let readers rejoin from an anchor after it";
constexpr char kRemoveAnchor[] =
    "move the anchor directory to .trash and add another anchor; readers use "
    "an older one meanwhile";
constexpr char kRejoin[] =
    "publish an anchor, so that readers can rejoin beyond this step; do not "
    "trust versions between here and there";

// In the order of fsck::Id.
constexpr FindingType kCatalogue[] = {
    // The store itself.
    {"store-file-missing", S::kError,
     "there are steps or epochs, but no STORE file; nothing else is checked",
     "restore STORE from a copy; a store whose init did not finish is removed "
     "and made again"},
    {"store-file-bad", S::kError,
     "STORE is damaged: run id and L61 seed are unknown; nothing else is "
     "checked",
     kRestoreFile},
    {"head-missing", S::kError, "there is no HEAD",
     "the next publish writes it; readers list the store meanwhile"},
    {"head-bad", S::kError, "HEAD is damaged or of another run",
     "the next publish writes it again; readers list the store meanwhile"},
    {"head-behind", S::kWarning,
     "HEAD names an older version or epoch than the newest valid one",
     "the next publish puts it right; if nobody publishes, open the store with "
     "a writer once"},
    {"head-ahead", S::kError,
     "HEAD names a version that is not there, or is not valid",
     "the newest step is lost: restore it from a copy, or resume the trainer "
     "from the newest valid step"},
    {"head-other-version", S::kError,
     "HEAD names the step, but another manifest or epoch than stands there",
     "one of both was replaced: compare with a copy of this store, and resume "
     "the trainer from a step you trust"},
    {"epoch-bad", S::kError,
     "an epoch file is damaged, of another run or of another number",
     "restore the file from a copy: without it nobody can say which steps are "
     "valid"},
    {"epoch-gap", S::kWarning, "an epoch between two others has no file",
     "restore the file from a copy, if a step of that epoch is still there"},
    {"epoch-missing", S::kError,
     "a step, an anchor or HEAD is of an epoch that has no file",
     "restore the epoch file from a copy: readers take its steps for invalid"},
    {"epoch-resume", S::kError,
     "an epoch went on from another version than stands at its resume step",
     "the step or the epoch file was replaced: restore it from a copy"},
    {"table-missing", S::kError, "a tensor table that is named is not there",
     "restore the file from a copy: its name is its hash"},
    {"table-bad", S::kError,
     "a tensor table is damaged, or its bytes are not those of its name",
     "restore the file from a copy: its name is its hash"},
    {"table-unused", S::kInfo, "no step that is there names this tensor table",
     "nothing to do: it belonged to a publish that did not finish, or to "
     "steps that are gone"},
    {"v0-digest", S::kError, "STORE and step 0 disagree about v0",
     "one of both was replaced: restore it from a copy"},
    // COMMIT and MANIFEST.
    {"commit-missing", S::kWarning,
     "a step or anchor directory has no COMMIT: for readers it does not exist",
     "restore COMMIT from a copy, or move the directory to .trash"},
    {"commit-bad", S::kError, "COMMIT is damaged", kRemoveStep},
    {"commit-other-run", S::kError, "the directory belongs to another run",
     "move the directory out of this store"},
    {"commit-other-step", S::kError,
     "the directory was renamed: its COMMIT is of another step",
     "rename it back, or move it to .trash"},
    {"manifest-missing", S::kError, "COMMIT stands without its MANIFEST",
     kRemoveStep},
    {"manifest-size", S::kError, "MANIFEST has not the size that COMMIT says",
     kRemoveStep},
    {"manifest-hash", S::kError, "MANIFEST is not the one that COMMIT names",
     kRemoveStep},
    {"manifest-bad", S::kError,
     "a step's MANIFEST is intact and breaks a rule of the format",
     "a writer made it wrongly: publish an anchor, and report this"},
    {"newer-format", S::kWarning, "this needs a newer kedge to be checked",
     "update kedge and check again"},
    // The chain.
    {"step-fenced", S::kError,
     "a writer that was fenced published this step: it is not part of the run",
     "stop that writer, and move the directory to .trash: it is in the way of "
     "the step that the valid writer publishes under this number"},
    {"base-missing", S::kError,
     "the version that a delta starts from is not there, though older ones are",
     "restore the missing steps from a copy, or let readers rejoin from an "
     "anchor after the hole"},
    {"base-fork", S::kError,
     "a delta starts from another version than the one before it", kRejoin},
    {"base-table", S::kError,
     "a delta has another tensor table than the version it starts from",
     kRejoin},
    {"digest-chain", S::kError,
     "the state digest before a step is not the one after its base", kRejoin},
    {"digest-wrong", S::kError,
     "the state digest after a step is not that of its sums", kRejoin},
    {"state-sum", S::kError,
     "a tensor's sum before a step is not its sum at the base", kRejoin},
    {"not-joinable", S::kError, "no sound anchor leads to this version",
     "publish an anchor"},
    // Data files.
    {"data-file-missing", S::kError, "a file that MANIFEST names is not there",
     "restore the file from a copy, or let readers rejoin from an anchor "
     "after it"},
    {"data-file-size", S::kError, "a file has not the size that MANIFEST says",
     "restore the file from a copy, or let readers rejoin from an anchor "
     "after it"},
    {"data-file-extra", S::kWarning,
     "a file that MANIFEST does not name; readers never open it",
     "find out who put it there; then remove it"},
    {"data-file-not-regular", S::kError,
     "a symbolic link, directory, FIFO or device where a file must be",
     "put the file itself there: readers do not follow links"},
    {"data-file-header", S::kError,
     "a data file's header is damaged, or of another run, step or file",
     "restore the file from a copy, or let readers rejoin from an anchor "
     "after it"},
    {"piece-hash", S::kError, "bytes of a data file are not those published",
     "restore the file from a copy, or let readers rejoin from an anchor "
     "after it"},
    {"padding-not-zero", S::kError, "padding of a data file is not zero",
     "a writer made it wrongly: publish an anchor, and report this"},
    {"record-bad", S::kError, "a record breaks a rule of the codec", kRejoin},
    {"record-nnz", S::kError,
     "a record changes another number of units than MANIFEST says", kRejoin},
    {"record-l61", S::kError,
     "a record's changes do not sum to what MANIFEST says", kRejoin},
    // Anchors.
    {"anchor-manifest-bad", S::kError,
     "an anchor's MANIFEST is intact and breaks a rule of the format",
     kRemoveAnchor},
    {"anchor-version", S::kError,
     "an anchor is of another version than its step's", kRemoveAnchor},
    {"anchor-l61", S::kError,
     "an anchor's bytes do not sum to what its MANIFEST says", kRemoveAnchor},
    {"anchor-chain", S::kError,
     "an anchor is not equal to the version before it plus the deltas",
     "do not join from this anchor, and find out whether anchor or deltas are "
     "what the trainer held; publish another anchor"},
    {"anchor-metadata", S::kError,
     "an anchor's metadata are not those of its version", kRemoveAnchor},
    // Names and the rest.
    {"not-a-directory", S::kError, "a link or file where a directory must be",
     "put the directory itself there: nothing in it is checked"},
    {"unreadable", S::kError, "the storage did not give the bytes",
     "see to the storage, then check again"},
    {"unknown-name", S::kInfo, "a name that is no part of a store",
     "readers never look at it; remove it if nobody needs it"},
    {"name-case", S::kWarning,
     "a name that differs from one of a store in letter case or zeros alone",
     "a copy through another file system changed it: rename it back"},
    {"lease-bad", S::kWarning,
     "a reader's lease is damaged, of a newer format or under another name; "
     "gc keeps everything until it is old",
     "see to the reader of that name: it writes the lease again at its next "
     "update; if there is none, remove the file"},
    {"lease-other-run", S::kWarning,
     "a lease on another run's store; it pins nothing here",
     "point its reader to its own store, or remove the file"},
    {"lease-future", S::kWarning,
     "a lease was written at a time that is still to come; it counts as live",
     "see to the clocks of this host and of the storage; if they are right, "
     "remove the file"},
    {"lease-expired", S::kInfo,
     "a reader has not renewed its lease for long; it pins nothing any more",
     "nothing to do: its reader is gone, and gc removes the file"},
    {"lease-leftover", S::kInfo,
     "a reader that is gone left a lease on its way to its place",
     "nothing to do: gc removes it"},
    {"staging-leftover", S::kInfo,
     "a writer that is gone left a staging directory or temporary file",
     "nothing to do: the next writer that opens the store, or gc, removes it"},
    {"trash", S::kInfo, ".trash holds what resume and gc took away",
     "nothing to do: gc removes it after its grace time"},
};
static_assert(std::size(kCatalogue) == static_cast<int>(fsck::Id::kCount));

}  // namespace

absl::string_view SeverityName(FindingSeverity severity) {
  switch (severity) {
    case FindingSeverity::kInfo:
      return "info";
    case FindingSeverity::kWarning:
      return "warning";
    case FindingSeverity::kError:
      return "error";
  }
  return "?";
}

std::span<const FindingType> FsckCatalogue() { return kCatalogue; }

namespace fsck {

const FindingType& TypeOf(Id id) { return kCatalogue[static_cast<int>(id)]; }

Finding MakeFinding(Id id, absl::string_view file, std::string message,
                    std::int64_t offset) {
  const FindingType& type = TypeOf(id);
  Finding finding;
  finding.id = type.id;
  finding.severity = type.severity;
  finding.file = std::string(file);
  if (offset >= 0) finding.offset = static_cast<std::uint64_t>(offset);
  finding.message = std::move(message);
  finding.advice = std::string(type.advice);
  return finding;
}

Finding WithSeverity(Finding finding, FindingSeverity severity) {
  finding.severity = severity;
  return finding;
}

Finding FromStatus(Id id, absl::string_view file, absl::string_view path,
                   const absl::Status& status, std::optional<Id> missing) {
  switch (status.code()) {
    case absl::StatusCode::kUnimplemented:
      id = Id::kNewerFormat;
      break;
    case absl::StatusCode::kNotFound:
      id = missing.value_or(Id::kUnreadable);
      break;
    case absl::StatusCode::kDataLoss:
      break;
    default:
      id = Id::kUnreadable;
  }
  absl::string_view message = status.message();
  for (const absl::string_view prefix : {path, file}) {
    if (!prefix.empty() && absl::ConsumePrefix(&message, prefix)) {
      absl::ConsumePrefix(&message, ": ");
      break;
    }
  }
  std::int64_t offset = -1;
  absl::string_view rest = message;
  if (absl::ConsumePrefix(&rest, "offset ")) {
    const std::size_t digits = rest.find_first_not_of("0123456789");
    std::int64_t value = 0;
    if (digits != absl::string_view::npos &&
        absl::SimpleAtoi(rest.substr(0, digits), &value)) {
      rest.remove_prefix(digits);
      if (absl::ConsumePrefix(&rest, ": ")) {
        offset = value;
        message = rest;
      }
    }
  }
  absl::ConsumeSuffix(&message, "; run `kedge fsck`");
  absl::ConsumeSuffix(&message, "; update kedge");
  return MakeFinding(id, file, std::string(message), offset);
}

std::string Shown(absl::string_view name) {
  return absl::StrCat(absl::CHexEscape(name.substr(0, 200)),
                      name.size() > 200 ? "..." : "");
}

void FindingList::Add(Finding finding) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (findings_.size() < kMost) {
    findings_.push_back(std::move(finding));
    return;
  }
  ++left_out_;
  // An error among those left out must not leave a warning to speak for them.
  if (!last_left_out_ || last_left_out_->severity <= finding.severity) {
    last_left_out_ = std::move(finding);
  }
}

void FindingList::Clear() {
  const std::lock_guard<std::mutex> lock(mutex_);
  findings_.clear();
  left_out_ = 0;
  last_left_out_.reset();
}

bool FindingList::empty() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return findings_.empty();
}

bool FindingList::has_error() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto is_error = [](const Finding& finding) {
    return finding.severity == FindingSeverity::kError;
  };
  return std::any_of(findings_.begin(), findings_.end(), is_error) ||
         (last_left_out_ && is_error(*last_left_out_));
}

std::vector<Finding> FindingList::Take() {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Finding> findings = std::move(findings_);
  findings_.clear();
  if (last_left_out_) {
    if (left_out_ > 1) {
      absl::StrAppend(&last_left_out_->message, " (and ", left_out_ - 1,
                      " more findings about this directory)");
    }
    findings.push_back(*std::move(last_left_out_));
  }
  left_out_ = 0;
  last_left_out_.reset();
  return findings;
}

}  // namespace fsck
}  // namespace kedge
