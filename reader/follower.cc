#include "kedge/reader/follower.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "kedge/engine/cpu/l61_sum.h"
#include "kedge/engine/io/io_pool.h"
#include "kedge/engine/io/store.h"
#include "kedge/format/status.h"
#include "kedge/reader/anchor_load.h"
#include "kedge/reader/binding.h"
#include "kedge/reader/delta_load.h"
#include "kedge/reader/lineage.h"
#include "kedge/reader/read_context.h"

namespace kedge {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kFirstPoll{2};
constexpr std::chrono::milliseconds kLongestPoll{100};

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

int ThreadsOrCores(int threads) {
  return threads > 0 ? threads
                     : static_cast<int>(
                           std::max(1u, std::thread::hardware_concurrency()));
}

bool UseMapping(FileSystem& fs, const FollowerOptions& options) {
  if (options.read_mode != ReadMode::kAuto) {
    return options.read_mode == ReadMode::kMap;
  }
  const auto kind = fs.KindOf(options.store_path);
  return kind.ok() && *kind == StorageKind::kLocal;
}

// Everything that one move to a version needs, in memory and checked, but for
// the bytes of an anchor.
struct Prepared {
  std::shared_ptr<const PublishedStep> target;
  std::shared_ptr<const Binding> binding;
  Chain chain;
  std::unique_ptr<AnchorLoad> anchor;  // null: from the version held
  std::vector<std::unique_ptr<LoadedDelta>> deltas;
  std::vector<std::uint64_t> l61;  // at the target, by ordinal
  TensorMask mask;                 // what a join has to write; empty: all
  // Steps of anchors that proved damaged, and how the first one did.
  std::vector<std::uint64_t> passed_over;
  absl::Status anchor_error;
  // Of a follower that skips no version: the steps after `target`.
  std::vector<std::shared_ptr<const PublishedStep>> later;
  double seconds = 0;
  std::uint64_t bytes_read = 0;
};

// What memory holds.
struct Held {
  VersionId id;
  std::uint32_t epoch = 0;
  std::vector<std::uint64_t> l61;
};

}  // namespace

absl::string_view ToString(FollowerState state) {
  switch (state) {
    case FollowerState::kEmpty:
      return "empty";
    case FollowerState::kReady:
      return "ready";
    case FollowerState::kUpdating:
      return "updating";
    case FollowerState::kPoisoned:
      return "poisoned";
    case FollowerState::kSuperseded:
      return "superseded";
  }
  return "?";
}

struct Follower::Impl {
  Impl(FollowerOptions follower_options,
       std::vector<const WeightSet*> held_sets, std::unique_ptr<Store> opened)
      : options(std::move(follower_options)),
        sets(std::move(held_sets)),
        store(std::move(opened)),
        summer(L61Key::FromSeed(store->info().l61_seed)),
        io_pool(options.io_threads),
        apply_pool(ThreadsOrCores(options.apply_threads)) {
    context.store = store.get();
    context.io_pool = &io_pool;
    context.map = UseMapping(*store->fs(), options);
    context.retry_deadline = options.retry_deadline;
    context.bytes_read = &bytes_read;
  }

  // ------------------------------------------------------------------- states
  void Set(FollowerState new_state, std::optional<VersionId> version) {
    const std::lock_guard lock(mutex);
    state = new_state;
    public_held = std::move(version);
  }
  FollowerState State() const {
    const std::lock_guard lock(mutex);
    return state;
  }
  void MarkSuperseded() {
    if (State() == FollowerState::kReady) {
      Set(FollowerState::kSuperseded, held->id);
    }
  }
  // After a version stands in memory and is checked as far as it can be.
  void SetHolds() {
    const bool whole = binding->UnverifiedNames().empty();
    Set(whole ? FollowerState::kReady : FollowerState::kEmpty, held->id);
  }
  absl::Status RequireHeld() const {
    if (held) return absl::OkStatus();
    return absl::FailedPreconditionError(absl::StrCat(
        store->path(), ": the follower is ", ToString(State()),
        ": no version is held; call Join, or VerifyHeld for weights that were "
        "loaded otherwise"));
  }

  // ---------------------------------------------------------- what is
  // published Reads of manifests, which a moment's trouble must not fail.
  template <typename T>
  absl::StatusOr<T> WithRetries(
      const std::function<absl::StatusOr<T>()>& read) {
    absl::StatusOr<T> result = absl::UnknownError("not read");
    const absl::Status status =
        RetryReads(context, 0, store->path(), /*published=*/false, [&] {
          result = read();
          return result.status();
        });
    if (!status.ok()) return status;
    return result;
  }

  // The newest valid step, or null if that is what is held. HEAD is asked
  // first; the directory when HEAD does not help, or has not been looked at for
  // a while.
  absl::StatusOr<std::shared_ptr<const PublishedStep>> Look() {
    const auto head = store->ReadHead();
    const bool directory_due =
        State() == FollowerState::kSuperseded ||
        Clock::now() - last_directory_look >= options.directory_interval;
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
        std::shared_ptr<const PublishedStep> newest,
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

  // ------------------------------------------------------------------ planning
  // Fills `prepared`, unless nothing newer is published.
  absl::Status Prepare() {
    if (prepared) return absl::OkStatus();
    const Clock::time_point start = Clock::now();
    KEDGE_ASSIGN_OR_RETURN(const std::shared_ptr<const PublishedStep> target,
                           (WithRetries<std::shared_ptr<const PublishedStep>>(
                               [&] { return Look(); })));
    if (target == nullptr) return absl::OkStatus();
    KEDGE_ASSIGN_OR_RETURN(const bool abandoned, WasAbandoned(*target));
    if (abandoned) MarkSuperseded();
    if (State() == FollowerState::kSuperseded) {
      return PrepareJoin(target, nullptr, start);
    }

    std::vector<std::shared_ptr<const PublishedStep>> steps;
    if (options.every_version) {
      auto after = Lineage(target);
      if (absl::IsFailedPrecondition(after.status())) {
        MarkSuperseded();
        return PrepareJoin(target, nullptr, start);
      }
      if (!after.ok()) {
        return absl::Status(
            after.status().code(),
            absl::StrCat(after.status().message(),
                         "; versions between the held ", ToString(held->id),
                         " and ", ToString(target->id),
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

  absl::StatusOr<std::vector<std::shared_ptr<const PublishedStep>>> Lineage(
      const std::shared_ptr<const PublishedStep>& target) {
    return WithRetries<std::vector<std::shared_ptr<const PublishedStep>>>(
        [&] { return StepsAfter(*store, held->id, target); });
  }

  // Whether the run has gone on without the held version. Within an epoch
  // versions never go back.
  absl::StatusOr<bool> WasAbandoned(const PublishedStep& target) {
    KEDGE_ASSIGN_OR_RETURN(const std::vector<EpochInfo> epochs,
                           WithRetries<std::vector<EpochInfo>>(
                               [&] { return store->ReadEpochs(); }));
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

  // The first of `steps` (every version is visited), the others for later.
  absl::Status PrepareNext(
      std::vector<std::shared_ptr<const PublishedStep>> steps,
      Clock::time_point start) {
    const std::shared_ptr<const PublishedStep> next = steps.front();
    steps.erase(steps.begin());
    if (next->manifest.kind == StepKind::kDelta) {
      return PrepareDeltas({next}, std::move(steps), start);
    }
    KEDGE_RETURN_IF_ERROR(PrepareJoin(next, nullptr, start));
    prepared->later = std::move(steps);
    return absl::OkStatus();
  }

  absl::Status PrepareDeltas(
      std::vector<std::shared_ptr<const PublishedStep>> steps,
      std::vector<std::shared_ptr<const PublishedStep>> later,
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
    KEDGE_RETURN_IF_ERROR(LoadDeltas(&next));
    return Finish(std::move(next), start);
  }

  absl::Status PrepareJoin(const std::shared_ptr<const PublishedStep>& target,
                           Chain* chain, Clock::time_point start) {
    Prepared next;
    next.target = target;
    next.binding = binding;
    if (target->table->hash() != binding->table().hash()) {
      KEDGE_ASSIGN_OR_RETURN(next.binding, Bind(target->table));
    }
    if (chain != nullptr) {
      next.chain = std::move(*chain);
    } else {
      KEDGE_ASSIGN_OR_RETURN(next.chain, WithRetries<Chain>([&] {
                               return store->FindChain(target, nullptr);
                             }));
    }
    KEDGE_RETURN_IF_ERROR(LoadChain(&next));
    return Finish(std::move(next), start);
  }

  absl::Status Finish(Prepared next, Clock::time_point start) {
    next.seconds = SecondsSince(start);
    prepared = std::move(next);
    return absl::OkStatus();
  }

  absl::StatusOr<std::shared_ptr<const Binding>> Bind(
      const std::shared_ptr<const TensorTable>& table) {
    KEDGE_ASSIGN_OR_RETURN(BoundWeights bound,
                           BindWeights(sets, table, options.allow_partial));
    return std::make_shared<const Binding>(std::move(bound), &sets);
  }

  // Makes `next`, whose chain begins with an anchor, ready to run; passes over
  // damaged anchors for older ones.
  absl::Status LoadChain(Prepared* next) {
    while (true) {
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
      if (next->binding->table().StateDigest(next->l61) !=
          next->target->manifest.digest_after) {
        return DataLoss(
            {.where = anchor.path,
             .what = "state digest",
             .expected = ToHex(next->target->manifest.digest_after),
             .found = ToHex(next->binding->table().StateDigest(next->l61)),
             .advice = "run `kedge fsck`"});
      }
      if (State() != FollowerState::kEmpty && next->mask.empty()) {
        next->mask = MaskOfWrong(*next);
      }
      auto load =
          AnchorLoad::Open(&context, *next->binding, next->mask, anchor);
      if (load.ok()) {
        next->anchor = *std::move(load);
        next->bytes_read += anchor.manifest_bytes + kCommitBytes;
        return LoadDeltas(next);
      }
      KEDGE_RETURN_IF_ERROR(UseOlderAnchor(load.status(), next));
    }
  }

  // Replaces the chain by one through an older anchor; returns the first
  // failure if there is none.
  absl::Status UseOlderAnchor(const absl::Status& error, Prepared* next) {
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
    next->chain = *std::move(older);
    return absl::OkStatus();
  }

  // The tensors whose memory is not what `next` will make it. What verifies
  // already is not read again.
  TensorMask MaskOfWrong(const Prepared& next) {
    const Binding::Comparison comparison =
        next.binding->Compare(&apply_pool, summer, next.l61);
    const std::size_t count = next.binding->table().size();
    TensorMask mask(count, false);
    for (std::size_t t = 0; t < count; ++t) {
      mask[t] = !next.binding->weights().tensors[t].fully_covered;
    }
    for (const Binding::Mismatch& mismatch : comparison.mismatches) {
      mask[mismatch.tensor] = true;
    }
    return mask;
  }

  absl::Status LoadDeltas(Prepared* next) {
    const std::uint64_t before = bytes_read.load();
    for (const auto& step : next->chain.deltas) {
      KEDGE_ASSIGN_OR_RETURN(
          std::unique_ptr<LoadedDelta> delta,
          LoadedDelta::Load(&context, *next->binding, next->mask, step));
      if (options.check_records_before_pause) {
        KEDGE_RETURN_IF_ERROR(
            CheckRecords(&apply_pool, *next->binding, summer.key(), *delta));
      }
      next->bytes_read += step->manifest_bytes + kCommitBytes;
      next->deltas.push_back(std::move(delta));
    }
    next->bytes_read += bytes_read.load() - before;
    return absl::OkStatus();
  }

  // ------------------------------------------------------------------- running
  // Pauses, writes, verifies, commits `prepared`, and adds to `result`.
  absl::Status Run(UpdateResult* result) {
    Prepared& next = *prepared;
    if (options.pause) KEDGE_RETURN_IF_ERROR(options.pause());
    const Clock::time_point start = Clock::now();
    Set(FollowerState::kUpdating, std::nullopt);
    held.reset();
    const bool joining = next.anchor != nullptr;
    const std::uint64_t before = bytes_read.load();
    absl::Status status = Write(&next, result);
    while (joining && !status.ok()) {
      if (absl::Status older = UseOlderAnchor(status, &next); !older.ok()) {
        status = older;
        break;
      }
      status = LoadChain(&next);
      if (status.ok()) status = Write(&next, result);
    }
    if (!status.ok()) {
      Set(FollowerState::kPoisoned, std::nullopt);
      prepared.reset();
      return absl::Status(
          status.code(),
          absl::StrCat(status.message(),
                       "; the weights are of no version now: stay paused and "
                       "call Join, which re-reads in place what is wrong"));
    }
    held =
        Held{next.target->id, next.target->manifest.epoch, std::move(next.l61)};
    binding = next.binding;
    result->version = held->id;
    result->changed = true;
    result->joined = result->joined || joining;
    result->deltas += next.deltas.size();
    result->bytes_read += next.bytes_read + (bytes_read.load() - before);
    result->read_seconds += next.seconds;
    if (options.commit) options.commit(held->id);
    SetHolds();
    result->pause_seconds += SecondsSince(start);
    return absl::OkStatus();
  }

  absl::Status Write(Prepared* next, UpdateResult* result) {
    const Clock::time_point start = Clock::now();
    if (next->anchor != nullptr) {
      KEDGE_RETURN_IF_ERROR(
          next->anchor->Run(*next->binding, &result->units_written));
    }
    ApplyCounts counts;
    const absl::Status applied =
        ApplyDeltas(&apply_pool, *next->binding, next->deltas, &counts);
    result->records += counts.records;
    result->nnz += counts.nnz;
    result->units_written += counts.units_written;
    result->apply_seconds += SecondsSince(start);
    KEDGE_RETURN_IF_ERROR(applied);

    const Clock::time_point verify_start = Clock::now();
    const Binding::Comparison comparison =
        next->binding->Compare(&apply_pool, summer, next->l61);
    result->verify_seconds += SecondsSince(verify_start);
    result->tensors_verified = comparison.tensors_verified;
    result->bytes_verified += comparison.bytes_verified;
    if (comparison.mismatches.empty()) return absl::OkStatus();
    return absl::DataLossError(absl::StrCat(
        store->path(), ": after the update to ", ToString(next->target->id),
        " ", next->binding->Describe(comparison.mismatches, next->l61)));
  }

  absl::StatusOr<UpdateResult> Join(
      const std::shared_ptr<const PublishedStep>& target,
      Clock::time_point start) {
    prepared.reset();
    KEDGE_RETURN_IF_ERROR(PrepareJoin(target, nullptr, start));
    UpdateResult result;
    const absl::Status status = Run(&result);
    prepared.reset();  // a later Update plans for itself
    if (!status.ok()) return status;
    return result;
  }

  FollowerOptions options;
  std::vector<const WeightSet*> sets;
  std::unique_ptr<Store> store;
  L61Summer summer;
  IoPool io_pool;
  IoPool apply_pool;
  std::atomic<std::uint64_t> bytes_read{0};  // of data files
  ReadContext context;
  std::shared_ptr<const Binding> binding;
  Clock::time_point last_directory_look;
  std::optional<Held> held;  // none while updating, poisoned, or nothing yet
  std::optional<Prepared> prepared;

  mutable std::mutex mutex;
  FollowerState state ABSL_GUARDED_BY(mutex) = FollowerState::kEmpty;
  std::optional<VersionId> public_held ABSL_GUARDED_BY(mutex);
};

Follower::Follower(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Follower::~Follower() = default;

absl::StatusOr<std::unique_ptr<Follower>> Follower::Open(
    FollowerOptions options, std::vector<const WeightSet*> sets) {
  FileSystem* fs = options.fs != nullptr ? options.fs : PosixFileSystem();
  KEDGE_ASSIGN_OR_RETURN(std::unique_ptr<Store> store,
                         Store::Open(fs, options.store_path));
  auto impl = std::make_unique<Impl>(std::move(options), std::move(sets),
                                     std::move(store));
  KEDGE_ASSIGN_OR_RETURN(
      const std::shared_ptr<const PublishedStep> newest,
      (impl->WithRetries<std::shared_ptr<const PublishedStep>>(
          [&] { return impl->store->Newest(); })));
  KEDGE_ASSIGN_OR_RETURN(impl->binding, impl->Bind(newest->table));
  impl->last_directory_look = Clock::now();
  return std::unique_ptr<Follower>(new Follower(std::move(impl)));
}

absl::Status Follower::VerifyHeld(std::uint64_t step) {
  Impl& impl = *impl_;
  KEDGE_ASSIGN_OR_RETURN(
      const std::shared_ptr<const PublishedStep> published,
      (impl.WithRetries<std::shared_ptr<const PublishedStep>>(
          [&] { return impl.store->ReadStep(step); })));
  KEDGE_ASSIGN_OR_RETURN(VersionState state,
                         impl.WithRetries<VersionState>(
                             [&] { return impl.store->StateAt(published); }));
  std::shared_ptr<const Binding> binding = impl.binding;
  if (state.table->hash() != binding->table().hash()) {
    KEDGE_ASSIGN_OR_RETURN(binding, impl.Bind(state.table));
  }
  const Binding::Comparison comparison =
      binding->Compare(&impl.apply_pool, impl.summer, state.l61);
  if (!comparison.mismatches.empty()) {
    return absl::DataLossError(absl::StrCat(
        impl.store->path(), ": memory does not hold ", ToString(published->id),
        ": ", binding->Describe(comparison.mismatches, state.l61),
        "; load that version's weights, or call Join"));
  }
  impl.prepared.reset();
  impl.binding = std::move(binding);
  impl.held =
      Held{published->id, published->manifest.epoch, std::move(state.l61)};
  impl.SetHolds();
  return absl::OkStatus();
}

absl::StatusOr<UpdateResult> Follower::Join() {
  const Clock::time_point start = Clock::now();
  KEDGE_ASSIGN_OR_RETURN(
      const std::shared_ptr<const PublishedStep> newest,
      (impl_->WithRetries<std::shared_ptr<const PublishedStep>>(
          [&] { return impl_->store->Newest(); })));
  impl_->last_directory_look = Clock::now();
  return impl_->Join(newest, start);
}

absl::StatusOr<UpdateResult> Follower::JoinStep(std::uint64_t step) {
  const Clock::time_point start = Clock::now();
  KEDGE_ASSIGN_OR_RETURN(
      const std::shared_ptr<const PublishedStep> target,
      (impl_->WithRetries<std::shared_ptr<const PublishedStep>>(
          [&] { return impl_->store->ReadStep(step); })));
  return impl_->Join(target, start);
}

absl::StatusOr<std::optional<VersionId>> Follower::Prefetch() {
  KEDGE_RETURN_IF_ERROR(impl_->RequireHeld());
  KEDGE_RETURN_IF_ERROR(impl_->Prepare());
  if (!impl_->prepared) return std::optional<VersionId>();
  const Prepared& next = *impl_->prepared;
  return std::optional<VersionId>(next.later.empty() ? next.target->id
                                                     : next.later.back()->id);
}

absl::StatusOr<UpdateResult> Follower::Update() {
  Impl& impl = *impl_;
  KEDGE_RETURN_IF_ERROR(impl.RequireHeld());
  KEDGE_RETURN_IF_ERROR(impl.Prepare());
  UpdateResult result;
  result.version = impl.held->id;
  while (impl.prepared) {
    KEDGE_RETURN_IF_ERROR(impl.Run(&result));
    std::vector<std::shared_ptr<const PublishedStep>> later =
        std::move(impl.prepared->later);
    impl.prepared.reset();
    if (!later.empty()) {
      KEDGE_RETURN_IF_ERROR(impl.PrepareNext(std::move(later), Clock::now()));
    }
  }
  return result;
}

absl::StatusOr<UpdateResult> Follower::WaitForUpdate(
    std::chrono::milliseconds timeout) {
  const Clock::time_point deadline = Clock::now() + timeout;
  std::chrono::milliseconds poll = kFirstPoll;
  while (true) {
    absl::StatusOr<UpdateResult> result = Update();
    if (!result.ok() || result->changed) return result;
    const Clock::time_point now = Clock::now();
    if (now >= deadline) {
      return absl::DeadlineExceededError(
          absl::StrCat(impl_->store->path(), ": waited ", timeout.count(),
                       " ms for a version newer than the held ",
                       ToString(impl_->held->id), "; none was published"));
    }
    std::this_thread::sleep_for(
        std::min<Clock::duration>(poll, deadline - now));
    poll = std::min(poll * 2, kLongestPoll);
  }
}

FollowerState Follower::state() const { return impl_->State(); }

std::optional<VersionId> Follower::held() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->public_held;
}

std::vector<std::string> Follower::unverified_tensors() const {
  return impl_->binding->UnverifiedNames();
}

}  // namespace kedge
