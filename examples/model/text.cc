#include "kedge/examples/model/text.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <numbers>
#include <system_error>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace kedge::example {
namespace {

constexpr char kDefaultFolder[] = "/usr/share/common-licenses";
constexpr std::int64_t kMaxTextBytes = std::int64_t{1} << 30;

absl::Status TooShort(std::int64_t found, std::int64_t expected,
                      absl::string_view part) {
  return absl::InvalidArgumentError(absl::StrCat(
      "text: the ", part, " part has ", found, " bytes, expected at least ",
      expected, " for one window; use a longer text or a smaller context"));
}

}  // namespace

std::uint64_t Random::Bits() {
  // splitmix64: Steele, Lea and Flood, "Fast splittable pseudorandom number
  // generators", OOPSLA 2014.
  state_ += 0x9e3779b97f4a7c15u;
  std::uint64_t z = state_;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

std::uint64_t Random::Below(std::uint64_t bound) {
  // The bias is below bound / 2^64, nothing for choosing windows.
  return Bits() % bound;
}

double Random::Uniform() {
  return (static_cast<double>(Bits() >> 11) + 0.5) * 0x1.0p-53;
}

double Random::Normal() {
  // Box and Muller; the second value is dropped for simplicity.
  const double radius = std::sqrt(-2.0 * std::log(Uniform()));
  return radius * std::cos(2.0 * std::numbers::pi * Uniform());
}

std::vector<std::string> Text::DefaultPaths() {
  std::vector<std::string> paths;
  std::error_code error;
  for (std::filesystem::directory_iterator entry(kDefaultFolder, error), end;
       !error && entry != end; entry.increment(error)) {
    // The links name the same texts again.
    std::error_code ignored;
    if (!entry->is_symlink(ignored) && entry->is_regular_file(ignored)) {
      paths.push_back(entry->path().string());
    }
  }
  std::sort(paths.begin(), paths.end());
  return paths;
}

absl::StatusOr<Text> Text::Load(const std::vector<std::string>& paths) {
  if (paths.empty()) {
    return absl::NotFoundError(absl::StrCat("text: no file given and none in ",
                                            kDefaultFolder, "; name one"));
  }
  std::string bytes;
  for (const std::string& path : paths) {
    std::error_code error;
    const auto size = std::filesystem::file_size(path, error);
    if (error) {
      return absl::NotFoundError(absl::StrCat(
          path, ": cannot be read: ", error.message(), "; name another text"));
    }
    if (size > static_cast<std::uintmax_t>(kMaxTextBytes) - bytes.size()) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, ": all texts together: expected at most ",
                       kMaxTextBytes, " bytes; name fewer"));
    }
    std::ifstream file(path, std::ios::binary);
    const std::size_t before = bytes.size();
    bytes.resize(before + size);
    file.read(bytes.data() + before, static_cast<std::streamsize>(size));
    if (!file || file.gcount() != static_cast<std::streamsize>(size)) {
      return absl::NotFoundError(absl::StrCat(
          path, ": read ", file.gcount(), " of ", size,
          " bytes: ", std::strerror(errno), "; name another text"));
    }
  }
  return Text(std::move(bytes));
}

Text::Text(std::string bytes)
    : bytes_(std::move(bytes)), training_bytes_(size_bytes() / 10 * 9) {}

void Text::Cut(std::int64_t at, Batch& batch) const {
  const auto begin = bytes_.begin() + at;
  std::copy(begin, begin + batch.tokens, std::back_inserter(batch.inputs));
  std::copy(begin + 1, begin + 1 + batch.tokens,
            std::back_inserter(batch.targets));
}

absl::StatusOr<Batch> Text::TrainingBatch(int sequences, int tokens,
                                          std::uint64_t seed,
                                          std::int64_t step) const {
  const std::int64_t choices = training_bytes_ - tokens;
  if (choices <= 0) return TooShort(training_bytes_, tokens + 1, "training");
  Batch batch{.sequences = sequences, .tokens = tokens};
  Random mix(seed);
  Random random(mix.Bits() ^ static_cast<std::uint64_t>(step));
  for (int i = 0; i < sequences; ++i) {
    Cut(static_cast<std::int64_t>(
            random.Below(static_cast<std::uint64_t>(choices))),
        batch);
  }
  return batch;
}

absl::StatusOr<Batch> Text::EvaluationBatch(int sequences, int tokens) const {
  const std::int64_t last = size_bytes() - training_bytes_ - tokens - 1;
  if (last < 0) {
    return TooShort(size_bytes() - training_bytes_, tokens + 1, "evaluation");
  }
  Batch batch{.sequences = sequences, .tokens = tokens};
  for (int i = 0; i < sequences; ++i) {
    Cut(training_bytes_ + last * i / std::max(1, sequences - 1), batch);
  }
  return batch;
}

}  // namespace kedge::example
