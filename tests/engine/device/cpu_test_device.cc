#include "kedge/engine/cpu/cpu_device.h"
#include "kedge/tests/engine/device/test_device.h"

namespace kedge::testing {

std::unique_ptr<Device> MakeTestDevice(std::string*) {
  return std::make_unique<CpuDevice>();
}
bool TestDeviceIsGpu() { return false; }

}  // namespace kedge::testing
