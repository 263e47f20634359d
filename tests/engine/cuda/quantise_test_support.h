#ifndef KEDGE_TESTS_ENGINE_CUDA_QUANTISE_TEST_SUPPORT_H_
#define KEDGE_TESTS_ENGINE_CUDA_QUANTISE_TEST_SUPPORT_H_

// Matrices for the fp8 quantiser, in host memory, and what must come of them by
// a plain reading of spec/fp8.md: shared by the tests of its three forms.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kedge/engine/device/kernel_tasks.h"

namespace kedge::testing {

inline double ValueOfFp8(std::uint32_t code) {  // 0 to 0x7e
  const int exponent = static_cast<int>(code >> 3);
  const int fraction = static_cast<int>(code & 7);
  return exponent == 0 ? std::ldexp(fraction, -9)
                       : std::ldexp(8 + fraction, exponent - 10);
}

// Searches all values for the nearest, ties to the even code.
inline std::uint8_t ReferenceFp8(float value) {
  static const std::vector<double> values = [] {
    std::vector<double> all;
    for (std::uint32_t code = 0; code <= 0x7e; ++code) {
      all.push_back(ValueOfFp8(code));
    }
    return all;
  }();
  const double magnitude = std::fabs(static_cast<double>(value));
  std::uint32_t code = 0x7e;
  if (magnitude < 448) {
    const auto above =
        std::upper_bound(values.begin(), values.end(), magnitude);
    code = static_cast<std::uint32_t>(above - values.begin()) - 1;
    const double to_low = magnitude - values[code];
    const double to_high = *above - magnitude;
    if (to_high < to_low || (to_high == to_low && code % 2 == 1)) ++code;
  }
  return static_cast<std::uint8_t>(code | (std::signbit(value) ? 0x80 : 0));
}

// A quotient of floats rounded to double and then to float is rounded right.
inline float ReferenceDivide(float x, float y) {
  return static_cast<float>(static_cast<double>(x) / static_cast<double>(y));
}

inline float ReferenceScale(float amax, float floor, ScaleKind kind) {
  const float exact = ReferenceDivide(std::max(amax, floor), 448.0f);
  if (kind == ScaleKind::kExact) return exact;
  int exponent = 0;
  const float fraction = std::frexp(exact, &exponent);  // [0.5, 1)
  return std::ldexp(1.0f, fraction == 0.5f ? exponent - 1 : exponent);
}

inline float FloatOf(std::uint16_t bf16) {
  const std::uint32_t bits = std::uint32_t{bf16} << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline std::uint16_t Bf16Of(float value) {  // truncates
  std::uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return static_cast<std::uint16_t>(bits >> 16);
}

enum class Fill { kZeros, kTiny, kOrdinary, kWide, kAnyFinite };
inline constexpr Fill kFills[] = {Fill::kZeros, Fill::kTiny, Fill::kOrdinary,
                                  Fill::kWide, Fill::kAnyFinite};

inline std::vector<std::pair<std::uint64_t, std::uint64_t>> QuantiseExtents() {
  return {{1, 1},     {1, 130},   {130, 1},   {128, 128},
          {127, 129}, {256, 384}, {200, 136}, {3, 1000}};
}

// A batch with its memory. Tasks' rows lie with gaps of random size.
class QuantiseCase {
 public:
  QuantiseCase(std::uint64_t seed, ScaleKind kind) : rng_(seed), kind_(kind) {}

  void Add(std::uint64_t rows, std::uint64_t cols, Fill fill) {
    Matrix m;
    m.rows = rows;
    m.cols = cols;
    // Half of them as kernels like them best: rows at multiples of 16 bytes.
    m.pitch = rng_() % 2 == 0 ? (cols + 7) / 8 * 8 : cols + rng_() % 5;
    m.source.resize(rows * m.pitch + 8);
    for (std::uint16_t& unit : m.source) {
      unit = static_cast<std::uint16_t>(rng_());  // also between rows
    }
    const std::uint64_t blocks = (rows + 127) / 128 * ((cols + 127) / 128);
    m.values.resize(rows * cols + kGuard);
    m.scales.resize(blocks + kGuard);
    m.first_block = block_count_;
    block_count_ += blocks;
    matrices_.push_back(std::move(m));
    for (std::uint64_t r = 0; r < rows; ++r) {
      for (std::uint64_t c = 0; c < cols; ++c) {
        Set(matrices_.size() - 1, r, c, Draw(fill));
      }
    }
  }
  void Set(std::size_t task, std::uint64_t row, std::uint64_t col,
           std::uint16_t unit) {
    Matrix& m = matrices_[task];
    m.source[row * m.pitch + col] = unit;
  }

  struct Matrix {
    std::uint64_t rows = 0;
    std::uint64_t cols = 0;
    std::uint64_t pitch = 0;  // units
    std::vector<std::uint16_t> source;
    std::vector<std::uint8_t> values;
    std::vector<float> scales;
    std::uint64_t first_block = 0;
  };
  std::vector<Matrix>& matrices() { return matrices_; }
  std::uint64_t block_count() const { return block_count_; }
  ScaleKind kind() const { return kind_; }
  static constexpr float kFloor = 1e-12f;

  QuantiseBatch Batch(std::uint64_t* first_bad) {
    tasks_.clear();
    for (Matrix& m : matrices_) {
      tasks_.push_back({reinterpret_cast<const std::byte*>(m.source.data()),
                        static_cast<std::int64_t>(2 * m.pitch), m.rows, m.cols,
                        reinterpret_cast<std::byte*>(m.values.data()),
                        m.scales.data(), m.first_block});
    }
    return {tasks_.data(), static_cast<std::uint32_t>(tasks_.size()),
            block_count_,  kind_,
            kFloor,        first_bad};
  }
  void Poison() {
    for (Matrix& m : matrices_) {
      std::fill(m.values.begin(), m.values.end(), 0x7f);
      std::fill(m.scales.begin(), m.scales.end(), -12345.0f);
    }
  }

  std::uint64_t expected_first_bad() const {
    for (const Matrix& m : matrices_) {
      const std::uint64_t across = (m.cols + 127) / 128;
      const std::uint64_t blocks = (m.rows + 127) / 128 * across;
      for (std::uint64_t b = 0; b < blocks; ++b) {
        if (!std::isfinite(Amax(m, b / across * 128, b % across * 128))) {
          return m.first_block + b;
        }
      }
    }
    return ~std::uint64_t{0};
  }

  // Blocks that are not finite mean nothing and are not compared.
  void ExpectReference(std::uint64_t first_bad) const {
    ASSERT_EQ(first_bad, expected_first_bad());
    for (std::size_t t = 0; t < matrices_.size(); ++t) {
      const Matrix& m = matrices_[t];
      const std::uint64_t across = (m.cols + 127) / 128;
      for (std::uint64_t row = 0; row < m.rows; row += 128) {
        for (std::uint64_t col = 0; col < m.cols; col += 128) {
          const float amax = Amax(m, row, col);
          if (!std::isfinite(amax)) continue;
          const float scale = ReferenceScale(amax, kFloor, kind_);
          const std::uint64_t block = row / 128 * across + col / 128;
          ASSERT_EQ(m.scales[block], scale)
              << "task " << t << " block " << block;
          for (std::uint64_t r = row; r < std::min(m.rows, row + 128); ++r) {
            for (std::uint64_t c = col; c < std::min(m.cols, col + 128); ++c) {
              const float x = FloatOf(m.source[r * m.pitch + c]);
              ASSERT_EQ(m.values[r * m.cols + c],
                        ReferenceFp8(ReferenceDivide(x, scale)))
                  << "task " << t << " row " << r << " col " << c << " x " << x
                  << " scale " << scale;
            }
          }
        }
      }
      for (std::size_t i = m.rows * m.cols; i < m.values.size(); ++i) {
        ASSERT_EQ(m.values[i], 0x7f) << "behind the values";
      }
      for (std::size_t i = m.scales.size() - kGuard; i < m.scales.size(); ++i) {
        ASSERT_EQ(m.scales[i], -12345.0f) << "behind the scales";
      }
    }
  }

  // Writes sources and results into the folder that KEDGE_FP8_DUMP names, if it
  // does, as scripts/quantise_reference.py reads them.
  void Dump() const {
    static int dumped = 0;
    const char* const folder = std::getenv("KEDGE_FP8_DUMP");
    if (folder == nullptr) return;
    for (const Matrix& m : matrices_) {
      std::ofstream out(
          std::string(folder) + "/" + std::to_string(dumped++) + ".fp8",
          std::ios::binary);
      const auto put = [&](const void* data, std::uint64_t bytes) {
        out.write(static_cast<const char*>(data),
                  static_cast<std::streamsize>(bytes));
      };
      const std::uint64_t head[] = {static_cast<std::uint64_t>(kind_), m.rows,
                                    m.cols};
      put(head, sizeof(head));
      for (std::uint64_t r = 0; r < m.rows; ++r) {
        put(m.source.data() + r * m.pitch, 2 * m.cols);
      }
      put(m.values.data(), m.rows * m.cols);
      put(m.scales.data(), 4 * (m.scales.size() - kGuard));
      ASSERT_TRUE(out.flush()) << folder;
    }
  }

 private:
  static constexpr std::size_t kGuard = 16;

  std::uint16_t Draw(Fill fill) {
    const float sign = rng_() % 2 == 0 ? 1.0f : -1.0f;
    switch (fill) {
      case Fill::kZeros:
        return rng_() % 2 == 0 ? 0 : 0x8000;
      case Fill::kTiny:  // below the floor, subnormals too
        return Bf16Of(sign *
                      std::ldexp(1.0f, -60 - static_cast<int>(rng_() % 75)));
      case Fill::kOrdinary:
        return Bf16Of(normal_(rng_) * 0.02f);
      case Fill::kWide:  // from far above to far below
        return Bf16Of(sign * std::ldexp(1.0f + 0.125f * (rng_() % 8),
                                        20 - static_cast<int>(rng_() % 60)));
      case Fill::kAnyFinite: {
        const auto unit = static_cast<std::uint16_t>(rng_());
        return (unit & 0x7f80) == 0x7f80 ? unit & 0x807f : unit;
      }
    }
    return 0;
  }
  static float Amax(const Matrix& m, std::uint64_t row, std::uint64_t col) {
    float amax = 0;
    for (std::uint64_t r = row; r < std::min(m.rows, row + 128); ++r) {
      for (std::uint64_t c = col; c < std::min(m.cols, col + 128); ++c) {
        const float x = std::fabs(FloatOf(m.source[r * m.pitch + c]));
        if (!std::isfinite(x)) return x;
        amax = std::max(amax, x);
      }
    }
    return amax;
  }

  std::mt19937_64 rng_;
  std::normal_distribution<float> normal_;
  ScaleKind kind_;
  std::vector<Matrix> matrices_;
  std::vector<QuantiseTask> tasks_;
  std::uint64_t block_count_ = 0;
};

}  // namespace kedge::testing

#endif  // KEDGE_TESTS_ENGINE_CUDA_QUANTISE_TEST_SUPPORT_H_
