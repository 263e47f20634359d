#ifndef KEDGE_FORMAT_BOX_TARGET_H_
#define KEDGE_FORMAT_BOX_TARGET_H_

// Where a part of a tensor lies in memory, of the host or of a device.

#include <cstddef>
#include <cstdint>

#include "kedge/format/host_device.h"

namespace kedge {

// The units [row_begin, row_end) x [col_begin, col_end) of a tensor's [rows,
// cols] matrix (format/tile_grid.h), in memory with two strides. For tensors of
// 8-byte elements cols count 32-bit units, the box holds whole elements, and
// the column stride is that of an element.
struct BoxTarget {
  std::byte* data = nullptr;  // of unit (row_begin, col_begin)
  std::uint64_t row_begin = 0;
  std::uint64_t row_end = 0;
  std::uint64_t col_begin = 0;
  std::uint64_t col_end = 0;
  std::int64_t row_stride_bytes = 0;
  std::int64_t col_stride_bytes = 0;    // of one element
  std::uint32_t unit_bytes = 0;         // 1, 2 or 4
  std::uint32_t units_per_element = 1;  // 1 or 2

  KEDGE_HOST_DEVICE bool Contains(std::uint64_t row, std::uint64_t col) const {
    return row >= row_begin && row < row_end && col >= col_begin &&
           col < col_end;
  }
  // The address of a unit inside the box.
  KEDGE_HOST_DEVICE std::byte* At(std::uint64_t row, std::uint64_t col) const {
    const std::uint64_t c = col - col_begin;
    return data +
           static_cast<std::int64_t>(row - row_begin) * row_stride_bytes +
           static_cast<std::int64_t>(c / units_per_element) * col_stride_bytes +
           static_cast<std::int64_t>((c % units_per_element) * unit_bytes);
  }
  KEDGE_HOST_DEVICE std::uint64_t unit_count() const {
    return (row_end - row_begin) * (col_end - col_begin);
  }
  // Whether a row's units follow each other without a gap.
  KEDGE_HOST_DEVICE bool rows_are_contiguous() const {
    return col_stride_bytes ==
           static_cast<std::int64_t>(unit_bytes * units_per_element);
  }
};

}  // namespace kedge

#endif  // KEDGE_FORMAT_BOX_TARGET_H_
