// How fast the encoder and the quantiser are beside a read-only pass over the
// same memory. For tuning; bench/ has the measurements that count.
//
//   kernel_speed [GiB of old] [rows] [cols]

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "kedge/engine/cuda/quantise.h"
#include "kedge/engine/cuda/tile_encode.h"
#include "kedge/format/l61.h"

namespace {

void Must(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

__device__ std::uint64_t Mix(std::uint64_t x) { return kedge::SplitMix64(x); }

// bf16 around 0.02; `density` in parts of 2^32 changes, one in ten by 2 to 9.
__global__ void FillKernel(std::uint16_t* before, std::uint16_t* after,
                           std::uint64_t count, std::uint64_t density) {
  for (std::uint64_t i = blockIdx.x * std::uint64_t{blockDim.x} + threadIdx.x;
       i < count; i += std::uint64_t{gridDim.x} * blockDim.x) {
    const std::uint64_t r = Mix(i * 2 + 1);
    const auto value =
        static_cast<std::uint16_t>((r & 0x8000) | (0x3c00 + (r & 0x0eff)));
    before[i] = value;
    std::uint16_t next = value;
    if ((r >> 32) < density) {
      const std::uint64_t q = Mix(r);
      const int by = q % 10 == 0 ? 2 + static_cast<int>(q >> 8 & 7) : 1;
      next = static_cast<std::uint16_t>(q >> 63 ? value + by : value - by);
    }
    after[i] = next;
  }
}

// Counts vectors that differ: the ceiling.
__global__ void __launch_bounds__(256)
    ReadKernel(const uint4* before, const uint4* after, std::uint64_t vectors,
               unsigned long long* differ) {
  const std::uint64_t begin = blockIdx.x * std::uint64_t{2048} + threadIdx.x;
  uint4 o[8];
  uint4 n[8];
  int count = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const std::uint64_t at = begin + 256 * (4 * half + i);
      o[i] = at < vectors ? __ldcs(before + at) : uint4{};
      n[i] = at < vectors ? __ldcs(after + at) : uint4{};
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      count += ((o[i].x ^ n[i].x) | (o[i].y ^ n[i].y) | (o[i].z ^ n[i].z) |
                (o[i].w ^ n[i].w)) != 0;
    }
  }
  count = __reduce_add_sync(0xffffffffu, count);
  if (count > 0 && threadIdx.x % 32 == 0) {
    atomicAdd(differ, static_cast<unsigned long long>(count));
  }
}

template <typename Launch>
double MedianMs(Launch launch) {
  cudaEvent_t a;
  cudaEvent_t b;
  Must(cudaEventCreate(&a), "event");
  Must(cudaEventCreate(&b), "event");
  std::vector<float> times;
  for (int i = 0; i < 13; ++i) {
    Must(cudaEventRecord(a, nullptr), "record");
    launch();
    Must(cudaEventRecord(b, nullptr), "record");
    Must(cudaEventSynchronize(b), "kernel");
    float ms = 0;
    Must(cudaEventElapsedTime(&ms, a, b), "time");
    if (i >= 2) times.push_back(ms);
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
  const double gib = argc > 1 ? std::atof(argv[1]) : 2;
  const std::uint64_t rows = argc > 2 ? std::atoll(argv[2]) : 4096;
  const std::uint64_t cols = argc > 3 ? std::atoll(argv[3]) : 2048;
  const auto matrices = static_cast<std::uint64_t>(
      std::max(1.0, gib * (std::uint64_t{1} << 30) / (2.0 * rows * cols)));
  const std::uint64_t count = matrices * rows * cols;
  std::uint16_t* before;
  std::uint16_t* after;
  Must(cudaMalloc(&before, 2 * count), "malloc");
  Must(cudaMalloc(&after, 2 * count), "malloc");

  const kedge::L61Key key = kedge::L61Key::FromSeed(1);
  std::vector<std::uint64_t> a(kedge::kL61TileWords);
  for (std::uint32_t t = 0; t < a.size(); ++t) a[t] = key.A(t);
  std::uint64_t* table;
  Must(cudaMalloc(&table, 8 * a.size()), "malloc");
  Must(cudaMemcpy(table, a.data(), 8 * a.size(), cudaMemcpyHostToDevice),
       "copy");

  const std::vector<std::uint64_t> shape = {rows, cols};
  std::vector<kedge::EncodeSlice> slices;
  kedge::EncodeBatch batch;
  for (std::uint64_t m = 0; m < matrices; ++m) {
    kedge::EncodeSlice slice;
    slice.grid = kedge::MakeTileGrid(shape, 1);
    slice.slice = {0, rows * cols};
    slice.old_units = {
        reinterpret_cast<const std::byte*>(before + m * rows * cols),
        0,
        static_cast<std::int64_t>(2 * cols),
        2,
        2,
        1};
    slice.new_units = slice.old_units;
    slice.new_units.base =
        reinterpret_cast<const std::byte*>(after + m * rows * cols);
    slice.first_tile = batch.tile_count;
    batch.tile_count += slice.grid.tile_count();
    slices.push_back(slice);
  }
  kedge::EncodeSlice* slice_table;
  Must(cudaMalloc(&slice_table, slices.size() * sizeof(slices[0])), "malloc");
  Must(cudaMemcpy(slice_table, slices.data(), slices.size() * sizeof(slices[0]),
                  cudaMemcpyHostToDevice),
       "copy");
  batch.slices = slice_table;
  batch.slice_count = static_cast<std::uint32_t>(slices.size());
  batch.arena_bytes = 2 * count + (std::uint64_t{64} << 20);
  Must(cudaMalloc(&batch.tiles, batch.tile_count * sizeof(kedge::EncodedTile)),
       "malloc");
  Must(cudaMalloc(&batch.arena, batch.arena_bytes), "malloc");
  Must(cudaMalloc(&batch.totals, sizeof(kedge::EncodeTotals)), "malloc");
  Must(cudaMalloc(&batch.scratch, 4 * batch.tile_count), "malloc");
  batch.l61 = {table, key};
  unsigned long long* differ;
  Must(cudaMalloc(&differ, 8), "malloc");

  std::printf("%llu matrices of %llu x %llu bf16, old + new %.2f GB\n",
              static_cast<unsigned long long>(matrices),
              static_cast<unsigned long long>(rows),
              static_cast<unsigned long long>(cols), 4e-9 * count);
  for (const double density : {0.0, 0.001, 0.01, 0.03, 0.07, 0.15, 1.0}) {
    FillKernel<<<1056, 256>>>(before, after, count,
                              static_cast<std::uint64_t>(density * 4294967296));
    Must(cudaDeviceSynchronize(), "fill");
    const std::uint64_t vectors = count / 8;
    const double read = MedianMs([&] {
      const auto blocks = static_cast<std::uint32_t>((vectors + 2047) / 2048);
      ReadKernel<<<blocks, 256>>>(reinterpret_cast<const uint4*>(before),
                                  reinterpret_cast<const uint4*>(after),
                                  vectors, differ);
    });
    const double encode = MedianMs(
        [&] { Must(kedge::LaunchEncode(batch, nullptr), "LaunchEncode"); });
    kedge::EncodeTotals totals;
    Must(cudaMemcpy(&totals, batch.totals, sizeof(totals),
                    cudaMemcpyDeviceToHost),
         "copy");
    std::printf(
        "density %6.3f %%: read-only %.3f ms %.2f TB/s; encode %.3f ms %.2f "
        "TB/s, %.1f %% of it; nnz %llu, heavy tiles %u, %llu bytes\n",
        100 * density, read, 4e-9 * count / read, encode, 4e-9 * count / encode,
        100 * read / encode, static_cast<unsigned long long>(totals.nnz),
        totals.heavy_tiles,
        static_cast<unsigned long long>(totals.arena_bytes));
  }

  kedge::QuantiseTask task;
  task.source = reinterpret_cast<const std::byte*>(before);
  task.source_row_stride_bytes = static_cast<std::int64_t>(2 * cols);
  task.rows = matrices * rows;
  task.cols = cols;
  task.values = reinterpret_cast<std::byte*>(after);
  Must(cudaMalloc(&task.scales, 4 * (task.rows / 128 + 1) * (cols / 128 + 1)),
       "malloc");
  kedge::QuantiseTask* task_table;
  Must(cudaMalloc(&task_table, sizeof(task)), "malloc");
  Must(cudaMemcpy(task_table, &task, sizeof(task), cudaMemcpyHostToDevice),
       "copy");
  kedge::QuantiseBatch quantise;
  quantise.tasks = task_table;
  quantise.task_count = 1;
  quantise.block_count = (task.rows + 127) / 128 * ((task.cols + 127) / 128);
  quantise.floor = 1e-12f;
  quantise.first_bad_block = reinterpret_cast<std::uint64_t*>(differ);
  for (const auto kind :
       {kedge::ScaleKind::kExact, kedge::ScaleKind::kPowerOfTwo}) {
    quantise.scale_kind = kind;
    const double ms = MedianMs([&] {
      Must(kedge::LaunchQuantise(quantise, nullptr), "LaunchQuantise");
    });
    std::printf("quantise, %s scales: %.3f ms, %.2f TB/s read + written\n",
                kind == kedge::ScaleKind::kExact ? "exact" : "power-of-two", ms,
                3e-9 * count / ms);
  }
  return 0;
}
