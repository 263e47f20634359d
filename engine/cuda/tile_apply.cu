#include "kedge/engine/cuda/tile_apply.cuh"
#include "kedge/engine/cuda/tile_apply.h"

namespace kedge {
namespace {

using internal::ApplyShared;
using internal::DeviceGroup;
using internal::HeavyApply;
using internal::LightApply;
using internal::MediumApply;

// Four tiles a block, one a warp: 32 warps and 64 registers a thread. A tile is
// under way for some 5 us; 32 of them on each of 132 processors would finish
// 0.93 M tiles in 1.1 ms if memory were not the limit.
constexpr std::uint32_t kLightWarps = 4;
constexpr std::uint32_t kLightBlocksPerSm = 8;
constexpr std::uint32_t kMediumBlocksPerSm = 6;
constexpr std::uint32_t kHeavyBlocksPerSm = 2;

__global__ void StartKernel(ApplyOutcome* outcome) {
  internal::StartOutcome(outcome);
}

__global__ void FinishKernel(ApplyOutcome* outcome) {
  internal::FinishOutcome(outcome);
}

template <ApplyMode mode>
__global__ void __launch_bounds__(32 * kLightWarps, kLightBlocksPerSm)
    ApplyLightKernel(const __grid_constant__ ApplyBatch batch) {
  __shared__ ApplyShared<LightApply> shared[kLightWarps];
  DeviceGroup<32> warp;
  const std::uint32_t w = threadIdx.x / 32;
  internal::ApplyLightTiles<mode>(
      warp, batch, std::uint64_t{blockIdx.x} * kLightWarps + w,
      std::uint64_t{gridDim.x} * kLightWarps, &shared[w]);
}

template <ApplyMode mode, typename Size, std::uint32_t tile_class,
          std::uint32_t blocks_per_sm>
__global__ void __launch_bounds__(Size::kThreads, blocks_per_sm)
    ApplyLargeKernel(const __grid_constant__ ApplyBatch batch) {
  extern __shared__ uint4 dynamic_shared[];
  __shared__ typename DeviceGroup<Size::kThreads>::Scratch scratch;
  DeviceGroup<Size::kThreads> block(&scratch);
  internal::ApplyLargeTiles<mode>(
      block, batch, tile_class, blockIdx.x, gridDim.x,
      reinterpret_cast<ApplyShared<Size>*>(dynamic_shared));
}

template <ApplyMode mode, typename Size, std::uint32_t tile_class,
          std::uint32_t blocks_per_sm>
cudaError_t LaunchLarge(const ApplyBatch& batch, std::uint64_t sm_count,
                        cudaStream_t stream) {
  auto* const kernel = ApplyLargeKernel<mode, Size, tile_class, blocks_per_sm>;
  constexpr int kSharedBytes = sizeof(ApplyShared<Size>);
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error != cudaSuccess) return error;
  const std::uint64_t most = sm_count * blocks_per_sm;
  const auto blocks =
      static_cast<unsigned>(batch.tile_count < most ? batch.tile_count : most);
  kernel<<<blocks, Size::kThreads, kSharedBytes, stream>>>(batch);
  return cudaGetLastError();
}

// Each kernel passes over all tiles and takes those of its size: reading a
// header of 32 bytes costs less than a list of them would.
template <ApplyMode mode>
cudaError_t LaunchSizes(const ApplyBatch& batch, std::uint64_t sm_count,
                        cudaStream_t stream) {
  const std::uint64_t most = sm_count * kLightBlocksPerSm;
  const std::uint64_t needed = (batch.tile_count - 1) / kLightWarps + 1;
  const auto blocks = static_cast<unsigned>(needed < most ? needed : most);
  ApplyLightKernel<mode><<<blocks, 32 * kLightWarps, 0, stream>>>(batch);
  cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  error = LaunchLarge<mode, MediumApply, 1, kMediumBlocksPerSm>(batch, sm_count,
                                                                stream);
  if (error != cudaSuccess) return error;
  return LaunchLarge<mode, HeavyApply, 2, kHeavyBlocksPerSm>(batch, sm_count,
                                                             stream);
}

template <ApplyMode mode>
cudaError_t LoadSizes() {
  cudaFuncAttributes attributes;
  cudaError_t error =
      cudaFuncGetAttributes(&attributes, ApplyLightKernel<mode>);
  if (error != cudaSuccess) return error;
  error = cudaFuncGetAttributes(
      &attributes, ApplyLargeKernel<mode, MediumApply, 1, kMediumBlocksPerSm>);
  if (error != cudaSuccess) return error;
  return cudaFuncGetAttributes(
      &attributes, ApplyLargeKernel<mode, HeavyApply, 2, kHeavyBlocksPerSm>);
}

}  // namespace

cudaError_t LaunchApply(const ApplyBatch& batch, cudaStream_t stream) {
  int device = 0;
  int sm_count = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error =
      cudaDeviceGetAttribute(&sm_count, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;

  StartKernel<<<1, 1, 0, stream>>>(batch.outcome);
  error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  if (batch.mode == ApplyMode::kCheck && batch.record_count > 0) {
    error = cudaMemsetAsync(batch.sums, 0,
                            batch.record_count * sizeof(RecordSums), stream);
    if (error != cudaSuccess) return error;
  }
  if (batch.tile_count == 0) return cudaSuccess;

  error = batch.mode == ApplyMode::kCheck
              ? LaunchSizes<ApplyMode::kCheck>(batch, sm_count, stream)
              : LaunchSizes<ApplyMode::kApply>(batch, sm_count, stream);
  if (error != cudaSuccess) return error;
  FinishKernel<<<1, 1, 0, stream>>>(batch.outcome);
  return cudaGetLastError();
}

cudaError_t LoadApplyKernels() {
  cudaFuncAttributes attributes;
  cudaError_t error = cudaFuncGetAttributes(&attributes, StartKernel);
  if (error != cudaSuccess) return error;
  error = cudaFuncGetAttributes(&attributes, FinishKernel);
  if (error != cudaSuccess) return error;
  error = LoadSizes<ApplyMode::kApply>();
  if (error != cudaSuccess) return error;
  return LoadSizes<ApplyMode::kCheck>();
}

}  // namespace kedge
