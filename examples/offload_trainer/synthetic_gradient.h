#ifndef KEDGE_EXAMPLES_OFFLOAD_TRAINER_SYNTHETIC_GRADIENT_H_
#define KEDGE_EXAMPLES_OFFLOAD_TRAINER_SYNTHETIC_GRADIENT_H_

// First weights and gradients of a model that nobody trains: noise as dense as
// a real step's, at the speed of memory.

#include <cstdint>
#include <span>
#include <vector>

#include "kedge/examples/model/kernels.h"

namespace kedge::example {

// Numbers depend on the seed and on where an element stands in its whole
// parameter, so that any rank, alone or with others, finds the same ones.
//
// Thread safety: immutable after construction.
class SyntheticGradient {
 public:
  explicit SyntheticGradient(std::uint64_t seed);

  // Which numbers: those of one micro-batch of one step for one parameter.
  struct Draw {
    std::uint64_t step = 0;
    std::uint64_t micro_batch = 0;
    std::uint64_t parameter = 0;  // in the whole model
  };

  // Adds the gradient of the elements from `first` on; N(0, 1).
  void Accumulate(const Kernels& kernels, const Draw& draw, std::uint64_t first,
                  std::span<float> sum) const;

  // The masters of a new model: N(0, 0.02), around `mean`.
  void Initialize(std::uint64_t parameter, std::uint64_t first, float mean,
                  std::span<float> masters) const;

 private:
  // Calls visit(noise, at, count) for runs of the elements from `first` on.
  template <typename Visit>
  void VisitRuns(const Draw& draw, std::uint64_t first, std::uint64_t count,
                 const Visit& visit) const;

  const std::uint64_t seed_;
  std::vector<float> noise_;
};

}  // namespace kedge::example

#endif  // KEDGE_EXAMPLES_OFFLOAD_TRAINER_SYNTHETIC_GRADIENT_H_
