#ifndef KEDGE_WRITER_RANK_PARTS_H_
#define KEDGE_WRITER_RANK_PARTS_H_

// What ranks of a store's writer say to each other, as bytes. Private to
// writer/. The bytes live for one round and are read by the same version of
// kedge; they are checked all the same, since they may come through files.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kedge/engine/io/store.h"
#include "kedge/format/anchor_layout.h"
#include "kedge/format/manifest.h"
#include "kedge/format/tensor_table.h"
#include "kedge/writer/anchor_writer.h"
#include "kedge/writer/tensor_source.h"

namespace kedge {

// The part of an anchor, or of a root without one, that a rank has written; the
// table is the one it goes by. kFailedPrecondition if another table is named.
std::vector<std::byte> SerializeAnchorPart(const AnchorPart& part,
                                           const TensorTable& table);
absl::StatusOr<AnchorPart> ParseAnchorPart(absl::string_view where,
                                           std::span<const std::byte> bytes,
                                           const TensorTable& table);

// A version's state, and whose it is.
struct SharedState {
  RunId run;
  VersionState state;
};
std::vector<std::byte> SerializeSharedState(const SharedState& shared);
absl::StatusOr<SharedState> ParseSharedState(absl::string_view where,
                                             std::span<const std::byte> bytes);

// What a publish came to, for the ranks that did not commit it.
struct StepOutcome {
  VersionId version;
  std::uint64_t nnz = 0;
  std::uint64_t records = 0;
  std::uint64_t bytes = 0;
  std::uint64_t manifest_bytes = 0;
  std::uint64_t anchor_bytes = 0;
  std::vector<std::string> warnings;
  // S after the step: of the changed tensors, or of all after a root.
  std::vector<std::uint64_t> l61_tensors;
  std::vector<std::uint64_t> l61_after;  // as many
  bool metadata_changed = false;
  Metadata metadata;  // if changed
};
std::vector<std::byte> SerializeStepOutcome(const StepOutcome& outcome);
absl::StatusOr<StepOutcome> ParseStepOutcome(absl::string_view where,
                                             std::span<const std::byte> bytes,
                                             std::size_t tensor_count);

// A rank's tensors: what goes into the table, and its ranges, in units.
struct DeclaredTensor {
  std::string name;
  DType dtype = DType::kBf16;
  std::vector<std::uint64_t> shape;
  std::string tied_to;
  std::vector<UnitRange> owned;
};
std::vector<DeclaredTensor> Declare(std::span<const TrainerTensor> tensors);
std::vector<std::byte> SerializeDeclared(
    std::span<const DeclaredTensor> tensors);
absl::StatusOr<std::vector<DeclaredTensor>> ParseDeclared(
    absl::string_view where, std::span<const std::byte> bytes);
// The table of what all ranks declare, by rank, each tensor owned once.
// kFailedPrecondition names tensor and ranks that differ in dtype, shape or
// tie, and as CheckOwnership; kInvalidArgument as TensorTable::Create.
absl::StatusOr<TensorTable> UniteTables(
    std::span<const std::vector<DeclaredTensor>> by_rank);

}  // namespace kedge

#endif  // KEDGE_WRITER_RANK_PARTS_H_
