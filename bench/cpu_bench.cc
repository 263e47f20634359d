// How fast one core diffs, encodes, applies, checks and sums, each beside the
// memory rate that limits it, measured in the same run.
//
//   kedge_bench [Google Benchmark's flags]
//
// Rates count the bytes of one side (elements x element size). `of_ceiling` is
// the row's rate divided by its limit: reading two arrays for diff + encode,
// reading one for sums and checks, copying for apply. Arrays are 64 Mi elements
// of one tensor, far beyond the caches; times are of the thread's own cycles,
// so that other programs on the machine count little.

#include <time.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "benchmark/benchmark.h"
#include "kedge/bench/memory_ceiling.h"
#include "kedge/engine/cpu/l61_sum.h"
#include "kedge/engine/cpu/record_apply.h"
#include "kedge/engine/cpu/slice_encoder.h"
#include "kedge/format/status.h"

namespace kedge {
namespace {

constexpr std::uint64_t kElements = std::uint64_t{1} << 26;
constexpr std::uint64_t kCols = 8192;

double ThreadSeconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * now.tv_nsec;
}

// Old and new bits of one tensor and the record between them. Only the newest
// is kept: each is 256 MiB and more.
struct Data {
  std::uint32_t unit_bytes = 0;
  std::uint64_t nnz_ppm = 0;
  TileGrid grid;
  std::vector<std::byte> old_bytes;
  std::vector<std::byte> new_bytes;
  std::vector<std::byte> record;  // with its slack
  EncodedSlice encoded;

  UnitRange slice() const { return {0, grid.unit_count()}; }
  std::uint64_t bytes() const { return grid.unit_count() * unit_bytes; }
  std::span<const std::byte> record_bytes() const {
    return std::span(record).first(encoded.record_bytes);
  }
};

const L61Key& Key() {
  static const L61Key key = L61Key::FromSeed(1);
  return key;
}

// Random weights, of which nnz_ppm in a million change by one step of their
// last place, one in sixteen of those by up to eight.
const Data& MakeData(std::uint32_t unit_bytes, std::uint64_t nnz_ppm) {
  static Data data;
  if (data.unit_bytes == unit_bytes && data.nnz_ppm == nnz_ppm) return data;
  const std::vector<std::uint64_t> shape = {kElements / kCols, kCols};
  std::mt19937_64 rng(nnz_ppm + unit_bytes);
  data.unit_bytes = unit_bytes;
  data.nnz_ppm = nnz_ppm;
  data.grid = MakeTileGrid(shape, 1);
  data.old_bytes.resize(data.bytes());
  for (std::size_t i = 0; i < data.old_bytes.size(); i += 8) {
    const std::uint64_t value = rng();
    std::memcpy(data.old_bytes.data() + i, &value, 8);
  }
  data.new_bytes = data.old_bytes;
  std::geometric_distribution<std::uint64_t> gap(static_cast<double>(nnz_ppm) *
                                                 1e-6);
  for (std::uint64_t i = gap(rng); i < kElements; i += 1 + gap(rng)) {
    std::byte* const at = data.new_bytes.data() + i * unit_bytes;
    std::uint32_t value = 0;
    std::memcpy(&value, at, unit_bytes);
    const std::uint32_t by =
        rng() % 16 == 0 ? 1 + static_cast<std::uint32_t>(rng() % 8) : 1;
    value = rng() % 2 == 0 ? value + by : value - by;
    std::memcpy(at, &value, unit_bytes);
  }
  data.record.clear();
  SliceEncoder encoder(Key());
  data.encoded =
      encoder.Encode(data.grid, data.slice(), unit_bytes, data.old_bytes.data(),
                     data.new_bytes.data(), &data.record);
  data.record.resize(data.record.size() + kRecordSlackBytes);
  return data;
}

enum class Ceiling { kRead, kReadTwo, kCopy };

void RunCeiling(Ceiling ceiling, Data& data) {
  switch (ceiling) {
    case Ceiling::kRead:
      benchmark::DoNotOptimize(
          ReadOneArray(data.old_bytes.data(), data.bytes()));
      break;
    case Ceiling::kReadTwo:
      benchmark::DoNotOptimize(ReadTwoArrays(
          data.old_bytes.data(), data.new_bytes.data(), data.bytes()));
      break;
    case Ceiling::kCopy:
      std::memcpy(data.new_bytes.data(), data.old_bytes.data(), data.bytes());
      benchmark::ClobberMemory();
      break;
  }
}

// Bytes of one side a second, the best of five, measured once a run.
double CeilingRate(Ceiling ceiling) {
  static std::map<Ceiling, double> rates;
  double& rate = rates[ceiling];
  if (rate > 0) return rate;
  Data data;
  data.unit_bytes = 2;
  data.grid =
      MakeTileGrid(std::vector<std::uint64_t>{kElements / kCols, kCols}, 1);
  data.old_bytes.assign(data.bytes(), std::byte{1});
  data.new_bytes.assign(data.bytes(), std::byte{2});
  for (int i = 0; i < 5; ++i) {
    const double start = ThreadSeconds();
    RunCeiling(ceiling, data);
    rate = std::max(
        rate, static_cast<double>(data.bytes()) / (ThreadSeconds() - start));
  }
  return rate;
}

void Report(benchmark::State& state, const Data& data, Ceiling ceiling) {
  const double bytes = static_cast<double>(data.bytes()) *
                       static_cast<double>(state.iterations());
  state.SetBytesProcessed(static_cast<std::int64_t>(bytes));
  state.counters["of_ceiling"] = benchmark::Counter(
      bytes / CeilingRate(ceiling), benchmark::Counter::kIsRate);
  state.counters["record_bytes"] =
      static_cast<double>(data.encoded.record_bytes);
}

void DiffEncode(benchmark::State& state, std::uint32_t unit_bytes,
                std::uint64_t nnz_ppm) {
  CeilingRate(Ceiling::kReadTwo);
  const Data& data = MakeData(unit_bytes, nnz_ppm);
  SliceEncoder encoder(Key());
  std::vector<std::byte> out;
  for (auto _ : state) {
    out.clear();
    const EncodedSlice encoded =
        encoder.Encode(data.grid, data.slice(), unit_bytes,
                       data.old_bytes.data(), data.new_bytes.data(), &out);
    KEDGE_CHECK(encoded.nnz == data.encoded.nnz);
  }
  Report(state, data, Ceiling::kReadTwo);
}

void DecodeApply(benchmark::State& state, std::uint32_t unit_bytes,
                 std::uint64_t nnz_ppm) {
  CeilingRate(Ceiling::kCopy);
  const Data& data = MakeData(unit_bytes, nnz_ppm);
  // Applied again and again: differences add up modulo 2^w, at the same cost.
  std::vector<std::byte> weights = data.old_bytes;
  BoxTarget box;
  box.data = weights.data();
  box.row_end = data.grid.rows;
  box.col_end = data.grid.cols;
  box.row_stride_bytes = static_cast<std::int64_t>(data.grid.cols * unit_bytes);
  box.col_stride_bytes = unit_bytes;
  box.unit_bytes = unit_bytes;
  for (auto _ : state) {
    const auto written = ApplyRecord(data.record_bytes(), data.grid,
                                     data.slice(), unit_bytes, {&box, 1});
    KEDGE_CHECK(written.ok() && *written == data.encoded.nnz);
  }
  Report(state, data, Ceiling::kCopy);
}

void Check(benchmark::State& state, std::uint32_t unit_bytes,
           std::uint64_t nnz_ppm) {
  const Data& data = MakeData(unit_bytes, nnz_ppm);
  for (auto _ : state) {
    const auto summary = CheckRecord(data.record_bytes(), data.grid,
                                     data.slice(), unit_bytes, Key());
    KEDGE_CHECK(summary.ok() && summary->l61 == data.encoded.l61);
  }
  Report(state, data, Ceiling::kRead);
}

void L61Sum(benchmark::State& state) {
  CeilingRate(Ceiling::kRead);
  const Data& data = MakeData(2, 18700);
  const L61Summer summer(Key());
  for (auto _ : state) {
    benchmark::DoNotOptimize(summer.Sum(0, data.old_bytes));
  }
  Report(state, data, Ceiling::kRead);
}

void Limit(benchmark::State& state, Ceiling ceiling) {
  Data data;
  data.unit_bytes = 2;
  data.grid =
      MakeTileGrid(std::vector<std::uint64_t>{kElements / kCols, kCols}, 1);
  data.old_bytes.assign(data.bytes(), std::byte{1});
  data.new_bytes.assign(data.bytes(), std::byte{2});
  for (auto _ : state) RunCeiling(ceiling, data);
  Report(state, data, ceiling);
}

void RegisterAll() {
  const auto add = [](const std::string& name, auto&& function) {
    benchmark::RegisterBenchmark(name.c_str(), function)
        ->Unit(benchmark::kMillisecond);
  };
  const std::string elements = absl::StrCat("/elements:", kElements);
  add(absl::StrCat("BM_ReadOneArray/bf16", elements),
      [](benchmark::State& state) { Limit(state, Ceiling::kRead); });
  add(absl::StrCat("BM_ReadTwoArrays/bf16", elements),
      [](benchmark::State& state) { Limit(state, Ceiling::kReadTwo); });
  add(absl::StrCat("BM_Copy/bf16", elements),
      [](benchmark::State& state) { Limit(state, Ceiling::kCopy); });
  add(absl::StrCat("BM_L61Sum/bf16", elements), L61Sum);
  const std::pair<const char*, std::uint32_t> dtypes[] = {
      {"bf16", 2}, {"f8_e4m3", 1}, {"f32", 4}};
  for (const auto& [dtype, unit_bytes] : dtypes) {
    for (const std::uint64_t ppm : {100, 1000, 7700, 18700, 46400, 300000}) {
      if (unit_bytes != 2 && ppm != 18700) continue;
      const std::string name =
          absl::StrCat("/", dtype, elements, "/nnz_ppm:", ppm);
      const std::uint32_t width = unit_bytes;
      add("BM_DiffEncode" + name, [width, ppm](benchmark::State& state) {
        DiffEncode(state, width, ppm);
      });
      add("BM_DecodeApply" + name, [width, ppm](benchmark::State& state) {
        DecodeApply(state, width, ppm);
      });
      add("BM_CheckRecord" + name,
          [width, ppm](benchmark::State& state) { Check(state, width, ppm); });
    }
  }
}

}  // namespace
}  // namespace kedge

int main(int argc, char** argv) {
  kedge::RegisterAll();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
