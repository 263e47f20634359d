#include "kedge/writer/store_writer.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kedge/engine/cpu/slice_encoder.h"
#include "kedge/format/fixed_files.h"
#include "kedge/format/layout.h"
#include "kedge/format/limits.h"
#include "kedge/format/status.h"
#include "kedge/writer/anchor_writer.h"
#include "kedge/writer/segment_writer.h"
#include "kedge/writer/wire.h"

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
  const RankGroup group(options.coordinator);
  if (group.world_size() == 0 || group.world_size() > kMaxRanks ||
      group.rank() >= group.world_size()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "WriterOptions::coordinator: expected at most ", kMaxRanks,
        " ranks, found rank ", group.rank(), " of ", group.world_size()));
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

// The epoch in the COMMIT of a step directory; nothing if it has no sound one.
std::optional<std::uint32_t> EpochOfStep(FileSystem& fs,
                                         const std::string& directory) {
  const std::string path = JoinPath(directory, kCommitFileName);
  const auto bytes = ReadFile(fs, path, 2 * kCommitBytes);
  if (!bytes.ok()) return std::nullopt;
  const auto commit = ParseCommit(path, *bytes);
  if (!commit.ok()) return std::nullopt;
  return commit->epoch;
}

// Writes the tensor table unless it stands there already.
absl::Status EnsureTable(FileSystem& fs, const std::string& store_path,
                         const TensorTable& table,
                         const std::string& temporary) {
  const std::string path =
      JoinPath(store_path, TensorTableFileName(table.hash()));
  absl::Status created =
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
  std::uint64_t step = 0;
};

// A rank's part of a root step: its anchor inside the step's staging directory,
// or sums alone.
struct StagedRoot {
  std::unique_ptr<StagingDirectory> staging;
  std::unique_ptr<AnchorWriter> anchor;  // null: sums alone
  AnchorPart part;
};

// S of what `source` holds.
absl::Status SumSource(IoPool* pool, const TensorTable& table,
                       TensorSource& source, const L61Summer& summer,
                       AnchorPart* part) {
  part->owned = OwnedOf(table, source);
  part->l61.assign(table.size(), 0);
  std::mutex mutex;
  IoPool::Batch batch(pool);
  batch.set_max_in_flight(2 * pool->thread_count());
  for (const TensorSlice& slice :
       SplitOwned(table, part->owned, kPieceBytes / 4)) {
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
      auto& total = part->l61[slice.tensor];
      total = L61Add(total, sum);
      return absl::OkStatus();
    });
  }
  return batch.Wait();
}

// Opens this rank's part of a root step.
absl::Status OpenRoot(const Place& place, const TensorTable& table,
                      const AnchorLayout& layout, StagedRoot* root) {
  KEDGE_ASSIGN_OR_RETURN(root->staging,
                         StagingDirectory::Create(place.fs, place.staging));
  KEDGE_ASSIGN_OR_RETURN(
      root->anchor, AnchorWriter::Create(
                        place.fs, JoinPath(place.staging, kAnchorDirectoryName),
                        place.pool, place.run, place.step, &table, &layout));
  return absl::OkStatus();
}

// Writes and seals this rank's part of a root step (`layout` null: sums alone).
absl::Status StageRoot(const Place& place, const TensorTable& table,
                       const AnchorLayout* layout, TensorSource& source,
                       const L61Summer& summer, StagedRoot* root) {
  if (layout == nullptr) {
    KEDGE_ASSIGN_OR_RETURN(root->staging,
                           StagingDirectory::Create(place.fs, place.staging));
    return SumSource(place.pool, table, source, summer, &root->part);
  }
  KEDGE_RETURN_IF_ERROR(OpenRoot(place, table, *layout, root));
  KEDGE_RETURN_IF_ERROR(root->anchor->WriteSlices(source, summer));
  KEDGE_ASSIGN_OR_RETURN(root->part, root->anchor->Seal());
  return absl::OkStatus();
}

// The rank that commits: makes the staging directory complete but for the
// step's own MANIFEST and COMMIT. Fills kind, table, l61 and digest of
// `manifest`.
absl::Status FinishRoot(const Place& place, const TensorTable& table,
                        const AnchorPart& whole, StagedRoot* root,
                        StepManifest* manifest,
                        std::vector<std::byte>* manifest_bytes,
                        std::uint64_t* anchor_bytes) {
  manifest->kind = StepKind::kRoot;
  manifest->l61 = whole.l61;
  manifest->table_hash = table.hash();
  manifest->digest_after = table.StateDigest(manifest->l61);
  manifest->metadata_changed = true;
  KEDGE_ASSIGN_OR_RETURN(*manifest_bytes,
                         SerializeStepManifest(*manifest, table));
  if (root->anchor != nullptr) {
    const VersionId version{manifest->step, HashBytes128(*manifest_bytes)};
    KEDGE_RETURN_IF_ERROR(
        root->anchor->Commit(place.epoch, version, manifest->metadata, whole));
    *anchor_bytes = root->anchor->total_bytes();
    root->staging->Adopt(root->anchor->TakeStaging());
  }
  return root->staging->SealFiles(*place.pool);
}

// Whether the files of other ranks are where this one looks, in full: ranks
// that do not see one file system fail here, and not in every reader.
absl::Status CheckOthersFiles(FileSystem& fs, const std::string& directory,
                              std::span<const DataFile> files,
                              std::uint32_t own_rank) {
  for (const DataFile& file : files) {
    if (file.id.rank == own_rank) continue;
    const std::string path = JoinPath(directory, DataFileName(file.id));
    const auto info = fs.Stat(path);
    if (info.ok() && info->type == FileType::kRegular &&
        info->bytes == file.bytes) {
      continue;
    }
    if (!info.ok() && !absl::IsNotFound(info.status())) return info.status();
    return absl::FailedPreconditionError(
        absl::StrCat(path, ": rank ", file.id.rank, " wrote ", file.bytes,
                     " bytes, rank ", own_rank, " finds ",
                     info.ok() ? absl::StrCat(info->bytes) : "no such file",
                     "; all ranks must see the store on one file system"));
  }
  return absl::OkStatus();
}

// The names that this rank made are on the disk before rank 0 renames them.
absl::Status SyncShared(FileSystem& fs, const RankGroup& group,
                        const std::string& directory) {
  return group.leads() ? absl::OkStatus() : fs.SyncDirectory(directory);
}

// What all ranks sent, read by `parse(where, bytes)`.
template <class T, class Parse>
absl::StatusOr<std::vector<T>> ParseAll(
    std::span<const std::vector<std::byte>> pieces, const Parse& parse) {
  std::vector<T> parts;
  const auto world_size = static_cast<std::uint32_t>(pieces.size());
  for (std::uint32_t rank = 0; rank < world_size; ++rank) {
    KEDGE_ASSIGN_OR_RETURN(T part,
                           parse(RankName(rank, world_size), pieces[rank]));
    parts.push_back(std::move(part));
  }
  return parts;
}

// No rank may name another's files: that would commit unwritten ones.
absl::Status CheckFileRanks(std::span<const AnchorPart> parts) {
  for (std::uint32_t rank = 0; rank < parts.size(); ++rank) {
    for (const DataFile& file : parts[rank].files) {
      if (file.id.rank == rank && file.id.kind == FileKind::kAnchor) continue;
      return absl::FailedPreconditionError(
          absl::StrCat("rank ", rank, ": names the file ",
                       DataFileName(file.id), ", which is not its own"));
    }
  }
  return absl::OkStatus();
}

// What a rank says in a round: why it failed, or what `serialize` makes.
template <class Serialize>
RankGroup::Piece PieceOf(const absl::Status& status,
                         const Serialize& serialize) {
  if (!status.ok()) return status;
  return serialize();
}

bool SameSlices(std::span<const OwnedSlice> a, std::span<const OwnedSlice> b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const OwnedSlice& x, const OwnedSlice& y) {
                      return x.tensor == y.tensor &&
                             x.slice.begin == y.slice.begin &&
                             x.slice.end == y.slice.end;
                    });
}

// What is in both, which are ascending.
std::vector<OwnedSlice> Intersect(std::span<const OwnedSlice> a,
                                  std::span<const OwnedSlice> b) {
  std::vector<OwnedSlice> both;
  for (std::size_t i = 0, j = 0; i < a.size() && j < b.size();) {
    if (a[i].tensor != b[j].tensor) {
      ++(a[i].tensor < b[j].tensor ? i : j);
      continue;
    }
    const UnitRange range{std::max(a[i].slice.begin, b[j].slice.begin),
                          std::min(a[i].slice.end, b[j].slice.end)};
    if (range.begin < range.end) both.push_back({a[i].tensor, range});
    ++(a[i].slice.end < b[j].slice.end ? i : j);
  }
  return both;
}

PublishResult ResultOf(const StepOutcome& outcome) {
  PublishResult result;
  result.version = outcome.version;
  result.nnz = outcome.nnz;
  result.records = outcome.records;
  result.bytes = outcome.bytes;
  result.manifest_bytes = outcome.manifest_bytes;
  result.anchor_bytes = outcome.anchor_bytes;
  result.warnings = outcome.warnings;
  return result;
}

// Ranks that hold a part of `tensor`: " (ranks 0, 2)"; empty for one rank.
std::string HoldersText(std::span<const std::vector<OwnedSlice>> by_rank,
                        std::uint32_t tensor) {
  if (by_rank.size() == 1) return "";
  std::vector<std::uint32_t> ranks;
  for (std::uint32_t rank = 0; rank < by_rank.size(); ++rank) {
    const auto& owned = by_rank[rank];
    if (std::any_of(owned.begin(), owned.end(), [&](const OwnedSlice& slice) {
          return slice.tensor == tensor;
        })) {
      ranks.push_back(rank);
    }
  }
  return absl::StrCat(" (held by rank", ranks.size() == 1 ? " " : "s ",
                      absl::StrJoin(ranks, ", "), ")");
}

// Whether the ranks together hold the version `state`.
absl::Status CheckHeld(const std::string& store_path, const VersionState& state,
                       std::span<const StoreWriter::HeldPart> parts) {
  const TensorTable& table = *state.table;
  std::vector<std::vector<OwnedSlice>> owned;
  for (const auto& part : parts) owned.push_back(part.owned);
  KEDGE_RETURN_IF_ERROR(CheckOwnership(owned, table));
  std::vector<std::string> different;
  std::size_t different_count = 0;
  for (std::uint32_t i = 0; i < table.size(); ++i) {
    if (table[i].tied_to != kNotTied) continue;
    std::uint64_t sum = 0;
    for (const auto& part : parts) sum = L61Add(sum, part.l61[i]);
    if (sum == state.l61[i]) continue;
    if (++different_count <= 4) {
      different.push_back(absl::StrCat(table[i].name, HoldersText(owned, i),
                                       ": L61: expected ", Hex64(state.l61[i]),
                                       ", found ", Hex64(sum)));
    }
  }
  if (different_count == 0) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "the trainer's weights are not ", ToString(state.id), " of ", store_path,
      " in ", different_count, " of ", table.size(),
      " tensors: ", absl::StrJoin(different, "; "),
      "; restore the trainer's checkpoint of that step, resume at the step "
      "that it holds, or replace the tensors"));
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

// What rank 0 does before anybody writes into a new store.
absl::StatusOr<StoreInfo> BeginStore(FileSystem& fs, const std::string& path,
                                     const InitOptions& init,
                                     const TensorTable& table,
                                     bool ranks_may_be_there) {
  KEDGE_RETURN_IF_ERROR(EnsureDirectory(fs, path));
  KEDGE_ASSIGN_OR_RETURN(std::vector<std::string> present, fs.List(path));
  if (ranks_may_be_there) {
    // That is where they have met.
    present.erase(
        std::remove(present.begin(), present.end(), kRanksDirectoryName),
        present.end());
  }
  if (!present.empty()) {
    return absl::AlreadyExistsError(absl::StrCat(
        path, ": expected an empty or missing directory, found ",
        present.size(), " entries, the first \"", present.front(),
        "\"; to go on with a run that is there, open it (SnapshotWriter::Open, "
        "`kedge publish`); for a new one choose another path (a store without "
        "the file ",
        kStoreFileName, " is an init that did not finish: remove it)"));
  }
  for (const char* directory :
       {kEpochsDirectoryName, kStagingDirectoryName, kTrashDirectoryName,
        kLeasesDirectoryName, kRanksDirectoryName}) {
    KEDGE_RETURN_IF_ERROR(EnsureDirectory(fs, JoinPath(path, directory)));
  }

  StoreInfo info;
  info.run = init.run ? *init.run : RandomRunId();
  info.l61_seed = init.l61_seed ? *init.l61_seed : RandomSeed();
  info.external_v0 = init.external_v0;
  info.v0_table_hash = table.hash();
  info.created_unix_seconds =
      init.created_unix_seconds != 0
          ? init.created_unix_seconds
          : static_cast<std::uint64_t>(
                std::chrono::duration_cast<std::chrono::seconds>(
                    std::chrono::system_clock::now().time_since_epoch())
                    .count());
  KEDGE_RETURN_IF_ERROR(EnsureTable(
      fs, path, table,
      JoinPath(JoinPath(path, kStagingDirectoryName), "table.0.0")));
  return info;
}

// What rank 0 does when all parts of v0 are written.
absl::Status CommitStore(FileSystem& fs, const std::string& path,
                         const Place& place, const InitOptions& init,
                         StoreInfo info, const TensorTable& table,
                         std::span<const AnchorPart> parts, StagedRoot* root) {
  KEDGE_ASSIGN_OR_RETURN(const AnchorPart whole,
                         MergeAnchorParts(parts, table));
  KEDGE_RETURN_IF_ERROR(CheckOthersFiles(
      fs, JoinPath(place.staging, kAnchorDirectoryName), whole.files, 0));
  StepManifest manifest;
  manifest.run = info.run;
  manifest.metadata = init.metadata;
  std::vector<std::byte> manifest_bytes;
  std::uint64_t anchor_bytes = 0;
  KEDGE_RETURN_IF_ERROR(FinishRoot(place, table, whole, root, &manifest,
                                   &manifest_bytes, &anchor_bytes));
  const std::vector<std::byte> commit = CommitBytes(manifest, manifest_bytes);
  KEDGE_RETURN_IF_ERROR(
      root->staging->WriteCommit(manifest_bytes, commit, *place.pool));
  KEDGE_RETURN_IF_ERROR(root->staging->PublishAs(
      place.target, [&] { return HoldsCommit(fs, place.target, commit); }));

  const std::string staging_root = JoinPath(path, kStagingDirectoryName);
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

}  // namespace

absl::Status InitStore(const WriterOptions& options, const InitOptions& init,
                       const TensorTable& table, TensorSource& source) {
  KEDGE_RETURN_IF_ERROR(CheckOptions(options));
  const RankGroup group(options.coordinator);
  FileSystem& fs = *FileSystemOf(options);
  const std::string& path = options.store_path;
  SharedStagingFileSystem shared(&fs, group.leads());

  // Rank 0 prepares the directory; all learn run and seed.
  StoreInfo info;
  if (group.alone()) {
    KEDGE_ASSIGN_OR_RETURN(info, BeginStore(fs, path, init, table, false));
  } else {
    AnchorPart plan;
    plan.owned = OwnedOf(table, source);
    const Verdict verdict = group.Agree(
        "the new store", SerializeAnchorPart(plan, table),
        [&](std::span<const std::vector<std::byte>> pieces) -> Verdict {
          auto parts = ParseAll<AnchorPart>(
              pieces, [&](absl::string_view where, const auto& bytes) {
                return ParseAnchorPart(where, bytes, table);
              });
          if (!parts.ok()) return {parts.status(), {}};
          std::vector<std::vector<OwnedSlice>> owned;
          for (const AnchorPart& part : *parts) owned.push_back(part.owned);
          const absl::Status covered = CheckOwnership(owned, table);
          if (!covered.ok()) return {covered, {}};
          const auto begun = BeginStore(fs, path, init, table, true);
          if (!begun.ok()) return {begun.status(), {}};
          const auto bytes = SerializeStore(*begun);
          return {absl::OkStatus(), {bytes.begin(), bytes.end()}};
        });
    KEDGE_RETURN_IF_ERROR(verdict.status);
    KEDGE_ASSIGN_OR_RETURN(info, ParseStore("rank 0", verdict.payload));
  }

  IoPool pool(options.io_threads);
  const L61Summer summer(L61Key::FromSeed(info.l61_seed));
  Place place;
  place.fs = group.alone() ? &fs : &shared;
  place.pool = &pool;
  place.staging = JoinPath(JoinPath(path, kStagingDirectoryName),
                           StagingName(0, FileKind::kSegment, 0, 0));
  place.target = JoinPath(path, StepDirectoryName(0));
  place.run = info.run;
  StagedRoot root;
  AnchorLayout layout;
  const absl::Status staged = [&]() -> absl::Status {
    if (!init.external_v0) {
      AnchorLayoutOptions layout_options;
      layout_options.anchor_file_bytes = options.anchor_file_bytes;
      layout_options.rank = group.rank();
      KEDGE_ASSIGN_OR_RETURN(
          layout, PlanAnchor(table, layout_options, OwnedOf(table, source)));
    }
    KEDGE_RETURN_IF_ERROR(StageRoot(place, table,
                                    init.external_v0 ? nullptr : &layout,
                                    source, summer, &root));
    if (init.external_v0) return absl::OkStatus();
    return SyncShared(fs, group, JoinPath(place.staging, kAnchorDirectoryName));
  }();
  if (group.alone()) {
    KEDGE_RETURN_IF_ERROR(staged);
    return CommitStore(fs, path, place, init, info, table,
                       std::span(&root.part, 1), &root);
  }
  const RankGroup::Piece mine =
      PieceOf(staged, [&] { return SerializeAnchorPart(root.part, table); });
  return group
      .Agree("v0", mine,
             [&](std::span<const std::vector<std::byte>> pieces) -> Verdict {
               auto parts = ParseAll<AnchorPart>(
                   pieces, [&](absl::string_view where, const auto& bytes) {
                     return ParseAnchorPart(where, bytes, table);
                   });
               if (!parts.ok()) return {parts.status(), {}};
               absl::Status status = CheckFileRanks(*parts);
               if (status.ok()) {
                 status = CommitStore(fs, path, place, init, info, table,
                                      *parts, &root);
               }
               return {status, {}};
             })
      .status;
}

StoreWriter::StoreWriter(const WriterOptions& options,
                         std::unique_ptr<Store> store, VersionState state,
                         std::uint32_t epoch)
    : options_(options),
      group_(options.coordinator),
      store_(std::move(store)),
      shared_fs_(store_->fs(), group_.leads()),
      staging_fs_(group_.alone() ? store_->fs() : &shared_fs_),
      state_(std::move(state)),
      epoch_(epoch),
      summer_(L61Key::FromSeed(store_->info().l61_seed)),
      io_pool_(options.io_threads),
      encode_pool_(EncodeThreads(options)) {}

StoreWriter::~StoreWriter() = default;

absl::StatusOr<std::unique_ptr<StoreWriter>> StoreWriter::Open(
    const WriterOptions& options, std::optional<std::uint64_t> resume_step,
    const SumHeld& sum_held) {
  KEDGE_RETURN_IF_ERROR(CheckOptions(options));
  const RankGroup group(options.coordinator);
  FileSystem& fs = *FileSystemOf(options);
  std::unique_ptr<Store> store;
  VersionState state;
  const auto choose = [&]() -> absl::Status {
    KEDGE_ASSIGN_OR_RETURN(store, Store::Open(&fs, options.store_path));
    std::shared_ptr<const PublishedStep> held;
    if (resume_step) {
      KEDGE_ASSIGN_OR_RETURN(held, store->ReadStep(*resume_step));
    } else {
      KEDGE_ASSIGN_OR_RETURN(held, store->Newest());
    }
    KEDGE_ASSIGN_OR_RETURN(state, store->StateAt(held));
    return absl::OkStatus();
  };
  const auto sum = [&]() -> absl::StatusOr<HeldPart> {
    if (!sum_held) return HeldPart();
    return sum_held(state, L61Summer(L61Key::FromSeed(store->info().l61_seed)));
  };
  // The parts of all ranks; then the store is taken over.
  const auto take_over =
      [&](std::span<const HeldPart> parts) -> absl::StatusOr<std::uint32_t> {
    if (sum_held) {
      KEDGE_RETURN_IF_ERROR(CheckHeld(options.store_path, state, parts));
      // Summing takes a while, in which another writer may have been here.
      KEDGE_ASSIGN_OR_RETURN(const auto again, store->ReadStep(state.id.step));
      if (again->id != state.id) {
        return absl::UnavailableError(absl::StrCat(
            options.store_path, ": ", ToString(state.id), " became ",
            ToString(again->id), " while it was opened; open again"));
      }
    }
    return TakeOver(*store, state.id, /*newest=*/!resume_step);
  };

  std::uint32_t epoch = 0;
  if (group.alone()) {
    KEDGE_RETURN_IF_ERROR(choose());
    KEDGE_ASSIGN_OR_RETURN(const HeldPart part, sum());
    KEDGE_ASSIGN_OR_RETURN(epoch, take_over(std::span(&part, 1)));
    return std::unique_ptr<StoreWriter>(
        new StoreWriter(options, std::move(store), std::move(state), epoch));
  }

  WireWriter asked;
  asked.U32(resume_step ? 1 : 0);
  asked.U64(resume_step.value_or(0));
  asked.U32(sum_held ? 1 : 0);
  const std::vector<std::byte> question = asked.Take();
  const Verdict chosen = group.Agree(
      "opening the store", question,
      [&](std::span<const std::vector<std::byte>> pieces) -> Verdict {
        for (std::size_t rank = 1; rank < pieces.size(); ++rank) {
          if (pieces[rank] == question) continue;
          return {absl::FailedPreconditionError(absl::StrCat(
                      RankName(static_cast<std::uint32_t>(rank),
                               group.world_size()),
                      ": opens the store at another resume step than rank 0")),
                  {}};
        }
        const absl::Status status = choose();
        if (!status.ok()) return {status, {}};
        return {status, SerializeSharedState({store->info().run, state})};
      });
  KEDGE_RETURN_IF_ERROR(chosen.status);
  // From here on a failure of this rank is told in the next round.
  HeldPart part;
  const absl::Status summed = [&]() -> absl::Status {
    if (!group.leads()) {
      KEDGE_ASSIGN_OR_RETURN(SharedState shared,
                             ParseSharedState("rank 0", chosen.payload));
      KEDGE_ASSIGN_OR_RETURN(store, Store::Open(&fs, options.store_path));
      if (store->info().run != shared.run) {
        return absl::FailedPreconditionError(absl::StrCat(
            options.store_path, ": run id: expected ", ToHex(shared.run),
            " as at rank 0, found ", ToHex(store->info().run),
            "; all ranks must see the store on one file system"));
      }
      state = std::move(shared.state);
    }
    KEDGE_ASSIGN_OR_RETURN(part, sum());
    return absl::OkStatus();
  }();
  const RankGroup::Piece mine = PieceOf(summed, [&] {
    AnchorPart sums;
    sums.owned = part.owned;
    sums.l61 = part.l61;
    return SerializeAnchorPart(sums, *state.table);
  });
  const Verdict taken = group.Agree(
      absl::StrCat("weights of ", ToString(state.id)), mine,
      [&](std::span<const std::vector<std::byte>> pieces) -> Verdict {
        auto sums = ParseAll<AnchorPart>(
            pieces, [&](absl::string_view where, const auto& bytes) {
              return ParseAnchorPart(where, bytes, *state.table);
            });
        if (!sums.ok()) return {sums.status(), {}};
        std::vector<HeldPart> parts;
        for (AnchorPart& one : *sums) {
          parts.push_back({std::move(one.owned), std::move(one.l61)});
        }
        const auto made = take_over(parts);
        if (!made.ok()) return {made.status(), {}};
        WireWriter out;
        out.U32(*made);
        return {absl::OkStatus(), out.Take()};
      });
  KEDGE_RETURN_IF_ERROR(taken.status);
  WireReader in(taken.payload);
  epoch = in.U32();
  KEDGE_RETURN_IF_ERROR(in.Finish("rank 0"));
  return std::unique_ptr<StoreWriter>(
      new StoreWriter(options, std::move(store), std::move(state), epoch));
}

absl::StatusOr<std::uint32_t> StoreWriter::TakeOver(const Store& store,
                                                    const VersionId& held,
                                                    bool newest) {
  FileSystem& fs = *store.fs();
  const auto published_meanwhile = [&](std::uint64_t step) {
    return absl::UnavailableError(absl::StrCat(
        store.path(), ": v", step,
        " was published while the store was opened at ", ToString(held),
        "; nothing was changed; see that one trainer alone publishes here, "
        "then "
        "open again"));
  };
  if (newest) {
    KEDGE_ASSIGN_OR_RETURN(const auto now, store.Newest());
    if (now->id != held) return published_meanwhile(now->id.step);
  }
  // A new epoch, created exclusively. From here on older writers are fenced.
  for (const char* directory :
       {kEpochsDirectoryName, kStagingDirectoryName, kTrashDirectoryName}) {
    KEDGE_RETURN_IF_ERROR(EnsureDirectory(fs, store.PathOf(directory)));
  }
  KEDGE_ASSIGN_OR_RETURN(const std::vector<EpochInfo> epochs,
                         store.ReadEpochs());
  EpochInfo epoch;
  epoch.run = store.info().run;
  epoch.resume_step = held.step;
  epoch.resume_manifest_hash = held.manifest_hash;
  epoch.epoch = epochs.empty() ? 1 : epochs.back().epoch + 1;
  const std::string staging_root = store.PathOf(kStagingDirectoryName);
  const absl::Status created = CreateFileAtomically(
      fs,
      JoinPath(store.PathOf(kEpochsDirectoryName), EpochFileName(epoch.epoch)),
      JoinPath(staging_root,
               absl::StrCat("epoch.", epoch.epoch, ".", RandomSeed())),
      SerializeEpoch(epoch));
  if (absl::IsAlreadyExists(created)) {
    return absl::FailedPreconditionError(absl::StrCat(
        store.path(), ": fenced by epoch ", epoch.epoch,
        ": another writer opened this store at the same moment; make sure that "
        "one trainer alone publishes here, then open again"));
  }
  KEDGE_RETURN_IF_ERROR(created);

  KEDGE_ASSIGN_OR_RETURN(const std::vector<std::uint64_t> steps,
                         store.ListSteps());
  if (newest) {
    // Between the look above and the epoch another writer may have published: a
    // step that nobody asked to give up. Then the epoch goes again, unused.
    for (const std::uint64_t step : steps) {
      if (step <= held.step) continue;
      if (EpochOfStep(fs, store.StepPath(step)) !=
          Store::ValidEpoch(epochs, step)) {
        continue;
      }
      KEDGE_RETURN_IF_ERROR(fs.RemoveFile(JoinPath(
          store.PathOf(kEpochsDirectoryName), EpochFileName(epoch.epoch))));
      return published_meanwhile(step);
    }
  }
  // Whatever lies above the resume step belongs to a past that is given up.
  for (const std::uint64_t step : steps) {
    if (step <= held.step) continue;
    const std::string from = store.StepPath(step);
    const std::string to =
        JoinPath(store.PathOf(kTrashDirectoryName),
                 absl::StrCat(StepDirectoryName(step), ".", epoch.epoch));
    if (const absl::Status moved = fs.Rename(from, to);
        !moved.ok() && !absl::IsNotFound(fs.Stat(from).status())) {
      return Annotate(
          moved, absl::StrCat("moving the superseded ", from, " to .trash"));
    }
  }
  KEDGE_RETURN_IF_ERROR(fs.SyncDirectory(store.path()));
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
  head.step = held.step;
  head.epoch = epoch.epoch;
  head.manifest_hash = held.manifest_hash;
  KEDGE_RETURN_IF_ERROR(
      ReplaceFile(fs, store.PathOf(kHeadFileName),
                  JoinPath(staging_root, absl::StrCat("HEAD.", epoch.epoch)),
                  SerializeHead(head)));
  return epoch.epoch;
}

absl::Status StoreWriter::CheckUsable() const {
  if (!outcome_unknown_) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat(
      store_->path(),
      ": the outcome of an earlier publish is unknown; open a new writer, "
      "which looks at what is there and goes on from it"));
}

absl::Status StoreWriter::CheckNotFenced(std::uint64_t step) const {
  // Rank 0 commits, and what it sees counts: another host may see an epoch a
  // little later.
  if (!group_.leads()) return absl::OkStatus();
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

absl::Status StoreWriter::FencedOr(absl::Status status,
                                   std::uint64_t step) const {
  if (status.ok() || outcome_unknown_) return status;
  absl::Status fenced = CheckNotFenced(step);
  return absl::IsFailedPrecondition(fenced) ? fenced : status;
}

absl::Status StoreWriter::CheckMayPublish(std::uint64_t step) const {
  if (step <= state_.id.step || step > kMaxStep) {
    return absl::InvalidArgumentError(absl::StrCat(
        store_->path(), ": step: expected ", state_.id.step + 1, " to ",
        kMaxStep, ", found ", step,
        "; to publish from an earlier version, open the store with that resume "
        "step"));
  }
  return CheckNotFenced(step);
}

std::string StoreWriter::StagingPath(std::uint64_t step, FileKind kind,
                                     std::uint64_t attempt) const {
  return JoinPath(store_->PathOf(kStagingDirectoryName),
                  StagingName(step, kind, epoch_, attempt));
}

absl::Status StoreWriter::Take(const Verdict& verdict) {
  if (verdict.outcome_unknown) outcome_unknown_ = true;
  return verdict.status;
}

void StoreWriter::Advance(const StepOutcome& outcome) {
  state_.id = outcome.version;
  for (std::size_t i = 0; i < outcome.l61_tensors.size(); ++i) {
    state_.l61[outcome.l61_tensors[i]] = outcome.l61_after[i];
  }
  if (outcome.metadata_changed) state_.metadata = outcome.metadata;
}

absl::Status StoreWriter::CommitStep(StagingDirectory& staging,
                                     const StepManifest& manifest,
                                     const TensorTable& table,
                                     StepOutcome* outcome) {
  FileSystem& fs = *store_->fs();
  KEDGE_ASSIGN_OR_RETURN(const std::vector<std::byte> manifest_bytes,
                         SerializeStepManifest(manifest, table));
  const std::vector<std::byte> commit = CommitBytes(manifest, manifest_bytes);
  KEDGE_RETURN_IF_ERROR(staging.WriteCommit(manifest_bytes, commit, io_pool_));
  KEDGE_RETURN_IF_ERROR(CheckNotFenced(manifest.step));
  const std::string target = store_->StepPath(manifest.step);
  // A step of an earlier epoch that stands there is void: its writer was fenced
  // while it renamed it.
  if (const auto epoch = EpochOfStep(fs, target); epoch && *epoch < epoch_) {
    KEDGE_RETURN_IF_ERROR(fs.Rename(
        target, JoinPath(store_->PathOf(kTrashDirectoryName),
                         absl::StrCat(StepDirectoryName(manifest.step), ".",
                                      epoch_, ".", RandomSeed()))));
  }
  const absl::Status published = staging.PublishAs(
      target, [&] { return HoldsCommit(fs, target, commit); });
  outcome_unknown_ = staging.outcome_unknown();
  KEDGE_RETURN_IF_ERROR(published);

  outcome->version = {manifest.step, HashBytes128(manifest_bytes)};
  outcome->manifest_bytes = manifest_bytes.size();
  outcome->bytes = manifest_bytes.size() + commit.size();
  for (const DataFile& file : manifest.files) outcome->bytes += file.bytes;
  outcome->records = manifest.records.size();
  for (const DeltaRecord& record : manifest.records) {
    outcome->nnz += record.nnz;
  }
  outcome->metadata_changed = manifest.metadata_changed;
  outcome->metadata = manifest.metadata;

  if (!staging.parent_sync_status().ok()) {
    outcome->warnings.push_back(absl::StrCat(
        "v", manifest.step, " is published, but may not outlive a power loss: ",
        staging.parent_sync_status().message()));
  }

  // An epoch that came between the check and the rename has made the step void:
  // its writer did not see it, or has moved it away.
  const absl::Status fenced = CheckNotFenced(manifest.step);
  if (absl::IsFailedPrecondition(fenced)) return fenced;

  // Published. HEAD is a hint, which no reader has to wait for the disk for:
  // the next publish puts it right.
  Head head;
  head.run = manifest.run;
  head.step = manifest.step;
  head.epoch = epoch_;
  head.manifest_hash = outcome->version.manifest_hash;
  absl::Status replaced = fenced;
  if (replaced.ok()) {
    replaced = ReplaceHint(fs, store_->PathOf(kHeadFileName),
                           JoinPath(store_->PathOf(kStagingDirectoryName),
                                    absl::StrCat("HEAD.", epoch_)),
                           SerializeHead(head));
  }
  if (!replaced.ok()) {
    outcome->warnings.push_back(absl::StrCat(
        "v", manifest.step, " is published, but HEAD was not replaced: ",
        replaced.message(), "; readers find it by listing the store"));
  }
  return absl::OkStatus();
}

StoreWriter::DeltaAttempt::DeltaAttempt(StoreWriter* writer, std::uint64_t step,
                                        std::uint64_t attempt, std::string path)
    : writer_(writer),
      step_(step),
      attempt_(attempt),
      path_(std::move(path)),
      start_(Clock::now()) {}

StoreWriter::DeltaAttempt::~DeltaAttempt() { Drop(); }

void StoreWriter::DeltaAttempt::Drop() {
  const std::lock_guard<std::mutex> lock(mutex_);
  segments_.reset();  // writes into the directory until then
  staging_.reset();
}

absl::StatusOr<SegmentWriter*> StoreWriter::DeltaAttempt::Stage() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (segments_ == nullptr) {
    KEDGE_ASSIGN_OR_RETURN(
        staging_, StagingDirectory::Create(writer_->staging_fs_, path_));
    segments_ = std::make_unique<SegmentWriter>(
        staging_.get(), &writer_->io_pool_, &writer_->piece_buffers_,
        writer_->store_->info().run, step_, writer_->group_.rank(),
        writer_->options_.segment_files);
  }
  return segments_.get();
}

absl::Status StoreWriter::DeltaAttempt::Add(
    const DeltaRecord& record, std::span<const std::byte> padded_record) {
  KEDGE_ASSIGN_OR_RETURN(SegmentWriter* const segments, Stage());
  KEDGE_ASSIGN_OR_RETURN(const SegmentWriter::Location location,
                         segments->Add(padded_record));
  DeltaRecord entry = record;
  entry.file = location.file;
  entry.offset = location.offset;
  const std::lock_guard<std::mutex> lock(mutex_);
  records_.push_back(entry);
  return absl::OkStatus();
}

std::unique_ptr<StoreWriter::DeltaAttempt> StoreWriter::BeginDelta(
    std::uint64_t step) {
  const std::uint64_t attempt = attempt_++;
  return std::unique_ptr<DeltaAttempt>(new DeltaAttempt(
      this, step, attempt, StagingPath(step, FileKind::kSegment, attempt)));
}

absl::StatusOr<std::vector<OwnedSlice>> StoreWriter::Encode(
    DeltaAttempt& attempt, TensorSource& old_source, TensorSource& new_source,
    const RecordSink& sink) {
  const TensorTable& table = *state_.table;
  std::vector<OwnedSlice> owned =
      Intersect(OwnedOf(table, old_source), OwnedOf(table, new_source));
  const std::vector<TensorSlice> slices =
      SplitOwned(table, owned, options_.slice_units);
  std::atomic<std::size_t> next_slice{0};
  std::atomic<bool> failed{false};
  const auto encode = [&]() -> absl::Status {
    SliceEncoder encoder(summer_.key());
    std::vector<std::byte> old_scratch;
    std::vector<std::byte> new_scratch;
    std::vector<std::byte> record;
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
      DeltaRecord entry;
      entry.tensor = slice.tensor;
      entry.slice = slice.units;
      entry.bytes = static_cast<std::uint32_t>(encoded.record_bytes);
      entry.nnz = encoded.nnz;
      entry.l61 = encoded.l61;
      KEDGE_RETURN_IF_ERROR(attempt.Add(entry, record));
      if (sink) sink(slice.tensor, slice.units, record, encoded.record_bytes);
    }
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
  return owned;
}

absl::Status StoreWriter::SealDelta(DeltaAttempt& attempt,
                                    std::vector<OwnedSlice> owned,
                                    RankFragment* fragment) {
  fragment->run = store_->info().run;
  fragment->epoch = epoch_;
  fragment->step = attempt.step_;
  fragment->attempt = attempt.attempt_;
  fragment->rank = group_.rank();
  fragment->world_size = group_.world_size();
  fragment->table_hash = state_.table->hash();
  fragment->base = state_.id;
  // An empty rank, too, has a directory to commit.
  KEDGE_ASSIGN_OR_RETURN(SegmentWriter* const segments, attempt.Stage());
  KEDGE_ASSIGN_OR_RETURN(fragment->files, segments->Finish());
  std::sort(owned.begin(), owned.end(),
            [](const OwnedSlice& a, const OwnedSlice& b) {
              return std::tie(a.tensor, a.slice.begin) <
                     std::tie(b.tensor, b.slice.begin);
            });
  for (const OwnedSlice& slice : owned) {
    if (!fragment->owned.empty() &&
        fragment->owned.back().tensor == slice.tensor &&
        fragment->owned.back().slice.end == slice.slice.begin) {
      fragment->owned.back().slice.end = slice.slice.end;
    } else {
      fragment->owned.push_back({slice.tensor, slice.slice});
    }
  }
  const std::lock_guard<std::mutex> lock(attempt.mutex_);
  fragment->records = attempt.records_;
  std::sort(fragment->records.begin(), fragment->records.end(),
            [](const DeltaRecord& a, const DeltaRecord& b) {
              return std::tie(a.tensor, a.slice.begin) <
                     std::tie(b.tensor, b.slice.begin);
            });
  // Alone, nothing has to be on the disk before the commit record is.
  if (group_.alone()) return absl::OkStatus();
  KEDGE_RETURN_IF_ERROR(attempt.staging_->SealFiles(io_pool_));
  return SyncShared(*store_->fs(), group_, attempt.path_);
}

absl::Status StoreWriter::CommitFragments(
    std::span<const RankFragment> fragments, StagingDirectory& staging,
    const Metadata* metadata, StepOutcome* outcome) {
  const TensorTable& table = *state_.table;
  KEDGE_ASSIGN_OR_RETURN(StepManifest manifest,
                         MergeFragments(fragments, table, state_.l61));
  KEDGE_RETURN_IF_ERROR(CheckOthersFiles(*store_->fs(), staging.path(),
                                         manifest.files, group_.rank()));
  if (metadata != nullptr && *metadata != state_.metadata) {
    manifest.metadata_changed = true;
    manifest.metadata = *metadata;
  }
  KEDGE_RETURN_IF_ERROR(CommitStep(staging, manifest, table, outcome));
  for (const TensorState& tensor : manifest.states) {
    outcome->l61_tensors.push_back(tensor.tensor);
    outcome->l61_after.push_back(tensor.l61_after);
  }
  return absl::OkStatus();
}

absl::StatusOr<PublishResult> StoreWriter::PublishDelta(
    std::uint64_t step, TensorSource& old_source, TensorSource& new_source,
    const Metadata* metadata, const RecordSink& sink) {
  KEDGE_RETURN_IF_ERROR(CheckUsable());
  std::unique_ptr<DeltaAttempt> attempt = BeginDelta(step);
  std::vector<OwnedSlice> owned;
  absl::Status written = CheckMayPublish(step);
  attempt->checked_ = true;
  if (written.ok()) {
    auto encoded = Encode(*attempt, old_source, new_source, sink);
    if (encoded.ok()) {
      owned = *std::move(encoded);
    } else {
      written = FencedOr(encoded.status(), step);
    }
  }
  return CommitDelta(std::move(attempt), written, std::move(owned), metadata);
}

absl::StatusOr<PublishResult> StoreWriter::CommitDelta(
    std::unique_ptr<DeltaAttempt> attempt, const absl::Status& written,
    std::vector<OwnedSlice> owned, const Metadata* metadata) {
  KEDGE_RETURN_IF_ERROR(CheckUsable());
  const std::uint64_t step = attempt->step_;
  RankFragment fragment;
  absl::Status sealed = written;
  if (!attempt->checked_) {
    sealed = sealed.ok() ? CheckMayPublish(step) : FencedOr(sealed, step);
  }
  if (sealed.ok()) {
    sealed = FencedOr(SealDelta(*attempt, std::move(owned), &fragment), step);
  }
  const auto encoded = Clock::now();
  const auto commit = [&](std::span<const RankFragment> fragments,
                          StepOutcome* outcome) {
    const std::lock_guard<std::mutex> lock(attempt->mutex_);
    return FencedOr(
        CommitFragments(fragments, *attempt->staging_, metadata, outcome),
        step);
  };

  StepOutcome outcome;
  if (group_.alone()) {
    KEDGE_RETURN_IF_ERROR(sealed);
    KEDGE_RETURN_IF_ERROR(commit(std::span(&fragment, 1), &outcome));
  } else {
    const RankGroup::Piece mine = PieceOf(
        sealed, [&] { return SerializeRankFragment(fragment, *state_.table); });
    const Verdict verdict = group_.Agree(
        absl::StrCat("fragments of v", step), mine,
        [&](std::span<const std::vector<std::byte>> pieces) -> Verdict {
          auto fragments = ParseAll<RankFragment>(
              pieces, [](absl::string_view where, const auto& bytes) {
                return ParseRankFragment(where, bytes);
              });
          if (!fragments.ok()) return {fragments.status(), {}};
          const absl::Status status = commit(*fragments, &outcome);
          if (!status.ok()) return {status, {}, outcome_unknown_};
          return {status, SerializeStepOutcome(outcome)};
        },
        [&] { Abandon(std::move(attempt)); });
    KEDGE_RETURN_IF_ERROR(Take(verdict));
    RemoveDeadAgain();
    if (!group_.leads()) {
      auto heard =
          ParseStepOutcome("rank 0", verdict.payload, state_.table->size());
      if (!heard.ok()) {
        outcome_unknown_ = true;
        return heard.status();
      }
      outcome = *std::move(heard);
    }
  }
  Advance(outcome);
  PublishResult result = ResultOf(outcome);
  result.encode_seconds =
      std::chrono::duration<double>(encoded - attempt->start_).count();
  result.commit_seconds = SecondsSince(encoded);
  return result;
}

void StoreWriter::Abandon(std::unique_ptr<DeltaAttempt> attempt) {
  if (attempt == nullptr) return;
  attempt->Drop();
  if (!group_.alone() && group_.leads()) RemoveDead(attempt->path_);
}

struct StoreWriter::RootPart {
  Clock::time_point start;
  std::uint64_t attempt = 0;
  absl::Status planned;
  Place place;
  std::vector<OwnedSlice> owned;
  AnchorLayout layout;
  StagedRoot staged;
};

absl::StatusOr<const AnchorLayout*> StoreWriter::LayoutOf(
    std::vector<OwnedSlice> owned) {
  if (!layout_ || !SameSlices(owned, layout_owned_)) {
    layout_.reset();
    AnchorLayoutOptions layout_options;
    layout_options.anchor_file_bytes = options_.anchor_file_bytes;
    layout_options.rank = group_.rank();
    KEDGE_ASSIGN_OR_RETURN(layout_,
                           PlanAnchor(*state_.table, layout_options, owned));
    layout_owned_ = std::move(owned);
  }
  return &*layout_;
}

std::unique_ptr<StoreWriter::RootPart> StoreWriter::PlanRoot(
    std::uint64_t step, const TensorTable& table,
    std::vector<OwnedSlice> owned) {
  const std::uint64_t attempt = attempt_++;
  auto root = std::make_unique<RootPart>();
  root->start = Clock::now();
  root->place.fs = staging_fs_;
  root->place.pool = &io_pool_;
  root->place.staging = StagingPath(step, FileKind::kSegment, attempt);
  root->place.target = store_->StepPath(step);
  root->place.run = store_->info().run;
  root->place.epoch = epoch_;
  root->place.step = step;
  root->attempt = attempt;
  root->owned = std::move(owned);
  root->planned = [&]() -> absl::Status {
    AnchorLayoutOptions layout_options;
    layout_options.anchor_file_bytes = options_.anchor_file_bytes;
    layout_options.rank = group_.rank();
    KEDGE_ASSIGN_OR_RETURN(root->layout,
                           PlanAnchor(table, layout_options, root->owned));
    return absl::OkStatus();
  }();
  return root;
}

absl::StatusOr<PublishResult> StoreWriter::PublishRoot(
    std::uint64_t step, const TensorTable& table, TensorSource& source,
    const Metadata& metadata) {
  KEDGE_RETURN_IF_ERROR(CheckUsable());
  std::unique_ptr<RootPart> root =
      PlanRoot(step, table, OwnedOf(table, source));
  const absl::Status written = [&]() -> absl::Status {
    KEDGE_RETURN_IF_ERROR(CheckMayPublish(step));
    KEDGE_RETURN_IF_ERROR(root->planned);
    return StageRoot(root->place, table, &root->layout, source, summer_,
                     &root->staged);
  }();
  return CommitRootPart(std::move(root), written,
                        std::make_shared<const TensorTable>(table), metadata);
}

absl::StatusOr<PublishResult> StoreWriter::CommitRootPart(
    std::unique_ptr<RootPart> root, const absl::Status& written,
    std::shared_ptr<const TensorTable> shared_table, const Metadata& metadata) {
  const TensorTable& table = *shared_table;
  const std::uint64_t step = root->place.step;
  const std::string anchor_path =
      JoinPath(root->place.staging, kAnchorDirectoryName);
  absl::Status sealed = written;
  if (sealed.ok()) sealed = SyncShared(*store_->fs(), group_, anchor_path);
  const double anchor_seconds = SecondsSince(root->start);

  const auto commit_start = Clock::now();
  StepOutcome outcome;
  const auto commit = [&](std::span<const AnchorPart> parts) -> absl::Status {
    KEDGE_RETURN_IF_ERROR(CheckFileRanks(parts));
    KEDGE_ASSIGN_OR_RETURN(const AnchorPart whole,
                           MergeAnchorParts(parts, table));
    KEDGE_RETURN_IF_ERROR(CheckOthersFiles(*store_->fs(), anchor_path,
                                           whole.files, group_.rank()));
    KEDGE_RETURN_IF_ERROR(EnsureTable(
        *store_->fs(), store_->path(), table,
        JoinPath(store_->PathOf(kStagingDirectoryName),
                 absl::StrCat("table.", epoch_, ".", root->attempt))));
    StepManifest manifest;
    manifest.run = store_->info().run;
    manifest.epoch = epoch_;
    manifest.step = step;
    manifest.base = state_.id;
    manifest.metadata = metadata;
    std::vector<std::byte> manifest_bytes;
    KEDGE_RETURN_IF_ERROR(FinishRoot(root->place, table, whole, &root->staged,
                                     &manifest, &manifest_bytes,
                                     &outcome.anchor_bytes));
    KEDGE_RETURN_IF_ERROR(
        CommitStep(*root->staged.staging, manifest, table, &outcome));
    for (std::size_t i = 0; i < table.size(); ++i) {
      outcome.l61_tensors.push_back(i);
      outcome.l61_after.push_back(manifest.l61[i]);
    }
    return absl::OkStatus();
  };
  if (group_.alone()) {
    KEDGE_RETURN_IF_ERROR(sealed);
    KEDGE_RETURN_IF_ERROR(commit(std::span(&root->staged.part, 1)));
  } else {
    const RankGroup::Piece mine = PieceOf(
        sealed, [&] { return SerializeAnchorPart(root->staged.part, table); });
    const Verdict verdict = group_.Agree(
        absl::StrCat("root v", step), mine,
        [&](std::span<const std::vector<std::byte>> pieces) -> Verdict {
          auto parts = ParseAll<AnchorPart>(
              pieces, [&](absl::string_view where, const auto& bytes) {
                return ParseAnchorPart(where, bytes, table);
              });
          if (!parts.ok()) return {parts.status(), {}};
          const absl::Status status = commit(*parts);
          if (!status.ok()) return {status, {}, outcome_unknown_};
          return {status, SerializeStepOutcome(outcome)};
        },
        [&] {
          root->staged = StagedRoot();
          RemoveDead(root->place.staging);
        });
    KEDGE_RETURN_IF_ERROR(Take(verdict));
    RemoveDeadAgain();
    if (!group_.leads()) {
      auto heard = ParseStepOutcome("rank 0", verdict.payload, table.size());
      if (!heard.ok()) {
        outcome_unknown_ = true;
        return heard.status();
      }
      outcome = *std::move(heard);
    }
  }
  state_.table = std::move(shared_table);
  state_.l61.assign(state_.table->size(), 0);
  Advance(outcome);
  layout_ = std::move(root->layout);
  layout_owned_ = std::move(root->owned);
  PublishResult result = ResultOf(outcome);
  result.anchor_seconds = anchor_seconds;
  result.commit_seconds = SecondsSince(commit_start);
  return result;
}

StoreWriter::AnchorAttempt::~AnchorAttempt() = default;

std::unique_ptr<StoreWriter::AnchorAttempt> StoreWriter::BeginAnchor(
    std::uint64_t step, const std::vector<OwnedSlice>& owned, bool root) {
  auto attempt = std::unique_ptr<AnchorAttempt>(new AnchorAttempt);
  attempt->step_ = step;
  attempt->start_ = Clock::now();
  if (root) {
    attempt->root_ = PlanRoot(step, *state_.table, owned);
    attempt->path_ = attempt->root_->place.staging;
    attempt->status_ = attempt->root_->planned;
    if (attempt->status_.ok()) {
      attempt->status_ =
          OpenRoot(attempt->root_->place, *state_.table, attempt->root_->layout,
                   &attempt->root_->staged);
    }
    if (attempt->status_.ok()) {
      attempt->writer_ = attempt->root_->staged.anchor.get();
    }
    return attempt;
  }
  attempt->path_ = StagingPath(step, FileKind::kAnchor, attempt_++);
  attempt->status_ = [&]() -> absl::Status {
    KEDGE_ASSIGN_OR_RETURN(const AnchorLayout* const layout, LayoutOf(owned));
    KEDGE_ASSIGN_OR_RETURN(
        attempt->anchor_,
        AnchorWriter::Create(staging_fs_, attempt->path_, &io_pool_,
                             store_->info().run, step, state_.table.get(),
                             layout));
    attempt->writer_ = attempt->anchor_.get();
    return absl::OkStatus();
  }();
  return attempt;
}

absl::StatusOr<PublishResult> StoreWriter::CommitRoot(
    std::unique_ptr<AnchorAttempt> attempt, const absl::Status& written,
    const Metadata* metadata) {
  KEDGE_RETURN_IF_ERROR(CheckUsable());
  KEDGE_CHECK(attempt->root_ != nullptr);
  absl::Status sealed = written;
  if (sealed.ok()) sealed = attempt->status_;
  if (sealed.ok()) sealed = CheckMayPublish(attempt->step_);
  if (sealed.ok()) {
    auto part = attempt->writer_->Seal();
    sealed = part.status();
    if (part.ok()) attempt->root_->staged.part = *std::move(part);
  }
  return CommitRootPart(std::move(attempt->root_), sealed, state_.table,
                        metadata != nullptr ? *metadata : state_.metadata);
}

void StoreWriter::Abandon(std::unique_ptr<AnchorAttempt> attempt) {
  if (attempt == nullptr) return;
  const std::string path = attempt->path_;
  attempt.reset();
  if (!group_.alone() && group_.leads()) RemoveDead(path);
}

void StoreWriter::RemoveDead(const std::string& staging_path) {
  RemoveTree(*store_->fs(), staging_path).IgnoreError();
  dead_staging_.push_back(staging_path);
}

void StoreWriter::RemoveDeadAgain() {
  for (const std::string& path : dead_staging_) {
    RemoveTree(*store_->fs(), path).IgnoreError();
  }
  dead_staging_.clear();
}

absl::Status StoreWriter::AddAnchor(TensorSource& source,
                                    PublishResult* result) {
  KEDGE_RETURN_IF_ERROR(CheckUsable());
  std::unique_ptr<AnchorAttempt> attempt = BeginAnchor(
      state_.id.step, OwnedOf(*state_.table, source), /*root=*/false);
  absl::Status written = attempt->status();
  if (written.ok()) written = CheckNotFenced(state_.id.step + 1);
  if (written.ok()) written = attempt->writer()->WriteSlices(source, summer_);
  return CommitAnchor(std::move(attempt), written, result);
}

absl::Status StoreWriter::CommitAnchor(std::unique_ptr<AnchorAttempt> attempt,
                                       const absl::Status& written,
                                       PublishResult* result) {
  KEDGE_RETURN_IF_ERROR(CheckUsable());
  KEDGE_CHECK(attempt->root_ == nullptr);
  const TensorTable& table = *state_.table;
  const std::string& path = attempt->path_;
  AnchorWriter* const anchor = attempt->writer_;
  AnchorPart part;
  const absl::Status sealed = [&]() -> absl::Status {
    KEDGE_RETURN_IF_ERROR(written);
    KEDGE_RETURN_IF_ERROR(attempt->status_);
    if (attempt->step_ != state_.id.step) {
      return absl::FailedPreconditionError(
          absl::StrCat("anchor of v", attempt->step_, ": the version held is ",
                       ToString(state_.id)));
    }
    KEDGE_RETURN_IF_ERROR(CheckNotFenced(state_.id.step + 1));
    KEDGE_ASSIGN_OR_RETURN(part, anchor->Seal());
    return SyncShared(*store_->fs(), group_, path);
  }();
  const auto start = attempt->start_;
  std::uint64_t anchor_bytes = 0;
  bool unknown = false;
  const auto commit = [&](std::span<const AnchorPart> parts) -> absl::Status {
    KEDGE_RETURN_IF_ERROR(CheckFileRanks(parts));
    KEDGE_ASSIGN_OR_RETURN(const AnchorPart whole,
                           MergeAnchorParts(parts, table));
    for (std::uint32_t i = 0; i < table.size(); ++i) {
      if (whole.l61[i] == state_.l61[i]) continue;
      std::vector<std::vector<OwnedSlice>> owned;
      for (const AnchorPart& one : parts) owned.push_back(one.owned);
      const std::uint32_t owner =
          table[i].tied_to == kNotTied ? i : table[i].tied_to;
      return absl::FailedPreconditionError(absl::StrCat(
          "anchor of ", ToString(state_.id), ": ", table[i].name,
          HoldersText(owned, owner), ": L61: expected ", Hex64(state_.l61[i]),
          ", found ", Hex64(whole.l61[i]),
          "; the tensor was changed after the step was published; add the "
          "anchor before the next optimizer step"));
    }
    KEDGE_RETURN_IF_ERROR(
        CheckOthersFiles(*store_->fs(), path, whole.files, group_.rank()));
    KEDGE_RETURN_IF_ERROR(
        anchor->Commit(epoch_, state_.id, state_.metadata, whole));
    KEDGE_RETURN_IF_ERROR(CheckNotFenced(state_.id.step + 1));
    const std::string target = store_->AnchorPath(state_.id.step);
    const absl::Status published = anchor->staging().PublishAs(target, [&] {
      return HoldsCommit(*store_->fs(), target, anchor->commit_bytes());
    });
    unknown = anchor->staging().outcome_unknown();
    KEDGE_RETURN_IF_ERROR(published);
    if (const absl::Status& synced = anchor->staging().parent_sync_status();
        !synced.ok()) {
      result->warnings.push_back(
          absl::StrCat("the anchor of v", state_.id.step,
                       " is published, but may not outlive a power loss: ",
                       synced.message()));
    }
    anchor_bytes = anchor->total_bytes();
    return absl::OkStatus();
  };
  if (group_.alone()) {
    KEDGE_RETURN_IF_ERROR(sealed);
    KEDGE_RETURN_IF_ERROR(commit(std::span(&part, 1)));
  } else {
    const RankGroup::Piece mine =
        PieceOf(sealed, [&] { return SerializeAnchorPart(part, table); });
    const Verdict verdict = group_.Agree(
        absl::StrCat("anchor of ", ToString(state_.id)), mine,
        [&](std::span<const std::vector<std::byte>> pieces) -> Verdict {
          auto parts = ParseAll<AnchorPart>(
              pieces, [&](absl::string_view where, const auto& bytes) {
                return ParseAnchorPart(where, bytes, table);
              });
          if (!parts.ok()) return {parts.status(), {}};
          const absl::Status status = commit(*parts);
          if (!status.ok()) return {status, {}};
          WireWriter out;
          out.U64(anchor_bytes);
          return {status, out.Take()};
        },
        [&] {
          // Late renames must find it whole.
          if (unknown) return;
          Abandon(std::move(attempt));
        });
    KEDGE_RETURN_IF_ERROR(Take(verdict));
    RemoveDeadAgain();
    WireReader in(verdict.payload);
    anchor_bytes = in.U64();
  }
  result->anchor_bytes = anchor_bytes;
  result->anchor_seconds = SecondsSince(start);
  return absl::OkStatus();
}

void StoreWriter::Retain(PublishResult* result) {
  if (!options_.retention || !group_.leads() || outcome_unknown_) return;
  if (!retention_) retention_.emplace(*options_.retention);
  const auto report = retention_->Retain(*store_);
  if (!report.ok()) {
    result->warnings.push_back(
        absl::StrCat("retention: ", report.status().message()));
    return;
  }
  for (const std::string& warning : report->warnings) {
    result->warnings.push_back(absl::StrCat("retention: ", warning));
  }
}

}  // namespace kedge
