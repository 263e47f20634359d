#include "kedge/reader/group_channel.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kedge/format/l61.h"
#include "kedge/format/limits.h"
#include "kedge/format/status.h"

namespace kedge {
namespace {

// Every value handed to the reducer is below 2^61 - 1: bytes travel in runs of
// seven, hashes in halves of 64 bits.
constexpr std::size_t kLimbBytes = 7;
// What a rank may send of its weight sets: beyond it the sizes are damaged.
constexpr std::uint64_t kMaxExchangeBytes = std::uint64_t{1} << 32;

// A rank's slots begin with these two.
constexpr std::size_t kPresentSlot = 0;
constexpr std::size_t kPhaseSlot = 1;
constexpr std::size_t kHeaderSlots = 2;

enum BallotSlot : std::size_t {
  kCode = kHeaderSlots,
  kState,
  kFlags,
  kHeldStep,
  kHeldHash,
  kTargetStep = kHeldHash + 4,
  kTargetHash,
  kTargetEpoch = kTargetHash + 4,
  kBallotSlots,
};

constexpr std::uint64_t kSupersededFlag = 1;
constexpr std::uint64_t kExpiredFlag = 2;
constexpr std::uint64_t kLastFlag = 4;
constexpr std::uint64_t kHeldFlag = 8;
constexpr std::uint64_t kTargetFlag = 16;

void PutVersion(const VersionId& id, std::uint64_t* step, std::uint64_t* hash) {
  *step = id.step;
  for (std::size_t i = 0; i < 16; ++i) {
    hash[i / 4] |= std::uint64_t{id.manifest_hash.bytes[i]} << (8 * (i % 4));
  }
}

VersionId GetVersion(std::uint64_t step, const std::uint64_t* hash) {
  VersionId id;
  id.step = step;
  for (std::size_t i = 0; i < 16; ++i) {
    id.manifest_hash.bytes[i] =
        static_cast<std::uint8_t>(hash[i / 4] >> (8 * (i % 4)));
  }
  return id;
}

absl::StatusCode CodeOf(std::uint64_t value) {
  return value <= static_cast<std::uint64_t>(absl::StatusCode::kUnauthenticated)
             ? static_cast<absl::StatusCode>(value)
             : absl::StatusCode::kUnknown;
}

}  // namespace

absl::string_view ToString(GroupPhase phase) {
  switch (phase) {
    case GroupPhase::kOpen:
      return "Open";
    case GroupPhase::kUpdate:
      return "Update";
    case GroupPhase::kWait:
      return "WaitForUpdate";
    case GroupPhase::kJoin:
      return "Join";
    case GroupPhase::kJoinStep:
      return "JoinStep";
    case GroupPhase::kJoinLoaded:
      return "Join, files read";
    case GroupPhase::kVerifyHeld:
      return "VerifyHeld";
    case GroupPhase::kMask:
      return "Join, what memory holds";
    case GroupPhase::kVerify:
      return "verification";
  }
  return "something else";
}

absl::Status GroupChannel::Check(const GroupOptions& options) {
  if (options.size == 0 || options.size > kMaxRanks ||
      options.rank >= options.size) {
    return absl::InvalidArgumentError(absl::StrCat(
        "group ", options.name, ": rank ", options.rank, " of ", options.size,
        ": expected a size of 1 to ", kMaxRanks, " and a rank below it"));
  }
  if (options.size > 1 && !options.reduce) {
    return absl::InvalidArgumentError(
        absl::StrCat("group ", options.name, ": ", options.size,
                     " ranks and no `reduce` through which they could agree"));
  }
  return absl::OkStatus();
}

GroupChannel::GroupChannel(GroupOptions options)
    : options_(std::move(options)),
      text_(options_.name.empty() ? std::string("the group")
                                  : absl::StrCat("group ", options_.name)) {}

absl::Status GroupChannel::Reduce(std::span<std::uint64_t> values) {
  const absl::Status status = options_.reduce(values);
  if (!status.ok()) {
    // To the caller a deadline of its own is another thing than one of ours.
    return absl::Status(
        absl::IsDeadlineExceeded(status) ? absl::StatusCode::kUnavailable
                                         : status.code(),
        absl::StrCat(text_, ": rank ", options_.rank, " of ", options_.size,
                     ": the reducer failed: ", status.message()));
  }
  for (std::uint64_t& value : values) value = L61Reduce(value);
  return absl::OkStatus();
}

absl::Status GroupChannel::Gather(GroupPhase phase, std::size_t slots,
                                  std::vector<std::uint64_t>* values) {
  std::uint64_t* mine = values->data() + options_.rank * slots;
  mine[kPresentSlot] = 1;
  mine[kPhaseSlot] = static_cast<std::uint64_t>(phase);
  KEDGE_RETURN_IF_ERROR(Reduce(*values));
  for (std::uint32_t r = 0; r < options_.size; ++r) {
    const std::uint64_t* theirs = values->data() + r * slots;
    if (theirs[kPresentSlot] != 1) {
      return absl::FailedPreconditionError(absl::StrCat(
          text_, ": ", theirs[kPresentSlot], " processes are rank ", r, " of ",
          options_.size, "; give each rank of the group its own number"));
    }
  }
  for (std::uint32_t r = 0; r < options_.size; ++r) {
    const std::uint64_t* theirs = values->data() + r * slots;
    if (theirs[kPhaseSlot] != values->at(kPhaseSlot)) {
      return absl::FailedPreconditionError(absl::StrCat(
          text_, ": the ranks are out of step: rank 0 is in ",
          ToString(static_cast<GroupPhase>(values->at(kPhaseSlot))), ", rank ",
          r, " in ", ToString(static_cast<GroupPhase>(theirs[kPhaseSlot])),
          "; every rank must make the same calls in the same order"));
    }
  }
  // Likewise where all others agree and this rank is the one that strays.
  if (values->at(kPhaseSlot) != static_cast<std::uint64_t>(phase)) {
    return absl::InternalError(
        absl::StrCat(text_, ": the reducer did not return the sum"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<Ballot>> GroupChannel::Vote(GroupPhase phase,
                                                       const Ballot& mine) {
  std::vector<std::uint64_t> values(std::size_t{options_.size} * kBallotSlots);
  std::uint64_t* own = values.data() + options_.rank * kBallotSlots;
  own[kCode] = static_cast<std::uint64_t>(mine.code);
  own[kState] = static_cast<std::uint64_t>(mine.state);
  own[kFlags] = (mine.superseded ? kSupersededFlag : 0) |
                (mine.expired ? kExpiredFlag : 0) |
                (mine.last ? kLastFlag : 0) | (mine.held ? kHeldFlag : 0) |
                (mine.target ? kTargetFlag : 0);
  if (mine.held) PutVersion(*mine.held, own + kHeldStep, own + kHeldHash);
  if (mine.target) {
    PutVersion(*mine.target, own + kTargetStep, own + kTargetHash);
    own[kTargetEpoch] = mine.target_epoch;
  }
  KEDGE_RETURN_IF_ERROR(Gather(phase, kBallotSlots, &values));

  std::vector<Ballot> ballots(options_.size);
  for (std::uint32_t r = 0; r < options_.size; ++r) {
    const std::uint64_t* theirs = values.data() + r * kBallotSlots;
    Ballot& ballot = ballots[r];
    ballot.code = CodeOf(theirs[kCode]);
    if (theirs[kState] >
        static_cast<std::uint64_t>(FollowerState::kSuperseded)) {
      return absl::InternalError(
          absl::StrCat(text_, ": the reducer did not return the sum: rank ", r,
                       " is in state ", theirs[kState]));
    }
    ballot.state = static_cast<FollowerState>(theirs[kState]);
    const std::uint64_t flags = theirs[kFlags];
    ballot.superseded = (flags & kSupersededFlag) != 0;
    ballot.expired = (flags & kExpiredFlag) != 0;
    ballot.last = (flags & kLastFlag) != 0;
    if ((flags & kHeldFlag) != 0) {
      ballot.held = GetVersion(theirs[kHeldStep], theirs + kHeldHash);
    }
    if ((flags & kTargetFlag) != 0) {
      ballot.target = GetVersion(theirs[kTargetStep], theirs + kTargetHash);
      ballot.target_epoch = static_cast<std::uint32_t>(theirs[kTargetEpoch]);
    }
  }
  return ballots;
}

absl::StatusOr<GroupChannel::Total> GroupChannel::Add(
    GroupPhase phase, absl::StatusCode code,
    std::span<const std::uint64_t> residues) {
  constexpr std::size_t kSlots = kHeaderSlots + 1;
  const std::size_t header = std::size_t{options_.size} * kSlots;
  std::vector<std::uint64_t> values(header + residues.size());
  values[options_.rank * kSlots + kHeaderSlots] =
      static_cast<std::uint64_t>(code);
  std::copy(residues.begin(), residues.end(),
            values.begin() + static_cast<std::ptrdiff_t>(header));
  KEDGE_RETURN_IF_ERROR(Gather(phase, kSlots, &values));
  Total total;
  for (std::uint32_t r = 0; r < options_.size; ++r) {
    total.codes.push_back(CodeOf(values[r * kSlots + kHeaderSlots]));
  }
  total.residues.assign(values.begin() + static_cast<std::ptrdiff_t>(header),
                        values.end());
  return total;
}

absl::StatusOr<std::vector<std::vector<std::byte>>> GroupChannel::Exchange(
    GroupPhase phase, const absl::StatusOr<std::vector<std::byte>>& mine,
    std::span<const std::uint64_t> alike) {
  const std::size_t slots = kHeaderSlots + 2 + alike.size();
  std::vector<std::uint64_t> sizes(options_.size * slots);
  std::uint64_t* own = sizes.data() + options_.rank * slots;
  own[kHeaderSlots] = static_cast<std::uint64_t>(mine.status().code());
  own[kHeaderSlots + 1] = mine.ok() ? mine->size() : 0;
  std::copy(alike.begin(), alike.end(), own + kHeaderSlots + 2);
  KEDGE_RETURN_IF_ERROR(Gather(phase, slots, &sizes));

  std::vector<absl::StatusCode> codes;
  std::vector<std::size_t> bytes_of_rank;
  std::vector<std::size_t> limb_of_rank;
  std::size_t limbs = 0;
  for (std::uint32_t r = 0; r < options_.size; ++r) {
    const std::uint64_t* theirs = sizes.data() + r * slots;
    codes.push_back(CodeOf(theirs[kHeaderSlots]));
    const std::uint64_t bytes = theirs[kHeaderSlots + 1];
    if (bytes > kMaxExchangeBytes) {
      return absl::InvalidArgumentError(
          absl::StrCat(text_, ": rank ", r, " describes its weights in ", bytes,
                       " bytes; at most ", kMaxExchangeBytes, " are taken"));
    }
    bytes_of_rank.push_back(bytes);
    limb_of_rank.push_back(limbs);
    limbs += (bytes + kLimbBytes - 1) / kLimbBytes;
  }
  KEDGE_RETURN_IF_ERROR(
      Failure(codes, mine.status(), "could not open", "nothing was opened"));
  for (std::uint32_t r = 1; r < options_.size; ++r) {
    const std::uint64_t* theirs = sizes.data() + r * slots + kHeaderSlots + 2;
    for (std::size_t i = 0; i < alike.size(); ++i) {
      if (theirs[i] == sizes[kHeaderSlots + 2 + i]) continue;
      return absl::FailedPreconditionError(absl::StrCat(
          text_, ": ranks 0 and ", r,
          " do not open alike: another store, tensor table, group size, "
          "every_version or allow_partial; if the table has just changed, open "
          "again"));
    }
  }

  std::vector<std::uint64_t> values(limbs);
  for (std::size_t i = 0; i < mine->size(); ++i) {
    values[limb_of_rank[options_.rank] + i / kLimbBytes] |=
        std::to_integer<std::uint64_t>((*mine)[i]) << (8 * (i % kLimbBytes));
  }
  KEDGE_RETURN_IF_ERROR(Reduce(values));
  std::vector<std::vector<std::byte>> all(options_.size);
  for (std::uint32_t r = 0; r < options_.size; ++r) {
    all[r].resize(bytes_of_rank[r]);
    for (std::size_t i = 0; i < all[r].size(); ++i) {
      all[r][i] = static_cast<std::byte>(
          values[limb_of_rank[r] + i / kLimbBytes] >> (8 * (i % kLimbBytes)));
    }
  }
  return all;
}

absl::Status GroupChannel::Failure(const std::vector<absl::StatusCode>& codes,
                                   const absl::Status& mine,
                                   absl::string_view what,
                                   absl::string_view consequence) const {
  std::string ranks;
  absl::StatusCode first = absl::StatusCode::kOk;
  for (std::uint32_t r = 0; r < codes.size(); ++r) {
    if (codes[r] == absl::StatusCode::kOk) continue;
    if (first == absl::StatusCode::kOk) first = codes[r];
    absl::StrAppend(&ranks, ranks.empty() ? "rank " : ", rank ", r, " (",
                    absl::StatusCodeToString(codes[r]), ")");
  }
  if (first == absl::StatusCode::kOk) return absl::OkStatus();
  const std::string summary =
      absl::StrCat(text_, ": ", ranks, " ", what, "; ", consequence);
  if (mine.ok()) {
    return absl::Status(
        first, absl::StrCat(summary, "; what stopped it stands in its status"));
  }
  return absl::Status(mine.code(), absl::StrCat(mine.message(), "; ", summary));
}

}  // namespace kedge
