#ifndef KEDGE_WRITER_FILE_COORDINATOR_H_
#define KEDGE_WRITER_FILE_COORDINATOR_H_

// Ranks that meet through files in the store's ranks/ directory: separate
// processes, on any hosts that see the store. See spec/control_file.md.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kedge/engine/io/file_system.h"
#include "kedge/format/control_file.h"
#include "kedge/format/hash.h"
#include "kedge/writer/coordinator.h"

namespace kedge {

struct FileCoordinatorOptions {
  std::string store_path;  // made if missing: the store may come later
  std::uint32_t rank = 0;
  std::uint32_t world_size = 1;
  FileSystem* fs = nullptr;  // null: PosixFileSystem()
  // What the ranks of one job have in common. Default: the run id of the store
  // that stands at the path, zero if there is none yet.
  std::optional<RunId> run;
  // For opening, and for each Gather and Broadcast. Longer than the slowest
  // rank needs for its part of a step or of an anchor.
  std::chrono::milliseconds deadline{300'000};
};

// Each rank has one control file, made when it opens and replaced by rename; a
// reader opens it anew each time, with pauses of 1 to 50 ms. Names that do not
// exist are never polled: the directory is listed until they do. No locks.
//
// A rank that was started again fails the others' next call at once: its file
// shows another incarnation. All ranks then open again.
class FileCoordinator final : public Coordinator {
 public:
  // Says hello and waits until all ranks of this session have. Files that ranks
  // of a dead run left behind are no answer, whatever they say.
  //
  // Errors:
  //   kInvalidArgument     rank or world size out of range
  //   kFailedPrecondition  a live rank of another world size or run
  //   kUnavailable         a rank is missing at the deadline; storage
  static absl::StatusOr<std::unique_ptr<FileCoordinator>> Open(
      const FileCoordinatorOptions& options);

  std::uint32_t rank() const override { return options_.rank; }
  std::uint32_t world_size() const override { return options_.world_size; }
  // The same at all ranks; another at every opening.
  std::uint64_t session() const { return session_; }

  // kDataLoss if a control file is damaged; kUnavailable at the deadline, or if
  // a rank was started again.
  absl::StatusOr<std::vector<std::vector<std::byte>>> Gather(
      absl::string_view what, std::span<const std::byte> bytes) override;
  absl::StatusOr<std::vector<std::byte>> Broadcast(
      absl::string_view what, std::span<const std::byte> bytes) override;

 private:
  using Clock = std::chrono::steady_clock;

  struct ControlFile {
    ControlHeader header;
    std::vector<std::byte> payload;
  };

  FileCoordinator(const FileCoordinatorOptions& options, FileSystem* fs);

  std::string PathOf(std::uint32_t rank) const;
  absl::Status Write(ControlKind kind, std::uint64_t round,
                     std::span<const std::byte> payload);
  // The header is looked at first; a file that `unchanged` says is what was
  // seen before is not read further, and nothing is returned.
  absl::StatusOr<std::optional<ControlFile>> Read(
      std::uint32_t rank,
      const std::function<bool(const ControlHeader&)>& unchanged) const;
  absl::Status LearnRun();
  absl::Status Welcome();  // rank 0's side of opening
  absl::Status Join();     // the others' side
  void RemoveLeftovers(const std::vector<std::string>& names);
  // Reads the file of `rank` until it shows `kind` of the current round.
  absl::StatusOr<std::vector<std::byte>> Await(std::uint32_t rank,
                                               ControlKind kind,
                                               Clock::time_point until,
                                               std::string* last_seen);

  FileCoordinatorOptions options_;
  FileSystem* fs_;
  std::string directory_;  // ranks/
  RunId run_;
  std::uint64_t nonce_;
  std::uint64_t session_ = 0;
  std::uint64_t round_ = 0;
  std::vector<std::uint64_t> nonces_;  // by rank; 0: not known
};

}  // namespace kedge

#endif  // KEDGE_WRITER_FILE_COORDINATOR_H_
