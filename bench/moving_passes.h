#ifndef KEDGE_BENCH_MOVING_PASSES_H_
#define KEDGE_BENCH_MOVING_PASSES_H_

// Passes that only move bytes: the ceilings beside kedge's kernels. On a device
// that is no GPU they run on the CPU at once.

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kedge/bench/bench_device.h"

namespace kedge {

// Reads two arrays, counts the 16-byte words in which they differ, and writes
// nothing else.
class DifferencePass {
 public:
  static absl::StatusOr<DifferencePass> Make(BenchDevice* bench,
                                             DeviceStream stream);

  // Takes the form of the kernel that is fastest over these arrays. Waits.
  absl::Status Tune(const void* a, const void* b, std::uint64_t bytes,
                    DeviceStream stream);
  // `bytes` of each, a multiple of 16.
  absl::Status Enqueue(const void* a, const void* b, std::uint64_t bytes,
                       DeviceStream stream);
  // What was counted since the last call. Waits.
  absl::StatusOr<std::uint64_t> WaitForCount(DeviceStream stream);
  int form() const { return form_; }

 private:
  BenchDevice* bench_ = nullptr;
  DeviceMemory count_;
  DeviceMemory pinned_;
  int form_ = 0;
};

// Reads `elements` (a multiple of 16) u16 and writes their low bytes.
absl::Status EnqueueHalveBytes(BenchDevice& bench, const void* from, void* to,
                               std::uint64_t elements, DeviceStream stream);

}  // namespace kedge

#endif  // KEDGE_BENCH_MOVING_PASSES_H_
