#include "kedge/bench/probe_kernels.h"

namespace kedge {
namespace {

__global__ void __launch_bounds__(256) FillKernel(FillTask task) {
  const std::uint64_t units = task.box.unit_count();
  const std::uint64_t stride = std::uint64_t{gridDim.x} * blockDim.x;
  for (std::uint64_t i = std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x;
       i < units; i += stride) {
    task.Write(i);
  }
}

// One block after the other takes a part; kLoads loads of a thread in flight.
template <int kLoads>
__global__ void __launch_bounds__(512)
    ReadAllKernel(const ReadPart* __restrict__ parts, std::uint32_t part_count,
                  std::uint64_t* sink) {
  std::uint32_t mix = 0;
  for (std::uint32_t p = blockIdx.x; p < part_count; p += gridDim.x) {
    const auto* const words = reinterpret_cast<const uint4*>(parts[p].data);
    const std::uint64_t count = parts[p].words;
    std::uint64_t i = threadIdx.x;
    for (; i + (kLoads - 1) * blockDim.x < count; i += kLoads * blockDim.x) {
      uint4 loaded[kLoads];
#pragma unroll
      for (int k = 0; k < kLoads; ++k) {
        loaded[k] =
            __ldcs(words + i + static_cast<std::uint64_t>(k) * blockDim.x);
      }
#pragma unroll
      for (int k = 0; k < kLoads; ++k) {
        mix ^= loaded[k].x ^ loaded[k].y ^ loaded[k].z ^ loaded[k].w;
      }
    }
    for (; i < count; i += blockDim.x) {
      const uint4 word = words[i];
      mix ^= word.x ^ word.y ^ word.z ^ word.w;
    }
  }
  // Nearly never, but the compiler cannot know.
  if (mix == 0x5bd1e995u) *sink = mix;
}

__global__ void __launch_bounds__(128) ScatterKernel(ScatterBatch batch) {
  for (std::uint32_t r = blockIdx.x; r < batch.run_count; r += gridDim.x) {
    const ScatterRun run = batch.runs[r];
    for (std::uint32_t i = threadIdx.x; i < run.count; i += blockDim.x) {
      batch.Write(run, i);
    }
  }
}

}  // namespace

cudaError_t LaunchFill(const FillTask& task, cudaStream_t stream) {
  const std::uint64_t units = task.box.unit_count();
  if (units == 0) return cudaSuccess;
  const std::uint64_t blocks = (units + 1023) / 1024;
  FillKernel<<<static_cast<unsigned>(blocks < 65536 ? blocks : 65536), 256, 0,
               stream>>>(task);
  return cudaGetLastError();
}

cudaError_t LaunchReadAll(const ReadPart* parts, std::uint32_t part_count,
                          int form, std::uint64_t* sink, cudaStream_t stream) {
  if (part_count == 0) return cudaSuccess;
  int device = 0;
  int processors = 0;
  if (cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) {
    return error;
  }
  if (cudaError_t error = cudaDeviceGetAttribute(
          &processors, cudaDevAttrMultiProcessorCount, device);
      error != cudaSuccess) {
    return error;
  }
  const std::uint32_t most = static_cast<std::uint32_t>(processors) * 4;
  const std::uint32_t blocks = most < part_count ? most : part_count;
  if (form == 0) {
    ReadAllKernel<2><<<blocks, 512, 0, stream>>>(parts, part_count, sink);
  } else if (form == 1) {
    ReadAllKernel<4><<<blocks, 512, 0, stream>>>(parts, part_count, sink);
  } else {
    ReadAllKernel<8><<<blocks, 512, 0, stream>>>(parts, part_count, sink);
  }
  return cudaGetLastError();
}

cudaError_t LaunchScatter(const ScatterBatch& batch, cudaStream_t stream) {
  if (batch.run_count == 0) return cudaSuccess;
  ScatterKernel<<<batch.run_count, 128, 0, stream>>>(batch);
  return cudaGetLastError();
}

}  // namespace kedge
