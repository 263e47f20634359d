// Times kedge's codec on two given weight files, for comparison with other
// programs that run beside it (scripts/compare_peers.py).
//
//   kedge_peer_bench OLD NEW [--rows R] [--repeat N] [--serve]
//
// OLD and NEW are raw bf16 files of one tensor with R rows (default 1). Prints
// one JSON object with the best of N (default 5) repetitions of each task, in
// seconds of the thread's own time, and sizes. With --serve it reads task names
// from standard input, one a line, and answers each with the seconds of one
// repetition, so that a caller can take turns with it:
//
//   diff_encode  compare OLD and NEW, encode, L(record)
//   apply        decode, check and add into a copy of OLD (then compared)
//   l61          L61 of NEW
//   read, read_two, copy   what memory allows
//   sizes        answers {"bytes": ..., "nnz": ...}

#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <new>
#include <string>
#include <vector>

#include "kedge/bench/memory_ceiling.h"
#include "kedge/engine/cpu/l61_sum.h"
#include "kedge/engine/cpu/record_apply.h"
#include "kedge/engine/cpu/slice_encoder.h"

namespace kedge {
namespace {

double ThreadSeconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * now.tv_nsec;
}

[[noreturn]] void Die(const std::string& what) {
  std::fprintf(stderr, "kedge_peer_bench: %s\n", what.c_str());
  std::exit(2);
}

// Memory in huge pages where the machine grants them: what numpy, with which
// this program is compared, asks for its arrays too.
template <typename T>
struct HugePages {
  using value_type = T;
  HugePages() = default;
  template <typename U>
  HugePages(const HugePages<U>&) {}
  T* allocate(std::size_t count) {
    constexpr std::size_t kPage = std::size_t{2} << 20;
    const std::size_t bytes = (count * sizeof(T) + kPage - 1) / kPage * kPage;
    void* const memory = std::aligned_alloc(kPage, bytes);
    if (memory == nullptr) throw std::bad_alloc();
    madvise(memory, bytes, MADV_HUGEPAGE);  // a refusal costs time alone
    return static_cast<T*>(memory);
  }
  void deallocate(T* memory, std::size_t) { std::free(memory); }
  template <typename U>
  bool operator==(const HugePages<U>&) const {
    return true;
  }
};
using Weights = std::vector<std::byte, HugePages<std::byte>>;

Weights ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file) Die(path + ": cannot open");
  Weights bytes(static_cast<std::size_t>(file.tellg()));
  file.seekg(0);
  file.read(reinterpret_cast<char*>(bytes.data()),
            static_cast<std::streamsize>(bytes.size()));
  if (!file) Die(path + ": cannot read");
  return bytes;
}

class PeerBench {
 public:
  PeerBench(Weights old_bytes, Weights new_bytes, std::uint64_t rows)
      : old_(std::move(old_bytes)),
        new_(std::move(new_bytes)),
        weights_(old_),
        encoder_(key_),
        summer_(key_) {
    const std::uint64_t units = old_.size() / 2;
    if (units == 0 || old_.size() != new_.size() || old_.size() % 2 != 0 ||
        rows == 0 || units % rows != 0 || units > kMaxSliceUnits) {
      Die("expected two files of the same size, whole rows of 2-byte "
          "elements, at most 2^27 of them");
    }
    grid_ = MakeTileGrid(std::vector<std::uint64_t>{rows, units / rows}, 1);
    slice_ = {0, units};
    DiffEncode();  // the record that the other tasks use
  }

  // The seconds of one repetition; negative if `task` is unknown.
  double Run(const std::string& task) {
    if (task == "apply") {
      std::memcpy(weights_.data(), old_.data(), old_.size());
      const double seconds = Time([&] { Apply(); });
      if (weights_ != new_) Die("apply did not give NEW");
      return seconds;
    }
    if (task == "diff_encode") return Time([&] { DiffEncode(); });
    if (task == "l61") return Time([&] { sink_ = summer_.Sum(0, new_); });
    if (task == "read") {
      return Time([&] { sink_ = ReadOneArray(old_.data(), old_.size()); });
    }
    if (task == "read_two") {
      return Time([&] {
        sink_ = ReadTwoArrays(old_.data(), new_.data(), old_.size());
      });
    }
    if (task == "copy") {
      return Time(
          [&] { std::memcpy(weights_.data(), old_.data(), old_.size()); });
    }
    return -1;
  }
  std::string Sizes() const {
    return "{\"bytes\": " + std::to_string(encoded_.record_bytes) +
           ", \"nnz\": " + std::to_string(encoded_.nnz) + "}";
  }

 private:
  template <typename Task>
  static double Time(Task&& task) {
    const double start = ThreadSeconds();
    task();
    return ThreadSeconds() - start;
  }
  void DiffEncode() {
    record_.clear();
    encoded_ =
        encoder_.Encode(grid_, slice_, 2, old_.data(), new_.data(), &record_);
    // A segment's tail.
    record_.resize(record_.size() + kRecordSlackBytes);
  }
  void Apply() {
    if (encoded_.nnz == 0) return;
    BoxTarget box;
    box.data = weights_.data();
    box.row_end = grid_.rows;
    box.col_end = grid_.cols;
    box.row_stride_bytes = static_cast<std::int64_t>(2 * grid_.cols);
    box.col_stride_bytes = 2;
    box.unit_bytes = 2;
    const auto written =
        ApplyRecord(std::span(record_).first(encoded_.record_bytes), grid_,
                    slice_, 2, {&box, 1});
    if (!written.ok()) Die(std::string(written.status().message()));
  }

  const L61Key key_ = L61Key::FromSeed(1);
  Weights old_;
  Weights new_;
  Weights weights_;
  std::vector<std::byte> record_;
  SliceEncoder encoder_;
  L61Summer summer_;
  TileGrid grid_;
  UnitRange slice_;
  EncodedSlice encoded_;
  volatile std::uint64_t sink_ = 0;
};

int Main(int argc, char** argv) {
  std::vector<std::string> files;
  std::uint64_t rows = 1;
  int repeat = 5;
  bool serve = false;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--serve") {
      serve = true;
    } else if (argument == "--rows" && i + 1 < argc) {
      rows = std::strtoull(argv[++i], nullptr, 10);
    } else if (argument == "--repeat" && i + 1 < argc) {
      repeat = std::max(1, std::atoi(argv[++i]));
    } else if (argument.substr(0, 2) == "--") {
      Die("unknown or incomplete option " + argument);
    } else {
      files.push_back(argument);
    }
  }
  if (files.size() != 2) {
    Die("usage: kedge_peer_bench OLD NEW [--rows R] [--repeat N] [--serve]");
  }
  PeerBench bench(ReadFile(files[0]), ReadFile(files[1]), rows);
  if (serve) {
    std::string task;
    while (std::getline(std::cin, task)) {
      if (task == "sizes") {
        std::printf("%s\n", bench.Sizes().c_str());
      } else {
        std::printf("%.9f\n", bench.Run(task));
      }
      std::fflush(stdout);
    }
    return 0;
  }
  std::printf("{\"sizes\": %s", bench.Sizes().c_str());
  for (const char* task :
       {"diff_encode", "apply", "l61", "read", "read_two", "copy"}) {
    double best = bench.Run(task);
    for (int i = 1; i < repeat; ++i) best = std::min(best, bench.Run(task));
    std::printf(", \"%s_seconds\": %.9f", task, best);
  }
  std::printf("}\n");
  return 0;
}

}  // namespace
}  // namespace kedge

int main(int argc, char** argv) { return kedge::Main(argc, argv); }
