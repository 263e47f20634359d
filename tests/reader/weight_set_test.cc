// Goal: every way to lay a tensor out in memory becomes boxes that address each
// element once; what does not fit the store's table is refused by name.
// Method: random boxes, strides and shapes against plain enumeration.

#include "kedge/reader/weight_set.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kedge/engine/cpu/record_apply.h"
#include "kedge/format/l61.h"
#include "kedge/reader/binding.h"

namespace kedge {
namespace {

using ::testing::HasSubstr;

std::shared_ptr<const TensorTable> MakeTable(
    std::vector<TensorSpec> tensors,
    const std::vector<std::pair<std::string, std::string>>& ties = {}) {
  auto table = TensorTable::Create(std::move(tensors), ties);
  EXPECT_TRUE(table.ok()) << table.status();
  return std::make_shared<const TensorTable>(*std::move(table));
}

TensorSpec Spec(std::string name, DType dtype,
                std::vector<std::uint64_t> shape) {
  TensorSpec spec;
  spec.name = std::move(name);
  spec.dtype = dtype;
  spec.shape = std::move(shape);
  return spec;
}

TensorTarget Target(std::string name, DType dtype,
                    std::vector<std::uint64_t> shape, void* data) {
  TensorTarget target;
  target.name = std::move(name);
  target.dtype = dtype;
  target.shape = std::move(shape);
  target.data = data;
  return target;
}

TEST(WeightSetTest, BoxesAddressEachElementOfARandomViewOnce) {
  const DType dtypes[] = {DType::kU8, DType::kBf16, DType::kF32, DType::kF64};
  for (std::uint64_t seed = 0; seed < 400; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937_64 random(seed);
    const DType dtype = dtypes[random() % 4];
    const std::uint64_t element = ElementBytes(dtype);
    const std::size_t rank = random() % 5;
    TensorTarget target;
    target.name = "t";
    target.dtype = dtype;
    std::uint64_t count = 1;
    for (std::size_t d = 0; d < rank; ++d) {
      const std::uint64_t size = 1 + random() % (rank > 2 ? 9 : 200);
      target.shape.push_back(size);
      const std::uint64_t begin = random() % 3 == 0 ? random() % size : 0;
      target.begin.push_back(begin);
      target.extent.push_back(
          random() % 2 == 0 ? size - begin : 1 + random() % (size - begin));
      count *= target.extent.back();
    }
    // Strides of the dimensions in a random order, with gaps now and then.
    std::vector<std::size_t> order(rank);
    for (std::size_t d = 0; d < rank; ++d) order[d] = d;
    if (random() % 2 == 0) {
      std::shuffle(order.begin(), order.end(), random);
    } else {
      std::reverse(order.begin(), order.end());
    }
    target.strides_bytes.resize(rank);
    std::uint64_t bytes = element * (random() % 4 == 0 ? 2 : 1);
    for (const std::size_t d : order) {
      target.strides_bytes[d] = static_cast<std::int64_t>(bytes);
      bytes = bytes * target.extent[d] + (random() % 4 == 0 ? element : 0);
    }
    std::vector<std::byte> memory(bytes + 16);
    target.data = memory.data();

    WeightSet set;
    ASSERT_TRUE(set.Add(target).ok());
    const auto table = MakeTable({Spec("t", dtype, target.shape)});
    const auto bound = BindWeights({&set}, table, /*allow_partial=*/true);
    ASSERT_TRUE(bound.ok()) << bound.status();
    const TileGrid grid = (*table)[0].grid();
    std::map<std::uint64_t, const std::byte*> found;  // by flat unit
    for (const BoxTarget& box : bound->tensors[0].boxes) {
      for (std::uint64_t r = box.row_begin; r < box.row_end; ++r) {
        for (std::uint64_t c = box.col_begin; c < box.col_end; ++c) {
          EXPECT_TRUE(found.emplace(r * grid.cols + c, box.At(r, c)).second);
        }
      }
    }
    // The plain way: odometer over the box.
    const std::uint64_t units = UnitsPerElement(dtype);
    std::vector<std::uint64_t> at(rank, 0);
    for (std::uint64_t i = 0; i < count; ++i) {
      std::uint64_t flat = 0;
      std::int64_t offset = 0;
      for (std::size_t d = 0; d < rank; ++d) {
        flat = flat * target.shape[d] + target.begin[d] + at[d];
        offset += static_cast<std::int64_t>(at[d]) * target.strides_bytes[d];
      }
      for (std::uint64_t u = 0; u < units; ++u) {
        const auto entry = found.find(flat * units + u);
        ASSERT_NE(entry, found.end());
        ASSERT_EQ(entry->second,
                  memory.data() + offset +
                      static_cast<std::int64_t>(u * UnitBytes(dtype)));
      }
      for (std::size_t d = rank; d-- > 0;) {
        if (++at[d] < target.extent[d]) break;
        at[d] = 0;
      }
    }
    EXPECT_EQ(found.size(), count * units);
    EXPECT_EQ(bound->tensors[0].covered_units, count * units);
    EXPECT_EQ(bound->held_bytes, count * element);
  }
}

TEST(WeightSetTest, ContiguousTensorsAndSlicesAreOneBox) {
  std::vector<std::byte> memory(1 << 16);
  const auto table = MakeTable({Spec("t", DType::kBf16, {8, 16, 32})});
  TensorTarget target = Target("t", DType::kBf16, {8, 16, 32}, memory.data());
  for (const bool experts : {false, true}) {
    if (experts) {
      target.begin = {2, 0, 0};
      target.extent = {4, 16, 32};
    }
    WeightSet set;
    ASSERT_TRUE(set.Add(target).ok());
    const auto bound = BindWeights({&set}, table, true);
    ASSERT_TRUE(bound.ok());
    EXPECT_EQ(bound->tensors[0].boxes.size(), 1u);
  }
}

// Report 37, 38: 32-bit arithmetic on indices of large tensors.
TEST(WeightSetTest, BoxesBeyondFourBillionElementsKeepTheirPlace) {
  const std::uint64_t rows = 70'000;
  const std::uint64_t cols = 70'001;  // 4.9e9 elements
  std::vector<std::byte> memory(16);
  TensorTarget target = Target("big", DType::kU8, {rows, cols}, memory.data());
  target.begin = {rows - 1, cols - 4};
  target.extent = {1, 4};
  WeightSet set;
  ASSERT_TRUE(set.Add(target).ok());
  const auto table = MakeTable({Spec("big", DType::kU8, {rows, cols})});
  const auto bound = BindWeights({&set}, table, true);
  ASSERT_TRUE(bound.ok()) << bound.status();
  const BoxTarget& box = bound->tensors[0].boxes.at(0);
  const TileGrid grid = (*table)[0].grid();
  const std::uint64_t last = rows * cols - 1;
  EXPECT_TRUE(Touches(grid, {last, last + 1}, box));
  EXPECT_TRUE(Touches(grid, {last - 3, last - 2}, box));
  EXPECT_FALSE(Touches(grid, {last - 4, last - 3}, box));
  EXPECT_FALSE(Touches(grid, {0, std::uint64_t{1} << 32}, box));
  EXPECT_EQ(box.At(rows - 1, cols - 1), memory.data() + 3);
}

TEST(WeightSetTest, TouchesAgreesWithPlainEnumeration) {
  for (std::uint64_t seed = 0; seed < 3000; ++seed) {
    std::mt19937_64 random(seed);
    TileGrid grid;
    grid.rows = 1 + random() % 6;
    grid.cols = 1 + random() % 6;
    BoxTarget box;
    box.row_begin = random() % grid.rows;
    box.row_end = box.row_begin + 1 + random() % (grid.rows - box.row_begin);
    box.col_begin = random() % grid.cols;
    box.col_end = box.col_begin + 1 + random() % (grid.cols - box.col_begin);
    UnitRange range;
    range.begin = random() % (grid.rows * grid.cols);
    range.end =
        range.begin + random() % (grid.rows * grid.cols - range.begin + 1);
    bool expected = false;
    for (std::uint64_t u = range.begin; u < range.end; ++u) {
      expected = expected || box.Contains(u / grid.cols, u % grid.cols);
    }
    ASSERT_EQ(Touches(grid, range, box), expected) << "seed " << seed;
  }
}

TEST(WeightSetTest, AddRefusesWhatCannotBeAddressed) {
  std::vector<std::byte> memory(4096);
  WeightSet set("tp0");
  const auto add = [&](const std::function<void(TensorTarget*)>& edit) {
    TensorTarget target = Target("t", DType::kBf16, {4, 8}, memory.data());
    edit(&target);
    return set.Add(target);
  };
  EXPECT_TRUE(add([](TensorTarget*) {}).ok());
  const absl::Status null_data =
      add([](TensorTarget* t) { t->data = nullptr; });
  EXPECT_TRUE(absl::IsInvalidArgument(null_data));
  EXPECT_THAT(std::string(null_data.message()), HasSubstr("tp0: tensor t"));
  for (const auto& edit : std::vector<std::function<void(TensorTarget*)>>{
           [](TensorTarget* t) { t->name.clear(); },
           [](TensorTarget* t) {
             t->begin = {0, 0};
           },
           [](TensorTarget* t) { t->begin = {0}, t->extent = {4}; },
           [](TensorTarget* t) {
             t->begin = {1, 0}, t->extent = {4, 8};
           },
           [](TensorTarget* t) {
             t->begin = {5, 0}, t->extent = {0, 8};
           },
           [](TensorTarget* t) {
             t->begin = {2, 0}, t->extent = {~std::uint64_t{0}, 8};
           },
           [](TensorTarget* t) { t->strides_bytes = {16}; },
           // Rows, or elements, that lie on top of each other.
           [](TensorTarget* t) {
             t->strides_bytes = {14, 2};
           },
           [](TensorTarget* t) {
             t->strides_bytes = {16, 1};
           },
           [](TensorTarget* t) {
             t->strides_bytes = {0, 2};
           },
           [](TensorTarget* t) { t->dtype = static_cast<DType>(99); }}) {
    EXPECT_TRUE(absl::IsInvalidArgument(add(edit)));
  }
  EXPECT_EQ(set.targets().size(), 1u);
}

class BindTest : public testing::Test {
 protected:
  absl::Status Bind(const std::vector<const WeightSet*>& sets,
                    bool allow_partial = false) {
    auto bound = BindWeights(sets, table_, allow_partial);
    if (!bound.ok()) return bound.status();
    bound_ = *std::move(bound);
    return absl::OkStatus();
  }
  void* At(std::size_t offset) { return memory_.data() + offset; }

  std::shared_ptr<const TensorTable> table_ = MakeTable(
      {Spec("a", DType::kBf16, {4, 8}), Spec("b", DType::kF32, {6}),
       Spec("empty", DType::kF32, {0}), Spec("head", DType::kBf16, {4, 8})},
      {{"head", "a"}});
  std::vector<std::byte> memory_ = std::vector<std::byte>(4096);
  BoundWeights bound_;
};

// Report 3, 20: renamed or unregistered tensors were left out in silence.
TEST_F(BindTest, NamesShapesDtypesAndMissingTensorsAreNamed) {
  WeightSet set("engine");
  ASSERT_TRUE(set.Add(Target("_orig_mod.a", DType::kBf16, {4, 8}, At(0))).ok());
  ASSERT_TRUE(set.Add(Target("b", DType::kF32, {5}, At(512))).ok());
  const absl::Status status = Bind({&set});
  EXPECT_TRUE(absl::IsFailedPrecondition(status));
  const std::string text(status.message());
  EXPECT_THAT(text, HasSubstr("_orig_mod.a of engine: the store has no such"));
  EXPECT_THAT(text, HasSubstr("b of engine: shape: expected [6], found [5]"));
  EXPECT_THAT(text, HasSubstr("a: no weight set holds it"));
  // Partial holding does not excuse names that do not exist.
  EXPECT_TRUE(absl::IsFailedPrecondition(Bind({&set}, true)));
}

// Report 25, 30: an update of another dtype was cast into place.
TEST_F(BindTest, AnotherDtypeOfTheSameWidthIsRefused) {
  WeightSet set;
  ASSERT_TRUE(set.Add(Target("a", DType::kF16, {4, 8}, At(0))).ok());
  ASSERT_TRUE(set.Add(Target("b", DType::kF32, {6}, At(512))).ok());
  const absl::Status status = Bind({&set});
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("a of weights: dtype: expected bf16, found f16"));
}

TEST_F(BindTest, AllOffendersAreCountedAndTheFirstFewNamed) {
  WeightSet set;
  for (int i = 0; i < 50; ++i) {
    ASSERT_TRUE(
        set.Add(Target(absl::StrCat("x", i), DType::kU8, {1}, At(0))).ok());
  }
  const absl::Status status = Bind({&set});
  // 50 unknown, and a and b missing; 4 are named.
  EXPECT_THAT(std::string(status.message()), HasSubstr("and 48 more"));
}

// Report 34, 35: tied embeddings that are missing, or there twice.
TEST_F(BindTest, EitherNameOfATiedTensorIsEnough) {
  for (const char* name : {"a", "head"}) {
    WeightSet set;
    ASSERT_TRUE(set.Add(Target(name, DType::kBf16, {4, 8}, At(0))).ok());
    ASSERT_TRUE(set.Add(Target("b", DType::kF32, {6}, At(512))).ok());
    ASSERT_TRUE(Bind({&set}).ok()) << name;
    EXPECT_EQ(bound_.tensors[0].boxes.size(), 1u);
    EXPECT_TRUE(bound_.tensors[3].fully_covered);
    EXPECT_EQ(bound_.held_tensors, 4u);
  }
}

TEST_F(BindTest, TwoNamesOfOneMemoryAreOneBoxAndCopiesAreTwo) {
  WeightSet shared;
  ASSERT_TRUE(shared.Add(Target("a", DType::kBf16, {4, 8}, At(0))).ok());
  ASSERT_TRUE(shared.Add(Target("head", DType::kBf16, {4, 8}, At(0))).ok());
  ASSERT_TRUE(shared.Add(Target("b", DType::kF32, {6}, At(512))).ok());
  ASSERT_TRUE(Bind({&shared}).ok());
  EXPECT_EQ(bound_.tensors[0].boxes.size(), 1u);
  WeightSet copies;
  ASSERT_TRUE(copies.Add(Target("a", DType::kBf16, {4, 8}, At(0))).ok());
  ASSERT_TRUE(copies.Add(Target("head", DType::kBf16, {4, 8}, At(64))).ok());
  ASSERT_TRUE(copies.Add(Target("b", DType::kF32, {6}, At(512))).ok());
  ASSERT_TRUE(Bind({&copies}).ok());
  EXPECT_EQ(bound_.tensors[0].boxes.size(), 2u);
  EXPECT_EQ(bound_.tensors[0].covers.size(), 2u);
}

TEST_F(BindTest, MemoryThatTwoTensorsShareIsRefused) {
  WeightSet set("engine");
  ASSERT_TRUE(set.Add(Target("a", DType::kBf16, {4, 8}, At(0))).ok());
  ASSERT_TRUE(set.Add(Target("b", DType::kF32, {6}, At(60))).ok());
  const absl::Status status = Bind({&set});
  EXPECT_TRUE(absl::IsFailedPrecondition(status));
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("a of engine and b of engine overlap in memory"));
}

TEST_F(BindTest, PartialCoverageIsCountedAndOnlyAllowedWhenAskedFor) {
  WeightSet set;
  TensorTarget part = Target("a", DType::kBf16, {4, 8}, At(0));
  part.begin = {1, 0};
  part.extent = {2, 8};
  ASSERT_TRUE(set.Add(part).ok());
  ASSERT_TRUE(set.Add(Target("b", DType::kF32, {6}, At(512))).ok());
  EXPECT_THAT(std::string(Bind({&set}).message()),
              HasSubstr("a: weight sets hold 16 of 32 units"));
  ASSERT_TRUE(Bind({&set}, true).ok());
  EXPECT_EQ(bound_.tensors[0].covered_units, 16u);
  EXPECT_FALSE(bound_.tensors[0].fully_covered);
  EXPECT_FALSE(bound_.tensors[3].fully_covered);
  EXPECT_TRUE(bound_.tensors[1].fully_covered);
}

TEST(CoverTest, CoversHoldEachUnitOnceAndReachEveryBox) {
  constexpr std::uint64_t kRows = 12;
  constexpr std::uint64_t kCols = 130;
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937_64 random(seed);
    const auto table = MakeTable({Spec("t", DType::kU8, {kRows, kCols})});
    std::vector<std::vector<std::byte>> memory;
    WeightSet set;
    const int count = 1 + static_cast<int>(random() % 5);
    std::vector<bool> units(kRows * kCols, false);
    for (int i = 0; i < count; ++i) {
      TensorTarget target = Target("t", DType::kU8, {kRows, kCols}, nullptr);
      if (i == 0 && random() % 2 == 0) {
        target.begin = {0, 0};
        target.extent = {kRows, kCols};
      } else {
        target.begin = {random() % kRows, random() % kCols};
        target.extent = {1 + random() % (kRows - target.begin[0]),
                         1 + random() % (kCols - target.begin[1])};
      }
      memory.emplace_back(target.extent[0] * target.extent[1]);
      target.data = memory.back().data();
      for (std::uint64_t r = 0; r < target.extent[0]; ++r) {
        for (std::uint64_t c = 0; c < target.extent[1]; ++c) {
          units[(target.begin[0] + r) * kCols + target.begin[1] + c] = true;
        }
      }
      ASSERT_TRUE(set.Add(target).ok());
    }
    const auto bound = BindWeights({&set}, table, true);
    ASSERT_TRUE(bound.ok()) << bound.status();
    const BoundTensor& tensor = bound->tensors[0];
    const auto held = static_cast<std::uint64_t>(
        std::count(units.begin(), units.end(), true));
    EXPECT_EQ(tensor.covered_units, held);
    EXPECT_EQ(tensor.fully_covered, held == units.size());
    std::set<const std::byte*> reached;
    for (const BoundTensor::Cover& cover : tensor.covers) {
      std::set<std::uint64_t> seen;
      for (const BoxTarget& box : cover.boxes) {
        for (std::uint64_t r = box.row_begin; r < box.row_end; ++r) {
          for (std::uint64_t c = box.col_begin; c < box.col_end; ++c) {
            EXPECT_TRUE(seen.insert(r * kCols + c).second);
            reached.insert(box.At(r, c));
          }
        }
      }
      EXPECT_EQ(seen.size(), held);
      EXPECT_EQ(cover.origin.size(), cover.boxes.size());
    }
    std::size_t bytes = 0;
    for (const auto& part : memory) bytes += part.size();
    EXPECT_EQ(reached.size(), bytes);
  }
}

// What all ranks of a group make of the same random sets: the same covers, each
// unit once, and each rank its own part.
TEST(GroupCoverTest, RanksAgreeOnCoversAndShareThemOutOnce) {
  constexpr std::uint64_t kRows = 12;
  constexpr std::uint64_t kCols = 130;
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937_64 random(seed);
    const auto table = MakeTable({Spec("t", DType::kU8, {kRows, kCols})});
    const auto ranks = static_cast<std::uint32_t>(1 + random() % 4);
    // As processes often have it: the same addresses in every rank.
    std::vector<std::vector<std::byte>> memory;
    for (int i = 0; i < 3; ++i) memory.emplace_back(kRows * kCols);
    std::vector<std::unique_ptr<WeightSet>> sets;
    std::vector<std::vector<const WeightSet*>> sets_of_rank(ranks);
    std::uint64_t boxes = 0;
    for (std::uint32_t r = 0; r < ranks; ++r) {
      sets.push_back(std::make_unique<WeightSet>("w"));
      sets_of_rank[r].push_back(sets.back().get());
      for (std::uint64_t i = 0; i < random() % 4 && i < memory.size(); ++i) {
        TensorTarget target =
            Target("t", DType::kU8, {kRows, kCols}, memory[i].data());
        target.begin = {random() % kRows, 0};
        target.extent = {1 + random() % (kRows - target.begin[0]), kCols};
        if (random() % 3 == 0) {
          target.begin = {0, 0};
          target.extent = {kRows, kCols};
        }
        ASSERT_TRUE(sets.back()->Add(target).ok());
        ++boxes;
      }
    }
    std::vector<BoundTensor> bound;
    for (std::uint32_t r = 0; r < ranks; ++r) {
      auto weights = BindGroupWeights(sets_of_rank, r, table, true);
      ASSERT_TRUE(weights.ok()) << weights.status();
      bound.push_back(weights->tensors[0]);
      EXPECT_EQ(bound[r].covers.size(), bound[0].covers.size());
      EXPECT_EQ(bound[r].covered_units, bound[0].covered_units);
      EXPECT_EQ(bound[r].fully_covered, bound[0].fully_covered);
      EXPECT_EQ(bound[r].boxes.size(), sets[r]->targets().size());
      boxes -= bound[r].boxes.size();
      std::set<const std::byte*> reached;
      for (const BoundTensor::Cover& cover : bound[r].covers) {
        ASSERT_EQ(cover.origin.size(), cover.boxes.size());
        for (std::size_t i = 0; i < cover.boxes.size(); ++i) {
          ASSERT_LT(cover.origin[i], bound[r].boxes.size());
          for (std::uint64_t row = cover.boxes[i].row_begin;
               row < cover.boxes[i].row_end; ++row) {
            reached.insert(cover.boxes[i].At(row, cover.boxes[i].col_begin));
          }
        }
      }
      std::size_t rows = 0;
      for (const BoxTarget& box : bound[r].boxes) {
        rows += box.row_end - box.row_begin;
      }
      EXPECT_EQ(reached.size(), rows) << "rank " << r;
    }
    EXPECT_EQ(boxes, 0u);
    for (std::size_t c = 0; c < bound[0].covers.size(); ++c) {
      std::uint64_t units = 0;
      std::set<std::uint64_t> rows;
      for (std::uint32_t r = 0; r < ranks; ++r) {
        const BoundTensor::Cover& cover = bound[r].covers[c];
        EXPECT_EQ(cover.ranks, bound[0].covers[c].ranks);
        EXPECT_EQ(std::count(cover.ranks.begin(), cover.ranks.end(), r) == 1,
                  !cover.boxes.empty());
        for (const BoxTarget& box : cover.boxes) {
          units += box.unit_count();
          for (std::uint64_t row = box.row_begin; row < box.row_end; ++row) {
            EXPECT_TRUE(rows.insert(row).second) << "row " << row;
          }
        }
      }
      EXPECT_EQ(units, bound[0].covered_units);
    }
  }
}

TEST(GroupCoverTest, MemoryThatOverlapsIsFoundWithinEveryRankAndByAll) {
  const auto table = MakeTable(
      {Spec("a", DType::kU8, {4, 128}), Spec("b", DType::kU8, {4, 128})});
  std::vector<std::byte> memory(2000);
  WeightSet fine("w");
  WeightSet wrong("w");
  const auto at = [&](const char* name, std::uint64_t offset) {
    return Target(name, DType::kU8, {4, 128}, memory.data() + offset);
  };
  ASSERT_TRUE(fine.Add(at("a", 0)).ok());
  ASSERT_TRUE(fine.Add(at("b", 600)).ok());
  ASSERT_TRUE(wrong.Add(at("a", 300)).ok());
  ASSERT_TRUE(wrong.Add(at("b", 600)).ok());
  WeightSet other("w");  // overlaps with rank 0's addresses alone
  ASSERT_TRUE(other.Add(at("b", 100)).ok());
  EXPECT_TRUE(BindGroupWeights({{&fine}, {&other}}, 0, table, false).ok());
  for (const std::uint32_t rank : {0u, 1u}) {
    const auto bound =
        BindGroupWeights({{&fine}, {&wrong}}, rank, table, false);
    EXPECT_THAT(
        std::string(bound.status().message()),
        HasSubstr("a of w of rank 1 and b of w of rank 1 overlap in memory"));
  }
}

}  // namespace
}  // namespace kedge
