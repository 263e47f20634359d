#include "kedge/examples/run/progress.h"

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <thread>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kedge/format/status.h"

namespace kedge::example {
namespace {

constexpr std::chrono::milliseconds kPoll{5};

std::string PathOf(const std::string& directory, const std::string& name) {
  return absl::StrCat(directory, "/", name);
}

}  // namespace

absl::Status WaitUntil(std::chrono::milliseconds timeout,
                       absl::string_view what,
                       const std::function<absl::StatusOr<bool>()>& done) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  while (true) {
    KEDGE_ASSIGN_OR_RETURN(const bool is_done, done());
    if (is_done) return absl::OkStatus();
    if (std::chrono::steady_clock::now() >= deadline) {
      return absl::DeadlineExceededError(
          absl::StrCat("waited ", timeout.count(), " ms for ", what));
    }
    std::this_thread::sleep_for(kPoll);
  }
}

absl::Status WriteProgress(const std::string& directory,
                           const std::string& name, std::uint64_t version) {
  const std::string path = PathOf(directory, name);
  const std::string staging = absl::StrCat(path, ".new");
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  std::ofstream file(staging, std::ios::trunc);
  file << version << '\n';
  file.close();
  if (!file) {
    return absl::UnavailableError(
        absl::StrCat(staging, ": cannot be written: ", std::strerror(errno)));
  }
  std::filesystem::rename(staging, path, error);
  if (error) {
    return absl::UnavailableError(
        absl::StrCat(path, ": cannot be replaced: ", error.message()));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::optional<std::uint64_t>> ReadProgress(
    const std::string& directory, const std::string& name) {
  const std::string path = PathOf(directory, name);
  std::ifstream file(path);
  if (!file) return std::optional<std::uint64_t>();
  std::string line;
  std::uint64_t version = 0;
  if (!std::getline(file, line) || !absl::SimpleAtoi(line, &version)) {
    return DataLoss({.where = path,
                     .what = "progress",
                     .expected = "the number of a version",
                     .found = line});
  }
  return std::optional<std::uint64_t>(version);
}

absl::StatusOr<AwaitedEngine> ParseAwaitedEngine(absl::string_view text) {
  const std::size_t at = text.find('@');
  AwaitedEngine engine{.name = std::string(text.substr(0, at))};
  const bool number_ok =
      at == absl::string_view::npos ||
      absl::SimpleAtoi(text.substr(at + 1), &engine.from_version);
  if (engine.name.empty() || !number_ok ||
      engine.name.find('/') != std::string::npos) {
    return absl::InvalidArgumentError(absl::StrCat(
        "engine to wait for: expected NAME or NAME@VERSION, found ", text));
  }
  return engine;
}

absl::Status WaitForEngines(std::chrono::milliseconds timeout,
                            const std::string& directory,
                            const std::vector<AwaitedEngine>& engines,
                            std::uint64_t version) {
  std::vector<std::string> missing;
  const absl::Status status = WaitUntil(
      timeout, absl::StrCat("inference engines to hold v", version),
      [&]() -> absl::StatusOr<bool> {
        missing.clear();
        for (const AwaitedEngine& engine : engines) {
          if (engine.from_version > version) continue;
          KEDGE_ASSIGN_OR_RETURN(const std::optional<std::uint64_t> held,
                                 ReadProgress(directory, engine.name));
          if (held && *held >= version) continue;
          missing.push_back(absl::StrCat(
              engine.name, " (",
              held ? absl::StrCat("holds v", *held) : "not started", ")"));
        }
        return missing.empty();
      });
  if (!absl::IsDeadlineExceeded(status)) return status;
  return absl::DeadlineExceededError(absl::StrCat(
      status.message(), "; missing: ", absl::StrJoin(missing, ", "),
      "; look into their logs"));
}

}  // namespace kedge::example
