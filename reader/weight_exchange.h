#ifndef KEDGE_READER_WEIGHT_EXCHANGE_H_
#define KEDGE_READER_WEIGHT_EXCHANGE_H_

// Weight sets as bytes: what the ranks of a group tell each other once, so that
// each can bind the whole group's sets to any table by itself.

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "kedge/reader/weight_set.h"

namespace kedge {

// Names, dtypes, shapes, boxes, strides; of memory its addresses alone.
std::vector<std::byte> SerializeWeightSets(
    const std::vector<const WeightSet*>& sets);

// kInvalidArgument if the bytes are none of SerializeWeightSets. The targets
// point into another process: only to be compared with each other.
absl::StatusOr<std::vector<std::unique_ptr<const WeightSet>>> ParseWeightSets(
    std::span<const std::byte> bytes);

}  // namespace kedge

#endif  // KEDGE_READER_WEIGHT_EXCHANGE_H_
