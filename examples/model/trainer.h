#ifndef KEDGE_EXAMPLES_MODEL_TRAINER_H_
#define KEDGE_EXAMPLES_MODEL_TRAINER_H_

// Trains the example model: f32 masters, and bf16 weights rounded from them
// after every step, which are what the forward pass and everyone else reads.

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kedge/examples/model/model.h"
#include "kedge/examples/model/text.h"
#include "kedge/examples/model/weight_view.h"

namespace kedge::example {

enum class Optimizer { kAdamW, kSignSgd };

struct TrainerConfig {
  ModelConfig model;
  std::uint64_t seed = 1;  // of the first weights and of the batches
  float beta1 = 0.9f;
  float beta2 = 0.95f;
  float epsilon = 1e-8f;
  float weight_decay = 0.01f;   // of matrices, AdamW alone
  float max_gradient_norm = 1;  // longer gradients are scaled down to it
};

struct StepResult {
  std::int64_t step = 0;     // of this trainer, from 1
  double loss = 0;           // of the batch, before the update
  double gradient_norm = 0;  // before clipping
};

// Thread safety: none. Equal configuration, text and calls give equal bits on
// one kind of CPU, whatever config.model.threads is.
class Trainer {
 public:
  // kInvalidArgument for an impossible configuration or a text too short.
  static absl::StatusOr<std::unique_ptr<Trainer>> Create(
      const TrainerConfig& config, Text text,
      const Kernels& kernels = BestKernels());

  // One optimizer step on the next training batch. kInvalidArgument if the
  // rate is not a finite number above 0; kFailedPrecondition if the gradient
  // is not finite. The weights are then unchanged.
  absl::StatusOr<StepResult> Step(Optimizer optimizer, double rate);

  // Forgets the optimizer's moments, as a new run from these weights would.
  void ResetOptimizer();

  // Loss of the fixed evaluation batch.
  absl::StatusOr<double> Evaluate();

  Model& model() { return *model_; }
  const std::vector<TensorSpec>& tensors() const { return model_->tensors(); }

  // The bf16 bits of tensors()[i], whole and row-major. The vector keeps its
  // address and its memory for the life of the trainer; Step() writes into it.
  const std::vector<std::uint16_t>& bf16(std::size_t i) const {
    return bf16_[i];
  }
  // The same by name; null if there is no such tensor.
  const std::vector<std::uint16_t>* bf16(absl::string_view name) const;

  // The f32 masters, laid out as Model describes a gradient.
  const FloatBuffer& masters() const { return masters_; }

  // All of bf16() as a view for Model::Loss.
  const WeightView& view() const { return view_; }

 private:
  Trainer(const TrainerConfig& config, Text text, std::unique_ptr<Model> model,
          Batch evaluation);

  void InitializeWeights();

  const TrainerConfig config_;
  const Text text_;
  const std::unique_ptr<Model> model_;
  const Batch evaluation_;
  std::vector<std::vector<std::uint16_t>> bf16_;
  WeightView view_;
  FloatBuffer masters_;
  FloatBuffer gradient_;
  FloatBuffer moment1_;
  FloatBuffer moment2_;
  std::int64_t step_ = 0;
  std::int64_t moment_steps_ = 0;  // since the moments were last zero
};

}  // namespace kedge::example

#endif  // KEDGE_EXAMPLES_MODEL_TRAINER_H_
