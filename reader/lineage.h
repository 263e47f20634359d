#ifndef KEDGE_READER_LINEAGE_H_
#define KEDGE_READER_LINEAGE_H_

// How a held version and a target hang together, and what every tensor's
// checksum is along the way.

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kedge/engine/io/store.h"

namespace kedge {

// The steps after `held` up to `target`, ascending: deltas, and roots, which
// can only be entered through their anchor.
//
// Errors: kFailedPrecondition if `held` is certainly no ancestor of `target`;
// any other code if the walk could not be finished (a step in between was
// pruned or is damaged).
absl::StatusOr<std::vector<std::shared_ptr<const PublishedStep>>> StepsAfter(
    const Store& store, const VersionId& held,
    const std::shared_ptr<const PublishedStep>& target);

// Takes S of every tensor (`l61`, by ordinal) from the base of `step` to `step`
// itself. kDataLoss names the tensor whose S before does not agree, or says
// that the digest after does not.
absl::Status AdvanceL61(const PublishedStep& step,
                        std::vector<std::uint64_t>* l61);

}  // namespace kedge

#endif  // KEDGE_READER_LINEAGE_H_
