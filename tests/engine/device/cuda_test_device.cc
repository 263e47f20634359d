#include "absl/strings/str_cat.h"
#include "kedge/engine/cuda/cuda_device.h"
#include "kedge/tests/engine/device/test_device.h"

namespace kedge::testing {

std::unique_ptr<Device> MakeTestDevice(std::string* reason) {
  if (CudaDeviceCount() == 0) {
    *reason = "no CUDA device";
    return nullptr;
  }
  auto device = CudaDevice::Open(0);
  if (!device.ok()) {
    *reason = std::string(device.status().message());
    return nullptr;
  }
  return *std::move(device);
}
bool TestDeviceIsGpu() { return true; }

}  // namespace kedge::testing
