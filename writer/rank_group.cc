#include "kedge/writer/rank_group.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "kedge/format/control_file.h"
#include "kedge/format/status.h"
#include "kedge/writer/wire.h"

namespace kedge {
namespace {

constexpr std::uint32_t kEnvelopeVersion = 1;
constexpr std::uint32_t kOutcomeUnknown = 1;  // bit of the flags
// Of the envelope beside payload and texts, and some room.
constexpr std::uint64_t kEnvelopeBytes = 4096;
constexpr std::size_t kMaxMessageBytes = 16384;

struct Envelope {
  std::string what;
  absl::Status status;
  bool outcome_unknown = false;
  std::vector<std::byte> payload;
};

std::vector<std::byte> Serialize(absl::string_view what,
                                 const absl::Status& status,
                                 bool outcome_unknown,
                                 std::span<const std::byte> payload) {
  WireWriter out;
  out.U32(kEnvelopeVersion);
  out.U32(static_cast<std::uint32_t>(status.code()));
  out.U32(outcome_unknown ? kOutcomeUnknown : 0);
  out.Text(what);
  out.Text(status.message().substr(0, kMaxMessageBytes));
  out.Bytes(payload);
  return out.Take();
}

absl::StatusOr<Envelope> Parse(absl::string_view where,
                               std::span<const std::byte> bytes) {
  WireReader in(bytes);
  const std::uint32_t version = in.U32();
  const std::uint32_t code = in.U32();
  const std::uint32_t flags = in.U32();
  Envelope envelope;
  envelope.what = in.Text();
  const std::string message = in.Text();
  const std::span<const std::byte> payload = in.Bytes();
  envelope.payload.assign(payload.begin(), payload.end());
  KEDGE_RETURN_IF_ERROR(in.Finish(where));
  if (version != kEnvelopeVersion || flags > kOutcomeUnknown || code > 16) {
    return absl::DataLossError(absl::StrCat(
        where, ": the message has version ", version, ", flags ", flags,
        ", code ", code, "; all ranks must run the same version of kedge"));
  }
  envelope.status = absl::Status(static_cast<absl::StatusCode>(code), message);
  envelope.outcome_unknown = flags == kOutcomeUnknown;
  return envelope;
}

// The payloads of all ranks, or what is wrong, by rank.
absl::StatusOr<std::vector<std::vector<std::byte>>> Open(
    absl::string_view what, std::span<const std::vector<std::byte>> envelopes) {
  const auto world_size = static_cast<std::uint32_t>(envelopes.size());
  std::vector<std::vector<std::byte>> payloads;
  absl::Status first;
  std::string texts;
  std::size_t failed = 0;
  for (std::uint32_t rank = 0; rank < world_size; ++rank) {
    const std::string name = RankName(rank, world_size);
    auto envelope = Parse(name, envelopes[rank]);
    absl::Status status = envelope.status();
    if (status.ok()) {
      status = envelope->status;
      if (!status.ok()) {
        status = Annotate(status, name);
      } else if (envelope->what != what) {
        status = absl::FailedPreconditionError(absl::StrCat(
            name, ": expected \"", what, "\" as at rank 0, found \"",
            envelope->what,
            "\"; all ranks make the same calls in the same order"));
      }
    }
    if (status.ok()) {
      payloads.push_back(std::move(envelope->payload));
      continue;
    }
    if (first.ok()) first = status;
    if (++failed <= 4) {
      absl::StrAppend(&texts, texts.empty() ? "" : "; ", status.message());
    }
  }
  if (failed == 0) return payloads;
  return absl::Status(
      first.code(),
      absl::StrCat(what, ": ", texts,
                   failed > 4 ? absl::StrCat("; and ", failed - 4, " more")
                              : std::string()));
}

}  // namespace

std::string RankName(std::uint32_t rank, std::uint32_t world_size) {
  return absl::StrCat("rank ", rank, " of ", world_size);
}

Verdict RankGroup::Agree(absl::string_view what, const Piece& mine,
                         const Decide& decide,
                         const std::function<void()>& cleanup) const {
  KEDGE_CHECK(!alone());
  absl::Status status = mine.status();
  std::span<const std::byte> payload;
  if (mine.ok()) {
    payload = *mine;
    if (payload.size() > kMaxControlPayloadBytes - kEnvelopeBytes -
                             kMaxMessageBytes - what.size()) {
      status = absl::ResourceExhaustedError(
          absl::StrCat("what this rank has to say takes ", payload.size(),
                       " bytes, more than ranks can exchange; use more ranks "
                       "or larger slices"));
      payload = {};
    }
  }
  auto gathered =
      coordinator_->Gather(what, Serialize(what, status, false, payload));

  if (!leads()) {
    auto heard = coordinator_->Broadcast(what, {});
    auto envelope = heard.ok() ? Parse("rank 0", *heard)
                               : absl::StatusOr<Envelope>(heard.status());
    Verdict verdict;
    if (!envelope.ok()) {
      verdict.outcome_unknown = true;
      verdict.status = absl::UnavailableError(absl::StrCat(
          what, ": outcome unknown: ",
          gathered.ok() ? "" : std::string(gathered.status().message()) + "; ",
          envelope.status().message()));
      return verdict;
    }
    verdict.status = envelope->status;
    verdict.payload = std::move(envelope->payload);
    verdict.outcome_unknown = envelope->outcome_unknown;
    return verdict;
  }

  Verdict verdict;
  if (!gathered.ok()) {
    verdict.status = gathered.status();
  } else {
    auto pieces = Open(what, *gathered);
    if (!pieces.ok()) {
      verdict.status = pieces.status();
    } else {
      verdict = decide(*pieces);
      if (!verdict.status.ok()) {
        verdict.status =
            Annotate(verdict.status, absl::StrCat(what, ", at rank 0"));
      }
    }
  }
  if (!verdict.status.ok()) {
    verdict.payload.clear();
    if (!verdict.outcome_unknown && cleanup) cleanup();
  }
  const auto told = coordinator_->Broadcast(
      what, Serialize(what, verdict.status, verdict.outcome_unknown,
                      verdict.payload));
  if (!told.ok()) {
    verdict.outcome_unknown = true;
    verdict.status = absl::UnavailableError(absl::StrCat(
        what, ": outcome unknown at the other ranks: rank 0 decided \"",
        verdict.status.ok() ? "OK" : verdict.status.message(),
        "\", and could not tell them: ", told.status().message(),
        "; open again on all ranks"));
  }
  return verdict;
}

}  // namespace kedge
