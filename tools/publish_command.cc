#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "kedge/engine/io/store.h"
#include "kedge/format/limits.h"
#include "kedge/format/status.h"
#include "kedge/reader/version_reader.h"
#include "kedge/tools/checkpoint.h"
#include "kedge/tools/commands.h"
#include "kedge/tools/console.h"
#include "kedge/tools/version_sources.h"

namespace kedge {
namespace {

using StepPtr = std::shared_ptr<const PublishedStep>;

// What the step is published on, and what that takes out of the store.
struct Base {
  StepPtr step;
  std::vector<std::uint64_t> superseded;  // step directories above it
};

// The newest valid step below the one to publish. Refuses, unless `resume`, if
// something that readers may hold would be lost.
absl::StatusOr<Base> FindBase(const Store& store, std::uint64_t step,
                              bool resume) {
  KEDGE_ASSIGN_OR_RETURN(const std::vector<std::uint64_t> steps,
                         store.ListSteps());
  Base base;
  for (auto at = steps.rbegin(); at != steps.rend() && !base.step; ++at) {
    auto found = store.ReadStep(*at);
    if (found.ok() && *at < step) {
      base.step = *std::move(found);
      break;
    }
    base.superseded.push_back(*at);
    if (found.ok()) {
      if (resume) continue;
      return absl::FailedPreconditionError(absl::StrCat(
          store.path(), ": step: expected above v", *at,
          ", the newest version, found ", step,
          "; give a higher step, or --resume to go on from below v", step,
          ", which moves v", step, " and what follows to .trash"));
    }
    // No COMMIT, or of a fenced writer: readers do not know it.
    if (absl::IsNotFound(found.status()) ||
        absl::IsFailedPrecondition(found.status()) ||
        (resume && absl::IsDataLoss(found.status()))) {
      continue;
    }
    if (!absl::IsDataLoss(found.status())) return found.status();
    return absl::Status(
        found.status().code(),
        absl::StrCat(found.status().message(), "; publishing v", step,
                     " would move the damaged v", *at,
                     ", which readers may hold, to .trash: repair it, or give "
                     "--resume to go on without it"));
  }
  std::reverse(base.superseded.begin(), base.superseded.end());
  if (base.step) return base;
  return absl::NotFoundError(absl::StrCat(store.path(),
                                          ": no valid step below v", step,
                                          " to publish on; run `kedge fsck`"));
}

struct Published {
  PublishResult result;
  VersionId base;
  std::uint32_t epoch = 0;
  std::uint64_t units = 0;  // of the table: what nnz is out of
  bool root = false;
  bool metadata_changed = false;
  std::vector<std::uint64_t> superseded;
};

absl::Status PrintPublished(const PublishCommand& command,
                            const Published& published) {
  const PublishResult& result = published.result;
  if (command.json) {
    Json json;
    json["command"] = "publish";
    json["store"] = command.store;
    json["checkpoint"] = command.checkpoint;
    json["step"] = result.version.step;
    json["manifest_hash"] = ToHex(result.version.manifest_hash);
    json["kind"] = published.root ? "root" : "delta";
    json["base_step"] = published.base.step;
    json["base_manifest_hash"] = ToHex(published.base.manifest_hash);
    json["epoch"] = published.epoch;
    json["units"] = published.units;
    json["nnz"] = result.nnz;
    json["records"] = result.records;
    json["bytes"] = result.bytes;
    json["manifest_bytes"] = result.manifest_bytes;
    json["bits_per_changed_element"] = nullptr;
    if (result.nnz > 0) {
      json["bits_per_changed_element"] = 8.0 *
                                         static_cast<double>(result.bytes) /
                                         static_cast<double>(result.nnz);
    }
    json["anchor_bytes"] = result.anchor_bytes;
    json["anchor_error"] = nullptr;
    if (!result.anchor_status.ok()) {
      json["anchor_error"] = std::string(result.anchor_status.message());
    }
    json["metadata_changed"] = published.metadata_changed;
    json["moved_to_trash"] = published.superseded;
    json["warnings"] = result.warnings;
    json["encode_seconds"] = result.encode_seconds;
    json["commit_seconds"] = result.commit_seconds;
    json["anchor_seconds"] = result.anchor_seconds;
    return PrintJson(json);
  }
  std::string text = absl::StrCat(command.store, ": ", ToString(result.version),
                                  " on ", ToString(published.base), "\n");
  if (published.root) {
    absl::StrAppend(&text, "  root     no delta; ", HumanBytes(result.bytes),
                    " beside the anchor\n");
  } else {
    absl::StrAppend(
        &text, "  delta    ", HumanBytes(result.bytes), ", ",
        HumanCount(result.nnz), " of ", HumanCount(published.units),
        " elements changed (",
        Percent(static_cast<double>(result.nnz),
                static_cast<double>(published.units)),
        result.nnz == 0
            ? ")"
            : absl::StrFormat(", %.2f bits each)",
                              8.0 * static_cast<double>(result.bytes) /
                                  static_cast<double>(result.nnz)),
        "\n");
  }
  if (result.anchor_bytes > 0) {
    absl::StrAppend(&text, "  anchor   ", HumanBytes(result.anchor_bytes),
                    "\n");
  }
  absl::StrAppend(&text, "  time     ",
                  HumanSeconds(result.encode_seconds + result.commit_seconds +
                               result.anchor_seconds),
                  ", thereof commit ", HumanSeconds(result.commit_seconds),
                  "\n");
  if (!published.superseded.empty()) {
    absl::StrAppend(&text, "  moved to .trash: v",
                    absl::StrJoin(published.superseded, ", v"), "\n");
  }
  for (const std::string& warning : result.warnings) {
    absl::StrAppend(&text, "  warning: ", warning, "\n");
  }
  return Print(Printable(text));
}

// What was published is what was read. Proven from both sides before the
// commit but for the encoder between them, which this would find.
absl::Status CheckPublished(const StoreWriter& writer,
                            const SumsInFlight& read) {
  for (std::uint32_t i = 0; i < writer.table().size(); ++i) {
    if (writer.l61()[i] == read.Of(i)) continue;
    return DataLoss(
        {.where = absl::StrCat(ToString(writer.held()), ": ",
                               writer.table()[i].name),
         .what = "L61",
         .expected = absl::StrCat(Hex64(read.Of(i)), " as in the checkpoint"),
         .found = Hex64(writer.l61()[i]),
         .advice = "the published step is wrong, a bug in kedge: publish it "
                   "again with --resume --replace-model, and report this"});
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<int> Run(const PublishCommand& command) {
  // All that can be refused is refused before the writer opens: from then on
  // every other writer of the store is fenced.
  KEDGE_ASSIGN_OR_RETURN(const auto store,
                         Store::Open(PosixFileSystem(), command.store));
  KEDGE_ASSIGN_OR_RETURN(const Base base,
                         FindBase(*store, command.step, command.resume));
  KEDGE_ASSIGN_OR_RETURN(const Checkpoint checkpoint,
                         Checkpoint::Open(command.checkpoint));
  KEDGE_ASSIGN_OR_RETURN(const VersionState state, store->StateAt(base.step));
  KEDGE_ASSIGN_OR_RETURN(const Metadata metadata,
                         MetadataOf(checkpoint, state.metadata));
  const L61Summer summer(L61Key::FromSeed(store->info().l61_seed));

  Published published;
  published.base = base.step->id;
  published.superseded = base.superseded;
  published.root = command.replace_model;
  published.metadata_changed = published.root || metadata != state.metadata;
  std::shared_ptr<const TensorTable> table = state.table;
  std::unique_ptr<VersionReader> reader;
  if (published.root) {
    KEDGE_ASSIGN_OR_RETURN(TensorTable own, TableOf(checkpoint));
    table = std::make_shared<const TensorTable>(std::move(own));
  } else {
    KEDGE_RETURN_IF_ERROR(
        CheckSameModel(checkpoint, *table, ToString(base.step->id)));
    auto opened =
        VersionReader::Open(store.get(), base.step, kVersionCacheBytes);
    if (!opened.ok()) {
      return absl::Status(
          opened.status().code(),
          absl::StrCat(opened.status().message(), "; v", command.step,
                       " cannot be a delta on ", ToString(base.step->id),
                       ": give --resume to publish on an earlier version, or "
                       "--replace-model to publish a root step"));
    }
    reader = *std::move(opened);
  }
  published.units = UnitCount(*table);

  // Without --resume nothing newer may be moved away, also not what another
  // writer has published since: then the writer opens on that, and is refused.
  std::optional<std::uint64_t> resume_step;
  if (command.resume) resume_step = base.step->id.step;
  KEDGE_ASSIGN_OR_RETURN(
      const auto writer,
      StoreWriter::Open(ToolWriterOptions(command.store, *table), resume_step));
  if (writer->held() != base.step->id) {
    return absl::UnavailableError(absl::StrCat(
        command.store, ": newest version: expected ", ToString(base.step->id),
        ", found ", ToString(writer->held()),
        ", which another writer published just now; stop that writer, or "
        "publish on its step"));
  }
  published.epoch = writer->epoch();

  const std::string label = absl::StrCat("v", command.step);
  {
    Progress progress(label, table->total_bytes(), !command.json);
    CheckpointSource source(
        &checkpoint, table.get(), &summer,
        [&progress](std::uint64_t bytes) { progress.Add(bytes); });
    absl::StatusOr<PublishResult> result;
    if (published.root) {
      result = writer->PublishRoot(command.step, *table, source, metadata);
    } else {
      VersionSource old_source(reader.get(), &summer);
      result =
          writer->PublishDelta(command.step, old_source, source, &metadata);
    }
    if (!result.ok()) {
      return Annotate(result.status(),
                      absl::StrCat("v", command.step, " is not published"));
    }
    published.result = *std::move(result);
    KEDGE_RETURN_IF_ERROR(CheckPublished(*writer, source.sums()));
  }
  reader.reset();  // its memory goes before the anchor needs some
  if (command.anchor && !published.root) {
    Progress progress(absl::StrCat(label, " anchor"), table->total_bytes(),
                      !command.json);
    CheckpointSource source(
        &checkpoint, table.get(), &summer,
        [&progress](std::uint64_t bytes) { progress.Add(bytes); });
    published.result.anchor_status =
        writer->AddAnchor(source, &published.result);
  }
  KEDGE_RETURN_IF_ERROR(PrintPublished(command, published));
  if (!published.result.anchor_status.ok()) {
    return Annotate(
        published.result.anchor_status,
        absl::StrCat("v", command.step,
                     " is published, its anchor is not (publish a later step "
                     "with --anchor)"));
  }
  return kExitOk;
}

}  // namespace kedge
