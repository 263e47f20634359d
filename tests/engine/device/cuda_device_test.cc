// Goal: what CudaDevice has beyond the seam: the caller's current GPU stays
// his, read-only file pages are sources, errors name device and call, indices
// of 64 bits where memory is large enough to need them. Method: one GPU, and
// two where there are two; all skip aloud without.

#include "kedge/engine/cuda/cuda_device.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "gtest/gtest.h"
#include "kedge/format/codec.h"
#include "kedge/format/l61.h"
#include "kedge/tests/engine/device/device_test_support.h"

namespace kedge {
namespace {

using testing::DeviceArray;
using testing::DeviceBuffer;
using testing::DeviceTest;
using testing::Download;
using testing::Must;

using CudaDeviceTest = DeviceTest;

TEST(CudaDeviceOpenTest, AnOrdinalThatIsNotThereIsRefused) {
  const int count = CudaDeviceCount();
  if (count == 0) GTEST_SKIP() << "no CUDA device";
  for (const int ordinal : {-1, count}) {
    const auto device = CudaDevice::Open(ordinal);
    ASSERT_FALSE(device.ok());
    EXPECT_EQ(device.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_TRUE(absl::StrContains(device.status().message(),
                                  absl::StrCat("cuda:", ordinal)))
        << device.status();
  }
}

TEST(CudaDeviceOpenTest, WithoutADriverOpenSaysSo) {
  if (CudaDeviceCount() > 0) GTEST_SKIP() << "there is a CUDA device";
  const auto device = CudaDevice::Open(0);
  ASSERT_FALSE(device.ok());
  EXPECT_TRUE(absl::StrContains(device.status().message(), "cuda:0"))
      << device.status();
}

TEST_F(CudaDeviceTest, NameSaysOrdinalAndModel) {
  EXPECT_TRUE(absl::StartsWith(device().name(), "cuda:0 (")) << device().name();
}

TEST_F(CudaDeviceTest, MemoryOfTheDeviceAndManagedMemoryAreItsOwn) {
  void* managed = nullptr;
  ASSERT_EQ(cudaMallocManaged(&managed, 100), cudaSuccess);
  EXPECT_TRUE(device().IsDeviceMemory(managed));
  EXPECT_TRUE(device().IsHostMemory(managed));
  EXPECT_EQ(cudaFree(managed), cudaSuccess);
  const auto again = Must(CudaDevice::Open(0));
  const DeviceMemory ours = Must(again->Allocate(MemoryKind::kDevice, 100));
  EXPECT_TRUE(device().IsDeviceMemory(ours.data()));
  EXPECT_FALSE(device().IsHostMemory(ours.data()));
  // Even where kernels can reach it.
  std::vector<std::byte> heap(std::size_t{1} << 20);
  EXPECT_FALSE(device().IsDeviceMemory(heap.data()));
  EXPECT_TRUE(device().IsHostMemory(heap.data()));
  ASSERT_EQ(cudaHostRegister(heap.data(), heap.size(), cudaHostRegisterDefault),
            cudaSuccess);
  EXPECT_FALSE(device().IsDeviceMemory(heap.data()));
  EXPECT_EQ(cudaHostUnregister(heap.data()), cudaSuccess);
  EXPECT_FALSE(device().IsDeviceMemory(heap.data()));
}

TEST_F(CudaDeviceTest, ErrorsNameDeviceAndCallAndDoNotStay) {
  const OwnedStream stream = Must(device().CreateStream());
  EncodeBatch batch;
  batch.tile_count = std::uint64_t{1} << 40;  // more than a launch takes
  DeviceArray<EncodeTotals> totals(device(), 1);
  DeviceArray<std::uint32_t> scratch(device(), 8);
  batch.totals = totals.data();
  batch.scratch = scratch.data();
  const absl::Status refused = device().Encode(batch, stream.get());
  EXPECT_EQ(refused.code(), absl::StatusCode::kInternal);
  EXPECT_TRUE(absl::StrContains(refused.message(), device().name())) << refused;
  EXPECT_TRUE(absl::StrContains(refused.message(), "Encode")) << refused;
  EXPECT_TRUE(absl::StrContains(refused.message(), "cudaErrorInvalidValue"))
      << refused;
  EXPECT_TRUE(device().WaitForStream(stream.get()).ok());
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

TEST_F(CudaDeviceTest, MappedFilePagesAreSources) {
  std::FILE* const file = std::tmpfile();
  ASSERT_NE(file, nullptr);
  std::vector<std::byte> bytes(3 << 20);
  std::mt19937_64 rng(1);
  testing::FillRandom(rng, bytes);
  ASSERT_EQ(std::fwrite(bytes.data(), 1, bytes.size(), file), bytes.size());
  ASSERT_EQ(std::fflush(file), 0);
  void* const mapped =
      mmap(nullptr, bytes.size(), PROT_READ, MAP_SHARED, fileno(file), 0);
  ASSERT_NE(mapped, MAP_FAILED);
  const absl::Status registered = device().RegisterHost(mapped, bytes.size());
  if (!registered.ok()) {
    // Where it does not work it says so, and copies still do.
    EXPECT_EQ(registered.code(), absl::StatusCode::kUnimplemented);
    std::printf("registering file pages: %s\n", registered.ToString().c_str());
  }
  DeviceBuffer buffer(device(), bytes.size());
  Must(device().Copy(buffer.data(), mapped, bytes.size(), nullptr));
  Must(device().WaitForStream(nullptr));
  EXPECT_TRUE(buffer.Read() == bytes);
  if (registered.ok()) device().UnregisterHost(mapped);
  munmap(mapped, bytes.size());
  std::fclose(file);
}

TEST_F(CudaDeviceTest, WorkOnOneGpuLeavesTheCallersCurrentOneAlone) {
  if (CudaDeviceCount() < 2) GTEST_SKIP() << "needs two CUDA devices";
  const auto other = Must(CudaDevice::Open(1));
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  std::vector<std::byte> bytes(1 << 20);
  std::mt19937_64 rng(2);
  testing::FillRandom(rng, bytes);
  const DeviceBuffer here(device(), bytes);
  const DeviceBuffer there(*other, bytes.size());
  EXPECT_TRUE(other->IsDeviceMemory(there.data()));
  EXPECT_FALSE(other->IsDeviceMemory(here.data()));
  EXPECT_FALSE(device().IsDeviceMemory(there.data()));
  {
    const OwnedStream stream = Must(other->CreateStream());
    const OwnedEvent event = Must(other->CreateEvent());
    // From GPU to GPU.
    Must(other->Copy(there.data(), here.data(), bytes.size(), stream.get()));
    Must(other->Record(event.get(), stream.get()));
    Must(other->WaitForEvent(event.get()));
    SumBox sum;
    sum.cols = bytes.size();
    sum.box = {there.data(), 0, 1, 0, bytes.size(), 0, 1, 1, 1};
    const L61Key key = L61Key::FromSeed(3);
    const auto sums = Must(other->PrepareSums({&sum, 1}, 1, key));
    Must(sums->Enqueue(stream.get()));
    Must(other->WaitForStream(stream.get()));
    EXPECT_EQ(sums->residues()[0], L61SumScalar(key, 0, bytes));
  }
  int current = -1;
  ASSERT_EQ(cudaGetDevice(&current), cudaSuccess);
  EXPECT_EQ(current, 0);
  EXPECT_TRUE(there.Read() == bytes);
}

// A tensor of more than 2^32 bytes in one piece of memory: changes at its very
// end and beyond the 2^32nd byte arrive there and nowhere else, and its
// checksum changes by exactly L of them.
// In a process of its own, where nobody has used GPU 0.
TEST(CudaDeviceDeathTest, AGpuThatNobodyUsesGetsNoContext) {
  if (CudaDeviceCount() < 2) GTEST_SKIP() << "needs two CUDA devices";
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto use_the_other = [] {
    {
      const auto device = Must(CudaDevice::Open(1));
      const DeviceMemory memory =
          Must(device->Allocate(MemoryKind::kDevice, 1 << 20));
      std::thread([&] {
        const OwnedStream stream = Must(device->CreateStream());
        EXPECT_TRUE(
            device->Fill(memory.data(), 1, memory.bytes(), stream.get()).ok());
        EXPECT_TRUE(device->WaitForStream(stream.get()).ok());
      }).join();
    }
    // Whether this process has taken memory of GPU 0.
    cudaDriverEntryPointQueryResult found;
    void* function = nullptr;
    unsigned int flags = 0;
    int active = 1;
#if CUDART_VERSION >= 12050
    cudaGetDriverEntryPointByVersion("cuDevicePrimaryCtxGetState", &function,
                                     7000, cudaEnableDefault, &found);
#else
    cudaGetDriverEntryPoint("cuDevicePrimaryCtxGetState", &function,
                            cudaEnableDefault, &found);
#endif
    if (function != nullptr) {
      reinterpret_cast<CUresult (*)(CUdevice, unsigned int*, int*)>(function)(
          0, &flags, &active);
    }
    std::exit(active);
  };
  EXPECT_EXIT(use_the_other(), ::testing::ExitedWithCode(0), "");
}

TEST_F(CudaDeviceTest, TensorsBeyondFourGigabytesAreAddressedWhole) {
  std::size_t free_bytes = 0;
  std::size_t all_bytes = 0;
  ASSERT_EQ(cudaMemGetInfo(&free_bytes, &all_bytes), cudaSuccess);
  const testing::Shape shape = {1'200'000, 4001};  // 4.8 GB of bytes
  const TileGrid grid = MakeTileGrid(shape, 1);
  if (free_bytes < 2 * grid.unit_count()) {
    GTEST_SKIP() << "needs twice " << grid.unit_count()
                 << " bytes of device memory, " << free_bytes << " are free";
  }
  const DeviceMemory weights =
      Must(device().Allocate(MemoryKind::kDevice, grid.unit_count()));
  const DeviceMemory before =
      Must(device().Allocate(MemoryKind::kDevice, grid.unit_count()));
  Must(device().Fill(weights.data(), 0x3c, weights.bytes(), nullptr));
  Must(device().Fill(before.data(), 0x3c, before.bytes(), nullptr));
  Must(device().WaitForStream(nullptr));
  BoxTarget box{weights.data(), 0, grid.rows, 0, grid.cols, 4001, 1, 1, 1};
  SumBox sum;
  sum.cols = grid.cols;
  sum.box = box;
  const L61Key key = L61Key::FromSeed(4);
  const auto sums = Must(device().PrepareSums({&sum, 1}, 1, key));
  Must(sums->Enqueue(nullptr));
  Must(device().WaitForStream(nullptr));
  const std::uint64_t s_before = sums->residues()[0];

  const std::uint64_t units[] = {0, (std::uint64_t{1} << 32) + 5,
                                 grid.unit_count() - 1};
  // The new weights, unit by unit.
  const std::byte changed{0x3e};
  for (const std::uint64_t unit : units) {
    testing::Upload(device(), weights.data() + unit, {&changed, 1});
  }
  // Encoded in one batch of the whole tensor, in slices of its bands.
  std::vector<EncodeSlice> slices;
  std::uint64_t tile_count = 0;
  constexpr std::uint64_t kSliceUnits = std::uint64_t{1} << 27;
  for (std::uint64_t begin = 0; begin < grid.unit_count();
       begin += kSliceUnits) {
    EncodeSlice slice;
    slice.grid = grid;
    slice.slice = {begin, std::min(begin + kSliceUnits, grid.unit_count())};
    slice.old_units = {before.data(), 0, 4001, 1, 1, 1};
    slice.new_units = {weights.data(), 0, 4001, 1, 1, 1};
    slice.first_tile = tile_count;
    tile_count += grid.TilesOf(slice.slice).count;
    slices.push_back(slice);
  }
  const DeviceMemory table = Must(device().MakeL61Table(key));
  const DeviceArray<EncodeSlice> slices_there(device(), slices);
  const DeviceArray<EncodedTile> tiles(device(), tile_count);
  const DeviceArray<EncodeTotals> totals(device(), 1);
  const DeviceArray<std::uint32_t> scratch(device(), tile_count);
  const DeviceBuffer arena(device(), 4096);
  EncodeBatch encode;
  encode.slices = slices_there.data();
  encode.slice_count = static_cast<std::uint32_t>(slices.size());
  encode.tile_count = tile_count;
  encode.tiles = tiles.data();
  encode.arena = arena.data();
  encode.arena_bytes = arena.size() - 16;
  encode.totals = totals.data();
  encode.scratch = scratch.data();
  encode.l61 = {table.as<std::uint64_t>(), key};
  Must(device().Encode(encode, nullptr));
  Must(device().WaitForStream(nullptr));
  EXPECT_EQ(totals.Read()[0].nnz, 3u);
  EXPECT_EQ(totals.Read()[0].changed_tiles, 3u);

  // Back to the old weights, then forward by the delta.
  Must(device().Fill(weights.data(), 0x3c, weights.bytes(), nullptr));
  std::vector<struct ApplyRecord> records;
  std::vector<ApplyTile> apply_tiles;
  std::uint64_t l61 = 0;
  const auto encoded = tiles.Read();
  for (const EncodeSlice& slice : slices) {
    struct ApplyRecord record;
    record.grid = grid;
    record.slice = slice.slice;
    record.unit_bytes = 1;
    record.box_count = 1;
    const TileRange range = grid.TilesOf(slice.slice);
    for (std::uint64_t i = 0; i < range.count; ++i) {
      const EncodedTile& tile = encoded[slice.first_tile + i];
      if (tile.bytes == 0) continue;
      l61 = L61Add(l61, tile.l61);
      apply_tiles.push_back({std::uint64_t{tile.payload} * kArenaAlignment,
                             range.first + i,
                             static_cast<std::uint32_t>(records.size()),
                             tile.bytes, tile.a, tile.b, tile.mode});
    }
    records.push_back(record);
  }
  ASSERT_EQ(apply_tiles.size(), 3u);
  const DeviceArray<ApplyTile> apply_tiles_there(device(), apply_tiles);
  const DeviceArray<struct ApplyRecord> records_there(device(), records);
  const DeviceArray<BoxTarget> boxes_there(device(), std::vector{box});
  const DeviceArray<ApplyOutcome> outcome(device(), 1);
  ApplyBatch apply;
  apply.tiles = apply_tiles_there.data();
  apply.tile_count = apply_tiles.size();
  apply.records = records_there.data();
  apply.record_count = static_cast<std::uint32_t>(records.size());
  apply.boxes = boxes_there.data();
  apply.payloads = arena.data();
  apply.payload_bytes = encode.arena_bytes;
  apply.outcome = outcome.data();
  Must(device().Apply(apply, nullptr));
  Must(sums->Enqueue(nullptr));
  Must(device().WaitForStream(nullptr));
  EXPECT_EQ(outcome.Read()[0].fault, TileFault::kNone);
  EXPECT_EQ(outcome.Read()[0].units_written, 3u);
  EXPECT_EQ(sums->residues()[0], L61Add(s_before, l61));
  std::uint64_t expected = s_before;
  for (const std::uint64_t unit : units) {
    EXPECT_EQ(Download(device(), weights.data() + unit, 1)[0], changed);
    expected = L61Add(expected, L61OfChange(key, unit, 1, 2));
  }
  EXPECT_EQ(sums->residues()[0], expected);
}

}  // namespace
}  // namespace kedge
