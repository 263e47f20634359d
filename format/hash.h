#ifndef KEDGE_FORMAT_HASH_H_
#define KEDGE_FORMAT_HASH_H_

// Hashes of file bytes: XXH3-64 and XXH3-128 (canonical output of xxHash 0.8).
// They detect damage, not malice: none of them is a MAC.

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace kedge {

// 16 bytes in file order: an XXH3-128 in canonical (big-endian) form, or a run
// id. Also the whole of a held version's identity beside its step.
struct Bytes16 {
  std::array<std::uint8_t, 16> bytes{};

  friend auto operator<=>(const Bytes16&, const Bytes16&) = default;
  bool IsZero() const { return *this == Bytes16{}; }
};
using Hash128 = Bytes16;
using RunId = Bytes16;

// 32 lower-case hex digits.
std::string ToHex(const Bytes16& value);
// kInvalidArgument unless `text` is 32 hex digits.
absl::StatusOr<Bytes16> ParseHex16(absl::string_view text);

std::uint64_t HashBytes64(std::span<const std::byte> bytes,
                          std::uint64_t seed = 0);
Hash128 HashBytes128(std::span<const std::byte> bytes);

// XXH3-128 of bytes given in parts.
class Hasher128 {
 public:
  Hasher128();
  ~Hasher128();
  Hasher128(const Hasher128&) = delete;
  Hasher128& operator=(const Hasher128&) = delete;

  void Update(std::span<const std::byte> bytes);
  Hash128 Finish() const;

 private:
  void* state_;
};

// What a file of a step directory holds. The number is part of the piece seed.
enum class FileKind : std::uint32_t { kSegment = 1, kAnchor = 2 };

// Where a file stands in a run: its name, and a part of every piece's seed, so
// that an intact piece in the wrong place fails.
struct FileId {
  FileKind kind = FileKind::kSegment;
  std::uint32_t rank = 0;    // the rank that wrote it
  std::uint32_t number = 0;  // from 0 within (kind, rank)

  friend auto operator<=>(const FileId&, const FileId&) = default;
};

// XXH3-64 of {run id, step u64, kind u32, rank u32, number u32, piece u32},
// 40 bytes little-endian, seed 0.
std::uint64_t PieceSeed(const RunId& run, std::uint64_t step,
                        const FileId& file, std::uint32_t piece);

// XXH3-64 of `bytes` with PieceSeed(...) as the seed. `piece` counts from 0 in
// offset order within the file.
std::uint64_t HashPiece(const RunId& run, std::uint64_t step,
                        const FileId& file, std::uint32_t piece,
                        std::span<const std::byte> bytes);

// HashPiece of bytes given in parts, so that they can be hashed while they are
// still in cache.
class PieceHasher {
 public:
  PieceHasher(const RunId& run, std::uint64_t step, const FileId& file,
              std::uint32_t piece);
  ~PieceHasher();
  PieceHasher(const PieceHasher&) = delete;
  PieceHasher& operator=(const PieceHasher&) = delete;

  void Update(std::span<const std::byte> bytes);
  std::uint64_t Finish() const;

 private:
  void* state_;
};

// XXH3-128 over the little-endian piece hashes in offset order.
Hash128 HashOfPieces(std::span<const std::uint64_t> piece_hashes);

}  // namespace kedge

#endif  // KEDGE_FORMAT_HASH_H_
