#ifndef KEDGE_BENCH_SYNTHETIC_WEIGHTS_H_
#define KEDGE_BENCH_SYNTHETIC_WEIGHTS_H_

// Weights that any side can compute by itself, element by element: the host
// that writes a store, kernels that fill a device, and whoever checks them.
// Versions with an even number are all alike, and so are the odd ones.

#include <cstdint>

#include "kedge/format/host_device.h"
#include "kedge/format/l61.h"

namespace kedge {

struct SyntheticTensor {
  std::uint64_t seed = 0;
  std::uint32_t unit_bytes = 2;  // 1, 2 or 4
  // Of 65,536 elements, how many an odd version changes.
  std::uint32_t changed = 524;

  // 16 random bits for each of the elements [4 group, 4 group + 4).
  KEDGE_HOST_DEVICE std::uint64_t Lanes(std::uint64_t group,
                                        std::uint64_t salt) const {
    return SplitMix64((seed ^ salt) + (group + 1) * 0x9e3779b97f4a7c15u);
  }
  KEDGE_HOST_DEVICE std::uint64_t OldLanes(std::uint64_t group) const {
    return Lanes(group, 0);
  }
  KEDGE_HOST_DEVICE std::uint64_t ChangeLanes(std::uint64_t group) const {
    return Lanes(group, 0xd1b54a32d192ed03u);
  }

  // Raw bits from a lane of OldLanes. Two bytes: bf16 of either sign, 2^-9 to
  // 2^-5 in size.
  KEDGE_HOST_DEVICE std::uint32_t Bits(std::uint32_t lane) const {
    if (unit_bytes == 2) return 0x3b00u + (lane & 0x81ffu);
    return unit_bytes == 1 ? lane & 0xffu : 0x3a000000u + (lane << 8);
  }
  // new - old of the raw bits from a lane of ChangeLanes: nine changes of ten
  // are a step of one.
  KEDGE_HOST_DEVICE std::int32_t Difference(std::uint32_t lane) const {
    if (lane >= changed) return 0;
    const std::uint32_t m = lane >> 1;
    std::int32_t d = 1;
    if (10 * lane >= 9 * changed) {
      d = static_cast<std::int32_t>(2 + (m & 1) + (m & 2) * ((m >> 2) & 1));
    }
    return (lane & 1) != 0 ? -d : d;
  }

  // The raw bits of an element at a version.
  KEDGE_HOST_DEVICE std::uint32_t At(std::uint64_t element,
                                     std::uint64_t version) const {
    const std::uint32_t shift = 16 * static_cast<std::uint32_t>(element & 3);
    std::uint32_t bits = Bits(
        static_cast<std::uint32_t>(OldLanes(element >> 2) >> shift) & 0xffffu);
    if ((version & 1) != 0) {
      bits += static_cast<std::uint32_t>(Difference(
          static_cast<std::uint32_t>(ChangeLanes(element >> 2) >> shift) &
          0xffffu));
    }
    return unit_bytes == 4 ? bits : bits & ((1u << (8 * unit_bytes)) - 1);
  }
};

}  // namespace kedge

#endif  // KEDGE_BENCH_SYNTHETIC_WEIGHTS_H_
