// Goal: what the GPU benchmarks measure is the model they name, and its
// contents are the same whoever computes them. Method: counts and bytes of
// Qwen3-30B-A3B, halves against the whole, the writer's fast source against the
// definition.

#include <cstring>
#include <set>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kedge/bench/qwen3_shapes.h"
#include "kedge/bench/synthetic_source.h"
#include "kedge/format/tensor_table.h"

namespace kedge {
namespace {

std::uint64_t BytesOf(const Qwen3Tensor& tensor) {
  return tensor.element_count() * ElementBytes(tensor.dtype);
}

TEST(Qwen3ShapesTest, AreThoseOfTheCheckpoint) {
  const auto tensors = Qwen3Tensors(ScaledQwen3(1.0), Qwen3Format::kBf16);
  EXPECT_EQ(tensors.size(), 18'867u);
  std::uint64_t elements = 0;
  std::set<std::string> names;
  for (const Qwen3Tensor& tensor : tensors) {
    elements += tensor.element_count();
    names.insert(tensor.name);
  }
  EXPECT_EQ(elements, 30'532'122'624u);
  EXPECT_EQ(names.size(), tensors.size());
  EXPECT_EQ(names.count("model.layers.47.mlp.experts.127.down_proj.weight"),
            1u);
  EXPECT_EQ(LayOutQwen3(tensors, 0, 2).bytes, 30'544'916'480u);
}

TEST(Qwen3ShapesTest, HalvesAreTheWhole) {
  for (const double scale : {1.0, 0.05, 0.002}) {
    for (const auto format : {Qwen3Format::kBf16, Qwen3Format::kFp8}) {
      const auto tensors = Qwen3Tensors(ScaledQwen3(scale), format);
      const Qwen3Layout halves[] = {LayOutQwen3(tensors, 0, 2),
                                    LayOutQwen3(tensors, 1, 2)};
      for (std::size_t i = 0; i < tensors.size(); ++i) {
        const Qwen3Place& a = halves[0].places[i];
        const Qwen3Place& b = halves[1].places[i];
        ASSERT_EQ(a.offset + a.bytes <= halves[0].buffer_bytes[a.buffer], true);
        ASSERT_GT(a.bytes, 0u) << tensors[i].name << " at " << scale;
        if (tensors[i].cut == Qwen3Cut::kNone) {
          ASSERT_EQ(a.bytes, BytesOf(tensors[i]));
          ASSERT_EQ(a.extent, b.extent);
          continue;
        }
        ASSERT_EQ(a.bytes + b.bytes, BytesOf(tensors[i])) << tensors[i].name;
        const std::size_t d = tensors[i].cut == Qwen3Cut::kRows ? 0 : 1;
        ASSERT_EQ(a.begin[d] + a.extent[d], b.begin[d]);
      }
    }
  }
}

TEST(SyntheticSourceTest, ReadsWhatTheDefinitionSays) {
  for (const DType dtype : {DType::kBf16, DType::kF8E4M3, DType::kF32}) {
    const auto table = TensorTable::Create({{"a", dtype, {37, 129}}});
    ASSERT_TRUE(table.ok());
    const SyntheticTensor expected = SyntheticOf("a", dtype, 0.03);
    const std::uint64_t unit = UnitBytes(dtype);
    for (const std::uint64_t version : {0, 1, 2}) {
      SyntheticSource source(&*table, 0.03, version);
      for (const std::uint64_t begin : {0, 1, 2, 3, 4, 511}) {
        for (const std::uint64_t count : {0, 1, 3, 4, 7, 4096}) {
          std::vector<std::byte> scratch;
          const auto read =
              source.Read(0, begin * unit, count * unit, &scratch);
          ASSERT_TRUE(read.ok());
          ASSERT_EQ(read->size(), count * unit);
          for (std::uint64_t i = 0; i < count; ++i) {
            std::uint32_t found = 0;
            std::memcpy(&found, read->data() + i * unit, unit);
            ASSERT_EQ(found, expected.At(begin + i, version))
                << DTypeName(dtype) << " v" << version << " element "
                << begin + i;
          }
        }
      }
    }
  }
}

TEST(SyntheticSourceTest, AnOddVersionChangesTheShareThatIsAskedFor) {
  const SyntheticTensor tensor = SyntheticOf("a", DType::kBf16, 0.008);
  constexpr std::uint64_t kElements = 1'000'000;
  std::uint64_t changed = 0;
  std::uint64_t by_one = 0;
  for (std::uint64_t i = 0; i < kElements; ++i) {
    const int difference =
        static_cast<int>(tensor.At(i, 1)) - static_cast<int>(tensor.At(i, 0));
    changed += difference != 0;
    by_one += difference == 1 || difference == -1;
    ASSERT_EQ(tensor.At(i, 2), tensor.At(i, 0));
  }
  // Within six standard deviations.
  EXPECT_NEAR(static_cast<double>(changed), 0.008 * kElements, 600);
  EXPECT_NEAR(static_cast<double>(by_one), 0.9 * static_cast<double>(changed),
              200);
}

}  // namespace
}  // namespace kedge
