#ifndef KEDGE_EXAMPLES_GPU_LOOP_ENGINE_RANK_H_
#define KEDGE_EXAMPLES_GPU_LOOP_ENGINE_RANK_H_

// One rank of a tensor-parallel inference engine: its part of every tensor in
// the memory of a device, packed as fused kernels want it, and the follower
// that keeps it at the trainer's version.

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kedge/engine/device/device.h"
#include "kedge/examples/offload_trainer/reference_state.h"
#include "kedge/format/tensor_table.h"
#include "kedge/reader/follower.h"

namespace kedge::example {

// The box of a tensor that rank `rank` of `ranks` holds, as Megatron cuts them:
// outputs of projections by rows, inputs of those after an activation by
// columns; norms, routers and buffers whole. Expert stacks likewise, each
// expert. A scale belongs to where its block is.
struct RankBox {
  std::vector<std::uint64_t> begin;
  std::vector<std::uint64_t> extent;

  std::uint64_t elements() const;
};
RankBox BoxOfRank(const TensorSpec& tensor, std::uint32_t rank,
                  std::uint32_t ranks);

class EngineRank {
 public:
  // Allocates and poisons the weights, and opens the follower. `options` come
  // with the store, the group and callbacks; device and stream are set here.
  // Collective over the group.
  static absl::StatusOr<std::unique_ptr<EngineRank>> Create(
      const TensorTable& table, Device* device, FollowerOptions options);

  Follower& follower() { return *follower_; }
  std::uint64_t weight_bytes() const { return weight_bytes_; }

  // Whether every held bit is the reference's. kDataLoss names tensor and
  // element.
  absl::Status CompareWith(const ReferenceState& reference);

 private:
  struct Held {
    TensorSpec spec;
    RankBox box;
    std::byte* data = nullptr;
    std::vector<std::int64_t> strides_bytes;  // one a dimension
  };

  EngineRank(Device* device, std::uint32_t rank)
      : device_(device), set_("tp" + std::to_string(rank)) {}

  absl::Status Allocate(const TensorTable& table, std::uint32_t rank,
                        std::uint32_t ranks);

  Device* device_;
  OwnedStream stream_;
  std::vector<DeviceMemory> memory_;
  std::vector<Held> held_;
  std::uint64_t weight_bytes_ = 0;
  WeightSet set_;
  std::unique_ptr<Follower> follower_;
};

}  // namespace kedge::example

#endif  // KEDGE_EXAMPLES_GPU_LOOP_ENGINE_RANK_H_
