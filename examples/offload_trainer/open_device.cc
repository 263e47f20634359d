#include "kedge/examples/offload_trainer/open_device.h"

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "kedge/engine/cpu/cpu_device.h"
#include "kedge/format/status.h"

#ifdef KEDGE_EXAMPLE_CUDA
#include "kedge/engine/cuda/cuda_device.h"
#endif

namespace kedge::example {

absl::StatusOr<std::unique_ptr<Device>> OpenDevice(const std::string& name) {
  if (name == "cpu") {
    return std::unique_ptr<Device>(std::make_unique<CpuDevice>());
  }
  absl::string_view number = name;
  int ordinal = 0;
  if (!absl::ConsumePrefix(&number, "cuda:") ||
      !absl::SimpleAtoi(number, &ordinal) || ordinal < 0) {
    return absl::InvalidArgumentError(Describe(
        {.where = "--device", .expected = "cpu or cuda:N", .found = name}));
  }
#ifdef KEDGE_EXAMPLE_CUDA
  KEDGE_ASSIGN_OR_RETURN(std::unique_ptr<Device> device,
                         CudaDevice::Open(ordinal));
  return device;
#else
  return absl::UnimplementedError(
      absl::StrCat("--device ", name,
                   ": this program was built without CUDA; build it with "
                   "KEDGE_CUDA=ON where nvcc is"));
#endif
}

}  // namespace kedge::example
