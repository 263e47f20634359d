#include "kedge/capi/writer_arguments.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "kedge/capi/shapes.h"
#include "kedge/format/limits.h"
#include "kedge/writer/retention.h"

namespace kedge::capi {
namespace {

// A rank may hold several shards of each tensor.
constexpr std::size_t kMaxEntries = std::size_t{16} * kMaxTensorCount;
constexpr std::int32_t kMaxThreads = 1024;
constexpr std::uint64_t kTenYearsMilliseconds = 315'360'000'000;

kedge_writer_options DefaultWriterOptions() {
  const WriterOptions defaults;
  kedge_writer_options options = {};
  options.io_threads = defaults.io_threads;
  options.anchor_file_bytes = defaults.anchor_file_bytes;
  options.slice_units = defaults.slice_units;
  options.segment_files = defaults.segment_files;
  const RetentionOptions retention;
  options.lease_ttl_seconds =
      static_cast<std::uint64_t>(retention.lease_ttl.count());
  options.trash_grace_seconds =
      static_cast<std::uint64_t>(retention.grace.count());
  return options;
}

std::chrono::seconds Seconds(std::uint64_t seconds, std::uint64_t standard) {
  return std::chrono::seconds(
      std::min(OrDefault(seconds, standard), kTenYearsMilliseconds / 1000));
}

}  // namespace

std::chrono::milliseconds Milliseconds(std::uint64_t milliseconds,
                                       std::uint64_t standard) {
  return std::chrono::milliseconds(
      std::min(OrDefault(milliseconds, standard), kTenYearsMilliseconds));
}

absl::StatusOr<std::vector<TrainerTensor>> ReadTensors(
    const kedge_tensor* tensors, std::size_t count, absl::string_view what) {
  KEDGE_ASSIGN_OR_RETURN(const std::vector<kedge_tensor> given,
                         ReadArray(tensors, count, kMaxEntries, what));
  std::vector<TrainerTensor> read(given.size());
  for (std::size_t i = 0; i < given.size(); ++i) {
    const kedge_tensor& from = given[i];
    TrainerTensor& to = read[i];
    std::string where = absl::StrCat(what, "[", i, "]");
    KEDGE_ASSIGN_OR_RETURN(to.name,
                           ReadText(from.name, absl::StrCat(where, ".name")));
    absl::StrAppend(&where, " (", to.name, ")");
    KEDGE_ASSIGN_OR_RETURN(to.dtype, ReadDType(from.dtype, where));
    KEDGE_RETURN_IF_ERROR(CheckDimensions(from.dimensions, where));
    KEDGE_ASSIGN_OR_RETURN(
        to.shape,
        ReadPerDimension(from.shape, from.dimensions, false, where, "shape"));
    KEDGE_ASSIGN_OR_RETURN(to.strides_bytes,
                           ReadPerDimension(from.strides_bytes, from.dimensions,
                                            true, where, "strides_bytes"));
    to.data = from.data;
    to.tied_to = TextOrEmpty(from.tied_to);
    if (from.shard != nullptr) {
      to.shard = ElementRange{from.shard->begin, from.shard->end};
    }
  }
  return read;
}

absl::StatusOr<Metadata> ReadMetadata(const kedge_metadata* metadata,
                                      std::size_t count) {
  Metadata read;
  if (count == 0) return read;
  KEDGE_RETURN_IF_ERROR(NotNull(metadata, "metadata"));
  if (count > kMaxMetadataEntries) {
    return absl::InvalidArgumentError(
        absl::StrCat("metadata_count: expected at most ", kMaxMetadataEntries,
                     ", found ", count));
  }
  for (std::size_t i = 0; i < count; ++i) {
    const std::string where = absl::StrCat("metadata[", i, "]");
    KEDGE_ASSIGN_OR_RETURN(
        std::string key,
        ReadText(metadata[i].key, absl::StrCat(where, ".key")));
    KEDGE_ASSIGN_OR_RETURN(
        std::string value,
        ReadText(metadata[i].value, absl::StrCat(where, ".value")));
    const auto [at, added] = read.emplace(std::move(key), std::move(value));
    if (!added) {
      return absl::InvalidArgumentError(
          absl::StrCat(where, ".key: \"", at->first, "\" is there twice"));
    }
  }
  return read;
}

absl::StatusOr<OwnedWriterOptions> ReadWriterOptions(
    const kedge_writer_options* options) {
  KEDGE_ASSIGN_OR_RETURN(const kedge_writer_options given,
                         ReadStruct(options, "writer options"));
  const kedge_writer_options defaults = DefaultWriterOptions();
  OwnedWriterOptions read;
  WriterOptions& to = read.options;
  KEDGE_ASSIGN_OR_RETURN(
      to.store_path, ReadText(given.store_path, "writer options.store_path"));
  to.io_threads = OrDefault(given.io_threads, defaults.io_threads);
  KEDGE_RETURN_IF_ERROR(
      InRange(to.io_threads, 1, kMaxThreads, "writer options.io_threads"));
  to.encode_threads = given.encode_threads;
  KEDGE_RETURN_IF_ERROR(InRange(to.encode_threads, 0, kMaxThreads,
                                "writer options.encode_threads"));
  to.anchor_file_bytes =
      OrDefault(given.anchor_file_bytes, defaults.anchor_file_bytes);
  to.slice_units = OrDefault(given.slice_units, defaults.slice_units);
  to.segment_files = OrDefault(given.segment_files, defaults.segment_files);
  KEDGE_RETURN_IF_ERROR(InRange(to.segment_files, 1, kMaxFilesPerRank,
                                "writer options.segment_files"));
  if (given.keep_anchors > 0) {
    RetentionOptions retention;
    retention.keep_anchors = given.keep_anchors;
    retention.lease_ttl =
        Seconds(given.lease_ttl_seconds, defaults.lease_ttl_seconds);
    retention.grace =
        Seconds(given.trash_grace_seconds, defaults.trash_grace_seconds);
    to.retention = retention;
  }
  if (given.coordinator != nullptr) {
    read.coordinator = given.coordinator->coordinator;
    to.coordinator = read.coordinator.get();
  }
  return read;
}

absl::StatusOr<InitOptions> ReadStoreOptions(
    const kedge_store_options* options) {
  InitOptions read;
  if (options == nullptr) return read;
  KEDGE_ASSIGN_OR_RETURN(const kedge_store_options given,
                         ReadStruct(options, "store options"));
  read.run = ReadRunId(given.run_id);
  if (given.l61_seed != nullptr) read.l61_seed = *given.l61_seed;
  read.created_unix_seconds = given.created_unix_seconds;
  KEDGE_ASSIGN_OR_RETURN(read.metadata,
                         ReadMetadata(given.metadata, given.metadata_count));
  read.external_v0 = given.external_v0 != 0;
  KEDGE_RETURN_IF_ERROR(
      InRange(given.reserved, 0, 0, "store options.reserved"));
  return read;
}

absl::StatusOr<PublishArguments> ReadPublishOptions(
    const kedge_publish_options* options) {
  PublishArguments read;
  if (options == nullptr) return read;
  KEDGE_ASSIGN_OR_RETURN(const kedge_publish_options given,
                         ReadStruct(options, "publish options"));
  read.anchor = given.anchor != 0;
  if (given.replace_metadata != 0) {
    KEDGE_ASSIGN_OR_RETURN(read.metadata,
                           ReadMetadata(given.metadata, given.metadata_count));
  }
  return read;
}

std::optional<RunId> ReadRunId(const std::uint8_t* run_id) {
  if (run_id == nullptr) return std::nullopt;
  RunId read;
  std::memcpy(read.bytes.data(), run_id, read.bytes.size());
  return read;
}

void PublishTexts::Take(PublishResult result, std::uint32_t epoch,
                        kedge_publish_result* to) {
  warnings_.Set(std::move(result.warnings));
  anchor_message_ = std::string(result.anchor_status.message());
  kedge_publish_result filled = {};
  filled.version = ToC(result.version);
  filled.nnz = result.nnz;
  filled.records = result.records;
  filled.bytes = result.bytes;
  filled.manifest_bytes = result.manifest_bytes;
  filled.anchor_bytes = result.anchor_bytes;
  filled.encode_seconds = result.encode_seconds;
  filled.commit_seconds = result.commit_seconds;
  filled.anchor_seconds = result.anchor_seconds;
  filled.anchor_status = ToNumber(result.anchor_status.code());
  filled.epoch = epoch;
  filled.anchor_message = anchor_message_.c_str();
  filled.warnings = warnings_.data();
  filled.warning_count = warnings_.size();
  WriteResult(filled, to);
}

}  // namespace kedge::capi

extern "C" {

kedge_status kedge_writer_options_init(kedge_writer_options* options,
                                       std::size_t struct_size,
                                       kedge_error** error) {
  return kedge::capi::InitStruct(options, struct_size,
                                 kedge::capi::DefaultWriterOptions(),
                                 "writer options", error);
}

kedge_status kedge_store_options_init(kedge_store_options* options,
                                      std::size_t struct_size,
                                      kedge_error** error) {
  return kedge::capi::InitStruct(options, struct_size, kedge_store_options{},
                                 "store options", error);
}

}  // extern "C"
