#ifndef KEDGE_EXAMPLES_GPU_LOOP_NCCL_SUM_H_
#define KEDGE_EXAMPLES_GPU_LOOP_NCCL_SUM_H_

// What GroupOptions::reduce needs when the ranks of an inference engine have a
// GPU each: an all-reduce of NCCL, which is loaded when it is asked for, so
// that nothing here is needed to build.

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kedge/engine/device/device.h"

namespace kedge::example {

class NcclSum {
 public:
  virtual ~NcclSum() = default;

  // 1 to 8 ranks in the order of `devices`, CudaDevices of GPUs `ordinals`, all
  // different, and in no other NcclSum: kernels of two communicators that wait
  // on the same GPUs may wait for each other. Loads `library`
  // ("libnccl.so.2").
  //
  // kInvalidArgument: no ranks, more than 8, or not a GPU for each.
  // kUnimplemented: this program has no CUDA. kNotFound: there is no such
  // library, or it lacks a function. kInternal says what NCCL says.
  static absl::StatusOr<std::unique_ptr<NcclSum>> Open(
      const std::string& library, const std::vector<Device*>& devices,
      const std::vector<int>& ordinals, std::chrono::milliseconds deadline);

  // Outlived by this object. kDeadlineExceeded if a rank does not come: the
  // communicators are then gone, and every later call fails with kUnavailable.
  virtual std::function<absl::Status(std::span<std::uint64_t>)> ForRank(
      std::uint32_t rank) = 0;
  virtual std::string version() const = 0;
};

}  // namespace kedge::example

#endif  // KEDGE_EXAMPLES_GPU_LOOP_NCCL_SUM_H_
