#include <algorithm>

#include "kedge/engine/cuda/l61_sum.cuh"
#include "kedge/engine/cuda/l61_sum.h"

namespace kedge {
namespace {

using internal::DeviceGroup;
using internal::kSumThreads;
using internal::kSumWarps;
using internal::RowShared;
using internal::SharedWeights;
using internal::SumTask;
using internal::TileShared;

// Blocks on a processor. Rows: 128 KiB of copies under way, and 128 registers a
// thread, a quarter of them A. Vectors: 48 KiB of loads under way beside those
// that are worked on, in 80 registers.
constexpr std::uint32_t kRowBlocks = 2;
constexpr std::uint32_t kVectorBlocks = 3;
// Columns: 256 bytes a thread under way.
constexpr std::uint32_t kColumnBlocks = 2;
constexpr std::uint32_t kTileBlocks = 3;

__global__ void __launch_bounds__(kSumThreads, kRowBlocks)
    RowKernel(const __grid_constant__ SumTask task) {
  extern __shared__ uint4 dynamic_shared[];
  const std::uint32_t w = threadIdx.x / 32;
  DeviceGroup<32> warp;
  internal::SumRowItems(warp, task, w, blockIdx.x, gridDim.x,
                        reinterpret_cast<RowShared*>(dynamic_shared) + w);
}

__global__ void __launch_bounds__(kSumThreads, kVectorBlocks)
    VectorKernel(const __grid_constant__ SumTask task) {
  extern __shared__ uint4 dynamic_shared[];
  auto* const weights = reinterpret_cast<SharedWeights*>(dynamic_shared);
  DeviceGroup<kSumThreads> block;
  internal::SplitWeights(block, task.l61.a, weights);
  DeviceGroup<32> warp;
  internal::SumVectorItems(
      warp, task, std::uint64_t{blockIdx.x} * kSumWarps + threadIdx.x / 32,
      std::uint64_t{gridDim.x} * kSumWarps, *weights);
}

__global__ void __launch_bounds__(kSumThreads, kColumnBlocks)
    ColumnKernel(const __grid_constant__ SumTask task) {
  extern __shared__ uint4 dynamic_shared[];
  auto* const weights = reinterpret_cast<SharedWeights*>(dynamic_shared);
  DeviceGroup<kSumThreads> block;
  internal::SplitColumnWeights(block, task.l61.a, weights);
  DeviceGroup<32> warp;
  internal::SumColumnItems(
      warp, task, std::uint64_t{blockIdx.x} * kSumWarps + threadIdx.x / 32,
      std::uint64_t{gridDim.x} * kSumWarps, *weights);
}

__global__ void __launch_bounds__(kSumThreads, kTileBlocks)
    TileKernel(const __grid_constant__ SumTask task) {
  extern __shared__ uint4 dynamic_shared[];
  DeviceGroup<kSumThreads> block;
  internal::SumTileItems(block, task, blockIdx.x, gridDim.x,
                         reinterpret_cast<TileShared*>(dynamic_shared));
}

__global__ void ResidueKernel(const std::uint64_t* halves,
                              std::uint64_t* residues, std::uint32_t count) {
  const std::uint64_t i = std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < count) residues[i] = internal::ResidueOfHalves(halves, i);
}

constexpr std::size_t kRowSharedBytes = kSumWarps * sizeof(RowShared);

// As many blocks as run at once, or as there is work for.
cudaError_t LaunchKernel(void (*kernel)(SumTask), const SumTask& task,
                         std::uint32_t blocks, std::size_t shared_bytes,
                         cudaStream_t stream) {
  if (task.item_count == 0) return cudaSuccess;
  kernel<<<std::min(task.item_count, blocks), kSumThreads, shared_bytes,
           stream>>>(task);
  return cudaGetLastError();
}

cudaError_t LoadKernel(void (*kernel)(SumTask), std::size_t shared_bytes) {
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(shared_bytes));
  if (error != cudaSuccess) return error;
  // All of L1 that can be: weights pass it by.
  return cudaFuncSetAttribute(kernel,
                              cudaFuncAttributePreferredSharedMemoryCarveout,
                              cudaSharedmemCarveoutMaxShared);
}

}  // namespace

cudaError_t LaunchSums(const SumWork& work, cudaStream_t stream) {
  if (work.output_count == 0) return cudaSuccess;
  cudaError_t error = cudaMemsetAsync(
      work.scratch, 0,
      SumScratchWords(work.output_count) * sizeof(*work.scratch), stream);
  if (error != cudaSuccess) return error;
  int device = 0;
  error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  int sm_count = 0;
  error =
      cudaDeviceGetAttribute(&sm_count, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  const auto processors = static_cast<std::uint32_t>(sm_count);

  static_assert(kSumCounters == kSumWarps + 2);
  std::uint64_t* const halves = work.scratch + kSumCounters;
  SumTask task{work.items, work.row_items, work.l61, halves, work.scratch};
  error = LaunchKernel(RowKernel, task, kRowBlocks * processors,
                       kRowSharedBytes, stream);
  if (error != cudaSuccess) return error;
  task.items += task.item_count;
  task.item_count = work.vector_items;
  task.given += kSumWarps;
  error = LaunchKernel(VectorKernel, task, kVectorBlocks * processors,
                       sizeof(SharedWeights), stream);
  if (error != cudaSuccess) return error;
  task.items += task.item_count;
  task.item_count = work.column_items;
  ++task.given;
  error = LaunchKernel(ColumnKernel, task, kColumnBlocks * processors,
                       sizeof(SharedWeights), stream);
  if (error != cudaSuccess) return error;
  task.items += task.item_count;
  task.item_count = work.tile_items;
  error = LaunchKernel(TileKernel, task, kTileBlocks * processors,
                       sizeof(TileShared), stream);
  if (error != cudaSuccess) return error;
  ResidueKernel<<<(work.output_count - 1) / 256 + 1, 256, 0, stream>>>(
      halves, work.residues, work.output_count);
  return cudaGetLastError();
}

cudaError_t LoadSumKernels() {
  cudaError_t error = LoadKernel(RowKernel, kRowSharedBytes);
  if (error != cudaSuccess) return error;
  error = LoadKernel(VectorKernel, sizeof(SharedWeights));
  if (error != cudaSuccess) return error;
  error = LoadKernel(ColumnKernel, sizeof(SharedWeights));
  if (error != cudaSuccess) return error;
  error = LoadKernel(TileKernel, sizeof(TileShared));
  if (error != cudaSuccess) return error;
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, ResidueKernel);
}

}  // namespace kedge
