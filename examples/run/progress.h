#ifndef KEDGE_EXAMPLES_RUN_PROGRESS_H_
#define KEDGE_EXAMPLES_RUN_PROGRESS_H_

// How processes of one run wait for each other: every inference engine says in
// a small file which version it holds. kedge needs none of this; it is here so
// that a demo can promise that each engine has seen each version.

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace kedge::example {

// Calls `done` every few milliseconds until it returns true. An error of its
// ends the wait. kDeadlineExceeded says how long it waited and for `what`.
absl::Status WaitUntil(std::chrono::milliseconds timeout,
                       absl::string_view what,
                       const std::function<absl::StatusOr<bool>()>& done);

// Replaces the file `name` in `directory` by one that says `version`.
absl::Status WriteProgress(const std::string& directory,
                           const std::string& name, std::uint64_t version);

// The version that `name` wrote last; nothing if it has not started yet.
absl::StatusOr<std::optional<std::uint64_t>> ReadProgress(
    const std::string& directory, const std::string& name);

// An inference engine to wait for, once `from_version` is published.
struct AwaitedEngine {
  std::string name;
  std::uint64_t from_version = 0;
};

// "NAME" or "NAME@VERSION". kInvalidArgument.
absl::StatusOr<AwaitedEngine> ParseAwaitedEngine(absl::string_view text);

// Waits until every engine that is due at `version` holds it. The error names
// the engines that do not, and what they hold.
absl::Status WaitForEngines(std::chrono::milliseconds timeout,
                            const std::string& directory,
                            const std::vector<AwaitedEngine>& engines,
                            std::uint64_t version);

}  // namespace kedge::example

#endif  // KEDGE_EXAMPLES_RUN_PROGRESS_H_
