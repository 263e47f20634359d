#include "kedge/engine/cuda/l61_plan.h"

#include <algorithm>

namespace kedge {
namespace {

constexpr std::uint64_t kVectorBytes = 16;
// Runs from this on are cut at rows of A, even where a box has many.
constexpr std::uint64_t kLongRun = 4 * kL61RowBytes;
// Transposed storage: units, rows in a vector, and what tensor offsets are
// multiples of.
constexpr std::uint64_t kColumnUnit = 2;
constexpr std::uint64_t kRowsOfColumnVector = kVectorBytes / kColumnUnit;
constexpr std::uint64_t kColumnAlignment = 32;
// Warps share an item: it is long enough that each has some to do.
constexpr std::uint64_t kLeastVectorItem = 16 * kL61RowBytes;

class Planner {
 public:
  explicit Planner(std::uint64_t item_bytes) : item_bytes_(item_bytes) {}

  void AddBox(const SumBox& sum) {
    const BoxTarget& box = sum.box;
    if (box.row_begin >= box.row_end || box.col_begin >= box.col_end) return;
    output_ = sum.output;
    unit_bytes_ = box.unit_bytes;
    units_per_element_ = box.units_per_element;
    col_stride_ = box.col_stride_bytes;

    Part part;
    part.data = box.data;
    part.rows = box.row_end - box.row_begin;
    part.row_bytes = (box.col_end - box.col_begin) * box.unit_bytes;
    part.offset = (box.row_begin * sum.cols + box.col_begin) * box.unit_bytes;
    part.tensor_stride = sum.cols * box.unit_bytes;
    part.row_stride = box.row_stride_bytes;
    plan_.bytes += part.rows * part.row_bytes;

    if (!box.rows_are_contiguous()) {
      AddTransposed(part);
      return;
    }
    const bool whole_rows =
        part.row_bytes == part.tensor_stride &&
        part.row_stride == static_cast<std::int64_t>(part.row_bytes);
    if (whole_rows || part.rows == 1) {
      AddRun(part.data, part.offset, part.rows * part.row_bytes);
    } else if (part.row_bytes >= kLongRun) {
      for (std::uint64_t row = 0; row < part.rows; ++row) {
        AddRun(part.data + static_cast<std::int64_t>(row) * part.row_stride,
               part.offset + row * part.tensor_stride, part.row_bytes);
      }
    } else {
      AddShortRows(part);
    }
  }
  SumPlan Take() {
    std::stable_sort(
        plan_.items.begin(), plan_.items.end(),
        [](const SumItem& a, const SumItem& b) { return a.kind < b.kind; });
    return std::move(plan_);
  }

 private:
  // Rows of whole units, `row_bytes` of the tensor each.
  struct Part {
    const std::byte* data = nullptr;
    std::uint64_t offset = 0;
    std::uint64_t tensor_stride = 0;
    std::int64_t row_stride = 0;
    std::uint64_t rows = 0;
    std::uint64_t row_bytes = 0;

    // The columns from byte `begin` on, of rows that are contiguous.
    Part Columns(std::uint64_t begin, std::uint64_t bytes) const {
      Part part = *this;
      part.data += begin;
      part.offset += begin;
      part.row_bytes = bytes;
      return part;
    }
  };

  void AddItem(SumKind kind, const Part& part) {
    SumItem item;
    item.data = part.data;
    item.offset = part.offset;
    item.tensor_stride = part.tensor_stride;
    item.row_stride_bytes = part.row_stride;
    item.col_stride_bytes = col_stride_;
    item.rows = static_cast<std::uint32_t>(part.rows);
    item.row_bytes = static_cast<std::uint32_t>(part.row_bytes);
    item.output = output_;
    item.kind = kind;
    item.unit_bytes = static_cast<std::uint8_t>(unit_bytes_);
    item.units_per_element = static_cast<std::uint8_t>(units_per_element_);
    plan_.items.push_back(item);
    switch (kind) {
      case SumKind::kRows:
        ++plan_.row_items;
        break;
      case SumKind::kVectors:
        ++plan_.vector_items;
        break;
      case SumKind::kColumns:
        ++plan_.column_items;
        break;
      case SumKind::kTiles:
        ++plan_.tile_items;
    }
  }

  // `bytes` of each row from byte `begin` on, whole elements.
  Part ColumnsOf(Part part, std::uint64_t begin, std::uint64_t bytes) const {
    const std::uint64_t element =
        std::uint64_t{unit_bytes_} * units_per_element_;
    part.data += static_cast<std::int64_t>(begin / element) * col_stride_;
    part.offset += begin;
    part.row_bytes = bytes;
    return part;
  }

  // Rows of `part`, at most `most_rows` an item.
  void AddRowsOf(SumKind kind, Part part, std::uint64_t most_rows) {
    for (std::uint64_t left = part.rows; left > 0; left -= part.rows) {
      part.rows = std::min(left, std::max<std::uint64_t>(most_rows, 1));
      AddItem(kind, part);
      part.data += static_cast<std::int64_t>(part.rows) * part.row_stride;
      part.offset += part.rows * part.tensor_stride;
    }
  }

  static std::uint64_t Misalignment(const std::byte* data) {
    return reinterpret_cast<std::uintptr_t>(data) % kVectorBytes;
  }

  // Rows whose elements do not follow each other.
  void AddTransposed(const Part& part) {
    const std::uint64_t left =
        (kColumnAlignment - part.offset) % kColumnAlignment;
    const std::uint64_t top =
        (kVectorBytes - Misalignment(part.data)) % kVectorBytes / kColumnUnit;
    if (unit_bytes_ != kColumnUnit || units_per_element_ != 1 ||
        part.row_stride != static_cast<std::int64_t>(kColumnUnit) ||
        col_stride_ % static_cast<std::int64_t>(kVectorBytes) != 0 ||
        part.tensor_stride % kColumnAlignment != 0 ||
        part.tensor_stride > kMaxVectorSpan / kMaxColumnRows ||
        part.row_bytes < left + kColumnAlignment ||
        part.rows < top + kRowsOfColumnVector) {
      AddTiles(part);
      return;
    }
    const std::uint64_t middle =
        (part.row_bytes - left) / kColumnAlignment * kColumnAlignment;
    if (left > 0) AddTiles(ColumnsOf(part, 0, left));
    const std::uint64_t right = part.row_bytes - left - middle;
    if (right > 0) AddTiles(ColumnsOf(part, left + middle, right));

    Part rows = ColumnsOf(part, left, middle);
    const auto take = [&](std::uint64_t count) {
      Part taken = rows;
      taken.rows = count;
      rows.data += static_cast<std::int64_t>(count) * rows.row_stride;
      rows.offset += count * rows.tensor_stride;
      rows.rows -= count;
      return taken;
    };
    if (top > 0) AddTiles(take(top));
    const Part whole =
        take(rows.rows / kRowsOfColumnVector * kRowsOfColumnVector);
    // Warps that run side by side take items that follow each other: these
    // stand below each other, so that together they read longer runs.
    for (std::uint64_t begin = 0; begin < middle; begin += kMaxColumnBytes) {
      const std::uint64_t bytes =
          std::min<std::uint64_t>(kMaxColumnBytes, middle - begin);
      AddRowsOf(SumKind::kColumns, ColumnsOf(whole, begin, bytes),
                kMaxColumnRows);
    }
    if (rows.rows > 0) AddTiles(rows);
  }

  // Rows with one stride, each contiguous.
  void AddShortRows(const Part& part) {
    const std::uint64_t before = part.offset % kVectorBytes;
    if (part.tensor_stride % kVectorBytes != 0 ||
        part.row_stride % static_cast<std::int64_t>(kVectorBytes) != 0 ||
        Misalignment(part.data) != before) {
      AddTiles(part);
      return;
    }
    const std::uint64_t head =
        std::min((kVectorBytes - before) % kVectorBytes, part.row_bytes);
    const std::uint64_t middle =
        (part.row_bytes - head) / kVectorBytes * kVectorBytes;
    if (head > 0) AddTiles(part.Columns(0, head));
    if (middle > 0) AddVectors(part.Columns(head, middle));
    if (head + middle < part.row_bytes) {
      AddTiles(part.Columns(head + middle, part.row_bytes - head - middle));
    }
  }

  void AddVectors(Part part) {
    const std::uint64_t bytes = std::max(item_bytes_, kLeastVectorItem);
    const std::uint64_t rows = std::min(
        {bytes / part.row_bytes, kMaxVectors / (part.row_bytes / kVectorBytes),
         (kMaxVectorSpan - part.row_bytes) / part.tensor_stride + 1});
    AddRowsOf(SumKind::kVectors, part, rows);
  }

  // Bytes that follow each other in memory and in the tensor.
  void AddRun(const std::byte* data, std::uint64_t offset,
              std::uint64_t bytes) {
    if (Misalignment(data) != offset % kVectorBytes) {
      AddRunOfTiles(data, offset, bytes);
      return;
    }
    const auto advance = [&](std::uint64_t by) {
      data += by;
      offset += by;
      bytes -= by;
    };
    const std::uint64_t head =
        std::min((kVectorBytes - offset % kVectorBytes) % kVectorBytes, bytes);
    AddRunOfTiles(data, offset, head);
    advance(head);

    while (bytes >= kVectorBytes) {
      // Up to where a row of A begins.
      Part part;
      part.data = data;
      part.offset = offset;
      part.row_bytes = std::min(item_bytes_ - offset % kL61RowBytes,
                                bytes / kVectorBytes * kVectorBytes);
      part.rows =
          (offset % kL61RowBytes + part.row_bytes - 1) / kL61RowBytes + 1;
      AddItem(SumKind::kRows, part);
      advance(part.row_bytes);
    }
    AddRunOfTiles(data, offset, bytes);
  }

  // The same, seen as rows as long as a tile's.
  void AddRunOfTiles(const std::byte* data, std::uint64_t offset,
                     std::uint64_t bytes) {
    const std::uint64_t width = TileWidth(offset % kVectorBytes != 0);
    Part part;
    part.data = data;
    part.offset = offset;
    part.tensor_stride = width;
    part.row_stride = static_cast<std::int64_t>(width);
    part.rows = bytes / width;
    part.row_bytes = width;
    const std::uint64_t rest = bytes % width;
    const std::int64_t col_stride = col_stride_;
    col_stride_ = unit_bytes_ * units_per_element_;
    if (part.rows > 0) AddTiles(part);
    if (rest > 0) {
      part.data += part.rows * width;
      part.offset += part.rows * width;
      part.rows = 1;
      part.row_bytes = rest;
      AddTiles(part);
    }
    col_stride_ = col_stride;
  }

  // What of a row fits in a tile's, in whole elements.
  static std::uint64_t TileWidth(bool shifted) {
    return kSumTileBytes - (shifted ? kVectorBytes : 0);
  }

  void AddTiles(const Part& part) {
    const std::uint64_t width =
        TileWidth(part.offset % kVectorBytes != 0 ||
                  part.tensor_stride % kVectorBytes != 0);
    const std::uint64_t tiles =
        std::max<std::uint64_t>(item_bytes_ / (kSumTileRows * width), 1);
    for (std::uint64_t begin = 0; begin < part.row_bytes; begin += width) {
      const Part columns =
          ColumnsOf(part, begin, std::min(width, part.row_bytes - begin));
      AddRowsOf(SumKind::kTiles, columns, tiles * kSumTileRows);
    }
  }

  std::uint64_t item_bytes_;
  SumPlan plan_;
  // Of the box at hand.
  std::uint32_t output_ = 0;
  std::uint32_t unit_bytes_ = 1;
  std::uint32_t units_per_element_ = 1;
  std::int64_t col_stride_ = 1;
};

}  // namespace

SumPlan PlanSums(std::span<const SumBox> boxes) {
  std::uint64_t bytes = 0;
  for (const SumBox& sum : boxes) {
    bytes += sum.box.unit_count() * sum.box.unit_bytes;
  }
  // Some thousand items keep all blocks of a GPU busy to the end; long items
  // cost less.
  const std::uint64_t item_bytes =
      std::clamp<std::uint64_t>(bytes / 8192 / kL61RowBytes * kL61RowBytes,
                                4 * kL61RowBytes, kMaxSumRows * kL61RowBytes);
  Planner planner(item_bytes);
  for (const SumBox& sum : boxes) planner.AddBox(sum);
  return planner.Take();
}

}  // namespace kedge
