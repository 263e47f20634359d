#ifndef KEDGE_ENGINE_DEVICE_KERNEL_TASKS_H_
#define KEDGE_ENGINE_DEVICE_KERNEL_TASKS_H_

// What kernels are given and what they give back: plain structs that lie in
// device memory or travel by value. Shared by host code and kernels; all
// pointers are the device's unless a comment says otherwise.

#include <cstddef>
#include <cstdint>

#include "kedge/format/box_target.h"
#include "kedge/format/host_device.h"
#include "kedge/format/l61.h"
#include "kedge/format/tile_grid.h"

namespace kedge {

// The run's weights A (format/l61.h) where kernels find them.
struct DeviceL61 {
  const std::uint64_t* a = nullptr;  // [kL61TileWords]
  L61Key key;
};

// ------------------------------------------------------------ diff and encode

// Units of a slice in memory. Unit (r, c) of the tensor's matrix lies at
//   base + (r - first_row) * row_stride_bytes
//        + (c / units_per_element) * col_stride_bytes
//        + (c % units_per_element) * unit_bytes
// Only units of the slice are touched; `base` may lie before the first one.
// Each lies at a multiple of unit_bytes, as do those of every box below.
struct StridedUnits {
  const std::byte* base = nullptr;
  std::uint64_t first_row = 0;
  std::int64_t row_stride_bytes = 0;
  std::int64_t col_stride_bytes = 0;  // of one element
  std::uint32_t unit_bytes = 0;       // 1, 2 or 4
  std::uint32_t units_per_element = 1;

  KEDGE_HOST_DEVICE const std::byte* At(std::uint64_t row,
                                        std::uint64_t col) const {
    return base +
           static_cast<std::int64_t>(row - first_row) * row_stride_bytes +
           static_cast<std::int64_t>(col / units_per_element) *
               col_stride_bytes +
           static_cast<std::int64_t>((col % units_per_element) * unit_bytes);
  }
};

// One slice whose old and new units are compared.
struct EncodeSlice {
  TileGrid grid;
  UnitRange slice;  // not empty
  StridedUnits old_units;
  StridedUnits new_units;  // the same unit_bytes and units_per_element
  // Where the slice's tiles (grid.TilesOf(slice), in order) stand among those
  // of the batch: the tile counts of the slices before it, added up.
  std::uint64_t first_tile = 0;
};

// What became of one tile of a slice: the payload that EncodeTile
// (format/codec.h) gives for its units within the slice, and its header.
struct EncodedTile {
  std::uint64_t l61 = 0;      // L of its changes, in [0, p)
  std::uint32_t payload = 0;  // in the arena, in units of kArenaAlignment
  std::uint32_t bytes = 0;    // of the payload; 0: nothing changed
  std::uint32_t nnz = 0;
  std::uint16_t a = 0;
  std::uint16_t b = 0;
  std::uint32_t mode = 0;  // TileMode
  std::uint32_t reserved = 0;
};
static_assert(sizeof(EncodedTile) == 32);
inline constexpr std::uint64_t kArenaAlignment = 8;
// EncodedTile::payload of a tile for which the arena had no room; its other
// members are right.
inline constexpr std::uint32_t kNoPayload = 0xffffffffu;

// The most bytes that a tile of `units` units takes in the arena.
KEDGE_HOST_DEVICE constexpr std::uint64_t MaxTilePayload(
    std::uint32_t units, std::uint32_t unit_bytes) {
  const std::uint64_t bits = std::uint64_t{units} * (8 * unit_bytes + 1);
  return (bits / 8 + kArenaAlignment) / kArenaAlignment * kArenaAlignment;
}

struct EncodeTotals {
  std::uint64_t arena_bytes = 0;  // asked for, also if there was no room
  std::uint64_t nnz = 0;
  std::uint32_t changed_tiles = 0;
  std::uint32_t heavy_tiles = 0;  // that took the slow path
};

struct EncodeBatch {
  const EncodeSlice* slices = nullptr;  // [slice_count], ascending first_tile
  std::uint32_t slice_count = 0;
  std::uint64_t tile_count = 0;  // of all slices
  EncodedTile* tiles = nullptr;  // [tile_count]; every one is written
  std::byte* arena = nullptr;    // aligned to 16
  std::uint64_t arena_bytes = 0;
  EncodeTotals* totals = nullptr;    // written
  std::uint32_t* scratch = nullptr;  // [tile_count]
  DeviceL61 l61;
};

// -------------------------------------------------------------------- apply

// One record of a delta, as kernels see it.
struct ApplyRecord {
  TileGrid grid;
  UnitRange slice;
  std::uint32_t unit_bytes = 0;
  std::uint32_t first_box = 0;  // in ApplyBatch::boxes
  std::uint32_t box_count = 0;  // boxes of the tensor that the slice touches
  std::uint32_t reserved = 0;
};

// One listed tile of a record.
struct ApplyTile {
  std::uint64_t payload = 0;  // offset in ApplyBatch::payloads
  std::uint64_t tile = 0;     // in the tensor's grid
  std::uint32_t record = 0;   // in ApplyBatch::records
  std::uint32_t bytes = 0;
  std::uint16_t a = 0;
  std::uint16_t b = 0;
  std::uint32_t mode = 0;  // TileMode
};
static_assert(sizeof(ApplyTile) == 32);

// Why a tile cannot be decoded.
enum class TileFault : std::uint32_t {
  kNone = 0,
  kCounts = 1,  // a + b of 0 or above the tile's units; a bad dense parameter
  kPlanes = 2,  // planes beyond the payload, or that do not fill it
  kIndex = 3,   // a unit beyond the tile, or twice
  kSlice = 4,   // a unit outside the record's slice
  kDifference = 5,  // |d| of 2^w or more
  kEscape = 6,      // a dense tile's escapes
};

struct ApplyOutcome {
  std::uint64_t units_written = 0;  // a unit in two boxes counts twice
  std::uint64_t nnz = 0;            // of all tiles given
  std::uint64_t first_bad_tile = ~std::uint64_t{0};  // the lowest index
  TileFault fault = TileFault::kNone;                // of that tile
  std::uint32_t reserved = 0;
};

// What the tiles of one record say together (kCheck).
struct RecordSums {
  std::uint64_t nnz = 0;
  std::uint64_t l61_low = 0;   // sums of the low 31 bits of residues and of
  std::uint64_t l61_high = 0;  // what is above them: L61OfHalves

  KEDGE_HOST_DEVICE std::uint64_t l61() const {
    return L61Add(L61Reduce(l61_low),
                  L61Mul(L61Reduce(l61_high), std::uint64_t{1} << 31));
  }
};

enum class ApplyMode : std::uint32_t {
  kApply = 0,  // w += difference modulo 2^w, in every box that holds the unit
  kCheck = 1,  // writes no weight; fills RecordSums
};

struct ApplyBatch {
  ApplyMode mode = ApplyMode::kApply;
  // Tests: tiles from this one on are left alone, as if the launch had died.
  std::uint64_t tile_limit = ~std::uint64_t{0};
  const ApplyTile* tiles = nullptr;  // [tile_count]
  std::uint64_t tile_count = 0;
  const struct ApplyRecord* records = nullptr;  // [record_count]
  std::uint32_t record_count = 0;
  const BoxTarget* boxes = nullptr;  // data points into device memory
  // Whole 8-byte words may be read beyond a payload's end: 16 bytes behind the
  // last one are readable.
  const std::byte* payloads = nullptr;
  std::uint64_t payload_bytes = 0;  // every tile's payload lies within
  ApplyOutcome* outcome = nullptr;  // written
  RecordSums* sums = nullptr;       // [record_count]; kCheck only; written
  DeviceL61 l61;                    // kCheck only
};

// ----------------------------------------------------------------- checksums

// One box whose part of S is wanted.
struct SumBox {
  BoxTarget box;
  std::uint64_t cols = 0;    // of the tensor's grid
  std::uint32_t output = 0;  // which sum it belongs to
  std::uint32_t reserved = 0;
};

// ------------------------------------------------------------------ quantise

// How the scale of an fp8 block follows from its amax (spec/fp8.md).
enum class ScaleKind : std::uint32_t {
  kExact = 0,       // max(amax, floor) / 448
  kPowerOfTwo = 1,  // the next power of two of that
};

// A bf16 matrix, or rows of one that begin where blocks do, to f8_e4m3 in
// blocks of 128 x 128 with an f32 scale each.
struct QuantiseTask {
  const std::byte* source = nullptr;  // bf16, columns contiguous
  std::int64_t source_row_stride_bytes = 0;
  std::uint64_t rows = 0;
  std::uint64_t cols = 0;
  std::byte* values = nullptr;    // [rows, cols] u8, contiguous
  float* scales = nullptr;        // [ceil(rows / 128), ceil(cols / 128)]
  std::uint64_t first_block = 0;  // blocks of the tasks before it, added up
};

struct QuantiseBatch {
  const QuantiseTask* tasks = nullptr;  // [task_count], ascending first_block
  std::uint32_t task_count = 0;
  std::uint64_t block_count = 0;
  ScaleKind scale_kind = ScaleKind::kExact;
  float floor = 0;  // the least amax; > 0
  // Written: the lowest block with a NaN or an infinity, or ~0.
  std::uint64_t* first_bad_block = nullptr;
};

}  // namespace kedge

#endif  // KEDGE_ENGINE_DEVICE_KERNEL_TASKS_H_
