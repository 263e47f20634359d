#ifndef KEDGE_ENGINE_CUDA_CUDA_DEVICE_H_
#define KEDGE_ENGINE_CUDA_CUDA_DEVICE_H_

// A GPU as the device of engine/device/device.h.

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kedge/engine/device/device.h"

namespace kedge {

// GPUs that this process sees; 0 also without a driver.
int CudaDeviceCount();

// One GPU. Streams are cudaStream_t, those that it makes do not wait for the
// legacy default stream, nor that for them; events are cudaEvent_t, and who
// waits for one sleeps. Pinned and registered memory serves all GPUs. Each call
// makes the GPU current and, before it returns, the one that was, unless the
// process uses that one not at all.
//
// Errors: kInternal, with CUDA's name and text, is that of the call or of
// earlier work on the GPU, as CUDA has it.
// Thread safety: as Device.
class CudaDevice final : public Device {
 public:
  // kInvalidArgument names the GPUs there are; kInternal what CUDA says.
  static absl::StatusOr<std::unique_ptr<CudaDevice>> Open(int ordinal);
  ~CudaDevice() override;
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;

  int ordinal() const { return ordinal_; }

  std::string name() const override { return name_; }
  absl::StatusOr<DeviceMemory> Allocate(MemoryKind kind,
                                        std::uint64_t bytes) override;
  absl::Status RegisterHost(const void* data, std::uint64_t bytes) override;
  void UnregisterHost(const void* data) override;
  bool IsDeviceMemory(const void* data) const override;
  bool IsHostMemory(const void* data) const override;

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
  class Sums;

  CudaDevice(int ordinal, std::string name)
      : ordinal_(ordinal), name_(std::move(name)) {}
  void Free(MemoryKind kind, void* data) override;
  void DestroyStream(DeviceStream stream) override;
  void DestroyEvent(DeviceEvent event) override;
  // Copies to the device and waits for that copy alone.
  absl::Status Upload(void* to, const void* from, std::uint64_t bytes);

  const int ordinal_;
  const std::string name_;
  OwnedStream setup_stream_;  // tables go up on it
};

}  // namespace kedge

#endif  // KEDGE_ENGINE_CUDA_CUDA_DEVICE_H_
