// Goal: on a GPU the fp8 quantiser gives what a plain reading of spec/fp8.md
// gives. Method: as quantise_emulation_test.cc, and all finite bf16 values
// under many scales. KEDGE_FP8_DUMP=folder also writes sources and results
// there, for scripts/quantise_reference.py.

#include <random>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kedge/engine/cuda/quantise.h"
#include "kedge/tests/engine/cuda/cuda_test_support.h"
#include "kedge/tests/engine/cuda/quantise_test_support.h"

namespace kedge {
namespace {

using testing::Fill;
using testing::GpuBytes;
using testing::QuantiseCase;
using testing::ToGpu;

class QuantiseGpuTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!testing::HasGpu()) GTEST_SKIP() << "no CUDA device on this machine";
  }

  void QuantiseAndCompare(QuantiseCase& c) {
    std::uint64_t unused = 0;
    const QuantiseBatch host = c.Batch(&unused);
    c.Poison();
    std::vector<QuantiseTask> tasks(host.tasks, host.tasks + host.task_count);
    std::vector<GpuBytes> memory;
    for (std::size_t t = 0; t < tasks.size(); ++t) {
      const QuantiseCase::Matrix& m = c.matrices()[t];
      tasks[t].source = memory.emplace_back(ToGpu(m.source)).data();
      tasks[t].values = memory.emplace_back(ToGpu(m.values)).data();
      tasks[t].scales = memory.emplace_back(ToGpu(m.scales)).as<float>();
    }
    const GpuBytes table = ToGpu(tasks);
    const GpuBytes first_bad_bytes(8);
    QuantiseBatch batch = host;
    batch.tasks = table.as<QuantiseTask>();
    batch.first_bad_block = first_bad_bytes.as<std::uint64_t>();
    KEDGE_CUDA_MUST(LaunchQuantise(batch, nullptr));
    KEDGE_CUDA_MUST(cudaDeviceSynchronize());
    std::uint64_t first_bad = 0;
    first_bad_bytes.Download(&first_bad, 8);
    for (std::size_t t = 0; t < tasks.size(); ++t) {
      QuantiseCase::Matrix& m = c.matrices()[t];
      memory[3 * t + 1].Download(m.values.data(), m.values.size());
      memory[3 * t + 2].Download(m.scales.data(), 4 * m.scales.size());
    }
    c.ExpectReference(first_bad);
    c.Dump();
  }
};

TEST_F(QuantiseGpuTest, BlocksOfEveryKindAndExtent) {
  std::uint64_t seed = 2000;
  for (const ScaleKind kind : {ScaleKind::kExact, ScaleKind::kPowerOfTwo}) {
    for (const Fill fill : testing::kFills) {
      SCOPED_TRACE(absl::StrCat("seed ", seed + 1));
      QuantiseCase c(++seed, kind);
      for (const auto& [rows, cols] : testing::QuantiseExtents()) {
        c.Add(rows, cols, fill);
      }
      QuantiseAndCompare(c);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(QuantiseGpuTest, EveryFiniteBf16UnderManyScales) {
  for (const ScaleKind kind : {ScaleKind::kExact, ScaleKind::kPowerOfTwo}) {
    QuantiseCase c(3, kind);
    // Four blocks hold all magnitudes up to the block's amax, which differs.
    for (int m = 0; m < 24; ++m) {
      c.Add(128, 512, Fill::kZeros);
      const std::uint32_t limit = 0x3a00 + 0x40 * m + 37 * (m % 3);
      for (std::uint32_t i = 0; i < 128 * 512; ++i) {
        const std::uint32_t magnitude = i / 2 < limit ? i / 2 : limit;
        c.Set(m, i / 512, i % 512,
              static_cast<std::uint16_t>(magnitude | (i % 2) << 15));
      }
      for (int b = 0; b < 4; ++b) {
        c.Set(m, 0, 128 * b, static_cast<std::uint16_t>(limit));
      }
    }
    QuantiseAndCompare(c);
    if (HasFatalFailure()) return;
  }
}

TEST_F(QuantiseGpuTest, NamesTheFirstBlockThatIsNotFinite) {
  for (const std::uint16_t bad : {0x7f80, 0xff80, 0x7fc1, 0xffff}) {
    QuantiseCase c(9, ScaleKind::kExact);
    c.Add(200, 300, Fill::kOrdinary);  // 6 blocks
    c.Add(130, 130, Fill::kOrdinary);  // 4
    c.Set(0, 150, 290, bad);           // block 5
    c.Set(1, 0, 129, bad);             // block 7
    QuantiseAndCompare(c);
    if (HasFatalFailure()) return;
    EXPECT_EQ(c.expected_first_bad(), 5u);
  }
}

}  // namespace
}  // namespace kedge
