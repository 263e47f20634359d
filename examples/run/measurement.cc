#include "kedge/examples/run/measurement.h"

#include <bit>
#include <cstdint>
#include <span>
#include <vector>

#include "kedge/format/status.h"

namespace kedge::example {

absl::StatusOr<Measurement> Measure(Model& model, const WeightView& view,
                                    const Batch& batch) {
  Measurement measurement;
  KEDGE_ASSIGN_OR_RETURN(measurement.loss, model.Loss(view, batch));
  Hasher128 hasher;
  std::vector<float> whole;
  for (const TensorSpec& spec : model.tensors()) {
    whole.resize(static_cast<std::size_t>(spec.elements()));
    KEDGE_RETURN_IF_ERROR(view.Gather(spec, whole));
    hasher.Update(std::as_bytes(std::span(whole)));
  }
  measurement.weights = hasher.Finish();
  return measurement;
}

void AddTo(const Measurement& measurement, Json& line) {
  line["loss"] = measurement.loss;
  line["loss_bits"] = Hex64(std::bit_cast<std::uint64_t>(measurement.loss));
  line["weights_hash"] = ToHex(measurement.weights);
}

}  // namespace kedge::example
