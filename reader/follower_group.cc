// What the ranks of a group do together: every decision is taken from what all
// of them said, so that all take the same one.

#include <algorithm>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kedge/format/codec.h"
#include "kedge/format/l61.h"
#include "kedge/format/status.h"
#include "kedge/reader/follower_impl.h"
#include "kedge/reader/offenders.h"
#include "kedge/reader/weight_exchange.h"

namespace kedge {
namespace {

constexpr char kNothingChanged[] = "nothing was changed on any rank; try again";

double SecondsSince(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start)
      .count();
}

std::vector<absl::StatusCode> CodesOf(const std::vector<Ballot>& ballots) {
  std::vector<absl::StatusCode> codes;
  for (const Ballot& ballot : ballots) codes.push_back(ballot.code);
  return codes;
}

bool NobodyHasTarget(const std::vector<Ballot>& ballots) {
  return std::none_of(ballots.begin(), ballots.end(), [](const Ballot& ballot) {
    return ballot.target.has_value();
  });
}

bool AllHaveOneTarget(const std::vector<Ballot>& ballots) {
  return std::all_of(ballots.begin(), ballots.end(), [&](const Ballot& ballot) {
    return ballot.target && ballot.target == ballots.front().target;
  });
}

// Where ranks see different newest versions: the oldest of these, of the newest
// epoch. A rank that sees a newer one gets there, one that sees none yet soon
// will.
VersionId AimOf(const std::vector<Ballot>& ballots) {
  const Ballot* aim = nullptr;
  const auto before = [](const Ballot& a, const Ballot& b) {
    return std::make_tuple(~a.target_epoch, *a.target) <
           std::make_tuple(~b.target_epoch, *b.target);
  };
  for (const Ballot& ballot : ballots) {
    if (!ballot.target) continue;
    if (aim == nullptr || before(ballot, *aim)) aim = &ballot;
  }
  return *aim->target;
}

// "rank 0: v3 (...), rank 1: none".
std::string VersionsText(const std::vector<Ballot>& ballots,
                         std::optional<VersionId> Ballot::*version) {
  std::string text;
  for (std::uint32_t r = 0; r < ballots.size(); ++r) {
    const std::optional<VersionId>& id = ballots[r].*version;
    absl::StrAppend(&text, r == 0 ? "rank " : ", rank ", r, ": ",
                    id ? ToString(*id) : "none");
  }
  return text;
}

// "rank 1, rank 3": those of which `is` is true.
std::string RanksThat(const std::vector<Ballot>& ballots,
                      bool (*is)(const Ballot&)) {
  std::string text;
  for (std::uint32_t r = 0; r < ballots.size(); ++r) {
    if (!is(ballots[r])) continue;
    absl::StrAppend(&text, text.empty() ? "rank " : ", rank ", r);
  }
  return text;
}

void AppendHash(const Bytes16& hash, std::vector<std::uint64_t>* values) {
  for (std::size_t i = 0; i < 16; i += 4) {
    std::uint64_t value = 0;
    for (std::size_t k = 0; k < 4; ++k) value = value << 8 | hash.bytes[i + k];
    values->push_back(value);
  }
}

}  // namespace

absl::Status Follower::Impl::OpenInGroup(
    const FollowerOptions& options, const std::vector<const WeightSet*>& sets,
    absl::StatusOr<std::unique_ptr<Impl>>& impl, const SharedStep& newest) {
  absl::StatusOr<std::vector<std::byte>> described = std::vector<std::byte>();
  std::vector<std::uint64_t> alike;
  AppendHash(impl.ok() ? (*impl)->store->info().run : RunId{}, &alike);
  AppendHash(impl.ok() ? newest->table->hash() : Hash128{}, &alike);
  alike.push_back(options.group.size);
  alike.push_back((options.every_version ? 1u : 0u) |
                  (options.allow_partial ? 2u : 0u));
  if (impl.ok()) {
    described = SerializeWeightSets(sets);
  } else {
    described = impl.status();
  }

  GroupChannel channel(options.group);
  KEDGE_ASSIGN_OR_RETURN(const std::vector<std::vector<std::byte>> all,
                         channel.Exchange(GroupPhase::kOpen, described, alike));
  Impl& opened = **impl;
  opened.foreign_sets.resize(all.size());
  opened.sets_of_rank.assign(all.size(), {});
  for (std::uint32_t r = 0; r < all.size(); ++r) {
    auto parsed = ParseWeightSets(all[r]);
    if (!parsed.ok()) {
      return Annotate(parsed.status(),
                      absl::StrCat(channel.text(), ": rank ", r));
    }
    if (r == channel.rank()) {
      opened.sets_of_rank[r] = sets;
      continue;
    }
    for (auto& set : *parsed) {
      opened.sets_of_rank[r].push_back(set.get());
      opened.foreign_sets[r].push_back(std::move(set));
    }
  }
  return absl::OkStatus();
}

absl::Status Follower::Impl::PauseOnce() {
  if (paused_at) return absl::OkStatus();
  if (options.pause) KEDGE_RETURN_IF_ERROR(options.pause());
  paused_at = Clock::now();
  return absl::OkStatus();
}

void Follower::Impl::Resume() {
  if (!paused_at) return;
  paused_at.reset();
  // Weights that are of no version stay paused.
  if (State() != FollowerState::kPoisoned && options.resume) options.resume();
}

Ballot Follower::Impl::MakeBallot(const absl::Status& mine,
                                  const SharedStep& target) const {
  Ballot ballot;
  ballot.code = mine.code();
  ballot.state = State();
  ballot.superseded = superseded;
  if (held) ballot.held = held->id;
  if (mine.ok() && target != nullptr) {
    ballot.target = target->id;
    ballot.target_epoch = target->manifest.epoch;
  }
  return ballot;
}

absl::Status Follower::Impl::CheckHeldAlike(const std::vector<Ballot>& ballots,
                                            bool* rejoin) {
  const std::string poisoned = RanksThat(ballots, [](const Ballot& ballot) {
    return ballot.state == FollowerState::kPoisoned;
  });
  if (!poisoned.empty()) {
    // A group is of one version or of none.
    Poison();
    paused_at.reset();
    return absl::FailedPreconditionError(absl::StrCat(
        channel.text(), ": an update failed half-way on ", poisoned,
        ", so every rank is poisoned: stay paused and "
        "call Join on every rank, which re-reads in place what is "
        "wrong"));
  }
  const std::string without = RanksThat(
      ballots, [](const Ballot& ballot) { return !ballot.held.has_value(); });
  if (!without.empty()) {
    Resume();
    return absl::FailedPreconditionError(absl::StrCat(
        channel.text(), ": no version is held by ", without,
        "; call Join on every rank, or VerifyHeld for weights that were loaded "
        "otherwise"));
  }
  *rejoin =
      std::any_of(ballots.begin(), ballots.end(), [&](const Ballot& ballot) {
        return ballot.held != ballots.front().held;
      });
  return absl::OkStatus();
}

absl::StatusOr<UpdateResult> Follower::Impl::UpdateInGroup(GroupPhase phase,
                                                           bool expired,
                                                           bool* give_up) {
  *give_up = false;
  RenewLease();
  UpdateResult result;
  if (held) result.version = held->id;
  std::vector<SharedStep> later;
  bool more = true;
  while (more) {
    std::optional<VersionId> aim;
    while (true) {
      absl::Status mine;
      if (held) {
        if (aim) {
          mine = PrepareToVersion(*aim);
        } else if (!later.empty()) {
          mine = PrepareNext(std::exchange(later, {}), Clock::now());
        } else {
          mine = Prepare();
        }
        if (mine.ok() && prepared) mine = PauseOnce();
      }
      Ballot ballot = MakeBallot(mine, prepared ? prepared->target : nullptr);
      ballot.expired = expired;
      ballot.last = !prepared || prepared->later.empty();
      const auto voted = channel.Vote(phase, ballot);
      if (!voted.ok()) {
        Resume();
        return mine.ok() ? Annotate(voted.status(),
                                    "while the ranks voted on an update; "
                                    "nothing was changed on this one")
                         : mine;
      }
      const std::vector<Ballot>& ballots = *voted;
      bool rejoin = false;
      KEDGE_RETURN_IF_ERROR(CheckHeldAlike(ballots, &rejoin));
      const bool abandoned =
          std::any_of(ballots.begin(), ballots.end(),
                      [](const Ballot& other) { return other.superseded; });
      const absl::Status failed = channel.Failure(
          CodesOf(ballots), mine, "could not prepare", kNothingChanged);
      if (!failed.ok() && (aim || (abandoned && !superseded))) {
        prepared.reset();  // it may lead where no other rank can go
      }
      if (abandoned) PublishSuperseded();
      if (!failed.ok()) {
        Resume();
        return failed;
      }
      if (rejoin) {
        Resume();
        return JoinInGroup(GroupPhase::kJoin, std::nullopt);
      }
      if (NobodyHasTarget(ballots)) {
        *give_up = ballots.front().expired;
        if (result.changed) SetLease(&result);
        return result;
      }
      if (AllHaveOneTarget(ballots)) {
        more = std::any_of(ballots.begin(), ballots.end(),
                           [](const Ballot& other) { return !other.last; });
        break;
      }
      if (aim) {
        Resume();
        prepared.reset();
        return absl::UnavailableError(absl::StrCat(
            channel.text(), ": the ranks did not come to one version: ",
            VersionsText(ballots, &Ballot::target), "; ", kNothingChanged));
      }
      aim = AimOf(ballots);
    }
    KEDGE_RETURN_IF_ERROR(RunInGroup(&*prepared, &result));
    later = std::move(prepared->later);
    prepared.reset();
  }
  SetLease(&result);
  return result;
}

absl::StatusOr<UpdateResult> Follower::Impl::JoinInGroup(
    GroupPhase phase, std::optional<std::uint64_t> step) {
  const Clock::time_point start = Clock::now();
  prepared.reset();
  std::optional<Prepared> next;
  std::optional<VersionId> aim;
  std::vector<Ballot> ballots;
  const auto plan = [&]() -> absl::Status {
    if (aim && next && next->target->id == *aim) return absl::OkStatus();
    next.reset();
    absl::StatusOr<SharedStep> target = aim    ? ReadVersion(*aim)
                                        : step ? ReadStep(*step)
                                               : ReadNewest();
    if (!target.ok()) return target.status();
    KEDGE_ASSIGN_OR_RETURN(next, PlanJoin(*target, nullptr));
    return ChainL61(&*next);
  };
  const auto vote = [&](GroupPhase in, const absl::Status& mine,
                        absl::string_view what) -> absl::Status {
    auto voted =
        channel.Vote(in, MakeBallot(mine, next ? next->target : SharedStep()));
    absl::Status status = voted.status();
    if (voted.ok()) {
      ballots = *std::move(voted);
      status = channel.Failure(CodesOf(ballots), mine, what, kNothingChanged);
    } else if (!mine.ok()) {
      status = mine;
    }
    if (!status.ok()) Resume();
    return status;
  };

  while (true) {
    KEDGE_RETURN_IF_ERROR(vote(phase, plan(), "could not plan a join"));
    if (AllHaveOneTarget(ballots)) break;
    if (aim) {
      return absl::UnavailableError(absl::StrCat(
          channel.text(), ": the ranks did not come to one version: ",
          VersionsText(ballots, &Ballot::target), "; ", kNothingChanged));
    }
    aim = AimOf(ballots);
  }

  // What verifies over all ranks is not read again. Not worth a look where a
  // rank has never held a version: its memory may be anything.
  const bool may_hold =
      std::none_of(ballots.begin(), ballots.end(), [](const Ballot& ballot) {
        return ballot.state == FollowerState::kEmpty;
      });
  if (may_hold) {
    const Own own = SumOwn(next->binding);
    KEDGE_ASSIGN_OR_RETURN(
        const GroupChannel::Total total,
        channel.Add(GroupPhase::kMask, own.status.code(), own.sums.residues));
    KEDGE_RETURN_IF_ERROR(channel.Failure(total.codes, own.status,
                                          "could not look at what memory holds",
                                          kNothingChanged));
    next->mask =
        MaskOf(*next->binding, next->binding->Judge(total.residues, next->l61));
  }

  absl::Status mine = Counted(&*next, [&] { return LoadChain(&*next); });
  if (mine.ok()) mine = PauseOnce();
  KEDGE_RETURN_IF_ERROR(
      vote(GroupPhase::kJoinLoaded, mine, "could not prepare a join"));
  next->seconds = SecondsSince(start);
  UpdateResult result;
  KEDGE_RETURN_IF_ERROR(RunInGroup(&*next, &result));
  SetLease(&result);
  return result;
}

Follower::Impl::Own Follower::Impl::SumOwn(
    const std::shared_ptr<const Binding>& bound) {
  Own own;
  own.status = backend->Sum(bound, &own.sums);
  if (!own.status.ok()) {
    own.sums.residues.assign(bound->residue_count(), 0);
    own.sums.bytes = 0;
  }
  return own;
}

absl::Status Follower::Impl::RunInGroup(Prepared* next, UpdateResult* result) {
  const std::optional<Held> before = std::exchange(held, std::nullopt);
  Set(FollowerState::kUpdating, std::nullopt);
  const absl::Status status = AfterVote(next, before, result);
  paused_at.reset();
  if (status.ok()) return status;
  Poison();
  return absl::Status(
      status.code(),
      absl::StrCat(status.message(),
                   "; the weights of the group are of no version now: stay "
                   "paused and call Join on every rank, which re-reads in "
                   "place what is wrong"));
}

absl::Status Follower::Impl::WriteOrPassOver(Prepared* next,
                                             UpdateResult* result) {
  absl::Status status = Write(next, result);
  while (!status.ok() && next->chain.anchor != nullptr) {
    KEDGE_RETURN_IF_ERROR(UseOlderAnchor(status, next));
    status = LoadChain(next);
    if (status.ok()) status = Write(next, result);
  }
  return status;
}

absl::Status Follower::Impl::AfterVote(Prepared* next,
                                       const std::optional<Held>& before,
                                       UpdateResult* result) {
  const std::uint64_t read_before = bytes_read.load();
  absl::Status mine = WriteOrPassOver(next, result);
  result->bytes_read += bytes_read.load() - read_before;
  Binding::Sums own;
  own.residues.assign(next->binding->residue_count(), 0);
  if (mine.ok()) {
    const Clock::time_point start = Clock::now();
    Own summed = SumOwn(next->binding);
    mine = std::move(summed.status);
    own = std::move(summed.sums);
    result->verify_seconds += SecondsSince(start);
    result->elements_verified += next->binding->summed_elements();
    result->bytes_verified += own.bytes;
  }
  const auto total =
      channel.Add(GroupPhase::kVerify, mine.code(), own.residues);
  if (!total.ok()) {
    return mine.ok() ? Annotate(total.status(),
                                absl::StrCat("while the ranks verified ",
                                             ToString(next->target->id)))
                     : mine;
  }
  KEDGE_RETURN_IF_ERROR(channel.Failure(
      total->codes, mine,
      absl::StrCat("could not apply ", ToString(next->target->id)),
      "every rank is poisoned"));
  const std::vector<Binding::Mismatch> mismatches =
      next->binding->Judge(total->residues, next->l61);
  if (!mismatches.empty()) {
    if (next->anchor != nullptr) {
      suspect_anchors.push_back(next->chain.anchor->version.step);
    }
    return absl::DataLossError(
        absl::StrCat(store->path(), ": ", channel.text(),
                     ": after the update to ", ToString(next->target->id), " ",
                     next->binding->Describe(mismatches, next->l61),
                     BlameOwnPart(*next, before, own.residues, mismatches)));
  }
  result->tensors_verified = next->binding->verifiable_tensors();
  Commit(next, std::move(own.residues), paused_at.value_or(Clock::now()),
         result);
  return absl::OkStatus();
}

std::string Follower::Impl::BlameOwnPart(
    const Prepared& next, const std::optional<Held>& before,
    const std::vector<std::uint64_t>& own,
    const std::vector<Binding::Mismatch>& mismatches) {
  // What a join wrote over has no checksum to start from.
  if (next.anchor != nullptr || !before ||
      before->own_residues.size() != own.size()) {
    return "";
  }
  const TensorTable& table = next.binding->table();
  TensorMask mask(table.size(), false);
  for (const Binding::Mismatch& mismatch : mismatches) {
    mask[mismatch.tensor] = true;
  }
  std::vector<std::shared_ptr<const LoadedDelta>> records;
  for (const auto& delta : next.deltas) {
    auto loaded = backend->Records(*next.binding, *delta, mask);
    if (!loaded.ok()) return "";
    records.push_back(*std::move(loaded));
  }
  Offenders wrong;
  for (const Binding::Mismatch& mismatch : mismatches) {
    const std::uint32_t t = mismatch.tensor;
    const BoundTensor::Cover& cover =
        next.binding->weights().tensors[t].covers[mismatch.cover];
    const TileGrid& grid = next.binding->grid(t);
    const std::uint32_t unit_bytes = UnitBytes(table[t].dtype);
    std::uint64_t expected = before->own_residues[mismatch.residue];
    for (const auto& delta : records) {
      for (const LoadedDelta::Record& record : delta->records()) {
        const DeltaRecord& info = delta->info(record);
        if (info.tensor != t) continue;
        const absl::Status visited = VisitRecord(
            record.bytes, grid, info.slice, unit_bytes,
            [&](std::uint64_t unit, std::int64_t difference) {
              const std::uint64_t row = unit / grid.cols;
              const std::uint64_t col = unit % grid.cols;
              const bool held_here = std::any_of(
                  cover.boxes.begin(), cover.boxes.end(),
                  [&](const BoxTarget& box) { return box.Contains(row, col); });
              if (!held_here) return;
              expected = L61Add(expected,
                                L61OfChange(key, unit, unit_bytes, difference));
            });
        if (!visited.ok()) return "";
      }
    }
    if (expected != own[mismatch.residue]) wrong.Add(table[t].name);
  }
  if (wrong.empty()) {
    return absl::StrCat("; rank ", channel.rank(),
                        "'s own part is what the deltas make of it");
  }
  return absl::StrCat("; rank ", channel.rank(),
                      "'s own part is wrong: ", wrong.Text());
}

absl::Status Follower::Impl::VerifyHeldInGroup(std::uint64_t step) {
  auto claim = ReadClaim(step);
  const absl::Status mine = claim.status();
  const auto ballots = channel.Vote(
      GroupPhase::kVerifyHeld,
      MakeBallot(mine, claim.ok() ? claim->published : SharedStep()));
  if (!ballots.ok()) return mine.ok() ? ballots.status() : mine;
  KEDGE_RETURN_IF_ERROR(channel.Failure(CodesOf(*ballots), mine,
                                        "could not read what is to be verified",
                                        kNothingChanged));
  if (!AllHaveOneTarget(*ballots)) {
    return absl::FailedPreconditionError(
        absl::StrCat(channel.text(), ": the ranks do not mean one version: ",
                     VersionsText(*ballots, &Ballot::target),
                     "; call VerifyHeld with one step on every rank, or Join"));
  }
  Own own = SumOwn(claim->binding);
  KEDGE_ASSIGN_OR_RETURN(
      const GroupChannel::Total total,
      channel.Add(GroupPhase::kVerify, own.status.code(), own.sums.residues));
  KEDGE_RETURN_IF_ERROR(channel.Failure(total.codes, own.status,
                                        "could not look at what memory holds",
                                        kNothingChanged));
  const std::vector<Binding::Mismatch> mismatches =
      claim->binding->Judge(total.residues, claim->l61);
  if (!mismatches.empty()) {
    return absl::DataLossError(absl::StrCat(
        store->path(), ": ", channel.text(), ": memory does not hold ",
        ToString(claim->published->id), ": ",
        claim->binding->Describe(mismatches, claim->l61),
        "; load that version's weights, or call Join on every rank"));
  }
  prepared.reset();
  binding = std::move(claim->binding);
  SetHolds(Held{claim->published->id, claim->published->manifest.epoch,
                std::move(claim->l61), std::move(own.sums.residues)});
  lease.Replace(held->id.step, held->id);
  return absl::OkStatus();
}

}  // namespace kedge
