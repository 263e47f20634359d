#ifndef KEDGE_TESTS_WRITER_HOOK_TRAINER_H_
#define KEDGE_TESTS_WRITER_HOOK_TRAINER_H_

// A trainer with full CPU offload, as small as it can be: parameters in device
// memory, next weights in pinned memory, tensors that are views of parameters
// in every way that the hook knows.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kedge/engine/device/device.h"
#include "kedge/format/dtype.h"
#include "kedge/format/fp8.h"
#include "kedge/tests/support/test_model.h"
#include "kedge/writer/optimizer_hook.h"

namespace kedge {

class HookTrainer {
 public:
  HookTrainer(Device* device, std::uint64_t seed)
      : device_(device), random_(seed) {
    stream_ = *device->CreateStream();
  }

  // ------------------------------------------------------------- building it
  // A parameter of `bytes` random bytes; returns its index.
  std::uint32_t AddParameter(std::string name, std::uint64_t bytes,
                             bool frozen = false) {
    Parameter parameter;
    parameter.name = std::move(name);
    parameter.frozen = frozen;
    parameter.weights = *device_->Allocate(MemoryKind::kDevice, bytes);
    parameter.next = *device_->Allocate(MemoryKind::kPinned, bytes);
    for (std::uint64_t i = 0; i < bytes; ++i) {
      parameter.next.data()[i] = static_cast<std::byte>(random_());
    }
    Put(parameter.weights.data(), parameter.next.data(), bytes);
    parameters_.push_back(std::move(parameter));
    return static_cast<std::uint32_t>(parameters_.size() - 1);
  }
  // bf16 throughout, without NaN and infinities.
  std::uint32_t AddFiniteParameter(std::string name, std::uint64_t bytes) {
    const std::uint32_t p = AddParameter(std::move(name), bytes);
    Parameter& parameter = parameters_[p];
    parameter.finite = true;
    MakeFinite(parameter);
    Put(parameter.weights.data(), parameter.next.data(), bytes);
    return p;
  }
  // A tensor of bf16 in a finite parameter that travels as fp8.
  void AddQuantised(std::uint32_t parameter, std::uint64_t byte,
                    const std::string& name, std::vector<std::uint64_t> shape,
                    ScaleKind scale_kind = ScaleKind::kExact) {
    AddTensor(parameter, byte, name, DType::kBf16, std::move(shape));
    QuantisedTensor quantised;
    quantised.tensor = name;
    quantised.scales = name + "_scale_inv";
    quantised.scale_kind = scale_kind;
    quantised_.push_back(std::move(quantised));
  }
  // A copy that the trainer keeps equal.
  void AddReplica(std::uint32_t parameter) {
    Parameter& p = parameters_[parameter];
    p.replicas.push_back(
        *device_->Allocate(MemoryKind::kDevice, p.weights.bytes()));
    Put(p.replicas.back().data(), p.weights.data(), p.weights.bytes());
  }
  // A tensor that begins at `byte` of a parameter.
  TrainerTensor& AddTensor(std::uint32_t parameter, std::uint64_t byte,
                           std::string name, DType dtype,
                           std::vector<std::uint64_t> shape,
                           std::vector<std::int64_t> strides = {}) {
    TrainerTensor tensor;
    tensor.name = std::move(name);
    tensor.dtype = dtype;
    tensor.shape = std::move(shape);
    tensor.data = parameters_[parameter].weights.data() + byte;
    tensor.strides_bytes = std::move(strides);
    tensors_.push_back(std::move(tensor));
    return tensors_.back();
  }
  // A buffer that lies in no parameter, in device or host memory.
  void AddResidual(std::string name, DType dtype,
                   std::vector<std::uint64_t> shape, bool on_device,
                   std::vector<std::int64_t> strides = {}) {
    std::uint64_t bytes = ElementBytes(dtype);
    for (const std::uint64_t extent : shape) bytes *= extent;
    Buffer buffer;
    buffer.memory = *device_->Allocate(
        on_device ? MemoryKind::kDevice : MemoryKind::kPinned, bytes);
    buffer.bytes.resize(bytes);
    for (std::byte& byte : buffer.bytes)
      byte = static_cast<std::byte>(random_());
    Put(buffer.memory.data(), buffer.bytes.data(), bytes);
    buffers_.push_back(std::move(buffer));
    TrainerTensor tensor;
    tensor.name = std::move(name);
    tensor.dtype = dtype;
    tensor.shape = std::move(shape);
    tensor.data = buffers_.back().memory.data();
    tensor.strides_bytes = std::move(strides);
    residual_.push_back(std::move(tensor));
  }

  // Views of every kind, of sizes that no tile and no chunk divides.
  void AddEverything() {
    constexpr std::int64_t h = 150;  // hidden
    // gate and up are the halves of a packed parameter.
    const auto packed = AddParameter("mlp.gate_up", 2 * 140 * h * 2);
    AddTensor(packed, 0, "mlp.gate", DType::kBf16, {140, h});
    AddTensor(packed, 140 * h * 2, "mlp.up", DType::kBf16, {140, h});
    AddReplica(packed);
    // Interleaved rows, and interleaved columns.
    const auto rows = AddParameter("attn.qk", 2 * 131 * h * 2);
    AddTensor(rows, 0, "attn.q", DType::kBf16, {131, h}, {2 * h * 2, 2});
    AddTensor(rows, h * 2, "attn.k", DType::kBf16, {131, h}, {2 * h * 2, 2});
    const auto columns = AddParameter("attn.vo", 70 * 2 * 129 * 2);
    AddTensor(columns, 0, "attn.v", DType::kBf16, {70, 129}, {2 * 129 * 2, 4});
    AddTensor(columns, 2, "attn.o", DType::kBf16, {70, 129}, {2 * 129 * 2, 4});
    // A stack of experts, each a tensor; halves of each expert of another.
    const auto stack = AddParameter("experts.down", 5 * 33 * h * 2);
    for (int e = 0; e < 5; ++e) {
      AddTensor(stack, static_cast<std::uint64_t>(e) * 33 * h * 2,
                "experts." + std::to_string(e) + ".down", DType::kBf16,
                {33, h});
    }
    const auto halves = AddParameter("experts.gate_up", 6 * 2 * 20 * h * 2);
    AddTensor(halves, 0, "experts.gate", DType::kBf16, {6, 20, h},
              {2 * 20 * h * 2, h * 2, 2});
    AddTensor(halves, 20 * h * 2, "experts.up", DType::kBf16, {6, 20, h},
              {2 * 20 * h * 2, h * 2, 2});
    // Columns of a row at two strides; the rest belongs to no tensor.
    const auto gaps = AddParameter("heads", 9 * 4 * 80 * 4);
    AddTensor(gaps, 0, "heads.weight", DType::kF32, {9, 4, 64},
              {4 * 80 * 4, 80 * 4, 4});
    // Small tensors side by side, of every unit.
    const auto small = AddParameter("small", 8192);
    AddTensor(small, 0, "norm.0", DType::kBf16, {37});
    AddTensor(small, 74, "norm.1", DType::kBf16, {51});
    AddTensor(small, 176, "scale", DType::kF32, {});
    AddTensor(small, 180, "bytes", DType::kU8, {3});
    AddTensor(small, 183, "empty", DType::kBf16, {0, 4});
    AddTensor(small, 184, "pairs", DType::kF64, {7, 3});
    AddTensor(small, 352, "wide", DType::kI64, {2, 90});
    AddTensor(small, 1801, "odd", DType::kF8E4M3, {11, 101});
    // One long row.
    const auto flat = AddParameter("flat", 40000 * 2);
    AddTensor(flat, 0, "flat", DType::kF16, {40000});
    // Never written.
    const auto frozen = AddParameter("embed", 61 * h * 2, /*frozen=*/true);
    AddTensor(frozen, 0, "embed", DType::kBf16, {61, h});
    TrainerTensor tied;
    tied.name = "lm_head";
    tied.dtype = DType::kBf16;
    tied.shape = {61, static_cast<std::uint64_t>(h)};
    tied.tied_to = "embed";
    tied.data = parameters_[frozen].weights.data();
    tensors_.push_back(tied);
    AddResidual("router.bias", DType::kF32, {77}, /*on_device=*/false);
    AddResidual("router.gate", DType::kBf16, {23, 40}, /*on_device=*/true);
    // Stored the other way round.
    AddResidual("router.up", DType::kBf16, {30, 50}, /*on_device=*/true,
                {2, 60});
  }

  HookOptions Options() const {
    HookOptions options;
    options.device = device_;
    for (const Parameter& parameter : parameters_) {
      HookedParameter hooked;
      hooked.name = parameter.name;
      hooked.data = parameter.weights.data();
      hooked.bytes = parameter.weights.bytes();
      hooked.frozen = parameter.frozen;
      for (const DeviceMemory& replica : parameter.replicas) {
        hooked.replicas.push_back(replica.data());
      }
      options.parameters.push_back(std::move(hooked));
    }
    options.tensors = tensors_;
    options.residual = residual_;
    options.quantised = quantised_;
    options.chunk_bytes = 20'000;
    options.ring_bytes = std::uint64_t{4} << 20;
    return options;
  }
  std::vector<TrainerTensor>& tensors() { return tensors_; }

  // ------------------------------------------------------------------ a step
  // New weights in pinned memory: about `fraction` of the bytes' words differ.
  void Optimize(double fraction) {
    for (Parameter& parameter : parameters_) {
      if (parameter.frozen) continue;
      Change(parameter.next.data(), parameter.next.bytes(), fraction);
      if (parameter.finite) MakeFinite(parameter);
    }
    for (Buffer& buffer : buffers_) {
      Change(buffer.bytes.data(), buffer.bytes.size(), fraction);
      Put(buffer.memory.data(), buffer.bytes.data(), buffer.bytes.size());
    }
  }

  struct Range {
    std::uint32_t parameter = 0;
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
  };
  // All parameters in ranges that end anywhere (at multiples of 8), in order or
  // not.
  std::vector<Range> Ranges(bool shuffled, std::uint64_t about_bytes = 30'000) {
    std::vector<Range> ranges;
    for (std::uint32_t p = 0; p < parameters_.size(); ++p) {
      if (parameters_[p].frozen) continue;
      const std::uint64_t bytes = parameters_[p].weights.bytes();
      for (std::uint64_t at = 0; at < bytes;) {
        std::uint64_t end = at + 8 + random_() % (2 * about_bytes) / 8 * 8;
        if (parameters_[p].name == "small") end = bytes;  // odd elements
        end = std::min(end, bytes);
        ranges.push_back({p, at, end});
        at = end;
      }
    }
    if (shuffled) std::shuffle(ranges.begin(), ranges.end(), random_);
    return ranges;
  }
  // OnUpdate of the ranges, each from a source that is spoilt when its ticket
  // has passed, as an optimizer with few output slots does.
  absl::Status Write(OptimizerHook& hook, const std::vector<Range>& ranges) {
    std::vector<OptimizerHook::Ticket> tickets;
    sources_.resize(std::max(sources_.size(), ranges.size()));
    for (std::size_t i = 0; i < ranges.size(); ++i) {
      const Range& range = ranges[i];
      const std::uint64_t bytes = range.end - range.begin;
      if (sources_[i].bytes() < bytes) {
        sources_[i] = *device_->Allocate(MemoryKind::kPinned, bytes);
      }
      std::memcpy(sources_[i].data(),
                  parameters_[range.parameter].next.data() + range.begin,
                  bytes);
      auto ticket = hook.OnUpdate(range.parameter, range.begin, bytes,
                                  sources_[i].data(), stream_.get());
      if (!ticket.ok()) return ticket.status();
      tickets.push_back(*ticket);
      if (i >= 3) {
        if (absl::Status status = Spoil(hook, tickets[i - 3], i - 3);
            !status.ok()) {
          return status;
        }
      }
    }
    for (std::size_t i = ranges.size() < 3 ? 0 : ranges.size() - 3;
         i < ranges.size(); ++i) {
      if (absl::Status status = Spoil(hook, tickets[i], i); !status.ok()) {
        return status;
      }
    }
    return absl::OkStatus();
  }
  // Copies weights into their replicas, when they are all there.
  void SyncReplicas() {
    Settle();
    for (Parameter& parameter : parameters_) {
      for (DeviceMemory& replica : parameter.replicas) {
        Put(replica.data(), parameter.weights.data(),
            parameter.weights.bytes());
      }
    }
  }
  // A whole step but for Publish.
  absl::Status Step(OptimizerHook& hook, std::uint64_t step, bool anchor,
                    double fraction, bool shuffled = false) {
    if (absl::Status status = hook.BeginStep(step, anchor); !status.ok()) {
      return status;
    }
    Optimize(fraction);
    all_given_ = false;
    if (absl::Status status = Write(hook, Ranges(shuffled)); !status.ok()) {
      return status;
    }
    all_given_ = true;
    const absl::Status ended = hook.EndStep();  // now the weights are there
    SyncReplicas();
    return ended;
  }

  // Whether the hook took every range of the last Step.
  bool all_given() const { return all_given_; }

  // For when the hook could not: the weights are what the optimizer wrote.
  void PutRight() {
    Settle();
    for (Parameter& parameter : parameters_) {
      Put(parameter.weights.data(), parameter.next.data(),
          parameter.weights.bytes());
    }
    SyncReplicas();
  }

  // What the tensors, or the shards that are here, should be, by name.
  // Not `quantised`: the source of fp8 tensors in their place, as a writer has
  // it that is told of no fp8.
  ModelBytes Expected(bool quantised = true) const {
    ModelBytes model;
    for (const TrainerTensor& tensor : tensors_) {
      if (!tensor.tied_to.empty()) continue;
      auto bytes = Gather(tensor, [&](const std::byte* address) {
        for (const Parameter& parameter : parameters_) {
          const std::byte* const data = parameter.weights.data();
          if (address >= data && address < data + parameter.weights.bytes()) {
            return parameter.next.data() + (address - data);
          }
        }
        return static_cast<std::byte*>(nullptr);
      });
      const auto fp8 = std::find_if(
          quantised_.begin(), quantised_.end(),
          [&](const QuantisedTensor& q) { return q.tensor == tensor.name; });
      if (quantised && fp8 != quantised_.end()) {
        AddFp8(bytes, tensor.shape[1], *fp8, &model);
        continue;
      }
      auto& all = model[tensor.name];
      all.insert(all.end(), bytes.begin(), bytes.end());
    }
    for (const TrainerTensor& tensor : residual_) {
      model[tensor.name] = Gather(tensor, [&](const std::byte* address) {
        for (const Buffer& buffer : buffers_) {
          const std::byte* const data = buffer.memory.data();
          if (address >= data && address < data + buffer.bytes.size()) {
            return buffer.bytes.data() + (address - data);
          }
        }
        return static_cast<const std::byte*>(nullptr);
      });
    }
    for (const TrainerTensor& tensor : tensors_) {
      if (!tensor.tied_to.empty()) model[tensor.name] = model[tensor.tied_to];
    }
    return model;
  }
  // Whether device memory holds what the optimizer wrote.
  bool DeviceHoldsNext() {
    Settle();
    for (const Parameter& parameter : parameters_) {
      std::vector<std::byte> held(parameter.weights.bytes());
      Put(held.data(), parameter.weights.data(), held.size());
      if (std::memcmp(held.data(), parameter.next.data(), held.size()) != 0) {
        return false;
      }
    }
    return true;
  }
  std::byte* Weights(std::uint32_t parameter) {
    return parameters_[parameter].weights.data();
  }
  std::byte* Next(std::uint32_t parameter) {
    return parameters_[parameter].next.data();
  }
  std::byte* Replica(std::uint32_t parameter) {
    return parameters_[parameter].replicas.at(0).data();
  }
  std::uint32_t IndexOf(const std::string& name) const {
    for (std::uint32_t p = 0; p < parameters_.size(); ++p) {
      if (parameters_[p].name == name) return p;
    }
    ADD_FAILURE() << name;
    return 0;
  }
  DeviceStream stream() { return stream_.get(); }
  std::mt19937_64& random() { return random_; }

 private:
  struct Parameter {
    std::string name;
    bool frozen = false;
    bool finite = false;
    DeviceMemory weights;
    DeviceMemory next;  // pinned
    std::vector<DeviceMemory> replicas;
  };

  static void MakeFinite(Parameter& parameter) {
    for (std::uint64_t i = 1; i < parameter.next.bytes(); i += 2) {
      // The exponent's upper bits; small ones are more like weights.
      parameter.next.data()[i] &= std::byte{0xbf};
    }
  }
  struct Buffer {
    DeviceMemory memory;
    std::vector<std::byte> bytes;  // what it holds
  };

  // Copies and waits.
  void Put(std::byte* to, const std::byte* from, std::uint64_t bytes) {
    if (!device_->Copy(to, from, bytes, stream_.get()).ok()) {
      EXPECT_TRUE(device_->Copy(to, from, bytes, stream_.get()).ok());
    }
    Settle();
  }
  // A test may have it that any one call fails.
  void Settle() {
    if (device_->WaitForStream(stream_.get()).ok()) return;
    EXPECT_TRUE(device_->WaitForStream(stream_.get()).ok());
  }
  void Change(std::byte* data, std::uint64_t bytes, double fraction) {
    const auto every = static_cast<std::uint64_t>(1 / std::max(fraction, 1e-9));
    for (std::uint64_t at = random_() % (2 * every); at < bytes;
         at += 1 + random_() % (2 * every)) {
      data[at] =
          random_() % 4 == 0
              ? static_cast<std::byte>(random_())
              : static_cast<std::byte>(std::to_integer<int>(data[at]) + 1);
    }
  }
  absl::Status Spoil(OptimizerHook& hook, OptimizerHook::Ticket ticket,
                     std::size_t source) {
    if (absl::Status status = hook.WaitFor(ticket); !status.ok()) return status;
    const auto passed = hook.HasPassed(ticket);
    if (!passed.ok()) return passed.status();
    EXPECT_TRUE(*passed);
    std::memset(sources_[source].data(), 0xee, sources_[source].bytes());
    return absl::OkStatus();
  }
  // The fp8 form of whole rows of blocks, block by block.
  static void AddFp8(const std::vector<std::byte>& bf16, std::uint64_t cols,
                     const QuantisedTensor& quantised, ModelBytes* model) {
    const auto* const x = reinterpret_cast<const std::uint16_t*>(bf16.data());
    const std::uint64_t rows = bf16.size() / 2 / cols;
    std::vector<std::byte>& values = (*model)[quantised.tensor];
    std::vector<std::byte>& scales = (*model)[quantised.scales];
    const std::size_t first = values.size();
    values.resize(first + rows * cols);
    for (std::uint64_t r = 0; r < rows; r += 128) {
      for (std::uint64_t c = 0; c < cols; c += 128) {
        const std::uint64_t r_end = std::min(rows, r + 128);
        const std::uint64_t c_end = std::min(cols, c + 128);
        float amax = 0;
        for (std::uint64_t i = r; i < r_end; ++i) {
          for (std::uint64_t j = c; j < c_end; ++j) {
            amax = std::max(amax, std::abs(FloatOfBf16(x[i * cols + j])));
          }
        }
        const float scale = quantised.scale_kind == ScaleKind::kExact
                                ? Fp8ExactScale(amax, quantised.floor)
                                : Fp8PowerOfTwoScale(amax, quantised.floor);
        for (std::uint64_t i = r; i < r_end; ++i) {
          for (std::uint64_t j = c; j < c_end; ++j) {
            values[first + i * cols + j] = static_cast<std::byte>(
                Fp8OfFloat(FloatOfBf16(x[i * cols + j]) / scale));
          }
        }
        const auto* const bytes = reinterpret_cast<const std::byte*>(&scale);
        scales.insert(scales.end(), bytes, bytes + sizeof(scale));
      }
    }
  }
  template <class At>
  static std::vector<std::byte> Gather(const TrainerTensor& tensor,
                                       const At& at) {
    const std::uint32_t element = ElementBytes(tensor.dtype);
    std::uint64_t count = 1;
    for (const std::uint64_t extent : tensor.shape) count *= extent;
    if (tensor.shard) count = tensor.shard->end - tensor.shard->begin;
    std::vector<std::byte> bytes(count * element);
    for (std::uint64_t i = 0; i < count; ++i) {
      std::uint64_t rest = i;
      std::int64_t offset = 0;
      std::int64_t contiguous = element;
      for (std::size_t d = tensor.shape.size(); d-- > 0;) {
        const auto index = static_cast<std::int64_t>(rest % tensor.shape[d]);
        rest /= tensor.shape[d];
        offset +=
            index * (tensor.strides_bytes.empty() ? contiguous
                                                  : tensor.strides_bytes[d]);
        contiguous *= static_cast<std::int64_t>(tensor.shape[d]);
      }
      std::memcpy(bytes.data() + i * element,
                  at(static_cast<const std::byte*>(tensor.data) + offset),
                  element);
    }
    return bytes;
  }

  Device* device_;
  std::mt19937_64 random_;
  std::vector<Parameter> parameters_;
  std::vector<Buffer> buffers_;
  std::vector<DeviceMemory> sources_;
  std::vector<TrainerTensor> tensors_;
  std::vector<TrainerTensor> residual_;
  std::vector<QuantisedTensor> quantised_;
  bool all_given_ = false;
  OwnedStream stream_;  // last: its work uses the rest
};

}  // namespace kedge

#endif  // KEDGE_TESTS_WRITER_HOOK_TRAINER_H_
