#ifndef KEDGE_READER_BINDING_H_
#define KEDGE_READER_BINDING_H_

// Weight sets bound to a table, ready for work: which ranges they need, and
// their checksums from what memory holds, alone or together with other ranks.

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
  // `sets` are only named in messages; they outlive the binding. `grouped`:
  // the weights are bound with those of other ranks, whom messages name.
  Binding(BoundWeights weights, const std::vector<const WeightSet*>* sets,
          bool grouped = false);

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

  // One checksum for each cover of each verifiable owner, ascending by (tensor,
  // cover): what this process's memory adds to it, in [0, p). Those of all
  // ranks of a group add up. Reads every byte of every own part once.
  struct Sums {
    std::vector<std::uint64_t> residues;  // residue_count()
    std::uint64_t bytes = 0;              // that were read
    // What each thread's work came to; stays, to be used again.
    std::vector<std::uint64_t> parts;
  };
  std::size_t residue_count() const { return residues_.size(); }
  // That Sum reads.
  std::uint64_t summed_elements() const { return summed_elements_; }
  // In host memory; replaces `*sums`.
  void Sum(IoPool* pool, const L61Summer& summer, Sums* sums) const;
  // Calls visit(residue, tensor, box) for each box of each of these covers.
  template <typename Visit>
  void VisitCovers(Visit&& visit) const {
    for (std::uint32_t r = 0; r < residues_.size(); ++r) {
      const std::uint32_t tensor = residues_[r].tensor;
      for (const BoxTarget& box :
           weights_.tensors[tensor].covers[residues_[r].cover].boxes) {
        visit(r, tensor, box);
      }
    }
  }

  // Covers whose checksum is not what `l61` (by ordinal of the tensor) asks
  // for. `residues` are those of all ranks together.
  struct Mismatch {
    std::uint32_t tensor = 0;
    std::uint32_t cover = 0;
    std::uint32_t residue = 0;  // index
    std::uint64_t found = 0;
  };
  std::vector<Mismatch> Judge(std::span<const std::uint64_t> residues,
                              std::span<const std::uint64_t> l61) const;

  // Names that can be verified, ties included.
  std::uint64_t verifiable_tensors() const { return verifiable_tensors_; }

  // "2 tensors do not verify: tensor a in tp0: L61: expected ..."
  std::string Describe(const std::vector<Mismatch>& mismatches,
                       std::span<const std::uint64_t> l61) const;

 private:
  struct Job {  // a part of a box of a cover
    std::uint32_t tensor = 0;
    std::uint32_t residue = 0;
    BoxTarget box;
  };
  struct Residue {
    std::uint32_t tensor = 0;
    std::uint32_t cover = 0;
  };

  BoundWeights weights_;
  const std::vector<const WeightSet*>* sets_;
  bool grouped_;
  std::uint64_t verifiable_tensors_ = 0;
  std::uint64_t summed_elements_ = 0;
  std::vector<TileGrid> grids_;
  std::vector<std::uint32_t> tie_counts_;  // names that share the storage
  std::vector<Residue> residues_;          // ascending by (tensor, cover)
  std::vector<Job> jobs_;                  // ascending by residue
};

}  // namespace kedge

#endif  // KEDGE_READER_BINDING_H_
