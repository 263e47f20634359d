#ifndef KEDGE_TESTS_ENGINE_CPU_CPU_TEST_SUPPORT_H_
#define KEDGE_TESTS_ENGINE_CPU_CPU_TEST_SUPPORT_H_

// Weights, changes and the loop over instruction sets that the tests of
// engine/cpu share.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "hwy/targets.h"
#include "kedge/format/codec.h"
#include "kedge/format/tile_grid.h"

namespace kedge::testing {

using Shape = std::vector<std::uint64_t>;

// Runs `body` once for each instruction set that this machine has, and names
// the one that failed.
template <typename Body>
void ForEachTarget(Body&& body) {
  for (const std::int64_t target : hwy::SupportedAndGeneratedTargets()) {
    SCOPED_TRACE(std::string("target ") + hwy::TargetName(target));
    hwy::SetSupportedTargetsForTest(target);
    body();
    hwy::SetSupportedTargetsForTest(0);
    if (::testing::Test::HasFatalFailure()) return;
  }
}

// Raw units at any alignment, with bytes around them that nobody may change.
class GuardedBytes {
 public:
  GuardedBytes() = default;
  GuardedBytes(std::size_t size, std::size_t misalignment)
      : buffer_(kGuard + misalignment + size + kGuard, std::byte{0xc3}),
        start_(kGuard + misalignment),
        size_(size) {}

  std::byte* data() { return buffer_.data() + start_; }
  const std::byte* data() const { return buffer_.data() + start_; }
  std::size_t size() const { return size_; }
  std::span<std::byte> span() { return {data(), size_}; }
  std::span<const std::byte> span() const { return {data(), size_}; }
  bool GuardsIntact() const {
    for (std::size_t i = 0; i < buffer_.size(); ++i) {
      if (i >= start_ && i < start_ + size_) continue;
      if (buffer_[i] != std::byte{0xc3}) return false;
    }
    return true;
  }

 private:
  static constexpr std::size_t kGuard = 128;
  std::vector<std::byte> buffer_;
  std::size_t start_ = 0;
  std::size_t size_ = 0;
};

inline std::uint64_t LoadUnit(const std::byte* at, std::uint32_t unit_bytes) {
  std::uint64_t value = 0;
  std::memcpy(&value, at, unit_bytes);
  return value;
}
inline void StoreUnit(std::byte* at, std::uint32_t unit_bytes,
                      std::uint64_t value) {
  std::memcpy(at, &value, unit_bytes);
}

inline void FillRandom(std::mt19937_64& rng, std::span<std::byte> bytes) {
  std::size_t i = 0;
  for (; i + 8 <= bytes.size(); i += 8) {
    const std::uint64_t value = rng();
    std::memcpy(bytes.data() + i, &value, 8);
  }
  for (; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(rng());
}

enum class Values { kMostlyOne, kSmall, kAnything };

// Changes about `density` of the units of `bytes` in place. kAnything writes
// NaN payloads, infinities, zeros of both signs and random bits.
inline void Perturb(std::mt19937_64& rng, double density, Values values,
                    std::uint32_t unit_bytes, std::span<std::byte> bytes) {
  static constexpr std::uint64_t kSpecial[] = {
      0,      0x8000,     0x7f80,     0xff80,     0x7fc1,    0xffff,
      0x7fff, 0x80000000, 0x7fc00001, 0xffc0dead, 0xffffffff};
  const std::uint64_t count = bytes.size() / unit_bytes;
  if (density <= 0 || count == 0) return;
  std::geometric_distribution<std::uint64_t> gap(std::min(density, 0.999999));
  for (std::uint64_t i = density >= 1 ? 0 : gap(rng); i < count;
       i += 1 + (density >= 1 ? 0 : gap(rng))) {
    std::byte* const at = bytes.data() + i * unit_bytes;
    std::uint64_t value = LoadUnit(at, unit_bytes);
    switch (values) {
      case Values::kMostlyOne: {
        const std::uint64_t by = rng() % 10 == 0 ? 1 + rng() % 6 : 1;
        value = rng() % 2 == 0 ? value + by : value - by;
        break;
      }
      case Values::kSmall:
        value += rng() % 40 - 20;
        break;
      case Values::kAnything:
        value = rng() % 3 == 0 ? kSpecial[rng() % std::size(kSpecial)] : rng();
        break;
    }
    StoreUnit(at, unit_bytes, value);
  }
}

// The changes of a slice, found unit by unit; indices count from its begin.
inline std::vector<Change> PlainDiff(std::span<const std::byte> before,
                                     std::span<const std::byte> after,
                                     std::uint32_t unit_bytes) {
  std::vector<Change> changes;
  for (std::size_t i = 0; i < before.size() / unit_bytes; ++i) {
    const auto d = static_cast<std::int64_t>(
                       LoadUnit(after.data() + i * unit_bytes, unit_bytes)) -
                   static_cast<std::int64_t>(
                       LoadUnit(before.data() + i * unit_bytes, unit_bytes));
    if (d != 0) changes.push_back({static_cast<std::uint32_t>(i), d});
  }
  return changes;
}

inline UnitRange RandomSlice(std::mt19937_64& rng, const TileGrid& grid) {
  UnitRange slice{0, grid.unit_count()};
  if (rng() % 3 != 0) {
    slice.begin = rng() % grid.unit_count();
    slice.end = slice.begin + 1 + rng() % (grid.unit_count() - slice.begin);
  }
  return slice;
}

// Shapes of every kind of grid: scalars, runs, clipped boxes, wide and narrow.
inline std::vector<Shape> TestShapes() {
  return {{},         {1},        {7},           {127},         {40000},
          {1, 999},   {999, 1},   {5, 1000},     {300, 130},    {257, 127},
          {129, 400}, {20000, 1}, {16, 8, 3, 3}, {70, 5, 5, 5}, {140, 9000},
          {3, 20000}, {131, 257}, {300, 128}};
}

}  // namespace kedge::testing

#endif  // KEDGE_TESTS_ENGINE_CPU_CPU_TEST_SUPPORT_H_
