#include "kedge/examples/offload_trainer/reference_state.h"

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kedge/format/l61.h"
#include "kedge/format/status.h"
#include "nlohmann/json.hpp"

namespace kedge::example {
namespace {

// As safetensors files spell them; the others do not occur here.
const char* SafetensorsName(DType dtype) {
  switch (dtype) {
    case DType::kBf16:
      return "BF16";
    case DType::kF32:
      return "F32";
    case DType::kF8E4M3:
      return "F8_E4M3";
    default:
      return "U8";
  }
}

}  // namespace

void ReferenceState::Add(const std::string& name, DType dtype,
                         std::span<const std::uint64_t> shape,
                         std::uint64_t offset, std::span<const std::byte> bytes,
                         const L61Summer& summer) {
  const std::uint64_t l61 = summer.Sum(offset, bytes);
  const std::lock_guard<std::mutex> lock(mutex_);
  Tensor& tensor = tensors_[name];
  if (tensor.total_bytes == 0) {
    tensor.dtype = dtype;
    tensor.shape.assign(shape.begin(), shape.end());
    tensor.total_bytes = ElementBytes(dtype);
    for (const std::uint64_t extent : shape) tensor.total_bytes *= extent;
    if (keep_bytes_) tensor.bytes.resize(tensor.total_bytes);
  }
  tensor.added_bytes += bytes.size();
  tensor.l61 = L61Add(tensor.l61, l61);
  if (keep_bytes_) {
    std::memcpy(tensor.bytes.data() + offset, bytes.data(), bytes.size());
  }
}

absl::Status ReferenceState::CompareWith(const TensorTable& table,
                                         std::span<const std::uint64_t> l61) {
  constexpr int kNamed = 5;
  const std::lock_guard<std::mutex> lock(mutex_);
  std::string named;
  int count = 0;
  const auto complain = [&](const std::string& what) {
    if (count++ < kNamed)
      absl::StrAppend(&named, named.empty() ? "" : "; ", what);
  };
  std::size_t found = 0;
  for (std::size_t i = 0; i < table.size(); ++i) {
    const auto at = tensors_.find(table[i].name);
    if (at == tensors_.end()) {
      complain(absl::StrCat(table[i].name, ": no trainer rank has it"));
      continue;
    }
    ++found;
    const Tensor& tensor = at->second;
    if (tensor.added_bytes != table[i].byte_count()) {
      complain(absl::StrCat(table[i].name, ": bytes: expected ",
                            table[i].byte_count(), ", found ",
                            tensor.added_bytes, " in the ranks' masters"));
    } else if (tensor.l61 != l61[i]) {
      complain(absl::StrCat(table[i].name, ": checksum: expected ",
                            Hex64(tensor.l61), " by the masters, found ",
                            Hex64(l61[i])));
    }
  }
  if (found != tensors_.size()) {
    complain(
        absl::StrCat(tensors_.size() - found, " tensors are not in the store"));
  }
  if (count == 0) return absl::OkStatus();
  return absl::DataLossError(
      absl::StrCat(count, " of ", table.size(),
                   " tensors are not what the masters say: ", named));
}

absl::Status ReferenceState::WriteCheckpoint(const std::string& directory) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::error_code made;
  std::filesystem::create_directories(directory, made);
  nlohmann::ordered_json header;
  std::uint64_t at = 0;
  for (const auto& [name, tensor] : tensors_) {
    header[name] = {{"dtype", SafetensorsName(tensor.dtype)},
                    {"shape", tensor.shape},
                    {"data_offsets", {at, at + tensor.total_bytes}}};
    at += tensor.total_bytes;
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const std::string path = absl::StrCat(directory, "/model.safetensors");
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  const std::uint64_t size = text.size();
  file.write(reinterpret_cast<const char*>(&size), sizeof(size));
  file << text;
  for (const auto& [name, tensor] : tensors_) {
    file.write(reinterpret_cast<const char*>(tensor.bytes.data()),
               static_cast<std::streamsize>(tensor.bytes.size()));
  }
  file.close();
  if (file) return absl::OkStatus();
  return absl::UnavailableError(
      absl::StrCat(path, ": cannot be written: ", std::strerror(errno)));
}

absl::StatusOr<std::span<const std::byte>> ReferenceState::BytesOf(
    const std::string& name) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto at = tensors_.find(name);
  if (at == tensors_.end() ||
      at->second.bytes.size() != at->second.total_bytes) {
    return absl::NotFoundError(
        absl::StrCat(name, ": no trainer rank has it, or bytes are not kept"));
  }
  return std::span<const std::byte>(at->second.bytes);
}

std::uint64_t ReferenceState::total_bytes() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::uint64_t bytes = 0;
  for (const auto& [name, tensor] : tensors_) bytes += tensor.added_bytes;
  return bytes;
}

std::vector<std::byte> Gather(const TrainerTensor& part) {
  const std::uint64_t element_bytes = ElementBytes(part.dtype);
  std::vector<std::uint64_t> shape = part.shape;
  std::uint64_t elements = 1;
  for (const std::uint64_t extent : shape) elements *= extent;
  if (part.shard.has_value() && elements > 0) {
    // Whole rows of the first dimension.
    const std::uint64_t row = elements / shape.front();
    elements = part.shard->end - part.shard->begin;
    shape.front() = elements / row;
  }
  std::vector<std::byte> bytes(elements * element_bytes);
  if (elements == 0) return bytes;
  // Elements that follow each other in memory from some dimension on.
  std::uint64_t run = 1;
  std::size_t outer = shape.size();
  while (outer > 0 && (part.strides_bytes.empty() ||
                       part.strides_bytes[outer - 1] ==
                           static_cast<std::int64_t>(run * element_bytes))) {
    run *= shape[--outer];
  }
  std::vector<std::uint64_t> index(outer, 0);
  for (std::uint64_t at = 0; at < elements; at += run) {
    const auto* from = static_cast<const std::byte*>(part.data);
    for (std::size_t d = 0; d < outer; ++d) {
      from += static_cast<std::int64_t>(index[d]) * part.strides_bytes[d];
    }
    std::memcpy(bytes.data() + at * element_bytes, from, run * element_bytes);
    for (std::size_t d = outer; d-- > 0;) {
      if (++index[d] < shape[d]) break;
      index[d] = 0;
    }
  }
  return bytes;
}

}  // namespace kedge::example
