#include "kedge/bench/record_stage.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <limits>
#include <mutex>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kedge/bench/bench_device.h"
#include "kedge/engine/io/file_system.h"
#include "kedge/format/codec.h"
#include "kedge/format/layout.h"
#include "kedge/format/limits.h"
#include "kedge/format/status.h"

namespace kedge {
namespace {

bool Meet(const TileBox& tile, const BoxTarget& box) {
  return tile.row < box.row_end && tile.row + tile.height > box.row_begin &&
         tile.col < box.col_end && tile.col + tile.width > box.col_begin;
}

}  // namespace

absl::Status OnAllCores(
    std::uint64_t count,
    const std::function<absl::Status(std::uint64_t)>& body) {
  std::atomic<std::uint64_t> next{0};
  std::mutex mutex;
  absl::Status first;
  std::vector<std::thread> threads;
  const unsigned cores = std::max(1u, std::thread::hardware_concurrency());
  for (unsigned t = 0; t < cores; ++t) {
    threads.emplace_back([&] {
      for (std::uint64_t i = next++; i < count; i = next++) {
        absl::Status outcome = body(i);
        if (outcome.ok()) continue;
        const std::lock_guard lock(mutex);
        if (first.ok()) first = std::move(outcome);
        next = count;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return first;
}

absl::StatusOr<RecordStage> RecordStage::Make(
    Device* device, const PublishedStep& step, const L61Key& key,
    std::span<const BenchTarget> targets, DeviceStream stream) {
  RecordStage stage;
  stage.key_ = key;
  const StepManifest& manifest = step.manifest;
  std::vector<std::uint64_t> file_at;
  std::uint64_t bytes = 0;
  for (const DataFile& file : manifest.files) {
    file_at.push_back(bytes);
    bytes += file.bytes;
  }
  stage.bytes_.resize(bytes + kSegmentTailBytes);
  KEDGE_RETURN_IF_ERROR(
      OnAllCores(manifest.files.size(), [&](std::uint64_t f) -> absl::Status {
        const DataFile& info = manifest.files[f];
        KEDGE_ASSIGN_OR_RETURN(const std::unique_ptr<File> file,
                               PosixFileSystem()->OpenForRead(
                                   JoinPath(step.path, DataFileName(info.id))));
        return ReadAll(*file, 0,
                       std::span(stage.bytes_).subspan(file_at[f], info.bytes));
      }));

  std::vector<std::vector<BoxTarget>> boxes_of(step.table->size());
  for (const BenchTarget& target : targets) {
    boxes_of[target.tensor].push_back(target.box);
  }
  std::uint32_t last_tensor = std::numeric_limits<std::uint32_t>::max();
  for (std::uint32_t r = 0; r < manifest.records.size(); ++r) {
    const DeltaRecord& info = manifest.records[r];
    const std::vector<BoxTarget>& boxes = boxes_of[info.tensor];
    if (boxes.empty()) continue;
    const TensorSpec& tensor = (*step.table)[info.tensor];
    if (info.tensor != last_tensor) {
      stage.boxes_.insert(stage.boxes_.end(), boxes.begin(), boxes.end());
      last_tensor = info.tensor;
    }
    ApplyRecord record;
    record.grid = tensor.grid();
    record.slice = info.slice;
    record.unit_bytes = UnitBytes(tensor.dtype);
    record.first_box =
        static_cast<std::uint32_t>(stage.boxes_.size() - boxes.size());
    record.box_count = static_cast<std::uint32_t>(boxes.size());
    const std::uint64_t at = file_at[info.file] + info.offset;
    const auto record_bytes =
        std::span<const std::byte>(stage.bytes_).subspan(at, info.bytes);
    KEDGE_ASSIGN_OR_RETURN(
        const RecordView view,
        RecordView::Parse(record_bytes, record.grid.TilesOf(record.slice)));
    for (const TileView& tile : view.tiles()) {
      const TileBox box = record.grid.Box(tile.tile);
      if (std::none_of(boxes.begin(), boxes.end(),
                       [&](const BoxTarget& b) { return Meet(box, b); })) {
        continue;
      }
      ApplyTile entry;
      entry.payload = at + static_cast<std::uint64_t>(tile.payload.data() -
                                                      record_bytes.data());
      entry.tile = tile.tile;
      entry.record = static_cast<std::uint32_t>(stage.records_.size());
      entry.bytes = static_cast<std::uint32_t>(tile.payload.size());
      entry.a = static_cast<std::uint16_t>(tile.a);
      entry.b = static_cast<std::uint16_t>(tile.b);
      entry.mode = static_cast<std::uint32_t>(tile.mode);
      stage.tiles_.push_back(entry);
      stage.payload_bytes_ += entry.bytes;
    }
    stage.nnz_ += info.nnz;
    stage.records_.push_back(record);
    stage.record_of_.push_back(r);
  }
  stage.tile_count_ = stage.tiles_.size();

  const auto upload = [&](const auto& items) {
    return ToDevice(device, items.data(), items.size() * sizeof(items[0]), 16,
                    stream);
  };
  KEDGE_ASSIGN_OR_RETURN(stage.device_bytes_, upload(stage.bytes_));
  KEDGE_ASSIGN_OR_RETURN(stage.device_tiles_, upload(stage.tiles_));
  KEDGE_ASSIGN_OR_RETURN(stage.device_records_, upload(stage.records_));
  KEDGE_ASSIGN_OR_RETURN(stage.device_boxes_, upload(stage.boxes_));
  KEDGE_ASSIGN_OR_RETURN(stage.device_l61_, device->MakeL61Table(key));
  KEDGE_ASSIGN_OR_RETURN(
      stage.device_sums_,
      device->Allocate(MemoryKind::kDevice,
                       (stage.records_.size() + 1) * sizeof(RecordSums)));
  KEDGE_ASSIGN_OR_RETURN(
      stage.outcome_,
      device->Allocate(MemoryKind::kDevice, sizeof(ApplyOutcome)));
  return stage;
}

ApplyBatch RecordStage::BatchOf() const {
  ApplyBatch batch;
  batch.tiles = device_tiles_.as<const ApplyTile>();
  batch.tile_count = tile_count_;
  batch.records = device_records_.as<const ApplyRecord>();
  batch.record_count = static_cast<std::uint32_t>(records_.size());
  batch.boxes = device_boxes_.as<const BoxTarget>();
  batch.payloads = device_bytes_.data();
  batch.payload_bytes = bytes_.size();
  batch.outcome = outcome_.as<ApplyOutcome>();
  return batch;
}

absl::Status RecordStage::Apply(Device* device, DeviceStream stream) const {
  return device->Apply(BatchOf(), stream);
}

absl::StatusOr<ApplyOutcome> RecordStage::ReadOutcome(
    Device* device, DeviceStream stream) const {
  ApplyOutcome outcome;
  KEDGE_RETURN_IF_ERROR(
      device->Copy(&outcome, outcome_.data(), sizeof(outcome), stream));
  KEDGE_RETURN_IF_ERROR(device->WaitForStream(stream));
  if (outcome.fault != TileFault::kNone) {
    return absl::DataLossError(absl::StrCat("tile ", outcome.first_bad_tile,
                                            " of the batch: fault ",
                                            static_cast<int>(outcome.fault)));
  }
  return outcome;
}

absl::Status RecordStage::Check(Device* device, const PublishedStep& step,
                                DeviceStream stream) const {
  ApplyBatch batch = BatchOf();
  batch.mode = ApplyMode::kCheck;
  batch.sums = device_sums_.as<RecordSums>();
  batch.l61 = {device_l61_.as<const std::uint64_t>(), key_};
  KEDGE_RETURN_IF_ERROR(device->Apply(batch, stream));
  std::vector<RecordSums> sums(records_.size());
  KEDGE_RETURN_IF_ERROR(device->Copy(sums.data(), device_sums_.data(),
                                     sums.size() * sizeof(RecordSums), stream));
  KEDGE_RETURN_IF_ERROR(ReadOutcome(device, stream).status());
  for (std::size_t i = 0; i < sums.size(); ++i) {
    const DeltaRecord& info = step.manifest.records[record_of_[i]];
    if (sums[i].nnz == info.nnz && sums[i].l61() == info.l61) continue;
    return absl::DataLossError(
        absl::StrCat("record of tensor ", (*step.table)[info.tensor].name,
                     ": expected nnz ", info.nnz, " and L ", Hex64(info.l61),
                     ", found ", sums[i].nnz, " and ", Hex64(sums[i].l61())));
  }
  return absl::OkStatus();
}

absl::StatusOr<RecordStage::Decoded> RecordStage::Decode(
    Device* device, DeviceStream stream) const {
  struct Part {
    std::vector<ScatterRun> runs;
    std::vector<std::uint32_t> offsets;
    std::vector<std::int16_t> values;
  };
  constexpr std::uint64_t kTilesOfPart = 4096;
  std::vector<Part> parts((tiles_.size() + kTilesOfPart - 1) / kTilesOfPart);
  const absl::Status outcome =
      OnAllCores(parts.size(), [&](std::uint64_t p) -> absl::Status {
        Part& part = parts[p];
        std::vector<Change> changes;
        const std::uint64_t end =
            std::min<std::uint64_t>(tiles_.size(), (p + 1) * kTilesOfPart);
        for (std::uint64_t t = p * kTilesOfPart; t < end; ++t) {
          const ApplyTile& entry = tiles_[t];
          const ApplyRecord& record = records_[entry.record];
          const TileBox tile = record.grid.Box(entry.tile);
          TileView view;
          view.tile = entry.tile;
          view.mode = static_cast<TileMode>(entry.mode);
          view.a = entry.a;
          view.b = entry.b;
          view.payload = std::span<const std::byte>(bytes_).subspan(
              entry.payload, entry.bytes);
          KEDGE_RETURN_IF_ERROR(
              DecodeTile(view, tile.unit_count(), record.unit_bytes, &changes));
          for (std::uint32_t b = 0; b < record.box_count; ++b) {
            const BoxTarget& box = boxes_[record.first_box + b];
            if (!Meet(tile, box)) continue;
            ScatterRun run;
            run.base = box.At(std::max(tile.row, box.row_begin),
                              std::max(tile.col, box.col_begin));
            run.first = part.offsets.size();
            run.unit_bytes = record.unit_bytes;
            for (const Change& change : changes) {
              const std::uint64_t row = tile.row + change.index / tile.width;
              const std::uint64_t col = tile.col + change.index % tile.width;
              if (!box.Contains(row, col)) continue;
              part.offsets.push_back(static_cast<std::uint32_t>(
                  (box.At(row, col) - run.base) / record.unit_bytes));
              part.values.push_back(
                  static_cast<std::int16_t>(change.difference));
              ++run.count;
            }
            if (run.count != 0) part.runs.push_back(run);
          }
        }
        return absl::OkStatus();
      });
  KEDGE_RETURN_IF_ERROR(outcome);

  Decoded decoded;
  std::uint64_t run_count = 0;
  for (Part& part : parts) {
    for (ScatterRun& run : part.runs) run.first += decoded.count;
    decoded.count += part.offsets.size();
    run_count += part.runs.size();
  }
  KEDGE_ASSIGN_OR_RETURN(decoded.runs,
                         device->Allocate(MemoryKind::kDevice,
                                          run_count * sizeof(ScatterRun) + 16));
  KEDGE_ASSIGN_OR_RETURN(
      decoded.offsets,
      device->Allocate(MemoryKind::kDevice, decoded.count * 4 + 16));
  KEDGE_ASSIGN_OR_RETURN(
      decoded.values,
      device->Allocate(MemoryKind::kDevice, decoded.count * 2 + 16));
  std::uint64_t runs_at = 0;
  std::uint64_t changes_at = 0;
  for (const Part& part : parts) {
    const std::uint64_t n = part.offsets.size();
    KEDGE_RETURN_IF_ERROR(device->Copy(
        decoded.runs.data() + runs_at * sizeof(ScatterRun), part.runs.data(),
        part.runs.size() * sizeof(ScatterRun), stream));
    KEDGE_RETURN_IF_ERROR(device->Copy(decoded.offsets.data() + changes_at * 4,
                                       part.offsets.data(), n * 4, stream));
    KEDGE_RETURN_IF_ERROR(device->Copy(decoded.values.data() + changes_at * 2,
                                       part.values.data(), n * 2, stream));
    runs_at += part.runs.size();
    changes_at += n;
  }
  KEDGE_RETURN_IF_ERROR(device->WaitForStream(stream));
  decoded.batch.runs = decoded.runs.as<const ScatterRun>();
  decoded.batch.run_count = static_cast<std::uint32_t>(run_count);
  decoded.batch.offsets = decoded.offsets.as<const std::uint32_t>();
  decoded.batch.values = decoded.values.as<const std::int16_t>();
  return decoded;
}

}  // namespace kedge
