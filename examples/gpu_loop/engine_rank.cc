#include "kedge/examples/gpu_loop/engine_rank.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"
#include "kedge/format/status.h"

namespace kedge::example {
namespace {

// Tensors that lie in one allocation, one behind the other.
std::string AllocationOf(const TensorSpec& tensor) {
  return absl::StrReplaceAll(tensor.name, {{".q_proj.", ".qkv_proj."},
                                           {".k_proj.", ".qkv_proj."},
                                           {".v_proj.", ".qkv_proj."},
                                           {".gate_proj", ".gate_up_proj"},
                                           {".up_proj", ".gate_up_proj"}});
}

// Column-major, as some matrix multiplications want their weights.
bool IsTransposed(const TensorSpec& tensor) {
  return tensor.name == "lm_head.weight";
}

}  // namespace

std::uint64_t RankBox::elements() const {
  std::uint64_t count = 1;
  for (const std::uint64_t e : extent) count *= e;
  return count;
}

RankBox BoxOfRank(const TensorSpec& tensor, std::uint32_t rank,
                  std::uint32_t ranks) {
  RankBox box;
  box.begin.assign(tensor.shape.size(), 0);
  box.extent = tensor.shape;
  const std::size_t rank_of_tensor = tensor.shape.size();
  absl::string_view name = tensor.name;
  absl::ConsumeSuffix(&name, "_scale_inv");
  absl::ConsumeSuffix(&name, ".weight");
  if (rank_of_tensor < 2 || absl::EndsWith(name, ".mlp.gate")) return box;
  // The last dimension for what is cut by columns, else the one before it: in a
  // stack, a matrix of each expert.
  std::size_t d = rank_of_tensor - 2;
  if (absl::EndsWith(name, "o_proj") || absl::EndsWith(name, "down_proj")) {
    d = rank_of_tensor - 1;
  }
  const std::uint64_t extent = tensor.shape[d];
  // A scale for all of a small tensor: every rank has it.
  if (extent < ranks) return box;
  box.begin[d] = extent * rank / ranks;
  box.extent[d] = extent * (rank + 1) / ranks - box.begin[d];
  return box;
}

absl::Status EngineRank::Allocate(const TensorTable& table, std::uint32_t rank,
                                  std::uint32_t ranks) {
  std::map<std::string, std::uint64_t> bytes_of;
  for (const TensorSpec& spec : table.tensors()) {
    Held held;
    held.spec = spec;
    held.box = BoxOfRank(spec, rank, ranks);
    const std::uint64_t bytes = held.box.elements() * ElementBytes(spec.dtype);
    if (bytes == 0) continue;
    bytes_of[AllocationOf(spec)] += bytes;
    weight_bytes_ += bytes;
    held_.push_back(std::move(held));
  }
  KEDGE_ASSIGN_OR_RETURN(stream_, device_->CreateStream());
  std::map<std::string, std::byte*> next;
  for (const auto& [name, bytes] : bytes_of) {
    KEDGE_ASSIGN_OR_RETURN(DeviceMemory memory,
                           device_->Allocate(MemoryKind::kDevice, bytes));
    // An engine that boots without weights serves nothing by accident.
    KEDGE_RETURN_IF_ERROR(
        device_->Fill(memory.data(), 0xa5, bytes, stream_.get()));
    next[name] = memory.data();
    memory_.push_back(std::move(memory));
  }
  KEDGE_RETURN_IF_ERROR(device_->WaitForStream(stream_.get()));
  for (Held& held : held_) {
    const std::uint64_t element = ElementBytes(held.spec.dtype);
    std::byte*& at = next[AllocationOf(held.spec)];
    held.data = at;
    at += held.box.elements() * element;
    const std::size_t n = held.box.extent.size();
    held.strides_bytes.assign(n, static_cast<std::int64_t>(element));
    if (IsTransposed(held.spec)) {
      held.strides_bytes[1] =
          static_cast<std::int64_t>(element * held.box.extent[0]);
    } else {
      for (std::size_t d = n; d-- > 1;) {
        held.strides_bytes[d - 1] =
            held.strides_bytes[d] *
            static_cast<std::int64_t>(held.box.extent[d]);
      }
    }
    TensorTarget target;
    target.name = held.spec.name;
    target.dtype = held.spec.dtype;
    target.shape = held.spec.shape;
    target.begin = held.box.begin;
    target.extent = held.box.extent;
    target.data = held.data;
    target.strides_bytes = held.strides_bytes;
    KEDGE_RETURN_IF_ERROR(set_.Add(std::move(target)));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<EngineRank>> EngineRank::Create(
    const TensorTable& table, Device* device, FollowerOptions options) {
  std::unique_ptr<EngineRank> engine(
      new EngineRank(device, options.group.rank));
  KEDGE_RETURN_IF_ERROR(
      engine->Allocate(table, options.group.rank, options.group.size));
  options.device = device;
  options.stream = engine->stream_.get();
  KEDGE_ASSIGN_OR_RETURN(engine->follower_,
                         Follower::Open(std::move(options), {&engine->set_}));
  return engine;
}

absl::Status EngineRank::CompareWith(const ReferenceState& reference) {
  std::vector<std::byte> bytes;
  for (const Held& held : held_) {
    const std::uint64_t element = ElementBytes(held.spec.dtype);
    const std::uint64_t elements = held.box.elements();
    bytes.resize(elements * element);
    KEDGE_RETURN_IF_ERROR(
        device_->Copy(bytes.data(), held.data, bytes.size(), stream_.get()));
    KEDGE_RETURN_IF_ERROR(device_->WaitForStream(stream_.get()));
    KEDGE_ASSIGN_OR_RETURN(const std::span<const std::byte> expected,
                           reference.BytesOf(held.spec.name));
    if (expected.size() != held.spec.byte_count()) {
      return absl::DataLossError(absl::StrCat(
          set_.name(), ": tensor ", held.spec.name, ": the store's is ",
          DTypeName(held.spec.dtype), " of ", held.spec.byte_count(),
          " bytes, the trainer's has ", expected.size()));
    }
    const std::size_t n = held.box.extent.size();
    std::vector<std::uint64_t> index(n, 0);
    for (std::uint64_t i = 0; i < elements; ++i) {
      std::uint64_t flat = 0;
      std::int64_t at = 0;
      for (std::size_t d = 0; d < n; ++d) {
        flat = flat * held.spec.shape[d] + held.box.begin[d] + index[d];
        at += static_cast<std::int64_t>(index[d]) * held.strides_bytes[d];
      }
      if (std::memcmp(bytes.data() + at, expected.data() + flat * element,
                      element) != 0) {
        return absl::DataLossError(absl::StrCat(set_.name(), ": tensor ",
                                                held.spec.name, ": element ",
                                                flat, " is not the trainer's"));
      }
      for (std::size_t d = n; d-- > 0;) {
        if (++index[d] < held.box.extent[d]) break;
        index[d] = 0;
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace kedge::example
