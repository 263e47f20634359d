#include "kedge/engine/cuda/cuda_device.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "kedge/engine/cuda/l61_sum.h"
#include "kedge/engine/cuda/quantise.h"
#include "kedge/engine/cuda/slice_copy.h"
#include "kedge/engine/cuda/tile_apply.h"
#include "kedge/engine/cuda/tile_encode.h"
#include "kedge/format/status.h"

namespace kedge {
namespace {

// Whether the process uses a GPU: has a context there. Yes if nobody knows.
bool HasContext(int ordinal) {
  using GetState = CUresult (*)(CUdevice, unsigned int*, int*);
  static const GetState get_state = []() -> GetState {
    // As the runtime finds it: the driver itself is not linked.
    constexpr char kName[] = "cuDevicePrimaryCtxGetState";
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
    constexpr unsigned kSince = 7000;
    const cudaError_t error = cudaGetDriverEntryPointByVersion(
        kName, &function, kSince, cudaEnableDefault, &result);
#else
    const cudaError_t error =
        cudaGetDriverEntryPoint(kName, &function, cudaEnableDefault, &result);
#endif
    if (error != cudaSuccess) static_cast<void>(cudaGetLastError());
    if (error != cudaSuccess || result != cudaDriverEntryPointSuccess) {
      return nullptr;
    }
    return reinterpret_cast<GetState>(function);
  }();
  unsigned int flags = 0;
  int active = 0;
  return get_state == nullptr ||
         get_state(ordinal, &flags, &active) != CUDA_SUCCESS || active != 0;
}

// Makes a GPU current for a while: the caller's own choice stays his. A thread
// that never chose is said to be at GPU 0; to go back there would give a
// process that uses another one a context on GPU 0, and take its memory.
class MakeCurrent {
 public:
  explicit MakeCurrent(int ordinal) {
    if (cudaGetDevice(&before_) != cudaSuccess) before_ = ordinal;
    if (before_ != ordinal) {
      changed_ = true;
      error_ = cudaSetDevice(ordinal);
    }
  }
  ~MakeCurrent() {
    if (changed_ && HasContext(before_)) {
      static_cast<void>(cudaSetDevice(before_));
    }
  }
  MakeCurrent(const MakeCurrent&) = delete;
  MakeCurrent& operator=(const MakeCurrent&) = delete;
  cudaError_t error() const { return error_; }

 private:
  int before_ = 0;
  bool changed_ = false;
  cudaError_t error_ = cudaSuccess;
};

std::string ErrorText(cudaError_t error) {
  return absl::StrCat(cudaGetErrorName(error), " (", cudaGetErrorString(error),
                      ")");
}

absl::Status CudaStatus(cudaError_t error, absl::string_view device,
                        absl::string_view call) {
  if (error == cudaSuccess) return absl::OkStatus();
  // An error that does not last must not be found again by others' calls.
  static_cast<void>(cudaGetLastError());
  return absl::InternalError(
      Describe({.where = device, .what = call, .found = ErrorText(error)}));
}

cudaStream_t StreamOf(DeviceStream stream) {
  return static_cast<cudaStream_t>(stream);
}
cudaEvent_t EventOf(DeviceEvent event) {
  return static_cast<cudaEvent_t>(event);
}

// cudaMemcpy2D takes no larger pitch (cudaDeviceProp::memPitch).
constexpr std::uint64_t kMaxPitch = (std::uint64_t{1} << 31) - 1;

}  // namespace

// Returns from the enclosing method if `expression`, a cudaError_t, says so.
#define KEDGE_CUDA_RETURN_IF_ERROR(expression, call) \
  KEDGE_RETURN_IF_ERROR(CudaStatus((expression), name_, call))
// Makes the device current to the end of the enclosing method.
#define KEDGE_CUDA_MAKE_CURRENT()           \
  const MakeCurrent make_current(ordinal_); \
  KEDGE_CUDA_RETURN_IF_ERROR(make_current.error(), "cudaSetDevice")

int CudaDeviceCount() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return 0;
  }
  return count;
}

absl::StatusOr<std::unique_ptr<CudaDevice>> CudaDevice::Open(int ordinal) {
  const std::string where = absl::StrCat("cuda:", ordinal);
  int count = 0;
  KEDGE_RETURN_IF_ERROR(
      CudaStatus(cudaGetDeviceCount(&count), where, "cudaGetDeviceCount"));
  if (ordinal < 0 || ordinal >= count) {
    return absl::InvalidArgumentError(
        Describe({.where = where,
                  .what = "no such device",
                  .expected = absl::StrCat("0 to ", count - 1),
                  .advice = "see CUDA_VISIBLE_DEVICES"}));
  }
  cudaDeviceProp properties;
  KEDGE_RETURN_IF_ERROR(
      CudaStatus(cudaGetDeviceProperties(&properties, ordinal), where,
                 "cudaGetDeviceProperties"));
  std::unique_ptr<CudaDevice> device(
      new CudaDevice(ordinal, absl::StrCat(where, " (", properties.name, ")")));
  KEDGE_ASSIGN_OR_RETURN(device->setup_stream_, device->CreateStream());
  return device;
}

CudaDevice::~CudaDevice() = default;

absl::StatusOr<DeviceMemory> CudaDevice::Allocate(MemoryKind kind,
                                                  std::uint64_t bytes) {
  if (bytes == 0) return DeviceMemory();
  KEDGE_CUDA_MAKE_CURRENT();
  void* data = nullptr;
  const bool on_device = kind == MemoryKind::kDevice;
  const cudaError_t error =
      on_device ? cudaMalloc(&data, bytes)
                : cudaHostAlloc(&data, bytes, cudaHostAllocPortable);
  const absl::string_view call = on_device ? "cudaMalloc" : "cudaHostAlloc";
  if (error == cudaErrorMemoryAllocation) {
    static_cast<void>(cudaGetLastError());
    std::string found = ErrorText(error);
    std::size_t free_bytes = 0;
    std::size_t all_bytes = 0;
    if (on_device && cudaMemGetInfo(&free_bytes, &all_bytes) == cudaSuccess) {
      absl::StrAppend(&found, ", ", free_bytes, " of ", all_bytes,
                      " bytes free");
    }
    return absl::ResourceExhaustedError(
        Describe({.where = name_,
                  .what = call,
                  .expected = absl::StrCat(bytes, " bytes"),
                  .found = found,
                  .advice = on_device ? "free device memory or hold less"
                                      : "free host memory or hold less"}));
  }
  KEDGE_CUDA_RETURN_IF_ERROR(error,
                             absl::StrCat(call, " of ", bytes, " bytes"));
  return DeviceMemory(this, kind, data, bytes);
}

void CudaDevice::Free(MemoryKind kind, void* data) {
  // Nobody can be told of an error here, and what fails now fails again.
  const MakeCurrent make_current(ordinal_);
  if (kind == MemoryKind::kDevice) {
    static_cast<void>(cudaFree(data));
  } else {
    static_cast<void>(cudaFreeHost(data));
  }
}

absl::Status CudaDevice::RegisterHost(const void* data, std::uint64_t bytes) {
  if (bytes == 0) return absl::OkStatus();
  KEDGE_CUDA_MAKE_CURRENT();
  int read_only = 0;
  KEDGE_CUDA_RETURN_IF_ERROR(
      cudaDeviceGetAttribute(
          &read_only, cudaDevAttrHostRegisterReadOnlySupported, ordinal_),
      "cudaDeviceGetAttribute");
  // Pages of a file mapped for reading can be registered as read-only alone;
  // other memory also where the platform does not know such a thing.
  const unsigned flags =
      cudaHostRegisterPortable |
      (read_only != 0 ? unsigned{cudaHostRegisterReadOnly} : 0u);
  const cudaError_t error =
      cudaHostRegister(const_cast<void*>(data), bytes, flags);
  if (error == cudaSuccess) return absl::OkStatus();
  static_cast<void>(cudaGetLastError());
  return absl::UnimplementedError(
      Describe({.where = name_,
                .what = absl::StrCat("cudaHostRegister of ", bytes, " bytes"),
                .found = ErrorText(error)}));
}

void CudaDevice::UnregisterHost(const void* data) {
  const MakeCurrent make_current(ordinal_);
  static_cast<void>(cudaHostUnregister(const_cast<void*>(data)));
}

// Memory of this GPU, whoever allocated it, and managed memory. Pinned and
// registered host memory is not, nor is the heap where kernels could reach it:
// weights there would be updated over PCIe.
bool CudaDevice::IsDeviceMemory(const void* data) const {
  const MakeCurrent make_current(ordinal_);
  cudaPointerAttributes attributes;
  if (cudaPointerGetAttributes(&attributes, data) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return false;
  }
  return attributes.type == cudaMemoryTypeManaged ||
         (attributes.type == cudaMemoryTypeDevice &&
          attributes.device == ordinal_);
}

bool CudaDevice::IsHostMemory(const void* data) const {
  const MakeCurrent make_current(ordinal_);
  cudaPointerAttributes attributes;
  if (cudaPointerGetAttributes(&attributes, data) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return true;
  }
  return attributes.type != cudaMemoryTypeDevice;
}

absl::StatusOr<OwnedStream> CudaDevice::CreateStream() {
  KEDGE_CUDA_MAKE_CURRENT();
  cudaStream_t stream;
  KEDGE_CUDA_RETURN_IF_ERROR(
      cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking),
      "cudaStreamCreateWithFlags");
  return OwnedStream(this, stream);
}
void CudaDevice::DestroyStream(DeviceStream stream) {
  const MakeCurrent make_current(ordinal_);
  static_cast<void>(cudaStreamDestroy(StreamOf(stream)));
}

absl::StatusOr<OwnedEvent> CudaDevice::CreateEvent() {
  KEDGE_CUDA_MAKE_CURRENT();
  cudaEvent_t event;
  // Waiting threads sleep: the cores are the optimizer's.
  KEDGE_CUDA_RETURN_IF_ERROR(
      cudaEventCreateWithFlags(&event,
                               cudaEventDisableTiming | cudaEventBlockingSync),
      "cudaEventCreateWithFlags");
  return OwnedEvent(this, event);
}
void CudaDevice::DestroyEvent(DeviceEvent event) {
  const MakeCurrent make_current(ordinal_);
  static_cast<void>(cudaEventDestroy(EventOf(event)));
}

absl::Status CudaDevice::Record(DeviceEvent event, DeviceStream stream) {
  KEDGE_CUDA_MAKE_CURRENT();
  return CudaStatus(cudaEventRecord(EventOf(event), StreamOf(stream)), name_,
                    "cudaEventRecord");
}

absl::Status CudaDevice::StreamWait(DeviceStream stream, DeviceEvent event) {
  KEDGE_CUDA_MAKE_CURRENT();
  return CudaStatus(cudaStreamWaitEvent(StreamOf(stream), EventOf(event), 0),
                    name_, "cudaStreamWaitEvent");
}

absl::StatusOr<bool> CudaDevice::HasPassed(DeviceEvent event) {
  KEDGE_CUDA_MAKE_CURRENT();
  const cudaError_t error = cudaEventQuery(EventOf(event));
  if (error == cudaErrorNotReady) return false;
  KEDGE_CUDA_RETURN_IF_ERROR(error, "cudaEventQuery");
  return true;
}

absl::Status CudaDevice::WaitForEvent(DeviceEvent event) {
  KEDGE_CUDA_MAKE_CURRENT();
  return CudaStatus(cudaEventSynchronize(EventOf(event)), name_,
                    "cudaEventSynchronize");
}

absl::Status CudaDevice::WaitForStream(DeviceStream stream) {
  KEDGE_CUDA_MAKE_CURRENT();
  return CudaStatus(cudaStreamSynchronize(StreamOf(stream)), name_,
                    "cudaStreamSynchronize");
}

absl::Status CudaDevice::Copy(void* to, const void* from, std::uint64_t bytes,
                              DeviceStream stream) {
  if (bytes == 0) return absl::OkStatus();
  KEDGE_CUDA_MAKE_CURRENT();
  return CudaStatus(
      cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, StreamOf(stream)),
      name_, "cudaMemcpyAsync");
}

absl::Status CudaDevice::CopyRows(void* to, std::uint64_t to_pitch,
                                  const void* from, std::uint64_t from_pitch,
                                  std::uint64_t row_bytes, std::uint64_t rows,
                                  DeviceStream stream) {
  if (row_bytes == 0 || rows == 0) return absl::OkStatus();
  if (rows == 1) return Copy(to, from, row_bytes, stream);
  if (to_pitch < row_bytes || from_pitch < row_bytes) {
    return absl::InvalidArgumentError(Describe(
        {.where = name_,
         .what =
             absl::StrCat("CopyRows: pitches ", to_pitch, " and ", from_pitch),
         .expected =
             absl::StrCat("at least the ", row_bytes, " bytes of a row")}));
  }
  if (to_pitch == row_bytes && from_pitch == row_bytes) {
    return Copy(to, from, row_bytes * rows, stream);
  }
  if (std::max(to_pitch, from_pitch) > kMaxPitch) {
    for (std::uint64_t row = 0; row < rows; ++row) {
      KEDGE_RETURN_IF_ERROR(
          Copy(static_cast<std::byte*>(to) + row * to_pitch,
               static_cast<const std::byte*>(from) + row * from_pitch,
               row_bytes, stream));
    }
    return absl::OkStatus();
  }
  KEDGE_CUDA_MAKE_CURRENT();
  return CudaStatus(
      cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, row_bytes, rows,
                        cudaMemcpyDefault, StreamOf(stream)),
      name_, "cudaMemcpy2DAsync");
}

absl::Status CudaDevice::Fill(void* to, std::uint8_t value, std::uint64_t bytes,
                              DeviceStream stream) {
  if (bytes == 0) return absl::OkStatus();
  KEDGE_CUDA_MAKE_CURRENT();
  return CudaStatus(cudaMemsetAsync(to, value, bytes, StreamOf(stream)), name_,
                    "cudaMemsetAsync");
}

absl::Status CudaDevice::Upload(void* to, const void* from,
                                std::uint64_t bytes) {
  KEDGE_RETURN_IF_ERROR(Copy(to, from, bytes, setup_stream_.get()));
  return WaitForStream(setup_stream_.get());
}

absl::StatusOr<DeviceMemory> CudaDevice::MakeL61Table(const L61Key& key) {
  std::vector<std::uint64_t> a(kL61TileWords);
  for (std::uint32_t t = 0; t < kL61TileWords; ++t) a[t] = key.A(t);
  const std::uint64_t bytes = a.size() * sizeof(a[0]);
  KEDGE_ASSIGN_OR_RETURN(DeviceMemory table,
                         Allocate(MemoryKind::kDevice, bytes));
  KEDGE_RETURN_IF_ERROR(Upload(table.data(), a.data(), bytes));
  return table;
}

absl::Status CudaDevice::CopySliceToBox(const std::byte* from,
                                        const TileGrid& grid,
                                        const UnitRange& slice,
                                        const BoxTarget& box,
                                        DeviceStream stream) {
  if (slice.begin >= slice.end) return absl::OkStatus();
  KEDGE_CUDA_MAKE_CURRENT();
  return CudaStatus(
      LaunchCopySliceToBox(from, grid, slice, box, StreamOf(stream)), name_,
      "CopySliceToBox");
}

absl::Status CudaDevice::Encode(const EncodeBatch& batch, DeviceStream stream) {
  KEDGE_CUDA_MAKE_CURRENT();
  return CudaStatus(LaunchEncode(batch, StreamOf(stream)), name_, "Encode");
}

absl::Status CudaDevice::Apply(const ApplyBatch& batch, DeviceStream stream) {
  KEDGE_CUDA_MAKE_CURRENT();
  return CudaStatus(LaunchApply(batch, StreamOf(stream)), name_, "Apply");
}

absl::Status CudaDevice::Quantise(const QuantiseBatch& batch,
                                  DeviceStream stream) {
  KEDGE_CUDA_MAKE_CURRENT();
  return CudaStatus(LaunchQuantise(batch, StreamOf(stream)), name_, "Quantise");
}

// Thread safety: as DeviceSums.
class CudaDevice::Sums final : public DeviceSums {
 public:
  Sums(CudaDevice* device, std::uint32_t output_count)
      : device_(device), output_count_(output_count) {}
  ~Sums() override {
    // The last copy back may be under way; an error has no one to go to.
    if (event_.get() != nullptr) {
      static_cast<void>(device_->WaitForEvent(event_.get()));
    }
  }

  absl::Status Prepare(const SumPlan& plan, const L61Key& key) {
    bytes_ = plan.bytes;
    if (output_count_ == 0) return absl::OkStatus();
    constexpr std::uint64_t kWord = sizeof(std::uint64_t);
    if (plan.items.size() > ~std::uint32_t{0}) {
      return absl::InvalidArgumentError(
          Describe({.where = device_->name(),
                    .what = "PrepareSums: pieces of work",
                    .expected = "fewer than 2^32",
                    .found = absl::StrCat(plan.items.size())}));
    }
    const std::uint64_t item_bytes = plan.items.size() * sizeof(SumItem);
    KEDGE_ASSIGN_OR_RETURN(items_,
                           device_->Allocate(MemoryKind::kDevice, item_bytes));
    KEDGE_RETURN_IF_ERROR(
        device_->Upload(items_.data(), plan.items.data(), item_bytes));
    KEDGE_ASSIGN_OR_RETURN(table_, device_->MakeL61Table(key));
    const std::uint64_t scratch_words = SumScratchWords(output_count_);
    KEDGE_ASSIGN_OR_RETURN(
        sums_, device_->Allocate(MemoryKind::kDevice,
                                 (scratch_words + output_count_) * kWord));
    KEDGE_ASSIGN_OR_RETURN(residues_, device_->Allocate(MemoryKind::kPinned,
                                                        output_count_ * kWord));
    KEDGE_ASSIGN_OR_RETURN(event_, device_->CreateEvent());
    const MakeCurrent make_current(device_->ordinal());
    KEDGE_RETURN_IF_ERROR(
        CudaStatus(make_current.error(), device_->name(), "cudaSetDevice"));
    KEDGE_RETURN_IF_ERROR(
        CudaStatus(LoadSumKernels(), device_->name(), "loading sum kernels"));
    work_.items = items_.as<SumItem>();
    work_.row_items = static_cast<std::uint32_t>(plan.row_items);
    work_.vector_items = static_cast<std::uint32_t>(plan.vector_items);
    work_.column_items = static_cast<std::uint32_t>(plan.column_items);
    work_.tile_items = static_cast<std::uint32_t>(plan.tile_items);
    work_.output_count = output_count_;
    work_.scratch = sums_.as<std::uint64_t>();
    work_.residues = work_.scratch + scratch_words;
    work_.l61 = {table_.as<std::uint64_t>(), key};
    return absl::OkStatus();
  }

  absl::Status Enqueue(DeviceStream stream) override {
    if (output_count_ == 0) return absl::OkStatus();
    {
      const MakeCurrent make_current(device_->ordinal());
      // Not name(): its copy would be an allocation in an engine's pause.
      KEDGE_RETURN_IF_ERROR(
          CudaStatus(make_current.error(), device_->name_, "cudaSetDevice"));
      KEDGE_RETURN_IF_ERROR(CudaStatus(LaunchSums(work_, StreamOf(stream)),
                                       device_->name_, "Sums"));
    }
    KEDGE_RETURN_IF_ERROR(device_->Copy(residues_.data(), work_.residues,
                                        residues_.bytes(), stream));
    return device_->Record(event_.get(), stream);
  }
  std::span<const std::uint64_t> residues() override {
    return {residues_.as<std::uint64_t>(), output_count_};
  }
  std::uint64_t bytes() const override { return bytes_; }

 private:
  CudaDevice* const device_;
  const std::uint32_t output_count_;
  std::uint64_t bytes_ = 0;
  DeviceMemory items_;
  DeviceMemory table_;
  DeviceMemory sums_;  // scratch, then residues
  DeviceMemory residues_;
  OwnedEvent event_;  // behind the last copy of residues
  SumWork work_;
};

absl::StatusOr<std::unique_ptr<DeviceSums>> CudaDevice::PrepareSums(
    std::span<const SumBox> boxes, std::uint32_t output_count,
    const L61Key& key) {
  for (const SumBox& sum : boxes) {
    if (sum.output >= output_count) {
      return absl::InvalidArgumentError(
          Describe({.where = name_,
                    .what = "PrepareSums: output",
                    .expected = absl::StrCat("below ", output_count),
                    .found = absl::StrCat(sum.output)}));
    }
  }
  auto sums = std::make_unique<Sums>(this, output_count);
  KEDGE_RETURN_IF_ERROR(sums->Prepare(PlanSums(boxes), key));
  return std::unique_ptr<DeviceSums>(std::move(sums));
}

}  // namespace kedge
