#include "kedge/format/layout.h"

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "kedge/format/limits.h"

namespace kedge {
namespace {

// A number of exactly `digits` decimal digits (any count if 0, without leading
// zeros).
std::optional<std::uint64_t> ParseDigits(absl::string_view text,
                                         std::size_t digits) {
  if (text.empty() || (digits != 0 && text.size() != digits)) return {};
  for (const char c : text) {
    if (c < '0' || c > '9') return {};
  }
  if (digits == 0 && text.size() > 1 && text[0] == '0') return {};
  std::uint64_t value;
  if (!absl::SimpleAtoi(text, &value)) return {};
  return value;
}

}  // namespace

std::string StepDirectoryName(std::uint64_t step) {
  return absl::StrFormat("step_%08d", step);
}

std::optional<std::uint64_t> ParseStepDirectoryName(absl::string_view name) {
  if (!absl::ConsumePrefix(&name, "step_")) return {};
  return ParseDigits(name, 8);
}

std::string EpochFileName(std::uint32_t epoch) {
  return absl::StrFormat("%08d", epoch);
}

std::optional<std::uint32_t> ParseEpochFileName(absl::string_view name) {
  const auto epoch = ParseDigits(name, 8);
  if (!epoch || *epoch == 0) return {};
  return static_cast<std::uint32_t>(*epoch);
}

std::string TensorTableFileName(const Hash128& hash) {
  return absl::StrCat("tensors-", ToHex(hash), ".kdt");
}

std::optional<Hash128> ParseTensorTableFileName(absl::string_view name) {
  if (!absl::ConsumePrefix(&name, "tensors-") ||
      !absl::ConsumeSuffix(&name, ".kdt")) {
    return {};
  }
  const auto hash = ParseHex16(name);
  if (!hash.ok()) return {};
  return *hash;
}

std::string DataFileName(const FileId& file) {
  return file.kind == FileKind::kAnchor
             ? absl::StrFormat("anchor-r%03d-%03d.kda", file.rank, file.number)
             : absl::StrFormat("delta-r%03d-%03d.kds", file.rank, file.number);
}

std::optional<FileId> ParseDataFileName(absl::string_view name) {
  FileId file;
  if (absl::ConsumePrefix(&name, "delta-r")) {
    if (!absl::ConsumeSuffix(&name, ".kds")) return {};
    file.kind = FileKind::kSegment;
  } else if (absl::ConsumePrefix(&name, "anchor-r")) {
    if (!absl::ConsumeSuffix(&name, ".kda")) return {};
    file.kind = FileKind::kAnchor;
  } else {
    return {};
  }
  if (name.size() != 7 || name[3] != '-') return {};
  const auto rank = ParseDigits(name.substr(0, 3), 3);
  const auto number = ParseDigits(name.substr(4), 3);
  if (!rank || !number) return {};
  file.rank = static_cast<std::uint32_t>(*rank);
  file.number = static_cast<std::uint32_t>(*number);
  return file;
}

std::string StagingName(std::uint64_t step, FileKind kind, std::uint32_t epoch,
                        std::uint64_t attempt) {
  return absl::StrCat(StepDirectoryName(step),
                      kind == FileKind::kAnchor ? ".anchor." : ".", epoch, ".",
                      attempt);
}

std::optional<StagingId> ParseStagingName(absl::string_view name) {
  const std::vector<absl::string_view> parts = absl::StrSplit(name, '.');
  const bool anchor = parts.size() == 4 && parts[1] == "anchor";
  if (parts.size() != 3 && !anchor) return {};
  const auto step = ParseStepDirectoryName(parts[0]);
  const auto epoch = ParseDigits(parts[parts.size() - 2], 0);
  const auto attempt = ParseDigits(parts[parts.size() - 1], 0);
  if (!step || !epoch || !attempt || *epoch > 99'999'999) return {};
  return StagingId{*step, anchor ? FileKind::kAnchor : FileKind::kSegment,
                   static_cast<std::uint32_t>(*epoch), *attempt};
}

}  // namespace kedge
