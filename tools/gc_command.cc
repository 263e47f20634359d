#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kedge/format/status.h"
#include "kedge/tools/commands.h"
#include "kedge/tools/console.h"
#include "kedge/writer/retention.h"

namespace kedge {

absl::StatusOr<int> Run(const GcCommand& command) {
  GcOptions options;
  options.store_path = command.store;
  options.keep_anchors = command.keep_anchors;
  options.grace = std::chrono::seconds(command.grace_seconds);
  options.dry_run = command.dry_run;
  KEDGE_ASSIGN_OR_RETURN(const GcReport report, CollectGarbage(options));
  if (command.json) {
    Json json;
    json["command"] = "gc";
    json["store"] = command.store;
    json["dry_run"] = command.dry_run;
    json["keep_anchors"] = command.keep_anchors;
    json["grace_seconds"] = command.grace_seconds;
    json["oldest_kept_step"] = report.oldest_kept_step;
    json["moved_steps"] = report.moved_steps;
    json["removed_epochs"] = report.removed_epochs;
    json["removed_staging"] = report.removed_staging;
    json["deleted_trash"] = report.deleted_trash;
    KEDGE_RETURN_IF_ERROR(PrintJson(json));
    return kExitOk;
  }
  const absl::string_view would = command.dry_run ? "would be " : "";
  std::string text = absl::StrCat(
      command.store, ": v", report.oldest_kept_step, " and later ",
      command.dry_run ? "would stay" : "stay", "\n  steps ", would,
      "moved to .trash: ",
      report.moved_steps.empty()
          ? "none"
          : absl::StrCat("v", absl::StrJoin(report.moved_steps, ", v")),
      "\n  entries of .trash ", would, "deleted: ",
      report.deleted_trash.empty() ? "none"
                                   : absl::StrJoin(report.deleted_trash, ", "),
      "\n");
  if (!report.removed_staging.empty()) {
    absl::StrAppend(&text, "  leftovers in .staging ", would,
                    "removed: ", absl::StrJoin(report.removed_staging, ", "),
                    "\n");
  }
  if (!report.removed_epochs.empty()) {
    absl::StrAppend(&text, "  epochs ", would,
                    "removed: ", absl::StrJoin(report.removed_epochs, ", "),
                    "\n");
  }
  KEDGE_RETURN_IF_ERROR(Print(Printable(text)));
  return kExitOk;
}

}  // namespace kedge
