#ifndef KEDGE_EXAMPLES_RUN_REPORT_H_
#define KEDGE_EXAMPLES_RUN_REPORT_H_

// What a process of a run tells about it: one JSON object a line.

#include <fstream>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"

namespace kedge::example {

// Members in the order in which they were set.
using Json = nlohmann::ordered_json;

// Thread safety: none.
class Report {
 public:
  // Replaces the file. An empty path makes a report that keeps nothing.
  static absl::StatusOr<std::unique_ptr<Report>> Create(
      const std::string& path);

  // Appends a line, visible to others when this returns.
  absl::Status Append(const Json& line);

 private:
  explicit Report(std::string path) : path_(std::move(path)) {}

  std::string path_;
  std::ofstream file_;
};

}  // namespace kedge::example

#endif  // KEDGE_EXAMPLES_RUN_REPORT_H_
