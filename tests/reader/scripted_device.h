#ifndef KEDGE_TESTS_READER_SCRIPTED_DEVICE_H_
#define KEDGE_TESTS_READER_SCRIPTED_DEVICE_H_

// A device whose calls are counted and fail when told to, and whose apply
// launches can be replaced by others.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "kedge/engine/device/device.h"
#include "kedge/format/status.h"

namespace kedge {

class ScriptedDevice final : public Device {
 public:
  // Takes the place of a launch that changes weights; `device` is the plain
  // one.
  using Launch = std::function<absl::Status(
      Device* device, const ApplyBatch& batch, DeviceStream stream)>;

  explicit ScriptedDevice(std::unique_ptr<Device> plain)
      : plain_(std::move(plain)) {}

  // From now on. Forgets counts, faults and launches.
  void Reset() {
    const std::lock_guard lock(mutex_);
    counts_.clear();
    calls_ = fail_at_ = 0;
    fail_operation_.clear();
    launch_ = nullptr;
  }
  // The k-th call from now on fails, whatever it is; with a name: the k-th call
  // of that kind.
  void FailAt(std::int64_t k, const std::string& operation = "") {
    const std::lock_guard lock(mutex_);
    counts_.clear();
    calls_ = 0;
    fail_at_ = k;
    fail_operation_ = operation;
  }
  void set_launch(Launch launch) {
    const std::lock_guard lock(mutex_);
    launch_ = std::move(launch);
  }
  std::int64_t calls() const {
    const std::lock_guard lock(mutex_);
    return calls_;
  }
  std::int64_t count(const std::string& operation) const {
    const std::lock_guard lock(mutex_);
    const auto found = counts_.find(operation);
    return found == counts_.end() ? 0 : found->second;
  }
  // "Apply 1, Copy 2".
  std::string Counts() const {
    const std::lock_guard lock(mutex_);
    std::string text;
    for (const auto& [operation, count] : counts_) {
      absl::StrAppend(&text, text.empty() ? "" : ", ", operation, " ", count);
    }
    return text;
  }
  // Calls that took memory, or made something that may.
  std::int64_t made() const {
    const std::lock_guard lock(mutex_);
    return made_;
  }
  // Not counted.
  Device* plain() { return plain_.get(); }

  std::string name() const override { return "scripted"; }
  absl::StatusOr<DeviceMemory> Allocate(MemoryKind kind,
                                        std::uint64_t bytes) override {
    KEDGE_RETURN_IF_ERROR(OnMake("Allocate"));
    return plain_->Allocate(kind, bytes);
  }
  absl::Status RegisterHost(const void* data, std::uint64_t bytes) override {
    KEDGE_RETURN_IF_ERROR(OnMake("RegisterHost"));
    return plain_->RegisterHost(data, bytes);
  }
  void UnregisterHost(const void* data) override {
    plain_->UnregisterHost(data);
  }
  bool IsDeviceMemory(const void* data) const override {
    return plain_->IsDeviceMemory(data);
  }
  absl::StatusOr<OwnedStream> CreateStream() override {
    KEDGE_RETURN_IF_ERROR(OnMake("CreateStream"));
    return plain_->CreateStream();
  }
  absl::StatusOr<OwnedEvent> CreateEvent() override {
    KEDGE_RETURN_IF_ERROR(OnMake("CreateEvent"));
    return plain_->CreateEvent();
  }
  absl::Status Record(DeviceEvent event, DeviceStream stream) override {
    KEDGE_RETURN_IF_ERROR(OnCall("Record"));
    return plain_->Record(event, stream);
  }
  absl::Status StreamWait(DeviceStream stream, DeviceEvent event) override {
    KEDGE_RETURN_IF_ERROR(OnCall("StreamWait"));
    return plain_->StreamWait(stream, event);
  }
  absl::StatusOr<bool> HasPassed(DeviceEvent event) override {
    KEDGE_RETURN_IF_ERROR(OnCall("HasPassed"));
    return plain_->HasPassed(event);
  }
  absl::Status WaitForEvent(DeviceEvent event) override {
    KEDGE_RETURN_IF_ERROR(OnCall("WaitForEvent"));
    return plain_->WaitForEvent(event);
  }
  absl::Status WaitForStream(DeviceStream stream) override {
    KEDGE_RETURN_IF_ERROR(OnCall("WaitForStream"));
    return plain_->WaitForStream(stream);
  }
  absl::Status Copy(void* to, const void* from, std::uint64_t bytes,
                    DeviceStream stream) override {
    KEDGE_RETURN_IF_ERROR(OnCall("Copy"));
    return plain_->Copy(to, from, bytes, stream);
  }
  absl::Status CopyRows(void* to, std::uint64_t to_pitch, const void* from,
                        std::uint64_t from_pitch, std::uint64_t row_bytes,
                        std::uint64_t rows, DeviceStream stream) override {
    KEDGE_RETURN_IF_ERROR(OnCall("CopyRows"));
    return plain_->CopyRows(to, to_pitch, from, from_pitch, row_bytes, rows,
                            stream);
  }
  absl::Status Fill(void* to, std::uint8_t value, std::uint64_t bytes,
                    DeviceStream stream) override {
    KEDGE_RETURN_IF_ERROR(OnCall("Fill"));
    return plain_->Fill(to, value, bytes, stream);
  }
  absl::Status CopySliceToBox(const std::byte* from, const TileGrid& grid,
                              const UnitRange& slice, const BoxTarget& box,
                              DeviceStream stream) override {
    KEDGE_RETURN_IF_ERROR(OnCall("CopySliceToBox"));
    return plain_->CopySliceToBox(from, grid, slice, box, stream);
  }
  absl::StatusOr<DeviceMemory> MakeL61Table(const L61Key& key) override {
    KEDGE_RETURN_IF_ERROR(OnMake("MakeL61Table"));
    return plain_->MakeL61Table(key);
  }
  absl::Status Encode(const EncodeBatch& batch, DeviceStream stream) override {
    KEDGE_RETURN_IF_ERROR(OnCall("Encode"));
    return plain_->Encode(batch, stream);
  }
  absl::Status Apply(const ApplyBatch& batch, DeviceStream stream) override {
    KEDGE_RETURN_IF_ERROR(OnCall("Apply"));
    Launch launch;
    {
      const std::lock_guard lock(mutex_);
      launch = launch_;
    }
    if (launch && batch.mode == ApplyMode::kApply) {
      return launch(plain_.get(), batch, stream);
    }
    return plain_->Apply(batch, stream);
  }
  absl::Status Quantise(const QuantiseBatch& batch,
                        DeviceStream stream) override {
    KEDGE_RETURN_IF_ERROR(OnCall("Quantise"));
    return plain_->Quantise(batch, stream);
  }
  absl::StatusOr<std::unique_ptr<DeviceSums>> PrepareSums(
      std::span<const SumBox> boxes, std::uint32_t output_count,
      const L61Key& key) override {
    KEDGE_RETURN_IF_ERROR(OnMake("PrepareSums"));
    KEDGE_ASSIGN_OR_RETURN(std::unique_ptr<DeviceSums> sums,
                           plain_->PrepareSums(boxes, output_count, key));
    return std::unique_ptr<DeviceSums>(
        std::make_unique<Sums>(this, std::move(sums)));
  }

 private:
  class Sums final : public DeviceSums {
   public:
    Sums(ScriptedDevice* device, std::unique_ptr<DeviceSums> sums)
        : device_(device), sums_(std::move(sums)) {}
    absl::Status Enqueue(DeviceStream stream) override {
      KEDGE_RETURN_IF_ERROR(device_->OnCall("Sums"));
      return sums_->Enqueue(stream);
    }
    std::span<const std::uint64_t> residues() override {
      return sums_->residues();
    }
    std::uint64_t bytes() const override { return sums_->bytes(); }

   private:
    ScriptedDevice* device_;
    std::unique_ptr<DeviceSums> sums_;
  };

  // What the plain one made it frees itself.
  void Free(MemoryKind, void*) override { KEDGE_CHECK(false); }
  void DestroyStream(DeviceStream) override { KEDGE_CHECK(false); }
  void DestroyEvent(DeviceEvent) override { KEDGE_CHECK(false); }

  absl::Status OnMake(absl::string_view operation) {
    {
      const std::lock_guard lock(mutex_);
      ++made_;
    }
    return OnCall(operation);
  }
  absl::Status OnCall(absl::string_view operation) {
    const std::lock_guard lock(mutex_);
    ++calls_;
    const std::int64_t of_kind = ++counts_[std::string(operation)];
    const bool fails = fail_operation_.empty() ? calls_ == fail_at_
                                               : operation == fail_operation_ &&
                                                     of_kind == fail_at_;
    if (!fails) return absl::OkStatus();
    return absl::InternalError(
        absl::StrCat("scripted: ", operation, ": made to fail"));
  }

  const std::unique_ptr<Device> plain_;
  mutable std::mutex mutex_;
  std::map<std::string, std::int64_t> counts_ ABSL_GUARDED_BY(mutex_);
  std::int64_t calls_ ABSL_GUARDED_BY(mutex_) = 0;
  std::int64_t made_ ABSL_GUARDED_BY(mutex_) = 0;
  std::int64_t fail_at_ ABSL_GUARDED_BY(mutex_) = 0;  // 0: none
  std::string fail_operation_ ABSL_GUARDED_BY(mutex_);
  Launch launch_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kedge

#endif  // KEDGE_TESTS_READER_SCRIPTED_DEVICE_H_
