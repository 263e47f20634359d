#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kedge/engine/io/store.h"
#include "kedge/format/status.h"
#include "kedge/tools/checkpoint.h"
#include "kedge/tools/commands.h"
#include "kedge/tools/console.h"
#include "kedge/tools/version_sources.h"

namespace kedge {

absl::StatusOr<int> Run(const InitCommand& command) {
  KEDGE_ASSIGN_OR_RETURN(const Checkpoint checkpoint,
                         Checkpoint::Open(command.checkpoint));
  KEDGE_ASSIGN_OR_RETURN(const TensorTable table, TableOf(checkpoint));
  InitOptions init;
  KEDGE_ASSIGN_OR_RETURN(init.metadata, MetadataOf(checkpoint, {}));
  init.l61_seed = RandomSeed();
  const L61Summer summer(L61Key::FromSeed(*init.l61_seed));
  {
    Progress progress("v0", table.total_bytes(), !command.json);
    CheckpointSource source(
        &checkpoint, &table, &summer,
        [&progress](std::uint64_t bytes) { progress.Add(bytes); });
    const absl::Status made =
        InitStore(ToolWriterOptions(command.store, table), init, table, source);
    if (!made.ok()) return made;
  }

  KEDGE_ASSIGN_OR_RETURN(const auto store,
                         Store::Open(PosixFileSystem(), command.store));
  KEDGE_ASSIGN_OR_RETURN(const auto step, store->ReadStep(0));
  KEDGE_ASSIGN_OR_RETURN(const auto anchor, store->ReadAnchor(step->id));
  std::uint64_t anchor_bytes = anchor->manifest_bytes + kCommitBytes;
  for (const DataFile& file : anchor->manifest.files) {
    anchor_bytes += file.bytes;
  }
  if (command.json) {
    Json json;
    json["command"] = "init";
    json["store"] = command.store;
    json["checkpoint"] = command.checkpoint;
    json["run_id"] = ToHex(store->info().run);
    json["step"] = 0;
    json["manifest_hash"] = ToHex(step->id.manifest_hash);
    json["tensors"] = table.size();
    json["model_bytes"] = table.total_bytes();
    json["checkpoint_files"] = checkpoint.files().size();
    json["anchor_bytes"] = anchor_bytes;
    json["unused_files"] = Json::array();
    for (const std::string& name : checkpoint.unused_files()) {
      json["unused_files"].push_back(name);
    }
    json["other_files"] = Json::array();
    for (const std::string& name : checkpoint.other_files()) {
      json["other_files"].push_back(name);
    }
    KEDGE_RETURN_IF_ERROR(PrintJson(json));
    return kExitOk;
  }
  std::string text = absl::StrCat(
      command.store, ": ", ToString(step->id), "\n  run      ",
      ToHex(store->info().run), "\n  tensors  ", HumanCount(table.size()), ", ",
      HumanBytes(table.total_bytes()), " in ",
      Counted(checkpoint.files().size(), "file"), "\n  anchor   ",
      HumanBytes(anchor_bytes), "\n");
  for (const std::string& name : checkpoint.unused_files()) {
    absl::StrAppend(&text, "  not used: ", name, ", which the index of ",
                    command.checkpoint, " does not name\n");
  }
  if (const auto others = checkpoint.other_files(); !others.empty()) {
    absl::StrAppend(&text, "  not kept: ", absl::StrJoin(others, ", "),
                    "; a store holds tensors: copy these to what `kedge "
                    "materialize` writes\n");
  }
  KEDGE_RETURN_IF_ERROR(Print(Printable(text)));
  return kExitOk;
}

}  // namespace kedge
