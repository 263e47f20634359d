// Goal: an operator can trust what `kedge` gives back, what it refuses, and
// what its exit status says. Method: runs the built program on small
// checkpoints put together by hand, compares files byte for byte, and looks at
// the store after every refusal. What no command line can bring about (a
// checkpoint written to halfway through a publish) goes through the sources
// that the program gives to the writer.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <random>
#include <thread>

#include "kedge/engine/io/lease.h"
#include "kedge/engine/io/store.h"
#include "kedge/format/limits.h"
#include "kedge/tests/tools/checkpoint_files.h"
#include "kedge/tests/tools/program_runner.h"
#include "kedge/tools/version_sources.h"
#include "kedge/writer/store_writer.h"
#include "nlohmann/json.hpp"

namespace kedge {
namespace {

using ::kedge::testing::EntryJson;
using ::kedge::testing::FileBytes;
using ::kedge::testing::ProgramResult;
using ::kedge::testing::ReadFile;
using ::kedge::testing::RunKedge;
using ::kedge::testing::TemporaryDirectory;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;
using Json = nlohmann::json;
namespace fs = std::filesystem;

std::string Noise(std::size_t bytes, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::string text(bytes, '\0');
  for (char& c : text) c = static_cast<char>(random());
  return text;
}

// Changes about one byte in `period` of the data, never the header.
std::string Perturbed(const std::string& file, std::uint32_t seed,
                      std::uint32_t period = 100) {
  std::uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, file.data(), 8);
  std::mt19937 random(seed);
  std::string changed = file;
  for (std::size_t i = 8 + header_bytes; i < file.size(); ++i) {
    if (random() % period == 0) changed[i] = static_cast<char>(changed[i] + 1);
  }
  return changed;
}

// Files by name, as a checkpoint directory holds them.
using Files = std::map<std::string, std::string>;

// Two shards and an index: 1-, 2-, 4- and 8-byte elements, odd sizes, a scalar,
// empty tensors, a dtype that kedge does not know, __metadata__, padding.
Files HuggingFaceModel() {
  const std::string a =
      "{\"__metadata__\":{\"format\":\"pt\"}," +
      EntryJson("embed.weight", "BF16", "[700,130]", 0, 182000) + "," +
      EntryJson("norm.bias", "F32", "[333]", 182000, 183332) + "," +
      EntryJson("none", "F32", "[2,0]", 183332, 183332) + "}   ";
  const std::string b =
      std::string("{") + EntryJson("counts", "I64", "[77]", 0, 616) + "," +
      EntryJson("packed", "F4", "[64,2]", 616, 680) + "," +
      EntryJson("scale", "F64", "[]", 680, 688) + "," +
      EntryJson("head.weight", "F8_E4M3", "[129,257]", 688, 33841) + "}";
  Files files;
  files["model-00001-of-00002.safetensors"] = FileBytes(a, Noise(183332, 1));
  files["model-00002-of-00002.safetensors"] = FileBytes(b, Noise(33841, 2));
  files["model.safetensors.index.json"] =
      "{\"metadata\": {\"total_size\": 1},\n \"weight_map\": {"
      "\"embed.weight\": \"model-00001-of-00002.safetensors\","
      "\"norm.bias\": \"model-00001-of-00002.safetensors\","
      "\"none\": \"model-00001-of-00002.safetensors\","
      "\"counts\": \"model-00002-of-00002.safetensors\","
      "\"packed\": \"model-00002-of-00002.safetensors\","
      "\"scale\": \"model-00002-of-00002.safetensors\","
      "\"head.weight\": \"model-00002-of-00002.safetensors\"}}\n";
  return files;
}

Files PerturbedFiles(const Files& files, std::uint32_t seed) {
  Files changed = files;
  for (auto& [name, bytes] : changed) {
    if (name.ends_with(".safetensors")) bytes = Perturbed(bytes, seed++);
  }
  return changed;
}

Files FilesIn(const std::string& directory) {
  Files files;
  for (const auto& entry : fs::directory_iterator(directory)) {
    files[entry.path().filename().string()] = ReadFile(entry.path().string());
  }
  return files;
}

// Every file of a tree by relative path, with its bytes.
Files Tree(const std::string& root) {
  Files files;
  for (const auto& entry : fs::recursive_directory_iterator(root)) {
    if (entry.is_regular_file()) {
      files[fs::relative(entry.path(), root).string()] =
          ReadFile(entry.path().string());
    }
  }
  return files;
}

class KedgeProgramTest : public ::testing::Test {
 protected:
  std::string Path(const std::string& name) const {
    return temporary_.Path(name);
  }
  std::string store() const { return Path("store"); }

  std::string WriteDirectory(const std::string& name, const Files& files) {
    fs::remove_all(Path(name));
    fs::create_directory(Path(name));
    for (const auto& [file, bytes] : files) {
      temporary_.Write(name + "/" + file, bytes);
    }
    return Path(name);
  }

  // Runs a command that is expected to succeed.
  ProgramResult Ok(const std::vector<std::string>& arguments) {
    ProgramResult result = RunKedge(arguments);
    EXPECT_EQ(result.exit_status, 0)
        << ::testing::PrintToString(arguments) << "\n"
        << result.err;
    EXPECT_EQ(result.err, "") << ::testing::PrintToString(arguments);
    return result;
  }
  // Runs one that is expected to fail, and gives its message.
  std::string Error(const std::vector<std::string>& arguments) {
    const ProgramResult result = RunKedge(arguments);
    EXPECT_EQ(result.exit_status, 1)
        << ::testing::PrintToString(arguments) << "\n"
        << result.out << result.err;
    EXPECT_THAT(result.err, StartsWith("kedge: "));
    return result.err;
  }
  Json OkJson(std::vector<std::string> arguments) {
    arguments.push_back("--json");
    const ProgramResult result = Ok(arguments);
    const Json json = Json::parse(result.out, nullptr, false);
    EXPECT_FALSE(json.is_discarded()) << result.out;
    return json;
  }

  // A store of a single file of `steps` + 1 versions, with an anchor at every
  // third. Returns the file's bytes by step.
  std::vector<std::string> MakeStore(std::uint64_t steps) {
    std::vector<std::string> versions;
    versions.push_back(FileBytes(
        std::string("{") + EntryJson("w", "BF16", "[100,300]", 0, 60000) + "}",
        Noise(60000, 3)));
    Ok({"init", store(), temporary_.Write("w.safetensors", versions[0])});
    for (std::uint64_t step = 1; step <= steps; ++step) {
      versions.push_back(
          Perturbed(versions.back(), static_cast<std::uint32_t>(step)));
      std::vector<std::string> arguments{
          "publish", store(),
          temporary_.Write("w.safetensors", versions.back()), "--step",
          std::to_string(step)};
      if (step % 3 == 0) arguments.push_back("--anchor");
      Ok(arguments);
    }
    return versions;
  }

  std::string Materialized(std::uint64_t step) {
    const std::string out = Path("out" + std::to_string(step));
    fs::remove_all(out);
    Ok({"materialize", store(), "--step", std::to_string(step), "--out", out});
    return ReadFile(out + "/w.safetensors");
  }

  TemporaryDirectory temporary_;
};

TEST_F(KedgeProgramTest, HelpSaysWhatEachCommandDoesAndItsExitStatus) {
  EXPECT_THAT(Ok({"--version"}).out, StartsWith("kedge 0."));
  const std::string all = Ok({"--help"}).out;
  for (const std::string command :
       {"init", "publish", "ls", "show", "materialize", "fsck", "gc", "wait"}) {
    EXPECT_THAT(all, HasSubstr("\n  " + command + " "));
    const std::string help = Ok({command, "--help"}).out;
    EXPECT_THAT(help,
                AllOf(HasSubstr("STORE"), HasSubstr("--json"),
                      HasSubstr("Exit status: 0"), HasSubstr(".\nUsage: "),
                      HasSubstr("2 wrong usage")))
        << command;
  }
}

TEST_F(KedgeProgramTest, WrongUsageExitsWith2AndTouchesNothing) {
  const std::vector<std::vector<std::string>> wrong = {
      {},
      {"frobnicate"},
      {"init", store()},
      {"publish", store(), "x"},
      {"publish", store(), "x", "--step", "0"},
      {"publish", store(), "x", "--step", "-1"},
      {"publish", store(), "x", "--step", "1x"},
      {"publish", store(), "x", "--step", "0x10"},
      {"publish", store(), "x", "--step", "100000000"},
      {"publish", store(), "x", "--step", "99999999999999999999999"},
      {"show", store(), "one"},
      {"materialize", store(), "--step", "1"},
      {"gc", store()},
      {"gc", store(), "--keep-anchors", "0"},
      {"gc", store(), "--keep-anchors", "1", "--lease-ttl", "0"},
      {"wait", store(), "--step", "1"},
      {"wait", store(), "--timeout", "1"},
      {"wait", store(), "--step", "1", "--timeout", "-1"},
      {"fsck", store(), "--shallow"},
  };
  for (const auto& arguments : wrong) {
    const ProgramResult result = RunKedge(arguments);
    EXPECT_EQ(result.exit_status, 2) << ::testing::PrintToString(arguments);
    EXPECT_NE(result.err, "");
  }
  EXPECT_FALSE(fs::exists(store()));
}

TEST_F(KedgeProgramTest, HuggingFaceDirectoryComesBackByteForByte) {
  std::vector<Files> versions{HuggingFaceModel()};
  Ok({"init", store(), WriteDirectory("ckpt", versions[0])});
  for (std::uint32_t step = 1; step <= 5; ++step) {
    Files next = PerturbedFiles(versions.back(), 100 * step);
    if (step == 2) next = versions.back();  // an empty delta
    if (step == 4) {
      // Other __metadata__ over the same tensors.
      std::string& shard = next["model-00001-of-00002.safetensors"];
      shard[shard.find("\"pt\"") + 1] = 'j';
    }
    std::vector<std::string> arguments{"publish", store(),
                                       WriteDirectory("ckpt", next), "--step",
                                       std::to_string(2 * step)};
    if (step == 3) arguments.push_back("--anchor");
    const Json json = OkJson(arguments);
    EXPECT_EQ(json["metadata_changed"], step == 4);
    EXPECT_EQ(json["nnz"] == 0, step == 2);
    EXPECT_EQ(json["anchor_bytes"] > 0, step == 3);
    versions.push_back(std::move(next));
  }
  for (std::size_t i = 0; i < versions.size(); ++i) {
    const std::string out = Path("out" + std::to_string(i));
    Ok({"materialize", store(), "--step", std::to_string(2 * i), "--out", out});
    EXPECT_EQ(FilesIn(out), versions[i]) << "v" << 2 * i;
  }
  EXPECT_THAT(RunKedge({"fsck", store(), "--deep"}).exit_status, 0);
}

TEST_F(KedgeProgramTest, ShardsMayBeCutAnewBetweenVersions) {
  Ok({"init", store(), WriteDirectory("ckpt", HuggingFaceModel())});
  // All tensors of the first shard in a file of their own, and a new index.
  Files files = HuggingFaceModel();
  Files cut;
  cut["a.safetensors"] = files["model-00001-of-00002.safetensors"];
  cut["b.safetensors"] = files["model-00002-of-00002.safetensors"];
  Ok({"publish", store(), WriteDirectory("ckpt", cut), "--step", "1"});
  Ok({"materialize", store(), "--step", "1", "--out", Path("out")});
  EXPECT_EQ(FilesIn(Path("out")), cut);
}

TEST_F(KedgeProgramTest, SingleFileComesBackUnderItsName) {
  const std::vector<std::string> versions = MakeStore(4);
  for (std::size_t step = 0; step < versions.size(); ++step) {
    EXPECT_EQ(Materialized(step), versions[step]) << "v" << step;
  }
  EXPECT_THAT(FilesIn(Path("out4")).size(), 1);
}

TEST_F(KedgeProgramTest, InitRefusesAPathThatHoldsSomething) {
  fs::create_directory(store());
  temporary_.Write("store/notes.txt", "mine");
  const std::string checkpoint = WriteDirectory("ckpt", HuggingFaceModel());
  EXPECT_THAT(Error({"init", store(), checkpoint}), HasSubstr("notes.txt"));
  EXPECT_EQ(Tree(store()).size(), 1);
}

TEST_F(KedgeProgramTest, PublishRefusesAStepThatIsNotAboveTheNewest) {
  MakeStore(3);
  const Files before = Tree(store());
  for (const char* step : {"1", "3"}) {
    EXPECT_THAT(
        Error({"publish", store(), Path("w.safetensors"), "--step", step}),
        AllOf(HasSubstr("v3, the newest"), HasSubstr("--resume")));
  }
  // Nothing changed, and no other writer was fenced.
  EXPECT_EQ(Tree(store()), before);
}

TEST_F(KedgeProgramTest, ResumeGoesOnBelowAndMovesLaterStepsToTrash) {
  const std::vector<std::string> versions = MakeStore(5);
  const std::string other = Perturbed(versions[2], 77);
  const Json json =
      OkJson({"publish", store(), temporary_.Write("w.safetensors", other),
              "--step", "3", "--resume"});
  EXPECT_EQ(json["base_step"], 2);
  EXPECT_EQ(json["moved_to_trash"], Json({3, 4, 5}));
  EXPECT_EQ(Materialized(3), other);
  EXPECT_EQ(Materialized(2), versions[2]);
  EXPECT_THAT(Error({"show", store(), "4"}),
              AllOf(HasSubstr("v4"), HasSubstr("v0 to v3")));
}

TEST_F(KedgeProgramTest, PublishDoesNotMoveADamagedStepAwayUnasked) {
  const std::vector<std::string> versions = MakeStore(3);
  std::string manifest = ReadFile(store() + "/step_00000003/MANIFEST");
  manifest[manifest.size() / 2] ^= 1;
  temporary_.Write("store/step_00000003/MANIFEST", manifest);
  const Files before = Tree(store());
  const std::vector<std::string> publish{"publish", store(),
                                         Path("w.safetensors"), "--step", "4"};
  EXPECT_THAT(Error(publish), AllOf(HasSubstr("step_00000003/MANIFEST"),
                                    HasSubstr("--resume")));
  EXPECT_EQ(Tree(store()), before);
  std::vector<std::string> resume = publish;
  resume.push_back("--resume");
  EXPECT_EQ(OkJson(resume)["base_step"], 2);
  EXPECT_EQ(Materialized(4), versions[3]);
}

TEST_F(KedgeProgramTest, AVersionThatCannotBeRebuiltMayBeReplacedByARoot) {
  const std::vector<std::string> versions = MakeStore(2);
  fs::remove_all(store() + "/step_00000000/anchor");
  const Files before = Tree(store());
  const std::vector<std::string> publish{"publish", store(),
                                         Path("w.safetensors"), "--step", "3"};
  EXPECT_THAT(Error(publish), HasSubstr("--replace-model"));
  EXPECT_EQ(Tree(store()), before);
  std::vector<std::string> root = publish;
  root.push_back("--replace-model");
  EXPECT_EQ(OkJson(root)["kind"], "root");
  EXPECT_EQ(Materialized(3), versions[2]);
}

TEST_F(KedgeProgramTest, WrongModelIsRefusedByNameAndCounted) {
  Ok({"init", store(), WriteDirectory("ckpt", HuggingFaceModel())});
  const Files before = Tree(store());
  const std::string other = temporary_.Write(
      "other.safetensors",
      FileBytes(std::string("{") +
                    EntryJson("embed.weight", "F16", "[700,130]", 0, 182000) +
                    "," +
                    EntryJson("_orig_mod.x", "U8", "[5]", 182000, 182005) + "}",
                Noise(182005, 4)));
  // One dtype, six missing, one extra.
  EXPECT_THAT(
      Error({"publish", store(), other, "--step", "1"}),
      AllOf(HasSubstr("8 tensors differ"),
            HasSubstr("embed.weight: expected bf16 [700, 130], found f16"),
            HasSubstr("4 more"), HasSubstr("--replace-model")));
  EXPECT_EQ(Tree(store()), before);

  const Json json =
      OkJson({"publish", store(), other, "--step", "1", "--replace-model"});
  EXPECT_EQ(json["kind"], "root");
  Ok({"materialize", store(), "--step", "1", "--out", Path("out")});
  EXPECT_EQ(FilesIn(Path("out")),
            (Files{{"other.safetensors", ReadFile(other)}}));
  Ok({"materialize", store(), "--step", "0", "--out", Path("out0")});
  EXPECT_EQ(FilesIn(Path("out0")), HuggingFaceModel());
}

TEST_F(KedgeProgramTest, HostileCheckpointMakesNoStore) {
  const Files hostile = {
      {"truncated",
       FileBytes(std::string("{") + EntryJson("w", "F32", "[4]", 0, 16) + "}",
                 "short")},
      {"overlap",
       FileBytes(std::string("{") + EntryJson("a", "U8", "[4]", 0, 4) + "," +
                     EntryJson("b", "U8", "[4]", 2, 6) + "}",
                 "123456")},
      {"overflow",
       FileBytes(std::string("{") +
                     EntryJson("w", "F32", "[4294967296,4294967296]", 0, 0) +
                     "}",
                 "")},
      {"huge-header", std::string("\xff\xff\xff\xff\xff\xff\xff\x7f{}", 10)},
      {"not-json", FileBytes("{\"w\":", "")},
      {"empty", ""},
  };
  for (const auto& [name, bytes] : hostile) {
    const std::string error = Error(
        {"init", store(), temporary_.Write(name + ".safetensors", bytes)});
    EXPECT_THAT(error, HasSubstr(name + ".safetensors"));
    EXPECT_FALSE(fs::exists(store())) << name;
  }
  EXPECT_THAT(Error({"init", store(), Path("nowhere")}), HasSubstr("nowhere"));
  Files escaping = HuggingFaceModel();
  std::string& index = escaping["model.safetensors.index.json"];
  index.replace(index.find("model-00001"), 11, "../model-001");
  EXPECT_THAT(Error({"init", store(), WriteDirectory("ckpt", escaping)}),
              HasSubstr("weight_map"));
  EXPECT_FALSE(fs::exists(store()));
}

TEST_F(KedgeProgramTest, NamesCannotSendCommandsToATerminal) {
  const std::string name = "w\\u001b[2Jx\\u0085";  // ESC and NEL, in JSON
  const std::string file = temporary_.Write(
      "w.safetensors",
      FileBytes(std::string("{") + EntryJson(name, "U8", "[3]", 0, 3) + "}",
                "abc"));
  Ok({"init", store(), file});
  const std::string shown = Ok({"show", store(), "0"}).out;
  EXPECT_THAT(shown, AllOf(HasSubstr("w\\x1b[2Jx\\xc2\\x85"),
                           Not(HasSubstr("\x1b")), Not(HasSubstr("\xc2\x85"))));
  EXPECT_THAT(Error({"show", store(), "0", "--tensor", "\x1b]0;t\x07"}),
              Not(HasSubstr("\x1b")));
}

TEST_F(KedgeProgramTest, HeadersThatAVersionCannotCarryAreRefused) {
  const std::string header = "{\"__metadata__\":{\"k\":\"" +
                             std::string(kMaxMetadataBytes, 'x') + "\"}," +
                             EntryJson("w", "U8", "[1]", 0, 1) + "}";
  const std::string file =
      temporary_.Write("w.safetensors", FileBytes(header, "1"));
  EXPECT_THAT(
      Error({"init", store(), file}),
      AllOf(HasSubstr("at most 67108864 bytes"), HasSubstr("w.safetensors")));
  EXPECT_FALSE(fs::exists(store()));
}

TEST_F(KedgeProgramTest, EveryCommandPrintsJsonWithItsKeys) {
  const std::vector<std::string> versions = MakeStore(3);
  const Json ls = OkJson({"ls", store()});
  EXPECT_EQ(ls["command"], "ls");
  EXPECT_EQ(ls["head"]["step"], 3);
  ASSERT_EQ(ls["steps"].size(), 4);
  EXPECT_EQ(ls["steps"][0]["kind"], "root");
  EXPECT_EQ(ls["steps"][1]["kind"], "delta");
  EXPECT_EQ(ls["steps"][1]["base_step"], 0);
  EXPECT_EQ(ls["steps"][2]["base_manifest_hash"],
            ls["steps"][1]["manifest_hash"]);
  EXPECT_EQ(ls["steps"][1]["units"], 30000);
  EXPECT_GT(ls["steps"][1]["nnz"], 0);
  EXPECT_TRUE(ls["steps"][1]["anchor_bytes"].is_null());
  EXPECT_GT(ls["steps"][3]["anchor_bytes"], 60000);

  const Json show = OkJson({"show", store(), "3"});
  EXPECT_EQ(show["kind"], "delta");
  EXPECT_EQ(show["tensors"], 1);
  EXPECT_EQ(show["records"][0]["tensor"], "w");
  EXPECT_EQ(show["anchor"]["slices"], 1);
  std::uint64_t nnz = 0;
  for (const Json& record : show["records"]) {
    nnz += record["nnz"].get<std::uint64_t>();
  }
  EXPECT_EQ(nnz, ls["steps"][3]["nnz"]);

  const Json tensor = OkJson({"show", store(), "2", "--tensor", "w"});
  EXPECT_EQ(tensor["dtype"], "bf16");
  EXPECT_EQ(tensor["shape"], Json({100, 300}));
  EXPECT_EQ(tensor["l61_after"],
            OkJson({"show", store(), "3", "--tensor", "w"})["l61_before"]);

  const Json made =
      OkJson({"materialize", store(), "--step", "3", "--out", Path("out")});
  EXPECT_EQ(made["files"], Json({"w.safetensors"}));
  EXPECT_EQ(made["headers_from_checkpoint"], true);

  const Json fsck = OkJson({"fsck", store(), "--deep"});
  EXPECT_EQ(fsck["exit_status"], 0);
  EXPECT_TRUE(fsck["report"].is_object());

  const Json gc = OkJson({"gc", store(), "--keep-anchors", "1", "--dry-run"});
  EXPECT_EQ(gc["moved_steps"], Json({0, 1, 2}));

  temporary_.Write("v.safetensors", versions[0]);
  const Json init = OkJson({"init", Path("store2"), Path("v.safetensors")});
  EXPECT_EQ(init["tensors"], 1);
  EXPECT_EQ(init["run_id"].get<std::string>().size(), 32);
}

TEST_F(KedgeProgramTest, TablesNameWhatIsThere) {
  MakeStore(3);
  EXPECT_THAT(Ok({"ls", store()}).out,
              AllOf(HasSubstr("STEP"), HasSubstr("HEAD: v3"),
                    HasSubstr("delta"), HasSubstr("root"), HasSubstr("v2")));
  EXPECT_THAT(
      Ok({"show", store(), "3"}).out,
      AllOf(HasSubstr("delta-r000-000.kds"),
            HasSubstr("anchor/anchor-r000-000.kda"), HasSubstr("[100, 300]")));
  EXPECT_THAT(Ok({"show", store(), "3", "--tensor", "w"}).out,
              AllOf(HasSubstr("S before"), HasSubstr("delta-r000-000.kds")));
  EXPECT_THAT(Error({"show", store(), "3", "--tensor", "v"}),
              HasSubstr("\"v\""));
}

TEST_F(KedgeProgramTest, LsSaysWhyAStepIsNotValid) {
  MakeStore(2);
  fs::remove(store() + "/step_00000001/MANIFEST");
  fs::remove(store() + "/HEAD");
  const Json json = OkJson({"ls", store()});
  EXPECT_EQ(json["steps"][1]["valid"], false);
  EXPECT_THAT(json["steps"][1]["why"].get<std::string>(),
              HasSubstr("step_00000001/MANIFEST"));
  EXPECT_TRUE(json["head"].is_null());
  EXPECT_THAT(Ok({"ls", store()}).out, HasSubstr("not valid: "));
}

TEST_F(KedgeProgramTest, FsckExitStatusIsItsVerdict) {
  MakeStore(3);
  EXPECT_EQ(RunKedge({"fsck", store()}).exit_status, 0);
  EXPECT_EQ(RunKedge({"fsck", store(), "--deep"}).exit_status, 0);
  EXPECT_EQ(RunKedge({"fsck", Path("nowhere")}).exit_status, 8);
  const std::string name = "store/step_00000002/delta-r000-000.kds";
  std::string bytes = ReadFile(Path(name));
  bytes[bytes.size() / 2] ^= 0x10;
  temporary_.Write(name, bytes);
  const ProgramResult deep = RunKedge({"fsck", store(), "--deep"});
  EXPECT_EQ(deep.exit_status, 4);
  EXPECT_THAT(deep.out, HasSubstr("step_00000002/delta-r000-000.kds"));
}

TEST_F(KedgeProgramTest, MaterializeLeavesNothingWhenAFileIsDamaged) {
  MakeStore(2);
  const std::string name = "store/step_00000002/delta-r000-000.kds";
  std::string bytes = ReadFile(Path(name));
  bytes[bytes.size() / 2] ^= 0x10;
  temporary_.Write(name, bytes);
  const auto before = temporary_.List();
  EXPECT_THAT(
      Error({"materialize", store(), "--step", "2", "--out", Path("out")}),
      HasSubstr("step_00000002/delta-r000-000.kds"));
  EXPECT_EQ(temporary_.List(), before);
}

TEST_F(KedgeProgramTest, MaterializeTakesAnEmptyDirectoryAndNoOther) {
  const std::vector<std::string> versions = MakeStore(1);
  fs::create_directory(Path("out"));
  Ok({"materialize", store(), "--step", "1", "--out", Path("out") + "/"});
  EXPECT_EQ(ReadFile(Path("out/w.safetensors")), versions[1]);
  EXPECT_THAT(
      Error({"materialize", store(), "--step", "0", "--out", Path("out")}),
      HasSubstr("w.safetensors"));
  EXPECT_EQ(ReadFile(Path("out/w.safetensors")), versions[1]);
}

TEST_F(KedgeProgramTest, GcKeepsWhatTheNewestAnchorsNeed) {
  const std::vector<std::string> versions = MakeStore(7);
  const Files before = Tree(store());
  EXPECT_EQ(OkJson({"gc", store(), "--keep-anchors", "1",
                    "--dry-run"})["moved_steps"],
            Json({0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(Tree(store()), before);
  EXPECT_EQ(OkJson({"gc", store(), "--keep-anchors", "2"})["moved_steps"],
            Json({0, 1, 2}));
  EXPECT_EQ(Materialized(5), versions[5]);
  EXPECT_EQ(Materialized(7), versions[7]);
  EXPECT_EQ(OkJson({"gc", store(), "--keep-anchors", "2", "--grace",
                    "0"})["deleted_trash"]
                .size(),
            3);
  EXPECT_EQ(RunKedge({"fsck", store(), "--deep"}).exit_status, 0);
  // And the store goes on.
  Ok({"publish", store(), Path("w.safetensors"), "--step", "8"});
}

// ------------------------------------------------------------ who holds what

// A lease as an engine has it; `age_seconds` old.
void WriteLease(const std::string& store_path, const std::string& reader,
                std::uint64_t oldest_step, const std::optional<VersionId>& held,
                int age_seconds = 0) {
  const auto store = Store::Open(PosixFileSystem(), store_path);
  ASSERT_TRUE(store.ok()) << store.status();
  auto lease = Lease::Create(PosixFileSystem(), store_path, reader,
                             (*store)->info().run);
  ASSERT_TRUE(lease.ok()) << lease.status();
  const absl::Status set = (*lease)->Set(oldest_step, held);
  ASSERT_TRUE(set.ok()) << set;
  const std::string file = store_path + "/leases/" + reader;
  fs::last_write_time(
      file, fs::last_write_time(file) - std::chrono::seconds(age_seconds));
}

VersionId IdOf(const std::string& store_path, std::uint64_t step) {
  const auto store = Store::Open(PosixFileSystem(), store_path);
  return (*(*store)->ReadStep(step))->id;
}

TEST_F(KedgeProgramTest, LsShowsChainsEpochsForksAndWhoHoldsWhat) {
  MakeStore(4);
  const VersionId v4 = IdOf(store(), 4);
  WriteLease(store(), "engine-a", 2, IdOf(store(), 2));
  WriteLease(store(), "engine-b", 3, std::nullopt, 1000);
  Ok({"publish", store(), Path("w.safetensors"), "--step", "4", "--resume"});
  WriteLease(store(), "engine-c", 4, v4);  // the v4 that was given up
  temporary_.Write("store/leases/engine-d", "nonsense");
  fs::remove(store() + "/step_00000001/COMMIT");

  const Json json = OkJson({"ls", store()});
  EXPECT_EQ(json["epochs"].size(), 5);
  EXPECT_EQ(json["epochs"][4]["resume_step"], 3);
  ASSERT_EQ(json["chains"].size(), 2);
  EXPECT_EQ(json["chains"][0]["last"], 0);
  EXPECT_EQ(json["chains"][1]["first"], 2);
  EXPECT_EQ(json["chains"][1]["last"], 4);
  EXPECT_EQ(json["chains"][1]["anchors"], Json({3}));
  EXPECT_EQ(json["steps"][1]["state"], "unpublished");
  EXPECT_EQ(json["steps"][2]["state"], "valid");
  ASSERT_EQ(json["leases"].size(), 4);
  EXPECT_EQ(json["leases"][0]["reader"], "engine-a");
  EXPECT_EQ(json["leases"][0]["state"], "live");
  EXPECT_EQ(json["leases"][0]["held_step"], 2);
  EXPECT_EQ(json["leases"][0]["note"], "");
  EXPECT_EQ(json["leases"][1]["state"], "expired");
  EXPECT_TRUE(json["leases"][1]["held_step"].is_null());
  EXPECT_GE(json["leases"][1]["age_seconds"], 1000);
  EXPECT_THAT(json["leases"][2]["note"].get<std::string>(),
              HasSubstr("superseded"));
  EXPECT_EQ(json["leases"][3]["state"], "unreadable");

  EXPECT_EQ(
      OkJson({"ls", store(), "--lease-ttl", "3600"})["leases"][1]["state"],
      "live");

  const std::string text = Ok({"ls", store()}).out;
  EXPECT_THAT(text, HasSubstr("chain: v2 to v4, 3 versions, to join from "
                              "anchor v3\n"));
  EXPECT_THAT(text, HasSubstr("5 from v3 on\n"));
  EXPECT_THAT(text, HasSubstr("engine-a"));
  EXPECT_THAT(text, HasSubstr("superseded: holds another v4"));
}

TEST_F(KedgeProgramTest, LsNamesAStepOfAFencedWriter) {
  MakeStore(2);
  fs::copy(store() + "/step_00000002", Path("late"),
           fs::copy_options::recursive);
  // Another writer goes on from v1; the old one's v2 comes back afterwards.
  Ok({"publish", store(), Path("w.safetensors"), "--step", "2", "--resume"});
  fs::remove_all(store() + "/step_00000002");
  fs::rename(Path("late"), store() + "/step_00000002");
  const Json json = OkJson({"ls", store()});
  EXPECT_EQ(json["steps"][2]["state"], "fenced");
  EXPECT_THAT(Ok({"ls", store()}).out, HasSubstr("fenced"));
}

TEST_F(KedgeProgramTest, GcSaysWhichLeasesPin) {
  MakeStore(7);
  WriteLease(store(), "slow", 4, IdOf(store(), 4));
  WriteLease(store(), "dead", 1, IdOf(store(), 1), 100);
  const std::string text =
      Ok({"gc", store(), "--keep-anchors", "1", "--lease-ttl", "60"}).out;
  EXPECT_THAT(text, HasSubstr(": v4 and later stay\n"));
  EXPECT_THAT(text, HasSubstr("pinned by lease slow: holds v4, needs v4 and "
                              "later, live, "));
  EXPECT_THAT(text, Not(HasSubstr("dead")));
  const Json json = OkJson({"gc", store(), "--keep-anchors", "1", "--lease-ttl",
                            "40", "--grace", "0"});
  EXPECT_EQ(json["oldest_kept_step"], 4);
  EXPECT_EQ(json["removed_leases"], Json({"dead"}));
  EXPECT_EQ(json["leases"][1]["reader"], "slow");
  EXPECT_EQ(json["leases"][1]["pins"], true);
  EXPECT_EQ(json["deleted_trash"].size(), 4);
  EXPECT_EQ(RunKedge({"fsck", store(), "--deep"}).exit_status, 0);
}

// ----------------------------------------------------------------------- wait

TEST_F(KedgeProgramTest, WaitFindsWhatIsThereAtOnce) {
  MakeStore(2);
  for (const char* step : {"0", "1", "2"}) {
    EXPECT_THAT(Ok({"wait", store(), "--step", step, "--timeout", "0"}).out,
                StartsWith("v2 ("));
  }
  fs::remove(store() + "/HEAD");
  const Json json = OkJson({"wait", store(), "--step", "2", "--timeout", "0"});
  EXPECT_EQ(json["version"]["step"], 2);
  EXPECT_EQ(json["version"]["manifest_hash"],
            ToHex(IdOf(store(), 2).manifest_hash));
}

// Report 61: every wait has a deadline and says what it waits for.
TEST_F(KedgeProgramTest, WaitThatRunsOutSaysWhatItWaitedForAndWhatIsNewest) {
  MakeStore(1);
  const ProgramResult late =
      RunKedge({"wait", store(), "--step", "2", "--timeout", "1", "--json"});
  EXPECT_EQ(late.exit_status, 3);
  EXPECT_THAT(late.err, AllOf(HasSubstr(store() + ": waited 1."),
                              HasSubstr("step 2 or above"),
                              HasSubstr("newest valid version is v1 (")));
  const Json json = Json::parse(late.out);
  EXPECT_TRUE(json["version"].is_null());
  EXPECT_EQ(json["newest"]["step"], 1);
  // Damaged ones do not count, whatever HEAD says.
  fs::remove(store() + "/step_00000001/MANIFEST");
  const ProgramResult damaged =
      RunKedge({"wait", store(), "--step", "1", "--timeout", "0"});
  EXPECT_EQ(damaged.exit_status, 3);
  EXPECT_THAT(damaged.err, HasSubstr("newest valid version is v0 ("));
  const ProgramResult none =
      RunKedge({"wait", Path("none/at/all"), "--step", "1", "--timeout", "0"});
  EXPECT_EQ(none.exit_status, 3);
  EXPECT_THAT(none.err, HasSubstr("has no \"none\" yet"));
  // What waiting cannot mend is an error.
  temporary_.Write("store/STORE", "nonsense");
  EXPECT_EQ(
      RunKedge({"wait", store(), "--step", "1", "--timeout", "9"}).exit_status,
      1);
}

// Reports 50 and 51: the store, and the directory it is in, come later.
TEST_F(KedgeProgramTest, WaitSeesAStoreAndAVersionThatComeLater) {
  MakeStore(1);
  fs::rename(store(), Path("elsewhere"));
  ProgramResult waited;
  std::thread waiting([&] {
    waited = RunKedge(
        {"wait", Path("new/run/store"), "--step", "2", "--timeout", "60"});
  });
  fs::create_directories(Path("new/run"));
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  fs::rename(Path("elsewhere"), Path("new/run/store"));
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  Ok({"publish", Path("new/run/store"), Path("w.safetensors"), "--step", "2"});
  waiting.join();
  EXPECT_EQ(waited.exit_status, 0) << waited.err;
  EXPECT_THAT(waited.out, StartsWith("v2 ("));
}

TEST_F(KedgeProgramTest, AFullDiskBehindStdoutIsAnError) {
  MakeStore(1);
  EXPECT_EQ(RunKedge({"ls", store()}, "/dev/full").exit_status, 1);
  EXPECT_EQ(RunKedge({"ls", store(), "--json"}, "/dev/full").exit_status, 1);
}

TEST_F(KedgeProgramTest, ATrainersVersionMaterializesWithAHeaderMadeForIt) {
  const std::string a = Noise(600, 5);
  const std::string b = Noise(40, 6);
  std::vector<TrainerTensor> tensors(3);
  tensors[0].name = "layer.a";
  tensors[0].dtype = DType::kBf16;
  tensors[0].shape = {3, 100};
  tensors[0].data = a.data();
  tensors[1].name = "b";
  tensors[1].dtype = DType::kF64;
  tensors[1].shape = {5};
  tensors[1].data = b.data();
  tensors[2] = tensors[0];
  tensors[2].name = "alias";
  tensors[2].tied_to = "layer.a";
  const auto table = MakeTable(tensors);
  ASSERT_TRUE(table.ok()) << table.status();
  auto source = MemorySource::Bind(*table, tensors);
  ASSERT_TRUE(source.ok()) << source.status();
  WriterOptions options;
  options.store_path = store();
  const absl::Status made = InitStore(options, {}, *table, *source);
  ASSERT_TRUE(made.ok()) << made;

  EXPECT_EQ(OkJson({"materialize", store(), "--step", "0", "--out",
                    Path("out")})["headers_from_checkpoint"],
            false);
  const auto checkpoint = Checkpoint::Open(Path("out"));
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  ASSERT_EQ(checkpoint->tensors().size(), 3);
  EXPECT_EQ(testing::Text(checkpoint->Find("layer.a")->bytes), a);
  EXPECT_EQ(testing::Text(checkpoint->Find("alias")->bytes), a);
  EXPECT_EQ(testing::Text(checkpoint->Find("b")->bytes), b);

  // It can be published on, unless what is tied there is not tied here.
  std::string untied = ReadFile(Path("out/model.safetensors"));
  untied.back() ^= 1;  // of layer.a, the last in the file
  EXPECT_THAT(
      Error({"publish", store(), temporary_.Write("untied.safetensors", untied),
             "--step", "1"}),
      AllOf(HasSubstr("alias"), HasSubstr("tied")));
  Ok({"publish", store(), Path("out"), "--step", "1"});
}

// Calls `hook` before the first read.
class HookedSource : public TensorSource {
 public:
  HookedSource(TensorSource* inner, std::function<void()> hook)
      : inner_(inner), hook_(std::move(hook)) {}
  absl::StatusOr<std::span<const std::byte>> Read(
      std::uint32_t ordinal, std::uint64_t byte_begin, std::uint64_t byte_count,
      std::vector<std::byte>* scratch) override {
    if (hook_) std::exchange(hook_, nullptr)();
    return inner_->Read(ordinal, byte_begin, byte_count, scratch);
  }

 private:
  TensorSource* inner_;
  std::function<void()> hook_;
};

class VersionSourcesTest : public KedgeProgramTest {
 protected:
  void SetUp() override {
    MakeStore(1);
    auto store_opened = Store::Open(PosixFileSystem(), store());
    ASSERT_TRUE(store_opened.ok()) << store_opened.status();
    store_ = *std::move(store_opened);
    auto step = store_->Newest();
    ASSERT_TRUE(step.ok()) << step.status();
    auto reader = VersionReader::Open(store_.get(), *step);
    ASSERT_TRUE(reader.ok()) << reader.status();
    reader_ = *std::move(reader);
    options_.store_path = store();
    options_.encode_threads = 1;
    options_.slice_units = 5000;
  }

  std::unique_ptr<Store> store_;
  std::unique_ptr<VersionReader> reader_;
  WriterOptions options_;
};

TEST_F(VersionSourcesTest, ACheckpointWrittenToHalfwayIsNotPublished) {
  const L61Summer summer(L61Key::FromSeed(store_->info().l61_seed));
  for (const bool touched : {false, true}) {
    const auto checkpoint = Checkpoint::Open(Path("w.safetensors"));
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    CheckpointSource source(&*checkpoint, &reader_->table(), &summer);
    HookedSource hooked(&source, [&] {
      if (!touched) return;
      // In place, as a trainer's save over the same file is.
      std::fstream file(Path("w.safetensors"),
                        std::ios::in | std::ios::out | std::ios::binary);
      file.seekp(-1, std::ios::end);
      file.put('!');
    });
    VersionSource old_source(reader_.get(), &summer);
    auto writer = StoreWriter::Open(options_);
    ASSERT_TRUE(writer.ok()) << writer.status();
    const auto result = (*writer)->PublishDelta(2, old_source, hooked, nullptr);
    if (!touched) {
      ASSERT_TRUE(result.ok()) << result.status();
      // Back to v1, for the other half.
      ASSERT_TRUE(StoreWriter::Open(options_, 1).ok());
      continue;
    }
    ASSERT_FALSE(result.ok());
    EXPECT_THAT(result.status().ToString(), HasSubstr("w.safetensors"));
    EXPECT_EQ((*store_->Newest())->id.step, 1);
    EXPECT_THAT(fs::is_empty(store() + "/.staging"), true);
  }
}

TEST_F(VersionSourcesTest, AnOldVersionWithAnotherChecksumIsNotPublishedOn) {
  // Another seed stands for bytes that are not the version's.
  const L61Summer summer(L61Key::FromSeed(store_->info().l61_seed + 1));
  const auto checkpoint = Checkpoint::Open(Path("w.safetensors"));
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  CheckpointSource source(&*checkpoint, &reader_->table(), &summer);
  VersionSource old_source(reader_.get(), &summer);
  auto writer = StoreWriter::Open(options_);
  ASSERT_TRUE(writer.ok()) << writer.status();
  const auto result = (*writer)->PublishDelta(2, old_source, source, nullptr);
  ASSERT_FALSE(result.ok());
  EXPECT_THAT(result.status().ToString(),
              AllOf(HasSubstr("v1 "), HasSubstr(": w: "), HasSubstr("L61")));
  EXPECT_EQ((*store_->Newest())->id.step, 1);
}

}  // namespace
}  // namespace kedge
