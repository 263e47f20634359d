#ifndef KEDGE_EXAMPLES_GPU_LOOP_HOST_H_
#define KEDGE_EXAMPLES_GPU_LOOP_HOST_H_

// The devices of a run, which engine rank lies on which, and how the ranks of
// an engine add up.
//
// Ranks of all engines are numbered through: engine 0 rank 0, engine 0 rank 1,
// ..., engine 1 rank 0, and so on. That number is called `place` here.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kedge/engine/device/device.h"
#include "kedge/examples/gpu_loop/nccl_sum.h"
#include "kedge/examples/gpu_loop/thread_sum.h"

namespace kedge::example {

struct HostOptions {
  std::string device = "cpu";  // the trainer's
  // Taken in turns over all places. Empty: the trainer's.
  std::vector<std::string> engine_devices;
  std::uint32_t engines = 1;  // 1 to 8
  std::uint32_t tp = 2;       // ranks of each, 1 to 8
  std::string nccl = "auto";  // or "on", "off"
  std::string nccl_library = "libnccl.so.2";
  std::chrono::seconds timeout{300};  // of a sum

  std::size_t places() const { return std::size_t{engines} * tp; }
};

// The name of each place's device.
std::vector<std::string> DeviceNames(const HostOptions& options);

// For messages: "engine rank 1", "engine 3 rank 1" if there are several.
std::string PlaceName(const HostOptions& options, std::size_t place);

// The GPUs of an engine's ranks. kInvalidArgument names the rank that has none,
// or shares it with a rank of any engine: NCCL takes one rank of a communicator
// on a GPU, and two communicators whose kernels wait on the same GPUs may wait
// for each other.
absl::StatusOr<std::vector<int>> OwnGpus(const HostOptions& options,
                                         std::uint32_t engine);

class Host {
 public:
  // Opens each device once, and what the ranks add up with. With nccl = "auto"
  // an engine takes NCCL if it has several ranks, OwnGpus and the library; "on"
  // fails where one of the last two is missing.
  static absl::StatusOr<std::unique_ptr<Host>> Open(HostOptions options);

  const HostOptions& options() const { return options_; }
  Device* trainer() const { return devices_.front().get(); }
  Device* device(std::size_t place) const { return of_place_[place]; }
  // For GroupOptions::reduce; outlived by this object.
  std::function<absl::Status(std::span<std::uint64_t>)> ReduceOf(
      std::size_t place);
  // "in process", "NCCL 2.27.3"; "none" for a rank that is alone.
  const std::string& reducer(std::uint32_t engine) const {
    return sums_[engine].name;
  }

 private:
  struct Sum {
    std::unique_ptr<ThreadSum> threads;
    std::unique_ptr<NcclSum> nccl;
    std::string name;
  };

  explicit Host(HostOptions options) : options_(std::move(options)) {}
  absl::Status OpenDevices();
  absl::Status OpenSum(std::uint32_t engine);

  const HostOptions options_;
  std::vector<std::unique_ptr<Device>> devices_;  // the trainer's first
  std::vector<Device*> of_place_;
  std::vector<Sum> sums_;  // of each engine; go before the devices
};

}  // namespace kedge::example

#endif  // KEDGE_EXAMPLES_GPU_LOOP_HOST_H_
