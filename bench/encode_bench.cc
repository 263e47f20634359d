// What kedge's kernels take against passes that only move the same bytes, in
// one run and interleaved: diff + encode, the guard's checksum, the quantiser.
//
//   kedge_encode_bench [--bytes N] [--rounds R] [--device cuda:0] [--json FILE]
//                      [--dtype bf16]
//
// --dtype: diff + encode of that dtype alone, to compare kernels quickly.
//
// Every result is checked before anything is timed: each tile's header against
// the changes that were made, and a sample of tiles byte for byte against
// format/codec.h. On --device cpu the same code runs in host memory, which
// proves the program, not a speed.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "kedge/bench/bench_device.h"
#include "kedge/bench/bench_inputs.h"
#include "kedge/bench/bench_report.h"
#include "kedge/bench/moving_passes.h"
#include "kedge/engine/cpu/l61_sum.h"
#include "kedge/engine/device/device.h"
#include "kedge/format/codec.h"
#include "kedge/format/status.h"

namespace kedge {
namespace {

struct Options {
  std::string device = "cuda:0";
  std::uint64_t bytes = std::uint64_t{2} << 30;
  std::uint64_t rounds = 15;
  std::uint64_t tiles_checked = 4096;
  std::uint64_t seed = 1;
  std::string dtype;  // empty: all, and the other kernels
  std::string json;
  std::string commit;
};

struct Matrix {
  std::uint64_t first_unit = 0;  // in its array
  TileGrid grid;
};

// Tensors of one dtype, one behind the other, and copies of them in which some
// units have changed.
struct Variant {
  double density = 0;
  std::uint64_t nnz = 0;
  std::vector<std::byte> host;
  DeviceMemory device;
  DeviceMemory slices;
  EncodeTotals totals;
};
struct Data {
  std::string dtype;
  std::uint32_t unit_bytes = 0;
  std::vector<Matrix> matrices;
  std::uint64_t units = 0;
  std::uint64_t tiles = 0;
  std::vector<std::byte> host;
  DeviceMemory device;
  std::vector<Variant> variants;

  std::uint64_t bytes() const { return units * unit_bytes; }
};

struct Row {
  std::string what;
  std::string limit;        // what the time stands against
  std::uint64_t bytes = 0;  // that one run moves
  std::function<absl::Status()> enqueue;
  std::function<absl::Status()> enqueue_limit;
  Samples seconds;
  Samples limit_seconds;
};

absl::Status Wrong(absl::string_view where, absl::string_view what,
                   std::uint64_t expected, std::uint64_t found) {
  return absl::InternalError(Describe({.where = where,
                                       .what = what,
                                       .expected = absl::StrCat(expected),
                                       .found = absl::StrCat(found)}));
}

// As many matrices as fit, their widths taken in turn.
void Plan(std::uint64_t bytes, Data* data) {
  constexpr std::uint64_t kCols[] = {2048, 4096, 768, 8192, 2880};
  constexpr std::uint64_t kMatrixBytes = std::uint64_t{96} << 20;
  for (std::size_t i = 0; data->bytes() < bytes; ++i) {
    const std::uint64_t cols = kCols[i % 5];
    const std::uint64_t left =
        std::min(kMatrixBytes, bytes - data->bytes()) / data->unit_bytes;
    // Whole 16-byte words, and rows that no tile height divides.
    const std::uint64_t rows = std::max<std::uint64_t>(1, left / cols);
    const std::uint64_t shape[] = {rows, cols};
    Matrix matrix;
    matrix.first_unit = data->units;
    matrix.grid = MakeTileGrid(shape, 1);
    data->units += rows * cols;
    data->tiles += matrix.grid.tile_count();
    data->matrices.push_back(matrix);
  }
}

void Fill(Data* data, std::uint64_t seed) {
  data->host.resize(data->bytes());
  switch (data->unit_bytes) {
    case 4:
      FillNormal(
          {reinterpret_cast<std::uint32_t*>(data->host.data()), data->units},
          seed);
      break;
    case 2:
      FillNormal(
          {reinterpret_cast<std::uint16_t*>(data->host.data()), data->units},
          seed);
      break;
    default:
      // Pairs of bytes of bf16 weights have the spread of values that matters
      // here; units is even.
      FillNormal({reinterpret_cast<std::uint16_t*>(data->host.data()),
                  data->units / 2},
                 seed);
  }
}

std::uint64_t PerturbBytes(std::vector<std::byte>& bytes,
                           std::uint32_t unit_bytes, double density,
                           std::uint64_t seed) {
  switch (unit_bytes) {
    case 4:
      return Perturb(std::span(reinterpret_cast<std::uint32_t*>(bytes.data()),
                               bytes.size() / 4),
                     density, seed);
    case 2:
      return Perturb(std::span(reinterpret_cast<std::uint16_t*>(bytes.data()),
                               bytes.size() / 2),
                     density, seed);
    default:
      return Perturb(std::span(reinterpret_cast<std::uint8_t*>(bytes.data()),
                               bytes.size()),
                     density, seed);
  }
}

std::uint32_t UnitAt(const std::byte* bytes, std::uint32_t unit_bytes,
                     std::uint64_t unit) {
  std::uint32_t value = 0;
  std::memcpy(&value, bytes + unit * unit_bytes, unit_bytes);
  return value;
}

class Bench {
 public:
  static absl::Status Run(const Options& options, std::string command);

 private:
  Bench(const Options& options, BenchDevice& bench)
      : options_(options), bench_(bench), device_(*bench.device()) {}

  absl::StatusOr<DeviceMemory> Upload(std::span<const std::byte> bytes);
  absl::Status Download(const void* from, void* to, std::uint64_t bytes);
  absl::StatusOr<std::unique_ptr<Data>> Make(
      std::string dtype, std::uint32_t unit_bytes, std::uint64_t bytes,
      const std::vector<double>& densities);
  EncodeBatch BatchOf(const Data& data, const Variant& variant) const;
  absl::Status CheckEncode(const Data& data, Variant& variant);
  absl::Status CheckSums(const Data& data);
  absl::Status CheckQuantised(const Data& data);
  absl::Status AddEncodeRows(Data& data);
  absl::Status AddSumRow(const Data& data);
  absl::Status AddQuantiseRow(const Data& data);
  absl::Status Measure();
  absl::Status Time(const std::function<absl::Status()>& enqueue,
                    Samples* seconds);
  JsonObject Report(const std::string& command) const;
  void Print() const;
  absl::Status Go();

  const Options& options_;
  BenchDevice& bench_;
  Device& device_;
  L61Key key_ = L61Key::FromSeed(0x6b65646765);
  OwnedStream stream_;
  DeviceMemory pinned_;
  DeviceMemory a_table_;
  DeviceMemory tiles_;
  DeviceMemory arena_;
  DeviceMemory totals_;
  DeviceMemory scratch_;
  std::unique_ptr<DeviceSums> sums_;
  DeviceMemory quantised_;
  DeviceMemory scales_;
  DeviceMemory quantise_tasks_;
  DeviceMemory bad_block_;
  QuantiseBatch quantise_;
  std::uint64_t quantised_elements_ = 0;
  DifferencePass read_pass_;
  std::vector<std::unique_ptr<Data>> data_;
  std::vector<Row> rows_;
};

absl::StatusOr<DeviceMemory> Bench::Upload(std::span<const std::byte> bytes) {
  KEDGE_ASSIGN_OR_RETURN(DeviceMemory memory,
                         device_.Allocate(MemoryKind::kDevice, bytes.size()));
  for (std::uint64_t at = 0; at < bytes.size(); at += pinned_.bytes()) {
    const std::uint64_t part = std::min(pinned_.bytes(), bytes.size() - at);
    std::memcpy(pinned_.data(), bytes.data() + at, part);
    KEDGE_RETURN_IF_ERROR(
        device_.Copy(memory.data() + at, pinned_.data(), part, stream_.get()));
    KEDGE_RETURN_IF_ERROR(device_.WaitForStream(stream_.get()));
  }
  return memory;
}

absl::Status Bench::Download(const void* from, void* to, std::uint64_t bytes) {
  for (std::uint64_t at = 0; at < bytes; at += pinned_.bytes()) {
    const std::uint64_t part = std::min(pinned_.bytes(), bytes - at);
    KEDGE_RETURN_IF_ERROR(device_.Copy(pinned_.data(),
                                       static_cast<const std::byte*>(from) + at,
                                       part, stream_.get()));
    KEDGE_RETURN_IF_ERROR(device_.WaitForStream(stream_.get()));
    std::memcpy(static_cast<std::byte*>(to) + at, pinned_.data(), part);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Data>> Bench::Make(
    std::string dtype, std::uint32_t unit_bytes, std::uint64_t bytes,
    const std::vector<double>& densities) {
  auto data = std::make_unique<Data>();
  data->dtype = std::move(dtype);
  data->unit_bytes = unit_bytes;
  Plan(bytes, data.get());
  Fill(data.get(), options_.seed + unit_bytes);
  KEDGE_ASSIGN_OR_RETURN(data->device, Upload(data->host));
  for (const double density : densities) {
    Variant variant;
    variant.density = density;
    variant.host = data->host;
    variant.nnz =
        PerturbBytes(variant.host, unit_bytes, density,
                     options_.seed + static_cast<std::uint64_t>(1e6 * density));
    KEDGE_ASSIGN_OR_RETURN(variant.device, Upload(variant.host));
    std::vector<EncodeSlice> slices;
    std::uint64_t first_tile = 0;
    for (const Matrix& matrix : data->matrices) {
      EncodeSlice slice;
      slice.grid = matrix.grid;
      slice.slice = {0, matrix.grid.unit_count()};
      for (const auto& [units, from] :
           {std::pair{&slice.old_units, data->device.data()},
            std::pair{&slice.new_units, variant.device.data()}}) {
        units->base = from + matrix.first_unit * unit_bytes;
        units->row_stride_bytes =
            static_cast<std::int64_t>(matrix.grid.cols * unit_bytes);
        units->col_stride_bytes = unit_bytes;
        units->unit_bytes = unit_bytes;
      }
      slice.first_tile = first_tile;
      first_tile += matrix.grid.tile_count();
      slices.push_back(slice);
    }
    KEDGE_ASSIGN_OR_RETURN(variant.slices,
                           Upload(std::as_bytes(std::span(slices))));
    data->variants.push_back(std::move(variant));
  }
  return data;
}

EncodeBatch Bench::BatchOf(const Data& data, const Variant& variant) const {
  EncodeBatch batch;
  batch.slices = variant.slices.as<const EncodeSlice>();
  batch.slice_count = static_cast<std::uint32_t>(data.matrices.size());
  batch.tile_count = data.tiles;
  batch.tiles = tiles_.as<EncodedTile>();
  batch.arena = arena_.data();
  batch.arena_bytes = arena_.bytes();
  batch.totals = totals_.as<EncodeTotals>();
  batch.scratch = scratch_.as<std::uint32_t>();
  batch.l61 = {a_table_.as<const std::uint64_t>(), key_};
  return batch;
}

// The changes of one tile, from the host's copies of old and new.
std::vector<Change> ChangesOf(const Data& data, const Variant& variant,
                              const Matrix& matrix, std::uint64_t tile,
                              const L61Key& key, std::uint64_t* l61) {
  std::vector<Change> changes;
  const TileBox box = matrix.grid.Box(tile);
  *l61 = 0;
  for (std::uint32_t i = 0; i < box.unit_count(); ++i) {
    const std::uint64_t flat = matrix.grid.FlatIndex(box, i);
    const std::uint64_t unit = matrix.first_unit + flat;
    const std::uint32_t before =
        UnitAt(data.host.data(), data.unit_bytes, unit);
    const std::uint32_t after =
        UnitAt(variant.host.data(), data.unit_bytes, unit);
    if (before == after) continue;
    const std::int64_t difference = std::int64_t{after} - std::int64_t{before};
    changes.push_back({i, difference});
    *l61 = L61Add(*l61, L61OfChange(key, flat, data.unit_bytes, difference));
  }
  return changes;
}

absl::Status Bench::CheckEncode(const Data& data, Variant& variant) {
  const std::string where = absl::StrCat(data.dtype, " at ", variant.density);
  KEDGE_RETURN_IF_ERROR(
      device_.Fill(tiles_.data(), 0xa5, tiles_.bytes(), stream_.get()));
  KEDGE_RETURN_IF_ERROR(device_.Encode(BatchOf(data, variant), stream_.get()));
  KEDGE_RETURN_IF_ERROR(
      Download(totals_.data(), &variant.totals, sizeof(EncodeTotals)));
  if (variant.totals.nnz != variant.nnz) {
    return Wrong(where, "changes", variant.nnz, variant.totals.nnz);
  }
  if (variant.totals.arena_bytes > arena_.bytes()) {
    return Wrong(where, "bytes of the arena", arena_.bytes(),
                 variant.totals.arena_bytes);
  }
  std::vector<EncodedTile> tiles(data.tiles);
  KEDGE_RETURN_IF_ERROR(
      Download(tiles_.data(), tiles.data(), data.tiles * sizeof(EncodedTile)));
  std::vector<std::byte> arena(variant.totals.arena_bytes);
  KEDGE_RETURN_IF_ERROR(Download(arena_.data(), arena.data(), arena.size()));

  std::uint64_t nnz = 0;
  std::uint64_t changed = 0;
  std::uint64_t first_tile = 0;
  const std::uint64_t stride =
      std::max<std::uint64_t>(1, data.tiles / options_.tiles_checked);
  std::uint64_t next_check = 0;
  for (const Matrix& matrix : data.matrices) {
    for (std::uint64_t t = 0; t < matrix.grid.tile_count(); ++t) {
      const EncodedTile& tile = tiles[first_tile + t];
      nnz += tile.nnz;
      changed += tile.bytes != 0 ? 1 : 0;
      // Also the tiles at the right and the lower edge.
      if (first_tile + t < next_check && t + 1 != matrix.grid.tile_count()) {
        continue;
      }
      next_check = first_tile + t + stride;
      const std::string at =
          absl::StrCat(where, ": tile ", first_tile + t, " of the batch");
      std::uint64_t l61 = 0;
      const std::vector<Change> changes =
          ChangesOf(data, variant, matrix, t, key_, &l61);
      if (tile.nnz != changes.size()) {
        return Wrong(at, "changes", changes.size(), tile.nnz);
      }
      if (tile.l61 != l61) return Wrong(at, "L61", l61, tile.l61);
      if (changes.empty()) {
        if (tile.bytes != 0) return Wrong(at, "bytes", 0, tile.bytes);
        continue;
      }
      const std::uint32_t units = matrix.grid.Box(t).unit_count();
      std::vector<std::byte> payload;
      const TileHeader header =
          EncodeTile(changes, units, data.unit_bytes, &payload);
      if (tile.bytes != header.bytes) {
        return Wrong(at, "bytes", header.bytes, tile.bytes);
      }
      const std::uint64_t begin = tile.payload * kArenaAlignment;
      if (begin > arena.size() || tile.bytes > arena.size() - begin) {
        return Wrong(at, "payload within", arena.size(), begin + tile.bytes);
      }
      if (tile.mode != static_cast<std::uint32_t>(header.mode) ||
          tile.a != header.a || tile.b != header.b ||
          std::memcmp(arena.data() + begin, payload.data(), payload.size()) !=
              0) {
        return absl::InternalError(
            Describe({.where = at,
                      .what = "payload",
                      .expected = "what EncodeTile of format/codec.h gives",
                      .found = "other bytes"}));
      }
      std::vector<Change> decoded;
      KEDGE_RETURN_IF_ERROR(
          DecodeTile({t, header.mode, tile.a, tile.b,
                      std::span(arena).subspan(begin, tile.bytes)},
                     units, data.unit_bytes, &decoded));
      if (decoded != changes) {
        return absl::InternalError(
            absl::StrCat(at, ": decodes to other changes"));
      }
    }
    first_tile += matrix.grid.tile_count();
  }
  if (nnz != variant.nnz) {
    return Wrong(where, "changes of all tiles", variant.nnz, nnz);
  }
  if (changed != variant.totals.changed_tiles) {
    return Wrong(where, "changed tiles", changed, variant.totals.changed_tiles);
  }
  return absl::OkStatus();
}

absl::Status Bench::CheckSums(const Data& data) {
  const L61Summer summer(key_);
  KEDGE_RETURN_IF_ERROR(sums_->Enqueue(stream_.get()));
  KEDGE_RETURN_IF_ERROR(device_.WaitForStream(stream_.get()));
  const std::span<const std::uint64_t> found = sums_->residues();
  std::vector<std::uint64_t> expected(data.matrices.size());
  InParallel(expected.size(), [&](std::uint64_t begin, std::uint64_t end) {
    for (std::uint64_t i = begin; i < end; ++i) {
      const Matrix& matrix = data.matrices[i];
      expected[i] =
          summer.Sum(0, std::span(data.host).subspan(
                            matrix.first_unit * data.unit_bytes,
                            matrix.grid.unit_count() * data.unit_bytes));
    }
  });
  for (std::size_t i = 0; i < expected.size(); ++i) {
    if (found[i] != expected[i]) {
      return Wrong(absl::StrCat(data.dtype, ": matrix ", i), "L61", expected[i],
                   found[i]);
    }
  }
  return absl::OkStatus();
}

// An e4m3 value; there are no infinities.
double FromE4M3(std::uint8_t bits) {
  const int exponent = (bits >> 3) & 15;
  const int mantissa = bits & 7;
  const double magnitude = exponent == 0
                               ? std::ldexp(mantissa, -9)
                               : std::ldexp(8 + mantissa, exponent - 10);
  return (bits & 0x80) != 0 ? -magnitude : magnitude;
}

// Scales exactly, values to half a unit of the last place, in a sample of
// blocks.
absl::Status Bench::CheckQuantised(const Data& data) {
  KEDGE_RETURN_IF_ERROR(device_.Quantise(quantise_, stream_.get()));
  std::vector<std::uint8_t> values(quantised_.bytes());
  std::vector<float> scales(scales_.bytes() / sizeof(float));
  std::uint64_t bad = 0;
  KEDGE_RETURN_IF_ERROR(
      Download(quantised_.data(), values.data(), values.size()));
  KEDGE_RETURN_IF_ERROR(
      Download(scales_.data(), scales.data(), scales_.bytes()));
  KEDGE_RETURN_IF_ERROR(Download(bad_block_.data(), &bad, sizeof(bad)));
  if (bad != ~std::uint64_t{0}) {
    return Wrong("quantiser", "first bad block", ~std::uint64_t{0}, bad);
  }
  std::uint64_t first_block = 0;
  for (const Matrix& matrix : data.matrices) {
    const std::uint64_t wide = (matrix.grid.cols + 127) / 128;
    const std::uint64_t blocks = (matrix.grid.rows + 127) / 128 * wide;
    for (std::uint64_t b = 0; b < blocks; b += 61) {
      const std::uint64_t row = b / wide * 128;
      const std::uint64_t col = b % wide * 128;
      const std::uint64_t rows =
          std::min<std::uint64_t>(128, matrix.grid.rows - row);
      const std::uint64_t cols =
          std::min<std::uint64_t>(128, matrix.grid.cols - col);
      const auto value = [&](std::uint64_t r, std::uint64_t c) {
        return __builtin_bit_cast(
            float,
            UnitAt(data.host.data(), 2,
                   matrix.first_unit + (row + r) * matrix.grid.cols + col + c)
                << 16);
      };
      float amax = quantise_.floor;
      for (std::uint64_t r = 0; r < rows; ++r) {
        for (std::uint64_t c = 0; c < cols; ++c) {
          amax = std::max(amax, std::fabs(value(r, c)));
        }
      }
      const float scale = amax / 448.0f;
      const float found = scales[first_block + b];
      if (found != scale) {
        return absl::InternalError(
            absl::StrCat("quantiser: block ", first_block + b,
                         ": scale: expected ", scale, ", found ", found));
      }
      for (std::uint64_t r = 0; r < rows; ++r) {
        for (std::uint64_t c = 0; c < cols; ++c) {
          const double exact = static_cast<double>(value(r, c) / scale);
          const double kept =
              FromE4M3(values[matrix.first_unit + (row + r) * matrix.grid.cols +
                              col + c]);
          // Half a unit in the last place, subnormals below 2^-6.
          const double most =
              std::max(std::fabs(exact) * 0x1p-4, 0x1p-10) * (1 + 1e-9);
          if (std::fabs(kept - exact) > most) {
            return absl::InternalError(absl::StrCat("quantiser: block ",
                                                    first_block + b, ": ",
                                                    exact, " became ", kept));
          }
        }
      }
    }
    first_block += blocks;
  }
  return absl::OkStatus();
}

absl::Status Bench::AddEncodeRows(Data& data) {
  for (Variant& variant : data.variants) {
    KEDGE_RETURN_IF_ERROR(CheckEncode(data, variant));
    Row row;
    row.what = absl::StrCat("diff+encode/", data.dtype,
                            "/percent:", 100 * variant.density);
    row.limit = "read-only pass over old and new";
    row.bytes = 2 * data.bytes();
    row.enqueue = [this, batch = BatchOf(data, variant)] {
      return device_.Encode(batch, stream_.get());
    };
    row.enqueue_limit = [this, old_bytes = data.device.data(),
                         new_bytes = variant.device.data(),
                         bytes = data.bytes() / 16 * 16] {
      return read_pass_.Enqueue(old_bytes, new_bytes, bytes, stream_.get());
    };
    rows_.push_back(std::move(row));
  }
  return absl::OkStatus();
}

absl::Status Bench::AddSumRow(const Data& data) {
  std::vector<SumBox> boxes;
  for (const Matrix& matrix : data.matrices) {
    SumBox box;
    box.box.data = data.device.data() + matrix.first_unit * data.unit_bytes;
    box.box.row_end = matrix.grid.rows;
    box.box.col_end = matrix.grid.cols;
    box.box.row_stride_bytes =
        static_cast<std::int64_t>(matrix.grid.cols * data.unit_bytes);
    box.box.col_stride_bytes = data.unit_bytes;
    box.box.unit_bytes = data.unit_bytes;
    box.cols = matrix.grid.cols;
    box.output = static_cast<std::uint32_t>(boxes.size());
    boxes.push_back(box);
  }
  KEDGE_ASSIGN_OR_RETURN(
      sums_, device_.PrepareSums(
                 boxes, static_cast<std::uint32_t>(boxes.size()), key_));
  KEDGE_RETURN_IF_ERROR(CheckSums(data));
  Row row;
  row.what = absl::StrCat("guard/", data.dtype);
  row.limit = "read-only pass over the same bytes";
  row.bytes = data.bytes();
  row.enqueue = [this] { return sums_->Enqueue(stream_.get()); };
  row.enqueue_limit = [this, &data] {
    const std::uint64_t half = data.bytes() / 32 * 16;
    return read_pass_.Enqueue(data.device.data(), data.device.data() + half,
                              half, stream_.get());
  };
  rows_.push_back(std::move(row));
  return absl::OkStatus();
}

absl::Status Bench::AddQuantiseRow(const Data& data) {
  std::uint64_t blocks = 0;
  for (const Matrix& matrix : data.matrices) {
    blocks += (matrix.grid.rows + 127) / 128 * ((matrix.grid.cols + 127) / 128);
  }
  KEDGE_ASSIGN_OR_RETURN(quantised_,
                         device_.Allocate(MemoryKind::kDevice, data.units));
  KEDGE_ASSIGN_OR_RETURN(
      scales_, device_.Allocate(MemoryKind::kDevice, blocks * sizeof(float)));
  KEDGE_ASSIGN_OR_RETURN(
      bad_block_, device_.Allocate(MemoryKind::kDevice, sizeof(std::uint64_t)));
  std::vector<QuantiseTask> tasks;
  blocks = 0;
  for (const Matrix& matrix : data.matrices) {
    QuantiseTask task;
    task.source = data.device.data() + 2 * matrix.first_unit;
    task.source_row_stride_bytes =
        static_cast<std::int64_t>(2 * matrix.grid.cols);
    task.rows = matrix.grid.rows;
    task.cols = matrix.grid.cols;
    task.values = quantised_.data() + matrix.first_unit;
    task.scales = scales_.as<float>() + blocks;
    task.first_block = blocks;
    blocks += (task.rows + 127) / 128 * ((task.cols + 127) / 128);
    tasks.push_back(task);
  }
  KEDGE_ASSIGN_OR_RETURN(quantise_tasks_,
                         Upload(std::as_bytes(std::span(tasks))));
  quantise_.tasks = quantise_tasks_.as<const QuantiseTask>();
  quantise_.task_count = static_cast<std::uint32_t>(tasks.size());
  quantise_.block_count = blocks;
  quantise_.floor = 1e-12f;
  quantise_.first_bad_block = bad_block_.as<std::uint64_t>();
  KEDGE_RETURN_IF_ERROR(CheckQuantised(data));
  quantised_elements_ = data.units / 16 * 16;
  Row row;
  row.what = "quantise/bf16 to f8_e4m3";
  row.limit = "pass that reads 2 bytes and writes 1";
  row.bytes = 3 * data.units;
  row.enqueue = [this] { return device_.Quantise(quantise_, stream_.get()); };
  row.enqueue_limit = [this, &data] {
    return EnqueueHalveBytes(bench_, data.device.data(), quantised_.data(),
                             quantised_elements_, stream_.get());
  };
  rows_.push_back(std::move(row));
  return absl::OkStatus();
}

absl::Status Bench::Time(const std::function<absl::Status()>& enqueue,
                         Samples* seconds) {
  KEDGE_RETURN_IF_ERROR(bench_.StartClock(stream_.get()));
  KEDGE_RETURN_IF_ERROR(enqueue());
  KEDGE_RETURN_IF_ERROR(bench_.StopClock(stream_.get()));
  KEDGE_ASSIGN_OR_RETURN(const double time, bench_.ReadClockSeconds());
  seconds->Add(time);
  return absl::OkStatus();
}

// Every row and its limit once a round, the limit first in every other one.
absl::Status Bench::Measure() {
  constexpr std::uint64_t kWarmUps = 2;
  for (std::uint64_t round = 0; round < kWarmUps + options_.rounds; ++round) {
    for (Row& row : rows_) {
      Samples warm_up;
      const bool counts = round >= kWarmUps;
      Samples* const seconds = counts ? &row.seconds : &warm_up;
      Samples* const limit = counts ? &row.limit_seconds : &warm_up;
      if (round % 2 == 0) {
        KEDGE_RETURN_IF_ERROR(Time(row.enqueue_limit, limit));
        KEDGE_RETURN_IF_ERROR(Time(row.enqueue, seconds));
      } else {
        KEDGE_RETURN_IF_ERROR(Time(row.enqueue, seconds));
        KEDGE_RETURN_IF_ERROR(Time(row.enqueue_limit, limit));
      }
    }
  }
  return absl::OkStatus();
}

double TerabytesPerSecond(const Row& row, const Samples& seconds) {
  return static_cast<double>(row.bytes) / seconds.Median() / 1e12;
}

// Of each round's pair.
Samples FractionOfLimit(const Row& row) {
  Samples fraction;
  for (std::size_t i = 0; i < row.seconds.values.size(); ++i) {
    fraction.Add(row.limit_seconds.values[i] / row.seconds.values[i]);
  }
  return fraction;
}

JsonObject Bench::Report(const std::string& command) const {
  JsonObject report;
  report.Text("device", device_.name())
      .Text("driver", bench_.driver())
      .Text("kernel_driver", KernelDriver())
      .Text("commit", options_.commit)
      .Text("command", command)
      .Number("rounds", options_.rounds)
      .Number("read_pass_form", static_cast<std::uint64_t>(read_pass_.form()));
  std::vector<JsonObject> inputs;
  for (const auto& data : data_) {
    for (const Variant& variant : data->variants) {
      const double changes =
          static_cast<double>(std::max<std::uint64_t>(1, variant.nnz));
      JsonObject input;
      input.Text("dtype", data->dtype)
          .Number("bytes_of_old_and_new", 2 * data->bytes())
          .Number("matrices", std::uint64_t{data->matrices.size()})
          .Number("tiles", data->tiles)
          .Number("density", variant.density)
          .Number("nnz", variant.nnz)
          .Number("payload_bytes", variant.totals.arena_bytes)
          .Number("payload_bits_per_change",
                  8 * static_cast<double>(variant.totals.arena_bytes) / changes)
          .Number("heavy_tiles", std::uint64_t{variant.totals.heavy_tiles});
      inputs.push_back(std::move(input));
    }
  }
  report.List("inputs", inputs);
  std::vector<JsonObject> rows;
  for (const Row& row : rows_) {
    JsonObject line;
    line.Text("what", row.what)
        .Number("bytes", row.bytes)
        .Stats("seconds", row.seconds)
        .Number("tb_per_s", TerabytesPerSecond(row, row.seconds))
        .Text("limit", row.limit)
        .Stats("limit_seconds", row.limit_seconds)
        .Number("limit_tb_per_s", TerabytesPerSecond(row, row.limit_seconds))
        .Stats("fraction_of_limit", FractionOfLimit(row));
    rows.push_back(std::move(line));
  }
  report.List("rows", rows);
  return report;
}

void Bench::Print() const {
  std::printf("%s %s\n", device_.name().c_str(), bench_.driver().c_str());
  for (const auto& data : data_) {
    std::printf("%s: %zu matrices, %.3f GiB of old and new\n",
                data->dtype.c_str(), data->matrices.size(),
                2 * static_cast<double>(data->bytes()) / 0x1p30);
  }
  std::printf("%-28s %24s %7s %24s %7s %s\n", "", "ms", "TB/s", "limit, ms",
              "TB/s", " of the limit");
  for (const Row& row : rows_) {
    std::printf("%-28s %24s %7.3f %24s %7.3f  %s\n", row.what.c_str(),
                row.seconds.Text(1000, 3).c_str(),
                TerabytesPerSecond(row, row.seconds),
                row.limit_seconds.Text(1000, 3).c_str(),
                TerabytesPerSecond(row, row.limit_seconds),
                FractionOfLimit(row).Text(1, 3).c_str());
  }
}

absl::Status Bench::Go() {
  KEDGE_ASSIGN_OR_RETURN(stream_, device_.CreateStream());
  KEDGE_ASSIGN_OR_RETURN(
      pinned_, device_.Allocate(MemoryKind::kPinned, std::uint64_t{64} << 20));
  KEDGE_ASSIGN_OR_RETURN(a_table_, device_.MakeL61Table(key_));
  KEDGE_ASSIGN_OR_RETURN(
      totals_, device_.Allocate(MemoryKind::kDevice, sizeof(EncodeTotals)));

  const std::uint64_t half = options_.bytes / 2;
  struct Kind {
    const char* dtype;
    std::uint32_t unit_bytes;
    std::uint64_t bytes;
    std::vector<double> densities;
  };
  const Kind kinds[] = {{"bf16", 2, options_.bytes, {0.001, 0.01, 0.03}},
                        {"f8_e4m3", 1, half, {0.001, 0.01, 0.03}},
                        {"f32", 4, half, {0.001, 0.01, 0.03}}};
  std::uint64_t tiles = 0;
  for (const Kind& kind : kinds) {
    if (!options_.dtype.empty() && options_.dtype != kind.dtype) continue;
    KEDGE_ASSIGN_OR_RETURN(
        std::unique_ptr<Data> data,
        Make(kind.dtype, kind.unit_bytes, kind.bytes, kind.densities));
    tiles = std::max(tiles, data->tiles);
    data_.push_back(std::move(data));
  }
  if (data_.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--dtype: expected bf16, f8_e4m3 or f32, found ", options_.dtype));
  }
  KEDGE_ASSIGN_OR_RETURN(tiles_, device_.Allocate(MemoryKind::kDevice,
                                                  tiles * sizeof(EncodedTile)));
  KEDGE_ASSIGN_OR_RETURN(
      scratch_,
      device_.Allocate(MemoryKind::kDevice, tiles * sizeof(std::uint32_t)));
  // 3 % of bf16 take an eighth of this.
  KEDGE_ASSIGN_OR_RETURN(
      arena_, device_.Allocate(MemoryKind::kDevice,
                               options_.bytes / 8 + (std::uint64_t{1} << 20)));
  const Data& first = *data_.front();
  KEDGE_ASSIGN_OR_RETURN(read_pass_,
                         DifferencePass::Make(&bench_, stream_.get()));
  KEDGE_RETURN_IF_ERROR(
      read_pass_.Tune(first.device.data(), first.variants[1].device.data(),
                      first.bytes() / 16 * 16, stream_.get()));
  for (const auto& data : data_) KEDGE_RETURN_IF_ERROR(AddEncodeRows(*data));
  if (options_.dtype.empty()) {
    // Of bf16.
    KEDGE_RETURN_IF_ERROR(AddSumRow(first));
    KEDGE_RETURN_IF_ERROR(AddQuantiseRow(first));
  }
  return Measure();
}

absl::Status Bench::Run(const Options& options, std::string command) {
  KEDGE_ASSIGN_OR_RETURN(const std::unique_ptr<BenchDevice> device,
                         BenchDevice::Open(options.device));
  Bench bench(options, *device);
  KEDGE_RETURN_IF_ERROR(bench.Go());
  bench.Print();
  if (options.json.empty()) return absl::OkStatus();
  return WriteReport(options.json, bench.Report(command).str());
}

int Main(int argc, char** argv) {
  Options options;
  Flags flags;
  flags.Text("--device", &options.device)
      .Bytes("--bytes", &options.bytes)
      .Number("--rounds", &options.rounds)
      .Number("--tiles-checked", &options.tiles_checked)
      .Number("--seed", &options.seed)
      .Text("--dtype", &options.dtype)
      .Text("--json", &options.json)
      .Text("--commit", &options.commit);
  if (!flags.Parse(argc, argv)) return 2;
  constexpr std::uint64_t kLeast = std::uint64_t{1} << 16;
  constexpr std::uint64_t kMost = std::uint64_t{1} << 34;
  if (options.bytes < kLeast || options.bytes > kMost || options.rounds == 0 ||
      options.tiles_checked == 0) {
    std::fprintf(stderr,
                 "kedge_encode_bench: --bytes is 64KiB to 16GiB, --rounds and "
                 "--tiles-checked are at least 1\n");
    return 2;
  }
  const absl::Status status = Bench::Run(options, CommandLine(argc, argv));
  if (status.ok()) return 0;
  std::fprintf(stderr, "kedge_encode_bench: %s\n",
               std::string(status.message()).c_str());
  return 1;
}

}  // namespace
}  // namespace kedge

int main(int argc, char** argv) { return kedge::Main(argc, argv); }
