#ifndef KEDGE_BENCH_PASS_KERNELS_H_
#define KEDGE_BENCH_PASS_KERNELS_H_

// Kernels that do nothing but move the bytes that kedge's kernels must move:
// the ceilings beside which their times stand.

#include <cuda_runtime_api.h>

#include <cstdint>

namespace kedge {

// Forms of one read-only pass, with 2, 4 or 8 loads of 16 bytes from each array
// in flight in a thread. Which is fastest depends on the device.
inline constexpr int kReadPassForms = 3;

// Adds the number of 16-byte words in which `a` and `b` differ to `*count`:
// each byte is read once, and next to nothing is written.
//
// a, b   device, [words] of 16 bytes, aligned to 16
// count  device
// form   in [0, kReadPassForms)
[[nodiscard]] cudaError_t LaunchCountDifferentWords(
    const void* a, const void* b, std::uint64_t words, int form,
    unsigned long long* count, cudaStream_t stream);

// Reads 2 bytes and writes 1, for each of `elements` (a multiple of 16): what a
// quantiser to 8 bits cannot do without.
//
// from  device, [elements] u16, aligned to 16
// to    device, [elements] u8, aligned to 16
[[nodiscard]] cudaError_t LaunchHalveBytes(const void* from, void* to,
                                           std::uint64_t elements,
                                           cudaStream_t stream);

}  // namespace kedge

#endif  // KEDGE_BENCH_PASS_KERNELS_H_
