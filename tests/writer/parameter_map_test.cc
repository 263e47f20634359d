// Goal: a range of a parameter's bytes gives exactly the units of the tensors
// that lie in it. Method: random views, each unit's address found by the plain
// product of indices and strides, every byte of the parameter owned by hand.

#include "kedge/writer/parameter_map.h"

#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kedge/tests/support/sanitized.h"

namespace kedge {
namespace {

// A view whose addresses ascend, of up to four dimensions with gaps between.
TrainerTensor RandomView(std::mt19937_64& random, const std::byte* data,
                         std::uint64_t* span) {
  static constexpr DType kTypes[] = {DType::kBf16, DType::kF32, DType::kU8,
                                     DType::kF64};
  TrainerTensor tensor;
  tensor.dtype = kTypes[random() % 4];
  tensor.data = data;
  const std::uint64_t rank = random() % 5;
  for (std::uint64_t d = 0; d < rank; ++d) {
    tensor.shape.push_back(1 + random() % (d + 1 == rank ? 40 : 6));
  }
  std::uint64_t bytes = ElementBytes(tensor.dtype);
  tensor.strides_bytes.resize(rank);
  for (std::size_t d = rank; d-- > 0;) {
    // Sometimes close, sometimes with a gap.
    const std::uint64_t stride =
        bytes + (random() % 3 == 0 ? random() % 17 : 0);
    tensor.strides_bytes[d] = static_cast<std::int64_t>(stride);
    bytes = (tensor.shape[d] - 1) * stride + bytes;
  }
  *span = bytes;
  if (rank > 0 && random() % 3 == 0) {
    std::uint64_t row = 1;
    for (std::size_t d = 1; d < rank; ++d) row *= tensor.shape[d];
    const std::uint64_t rows = 1 + random() % tensor.shape[0];
    const std::uint64_t first = random() % (tensor.shape[0] - rows + 1);
    tensor.shard = ElementRange{first * row, (first + rows) * row};
    *span -= (tensor.shape[0] - rows) *
             static_cast<std::uint64_t>(tensor.strides_bytes[0]);
  }
  return tensor;
}

// The offset of each element of what `tensor` holds.
std::vector<std::uint64_t> Offsets(const TrainerTensor& tensor) {
  std::uint64_t count = 1;
  for (const std::uint64_t extent : tensor.shape) count *= extent;
  if (tensor.shard) count = tensor.shard->end - tensor.shard->begin;
  std::vector<std::uint64_t> offsets;
  for (std::uint64_t i = 0; i < count; ++i) {
    std::uint64_t rest = i;
    std::uint64_t offset = 0;
    for (std::size_t d = tensor.shape.size(); d-- > 0;) {
      offset += rest % tensor.shape[d] *
                static_cast<std::uint64_t>(tensor.strides_bytes[d]);
      rest /= tensor.shape[d];
    }
    offsets.push_back(offset);
  }
  return offsets;
}

TEST(ParameterMapTest, GivesTheUnitsOfEveryRange) {
  std::random_device entropy;
  const std::uint64_t seed = entropy();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  for (int round = 0; round < Rounds(300); ++round) {
    // Tensors one after the other.
    std::vector<std::byte> parameter(1 << 20);
    std::vector<TrainerTensor> tensors;
    std::uint64_t at = random() % 8;
    for (int t = 0; t < 4; ++t) {
      std::uint64_t span = 0;
      tensors.push_back(RandomView(random, parameter.data() + at, &span));
      tensors.back().name = std::to_string(t);
      at += span + random() % 5;
    }
    ASSERT_LT(at, parameter.size());
    const ParameterSpan span{"p", parameter.data(), at};
    const auto map = ParameterMap::Make(std::span(&span, 1), tensors);
    ASSERT_TRUE(map.ok()) << map.status();

    for (int cut = 0; cut < 10; ++cut) {
      std::uint64_t begin = map->CutAtOrBelow(0, random() % (at + 1));
      std::uint64_t end = map->CutAtOrBelow(0, random() % (at + 1));
      if (begin > end) std::swap(begin, end);
      // A copy of the range elsewhere.
      const std::vector<std::byte> copy(parameter.begin() + begin,
                                        parameter.begin() + end);
      std::map<std::pair<std::uint32_t, std::uint64_t>, const std::byte*> found;
      map->ForEachRun(
          0, begin, end, copy.data(),
          [&](std::uint32_t p, const UnitRange& units, const StridedUnits& u) {
            const MappedPart& part = map->parts()[p];
            const std::uint64_t cols = part.part.grid().cols;
            for (std::uint64_t i = units.begin; i < units.end; ++i) {
              EXPECT_TRUE(found
                              .emplace(std::pair(part.tensor, i),
                                       u.At(i / cols, i % cols))
                              .second);
            }
            return true;
          });
      std::size_t expected = 0;
      for (std::uint32_t t = 0; t < tensors.size(); ++t) {
        const TrainerTensor& tensor = tensors[t];
        const std::uint64_t base = static_cast<std::uint64_t>(
            static_cast<const std::byte*>(tensor.data) - parameter.data());
        const std::uint32_t units = UnitsPerElement(tensor.dtype);
        const std::uint64_t first =
            tensor.shard ? tensor.shard->begin * units : 0;
        const std::vector<std::uint64_t> offsets = Offsets(tensor);
        for (std::uint64_t i = 0; i < offsets.size(); ++i) {
          const std::uint64_t byte = base + offsets[i];
          if (byte < begin || byte >= end) continue;
          for (std::uint32_t u = 0; u < units; ++u) {
            ++expected;
            const auto unit = found.find({t, first + i * units + u});
            ASSERT_NE(unit, found.end()) << "tensor " << t << " element " << i;
            EXPECT_EQ(unit->second, copy.data() + (byte - begin) + 4 * u);
          }
        }
      }
      EXPECT_EQ(found.size(), expected);
    }
  }
}

TEST(ParameterMapTest, FindsParametersThatShareMemoryBesideAnEmptyOne) {
  std::vector<std::byte> memory(200);
  const std::vector<ParameterSpan> parameters = {
      {"first", memory.data(), 100},
      {"empty", memory.data() + 50, 0},
      {"second", memory.data() + 80, 100}};
  const auto map = ParameterMap::Make(parameters, {});
  EXPECT_EQ(map.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(map.status().message()),
              testing::HasSubstr("\"first\" and \"second\" share memory"));
}

TEST(ParameterMapTest, TellsInterleavedTensorsFromOverlappingOnes) {
  std::mt19937_64 random(11);
  std::vector<std::byte> parameter(4000);
  for (int round = 0; round < 2000; ++round) {
    // Two views of bytes with two strides each, anywhere.
    std::vector<TrainerTensor> tensors(2);
    std::vector<int> owners(parameter.size());
    bool overlap = false;
    for (int t = 0; t < 2; ++t) {
      TrainerTensor& tensor = tensors[t];
      tensor.name = t == 0 ? "a" : "b";
      tensor.dtype = DType::kU8;
      const std::uint64_t run = 1 + random() % 4;
      const std::int64_t inner = static_cast<std::int64_t>(run + random() % 9);
      const std::uint64_t count = 1 + random() % 6;
      const std::int64_t outer = inner * static_cast<std::int64_t>(count) +
                                 static_cast<std::int64_t>(random() % 9);
      tensor.shape = {1 + random() % 8, count, run};
      tensor.strides_bytes = {outer, inner, 1};
      const std::uint64_t at = random() % 100;
      tensor.data = parameter.data() + at;
      for (const std::uint64_t offset : Offsets(tensor)) {
        overlap = overlap || owners[at + offset] == 1 - t + 1;
        owners[at + offset] = t + 1;
      }
    }
    const ParameterSpan span{"p", parameter.data(), parameter.size()};
    const auto map = ParameterMap::Make(std::span(&span, 1), tensors);
    EXPECT_EQ(!map.ok(), overlap) << "round " << round << ": " << map.status();
  }
}

}  // namespace
}  // namespace kedge
