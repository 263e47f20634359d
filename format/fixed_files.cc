#include "kedge/format/fixed_files.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <random>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "kedge/format/limits.h"
#include "kedge/format/status.h"

namespace kedge {
namespace {

// Fields are copied as they stand in memory.
static_assert(std::endian::native == std::endian::little);

constexpr char kCommitMagic[] = "KDCM";
constexpr char kHeadMagic[] = "KDHD";
constexpr char kStoreMagic[] = "KDST";
constexpr char kEpochMagic[] = "KDEP";
constexpr char kLeaseMagic[] = "KDLS";
constexpr char kSegmentMagic[] = "KDSG";
constexpr char kAnchorMagic[] = "KDAN";

constexpr absl::string_view kAdvice = "run `kedge fsck`";

template <std::size_t kSize>
class FixedWriter {
 public:
  explicit FixedWriter(const char* magic) {
    std::memcpy(bytes_.data(), magic, 4);
    Put(4, kFormatVersion);
    Put(6, kFormatVersion);
  }

  template <class T>
  void Put(std::size_t offset, const T& value) {
    static_assert(std::is_integral_v<T> || std::is_same_v<T, Bytes16>);
    std::memcpy(bytes_.data() + offset, &value, sizeof(T));
  }

  std::array<std::byte, kSize> Finish() {
    Put(kSize - 8, HashBytes64(std::span(bytes_).first(kSize - 8)));
    return bytes_;
  }

 private:
  std::array<std::byte, kSize> bytes_{};
};

class FixedReader {
 public:
  FixedReader(absl::string_view where, std::span<const std::byte> bytes)
      : where_(where), bytes_(bytes) {}

  // Size, magic, hash, versions: what all of these files share.
  absl::Status Open(std::size_t size, absl::string_view magic) {
    if (bytes_.size() != size) {
      return DataLoss({where_, "size", absl::StrCat(size, " bytes"),
                       absl::StrCat(bytes_.size(), " bytes"), kAdvice});
    }
    if (std::memcmp(bytes_.data(), magic.data(), 4) != 0) {
      return Bad(0, "magic",
                 absl::StrCat("\"", magic, "\" ",
                              Hex32(absl::string_view(magic.data(), 4))),
                 Hex32({reinterpret_cast<const char*>(bytes_.data()), 4}));
    }
    const auto stored = Get<std::uint64_t>(size - 8);
    const std::uint64_t actual = HashBytes64(bytes_.first(size - 8));
    if (stored != actual) {
      return Bad(size - 8, "hash", Hex64(actual), Hex64(stored));
    }
    const auto min_reader = Get<std::uint16_t>(4);
    if (min_reader == 0) return Bad(4, "min_reader", "1 or more", "0");
    if (min_reader > kFormatVersion) {
      return absl::UnimplementedError(
          Describe({where_, "min_reader",
                    absl::StrCat("at most ", kFormatVersion,
                                 ", the newest format version of this reader"),
                    absl::StrCat(min_reader, ", written by version ",
                                 Get<std::uint16_t>(6)),
                    "update kedge"}));
    }
    return absl::OkStatus();
  }

  template <class T>
  T Get(std::size_t offset) const {
    T value;
    std::memcpy(&value, bytes_.data() + offset, sizeof(T));
    return value;
  }

  absl::Status Bad(std::size_t offset, absl::string_view what,
                   absl::string_view expected, absl::string_view found) const {
    return DataLoss({absl::StrCat(where_, ": offset ", offset), what, expected,
                     found, kAdvice});
  }

  absl::Status CheckZero(std::size_t offset, std::size_t size) const {
    for (std::size_t i = offset; i < offset + size; ++i) {
      if (bytes_[i] != std::byte{0}) {
        return Bad(i, "reserved byte", "0",
                   absl::StrCat(std::to_integer<int>(bytes_[i])));
      }
    }
    return absl::OkStatus();
  }

  absl::Status CheckRange(std::size_t offset, absl::string_view what,
                          std::uint64_t value, std::uint64_t least,
                          std::uint64_t most) const {
    if (value >= least && value <= most) return absl::OkStatus();
    return Bad(offset, what, absl::StrCat(least, " to ", most),
               absl::StrCat(value));
  }

  // Only step 0 is of epoch 0.
  absl::Status CheckStepEpoch(std::uint64_t step, std::uint32_t epoch) const {
    KEDGE_RETURN_IF_ERROR(CheckRange(24, "step", step, 0, kMaxStep));
    return CheckRange(32, "epoch", epoch, step == 0 ? 0 : 1, kMaxEpoch);
  }

 private:
  static std::string Hex32(absl::string_view four) {
    std::string text = "0x";
    for (const char c : four) {
      absl::StrAppend(
          &text, absl::Hex(static_cast<unsigned char>(c), absl::kZeroPad2));
    }
    return text;
  }

  absl::string_view where_;
  std::span<const std::byte> bytes_;
};

}  // namespace

std::array<std::byte, kCommitBytes> SerializeCommit(
    const CommitRecord& commit) {
  FixedWriter<kCommitBytes> writer(kCommitMagic);
  writer.Put(8, commit.run);
  writer.Put(24, commit.step);
  writer.Put(32, commit.epoch);
  writer.Put(36, commit.manifest_bytes);
  writer.Put(40, commit.manifest_hash);
  return writer.Finish();
}

absl::StatusOr<CommitRecord> ParseCommit(absl::string_view where,
                                         std::span<const std::byte> bytes) {
  FixedReader reader(where, bytes);
  KEDGE_RETURN_IF_ERROR(reader.Open(kCommitBytes, kCommitMagic));
  CommitRecord commit;
  commit.run = reader.Get<RunId>(8);
  commit.step = reader.Get<std::uint64_t>(24);
  commit.epoch = reader.Get<std::uint32_t>(32);
  commit.manifest_bytes = reader.Get<std::uint32_t>(36);
  commit.manifest_hash = reader.Get<Hash128>(40);
  KEDGE_RETURN_IF_ERROR(reader.CheckStepEpoch(commit.step, commit.epoch));
  KEDGE_RETURN_IF_ERROR(reader.CheckRange(
      36, "manifest length", commit.manifest_bytes, 1, kMaxFlatBufferBytes));
  return commit;
}

std::array<std::byte, kHeadBytes> SerializeHead(const Head& head) {
  FixedWriter<kHeadBytes> writer(kHeadMagic);
  writer.Put(8, head.run);
  writer.Put(24, head.step);
  writer.Put(32, head.epoch);
  writer.Put(40, head.manifest_hash);
  return writer.Finish();
}

absl::StatusOr<Head> ParseHead(absl::string_view where,
                               std::span<const std::byte> bytes) {
  FixedReader reader(where, bytes);
  KEDGE_RETURN_IF_ERROR(reader.Open(kHeadBytes, kHeadMagic));
  Head head;
  head.run = reader.Get<RunId>(8);
  head.step = reader.Get<std::uint64_t>(24);
  head.epoch = reader.Get<std::uint32_t>(32);
  head.manifest_hash = reader.Get<Hash128>(40);
  KEDGE_RETURN_IF_ERROR(reader.CheckStepEpoch(head.step, head.epoch));
  KEDGE_RETURN_IF_ERROR(reader.CheckZero(36, 4));
  return head;
}

std::array<std::byte, kStoreBytes> SerializeStore(const StoreInfo& store) {
  FixedWriter<kStoreBytes> writer(kStoreMagic);
  writer.Put(8, store.run);
  writer.Put(24, store.l61_seed);
  writer.Put(32, static_cast<std::uint32_t>(store.commit_mode));
  writer.Put(36, static_cast<std::uint32_t>(store.external_v0 ? 1 : 0));
  writer.Put(40, store.v0_digest);
  writer.Put(56, store.v0_table_hash);
  writer.Put(72, store.created_unix_seconds);
  return writer.Finish();
}

absl::StatusOr<StoreInfo> ParseStore(absl::string_view where,
                                     std::span<const std::byte> bytes) {
  FixedReader reader(where, bytes);
  KEDGE_RETURN_IF_ERROR(reader.Open(kStoreBytes, kStoreMagic));
  StoreInfo store;
  store.run = reader.Get<RunId>(8);
  store.l61_seed = reader.Get<std::uint64_t>(24);
  const auto mode = reader.Get<std::uint32_t>(32);
  if (mode != static_cast<std::uint32_t>(CommitMode::kRenameDirectory)) {
    return reader.Bad(32, "commit mode", "1", absl::StrCat(mode));
  }
  store.commit_mode = static_cast<CommitMode>(mode);
  const auto external_v0 = reader.Get<std::uint32_t>(36);
  if (external_v0 > 1) {
    return reader.Bad(36, "external v0", "0 or 1", absl::StrCat(external_v0));
  }
  store.external_v0 = external_v0 == 1;
  store.v0_digest = reader.Get<Hash128>(40);
  store.v0_table_hash = reader.Get<Hash128>(56);
  store.created_unix_seconds = reader.Get<std::uint64_t>(72);
  KEDGE_RETURN_IF_ERROR(reader.CheckZero(80, 8));
  return store;
}

std::array<std::byte, kEpochBytes> SerializeEpoch(const EpochInfo& epoch) {
  FixedWriter<kEpochBytes> writer(kEpochMagic);
  writer.Put(8, epoch.run);
  writer.Put(24, epoch.resume_step);
  writer.Put(32, epoch.epoch);
  writer.Put(40, epoch.resume_manifest_hash);
  return writer.Finish();
}

absl::StatusOr<EpochInfo> ParseEpoch(absl::string_view where,
                                     std::span<const std::byte> bytes) {
  FixedReader reader(where, bytes);
  KEDGE_RETURN_IF_ERROR(reader.Open(kEpochBytes, kEpochMagic));
  EpochInfo epoch;
  epoch.run = reader.Get<RunId>(8);
  epoch.resume_step = reader.Get<std::uint64_t>(24);
  epoch.epoch = reader.Get<std::uint32_t>(32);
  epoch.resume_manifest_hash = reader.Get<Hash128>(40);
  KEDGE_RETURN_IF_ERROR(
      reader.CheckRange(24, "resume step", epoch.resume_step, 0, kMaxStep));
  KEDGE_RETURN_IF_ERROR(
      reader.CheckRange(32, "epoch", epoch.epoch, 1, kMaxEpoch));
  KEDGE_RETURN_IF_ERROR(reader.CheckZero(36, 4));
  return epoch;
}

bool IsReaderId(absl::string_view id) {
  if (id.empty() || id.size() > kMaxReaderIdBytes || id.front() == '.') {
    return false;
  }
  return std::all_of(id.begin(), id.end(), [](char c) {
    return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '.' ||
           c == '_' || c == '-';
  });
}

std::array<std::byte, kLeaseBytes> SerializeLease(const LeaseRecord& lease) {
  KEDGE_CHECK(IsReaderId(lease.reader));
  FixedWriter<kLeaseBytes> writer(kLeaseMagic);
  writer.Put(8, lease.run);
  writer.Put(24, lease.oldest_step);
  writer.Put(32, std::uint32_t{lease.holds ? 1u : 0u});
  writer.Put(36, static_cast<std::uint32_t>(lease.reader.size()));
  writer.Put(40, lease.held_manifest_hash);
  writer.Put(56, lease.held_step);
  writer.Put(64, lease.counter);
  for (std::size_t i = 0; i < lease.reader.size(); ++i) {
    writer.Put(72 + i, lease.reader[i]);
  }
  return writer.Finish();
}

absl::StatusOr<LeaseRecord> ParseLease(absl::string_view where,
                                       std::span<const std::byte> bytes) {
  FixedReader reader(where, bytes);
  KEDGE_RETURN_IF_ERROR(reader.Open(kLeaseBytes, kLeaseMagic));
  LeaseRecord lease;
  lease.run = reader.Get<RunId>(8);
  lease.oldest_step = reader.Get<std::uint64_t>(24);
  const auto holds = reader.Get<std::uint32_t>(32);
  const auto id_bytes = reader.Get<std::uint32_t>(36);
  lease.held_manifest_hash = reader.Get<Hash128>(40);
  lease.held_step = reader.Get<std::uint64_t>(56);
  lease.counter = reader.Get<std::uint64_t>(64);
  KEDGE_RETURN_IF_ERROR(
      reader.CheckRange(24, "oldest step", lease.oldest_step, 0, kMaxStep));
  KEDGE_RETURN_IF_ERROR(reader.CheckRange(32, "holds", holds, 0, 1));
  KEDGE_RETURN_IF_ERROR(reader.CheckRange(36, "length of the reader id",
                                          id_bytes, 1, kMaxReaderIdBytes));
  lease.holds = holds == 1;
  if (!lease.holds) {
    KEDGE_RETURN_IF_ERROR(reader.CheckZero(40, 24));
  }
  KEDGE_RETURN_IF_ERROR(
      reader.CheckRange(56, "held step", lease.held_step, 0, kMaxStep));
  KEDGE_RETURN_IF_ERROR(
      reader.CheckRange(64, "counter", lease.counter, 1, kMaxLeaseCounter));
  for (std::size_t i = 0; i < id_bytes; ++i) {
    lease.reader.push_back(reader.Get<char>(72 + i));
  }
  KEDGE_RETURN_IF_ERROR(
      reader.CheckZero(72 + id_bytes, kMaxReaderIdBytes - id_bytes));
  if (!IsReaderId(lease.reader)) {
    return reader.Bad(72, "reader id", "A-Z a-z 0-9 . _ - and no dot in front",
                      absl::StrCat("\"", absl::CHexEscape(lease.reader), "\""));
  }
  return lease;
}

std::array<std::byte, kDataFileHeaderBytes> SerializeDataFileHeader(
    const DataFileHeader& header) {
  FixedWriter<kDataFileHeaderBytes> writer(
      header.file.kind == FileKind::kAnchor ? kAnchorMagic : kSegmentMagic);
  writer.Put(8, header.run);
  writer.Put(24, header.step);
  writer.Put(32, header.file.rank);
  writer.Put(36, header.file.number);
  writer.Put(40, header.payload_bytes);
  writer.Put(48, header.count);
  return writer.Finish();
}

absl::StatusOr<DataFileHeader> ParseDataFileHeader(
    absl::string_view where, FileKind kind, std::span<const std::byte> bytes) {
  FixedReader reader(where, bytes);
  const bool anchor = kind == FileKind::kAnchor;
  KEDGE_RETURN_IF_ERROR(
      reader.Open(kDataFileHeaderBytes, anchor ? kAnchorMagic : kSegmentMagic));
  DataFileHeader header;
  header.run = reader.Get<RunId>(8);
  header.step = reader.Get<std::uint64_t>(24);
  header.file.kind = kind;
  header.file.rank = reader.Get<std::uint32_t>(32);
  header.file.number = reader.Get<std::uint32_t>(36);
  header.payload_bytes = reader.Get<std::uint64_t>(40);
  header.count = reader.Get<std::uint32_t>(48);
  KEDGE_RETURN_IF_ERROR(
      reader.CheckRange(24, "step", header.step, 0, kMaxStep));
  KEDGE_RETURN_IF_ERROR(
      reader.CheckRange(32, "rank", header.file.rank, 0, kMaxRanks - 1));
  KEDGE_RETURN_IF_ERROR(reader.CheckRange(36, "number", header.file.number, 0,
                                          kMaxFilesPerRank - 1));
  KEDGE_RETURN_IF_ERROR(reader.CheckRange(
      40, "payload_bytes", header.payload_bytes, 0, kMaxFileBytes));
  if (!anchor && header.payload_bytes % kRecordAlignment != 0) {
    return reader.Bad(40, "payload_bytes", "a multiple of 8",
                      absl::StrCat(header.payload_bytes));
  }
  // A record and a slice have at least one byte.
  KEDGE_RETURN_IF_ERROR(reader.CheckRange(
      48, "count", header.count, header.payload_bytes == 0 ? 0 : 1,
      std::min({header.payload_bytes,
                anchor ? kMaxSlicesPerAnchor : kMaxRecordsPerStep})));
  KEDGE_RETURN_IF_ERROR(reader.CheckZero(52, 4));
  return header;
}

std::uint64_t SegmentFileBytes(std::uint64_t payload_bytes) {
  KEDGE_CHECK(payload_bytes <= kMaxFileBytes);
  const std::uint64_t bytes =
      kDataFileHeaderBytes + payload_bytes + kSegmentTailBytes;
  return (bytes + kSegmentAlignment - 1) / kSegmentAlignment *
         kSegmentAlignment;
}

RunId RandomRunId() {
  RunId run;
  std::random_device device;
  std::generate(run.bytes.begin(), run.bytes.end(),
                [&] { return static_cast<std::uint8_t>(device()); });
  return run;
}

std::uint64_t RandomSeed() {
  std::random_device device;
  static_assert(std::random_device::max() ==
                std::numeric_limits<std::uint32_t>::max());
  const std::uint64_t high = device();
  return high << 32 | device();
}

}  // namespace kedge
