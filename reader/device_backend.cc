// Weights on a device. Before the pause, deltas go through a ring of pinned
// buffers to device memory, record headers are parsed on the way, and records
// are decoded there once to compare them with the manifest. The pause is then
// one launch for each delta and one for all checksums. Anchors go to the
// weights in the pause, through a ring of smaller buffers.

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <mutex>
#include <span>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kedge/engine/device/kernel_tasks.h"
#include "kedge/engine/io/io_pool.h"
#include "kedge/format/codec.h"
#include "kedge/format/layout.h"
#include "kedge/format/limits.h"
#include "kedge/format/status.h"
#include "kedge/reader/parallel.h"
#include "kedge/reader/pinned_ring.h"
#include "kedge/reader/stage_pool.h"
#include "kedge/reader/weight_backend.h"

namespace kedge {
namespace {

// Pinned buffers for deltas, which are read a piece at a time, beside those
// that threads fill: these are being emptied.
constexpr int kSparePieceSlots = 2;
// Anchors come in parts: every thread fills one while its other one is on its
// way. They are small, so that what was read is still in the processor's cache
// when it is copied on: with twice as much a join from memory is slower
// (docs/decisions.md).
constexpr std::uint64_t kPartBytes = std::uint64_t{4} << 20;
constexpr int kPartSlotsOfThread = 2;
// Deltas that may be staged at once.
constexpr std::uint32_t kMaxStaged = 1024;
// Records of a file that are this near to each other are copied as one.
constexpr std::uint64_t kCopiedGapBytes = std::uint64_t{64} << 10;
// Where records begin on the device, and what may be read after the last one.
constexpr std::uint64_t kExtentAlignment = 64;
constexpr std::uint64_t kReadableAfterPayloads = 64;
// Shorter rows than these are not copied one by one into a box of many: the
// piece is copied whole and a kernel puts them in their places.
constexpr std::uint64_t kMinCopiedRowBytes = 2048;
constexpr std::uint64_t kFewRows = 4;

constexpr std::uint64_t RoundUp(std::uint64_t value, std::uint64_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

absl::string_view FaultText(TileFault fault) {
  switch (fault) {
    case TileFault::kNone:
      return "no reason given";
    case TileFault::kCounts:
      return "its counts of changes, or its parameter, are out of range";
    case TileFault::kPlanes:
      return "its planes do not fill the payload";
    case TileFault::kIndex:
      return "a unit beyond the tile, or twice";
    case TileFault::kSlice:
      return "a unit outside the record's slice";
    case TileFault::kDifference:
      return "a difference that the dtype cannot hold";
    case TileFault::kEscape:
      return "its escapes are not what the payload has";
  }
  return "unknown fault";
}

// A run of a file's bytes that has a place on the device.
struct Extent {
  std::uint64_t begin = 0;  // in the file
  std::uint64_t end = 0;
  std::uint64_t at = 0;  // in the payloads
};

struct DeviceRecord {
  std::uint32_t index = 0;    // in the manifest
  std::uint64_t payload = 0;  // where it begins in the payloads
};

class DeviceDelta : public StagedDelta {
 public:
  // `*staged` counts those that exist; it outlives them.
  DeviceDelta(std::shared_ptr<const PublishedStep> step, std::uint32_t* staged)
      : StagedDelta(std::move(step)), staged_(staged) {
    ++*staged_;
  }
  ~DeviceDelta() override { --*staged_; }

  const DeltaRecord& info(std::size_t record) const {
    return step().manifest.records[records[record].index];
  }

  std::vector<DeviceRecord> records;
  std::uint64_t nnz = 0;  // by the manifest
  // Those of a held box first; the others are only checked.
  std::uint64_t needed_tiles = 0;
  std::uint64_t all_tiles = 0;

  StagePool::Block block;
  std::uint64_t payload_bytes = 0;
  const std::byte* payloads = nullptr;
  const ApplyTile* tiles = nullptr;
  const struct ApplyRecord* apply_records = nullptr;
  const BoxTarget* boxes = nullptr;
  ApplyOutcome* check_outcome = nullptr;  // RecordSums follow it
  // Until it is read.
  struct Reading {
    virtual ~Reading() = default;
  };
  std::unique_ptr<Reading> reading;

  ApplyBatch Batch() const {
    ApplyBatch batch;
    batch.tiles = tiles;
    batch.tile_count = needed_tiles;
    batch.records = apply_records;
    batch.record_count = static_cast<std::uint32_t>(records.size());
    batch.boxes = boxes;
    batch.payloads = payloads;
    batch.payload_bytes = payload_bytes;
    return batch;
  }

 private:
  std::uint32_t* staged_;
};

// The units of `units` that lie in `box`, as runs of rows.
struct RowRun {
  std::uint64_t row = 0;
  std::uint64_t rows = 0;
  std::uint64_t col = 0;
  std::uint64_t cols = 0;
};
template <typename Visit>
absl::Status VisitRowRuns(const TileGrid& grid, const UnitRange& units,
                          const BoxTarget& box, Visit&& visit) {
  std::uint64_t at = units.begin;
  while (at < units.end) {
    RowRun run;
    run.row = at / grid.cols;
    run.rows = 1;
    std::uint64_t left = at - run.row * grid.cols;
    std::uint64_t right = std::min(grid.cols, left + (units.end - at));
    if (left == 0 && right == grid.cols) {
      run.rows = (units.end - at) / grid.cols;
    }
    at += run.rows * (right - left);
    const std::uint64_t top = std::max(run.row, box.row_begin);
    const std::uint64_t bottom = std::min(run.row + run.rows, box.row_end);
    left = std::max(left, box.col_begin);
    right = std::min(right, box.col_end);
    if (top >= bottom || left >= right) continue;
    KEDGE_RETURN_IF_ERROR(visit(RowRun{top, bottom - top, left, right - left}));
  }
  return absl::OkStatus();
}

// Whether rows of `box` can be copied where they belong, and are worth it.
bool TakesRows(const BoxTarget& box) {
  if (!box.rows_are_contiguous()) return false;
  const std::uint64_t row_bytes =
      (box.col_end - box.col_begin) * box.unit_bytes;
  const std::uint64_t rows = box.row_end - box.row_begin;
  if (rows <= 1) return true;
  if (box.row_stride_bytes < 0 ||
      static_cast<std::uint64_t>(box.row_stride_bytes) < row_bytes) {
    return false;
  }
  return rows <= kFewRows || row_bytes >= kMinCopiedRowBytes;
}

// Whether the tensor's rows follow each other in `box` as they do in a file.
bool IsContiguous(const TileGrid& grid, const BoxTarget& box) {
  return box.rows_are_contiguous() && box.col_begin == 0 &&
         box.col_end == grid.cols &&
         (box.row_end - box.row_begin <= 1 ||
          box.row_stride_bytes ==
              static_cast<std::int64_t>(grid.cols * box.unit_bytes));
}

class DeviceBackend : public WeightBackend {
 public:
  DeviceBackend(Device* device, const BackendOptions& options,
                const ReadContext* context, const L61Key& key)
      : device_(device),
        context_(context),
        check_records_(options.check_records),
        key_(key),
        stage_bytes_(options.device_stage_bytes),
        stage_threads_(context->io_pool->thread_count()),
        pool_(device, options.device_stage_bytes) {}

  absl::Status Init(DeviceStream stream) {
    stream_ = stream;
    if (stream == nullptr) {
      KEDGE_ASSIGN_OR_RETURN(own_stream_, device_->CreateStream());
      stream_ = own_stream_.get();
    }
    KEDGE_ASSIGN_OR_RETURN(stage_stream_, device_->CreateStream());
    KEDGE_ASSIGN_OR_RETURN(a_, device_->MakeL61Table(key_));
    KEDGE_ASSIGN_OR_RETURN(
        outcomes_, device_->Allocate(MemoryKind::kDevice,
                                     kMaxStaged * sizeof(ApplyOutcome)));
    KEDGE_ASSIGN_OR_RETURN(
        host_outcomes_, device_->Allocate(MemoryKind::kPinned,
                                          kMaxStaged * sizeof(ApplyOutcome)));
    KEDGE_ASSIGN_OR_RETURN(
        ring_, PinnedRing::Create(
                   device_, stage_threads_.thread_count() + kSparePieceSlots,
                   kPieceBytes));
    KEDGE_ASSIGN_OR_RETURN(
        part_ring_,
        PinnedRing::Create(
            device_, kPartSlotsOfThread * context_->io_pool->thread_count(),
            kPartBytes));
    return absl::OkStatus();
  }

  absl::Status CheckTargets(
      const std::vector<const WeightSet*>& sets) const override;
  absl::Status Prepare(const SharedBinding& binding) override {
    return SumsOf(binding).status();
  }
  absl::StatusOr<std::unique_ptr<StagedDelta>> Stage(
      const SharedBinding& binding, const TensorMask& mask,
      std::shared_ptr<const PublishedStep> step) override;
  absl::Status Read(StagedDelta* staged) override;
  absl::StatusOr<std::unique_ptr<AnchorLoad>> OpenAnchor(
      const Binding& binding, const TensorMask& mask,
      const PublishedAnchor& anchor) override;
  absl::Status WriteAnchor(const Binding& binding, AnchorLoad* load,
                           std::uint64_t* units_written) override;
  absl::Status Apply(const Binding& binding, const Deltas& deltas,
                     ApplyCounts* counts) override;
  absl::Status Sum(const SharedBinding& binding, Binding::Sums* sums) override;
  absl::StatusOr<std::shared_ptr<const LoadedDelta>> Records(
      const Binding& binding, const StagedDelta& delta,
      const TensorMask& mask) override {
    KEDGE_ASSIGN_OR_RETURN(
        std::unique_ptr<LoadedDelta> loaded,
        LoadedDelta::Load(context_, binding, mask, delta.shared_step()));
    return std::shared_ptr<const LoadedDelta>(std::move(loaded));
  }

 private:
  // Records of a step that are being read.
  struct Incoming;
  class Uploader;
  struct PartSlots;

  absl::StatusOr<DeviceSums*> SumsOf(const SharedBinding& binding);

  absl::Status ReadPieces(Incoming* incoming);
  // What arrived of `piece`, at `bytes`, goes to the device, and its records
  // are parsed.
  absl::Status TakePiece(Incoming* incoming, std::uint32_t file,
                         std::uint64_t offset, std::span<const std::byte> bytes,
                         DeviceStream stream);
  absl::Status ParseRecord(Incoming* incoming, std::size_t record,
                           std::span<const std::byte> bytes);
  absl::Status UploadTables(Incoming* incoming);
  absl::Status CheckOnDevice(const DeviceDelta& delta);
  // What to say of a tile that the device could not decode.
  absl::Status BadTile(const DeviceDelta& delta, const ApplyOutcome& outcome);

  // Read number `read` of an anchor, in parts. `*units` is what was written.
  absl::Status WriteRead(const Binding& binding, AnchorLoad* load,
                         std::size_t read, PartSlots* slots,
                         std::uint64_t* units);
  // Bytes [begin, end) of a file, which lie in `slot`, to the boxes that need
  // them, as far as they are of `pieces`.
  absl::Status WritePart(const Binding& binding,
                         std::span<const AnchorPiece> pieces,
                         std::uint64_t begin, std::uint64_t end,
                         const PinnedRing::Use& slot, std::uint64_t* units);
  // One piece of an anchor or a part of one, at `bytes` of a slot.
  absl::Status WritePiece(const Binding& binding, const AnchorPiece& piece,
                          const std::byte* bytes, std::byte* bounce,
                          DeviceStream stream, std::uint64_t* units);

  Device* device_;
  const ReadContext* context_;
  const bool check_records_;
  const L61Key key_;
  const std::uint64_t stage_bytes_;
  OwnedStream own_stream_;
  OwnedStream stage_stream_;
  DeviceStream stream_ = nullptr;  // of the weights
  DeviceMemory a_;
  DeviceMemory outcomes_;                  // [kMaxStaged]
  DeviceMemory host_outcomes_;             // likewise
  std::unique_ptr<PinnedRing> ring_;       // of deltas
  std::unique_ptr<PinnedRing> part_ring_;  // of anchors
  // Beside the threads that an anchor keeps busy.
  IoPool stage_threads_;
  StagePool pool_;
  std::uint32_t staged_ = 0;

  struct Sums {
    SharedBinding binding;
    std::unique_ptr<DeviceSums> sums;  // null: nothing to sum
  };
  std::vector<Sums> sums_;
};

// ------------------------------------------------------------------- checking

absl::Status DeviceBackend::CheckTargets(
    const std::vector<const WeightSet*>& sets) const {
  for (const WeightSet* set : sets) {
    for (const TensorTarget& target : set->targets()) {
      const std::vector<std::uint64_t>& extent =
          target.extent.empty() ? target.shape : target.extent;
      // From the lowest to the highest byte of the box. Shapes have not been
      // compared with a table yet: sums may wrap.
      const auto data = reinterpret_cast<std::uintptr_t>(target.data);
      std::uint64_t low = data;
      std::uint64_t high = data + ElementBytes(target.dtype) - 1;
      std::uint64_t contiguous = ElementBytes(target.dtype);
      std::uint64_t bits = data;  // below a unit's size: of any address
      bool empty = false;
      for (std::size_t d = extent.size(); d-- > 0;) {
        if (extent[d] == 0) empty = true;
        const bool backwards =
            !target.strides_bytes.empty() && target.strides_bytes[d] < 0;
        const std::uint64_t stride =
            target.strides_bytes.empty()
                ? contiguous
                : static_cast<std::uint64_t>(target.strides_bytes[d]);
        (backwards ? low : high) += (extent[d] - 1) * stride;
        if (extent[d] > 1) bits |= stride;
        contiguous *= extent[d];
      }
      if (empty) continue;
      const std::uint32_t unit_bytes = UnitBytes(target.dtype);
      if (bits % unit_bytes != 0) {
        return absl::InvalidArgumentError(absl::StrCat(
            "tensor ", target.name, " in ", set->name(),
            ": expected elements at multiples of ", unit_bytes,
            " bytes, found address ", Hex64(data), " and strides [",
            absl::StrJoin(target.strides_bytes, ", "),
            "], which a kernel cannot read; lay it out in whole elements"));
      }
      for (const std::uint64_t end : {low, high}) {
        if (device_->IsDeviceMemory(reinterpret_cast<const void*>(end))) {
          continue;
        }
        return absl::InvalidArgumentError(absl::StrCat(
            "tensor ", target.name, " in ", set->name(),
            ": expected memory of ", device_->name(),
            ", found other memory at ", Hex64(end),
            "; move it there, or open the follower without a device"));
      }
    }
  }
  return absl::OkStatus();
}

// ------------------------------------------------------------------ checksums

absl::StatusOr<DeviceSums*> DeviceBackend::SumsOf(
    const SharedBinding& binding) {
  for (const Sums& ready : sums_) {
    if (ready.binding == binding) return ready.sums.get();
  }
  // Tables of bindings that nobody else knows any more.
  std::erase_if(sums_,
                [](const Sums& old) { return old.binding.use_count() == 1; });
  std::vector<SumBox> boxes;
  binding->VisitCovers(
      [&](std::uint32_t residue, std::uint32_t tensor, const BoxTarget& box) {
        if (box.unit_count() == 0) return;
        boxes.push_back({box, binding->grid(tensor).cols, residue});
      });
  Sums ready{binding, nullptr};
  if (!boxes.empty()) {
    KEDGE_ASSIGN_OR_RETURN(
        ready.sums,
        device_->PrepareSums(
            boxes, static_cast<std::uint32_t>(binding->residue_count()), key_));
  }
  sums_.push_back(std::move(ready));
  return sums_.back().sums.get();
}

absl::Status DeviceBackend::Sum(const SharedBinding& binding,
                                Binding::Sums* sums) {
  KEDGE_ASSIGN_OR_RETURN(DeviceSums* const ready, SumsOf(binding));
  sums->bytes = 0;
  if (ready == nullptr) {
    sums->residues.assign(binding->residue_count(), 0);
    return absl::OkStatus();
  }
  KEDGE_RETURN_IF_ERROR(WaitOut(device_, stream_, ready->Enqueue(stream_)));
  const std::span<const std::uint64_t> residues = ready->residues();
  KEDGE_CHECK(residues.size() == binding->residue_count());
  sums->residues.assign(residues.begin(), residues.end());
  sums->bytes = ready->bytes();
  return absl::OkStatus();
}

// --------------------------------------------------------------------- deltas

struct DeviceBackend::Incoming : DeviceDelta::Reading {
  Incoming(SharedBinding bound, DeviceDelta* read)
      : binding(std::move(bound)), delta(read) {}

  SharedBinding binding;
  DeviceDelta* delta;
  DeltaReads reads;
  std::optional<DataFiles> files;
  std::byte* payloads = nullptr;             // on the device
  std::vector<std::vector<Extent>> extents;  // by file, ascending
  // By file: indices of delta->records, ascending by offset.
  std::vector<std::vector<std::uint32_t>> by_file;
  std::vector<struct ApplyRecord> apply_records;
  std::vector<BoxTarget> boxes;

  // A record that several pieces hold, put together as they arrive.
  struct Assembly {
    std::unique_ptr<std::byte[]> bytes;
    std::uint64_t missing = 0;
  };
  std::mutex mutex;
  std::vector<Assembly> assemblies ABSL_GUARDED_BY(mutex);

  struct Tiles {
    std::vector<ApplyTile> needed;
    std::vector<ApplyTile> others;
  };
  std::vector<Tiles> tiles;  // by record; each written by one thread
};

absl::StatusOr<std::unique_ptr<StagedDelta>> DeviceBackend::Stage(
    const SharedBinding& binding, const TensorMask& mask,
    std::shared_ptr<const PublishedStep> step) {
  if (staged_ == kMaxStaged) return std::unique_ptr<StagedDelta>();
  auto delta = std::make_unique<DeviceDelta>(std::move(step), &staged_);
  const StepManifest& manifest = delta->step().manifest;
  auto plan = std::make_unique<Incoming>(binding, delta.get());
  Incoming& incoming = *plan;
  KEDGE_ASSIGN_OR_RETURN(incoming.reads,
                         PlanReads(*binding, mask, delta->step()));
  if (incoming.reads.records.empty()) {
    return std::unique_ptr<StagedDelta>(std::move(delta));
  }

  // Where everything goes on the device. What records have of tiles is known
  // once they are read; how many they can have at most is known now.
  const std::size_t file_count = manifest.files.size();
  incoming.by_file.resize(file_count);
  incoming.extents.resize(file_count);
  std::uint64_t most_tiles = 0;
  for (const std::uint32_t index : incoming.reads.records) {
    const DeltaRecord& info = manifest.records[index];
    const TileGrid& grid = binding->grid(info.tensor);
    struct ApplyRecord record;
    record.grid = grid;
    record.slice = info.slice;
    record.unit_bytes = UnitBytes(binding->table()[info.tensor].dtype);
    record.first_box = static_cast<std::uint32_t>(incoming.boxes.size());
    for (const BoxTarget& box : binding->BoxesFor(info.tensor, info.slice)) {
      incoming.boxes.push_back(box);
    }
    record.box_count =
        static_cast<std::uint32_t>(incoming.boxes.size()) - record.first_box;
    incoming.by_file[info.file].push_back(
        static_cast<std::uint32_t>(delta->records.size()));
    incoming.apply_records.push_back(record);
    delta->records.push_back({index, 0});
    delta->nnz += info.nnz;
    most_tiles += std::min<std::uint64_t>(
        {grid.TilesOf(info.slice).count, info.nnz, info.bytes});
  }
  for (std::size_t f = 0; f < file_count; ++f) {
    std::vector<std::uint32_t>& records = incoming.by_file[f];
    std::sort(records.begin(), records.end(),
              [&](std::uint32_t a, std::uint32_t b) {
                return delta->info(a).offset < delta->info(b).offset;
              });
    std::vector<Extent>& extents = incoming.extents[f];
    for (const std::uint32_t r : records) {
      const DeltaRecord& info = delta->info(r);
      const std::uint64_t end = info.offset + info.bytes;
      if (extents.empty() ||
          info.offset > extents.back().end + kCopiedGapBytes) {
        if (!extents.empty()) {
          delta->payload_bytes += extents.back().end - extents.back().begin;
        }
        const std::uint64_t begin =
            info.offset / kExtentAlignment * kExtentAlignment;
        delta->payload_bytes = RoundUp(delta->payload_bytes, kExtentAlignment);
        extents.push_back({begin, end, delta->payload_bytes});
      }
      extents.back().end = std::max(extents.back().end, end);
      delta->records[r].payload =
          extents.back().at + (info.offset - extents.back().begin);
    }
    if (!extents.empty()) {
      delta->payload_bytes += extents.back().end - extents.back().begin;
    }
  }
  const std::uint64_t tiles_at =
      RoundUp(delta->payload_bytes + kReadableAfterPayloads, 256);
  const std::uint64_t records_at =
      RoundUp(tiles_at + most_tiles * sizeof(ApplyTile), 256);
  const std::uint64_t boxes_at = RoundUp(
      records_at + delta->records.size() * sizeof(struct ApplyRecord), 256);
  const std::uint64_t outcome_at =
      RoundUp(boxes_at + incoming.boxes.size() * sizeof(BoxTarget), 256);
  const std::uint64_t bytes = outcome_at + sizeof(ApplyOutcome) +
                              delta->records.size() * sizeof(RecordSums);
  if (!pool_.HasRoom(bytes)) {
    if (!pool_.empty()) return std::unique_ptr<StagedDelta>();
    return absl::ResourceExhaustedError(absl::StrCat(
        delta->step().path, ": needs ", bytes, " bytes of ", device_->name(),
        ", device_stage_bytes is ", stage_bytes_,
        "; nothing was changed; raise it, or join from a newer anchor"));
  }

  incoming.files.emplace(context_, delta->step().path, delta->step().id.step,
                         &manifest.files);
  KEDGE_RETURN_IF_ERROR(incoming.files->Open(incoming.reads.wanted));
  // The size of every file is proven now, so that a manifest cannot ask for
  // more memory than the store holds.
  KEDGE_ASSIGN_OR_RETURN(std::optional<StagePool::Block> block,
                         pool_.Take(bytes));
  if (!block) return std::unique_ptr<StagedDelta>();
  delta->block = *std::move(block);
  incoming.payloads = delta->block.data();
  delta->payloads = delta->block.data();
  delta->tiles =
      reinterpret_cast<const ApplyTile*>(delta->block.data() + tiles_at);
  delta->apply_records = reinterpret_cast<const struct ApplyRecord*>(
      delta->block.data() + records_at);
  delta->boxes =
      reinterpret_cast<const BoxTarget*>(delta->block.data() + boxes_at);
  delta->check_outcome =
      reinterpret_cast<ApplyOutcome*>(delta->block.data() + outcome_at);
  delta->reading = std::move(plan);
  return std::unique_ptr<StagedDelta>(std::move(delta));
}

absl::Status DeviceBackend::Read(StagedDelta* staged) {
  auto* const delta = static_cast<DeviceDelta*>(staged);
  const std::unique_ptr<DeviceDelta::Reading> reading =
      std::move(delta->reading);
  if (reading == nullptr) return absl::OkStatus();  // no box needs a record
  auto* const incoming = static_cast<Incoming*>(reading.get());
  absl::Status status = ReadPieces(incoming);
  if (status.ok()) status = UploadTables(incoming);
  // Also after an error: nothing may be in flight to memory that is given back.
  status.Update(ring_->WaitForAll());
  if (status.ok() && check_records_) {
    status = WaitOut(device_, stage_stream_.get(), CheckOnDevice(*delta));
  }
  return status;
}

absl::Status DeviceBackend::ReadPieces(Incoming* incoming) {
  const StepManifest& manifest = incoming->delta->step().manifest;
  {
    const std::lock_guard lock(incoming->mutex);
    incoming->assemblies.resize(incoming->delta->records.size());
    for (std::size_t r = 0; r < incoming->assemblies.size(); ++r) {
      incoming->assemblies[r].missing = incoming->delta->info(r).bytes;
    }
  }
  incoming->tiles.resize(incoming->delta->records.size());
  struct Piece {
    std::uint32_t file = 0;
    std::uint32_t number = 0;
  };
  std::vector<Piece> todo;
  for (std::uint32_t f = 0; f < incoming->reads.pieces.size(); ++f) {
    for (std::uint32_t p = 0; p < incoming->reads.pieces[f].size(); ++p) {
      if (incoming->reads.pieces[f][p]) todo.push_back({f, p});
    }
  }
  // Neighbouring reads go to different files: one file alone is slower.
  std::stable_sort(
      todo.begin(), todo.end(),
      [](const Piece& a, const Piece& b) { return a.number < b.number; });
  const auto threads = static_cast<std::size_t>(stage_threads_.thread_count());
  const auto expect = [&](std::size_t i) {
    if (i >= todo.size()) return;
    const std::uint64_t offset = todo[i].number * kPieceBytes;
    incoming->files->Expect(
        todo[i].file, offset,
        std::min(kPieceBytes, manifest.files[todo[i].file].bytes - offset));
  };
  return ParallelFor(
      &stage_threads_, todo.size(), [&](std::size_t i) -> absl::Status {
        const Piece& piece = todo[i];
        // While this is hashed and copied, storage works on what comes next.
        if (i < threads) expect(i);
        expect(i + threads);
        const std::uint64_t offset = piece.number * kPieceBytes;
        const std::uint64_t bytes =
            std::min(kPieceBytes, manifest.files[piece.file].bytes - offset);
        KEDGE_ASSIGN_OR_RETURN(const PinnedRing::Use slot, ring_->Take());
        const DataFiles::PieceSpan span = {piece.number, offset, bytes};
        std::size_t bad = 0;
        KEDGE_RETURN_IF_ERROR(incoming->files->FetchChecked(
            piece.file, {&span, 1}, slot->pinned.data(), &bad));
        return TakePiece(incoming, piece.file, offset,
                         {slot->pinned.data(), bytes}, slot.stream());
      });
}

absl::Status DeviceBackend::TakePiece(Incoming* incoming, std::uint32_t file,
                                      std::uint64_t offset,
                                      std::span<const std::byte> bytes,
                                      DeviceStream stream) {
  const std::uint64_t piece_end = offset + bytes.size();
  const std::vector<Extent>& extents = incoming->extents[file];
  auto extent =
      std::partition_point(extents.begin(), extents.end(),
                           [&](const Extent& e) { return e.end <= offset; });
  for (; extent != extents.end() && extent->begin < piece_end; ++extent) {
    const std::uint64_t begin = std::max(extent->begin, offset);
    const std::uint64_t end = std::min(extent->end, piece_end);
    KEDGE_RETURN_IF_ERROR(
        device_->Copy(incoming->payloads + extent->at + (begin - extent->begin),
                      bytes.data() + (begin - offset), end - begin, stream));
  }

  // While that is copied:
  const DeviceDelta& delta = *incoming->delta;
  const std::vector<std::uint32_t>& records = incoming->by_file[file];
  auto at = std::partition_point(
      records.begin(), records.end(), [&](std::uint32_t r) {
        return delta.info(r).offset + delta.info(r).bytes <= offset;
      });
  for (; at != records.end() && delta.info(*at).offset < piece_end; ++at) {
    const DeltaRecord& info = delta.info(*at);
    const std::uint64_t begin = std::max(info.offset, offset);
    const std::uint64_t end = std::min(info.offset + info.bytes, piece_end);
    const std::span<const std::byte> part =
        bytes.subspan(begin - offset, end - begin);
    if (part.size() == info.bytes) {
      KEDGE_RETURN_IF_ERROR(ParseRecord(incoming, *at, part));
      continue;
    }
    std::unique_ptr<std::byte[]> whole;
    {
      // Few records lie across pieces; their bytes are copied under the lock.
      const std::lock_guard lock(incoming->mutex);
      Incoming::Assembly& assembly = incoming->assemblies[*at];
      if (assembly.bytes == nullptr) {
        assembly.bytes.reset(new (std::nothrow) std::byte[info.bytes]);
        if (assembly.bytes == nullptr) {
          return absl::ResourceExhaustedError(
              absl::StrCat(WhereOf(delta.step(), info), ": no memory for its ",
                           info.bytes, " bytes"));
        }
      }
      std::memcpy(assembly.bytes.get() + (begin - info.offset), part.data(),
                  part.size());
      assembly.missing -= part.size();
      if (assembly.missing == 0) whole = std::move(assembly.bytes);
    }
    if (whole != nullptr) {
      KEDGE_RETURN_IF_ERROR(
          ParseRecord(incoming, *at, {whole.get(), info.bytes}));
    }
  }
  return absl::OkStatus();
}

absl::Status DeviceBackend::ParseRecord(Incoming* incoming, std::size_t record,
                                        std::span<const std::byte> bytes) {
  const DeviceDelta& delta = *incoming->delta;
  const DeltaRecord& info = delta.info(record);
  const struct ApplyRecord& entry = incoming->apply_records[record];
  const std::span<const BoxTarget> boxes(
      incoming->boxes.data() + entry.first_box, entry.box_count);
  const auto view = RecordView::Parse(bytes, entry.grid.TilesOf(entry.slice));
  if (!view.ok()) {
    return Annotate(view.status(), WhereOf(delta.step(), info));
  }
  const auto bad = [&](absl::string_view what, std::uint64_t expected,
                       std::uint64_t found) {
    return DataLoss({.where = WhereOf(delta.step(), info),
                     .what = what,
                     .expected = absl::StrCat(expected),
                     .found = absl::StrCat(found),
                     .advice = "run `kedge fsck`, or join from an anchor"});
  };
  if (view->nnz() != info.nnz) return bad("nnz", info.nnz, view->nnz());
  // Each listed tile has a change; the tables have no room for more of them.
  if (view->tiles().size() > info.nnz) {
    return bad("tile_count above nnz", info.nnz, view->tiles().size());
  }
  Incoming::Tiles& tiles = incoming->tiles[record];
  const bool all_needed =
      std::any_of(boxes.begin(), boxes.end(), [&](const BoxTarget& held) {
        return held.row_begin == 0 && held.row_end == entry.grid.rows &&
               held.col_begin == 0 && held.col_end == entry.grid.cols;
      });
  if (all_needed) tiles.needed.reserve(view->tiles().size());
  for (const TileView& tile : view->tiles()) {
    const bool needed = all_needed || [&] {
      const TileBox box = entry.grid.Box(tile.tile);
      return std::any_of(boxes.begin(), boxes.end(),
                         [&](const BoxTarget& held) {
                           return box.row < held.row_end &&
                                  held.row_begin < box.row + box.height &&
                                  box.col < held.col_end &&
                                  held.col_begin < box.col + box.width;
                         });
    }();
    if (!needed && !check_records_) continue;
    constexpr std::uint32_t kMost = std::numeric_limits<std::uint16_t>::max();
    if (tile.a > kMost || tile.b > kMost) {
      return bad(absl::StrCat("tile ", tile.tile, ": a or b"), kMost,
                 std::max(tile.a, tile.b));
    }
    ApplyTile out;
    out.payload =
        delta.records[record].payload +
        static_cast<std::uint64_t>(tile.payload.data() - bytes.data());
    out.tile = tile.tile;
    out.record = static_cast<std::uint32_t>(record);
    out.bytes = static_cast<std::uint32_t>(tile.payload.size());
    out.a = static_cast<std::uint16_t>(tile.a);
    out.b = static_cast<std::uint16_t>(tile.b);
    out.mode = static_cast<std::uint32_t>(tile.mode);
    (needed ? tiles.needed : tiles.others).push_back(out);
  }
  return absl::OkStatus();
}

// Copies what is appended to one place on the device, by way of ring slots.
class DeviceBackend::Uploader {
 public:
  Uploader(DeviceBackend* backend, const void* to)
      : backend_(backend),
        to_(static_cast<std::byte*>(const_cast<void*>(to))) {}

  template <typename T>
  absl::Status Append(const std::vector<T>& values) {
    std::span<const std::byte> bytes = std::as_bytes(std::span(values));
    while (!bytes.empty()) {
      if (!slot_) {
        KEDGE_ASSIGN_OR_RETURN(PinnedRing::Use next, backend_->ring_->Take());
        slot_.emplace(std::move(next));
      }
      const std::size_t part =
          std::min<std::size_t>(bytes.size(), kPieceBytes - filled_);
      std::memcpy((*slot_)->pinned.data() + filled_, bytes.data(), part);
      filled_ += part;
      bytes = bytes.subspan(part);
      if (filled_ == kPieceBytes) KEDGE_RETURN_IF_ERROR(Flush());
    }
    return absl::OkStatus();
  }
  absl::Status Flush() {
    if (!slot_) return absl::OkStatus();
    const absl::Status status = backend_->device_->Copy(
        to_, (*slot_)->pinned.data(), filled_, slot_->stream());
    to_ += filled_;
    filled_ = 0;
    slot_.reset();
    return status;
  }

 private:
  DeviceBackend* backend_;
  std::byte* to_;
  std::optional<PinnedRing::Use> slot_;
  std::uint64_t filled_ = 0;
};

absl::Status DeviceBackend::UploadTables(Incoming* incoming) {
  DeviceDelta& delta = *incoming->delta;
  Uploader tiles(this, delta.tiles);
  for (const Incoming::Tiles& of_record : incoming->tiles) {
    delta.needed_tiles += of_record.needed.size();
    KEDGE_RETURN_IF_ERROR(tiles.Append(of_record.needed));
  }
  delta.all_tiles = delta.needed_tiles;
  for (const Incoming::Tiles& of_record : incoming->tiles) {
    delta.all_tiles += of_record.others.size();
    KEDGE_RETURN_IF_ERROR(tiles.Append(of_record.others));
  }
  KEDGE_RETURN_IF_ERROR(tiles.Flush());
  Uploader records(this, delta.apply_records);
  KEDGE_RETURN_IF_ERROR(records.Append(incoming->apply_records));
  KEDGE_RETURN_IF_ERROR(records.Flush());
  Uploader boxes(this, delta.boxes);
  KEDGE_RETURN_IF_ERROR(boxes.Append(incoming->boxes));
  return boxes.Flush();
}

absl::Status DeviceBackend::CheckOnDevice(const DeviceDelta& delta) {
  ApplyBatch batch = delta.Batch();
  batch.mode = ApplyMode::kCheck;
  batch.tile_count = delta.all_tiles;
  batch.outcome = delta.check_outcome;
  batch.sums = reinterpret_cast<RecordSums*>(delta.check_outcome + 1);
  batch.l61 = {a_.as<const std::uint64_t>(), key_};
  KEDGE_RETURN_IF_ERROR(device_->Apply(batch, stage_stream_.get()));

  KEDGE_ASSIGN_OR_RETURN(const PinnedRing::Use slot, ring_->Take());
  const auto fetch = [&](const void* from, std::uint64_t bytes) {
    return WaitOut(
        device_, stage_stream_.get(),
        device_->Copy(slot->pinned.data(), from, bytes, stage_stream_.get()));
  };
  KEDGE_RETURN_IF_ERROR(fetch(delta.check_outcome, sizeof(ApplyOutcome)));
  const ApplyOutcome outcome = *slot->pinned.as<const ApplyOutcome>();
  if (outcome.fault != TileFault::kNone) return BadTile(delta, outcome);
  constexpr std::uint64_t kAtOnce = kPieceBytes / sizeof(RecordSums);
  for (std::uint64_t first = 0; first < delta.records.size();
       first += kAtOnce) {
    const std::uint64_t count =
        std::min<std::uint64_t>(kAtOnce, delta.records.size() - first);
    KEDGE_RETURN_IF_ERROR(
        fetch(batch.sums + first, count * sizeof(RecordSums)));
    const auto* sums = slot->pinned.as<const RecordSums>();
    for (std::uint64_t i = 0; i < count; ++i) {
      const DeltaRecord& info = delta.info(first + i);
      const bool nnz_is_wrong = sums[i].nnz != info.nnz;
      if (!nnz_is_wrong && sums[i].l61() == info.l61) continue;
      return DataLoss(
          {.where = WhereOf(delta.step(), info),
           .what = nnz_is_wrong ? "nnz" : "L(record)",
           .expected = nnz_is_wrong ? absl::StrCat(info.nnz) : Hex64(info.l61),
           .found =
               nnz_is_wrong ? absl::StrCat(sums[i].nnz) : Hex64(sums[i].l61()),
           .advice = "run `kedge fsck`, or join from an anchor"});
    }
  }
  return absl::OkStatus();
}

absl::Status DeviceBackend::BadTile(const DeviceDelta& delta,
                                    const ApplyOutcome& outcome) {
  std::string where = delta.step().path;
  std::string what = "a tile";
  // Only now does it matter which one it is.
  ApplyTile* const tile = host_outcomes_.as<ApplyTile>();
  static_assert(sizeof(ApplyTile) <= kMaxStaged * sizeof(ApplyOutcome));
  absl::Status read = absl::UnavailableError("no such tile");
  if (outcome.first_bad_tile < delta.all_tiles) {
    read = WaitOut(device_, stage_stream_.get(),
                   device_->Copy(tile, delta.tiles + outcome.first_bad_tile,
                                 sizeof(*tile), stage_stream_.get()));
  }
  if (read.ok() && tile->record < delta.records.size()) {
    const DeltaRecord& info = delta.info(tile->record);
    where = WhereOf(delta.step(), info);
    what = absl::StrCat(
        "tile ", tile->tile, " (payload at offset ",
        info.offset + (tile->payload - delta.records[tile->record].payload),
        ")");
  }
  return DataLoss({.where = where,
                   .what = absl::StrCat(what, ": ", FaultText(outcome.fault)),
                   .advice = "run `kedge fsck`, or join from an anchor"});
}

absl::Status DeviceBackend::Apply(const Binding&, const Deltas& deltas,
                                  ApplyCounts* counts) {
  KEDGE_CHECK(deltas.size() <= kMaxStaged);
  absl::Status status;
  for (std::size_t i = 0; i < deltas.size() && status.ok(); ++i) {
    const auto& delta = static_cast<const DeviceDelta&>(*deltas[i]);
    counts->records += delta.records.size();
    counts->nnz += delta.nnz;
    if (delta.needed_tiles == 0) continue;
    ApplyBatch batch = delta.Batch();
    batch.outcome = outcomes_.as<ApplyOutcome>() + i;
    status = device_->Apply(batch, stream_);
    if (!status.ok()) {
      status = Annotate(status, absl::StrCat(delta.step().path,
                                             ": its records were not applied"));
    }
  }
  if (status.ok() && !deltas.empty()) {
    status = device_->Copy(host_outcomes_.data(), outcomes_.data(),
                           deltas.size() * sizeof(ApplyOutcome), stream_);
  }
  // Also after an error: what was enqueued reads memory that is given back.
  KEDGE_RETURN_IF_ERROR(WaitOut(device_, stream_, status));
  for (std::size_t i = 0; i < deltas.size(); ++i) {
    const auto& delta = static_cast<const DeviceDelta&>(*deltas[i]);
    if (delta.needed_tiles == 0) continue;
    const ApplyOutcome outcome = host_outcomes_.as<const ApplyOutcome>()[i];
    if (outcome.fault != TileFault::kNone) return BadTile(delta, outcome);
    counts->units_written += outcome.units_written;
  }
  return absl::OkStatus();
}

// -------------------------------------------------------------------- anchors

absl::StatusOr<std::unique_ptr<AnchorLoad>> DeviceBackend::OpenAnchor(
    const Binding& binding, const TensorMask& mask,
    const PublishedAnchor& anchor) {
  KEDGE_ASSIGN_OR_RETURN(std::unique_ptr<AnchorLoad> load,
                         AnchorLoad::Open(context_, binding, mask, anchor));
  const auto pieces = load->all_pieces();
  const bool needs_bounce =
      std::any_of(pieces.begin(), pieces.end(), [&](const AnchorPiece& piece) {
        const auto& boxes = binding.weights().tensors[piece.tensor].boxes;
        return std::any_of(
            boxes.begin(), boxes.end(), [&](const BoxTarget& box) {
              return !IsContiguous(binding.grid(piece.tensor), box) &&
                     !TakesRows(box);
            });
      });
  if (needs_bounce) KEDGE_RETURN_IF_ERROR(part_ring_->AddBounce());
  return load;
}

absl::Status DeviceBackend::WritePiece(const Binding& binding,
                                       const AnchorPiece& piece,
                                       const std::byte* bytes,
                                       std::byte* bounce, DeviceStream stream,
                                       std::uint64_t* units) {
  const TileGrid& grid = binding.grid(piece.tensor);
  bool bounced = false;
  for (const BoxTarget& box : binding.weights().tensors[piece.tensor].boxes) {
    if (!Touches(grid, piece.units, box)) continue;
    const auto from = [&](std::uint64_t unit) {
      return bytes + (unit - piece.units.begin) * box.unit_bytes;
    };
    if (IsContiguous(grid, box)) {
      const std::uint64_t begin =
          std::max(piece.units.begin, box.row_begin * grid.cols);
      const std::uint64_t end =
          std::min(piece.units.end, box.row_end * grid.cols);
      *units += end - begin;
      KEDGE_RETURN_IF_ERROR(device_->Copy(
          box.data + (begin - box.row_begin * grid.cols) * box.unit_bytes,
          from(begin), (end - begin) * box.unit_bytes, stream));
      continue;
    }
    const bool rows = TakesRows(box);
    KEDGE_RETURN_IF_ERROR(VisitRowRuns(
        grid, piece.units, box, [&](const RowRun& run) -> absl::Status {
          *units += run.rows * run.cols;
          if (!rows) return absl::OkStatus();
          const std::uint64_t row_bytes = run.cols * box.unit_bytes;
          std::byte* const to = box.At(run.row, run.col);
          const std::byte* const first = from(run.row * grid.cols + run.col);
          if (run.rows == 1) return device_->Copy(to, first, row_bytes, stream);
          return device_->CopyRows(
              to, static_cast<std::uint64_t>(box.row_stride_bytes), first,
              grid.cols * box.unit_bytes, row_bytes, run.rows, stream);
        }));
    if (rows) continue;
    if (!bounced) {
      KEDGE_RETURN_IF_ERROR(device_->Copy(bounce, bytes, piece.bytes, stream));
      bounced = true;
    }
    KEDGE_RETURN_IF_ERROR(
        device_->CopySliceToBox(bounce, grid, piece.units, box, stream));
  }
  return absl::OkStatus();
}

absl::Status DeviceBackend::WritePart(const Binding& binding,
                                      std::span<const AnchorPiece> pieces,
                                      std::uint64_t begin, std::uint64_t end,
                                      const PinnedRing::Use& slot,
                                      std::uint64_t* units) {
  for (const AnchorPiece& piece : pieces) {
    const std::uint64_t from = std::max(piece.offset, begin);
    const std::uint64_t to = std::min(piece.offset + piece.bytes, end);
    if (from >= to) continue;
    // Pieces and parts begin at multiples of kSliceAlignment.
    const std::uint64_t unit_bytes =
        UnitBytes(binding.table()[piece.tensor].dtype);
    AnchorPiece part = piece;
    part.offset = from;
    part.bytes = to - from;
    part.units.begin = piece.units.begin + (from - piece.offset) / unit_bytes;
    part.units.end = part.units.begin + part.bytes / unit_bytes;
    std::byte* const bounce = slot->bounce.data() == nullptr
                                  ? nullptr
                                  : slot->bounce.data() + (from - begin);
    KEDGE_RETURN_IF_ERROR(WritePiece(binding, part,
                                     slot->pinned.data() + (from - begin),
                                     bounce, slot.stream(), units));
  }
  return absl::OkStatus();
}

// The buffers of one thread that writes an anchor, which take turns.
struct DeviceBackend::PartSlots {
  PinnedRing::Use& next() { return *uses[turn % kPartSlotsOfThread]; }

  std::optional<PinnedRing::Use> uses[kPartSlotsOfThread];
  std::size_t turn = 0;
};

absl::Status DeviceBackend::WriteRead(const Binding& binding, AnchorLoad* load,
                                      std::size_t read, PartSlots* slots,
                                      std::uint64_t* units) {
  const std::span<const AnchorPiece> pieces = load->pieces(read);
  std::vector<DataFiles::PieceSpan> spans;
  spans.reserve(pieces.size());
  for (const AnchorPiece& piece : pieces) {
    spans.push_back({piece.number, piece.offset, piece.bytes});
  }
  bool retried = false;
  const auto place = [&](std::uint64_t begin,
                         std::uint64_t) -> absl::StatusOr<std::byte*> {
    if (begin == pieces.front().offset) {
      *units = 0;
      // What the try before sent must not come after what this one sends.
      if (retried) {
        for (auto& use : slots->uses) KEDGE_RETURN_IF_ERROR(use->WaitForLast());
      }
      retried = true;
    }
    KEDGE_RETURN_IF_ERROR(slots->next().WaitForLast());
    return slots->next()->pinned.data();
  };
  const auto write = [&](std::uint64_t begin,
                         std::uint64_t end) -> absl::Status {
    PinnedRing::Use& slot = slots->next();
    ++slots->turn;
    KEDGE_RETURN_IF_ERROR(WritePart(binding, pieces, begin, end, slot, units));
    return slot.EndOne();
  };
  std::size_t bad = pieces.size();
  const absl::Status fetched = load->files().FetchParts(
      pieces.front().file, spans, kPartBytes, place, write, &bad);
  if (fetched.ok() || bad == pieces.size()) return fetched;
  return Annotate(
      fetched,
      absl::StrCat("tensor ", binding.table()[pieces[bad].tensor].name));
}

absl::Status DeviceBackend::WriteAnchor(const Binding& binding,
                                        AnchorLoad* load,
                                        std::uint64_t* units_written) {
  const auto threads =
      static_cast<std::size_t>(context_->io_pool->thread_count());
  std::atomic<std::uint64_t> written{0};
  std::atomic<std::size_t> next{0};
  std::atomic<bool> failed{false};
  const auto work = [&]() -> absl::Status {
    // There are as many slots as all threads take.
    PartSlots slots;
    for (auto& use : slots.uses) {
      KEDGE_ASSIGN_OR_RETURN(PinnedRing::Use taken, part_ring_->Take());
      use.emplace(std::move(taken));
    }
    while (!failed.load(std::memory_order_relaxed)) {
      const std::size_t i = next.fetch_add(1, std::memory_order_relaxed);
      if (i >= load->read_count()) break;
      // While this is hashed and copied, storage works on what comes next.
      if (i < threads) load->Expect(i);
      load->Expect(i + threads);
      std::uint64_t units = 0;
      const absl::Status read = WriteRead(binding, load, i, &slots, &units);
      if (!read.ok()) {
        failed.store(true, std::memory_order_relaxed);
        return read;
      }
      written.fetch_add(units, std::memory_order_relaxed);
    }
    return absl::OkStatus();
  };
  absl::Status status = part_ring_->StartAfter(stream_);
  if (status.ok()) {
    IoPool::Batch batch(context_->io_pool);
    for (std::size_t t = 0; t < std::min(threads, load->read_count()); ++t) {
      batch.Submit(work);
    }
    status = batch.Wait();
  }
  // Also after an error: weights are in flight.
  status.Update(part_ring_->WaitForAll());
  *units_written += written.load();
  return status;
}

}  // namespace

absl::StatusOr<std::unique_ptr<WeightBackend>> MakeDeviceBackend(
    Device* device, const BackendOptions& options, const ReadContext* context,
    const L61Key& key) {
  auto backend = std::make_unique<DeviceBackend>(device, options, context, key);
  KEDGE_RETURN_IF_ERROR(backend->Init(options.stream));
  return std::unique_ptr<WeightBackend>(std::move(backend));
}

}  // namespace kedge
