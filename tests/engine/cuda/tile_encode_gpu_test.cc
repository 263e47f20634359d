// Goal: on a GPU the diff + encode kernels give the bytes, headers and sums of
// the plain encoder. Method: as tile_encode_emulation_test.cc, in batches of
// many slices; seeds are printed.

#include <cstring>
#include <random>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kedge/engine/cuda/tile_encode.h"
#include "kedge/format/codec.h"
#include "kedge/tests/engine/cuda/cuda_test_support.h"
#include "kedge/tests/engine/cuda/encode_test_support.h"

namespace kedge {
namespace {

using testing::BatchResults;
using testing::Build;
using testing::BuiltBatch;
using testing::ExpectPlainResults;
using testing::GpuBytes;
using testing::Layout;
using testing::SliceCase;
using testing::Steps;
using testing::ToGpu;

class TileEncodeGpuTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!testing::HasGpu()) GTEST_SKIP() << "no CUDA device on this machine";
    std::vector<std::uint64_t> a(kL61TileWords);
    for (std::uint32_t t = 0; t < kL61TileWords; ++t) a[t] = key_.A(t);
    table_ = ToGpu(a);
  }

  void Encode(BuiltBatch& built, std::uint64_t arena_bytes,
              BatchResults* results) {
    std::vector<GpuBytes> memory;
    std::vector<EncodeSlice> slices = built.slices;
    for (std::size_t s = 0; s < slices.size(); ++s) {
      // The same alignment on the device: cudaMalloc's is 256.
      const auto move = [&](const testing::PlacedUnits& placed,
                            StridedUnits* units) {
        const auto first = reinterpret_cast<std::uintptr_t>(
            placed.storage.data() + placed.begin);
        GpuBytes& bytes = memory.emplace_back(placed.size + 16);
        bytes.Fill(0x5a);
        std::byte* const to = bytes.data() + first % 16;
        EXPECT_EQ(cudaMemcpy(to, placed.storage.data() + placed.begin,
                             placed.size, cudaMemcpyHostToDevice),
                  cudaSuccess);
        units->base =
            to + (placed.units.base - (placed.storage.data() + placed.begin));
      };
      move(built.built[s].before, &slices[s].old_units);
      move(built.built[s].after, &slices[s].new_units);
    }
    const GpuBytes slice_table = ToGpu(slices);
    GpuBytes tiles(built.tile_count * sizeof(EncodedTile));
    tiles.Fill(0xee);
    GpuBytes arena(arena_bytes + 64);
    arena.Fill(static_cast<int>(testing::kArenaPoison));
    GpuBytes totals(sizeof(EncodeTotals));
    totals.Fill(0xee);
    GpuBytes scratch(built.tile_count * 4);
    scratch.Fill(0xee);

    EncodeBatch batch;
    batch.slices = slice_table.as<EncodeSlice>();
    batch.slice_count = static_cast<std::uint32_t>(slices.size());
    batch.tile_count = built.tile_count;
    batch.tiles = tiles.as<EncodedTile>();
    batch.arena = arena.data();
    batch.arena_bytes = arena_bytes;
    batch.totals = totals.as<EncodeTotals>();
    batch.scratch = scratch.as<std::uint32_t>();
    batch.l61 = {table_.as<std::uint64_t>(), key_};
    cudaStream_t stream;
    KEDGE_CUDA_MUST(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    KEDGE_CUDA_MUST(cudaDeviceSynchronize());
    KEDGE_CUDA_MUST(LaunchEncode(batch, stream));
    KEDGE_CUDA_MUST(cudaStreamSynchronize(stream));
    KEDGE_CUDA_MUST(cudaStreamDestroy(stream));

    results->tiles.resize(built.tile_count);
    tiles.Download(results->tiles.data(), tiles.size());
    totals.Download(&results->totals, sizeof(EncodeTotals));
    results->arena.resize(arena.size());
    arena.Download(results->arena.data(), arena.size());
    for (std::size_t i = arena_bytes; i < results->arena.size(); ++i) {
      ASSERT_EQ(results->arena[i], testing::kArenaPoison) << "behind the arena";
    }
    results->arena.resize(arena_bytes);
  }

  void EncodeAndCompare(BuiltBatch& built, EncodeTotals* totals) {
    BatchResults results;
    Encode(built, built.arena_bound(), &results);
    if (HasFatalFailure()) return;
    ExpectPlainResults(built, key_, results);
    *totals = results.totals;
  }

  const L61Key key_ = L61Key::FromSeed(20261130);
  GpuBytes table_;
};

struct Kind {
  std::uint32_t unit_bytes;
  std::uint32_t units_per_element;
};
constexpr Kind kKinds[] = {{1, 1}, {2, 1}, {4, 1}, {4, 2}};

TEST_F(TileEncodeGpuTest, RandomBatches) {
  const std::vector<std::vector<std::uint64_t>> shapes = {
      {},       {1},       {7},           {127},      {40000},    {1, 999},
      {999, 1}, {5, 1000}, {130, 96},     {129, 400}, {200, 127}, {2, 20000},
      {40, 64}, {9, 8, 3}, {131, 16, 16}, {256, 512}, {384, 128}};
  std::uint64_t heavy = 0;
  for (std::uint64_t seed = 1; seed <= 40; ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    std::mt19937_64 rng(seed);
    BuiltBatch batch;
    const int slices = 1 + static_cast<int>(rng() % 40);
    for (int i = 0; i < slices; ++i) {
      const Kind kind = kKinds[rng() % 4];
      SliceCase c;
      c.shape = shapes[rng() % shapes.size()];
      c.unit_bytes = kind.unit_bytes;
      c.units_per_element = kind.units_per_element;
      const std::uint64_t elements =
          MakeTileGrid(c.shape, kind.units_per_element).unit_count() /
          kind.units_per_element;
      if (rng() % 3 == 0) {
        std::uint64_t begin = rng() % elements;
        const std::uint64_t end = begin + 1 + rng() % (elements - begin);
        if (rng() % 2 == 0) begin = begin / 16 * 16;
        c.slice = {begin * kind.units_per_element,
                   end * kind.units_per_element};
      }
      c.old_layout = static_cast<Layout>(rng() % 5);
      c.new_layout =
          rng() % 2 == 0 ? c.old_layout : static_cast<Layout>(rng() % 5);
      const double densities[] = {0,    0.0003, 0.003, 0.01, 0.03,
                                  0.07, 0.2,    0.5,   1};
      c.density = densities[rng() % 9];
      c.steps = static_cast<Steps>(rng() % 5);
      c.clustered = rng() % 4 == 0;
      batch.Add(Build(rng, c));
    }
    EncodeTotals totals;
    EncodeAndCompare(batch, &totals);
    if (HasFatalFailure()) return;
    heavy += totals.heavy_tiles;
  }
  EXPECT_GT(heavy, 100u);
}

TEST_F(TileEncodeGpuTest, ThousandsOfSlices) {
  std::mt19937_64 rng(50);
  BuiltBatch batch;
  for (int i = 0; i < 3000; ++i) {
    batch.Add(Build(
        rng, {.shape = {1 + rng() % 3, 1 + rng() % 150}, .density = 0.05}));
  }
  EncodeTotals totals;
  EncodeAndCompare(batch, &totals);
}

TEST_F(TileEncodeGpuTest, AnArenaWithoutRoomIsSaid) {
  for (const double density : {0.01, 0.5}) {
    std::mt19937_64 rng(60);
    BuiltBatch batch;
    batch.Add(Build(rng, {.shape = {1000, 1000}, .density = density}));
    BatchResults whole;
    Encode(batch, batch.arena_bound(), &whole);
    if (HasFatalFailure()) return;
    for (const std::uint64_t arena :
         {std::uint64_t{0}, whole.totals.arena_bytes / 2 / 8 * 8,
          whole.totals.arena_bytes}) {
      SCOPED_TRACE(absl::StrCat("arena of ", arena));
      BatchResults results;
      Encode(batch, arena, &results);
      if (HasFatalFailure()) return;
      ExpectPlainResults(batch, key_, results);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(TileEncodeGpuTest, ABatchWithoutTilesLeavesZeroTotals) {
  GpuBytes totals(sizeof(EncodeTotals));
  totals.Fill(0xee);
  EncodeBatch batch;
  batch.totals = totals.as<EncodeTotals>();
  KEDGE_CUDA_MUST(LaunchEncode(batch, nullptr));
  EncodeTotals found;
  totals.Download(&found, sizeof(found));
  EXPECT_EQ(found.arena_bytes, 0u);
  EXPECT_EQ(found.changed_tiles, 0u);
}

}  // namespace
}  // namespace kedge
