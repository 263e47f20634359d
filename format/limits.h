#ifndef KEDGE_FORMAT_LIMITS_H_
#define KEDGE_FORMAT_LIMITS_H_

// Every count and size read from a file has a stated maximum, and these are
// they. A file beyond one is refused before anything is allocated for it. See
// spec/limits.md.

#include <cstdint>

namespace kedge {

// Bytes may change before a first release; a reader refuses files whose
// min_reader is above kFormatVersion (kUnimplemented).
inline constexpr std::uint16_t kFormatVersion = 1;

inline constexpr std::uint64_t kMaxTensorCount = 1'000'000;
inline constexpr std::uint32_t kMaxNameBytes = 4096;
inline constexpr std::uint32_t kMaxRank = 32;  // dimensions of a tensor
// Bytes of one tensor, and of all tensors of a model. A tensor has fewer than
// 2^32 tiles, which records number in 32 bits.
inline constexpr std::uint64_t kMaxTensorBytes = std::uint64_t{1} << 45;
inline constexpr std::uint64_t kMaxModelBytes = std::uint64_t{1} << 52;

// A FlatBuffer file (manifest, tensor table, rank fragment).
inline constexpr std::uint64_t kMaxFlatBufferBytes = std::uint64_t{1} << 28;
// User metadata: keys and values of one version together.
inline constexpr std::uint64_t kMaxMetadataBytes = std::uint64_t{1} << 26;
inline constexpr std::uint64_t kMaxMetadataEntries = 100'000;

inline constexpr std::uint32_t kMaxRanks = 1000;         // names have 3 digits
inline constexpr std::uint32_t kMaxFilesPerRank = 1000;  // names have 3 digits
inline constexpr std::uint64_t kMaxFileBytes = std::uint64_t{1} << 40;
inline constexpr std::uint64_t kMaxRecordsPerStep = 16'000'000;
inline constexpr std::uint64_t kMaxRecordBytes = std::uint64_t{1} << 30;
inline constexpr std::uint64_t kMaxSlicesPerAnchor = 16'000'000;
inline constexpr std::uint64_t kMaxStep = 99'999'999;   // names have 8 digits
inline constexpr std::uint32_t kMaxEpoch = 99'999'999;  // names have 8 digits

// The unit of hashing and of I/O: at most this much of one slice or segment.
inline constexpr std::uint64_t kPieceBytes = std::uint64_t{8} << 20;
// Slices of an anchor start on this boundary.
inline constexpr std::uint64_t kSliceAlignment = 4096;
// Records start on this boundary within a segment.
inline constexpr std::uint64_t kRecordAlignment = 8;
// A segment's size is a multiple of this, with at least kSegmentTailBytes
// zeros after its last record, so that a decoder may load whole words.
inline constexpr std::uint64_t kSegmentAlignment = 64;
inline constexpr std::uint64_t kSegmentTailBytes = 32;

inline constexpr std::uint32_t kTileUnits = 16384;  // most units of a tile
inline constexpr std::uint32_t kTilesPerGroup = 64;

}  // namespace kedge

#endif  // KEDGE_FORMAT_LIMITS_H_
