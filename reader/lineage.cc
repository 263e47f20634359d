#include "kedge/reader/lineage.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kedge/format/status.h"

namespace kedge {

absl::StatusOr<std::vector<std::shared_ptr<const PublishedStep>>> StepsAfter(
    const Store& store, const VersionId& held,
    const std::shared_ptr<const PublishedStep>& target) {
  std::vector<std::shared_ptr<const PublishedStep>> steps;
  std::shared_ptr<const PublishedStep> at = target;
  while (at->id != held) {
    const VersionId base = at->manifest.base;
    if (at->id.step <= held.step || (base.step <= held.step && base != held)) {
      return absl::FailedPreconditionError(absl::StrCat(
          store.path(), ": the held ", ToString(held),
          " is no ancestor of the newest ", ToString(target->id), ": ",
          ToString(at->id), " stands on ",
          at->id.step == 0 ? "nothing" : ToString(base),
          "; the trainer went on from an earlier version; rejoin"));
    }
    steps.push_back(at);
    if (base == held) break;
    KEDGE_ASSIGN_OR_RETURN(auto next, store.ReadStep(base.step));
    if (next->id != base) {
      return DataLoss({.where = at->path,
                       .what = "base",
                       .expected = ToString(next->id),
                       .found = ToString(base),
                       .advice = "the step was written on another base (a "
                                 "fork); run `kedge fsck`"});
    }
    at = std::move(next);
  }
  std::reverse(steps.begin(), steps.end());
  return steps;
}

absl::Status AdvanceL61(const PublishedStep& step,
                        std::vector<std::uint64_t>* l61) {
  if (step.manifest.kind == StepKind::kRoot) {
    *l61 = step.manifest.l61;
  } else {
    for (const TensorState& state : step.manifest.states) {
      std::uint64_t& current = (*l61)[state.tensor];
      if (current != state.l61_before) {
        return DataLoss({.where = step.path,
                         .what = absl::StrCat(
                             "L61 of tensor ", (*step.table)[state.tensor].name,
                             " at the base ", ToString(step.manifest.base)),
                         .expected = Hex64(state.l61_before),
                         .found = Hex64(current),
                         .advice = "the delta is for other weights; run `kedge "
                                   "fsck`, or join from an anchor"});
      }
      current = state.l61_after;
    }
  }
  const Hash128 digest = step.table->StateDigest(*l61);
  if (digest == step.manifest.digest_after) return absl::OkStatus();
  return DataLoss({.where = step.path,
                   .what = "state digest after the step",
                   .expected = ToHex(step.manifest.digest_after),
                   .found = ToHex(digest),
                   .advice = "run `kedge fsck`, or join from an anchor"});
}

}  // namespace kedge
