#ifndef KEDGE_READER_WEIGHT_SET_H_
#define KEDGE_READER_WEIGHT_SET_H_

// Where the weights of a model lie in an inference engine's memory.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kedge/format/box_target.h"
#include "kedge/format/tensor_table.h"

namespace kedge {

// A box of one tensor in memory. Coordinates are those of the checkpoint's
// tensor, whatever the engine packs it into: the q part of a packed qkv buffer
// is a target named q_proj.weight whose data points at its first row there.
struct TensorTarget {
  std::string name;
  DType dtype = DType::kBf16;
  std::vector<std::uint64_t>
      shape;  // of the whole tensor; must match the table
  // The box [begin[d], begin[d] + extent[d]) of each dimension d. Both empty:
  // the whole tensor.
  std::vector<std::uint64_t> begin;
  std::vector<std::uint64_t> extent;
  // Address of the box's first element, and bytes between neighbours along each
  // dimension; empty: row-major and contiguous.
  void* data = nullptr;
  std::vector<std::int64_t> strides_bytes;
};

// Targets of one replica's one rank, in any order. Several targets may name one
// tensor (its parts, or replicas).
//
// Ownership: borrows the memory that targets point to; it outlives the set.
class WeightSet {
 public:
  // `name` is for messages ("tp0").
  explicit WeightSet(std::string name = "weights");
  // kInvalidArgument: null data for a non-empty box, a box outside the shape, a
  // stride vector of the wrong length, strides that make elements overlap.
  absl::Status Add(TensorTarget target);

  const std::string& name() const { return name_; }
  const std::vector<TensorTarget>& targets() const { return targets_; }

 private:
  std::string name_;
  std::vector<TensorTarget> targets_;
};

// Weight sets bound to a table: every target as boxes of its tensor's unit
// matrix, with coverage counted. Memory that two targets name alike is one box.
//
// The weight sets of a TP group are bound together: what is covered is counted
// over all ranks, which all come to the same covers in the same order; boxes
// are those of this rank alone.
struct BoundTensor {
  // Of all sets, in order. A tied tensor has none: what its targets hold stands
  // with its owner, whose records and checksum are theirs too.
  std::vector<BoxTarget> boxes;
  std::vector<std::uint32_t> set_of_box;
  std::vector<std::uint32_t> name_of_box;  // ordinal of the target's name
  std::uint64_t covered_units = 0;         // distinct units that some box holds
  bool fully_covered = false;
  // What to verify, if fully covered: each cover holds every unit exactly once,
  // and every unit of every box is in some cover. Replicas lead to several
  // covers; one that is only a part is completed with parts of other boxes.
  struct Cover {
    std::vector<BoxTarget> boxes;       // the part of this rank
    std::vector<std::uint32_t> origin;  // the boxes that they are (parts of)
    std::vector<std::uint32_t> ranks;   // that have a part, ascending
  };
  std::vector<Cover> covers;
};

struct BoundWeights {
  std::shared_ptr<const TensorTable> table;
  std::vector<BoundTensor> tensors;  // by ordinal
  std::uint64_t held_tensors = 0;    // with their ties
  std::uint64_t held_bytes = 0;      // replicas counted each
};

// Matches targets with the table by name, dtype and shape.
//
// Errors (kFailedPrecondition, naming tensor and set): a target the table does
// not have, another dtype or shape; tensors of the table that no set holds, or
// holds in part, unless `allow_partial`; targets whose memory overlaps though
// they are not the same units of the same tensor. Of tied tensors one target is
// enough. Tensors without elements need none. All offenders are counted, the
// first few named. kInvalidArgument: a view that falls into too many boxes.
absl::StatusOr<BoundWeights> BindWeights(
    const std::vector<const WeightSet*>& sets,
    std::shared_ptr<const TensorTable> table, bool allow_partial);

// Likewise for the group whose rank r holds `sets_of_rank[r]`, as rank `rank`
// sees it. Targets of other ranks may point anywhere: their memory is not
// touched, and addresses are compared within a rank only. All ranks that pass
// the same sets get the same covers, or the same error.
absl::StatusOr<BoundWeights> BindGroupWeights(
    const std::vector<std::vector<const WeightSet*>>& sets_of_rank,
    std::uint32_t rank, std::shared_ptr<const TensorTable> table,
    bool allow_partial);

}  // namespace kedge

#endif  // KEDGE_READER_WEIGHT_SET_H_
