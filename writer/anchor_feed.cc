#include "kedge/writer/anchor_feed.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kedge/format/limits.h"

namespace kedge {

AnchorFeed::AnchorFeed(int threads, std::size_t capacity, bool gathers,
                       std::chrono::milliseconds deadline)
    : deadline_(deadline), jobs_(capacity), done_(capacity) {
  threads = std::max(threads, 1);
  for (int i = 0; i < threads; ++i) {
    // Not filled: what no job needs is never touched.
    scratch_.emplace_back(gathers ? new std::byte[kPieceBytes] : nullptr);
    threads_.emplace_back(
        [this, scratch = scratch_.back().get()] { Work(scratch); });
  }
}

AnchorFeed::~AnchorFeed() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void AnchorFeed::Begin(AnchorWriter* writer) {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return passed_ == pushed_; });
  writer_ = writer;
  status_ = absl::OkStatus();
}

std::uint64_t AnchorFeed::Push(const Job& job) {
  std::uint64_t count;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!changed_.wait_for(lock, deadline_, [this] {
          return !status_.ok() || pushed_ - passed_ < jobs_.size();
        })) {
      status_ = absl::UnavailableError(absl::StrCat(
          "an anchor's bytes: none of ", jobs_.size(), " writes was done in ",
          deadline_.count(), " ms; the storage hangs"));
    }
    if (!status_.ok()) return pushed_;
    jobs_[pushed_ % jobs_.size()] = job;
    done_[pushed_ % jobs_.size()] = false;
    count = ++pushed_;
  }
  changed_.notify_all();
  return count;
}

absl::Status AnchorFeed::Finish() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return passed_ == pushed_; });
  return status_;
}

bool AnchorFeed::HasPassed(std::uint64_t count) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return passed_ >= count;
}

absl::Status AnchorFeed::WaitFor(std::uint64_t count) const {
  std::unique_lock<std::mutex> lock(mutex_);
  if (changed_.wait_for(lock, deadline_, [&] { return passed_ >= count; })) {
    return absl::OkStatus();
  }
  return absl::UnavailableError(
      absl::StrCat("an anchor's bytes: ", count - passed_,
                   " writes were not done in ", deadline_.count(),
                   " ms; the storage hangs, and still reads their sources"));
}

absl::Status AnchorFeed::WaitUntilIdle() const {
  std::uint64_t count;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    count = pushed_;
  }
  return WaitFor(count);
}

void AnchorFeed::Work(std::byte* scratch) {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stopping_ || taken_ < pushed_; });
    if (taken_ == pushed_) return;
    const std::uint64_t number = taken_++;
    const Job job = jobs_[number % jobs_.size()];
    AnchorWriter* const writer = status_.ok() ? writer_ : nullptr;
    lock.unlock();
    absl::Status status;
    if (writer != nullptr) {
      status =
          writer->WriteUnits(job.tensor, job.units, *job.grid, job.source,
                             {scratch, scratch == nullptr ? 0 : kPieceBytes});
    }
    lock.lock();
    status_.Update(status);
    done_[number % jobs_.size()] = true;
    while (passed_ < taken_ && done_[passed_ % jobs_.size()]) ++passed_;
    changed_.notify_all();
  }
}

}  // namespace kedge
