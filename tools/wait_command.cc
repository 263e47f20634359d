#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "kedge/engine/io/store.h"
#include "kedge/format/status.h"
#include "kedge/tools/commands.h"
#include "kedge/tools/console.h"

namespace kedge {
namespace {

using Clock = std::chrono::steady_clock;

// HEAD is opened this often: one small request to the storage.
constexpr std::chrono::milliseconds kHeadInterval{100};
// The directory is the truth, and costs more.
constexpr std::chrono::milliseconds kDirectoryInterval{3000};

// Errors that may go away by themselves.
bool MayPass(const absl::Status& status) {
  return absl::IsNotFound(status) || absl::IsUnavailable(status) ||
         absl::IsResourceExhausted(status);
}

// Looks for a file that may come, below directories that may come. Never asks
// for a name that its directory does not list: a client of a network file
// system remembers for up to a minute that a name was not there.
class Appearance {
 public:
  explicit Appearance(absl::string_view path)
      : at_(!path.empty() && path.front() == '/' ? "/" : ".") {
    for (const absl::string_view part :
         absl::StrSplit(path, '/', absl::SkipEmpty())) {
      if (part != ".") left_.emplace_back(part);
    }
    std::reverse(left_.begin(), left_.end());
  }

  // Whether it is there now.
  absl::StatusOr<bool> Look() {
    FileSystem& fs = *PosixFileSystem();
    while (!left_.empty()) {
      const std::string next = JoinPath(at_, left_.back());
      // ".." is in no list.
      if (left_.back() != "..") {
        const auto names = fs.List(at_);
        // A directory that may be passed and not listed.
        const bool there =
            absl::IsPermissionDenied(names.status())
                ? fs.Stat(next).ok()
                : names.ok() && std::find(names->begin(), names->end(),
                                          left_.back()) != names->end();
        if (!there) {
          if (!names.ok() && !MayPass(names.status()) &&
              !absl::IsPermissionDenied(names.status())) {
            return names.status();
          }
          return false;
        }
      }
      at_ = next;
      left_.pop_back();
    }
    return true;
  }

  // The directory that is there, and what is missing in it.
  std::string Missing() const {
    return absl::StrCat(at_, " has no \"", left_.empty() ? "" : left_.back(),
                        "\" yet");
  }

 private:
  std::string at_;
  std::vector<std::string> left_;  // last one first
};

// Looks at a store, and remembers why what it found was not enough.
class Watch {
 public:
  explicit Watch(const WaitCommand& command)
      : command_(command),
        store_file_(JoinPath(command.store, kStoreFileName)) {}

  // The version waited for, or nothing yet.
  absl::StatusOr<std::optional<VersionId>> Look(Clock::time_point now) {
    if (store_ == nullptr) {
      KEDGE_ASSIGN_OR_RETURN(const bool there, store_file_.Look());
      if (!there) {
        why_ = store_file_.Missing();
        return std::nullopt;
      }
      auto store = Store::Open(PosixFileSystem(), command_.store);
      if (!store.ok()) return Later(store.status());
      store_ = *std::move(store);
    }
    const absl::StatusOr<Head> head = store_->ReadHead();
    const bool due = !next_directory_look_ || now >= *next_directory_look_;
    if (head.ok() && head->step < command_.step && !due) {
      why_ = absl::StrCat("HEAD says ",
                          ToString(VersionId{head->step, head->manifest_hash}));
      return std::nullopt;
    }
    if (head.ok() && head->step >= command_.step) {
      const auto step = store_->ReadStep(head->step);
      if (step.ok() && (*step)->id.manifest_hash == head->manifest_hash) {
        return (*step)->id;
      }
    }
    if (!due) return std::nullopt;
    next_directory_look_ = now + kDirectoryInterval;
    const auto newest = store_->Newest();
    if (!newest.ok()) return Later(newest.status());
    newest_ = (*newest)->id;
    why_ = absl::StrCat("the newest valid version is ", ToString(*newest_));
    if (newest_->step >= command_.step) return newest_;
    return std::nullopt;
  }

  // A last look at the directory, whenever the last one was.
  absl::StatusOr<std::optional<VersionId>> LookOnceMore() {
    next_directory_look_.reset();
    return Look(Clock::now());
  }

  const std::string& why() const { return why_; }
  const std::optional<VersionId>& newest() const { return newest_; }

 private:
  absl::StatusOr<std::optional<VersionId>> Later(const absl::Status& status) {
    if (!MayPass(status)) return status;
    why_ = std::string(status.message());
    return std::nullopt;
  }

  const WaitCommand& command_;
  Appearance store_file_;
  std::unique_ptr<Store> store_;
  std::optional<Clock::time_point> next_directory_look_;
  std::optional<VersionId> newest_;
  std::string why_;
};

Json JsonOf(const std::optional<VersionId>& version) {
  if (!version) return nullptr;
  return {{"step", version->step},
          {"manifest_hash", ToHex(version->manifest_hash)}};
}

}  // namespace

absl::StatusOr<int> Run(const WaitCommand& command) {
  const auto start = Clock::now();
  const auto deadline = start + std::chrono::seconds(command.timeout_seconds);
  Watch watch(command);
  std::optional<VersionId> found;
  while (true) {
    KEDGE_ASSIGN_OR_RETURN(found, watch.Look(Clock::now()));
    const auto now = Clock::now();
    if (found || now >= deadline) break;
    std::this_thread::sleep_for(
        std::min<Clock::duration>(kHeadInterval, deadline - now));
  }
  if (!found) {
    KEDGE_ASSIGN_OR_RETURN(found, watch.LookOnceMore());
  }
  const double seconds =
      std::chrono::duration<double>(Clock::now() - start).count();
  if (command.json) {
    Json json;
    json["command"] = "wait";
    json["store"] = command.store;
    json["step"] = command.step;
    json["timeout_seconds"] = command.timeout_seconds;
    json["waited_seconds"] = seconds;
    json["version"] = JsonOf(found);
    json["newest"] = JsonOf(found ? found : watch.newest());
    KEDGE_RETURN_IF_ERROR(PrintJson(json));
  } else if (found) {
    KEDGE_RETURN_IF_ERROR(Print(absl::StrCat(ToString(*found), "\n")));
  }
  if (found) return kExitOk;
  PrintError(absl::DeadlineExceededError(absl::StrFormat(
      "%s: waited %.1f s for a valid version of step %d or above; %s; see "
      "whether the trainer still publishes, or wait longer",
      command.store, seconds, command.step, watch.why())));
  return kExitTimeout;
}

}  // namespace kedge
