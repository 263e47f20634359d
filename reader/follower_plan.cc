// What a follower does before the pause: look, choose a way, read, check. (A
// join into memory of no version reads deltas in the pause, beside the anchor.)

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kedge/format/layout.h"
#include "kedge/format/status.h"
#include "kedge/reader/follower_impl.h"
#include "kedge/reader/lineage.h"

namespace kedge {
namespace {

// Files of deltas that are open before the first one is read; there may be more
// than a process can have open.
constexpr std::size_t kMostUnreadFiles = 128;

double SecondsSince(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start)
      .count();
}

}  // namespace

absl::StatusOr<SharedStep> Follower::Impl::ReadNewest() {
  KEDGE_ASSIGN_OR_RETURN(
      SharedStep newest,
      (WithRetries<SharedStep>([&] { return store->Newest(); })));
  last_directory_look = Clock::now();
  return newest;
}

absl::StatusOr<SharedStep> Follower::Impl::ReadStep(std::uint64_t step) {
  return WithRetries<SharedStep>([&] { return store->ReadStep(step); });
}

absl::StatusOr<SharedStep> Follower::Impl::ReadVersion(const VersionId& id) {
  SharedStep read;
  const absl::Status status = RetryReads(
      context, id.step, JoinPath(store->StepPath(id.step), kCommitFileName),
      /*published=*/true, [&]() -> absl::Status {
        auto step = store->ReadStep(id.step);
        // A step of a fenced epoch, or other content under this
        // number: this client may not see yet what another rank
        // sees.
        if (absl::IsFailedPrecondition(step.status())) {
          return absl::UnavailableError(step.status().message());
        }
        if (!step.ok()) return step.status();
        if ((*step)->id != id) {
          return absl::UnavailableError(
              absl::StrCat((*step)->path, ": manifest: expected ", ToString(id),
                           ", found ", ToString((*step)->id)));
        }
        read = *std::move(step);
        return absl::OkStatus();
      });
  if (!status.ok()) {
    return Annotate(status, absl::StrCat("another rank goes to ", ToString(id),
                                         ", which is not to be read here"));
  }
  return read;
}

// HEAD is asked first; the directory when HEAD does not help, or has not been
// looked at for a while.
absl::StatusOr<SharedStep> Follower::Impl::Look() {
  const auto head = store->ReadHead();
  const bool directory_due = superseded || Clock::now() - last_directory_look >=
                                               options.directory_interval;
  if (head.ok() && !directory_due) {
    const VersionId hinted{head->step, head->manifest_hash};
    if (hinted == held->id) return nullptr;
    if (head->step > held->id.step) {
      auto step = store->ReadStep(head->step);
      if (absl::IsUnavailable(step.status())) return step.status();
      if (step.ok() && (*step)->id == hinted) return step;
    }
  }
  absl::Status damage;  // of the newest step that is damaged
  KEDGE_ASSIGN_OR_RETURN(
      SharedStep newest,
      store->Newest([&](std::uint64_t step, const absl::Status& why) {
        if (step > held->id.step && absl::IsDataLoss(why)) damage.Update(why);
      }));
  last_directory_look = Clock::now();
  if (newest->id != held->id) return newest;
  // Nothing newer is valid; but to stay behind in silence is only right if
  // nothing newer was promised.
  if (head.ok() && head->step <= held->id.step) return nullptr;
  if (!damage.ok()) {
    return Annotate(damage, "a step newer than the one held is damaged");
  }
  if (!head.ok()) return nullptr;
  return absl::UnavailableError(absl::StrCat(
      store->path(), ": HEAD names v", head->step,
      ", which is not there (yet); the newest is ", ToString(newest->id)));
}

absl::Status Follower::Impl::Prepare() {
  if (prepared) return absl::OkStatus();
  const Clock::time_point start = Clock::now();
  KEDGE_ASSIGN_OR_RETURN(const SharedStep target,
                         (WithRetries<SharedStep>([&] { return Look(); })));
  if (target == nullptr) return absl::OkStatus();
  return PrepareTo(target, start);
}

absl::Status Follower::Impl::PrepareToVersion(const VersionId& id) {
  if (prepared && prepared->target->id == id) return absl::OkStatus();
  const Clock::time_point start = Clock::now();
  if (prepared && prepared->anchor == nullptr) {
    // What was read for a later version leads through this one.
    std::vector<SharedStep>& steps = prepared->chain.deltas;
    for (std::size_t i = 0; i < steps.size(); ++i) {
      if (steps[i]->id != id) continue;
      std::vector<std::uint64_t> l61 = held->l61;
      for (std::size_t k = 0; k <= i; ++k) {
        KEDGE_RETURN_IF_ERROR(AdvanceL61(*steps[k], &l61));
      }
      std::vector<SharedStep>& rest = prepared->later;
      if (!rest.empty()) {
        rest.insert(rest.begin(),
                    steps.begin() + static_cast<std::ptrdiff_t>(i + 1),
                    steps.end());
      }
      steps.resize(i + 1);
      prepared->deltas.resize(i + 1);
      prepared->target = steps.back();
      prepared->l61 = std::move(l61);
      return absl::OkStatus();
    }
  }
  prepared.reset();
  KEDGE_ASSIGN_OR_RETURN(const SharedStep target, ReadVersion(id));
  return PrepareTo(target, start);
}

absl::Status Follower::Impl::PrepareTo(const SharedStep& target,
                                       Clock::time_point start) {
  KEDGE_ASSIGN_OR_RETURN(const bool abandoned, WasAbandoned(*target));
  if (abandoned) MarkSuperseded();
  if (superseded) return PrepareJoin(target, nullptr, start);

  if (options.every_version) {
    auto after = Lineage(target);
    if (absl::IsFailedPrecondition(after.status())) {
      MarkSuperseded();
      return PrepareJoin(target, nullptr, start);
    }
    if (!after.ok()) {
      return absl::Status(
          after.status().code(),
          absl::StrCat(after.status().message(), "; versions between the held ",
                       ToString(held->id), " and ", ToString(target->id),
                       " cannot be passed through; Join skips them"));
    }
    return PrepareNext(*std::move(after), start);
  }
  auto chain =
      WithRetries<Chain>([&] { return store->FindChain(target, &held->id); });
  if (chain.ok() && chain->anchor == nullptr) {
    return PrepareDeltas(std::move(chain->deltas), {}, start);
  }
  // The way leads through an anchor: because that is cheaper, or the deltas
  // are gone, or because the held version is on no way to the target.
  if (absl::IsFailedPrecondition(Lineage(target).status())) MarkSuperseded();
  if (!chain.ok()) return chain.status();
  return PrepareJoin(target, &*chain, start);
}

absl::StatusOr<std::vector<SharedStep>> Follower::Impl::Lineage(
    const SharedStep& target) {
  return WithRetries<std::vector<SharedStep>>(
      [&] { return StepsAfter(*store, held->id, target); });
}

// Whether the run has gone on without the held version. Within an epoch
// versions never go back.
absl::StatusOr<bool> Follower::Impl::WasAbandoned(const PublishedStep& target) {
  KEDGE_ASSIGN_OR_RETURN(
      const std::vector<EpochInfo> epochs,
      WithRetries<std::vector<EpochInfo>>([&] { return store->ReadEpochs(); }));
  if (Store::ValidEpoch(epochs, held->id.step) != held->epoch) return true;
  if (target.id.step == held->id.step) return true;  // other content: a fork
  if (target.id.step > held->id.step) return false;
  return absl::DataLossError(absl::StrCat(
      store->path(), ": the newest valid step went back within epoch ",
      held->epoch, ": held ", ToString(held->id), ", found ",
      ToString(target.id),
      "; steps were removed, or the store was replaced by an older copy; "
      "nothing was changed; run `kedge fsck`"));
}

absl::Status Follower::Impl::PrepareNext(std::vector<SharedStep> steps,
                                         Clock::time_point start) {
  if (!options.every_version) {
    return PrepareDeltas(std::move(steps), {}, start);
  }
  const SharedStep next = steps.front();
  steps.erase(steps.begin());
  if (next->manifest.kind == StepKind::kDelta) {
    return PrepareDeltas({next}, std::move(steps), start);
  }
  KEDGE_RETURN_IF_ERROR(PrepareJoin(next, nullptr, start));
  prepared->later = std::move(steps);
  return absl::OkStatus();
}

absl::Status Follower::Impl::PrepareDeltas(std::vector<SharedStep> steps,
                                           std::vector<SharedStep> later,
                                           Clock::time_point start) {
  Prepared next;
  next.target = steps.back();
  next.binding = binding;
  next.chain.deltas = std::move(steps);
  next.later = std::move(later);
  next.l61 = held->l61;
  VersionId base = held->id;
  for (const auto& step : next.chain.deltas) {
    if (step->manifest.base != base ||
        step->table->hash() != binding->table().hash()) {
      return absl::FailedPreconditionError(absl::StrCat(
          step->path, ": base: expected ", ToString(base), ", found ",
          ToString(step->manifest.base), "; rejoin from an anchor"));
    }
    KEDGE_RETURN_IF_ERROR(AdvanceL61(*step, &next.l61));
    base = step->id;
  }
  KEDGE_RETURN_IF_ERROR(PinChain(next.chain));
  KEDGE_RETURN_IF_ERROR(PrepareSums(next.binding));
  KEDGE_RETURN_IF_ERROR(
      Counted(&next, [&] { return StageDeltas(&next, /*read=*/true); }));
  if (next.deltas.size() < next.chain.deltas.size()) {
    // There is no room for more: the others have a pause of their own, so that
    // no pause waits for files.
    std::vector<SharedStep>& planned = next.chain.deltas;
    const auto end =
        planned.begin() + static_cast<std::ptrdiff_t>(next.deltas.size());
    next.later.insert(next.later.begin(), end, planned.end());
    planned.erase(end, planned.end());
    next.target = planned.back();
    next.l61 = held->l61;
    for (const auto& step : planned) {
      KEDGE_RETURN_IF_ERROR(AdvanceL61(*step, &next.l61));
    }
  }
  next.seconds = SecondsSince(start);
  prepared = std::move(next);
  return absl::OkStatus();
}

absl::Status Follower::Impl::PrepareJoin(const SharedStep& target, Chain* chain,
                                         Clock::time_point start) {
  KEDGE_ASSIGN_OR_RETURN(Prepared next, PlanJoin(target, chain));
  // Weights that are of a version stay as they are until all that is needed to
  // change them has been read. With others there is nothing to lose.
  next.reads_beside = options.device != nullptr && channel.alone() && !held;
  KEDGE_RETURN_IF_ERROR(Counted(&next, [&] { return LoadChain(&next); }));
  next.seconds = SecondsSince(start);
  prepared = std::move(next);
  return absl::OkStatus();
}

absl::StatusOr<Prepared> Follower::Impl::PlanJoin(const SharedStep& target,
                                                  Chain* chain) {
  Prepared next;
  next.target = target;
  next.binding = binding;
  if (target->table->hash() != binding->table().hash()) {
    KEDGE_ASSIGN_OR_RETURN(next.binding, Bind(target->table));
  }
  if (chain != nullptr) {
    next.chain = std::move(*chain);
    return next;
  }
  const auto find = [&](const std::vector<std::uint64_t>& without) {
    return WithRetries<Chain>(
        [&] { return store->FindChain(target, nullptr, without); });
  };
  if (!suspect_anchors.empty()) {
    if (auto other = find(suspect_anchors); other.ok()) {
      next.chain = *std::move(other);
      next.passed_over = suspect_anchors;
      return next;
    }
  }
  KEDGE_ASSIGN_OR_RETURN(next.chain, find({}));
  return next;
}

absl::StatusOr<std::shared_ptr<const Binding>> Follower::Impl::Bind(
    const std::shared_ptr<const TensorTable>& table) const {
  KEDGE_ASSIGN_OR_RETURN(BoundWeights bound,
                         BindGroupWeights(sets_of_rank, channel.rank(), table,
                                          options.allow_partial));
  return std::make_shared<const Binding>(std::move(bound), &sets,
                                         !channel.alone());
}

absl::Status Follower::Impl::ChainL61(Prepared* next) const {
  const PublishedAnchor& anchor = *next->chain.anchor;
  next->l61 = anchor.manifest.l61;
  if (anchor.table->hash() != next->binding->table().hash()) {
    return DataLoss({.where = anchor.path,
                     .what = "tensor table",
                     .expected = ToHex(next->binding->table().hash()),
                     .found = ToHex(anchor.table->hash()),
                     .advice = "run `kedge fsck`"});
  }
  for (const auto& step : next->chain.deltas) {
    KEDGE_RETURN_IF_ERROR(AdvanceL61(*step, &next->l61));
  }
  const Hash128 digest = next->binding->table().StateDigest(next->l61);
  if (digest != next->target->manifest.digest_after) {
    return DataLoss({.where = anchor.path,
                     .what = "state digest",
                     .expected = ToHex(next->target->manifest.digest_after),
                     .found = ToHex(digest),
                     .advice = "run `kedge fsck`"});
  }
  return absl::OkStatus();
}

absl::Status Follower::Impl::LoadChain(Prepared* next) {
  while (true) {
    const PublishedAnchor& anchor = *next->chain.anchor;
    KEDGE_RETURN_IF_ERROR(ChainL61(next));
    KEDGE_RETURN_IF_ERROR(PrepareSums(next->binding));
    if (next->mask.empty()) {
      if (channel.alone() && State() != FollowerState::kEmpty) {
        KEDGE_ASSIGN_OR_RETURN(next->mask, MaskOfWrong(*next));
      } else if (!channel.alone() && held &&
                 next->binding->table().hash() == binding->table().hash()) {
        next->mask = MaskOfChanged(*next);
      }
    }
    absl::Status failed = PinChain(next->chain);
    if (failed.ok()) {
      auto load = backend->OpenAnchor(*next->binding, next->mask, anchor);
      if (load.ok()) {
        next->anchor = *std::move(load);
        next->bytes_read += anchor.manifest_bytes + kCommitBytes;
        return StageDeltas(next, !next->reads_beside);
      }
      failed = load.status();
    }
    KEDGE_RETURN_IF_ERROR(UseOlderAnchor(failed, next));
  }
}

absl::Status Follower::Impl::UseOlderAnchor(const absl::Status& error,
                                            Prepared* next) {
  if (!absl::IsDataLoss(error) && !absl::IsUnavailable(error) &&
      !absl::IsNotFound(error)) {
    return error;
  }
  if (next->anchor_error.ok()) next->anchor_error = error;
  next->passed_over.push_back(next->chain.anchor->version.step);
  auto older = WithRetries<Chain>([&] {
    return store->FindChain(next->target, nullptr, next->passed_over);
  });
  if (!older.ok()) {
    return absl::Status(next->anchor_error.code(),
                        absl::StrCat(next->anchor_error.message(),
                                     "; and no older anchor leads to ",
                                     ToString(next->target->id), ": ",
                                     older.status().message()));
  }
  next->anchor.reset();
  next->deltas.clear();
  next->applied = 0;
  next->chain = *std::move(older);
  return absl::OkStatus();
}

TensorMask Follower::Impl::MaskOf(
    const Binding& bound,
    const std::vector<Binding::Mismatch>& mismatches) const {
  const std::size_t count = bound.table().size();
  TensorMask mask(count, false);
  for (std::size_t t = 0; t < count; ++t) {
    mask[t] = !bound.weights().tensors[t].fully_covered;
  }
  for (const Binding::Mismatch& mismatch : mismatches) {
    mask[mismatch.tensor] = true;
  }
  return mask;
}

// The tensors whose memory is not what `next` will make it. What verifies
// already is not read again.
absl::StatusOr<TensorMask> Follower::Impl::MaskOfWrong(const Prepared& next) {
  KEDGE_ASSIGN_OR_RETURN(const Comparison comparison,
                         Compare(next.binding, next.l61));
  return MaskOf(*next.binding, comparison.mismatches);
}

// Likewise without a look at memory, which a rank could not judge by itself:
// what the held version, which was verified, has already.
TensorMask Follower::Impl::MaskOfChanged(const Prepared& next) const {
  TensorMask mask = MaskOf(*next.binding, {});
  for (std::size_t t = 0; t < mask.size(); ++t) {
    mask[t] = mask[t] || held->l61[t] != next.l61[t];
  }
  return mask;
}

absl::Status Follower::Impl::Counted(
    Prepared* next, const std::function<absl::Status()>& read) {
  const std::uint64_t before = bytes_read.load();
  const absl::Status status = read();
  next->bytes_read += bytes_read.load() - before;
  return status;
}

absl::Status Follower::Impl::StageDeltas(Prepared* next, bool read) {
  const std::vector<SharedStep>& steps = next->chain.deltas;
  std::size_t unread_files = 0;
  while (next->applied + next->deltas.size() < steps.size()) {
    const SharedStep& step = steps[next->applied + next->deltas.size()];
    if (!read) {
      unread_files += step->manifest.files.size();
      if (unread_files > kMostUnreadFiles && !next->deltas.empty()) break;
    }
    KEDGE_ASSIGN_OR_RETURN(std::unique_ptr<StagedDelta> delta,
                           backend->Stage(next->binding, next->mask, step));
    if (delta == nullptr) {
      if (!next->deltas.empty()) break;
      return absl::ResourceExhaustedError(
          absl::StrCat(step->path,
                       ": no room for it beside deltas of another "
                       "update"));
    }
    if (read) KEDGE_RETURN_IF_ERROR(backend->Read(delta.get()));
    next->bytes_read += step->manifest_bytes + kCommitBytes;
    next->deltas.push_back(std::move(delta));
  }
  return absl::OkStatus();
}

absl::Status Follower::Impl::ReadDeltas(Prepared* next,
                                        const std::atomic<bool>& stop) {
  for (const auto& delta : next->deltas) {
    if (stop) break;
    KEDGE_RETURN_IF_ERROR(backend->Read(delta.get()));
  }
  return absl::OkStatus();
}

absl::Status Follower::Impl::PinChain(const Chain& chain) {
  std::optional<VersionId> going_on_from;
  std::uint64_t oldest = 0;
  if (chain.anchor != nullptr) {
    oldest = chain.anchor->version.step;
  } else if (held) {
    oldest = held->id.step;
    going_on_from = held->id;
  }
  if (!lease.Pin(oldest, going_on_from)) return absl::OkStatus();
  // gc that did not see the lease yet may have been at work: what it moves away
  // before it looks again is missing now.
  const auto check = [&](const std::string& directory, std::uint64_t step) {
    const std::string commit = JoinPath(directory, kCommitFileName);
    return RetryReads(context, step, commit, /*published=*/true,
                      [&] { return store->fs()->Stat(commit).status(); });
  };
  if (chain.anchor != nullptr) {
    KEDGE_RETURN_IF_ERROR(
        check(chain.anchor->path, chain.anchor->version.step));
  }
  for (const SharedStep& step : chain.deltas) {
    KEDGE_RETURN_IF_ERROR(check(step->path, step->id.step));
  }
  return absl::OkStatus();
}

}  // namespace kedge
