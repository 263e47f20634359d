#ifndef KEDGE_FORMAT_RECORD_LAYOUT_H_
#define KEDGE_FORMAT_RECORD_LAYOUT_H_

// The bytes of a record, for host code and kernels alike: headers, parameters,
// the rules by which a tile is coded. See spec/segment.md; format/codec.h has
// the plain code.
//
//   record = RecordHeader, GroupHeader x ceil(tile_count / 64), then per group
//            its tile headers (bit-packed) and the tiles' payloads
//
// Bit fields are packed from the least significant bit of the first byte on.

#include <cstdint>

#include "kedge/format/host_device.h"
#include "kedge/format/limits.h"

namespace kedge {

// The codec of a record; numbers are on disk.
enum class Codec : std::uint8_t {
  kR2 = 1,
  kOldExponentContext = 2,  // reserved: needs the reader's old weights
};

KEDGE_HOST_DEVICE inline std::uint64_t Zigzag(std::int64_t d) {
  return (static_cast<std::uint64_t>(d) << 1) ^
         static_cast<std::uint64_t>(d >> 63);
}
KEDGE_HOST_DEVICE inline std::int64_t Unzigzag(std::uint64_t z) {
  return static_cast<std::int64_t>(z >> 1) ^ -static_cast<std::int64_t>(z & 1);
}

struct RecordHeader {
  std::uint32_t tile_count = 0;  // listed tiles, each with a change
  std::uint32_t reserved = 0;
  std::uint64_t nnz = 0;
};
static_assert(sizeof(RecordHeader) == 16);

// A tile's header as the group packs it. Five fields, each stored as value -
// minimum in the group's width for that field, in this order, tile after tile.
// Minimum and width are the tightest: some tile has the minimum, and the width
// is the bits of the largest difference from it.
enum TileField { kTileGap, kTileMode, kTileA, kTileB, kTileBytes };
inline constexpr int kTileFieldCount = 5;

enum class TileMode : std::uint32_t {
  kSparse = 0,  // a, b: changes with |d| = 1, with |d| >= 2
  kDense = 1,   // a: Rice parameter, b: escapes
};

struct GroupHeader {
  std::uint32_t offset = 0;      // bytes from the record's start to the group
  std::uint32_t first_tile = 0;  // smallest index its first tile could have
  std::uint32_t min_gap = 0;
  std::uint32_t min_bytes = 0;
  std::uint16_t min_a = 0;
  std::uint16_t min_b = 0;
  std::uint8_t min_mode = 0;
  std::uint8_t widths[kTileFieldCount] = {};  // bits, in TileField order
  std::uint16_t reserved = 0;
};
static_assert(sizeof(GroupHeader) == 28);

// Quotients of a dense tile's Rice code from this on are escaped.
inline constexpr std::uint32_t kDenseEscapeQuotient = 15;
// Bytes of the largest tile: every unit in 33 bits.
inline constexpr std::uint32_t kMaxTileBytes = kTileUnits * 33 / 8;

// The Rice parameter of a list of `count` >= 1 positions among `units`: floor
// of log2(0.48125 (2 units - count) / count), at least 0. Source of the rule:
// Kiely, "Selecting the Golomb parameter in Rice coding", IPN PR 42-159, 2004,
// with the logarithm of the golden ratio replaced by a fraction.
KEDGE_HOST_DEVICE inline std::uint32_t RiceParameter(std::uint32_t count,
                                                     std::uint32_t units) {
  const std::uint32_t q = (77 * (2 * units - count)) / (160 * count);
  std::uint32_t k = 0;
  while ((q >> k) > 1) ++k;
  return k;
}

// Sparse payload, for lists A (|d| = 1) and B (|d| >= 2), each with its own
// Rice parameter k and gaps counted within its own list:
//   A: nA x (gap's low kA bits, then 1 bit: negative)
//   B: nB x (gap's low kB bits, then 1 bit: negative)
//   unary: A's gap >> kA as that many 0 bits and a 1; B's likewise; then for
//          each of B e = floor(log2(|d| - 1)) as e 0 bits and a 1
//   B: nB x (low e bits of |d| - 1)
//   zero bits to a whole byte
// Dense payload, z = zigzag of each of the tile's units in order, w the unit's
// bits, k = a:
//   units x (z's low k bits)
//   unless k = w + 1: unary of min(z >> k, 15) for each unit
//   each z with z >> k >= 15, in order: w + 1 bits
//   zero bits to a whole byte
// A tile is dense if more than a quarter of its units changed and the dense
// payload is shorter. Its parameter is the one in [0, w + 1] with the shortest
// payload, the smallest of equals.

}  // namespace kedge

#endif  // KEDGE_FORMAT_RECORD_LAYOUT_H_
