// Goal: no text makes the reader of safetensors headers crash, read beyond it
// or accept tensors that do not cover the data exactly. Input: a header without
// its length.

#include <algorithm>
#include <utility>

#include "kedge/format/limits.h"
#include "kedge/tests/fuzz/fuzz_input.h"
#include "kedge/tools/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data,
                                      std::size_t size) {
  using namespace kedge;        // NOLINT: the whole file is one function
  using namespace kedge::fuzz;  // NOLINT
  const std::vector<std::byte> bytes = Input(data, size).TakeRest();
  const absl::string_view json(reinterpret_cast<const char*>(bytes.data()),
                               bytes.size());
  const auto header = ParseSafetensorsHeader("header", json, std::nullopt);
  if (!header.ok()) {
    RequireRefusal(header.status());
    return 0;
  }
  Require(ParseSafetensorsHeader("header", json, header->data_bytes).status(),
          "parse with the size that it says");
  KEDGE_CHECK(absl::IsDataLoss(
      ParseSafetensorsHeader("header", json, header->data_bytes + 1).status()));

  Sink sink;
  std::uint64_t end = 0;
  std::vector<SafetensorsEntry> entries;
  for (const SafetensorsTensor& tensor : header->tensors) {
    sink.AddBytes(tensor.name);
    sink.AddBytes(tensor.shape);
    KEDGE_CHECK(!tensor.name.empty() && tensor.name.size() <= kMaxNameBytes);
    KEDGE_CHECK(tensor.shape.size() <= kMaxRank);
    KEDGE_CHECK(tensor.data_offset == end);
    end += tensor.byte_size;
    KEDGE_CHECK(DTypeFromSafetensors(tensor.file_dtype).has_value() !=
                tensor.opaque);
    std::uint64_t count = ElementBytes(tensor.dtype);
    for (const std::uint64_t extent : tensor.shape) count *= extent;
    KEDGE_CHECK(count == tensor.byte_size);
    SafetensorsEntry entry;
    entry.name = tensor.name;
    entry.dtype = tensor.dtype;
    entry.shape = tensor.shape;
    if (tensor.opaque) {
      // Of the types that kedge does not know, some have a size of their own,
      // which their shape in bytes would contradict.
      entry.file_dtype = "OPAQUE";
      entry.opaque_bytes = tensor.byte_size;
    }
    entries.push_back(std::move(entry));
  }
  KEDGE_CHECK(end == header->data_bytes);
  for (const auto& [key, value] : header->metadata) {
    sink.AddBytes(key);
    sink.AddBytes(value);
  }

  const auto built = BuildSafetensorsHeader(entries, header->metadata);
  Require(built.status(), "build what was accepted");
  const auto again =
      ParseSafetensorsHeader("header", *built, header->data_bytes);
  Require(again.status(), "parse what was built");
  KEDGE_CHECK(again->metadata == header->metadata);
  KEDGE_CHECK(again->tensors.size() == header->tensors.size());
  for (std::size_t i = 0; i < again->tensors.size(); ++i) {
    const SafetensorsTensor& a = header->tensors[i];
    const SafetensorsTensor& b = again->tensors[i];
    KEDGE_CHECK(
        a.name == b.name && (a.opaque || a.file_dtype == b.file_dtype) &&
        a.dtype == b.dtype && a.shape == b.shape && a.opaque == b.opaque &&
        a.data_offset == b.data_offset && a.byte_size == b.byte_size);
  }
  return 0;
}
