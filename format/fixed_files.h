#ifndef KEDGE_FORMAT_FIXED_FILES_H_
#define KEDGE_FORMAT_FIXED_FILES_H_

// The fixed-size files of a store and the headers of its data files. See
// spec/commit.md, spec/head.md, spec/store.md, spec/epoch.md, spec/lease.md,
// spec/segment.md, spec/anchor.md. Each begins with {magic u8[4], min_reader
// u16, writer u16} and ends with XXH3-64, seed 0, of all bytes before it.
// Reserved bytes are zero.
//
// Parse functions take `where` (a path) for messages and return
//   kDataLoss        wrong size, magic, hash, reserved bytes or a field outside
//                    its range
//   kUnimplemented   sound, but min_reader is above kFormatVersion

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kedge/format/hash.h"

namespace kedge {

// COMMIT, 64 bytes: magic "KDCM" @0, versions @4, run id @8, step u64 @24,
// epoch u32 @32, manifest length u32 @36, XXH3-128 of the manifest @40, hash
// @56.
struct CommitRecord {
  RunId run;
  std::uint64_t step = 0;
  std::uint32_t epoch = 0;
  std::uint32_t manifest_bytes = 0;
  Hash128 manifest_hash;

  friend bool operator==(const CommitRecord&, const CommitRecord&) = default;
};
inline constexpr std::size_t kCommitBytes = 64;
std::array<std::byte, kCommitBytes> SerializeCommit(const CommitRecord& commit);
absl::StatusOr<CommitRecord> ParseCommit(absl::string_view where,
                                         std::span<const std::byte> bytes);

// HEAD, 64 bytes: magic "KDHD" @0, versions @4, run id @8, step u64 @24, epoch
// u32 @32, reserved u32 @36, manifest hash @40, hash @56.
struct Head {
  RunId run;
  std::uint64_t step = 0;
  std::uint32_t epoch = 0;
  Hash128 manifest_hash;

  friend bool operator==(const Head&, const Head&) = default;
};
inline constexpr std::size_t kHeadBytes = 64;
std::array<std::byte, kHeadBytes> SerializeHead(const Head& head);
absl::StatusOr<Head> ParseHead(absl::string_view where,
                               std::span<const std::byte> bytes);

// How a step becomes visible.
enum class CommitMode : std::uint32_t { kRenameDirectory = 1 };

// STORE, 96 bytes: magic "KDST" @0, versions @4, run id @8, L61 seed u64 @24,
// commit mode u32 @32, external v0 u32 (0 or 1) @36, v0 state digest @40, v0 tensor table
// hash @56, creation time u64 (Unix seconds) @72, reserved u64 @80, hash @88.
struct StoreInfo {
  RunId run;
  std::uint64_t l61_seed = 0;
  CommitMode commit_mode = CommitMode::kRenameDirectory;
  bool external_v0 = false;  // engines boot with v0: it has no anchor here
  Hash128 v0_digest;
  Hash128 v0_table_hash;
  std::uint64_t created_unix_seconds = 0;

  friend bool operator==(const StoreInfo&, const StoreInfo&) = default;
};
inline constexpr std::size_t kStoreBytes = 96;
std::array<std::byte, kStoreBytes> SerializeStore(const StoreInfo& store);
absl::StatusOr<StoreInfo> ParseStore(absl::string_view where,
                                     std::span<const std::byte> bytes);

// epochs/<e>, 64 bytes: magic "KDEP" @0, versions @4, run id @8, resume step K
// u64 @24, epoch u32 @32, reserved u32 @36, hash of manifest K @40, hash @56.
struct EpochInfo {
  RunId run;
  std::uint64_t resume_step = 0;
  std::uint32_t epoch = 0;  // from 1; step 0 is of epoch 0, which has no file
  Hash128 resume_manifest_hash;

  friend bool operator==(const EpochInfo&, const EpochInfo&) = default;
};
inline constexpr std::size_t kEpochBytes = 64;
std::array<std::byte, kEpochBytes> SerializeEpoch(const EpochInfo& epoch);
absl::StatusOr<EpochInfo> ParseEpoch(absl::string_view where,
                                     std::span<const std::byte> bytes);

// leases/<reader>, 144 bytes: magic "KDLS" @0, versions @4, run id @8, oldest
// step u64 @24, holds u32 (0 or 1) @32, length of the reader id u32 @36, held
// manifest hash @40, held step u64 @56, counter u64 @64, reader id, padded with
// zeros, u8[64] @72, hash @136.
struct LeaseRecord {
  RunId run;
  std::uint64_t oldest_step = 0;  // steps from here on are needed
  bool holds = false;             // else held_* are zero
  std::uint64_t held_step = 0;
  Hash128 held_manifest_hash;
  std::uint64_t counter = 0;  // from 1; one more with every write
  std::string reader;         // IsReaderId

  friend bool operator==(const LeaseRecord&, const LeaseRecord&) = default;
};
inline constexpr std::size_t kLeaseBytes = 144;
inline constexpr std::size_t kMaxReaderIdBytes = 64;
inline constexpr std::uint64_t kMaxLeaseCounter = std::uint64_t{1} << 62;
// 1 to 64 of A-Z a-z 0-9 . _ -, the first one no dot: the name of a lease file.
bool IsReaderId(absl::string_view id);
// `lease.reader` is a reader id.
std::array<std::byte, kLeaseBytes> SerializeLease(const LeaseRecord& lease);
absl::StatusOr<LeaseRecord> ParseLease(absl::string_view where,
                                       std::span<const std::byte> bytes);

// The first 64 bytes of a segment (magic "KDSG") or an anchor file ("KDAN"):
// versions @4, run id @8, step u64 @24, rank u32 @32, number u32 @36,
// payload_bytes u64 @40, count u32 @48, reserved u32 @52, hash @56.
// Segment: payload_bytes are those from byte 64 to the end of the last record's
// padding, count its records. Anchor file: payload_bytes are those from byte
// 4096 to the end of the last slice, count its slices; bytes 64 to 4095 are
// zero.
struct DataFileHeader {
  RunId run;
  std::uint64_t step = 0;
  FileId file;  // the kind is the magic
  std::uint64_t payload_bytes = 0;
  std::uint32_t count = 0;

  friend bool operator==(const DataFileHeader&,
                         const DataFileHeader&) = default;
};
inline constexpr std::size_t kDataFileHeaderBytes = 64;
std::array<std::byte, kDataFileHeaderBytes> SerializeDataFileHeader(
    const DataFileHeader& header);
absl::StatusOr<DataFileHeader> ParseDataFileHeader(
    absl::string_view where, FileKind kind, std::span<const std::byte> bytes);

// Size of a segment file with `payload_bytes`, tail and alignment included.
std::uint64_t SegmentFileBytes(std::uint64_t payload_bytes);

// A fresh random run id and L61 seed, from the system's random device.
RunId RandomRunId();
std::uint64_t RandomSeed();

}  // namespace kedge

#endif  // KEDGE_FORMAT_FIXED_FILES_H_
