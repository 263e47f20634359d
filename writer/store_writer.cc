#include "kedge/writer/store_writer.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kedge/engine/cpu/slice_encoder.h"
#include "kedge/format/fixed_files.h"
#include "kedge/format/layout.h"
#include "kedge/format/limits.h"
#include "kedge/format/status.h"
#include "kedge/writer/anchor_writer.h"
#include "kedge/writer/segment_writer.h"

namespace kedge {
namespace {

using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

FileSystem* FileSystemOf(const WriterOptions& options) {
  return options.fs != nullptr ? options.fs : PosixFileSystem();
}

int EncodeThreads(const WriterOptions& options) {
  if (options.encode_threads > 0) return options.encode_threads;
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

absl::Status CheckOptions(const WriterOptions& options) {
  if (options.world_size != 1 || options.rank != 0) {
    return absl::UnimplementedError(absl::StrCat(
        "WriterOptions: rank ", options.rank, " of ", options.world_size,
        ": this version publishes from one rank; gather the weights in rank "
        "0"));
  }
  if (options.slice_units == 0 || options.slice_units > kMaxSliceUnits) {
    return absl::InvalidArgumentError(
        absl::StrCat("WriterOptions::slice_units: expected 1 to ",
                     kMaxSliceUnits, ", found ", options.slice_units));
  }
  return absl::OkStatus();
}

// Whether the COMMIT that stands in `directory` is `commit`.
absl::StatusOr<bool> HoldsCommit(FileSystem& fs, const std::string& directory,
                                 std::span<const std::byte> commit) {
  auto found =
      ReadFile(fs, JoinPath(directory, kCommitFileName), 2 * kCommitBytes);
  if (absl::IsNotFound(found.status())) return false;
  if (!found.ok()) return found.status();
  return std::equal(found->begin(), found->end(), commit.begin(), commit.end());
}

// Writes the tensor table unless it stands there already.
absl::Status EnsureTable(FileSystem& fs, const std::string& store_path,
                         const TensorTable& table,
                         const std::string& temporary) {
  const std::string path =
      JoinPath(store_path, TensorTableFileName(table.hash()));
  const absl::Status created =
      CreateFileAtomically(fs, path, temporary, table.bytes());
  if (!absl::IsAlreadyExists(created)) return created;
  KEDGE_ASSIGN_OR_RETURN(const std::vector<std::byte> found,
                         ReadFile(fs, path, kMaxFlatBufferBytes));
  if (HashBytes128(found) != table.hash()) {
    return DataLoss({.where = path,
                     .what = "XXH3-128",
                     .expected = ToHex(table.hash()),
                     .found = ToHex(HashBytes128(found)),
                     .advice = "the file is damaged; run `kedge fsck`"});
  }
  return absl::OkStatus();
}

// Where something of a store being made or written goes.
struct Place {
  FileSystem* fs = nullptr;
  IoPool* pool = nullptr;
  std::string staging;  // the step's staging directory
  std::string target;   // step_N
  RunId run;
  std::uint32_t epoch = 0;
};

// Makes a root step with its anchor inside (`layout` null: none), ready to be
// committed under `manifest`, whose l61 and digest it fills.
absl::StatusOr<std::unique_ptr<StagingDirectory>> StageRoot(
    const Place& place, const TensorTable& table, const AnchorLayout* layout,
    TensorSource& source, const L61Summer& summer, StepManifest* manifest,
    std::vector<std::byte>* manifest_bytes, std::uint64_t* anchor_bytes) {
  KEDGE_ASSIGN_OR_RETURN(auto staging,
                         StagingDirectory::Create(place.fs, place.staging));
  std::unique_ptr<AnchorWriter> anchor;
  AnchorLayout empty;
  if (layout != nullptr) {
    KEDGE_ASSIGN_OR_RETURN(
        anchor, AnchorWriter::Create(
                    place.fs, JoinPath(place.staging, kAnchorDirectoryName),
                    place.pool, place.run, manifest->step, &table, layout));
    const absl::Status written = anchor->WriteSlices(source, summer);
    if (!written.ok()) return written;
    manifest->l61 = anchor->l61();
  } else {
    manifest->l61.assign(table.size(), 0);
    std::mutex mutex;
    IoPool::Batch batch(place.pool);
    batch.set_max_in_flight(2 * place.pool->thread_count());
    for (const TensorSlice& slice : SplitTable(table, kPieceBytes / 4)) {
      batch.Submit([&, slice]() -> absl::Status {
        const std::uint32_t unit_bytes = UnitBytes(table[slice.tensor].dtype);
        std::vector<std::byte> scratch;
        KEDGE_ASSIGN_OR_RETURN(
            const auto bytes,
            source.Read(slice.tensor, slice.units.begin * unit_bytes,
                        slice.units.count() * unit_bytes, &scratch));
        const std::uint64_t sum =
            summer.Sum(slice.units.begin * unit_bytes, bytes);
        const std::lock_guard<std::mutex> lock(mutex);
        auto& total = manifest->l61[slice.tensor];
        total = L61Add(total, sum);
        return absl::OkStatus();
      });
    }
    KEDGE_RETURN_IF_ERROR(batch.Wait());
    for (std::size_t i = 0; i < table.size(); ++i) {
      if (table[i].tied_to != kNotTied) {
        manifest->l61[i] = manifest->l61[table[i].tied_to];
      }
    }
  }
  manifest->kind = StepKind::kRoot;
  manifest->table_hash = table.hash();
  manifest->digest_after = table.StateDigest(manifest->l61);
  manifest->metadata_changed = true;
  KEDGE_ASSIGN_OR_RETURN(*manifest_bytes,
                         SerializeStepManifest(*manifest, table));
  if (anchor != nullptr) {
    const VersionId version{manifest->step, HashBytes128(*manifest_bytes)};
    KEDGE_RETURN_IF_ERROR(
        anchor->Commit(place.epoch, version, manifest->metadata));
    *anchor_bytes = anchor->total_bytes();
    staging->Adopt(anchor->TakeStaging());
  }
  return staging;
}

std::vector<std::byte> CommitBytes(const StepManifest& manifest,
                                   std::span<const std::byte> manifest_bytes) {
  CommitRecord commit;
  commit.run = manifest.run;
  commit.step = manifest.step;
  commit.epoch = manifest.epoch;
  commit.manifest_bytes = static_cast<std::uint32_t>(manifest_bytes.size());
  commit.manifest_hash = HashBytes128(manifest_bytes);
  const auto bytes = SerializeCommit(commit);
  return {bytes.begin(), bytes.end()};
}

}  // namespace

absl::Status InitStore(const WriterOptions& options, const InitOptions& init,
                       const TensorTable& table, TensorSource& source) {
  KEDGE_RETURN_IF_ERROR(CheckOptions(options));
  FileSystem& fs = *FileSystemOf(options);
  const std::string& path = options.store_path;
  KEDGE_RETURN_IF_ERROR(EnsureDirectory(fs, path));
  KEDGE_ASSIGN_OR_RETURN(const std::vector<std::string> present, fs.List(path));
  if (!present.empty()) {
    return absl::AlreadyExistsError(absl::StrCat(
        path, ": expected an empty or missing directory, found ",
        present.size(), " entries, the first \"", present.front(),
        "\"; choose another path, or remove it (a store without the file ",
        kStoreFileName, " is an init that did not finish)"));
  }
  for (const char* directory :
       {kEpochsDirectoryName, kStagingDirectoryName, kTrashDirectoryName,
        kLeasesDirectoryName, kRanksDirectoryName}) {
    KEDGE_RETURN_IF_ERROR(EnsureDirectory(fs, JoinPath(path, directory)));
  }

  StoreInfo info;
  info.run = init.run ? *init.run : RandomRunId();
  info.l61_seed = init.l61_seed ? *init.l61_seed : RandomSeed();
  info.v0_table_hash = table.hash();
  info.created_unix_seconds =
      init.created_unix_seconds != 0
          ? init.created_unix_seconds
          : static_cast<std::uint64_t>(
                std::chrono::duration_cast<std::chrono::seconds>(
                    std::chrono::system_clock::now().time_since_epoch())
                    .count());
  const std::string staging_root = JoinPath(path, kStagingDirectoryName);
  KEDGE_RETURN_IF_ERROR(
      EnsureTable(fs, path, table, JoinPath(staging_root, "table.0.0")));

  IoPool pool(options.io_threads);
  const L61Summer summer(L61Key::FromSeed(info.l61_seed));
  Place place;
  place.fs = &fs;
  place.pool = &pool;
  place.staging =
      JoinPath(staging_root, StagingName(0, FileKind::kSegment, 0, 0));
  place.target = JoinPath(path, StepDirectoryName(0));
  place.run = info.run;
  StepManifest manifest;
  manifest.run = info.run;
  manifest.metadata = init.metadata;
  std::optional<AnchorLayout> layout;
  if (!init.external_v0) {
    AnchorLayoutOptions layout_options;
    layout_options.anchor_file_bytes = options.anchor_file_bytes;
    KEDGE_ASSIGN_OR_RETURN(layout, PlanAnchor(table, layout_options));
  }
  std::vector<std::byte> manifest_bytes;
  std::uint64_t anchor_bytes = 0;
  KEDGE_ASSIGN_OR_RETURN(
      auto staging,
      StageRoot(place, table, layout ? &*layout : nullptr, source, summer,
                &manifest, &manifest_bytes, &anchor_bytes));
  const std::vector<std::byte> commit = CommitBytes(manifest, manifest_bytes);
  KEDGE_RETURN_IF_ERROR(staging->SealFiles(pool));
  KEDGE_RETURN_IF_ERROR(staging->WriteCommit(manifest_bytes, commit));
  KEDGE_RETURN_IF_ERROR(staging->PublishAs(
      place.target, [&] { return HoldsCommit(fs, place.target, commit); }));

  Head head;
  head.run = info.run;
  head.manifest_hash = HashBytes128(manifest_bytes);
  KEDGE_RETURN_IF_ERROR(ReplaceFile(fs, JoinPath(path, kHeadFileName),
                                    JoinPath(staging_root, "HEAD.0.0"),
                                    SerializeHead(head)));
  info.v0_digest = manifest.digest_after;
  return ReplaceFile(fs, JoinPath(path, kStoreFileName),
                     JoinPath(staging_root, "STORE.0.0"), SerializeStore(info));
}

StoreWriter::StoreWriter(const WriterOptions& options,
                         std::unique_ptr<Store> store, VersionState state,
                         std::uint32_t epoch)
    : options_(options),
      store_(std::move(store)),
      state_(std::move(state)),
      epoch_(epoch),
      summer_(L61Key::FromSeed(store_->info().l61_seed)),
      io_pool_(options.io_threads),
      encode_pool_(EncodeThreads(options)) {}

StoreWriter::~StoreWriter() = default;

absl::StatusOr<std::unique_ptr<StoreWriter>> StoreWriter::Open(
    const WriterOptions& options, std::optional<std::uint64_t> resume_step) {
  KEDGE_RETURN_IF_ERROR(CheckOptions(options));
  FileSystem& fs = *FileSystemOf(options);
  KEDGE_ASSIGN_OR_RETURN(std::unique_ptr<Store> store,
                         Store::Open(&fs, options.store_path));
  std::shared_ptr<const PublishedStep> held;
  if (resume_step) {
    KEDGE_ASSIGN_OR_RETURN(held, store->ReadStep(*resume_step));
  } else {
    KEDGE_ASSIGN_OR_RETURN(held, store->Newest());
  }
  KEDGE_ASSIGN_OR_RETURN(VersionState state, store->StateAt(held));

  // A new epoch, created exclusively. From here on older writers are fenced.
  for (const char* directory :
       {kEpochsDirectoryName, kStagingDirectoryName, kTrashDirectoryName}) {
    KEDGE_RETURN_IF_ERROR(EnsureDirectory(fs, store->PathOf(directory)));
  }
  KEDGE_ASSIGN_OR_RETURN(const std::vector<EpochInfo> epochs,
                         store->ReadEpochs());
  EpochInfo epoch;
  epoch.run = store->info().run;
  epoch.resume_step = held->id.step;
  epoch.resume_manifest_hash = held->id.manifest_hash;
  epoch.epoch = epochs.empty() ? 1 : epochs.back().epoch + 1;
  const std::string staging_root = store->PathOf(kStagingDirectoryName);
  const absl::Status created = CreateFileAtomically(
      fs,
      JoinPath(store->PathOf(kEpochsDirectoryName), EpochFileName(epoch.epoch)),
      JoinPath(staging_root,
               absl::StrCat("epoch.", epoch.epoch, ".", RandomSeed())),
      SerializeEpoch(epoch));
  if (absl::IsAlreadyExists(created)) {
    return absl::FailedPreconditionError(absl::StrCat(
        options.store_path, ": fenced by epoch ", epoch.epoch,
        ": another writer opened this store at the same moment; make sure that "
        "one trainer alone publishes here, then open again"));
  }
  KEDGE_RETURN_IF_ERROR(created);

  auto writer = std::unique_ptr<StoreWriter>(new StoreWriter(
      options, std::move(store), std::move(state), epoch.epoch));
  // Whatever lies above the resume step belongs to a past that is given up.
  KEDGE_ASSIGN_OR_RETURN(const std::vector<std::uint64_t> steps,
                         writer->store_->ListSteps());
  for (const std::uint64_t step : steps) {
    if (step <= held->id.step) continue;
    const std::string from = writer->store_->StepPath(step);
    const std::string to =
        JoinPath(writer->store_->PathOf(kTrashDirectoryName),
                 absl::StrCat(StepDirectoryName(step), ".", epoch.epoch));
    if (const absl::Status moved = fs.Rename(from, to);
        !moved.ok() && !absl::IsNotFound(fs.Stat(from).status())) {
      return Annotate(
          moved, absl::StrCat("moving the superseded ", from, " to .trash"));
    }
  }
  KEDGE_RETURN_IF_ERROR(fs.SyncDirectory(writer->store_->path()));
  KEDGE_ASSIGN_OR_RETURN(const std::vector<std::string> staged,
                         fs.List(staging_root));
  for (const std::string& name : staged) {
    const auto id = ParseStagingName(name);
    // Leftovers only: what fails to go now goes in a later open or gc.
    if (id && id->epoch < epoch.epoch) {
      RemoveTree(fs, JoinPath(staging_root, name)).IgnoreError();
    }
  }
  Head head;
  head.run = epoch.run;
  head.step = held->id.step;
  head.epoch = epoch.epoch;
  head.manifest_hash = held->id.manifest_hash;
  KEDGE_RETURN_IF_ERROR(
      ReplaceFile(fs, writer->store_->PathOf(kHeadFileName),
                  JoinPath(staging_root, absl::StrCat("HEAD.", epoch.epoch)),
                  SerializeHead(head)));
  return writer;
}

absl::Status StoreWriter::CheckNotFenced(std::uint64_t step) const {
  KEDGE_ASSIGN_OR_RETURN(const std::vector<EpochInfo> epochs,
                         store_->ReadEpochs());
  const std::uint32_t valid = Store::ValidEpoch(epochs, step);
  if (valid == epoch_) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      store_->path(), ": epoch ", epoch_, " cannot publish v", step,
      ": fenced by epoch ", valid,
      "; another writer has opened this store since; stop this one, or open "
      "again to take over"));
}

absl::Status StoreWriter::CheckMayPublish(std::uint64_t step) const {
  if (outcome_unknown_) {
    return absl::UnavailableError(absl::StrCat(
        store_->path(),
        ": the outcome of an earlier publish is unknown; open a new writer, "
        "which looks at what is there and goes on from it"));
  }
  if (step <= state_.id.step || step > kMaxStep) {
    return absl::InvalidArgumentError(absl::StrCat(
        store_->path(), ": step: expected ", state_.id.step + 1, " to ",
        kMaxStep, ", found ", step,
        "; to publish from an earlier version, open the store with that resume "
        "step"));
  }
  return CheckNotFenced(step);
}

std::string StoreWriter::NewStagingPath(std::uint64_t step, FileKind kind) {
  return JoinPath(store_->PathOf(kStagingDirectoryName),
                  StagingName(step, kind, epoch_, attempt_++));
}

absl::Status StoreWriter::CommitStep(StagingDirectory& staging,
                                     const StepManifest& manifest,
                                     const TensorTable& table,
                                     PublishResult* result) {
  FileSystem& fs = *store_->fs();
  KEDGE_ASSIGN_OR_RETURN(const std::vector<std::byte> manifest_bytes,
                         SerializeStepManifest(manifest, table));
  const std::vector<std::byte> commit = CommitBytes(manifest, manifest_bytes);
  KEDGE_RETURN_IF_ERROR(staging.WriteCommit(manifest_bytes, commit));
  KEDGE_RETURN_IF_ERROR(CheckNotFenced(manifest.step));
  const std::string target = store_->StepPath(manifest.step);
  const absl::Status published = staging.PublishAs(
      target, [&] { return HoldsCommit(fs, target, commit); });
  outcome_unknown_ = staging.outcome_unknown();
  KEDGE_RETURN_IF_ERROR(published);

  result->version = {manifest.step, HashBytes128(manifest_bytes)};
  result->manifest_bytes = manifest_bytes.size();
  result->bytes = manifest_bytes.size() + commit.size();
  for (const DataFile& file : manifest.files) result->bytes += file.bytes;

  if (!staging.parent_sync_status().ok()) {
    result->warnings.push_back(absl::StrCat(
        "v", manifest.step, " is published, but may not outlive a power loss: ",
        staging.parent_sync_status().message()));
  }

  // Published. HEAD is a hint: the next publish puts it right.
  Head head;
  head.run = manifest.run;
  head.step = manifest.step;
  head.epoch = epoch_;
  head.manifest_hash = result->version.manifest_hash;
  absl::Status replaced = CheckNotFenced(manifest.step);
  if (replaced.ok()) {
    replaced = ReplaceFile(fs, store_->PathOf(kHeadFileName),
                           JoinPath(store_->PathOf(kStagingDirectoryName),
                                    absl::StrCat("HEAD.", epoch_)),
                           SerializeHead(head));
  }
  if (!replaced.ok()) {
    result->warnings.push_back(absl::StrCat(
        "v", manifest.step, " is published, but HEAD was not replaced: ",
        replaced.message(), "; readers find it by listing the store"));
  }
  return absl::OkStatus();
}

absl::StatusOr<PublishResult> StoreWriter::PublishDelta(
    std::uint64_t step, TensorSource& old_source, TensorSource& new_source,
    const Metadata* metadata, const RecordSink& sink) {
  KEDGE_RETURN_IF_ERROR(CheckMayPublish(step));
  const auto start = Clock::now();
  const TensorTable& table = *state_.table;
  KEDGE_ASSIGN_OR_RETURN(
      auto staging,
      StagingDirectory::Create(store_->fs(),
                               NewStagingPath(step, FileKind::kSegment)));
  SegmentWriter segments(staging.get(), &io_pool_, store_->info().run, step,
                         options_.rank, options_.segment_files);

  RankFragment fragment;
  fragment.run = store_->info().run;
  fragment.epoch = epoch_;
  fragment.step = step;
  fragment.attempt = attempt_;
  fragment.rank = options_.rank;
  fragment.world_size = options_.world_size;
  fragment.table_hash = table.hash();
  fragment.base = state_.id;

  const std::vector<TensorSlice> slices =
      SplitTable(table, options_.slice_units);
  std::atomic<std::size_t> next_slice{0};
  std::atomic<bool> failed{false};
  std::mutex mutex;  // guards fragment.records
  const auto encode = [&]() -> absl::Status {
    SliceEncoder encoder(summer_.key());
    std::vector<std::byte> old_scratch;
    std::vector<std::byte> new_scratch;
    std::vector<std::byte> record;
    std::vector<DeltaRecord> records;
    while (!failed.load(std::memory_order_relaxed)) {
      const std::size_t i = next_slice.fetch_add(1, std::memory_order_relaxed);
      if (i >= slices.size()) break;
      const TensorSlice& slice = slices[i];
      const TensorSpec& spec = table[slice.tensor];
      const std::uint32_t unit_bytes = UnitBytes(spec.dtype);
      const std::uint64_t begin = slice.units.begin * unit_bytes;
      const std::uint64_t bytes = slice.units.count() * unit_bytes;
      KEDGE_ASSIGN_OR_RETURN(
          const auto old_bytes,
          old_source.Read(slice.tensor, begin, bytes, &old_scratch));
      KEDGE_ASSIGN_OR_RETURN(
          const auto new_bytes,
          new_source.Read(slice.tensor, begin, bytes, &new_scratch));
      record.clear();
      const EncodedSlice encoded =
          encoder.Encode(spec.grid(), slice.units, unit_bytes, old_bytes.data(),
                         new_bytes.data(), &record);
      if (encoded.nnz == 0) continue;
      KEDGE_ASSIGN_OR_RETURN(const SegmentWriter::Location location,
                             segments.Add(record));
      DeltaRecord entry;
      entry.tensor = slice.tensor;
      entry.slice = slice.units;
      entry.file = location.file;
      entry.offset = location.offset;
      entry.bytes = static_cast<std::uint32_t>(encoded.record_bytes);
      entry.nnz = encoded.nnz;
      entry.l61 = encoded.l61;
      records.push_back(entry);
      if (sink) sink(slice.tensor, slice.units, record, encoded.record_bytes);
    }
    const std::lock_guard<std::mutex> lock(mutex);
    fragment.records.insert(fragment.records.end(), records.begin(),
                            records.end());
    return absl::OkStatus();
  };
  {
    IoPool::Batch batch(&encode_pool_);
    for (int i = 0; i < encode_pool_.thread_count(); ++i) {
      batch.Submit([&]() -> absl::Status {
        absl::Status status = encode();
        if (!status.ok()) failed = true;
        return status;
      });
    }
    KEDGE_RETURN_IF_ERROR(batch.Wait());
  }
  KEDGE_ASSIGN_OR_RETURN(fragment.files, segments.Finish());
  PublishResult result;
  result.encode_seconds = SecondsSince(start);

  const auto commit_start = Clock::now();
  std::sort(fragment.records.begin(), fragment.records.end(),
            [](const DeltaRecord& a, const DeltaRecord& b) {
              return std::tie(a.tensor, a.slice.begin) <
                     std::tie(b.tensor, b.slice.begin);
            });
  for (const TensorSlice& slice : slices) {
    if (!fragment.owned.empty() &&
        fragment.owned.back().tensor == slice.tensor &&
        fragment.owned.back().slice.end == slice.units.begin) {
      fragment.owned.back().slice.end = slice.units.end;
    } else {
      fragment.owned.push_back({slice.tensor, slice.units});
    }
  }
  KEDGE_ASSIGN_OR_RETURN(
      StepManifest manifest,
      MergeFragments(std::span<const RankFragment>(&fragment, 1), table,
                     state_.l61));
  if (metadata != nullptr && *metadata != state_.metadata) {
    manifest.metadata_changed = true;
    manifest.metadata = *metadata;
  }
  KEDGE_RETURN_IF_ERROR(staging->SealFiles(io_pool_));
  KEDGE_RETURN_IF_ERROR(CommitStep(*staging, manifest, table, &result));
  result.commit_seconds = SecondsSince(commit_start);
  result.records = manifest.records.size();
  for (const DeltaRecord& record : manifest.records) result.nnz += record.nnz;

  state_.id = result.version;
  for (const TensorState& tensor : manifest.states) {
    state_.l61[tensor.tensor] = tensor.l61_after;
  }
  if (manifest.metadata_changed) state_.metadata = manifest.metadata;
  return result;
}

absl::StatusOr<PublishResult> StoreWriter::PublishRoot(
    std::uint64_t step, const TensorTable& table, TensorSource& source,
    const Metadata& metadata) {
  KEDGE_RETURN_IF_ERROR(CheckMayPublish(step));
  const auto start = Clock::now();
  KEDGE_RETURN_IF_ERROR(
      EnsureTable(*store_->fs(), store_->path(), table,
                  JoinPath(store_->PathOf(kStagingDirectoryName),
                           absl::StrCat("table.", epoch_, ".", attempt_++))));
  AnchorLayoutOptions layout_options;
  layout_options.anchor_file_bytes = options_.anchor_file_bytes;
  layout_options.rank = options_.rank;
  KEDGE_ASSIGN_OR_RETURN(AnchorLayout layout,
                         PlanAnchor(table, layout_options));
  Place place;
  place.fs = store_->fs();
  place.pool = &io_pool_;
  place.staging = NewStagingPath(step, FileKind::kSegment);
  place.target = store_->StepPath(step);
  place.run = store_->info().run;
  place.epoch = epoch_;
  StepManifest manifest;
  manifest.run = store_->info().run;
  manifest.epoch = epoch_;
  manifest.step = step;
  manifest.base = state_.id;
  manifest.metadata = metadata;
  std::vector<std::byte> manifest_bytes;
  PublishResult result;
  KEDGE_ASSIGN_OR_RETURN(
      auto staging, StageRoot(place, table, &layout, source, summer_, &manifest,
                              &manifest_bytes, &result.anchor_bytes));
  result.anchor_seconds = SecondsSince(start);
  const auto commit_start = Clock::now();
  KEDGE_RETURN_IF_ERROR(staging->SealFiles(io_pool_));
  KEDGE_RETURN_IF_ERROR(CommitStep(*staging, manifest, table, &result));
  result.commit_seconds = SecondsSince(commit_start);
  state_.id = result.version;
  state_.l61 = manifest.l61;
  state_.metadata = metadata;
  KEDGE_ASSIGN_OR_RETURN(state_.table, store_->ReadTable(table.hash()));
  layout_ = std::move(layout);
  return result;
}

absl::Status StoreWriter::AddAnchor(TensorSource& source,
                                    PublishResult* result) {
  const auto start = Clock::now();
  if (outcome_unknown_) return CheckMayPublish(state_.id.step + 1);
  KEDGE_RETURN_IF_ERROR(CheckNotFenced(state_.id.step + 1));
  const TensorTable& table = *state_.table;
  if (!layout_) {
    AnchorLayoutOptions layout_options;
    layout_options.anchor_file_bytes = options_.anchor_file_bytes;
    layout_options.rank = options_.rank;
    KEDGE_ASSIGN_OR_RETURN(layout_, PlanAnchor(table, layout_options));
  }
  KEDGE_ASSIGN_OR_RETURN(
      auto anchor,
      AnchorWriter::Create(
          store_->fs(), NewStagingPath(state_.id.step, FileKind::kAnchor),
          &io_pool_, store_->info().run, state_.id.step, &table, &*layout_));
  KEDGE_RETURN_IF_ERROR(anchor->WriteSlices(source, summer_));
  for (std::size_t i = 0; i < table.size(); ++i) {
    if (anchor->l61()[i] == state_.l61[i]) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "anchor of ", ToString(state_.id), ": ", table[i].name,
        ": L61: expected ", Hex64(state_.l61[i]), ", found ",
        Hex64(anchor->l61()[i]),
        "; the tensor was changed after the step was published; add the anchor "
        "before the next optimizer step"));
  }
  KEDGE_RETURN_IF_ERROR(anchor->Commit(epoch_, state_.id, state_.metadata));
  KEDGE_RETURN_IF_ERROR(CheckNotFenced(state_.id.step + 1));
  const std::string target = store_->AnchorPath(state_.id.step);
  KEDGE_RETURN_IF_ERROR(anchor->staging().PublishAs(target, [&] {
    return HoldsCommit(*store_->fs(), target, anchor->commit_bytes());
  }));
  result->anchor_bytes = anchor->total_bytes();
  result->anchor_seconds = SecondsSince(start);
  return absl::OkStatus();
}

}  // namespace kedge
