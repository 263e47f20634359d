#include "kedge/format/control_file.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "kedge/format/limits.h"
#include "kedge/format/status.h"

namespace kedge {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr char kMagic[] = "KDRC";
constexpr std::size_t kHashOffset = 72;
constexpr std::size_t kPeerBytes = 16;
constexpr std::uint64_t kMaxRefusalBytes = 4096;

constexpr absl::string_view kAdvice =
    "start all ranks again; a control file is rewritten at every start";

template <class T>
void Put(std::span<std::byte> bytes, std::size_t offset, const T& value) {
  std::memcpy(bytes.data() + offset, &value, sizeof(T));
}

template <class T>
T Get(std::span<const std::byte> bytes, std::size_t offset) {
  T value;
  std::memcpy(&value, bytes.data() + offset, sizeof(T));
  return value;
}

absl::Status Bad(absl::string_view where, std::size_t offset,
                 absl::string_view what, absl::string_view expected,
                 absl::string_view found) {
  return DataLoss({absl::StrCat(where, ": offset ", offset), what, expected,
                   found, kAdvice});
}

// XXH3-128 of all bytes but the hash itself.
Hash128 HashOf(std::span<const std::byte> bytes) {
  Hasher128 hasher;
  hasher.Update(bytes.first(kHashOffset));
  hasher.Update(bytes.subspan(kControlHeaderBytes));
  return hasher.Finish();
}

std::optional<std::uint64_t> ParseNumber(absl::string_view text, int base) {
  std::uint64_t value = 0;
  for (const char c : text) {
    int digit;
    if (c >= '0' && c <= '9') {
      digit = c - '0';
    } else if (base == 16 && c >= 'a' && c <= 'f') {
      digit = c - 'a' + 10;
    } else {
      return {};
    }
    value = value * static_cast<std::uint64_t>(base) +
            static_cast<std::uint64_t>(digit);
  }
  return value;
}

}  // namespace

absl::string_view ControlKindName(ControlKind kind) {
  switch (kind) {
    case ControlKind::kHello:
      return "hello";
    case ControlKind::kWelcome:
      return "welcome";
    case ControlKind::kReady:
      return "ready";
    case ControlKind::kGather:
      return "gather";
    case ControlKind::kBroadcast:
      return "broadcast";
    case ControlKind::kRefused:
      return "refused";
  }
  return "?";
}

std::vector<std::byte> SerializeControlFile(
    ControlHeader header, std::span<const std::byte> payload) {
  KEDGE_CHECK(payload.size() <= kMaxControlPayloadBytes);
  std::vector<std::byte> bytes(kControlHeaderBytes + payload.size());
  std::memcpy(bytes.data(), kMagic, 4);
  Put(bytes, 4, kFormatVersion);
  Put(bytes, 6, kFormatVersion);
  Put(bytes, 8, header.run);
  Put(bytes, 24, header.rank);
  Put(bytes, 28, header.world_size);
  Put(bytes, 32, header.session);
  Put(bytes, 40, header.nonce);
  Put(bytes, 48, header.round);
  Put(bytes, 56, static_cast<std::uint32_t>(header.kind));
  Put(bytes, 64, static_cast<std::uint64_t>(payload.size()));
  std::copy(payload.begin(), payload.end(),
            bytes.begin() + kControlHeaderBytes);
  Put(bytes, kHashOffset, HashOf(bytes));
  return bytes;
}

absl::StatusOr<ControlHeader> PeekControlHeader(
    absl::string_view where, std::span<const std::byte> bytes) {
  if (bytes.size() < kControlHeaderBytes) {
    return DataLoss({where, "size",
                     absl::StrCat("at least ", kControlHeaderBytes, " bytes"),
                     absl::StrCat(bytes.size()), kAdvice});
  }
  if (std::memcmp(bytes.data(), kMagic, 4) != 0) {
    return Bad(where, 0, "magic", "\"KDRC\"",
               absl::StrCat("0x", absl::Hex(Get<std::uint32_t>(bytes, 0),
                                            absl::kZeroPad8)));
  }
  ControlHeader header;
  header.run = Get<RunId>(bytes, 8);
  header.rank = Get<std::uint32_t>(bytes, 24);
  header.world_size = Get<std::uint32_t>(bytes, 28);
  header.session = Get<std::uint64_t>(bytes, 32);
  header.nonce = Get<std::uint64_t>(bytes, 40);
  header.round = Get<std::uint64_t>(bytes, 48);
  header.kind = static_cast<ControlKind>(Get<std::uint32_t>(bytes, 56));
  header.payload_bytes = Get<std::uint64_t>(bytes, 64);
  return header;
}

absl::StatusOr<ControlHeader> ParseControlFile(
    absl::string_view where, std::span<const std::byte> bytes) {
  KEDGE_ASSIGN_OR_RETURN(const ControlHeader header,
                         PeekControlHeader(where, bytes));
  const auto stored = Get<Hash128>(bytes, kHashOffset);
  const Hash128 actual = HashOf(bytes);
  if (stored != actual) {
    return Bad(where, kHashOffset, "XXH3-128", ToHex(actual), ToHex(stored));
  }
  const auto min_reader = Get<std::uint16_t>(bytes, 4);
  if (min_reader == 0) return Bad(where, 4, "min_reader", "1 or more", "0");
  if (min_reader > kFormatVersion) {
    return absl::UnimplementedError(
        Describe({where, "min_reader", absl::StrCat("at most ", kFormatVersion),
                  absl::StrCat(min_reader),
                  "all ranks of a run use one version of kedge: update this "
                  "one"}));
  }
  if (header.world_size == 0 || header.world_size > kMaxRanks) {
    return Bad(where, 28, "world_size", absl::StrCat("1 to ", kMaxRanks),
               absl::StrCat(header.world_size));
  }
  if (header.rank >= header.world_size) {
    return Bad(where, 24, "rank", absl::StrCat("below ", header.world_size),
               absl::StrCat(header.rank));
  }
  if (header.nonce == 0) return Bad(where, 40, "nonce", "not 0", "0");
  const auto kind = static_cast<std::uint32_t>(header.kind);
  if (kind < 1 || kind > 6) {
    return Bad(where, 56, "kind", "1 to 6", absl::StrCat(kind));
  }
  const bool by_rank_0 = header.kind == ControlKind::kWelcome ||
                         header.kind == ControlKind::kBroadcast;
  if (by_rank_0 != (header.rank == 0)) {
    return Bad(
        where, 56, "kind",
        by_rank_0 ? "one that a rank above 0 writes" : "one that rank 0 writes",
        ControlKindName(header.kind));
  }
  if ((header.session == 0) != (header.kind == ControlKind::kHello)) {
    return Bad(where, 32, "session", "0 in a hello, and only there",
               Hex64(header.session));
  }
  const bool has_round = header.kind == ControlKind::kGather ||
                         header.kind == ControlKind::kBroadcast;
  if ((header.round != 0) != has_round) {
    return Bad(where, 48, "round", has_round ? "1 or more" : "0",
               absl::StrCat(header.round));
  }
  if (Get<std::uint32_t>(bytes, 60) != 0) {
    return Bad(where, 60, "reserved", "0",
               absl::StrCat(Get<std::uint32_t>(bytes, 60)));
  }
  const std::uint64_t payload = bytes.size() - kControlHeaderBytes;
  if (header.payload_bytes != payload) {
    return Bad(where, 64, "payload_bytes", absl::StrCat(payload),
               absl::StrCat(header.payload_bytes));
  }
  std::uint64_t most = 0;
  if (has_round) most = kMaxControlPayloadBytes;
  if (header.kind == ControlKind::kWelcome) most = kMaxRanks * kPeerBytes;
  if (header.kind == ControlKind::kRefused) most = kMaxRefusalBytes;
  if (payload > most) {
    return Bad(
        where, 64, "payload_bytes",
        absl::StrCat("at most ", most, " in a ", ControlKindName(header.kind)),
        absl::StrCat(payload));
  }
  return header;
}

std::vector<std::byte> SerializeWelcome(std::span<const ControlPeer> peers) {
  KEDGE_CHECK(peers.size() <= kMaxRanks);
  std::vector<std::byte> bytes(peers.size() * kPeerBytes);
  for (std::size_t i = 0; i < peers.size(); ++i) {
    Put(bytes, i * kPeerBytes, peers[i].rank);
    Put(bytes, i * kPeerBytes + 8, peers[i].nonce);
  }
  return bytes;
}

absl::StatusOr<std::vector<ControlPeer>> ParseWelcome(
    absl::string_view where, std::span<const std::byte> payload) {
  if (payload.size() % kPeerBytes != 0 ||
      payload.size() / kPeerBytes > kMaxRanks) {
    return Bad(
        where, kControlHeaderBytes, "welcome",
        absl::StrCat("at most ", kMaxRanks, " rows of ", kPeerBytes, " bytes"),
        absl::StrCat(payload.size(), " bytes"));
  }
  std::vector<ControlPeer> peers(payload.size() / kPeerBytes);
  for (std::size_t i = 0; i < peers.size(); ++i) {
    peers[i].rank = Get<std::uint32_t>(payload, i * kPeerBytes);
    peers[i].nonce = Get<std::uint64_t>(payload, i * kPeerBytes + 8);
    const std::size_t offset = kControlHeaderBytes + i * kPeerBytes;
    if (peers[i].rank >= kMaxRanks ||
        (i > 0 && peers[i].rank <= peers[i - 1].rank)) {
      return Bad(where, offset, "rank",
                 absl::StrCat("ascending, below ", kMaxRanks),
                 absl::StrCat(peers[i].rank));
    }
    if (Get<std::uint32_t>(payload, i * kPeerBytes + 4) != 0 ||
        peers[i].nonce == 0) {
      return Bad(where, offset, "row", "reserved 0 and a nonce that is not 0",
                 "another value");
    }
  }
  return peers;
}

std::string ControlFileName(std::uint32_t rank) {
  return absl::StrFormat("rank_%05d", rank);
}

std::optional<std::uint32_t> ParseControlFileName(absl::string_view name) {
  if (!absl::ConsumePrefix(&name, "rank_") || name.size() != 5) return {};
  const auto rank = ParseNumber(name, 10);
  if (!rank) return {};
  return static_cast<std::uint32_t>(*rank);
}

std::string ControlTemporaryName(const ControlTemporary& temporary) {
  return absl::StrCat(ControlFileName(temporary.rank), ".",
                      absl::Hex(temporary.nonce, absl::kZeroPad16));
}

std::optional<ControlTemporary> ParseControlTemporaryName(
    absl::string_view name) {
  constexpr std::size_t kNameBytes = 10;  // of a control file
  if (name.size() != kNameBytes + 1 + 16 || name[kNameBytes] != '.') return {};
  const auto rank = ParseControlFileName(name.substr(0, kNameBytes));
  const auto nonce = ParseNumber(name.substr(kNameBytes + 1), 16);
  if (!rank || !nonce) return {};
  return ControlTemporary{*rank, *nonce};
}

}  // namespace kedge
