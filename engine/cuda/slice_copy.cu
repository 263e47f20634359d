#include <algorithm>

#include "kedge/engine/cuda/slice_copy.cuh"
#include "kedge/engine/cuda/slice_copy.h"

namespace kedge {
namespace {

using internal::CopyShared;
using internal::DeviceGroup;
using internal::kCopyTileThreads;
using internal::SliceCopyTask;

constexpr std::uint32_t kWarps = 8;  // of a block
// Enough to fill any GPU; each goes on to further chunks or tiles.
constexpr std::uint64_t kMostBlocks = 4096;

__global__ void __launch_bounds__(32 * kWarps)
    CopyRowsKernel(const __grid_constant__ SliceCopyTask task,
                   std::uint64_t chunks_of_row) {
  DeviceGroup<32> warp;
  internal::CopyRowChunks(warp, task, chunks_of_row,
                          std::uint64_t{blockIdx.x} * kWarps + threadIdx.x / 32,
                          std::uint64_t{gridDim.x} * kWarps);
}

template <typename Unit>
__global__ void __launch_bounds__(kCopyTileThreads)
    CopyTilesKernel(const __grid_constant__ SliceCopyTask task,
                    std::uint64_t tile_count, std::uint64_t tiles_of_row) {
  __shared__ CopyShared shared;
  DeviceGroup<kCopyTileThreads> block;
  internal::CopyTiles<Unit>(block, task, tile_count, tiles_of_row, blockIdx.x,
                            gridDim.x, &shared);
}

unsigned Blocks(std::uint64_t needed) {
  return static_cast<unsigned>(std::min(needed, kMostBlocks));
}

}  // namespace

cudaError_t LaunchCopySliceToBox(const std::byte* from, const TileGrid& grid,
                                 const UnitRange& slice, const BoxTarget& box,
                                 cudaStream_t stream) {
  const SliceCopyTask task =
      internal::MakeSliceCopyTask(from, grid, slice, box);
  if (task.row_begin >= task.row_end) return cudaSuccess;
  if (!box.rows_are_contiguous()) {
    const std::uint64_t tiles = internal::CopyTileCount(task);
    const std::uint64_t of_row = internal::CopyTilesOfRow(task);
    switch (box.unit_bytes) {
      case 1:
        CopyTilesKernel<std::uint8_t>
            <<<Blocks(tiles), kCopyTileThreads, 0, stream>>>(task, tiles,
                                                             of_row);
        break;
      case 2:
        CopyTilesKernel<std::uint16_t>
            <<<Blocks(tiles), kCopyTileThreads, 0, stream>>>(task, tiles,
                                                             of_row);
        break;
      default:
        CopyTilesKernel<std::uint32_t>
            <<<Blocks(tiles), kCopyTileThreads, 0, stream>>>(task, tiles,
                                                             of_row);
    }
    return cudaGetLastError();
  }
  const std::uint64_t row_bytes =
      (box.col_end - box.col_begin) * box.unit_bytes;
  if (box.col_begin == 0 && box.col_end == grid.cols &&
      box.row_stride_bytes == static_cast<std::int64_t>(row_bytes)) {
    // One run on both sides.
    const std::uint64_t begin =
        std::max(slice.begin, task.row_begin * grid.cols);
    const std::uint64_t end = std::min(slice.end, task.row_end * grid.cols);
    return cudaMemcpyAsync(box.At(begin / grid.cols, begin % grid.cols),
                           from + (begin - slice.begin) * box.unit_bytes,
                           (end - begin) * box.unit_bytes,
                           cudaMemcpyDeviceToDevice, stream);
  }
  const std::uint64_t of_row = internal::CopyChunksOfRow(task);
  const std::uint64_t chunks = (task.row_end - task.row_begin) * of_row;
  CopyRowsKernel<<<Blocks((chunks - 1) / kWarps + 1), 32 * kWarps, 0, stream>>>(
      task, of_row);
  return cudaGetLastError();
}

}  // namespace kedge
