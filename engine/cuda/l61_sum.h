#ifndef KEDGE_ENGINE_CUDA_L61_SUM_H_
#define KEDGE_ENGINE_CUDA_L61_SUM_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "kedge/engine/cuda/l61_plan.h"
#include "kedge/engine/device/kernel_tasks.h"

namespace kedge {

// Words of SumWork::scratch for so many outputs: how much of the work has been
// given out, then two parts of each sum.
inline constexpr std::uint32_t kSumCounters = 10;
constexpr std::size_t SumScratchWords(std::uint32_t output_count) {
  return kSumCounters + std::size_t{2} * output_count;
}

// What LaunchSums works on; all of it device memory that stays until the stream
// has passed. One launch at a time.
struct SumWork {
  const SumItem* items = nullptr;  // SumPlan::items
  std::uint32_t row_items = 0;
  std::uint32_t vector_items = 0;
  std::uint32_t column_items = 0;
  std::uint32_t tile_items = 0;
  std::uint32_t output_count = 0;     // every item's output is below
  std::uint64_t* scratch = nullptr;   // [SumScratchWords(output_count)]
  std::uint64_t* residues = nullptr;  // [output_count], written: in [0, p)
  DeviceL61 l61;
};

// L61 of everything that the items name, added up by output; an output without
// items is 0. Enqueues a fill, a kernel for each kind of item that there is and
// one more on `stream` and returns; no sync, no allocation. LoadSumKernels has
// been called on the current device.
[[nodiscard]] cudaError_t LaunchSums(const SumWork& work, cudaStream_t stream);

// Loads the kernels of LaunchSums onto the current device and sets what they
// need. Once is enough; again is harmless. Takes device memory the first time;
// waits.
[[nodiscard]] cudaError_t LoadSumKernels();

}  // namespace kedge

#endif  // KEDGE_ENGINE_CUDA_L61_SUM_H_
