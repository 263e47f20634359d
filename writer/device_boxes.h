#ifndef KEDGE_WRITER_DEVICE_BOXES_H_
#define KEDGE_WRITER_DEVICE_BOXES_H_

// A part of a tensor as boxes, for DeviceSums. Private to writer/.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kedge/engine/device/kernel_tasks.h"
#include "kedge/writer/parameter_map.h"

namespace kedge {

// The boxes of a part at `data`, for checksums.
inline void AddBoxes(const StridedPart& part, const std::byte* data,
                     std::uint32_t output, std::vector<SumBox>* boxes) {
  const std::uint64_t cols = part.grid().cols;
  for (std::uint64_t element = 0; element < part.element_count();) {
    const StridedPart::Run run = part.RunFrom(element, part.element_count(),
                                              data + part.Offset(element));
    const UnitRange units = part.UnitsOf(element, run.end);
    element = run.end;
    for (std::uint64_t at = units.begin; at < units.end;) {
      const std::uint64_t row = at / cols;
      const std::uint64_t col = at - row * cols;
      SumBox box;
      box.cols = cols;
      box.output = output;
      box.box.data = const_cast<std::byte*>(run.units.At(row, col));
      box.box.row_begin = row;
      box.box.col_begin = col;
      const std::uint64_t left = units.end - at;
      if (col == 0 && left >= cols) {
        box.box.row_end = row + left / cols;
        box.box.col_end = cols;
      } else {
        box.box.row_end = row + 1;
        box.box.col_end = std::min(cols, col + left);
      }
      box.box.row_stride_bytes = run.units.row_stride_bytes;
      box.box.col_stride_bytes = run.units.col_stride_bytes;
      box.box.unit_bytes = run.units.unit_bytes;
      box.box.units_per_element = run.units.units_per_element;
      at += box.box.unit_count();
      boxes->push_back(box);
    }
  }
}

}  // namespace kedge

#endif  // KEDGE_WRITER_DEVICE_BOXES_H_
