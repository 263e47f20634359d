// Goal: the offload trainer's parts are what its own checks rely on: views and
// shards cover every element once, gradients do not depend on the ranks, its
// fp8 rule is the format's. Method: brute force over small models, and every
// e4m3 value with its neighbours.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "kedge/examples/model/kernels.h"
#include "kedge/examples/offload_trainer/fp8_reference.h"
#include "kedge/examples/offload_trainer/moe_model.h"
#include "kedge/examples/offload_trainer/reference_state.h"
#include "kedge/examples/offload_trainer/synthetic_gradient.h"
#include "kedge/examples/offload_trainer/thread_team.h"
#include "kedge/format/l61.h"

namespace kedge::example {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(MoeModelTest, HasAboutAsManyParametersAsAskedFor) {
  for (const std::uint64_t asked :
       {std::uint64_t{1'000'000}, std::uint64_t{10'000'000},
        std::uint64_t{100'000'000}, std::uint64_t{5'100'000'000},
        std::uint64_t{30'500'000'000}}) {
    const MoeModel model = MakeMoeModel(ChooseDims(asked));
    const double ratio =
        static_cast<double>(model.elements()) / static_cast<double>(asked);
    EXPECT_NEAR(ratio, 1, 0.01) << asked;
  }
}

// Numbers every element of every parameter by its place in memory, cuts the
// parameters into shards, gathers all parts of all tensors, and compares with
// what the tensor's strides say.
void ExpectPartsCoverEverythingOnce(std::uint32_t ranks, bool whole_blocks) {
  const MoeModel model = MakeMoeModel(ChooseDims(1'000'000));
  std::map<std::string, std::vector<std::uint16_t>> gathered;
  for (std::uint32_t p = 0; p < model.parameters.size(); ++p) {
    const MoeParameter& parameter = model.parameters[p];
    std::vector<std::uint16_t> memory(parameter.elements());
    for (std::size_t i = 0; i < memory.size(); ++i) {
      memory[i] = static_cast<std::uint16_t>(i * 40503 + p);
    }
    std::uint64_t next_row = 0;
    for (std::uint32_t rank = 0; rank < ranks; ++rank) {
      const RowRange rows = ShardOf(parameter, rank, ranks, whole_blocks);
      ASSERT_EQ(rows.begin, next_row) << parameter.name;
      next_row = rows.end;
      for (const MoeTensor& tensor : model.tensors) {
        if (tensor.parameter != p) continue;
        const auto part =
            PartOf(tensor, parameter, rows,
                   reinterpret_cast<const std::byte*>(
                       memory.data() + rows.begin * parameter.row_elements));
        if (!part.has_value()) continue;
        std::vector<std::uint16_t>& whole = gathered[tensor.name];
        const std::uint64_t first =
            part->shard.has_value() ? part->shard->begin : 0;
        ASSERT_EQ(whole.size(), first) << tensor.name;
        if (whole_blocks && tensor.projection) {
          EXPECT_EQ(first / tensor.shape[1] % 128, 0) << tensor.name;
        }
        const std::vector<std::byte> bytes = Gather(*part);
        whole.resize(first + bytes.size() / 2);
        std::memcpy(whole.data() + first, bytes.data(), bytes.size());
      }
    }
    ASSERT_EQ(next_row, parameter.rows) << parameter.name;
    std::uint64_t covered = 0;
    for (const MoeTensor& tensor : model.tensors) {
      if (tensor.parameter != p) continue;
      covered += tensor.elements();
      const std::vector<std::uint16_t>& whole = gathered[tensor.name];
      ASSERT_EQ(whole.size(), tensor.elements()) << tensor.name;
      const std::uint64_t start =
          tensor.first_row * parameter.row_elements + tensor.offset;
      for (std::uint64_t i = 0; i < whole.size(); ++i) {
        std::uint64_t at = start;
        std::uint64_t rest = i;
        for (std::size_t d = tensor.shape.size(); d-- > 0;) {
          at += rest % tensor.shape[d] * tensor.strides[d];
          rest /= tensor.shape[d];
        }
        ASSERT_EQ(whole[i], memory[at]) << tensor.name << " element " << i;
      }
    }
    EXPECT_EQ(covered, parameter.elements()) << parameter.name;
  }
}

TEST(MoeModelTest, TensorsCoverTheirParameters) {
  ExpectPartsCoverEverythingOnce(1, false);
}
TEST(MoeModelTest, ShardsMakeUpTheTensors) {
  ExpectPartsCoverEverythingOnce(3, false);
}
TEST(MoeModelTest, ShardsOfWholeBlocksMakeUpTheTensors) {
  ExpectPartsCoverEverythingOnce(3, true);
}

TEST(SyntheticGradientTest, DoesNotDependOnWhereARankBegins) {
  const SyntheticGradient gradient(7);
  const Kernels& kernels = BestKernels();
  std::vector<float> whole(20'000, 0);
  gradient.Accumulate(kernels, {3, 1, 5}, 0, whole);
  for (const std::uint64_t first : {1, 4095, 4096, 4097, 12'345}) {
    std::vector<float> part(5'000, 0);
    gradient.Accumulate(kernels, {3, 1, 5}, first, part);
    EXPECT_TRUE(std::equal(part.begin(), part.end(), whole.begin() + first))
        << first;
  }
}

TEST(SyntheticGradientTest, DiffersByStepMicroBatchAndParameter) {
  const SyntheticGradient gradient(7);
  std::vector<std::vector<float>> draws;
  for (const SyntheticGradient::Draw draw :
       {SyntheticGradient::Draw{1, 0, 0}, SyntheticGradient::Draw{2, 0, 0},
        SyntheticGradient::Draw{1, 1, 0}, SyntheticGradient::Draw{1, 0, 1}}) {
    draws.emplace_back(1000, 0.0f);
    gradient.Accumulate(BestKernels(), draw, 0, draws.back());
  }
  for (std::size_t i = 0; i < draws.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) EXPECT_NE(draws[i], draws[j]);
  }
}

TEST(ThreadTeamTest, DoesEveryElementOnce) {
  for (const int threads : {1, 2, 5}) {
    ThreadTeam team(threads);
    for (const std::uint64_t count : {0, 1, 4096, 4097, 40'001}) {
      std::vector<std::atomic<int>> done(count);
      team.Run(count, [&](std::uint64_t begin, std::uint64_t end) {
        for (std::uint64_t i = begin; i < end; ++i) ++done[i];
      });
      for (std::uint64_t i = 0; i < count; ++i) ASSERT_EQ(done[i], 1) << i;
    }
  }
}

double FromE4M3(int bits) {
  const int exponent = (bits >> 3) & 15;
  const int mantissa = bits & 7;
  return exponent == 0 ? std::ldexp(mantissa, -9)
                       : std::ldexp(8 + mantissa, exponent - 10);
}

TEST(Fp8ReferenceTest, RoundsToTheNearestAndTiesToEven) {
  for (int bits = 0; bits < 0x7e; ++bits) {
    const auto value = static_cast<float>(FromE4M3(bits));
    const auto middle =
        static_cast<float>((FromE4M3(bits) + FromE4M3(bits + 1)) / 2);
    EXPECT_EQ(ToE4M3(value), bits);
    EXPECT_EQ(ToE4M3(-value), bits | 0x80);
    EXPECT_EQ(ToE4M3(middle), bits + bits % 2);
    EXPECT_EQ(ToE4M3(std::nextafter(middle, 0.0f)), bits);
    EXPECT_EQ(ToE4M3(std::nextafter(middle, 1000.0f)), bits + 1);
  }
  EXPECT_EQ(ToE4M3(448.0f), 0x7e);
  EXPECT_EQ(ToE4M3(1e9f), 0x7e);
  EXPECT_EQ(ToE4M3(-1e9f), 0xfe);
}

TEST(Fp8ReferenceTest, ScalesByBlocksOf128By128) {
  const std::uint64_t rows = 130;
  const std::uint64_t cols = 200;
  std::vector<std::uint16_t> weights(rows * cols, 0x3f80);  // 1
  weights[0] = 0x4000;                                      // 2, block 0
  weights[129 * cols + 199] = 0xc080;  // -4, the last block
  const QuantisedRows quantised = Quantise(weights, cols, 1e-12f);
  EXPECT_THAT(quantised.scales, ::testing::ElementsAre(2 / 448.0f, 1 / 448.0f,
                                                       1 / 448.0f, 4 / 448.0f));
  EXPECT_EQ(quantised.values[0], 0x7e);                 // 448
  EXPECT_EQ(quantised.values[1], 0x76);                 // 224
  EXPECT_EQ(quantised.values[199], 0x7e);               // 448
  EXPECT_EQ(quantised.values[129 * cols + 199], 0xfe);  // -448
}

TEST(ReferenceStateTest, NamesTensorsThatAreNotWhatTheMastersSay) {
  const L61Key key = L61Key::FromSeed(11);
  const L61Summer summer(key);
  const std::uint64_t shape[] = {4, 3};
  std::vector<std::byte> bytes(24);
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = static_cast<std::byte>(i * 7 + 1);
  }
  ReferenceState reference(false);
  for (const char* const name : {"right", "wrong"}) {
    // Two ranks' parts.
    reference.Add(name, DType::kBf16, shape, 0, std::span(bytes).first(10),
                  summer);
    reference.Add(name, DType::kBf16, shape, 10, std::span(bytes).subspan(10),
                  summer);
  }
  reference.Add("half", DType::kBf16, shape, 0, std::span(bytes).first(12),
                summer);
  std::vector<kedge::TensorSpec> specs;
  for (const char* const name : {"half", "right", "wrong"}) {
    kedge::TensorSpec& spec = specs.emplace_back();
    spec.name = name;
    spec.dtype = DType::kBf16;
    spec.shape = {4, 3};
  }
  const auto table = TensorTable::Create(specs);
  ASSERT_TRUE(table.ok());
  const std::uint64_t sum = L61SumScalar(key, 0, bytes);
  const std::uint64_t l61[] = {sum, sum, sum + 1};
  const absl::Status status = reference.CompareWith(*table, l61);
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("2 of 3 tensors"), HasSubstr("half: bytes"),
                    HasSubstr("wrong: checksum")));
}

}  // namespace
}  // namespace kedge::example
