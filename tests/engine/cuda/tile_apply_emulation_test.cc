// Goal: the kernels that decode and apply tiles do what the plain decoder and
// engine/cpu do, for every kind of tile, box and memory layout; they take and
// refuse exactly the payloads that DecodeTile does, write nothing for a refused
// one, and nothing outside a box ever.
// Method: the kernels' own bodies, run thread by thread on the host
// (phased_group.cuh), on property tests with printed seeds; sanitizers see
// reads out of bounds.

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kedge/engine/cpu/record_apply.h"
#include "kedge/engine/cuda/tile_apply.cuh"
#include "kedge/format/codec.h"
#include "kedge/format/l61.h"
#include "kedge/tests/engine/cpu/cpu_test_support.h"
#include "kedge/tests/support/sanitized.h"

namespace kedge {
namespace {

using internal::ApplyShared;
using internal::HeavyApply;
using internal::HostGroup;
using internal::LightApply;
using internal::MediumApply;
using testing::FillRandom;
using testing::LoadUnit;
using testing::Perturb;
using testing::PlainDiff;
using testing::Shape;
using testing::StoreUnit;
using testing::Values;

const L61Key kKey = L61Key::FromSeed(20261130);

DeviceL61 TestL61() {
  static const std::vector<std::uint64_t> table = [] {
    std::vector<std::uint64_t> a(kL61TileWords);
    for (std::uint32_t t = 0; t < kL61TileWords; ++t) a[t] = kKey.A(t);
    return a;
  }();
  return {table.data(), kKey};
}

// Memory of the "device" that ends where it says, with the promised slack.
class Payloads {
 public:
  // Returns the offset of `bytes`.
  std::uint64_t Add(std::span<const std::byte> bytes, std::size_t skip) {
    buffer_.resize(buffer_.size() + skip, std::byte{0xa5});
    const std::uint64_t at = buffer_.size();
    buffer_.insert(buffer_.end(), bytes.begin(), bytes.end());
    return at;
  }
  // Of an allocation of its own, so that a sanitizer sees a read beyond.
  void Give(ApplyBatch* batch) {
    memory_ = std::make_unique<std::byte[]>(buffer_.size() + 16);
    std::copy(buffer_.begin(), buffer_.end(), memory_.get());
    std::fill_n(memory_.get() + buffer_.size(), 16, std::byte{0xff});
    batch->payloads = memory_.get();
    batch->payload_bytes = buffer_.size();
  }

 private:
  std::vector<std::byte> buffer_;
  std::unique_ptr<std::byte[]> memory_;
};

template <typename Size>
std::unique_ptr<ApplyShared<Size>> PoisonedShared() {
  auto shared = std::make_unique<ApplyShared<Size>>();
  std::memset(static_cast<void*>(shared.get()), 0xee, sizeof(*shared));
  return shared;
}

template <ApplyMode mode>
void LaunchOnHost(std::mt19937_64& rng, const ApplyBatch& batch) {
  const std::uint64_t light_groups = 1 + rng() % 9;
  for (std::uint64_t g = 0; g < light_groups; ++g) {
    HostGroup<LightApply::kThreads> group(rng());
    internal::ApplyLightTiles<mode>(group, batch, g, light_groups,
                                    PoisonedShared<LightApply>().get());
  }
  const std::uint64_t large_groups = 1 + rng() % 4;
  for (std::uint64_t g = 0; g < large_groups; ++g) {
    HostGroup<MediumApply::kThreads> medium(rng());
    internal::ApplyLargeTiles<mode>(medium, batch, 1, g, large_groups,
                                    PoisonedShared<MediumApply>().get());
    HostGroup<HeavyApply::kThreads> heavy(rng());
    internal::ApplyLargeTiles<mode>(heavy, batch, 2, g, large_groups,
                                    PoisonedShared<HeavyApply>().get());
  }
}

// What LaunchApply does.
void RunOnHost(std::mt19937_64& rng, const ApplyBatch& batch) {
  internal::StartOutcome(batch.outcome);
  if (batch.mode == ApplyMode::kCheck) {
    std::fill_n(batch.sums, batch.record_count, RecordSums{});
    LaunchOnHost<ApplyMode::kCheck>(rng, batch);
  } else {
    LaunchOnHost<ApplyMode::kApply>(rng, batch);
  }
  internal::FinishOutcome(batch.outcome);
}

// ------------------------------------------------------------------- targets

// A box in memory of its own, with guard bytes around it and in its gaps.
class TestBox {
 public:
  enum Layout { kPacked, kPitched, kTransposed, kScattered, kLayouts };

  TestBox(const TileGrid& grid, std::uint32_t unit_bytes,
          std::uint32_t units_per_element, std::uint64_t row_begin,
          std::uint64_t row_end, std::uint64_t col_begin, std::uint64_t col_end,
          Layout layout, std::span<const std::byte> tensor)
      : grid_(grid) {
    target_.row_begin = row_begin;
    target_.row_end = row_end;
    target_.col_begin = col_begin;
    target_.col_end = col_end;
    target_.unit_bytes = unit_bytes;
    target_.units_per_element = units_per_element;
    const auto element =
        static_cast<std::int64_t>(unit_bytes * units_per_element);
    const auto rows = static_cast<std::int64_t>(row_end - row_begin);
    const auto cols =
        static_cast<std::int64_t>((col_end - col_begin) / units_per_element);
    switch (layout) {
      case kPacked:
        target_.col_stride_bytes = element;
        target_.row_stride_bytes = cols * element;
        break;
      case kPitched:
        target_.col_stride_bytes = element;
        target_.row_stride_bytes = (cols + 3) * element;
        break;
      case kTransposed:
        target_.row_stride_bytes = element;
        target_.col_stride_bytes = rows * element;
        break;
      default:  // rows backwards, columns two elements apart
        target_.col_stride_bytes = 2 * element;
        target_.row_stride_bytes = -(2 * cols + 1) * element;
    }
    std::int64_t lowest = 0;
    std::int64_t highest = 0;
    for (const std::int64_t end : {(rows - 1) * target_.row_stride_bytes,
                                   (cols - 1) * target_.col_stride_bytes}) {
      (end < 0 ? lowest : highest) += end;
    }
    memory_.assign(
        static_cast<std::size_t>(highest - lowest + element) + 2 * kGuard,
        std::byte{0xc3});
    target_.data = memory_.data() + kGuard - lowest;
    expected_ = memory_;
    ForEachUnit([&](std::uint64_t unit, std::byte* at) {
      std::memcpy(at, tensor.data() + unit * unit_bytes, unit_bytes);
    });
  }

  const BoxTarget& target() const { return target_; }
  bool Contains(std::uint64_t unit) const {
    return target_.Contains(unit / grid_.cols, unit % grid_.cols);
  }
  // Whether the box holds `tensor`, and all else is as it was.
  bool Holds(std::span<const std::byte> tensor) {
    ForEachUnit([&](std::uint64_t unit, std::byte* at) {
      std::memcpy(expected_.data() + (at - memory_.data()),
                  tensor.data() + unit * target_.unit_bytes,
                  target_.unit_bytes);
    });
    return expected_ == memory_;
  }

 private:
  static constexpr std::size_t kGuard = 64;

  template <typename Visit>
  void ForEachUnit(Visit&& visit) {
    for (std::uint64_t r = target_.row_begin; r < target_.row_end; ++r) {
      for (std::uint64_t c = target_.col_begin; c < target_.col_end; ++c) {
        visit(r * grid_.cols + c, target_.At(r, c));
      }
    }
  }

  TileGrid grid_;
  BoxTarget target_;
  std::vector<std::byte> memory_;
  std::vector<std::byte> expected_;
};

TestBox RandomBox(std::mt19937_64& rng, const TileGrid& grid,
                  std::uint32_t unit_bytes, std::uint32_t units_per_element,
                  std::span<const std::byte> tensor) {
  std::uint64_t bounds[4] = {0, grid.rows, 0, grid.cols / units_per_element};
  for (int dimension = 0; dimension < 2; ++dimension) {
    if (rng() % 2 == 0) continue;
    std::uint64_t* const pair = bounds + 2 * dimension;
    const std::uint64_t extent = pair[1];
    pair[0] = rng() % extent;
    pair[1] = pair[0] + 1 + rng() % (extent - pair[0]);
  }
  return TestBox(grid, unit_bytes, units_per_element, bounds[0], bounds[1],
                 bounds[2] * units_per_element, bounds[3] * units_per_element,
                 static_cast<TestBox::Layout>(rng() % TestBox::kLayouts),
                 tensor);
}

// ----------------------------------------------------- whole batches of
// records

// Some tensors, the records of a step of them, and boxes that hold them.
struct TestBatch {
  struct Tensor {
    TileGrid grid;
    std::uint32_t unit_bytes;
    std::vector<std::byte> before;
    std::vector<std::byte> after;
    std::vector<TestBox> boxes;
  };
  std::vector<std::unique_ptr<Tensor>> tensors;
  std::vector<RecordSummary> summaries;  // of each record
  std::uint64_t nnz = 0;
  std::uint64_t written = 0;

  std::vector<ApplyTile> tiles;
  std::vector<struct ApplyRecord> records;
  std::vector<BoxTarget> boxes;
  Payloads payloads;
  ApplyOutcome outcome;
  std::vector<RecordSums> sums;
  ApplyBatch batch;
};

void AddTensor(std::mt19937_64& rng, const Shape& shape,
               std::uint32_t unit_bytes, std::uint32_t units_per_element,
               double density, TestBatch* to) {
  auto owned = std::make_unique<TestBatch::Tensor>();
  TestBatch::Tensor& tensor = *owned;
  tensor.grid = MakeTileGrid(shape, units_per_element);
  tensor.unit_bytes = unit_bytes;
  tensor.before.resize(tensor.grid.unit_count() * unit_bytes);
  FillRandom(rng, tensor.before);
  tensor.after = tensor.before;
  Perturb(rng, density, static_cast<Values>(rng() % 3), unit_bytes,
          tensor.after);
  const int box_count = static_cast<int>(rng() % 4);
  for (int n = 0; n < box_count; ++n) {
    tensor.boxes.push_back(RandomBox(rng, tensor.grid, unit_bytes,
                                     units_per_element, tensor.before));
  }
  const auto first_box = static_cast<std::uint32_t>(to->boxes.size());
  for (const TestBox& box : tensor.boxes) to->boxes.push_back(box.target());

  // One to three slices, cut anywhere.
  std::vector<std::uint64_t> cuts = {0, tensor.grid.unit_count()};
  for (std::uint64_t n = rng() % 3; n > 0; --n) {
    cuts.push_back(rng() % (tensor.grid.unit_count() + 1));
  }
  std::sort(cuts.begin(), cuts.end());
  for (std::size_t n = 0; n + 1 < cuts.size(); ++n) {
    const UnitRange slice{cuts[n], cuts[n + 1]};
    if (slice.begin == slice.end) continue;
    const auto part = [&](const std::vector<std::byte>& bytes) {
      return std::span(bytes).subspan(slice.begin * unit_bytes,
                                      slice.count() * unit_bytes);
    };
    const std::vector<Change> changes =
        PlainDiff(part(tensor.before), part(tensor.after), unit_bytes);
    if (changes.empty()) continue;
    for (const Change& change : changes) {
      for (const TestBox& box : tensor.boxes) {
        to->written += box.Contains(slice.begin + change.index) ? 1 : 0;
      }
    }
    to->nnz += changes.size();
    std::vector<std::byte> record =
        EncodeRecordScalar(tensor.grid, slice, unit_bytes, changes);
    const auto view = RecordView::Parse(record, tensor.grid.TilesOf(slice));
    ASSERT_TRUE(view.ok()) << view.status();
    const std::uint64_t at = to->payloads.Add(record, rng() % 9);
    for (const TileView& tile : view->tiles()) {
      ApplyTile listed;
      listed.payload =
          at + static_cast<std::uint64_t>(tile.payload.data() - record.data());
      listed.tile = tile.tile;
      listed.record = static_cast<std::uint32_t>(to->records.size());
      listed.bytes = static_cast<std::uint32_t>(tile.payload.size());
      listed.a = static_cast<std::uint16_t>(tile.a);
      listed.b = static_cast<std::uint16_t>(tile.b);
      listed.mode = static_cast<std::uint32_t>(tile.mode);
      to->tiles.push_back(listed);
    }
    struct ApplyRecord entry;
    entry.grid = tensor.grid;
    entry.slice = slice;
    entry.unit_bytes = unit_bytes;
    entry.first_box = first_box;
    entry.box_count = static_cast<std::uint32_t>(tensor.boxes.size());
    to->records.push_back(entry);
    record.resize(record.size() + kRecordSlackBytes);
    const auto summary =
        CheckRecord(std::span(record).first(record.size() - kRecordSlackBytes),
                    tensor.grid, slice, unit_bytes, kKey);
    ASSERT_TRUE(summary.ok()) << summary.status();
    to->summaries.push_back(*summary);
  }
  to->tensors.push_back(std::move(owned));
}

void Finish(TestBatch* test) {
  test->batch.tiles = test->tiles.data();
  test->batch.tile_count = test->tiles.size();
  test->batch.records = test->records.data();
  test->batch.record_count = static_cast<std::uint32_t>(test->records.size());
  test->batch.boxes = test->boxes.data();
  test->payloads.Give(&test->batch);
  std::memset(static_cast<void*>(&test->outcome), 0xee, sizeof(ApplyOutcome));
  test->batch.outcome = &test->outcome;
  test->sums.resize(test->records.size());
  std::fill(test->sums.begin(), test->sums.end(), RecordSums{11, 12, 13});
  test->batch.sums = test->sums.data();
  test->batch.l61 = TestL61();
}

void MakeBatch(std::mt19937_64& rng, int tensors, TestBatch* test) {
  const std::vector<Shape> shapes = testing::TestShapes();
  constexpr double kDensities[] = {0.0001, 0.001, 0.008, 0.03,
                                   0.1,    0.3,   0.7,   1};
  for (int n = 0; n < tensors; ++n) {
    const auto kind = rng() % 4;  // elements of 1, 2, 4 and 8 bytes
    AddTensor(rng, shapes[rng() % shapes.size()], kind == 3 ? 4 : 1u << kind,
              kind == 3 ? 2 : 1, kDensities[rng() % std::size(kDensities)],
              test);
  }
  Finish(test);
}

class TileApplyEmulationTest : public ::testing::Test {
 protected:
  std::uint64_t seed_ = std::random_device{}();
  std::mt19937_64 rng_{seed_};
  ::testing::ScopedTrace trace_{__FILE__, __LINE__,
                                absl::StrCat("seed ", seed_)};
};

TEST_F(TileApplyEmulationTest, ApplyTurnsOldWeightsIntoNewOnesInEveryBox) {
  for (int round = 0; round < Rounds(40); ++round) {
    TestBatch test;
    MakeBatch(rng_, 1 + static_cast<int>(rng_() % 6), &test);
    RunOnHost(rng_, test.batch);
    ASSERT_EQ(test.outcome.first_bad_tile, ~std::uint64_t{0});
    ASSERT_EQ(test.outcome.fault, TileFault::kNone);
    EXPECT_EQ(test.outcome.nnz, test.nnz);
    EXPECT_EQ(test.outcome.units_written, test.written);
    for (const auto& tensor : test.tensors) {
      for (TestBox& box : tensor->boxes) {
        ASSERT_TRUE(box.Holds(tensor->after)) << "round " << round;
      }
    }
  }
}

TEST_F(TileApplyEmulationTest, CheckSumsEachRecordAndWritesNoWeight) {
  for (int round = 0; round < Rounds(30); ++round) {
    TestBatch test;
    MakeBatch(rng_, 1 + static_cast<int>(rng_() % 5), &test);
    test.batch.mode = ApplyMode::kCheck;
    RunOnHost(rng_, test.batch);
    ASSERT_EQ(test.outcome.first_bad_tile, ~std::uint64_t{0});
    EXPECT_EQ(test.outcome.nnz, test.nnz);
    EXPECT_EQ(test.outcome.units_written, 0u);
    for (std::size_t n = 0; n < test.records.size(); ++n) {
      ASSERT_EQ(test.sums[n].nnz, test.summaries[n].nnz);
      ASSERT_EQ(test.sums[n].l61(), test.summaries[n].l61) << "round " << round;
    }
    for (const auto& tensor : test.tensors) {
      for (TestBox& box : tensor->boxes) ASSERT_TRUE(box.Holds(tensor->before));
    }
  }
}

TEST_F(TileApplyEmulationTest, TilesFromTheLimitOnAreLeftAlone) {
  for (int round = 0; round < Rounds(10); ++round) {
    TestBatch test;
    AddTensor(rng_, {300, 400}, 2, 1, round % 2 == 0 ? 0.01 : 0.2, &test);
    TestBatch::Tensor& tensor = *test.tensors[0];
    Finish(&test);
    if (test.tiles.empty()) continue;
    test.batch.tile_limit = rng_() % (test.tiles.size() + 1);
    RunOnHost(rng_, test.batch);
    std::vector<std::byte> expected = tensor.before;
    std::uint64_t nnz = 0;
    for (std::uint64_t i = 0; i < test.batch.tile_limit; ++i) {
      const ApplyTile& tile = test.tiles[i];
      const struct ApplyRecord& record = test.records[tile.record];
      const TileBox box = tensor.grid.Box(tile.tile);
      std::vector<Change> changes;
      ASSERT_TRUE(DecodeTile({.tile = tile.tile,
                              .mode = static_cast<TileMode>(tile.mode),
                              .a = tile.a,
                              .b = tile.b,
                              .payload = {test.batch.payloads + tile.payload,
                                          tile.bytes}},
                             box.unit_count(), record.unit_bytes, &changes)
                      .ok());
      nnz += changes.size();
      for (const Change& change : changes) {
        const std::uint64_t unit = tensor.grid.FlatIndex(box, change.index);
        std::memcpy(expected.data() + unit * 2, tensor.after.data() + unit * 2,
                    2);
      }
    }
    EXPECT_EQ(test.outcome.nnz, nnz);
    for (TestBox& box : tensor.boxes) ASSERT_TRUE(box.Holds(expected));
  }
}

TEST_F(TileApplyEmulationTest, AnEmptyBatchWritesItsOutcome) {
  TestBatch test;
  Finish(&test);
  RunOnHost(rng_, test.batch);
  EXPECT_EQ(test.outcome.nnz, 0u);
  EXPECT_EQ(test.outcome.units_written, 0u);
  EXPECT_EQ(test.outcome.first_bad_tile, ~std::uint64_t{0});
  EXPECT_EQ(test.outcome.fault, TileFault::kNone);
}

TEST_F(TileApplyEmulationTest, TheLowestBadTileIsNamedAndOthersAreApplied) {
  TestBatch test;
  AddTensor(rng_, {600, 600}, 2, 1, 0.02, &test);
  TestBatch::Tensor& tensor = *test.tensors[0];
  ASSERT_GT(test.tiles.size(), 12u);
  // Counts of nothing, a payload beyond the end, a record and a tile that are
  // not there: none of them may be looked into.
  test.tiles[11].a = test.tiles[11].b = 0;
  test.tiles[9].record = 1000;
  test.tiles[7].tile = tensor.grid.tile_count();
  test.tiles[5].payload = ~std::uint64_t{0} - 3;
  Finish(&test);
  RunOnHost(rng_, test.batch);
  EXPECT_EQ(test.outcome.first_bad_tile, 5u);
  EXPECT_EQ(test.outcome.fault, TileFault::kPlanes);
  std::vector<std::byte> expected = tensor.before;
  for (std::size_t i = 0; i < test.tiles.size(); ++i) {
    if (i == 5 || i == 7 || i == 9 || i == 11) continue;
    const TileBox box = tensor.grid.Box(test.tiles[i].tile);
    const UnitRange slice = test.records[test.tiles[i].record].slice;
    for (std::uint32_t local = 0; local < box.unit_count(); ++local) {
      const std::uint64_t unit = tensor.grid.FlatIndex(box, local);
      if (unit < slice.begin || unit >= slice.end) continue;
      std::memcpy(expected.data() + 2 * unit, tensor.after.data() + 2 * unit,
                  2);
    }
  }
  for (TestBox& box : tensor.boxes) EXPECT_TRUE(box.Holds(expected));
  for (const auto& [i, fault] :
       std::map<int, TileFault>{{5, TileFault::kPlanes},
                                {7, TileFault::kSlice},
                                {9, TileFault::kPlanes},
                                {11, TileFault::kCounts}}) {
    test.batch.tiles = &test.tiles[i];
    test.batch.tile_count = 1;
    RunOnHost(rng_, test.batch);
    EXPECT_EQ(test.outcome.first_bad_tile, 0u);
    EXPECT_EQ(test.outcome.fault, fault) << i;
    EXPECT_EQ(test.outcome.nnz, 0u);
  }
}

// ----------------------------------------- single tiles against the plain
// decoder

// Bit fields, least significant bit first.
class Bits {
 public:
  void Put(std::uint64_t value, std::uint32_t width) {
    for (std::uint32_t i = 0; i < width; ++i, ++count_) {
      if (count_ % 8 == 0) bytes_.push_back(std::byte{0});
      bytes_.back() |= static_cast<std::byte>((value >> i & 1) << (count_ % 8));
    }
  }
  void PutUnary(std::uint64_t zeros) {
    for (; zeros > 0; --zeros) Put(0, 1);
    Put(1, 1);
  }
  std::vector<std::byte> Take() { return std::move(bytes_); }

 private:
  std::vector<std::byte> bytes_;
  std::uint64_t count_ = 0;
};

struct TestTile {
  TileMode mode;
  std::uint32_t a;
  std::uint32_t b;
  std::vector<std::byte> payload;
};

// As sparse, whatever the density; may state rules broken by its changes.
TestTile SparseTile(std::span<const Change> changes, std::uint32_t units) {
  TestTile tile{TileMode::kSparse, 0, 0, {}};
  std::vector<Change> lists[2];
  for (const Change& change : changes) {
    lists[std::abs(change.difference) == 1 ? 0 : 1].push_back(change);
  }
  tile.a = static_cast<std::uint32_t>(lists[0].size());
  tile.b = static_cast<std::uint32_t>(lists[1].size());
  Bits bits;
  std::uint32_t k[2] = {0, 0};
  for (int list = 0; list < 2; ++list) {
    if (lists[list].empty()) continue;
    k[list] =
        RiceParameter(static_cast<std::uint32_t>(lists[list].size()), units);
    std::uint32_t next = 0;
    for (const Change& change : lists[list]) {
      bits.Put(change.index - next, k[list]);
      bits.Put(change.difference < 0 ? 1 : 0, 1);
      next = change.index + 1;
    }
  }
  for (int list = 0; list < 2; ++list) {
    std::uint32_t next = 0;
    for (const Change& change : lists[list]) {
      bits.PutUnary((change.index - next) >> k[list]);
      next = change.index + 1;
    }
  }
  for (const Change& change : lists[1]) {
    bits.PutUnary(std::bit_width(static_cast<std::uint64_t>(
                      std::abs(change.difference) - 1)) -
                  1);
  }
  for (const Change& change : lists[1]) {
    const auto m = static_cast<std::uint64_t>(std::abs(change.difference) - 1);
    bits.Put(m, std::bit_width(m) - 1);
  }
  tile.payload = bits.Take();
  return tile;
}

TestTile DenseTile(std::span<const Change> changes, std::uint32_t units,
                   std::uint32_t unit_bits, std::uint32_t k) {
  TestTile tile{TileMode::kDense, k, 0, {}};
  std::vector<std::uint64_t> zigzags(units);
  for (const Change& change : changes) {
    zigzags[change.index] = Zigzag(change.difference);
  }
  Bits bits;
  for (const std::uint64_t z : zigzags) bits.Put(z, k);
  if (k <= unit_bits) {
    for (const std::uint64_t z : zigzags) {
      bits.PutUnary(std::min<std::uint64_t>(z >> k, kDenseEscapeQuotient));
    }
    for (const std::uint64_t z : zigzags) {
      if (z >> k < kDenseEscapeQuotient) continue;
      bits.Put(z, unit_bits + 1);
      ++tile.b;
    }
  }
  tile.payload = bits.Take();
  return tile;
}

std::vector<Change> RandomChanges(std::mt19937_64& rng, std::uint32_t units,
                                  std::uint32_t count,
                                  std::uint32_t unit_bits) {
  std::vector<std::uint32_t> all(units);
  for (std::uint32_t i = 0; i < units; ++i) all[i] = i;
  std::shuffle(all.begin(), all.end(), rng);
  all.resize(count);
  std::sort(all.begin(), all.end());
  std::vector<Change> changes;
  const auto kind = rng() % 4;
  const std::uint64_t largest = (std::uint64_t{1} << unit_bits) - 1;
  for (const std::uint32_t index : all) {
    std::uint64_t magnitude = 1;
    if (kind == 1 || (kind == 2 && rng() % 8 == 0)) {
      magnitude = 1 + rng() % std::min<std::uint64_t>(largest, 40);
    } else if (kind == 3) {
      magnitude = rng() % 4 == 0 ? largest : 1 + rng() % largest;
    }
    const auto d = static_cast<std::int64_t>(magnitude);
    changes.push_back({index, rng() % 2 == 0 ? d : -d});
  }
  return changes;
}

void FlipBit(std::vector<std::byte>& bytes, std::uint64_t bit) {
  bytes[bit / 8] ^= static_cast<std::byte>(1u << (bit % 8));
}

// Breaks a tile in one of many ways, or none.
void Mutate(std::mt19937_64& rng, std::uint32_t units, TestTile* tile) {
  switch (rng() % 12) {
    case 0:
      return;
    case 1:
      tile->payload.resize(rng() % (tile->payload.size() + 1));
      return;
    case 2:
      tile->payload.resize(tile->payload.size() + 1 + rng() % 12,
                           static_cast<std::byte>(rng() % 2));
      return;
    case 3:
      tile->a = static_cast<std::uint32_t>(rng() % (units + 2));
      return;
    case 4:
      tile->b = static_cast<std::uint32_t>(rng() % (units + 2));
      return;
    case 5:  // near by
      tile->a += rng() % 3 - 1;
      tile->b += rng() % 3 - 1;
      tile->a &= 0xffff;
      tile->b &= 0xffff;
      return;
    case 6:
      tile->mode = tile->mode == TileMode::kSparse ? TileMode::kDense
                                                   : TileMode::kSparse;
      return;
    case 7:
      FillRandom(rng, tile->payload);
      return;
    case 8:
      std::fill(tile->payload.begin(), tile->payload.end(),
                static_cast<std::byte>(rng() % 2 == 0 ? 0 : 0xff));
      return;
    case 9: {  // the last bits: padding, mantissas
      for (int n = 0; n < 2 && !tile->payload.empty(); ++n) {
        const std::uint64_t bits = 8 * tile->payload.size();
        FlipBit(tile->payload,
                bits - 1 - rng() % std::min<std::uint64_t>(bits, 16));
      }
      return;
    }
    default:
      for (std::uint64_t n = 1 + rng() % 3; n > 0 && !tile->payload.empty();
           --n) {
        FlipBit(tile->payload, rng() % (8 * tile->payload.size()));
      }
  }
}

// Decodes one tile with a group of `Size` and returns what it did to a box that
// holds the tensor and one that holds a part.
template <typename Size>
void RunOneTile(std::mt19937_64& rng, const ApplyBatch& batch) {
  HostGroup<Size::kThreads> group(rng());
  internal::ApplyTally<HostGroup<Size::kThreads>> tally;
  auto shared = PoisonedShared<Size>();
  internal::StartOutcome(batch.outcome);
  if (batch.mode == ApplyMode::kCheck) {
    batch.sums[0] = {};
    internal::ApplyOneTile<ApplyMode::kCheck>(group, batch, 0, batch.tiles[0],
                                              shared.get(), &tally);
  } else {
    internal::ApplyOneTile<ApplyMode::kApply>(group, batch, 0, batch.tiles[0],
                                              shared.get(), &tally);
  }
  internal::AddTally(group, &tally, batch.outcome);
  internal::FinishOutcome(batch.outcome);
}

struct Counts {
  int taken = 0;
  int refused = 0;
  std::map<TileFault, int> faults;
};

// Runs `tile` through one size of group and compares with DecodeTile.
template <typename Size>
void CompareWithPlainDecoder(std::mt19937_64& rng, const TestTile& tile,
                             const TileGrid& grid, std::uint64_t tile_index,
                             const UnitRange& slice, std::uint32_t unit_bytes,
                             Counts* counts) {
  const TileBox box = grid.Box(tile_index);
  std::vector<std::byte> tensor(grid.unit_count() * unit_bytes);
  FillRandom(rng, tensor);
  std::vector<std::byte> expected = tensor;

  std::vector<Change> changes;
  bool take = DecodeTile({.tile = tile_index,
                          .mode = tile.mode,
                          .a = tile.a,
                          .b = tile.b,
                          .payload = tile.payload},
                         box.unit_count(), unit_bytes, &changes)
                  .ok();
  std::uint64_t l61 = 0;
  for (const Change& change : changes) {
    if (!take) break;
    const std::uint64_t unit = grid.FlatIndex(box, change.index);
    take = unit >= slice.begin && unit < slice.end;
    l61 = L61Add(l61, L61OfChange(kKey, unit, unit_bytes, change.difference));
    std::byte* const at = expected.data() + unit * unit_bytes;
    StoreUnit(at, unit_bytes,
              LoadUnit(at, unit_bytes) +
                  static_cast<std::uint64_t>(change.difference));
  }
  if (!take) expected = tensor;

  TestBox whole(grid, unit_bytes, 1, 0, grid.rows, 0, grid.cols,
                TestBox::kPitched, tensor);
  TestBox part = RandomBox(rng, grid, unit_bytes, 1, tensor);
  const BoxTarget targets[] = {whole.target(), part.target()};

  TestBatch test;
  struct ApplyRecord record;
  record.grid = grid;
  record.slice = slice;
  record.unit_bytes = unit_bytes;
  record.box_count = 2;
  test.records.push_back(record);
  ApplyTile listed;
  listed.payload = test.payloads.Add(tile.payload, rng() % 5);
  listed.tile = tile_index;
  listed.bytes = static_cast<std::uint32_t>(tile.payload.size());
  listed.a = static_cast<std::uint16_t>(tile.a);
  listed.b = static_cast<std::uint16_t>(tile.b);
  listed.mode = static_cast<std::uint32_t>(tile.mode);
  test.tiles.push_back(listed);
  Finish(&test);
  test.batch.boxes = targets;

  RunOneTile<Size>(rng, test.batch);
  ASSERT_EQ(test.outcome.first_bad_tile, take ? ~std::uint64_t{0} : 0);
  ASSERT_EQ(test.outcome.fault == TileFault::kNone, take);
  ASSERT_EQ(test.outcome.nnz, take ? changes.size() : 0);
  ASSERT_TRUE(whole.Holds(expected));
  ASSERT_TRUE(part.Holds(expected));
  ++counts->faults[test.outcome.fault];
  ++(take ? counts->taken : counts->refused);

  test.batch.mode = ApplyMode::kCheck;
  RunOneTile<Size>(rng, test.batch);
  ASSERT_EQ(test.outcome.first_bad_tile, take ? ~std::uint64_t{0} : 0);
  ASSERT_EQ(test.sums[0].nnz, take ? changes.size() : 0);
  ASSERT_EQ(test.sums[0].l61(), take ? l61 : 0);
  ASSERT_TRUE(whole.Holds(expected));
}

// A tile goes through every size of group that can hold it.
void CompareInEverySize(std::mt19937_64& rng, const TestTile& tile,
                        const TileGrid& grid, std::uint64_t tile_index,
                        const UnitRange& slice, std::uint32_t unit_bytes,
                        Counts* counts) {
  const std::uint32_t smallest =
      internal::ApplyClass({.a = static_cast<std::uint16_t>(tile.a),
                            .b = static_cast<std::uint16_t>(tile.b),
                            .mode = static_cast<std::uint32_t>(tile.mode)});
  if (smallest == 0) {
    CompareWithPlainDecoder<LightApply>(rng, tile, grid, tile_index, slice,
                                        unit_bytes, counts);
  }
  if (smallest <= 1 && (smallest == 1 || rng() % 4 == 0)) {
    CompareWithPlainDecoder<MediumApply>(rng, tile, grid, tile_index, slice,
                                         unit_bytes, counts);
  }
  if (smallest == 2 || rng() % 8 == 0) {
    CompareWithPlainDecoder<HeavyApply>(rng, tile, grid, tile_index, slice,
                                        unit_bytes, counts);
  }
}

TEST_F(TileApplyEmulationTest,
       MutatedTilesAreRefusedExactlyWhenDecodeTileDoes) {
  const Shape shapes[] = {{9}, {300}, {40, 130}, {1, 2000}, {130, 131}};
  Counts counts;
  for (int round = 0; round < Rounds(6000); ++round) {
    SCOPED_TRACE(absl::StrCat("round ", round));
    const std::uint32_t unit_bytes = 1u << rng_() % 3;
    const TileGrid grid = MakeTileGrid(shapes[rng_() % 5], 1);
    const std::uint64_t tile_index = rng_() % grid.tile_count();
    const std::uint32_t units = grid.Box(tile_index).unit_count();
    const std::uint32_t few = std::min<std::uint32_t>(units, 60);
    const auto count = static_cast<std::uint32_t>(
        1 + rng_() % (rng_() % 4 == 0 ? units : few));
    const std::vector<Change> changes =
        RandomChanges(rng_, units, count, 8 * unit_bytes);
    TestTile tile =
        rng_() % 3 == 0
            ? DenseTile(
                  changes, units, 8 * unit_bytes,
                  static_cast<std::uint32_t>(rng_() % (8 * unit_bytes + 2)))
            : SparseTile(changes, units);
    UnitRange slice{0, grid.unit_count()};
    if (rng_() % 8 == 0) slice = testing::RandomSlice(rng_, grid);
    Mutate(rng_, units, &tile);
    CompareInEverySize(rng_, tile, grid, tile_index, slice, unit_bytes,
                       &counts);
    if (HasFatalFailure()) return;
  }
  EXPECT_GT(counts.taken, counts.refused / 20);
  EXPECT_GT(counts.refused, counts.taken / 20);
  // Each fault was met.
  EXPECT_EQ(counts.faults.size(), 7u);
}

TEST_F(TileApplyEmulationTest, FullTilesOfEveryDensityAreDecoded) {
  Counts counts;
  const TileGrid grid = MakeTileGrid(Shape{128, 128}, 1);
  for (const std::uint32_t count :
       {1u, 31u, 130u, 491u, 768u, 769u, 4096u, 4097u, 16383u, 16384u}) {
    for (int round = 0; round < Rounds(10); ++round) {
      SCOPED_TRACE(absl::StrCat("changes ", count, " round ", round));
      const std::uint32_t unit_bytes = 1u << round % 3;
      const std::vector<Change> changes =
          RandomChanges(rng_, kTileUnits, count, 8 * unit_bytes);
      TestTile tile = SparseTile(changes, kTileUnits);
      if (round >= 6) {
        tile = DenseTile(
            changes, kTileUnits, 8 * unit_bytes,
            static_cast<std::uint32_t>(rng_() % (8 * unit_bytes + 2)));
      }
      if (round % 2 == 1) Mutate(rng_, kTileUnits, &tile);
      CompareInEverySize(rng_, tile, grid, 0, {0, kTileUnits}, unit_bytes,
                         &counts);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(TileApplyEmulationTest, SpecialFaultsAreToldApart) {
  const TileGrid grid = MakeTileGrid(Shape{128, 128}, 1);
  const UnitRange all{0, kTileUnits};
  const auto fault_of = [&](const TestTile& tile, const UnitRange& slice) {
    Counts counts;
    CompareInEverySize(rng_, tile, grid, 0, slice, 2, &counts);
    EXPECT_EQ(counts.faults.size(), 1u);
    return counts.faults.begin()->first;
  };
  const auto sparse = [](std::vector<Change> changes) {
    return SparseTile(changes, kTileUnits);
  };
  EXPECT_EQ(fault_of(sparse({{0, 1}, {16383, -5}}), all), TileFault::kNone);
  EXPECT_EQ(fault_of(sparse({{0, 1}, {16384, -1}}), all), TileFault::kIndex);
  EXPECT_EQ(fault_of(sparse({{77, 1}, {77, 2}}), all), TileFault::kIndex);
  EXPECT_EQ(fault_of(sparse({{77, 65536}}), all), TileFault::kDifference);
  EXPECT_EQ(fault_of(sparse({{77, 1 << 20}}), all), TileFault::kDifference);
  EXPECT_EQ(fault_of(sparse({{77, 65535}}), all), TileFault::kNone);
  EXPECT_EQ(fault_of(sparse({{77, -65535}}), {77, 78}), TileFault::kNone);
  EXPECT_EQ(fault_of(sparse({{77, -65535}}), {78, 79}), TileFault::kSlice);
  EXPECT_EQ(fault_of(sparse({{77, -65535}}), {0, 77}), TileFault::kSlice);
  TestTile padded = sparse({{1, 1}, {20, -1}, {300, 9}});
  padded.payload.push_back(std::byte{0});
  EXPECT_EQ(fault_of(padded, all), TileFault::kPlanes);
  padded.payload.resize(padded.payload.size() - 2);
  EXPECT_EQ(fault_of(padded, all), TileFault::kPlanes);
  padded.payload.clear();
  EXPECT_EQ(fault_of(padded, all), TileFault::kPlanes);
  const auto dense = [](std::vector<Change> changes, std::uint32_t k) {
    return DenseTile(changes, kTileUnits, 16, k);
  };
  EXPECT_EQ(fault_of(dense({}, 3), all), TileFault::kCounts);
  EXPECT_EQ(fault_of(dense({{5, 1}}, 17), all), TileFault::kNone);
  EXPECT_EQ(fault_of(dense({{5, 65535}, {16383, -65535}}, 17), all),
            TileFault::kNone);
  EXPECT_EQ(fault_of(dense({{5, -65536}}, 17), all), TileFault::kDifference);
  TestTile tile = dense({{5, 1000}, {6, -1}}, 0);
  EXPECT_EQ(fault_of(tile, all), TileFault::kNone);
  EXPECT_EQ(tile.b, 1u);
  tile.b = 0;
  EXPECT_EQ(fault_of(tile, all), TileFault::kEscape);
  tile.b = 2;
  EXPECT_EQ(fault_of(tile, all), TileFault::kEscape);
  tile.b = 1;
  tile.payload.push_back(std::byte{0});
  EXPECT_EQ(fault_of(tile, all), TileFault::kPlanes);
  tile.payload.resize(tile.payload.size() - 2);
  EXPECT_EQ(fault_of(tile, all), TileFault::kPlanes);
  tile = dense({{5, 1}}, 17);
  tile.b = 1;
  EXPECT_EQ(fault_of(tile, all), TileFault::kEscape);
  tile.a = 18;
  tile.b = 0;
  EXPECT_EQ(fault_of(tile, all), TileFault::kCounts);
  // An escape of what needs none.
  Bits bits;
  for (int i = 0; i < 16384; ++i) bits.PutUnary(i == 9 ? 15 : 0);
  bits.Put(14, 17);
  EXPECT_EQ(fault_of({TileMode::kDense, 0, 1, bits.Take()}, all),
            TileFault::kEscape);
}

}  // namespace
}  // namespace kedge
