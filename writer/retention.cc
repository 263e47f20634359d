#include "kedge/writer/retention.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <memory>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "kedge/format/fixed_files.h"
#include "kedge/format/layout.h"
#include "kedge/format/limits.h"
#include "kedge/format/manifest.h"
#include "kedge/format/status.h"

namespace kedge {
namespace {

// Whether an anchor is all there: manifest, and files of the right sizes. Their
// bytes are for fsck to judge.
bool AnchorStands(const Store& store, const VersionId& id) {
  const auto anchor = store.ReadAnchor(id);
  if (!anchor.ok()) return false;
  const auto& files = (*anchor)->manifest.files;
  return std::all_of(files.begin(), files.end(), [&](const DataFile& file) {
    const auto info =
        store.fs()->Stat(JoinPath((*anchor)->path, DataFileName(file.id)));
    return info.ok() && info->type == FileType::kRegular &&
           info->bytes == file.bytes;
  });
}

constexpr std::uint64_t kNever = std::numeric_limits<std::uint64_t>::max();
constexpr char kStampMark[] = ".gc.";
constexpr char kDeadMark[] = ".dead";
constexpr char kAnchorMark[] = ".anchor";

// A name in .trash. Once a gc has looked at it, it is WHAT.gc.SECONDS.TOKEN; a
// gc that deletes it adds ".dead" first, so that no other takes it back.
struct TrashEntry {
  std::string name;
  std::string what;
  std::optional<std::uint64_t> stamp;
  bool dead = false;
  // What gc itself moved, and may take back. What a resume moved has another
  // name, and is never taken back.
  std::optional<std::uint64_t> step;
  std::optional<std::uint64_t> anchor_of;
};

TrashEntry ParseTrashName(const std::string& name) {
  TrashEntry entry;
  entry.name = name;
  absl::string_view rest = name;
  entry.dead = absl::ConsumeSuffix(&rest, kDeadMark);
  const std::size_t at = rest.rfind(kStampMark);
  if (at == absl::string_view::npos) return entry;
  const std::vector<absl::string_view> parts =
      absl::StrSplit(rest.substr(at + sizeof(kStampMark) - 1), '.');
  std::uint64_t seconds = 0;
  if (parts.size() > 2 || !absl::SimpleAtoi(parts[0], &seconds)) return entry;
  entry.stamp = seconds;
  absl::string_view what = rest.substr(0, at);
  entry.what = std::string(what);
  if (entry.dead) return entry;
  if (absl::ConsumeSuffix(&what, kAnchorMark)) {
    entry.anchor_of = ParseStepDirectoryName(what);
  } else {
    entry.step = ParseStepDirectoryName(what);
  }
  return entry;
}

// The token keeps apart what was moved, taken back and moved again within one
// second.
std::string StampedName(absl::string_view what, std::int64_t now_ns) {
  return absl::StrCat(what, kStampMark,
                      std::max<std::int64_t>(now_ns, 0) / 1'000'000'000, ".",
                      absl::Hex(RandomSeed(), absl::kZeroPad16));
}

// The storage's own idea of now: hosts' clocks differ, and ages must not.
absl::StatusOr<std::int64_t> StorageNow(FileSystem& fs,
                                        const std::string& trash) {
  // Another gc that tidies up may take the file for a leftover.
  constexpr int kTries = 3;
  for (int attempt = 1;; ++attempt) {
    const std::string probe =
        JoinPath(trash, absl::StrCat("now.", RandomSeed()));
    KEDGE_RETURN_IF_ERROR(WriteNewFile(fs, probe, {}));
    const auto info = fs.Stat(probe);
    fs.RemoveFile(probe).IgnoreError();
    if (info.ok()) return info->modified_ns;
    if (!absl::IsNotFound(info.status()) || attempt == kTries) {
      return info.status();
    }
  }
}

std::int64_t HostNow() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

// Rename for which a source that is gone already is no error: another gc was
// faster.
absl::Status MoveIfThere(FileSystem& fs, const std::string& from,
                         const std::string& to) {
  const absl::Status moved = fs.Rename(from, to);
  if (moved.ok() || absl::IsNotFound(fs.Stat(from).status())) {
    return absl::OkStatus();
  }
  return moved;
}

absl::Status RemoveIfThere(FileSystem& fs, const std::string& path) {
  const absl::Status removed = fs.RemoveFile(path);
  return absl::IsNotFound(removed) ? absl::OkStatus() : removed;
}

// The epoch of "HEAD.3", "table.3.0", "epoch.3.77": files of a writer on their
// way to their place.
std::optional<std::uint32_t> TemporaryEpoch(absl::string_view name) {
  const std::vector<absl::string_view> parts = absl::StrSplit(name, '.');
  std::uint32_t epoch = 0;
  if (parts.size() < 2 || parts.size() > 3 ||
      (parts[0] != "HEAD" && parts[0] != "table" && parts[0] != "epoch") ||
      !absl::SimpleAtoi(parts[1], &epoch)) {
    return {};
  }
  return epoch;
}

// A lease of a reader that goes on from what it holds needs no anchor: it adds
// deltas. Any other one joins, from its oldest step or from a later one.
bool MayJoin(const LeaseInfo& lease) {
  return !lease.held || lease.held->step != lease.oldest_step;
}

template <class T>
bool Contains(const std::vector<T>& values, const T& value) {
  return std::find(values.begin(), values.end(), value) != values.end();
}

}  // namespace

// One run over a store.
class Retention::Pass {
 public:
  Pass(Retention* retention, const Store& store, bool dry_run)
      : retention_(*retention),
        options_(retention->options_),
        store_(store),
        fs_(*store.fs()),
        dry_run_(dry_run),
        trash_path_(store.PathOf(kTrashDirectoryName)) {}

  absl::StatusOr<GcReport> Run(bool always) {
    KEDGE_RETURN_IF_ERROR(ListSteps());
    KEDGE_RETURN_IF_ERROR(Walk(/*take_back=*/false));
    report_.oldest_kept_step = cut_.value_or(0);
    const bool steps_to_spare =
        cut_ && !steps_.empty() && *steps_.begin() < *cut_;
    // A chain that breaks may break at what a gc moved and did not take back.
    if (!always && !steps_to_spare && !broken_) return Finish();

    // .trash before the leases: what is deleted below lay there before they
    // were read, so no reader has found it since.
    KEDGE_RETURN_IF_ERROR(ListTrash());
    const std::vector<TrashEntry> old_trash = trash_;
    // A writer may open the store and go back to before what this plan keeps.
    constexpr int kTries = 3;
    for (int attempt = 0; attempt < kTries; ++attempt) {
      KEDGE_ASSIGN_OR_RETURN(const std::vector<EpochInfo> before,
                             store_.ReadEpochs());
      if (attempt > 0) {
        KEDGE_RETURN_IF_ERROR(ListSteps());
        KEDGE_RETURN_IF_ERROR(ListTrash());
      }
      KEDGE_RETURN_IF_ERROR(JudgeLeases());
      KEDGE_RETURN_IF_ERROR(Walk(/*take_back=*/!dry_run_));
      KEDGE_RETURN_IF_ERROR(MakePlan());
      KEDGE_ASSIGN_OR_RETURN(const std::vector<EpochInfo> after,
                             store_.ReadEpochs());
      if (before == after) break;
    }
    const bool moves = !steps_to_move_.empty() || !anchors_to_move_.empty();
    if (!always && !moves) return Finish();

    report_.moved_steps = steps_to_move_;
    report_.moved_anchors = anchors_to_move_;
    if (!dry_run_ && moves) {
      const absl::Status moved = Move();
      // Whoever wrote a lease before the renames was told that everything is
      // there. Who writes one after them finds what is gone.
      KEDGE_RETURN_IF_ERROR(ListSteps());
      KEDGE_RETURN_IF_ERROR(ListTrash());
      KEDGE_RETURN_IF_ERROR(JudgeLeases());
      KEDGE_RETURN_IF_ERROR(Walk(/*take_back=*/true));
      KEDGE_RETURN_IF_ERROR(moved);
      // Those that this did not come to are for the next gc.
      std::erase_if(report_.moved_steps,
                    [&](std::uint64_t step) { return steps_.contains(step); });
      KEDGE_RETURN_IF_ERROR(MakePlan());  // for what is kept
    }
    KEDGE_RETURN_IF_ERROR(CleanEpochs());
    KEDGE_RETURN_IF_ERROR(CleanStaging());
    KEDGE_RETURN_IF_ERROR(CleanLeases());
    KEDGE_RETURN_IF_ERROR(CleanTrash(old_trash));
    full_ = true;
    return Finish();
  }

  bool full() const { return full_; }
  bool trash_left() const { return trash_left_; }

 private:
  std::string InTrash(absl::string_view name) const {
    return JoinPath(trash_path_, name);
  }

  GcReport Finish() {
    // What came back did not go.
    const auto drop = [](std::vector<std::uint64_t>* from,
                         const std::vector<std::uint64_t>& values) {
      from->erase(std::remove_if(from->begin(), from->end(),
                                 [&](std::uint64_t value) {
                                   return Contains(values, value);
                                 }),
                  from->end());
    };
    drop(&report_.moved_steps, report_.restored_steps);
    drop(&report_.moved_anchors, report_.restored_anchors);
    std::sort(report_.restored_steps.begin(), report_.restored_steps.end());
    std::sort(report_.restored_anchors.begin(), report_.restored_anchors.end());
    if (cut_ && !dry_run_) {
      auto& known = retention_.known_;
      known.erase(known.begin(), known.lower_bound(*cut_));
    }
    return std::move(report_);
  }

  // --------------------------------------------------------------- what is
  // there
  absl::Status ListSteps() {
    KEDGE_ASSIGN_OR_RETURN(const std::vector<std::uint64_t> steps,
                           store_.ListSteps());
    steps_ = {steps.begin(), steps.end()};
    return absl::OkStatus();
  }

  absl::Status ListTrash() {
    trash_.clear();
    const auto names = fs_.List(trash_path_);
    if (!names.ok()) {
      if (!absl::IsNotFound(names.status())) return names.status();
      return dry_run_ ? absl::OkStatus() : EnsureDirectory(fs_, trash_path_);
    }
    for (const std::string& name : *names) {
      trash_.push_back(ParseTrashName(name));
    }
    return absl::OkStatus();
  }

  // Reads the leases and what they pin.
  absl::Status JudgeLeases() {
    KEDGE_ASSIGN_OR_RETURN(const LeaseListing listing,
                           ReadLeases(fs_, store_.path(), store_.info().run));
    // After the leases, or one that is renewed meanwhile is from the future.
    if (dry_run_) {
      now_ns_ = HostNow();
    } else {
      KEDGE_ASSIGN_OR_RETURN(now_ns_, StorageNow(fs_, trash_path_));
    }
    temporaries_ = listing.temporaries;
    entries_ = listing.leases;
    report_.leases.clear();
    report_.warnings.clear();
    pin_ = kNever;
    pin_everything_ = false;
    joining_ = kNever;
    const auto warn = [&](const LeaseEntry& entry, auto... text) {
      report_.warnings.push_back(
          absl::StrCat(kLeasesDirectoryName, "/", entry.name, ": ", text...));
    };
    for (const LeaseEntry& entry : entries_) {
      GcLease lease;
      lease.name = entry.name;
      lease.state = StateOfLease(entry, now_ns_, options_.lease_ttl);
      lease.info = entry.info;
      lease.problem = std::string(entry.status.message());
      lease.age_seconds =
          now_ns_ / 1'000'000'000 - entry.modified_ns / 1'000'000'000;
      switch (lease.state) {
        case LeaseState::kFuture:
          warn(entry, "written ", -lease.age_seconds,
               " s after now, by the storage's clock; it counts as live; see "
               "to the clocks");
          [[fallthrough]];
        case LeaseState::kLive:
          if (!StillUseful(*entry.info)) {
            lease.problem = absl::StrCat(
                "v", entry.info->oldest_step,
                " is gone already; the reader joins anew at its next update");
            break;
          }
          pin_ = std::min(pin_, entry.info->oldest_step);
          if (MayJoin(*entry.info)) {
            joining_ = std::min(joining_, entry.info->oldest_step);
          }
          break;
        case LeaseState::kUnreadable:
          // Perhaps of a newer kedge, perhaps of a reader that depends on it.
          pin_everything_ = true;
          lease.pins = true;
          warn(entry, lease.problem, "; nothing is moved until it is ",
               options_.lease_ttl.count(), " s old, or gone");
          break;
        case LeaseState::kForeign:
          warn(entry, lease.problem);
          break;
        case LeaseState::kExpired:
          break;
      }
      report_.leases.push_back(std::move(lease));
    }
    return absl::OkStatus();
  }

  // Whether a reader can go on from there at all. One that was away for so long
  // that its steps went must not pin what it cannot reach.
  bool StillUseful(const LeaseInfo& lease) const {
    std::uint64_t lowest = steps_.empty() ? kNever : *steps_.begin();
    std::string in_trash;
    for (const TrashEntry& entry : trash_) {
      if (entry.step && *entry.step < lowest) {
        lowest = *entry.step;
        in_trash = entry.name;
      }
    }
    if (lease.oldest_step >= lowest) return true;
    if (MayJoin(lease) || lowest == kNever) return false;
    // What it holds is gone; the delta on it need not be.
    const std::string directory =
        in_trash.empty() ? store_.StepPath(lowest) : InTrash(in_trash);
    const std::string path = JoinPath(directory, kManifestFileName);
    const auto bytes = ReadFile(fs_, path, kMaxFlatBufferBytes);
    if (!bytes.ok()) return !absl::IsNotFound(bytes.status());
    const auto manifest = ParseStepManifest(path, *bytes);
    return manifest.ok() && manifest->base == *lease.held;
  }

  bool AnchorIsPinned(std::uint64_t step) const {
    return pin_everything_ || step >= joining_;
  }

  // --------------------------------------------------------------------- chain
  // Down the newest version's chain until enough sound anchors are found. An
  // anchor elsewhere helps nobody. With `take_back`, what the chain or a lease
  // needs and a gc has moved comes back.
  absl::Status Walk(bool take_back) {
    cut_.reset();
    broken_ = false;
    std::uint32_t found = 0;
    auto newest = store_.Newest();
    if (take_back && (newest.ok() || absl::IsNotFound(newest.status()))) {
      KEDGE_RETURN_IF_ERROR(TakeBackNewest(&newest));
    }
    if (!newest.ok()) return newest.status();
    Version* at = Remember(**newest);
    while (true) {
      const bool needed = !cut_ || AnchorIsPinned(at->id.step);
      KEDGE_ASSIGN_OR_RETURN(const bool anchor,
                             HasSoundAnchor(at, take_back && needed));
      if (anchor && !cut_ && ++found == options_.keep_anchors) {
        cut_ = at->id.step;
      }
      if (cut_ && !(take_back && MayComeBack(at->id.step))) break;
      if (at->root && at->id.step == 0) break;
      KEDGE_ASSIGN_OR_RETURN(Version* const base, Load(at->base, take_back));
      if (base == nullptr) {
        broken_ = !cut_;
        break;
      }
      at = base;
    }
    return absl::OkStatus();
  }

  // A plan that was made before a resume may have moved what the resumed writer
  // published since, and with it the newest version.
  absl::Status TakeBackNewest(
      absl::StatusOr<std::shared_ptr<const PublishedStep>>* newest) {
    std::vector<const TrashEntry*> above;
    for (const TrashEntry& entry : trash_) {
      if (entry.step && (!newest->ok() || *entry.step > (**newest)->id.step)) {
        above.push_back(&entry);
      }
    }
    if (above.empty()) return absl::OkStatus();
    std::sort(above.begin(), above.end(),
              [](const TrashEntry* a, const TrashEntry* b) {
                return *a->step > *b->step;
              });
    KEDGE_ASSIGN_OR_RETURN(const std::vector<EpochInfo> epochs,
                           store_.ReadEpochs());
    for (const TrashEntry* entry : above) {
      const std::uint64_t step = *entry->step;
      const auto commit = PeekCommit(entry->name);
      if (!commit.ok() || commit->epoch != Store::ValidEpoch(epochs, step)) {
        continue;  // not there, half deleted, or superseded
      }
      KEDGE_ASSIGN_OR_RETURN(const bool back,
                             TakeBack(entry->name, store_.StepPath(step)));
      if (!back) continue;
      auto read = store_.ReadStep(step);
      if (!read.ok()) {
        KEDGE_RETURN_IF_ERROR(Discard(store_.StepPath(step), entry->what));
        continue;
      }
      steps_.insert(step);
      report_.restored_steps.push_back(step);
      *newest = *std::move(read);
      return absl::OkStatus();
    }
    return absl::OkStatus();
  }

  // COMMIT of something in .trash.
  absl::StatusOr<CommitRecord> PeekCommit(const std::string& name) const {
    const std::string path = JoinPath(InTrash(name), kCommitFileName);
    KEDGE_ASSIGN_OR_RETURN(const std::vector<std::byte> bytes,
                           ReadFile(fs_, path, 2 * kCommitBytes));
    return ParseCommit(path, bytes);
  }

  // What came back and is not what it seemed to be goes for good.
  absl::Status Discard(const std::string& path, const std::string& what) {
    return MoveIfThere(
        fs_, path,
        InTrash(absl::StrCat(StampedName(what, now_ns_), kDeadMark)));
  }

  // Whether .trash has something below `step` that a lease pins.
  bool MayComeBack(std::uint64_t step) const {
    return std::any_of(
        trash_.begin(), trash_.end(), [&](const TrashEntry& entry) {
          if (entry.step) {
            return *entry.step < step && *entry.step >= PinnedFrom();
          }
          return entry.anchor_of && *entry.anchor_of < step &&
                 AnchorIsPinned(*entry.anchor_of);
        });
  }
  std::uint64_t PinnedFrom() const { return pin_everything_ ? 0 : pin_; }

  Version* Remember(const PublishedStep& step) {
    Version& version = retention_.known_[step.id.step];
    if (version.id != step.id) version = Version();
    version.id = step.id;
    version.base = step.manifest.base;
    version.root = step.manifest.kind == StepKind::kRoot;
    return &version;
  }

  // The version `id`, or null if the chain ends here.
  absl::StatusOr<Version*> Load(const VersionId& id, bool take_back) {
    if (steps_.contains(id.step)) {
      const auto known = retention_.known_.find(id.step);
      if (known != retention_.known_.end() && known->second.id == id) {
        return &known->second;
      }
      const auto read = store_.ReadStep(id.step);
      if (!read.ok() || (*read)->id != id) return nullptr;
      return Remember(**read);
    }
    if (!take_back) return nullptr;
    for (const TrashEntry& entry : trash_) {
      if (entry.step != id.step) continue;
      const auto commit = PeekCommit(entry.name);
      if (!commit.ok() || commit->manifest_hash != id.manifest_hash) continue;
      const std::string target = store_.StepPath(id.step);
      KEDGE_ASSIGN_OR_RETURN(const bool back, TakeBack(entry.name, target));
      if (!back) continue;
      const auto read = store_.ReadStep(id.step);
      if (read.ok() && (*read)->id == id) {
        steps_.insert(id.step);
        report_.restored_steps.push_back(id.step);
        return Remember(**read);
      }
      KEDGE_RETURN_IF_ERROR(Discard(target, entry.what));
    }
    return nullptr;
  }

  absl::StatusOr<bool> HasSoundAnchor(Version* version, bool take_back) {
    const std::uint64_t step = version->id.step;
    if (store_.HasAnchor(step)) {
      if (!version->anchor) {
        version->anchor = AnchorStands(store_, version->id);
      }
      return version->anchor;
    }
    if (!take_back) return false;
    for (const TrashEntry& entry : trash_) {
      if (entry.anchor_of != step || !PeekCommit(entry.name).ok()) continue;
      const std::string target = store_.AnchorPath(step);
      KEDGE_ASSIGN_OR_RETURN(const bool back, TakeBack(entry.name, target));
      if (!back) continue;
      if (AnchorStands(store_, version->id)) {
        version->anchor = true;
        report_.restored_anchors.push_back(step);
        retention_.anchors_swept_below_ = 0;
        return true;
      }
      KEDGE_RETURN_IF_ERROR(Discard(target, entry.what));
    }
    return false;
  }

  // Whether something of ours came back to `target`.
  absl::StatusOr<bool> TakeBack(const std::string& name,
                                const std::string& target) {
    const absl::Status moved = fs_.Rename(InTrash(name), target);
    if (moved.ok()) return true;
    const absl::Status left = fs_.Stat(InTrash(name)).status();
    // Gone: the rename took place all the same, or another gc was faster.
    if (absl::IsNotFound(left)) return fs_.Stat(target).ok();
    if (absl::IsAlreadyExists(moved)) return false;
    return Annotate(moved, absl::StrCat("taking back ", target));
  }

  // ---------------------------------------------------------------------- plan
  absl::Status MakePlan() {
    steps_to_move_.clear();
    anchors_to_move_.clear();
    report_.oldest_kept_step = 0;
    if (!cut_) return absl::OkStatus();  // nothing to spare
    const std::uint64_t keep_from = std::min(*cut_, PinnedFrom());
    report_.oldest_kept_step = keep_from;
    for (GcLease& lease : report_.leases) {
      if (lease.info && lease.problem.empty() &&
          (lease.state == LeaseState::kLive ||
           lease.state == LeaseState::kFuture)) {
        lease.pins = lease.info->oldest_step < *cut_;
      }
    }
    for (const std::uint64_t step : steps_) {
      if (step >= keep_from) break;
      steps_to_move_.push_back(step);
    }
    if (pin_everything_) return absl::OkStatus();
    std::uint64_t swept = *cut_;
    for (auto step = steps_.lower_bound(
             std::max(keep_from, retention_.anchors_swept_below_));
         step != steps_.end() && *step < *cut_; ++step) {
      if (!fs_.Stat(store_.AnchorPath(*step)).ok()) continue;
      if (AnchorIsPinned(*step)) {
        swept = std::min(swept, *step);
        continue;
      }
      // A root step is nothing without its anchor; of one that cannot be read
      // nobody knows.
      const auto read = store_.ReadStep(*step);
      if (read.ok() && (*read)->manifest.kind == StepKind::kDelta) {
        anchors_to_move_.push_back(*step);
      }
    }
    if (dry_run_) return absl::OkStatus();
    swept_ = swept;
    if (anchors_to_move_.empty()) retention_.anchors_swept_below_ = swept;
    return absl::OkStatus();
  }

  absl::Status Move() {
    for (const std::uint64_t step : anchors_to_move_) {
      KEDGE_RETURN_IF_ERROR(MoveIfThere(
          fs_, store_.AnchorPath(step),
          InTrash(StampedName(
              absl::StrCat(StepDirectoryName(step), kAnchorMark), now_ns_))));
    }
    // Oldest first: whenever this stops, what is left begins with a step whose
    // base is pruned, and has no hole.
    constexpr std::size_t kBetweenLooks = 64;
    for (std::size_t i = 0; i < steps_to_move_.size(); ++i) {
      // Thousands of steps take a while, and a reader that has just written its
      // lease should not have to wait for what it needs to come back.
      if (i > 0 && i % kBetweenLooks == 0) {
        KEDGE_ASSIGN_OR_RETURN(const bool other, LeasesChanged());
        if (other) break;
      }
      const std::uint64_t step = steps_to_move_[i];
      KEDGE_RETURN_IF_ERROR(
          MoveIfThere(fs_, store_.StepPath(step),
                      InTrash(StampedName(StepDirectoryName(step), now_ns_))));
    }
    retention_.anchors_swept_below_ = swept_;
    trash_left_ = true;
    return fs_.SyncDirectory(store_.path());
  }

  // Whether a lease asks for steps of the plan that did not when it was made.
  absl::StatusOr<bool> LeasesChanged() const {
    KEDGE_ASSIGN_OR_RETURN(const LeaseListing listing,
                           ReadLeases(fs_, store_.path(), store_.info().run));
    return std::any_of(
        listing.leases.begin(), listing.leases.end(),
        [&](const LeaseEntry& lease) {
          if (!lease.info ||
              lease.info->oldest_step >= report_.oldest_kept_step) {
            return false;
          }
          return std::none_of(
              entries_.begin(), entries_.end(), [&](const LeaseEntry& known) {
                return known.name == lease.name && known.info &&
                       known.info->oldest_step == lease.info->oldest_step;
              });
        });
  }

  // ------------------------------------------------------------------ the rest
  absl::Status CleanEpochs() {
    KEDGE_ASSIGN_OR_RETURN(epochs_, store_.ReadEpochs());
    if (epochs_.size() < 2) return absl::OkStatus();
    // Whatever is still there, or may come back, is vouched for by its epoch,
    // needed or not. What another gc moves at this moment, there or back, is in
    // one of the three lists.
    std::uint64_t oldest = report_.oldest_kept_step;
    const auto count_trash = [&]() -> absl::Status {
      KEDGE_RETURN_IF_ERROR(ListTrash());
      for (const TrashEntry& entry : trash_) {
        if (entry.step) oldest = std::min(oldest, *entry.step);
      }
      return absl::OkStatus();
    };
    KEDGE_RETURN_IF_ERROR(count_trash());
    KEDGE_RETURN_IF_ERROR(ListSteps());
    if (!steps_.empty()) oldest = std::min(oldest, *steps_.begin());
    KEDGE_RETURN_IF_ERROR(count_trash());
    for (const EpochInfo& epoch : epochs_) {
      const bool shadowed = std::any_of(
          epochs_.begin(), epochs_.end(), [&](const EpochInfo& later) {
            return later.epoch > epoch.epoch && later.resume_step < oldest;
          });
      if (!shadowed) continue;
      report_.removed_epochs.push_back(epoch.epoch);
      if (dry_run_) continue;
      KEDGE_RETURN_IF_ERROR(
          RemoveIfThere(fs_, JoinPath(store_.PathOf(kEpochsDirectoryName),
                                      EpochFileName(epoch.epoch))));
    }
    return absl::OkStatus();
  }

  absl::Status CleanStaging() {
    const std::uint32_t newest = epochs_.empty() ? 0 : epochs_.back().epoch;
    const std::string staging = store_.PathOf(kStagingDirectoryName);
    const auto names = fs_.List(staging);
    if (absl::IsNotFound(names.status())) return absl::OkStatus();
    if (!names.ok()) return names.status();
    for (const std::string& name : *names) {
      std::optional<std::uint32_t> epoch = TemporaryEpoch(name);
      if (const auto id = ParseStagingName(name)) epoch = id->epoch;
      if (!epoch || *epoch >= newest) continue;
      report_.removed_staging.push_back(name);
      if (!dry_run_) {
        KEDGE_RETURN_IF_ERROR(RemoveTree(fs_, JoinPath(staging, name)));
      }
    }
    return absl::OkStatus();
  }

  absl::Status CleanLeases() {
    const std::string leases = store_.PathOf(kLeasesDirectoryName);
    const std::chrono::seconds long_gone = 2 * options_.lease_ttl;
    const auto age = [&](std::int64_t modified_ns) {
      return std::chrono::seconds(now_ns_ / 1'000'000'000 -
                                  modified_ns / 1'000'000'000);
    };
    for (const LeaseEntry& entry : entries_) {
      if (age(entry.modified_ns) < long_gone) continue;
      report_.removed_leases.push_back(entry.name);
      if (dry_run_) continue;
      KEDGE_RETURN_IF_ERROR(RemoveLease(JoinPath(leases, entry.name), entry));
    }
    for (const LeaseListing::Temporary& temporary : temporaries_) {
      if (age(temporary.modified_ns) < options_.lease_ttl) continue;
      report_.removed_leases.push_back(temporary.name);
      if (dry_run_) continue;
      KEDGE_RETURN_IF_ERROR(
          RemoveIfThere(fs_, JoinPath(leases, temporary.name)));
    }
    return absl::OkStatus();
  }

  // Its reader may wake up and renew it at this moment: what is removed is
  // looked at once nobody else can change it.
  absl::Status RemoveLease(const std::string& path, const LeaseEntry& entry) {
    const std::string claim =
        InTrash(StampedName(absl::StrCat("lease.", entry.name), now_ns_));
    KEDGE_RETURN_IF_ERROR(MoveIfThere(fs_, path, claim));
    const auto info = fs_.Stat(claim);
    if (absl::IsNotFound(info.status())) return absl::OkStatus();
    if (!info.ok()) return info.status();
    if (info->modified_ns != entry.modified_ns) {
      const absl::Status back = fs_.Link(claim, path);
      if (absl::IsUnimplemented(back) || absl::IsPermissionDenied(back)) {
        return MoveIfThere(fs_, claim, path);
      }
      if (!back.ok() && !absl::IsAlreadyExists(back)) return back;
    }
    return RemoveIfThere(fs_, claim);
  }

  absl::Status CleanTrash(const std::vector<TrashEntry>& old_trash) {
    const std::uint64_t now =
        static_cast<std::uint64_t>(std::max<std::int64_t>(now_ns_, 0)) /
        1'000'000'000;
    const auto grace = static_cast<std::uint64_t>(
        std::max<std::int64_t>(options_.grace.count(), 0));
    std::set<std::string> still_there;
    for (const TrashEntry& entry : trash_) still_there.insert(entry.name);
    for (const TrashEntry& entry : old_trash) {
      if (!still_there.contains(entry.name)) continue;
      const std::string path = InTrash(entry.name);
      if (!entry.stamp) {
        trash_left_ = true;
        if (dry_run_) continue;
        KEDGE_RETURN_IF_ERROR(
            MoveIfThere(fs_, path, InTrash(StampedName(entry.name, now_ns_))));
        continue;
      }
      const bool due =
          entry.dead || (now >= *entry.stamp && now - *entry.stamp >= grace);
      if (!due || CameBack(entry)) {
        trash_left_ = trash_left_ || !due;
        continue;
      }
      report_.deleted_trash.push_back(entry.name);
      if (dry_run_) continue;
      std::string dead = path;
      if (!entry.dead) {
        dead += kDeadMark;
        KEDGE_RETURN_IF_ERROR(MoveIfThere(fs_, path, dead));
      }
      KEDGE_RETURN_IF_ERROR(RemoveTree(fs_, dead));
    }
    return absl::OkStatus();
  }

  bool CameBack(const TrashEntry& entry) const {
    return (entry.step && Contains(report_.restored_steps, *entry.step)) ||
           (entry.anchor_of &&
            Contains(report_.restored_anchors, *entry.anchor_of));
  }

  Retention& retention_;
  const RetentionOptions& options_;
  const Store& store_;
  FileSystem& fs_;
  const bool dry_run_;
  const std::string trash_path_;
  GcReport report_;
  bool full_ = false;
  bool trash_left_ = false;

  std::set<std::uint64_t> steps_;
  std::vector<TrashEntry> trash_;
  std::vector<EpochInfo> epochs_;
  std::int64_t now_ns_ = 0;
  std::vector<LeaseEntry> entries_;
  std::vector<LeaseListing::Temporary> temporaries_;
  std::uint64_t pin_ = kNever;      // the oldest step that a lease pins
  std::uint64_t joining_ = kNever;  // from here on leases pin anchors, too
  bool pin_everything_ = false;
  std::optional<std::uint64_t> cut_;  // the oldest step that anchors keep
  bool broken_ = false;               // the chain ends before that
  std::vector<std::uint64_t> steps_to_move_;
  std::vector<std::uint64_t> anchors_to_move_;
  std::uint64_t swept_ = 0;
};

Retention::Retention(const RetentionOptions& options) : options_(options) {}

absl::StatusOr<GcReport> Retention::Collect(const Store& store, bool dry_run,
                                            bool always) {
  if (options_.keep_anchors == 0) {
    return absl::InvalidArgumentError(
        "gc: keep_anchors: expected at least 1, found 0: without an anchor no "
        "engine can join");
  }
  // Longer than anything that runs, and short enough for sums.
  constexpr std::chrono::seconds kLongest{std::int64_t{1} << 40};
  if (options_.lease_ttl.count() < 1 || options_.lease_ttl > kLongest ||
      options_.grace.count() < 0 || options_.grace > kLongest) {
    return absl::InvalidArgumentError(absl::StrCat(
        "gc: expected a lease_ttl of at least 1 s and a grace of at least 0 s, "
        "found ",
        options_.lease_ttl.count(), " and ", options_.grace.count()));
  }
  Pass pass(this, store, dry_run);
  const Clock::time_point now = Clock::now();
  absl::StatusOr<GcReport> report = pass.Run(always);
  if (pass.full()) {
    last_full_pass_ = now;
    trash_left_ = pass.trash_left();
  }
  return report;
}

absl::StatusOr<GcReport> Retention::Retain(const Store& store) {
  const auto since = [&] { return Clock::now() - *last_full_pass_; };
  const bool always = !last_full_pass_ ||
                      (trash_left_ && since() >= options_.grace) ||
                      since() >= options_.lease_ttl;
  return Collect(store, /*dry_run=*/false, always);
}

absl::StatusOr<GcReport> CollectGarbage(const GcOptions& options) {
  RetentionOptions retention;
  retention.keep_anchors = options.keep_anchors;
  retention.lease_ttl = options.lease_ttl;
  retention.grace = options.grace;
  FileSystem& fs = *(options.fs != nullptr ? options.fs : PosixFileSystem());
  KEDGE_ASSIGN_OR_RETURN(const std::unique_ptr<Store> store,
                         Store::Open(&fs, options.store_path));
  return Retention(retention).Collect(*store, options.dry_run, /*always=*/true);
}

}  // namespace kedge
