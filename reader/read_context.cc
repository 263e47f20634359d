#include "kedge/reader/read_context.h"

#include <algorithm>
#include <thread>

#include "absl/strings/str_cat.h"

namespace kedge {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kFirstBackoff{1};
constexpr std::chrono::milliseconds kLongestBackoff{500};

// Lists the directories from the store down to the one that holds `path`: NFS
// and others answer for a remembered missing name until its directory is read.
void RefreshDirectories(const ReadContext& context, absl::string_view path) {
  const std::string& root = context.store->path();
  std::string directory = ParentPath(path);
  for (int depth = 0; depth < 3 && directory.size() >= root.size(); ++depth) {
    context.fs().List(directory).status().IgnoreError();
    directory = ParentPath(directory);
  }
}

bool WasPruned(const ReadContext& context, std::uint64_t step) {
  const auto head = context.store->ReadHead();
  if (!head.ok() || head->step <= step) return false;
  return absl::IsNotFound(
      context.fs().Stat(context.store->StepPath(step)).status());
}

}  // namespace

absl::Status RetryReads(const ReadContext& context, std::uint64_t step,
                        absl::string_view path, bool published,
                        const std::function<absl::Status()>& attempt) {
  const Clock::time_point start = Clock::now();
  const Clock::time_point deadline = start + context.retry_deadline;
  std::chrono::milliseconds backoff = kFirstBackoff;
  while (true) {
    const absl::Status status = attempt();
    const bool may_recover =
        absl::IsUnavailable(status) || (published && absl::IsNotFound(status));
    if (!may_recover) return status;
    if (published && WasPruned(context, step)) {
      return absl::NotFoundError(absl::StrCat(
          context.store->StepPath(step),
          ": pruned: retention removed this step while it was being read, and "
          "HEAD has moved on; update again to take a newer version"));
    }
    const Clock::time_point now = Clock::now();
    if (now >= deadline) {
      return absl::UnavailableError(absl::StrCat(
          path, ": waited ",
          std::chrono::duration_cast<std::chrono::milliseconds>(now - start)
              .count(),
          " ms for it to become readable; last: ", status.message(),
          "; check the storage, then try again"));
    }
    std::this_thread::sleep_for(
        std::min<Clock::duration>(backoff, deadline - now));
    backoff = std::min(backoff * 2, kLongestBackoff);
    RefreshDirectories(context, path);
  }
}

}  // namespace kedge
