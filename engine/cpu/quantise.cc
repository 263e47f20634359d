#include "kedge/engine/cpu/quantise.h"

#include <algorithm>
#include <cstddef>

#include "kedge/format/fp8.h"

namespace kedge {
namespace {

// Loops over a row's units that compilers turn into vector code.
std::uint16_t LargestMagnitude(const std::uint16_t* units, std::size_t count) {
  std::uint16_t largest = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const auto magnitude =
        static_cast<std::uint16_t>(units[i] & kBf16Magnitude);
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

void ConvertRow(const std::uint16_t* units, std::size_t count, float scale,
                std::uint8_t* values) {
  for (std::size_t i = 0; i < count; ++i) {
    values[i] = Fp8OfFloat(DivideIeee(FloatOfBf16(units[i]), scale));
  }
}

// False if the block holds a NaN or an infinity.
bool QuantiseBlock(const QuantiseBatch& batch, const QuantiseTask& task,
                   std::uint64_t block) {
  const std::uint64_t blocks_across =
      (task.cols + kFp8BlockExtent - 1) / kFp8BlockExtent;
  const std::uint64_t row = block / blocks_across * kFp8BlockExtent;
  const std::uint64_t col = block % blocks_across * kFp8BlockExtent;
  const auto height = static_cast<std::size_t>(
      std::min<std::uint64_t>(kFp8BlockExtent, task.rows - row));
  const auto width = static_cast<std::size_t>(
      std::min<std::uint64_t>(kFp8BlockExtent, task.cols - col));
  const auto source = [&](std::size_t r) {
    return reinterpret_cast<const std::uint16_t*>(
        task.source +
        static_cast<std::int64_t>(row + r) * task.source_row_stride_bytes +
        static_cast<std::int64_t>(col * 2));
  };
  std::uint16_t largest = 0;
  for (std::size_t r = 0; r < height; ++r) {
    largest = std::max(largest, LargestMagnitude(source(r), width));
  }
  const float amax = FloatOfBf16(largest);
  const float scale = batch.scale_kind == ScaleKind::kExact
                          ? Fp8ExactScale(amax, batch.floor)
                          : Fp8PowerOfTwoScale(amax, batch.floor);
  task.scales[block] = scale;
  auto* const values = reinterpret_cast<std::uint8_t*>(task.values);
  for (std::size_t r = 0; r < height; ++r) {
    ConvertRow(source(r), width, scale, values + (row + r) * task.cols + col);
  }
  return largest < kBf16NotFinite;
}

}  // namespace

std::uint64_t QuantiseBlocks(const QuantiseBatch& batch, std::uint64_t begin,
                             std::uint64_t end) {
  std::uint64_t first_bad = ~std::uint64_t{0};
  std::uint32_t t = 0;
  for (std::uint64_t block = begin; block < end; ++block) {
    while (t + 1 < batch.task_count &&
           batch.tasks[t + 1].first_block <= block) {
      ++t;
    }
    const QuantiseTask& task = batch.tasks[t];
    if (!QuantiseBlock(batch, task, block - task.first_block)) {
      first_bad = std::min(first_bad, block);
    }
  }
  return first_bad;
}

void Quantise(const QuantiseBatch& batch) {
  *batch.first_bad_block = QuantiseBlocks(batch, 0, batch.block_count);
}

}  // namespace kedge
