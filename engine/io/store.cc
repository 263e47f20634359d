#include "kedge/engine/io/store.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kedge/format/limits.h"
#include "kedge/format/status.h"

namespace kedge {
namespace {

constexpr char kRunFsck[] = "run `kedge fsck`";

// What a COMMIT vouches for.
struct Committed {
  CommitRecord commit;
  std::vector<std::byte> manifest;
};

// What to say of a place without the file STORE.
absl::Status NoStore(FileSystem& fs, absl::string_view path) {
  const auto names = fs.List(path);
  if (absl::IsNotFound(names.status())) {
    return absl::NotFoundError(absl::StrCat(
        "\"", path, "\": no kedge store: no such directory; check the path"));
  }
  const bool was_one =
      names.ok() &&
      std::any_of(names->begin(), names->end(), [](const std::string& name) {
        return name == kHeadFileName || name == kEpochsDirectoryName ||
               ParseStepDirectoryName(name);
      });
  if (was_one) {
    return absl::NotFoundError(absl::StrCat(
        path, ": the file ", kStoreFileName,
        " of this kedge store is missing: an init that did not finish, or a "
        "damaged store; run `kedge fsck`"));
  }
  return absl::NotFoundError(absl::StrCat(
      path, ": no kedge store: the file ", kStoreFileName,
      " is missing; check the path, or make one with `kedge init` or "
      "SnapshotWriter::Create"));
}

// Reads COMMIT and MANIFEST of `directory` and checks them against each other.
absl::StatusOr<Committed> ReadCommitted(const Store& store,
                                        const std::string& directory,
                                        std::uint64_t step) {
  FileSystem& fs = *store.fs();
  const std::string commit_path = JoinPath(directory, kCommitFileName);
  const std::string manifest_path = JoinPath(directory, kManifestFileName);
  auto commit_bytes = ReadFile(fs, commit_path, 2 * kCommitBytes);
  if (absl::IsNotFound(commit_bytes.status())) {
    return absl::NotFoundError(
        fs.Stat(directory).ok()
            ? absl::StrCat(directory,
                           ": no COMMIT: this directory was never published; "
                           "readers pass it over")
            : absl::StrCat(directory,
                           ": not there: pruned, given up by a resume, or not "
                           "published yet; `kedge ls` shows what is"));
  }
  if (!commit_bytes.ok()) return commit_bytes.status();
  Committed result;
  KEDGE_ASSIGN_OR_RETURN(result.commit,
                         ParseCommit(commit_path, *commit_bytes));
  if (result.commit.run != store.info().run) {
    return DataLoss({.where = commit_path,
                     .what = "run id",
                     .expected = ToHex(store.info().run),
                     .found = ToHex(result.commit.run),
                     .advice = "the directory belongs to another run's store"});
  }
  if (result.commit.step != step) {
    return DataLoss({.where = commit_path,
                     .what = "step",
                     .expected = absl::StrCat(step),
                     .found = absl::StrCat(result.commit.step),
                     .advice = "the directory was renamed or replayed"});
  }
  auto manifest =
      ReadFileOfSize(fs, manifest_path, result.commit.manifest_bytes);
  if (!manifest.ok()) {
    // Retention may have moved the directory away since COMMIT was read.
    if (absl::IsNotFound(fs.Stat(directory).status())) {
      return absl::NotFoundError(absl::StrCat(directory, ": pruned"));
    }
    if (absl::IsNotFound(manifest.status())) {
      return DataLoss({.where = manifest_path,
                       .what = "COMMIT stands without its MANIFEST",
                       .advice = kRunFsck});
    }
    return manifest.status();
  }
  const Hash128 hash = HashBytes128(*manifest);
  if (hash != result.commit.manifest_hash) {
    return DataLoss({.where = manifest_path,
                     .what = "XXH3-128",
                     .expected = ToHex(result.commit.manifest_hash),
                     .found = ToHex(hash),
                     .advice = kRunFsck});
  }
  result.manifest = *std::move(manifest);
  return result;
}

// Whether a manifest field equals what its surroundings say.
absl::Status CheckEqual(absl::string_view where, absl::string_view what,
                        const std::string& expected, const std::string& found) {
  if (expected == found) return absl::OkStatus();
  return DataLoss({.where = where,
                   .what = what,
                   .expected = expected,
                   .found = found,
                   .advice = kRunFsck});
}

// What holds between a delta and the step that its base names.
absl::Status CheckFollows(const PublishedStep& step,
                          const PublishedStep& base) {
  KEDGE_RETURN_IF_ERROR(CheckEqual(
      step.path, "digest_before, its base's digest",
      ToHex(base.manifest.digest_after), ToHex(step.manifest.digest_before)));
  return CheckEqual(step.path, "table_hash, its base's table",
                    ToHex(base.manifest.table_hash),
                    ToHex(step.manifest.table_hash));
}

// What holds between an anchor and the step that it names.
absl::Status CheckAnchorOfStep(const PublishedAnchor& anchor,
                               const PublishedStep& step) {
  KEDGE_RETURN_IF_ERROR(CheckEqual(anchor.path, "digest, its step's digest",
                                   ToHex(step.manifest.digest_after),
                                   ToHex(anchor.manifest.digest)));
  return CheckEqual(anchor.path, "table_hash, its step's table",
                    ToHex(step.manifest.table_hash),
                    ToHex(anchor.manifest.table_hash));
}

std::uint64_t BytesOf(const std::vector<DataFile>& files) {
  std::uint64_t bytes = 0;
  for (const DataFile& file : files) bytes += file.bytes;
  return bytes;
}

}  // namespace

Store::Store(FileSystem* fs, std::string path, StoreInfo info)
    : fs_(fs), path_(std::move(path)), info_(info) {}

absl::StatusOr<std::unique_ptr<Store>> Store::Open(FileSystem* fs,
                                                   absl::string_view path) {
  const std::string store_file = JoinPath(path, kStoreFileName);
  auto bytes = ReadFile(*fs, store_file, 2 * kStoreBytes);
  if (absl::IsNotFound(bytes.status())) {
    return NoStore(*fs, path);
  }
  if (!bytes.ok()) return bytes.status();
  KEDGE_ASSIGN_OR_RETURN(const StoreInfo info, ParseStore(store_file, *bytes));
  return std::unique_ptr<Store>(
      new Store(fs, std::string(path.data(), path.size()), info));
}

std::string Store::PathOf(absl::string_view name) const {
  return JoinPath(path_, name);
}

std::string Store::StepPath(std::uint64_t step) const {
  return PathOf(StepDirectoryName(step));
}

std::string Store::AnchorPath(std::uint64_t step) const {
  return JoinPath(StepPath(step), kAnchorDirectoryName);
}

absl::StatusOr<Head> Store::ReadHead() const {
  const std::string path = PathOf(kHeadFileName);
  KEDGE_ASSIGN_OR_RETURN(const std::vector<std::byte> bytes,
                         ReadFile(*fs_, path, 2 * kHeadBytes));
  KEDGE_ASSIGN_OR_RETURN(const Head head, ParseHead(path, bytes));
  KEDGE_RETURN_IF_ERROR(
      CheckEqual(path, "run id", ToHex(info_.run), ToHex(head.run)));
  return head;
}

absl::StatusOr<std::vector<std::uint64_t>> Store::ListSteps() const {
  KEDGE_ASSIGN_OR_RETURN(const std::vector<std::string> names,
                         fs_->List(path_));
  std::vector<std::uint64_t> steps;
  for (const std::string& name : names) {
    if (const auto step = ParseStepDirectoryName(name)) steps.push_back(*step);
  }
  std::sort(steps.begin(), steps.end());
  return steps;
}

absl::StatusOr<std::vector<EpochInfo>> Store::ReadEpochs() const {
  const std::string directory = PathOf(kEpochsDirectoryName);
  KEDGE_ASSIGN_OR_RETURN(const std::vector<std::string> names,
                         fs_->List(directory));
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<EpochInfo> epochs;
  for (const std::string& name : names) {
    const auto number = ParseEpochFileName(name);
    if (!number) continue;
    const auto known = std::find_if(
        epochs_.begin(), epochs_.end(),
        [&](const EpochInfo& epoch) { return epoch.epoch == *number; });
    if (known != epochs_.end()) {
      epochs.push_back(*known);
      continue;
    }
    const std::string path = JoinPath(directory, name);
    auto bytes = ReadFile(*fs_, path, 2 * kEpochBytes);
    if (absl::IsNotFound(bytes.status())) continue;  // pruned since the listing
    if (!bytes.ok()) return bytes.status();
    KEDGE_ASSIGN_OR_RETURN(const EpochInfo epoch, ParseEpoch(path, *bytes));
    KEDGE_RETURN_IF_ERROR(
        CheckEqual(path, "run id", ToHex(info_.run), ToHex(epoch.run)));
    KEDGE_RETURN_IF_ERROR(CheckEqual(path, "epoch", absl::StrCat(*number),
                                     absl::StrCat(epoch.epoch)));
    epochs.push_back(epoch);
  }
  std::sort(
      epochs.begin(), epochs.end(),
      [](const EpochInfo& a, const EpochInfo& b) { return a.epoch < b.epoch; });
  epochs_ = epochs;
  return epochs;
}

std::uint32_t Store::ValidEpoch(const std::vector<EpochInfo>& epochs,
                                std::uint64_t step) {
  std::uint32_t valid = 0;
  for (const EpochInfo& epoch : epochs) {
    if (epoch.resume_step < step) valid = std::max(valid, epoch.epoch);
  }
  return valid;
}

absl::StatusOr<std::shared_ptr<const TensorTable>> Store::ReadTable(
    const Hash128& hash) const {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& table : tables_) {
      if (table->hash() == hash) return table;
    }
  }
  const std::string path = PathOf(TensorTableFileName(hash));
  auto bytes = ReadFile(*fs_, path, kMaxFlatBufferBytes);
  if (absl::IsNotFound(bytes.status())) {
    return DataLoss(
        {.where = path,
         .what = "the tensor table that a manifest names is missing",
         .advice = kRunFsck});
  }
  if (!bytes.ok()) return bytes.status();
  const Hash128 found = HashBytes128(*bytes);
  if (found != hash) {
    return DataLoss({.where = path,
                     .what = "XXH3-128",
                     .expected = ToHex(hash),
                     .found = ToHex(found),
                     .advice = kRunFsck});
  }
  KEDGE_ASSIGN_OR_RETURN(TensorTable parsed, TensorTable::Parse(path, *bytes));
  auto table = std::make_shared<const TensorTable>(std::move(parsed));
  const std::lock_guard<std::mutex> lock(mutex_);
  tables_.push_back(table);
  return table;
}

absl::StatusOr<std::shared_ptr<const PublishedStep>> Store::ReadStep(
    std::uint64_t step) const {
  auto published = std::make_shared<PublishedStep>();
  published->path = StepPath(step);
  KEDGE_ASSIGN_OR_RETURN(const Committed committed,
                         ReadCommitted(*this, published->path, step));
  KEDGE_ASSIGN_OR_RETURN(std::vector<EpochInfo> epochs, ReadEpochs());
  if (ValidEpoch(epochs, step) != committed.commit.epoch) {
    // An epoch file that a writer took back, before it was used, may have come
    // again with another content.
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      epochs_.clear();
    }
    KEDGE_ASSIGN_OR_RETURN(epochs, ReadEpochs());
  }
  const std::uint32_t epoch = ValidEpoch(epochs, step);
  if (committed.commit.epoch != epoch) {
    return absl::FailedPreconditionError(absl::StrCat(
        published->path, ": epoch: expected ", epoch, ", found ",
        committed.commit.epoch,
        "; the step was published by a writer that was fenced, and is not part "
        "of the run; run `kedge fsck`"));
  }
  const std::string path = JoinPath(published->path, kManifestFileName);
  KEDGE_ASSIGN_OR_RETURN(published->manifest,
                         ParseStepManifest(path, committed.manifest));
  const StepManifest& manifest = published->manifest;
  KEDGE_RETURN_IF_ERROR(
      CheckEqual(path, "run id", ToHex(info_.run), ToHex(manifest.run)));
  KEDGE_RETURN_IF_ERROR(CheckEqual(path, "step", absl::StrCat(step),
                                   absl::StrCat(manifest.step)));
  KEDGE_RETURN_IF_ERROR(CheckEqual(path, "epoch", absl::StrCat(epoch),
                                   absl::StrCat(manifest.epoch)));
  KEDGE_ASSIGN_OR_RETURN(published->table, ReadTable(manifest.table_hash));
  KEDGE_RETURN_IF_ERROR(CheckStepManifest(path, manifest, *published->table));
  published->id = {step, committed.commit.manifest_hash};
  published->manifest_bytes = committed.manifest.size();
  return published;
}

absl::StatusOr<std::unique_ptr<PublishedAnchor>> Store::ReadAnchor(
    const VersionId& id) const {
  auto anchor = std::make_unique<PublishedAnchor>();
  anchor->path = AnchorPath(id.step);
  KEDGE_ASSIGN_OR_RETURN(const Committed committed,
                         ReadCommitted(*this, anchor->path, id.step));
  const std::string path = JoinPath(anchor->path, kManifestFileName);
  KEDGE_ASSIGN_OR_RETURN(anchor->manifest,
                         ParseAnchorManifest(path, committed.manifest));
  const AnchorManifest& manifest = anchor->manifest;
  KEDGE_RETURN_IF_ERROR(
      CheckEqual(path, "run id", ToHex(info_.run), ToHex(manifest.run)));
  KEDGE_RETURN_IF_ERROR(CheckEqual(path, "epoch",
                                   absl::StrCat(committed.commit.epoch),
                                   absl::StrCat(manifest.epoch)));
  KEDGE_RETURN_IF_ERROR(
      CheckEqual(path, "version", ToString(id), ToString(manifest.version)));
  KEDGE_ASSIGN_OR_RETURN(anchor->table, ReadTable(manifest.table_hash));
  KEDGE_RETURN_IF_ERROR(CheckAnchorManifest(path, manifest, *anchor->table));
  anchor->version = id;
  anchor->manifest_bytes = committed.manifest.size();
  return anchor;
}

bool Store::HasAnchor(std::uint64_t step) const {
  return fs_->Stat(JoinPath(AnchorPath(step), kCommitFileName)).ok();
}

absl::StatusOr<std::shared_ptr<const PublishedStep>> Store::Newest(
    const std::function<void(std::uint64_t, const absl::Status&)>& on_skipped)
    const {
  KEDGE_ASSIGN_OR_RETURN(const std::vector<std::uint64_t> steps, ListSteps());
  absl::Status first_error;
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
    auto published = ReadStep(*step);
    if (published.ok()) return published;
    // A newer format or a storage that does not answer is no reason to fall
    // back silently to older weights.
    if (absl::IsUnimplemented(published.status()) ||
        absl::IsUnavailable(published.status()) ||
        absl::IsPermissionDenied(published.status()) ||
        absl::IsResourceExhausted(published.status())) {
      return published.status();
    }
    if (on_skipped) on_skipped(*step, published.status());
    if (first_error.ok()) first_error = published.status();
  }
  return absl::NotFoundError(absl::StrCat(
      path_, ": no valid step",
      first_error.ok() ? ""
                       : absl::StrCat("; newest: ", first_error.message())));
}

absl::StatusOr<std::shared_ptr<const PublishedStep>> Store::ReadBase(
    const PublishedStep& step, const VersionId& target) const {
  const VersionId& base = step.manifest.base;
  auto read = ReadStep(base.step);
  if (!read.ok()) {
    return absl::Status(
        absl::IsNotFound(read.status()) ? absl::StatusCode::kFailedPrecondition
                                        : read.status().code(),
        absl::StrCat("the chain of ", ToString(target),
                     " breaks: ", ToString(step.id), " needs its base v",
                     base.step, ": ", read.status().message()));
  }
  if ((*read)->id != base) {
    return absl::DataLossError(absl::StrCat(
        step.path, ": base: expected ", ToString((*read)->id), ", found ",
        ToString(base),
        "; the step was written on another base (a fork); run `kedge fsck`"));
  }
  KEDGE_RETURN_IF_ERROR(CheckFollows(step, **read));
  return read;
}

absl::StatusOr<Chain> Store::FindChain(
    const std::shared_ptr<const PublishedStep>& target, const VersionId* held,
    const std::vector<std::uint64_t>& passed_over_anchors) const {
  // The steps from the target back; each is read once, when it is needed.
  std::vector<std::shared_ptr<const PublishedStep>> steps = {target};

  // An anchor has every byte of the model. While the deltas after `held` have
  // fewer, no anchor can be cheaper and none is looked at: what following costs
  // does not depend on how many there are.
  if (held != nullptr) {
    std::uint64_t bytes = 0;
    while (true) {
      const PublishedStep& at = *steps.back();
      if (at.id == *held) return Chain{};  // the target itself
      if (at.manifest.kind == StepKind::kRoot) break;
      bytes += BytesOf(at.manifest.files);
      if (bytes > target->table->total_bytes()) break;
      if (at.manifest.base == *held) {
        std::reverse(steps.begin(), steps.end());
        return Chain{nullptr, std::move(steps)};
      }
      if (at.manifest.base.step <= held->step) break;
      auto base = ReadBase(at, target->id);
      if (!base.ok()) break;  // below it is tried again, and told
      steps.push_back(*std::move(base));
    }
  }

  Chain best;
  bool found = false;
  std::uint64_t best_bytes = std::numeric_limits<std::uint64_t>::max();
  std::vector<std::shared_ptr<const PublishedStep>> deltas;  // newest first
  std::uint64_t delta_bytes = 0;
  absl::Status obstacle;  // why the walk could not go on

  std::shared_ptr<const PublishedStep> at = target;
  while (delta_bytes < best_bytes) {
    if (held != nullptr && at->id == *held) {
      best = Chain{nullptr, deltas};
      found = true;
      break;  // going further back only costs more
    }
    const bool passed_over =
        std::find(passed_over_anchors.begin(), passed_over_anchors.end(),
                  at->id.step) != passed_over_anchors.end();
    if (!passed_over) {
      auto anchor = ReadAnchor(at->id);
      if (anchor.ok()) {
        const absl::Status of_step = CheckAnchorOfStep(**anchor, *at);
        if (!of_step.ok()) anchor = of_step;
      }
      if (anchor.ok()) {
        const std::uint64_t bytes =
            delta_bytes + BytesOf((*anchor)->manifest.files);
        if (bytes < best_bytes) {
          best = Chain{*std::move(anchor), deltas};
          best_bytes = bytes;
          found = true;
        }
        if (held == nullptr) break;
      } else if (!absl::IsNotFound(anchor.status())) {
        obstacle.Update(anchor.status());
      }
    }
    if (at->manifest.kind == StepKind::kRoot) break;
    if (held != nullptr && at->manifest.base.step < held->step && found) break;
    deltas.push_back(at);
    delta_bytes += BytesOf(at->manifest.files);
    if (held != nullptr && at->manifest.base == *held) {
      // `held` itself may have been pruned: its identity is enough.
      if (delta_bytes < best_bytes) {
        best = Chain{nullptr, deltas};
        found = true;
      }
      break;
    }
    if (deltas.size() < steps.size()) {
      at = steps[deltas.size()];
      continue;
    }
    auto base = ReadBase(*at, target->id);
    if (!base.ok()) {
      obstacle = base.status();
      break;
    }
    at = *base;
    steps.push_back(*std::move(base));
  }
  if (found) {
    std::reverse(best.deltas.begin(), best.deltas.end());
    return best;
  }
  if (!obstacle.ok()) return obstacle;
  return absl::FailedPreconditionError(absl::StrCat(
      path_, ": no chain to ", ToString(target->id),
      held == nullptr ? std::string()
                      : absl::StrCat(" from the held ", ToString(*held)),
      ": the walk ended at ", ToString(at->id),
      ", which has no sound anchor; publish an anchor, or load weights of a "
      "version that is on the chain"));
}

absl::StatusOr<VersionState> Store::StateAt(
    const std::shared_ptr<const PublishedStep>& step) const {
  VersionState state;
  state.id = step->id;
  state.table = step->table;
  state.l61.assign(step->table->size(), 0);
  std::vector<bool> known(step->table->size(), false);
  bool metadata_known = false;
  const auto fill = [&](const std::vector<std::uint64_t>& l61) {
    for (std::size_t i = 0; i < l61.size(); ++i) {
      if (!known[i]) state.l61[i] = l61[i];
    }
  };

  std::shared_ptr<const PublishedStep> at = step;
  while (true) {
    const StepManifest& manifest = at->manifest;
    for (const TensorState& tensor : manifest.states) {
      if (known[tensor.tensor]) continue;
      state.l61[tensor.tensor] = tensor.l61_after;
      known[tensor.tensor] = true;
    }
    const bool root = manifest.kind == StepKind::kRoot;
    if (!metadata_known && (manifest.metadata_changed || root)) {
      state.metadata = manifest.metadata;
      metadata_known = true;
    }
    if (root) {
      fill(manifest.l61);
      break;
    }
    if (HasAnchor(at->id.step)) {
      auto anchor = ReadAnchor(at->id);
      if (anchor.ok()) {
        fill((*anchor)->manifest.l61);
        if (!metadata_known) state.metadata = (*anchor)->manifest.metadata;
        break;
      }
    }
    KEDGE_ASSIGN_OR_RETURN(auto base, ReadStep(manifest.base.step));
    if (base->id != manifest.base) {
      return DataLoss({.where = at->path,
                       .what = "base",
                       .expected = ToString(base->id),
                       .found = ToString(manifest.base),
                       .advice = kRunFsck});
    }
    at = std::move(base);
  }
  const Hash128 digest = step->table->StateDigest(state.l61);
  if (digest != step->manifest.digest_after) {
    return DataLoss({.where = step->path,
                     .what = "state digest",
                     .expected = ToHex(step->manifest.digest_after),
                     .found = ToHex(digest),
                     .advice = kRunFsck});
  }
  return state;
}

}  // namespace kedge
