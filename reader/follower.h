#ifndef KEDGE_READER_FOLLOWER_H_
#define KEDGE_READER_FOLLOWER_H_

// The inference engine's side: follows a store, applies deltas in place, proves
// that what memory holds is the version it claims; alone, or as one rank of a
// group that holds the model together. See docs/protocol.md.

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kedge/engine/device/device.h"
#include "kedge/engine/io/file_system.h"
#include "kedge/format/manifest.h"
#include "kedge/reader/group.h"
#include "kedge/reader/weight_set.h"

namespace kedge {

// How files are read. kAuto: kMap on local file systems if the weights lie in
// host memory, else kRead.
enum class ReadMode { kAuto, kMap, kRead };

enum class FollowerState {
  kEmpty,       // nothing verified: Join, or VerifyHeld. Also the state of a
                // follower that holds the model in part (allow_partial)
  kReady,       // memory holds held(), verified
  kUpdating,    // weights are being changed
  kPoisoned,    // an update failed half-way; Join heals
  kSuperseded,  // held() is no longer an ancestor of the newest version; the
                // weights are whole and go on serving; the next update rejoins
};
absl::string_view ToString(FollowerState state);

struct FollowerOptions {
  std::string store_path;
  FileSystem* fs = nullptr;  // null: PosixFileSystem()
  ReadMode read_mode = ReadMode::kAuto;
  // Of files. From memory (tmpfs, page cache) to a device eight do not fill the
  // bus.
  int io_threads = 12;
  int apply_threads = 0;  // 0: one per core
  // Where the weights lie. Null: in host memory. Else every target of every set
  // lies in memory of this device, which outlives the follower; records are
  // decoded and sums taken there, and apply_threads is not used.
  //
  // A pause is then one launch for each delta and one for all checksums; what
  // these need lies on the device before `pause` is called, and nothing is
  // allocated in it. (Not so for a join, above all into memory of no version:
  // see Join.) Open takes pinned memory: 16 MiB for each I/O thread and 16
  // more.
  Device* device = nullptr;
  // The stream on which weights change and are summed; null: one that the
  // follower makes. `pause` leaves no other work on the weights in flight but
  // what is on this stream already. When an updating call returns, all that it
  // enqueued has run.
  DeviceStream stream = nullptr;
  // The most device memory that deltas take before they are applied; kept and
  // used again. A chain that does not fit is followed in several pauses, each
  // to a version of its own; a join then reads the later deltas during its
  // pause. One delta that does not fit is kResourceExhausted.
  std::uint64_t device_stage_bytes = std::uint64_t{4} << 30;
  // Passes through every version, pausing for each; for followers that may skip
  // none. Otherwise an update goes straight to the newest.
  bool every_version = false;
  // Holding only part of the model is allowed; such a follower reports
  // "unverified" tensors and is never kReady.
  bool allow_partial = false;
  // Decodes every record in full before the pause, and checks nnz and L(record)
  // against the manifest, so that a malformed record never reaches the weights.
  bool check_records_before_pause = true;
  // The directory is looked at, beyond HEAD, at least this often.
  std::chrono::milliseconds directory_interval{30'000};
  // How long ESTALE, ENOENT and short files are retried before giving up.
  std::chrono::milliseconds retry_deadline{10'000};
  // The ranks that hold the model together with this one.
  GroupOptions group;
  // Under this name the follower says in the store which steps it still needs,
  // so that gc leaves them alone; no two readers may use the same one. Ranks of
  // a group may: each adds its number. Empty: gc is not asked, and a chain may
  // be pruned while it is read.
  std::string lease_id;
  // A lease older than this is renewed by the next Update, Prefetch or
  // WaitForUpdate. Well below the time after which gc takes one for dead.
  std::chrono::milliseconds lease_renewal{20'000};
  // Called before the first write and after verification, on the thread that
  // updates. `pause` returning an error cancels the update, nothing changed;
  // what was read is kept for the next one. `commit` is called exactly once per
  // update, while still paused and kUpdating; drop caches that depend on the
  // weights there.
  std::function<absl::Status()> pause;
  std::function<void(const VersionId&)> commit;
  // Groups only: called after `pause` if the ranks then decided to change
  // nothing. Weights are whole and go on serving.
  std::function<void()> resume;
};

// What one update did. Times in seconds.
struct UpdateResult {
  VersionId version;     // held now
  bool changed = false;  // false: nothing newer was found
  bool joined = false;   // came from an anchor
  std::uint64_t deltas = 0;
  std::uint64_t bytes_read = 0;
  std::uint64_t nnz = 0;            // changes in the records read
  std::uint64_t units_written = 0;  // into the boxes
  std::uint64_t records = 0;
  // Coverage: tensors of the model, of a group those of all its ranks, and what
  // of them was read in this process. A heal reads some of it twice.
  std::uint64_t tensors_verified = 0;
  std::uint64_t elements_verified = 0;
  std::uint64_t bytes_verified = 0;
  double read_seconds = 0;   // plan, read, check, as far as before the pause
  double pause_seconds = 0;  // apply + verify + commit
  double apply_seconds = 0;
  double verify_seconds = 0;
  // What went wrong without harm, each once: a lease that cannot be written.
  std::vector<std::string> warnings;
};

// In a group every call below but Prefetch and the last three is made by all
// ranks, and all come out of it alike: at one version, or with an error that
// names the ranks which failed. Before the vote has passed an error changes
// nothing on any rank; after it, all are kPoisoned. Only a reducer that fails
// on some ranks and not on others can leave ranks in different states; the next
// call finds that out.
//
// Thread safety: one thread calls the updating methods (Join, VerifyHeld,
// Prefetch, Update); held() and state() may be read from any thread.
class Follower {
 public:
  // Opens the store, binds the weight sets (of all ranks together) to the
  // newest version's table. `sets` and the weights they point to outlive the
  // follower. In a group: two reduces.
  static absl::StatusOr<std::unique_ptr<Follower>> Open(
      FollowerOptions options, std::vector<const WeightSet*> sets);
  ~Follower();

  // Declares that memory already holds version `step` (v0 for a boot
  // checkpoint) and proves it before anything is written. kDataLoss names every
  // tensor that differs (the first few); the state stays kEmpty. In a group:
  // two reduces.
  absl::Status VerifyHeld(std::uint64_t step);

  // Loads the newest version from its cheapest sound anchor and the deltas
  // after it, in place. A damaged anchor is passed over for an older one. Also
  // how a poisoned or superseded follower heals: tensors whose memory verifies
  // already are then not read again.
  //
  // An anchor is too large to be read ahead: it is checked piece by piece on
  // the way to the weights, after the pause. A failure there is kPoisoned. A
  // follower alone on a device that holds no version reads deltas beside it;
  // others read them before the pause.
  //
  // In a group every rank ends at the same version, and reads again what does
  // not verify over all ranks. Three reduces, a fourth to find out what memory
  // holds, two more if ranks see different newest versions.
  absl::StatusOr<UpdateResult> Join();
  // Likewise to a given version, for tests and tools; kNotFound.
  absl::StatusOr<UpdateResult> JoinStep(std::uint64_t step);

  // Looks for a newer version and, if there is one, reads and checks everything
  // that the update needs. Weights are untouched. Returns the version that
  // Update would go to, or nothing.
  absl::StatusOr<std::optional<VersionId>> Prefetch();

  // Prefetch unless done, then pause, apply, verify, commit. With nothing newer
  // it returns changed = false. Goes on from kSuperseded by rejoining.
  //
  // Errors: before the pause nothing is changed and the state stays. After it,
  // the state is kPoisoned and the message names the tensor.
  //   kFailedPrecondition  kEmpty or kPoisoned: Join first
  //   kDataLoss            a damaged file (before), or a tensor whose checksum
  //                        is wrong (after)
  //   kUnavailable         files could not be read, or other ranks not be
  //                        reached, in time: try again
  //   kNotFound            "pruned": retention was faster; the next call takes
  //                        a newer version
  //
  // In a group: two reduces for each version that is entered, to vote and to
  // verify; one if nothing is newer on any rank. Ranks that see different
  // newest versions vote once more, on the oldest of these. Ranks that hold
  // different versions rejoin.
  absl::StatusOr<UpdateResult> Update();

  // Update, waiting up to `timeout` for something newer (polls HEAD by open).
  // kDeadlineExceeded says what it waited for. In a group the clock of rank 0
  // decides.
  absl::StatusOr<UpdateResult> WaitForUpdate(std::chrono::milliseconds timeout);

  FollowerState state() const;
  // The version that memory holds; nothing while it is kUpdating or kPoisoned.
  std::optional<VersionId> held() const;
  // Names of tensors that are held in part only (by all ranks together) and
  // cannot be verified.
  std::vector<std::string> unverified_tensors() const;

 private:
  struct Impl;  // follower_impl.h
  explicit Follower(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace kedge

#endif  // KEDGE_READER_FOLLOWER_H_
