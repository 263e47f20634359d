#ifndef KEDGE_FORMAT_CONTROL_FILE_H_
#define KEDGE_FORMAT_CONTROL_FILE_H_

// What ranks of one trainer say to each other through files. See
// spec/control_file.md.

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kedge/format/hash.h"

namespace kedge {

enum class ControlKind : std::uint32_t {
  kHello = 1,      // a rank, with a fresh nonce
  kWelcome = 2,    // rank 0: a session, and the nonces that it has seen
  kReady = 3,      // a rank that found itself in the welcome of `session`
  kGather = 4,     // a rank's payload of `round`
  kBroadcast = 5,  // rank 0's payload of `round`
  kRefused = 6,    // a rank that cannot join `session`; the payload says why
};
absl::string_view ControlKindName(ControlKind kind);  // "hello", ...

inline constexpr std::size_t kControlHeaderBytes = 88;
inline constexpr std::uint64_t kMaxControlPayloadBytes = std::uint64_t{1} << 28;

struct ControlHeader {
  RunId run;  // of the store, or what the job chose; zero before there is one
  std::uint32_t rank = 0;
  std::uint32_t world_size = 1;
  std::uint64_t session = 0;  // 0: none yet (hello)
  std::uint64_t nonce = 0;    // of this incarnation of the rank; never 0
  std::uint64_t round = 0;    // from 1, for gather and broadcast; else 0
  ControlKind kind = ControlKind::kHello;
  std::uint64_t payload_bytes = 0;

  friend bool operator==(const ControlHeader&, const ControlHeader&) = default;
};

// Header and payload as one file; sets payload_bytes. The payload is at most
// kMaxControlPayloadBytes.
std::vector<std::byte> SerializeControlFile(ControlHeader header,
                                            std::span<const std::byte> payload);

// A whole file, every rule checked. kDataLoss, kUnimplemented.
absl::StatusOr<ControlHeader> ParseControlFile(
    absl::string_view where, std::span<const std::byte> bytes);

// The header's fields without any proof that they are sound (the hash covers
// the payload too): enough to see that a file has not changed. kDataLoss if
// `bytes` are fewer than a header, or another magic.
absl::StatusOr<ControlHeader> PeekControlHeader(
    absl::string_view where, std::span<const std::byte> bytes);

// The payload of a welcome: who was seen. At most kMaxRanks rows.
struct ControlPeer {
  std::uint32_t rank = 0;
  std::uint64_t nonce = 0;

  friend bool operator==(const ControlPeer&, const ControlPeer&) = default;
};
std::vector<std::byte> SerializeWelcome(std::span<const ControlPeer> peers);
absl::StatusOr<std::vector<ControlPeer>> ParseWelcome(
    absl::string_view where, std::span<const std::byte> payload);

// "rank_00003", the name of a rank's control file within ranks/.
std::string ControlFileName(std::uint32_t rank);
std::optional<std::uint32_t> ParseControlFileName(absl::string_view name);

// "rank_00003.<nonce, 16 hex>": a control file on its way to its place.
struct ControlTemporary {
  std::uint32_t rank = 0;
  std::uint64_t nonce = 0;
};
std::string ControlTemporaryName(const ControlTemporary& temporary);
std::optional<ControlTemporary> ParseControlTemporaryName(
    absl::string_view name);

}  // namespace kedge

#endif  // KEDGE_FORMAT_CONTROL_FILE_H_
