#ifndef KEDGE_READER_WEIGHT_BACKEND_H_
#define KEDGE_READER_WEIGHT_BACKEND_H_

// Where a follower's weights lie, behind a seam: how bytes get from files to
// them and how they are summed. What a follower decides - planning, states,
// votes, healing - is on the other side and the same for all backends.

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kedge/engine/device/device.h"
#include "kedge/engine/io/store.h"
#include "kedge/format/l61.h"
#include "kedge/reader/anchor_load.h"
#include "kedge/reader/binding.h"
#include "kedge/reader/delta_load.h"
#include "kedge/reader/read_context.h"
#include "kedge/reader/staged_delta.h"
#include "kedge/reader/weight_set.h"

namespace kedge {

// Nothing is in flight on weights or files when a call returns, whether it
// failed or not.
//
// Thread safety: one thread at a time, but that Read may run beside WriteAnchor
// on a device.
class WeightBackend {
 public:
  using SharedBinding = std::shared_ptr<const Binding>;
  using Deltas = std::vector<std::unique_ptr<StagedDelta>>;

  virtual ~WeightBackend() = default;

  // Whether the sets' memory is of the kind that the backend works on.
  // kInvalidArgument names tensor and set.
  virtual absl::Status CheckTargets(
      const std::vector<const WeightSet*>& sets) const = 0;

  // -------------------------------------------------------- before the pause
  // Makes ready what Sum(binding) needs. A binding that is ready already costs
  // nothing.
  virtual absl::Status Prepare(const SharedBinding& binding) = 0;

  // Plans the reads of what boxes need of `step`, opens its files, and takes
  // the memory. Null: there is no room beside the deltas that are staged
  // already.
  //
  // Errors: kResourceExhausted if there is no room at all; kDataLoss for a file
  // of another size, kNotFound for one that was pruned, kUnavailable. In host
  // memory it is read as well, with Read's errors.
  virtual absl::StatusOr<std::unique_ptr<StagedDelta>> Stage(
      const SharedBinding& binding, const TensorMask& mask,
      std::shared_ptr<const PublishedStep> step) = 0;
  // (Or beside WriteAnchor.) Reads what was staged, each piece once; all pieces
  // are hashed and, if the follower's options say so, all records decoded and
  // compared with the manifest. Once for each delta, before Apply.
  //
  // Errors: kDataLoss names file, offset and tensor
  virtual absl::Status Read(StagedDelta* delta) = 0;

  // Plans the reads of an anchor, opens its files, and takes the memory that
  // WriteAnchor needs.
  virtual absl::StatusOr<std::unique_ptr<AnchorLoad>> OpenAnchor(
      const Binding& binding, const TensorMask& mask,
      const PublishedAnchor& anchor) = 0;

  // -------------------------------------------------------- during the pause
  // Every needed unit into the bound boxes; adds their number to
  // `*units_written`. Pieces are hashed on their way. An error leaves the
  // weights in part written.
  virtual absl::Status WriteAnchor(const Binding& binding, AnchorLoad* load,
                                   std::uint64_t* units_written) = 0;

  // Adds all of `deltas` into the bound boxes, in their order where they share
  // units. An error (kDataLoss names file, offset and tensor) leaves the
  // weights in part changed.
  virtual absl::Status Apply(const Binding& binding, const Deltas& deltas,
                             ApplyCounts* counts) = 0;

  // Replaces `*sums` by what memory holds now. On a device nothing is allocated
  // if there is room for Binding::residue_count() residues.
  virtual absl::Status Sum(const SharedBinding& binding,
                           Binding::Sums* sums) = 0;

  // ------------------------------------------------------------ when it fails
  // The records of the tensors in `mask`, in host memory.
  virtual absl::StatusOr<std::shared_ptr<const LoadedDelta>> Records(
      const Binding& binding, const StagedDelta& delta,
      const TensorMask& mask) = 0;
};

struct BackendOptions {
  int apply_threads = 1;  // of the host backend
  bool check_records = true;
  DeviceStream stream = nullptr;  // null: one of the backend's own
  std::uint64_t device_stage_bytes = 0;
};

// Weights in host memory. `context` outlives the backend.
std::unique_ptr<WeightBackend> MakeHostBackend(const BackendOptions& options,
                                               const ReadContext* context,
                                               const L61Key& key);

// Weights in the memory of `device`. `context` and `device` outlive the
// backend. kInternal, kResourceExhausted: the device's.
absl::StatusOr<std::unique_ptr<WeightBackend>> MakeDeviceBackend(
    Device* device, const BackendOptions& options, const ReadContext* context,
    const L61Key& key);

}  // namespace kedge

#endif  // KEDGE_READER_WEIGHT_BACKEND_H_
