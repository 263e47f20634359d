// How close the anchor of several ranks comes to plain writes of the same
// files.
//
//   kedge_ranks_bench [--ranks N] [--bytes N[GiB|MiB]] [--pairs P] [--json]
//
// N ranks (default 4; threads, which meet through FileCoordinator) hold uneven
// shards of a model of so many bytes (default 4 GiB). One pair: all ranks
// publish a step and its anchor, which writes every byte; and as many groups of
// threads pwrite files of the same sizes in pieces of 8 MiB from the same
// memory, space reserved first, tell storage to begin with each, fsync and
// close them. The order within pairs alternates. KEDGE_BENCH_DIR chooses the
// directory (default: $HOME); it needs N bytes free, memory twice as much.

#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
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
#include "kedge/format/layout.h"
#include "kedge/format/limits.h"
#include "kedge/format/status.h"
#include "kedge/writer/file_coordinator.h"
#include "kedge/writer/snapshot_writer.h"

namespace kedge {
namespace {

using Clock = std::chrono::steady_clock;

struct Options {
  std::uint32_t ranks = 4;
  std::uint64_t bytes = std::uint64_t{4} << 30;
  int pairs = 5;
  bool json = false;
};

constexpr std::uint64_t kTensorElements = std::uint64_t{64} << 20;
constexpr int kThreads = 8;  // of a rank, both sides

// Weights of the whole model; ranks look at their shards of it.
struct Model {
  std::vector<std::vector<std::uint16_t>> tensors;

  std::vector<TrainerTensor> ShardsOf(std::uint32_t rank,
                                      std::uint32_t ranks) const {
    std::vector<TrainerTensor> shards;
    const std::uint64_t parts = std::uint64_t{ranks} * (ranks + 3) / 2;
    // Rank r has r + 2 parts: uneven, by at most a few times.
    const auto end = [&](std::uint64_t of, std::uint64_t elements) {
      return elements * (of * (of + 3) / 2) / parts;
    };
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const std::uint64_t elements = tensors[i].size();
      TrainerTensor tensor;
      tensor.name = absl::StrCat("layers.", i, ".weight");
      tensor.shape = {elements / 8192, 8192};
      tensor.shard = {end(rank, elements), end(rank + 1, elements)};
      tensor.data = tensors[i].data() + tensor.shard->begin;
      shards.push_back(std::move(tensor));
    }
    return shards;
  }
};

// Runs `body(rank)` on one thread each; the first error.
absl::Status OnRanks(std::uint32_t ranks,
                     const std::function<absl::Status(std::uint32_t)>& body) {
  std::vector<absl::Status> results(ranks);
  std::vector<std::thread> threads;
  for (std::uint32_t rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] { results[rank] = body(rank); });
  }
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& result : results) KEDGE_RETURN_IF_ERROR(result);
  return absl::OkStatus();
}

struct AnchorFile {
  std::string name;
  std::uint64_t bytes = 0;
};

absl::Status PlainWrite(const Model& model, const std::string& directory,
                        const std::vector<AnchorFile>& files,
                        std::uint32_t ranks) {
  KEDGE_RETURN_IF_ERROR(PosixFileSystem()->MakeDirectory(directory));
  std::atomic<std::size_t> next{0};
  return OnRanks(ranks * kThreads, [&](std::uint32_t) -> absl::Status {
    for (std::size_t i = next++; i < files.size(); i = next++) {
      const std::string path = JoinPath(directory, files[i].name);
      const int file = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL, 0644);
      bool ok =
          file >= 0 &&
          posix_fallocate(file, 0, static_cast<off_t>(files[i].bytes)) == 0;
      const std::vector<std::uint16_t>& source =
          model.tensors[i % model.tensors.size()];
      for (std::uint64_t at = 0; ok && at < files[i].bytes; at += kPieceBytes) {
        const std::uint64_t bytes = std::min(kPieceBytes, files[i].bytes - at);
        const std::uint64_t pieces = source.size() * 2 / kPieceBytes;
        ok = pwrite(file,
                    reinterpret_cast<const char*>(source.data()) +
                        at / kPieceBytes % pieces * kPieceBytes,
                    bytes,
                    static_cast<off_t>(at)) == static_cast<ssize_t>(bytes);
        sync_file_range(file, static_cast<off_t>(at), static_cast<off_t>(bytes),
                        SYNC_FILE_RANGE_WRITE);
      }
      ok = ok && fsync(file) == 0;
      if (file >= 0) ok = close(file) == 0 && ok;
      if (!ok)
        return absl::UnavailableError(absl::StrCat(path, ": plain write"));
    }
    return absl::OkStatus();
  });
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Whoever writes next finds a quiet disk and free blocks.
void Settle() {
  sync();
  std::this_thread::sleep_for(std::chrono::seconds(2));
}

absl::Status Run(const Options& options, const std::string& directory) {
  Model model;
  const std::uint64_t elements = options.bytes / 2;
  std::uint64_t state = 0x9e3779b97f4a7c15;  // xorshift: no pattern
  for (std::uint64_t done = 0; done < elements;) {
    const std::uint64_t count =
        std::min(kTensorElements, (elements - done) / 8192 * 8192);
    if (count == 0) break;
    std::vector<std::uint16_t> tensor(count);
    for (std::uint64_t i = 0; i < count; i += 4) {
      state ^= state << 13;
      state ^= state >> 7;
      state ^= state << 17;
      std::memcpy(tensor.data() + i, &state, 8);
    }
    done += count;
    model.tensors.push_back(std::move(tensor));
  }

  const std::string store = JoinPath(directory, "store");
  std::vector<std::unique_ptr<FileCoordinator>> coordinators(options.ranks);
  std::vector<std::unique_ptr<SnapshotWriter>> writers(options.ranks);
  KEDGE_RETURN_IF_ERROR(
      OnRanks(options.ranks, [&](std::uint32_t rank) -> absl::Status {
        FileCoordinatorOptions meeting;
        meeting.store_path = store;
        meeting.rank = rank;
        meeting.world_size = options.ranks;
        KEDGE_ASSIGN_OR_RETURN(coordinators[rank],
                               FileCoordinator::Open(meeting));
        WriterOptions writer;
        writer.store_path = store;
        writer.io_threads = kThreads;
        writer.encode_threads = 1;
        writer.coordinator = coordinators[rank].get();
        InitOptions init;
        init.external_v0 = true;
        KEDGE_ASSIGN_OR_RETURN(
            writers[rank],
            SnapshotWriter::Create(writer, init,
                                   model.ShardsOf(rank, options.ranks)));
        return absl::OkStatus();
      }));

  std::vector<AnchorFile> files;
  std::vector<double> kedge_seconds;
  std::vector<double> plain_seconds;
  std::uint64_t step = 0;
  const auto write_anchor = [&](bool counts) -> absl::Status {
    ++step;
    for (auto& tensor : model.tensors) tensor[step] ^= 1;
    std::vector<double> seconds(options.ranks);
    KEDGE_RETURN_IF_ERROR(
        OnRanks(options.ranks, [&](std::uint32_t rank) -> absl::Status {
          KEDGE_ASSIGN_OR_RETURN(
              const PublishResult result,
              writers[rank]->Publish(step, {.anchor = true}));
          seconds[rank] = result.anchor_seconds;
          return result.anchor_status;
        }));
    if (counts) {
      kedge_seconds.push_back(
          *std::max_element(seconds.begin(), seconds.end()));
    }
    const std::string anchor =
        JoinPath(JoinPath(store, StepDirectoryName(step)), "anchor");
    files.clear();
    for (const auto& entry : std::filesystem::directory_iterator(anchor)) {
      files.push_back({entry.path().filename().string(), entry.file_size()});
    }
    std::filesystem::remove_all(anchor);
    Settle();
    return absl::OkStatus();
  };
  const auto write_plain = [&](bool counts) -> absl::Status {
    const std::string plain = JoinPath(directory, "plain");
    const auto start = Clock::now();
    KEDGE_RETURN_IF_ERROR(PlainWrite(model, plain, files, options.ranks));
    if (counts) {
      plain_seconds.push_back(
          std::chrono::duration<double>(Clock::now() - start).count());
    }
    std::filesystem::remove_all(plain);
    Settle();
    return absl::OkStatus();
  };
  // Blocks that were never used before are slower: one that does not count.
  KEDGE_RETURN_IF_ERROR(write_anchor(false));
  for (int pair = 0; pair < options.pairs; ++pair) {
    if (pair % 2 == 0) KEDGE_RETURN_IF_ERROR(write_anchor(true));
    KEDGE_RETURN_IF_ERROR(write_plain(true));
    if (pair % 2 == 1) KEDGE_RETURN_IF_ERROR(write_anchor(true));
  }

  std::uint64_t bytes = 0;
  for (const AnchorFile& file : files) bytes += file.bytes;
  std::vector<double> ratios;
  for (std::size_t i = 0; i < kedge_seconds.size(); ++i) {
    ratios.push_back(plain_seconds[i] / kedge_seconds[i]);
  }
  const auto gb = [&](double seconds) {
    return static_cast<double>(bytes) / seconds / 1e9;
  };
  const double low = *std::min_element(ratios.begin(), ratios.end());
  const double high = *std::max_element(ratios.begin(), ratios.end());
  std::printf(options.json
                  ? "{\"ranks\": %u, \"files\": %zu, \"bytes\": %" PRIu64
                    ", \"median_kedge_gb_per_s\": %.3f, "
                    "\"median_plain_gb_per_s\": %.3f, \"median_ratio\": %.3f, "
                    "\"min_ratio\": %.3f, \"max_ratio\": %.3f}\n"
                  : "%u ranks, %zu files, %" PRIu64
                    " bytes: kedge %.3f GB/s, plain %.3f GB/s, ratio of a pair "
                    "%.3f (%.3f to %.3f)\n",
              options.ranks, files.size(), bytes, gb(Median(kedge_seconds)),
              gb(Median(plain_seconds)), Median(ratios), low, high);
  return absl::OkStatus();
}

bool ParseOptions(int argc, char** argv, Options* options) {
  for (int i = 1; i < argc; ++i) {
    const absl::string_view flag = argv[i];
    if (flag == "--json") {
      options->json = true;
      continue;
    }
    if (++i == argc) return false;
    absl::string_view value = argv[i];
    bool ok = false;
    if (flag == "--ranks") {
      ok = absl::SimpleAtoi(value, &options->ranks) && options->ranks >= 1 &&
           options->ranks <= 64;
    } else if (flag == "--pairs") {
      ok = absl::SimpleAtoi(value, &options->pairs) && options->pairs >= 1;
    } else if (flag == "--bytes") {
      int shift = 0;
      if (absl::ConsumeSuffix(&value, "GiB")) shift = 30;
      if (absl::ConsumeSuffix(&value, "MiB")) shift = 20;
      ok = absl::SimpleAtoi(value, &options->bytes) &&
           options->bytes <= (std::uint64_t{1} << 40) >> shift;
      options->bytes <<= shift;
      ok = ok && options->bytes >= 2 * kPieceBytes;
    }
    if (!ok) return false;
  }
  return true;
}

int Main(int argc, char** argv) {
  Options options;
  if (!ParseOptions(argc, argv, &options)) {
    std::fprintf(stderr,
                 "usage: %s [--ranks N] [--bytes N[GiB|MiB]] [--pairs P] "
                 "[--json]\n",
                 argv[0]);
    return 2;
  }
  const char* parent = std::getenv("KEDGE_BENCH_DIR");
  if (parent == nullptr || *parent == '\0') parent = std::getenv("HOME");
  if (parent == nullptr || *parent == '\0') parent = ".";
  std::string directory = JoinPath(parent, "kedge-ranks-bench-XXXXXX");
  if (mkdtemp(directory.data()) == nullptr) {
    std::perror(directory.c_str());
    return 1;
  }
  const absl::Status status = Run(options, directory);
  std::filesystem::remove_all(directory);
  if (status.ok()) return 0;
  std::fprintf(stderr, "kedge_ranks_bench: %s\n",
               std::string(status.message()).c_str());
  return 1;
}

}  // namespace
}  // namespace kedge

int main(int argc, char** argv) { return kedge::Main(argc, argv); }
