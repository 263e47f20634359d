#ifndef KEDGE_TESTS_ENGINE_DEVICE_DEVICE_TEST_SUPPORT_H_
#define KEDGE_TESTS_ENGINE_DEVICE_DEVICE_TEST_SUPPORT_H_

// Memory of a device with guards around it, tensors in it in every layout, and
// the fixture of the tests that both devices pass.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kedge/engine/device/device.h"
#include "kedge/format/box_target.h"
#include "kedge/format/tile_grid.h"
#include "kedge/tests/engine/cpu/cpu_test_support.h"
#include "kedge/tests/engine/device/test_device.h"
#include "kedge/tests/support/sanitized.h"

namespace kedge::testing {

// What every test needs to work; without it there is nothing to test.
inline void Must(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  std::abort();
}
template <typename T>
T Must(absl::StatusOr<T> value) {
  Must(value.status());
  return *std::move(value);
}

// Fills its bytes and waits.
inline void Upload(Device& device, void* to, std::span<const std::byte> from) {
  Must(device.Copy(to, from.data(), from.size(), nullptr));
  Must(device.WaitForStream(nullptr));
}
inline std::vector<std::byte> Download(Device& device, const void* from,
                                       std::uint64_t bytes) {
  std::vector<std::byte> to(bytes);
  Must(device.Copy(to.data(), from, bytes, nullptr));
  Must(device.WaitForStream(nullptr));
  return to;
}

// Bytes in device memory at any offset, poisoned, with guards on both sides.
class DeviceBuffer {
 public:
  DeviceBuffer(Device& device, std::uint64_t size, std::uint64_t offset = 0)
      : device_(&device),
        start_(kGuard + offset),
        size_(size),
        memory_(Must(
            device.Allocate(MemoryKind::kDevice, start_ + size + kGuard))) {
    Must(device.Fill(memory_.data(), kGuardByte, memory_.bytes(), nullptr));
    Must(device.WaitForStream(nullptr));
  }
  DeviceBuffer(Device& device, std::span<const std::byte> bytes,
               std::uint64_t offset = 0)
      : DeviceBuffer(device, bytes.size(), offset) {
    Write(bytes);
  }

  std::byte* data() const { return memory_.data() + start_; }
  std::uint64_t size() const { return size_; }
  void Write(std::span<const std::byte> bytes) {
    Upload(*device_, data(), bytes);
  }
  std::vector<std::byte> Read() const {
    return Download(*device_, data(), size_);
  }
  bool GuardsIntact() const {
    const auto before = Download(*device_, memory_.data(), start_);
    const auto behind = Download(*device_, data() + size_, kGuard);
    for (const auto* guard : {&before, &behind}) {
      for (const std::byte byte : *guard) {
        if (byte != std::byte{kGuardByte}) return false;
      }
    }
    return true;
  }

 private:
  static constexpr std::uint64_t kGuard = 256;
  static constexpr std::uint8_t kGuardByte = 0xc3;
  Device* device_;
  std::uint64_t start_;
  std::uint64_t size_;
  DeviceMemory memory_;
};

// An array in device memory, poisoned until it is written.
template <typename T>
class DeviceArray {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  DeviceArray(Device& device, std::uint64_t count)
      : buffer_(device, std::max<std::uint64_t>(count, 1) * sizeof(T)),
        count_(count) {}
  DeviceArray(Device& device, const std::vector<T>& values)
      : DeviceArray(device, values.size()) {
    if (count_ > 0) buffer_.Write(std::as_bytes(std::span(values)));
  }

  T* data() const { return reinterpret_cast<T*>(buffer_.data()); }
  std::uint64_t count() const { return count_; }
  std::vector<T> Read() const {
    const auto bytes = buffer_.Read();
    std::vector<T> values(count_);
    if (count_ > 0)
      std::memcpy(values.data(), bytes.data(), count_ * sizeof(T));
    return values;
  }
  bool GuardsIntact() const { return buffer_.GuardsIntact(); }

 private:
  DeviceBuffer buffer_;
  std::uint64_t count_;
};

// How an element type is seen by codec and kernels.
struct UnitType {
  const char* name;
  std::uint32_t unit_bytes;
  std::uint32_t units_per_element;

  std::uint64_t element_bytes() const {
    return std::uint64_t{unit_bytes} * units_per_element;
  }
};
inline constexpr UnitType kUnitTypes[] = {
    {"f8_e4m3", 1, 1}, {"bf16", 2, 1}, {"f32", 4, 1}, {"i64", 4, 2}};

// Ways in which an engine holds a tensor, or a part of it.
enum class Layout {
  kWhole,
  kTpRows,
  kTpColumns,
  kPackedHalf,   // one of two tensors in one allocation, the second
  kExpertStack,  // behind other experts in a stack
  kTransposed,
  kPadded,       // rows further apart than they are long
  kInterleaved,  // every other element of a row
};
inline constexpr Layout kLayouts[] = {
    Layout::kWhole,      Layout::kTpRows,      Layout::kTpColumns,
    Layout::kPackedHalf, Layout::kExpertStack, Layout::kTransposed,
    Layout::kPadded,     Layout::kInterleaved};
inline const char* Name(Layout layout) {
  static constexpr const char* kNames[] = {
      "whole",        "TP rows",    "TP columns", "packed half",
      "expert stack", "transposed", "padded",     "interleaved"};
  return kNames[static_cast<int>(layout)];
}

// The box of a tensor that `layout` holds, and the bytes of memory it needs:
// `data` is set as an offset in them from null.
struct BoxPlace {
  BoxTarget box;
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;

  BoxTarget At(std::byte* memory) const {
    BoxTarget placed = box;
    placed.data = memory + offset;
    return placed;
  }
};
inline BoxPlace PlaceBox(std::mt19937_64& rng, const TileGrid& grid,
                         const UnitType& type, Layout layout) {
  BoxPlace place;
  BoxTarget& box = place.box;
  box.unit_bytes = type.unit_bytes;
  box.units_per_element = type.units_per_element;
  box.row_end = grid.rows;
  const std::uint64_t elements = grid.cols / type.units_per_element;
  std::uint64_t first = 0;
  std::uint64_t last = elements;
  if (layout == Layout::kTpRows || layout == Layout::kTransposed) {
    box.row_begin = rng() % grid.rows;
    box.row_end = box.row_begin + 1 + rng() % (grid.rows - box.row_begin);
  }
  if (layout == Layout::kTpColumns || layout == Layout::kTransposed ||
      layout == Layout::kInterleaved) {
    first = rng() % elements;
    last = first + 1 + rng() % (elements - first);
  }
  box.col_begin = first * type.units_per_element;
  box.col_end = last * type.units_per_element;
  const std::uint64_t element = type.element_bytes();
  const std::uint64_t rows = box.row_end - box.row_begin;
  const std::uint64_t cols = last - first;
  std::uint64_t row_stride = cols * element;
  std::uint64_t col_stride = element;
  switch (layout) {
    case Layout::kPackedHalf:
      place.offset = rows * row_stride;
      break;
    case Layout::kExpertStack:
      place.offset = (1 + rng() % 3) * rows * row_stride;
      break;
    case Layout::kTransposed:
      row_stride = element;
      col_stride = (rows + rng() % 3) * element;
      break;
    case Layout::kPadded:
      row_stride += (1 + rng() % 40) * element;
      break;
    case Layout::kInterleaved:
      col_stride = 2 * element;
      row_stride = 2 * cols * element;
      break;
    default:
      break;
  }
  box.row_stride_bytes = static_cast<std::int64_t>(row_stride);
  box.col_stride_bytes = static_cast<std::int64_t>(col_stride);
  place.bytes = place.offset + (rows - 1) * row_stride +
                (cols - 1) * col_stride + element;
  return place;
}

// Copies the box's units out of the whole tensor.
inline void FillBox(const TileGrid& grid, const std::vector<std::byte>& tensor,
                    const BoxTarget& box) {
  const std::uint64_t run =
      box.rows_are_contiguous() ? box.col_end - box.col_begin : 1;
  for (std::uint64_t r = box.row_begin; r < box.row_end; ++r) {
    for (std::uint64_t c = box.col_begin; c < box.col_end; c += run) {
      std::memcpy(box.At(r, c),
                  tensor.data() + (r * grid.cols + c) * box.unit_bytes,
                  run * box.unit_bytes);
    }
  }
}

// Shapes of every kind of grid. `large`: some of millions of units too, on a
// GPU.
inline std::vector<Shape> DeviceShapes(bool large) {
  std::vector<Shape> shapes = {
      {},         {1},        {7},           {127},         {40000},
      {1, 999},   {999, 1},   {5, 1000},     {300, 130},    {257, 127},
      {129, 400}, {20000, 1}, {16, 8, 3, 3}, {70, 5, 5, 5}, {3, 20000},
      {131, 257}, {300, 128}, {33, 4097}};
  if (large && TestDeviceIsGpu()) {
    shapes.push_back({140, 9000});
    shapes.push_back({1031, 2053});
    shapes.push_back({3, 513, 1030});
    shapes.push_back({5'000'011});
    shapes.push_back({200'003, 17});
  }
  return shapes;
}

// Skips aloud where there is no device.
class DeviceTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string reason;
    device_ = MakeTestDevice(&reason);
    if (device_ == nullptr) GTEST_SKIP() << reason;
  }
  Device& device() { return *device_; }

  std::unique_ptr<Device> device_;
};

}  // namespace kedge::testing

#endif  // KEDGE_TESTS_ENGINE_DEVICE_DEVICE_TEST_SUPPORT_H_
