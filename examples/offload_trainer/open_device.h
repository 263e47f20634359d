#ifndef KEDGE_EXAMPLES_OFFLOAD_TRAINER_OPEN_DEVICE_H_
#define KEDGE_EXAMPLES_OFFLOAD_TRAINER_OPEN_DEVICE_H_

// "cpu" and "cuda:N", whether or not this program was built with CUDA.

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "kedge/engine/device/device.h"

namespace kedge::example {

// kInvalidArgument for another name; kUnimplemented for a GPU without CUDA.
absl::StatusOr<std::unique_ptr<Device>> OpenDevice(const std::string& name);

}  // namespace kedge::example

#endif  // KEDGE_EXAMPLES_OFFLOAD_TRAINER_OPEN_DEVICE_H_
