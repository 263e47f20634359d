#include "kedge/bench/moving_passes.h"

#include <atomic>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kedge/bench/bench_inputs.h"
#include "kedge/bench/bench_report.h"
#include "kedge/format/status.h"

#ifdef KEDGE_BENCH_CUDA
#include "kedge/bench/pass_kernels.h"
#endif

namespace kedge {
namespace {

std::uint64_t CountOnCpu(const void* a, const void* b, std::uint64_t words) {
  std::atomic<std::uint64_t> count = 0;
  InParallel(words, [&](std::uint64_t begin, std::uint64_t end) {
    const auto* const left = static_cast<const std::uint64_t*>(a);
    const auto* const right = static_cast<const std::uint64_t*>(b);
    std::uint64_t mine = 0;
    for (std::uint64_t i = 2 * begin; i < 2 * end; i += 2) {
      mine +=
          ((left[i] ^ right[i]) | (left[i + 1] ^ right[i + 1])) != 0 ? 1 : 0;
    }
    count += mine;
  });
  return count;
}

#ifdef KEDGE_BENCH_CUDA
absl::Status FromCuda(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(call, ": ", cudaGetErrorName(error),
                                          ": ", cudaGetErrorString(error)));
}
#endif

}  // namespace

absl::StatusOr<DifferencePass> DifferencePass::Make(BenchDevice* bench,
                                                    DeviceStream stream) {
  DifferencePass pass;
  pass.bench_ = bench;
  KEDGE_ASSIGN_OR_RETURN(
      pass.count_,
      bench->device()->Allocate(MemoryKind::kDevice, sizeof(std::uint64_t)));
  KEDGE_ASSIGN_OR_RETURN(
      pass.pinned_,
      bench->device()->Allocate(MemoryKind::kPinned, sizeof(std::uint64_t)));
  KEDGE_RETURN_IF_ERROR(bench->device()->Fill(pass.count_.data(), 0,
                                              pass.count_.bytes(), stream));
  return pass;
}

absl::Status DifferencePass::Tune(const void* a, const void* b,
                                  std::uint64_t bytes, DeviceStream stream) {
#ifdef KEDGE_BENCH_CUDA
  if (bench_->is_gpu()) {
    int fastest = 0;
    double best = 0;
    for (int form = 0; form < kReadPassForms; ++form) {
      form_ = form;
      Samples seconds;
      for (int i = 0; i < 6; ++i) {
        KEDGE_RETURN_IF_ERROR(bench_->StartClock(stream));
        KEDGE_RETURN_IF_ERROR(Enqueue(a, b, bytes, stream));
        KEDGE_RETURN_IF_ERROR(bench_->StopClock(stream));
        KEDGE_ASSIGN_OR_RETURN(const double time, bench_->ReadClockSeconds());
        if (i > 0) seconds.Add(time);  // the first one loads the kernel
      }
      if (form == 0 || seconds.Median() < best) {
        best = seconds.Median();
        fastest = form;
      }
    }
    form_ = fastest;
    return absl::OkStatus();
  }
#endif
  return Enqueue(a, b, bytes, stream);
}

absl::Status DifferencePass::Enqueue(const void* a, const void* b,
                                     std::uint64_t bytes, DeviceStream stream) {
#ifdef KEDGE_BENCH_CUDA
  if (bench_->is_gpu()) {
    return FromCuda(
        LaunchCountDifferentWords(a, b, bytes / 16, form_,
                                  count_.as<unsigned long long>(),
                                  static_cast<cudaStream_t>(stream)),
        "read-only pass");
  }
#endif
  KEDGE_RETURN_IF_ERROR(bench_->device()->WaitForStream(stream));
  *count_.as<std::uint64_t>() += CountOnCpu(a, b, bytes / 16);
  return absl::OkStatus();
}

absl::StatusOr<std::uint64_t> DifferencePass::WaitForCount(
    DeviceStream stream) {
  KEDGE_RETURN_IF_ERROR(bench_->device()->Copy(pinned_.data(), count_.data(),
                                               sizeof(std::uint64_t), stream));
  KEDGE_RETURN_IF_ERROR(
      bench_->device()->Fill(count_.data(), 0, count_.bytes(), stream));
  KEDGE_RETURN_IF_ERROR(bench_->device()->WaitForStream(stream));
  return *pinned_.as<std::uint64_t>();
}

absl::Status EnqueueHalveBytes(BenchDevice& bench, const void* from, void* to,
                               std::uint64_t elements, DeviceStream stream) {
#ifdef KEDGE_BENCH_CUDA
  if (bench.is_gpu()) {
    return FromCuda(
        LaunchHalveBytes(from, to, elements, static_cast<cudaStream_t>(stream)),
        "halving pass");
  }
#endif
  KEDGE_RETURN_IF_ERROR(bench.device()->WaitForStream(stream));
  InParallel(elements, [&](std::uint64_t begin, std::uint64_t end) {
    const auto* const in = static_cast<const std::uint16_t*>(from);
    auto* const out = static_cast<std::uint8_t*>(to);
    for (std::uint64_t i = begin; i < end; ++i) {
      out[i] = static_cast<std::uint8_t>(in[i]);
    }
  });
  return absl::OkStatus();
}

}  // namespace kedge
