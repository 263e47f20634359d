#ifndef KEDGE_TESTS_EXAMPLES_REFERENCE_MODEL_H_
#define KEDGE_TESTS_EXAMPLES_REFERENCE_MODEL_H_

// The example model's loss, written a second time as plain loops in double
// precision: no blocking, no scratch, one token after the other.

#include <map>
#include <string>
#include <vector>

#include "kedge/examples/model/model.h"
#include "kedge/examples/model/text.h"

namespace kedge::example {

// Row-major values of each tensor.
using ReferenceWeights = std::map<std::string, std::vector<double>>;

double ReferenceLoss(const ModelConfig& config, const ReferenceWeights& weights,
                     const Batch& batch);

}  // namespace kedge::example

#endif  // KEDGE_TESTS_EXAMPLES_REFERENCE_MODEL_H_
