#include "kedge/writer/quantised_source.h"

#include <algorithm>
#include <cstring>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kedge/format/fp8.h"
#include "kedge/format/status.h"

namespace kedge {
namespace {

// Values that are made at once, if they are more than a row of blocks.
constexpr std::uint64_t kScratchValues = std::uint64_t{8} << 20;

}  // namespace

std::uint64_t QuantisedPart::block_cols() const {
  return (cols + kFp8BlockExtent - 1) / kFp8BlockExtent;
}
std::uint64_t QuantisedPart::block_rows() const {
  return (rows + kFp8BlockExtent - 1) / kFp8BlockExtent;
}

absl::StatusOr<std::unique_ptr<QuantisedSource>> QuantisedSource::Create(
    Device* device, DeviceReader* reader, std::vector<QuantisedPart> parts) {
  std::sort(parts.begin(), parts.end(),
            [](const QuantisedPart& a, const QuantisedPart& b) {
              return std::tie(a.values, a.first_row) <
                     std::tie(b.values, b.first_row);
            });
  std::uint64_t values = 0;
  std::uint64_t scales = 0;
  for (const QuantisedPart& part : parts) {
    const std::uint64_t block_row = part.cols * kFp8BlockExtent;
    const std::uint64_t most =
        std::min(part.rows * part.cols, std::max(kScratchValues, block_row));
    values = std::max(values, most);
    scales = std::max(
        scales, (most / block_row + 1) * part.block_cols() * sizeof(float));
  }
  auto source = std::unique_ptr<QuantisedSource>(
      new QuantisedSource(device, reader, std::move(parts)));
  if (source->parts_.empty()) return source;
  constexpr auto kDevice = MemoryKind::kDevice;
  KEDGE_ASSIGN_OR_RETURN(source->stream_, device->CreateStream());
  KEDGE_ASSIGN_OR_RETURN(source->values_, device->Allocate(kDevice, values));
  KEDGE_ASSIGN_OR_RETURN(source->scales_, device->Allocate(kDevice, scales));
  KEDGE_ASSIGN_OR_RETURN(source->task_,
                         device->Allocate(kDevice, sizeof(QuantiseTask)));
  KEDGE_ASSIGN_OR_RETURN(source->bad_,
                         device->Allocate(kDevice, sizeof(std::uint64_t)));
  KEDGE_ASSIGN_OR_RETURN(source->pinned_,
                         device->Allocate(MemoryKind::kPinned, sizeof(Pinned)));
  return source;
}

std::optional<std::vector<UnitRange>> QuantisedSource::Owned(
    std::uint32_t ordinal) const {
  std::vector<UnitRange> ranges;
  for (const QuantisedPart& part : parts_) {
    if (part.values == ordinal) {
      ranges.push_back({part.first_row * part.cols,
                        (part.first_row + part.rows) * part.cols});
    } else if (part.scales == ordinal) {
      const std::uint64_t first = part.first_row / kFp8BlockExtent;
      ranges.push_back({first * part.block_cols(),
                        (first + part.block_rows()) * part.block_cols()});
    }
  }
  return ranges;
}

absl::Status QuantisedSource::Quantise(const QuantisedPart& part,
                                       std::uint64_t begin,
                                       std::uint64_t count) {
  auto* const pinned = new (pinned_.data()) Pinned;
  QuantiseTask& task = pinned->task;
  task = QuantiseTask();
  task.source = part.data + begin * part.cols * 2;
  task.source_row_stride_bytes = static_cast<std::int64_t>(part.cols * 2);
  task.rows = count;
  task.cols = part.cols;
  task.values = values_.data();
  task.scales = scales_.as<float>();
  const DeviceStream stream = stream_.get();
  QuantiseBatch batch;
  batch.tasks = task_.as<QuantiseTask>();
  batch.task_count = 1;
  batch.block_count =
      (count + kFp8BlockExtent - 1) / kFp8BlockExtent * part.block_cols();
  batch.scale_kind = part.scale_kind;
  batch.floor = part.floor;
  batch.first_bad_block = bad_.as<std::uint64_t>();
  const absl::Status enqueued = [&]() -> absl::Status {
    KEDGE_RETURN_IF_ERROR(
        device_->Copy(task_.data(), &task, sizeof(task), stream));
    KEDGE_RETURN_IF_ERROR(device_->Quantise(batch, stream));
    return device_->Copy(&pinned->bad_block, bad_.data(), sizeof(std::uint64_t),
                         stream);
  }();
  // Also after an error: the trainer's weights are being read.
  KEDGE_RETURN_IF_ERROR(WaitOut(device_, stream, enqueued));
  if (pinned->bad_block == ~std::uint64_t{0}) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "tensor \"", part.name, "\": a NaN or an infinity among rows [",
      part.first_row + begin, ", ", part.first_row + begin + count,
      "), which an fp8 scale cannot express"));
}

absl::StatusOr<std::span<const std::byte>> QuantisedSource::Read(
    std::uint32_t ordinal, std::uint64_t byte_begin, std::uint64_t byte_count,
    std::vector<std::byte>* scratch) {
  const std::lock_guard<std::mutex> lock(mutex_);
  scratch->resize(byte_count);
  for (const QuantisedPart& part : parts_) {
    if (part.values != ordinal && part.scales != ordinal) continue;
    const bool is_values = part.values == ordinal;
    // Bytes of a row of blocks, and of the part.
    const std::uint64_t row_bytes =
        is_values ? part.cols * kFp8BlockExtent : part.block_cols() * 4;
    const std::uint64_t part_begin =
        part.first_row / kFp8BlockExtent * row_bytes;
    const std::uint64_t part_bytes =
        is_values ? part.rows * part.cols : part.block_rows() * row_bytes;
    if (byte_begin < part_begin || byte_begin - part_begin >= part_bytes) {
      continue;
    }
    const std::uint64_t begin = byte_begin - part_begin;
    const std::uint64_t end = begin + byte_count;
    const std::uint64_t rows_at_once = std::max<std::uint64_t>(
        values_.bytes() / (part.cols * kFp8BlockExtent), 1);
    for (std::uint64_t at = begin; at < end;) {
      const std::uint64_t row = at / row_bytes;
      const std::uint64_t rows_end =
          std::min((row + rows_at_once) * kFp8BlockExtent, part.rows);
      KEDGE_RETURN_IF_ERROR(Quantise(part, row * kFp8BlockExtent,
                                     rows_end - row * kFp8BlockExtent));
      const std::uint64_t made =
          std::min((row + rows_at_once) * row_bytes, part_bytes);
      const std::uint64_t take = std::min(made, end) - at;
      const std::byte* const from =
          (is_values ? values_.data() : scales_.data()) +
          (at - row * row_bytes);
      KEDGE_RETURN_IF_ERROR(
          reader_->Read(from, take, scratch->data() + (at - begin)));
      at += take;
    }
    return std::span<const std::byte>(*scratch).first(byte_count);
  }
  return absl::InternalError("a quantised range that is not here was read");
}

}  // namespace kedge
