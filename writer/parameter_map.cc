#include "kedge/writer/parameter_map.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kedge/engine/cpu/slice_encoder.h"
#include "kedge/format/status.h"

namespace kedge {
namespace {

// Whether two parts of a parameter share a byte.
bool Overlap(const MappedPart& a, const MappedPart& b) {
  if (a.end <= b.begin || b.end <= a.begin) return false;
  // Runs that repeat with one period and lie beside each other within it.
  const std::uint64_t a_bytes = a.part.run_elements() * a.part.element_bytes();
  const std::uint64_t b_bytes = b.part.run_elements() * b.part.element_bytes();
  if (a.part.run_period() != 0 && b.part.run_period() != 0) {
    const std::uint64_t period =
        std::gcd(a.part.run_period(), b.part.run_period());
    const std::uint64_t between =
        (b.begin % period + period - a.begin % period) % period;
    if (between >= a_bytes && period - between >= b_bytes) return false;
  }
  // Run by run, where the two reach over each other.
  const std::uint64_t from = std::max(a.begin, b.begin);
  const auto first_run = [from](const MappedPart& part) {
    const std::uint64_t below =
        from <= part.begin ? 0 : part.part.CountBelow(from - part.begin);
    // The run before may reach over `from`.
    return below == 0 ? 0 : (below - 1) / part.part.run_elements();
  };
  std::uint64_t i = first_run(a);
  std::uint64_t j = first_run(b);
  const std::uint64_t a_runs = a.part.element_count() / a.part.run_elements();
  const std::uint64_t b_runs = b.part.element_count() / b.part.run_elements();
  while (i < a_runs && j < b_runs) {
    const std::uint64_t at =
        a.begin +
        static_cast<std::uint64_t>(a.part.Offset(i * a.part.run_elements()));
    const std::uint64_t bt =
        b.begin +
        static_cast<std::uint64_t>(b.part.Offset(j * b.part.run_elements()));
    if (at < bt + b_bytes && bt < at + a_bytes) return true;
    ++(at < bt ? i : j);
  }
  return false;
}

}  // namespace

std::vector<StridedPart::Level> StridedPart::Collapse(
    std::span<const Level> dimensions) {
  std::vector<Level> levels;  // innermost first
  for (std::size_t d = dimensions.size(); d-- > 0;) {
    const Level& level = dimensions[d];
    if (level.extent == 1) continue;
    if (!levels.empty() &&
        level.stride == static_cast<std::int64_t>(levels.back().extent) *
                            levels.back().stride) {
      levels.back().extent *= level.extent;
    } else {
      levels.push_back(level);
    }
  }
  std::reverse(levels.begin(), levels.end());
  return levels;
}

StridedPart::StridedPart(const TrainerTensor& tensor)
    : element_bytes_(ElementBytes(tensor.dtype)),
      units_per_element_(UnitsPerElement(tensor.dtype)),
      grid_(MakeTileGrid(tensor.shape, units_per_element_)) {
  std::uint64_t elements = 1;
  for (const std::uint64_t extent : tensor.shape) elements *= extent;
  const ElementRange range = tensor.shard.value_or(ElementRange{0, elements});
  count_ = range.end - range.begin;
  first_unit_ = range.begin * units_per_element_;

  std::vector<Level> dimensions(tensor.shape.size());
  std::int64_t stride = element_bytes_;
  bool row_major = true;
  for (std::size_t d = dimensions.size(); d-- > 0;) {
    dimensions[d] = {tensor.shape[d], stride};
    stride *= static_cast<std::int64_t>(tensor.shape[d]);
    if (!tensor.strides_bytes.empty()) {
      row_major =
          row_major && (tensor.shape[d] == 1 ||
                        tensor.strides_bytes[d] == dimensions[d].stride);
      dimensions[d].stride = tensor.strides_bytes[d];
    }
  }
  const std::uint64_t row_elements = grid_.cols / units_per_element_;
  if (row_major) {
    // A shard begins and ends anywhere.
    levels_ = {{count_, element_bytes_}};
    columns_ = {row_elements, element_bytes_};
    rows_ = {grid_.rows,
             static_cast<std::int64_t>(row_elements * element_bytes_)};
    regular_columns_ = true;
  } else {
    // A shard is whole rows of the first dimension.
    dimensions[0].extent = count_ / (elements / tensor.shape[0]);
    levels_ = Collapse(dimensions);
    // The dimensions that the tensor's matrix folds into columns.
    std::size_t kept = dimensions.size();
    std::uint64_t cols = 1;
    while (cols < row_elements || kept == dimensions.size()) {
      cols *= tensor.shape[--kept];
    }
    const std::vector<Level> columns =
        Collapse(std::span(dimensions).subspan(kept));
    const std::vector<Level> rows = Collapse(std::span(dimensions).first(kept));
    regular_columns_ = columns.size() <= 1;
    columns_ = columns.empty() ? Level{1, element_bytes_} : columns.back();
    rows_ = rows.empty() ? Level{1, 0} : rows.back();
    if (levels_.empty()) levels_ = {{1, element_bytes_}};
  }

  inner_counts_.resize(levels_.size());
  std::uint64_t inner = 1;
  std::int64_t span = element_bytes_;
  ascends_ = true;
  for (std::size_t l = levels_.size(); l-- > 0;) {
    inner_counts_[l] = inner;
    inner *= levels_[l].extent;
    ascends_ =
        ascends_ && (levels_[l].extent == 1 || levels_[l].stride >= span);
    span +=
        static_cast<std::int64_t>(levels_[l].extent - 1) * levels_[l].stride;
  }
  const bool close = levels_.back().stride == element_bytes_;
  contiguous_ = close && levels_.size() == 1;
  run_elements_ = close ? levels_.back().extent : 1;
  for (std::size_t l = 0; l + (close ? 1 : 0) < levels_.size(); ++l) {
    run_period_ =
        std::gcd(run_period_, static_cast<std::uint64_t>(levels_[l].stride));
  }
}

bool StridedPart::AlignedAt(const void* data) const {
  const std::uint64_t unit_bytes = element_bytes_ / units_per_element_;
  std::uint64_t bits = reinterpret_cast<std::uintptr_t>(data);
  for (const Level& level : levels_) {
    if (level.extent > 1) bits |= static_cast<std::uint64_t>(level.stride);
  }
  return bits % unit_bytes == 0;
}

std::int64_t StridedPart::Offset(std::uint64_t index) const {
  std::int64_t offset = 0;
  for (std::size_t l = 0; l < levels_.size(); ++l) {
    const std::uint64_t i = index / inner_counts_[l];
    index -= i * inner_counts_[l];
    offset += static_cast<std::int64_t>(i) * levels_[l].stride;
  }
  return offset;
}

std::uint64_t StridedPart::CountBelow(std::uint64_t offset) const {
  std::uint64_t count = 0;
  for (std::size_t l = 0; l < levels_.size(); ++l) {
    if (offset == 0) return count;
    const auto stride = static_cast<std::uint64_t>(levels_[l].stride);
    const std::uint64_t i = (offset - 1) / stride;
    // Steps before this one lie below as a whole: each is no longer than the
    // stride.
    if (i >= levels_[l].extent) {
      return count + levels_[l].extent * inner_counts_[l];
    }
    count += i * inner_counts_[l];
    offset -= i * stride;
  }
  return count + (offset > 0 ? 1 : 0);
}

StridedPart::Run StridedPart::RunFrom(std::uint64_t begin, std::uint64_t limit,
                                      const std::byte* at) const {
  Run run;
  const std::uint64_t unit = first_unit_ + begin * units_per_element_;
  const std::uint64_t row = unit / grid_.cols;
  const std::uint64_t col = (unit - row * grid_.cols) / units_per_element_;
  const std::uint64_t row_elements = grid_.cols / units_per_element_;
  run.units.first_row = row;
  run.units.unit_bytes = element_bytes_ / units_per_element_;
  run.units.units_per_element = units_per_element_;
  run.units.col_stride_bytes = columns_.stride;
  run.units.base = at - static_cast<std::int64_t>(col) * columns_.stride;
  if (contiguous_) {
    run.end = limit;
    run.units.row_stride_bytes = rows_.stride;
  } else if (regular_columns_) {
    const std::uint64_t part_row = begin / row_elements;
    const std::uint64_t end_row = (part_row / rows_.extent + 1) * rows_.extent;
    run.end = std::min(limit, end_row * row_elements);
    run.units.row_stride_bytes = rows_.stride;
  } else {
    const std::uint64_t part_col = begin % row_elements;
    run.end =
        std::min(limit, begin + columns_.extent - part_col % columns_.extent);
  }
  run.end = std::min(run.end, begin + kMaxSliceUnits / units_per_element_);
  return run;
}

absl::StatusOr<ParameterMap> ParameterMap::Make(
    std::span<const ParameterSpan> parameters,
    std::span<const TrainerTensor> tensors) {
  std::vector<std::uint32_t> by_address(parameters.size());
  std::iota(by_address.begin(), by_address.end(), 0);
  std::sort(by_address.begin(), by_address.end(),
            [&](std::uint32_t a, std::uint32_t b) {
              return std::pair(parameters[a].data, parameters[a].bytes) <
                     std::pair(parameters[b].data, parameters[b].bytes);
            });
  const ParameterSpan* before = nullptr;
  for (const std::uint32_t p : by_address) {
    const ParameterSpan& parameter = parameters[p];
    if (parameter.bytes == 0) continue;
    if (before != nullptr && before->data + before->bytes > parameter.data) {
      return absl::InvalidArgumentError(absl::StrCat(
          "parameters \"", before->name, "\" and \"", parameter.name,
          "\" share memory: give each storage once, and tied tensors as "
          "TrainerTensor::tied_to"));
    }
    before = &parameter;
  }

  ParameterMap map;
  for (std::uint32_t t = 0; t < tensors.size(); ++t) {
    const TrainerTensor& tensor = tensors[t];
    if (!tensor.tied_to.empty()) continue;
    std::uint64_t elements = 1;
    for (const std::uint64_t extent : tensor.shape) elements *= extent;
    const ElementRange range = tensor.shard.value_or(ElementRange{0, elements});
    if (range.begin >= range.end) continue;
    MappedPart mapped{t, 0, 0, 0, StridedPart(tensor)};
    const auto* const data = static_cast<const std::byte*>(tensor.data);
    if (!mapped.part.ascends()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "tensor \"", tensor.name,
          "\": its elements' addresses do not ascend in row-major order; give "
          "it as a residual tensor"));
    }
    auto at = std::upper_bound(by_address.begin(), by_address.end(), data,
                               [&](const std::byte* address, std::uint32_t p) {
                                 return address < parameters[p].data;
                               });
    // Empty parameters may share an address with the one that is meant.
    const ParameterSpan* parameter = nullptr;
    while (at != by_address.begin() && parameter == nullptr) {
      --at;
      if (parameters[*at].bytes == 0) continue;
      parameter = &parameters[*at];
      mapped.parameter = *at;
    }
    if (parameter == nullptr || data >= parameter->data + parameter->bytes) {
      return absl::InvalidArgumentError(absl::StrCat(
          "tensor \"", tensor.name,
          "\" lies in no parameter; give it as a residual tensor, or its "
          "storage as a parameter"));
    }
    mapped.begin = static_cast<std::uint64_t>(data - parameter->data);
    const std::uint64_t span = mapped.part.span_bytes();
    if (span > parameter->bytes - mapped.begin) {
      return absl::InvalidArgumentError(absl::StrCat(
          "tensor \"", tensor.name, "\": its bytes [", mapped.begin, ", ",
          mapped.begin + span, ") reach beyond the ", parameter->bytes,
          " bytes of parameter \"", parameter->name, "\""));
    }
    mapped.end = mapped.begin + span;
    map.parts_.push_back(std::move(mapped));
  }
  std::stable_sort(map.parts_.begin(), map.parts_.end(),
                   [](const MappedPart& a, const MappedPart& b) {
                     return std::pair(a.parameter, a.begin) <
                            std::pair(b.parameter, b.begin);
                   });
  map.by_parameter_.resize(parameters.size());
  std::vector<std::size_t> open;  // parts that reach over the next one's begin
  for (std::size_t i = 0; i < map.parts_.size(); ++i) {
    const MappedPart& part = map.parts_[i];
    ByParameter& range = map.by_parameter_[part.parameter];
    if (range.count++ == 0) {
      range.first = i;
      open.clear();
    }
    open.erase(std::remove_if(open.begin(), open.end(),
                              [&](std::size_t other) {
                                return map.parts_[other].end <= part.begin;
                              }),
               open.end());
    for (const std::size_t other : open) {
      if (!Overlap(map.parts_[other], part)) continue;
      return absl::InvalidArgumentError(absl::StrCat(
          "tensors \"", tensors[map.parts_[other].tensor].name, "\" and \"",
          tensors[part.tensor].name, "\" share bytes of parameter \"",
          parameters[part.parameter].name,
          "\"; declare one of them tied_to the other, or give it as a residual "
          "tensor"));
    }
    open.push_back(i);
    const std::uint64_t reach = range.count == 1 ? 0 : map.reach_.back();
    map.reach_.push_back(std::max(reach, part.end));
  }
  return map;
}

std::size_t ParameterMap::FirstReaching(const ByParameter& range,
                                        std::uint64_t begin) const {
  const auto first = reach_.begin() + static_cast<std::ptrdiff_t>(range.first);
  return static_cast<std::size_t>(
      std::upper_bound(first, first + static_cast<std::ptrdiff_t>(range.count),
                       begin) -
      reach_.begin());
}

std::uint64_t ParameterMap::CutAtOrBelow(std::uint32_t parameter,
                                         std::uint64_t offset) const {
  const ByParameter& range = by_parameter_[parameter];
  for (bool moved = true; moved;) {
    moved = false;
    for (std::size_t i = FirstReaching(range, offset);
         i < range.first + range.count && parts_[i].begin < offset; ++i) {
      const MappedPart& mapped = parts_[i];
      if (mapped.end <= offset) continue;
      const std::uint64_t below = mapped.part.CountBelow(offset - mapped.begin);
      const std::uint64_t last =
          mapped.begin +
          static_cast<std::uint64_t>(mapped.part.Offset(below - 1));
      if (last + mapped.part.element_bytes() <= offset) continue;
      offset = last;
      moved = true;
    }
  }
  return offset;
}

}  // namespace kedge
