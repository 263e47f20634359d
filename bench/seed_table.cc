// What publishing through the optimizer hook costs one trainer rank, beside
// what it cannot cost less than: a pass that only copies, reads of GPU memory,
// plain writes of as many bytes; all in one run, in turns.
//
//   kedge_seed_table --store DIR [--params N] [--device cuda:0] [--steps S]
//                    [--anchor-steps A] [--snapshot-steps S] [--density D]
//                    [--json FILE]
//
// No optimizer runs. A bf16 copy of the weights in pinned host memory stands
// for what an optimizer would put into its output slots; a share of it changes
// between steps, and chunks of it are sent with as many in flight as a trainer
// has slots. The plain pass and the hook's send the same chunks.
//
// Creates DIR; beside it DIR.plain for the plain writes, and DIR.snapshot for
// the same steps through DeviceSnapshotWriter; and removes all three.

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kedge/bench/bench_device.h"
#include "kedge/bench/bench_inputs.h"
#include "kedge/bench/bench_report.h"
#include "kedge/bench/moving_passes.h"
#include "kedge/bench/trainer_share.h"
#include "kedge/engine/cpu/l61_sum.h"
#include "kedge/engine/device/device.h"
#include "kedge/engine/io/file_system.h"
#include "kedge/engine/io/store.h"
#include "kedge/format/l61.h"
#include "kedge/format/layout.h"
#include "kedge/format/limits.h"
#include "kedge/format/status.h"
#include "kedge/writer/device_snapshot_writer.h"
#include "kedge/writer/optimizer_hook.h"

namespace kedge {
namespace {

using Clock = std::chrono::steady_clock;

struct Options {
  std::string store;
  std::string device = "cuda:0";
  std::uint64_t parameters = 5'100'000'000;
  std::uint64_t steps = 10;          // normal ones, after v1
  std::uint64_t anchor_steps = 5;    // after those
  std::uint64_t snapshot_steps = 5;  // and at most 3 with anchors; 0: none
  double density = 0.01;
  std::uint64_t chunk_elements = std::uint64_t{16} << 20;
  std::uint64_t slots = 4;
  std::uint64_t ring_bytes = std::uint64_t{256} << 20;
  std::uint64_t seed = 1;
  std::uint64_t keep_store = 0;  // for somebody who looks at it afterwards
  std::string json;
  std::string commit;
};

// Of steps of one kind. Times in seconds.
struct Figures {
  Samples begin;        // BeginStep: the wait before the final backward
  Samples plain_pass;   // copies alone
  Samples pass;         // with the hook, until EndStep has returned
  Samples added;        // pass - plain_pass, of one step
  Samples issue;        // until the last OnUpdate has returned
  Samples drain;        // EndStep
  Samples commit;       // Publish, until it returns
  Samples prepare;      // thereof, until only sealing is left
  Samples guard_wait;   // thereof, for the guard, which other work runs beside
  Samples guard;        // its checksums alone, by the device's clock
  Samples read_pass;    // of the guard's bytes, without a checksum
  Samples plain_write;  // of the step's files
  Samples commit_ratio;
  // What a trainer without kedge takes for the same, its pass and then plain
  // writes, as a share of pass + commit.
  Samples anchor_rate;
  Samples bytes;  // of the step directory without its anchor
  Samples bits;   // thereof per parameter
  Samples anchor_bytes;
  // By snapshot: from the call of Publish until the anchor that it began
  // stands, and a plain pass that the trainer begins as Publish has returned.
  Samples anchor_done;
  Samples pass_beside;
  Samples early_drains;
};

// What a writer takes beside the trainer's own memory, as the system sees it.
struct Footprint {
  std::uint64_t free_before = 0;  // device memory; 0: unknown
  std::uint64_t least_free = 0;
  std::uint64_t resident_before = 0;
  std::uint64_t most_resident = 0;
  double open_seconds = 0;

  std::uint64_t device_bytes() const { return free_before - least_free; }
  std::uint64_t host_bytes() const { return most_resident - resident_before; }
};

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Of this process, in bytes.
std::uint64_t ResidentBytes() {
  std::ifstream status("/proc/self/statm");
  std::uint64_t total = 0;
  std::uint64_t resident = 0;
  status >> total >> resident;
  return resident * static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
}

std::vector<std::uint64_t> FileSizes(const std::string& directory) {
  std::vector<std::uint64_t> sizes;
  std::error_code error;
  for (const auto& entry :
       std::filesystem::directory_iterator(directory, error)) {
    if (entry.is_regular_file(error)) sizes.push_back(entry.file_size(error));
  }
  return sizes;
}

class SeedTable {
 public:
  SeedTable(const Options& options, BenchDevice* bench)
      : options_(options),
        bench_(*bench),
        device_(*bench->device()),
        share_(MakeTrainerShare(options.parameters)),
        chunks_(CutIntoChunks(share_, options.chunk_elements)) {}

  absl::Status RunAll();
  void Print() const;
  JsonObject Report(const std::string& command) const;

 private:
  struct Run {
    std::uint32_t tensor = 0;
    std::uint64_t offset = 0;  // bytes in the tensor
    std::uint64_t first = 0;   // element of the block
    std::uint64_t elements = 0;
  };

  std::string PlainPath() const { return options_.store + ".plain"; }
  std::string SnapshotPath() const { return options_.store + ".snapshot"; }
  std::uint64_t weight_bytes() const { return 2 * share_.elements; }

  std::vector<Run> Runs() const;
  absl::Status Prepare();
  absl::Status OpenHook();
  absl::StatusOr<double> PlainPass();
  absl::StatusOr<double> PlainWriteOf(const std::vector<std::uint64_t>& sizes);
  absl::Status Step(std::uint64_t step, bool anchor, Figures* figures);
  absl::Status RunSnapshot();
  absl::Status SnapshotStep(std::uint64_t step, bool anchor, Figures* figures);
  absl::Status CheckWeights();
  absl::Status CheckSums(const StoreWriter& writer);
  void Settle(const std::vector<std::uint64_t>& removed);
  void Start(Footprint* footprint) const;
  void Sample(Footprint* footprint) const;

  const Options& options_;
  BenchDevice& bench_;
  Device& device_;
  const TrainerShare share_;
  const std::vector<std::vector<SharePiece>> chunks_;
  OwnedStream h2d_;
  DeviceMemory weights_;
  DeviceMemory master_;  // pinned
  std::vector<float> bias_;
  std::vector<OwnedEvent> events_;  // one a slot
  DifferencePass read_pass_;
  std::unique_ptr<OptimizerHook> hook_;
  std::unique_ptr<DeviceSums> sums_;  // of all weights, as the guard takes them
  HookMemory memory_;
  std::uint64_t last_anchor_ = 0;

  Footprint hook_footprint_;
  std::unique_ptr<DeviceSnapshotWriter> snapshot_;
  DeviceSnapshotMemory snapshot_memory_;
  Footprint snapshot_footprint_;
  std::vector<std::uint64_t> delta_sizes_;  // files of the last step
  Figures first_;
  Figures normal_;
  Figures anchor_;
  Figures snapshot_normal_;
  Figures snapshot_anchor_;
};

absl::Status SeedTable::Prepare() {
  // Changes are made in the block as a whole.
  KEDGE_CHECK(share_.block_elements == share_.elements);
  KEDGE_ASSIGN_OR_RETURN(h2d_, device_.CreateStream());
  for (std::uint64_t i = 0; i < options_.slots; ++i) {
    KEDGE_ASSIGN_OR_RETURN(OwnedEvent event, device_.CreateEvent());
    events_.push_back(std::move(event));
  }
  // Plain writes take whole pieces from it.
  const std::uint64_t bytes = std::max(2 * share_.block_elements, kPieceBytes);
  KEDGE_ASSIGN_OR_RETURN(weights_,
                         device_.Allocate(MemoryKind::kDevice, bytes));
  KEDGE_ASSIGN_OR_RETURN(master_, device_.Allocate(MemoryKind::kPinned, bytes));
  FillNormal({master_.as<std::uint16_t>(), bytes / 2}, options_.seed);
  KEDGE_RETURN_IF_ERROR(
      device_.Copy(weights_.data(), master_.data(), bytes, h2d_.get()));
  KEDGE_RETURN_IF_ERROR(device_.WaitForStream(h2d_.get()));
  bias_.assign(4096, 0.5f);
  KEDGE_ASSIGN_OR_RETURN(read_pass_, DifferencePass::Make(&bench_, h2d_.get()));
  const std::uint64_t half = bytes / 32 * 16;
  return read_pass_.Tune(weights_.data(), weights_.data() + half, half,
                         h2d_.get());
}

absl::Status SeedTable::OpenHook() {
  WriterOptions writer;
  writer.store_path = options_.store;
  InitOptions init;
  // Engines have the boot checkpoint; nothing here measures writing it.
  init.external_v0 = true;
  HookOptions hook;
  hook.device = &device_;
  for (const ShareParameter& parameter : share_.parameters) {
    HookedParameter hooked;
    hooked.name = parameter.name;
    hooked.data = weights_.data() + 2 * parameter.first;
    hooked.bytes = 2 * parameter.elements;
    hook.parameters.push_back(std::move(hooked));
  }
  hook.tensors = share_.TensorsAt(weights_.data());
  TrainerTensor bias;
  bias.name = "model.layers.0.mlp.gate.e_score_correction_bias";
  bias.dtype = DType::kF32;
  bias.shape = {bias_.size()};
  bias.data = bias_.data();
  hook.residual.push_back(std::move(bias));
  hook.chunk_bytes = 2 * options_.chunk_elements;
  hook.ring_bytes = options_.ring_bytes;

  Start(&hook_footprint_);
  const Clock::time_point start = Clock::now();
  KEDGE_ASSIGN_OR_RETURN(hook_,
                         OptimizerHook::Create(writer, init, std::move(hook)));
  hook_footprint_.open_seconds = SecondsSince(start);
  memory_ = hook_->memory();
  Sample(&hook_footprint_);
  std::vector<SumBox> boxes;
  for (const Run& run : Runs()) {
    const std::uint64_t cols = share_.tensors[run.tensor].shape.back();
    SumBox box;
    box.box.data = weights_.data() + 2 * run.first;
    box.box.row_begin = run.offset / 2 / cols;
    box.box.row_end = box.box.row_begin + run.elements / cols;
    box.box.col_end = cols;
    box.box.row_stride_bytes = static_cast<std::int64_t>(2 * cols);
    box.box.col_stride_bytes = 2;
    box.box.unit_bytes = 2;
    box.cols = cols;
    box.output = run.tensor;
    boxes.push_back(box);
  }
  KEDGE_ASSIGN_OR_RETURN(
      sums_, device_.PrepareSums(
                 boxes, static_cast<std::uint32_t>(share_.tensors.size()),
                 hook_->store_writer().summer().key()));
  return absl::OkStatus();
}

void SeedTable::Start(Footprint* footprint) const {
  footprint->free_before = bench_.free_bytes();
  footprint->least_free = footprint->free_before;
  footprint->resident_before = ResidentBytes();
  footprint->most_resident = footprint->resident_before;
}

void SeedTable::Sample(Footprint* footprint) const {
  footprint->least_free = std::min(footprint->least_free, bench_.free_bytes());
  footprint->most_resident =
      std::max(footprint->most_resident, ResidentBytes());
}

// What the trainer does without kedge, as many chunks in flight.
absl::StatusOr<double> SeedTable::PlainPass() {
  const Clock::time_point start = Clock::now();
  for (std::size_t c = 0; c < chunks_.size(); ++c) {
    const DeviceEvent event = events_[c % events_.size()].get();
    if (c >= events_.size()) {
      KEDGE_RETURN_IF_ERROR(device_.WaitForEvent(event));
    }
    for (const SharePiece& piece : chunks_[c]) {
      const std::uint64_t at =
          2 * (share_.parameters[piece.parameter].first + piece.begin);
      KEDGE_RETURN_IF_ERROR(device_.Copy(weights_.data() + at,
                                         master_.data() + at, 2 * piece.count,
                                         h2d_.get()));
    }
    KEDGE_RETURN_IF_ERROR(device_.Record(event, h2d_.get()));
  }
  KEDGE_RETURN_IF_ERROR(device_.WaitForStream(h2d_.get()));
  return SecondsSince(start);
}

// Leaves nothing behind, and the disk idle.
absl::StatusOr<double> SeedTable::PlainWriteOf(
    const std::vector<std::uint64_t>& sizes) {
  const absl::StatusOr<double> seconds =
      PlainWrite(PlainPath(), sizes, {master_.data(), master_.bytes()});
  std::error_code error;
  std::filesystem::remove_all(PlainPath(), error);
  Settle(sizes);
  return seconds;
}

// Freed blocks are discarded after the journal commits, in the time of whoever
// writes next.
void SeedTable::Settle(const std::vector<std::uint64_t>& removed) {
  sync();
  std::uint64_t bytes = 0;
  for (const std::uint64_t size : removed) bytes += size;
  if (bytes > (std::uint64_t{1} << 30)) {
    std::this_thread::sleep_for(std::chrono::seconds(2));
  }
}

absl::Status SeedTable::Step(std::uint64_t step, bool anchor,
                             Figures* figures) {
  // Sizes of the files are known from the step before, or afterwards.
  const bool plain_first =
      step % 2 == 0 && !delta_sizes_.empty() && (!anchor || last_anchor_ != 0);
  const std::string store = options_.store;
  const auto sizes_of = [&](std::uint64_t of) {
    return FileSizes(absl::StrCat(JoinPath(store, StepDirectoryName(of)), "/",
                                  kAnchorDirectoryName));
  };
  const auto plain_write = [&]() -> absl::StatusOr<double> {
    std::vector<std::uint64_t> sizes = delta_sizes_;
    if (anchor) {
      const std::vector<std::uint64_t> more = sizes_of(last_anchor_);
      sizes.insert(sizes.end(), more.begin(), more.end());
    }
    return PlainWriteOf(sizes);
  };
  double plain_write_seconds = 0;
  double plain_pass_seconds = 0;
  if (plain_first) {
    KEDGE_ASSIGN_OR_RETURN(plain_write_seconds, plain_write());
    KEDGE_ASSIGN_OR_RETURN(plain_pass_seconds, PlainPass());
  }

  const std::uint64_t changed =
      Perturb(std::span(master_.as<std::uint16_t>(), share_.block_elements),
              options_.density, options_.seed * 1'000'003 + step);

  Clock::time_point start = Clock::now();
  KEDGE_RETURN_IF_ERROR(hook_->BeginStep(step, anchor));
  const double begin_seconds = SecondsSince(start);

  std::vector<std::vector<OptimizerHook::Ticket>> tickets(options_.slots);
  start = Clock::now();
  for (std::size_t c = 0; c < chunks_.size(); ++c) {
    std::vector<OptimizerHook::Ticket>& slot = tickets[c % tickets.size()];
    for (const OptimizerHook::Ticket ticket : slot) {
      KEDGE_RETURN_IF_ERROR(hook_->WaitFor(ticket));
    }
    slot.clear();
    for (const SharePiece& piece : chunks_[c]) {
      const std::uint64_t at =
          2 * (share_.parameters[piece.parameter].first + piece.begin);
      KEDGE_ASSIGN_OR_RETURN(
          const OptimizerHook::Ticket ticket,
          hook_->OnUpdate(piece.parameter, 2 * piece.begin, 2 * piece.count,
                          master_.data() + at, h2d_.get()));
      slot.push_back(ticket);
    }
  }
  const double issue_seconds = SecondsSince(start);
  KEDGE_RETURN_IF_ERROR(hook_->EndStep());
  const double pass_seconds = SecondsSince(start);
  Sample(&hook_footprint_);

  bias_[step % bias_.size()] += 0.125f;
  start = Clock::now();
  KEDGE_ASSIGN_OR_RETURN(const HookResult result, hook_->Publish());
  const double commit_seconds = SecondsSince(start);
  Sample(&hook_footprint_);
  KEDGE_RETURN_IF_ERROR(result.publish.anchor_status);
  for (const std::string& warning : result.publish.warnings) {
    std::fprintf(stderr, "warning: %s\n", warning.c_str());
  }
  if (result.publish.nnz != changed + 1) {
    return absl::InternalError(absl::StrCat(
        "v", step, ": changes: expected ", changed + 1,
        ", made in the masters and one buffer, found ", result.publish.nnz));
  }

  delta_sizes_ = FileSizes(JoinPath(store, StepDirectoryName(step)));
  std::vector<std::uint64_t> removed;
  if (anchor) {
    // One anchor at a time, so that the disk holds the run.
    if (last_anchor_ != 0) {
      removed = sizes_of(last_anchor_);
      KEDGE_RETURN_IF_ERROR(RemoveTree(
          *PosixFileSystem(),
          absl::StrCat(JoinPath(store, StepDirectoryName(last_anchor_)), "/",
                       kAnchorDirectoryName)));
    }
    last_anchor_ = step;
  }
  Settle(removed);
  if (!plain_first) {
    KEDGE_ASSIGN_OR_RETURN(plain_pass_seconds, PlainPass());
    KEDGE_ASSIGN_OR_RETURN(plain_write_seconds, plain_write());
  }

  KEDGE_RETURN_IF_ERROR(bench_.StartClock(h2d_.get()));
  KEDGE_RETURN_IF_ERROR(sums_->Enqueue(h2d_.get()));
  KEDGE_RETURN_IF_ERROR(bench_.StopClock(h2d_.get()));
  KEDGE_ASSIGN_OR_RETURN(const double guard_seconds, bench_.ReadClockSeconds());
  // As many bytes, read alone.
  const std::uint64_t half = weight_bytes() / 32 * 16;
  KEDGE_RETURN_IF_ERROR(bench_.StartClock(h2d_.get()));
  KEDGE_RETURN_IF_ERROR(read_pass_.Enqueue(
      weights_.data(), weights_.data() + half, half, h2d_.get()));
  KEDGE_RETURN_IF_ERROR(bench_.StopClock(h2d_.get()));
  KEDGE_ASSIGN_OR_RETURN(const double read_seconds, bench_.ReadClockSeconds());

  std::uint64_t bytes = 0;
  for (const std::uint64_t size : delta_sizes_) bytes += size;
  figures->begin.Add(begin_seconds);
  figures->plain_pass.Add(plain_pass_seconds);
  figures->pass.Add(pass_seconds);
  figures->added.Add(pass_seconds - plain_pass_seconds);
  figures->issue.Add(issue_seconds);
  figures->drain.Add(pass_seconds - issue_seconds);
  figures->commit.Add(commit_seconds);
  figures->prepare.Add(result.publish.encode_seconds);
  figures->guard_wait.Add(result.guard_seconds);
  figures->guard.Add(guard_seconds);
  figures->read_pass.Add(read_seconds);
  figures->plain_write.Add(plain_write_seconds);
  figures->commit_ratio.Add(commit_seconds / plain_write_seconds);
  figures->anchor_rate.Add((plain_pass_seconds + plain_write_seconds) /
                           (pass_seconds + commit_seconds));
  figures->bytes.Add(static_cast<double>(bytes));
  figures->bits.Add(8 * static_cast<double>(bytes) /
                    static_cast<double>(share_.elements));
  figures->anchor_bytes.Add(static_cast<double>(result.publish.anchor_bytes));
  figures->early_drains.Add(static_cast<double>(result.early_drains));
  std::printf("v%" PRIu64
              "%s: plain pass %.1f ms, pass %.1f ms, commit %.1f ms, plain "
              "writes %.1f ms\n",
              step, anchor ? " with anchor" : "", 1000 * plain_pass_seconds,
              1000 * pass_seconds, 1000 * commit_seconds,
              1000 * plain_write_seconds);
  std::fflush(stdout);
  return absl::OkStatus();
}

// The device against the masters, byte for byte.
absl::Status SeedTable::CheckWeights() {
  KEDGE_ASSIGN_OR_RETURN(
      const DeviceMemory back,
      device_.Allocate(MemoryKind::kPinned, std::uint64_t{64} << 20));
  for (std::uint64_t at = 0; at < weight_bytes(); at += back.bytes()) {
    const std::uint64_t part = std::min(back.bytes(), weight_bytes() - at);
    KEDGE_RETURN_IF_ERROR(
        device_.Copy(back.data(), weights_.data() + at, part, h2d_.get()));
    KEDGE_RETURN_IF_ERROR(device_.WaitForStream(h2d_.get()));
    if (std::memcmp(back.data(), master_.data() + at, part) != 0) {
      return absl::InternalError(absl::StrCat(
          "the device holds other weights than the masters within the bytes ",
          at, " to ", at + part));
    }
  }
  return absl::OkStatus();
}

// Every tensor in contiguous parts.
std::vector<SeedTable::Run> SeedTable::Runs() const {
  std::vector<Run> runs;
  for (std::uint32_t t = 0; t < share_.tensors.size(); ++t) {
    const ShareTensor& tensor = share_.tensors[t];
    std::uint64_t elements = 1;
    for (const std::uint64_t extent : tensor.shape) elements *= extent;
    const bool view = !tensor.strides.empty();
    const std::uint64_t count = view ? tensor.shape[0] : 1;
    const std::uint64_t each = elements / count;
    for (std::uint64_t i = 0; i < count; ++i) {
      const std::uint64_t stride = view ? tensor.strides[0] : 0;
      runs.push_back({t, 2 * i * each, tensor.first + i * stride, each});
    }
  }
  return runs;
}

// S of every tensor, as the store has it, against the masters.
absl::Status SeedTable::CheckSums(const StoreWriter& writer) {
  const std::vector<Run> runs = Runs();
  std::vector<std::uint64_t> sums(runs.size());
  InParallel(runs.size(), [&](std::uint64_t begin, std::uint64_t end) {
    for (std::uint64_t i = begin; i < end; ++i) {
      sums[i] = writer.summer().Sum(
          runs[i].offset,
          {master_.data() + 2 * runs[i].first, 2 * runs[i].elements});
    }
  });
  std::vector<std::uint64_t> expected(share_.tensors.size(), 0);
  for (std::size_t i = 0; i < runs.size(); ++i) {
    std::uint64_t& sum = expected[runs[i].tensor];
    sum = L61Add(sum, sums[i]);
  }
  for (std::size_t t = 0; t < expected.size(); ++t) {
    KEDGE_ASSIGN_OR_RETURN(const std::uint32_t ordinal,
                           writer.table().Find(share_.tensors[t].name));
    if (sums_ != nullptr && sums_->residues()[t] != expected[t]) {
      return absl::InternalError(
          Describe({.where = share_.tensors[t].name,
                    .what = "checksum",
                    .expected = Hex64(expected[t]) + " by the masters",
                    .found = Hex64(sums_->residues()[t]) + " of the device"}));
    }
    if (writer.l61()[ordinal] != expected[t]) {
      return absl::InternalError(
          Describe({.where = share_.tensors[t].name,
                    .what = "checksum",
                    .expected = Hex64(expected[t]) + " by the masters",
                    .found = Hex64(writer.l61()[ordinal]) + " in the store"}));
    }
  }
  return absl::OkStatus();
}

absl::Status SeedTable::RunAll() {
  KEDGE_RETURN_IF_ERROR(Prepare());
  std::printf("%s %s: %" PRIu64
              " parameters, %zu tensors in %zu parameters, "
              "%zu chunks\n",
              device_.name().c_str(), bench_.driver().c_str(), share_.elements,
              share_.tensors.size(), share_.parameters.size(), chunks_.size());
  std::fflush(stdout);
  // The first copies of a stream are slower.
  KEDGE_RETURN_IF_ERROR(PlainPass().status());
  KEDGE_RETURN_IF_ERROR(OpenHook());
  std::uint64_t step = 1;
  KEDGE_RETURN_IF_ERROR(Step(step++, false, &first_));
  for (std::uint64_t i = 0; i < options_.steps; ++i) {
    KEDGE_RETURN_IF_ERROR(Step(step++, false, &normal_));
  }
  if (options_.anchor_steps > 0) {
    // Blocks that were never used before are slower: one run that does not
    // count.
    constexpr std::uint64_t kFileBytes = std::uint64_t{1} << 30;
    std::vector<std::uint64_t> sizes;
    for (std::uint64_t at = 0; at < weight_bytes(); at += kFileBytes) {
      sizes.push_back(std::min(kFileBytes, weight_bytes() - at));
    }
    KEDGE_RETURN_IF_ERROR(PlainWriteOf(sizes).status());
  }
  for (std::uint64_t i = 0; i < options_.anchor_steps; ++i) {
    KEDGE_RETURN_IF_ERROR(Step(step++, true, &anchor_));
  }
  KEDGE_RETURN_IF_ERROR(CheckWeights());
  KEDGE_RETURN_IF_ERROR(CheckSums(hook_->store_writer()));
  sums_.reset();
  hook_.reset();
  if (options_.keep_store == 0) {
    KEDGE_RETURN_IF_ERROR(RemoveTree(*PosixFileSystem(), options_.store));
  }
  return options_.snapshot_steps > 0 ? RunSnapshot() : absl::OkStatus();
}

// The same weights and changes through the writer that any optimizer can use:
// the trainer's own pass, then a difference against a snapshot.
absl::Status SeedTable::RunSnapshot() {
  WriterOptions writer;
  writer.store_path = SnapshotPath();
  InitOptions init;
  init.external_v0 = true;
  DeviceSnapshotOptions snapshot;
  snapshot.device = &device_;
  snapshot.tensors = share_.TensorsAt(weights_.data());
  snapshot.chunk_bytes = 2 * options_.chunk_elements;
  Start(&snapshot_footprint_);
  const Clock::time_point start = Clock::now();
  KEDGE_ASSIGN_OR_RETURN(snapshot_, DeviceSnapshotWriter::Create(
                                        writer, init, std::move(snapshot)));
  snapshot_footprint_.open_seconds = SecondsSince(start);
  snapshot_memory_ = snapshot_->memory();
  std::uint64_t step = 1;
  Figures uncounted;
  KEDGE_RETURN_IF_ERROR(SnapshotStep(step++, false, &uncounted));
  for (std::uint64_t i = 0; i < options_.snapshot_steps; ++i) {
    KEDGE_RETURN_IF_ERROR(SnapshotStep(step++, false, &snapshot_normal_));
  }
  for (std::uint64_t i = 0;
       i < std::min<std::uint64_t>(
               {options_.anchor_steps, options_.snapshot_steps, 3});
       ++i) {
    KEDGE_RETURN_IF_ERROR(SnapshotStep(step++, true, &snapshot_anchor_));
  }
  KEDGE_RETURN_IF_ERROR(CheckWeights());
  KEDGE_RETURN_IF_ERROR(CheckSums(snapshot_->store_writer()));
  snapshot_.reset();
  return RemoveTree(*PosixFileSystem(), SnapshotPath());
}

absl::Status SeedTable::SnapshotStep(std::uint64_t step, bool anchor,
                                     Figures* figures) {
  const std::uint64_t changed =
      Perturb(std::span(master_.as<std::uint16_t>(), share_.block_elements),
              options_.density, options_.seed * 2'000'003 + step);
  KEDGE_ASSIGN_OR_RETURN(const double pass_seconds, PlainPass());
  const Clock::time_point start = Clock::now();
  PublishOptions publish;
  publish.anchor = anchor;
  KEDGE_ASSIGN_OR_RETURN(PublishResult result,
                         snapshot_->Publish(step, publish));
  const double commit_seconds = SecondsSince(start);
  double beside_seconds = 0;
  double done_seconds = 0;
  if (anchor) {
    // What the trainer's next step sees of it.
    KEDGE_ASSIGN_OR_RETURN(beside_seconds, PlainPass());
    KEDGE_RETURN_IF_ERROR(snapshot_->WaitForAnchor(&result));
    // Its own clock began as Publish returned; the pass may outlast it.
    done_seconds = commit_seconds + result.anchor_seconds;
  }
  Sample(&snapshot_footprint_);
  KEDGE_RETURN_IF_ERROR(result.anchor_status);
  for (const std::string& warning : result.warnings) {
    std::fprintf(stderr, "warning: %s\n", warning.c_str());
  }
  if (result.nnz != changed) {
    return absl::InternalError(
        absl::StrCat("v", step, " of the snapshot path: changes: expected ",
                     changed, ", made in the masters, found ", result.nnz));
  }
  const std::string directory =
      JoinPath(SnapshotPath(), StepDirectoryName(step));
  std::uint64_t bytes = 0;
  for (const std::uint64_t size : FileSizes(directory)) bytes += size;
  std::vector<std::uint64_t> removed;
  if (anchor) {
    // None is needed again.
    const std::string path = JoinPath(directory, kAnchorDirectoryName);
    removed = FileSizes(path);
    KEDGE_RETURN_IF_ERROR(RemoveTree(*PosixFileSystem(), path));
  }
  Settle(removed);
  figures->plain_pass.Add(pass_seconds);
  figures->commit.Add(commit_seconds);
  figures->bytes.Add(static_cast<double>(bytes));
  figures->bits.Add(8 * static_cast<double>(bytes) /
                    static_cast<double>(share_.elements));
  figures->anchor_bytes.Add(static_cast<double>(result.anchor_bytes));
  std::printf("v%" PRIu64
              " by snapshot%s: plain pass %.1f ms, publish %.1f ms until it "
              "returned",
              step, anchor ? " with anchor" : "", 1000 * pass_seconds,
              1000 * commit_seconds);
  if (anchor) {
    figures->pass_beside.Add(beside_seconds);
    figures->anchor_done.Add(done_seconds);
    std::printf(
        ", %.1f ms until its anchor stood, plain pass beside it %.1f ms",
        1000 * done_seconds, 1000 * beside_seconds);
  }
  std::printf("\n");
  std::fflush(stdout);
  return absl::OkStatus();
}

std::string InMiB(double bytes) {
  return absl::StrFormat("%.1f MiB", bytes / 0x1p20);
}

void PrintRow(const char* what, const std::string& first,
              const std::string& normal, const std::string& anchor,
              const std::string& floor) {
  std::printf("%-34s %-12s %-26s %-28s %s\n", what, first.c_str(),
              normal.c_str(), anchor.c_str(), floor.c_str());
}

void PrintFootprint(const Footprint& footprint, const std::string& device,
                    const std::string& host) {
  PrintRow("device memory beyond the weights", "",
           footprint.free_before == 0
               ? "not measured"
               : InMiB(static_cast<double>(footprint.device_bytes())),
           "", device);
  PrintRow("host memory beyond the trainer's", "",
           InMiB(static_cast<double>(footprint.host_bytes())), "", host);
  PrintRow("opening the writer",
           absl::StrFormat("%.2f s", footprint.open_seconds), "", "", "");
}

void SeedTable::Print() const {
  const double gigabytes = static_cast<double>(weight_bytes()) / 1e9;
  const auto ms = [](const Samples& samples) { return samples.Text(1000, 1); };
  const auto first = [](const Samples& samples) {
    return absl::StrFormat("%.1f", 1000 * samples.Median());
  };
  std::printf(
      "\nTimes in ms, median (least to most); every weight and every "
      "checksum was checked at the end.\n");
  PrintRow("", "v1", "normal steps", "anchor steps", "floor, same run");
  PrintRow("wait before the final backward", first(first_.begin),
           ms(normal_.begin), ms(anchor_.begin), "0");
  PrintRow("plain pass", first(first_.plain_pass), ms(normal_.plain_pass),
           ms(anchor_.plain_pass),
           absl::StrFormat("H2D %.1f GB/s",
                           gigabytes / normal_.plain_pass.Median()));
  PrintRow("pass with the hook, drain included", first(first_.pass),
           ms(normal_.pass), ms(anchor_.pass), "the plain pass");
  PrintRow("  added", first(first_.added), ms(normal_.added), ms(anchor_.added),
           absl::StrFormat(
               "goal: 20 ms, or 5 %%: %.1f ms",
               1000 * std::max(0.02, 0.05 * normal_.plain_pass.Median())));
  PrintRow("  drain after the last chunk", first(first_.drain),
           ms(normal_.drain), ms(anchor_.drain), "");
  PrintRow("commit after the call", first(first_.commit), ms(normal_.commit),
           ms(anchor_.commit), "");
  PrintRow("  before files are sealed", first(first_.prepare),
           ms(normal_.prepare), ms(anchor_.prepare), "");
  PrintRow("  wait for the guard in it", first(first_.guard_wait),
           ms(normal_.guard_wait), ms(anchor_.guard_wait), "");
  PrintRow("guard's checksums, alone", first(first_.guard), ms(normal_.guard),
           ms(anchor_.guard),
           absl::StrFormat("read-only pass %.2f ms, %.2f TB/s",
                           1000 * normal_.read_pass.Median(),
                           gigabytes / 1000 / normal_.read_pass.Median()));
  PrintRow(
      "  TB/s", "",
      absl::StrFormat("%.2f", gigabytes / 1000 / normal_.guard.Median()),
      anchor_.guard.empty()
          ? ""
          : absl::StrFormat("%.2f", gigabytes / 1000 / anchor_.guard.Median()),
      absl::StrFormat("%.3f of the read-only pass",
                      normal_.read_pass.Median() / normal_.guard.Median()));
  PrintRow("plain writes of the step's files", first(first_.plain_write),
           ms(normal_.plain_write), ms(anchor_.plain_write),
           "8 threads, begun early, fsync");
  PrintRow("  commit / plain writes", "", normal_.commit_ratio.Text(1, 2), "",
           "goal: at most 1.25");
  PrintRow("  plain pass + writes, as a share", "", "",
           anchor_.anchor_rate.Text(1, 3), "goal: at least 0.95");
  PrintRow("delta", InMiB(first_.bytes.Median()), InMiB(normal_.bytes.Median()),
           InMiB(anchor_.bytes.Median()), "");
  PrintRow("  bits per parameter",
           absl::StrFormat("%.4f", first_.bits.Median()),
           absl::StrFormat("%.4f", normal_.bits.Median()),
           absl::StrFormat("%.4f", anchor_.bits.Median()),
           absl::StrFormat("entropy %.4f", EntropyOfPerturb(options_.density)));
  PrintRow("anchor", "", "", InMiB(anchor_.anchor_bytes.Median()), "");
  PrintFootprint(
      hook_footprint_,
      absl::StrCat("stated: ",
                   InMiB(static_cast<double>(memory_.device_bytes))),
      absl::StrCat(
          "stated: pinned ", InMiB(static_cast<double>(memory_.pinned_bytes)),
          ", residual ", InMiB(static_cast<double>(memory_.residual_bytes))));
  std::printf("%.0f early drains a step\n", normal_.early_drains.Median());
  if (snapshot_normal_.commit.empty()) return;

  std::printf(
      "\nBy snapshot, in pinned host memory, after the trainer's own "
      "pass:\n");
  PrintRow("plain pass", "", ms(snapshot_normal_.plain_pass),
           ms(snapshot_anchor_.plain_pass), "");
  PrintRow("publish, until it returns", "", ms(snapshot_normal_.commit),
           ms(snapshot_anchor_.commit),
           "H2D of the snapshot: about the plain pass");
  if (!snapshot_anchor_.anchor_done.empty()) {
    PrintRow("  until its anchor stands", "", "",
             ms(snapshot_anchor_.anchor_done),
             "written in the background, from the copy");
    PrintRow("  plain pass meanwhile", "", "", ms(snapshot_anchor_.pass_beside),
             "the plain pass");
  }
  PrintRow("delta", "", InMiB(snapshot_normal_.bytes.Median()),
           InMiB(snapshot_anchor_.bytes.Median()), "");
  PrintFootprint(
      snapshot_footprint_,
      absl::StrCat("stated: ",
                   InMiB(static_cast<double>(snapshot_memory_.device_bytes))),
      absl::StrCat("stated: pinned ",
                   InMiB(static_cast<double>(snapshot_memory_.pinned_bytes)),
                   ", host ",
                   InMiB(static_cast<double>(snapshot_memory_.host_bytes))));
}

JsonObject ToJson(const Figures& figures) {
  JsonObject object;
  object.Stats("wait_before_final_backward_s", figures.begin)
      .Stats("plain_pass_s", figures.plain_pass)
      .Stats("pass_s", figures.pass)
      .Stats("added_s", figures.added)
      .Stats("issue_s", figures.issue)
      .Stats("drain_s", figures.drain)
      .Stats("commit_s", figures.commit)
      .Stats("prepare_s", figures.prepare)
      .Stats("guard_wait_s", figures.guard_wait)
      .Stats("guard_checksums_s", figures.guard)
      .Stats("read_only_pass_s", figures.read_pass)
      .Stats("plain_write_s", figures.plain_write)
      .Stats("commit_to_plain_write", figures.commit_ratio)
      .Stats("plain_pass_and_write_to_pass_and_commit", figures.anchor_rate)
      .Stats("delta_bytes", figures.bytes)
      .Stats("bits_per_parameter", figures.bits)
      .Stats("anchor_bytes", figures.anchor_bytes)
      .Stats("early_drains", figures.early_drains);
  return object;
}

JsonObject SeedTable::Report(const std::string& command) const {
  JsonObject report;
  report.Text("device", device_.name())
      .Text("driver", bench_.driver())
      .Text("kernel_driver", KernelDriver())
      .Text("commit", options_.commit)
      .Text("command", command)
      .Text("store", options_.store)
      .Number("parameters", share_.elements)
      .Number("weight_bytes", weight_bytes())
      .Number("tensors", std::uint64_t{share_.tensors.size()})
      .Number("chunks", std::uint64_t{chunks_.size()})
      .Number("density", options_.density)
      .Number("entropy_bits_per_parameter", EntropyOfPerturb(options_.density))
      .Number("open_s", hook_footprint_.open_seconds)
      .Number("gpu_bytes_beyond_weights", hook_footprint_.device_bytes())
      .Number("gpu_bytes_stated", memory_.device_bytes)
      .Number("host_bytes_grown", hook_footprint_.host_bytes())
      .Number("pinned_bytes_stated", memory_.pinned_bytes)
      .Number("residual_bytes_stated", memory_.residual_bytes)
      .Number("read_pass_form", static_cast<std::uint64_t>(read_pass_.form()))
      .Object("v1", ToJson(first_))
      .Object("normal", ToJson(normal_))
      .Object("anchor", ToJson(anchor_));
  if (snapshot_normal_.commit.empty()) return report;
  const auto path = [](const Figures& figures) {
    JsonObject object;
    object.Stats("plain_pass_s", figures.plain_pass)
        .Stats("publish_s", figures.commit)
        .Stats("publish_until_anchor_stands_s", figures.anchor_done)
        .Stats("plain_pass_beside_anchor_s", figures.pass_beside)
        .Stats("delta_bytes", figures.bytes)
        .Stats("bits_per_parameter", figures.bits)
        .Stats("anchor_bytes", figures.anchor_bytes);
    return object;
  };
  JsonObject snapshot;
  snapshot.Number("open_s", snapshot_footprint_.open_seconds)
      .Number("gpu_bytes_beyond_weights", snapshot_footprint_.device_bytes())
      .Number("gpu_bytes_stated", snapshot_memory_.device_bytes)
      .Number("host_bytes_grown", snapshot_footprint_.host_bytes())
      .Number("pinned_bytes_stated", snapshot_memory_.pinned_bytes)
      .Number("snapshot_bytes_stated", snapshot_memory_.snapshot_bytes)
      .Object("normal", path(snapshot_normal_))
      .Object("anchor", path(snapshot_anchor_));
  report.Object("snapshot", snapshot);
  return report;
}

absl::Status Measure(const Options& options, const std::string& command) {
  KEDGE_ASSIGN_OR_RETURN(const std::unique_ptr<BenchDevice> bench,
                         BenchDevice::Open(options.device));
  SeedTable table(options, bench.get());
  KEDGE_RETURN_IF_ERROR(table.RunAll());
  table.Print();
  if (options.json.empty()) return absl::OkStatus();
  return WriteReport(options.json, table.Report(command).str());
}

int Main(int argc, char** argv) {
  Options options;
  Flags flags;
  flags.Text("--store", &options.store)
      .Text("--device", &options.device)
      .Number("--params", &options.parameters)
      .Number("--steps", &options.steps)
      .Number("--anchor-steps", &options.anchor_steps)
      .Number("--snapshot-steps", &options.snapshot_steps)
      .Number("--density", &options.density)
      .Number("--chunk-elements", &options.chunk_elements)
      .Number("--slots", &options.slots)
      .Bytes("--ring-bytes", &options.ring_bytes)
      .Number("--seed", &options.seed)
      .Number("--keep-store", &options.keep_store)
      .Text("--json", &options.json)
      .Text("--commit", &options.commit);
  if (!flags.Parse(argc, argv)) return 2;
  if (options.store.empty() || options.steps == 0 || options.slots == 0 ||
      options.slots > 64 || options.chunk_elements < 128 ||
      options.parameters > 1'000'000'000'000 || options.density < 0 ||
      options.density > 1) {
    std::fprintf(stderr,
                 "kedge_seed_table: --store DIR is needed; --steps is at least "
                 "1, --slots 1 to 64, --chunk-elements at least 128, --density "
                 "0 to 1, --params at most 1e12\n");
    return 2;
  }
  const absl::Status status = Measure(options, CommandLine(argc, argv));
  if (status.ok()) return 0;
  std::fprintf(stderr, "kedge_seed_table: %s\n",
               std::string(status.message()).c_str());
  return 1;
}

}  // namespace
}  // namespace kedge

int main(int argc, char** argv) { return kedge::Main(argc, argv); }
