#ifndef KEDGE_TESTS_SUPPORT_FP8_FORM_H_
#define KEDGE_TESTS_SUPPORT_FP8_FORM_H_

// What a bf16 matrix is as fp8, by engine/cpu.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "gtest/gtest.h"
#include "kedge/engine/cpu/quantise.h"

namespace kedge {

struct Fp8Form {
  std::vector<std::byte> values;  // [rows, cols] e4m3fn
  std::vector<float> scales;      // of blocks of 128x128, row by row
};

// Of all of a matrix [rows, cols], which holds neither NaNs nor infinities.
inline Fp8Form Fp8FormOf(std::span<const std::uint16_t> bf16,
                         std::uint64_t rows, std::uint64_t cols,
                         ScaleKind scale_kind, float floor) {
  Fp8Form form;
  form.values.assign(rows * cols, std::byte{0x7f});
  form.scales.assign((rows + 127) / 128 * ((cols + 127) / 128), -1);
  QuantiseTask task;
  task.source = reinterpret_cast<const std::byte*>(bf16.data());
  task.source_row_stride_bytes = static_cast<std::int64_t>(cols * 2);
  task.rows = rows;
  task.cols = cols;
  task.values = form.values.data();
  task.scales = form.scales.data();
  std::uint64_t bad = 0;
  QuantiseBatch batch;
  batch.tasks = &task;
  batch.task_count = 1;
  batch.block_count = form.scales.size();
  batch.scale_kind = scale_kind;
  batch.floor = floor;
  batch.first_bad_block = &bad;
  Quantise(batch);
  EXPECT_EQ(bad, ~std::uint64_t{0});
  return form;
}

}  // namespace kedge

#endif  // KEDGE_TESTS_SUPPORT_FP8_FORM_H_
