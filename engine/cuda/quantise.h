#ifndef KEDGE_ENGINE_CUDA_QUANTISE_H_
#define KEDGE_ENGINE_CUDA_QUANTISE_H_

// bf16 to f8_e4m3 with a scale for each block of 128 x 128, on a GPU. See
// spec/fp8.md; engine/cpu/quantise.h is the same on a core.

#include <cuda_runtime_api.h>

#include "kedge/engine/device/kernel_tasks.h"

namespace kedge {

// Writes values and scales of every task, and *batch.first_bad_block. Values of
// a block with a NaN or an infinity, and its scale, are written too, and mean
// nothing.
//
// Enqueues a fill and a kernel on `stream` and returns; no sync, no allocation.
// All that `batch` points to is device memory, and the caller keeps it alive
// until `stream` has passed this point. Fastest where rows of the source begin
// at multiples of 16 bytes and those of the values at multiples of 8. At most
// 2^31 - 1 blocks; floor is in [kFp8LeastFloor, kFp8GreatestFloor].
[[nodiscard]] cudaError_t LaunchQuantise(const QuantiseBatch& batch,
                                         cudaStream_t stream);

}  // namespace kedge

#endif  // KEDGE_ENGINE_CUDA_QUANTISE_H_
