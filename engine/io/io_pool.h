#ifndef KEDGE_ENGINE_IO_IO_POOL_H_
#define KEDGE_ENGINE_IO_IO_POOL_H_

// Threads that move pieces between memory and files, several files at once: one
// file alone reaches a fraction of a shared file system's rate.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/status.h"

namespace kedge {

// Runs submitted tasks on a fixed set of threads. Tasks start in submission
// order. After the first failure the remaining tasks are skipped.
//
// Thread safety: Submit and Wait may be called from several threads.
class IoPool {
 public:
  explicit IoPool(int threads = 8);
  ~IoPool();  // waits for running tasks; unstarted ones are dropped
  IoPool(const IoPool&) = delete;
  IoPool& operator=(const IoPool&) = delete;

  int thread_count() const;

  // A set of tasks whose outcome is asked for together.
  class Batch {
   public:
    explicit Batch(IoPool* pool);
    ~Batch();  // waits
    Batch(const Batch&) = delete;
    Batch& operator=(const Batch&) = delete;

    // Queues `task`; it runs on a pool thread, unless an earlier task of this
    // batch failed. Blocks while `max_in_flight` tasks of the batch are
    // unfinished, which bounds the memory they hold.
    void Submit(std::function<absl::Status()> task);
    // Waits until every submitted task is finished; returns the first error.
    // The batch may be used again afterwards if it was OK.
    absl::Status Wait();
    void set_max_in_flight(int tasks);

   private:
    struct State;
    std::shared_ptr<State> state_;
    IoPool* pool_;
  };

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kedge

#endif  // KEDGE_ENGINE_IO_IO_POOL_H_
