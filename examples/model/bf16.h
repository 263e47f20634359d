#ifndef KEDGE_EXAMPLES_MODEL_BF16_H_
#define KEDGE_EXAMPLES_MODEL_BF16_H_

// bf16 as raw bits: the upper half of an IEEE 754 binary32.
//
// Always inlined because the kernels are compiled for several instruction
// sets: an out-of-line copy built for the widest could be the one the linker
// keeps for all.

#include <cstdint>

namespace kedge::example {

// Rounds to nearest, ties to even. Values beyond the largest finite bf16
// become infinity; a NaN keeps its sign and upper payload and becomes quiet,
// since cutting its payload short could otherwise turn it into an infinity.
[[gnu::always_inline]] inline std::uint16_t FloatToBf16(float value) {
  const std::uint32_t bits = __builtin_bit_cast(std::uint32_t, value);
  const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const std::uint32_t quiet = (bits >> 16) | 0x40u;
  return static_cast<std::uint16_t>(
      (bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

// Exact.
[[gnu::always_inline]] inline float Bf16ToFloat(std::uint16_t bits) {
  return __builtin_bit_cast(float, static_cast<std::uint32_t>(bits) << 16);
}

}  // namespace kedge::example

#endif  // KEDGE_EXAMPLES_MODEL_BF16_H_
