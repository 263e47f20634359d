#include "kedge/writer/device_snapshot_writer.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kedge/engine/io/io_pool.h"
#include "kedge/format/limits.h"
#include "kedge/format/status.h"
#include "kedge/writer/device_boxes.h"
#include "kedge/writer/device_delta.h"
#include "kedge/writer/device_source.h"
#include "kedge/writer/parameter_map.h"
#include "kedge/writer/snapshot_source.h"
#include "kedge/writer/table_agreement.h"

namespace kedge {
namespace {

constexpr std::uint32_t kMaxSlices = 4096;
constexpr std::uint64_t kMinChunkBytes = 4096;
constexpr std::uint64_t kMinRingBytes = std::uint64_t{256} << 10;
constexpr std::uint64_t kReadBytes = std::uint64_t{8} << 20;
constexpr std::uint64_t kSnapshotAlignment = 256;

}  // namespace

struct DeviceSnapshotWriter::Impl {
  // Memory that some tensors cover; what lies between them comes along.
  struct Extent {
    const std::byte* live = nullptr;
    std::uint64_t bytes = 0;
    std::uint64_t at = 0;  // in the snapshot
  };

  explicit Impl(DeviceSnapshotOptions snapshot_options)
      : options(std::move(snapshot_options)), device(options.device) {}

  absl::Status MapTensors();
  absl::StatusOr<StoreWriter::HeldPart> Bind(
      const WriterOptions& writer_options, const VersionState& version,
      const L61Summer& summer);
  absl::Status SumLive();
  // The snapshot becomes what memory holds.
  absl::Status TakeSnapshot();
  absl::Status Diff();
  absl::Status CheckUnchanged(std::uint64_t step) const;
  // Where the snapshot in host memory holds `tensor`, one of on_host.
  absl::StatusOr<TrainerTensor> InHostSnapshot(const TensorTable& table,
                                               const TrainerTensor& tensor);
  // `taken`: how the snapshot was.
  void WriteAnchor(const absl::Status& taken, PublishResult* result);
  void WaitForAnchor();

  DeviceSnapshotOptions options;
  Device* device;
  DeviceSnapshotMemory memory;
  std::vector<TrainerTensor> on_device;
  std::vector<TrainerTensor> on_host;
  std::vector<Extent> extents;
  std::optional<ParameterMap> map;
  std::vector<std::uint32_t> ordinals;  // by part
  std::vector<std::uint64_t> l61;       // by part: own S at held()
  std::vector<OwnedSlice> owned;
  std::unique_ptr<DeviceReader> reader;
  std::optional<DeviceSource> live;       // everything
  std::optional<DeviceSource> host_live;  // what the host compares
  std::optional<DeviceSource> published;  // what an anchor is written from
  std::unique_ptr<SnapshotSource> host_snapshot;
  DeviceMemory snapshot;
  std::unique_ptr<DeviceSums> sums;
  OwnedStream stream;
  std::unique_ptr<StoreWriter> writer;
  std::unique_ptr<StoreWriter::DeltaAttempt> attempt;
  std::unique_ptr<DeviceDelta> delta;  // its thread uses the rest

  // Anchors in the background; both null: there are none.
  std::unique_ptr<IoPool> anchor_thread;
  bool anchor_under_way = false;
  PublishResult anchored;           // of the last one; the thread's meanwhile
  std::vector<std::string> untold;  // for the next result's warnings
  std::optional<IoPool::Batch> anchor;  // last: waits for what uses the rest
};

absl::Status DeviceSnapshotWriter::Impl::MapTensors() {
  if (device == nullptr) {
    return absl::InvalidArgumentError("DeviceSnapshotOptions::device is null");
  }
  if (options.chunk_bytes < kMinChunkBytes ||
      options.ring_bytes < kMinRingBytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "DeviceSnapshotOptions: expected chunk_bytes of at least ",
        kMinChunkBytes, " and ring_bytes of at least ", kMinRingBytes,
        ", found ", options.chunk_bytes, " and ", options.ring_bytes));
  }
  KEDGE_RETURN_IF_ERROR(CheckTensors(options.tensors));
  struct Span {
    const std::byte* begin;
    const std::byte* end;
  };
  std::vector<Span> spans;
  for (const TrainerTensor& tensor : options.tensors) {
    std::uint64_t elements = 1;
    for (const std::uint64_t extent : tensor.shape) elements *= extent;
    if (tensor.shard) elements = tensor.shard->end - tensor.shard->begin;
    if (tensor.tied_to.empty() && elements > 0 &&
        device->IsDeviceMemory(tensor.data)) {
      const StridedPart part(tensor);
      if (part.ascends() && part.AlignedAt(tensor.data)) {
        const auto* const data = static_cast<const std::byte*>(tensor.data);
        spans.push_back({data, data + part.span_bytes()});
        on_device.push_back(tensor);
        continue;
      }
    }
    on_host.push_back(tensor);
  }
  std::sort(spans.begin(), spans.end(),
            [](const Span& a, const Span& b) { return a.begin < b.begin; });
  std::vector<ParameterSpan> parameters;
  const std::byte* end = nullptr;
  for (const Span& span : spans) {
    if (extents.empty() || span.begin >= end) {
      extents.push_back({span.begin, 0, 0});
      end = span.end;
    }
    end = std::max(end, span.end);
    extents.back().bytes =
        static_cast<std::uint64_t>(end - extents.back().live);
  }
  // The snapshot is aligned as the weights are.
  std::uint64_t at = 0;
  for (Extent& extent : extents) {
    extent.at =
        at + reinterpret_cast<std::uintptr_t>(extent.live) % kSnapshotAlignment;
    at = (extent.at + extent.bytes + kSnapshotAlignment - 1) /
         kSnapshotAlignment * kSnapshotAlignment;
    parameters.push_back({"device memory", extent.live, extent.bytes});
  }
  memory.snapshot_bytes = at;
  KEDGE_ASSIGN_OR_RETURN(map, ParameterMap::Make(parameters, on_device));
  return absl::OkStatus();
}

absl::Status DeviceSnapshotWriter::Impl::SumLive() {
  if (sums == nullptr) return absl::OkStatus();
  return WaitOut(device, stream.get(), sums->Enqueue(stream.get()));
}

absl::Status DeviceSnapshotWriter::Impl::TakeSnapshot() {
  absl::Status enqueued;
  for (const Extent& extent : extents) {
    if (!enqueued.ok()) break;
    enqueued = device->Copy(snapshot.data() + extent.at, extent.live,
                            extent.bytes, stream.get());
  }
  return WaitOut(device, stream.get(), enqueued);
}

absl::StatusOr<TrainerTensor> DeviceSnapshotWriter::Impl::InHostSnapshot(
    const TensorTable& table, const TrainerTensor& tensor) {
  KEDGE_ASSIGN_OR_RETURN(const std::uint32_t ordinal, table.Find(tensor.name));
  const ElementRange elements =
      tensor.shard.value_or(ElementRange{0, table[ordinal].element_count()});
  // Bytes of a tie or of nothing are not asked for.
  if (!tensor.tied_to.empty() || elements.begin == elements.end) return tensor;
  const std::uint64_t element_bytes = ElementBytes(tensor.dtype);
  KEDGE_ASSIGN_OR_RETURN(
      const auto bytes,
      host_snapshot->Read(ordinal, elements.begin * element_bytes,
                          (elements.end - elements.begin) * element_bytes,
                          /*scratch=*/nullptr));
  TrainerTensor copy = tensor;
  copy.data = bytes.data();
  copy.strides_bytes.clear();
  return copy;
}

absl::StatusOr<StoreWriter::HeldPart> DeviceSnapshotWriter::Impl::Bind(
    const WriterOptions& writer_options, const VersionState& version,
    const L61Summer& summer) {
  const TensorTable& table = *version.table;
  KEDGE_RETURN_IF_ERROR(MapTensors());
  KEDGE_ASSIGN_OR_RETURN(reader, DeviceReader::Create(device, kReadBytes));
  KEDGE_ASSIGN_OR_RETURN(
      live, DeviceSource::Bind(table, options.tensors,
                               OthersOf(writer_options.coordinator), *device,
                               reader.get()));
  KEDGE_ASSIGN_OR_RETURN(
      host_live,
      DeviceSource::Bind(table, on_host, MemorySource::Others::kHoldTheRest,
                         *device, reader.get()));
  owned = OwnedOf(table, *live);
  KEDGE_ASSIGN_OR_RETURN(stream, device->CreateStream());

  DeviceDeltaOptions delta_options;
  delta_options.device = device;
  delta_options.chunk_bytes = options.chunk_bytes;
  delta_options.ring_bytes = options.ring_bytes;
  delta_options.max_slices = kMaxSlices;
  delta_options.max_tiles =
      4 * (options.chunk_bytes / kTileUnits) + 2 * kMaxSlices;
  delta_options.key = summer.key();
  delta_options.sum_count = map->parts().size();
  delta_options.deadline = options.deadline;
  std::vector<SumBox> boxes;
  for (std::uint32_t p = 0; p < map->parts().size(); ++p) {
    const MappedPart& mapped = map->parts()[p];
    delta_options.max_tiles =
        std::max(delta_options.max_tiles, mapped.part.grid().tiles_per_band);
    KEDGE_ASSIGN_OR_RETURN(const std::uint32_t ordinal,
                           table.Find(on_device[mapped.tensor].name));
    ordinals.push_back(ordinal);
    AddBoxes(mapped.part, extents[mapped.parameter].live + mapped.begin, p,
             &boxes);
  }
  if (!boxes.empty()) {
    KEDGE_ASSIGN_OR_RETURN(
        sums, device->PrepareSums(
                  boxes, static_cast<std::uint32_t>(map->parts().size()),
                  summer.key()));
  }
  KEDGE_ASSIGN_OR_RETURN(delta, DeviceDelta::Create(delta_options));
  KEDGE_ASSIGN_OR_RETURN(
      snapshot, device->Allocate(options.snapshot, memory.snapshot_bytes));
  memory.device_bytes = delta->device_bytes();
  memory.pinned_bytes = delta->pinned_bytes() + reader->pinned_bytes();
  (options.snapshot == MemoryKind::kDevice ? memory.device_bytes
                                           : memory.pinned_bytes) +=
      memory.snapshot_bytes;

  KEDGE_RETURN_IF_ERROR(TakeSnapshot());
  KEDGE_RETURN_IF_ERROR(SumLive());
  StoreWriter::HeldPart held;
  KEDGE_ASSIGN_OR_RETURN(
      host_snapshot, SnapshotSource::Copy(table, *host_live, &summer, &held));
  memory.host_bytes = host_snapshot->total_bytes();
  for (std::size_t p = 0; p < ordinals.size(); ++p) {
    l61.push_back(sums->residues()[p]);
    std::uint64_t& sum = held.l61[ordinals[p]];
    sum = L61Add(sum, l61[p]);
  }
  held.owned = owned;

  // A snapshot in host memory spares an anchor the way over the device, and
  // holds still when the trainer goes on.
  std::vector<TrainerTensor> sources = options.tensors;
  if (options.snapshot == MemoryKind::kPinned) {
    sources.clear();
    for (const TrainerTensor& tensor : on_host) {
      KEDGE_ASSIGN_OR_RETURN(TrainerTensor copy, InHostSnapshot(table, tensor));
      sources.push_back(std::move(copy));
    }
    for (const MappedPart& mapped : map->parts()) {
      sources.push_back(on_device[mapped.tensor]);
      sources.back().data =
          snapshot.data() + extents[mapped.parameter].at + mapped.begin;
    }
    if (options.anchors_in_background) {
      anchor_thread = std::make_unique<IoPool>(1);
      anchor.emplace(anchor_thread.get());
    }
  }
  KEDGE_ASSIGN_OR_RETURN(
      published,
      DeviceSource::Bind(table, sources, OthersOf(writer_options.coordinator),
                         *device, reader.get()));
  return held;
}

// Every chunk through the device.
absl::Status DeviceSnapshotWriter::Impl::Diff() {
  for (std::uint32_t e = 0; e < extents.size(); ++e) {
    const Extent& extent = extents[e];
    for (std::uint64_t at = 0; at < extent.bytes;) {
      std::uint64_t end = extent.bytes - at <= options.chunk_bytes
                              ? extent.bytes
                              : map->CutAtOrBelow(e, at + options.chunk_bytes);
      KEDGE_ASSIGN_OR_RETURN(DeviceDelta::Slot* const slot,
                             delta->WaitForSlot(end - at, extent.live + at));
      const bool copies = options.snapshot == MemoryKind::kPinned;
      std::byte* const before = snapshot.data() + extent.at + at;
      const std::byte* const old_at = copies ? slot->bytes : before;
      const std::byte* const new_at = extent.live + at;
      for (bool fits = false; !fits;) {
        slot->Clear();
        fits = true;
        map->ForEachRun(e, at, end, old_at,
                        [&](std::uint32_t p, const UnitRange& units,
                            const StridedUnits& source) {
                          StridedUnits new_units = source;
                          new_units.base = new_at + (source.base - old_at);
                          fits = delta->AddSlice(map->parts()[p].part.grid(),
                                                 units, source, new_units,
                                                 {ordinals[p], p},
                                                 /*kept=*/true, slot);
                          return fits;
                        });
        if (fits) break;
        const std::uint64_t half = map->CutAtOrBelow(e, at + (end - at) / 2);
        KEDGE_CHECK(half > at);
        end = half;
      }
      const absl::Status filled = [&]() -> absl::Status {
        KEDGE_RETURN_IF_ERROR(delta->Upload(*slot, stream.get()));
        if (copies) {
          KEDGE_RETURN_IF_ERROR(
              device->Copy(slot->bytes, before, end - at, stream.get()));
        }
        return device->Record(slot->arrived, stream.get());
      }();
      if (!filled.ok()) WaitOut(device, stream.get()).IgnoreError();
      delta->Submit(filled.ok(), filled);
      at = end;
    }
  }
  return delta->WaitForAll();
}

// Whether memory still holds what was compared.
absl::Status DeviceSnapshotWriter::Impl::CheckUnchanged(
    std::uint64_t step) const {
  for (std::size_t p = 0; p < ordinals.size(); ++p) {
    const std::uint64_t expected = L61Add(l61[p], delta->sums()[p]);
    const std::uint64_t found = sums->residues()[p];
    if (found == expected) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "v", step, ": tensor \"", on_device[map->parts()[p].tensor].name,
        "\": changed while it was published: L61: expected ", Hex64(expected),
        ", found ", Hex64(found),
        "; publish when the optimizer's work has run, and before it goes on"));
  }
  return absl::OkStatus();
}

void DeviceSnapshotWriter::Impl::WriteAnchor(const absl::Status& taken,
                                             PublishResult* result) {
  if (taken.ok() || options.snapshot == MemoryKind::kDevice) {
    result->anchor_status = writer->AddAnchor(*published, result);
  } else {
    // It would be read from a snapshot that may still be written. The other
    // ranks hear why there is none.
    result->anchor_status = writer->CommitAnchor(
        writer->BeginAnchor(writer->held().step, owned, /*root=*/false), taken,
        result);
  }
  writer->Retain(result);
}

void DeviceSnapshotWriter::Impl::WaitForAnchor() {
  if (!anchor_under_way) return;
  anchor->Wait().IgnoreError();  // `anchored` says more
  anchor_under_way = false;
  if (!anchored.anchor_status.ok()) {
    untold.push_back(absl::StrCat("v", anchored.version.step,
                                  " is published, but its anchor is not: ",
                                  anchored.anchor_status.message()));
  }
  untold.insert(untold.end(), anchored.warnings.begin(),
                anchored.warnings.end());
}

DeviceSnapshotWriter::DeviceSnapshotWriter(std::unique_ptr<Impl> impl)
    : impl_(std::move(impl)) {}
DeviceSnapshotWriter::~DeviceSnapshotWriter() = default;

absl::StatusOr<std::unique_ptr<DeviceSnapshotWriter>>
DeviceSnapshotWriter::Create(const WriterOptions& writer,
                             const InitOptions& init,
                             DeviceSnapshotOptions options) {
  {
    Impl plan(options);
    KEDGE_ASSIGN_OR_RETURN(
        const TensorTable table,
        AgreeOnTable(writer.coordinator, options.tensors, plan.MapTensors()));
    if (table.size() == 0) {
      return absl::InvalidArgumentError(
          absl::StrCat(writer.store_path,
                       ": expected the tensors of a model, found none; pass "
                       "the trainer's tensors"));
    }
    std::unique_ptr<DeviceReader> reader;
    auto source = [&]() -> absl::StatusOr<DeviceSource> {
      KEDGE_ASSIGN_OR_RETURN(reader,
                             DeviceReader::Create(options.device, kReadBytes));
      return DeviceSource::Bind(table, options.tensors,
                                OthersOf(writer.coordinator), *options.device,
                                reader.get());
    }();
    KEDGE_RETURN_IF_ERROR(AgreeThatAllCould(
        writer.coordinator, "reading v0's weights", source.status()));
    KEDGE_RETURN_IF_ERROR(InitStore(writer, init, table, *source));
  }
  return Open(writer, std::move(options));
}

absl::StatusOr<std::unique_ptr<DeviceSnapshotWriter>>
DeviceSnapshotWriter::Open(const WriterOptions& writer,
                           DeviceSnapshotOptions options,
                           std::optional<std::uint64_t> resume_step) {
  auto impl = std::make_unique<Impl>(std::move(options));
  KEDGE_ASSIGN_OR_RETURN(
      impl->writer,
      StoreWriter::Open(
          writer, resume_step,
          [&](const VersionState& state, const L61Summer& summer) {
            return impl->Bind(writer, state, summer);
          }));
  return std::unique_ptr<DeviceSnapshotWriter>(
      new DeviceSnapshotWriter(std::move(impl)));
}

absl::StatusOr<PublishResult> DeviceSnapshotWriter::Publish(
    std::uint64_t step, const PublishOptions& options) {
  Impl& impl = *impl_;
  impl.WaitForAnchor();
  KEDGE_RETURN_IF_ERROR(impl.writer->CheckUsable());
  KEDGE_RETURN_IF_ERROR(impl.delta->WaitUntilIdle());
  impl.attempt = impl.writer->BeginDelta(step);
  impl.delta->BeginStep(impl.attempt.get(), impl.writer->encode_pool());
  KeptRecords kept;
  const absl::Status written = [&]() -> absl::Status {
    KEDGE_RETURN_IF_ERROR(impl.Diff());
    if (impl.sums != nullptr) {
      const absl::Status enqueued = impl.sums->Enqueue(impl.stream.get());
      if (!enqueued.ok()) {
        return WaitOut(impl.device, impl.stream.get(), enqueued);
      }
    }
    const absl::Status drained = impl.delta->Drain(impl.attempt.get());
    KEDGE_RETURN_IF_ERROR(WaitOut(impl.device, impl.stream.get(), drained));
    KEDGE_RETURN_IF_ERROR(impl.CheckUnchanged(step));
    return impl.writer
        ->Encode(*impl.attempt, *impl.host_snapshot, *impl.host_live,
                 kept.sink())
        .status();
  }();
  // Nothing goes on into an attempt that is given up.
  KEDGE_RETURN_IF_ERROR(impl.delta->WaitUntilIdle());
  KEDGE_ASSIGN_OR_RETURN(
      PublishResult result,
      impl.writer->CommitDelta(std::move(impl.attempt), written, impl.owned,
                               options.metadata));
  kept.ApplyTo(impl.writer->table(), impl.host_snapshot.get());
  for (std::size_t p = 0; p < impl.l61.size(); ++p) {
    impl.l61[p] = L61Add(impl.l61[p], impl.delta->sums()[p]);
  }
  // The version stands; a snapshot that does not follow would be noticed by the
  // next publish, whose sums then do not fit.
  const absl::Status taken = impl.TakeSnapshot();
  if (!taken.ok()) {
    result.warnings.push_back(absl::StrCat(
        "v", step, " is published, but its snapshot was not taken: ",
        taken.message(), "; open the writer again"));
  }
  result.warnings.insert(result.warnings.end(), impl.untold.begin(),
                         impl.untold.end());
  impl.untold.clear();
  if (!options.anchor) {
    impl.writer->Retain(&result);
  } else if (!impl.anchor) {
    impl.WriteAnchor(taken, &result);
  } else {
    result.anchor_under_way = true;
    impl.anchored = PublishResult();
    impl.anchored.version = result.version;
    impl.anchor_under_way = true;
    impl.anchor->Submit([&impl, taken] {
      impl.WriteAnchor(taken, &impl.anchored);
      return absl::OkStatus();
    });
  }
  return result;
}

absl::Status DeviceSnapshotWriter::WaitForAnchor(PublishResult* result) {
  impl_->WaitForAnchor();
  const PublishResult& anchored = impl_->anchored;
  if (result != nullptr && result->anchor_under_way &&
      result->version == anchored.version) {
    result->anchor_status = anchored.anchor_status;
    result->anchor_bytes = anchored.anchor_bytes;
    result->anchor_seconds = anchored.anchor_seconds;
    result->anchor_under_way = false;
  }
  return anchored.anchor_status;
}

const VersionId& DeviceSnapshotWriter::held() const {
  return impl_->writer->held();
}
const StoreWriter& DeviceSnapshotWriter::store_writer() const {
  return *impl_->writer;
}
const DeviceSnapshotMemory& DeviceSnapshotWriter::memory() const {
  return impl_->memory;
}

}  // namespace kedge
