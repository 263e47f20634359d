#include "kedge/bench/synthetic_source.h"

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>

#include "kedge/format/hash.h"
#include "kedge/format/status.h"
#include "kedge/writer/store_writer.h"

namespace kedge {
namespace {

constexpr std::uint64_t kEach = 0x0001000100010001u;  // of four lanes

// The changes of elements [4 group, 4 group + 4) as 16-bit lanes. Few groups
// have any.
std::uint64_t Changes(const SyntheticTensor& tensor, std::uint64_t group) {
  const std::uint64_t lanes = tensor.ChangeLanes(group);
  // Whether some lane is below `changed`, at most 0x8000. Source of the test:
  // S. E. Anderson, "Bit Twiddling Hacks", "word has a byte less than n".
  if (((lanes - tensor.changed * kEach) & ~lanes & (0x8000u * kEach)) == 0) {
    return 0;
  }
  std::uint64_t changes = 0;
  for (std::uint32_t shift = 0; shift < 64; shift += 16) {
    const std::int32_t d =
        tensor.Difference(static_cast<std::uint32_t>(lanes >> shift) & 0xffffu);
    changes |= std::uint64_t{static_cast<std::uint16_t>(d)} << shift;
  }
  return changes;
}

// Lane by lane, modulo 2^16.
std::uint64_t AddLanes(std::uint64_t a, std::uint64_t b) {
  const std::uint64_t high = 0x8000u * kEach;
  return ((a & ~high) + (b & ~high)) ^ ((a ^ b) & high);
}

// The raw bits of elements [4 group, 4 group + 4) of one or two bytes.
template <int kUnitBytes>
void WriteGroup(const SyntheticTensor& tensor, std::uint64_t group, bool odd,
                std::byte* out) {
  std::uint64_t bits = tensor.OldLanes(group);
  if (kUnitBytes == 2) bits = (bits & (0x81ffu * kEach)) + 0x3b00u * kEach;
  if (odd) {
    const std::uint64_t changes = Changes(tensor, group);
    if (changes != 0) bits = AddLanes(bits, changes);
  }
  if (kUnitBytes == 1) {
    bits &= 0xffu * kEach;
    bits |= bits >> 8;
    bits = (bits & 0xffffu) | ((bits >> 16) & 0xffff0000u);
  }
  std::memcpy(out, &bits, 4 * kUnitBytes);
}

template <int kUnitBytes>
void WriteGroups(const SyntheticTensor& tensor, std::uint64_t first,
                 std::uint64_t count, bool odd, std::byte* out) {
  for (std::uint64_t g = 0; g < count; ++g) {
    WriteGroup<kUnitBytes>(tensor, first + g, odd, out + 4 * kUnitBytes * g);
  }
}

}  // namespace

SyntheticTensor SyntheticOf(absl::string_view name, DType dtype,
                            double density) {
  SyntheticTensor tensor;
  const Hash128 hash = HashBytes128(
      std::as_bytes(std::span<const char>(name.data(), name.size())));
  std::memcpy(&tensor.seed, hash.bytes.data(), sizeof(tensor.seed));
  tensor.unit_bytes = UnitBytes(dtype);
  tensor.changed = static_cast<std::uint32_t>(std::min(density, 0.5) * 65536);
  return tensor;
}

SyntheticSource::SyntheticSource(const TensorTable* table, double density,
                                 std::uint64_t version)
    : version_(version) {
  for (const TensorSpec& tensor : table->tensors()) {
    tensors_.push_back(SyntheticOf(tensor.name, tensor.dtype, density));
  }
}

absl::StatusOr<std::span<const std::byte>> SyntheticSource::Read(
    std::uint32_t ordinal, std::uint64_t byte_begin, std::uint64_t byte_count,
    std::vector<std::byte>* scratch) {
  const SyntheticTensor& tensor = tensors_[ordinal];
  const std::uint64_t unit = tensor.unit_bytes;
  scratch->resize(byte_count);
  std::byte* out = scratch->data();
  std::uint64_t i = byte_begin / unit;
  const std::uint64_t end = (byte_begin + byte_count) / unit;
  const auto one = [&] {
    const std::uint32_t bits = tensor.At(i++, version_);
    std::memcpy(out, &bits, unit);
    out += unit;
  };
  if (unit <= 2) {
    while (i < end && i % 4 != 0) one();
    const std::uint64_t groups = (end - i) / 4;
    if (unit == 2) {
      WriteGroups<2>(tensor, i / 4, groups, version_ % 2 == 1, out);
    } else {
      WriteGroups<1>(tensor, i / 4, groups, version_ % 2 == 1, out);
    }
    i += 4 * groups;
    out += 4 * groups * unit;
  }
  while (i < end) one();
  return std::span<const std::byte>(*scratch);
}

absl::Status WriteSyntheticStore(const SyntheticStoreOptions& options) {
  WriterOptions writer;
  writer.store_path = options.path;
  writer.encode_threads = options.threads;
  KEDGE_ASSIGN_OR_RETURN(const TensorTable table,
                         TensorTable::Create(options.tensors));
  SyntheticSource even(&table, options.density, 0);
  SyntheticSource odd(&table, options.density, 1);
  InitOptions init;
  init.external_v0 = !options.anchor;
  KEDGE_RETURN_IF_ERROR(InitStore(writer, init, table, even));
  KEDGE_ASSIGN_OR_RETURN(const std::unique_ptr<StoreWriter> opened,
                         StoreWriter::Open(writer));
  for (std::uint64_t step = 1; step <= options.steps; ++step) {
    SyntheticSource& from = step % 2 == 1 ? even : odd;
    SyntheticSource& to = step % 2 == 1 ? odd : even;
    KEDGE_RETURN_IF_ERROR(
        opened->PublishDelta(step, from, to, nullptr).status());
  }
  return absl::OkStatus();
}

}  // namespace kedge
