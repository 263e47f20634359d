#include "kedge/writer/device_source.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kedge/format/status.h"

namespace kedge {

absl::StatusOr<std::unique_ptr<DeviceReader>> DeviceReader::Create(
    Device* device, std::uint64_t buffer_bytes) {
  auto reader = std::unique_ptr<DeviceReader>(new DeviceReader(device));
  KEDGE_ASSIGN_OR_RETURN(reader->stream_, device->CreateStream());
  KEDGE_ASSIGN_OR_RETURN(reader->buffer_,
                         device->Allocate(MemoryKind::kPinned, buffer_bytes));
  return reader;
}

absl::Status DeviceReader::Fetch(const std::byte* from, std::uint64_t bytes) {
  return WaitOut(device_, stream_.get(),
                 device_->Copy(buffer_.data(), from, bytes, stream_.get()));
}

absl::Status DeviceReader::Read(const std::byte* from, std::uint64_t bytes,
                                std::byte* out) {
  const std::lock_guard<std::mutex> lock(mutex_);
  while (bytes > 0) {
    const std::uint64_t take = std::min(bytes, buffer_.bytes());
    KEDGE_RETURN_IF_ERROR(Fetch(from, take));
    std::memcpy(out, buffer_.data(), take);
    from += take;
    out += take;
    bytes -= take;
  }
  return absl::OkStatus();
}

absl::Status DeviceReader::Gather(const StridedPart& part,
                                  const std::byte* data, std::uint64_t begin,
                                  std::uint64_t end, std::byte* out) {
  const std::uint64_t element_bytes = part.element_bytes();
  if (part.contiguous()) {
    return Read(data + part.Offset(begin), (end - begin) * element_bytes, out);
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  while (begin < end) {
    const std::byte* const first = data + part.Offset(begin);
    if (!part.ascends()) {
      // The elements of one run side by side.
      const StridedPart::Run run = part.RunFrom(begin, end, first);
      const std::uint64_t cols = part.grid().cols / run.units.units_per_element;
      const std::uint64_t col =
          part.UnitsOf(begin, begin).begin / run.units.units_per_element % cols;
      const std::uint64_t count = std::min(
          {run.end - begin, cols - col, buffer_.bytes() / element_bytes});
      absl::Status enqueued;
      if (run.units.col_stride_bytes >=
          static_cast<std::int64_t>(element_bytes)) {
        enqueued = device_->CopyRows(
            buffer_.data(), element_bytes, first,
            static_cast<std::uint64_t>(run.units.col_stride_bytes),
            element_bytes, count, stream_.get());
      } else {
        for (std::uint64_t i = 0; i < count && enqueued.ok(); ++i) {
          enqueued = device_->Copy(
              buffer_.data() + i * element_bytes,
              first + static_cast<std::int64_t>(i) * run.units.col_stride_bytes,
              element_bytes, stream_.get());
        }
      }
      KEDGE_RETURN_IF_ERROR(WaitOut(device_, stream_.get(), enqueued));
      std::memcpy(out, buffer_.data(), count * element_bytes);
      out += count * element_bytes;
      begin += count;
      continue;
    }
    // All memory from the first element to the last one that fits.
    const auto offset = static_cast<std::uint64_t>(part.Offset(begin));
    std::uint64_t last =
        std::min(end, part.CountBelow(offset + buffer_.bytes()));
    const auto span_to = [&](std::uint64_t element) {
      return static_cast<std::uint64_t>(part.Offset(element - 1)) +
             element_bytes - offset;
    };
    if (span_to(last) > buffer_.bytes()) --last;
    KEDGE_RETURN_IF_ERROR(Fetch(first, span_to(last)));
    for (std::uint64_t element = begin; element < last;) {
      const StridedPart::Run run = part.RunFrom(
          element, last,
          buffer_.data() +
              (static_cast<std::uint64_t>(part.Offset(element)) - offset));
      const UnitRange units = part.UnitsOf(element, run.end);
      const std::uint64_t cols = part.grid().cols;
      const std::uint32_t step = run.units.units_per_element;
      for (std::uint64_t unit = units.begin; unit < units.end;) {
        const std::uint64_t row = unit / cols;
        const std::uint64_t row_end = std::min(units.end, (row + 1) * cols);
        const std::uint64_t col = unit - row * cols;
        if (run.units.col_stride_bytes ==
            static_cast<std::int64_t>(element_bytes)) {
          const std::uint64_t bytes = (row_end - unit) * run.units.unit_bytes;
          std::memcpy(out, run.units.At(row, col), bytes);
          out += bytes;
        } else {
          for (std::uint64_t i = 0; i < row_end - unit; i += step) {
            std::memcpy(out, run.units.At(row, col + i), element_bytes);
            out += element_bytes;
          }
        }
        unit = row_end;
      }
      element = run.end;
    }
    begin = last;
  }
  return absl::OkStatus();
}

absl::StatusOr<DeviceSource> DeviceSource::Bind(
    const TensorTable& table, std::span<const TrainerTensor> tensors,
    MemorySource::Others others, const Device& device, DeviceReader* reader) {
  KEDGE_ASSIGN_OR_RETURN(MemorySource memory,
                         MemorySource::Bind(table, tensors, others));
  DeviceSource source(std::move(memory), reader);
  source.parts_.resize(table.size());
  for (const TrainerTensor& tensor : tensors) {
    if (!tensor.tied_to.empty()) continue;
    KEDGE_ASSIGN_OR_RETURN(const std::uint32_t ordinal,
                           table.Find(tensor.name));
    std::uint64_t elements = table[ordinal].element_count();
    if (tensor.shard) elements = tensor.shard->end - tensor.shard->begin;
    if (elements == 0) continue;
    if (!device.IsDeviceMemory(tensor.data)) {
      if (device.IsHostMemory(tensor.data)) continue;
      return absl::InvalidArgumentError(
          absl::StrCat("tensor \"", tensor.name,
                       "\" lies in the memory of another device; "
                       "expected memory of ",
                       device.name(), " or of the host"));
    }
    source.parts_[ordinal].push_back(
        {static_cast<const std::byte*>(tensor.data), StridedPart(tensor)});
  }
  for (auto& parts : source.parts_) {
    std::sort(parts.begin(), parts.end(), [](const Part& a, const Part& b) {
      return a.part.units().begin < b.part.units().begin;
    });
  }
  return source;
}

absl::StatusOr<std::span<const std::byte>> DeviceSource::Read(
    std::uint32_t ordinal, std::uint64_t byte_begin, std::uint64_t byte_count,
    std::vector<std::byte>* scratch) {
  for (const Part& part : parts_[ordinal]) {
    const UnitRange units = part.part.units();
    const std::uint64_t element_bytes = part.part.element_bytes();
    const std::uint64_t unit_bytes =
        element_bytes > 4 ? element_bytes / 2 : element_bytes;
    if (byte_begin >= units.end * unit_bytes ||
        byte_begin < units.begin * unit_bytes) {
      continue;
    }
    scratch->resize(byte_count);
    const std::uint64_t first =
        (byte_begin - units.begin * unit_bytes) / element_bytes;
    KEDGE_RETURN_IF_ERROR(reader_->Gather(part.part, part.data, first,
                                          first + byte_count / element_bytes,
                                          scratch->data()));
    return std::span<const std::byte>(*scratch).first(byte_count);
  }
  return memory_.Read(ordinal, byte_begin, byte_count, scratch);
}

}  // namespace kedge
