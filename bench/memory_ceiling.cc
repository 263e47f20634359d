#include "kedge/bench/memory_ceiling.h"

#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kedge/bench/memory_ceiling.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace kedge {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// 256 bytes of each array a turn, into four sums that do not wait for each
// other.
template <bool two>
std::uint64_t Read(const std::byte* a, const std::byte* b, std::uint64_t size) {
  const hn::ScalableTag<std::uint64_t> d;
  const std::uint64_t step = 4 * hn::Lanes(d);
  const auto* x = reinterpret_cast<const std::uint64_t*>(a);
  const auto* y = reinterpret_cast<const std::uint64_t*>(b);
  auto sum0 = hn::Zero(d);
  auto sum1 = sum0;
  auto sum2 = sum0;
  auto sum3 = sum0;
  const auto load = [&](std::uint64_t i) HWY_ATTR {
    const auto value = hn::LoadU(d, x + i);
    if constexpr (two) return hn::Xor(value, hn::LoadU(d, y + i));
    return value;
  };
  std::uint64_t i = 0;
  for (; i + step <= size / 8; i += step) {
    sum0 = hn::Add(sum0, load(i));
    sum1 = hn::Add(sum1, load(i + hn::Lanes(d)));
    sum2 = hn::Add(sum2, load(i + 2 * hn::Lanes(d)));
    sum3 = hn::Add(sum3, load(i + 3 * hn::Lanes(d)));
  }
  std::uint64_t sum = hn::GetLane(
      hn::SumOfLanes(d, hn::Add(hn::Add(sum0, sum1), hn::Add(sum2, sum3))));
  for (; i < size / 8; ++i) sum += two ? x[i] ^ y[i] : x[i];
  return sum;
}

std::uint64_t ReadOne(const std::byte* a, std::uint64_t size) {
  return Read<false>(a, nullptr, size);
}
std::uint64_t ReadTwo(const std::byte* a, const std::byte* b,
                      std::uint64_t size) {
  return Read<true>(a, b, size);
}

}  // namespace HWY_NAMESPACE
}  // namespace kedge
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kedge {
HWY_EXPORT(ReadOne);
HWY_EXPORT(ReadTwo);

std::uint64_t ReadOneArray(const std::byte* bytes, std::uint64_t size) {
  return HWY_DYNAMIC_DISPATCH(ReadOne)(bytes, size);
}
std::uint64_t ReadTwoArrays(const std::byte* a, const std::byte* b,
                            std::uint64_t size) {
  return HWY_DYNAMIC_DISPATCH(ReadTwo)(a, b, size);
}

}  // namespace kedge
#endif  // HWY_ONCE
