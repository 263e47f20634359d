#include "kedge/engine/cuda/gpu_block.cuh"
#include "kedge/engine/cuda/quantise.cuh"
#include "kedge/engine/cuda/quantise.h"

namespace kedge {
namespace {

__global__ void __launch_bounds__(quantise::kThreads, 4)
    QuantiseKernel(const __grid_constant__ QuantiseBatch batch) {
  __shared__ quantise::Shared shared;
  GpuBlock block;
  quantise::QuantiseBlock(block, shared, batch, blockIdx.x);
}

}  // namespace

cudaError_t LaunchQuantise(const QuantiseBatch& batch, cudaStream_t stream) {
  const cudaError_t error = cudaMemsetAsync(
      batch.first_bad_block, 0xff, sizeof(*batch.first_bad_block), stream);
  if (error != cudaSuccess || batch.block_count == 0) return error;
  if (batch.block_count > 0x7fffffffu) return cudaErrorInvalidValue;
  const auto blocks = static_cast<std::uint32_t>(batch.block_count);
  QuantiseKernel<<<blocks, quantise::kThreads, 0, stream>>>(batch);
  return cudaGetLastError();
}

}  // namespace kedge
