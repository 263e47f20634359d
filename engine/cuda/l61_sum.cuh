#ifndef KEDGE_ENGINE_CUDA_L61_SUM_CUH_
#define KEDGE_ENGINE_CUDA_L61_SUM_CUH_

// L61 of weights: the bodies of the kernels of l61_sum.cu (phased_group.cuh
// says what a body is).
//
// A[t] < 2^58 is split into two halves of 29 bits. A product of one and a
// 32-bit word is below 2^61, so eight of them add up in 64 bits without a
// reduction; only then comes one multiplication by B modulo p.
//
// Memory speed needs some 50 KiB under way on each processor at all times. So
// in the bodies for almost all bytes, SumRowItems, SumVectorItems and
// SumColumnItems, warps run on their own, without barriers of blocks, read
// ahead of what they work on or much at once, and take further work from a
// counter as they get to it.

#include <cstddef>
#include <cstdint>
#ifndef __CUDACC__
#include <cstdlib>
#endif

#include "kedge/engine/cuda/l61_plan.h"
#include "kedge/engine/cuda/phased_group.cuh"
#include "kedge/engine/device/kernel_tasks.h"
#include "kedge/format/l61.h"

namespace kedge::internal {

inline constexpr std::uint32_t kSumThreads = 256;  // of a block
inline constexpr std::uint32_t kSumWarps = kSumThreads / 32;
inline constexpr std::uint32_t kSumSplitBits = 29;

// The items of one kind, and where their sums go.
struct SumTask {
  const SumItem* items;
  std::uint32_t item_count;
  DeviceL61 l61;
  // [2 * outputs]: sums of the low 31 bits of residues, and of what is above.
  std::uint64_t* halves;
  // kRows: [kSumWarps], how many items were given out to the warps that sum one
  // part of their rows; kVectors: [1], how many parts of items; kColumns: [1],
  // how many items.
  std::uint64_t* given;
};

struct alignas(16) Vector16 {
  std::uint32_t words[4];
};

KEDGE_BODY Vector16 LoadVector(std::uintptr_t address) {
  Vector16 v;
#ifdef __CUDACC__
  // Weights are met once: they stay out of L1.
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(v.words[0]), "=r"(v.words[1]), "=r"(v.words[2]), "=r"(v.words[3])
      : "l"(__cvta_generic_to_global(reinterpret_cast<const void*>(address))));
#else
  if (address % 16 != 0) std::abort();  // would be a fault on a GPU
  std::memcpy(&v, reinterpret_cast<const void*>(address), 16);
#endif
  return v;
}

// The halves of A in shared memory.
struct alignas(16) SharedWeights {
  std::uint32_t low[kL61TileWords];
  std::uint32_t high[kL61TileWords];
};

// Of shared memory, 16-byte aligned.
KEDGE_BODY Vector16 SharedVector(const std::uint32_t* words) {
  return *reinterpret_cast<const Vector16*>(words);
}

template <typename Unit>
KEDGE_BODY Unit LoadOneUnit(std::uintptr_t address) {
#ifdef __CUDACC__
  return __ldg(reinterpret_cast<const Unit*>(address));
#else
  if (address % sizeof(Unit) != 0) std::abort();
  Unit unit;
  std::memcpy(&unit, reinterpret_cast<const void*>(address), sizeof(Unit));
  return unit;
#endif
}

KEDGE_BODY std::uint64_t WideProduct(std::uint32_t a, std::uint32_t b) {
#ifdef __CUDACC__
  // In C++ the compiler multiplies 64 bits by 64, of which it then drops half.
  std::uint64_t product;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
  return product;
#else
  return std::uint64_t{a} * b;
#endif
}

// Sums of at most eight products with the low and the high halves of A.
struct SplitSum {
  std::uint64_t low = 0;
  std::uint64_t high = 0;

  // The words of a vector; at most two of them.
  KEDGE_BODY void Add(const Vector16& a_low, const Vector16& a_high,
                      const Vector16& v) {
    KEDGE_UNROLL
    for (int i = 0; i < 4; ++i)
      Add(a_low.words[i], a_high.words[i], v.words[i]);
  }

  KEDGE_BODY void Add(std::uint32_t a_low, std::uint32_t a_high,
                      std::uint32_t word) {
    low += WideProduct(a_low, word);
    high += WideProduct(a_high, word);
  }
  // Congruent to the sum, below 2^62 + 2^30.
  KEDGE_BODY std::uint64_t Fold() const {
    // high * 2^29, as 2^61 is 1: what is shifted beyond comes in below.
    const std::uint64_t h = (high & kL61Prime) + (high >> 61);
    return (low & kL61Prime) + (low >> 61) + (h >> (61 - kSumSplitBits)) +
           ((h << kSumSplitBits) & kL61Prime);
  }
};

KEDGE_BODY std::uint32_t LowHalf(std::uint64_t a) {
  return static_cast<std::uint32_t>(a & ((1u << kSumSplitBits) - 1));
}
KEDGE_BODY std::uint32_t HighHalf(std::uint64_t a) {
  return static_cast<std::uint32_t>(a >> kSumSplitBits);
}

// Fills `weights` from the table of A.
template <typename Group>
KEDGE_BODY void SplitWeights(Group& group, const std::uint64_t* a,
                             SharedWeights* weights) {
  group.Phase([&](std::uint32_t t) {
    for (std::uint32_t i = t; i < kL61TileWords; i += Group::kThreads) {
      weights->low[i] = LowHalf(a[i]);
      weights->high[i] = HighHalf(a[i]);
    }
  });
}

// A times the words of a vector that stands at word `place` of a row of A, a
// multiple of 4.
KEDGE_BODY std::uint64_t SumVector(const SharedWeights& weights,
                                   std::uint32_t place, const Vector16& v) {
  SplitSum sum;
  sum.Add(SharedVector(weights.low + place), SharedVector(weights.high + place),
          v);
  return L61Reduce(sum.Fold());
}

// Adds the threads' residues, which it sets to 0, to those of `output`.
template <typename Group>
KEDGE_BODY void AddToOutput(
    Group& group, typename Group::template PerThread<std::uint64_t>& sums,
    std::uint32_t output, std::uint64_t* halves) {
  typename Group::template PerThread<std::uint64_t> high;
  group.Phase([&](std::uint32_t t) {
    high[t] = sums[t] >> 31;
    sums[t] &= 0x7fffffffu;
  });
  group.AddSum(sums, halves + 2 * std::uint64_t{output});
  group.AddSum(high, halves + 2 * std::uint64_t{output} + 1);
  group.Phase([&](std::uint32_t t) { sums[t] = 0; });
}

// ------------------------------------------------------------ whole rows of A

// How many rows are copied to shared memory ahead of the sums.
inline constexpr std::uint32_t kRowsAhead = 4;
// What a warp sums of each row: its A fits in registers.
inline constexpr std::uint32_t kRowVectors = kL61TileWords / 4 / kSumThreads;
inline constexpr std::uint32_t kRowPartBytes = 32 * 16 * kRowVectors;
static_assert(kRowVectors == 4);
static_assert(kSumWarps * kRowPartBytes == kL61RowBytes);

// Of one warp, in shared memory.
struct alignas(16) RowShared {
  Vector16 ring[kRowsAhead][kRowVectors][32];
  std::uint64_t b[kMaxSumRows];
};

// The halves of A of a thread's places in a row.
struct RowWeights {
  Vector16 low[kRowVectors];
  Vector16 high[kRowVectors];
};

// An item, counted from where its first row of A begins.
struct RowRun {
  std::uintptr_t base = 0;
  std::uint64_t q = 0;
  std::uint32_t begin = 0;  // bytes from `base` on
  std::uint32_t end = 0;
  std::uint32_t rows = 0;  // 0: there is no such item
  std::uint32_t output = 0;
};

KEDGE_BODY RowRun RowRunOf(const SumTask& task, std::uint64_t index) {
  RowRun run;
  if (index >= task.item_count) return run;
  const SumItem& item = task.items[index];
  run.begin = static_cast<std::uint32_t>(item.offset % kL61RowBytes);
  run.base = reinterpret_cast<std::uintptr_t>(item.data) - run.begin;
  run.q = item.offset / kL61RowBytes;
  run.end = run.begin + item.row_bytes;
  run.rows = item.rows;
  run.output = item.output;
  return run;
}

// Begins to copy row `row` of a run, as far as it has one, to slot `slot`.
template <typename Warp>
KEDGE_BODY void CopyRow(Warp& warp, std::uint32_t t, const RowRun& run,
                        std::uint32_t row, std::uint32_t part,
                        std::uint32_t slot, RowShared* shared) {
  if (row < run.rows) {
    const std::uint32_t first = row * static_cast<std::uint32_t>(kL61RowBytes) +
                                part * kRowPartBytes + 16 * t;
    KEDGE_UNROLL
    for (std::uint32_t m = 0; m < kRowVectors; ++m) {
      const std::uint32_t at = first + 32 * 16 * m;
      const bool there = at - run.begin < run.end - run.begin;
      warp.CopyAsync(t, &shared->ring[slot][m][t], run.base + at,
                     there ? 16 : 0);
    }
  }
  warp.CommitCopies(t);
}

// Sums part `part` of the rows of A of item `first` and of those that the
// counter of that part gives out, items from `given_from` on.
//
// A thread copies what it sums itself, so that warps need no barrier. Row r of
// an item waits in slot (base + r) % kRowsAhead; when it has been summed, the
// slot takes the row kRowsAhead behind it, of this item or of the next one.
template <typename Warp>
KEDGE_BODY void SumRowItems(Warp& warp, const SumTask& task, std::uint32_t part,
                            std::uint64_t first, std::uint64_t given_from,
                            RowShared* shared) {
  static_assert(Warp::kThreads == 32 && kMaxSumRows == 32);
  typename Warp::template PerThread<std::uint64_t> sums;
  typename Warp::template PerThread<std::uint64_t> ticket;
  typename Warp::template PerThread<RowWeights> weights;
  RowRun run = RowRunOf(task, first);
  // By way of shared memory: else the compiler keeps A whole and splits it anew
  // for every row.
  static_assert(kRowsAhead >= 2);
  warp.Phase([&](std::uint32_t t) {
    sums[t] = 0;
    if (t == 0) ticket[t] = AtomicAdd(task.given + part, std::uint64_t{1});
    KEDGE_UNROLL
    for (std::uint32_t m = 0; m < kRowVectors; ++m) {
      const std::uint64_t* const a =
          task.l61.a + (part * kRowPartBytes + 32 * 16 * m) / 4 + 4 * t;
      KEDGE_UNROLL
      for (std::uint32_t i = 0; i < 4; ++i) {
        shared->ring[0][m][t].words[i] = LowHalf(a[i]);
        shared->ring[1][m][t].words[i] = HighHalf(a[i]);
      }
    }
  });
  warp.Phase([&](std::uint32_t t) {
    KEDGE_UNROLL
    for (std::uint32_t m = 0; m < kRowVectors; ++m) {
      weights[t].low[m] = shared->ring[0][m][t];
      weights[t].high[m] = shared->ring[1][m][t];
    }
  });
  warp.Phase([&](std::uint32_t t) {
    for (std::uint32_t r = 0; r < kRowsAhead; ++r) {
      CopyRow(warp, t, run, r, part, r, shared);
    }
  });
  std::uint32_t base = 0;
  std::uint32_t late = 0;  // so many first rows of `run` are not under way yet
  while (run.rows > 0) {
    const RowRun next = RowRunOf(task, given_from + warp.FromFirst(ticket));
    warp.Phase([&](std::uint32_t t) {
      if (t == 0) ticket[t] = AtomicAdd(task.given + part, std::uint64_t{1});
      shared->b[t] = task.l61.key.B(run.q + t);
      if (late > 0) {
        for (std::uint32_t r = 0; r < late; ++r) {
          CopyRow(warp, t, run, r, part, (base + r) % kRowsAhead, shared);
        }
        warp.template WaitForCopies<0>(t);
      }
    });
    warp.Phase([&](std::uint32_t t) {
      const RowWeights& a = weights[t];
      std::uint64_t sum = sums[t];
      KEDGE_NO_UNROLL
      for (std::uint32_t r = 0; r < run.rows; ++r) {
        warp.template WaitForCopies<kRowsAhead - 1>(t);
        const std::uint32_t slot = (base + r) % kRowsAhead;
        std::uint64_t folded = 0;
        KEDGE_UNROLL
        for (std::uint32_t m = 0; m < kRowVectors; m += 2) {
          SplitSum products;
          products.Add(a.low[m], a.high[m], shared->ring[slot][m][t]);
          products.Add(a.low[m + 1], a.high[m + 1],
                       shared->ring[slot][m + 1][t]);
          folded += products.Fold();
        }
        sum = L61Add(sum, L61Mul(L61Reduce(folded), shared->b[r]));
        const std::uint32_t ahead = r + kRowsAhead;
        if (ahead < run.rows) {
          CopyRow(warp, t, run, ahead, part, slot, shared);
        } else {
          CopyRow(warp, t, next, ahead - run.rows, part, slot, shared);
        }
      }
      sums[t] = sum;
    });
    if (next.rows == 0 || next.output != run.output) {
      AddToOutput(warp, sums, run.output, task.halves);
    }
    base += run.rows;
    late = run.rows < kRowsAhead ? kRowsAhead - run.rows : 0;
    run = next;
  }
}

// ------------------------------------------------------------ rows of vectors

// Warps take items in so many parts.
inline constexpr std::uint32_t kVectorParts = 8;
// Vectors that a thread reads at once, and ahead of those it works on.
inline constexpr std::uint32_t kVectorsAtOnce = 4;
inline constexpr std::uint32_t kVectorStep = 32 * kVectorsAtOnce;
// Fewer vectors than that in a row of A do not keep a warp busy.
inline constexpr std::uint32_t kFewVectors = 48;

// The vectors of an item, numbered row by row.
class VectorRows {
 public:
  KEDGE_BODY explicit VectorRows(const SumItem& item)
      : data_(reinterpret_cast<std::uintptr_t>(item.data)),
        first_q_(item.offset / kL61RowBytes),
        row_stride_(static_cast<std::uint64_t>(item.row_stride_bytes)),
        // Of one row, it does not matter.
        tensor_stride_(static_cast<std::uint32_t>(
            item.tensor_stride < kMaxVectorSpan ? item.tensor_stride
                                                : kMaxVectorSpan)),
        head_(static_cast<std::uint32_t>(item.offset % kL61RowBytes)),
        of_row_(item.row_bytes / 16),
        count_(item.rows * of_row_),
        multiplier_(((1u << 28) + of_row_ - 1) / of_row_) {}

  KEDGE_BODY std::uint32_t count() const { return count_; }
  KEDGE_BODY bool few_in_a_row() const {
    constexpr auto kRow = static_cast<std::uint32_t>(kL61RowBytes);
    return of_row_ * kRow <
           kFewVectors * (tensor_stride_ < kRow ? tensor_stride_ : kRow);
  }

  struct Place {
    std::uint32_t row;
    std::uint32_t col;
  };
  // index / of_row_ is index * multiplier_ / 2^28, as they stay below 2^15 and
  // 2^12.
  KEDGE_BODY Place PlaceOf(std::uint32_t index) const {
    const auto row = static_cast<std::uint32_t>(
        (std::uint64_t{index << 4} * multiplier_) >> 32);
    return {row, index - row * of_row_};
  }
  KEDGE_BODY std::uintptr_t AddressOf(Place place) const {
    return data_ + place.row * row_stride_ + 16 * place.col;
  }
  // In the tensor, from where the item's first row of A begins.
  KEDGE_BODY std::uint32_t ByteOf(Place place) const {
    return head_ + place.row * tensor_stride_ + 16 * place.col;
  }
  // The word of a row of A.
  KEDGE_BODY std::uint32_t WordOf(Place place) const {
    return ByteOf(place) / 4 % kL61TileWords;
  }
  // The row of A, from the item's first one on.
  KEDGE_BODY std::uint32_t RowOfA(Place place) const {
    return ByteOf(place) / static_cast<std::uint32_t>(kL61RowBytes);
  }
  // B of such a row.
  KEDGE_BODY std::uint64_t BOf(const L61Key& key, std::uint32_t row) const {
    return key.B(first_q_ + row);
  }
  // The number of vectors before such a row, not the first one.
  KEDGE_BODY std::uint32_t CountBefore(std::uint32_t row) const {
    const std::uint32_t bytes =
        row * static_cast<std::uint32_t>(kL61RowBytes) - head_;
    const std::uint32_t rows = bytes / tensor_stride_;
    const std::uint32_t vectors = (bytes - rows * tensor_stride_) / 16;
    return rows * of_row_ + (vectors < of_row_ ? vectors : of_row_);
  }

 private:
  std::uintptr_t data_;
  std::uint64_t first_q_;
  std::uint64_t row_stride_;
  std::uint32_t tensor_stride_;
  std::uint32_t head_;
  std::uint32_t of_row_;
  std::uint32_t count_;
  std::uint32_t multiplier_;
};

// What a thread has read at once.
struct VectorStep {
  Vector16 v[kVectorsAtOnce];
  std::uint32_t word[kVectorsAtOnce];
};

// Reads every 32nd vector from `index` on; those from `end` on are 0.
KEDGE_BODY void LoadStep(const VectorRows& rows, std::uint32_t index,
                         std::uint32_t end, VectorStep* step) {
  KEDGE_UNROLL
  for (std::uint32_t n = 0; n < kVectorsAtOnce; ++n) {
    step->v[n] = {};
    step->word[n] = 0;
    const std::uint32_t i = index + 32 * n;
    if (i >= end) continue;
    const VectorRows::Place place = rows.PlaceOf(i);
    step->word[n] = rows.WordOf(place);
    step->v[n] = LoadVector(rows.AddressOf(place));
  }
}

// Congruent to A times what was read, below 2^63 + 2^31.
KEDGE_BODY std::uint64_t SumStep(const SharedWeights& weights,
                                 const VectorStep& step) {
  std::uint64_t folded = 0;
  KEDGE_UNROLL
  for (std::uint32_t n = 0; n < kVectorsAtOnce; n += 2) {
    SplitSum products;
    KEDGE_UNROLL
    for (std::uint32_t m = n; m < n + 2; ++m) {
      products.Add(SharedVector(weights.low + step.word[m]),
                   SharedVector(weights.high + step.word[m]), step.v[m]);
    }
    folded += products.Fold();
  }
  return folded;
}

// The vectors [begin, end) of an item, thread `t`'s part: those of one row of A
// after the other, so that B comes in once for all of them.
KEDGE_BODY std::uint64_t SumManyInRow(const VectorRows& rows,
                                      const SharedWeights& weights,
                                      const L61Key& key, std::uint32_t begin,
                                      std::uint32_t end, std::uint32_t t) {
  struct At {
    std::uint32_t row;  // of A
    std::uint32_t index;
    std::uint32_t row_end;
  };
  const auto enter_row = [&](std::uint32_t index) {
    const std::uint32_t row = rows.RowOfA(rows.PlaceOf(index));
    const std::uint32_t row_end = rows.CountBefore(row + 1);
    return At{row, index, row_end < end ? row_end : end};
  };
  std::uint64_t sum = 0;
  std::uint64_t of_row = 0;
  At at = enter_row(begin);
  // Sums what was read and reads what follows; false: nothing follows.
  const auto go_on = [&](const VectorStep& now, VectorStep* following) {
    const std::uint32_t row = at.row;
    at.index += kVectorStep;
    const bool row_ends = at.index >= at.row_end;
    const bool more = !row_ends || at.row_end < end;
    if (more) {
      if (row_ends) at = enter_row(at.row_end);
      LoadStep(rows, at.index + t, at.row_end, following);
    }
    of_row = L61Reduce(of_row + SumStep(weights, now));
    if (row_ends) {
      sum = L61Add(sum, L61Mul(of_row, rows.BOf(key, row)));
      of_row = 0;
    }
    return more;
  };
  // Two by turns: copying one would wait for it.
  VectorStep even;
  VectorStep odd;
  LoadStep(rows, at.index + t, at.row_end, &even);
  KEDGE_NO_UNROLL
  while (go_on(even, &odd) && go_on(odd, &even)) {
  }
  return sum;
}

// The same where a row of A has few of them: each vector looks up its own B.
KEDGE_BODY std::uint64_t SumFewInRow(const VectorRows& rows,
                                     const SharedWeights& weights,
                                     const L61Key& key, std::uint32_t begin,
                                     std::uint32_t end, std::uint32_t t) {
  std::uint64_t sum = 0;
  KEDGE_NO_UNROLL
  for (std::uint32_t i = begin + t; i < end; i += kVectorStep) {
    VectorStep step;
    LoadStep(rows, i, end, &step);
    KEDGE_UNROLL
    for (std::uint32_t n = 0; n < kVectorsAtOnce; ++n) {
      const std::uint64_t b =
          rows.BOf(key, rows.RowOfA(rows.PlaceOf(i + 32 * n)));
      sum = L61Add(sum, L61Mul(SumVector(weights, step.word[n], step.v[n]), b));
    }
  }
  return sum;
}

// Sums part `first` of all items' parts and those that the counter gives out,
// from `given_from` on.
template <typename Warp>
KEDGE_BODY void SumVectorItems(Warp& warp, const SumTask& task,
                               std::uint64_t first, std::uint64_t given_from,
                               const SharedWeights& weights) {
  static_assert(Warp::kThreads == 32);
  const std::uint64_t total = std::uint64_t{task.item_count} * kVectorParts;
  typename Warp::template PerThread<std::uint64_t> sums;
  typename Warp::template PerThread<std::uint64_t> ticket;
  warp.Phase([&](std::uint32_t t) { sums[t] = 0; });
  for (std::uint64_t index = first; index < total;
       index = given_from + warp.FromFirst(ticket)) {
    const SumItem& item = task.items[index / kVectorParts];
    const VectorRows rows(item);
    const auto part = static_cast<std::uint32_t>(index % kVectorParts);
    const std::uint32_t begin = rows.count() * part / kVectorParts;
    const std::uint32_t end = rows.count() * (part + 1) / kVectorParts;
    warp.Phase([&](std::uint32_t t) {
      if (t == 0) ticket[t] = AtomicAdd(task.given, std::uint64_t{1});
      if (begin == end) return;
      sums[t] = rows.few_in_a_row()
                    ? SumFewInRow(rows, weights, task.l61.key, begin, end, t)
                    : SumManyInRow(rows, weights, task.l61.key, begin, end, t);
    });
    AddToOutput(warp, sums, item.output, task.halves);
  }
}

// ----------------------------------------------------------- transposed rows
//
// No transposition is needed: where a word of the tensor is two units of
// neighbouring columns, a thread that has read some rows of both puts the words
// together in registers, each row's with its own A. Threads keep to their rows,
// so that all words of a row that share a B add up before that comes in.

// What a thread reads at once: of so many columns a vector of 8 rows.
inline constexpr std::uint32_t kColumnsAtOnce = 16;
inline constexpr std::uint32_t kColumnRows = 8;
inline constexpr std::uint32_t kColumnWords = kColumnsAtOnce / 2;
// Threads of a warp that stand below each other, and beside each other.
inline constexpr std::uint32_t kThreadsDown = kMaxColumnRows / kColumnRows;
inline constexpr std::uint32_t kThreadsAcross = 32 / kThreadsDown;
inline constexpr std::uint32_t kColumnStepWords = kThreadsAcross * kColumnWords;
static_assert(kL61TileWords % kColumnStepWords == 0);

// Where in SharedWeights the four words from word `word` of A on lie, a
// multiple of 4. Threads below each other read places that are a multiple of 64
// words apart; so they meet different banks mostly, instead of one.
KEDGE_BODY std::uint32_t ColumnPlace(std::uint32_t word) {
  return word ^ ((word >> 4 ^ word >> 7) & 28);
}

// Fills `weights` from the table of A, by ColumnPlace.
template <typename Group>
KEDGE_BODY void SplitColumnWeights(Group& group, const std::uint64_t* a,
                                   SharedWeights* weights) {
  group.Phase([&](std::uint32_t t) {
    for (std::uint32_t i = t; i < kL61TileWords; i += Group::kThreads) {
      const std::uint32_t at = ColumnPlace(i / 4 * 4) + i % 4;
      weights->low[at] = LowHalf(a[i]);
      weights->high[at] = HighHalf(a[i]);
    }
  });
}

// Thread `t`'s share of an item.
KEDGE_BODY std::uint64_t SumColumns(const SumItem& item,
                                    const SharedWeights& weights,
                                    const L61Key& key, std::uint32_t t) {
  const std::uint32_t top = kColumnRows * (t % kThreadsDown);
  // Of the tensor, in words.
  const auto stride = static_cast<std::uint32_t>(item.tensor_stride / 4);
  const std::uint32_t first = t / kThreadsDown * kColumnWords;
  const std::uint32_t words = item.row_bytes / 4;
  if (top >= item.rows || first >= words) return 0;
  const auto col_stride = static_cast<std::uint64_t>(item.col_stride_bytes);
  std::uintptr_t data = reinterpret_cast<std::uintptr_t>(item.data) + 2 * top +
                        2 * first * col_stride;
  // Of the thread's row `r`, from where the item's first row of A begins.
  const std::uint32_t begin =
      static_cast<std::uint32_t>(item.offset / 4) % kL61TileWords +
      top * stride;
  const auto place = [&](std::uint32_t word, std::uint32_t r) {
    return begin + word + r * stride;
  };
  const std::uint64_t first_q = item.offset / kL61RowBytes;
  std::uint64_t sum = 0;
  // Of each row, A times the words since it met a new row of A: below 2^61 + 8.
  std::uint64_t of_row[kColumnRows] = {};
  const auto leave_row_of_a = [&](std::uint32_t r, std::uint32_t word) {
    const std::uint64_t b = key.B(first_q + place(word, r) / kL61TileWords);
    sum = L61Add(sum, L61Mul(L61Reduce(of_row[r]), b));
    of_row[r] = 0;
  };
  std::uint32_t word = first;
  KEDGE_NO_UNROLL
  for (; word < words; word += kColumnStepWords) {
    // Before the reads, which take most registers.
    KEDGE_UNROLL
    for (std::uint32_t r = 0; r < kColumnRows; ++r) {
      if (place(word, r) % kL61TileWords < kColumnStepWords &&
          word >= kColumnStepWords) {
        leave_row_of_a(r, word - kColumnStepWords);
      }
    }
    Vector16 v[kColumnsAtOnce];
    KEDGE_UNROLL
    for (std::uint32_t c = 0; c < kColumnsAtOnce; ++c) {
      v[c] = LoadVector(data + c * col_stride);
    }
    KEDGE_UNROLL
    for (std::uint32_t r = 0; r < kColumnRows; ++r) {
      const std::uint32_t here = ColumnPlace(place(word, r) % kL61TileWords);
      SplitSum products;
      KEDGE_UNROLL
      for (std::uint32_t w = 0; w < kColumnWords; w += 4) {
        Vector16 row;
        KEDGE_UNROLL
        for (std::uint32_t i = 0; i < 4; ++i) {
          const std::uint32_t even = v[2 * (w + i)].words[r / 2];
          const std::uint32_t odd = v[2 * (w + i) + 1].words[r / 2];
          row.words[i] = r % 2 == 0 ? (even & 0xffffu) | odd << 16
                                    : even >> 16 | (odd & 0xffff0000u);
        }
        products.Add(SharedVector(weights.low + (here ^ w)),
                     SharedVector(weights.high + (here ^ w)), row);
      }
      const std::uint64_t x = of_row[r] + products.Fold();
      of_row[r] = (x & kL61Prime) + (x >> 61);
    }
    data += 2 * kColumnStepWords * col_stride;
  }
  KEDGE_UNROLL
  for (std::uint32_t r = 0; r < kColumnRows; ++r) {
    leave_row_of_a(r, word - kColumnStepWords);
  }
  return sum;
}

// Sums item `first` and those that the counter gives out, from `given_from` on.
// `weights` are those of SplitColumnWeights.
template <typename Warp>
KEDGE_BODY void SumColumnItems(Warp& warp, const SumTask& task,
                               std::uint64_t first, std::uint64_t given_from,
                               const SharedWeights& weights) {
  static_assert(Warp::kThreads == 32);
  typename Warp::template PerThread<std::uint64_t> sums;
  typename Warp::template PerThread<std::uint64_t> ticket;
  warp.Phase([&](std::uint32_t t) { sums[t] = 0; });
  for (std::uint64_t index = first; index < task.item_count;
       index = given_from + warp.FromFirst(ticket)) {
    const SumItem& item = task.items[index];
    warp.Phase([&](std::uint32_t t) {
      if (t == 0) ticket[t] = AtomicAdd(task.given, std::uint64_t{1});
      sums[t] = SumColumns(item, weights, task.l61.key, t);
    });
    AddToOutput(warp, sums, item.output, task.halves);
  }
}

// -------------------------------------------------------------- anything else

// B of two rows of A for each row of a tile.
inline constexpr std::uint32_t kTileBs = 2 * kSumTileRows;

// Of one block, in shared memory.
struct alignas(16) TileShared {
  SharedWeights weights;
  std::uint32_t tile[kSumTileRows * kSumTileBytes / 4];
  std::uint64_t b[kTileBs];
};

// Where byte `at` of row `row` of a tile lies. Vectors are permuted within
// eight so that threads that store one column of neighbouring groups of rows
// meet different banks.
KEDGE_BODY std::uint32_t TileByte(std::uint32_t row, std::uint32_t at) {
  return row * kSumTileBytes + (at ^ (row / 4 % 8) * 16);
}

// Where a tile comes from: an item's rows from some row on.
struct TileSource {
  std::uintptr_t data;   // the first unit
  std::uint64_t offset;  // its place in the tensor
  std::uint32_t rows;    // left, of the item

  // The word of the tensor that row `row` of the tile begins with.
  KEDGE_BODY std::uint64_t FirstWord(const SumItem& item,
                                     std::uint32_t row) const {
    return (offset + row * item.tensor_stride) / 16 * 4;
  }
  // Where the item's first unit stands in that row.
  KEDGE_BODY std::uint32_t Shift(const SumItem& item, std::uint32_t row) const {
    return static_cast<std::uint32_t>(offset + row * item.tensor_stride) % 16;
  }
};

// Writes the units of up to kSumTileRows rows to their places in the tile, and
// nothing where there is no unit.
template <typename Unit, typename Group>
KEDGE_BODY void FillTile(Group& group, const SumItem& item,
                         const TileSource& from, TileShared* shared) {
  auto* const tile = reinterpret_cast<unsigned char*>(shared->tile);
  const auto row_stride = static_cast<std::uint64_t>(item.row_stride_bytes);
  const auto col_stride = static_cast<std::uint64_t>(item.col_stride_bytes);
  const std::uint32_t cols = item.row_bytes / sizeof(Unit);
  constexpr std::uint32_t kUnits = 16 / sizeof(Unit);
  if (from.rows >= kSumTileRows && row_stride == sizeof(Unit) &&
      item.units_per_element == 1 &&
      (from.data | col_stride | from.offset | item.tensor_stride) % 16 == 0) {
    // Columns are contiguous: read in vectors of some rows of one column.
    constexpr std::uint32_t kGroups = kSumTileRows / kUnits;
    const std::uint32_t total = cols * kGroups;
    group.Phase([&](std::uint32_t t) {
      constexpr std::uint32_t kAtOnce = 4;
      for (std::uint32_t i0 = t; i0 < total; i0 += kAtOnce * kSumThreads) {
        Vector16 v[kAtOnce];
        KEDGE_UNROLL
        for (std::uint32_t n = 0; n < kAtOnce; ++n) {
          const std::uint32_t i = i0 + n * kSumThreads;
          if (i >= total) continue;
          v[n] = LoadVector(from.data + i / kGroups * col_stride +
                            i % kGroups * 16);
        }
        KEDGE_UNROLL
        for (std::uint32_t n = 0; n < kAtOnce; ++n) {
          const std::uint32_t i = i0 + n * kSumThreads;
          if (i >= total) continue;
          KEDGE_UNROLL
          for (std::uint32_t u = 0; u < kUnits; ++u) {
            const std::uint32_t at =
                TileByte(i % kGroups * kUnits + u, i / kGroups * sizeof(Unit));
            *reinterpret_cast<Unit*>(tile + at) =
                static_cast<Unit>(v[n].words[u * sizeof(Unit) / 4] >>
                                  (8 * (u * sizeof(Unit) % 4)));
          }
        }
      }
    });
    return;
  }
  // Unit by unit, along the smaller stride.
  const bool down = (item.row_stride_bytes < 0 ? -item.row_stride_bytes
                                               : item.row_stride_bytes) <
                    (item.col_stride_bytes < 0 ? -item.col_stride_bytes
                                               : item.col_stride_bytes);
  const std::uint32_t rows =
      from.rows < kSumTileRows ? from.rows : kSumTileRows;
  const std::uint32_t pair = item.units_per_element - 1;  // 1 for word pairs
  const std::uint32_t total = cols * rows;
  const std::uint32_t inner = down ? rows : cols;
  group.Phase([&](std::uint32_t t) {
    constexpr std::uint32_t kAtOnce = 4;
    for (std::uint32_t i0 = t; i0 < total; i0 += kAtOnce * kSumThreads) {
      Unit unit[kAtOnce];
      KEDGE_UNROLL
      for (std::uint32_t n = 0; n < kAtOnce; ++n) {
        const std::uint32_t i = i0 + n * kSumThreads;
        if (i >= total) continue;
        const std::uint32_t row = down ? i % inner : i / inner;
        const std::uint32_t col = down ? i / inner : i % inner;
        unit[n] = LoadOneUnit<Unit>(from.data + row * row_stride +
                                    (col >> pair) * col_stride +
                                    (col & pair) * sizeof(Unit));
      }
      KEDGE_UNROLL
      for (std::uint32_t n = 0; n < kAtOnce; ++n) {
        const std::uint32_t i = i0 + n * kSumThreads;
        if (i >= total) continue;
        const std::uint32_t row = down ? i % inner : i / inner;
        const std::uint32_t col = down ? i / inner : i % inner;
        const std::uint32_t at =
            TileByte(row, from.Shift(item, row) + col * sizeof(Unit));
        *reinterpret_cast<Unit*>(tile + at) = unit[n];
      }
    }
  });
}

// Anything, by way of a tile in shared memory in the tensor's order.
template <typename Group>
KEDGE_BODY void SumTiles(
    Group& group, const SumItem& item, const L61Key& key, TileShared* shared,
    typename Group::template PerThread<std::uint64_t>& sums) {
  constexpr std::uint32_t kTileCols = kSumTileBytes / 16;
  constexpr std::uint32_t kTileVectors = kSumTileRows * kTileCols;
  TileSource from{reinterpret_cast<std::uintptr_t>(item.data), item.offset,
                  item.rows};
  for (;;) {
    group.Phase([&](std::uint32_t t) {
      // A tile's row is shorter than one of A: it meets two of them at most.
      if (t < kTileBs) {
        shared->b[t] =
            key.B(from.FirstWord(item, t / 2) / kL61TileWords + t % 2);
      }
      for (std::uint32_t i = t; i < kTileVectors; i += kSumThreads) {
        *reinterpret_cast<Vector16*>(shared->tile + 4 * i) = {};
      }
    });
    switch (item.unit_bytes) {
      case 1:
        FillTile<std::uint8_t>(group, item, from, shared);
        break;
      case 2:
        FillTile<std::uint16_t>(group, item, from, shared);
        break;
      default:
        FillTile<std::uint32_t>(group, item, from, shared);
    }
    group.Phase([&](std::uint32_t t) {
      std::uint64_t sum = 0;
      const std::uint32_t col = t % kTileCols;
      KEDGE_NO_UNROLL
      for (std::uint32_t row = t / kTileCols; row < kSumTileRows;
           row += kSumThreads / kTileCols) {
        const std::uint64_t first = from.FirstWord(item, row);
        const std::uint64_t word = first + 4 * col;
        const Vector16 v =
            SharedVector(shared->tile + TileByte(row, 16 * col) / 4);
        const auto next = static_cast<std::uint32_t>(word / kL61TileWords -
                                                     first / kL61TileWords);
        sum = L61Add(sum,
                     L61Mul(SumVector(shared->weights, word % kL61TileWords, v),
                            shared->b[2 * row + next]));
      }
      sums[t] = L61Add(sums[t], sum);
    });
    if (from.rows <= kSumTileRows) return;
    from.data +=
        kSumTileRows * static_cast<std::uint64_t>(item.row_stride_bytes);
    from.offset += kSumTileRows * item.tensor_stride;
    from.rows -= kSumTileRows;
  }
}

// Every group_count-th item from `group_index` on.
template <typename Group>
KEDGE_BODY void SumTileItems(Group& group, const SumTask& task,
                             std::uint32_t group_index,
                             std::uint32_t group_count, TileShared* shared) {
  static_assert(Group::kThreads == kSumThreads);
  SplitWeights(group, task.l61.a, &shared->weights);
  typename Group::template PerThread<std::uint64_t> sums;
  group.Phase([&](std::uint32_t t) { sums[t] = 0; });
  for (std::uint64_t i = group_index; i < task.item_count; i += group_count) {
    SumTiles(group, task.items[i], task.l61.key, shared, sums);
    AddToOutput(group, sums, task.items[i].output, task.halves);
  }
}

// The residue of output `i`.
KEDGE_BODY std::uint64_t ResidueOfHalves(const std::uint64_t* halves,
                                         std::uint64_t i) {
  return L61Add(L61Reduce(halves[2 * i]),
                L61Mul(L61Reduce(halves[2 * i + 1]), std::uint64_t{1} << 31));
}

}  // namespace kedge::internal

#endif  // KEDGE_ENGINE_CUDA_L61_SUM_CUH_
