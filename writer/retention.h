#ifndef KEDGE_WRITER_RETENTION_H_
#define KEDGE_WRITER_RETENTION_H_

// Which steps and anchors a store still needs, and how the others go. See
// docs/protocol.md, "Retention". `kedge gc` and a writer that keeps its own
// store small use the same plan.

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kedge/engine/io/file_system.h"
#include "kedge/engine/io/lease.h"
#include "kedge/engine/io/store.h"

namespace kedge {

struct RetentionOptions {
  // The newest this many sound anchors stay, with every step from the oldest of
  // them on. At least 1.
  std::uint32_t keep_anchors = 2;
  // A lease that was written this long ago, by the storage's own clock, pins
  // nothing any more. After twice the time it is removed.
  std::chrono::seconds lease_ttl = kDefaultLeaseTtl;
  // What was moved to .trash is deleted, by a later call, once it has lain
  // there this long by the storage's own clock: readers that are still in it
  // finish or notice.
  std::chrono::seconds grace{60};
};

struct GcOptions {
  std::string store_path;
  FileSystem* fs = nullptr;  // null: PosixFileSystem()
  // As in RetentionOptions.
  std::uint32_t keep_anchors = 2;
  std::chrono::seconds grace{60};
  // Changes nothing, not even to ask the storage for its time: leases and
  // .trash are judged by this host's clock.
  bool dry_run = false;
  std::chrono::seconds lease_ttl = kDefaultLeaseTtl;
};

// A lease as gc judged it.
struct GcLease {
  std::string name;
  LeaseState state = LeaseState::kLive;
  std::optional<LeaseInfo> info;
  std::string problem;  // why it cannot be believed
  std::int64_t age_seconds = 0;
  bool pins = false;  // something stays that would go without it
};

struct GcReport {
  std::uint64_t oldest_kept_step = 0;
  std::vector<std::uint64_t> moved_steps;  // to .trash by this gc, ascending
  // Anchors of steps that stay for a lease alone, beyond keep_anchors.
  std::vector<std::uint64_t> moved_anchors;
  // Back from .trash: pinned by a lease that came meanwhile, or moved by a gc
  // that was killed, or that did not know of a resume.
  std::vector<std::uint64_t> restored_steps;
  std::vector<std::uint64_t> restored_anchors;
  std::vector<std::uint32_t> removed_epochs;
  std::vector<std::string> removed_staging;  // of epochs that are fenced
  std::vector<std::string> removed_leases;   // of readers long gone
  std::vector<std::string> deleted_trash;    // names within .trash
  std::vector<GcLease> leases;               // all that were looked at
  std::vector<std::string> warnings;         // leases somebody should look at
};

// Drops what the newest `keep_anchors` anchors and the live leases do not need.
// Chains stay whole: from every anchor that is kept, each later version can be
// reached, and from the oldest step of every live lease. A store with fewer
// sound anchors keeps everything, and so does one with a lease that is not
// expired and cannot be read. May run beside a writer, readers and another gc.
//
// Errors: kInvalidArgument, kNotFound (no store), those of storage. What was
// moved before an error stays moved: every state in between is a sound store,
// and the next gc goes on from it.
absl::StatusOr<GcReport> CollectGarbage(const GcOptions& options);

// The same for one writer after each of its publishes: remembers what it read,
// so that a call reads the newest manifest and looks for anchors since the
// oldest that is kept, and does the rest when there is something to do.
//
// Thread safety: none.
class Retention {
 public:
  explicit Retention(const RetentionOptions& options);

  // As CollectGarbage. `store` is the same store at every call.
  absl::StatusOr<GcReport> Retain(const Store& store);

 private:
  friend absl::StatusOr<GcReport> CollectGarbage(const GcOptions& options);
  class Pass;

  // What never changes of a step that was read.
  struct Version {
    VersionId id;
    VersionId base;
    bool root = false;
    bool anchor = false;  // a sound one was seen
  };
  using Clock = std::chrono::steady_clock;

  absl::StatusOr<GcReport> Collect(const Store& store, bool dry_run,
                                   bool always);

  RetentionOptions options_;
  std::map<std::uint64_t, Version> known_;
  // Steps below the kept anchors that were seen to have none of their own.
  std::uint64_t anchors_swept_below_ = 0;
  std::optional<Clock::time_point> last_full_pass_;
  bool trash_left_ = true;  // as far as is known
};

}  // namespace kedge

#endif  // KEDGE_WRITER_RETENTION_H_
