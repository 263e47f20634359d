#ifndef KEDGE_ENGINE_CPU_QUANTISE_H_
#define KEDGE_ENGINE_CPU_QUANTISE_H_

// bf16 to f8_e4m3 with a scale for each block of 128 x 128, on a core. See
// spec/fp8.md; engine/cuda has the same as a kernel.

#include <cstdint>

#include "kedge/engine/device/kernel_tasks.h"

namespace kedge {

// Does what Device::Quantise says, with pointers to host memory: writes values,
// scales and *batch.first_bad_block. Values of a block with a NaN or an
// infinity, and its scale, are written too, and mean nothing.
void Quantise(const QuantiseBatch& batch);

// Blocks [begin, end) alone, so that threads may share a batch. Returns the
// lowest one with a NaN or an infinity, or ~0; *batch.first_bad_block is left
// as it is.
std::uint64_t QuantiseBlocks(const QuantiseBatch& batch, std::uint64_t begin,
                             std::uint64_t end);

}  // namespace kedge

#endif  // KEDGE_ENGINE_CPU_QUANTISE_H_
