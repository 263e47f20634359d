// Goal: memory, streams, events and copies of a device behave as
// engine/device/device.h says. Method: work whose order shows in the bytes,
// large enough that what is not waited for is seen; every kind of memory.

#include <cstring>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "kedge/tests/engine/device/device_test_support.h"

namespace kedge {
namespace {

using testing::DeviceBuffer;
using testing::DeviceTest;
using testing::Download;
using testing::FillRandom;
using testing::Must;

using MemoryTest = DeviceTest;
using StreamTest = DeviceTest;
using CopyTest = DeviceTest;

std::vector<std::byte> RandomBytes(std::uint64_t seed, std::size_t size) {
  std::mt19937_64 rng(seed);
  std::vector<std::byte> bytes(size);
  FillRandom(rng, bytes);
  return bytes;
}

TEST_F(MemoryTest, IsAlignedAndKnownAsWhatItIs) {
  for (const std::uint64_t bytes : {1u, 255u, 4097u, 1u << 20}) {
    for (const MemoryKind kind : {MemoryKind::kDevice, MemoryKind::kPinned}) {
      const DeviceMemory memory = Must(device().Allocate(kind, bytes));
      EXPECT_EQ(memory.bytes(), bytes);
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory.data()) % 256, 0u);
      const bool on_device = kind == MemoryKind::kDevice;
      EXPECT_EQ(device().IsDeviceMemory(memory.data()), on_device);
      EXPECT_EQ(device().IsDeviceMemory(memory.data() + bytes - 1), on_device);
    }
  }
  const int on_the_stack = 0;
  EXPECT_FALSE(device().IsDeviceMemory(&on_the_stack));
  EXPECT_FALSE(device().IsDeviceMemory(nullptr));
}

TEST_F(MemoryTest, OfZeroBytesIsEmptyAndMovesLeaveNothingBehind) {
  const DeviceMemory none = Must(device().Allocate(MemoryKind::kDevice, 0));
  EXPECT_EQ(none.data(), nullptr);
  EXPECT_EQ(none.bytes(), 0u);
  DeviceMemory first = Must(device().Allocate(MemoryKind::kPinned, 64));
  std::byte* const at = first.data();
  const DeviceMemory second = std::move(first);
  EXPECT_EQ(second.data(), at);
}

TEST_F(MemoryTest, MoreThanThereIsIsResourceExhaustedWithItsSize) {
  if (kSanitized) GTEST_SKIP() << "sanitizers stop at such a size";
  for (const MemoryKind kind : {MemoryKind::kDevice, MemoryKind::kPinned}) {
    if (kind == MemoryKind::kPinned && testing::TestDeviceIsGpu()) {
      continue;  // the driver may take minutes to find out
    }
    const auto memory = device().Allocate(kind, std::uint64_t{1} << 55);
    ASSERT_FALSE(memory.ok());
    EXPECT_EQ(memory.status().code(), absl::StatusCode::kResourceExhausted);
    EXPECT_NE(memory.status().message().find("36028797018963968"),
              absl::string_view::npos)
        << memory.status();
  }
  // The failure stays with the call that met it.
  EXPECT_TRUE(device().Allocate(MemoryKind::kDevice, 64).ok());
  EXPECT_TRUE(device().WaitForStream(nullptr).ok());
}

TEST_F(MemoryTest, RegisteredHostMemoryIsASourceAndATarget) {
  auto bytes = RandomBytes(1, 3 << 20);
  const absl::Status registered =
      device().RegisterHost(bytes.data(), bytes.size());
  if (!registered.ok()) {
    EXPECT_EQ(registered.code(), absl::StatusCode::kUnimplemented);
  }
  DeviceBuffer there(device(), bytes.size());
  Must(device().Copy(there.data(), bytes.data(), bytes.size(), nullptr));
  Must(device().WaitForStream(nullptr));
  if (registered.ok()) device().UnregisterHost(bytes.data());
  EXPECT_EQ(there.Read(), bytes);
}

TEST_F(StreamTest, RunsItsWorkInOrder) {
  const OwnedStream stream = Must(device().CreateStream());
  DeviceBuffer buffer(device(), 1 << 20);
  const auto last = RandomBytes(2, buffer.size());
  const DeviceMemory pinned =
      Must(device().Allocate(MemoryKind::kPinned, buffer.size()));
  const DeviceMemory back =
      Must(device().Allocate(MemoryKind::kPinned, buffer.size()));
  std::memcpy(pinned.data(), last.data(), last.size());
  for (int round = 0; round < 50; ++round) {
    Must(device().Fill(buffer.data(), static_cast<std::uint8_t>(round),
                       buffer.size(), stream.get()));
  }
  Must(
      device().Copy(buffer.data(), pinned.data(), buffer.size(), stream.get()));
  Must(device().Copy(back.data(), buffer.data(), buffer.size(), stream.get()));
  Must(device().WaitForStream(stream.get()));
  EXPECT_EQ(std::memcmp(back.data(), last.data(), last.size()), 0);
}

TEST_F(StreamTest, MoreTasksThanAnyQueueHoldsAllRun) {
  const OwnedStream stream = Must(device().CreateStream());
  constexpr std::uint64_t kTasks = 5000;
  DeviceBuffer buffer(device(), kTasks);
  for (std::uint64_t i = 0; i < kTasks; ++i) {
    Must(device().Fill(buffer.data() + i, static_cast<std::uint8_t>(i), 1,
                       stream.get()));
  }
  Must(device().WaitForStream(stream.get()));
  const auto bytes = buffer.Read();
  for (std::uint64_t i = 0; i < kTasks; ++i) {
    ASSERT_EQ(bytes[i], static_cast<std::byte>(i)) << i;
  }
  EXPECT_TRUE(buffer.GuardsIntact());
}

TEST_F(StreamTest, EventNeverRecordedHasPassed) {
  const OwnedEvent event = Must(device().CreateEvent());
  const OwnedStream stream = Must(device().CreateStream());
  EXPECT_TRUE(Must(device().HasPassed(event.get())));
  EXPECT_TRUE(device().WaitForEvent(event.get()).ok());
  EXPECT_TRUE(device().StreamWait(stream.get(), event.get()).ok());
  EXPECT_TRUE(device().WaitForStream(stream.get()).ok());
}

TEST_F(StreamTest, EventsOrderTwoStreams) {
  const OwnedStream first = Must(device().CreateStream());
  const OwnedStream second = Must(device().CreateStream());
  const OwnedEvent there = Must(device().CreateEvent());
  const OwnedEvent back = Must(device().CreateEvent());
  constexpr std::uint64_t kBytes = (kSanitized ? 1 : 8) << 20;
  DeviceBuffer source(device(), kBytes);
  DeviceBuffer target(device(), kBytes);
  // Each round writes `source` on one stream and reads it on the other; the
  // next round may write only when it was read.
  for (int round = 1; round <= 20; ++round) {
    Must(device().StreamWait(first.get(), back.get()));
    Must(device().Fill(source.data(), static_cast<std::uint8_t>(round), kBytes,
                       first.get()));
    Must(device().Record(there.get(), first.get()));
    Must(device().StreamWait(second.get(), there.get()));
    Must(device().Copy(target.data(), source.data(), kBytes, second.get()));
    Must(device().Record(back.get(), second.get()));
    if (round % 5 == 0) {
      Must(device().WaitForEvent(back.get()));
      EXPECT_TRUE(Must(device().HasPassed(there.get())));
      const auto bytes = target.Read();
      ASSERT_EQ(bytes, std::vector(kBytes, static_cast<std::byte>(round)));
    }
  }
}

TEST_F(StreamTest, EventRecordedAgainIsTheLaterPoint) {
  const OwnedStream stream = Must(device().CreateStream());
  const OwnedEvent event = Must(device().CreateEvent());
  DeviceBuffer buffer(device(), (kSanitized ? 2 : 16) << 20);
  Must(device().Record(event.get(), stream.get()));
  Must(device().WaitForEvent(event.get()));
  for (const std::uint8_t value : {1, 2}) {
    Must(device().Fill(buffer.data(), value, buffer.size(), stream.get()));
  }
  Must(device().Record(event.get(), stream.get()));
  Must(device().WaitForEvent(event.get()));
  EXPECT_TRUE(Must(device().HasPassed(event.get())));
  EXPECT_EQ(buffer.Read(), std::vector(buffer.size(), std::byte{2}));
}

TEST_F(StreamTest, EventsAndStreamsMayGoBeforeTheirWorkHasRun) {
  DeviceBuffer buffer(device(), 4 << 20);
  const OwnedStream waiter = Must(device().CreateStream());
  {
    const OwnedStream stream = Must(device().CreateStream());
    const OwnedEvent event = Must(device().CreateEvent());
    for (int round = 0; round < 10; ++round) {
      Must(device().Fill(buffer.data(), 7, buffer.size(), stream.get()));
    }
    Must(device().Record(event.get(), stream.get()));
    Must(device().StreamWait(waiter.get(), event.get()));
  }
  Must(device().Fill(buffer.data(), 8, buffer.size(), waiter.get()));
  Must(device().WaitForStream(waiter.get()));
  EXPECT_EQ(buffer.Read(), std::vector(buffer.size(), std::byte{8}));
}

TEST_F(StreamTest, ManyThreadsUseStreamsOfTheirOwn) {
  constexpr int kThreads = 8;
  constexpr std::uint64_t kBytes = 64 << 10;
  DeviceBuffer buffer(device(), kThreads * kBytes);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      const OwnedStream stream = Must(device().CreateStream());
      const OwnedEvent event = Must(device().CreateEvent());
      const DeviceMemory pinned =
          Must(device().Allocate(MemoryKind::kPinned, kBytes));
      for (int round = 0; round < 20; ++round) {
        std::memset(pinned.data(), 16 * t + round % 16, kBytes);
        Must(device().Copy(buffer.data() + t * kBytes, pinned.data(), kBytes,
                           stream.get()));
        Must(device().Record(event.get(), stream.get()));
        Must(device().WaitForEvent(event.get()));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const auto bytes = buffer.Read();
  for (std::uint64_t i = 0; i < bytes.size(); ++i) {
    ASSERT_EQ(bytes[i], static_cast<std::byte>(16 * (i / kBytes) + 19 % 16));
  }
}

TEST_F(CopyTest, BetweenAllKindsOfMemory) {
  const OwnedStream stream = Must(device().CreateStream());
  for (const std::uint64_t size : {1u, 3u, 255u, 4096u, 1048577u}) {
    const auto bytes = RandomBytes(size, size);
    std::vector<std::byte> plain(size);
    const DeviceMemory pinned =
        Must(device().Allocate(MemoryKind::kPinned, size));
    const DeviceMemory pinned_back =
        Must(device().Allocate(MemoryKind::kPinned, size));
    DeviceBuffer first(device(), size, 1);
    DeviceBuffer second(device(), size, 3);
    // host -> device -> device -> pinned -> device -> host
    Must(device().Copy(first.data(), bytes.data(), size, stream.get()));
    Must(device().Copy(second.data(), first.data(), size, stream.get()));
    Must(device().Copy(pinned.data(), second.data(), size, stream.get()));
    Must(device().Copy(pinned_back.data(), pinned.data(), size, stream.get()));
    Must(device().Fill(first.data(), 0, size, stream.get()));
    Must(device().Copy(first.data(), pinned_back.data(), size, stream.get()));
    Must(device().Copy(plain.data(), first.data(), size, stream.get()));
    Must(device().WaitForStream(stream.get()));
    EXPECT_EQ(plain, bytes);
    EXPECT_EQ(std::memcmp(pinned_back.data(), bytes.data(), size), 0);
    EXPECT_TRUE(first.GuardsIntact());
    EXPECT_TRUE(second.GuardsIntact());
  }
}

TEST_F(CopyTest, OfNothingDoesNothing) {
  EXPECT_TRUE(device().Copy(nullptr, nullptr, 0, nullptr).ok());
  EXPECT_TRUE(device().Fill(nullptr, 1, 0, nullptr).ok());
  EXPECT_TRUE(device().CopyRows(nullptr, 0, nullptr, 0, 0, 5, nullptr).ok());
  EXPECT_TRUE(device().CopyRows(nullptr, 8, nullptr, 8, 8, 0, nullptr).ok());
  EXPECT_TRUE(device().WaitForStream(nullptr).ok());
}

TEST_F(CopyTest, RowsKeepTheirPitches) {
  const OwnedStream stream = Must(device().CreateStream());
  struct Case {
    std::uint64_t row_bytes, rows, from_pitch, to_pitch;
  };
  for (const Case& c :
       {Case{1, 1, 1, 1}, Case{7, 5, 9, 13}, Case{64, 3, 64, 64},
        Case{100, 1000, 260, 101}, Case{3, 1, 3, 3}}) {
    SCOPED_TRACE(absl::StrCat(c.rows, " rows of ", c.row_bytes));
    const std::uint64_t from_size = (c.rows - 1) * c.from_pitch + c.row_bytes;
    const std::uint64_t to_size = (c.rows - 1) * c.to_pitch + c.row_bytes;
    const auto bytes = RandomBytes(c.rows, from_size);
    const DeviceMemory pinned =
        Must(device().Allocate(MemoryKind::kPinned, from_size));
    std::memcpy(pinned.data(), bytes.data(), from_size);
    const DeviceMemory back =
        Must(device().Allocate(MemoryKind::kPinned, from_size));
    std::memset(back.data(), 0, from_size);
    DeviceBuffer there(device(), to_size);
    Must(device().Fill(there.data(), 0x11, to_size, stream.get()));
    Must(device().CopyRows(there.data(), c.to_pitch, pinned.data(),
                           c.from_pitch, c.row_bytes, c.rows, stream.get()));
    Must(device().CopyRows(back.data(), c.from_pitch, there.data(), c.to_pitch,
                           c.row_bytes, c.rows, stream.get()));
    Must(device().WaitForStream(stream.get()));
    std::vector<std::byte> expected(to_size, std::byte{0x11});
    std::vector<std::byte> expected_back(from_size, std::byte{0});
    for (std::uint64_t r = 0; r < c.rows; ++r) {
      std::memcpy(expected.data() + r * c.to_pitch,
                  bytes.data() + r * c.from_pitch, c.row_bytes);
      std::memcpy(expected_back.data() + r * c.from_pitch,
                  bytes.data() + r * c.from_pitch, c.row_bytes);
    }
    EXPECT_EQ(there.Read(), expected);
    EXPECT_EQ(std::memcmp(back.data(), expected_back.data(), from_size), 0);
    EXPECT_TRUE(there.GuardsIntact());
  }
}

TEST_F(CopyTest, FillTouchesItsBytesOnly) {
  for (const std::uint64_t offset : {0u, 1u, 5u}) {
    DeviceBuffer buffer(device(), 1001, offset);
    Must(device().Fill(buffer.data(), 0xab, buffer.size(), nullptr));
    Must(device().WaitForStream(nullptr));
    EXPECT_EQ(buffer.Read(), std::vector(buffer.size(), std::byte{0xab}));
    EXPECT_TRUE(buffer.GuardsIntact());
  }
}

}  // namespace
}  // namespace kedge
