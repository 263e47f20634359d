#ifndef KEDGE_WRITER_PARAMETER_MAP_H_
#define KEDGE_WRITER_PARAMETER_MAP_H_

// Where the elements of tensors lie in a trainer's parameters, and which units
// of which tensors a range of a parameter's bytes holds. Private to writer/.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kedge/engine/device/kernel_tasks.h"
#include "kedge/format/tensor_table.h"
#include "kedge/format/tile_grid.h"
#include "kedge/writer/tensor_source.h"

namespace kedge {

// A tensor, or a shard of one, as strides have it in memory. Its elements are
// numbered from 0 in row-major order; an *offset* counts bytes from where
// TrainerTensor::data points.
class StridedPart {
 public:
  // `tensor` has passed CheckTensors and holds at least one element.
  explicit StridedPart(const TrainerTensor& tensor);

  std::uint64_t element_count() const { return count_; }
  std::uint32_t element_bytes() const { return element_bytes_; }
  const TileGrid& grid() const { return grid_; }  // of the whole tensor
  // The units of the tensor that the part holds.
  UnitRange units() const { return UnitsOf(0, count_); }
  UnitRange UnitsOf(std::uint64_t begin, std::uint64_t end) const {
    return {first_unit_ + begin * units_per_element_,
            first_unit_ + end * units_per_element_};
  }

  // Whether every element lies behind the one before it, with no byte shared.
  bool ascends() const { return ascends_; }
  bool contiguous() const { return contiguous_; }
  // Whether every unit lies at a multiple of its size, with element 0 at
  // `data`: a GPU faults on others.
  bool AlignedAt(const void* data) const;
  // Where element `index` lies.
  std::int64_t Offset(std::uint64_t index) const;
  // The bytes from the first element to the last one's end; ascends() only.
  std::uint64_t span_bytes() const {
    return static_cast<std::uint64_t>(Offset(count_ - 1)) + element_bytes_;
  }
  // How many elements begin below `offset`; ascends() only. O(dimensions).
  std::uint64_t CountBelow(std::uint64_t offset) const;

  // The longest run of elements [begin, end), end <= limit, whose units lie at
  // one row stride and one column stride, of at most kMaxSliceUnits units, as
  // seen with the element `begin` at `at`.
  struct Run {
    std::uint64_t end = 0;
    StridedUnits units;
  };
  Run RunFrom(std::uint64_t begin, std::uint64_t limit,
              const std::byte* at) const;

  // Bytes of elements that follow each other in memory without a gap, from
  // every multiple of that many elements on.
  std::uint64_t run_elements() const { return run_elements_; }
  // What all offsets of such runs are multiples of; 0 if there is one run.
  std::uint64_t run_period() const { return run_period_; }

 private:
  struct Level {
    std::uint64_t extent = 0;
    std::int64_t stride = 0;
  };
  static std::vector<Level> Collapse(std::span<const Level> dimensions);

  std::uint64_t count_ = 0;
  std::uint64_t first_unit_ = 0;
  std::uint32_t element_bytes_ = 0;
  std::uint32_t units_per_element_ = 0;
  TileGrid grid_;
  std::vector<Level> levels_;                // outermost first
  std::vector<std::uint64_t> inner_counts_;  // elements of one step of a level
  bool ascends_ = false;
  bool contiguous_ = false;
  std::uint64_t run_elements_ = 0;
  std::uint64_t run_period_ = 0;
  // Strides within the tensor's matrix.
  bool regular_columns_ = false;  // one column stride for a whole row
  Level columns_;                 // the innermost run of a row
  Level rows_;                    // rows at one stride
};

// A trainer's storage, as HookedParameter has it.
struct ParameterSpan {
  std::string name;
  const std::byte* data = nullptr;
  std::uint64_t bytes = 0;
};

// A tensor's part in a parameter.
struct MappedPart {
  std::uint32_t tensor = 0;     // index in what Make was given
  std::uint32_t parameter = 0;  // index likewise
  std::uint64_t begin = 0;      // bytes of the parameter: of the first element
  std::uint64_t end = 0;        // behind the last one
  StridedPart part;
};

// Thread safety: immutable; const methods may run concurrently.
class ParameterMap {
 public:
  // kInvalidArgument names tensors that lie in no parameter, or beyond its end,
  // whose addresses do not ascend, or that share bytes; and parameters that
  // overlap. Tied tensors, and those without elements, are passed over.
  static absl::StatusOr<ParameterMap> Make(
      std::span<const ParameterSpan> parameters,
      std::span<const TrainerTensor> tensors);

  std::span<const MappedPart> parts() const { return parts_; }

  // Calls visit(part index, units, StridedUnits) for every run of units in
  // bytes [begin, end) of a parameter, of which `at` is a copy, until it
  // returns false. No element lies across an end (FirstWholeEnd). Allocates
  // nothing.
  template <typename Visit>
  void ForEachRun(std::uint32_t parameter, std::uint64_t begin,
                  std::uint64_t end, const std::byte* at, Visit&& visit) const;

  // The last byte in [0, offset] at which the parameter can be cut: no element
  // lies across it.
  std::uint64_t CutAtOrBelow(std::uint32_t parameter,
                             std::uint64_t offset) const;

 private:
  struct ByParameter {
    std::size_t first = 0;  // in parts_
    std::size_t count = 0;
  };
  ParameterMap() = default;
  // The first part of a parameter that may reach beyond `begin`.
  std::size_t FirstReaching(const ByParameter& range,
                            std::uint64_t begin) const;

  std::vector<MappedPart> parts_;     // ascending by (parameter, begin)
  std::vector<std::uint64_t> reach_;  // the largest end so far, per parameter
  std::vector<ByParameter> by_parameter_;
};

// ------------------------------------------------------------------ internals

template <typename Visit>
void ParameterMap::ForEachRun(std::uint32_t parameter, std::uint64_t begin,
                              std::uint64_t end, const std::byte* at,
                              Visit&& visit) const {
  const ByParameter& range = by_parameter_[parameter];
  for (std::size_t i = FirstReaching(range, begin);
       i < range.first + range.count && parts_[i].begin < end; ++i) {
    const MappedPart& mapped = parts_[i];
    if (mapped.end <= begin) continue;
    const StridedPart& part = mapped.part;
    std::uint64_t element =
        begin <= mapped.begin ? 0 : part.CountBelow(begin - mapped.begin);
    const std::uint64_t last = part.CountBelow(end - mapped.begin);
    while (element < last) {
      const std::byte* const first =
          at + (static_cast<std::int64_t>(mapped.begin) + part.Offset(element) -
                static_cast<std::int64_t>(begin));
      const StridedPart::Run run = part.RunFrom(element, last, first);
      if (!visit(static_cast<std::uint32_t>(i), part.UnitsOf(element, run.end),
                 run.units)) {
        return;
      }
      element = run.end;
    }
  }
}

}  // namespace kedge

#endif  // KEDGE_WRITER_PARAMETER_MAP_H_
