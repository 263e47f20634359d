#include "kedge/writer/tensor_source.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kedge/format/status.h"

namespace kedge {
namespace {

// Collects offenders: counts all, names the first few.
class Offenders {
 public:
  void Add(std::string what) {
    if (++count_ <= 4) named_.push_back(std::move(what));
  }
  absl::Status ToStatus() const {
    if (count_ == 0) return absl::OkStatus();
    return absl::FailedPreconditionError(absl::StrCat(
        "the model does not match the store's tensor table in ", count_,
        " tensor", count_ == 1 ? "" : "s", ": ", absl::StrJoin(named_, "; "),
        count_ > named_.size() ? "; ..." : "",
        "; publish to the store of this model, or replace its table"));
  }

 private:
  std::size_t count_ = 0;
  std::vector<std::string> named_;
};

std::string Describe(DType dtype, const std::vector<std::uint64_t>& shape) {
  return absl::StrCat(DTypeName(dtype), " [", absl::StrJoin(shape, ", "), "]");
}

std::vector<std::int64_t> ContiguousStrides(
    const std::vector<std::uint64_t>& shape, std::uint32_t element_bytes) {
  std::vector<std::int64_t> strides(shape.size());
  std::int64_t stride = element_bytes;
  for (std::size_t d = shape.size(); d-- > 0;) {
    strides[d] = stride;
    stride *= static_cast<std::int64_t>(shape[d]);
  }
  return strides;
}

}  // namespace

absl::StatusOr<TensorTable> MakeTable(std::span<const TrainerTensor> tensors) {
  std::vector<TensorSpec> specs;
  std::vector<std::pair<std::string, std::string>> ties;
  for (const TrainerTensor& tensor : tensors) {
    TensorSpec spec;
    spec.name = tensor.name;
    spec.dtype = tensor.dtype;
    spec.shape = tensor.shape;
    specs.push_back(std::move(spec));
    if (!tensor.tied_to.empty()) ties.emplace_back(tensor.name, tensor.tied_to);
  }
  return TensorTable::Create(std::move(specs), ties);
}

absl::StatusOr<MemorySource> MemorySource::Bind(
    const TensorTable& table, std::span<const TrainerTensor> tensors) {
  std::map<absl::string_view, const TrainerTensor*> by_name;
  Offenders offenders;
  for (const TrainerTensor& tensor : tensors) {
    if (!by_name.emplace(tensor.name, &tensor).second) {
      offenders.Add(absl::StrCat(tensor.name, ": given twice"));
    }
  }
  MemorySource source;
  source.tensors_.resize(table.size());
  for (std::size_t i = 0; i < table.size(); ++i) {
    const TensorSpec& spec = table[i];
    const auto found = by_name.find(spec.name);
    if (found == by_name.end()) {
      offenders.Add(absl::StrCat(spec.name, ": missing; the store has ",
                                 Describe(spec.dtype, spec.shape)));
      continue;
    }
    const TrainerTensor& tensor = *found->second;
    by_name.erase(found);
    if (tensor.dtype != spec.dtype || tensor.shape != spec.shape) {
      offenders.Add(absl::StrCat(spec.name, ": expected ",
                                 Describe(spec.dtype, spec.shape), ", found ",
                                 Describe(tensor.dtype, tensor.shape)));
      continue;
    }
    if (tensor.data == nullptr && spec.byte_count() > 0) {
      offenders.Add(absl::StrCat(spec.name, ": data is null"));
      continue;
    }
    Bound& bound = source.tensors_[i];
    bound.data = static_cast<const std::byte*>(tensor.data);
    bound.shape = spec.shape;
    bound.element_bytes = ElementBytes(spec.dtype);
    if (!tensor.strides_bytes.empty()) {
      if (tensor.strides_bytes.size() != spec.shape.size()) {
        offenders.Add(absl::StrCat(spec.name, ": ", tensor.strides_bytes.size(),
                                   " strides for ", spec.shape.size(),
                                   " dimensions"));
        continue;
      }
      if (tensor.strides_bytes !=
          ContiguousStrides(spec.shape, bound.element_bytes)) {
        bound.strides_bytes = tensor.strides_bytes;
      }
    }
  }
  for (const auto& [name, tensor] : by_name) {
    offenders.Add(absl::StrCat(name, ": not in the store's table"));
  }
  KEDGE_RETURN_IF_ERROR(offenders.ToStatus());
  return source;
}

absl::StatusOr<std::span<const std::byte>> MemorySource::Read(
    std::uint32_t ordinal, std::uint64_t byte_begin, std::uint64_t byte_count,
    std::vector<std::byte>* scratch) {
  const Bound& tensor = tensors_[ordinal];
  if (tensor.strides_bytes.empty()) {
    return std::span<const std::byte>(tensor.data + byte_begin, byte_count);
  }
  scratch->resize(byte_count);
  const std::uint64_t element = tensor.element_bytes;
  const std::size_t last = tensor.shape.size() - 1;
  const std::uint64_t row = tensor.shape[last];
  std::uint64_t index = byte_begin / element;
  const std::uint64_t end = (byte_begin + byte_count) / element;
  std::byte* out = scratch->data();
  while (index < end) {
    // One row of the last dimension, or the part of it that is asked for.
    std::uint64_t rest = index / row;
    const std::uint64_t col = index % row;
    const std::uint64_t count = std::min(end - index, row - col);
    std::int64_t offset = 0;
    for (std::size_t d = last; d-- > 0;) {
      offset += static_cast<std::int64_t>(rest % tensor.shape[d]) *
                tensor.strides_bytes[d];
      rest /= tensor.shape[d];
    }
    const std::int64_t stride = tensor.strides_bytes[last];
    const std::byte* from =
        tensor.data + offset + static_cast<std::int64_t>(col) * stride;
    if (stride == static_cast<std::int64_t>(element)) {
      std::memcpy(out, from, count * element);
    } else {
      for (std::uint64_t i = 0; i < count; ++i) {
        std::memcpy(out + i * element,
                    from + static_cast<std::int64_t>(i) * stride, element);
      }
    }
    out += count * element;
    index += count;
  }
  return std::span<const std::byte>(*scratch);
}

std::vector<TensorSlice> SplitTable(const TensorTable& table,
                                    std::uint64_t max_units) {
  std::vector<TensorSlice> slices;
  for (std::size_t i = 0; i < table.size(); ++i) {
    const TensorSpec& spec = table[i];
    if (spec.tied_to != kNotTied) continue;
    const std::uint64_t units = spec.unit_count();
    const TileGrid grid = spec.grid();
    const std::uint64_t band =
        grid.rows == 1 ? grid.tile_cols : grid.cols * grid.tile_rows;
    // Whole elements, and whole bands where one fits.
    const std::uint64_t quantum =
        units == 0 || band > max_units ? UnitsPerElement(spec.dtype) : band;
    const std::uint64_t step =
        std::max<std::uint64_t>(max_units / quantum, 1) * quantum;
    for (std::uint64_t begin = 0; begin < units; begin += step) {
      slices.push_back({static_cast<std::uint32_t>(i),
                        {begin, std::min(begin + step, units)}});
    }
  }
  return slices;
}

}  // namespace kedge
