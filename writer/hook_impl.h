#ifndef KEDGE_WRITER_HOOK_IMPL_H_
#define KEDGE_WRITER_HOOK_IMPL_H_

// What OptimizerHook is inside. hook_open.cc maps tensors and takes memory,
// hook_chunks.cc describes chunks to the device and moves them,
// optimizer_hook.cc has the steps. Private to writer/.

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kedge/engine/device/device.h"
#include "kedge/writer/anchor_feed.h"
#include "kedge/writer/device_delta.h"
#include "kedge/writer/device_source.h"
#include "kedge/writer/optimizer_hook.h"
#include "kedge/writer/parameter_map.h"
#include "kedge/writer/quantised_source.h"
#include "kedge/writer/rank_group.h"
#include "kedge/writer/snapshot_source.h"
#include "kedge/writer/store_writer.h"

namespace kedge {

namespace hook {

// Most slices of a chunk: one with more is cut.
inline constexpr std::uint32_t kMaxSlices = 4096;
inline constexpr std::uint64_t kMinChunkBytes = 4096;
inline constexpr std::uint64_t kMinRingBytes = std::uint64_t{256} << 10;
// What is copied at once from the device for host code.
inline constexpr std::uint64_t kReadBytes = std::uint64_t{8} << 20;
// Parameters with fp8 tensors that may be written in part at the same time.
inline constexpr std::uint32_t kCarries = 4;
inline constexpr std::uint32_t kNoIndex = ~std::uint32_t{0};
// Jobs of an anchor that wait for a thread.
inline constexpr std::size_t kAnchorJobs = 1024;
// Chunks of which it is known after which anchor job they are written.
inline constexpr std::uint64_t kTrackedChunks = 4096;

// "[3, 7)"
inline std::string BytesText(std::uint64_t begin, std::uint64_t end) {
  return absl::StrCat("[", begin, ", ", end, ")");
}

// Names the first few, counts all.
class Named {
 public:
  void Add(std::string what) {
    if (++count_ <= 4) first_.push_back(std::move(what));
  }
  bool empty() const { return count_ == 0; }
  std::string Text() const {
    return absl::StrCat(
        absl::StrJoin(first_, "; "),
        count_ > first_.size()
            ? absl::StrCat("; and ", count_ - first_.size(), " more")
            : "");
  }

 private:
  std::size_t count_ = 0;
  std::vector<std::string> first_;
};

// Trainer tensors, and the fp8 form of some.
class CreationSource : public TensorSource {
 public:
  CreationSource(std::unique_ptr<DeviceReader> reader, DeviceSource plain,
                 std::unique_ptr<QuantisedSource> fp8)
      : reader_(std::move(reader)),
        plain_(std::move(plain)),
        fp8_(std::move(fp8)) {}

  std::optional<std::vector<UnitRange>> Owned(
      std::uint32_t ordinal) const override {
    auto ranges = fp8_->Owned(ordinal);
    return ranges->empty() ? plain_.Owned(ordinal) : ranges;
  }
  absl::StatusOr<std::span<const std::byte>> Read(
      std::uint32_t ordinal, std::uint64_t byte_begin, std::uint64_t byte_count,
      std::vector<std::byte>* scratch) override {
    if (!fp8_->Owned(ordinal)->empty()) {
      return fp8_->Read(ordinal, byte_begin, byte_count, scratch);
    }
    return plain_.Read(ordinal, byte_begin, byte_count, scratch);
  }

 private:
  std::unique_ptr<DeviceReader> reader_;
  DeviceSource plain_;
  std::unique_ptr<QuantisedSource> fp8_;
};

}  // namespace hook

struct OptimizerHook::Impl {
  // What is known of a part of ParameterMap.
  struct PartState {
    std::uint32_t tensor = 0;  // ordinal
    bool frozen = false;
    std::uint64_t l61 = 0;  // own part of S at held()
    // For fp8: index in `quantised`; `tensor` is that of the values.
    std::uint32_t quantised = hook::kNoIndex;
  };
  // Of a parameter with fp8 tensors: what a chunk leaves for the next one.
  struct Pending {
    std::uint64_t next = 0;  // bytes written so far, from the first on
    // Old and new rows of a block that is not whole.
    std::uint32_t carry = hook::kNoIndex;
  };
  // One sum of the guard: a part, in the parameter or in a copy of it.
  struct Guarded {
    std::uint32_t part = 0;
    std::optional<std::size_t> replica;
  };
  struct Written {
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
  };
  enum class State { kIdle, kOpen, kEnded };

  Impl(const WriterOptions& writer_options, HookOptions hook_options)
      : options(std::move(hook_options)),
        device(options.device),
        group(writer_options.coordinator) {}

  // ------------------------------------------------------------------ opening
  absl::Status CheckOptions() const;
  absl::Status MapTensors();
  // The tensors of the table: fp8 forms in the place of what they are made of.
  std::vector<TrainerTensor> TableTensors() const;
  absl::Status PlanQuantised(const TensorTable& table);
  absl::Status CheckAligned(const MappedPart& mapped) const;
  absl::Status CheckQuantised(const QuantisedTensor& one) const;
  const QuantisedTensor* QuantisedOf(const std::string& name) const;
  // What v0 is read from.
  absl::StatusOr<hook::CreationSource> SourceOfCreation(
      const WriterOptions& writer_options, const TensorTable& table);
  // Everything that needs the table; S of what this rank holds.
  absl::StatusOr<StoreWriter::HeldPart> Bind(
      const WriterOptions& writer_options, const VersionState& state,
      const L61Summer& summer);
  absl::Status Allocate(const WriterOptions& writer_options, const L61Key& key);
  absl::Status SumLive(std::vector<std::uint64_t>* residues);

  // -------------------------------------------------------------------- steps
  absl::StatusOr<bool> AnyRankUpdated();
  void Rebase();
  // Fills all of `slot` but its bytes. False: it is too much for one chunk.
  bool Describe(std::uint32_t parameter, std::uint64_t begin, std::uint64_t end,
                DeviceDelta::Slot* slot) const;
  bool DescribeQuantised(std::uint32_t parameter, std::uint64_t begin,
                         std::uint64_t end, DeviceDelta::Slot* slot) const;
  // Whether blocks of a parameter's fp8 tensors end elsewhere than at `byte`.
  bool LeavesBlockOpen(std::uint32_t parameter, std::uint64_t byte) const;
  // Old or new rows of a block that is open.
  std::byte* CarryAt(std::uint32_t carry, bool is_new) const {
    if (carry == hook::kNoIndex) return nullptr;
    return delta->carry(carry) + (is_new ? carry_half : 0);
  }
  absl::Status TakeCarry(std::uint32_t parameter);
  absl::Status PlainCopy(std::uint32_t parameter, std::uint64_t begin,
                         std::uint64_t bytes, const void* source,
                         DeviceStream stream);
  // Takes [begin, end), or as much of it from `begin` on as one chunk can be;
  // returns where it ends.
  absl::StatusOr<std::uint64_t> UpdateChunk(std::uint32_t parameter,
                                            std::uint64_t begin,
                                            std::uint64_t end,
                                            const std::byte* source,
                                            DeviceStream stream,
                                            std::uint64_t jobs, Ticket* ticket);
  std::uint64_t FeedAnchor(std::uint32_t parameter, std::uint64_t begin,
                           std::uint64_t end, const std::byte* source);
  absl::Status CheckNotWritten(std::uint32_t parameter, std::uint64_t begin,
                               std::uint64_t end);
  absl::Status CheckCovered() const;
  void FailStep(absl::Status status) { step_status.Update(status); }

  absl::Status Prepare(StoreWriter::DeltaAttempt* attempt, KeptRecords* kept,
                       HookResult* result,
                       std::unique_ptr<SnapshotSource>* fresh);
  absl::Status Guard(HookResult* result);
  absl::Status FillAnchor(StoreWriter::AnchorAttempt& anchor_attempt,
                          SnapshotSource& residual_now);
  std::string PartText(std::uint32_t part) const;

  HookOptions options;
  Device* device;
  RankGroup group;
  HookMemory memory;
  std::vector<ParameterSpan> spans;
  std::optional<ParameterMap> map;
  std::unique_ptr<DeviceReader> reader;
  std::optional<DeviceSource> hooked;
  std::optional<DeviceSource> residual;
  std::unique_ptr<QuantisedSource> fp8;
  std::vector<QuantisedPart> quantised;
  std::vector<bool> has_quantised;  // by parameter
  std::uint64_t fp8_values = 0;     // that one chunk may have
  std::uint64_t fp8_scales = 0;
  std::uint64_t carry_half = 0;  // bytes of the largest row of blocks
  std::unique_ptr<SnapshotSource> snapshot;
  std::vector<OwnedSlice> owned;
  std::vector<PartState> parts;
  std::vector<Guarded> guarded;
  std::unique_ptr<DeviceSums> sums;
  std::vector<std::uint64_t> residues;  // scratch of SumLive
  OwnedStream guard_stream;
  std::unique_ptr<StoreWriter> writer;

  // Of the step.
  State state = State::kIdle;
  std::uint64_t step = 0;
  bool lost = false;     // parts of an earlier step are gone
  bool rebased = false;  // this step starts over, without a delta
  absl::Status step_status;
  std::uint64_t updates = 0;
  double wait_seconds = 0;
  double drain_seconds = 0;
  std::vector<std::vector<Written>> written;  // by parameter, ascending
  std::vector<Pending> pending;               // by parameter
  bool carry_used[hook::kCarries] = {};
  std::unique_ptr<StoreWriter::DeltaAttempt> attempt;
  std::unique_ptr<StoreWriter::AnchorAttempt> anchor;
  std::unique_ptr<DeviceDelta> delta;
  std::unique_ptr<AnchorFeed> feed;
  bool feeding = false;
  std::uint64_t JobsOf(std::uint64_t chunk) const {
    return chunk > chunks.load()
               ? 0
               : jobs_after[chunk % hook::kTrackedChunks].load();
  }
  // By chunk number: the anchor jobs that read its source, and all before. Jobs
  // of earlier steps are done when a step begins.
  std::array<std::atomic<std::uint64_t>, hook::kTrackedChunks> jobs_after{};
  std::atomic<std::uint64_t> chunks{0};  // of which jobs_after is known
};

}  // namespace kedge

#endif  // KEDGE_WRITER_HOOK_IMPL_H_
