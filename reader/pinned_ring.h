#ifndef KEDGE_READER_PINNED_RING_H_
#define KEDGE_READER_PINNED_RING_H_

// Pinned buffers on the way from files to a device, and the streams that empty
// them.

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kedge/engine/device/device.h"

namespace kedge {

// Thread safety: Take may be called, and slots given back, by several threads;
// the other methods only while nobody holds a slot.
class PinnedRing {
 public:
  struct Slot {
    DeviceMemory pinned;  // [slot_bytes]
    DeviceMemory bounce;  // likewise on the device, once AddBounce was called
    OwnedStream stream;   // of whoever has taken the slot
    OwnedEvent passed;    // the last use
  };

  // A slot in use; given back when destroyed. Its memory is used again once
  // everything that was enqueued on its stream has run.
  class Use {
   public:
    Use(PinnedRing* ring, Slot* slot) : ring_(ring), slot_(slot) {}
    Use(Use&& other) noexcept : ring_(other.ring_), slot_(other.slot_) {
      other.slot_ = nullptr;
    }
    Use& operator=(Use&&) = delete;
    ~Use() {
      if (slot_ != nullptr) ring_->Give(slot_);
    }
    Slot* operator->() const { return slot_; }
    DeviceStream stream() const { return slot_->stream.get(); }
    // For one who keeps the slot: what was enqueued until now is a use of its
    // own, and WaitForLast waits for that.
    absl::Status EndOne() {
      return ring_->device_->Record(slot_->passed.get(), stream());
    }
    absl::Status WaitForLast() {
      return ring_->device_->WaitForEvent(slot_->passed.get());
    }

   private:
    PinnedRing* ring_;
    Slot* slot_;
  };

  // All memory is allocated here. `device` outlives the ring.
  static absl::StatusOr<std::unique_ptr<PinnedRing>> Create(
      Device* device, int slots, std::uint64_t slot_bytes);
  ~PinnedRing();  // waits
  // Gives every slot its `bounce`, unless it has one.
  absl::Status AddBounce();

  // Waits for a slot whose last use has passed. Threads that take several at
  // once have as many slots between them as all of them take.
  absl::StatusOr<Use> Take();

  // What slots do from now on comes after what `stream` does so far.
  absl::Status StartAfter(DeviceStream stream);
  // Waits for all that was enqueued on all slots; the first error.
  absl::Status WaitForAll();

 private:
  PinnedRing(Device* device, std::uint64_t slot_bytes)
      : device_(device), slot_bytes_(slot_bytes) {}
  void Give(Slot* slot);

  Device* device_;
  std::uint64_t slot_bytes_;
  std::vector<std::unique_ptr<Slot>> slots_;
  OwnedEvent start_;
  std::mutex mutex_;
  std::condition_variable given_;
  std::deque<Slot*> free_ ABSL_GUARDED_BY(mutex_);  // the one used first first
  absl::Status error_ ABSL_GUARDED_BY(mutex_);      // of Give
};

}  // namespace kedge

#endif  // KEDGE_READER_PINNED_RING_H_
