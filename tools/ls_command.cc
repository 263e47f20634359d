#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kedge/engine/io/store.h"
#include "kedge/format/status.h"
#include "kedge/tools/commands.h"
#include "kedge/tools/console.h"

namespace kedge {
namespace {

struct Row {
  std::uint64_t step = 0;
  absl::Status why_invalid;
  // The rest of a valid step only.
  VersionId id;
  VersionId base;
  StepKind kind = StepKind::kDelta;
  std::uint32_t epoch = 0;
  std::uint64_t nnz = 0;
  std::uint64_t units = 0;
  std::uint64_t bytes = 0;
  std::int64_t unix_seconds = 0;
  std::optional<std::uint64_t> anchor_bytes;
  absl::Status why_no_anchor;  // one is there, and is damaged
};

std::uint64_t BytesOf(const std::vector<DataFile>& files,
                      std::uint64_t manifest_bytes) {
  std::uint64_t bytes = manifest_bytes + kCommitBytes;
  for (const DataFile& file : files) bytes += file.bytes;
  return bytes;
}

Row RowOf(const Store& store, std::uint64_t step) {
  Row row;
  row.step = step;
  const auto read = store.ReadStep(step);
  if (!read.ok()) {
    row.why_invalid = read.status();
    return row;
  }
  const PublishedStep& published = **read;
  const StepManifest& manifest = published.manifest;
  row.id = published.id;
  row.base = manifest.base;
  row.kind = manifest.kind;
  row.epoch = manifest.epoch;
  for (const DeltaRecord& record : manifest.records) row.nnz += record.nnz;
  row.units = UnitCount(*published.table);
  row.bytes = BytesOf(manifest.files, published.manifest_bytes);
  if (const auto info =
          store.fs()->Stat(JoinPath(published.path, kCommitFileName));
      info.ok()) {
    row.unix_seconds = info->modified_ns / 1'000'000'000;
  }
  const auto anchor = store.ReadAnchor(published.id);
  if (anchor.ok()) {
    row.anchor_bytes =
        BytesOf((*anchor)->manifest.files, (*anchor)->manifest_bytes);
  } else if (!absl::IsNotFound(anchor.status())) {
    row.why_no_anchor = anchor.status();
  }
  return row;
}

std::string Note(const Row& row) {
  if (!row.why_invalid.ok()) {
    return absl::StrCat("not valid: ", row.why_invalid.message());
  }
  if (!row.why_no_anchor.ok()) {
    return absl::StrCat("anchor not valid: ", row.why_no_anchor.message());
  }
  return "";
}

double BitsPerChange(const Row& row) {
  return 8.0 * static_cast<double>(row.bytes) / static_cast<double>(row.nnz);
}

Json JsonOf(const Row& row) {
  Json json;
  json["step"] = row.step;
  json["valid"] = row.why_invalid.ok();
  if (!row.why_invalid.ok()) {
    json["why"] = std::string(row.why_invalid.message());
    return json;
  }
  json["manifest_hash"] = ToHex(row.id.manifest_hash);
  json["kind"] = row.kind == StepKind::kRoot ? "root" : "delta";
  json["base_step"] = nullptr;
  json["base_manifest_hash"] = nullptr;
  if (!row.base.manifest_hash.IsZero()) {
    json["base_step"] = row.base.step;
    json["base_manifest_hash"] = ToHex(row.base.manifest_hash);
  }
  json["epoch"] = row.epoch;
  json["nnz"] = row.nnz;
  json["units"] = row.units;
  json["bytes"] = row.bytes;
  json["bits_per_changed_element"] = nullptr;
  if (row.nnz > 0) json["bits_per_changed_element"] = BitsPerChange(row);
  json["anchor_bytes"] = nullptr;
  if (row.anchor_bytes) json["anchor_bytes"] = *row.anchor_bytes;
  json["anchor_error"] = nullptr;
  if (!row.why_no_anchor.ok()) {
    json["anchor_error"] = std::string(row.why_no_anchor.message());
  }
  json["committed_unix_seconds"] = row.unix_seconds;
  return json;
}

}  // namespace

absl::StatusOr<int> Run(const LsCommand& command) {
  KEDGE_ASSIGN_OR_RETURN(const auto store,
                         Store::Open(PosixFileSystem(), command.store));
  KEDGE_ASSIGN_OR_RETURN(const std::vector<std::uint64_t> steps,
                         store->ListSteps());
  std::vector<Row> rows;
  std::map<std::uint64_t, VersionId> valid;
  for (const std::uint64_t step : steps) {
    Row row = RowOf(*store, step);
    if (row.why_invalid.ok()) {
      // A delta on a version that is not the one here leads nowhere.
      const auto base = valid.find(row.base.step);
      if (row.kind == StepKind::kDelta && base != valid.end() &&
          base->second != row.base) {
        row.why_invalid = DataLoss(
            {.where = store->StepPath(step),
             .what = "base",
             .expected = ToString(base->second),
             .found = ToString(row.base),
             .advice =
                 "it was published on another version; run `kedge fsck`"});
      } else {
        valid.emplace(step, row.id);
      }
    }
    rows.push_back(std::move(row));
  }
  const absl::StatusOr<Head> head = store->ReadHead();

  if (command.json) {
    Json json;
    json["command"] = "ls";
    json["store"] = command.store;
    json["run_id"] = ToHex(store->info().run);
    json["head"] = nullptr;
    json["head_error"] = nullptr;
    if (head.ok()) {
      json["head"] = {{"step", head->step},
                      {"manifest_hash", ToHex(head->manifest_hash)},
                      {"epoch", head->epoch}};
    } else {
      json["head_error"] = std::string(head.status().message());
    }
    json["steps"] = Json::array();
    for (const Row& row : rows) json["steps"].push_back(JsonOf(row));
    KEDGE_RETURN_IF_ERROR(PrintJson(json));
    return kExitOk;
  }

  using Align = TextTable::Align;
  TextTable table({{"STEP", Align::kRight},
                   {"KIND"},
                   {"BASE", Align::kRight},
                   {"EPOCH", Align::kRight},
                   {"CHANGED", Align::kRight},
                   {"DENSITY", Align::kRight},
                   {"BYTES", Align::kRight},
                   {"BITS/CHANGE", Align::kRight},
                   {"ANCHOR", Align::kRight},
                   {"COMMITTED"},
                   {"NOTE"}});
  for (const Row& row : rows) {
    const std::string step = absl::StrCat("v", row.step);
    if (!row.why_invalid.ok()) {
      table.Add({step, "-", "-", "-", "-", "-", "-", "-", "-", "-", Note(row)});
      continue;
    }
    const bool delta = row.kind == StepKind::kDelta;
    table.Add({step, delta ? "delta" : "root",
               row.base.manifest_hash.IsZero()
                   ? "-"
                   : absl::StrCat("v", row.base.step),
               absl::StrCat(row.epoch), delta ? HumanCount(row.nnz) : "-",
               delta ? Percent(static_cast<double>(row.nnz),
                               static_cast<double>(row.units))
                     : "-",
               HumanBytes(row.bytes),
               row.nnz > 0 ? absl::StrFormat("%.2f", BitsPerChange(row)) : "-",
               row.anchor_bytes ? HumanBytes(*row.anchor_bytes) : "-",
               UtcTime(row.unix_seconds), Note(row)});
  }
  const std::string text = absl::StrCat(
      command.store, ": run ", ToHex(store->info().run), "\nHEAD: ",
      head.ok()
          ? absl::StrCat(ToString(VersionId{head->step, head->manifest_hash}),
                         ", epoch ", head->epoch)
          : std::string(head.status().message()),
      "\n");
  KEDGE_RETURN_IF_ERROR(Print(Printable(text) + table.Text()));
  return kExitOk;
}

}  // namespace kedge
