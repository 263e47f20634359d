// How close kedge's way of writing and reading an anchor comes to plain system
// calls on the same files.
//
//   kedge_storage_bench [--bytes N[GiB|MiB]] [--files F] [--threads T]
//                       [--pairs P] [--json]
//
// One pair is: kedge writes F files of N/F bytes through StagingDirectory and
// IoPool, 8 MiB pieces round-robin over the files, each piece hashed (XXH3-64)
// and written by one of T threads, files synced and closed, MANIFEST with the
// piece hashes and COMMIT, rename, directories synced. Plain is one thread per
// file, pwrite of 8 MiB from the same buffer, fsync, close: no hashes, no
// commit. Both reserve a file's space first and tell storage to begin with each
// piece (sync_file_range). Each set is then read back with cold caches, kedge's
// through IoPool with every hash checked, the plain one by one thread per file,
// and removed before the next one. The order within pairs alternates.
// KEDGE_BENCH_DIR chooses the directory (default: $HOME); it needs N bytes
// free.

#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "kedge/engine/io/file_system.h"
#include "kedge/engine/io/io_pool.h"
#include "kedge/engine/io/piece_io.h"
#include "kedge/engine/io/staging.h"
#include "kedge/engine/io/writeback.h"
#include "kedge/format/layout.h"
#include "kedge/format/limits.h"
#include "kedge/format/status.h"

namespace kedge {
namespace {

struct Options {
  std::uint64_t bytes = std::uint64_t{8} << 30;
  std::uint32_t files = 8;
  int threads = 8;
  int pairs = 5;
  bool json = false;
};

// Source of all writes: larger than any cache, so that both sides read memory.
constexpr std::uint64_t kSourceBytes = std::uint64_t{512} << 20;

std::uint64_t PieceCount(std::uint64_t file_bytes) {
  return (file_bytes + kPieceBytes - 1) / kPieceBytes;
}

// Bytes of piece `piece` of a file of `file_bytes` bytes.
std::uint64_t PieceSize(std::uint64_t file_bytes, std::uint64_t piece) {
  return std::min(kPieceBytes, file_bytes - piece * kPieceBytes);
}

// A source range that differs between neighbouring pieces and files.
std::span<const std::byte> SourceOf(const std::vector<std::byte>& source,
                                    std::uint32_t file, std::uint64_t piece,
                                    std::uint64_t bytes) {
  const std::uint64_t slots = kSourceBytes / kPieceBytes;
  const std::uint64_t slot = (piece * 8 + file) % slots;
  return std::span(source).subspan(slot * kPieceBytes, bytes);
}

PieceKey KeyOf(std::uint32_t file, std::uint64_t piece) {
  PieceKey key;
  key.run.bytes[0] = 1;
  key.step = 1;
  key.file = {FileKind::kAnchor, 0, file};
  key.piece = static_cast<std::uint32_t>(piece);
  return key;
}

struct Bench {
  Options options;
  std::string directory;
  std::uint64_t file_bytes = 0;
  std::vector<std::byte> source;
  std::vector<std::vector<std::uint64_t>> hashes;  // [file][piece]

  std::string KedgePath() const { return JoinPath(directory, "step"); }
  std::string PlainPath() const { return JoinPath(directory, "plain"); }
  std::string DataPath(const std::string& in, std::uint32_t file) const {
    return JoinPath(in, DataFileName({FileKind::kAnchor, 0, file}));
  }
};

absl::Status KedgeWrite(Bench& bench, IoPool& pool) {
  FileSystem* const fs = PosixFileSystem();
  KEDGE_ASSIGN_OR_RETURN(
      const std::unique_ptr<StagingDirectory> staging,
      StagingDirectory::Create(fs, JoinPath(bench.directory, "staging")));
  std::vector<File*> files;
  for (std::uint32_t f = 0; f < bench.options.files; ++f) {
    KEDGE_ASSIGN_OR_RETURN(
        File* const file,
        staging->AddFile(DataFileName({FileKind::kAnchor, 0, f}),
                         bench.file_bytes));
    files.push_back(file);
  }
  Writeback writeback;  // stops before `staging` closes the files
  IoPool::Batch batch(&pool);
  const std::uint64_t pieces = PieceCount(bench.file_bytes);
  for (std::uint64_t piece = 0; piece < pieces; ++piece) {
    for (std::uint32_t f = 0; f < bench.options.files; ++f) {
      batch.Submit([&bench, &writeback, file = files[f], f, piece] {
        const absl::StatusOr<std::uint64_t> hash =
            WritePiece(*file, piece * kPieceBytes,
                       SourceOf(bench.source, f, piece,
                                PieceSize(bench.file_bytes, piece)),
                       KeyOf(f, piece));
        if (!hash.ok()) return hash.status();
        bench.hashes[f][piece] = *hash;
        writeback.Add(file, piece * kPieceBytes,
                      PieceSize(bench.file_bytes, piece));
        return absl::OkStatus();
      });
    }
  }
  KEDGE_RETURN_IF_ERROR(batch.Wait());
  writeback.Stop();
  KEDGE_RETURN_IF_ERROR(staging->SealFiles(pool));
  // Stands for the manifest, which carries the piece hashes.
  std::vector<std::uint64_t> manifest;
  for (const std::vector<std::uint64_t>& file : bench.hashes) {
    manifest.insert(manifest.end(), file.begin(), file.end());
  }
  const Hash128 hash = HashBytes128(std::as_bytes(std::span(manifest)));
  KEDGE_RETURN_IF_ERROR(
      staging->WriteCommit(std::as_bytes(std::span(manifest)),
                           std::as_bytes(std::span(hash.bytes)), pool));
  KEDGE_RETURN_IF_ERROR(
      staging->PublishAs(bench.KedgePath(), [] { return false; }));
  return staging->parent_sync_status();
}

absl::Status KedgeRead(Bench& bench, IoPool& pool) {
  FileSystem* const fs = PosixFileSystem();
  std::vector<std::unique_ptr<File>> files;
  for (std::uint32_t f = 0; f < bench.options.files; ++f) {
    KEDGE_ASSIGN_OR_RETURN(
        std::unique_ptr<File> file,
        fs->OpenForRead(bench.DataPath(bench.KedgePath(), f)));
    KEDGE_ASSIGN_OR_RETURN(const std::uint64_t size, file->Size());
    if (size != bench.file_bytes) return absl::DataLossError("file size");
    files.push_back(std::move(file));
  }
  IoPool::Batch batch(&pool);
  const std::uint64_t pieces = PieceCount(bench.file_bytes);
  for (std::uint64_t piece = 0; piece < pieces; ++piece) {
    for (std::uint32_t f = 0; f < bench.options.files; ++f) {
      batch.Submit([&bench, file = files[f].get(), f, piece] {
        thread_local std::vector<std::byte> buffer(kPieceBytes);
        // As an anchor is loaded: the storage works on what comes next while
        // this piece is hashed.
        const std::uint64_t next = (piece + 1) * kPieceBytes;
        if (next < bench.file_bytes) file->WillRead(next, kPieceBytes);
        return ReadPiece(
            *file, piece * kPieceBytes, bench.hashes[f][piece], KeyOf(f, piece),
            std::span(buffer).first(PieceSize(bench.file_bytes, piece)));
      });
    }
  }
  return batch.Wait();
}

// Runs `body(file)` on one thread per file; false if any call failed.
bool OnThreadPerFile(std::uint32_t files,
                     const std::function<bool(std::uint32_t)>& body) {
  std::vector<char> results(files, 0);
  std::vector<std::thread> threads;
  for (std::uint32_t f = 0; f < files; ++f) {
    threads.emplace_back([&, f] { results[f] = body(f); });
  }
  for (std::thread& thread : threads) thread.join();
  return std::all_of(results.begin(), results.end(),
                     [](char ok) { return ok; });
}

bool PlainWriteFile(const Bench& bench, std::uint32_t f) {
  const std::string path = bench.DataPath(bench.PlainPath(), f);
  const int descriptor =
      open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  if (descriptor < 0) return false;
  bool ok =
      posix_fallocate(descriptor, 0, static_cast<off_t>(bench.file_bytes)) == 0;
  for (std::uint64_t piece = 0; ok && piece < PieceCount(bench.file_bytes);
       ++piece) {
    const std::uint64_t bytes = PieceSize(bench.file_bytes, piece);
    const auto offset = static_cast<off_t>(piece * kPieceBytes);
    ok = pwrite(descriptor, SourceOf(bench.source, f, piece, bytes).data(),
                bytes, offset) == static_cast<ssize_t>(bytes);
    sync_file_range(descriptor, offset, static_cast<off_t>(bytes),
                    SYNC_FILE_RANGE_WRITE);
  }
  ok = ok && fsync(descriptor) == 0;
  return close(descriptor) == 0 && ok;
}

absl::Status PlainWrite(Bench& bench) {
  KEDGE_RETURN_IF_ERROR(PosixFileSystem()->MakeDirectory(bench.PlainPath()));
  if (!OnThreadPerFile(bench.options.files, [&](std::uint32_t f) {
        return PlainWriteFile(bench, f);
      })) {
    return absl::UnavailableError("plain pwrite failed or was short");
  }
  return absl::OkStatus();
}

absl::Status PlainRead(Bench& bench) {
  if (!OnThreadPerFile(bench.options.files, [&](std::uint32_t f) {
        const int descriptor = open(
            bench.DataPath(bench.PlainPath(), f).c_str(), O_RDONLY | O_CLOEXEC);
        if (descriptor < 0) return false;
        std::vector<std::byte> buffer(kPieceBytes);
        bool ok = true;
        for (std::uint64_t piece = 0;
             ok && piece < PieceCount(bench.file_bytes); ++piece) {
          const std::uint64_t bytes = PieceSize(bench.file_bytes, piece);
          ok = pread(descriptor, buffer.data(), bytes,
                     static_cast<off_t>(piece * kPieceBytes)) ==
               static_cast<ssize_t>(bytes);
        }
        close(descriptor);
        return ok;
      })) {
    return absl::UnavailableError("plain pread failed or was short");
  }
  return absl::OkStatus();
}

// Touches as much memory as a run fills with cached pages, and gives it back.
// On a virtual machine the first use of a page that the host took away costs
// more than the copy into it, and whoever runs first would pay for both.
void WarmMemory(std::uint64_t bytes) {
  const std::uint64_t half =
      static_cast<std::uint64_t>(sysconf(_SC_PHYS_PAGES)) *
      static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE)) / 2;
  bytes = std::min(bytes, half);
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (memory != MAP_FAILED) munmap(memory, bytes);
}

// Waits until the disk is quiet and drops the cached pages of `set`.
void CoolDown(const Bench& bench, const std::string& set) {
  sync();
  for (std::uint32_t f = 0; f < bench.options.files; ++f) {
    const int descriptor =
        open(bench.DataPath(set, f).c_str(), O_RDONLY | O_CLOEXEC);
    if (descriptor < 0) continue;
    posix_fadvise(descriptor, 0, 0, POSIX_FADV_DONTNEED);
    close(descriptor);
  }
  WarmMemory(bench.file_bytes * bench.options.files);
}

struct Row {
  const char* what;
  std::vector<double> kedge;  // GB/s of each pair
  std::vector<double> plain;
};

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t n = values.size();
  return n % 2 == 1 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

std::vector<double> Ratios(const Row& row) {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < row.kedge.size(); ++i) {
    ratios.push_back(row.kedge[i] / row.plain[i]);
  }
  return ratios;
}

std::string JsonList(const std::vector<double>& values) {
  std::string text = "[";
  for (const double value : values) {
    absl::StrAppend(&text, text.size() > 1 ? ", " : "", value);
  }
  return text + "]";
}

void Print(const Bench& bench, const std::vector<Row>& rows) {
  const Options& options = bench.options;
  if (options.json) {
    std::printf("{\"directory\": \"%s\", \"bytes\": %" PRIu64
                ", \"files\": %u, \"threads\": %d, \"pairs\": %d",
                bench.directory.c_str(), bench.file_bytes * options.files,
                options.files, options.threads, options.pairs);
    for (const Row& row : rows) {
      const std::vector<double> ratios = Ratios(row);
      std::printf(
          ",\n \"%s\": {\"kedge_gb_per_s\": %s, \"plain_gb_per_s\": %s, "
          "\"ratio\": %s, \"median_kedge_gb_per_s\": %g, "
          "\"median_plain_gb_per_s\": %g, \"median_ratio\": %g, "
          "\"min_ratio\": %g, \"max_ratio\": %g}",
          row.what, JsonList(row.kedge).c_str(), JsonList(row.plain).c_str(),
          JsonList(ratios).c_str(), Median(row.kedge), Median(row.plain),
          Median(ratios), *std::min_element(ratios.begin(), ratios.end()),
          *std::max_element(ratios.begin(), ratios.end()));
    }
    std::printf("}\n");
    return;
  }
  for (const Row& row : rows) {
    const std::vector<double> ratios = Ratios(row);
    std::printf(
        "%-5s median: kedge %.3f GB/s (%.3f to %.3f), plain %.3f GB/s (%.3f to "
        "%.3f), ratio of a pair %.3f (%.3f to %.3f)\n",
        row.what, Median(row.kedge),
        *std::min_element(row.kedge.begin(), row.kedge.end()),
        *std::max_element(row.kedge.begin(), row.kedge.end()),
        Median(row.plain),
        *std::min_element(row.plain.begin(), row.plain.end()),
        *std::max_element(row.plain.begin(), row.plain.end()), Median(ratios),
        *std::min_element(ratios.begin(), ratios.end()),
        *std::max_element(ratios.begin(), ratios.end()));
  }
}

// GB/s of one timed call.
absl::StatusOr<double> Timed(const Bench& bench,
                             const std::function<absl::Status()>& body) {
  const auto start = std::chrono::steady_clock::now();
  KEDGE_RETURN_IF_ERROR(body());
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start)
          .count();
  return static_cast<double>(bench.file_bytes) * bench.options.files / seconds /
         1e9;
}

// Writes and reads one set and removes it, so that every set finds the disk as
// the one before left it.
absl::Status RunSide(Bench& bench, IoPool& pool, bool kedge,
                     std::vector<Row>& rows) {
  const std::string set = kedge ? bench.KedgePath() : bench.PlainPath();
  for (Row& row : rows) {
    const bool write = &row == rows.data();
    CoolDown(bench, set);
    KEDGE_ASSIGN_OR_RETURN(
        const double rate, Timed(bench, [&] {
          if (kedge) {
            return write ? KedgeWrite(bench, pool) : KedgeRead(bench, pool);
          }
          return write ? PlainWrite(bench) : PlainRead(bench);
        }));
    (kedge ? row.kedge : row.plain).push_back(rate);
  }
  KEDGE_RETURN_IF_ERROR(RemoveTree(*PosixFileSystem(), set));
  // Freed blocks are discarded after the journal commits, in the time of
  // whoever writes next.
  sync();
  std::this_thread::sleep_for(std::chrono::seconds(2));
  return absl::OkStatus();
}

absl::Status RunPairs(Bench& bench) {
  IoPool pool(bench.options.threads);
  const std::vector<Row> empty = {{"write", {}, {}}, {"read", {}, {}}};
  // Blocks that were never used before are slower: one run that does not count.
  std::vector<Row> uncounted = empty;
  KEDGE_RETURN_IF_ERROR(RunSide(bench, pool, false, uncounted));
  std::vector<Row> rows = empty;
  for (int pair = 0; pair < bench.options.pairs; ++pair) {
    const bool kedge_first = pair % 2 == 0;
    KEDGE_RETURN_IF_ERROR(RunSide(bench, pool, kedge_first, rows));
    KEDGE_RETURN_IF_ERROR(RunSide(bench, pool, !kedge_first, rows));
    if (bench.options.json) continue;
    for (const Row& row : rows) {
      std::printf("pair %d %-5s kedge %.3f GB/s, plain %.3f GB/s, ratio %.3f\n",
                  pair + 1, row.what, row.kedge.back(), row.plain.back(),
                  row.kedge.back() / row.plain.back());
    }
    std::fflush(stdout);
  }
  Print(bench, rows);
  return absl::OkStatus();
}

bool ParseBytes(absl::string_view text, std::uint64_t* bytes) {
  int shift = 0;
  if (absl::ConsumeSuffix(&text, "GiB")) shift = 30;
  if (absl::ConsumeSuffix(&text, "MiB")) shift = 20;
  if (!absl::SimpleAtoi(text, bytes)) return false;
  if (*bytes == 0 || *bytes > kMaxModelBytes >> shift) return false;
  *bytes <<= shift;
  return true;
}

bool ParseOptions(int argc, char** argv, Options* options) {
  for (int i = 1; i < argc; ++i) {
    const absl::string_view flag = argv[i];
    if (flag == "--json") {
      options->json = true;
      continue;
    }
    if (i + 1 == argc) return false;
    const absl::string_view value = argv[++i];
    bool ok = false;
    if (flag == "--bytes") ok = ParseBytes(value, &options->bytes);
    if (flag == "--files") {
      ok = absl::SimpleAtoi(value, &options->files) && options->files >= 1 &&
           options->files <= kMaxFilesPerRank;
    }
    if (flag == "--threads") {
      ok = absl::SimpleAtoi(value, &options->threads) &&
           options->threads >= 1 && options->threads <= 1024;
    }
    if (flag == "--pairs") {
      ok = absl::SimpleAtoi(value, &options->pairs) && options->pairs >= 1;
    }
    if (!ok) return false;
  }
  return options->bytes / options->files > 0;
}

int Main(int argc, char** argv) {
  Bench bench;
  if (!ParseOptions(argc, argv, &bench.options)) {
    std::fprintf(stderr,
                 "usage: %s [--bytes N[GiB|MiB]] [--files F] [--threads T] "
                 "[--pairs P] [--json]\n",
                 argv[0]);
    return 2;
  }
  const char* parent = std::getenv("KEDGE_BENCH_DIR");
  if (parent == nullptr || *parent == '\0') parent = std::getenv("HOME");
  if (parent == nullptr || *parent == '\0') parent = ".";
  bench.directory = JoinPath(parent, "kedge-storage-bench-XXXXXX");
  if (mkdtemp(bench.directory.data()) == nullptr) {
    std::perror(bench.directory.c_str());
    return 1;
  }
  bench.file_bytes = bench.options.bytes / bench.options.files;
  bench.hashes.assign(bench.options.files,
                      std::vector<std::uint64_t>(PieceCount(bench.file_bytes)));
  bench.source.resize(kSourceBytes);
  std::uint64_t state = 0x9e3779b97f4a7c15;  // xorshift: bytes without pattern
  for (std::uint64_t i = 0; i < kSourceBytes; i += sizeof(state)) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    std::memcpy(bench.source.data() + i, &state, sizeof(state));
  }
  const absl::Status status = RunPairs(bench);
  const absl::Status removed = RemoveTree(*PosixFileSystem(), bench.directory);
  for (const absl::Status& problem : {status, removed}) {
    if (!problem.ok()) {
      std::fprintf(stderr, "%s\n", std::string(problem.message()).c_str());
    }
  }
  return status.ok() && removed.ok() ? 0 : 1;
}

}  // namespace
}  // namespace kedge

int main(int argc, char** argv) { return kedge::Main(argc, argv); }
