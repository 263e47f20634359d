#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kedge/format/status.h"
#include "kedge/tools/commands.h"
#include "kedge/tools/console.h"
#include "kedge/writer/retention.h"

namespace kedge {
namespace {

Json JsonOf(const GcLease& lease) {
  Json json;
  json["reader"] = lease.name;
  json["state"] = std::string(LeaseStateName(lease.state));
  json["pins"] = lease.pins;
  json["age_seconds"] = lease.age_seconds;
  json["oldest_step"] = nullptr;
  json["held_step"] = nullptr;
  json["held_manifest_hash"] = nullptr;
  if (lease.info) {
    json["oldest_step"] = lease.info->oldest_step;
    if (lease.info->held) {
      json["held_step"] = lease.info->held->step;
      json["held_manifest_hash"] = ToHex(lease.info->held->manifest_hash);
    }
  }
  json["problem"] = nullptr;
  if (!lease.problem.empty()) json["problem"] = lease.problem;
  return json;
}

std::string Steps(const std::vector<std::uint64_t>& steps) {
  if (steps.empty()) return "none";
  return absl::StrCat("v", absl::StrJoin(steps, ", v"));
}

}  // namespace

absl::StatusOr<int> Run(const GcCommand& command) {
  GcOptions options;
  options.store_path = command.store;
  options.keep_anchors = command.keep_anchors;
  options.grace = std::chrono::seconds(command.grace_seconds);
  options.lease_ttl = std::chrono::seconds(command.lease_ttl_seconds);
  options.dry_run = command.dry_run;
  KEDGE_ASSIGN_OR_RETURN(const GcReport report, CollectGarbage(options));
  if (command.json) {
    Json json;
    json["command"] = "gc";
    json["store"] = command.store;
    json["dry_run"] = command.dry_run;
    json["keep_anchors"] = command.keep_anchors;
    json["grace_seconds"] = command.grace_seconds;
    json["lease_ttl_seconds"] = command.lease_ttl_seconds;
    json["oldest_kept_step"] = report.oldest_kept_step;
    json["moved_steps"] = report.moved_steps;
    json["moved_anchors"] = report.moved_anchors;
    json["restored_steps"] = report.restored_steps;
    json["restored_anchors"] = report.restored_anchors;
    json["removed_epochs"] = report.removed_epochs;
    json["removed_staging"] = report.removed_staging;
    json["removed_leases"] = report.removed_leases;
    json["deleted_trash"] = report.deleted_trash;
    json["leases"] = Json::array();
    for (const GcLease& lease : report.leases) {
      json["leases"].push_back(JsonOf(lease));
    }
    json["warnings"] = report.warnings;
    KEDGE_RETURN_IF_ERROR(PrintJson(json));
    return kExitOk;
  }
  const absl::string_view would = command.dry_run ? "would be " : "";
  std::string text = absl::StrCat(
      command.store, ": v", report.oldest_kept_step, " and later ",
      command.dry_run ? "would stay" : "stay", "\n  steps ", would,
      "moved to .trash: ", Steps(report.moved_steps), "\n  entries of .trash ",
      would, "deleted: ",
      report.deleted_trash.empty() ? "none"
                                   : absl::StrJoin(report.deleted_trash, ", "),
      "\n");
  const auto also = [&](bool any, absl::string_view what,
                        const std::string& list) {
    if (any) absl::StrAppend(&text, "  ", what, list, "\n");
  };
  also(!report.moved_anchors.empty(),
       absl::StrCat("anchors ", would, "moved to .trash: "),
       Steps(report.moved_anchors));
  also(!report.restored_steps.empty(),
       "steps taken back from .trash: ", Steps(report.restored_steps));
  also(!report.restored_anchors.empty(),
       "anchors taken back from .trash: ", Steps(report.restored_anchors));
  also(!report.removed_staging.empty(),
       absl::StrCat("leftovers in .staging ", would, "removed: "),
       absl::StrJoin(report.removed_staging, ", "));
  also(!report.removed_epochs.empty(),
       absl::StrCat("epochs ", would, "removed: "),
       absl::StrJoin(report.removed_epochs, ", "));
  also(!report.removed_leases.empty(),
       absl::StrCat("leases ", would, "removed: "),
       absl::StrJoin(report.removed_leases, ", "));
  for (const GcLease& lease : report.leases) {
    if (!lease.pins) continue;
    absl::StrAppend(&text, "  pinned by lease ", lease.name, ": ",
                    lease.info ? DescribeLease(*lease.info)
                               : std::string("unreadable, so everything stays"),
                    ", ", LeaseStateName(lease.state), ", ", lease.age_seconds,
                    " s old\n");
  }
  for (const std::string& warning : report.warnings) {
    absl::StrAppend(&text, "  warning: ", warning, "\n");
  }
  KEDGE_RETURN_IF_ERROR(Print(Printable(text)));
  return kExitOk;
}

}  // namespace kedge
