#include "kedge/engine/device/device.h"

namespace kedge {

DeviceMemory& DeviceMemory::operator=(DeviceMemory&& other) noexcept {
  std::swap(device_, other.device_);
  std::swap(kind_, other.kind_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}
DeviceMemory::~DeviceMemory() {
  if (data_ != nullptr) device_->Free(kind_, data_);
}

OwnedStream& OwnedStream::operator=(OwnedStream&& other) noexcept {
  std::swap(device_, other.device_);
  std::swap(stream_, other.stream_);
  return *this;
}
OwnedStream::~OwnedStream() {
  if (stream_ != nullptr) device_->DestroyStream(stream_);
}

OwnedEvent& OwnedEvent::operator=(OwnedEvent&& other) noexcept {
  std::swap(device_, other.device_);
  std::swap(event_, other.event_);
  return *this;
}
OwnedEvent::~OwnedEvent() {
  if (event_ != nullptr) device_->DestroyEvent(event_);
}

absl::Status WaitOut(Device* device, DeviceStream stream,
                     absl::Status enqueued) {
  const absl::Status waited = device->WaitForStream(stream);
  if (!waited.ok()) device->WaitForStream(stream).IgnoreError();
  enqueued.Update(waited);
  return enqueued;
}

}  // namespace kedge
