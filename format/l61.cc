#include "kedge/format/l61.h"

namespace kedge {

std::uint64_t L61SumScalar(const L61Key& key, std::uint64_t offset,
                           std::span<const std::byte> bytes) {
  std::uint64_t sum = 0;
  std::size_t i = 0;
  while (i < bytes.size()) {
    const std::uint64_t word = (offset + i) >> 2;
    std::uint64_t value = 0;
    for (std::uint32_t lane = (offset + i) & 3; lane < 4 && i < bytes.size();
         ++lane, ++i) {
      value |= std::to_integer<std::uint64_t>(bytes[i]) << (8 * lane);
    }
    sum = L61Add(sum, L61Mul(key.Weight(word), value));
  }
  return sum;
}

}  // namespace kedge
