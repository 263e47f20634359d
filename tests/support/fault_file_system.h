#ifndef KEDGE_TESTS_SUPPORT_FAULT_FILE_SYSTEM_H_
#define KEDGE_TESTS_SUPPORT_FAULT_FILE_SYSTEM_H_

// A FileSystem that counts what passes through it and breaks what it is told
// to. A typical test runs its subject once to learn how many operations there
// are, then once per operation k with a fault there:
//
//   FaultFileSystem fs(PosixFileSystem(), temp.path());
//   Publish(fs);
//   const std::int64_t count = fs.operation_count();
//   for (std::int64_t k = 1; k <= count; ++k) {
//     fs.Reset();
//     fs.set_script(FaultAt(k, Fault::Fail(EIO)));
//     SCOPED_TRACE(...);
//     Publish(fs);  // old or new, whole
//   }
//
// Operations are numbered from 1 in the order in which they start, and run one
// at a time. Which thread comes first is up to the threads: a test that needs
// the same k to mean the same operation uses an IoPool of one thread.
//
// fsync is counted, logged and broken like all others, but not passed on: these
// tests cut no power, and thousands of publishes would wait for the disk.

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "kedge/engine/io/file_system.h"

namespace kedge {

// One value for each method of FileSystem and File, but for path() and
// StartWriteback, which comes from threads of its own and whose outcome nobody
// sees; a file that is closed or destroyed while it runs ends the program.
// Files and mappings that are merely destroyed are no operation.
enum class FileOperation {
  kOpenForRead,
  kCreateExclusive,
  kMakeDirectory,
  kRename,
  kLink,
  kRemoveFile,
  kRemoveDirectory,
  kList,
  kStat,
  kSyncDirectory,
  kKindOf,
  kRead,
  kWrite,
  kSize,
  kResize,
  kSync,
  kClose,
  kMap,
  kWillRead,
};
inline constexpr int kFileOperationCount = 19;

absl::string_view FileOperationName(FileOperation operation);

struct Operation {
  std::int64_t number = 0;  // from 1
  FileOperation kind = FileOperation::kStat;
  std::string path;  // without the root given to FaultFileSystem
  std::string to;    // of rename and link
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;  // asked for, of read, write, resize, map, will-read

  // "7: rename a -> b", "8: write c @4096 +100"
  std::string ToString() const;
};

// What happens to one operation.
struct Fault {
  enum class Kind {
    kNone,
    kFail,             // not done, reported as failed
    kPerformThenFail,  // done, reported as failed
    kDrop,     // not done, reported as done. Reads give zeros, lists are empty.
    kShorten,  // read and write move half of the bytes, at least one
    kTear,     // write moves half of the bytes and fails; others fail
  };
  Kind kind = Kind::kNone;
  int error = 0;  // errno to report

  static Fault None() { return {}; }
  static Fault Fail(int error) { return {Kind::kFail, error}; }
  static Fault PerformThenFail(int error) {
    return {Kind::kPerformThenFail, error};
  }
  static Fault Drop() { return {Kind::kDrop, 0}; }
  static Fault Shorten() { return {Kind::kShorten, 0}; }
  static Fault Tear(int error) { return {Kind::kTear, error}; }
};

using FaultScript = std::function<Fault(const Operation&)>;

// The k-th operation; the k-th and all later ones.
FaultScript FaultAt(std::int64_t k, Fault fault);
FaultScript FaultFrom(std::int64_t k, Fault fault);
// The process "dies" after its k-th operation: all later ones fail and do
// nothing, so that not even destructors tidy up.
FaultScript StopAfter(std::int64_t k);
// Every operation of this kind on a path that ends with `suffix` (for rename
// and link, the new path).
FaultScript FaultOn(FileOperation kind, std::string suffix, Fault fault);

// Thread safety: as FileSystem asks; set_* and Reset() not beside operations.
class FaultFileSystem final : public FileSystem {
 public:
  // `root` and the "/" after it are left out of paths in operations.
  explicit FaultFileSystem(FileSystem* base = PosixFileSystem(),
                           std::string root = "");

  // Asked about each operation before it runs.
  void set_script(FaultScript script);
  // Called after each operation, on its thread, before any other operation
  // starts. What the callback itself does through this file system goes
  // straight to the base, uncounted.
  void set_after_each(std::function<void(const Operation&)> callback);
  // How long StartWriteback takes at least, as where a device's queue is full.
  void set_start_delay(std::chrono::milliseconds delay) {
    start_delay_ = delay;
  }
  // Forgets script, callback, delay, counts and log.
  void Reset();

  std::int64_t operation_count() const;
  std::int64_t count(FileOperation kind) const;
  std::uint64_t bytes_read() const;     // moved by read
  std::uint64_t bytes_written() const;  // moved by write
  std::uint64_t bytes_mapped() const;
  std::uint64_t bytes_started() const;  // given to StartWriteback
  std::vector<Operation> log() const;
  std::string LogText() const;  // one operation a line

  absl::StatusOr<std::unique_ptr<File>> OpenForRead(
      absl::string_view path) override;
  absl::StatusOr<std::unique_ptr<File>> CreateExclusive(
      absl::string_view path) override;
  absl::Status MakeDirectory(absl::string_view path) override;
  absl::Status Rename(absl::string_view from, absl::string_view to) override;
  absl::Status Link(absl::string_view from, absl::string_view to) override;
  absl::Status RemoveFile(absl::string_view path) override;
  absl::Status RemoveDirectory(absl::string_view path) override;
  absl::StatusOr<std::vector<std::string>> List(
      absl::string_view path) override;
  absl::StatusOr<FileInfo> Stat(absl::string_view path) override;
  absl::Status SyncDirectory(absl::string_view path) override;
  absl::StatusOr<StorageKind> KindOf(absl::string_view path) override;

 private:
  class FaultFile;

  Operation On(FileOperation kind, absl::string_view path) const;
  std::string Shown(absl::string_view path) const;

  // Counts, asks the script, and runs `perform(shorten)` or `dropped()`.
  template <typename Result, typename Perform, typename Dropped>
  Result Run(Operation operation, Perform perform, Dropped dropped);
  absl::StatusOr<std::unique_ptr<File>> Wrap(
      absl::StatusOr<std::unique_ptr<File>> file);

  FileSystem* base_;
  std::string root_;
  mutable std::mutex mutex_;  // held for each operation, callback included
  FaultScript script_ ABSL_GUARDED_BY(mutex_);
  std::function<void(const Operation&)> after_each_ ABSL_GUARDED_BY(mutex_);
  // The thread that is inside the callback, and so holds the mutex.
  std::atomic<std::thread::id> in_callback_{};
  std::vector<Operation> log_ ABSL_GUARDED_BY(mutex_);
  std::array<std::int64_t, kFileOperationCount> counts_
      ABSL_GUARDED_BY(mutex_){};
  std::uint64_t bytes_read_ ABSL_GUARDED_BY(mutex_) = 0;
  std::uint64_t bytes_written_ ABSL_GUARDED_BY(mutex_) = 0;
  std::uint64_t bytes_mapped_ ABSL_GUARDED_BY(mutex_) = 0;
  std::atomic<std::uint64_t> bytes_started_ = 0;
  std::atomic<std::chrono::milliseconds> start_delay_{};
};

}  // namespace kedge

#endif  // KEDGE_TESTS_SUPPORT_FAULT_FILE_SYSTEM_H_
