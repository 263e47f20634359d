#ifndef KEDGE_TOOLS_SAFETENSORS_H_
#define KEDGE_TOOLS_SAFETENSORS_H_

// safetensors files, which come from anywhere and are trusted with nothing.
//
// A file is an unsigned 64-bit little-endian header length, that many bytes of
// JSON, then the data. The JSON object maps each tensor's name to its dtype,
// shape and data_offsets [begin, end), counted from the end of the header, and
// may map `__metadata__` to a flat object of strings. What is checked here, and
// refused otherwise, so that every reader sees the same tensors:
//   - the header starts with '{', ends with '}' and spaces, is strict JSON (see
//     strict_json.h), has each key once, and no entry has other fields;
//   - tensors lie back to back from offset 0 to the end of the file in some
//     order: no hole, no overlap, no byte left over;
//   - a tensor's bytes are as many as its dtype and shape make;
//   - the limits below.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kedge/format/dtype.h"

namespace kedge {

// Beside kMaxTensorCount, kMaxNameBytes and kMaxRank of format/limits.h.
inline constexpr std::uint64_t kMaxSafetensorsHeaderBytes = 100'000'000;
inline constexpr std::size_t kMaxSafetensorsMetadataEntries = 100'000;
inline constexpr std::size_t kMaxSafetensorsDTypeBytes = 64;

// One tensor as the header describes it.
struct SafetensorsTensor {
  std::string name;  // 1 to kMaxNameBytes of UTF-8, no NUL
  // The dtype as the file spells it: "BF16", "F4", "SOMETHING_NEW".
  std::string file_dtype;
  // What kedge makes of it. An opaque tensor's dtype is one that kedge does not
  // know: it is kU8 with shape [byte_size], whatever shape the file says.
  DType dtype = DType::kU8;
  std::vector<std::uint64_t> shape;  // empty for a scalar
  bool opaque = false;
  std::uint64_t data_offset = 0;  // of the first byte, from the end of header
  std::uint64_t byte_size = 0;
};

struct SafetensorsHeader {
  std::vector<SafetensorsTensor> tensors;  // in the order of their data
  std::vector<std::pair<std::string, std::string>> metadata;  // in file order
  std::uint64_t data_bytes = 0;                               // of all tensors
};

// The kedge dtype for the file's dtype name, or nullopt for an opaque one.
std::optional<DType> DTypeFromSafetensors(absl::string_view file_dtype);
// "BF16" for kBf16.
absl::string_view SafetensorsDTypeName(DType dtype);

// Checks `json`, a header without its length. `path` is for messages. With
// `data_bytes` the data must have exactly that size.
//
// Errors: kDataLoss for all that the comment above forbids. O(n log n).
absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(
    absl::string_view path, absl::string_view json,
    std::optional<std::uint64_t> data_bytes);

// An open, checked, mapped file.
//
// Ownership: owns the mapping; spans and views taken from it die with it.
// Moving keeps them valid. No file descriptor stays open.
// Thread safety: immutable after Open(); const methods may run concurrently.
// A file that another program shortens while it is mapped raises SIGBUS; one
// that is written in place gives mixed bytes, which CheckUnchanged() reports.
class SafetensorsFile {
 public:
  // Maps `path` read-only and checks all but the tensors' values. Symbolic
  // links are followed (a Hugging Face cache is made of them).
  //
  // Errors:
  //   kNotFound, kPermissionDenied, ...  the file cannot be opened
  //   kInvalidArgument                   not a regular file
  //   kDataLoss                          not a sound safetensors file
  static absl::StatusOr<SafetensorsFile> Open(absl::string_view path);

  SafetensorsFile(SafetensorsFile&& other) noexcept;
  SafetensorsFile& operator=(SafetensorsFile&& other) noexcept;
  ~SafetensorsFile();

  const std::string& path() const { return path_; }
  // The header as it stands in the file, padding included, without its length.
  absl::string_view header_json() const;
  // Where the data starts in the file. Nothing promises any alignment.
  std::uint64_t data_offset() const { return 8 + header_json_bytes_; }
  std::uint64_t file_bytes() const { return mapping_.size(); }

  // In the order of their data.
  std::span<const SafetensorsTensor> tensors() const { return header_.tensors; }
  const std::vector<std::pair<std::string, std::string>>& metadata() const {
    return header_.metadata;
  }
  // The bytes of `tensor`, which is one of tensors(). No alignment.
  std::span<const std::byte> Bytes(const SafetensorsTensor& tensor) const;

  // kDataLoss if the path now leads to another file, or to one with another
  // size or modification time, than Open() found. Call it after the last use
  // of the bytes: a save over the file in between went unnoticed till then.
  absl::Status CheckUnchanged() const;

 private:
  SafetensorsFile() = default;

  std::string path_;
  std::span<const std::byte> mapping_;
  std::uint64_t header_json_bytes_ = 0;
  SafetensorsHeader header_;
  // Of the file when it was opened.
  std::uint64_t device_ = 0;
  std::uint64_t inode_ = 0;
  std::int64_t modified_seconds_ = 0;
  std::int64_t modified_nanoseconds_ = 0;
};

struct SafetensorsWriterOptions {
  // An existing file at the path is replaced, else it is kAlreadyExists.
  bool replace_existing = false;
};

// Writes a file from a header that exists, byte for byte: the data comes in
// the header's order, in pieces of any size. The file appears under its name
// when it is complete and synced, or not at all.
//
// Memory: a buffer of 1 MiB. Thread safety: none, one thread at a time.
class SafetensorsWriter {
 public:
  // Checks `header_json` as ParseSafetensorsHeader does and creates a temporary
  // file in the directory of `path`.
  static absl::StatusOr<SafetensorsWriter> Create(
      absl::string_view path, absl::string_view header_json,
      SafetensorsWriterOptions options = {});

  SafetensorsWriter(SafetensorsWriter&& other) noexcept;
  SafetensorsWriter& operator=(SafetensorsWriter&& other) noexcept;
  // Removes the temporary file unless Finish() succeeded.
  ~SafetensorsWriter();

  // What to append, in this order.
  const SafetensorsHeader& header() const { return header_; }

  // Appends to the data. kInvalidArgument if that is more than the header
  // declares. After an error only destruction is useful.
  absl::Status Append(std::span<const std::byte> bytes);

  // Checks that all data came, syncs, renames, syncs the directory.
  //
  // Errors:
  //   kFailedPrecondition  data is missing
  //   kAlreadyExists       another file took the name, see the options
  //   kResourceExhausted, ...  what the file system says
  absl::Status Finish();

 private:
  SafetensorsWriter() = default;

  absl::Status Flush();
  absl::Status WriteAll(std::span<const std::byte> bytes);
  void Discard();

  std::string path_;
  std::string temporary_path_;  // empty when there is none
  int descriptor_ = -1;
  SafetensorsWriterOptions options_;
  SafetensorsHeader header_;
  std::uint64_t appended_bytes_ = 0;
  std::vector<std::byte> buffer_;
};

// For BuildSafetensorsHeader.
struct SafetensorsEntry {
  std::string name;
  DType dtype = DType::kU8;
  std::vector<std::uint64_t> shape;
  // Overrides the name and size of `dtype`: an opaque tensor.
  std::string file_dtype;
  std::uint64_t opaque_bytes = 0;
};

// A header for tensors in the order given: metadata first if there is any,
// padded with spaces so that the data starts on a multiple of 8.
//
// Errors: as ParseSafetensorsHeader, which has the last word on the result.
absl::StatusOr<std::string> BuildSafetensorsHeader(
    std::span<const SafetensorsEntry> entries,
    std::span<const std::pair<std::string, std::string>> metadata);

}  // namespace kedge

#endif  // KEDGE_TOOLS_SAFETENSORS_H_
