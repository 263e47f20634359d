#include "absl/strings/str_cat.h"
#include "kedge/format/status.h"
#include "kedge/reader/fsck.h"
#include "kedge/tools/commands.h"
#include "kedge/tools/console.h"

namespace kedge {
namespace {

Json JsonOf(const FsckField& field) {
  switch (field.kind) {
    case FsckField::Kind::kText:
      return field.text;
    case FsckField::Kind::kNumber:
      return field.number;
    case FsckField::Kind::kBool:
      return field.number != 0;
    case FsckField::Kind::kNull:
      return nullptr;
    case FsckField::Kind::kList: {
      Json list = Json::array();
      for (const FsckField& member : field.members) {
        list.push_back(JsonOf(member));
      }
      return list;
    }
    case FsckField::Kind::kObject: {
      Json object = Json::object();
      for (const FsckField& member : field.members) {
        object[member.name] = JsonOf(member);
      }
      return object;
    }
  }
  return nullptr;
}

}  // namespace

absl::StatusOr<int> Run(const FsckCommand& command) {
  FsckOptions options;
  options.store_path = command.store;
  options.deep = command.deep;
  options.lease_ttl = std::chrono::seconds(command.lease_ttl_seconds);
  std::unique_ptr<Progress> progress;
  std::uint64_t shown = 0;
  options.progress = [&](std::uint64_t done, std::uint64_t total) {
    if (progress == nullptr) {
      progress = std::make_unique<Progress>("fsck", total, !command.json);
    }
    if (done > shown) {
      progress->Add(done - shown);
      shown = done;
    }
  };
  const absl::StatusOr<FsckReport> report = Fsck(options);
  progress.reset();
  const int exit_status = FsckExitCode(report);
  if (!report.ok()) {
    // main() cannot know that this one is not status 1.
    PrintError(report.status());
    return exit_status;
  }
  if (command.json) {
    Json json;
    json["command"] = "fsck";
    json["store"] = command.store;
    json["exit_status"] = exit_status;
    json["report"] = JsonOf(FsckReportFields(*report));
    KEDGE_RETURN_IF_ERROR(PrintJson(json));
  } else {
    KEDGE_RETURN_IF_ERROR(Print(Printable(FormatFsckReport(*report))));
  }
  return exit_status;
}

}  // namespace kedge
