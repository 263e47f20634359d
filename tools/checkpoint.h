#ifndef KEDGE_TOOLS_CHECKPOINT_H_
#define KEDGE_TOOLS_CHECKPOINT_H_

// A model as its owner keeps it: one .safetensors file, or a directory in the
// Hugging Face layout. Names the tensors of all its files once, in one order,
// and keeps what is needed to write the same files again, byte for byte.

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
#include "kedge/tools/safetensors.h"

namespace kedge {

inline constexpr std::size_t kMaxCheckpointFiles = 10'000;
inline constexpr std::uint64_t kMaxCheckpointIndexBytes = 100'000'000;
inline constexpr absl::string_view kCheckpointIndexName =
    "model.safetensors.index.json";

// kDataLoss unless `name` is safe to create in a directory of our own: 1 to 255
// bytes of UTF-8, no '/' or '\\', no control character, no leading '.'. `where`
// is for messages. Names in an index, and those kept for materializing, pass
// here.
absl::Status CheckCheckpointFileName(absl::string_view where,
                                     absl::string_view name);

// The tensors that a `model.safetensors.index.json` lists.
struct CheckpointIndex {
  struct Entry {
    std::string tensor;
    std::uint32_t file = 0;  // ordinal in `files`
  };
  std::vector<Entry> entries;      // sorted by tensor, bytewise
  std::vector<std::string> files;  // sorted bytewise, each with an entry
};

// Checks the text of an index: strict JSON (strict_json.h), an object whose
// weight_map maps tensor names to plain names of .safetensors files. What else
// it holds (a total_size, which is wrong in many) is not looked at.
//
// Errors: kDataLoss.
absl::StatusOr<CheckpointIndex> ParseCheckpointIndex(absl::string_view path,
                                                     absl::string_view json);

struct CheckpointTensor {
  const SafetensorsTensor* description = nullptr;
  std::uint32_t file = 0;            // ordinal in Checkpoint::files()
  std::span<const std::byte> bytes;  // mapped; no alignment
};

struct CheckpointFile {
  std::string name;  // passes CheckCheckpointFileName
  SafetensorsFile file;
};

// Ownership: owns the mappings; everything taken from it dies with it. Moving
// keeps all of it valid.
// Thread safety: immutable after Open(); const methods may run concurrently.
class Checkpoint {
 public:
  // Opens a .safetensors file, or a directory: with an index the files it
  // names; else model.safetensors; else every *.safetensors file in it.
  // Symbolic links are followed.
  //
  // Errors, beside those of SafetensorsFile::Open:
  //   kNotFound         no .safetensors file, or a file the index names is not
  //                     there, or a shard of name-00001-of-00003 is not
  //   kInvalidArgument  neither file nor directory; or an index and a
  //                     model.safetensors that it does not name, between which
  //                     programs choose differently
  //   kDataLoss         the index and the files disagree, two files hold one
  //                     tensor, a file name could leave the directory
  static absl::StatusOr<Checkpoint> Open(absl::string_view path);

  Checkpoint(Checkpoint&&) = default;
  Checkpoint& operator=(Checkpoint&&) = default;

  const std::string& path() const { return path_; }
  bool is_directory() const { return is_directory_; }
  // Sorted by name, bytewise; no two names are equal.
  std::span<const CheckpointTensor> tensors() const { return tensors_; }
  // Sorted by name, bytewise.
  std::span<const CheckpointFile> files() const { return files_; }
  // The bytes of the index, if the directory has one.
  const std::optional<std::string>& index_json() const { return index_json_; }
  // Names of .safetensors files in the directory that are no part of it.
  std::span<const std::string> unused_files() const { return unused_files_; }
  // Names of the other files in the directory (config.json, the tokenizer, ...),
  // which a store does not keep.
  std::span<const std::string> other_files() const { return other_files_; }

  // nullptr if there is no such tensor. O(log n).
  const CheckpointTensor* Find(absl::string_view name) const;

  // CheckUnchanged() of every file.
  absl::Status CheckUnchanged() const;

 private:
  Checkpoint() = default;

  absl::Status OpenFile(absl::string_view path, absl::string_view name);
  absl::Status OpenDirectory();
  absl::Status CollectTensors();
  absl::Status CompareWithIndex(absl::string_view index_path,
                                const CheckpointIndex& index) const;

  std::string path_;
  bool is_directory_ = false;
  std::vector<CheckpointFile> files_;
  std::vector<CheckpointTensor> tensors_;
  std::optional<std::string> index_json_;
  std::vector<std::string> unused_files_;
  std::vector<std::string> other_files_;
};

}  // namespace kedge

#endif  // KEDGE_TOOLS_CHECKPOINT_H_
