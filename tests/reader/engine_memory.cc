#include "kedge/tests/reader/engine_memory.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kedge/engine/cpu/cpu_device.h"
#include "kedge/format/status.h"

namespace kedge {
namespace {

std::vector<std::int64_t> RowMajor(const std::vector<std::uint64_t>& extent,
                                   std::uint64_t inner_bytes,
                                   std::uint64_t row_gap_bytes) {
  std::vector<std::int64_t> strides(extent.size());
  std::uint64_t bytes = inner_bytes;
  for (std::size_t d = extent.size(); d-- > 0;) {
    strides[d] = static_cast<std::int64_t>(bytes);
    bytes = bytes * extent[d] + row_gap_bytes;
  }
  return strides;
}

std::uint64_t Product(const std::vector<std::uint64_t>& extent) {
  std::uint64_t product = 1;
  for (const std::uint64_t e : extent) product *= e;
  return product;
}

}  // namespace

Device* DefaultTestDevice() {
  static Device* const device = []() -> Device* {
    const char* name = std::getenv("KEDGE_TEST_DEVICE");
    if (name == nullptr || *name == '\0') return nullptr;
    KEDGE_CHECK(std::strcmp(name, "cpu") == 0);
    return new CpuDevice;
  }();
  return device;
}

std::string LayoutName(Layout layout) {
  switch (layout) {
    case Layout::kWhole:
      return "Whole";
    case Layout::kPadded:
      return "Padded";
    case Layout::kTransposed:
      return "Transposed";
    case Layout::kPacked:
      return "Packed";
    case Layout::kRows:
      return "Rows";
    case Layout::kColumns:
      return "Columns";
    case Layout::kReplicas:
      return "Replicas";
  }
  return "?";
}

void EngineMemory::Plan(int set, const TensorSpec& spec,
                        std::vector<std::uint64_t> begin,
                        std::vector<std::uint64_t> extent,
                        std::vector<std::int64_t> strides,
                        std::uint64_t align) {
  Planned planned;
  planned.set = set;
  planned.target.name = spec.name;
  planned.target.dtype = spec.dtype;
  planned.target.shape = spec.shape;
  planned.target.begin = begin;
  planned.target.extent = extent;
  planned.target.strides_bytes = strides;
  planned.offset = (used_ + align - 1) / align * align;
  if (strides.empty()) {
    strides = RowMajor(extent, ElementBytes(spec.dtype), 0);
  }
  std::uint64_t span = Product(extent) == 0 ? 0 : ElementBytes(spec.dtype);
  for (std::size_t d = 0; d < extent.size() && span > 0; ++d) {
    span += (extent[d] - 1) * static_cast<std::uint64_t>(strides[d]);
  }
  used_ = planned.offset + span;
  planned_.push_back(std::move(planned));
}

EngineMemory::EngineMemory(const TensorTable& table,
                           const std::vector<Part>& parts,
                           const std::string& set_name, Device* device)
    : device_(device) {
  for (const Part& part : parts) {
    const std::uint64_t previous =
        planned_.empty() ? 0 : planned_.back().offset;
    const std::uint64_t used = used_;
    Plan(0, table[*table.Find(part.name)], part.begin, part.extent,
         part.strides_bytes, 64);
    if (part.bytes_after_previous == 0) continue;
    Planned& inside = planned_.back();
    const std::uint64_t span = used_ - inside.offset;
    inside.offset = previous + part.bytes_after_previous;
    used_ = std::max(used, inside.offset + span);
  }
  Place({set_name});
}

EngineMemory::EngineMemory(const TensorTable& table, Layout layout,
                           const std::vector<std::string>& without,
                           Device* device)
    : device_(device) {
  const auto add = [&](int set, const TensorSpec& spec,
                       std::vector<std::uint64_t> begin,
                       std::vector<std::uint64_t> extent,
                       std::vector<std::int64_t> strides, std::uint64_t align) {
    Plan(set, spec, std::move(begin), std::move(extent), std::move(strides),
         align);
  };
  const auto halves = [&](const TensorSpec& spec, std::size_t dimension,
                          int first_set, int second_set) {
    std::vector<std::uint64_t> begin(spec.shape.size(), 0);
    std::vector<std::uint64_t> extent = spec.shape;
    extent[dimension] /= 2;
    add(first_set, spec, begin, extent, {}, 64);
    begin[dimension] = extent[dimension];
    extent[dimension] = spec.shape[dimension] - extent[dimension];
    add(second_set, spec, begin, extent, {}, 64);
  };

  for (const TensorSpec& spec : table.tensors()) {
    if (std::find(without.begin(), without.end(), spec.name) != without.end()) {
      continue;
    }
    const std::size_t rank = spec.shape.size();
    const std::vector<std::uint64_t> zero(rank, 0);
    const std::uint64_t element = ElementBytes(spec.dtype);
    switch (layout) {
      case Layout::kWhole:
        add(0, spec, zero, spec.shape, {}, 64);
        break;
      case Layout::kPadded:
        add(0, spec, zero, spec.shape,
            RowMajor(spec.shape, 2 * element, 3 * element), 64);
        break;
      case Layout::kTransposed: {
        std::vector<std::int64_t> strides(rank);
        std::uint64_t bytes = element;
        for (std::size_t d = 0; d < rank; ++d) {
          strides[d] = static_cast<std::int64_t>(bytes);
          bytes *= std::max<std::uint64_t>(spec.shape[d], 1);
        }
        add(0, spec, zero, spec.shape, strides, 64);
        break;
      }
      case Layout::kPacked: {
        if (spec.name == "mlp.gate.weight") {
          const auto row = static_cast<std::int64_t>(spec.shape[1] * element);
          const std::int64_t item = static_cast<std::int64_t>(element);
          add(0, spec, zero, spec.shape, {2 * row, item}, 64);
          // "up" lies between the rows of "gate".
          Planned up = planned_.back();
          up.target.name = "mlp.up.weight";
          up.target.dtype = DType::kF16;
          up.offset += static_cast<std::uint64_t>(row);
          used_ += static_cast<std::uint64_t>(row);
          planned_.push_back(std::move(up));
          break;
        }
        if (spec.name == "mlp.up.weight") break;
        if (rank == 0 || spec.shape[0] < 3) {
          add(0, spec, zero, spec.shape, {}, 64);
          break;
        }
        const std::uint64_t cut[4] = {0, spec.shape[0] / 3, spec.shape[0] / 2,
                                      spec.shape[0]};
        for (int part = 2; part >= 0; --part) {
          std::vector<std::uint64_t> begin = zero;
          std::vector<std::uint64_t> extent = spec.shape;
          begin[0] = cut[part];
          extent[0] = cut[part + 1] - cut[part];
          add(0, spec, begin, extent, {}, part == 2 ? 64 : element);
        }
        break;
      }
      case Layout::kRows:
      case Layout::kColumns: {
        const std::size_t dimension =
            rank == 0 || layout == Layout::kRows ? 0 : rank - 1;
        if (rank == 0 || spec.shape[dimension] < 2) {
          add(0, spec, zero, spec.shape, {}, 64);
          add(1, spec, zero, spec.shape, {}, 64);
        } else {
          halves(spec, dimension, 0, 1);
        }
        break;
      }
      case Layout::kReplicas:
        add(0, spec, zero, spec.shape, {}, 64);
        if (rank == 0 || spec.shape[0] < 2) {
          add(1, spec, zero, spec.shape, {}, 64);
        } else {
          halves(spec, 0, 1, 1);
        }
        break;
    }
  }

  if (layout == Layout::kRows || layout == Layout::kColumns ||
      layout == Layout::kReplicas) {
    Place({"tp0", "tp1"});
  } else {
    Place({"tp0"});
  }
}

void EngineMemory::Place(const std::vector<std::string>& set_names) {
  const std::uint64_t bytes = used_ + 64;
  if (device_ != nullptr) {
    auto memory = device_->Allocate(MemoryKind::kDevice, bytes);
    KEDGE_CHECK(memory.ok());
    memory_ = *std::move(memory);
  }
  if (dynamic_cast<CpuDevice*>(device_) != nullptr) {
    arena_ = memory_.data();
  } else {
    host_.resize(bytes);
    arena_ = host_.data();
  }
  owned_.resize(bytes, false);
  for (const std::string& name : set_names) {
    sets_.push_back(std::make_unique<WeightSet>(name));
  }
  for (Planned& planned : planned_) {
    planned.target.data =
        (device_ != nullptr ? memory_.data() : arena_) + planned.offset;
    const absl::Status added =
        sets_[static_cast<std::size_t>(planned.set)]->Add(planned.target);
    KEDGE_CHECK(added.ok());
    const std::uint64_t element = ElementBytes(planned.target.dtype);
    ForEach(planned, [&](std::uint64_t, std::uint64_t at) {
      for (std::uint64_t b = 0; b < element; ++b) owned_[at + b] = true;
    });
  }
  Fill(std::byte{0xa5});
}

template <typename Visit>
void EngineMemory::ForEach(const Planned& planned, Visit visit) {
  const TensorTarget& target = planned.target;
  const std::size_t rank = target.shape.size();
  const std::vector<std::int64_t> strides =
      target.strides_bytes.empty()
          ? RowMajor(target.extent, ElementBytes(target.dtype), 0)
          : target.strides_bytes;
  std::vector<std::uint64_t> at(rank, 0);
  const std::uint64_t count = Product(target.extent);
  for (std::uint64_t i = 0; i < count; ++i) {
    std::uint64_t flat = 0;
    std::uint64_t offset = planned.offset;
    for (std::size_t d = 0; d < rank; ++d) {
      flat = flat * target.shape[d] + target.begin[d] + at[d];
      offset += at[d] * static_cast<std::uint64_t>(strides[d]);
    }
    visit(flat, offset);
    for (std::size_t d = rank; d-- > 0;) {
      if (++at[d] < target.extent[d]) break;
      at[d] = 0;
    }
  }
}

std::vector<const WeightSet*> EngineMemory::sets() const {
  std::vector<const WeightSet*> sets;
  for (const auto& set : sets_) sets.push_back(set.get());
  return sets;
}

void EngineMemory::Fill(std::byte value) {
  fill_ = value;
  std::fill(arena_, arena_ + owned_.size(), value);
  Push();
}

void EngineMemory::Push() {
  if (host_.empty() || device_ == nullptr) return;
  KEDGE_CHECK(
      device_->Copy(memory_.data(), host_.data(), host_.size(), nullptr).ok());
  KEDGE_CHECK(device_->WaitForStream(nullptr).ok());
}

const std::byte* EngineMemory::Address(const std::string& name,
                                       std::uint64_t element) {
  const std::byte* const at = At(name, element);
  return device_ == nullptr ? at : memory_.data() + (at - arena_);
}

void EngineMemory::Pull() const {
  if (host_.empty() || device_ == nullptr) return;
  KEDGE_CHECK(
      device_->Copy(host_.data(), memory_.data(), host_.size(), nullptr).ok());
  KEDGE_CHECK(device_->WaitForStream(nullptr).ok());
}

void EngineMemory::Load(const ModelBytes& model) {
  for (const Planned& planned : planned_) {
    const std::vector<std::byte>& bytes = model.at(planned.target.name);
    const std::uint64_t element = ElementBytes(planned.target.dtype);
    ForEach(planned, [&](std::uint64_t flat, std::uint64_t at) {
      std::memcpy(arena_ + at, bytes.data() + flat * element, element);
    });
  }
  Push();
}

std::string EngineMemory::Difference(const ModelBytes& model,
                                     const std::string& only) const {
  Pull();
  std::string difference;
  for (const Planned& planned : planned_) {
    if (!only.empty() && planned.target.name != only) continue;
    const std::vector<std::byte>& bytes = model.at(planned.target.name);
    const std::uint64_t element = ElementBytes(planned.target.dtype);
    ForEach(planned, [&](std::uint64_t flat, std::uint64_t at) {
      if (difference.empty() &&
          std::memcmp(arena_ + at, bytes.data() + flat * element, element) !=
              0) {
        difference = absl::StrCat(planned.target.name, " of set ", planned.set,
                                  " differs at element ", flat);
      }
    });
  }
  for (std::size_t i = 0; i < owned_.size() && difference.empty(); ++i) {
    if (!owned_[i] && arena_[i] != fill_) {
      difference =
          absl::StrCat("byte ", i, " outside every target was written");
    }
  }
  return difference;
}

std::byte* EngineMemory::At(const std::string& name, std::uint64_t element) {
  Pull();
  std::byte* found = nullptr;
  for (const Planned& planned : planned_) {
    if (planned.target.name != name || found != nullptr) continue;
    ForEach(planned, [&](std::uint64_t flat, std::uint64_t at) {
      if (flat == element) found = arena_ + at;
    });
  }
  KEDGE_CHECK(found != nullptr);
  return found;
}

std::optional<std::uint64_t> EngineMemory::SomeElement(
    const std::string& name) const {
  std::optional<std::uint64_t> some;
  for (const Planned& planned : planned_) {
    if (planned.target.name != name || some) continue;
    ForEach(planned, [&](std::uint64_t flat, std::uint64_t) {
      if (!some) some = flat;
    });
  }
  return some;
}

std::vector<std::byte> EngineMemory::Contents() const {
  Pull();
  std::vector<std::byte> contents;
  for (const Planned& planned : planned_) {
    const std::uint64_t element = ElementBytes(planned.target.dtype);
    ForEach(planned, [&](std::uint64_t, std::uint64_t at) {
      contents.insert(contents.end(), arena_ + at, arena_ + at + element);
    });
  }
  return contents;
}

}  // namespace kedge
