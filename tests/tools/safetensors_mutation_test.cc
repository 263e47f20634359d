// Goal: no bytes whatever make the readers crash, run on, or accept tensors
// that do not cover the file exactly. Method: sound files changed at random,
// byte-wise and by what numbers, keys and brackets mean; what is still accepted
// must hold its invariants and be written again byte for byte. The seed is
// KEDGE_TEST_SEED or the clock, and printed with every failure.

#include <gtest/gtest.h>
#include <stdlib.h>

#include <chrono>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kedge/tests/support/sanitized.h"
#include "kedge/tests/tools/checkpoint_files.h"
#include "kedge/tools/checkpoint.h"
#include "kedge/tools/safetensors.h"

namespace kedge {
namespace {

using ::kedge::testing::FileBytes;
using ::kedge::testing::LengthPrefix;
using ::kedge::testing::ReadFile;
using ::kedge::testing::TemporaryDirectory;

std::uint64_t Seed() {
  if (const char* const text = getenv("KEDGE_TEST_SEED")) {
    return strtoull(text, nullptr, 0);
  }
  return static_cast<std::uint64_t>(
      std::chrono::system_clock::now().time_since_epoch().count());
}

class Mutator {
 public:
  explicit Mutator(std::uint64_t seed) : random_(seed) {}

  std::size_t Below(std::size_t bound) {
    return bound == 0 ? 0 : random_() % bound;
  }

  // A few changes to `text`.
  void Change(std::string* text) {
    for (std::size_t n = 1 + Below(3); n > 0; --n) ChangeOnce(text);
  }

 private:
  void ChangeOnce(std::string* text) {
    static const char* const kSnippets[] = {"0",
                                            "-1",
                                            "1e3",
                                            "18446744073709551615",
                                            "18446744073709551616",
                                            "9223372036854775808",
                                            "4294967296",
                                            "[",
                                            "]",
                                            "{",
                                            "}",
                                            ",",
                                            ":",
                                            "\"",
                                            "\\u0000",
                                            "\\ud800",
                                            "\xff",
                                            "\xed\xa0\x80",
                                            "\"dtype\":\"F32\",",
                                            "\"shape\":[0],",
                                            "\"__metadata__\":{\"a\":\"b\"},",
                                            "\"F4\"",
                                            "\"\"",
                                            "null",
                                            " ",
                                            "\n",
                                            "}}",
                                            "[[[["};
    const std::size_t at = Below(text->size() + 1);
    switch (Below(7)) {
      case 0:
        if (at < text->size()) (*text)[at] = static_cast<char>(random_());
        break;
      case 1:
        if (at < text->size()) (*text)[at] ^= static_cast<char>(1 << Below(8));
        break;
      case 2:
        text->erase(at, 1 + Below(40));
        break;
      case 3:
        text->insert(at, kSnippets[Below(std::size(kSnippets))]);
        break;
      case 4: {  // a piece of the text elsewhere
        const std::string piece = text->substr(Below(text->size()), Below(80));
        text->insert(at, piece);
        break;
      }
      case 5: {  // another digit
        const std::size_t digit = text->find_first_of("0123456789", at);
        if (digit != std::string::npos) {
          (*text)[digit] = static_cast<char>('0' + Below(10));
        }
        break;
      }
      default: {  // another number
        std::size_t first = text->find_first_of("0123456789", at);
        if (first == std::string::npos) break;
        const std::size_t last = text->find_first_not_of("0123456789", first);
        text->replace(first, last == std::string::npos ? last : last - first,
                      kSnippets[Below(7)]);
        break;
      }
    }
  }

  std::mt19937_64 random_;
};

// A sound file of many dtypes and shapes.
std::string SoundFile(Mutator& random, std::size_t tensors,
                      std::string* header) {
  std::vector<SafetensorsEntry> entries;
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < tensors; ++i) {
    SafetensorsEntry entry;
    entry.name = absl::StrCat("model.layers.", i, ".weight");
    entry.dtype = static_cast<DType>(1 + random.Below(kMaxDType));
    std::uint64_t count = 1;
    for (std::size_t rank = random.Below(4); rank > 0; --rank) {
      entry.shape.push_back(random.Below(5));
      count *= entry.shape.back();
    }
    bytes += count * ElementBytes(entry.dtype);
    if (random.Below(8) == 0) {
      bytes -= count * ElementBytes(entry.dtype);
      entry.file_dtype = "NEW";
      entry.opaque_bytes = random.Below(9);
      bytes += entry.opaque_bytes;
    }
    entries.push_back(entry);
  }
  const std::vector<std::pair<std::string, std::string>> metadata = {
      {"format", "pt"}, {"note", "x\ny"}};
  const auto built = BuildSafetensorsHeader(entries, metadata);
  EXPECT_TRUE(built.ok()) << built.status();
  *header = *built;
  std::string data(bytes, '\0');
  for (char& byte : data) byte = static_cast<char>(random.Below(256));
  return FileBytes(*header, data);
}

// Reads everything that an accepted file promises.
void CheckAccepted(const TemporaryDirectory& directory,
                   const SafetensorsFile& file, const std::string& bytes) {
  std::string data;
  for (const SafetensorsTensor& tensor : file.tensors()) {
    ASSERT_FALSE(tensor.name.empty());
    std::uint64_t expected = ElementBytes(tensor.dtype);
    for (const std::uint64_t dimension : tensor.shape) expected *= dimension;
    ASSERT_EQ(expected, tensor.byte_size) << tensor.name;
    data += kedge::testing::Text(file.Bytes(tensor));
  }
  ASSERT_EQ(FileBytes(std::string(file.header_json()), data), bytes);
  auto writer = SafetensorsWriter::Create(directory.Path("copy"),
                                          file.header_json(), {true});
  ASSERT_TRUE(writer.ok()) << writer.status();
  ASSERT_TRUE(writer->Append(kedge::testing::Bytes(data)).ok());
}

void MutateFiles(std::size_t tensors, int rounds) {
  const std::uint64_t seed = Seed();
  SCOPED_TRACE(absl::StrCat("KEDGE_TEST_SEED=", seed));
  Mutator random(seed);
  const TemporaryDirectory directory;
  std::string header;
  std::string sound;
  int accepted = 0;
  for (int round = 0; round < rounds; ++round) {
    SCOPED_TRACE(absl::StrCat("round ", round));
    if (round % 100 == 0) sound = SoundFile(random, tensors, &header);
    std::string bytes;
    switch (random.Below(8)) {
      case 0:  // anything, the length included
        bytes = sound;
        random.Change(&bytes);
        break;
      case 1: {  // the length alone
        bytes = sound;
        const std::size_t at = random.Below(8);
        bytes[at] = static_cast<char>(bytes[at] + 1 + random.Below(3));
        break;
      }
      case 2:  // the end
        bytes = sound.substr(0, random.Below(sound.size()));
        break;
      case 3:  // nothing, or padding
        bytes = FileBytes(header + std::string(random.Below(9), ' '),
                          sound.substr(8 + header.size()));
        break;
      default: {  // the header, with its length set right
        std::string changed = header;
        random.Change(&changed);
        bytes = FileBytes(changed, sound.substr(8 + header.size()));
      }
    }
    const std::string path = directory.Write("f.safetensors", bytes);
    const auto file = SafetensorsFile::Open(path);
    if (file.ok()) {
      ++accepted;
      CheckAccepted(directory, *file, bytes);
      if (::testing::Test::HasFatalFailure()) return;
    } else {
      ASSERT_LT(file.status().message().size(), 2000u);
      for (const char c : file.status().message()) {
        ASSERT_TRUE(c >= 0x20 && c < 0x7f) << file.status();
      }
    }
  }
  // Else the mutations would have tested one side alone.
  EXPECT_GT(accepted, rounds / 20);
  EXPECT_LT(accepted, rounds / 2);
}

TEST(SafetensorsMutationTest, SmallFilesAreRefusedOrReadExactly) {
  MutateFiles(/*tensors=*/6, /*rounds=*/Rounds(12'000));
}

TEST(SafetensorsMutationTest, MegabyteHeadersAreRefusedOrReadExactly) {
  MutateFiles(/*tensors=*/12'000, /*rounds=*/100);
}

TEST(SafetensorsMutationTest, IndexesAreRefusedOrSafe) {
  const std::uint64_t seed = Seed();
  SCOPED_TRACE(absl::StrCat("KEDGE_TEST_SEED=", seed));
  Mutator random(seed);
  const std::string sound =
      R"({"metadata":{"total_size":1,"x":[{"y":null}]},"weight_map":{)"
      R"("a":"m-00001-of-00002.safetensors","b":"m-00002-of-00002.safetensors",)"
      R"("c":"m-00002-of-00002.safetensors"}})";
  ASSERT_TRUE(ParseCheckpointIndex("i", sound).ok());
  int accepted = 0;
  constexpr int kRounds = Rounds(30'000);
  for (int round = 0; round < kRounds; ++round) {
    std::string text = sound;
    random.Change(&text);
    const auto index = ParseCheckpointIndex("i", text);
    if (!index.ok()) continue;
    ++accepted;
    for (const std::string& file : index->files) {
      ASSERT_EQ(file.find_first_of(absl::string_view("/\\\0", 3).data(), 0, 3),
                std::string::npos)
          << "round " << round;
      ASSERT_NE(file[0], '.') << "round " << round;
    }
    for (const auto& entry : index->entries) {
      ASSERT_LT(entry.file, index->files.size()) << "round " << round;
    }
  }
  EXPECT_GT(accepted, kRounds / 20);
}

}  // namespace
}  // namespace kedge
