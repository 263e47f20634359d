#ifndef KEDGE_EXAMPLES_INFERENCE_ENGINE_ENGINE_WEIGHTS_H_
#define KEDGE_EXAMPLES_INFERENCE_ENGINE_ENGINE_WEIGHTS_H_

// The weight memory of an inference engine, described twice from one plan: for
// kedge as weight sets, for the model as a view.

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kedge/examples/model/weight_view.h"
#include "kedge/examples/run/shared_memory.h"
#include "kedge/reader/weight_set.h"

namespace kedge::example {

enum class WeightLayout {
  kWhole,  // one set, each tensor by itself
  // Two tensor-parallel ranks, each a set, in one process or in two. A rank has
  // half of the rows of q, k and v, packed into one buffer, and of gate and up,
  // packed likewise; half of the columns of o_proj and down_proj; half of the
  // rows of the embedding and the head. Norms are held once, by rank 0.
  kTensorParallel2,
};

// The memory is shared with processes that are forked later.
//
// Thread safety: const methods may run concurrently.
class EngineWeights {
 public:
  // Allocates memory for `tensors` and fills it with NaN, so that an element
  // nobody loads shows in the first loss. Errors: WeightSet::Add's.
  static absl::StatusOr<std::unique_ptr<EngineWeights>> Create(
      const std::vector<TensorSpec>& tensors, WeightLayout layout);

  EngineWeights(const EngineWeights&) = delete;
  EngineWeights& operator=(const EngineWeights&) = delete;

  // Of all ranks, or of one.
  std::vector<const WeightSet*> sets() const;
  std::vector<const WeightSet*> sets(std::size_t rank) const {
    return {&ranks_[rank]->set};
  }
  const WeightView& view() const { return view_; }

 private:
  // A box of a tensor, and the buffer whose next rows it gets.
  struct Place {
    std::size_t rank = 0;
    std::string buffer;
    std::int64_t row_begin = 0;
    std::int64_t row_end = 0;
    std::int64_t col_begin = 0;
    std::int64_t col_end = 0;
  };
  using Buffer = std::vector<std::uint16_t, SharedAllocator<std::uint16_t>>;
  struct Rank {
    explicit Rank(std::string name) : set(std::move(name)) {}
    WeightSet set;
    std::map<std::string, Buffer> buffers;
  };

  EngineWeights() = default;
  static std::vector<Place> PlacesOf(const TensorSpec& spec,
                                     WeightLayout layout);
  absl::Status Add(const TensorSpec& spec, const Place& place,
                   std::uint16_t* data);

  std::vector<std::unique_ptr<Rank>> ranks_;
  WeightView view_;
};

}  // namespace kedge::example

#endif  // KEDGE_EXAMPLES_INFERENCE_ENGINE_ENGINE_WEIGHTS_H_
