#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "kedge/capi/boundary.h"
#include "kedge/capi/handles.h"
#include "kedge/engine/cpu/cpu_device.h"
#ifdef KEDGE_WITH_CUDA
#include "kedge/engine/cuda/cuda_device.h"
#endif

namespace kedge::capi {
namespace {

absl::StatusOr<std::unique_ptr<Device>> OpenCuda(std::int32_t ordinal) {
  if (ordinal < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("ordinal: expected a GPU's number, found ", ordinal));
  }
#ifdef KEDGE_WITH_CUDA
  KEDGE_ASSIGN_OR_RETURN(auto device, CudaDevice::Open(ordinal));
  return std::unique_ptr<Device>(std::move(device));
#else
  return absl::UnimplementedError(
      absl::StrCat("cuda:", ordinal,
                   ": this kedge was built without CUDA; build it where nvcc "
                   "is, with -DKEDGE_CUDA=ON"));
#endif
}

kedge_device* MakeHandle(std::unique_ptr<Device> device) {
  auto handle = std::make_unique<kedge_device>();
  handle->device = std::move(device);
  handle->name = handle->device->name();
  return handle.release();
}

}  // namespace
}  // namespace kedge::capi

using kedge::capi::Guarded;
using kedge::capi::NotNull;

extern "C" {

kedge_status kedge_device_open_cpu(kedge_device** device, kedge_error** error) {
  return Guarded(error, [&]() -> absl::Status {
    KEDGE_RETURN_IF_ERROR(NotNull(device, "device"));
    *device = nullptr;
    // A C program's weights lie where it put them.
    kedge::CpuDeviceOptions options;
    options.any_memory_is_device_memory = true;
    *device = kedge::capi::MakeHandle(
        std::make_unique<kedge::CpuDevice>(std::move(options)));
    return absl::OkStatus();
  });
}

kedge_status kedge_device_open_cuda(std::int32_t ordinal, kedge_device** device,
                                    kedge_error** error) {
  return Guarded(error, [&]() -> absl::Status {
    KEDGE_RETURN_IF_ERROR(NotNull(device, "device"));
    *device = nullptr;
    KEDGE_ASSIGN_OR_RETURN(std::unique_ptr<kedge::Device> opened,
                           kedge::capi::OpenCuda(ordinal));
    *device = kedge::capi::MakeHandle(std::move(opened));
    return absl::OkStatus();
  });
}

const char* kedge_device_name(const kedge_device* device) {
  return device == nullptr ? "" : device->name.c_str();
}

kedge_status kedge_device_create_stream(kedge_device* device, void** stream,
                                        kedge_error** error) {
  return Guarded(error, [&]() -> absl::Status {
    KEDGE_RETURN_IF_ERROR(NotNull(stream, "stream"));
    *stream = nullptr;
    KEDGE_RETURN_IF_ERROR(NotNull(device, "device"));
    KEDGE_ASSIGN_OR_RETURN(kedge::OwnedStream made,
                           device->device->CreateStream());
    void* const made_stream = made.get();
    const std::lock_guard lock(device->mutex);
    device->streams[made_stream] = std::move(made);
    *stream = made_stream;
    return absl::OkStatus();
  });
}

kedge_status kedge_device_wait_for_stream(kedge_device* device, void* stream,
                                          kedge_error** error) {
  return Guarded(error, [&]() -> absl::Status {
    KEDGE_RETURN_IF_ERROR(NotNull(device, "device"));
    return device->device->WaitForStream(stream);
  });
}

kedge_status kedge_device_destroy_stream(kedge_device* device, void* stream,
                                         kedge_error** error) {
  return Guarded(error, [&]() -> absl::Status {
    KEDGE_RETURN_IF_ERROR(NotNull(device, "device"));
    KEDGE_RETURN_IF_ERROR(NotNull(stream, "stream"));
    kedge::OwnedStream owned;
    {
      const std::lock_guard lock(device->mutex);
      const auto at = device->streams.find(stream);
      if (at == device->streams.end()) {
        return absl::InvalidArgumentError(absl::StrCat(
            device->name,
            ": stream: expected one of kedge_device_create_stream of this "
            "device, found another"));
      }
      owned = std::move(at->second);
      device->streams.erase(at);
    }
    return device->device->WaitForStream(stream);
  });
}

void kedge_device_free(kedge_device* device) { delete device; }

}  // extern "C"
