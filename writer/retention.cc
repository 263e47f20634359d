#include "kedge/writer/retention.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "kedge/format/fixed_files.h"
#include "kedge/format/layout.h"
#include "kedge/format/status.h"

namespace kedge {
namespace {

constexpr char kStampSeparator[] = ".gc.";

// What stands in .trash is named WHAT.gc.SECONDS once a gc has stamped it.
std::string StampedName(absl::string_view what, std::uint64_t now_seconds) {
  return absl::StrCat(what, kStampSeparator, now_seconds);
}

std::optional<std::uint64_t> ParseStamp(absl::string_view name) {
  const std::size_t at = name.rfind(kStampSeparator);
  std::uint64_t seconds = 0;
  if (at == absl::string_view::npos ||
      !absl::SimpleAtoi(name.substr(at + sizeof(kStampSeparator) - 1),
                        &seconds)) {
    return {};
  }
  return seconds;
}

// The storage's own idea of now: hosts' clocks differ, and the stamps must not.
absl::StatusOr<std::uint64_t> StorageNow(FileSystem& fs,
                                         const std::string& trash) {
  const std::string probe = JoinPath(trash, absl::StrCat("now.", RandomSeed()));
  KEDGE_RETURN_IF_ERROR(WriteNewFile(fs, probe, {}));
  const auto info = fs.Stat(probe);
  fs.RemoveFile(probe).IgnoreError();
  if (!info.ok()) return info.status();
  return static_cast<std::uint64_t>(info->modified_ns / 1'000'000'000);
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

struct Plan {
  std::uint64_t oldest_kept_step = 0;
  std::vector<std::uint64_t> steps;
};

absl::StatusOr<Plan> MakePlan(const Store& store, std::uint32_t keep_anchors) {
  Plan plan;
  KEDGE_ASSIGN_OR_RETURN(const std::vector<std::uint64_t> steps,
                         store.ListSteps());
  KEDGE_ASSIGN_OR_RETURN(std::shared_ptr<const PublishedStep> at,
                         store.Newest());
  // Along the chain of the newest version only: an anchor elsewhere helps
  // nobody.
  std::uint32_t found = 0;
  while (true) {
    if (store.HasAnchor(at->id.step) && store.ReadAnchor(at->id).ok() &&
        ++found == keep_anchors) {
      break;
    }
    if (at->manifest.kind == StepKind::kRoot && at->id.step == 0) break;
    auto base = store.ReadStep(at->manifest.base.step);
    if (!base.ok() || (*base)->id != at->manifest.base) break;
    at = *std::move(base);
  }
  if (found < keep_anchors) return plan;  // nothing to spare
  plan.oldest_kept_step = at->id.step;
  for (const std::uint64_t step : steps) {
    if (step < plan.oldest_kept_step) plan.steps.push_back(step);
  }
  return plan;
}

}  // namespace

absl::StatusOr<GcReport> CollectGarbage(const GcOptions& options) {
  if (options.keep_anchors == 0) {
    return absl::InvalidArgumentError(
        "gc: keep_anchors: expected at least 1, found 0: without an anchor no "
        "engine can join");
  }
  FileSystem& fs = *(options.fs != nullptr ? options.fs : PosixFileSystem());
  KEDGE_ASSIGN_OR_RETURN(const std::unique_ptr<Store> store,
                         Store::Open(&fs, options.store_path));
  KEDGE_ASSIGN_OR_RETURN(const Plan plan,
                         MakePlan(*store, options.keep_anchors));
  GcReport report;
  report.oldest_kept_step = plan.oldest_kept_step;
  report.moved_steps = plan.steps;

  KEDGE_ASSIGN_OR_RETURN(const std::vector<EpochInfo> epochs,
                         store->ReadEpochs());
  for (const EpochInfo& epoch : epochs) {
    const bool shadowed =
        std::any_of(epochs.begin(), epochs.end(), [&](const EpochInfo& later) {
          return later.epoch > epoch.epoch &&
                 later.resume_step < plan.oldest_kept_step;
        });
    if (shadowed) report.removed_epochs.push_back(epoch.epoch);
  }
  const std::uint32_t newest_epoch = epochs.empty() ? 0 : epochs.back().epoch;
  const std::string staging_root = store->PathOf(kStagingDirectoryName);
  KEDGE_ASSIGN_OR_RETURN(const std::vector<std::string> staged,
                         fs.List(staging_root));
  for (const std::string& name : staged) {
    const auto id = ParseStagingName(name);
    if (id && id->epoch < newest_epoch) report.removed_staging.push_back(name);
  }
  const std::string trash = store->PathOf(kTrashDirectoryName);
  KEDGE_ASSIGN_OR_RETURN(const std::vector<std::string> trashed,
                         fs.List(trash));
  std::uint64_t now = 0;
  if (!options.dry_run) {
    KEDGE_ASSIGN_OR_RETURN(now, StorageNow(fs, trash));
  }
  std::vector<std::string> unstamped;
  for (const std::string& name : trashed) {
    const auto stamp = ParseStamp(name);
    if (!stamp) {
      unstamped.push_back(name);
    } else if (now >= *stamp && now - *stamp >= static_cast<std::uint64_t>(
                                                    options.grace.count())) {
      report.deleted_trash.push_back(name);
    }
  }
  if (options.dry_run) return report;

  // Newest first: a crash in between leaves a hole below which nothing is
  // needed, never a step whose own chain looks whole and is not.
  for (auto step = plan.steps.rbegin(); step != plan.steps.rend(); ++step) {
    KEDGE_RETURN_IF_ERROR(MoveIfThere(
        fs, store->StepPath(*step),
        JoinPath(trash, StampedName(StepDirectoryName(*step), now))));
  }
  KEDGE_RETURN_IF_ERROR(fs.SyncDirectory(store->path()));
  // Only after the steps that they vouch for are gone.
  for (const std::uint32_t epoch : report.removed_epochs) {
    const std::string path =
        JoinPath(store->PathOf(kEpochsDirectoryName), EpochFileName(epoch));
    if (const absl::Status removed = fs.RemoveFile(path);
        !removed.ok() && !absl::IsNotFound(removed)) {
      return removed;
    }
  }
  for (const std::string& name : report.removed_staging) {
    KEDGE_RETURN_IF_ERROR(RemoveTree(fs, JoinPath(staging_root, name)));
  }
  for (const std::string& name : unstamped) {
    KEDGE_RETURN_IF_ERROR(MoveIfThere(fs, JoinPath(trash, name),
                                      JoinPath(trash, StampedName(name, now))));
  }
  for (const std::string& name : report.deleted_trash) {
    KEDGE_RETURN_IF_ERROR(RemoveTree(fs, JoinPath(trash, name)));
  }
  return report;
}

}  // namespace kedge
