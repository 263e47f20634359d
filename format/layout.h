#ifndef KEDGE_FORMAT_LAYOUT_H_
#define KEDGE_FORMAT_LAYOUT_H_

// Names inside a store. See spec/store.md. No name in a store is ever taken
// from a file's contents: all are computed here from numbers and hashes.

#include <cstdint>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"
#include "kedge/format/hash.h"

namespace kedge {

inline constexpr char kStoreFileName[] = "STORE";
inline constexpr char kHeadFileName[] = "HEAD";
inline constexpr char kManifestFileName[] = "MANIFEST";
inline constexpr char kCommitFileName[] = "COMMIT";
inline constexpr char kAnchorDirectoryName[] = "anchor";
inline constexpr char kEpochsDirectoryName[] = "epochs";
inline constexpr char kStagingDirectoryName[] = ".staging";
inline constexpr char kTrashDirectoryName[] = ".trash";
inline constexpr char kLeasesDirectoryName[] = "leases";
inline constexpr char kRanksDirectoryName[] = "ranks";

// "step_00000019"
std::string StepDirectoryName(std::uint64_t step);
// The step of a name that StepDirectoryName makes; nothing for any other name.
std::optional<std::uint64_t> ParseStepDirectoryName(absl::string_view name);

// "00000003"
std::string EpochFileName(std::uint32_t epoch);
std::optional<std::uint32_t> ParseEpochFileName(absl::string_view name);

// "tensors-<32 hex>.kdt"
std::string TensorTableFileName(const Hash128& hash);
std::optional<Hash128> ParseTensorTableFileName(absl::string_view name);

// "delta-r003-000.kds", "anchor-r003-000.kda"
std::string DataFileName(const FileId& file);
std::optional<FileId> ParseDataFileName(absl::string_view name);

// "step_00000019.<epoch>.<attempt>", "step_00000019.anchor.<epoch>.<attempt>":
// the name of a staging directory within .staging.
std::string StagingName(std::uint64_t step, FileKind kind, std::uint32_t epoch,
                        std::uint64_t attempt);
struct StagingId {
  std::uint64_t step = 0;
  FileKind kind = FileKind::kSegment;
  std::uint32_t epoch = 0;
  std::uint64_t attempt = 0;
};
std::optional<StagingId> ParseStagingName(absl::string_view name);

}  // namespace kedge

#endif  // KEDGE_FORMAT_LAYOUT_H_
