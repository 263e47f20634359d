#ifndef KEDGE_EXAMPLES_OFFLOAD_TRAINER_REFERENCE_STATE_H_
#define KEDGE_EXAMPLES_OFFLOAD_TRAINER_REFERENCE_STATE_H_

// What the checkpoint's tensors must hold, from the ranks' own masters: summed
// to be compared with the store, or kept to be written as a checkpoint.

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kedge/engine/cpu/l61_sum.h"
#include "kedge/format/dtype.h"
#include "kedge/format/tensor_table.h"
#include "kedge/writer/tensor_source.h"

namespace kedge::example {

// Thread safety: ranks may call Add side by side.
class ReferenceState {
 public:
  // `keep_bytes`: for WriteCheckpoint and BytesOf.
  explicit ReferenceState(bool keep_bytes) : keep_bytes_(keep_bytes) {}

  // Adds bytes of a tensor of `shape` that stand at byte `offset` of it. The
  // ranks' parts make up the whole.
  void Add(const std::string& name, DType dtype,
           std::span<const std::uint64_t> shape, std::uint64_t offset,
           std::span<const std::byte> bytes, const L61Summer& summer);

  // kDataLoss names the tensors whose S is not what `l61`, in the order of
  // `table`, says; also missing ones and those that the table lacks.
  absl::Status CompareWith(const TensorTable& table,
                           std::span<const std::uint64_t> l61);

  // Writes directory/model.safetensors; makes the directory. kUnavailable.
  absl::Status WriteCheckpoint(const std::string& directory);

  // A tensor's bytes, if they are kept; valid while nothing is added.
  // kNotFound.
  absl::StatusOr<std::span<const std::byte>> BytesOf(
      const std::string& name) const;

  std::uint64_t total_bytes() const;

 private:
  struct Tensor {
    DType dtype = DType::kBf16;
    std::vector<std::uint64_t> shape;
    std::uint64_t total_bytes = 0;
    std::uint64_t added_bytes = 0;
    std::uint64_t l61 = 0;
    std::vector<std::byte> bytes;
  };

  const bool keep_bytes_;
  mutable std::mutex mutex_;
  std::map<std::string, Tensor> tensors_ ABSL_GUARDED_BY(mutex_);
};

// The bytes of a tensor in host memory, or of a rank's part of one, row-major
// and contiguous.
std::vector<std::byte> Gather(const TrainerTensor& part);

}  // namespace kedge::example

#endif  // KEDGE_EXAMPLES_OFFLOAD_TRAINER_REFERENCE_STATE_H_
