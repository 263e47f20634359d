#ifndef KEDGE_WRITER_RETENTION_H_
#define KEDGE_WRITER_RETENTION_H_

// Which steps and anchors a store still needs, and how the others go. See
// docs/protocol.md, "Retention".

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kedge/engine/io/file_system.h"
#include "kedge/engine/io/store.h"

namespace kedge {

struct GcOptions {
  std::string store_path;
  FileSystem* fs = nullptr;  // null: PosixFileSystem()
  // The newest this many sound anchors stay, with every step from the oldest of
  // them on. At least 1.
  std::uint32_t keep_anchors = 2;
  // What an earlier gc moved to .trash is deleted once it has lain there this
  // long by the storage's own clock: readers that are still in it finish or
  // notice.
  std::chrono::seconds grace{60};
  bool dry_run = false;
};

struct GcReport {
  std::uint64_t oldest_kept_step = 0;
  std::vector<std::uint64_t> moved_steps;  // to .trash by this gc
  std::vector<std::uint32_t> removed_epochs;
  std::vector<std::string> removed_staging;  // of epochs that are fenced
  std::vector<std::string> deleted_trash;    // names within .trash
};

// Drops what the newest `keep_anchors` anchors do not need. Chains stay whole:
// from every anchor that is kept, each later version can be reached. A store
// with fewer sound anchors keeps everything. May run beside a writer, readers
// and another gc.
//
// Errors: kInvalidArgument, kNotFound (no store), those of storage. What was
// moved before an error stays moved: every state in between is a sound store.
absl::StatusOr<GcReport> CollectGarbage(const GcOptions& options);

}  // namespace kedge

#endif  // KEDGE_WRITER_RETENTION_H_
