#ifndef KEDGE_WRITER_OPTIMIZER_HOOK_H_
#define KEDGE_WRITER_OPTIMIZER_HOOK_H_

// The trainer's side for full CPU offload: the delta is taken where the
// optimizer's new weights pass on their way to the device, with no copy of the
// model. See docs/hook.md and docs/protocol.md.
//
//   v0:        Create() or Open() with the weights on the device
//   each step: BeginStep(step, anchor)      before the step's final backward
//              OnUpdate(...) -> ticket      for each chunk, in place of the
//                                           trainer's own copy to the device
//              EndStep()                    after the last chunk
//              Publish()                    or, if the step is given up,
//                                           nothing: the next one is then an
//                                           anchor

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kedge/engine/device/device.h"
#include "kedge/writer/store_writer.h"
#include "kedge/writer/tensor_source.h"

namespace kedge {

// A trainer's storage on the device: what one optimizer parameter of this rank
// holds, contiguous. The optimizer writes it whole, once a step, in ranges.
struct HookedParameter {
  std::string name;      // for messages
  void* data = nullptr;  // device memory
  std::uint64_t bytes = 0;
  // Never written by the optimizer. The guard proves that it was not.
  bool frozen = false;
  // Other copies on this device that the trainer keeps equal (it copies them
  // itself, before Publish); the guard checks each.
  std::vector<const void*> replicas;
};

// An fp8 engine's form of a bf16 tensor: `values` (f8_e4m3, the tensor's
// shape) and `scales` (f32, [ceil(rows / 128), ceil(cols / 128)]) travel in its
// place. See spec/fp8.md.
struct QuantisedTensor {
  std::string tensor;  // of HookOptions::tensors, bf16, two dimensions; that
                       // name is the one of the values
  std::string scales;  // e.g. "...weight_scale_inv"
  ScaleKind scale_kind = ScaleKind::kExact;
  float floor = 1e-12f;
};

struct HookOptions {
  Device* device = nullptr;  // outlives the hook
  std::vector<HookedParameter> parameters;
  // The checkpoint's tensors that lie in parameters, as TrainerTensor says with
  // `data` a device address in one of them: contiguous, or a view whose element
  // addresses ascend in row-major order (halves of a packed parameter,
  // interleaved rows or columns, an expert's part of a stack). A parameter's
  // bytes belong to at most one tensor.
  std::vector<TrainerTensor> tensors;
  // Tensors that live in no parameter: buffers, copies, views whose addresses
  // do not ascend. In device or host memory, as TrainerTensor says. A snapshot
  // of their bytes is kept in host memory.
  std::vector<TrainerTensor> residual;
  std::vector<QuantisedTensor> quantised;
  // The longest range that OnUpdate is given; longer ones are cut. Memory for
  // four of these lies on the device.
  std::uint64_t chunk_bytes = std::uint64_t{32} << 20;
  // Device memory for encoded parts. One that runs full is drained early.
  std::uint64_t ring_bytes = std::uint64_t{256} << 20;
  // Longest wait of BeginStep, OnUpdate, WaitFor and EndStep for chunks to be
  // diffed and for an anchor's writes. Publish takes as long as storage does.
  std::chrono::milliseconds deadline{600'000};
};

// What the hook holds beside the trainer's own memory, all of it taken at open.
struct HookMemory {
  std::uint64_t device_bytes = 0;    // chunks, ring, tables, scratch; without
                                     // what the device's sums keep for itself
  std::uint64_t pinned_bytes = 0;    // bounce buffers, tile headers
  std::uint64_t residual_bytes = 0;  // snapshots of residual tensors
  std::vector<std::pair<std::string, std::uint64_t>> residual;  // each
};

// What a step came to. Times in seconds.
struct HookResult {
  PublishResult publish;
  double wait_seconds = 0;   // BeginStep: for the publish before
  double drain_seconds = 0;  // EndStep: for the diff of the last chunks
  double guard_seconds = 0;
  double commit_seconds = 0;  // Publish as a whole
  std::uint64_t early_drains = 0;
  std::uint64_t guard_bytes = 0;
};

// Collective with a WriterOptions::coordinator: BeginStep, EndStep and Publish
// are called by all ranks in the same order; OnUpdate is not.
//
// Ownership: borrows parameters and residual tensors, which stay at their
// addresses.
// Thread safety: one thread calls all of it; HasPassed and WaitFor may be
// called from any.
class OptimizerHook {
 public:
  // Done when the pinned source of an OnUpdate may be overwritten.
  struct Ticket {
    std::uint64_t number = 0;  // 0: nothing to wait for
  };

  // Creates a store whose v0 is what the tensors hold, and opens it.
  // Errors: as SnapshotWriter::Create; kInvalidArgument names a tensor that
  // lies in no parameter, in two, over another tensor, or whose addresses do
  // not ascend.
  static absl::StatusOr<std::unique_ptr<OptimizerHook>> Create(
      const WriterOptions& writer, const InitOptions& init,
      HookOptions options);
  // Opens a store at `resume_step` (default: the newest version), which the
  // tensors must hold; checked before the store is changed.
  static absl::StatusOr<std::unique_ptr<OptimizerHook>> Open(
      const WriterOptions& writer, HookOptions options,
      std::optional<std::uint64_t> resume_step = std::nullopt);
  ~OptimizerHook();

  // Arms the hook for `step`, which is held().step + 1. Waits until the last
  // Publish has read live weights and parts (Publish returns no earlier).
  // `anchor`: this step's bytes are also written into an anchor as they pass.
  // After a step that was given up any higher number will do, and the step is
  // published as a root: S of every tensor and the anchor, without a delta.
  //
  // kFailedPrecondition: the step before was hooked and not published (its
  // parts are lost: begin this step with `anchor`), or this one is open
  // already.
  absl::Status BeginStep(std::uint64_t step, bool anchor);

  // New weights for bytes [begin, begin + bytes) of parameter `parameter`
  // (index in HookOptions::parameters), at `pinned_source`; copies them to the
  // device on `h2d_stream` and queues the difference. The parameter has them
  // when EndStep returns; before that, only `h2d_stream`'s work until this call
  // may still read the old ones. Ranges are whole elements, in any order
  // (ascending where tensors of the parameter are quantised), each written
  // once.
  //
  // kFailedPrecondition: not between BeginStep and EndStep, a frozen parameter,
  // or a range written twice. The new weights have then arrived all the same,
  // but for a wrong argument (kInvalidArgument) or a device that cannot copy;
  // what cannot be published is said by EndStep again.
  absl::StatusOr<Ticket> OnUpdate(std::uint32_t parameter, std::uint64_t begin,
                                  std::uint64_t bytes,
                                  const void* pinned_source,
                                  DeviceStream h2d_stream);
  // Whether the source of a ticket is free to be written again. Not OK: the
  // device did not say that it has read it. The hook still works on other
  // chunks then: call EndStep before the weights are put right.
  absl::StatusOr<bool> HasPassed(Ticket ticket) const;
  absl::Status WaitFor(Ticket ticket) const;

  // Waits until every chunk is diffed and its new weights are where they
  // belong, which they are also when the step cannot be published, but for two
  // errors: kUnavailable after the deadline (they may still come), and one that
  // says "did not arrive". kFailedPrecondition names parameters that were
  // written in part or not at all ("never written"); when the rest is written
  // EndStep may be called again.
  absl::Status EndStep();

  // Guards, then publishes the step. What the trainer enqueued to write
  // replicas and residual tensors has run by then. May be repeated after a
  // failure as long as no part was drained early. With several ranks all call
  // it, also one whose EndStep failed. Errors: as StoreWriter::PublishDelta;
  // kFailedPrecondition names tensors "changed outside the step", and a step
  // that was not hooked.
  absl::StatusOr<HookResult> Publish(const Metadata* metadata = nullptr);

  const VersionId& held() const;
  const StoreWriter& store_writer() const;
  const HookMemory& memory() const;

 private:
  struct Impl;
  explicit OptimizerHook(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace kedge

#endif  // KEDGE_WRITER_OPTIMIZER_HOOK_H_
