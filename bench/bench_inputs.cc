#include "kedge/bench/bench_inputs.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <numbers>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kedge/format/l61.h"
#include "kedge/format/limits.h"
#include "kedge/format/status.h"

namespace kedge {
namespace {

using Clock = std::chrono::steady_clock;

class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(SplitMix64(seed)) {}
  std::uint64_t Bits() {
    state_ += 0x9e3779b97f4a7c15u;
    return SplitMix64(state_);
  }
  // In (0, 1].
  double Uniform() { return (static_cast<double>(Bits() >> 11) + 1) * 0x1p-53; }

 private:
  std::uint64_t state_;
};

// Normal numbers of standard deviation 0.02, in no order.
const std::vector<float>& Normals() {
  static const std::vector<float>& table = *new std::vector<float>([] {
    Random random(0x6b65646765);
    std::vector<float> values(1 << 16);
    for (std::size_t i = 0; i < values.size(); i += 2) {
      // Box and Muller's transform.
      const double radius = 0.02 * std::sqrt(-2 * std::log(random.Uniform()));
      const double angle = 2 * std::numbers::pi * random.Uniform();
      values[i] = static_cast<float>(radius * std::cos(angle));
      values[i + 1] = static_cast<float>(radius * std::sin(angle));
    }
    return values;
  }());
  return table;
}

constexpr std::uint64_t kFillBlock = 1 << 20;

// Calls fill(begin, end, random) for blocks of [0, count), each with random
// numbers of its own, so that the number of threads changes nothing.
template <typename Fill>
void ByBlocks(std::uint64_t count, std::uint64_t seed, const Fill& fill) {
  const std::uint64_t blocks = (count + kFillBlock - 1) / kFillBlock;
  InParallel(blocks, [&](std::uint64_t first, std::uint64_t last) {
    for (std::uint64_t block = first; block < last; ++block) {
      Random random(seed * 0x2545f4914f6cdd1du + block);
      fill(block * kFillBlock, std::min(count, (block + 1) * kFillBlock),
           random);
    }
  });
}

absl::Status Errno(const std::string& path, const char* call, int error) {
  return absl::UnavailableError(
      absl::StrCat(path, ": ", call, ": ", std::strerror(error)));
}

}  // namespace

void InParallel(std::uint64_t count,
                const std::function<void(std::uint64_t, std::uint64_t)>& body) {
  const std::uint64_t threads =
      std::max<std::uint64_t>(1, std::thread::hardware_concurrency());
  // More parts than threads, so that one slow core does not decide.
  const std::uint64_t parts = std::min(count, 8 * threads);
  std::atomic<std::uint64_t> next = 0;
  const auto work = [&] {
    for (std::uint64_t part = next++; part < parts; part = next++) {
      body(count * part / parts, count * (part + 1) / parts);
    }
  };
  std::vector<std::thread> others;
  for (std::uint64_t i = 1; i < std::min(threads, parts); ++i) {
    others.emplace_back(work);
  }
  work();
  for (std::thread& other : others) other.join();
}

void FillNormal(std::span<std::uint16_t> weights, std::uint64_t seed) {
  const std::vector<float>& normals = Normals();
  std::vector<std::uint16_t> table(normals.size());
  for (std::size_t i = 0; i < table.size(); ++i) {
    table[i] = static_cast<std::uint16_t>(
        __builtin_bit_cast(std::uint32_t, normals[i]) >> 16);
  }
  ByBlocks(weights.size(), seed,
           [&](std::uint64_t begin, std::uint64_t end, Random& random) {
             std::uint64_t bits = 0;
             for (std::uint64_t i = begin; i < end; ++i) {
               if ((i - begin) % 4 == 0) bits = random.Bits();
               weights[i] = table[bits & 0xffff];
               bits >>= 16;
             }
           });
}

void FillNormal(std::span<std::uint32_t> weights, std::uint64_t seed) {
  const std::vector<float>& normals = Normals();
  ByBlocks(weights.size(), seed,
           [&](std::uint64_t begin, std::uint64_t end, Random& random) {
             for (std::uint64_t i = begin; i < end; ++i) {
               const std::uint64_t bits = random.Bits();
               weights[i] =
                   __builtin_bit_cast(std::uint32_t, normals[bits & 0xffff]) ^
                   static_cast<std::uint32_t>(bits >> 58);
             }
           });
}

template <typename Unit>
std::uint64_t Perturb(std::span<Unit> units, double density,
                      std::uint64_t seed) {
  if (density <= 0) return 0;
  // Gaps between independent changes are geometric; with a table of logarithms
  // one takes a few nanoseconds.
  static const std::vector<float>& logs = *new std::vector<float>([] {
    std::vector<float> table(1 << 16);
    for (std::size_t i = 0; i < table.size(); ++i) {
      table[i] = static_cast<float>(
          std::log((static_cast<double>(i) + 0.5) / 65536.0));
    }
    return table;
  }());
  const auto scale =
      static_cast<float>(density >= 1 ? 0 : 1 / std::log1p(-density));
  std::atomic<std::uint64_t> total = 0;
  ByBlocks(units.size(), seed,
           [&](std::uint64_t begin, std::uint64_t end, Random& random) {
             std::uint64_t mine = 0;
             for (std::uint64_t i = begin;; ++i) {
               const std::uint64_t bits = random.Bits();
               i += static_cast<std::uint64_t>(logs[bits & 0xffff] * scale);
               if (i >= end) break;
               // 0.9 of 4096 is 3686.
               const bool one = ((bits >> 16) & 0xfff) < 3686;
               const auto more = static_cast<std::uint32_t>(
                   std::countr_zero((bits >> 28) | (1u << 12)));
               const std::uint32_t size = one ? 1 : 2 + more;
               units[i] = static_cast<Unit>(
                   (bits >> 63) != 0 ? units[i] + size : units[i] - size);
               ++mine;
             }
             total += mine;
           });
  return total;
}
template std::uint64_t Perturb<std::uint8_t>(std::span<std::uint8_t>, double,
                                             std::uint64_t);
template std::uint64_t Perturb<std::uint16_t>(std::span<std::uint16_t>, double,
                                              std::uint64_t);
template std::uint64_t Perturb<std::uint32_t>(std::span<std::uint32_t>, double,
                                              std::uint64_t);

double EntropyOfPerturb(double density) {
  if (density <= 0 || density >= 1) return 0;
  const double where =
      -density * std::log2(density) - (1 - density) * std::log2(1 - density);
  // A sign; one or more; and then two bits, as a geometric distribution has.
  const double what = 1 - 0.9 * std::log2(0.9) - 0.1 * std::log2(0.1) + 0.1 * 2;
  return where + density * what;
}

std::string KernelDriver() {
  std::string text(512, '\0');
  const int file = open("/proc/driver/nvidia/version", O_RDONLY | O_CLOEXEC);
  if (file < 0) return "";
  const ssize_t size = read(file, text.data(), text.size());
  close(file);
  text.resize(size > 0 ? static_cast<std::size_t>(size) : 0);
  return text.substr(0, text.find('\n'));
}

absl::StatusOr<double> PlainWrite(const std::string& directory,
                                  std::span<const std::uint64_t> sizes,
                                  std::span<const std::byte> bytes) {
  KEDGE_CHECK(bytes.size() >= kPieceBytes);
  struct Piece {
    std::size_t file;
    std::uint64_t offset;
    std::uint64_t bytes;
  };
  std::vector<Piece> pieces;
  std::uint64_t longest = 0;
  for (const std::uint64_t size : sizes) longest = std::max(longest, size);
  for (std::uint64_t offset = 0; offset < longest; offset += kPieceBytes) {
    for (std::size_t f = 0; f < sizes.size(); ++f) {
      if (offset >= sizes[f]) continue;
      pieces.push_back({f, offset, std::min(kPieceBytes, sizes[f] - offset)});
    }
  }

  const Clock::time_point start = Clock::now();
  if (mkdir(directory.c_str(), 0755) != 0) {
    return Errno(directory, "mkdir", errno);
  }
  std::vector<int> files;
  std::atomic<int> error = 0;
  for (std::size_t f = 0; f < sizes.size(); ++f) {
    const std::string path = absl::StrCat(directory, "/plain-", f);
    files.push_back(
        open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
    if (files.back() < 0) error = errno;
  }
  const auto on_threads = [&](std::size_t count, const auto& body) {
    constexpr int kThreads = 8;
    std::atomic<std::size_t> next = 0;
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back([&] {
        for (std::size_t at = next++; at < count && error == 0; at = next++) {
          errno = 0;
          if (!body(at)) error = errno != 0 ? errno : EIO;
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  };
  const std::uint64_t places = bytes.size() / kPieceBytes;
  on_threads(pieces.size(), [&](std::size_t at) {
    const Piece& piece = pieces[at];
    const int file = files[piece.file];
    const auto offset = static_cast<off_t>(piece.offset);
    if (pwrite(file, bytes.data() + at % places * kPieceBytes, piece.bytes,
               offset) != static_cast<ssize_t>(piece.bytes)) {
      return false;
    }
    sync_file_range(file, offset, static_cast<off_t>(piece.bytes),
                    SYNC_FILE_RANGE_WRITE);
    return true;
  });
  on_threads(files.size(),
             [&](std::size_t at) { return fsync(files[at]) == 0; });
  for (const int file : files) {
    if (file >= 0 && close(file) != 0) error = errno;
  }
  const double seconds =
      std::chrono::duration<double>(Clock::now() - start).count();
  if (error != 0) {
    return Errno(directory, "open, pwrite, fsync or close", error);
  }
  return seconds;
}

}  // namespace kedge
