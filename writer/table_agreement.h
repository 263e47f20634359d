#ifndef KEDGE_WRITER_TABLE_AGREEMENT_H_
#define KEDGE_WRITER_TABLE_AGREEMENT_H_

// The table of what all ranks together hold. Private to writer/.

#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kedge/format/tensor_table.h"
#include "kedge/writer/coordinator.h"
#include "kedge/writer/tensor_source.h"

namespace kedge {

// Collective. `sound` says what this rank has found wrong with its tensors by
// itself; all ranks hear of it. Errors: as CheckTensors, MakeTable and
// UniteTables.
absl::StatusOr<TensorTable> AgreeOnTable(
    Coordinator* coordinator, std::span<const TrainerTensor> tensors,
    const absl::Status& sound = absl::OkStatus());

// Collective. What each rank could not do of `what`: a failure of one is every
// rank's, with that rank's number.
absl::Status AgreeThatAllCould(Coordinator* coordinator, absl::string_view what,
                               const absl::Status& mine);

// Whether other ranks hold what one does not.
MemorySource::Others OthersOf(Coordinator* coordinator);

}  // namespace kedge

#endif  // KEDGE_WRITER_TABLE_AGREEMENT_H_
