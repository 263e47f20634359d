#include "kedge/tests/format/manifest_samples.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kedge/format/fixed_files.h"
#include "kedge/format/l61.h"
#include "kedge/format/limits.h"

namespace kedge::samples {
namespace {

std::uint64_t Padded(std::uint64_t bytes) { return (bytes + 7) / 8 * 8; }

void SetPieces(Rng& rng, DataFile& file, std::uint64_t count) {
  file.piece_hashes.resize(count);
  for (std::uint64_t& hash : file.piece_hashes) hash = rng();
  file.hash = HashOfPieces(file.piece_hashes);
}

void ExpectSameFiles(const std::vector<DataFile>& a,
                     const std::vector<DataFile>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(a[i].id, b[i].id);
    EXPECT_EQ(a[i].bytes, b[i].bytes);
    EXPECT_EQ(a[i].hash, b[i].hash);
    EXPECT_EQ(a[i].piece_hashes, b[i].piece_hashes);
  }
}

void ExpectSameRecords(const std::vector<DeltaRecord>& a,
                       const std::vector<DeltaRecord>& b) {
  ASSERT_EQ(a.size(), b.size());
  const auto fields = [](const DeltaRecord& r) {
    return std::make_tuple(r.tensor, r.slice.begin, r.slice.end, r.file,
                           r.offset, r.bytes, r.codec, r.nnz, r.l61);
  };
  for (std::size_t i = 0; i < a.size(); ++i) {
    ASSERT_EQ(fields(a[i]), fields(b[i])) << "record " << i;
  }
}

}  // namespace

std::uint64_t Below(Rng& rng, std::uint64_t bound) { return rng() % bound; }

Bytes16 RandomBytes16(Rng& rng) {
  Bytes16 value;
  for (std::uint8_t& byte : value.bytes) {
    byte = static_cast<std::uint8_t>(rng());
  }
  return value;
}

TensorTable SmallTable() {
  const std::vector<std::pair<std::string, std::string>> ties = {{"c", "a"}};
  auto table = TensorTable::Create({{"f", DType::kF8E4M3, {5, 5}},
                                    {"d", DType::kI64, {7}},
                                    {"a", DType::kBf16, {300, 256}},
                                    {"e", DType::kU8, {0, 3}},
                                    {"c", DType::kBf16, {300, 256}},
                                    {"b", DType::kF32, {10}}},
                                   ties);
  EXPECT_TRUE(table.ok()) << table.status();
  return *std::move(table);
}

TensorTable RandomTable(Rng& rng, std::size_t tensor_count) {
  std::vector<TensorSpec> tensors;
  std::vector<std::pair<std::string, std::string>> ties;
  for (std::size_t i = 0; i < tensor_count; ++i) {
    TensorSpec tensor;
    tensor.name =
        absl::StrCat("model.layers.", Below(rng, 48), ".mlp.", i, ".weight");
    tensor.dtype = static_cast<DType>(1 + Below(rng, kMaxDType));
    const std::uint64_t rank = Below(rng, 4);
    for (std::uint64_t k = 0; k < rank; ++k) {
      tensor.shape.push_back(Below(rng, 20) == 0 ? 0 : 1 + Below(rng, 300));
    }
    if (i > 0 && Below(rng, 10) == 0) {
      // A tie to a tensor that is none itself.
      const TensorSpec& owner = tensors[Below(rng, i)];
      const bool tied =
          std::any_of(ties.begin(), ties.end(),
                      [&](const auto& tie) { return tie.first == owner.name; });
      if (!tied) {
        tensor.dtype = owner.dtype;
        tensor.shape = owner.shape;
        ties.emplace_back(tensor.name, owner.name);
      }
    }
    tensors.push_back(std::move(tensor));
  }
  std::shuffle(tensors.begin(), tensors.end(), rng);
  auto table = TensorTable::Create(std::move(tensors), ties);
  EXPECT_TRUE(table.ok()) << table.status();
  return *std::move(table);
}

std::vector<std::uint64_t> RandomL61(Rng& rng, const TensorTable& table) {
  std::vector<std::uint64_t> l61(table.size());
  for (std::uint64_t& s : l61) s = Below(rng, kL61Prime);
  for (std::size_t i = 0; i < l61.size(); ++i) {
    const std::uint32_t tied_to = table[i].tied_to;
    if (table[i].element_count() == 0) {
      l61[i] = 0;
    } else if (tied_to != kNotTied) {
      l61[i] = l61[tied_to];
    }
  }
  return l61;
}

void Fill(Rng& rng, std::vector<DataFile>& files,
          const std::vector<DeltaRecord*>& order) {
  std::vector<std::uint64_t> end(files.size(), kDataFileHeaderBytes);
  for (DeltaRecord* record : order) {
    record->offset = end[record->file];
    end[record->file] += Padded(record->bytes);
  }
  for (std::size_t i = 0; i < files.size(); ++i) {
    files[i].bytes = SegmentFileBytes(end[i] - kDataFileHeaderBytes);
    SetPieces(rng, files[i], PieceCount(files[i].bytes));
  }
}

StepManifest SmallStep(const TensorTable& table) {
  Rng rng(18);
  StepManifest m;
  m.run = RandomBytes16(rng);
  m.epoch = 2;
  m.step = 18;
  m.table_hash = table.hash();
  m.base = {16, RandomBytes16(rng)};
  m.files = {{{FileKind::kSegment, 0, 0}},
             {{FileKind::kSegment, 0, 1}},
             {{FileKind::kSegment, 1, 0}}};
  const auto add = [&](std::uint32_t tensor, UnitRange slice,
                       std::uint32_t file, std::uint32_t bytes) {
    DeltaRecord record;
    record.tensor = tensor;
    record.slice = slice;
    record.file = file;
    record.bytes = bytes;
    record.nnz = 1 + Below(rng, slice.count());
    record.l61 = 1 + Below(rng, kL61Prime - 1);
    m.records.push_back(record);
  };
  add(0, {0, 40000}, 1, 1000);
  add(0, {40000, 76800}, 2, 61);
  add(1, {0, 10}, 0, 64);
  add(3, {2, 14}, 0, 77);
  add(5, {3, 20}, 1, 80);
  // Not in the order of the table.
  Fill(rng, m.files,
       {&m.records[4], &m.records[3], &m.records[0], &m.records[1],
        &m.records[2]});
  const auto before = RandomL61(rng, table);
  auto after = before;
  for (const DeltaRecord& record : m.records) {
    after[record.tensor] = L61Add(after[record.tensor], record.l61);
  }
  after[2] = after[0];
  for (const std::uint32_t i : {0, 1, 2, 3, 5}) {
    m.states.push_back({i, before[i], after[i]});
  }
  m.digest_before = table.StateDigest(before);
  m.digest_after = table.StateDigest(after);
  m.metadata_changed = true;
  m.metadata = {{"format", "pt"}, {"header:model.safetensors", "{}"}};
  return m;
}

StepManifest SmallRoot(const TensorTable& table) {
  Rng rng(1);
  StepManifest m;
  m.run = RandomBytes16(rng);
  m.kind = StepKind::kRoot;
  m.table_hash = table.hash();
  m.l61 = RandomL61(rng, table);
  m.digest_after = table.StateDigest(m.l61);
  m.metadata_changed = true;
  m.metadata = {{"format", "pt"}};
  return m;
}

AnchorManifest MakeAnchor(Rng& rng, const TensorTable& table,
                          const AnchorLayoutOptions& options) {
  const auto layout = PlanAnchor(table, options);
  EXPECT_TRUE(layout.ok()) << layout.status();
  AnchorManifest m;
  m.run = RandomBytes16(rng);
  m.epoch = 3;
  m.version = {18, RandomBytes16(rng)};
  m.table_hash = table.hash();
  m.l61 = RandomL61(rng, table);
  m.digest = table.StateDigest(m.l61);
  for (const auto& planned : layout->files) {
    DataFile file;
    file.id = planned.id;
    file.bytes = planned.bytes;
    SetPieces(rng, file, planned.piece_count);
    m.files.push_back(std::move(file));
  }
  m.slices = layout->slices;
  m.metadata = {{"format", "pt"}};
  return m;
}

AnchorManifest SmallAnchor(const TensorTable& table) {
  Rng rng(3);
  AnchorLayoutOptions options;
  options.slice_bytes = 80'000;
  options.anchor_file_bytes = 100'000;
  return MakeAnchor(rng, table, options);
}

RankFragment SmallFragment(const TensorTable& table) {
  Rng rng(4);
  RankFragment f;
  f.run = RandomBytes16(rng);
  f.epoch = 2;
  f.step = 18;
  f.attempt = 7;
  f.rank = 1;
  f.world_size = 2;
  f.table_hash = table.hash();
  f.base = {16, RandomBytes16(rng)};
  f.files = {{{FileKind::kSegment, 1, 0}}, {{FileKind::kSegment, 1, 1}}};
  f.owned = {{0, {40000, 76800}}, {3, {0, 14}}, {5, {5, 25}}};
  DeltaRecord record;
  record.tensor = 0;
  record.slice = {40000, 76800};
  record.bytes = 100;
  record.nnz = 50;
  record.l61 = 99;
  f.records.push_back(record);
  record.tensor = 5;
  record.slice = {6, 20};
  record.file = 1;
  record.nnz = 14;
  f.records.push_back(record);
  Fill(rng, f.files, {&f.records[0], &f.records[1]});
  return f;
}

std::vector<RankFragment> RandomFragments(Rng& rng, const TensorTable& table,
                                          std::uint32_t world_size,
                                          std::uint64_t changed_percent) {
  std::vector<RankFragment> fragments(world_size);
  const RunId run = RandomBytes16(rng);
  const VersionId base = {4, RandomBytes16(rng)};
  for (std::uint32_t rank = 0; rank < world_size; ++rank) {
    RankFragment& f = fragments[rank];
    f.run = run;
    f.epoch = 1;
    f.step = 5;
    f.attempt = 12;
    f.rank = rank;
    f.world_size = world_size;
    f.table_hash = table.hash();
    f.base = base;
  }
  for (std::uint32_t i = 0; i < table.size(); ++i) {
    if (table[i].tied_to != kNotTied) continue;
    const std::uint32_t step = UnitsPerElement(table[i].dtype);
    const std::uint64_t elements = table[i].element_count();
    if (elements == 0) continue;
    // Some cut places; slices between them go to random ranks.
    std::vector<std::uint64_t> cuts = {0, elements};
    for (std::uint32_t k = 1; k < world_size; ++k) {
      cuts.push_back(Below(rng, elements));
    }
    std::sort(cuts.begin(), cuts.end());
    for (std::size_t k = 1; k < cuts.size(); ++k) {
      if (cuts[k] == cuts[k - 1]) continue;
      const UnitRange slice = {cuts[k - 1] * step, cuts[k] * step};
      RankFragment& f = fragments[Below(rng, world_size)];
      f.owned.push_back({i, slice});
      if (Below(rng, 100) >= changed_percent) continue;
      DeltaRecord record;
      record.tensor = i;
      record.slice = slice;
      record.bytes = static_cast<std::uint32_t>(16 + Below(rng, 5000));
      record.nnz = 1 + Below(rng, slice.count());
      record.l61 = Below(rng, kL61Prime);
      f.records.push_back(record);
    }
  }
  for (RankFragment& f : fragments) {
    if (f.records.empty()) continue;
    const std::uint32_t files = 1 + static_cast<std::uint32_t>(Below(rng, 3));
    for (std::uint32_t i = 0; i < files; ++i) {
      f.files.push_back({{FileKind::kSegment, f.rank, i}});
    }
    std::vector<DeltaRecord*> order;
    for (DeltaRecord& record : f.records) {
      record.file = static_cast<std::uint32_t>(Below(rng, files));
      order.push_back(&record);
    }
    std::shuffle(order.begin(), order.end(), rng);
    Fill(rng, f.files, order);
  }
  return fragments;
}

void ExpectSame(const StepManifest& a, const StepManifest& b) {
  EXPECT_EQ(a.run, b.run);
  EXPECT_EQ(a.epoch, b.epoch);
  EXPECT_EQ(a.step, b.step);
  EXPECT_EQ(a.kind, b.kind);
  EXPECT_EQ(a.table_hash, b.table_hash);
  EXPECT_EQ(a.base, b.base);
  EXPECT_EQ(a.digest_before, b.digest_before);
  EXPECT_EQ(a.digest_after, b.digest_after);
  ExpectSameFiles(a.files, b.files);
  ASSERT_EQ(a.states.size(), b.states.size());
  for (std::size_t i = 0; i < a.states.size(); ++i) {
    EXPECT_EQ(a.states[i].tensor, b.states[i].tensor);
    EXPECT_EQ(a.states[i].l61_before, b.states[i].l61_before);
    EXPECT_EQ(a.states[i].l61_after, b.states[i].l61_after);
  }
  EXPECT_EQ(a.l61, b.l61);
  ExpectSameRecords(a.records, b.records);
  EXPECT_EQ(a.metadata_changed, b.metadata_changed);
  EXPECT_EQ(a.metadata, b.metadata);
}

void ExpectSame(const AnchorManifest& a, const AnchorManifest& b) {
  EXPECT_EQ(a.run, b.run);
  EXPECT_EQ(a.epoch, b.epoch);
  EXPECT_EQ(a.version, b.version);
  EXPECT_EQ(a.table_hash, b.table_hash);
  EXPECT_EQ(a.digest, b.digest);
  ExpectSameFiles(a.files, b.files);
  EXPECT_EQ(a.l61, b.l61);
  ASSERT_EQ(a.slices.size(), b.slices.size());
  for (std::size_t i = 0; i < a.slices.size(); ++i) {
    EXPECT_EQ(a.slices[i].tensor, b.slices[i].tensor);
    EXPECT_EQ(a.slices[i].slice.begin, b.slices[i].slice.begin);
    EXPECT_EQ(a.slices[i].slice.end, b.slices[i].slice.end);
    EXPECT_EQ(a.slices[i].file, b.slices[i].file);
    EXPECT_EQ(a.slices[i].offset, b.slices[i].offset);
  }
  EXPECT_EQ(a.metadata, b.metadata);
}

void ExpectSame(const RankFragment& a, const RankFragment& b) {
  EXPECT_EQ(a.run, b.run);
  EXPECT_EQ(a.epoch, b.epoch);
  EXPECT_EQ(a.step, b.step);
  EXPECT_EQ(a.attempt, b.attempt);
  EXPECT_EQ(a.rank, b.rank);
  EXPECT_EQ(a.world_size, b.world_size);
  EXPECT_EQ(a.table_hash, b.table_hash);
  EXPECT_EQ(a.base, b.base);
  ExpectSameFiles(a.files, b.files);
  ExpectSameRecords(a.records, b.records);
  ASSERT_EQ(a.owned.size(), b.owned.size());
  for (std::size_t i = 0; i < a.owned.size(); ++i) {
    EXPECT_EQ(a.owned[i].tensor, b.owned[i].tensor);
    EXPECT_EQ(a.owned[i].slice.begin, b.owned[i].slice.begin);
    EXPECT_EQ(a.owned[i].slice.end, b.owned[i].slice.end);
  }
}

void ForEachDamage(std::span<const std::byte> bytes, int rounds,
                   const std::function<void(std::span<const std::byte>,
                                            const std::string&)>& judge) {
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    // A copy of exactly that size, so that a sanitizer sees reads beyond it.
    const std::vector<std::byte> prefix(bytes.begin(), bytes.begin() + size);
    judge(prefix, absl::StrCat("cut to ", size, " bytes"));
  }
  std::vector<std::byte> damaged(bytes.begin(), bytes.end());
  for (std::size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    damaged[bit / 8] ^= std::byte{1} << bit % 8;
    judge(damaged, absl::StrCat("bit ", bit % 8, " of byte ", bit / 8));
    damaged[bit / 8] = bytes[bit / 8];
  }
  Rng rng(99);
  constexpr std::uint32_t kNasty[] = {0,          1,          0x7fffffff,
                                      0x80000000, 0xffffffff, 0xfffffff8};
  for (int round = 0; round < rounds; ++round) {
    damaged.assign(bytes.begin(), bytes.end());
    for (std::uint64_t k = 1 + Below(rng, 4); k > 0; --k) {
      const std::uint32_t value = Below(rng, 2) == 0
                                      ? kNasty[Below(rng, 6)]
                                      : static_cast<std::uint32_t>(rng());
      const std::size_t width = 1 + Below(rng, 4);
      const std::size_t at = Below(rng, bytes.size() - width + 1);
      std::memcpy(damaged.data() + at, &value, width);
    }
    judge(damaged, absl::StrCat("round ", round, " of seed 99"));
  }
}

testing::AssertionResult Says(const absl::Status& status, absl::StatusCode code,
                              const std::string& text) {
  const std::string message(status.message());
  if (status.code() == code && message.find(text) != std::string::npos) {
    return testing::AssertionSuccess();
  }
  return testing::AssertionFailure()
         << "expected " << absl::StatusCodeToString(code) << " with \"" << text
         << "\", found " << status;
}

}  // namespace kedge::samples
