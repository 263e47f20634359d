#ifndef KEDGE_ENGINE_CUDA_TILE_ENCODE_H_
#define KEDGE_ENGINE_CUDA_TILE_ENCODE_H_

// Diff + encode on a GPU: old and new units in, the payload of every changed
// tile out. See spec/segment.md.

#include <cuda_runtime_api.h>

#include "kedge/engine/device/kernel_tasks.h"

namespace kedge {

// Fills batch.tiles, batch.arena and batch.totals: of each tile what EncodeTile
// (format/codec.h) gives for its changes within the slice. The order of
// payloads in the arena is any.
//
// Enqueues two fills and two kernels on `stream` and returns; no sync, no
// allocation. All that `batch` points to is device memory, and the caller keeps
// it alive until `stream` has passed this point. A batch has fewer than 2^31
// tiles; a slice is not empty and its units are of 1, 2 or 4 bytes, each at a
// multiple of its size.
[[nodiscard]] cudaError_t LaunchEncode(const EncodeBatch& batch,
                                       cudaStream_t stream);

}  // namespace kedge

#endif  // KEDGE_ENGINE_CUDA_TILE_ENCODE_H_
