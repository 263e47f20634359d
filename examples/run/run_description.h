#ifndef KEDGE_EXAMPLES_RUN_RUN_DESCRIPTION_H_
#define KEDGE_EXAMPLES_RUN_RUN_DESCRIPTION_H_

// What an inference engine has to know of a run besides the weights. The
// trainer puts it into the metadata of v0, so that a store is all an engine is
// given.

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kedge/examples/model/model.h"
#include "kedge/examples/model/text.h"
#include "kedge/format/manifest.h"

namespace kedge::example {

struct RunDescription {
  ModelConfig model;  // but for the threads, which are each process's own
  // Losses are comparable to the bit only for the same batch and the same
  // instruction set.
  std::string evaluation_hash;
  std::string kernel_level;
};

RunDescription Describe(const ModelConfig& model, const Batch& evaluation);

Metadata ToMetadata(const RunDescription& run);

// kFailedPrecondition if a key is missing or no number: the store is of
// another program.
absl::StatusOr<RunDescription> FromMetadata(const Metadata& metadata);

// kFailedPrecondition if this process, with this batch, would not compute the
// trainer's losses to the bit; says what differs.
absl::Status CheckComparable(const RunDescription& trainer,
                             const Batch& evaluation);

}  // namespace kedge::example

#endif  // KEDGE_EXAMPLES_RUN_RUN_DESCRIPTION_H_
