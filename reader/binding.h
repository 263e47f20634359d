#ifndef KEDGE_READER_BINDING_H_
#define KEDGE_READER_BINDING_H_

// Weight sets bound to a table, ready for work: which ranges they need, and
// their checksums from what memory holds.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kedge/engine/cpu/l61_sum.h"
#include "kedge/engine/io/io_pool.h"
#include "kedge/reader/weight_set.h"

namespace kedge {

// Whether some unit of `range` lies in `box`.
bool Touches(const TileGrid& grid, const UnitRange& range,
             const BoxTarget& box);

// Thread safety: immutable; const methods may run concurrently.
class Binding {
 public:
  // `sets` are only named in messages; they outlive the binding.
  Binding(BoundWeights weights, const std::vector<const WeightSet*>* sets);

  const TensorTable& table() const { return *weights_.table; }
  const std::shared_ptr<const TensorTable>& shared_table() const {
    return weights_.table;
  }
  const BoundWeights& weights() const { return weights_; }
  // Of tensor `ordinal` (an owner); grids are computed once.
  const TileGrid& grid(std::uint32_t ordinal) const { return grids_[ordinal]; }

  // The boxes of a tensor that `range` touches.
  std::vector<BoxTarget> BoxesFor(std::uint32_t ordinal,
                                  const UnitRange& range) const;

  // Names of tensors that cannot be verified here: they are held in part.
  std::vector<std::string> UnverifiedNames() const;

  // Owners whose memory, in some cover, does not have the checksum that `l61`
  // (by ordinal) asks for. Reads every byte of every cover once.
  struct Mismatch {
    std::uint32_t tensor = 0;
    std::uint32_t cover = 0;
    std::uint64_t found = 0;
  };
  struct Comparison {
    std::vector<Mismatch> mismatches;    // ascending by tensor
    std::uint64_t tensors_verified = 0;  // names, ties included
    std::uint64_t bytes_verified = 0;
  };
  Comparison Compare(IoPool* pool, const L61Summer& summer,
                     std::span<const std::uint64_t> l61) const;

  // "tensors a, b and 3 more do not verify: a of tp0: L61: expected ..."
  std::string Describe(const std::vector<Mismatch>& mismatches,
                       std::span<const std::uint64_t> l61) const;

 private:
  struct Job {  // a part of a box of a cover
    std::uint32_t tensor = 0;
    std::uint32_t cover = 0;
    BoxTarget box;
  };

  BoundWeights weights_;
  const std::vector<const WeightSet*>* sets_;
  std::vector<TileGrid> grids_;
  std::vector<std::uint32_t> tie_counts_;  // names that share the storage
  std::vector<Job> jobs_;                  // ascending by (tensor, cover)
};

}  // namespace kedge

#endif  // KEDGE_READER_BINDING_H_
