#ifndef KEDGE_ENGINE_CUDA_TILE_APPLY_H_
#define KEDGE_ENGINE_CUDA_TILE_APPLY_H_

#include <cuda_runtime_api.h>

#include "kedge/engine/device/kernel_tasks.h"

namespace kedge {

// Decodes the listed tiles and adds them into the boxes of their records, or
// only checks them (ApplyBatch::mode). A tile that breaks a rule of
// spec/segment.md writes nothing; the lowest such tile and its fault are in the
// outcome. No byte outside the boxes is written, and none outside
// [payloads - 3, payloads + payload_bytes + 16) is read, whatever tiles and
// payloads say. Records, boxes and grids are trusted.
//
// Everything in `batch` but the struct itself lies in device memory and stays
// until `stream` has passed; `outcome`, and `sums` with kCheck, are written.
// Two records of a batch must not name the same unit of a tensor. Enqueues a
// few kernels on `stream` and returns; no sync, no allocation.
[[nodiscard]] cudaError_t LaunchApply(const ApplyBatch& batch,
                                      cudaStream_t stream);

// Loads the kernels of LaunchApply onto the current device, which otherwise
// happens at the first launch and takes device memory and time then. Waits.
[[nodiscard]] cudaError_t LoadApplyKernels();

}  // namespace kedge

#endif  // KEDGE_ENGINE_CUDA_TILE_APPLY_H_
