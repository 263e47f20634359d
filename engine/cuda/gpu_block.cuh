#ifndef KEDGE_ENGINE_CUDA_GPU_BLOCK_CUH_
#define KEDGE_ENGINE_CUDA_GPU_BLOCK_CUH_

// A thread block of a GPU, as kernel bodies ask for it: block.cuh.
// One-dimensional blocks of whole warps.

#include <cstddef>
#include <cstdint>

#include "kedge/engine/cuda/block.cuh"
#include "kedge/format/l61.h"

namespace kedge {

struct GpuBlock {
  static constexpr std::uint32_t kAllLanes = 0xffffffffu;

  __device__ static std::uint32_t Thread() { return threadIdx.x; }
  __device__ static std::uint32_t Lane() { return threadIdx.x & 31; }
  __device__ static std::uint32_t Warp() { return threadIdx.x >> 5; }

  __device__ static void Sync() { __syncthreads(); }
  __device__ static void SyncWarp() { __syncwarp(); }
  __device__ static std::uint32_t Ballot(bool value) {
    return __ballot_sync(kAllLanes, value);
  }
  __device__ static std::uint32_t Shuffle(std::uint32_t value,
                                          std::uint32_t lane) {
    return __shfl_sync(kAllLanes, value, lane);
  }
  __device__ static std::uint32_t ScanAdd(std::uint32_t value) {
#pragma unroll
    for (std::uint32_t distance = 1; distance < 32; distance *= 2) {
      // The shuffle's own predicate says whether there is a lane below.
      asm volatile(
          "{ .reg .u32 below; .reg .pred some;\n"
          "  shfl.sync.up.b32 below|some, %0, %1, 0, 0xffffffff;\n"
          "  @some add.u32 %0, %0, below; }"
          : "+r"(value)
          : "r"(distance));
    }
    return value;
  }
  __device__ static std::uint32_t ScanMax(std::uint32_t value) {
#pragma unroll
    for (std::uint32_t distance = 1; distance < 32; distance *= 2) {
      const std::uint32_t below = __shfl_up_sync(kAllLanes, value, distance);
      if (Lane() >= distance && below > value) value = below;
    }
    return value;
  }
  __device__ static std::uint32_t ReduceAdd(std::uint32_t value) {
    return __reduce_add_sync(kAllLanes, value);
  }
  __device__ static std::uint32_t ReduceMax(std::uint32_t value) {
    return __reduce_max_sync(kAllLanes, value);
  }
  __device__ static std::uint64_t AddResidues(std::uint64_t residue) {
    // In three parts, whose sums stay below 2^26.
    constexpr std::uint32_t kLow = (1u << 21) - 1;
    const std::uint64_t low =
        ReduceAdd(static_cast<std::uint32_t>(residue) & kLow);
    const std::uint64_t middle =
        ReduceAdd(static_cast<std::uint32_t>(residue >> 21) & kLow);
    const std::uint32_t high =
        ReduceAdd(static_cast<std::uint32_t>(residue >> 42));
    // 2^61 is 1: what of `high` is shifted beyond it comes in below.
    return L61Reduce((std::uint64_t{high & ((1u << 19) - 1)} << 42) +
                     (high >> 19) + (middle << 21) + low);
  }

  __device__ static std::uint32_t AtomicAdd(std::uint32_t* to,
                                            std::uint32_t value) {
    return atomicAdd(to, value);
  }
  __device__ static std::uint64_t AtomicAdd(std::uint64_t* to,
                                            std::uint64_t value) {
    return atomicAdd(reinterpret_cast<unsigned long long*>(to),
                     static_cast<unsigned long long>(value));
  }
  __device__ static void AtomicOr(std::uint32_t* to, std::uint32_t value) {
    atomicOr(to, value);
  }

  __device__ static void AtomicMin(std::uint64_t* to, std::uint64_t value) {
    atomicMin(reinterpret_cast<unsigned long long*>(to),
              static_cast<unsigned long long>(value));
  }

  // Weights pass through once: they must not push the L61 table out of L1.
  __device__ static Bytes16 Load16(const std::byte* from) {
    Bytes16 v;
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.words[0]), "=r"(v.words[1]), "=r"(v.words[2]), "=r"(v.words[3])
        : "l"(__cvta_generic_to_global(from)));
    return v;
  }
  template <typename Unit>
  __device__ static Unit Load(const std::byte* from) {
    return *reinterpret_cast<const Unit*>(from);
  }
};

}  // namespace kedge

#endif  // KEDGE_ENGINE_CUDA_GPU_BLOCK_CUH_
