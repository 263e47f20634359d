#ifndef KEDGE_READER_FSCK_DATA_H_
#define KEDGE_READER_FSCK_DATA_H_

// The deep part of fsck: every byte of the data files of one directory. Private
// to reader/.

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "kedge/engine/cpu/l61_sum.h"
#include "kedge/engine/io/file_system.h"
#include "kedge/engine/io/io_pool.h"
#include "kedge/format/manifest.h"
#include "kedge/format/tensor_table.h"
#include "kedge/reader/fsck_findings.h"

namespace kedge::fsck {

struct DataContext {
  FileSystem* fs = nullptr;
  IoPool* pool = nullptr;
  const L61Summer* summer = nullptr;
  RunId run;
  // Called from pool threads with the bytes that have just been checked.
  std::function<void(std::uint64_t)> advance;
  std::atomic<std::uint64_t> records{0};
  // Held by the one thread that has a very large record in memory.
  std::mutex large_record;
};

// Where the files of one directory lie, and which of them to read: those whose
// size and header are right.
struct DataDirectory {
  std::string name;  // relative to the store
  std::string path;
  std::uint64_t step = 0;
  std::vector<bool> usable;  // of the manifest's files
};

// Adds what is wrong to `findings`. An error only if fsck cannot go on.
absl::Status CheckSegments(DataContext& context, const DataDirectory& directory,
                           const StepManifest& manifest,
                           const TensorTable& table, FindingList* findings);
absl::Status CheckAnchorFiles(DataContext& context,
                              const DataDirectory& directory,
                              const AnchorManifest& manifest,
                              const TensorTable& table, FindingList* findings);

}  // namespace kedge::fsck

#endif  // KEDGE_READER_FSCK_DATA_H_
