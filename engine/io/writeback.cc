#include "kedge/engine/io/writeback.h"

#include <algorithm>
#include <system_error>

namespace kedge {

Writeback::Writeback(std::size_t capacity)
    : ranges_(std::max<std::size_t>(capacity, 1)) {
  try {
    thread_ = std::thread([this] { Work(); });
  } catch (const std::system_error&) {
    // Out of threads, in the midst of a training run: all is left to Sync.
    stopping_ = true;
  }
}

Writeback::~Writeback() { Stop(); }

void Writeback::Add(File* file, std::uint64_t offset, std::uint64_t bytes) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (stopping_ || added_ - taken_ == ranges_.size()) return;
    ranges_[added_ % ranges_.size()] = {file, offset, bytes};
    ++added_;
  }
  changed_.notify_one();
}

void Writeback::Stop() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_one();
  if (thread_.joinable()) thread_.join();
}

void Writeback::Work() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stopping_ || taken_ < added_; });
    if (stopping_) return;
    const Range range = ranges_[taken_++ % ranges_.size()];
    lock.unlock();
    range.file->StartWriteback(range.offset, range.bytes);
    lock.lock();
  }
}

}  // namespace kedge
