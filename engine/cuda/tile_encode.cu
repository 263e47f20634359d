#include "kedge/engine/cuda/gpu_block.cuh"
#include "kedge/engine/cuda/tile_encode.cuh"
#include "kedge/engine/cuda/tile_encode.h"

namespace kedge {
namespace {

using tile_encode::FastShared;
using tile_encode::HeavyShared;
using tile_encode::kFastThreads;
using tile_encode::kHeavyThreads;

// 1,024 threads keep enough loads under way; 64 registers are all they may have,
// and all they need on Hopper. Older chips have shared memory for fewer.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr std::uint32_t kFastBlocksPerSm = 10;
#else
constexpr std::uint32_t kFastBlocksPerSm = 16;
#endif

__global__ void __launch_bounds__(kFastThreads, kFastBlocksPerSm)
    FastEncodeKernel(const __grid_constant__ EncodeBatch batch) {
  __shared__ FastShared shared;
  GpuBlock block;
  tile_encode::FastEncodeTile(block, shared, batch, blockIdx.x);
}

__global__ void __launch_bounds__(kHeavyThreads, 1)
    HeavyEncodeKernel(const __grid_constant__ EncodeBatch batch) {
  __shared__ HeavyShared shared;
  GpuBlock block;
  const std::uint32_t count = batch.totals->heavy_tiles;
  for (std::uint32_t i = blockIdx.x; i < count; i += gridDim.x) {
    tile_encode::HeavyEncodeTile(block, shared, batch, batch.scratch[i]);
    block.Sync();
  }
}

// Blocks of the second launch: two for each SM of the largest GPUs. They leave
// at once if there is nothing to do.
constexpr std::uint32_t kHeavyBlocks = 288;

}  // namespace

cudaError_t LaunchEncode(const EncodeBatch& batch, cudaStream_t stream) {
  cudaError_t error =
      cudaMemsetAsync(batch.totals, 0, sizeof(EncodeTotals), stream);
  if (error != cudaSuccess || batch.tile_count == 0) return error;
  if (batch.tile_count > 0x7fffffffu) return cudaErrorInvalidValue;
  const auto tiles = static_cast<std::uint32_t>(batch.tile_count);
  FastEncodeKernel<<<tiles, kFastThreads, 0, stream>>>(batch);
  error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  const std::uint32_t blocks = tiles < kHeavyBlocks ? tiles : kHeavyBlocks;
  HeavyEncodeKernel<<<blocks, kHeavyThreads, 0, stream>>>(batch);
  return cudaGetLastError();
}

}  // namespace kedge
