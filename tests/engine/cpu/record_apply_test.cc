// Goal: applying a record turns old weights into new ones wherever and however
// they lie in memory; damaged records never crash and never write outside a
// box. Method: property tests with printed seeds against the plain decoder, on
// every instruction set, with guard bytes around every target.

#include "kedge/engine/cpu/record_apply.h"

#include <memory>
#include <random>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kedge/format/codec.h"
#include "kedge/format/l61.h"
#include "kedge/tests/engine/cpu/cpu_test_support.h"
#include "kedge/tests/support/sanitized.h"

namespace kedge {
namespace {

using testing::FillRandom;
using testing::ForEachTarget;
using testing::GuardedBytes;
using testing::LoadUnit;
using testing::Perturb;
using testing::PlainDiff;
using testing::RandomSlice;
using testing::Shape;
using testing::StoreUnit;
using testing::Values;

// A record in an allocation of its own, with exactly the promised slack behind
// it, so that a sanitizer sees a read beyond.
class RecordBytes {
 public:
  explicit RecordBytes(std::span<const std::byte> record)
      : size_(record.size()),
        bytes_(new std::byte[record.size() + kRecordSlackBytes]) {
    std::copy(record.begin(), record.end(), bytes_.get());
    // The slack's values do not matter.
    std::fill_n(bytes_.get() + size_, kRecordSlackBytes, std::byte{0xff});
  }
  std::span<std::byte> span() { return {bytes_.get(), size_}; }

 private:
  std::size_t size_;
  std::unique_ptr<std::byte[]> bytes_;
};

struct Step {
  TileGrid grid;
  UnitRange slice;
  std::uint32_t unit_bytes;
  std::vector<std::byte> before;  // the whole tensor
  std::vector<std::byte> after;   // differs inside the slice only
  std::vector<Change> changes;    // by unit within the slice
  std::vector<std::byte> record;
};

Step MakeStep(std::mt19937_64& rng, const Shape& shape,
              std::uint32_t unit_bytes, std::uint32_t units_per_element) {
  Step step;
  step.grid = MakeTileGrid(shape, units_per_element);
  step.unit_bytes = unit_bytes;
  step.before.resize(step.grid.unit_count() * unit_bytes);
  FillRandom(rng, step.before);
  step.after = step.before;
  step.slice = RandomSlice(rng, step.grid);
  const double densities[] = {0.0001, 0.001, 0.01, 0.05, 0.3, 1};
  const auto part = [&](std::vector<std::byte>& bytes) {
    return std::span(bytes).subspan(step.slice.begin * unit_bytes,
                                    step.slice.count() * unit_bytes);
  };
  Perturb(rng, densities[rng() % 6], static_cast<Values>(rng() % 3), unit_bytes,
          part(step.after));
  step.changes = PlainDiff(part(step.before), part(step.after), unit_bytes);
  if (step.changes.empty()) {
    part(step.after)[0] ^= std::byte{1};
    step.changes = PlainDiff(part(step.before), part(step.after), unit_bytes);
  }
  step.record =
      EncodeRecordScalar(step.grid, step.slice, unit_bytes, step.changes);
  return step;
}

enum class Layout { kWhole, kRows, kColumns, kBox, kTransposed, kPadded };

// A box of the tensor in guarded memory of its own.
struct Target {
  GuardedBytes memory;
  BoxTarget box;
};

Target MakeTarget(std::mt19937_64& rng, const Step& step, Layout layout,
                  std::uint32_t units_per_element) {
  const TileGrid& grid = step.grid;
  const std::uint64_t elements = grid.cols / units_per_element;
  BoxTarget box;
  box.unit_bytes = step.unit_bytes;
  box.units_per_element = units_per_element;
  box.row_end = grid.rows;
  std::uint64_t element_begin = 0;
  std::uint64_t element_end = elements;
  const bool cut_rows = layout == Layout::kRows || layout == Layout::kBox ||
                        layout == Layout::kTransposed;
  const bool cut_cols = layout == Layout::kColumns || layout == Layout::kBox ||
                        layout == Layout::kTransposed ||
                        layout == Layout::kPadded;
  if (cut_rows) {
    box.row_begin = rng() % grid.rows;
    box.row_end = box.row_begin + 1 + rng() % (grid.rows - box.row_begin);
  }
  if (cut_cols) {
    element_begin = rng() % elements;
    element_end = element_begin + 1 + rng() % (elements - element_begin);
  }
  box.col_begin = element_begin * units_per_element;
  box.col_end = element_end * units_per_element;
  const std::int64_t element_bytes = step.unit_bytes * units_per_element;
  const auto rows = static_cast<std::int64_t>(box.row_end - box.row_begin);
  const auto cols = static_cast<std::int64_t>(element_end - element_begin);
  std::int64_t size = 0;
  if (layout == Layout::kTransposed) {
    box.row_stride_bytes = element_bytes;
    box.col_stride_bytes = element_bytes * (rows + 1);
    size = (cols - 1) * box.col_stride_bytes + rows * element_bytes;
  } else {
    box.col_stride_bytes = element_bytes;
    // Packed with other tensors in one allocation: rows further apart.
    box.row_stride_bytes =
        element_bytes * (cols + (layout == Layout::kPadded ? 5 : 0));
    size = (rows - 1) * box.row_stride_bytes + cols * element_bytes;
  }
  Target target{GuardedBytes(static_cast<std::size_t>(size), rng() % 8), box};
  target.box.data = target.memory.data();
  return target;
}

// Fills the box from a whole tensor, unit by unit.
void Fill(const Step& step, const std::vector<std::byte>& tensor,
          Target& target) {
  for (std::uint64_t r = target.box.row_begin; r < target.box.row_end; ++r) {
    for (std::uint64_t c = target.box.col_begin; c < target.box.col_end; ++c) {
      StoreUnit(
          target.box.At(r, c), step.unit_bytes,
          LoadUnit(tensor.data() + (r * step.grid.cols + c) * step.unit_bytes,
                   step.unit_bytes));
    }
  }
}

void ExpectHolds(const Step& step, const std::vector<std::byte>& tensor,
                 const Target& target) {
  Target expected = target;
  expected.box.data = expected.memory.data();
  Fill(step, tensor, expected);
  ASSERT_EQ(std::memcmp(expected.memory.data(), target.memory.data(),
                        target.memory.size()),
            0);
  ASSERT_TRUE(target.memory.GuardsIntact());
}

std::uint64_t CountInside(const Step& step, const BoxTarget& box) {
  std::uint64_t count = 0;
  for (const Change& change : step.changes) {
    const std::uint64_t unit = step.slice.begin + change.index;
    count += box.Contains(unit / step.grid.cols, unit % step.grid.cols);
  }
  return count;
}

constexpr Layout kLayouts[] = {Layout::kWhole,      Layout::kRows,
                               Layout::kColumns,    Layout::kBox,
                               Layout::kTransposed, Layout::kPadded};

TEST(RecordApplyTest, TurnsOldIntoNewInEveryLayout) {
  std::uint64_t seed = 1000;
  ForEachTarget([&] {
    for (const Shape& shape : testing::TestShapes()) {
      for (const std::uint32_t unit_bytes : {1u, 2u, 4u}) {
        const std::uint32_t per_element = unit_bytes == 4 && seed % 2 ? 2 : 1;
        std::mt19937_64 rng(++seed);
        SCOPED_TRACE(absl::StrCat("seed ", seed, " shape ",
                                  absl::StrJoin(shape, "x"), " unit bytes ",
                                  unit_bytes));
        const Step step = MakeStep(rng, shape, unit_bytes, per_element);
        RecordBytes record(step.record);
        for (const Layout layout : kLayouts) {
          SCOPED_TRACE(absl::StrCat("layout ", static_cast<int>(layout)));
          Target target = MakeTarget(rng, step, layout, per_element);
          Fill(step, step.before, target);
          const auto written = ApplyRecord(record.span(), step.grid, step.slice,
                                           unit_bytes, {&target.box, 1});
          ASSERT_TRUE(written.ok()) << written.status().message();
          ASSERT_EQ(*written, CountInside(step, target.box));
          ExpectHolds(step, step.after, target);
          if (::testing::Test::HasFatalFailure()) return;
        }
      }
    }
  });
}

TEST(RecordApplyTest, ReplicasAndShardsEachGetTheirChanges) {
  std::mt19937_64 rng(7);
  for (int round = 0; round < 10; ++round) {
    const Step step = MakeStep(rng, {300, 400}, 2, 1);
    RecordBytes record(step.record);
    std::vector<Target> targets;
    for (const Layout layout : kLayouts) {
      targets.push_back(MakeTarget(rng, step, layout, 1));
      targets.back().box.data = targets.back().memory.data();
    }
    std::vector<BoxTarget> boxes;
    std::uint64_t expected = 0;
    for (Target& target : targets) {
      target.box.data = target.memory.data();
      Fill(step, step.before, target);
      boxes.push_back(target.box);
      expected += CountInside(step, target.box);
    }
    const auto written =
        ApplyRecord(record.span(), step.grid, step.slice, 2, boxes);
    ASSERT_TRUE(written.ok()) << written.status().message();
    EXPECT_EQ(*written, expected);
    for (const Target& target : targets) ExpectHolds(step, step.after, target);
  }
}

TEST(RecordApplyTest, SkipsTilesOutsideEveryBoxUndecoded) {
  std::mt19937_64 rng(8);
  Step step;
  step.grid = MakeTileGrid(Shape{256, 256}, 1);
  step.slice = {0, 256 * 256};
  step.unit_bytes = 2;
  step.changes = {{0, 1}, {200, 7}};  // tiles 0 and 1
  step.record = EncodeRecordScalar(step.grid, step.slice, 2, step.changes);
  RecordBytes record(step.record);
  record.span().back() ^= std::byte{0xff};  // breaks the last payload, tile 1
  std::vector<std::byte> weights(128 * 128 * 2);
  BoxTarget box{weights.data(), 0, 128, 0, 128, 256, 2, 2, 1};
  EXPECT_TRUE(
      ApplyRecord(record.span(), step.grid, step.slice, 2, {&box, 1}).ok());
  EXPECT_EQ(LoadUnit(weights.data(), 2), 1u);
  box.col_begin = 128;
  box.col_end = 256;
  EXPECT_FALSE(
      ApplyRecord(record.span(), step.grid, step.slice, 2, {&box, 1}).ok());
}

TEST(RecordApplyTest, CheckGivesCountAndSum) {
  const L61Key key = L61Key::FromSeed(77);
  std::uint64_t seed = 3000;
  ForEachTarget([&] {
    for (const Shape& shape : testing::TestShapes()) {
      for (const std::uint32_t unit_bytes : {1u, 2u, 4u}) {
        std::mt19937_64 rng(++seed);
        SCOPED_TRACE(
            absl::StrCat("seed ", seed, " shape ", absl::StrJoin(shape, "x")));
        const Step step = MakeStep(rng, shape, unit_bytes, 1);
        RecordBytes record(step.record);
        const auto summary =
            CheckRecord(record.span(), step.grid, step.slice, unit_bytes, key);
        ASSERT_TRUE(summary.ok()) << summary.status().message();
        ASSERT_EQ(summary->nnz, step.changes.size());
        ASSERT_EQ(L61Add(L61SumScalar(key, 0, step.before), summary->l61),
                  L61SumScalar(key, 0, step.after));
      }
    }
  });
}

TEST(RecordApplyTest, RefusesWhatThePlainDecoderRefuses) {
  const L61Key key = L61Key::FromSeed(78);
  int refused = 0;
  int accepted = 0;
  const Shape shapes[] = {{300, 130}, {20000}, {900, 7}, {5, 1000}};
  ForEachTarget([&] {
    for (std::uint64_t seed = 0; seed < std::uint64_t(Rounds(300)); ++seed) {
      std::mt19937_64 rng(seed);
      const std::uint32_t unit_bytes = 1u << (rng() % 3);
      const Step step = MakeStep(rng, shapes[rng() % 4], unit_bytes, 1);
      RecordBytes record(step.record);
      for (std::uint64_t n = 1 + rng() % 3; n > 0; --n) {
        const std::size_t reach =
            rng() % 2 ? std::min<std::size_t>(record.span().size(), 80)
                      : record.span().size();
        record.span()[rng() % reach] ^= static_cast<std::byte>(1 << rng() % 8);
      }
      std::vector<std::byte> expected = step.before;
      std::uint64_t sum = 0;
      const absl::Status plain = VisitRecord(
          record.span(), step.grid, step.slice, unit_bytes,
          [&](std::uint64_t unit, std::int64_t d) {
            std::byte* const at = expected.data() + unit * unit_bytes;
            StoreUnit(at, unit_bytes,
                      LoadUnit(at, unit_bytes) + static_cast<std::uint64_t>(d));
            sum = L61Add(sum, L61OfChange(key, unit, unit_bytes, d));
          });
      const auto summary =
          CheckRecord(record.span(), step.grid, step.slice, unit_bytes, key);
      ASSERT_EQ(summary.ok(), plain.ok())
          << "seed " << seed << ": " << plain.message() << " / "
          << summary.status().message();

      for (const Layout layout : kLayouts) {
        Target target = MakeTarget(rng, step, layout, 1);
        Fill(step, step.before, target);
        const auto written = ApplyRecord(record.span(), step.grid, step.slice,
                                         unit_bytes, {&target.box, 1});
        ASSERT_TRUE(target.memory.GuardsIntact()) << "seed " << seed;
        if (plain.ok()) {
          ASSERT_TRUE(written.ok()) << "seed " << seed;
          ExpectHolds(step, expected, target);
        } else if (layout == Layout::kWhole) {
          ASSERT_EQ(written.status().code(), absl::StatusCode::kDataLoss)
              << "seed " << seed;
        }
      }
      if (plain.ok()) {
        ++accepted;
        ASSERT_EQ(summary->l61, sum);
      } else {
        ++refused;
        ASSERT_EQ(summary.status().code(), absl::StatusCode::kDataLoss);
      }
    }
  });
  EXPECT_GT(refused, 100);
  EXPECT_GT(accepted, 10);
}

TEST(RecordApplyTest, EveryBitFlipAgreesWithThePlainDecoder) {
  const L61Key key = L61Key::FromSeed(79);
  std::mt19937_64 rng(9);
  const TileGrid grid = MakeTileGrid(Shape{300}, 1);
  const UnitRange slice{0, 300};
  for (const std::uint32_t unit_bytes : {1u, 2u, 4u}) {
    for (const double density : {0.01, 0.1, 0.5, 1.0}) {
      std::vector<std::byte> before(300 * unit_bytes);
      FillRandom(rng, before);
      auto after = before;
      after[5] ^= std::byte{1};
      Perturb(rng, density, Values::kAnything, unit_bytes, after);
      RecordBytes record(EncodeRecordScalar(
          grid, slice, unit_bytes, PlainDiff(before, after, unit_bytes)));
      for (std::size_t bit = 0; bit < 8 * record.span().size(); ++bit) {
        record.span()[bit / 8] ^= static_cast<std::byte>(1 << (bit % 8));
        std::uint64_t sum = 0;
        const absl::Status plain = VisitRecord(
            record.span(), grid, slice, unit_bytes,
            [&](std::uint64_t unit, std::int64_t d) {
              sum = L61Add(sum, L61OfChange(key, unit, unit_bytes, d));
            });
        const auto summary =
            CheckRecord(record.span(), grid, slice, unit_bytes, key);
        ASSERT_EQ(summary.ok(), plain.ok())
            << "bit " << bit << " unit bytes " << unit_bytes << " density "
            << density << ": " << plain.message() << " / "
            << summary.status().message();
        if (plain.ok()) {
          ASSERT_EQ(summary->l61, sum);
        }
        record.span()[bit / 8] ^= static_cast<std::byte>(1 << (bit % 8));
      }
    }
  }
}

TEST(RecordApplyTest, RandomPayloadsOfPlausibleTilesNeverCrash) {
  const L61Key key = L61Key::FromSeed(80);
  for (std::uint64_t seed = 0; seed < std::uint64_t(Rounds(3000)); ++seed) {
    std::mt19937_64 rng(seed);
    const TileGrid grid = MakeTileGrid(Shape{40000}, 1);
    const std::uint32_t unit_bytes = 1u << (rng() % 3);
    TileHeader header;
    header.mode = static_cast<TileMode>(rng() % 2);
    const bool dense = header.mode == TileMode::kDense;
    header.a =
        static_cast<std::uint32_t>(rng() % (dense ? 36 : 16385) >> rng() % 8);
    header.b = static_cast<std::uint32_t>(rng() % 16385 >> rng() % 10);
    header.bytes =
        static_cast<std::uint32_t>(1 + (rng() % 60000 >> rng() % 12));
    RecordBuilder builder;
    builder.Start(grid.TilesOf({0, 40000}));
    builder.payload()->resize(header.bytes);
    FillRandom(rng, *builder.payload());
    if (rng() % 2)
      std::fill_n(builder.payload()->begin(), header.bytes / 2, std::byte{0});
    builder.AddTile(rng() % 3, header, 1);
    std::vector<std::byte> bytes;
    bytes.resize(builder.Finish(&bytes));
    RecordBytes record(bytes);
    const bool plain = VisitRecord(record.span(), grid, {0, 40000}, unit_bytes,
                                   [](std::uint64_t, std::int64_t) {})
                           .ok();
    ASSERT_EQ(
        CheckRecord(record.span(), grid, {0, 40000}, unit_bytes, key).ok(),
        plain)
        << "seed " << seed;
  }
}

TEST(RecordApplyTest, CopiesBetweenSlicesAndBoxes) {
  std::uint64_t seed = 5000;
  for (const Shape& shape : testing::TestShapes()) {
    for (const std::uint32_t unit_bytes : {1u, 2u, 4u}) {
      const std::uint32_t per_element = unit_bytes == 4 && seed % 2 ? 2 : 1;
      std::mt19937_64 rng(++seed);
      SCOPED_TRACE(
          absl::StrCat("seed ", seed, " shape ", absl::StrJoin(shape, "x")));
      const Step step = MakeStep(rng, shape, unit_bytes, per_element);
      for (const Layout layout : kLayouts) {
        Target target = MakeTarget(rng, step, layout, per_element);
        Fill(step, step.before, target);
        std::uint64_t inside = 0;
        for (std::uint64_t unit = step.slice.begin; unit < step.slice.end;
             ++unit) {
          inside +=
              target.box.Contains(unit / step.grid.cols, unit % step.grid.cols);
        }
        const std::byte* const slice_bytes =
            step.after.data() + step.slice.begin * unit_bytes;
        ASSERT_EQ(
            CopySliceToBox(slice_bytes, step.grid, step.slice, target.box),
            inside);
        ExpectHolds(step, step.after, target);

        // Back: the slice's bytes outside the box stay.
        std::vector<std::byte> back = step.before;
        ASSERT_EQ(CopyBoxToSlice(target.box, step.grid, step.slice,
                                 back.data() + step.slice.begin * unit_bytes),
                  inside);
        for (std::uint64_t unit = 0; unit < step.grid.unit_count(); ++unit) {
          const bool taken =
              unit >= step.slice.begin && unit < step.slice.end &&
              target.box.Contains(unit / step.grid.cols, unit % step.grid.cols);
          ASSERT_EQ(LoadUnit(back.data() + unit * unit_bytes, unit_bytes),
                    LoadUnit((taken ? step.after : step.before).data() +
                                 unit * unit_bytes,
                             unit_bytes));
        }
      }
    }
  }
}

}  // namespace
}  // namespace kedge
