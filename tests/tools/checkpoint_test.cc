// Goal: a checkpoint is every tensor of its files once, in one order, or an
// error that names file and tensor; an index can neither lie nor lead out of
// its directory. Method: small directories in each layout, one fault each.

#include "kedge/tools/checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kedge/tests/tools/checkpoint_files.h"

namespace kedge {
namespace {

using ::kedge::testing::EntryJson;
using ::kedge::testing::FileBytes;
using ::kedge::testing::ReadFile;
using ::kedge::testing::TemporaryDirectory;
using ::kedge::testing::Text;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::string Message(const absl::Status& status) {
  return std::string(status.message());
}

// A file with tensors of 2 bytes each, whose data is the first 2 of the name.
std::string Shard(std::initializer_list<std::string> names) {
  std::string header = "{";
  std::string data;
  for (const std::string& name : names) {
    if (header.size() > 1) header += ",";
    header += EntryJson(name, "U8", "[2]", data.size(), data.size() + 2);
    data += (name + "__").substr(0, 2);
  }
  return FileBytes(header + "}", data);
}

std::string Index(
    std::initializer_list<std::pair<std::string, std::string>> entries) {
  std::string json = R"({"metadata":{"total_size":123,"nested":{"a":[1]}},)"
                     R"("weight_map":{)";
  bool first = true;
  for (const auto& [tensor, file] : entries) {
    absl::StrAppend(&json, first ? "" : ",", "\"", tensor, "\":\"", file, "\"");
    first = false;
  }
  return json + "}}\n";
}

std::vector<std::string> Names(const Checkpoint& checkpoint) {
  std::vector<std::string> names;
  for (const CheckpointTensor& tensor : checkpoint.tensors()) {
    names.push_back(tensor.description->name);
  }
  return names;
}

std::vector<std::string> FileNames(const Checkpoint& checkpoint) {
  std::vector<std::string> names;
  for (const CheckpointFile& file : checkpoint.files()) {
    names.push_back(file.name);
  }
  return names;
}

void ExpectRejected(const std::string& path, absl::StatusCode code,
                    std::initializer_list<std::string> says) {
  const absl::Status status = Checkpoint::Open(path).status();
  EXPECT_EQ(status.code(), code) << status;
  for (const std::string& text : says) {
    EXPECT_THAT(Message(status), HasSubstr(text));
  }
}

TEST(CheckpointTest, OpensOneFile) {
  const TemporaryDirectory directory;
  const std::string path =
      directory.Write("my model.safetensors", Shard({"b", "a"}));
  const auto checkpoint = Checkpoint::Open(path);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_FALSE(checkpoint->is_directory());
  EXPECT_EQ(checkpoint->path(), path);
  EXPECT_FALSE(checkpoint->index_json().has_value());
  EXPECT_THAT(Names(*checkpoint), ElementsAre("a", "b"));
  EXPECT_THAT(FileNames(*checkpoint), ElementsAre("my model.safetensors"));
  EXPECT_EQ(Text(checkpoint->tensors()[0].bytes), "a_");
  ASSERT_NE(checkpoint->Find("b"), nullptr);
  EXPECT_EQ(Text(checkpoint->Find("b")->bytes), "b_");
  EXPECT_EQ(checkpoint->Find("c"), nullptr);
  EXPECT_EQ(checkpoint->Find(""), nullptr);
}

TEST(CheckpointTest, OpensADirectoryWithIndexAndKeepsItsBytes) {
  const TemporaryDirectory directory;
  directory.Write("s1.safetensors", Shard({"z", "b"}));
  directory.Write("s2.safetensors", Shard({"a", "B"}));
  directory.Write("other.safetensors", "not a safetensors file");
  directory.Write("config.json", "{}");
  const std::string index = Index({{"z", "s1.safetensors"},
                                   {"a", "s2.safetensors"},
                                   {"B", "s2.safetensors"},
                                   {"b", "s1.safetensors"}});
  directory.Write("model.safetensors.index.json", index);
  const auto opened = Checkpoint::Open(directory.path());
  ASSERT_TRUE(opened.ok()) << opened.status();
  EXPECT_TRUE(opened->is_directory());
  EXPECT_EQ(opened->index_json(), index);
  EXPECT_THAT(opened->unused_files(), ElementsAre("other.safetensors"));
  EXPECT_THAT(FileNames(*opened),
              ElementsAre("s1.safetensors", "s2.safetensors"));
  EXPECT_THAT(Names(*opened), ElementsAre("B", "a", "b", "z"));
  EXPECT_EQ(opened->tensors()[0].file, 1u);
  EXPECT_EQ(opened->tensors()[3].file, 0u);
  EXPECT_TRUE(opened->CheckUnchanged().ok());
}

TEST(CheckpointTest, HeadersAndIndexGiveTheSameFilesBack) {
  const TemporaryDirectory directory;
  directory.Write("s1.safetensors", Shard({"z", "b", "q"}));
  directory.Write("s2.safetensors",
                  FileBytes("{\"__metadata__\":{\"format\":\"pt\"}}   ", ""));
  directory.Write("s3.safetensors", Shard({"a", "c"}));
  const auto opened = Checkpoint::Open(directory.path());
  ASSERT_TRUE(opened.ok()) << opened.status();
  const TemporaryDirectory copy;
  for (const CheckpointFile& file : opened->files()) {
    auto writer = SafetensorsWriter::Create(copy.Path(file.name),
                                            file.file.header_json());
    ASSERT_TRUE(writer.ok()) << writer.status();
    for (const SafetensorsTensor& tensor : writer->header().tensors) {
      ASSERT_TRUE(writer->Append(opened->Find(tensor.name)->bytes).ok());
    }
    ASSERT_TRUE(writer->Finish().ok());
    EXPECT_EQ(ReadFile(copy.Path(file.name)),
              ReadFile(directory.Path(file.name)));
  }
}

TEST(CheckpointTest, WithoutIndexPrefersModelSafetensorsAndTellsTheRest) {
  const TemporaryDirectory directory;
  directory.Write("model.safetensors", Shard({"a"}));
  directory.Write("adapter.safetensors", Shard({"x"}));
  const auto checkpoint = Checkpoint::Open(directory.path());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_THAT(Names(*checkpoint), ElementsAre("a"));
  EXPECT_THAT(checkpoint->unused_files(), ElementsAre("adapter.safetensors"));
}

TEST(CheckpointTest, WithoutIndexTakesEveryShard) {
  const TemporaryDirectory directory;
  directory.Write("m-00002-of-00002.safetensors", Shard({"a"}));
  directory.Write("m-00001-of-00002.safetensors", Shard({"b"}));
  directory.Write(".hidden.safetensors", "half written");
  const auto checkpoint = Checkpoint::Open(directory.path() + "/");
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_THAT(FileNames(*checkpoint),
              ElementsAre("m-00001-of-00002.safetensors",
                          "m-00002-of-00002.safetensors"));
  EXPECT_THAT(checkpoint->unused_files(), IsEmpty());
}

TEST(CheckpointTest, MissingShardIsNotFoundEvenWithoutIndex) {
  const TemporaryDirectory directory;
  directory.Write("m-00001-of-00003.safetensors", Shard({"a"}));
  directory.Write("m-00003-of-00003.safetensors", Shard({"b"}));
  ExpectRejected(directory.path(), absl::StatusCode::kNotFound,
                 {"shards of \"m\"", "numbers 1 to 3", "first wrong one at 2"});
  directory.Write("m-00002-of-00003.safetensors", Shard({"c"}));
  EXPECT_TRUE(Checkpoint::Open(directory.path()).ok());
  directory.Write("m-00004-of-00003.safetensors", Shard({"d"}));
  ExpectRejected(directory.path(), absl::StatusCode::kNotFound,
                 {"first wrong one at 4"});
}

TEST(CheckpointTest, IndexAndAnotherModelSafetensorsAreAmbiguous) {
  const TemporaryDirectory directory;
  directory.Write("s.safetensors", Shard({"a"}));
  directory.Write("model.safetensors", Shard({"a"}));
  directory.Write("model.safetensors.index.json",
                  Index({{"a", "s.safetensors"}}));
  ExpectRejected(directory.path(), absl::StatusCode::kInvalidArgument,
                 {"model.safetensors that it does not name"});
  directory.Write("model.safetensors.index.json",
                  Index({{"a", "model.safetensors"}}));
  EXPECT_TRUE(Checkpoint::Open(directory.path()).ok());
}

TEST(CheckpointTest, FollowsLinksIntoACache) {
  const TemporaryDirectory directory;
  ASSERT_EQ(::mkdir(directory.Path("blobs").c_str(), 0700), 0);
  ASSERT_EQ(::mkdir(directory.Path("snapshot").c_str(), 0700), 0);
  directory.Write("blobs/0123abcd", Shard({"a"}));
  directory.Write("blobs/4567", Index({{"a", "s.safetensors"}}));
  ASSERT_EQ(::symlink("../blobs/0123abcd",
                      directory.Path("snapshot/s.safetensors").c_str()),
            0);
  ASSERT_EQ(
      ::symlink(
          "../blobs/4567",
          directory.Path("snapshot/model.safetensors.index.json").c_str()),
      0);
  const auto checkpoint = Checkpoint::Open(directory.Path("snapshot"));
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_THAT(FileNames(*checkpoint), ElementsAre("s.safetensors"));
}

TEST(CheckpointTest, SameTensorInTwoFilesNamesBoth) {
  const TemporaryDirectory directory;
  directory.Write("x.safetensors", Shard({"a", "t"}));
  directory.Write("y.safetensors", Shard({"t"}));
  ExpectRejected(directory.path(), absl::StatusCode::kDataLoss,
                 {"tensor \"t\"", "x.safetensors", "y.safetensors"});
  // An index that names one of them does not hide the other.
  directory.Write("model.safetensors.index.json",
                  Index({{"a", "x.safetensors"}, {"t", "y.safetensors"}}));
  ExpectRejected(directory.path(), absl::StatusCode::kDataLoss,
                 {"tensor \"t\"", "x.safetensors", "y.safetensors"});
}

TEST(CheckpointTest, IndexMustAgreeWithItsFiles) {
  const TemporaryDirectory directory;
  directory.Write("x.safetensors", Shard({"a", "b"}));
  directory.Write("y.safetensors", Shard({"c"}));
  const auto expect = [&](const std::string& index, absl::StatusCode code,
                          std::initializer_list<std::string> says) {
    directory.Write("model.safetensors.index.json", index);
    ExpectRejected(directory.path(), code, says);
  };
  const std::string x = "x.safetensors";
  const std::string y = "y.safetensors";
  // User report 3: a tensor that nobody lists, and one that nobody holds.
  expect(Index({{"a", x}, {"c", y}}), absl::StatusCode::kDataLoss,
         {"tensor \"b\": expected an entry in weight_map", x});
  expect(Index({{"a", x}, {"b", x}, {"c", y}, {"zz", y}}),
         absl::StatusCode::kDataLoss,
         {"tensor \"zz\": expected in y.safetensors, found in no file"});
  expect(Index({{"", x}, {"a", x}, {"b", x}, {"c", y}}),
         absl::StatusCode::kDataLoss, {"tensor \"\"", "in no file"});
  expect(Index({{"a", x}, {"b", y}, {"c", y}}), absl::StatusCode::kDataLoss,
         {"tensor \"b\": expected in y.safetensors, found in x.safetensors"});
  expect(Index({{"a", x}, {"b", x}, {"c", y}, {"d", "z.safetensors"}}),
         absl::StatusCode::kNotFound,
         {"z.safetensors", "model.safetensors.index.json names this file"});
  directory.Write("model.safetensors.index.json",
                  Index({{"a", x}, {"b", x}, {"c", y}}));
  EXPECT_TRUE(Checkpoint::Open(directory.path()).ok());
}

TEST(CheckpointTest, RefusesWhatIsNoCheckpoint) {
  const TemporaryDirectory directory;
  ExpectRejected(directory.path(), absl::StatusCode::kNotFound,
                 {"model.safetensors.index.json or a .safetensors file"});
  ExpectRejected(directory.Path("none"), absl::StatusCode::kNotFound,
                 {"ENOENT"});
  ExpectRejected("/dev/null", absl::StatusCode::kInvalidArgument,
                 {"a regular file or a directory"});
  ASSERT_EQ(
      ::mkdir(directory.Path("model.safetensors.index.json").c_str(), 0700), 0);
  ExpectRejected(directory.path(), absl::StatusCode::kInvalidArgument,
                 {"a regular file"});
}

TEST(CheckpointTest, DamagedShardIsNamed) {
  const TemporaryDirectory directory;
  directory.Write("x.safetensors", Shard({"a"}));
  directory.Write("y.safetensors", Shard({"b"}) + "x");
  ExpectRejected(directory.path(), absl::StatusCode::kDataLoss,
                 {"y.safetensors", "appended"});
}

TEST(CheckpointTest, CheckUnchangedNamesTheFile) {
  const TemporaryDirectory directory;
  directory.Write("x.safetensors", Shard({"a"}));
  const std::string path = directory.Write("y.safetensors", Shard({"b"}));
  const auto checkpoint = Checkpoint::Open(directory.path());
  ASSERT_TRUE(checkpoint.ok());
  directory.Write("new", Shard({"c"}));
  ASSERT_EQ(::rename(directory.Path("new").c_str(), path.c_str()), 0);
  EXPECT_THAT(Message(checkpoint->CheckUnchanged()),
              HasSubstr("y.safetensors"));
}

TEST(CheckpointTest, MovedCheckpointKeepsItsTensors) {
  const TemporaryDirectory directory;
  directory.Write("x.safetensors", Shard({"a"}));
  auto opened = Checkpoint::Open(directory.path());
  ASSERT_TRUE(opened.ok());
  const Checkpoint moved = *std::move(opened);
  EXPECT_EQ(Text(moved.Find("a")->bytes), "a_");
}

TEST(CheckpointIndexTest, RejectsEveryUnsafeFileName) {
  for (const std::string& name : std::initializer_list<std::string>{
           "", ".", "..", "../x.safetensors", "/etc/x.safetensors",
           "a/x.safetensors", "a\\\\x.safetensors", "..\\\\x.safetensors",
           ".x.safetensors", "x\\u0000.safetensors", "x\\n.safetensors",
           "x.bin", "x.safetensors.exe", std::string(256, 'x'),
           std::string(250, 'x') + ".safetensors"}) {
    const auto index = ParseCheckpointIndex("i.json", Index({{"t", name}}));
    EXPECT_EQ(index.status().code(), absl::StatusCode::kDataLoss) << name;
    EXPECT_THAT(Message(index.status()), HasSubstr("file name")) << name;
  }
  EXPECT_TRUE(
      ParseCheckpointIndex("i", Index({{"t", "\xc3\xa4 -+.safetensors"}}))
          .ok());
  EXPECT_FALSE(CheckCheckpointFileName("d", "\xff").ok());
  EXPECT_FALSE(CheckCheckpointFileName("d", "x\x7f").ok());
}

TEST(CheckpointIndexTest, RejectsAnyOtherStructure) {
  for (const char* json :
       {"",
        "[]",
        "7",
        "\"weight_map\"",
        "{}",
        R"({"metadata":{}})",
        R"({"weight_map":[]})",
        R"({"weight_map":"x.safetensors"})",
        R"({"weight_map":null})",
        R"({"weight_map":{"t":1}})",
        R"({"weight_map":{"t":null}})",
        R"({"weight_map":{"t":{}}})",
        R"({"weight_map":{"t":["x.safetensors"]}})",
        R"({"weight_map":{"t":{"weight_map":{"u":"x.safetensors"}}}})",
        R"({"weight_map":{"t":"x.safetensors","t":"y.safetensors"}})",
        R"({"weight_map":{},"weight_map":{}})",
        R"({"metadata":{"weight_map":{"t":"x.safetensors"}}})",
        R"({"metadata":{"a":1,"a":2},"weight_map":{}})",
        R"({"weight_map":{}}x)",
        R"({"m":[[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]],"weight_map":{}})"}) {
    const absl::Status status = ParseCheckpointIndex("i.json", json).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << json;
    EXPECT_THAT(Message(status), HasSubstr("i.json")) << json;
  }
}

TEST(CheckpointIndexTest, KeepsTheWeightMapAlone) {
  const auto index = ParseCheckpointIndex(
      "i.json", R"({"x":[{"weight_map":{"no":"no"}},1,-1,true],"weight_map":)"
                R"({"b":"2.safetensors","a":"1.safetensors"},"y":{"z":"s"}})");
  ASSERT_TRUE(index.ok()) << index.status();
  EXPECT_THAT(index->files, ElementsAre("1.safetensors", "2.safetensors"));
  ASSERT_EQ(index->entries.size(), 2u);
  EXPECT_EQ(index->entries[0].tensor, "a");
  EXPECT_EQ(index->entries[1].file, 1u);
}

}  // namespace
}  // namespace kedge
