// Goal: Device::Quantise gives the values and scales of engine/cpu, bit for
// bit, and the lowest block that has none. Method: tasks of every shape around
// the block's edges with ordinary, zero, tiny, huge and single-element blocks,
// many a batch; poisoned and guarded outputs.

#include "kedge/engine/cpu/quantise.h"

#include <cstring>
#include <random>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kedge/tests/engine/device/device_test_support.h"

namespace kedge {
namespace {

using testing::DeviceArray;
using testing::DeviceBuffer;
using testing::DeviceTest;
using testing::Must;

using QuantiseTest = DeviceTest;

constexpr std::uint64_t kBlock = 128;

struct Matrix {
  std::uint64_t rows;
  std::uint64_t cols;
  std::uint64_t pitch;  // elements from row to row

  std::uint64_t blocks() const {
    return (rows + kBlock - 1) / kBlock * ((cols + kBlock - 1) / kBlock);
  }
};

// bf16 weights of all kinds: block by block ordinary ones, zeros of both signs,
// subnormals, the largest there are, or one element alone.
std::vector<std::uint16_t> RandomWeights(std::mt19937_64& rng,
                                         const Matrix& m) {
  std::vector<std::uint16_t> weights(m.rows * m.pitch);
  for (std::uint16_t& w : weights) w = static_cast<std::uint16_t>(rng());
  for (std::uint64_t row0 = 0; row0 < m.rows; row0 += kBlock) {
    for (std::uint64_t col0 = 0; col0 < m.cols; col0 += kBlock) {
      const std::uint64_t kind = rng() % 6;
      // Exponents of the block lie in 16 or fewer steps below this one.
      const std::uint64_t top = 1 + rng() % 254;
      for (std::uint64_t r = row0; r < std::min(row0 + kBlock, m.rows); ++r) {
        for (std::uint64_t c = col0; c < std::min(col0 + kBlock, m.cols); ++c) {
          const std::uint64_t bits = rng();
          std::uint64_t exponent =
              top - std::min<std::uint64_t>(top, rng() % 16);
          std::uint64_t mantissa = bits & 0x7f;
          if (kind == 0) exponent = mantissa = 0;
          if (kind == 1) exponent = 0;
          if (kind == 2) exponent = 254 - (bits >> 8) % 2;
          if (kind == 3 && (r != row0 || c != col0)) exponent = mantissa = 0;
          weights[r * m.pitch + c] = static_cast<std::uint16_t>(
              (bits >> 63) << 15 | exponent << 7 | mantissa);
        }
      }
    }
  }
  return weights;
}

struct Quantised {
  std::vector<std::byte> values;
  std::vector<std::byte> scales;
};

// Quantises all matrices in one batch, on the host and on the device, and
// compares. Returns the lowest bad block.
std::uint64_t ExpectSame(Device& device, const std::vector<Matrix>& matrices,
                         const std::vector<std::vector<std::uint16_t>>& weights,
                         ScaleKind scale_kind, float floor) {
  std::vector<DeviceBuffer> sources;
  std::vector<DeviceBuffer> values;
  std::vector<DeviceBuffer> scales;
  std::vector<Quantised> expected(matrices.size());
  std::vector<QuantiseTask> tasks;
  std::vector<QuantiseTask> host_tasks;
  std::uint64_t blocks = 0;
  for (std::size_t i = 0; i < matrices.size(); ++i) {
    const Matrix& m = matrices[i];
    sources.emplace_back(device, std::as_bytes(std::span(weights[i])),
                         2 * (i % 5));
    values.emplace_back(device, m.rows * m.cols, i % 3);
    scales.emplace_back(device, m.blocks() * sizeof(float), 4 * (i % 2));
    expected[i].values.resize(m.rows * m.cols);
    expected[i].scales.resize(m.blocks() * sizeof(float));
    QuantiseTask task;
    task.source = sources.back().data();
    task.source_row_stride_bytes = static_cast<std::int64_t>(2 * m.pitch);
    task.rows = m.rows;
    task.cols = m.cols;
    task.values = values.back().data();
    task.scales = reinterpret_cast<float*>(scales.back().data());
    task.first_block = blocks;
    tasks.push_back(task);
    task.source = reinterpret_cast<const std::byte*>(weights[i].data());
    task.values = expected[i].values.data();
    task.scales = reinterpret_cast<float*>(expected[i].scales.data());
    host_tasks.push_back(task);
    blocks += m.blocks();
  }
  const DeviceArray<QuantiseTask> tasks_there(device, tasks);
  const DeviceArray<std::uint64_t> first_bad(device, 1);
  std::uint64_t host_first_bad = 12345;
  QuantiseBatch batch;
  batch.tasks = host_tasks.data();
  batch.task_count = static_cast<std::uint32_t>(tasks.size());
  batch.block_count = blocks;
  batch.scale_kind = scale_kind;
  batch.floor = floor;
  batch.first_bad_block = &host_first_bad;
  Quantise(batch);
  batch.tasks = tasks_there.data();
  batch.first_bad_block = first_bad.data();
  const OwnedStream stream = Must(device.CreateStream());
  Must(device.Quantise(batch, stream.get()));
  Must(device.WaitForStream(stream.get()));
  EXPECT_EQ(first_bad.Read()[0], host_first_bad);
  EXPECT_TRUE(first_bad.GuardsIntact());
  for (std::size_t i = 0; i < matrices.size(); ++i) {
    SCOPED_TRACE(absl::StrCat("matrix ", i, ": ", matrices[i].rows, "x",
                              matrices[i].cols));
    EXPECT_TRUE(values[i].GuardsIntact());
    EXPECT_TRUE(scales[i].GuardsIntact());
    if (host_first_bad != ~std::uint64_t{0}) continue;
    EXPECT_TRUE(values[i].Read() == expected[i].values);
    EXPECT_TRUE(scales[i].Read() == expected[i].scales);
  }
  return host_first_bad;
}

std::vector<Matrix> Matrices() {
  std::vector<Matrix> matrices = {
      {1, 1, 1},       {1, 128, 128},   {128, 128, 128}, {129, 127, 127},
      {127, 129, 131}, {300, 260, 260}, {5, 1000, 1003}, {256, 512, 512},
      {1, 4097, 4097}, {700, 3, 3}};
  if (testing::TestDeviceIsGpu()) matrices.push_back({2048, 7168, 7168});
  return matrices;
}

TEST_F(QuantiseTest, ValuesAndScalesAreThoseOfTheCpu) {
  std::uint64_t seed = 5000;
  for (const ScaleKind kind : {ScaleKind::kExact, ScaleKind::kPowerOfTwo}) {
    for (const float floor : {1e-12f, 1e-4f, 3.0f}) {
      std::mt19937_64 rng(++seed);
      SCOPED_TRACE(absl::StrCat("seed ", seed));
      const std::vector<Matrix> matrices = Matrices();
      std::vector<std::vector<std::uint16_t>> weights;
      for (const Matrix& m : matrices) weights.push_back(RandomWeights(rng, m));
      EXPECT_EQ(ExpectSame(device(), matrices, weights, kind, floor),
                ~std::uint64_t{0});
    }
  }
}

TEST_F(QuantiseTest, TheLowestBlockWithANanOrAnInfinityIsNamed) {
  std::mt19937_64 rng(7);
  const std::vector<Matrix> matrices = {
      {300, 260, 260}, {129, 127, 130}, {5, 1000, 1000}};
  for (int round = 0; round < Rounds(20); ++round) {
    std::vector<std::vector<std::uint16_t>> weights;
    for (const Matrix& m : matrices) weights.push_back(RandomWeights(rng, m));
    std::uint64_t lowest = ~std::uint64_t{0};
    std::uint64_t first_block = 0;
    for (std::size_t i = 0; i < matrices.size(); ++i) {
      const Matrix& m = matrices[i];
      for (int n = 0; n < round % 3; ++n) {
        const std::uint64_t row = rng() % m.rows;
        const std::uint64_t col = rng() % m.cols;
        static constexpr std::uint16_t kBad[] = {0x7f80, 0xff80, 0x7fc0, 0xffff,
                                                 0x7f81};
        weights[i][row * m.pitch + col] = kBad[rng() % std::size(kBad)];
        const std::uint64_t across = (m.cols + kBlock - 1) / kBlock;
        lowest = std::min(lowest,
                          first_block + row / kBlock * across + col / kBlock);
      }
      first_block += m.blocks();
    }
    EXPECT_EQ(
        ExpectSame(device(), matrices, weights, ScaleKind::kExact, 1e-12f),
        lowest);
  }
}

TEST_F(QuantiseTest, AnEmptyBatchHasNoBadBlock) {
  EXPECT_EQ(ExpectSame(device(), {}, {}, ScaleKind::kExact, 1.0f),
            ~std::uint64_t{0});
}

}  // namespace
}  // namespace kedge
