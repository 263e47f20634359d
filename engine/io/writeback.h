#ifndef KEDGE_ENGINE_IO_WRITEBACK_H_
#define KEDGE_ENGINE_IO_WRITEBACK_H_

// Storage begins with an anchor's bytes while more of them are being written,
// so that Sync has less to wait for. Linux alone would begin once a tenth of
// the memory is dirty, which on a large host is a whole anchor.

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "kedge/engine/io/file_system.h"

namespace kedge {

// Passes ranges on to File::StartWriteback from a thread of its own, since that
// call waits when the device's queue is full, and who writes should not.
//
// Thread safety: Add may run concurrently; Stop not beside it.
class Writeback {
 public:
  // `capacity` ranges can wait for their turn. Without a thread to be had
  // nothing is passed on.
  explicit Writeback(std::size_t capacity = 4096);
  ~Writeback();  // as Stop
  Writeback(const Writeback&) = delete;
  Writeback& operator=(const Writeback&) = delete;

  // Bytes of `file` that have been written. Never waits and never allocates: a
  // range too many is left to Sync. `file` stays open until Stop returns.
  void Add(File* file, std::uint64_t offset, std::uint64_t bytes);
  // Forgets what has not begun, and returns when no file is in use. Nothing is
  // begun afterwards.
  void Stop();

 private:
  struct Range {
    File* file = nullptr;
    std::uint64_t offset = 0;
    std::uint64_t bytes = 0;
  };

  void Work();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Range> ranges_ ABSL_GUARDED_BY(mutex_);  // a ring
  std::uint64_t added_ ABSL_GUARDED_BY(mutex_) = 0;
  std::uint64_t taken_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace kedge

#endif  // KEDGE_ENGINE_IO_WRITEBACK_H_
