#ifndef KEDGE_EXAMPLES_OFFLOAD_TRAINER_OFFLOAD_OPTIMIZER_H_
#define KEDGE_EXAMPLES_OFFLOAD_TRAINER_OFFLOAD_OPTIMIZER_H_

// An optimizer whose whole state lies in host memory: f32 masters, moments and
// gradient sums. Only bf16 weights are on the device. In the final backward of
// a step gradients come in from the last parameter to the first; each chunk is
// updated as soon as its gradient is there, into one of a few pinned slots, and
// goes to the device while the next one is computed.
//
// What kedge adds to such a trainer is one call: OptimizerHook::OnUpdate stands
// where the copy to the device stood, and its ticket where the event stood that
// told when a slot is free again.

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kedge/engine/device/device.h"
#include "kedge/examples/model/kernels.h"
#include "kedge/examples/offload_trainer/synthetic_gradient.h"
#include "kedge/examples/offload_trainer/thread_team.h"
#include "kedge/writer/optimizer_hook.h"

namespace kedge::example {

enum class UpdateRule { kAdamW, kSignSgd };

struct OffloadConfig {
  UpdateRule rule = UpdateRule::kAdamW;
  float rate = 1e-6f;
  float beta1 = 0.9f;
  float beta2 = 0.95f;
  float epsilon = 1e-8f;
  float weight_decay = 0.01f;  // of matrices
  std::uint64_t micro_batches = 2;
  int threads = 1;
  std::uint64_t chunk_elements = std::uint64_t{16} << 20;  // of a pinned slot
  int slots = 4;
};

// What a rank holds of one parameter, contiguous.
struct OffloadedParameter {
  std::string name;
  std::uint64_t number = 0;  // in the whole model
  std::uint64_t first = 0;   // its first element there
  std::uint64_t elements = 0;
  std::byte* device = nullptr;  // bf16
  bool norm = false;
  bool frozen = false;
};

// Thread safety: none.
class OffloadOptimizer {
 public:
  // Makes masters from `gradient`'s first weights and copies them, rounded, to
  // the device. Borrows `device` and `gradient`.
  static absl::StatusOr<std::unique_ptr<OffloadOptimizer>> Create(
      Device* device, const OffloadConfig& config,
      const SyntheticGradient* gradient,
      std::vector<OffloadedParameter> parameters);

  // Gradients of a micro-batch that is not the step's last one.
  void Accumulate(std::uint64_t step, std::uint64_t micro_batch);

  // The final backward of step `step`, numbered from 1: adds the last
  // micro-batch's gradients, updates, and hands each chunk to `hook`, which
  // BeginStep has armed. Parameter i is the hook's parameter i. Returns when
  // the last chunk is on its way.
  absl::Status FinalPass(std::uint64_t step, OptimizerHook& hook);

  // Rounds the masters of parameter `index` as the device should hold them.
  void Round(std::size_t index, std::span<std::uint16_t> weights);
  // Copies what the device holds to `weights`. Waits.
  absl::Status Download(std::size_t index, std::span<std::uint16_t> weights);

  const std::vector<OffloadedParameter>& parameters() const {
    return parameters_;
  }
  std::uint64_t host_bytes() const;    // that grow with the model
  std::uint64_t pinned_bytes() const;  // of the slots

 private:
  struct Free {
    void operator()(float* memory) const { std::free(memory); }
  };
  using Floats = std::unique_ptr<float[], Free>;

  struct Slot {
    DeviceMemory memory;
    std::vector<OptimizerHook::Ticket> tickets;  // of what is in it
  };

  OffloadOptimizer(Device* device, const OffloadConfig& config,
                   const SyntheticGradient* gradient,
                   std::vector<OffloadedParameter> parameters)
      : device_(device),
        config_(config),
        gradient_source_(gradient),
        parameters_(std::move(parameters)),
        team_(config.threads) {}

  absl::StatusOr<Floats> Zeros();
  // Updates `count` elements of a parameter from `begin` on and rounds them to
  // `out`.
  void Update(std::uint64_t step, std::size_t index, std::uint64_t begin,
              std::uint64_t count, std::uint16_t* out);

  Device* device_;
  const OffloadConfig config_;
  const SyntheticGradient* gradient_source_;
  const std::vector<OffloadedParameter> parameters_;
  const Kernels& kernels_ = BestKernels();
  ThreadTeam team_;
  // Where a parameter's state begins in the arrays below; one more at the end.
  std::vector<std::uint64_t> starts_;
  Floats masters_;
  Floats gradients_;  // zero between steps
  Floats moments1_;   // AdamW alone
  Floats moments2_;
  std::vector<Slot> slots_;
  OwnedStream h2d_;
};

}  // namespace kedge::example

#endif  // KEDGE_EXAMPLES_OFFLOAD_TRAINER_OFFLOAD_OPTIMIZER_H_
