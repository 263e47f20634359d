#ifndef KEDGE_BENCH_BENCH_DEVICE_H_
#define KEDGE_BENCH_BENCH_DEVICE_H_

// A device as benchmarks need it: the seam of engine/device/device.h, a clock
// on the stream itself, contents, and the ceilings of its memory. Without a GPU
// the same calls run on the CPU, so that the programs can be tested.

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kedge/bench/bench_tasks.h"
#include "kedge/engine/device/device.h"

namespace kedge {

// Thread safety: one thread at a time.
class BenchDevice {
 public:
  // "cpu", or "cuda:N". kUnimplemented if this build has no CUDA.
  static absl::StatusOr<std::unique_ptr<BenchDevice>> Open(
      absl::string_view name);
  virtual ~BenchDevice() = default;

  virtual Device* device() = 0;
  virtual bool is_gpu() const = 0;
  // The driver's and the runtime's version; "" on a CPU.
  virtual std::string driver() const = 0;
  // Of the device's memory; 0 on a CPU.
  virtual std::uint64_t free_bytes() const = 0;

  // What lies between the two on `stream`, by its own clock. Reading it waits.
  virtual absl::Status StartClock(DeviceStream stream) = 0;
  virtual absl::Status StopClock(DeviceStream stream) = 0;
  virtual absl::StatusOr<double> ReadClockSeconds() = 0;

  // All enqueued.
  virtual absl::Status Fill(const FillTask& task, DeviceStream stream) = 0;
  virtual absl::Status ReadAll(const ReadPart* parts, std::uint32_t part_count,
                               int form, std::uint64_t* sink,
                               DeviceStream stream) = 0;
  virtual absl::Status Scatter(const ScatterBatch& batch,
                               DeviceStream stream) = 0;
};

// A read-only pass over `buffers` (device memory), ready to be enqueued; in
// the form that proved fastest.
class ReadPass {
 public:
  static absl::StatusOr<ReadPass> Make(
      BenchDevice* bench,
      std::span<const std::pair<const std::byte*, std::uint64_t>> buffers,
      DeviceStream stream);
  absl::Status Enqueue(DeviceStream stream) const;

 private:
  absl::Status EnqueueForm(int form, DeviceStream stream) const;

  int form_ = 0;
  BenchDevice* bench_ = nullptr;
  DeviceMemory parts_;
  DeviceMemory sink_;
  std::uint32_t part_count_ = 0;
};

// Host memory to new device memory, `slack` bytes of zeros behind it. Waits.
absl::StatusOr<DeviceMemory> ToDevice(Device* device, const void* data,
                                      std::uint64_t bytes, std::uint64_t slack,
                                      DeviceStream stream);

}  // namespace kedge

#endif  // KEDGE_BENCH_BENCH_DEVICE_H_
