#ifndef KEDGE_ENGINE_CPU_CPU_DEVICE_H_
#define KEDGE_ENGINE_CPU_CPU_DEVICE_H_

// A device that is no GPU: host memory, a thread a stream, kedge's kernels done
// by a core each. Engines on CPUs use it, and tests, which see through it what
// everything above engine/device/device.h does with a GPU.

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kedge/engine/device/device.h"

namespace kedge {

struct CpuDeviceOptions {
  // Sleep of a stream before each of its tasks, so that a caller who does not
  // wait where it must reads old bytes, or overwrites bytes still needed.
  std::chrono::microseconds delay{0};
  // Called first in every method that can fail, with its name as it stands in
  // device.h ("Copy", "Encode", ...; "Allocate device" and "Allocate pinned";
  // "Sums" for DeviceSums::Enqueue), from whatever thread calls. An error is
  // what the method returns, and it then does nothing.
  std::function<absl::Status(absl::string_view operation)> fault;
  // Whether IsDeviceMemory says yes to all memory, for engines whose weights
  // lie where their framework put them. Else only to what Allocate gave.
  bool any_memory_is_device_memory = false;
};

// Memory comes filled with 0xcd (its first MiB), as nobody may count on zeros.
// The null stream exists from the start; no stream waits for another unasked.
// A stream holds 1024 tasks; who enqueues more waits for room. Nothing but the
// functions that make something, and the first Encode of a stream, allocates.
// Destroying a stream waits until what is enqueued has run.
//
// Thread safety: as Device.
class CpuDevice final : public Device {
 public:
  explicit CpuDevice(CpuDeviceOptions options = {});
  // Everything made by the device is destroyed before.
  ~CpuDevice() override;
  CpuDevice(const CpuDevice&) = delete;
  CpuDevice& operator=(const CpuDevice&) = delete;

  // Of Allocate, for tests: bytes held now, and successful calls so far.
  std::uint64_t bytes_in_use(MemoryKind kind) const;
  std::uint64_t allocation_count() const;

  std::string name() const override { return "cpu"; }
  absl::StatusOr<DeviceMemory> Allocate(MemoryKind kind,
                                        std::uint64_t bytes) override;
  absl::Status RegisterHost(const void* data, std::uint64_t bytes) override;
  void UnregisterHost(const void* data) override;
  bool IsDeviceMemory(const void* data) const override;

  absl::StatusOr<OwnedStream> CreateStream() override;
  absl::StatusOr<OwnedEvent> CreateEvent() override;
  absl::Status Record(DeviceEvent event, DeviceStream stream) override;
  absl::Status StreamWait(DeviceStream stream, DeviceEvent event) override;
  absl::StatusOr<bool> HasPassed(DeviceEvent event) override;
  absl::Status WaitForEvent(DeviceEvent event) override;
  absl::Status WaitForStream(DeviceStream stream) override;

  absl::Status Copy(void* to, const void* from, std::uint64_t bytes,
                    DeviceStream stream) override;
  absl::Status CopyRows(void* to, std::uint64_t to_pitch, const void* from,
                        std::uint64_t from_pitch, std::uint64_t row_bytes,
                        std::uint64_t rows, DeviceStream stream) override;
  absl::Status Fill(void* to, std::uint8_t value, std::uint64_t bytes,
                    DeviceStream stream) override;
  absl::Status CopySliceToBox(const std::byte* from, const TileGrid& grid,
                              const UnitRange& slice, const BoxTarget& box,
                              DeviceStream stream) override;

  absl::StatusOr<DeviceMemory> MakeL61Table(const L61Key& key) override;
  absl::Status Encode(const EncodeBatch& batch, DeviceStream stream) override;
  absl::Status Apply(const ApplyBatch& batch, DeviceStream stream) override;
  absl::Status Quantise(const QuantiseBatch& batch,
                        DeviceStream stream) override;
  absl::StatusOr<std::unique_ptr<DeviceSums>> PrepareSums(
      std::span<const SumBox> boxes, std::uint32_t output_count,
      const L61Key& key) override;

 private:
  class Stream;
  class Event;
  class Sums;

  void Free(MemoryKind kind, void* data) override;
  void DestroyStream(DeviceStream stream) override;
  void DestroyEvent(DeviceEvent event) override;

  absl::Status Check(absl::string_view operation) const;
  Stream& StreamOf(DeviceStream stream) const;

  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kedge

#endif  // KEDGE_ENGINE_CPU_CPU_DEVICE_H_
