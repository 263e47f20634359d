#ifndef KEDGE_READER_FSCK_DIRECTORY_H_
#define KEDGE_READER_FSCK_DIRECTORY_H_

// What fsck asks of one committed directory by itself: COMMIT, MANIFEST, names,
// sizes, headers. Private to reader/.

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kedge/engine/io/file_system.h"
#include "kedge/format/fixed_files.h"
#include "kedge/format/manifest.h"
#include "kedge/reader/fsck_findings.h"

namespace kedge::fsck {

// Which content of a directory a finding is about: of one that is gone, or has
// another COMMIT by now, nothing is said.
struct Subject {
  std::string directory;         // relative to the store
  std::uint64_t commit_key = 0;  // as CommitKey gives it

  friend auto operator<=>(const Subject&, const Subject&) = default;
};

// Stands for the COMMIT of a directory as it is now: 0 there is none, 1 it
// cannot be read, else its hash. Nothing if the directory is gone.
std::optional<std::uint64_t> CommitKey(FileSystem& fs, const std::string& path);

// A directory of a step or an anchor.
struct Directory {
  enum class State {
    kGone,         // not there (any more)
    kUnpublished,  // there without a COMMIT
    kBad,          // COMMIT or MANIFEST cannot be used; there are findings
    kOk,           // COMMIT and the bytes of MANIFEST are sound
  };
  State state = State::kGone;
  std::string name;  // relative to the store
  std::string path;
  std::uint64_t commit_key = 0;
  std::optional<CommitRecord> commit;  // sound, of this run and step
  std::vector<std::string> names;      // sorted
  std::vector<std::byte> manifest;
};

// Reads names, COMMIT and MANIFEST. An error only if fsck cannot go on.
absl::StatusOr<Directory> ReadDirectory(FileSystem& fs, const std::string& root,
                                        const std::string& name,
                                        const RunId& run, std::uint64_t step,
                                        FindingList* findings);

// What a data file's header must say beside run and step.
struct ExpectedFile {
  std::uint64_t payload_bytes = 0;
  std::uint32_t count = 0;
};
std::vector<ExpectedFile> ExpectedFiles(const StepManifest& manifest);
std::vector<ExpectedFile> ExpectedFiles(const AnchorManifest& manifest);

// Compares the names in `directory` with those it may have, and each data
// file's type, size and header with the manifest. `usable` gets one entry a
// file: whether its bytes are worth reading. `wait` is asked before a file is
// called missing or short: whether to look again.
absl::Status CheckDataFiles(FileSystem& fs, const Directory& directory,
                            const RunId& run, std::uint64_t step,
                            const std::vector<DataFile>& files,
                            const std::vector<ExpectedFile>& expected,
                            const std::function<bool()>& wait,
                            std::vector<bool>* usable, FindingList* findings);

}  // namespace kedge::fsck

#endif  // KEDGE_READER_FSCK_DIRECTORY_H_
