#include "kedge/examples/offload_trainer/offload_optimizer.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kedge/examples/model/bf16.h"
#include "kedge/format/status.h"

namespace kedge::example {
namespace {

// Ranges in a slot begin where vector loads like it.
constexpr std::uint64_t kAlignElements = 128;

constexpr std::uint64_t RoundUp(std::uint64_t value, std::uint64_t to) {
  return (value + to - 1) / to * to;
}

}  // namespace

absl::StatusOr<OffloadOptimizer::Floats> OffloadOptimizer::Zeros() {
  const std::uint64_t bytes =
      std::max<std::uint64_t>(64, starts_.back() * sizeof(float));
  Floats memory(static_cast<float*>(std::aligned_alloc(64, bytes)));
  if (memory == nullptr) {
    return absl::ResourceExhaustedError(
        absl::StrCat("host memory for the optimizer: ", bytes, " bytes"));
  }
  team_.Run(bytes / sizeof(float), [&](std::uint64_t begin, std::uint64_t end) {
    std::fill(memory.get() + begin, memory.get() + end, 0.0f);
  });
  return memory;
}

absl::StatusOr<std::unique_ptr<OffloadOptimizer>> OffloadOptimizer::Create(
    Device* device, const OffloadConfig& config,
    const SyntheticGradient* gradient,
    std::vector<OffloadedParameter> parameters) {
  std::unique_ptr<OffloadOptimizer> made(
      new OffloadOptimizer(device, config, gradient, std::move(parameters)));
  made->starts_ = {0};
  for (const OffloadedParameter& parameter : made->parameters_) {
    made->starts_.push_back(made->starts_.back() +
                            RoundUp(parameter.elements, kAlignElements));
  }
  KEDGE_ASSIGN_OR_RETURN(made->masters_, made->Zeros());
  KEDGE_ASSIGN_OR_RETURN(made->gradients_, made->Zeros());
  if (config.rule == UpdateRule::kAdamW) {
    KEDGE_ASSIGN_OR_RETURN(made->moments1_, made->Zeros());
    KEDGE_ASSIGN_OR_RETURN(made->moments2_, made->Zeros());
  }
  KEDGE_ASSIGN_OR_RETURN(made->h2d_, device->CreateStream());
  made->slots_.resize(static_cast<std::size_t>(config.slots));
  for (Slot& slot : made->slots_) {
    KEDGE_ASSIGN_OR_RETURN(
        slot.memory,
        device->Allocate(MemoryKind::kPinned, 2 * config.chunk_elements));
  }

  auto* const staging = made->slots_.front().memory.as<std::uint16_t>();
  for (std::size_t i = 0; i < made->parameters_.size(); ++i) {
    const OffloadedParameter& parameter = made->parameters_[i];
    float* const masters = made->masters_.get() + made->starts_[i];
    for (std::uint64_t at = 0; at < parameter.elements;
         at += config.chunk_elements) {
      const std::uint64_t count =
          std::min(config.chunk_elements, parameter.elements - at);
      made->team_.Run(count, [&](std::uint64_t begin, std::uint64_t end) {
        gradient->Initialize(parameter.number, parameter.first + at + begin,
                             parameter.norm ? 1.0f : 0.0f,
                             {masters + at + begin, end - begin});
        for (std::uint64_t k = begin; k < end; ++k) {
          staging[k] = FloatToBf16(masters[at + k]);
        }
      });
      KEDGE_RETURN_IF_ERROR(device->Copy(parameter.device + 2 * at, staging,
                                         2 * count, made->h2d_.get()));
      KEDGE_RETURN_IF_ERROR(device->WaitForStream(made->h2d_.get()));
    }
  }
  return made;
}

void OffloadOptimizer::Accumulate(std::uint64_t step,
                                  std::uint64_t micro_batch) {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const OffloadedParameter& parameter = parameters_[i];
    if (parameter.frozen) continue;
    float* const sum = gradients_.get() + starts_[i];
    team_.Run(parameter.elements, [&](std::uint64_t begin, std::uint64_t end) {
      gradient_source_->Accumulate(
          kernels_, {step, micro_batch, parameter.number},
          parameter.first + begin, {sum + begin, end - begin});
    });
  }
}

void OffloadOptimizer::Update(std::uint64_t step, std::size_t index,
                              std::uint64_t begin, std::uint64_t count,
                              std::uint16_t* out) {
  const OffloadedParameter& parameter = parameters_[index];
  const std::uint64_t start = starts_[index] + begin;
  AdamWStep adamw;
  adamw.rate = config_.rate;
  adamw.beta1 = config_.beta1;
  adamw.beta2 = config_.beta2;
  const auto power = static_cast<float>(step);
  adamw.correction1 = 1 / (1 - std::pow(config_.beta1, power));
  adamw.correction2 = 1 / (1 - std::pow(config_.beta2, power));
  adamw.epsilon = config_.epsilon;
  adamw.weight_decay = parameter.norm ? 0 : config_.weight_decay;
  adamw.gradient_scale = 1 / static_cast<float>(config_.micro_batches);
  team_.Run(count, [&](std::uint64_t from, std::uint64_t to) {
    const auto n = static_cast<std::int64_t>(to - from);
    const std::uint64_t at = start + from;
    float* const gradient = gradients_.get() + at;
    gradient_source_->Accumulate(
        kernels_, {step, config_.micro_batches - 1, parameter.number},
        parameter.first + begin + from, {gradient, to - from});
    if (config_.rule == UpdateRule::kAdamW) {
      kernels_.adamw(adamw, gradient, n, moments1_.get() + at,
                     moments2_.get() + at, masters_.get() + at, out + from);
    } else {
      kernels_.sign_sgd(config_.rate, gradient, n, masters_.get() + at,
                        out + from);
    }
    std::fill(gradient, gradient + n, 0.0f);
  });
}

absl::Status OffloadOptimizer::FinalPass(std::uint64_t step,
                                         OptimizerHook& hook) {
  std::size_t number = 0;
  std::uint64_t used = config_.chunk_elements;  // of no slot yet
  Slot* slot = nullptr;
  for (std::size_t i = parameters_.size(); i-- > 0;) {
    const OffloadedParameter& parameter = parameters_[i];
    if (parameter.frozen) continue;
    for (std::uint64_t begin = 0; begin < parameter.elements;) {
      if (used >= config_.chunk_elements) {
        // The next slot, once everything in it has been taken.
        slot = &slots_[number++ % slots_.size()];
        for (const OptimizerHook::Ticket ticket : slot->tickets) {
          KEDGE_RETURN_IF_ERROR(hook.WaitFor(ticket));
        }
        slot->tickets.clear();
        used = 0;
      }
      const std::uint64_t count =
          std::min(parameter.elements - begin, config_.chunk_elements - used);
      std::uint16_t* const out = slot->memory.as<std::uint16_t>() + used;
      Update(step, i, begin, count, out);
      KEDGE_ASSIGN_OR_RETURN(
          const OptimizerHook::Ticket ticket,
          hook.OnUpdate(static_cast<std::uint32_t>(i), 2 * begin, 2 * count,
                        out, h2d_.get()));
      slot->tickets.push_back(ticket);
      begin += count;
      used += RoundUp(count, kAlignElements);
    }
  }
  return absl::OkStatus();
}

void OffloadOptimizer::Round(std::size_t index,
                             std::span<std::uint16_t> weights) {
  const float* const masters = masters_.get() + starts_[index];
  team_.Run(weights.size(), [&](std::uint64_t begin, std::uint64_t end) {
    for (std::uint64_t i = begin; i < end; ++i) {
      weights[i] = FloatToBf16(masters[i]);
    }
  });
}

absl::Status OffloadOptimizer::Download(std::size_t index,
                                        std::span<std::uint16_t> weights) {
  const std::byte* const from = parameters_[index].device;
  auto* const staging = slots_.front().memory.as<std::uint16_t>();
  for (std::uint64_t at = 0; at < weights.size();
       at += config_.chunk_elements) {
    const std::uint64_t count =
        std::min<std::uint64_t>(config_.chunk_elements, weights.size() - at);
    KEDGE_RETURN_IF_ERROR(
        device_->Copy(staging, from + 2 * at, 2 * count, h2d_.get()));
    KEDGE_RETURN_IF_ERROR(device_->WaitForStream(h2d_.get()));
    std::memcpy(weights.data() + at, staging, 2 * count);
  }
  return absl::OkStatus();
}

std::uint64_t OffloadOptimizer::host_bytes() const {
  const std::uint64_t arrays = config_.rule == UpdateRule::kAdamW ? 4 : 2;
  return arrays * sizeof(float) * starts_.back();
}
std::uint64_t OffloadOptimizer::pinned_bytes() const {
  return slots_.size() * 2 * config_.chunk_elements;
}

}  // namespace kedge::example
