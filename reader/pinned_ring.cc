#include "kedge/reader/pinned_ring.h"

#include <utility>

#include "kedge/format/status.h"

namespace kedge {

absl::StatusOr<std::unique_ptr<PinnedRing>> PinnedRing::Create(
    Device* device, int slots, std::uint64_t slot_bytes) {
  std::unique_ptr<PinnedRing> ring(new PinnedRing(device, slot_bytes));
  KEDGE_ASSIGN_OR_RETURN(ring->start_, device->CreateEvent());
  for (int i = 0; i < slots; ++i) {
    auto slot = std::make_unique<Slot>();
    KEDGE_ASSIGN_OR_RETURN(slot->pinned,
                           device->Allocate(MemoryKind::kPinned, slot_bytes));
    KEDGE_ASSIGN_OR_RETURN(slot->stream, device->CreateStream());
    KEDGE_ASSIGN_OR_RETURN(slot->passed, device->CreateEvent());
    ring->slots_.push_back(std::move(slot));
  }
  const std::lock_guard lock(ring->mutex_);
  for (const auto& slot : ring->slots_) ring->free_.push_back(slot.get());
  return ring;
}

PinnedRing::~PinnedRing() { WaitForAll().IgnoreError(); }

absl::Status PinnedRing::AddBounce() {
  for (const auto& slot : slots_) {
    if (slot->bounce.data() != nullptr) continue;
    KEDGE_ASSIGN_OR_RETURN(slot->bounce,
                           device_->Allocate(MemoryKind::kDevice, slot_bytes_));
  }
  return absl::OkStatus();
}

absl::StatusOr<PinnedRing::Use> PinnedRing::Take() {
  Slot* slot = nullptr;
  {
    std::unique_lock lock(mutex_);
    given_.wait(lock, [this] { return !free_.empty(); });
    slot = free_.front();
    free_.pop_front();
  }
  Use use(this, slot);
  KEDGE_RETURN_IF_ERROR(device_->WaitForEvent(slot->passed.get()));
  return use;
}

void PinnedRing::Give(Slot* slot) {
  absl::Status status = device_->Record(slot->passed.get(), slot->stream.get());
  if (!status.ok()) {
    // Nobody else may have the slot before its copies have passed.
    status.Update(WaitOut(device_, slot->stream.get()));
  }
  {
    const std::lock_guard lock(mutex_);
    error_.Update(status);
    free_.push_back(slot);
  }
  given_.notify_one();
}

absl::Status PinnedRing::StartAfter(DeviceStream stream) {
  KEDGE_RETURN_IF_ERROR(device_->Record(start_.get(), stream));
  for (const auto& slot : slots_) {
    KEDGE_RETURN_IF_ERROR(
        device_->StreamWait(slot->stream.get(), start_.get()));
  }
  return absl::OkStatus();
}

absl::Status PinnedRing::WaitForAll() {
  absl::Status status;
  {
    const std::lock_guard lock(mutex_);
    status = std::exchange(error_, absl::OkStatus());
  }
  for (const auto& slot : slots_) {
    status.Update(WaitOut(device_, slot->stream.get()));
  }
  return status;
}

}  // namespace kedge
