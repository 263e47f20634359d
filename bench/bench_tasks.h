#ifndef KEDGE_BENCH_BENCH_TASKS_H_
#define KEDGE_BENCH_BENCH_TASKS_H_

// What the benchmarks' own kernels are given, and their plain form.

#include <cstdint>

#include "kedge/bench/synthetic_weights.h"
#include "kedge/format/box_target.h"
#include "kedge/format/host_device.h"

namespace kedge {

// A box of a tensor's [rows, cols] matrix that is to hold a synthetic version.
struct FillTask {
  BoxTarget box;
  std::uint64_t cols = 0;
  SyntheticTensor tensor;
  std::uint64_t version = 0;

  // Writes unit `i` of the box, in row-major order.
  KEDGE_HOST_DEVICE void Write(std::uint64_t i) const {
    const std::uint64_t width = box.col_end - box.col_begin;
    const std::uint64_t row = box.row_begin + i / width;
    const std::uint64_t col = box.col_begin + i % width;
    const std::uint32_t bits = tensor.At(row * cols + col, version);
    std::byte* const to = box.At(row, col);
    if (box.unit_bytes == 1) {
      *reinterpret_cast<std::uint8_t*>(to) = static_cast<std::uint8_t>(bits);
    } else if (box.unit_bytes == 2) {
      *reinterpret_cast<std::uint16_t*>(to) = static_cast<std::uint16_t>(bits);
    } else {
      *reinterpret_cast<std::uint32_t*>(to) = bits;
    }
  }
};

// A part of what a read-only pass reads: aligned to 16, `words` of 16 bytes.
struct ReadPart {
  const std::byte* data = nullptr;
  std::uint64_t words = 0;
};
inline constexpr std::uint64_t kReadPartBytes = std::uint64_t{512} << 10;
// The pass has as many forms; which is fastest depends on the device.
inline constexpr int kReadForms = 3;

// Changes of one tile: those from `first` on, at offsets from `base`.
struct ScatterRun {
  std::byte* base = nullptr;
  std::uint64_t first = 0;
  std::uint32_t count = 0;
  std::uint32_t unit_bytes = 0;  // 1, 2 or 4
};
struct ScatterBatch {
  const ScatterRun* runs = nullptr;
  std::uint32_t run_count = 0;
  const std::uint32_t* offsets = nullptr;  // in units
  const std::int16_t* values = nullptr;

  KEDGE_HOST_DEVICE void Write(const ScatterRun& run, std::uint64_t i) const {
    const std::uint32_t offset = offsets[run.first + i];
    const auto value =
        static_cast<std::uint32_t>(std::int32_t{values[run.first + i]});
    if (run.unit_bytes == 1) {
      auto* const to = reinterpret_cast<std::uint8_t*>(run.base) + offset;
      *to = static_cast<std::uint8_t>(*to + value);
    } else if (run.unit_bytes == 2) {
      auto* const to = reinterpret_cast<std::uint16_t*>(run.base) + offset;
      *to = static_cast<std::uint16_t>(*to + value);
    } else {
      reinterpret_cast<std::uint32_t*>(run.base)[offset] += value;
    }
  }
};

}  // namespace kedge

#endif  // KEDGE_BENCH_BENCH_TASKS_H_
