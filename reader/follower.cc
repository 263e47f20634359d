#include "kedge/reader/follower.h"

#include <algorithm>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kedge/format/status.h"
#include "kedge/reader/follower_impl.h"

namespace kedge {
namespace {

constexpr std::chrono::milliseconds kFirstPoll{2};
constexpr std::chrono::milliseconds kLongestPoll{100};

double SecondsSince(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start)
      .count();
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
  // On its way to a device every byte is copied once anyhow: a mapping would
  // add its page faults.
  if (options.device != nullptr) return false;
  const auto kind = fs.KindOf(options.store_path);
  return kind.ok() && *kind == StorageKind::kLocal;
}

std::string LeaseId(const FollowerOptions& options) {
  if (options.lease_id.empty() || options.group.size == 1) {
    return options.lease_id;
  }
  return absl::StrCat(options.lease_id, "-r", options.group.rank);
}

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

Follower::Impl::Impl(FollowerOptions follower_options,
                     std::vector<const WeightSet*> held_sets,
                     std::unique_ptr<Store> opened)
    : options(std::move(follower_options)),
      sets(std::move(held_sets)),
      store(std::move(opened)),
      key(L61Key::FromSeed(store->info().l61_seed)),
      io_pool(options.io_threads),
      lease(store.get(), LeaseId(options), options.lease_renewal),
      channel(options.group) {
  context.store = store.get();
  context.io_pool = &io_pool;
  context.map = UseMapping(*store->fs(), options);
  context.retry_deadline = options.retry_deadline;
  context.bytes_read = &bytes_read;
  sets_of_rank = {sets};
}

absl::StatusOr<std::unique_ptr<Follower::Impl>> Follower::Impl::OpenStore(
    const FollowerOptions& options, std::vector<const WeightSet*> sets,
    SharedStep* newest) {
  if (!options.lease_id.empty() && !IsReaderId(LeaseId(options))) {
    return absl::InvalidArgumentError(absl::StrCat(
        "lease_id ", options.lease_id, ": expected at most ", kMaxReaderIdBytes,
        " of A-Z a-z 0-9 . _ -, no dot in front (a rank of a group adds \"-r\" "
        "and its number)"));
  }
  FileSystem* fs = options.fs != nullptr ? options.fs : PosixFileSystem();
  KEDGE_ASSIGN_OR_RETURN(std::unique_ptr<Store> store,
                         Store::Open(fs, options.store_path));
  auto impl =
      std::make_unique<Impl>(options, std::move(sets), std::move(store));
  const BackendOptions backend = {
      .apply_threads = ThreadsOrCores(options.apply_threads),
      .check_records = options.check_records_before_pause,
      .stream = options.stream,
      .device_stage_bytes = options.device_stage_bytes};
  if (options.device == nullptr) {
    impl->backend = MakeHostBackend(backend, &impl->context, impl->key);
  } else {
    KEDGE_ASSIGN_OR_RETURN(
        impl->backend,
        MakeDeviceBackend(options.device, backend, &impl->context, impl->key));
  }
  KEDGE_RETURN_IF_ERROR(impl->backend->CheckTargets(impl->sets));
  KEDGE_ASSIGN_OR_RETURN(*newest, impl->ReadNewest());
  return impl;
}

// --------------------------------------------------------------------- states

void Follower::Impl::Set(FollowerState new_state,
                         std::optional<VersionId> version) {
  const std::lock_guard lock(mutex);
  state = new_state;
  public_held = std::move(version);
}

FollowerState Follower::Impl::State() const {
  const std::lock_guard lock(mutex);
  return state;
}

void Follower::Impl::MarkSuperseded() {
  superseded = true;
  if (channel.alone()) PublishSuperseded();
}

void Follower::Impl::PublishSuperseded() {
  superseded = true;
  if (State() == FollowerState::kReady) {
    Set(FollowerState::kSuperseded, held->id);
  }
}

void Follower::Impl::SetHolds(Held now) {
  held = std::move(now);
  superseded = false;
  suspect_anchors.clear();
  const bool whole = binding->UnverifiedNames().empty();
  Set(whole ? FollowerState::kReady : FollowerState::kEmpty, held->id);
}

void Follower::Impl::Poison() {
  held.reset();
  superseded = false;
  prepared.reset();
  Set(FollowerState::kPoisoned, std::nullopt);
}

absl::Status Follower::Impl::RequireHeld() const {
  if (held) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      store->path(), ": the follower is ", ToString(State()),
      ": no version is held; call Join, or VerifyHeld for weights that were "
      "loaded otherwise"));
}

void Follower::Impl::RenewLease() { lease.RenewIfDue(); }

void Follower::Impl::SetLease(UpdateResult* result) {
  if (held) lease.Replace(held->id.step, held->id);
  if (auto warning = lease.TakeWarning()) {
    result->warnings.push_back(*std::move(warning));
  }
}

// -------------------------------------------------------------------- running

absl::Status Follower::Impl::Run(UpdateResult* result) {
  Prepared& next = *prepared;
  if (options.pause) KEDGE_RETURN_IF_ERROR(options.pause());
  const Clock::time_point start = Clock::now();
  Set(FollowerState::kUpdating, std::nullopt);
  held.reset();
  const std::uint64_t before = bytes_read.load();
  const auto write_and_verify = [&]() -> absl::Status {
    KEDGE_RETURN_IF_ERROR(Write(&next, result));
    return Verify(next, result);
  };
  absl::Status status = write_and_verify();
  // Every way to the target leads over a delta that cannot be read.
  while (!status.ok() && next.chain.anchor != nullptr && next.beside.ok()) {
    next.reads_beside = false;
    if (absl::Status older = UseOlderAnchor(status, &next); !older.ok()) {
      status = older;
      break;
    }
    status = LoadChain(&next);
    if (status.ok()) status = write_and_verify();
  }
  if (!status.ok()) {
    Poison();
    return absl::Status(
        status.code(),
        absl::StrCat(status.message(),
                     "; the weights are of no version now: stay paused and "
                     "call Join, which re-reads in place what is wrong"));
  }
  result->bytes_read += bytes_read.load() - before;
  Commit(&next, {}, start, result);
  return absl::OkStatus();
}

absl::Status Follower::Impl::WriteAnchor(Prepared* next, UpdateResult* result) {
  std::atomic<bool> stop{false};
  std::thread reader;
  const bool reads = next->reads_beside && !next->deltas.empty();
  if (reads) {
    try {
      reader = std::thread([&] { next->beside = ReadDeltas(next, stop); });
    } catch (const std::system_error&) {
      // Out of threads: they are read afterwards.
    }
  }
  const absl::Status written = backend->WriteAnchor(
      *next->binding, next->anchor.get(), &result->units_written);
  if (!written.ok()) stop = true;
  if (reader.joinable()) {
    reader.join();
  } else if (reads && written.ok()) {
    next->beside = ReadDeltas(next, stop);
  }
  KEDGE_RETURN_IF_ERROR(next->beside);
  return written;
}

absl::Status Follower::Impl::Write(Prepared* next, UpdateResult* result) {
  const Clock::time_point start = Clock::now();
  if (next->anchor != nullptr) {
    KEDGE_RETURN_IF_ERROR(WriteAnchor(next, result));
  }
  ApplyCounts counts;
  absl::Status applied;
  while (true) {
    applied = backend->Apply(*next->binding, next->deltas, &counts);
    if (!applied.ok()) break;
    next->applied += next->deltas.size();
    if (next->applied == next->chain.deltas.size()) break;
    next->deltas.clear();
    applied = StageDeltas(next, /*read=*/true);
    if (!applied.ok()) break;
  }
  result->records += counts.records;
  result->nnz += counts.nnz;
  result->units_written += counts.units_written;
  result->apply_seconds += SecondsSince(start);
  return applied;
}

absl::Status Follower::Impl::PrepareSums(
    const std::shared_ptr<const Binding>& bound) {
  sums.residues.reserve(bound->residue_count());
  return backend->Prepare(bound);
}

absl::StatusOr<Follower::Impl::Comparison> Follower::Impl::Compare(
    const std::shared_ptr<const Binding>& bound,
    std::span<const std::uint64_t> l61) {
  KEDGE_RETURN_IF_ERROR(backend->Sum(bound, &sums));
  return Comparison{bound->Judge(sums.residues, l61), sums.bytes};
}

absl::Status Follower::Impl::Verify(const Prepared& next,
                                    UpdateResult* result) {
  const Clock::time_point start = Clock::now();
  KEDGE_ASSIGN_OR_RETURN(const Comparison comparison,
                         Compare(next.binding, next.l61));
  result->verify_seconds += SecondsSince(start);
  result->tensors_verified = next.binding->verifiable_tensors();
  result->elements_verified += next.binding->summed_elements();
  result->bytes_verified += comparison.bytes;
  if (comparison.mismatches.empty()) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(
      store->path(), ": after the update to ", ToString(next.target->id), " ",
      next.binding->Describe(comparison.mismatches, next.l61)));
}

void Follower::Impl::Commit(Prepared* next,
                            std::vector<std::uint64_t> own_residues,
                            Clock::time_point paused, UpdateResult* result) {
  binding = next->binding;
  result->version = next->target->id;
  result->changed = true;
  result->joined = result->joined || next->anchor != nullptr;
  result->deltas += next->chain.deltas.size();
  result->bytes_read += next->bytes_read;
  result->read_seconds += next->seconds;
  if (options.commit) options.commit(next->target->id);
  SetHolds(Held{next->target->id, next->target->manifest.epoch,
                std::move(next->l61), std::move(own_residues)});
  result->pause_seconds += SecondsSince(paused);
}

absl::StatusOr<UpdateResult> Follower::Impl::Join(const SharedStep& target,
                                                  Clock::time_point start) {
  prepared.reset();
  KEDGE_RETURN_IF_ERROR(PrepareJoin(target, nullptr, start));
  UpdateResult result;
  const absl::Status status = Run(&result);
  prepared.reset();  // a later Update plans for itself
  if (!status.ok()) return status;
  SetLease(&result);
  return result;
}

absl::StatusOr<UpdateResult> Follower::Impl::Update() {
  KEDGE_RETURN_IF_ERROR(RequireHeld());
  RenewLease();
  KEDGE_RETURN_IF_ERROR(Prepare());
  UpdateResult result;
  result.version = held->id;
  while (prepared) {
    KEDGE_RETURN_IF_ERROR(Run(&result));
    std::vector<SharedStep> later = std::move(prepared->later);
    prepared.reset();
    if (!later.empty()) {
      KEDGE_RETURN_IF_ERROR(PrepareNext(std::move(later), Clock::now()));
    }
  }
  if (result.changed) SetLease(&result);
  return result;
}

absl::StatusOr<Follower::Impl::Claim> Follower::Impl::ReadClaim(
    std::uint64_t step) {
  lease.Pin(step, std::nullopt);
  Claim claim;
  KEDGE_ASSIGN_OR_RETURN(claim.published, ReadStep(step));
  KEDGE_ASSIGN_OR_RETURN(VersionState at, WithRetries<VersionState>([&] {
                           return store->StateAt(claim.published);
                         }));
  claim.l61 = std::move(at.l61);
  claim.binding = binding;
  if (at.table->hash() != binding->table().hash()) {
    KEDGE_ASSIGN_OR_RETURN(claim.binding, Bind(at.table));
  }
  return claim;
}

absl::Status Follower::Impl::VerifyHeld(std::uint64_t step) {
  KEDGE_ASSIGN_OR_RETURN(Claim claim, ReadClaim(step));
  KEDGE_ASSIGN_OR_RETURN(const Comparison comparison,
                         Compare(claim.binding, claim.l61));
  if (!comparison.mismatches.empty()) {
    return absl::DataLossError(absl::StrCat(
        store->path(), ": memory does not hold ", ToString(claim.published->id),
        ": ", claim.binding->Describe(comparison.mismatches, claim.l61),
        "; load that version's weights, or call Join"));
  }
  prepared.reset();
  binding = std::move(claim.binding);
  SetHolds(Held{claim.published->id,
                claim.published->manifest.epoch,
                std::move(claim.l61),
                {}});
  lease.Replace(held->id.step, held->id);
  return absl::OkStatus();
}

// ------------------------------------------------------------------- Follower

Follower::Follower(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Follower::~Follower() = default;

absl::StatusOr<std::unique_ptr<Follower>> Follower::Open(
    FollowerOptions options, std::vector<const WeightSet*> sets) {
  KEDGE_RETURN_IF_ERROR(GroupChannel::Check(options.group));
  for (std::size_t i = 0; i < sets.size(); ++i) {
    if (sets[i] != nullptr) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("weight set ", i, " of ", sets.size(),
                     ": expected a pointer to a WeightSet, found null"));
  }
  SharedStep newest;
  auto impl = Impl::OpenStore(options, sets, &newest);
  if (options.group.size > 1) {
    KEDGE_RETURN_IF_ERROR(Impl::OpenInGroup(options, sets, impl, newest));
  } else if (!impl.ok()) {
    return impl.status();
  }
  KEDGE_ASSIGN_OR_RETURN((*impl)->binding, (*impl)->Bind(newest->table));
  return std::unique_ptr<Follower>(new Follower(*std::move(impl)));
}

absl::Status Follower::VerifyHeld(std::uint64_t step) {
  return impl_->channel.alone() ? impl_->VerifyHeld(step)
                                : impl_->VerifyHeldInGroup(step);
}

absl::StatusOr<UpdateResult> Follower::Join() {
  if (!impl_->channel.alone()) {
    return impl_->JoinInGroup(GroupPhase::kJoin, std::nullopt);
  }
  const auto start = Impl::Clock::now();
  KEDGE_ASSIGN_OR_RETURN(const SharedStep newest, impl_->ReadNewest());
  return impl_->Join(newest, start);
}

absl::StatusOr<UpdateResult> Follower::JoinStep(std::uint64_t step) {
  if (!impl_->channel.alone()) {
    return impl_->JoinInGroup(GroupPhase::kJoinStep, step);
  }
  const auto start = Impl::Clock::now();
  KEDGE_ASSIGN_OR_RETURN(const SharedStep target, impl_->ReadStep(step));
  return impl_->Join(target, start);
}

absl::StatusOr<std::optional<VersionId>> Follower::Prefetch() {
  KEDGE_RETURN_IF_ERROR(impl_->RequireHeld());
  impl_->RenewLease();
  KEDGE_RETURN_IF_ERROR(impl_->Prepare());
  if (!impl_->prepared) return std::optional<VersionId>();
  const Prepared& next = *impl_->prepared;
  return std::optional<VersionId>(next.later.empty() ? next.target->id
                                                     : next.later.back()->id);
}

absl::StatusOr<UpdateResult> Follower::Update() {
  if (impl_->channel.alone()) return impl_->Update();
  bool give_up = false;
  return impl_->UpdateInGroup(GroupPhase::kUpdate, false, &give_up);
}

absl::StatusOr<UpdateResult> Follower::WaitForUpdate(
    std::chrono::milliseconds timeout) {
  const auto deadline = Impl::Clock::now() + timeout;
  std::chrono::milliseconds poll = kFirstPoll;
  while (true) {
    const bool expired = Impl::Clock::now() >= deadline;
    bool give_up = expired;
    absl::StatusOr<UpdateResult> result =
        impl_->channel.alone()
            ? impl_->Update()
            : impl_->UpdateInGroup(GroupPhase::kWait, expired, &give_up);
    if (!result.ok() || result->changed) return result;
    if (give_up) {
      return absl::DeadlineExceededError(
          absl::StrCat(impl_->store->path(), ": waited ", timeout.count(),
                       " ms for a version newer than the held ",
                       ToString(impl_->held->id), "; none was published"));
    }
    // In a group the vote keeps ranks together, whatever their clocks say.
    const auto left = std::max<Impl::Clock::duration>(
        deadline - Impl::Clock::now(), std::chrono::milliseconds(0));
    std::this_thread::sleep_for(std::min<Impl::Clock::duration>(
        poll, impl_->channel.alone() ? left : poll));
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
