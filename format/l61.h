#ifndef KEDGE_FORMAT_L61_H_
#define KEDGE_FORMAT_L61_H_

// L61, the checksum of a tensor's contents. See spec/l61.md.
//
//   S = sum over 32-bit words u_j of W_j * u_j   (mod p = 2^61 - 1)
//   W_j = A[j mod 4096] * B[j div 4096]          (mod p)
//
// over the tensor's little-endian bytes in row-major order, zero-padded to
// whole words; A and B are pseudo-random functions of the run's seed. Partial
// sums of any shards add up, and S(new) = S(old) + L(delta). Two different
// contents chosen without knowledge of the seed collide with probability below
// 2^-57. Anyone who knows the seed can forge it: it is no MAC.

#include <cstddef>
#include <cstdint>
#include <span>

#include "kedge/format/host_device.h"

namespace kedge {

inline constexpr std::uint64_t kL61Prime = (std::uint64_t{1} << 61) - 1;
inline constexpr std::uint32_t kL61TileWords = 4096;

// x mod p for any x.
KEDGE_HOST_DEVICE inline std::uint64_t L61Reduce(std::uint64_t x) {
  x = (x & kL61Prime) + (x >> 61);
  return x >= kL61Prime ? x - kL61Prime : x;
}

// Of residues in [0, p).
KEDGE_HOST_DEVICE inline std::uint64_t L61Add(std::uint64_t a,
                                              std::uint64_t b) {
  const std::uint64_t sum = a + b;
  return sum >= kL61Prime ? sum - kL61Prime : sum;
}
KEDGE_HOST_DEVICE inline std::uint64_t L61Sub(std::uint64_t a,
                                              std::uint64_t b) {
  return a >= b ? a - b : a + kL61Prime - b;
}

// a * b mod p, where the product is below 2^125.
KEDGE_HOST_DEVICE inline std::uint64_t L61Mul(std::uint64_t a,
                                              std::uint64_t b) {
#ifdef __CUDA_ARCH__
  const std::uint64_t low = a * b;
  const std::uint64_t high = __umul64hi(a, b);
#else
  const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
  const auto low = static_cast<std::uint64_t>(product);
  const auto high = static_cast<std::uint64_t>(product >> 64);
#endif
  return L61Reduce((low & kL61Prime) + ((high << 3) | (low >> 61)));
}

// splitmix64's finaliser: a bijection on 64 bits. Source: Steele, Lea, Flood,
// "Fast splittable pseudorandom number generators", 2014, variant 13.
KEDGE_HOST_DEVICE inline std::uint64_t SplitMix64(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// The weights of one run.
struct L61Key {
  std::uint64_t seed_a = 0;
  std::uint64_t seed_b = 0;

  KEDGE_HOST_DEVICE static L61Key FromSeed(std::uint64_t seed) {
    return {SplitMix64(seed + 0x9e3779b97f4a7c15u),
            SplitMix64(seed + 0x3c6ef372fe94f82au)};
  }
  // A[t], t in [0, 4096): in [1, 2^58).
  KEDGE_HOST_DEVICE std::uint64_t A(std::uint32_t t) const {
    const std::uint64_t a =
        SplitMix64(seed_a + (std::uint64_t{t} + 1) * 0x9e3779b97f4a7c15u) >> 6;
    return a == 0 ? 1 : a;
  }
  // B[q]: in [1, p).
  KEDGE_HOST_DEVICE std::uint64_t B(std::uint64_t q) const {
    const std::uint64_t b =
        SplitMix64(seed_b + (q + 1) * 0x9e3779b97f4a7c15u) >> 3;
    return b == 0 || b == kL61Prime ? 1 : b;
  }
  // W_j.
  KEDGE_HOST_DEVICE std::uint64_t Weight(std::uint64_t word) const {
    return L61Mul(A(static_cast<std::uint32_t>(word % kL61TileWords)),
                  B(word / kL61TileWords));
  }
};

// What adding `difference` (|difference| < 2^33) to the raw bits of one unit
// adds to S. `unit` is the unit's flat index, `unit_bytes` 1, 2 or 4.
KEDGE_HOST_DEVICE inline std::uint64_t L61OfChange(const L61Key& key,
                                                   std::uint64_t unit,
                                                   std::uint32_t unit_bytes,
                                                   std::int64_t difference) {
  const std::uint64_t offset = unit * unit_bytes;
  const std::uint32_t shift = 8 * static_cast<std::uint32_t>(offset & 3);
  // |difference| << shift stays below 2^41 for 1- and 2-byte units.
  const std::uint64_t magnitude =
      static_cast<std::uint64_t>(difference < 0 ? -difference : difference)
      << shift;
  const std::uint64_t term = L61Mul(key.Weight(offset >> 2), magnitude);
  return difference < 0 ? L61Sub(0, term) : term;
}

// S of `bytes`, which stand at byte `offset` of the tensor: the plain form that
// fast ones are compared with. Any offset and length; words that the range
// covers in part count with the bytes they have here.
std::uint64_t L61SumScalar(const L61Key& key, std::uint64_t offset,
                           std::span<const std::byte> bytes);

}  // namespace kedge

#endif  // KEDGE_FORMAT_L61_H_
