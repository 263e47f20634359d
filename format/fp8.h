#ifndef KEDGE_FORMAT_FP8_H_
#define KEDGE_FORMAT_FP8_H_

// bf16 weights as fp8 engines hold them: e4m3fn values and one f32 scale for
// each block of 128 x 128. See spec/fp8.md. CPU, GPU and PyTorch must agree to
// the bit, so every step here is an IEEE operation or integer arithmetic.

#include <cstdint>
#include <cstring>

#include "kedge/format/host_device.h"

namespace kedge {

inline constexpr std::uint32_t kFp8BlockExtent = 128;
inline constexpr float kFp8Max = 448.0f;
// The least floor of amax: scales then are normal numbers, and dividing by one
// is exact arithmetic with or without subnormals. 2^-100.
inline constexpr float kFp8LeastFloor = 0x1p-100f;
inline constexpr float kFp8GreatestFloor = 0x1p100f;

KEDGE_HOST_DEVICE inline std::uint32_t BitsOfFloat(float value) {
  std::uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}
KEDGE_HOST_DEVICE inline float FloatOfBits(std::uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

KEDGE_HOST_DEVICE inline float FloatOfBf16(std::uint16_t bits) {
  return FloatOfBits(std::uint32_t{bits} << 16);
}
// |x| of finite bf16 orders as these bits do; NaN and infinities are at least
// kBf16NotFinite.
inline constexpr std::uint16_t kBf16Magnitude = 0x7fff;
inline constexpr std::uint16_t kBf16NotFinite = 0x7f80;

KEDGE_HOST_DEVICE inline float DivideIeee(float x, float y) {
#ifdef __CUDA_ARCH__
  return __fdiv_rn(x, y);
#else
  return x / y;
#endif
}

// max(amax, floor) / 448.
KEDGE_HOST_DEVICE inline float Fp8ExactScale(float amax, float floor) {
  return DivideIeee(amax > floor ? amax : floor, kFp8Max);
}
// The least power of two that is not below the exact scale.
KEDGE_HOST_DEVICE inline float Fp8PowerOfTwoScale(float amax, float floor) {
  const std::uint32_t bits = BitsOfFloat(Fp8ExactScale(amax, floor));
  return FloatOfBits((bits + 0x007fffffu) & 0x7f800000u);
}

// `value` as e4m3fn: to nearest, ties to even, beyond 448 to 448. The sign is
// kept, also of zeros. Of no use for NaN (0x7e or 0xfe).
KEDGE_HOST_DEVICE inline std::uint8_t Fp8OfFloat(float value) {
  const std::uint32_t bits = BitsOfFloat(value);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  // From 2^-6 on: three bits of fraction stay, the exponent's bias moves from
  // 127 to 7. A carry runs into the exponent as it should.
  std::uint32_t normal = magnitude + 0x7ffffu + (magnitude >> 20 & 1);
  normal = (normal >> 20) - (120u << 3);
  normal = normal < 0x7eu ? normal : 0x7eu;
  // Below: multiples of 2^-9. Added to 2^14, whose last bit is worth just that,
  // the value is rounded by the addition.
  const std::uint32_t subnormal =
      BitsOfFloat(FloatOfBits(magnitude) + 16384.0f) - 0x46800000u;
  const std::uint32_t q = magnitude < 0x3c800000u ? subnormal : normal;
  return static_cast<std::uint8_t>(q | (bits >> 24 & 0x80u));
}

}  // namespace kedge

#endif  // KEDGE_FORMAT_FP8_H_
