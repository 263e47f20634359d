#include "kedge/examples/run/report.h"

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace kedge::example {

absl::StatusOr<std::unique_ptr<Report>> Report::Create(
    const std::string& path) {
  std::unique_ptr<Report> report(new Report(path));
  if (path.empty()) return report;
  report->file_.open(path, std::ios::trunc);
  if (!report->file_) {
    return absl::UnavailableError(
        absl::StrCat(path, ": cannot be created: ", std::strerror(errno),
                     "; give --report a path in a directory that exists"));
  }
  return report;
}

absl::Status Report::Append(const Json& line) {
  if (path_.empty()) return absl::OkStatus();
  file_ << line.dump() << '\n';
  file_.flush();
  if (file_) return absl::OkStatus();
  return absl::UnavailableError(
      absl::StrCat(path_, ": cannot be written: ", std::strerror(errno)));
}

}  // namespace kedge::example
