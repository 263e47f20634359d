// How long an inference engine's weights are locked while a step is applied and
// verified in place, on one rank of a tensor-parallel pair that serves a model
// like Qwen3-30B-A3B.
//
//   kedge_apply_verify [--device cuda:0] [--scale 1.0] [--density 0.008]
//                      [--repetitions 9] [--dir /dev/shm] [--fp8 1]
//                      [--follower 1] [--variant-layers 12] [--json FILE]
//                      [--commit TEXT]
//
// 1. A store of the whole model, v0 and a step, is written to --dir by the
//    library's writer on the CPU: that is where every expected checksum comes
//    from. The weights follow from a hash of tensor and element, so that the
//    device makes its own and anybody can check them.
// 2. Correctness: both halves of the model, one after the other in the same
//    memory, at v0 and after the step; their residues together must be the
//    manifest's S for every tensor, and of sampled tensors every element is
//    compared.
// 3. Kernels, one half (30.5 GB at --scale 1): apply, verify, and both, between
//    two events on the stream, the delta on the device already. Beside them in
//    the same round: a read-only pass over the same weights, a device copy, and
//    a scatter of the same changes, decoded.
// 4. The same changes in row-sliced, column-sliced and transposed targets.
// 5. A whole Follower on a checkpoint of the half: its own figures of an update
//    after Prefetch, with allocations in the pause counted.
//
// On the CPU the program proves itself, not a speed: --device cpu --scale 0.001

#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kedge/bench/bench_device.h"
#include "kedge/bench/bench_report.h"
#include "kedge/bench/qwen3_shapes.h"
#include "kedge/bench/record_stage.h"
#include "kedge/bench/synthetic_source.h"
#include "kedge/engine/io/store.h"
#include "kedge/format/l61.h"
#include "kedge/format/limits.h"
#include "kedge/format/status.h"
#include "kedge/reader/follower.h"

namespace {

// Heap allocations of the process while `counting_heap` says so.
std::atomic<bool> counting_heap{false};
std::atomic<std::uint64_t> heap_allocations{0};

void* CountedAllocate(std::size_t bytes) {
  if (counting_heap.load(std::memory_order_relaxed)) ++heap_allocations;
  void* const memory = std::malloc(bytes == 0 ? 1 : bytes);
  if (memory == nullptr) std::abort();
  return memory;
}

}  // namespace

void* operator new(std::size_t bytes) { return CountedAllocate(bytes); }
void* operator new[](std::size_t bytes) { return CountedAllocate(bytes); }
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  return CountedAllocate(bytes);
}
void* operator new[](std::size_t bytes, const std::nothrow_t&) noexcept {
  return CountedAllocate(bytes);
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept {
  std::free(memory);
}

namespace kedge {
namespace {

struct Options {
  std::string device = "cuda:0";
  double scale = 1.0;
  double density = 0.008;
  std::uint64_t repetitions = 9;
  std::string dir = "/dev/shm";
  std::uint64_t fp8 = 1;
  std::uint64_t follower = 1;
  std::uint64_t variant_layers = 12;
  std::string json;
  std::string commit;
};

constexpr std::uint32_t kRanks = 2;

absl::Status Wrong(absl::string_view where, absl::string_view what,
                   std::uint64_t expected, std::uint64_t found) {
  return absl::DataLossError(absl::StrCat(where, ": ", what, ": expected ",
                                          Hex64(expected), ", found ",
                                          Hex64(found)));
}

// The box of `place`'s tensor, at `data`.
BoxTarget BoxOf(const Qwen3Tensor& tensor, const Qwen3Place& place,
                std::byte* data) {
  BoxTarget box;
  box.data = data;
  box.unit_bytes = UnitBytes(tensor.dtype);
  box.units_per_element = 1;
  const bool vector = tensor.shape.size() == 1;
  box.row_begin = vector ? 0 : place.begin[0];
  box.row_end = vector ? 1 : place.begin[0] + place.extent[0];
  box.col_begin = place.begin.back();
  box.col_end = place.begin.back() + place.extent.back();
  box.col_stride_bytes = box.unit_bytes;
  box.row_stride_bytes =
      static_cast<std::int64_t>(place.extent.back()) * box.col_stride_bytes;
  return box;
}

// A model, its store, and targets of it in device memory.
struct Model {
  std::vector<Qwen3Tensor> tensors;
  std::vector<std::uint32_t> ordinals;  // in the table
  std::string store_path;
  std::unique_ptr<Store> store;
  std::shared_ptr<const PublishedStep> step;  // step 1
  std::vector<std::uint64_t> l61[2];          // at v0 and v1
  L61Key key;
};

absl::StatusOr<Model> WriteModel(std::vector<Qwen3Tensor> tensors,
                                 const std::string& path, double density) {
  Model model;
  model.tensors = std::move(tensors);
  model.store_path = path;
  SyntheticStoreOptions options;
  options.path = path;
  options.density = density;
  options.anchor = false;
  for (const Qwen3Tensor& tensor : model.tensors) {
    options.tensors.push_back({tensor.name, tensor.dtype, tensor.shape});
  }
  KEDGE_RETURN_IF_ERROR(WriteSyntheticStore(options));
  KEDGE_ASSIGN_OR_RETURN(model.store, Store::Open(PosixFileSystem(), path));
  model.key = L61Key::FromSeed(model.store->info().l61_seed);
  for (std::uint64_t version = 0; version < 2; ++version) {
    KEDGE_ASSIGN_OR_RETURN(const auto step, model.store->ReadStep(version));
    KEDGE_ASSIGN_OR_RETURN(VersionState state, model.store->StateAt(step));
    model.l61[version] = std::move(state.l61);
    model.step = step;
  }
  for (const Qwen3Tensor& tensor : model.tensors) {
    KEDGE_ASSIGN_OR_RETURN(const std::uint32_t ordinal,
                           model.step->table->Find(tensor.name));
    model.ordinals.push_back(ordinal);
  }
  return model;
}

// Memory for a layout's buffers.
absl::StatusOr<std::vector<DeviceMemory>> Allocate(Device* device,
                                                   const Qwen3Layout& layout) {
  std::vector<DeviceMemory> buffers;
  for (const std::uint64_t bytes : layout.buffer_bytes) {
    KEDGE_ASSIGN_OR_RETURN(DeviceMemory memory,
                           device->Allocate(MemoryKind::kDevice, bytes));
    buffers.push_back(std::move(memory));
  }
  return buffers;
}

std::vector<BenchTarget> TargetsOf(const Model& model,
                                   const Qwen3Layout& layout,
                                   const std::vector<DeviceMemory>& buffers) {
  std::vector<BenchTarget> targets;
  for (std::size_t i = 0; i < model.tensors.size(); ++i) {
    const Qwen3Place& place = layout.places[i];
    targets.push_back({model.ordinals[i],
                       BoxOf(model.tensors[i], place,
                             buffers[place.buffer].data() + place.offset)});
  }
  return targets;
}

// Targets, what fills them and what sums them.
class Weights {
 public:
  static absl::StatusOr<Weights> Make(BenchDevice* bench, const Model& model,
                                      double density,
                                      std::vector<BenchTarget> targets,
                                      DeviceStream stream) {
    Weights weights;
    weights.bench_ = bench;
    weights.stream_ = stream;
    std::vector<SumBox> boxes;
    for (const BenchTarget& target : targets) {
      const TensorSpec& spec = (*model.step->table)[target.tensor];
      FillTask fill;
      fill.box = target.box;
      fill.cols = spec.grid().cols;
      fill.tensor = SyntheticOf(spec.name, spec.dtype, density);
      weights.fills_.push_back(fill);
      SumBox sum;
      sum.box = target.box;
      sum.cols = fill.cols;
      sum.output = static_cast<std::uint32_t>(boxes.size());
      boxes.push_back(sum);
      weights.bytes_ += target.box.unit_count() * target.box.unit_bytes;
    }
    KEDGE_ASSIGN_OR_RETURN(
        weights.sums_,
        bench->device()->PrepareSums(
            boxes, static_cast<std::uint32_t>(boxes.size()), model.key));
    weights.targets_ = std::move(targets);
    return weights;
  }

  absl::Status Fill(std::uint64_t version) {
    for (FillTask& fill : fills_) {
      fill.version = version;
      KEDGE_RETURN_IF_ERROR(bench_->Fill(fill, stream_));
    }
    return bench_->device()->WaitForStream(stream_);
  }
  DeviceSums& sums() { return *sums_; }
  // Takes them. Waits.
  absl::StatusOr<std::vector<std::uint64_t>> Residues() {
    KEDGE_RETURN_IF_ERROR(sums_->Enqueue(stream_));
    KEDGE_RETURN_IF_ERROR(bench_->device()->WaitForStream(stream_));
    const auto residues = sums_->residues();
    return std::vector<std::uint64_t>(residues.begin(), residues.end());
  }
  // Compares every unit of target `i` with `version`. Waits.
  absl::Status CompareElements(std::size_t i, std::uint64_t version,
                               absl::string_view name) {
    const BoxTarget& box = fills_[i].box;
    const std::uint64_t units = box.unit_count();
    std::vector<std::byte> found(units * box.unit_bytes);
    KEDGE_RETURN_IF_ERROR(
        bench_->device()->Copy(found.data(), box.data, found.size(), stream_));
    KEDGE_RETURN_IF_ERROR(bench_->device()->WaitForStream(stream_));
    const std::uint64_t width = box.col_end - box.col_begin;
    for (std::uint64_t u = 0; u < units; ++u) {
      const std::uint64_t element =
          (box.row_begin + u / width) * fills_[i].cols + box.col_begin +
          u % width;
      std::uint32_t bits = 0;
      std::memcpy(&bits, found.data() + u * box.unit_bytes, box.unit_bytes);
      const std::uint32_t expected = fills_[i].tensor.At(element, version);
      if (bits != expected) {
        return Wrong(name, absl::StrCat("element ", element), expected, bits);
      }
    }
    return absl::OkStatus();
  }

  const std::vector<BenchTarget>& targets() const { return targets_; }
  std::uint64_t bytes() const { return bytes_; }

 private:
  BenchDevice* bench_ = nullptr;
  DeviceStream stream_ = nullptr;
  std::vector<BenchTarget> targets_;
  std::vector<FillTask> fills_;
  std::unique_ptr<DeviceSums> sums_;
  std::uint64_t bytes_ = 0;
};

// Both halves at both versions against the manifest; `buffers` hold one of them
// after the other, rank 0 last.
absl::Status CheckHalves(BenchDevice* bench, const Model& model, double density,
                         const std::vector<DeviceMemory>& buffers,
                         DeviceStream stream) {
  std::vector<std::uint64_t> sums[2];
  for (std::vector<std::uint64_t>& sum : sums) {
    sum.assign(model.tensors.size(), 0);
  }
  std::uint64_t elements_compared = 0;
  for (std::uint32_t r = kRanks; r-- > 0;) {
    const Qwen3Layout layout = LayOutQwen3(model.tensors, r, kRanks);
    KEDGE_ASSIGN_OR_RETURN(
        Weights weights,
        Weights::Make(bench, model, density, TargetsOf(model, layout, buffers),
                      stream));
    KEDGE_ASSIGN_OR_RETURN(
        const RecordStage stage,
        RecordStage::Make(bench->device(), *model.step, model.key,
                          weights.targets(), stream));
    KEDGE_RETURN_IF_ERROR(weights.Fill(0));
    for (std::uint64_t version = 0; version < 2; ++version) {
      if (version == 1) {
        KEDGE_RETURN_IF_ERROR(stage.Apply(bench->device(), stream));
        KEDGE_RETURN_IF_ERROR(
            stage.ReadOutcome(bench->device(), stream).status());
      }
      KEDGE_ASSIGN_OR_RETURN(const std::vector<std::uint64_t> residues,
                             weights.Residues());
      for (std::size_t i = 0; i < residues.size(); ++i) {
        if (r > 0 && model.tensors[i].cut == Qwen3Cut::kNone) continue;
        sums[version][i] = L61Add(sums[version][i], residues[i]);
      }
    }
    // Every kind of tensor: the first layer and the last tensors.
    const std::size_t count = model.tensors.size();
    for (std::size_t i = 0; i < count; ++i) {
      if (i >= 24 && i + 8 < count && i % 997 != 0) continue;
      const std::uint64_t units = weights.targets()[i].box.unit_count();
      if (units > std::uint64_t{64} << 20) continue;
      KEDGE_RETURN_IF_ERROR(
          weights.CompareElements(i, 1, model.tensors[i].name));
      elements_compared += units;
    }
  }
  for (std::uint64_t version = 0; version < 2; ++version) {
    for (std::size_t i = 0; i < model.tensors.size(); ++i) {
      const std::uint64_t expected = model.l61[version][model.ordinals[i]];
      if (sums[version][i] != expected) {
        return Wrong(model.tensors[i].name,
                     absl::StrCat("S of v", version, " over both ranks"),
                     expected, sums[version][i]);
      }
    }
  }
  std::printf(
      "checked: S of %zu tensors at v0 and v1 over both ranks, and %" PRIu64
      " elements one by one\n",
      model.tensors.size(), elements_compared);
  return absl::OkStatus();
}

struct Timings {
  Samples apply;
  Samples verify;
  Samples pause;
  Samples read;
  Samples copy;     // of copy_bytes
  Samples scatter;  // empty unless asked for
  std::uint64_t copy_bytes = 0;
  std::uint64_t weight_bytes = 0;
  std::uint64_t tiles = 0;
  std::uint64_t payload_bytes = 0;
  std::uint64_t units_written = 0;
};

// What `enqueue` takes on the stream, in seconds.
template <typename Enqueue>
absl::StatusOr<double> Timed(BenchDevice* bench, DeviceStream stream,
                             Enqueue&& enqueue) {
  KEDGE_RETURN_IF_ERROR(bench->device()->WaitForStream(stream));
  KEDGE_RETURN_IF_ERROR(bench->StartClock(stream));
  KEDGE_RETURN_IF_ERROR(enqueue());
  KEDGE_RETURN_IF_ERROR(bench->StopClock(stream));
  return bench->ReadClockSeconds();
}

absl::StatusOr<Timings> Measure(
    BenchDevice* bench, const Model& model, double density,
    std::vector<BenchTarget> targets,
    std::span<const std::pair<const std::byte*, std::uint64_t>> buffers,
    std::uint64_t repetitions, bool scatter, DeviceStream stream) {
  Device* const device = bench->device();
  Timings timings;
  KEDGE_ASSIGN_OR_RETURN(
      Weights weights,
      Weights::Make(bench, model, density, std::move(targets), stream));
  KEDGE_ASSIGN_OR_RETURN(const RecordStage stage,
                         RecordStage::Make(device, *model.step, model.key,
                                           weights.targets(), stream));
  timings.weight_bytes = weights.bytes();
  timings.tiles = stage.tile_count();
  timings.payload_bytes = stage.payload_bytes();
  KEDGE_ASSIGN_OR_RETURN(const ReadPass read,
                         ReadPass::Make(bench, buffers, stream));
  std::optional<RecordStage::Decoded> decoded;
  if (scatter) {
    KEDGE_ASSIGN_OR_RETURN(decoded, stage.Decode(device, stream));
  }
  timings.copy_bytes = std::min<std::uint64_t>(weights.bytes() / 8 + 4096,
                                               std::uint64_t{4} << 30);
  DeviceMemory copies[2];
  for (DeviceMemory& copy : copies) {
    KEDGE_ASSIGN_OR_RETURN(
        copy, device->Allocate(MemoryKind::kDevice, timings.copy_bytes));
    KEDGE_RETURN_IF_ERROR(
        device->Fill(copy.data(), 0x5a, timings.copy_bytes, stream));
  }

  // What every repetition must come to.
  KEDGE_RETURN_IF_ERROR(weights.Fill(1));
  KEDGE_ASSIGN_OR_RETURN(const std::vector<std::uint64_t> after,
                         weights.Residues());
  const auto check = [&]() -> absl::Status {
    KEDGE_ASSIGN_OR_RETURN(const std::vector<std::uint64_t> found,
                           weights.Residues());
    for (std::size_t i = 0; i < found.size(); ++i) {
      if (found[i] == after[i]) continue;
      return Wrong((*model.step->table)[weights.targets()[i].tensor].name,
                   "checksum after the step", after[i], found[i]);
    }
    return absl::OkStatus();
  };
  // Round 0 warms up.
  for (std::uint64_t round = 0; round <= repetitions; ++round) {
    const auto keep = [&](Samples* samples, double seconds) {
      if (round > 0) samples->Add(seconds);
    };
    KEDGE_RETURN_IF_ERROR(weights.Fill(0));
    KEDGE_ASSIGN_OR_RETURN(const double apply, Timed(bench, stream, [&] {
                             return stage.Apply(device, stream);
                           }));
    keep(&timings.apply, apply);
    KEDGE_ASSIGN_OR_RETURN(const ApplyOutcome outcome,
                           stage.ReadOutcome(device, stream));
    timings.units_written = outcome.units_written;
    KEDGE_ASSIGN_OR_RETURN(const double verify, Timed(bench, stream, [&] {
                             return weights.sums().Enqueue(stream);
                           }));
    keep(&timings.verify, verify);
    KEDGE_RETURN_IF_ERROR(check());

    KEDGE_ASSIGN_OR_RETURN(const double read_pass, Timed(bench, stream, [&] {
                             return read.Enqueue(stream);
                           }));
    keep(&timings.read, read_pass);

    KEDGE_RETURN_IF_ERROR(weights.Fill(0));
    KEDGE_ASSIGN_OR_RETURN(const double pause,
                           Timed(bench, stream, [&]() -> absl::Status {
                             KEDGE_RETURN_IF_ERROR(stage.Apply(device, stream));
                             return weights.sums().Enqueue(stream);
                           }));
    keep(&timings.pause, pause);
    KEDGE_RETURN_IF_ERROR(check());

    KEDGE_ASSIGN_OR_RETURN(const double copy, Timed(bench, stream, [&] {
                             return device->Copy(copies[1].data(),
                                                 copies[0].data(),
                                                 timings.copy_bytes, stream);
                           }));
    keep(&timings.copy, copy);
    if (decoded.has_value()) {
      KEDGE_RETURN_IF_ERROR(weights.Fill(0));
      KEDGE_ASSIGN_OR_RETURN(const double scattered, Timed(bench, stream, [&] {
                               return bench->Scatter(decoded->batch, stream);
                             }));
      keep(&timings.scatter, scattered);
      KEDGE_RETURN_IF_ERROR(check());
    }
  }
  return timings;
}

// --------------------------------------------------------------------- layouts

// One part of the model, held in three ways by as many bytes.
absl::StatusOr<std::vector<std::pair<std::string, Timings>>> MeasureLayouts(
    BenchDevice* bench, const Model& model, const Options& options,
    DeviceStream stream) {
  std::vector<std::size_t> part;
  for (std::size_t i = 0; i < model.tensors.size(); ++i) {
    const Qwen3Tensor& tensor = model.tensors[i];
    if (tensor.layer < options.variant_layers &&
        absl::EndsWith(tensor.name, ".gate_proj.weight")) {
      part.push_back(i);
    }
  }
  std::uint64_t bytes = 0;
  for (const std::size_t i : part) {
    bytes += model.tensors[i].element_count() / 2 *
             ElementBytes(model.tensors[i].dtype);
  }
  KEDGE_ASSIGN_OR_RETURN(const DeviceMemory memory,
                         bench->device()->Allocate(MemoryKind::kDevice, bytes));
  std::vector<std::pair<std::string, Timings>> rows;
  for (const char* const layout :
       {"row-sliced", "column-sliced", "row-sliced, transposed"}) {
    std::vector<BenchTarget> targets;
    std::uint64_t at = 0;
    for (const std::size_t i : part) {
      const Qwen3Tensor& tensor = model.tensors[i];
      const std::uint64_t rows_held =
          layout[0] == 'r' ? tensor.shape[0] / 2 : tensor.shape[0];
      const std::uint64_t cols_held =
          layout[0] == 'c' ? tensor.shape[1] / 2 : tensor.shape[1];
      BoxTarget box;
      box.data = memory.data() + at;
      box.row_end = rows_held;
      box.col_end = cols_held;
      box.unit_bytes = ElementBytes(tensor.dtype);
      const bool transposed = absl::StrContains(layout, "transposed");
      const auto unit = static_cast<std::int64_t>(box.unit_bytes);
      box.row_stride_bytes =
          transposed ? unit : unit * static_cast<std::int64_t>(cols_held);
      box.col_stride_bytes =
          transposed ? unit * static_cast<std::int64_t>(rows_held) : unit;
      at += rows_held * cols_held * box.unit_bytes;
      targets.push_back({model.ordinals[i], box});
    }
    const std::pair<const std::byte*, std::uint64_t> buffers[] = {
        {memory.data(), bytes}};
    KEDGE_ASSIGN_OR_RETURN(
        Timings timings,
        Measure(bench, model, options.density, std::move(targets), buffers,
                options.repetitions, false, stream));
    rows.emplace_back(layout, std::move(timings));
  }
  return rows;
}

// -------------------------------------------------------------------- follower

struct FollowerTimings {
  Samples prefetch;
  Samples apply;
  Samples verify;
  Samples pause;
  std::uint64_t bytes_read = 0;
  std::uint64_t nnz = 0;
  std::uint64_t tensors_verified = 0;
  std::uint64_t bytes_verified = 0;
  std::uint64_t heap_allocations = 0;  // most, between pause and commit
  bool device_memory_moved = false;    // free memory changed between them
};

// A checkpoint of what rank 0 holds, followed as an engine does.
absl::StatusOr<FollowerTimings> MeasureFollower(
    BenchDevice* bench, const std::vector<Qwen3Tensor>& whole,
    const Qwen3Layout& layout, const std::vector<DeviceMemory>& buffers,
    const Options& options, const std::string& path, DeviceStream stream) {
  std::vector<Qwen3Tensor> half = whole;
  for (std::size_t i = 0; i < half.size(); ++i) {
    half[i].shape = layout.places[i].extent;
    half[i].cut = Qwen3Cut::kNone;
  }
  KEDGE_ASSIGN_OR_RETURN(const Model model,
                         WriteModel(std::move(half), path, options.density));
  const Qwen3Layout own = LayOutQwen3(model.tensors, 0, 1);
  KEDGE_ASSIGN_OR_RETURN(Weights weights,
                         Weights::Make(bench, model, options.density,
                                       TargetsOf(model, own, buffers), stream));
  WeightSet set("tp0");
  for (std::size_t i = 0; i < model.tensors.size(); ++i) {
    TensorTarget target;
    target.name = model.tensors[i].name;
    target.dtype = model.tensors[i].dtype;
    target.shape = model.tensors[i].shape;
    target.data = weights.targets()[i].box.data;
    KEDGE_RETURN_IF_ERROR(set.Add(std::move(target)));
  }

  {
    // The check kernel, which runs in Prefetch.
    KEDGE_ASSIGN_OR_RETURN(
        const RecordStage stage,
        RecordStage::Make(bench->device(), *model.step, model.key,
                          weights.targets(), stream));
    KEDGE_RETURN_IF_ERROR(stage.Check(bench->device(), *model.step, stream));
  }

  FollowerTimings timings;
  std::uint64_t free_bytes = 0;
  FollowerOptions follower_options;
  follower_options.store_path = path;
  follower_options.device = bench->device();
  follower_options.pause = [&] {
    free_bytes = bench->free_bytes();
    heap_allocations = 0;
    counting_heap = true;
    return absl::OkStatus();
  };
  follower_options.commit = [&](const VersionId&) {
    counting_heap = false;
    timings.heap_allocations =
        std::max(timings.heap_allocations, heap_allocations.load());
    if (bench->free_bytes() != free_bytes) timings.device_memory_moved = true;
  };
  for (std::uint64_t round = 0; round <= options.repetitions; ++round) {
    KEDGE_RETURN_IF_ERROR(weights.Fill(0));
    KEDGE_ASSIGN_OR_RETURN(const std::unique_ptr<Follower> follower,
                           Follower::Open(follower_options, {&set}));
    KEDGE_RETURN_IF_ERROR(follower->VerifyHeld(0));
    const auto start = std::chrono::steady_clock::now();
    KEDGE_RETURN_IF_ERROR(follower->Prefetch().status());
    const double prefetch =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start)
            .count();
    KEDGE_ASSIGN_OR_RETURN(const UpdateResult update, follower->Update());
    if (update.version.step != 1 ||
        update.tensors_verified != model.tensors.size()) {
      return absl::InternalError(
          absl::StrCat("the follower is at v", update.version.step, " with ",
                       update.tensors_verified, " tensors verified"));
    }
    timings.bytes_read = update.bytes_read;
    timings.nnz = update.nnz;
    timings.tensors_verified = update.tensors_verified;
    timings.bytes_verified = update.bytes_verified;
    if (round == 0) continue;
    timings.prefetch.Add(prefetch);
    timings.apply.Add(update.apply_seconds);
    timings.verify.Add(update.verify_seconds);
    timings.pause.Add(update.pause_seconds);
  }
  return timings;
}

// ---------------------------------------------------------------------- report

void PrintTimings(const std::string& what, const Timings& t) {
  const auto gb = static_cast<double>(t.weight_bytes) / 1e9;
  std::printf("%s: %.3f GB of weights, %" PRIu64 " tiles, %" PRIu64
              " units written, %.1f MB of payload\n",
              what.c_str(), gb, t.tiles, t.units_written,
              static_cast<double>(t.payload_bytes) / 1e6);
  const double read = t.read.Median();
  const auto row = [&](const char* name, const Samples& samples,
                       const std::string& note) {
    if (samples.empty()) return;
    std::printf("  %-22s %s ms%s%s\n", name, samples.Text(1e3, 3).c_str(),
                note.empty() ? "" : ", ", note.c_str());
  };
  row("apply", t.apply,
      t.scatter.empty()
          ? ""
          : absl::StrFormat("%.2fx the scatter of decoded changes",
                            t.apply.Median() / t.scatter.Median()));
  row("verify", t.verify,
      absl::StrFormat("%.0f GB/s, %.1f %% of the read-only pass",
                      gb / t.verify.Median(), 100 * read / t.verify.Median()));
  row("apply + verify", t.pause, "");
  row("read-only pass", t.read, absl::StrFormat("%.0f GB/s", gb / read));
  row("device copy", t.copy,
      absl::StrFormat(
          "%.0f GB/s read + written",
          2 * static_cast<double>(t.copy_bytes) / 1e9 / t.copy.Median()));
  row("scatter, decoded", t.scatter, "");
}

JsonObject JsonOf(const Timings& t) {
  JsonObject json;
  json.Number("weight_bytes", t.weight_bytes)
      .Number("tiles", t.tiles)
      .Number("payload_bytes", t.payload_bytes)
      .Number("units_written", t.units_written)
      .Stats("apply_seconds", t.apply)
      .Stats("verify_seconds", t.verify)
      .Stats("apply_and_verify_seconds", t.pause)
      .Stats("read_only_pass_seconds", t.read)
      .Stats("device_copy_seconds", t.copy)
      .Number("device_copy_bytes", t.copy_bytes)
      .Number("verify_of_read_only_pass", t.read.Median() / t.verify.Median());
  if (!t.scatter.empty()) {
    json.Stats("scatter_decoded_seconds", t.scatter)
        .Number("apply_of_scatter", t.apply.Median() / t.scatter.Median());
  }
  return json;
}

void PrintFollower(const std::string& what, const FollowerTimings& f) {
  std::printf("%s: %" PRIu64
              " tensors, %.3f GB verified, %.1f MB read, %" PRIu64 " changes\n",
              what.c_str(), f.tensors_verified,
              static_cast<double>(f.bytes_verified) / 1e9,
              static_cast<double>(f.bytes_read) / 1e6, f.nnz);
  for (const auto& [name, samples] :
       {std::pair("prefetch", &f.prefetch), std::pair("apply", &f.apply),
        std::pair("verify", &f.verify), std::pair("pause", &f.pause)}) {
    std::printf("  %-22s %s ms\n", name, samples->Text(1e3, 3).c_str());
  }
  std::printf("  heap allocations in a pause: %" PRIu64
              "; the device's free memory %s\n",
              f.heap_allocations,
              f.device_memory_moved ? "CHANGED in it" : "stayed");
}

JsonObject JsonOf(const FollowerTimings& f) {
  JsonObject json;
  json.Number("tensors_verified", f.tensors_verified)
      .Number("bytes_verified", f.bytes_verified)
      .Number("bytes_read", f.bytes_read)
      .Number("nnz", f.nnz)
      .Stats("prefetch_seconds", f.prefetch)
      .Stats("apply_seconds", f.apply)
      .Stats("verify_seconds", f.verify)
      .Stats("pause_seconds", f.pause)
      .Number("heap_allocations_in_pause", f.heap_allocations)
      .Bool("device_free_memory_changed_in_pause", f.device_memory_moved);
  return json;
}

// What a reader looks for first; printed last.
struct Summary {
  std::vector<std::string> lines;

  void Add(absl::string_view what, const Samples& seconds,
           absl::string_view note = "") {
    lines.push_back(absl::StrFormat("%-34s %s ms%s%s", what,
                                    seconds.Text(1e3, 3),
                                    note.empty() ? "" : ", ", note));
  }
};

// One format of the model: everything that is measured of it.
absl::StatusOr<JsonObject> RunFormat(BenchDevice* bench, const Options& options,
                                     const std::string& directory,
                                     Qwen3Format format, DeviceStream stream,
                                     Summary* summary) {
  const std::string name = format == Qwen3Format::kBf16 ? "bf16" : "fp8";
  const Qwen3Dims dims = ScaledQwen3(options.scale);
  const auto start = std::chrono::steady_clock::now();
  KEDGE_ASSIGN_OR_RETURN(
      Model model, WriteModel(Qwen3Tensors(dims, format),
                              JoinPath(directory, name), options.density));
  std::uint64_t delta_bytes = 0;
  std::uint64_t nnz = 0;
  for (const DataFile& file : model.step->manifest.files) {
    delta_bytes += file.bytes;
  }
  for (const DeltaRecord& record : model.step->manifest.records) {
    nnz += record.nnz;
  }
  std::printf(
      "%s: %zu tensors, %.3f GB, %" PRIu64
      " changes in %.1f MB; written in %.1f s\n",
      name.c_str(), model.tensors.size(),
      static_cast<double>(model.step->table->total_bytes()) / 1e9, nnz,
      static_cast<double>(delta_bytes) / 1e6,
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start)
          .count());
  std::fflush(stdout);

  const Qwen3Layout layout = LayOutQwen3(model.tensors, 0, kRanks);
  KEDGE_ASSIGN_OR_RETURN(const std::vector<DeviceMemory> buffers,
                         Allocate(bench->device(), layout));
  std::vector<std::pair<const std::byte*, std::uint64_t>> parts;
  for (const DeviceMemory& buffer : buffers) {
    parts.emplace_back(buffer.data(), buffer.bytes());
  }
  KEDGE_RETURN_IF_ERROR(
      CheckHalves(bench, model, options.density, buffers, stream));
  KEDGE_ASSIGN_OR_RETURN(
      const Timings half,
      Measure(bench, model, options.density, TargetsOf(model, layout, buffers),
              parts, options.repetitions, true, stream));
  PrintTimings(name + ", rank 0 of 2", half);
  summary->Add(name + " apply", half.apply,
               absl::StrFormat("%.2fx the scatter of decoded changes",
                               half.apply.Median() / half.scatter.Median()));
  summary->Add(
      name + " verify", half.verify,
      absl::StrFormat("%.1f %% of the read-only pass",
                      100 * half.read.Median() / half.verify.Median()));
  summary->Add(name + " apply + verify", half.pause);
  std::fflush(stdout);

  JsonObject json;
  json.Number("tensors", std::uint64_t{model.tensors.size()})
      .Number("model_bytes", model.step->table->total_bytes())
      .Number("delta_bytes", delta_bytes)
      .Number("nnz", nnz)
      .Object("rank_0_of_2", JsonOf(half));
  if (format == Qwen3Format::kBf16 && options.variant_layers != 0) {
    KEDGE_ASSIGN_OR_RETURN(const auto layouts,
                           MeasureLayouts(bench, model, options, stream));
    std::vector<JsonObject> rows;
    const Timings& rows_timings = layouts.front().second;
    for (const auto& [what, timings] : layouts) {
      PrintTimings(absl::StrCat("gate_proj of ", options.variant_layers,
                                " layers, ", what),
                   timings);
      const double apply = timings.apply.Median() / rows_timings.apply.Median();
      const double verify =
          timings.verify.Median() / rows_timings.verify.Median();
      std::printf("  of the row-sliced time: apply %.2f, verify %.2f\n", apply,
                  verify);
      summary->Add(absl::StrCat("apply, ", what), timings.apply,
                   absl::StrFormat("%.2fx the row-sliced", apply));
      JsonObject row = JsonOf(timings);
      row.Text("layout", what)
          .Number("apply_of_row_sliced", apply)
          .Number("verify_of_row_sliced", verify);
      rows.push_back(row);
    }
    json.List("layouts", rows);
    std::fflush(stdout);
  }
  if (options.follower != 0) {
    KEDGE_ASSIGN_OR_RETURN(
        const FollowerTimings follower,
        MeasureFollower(bench, model.tensors, layout, buffers, options,
                        JoinPath(directory, name + "-half"), stream));
    PrintFollower(name + ", a follower of the half", follower);
    summary->Add(
        name + " pause of a follower", follower.pause,
        absl::StrCat(follower.heap_allocations, " heap allocations in it"));
    json.Object("follower", JsonOf(follower));
    std::fflush(stdout);
  }
  return json;
}

absl::Status Run(const Options& options, const std::string& directory,
                 const std::string& command) {
  KEDGE_ASSIGN_OR_RETURN(const std::unique_ptr<BenchDevice> bench,
                         BenchDevice::Open(options.device));
  KEDGE_ASSIGN_OR_RETURN(const OwnedStream stream,
                         bench->device()->CreateStream());
  JsonObject json;
  json.Text("benchmark", "apply_verify")
      .Text("device", bench->device()->name())
      .Text("driver", bench->driver())
      .Text("commit", options.commit)
      .Text("command", command)
      .Number("scale", options.scale)
      .Number("density", options.density)
      .Number("repetitions", options.repetitions);
  std::printf("%s; %s\n", bench->device()->name().c_str(),
              bench->driver().c_str());
  Summary summary;
  KEDGE_ASSIGN_OR_RETURN(const JsonObject bf16,
                         RunFormat(bench.get(), options, directory,
                                   Qwen3Format::kBf16, stream.get(), &summary));
  json.Object("bf16", bf16);
  if (options.fp8 != 0) {
    KEDGE_ASSIGN_OR_RETURN(
        const JsonObject fp8,
        RunFormat(bench.get(), options, directory, Qwen3Format::kFp8,
                  stream.get(), &summary));
    json.Object("fp8", fp8);
  }
  std::printf("\n");
  for (const std::string& line : summary.lines) {
    std::printf("%s\n", line.c_str());
  }
  if (options.json.empty()) return absl::OkStatus();
  return WriteReport(options.json, json.str());
}

int Main(int argc, char** argv) {
  Options options;
  if (!Flags()
           .Text("--device", &options.device)
           .Number("--scale", &options.scale)
           .Number("--density", &options.density)
           .Number("--repetitions", &options.repetitions)
           .Text("--dir", &options.dir)
           .Number("--fp8", &options.fp8)
           .Number("--follower", &options.follower)
           .Number("--variant-layers", &options.variant_layers)
           .Text("--json", &options.json)
           .Text("--commit", &options.commit)
           .Parse(argc, argv)) {
    return 2;
  }
  if (!(options.scale > 0 && options.scale <= 1) ||
      !(options.density > 0 && options.density < 0.5) ||
      options.repetitions == 0) {
    std::fprintf(stderr,
                 "--scale is in (0, 1], --density in (0, 0.5), "
                 "--repetitions at least 1\n");
    return 2;
  }
  std::string directory = JoinPath(options.dir, "kedge-apply-verify-XXXXXX");
  std::error_code ignored;  // mkdtemp says what is wrong
  std::filesystem::create_directories(options.dir, ignored);
  if (mkdtemp(directory.data()) == nullptr) {
    std::perror(directory.c_str());
    return 1;
  }
  const absl::Status ran = Run(options, directory, CommandLine(argc, argv));
  const absl::Status removed = RemoveTree(*PosixFileSystem(), directory);
  for (const absl::Status& problem : {ran, removed}) {
    if (!problem.ok()) {
      std::fprintf(stderr, "%s\n", std::string(problem.message()).c_str());
    }
  }
  return ran.ok() && removed.ok() ? 0 : 1;
}

}  // namespace
}  // namespace kedge

int main(int argc, char** argv) { return kedge::Main(argc, argv); }
