#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kedge/reader/fsck.h"

namespace kedge {
namespace {

constexpr std::size_t kMostAnchorsShown = 16;

std::string Counted(std::uint64_t count, absl::string_view one) {
  return absl::StrCat(count, " ", one, count == 1 ? "" : "s");
}

std::string ChainText(const FsckChain& chain) {
  const std::uint64_t first = chain.versions.front();
  const std::uint64_t last = chain.versions.back();
  std::string text = absl::StrCat("chain v", first);
  if (last != first) absl::StrAppend(&text, " to v", last);
  absl::StrAppend(&text, ", ", Counted(chain.versions.size(), "version"), ": ");
  if (chain.external_v0) {
    absl::StrAppend(&text, "join with v0 that engines boot with");
    if (!chain.anchors.empty()) absl::StrAppend(&text, ", or ");
  }
  if (chain.anchors.empty()) {
    if (!chain.external_v0) absl::StrAppend(&text, "no sound anchor");
    return text;
  }
  // The newest are those that joins use.
  std::vector<std::uint64_t> shown = chain.anchors;
  const bool more = shown.size() > kMostAnchorsShown;
  if (more) {
    shown.erase(shown.begin(), shown.end() - kMostAnchorsShown);
  }
  absl::StrAppend(
      &text, "join from ", shown.size() == 1 ? "anchor " : "anchors ",
      more ? "..., " : "",
      absl::StrJoin(shown, ", ", [](std::string* out, std::uint64_t step) {
        absl::StrAppend(out, "v", step);
      }));
  return text;
}

FsckField Text(absl::string_view name, absl::string_view text) {
  FsckField field;
  field.name = std::string(name);
  field.kind = FsckField::Kind::kText;
  field.text = std::string(text);
  return field;
}

FsckField Number(absl::string_view name, std::uint64_t number) {
  FsckField field;
  field.name = std::string(name);
  field.kind = FsckField::Kind::kNumber;
  field.number = number;
  return field;
}

FsckField Bool(absl::string_view name, bool value) {
  FsckField field = Number(name, value ? 1 : 0);
  field.kind = FsckField::Kind::kBool;
  return field;
}

FsckField Null(absl::string_view name) {
  FsckField field;
  field.name = std::string(name);
  return field;
}

FsckField Nested(absl::string_view name, FsckField::Kind kind) {
  FsckField field;
  field.name = std::string(name);
  field.kind = kind;
  return field;
}

FsckField Version(absl::string_view name,
                  const std::optional<VersionId>& version) {
  if (!version) return Null(name);
  FsckField field = Nested(name, FsckField::Kind::kObject);
  field.members = {Number("step", version->step),
                   Text("manifest_hash", ToHex(version->manifest_hash))};
  return field;
}

FsckField Steps(absl::string_view name, const std::vector<std::uint64_t>& all) {
  FsckField field = Nested(name, FsckField::Kind::kList);
  for (const std::uint64_t step : all)
    field.members.push_back(Number("", step));
  return field;
}

}  // namespace

bool FsckChain::Joins(std::uint64_t version) const {
  if (!std::binary_search(versions.begin(), versions.end(), version)) {
    return false;
  }
  return external_v0 || (!anchors.empty() && anchors.front() <= version);
}

int FsckExitCode(const absl::StatusOr<FsckReport>& report) {
  if (!report.ok()) return 8;
  return report->clean() ? 0 : 4;
}

std::string FormatFinding(const Finding& finding) {
  return absl::StrCat(
      SeverityName(finding.severity), " ", finding.id, " ", finding.file,
      finding.offset ? absl::StrCat(":", *finding.offset) : std::string(), ": ",
      finding.message, "; ", finding.advice);
}

std::string FormatFsckReport(const FsckReport& report) {
  std::string text;
  for (const Finding& finding : report.findings) {
    absl::StrAppend(&text, FormatFinding(finding), "\n");
  }
  const std::uint64_t count =
      report.error_count + report.warning_count + report.info_count;
  if (count > report.findings.size()) {
    absl::StrAppend(&text, "... and ",
                    Counted(count - report.findings.size(), "more finding"),
                    "\n");
  }
  absl::StrAppend(&text, "checked ", Counted(report.steps_checked, "step"),
                  ", ", Counted(report.anchors_checked, "anchor"), ", ",
                  Counted(report.records_checked, "record"), ", ",
                  Counted(report.bytes_checked, "byte"),
                  report.deep ? " (every byte)" : " (no data bytes)", "\n");
  for (const FsckChain& chain : report.chains) {
    absl::StrAppend(&text, ChainText(chain), "\n");
  }
  const auto version = [](const std::optional<VersionId>& id) {
    return id ? ToString(*id) : std::string("none");
  };
  absl::StrAppend(&text, "newest version ", version(report.newest),
                  ", newest to join ", version(report.newest_joinable), "\n");
  absl::StrAppend(&text, report.clean() ? "clean: " : "not clean: ",
                  Counted(report.error_count, "error"), ", ",
                  Counted(report.warning_count, "warning"), ", ",
                  report.info_count, " info\n");
  return text;
}

FsckField FsckReportFields(const FsckReport& report) {
  FsckField object = Nested("", FsckField::Kind::kObject);
  std::vector<FsckField>& members = object.members;
  members.push_back(Bool("clean", report.clean()));
  members.push_back(Bool("deep", report.deep));
  members.push_back(Number("errors", report.error_count));
  members.push_back(Number("warnings", report.warning_count));
  members.push_back(Number("infos", report.info_count));
  members.push_back(Number("steps_checked", report.steps_checked));
  members.push_back(Number("anchors_checked", report.anchors_checked));
  members.push_back(Number("records_checked", report.records_checked));
  members.push_back(Number("bytes_checked", report.bytes_checked));
  members.push_back(Number("milliseconds",
                           static_cast<std::uint64_t>(report.seconds * 1000)));
  members.push_back(Version("newest", report.newest));
  members.push_back(Version("newest_joinable", report.newest_joinable));
  FsckField chains = Nested("chains", FsckField::Kind::kList);
  for (const FsckChain& chain : report.chains) {
    FsckField field = Nested("", FsckField::Kind::kObject);
    field.members = {Steps("versions", chain.versions),
                     Steps("anchors", chain.anchors),
                     Bool("external_v0", chain.external_v0)};
    chains.members.push_back(std::move(field));
  }
  members.push_back(std::move(chains));
  FsckField findings = Nested("findings", FsckField::Kind::kList);
  for (const Finding& finding : report.findings) {
    FsckField field = Nested("", FsckField::Kind::kObject);
    field.members = {
        Text("id", finding.id),
        Text("severity", SeverityName(finding.severity)),
        Text("file", finding.file),
        finding.offset ? Number("offset", *finding.offset) : Null("offset"),
        Text("message", finding.message),
        Text("advice", finding.advice)};
    findings.members.push_back(std::move(field));
  }
  members.push_back(std::move(findings));
  return object;
}

}  // namespace kedge
