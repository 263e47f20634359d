// How fast an inference engine that comes late gets its weights: Follower::Join
// from an anchor and a few deltas, against plain reads of the same files, and
// against the bare copy of the same bytes to the device.
//
//   kedge_late_join [--device cuda:0] [--bytes 8GiB] [--store DIR]
//                   [--tmpfs /dev/shm] [--tmpfs-bytes 28GiB] [--pairs 5]
//                   [--deltas 3] [--threads 12] [--json FILE] [--commit TEXT]
//
// A store with an anchor of --bytes and small deltas after it is written under
// --store (default: $KEDGE_BENCH_DIR, else $HOME), by the library's writer, in
// its files of about 1 GiB. One pair is a join with cold caches and a read of
// every data file of the chain by --threads threads, which are also the
// follower's io_threads, 8 MiB at a time, neighbouring reads from different
// files, nothing done with the bytes; the order alternates. Caches are dropped
// by sync and posix_fadvise(POSIX_FADV_DONTNEED) on every file; what mincore
// then still finds in memory is reported. A join is timed with and without
// Follower::Open, which takes its pinned memory.
//
// Such a store under --tmpfs, of --tmpfs-bytes if that is given ("" leaves a
// place out): a join against the copy of the model's bytes from pinned memory
// to the device, 8 MiB at a time.

#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kedge/bench/bench_device.h"
#include "kedge/bench/bench_report.h"
#include "kedge/bench/synthetic_source.h"
#include "kedge/engine/io/store.h"
#include "kedge/format/layout.h"
#include "kedge/format/limits.h"
#include "kedge/format/status.h"
#include "kedge/reader/follower.h"

namespace kedge {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kDensity = 0.002;

struct Options {
  std::string device = "cuda:0";
  std::uint64_t bytes = std::uint64_t{8} << 30;
  std::string store;
  std::string tmpfs = "/dev/shm";
  std::uint64_t tmpfs_bytes = 0;  // 0: as many
  std::uint64_t pairs = 5;
  std::uint64_t deltas = 3;
  std::uint64_t threads = 12;
  std::string json;
  std::string commit;
};

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// A data file of the chain.
struct ChainFile {
  std::string path;
  std::uint64_t bytes = 0;
};

// The data files that a join to the newest version reads.
absl::StatusOr<std::vector<ChainFile>> FilesOf(const std::string& path) {
  KEDGE_ASSIGN_OR_RETURN(const std::unique_ptr<Store> store,
                         Store::Open(PosixFileSystem(), path));
  KEDGE_ASSIGN_OR_RETURN(const auto newest, store->Newest());
  KEDGE_ASSIGN_OR_RETURN(const Chain chain, store->FindChain(newest, nullptr));
  std::vector<ChainFile> files;
  const auto add = [&](const std::string& directory,
                       const std::vector<DataFile>& members) {
    for (const DataFile& file : members) {
      files.push_back({JoinPath(directory, DataFileName(file.id)), file.bytes});
    }
  };
  if (chain.anchor != nullptr) {
    add(chain.anchor->path, chain.anchor->manifest.files);
  }
  for (const auto& step : chain.deltas) add(step->path, step->manifest.files);
  return files;
}

// Drops the files from the page cache; the share of their pages that stayed.
double DropCaches(const std::vector<ChainFile>& files) {
  sync();
  std::uint64_t pages = 0;
  std::uint64_t resident = 0;
  const auto page = static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
  for (const ChainFile& file : files) {
    const int descriptor = open(file.path.c_str(), O_RDONLY | O_CLOEXEC);
    if (descriptor < 0) continue;
    posix_fadvise(descriptor, 0, 0, POSIX_FADV_DONTNEED);
    void* const map = file.bytes == 0 ? MAP_FAILED
                                      : mmap(nullptr, file.bytes, PROT_READ,
                                             MAP_SHARED, descriptor, 0);
    if (map != MAP_FAILED) {
      std::vector<unsigned char> in_core((file.bytes + page - 1) / page);
      if (mincore(map, file.bytes, in_core.data()) == 0) {
        pages += in_core.size();
        for (const unsigned char flags : in_core) resident += flags & 1;
      }
      munmap(map, file.bytes);
    }
    close(descriptor);
  }
  return pages == 0
             ? 0
             : static_cast<double>(resident) / static_cast<double>(pages);
}

// Touches as much memory as a run fills with cached pages, and gives it back:
// on a virtual machine the first use of a page can cost more than the copy into
// it, and whoever runs first would pay for both sides.
void WarmMemory(std::uint64_t bytes) {
  const std::uint64_t half =
      static_cast<std::uint64_t>(sysconf(_SC_PHYS_PAGES)) *
      static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE)) / 2;
  bytes = std::min(bytes, half);
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (memory != MAP_FAILED) munmap(memory, bytes);
}

// Seconds that plain reads of all files take.
absl::StatusOr<double> PlainRead(const std::vector<ChainFile>& files,
                                 std::uint64_t threads) {
  struct Piece {
    std::size_t file;
    std::uint64_t offset;
  };
  std::vector<Piece> pieces;
  for (std::size_t f = 0; f < files.size(); ++f) {
    for (std::uint64_t at = 0; at < files[f].bytes; at += kPieceBytes) {
      pieces.push_back({f, at});
    }
  }
  std::stable_sort(
      pieces.begin(), pieces.end(),
      [](const Piece& a, const Piece& b) { return a.offset < b.offset; });
  // Buffers were touched before: a reader that lives on has them, too.
  static const auto buffers = [&] {
    std::vector<std::vector<std::byte>> made(threads);
    for (auto& buffer : made) buffer.resize(kPieceBytes);
    return std::make_unique<std::vector<std::vector<std::byte>>>(
        std::move(made));
  }();
  const Clock::time_point start = Clock::now();
  std::vector<int> descriptors;
  for (const ChainFile& file : files) {
    descriptors.push_back(open(file.path.c_str(), O_RDONLY | O_CLOEXEC));
  }
  std::atomic<std::size_t> next{0};
  std::atomic<bool> ok{true};
  std::vector<std::thread> readers;
  for (std::uint64_t t = 0; t < threads; ++t) {
    readers.emplace_back([&, t] {
      std::vector<std::byte>& buffer = (*buffers)[t];
      for (std::size_t i = next++; i < pieces.size(); i = next++) {
        const Piece& piece = pieces[i];
        const std::uint64_t bytes =
            std::min(kPieceBytes, files[piece.file].bytes - piece.offset);
        if (pread(descriptors[piece.file], buffer.data(), bytes,
                  static_cast<off_t>(piece.offset)) !=
            static_cast<ssize_t>(bytes)) {
          ok = false;
        }
      }
    });
  }
  for (std::thread& reader : readers) reader.join();
  for (const int descriptor : descriptors) {
    if (descriptor >= 0) close(descriptor);
  }
  const double seconds = SecondsSince(start);
  if (ok) return seconds;
  return absl::UnavailableError("a plain pread failed or was short");
}

// An engine's memory for the model, and what it should hold.
class EngineMemory {
 public:
  static absl::StatusOr<EngineMemory> Make(
      BenchDevice* bench, const std::vector<TensorSpec>& tensors) {
    EngineMemory memory;
    memory.bench_ = bench;
    memory.set_ = std::make_unique<WeightSet>("engine");
    for (const TensorSpec& spec : tensors) {
      KEDGE_ASSIGN_OR_RETURN(
          DeviceMemory data,
          bench->device()->Allocate(MemoryKind::kDevice, spec.byte_count()));
      TensorTarget target;
      target.name = spec.name;
      target.dtype = spec.dtype;
      target.shape = spec.shape;
      target.data = data.data();
      KEDGE_RETURN_IF_ERROR(memory.set_->Add(std::move(target)));
      memory.data_.push_back(std::move(data));
      memory.bytes_ += spec.byte_count();
    }
    memory.tensors_ = tensors;
    return memory;
  }

  const WeightSet* set() const { return set_.get(); }
  std::uint64_t bytes() const { return bytes_; }
  absl::Status Poison(DeviceStream stream) {
    for (const DeviceMemory& data : data_) {
      KEDGE_RETURN_IF_ERROR(
          bench_->device()->Fill(data.data(), 0xa5, data.bytes(), stream));
    }
    return bench_->device()->WaitForStream(stream);
  }
  // Every element of the first and the last tensor.
  absl::Status Compare(std::uint64_t version, DeviceStream stream) {
    for (const std::size_t i : {std::size_t{0}, data_.size() - 1}) {
      std::vector<std::uint16_t> found(data_[i].bytes() / 2);
      KEDGE_RETURN_IF_ERROR(bench_->device()->Copy(
          found.data(), data_[i].data(), data_[i].bytes(), stream));
      KEDGE_RETURN_IF_ERROR(bench_->device()->WaitForStream(stream));
      const SyntheticTensor expected =
          SyntheticOf(tensors_[i].name, tensors_[i].dtype, kDensity);
      for (std::uint64_t e = 0; e < found.size(); ++e) {
        if (found[e] != expected.At(e, version)) {
          return absl::DataLossError(absl::StrCat(
              tensors_[i].name, ": element ", e, " is not v", version, "'s"));
        }
      }
    }
    return absl::OkStatus();
  }

  // Seconds that copies of as many bytes from pinned memory take.
  absl::StatusOr<double> CopyIn(const DeviceMemory& pinned,
                                DeviceStream stream) {
    Device* const device = bench_->device();
    KEDGE_RETURN_IF_ERROR(device->WaitForStream(stream));
    KEDGE_RETURN_IF_ERROR(bench_->StartClock(stream));
    std::uint64_t from = 0;
    for (const DeviceMemory& data : data_) {
      for (std::uint64_t at = 0; at < data.bytes(); at += kPieceBytes) {
        const std::uint64_t bytes = std::min(kPieceBytes, data.bytes() - at);
        if (from + bytes > pinned.bytes()) from = 0;
        KEDGE_RETURN_IF_ERROR(device->Copy(
            data.data() + at, pinned.data() + from, bytes, stream));
        from += bytes;
      }
    }
    KEDGE_RETURN_IF_ERROR(bench_->StopClock(stream));
    return bench_->ReadClockSeconds();
  }

 private:
  BenchDevice* bench_ = nullptr;
  std::unique_ptr<WeightSet> set_;
  std::vector<TensorSpec> tensors_;
  std::vector<DeviceMemory> data_;
  std::uint64_t bytes_ = 0;
};

struct Joined {
  double open_seconds = 0;
  double join_seconds = 0;
  UpdateResult result;
};

absl::StatusOr<Joined> JoinOnce(BenchDevice* bench, const std::string& store,
                                const EngineMemory& memory,
                                const Options& bench_options) {
  const std::uint64_t version = bench_options.deltas;
  Joined joined;
  FollowerOptions options;
  options.store_path = store;
  options.device = bench->device();
  options.io_threads = static_cast<int>(bench_options.threads);
  Clock::time_point start = Clock::now();
  KEDGE_ASSIGN_OR_RETURN(const std::unique_ptr<Follower> follower,
                         Follower::Open(options, {memory.set()}));
  joined.open_seconds = SecondsSince(start);
  start = Clock::now();
  KEDGE_ASSIGN_OR_RETURN(joined.result, follower->Join());
  joined.join_seconds = SecondsSince(start);
  if (follower->state() != FollowerState::kReady ||
      joined.result.version.step != version) {
    return absl::InternalError(
        absl::StrCat("joined v", joined.result.version.step, " in state ",
                     ToString(follower->state()), ", expected v", version));
  }
  return joined;
}

// One place: joins beside what they are compared with.
struct Comparison {
  std::string beside;
  std::uint64_t file_bytes = 0;
  std::uint64_t model_bytes = 0;
  Samples join;           // seconds
  Samples open_and_join;  // seconds
  Samples other;          // seconds
  Samples ratio;          // other / join of a pair
  Samples ratio_with_open;
  Samples resident;  // share of pages left after dropping caches
  Samples read;
  Samples pause;
  Samples verify;

  void AddPair(const Joined& joined, double seconds) {
    join.Add(joined.join_seconds);
    open_and_join.Add(joined.open_seconds + joined.join_seconds);
    other.Add(seconds);
    ratio.Add(seconds / joined.join_seconds);
    ratio_with_open.Add(seconds / (joined.open_seconds + joined.join_seconds));
    read.Add(joined.result.read_seconds);
    pause.Add(joined.result.pause_seconds);
    verify.Add(joined.result.verify_seconds);
  }
};

void Print(const std::string& where, const Comparison& c) {
  const auto gb = static_cast<double>(c.file_bytes) / 1e9;
  std::printf("%s: %.3f GB of files, %.3f GB of weights\n", where.c_str(), gb,
              static_cast<double>(c.model_bytes) / 1e9);
  std::printf("  join                   %s s, %.2f GB/s\n",
              c.join.Text(1, 3).c_str(), gb / c.join.Median());
  std::printf("  open + join            %s s\n",
              c.open_and_join.Text(1, 3).c_str());
  std::printf("  %-22s %s s, %.2f GB/s\n", c.beside.c_str(),
              c.other.Text(1, 3).c_str(), gb / c.other.Median());
  std::printf("  join reaches %s %% of it, with open %s %%\n",
              c.ratio.Text(100, 1).c_str(),
              c.ratio_with_open.Text(100, 1).c_str());
  if (!c.resident.empty()) {
    std::printf("  pages left in memory after dropping caches: %s %%\n",
                c.resident.Text(100, 2).c_str());
  }
  std::fflush(stdout);
}

JsonObject JsonOf(const Comparison& c) {
  JsonObject json;
  json.Text("beside", c.beside)
      .Number("file_bytes", c.file_bytes)
      .Number("model_bytes", c.model_bytes)
      .Stats("join_seconds", c.join)
      .Stats("open_and_join_seconds", c.open_and_join)
      .Stats("beside_seconds", c.other)
      .Stats("ratio", c.ratio)
      .Stats("ratio_with_open", c.ratio_with_open)
      .Stats("read_seconds", c.read)
      .Stats("pause_seconds", c.pause)
      .Stats("verify_seconds", c.verify);
  if (!c.resident.empty()) json.Stats("resident_after_drop", c.resident);
  return json;
}

// The tensors of a model of `bytes`: of 128 MiB, fewer bytes each if there are
// fewer than 8 of them.
std::vector<TensorSpec> TensorsOf(std::uint64_t bytes) {
  constexpr std::uint64_t kCols = 4096;
  const std::uint64_t each =
      std::clamp<std::uint64_t>(bytes / 8, 2 * kCols, std::uint64_t{128} << 20);
  const std::uint64_t rows = each / (2 * kCols);
  std::vector<TensorSpec> tensors;
  for (std::uint64_t at = 0; at < bytes; at += rows * 2 * kCols) {
    tensors.push_back({absl::StrCat("model.layers.", tensors.size(), ".weight"),
                       DType::kBf16,
                       {rows, kCols}});
  }
  return tensors;
}

absl::StatusOr<Comparison> OnDisk(BenchDevice* bench, const Options& options,
                                  const std::string& store,
                                  EngineMemory* memory, DeviceStream stream) {
  Comparison comparison;
  comparison.beside = absl::StrCat("plain ", options.threads, "-thread preads");
  comparison.model_bytes = memory->bytes();
  KEDGE_ASSIGN_OR_RETURN(const std::vector<ChainFile> files, FilesOf(store));
  for (const ChainFile& file : files) comparison.file_bytes += file.bytes;
  WarmMemory(comparison.file_bytes);
  // Pair 0 does not count.
  for (std::uint64_t pair = 0; pair <= options.pairs; ++pair) {
    Joined joined;
    double plain = 0;
    double resident = 0;
    for (int side = 0; side < 2; ++side) {
      resident = std::max(resident, DropCaches(files));
      if ((side == 0) == (pair % 2 == 0)) {
        KEDGE_RETURN_IF_ERROR(memory->Poison(stream));
        KEDGE_ASSIGN_OR_RETURN(joined,
                               JoinOnce(bench, store, *memory, options));
      } else {
        KEDGE_ASSIGN_OR_RETURN(plain, PlainRead(files, options.threads));
      }
    }
    if (pair == 0) {
      KEDGE_RETURN_IF_ERROR(memory->Compare(options.deltas, stream));
      continue;
    }
    comparison.AddPair(joined, plain);
    comparison.resident.Add(resident);
  }
  return comparison;
}

absl::StatusOr<Comparison> OnTmpfs(BenchDevice* bench, const Options& options,
                                   const std::string& store,
                                   EngineMemory* memory, DeviceStream stream) {
  Comparison comparison;
  comparison.beside = "copies from pinned memory";
  comparison.model_bytes = memory->bytes();
  KEDGE_ASSIGN_OR_RETURN(const std::vector<ChainFile> files, FilesOf(store));
  for (const ChainFile& file : files) comparison.file_bytes += file.bytes;
  KEDGE_ASSIGN_OR_RETURN(
      const DeviceMemory pinned,
      bench->device()->Allocate(
          MemoryKind::kPinned,
          std::min<std::uint64_t>(std::uint64_t{512} << 20,
                                  comparison.model_bytes + kPieceBytes)));
  std::memset(pinned.data(), 0x3c, pinned.bytes());
  for (std::uint64_t pair = 0; pair <= options.pairs; ++pair) {
    Joined joined;
    double copied = 0;
    for (int side = 0; side < 2; ++side) {
      if ((side == 0) == (pair % 2 == 0)) {
        KEDGE_RETURN_IF_ERROR(memory->Poison(stream));
        KEDGE_ASSIGN_OR_RETURN(joined,
                               JoinOnce(bench, store, *memory, options));
        if (pair == 0) {
          KEDGE_RETURN_IF_ERROR(memory->Compare(options.deltas, stream));
        }
      } else {
        KEDGE_ASSIGN_OR_RETURN(copied, memory->CopyIn(pinned, stream));
      }
    }
    if (pair > 0) comparison.AddPair(joined, copied);
  }
  return comparison;
}

// A directory of its own under `parent`, removed with all that is in it.
class Scratch {
 public:
  static absl::StatusOr<std::unique_ptr<Scratch>> Make(
      const std::string& parent) {
    auto scratch = std::make_unique<Scratch>();
    scratch->path_ = JoinPath(parent, "kedge-late-join-XXXXXX");
    std::error_code ignored;  // mkdtemp says what is wrong
    std::filesystem::create_directories(parent, ignored);
    if (mkdtemp(scratch->path_.data()) == nullptr) {
      return absl::UnavailableError(
          absl::StrCat(scratch->path_, ": ", std::strerror(errno)));
    }
    scratch->made_ = true;
    return scratch;
  }
  ~Scratch() {
    if (!made_) return;
    const absl::Status removed = RemoveTree(*PosixFileSystem(), path_);
    if (!removed.ok()) {
      std::fprintf(stderr, "%s\n", std::string(removed.message()).c_str());
    }
  }
  std::string store() const { return JoinPath(path_, "store"); }

 private:
  std::string path_;
  bool made_ = false;
};

absl::Status Run(const Options& options, const std::string& command) {
  KEDGE_ASSIGN_OR_RETURN(const std::unique_ptr<BenchDevice> bench,
                         BenchDevice::Open(options.device));
  KEDGE_ASSIGN_OR_RETURN(const OwnedStream stream,
                         bench->device()->CreateStream());
  std::printf("%s; %s\ncaches dropped by sync and POSIX_FADV_DONTNEED\n",
              bench->device()->name().c_str(), bench->driver().c_str());
  JsonObject json;
  json.Text("benchmark", "late_join")
      .Text("device", bench->device()->name())
      .Text("driver", bench->driver())
      .Text("commit", options.commit)
      .Text("command", command)
      .Text("caches", "dropped by sync and POSIX_FADV_DONTNEED")
      .Number("pairs", options.pairs)
      .Number("deltas", options.deltas)
      .Number("threads", options.threads);
  for (const bool disk : {true, false}) {
    const std::string& parent = disk ? options.store : options.tmpfs;
    if (parent.empty()) continue;
    const std::vector<TensorSpec> tensors = TensorsOf(
        disk || options.tmpfs_bytes == 0 ? options.bytes : options.tmpfs_bytes);
    KEDGE_ASSIGN_OR_RETURN(EngineMemory memory,
                           EngineMemory::Make(bench.get(), tensors));
    KEDGE_ASSIGN_OR_RETURN(const std::unique_ptr<Scratch> scratch,
                           Scratch::Make(parent));
    SyntheticStoreOptions store;
    store.path = scratch->store();
    store.tensors = tensors;
    store.density = kDensity;
    store.steps = options.deltas;
    const Clock::time_point start = Clock::now();
    KEDGE_RETURN_IF_ERROR(WriteSyntheticStore(store));
    std::printf("%s: written in %.1f s\n", parent.c_str(), SecondsSince(start));
    std::fflush(stdout);
    KEDGE_ASSIGN_OR_RETURN(
        const Comparison comparison,
        disk
            ? OnDisk(bench.get(), options, store.path, &memory, stream.get())
            : OnTmpfs(bench.get(), options, store.path, &memory, stream.get()));
    Print(parent, comparison);
    json.Object(disk ? "disk" : "tmpfs", JsonOf(comparison));
  }
  if (options.json.empty()) return absl::OkStatus();
  return WriteReport(options.json, json.str());
}

int Main(int argc, char** argv) {
  Options options;
  const char* home = std::getenv("KEDGE_BENCH_DIR");
  if (home == nullptr || *home == '\0') home = std::getenv("HOME");
  options.store = home == nullptr || *home == '\0' ? "." : home;
  if (!Flags()
           .Text("--device", &options.device)
           .Bytes("--bytes", &options.bytes)
           .Text("--store", &options.store)
           .Text("--tmpfs", &options.tmpfs)
           .Bytes("--tmpfs-bytes", &options.tmpfs_bytes)
           .Number("--pairs", &options.pairs)
           .Number("--deltas", &options.deltas)
           .Number("--threads", &options.threads)
           .Text("--json", &options.json)
           .Text("--commit", &options.commit)
           .Parse(argc, argv)) {
    return 2;
  }
  const auto out_of_range = [](std::uint64_t bytes) {
    return bytes < (std::uint64_t{1} << 20) || bytes > (std::uint64_t{1} << 40);
  };
  if (out_of_range(options.bytes) ||
      (options.tmpfs_bytes != 0 && out_of_range(options.tmpfs_bytes)) ||
      options.pairs == 0 || options.deltas > 1000 || options.threads == 0 ||
      options.threads > 256) {
    std::fprintf(stderr,
                 "--bytes is 1MiB to 1TiB, --pairs at least 1, --deltas at "
                 "most 1000, --threads 1 to 256\n");
    return 2;
  }
  const absl::Status ran = Run(options, CommandLine(argc, argv));
  if (!ran.ok()) {
    std::fprintf(stderr, "%s\n", std::string(ran.message()).c_str());
  }
  return ran.ok() ? 0 : 1;
}

}  // namespace
}  // namespace kedge

int main(int argc, char** argv) { return kedge::Main(argc, argv); }
