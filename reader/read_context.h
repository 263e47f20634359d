#ifndef KEDGE_READER_READ_CONTEXT_H_
#define KEDGE_READER_READ_CONTEXT_H_

// What everything that reads published files shares, and how a reader waits for
// storage that does not answer yet. See docs/protocol.md.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "kedge/engine/io/io_pool.h"
#include "kedge/engine/io/store.h"

namespace kedge {

// Thread safety: immutable but for the counter.
struct ReadContext {
  const Store* store = nullptr;
  IoPool* io_pool = nullptr;
  bool map = false;  // map files; else explicit reads
  std::chrono::milliseconds retry_deadline{10'000};
  std::atomic<std::uint64_t>* bytes_read = nullptr;

  FileSystem& fs() const { return *store->fs(); }
};

// Runs `attempt` again while it fails in a way that shared file systems are
// known to recover from: kUnavailable (EIO, ESTALE) and, if `published`,
// kNotFound, because a client may remember for a while that a new name did not
// exist. Between attempts it backs off and lists the directories above `path`,
// which makes such a client look again.
//
// After the deadline: kNotFound "pruned" if `published` and retention has
// removed the step directory while HEAD moved on; else kUnavailable, saying
// what was waited for and how it failed last.
absl::Status RetryReads(const ReadContext& context, std::uint64_t step,
                        absl::string_view path, bool published,
                        const std::function<absl::Status()>& attempt);

}  // namespace kedge

#endif  // KEDGE_READER_READ_CONTEXT_H_
