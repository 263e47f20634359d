#include "kedge/tools/checkpoint.h"

#include <dirent.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <map>
#include <memory>
#include <set>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "kedge/format/limits.h"
#include "kedge/format/status.h"
#include "kedge/tools/posix_file.h"
#include "kedge/tools/strict_json.h"

namespace kedge {
namespace {

constexpr absl::string_view kSuffix = ".safetensors";
constexpr absl::string_view kSingleName = "model.safetensors";
constexpr absl::string_view kFetchAgain =
    "the checkpoint is damaged or incomplete: fetch or save it again";

std::string TensorText(absl::string_view name) {
  return absl::StrCat("tensor ", QuoteForMessage(name));
}

// Keeps the weight_map and skips everything else.
class IndexVisitor final : public StrictJsonVisitor {
 public:
  explicit IndexVisitor(absl::string_view path) : path_(path) {}

  bool has_weight_map() const { return has_weight_map_; }
  std::vector<std::pair<std::string, std::string>>& weight_map() {
    return weight_map_;
  }

  absl::Status OnObjectBegin() override {
    if (depth_ == 1 && at_weight_map_) {
      in_weight_map_ = true;
    } else {
      KEDGE_RETURN_IF_ERROR(Value("an object", /*is_object=*/true));
    }
    ++depth_;
    return absl::OkStatus();
  }
  absl::Status OnObjectEnd() override {
    --depth_;
    if (depth_ == 1) in_weight_map_ = at_weight_map_ = false;
    return absl::OkStatus();
  }
  absl::Status OnArrayBegin() override {
    KEDGE_RETURN_IF_ERROR(Value("an array"));
    ++depth_;
    return absl::OkStatus();
  }
  absl::Status OnArrayEnd() override {
    --depth_;
    return absl::OkStatus();
  }
  absl::Status OnKey(std::string key) override {
    if (in_weight_map_) {
      if (weight_map_.size() == kMaxTensorCount) {
        return Reject("weight_map",
                      absl::StrCat("at most ", kMaxTensorCount, " tensors"),
                      "more");
      }
      weight_map_.emplace_back(std::move(key), std::string());
    } else if (depth_ == 1 && key == "weight_map") {
      at_weight_map_ = has_weight_map_ = true;
    }
    return absl::OkStatus();
  }
  absl::Status OnString(std::string value) override {
    if (in_weight_map_) {
      weight_map_.back().second = std::move(value);
      return absl::OkStatus();
    }
    return Value("a string");
  }
  absl::Status OnUnsigned(std::uint64_t /*value*/) override {
    return Value("a number");
  }
  absl::Status OnOther(absl::string_view text) override { return Value(text); }

 private:
  // A value that is neither the weight_map nor a file name in it.
  absl::Status Value(absl::string_view found, bool is_object = false) {
    if (in_weight_map_) {
      return Reject(
          absl::StrCat("weight_map of ", TensorText(weight_map_.back().first)),
          "a file name as a string", found);
    }
    if (at_weight_map_) return Reject("weight_map", "an object", found);
    if (depth_ == 0 && !is_object) {
      return Reject("index", "an object", found);
    }
    return absl::OkStatus();
  }

  absl::Status Reject(absl::string_view what, absl::string_view expected,
                      absl::string_view found) const {
    return DataLoss({absl::StrCat(path_, ": offset ", offset), what, expected,
                     found, kFetchAgain});
  }

  const absl::string_view path_;
  int depth_ = 0;
  bool at_weight_map_ = false;  // behind its key, and inside it
  bool in_weight_map_ = false;
  bool has_weight_map_ = false;
  std::vector<std::pair<std::string, std::string>> weight_map_;
};

// Reads a whole file of at most `most` bytes; kNotFound if there is none.
absl::StatusOr<std::string> ReadSmallFile(const std::string& path,
                                          std::uint64_t most) {
  const Descriptor descriptor(OpenUntrusted(path));
  if (descriptor.get() < 0) return SystemError(errno, path, "open");
  struct stat status;
  if (::fstat(descriptor.get(), &status) != 0) {
    return SystemError(errno, path, "fstat");
  }
  if (!S_ISREG(status.st_mode)) {
    return absl::InvalidArgumentError(
        Describe({path, "file type", "a regular file", "something else",
                  "put a regular file or a link to one there"}));
  }
  const auto size = static_cast<std::uint64_t>(status.st_size);
  if (size > most) {
    return DataLoss({path, "size", absl::StrCat("at most ", most, " bytes"),
                     absl::StrCat(size, " bytes"), kFetchAgain});
  }
  std::string content(size, '\0');
  std::size_t done = 0;
  while (done < content.size()) {
    const ssize_t got =
        ::read(descriptor.get(), content.data() + done, content.size() - done);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return SystemError(errno, path, "read");
    if (got == 0) {
      return DataLoss({path, "size", absl::StrCat(size, " bytes"),
                       absl::StrCat(done, " bytes"),
                       "the file shrank while it was read: try again"});
    }
    done += static_cast<std::size_t>(got);
  }
  return content;
}

// Names of .safetensors files, and of all others.
struct Listing {
  std::vector<std::string> safetensors;
  std::vector<std::string> others;
};
absl::StatusOr<Listing> ListDirectory(const std::string& path) {
  const std::unique_ptr<DIR, int (*)(DIR*)> directory(::opendir(path.c_str()),
                                                      ::closedir);
  if (directory == nullptr) return SystemError(errno, path, "opendir");
  Listing listing;
  std::vector<std::string>& names = listing.safetensors;
  for (;;) {
    errno = 0;
    const dirent* const entry = ::readdir(directory.get());
    if (entry == nullptr) {
      if (errno != 0) return SystemError(errno, path, "readdir");
      break;
    }
    const absl::string_view name(entry->d_name);
    // Hidden files are what other programs are still writing or have left.
    if (name[0] == '.') continue;
    if (!absl::EndsWith(name, kSuffix)) {
      if (name != kCheckpointIndexName &&
          listing.others.size() < kMaxCheckpointFiles) {
        listing.others.emplace_back(name);
      }
      continue;
    }
    if (names.size() == kMaxCheckpointFiles) {
      return absl::InvalidArgumentError(Describe(
          {path, "directory",
           absl::StrCat("at most ", kMaxCheckpointFiles, " .safetensors files"),
           "more", "pass the directory of one model"}));
    }
    names.emplace_back(name);
  }
  std::sort(names.begin(), names.end());
  std::sort(listing.others.begin(), listing.others.end());
  return listing;
}

// Without an index the names alone tell that a file of name-00002-of-00003 is
// missing; loading the others would give a model with holes.
absl::Status CheckShardsComplete(absl::string_view path,
                                 std::span<const std::string> names) {
  std::map<std::pair<std::string, std::string>, std::set<std::uint32_t>> sets;
  for (const std::string& full_name : names) {
    absl::string_view name = full_name;
    absl::ConsumeSuffix(&name, kSuffix);
    // "-DDDDD-of-DDDDD"
    constexpr std::size_t kTail = 15;
    if (name.size() < kTail) continue;
    const absl::string_view tail = name.substr(name.size() - kTail);
    const absl::string_view number = tail.substr(1, 5);
    const absl::string_view total = tail.substr(10, 5);
    const auto digits = [](absl::string_view text) {
      return std::all_of(text.begin(), text.end(),
                         [](char c) { return c >= '0' && c <= '9'; });
    };
    std::uint32_t value = 0;
    if (tail[0] != '-' || tail.substr(6, 4) != "-of-" || !digits(number) ||
        !digits(total) || !absl::SimpleAtoi(number, &value)) {
      continue;
    }
    sets[{std::string(name.substr(0, name.size() - kTail)), std::string(total)}]
        .insert(value);
  }
  for (const auto& [key, numbers] : sets) {
    std::uint32_t total = 0;
    if (!absl::SimpleAtoi(key.second, &total)) continue;
    std::uint32_t next = 1;
    for (const std::uint32_t number : numbers) {
      if (number != next || next > total) break;
      ++next;
    }
    if (next == total + 1 && numbers.size() == total) continue;
    return absl::NotFoundError(
        Describe({path, absl::StrCat("shards of ", QuoteForMessage(key.first)),
                  absl::StrCat("numbers 1 to ", total),
                  absl::StrCat(numbers.size(),
                               " of them, the first wrong one at ", next),
                  kFetchAgain}));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckCheckpointFileName(absl::string_view where,
                                     absl::string_view name) {
  constexpr std::size_t kMaxFileNameBytes = 255;
  const bool plain = !name.empty() && name.size() <= kMaxFileNameBytes &&
                     name[0] != '.' && IsUtf8(name) &&
                     std::all_of(name.begin(), name.end(), [](char c) {
                       return static_cast<unsigned char>(c) >= 0x20 &&
                              c != 0x7f && c != '/' && c != '\\';
                     });
  if (plain) return absl::OkStatus();
  return DataLoss(
      {where, "file name",
       "1 to 255 bytes of UTF-8, no '/' or '\\', no control character, "
       "no leading '.'",
       QuoteForMessage(name),
       "such a name could reach outside of the directory: rename "
       "the file, or get the checkpoint from another place"});
}

absl::StatusOr<CheckpointIndex> ParseCheckpointIndex(absl::string_view path,
                                                     absl::string_view json) {
  constexpr int kMaxDepth = 16;  // metadata may nest
  IndexVisitor visitor(path);
  KEDGE_RETURN_IF_ERROR(ParseStrictJson(path, 0, json, kMaxDepth, visitor));
  if (!visitor.has_weight_map()) {
    return DataLoss({path, "index", "a weight_map", "none", kFetchAgain});
  }
  auto& weight_map = visitor.weight_map();
  std::sort(weight_map.begin(), weight_map.end());

  CheckpointIndex index;
  for (const auto& [tensor, file] : weight_map) index.files.push_back(file);
  std::sort(index.files.begin(), index.files.end());
  index.files.erase(std::unique(index.files.begin(), index.files.end()),
                    index.files.end());
  if (index.files.size() > kMaxCheckpointFiles) {
    return DataLoss({path, "weight_map",
                     absl::StrCat("at most ", kMaxCheckpointFiles, " files"),
                     absl::StrCat(index.files.size()), kFetchAgain});
  }
  absl::flat_hash_map<absl::string_view, std::uint32_t> ordinals;
  for (std::size_t i = 0; i < index.files.size(); ++i) {
    const std::string& name = index.files[i];
    KEDGE_RETURN_IF_ERROR(
        CheckCheckpointFileName(absl::StrCat(path, ": weight_map"), name));
    if (!absl::EndsWith(name, kSuffix)) {
      return DataLoss({absl::StrCat(path, ": weight_map"), "file name",
                       "one that ends in .safetensors", QuoteForMessage(name),
                       kFetchAgain});
    }
    ordinals.emplace(name, static_cast<std::uint32_t>(i));
  }
  index.entries.reserve(weight_map.size());
  for (auto& [tensor, file] : weight_map) {
    index.entries.push_back({std::move(tensor), ordinals.at(file)});
  }
  return index;
}

absl::StatusOr<Checkpoint> Checkpoint::Open(absl::string_view path) {
  Checkpoint checkpoint;
  checkpoint.path_ = std::string(path);
  if (path.find('\0') != absl::string_view::npos) {
    return absl::InvalidArgumentError(
        absl::StrCat(QuoteForMessage(path),
                     ": path: expected no NUL character; pass a file or "
                     "directory"));
  }
  struct stat status;
  if (::stat(checkpoint.path_.c_str(), &status) != 0) {
    return SystemError(errno, path, "stat");
  }
  if (S_ISDIR(status.st_mode)) {
    checkpoint.is_directory_ = true;
    KEDGE_RETURN_IF_ERROR(checkpoint.OpenDirectory());
  } else if (S_ISREG(status.st_mode)) {
    const std::size_t slash = checkpoint.path_.rfind('/');
    const std::string name = slash == std::string::npos
                                 ? checkpoint.path_
                                 : checkpoint.path_.substr(slash + 1);
    KEDGE_RETURN_IF_ERROR(checkpoint.OpenFile(path, name));
    KEDGE_RETURN_IF_ERROR(checkpoint.CollectTensors());
  } else {
    return absl::InvalidArgumentError(Describe(
        {path, "file type", "a regular file or a directory", "something else",
         "pass a .safetensors file or a Hugging "
         "Face directory"}));
  }
  return checkpoint;
}

absl::Status Checkpoint::OpenFile(absl::string_view path,
                                  absl::string_view name) {
  KEDGE_RETURN_IF_ERROR(CheckCheckpointFileName(path, name));
  KEDGE_ASSIGN_OR_RETURN(SafetensorsFile file, SafetensorsFile::Open(path));
  files_.push_back({std::string(name), std::move(file)});
  return absl::OkStatus();
}

absl::Status Checkpoint::OpenDirectory() {
  KEDGE_ASSIGN_OR_RETURN(Listing listing, ListDirectory(path_));
  const std::vector<std::string>& present = listing.safetensors;
  other_files_ = std::move(listing.others);
  const bool has_single =
      std::binary_search(present.begin(), present.end(), kSingleName);

  const std::string index_path = absl::StrCat(path_, "/", kCheckpointIndexName);
  absl::StatusOr<std::string> index_json =
      ReadSmallFile(index_path, kMaxCheckpointIndexBytes);
  std::optional<CheckpointIndex> index;
  std::vector<std::string> used;
  if (index_json.ok()) {
    KEDGE_ASSIGN_OR_RETURN(index,
                           ParseCheckpointIndex(index_path, *index_json));
    index_json_ = *std::move(index_json);
    used = index->files;
    if (has_single &&
        !std::binary_search(used.begin(), used.end(), kSingleName)) {
      return absl::InvalidArgumentError(Describe(
          {path_, "directory",
           "an index, or a model.safetensors that is the whole model",
           "an index and a model.safetensors that it does not name",
           "programs differ in which one they load: pass the file itself, or "
           "move one of the two away"}));
    }
  } else if (!absl::IsNotFound(index_json.status())) {
    return index_json.status();
  } else if (has_single) {
    used = {std::string(kSingleName)};
  } else {
    used = present;
    KEDGE_RETURN_IF_ERROR(CheckShardsComplete(path_, used));
    if (used.empty()) {
      return absl::NotFoundError(Describe(
          {path_, "directory",
           absl::StrCat(kCheckpointIndexName, " or a .safetensors file"),
           "neither",
           "pass a .safetensors file or a Hugging Face directory "
           "with one"}));
    }
  }
  std::set_difference(present.begin(), present.end(), used.begin(), used.end(),
                      std::back_inserter(unused_files_));
  for (const std::string& name : used) {
    const absl::Status status = OpenFile(absl::StrCat(path_, "/", name), name);
    if (absl::IsNotFound(status) && index.has_value()) {
      return absl::NotFoundError(absl::StrCat(
          status.message(), "; ", kCheckpointIndexName,
          " names this file: fetch it too, or save the checkpoint again"));
    }
    KEDGE_RETURN_IF_ERROR(status);
  }
  KEDGE_RETURN_IF_ERROR(CollectTensors());
  if (index.has_value()) return CompareWithIndex(index_path, *index);
  return absl::OkStatus();
}

absl::Status Checkpoint::CollectTensors() {
  std::uint64_t count = 0;
  for (const CheckpointFile& file : files_) count += file.file.tensors().size();
  if (count > kMaxTensorCount) {
    return absl::InvalidArgumentError(
        Describe({path_, "tensors", absl::StrCat("at most ", kMaxTensorCount),
                  absl::StrCat(count), "pass the checkpoint of one model"}));
  }
  tensors_.reserve(count);
  for (std::size_t i = 0; i < files_.size(); ++i) {
    const SafetensorsFile& file = files_[i].file;
    for (const SafetensorsTensor& tensor : file.tensors()) {
      tensors_.push_back(
          {&tensor, static_cast<std::uint32_t>(i), file.Bytes(tensor)});
    }
  }
  std::sort(tensors_.begin(), tensors_.end(),
            [](const CheckpointTensor& a, const CheckpointTensor& b) {
              return a.description->name < b.description->name;
            });
  for (std::size_t i = 1; i < tensors_.size(); ++i) {
    const CheckpointTensor& a = tensors_[i - 1];
    const CheckpointTensor& b = tensors_[i];
    if (a.description->name == b.description->name) {
      return DataLoss({path_, TensorText(b.description->name), "in one file",
                       absl::StrCat("in ", files_[a.file].name, " and in ",
                                    files_[b.file].name),
                       "pass the directory of one model alone, or one file"});
    }
  }
  return absl::OkStatus();
}

absl::Status Checkpoint::CompareWithIndex(absl::string_view index_path,
                                          const CheckpointIndex& index) const {
  // Both lists are sorted by name, and the files have the same ordinals.
  std::size_t i = 0;
  std::size_t j = 0;
  while (i < index.entries.size() || j < tensors_.size()) {
    const absl::string_view listed =
        i < index.entries.size() ? absl::string_view(index.entries[i].tensor)
                                 : absl::string_view();
    const absl::string_view held =
        j < tensors_.size() ? absl::string_view(tensors_[j].description->name)
                            : absl::string_view();
    if (j == tensors_.size() || (i < index.entries.size() && listed < held)) {
      return DataLoss({index_path, TensorText(listed),
                       absl::StrCat("in ", index.files[index.entries[i].file]),
                       "in no file", kFetchAgain});
    }
    const std::string& found = files_[tensors_[j].file].name;
    if (i == index.entries.size() || held < listed) {
      return DataLoss({index_path, TensorText(held),
                       "an entry in weight_map for every tensor of its files",
                       absl::StrCat("none, and the tensor in ", found),
                       kFetchAgain});
    }
    const std::string& expected = index.files[index.entries[i].file];
    if (expected != found) {
      return DataLoss({index_path, TensorText(listed),
                       absl::StrCat("in ", expected),
                       absl::StrCat("in ", found), kFetchAgain});
    }
    ++i;
    ++j;
  }
  return absl::OkStatus();
}

const CheckpointTensor* Checkpoint::Find(absl::string_view name) const {
  const auto at = std::lower_bound(
      tensors_.begin(), tensors_.end(), name,
      [](const CheckpointTensor& tensor, absl::string_view wanted) {
        return absl::string_view(tensor.description->name) < wanted;
      });
  if (at == tensors_.end() || at->description->name != name) return nullptr;
  return &*at;
}

absl::Status Checkpoint::CheckUnchanged() const {
  for (const CheckpointFile& file : files_) {
    KEDGE_RETURN_IF_ERROR(file.file.CheckUnchanged());
  }
  return absl::OkStatus();
}

}  // namespace kedge
