// Writes the seeds of every fuzz target: small valid inputs, so that fuzzing
// starts behind the first checks. What was found by fuzzing lies beside them
// and stays.
//
//   make_fuzz_corpus DIRECTORY    tests/fuzz/corpus, as a rule

#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kedge/format/anchor_layout.h"
#include "kedge/format/codec.h"
#include "kedge/format/fixed_files.h"
#include "kedge/format/limits.h"
#include "kedge/format/manifest.h"
#include "kedge/tests/format/manifest_samples.h"
#include "kedge/tests/fuzz/fuzz_table.h"
#include "kedge/tests/fuzz/store_edits.h"

namespace kedge::fuzz {
namespace {

// Puts an input together; the mirror of Input.
class Output {
 public:
  template <class T>
  Output& Put(T value) {
    const auto* const bytes = reinterpret_cast<const char*>(&value);
    text_.append(bytes, sizeof(T));
    return *this;
  }
  template <class Bytes>
  Output& PutBytes(const Bytes& bytes) {
    for (const auto byte : bytes) text_.push_back(static_cast<char>(byte));
    return *this;
  }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

class Corpus {
 public:
  explicit Corpus(std::filesystem::path root) : root_(std::move(root)) {}

  void Add(const std::string& target, const std::string& name,
           const Output& input) {
    std::filesystem::create_directories(root_ / target);
    std::ofstream stream(root_ / target / name, std::ios::binary);
    stream << input.text();
    stream.close();
    KEDGE_CHECK(stream.good());
  }
  template <class Bytes>
  void AddBytes(const std::string& target, const std::string& name,
                const Bytes& bytes) {
    Add(target, name, Output().PutBytes(bytes));
  }

 private:
  std::filesystem::path root_;
};

template <class T>
T Valid(absl::StatusOr<T> value) {
  Require(value.status(), "a seed");
  return *std::move(value);
}

void AddFixedFiles(Corpus& corpus) {
  std::mt19937_64 random(1);
  const auto bytes16 = [&] { return samples::RandomBytes16(random); };
  const auto add = [&](const std::string& name, std::uint8_t kind,
                       const auto& bytes) {
    corpus.Add("fixed_files", name,
               Output().Put<std::uint8_t>(kind | 0x80).PutBytes(bytes));
  };
  const auto commit = SerializeCommit({bytes16(), 7, 2, 4096, bytes16()});
  add("commit", 0, commit);
  corpus.Add("fixed_files", "commit_own_hash",
             Output().Put<std::uint8_t>(0).PutBytes(commit));
  auto newer = commit;
  newer[4] = std::byte{2};
  add("commit_of_a_newer_format", 0, newer);
  add("head", 1, SerializeHead({bytes16(), 99'999'999, 1, bytes16()}));
  StoreInfo store;
  store.run = bytes16();
  store.l61_seed = random();
  store.v0_digest = bytes16();
  store.v0_table_hash = bytes16();
  store.created_unix_seconds = 1'700'000'000;
  add("store", 2, SerializeStore(store));
  add("epoch", 3, SerializeEpoch({bytes16(), 18, 3, bytes16()}));
  DataFileHeader header;
  header.run = bytes16();
  header.step = 19;
  header.file = {FileKind::kSegment, 3, 1};
  header.payload_bytes = 800;
  header.count = 12;
  add("segment_header", 4, SerializeDataFileHeader(header));
  header.file = {FileKind::kAnchor, 999, 999};
  header.payload_bytes = std::uint64_t{1} << 40;
  header.count = 16'000'000;
  add("anchor_header", 5, SerializeDataFileHeader(header));
  add("lease", 6,
      SerializeLease(
          {bytes16(), 17, true, 18, bytes16(), 41, "node-7.rank-0"}));
}

void AddManifests(Corpus& corpus) {
  const TensorTable& table = FuzzTable();
  KEDGE_CHECK(table.hash() == samples::SmallTable().hash());
  corpus.AddBytes("tensor_table", "small", table.bytes());
  corpus.AddBytes("tensor_table", "empty",
                  Valid(TensorTable::Create({})).bytes());
  corpus.AddBytes(
      "tensor_table", "odd_shapes",
      Valid(TensorTable::Create(
                {{"\xc3\xa9", DType::kBool, {}},
                 {"huge", DType::kU64, {8, kMaxTensorBytes / 64}},
                 {"long", DType::kF8E8M0, {1, 1, 1, 1, 2, 1, 1, 1, 3}},
                 {"none", DType::kF64, {kMaxTensorBytes, 0}}}))
          .bytes());

  const StepManifest step = samples::SmallStep(table);
  corpus.AddBytes("step_manifest", "delta",
                  Valid(SerializeStepManifest(step, table)));
  StepManifest empty = step;
  empty.files.clear();
  empty.records.clear();
  empty.states.clear();
  empty.metadata.clear();
  empty.metadata_changed = false;
  empty.digest_after = empty.digest_before;
  corpus.AddBytes("step_manifest", "nothing_changed",
                  Valid(SerializeStepManifest(empty, table)));
  corpus.AddBytes(
      "step_manifest", "root",
      Valid(SerializeStepManifest(samples::SmallRoot(table), table)));
  corpus.AddBytes(
      "anchor_manifest", "several_files",
      Valid(SerializeAnchorManifest(samples::SmallAnchor(table), table)));
  std::mt19937_64 random(2);
  corpus.AddBytes("anchor_manifest", "one_file",
                  Valid(SerializeAnchorManifest(
                      samples::MakeAnchor(random, table, {}), table)));

  const auto add_fragments = [&](const std::string& name,
                                 std::span<const RankFragment> fragments) {
    Output output;
    for (const RankFragment& fragment : fragments) {
      const auto bytes = Valid(SerializeRankFragment(fragment, table));
      KEDGE_CHECK(bytes.size() <= 0xffff);
      output.Put(static_cast<std::uint16_t>(bytes.size())).PutBytes(bytes);
    }
    corpus.Add("rank_fragment", name, output);
  };
  const RankFragment small = samples::SmallFragment(table);
  add_fragments("one_of_two", std::span(&small, 1));
  for (const std::uint32_t ranks : {1, 2, 4}) {
    add_fragments(absl::StrCat(ranks, "_ranks"),
                  samples::RandomFragments(random, table, ranks));
  }
  add_fragments("nothing_changed",
                samples::RandomFragments(random, table, 2, 0));
}

// What record_target.cc's TakePlace reads.
struct RecordPlace {
  std::uint8_t mode = 0;  // raw, tiles, encode
  std::uint8_t unit = 1;  // 1, 2, 4 bytes, pairs of 4
  std::uint16_t rows = 1;
  std::uint16_t cols = 1;
  std::uint8_t layout = 0;
  bool inner_box = false;

  Output Start() const {
    Output output;
    output.Put(mode).Put(unit);
    output.Put<std::uint16_t>(rows - 1).Put<std::uint16_t>(cols - 1);
    // The whole tensor in one slice.
    output.Put<std::uint32_t>(0).Put<std::uint32_t>(rows * cols - 1);
    const std::uint16_t margin = inner_box ? 1 : 0;
    output.Put<std::uint16_t>(margin);
    output.Put<std::uint16_t>(rows - 2 * margin - 1);
    output.Put<std::uint16_t>(margin);
    output.Put<std::uint16_t>(cols - 2 * margin - 1);
    output.Put(layout);
    return output;
  }
  std::uint32_t unit_bytes() const { return unit == 0 ? 1 : unit == 1 ? 2 : 4; }
  TileGrid grid() const {
    const std::uint64_t shape[] = {rows, cols};
    return MakeTileGrid(shape, unit == 3 ? 2 : 1);
  }
};

std::vector<Change> RandomChanges(std::mt19937_64& random, std::uint64_t units,
                                  std::uint32_t unit_bytes,
                                  std::uint64_t percent) {
  std::vector<Change> changes;
  const std::int64_t limit = (std::int64_t{1} << (8 * unit_bytes)) - 1;
  for (std::uint32_t i = 0; i < units; ++i) {
    if (random() % 100 >= percent) continue;
    std::int64_t difference = 1 + static_cast<std::int64_t>(random() % 4) / 3;
    if (random() % 50 == 0)
      difference = limit - static_cast<std::int64_t>(random() % 9);
    changes.push_back({i, random() % 2 == 0 ? difference : -difference});
  }
  return changes;
}

void AddRecords(Corpus& corpus) {
  std::mt19937_64 random(3);
  const auto add_raw = [&](const std::string& name, RecordPlace place,
                           std::uint64_t percent) {
    const TileGrid grid = place.grid();
    const auto record = EncodeRecordScalar(
        grid, {0, grid.unit_count()}, place.unit_bytes(),
        RandomChanges(random, grid.unit_count(), place.unit_bytes(), percent));
    corpus.Add("record", name, place.Start().PutBytes(record));
  };
  add_raw("raw_sparse_bf16", {0, 1, 20, 20}, 5);
  add_raw("raw_dense_bf16", {0, 1, 10, 9, 1, true}, 90);
  add_raw("raw_sparse_u8", {0, 0, 2, 150, 2}, 10);
  add_raw("raw_dense_u8", {0, 0, 7, 11, 3, true}, 100);
  add_raw("raw_sparse_f32", {0, 2, 33, 5, 4, true}, 20);
  add_raw("raw_dense_f32", {0, 2, 6, 6}, 100);
  add_raw("raw_pairs", {0, 3, 12, 9, 3, true}, 30);
  add_raw("raw_four_tiles", {0, 1, 150, 150, 1, true}, 3);
  add_raw("raw_three_tiles_in_a_row", {0, 1, 1, 40000}, 1);

  const auto add_tiles = [&](const std::string& name, RecordPlace place,
                             std::uint64_t percent) {
    place.mode = 1;
    const TileGrid grid = place.grid();
    Output output = place.Start();
    for (std::uint64_t tile = 0; tile < grid.tile_count(); ++tile) {
      const std::uint32_t units = grid.Box(tile).unit_count();
      const auto changes =
          RandomChanges(random, units, place.unit_bytes(), percent);
      if (changes.empty()) break;
      std::vector<std::byte> payload;
      const TileHeader header =
          EncodeTile(changes, units, place.unit_bytes(), &payload);
      output.Put<std::uint8_t>(0);
      output.Put(static_cast<std::uint8_t>(header.mode));
      output.Put(static_cast<std::uint16_t>(header.a));
      output.Put(static_cast<std::uint16_t>(header.b));
      output.Put(static_cast<std::uint16_t>(
          header.mode == TileMode::kSparse ? 0 : changes.size()));
      output.Put(static_cast<std::uint16_t>(header.bytes)).PutBytes(payload);
    }
    corpus.Add("record", name, output);
  };
  add_tiles("tiles_sparse", {0, 1, 140, 140, 0, true}, 1);
  add_tiles("tiles_sparse_f32", {0, 2, 130, 1, 2}, 30);
  add_tiles("tiles_dense_u8", {0, 0, 5, 40, 4, true}, 80);
  add_tiles("tiles_dense_pairs", {0, 3, 5, 8, 1, true}, 100);

  const auto add_encode = [&](const std::string& name, RecordPlace place,
                              int edits, std::uint8_t ops) {
    place.mode = 2;
    Output output = place.Start();
    for (int i = 0; i < edits; ++i) {
      output.Put(static_cast<std::uint16_t>(random() % 60));
      output.Put(static_cast<std::uint8_t>(random() & ops));
      output.Put(static_cast<std::uint32_t>(random()));
    }
    corpus.Add("record", name, output);
  };
  add_encode("encode_single_units", {0, 1, 90, 140, 2, true}, 60, 0x03);
  add_encode("encode_runs", {0, 0, 40, 33, 1}, 20, 0xff);
  add_encode("encode_f32", {0, 2, 17, 20, 3, true}, 12, 0x3f);
  add_encode("encode_pairs", {0, 3, 150, 70, 4, true}, 40, 0xff);
}

void AddCheckpoints(Corpus& corpus) {
  const auto add = [&](const std::string& target, const std::string& name,
                       const std::string& text) {
    corpus.AddBytes(target, name, text);
  };
  add("safetensors_header", "empty", "{}");
  add("safetensors_header", "metadata_alone",
      R"({"__metadata__":{"format":"pt","note":"x\ny\u00e9"}}   )");
  add("safetensors_header", "several",
      R"({"__metadata__":{"format":"pt"},)"
      R"("b":{"dtype":"BF16","shape":[3,2],"data_offsets":[8,20]},)"
      R"("a":{"dtype":"I64","shape":[],"data_offsets":[0,8]},)"
      R"("e":{"dtype":"F8_E4M3","shape":[0,7],"data_offsets":[20,20]},)"
      R"("c":{"dtype":"BOOL","shape":[1],"data_offsets":[20,21]}})");
  add("safetensors_header", "opaque",
      R"({"q":{"dtype":"F4","shape":[4],"data_offsets":[0,2]},)"
      R"("r":{"shape":[2],"data_offsets":[2,3],"dtype":"NEW"}})");
  const std::string most = absl::StrCat(kMaxTensorBytes);
  add("safetensors_header", "large_numbers",
      absl::StrCat(R"({"a":{"dtype":"U8","shape":[)", most,
                   R"(],"data_offsets":[0,)", most,
                   R"(]},"z":{"dtype":"F64","shape":[)", most,
                   R"(,0],"data_offsets":[)", most, ",", most, "]}}"));
  add("checkpoint_index", "two_files",
      R"({"metadata":{"total_size":123},"weight_map":{)"
      R"("a":"model-00001-of-00002.safetensors",)"
      R"("b":"model-00002-of-00002.safetensors",)"
      R"("c":"model-00001-of-00002.safetensors"}})");
  add("checkpoint_index", "escapes",
      R"({"weight_map":{"\u00e9\n":"\u00e9.safetensors"},"x":[[1.5e3,null]]})");
  add("checkpoint_index", "names_that_leave",
      R"({"weight_map":{"a":"..\/x.safetensors"}})");
  add("checkpoint_index", "empty", R"({"weight_map":{}})");
}

void AddStores(Corpus& corpus) {
  const auto start = [](int store, Seal seal) {
    return Output()
        .Put(static_cast<std::uint8_t>(store))
        .Put(static_cast<std::uint8_t>(seal));
  };
  for (int store = 0; store < 3; ++store) {
    corpus.Add("store", absl::StrCat("sound_", store),
               start(store, Seal::kNothing));
    corpus.Add("store", absl::StrCat("sound_sealed_", store),
               start(store, Seal::kChain)
                   .Put<std::uint8_t>(0)
                   .Put(static_cast<std::uint8_t>(Edit::kFlip))
                   .Put<std::uint16_t>(0)
                   .Put<std::uint8_t>(0));
  }
  // Each kind of edit, in each file of the smallest store in turn.
  std::mt19937_64 random(5);
  std::uint8_t file = 0;
  for (int kind = 0; kind < 8; ++kind) {
    for (const Seal seal : {Seal::kNothing, Seal::kManifest, Seal::kChain}) {
      Output output = start(static_cast<int>(random() % 3), seal);
      for (int i = 0; i < 2; ++i) {
        output.Put(file);
        file += 5;
        output.Put(static_cast<std::uint8_t>(kind));
        output.Put(static_cast<std::uint16_t>(random() % 500));
        output.Put<std::uint8_t>(4).Put(static_cast<std::uint32_t>(random()));
      }
      corpus.Add("store",
                 absl::StrCat("edit_", kind, "_seal_", static_cast<int>(seal)),
                 output);
    }
  }
}

}  // namespace
}  // namespace kedge::fuzz

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s DIRECTORY\n", argv[0]);
    return 8;
  }
  kedge::fuzz::Corpus corpus(argv[1]);
  kedge::fuzz::AddFixedFiles(corpus);
  kedge::fuzz::AddManifests(corpus);
  kedge::fuzz::AddRecords(corpus);
  kedge::fuzz::AddCheckpoints(corpus);
  kedge::fuzz::AddStores(corpus);
  return 0;
}
