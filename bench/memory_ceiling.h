#ifndef KEDGE_BENCH_MEMORY_CEILING_H_
#define KEDGE_BENCH_MEMORY_CEILING_H_

// Plain loops over memory: what a core can read at best. Benchmarks quote their
// rates beside these.

#include <cstddef>
#include <cstdint>

namespace kedge {

// Sums of the 64-bit words of `size` bytes, a multiple of 64.
std::uint64_t ReadOneArray(const std::byte* bytes, std::uint64_t size);
// The same of a[i] XOR b[i].
std::uint64_t ReadTwoArrays(const std::byte* a, const std::byte* b,
                            std::uint64_t size);

}  // namespace kedge

#endif  // KEDGE_BENCH_MEMORY_CEILING_H_
