#include "kedge/engine/cpu/l61_sum.h"

#include <algorithm>
#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kedge/engine/cpu/l61_sum.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

// What all targets share.
#ifndef KEDGE_ENGINE_CPU_L61_SUM_ONCE_
#define KEDGE_ENGINE_CPU_L61_SUM_ONCE_
namespace kedge::internal {

// A[t] = high[t] * 2^29 + low[t], so that a product with a 32-bit word stays
// below 2^61 and eight of them add up in 64 bits.
struct SplitWeights {
  static constexpr int kLowBits = 29;
  // Vector loads may pass the end.
  static constexpr std::uint32_t kPadding = 16;
  alignas(64) std::uint32_t low[kL61TileWords + kPadding] = {};
  alignas(64) std::uint32_t high[kL61TileWords + kPadding] = {};
};

inline constexpr std::uint64_t kRowBytes = 4 * std::uint64_t{kL61TileWords};

// Sum of A[t] * word over a part of a row: below 2^12 * 2^58 * 2^32.
using RowSum = unsigned __int128;

inline std::uint64_t Residue(RowSum sum) {
  return L61Add(L61Reduce(static_cast<std::uint64_t>(sum) & kL61Prime),
                L61Reduce(static_cast<std::uint64_t>(sum >> 61)));
}

}  // namespace kedge::internal
#endif  // KEDGE_ENGINE_CPU_L61_SUM_ONCE_

HWY_BEFORE_NAMESPACE();
namespace kedge::internal {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// `rows` sums side by side, each of `words` words from word `first` of A on:
// row r's words stand at bytes + r * kRowBytes, at any alignment. Adds to
// sums[r]. Prefetches the same places `prefetch_bytes` further on.
#if HWY_TARGET == HWY_SCALAR
template <int rows>
void SumRows(const SplitWeights& weights, const std::uint8_t* bytes,
             std::uint32_t first, std::uint32_t words, std::ptrdiff_t,
             RowSum* sums) {
  for (int r = 0; r < rows; ++r) {
    for (std::uint32_t i = 0; i < words; ++i) {
      std::uint32_t word;
      std::memcpy(&word, bytes + r * kRowBytes + 4 * std::size_t{i}, 4);
      const std::uint64_t a = std::uint64_t{weights.high[first + i]}
                                  << SplitWeights::kLowBits |
                              weights.low[first + i];
      sums[r] += RowSum{a} * word;
    }
  }
}
#else
template <int rows>
void SumRows(const SplitWeights& weights, const std::uint8_t* bytes,
             std::uint32_t first, std::uint32_t words,
             std::ptrdiff_t prefetch_bytes, RowSum* sums) {
  const hn::ScalableTag<std::uint32_t> d32;
  const hn::RepartitionToWide<decltype(d32)> d64;
  using V32 = hn::Vec<decltype(d32)>;
  using V64 = hn::Vec<decltype(d64)>;
  const auto lanes = static_cast<std::uint32_t>(hn::Lanes(d32));
  const V64 zero = hn::Zero(d64);
  const V64 half = hn::Set(d64, 0xffffffffu);

  // Totals of the low and high 32 bits of the products' sums.
  V64 total_low[rows][2];
  V64 total_high[rows][2];
  for (int r = 0; r < rows; ++r) {
    for (int part = 0; part < 2; ++part) {
      total_low[r][part] = zero;
      total_high[r][part] = zero;
    }
  }
  std::uint32_t i = 0;
  while (i + lanes <= words) {
    // Four vectors of words are eight products a lane.
    const std::uint32_t end = std::min(words, i + 4 * lanes);
    V64 sum[rows][2];
    for (int r = 0; r < rows; ++r) sum[r][0] = sum[r][1] = zero;
    if (prefetch_bytes != 0) {
      for (int r = 0; r < rows; ++r) {
        const std::uintptr_t at = reinterpret_cast<std::uintptr_t>(bytes) +
                                  r * kRowBytes + 4 * i + prefetch_bytes;
        for (std::uint32_t line = 0; line < 16 * lanes; line += 64) {
          __builtin_prefetch(reinterpret_cast<const void*>(at + line), 0, 3);
        }
      }
    }
    for (; i + lanes <= end; i += lanes) {
      const V32 low = hn::LoadU(d32, weights.low + first + i);
      const V32 high = hn::LoadU(d32, weights.high + first + i);
      const V32 low_odd =
          hn::BitCast(d32, hn::ShiftRight<32>(hn::BitCast(d64, low)));
      const V32 high_odd =
          hn::BitCast(d32, hn::ShiftRight<32>(hn::BitCast(d64, high)));
      for (int r = 0; r < rows; ++r) {
        const V32 word =
            hn::LoadU(d32, reinterpret_cast<const std::uint32_t*>(
                               bytes + r * kRowBytes + 4 * std::size_t{i}));
        const V32 word_odd =
            hn::BitCast(d32, hn::ShiftRight<32>(hn::BitCast(d64, word)));
        sum[r][0] = hn::Add(sum[r][0], hn::Add(hn::MulEven(word, low),
                                               hn::MulEven(word_odd, low_odd)));
        sum[r][1] = hn::Add(
            sum[r][1],
            hn::Add(hn::MulEven(word, high), hn::MulEven(word_odd, high_odd)));
      }
    }
    for (int r = 0; r < rows; ++r) {
      for (int part = 0; part < 2; ++part) {
        total_low[r][part] =
            hn::Add(total_low[r][part], hn::And(sum[r][part], half));
        total_high[r][part] =
            hn::Add(total_high[r][part], hn::ShiftRight<32>(sum[r][part]));
      }
    }
  }
  for (int r = 0; r < rows; ++r) {
    RowSum parts[2];
    for (int part = 0; part < 2; ++part) {
      parts[part] =
          RowSum{hn::GetLane(hn::SumOfLanes(d64, total_low[r][part]))} +
          (RowSum{hn::GetLane(hn::SumOfLanes(d64, total_high[r][part]))} << 32);
    }
    sums[r] += parts[0] + (parts[1] << SplitWeights::kLowBits);
    for (std::uint32_t j = i; j < words; ++j) {
      std::uint32_t word;
      std::memcpy(&word, bytes + r * kRowBytes + 4 * std::size_t{j}, 4);
      const std::uint64_t a = std::uint64_t{weights.high[first + j]}
                                  << SplitWeights::kLowBits |
                              weights.low[first + j];
      sums[r] += RowSum{a} * word;
    }
  }
}
#endif  // HWY_TARGET == HWY_SCALAR

void SumOneRow(const SplitWeights& weights, const std::uint8_t* bytes,
               std::uint32_t first, std::uint32_t words, RowSum* sum) {
  SumRows<1>(weights, bytes, first, words, 0, sum);
}

// Four whole rows; what follows them is about to be summed too.
void SumFourRows(const SplitWeights& weights, const std::uint8_t* bytes,
                 RowSum* sums) {
  // The last part of each row asks for the first part of the same row of the
  // next four.
  constexpr std::uint32_t kAhead = 512;  // words
  SumRows<4>(weights, bytes, 0, kL61TileWords - kAhead, 4 * kAhead, sums);
  SumRows<4>(weights, bytes + 4 * (kL61TileWords - kAhead),
             kL61TileWords - kAhead, kAhead, 3 * kRowBytes + 4 * kAhead, sums);
}

}  // namespace HWY_NAMESPACE
}  // namespace kedge::internal
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kedge {
namespace internal {
HWY_EXPORT(SumOneRow);
HWY_EXPORT(SumFourRows);
}  // namespace internal

struct L61Summer::Impl {
  explicit Impl(const L61Key& k) : key(k) {
    constexpr std::uint64_t kMask =
        (std::uint64_t{1} << internal::SplitWeights::kLowBits) - 1;
    for (std::uint32_t t = 0; t < kL61TileWords; ++t) {
      const std::uint64_t a = key.A(t);
      weights.low[t] = static_cast<std::uint32_t>(a & kMask);
      weights.high[t] =
          static_cast<std::uint32_t>(a >> internal::SplitWeights::kLowBits);
    }
  }
  std::uint64_t A(std::uint64_t t) const {
    return std::uint64_t{weights.high[t]} << internal::SplitWeights::kLowBits |
           weights.low[t];
  }

  L61Key key;
  internal::SplitWeights weights;
};

namespace {

// Sums of words that share a B, folded into the total when B changes.
class Accumulator {
 public:
  explicit Accumulator(const L61Key& key) : key_(key) {}

  // The sum that products of row `q` are added to; good until the next call.
  internal::RowSum* Row(std::uint64_t q) {
    // A box may have 2^24 parts of a row: keep the sum below 2^104.
    if (q != q_ || row_ >> 104 != 0) {
      Fold();
      q_ = q;
    }
    return &row_;
  }
  void AddRow(std::uint64_t q, internal::RowSum sum) {
    total_ = L61Add(total_, L61Mul(internal::Residue(sum), key_.B(q)));
  }
  std::uint64_t Finish() {
    Fold();
    return total_;
  }

 private:
  void Fold() {
    if (row_ != 0) AddRow(q_, row_);
    row_ = 0;
  }

  const L61Key& key_;
  std::uint64_t q_ = 0;
  internal::RowSum row_ = 0;
  std::uint64_t total_ = 0;
};

// Adds `size` bytes that stand at byte `offset` of the tensor.
template <typename Impl>
void AddBytes(const Impl& impl, std::uint64_t offset, const std::byte* data,
              std::uint64_t size, Accumulator* sum) {
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(data);
  // A word that is not all here counts with the bytes that are.
  const auto add_part = [&](std::uint64_t count) {
    std::uint32_t word = 0;
    std::memcpy(&word, bytes, count);
    const std::uint64_t index = offset >> 2;
    *sum->Row(index / kL61TileWords) +=
        internal::RowSum{impl.A(index % kL61TileWords)} *
        (std::uint64_t{word} << (8 * (offset & 3)));
    bytes += count;
    offset += count;
    size -= count;
  };
  if ((offset & 3) != 0 && size > 0) {
    add_part(std::min<std::uint64_t>(size, 4 - (offset & 3)));
  }
  while (size >= 4) {
    const std::uint64_t index = offset >> 2;
    const std::uint64_t q = index / kL61TileWords;
    const auto t = static_cast<std::uint32_t>(index % kL61TileWords);
    if (t == 0 && size >= 4 * internal::kRowBytes) {
      internal::RowSum rows[4] = {};
      HWY_DYNAMIC_DISPATCH(internal::SumFourRows)(impl.weights, bytes, rows);
      for (int r = 0; r < 4; ++r) sum->AddRow(q + r, rows[r]);
      bytes += 4 * internal::kRowBytes;
      offset += 4 * internal::kRowBytes;
      size -= 4 * internal::kRowBytes;
      continue;
    }
    const auto words = static_cast<std::uint32_t>(
        std::min<std::uint64_t>(kL61TileWords - t, size / 4));
    HWY_DYNAMIC_DISPATCH(internal::SumOneRow)
    (impl.weights, bytes, t, words, sum->Row(q));
    bytes += 4 * std::uint64_t{words};
    offset += 4 * std::uint64_t{words};
    size -= 4 * std::uint64_t{words};
  }
  if (size > 0) add_part(size);
}

}  // namespace

L61Summer::L61Summer(const L61Key& key) : impl_(std::make_unique<Impl>(key)) {}
L61Summer::~L61Summer() = default;

const L61Key& L61Summer::key() const { return impl_->key; }

std::uint64_t L61Summer::Sum(std::uint64_t offset,
                             std::span<const std::byte> bytes) const {
  Accumulator sum(impl_->key);
  AddBytes(*impl_, offset, bytes.data(), bytes.size(), &sum);
  return sum.Finish();
}

std::uint64_t L61Summer::SumBox(const TileGrid& grid,
                                const BoxTarget& box) const {
  Accumulator sum(impl_->key);
  if (box.row_begin >= box.row_end || box.col_begin >= box.col_end) return 0;
  const std::uint64_t unit_bytes = box.unit_bytes;
  const std::uint64_t width = box.col_end - box.col_begin;
  const auto offset = [&](std::uint64_t row, std::uint64_t col) {
    return (row * grid.cols + col) * unit_bytes;
  };
  if (box.rows_are_contiguous()) {
    const bool whole_rows =
        width == grid.cols &&
        box.row_stride_bytes == static_cast<std::int64_t>(width * unit_bytes);
    if (whole_rows) {
      AddBytes(*impl_, offset(box.row_begin, 0), box.data,
               box.unit_count() * unit_bytes, &sum);
      return sum.Finish();
    }
    for (std::uint64_t row = box.row_begin; row < box.row_end; ++row) {
      AddBytes(*impl_, offset(row, box.col_begin), box.At(row, box.col_begin),
               width * unit_bytes, &sum);
    }
    return sum.Finish();
  }
  // Strided rows: blocks are brought into row order first.
  constexpr std::uint64_t kBlockRows = 64;
  constexpr std::uint64_t kBlockCols = 128;
  std::byte block[kBlockRows * kBlockCols * 4];
  for (std::uint64_t row0 = box.row_begin; row0 < box.row_end;
       row0 += kBlockRows) {
    const std::uint64_t row1 = std::min(row0 + kBlockRows, box.row_end);
    for (std::uint64_t col0 = box.col_begin; col0 < box.col_end;
         col0 += kBlockCols) {
      const std::uint64_t col1 = std::min(col0 + kBlockCols, box.col_end);
      const std::uint64_t row_bytes = (col1 - col0) * unit_bytes;
      for (std::uint64_t col = col0; col < col1; ++col) {
        const std::byte* from = box.At(row0, col);
        std::byte* to = block + (col - col0) * unit_bytes;
        for (std::uint64_t row = row0; row < row1; ++row) {
          switch (unit_bytes) {
            case 1:
              std::memcpy(to, from, 1);
              break;
            case 2:
              std::memcpy(to, from, 2);
              break;
            default:
              std::memcpy(to, from, 4);
          }
          // No address beyond the box's last unit is formed.
          if (row + 1 < row1) from += box.row_stride_bytes;
          to += row_bytes;
        }
      }
      for (std::uint64_t row = row0; row < row1; ++row) {
        AddBytes(*impl_, offset(row, col0), block + (row - row0) * row_bytes,
                 row_bytes, &sum);
      }
    }
  }
  return sum.Finish();
}

}  // namespace kedge
#endif  // HWY_ONCE
