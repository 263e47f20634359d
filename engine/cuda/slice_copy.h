#ifndef KEDGE_ENGINE_CUDA_SLICE_COPY_H_
#define KEDGE_ENGINE_CUDA_SLICE_COPY_H_

#include <cuda_runtime_api.h>

#include <cstddef>

#include "kedge/format/box_target.h"
#include "kedge/format/tile_grid.h"

namespace kedge {

// Copies the units of `slice`, contiguous at `from`, that lie in `box` to their
// places; both in device memory, neither over the other. Units lie at multiples
// of their size. Enqueues one copy or kernel on `stream` (nothing if slice and
// box share no unit) and returns; no sync, no allocation.
[[nodiscard]] cudaError_t LaunchCopySliceToBox(const std::byte* from,
                                               const TileGrid& grid,
                                               const UnitRange& slice,
                                               const BoxTarget& box,
                                               cudaStream_t stream);

}  // namespace kedge

#endif  // KEDGE_ENGINE_CUDA_SLICE_COPY_H_
