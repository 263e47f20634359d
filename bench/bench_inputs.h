#ifndef KEDGE_BENCH_BENCH_INPUTS_H_
#define KEDGE_BENCH_BENCH_INPUTS_H_

// Weights in host memory that change as in a training step, and plain writes of
// as many bytes.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace kedge {

// Runs body(begin, end) on parts of [0, count), on one thread a core.
void InParallel(std::uint64_t count,
                const std::function<void(std::uint64_t, std::uint64_t)>& body);

// Fills `weights` with bf16, or f32, of N(0, 0.02). `seed` alone decides.
void FillNormal(std::span<std::uint16_t> weights, std::uint64_t seed);
void FillNormal(std::span<std::uint32_t> weights, std::uint64_t seed);

// Changes about a share `density` of the units in place, as an optimizer step
// does: nine of ten by one in the last place, the others by 2, 3, ..., each
// half as often as the one before. Returns how many. For u8, u16 and u32.
template <typename Unit>
std::uint64_t Perturb(std::span<Unit> units, double density,
                      std::uint64_t seed);

// Entropy of such changes, in bits per unit of the tensor.
double EntropyOfPerturb(double density);

// The first line of /proc/driver/nvidia/version, "" where there is none.
std::string KernelDriver();

// Writes files of these sizes into `directory`, which it creates, with 8
// threads and nothing but pwrite of 8 MiB, sync_file_range, so that storage
// begins with them, and fsync; all files grow side by side. Content comes from
// `bytes` (at least 8 MiB), over and over. Returns seconds.
absl::StatusOr<double> PlainWrite(const std::string& directory,
                                  std::span<const std::uint64_t> sizes,
                                  std::span<const std::byte> bytes);

}  // namespace kedge

#endif  // KEDGE_BENCH_BENCH_INPUTS_H_
