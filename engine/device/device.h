#ifndef KEDGE_ENGINE_DEVICE_DEVICE_H_
#define KEDGE_ENGINE_DEVICE_DEVICE_H_

// The device that holds weights, behind a seam: memory, streams, copies and
// kedge's kernels. CudaDevice (engine/cuda) is a GPU; CpuDevice (engine/cpu)
// runs the same work in host memory on a thread a stream, so that everything
// above the seam is tested without a GPU.
//
// What is enqueued on a stream runs later, in order; streams run side by side.
// Nothing here waits but what says so in its name, and nothing but the
// functions that make something allocates.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kedge/engine/device/kernel_tasks.h"

namespace kedge {

// A stream: cudaStream_t of a CudaDevice (null: the legacy default stream);
// what CpuDevice::CreateStream gave. Trainers and engines hand in their own.
using DeviceStream = void*;
using DeviceEvent = void*;

enum class MemoryKind { kDevice, kPinned };

class Device;

// Memory of a device, or pinned host memory; freed with the object, which the
// device outlives. Move-only.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  DeviceMemory(Device* device, MemoryKind kind, void* data, std::uint64_t bytes)
      : device_(device), kind_(kind), data_(data), bytes_(bytes) {}
  DeviceMemory(DeviceMemory&& other) noexcept { *this = std::move(other); }
  DeviceMemory& operator=(DeviceMemory&& other) noexcept;
  ~DeviceMemory();

  std::byte* data() const { return static_cast<std::byte*>(data_); }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  std::uint64_t bytes() const { return bytes_; }

 private:
  Device* device_ = nullptr;
  MemoryKind kind_ = MemoryKind::kDevice;
  void* data_ = nullptr;
  std::uint64_t bytes_ = 0;
};

// A stream or event that kedge made itself; destroyed with the object, when
// what is enqueued has run.
class OwnedStream {
 public:
  OwnedStream() = default;
  OwnedStream(Device* device, DeviceStream stream)
      : device_(device), stream_(stream) {}
  OwnedStream(OwnedStream&& other) noexcept { *this = std::move(other); }
  OwnedStream& operator=(OwnedStream&& other) noexcept;
  ~OwnedStream();
  DeviceStream get() const { return stream_; }

 private:
  Device* device_ = nullptr;
  DeviceStream stream_ = nullptr;
};
class OwnedEvent {
 public:
  OwnedEvent() = default;
  OwnedEvent(Device* device, DeviceEvent event)
      : device_(device), event_(event) {}
  OwnedEvent(OwnedEvent&& other) noexcept { *this = std::move(other); }
  OwnedEvent& operator=(OwnedEvent&& other) noexcept;
  ~OwnedEvent();
  DeviceEvent get() const { return event_; }

 private:
  Device* device_ = nullptr;
  DeviceEvent event_ = nullptr;
};

// Checksums of a fixed set of boxes, to be taken again and again: tables lie on
// the device already. Made by Device::PrepareSums.
//
// Thread safety: one thread at a time, and one Enqueue in flight.
class DeviceSums {
 public:
  virtual ~DeviceSums() = default;
  // One launch (and one small copy back) on `stream`.
  virtual absl::Status Enqueue(DeviceStream stream) = 0;
  // [output_count] residues in [0, p), valid once `stream` has passed Enqueue.
  virtual std::span<const std::uint64_t> residues() = 0;
  // Bytes of weights that one Enqueue reads.
  virtual std::uint64_t bytes() const = 0;
};

// Errors: kInternal names the device and the call that failed (CUDA's own name
// and text); kResourceExhausted if memory is short, with the bytes asked for.
//
// Thread safety: any thread may call anything; a stream is used by one thread
// at a time.
class Device {
 public:
  virtual ~Device() = default;

  virtual std::string name() const = 0;  // "cuda:0 (NVIDIA H200)", "cpu"

  // ------------------------------------------------------------------- memory
  // Aligned to 256 bytes. 0 bytes give an empty object.
  virtual absl::StatusOr<DeviceMemory> Allocate(MemoryKind kind,
                                                std::uint64_t bytes) = 0;
  // Makes mapped file pages or other host memory a fast source of copies.
  // kUnimplemented where that does not work: copies then still do.
  virtual absl::Status RegisterHost(const void* data, std::uint64_t bytes) = 0;
  virtual void UnregisterHost(const void* data) = 0;
  // Whether `data` may be handed to kernels.
  virtual bool IsDeviceMemory(const void* data) const = 0;
  // Whether the host may read it. Memory of another device is neither.
  virtual bool IsHostMemory(const void* data) const {
    return !IsDeviceMemory(data);
  }

  // ------------------------------------------------------- streams and events
  virtual absl::StatusOr<OwnedStream> CreateStream() = 0;
  virtual absl::StatusOr<OwnedEvent> CreateEvent() = 0;
  virtual absl::Status Record(DeviceEvent event, DeviceStream stream) = 0;
  // Later work of `stream` waits until `event`'s last Record has been passed.
  virtual absl::Status StreamWait(DeviceStream stream, DeviceEvent event) = 0;
  // An event that was never recorded has passed.
  virtual absl::StatusOr<bool> HasPassed(DeviceEvent event) = 0;
  virtual absl::Status WaitForEvent(DeviceEvent event) = 0;
  virtual absl::Status WaitForStream(DeviceStream stream) = 0;

  // ----------------------------------------------------- copies, all enqueued
  // Between device, pinned and registered memory. Other host memory works too,
  // but may make the call wait.
  virtual absl::Status Copy(void* to, const void* from, std::uint64_t bytes,
                            DeviceStream stream) = 0;
  // `rows` runs of `row_bytes`, each a pitch after the last.
  virtual absl::Status CopyRows(void* to, std::uint64_t to_pitch,
                                const void* from, std::uint64_t from_pitch,
                                std::uint64_t row_bytes, std::uint64_t rows,
                                DeviceStream stream) = 0;
  virtual absl::Status Fill(void* to, std::uint8_t value, std::uint64_t bytes,
                            DeviceStream stream) = 0;
  // Copies the units of `slice`, contiguous at `from` (device memory), that lie
  // in `box` to their places.
  virtual absl::Status CopySliceToBox(const std::byte* from,
                                      const TileGrid& grid,
                                      const UnitRange& slice,
                                      const BoxTarget& box,
                                      DeviceStream stream) = 0;

  // ---------------------------------------------------- kernels, all enqueued
  // The table of A in device memory, for DeviceL61::a. Waits.
  virtual absl::StatusOr<DeviceMemory> MakeL61Table(const L61Key& key) = 0;
  virtual absl::Status Encode(const EncodeBatch& batch,
                              DeviceStream stream) = 0;
  virtual absl::Status Apply(const ApplyBatch& batch, DeviceStream stream) = 0;
  virtual absl::Status Quantise(const QuantiseBatch& batch,
                                DeviceStream stream) = 0;
  // `boxes` (host memory, not kept) with outputs below `output_count`; several
  // boxes may add to one output. Waits for its tables to be uploaded.
  virtual absl::StatusOr<std::unique_ptr<DeviceSums>> PrepareSums(
      std::span<const SumBox> boxes, std::uint32_t output_count,
      const L61Key& key) = 0;

 protected:
  friend class DeviceMemory;
  friend class OwnedStream;
  friend class OwnedEvent;
  virtual void Free(MemoryKind kind, void* data) = 0;
  virtual void DestroyStream(DeviceStream stream) = 0;
  virtual void DestroyEvent(DeviceEvent event) = 0;
};

// Waits for `stream`, also where enqueuing failed (`enqueued`): what was
// enqueued uses memory that its owner is about to use again. A wait that fails
// says nothing about the work, and is made once more. Returns the first error.
absl::Status WaitOut(Device* device, DeviceStream stream,
                     absl::Status enqueued = absl::OkStatus());

}  // namespace kedge

#endif  // KEDGE_ENGINE_DEVICE_DEVICE_H_
