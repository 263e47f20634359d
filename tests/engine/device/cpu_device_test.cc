// Goal: what CpuDevice has beyond the seam: a delay that shows who does not
// wait, faults on demand, memory that is counted. Method: every call fails once
// by its name.

#include "kedge/engine/cpu/cpu_device.h"

#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kedge/tests/engine/device/device_test_support.h"

namespace kedge {
namespace {

using testing::Must;

TEST(CpuDeviceTest, DelayHoldsBackWhatIsEnqueued) {
  CpuDevice device({.delay = std::chrono::milliseconds(30)});
  const OwnedStream stream = Must(device.CreateStream());
  const OwnedEvent event = Must(device.CreateEvent());
  const DeviceMemory memory = Must(device.Allocate(MemoryKind::kPinned, 64));
  std::memset(memory.data(), 1, 64);
  Must(device.Fill(memory.data(), 2, 64, stream.get()));
  Must(device.Record(event.get(), stream.get()));
  EXPECT_FALSE(Must(device.HasPassed(event.get())));
  Must(device.WaitForEvent(event.get()));
  EXPECT_TRUE(Must(device.HasPassed(event.get())));
  EXPECT_EQ(memory.data()[63], std::byte{2});
}

TEST(CpuDeviceTest, MemoryComesWithoutZeros) {
  CpuDevice device;
  const DeviceMemory memory = Must(device.Allocate(MemoryKind::kDevice, 1000));
  for (std::size_t i = 0; i < 1000; ++i) {
    ASSERT_EQ(memory.data()[i], std::byte{0xcd});
  }
}

TEST(CpuDeviceTest, CountsItsMemory) {
  CpuDevice device;
  {
    const DeviceMemory a = Must(device.Allocate(MemoryKind::kDevice, 1000));
    const DeviceMemory b = Must(device.Allocate(MemoryKind::kPinned, 24));
    EXPECT_EQ(device.bytes_in_use(MemoryKind::kDevice), 1000u);
    EXPECT_EQ(device.bytes_in_use(MemoryKind::kPinned), 24u);
    EXPECT_EQ(device.allocation_count(), 2u);
  }
  EXPECT_EQ(device.bytes_in_use(MemoryKind::kDevice), 0u);
  EXPECT_EQ(device.bytes_in_use(MemoryKind::kPinned), 0u);
  EXPECT_EQ(device.allocation_count(), 2u);
}

TEST(CpuDeviceTest, AnyMemoryMayCountAsTheDevices) {
  const CpuDevice device({.any_memory_is_device_memory = true});
  const int here = 0;
  EXPECT_TRUE(device.IsDeviceMemory(&here));
  EXPECT_FALSE(device.IsDeviceMemory(nullptr));
}

TEST(CpuDeviceTest, FaultsFailTheCallTheyNameAndNothingElse) {
  std::string failing;
  std::vector<std::string> seen;
  CpuDevice device({.fault = [&](absl::string_view operation) {
    seen.emplace_back(operation);
    return operation == failing ? absl::InternalError("injected")
                                : absl::OkStatus();
  }});
  const OwnedStream stream = Must(device.CreateStream());
  const OwnedEvent event = Must(device.CreateEvent());
  const DeviceMemory memory = Must(device.Allocate(MemoryKind::kDevice, 64));
  const L61Key key = L61Key::FromSeed(1);
  const auto sums = Must(device.PrepareSums({}, 1, key));
  EncodeTotals totals;
  EncodeBatch encode;
  encode.totals = &totals;
  ApplyOutcome outcome;
  ApplyBatch apply;
  apply.outcome = &outcome;
  std::uint64_t first_bad_block = 0;
  QuantiseBatch quantise;
  quantise.first_bad_block = &first_bad_block;
  std::byte* const data = memory.data();
  const std::vector<std::pair<std::string, std::function<absl::Status()>>>
      calls = {
          {"Allocate device",
           [&] { return device.Allocate(MemoryKind::kDevice, 8).status(); }},
          {"Allocate pinned",
           [&] { return device.Allocate(MemoryKind::kPinned, 8).status(); }},
          {"RegisterHost", [&] { return device.RegisterHost(data, 8); }},
          {"CreateStream", [&] { return device.CreateStream().status(); }},
          {"CreateEvent", [&] { return device.CreateEvent().status(); }},
          {"Record", [&] { return device.Record(event.get(), stream.get()); }},
          {"StreamWait",
           [&] { return device.StreamWait(stream.get(), event.get()); }},
          {"HasPassed", [&] { return device.HasPassed(event.get()).status(); }},
          {"WaitForEvent", [&] { return device.WaitForEvent(event.get()); }},
          {"WaitForStream", [&] { return device.WaitForStream(stream.get()); }},
          {"Copy", [&] { return device.Copy(data, data + 32, 8, nullptr); }},
          {"CopyRows",
           [&] {
             return device.CopyRows(data, 8, data + 32, 8, 8, 2, nullptr);
           }},
          {"Fill", [&] { return device.Fill(data, 0, 8, nullptr); }},
          {"CopySliceToBox",
           [&] { return device.CopySliceToBox(data, {}, {}, {}, nullptr); }},
          {"MakeL61Table", [&] { return device.MakeL61Table(key).status(); }},
          {"Encode", [&] { return device.Encode(encode, nullptr); }},
          {"Apply", [&] { return device.Apply(apply, nullptr); }},
          {"Quantise", [&] { return device.Quantise(quantise, nullptr); }},
          {"PrepareSums",
           [&] { return device.PrepareSums({}, 0, key).status(); }},
          {"Sums", [&] { return sums->Enqueue(nullptr); }},
      };
  for (const auto& [operation, call] : calls) {
    SCOPED_TRACE(operation);
    seen.clear();
    failing = operation;
    EXPECT_EQ(call(), absl::InternalError("injected"));
    ASSERT_FALSE(seen.empty());
    EXPECT_EQ(seen.front(), operation);
    failing.clear();
    EXPECT_TRUE(call().ok());
  }
  Must(device.WaitForStream(nullptr));
  Must(device.WaitForStream(stream.get()));
}

}  // namespace
}  // namespace kedge
