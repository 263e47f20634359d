#include "kedge/examples/gpu_loop/nccl_sum.h"

#include "absl/strings/str_cat.h"
#include "kedge/format/status.h"

#ifdef KEDGE_EXAMPLE_CUDA
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>
#endif

namespace kedge::example {

#ifdef KEDGE_EXAMPLE_CUDA
namespace {

// The part of NCCL 2's C interface that is used here; enumerations by value.
using Comm = void*;
constexpr int kSuccess = 0;
constexpr int kUint64 = 5;  // ncclUint64
constexpr int kSum = 0;     // ncclSum
// Sums of this many values below 2^61 - 1 fit in 64 bits.
constexpr std::size_t kMaxRanks = 8;

struct Nccl {
  int (*get_version)(int*) = nullptr;
  int (*init_all)(Comm*, int, const int*) = nullptr;
  int (*all_reduce)(const void*, void*, std::size_t, int, int, Comm,
                    cudaStream_t) = nullptr;
  int (*abort)(Comm) = nullptr;
  int (*destroy)(Comm) = nullptr;
  const char* (*error_string)(int) = nullptr;

  absl::Status Check(int result, const char* call) const {
    if (result == kSuccess) return absl::OkStatus();
    return absl::InternalError(absl::StrCat(call, ": ", error_string(result)));
  }
};

absl::StatusOr<Nccl> Load(const std::string& library) {
  // Never closed: NCCL keeps threads.
  void* const handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    return absl::NotFoundError(absl::StrCat("NCCL: ", dlerror()));
  }
  Nccl nccl;
  absl::Status missing;
  const auto find = [&](auto* function, const char* name) {
    void* const found = dlsym(handle, name);
    if (found == nullptr && missing.ok()) {
      missing = absl::NotFoundError(
          absl::StrCat("NCCL: ", library, " has no ", name));
    }
    std::memcpy(function, &found, sizeof(found));
  };
  find(&nccl.get_version, "ncclGetVersion");
  find(&nccl.init_all, "ncclCommInitAll");
  find(&nccl.all_reduce, "ncclAllReduce");
  find(&nccl.abort, "ncclCommAbort");
  find(&nccl.destroy, "ncclCommDestroy");
  find(&nccl.error_string, "ncclGetErrorString");
  if (!missing.ok()) return missing;
  return nccl;
}

class LoadedNcclSum : public NcclSum {
 public:
  LoadedNcclSum(const Nccl& nccl, std::chrono::milliseconds deadline)
      : nccl_(nccl), deadline_(deadline) {}
  ~LoadedNcclSum() override {
    for (Rank& rank : ranks_) {
      if (rank.comm != nullptr && !aborted_) nccl_.destroy(rank.comm);
    }
  }

  absl::Status Init(const std::vector<Device*>& devices,
                    const std::vector<int>& ordinals) {
    KEDGE_RETURN_IF_ERROR(
        nccl_.Check(nccl_.get_version(&version_), "ncclGetVersion"));
    std::vector<Comm> comms(devices.size(), nullptr);
    KEDGE_RETURN_IF_ERROR(
        nccl_.Check(nccl_.init_all(comms.data(), static_cast<int>(comms.size()),
                                   ordinals.data()),
                    "ncclCommInitAll"));
    ranks_.resize(devices.size());
    for (std::size_t r = 0; r < devices.size(); ++r) ranks_[r].comm = comms[r];
    for (std::size_t r = 0; r < devices.size(); ++r) {
      Rank& rank = ranks_[r];
      rank.device = devices[r];
      rank.ordinal = ordinals[r];
      KEDGE_ASSIGN_OR_RETURN(rank.stream, rank.device->CreateStream());
      KEDGE_ASSIGN_OR_RETURN(rank.done, rank.device->CreateEvent());
      // Enough for a model of many tensors, so that nothing is allocated while
      // weights are locked.
      KEDGE_RETURN_IF_ERROR(rank.Reserve(std::uint64_t{1} << 17));
    }
    return absl::OkStatus();
  }

  std::function<absl::Status(std::span<std::uint64_t>)> ForRank(
      std::uint32_t rank) override {
    return [this, rank](std::span<std::uint64_t> values) {
      return Reduce(ranks_[rank], values);
    };
  }
  std::string version() const override {
    return absl::StrCat(version_ / 10000, ".", version_ / 100 % 100, ".",
                        version_ % 100);
  }

 private:
  struct Rank {
    Comm comm = nullptr;
    Device* device = nullptr;
    int ordinal = 0;
    OwnedStream stream;
    OwnedEvent done;
    DeviceMemory pinned;
    DeviceMemory memory;

    absl::Status Reserve(std::uint64_t values) {
      const std::uint64_t bytes = values * sizeof(std::uint64_t);
      if (memory.bytes() >= bytes) return absl::OkStatus();
      KEDGE_ASSIGN_OR_RETURN(pinned,
                             device->Allocate(MemoryKind::kPinned, bytes));
      KEDGE_ASSIGN_OR_RETURN(memory,
                             device->Allocate(MemoryKind::kDevice, bytes));
      return absl::OkStatus();
    }
  };

  // Values stay below 2^64 for up to kMaxRanks; kedge takes them modulo its
  // prime.
  absl::Status Reduce(Rank& rank, std::span<std::uint64_t> values) {
    if (aborted_) return absl::UnavailableError("NCCL was aborted");
    if (cudaSetDevice(rank.ordinal) != cudaSuccess) {
      return absl::InternalError("cudaSetDevice failed");
    }
    const std::uint64_t bytes = values.size() * sizeof(std::uint64_t);
    KEDGE_RETURN_IF_ERROR(rank.Reserve(values.size()));
    std::memcpy(rank.pinned.data(), values.data(), bytes);
    KEDGE_RETURN_IF_ERROR(rank.device->Copy(
        rank.memory.data(), rank.pinned.data(), bytes, rank.stream.get()));
    KEDGE_RETURN_IF_ERROR(nccl_.Check(
        nccl_.all_reduce(rank.memory.data(), rank.memory.data(), values.size(),
                         kUint64, kSum, rank.comm,
                         static_cast<cudaStream_t>(rank.stream.get())),
        "ncclAllReduce"));
    KEDGE_RETURN_IF_ERROR(rank.device->Copy(
        rank.pinned.data(), rank.memory.data(), bytes, rank.stream.get()));
    KEDGE_RETURN_IF_ERROR(
        rank.device->Record(rank.done.get(), rank.stream.get()));
    const auto end = std::chrono::steady_clock::now() + deadline_;
    while (true) {
      KEDGE_ASSIGN_OR_RETURN(const bool passed,
                             rank.device->HasPassed(rank.done.get()));
      if (passed) break;
      if (aborted_) return absl::UnavailableError("NCCL was aborted");
      if (std::chrono::steady_clock::now() > end) {
        // A kernel that waits for a rank that never comes ends no other way.
        if (!aborted_.exchange(true)) {
          for (Rank& each : ranks_) nccl_.abort(each.comm);
        }
        return absl::DeadlineExceededError(
            absl::StrCat("waited ", deadline_.count(),
                         " ms in ncclAllReduce for the other ranks"));
      }
      std::this_thread::yield();
    }
    std::memcpy(values.data(), rank.pinned.data(), bytes);
    return absl::OkStatus();
  }

  const Nccl nccl_;
  const std::chrono::milliseconds deadline_;
  int version_ = 0;
  std::vector<Rank> ranks_;
  std::atomic<bool> aborted_{false};
};

}  // namespace

absl::StatusOr<std::unique_ptr<NcclSum>> NcclSum::Open(
    const std::string& library, const std::vector<Device*>& devices,
    const std::vector<int>& ordinals, std::chrono::milliseconds deadline) {
  if (devices.empty() || devices.size() > kMaxRanks ||
      devices.size() != ordinals.size()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "NCCL: expected a GPU for each of 1 to ", kMaxRanks, " ranks, found ",
        ordinals.size(), " GPUs for ", devices.size(), " ranks"));
  }
  KEDGE_ASSIGN_OR_RETURN(const Nccl nccl, Load(library));
  auto sum = std::make_unique<LoadedNcclSum>(nccl, deadline);
  KEDGE_RETURN_IF_ERROR(sum->Init(devices, ordinals));
  return std::unique_ptr<NcclSum>(std::move(sum));
}

#else

absl::StatusOr<std::unique_ptr<NcclSum>> NcclSum::Open(
    const std::string&, const std::vector<Device*>&, const std::vector<int>&,
    std::chrono::milliseconds) {
  return absl::UnimplementedError("NCCL: this program was built without CUDA");
}

#endif  // KEDGE_EXAMPLE_CUDA

}  // namespace kedge::example
