#include "kedge/writer/optimizer_hook.h"

#include <algorithm>
#include <iterator>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kedge/format/limits.h"
#include "kedge/format/status.h"
#include "kedge/writer/hook_impl.h"

namespace kedge {
namespace {

using hook::BytesText;
using hook::kNoIndex;
using hook::Named;

using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

}  // namespace

// ------------------------------------------------------------------ BeginStep

// Whether weights were written in a step that is given up.
absl::StatusOr<bool> OptimizerHook::Impl::AnyRankUpdated() {
  if (group.alone()) return updates > 0;
  const Verdict verdict = group.Agree(
      absl::StrCat("giving up v", step),
      std::vector<std::byte>{std::byte{static_cast<std::uint8_t>(updates > 0)}},
      [](std::span<const std::vector<std::byte>> pieces) -> Verdict {
        std::vector<std::byte> any(1);
        for (const auto& piece : pieces) {
          if (piece != std::vector<std::byte>(1)) any[0] = std::byte{1};
        }
        return {absl::OkStatus(), any};
      });
  KEDGE_RETURN_IF_ERROR(verdict.status);
  return verdict.payload != std::vector<std::byte>(1);
}

// What memory holds now is where this step's sums start from.
void OptimizerHook::Impl::Rebase() {
  const absl::Status summed = SumLive(&residues);
  if (!summed.ok()) return FailStep(summed);
  for (std::size_t g = 0; g < guarded.size(); ++g) {
    if (!guarded[g].replica) parts[guarded[g].part].l61 = residues[g];
  }
}

absl::Status OptimizerHook::BeginStep(std::uint64_t step, bool anchor) {
  Impl& impl = *impl_;
  KEDGE_RETURN_IF_ERROR(impl.writer->CheckUsable());
  const auto start = Clock::now();
  const std::uint64_t held = impl.writer->held().step;
  const auto wrong_step = [&] {
    return absl::InvalidArgumentError(absl::StrCat(
        "step: expected ", held + 1,
        impl.lost ? absl::StrCat(" to ", kMaxStep) : std::string(), ", found ",
        step,
        "; to publish from an earlier version, open the store with that "
        "resume step"));
  };
  // The open step is given up for one that can be alone.
  if (step <= held || step > kMaxStep) return wrong_step();
  if (impl.state != Impl::State::kIdle) {
    if (step == impl.step && !anchor) {
      return absl::FailedPreconditionError(absl::StrCat(
          "v", step,
          " is open already: publish it, or give it up by beginning it again "
          "with an anchor"));
    }
    KEDGE_ASSIGN_OR_RETURN(const bool updated, impl.AnyRankUpdated());
    impl.lost = impl.lost || updated || impl.rebased;
    impl.state = Impl::State::kIdle;
  }
  if (impl.lost && !anchor) {
    return absl::FailedPreconditionError(absl::StrCat(
        "v", step, ": the step before, v", impl.step,
        ", was hooked and not published, and its parts are lost; begin this "
        "step with an anchor"));
  }
  if (step != held + 1 && !impl.lost) return wrong_step();

  // Chunks of a step that was given up may still be on their way.
  KEDGE_RETURN_IF_ERROR(impl.feed->WaitUntilIdle());
  KEDGE_RETURN_IF_ERROR(impl.delta->WaitUntilIdle());
  impl.writer->Abandon(std::move(impl.attempt));
  impl.writer->Abandon(std::move(impl.anchor));
  impl.step = step;
  impl.step_status = absl::OkStatus();
  impl.updates = 0;
  impl.drain_seconds = 0;
  impl.rebased = impl.lost;
  for (auto& ranges : impl.written) ranges.clear();
  std::fill(impl.pending.begin(), impl.pending.end(), Impl::Pending());
  std::fill(std::begin(impl.carry_used), std::end(impl.carry_used), false);
  if (!impl.rebased) impl.attempt = impl.writer->BeginDelta(step);
  impl.delta->BeginStep(impl.attempt.get(), impl.writer->encode_pool());
  if (anchor) {
    impl.anchor = impl.writer->BeginAnchor(step, impl.owned, impl.rebased);
    impl.feed->Begin(impl.anchor->writer());
  }
  impl.feeding = anchor && impl.anchor->status().ok();
  impl.state = Impl::State::kOpen;
  if (impl.rebased) {
    impl.FailStep(impl.anchor->status());
    impl.Rebase();
  }
  impl.wait_seconds = SecondsSince(start);
  return absl::OkStatus();
}

// -------------------------------------------------------------------- EndStep

absl::Status OptimizerHook::Impl::CheckCovered() const {
  Named missing;
  for (std::uint32_t p = 0; p < written.size(); ++p) {
    const HookedParameter& parameter = options.parameters[p];
    if (parameter.frozen) continue;
    std::uint64_t at = 0;
    const auto gap = [&](std::uint64_t end) {
      if (at >= end) return;
      Named tensors;
      std::uint32_t last = ~0u;
      map->ForEachRun(
          p, at, end, spans[p].data + at,
          [&](std::uint32_t part, const UnitRange&, const StridedUnits&) {
            const std::uint32_t t = map->parts()[part].tensor;
            if (t != last) tensors.Add(options.tensors[t].name);
            last = t;
            return true;
          });
      missing.Add(absl::StrCat(
          "parameter \"", parameter.name, "\" bytes ", BytesText(at, end),
          tensors.empty() ? std::string()
                          : absl::StrCat(" (", tensors.Text(), ")")));
    };
    for (const Written& range : written[p]) {
      gap(range.begin);
      at = range.end;
    }
    gap(parameter.bytes);
  }
  if (missing.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "v", step, ": never written: ", missing.Text(),
      "; write what is missing and end the step again, or declare a parameter "
      "that the optimizer leaves alone as frozen"));
}

absl::Status OptimizerHook::EndStep() {
  Impl& impl = *impl_;
  if (impl.state != Impl::State::kOpen) {
    return absl::FailedPreconditionError(
        impl.state == Impl::State::kIdle
            ? std::string("EndStep: no step is open; call BeginStep first")
            : absl::StrCat("EndStep: v", impl.step, " is ended already"));
  }
  const auto start = Clock::now();
  const absl::Status idle = impl.delta->WaitUntilIdle();
  impl.drain_seconds = SecondsSince(start);
  impl.FailStep(idle.ok() ? impl.delta->WaitForAll() : idle);
  KEDGE_RETURN_IF_ERROR(idle);
  // Whatever else failed: a trainer that goes on has to know of this.
  KEDGE_RETURN_IF_ERROR(impl.delta->arrival());
  KEDGE_RETURN_IF_ERROR(impl.step_status);
  KEDGE_RETURN_IF_ERROR(impl.CheckCovered());
  impl.state = Impl::State::kEnded;
  return absl::OkStatus();
}

// -------------------------------------------------------------------- Publish

std::string OptimizerHook::Impl::PartText(std::uint32_t part) const {
  const MappedPart& mapped = map->parts()[part];
  return absl::StrCat("tensor \"", options.tensors[mapped.tensor].name,
                      "\" (parameter \"",
                      options.parameters[mapped.parameter].name, "\")");
}

// Whether memory holds what the step wrote. The sums are on their way.
absl::Status OptimizerHook::Impl::Guard(HookResult* result) {
  if (guarded.empty()) return absl::OkStatus();
  const auto start = Clock::now();
  KEDGE_RETURN_IF_ERROR(WaitOut(device, guard_stream.get()));
  result->guard_seconds = SecondsSince(start);
  result->guard_bytes = sums->bytes();
  const std::span<const std::uint64_t> found = sums->residues();
  Named changed;
  for (std::size_t g = 0; g < guarded.size(); ++g) {
    const PartState& part = parts[guarded[g].part];
    const std::uint64_t expected =
        L61Add(part.l61, delta->sums()[guarded[g].part]);
    if (found[g] == expected) continue;
    const std::string sums_text = absl::StrCat(
        ": L61: expected ", Hex64(expected), ", found ", Hex64(found[g]));
    if (guarded[g].replica) {
      changed.Add(absl::StrCat(PartText(guarded[g].part), ": replica ",
                               *guarded[g].replica,
                               " is not what the step wrote", sums_text));
    } else if (part.frozen) {
      changed.Add(absl::StrCat(PartText(guarded[g].part),
                               ": a frozen parameter was changed", sums_text));
    } else {
      changed.Add(absl::StrCat(PartText(guarded[g].part),
                               ": changed outside the step", sums_text));
    }
  }
  if (changed.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "v", step, ": ", changed.Text(),
      "; put the weights right and publish again, or begin the next step with "
      "an anchor"));
}

// Everything of this rank's part that is not yet in the attempt.
absl::Status OptimizerHook::Impl::Prepare(
    StoreWriter::DeltaAttempt* delta_attempt, KeptRecords* kept,
    HookResult* result, std::unique_ptr<SnapshotSource>* fresh) {
  KEDGE_RETURN_IF_ERROR(step_status);
  if (state != State::kEnded) {
    return absl::FailedPreconditionError(
        absl::StrCat("v", step,
                     ": the step has not ended: call EndStep, and see what it "
                     "says"));
  }
  if (!guarded.empty()) {
    const absl::Status enqueued = sums->Enqueue(guard_stream.get());
    if (!enqueued.ok()) return WaitOut(device, guard_stream.get(), enqueued);
  }
  // Beside the guard: nothing is visible before the commit.
  absl::Status drained;
  if (delta_attempt != nullptr) {
    drained = delta->Drain(delta_attempt);
    if (drained.ok()) {
      drained =
          writer->Encode(*delta_attempt, *snapshot, *residual, kept->sink())
              .status();
    }
  } else {
    auto copy =
        SnapshotSource::Copy(writer->table(), *residual, nullptr, nullptr);
    drained = copy.status();
    if (copy.ok()) *fresh = *std::move(copy);
  }
  const absl::Status guard = Guard(result);
  KEDGE_RETURN_IF_ERROR(guard);
  return drained;
}

// The rest of an anchor whose hooked weights went by in the step. Before the
// step's sums are added to PartState::l61.
absl::Status OptimizerHook::Impl::FillAnchor(
    StoreWriter::AnchorAttempt& anchor_attempt, SnapshotSource& residual_now) {
  KEDGE_RETURN_IF_ERROR(anchor_attempt.status());
  KEDGE_RETURN_IF_ERROR(feed->Finish());
  AnchorWriter& out = *anchor_attempt.writer();
  std::vector<OwnedSlice> frozen;
  for (std::size_t p = 0; p < parts.size(); ++p) {
    if (parts[p].quantised != kNoIndex) continue;
    if (parts[p].frozen) {
      frozen.push_back({parts[p].tensor, map->parts()[p].part.units()});
    } else {
      out.AddSum(parts[p].tensor, L61Add(parts[p].l61, delta->sums()[p]));
    }
  }
  std::sort(frozen.begin(), frozen.end(),
            [](const OwnedSlice& a, const OwnedSlice& b) {
              return std::tie(a.tensor, a.slice.begin) <
                     std::tie(b.tensor, b.slice.begin);
            });
  // A slice of the layout lies in one owned range.
  const auto lies_in = [](std::span<const OwnedSlice> ranges) {
    return [ranges](const AnchorSlice& slice) {
      const auto after = std::upper_bound(
          ranges.begin(), ranges.end(),
          std::pair(slice.tensor, slice.slice.begin),
          [](const std::pair<std::uint32_t, std::uint64_t>& at,
             const OwnedSlice& range) {
            return at < std::pair(range.tensor, range.slice.begin);
          });
      return after != ranges.begin() &&
             std::prev(after)->tensor == slice.tensor &&
             std::prev(after)->slice.end > slice.slice.begin;
    };
  };
  const std::vector<OwnedSlice> kept = OwnedOf(writer->table(), residual_now);
  const std::vector<OwnedSlice> made = OwnedOf(writer->table(), *fp8);
  KEDGE_RETURN_IF_ERROR(
      out.WriteSlices(*hooked, writer->summer(), lies_in(frozen)));
  KEDGE_RETURN_IF_ERROR(out.WriteSlices(*fp8, writer->summer(), lies_in(made)));
  return out.WriteSlices(residual_now, writer->summer(), lies_in(kept));
}

absl::StatusOr<HookResult> OptimizerHook::Publish(const Metadata* metadata) {
  Impl& impl = *impl_;
  KEDGE_RETURN_IF_ERROR(impl.writer->CheckUsable());
  const auto start = Clock::now();
  if (impl.state == Impl::State::kIdle) {
    return absl::FailedPreconditionError(absl::StrCat(
        "publish: no step was hooked since ", ToString(impl.writer->held()),
        "; call BeginStep before the optimizer writes"));
  }
  if (impl.rebased && impl.anchor == nullptr) {
    return absl::FailedPreconditionError(absl::StrCat(
        "v", impl.step,
        ": its anchor went with the publish that failed; begin the next step "
        "with an anchor"));
  }
  // An attempt that fails is gone with all that uses it.
  KEDGE_RETURN_IF_ERROR(impl.delta->WaitUntilIdle());
  HookResult result;
  result.wait_seconds = impl.wait_seconds;
  result.drain_seconds = impl.drain_seconds;
  KeptRecords kept;
  std::unique_ptr<SnapshotSource> fresh;
  if (impl.rebased) {
    absl::Status prepared = impl.Prepare(nullptr, &kept, &result, &fresh);
    if (prepared.ok()) prepared = impl.FillAnchor(*impl.anchor, *fresh);
    impl.feed->Finish().IgnoreError();
    impl.feeding = false;
    KEDGE_ASSIGN_OR_RETURN(
        result.publish,
        impl.writer->CommitRoot(std::move(impl.anchor), prepared, metadata));
    impl.snapshot = std::move(fresh);
    impl.lost = false;
  } else {
    const absl::Status prepared =
        impl.Prepare(impl.attempt.get(), &kept, &result, &fresh);
    const double prepare_seconds = SecondsSince(start);
    auto published = impl.writer->CommitDelta(std::move(impl.attempt), prepared,
                                              impl.owned, metadata);
    if (!published.ok()) {
      // The next try has an attempt of its own, at every rank.
      impl.attempt = impl.writer->BeginDelta(impl.step);
      impl.delta->ReplaceAttempt(impl.attempt.get());
      if (impl.delta->early_drains() > 0) {
        impl.FailStep(absl::FailedPreconditionError(absl::StrCat(
            "v", impl.step,
            ": parts of the step had been drained early and went with the "
            "publish that failed; begin the next step with an anchor, or give "
            "the hook a larger ring than ",
            impl.options.ring_bytes, " bytes")));
      }
      return published.status();
    }
    impl.delta->ReplaceAttempt(nullptr);
    result.publish = *std::move(published);
    // Of this call; the attempt has been open since the step began.
    result.publish.encode_seconds = prepare_seconds;
    kept.ApplyTo(impl.writer->table(), impl.snapshot.get());
    if (impl.anchor != nullptr) {
      const absl::Status filled = impl.FillAnchor(*impl.anchor, *impl.snapshot);
      result.publish.anchor_status = impl.writer->CommitAnchor(
          std::move(impl.anchor), filled, &result.publish);
    }
  }
  for (std::size_t p = 0; p < impl.parts.size(); ++p) {
    impl.parts[p].l61 = L61Add(impl.parts[p].l61, impl.delta->sums()[p]);
  }
  result.early_drains = impl.delta->early_drains();
  impl.state = Impl::State::kIdle;
  impl.writer->Retain(&result.publish);
  result.commit_seconds = SecondsSince(start);
  return result;
}

}  // namespace kedge
