#ifndef KEDGE_WRITER_DEVICE_SNAPSHOT_WRITER_H_
#define KEDGE_WRITER_DEVICE_SNAPSHOT_WRITER_H_

// SnapshotWriter for weights on a device: any optimizer, any offload mode, any
// cadence. The difference is taken by the device, from a snapshot in its own
// memory or in pinned host memory; the bytes are those that SnapshotWriter and
// OptimizerHook give. See docs/hook.md.

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kedge/engine/device/device.h"
#include "kedge/writer/snapshot_writer.h"
#include "kedge/writer/store_writer.h"
#include "kedge/writer/tensor_source.h"

namespace kedge {

struct DeviceSnapshotOptions {
  Device* device = nullptr;  // outlives the writer
  // In device or host memory. Those in host memory, and views whose addresses
  // do not ascend, are compared on the host.
  std::vector<TrainerTensor> tensors;
  // Where the snapshot of tensors in device memory is kept.
  MemoryKind snapshot = MemoryKind::kPinned;
  std::uint64_t chunk_bytes = std::uint64_t{32} << 20;
  // Device memory for encoded parts, drained while later ones are made.
  std::uint64_t ring_bytes = std::uint64_t{128} << 20;
  std::chrono::milliseconds deadline{600'000};
};

struct DeviceSnapshotMemory {
  std::uint64_t device_bytes = 0;    // all of it, a snapshot there included
  std::uint64_t pinned_bytes = 0;    // likewise
  std::uint64_t snapshot_bytes = 0;  // thereof
  std::uint64_t host_bytes = 0;      // snapshot of what the host compares
};

// Calls, collectivity and errors as SnapshotWriter. What the trainer enqueued
// to write the weights has run before Publish, and nothing writes them during
// it: kFailedPrecondition names a tensor that changed meanwhile.
//
// Thread safety: one thread at a time.
class DeviceSnapshotWriter {
 public:
  static absl::StatusOr<std::unique_ptr<DeviceSnapshotWriter>> Create(
      const WriterOptions& writer, const InitOptions& init,
      DeviceSnapshotOptions options);
  static absl::StatusOr<std::unique_ptr<DeviceSnapshotWriter>> Open(
      const WriterOptions& writer, DeviceSnapshotOptions options,
      std::optional<std::uint64_t> resume_step = std::nullopt);
  ~DeviceSnapshotWriter();

  absl::StatusOr<PublishResult> Publish(std::uint64_t step,
                                        const PublishOptions& options = {});

  const VersionId& held() const;
  const StoreWriter& store_writer() const;
  const DeviceSnapshotMemory& memory() const;

 private:
  struct Impl;
  explicit DeviceSnapshotWriter(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace kedge

#endif  // KEDGE_WRITER_DEVICE_SNAPSHOT_WRITER_H_
