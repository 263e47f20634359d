// Goal: what spec/ tells a reader to reject, kedge's reader rejects, and
// nothing else. Method: a MANIFEST of the golden store is damaged and its
// COMMIT made to vouch for the damage, so that only the rules of the page stand
// in its way. The plain decoder and kedge's reader must both take it, with the
// same weights, or both refuse it. A failure prints seed and place.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kedge/engine/io/file_system.h"
#include "kedge/engine/io/store.h"
#include "kedge/format/fixed_files.h"
#include "kedge/format/hash.h"
#include "kedge/format/status.h"
#include "kedge/reader/version_reader.h"
#include "kedge/tests/support/temp_directory.h"
#include "plain_decoder.h"

namespace kedge {
namespace {

using Bytes = std::vector<std::byte>;

Bytes Contents(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  const std::string text((std::istreambuf_iterator<char>(in)),
                         std::istreambuf_iterator<char>());
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}
void Write(const std::string& path, std::span<const std::byte> bytes) {
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out.write(reinterpret_cast<const char*>(bytes.data()),
            static_cast<std::streamsize>(bytes.size()));
  ASSERT_TRUE(out.good()) << path;
}

// Every tensor's bytes at `step`, one after another, by kedge's reader.
absl::StatusOr<Bytes> ByReader(const std::string& path, std::uint64_t step,
                               bool anchor) {
  KEDGE_ASSIGN_OR_RETURN(auto store, Store::Open(PosixFileSystem(), path));
  KEDGE_ASSIGN_OR_RETURN(const auto published, store->ReadStep(step));
  if (anchor) {
    // Another anchor would do for the reader: ask for this one.
    KEDGE_ASSIGN_OR_RETURN(const auto found, store->ReadAnchor(published->id));
  }
  KEDGE_ASSIGN_OR_RETURN(auto reader,
                         VersionReader::Open(store.get(), published));
  Bytes all;
  for (std::uint32_t i = 0; i < reader->table().size(); ++i) {
    Bytes bytes(reader->table()[i].byte_count());
    KEDGE_RETURN_IF_ERROR(reader->Read(i, 0, bytes));
    all.insert(all.end(), bytes.begin(), bytes.end());
  }
  return all;
}

Bytes ByPlainDecoder(const std::string& path, std::uint64_t step) {
  const auto version = kedge_plain::PlainStore(path).Read(step);
  Bytes all;
  for (const auto& tensor : version.bytes) {
    const auto bytes = std::as_bytes(std::span(tensor));
    all.insert(all.end(), bytes.begin(), bytes.end());
  }
  return all;
}

class ReadersAgreeTest : public testing::Test {
 protected:
  void SetUp() override {
    store_ = directory_.Join("store");
    std::filesystem::copy(
        absl::StrCat(KEDGE_SOURCE_DIR, "/tests/golden/v1/store"), store_,
        std::filesystem::copy_options::recursive);
  }

  // `folder` within the store, of `step`.
  void DamageManifests(const std::string& folder, std::uint64_t step,
                       bool anchor, int count) {
    const std::string manifest_path = store_ + "/" + folder + "/MANIFEST";
    const std::string commit_path = store_ + "/" + folder + "/COMMIT";
    const Bytes sound = Contents(manifest_path);
    ASSERT_FALSE(sound.empty()) << manifest_path;
    const auto commit = ParseCommit(commit_path, Contents(commit_path));
    ASSERT_TRUE(commit.ok()) << commit.status();
    int taken = 0;
    for (int seed = 1; seed <= count; ++seed) {
      std::mt19937_64 random(static_cast<std::uint64_t>(seed));
      Bytes bad = sound;
      std::size_t at = random() % bad.size();
      if (seed % 3 == 0) {
        at &= ~std::size_t{3};
        bad[at] = static_cast<std::byte>(random() % 20);
      } else {
        bad[at] ^= static_cast<std::byte>(1u << (random() % 8));
      }
      SCOPED_TRACE(absl::StrCat("seed ", seed, ": byte ", at, " of ", folder,
                                "/MANIFEST"));
      CommitRecord vouching = *commit;
      vouching.manifest_hash = HashBytes128(bad);
      Write(manifest_path, bad);
      Write(commit_path, SerializeCommit(vouching));

      std::optional<Bytes> expected;
      std::string why;
      try {
        expected = ByPlainDecoder(store_, step);
      } catch (const std::runtime_error& error) {
        why = error.what();
      }
      // kedge's reader would wait for the file to appear.
      if (why.find("no regular file") != std::string::npos) continue;
      const absl::StatusOr<Bytes> found = ByReader(store_, step, anchor);
      EXPECT_EQ(found.ok(), expected.has_value())
          << "reader: " << found.status() << "\nplain decoder: " << why;
      if (found.ok() && expected) {
        EXPECT_TRUE(*found == *expected);
        ++taken;
      }
    }
    // Some damage is none: the writer's version, a byte between two vectors.
    EXPECT_LT(taken, count / 3);
    Write(manifest_path, sound);
    Write(commit_path, SerializeCommit(*commit));
    EXPECT_TRUE(ByReader(store_, step, anchor).ok());
  }

  TempDirectory directory_;
  std::string store_;
};

TEST_F(ReadersAgreeTest, OnDamagedStepManifests) {
  DamageManifests("step_00000008", 8, false, 600);
}

TEST_F(ReadersAgreeTest, OnDamagedAnchorManifests) {
  DamageManifests("step_00000007/anchor", 7, true, 400);
}

}  // namespace
}  // namespace kedge
