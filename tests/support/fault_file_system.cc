#include "kedge/tests/support/fault_file_system.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <type_traits>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "kedge/engine/io/errno_status.h"
#include "kedge/format/status.h"

namespace kedge {
namespace {

// A mapping that a dropped Map pretends to have made.
class ZeroRegion final : public MappedRegion {
 public:
  explicit ZeroRegion(std::uint64_t bytes) : bytes_(bytes) {}
  std::span<const std::byte> bytes() const override { return bytes_; }

 private:
  std::vector<std::byte> bytes_;
};

// A file that a dropped open or create pretends to have opened.
class NullFile final : public File {
 public:
  explicit NullFile(absl::string_view path) : path_(path) {}

  absl::string_view path() const override { return path_; }
  absl::StatusOr<std::size_t> ReadSome(std::uint64_t offset,
                                       std::span<std::byte> out) override {
    if (offset >= size_) return std::size_t{0};
    const std::size_t moved = static_cast<std::size_t>(
        std::min<std::uint64_t>(out.size(), size_ - offset));
    std::memset(out.data(), 0, moved);
    return moved;
  }
  absl::StatusOr<std::size_t> WriteSome(
      std::uint64_t offset, std::span<const std::byte> bytes) override {
    size_ = std::max(size_, offset + bytes.size());
    return bytes.size();
  }
  absl::StatusOr<std::uint64_t> Size() override { return size_; }
  absl::Status Resize(std::uint64_t bytes) override {
    size_ = bytes;
    return absl::OkStatus();
  }
  absl::Status Sync() override { return absl::OkStatus(); }
  absl::Status Close() override { return absl::OkStatus(); }
  absl::StatusOr<std::unique_ptr<MappedRegion>> Map(
      std::uint64_t bytes) override {
    return std::make_unique<ZeroRegion>(bytes);
  }
  void WillRead(std::uint64_t, std::uint64_t) override {}
  void StartWriteback(std::uint64_t, std::uint64_t) override {}

 private:
  std::string path_;
  std::uint64_t size_ = 0;
};

std::size_t Half(std::size_t bytes) {
  return bytes == 0 ? 0 : std::max<std::size_t>(bytes / 2, 1);
}

}  // namespace

absl::string_view FileOperationName(FileOperation operation) {
  switch (operation) {
    case FileOperation::kOpenForRead:
      return "open";
    case FileOperation::kCreateExclusive:
      return "create";
    case FileOperation::kMakeDirectory:
      return "mkdir";
    case FileOperation::kRename:
      return "rename";
    case FileOperation::kLink:
      return "link";
    case FileOperation::kRemoveFile:
      return "unlink";
    case FileOperation::kRemoveDirectory:
      return "rmdir";
    case FileOperation::kList:
      return "list";
    case FileOperation::kStat:
      return "stat";
    case FileOperation::kSyncDirectory:
      return "fsync-directory";
    case FileOperation::kKindOf:
      return "statfs";
    case FileOperation::kRead:
      return "read";
    case FileOperation::kWrite:
      return "write";
    case FileOperation::kSize:
      return "size";
    case FileOperation::kResize:
      return "resize";
    case FileOperation::kSync:
      return "fsync";
    case FileOperation::kClose:
      return "close";
    case FileOperation::kMap:
      return "map";
    case FileOperation::kWillRead:
      return "will-read";
  }
  return "unknown";
}

std::string Operation::ToString() const {
  std::string text =
      absl::StrCat(number, ": ", FileOperationName(kind), " ", path);
  switch (kind) {
    case FileOperation::kRename:
    case FileOperation::kLink:
      absl::StrAppend(&text, " -> ", to);
      break;
    case FileOperation::kRead:
    case FileOperation::kWrite:
    case FileOperation::kWillRead:
      absl::StrAppend(&text, " @", offset, " +", bytes);
      break;
    case FileOperation::kResize:
    case FileOperation::kMap:
      absl::StrAppend(&text, " ", bytes);
      break;
    default:
      break;
  }
  return text;
}

FaultScript FaultAt(std::int64_t k, Fault fault) {
  return [k, fault](const Operation& operation) {
    return operation.number == k ? fault : Fault::None();
  };
}

FaultScript FaultFrom(std::int64_t k, Fault fault) {
  return [k, fault](const Operation& operation) {
    return operation.number >= k ? fault : Fault::None();
  };
}

FaultScript StopAfter(std::int64_t k) {
  return FaultFrom(k + 1, Fault::Fail(EIO));
}

FaultScript FaultOn(FileOperation kind, std::string suffix, Fault fault) {
  return [kind, suffix = std::move(suffix), fault](const Operation& operation) {
    const std::string& path =
        operation.to.empty() ? operation.path : operation.to;
    return operation.kind == kind && absl::EndsWith(path, suffix)
               ? fault
               : Fault::None();
  };
}

// Forwards to a file of the base, one operation a call.
class FaultFileSystem::FaultFile final : public File {
 public:
  FaultFile(FaultFileSystem* fs, std::unique_ptr<File> file)
      : fs_(fs), file_(std::move(file)) {}
  ~FaultFile() override { KEDGE_CHECK(starting_ == 0); }

  absl::string_view path() const override { return file_->path(); }

  absl::StatusOr<std::size_t> ReadSome(std::uint64_t offset,
                                       std::span<std::byte> out) override {
    return fs_->Run<absl::StatusOr<std::size_t>>(
        Ranged(FileOperation::kRead, offset, out.size()),
        [&](bool half) {
          absl::StatusOr<std::size_t> moved =
              file_->ReadSome(offset, half ? out.first(Half(out.size())) : out);
          if (moved.ok()) fs_->bytes_read_ += *moved;
          return moved;
        },
        [&]() -> absl::StatusOr<std::size_t> {
          if (!out.empty()) std::memset(out.data(), 0, out.size());
          return out.size();
        });
  }

  absl::StatusOr<std::size_t> WriteSome(
      std::uint64_t offset, std::span<const std::byte> bytes) override {
    return fs_->Run<absl::StatusOr<std::size_t>>(
        Ranged(FileOperation::kWrite, offset, bytes.size()),
        [&](bool half) {
          absl::StatusOr<std::size_t> moved = file_->WriteSome(
              offset, half ? bytes.first(Half(bytes.size())) : bytes);
          if (moved.ok()) fs_->bytes_written_ += *moved;
          return moved;
        },
        [&]() -> absl::StatusOr<std::size_t> { return bytes.size(); });
  }

  absl::StatusOr<std::uint64_t> Size() override {
    return fs_->Run<absl::StatusOr<std::uint64_t>>(
        Ranged(FileOperation::kSize, 0, 0), [&](bool) { return file_->Size(); },
        []() -> absl::StatusOr<std::uint64_t> { return std::uint64_t{0}; });
  }

  absl::Status Resize(std::uint64_t bytes) override {
    return fs_->Run<absl::Status>(
        Ranged(FileOperation::kResize, 0, bytes),
        [&](bool) { return file_->Resize(bytes); },
        [] { return absl::OkStatus(); });
  }

  absl::Status Sync() override {
    return fs_->Run<absl::Status>(
        Ranged(FileOperation::kSync, 0, 0),
        [](bool) { return absl::OkStatus(); }, [] { return absl::OkStatus(); });
  }

  absl::Status Close() override {
    closed_ = true;
    KEDGE_CHECK(starting_ == 0);
    return fs_->Run<absl::Status>(
        Ranged(FileOperation::kClose, 0, 0),
        [&](bool) { return file_->Close(); }, [] { return absl::OkStatus(); });
  }

  absl::StatusOr<std::unique_ptr<MappedRegion>> Map(
      std::uint64_t bytes) override {
    using Result = absl::StatusOr<std::unique_ptr<MappedRegion>>;
    return fs_->Run<Result>(
        Ranged(FileOperation::kMap, 0, bytes),
        [&](bool) {
          Result region = file_->Map(bytes);
          if (region.ok()) fs_->bytes_mapped_ += bytes;
          return region;
        },
        [&]() -> Result { return std::make_unique<ZeroRegion>(bytes); });
  }

  void WillRead(std::uint64_t offset, std::uint64_t bytes) override {
    fs_->Run<absl::Status>(
           Ranged(FileOperation::kWillRead, offset, bytes),
           [&](bool) {
             file_->WillRead(offset, bytes);
             return absl::OkStatus();
           },
           [] { return absl::OkStatus(); })
        .IgnoreError();
  }

  void StartWriteback(std::uint64_t offset, std::uint64_t bytes) override {
    ++starting_;
    KEDGE_CHECK(!closed_);
    fs_->bytes_started_ += bytes;
    std::this_thread::sleep_for(fs_->start_delay_.load());
    file_->StartWriteback(offset, bytes);
    --starting_;
  }

 private:
  Operation Ranged(FileOperation kind, std::uint64_t offset,
                   std::uint64_t bytes) const {
    Operation operation = fs_->On(kind, file_->path());
    operation.offset = offset;
    operation.bytes = bytes;
    return operation;
  }

  FaultFileSystem* fs_;
  std::unique_ptr<File> file_;
  std::atomic<int> starting_{0};
  std::atomic<bool> closed_{false};
};

FaultFileSystem::FaultFileSystem(FileSystem* base, std::string root)
    : base_(base), root_(std::move(root)) {}

void FaultFileSystem::set_script(FaultScript script) {
  const std::lock_guard lock(mutex_);
  script_ = std::move(script);
}

void FaultFileSystem::set_after_each(
    std::function<void(const Operation&)> callback) {
  const std::lock_guard lock(mutex_);
  after_each_ = std::move(callback);
}

void FaultFileSystem::Reset() {
  const std::lock_guard lock(mutex_);
  script_ = nullptr;
  after_each_ = nullptr;
  log_.clear();
  counts_.fill(0);
  bytes_read_ = bytes_written_ = bytes_mapped_ = 0;
  bytes_started_ = 0;
  start_delay_ = std::chrono::milliseconds(0);
}

std::int64_t FaultFileSystem::operation_count() const {
  const std::lock_guard lock(mutex_);
  return static_cast<std::int64_t>(log_.size());
}

std::int64_t FaultFileSystem::count(FileOperation kind) const {
  const std::lock_guard lock(mutex_);
  return counts_[static_cast<std::size_t>(kind)];
}

std::uint64_t FaultFileSystem::bytes_read() const {
  const std::lock_guard lock(mutex_);
  return bytes_read_;
}

std::uint64_t FaultFileSystem::bytes_written() const {
  const std::lock_guard lock(mutex_);
  return bytes_written_;
}

std::uint64_t FaultFileSystem::bytes_started() const { return bytes_started_; }

std::uint64_t FaultFileSystem::bytes_mapped() const {
  const std::lock_guard lock(mutex_);
  return bytes_mapped_;
}

std::vector<Operation> FaultFileSystem::log() const {
  const std::lock_guard lock(mutex_);
  return log_;
}

std::string FaultFileSystem::LogText() const {
  std::string text;
  for (const Operation& operation : log()) {
    absl::StrAppend(&text, operation.ToString(), "\n");
  }
  return text;
}

std::string FaultFileSystem::Shown(absl::string_view path) const {
  if (!root_.empty() && absl::ConsumePrefix(&path, root_)) {
    if (path.empty()) return ".";
    absl::ConsumePrefix(&path, "/");
  }
  return std::string(path);
}

Operation FaultFileSystem::On(FileOperation kind,
                              absl::string_view path) const {
  Operation operation;
  operation.kind = kind;
  operation.path = Shown(path);
  return operation;
}

template <typename Result, typename Perform, typename Dropped>
Result FaultFileSystem::Run(Operation operation, Perform perform,
                            Dropped dropped) {
  if (in_callback_.load() == std::this_thread::get_id()) {
    // The callback's own look is not part of what the test counts.
    const std::uint64_t read = bytes_read_;
    const std::uint64_t written = bytes_written_;
    const std::uint64_t mapped = bytes_mapped_;
    Result result = perform(false);
    bytes_read_ = read;
    bytes_written_ = written;
    bytes_mapped_ = mapped;
    return result;
  }
  const std::lock_guard lock(mutex_);
  operation.number = static_cast<std::int64_t>(log_.size()) + 1;
  log_.push_back(operation);
  ++counts_[static_cast<std::size_t>(operation.kind)];
  const Fault fault = script_ ? script_(operation) : Fault::None();
  const auto failure = [&] {
    return ErrnoStatus(
        fault.error,
        absl::StrCat("planted fault in ", FileOperationName(operation.kind)),
        operation.path);
  };
  Result result = [&]() -> Result {
    switch (fault.kind) {
      case Fault::Kind::kNone:
        return perform(false);
      case Fault::Kind::kFail:
        return failure();
      case Fault::Kind::kPerformThenFail: {
        const Result ignored = perform(false);
        return failure();
      }
      case Fault::Kind::kDrop:
        return dropped();
      case Fault::Kind::kShorten:
        return perform(true);
      case Fault::Kind::kTear:
        if (operation.kind == FileOperation::kWrite) {
          const Result ignored = perform(true);
        }
        return failure();
    }
    KEDGE_CHECK(false);
  }();
  if (after_each_) {
    in_callback_ = std::this_thread::get_id();
    after_each_(operation);
    in_callback_ = std::thread::id();
  }
  return result;
}

absl::StatusOr<std::unique_ptr<File>> FaultFileSystem::Wrap(
    absl::StatusOr<std::unique_ptr<File>> file) {
  if (!file.ok()) return file;
  return std::make_unique<FaultFile>(this, *std::move(file));
}

absl::StatusOr<std::unique_ptr<File>> FaultFileSystem::OpenForRead(
    absl::string_view path) {
  using Result = absl::StatusOr<std::unique_ptr<File>>;
  return Wrap(Run<Result>(
      On(FileOperation::kOpenForRead, path),
      [&](bool) { return base_->OpenForRead(path); },
      [&]() -> Result { return std::make_unique<NullFile>(path); }));
}

absl::StatusOr<std::unique_ptr<File>> FaultFileSystem::CreateExclusive(
    absl::string_view path) {
  using Result = absl::StatusOr<std::unique_ptr<File>>;
  return Wrap(Run<Result>(
      On(FileOperation::kCreateExclusive, path),
      [&](bool) { return base_->CreateExclusive(path); },
      [&]() -> Result { return std::make_unique<NullFile>(path); }));
}

absl::Status FaultFileSystem::MakeDirectory(absl::string_view path) {
  return Run<absl::Status>(
      On(FileOperation::kMakeDirectory, path),
      [&](bool) { return base_->MakeDirectory(path); },
      [] { return absl::OkStatus(); });
}

absl::Status FaultFileSystem::Rename(absl::string_view from,
                                     absl::string_view to) {
  Operation operation = On(FileOperation::kRename, from);
  operation.to = Shown(to);
  return Run<absl::Status>(
      std::move(operation), [&](bool) { return base_->Rename(from, to); },
      [] { return absl::OkStatus(); });
}

absl::Status FaultFileSystem::Link(absl::string_view from,
                                   absl::string_view to) {
  Operation operation = On(FileOperation::kLink, from);
  operation.to = Shown(to);
  return Run<absl::Status>(
      std::move(operation), [&](bool) { return base_->Link(from, to); },
      [] { return absl::OkStatus(); });
}

absl::Status FaultFileSystem::RemoveFile(absl::string_view path) {
  return Run<absl::Status>(
      On(FileOperation::kRemoveFile, path),
      [&](bool) { return base_->RemoveFile(path); },
      [] { return absl::OkStatus(); });
}

absl::Status FaultFileSystem::RemoveDirectory(absl::string_view path) {
  return Run<absl::Status>(
      On(FileOperation::kRemoveDirectory, path),
      [&](bool) { return base_->RemoveDirectory(path); },
      [] { return absl::OkStatus(); });
}

absl::StatusOr<std::vector<std::string>> FaultFileSystem::List(
    absl::string_view path) {
  using Result = absl::StatusOr<std::vector<std::string>>;
  return Run<Result>(
      On(FileOperation::kList, path), [&](bool) { return base_->List(path); },
      []() -> Result { return std::vector<std::string>(); });
}

absl::StatusOr<FileInfo> FaultFileSystem::Stat(absl::string_view path) {
  return Run<absl::StatusOr<FileInfo>>(
      On(FileOperation::kStat, path), [&](bool) { return base_->Stat(path); },
      []() -> absl::StatusOr<FileInfo> { return FileInfo(); });
}

absl::Status FaultFileSystem::SyncDirectory(absl::string_view path) {
  return Run<absl::Status>(
      On(FileOperation::kSyncDirectory, path),
      // Still fails where there is no such directory.
      [&](bool) { return base_->Stat(path).status(); },
      [] { return absl::OkStatus(); });
}

absl::StatusOr<StorageKind> FaultFileSystem::KindOf(absl::string_view path) {
  return Run<absl::StatusOr<StorageKind>>(
      On(FileOperation::kKindOf, path),
      [&](bool) { return base_->KindOf(path); },
      []() -> absl::StatusOr<StorageKind> { return StorageKind::kLocal; });
}

}  // namespace kedge
