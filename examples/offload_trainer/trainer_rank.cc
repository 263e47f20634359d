#include "kedge/examples/offload_trainer/trainer_rank.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <optional>
#include <span>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kedge/examples/offload_trainer/fp8_reference.h"
#include "kedge/format/status.h"

namespace kedge::example {
namespace {

using Clock = std::chrono::steady_clock;

constexpr float kScaleFloor = 1e-12f;
constexpr char kScaleSuffix[] = "_scale_inv";

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

}  // namespace

TrainerRank::~TrainerRank() {
  // The hook works on the weights until it is gone.
  hook_.reset();
}

TrainerTensor TrainerRank::TensorOf(const Buffer& buffer) const {
  const MoeBuffer& of = model_->buffers[buffer.buffer];
  TrainerTensor tensor;
  tensor.name = of.name;
  tensor.dtype = DType::kF32;
  tensor.shape = {of.elements};
  tensor.data = buffer.values.data();
  if (buffer.on_device.bytes() > 0) tensor.data = buffer.on_device.data();
  return tensor;
}

// Buffers go to the ranks in turn; every other one lies on the device.
absl::Status TrainerRank::MakeBuffers(std::uint32_t rank, std::uint32_t ranks) {
  for (std::uint32_t i = rank; i < model_->buffers.size(); i += ranks) {
    Buffer buffer;
    buffer.buffer = i;
    const std::uint64_t elements = model_->buffers[i].elements;
    for (std::uint64_t k = 0; k < elements; ++k) {
      buffer.values.push_back(static_cast<float>(std::pow(
          10000.0, -static_cast<double>(k) / static_cast<double>(elements))));
    }
    if (i % 2 == 0) {
      KEDGE_ASSIGN_OR_RETURN(
          buffer.on_device,
          device_->Allocate(MemoryKind::kDevice, elements * sizeof(float)));
    }
    buffers_.push_back(std::move(buffer));
  }
  return UpdateBuffers(0);
}

// A balancing bias moves by a constant; frequencies never change.
absl::Status TrainerRank::UpdateBuffers(std::uint64_t step) {
  for (Buffer& buffer : buffers_) {
    const bool constant = buffer.buffer + 1 == model_->buffers.size();
    if (step > 0 && constant) continue;
    for (std::size_t k = 0; step > 0 && k < buffer.values.size(); ++k) {
      buffer.values[k] += (step + k) % 3 == 0 ? 1e-3f : -1e-3f;
    }
    if (buffer.on_device.bytes() == 0) continue;
    KEDGE_RETURN_IF_ERROR(
        device_->Copy(buffer.on_device.data(), buffer.values.data(),
                      buffer.on_device.bytes(), stream_.get()));
  }
  return device_->WaitForStream(stream_.get());
}

absl::StatusOr<std::unique_ptr<TrainerRank>> TrainerRank::Create(
    const RankOptions& options, const MoeModel* model,
    const SyntheticGradient* gradient, Device* device,
    Coordinator* coordinator) {
  std::unique_ptr<TrainerRank> made(
      new TrainerRank(options, model, gradient, device, coordinator));
  const std::uint32_t rank = coordinator == nullptr ? 0 : coordinator->rank();
  const std::uint32_t ranks =
      coordinator == nullptr ? 1 : coordinator->world_size();
  KEDGE_ASSIGN_OR_RETURN(made->stream_, device->CreateStream());

  HookOptions hook;
  hook.device = device;
  hook.chunk_bytes = 2 * options.optimizer.chunk_elements;
  hook.ring_bytes = options.ring_bytes;
  hook.deadline = options.deadline;
  std::vector<OffloadedParameter> offloaded;
  for (std::uint32_t i = 0; i < model->parameters.size(); ++i) {
    const MoeParameter& parameter = model->parameters[i];
    Held held;
    held.parameter = i;
    held.rows = ShardOf(parameter, rank, ranks, options.fp8);
    if (held.rows.empty()) continue;
    OffloadedParameter shard;
    shard.name = parameter.name;
    shard.number = i;
    shard.first = held.rows.begin * parameter.row_elements;
    shard.elements = (held.rows.end - held.rows.begin) * parameter.row_elements;
    shard.norm = parameter.norm;
    shard.frozen = options.freeze_embedding && i == 0;
    KEDGE_ASSIGN_OR_RETURN(held.weights, device->Allocate(MemoryKind::kDevice,
                                                          2 * shard.elements));
    shard.device = held.weights.data();
    HookedParameter hooked;
    hooked.name = parameter.name;
    hooked.data = held.weights.data();
    hooked.bytes = 2 * shard.elements;
    hooked.frozen = shard.frozen;
    hook.parameters.push_back(std::move(hooked));
    for (const MoeTensor& tensor : model->tensors) {
      if (tensor.parameter != i) continue;
      std::optional<TrainerTensor> part =
          PartOf(tensor, parameter, held.rows, held.weights.data());
      if (!part.has_value()) continue;
      if (options.fp8 && tensor.projection) {
        QuantisedTensor quantised;
        quantised.tensor = tensor.name;
        quantised.scales = tensor.name + kScaleSuffix;
        quantised.floor = kScaleFloor;
        hook.quantised.push_back(std::move(quantised));
      }
      hook.tensors.push_back(*std::move(part));
    }
    offloaded.push_back(std::move(shard));
    made->held_.push_back(std::move(held));
  }
  KEDGE_RETURN_IF_ERROR(made->MakeBuffers(rank, ranks));
  for (const Buffer& buffer : made->buffers_) {
    hook.residual.push_back(made->TensorOf(buffer));
  }
  KEDGE_ASSIGN_OR_RETURN(made->optimizer_, OffloadOptimizer::Create(
                                               device, options.optimizer,
                                               gradient, std::move(offloaded)));
  WriterOptions writer = options.writer;
  writer.coordinator = coordinator;
  KEDGE_ASSIGN_OR_RETURN(
      made->hook_,
      OptimizerHook::Create(writer, options.init, std::move(hook)));
  return made;
}

absl::StatusOr<StepReport> TrainerRank::Step(std::uint64_t step, bool anchor) {
  StepReport report;
  Clock::time_point start = Clock::now();
  for (std::uint64_t m = 0; m + 1 < options_.optimizer.micro_batches; ++m) {
    optimizer_->Accumulate(step, m);
  }
  report.accumulate_seconds = SecondsSince(start);

  start = Clock::now();
  KEDGE_RETURN_IF_ERROR(hook_->BeginStep(step, anchor));
  report.begin_seconds = SecondsSince(start);

  start = Clock::now();
  KEDGE_RETURN_IF_ERROR(optimizer_->FinalPass(step, *hook_));
  KEDGE_RETURN_IF_ERROR(hook_->EndStep());
  report.pass_seconds = SecondsSince(start);

  KEDGE_RETURN_IF_ERROR(UpdateBuffers(step));
  KEDGE_ASSIGN_OR_RETURN(report.hook, hook_->Publish());
  return report;
}

absl::Status TrainerRank::CheckLiveWeights() {
  std::vector<std::uint16_t> expected;
  std::vector<std::uint16_t> found;
  for (std::size_t i = 0; i < held_.size(); ++i) {
    const OffloadedParameter& parameter = optimizer_->parameters()[i];
    expected.resize(parameter.elements);
    found.assign(parameter.elements, 0xdead);
    optimizer_->Round(i, expected);
    KEDGE_RETURN_IF_ERROR(optimizer_->Download(i, found));
    if (expected == found) continue;
    const auto [e, f] =
        std::mismatch(expected.begin(), expected.end(), found.begin());
    return absl::DataLossError(Describe(
        {.where = absl::StrCat(parameter.name, ": element ",
                               e - expected.begin(), " of this rank's"),
         .what = "bits on the device",
         .expected = absl::StrCat("0x", absl::Hex(*e, absl::kZeroPad4),
                                  " by the master"),
         .found = absl::StrCat("0x", absl::Hex(*f, absl::kZeroPad4))}));
  }
  return absl::OkStatus();
}

void TrainerRank::AddTensor(const MoeTensor& tensor, const Held& held,
                            const std::vector<std::uint16_t>& weights,
                            ReferenceState* reference) const {
  const L61Summer& summer = hook_->store_writer().summer();
  const std::optional<TrainerTensor> part =
      PartOf(tensor, model_->parameters[held.parameter], held.rows,
             reinterpret_cast<const std::byte*>(weights.data()));
  if (!part.has_value()) return;
  const std::vector<std::byte> bytes = Gather(*part);
  const std::uint64_t first = part->shard.has_value() ? part->shard->begin : 0;
  if (!options_.fp8 || !tensor.projection) {
    reference->Add(tensor.name, DType::kBf16, tensor.shape, 2 * first, bytes,
                   summer);
    return;
  }
  const std::uint64_t cols = tensor.shape[1];
  const QuantisedRows rows = Quantise(
      {reinterpret_cast<const std::uint16_t*>(bytes.data()), bytes.size() / 2},
      cols, kScaleFloor);
  reference->Add(tensor.name, DType::kF8E4M3, tensor.shape, first,
                 std::as_bytes(std::span(rows.values)), summer);
  const std::uint64_t blocks[] = {(tensor.shape[0] + 127) / 128,
                                  (cols + 127) / 128};
  reference->Add(tensor.name + kScaleSuffix, DType::kF32, blocks,
                 first / cols / 128 * blocks[1] * sizeof(float),
                 std::as_bytes(std::span(rows.scales)), summer);
}

void TrainerRank::AddTo(ReferenceState* reference) {
  std::vector<std::uint16_t> weights;
  for (std::size_t i = 0; i < held_.size(); ++i) {
    const Held& held = held_[i];
    weights.resize(optimizer_->parameters()[i].elements);
    optimizer_->Round(i, weights);
    std::vector<const MoeTensor*> tensors;
    for (const MoeTensor& tensor : model_->tensors) {
      if (tensor.parameter == held.parameter) tensors.push_back(&tensor);
    }
    std::atomic<std::size_t> next = 0;
    const auto work = [&] {
      for (std::size_t at = next++; at < tensors.size(); at = next++) {
        AddTensor(*tensors[at], held, weights, reference);
      }
    };
    const std::size_t threads = std::min<std::size_t>(
        tensors.size(), static_cast<std::size_t>(options_.optimizer.threads));
    std::vector<std::thread> others;
    for (std::size_t t = 1; t < threads; ++t) others.emplace_back(work);
    work();
    for (std::thread& other : others) other.join();
  }
  for (const Buffer& buffer : buffers_) {
    const MoeBuffer& of = model_->buffers[buffer.buffer];
    const std::uint64_t shape[] = {of.elements};
    reference->Add(of.name, DType::kF32, shape, 0,
                   std::as_bytes(std::span(buffer.values)),
                   hook_->store_writer().summer());
  }
}

}  // namespace kedge::example
