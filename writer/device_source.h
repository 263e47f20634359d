#ifndef KEDGE_WRITER_DEVICE_SOURCE_H_
#define KEDGE_WRITER_DEVICE_SOURCE_H_

// Trainer tensors in device or host memory, read as host bytes. Private to
// writer/.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kedge/engine/device/device.h"
#include "kedge/writer/parameter_map.h"
#include "kedge/writer/tensor_source.h"

namespace kedge {

// A stream and a pinned buffer for copies from the device that host code waits
// for.
//
// Thread safety: one call at a time; others wait.
class DeviceReader {
 public:
  static absl::StatusOr<std::unique_ptr<DeviceReader>> Create(
      Device* device, std::uint64_t buffer_bytes);

  // Gathers elements [begin, end) of `part`, whose data is at `data`, into
  // `out`. One copy for each buffer's worth of memory that they are spread over
  // if addresses ascend; else one for each run at one stride.
  absl::Status Gather(const StridedPart& part, const std::byte* data,
                      std::uint64_t begin, std::uint64_t end, std::byte* out);
  // Copies contiguous device memory.
  absl::Status Read(const std::byte* from, std::uint64_t bytes, std::byte* out);

  std::uint64_t pinned_bytes() const { return buffer_.bytes(); }

 private:
  explicit DeviceReader(Device* device) : device_(device) {}
  absl::Status Fetch(const std::byte* from, std::uint64_t bytes);

  Device* device_;
  std::mutex mutex_;
  OwnedStream stream_;
  DeviceMemory buffer_;
};

// Reads trainer tensors where they are. Borrows their memory, which must not
// change while a publish reads it.
class DeviceSource : public TensorSource {
 public:
  // As MemorySource::Bind; tensors in device memory are read through `reader`,
  // which outlives the source. kInvalidArgument names one in the memory of
  // another device.
  static absl::StatusOr<DeviceSource> Bind(
      const TensorTable& table, std::span<const TrainerTensor> tensors,
      MemorySource::Others others, const Device& device, DeviceReader* reader);

  std::optional<std::vector<UnitRange>> Owned(
      std::uint32_t ordinal) const override {
    return memory_.Owned(ordinal);
  }
  absl::StatusOr<std::span<const std::byte>> Read(
      std::uint32_t ordinal, std::uint64_t byte_begin, std::uint64_t byte_count,
      std::vector<std::byte>* scratch) override;

 private:
  struct Part {
    const std::byte* data = nullptr;
    StridedPart part;
  };
  DeviceSource(MemorySource memory, DeviceReader* reader)
      : memory_(std::move(memory)), reader_(reader) {}

  MemorySource memory_;
  DeviceReader* reader_;
  // By ordinal: parts in device memory, ascending.
  std::vector<std::vector<Part>> parts_;
};

}  // namespace kedge

#endif  // KEDGE_WRITER_DEVICE_SOURCE_H_
