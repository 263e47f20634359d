#include "kedge/bench/pass_kernels.h"

namespace kedge {
namespace {

constexpr int kThreads = 256;

__device__ bool Differ(const uint4& a, const uint4& b) {
  return ((a.x ^ b.x) | (a.y ^ b.y) | (a.z ^ b.z) | (a.w ^ b.w)) != 0;
}

// Block `b` takes the words [b, b + 1) * kThreads * kPairs.
template <int kPairs>
__global__ void __launch_bounds__(kThreads)
    CountDifferentWords(const uint4* __restrict__ a,
                        const uint4* __restrict__ b, std::uint64_t words,
                        unsigned long long* count) {
  const std::uint64_t first =
      std::uint64_t{blockIdx.x} * (kThreads * kPairs) + threadIdx.x;
  int mine = 0;
  if (first + std::uint64_t{kPairs - 1} * kThreads < words) {
    uint4 left[kPairs];
    uint4 right[kPairs];
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      left[i] = __ldcs(a + first + std::uint64_t{kThreads} * i);
      right[i] = __ldcs(b + first + std::uint64_t{kThreads} * i);
    }
#pragma unroll
    for (int i = 0; i < kPairs; ++i) mine += Differ(left[i], right[i]);
  } else {
    for (int i = 0; i < kPairs; ++i) {
      const std::uint64_t word = first + std::uint64_t{kThreads} * i;
      if (word < words) mine += Differ(a[word], b[word]);
    }
  }
  // One atomic a block, so that a count which every block adds to does not
  // become the limit.
  __shared__ int sums[kThreads / 32];
  mine = static_cast<int>(
      __reduce_add_sync(0xffffffffu, static_cast<unsigned>(mine)));
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = mine;
  __syncthreads();
  if (threadIdx.x == 0) {
    int sum = 0;
    for (const int part : sums) sum += part;
    if (sum != 0) atomicAdd(count, static_cast<unsigned long long>(sum));
  }
}

template <int kPairs>
cudaError_t LaunchPass(const void* a, const void* b, std::uint64_t words,
                       unsigned long long* count, cudaStream_t stream) {
  const std::uint64_t blocks =
      (words + kThreads * kPairs - 1) / (kThreads * kPairs);
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffffu) return cudaErrorInvalidConfiguration;
  CountDifferentWords<kPairs>
      <<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(
          static_cast<const uint4*>(a), static_cast<const uint4*>(b), words,
          count);
  return cudaGetLastError();
}

constexpr int kHalveLoads = 4;

// The low bytes of eight u16.
__device__ uint2 LowBytes(const uint4& x) {
  return make_uint2(__byte_perm(x.x, x.y, 0x6420),
                    __byte_perm(x.z, x.w, 0x6420));
}

__global__ void __launch_bounds__(kThreads)
    HalveBytes(const uint4* __restrict__ from, uint2* __restrict__ to,
               std::uint64_t words) {
  const std::uint64_t first =
      std::uint64_t{blockIdx.x} * (kThreads * kHalveLoads) + threadIdx.x;
  if (first + std::uint64_t{kHalveLoads - 1} * kThreads < words) {
    uint4 in[kHalveLoads];
#pragma unroll
    for (int i = 0; i < kHalveLoads; ++i) {
      in[i] = __ldcs(from + first + std::uint64_t{kThreads} * i);
    }
#pragma unroll
    for (int i = 0; i < kHalveLoads; ++i) {
      __stcs(to + first + std::uint64_t{kThreads} * i, LowBytes(in[i]));
    }
  } else {
    for (int i = 0; i < kHalveLoads; ++i) {
      const std::uint64_t word = first + std::uint64_t{kThreads} * i;
      if (word < words) to[word] = LowBytes(from[word]);
    }
  }
}

}  // namespace

cudaError_t LaunchCountDifferentWords(const void* a, const void* b,
                                      std::uint64_t words, int form,
                                      unsigned long long* count,
                                      cudaStream_t stream) {
  switch (form) {
    case 0:
      return LaunchPass<4>(a, b, words, count, stream);
    case 1:
      return LaunchPass<8>(a, b, words, count, stream);
    default:
      return LaunchPass<2>(a, b, words, count, stream);
  }
}

cudaError_t LaunchHalveBytes(const void* from, void* to, std::uint64_t elements,
                             cudaStream_t stream) {
  const std::uint64_t words = elements / 8;
  const std::uint64_t blocks =
      (words + kThreads * kHalveLoads - 1) / (kThreads * kHalveLoads);
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffffu) return cudaErrorInvalidConfiguration;
  HalveBytes<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(
      static_cast<const uint4*>(from), static_cast<uint2*>(to), words);
  return cudaGetLastError();
}

}  // namespace kedge
