// Goal: a tensor table comes back as made, and no bytes give one that breaks a
// rule of spec/tensor_table.md. Method: each rule broken once, by the caller
// and in the file; every prefix, every flipped bit, random damage; random
// tables.

#include "kedge/format/tensor_table.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kedge/format/limits.h"
#include "kedge/tests/format/manifest_samples.h"
#include "tensor_table_generated.h"

namespace kedge {
namespace {

using samples::Rng;
using samples::Says;
using Spec = TensorSpec;
using Ties = std::vector<std::pair<std::string, std::string>>;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kLoss = absl::StatusCode::kDataLoss;

absl::Status CreateStatus(std::vector<Spec> tensors, const Ties& ties = {}) {
  return TensorTable::Create(std::move(tensors), ties).status();
}

TEST(TensorTableTest, SortsByNameAndResolvesTies) {
  const TensorTable table = samples::SmallTable();
  ASSERT_EQ(table.size(), 6u);
  for (std::size_t i = 0; i < 6; ++i) {
    EXPECT_EQ(table[i].name, std::string(1, static_cast<char>('a' + i)));
    EXPECT_EQ(*table.Find(table[i].name), i);
    EXPECT_EQ(table[i].tied_to, i == 2 ? 0u : kNotTied);
  }
  EXPECT_EQ(table[3].element_count(), 7u);
  EXPECT_EQ(table[3].unit_count(), 14u);
  EXPECT_EQ(table[3].byte_count(), 56u);
  // The tie counts once.
  EXPECT_EQ(table.total_bytes(), 300u * 256 * 2 + 40 + 56 + 0 + 25);
  EXPECT_TRUE(Says(table.Find("zz").status(), absl::StatusCode::kNotFound,
                   "tensor \"zz\""));
}

TEST(TensorTableTest, NamesAreOrderedAsUnsignedBytes) {
  const auto table = TensorTable::Create({{"\xc3\xa9"}, {"z"}, {"Z"}, {"zz"}});
  ASSERT_TRUE(table.ok()) << table.status();
  EXPECT_EQ((*table)[0].name, "Z");
  EXPECT_EQ((*table)[1].name, "z");
  EXPECT_EQ((*table)[2].name, "zz");
  EXPECT_EQ((*table)[3].name, "\xc3\xa9");
}

TEST(TensorTableTest, TheOrderOfTheCallerDoesNotMatter) {
  const std::vector<Spec> tensors = {
      {"x", DType::kF32, {3}}, {"y", DType::kF32, {3}}, {"z", DType::kI8, {}}};
  std::vector<Spec> reversed(tensors.rbegin(), tensors.rend());
  const Ties ties = {{"y", "x"}};
  const auto a = TensorTable::Create(tensors, ties);
  const auto b = TensorTable::Create(reversed, ties);
  ASSERT_TRUE(a.ok() && b.ok());
  EXPECT_EQ(a->hash(), b->hash());
  EXPECT_TRUE(std::equal(a->bytes().begin(), a->bytes().end(),
                         b->bytes().begin(), b->bytes().end()));
}

TEST(TensorTableTest, ScalarsAndEmptyShapesAreOrdinary) {
  const auto table = TensorTable::Create({{"scalar", DType::kBf16, {}},
                                          {"none", DType::kBf16, {0}},
                                          {"none2", DType::kBf16, {2, 0}}});
  ASSERT_TRUE(table.ok()) << table.status();
  EXPECT_EQ((*table)[2].element_count(), 1u);
  EXPECT_EQ((*table)[0].element_count(), 0u);
  EXPECT_EQ((*table)[1].element_count(), 0u);
  const auto parsed = TensorTable::Parse("t", table->bytes());
  ASSERT_TRUE(parsed.ok()) << parsed.status();
}

TEST(TensorTableTest, ATableOfNothingIsOrdinary) {
  const auto table = TensorTable::Create({});
  ASSERT_TRUE(table.ok()) << table.status();
  const auto parsed = TensorTable::Parse("t", table->bytes());
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->size(), 0u);
  EXPECT_EQ(parsed->StateDigest({}), HashBytes128({}));
}

TEST(TensorTableTest, CreateRejectsEachBrokenRuleByName) {
  const std::string long_name(kMaxNameBytes + 1, 'n');
  EXPECT_TRUE(Says(CreateStatus({{""}}), kInvalid, "name"));
  EXPECT_TRUE(Says(CreateStatus({{long_name}}), kInvalid, "1 to 4096 bytes"));
  EXPECT_TRUE(Says(CreateStatus({{std::string("a\0b", 3)}}), kInvalid, "NUL"));
  for (const char* bad :
       {"\x80", "\xc0\xaf", "\xe0\x9f\xbf", "\xed\xa0\x80", "\xf4\x90\x80\x80",
        "\xf5\x80\x80\x80", "a\xc3", "\xe2\x82", "\xff"}) {
    EXPECT_TRUE(Says(CreateStatus({{bad}}), kInvalid, "UTF-8"));
  }
  EXPECT_TRUE(CreateStatus({{"\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80"}}).ok());
  EXPECT_TRUE(Says(CreateStatus({{"a", static_cast<DType>(0)}}), kInvalid,
                   "tensor \"a\": dtype"));
  EXPECT_TRUE(
      Says(CreateStatus({{"a", static_cast<DType>(17)}}), kInvalid, "dtype"));
  EXPECT_TRUE(
      Says(CreateStatus({{"a", DType::kU8, std::vector<std::uint64_t>(33, 1)}}),
           kInvalid, "at most 32 dimensions"));
  EXPECT_TRUE(
      Says(CreateStatus({{"a"}, {"b"}, {"a"}}), kInvalid, "found twice"));
  EXPECT_TRUE(Says(CreateStatus({{"a", DType::kU8, {}, 0}}), kInvalid,
                   "ties are given by name"));
}

TEST(TensorTableTest, SizesThatOverflowAreRejected) {
  constexpr std::uint64_t kBig = std::uint64_t{1} << 33;
  EXPECT_TRUE(Says(CreateStatus({{"a", DType::kU8, {kBig, kBig}}}), kInvalid,
                   "tensor \"a\": shape"));
  EXPECT_TRUE(
      Says(CreateStatus({{"a", DType::kF64, {kMaxTensorBytes / 8 + 1}}}),
           kInvalid, "shape"));
  EXPECT_TRUE(CreateStatus({{"a", DType::kF64, {kMaxTensorBytes / 8}}}).ok());
  EXPECT_TRUE(Says(CreateStatus({{"a", DType::kU8, {0, ~std::uint64_t{0}}}}),
                   kInvalid, "dimensions of at most"));
  // Wraps to 0 elements if multiplied carelessly.
  EXPECT_TRUE(Says(CreateStatus({{"a", DType::kU8, {1ull << 32, 1ull << 32}}}),
                   kInvalid, "shape"));
  EXPECT_TRUE(
      CreateStatus({{"a", DType::kU8, {1ull << 45, 1ull << 45, 0}}}).ok());
  std::vector<Spec> model;
  for (int i = 0; i < 129; ++i) {
    model.push_back({absl::StrCat(i), DType::kU8, {kMaxTensorBytes}});
  }
  EXPECT_TRUE(Says(CreateStatus(model), kInvalid, "bytes of all tensors"));
  model.pop_back();
  EXPECT_TRUE(CreateStatus(model).ok());
}

TEST(TensorTableTest, CreateRejectsBrokenTies) {
  const std::vector<Spec> tensors = {{"a", DType::kF32, {2, 3}},
                                     {"b", DType::kF32, {2, 3}},
                                     {"c", DType::kF32, {3, 2}},
                                     {"d", DType::kI32, {2, 3}}};
  EXPECT_TRUE(CreateStatus(tensors, {{"a", "b"}, {"a", "b"}}).ok());
  EXPECT_TRUE(Says(CreateStatus(tensors, {{"x", "b"}}), kInvalid, "no alias"));
  EXPECT_TRUE(Says(CreateStatus(tensors, {{"a", "x"}}), kInvalid, "no owner"));
  EXPECT_TRUE(Says(CreateStatus(tensors, {{"a", "a"}}), kInvalid, "itself"));
  EXPECT_TRUE(Says(CreateStatus(tensors, {{"a", "b"}, {"a", "c"}}), kInvalid,
                   "one owner"));
  EXPECT_TRUE(Says(CreateStatus(tensors, {{"a", "c"}}), kInvalid,
                   "an owner with f32 [2, 3]"));
  EXPECT_TRUE(Says(CreateStatus(tensors, {{"a", "d"}}), kInvalid,
                   "found \"d\" with i32 [2, 3]"));
  // A chain and a cycle.
  const std::vector<Spec> same = {{"a"}, {"b"}, {"c"}};
  EXPECT_TRUE(Says(CreateStatus(same, {{"a", "b"}, {"b", "c"}}), kInvalid,
                   "which is tied itself"));
  EXPECT_TRUE(Says(CreateStatus(same, {{"a", "b"}, {"b", "a"}}), kInvalid,
                   "which is tied itself"));
}

TEST(TensorTableTest, StateDigestIsTheHashOfTheStatedBytes) {
  const auto table = TensorTable::Create(
      {{"w", DType::kBf16, {3}}, {"bias", DType::kF32, {2}}});
  ASSERT_TRUE(table.ok());
  const std::vector<std::uint64_t> l61 = {0x0102030405060708, 5};
  const unsigned char expected[] = {4, 0, 0, 0, 'b', 'i', 'a', 's', 2, 8, 0, 0,
                                    0, 0, 0, 0, 0,   8,   7,   6,   5, 4, 3, 2,
                                    1,  // bias
                                    1, 0, 0, 0, 'w', 4,   6,   0,   0, 0, 0, 0,
                                    0, 0, 5, 0, 0,   0,   0,   0,   0, 0};  // w
  EXPECT_EQ(table->StateDigest(l61),
            HashBytes128(std::as_bytes(std::span(expected))));
}

TEST(TensorTableTest, RandomTablesComeBack) {
  for (std::uint64_t seed = 0; seed < 30; ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    Rng rng(seed);
    const TensorTable table = samples::RandomTable(rng, 1 + seed * 20);
    const auto parsed = TensorTable::Parse("t", table.bytes());
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    ASSERT_EQ(parsed->size(), table.size());
    for (std::size_t i = 0; i < table.size(); ++i) {
      ASSERT_EQ((*parsed)[i], table[i]);
    }
    EXPECT_EQ(parsed->hash(), table.hash());
    EXPECT_EQ(parsed->total_bytes(), table.total_bytes());
  }
}

TEST(TensorTableTest, UnalignedBytesParse) {
  const TensorTable table = samples::SmallTable();
  std::vector<std::byte> storage(table.bytes().size() + 8);
  for (std::size_t shift = 0; shift < 8; ++shift) {
    std::memcpy(storage.data() + shift, table.bytes().data(),
                table.bytes().size());
    const auto parsed = TensorTable::Parse(
        "t", std::span(storage).subspan(shift, table.bytes().size()));
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    EXPECT_EQ(parsed->hash(), table.hash());
  }
}

TEST(TensorTableTest, ParseRejectsEachBrokenRule) {
  const TensorTable table = samples::SmallTable();
  using Fields = fbs::TensorTableT;
  const auto expect = [&](absl::StatusCode code, const std::string& text,
                          const std::function<void(Fields&)>& mutate) {
    const auto bytes =
        samples::Mutated<fbs::TensorTable>(table.bytes(), "KDTT", mutate);
    EXPECT_TRUE(Says(TensorTable::Parse("table", bytes).status(), code, text));
  };
  const std::vector<std::byte> same =
      samples::Mutated<fbs::TensorTable>(table.bytes(), "KDTT", [](Fields&) {});
  ASSERT_TRUE(TensorTable::Parse("table", same).ok());

  expect(absl::StatusCode::kUnimplemented, "min_reader",
         [](Fields& f) { f.min_reader = 2; });
  expect(kLoss, "min_reader", [](Fields& f) { f.min_reader = 0; });
  expect(kLoss, "dtype: expected 6 rows",
         [](Fields& f) { f.dtype.pop_back(); });
  expect(kLoss, "rank: expected 6 rows", [](Fields& f) { f.rank.clear(); });
  expect(kLoss, "shape: expected", [](Fields& f) { f.shape.pop_back(); });
  expect(kLoss, "shape: expected", [](Fields& f) { f.shape.push_back(1); });
  expect(kLoss, "shape: expected", [](Fields& f) { f.rank[0] = 255; });
  expect(kLoss, "tied_to: expected 6 rows",
         [](Fields& f) { f.tied_to.resize(3); });
  expect(kLoss, "name_end[1]", [](Fields& f) { f.name_end[1] = 0xffffffff; });
  expect(kLoss, "name_end[2]", [](Fields& f) { f.name_end[2] = 1; });
  expect(kLoss, "tensors[1].name", [](Fields& f) { f.name_end[1] = 1; });
  expect(kLoss, "names: expected 6 bytes",
         [](Fields& f) { f.names.push_back('x'); });
  expect(kLoss, "a name above \"a\"", [](Fields& f) { f.names[1] = 'a'; });
  expect(kLoss, "a name above",
         [](Fields& f) { std::swap(f.names[0], f.names[1]); });
  expect(kLoss, "NUL", [](Fields& f) { f.names[0] = 0; });
  expect(kLoss, "UTF-8", [](Fields& f) { f.names[5] = 0xff; });
  expect(kLoss, "1 to 4096 bytes", [](Fields& f) {
    f.names.insert(f.names.end(), 5000, 'x');
    f.name_end[5] += 5000;
  });
  expect(kLoss, "tensors[4].dtype", [](Fields& f) { f.dtype[4] = 0; });
  expect(kLoss, "tensors[4].dtype", [](Fields& f) { f.dtype[4] = 17; });
  expect(kLoss, "tensors[0].shape",
         [](Fields& f) { f.shape[0] = std::uint64_t{1} << 47; });
  expect(kLoss, "tensors[0].shape", [](Fields& f) { f.shape[0] = ~0ull; });
  expect(kLoss, "at most 32 dimensions", [](Fields& f) {
    f.rank[5] += 40;
    f.shape.insert(f.shape.end(), 40, 1);
  });
  expect(kLoss, "tied_to", [](Fields& f) { f.tied_to[2] = 6; });
  expect(kLoss, "which is tied itself", [](Fields& f) { f.tied_to[2] = 2; });
  expect(kLoss, "which is tied itself", [](Fields& f) { f.tied_to[0] = 2; });
  expect(kLoss, "an owner with", [](Fields& f) { f.tied_to[2] = 1; });
  expect(kLoss, "bytes of all tensors", [](Fields& f) {
    for (int i = 0; i < 129; ++i) {
      f.names.insert(f.names.end(),
                     {'z', static_cast<std::uint8_t>('a' + i / 16),
                      static_cast<std::uint8_t>('a' + i % 16)});
      f.name_end.push_back(static_cast<std::uint32_t>(f.names.size()));
      f.dtype.push_back(15);
      f.rank.push_back(1);
      f.shape.push_back(kMaxTensorBytes);
      f.tied_to.push_back(kNotTied);
    }
  });
}

TEST(TensorTableTest, WrongIdentifierIsRejected) {
  const TensorTable table = samples::SmallTable();
  const auto bytes = samples::Mutated<fbs::TensorTable>(
      table.bytes(), "KDSM", [](fbs::TensorTableT&) {});
  EXPECT_TRUE(
      Says(TensorTable::Parse("t", bytes).status(), kLoss, "file identifier"));
}

TEST(TensorTableTest, FileBeyondTheLimitIsRejectedUnread) {
  // The bytes are never looked at, so none are there.
  const std::span<const std::byte> huge(reinterpret_cast<std::byte*>(8),
                                        kMaxFlatBufferBytes + 1);
  EXPECT_TRUE(Says(TensorTable::Parse("t", huge).status(), kLoss, "size"));
}

TEST(TensorTableTest, DamageNeverPassesUnderTheSameHash) {
  const TensorTable table = samples::SmallTable();
  samples::ForEachDamage(
      table.bytes(), 20000,
      [&](std::span<const std::byte> bytes, const std::string& what) {
        const auto parsed = TensorTable::Parse("t", bytes);
        if (!parsed.ok()) return;
        // Sound, but another table (or other padding): its name differs.
        EXPECT_TRUE(parsed->hash() != table.hash() ||
                    std::equal(bytes.begin(), bytes.end(),
                               table.bytes().begin(), table.bytes().end()))
            << what;
        EXPECT_LE(parsed->total_bytes(), kMaxModelBytes) << what;
        for (std::size_t i = 0; i < parsed->size(); ++i) {
          const TensorSpec& tensor = (*parsed)[i];
          EXPECT_TRUE(IsValidDType(static_cast<std::uint8_t>(tensor.dtype)));
          EXPECT_LE(tensor.byte_count(), kMaxTensorBytes) << what;
          EXPECT_EQ(*parsed->Find(tensor.name), i) << what;
          if (tensor.tied_to == kNotTied) continue;
          ASSERT_LT(tensor.tied_to, parsed->size()) << what;
          EXPECT_EQ((*parsed)[tensor.tied_to].tied_to, kNotTied) << what;
        }
      });
}

}  // namespace
}  // namespace kedge
