// Goal: every instruction set this CPU has computes the same model. Method:
// each kernel of each level against plain loops in double precision, over
// shapes with odd tails, and canaries around what a kernel may write.

#include "kedge/examples/model/kernels.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kedge/examples/model/bf16.h"
#include "kedge/examples/model/model.h"
#include "kedge/examples/model/text.h"

namespace kedge::example {
namespace {

constexpr float kCanary = 12345.0f;

class KernelsTest : public testing::TestWithParam<const Kernels*> {
 protected:
  static constexpr std::uint64_t kSeed = 7;

  void SetUp() override { RecordProperty("seed", std::to_string(kSeed)); }

  std::vector<float> Normals(std::int64_t n, double deviation = 1.0) {
    std::vector<float> x(static_cast<std::size_t>(n));
    for (float& v : x) v = static_cast<float>(deviation * random_.Normal());
    return x;
  }

  const Kernels& kernels() const { return *GetParam(); }

  Random random_{kSeed};
};

INSTANTIATE_TEST_SUITE_P(
    Levels, KernelsTest, testing::ValuesIn(SupportedKernels()),
    [](const testing::TestParamInfo<const Kernels*>& level) {
      std::string name;
      for (const char* c = level.param->level; *c != '\0'; ++c) {
        if (*c != '-') name += *c;
      }
      return name;
    });

TEST_P(KernelsTest, MultiplyMatchesPlainLoopsAndWritesOnlyC) {
  for (int round = 0; round < 400; ++round) {
    Gemm g;
    g.m = static_cast<int>(random_.Below(40));
    g.n = 1 + static_cast<int>(random_.Below(round % 8 == 0 ? 100 : 40));
    g.k = 1 + static_cast<int>(random_.Below(round % 8 == 0 ? 600 : 60));
    g.a_transposed = random_.Below(2) == 1;
    g.b_transposed = random_.Below(2) == 1;
    g.accumulate = random_.Below(2) == 1;
    const auto pad = [&] { return static_cast<int>(random_.Below(4)); };
    g.a_stride = (g.a_transposed ? g.m : g.k) + pad();
    g.b_stride = (g.b_transposed ? g.k : g.n) + pad();
    g.c_stride = g.n + pad();
    const std::vector<float> a =
        Normals(std::int64_t{g.a_transposed ? g.k : g.m} * g.a_stride);
    const std::vector<float> b =
        Normals(std::int64_t{g.b_transposed ? g.n : g.k} * g.b_stride);
    std::vector<float> c(static_cast<std::size_t>(g.m) * g.c_stride + 16,
                         kCanary);
    for (int i = 0; i < g.m; ++i) {
      for (int j = 0; j < g.n; ++j) c[i * g.c_stride + j] = 3.0f;
    }
    FloatBuffer scratch(GemmScratchFloats(g.m));
    g.a = a.data();
    g.b = b.data();
    g.c = c.data();
    g.scratch = scratch.data();
    kernels().multiply(g);
    const std::string where =
        "seed " + std::to_string(kSeed) + ", round " + std::to_string(round);
    for (int i = 0; i < g.m; ++i) {
      for (int j = 0; j < g.c_stride; ++j) {
        const float found = c[i * g.c_stride + j];
        if (j >= g.n) {
          ASSERT_EQ(found, kCanary) << where;
          continue;
        }
        double expected = g.accumulate ? 3.0 : 0.0;
        for (int p = 0; p < g.k; ++p) {
          expected +=
              static_cast<double>(g.a_transposed ? a[p * g.a_stride + i]
                                                 : a[i * g.a_stride + p]) *
              static_cast<double>(g.b_transposed ? b[j * g.b_stride + p]
                                                 : b[p * g.b_stride + j]);
        }
        ASSERT_NEAR(found, expected, 1e-4) << where << ", " << i << ", " << j;
      }
    }
    for (int i = 0; i < 16; ++i) ASSERT_EQ(c[c.size() - 1 - i], kCanary);
  }
}

TEST_P(KernelsTest, GatedMatchesDoublePrecision) {
  const std::int64_t n = 1003;
  std::vector<float> gate = Normals(n, 8);
  gate[0] = 0;
  gate[1] = 100;
  gate[2] = -100;
  const std::vector<float> up = Normals(n);
  std::vector<float> out(n);
  kernels().gated(gate.data(), up.data(), n, out.data());
  for (std::int64_t i = 0; i < n; ++i) {
    const double g = gate[i];
    const double expected = g * up[i] / (1 + std::exp(-g));
    EXPECT_NEAR(out[i], expected, 1e-6 * std::fabs(expected) + 1e-20) << g;
  }
}

TEST_P(KernelsTest, CausalSoftmaxRowsSumToOneAndSeeNoLaterToken) {
  for (const int tokens : {1, 2, 15, 16, 17, 37}) {
    std::vector<float> scores = Normals(tokens * tokens, 5);
    const std::vector<float> before = scores;
    kernels().causal_softmax(scores.data(), tokens, 0.5f);
    for (int t = 0; t < tokens; ++t) {
      double sum = 0;
      for (int i = 0; i <= t; ++i)
        sum += std::exp(0.5 * before[t * tokens + i]);
      for (int i = 0; i < tokens; ++i) {
        const double expected =
            i <= t ? std::exp(0.5 * before[t * tokens + i]) / sum : 0;
        ASSERT_NEAR(scores[t * tokens + i], expected, 1e-6);
      }
    }
  }
}

TEST_P(KernelsTest, CrossEntropyMatchesDoublePrecision) {
  const int rows = 5;
  const int classes = 100;
  std::vector<float> logits = Normals(rows * classes, 3);
  const std::vector<float> before = logits;
  const std::vector<std::uint8_t> targets = {0, 99, 50, 7, 7};
  double expected = 0;
  std::vector<double> gradient(logits.size());
  for (int r = 0; r < rows; ++r) {
    double sum = 0;
    for (int i = 0; i < classes; ++i) sum += std::exp(before[r * classes + i]);
    expected += std::log(sum) - before[r * classes + targets[r]];
    for (int i = 0; i < classes; ++i) {
      gradient[r * classes + i] =
          0.25 * (std::exp(before[r * classes + i]) / sum -
                  (i == targets[r] ? 1.0 : 0.0));
    }
  }
  EXPECT_NEAR(kernels().cross_entropy(logits.data(), targets.data(), rows,
                                      classes, 0.25f),
              expected, 1e-5);
  for (std::size_t i = 0; i < logits.size(); ++i) {
    EXPECT_NEAR(logits[i], gradient[i], 1e-6);
  }
}

TEST_P(KernelsTest, SumOfSquaresMatchesDoublePrecisionOverManyBlocks) {
  for (const std::int64_t n : {0, 1, 15, 16, 17, 16384, 16385, 100003}) {
    const std::vector<float> x = Normals(n);
    double expected = 0;
    for (const float v : x) expected += static_cast<double>(v) * v;
    EXPECT_NEAR(kernels().sum_of_squares(x.data(), n), expected,
                1e-5 * expected);
  }
}

TEST_P(KernelsTest, AdamWFollowsItsFormulaAndRoundsTheMasters) {
  const std::int64_t n = 517;
  const AdamWStep step{.rate = 1e-2f,
                       .beta1 = 0.9f,
                       .beta2 = 0.95f,
                       .correction1 = 2.0f,
                       .correction2 = 3.0f,
                       .epsilon = 1e-8f,
                       .weight_decay = 0.1f,
                       .gradient_scale = 0.5f};
  const std::vector<float> gradient = Normals(n);
  std::vector<float> m = Normals(n);
  std::vector<float> v = Normals(n);
  for (float& x : v) x *= x;
  std::vector<float> w = Normals(n);
  const std::vector<float> m0 = m;
  const std::vector<float> v0 = v;
  const std::vector<float> w0 = w;
  std::vector<std::uint16_t> bf16(n);
  kernels().adamw(step, gradient.data(), n, m.data(), v.data(), w.data(),
                  bf16.data());
  for (std::int64_t i = 0; i < n; ++i) {
    const double g = 0.5 * gradient[i];
    const double m1 = 0.9 * m0[i] + 0.1 * g;
    const double v1 = 0.95 * v0[i] + 0.05 * g * g;
    const double expected =
        w0[i] * (1 - 1e-2 * 0.1) - 1e-2 * (2 * m1) / (std::sqrt(3 * v1) + 1e-8);
    EXPECT_NEAR(m[i], m1, 1e-6);
    EXPECT_NEAR(v[i], v1, 2e-6);
    EXPECT_NEAR(w[i], expected, 1e-5);
    EXPECT_EQ(bf16[i], FloatToBf16(w[i]));
  }
}

TEST_P(KernelsTest, SignSgdMovesByTheRateAndNotAtAllWithoutGradient) {
  const std::vector<float> gradient = {2.0f, -1e-30f, 0.0f, -0.0f};
  std::vector<float> w = {1.0f, 1.0f, 1.0f, -1.0f};
  std::vector<std::uint16_t> bf16(4);
  kernels().sign_sgd(0.25f, gradient.data(), 4, w.data(), bf16.data());
  EXPECT_EQ(w, (std::vector<float>{0.75f, 1.25f, 1.0f, -1.0f}));
  for (int i = 0; i < 4; ++i) EXPECT_EQ(bf16[i], FloatToBf16(w[i]));
}

TEST_P(KernelsTest, VectorisedRoundingEqualsTheScalarOneForSpecialValues) {
  const float infinity = std::numeric_limits<float>::infinity();
  std::vector<float> w = {infinity,
                          -infinity,
                          std::bit_cast<float>(0x7f800001u),
                          std::bit_cast<float>(0xffffffffu),
                          std::bit_cast<float>(0x3f808000u),
                          std::bit_cast<float>(0x3f818000u),
                          -0.0f,
                          std::numeric_limits<float>::max()};
  while (w.size() < 67) w.push_back(w[w.size() - 8]);
  const std::vector<float> before = w;
  const std::vector<float> gradient(w.size(), 0.0f);
  std::vector<std::uint16_t> bf16(w.size());
  kernels().sign_sgd(1.0f, gradient.data(), static_cast<std::int64_t>(w.size()),
                     w.data(), bf16.data());
  for (std::size_t i = 0; i < w.size(); ++i) {
    if (std::isnan(before[i])) {
      EXPECT_EQ(bf16[i] & 0x7fc0, 0x7fc0);
    } else {
      EXPECT_EQ(bf16[i], FloatToBf16(before[i])) << i;
    }
  }
}

}  // namespace
}  // namespace kedge::example
