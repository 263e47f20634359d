#ifndef KEDGE_TESTS_TOOLS_CHECKPOINT_FILES_H_
#define KEDGE_TESTS_TOOLS_CHECKPOINT_FILES_H_

// What the checkpoint tests share: a directory of their own, whole files as
// strings, and safetensors bytes put together by hand, so that a test can build
// what the writer would refuse.

#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <span>
#include <string>
#include <vector>

namespace kedge::testing {

// A new directory, removed with all that is in it.
class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    const char* const base = getenv("TMPDIR");
    path_ = std::string(base == nullptr ? "/tmp" : base) + "/kedge_test_XXXXXX";
    if (mkdtemp(path_.data()) == nullptr) abort();
  }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
  ~TemporaryDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }

  const std::string& path() const { return path_; }
  std::string Path(const std::string& name) const { return path_ + "/" + name; }

  std::string Write(const std::string& name, const std::string& bytes) const {
    // ext4 flushes a file that is truncated and written again when it closes.
    std::remove(Path(name).c_str());
    std::ofstream file(Path(name), std::ios::binary);
    file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    file.close();
    EXPECT_TRUE(file.good()) << name;
    return Path(name);
  }

  // Names of the files in it, sorted.
  std::vector<std::string> List() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(path_)) {
      names.push_back(entry.path().filename().string());
    }
    std::sort(names.begin(), names.end());
    return names;
  }

 private:
  std::string path_;
};

inline std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  EXPECT_TRUE(file.good()) << path;
  return std::string(std::istreambuf_iterator<char>(file), {});
}

inline std::string LengthPrefix(std::uint64_t length) {
  std::string bytes;
  for (int i = 0; i < 8; ++i) {
    bytes.push_back(static_cast<char>(length >> (8 * i)));
  }
  return bytes;
}

// The bytes of a file with this header and this data.
inline std::string FileBytes(const std::string& header,
                             const std::string& data) {
  return LengthPrefix(header.size()) + header + data;
}

// One entry of a header, unchecked.
inline std::string EntryJson(const std::string& name, const std::string& dtype,
                             const std::string& shape, std::uint64_t begin,
                             std::uint64_t end) {
  return "\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape +
         ",\"data_offsets\":[" + std::to_string(begin) + "," +
         std::to_string(end) + "]}";
}

inline std::string Text(std::span<const std::byte> bytes) {
  return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

inline std::span<const std::byte> Bytes(const std::string& text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

}  // namespace kedge::testing

#endif  // KEDGE_TESTS_TOOLS_CHECKPOINT_FILES_H_
