#include "kedge/examples/offload_trainer/synthetic_gradient.h"

#include <algorithm>

#include "kedge/examples/model/text.h"

namespace kedge::example {
namespace {

// Elements that follow each other in the noise. A block begins anywhere in it.
constexpr std::uint64_t kBlock = 4096;
constexpr std::uint64_t kStarts = std::uint64_t{1} << 20;

std::uint64_t Mix(std::uint64_t state, std::uint64_t value) {
  return Random(state ^ (value * 0x9e3779b97f4a7c15u)).Bits();
}

}  // namespace

SyntheticGradient::SyntheticGradient(std::uint64_t seed)
    : seed_(seed), noise_(kStarts + kBlock) {
  Random random(seed);
  for (float& value : noise_) value = static_cast<float>(random.Normal());
}

template <typename Visit>
void SyntheticGradient::VisitRuns(const Draw& draw, std::uint64_t first,
                                  std::uint64_t count,
                                  const Visit& visit) const {
  const std::uint64_t state = Mix(
      Mix(Mix(seed_, draw.step + 1), draw.micro_batch + 1), draw.parameter + 1);
  for (std::uint64_t at = 0; at < count;) {
    const std::uint64_t element = first + at;
    const std::uint64_t within = element % kBlock;
    const std::uint64_t length = std::min(kBlock - within, count - at);
    const std::uint64_t start = Mix(state, element / kBlock) % kStarts;
    visit(noise_.data() + start + within, at, length);
    at += length;
  }
}

void SyntheticGradient::Accumulate(const Kernels& kernels, const Draw& draw,
                                   std::uint64_t first,
                                   std::span<float> sum) const {
  VisitRuns(draw, first, sum.size(),
            [&](const float* noise, std::uint64_t at, std::uint64_t length) {
              kernels.add(sum.data() + at, noise,
                          static_cast<std::int64_t>(length));
            });
}

void SyntheticGradient::Initialize(std::uint64_t parameter, std::uint64_t first,
                                   float mean, std::span<float> masters) const {
  VisitRuns({0, 0, parameter}, first, masters.size(),
            [&](const float* noise, std::uint64_t at, std::uint64_t length) {
              for (std::uint64_t i = 0; i < length; ++i) {
                masters[at + i] = mean + 0.02f * noise[i];
              }
            });
}

}  // namespace kedge::example
