#ifndef KEDGE_EXAMPLES_OFFLOAD_TRAINER_TRAINER_RANK_H_
#define KEDGE_EXAMPLES_OFFLOAD_TRAINER_TRAINER_RANK_H_

// One rank of the trainer: its shard of every parameter on a device, the
// optimizer in host memory, and the hook that publishes what the optimizer
// writes.

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kedge/engine/device/device.h"
#include "kedge/examples/offload_trainer/moe_model.h"
#include "kedge/examples/offload_trainer/offload_optimizer.h"
#include "kedge/examples/offload_trainer/reference_state.h"
#include "kedge/examples/offload_trainer/synthetic_gradient.h"
#include "kedge/writer/coordinator.h"
#include "kedge/writer/optimizer_hook.h"

namespace kedge::example {

struct RankOptions {
  OffloadConfig optimizer;
  WriterOptions writer;
  InitOptions init;
  bool fp8 = false;
  // The embedding is never updated, and the guard proves it.
  bool freeze_embedding = false;
  std::uint64_t ring_bytes = std::uint64_t{256} << 20;
  std::chrono::milliseconds deadline{600'000};
};

// Times in seconds.
struct StepReport {
  HookResult hook;
  double accumulate_seconds = 0;  // micro-batches before the last one
  double begin_seconds = 0;       // BeginStep
  double pass_seconds = 0;        // the last micro-batch's, to EndStep's end
};

// Thread safety: none. With a coordinator Create and Step are collective.
class TrainerRank {
 public:
  // Makes the weights and a store whose v0 they are. Borrows everything but
  // `options`.
  static absl::StatusOr<std::unique_ptr<TrainerRank>> Create(
      const RankOptions& options, const MoeModel* model,
      const SyntheticGradient* gradient, Device* device,
      Coordinator* coordinator);
  ~TrainerRank();

  // One optimizer step, published.
  absl::StatusOr<StepReport> Step(std::uint64_t step, bool anchor);

  // Whether the device holds the masters, rounded. kDataLoss names a parameter
  // and an element.
  absl::Status CheckLiveWeights();
  // Adds what the store's tensors must hold of this rank, from the masters
  // alone.
  void AddTo(ReferenceState* reference);

  const OptimizerHook& hook() const { return *hook_; }
  const OffloadOptimizer& optimizer() const { return *optimizer_; }

 private:
  // A shard of a parameter.
  struct Held {
    std::uint32_t parameter = 0;  // of the model
    RowRange rows;
    DeviceMemory weights;
  };
  struct Buffer {
    std::uint32_t buffer = 0;  // of the model
    std::vector<float> values;
    DeviceMemory on_device;  // or empty: engines read `values`
  };

  TrainerRank(const RankOptions& options, const MoeModel* model,
              const SyntheticGradient* gradient, Device* device,
              Coordinator* coordinator)
      : options_(options),
        model_(model),
        gradient_(gradient),
        device_(device),
        coordinator_(coordinator) {}

  absl::Status MakeBuffers(std::uint32_t rank, std::uint32_t ranks);
  absl::Status UpdateBuffers(std::uint64_t step);
  TrainerTensor TensorOf(const Buffer& buffer) const;
  // Of AddTo; `weights` are those of `held`.
  void AddTensor(const MoeTensor& tensor, const Held& held,
                 const std::vector<std::uint16_t>& weights,
                 ReferenceState* reference) const;

  const RankOptions options_;
  const MoeModel* model_;
  const SyntheticGradient* gradient_;
  Device* device_;
  Coordinator* coordinator_;
  OwnedStream stream_;
  std::vector<Held> held_;
  std::vector<Buffer> buffers_;
  std::unique_ptr<OffloadOptimizer> optimizer_;
  std::unique_ptr<OptimizerHook> hook_;
};

}  // namespace kedge::example

#endif  // KEDGE_EXAMPLES_OFFLOAD_TRAINER_TRAINER_RANK_H_
