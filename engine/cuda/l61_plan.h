#ifndef KEDGE_ENGINE_CUDA_L61_PLAN_H_
#define KEDGE_ENGINE_CUDA_L61_PLAN_H_

// How the boxes whose L61 is wanted become work for kernels (l61_sum.h), one
// for each kind of work. No CUDA here.
//
// Almost all bytes of a model lie in tensors or row slices that are contiguous
// in memory, in rows of some hundred bytes, or transposed in units of 16 bits:
// these kinds run at memory speed. Everything else (other transposed storage,
// odd alignment, ends of words that the box holds in part) is brought into the
// tensor's order in shared memory first.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kedge/engine/device/kernel_tasks.h"

namespace kedge {

// The words that share a B, in bytes: a row of weights A.
inline constexpr std::uint64_t kL61RowBytes = 4 * std::uint64_t{kL61TileWords};

enum class SumKind : std::uint8_t {
  // One run of `row_bytes`, a multiple of 16, that follow each other in memory
  // and in the tensor; `data` and `offset` are multiples of 16. It meets `rows`
  // rows of A, the first and the last of them perhaps in part; at most
  // kMaxSumRows.
  kRows,
  // `rows` runs of `row_bytes` each, a multiple of 16, below 64 KiB; addresses
  // and offsets of all of them are multiples of 16. At most kMaxVectors, and at
  // most kMaxVectorSpan from the first to the last byte in the tensor.
  kVectors,
  // `rows` runs of `row_bytes` each, units of 2 bytes, stored transposed: the
  // rows of a column follow each other in memory. `rows` is a multiple of 8, at
  // most kMaxColumnRows, `row_bytes`, `offset` and `tensor_stride` are
  // multiples of 32, `data` and `col_stride_bytes` of 16. At most
  // kMaxVectorSpan from the first to the last byte in the tensor.
  kColumns,
  // `rows` runs of `row_bytes` of the tensor, whole units, that fit in
  // kSumTileBytes with what precedes them in 16 bytes; in memory at any stride.
  kTiles,
};

// One piece of work.
struct alignas(16) SumItem {
  const std::byte* data = nullptr;    // device memory: the first unit
  std::uint64_t offset = 0;           // its place in the tensor, in bytes
  std::uint64_t tensor_stride = 0;    // from row to row, in the tensor
  std::int64_t row_stride_bytes = 0;  // from row to row, in memory
  // kColumns, kTiles: from element to element, in memory.
  std::int64_t col_stride_bytes = 0;
  std::uint32_t rows = 0;
  std::uint32_t row_bytes = 0;
  std::uint32_t output = 0;
  SumKind kind = SumKind::kRows;
  std::uint8_t unit_bytes = 0;
  std::uint8_t units_per_element = 0;
  std::uint8_t reserved[9] = {};
};
static_assert(sizeof(SumItem) == 64);

inline constexpr std::uint32_t kMaxSumRows = 32;        // of an item
inline constexpr std::uint32_t kMaxVectors = 1u << 15;  // of an item
inline constexpr std::uint64_t kMaxVectorSpan = std::uint64_t{1} << 31;
inline constexpr std::uint32_t kMaxColumnRows = 64;     // of an item
inline constexpr std::uint32_t kMaxColumnBytes = 1024;  // of its rows
inline constexpr std::uint32_t kSumTileBytes = 512;
inline constexpr std::uint32_t kSumTileRows = 32;

struct SumPlan {
  std::vector<SumItem> items;  // in the order of SumKind
  std::size_t row_items = 0;
  std::size_t vector_items = 0;
  std::size_t column_items = 0;
  std::size_t tile_items = 0;
  std::uint64_t bytes = 0;  // of weights that they read
};

// Every byte of every box is in exactly one item. Units lie at multiples of
// their size. Outputs are copied, not checked.
SumPlan PlanSums(std::span<const SumBox> boxes);

}  // namespace kedge

#endif  // KEDGE_ENGINE_CUDA_L61_PLAN_H_
