#ifndef KEDGE_EXAMPLES_RUN_MEASUREMENT_H_
#define KEDGE_EXAMPLES_RUN_MEASUREMENT_H_

// What the trainer and every inference engine compute of the weights they hold,
// to be compared to the bit.

#include "absl/status/statusor.h"
#include "kedge/examples/model/model.h"
#include "kedge/examples/model/text.h"
#include "kedge/examples/model/weight_view.h"
#include "kedge/examples/run/report.h"
#include "kedge/format/hash.h"

namespace kedge::example {

struct Measurement {
  double loss = 0;  // of the evaluation batch, in nats per byte
  // XXH3-128 of all weights as f32, whole tensors in the model's order: equal
  // for every layout that holds the same bits.
  Hash128 weights;
};

// Reads every weight through `view`. Errors: Model::Loss's.
absl::StatusOr<Measurement> Measure(Model& model, const WeightView& view,
                                    const Batch& batch);

// Adds loss (decimal), loss_bits (hex, exact) and weights_hash to `line`.
void AddTo(const Measurement& measurement, Json& line);

}  // namespace kedge::example

#endif  // KEDGE_EXAMPLES_RUN_MEASUREMENT_H_
