#ifndef KEDGE_EXAMPLES_TRAINER_STEP_STATISTICS_H_
#define KEDGE_EXAMPLES_TRAINER_STEP_STATISTICS_H_

// How much a step changed and what that is worth in bits, computed from old and
// new weights alone: the yardstick for what kedge wrote.

#include <cstdint>
#include <span>
#include <vector>

namespace kedge::example {

// Counts the differences new - old of the raw bits, 0 for unchanged elements.
class StepStatistics {
 public:
  StepStatistics();

  // Both spans have the same length.
  void Add(std::span<const std::uint16_t> old_bits,
           std::span<const std::uint16_t> new_bits);

  std::uint64_t elements() const { return elements_; }
  std::uint64_t changed() const;
  // Order-0 entropy of (changed?, difference), of all elements together.
  double entropy_bits() const;

 private:
  std::vector<std::uint64_t> counts_;  // by difference + 65535
  std::uint64_t elements_ = 0;
};

}  // namespace kedge::example

#endif  // KEDGE_EXAMPLES_TRAINER_STEP_STATISTICS_H_
