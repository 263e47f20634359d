#include "kedge/examples/offload_trainer/fp8_reference.h"

#include <algorithm>
#include <cmath>

#include "kedge/examples/model/bf16.h"

namespace kedge::example {

std::uint8_t ToE4M3(float x) {
  const std::uint8_t sign = std::signbit(x) ? 0x80 : 0;
  const float size = std::fabs(x);
  // Between 448 and 464 lie values that round to 448 anyway.
  if (size >= 448.0f) return sign | 0x7e;
  // Three bits behind the leading one; below 2^-6 steps of 2^-9.
  const int exponent = size < 0x1p-6f ? -6 : std::ilogb(size);
  // Rounds to even, and is exact before that. 8 to 16, or 0 to 8.
  auto mantissa =
      static_cast<int>(std::nearbyint(std::ldexp(size, 3 - exponent)));
  // A mantissa of 16 carries into the exponent by itself, and 8 of a subnormal
  // is the smallest normal number.
  return sign | static_cast<std::uint8_t>(((exponent + 6) << 3) + mantissa);
}

QuantisedRows Quantise(std::span<const std::uint16_t> weights,
                       std::uint64_t cols, float floor) {
  constexpr std::uint64_t kBlock = 128;
  QuantisedRows result;
  const std::uint64_t rows = cols == 0 ? 0 : weights.size() / cols;
  const std::uint64_t wide = (cols + kBlock - 1) / kBlock;
  result.values.resize(weights.size());
  result.scales.resize((rows + kBlock - 1) / kBlock * wide);
  for (std::size_t block = 0; block < result.scales.size(); ++block) {
    const std::uint64_t row_begin = block / wide * kBlock;
    const std::uint64_t col_begin = block % wide * kBlock;
    const std::uint64_t row_end = std::min(rows, row_begin + kBlock);
    const std::uint64_t col_end = std::min(cols, col_begin + kBlock);
    float amax = floor;
    for (std::uint64_t r = row_begin; r < row_end; ++r) {
      for (std::uint64_t c = col_begin; c < col_end; ++c) {
        amax = std::max(amax, std::fabs(Bf16ToFloat(weights[r * cols + c])));
      }
    }
    const float scale = amax / 448.0f;
    result.scales[block] = scale;
    for (std::uint64_t r = row_begin; r < row_end; ++r) {
      for (std::uint64_t c = col_begin; c < col_end; ++c) {
        result.values[r * cols + c] =
            ToE4M3(Bf16ToFloat(weights[r * cols + c]) / scale);
      }
    }
  }
  return result;
}

}  // namespace kedge::example
