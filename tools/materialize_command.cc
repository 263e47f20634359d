#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <map>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "kedge/engine/io/io_pool.h"
#include "kedge/engine/io/store.h"
#include "kedge/format/limits.h"
#include "kedge/format/status.h"
#include "kedge/reader/version_reader.h"
#include "kedge/tools/checkpoint.h"
#include "kedge/tools/commands.h"
#include "kedge/tools/console.h"
#include "kedge/tools/posix_file.h"
#include "kedge/tools/safetensors.h"
#include "kedge/tools/version_sources.h"

namespace kedge {
namespace {

// For versions that no checkpoint was published as: a trainer's.
constexpr char kDefaultFileName[] = "model.safetensors";
constexpr std::uint64_t kRangeBytes = kPieceBytes;
constexpr int kMaxReadThreads = 4;

struct PlannedFile {
  std::string name;
  std::string header_json;
  std::vector<std::uint32_t> ordinals;  // in the order of the file's data
};

struct Plan {
  std::vector<PlannedFile> files;
  const std::string* index_json = nullptr;
  bool made_up = false;  // the version carries no headers
};

// A header for all tensors of a table, as a trainer's version has none.
absl::StatusOr<std::string> MakeHeader(const TensorTable& table) {
  std::vector<SafetensorsEntry> entries;
  for (const TensorSpec& spec : table.tensors()) {
    SafetensorsEntry entry;
    entry.name = spec.name;
    entry.dtype = spec.dtype;
    entry.shape = spec.shape;
    entries.push_back(std::move(entry));
  }
  return BuildSafetensorsHeader(entries, {});
}

// The files of a version. What the metadata say is as untrusted as any other
// bytes: the headers must name every tensor of the table once, as it is there.
absl::StatusOr<Plan> MakePlan(absl::string_view where,
                              const VersionState& state) {
  const TensorTable& table = *state.table;
  Plan plan;
  for (const auto& [key, value] : state.metadata) {
    absl::string_view name = key;
    if (key == kIndexKey) {
      KEDGE_RETURN_IF_ERROR(
          ParseCheckpointIndex(absl::StrCat(where, ": metadata ", key), value)
              .status());
      plan.index_json = &value;
    } else if (absl::ConsumePrefix(&name, kHeaderKeyPrefix)) {
      KEDGE_RETURN_IF_ERROR(
          CheckCheckpointFileName(absl::StrCat(where, ": metadata"), name));
      if (name == kCheckpointIndexName) {
        return DataLoss({.where = where,
                         .what = "metadata",
                         .expected = "a safetensors file",
                         .found = kCheckpointIndexName,
                         .advice = "run `kedge fsck`"});
      }
      plan.files.push_back({std::string(name), value, {}});
    }
  }
  if (plan.files.empty()) {
    plan.made_up = true;
    KEDGE_ASSIGN_OR_RETURN(std::string header, MakeHeader(table));
    plan.files.push_back({kDefaultFileName, std::move(header), {}});
  }
  std::vector<bool> named(table.size(), false);
  std::size_t named_count = 0;
  for (PlannedFile& file : plan.files) {
    const std::string place = absl::StrCat(where, ": header of ", file.name);
    KEDGE_ASSIGN_OR_RETURN(
        const SafetensorsHeader header,
        ParseSafetensorsHeader(place, file.header_json, std::nullopt));
    for (const SafetensorsTensor& tensor : header.tensors) {
      const auto ordinal = table.Find(tensor.name);
      const bool known =
          ordinal.ok() && !named[*ordinal] &&
          table[*ordinal].dtype == tensor.dtype &&
          (tensor.opaque ? table[*ordinal].byte_count() == tensor.byte_size
                         : table[*ordinal].shape == tensor.shape);
      if (!known) {
        return DataLoss(
            {.where = absl::StrCat(place, ": ", tensor.name),
             .what = "tensor",
             .expected = "one of the version's table, once, with its dtype and "
                         "shape",
             .found = ordinal.ok()
                          ? (named[*ordinal] ? "a second one"
                                             : "another dtype or shape")
                          : "a name that is not there",
             .advice = "the version was published with metadata of another "
                       "model; publish the checkpoint again"});
      }
      named[*ordinal] = true;
      ++named_count;
      file.ordinals.push_back(*ordinal);
    }
  }
  if (named_count != table.size()) {
    const auto missing = static_cast<std::size_t>(
        std::find(named.begin(), named.end(), false) - named.begin());
    return DataLoss(
        {.where = where,
         .what = "tensors in the headers that the version carries",
         .expected = absl::StrCat("all ", table.size()),
         .found = absl::StrCat(named_count, "; ", table[missing].name,
                               " is missing"),
         .advice = "the version was published with metadata of another model; "
                   "publish the checkpoint again"});
  }
  return plan;
}

// A range of a tensor that is read at once, and what came.
struct Range {
  std::uint32_t ordinal = 0;
  std::uint64_t begin = 0;
  std::uint64_t bytes = 0;
  bool last = false;  // of the tensor
};

// Writes the data of one file through `writer`: a group of ranges is read on
// the pool's threads while the one before is written.
absl::Status WriteData(const PlannedFile& file, VersionReader& reader,
                       const L61Summer& summer, IoPool& pool,
                       Progress& progress, SafetensorsWriter& writer) {
  const TensorTable& table = reader.table();
  std::vector<Range> ranges;
  for (const std::uint32_t ordinal : file.ordinals) {
    const std::uint64_t bytes = table[ordinal].byte_count();
    for (std::uint64_t at = 0; at < bytes; at += kRangeBytes) {
      const std::uint64_t count = std::min(kRangeBytes, bytes - at);
      ranges.push_back({ordinal, at, count, at + count == bytes});
    }
  }
  struct Group {
    explicit Group(IoPool* pool) : batch(pool) {}
    std::size_t begin = 0;
    std::size_t end = 0;
    std::vector<std::vector<std::byte>> buffers;
    std::vector<std::uint64_t> sums;
    IoPool::Batch batch;  // last: its tasks use the rest
  };
  const auto group_size = static_cast<std::size_t>(pool.thread_count());
  std::array<Group, 2> groups{Group(&pool), Group(&pool)};
  std::size_t next = 0;
  const auto start = [&](Group& group) {
    group.begin = next;
    group.end = next = std::min(ranges.size(), next + group_size);
    group.buffers.resize(group_size);
    group.sums.resize(group_size);
    for (std::size_t i = group.begin; i < group.end; ++i) {
      group.batch.Submit(
          [&reader, &summer, range = &ranges[i],
           buffer = &group.buffers[i - group.begin],
           sum = &group.sums[i - group.begin]]() -> absl::Status {
            buffer->resize(range->bytes);
            KEDGE_RETURN_IF_ERROR(
                reader.Read(range->ordinal, range->begin, *buffer));
            *sum = summer.Sum(range->begin, *buffer);
            return absl::OkStatus();
          });
    }
  };
  std::uint64_t sum = 0;
  start(groups[0]);
  for (std::size_t turn = 0; groups[turn % 2].begin < ranges.size(); ++turn) {
    Group& group = groups[turn % 2];
    KEDGE_RETURN_IF_ERROR(group.batch.Wait());
    start(groups[(turn + 1) % 2]);
    for (std::size_t i = group.begin; i < group.end; ++i) {
      const Range& range = ranges[i];
      sum = L61Add(sum, group.sums[i - group.begin]);
      if (range.last) {
        const std::uint64_t expected = reader.state().l61[range.ordinal];
        if (sum != expected) {
          return WrongTensor(reader.state().id, table[range.ordinal].name,
                             expected, sum);
        }
        sum = 0;
      }
      KEDGE_RETURN_IF_ERROR(writer.Append(group.buffers[i - group.begin]));
      progress.Add(range.bytes);
    }
  }
  return absl::OkStatus();
}

// Where the files go: a directory beside `out` that takes its name at the end.
class OutputDirectory {
 public:
  static absl::StatusOr<OutputDirectory> Create(absl::string_view out) {
    OutputDirectory directory;
    directory.path_ = std::string(out);
    while (directory.path_.size() > 1 && directory.path_.back() == '/') {
      directory.path_.pop_back();
    }
    FileSystem& fs = *PosixFileSystem();
    struct stat status;
    if (::stat(directory.path_.c_str(), &status) == 0) {
      char* const real = ::realpath(directory.path_.c_str(), nullptr);
      if (real == nullptr) return SystemError(errno, out, "realpath");
      directory.path_ = real;
      std::free(real);
      KEDGE_ASSIGN_OR_RETURN(const auto present, fs.List(directory.path_));
      if (!present.empty()) {
        return absl::AlreadyExistsError(Describe(
            {.where = directory.path_,
             .what = "output",
             .expected = "no such directory, or an empty one",
             .found = absl::StrCat(present.size(), " entries, the first \"",
                                   present.front(), "\""),
             .advice = "give another --out, or remove it"}));
      }
    } else if (errno != ENOENT) {
      return SystemError(errno, out, "stat");
    }
    std::string temporary =
        JoinPath(ParentPath(directory.path_), ".kedge-materialize-XXXXXX");
    if (::mkdtemp(temporary.data()) == nullptr) {
      return SystemError(errno, temporary, "mkdtemp");
    }
    directory.temporary_ = std::move(temporary);
    return directory;
  }
  OutputDirectory(OutputDirectory&& other) noexcept
      : path_(std::move(other.path_)),
        temporary_(std::exchange(other.temporary_, {})) {}
  ~OutputDirectory() {
    if (temporary_.empty()) return;
    // Left behind in the worst case, under a name that says whose it is.
    RemoveTree(*PosixFileSystem(), temporary_).IgnoreError();
  }

  const std::string& path() const { return path_; }
  std::string Join(absl::string_view name) const {
    return JoinPath(temporary_, name);
  }

  absl::Status Finish() {
    FileSystem& fs = *PosixFileSystem();
    const mode_t mask = ::umask(0);
    ::umask(mask);
    if (::chmod(temporary_.c_str(), 0777 & ~mask) != 0) {
      return SystemError(errno, temporary_, "chmod");
    }
    KEDGE_RETURN_IF_ERROR(fs.SyncDirectory(temporary_));
    // Takes the place of an empty directory, and of nothing else.
    if (::rename(temporary_.c_str(), path_.c_str()) != 0) {
      return Annotate(SystemError(errno, path_, "rename"),
                      "the output could not take its name; give an --out that "
                      "does not exist yet");
    }
    temporary_.clear();
    return fs.SyncDirectory(ParentPath(path_));
  }

 private:
  OutputDirectory() = default;
  std::string path_;
  std::string temporary_;
};

}  // namespace

absl::StatusOr<int> Run(const MaterializeCommand& command) {
  KEDGE_ASSIGN_OR_RETURN(const auto store,
                         Store::Open(PosixFileSystem(), command.store));
  KEDGE_ASSIGN_OR_RETURN(const auto step, FindStep(*store, command.step));
  KEDGE_ASSIGN_OR_RETURN(
      const auto reader,
      VersionReader::Open(store.get(), step, kVersionCacheBytes));
  KEDGE_ASSIGN_OR_RETURN(const Plan plan,
                         MakePlan(step->path, reader->state()));
  KEDGE_ASSIGN_OR_RETURN(OutputDirectory out,
                         OutputDirectory::Create(command.out));
  const L61Summer summer(L61Key::FromSeed(store->info().l61_seed));
  IoPool pool(std::clamp(static_cast<int>(std::thread::hardware_concurrency()),
                         1, kMaxReadThreads));
  std::uint64_t total_bytes = 0;
  for (const TensorSpec& spec : reader->table().tensors()) {
    total_bytes += spec.byte_count();
  }
  std::vector<std::string> names;
  {
    Progress progress(absl::StrCat("v", command.step), total_bytes,
                      !command.json);
    for (const PlannedFile& file : plan.files) {
      KEDGE_ASSIGN_OR_RETURN(
          SafetensorsWriter writer,
          SafetensorsWriter::Create(out.Join(file.name), file.header_json));
      KEDGE_RETURN_IF_ERROR(
          WriteData(file, *reader, summer, pool, progress, writer));
      KEDGE_RETURN_IF_ERROR(writer.Finish());
      names.push_back(file.name);
    }
  }
  if (plan.index_json != nullptr) {
    KEDGE_RETURN_IF_ERROR(
        WriteNewFile(*PosixFileSystem(), out.Join(kCheckpointIndexName),
                     std::as_bytes(std::span(plan.index_json->data(),
                                             plan.index_json->size()))));
    names.emplace_back(kCheckpointIndexName);
  }
  KEDGE_RETURN_IF_ERROR(out.Finish());

  if (command.json) {
    Json json;
    json["command"] = "materialize";
    json["store"] = command.store;
    json["step"] = command.step;
    json["manifest_hash"] = ToHex(step->id.manifest_hash);
    json["out"] = command.out;
    json["files"] = names;
    json["tensors"] = reader->table().size();
    json["data_bytes"] = total_bytes;
    json["headers_from_checkpoint"] = !plan.made_up;
    KEDGE_RETURN_IF_ERROR(PrintJson(json));
    return kExitOk;
  }
  KEDGE_RETURN_IF_ERROR(Print(Printable(absl::StrCat(
      command.out, ": ", ToString(step->id), ", ",
      Counted(reader->table().size(), "tensor"), ", ", HumanBytes(total_bytes),
      ", every checksum right\n  ", absl::StrJoin(names, "\n  "), "\n",
      plan.made_up ? "  (the version carries no safetensors header: one was "
                     "made from its tensor table)\n"
                   : ""))));
  return kExitOk;
}

}  // namespace kedge
