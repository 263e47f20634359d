#ifndef KEDGE_ENGINE_CUDA_BLOCK_CUH_
#define KEDGE_ENGINE_CUDA_BLOCK_CUH_

// What kernel bodies are written against, so that they also run where there is
// no GPU: a *block* of threads. On a GPU it is the thread block
// (gpu_block.cuh), in tests/engine/cuda a block of fibers that g++ compiles.
//
// `Block` is
//   Thread(), Lane(), Warp()         of the calling thread
//   Sync()                           all threads of the block
//   SyncWarp(), Ballot(bool),        all 32 lanes together
//   Shuffle(u32, lane)               the value of that lane
//   ScanAdd(u32), ScanMax(u32)       over the lanes up to this one
//   ReduceAdd(u32), ReduceMax(u32), AddResidues(u64)
//                                    over all lanes, to all of them; the last
//                                    modulo L61's prime
//   AtomicAdd(u32* or u64*, value)   returns what was there; AtomicOr(u32*, v)
//   AtomicMin(u64*, value)
//   Load16(const std::byte*)         16 aligned bytes that nothing writes
//   Load<Unit>(const std::byte*)     one unit, at any alignment of bytes

#include <cstddef>
#include <cstdint>

#ifdef __CUDACC__
#define KEDGE_KERNEL_INLINE __device__ __forceinline__
#define KEDGE_UNROLL _Pragma("unroll")
#define KEDGE_NO_UNROLL _Pragma("unroll 1")
#else
#define KEDGE_KERNEL_INLINE inline
#define KEDGE_UNROLL
#define KEDGE_NO_UNROLL
#endif

namespace kedge {

struct alignas(16) Bytes16 {
  std::uint32_t words[4];
};

KEDGE_KERNEL_INLINE std::uint32_t CountOnes(std::uint32_t x) {
#ifdef __CUDACC__
  return __popc(x);
#else
  return __builtin_popcount(x);
#endif
}
// x > 0.
KEDGE_KERNEL_INLINE std::uint32_t FloorLog2(std::uint32_t x) {
#ifdef __CUDACC__
  return 31 - __clz(x);
#else
  return 31 - __builtin_clz(x);
#endif
}
KEDGE_KERNEL_INLINE std::uint32_t LowestOne(std::uint32_t x) {
#ifdef __CUDACC__
  return __ffs(x) - 1;
#else
  return __builtin_ctz(x);
#endif
}
// a * b + c. Said outright: nvcc turns it into a product of 64 bits where it
// has moved a sign behind the extension.
KEDGE_KERNEL_INLINE std::int64_t MultiplyAdd(std::int32_t a, std::int32_t b,
                                             std::int64_t c) {
#ifdef __CUDACC__
  std::int64_t sum;
  asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(sum) : "r"(a), "r"(b), "l"(c));
  return sum;
#else
  return std::int64_t{a} * b + c;
#endif
}

// `at`, of which nvcc does not know where it comes from: a rare path reads what
// it points to again, where it would be kept in registers for it.
template <typename T>
KEDGE_KERNEL_INLINE const T* Hidden(const T* at) {
#ifdef __CUDACC__
  asm("" : "+l"(at));
#endif
  return at;
}

// The last of `count` >= 1 items in ascending order of which `begins(item)`
// holds; it holds of item 0. All lanes of a warp call it together.
template <typename Block, typename Begins>
KEDGE_KERNEL_INLINE std::uint32_t FindLast(Block& block, std::uint32_t count,
                                           Begins begins) {
  std::uint32_t first = 0;  // it is one of [first, first + count)
  while (count > 1) {
    const std::uint32_t stride = (count + 31) / 32;
    const std::uint32_t probe = block.Lane() * stride;
    const std::uint32_t last =
        FloorLog2(block.Ballot(probe < count && begins(first + probe)) | 1);
    first += last * stride;
    const std::uint32_t left = count - last * stride;
    count = left < stride ? left : stride;
  }
  return first;
}

}  // namespace kedge

#endif  // KEDGE_ENGINE_CUDA_BLOCK_CUH_
