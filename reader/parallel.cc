#include "kedge/reader/parallel.h"

#include <algorithm>
#include <atomic>

#include "kedge/format/status.h"

namespace kedge {

absl::Status ParallelFor(IoPool* pool, std::size_t count,
                         const std::function<absl::Status(std::size_t)>& job) {
  std::atomic<std::size_t> next{0};
  std::atomic<bool> failed{false};
  const auto work = [&]() -> absl::Status {
    while (!failed.load(std::memory_order_relaxed)) {
      const std::size_t i = next.fetch_add(1, std::memory_order_relaxed);
      if (i >= count) break;
      if (absl::Status status = job(i); !status.ok()) {
        failed.store(true, std::memory_order_relaxed);
        return status;
      }
    }
    return absl::OkStatus();
  };
  const std::size_t workers =
      std::min(count, static_cast<std::size_t>(pool->thread_count()));
  if (workers <= 1) return work();
  IoPool::Batch batch(pool);
  for (std::size_t i = 0; i < workers; ++i) batch.Submit(work);
  return batch.Wait();
}

}  // namespace kedge
