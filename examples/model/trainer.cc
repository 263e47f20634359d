#include "kedge/examples/model/trainer.h"

#include <cmath>
#include <cstddef>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "kedge/examples/model/bf16.h"
#include "kedge/examples/model/halves.h"

namespace kedge::example {

absl::StatusOr<std::unique_ptr<Trainer>> Trainer::Create(
    const TrainerConfig& config, Text text, const Kernels& kernels) {
  auto model = Model::Create(config.model, kernels);
  if (!model.ok()) return model.status();
  auto evaluation =
      text.EvaluationBatch(config.model.batch, config.model.context);
  if (!evaluation.ok()) return evaluation.status();
  return std::unique_ptr<Trainer>(new Trainer(
      config, std::move(text), *std::move(model), *std::move(evaluation)));
}

Trainer::Trainer(const TrainerConfig& config, Text text,
                 std::unique_ptr<Model> model, Batch evaluation)
    : config_(config),
      text_(std::move(text)),
      model_(std::move(model)),
      evaluation_(std::move(evaluation)),
      masters_(model_->gradient_elements()),
      gradient_(model_->gradient_elements()),
      moment1_(model_->gradient_elements()),
      moment2_(model_->gradient_elements()) {
  bf16_.reserve(tensors().size());
  for (const TensorSpec& spec : tensors()) {
    bf16_.emplace_back(static_cast<std::size_t>(spec.elements()));
    view_.AddWhole(spec, bf16_.back().data());
  }
  InitializeWeights();
}

void Trainer::InitializeWeights() {
  constexpr double kDeviation = 0.02;
  // Projections that add to the residual stream start smaller, so that its
  // variance does not grow with depth.
  const double residual = kDeviation / std::sqrt(2.0 * config_.model.layers);
  Random random(config_.seed);
  for (std::size_t i = 0; i < tensors().size(); ++i) {
    const TensorSpec& spec = tensors()[i];
    float* master = masters_.data() + model_->gradient_index(i);
    const double deviation =
        absl::EndsWith(spec.name, "o_proj.weight") ||
                absl::EndsWith(spec.name, "down_proj.weight")
            ? residual
            : kDeviation;
    for (std::int64_t j = 0; j < spec.elements(); ++j) {
      master[j] = spec.shape.size() == 1
                      ? 1.0f
                      : static_cast<float>(deviation * random.Normal());
      bf16_[i][static_cast<std::size_t>(j)] = FloatToBf16(master[j]);
    }
  }
}

void Trainer::ResetOptimizer() {
  moment1_.Clear();
  moment2_.Clear();
  moment_steps_ = 0;
}

const std::vector<std::uint16_t>* Trainer::bf16(absl::string_view name) const {
  for (std::size_t i = 0; i < tensors().size(); ++i) {
    if (tensors()[i].name == name) return &bf16_[i];
  }
  return nullptr;
}

absl::StatusOr<double> Trainer::Evaluate() {
  return model_->Loss(view_, evaluation_);
}

absl::StatusOr<StepResult> Trainer::Step(Optimizer optimizer, double rate) {
  if (!std::isfinite(rate) || rate <= 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "learning rate: expected a finite number above 0, found ", rate));
  }
  const std::int64_t step = step_ + 1;
  const ModelConfig& shape = config_.model;
  auto batch =
      text_.TrainingBatch(shape.batch, shape.context, config_.seed, step);
  if (!batch.ok()) return batch.status();
  const auto elements = static_cast<std::size_t>(gradient_.size());
  auto loss =
      model_->LossAndGradient(view_, *batch, {gradient_.data(), elements});
  if (!loss.ok()) return loss.status();

  const Kernels& kernels = model_->kernels();
  const std::int64_t middle = gradient_.size() / 2;
  double squares[2];
  RunHalves(shape.threads, [&](int half) {
    squares[half] = half == 0
                        ? kernels.sum_of_squares(gradient_.data(), middle)
                        : kernels.sum_of_squares(gradient_.data() + middle,
                                                 gradient_.size() - middle);
  });
  const double norm = std::sqrt(squares[0] + squares[1]);
  if (!std::isfinite(norm) || !std::isfinite(*loss)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "training step ", step, ": loss ", *loss, ", gradient norm ", norm,
        ": expected finite numbers; start again with a lower rate"));
  }
  step_ = step;
  const double limit = static_cast<double>(config_.max_gradient_norm);

  AdamWStep adamw{
      .rate = static_cast<float>(rate),
      .beta1 = config_.beta1,
      .beta2 = config_.beta2,
      .epsilon = config_.epsilon,
      .gradient_scale = norm > limit ? static_cast<float>(limit / norm) : 1.0f};
  if (optimizer == Optimizer::kAdamW) {
    ++moment_steps_;
    const auto correction = [this](float beta) {
      return static_cast<float>(
          1.0 / (1.0 - std::pow(static_cast<double>(beta),
                                static_cast<double>(moment_steps_))));
    };
    adamw.correction1 = correction(config_.beta1);
    adamw.correction2 = correction(config_.beta2);
  }
  RunHalves(shape.threads, [&](int half) {
    for (std::size_t i = 0; i < tensors().size(); ++i) {
      // Each element stands alone, so where a tensor is cut changes nothing.
      const std::int64_t all = tensors()[i].elements();
      const std::int64_t begin = half == 0 ? 0 : all / 2;
      const std::int64_t length = (half == 0 ? all / 2 : all) - begin;
      const std::int64_t at = model_->gradient_index(i) + begin;
      std::uint16_t* bf16 = bf16_[i].data() + begin;
      if (optimizer == Optimizer::kSignSgd) {
        kernels.sign_sgd(adamw.rate, gradient_.data() + at, length,
                         masters_.data() + at, bf16);
        continue;
      }
      AdamWStep mine = adamw;
      mine.weight_decay =
          tensors()[i].shape.size() == 1 ? 0.0f : config_.weight_decay;
      kernels.adamw(mine, gradient_.data() + at, length, moment1_.data() + at,
                    moment2_.data() + at, masters_.data() + at, bf16);
    }
  });
  return StepResult{.step = step, .loss = *loss, .gradient_norm = norm};
}

}  // namespace kedge::example
