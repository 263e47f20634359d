#include "kedge/examples/offload_trainer/thread_team.h"

#include <algorithm>

namespace kedge::example {
namespace {

// Less is not worth a thread.
constexpr std::uint64_t kStep = 4096;

}  // namespace

ThreadTeam::ThreadTeam(int threads)
    : size_(static_cast<std::uint64_t>(std::max(1, threads))) {
  for (std::uint64_t i = 1; i < size_; ++i) {
    threads_.emplace_back([this, i] { Work(i); });
  }
}

ThreadTeam::~ThreadTeam() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadTeam::DoPart(
    std::uint64_t index, std::uint64_t count,
    const std::function<void(std::uint64_t, std::uint64_t)>& body) {
  const std::uint64_t steps = (count + kStep - 1) / kStep;
  const std::uint64_t begin = steps * index / size_ * kStep;
  const std::uint64_t end =
      std::min(count, steps * (index + 1) / size_ * kStep);
  if (begin < end) body(begin, end);
}

void ThreadTeam::Run(
    std::uint64_t count,
    const std::function<void(std::uint64_t, std::uint64_t)>& body) {
  if (count <= kStep) {
    if (count > 0) body(0, count);
    return;
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    count_ = count;
    body_ = &body;
    running_ = size_ - 1;
    ++round_;
  }
  changed_.notify_all();
  DoPart(0, count, body);
  std::unique_lock<std::mutex> lock(mutex_);
  while (running_ > 0) changed_.wait(lock);
}

void ThreadTeam::Work(std::uint64_t index) {
  std::uint64_t round = 0;
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    while (!stop_ && round_ == round) changed_.wait(lock);
    if (stop_) return;
    round = round_;
    const std::uint64_t count = count_;
    const auto* const body = body_;
    lock.unlock();
    DoPart(index, count, *body);
    lock.lock();
    if (--running_ == 0) changed_.notify_all();
  }
}

}  // namespace kedge::example
