#include "kedge/format/status.h"

#include <cstdio>
#include <cstdlib>

#include "absl/strings/cord.h"

namespace kedge {

std::string Describe(const Problem& problem) {
  std::string text;
  if (!problem.where.empty()) absl::StrAppend(&text, problem.where, ": ");
  absl::StrAppend(&text, problem.what);
  if (!problem.expected.empty()) {
    absl::StrAppend(&text, ": expected ", problem.expected);
  }
  if (!problem.found.empty()) {
    absl::StrAppend(&text, problem.expected.empty() ? ": found " : ", found ",
                    problem.found);
  }
  if (!problem.advice.empty()) absl::StrAppend(&text, "; ", problem.advice);
  return text;
}

absl::Status Annotate(const absl::Status& status, absl::string_view context) {
  if (status.ok()) return status;
  absl::Status annotated(status.code(),
                         absl::StrCat(context, ": ", status.message()));
  status.ForEachPayload([&](absl::string_view url, const absl::Cord& payload) {
    annotated.SetPayload(url, payload);
  });
  return annotated;
}

namespace internal {

void CheckFailed(const char* file, int line, const char* what) {
  std::fprintf(stderr, "%s:%d: KEDGE_CHECK failed: %s\n", file, line, what);
  std::abort();
}

}  // namespace internal
}  // namespace kedge
