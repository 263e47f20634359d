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
  // Whether Publish returns while the anchor that it was asked for is still
  // being written, from a snapshot in pinned host memory. With a snapshot in
  // device memory there is no copy on the host to write it from: Publish then
  // returns when it stands, whatever is said here. Each rank may choose.
  bool anchors_in_background = true;
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
// Anchors in the background (DeviceSnapshotOptions): when Publish returns the
// step stands, and a thread of the writer begins to write its anchor from the
// snapshot, never from memory of the trainer's, who goes on with the next step.
// The next Publish and the destructor wait for it first. Until one of them, or
// WaitForAnchor, has returned, the Coordinator belongs to that thread: it must
// bear calls from another thread than before, and nobody else may use it or the
// channel beneath it, such as a process group that the trainer's own
// collectives run on. All ranks publish with the same options, so that each
// begins the anchor after the same Publish and has ended it before the next.
//
// Thread safety: one thread at a time. held(), store_writer() and memory() do
// not wait for an anchor and may be called beside it.
class DeviceSnapshotWriter {
 public:
  static absl::StatusOr<std::unique_ptr<DeviceSnapshotWriter>> Create(
      const WriterOptions& writer, const InitOptions& init,
      DeviceSnapshotOptions options);
  static absl::StatusOr<std::unique_ptr<DeviceSnapshotWriter>> Open(
      const WriterOptions& writer, DeviceSnapshotOptions options,
      std::optional<std::uint64_t> resume_step = std::nullopt);
  ~DeviceSnapshotWriter();

  // If the anchor is under way when this returns, the result says so; one that
  // failed, and what went wrong beside one, is then in the warnings of the next
  // result.
  absl::StatusOr<PublishResult> Publish(std::uint64_t step,
                                        const PublishOptions& options = {});

  // Waits for the anchor that is under way, if any. Returns how the last one
  // written in the background ended, as often as it is asked; OK if there was
  // none. `result`, if given, is that of the Publish that began it: its anchor
  // members become what they would be had Publish waited.
  //
  // Waits as long as the storage takes, and for the other ranks as long as the
  // Coordinator lets it.
  absl::Status WaitForAnchor(PublishResult* result = nullptr);

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
