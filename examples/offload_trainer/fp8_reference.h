#ifndef KEDGE_EXAMPLES_OFFLOAD_TRAINER_FP8_REFERENCE_H_
#define KEDGE_EXAMPLES_OFFLOAD_TRAINER_FP8_REFERENCE_H_

// The rule by which fp8 engines quantise (spec/fp8.md), written a second time
// from the rule alone: what a published fp8 tensor is compared with.

#include <cstdint>
#include <span>
#include <vector>

namespace kedge::example {

// x to the nearest e4m3fn, ties to even; beyond 448 to 448. x is finite.
std::uint8_t ToE4M3(float x);

struct QuantisedRows {
  std::vector<std::uint8_t> values;  // [rows, cols]
  std::vector<float> scales;         // [ceil(rows / 128), ceil(cols / 128)]
};

// `weights` are bf16 rows that begin where a block does. A block's scale is
// max(amax, floor) / 448.
QuantisedRows Quantise(std::span<const std::uint16_t> weights,
                       std::uint64_t cols, float floor);

}  // namespace kedge::example

#endif  // KEDGE_EXAMPLES_OFFLOAD_TRAINER_FP8_REFERENCE_H_
