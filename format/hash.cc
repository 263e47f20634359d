#include "kedge/format/hash.h"

#ifdef KEDGE_XXHASH_DISPATCH
#include <xxh_x86dispatch.h>
#else
#define XXH_INLINE_ALL
#include <xxhash.h>
#endif

#include <cstring>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "kedge/format/status.h"

namespace kedge {
namespace {

static_assert(sizeof(Bytes16) == 16);

Hash128 Canonical(XXH128_hash_t hash) {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, hash);
  Hash128 result;
  std::memcpy(result.bytes.data(), canonical.digest, 16);
  return result;
}

int HexDigit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  return -1;
}

}  // namespace

std::string ToHex(const Bytes16& value) {
  std::string text;
  for (const std::uint8_t byte : value.bytes) {
    absl::StrAppend(&text, absl::Hex(byte, absl::kZeroPad2));
  }
  return text;
}

absl::StatusOr<Bytes16> ParseHex16(absl::string_view text) {
  Bytes16 value;
  bool valid = text.size() == 32;
  for (std::size_t i = 0; valid && i < 16; ++i) {
    const int high = HexDigit(text[2 * i]);
    const int low = HexDigit(text[2 * i + 1]);
    valid = high >= 0 && low >= 0;
    if (valid) value.bytes[i] = static_cast<std::uint8_t>(high * 16 + low);
  }
  if (!valid) {
    return absl::InvalidArgumentError(absl::StrCat(
        "expected 32 lower-case hex digits, found \"", text, "\""));
  }
  return value;
}

std::uint64_t HashBytes64(std::span<const std::byte> bytes,
                          std::uint64_t seed) {
  return XXH3_64bits_withSeed(bytes.data(), bytes.size(), seed);
}

Hash128 HashBytes128(std::span<const std::byte> bytes) {
  return Canonical(XXH3_128bits(bytes.data(), bytes.size()));
}

Hasher128::Hasher128() : state_(XXH3_createState()) {
  KEDGE_CHECK(state_ != nullptr);
  XXH3_128bits_reset(static_cast<XXH3_state_t*>(state_));
}
Hasher128::~Hasher128() { XXH3_freeState(static_cast<XXH3_state_t*>(state_)); }

void Hasher128::Update(std::span<const std::byte> bytes) {
  XXH3_128bits_update(static_cast<XXH3_state_t*>(state_), bytes.data(),
                      bytes.size());
}

Hash128 Hasher128::Finish() const {
  return Canonical(
      XXH3_128bits_digest(static_cast<const XXH3_state_t*>(state_)));
}

std::uint64_t PieceSeed(const RunId& run, std::uint64_t step,
                        const FileId& file, std::uint32_t piece) {
  std::array<std::byte, 40> input;
  const auto kind = static_cast<std::uint32_t>(file.kind);
  std::memcpy(input.data(), run.bytes.data(), 16);
  std::memcpy(input.data() + 16, &step, 8);
  std::memcpy(input.data() + 24, &kind, 4);
  std::memcpy(input.data() + 28, &file.rank, 4);
  std::memcpy(input.data() + 32, &file.number, 4);
  std::memcpy(input.data() + 36, &piece, 4);
  return HashBytes64(input);
}

std::uint64_t HashPiece(const RunId& run, std::uint64_t step,
                        const FileId& file, std::uint32_t piece,
                        std::span<const std::byte> bytes) {
  return HashBytes64(bytes, PieceSeed(run, step, file, piece));
}

PieceHasher::PieceHasher(const RunId& run, std::uint64_t step,
                         const FileId& file, std::uint32_t piece)
    : state_(XXH3_createState()) {
  KEDGE_CHECK(state_ != nullptr);
  XXH3_64bits_reset_withSeed(static_cast<XXH3_state_t*>(state_),
                             PieceSeed(run, step, file, piece));
}
PieceHasher::~PieceHasher() {
  XXH3_freeState(static_cast<XXH3_state_t*>(state_));
}

void PieceHasher::Update(std::span<const std::byte> bytes) {
  XXH3_64bits_update(static_cast<XXH3_state_t*>(state_), bytes.data(),
                     bytes.size());
}

std::uint64_t PieceHasher::Finish() const {
  return XXH3_64bits_digest(static_cast<const XXH3_state_t*>(state_));
}

Hash128 HashOfPieces(std::span<const std::uint64_t> piece_hashes) {
  return HashBytes128(std::as_bytes(piece_hashes));
}

}  // namespace kedge
