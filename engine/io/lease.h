#ifndef KEDGE_ENGINE_IO_LEASE_H_
#define KEDGE_ENGINE_IO_LEASE_H_

// What a reader says it still needs, so that gc leaves it alone. See
// spec/lease.md and docs/protocol.md, "Leases".
//
// A lease never makes a store unsafe: a reader writes it, then looks again
// whether what it wants to read is still there. gc moves things to .trash, then
// looks again at the leases. Whoever looks second sees the other.

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kedge/engine/io/file_system.h"
#include "kedge/format/fixed_files.h"
#include "kedge/format/manifest.h"

namespace kedge {

struct LeaseInfo {
  std::string reader;             // the reader id, and the file's name
  std::uint64_t oldest_step = 0;  // steps from here on are needed
  std::optional<VersionId> held;  // what the reader serves, if anything
  std::uint64_t counter = 0;      // one more with every write
};

// One reader's lease, by its owner.
//
// Nothing stays on the store until the first Set. Destroying the object leaves
// the lease where it is: it expires, or Remove() takes it away.
// Thread safety: all methods may run concurrently; they wait for each other.
class Lease {
 public:
  // Makes the directory `leases` if it is missing, and looks at a lease that an
  // earlier process of this reader left there: it is taken over, and the
  // counter goes on.
  //
  // Errors: kInvalidArgument if `reader_id` is none (IsReaderId); those of
  // storage, for example kPermissionDenied on a read-only mount.
  static absl::StatusOr<std::unique_ptr<Lease>> Create(FileSystem* fs,
                                                       std::string store_path,
                                                       std::string reader_id,
                                                       RunId run);

  // Replaces the lease, by rename. Returns OK once every other client of the
  // storage can see it; then check that the COMMITs of what is to be read are
  // still there.
  //
  // Errors: kInvalidArgument for a step above kMaxStep; kFailedPrecondition if
  // another process writes a lease under this reader id: each would take away
  // what the other needs. Those of storage; the lease is then the old one or
  // the new one.
  absl::Status Set(std::uint64_t oldest_step,
                   const std::optional<VersionId>& held);
  // Writes the last Set again, with the next counter and so a new time. Well
  // before the lease expires: gc takes one for dead after its lease_ttl, 10
  // minutes unless told otherwise. kFailedPrecondition before the first Set.
  absl::Status Renew();
  // Takes the lease away; no error if it is gone already. One that another
  // process writes is left alone. Set may be called again afterwards.
  absl::Status Remove();

  const std::string& reader_id() const { return reader_id_; }
  const std::string& path() const { return path_; }

 private:
  Lease(FileSystem* fs, std::string path, std::string reader_id, RunId run);
  absl::Status Write(std::uint64_t oldest_step,
                     const std::optional<VersionId>& held)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // What stands in the store, if another process wrote it.
  absl::StatusOr<std::optional<LeaseRecord>> Foreign() const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  FileSystem* const fs_;
  const std::string path_;
  const std::string temporary_;
  const std::string reader_id_;
  const RunId run_;
  std::mutex mutex_;
  std::uint64_t counter_ ABSL_GUARDED_BY(mutex_) = 0;
  // The last write, whether it failed or not.
  std::optional<LeaseRecord> written_ ABSL_GUARDED_BY(mutex_);
};

// A file in `leases` that has the name of a lease.
struct LeaseEntry {
  std::string name;
  // Why it cannot be believed; `info` is then empty.
  //   kDataLoss            damaged, or under another reader's name
  //   kFailedPrecondition  sound, and of another run
  //   kUnimplemented       of a newer format
  //   others               the storage did not give the bytes
  absl::Status status;
  std::optional<LeaseInfo> info;
  std::int64_t modified_ns = 0;  // mtime, by the storage's clock
};

struct LeaseListing {
  std::vector<LeaseEntry> leases;  // by name
  // Files on their way to becoming a lease; after a crash they stay.
  struct Temporary {
    std::string name;
    std::int64_t modified_ns = 0;
  };
  std::vector<Temporary> temporaries;
};

// Every lease of the store `store_path` of run `run`. A store without the
// directory has none. Leases that come or go meanwhile may or may not be there,
// those that are renewed meanwhile are.
//
// Errors: those of listing the directory.
absl::StatusOr<LeaseListing> ReadLeases(FileSystem& fs,
                                        absl::string_view store_path,
                                        const RunId& run);

enum class LeaseState {
  kLive,
  kFuture,      // live; its time is after `now`, so clocks disagree
  kExpired,     // older than the time to live: pins nothing, sound or not
  kForeign,     // of another run: pins nothing here
  kUnreadable,  // not expired, and nobody knows what it pins
};
absl::string_view LeaseStateName(LeaseState state);  // "live", "expired", ...

// How long a lease counts after it was written, unless an option says
// otherwise. Readers renew theirs many times in it.
inline constexpr std::chrono::seconds kDefaultLeaseTtl{600};

// `now_ns` in nanoseconds since 1970, by the storage's clock: hosts' clocks
// differ from it.
LeaseState StateOfLease(const LeaseEntry& lease, std::int64_t now_ns,
                        std::chrono::seconds ttl);

// "ID~0123456789abcdef": a name that IsReaderId refuses. The reader id of such
// a name, or nothing.
std::optional<std::string> ReaderOfLeaseTemporary(absl::string_view name);

}  // namespace kedge

#endif  // KEDGE_ENGINE_IO_LEASE_H_
