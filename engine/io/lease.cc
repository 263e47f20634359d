#include "kedge/engine/io/lease.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "kedge/format/layout.h"
#include "kedge/format/limits.h"
#include "kedge/format/status.h"

namespace kedge {
namespace {

constexpr char kTemporaryMark = '~';
constexpr std::size_t kTokenDigits = 16;

std::string LeasesPath(absl::string_view store_path) {
  return JoinPath(store_path, kLeasesDirectoryName);
}

// Reads and checks one lease; kNotFound if it is gone.
absl::StatusOr<LeaseRecord> ReadLease(FileSystem& fs, absl::string_view path,
                                      absl::string_view reader) {
  // A network file system may answer for the file that was replaced a moment
  // ago (ESTALE); the name leads to the new one at the next try.
  constexpr int kTries = 3;
  absl::StatusOr<std::vector<std::byte>> bytes;
  for (int attempt = 0; attempt < kTries; ++attempt) {
    bytes = ReadFile(fs, path, 2 * kLeaseBytes);
    if (!absl::IsUnavailable(bytes.status())) break;
  }
  if (!bytes.ok()) return bytes.status();
  KEDGE_ASSIGN_OR_RETURN(LeaseRecord lease, ParseLease(path, *bytes));
  if (reader != lease.reader) {
    return DataLoss({.where = path,
                     .what = "reader id, the file's name",
                     .expected = reader,
                     .found = lease.reader,
                     .advice = "the file was renamed or copied; remove it"});
  }
  return lease;
}

LeaseEntry ReadEntry(FileSystem& fs, absl::string_view path,
                     const std::string& name, const RunId& run) {
  LeaseEntry entry;
  entry.name = name;
  const auto lease = ReadLease(fs, path, name);
  // After the bytes: a lease that was renewed in between looks younger than
  // what was read, never older.
  const auto stat = fs.Stat(path);
  if (stat.ok()) entry.modified_ns = stat->modified_ns;
  if (!lease.ok()) {
    entry.status = lease.status();
  } else if (!stat.ok()) {
    entry.status = stat.status();
  } else if (lease->run != run) {
    entry.status = absl::FailedPreconditionError(absl::StrCat(
        path, ": run id: expected ", ToHex(run), ", found ", ToHex(lease->run),
        "; it is a lease on another run's store and pins nothing here; remove "
        "it"));
  } else {
    LeaseInfo info;
    info.reader = lease->reader;
    info.oldest_step = lease->oldest_step;
    if (lease->holds) {
      info.held = VersionId{lease->held_step, lease->held_manifest_hash};
    }
    info.counter = lease->counter;
    entry.info = std::move(info);
  }
  return entry;
}

}  // namespace

std::optional<std::string> ReaderOfLeaseTemporary(absl::string_view name) {
  const std::size_t at = name.find(kTemporaryMark);
  if (at == absl::string_view::npos || !IsReaderId(name.substr(0, at))) {
    return {};
  }
  const absl::string_view token = name.substr(at + 1);
  if (token.size() != kTokenDigits ||
      !std::all_of(token.begin(), token.end(), [](char c) {
        return absl::ascii_isdigit(static_cast<unsigned char>(c)) ||
               (c >= 'a' && c <= 'f');
      })) {
    return {};
  }
  return std::string(name.substr(0, at));
}

Lease::Lease(FileSystem* fs, std::string path, std::string reader_id, RunId run)
    : fs_(fs),
      path_(std::move(path)),
      // A token of its own: two processes with one reader id must not write
      // into one file.
      temporary_(absl::StrCat(path_, std::string(1, kTemporaryMark),
                              absl::Hex(RandomSeed(), absl::kZeroPad16))),
      reader_id_(std::move(reader_id)),
      run_(run) {}

absl::StatusOr<std::unique_ptr<Lease>> Lease::Create(FileSystem* fs,
                                                     std::string store_path,
                                                     std::string reader_id,
                                                     RunId run) {
  if (!IsReaderId(reader_id)) {
    return absl::InvalidArgumentError(absl::StrCat(
        store_path, ": reader id: expected 1 to ", kMaxReaderIdBytes,
        " of A-Z a-z 0-9 . _ - and no dot in front, found \"", reader_id,
        "\"; give each reader a name of its own, for example its host and "
        "rank"));
  }
  const std::string leases = LeasesPath(store_path);
  KEDGE_RETURN_IF_ERROR(EnsureDirectory(*fs, leases));
  std::unique_ptr<Lease> lease(
      new Lease(fs, JoinPath(leases, reader_id), reader_id, run));
  const auto left = ReadLease(*fs, lease->path_, lease->reader_id_);
  if (left.ok()) {
    const std::lock_guard<std::mutex> lock(lease->mutex_);
    lease->counter_ = left->counter;
  }
  // Anything else that stands there is replaced by the first Set.
  return lease;
}

absl::StatusOr<std::optional<LeaseRecord>> Lease::Foreign() const {
  const auto found = ReadLease(*fs_, path_, reader_id_);
  if (absl::IsNotFound(found.status()) || absl::IsDataLoss(found.status())) {
    return std::nullopt;  // gc took it for dead, or it is no lease
  }
  if (!found.ok()) return found.status();
  // Whoever takes a lease over goes on from its counter. A lower one is what
  // stood there before a write of ours that failed.
  if (found->counter < counter_ || *found == written_) return std::nullopt;
  if (found->counter == counter_ && !written_) return std::nullopt;
  return *found;
}

absl::Status Lease::Write(std::uint64_t oldest_step,
                          const std::optional<VersionId>& held) {
  KEDGE_ASSIGN_OR_RETURN(const std::optional<LeaseRecord> foreign, Foreign());
  if (foreign) {
    return absl::FailedPreconditionError(absl::StrCat(
        path_, ": counter: expected ", counter_, ", found ", foreign->counter,
        ": another process writes this lease; give each reader an id of its "
        "own"));
  }
  LeaseRecord next;
  next.run = run_;
  next.oldest_step = oldest_step;
  if (held) {
    next.holds = true;
    next.held_step = held->step;
    next.held_manifest_hash = held->manifest_hash;
  }
  next.counter = ++counter_;
  next.reader = reader_id_;
  written_ = next;  // a write that fails may have taken place all the same
  return ReplaceFile(*fs_, path_, temporary_, SerializeLease(next));
}

absl::Status Lease::Set(std::uint64_t oldest_step,
                        const std::optional<VersionId>& held) {
  if (oldest_step > kMaxStep || (held && held->step > kMaxStep)) {
    return absl::InvalidArgumentError(
        absl::StrCat(path_, ": step: expected at most ", kMaxStep, ", found ",
                     std::max(oldest_step, held ? held->step : 0)));
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  return Write(oldest_step, held);
}

absl::Status Lease::Renew() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!written_) {
    return absl::FailedPreconditionError(
        absl::StrCat(path_, ": Renew before Set: there is no lease to renew"));
  }
  std::optional<VersionId> held;
  if (written_->holds) {
    held = VersionId{written_->held_step, written_->held_manifest_hash};
  }
  return Write(written_->oldest_step, held);
}

absl::Status Lease::Remove() {
  const std::lock_guard<std::mutex> lock(mutex_);
  fs_->RemoveFile(temporary_).IgnoreError();
  if (!written_) return absl::OkStatus();  // never set: nothing of ours there
  KEDGE_ASSIGN_OR_RETURN(const std::optional<LeaseRecord> foreign, Foreign());
  if (foreign) return absl::OkStatus();
  const absl::Status removed = fs_->RemoveFile(path_);
  if (!removed.ok() && !absl::IsNotFound(removed)) return removed;
  written_.reset();
  return absl::OkStatus();
}

absl::StatusOr<LeaseListing> ReadLeases(FileSystem& fs,
                                        absl::string_view store_path,
                                        const RunId& run) {
  const std::string directory = LeasesPath(store_path);
  // Twice, and names of temporaries count for their leases: a file that is
  // replaced while a directory is listed may be left out of the list.
  std::set<std::string> names;
  std::set<std::string> temporaries;
  for (int pass = 0; pass < 2; ++pass) {
    const auto listed = fs.List(directory);
    if (absl::IsNotFound(listed.status())) return LeaseListing{};
    if (!listed.ok()) return listed.status();
    for (const std::string& name : *listed) {
      if (IsReaderId(name)) {
        names.insert(name);
      } else if (const auto reader = ReaderOfLeaseTemporary(name)) {
        names.insert(*reader);
        temporaries.insert(name);
      }
    }
  }
  LeaseListing listing;
  for (const std::string& name : names) {
    LeaseEntry entry = ReadEntry(fs, JoinPath(directory, name), name, run);
    if (!absl::IsNotFound(entry.status)) {
      listing.leases.push_back(std::move(entry));
    }
  }
  for (const std::string& name : temporaries) {
    const auto stat = fs.Stat(JoinPath(directory, name));
    if (stat.ok()) listing.temporaries.push_back({name, stat->modified_ns});
  }
  return listing;
}

absl::string_view LeaseStateName(LeaseState state) {
  switch (state) {
    case LeaseState::kLive:
      return "live";
    case LeaseState::kFuture:
      return "live, from the future";
    case LeaseState::kExpired:
      return "expired";
    case LeaseState::kForeign:
      return "of another run";
    case LeaseState::kUnreadable:
      return "unreadable";
  }
  return "?";
}

LeaseState StateOfLease(const LeaseEntry& lease, std::int64_t now_ns,
                        std::chrono::seconds ttl) {
  // Leases and the file that tells the time are not written at one moment, and
  // some storage keeps whole seconds.
  constexpr std::int64_t kSlackSeconds = 2;
  if (absl::IsFailedPrecondition(lease.status)) return LeaseState::kForeign;
  // In seconds, which cannot overflow: mtimes come from a file system.
  const std::int64_t age_seconds =
      now_ns / 1'000'000'000 - lease.modified_ns / 1'000'000'000;
  if (lease.modified_ns <= now_ns && age_seconds >= ttl.count()) {
    return LeaseState::kExpired;
  }
  if (!lease.info) return LeaseState::kUnreadable;
  return age_seconds < -kSlackSeconds ? LeaseState::kFuture : LeaseState::kLive;
}

}  // namespace kedge
