#include "kedge/examples/trainer/step_statistics.h"

#include <cmath>
#include <cstddef>

namespace kedge::example {
namespace {

constexpr int kLargestDifference = 65535;

}  // namespace

StepStatistics::StepStatistics() : counts_(2 * kLargestDifference + 1, 0) {}

void StepStatistics::Add(std::span<const std::uint16_t> old_bits,
                         std::span<const std::uint16_t> new_bits) {
  for (std::size_t i = 0; i < old_bits.size(); ++i) {
    const int difference =
        static_cast<int>(new_bits[i]) - static_cast<int>(old_bits[i]);
    ++counts_[static_cast<std::size_t>(difference + kLargestDifference)];
  }
  elements_ += old_bits.size();
}

std::uint64_t StepStatistics::changed() const {
  return elements_ - counts_[kLargestDifference];
}

double StepStatistics::entropy_bits() const {
  double bits = 0;
  for (const std::uint64_t count : counts_) {
    if (count == 0) continue;
    bits +=
        static_cast<double>(count) *
        std::log2(static_cast<double>(elements_) / static_cast<double>(count));
  }
  return bits;
}

}  // namespace kedge::example
