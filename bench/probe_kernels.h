#ifndef KEDGE_BENCH_PROBE_KERNELS_H_
#define KEDGE_BENCH_PROBE_KERNELS_H_

// Kernels that only benchmarks need: contents, and what memory can do at best.

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kedge/bench/bench_tasks.h"

namespace kedge {

// Each enqueues one kernel on `stream` and returns; pointers are the device's
// and stay valid until `stream` has passed it.
[[nodiscard]] cudaError_t LaunchFill(const FillTask& task, cudaStream_t stream);
// Reads every part in 16-byte words; `sink` (one word) is written so that
// reading is no dead code. `form`, below kReadForms: loads in flight.
[[nodiscard]] cudaError_t LaunchReadAll(const ReadPart* parts,
                                        std::uint32_t part_count, int form,
                                        std::uint64_t* sink,
                                        cudaStream_t stream);
// target[offset[i]] += value[i] for every run: what apply would cost if there
// were nothing to decode.
[[nodiscard]] cudaError_t LaunchScatter(const ScatterBatch& batch,
                                        cudaStream_t stream);

}  // namespace kedge

#endif  // KEDGE_BENCH_PROBE_KERNELS_H_
