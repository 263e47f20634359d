#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kedge/engine/io/store.h"
#include "kedge/format/status.h"
#include "kedge/tools/commands.h"
#include "kedge/tools/console.h"

namespace kedge {
namespace {

std::string CodecName(Codec codec) {
  switch (codec) {
    case Codec::kR2:
      return "r2";
    default:
      return absl::StrCat("codec ", static_cast<int>(codec));
  }
}

// `base`'s checksums where the step has none of its own.
struct Sums {
  std::uint64_t before = 0;
  std::uint64_t after = 0;
  bool has_before = false;  // a root has none
};

std::string ShapeText(const TensorSpec& spec) {
  return absl::StrCat("[", absl::StrJoin(spec.shape, ", "), "]");
}

Json JsonOf(const DataFile& file) {
  return {{"name", DataFileName(file.id)},
          {"bytes", file.bytes},
          {"hash", ToHex(file.hash)},
          {"pieces", file.piece_hashes.size()}};
}

Json JsonOf(const DeltaRecord& record, const StepManifest& manifest) {
  return {{"begin", record.slice.begin},
          {"end", record.slice.end},
          {"file", DataFileName(manifest.files[record.file].id)},
          {"offset", record.offset},
          {"bytes", record.bytes},
          {"codec", CodecName(record.codec)},
          {"nnz", record.nnz},
          {"l61", Hex64(record.l61)}};
}

absl::Status ShowTensor(const ShowCommand& command, const Store& store,
                        const std::shared_ptr<const PublishedStep>& step) {
  const TensorTable& table = *step->table;
  const StepManifest& manifest = step->manifest;
  const auto ordinal = table.Find(*command.tensor);
  if (!ordinal.ok()) {
    return absl::NotFoundError(absl::StrCat(
        step->path, ": tensor: expected one of the ", table.size(),
        " in its table, found no \"", *command.tensor, "\"; `kedge show ",
        command.store, " ", command.step, " --json` lists what changed"));
  }
  const TensorSpec& spec = table[*ordinal];
  const std::uint32_t owner =
      spec.tied_to == kNotTied ? *ordinal : spec.tied_to;
  KEDGE_ASSIGN_OR_RETURN(const VersionState state, store.StateAt(step));
  Sums sums;
  sums.after = state.l61[*ordinal];
  sums.has_before = manifest.kind == StepKind::kDelta;
  sums.before = sums.after;
  for (const TensorState& tensor : manifest.states) {
    if (tensor.tensor == *ordinal) sums.before = tensor.l61_before;
  }
  std::vector<const DeltaRecord*> records;
  for (const DeltaRecord& record : manifest.records) {
    if (record.tensor == owner) records.push_back(&record);
  }

  if (command.json) {
    Json json;
    json["command"] = "show";
    json["store"] = command.store;
    json["step"] = command.step;
    json["manifest_hash"] = ToHex(step->id.manifest_hash);
    json["tensor"] = spec.name;
    json["ordinal"] = *ordinal;
    json["dtype"] = std::string(DTypeName(spec.dtype));
    json["shape"] = spec.shape;
    json["bytes"] = spec.byte_count();
    json["tied_to"] = nullptr;
    if (spec.tied_to != kNotTied) json["tied_to"] = table[owner].name;
    json["l61_before"] = nullptr;
    if (sums.has_before) json["l61_before"] = Hex64(sums.before);
    json["l61_after"] = Hex64(sums.after);
    json["records"] = Json::array();
    for (const DeltaRecord* record : records) {
      json["records"].push_back(JsonOf(*record, manifest));
    }
    return PrintJson(json);
  }
  std::string text = absl::StrCat(
      step->path, ": ", spec.name, "\n  dtype       ",
      std::string(DTypeName(spec.dtype)), " ", ShapeText(spec), ", ",
      HumanBytes(spec.byte_count()), "\n  ordinal     ", *ordinal, "\n");
  if (spec.tied_to != kNotTied) {
    absl::StrAppend(&text, "  tied to     ", table[owner].name, "\n");
  }
  absl::StrAppend(&text, "  S before    ",
                  sums.has_before ? Hex64(sums.before) : "-",
                  "\n  S after     ", Hex64(sums.after), "\n  records     ",
                  records.size(), "\n");
  text = Printable(text);
  if (!records.empty()) {
    using Align = TextTable::Align;
    TextTable rows({{"BEGIN", Align::kRight},
                    {"END", Align::kRight},
                    {"FILE"},
                    {"OFFSET", Align::kRight},
                    {"BYTES", Align::kRight},
                    {"CODEC"},
                    {"CHANGED", Align::kRight},
                    {"L61"}});
    for (const DeltaRecord* record : records) {
      rows.Add({absl::StrCat(record->slice.begin),
                absl::StrCat(record->slice.end),
                DataFileName(manifest.files[record->file].id),
                absl::StrCat(record->offset), absl::StrCat(record->bytes),
                CodecName(record->codec), absl::StrCat(record->nnz),
                Hex64(record->l61)});
    }
    text += rows.Text();
  }
  return Print(text);
}

// What a step did to one tensor.
struct TensorChange {
  std::uint32_t tensor = 0;
  std::uint64_t nnz = 0;
  std::uint64_t bytes = 0;
  std::uint64_t records = 0;
};

}  // namespace

absl::StatusOr<int> Run(const ShowCommand& command) {
  KEDGE_ASSIGN_OR_RETURN(const auto store,
                         Store::Open(PosixFileSystem(), command.store));
  KEDGE_ASSIGN_OR_RETURN(const auto step, FindStep(*store, command.step));
  if (command.tensor) {
    KEDGE_RETURN_IF_ERROR(ShowTensor(command, *store, step));
    return kExitOk;
  }
  const StepManifest& manifest = step->manifest;
  const TensorTable& table = *step->table;
  const absl::StatusOr<std::unique_ptr<PublishedAnchor>> anchor =
      store->ReadAnchor(step->id);
  const bool root = manifest.kind == StepKind::kRoot;
  const bool has_base = !manifest.base.manifest_hash.IsZero();

  if (command.json) {
    Json json;
    json["command"] = "show";
    json["store"] = command.store;
    json["step"] = command.step;
    json["manifest_hash"] = ToHex(step->id.manifest_hash);
    json["run_id"] = ToHex(manifest.run);
    json["kind"] = root ? "root" : "delta";
    json["epoch"] = manifest.epoch;
    json["base_step"] = nullptr;
    json["base_manifest_hash"] = nullptr;
    json["digest_before"] = nullptr;
    if (has_base) {
      json["base_step"] = manifest.base.step;
      json["base_manifest_hash"] = ToHex(manifest.base.manifest_hash);
    }
    if (!root) json["digest_before"] = ToHex(manifest.digest_before);
    json["digest_after"] = ToHex(manifest.digest_after);
    json["table"] = TensorTableFileName(manifest.table_hash);
    json["tensors"] = table.size();
    json["units"] = UnitCount(table);
    json["manifest_bytes"] = step->manifest_bytes;
    json["files"] = Json::array();
    for (const DataFile& file : manifest.files) {
      json["files"].push_back(JsonOf(file));
    }
    json["states"] = Json::array();
    for (const TensorState& state : manifest.states) {
      json["states"].push_back({{"tensor", table[state.tensor].name},
                                {"l61_before", Hex64(state.l61_before)},
                                {"l61_after", Hex64(state.l61_after)}});
    }
    for (std::size_t i = 0; i < manifest.l61.size(); ++i) {
      json["states"].push_back({{"tensor", table[i].name},
                                {"l61_before", nullptr},
                                {"l61_after", Hex64(manifest.l61[i])}});
    }
    json["records"] = Json::array();
    for (const DeltaRecord& record : manifest.records) {
      Json row = {{"tensor", table[record.tensor].name}};
      row.update(JsonOf(record, manifest));
      json["records"].push_back(std::move(row));
    }
    json["metadata_changed"] = manifest.metadata_changed;
    json["metadata"] = Json::object();
    for (const auto& [key, value] : manifest.metadata) {
      json["metadata"][key] = value;
    }
    json["anchor"] = nullptr;
    json["anchor_error"] = nullptr;
    if (anchor.ok()) {
      const AnchorManifest& held = (*anchor)->manifest;
      Json inner;
      inner["epoch"] = held.epoch;
      inner["digest"] = ToHex(held.digest);
      inner["slices"] = held.slices.size();
      inner["manifest_bytes"] = (*anchor)->manifest_bytes;
      inner["files"] = Json::array();
      for (const DataFile& file : held.files) {
        inner["files"].push_back(JsonOf(file));
      }
      json["anchor"] = std::move(inner);
    } else if (!absl::IsNotFound(anchor.status())) {
      json["anchor_error"] = std::string(anchor.status().message());
    }
    KEDGE_RETURN_IF_ERROR(PrintJson(json));
    return kExitOk;
  }

  using Align = TextTable::Align;
  std::string text = absl::StrCat(
      step->path, ": ", root ? "root" : "delta", "\n  version        ",
      ToString(step->id), "\n  manifest       ", ToHex(step->id.manifest_hash),
      ", ", HumanBytes(step->manifest_bytes), "\n  run            ",
      ToHex(manifest.run), "\n  epoch          ", manifest.epoch,
      "\n  base           ", has_base ? ToString(manifest.base) : "none",
      "\n  digest before  ", root ? "-" : ToHex(manifest.digest_before),
      "\n  digest after   ", ToHex(manifest.digest_after),
      "\n  table          ", TensorTableFileName(manifest.table_hash), ", ",
      Counted(table.size(), "tensor"), ", ", HumanBytes(table.total_bytes()),
      "\n  records        ", manifest.records.size(), "\n  metadata       ",
      manifest.metadata_changed
          ? absl::StrCat(manifest.metadata.size(),
                         manifest.metadata.size() == 1 ? " entry" : " entries")
          : "as in the base",
      "\n");
  for (const auto& [key, value] : manifest.metadata) {
    absl::StrAppend(&text, "    ", key, ": ", HumanBytes(value.size()), "\n");
  }
  if (anchor.ok()) {
    absl::StrAppend(&text, "  anchor         epoch ", (*anchor)->manifest.epoch,
                    ", ", Counted((*anchor)->manifest.slices.size(), "slice"),
                    " in ", Counted((*anchor)->manifest.files.size(), "file"),
                    "\n");
  } else {
    absl::StrAppend(&text, "  anchor         ",
                    absl::IsNotFound(anchor.status())
                        ? "none"
                        : std::string(anchor.status().message()),
                    "\n");
  }
  text = Printable(text);

  TextTable files({{"FILE"},
                   {"BYTES", Align::kRight},
                   {"PIECES", Align::kRight},
                   {"XXH3-128 OF PIECES"}});
  const auto add_files = [&files](const std::vector<DataFile>& list,
                                  absl::string_view prefix) {
    for (const DataFile& file : list) {
      files.Add({absl::StrCat(prefix, DataFileName(file.id)),
                 absl::StrCat(file.bytes),
                 absl::StrCat(file.piece_hashes.size()), ToHex(file.hash)});
    }
  };
  add_files(manifest.files, "");
  if (anchor.ok()) add_files((*anchor)->manifest.files, "anchor/");
  text += "\n" + files.Text();

  if (!root) {
    std::vector<TensorChange>
        changes;  // ascending by ordinal, as the records are
    for (const DeltaRecord& record : manifest.records) {
      if (changes.empty() || changes.back().tensor != record.tensor) {
        changes.push_back({record.tensor});
      }
      changes.back().nnz += record.nnz;
      changes.back().bytes += record.bytes;
      ++changes.back().records;
    }
    TextTable rows({{"TENSOR"},
                    {"DTYPE"},
                    {"SHAPE"},
                    {"CHANGED", Align::kRight},
                    {"DENSITY", Align::kRight},
                    {"BYTES", Align::kRight},
                    {"RECORDS", Align::kRight},
                    {"S BEFORE"},
                    {"S AFTER"}});
    for (const TensorState& state : manifest.states) {
      const TensorSpec& spec = table[state.tensor];
      const std::uint32_t owner =
          spec.tied_to == kNotTied ? state.tensor : spec.tied_to;
      const auto change = std::lower_bound(
          changes.begin(), changes.end(), owner,
          [](const TensorChange& candidate, std::uint32_t tensor) {
            return candidate.tensor < tensor;
          });
      const TensorChange none{owner};
      const TensorChange& found =
          change != changes.end() && change->tensor == owner ? *change : none;
      rows.Add({spec.name, std::string(DTypeName(spec.dtype)), ShapeText(spec),
                HumanCount(found.nnz),
                Percent(static_cast<double>(found.nnz),
                        static_cast<double>(spec.unit_count())),
                HumanBytes(found.bytes), absl::StrCat(found.records),
                Hex64(state.l61_before), Hex64(state.l61_after)});
    }
    text += "\n" + rows.Text();
  } else {
    TextTable rows({{"TENSOR"}, {"DTYPE"}, {"SHAPE"}, {"S"}});
    for (std::size_t i = 0; i < table.size(); ++i) {
      rows.Add({table[i].name, std::string(DTypeName(table[i].dtype)),
                ShapeText(table[i]), Hex64(manifest.l61[i])});
    }
    text += "\n" + rows.Text();
  }
  KEDGE_RETURN_IF_ERROR(Print(text));
  return kExitOk;
}

}  // namespace kedge
