// Goal: bytes that were published once are read for ever, and today's code
// still writes them.
// Method: tests/golden/v1 is a store kept in the repository. The plain decoder
// (written from spec/ alone), kedge's reader and fsck read it and must agree
// with the model that it was made from; the writer must make the same files
// again, byte by byte.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "golden_model.h"
#include "gtest/gtest.h"
#include "kedge/engine/io/file_system.h"
#include "kedge/engine/io/store.h"
#include "kedge/format/hash.h"
#include "kedge/reader/fsck.h"
#include "kedge/reader/version_reader.h"
#include "kedge/tests/support/temp_directory.h"
#include "plain_decoder.h"

namespace kedge {
namespace {

std::string GoldenPath(const std::string& name) {
  return absl::StrCat(KEDGE_SOURCE_DIR, "/tests/golden/v1/", name);
}

std::string Contents(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  EXPECT_TRUE(in.is_open()) << path;
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

// Every file below `root`, by its path in it.
std::map<std::string, std::string> Tree(const std::string& root) {
  std::map<std::string, std::string> files;
  for (const auto& entry :
       std::filesystem::recursive_directory_iterator(root)) {
    if (!entry.is_regular_file()) continue;
    files[std::filesystem::relative(entry.path(), root).string()] =
        Contents(entry.path().string());
  }
  return files;
}

std::span<const std::byte> BytesOf(const GoldenVersion& version,
                                   const std::string& name) {
  const GoldenTensor& tensor = version.tensors.at(name);
  return tensor.tied_to.empty() ? tensor.bytes
                                : version.tensors.at(tensor.tied_to).bytes;
}

// Of the model, of what the plain decoder says.
void ExpectPlain(const kedge_plain::Version& found,
                 const GoldenVersion& expected) {
  EXPECT_EQ(found.step, expected.step);
  EXPECT_EQ(found.metadata, expected.metadata);
  ASSERT_EQ(found.tensors.size(), expected.tensors.size());
  for (std::size_t i = 0; i < found.tensors.size(); ++i) {
    const kedge_plain::Tensor& tensor = found.tensors[i];
    ASSERT_EQ(expected.tensors.count(tensor.name), 1u) << tensor.name;
    const GoldenTensor& to = expected.tensors.at(tensor.name);
    EXPECT_EQ(tensor.dtype, static_cast<std::uint8_t>(to.dtype));
    EXPECT_EQ(tensor.shape, to.shape) << tensor.name;
    const auto bytes = BytesOf(expected, tensor.name);
    const auto found_bytes = std::as_bytes(std::span(found.bytes[i]));
    EXPECT_TRUE(std::equal(bytes.begin(), bytes.end(), found_bytes.begin(),
                           found_bytes.end()))
        << "v" << expected.step << " " << tensor.name;
  }
}

TEST(GoldenTest, TheModelIsTheOneThatTheStoreWasMadeFrom) {
  EXPECT_EQ(Contents(GoldenPath("versions.txt")), GoldenText());
}

TEST(GoldenTest, PlainDecoderReadsEveryVersion) {
  const kedge_plain::PlainStore store(GoldenPath("store"));
  const auto versions = GoldenVersions();
  std::vector<std::uint64_t> steps;
  for (const GoldenVersion& version : versions) steps.push_back(version.step);
  EXPECT_EQ(store.Steps(), steps);
  for (const GoldenVersion& version : versions) {
    SCOPED_TRACE(absl::StrCat("v", version.step));
    EXPECT_EQ(store.HasAnchor(version.step), version.anchor);
    ExpectPlain(store.Read(version.step), version);
  }
  // Also past an anchor that is nearer.
  ExpectPlain(store.Read(8, 6), versions.back());
}

TEST(GoldenTest, ReaderAgreesWithThePlainDecoder) {
  const kedge_plain::PlainStore plain(GoldenPath("store"));
  auto store = Store::Open(PosixFileSystem(), GoldenPath("store"));
  ASSERT_TRUE(store.ok()) << store.status();
  for (const GoldenVersion& version : GoldenVersions()) {
    SCOPED_TRACE(absl::StrCat("v", version.step));
    const auto step = (*store)->ReadStep(version.step);
    ASSERT_TRUE(step.ok()) << step.status();
    const auto reader = VersionReader::Open(store->get(), *step);
    ASSERT_TRUE(reader.ok()) << reader.status();
    const kedge_plain::Version expected = plain.Read(version.step);
    EXPECT_EQ(ToHex((*step)->id.manifest_hash),
              kedge_plain::Hex(expected.manifest_hash));
    EXPECT_EQ((*reader)->state().l61, expected.l61);
    EXPECT_EQ((*reader)->state().metadata, version.metadata);
    const TensorTable& table = (*reader)->table();
    ASSERT_EQ(table.size(), version.tensors.size());
    for (std::uint32_t i = 0; i < table.size(); ++i) {
      std::vector<std::byte> bytes(table[i].byte_count());
      const absl::Status read = (*reader)->Read(i, 0, bytes);
      ASSERT_TRUE(read.ok()) << read;
      const auto wanted = BytesOf(version, table[i].name);
      EXPECT_TRUE(
          std::equal(bytes.begin(), bytes.end(), wanted.begin(), wanted.end()))
          << table[i].name;
    }
  }
}

TEST(GoldenTest, FsckFindsNothing) {
  for (const bool deep : {false, true}) {
    FsckOptions options;
    options.store_path = GoldenPath("store");
    options.deep = deep;
    const auto report = Fsck(options);
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_TRUE(report->findings.empty()) << FormatFsckReport(*report);
    EXPECT_EQ(report->steps_checked, GoldenVersions().size());
    EXPECT_EQ(report->anchors_checked, 3u);
  }
}

TEST(GoldenTest, TheWriterMakesTheSameFilesAgain) {
  TempDirectory directory;
  const std::string path = directory.Join("store");
  const absl::Status status = WriteGoldenStore(path);
  ASSERT_TRUE(status.ok()) << status;
  const auto expected = Tree(GoldenPath("store"));
  const auto found = Tree(path);
  std::vector<std::string> differing;
  for (const auto& [name, contents] : expected) {
    if (found.count(name) == 0) {
      differing.push_back(name + " (not written)");
    } else if (found.at(name) != contents) {
      differing.push_back(name);
    }
  }
  for (const auto& [name, contents] : found) {
    if (expected.count(name) == 0) differing.push_back(name + " (new)");
  }
  EXPECT_TRUE(differing.empty())
      << absl::StrJoin(differing, ", ")
      << "; if the format was changed on purpose, before its first release: "
         "kedge_make_golden, with the page of spec/, in one commit";
  EXPECT_GT(expected.size(), 20u);
}

}  // namespace
}  // namespace kedge
