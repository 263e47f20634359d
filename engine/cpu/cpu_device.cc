#include "kedge/engine/cpu/cpu_device.h"

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "kedge/engine/cpu/batch_runner.h"
#include "kedge/engine/cpu/l61_sum.h"
#include "kedge/engine/cpu/quantise.h"
#include "kedge/engine/cpu/record_apply.h"
#include "kedge/format/status.h"

namespace kedge {
namespace {

constexpr std::uint64_t kAlignment = 256;
constexpr std::uint64_t kPoisonedBytes = std::uint64_t{1} << 20;
constexpr int kPoison = 0xcd;

}  // namespace

// --------------------------------------------------------------------- events

// Counts its Records and which of them was passed. Shared by its owner and the
// tasks that name it; lives as long as any of them.
class CpuDevice::Event {
 public:
  // The number of a new Record.
  std::uint64_t Record() {
    std::lock_guard<std::mutex> lock(mutex_);
    ++references_;
    return ++recorded_;
  }
  void Pass(std::uint64_t number) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      passed_ = std::max(passed_, number);
      passed_changed_.notify_all();
    }
    Release();
  }
  // The last Record, for Await.
  std::uint64_t Expect() {
    std::lock_guard<std::mutex> lock(mutex_);
    ++references_;
    return recorded_;
  }
  void Await(std::uint64_t number) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      passed_changed_.wait(lock, [&] { return passed_ >= number; });
    }
    Release();
  }
  bool HasPassed() {
    std::lock_guard<std::mutex> lock(mutex_);
    return passed_ >= recorded_;
  }
  void Release() {
    bool last;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      last = --references_ == 0;
    }
    if (last) delete this;
  }

 private:
  std::mutex mutex_;
  std::condition_variable passed_changed_;
  std::uint64_t recorded_ ABSL_GUARDED_BY(mutex_) = 0;
  std::uint64_t passed_ ABSL_GUARDED_BY(mutex_) = 0;
  int references_ ABSL_GUARDED_BY(mutex_) = 1;
};

// -------------------------------------------------------------------- streams

// A thread and the ring of tasks that it runs in order.
class CpuDevice::Stream {
 public:
  explicit Stream(std::chrono::microseconds delay)
      : delay_(delay), thread_([this] { Run(); }) {}
  ~Stream() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
      added_.notify_all();
    }
    thread_.join();
  }

  // Calls task(runner) later. The task is copied into the ring as bytes.
  template <typename Task>
  void Enqueue(const Task& task) {
    static_assert(std::is_trivially_copyable_v<Task> &&
                  std::is_trivially_destructible_v<Task>);
    static_assert(sizeof(Task) <= kTaskBytes);
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [&] { return enqueued_ - run_ < kSlots; });
    Slot& slot = slots_[enqueued_ % kSlots];
    std::memcpy(slot.task, &task, sizeof(Task));
    slot.run = [](const std::byte* bytes, BatchRunner* runner) {
      (*reinterpret_cast<const Task*>(bytes))(runner);
    };
    ++enqueued_;
    added_.notify_one();
  }
  // Waits for what is enqueued now.
  void Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    const std::uint64_t until = enqueued_;
    done_.wait(lock, [&] { return run_ >= until; });
  }

 private:
  static constexpr std::size_t kSlots = 1024;
  static constexpr std::size_t kTaskBytes = 240;
  struct Slot {
    void (*run)(const std::byte* task, BatchRunner* runner) = nullptr;
    alignas(16) std::byte task[kTaskBytes];
  };

  void Run() {
    for (;;) {
      const Slot* slot;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        added_.wait(lock, [&] { return stopping_ || run_ < enqueued_; });
        if (run_ == enqueued_) return;
        slot = &slots_[run_ % kSlots];
      }
      // Nobody writes to the slot until run_ has passed it.
      if (delay_.count() > 0) std::this_thread::sleep_for(delay_);
      slot->run(slot->task, &runner_);
      std::lock_guard<std::mutex> lock(mutex_);
      ++run_;
      done_.notify_all();
    }
  }

  const std::chrono::microseconds delay_;
  BatchRunner runner_;  // of the thread
  std::mutex mutex_;
  std::condition_variable added_;
  std::condition_variable done_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::uint64_t enqueued_ ABSL_GUARDED_BY(mutex_) = 0;
  std::uint64_t run_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<Slot> slots_{kSlots};
  std::thread thread_;  // last: it uses all of them
};

// ------------------------------------------------------------------ checksums

class CpuDevice::Sums final : public DeviceSums {
 public:
  Sums(CpuDevice* device, std::span<const SumBox> boxes,
       std::uint32_t output_count, const L61Key& key)
      : device_(device),
        boxes_(boxes.begin(), boxes.end()),
        residues_(output_count),
        summer_(key) {
    for (const SumBox& sum : boxes_) {
      bytes_ += sum.box.unit_count() * sum.box.unit_bytes;
    }
  }
  ~Sums() override {
    std::unique_lock<std::mutex> lock(mutex_);
    idle_.wait(lock, [&] { return in_flight_ == 0; });
  }

  absl::Status Enqueue(DeviceStream stream) override {
    KEDGE_RETURN_IF_ERROR(device_->Check("Sums"));
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ++in_flight_;
    }
    device_->StreamOf(stream).Enqueue([this](BatchRunner*) { Run(); });
    return absl::OkStatus();
  }
  std::span<const std::uint64_t> residues() override { return residues_; }
  std::uint64_t bytes() const override { return bytes_; }

 private:
  void Run() {
    std::fill(residues_.begin(), residues_.end(), 0);
    for (const SumBox& sum : boxes_) {
      // Of a grid, the place of a unit depends on the columns alone.
      TileGrid grid;
      grid.cols = sum.cols;
      std::uint64_t& residue = residues_[sum.output];
      residue = L61Add(residue, summer_.SumBox(grid, sum.box));
    }
    std::lock_guard<std::mutex> lock(mutex_);
    if (--in_flight_ == 0) idle_.notify_all();
  }

  CpuDevice* const device_;
  const std::vector<SumBox> boxes_;
  std::vector<std::uint64_t> residues_;
  const L61Summer summer_;
  std::uint64_t bytes_ = 0;
  std::mutex mutex_;
  std::condition_variable idle_;
  int in_flight_ ABSL_GUARDED_BY(mutex_) = 0;
};

// --------------------------------------------------------------------- device

struct CpuDevice::Impl {
  explicit Impl(CpuDeviceOptions o)
      : options(std::move(o)), default_stream(options.delay) {}

  const CpuDeviceOptions options;
  Stream default_stream;
  mutable std::mutex mutex;
  // Of what Allocate gave, by address.
  std::array<std::map<std::uintptr_t, std::uint64_t>, 2> allocations
      ABSL_GUARDED_BY(mutex);
  std::array<std::uint64_t, 2> bytes_in_use ABSL_GUARDED_BY(mutex) = {};
  std::uint64_t allocation_count ABSL_GUARDED_BY(mutex) = 0;
};

CpuDevice::CpuDevice(CpuDeviceOptions options)
    : impl_(std::make_unique<Impl>(std::move(options))) {}
CpuDevice::~CpuDevice() = default;

absl::Status CpuDevice::Check(absl::string_view operation) const {
  return impl_->options.fault ? impl_->options.fault(operation)
                              : absl::OkStatus();
}

CpuDevice::Stream& CpuDevice::StreamOf(DeviceStream stream) const {
  return stream == nullptr ? impl_->default_stream
                           : *static_cast<Stream*>(stream);
}

std::uint64_t CpuDevice::bytes_in_use(MemoryKind kind) const {
  std::lock_guard<std::mutex> lock(impl_->mutex);
  return impl_->bytes_in_use[static_cast<int>(kind)];
}
std::uint64_t CpuDevice::allocation_count() const {
  std::lock_guard<std::mutex> lock(impl_->mutex);
  return impl_->allocation_count;
}

absl::StatusOr<DeviceMemory> CpuDevice::Allocate(MemoryKind kind,
                                                 std::uint64_t bytes) {
  const absl::string_view operation =
      kind == MemoryKind::kDevice ? "Allocate device" : "Allocate pinned";
  KEDGE_RETURN_IF_ERROR(Check(operation));
  if (bytes == 0) return DeviceMemory();
  void* data = nullptr;
  if (bytes <= ~std::uint64_t{0} - kAlignment) {
    data = std::aligned_alloc(
        kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
  }
  if (data == nullptr) {
    return absl::ResourceExhaustedError(
        Describe({.where = name(),
                  .what = operation,
                  .expected = absl::StrCat(bytes, " bytes"),
                  .found = "no memory",
                  .advice = "free host memory or hold less"}));
  }
  std::memset(data, kPoison, std::min(bytes, kPoisonedBytes));
  {
    std::lock_guard<std::mutex> lock(impl_->mutex);
    impl_->allocations[static_cast<int>(kind)].emplace(
        reinterpret_cast<std::uintptr_t>(data), bytes);
    impl_->bytes_in_use[static_cast<int>(kind)] += bytes;
    ++impl_->allocation_count;
  }
  return DeviceMemory(this, kind, data, bytes);
}

void CpuDevice::Free(MemoryKind kind, void* data) {
  {
    std::lock_guard<std::mutex> lock(impl_->mutex);
    auto& allocations = impl_->allocations[static_cast<int>(kind)];
    const auto found = allocations.find(reinterpret_cast<std::uintptr_t>(data));
    KEDGE_CHECK(found != allocations.end());
    impl_->bytes_in_use[static_cast<int>(kind)] -= found->second;
    allocations.erase(found);
  }
  std::free(data);
}

absl::Status CpuDevice::RegisterHost(const void*, std::uint64_t) {
  return Check("RegisterHost");
}
void CpuDevice::UnregisterHost(const void*) {}

bool CpuDevice::IsDeviceMemory(const void* data) const {
  if (impl_->options.any_memory_is_device_memory) return data != nullptr;
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  std::lock_guard<std::mutex> lock(impl_->mutex);
  const auto& allocations =
      impl_->allocations[static_cast<int>(MemoryKind::kDevice)];
  auto after = allocations.upper_bound(address);
  if (after == allocations.begin()) return false;
  --after;
  return address - after->first < after->second;
}

absl::StatusOr<OwnedStream> CpuDevice::CreateStream() {
  KEDGE_RETURN_IF_ERROR(Check("CreateStream"));
  return OwnedStream(this, new Stream(impl_->options.delay));
}
void CpuDevice::DestroyStream(DeviceStream stream) {
  delete static_cast<Stream*>(stream);
}

absl::StatusOr<OwnedEvent> CpuDevice::CreateEvent() {
  KEDGE_RETURN_IF_ERROR(Check("CreateEvent"));
  return OwnedEvent(this, new Event);
}
void CpuDevice::DestroyEvent(DeviceEvent event) {
  static_cast<Event*>(event)->Release();
}

absl::Status CpuDevice::Record(DeviceEvent event, DeviceStream stream) {
  KEDGE_RETURN_IF_ERROR(Check("Record"));
  auto* const e = static_cast<Event*>(event);
  const std::uint64_t number = e->Record();
  StreamOf(stream).Enqueue([e, number](BatchRunner*) { e->Pass(number); });
  return absl::OkStatus();
}

absl::Status CpuDevice::StreamWait(DeviceStream stream, DeviceEvent event) {
  KEDGE_RETURN_IF_ERROR(Check("StreamWait"));
  auto* const e = static_cast<Event*>(event);
  const std::uint64_t number = e->Expect();
  StreamOf(stream).Enqueue([e, number](BatchRunner*) { e->Await(number); });
  return absl::OkStatus();
}

absl::StatusOr<bool> CpuDevice::HasPassed(DeviceEvent event) {
  KEDGE_RETURN_IF_ERROR(Check("HasPassed"));
  return static_cast<Event*>(event)->HasPassed();
}

absl::Status CpuDevice::WaitForEvent(DeviceEvent event) {
  KEDGE_RETURN_IF_ERROR(Check("WaitForEvent"));
  auto* const e = static_cast<Event*>(event);
  e->Await(e->Expect());
  return absl::OkStatus();
}

absl::Status CpuDevice::WaitForStream(DeviceStream stream) {
  KEDGE_RETURN_IF_ERROR(Check("WaitForStream"));
  StreamOf(stream).Wait();
  return absl::OkStatus();
}

absl::Status CpuDevice::Copy(void* to, const void* from, std::uint64_t bytes,
                             DeviceStream stream) {
  KEDGE_RETURN_IF_ERROR(Check("Copy"));
  if (bytes == 0) return absl::OkStatus();
  StreamOf(stream).Enqueue(
      [=](BatchRunner*) { std::memmove(to, from, bytes); });
  return absl::OkStatus();
}

absl::Status CpuDevice::CopyRows(void* to, std::uint64_t to_pitch,
                                 const void* from, std::uint64_t from_pitch,
                                 std::uint64_t row_bytes, std::uint64_t rows,
                                 DeviceStream stream) {
  KEDGE_RETURN_IF_ERROR(Check("CopyRows"));
  if (row_bytes == 0 || rows == 0) return absl::OkStatus();
  if (rows > 1 && (to_pitch < row_bytes || from_pitch < row_bytes)) {
    return absl::InvalidArgumentError(Describe(
        {.where = name(),
         .what =
             absl::StrCat("CopyRows: pitches ", to_pitch, " and ", from_pitch),
         .expected =
             absl::StrCat("at least the ", row_bytes, " bytes of a row")}));
  }
  StreamOf(stream).Enqueue([=](BatchRunner*) {
    for (std::uint64_t row = 0; row < rows; ++row) {
      std::memcpy(static_cast<std::byte*>(to) + row * to_pitch,
                  static_cast<const std::byte*>(from) + row * from_pitch,
                  row_bytes);
    }
  });
  return absl::OkStatus();
}

absl::Status CpuDevice::Fill(void* to, std::uint8_t value, std::uint64_t bytes,
                             DeviceStream stream) {
  KEDGE_RETURN_IF_ERROR(Check("Fill"));
  if (bytes == 0) return absl::OkStatus();
  StreamOf(stream).Enqueue(
      [=](BatchRunner*) { std::memset(to, value, bytes); });
  return absl::OkStatus();
}

absl::Status CpuDevice::CopySliceToBox(const std::byte* from,
                                       const TileGrid& grid,
                                       const UnitRange& slice,
                                       const BoxTarget& box,
                                       DeviceStream stream) {
  KEDGE_RETURN_IF_ERROR(Check("CopySliceToBox"));
  if (slice.begin >= slice.end) return absl::OkStatus();
  StreamOf(stream).Enqueue(
      [=](BatchRunner*) { kedge::CopySliceToBox(from, grid, slice, box); });
  return absl::OkStatus();
}

absl::StatusOr<DeviceMemory> CpuDevice::MakeL61Table(const L61Key& key) {
  KEDGE_RETURN_IF_ERROR(Check("MakeL61Table"));
  KEDGE_ASSIGN_OR_RETURN(
      DeviceMemory table,
      Allocate(MemoryKind::kDevice, kL61TileWords * sizeof(std::uint64_t)));
  for (std::uint32_t t = 0; t < kL61TileWords; ++t) {
    table.as<std::uint64_t>()[t] = key.A(t);
  }
  return table;
}

absl::Status CpuDevice::Encode(const EncodeBatch& batch, DeviceStream stream) {
  KEDGE_RETURN_IF_ERROR(Check("Encode"));
  StreamOf(stream).Enqueue(
      [batch](BatchRunner* runner) { runner->Encode(batch); });
  return absl::OkStatus();
}

absl::Status CpuDevice::Apply(const ApplyBatch& batch, DeviceStream stream) {
  KEDGE_RETURN_IF_ERROR(Check("Apply"));
  StreamOf(stream).Enqueue(
      [batch](BatchRunner* runner) { runner->Apply(batch); });
  return absl::OkStatus();
}

absl::Status CpuDevice::Quantise(const QuantiseBatch& batch,
                                 DeviceStream stream) {
  KEDGE_RETURN_IF_ERROR(Check("Quantise"));
  StreamOf(stream).Enqueue([batch](BatchRunner*) { kedge::Quantise(batch); });
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<DeviceSums>> CpuDevice::PrepareSums(
    std::span<const SumBox> boxes, std::uint32_t output_count,
    const L61Key& key) {
  KEDGE_RETURN_IF_ERROR(Check("PrepareSums"));
  for (const SumBox& sum : boxes) {
    if (sum.output >= output_count) {
      return absl::InvalidArgumentError(
          Describe({.where = name(),
                    .what = "PrepareSums: output",
                    .expected = absl::StrCat("below ", output_count),
                    .found = absl::StrCat(sum.output)}));
    }
  }
  return std::unique_ptr<DeviceSums>(
      std::make_unique<Sums>(this, boxes, output_count, key));
}

}  // namespace kedge
