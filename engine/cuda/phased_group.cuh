#ifndef KEDGE_ENGINE_CUDA_PHASED_GROUP_CUH_
#define KEDGE_ENGINE_CUDA_PHASED_GROUP_CUH_

// A group of threads as the bodies of kernels see it, so that one source is
// both the kernel and what CI tests without a GPU.
//
// A body is a function template over the group. It is a sequence of phases:
//
//   typename Group::template PerThread<std::uint32_t> count;  // a register
//   group.Phase([&](std::uint32_t t) { count[t] = ...; });
//   const std::uint32_t total = group.ExclusiveSum(count);
//   group.Phase([&](std::uint32_t t) { shared->list[count[t]] = ...; });
//
// Every thread runs a phase once, with its number; a phase ends with a barrier.
// Within a phase, threads share nothing but atomics. What stands between phases
// must be the same in all threads (each runs it on a GPU, nobody in particular
// on the host): it reads shared memory that no phase before the next barrier
// writes, and writes none.
//
// DeviceGroup is a warp or a block of a GPU. HostGroup runs the threads of a
// phase one after the other, in an order of its own each time, so that a body
// that needs a barrier it does not have gives wrong results on the host too.
// What CopyAsync is to fill holds garbage there until the thread has waited.
// It has no stacks to switch: a tile takes microseconds, and tests take many.

#include <cstddef>
#include <cstdint>
#include <cstring>
#ifndef __CUDACC__
#include <cstdlib>
#include <vector>
#endif

#ifdef __CUDACC__
#define KEDGE_BODY __device__ __forceinline__
#define KEDGE_UNROLL _Pragma("unroll")
#define KEDGE_NO_UNROLL _Pragma("unroll 1")
#else
#define KEDGE_BODY inline
#define KEDGE_UNROLL
#define KEDGE_NO_UNROLL
#endif

namespace kedge::internal {

// ---------------------------------------------------------------- on the host
#ifndef __CUDACC__

template <std::uint32_t threads>
class HostGroup {
 public:
  static constexpr std::uint32_t kThreads = threads;

  template <typename T>
  class PerThread {
   public:
    T& operator[](std::uint32_t thread) { return values_[thread]; }

   private:
    T values_[threads] = {};
  };

  explicit HostGroup(std::uint64_t seed) : state_(seed | 1) {}

  template <typename F>
  void Phase(F&& f) {
    // An odd step visits each thread once, as their number is a power of two.
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    const auto step = static_cast<std::uint32_t>(state_ >> 33) | 1;
    const auto first = static_cast<std::uint32_t>(state_ >> 17);
    for (std::uint32_t i = 0; i < threads; ++i) {
      f((first + i * step) & (threads - 1));
    }
  }

  // Replaces each thread's value by the sum over the threads before it; returns
  // the sum over all.
  template <typename T>
  T ExclusiveSum(PerThread<T>& values) {
    T sum = 0;
    for (std::uint32_t t = 0; t < threads; ++t) {
      const T value = values[t];
      values[t] = sum;
      sum += value;
    }
    return sum;
  }
  std::uint32_t Max(PerThread<std::uint32_t>& values) {
    std::uint32_t max = 0;
    for (std::uint32_t t = 0; t < threads; ++t) {
      max = values[t] > max ? values[t] : max;
    }
    return max;
  }
  // Adds the sum over all threads to *to, which may lie in global memory.
  void AddSum(PerThread<std::uint64_t>& values, std::uint64_t* to) {
    for (std::uint32_t t = 0; t < threads; ++t) *to += values[t];
  }
  // The first thread's value.
  template <typename T>
  T FromFirst(PerThread<T>& values) {
    return values[0];
  }

  // Within a phase: begins to copy `bytes` (0 or 16) of global memory to the 16
  // bytes at `to` in shared memory, whose rest becomes 0. Both are multiples of
  // 16; nothing is read if `bytes` is 0. Only the thread itself may use what it
  // copied, once it has waited.
  void CopyAsync(std::uint32_t thread, void* to, std::uintptr_t from,
                 std::uint32_t bytes) {
    if (reinterpret_cast<std::uintptr_t>(to) % 16 != 0 || from % 16 != 0 ||
        (bytes != 0 && bytes != 16)) {
      std::abort();
    }
    std::memset(to, 0xe7, 16);
    copies_.resize(threads);
    copies_[thread].copies.push_back(
        {to, from, bytes, copies_[thread].committed});
  }
  // The thread's copies since the last call are one more group.
  void CommitCopies(std::uint32_t thread) {
    copies_.resize(threads);
    ++copies_[thread].committed;
  }
  // Until all but the thread's last `pending` groups are copied.
  template <std::uint32_t pending>
  void WaitForCopies(std::uint32_t thread) {
    copies_.resize(threads);
    auto& [copies, committed] = copies_[thread];
    std::size_t done = 0;
    for (; done < copies.size(); ++done) {
      const Copy& copy = copies[done];
      if (copy.group + pending >= committed) break;
      std::memset(copy.to, 0, 16);
      if (copy.bytes == 0) continue;
      std::memcpy(copy.to, reinterpret_cast<const void*>(copy.from), 16);
    }
    copies.erase(copies.begin(),
                 copies.begin() + static_cast<std::ptrdiff_t>(done));
  }

 private:
  struct Copy {
    void* to;
    std::uintptr_t from;
    std::uint32_t bytes;
    std::uint64_t group;
  };
  struct Copies {
    std::vector<Copy> copies;  // under way, oldest first
    std::uint64_t committed = 0;
  };

  static_assert((threads & (threads - 1)) == 0);
  std::uint64_t state_;
  std::vector<Copies> copies_;  // [threads], or none yet
};

inline std::uint32_t AtomicAdd(std::uint32_t* to, std::uint32_t value) {
  const std::uint32_t old = *to;
  *to += value;
  return old;
}
inline std::uint64_t AtomicAdd(std::uint64_t* to, std::uint64_t value) {
  const std::uint64_t old = *to;
  *to += value;
  return old;
}
inline void AtomicMin(std::uint64_t* to, std::uint64_t value) {
  *to = value < *to ? value : *to;
}

inline std::uint32_t OnesOf(std::uint32_t word) {
  return static_cast<std::uint32_t>(__builtin_popcount(word));
}
// Of a word that is not 0.
inline std::uint32_t FirstOneOf(std::uint32_t word) {
  return static_cast<std::uint32_t>(__builtin_ctz(word));
}

// ------------------------------------------------------------------- on a GPU
#else

// A warp (32 threads; several groups may share a block, one-dimensional) or a
// whole block. A block needs scratch in shared memory; a warp none.
template <std::uint32_t threads>
class DeviceGroup {
 public:
  static constexpr std::uint32_t kThreads = threads;
  static constexpr bool kWarp = threads == 32;
  static constexpr std::uint32_t kWarps = threads / 32;

  struct Scratch {
    std::uint64_t words[kWarps];
  };

  template <typename T>
  class PerThread {
   public:
    __device__ __forceinline__ T& operator[](std::uint32_t) { return value_; }

   private:
    T value_ = {};
  };

  // Without scratch a block has no ExclusiveSum and no Max.
  __device__ __forceinline__ explicit DeviceGroup(Scratch* scratch = nullptr)
      : scratch_(scratch) {}

  template <typename F>
  __device__ __forceinline__ void Phase(F&& f) {
    f(thread());
    Barrier();
  }

  template <typename T>
  __device__ __forceinline__ T ExclusiveSum(PerThread<T>& values) {
    const T value = values[0];
    T sum = value;
#pragma unroll
    for (std::uint32_t step = 1; step < 32; step *= 2) {
      const T below = __shfl_up_sync(kAll, sum, step);
      if (lane() >= step) sum += below;
    }
    if constexpr (kWarp) {
      values[0] = sum - value;
      return __shfl_sync(kAll, sum, 31);
    } else {
      T* const totals = reinterpret_cast<T*>(scratch_->words);
      if (lane() == 31) totals[thread() / 32] = sum;
      __syncthreads();
      T before = 0;
      T total = 0;
#pragma unroll
      for (std::uint32_t w = 0; w < kWarps; ++w) {
        const T of_warp = totals[w];
        if (w < thread() / 32) before += of_warp;
        total += of_warp;
      }
      __syncthreads();
      values[0] = before + sum - value;
      return total;
    }
  }

  __device__ __forceinline__ std::uint32_t Max(
      PerThread<std::uint32_t>& values) {
    std::uint32_t max = __reduce_max_sync(kAll, values[0]);
    if constexpr (!kWarp) {
      auto* const of_warps = reinterpret_cast<std::uint32_t*>(scratch_->words);
      if (lane() == 0) of_warps[thread() / 32] = max;
      __syncthreads();
      max = 0;
#pragma unroll
      for (std::uint32_t w = 0; w < kWarps; ++w) {
        max = of_warps[w] > max ? of_warps[w] : max;
      }
      __syncthreads();
    }
    return max;
  }

  // One atomic a warp; no barrier.
  __device__ __forceinline__ void AddSum(PerThread<std::uint64_t>& values,
                                         std::uint64_t* to) {
    std::uint64_t sum = values[0];
#pragma unroll
    for (std::uint32_t step = 16; step > 0; step /= 2) {
      sum += __shfl_xor_sync(kAll, sum, step);
    }
    if (lane() == 0 && sum != 0) {
      atomicAdd(reinterpret_cast<unsigned long long*>(to), sum);
    }
  }

  // A warp's.
  template <typename T>
  __device__ __forceinline__ T FromFirst(PerThread<T>& values) {
    static_assert(kWarp);
    return __shfl_sync(kAll, values[0], 0);
  }

  __device__ __forceinline__ void CopyAsync(std::uint32_t, void* to,
                                            std::uintptr_t from,
                                            std::uint32_t bytes) {
    asm volatile(
        "cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
            static_cast<std::uint32_t>(__cvta_generic_to_shared(to))),
        "l"(__cvta_generic_to_global(reinterpret_cast<const void*>(from))),
        "r"(bytes)
        : "memory");
  }
  __device__ __forceinline__ void CommitCopies(std::uint32_t) {
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  template <std::uint32_t pending>
  __device__ __forceinline__ void WaitForCopies(std::uint32_t) {
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
  }

 private:
  static constexpr unsigned kAll = 0xffffffffu;

  __device__ __forceinline__ std::uint32_t thread() const {
    return kWarp ? threadIdx.x % 32 : threadIdx.x;
  }
  __device__ __forceinline__ std::uint32_t lane() const {
    return threadIdx.x % 32;
  }
  __device__ __forceinline__ void Barrier() {
    if constexpr (kWarp) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }

  Scratch* scratch_;
};

KEDGE_BODY std::uint32_t AtomicAdd(std::uint32_t* to, std::uint32_t value) {
  return atomicAdd(to, value);
}
KEDGE_BODY std::uint64_t AtomicAdd(std::uint64_t* to, std::uint64_t value) {
  return atomicAdd(reinterpret_cast<unsigned long long*>(to), value);
}
KEDGE_BODY void AtomicMin(std::uint64_t* to, std::uint64_t value) {
  atomicMin(reinterpret_cast<unsigned long long*>(to), value);
}

KEDGE_BODY std::uint32_t OnesOf(std::uint32_t word) { return __popc(word); }
KEDGE_BODY std::uint32_t FirstOneOf(std::uint32_t word) {
  return __ffs(static_cast<int>(word)) - 1;
}

#endif  // __CUDACC__

}  // namespace kedge::internal

#endif  // KEDGE_ENGINE_CUDA_PHASED_GROUP_CUH_
