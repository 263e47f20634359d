#include "kedge/tools/version_sources.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kedge/format/limits.h"
#include "kedge/format/status.h"

namespace kedge {
namespace {

constexpr std::size_t kNamedOffenders = 4;

std::string TypeText(DType dtype, const std::vector<std::uint64_t>& shape) {
  return absl::StrCat(DTypeName(dtype), " [", absl::StrJoin(shape, ", "), "]");
}

// What the table knows an opaque tensor as: its bytes.
std::vector<std::uint64_t> TableShape(const SafetensorsTensor& tensor) {
  if (tensor.opaque) return {tensor.byte_size};
  return tensor.shape;
}

}  // namespace

absl::StatusOr<TensorTable> TableOf(const Checkpoint& checkpoint) {
  std::vector<TensorSpec> specs;
  specs.reserve(checkpoint.tensors().size());
  for (const CheckpointTensor& tensor : checkpoint.tensors()) {
    TensorSpec spec;
    spec.name = tensor.description->name;
    spec.dtype = tensor.description->dtype;
    spec.shape = TableShape(*tensor.description);
    specs.push_back(std::move(spec));
  }
  auto table = TensorTable::Create(std::move(specs));
  if (!table.ok()) return Annotate(table.status(), checkpoint.path());
  return table;
}

absl::StatusOr<Metadata> MetadataOf(const Checkpoint& checkpoint,
                                    const Metadata& base) {
  Metadata metadata = base;
  std::erase_if(metadata, [](const auto& entry) {
    return absl::StartsWith(entry.first, kHeaderKeyPrefix) ||
           entry.first == kIndexKey;
  });
  const CheckpointFile* largest = nullptr;
  for (const CheckpointFile& file : checkpoint.files()) {
    const absl::string_view header = file.file.header_json();
    metadata[absl::StrCat(kHeaderKeyPrefix, file.name)] =
        std::string(header.data(), header.size());
    if (largest == nullptr ||
        header.size() > largest->file.header_json().size()) {
      largest = &file;
    }
  }
  if (checkpoint.index_json()) {
    metadata[std::string(kIndexKey)] = *checkpoint.index_json();
  }
  std::uint64_t bytes = 0;
  for (const auto& [key, value] : metadata) bytes += key.size() + value.size();
  if (bytes > kMaxMetadataBytes) {
    return absl::InvalidArgumentError(Describe(
        {.where = checkpoint.path(),
         .what = "headers and index, which a version carries so that "
                 "`kedge materialize` can give the files back",
         .expected = absl::StrCat("at most ", kMaxMetadataBytes, " bytes"),
         .found = absl::StrCat(
             bytes, largest == nullptr
                        ? ""
                        : absl::StrCat(", the largest header ",
                                       largest->file.header_json().size(),
                                       " in ", largest->name)),
         .advice = "save the checkpoint with less __metadata__ or fewer "
                   "tensors"}));
  }
  return metadata;
}

absl::Status CheckSameModel(const Checkpoint& checkpoint,
                            const TensorTable& table,
                            absl::string_view version) {
  std::size_t count = 0;
  std::vector<std::string> named;
  const auto offend = [&](const auto&... parts) {
    if (++count <= kNamedOffenders) named.push_back(absl::StrCat(parts...));
  };
  for (const TensorSpec& spec : table.tensors()) {
    const CheckpointTensor* const tensor = checkpoint.Find(spec.name);
    if (tensor == nullptr) {
      offend(spec.name, ": expected ", TypeText(spec.dtype, spec.shape),
             ", found none");
      continue;
    }
    const SafetensorsTensor& found = *tensor->description;
    const std::vector<std::uint64_t> shape = TableShape(found);
    if (found.dtype != spec.dtype || shape != spec.shape) {
      offend(spec.name, ": expected ", TypeText(spec.dtype, spec.shape),
             ", found ", TypeText(found.dtype, shape));
      continue;
    }
    if (spec.tied_to == kNotTied) continue;
    const TensorSpec& owner = table[spec.tied_to];
    const CheckpointTensor* const other = checkpoint.Find(owner.name);
    if (other != nullptr && other->bytes.size() == tensor->bytes.size() &&
        !tensor->bytes.empty() &&
        std::memcmp(other->bytes.data(), tensor->bytes.data(),
                    tensor->bytes.size()) != 0) {
      offend(spec.name, ": expected the bytes of ", owner.name,
             ", to which it is tied, found others");
    }
  }
  for (const CheckpointTensor& tensor : checkpoint.tensors()) {
    if (table.Find(tensor.description->name).ok()) continue;
    offend(
        tensor.description->name, ": expected none, found ",
        TypeText(tensor.description->dtype, TableShape(*tensor.description)));
  }
  if (count == 0) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      checkpoint.path(), ": not the model of ", version, ": ", count,
      count == 1 ? " tensor differs: " : " tensors differ: ",
      absl::StrJoin(named, "; "),
      count > named.size()
          ? absl::StrCat("; and ", count - named.size(), " more")
          : "",
      "; pass the checkpoint of this model, or --replace-model to publish a "
      "root step of another one"));
}

SumsInFlight::SumsInFlight(const TensorTable* table, const L61Summer* summer)
    : table_(table), summer_(summer), sums_(table->size(), 0) {
  missing_bytes_.reserve(table->size());
  for (const TensorSpec& spec : table->tensors()) {
    missing_bytes_.push_back(spec.byte_count());
  }
}

bool SumsInFlight::Add(std::uint32_t ordinal, std::uint64_t byte_begin,
                       std::span<const std::byte> bytes) {
  const std::uint64_t sum = summer_->Sum(byte_begin, bytes);
  const std::lock_guard<std::mutex> lock(mutex_);
  sums_[ordinal] = L61Add(sums_[ordinal], sum);
  KEDGE_CHECK(bytes.size() <= missing_bytes_[ordinal]);
  missing_bytes_[ordinal] -= bytes.size();
  return missing_bytes_[ordinal] == 0;
}

std::uint64_t SumsInFlight::Of(std::uint32_t ordinal) const {
  const std::uint32_t owner = (*table_)[ordinal].tied_to;
  const std::lock_guard<std::mutex> lock(mutex_);
  return sums_[owner == kNotTied ? ordinal : owner];
}

CheckpointSource::CheckpointSource(const Checkpoint* checkpoint,
                                   const TensorTable* table,
                                   const L61Summer* summer,
                                   ReadListener listener)
    : checkpoint_(checkpoint),
      total_bytes_(table->total_bytes()),
      listener_(std::move(listener)),
      sums_(table, summer) {
  data_.reserve(table->size());
  for (const TensorSpec& spec : table->tensors()) {
    const CheckpointTensor* const tensor = checkpoint->Find(spec.name);
    KEDGE_CHECK(tensor != nullptr);
    data_.push_back(tensor->bytes.data());
  }
}

absl::StatusOr<std::span<const std::byte>> CheckpointSource::Read(
    std::uint32_t ordinal, std::uint64_t byte_begin, std::uint64_t byte_count,
    std::vector<std::byte>* scratch) {
  scratch->resize(byte_count);
  if (byte_count > 0) {
    std::memcpy(scratch->data(), data_[ordinal] + byte_begin, byte_count);
  }
  sums_.Add(ordinal, byte_begin, *scratch);
  if (listener_) listener_(byte_count);
  // Whoever completes the count sees that all other copies are done.
  const std::uint64_t before =
      copied_bytes_.fetch_add(byte_count, std::memory_order_acq_rel);
  if (before + byte_count == total_bytes_) {
    const absl::Status unchanged = checkpoint_->CheckUnchanged();
    if (!unchanged.ok()) {
      return Annotate(unchanged,
                      "the checkpoint was written to while it was read");
    }
  }
  return std::span<const std::byte>(*scratch);
}

VersionSource::VersionSource(VersionReader* reader, const L61Summer* summer)
    : reader_(reader), sums_(&reader->table(), summer) {}

absl::StatusOr<std::span<const std::byte>> VersionSource::Read(
    std::uint32_t ordinal, std::uint64_t byte_begin, std::uint64_t byte_count,
    std::vector<std::byte>* scratch) {
  scratch->resize(byte_count);
  KEDGE_RETURN_IF_ERROR(reader_->Read(ordinal, byte_begin, *scratch));
  if (sums_.Add(ordinal, byte_begin, *scratch)) {
    const std::uint64_t expected = reader_->state().l61[ordinal];
    const std::uint64_t found = sums_.Of(ordinal);
    if (found != expected) {
      return WrongTensor(reader_->state().id, reader_->table()[ordinal].name,
                         expected, found);
    }
  }
  return std::span<const std::byte>(*scratch);
}

absl::Status WrongTensor(const VersionId& version, absl::string_view tensor,
                         std::uint64_t expected_l61, std::uint64_t found_l61) {
  const std::string where = absl::StrCat(ToString(version), ": ", tensor);
  return DataLoss({.where = where,
                   .what = "L61 of the bytes rebuilt from anchor and deltas",
                   .expected = Hex64(expected_l61),
                   .found = Hex64(found_l61),
                   .advice = "run `kedge fsck --deep` to find the file"});
}

}  // namespace kedge
