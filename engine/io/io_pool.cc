#include "kedge/engine/io/io_pool.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "kedge/format/status.h"

namespace kedge {

struct IoPool::Impl {
  // Called once: true runs the task, false accounts for it without running.
  using Job = std::function<void(bool run)>;

  std::mutex mutex;
  std::condition_variable wake;
  std::deque<Job> jobs ABSL_GUARDED_BY(mutex);
  bool stopping ABSL_GUARDED_BY(mutex) = false;
  std::vector<std::thread> threads;

  void Work() {
    for (;;) {
      Job job;
      {
        std::unique_lock lock(mutex);
        wake.wait(lock, [this] { return stopping || !jobs.empty(); });
        if (jobs.empty()) return;
        job = std::move(jobs.front());
        jobs.pop_front();
      }
      job(true);
    }
  }

  void Push(Job job) {
    {
      const std::lock_guard lock(mutex);
      jobs.push_back(std::move(job));
    }
    wake.notify_one();
  }
};

// Shared with the queued jobs, so that it outlives them all.
struct IoPool::Batch::State {
  std::mutex mutex;
  std::condition_variable changed;
  int unfinished ABSL_GUARDED_BY(mutex) = 0;
  int max_in_flight ABSL_GUARDED_BY(mutex) = 1;
  absl::Status first_error ABSL_GUARDED_BY(mutex);

  bool Failed() {
    const std::lock_guard lock(mutex);
    return !first_error.ok();
  }

  void Finish(const absl::Status& status) {
    const std::lock_guard lock(mutex);
    first_error.Update(status);
    --unfinished;
    changed.notify_all();
  }
};

IoPool::IoPool(int threads) : impl_(std::make_unique<Impl>()) {
  threads = std::max(threads, 1);
  impl_->threads.reserve(static_cast<std::size_t>(threads));
  for (int i = 0; i < threads; ++i) {
    try {
      impl_->threads.emplace_back([impl = impl_.get()] { impl->Work(); });
    } catch (const std::system_error&) {
      // Out of threads: fewer are slower, none cannot work at all.
      KEDGE_CHECK(i > 0);
      break;
    }
  }
}

IoPool::~IoPool() {
  std::deque<Impl::Job> dropped;
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->stopping = true;
    dropped.swap(impl_->jobs);
  }
  impl_->wake.notify_all();
  for (Impl::Job& job : dropped) job(false);
  for (std::thread& thread : impl_->threads) thread.join();
}

int IoPool::thread_count() const {
  return static_cast<int>(impl_->threads.size());
}

IoPool::Batch::Batch(IoPool* pool)
    : state_(std::make_shared<State>()), pool_(pool) {
  // Keeps every thread busy while the producer prepares as many tasks again.
  set_max_in_flight(2 * pool->thread_count());
}

IoPool::Batch::~Batch() { Wait().IgnoreError(); }

void IoPool::Batch::Submit(std::function<absl::Status()> task) {
  {
    std::unique_lock lock(state_->mutex);
    state_->changed.wait(lock, [this] {
      return state_->unfinished < state_->max_in_flight ||
             !state_->first_error.ok();
    });
    if (!state_->first_error.ok()) return;
    ++state_->unfinished;
  }
  pool_->impl_->Push(
      [state = state_, task = std::move(task)](bool run) mutable {
        absl::Status status;
        if (!run) {
          status = absl::CancelledError("the I/O pool was shut down");
        } else if (!state->Failed()) {
          status = task();
        }
        // What the task holds is free before another one may be submitted.
        task = nullptr;
        state->Finish(status);
      });
}

absl::Status IoPool::Batch::Wait() {
  std::unique_lock lock(state_->mutex);
  state_->changed.wait(lock, [this] { return state_->unfinished == 0; });
  return state_->first_error;
}

void IoPool::Batch::set_max_in_flight(int tasks) {
  const std::lock_guard lock(state_->mutex);
  state_->max_in_flight = std::max(tasks, 1);
  state_->changed.notify_all();
}

}  // namespace kedge
