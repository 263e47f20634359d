#ifndef KEDGE_TESTS_ENGINE_DEVICE_TEST_DEVICE_H_
#define KEDGE_TESTS_ENGINE_DEVICE_TEST_DEVICE_H_

// The device that the program at hand tests: the same tests are built once for
// CpuDevice and once for CudaDevice.

#include <memory>
#include <string>

#include "kedge/engine/device/device.h"

namespace kedge::testing {

// Null if this machine has none; `*reason` then says so.
std::unique_ptr<Device> MakeTestDevice(std::string* reason);

// A GPU: larger sizes cost it nothing.
bool TestDeviceIsGpu();

}  // namespace kedge::testing

#endif  // KEDGE_TESTS_ENGINE_DEVICE_TEST_DEVICE_H_
