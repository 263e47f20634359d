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
  absl::Status ToStatus(absl::string_view what,
                        absl::string_view advice) const {
    if (count_ == 0) return absl::OkStatus();
    return absl::FailedPreconditionError(
        absl::StrCat(what, " in ", count_, " tensor", count_ == 1 ? "" : "s",
                     ": ", absl::StrJoin(named_, "; "),
                     count_ > named_.size() ? "; ..." : "", "; ", advice));
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

// Elements of a tensor; nothing if they are more than fit 64 bits, which a
// tensor table refuses.
std::optional<std::uint64_t> ElementCount(
    const std::vector<std::uint64_t>& shape) {
  std::uint64_t count = 1;
  for (const std::uint64_t extent : shape) {
    if (__builtin_mul_overflow(count, extent, &count)) return {};
  }
  return count;
}

std::string RangeText(const ElementRange& range) {
  return absl::StrCat("[", range.begin, ", ", range.end, ")");
}

// What is wrong with one entry by itself; empty if nothing is.
std::string ProblemOf(const TrainerTensor& tensor) {
  if (!IsValidDType(static_cast<std::uint8_t>(tensor.dtype))) {
    return "no such dtype";
  }
  const auto elements = ElementCount(tensor.shape);
  if (!elements) return "more elements than 64 bits count";
  const ElementRange range = tensor.shard.value_or(ElementRange{0, *elements});
  if (range.begin > range.end || range.end > *elements) {
    return absl::StrCat("shard: expected a range within its ", *elements,
                        " elements, found ", RangeText(range));
  }
  if (tensor.data == nullptr && range.begin < range.end) return "data is null";
  if (tensor.strides_bytes.empty()) return "";
  if (tensor.strides_bytes.size() != tensor.shape.size()) {
    return absl::StrCat(tensor.strides_bytes.size(), " strides for ",
                        tensor.shape.size(), " dimensions");
  }
  if (tensor.shard && *elements > 0 &&
      tensor.strides_bytes !=
          ContiguousStrides(tensor.shape, ElementBytes(tensor.dtype))) {
    const std::uint64_t row =
        tensor.shape.empty() ? 1 : *elements / tensor.shape[0];
    if (range.begin % row != 0 || range.end % row != 0) {
      return absl::StrCat("shard of a view: expected whole rows of ", row,
                          " elements, found ", RangeText(range));
    }
  }
  return "";
}

using ByName = std::map<absl::string_view, std::vector<const TrainerTensor*>>;

// The entries of each name, by shard. Names those that do not fit together.
ByName GroupByName(std::span<const TrainerTensor> tensors,
                   Offenders* offenders) {
  ByName by_name;
  for (const TrainerTensor& tensor : tensors) {
    const std::string problem = ProblemOf(tensor);
    if (!problem.empty()) {
      offenders->Add(absl::StrCat(tensor.name, ": ", problem));
    }
    by_name[tensor.name].push_back(&tensor);
  }
  for (auto& [name, entries] : by_name) {
    std::stable_sort(entries.begin(), entries.end(),
                     [](const TrainerTensor* a, const TrainerTensor* b) {
                       return (a->shard ? a->shard->begin : 0) <
                              (b->shard ? b->shard->begin : 0);
                     });
    const TrainerTensor* before = nullptr;  // with elements
    for (const TrainerTensor* entry : entries) {
      const TrainerTensor& first = *entries.front();
      if (entry->dtype != first.dtype || entry->shape != first.shape ||
          entry->tied_to != first.tied_to) {
        offenders->Add(absl::StrCat(
            name, ": given as ", Describe(first.dtype, first.shape), " and as ",
            Describe(entry->dtype, entry->shape),
            entry->tied_to != first.tied_to ? ", with another tie" : ""));
        break;
      }
      if (entry != &first && !(entry->shard && first.shard)) {
        offenders->Add(absl::StrCat(name, ": given twice"));
        break;
      }
      if (!entry->shard || entry->shard->begin == entry->shard->end) continue;
      if (before != nullptr && before->shard->end > entry->shard->begin) {
        offenders->Add(
            absl::StrCat(name, ": shards overlap: ", RangeText(*before->shard),
                         " and ", RangeText(*entry->shard)));
        break;
      }
      before = entry;
    }
  }
  return by_name;
}

}  // namespace

absl::StatusOr<TensorTable> MakeTable(std::span<const TrainerTensor> tensors) {
  std::vector<TensorSpec> specs;
  std::vector<std::pair<std::string, std::string>> ties;
  std::map<absl::string_view, const TrainerTensor*> seen;
  for (const TrainerTensor& tensor : tensors) {
    // Shards of one tensor are one row; CheckTensors compares them.
    const auto [at, fresh] = seen.emplace(tensor.name, &tensor);
    if (!fresh && tensor.shard && at->second->shard) continue;
    TensorSpec spec;
    spec.name = tensor.name;
    spec.dtype = tensor.dtype;
    spec.shape = tensor.shape;
    specs.push_back(std::move(spec));
    if (!tensor.tied_to.empty()) ties.emplace_back(tensor.name, tensor.tied_to);
  }
  return TensorTable::Create(std::move(specs), ties);
}

absl::Status CheckTensors(std::span<const TrainerTensor> tensors) {
  Offenders offenders;
  GroupByName(tensors, &offenders);
  return offenders.ToStatus("the trainer's tensors contradict themselves",
                            "correct what is given to the writer");
}

absl::StatusOr<MemorySource> MemorySource::Bind(
    const TensorTable& table, std::span<const TrainerTensor> tensors,
    Others others) {
  Offenders offenders;
  ByName by_name = GroupByName(tensors, &offenders);
  MemorySource source;
  source.tensors_.resize(table.size());
  std::vector<OwnedSlice> owned;
  for (std::uint32_t i = 0; i < table.size(); ++i) {
    const TensorSpec& spec = table[i];
    Bound& bound = source.tensors_[i];
    bound.shape = spec.shape;
    bound.element_bytes = ElementBytes(spec.dtype);
    bound.unit_bytes = UnitBytes(spec.dtype);
    const auto found = by_name.find(spec.name);
    if (found == by_name.end()) {
      if (others == Others::kNone) {
        offenders.Add(absl::StrCat(spec.name, ": missing; the store has ",
                                   Describe(spec.dtype, spec.shape)));
      }
      continue;
    }
    const std::vector<const TrainerTensor*> entries = std::move(found->second);
    by_name.erase(found);
    const TrainerTensor& first = *entries.front();
    if (first.dtype != spec.dtype || first.shape != spec.shape) {
      offenders.Add(absl::StrCat(spec.name, ": expected ",
                                 Describe(spec.dtype, spec.shape), ", found ",
                                 Describe(first.dtype, first.shape)));
      continue;
    }
    if (spec.tied_to != kNotTied) continue;
    for (const TrainerTensor* entry : entries) {
      const ElementRange range =
          entry->shard.value_or(ElementRange{0, spec.element_count()});
      if (range.begin >= range.end) continue;
      Part part;
      part.byte_begin = range.begin * bound.element_bytes;
      part.byte_end = range.end * bound.element_bytes;
      part.data = static_cast<const std::byte*>(entry->data);
      if (!entry->strides_bytes.empty() &&
          entry->strides_bytes !=
              ContiguousStrides(spec.shape, bound.element_bytes)) {
        part.strides_bytes = entry->strides_bytes;
      }
      bound.parts.push_back(std::move(part));
      const std::uint32_t units = UnitsPerElement(spec.dtype);
      owned.push_back({i, {range.begin * units, range.end * units}});
    }
  }
  for (const auto& [name, entries] : by_name) {
    offenders.Add(absl::StrCat(name, ": not in the store's table"));
  }
  KEDGE_RETURN_IF_ERROR(offenders.ToStatus(
      "the model does not match the store's tensor table",
      "publish to the store of this model, or replace its table"));
  if (others == Others::kNone) {
    KEDGE_RETURN_IF_ERROR(CheckOwnership(std::span(&owned, 1), table));
  }
  return source;
}

std::optional<std::vector<UnitRange>> MemorySource::Owned(
    std::uint32_t ordinal) const {
  const Bound& tensor = tensors_[ordinal];
  std::vector<UnitRange> ranges;
  for (const Part& part : tensor.parts) {
    ranges.push_back({part.byte_begin / tensor.unit_bytes,
                      part.byte_end / tensor.unit_bytes});
  }
  return ranges;
}

absl::StatusOr<std::span<const std::byte>> MemorySource::Read(
    std::uint32_t ordinal, std::uint64_t byte_begin, std::uint64_t byte_count,
    std::vector<std::byte>* scratch) {
  if (byte_count == 0) return std::span<const std::byte>();
  const Bound& tensor = tensors_[ordinal];
  auto part = std::upper_bound(
      tensor.parts.begin(), tensor.parts.end(), byte_begin,
      [](std::uint64_t at, const Part& p) { return at < p.byte_end; });
  KEDGE_CHECK(part != tensor.parts.end() && byte_begin >= part->byte_begin &&
              byte_count <= part->byte_end - byte_begin);
  byte_begin -= part->byte_begin;
  if (part->strides_bytes.empty()) {
    return std::span<const std::byte>(part->data + byte_begin, byte_count);
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
                part->strides_bytes[d];
      rest /= tensor.shape[d];
    }
    const std::int64_t stride = part->strides_bytes[last];
    const std::byte* from =
        part->data + offset + static_cast<std::int64_t>(col) * stride;
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

std::vector<OwnedSlice> OwnedOf(const TensorTable& table,
                                const TensorSource& source) {
  std::vector<OwnedSlice> owned;
  for (std::uint32_t i = 0; i < table.size(); ++i) {
    if (table[i].tied_to != kNotTied || table[i].unit_count() == 0) continue;
    const auto ranges = source.Owned(i);
    if (!ranges) {
      owned.push_back({i, {0, table[i].unit_count()}});
      continue;
    }
    for (const UnitRange& range : *ranges) owned.push_back({i, range});
  }
  return owned;
}

std::vector<TensorSlice> SplitTable(const TensorTable& table,
                                    std::uint64_t max_units) {
  std::vector<OwnedSlice> everything;
  for (std::uint32_t i = 0; i < table.size(); ++i) {
    if (table[i].tied_to != kNotTied || table[i].unit_count() == 0) continue;
    everything.push_back({i, {0, table[i].unit_count()}});
  }
  return SplitOwned(table, everything, max_units);
}

std::vector<TensorSlice> SplitOwned(const TensorTable& table,
                                    std::span<const OwnedSlice> owned,
                                    std::uint64_t max_units) {
  std::vector<TensorSlice> slices;
  for (const OwnedSlice& range : owned) {
    const TensorSpec& spec = table[range.tensor];
    const TileGrid grid = spec.grid();
    const std::uint64_t band =
        grid.rows == 1 ? grid.tile_cols : grid.cols * grid.tile_rows;
    // Whole elements, and whole bands where one fits.
    const std::uint64_t quantum =
        band > max_units ? UnitsPerElement(spec.dtype) : band;
    const std::uint64_t step =
        std::max<std::uint64_t>(max_units / quantum, 1) * quantum;
    // Cut at multiples of `step` in the tensor, wherever the range begins.
    for (std::uint64_t begin = range.slice.begin; begin < range.slice.end;) {
      const std::uint64_t end =
          std::min((begin / step + 1) * step, range.slice.end);
      slices.push_back({range.tensor, {begin, end}});
      begin = end;
    }
  }
  return slices;
}

}  // namespace kedge
