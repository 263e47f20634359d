#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kedge/capi/boundary.h"
#include "kedge/capi/handles.h"
#include "kedge/capi/shapes.h"
#include "kedge/capi/writer_arguments.h"
#include "kedge/reader/follower.h"
#include "kedge/reader/weight_set.h"

struct kedge_reader {
  // Borrowed by the follower, which is destroyed first.
  std::shared_ptr<kedge::Device> device;
  std::vector<std::unique_ptr<kedge::WeightSet>> sets;
  std::unique_ptr<kedge::Follower> follower;
  kedge::capi::Texts warnings;
  kedge::capi::Texts unverified;
};

namespace kedge::capi {
namespace {

constexpr std::int32_t kMaxThreads = 1024;
constexpr std::size_t kMaxSets = 1000;
// A tensor may be held in many boxes.
constexpr std::size_t kMaxTargets = std::size_t{16} * kMaxTensorCount;

kedge_reader_options DefaultReaderOptions() {
  const FollowerOptions defaults;
  kedge_reader_options options = {};
  options.device_stage_bytes = defaults.device_stage_bytes;
  options.io_threads = defaults.io_threads;
  options.directory_interval_ms =
      static_cast<std::uint64_t>(defaults.directory_interval.count());
  options.retry_deadline_ms =
      static_cast<std::uint64_t>(defaults.retry_deadline.count());
  options.lease_renewal_ms =
      static_cast<std::uint64_t>(defaults.lease_renewal.count());
  options.group_size = defaults.group.size;
  return options;
}

absl::StatusOr<FollowerOptions> ReadReaderOptions(
    const kedge_reader_options& given) {
  const kedge_reader_options defaults = DefaultReaderOptions();
  FollowerOptions read;
  KEDGE_ASSIGN_OR_RETURN(
      read.store_path, ReadText(given.store_path, "reader options.store_path"));
  if (given.device != nullptr) read.device = given.device->device.get();
  read.stream = given.stream;
  read.device_stage_bytes =
      OrDefault(given.device_stage_bytes, defaults.device_stage_bytes);
  KEDGE_RETURN_IF_ERROR(InRange(given.read_mode, KEDGE_READ_AUTO,
                                KEDGE_READ_READ, "reader options.read_mode"));
  read.read_mode = static_cast<ReadMode>(given.read_mode);
  read.io_threads = OrDefault(given.io_threads, defaults.io_threads);
  KEDGE_RETURN_IF_ERROR(
      InRange(read.io_threads, 1, kMaxThreads, "reader options.io_threads"));
  read.apply_threads = given.apply_threads;
  KEDGE_RETURN_IF_ERROR(InRange(read.apply_threads, 0, kMaxThreads,
                                "reader options.apply_threads"));
  read.every_version = given.every_version != 0;
  read.allow_partial = given.allow_partial != 0;
  read.check_records_before_pause = given.skip_record_checks == 0;
  read.directory_interval =
      Milliseconds(given.directory_interval_ms, defaults.directory_interval_ms);
  read.retry_deadline =
      Milliseconds(given.retry_deadline_ms, defaults.retry_deadline_ms);
  read.lease_id = TextOrEmpty(given.lease_id);
  read.lease_renewal =
      Milliseconds(given.lease_renewal_ms, defaults.lease_renewal_ms);

  read.group.rank = given.group_rank;
  read.group.size = OrDefault(given.group_size, defaults.group_size);
  read.group.name = TextOrEmpty(given.group_name);
  if (given.reduce != nullptr) {
    read.group.reduce = [reduce = given.reduce, user = given.reduce_user](
                            std::span<std::uint64_t> values) {
      return FromCallback("reduce", reduce(user, values.data(), values.size()));
    };
  }
  if (given.pause != nullptr) {
    read.pause = [pause = given.pause, user = given.user] {
      return FromCallback("pause", pause(user));
    };
  }
  if (given.commit != nullptr) {
    read.commit = [commit = given.commit,
                   user = given.user](const VersionId& version) {
      const kedge_version_id id = ToC(version);
      commit(user, &id);
    };
  }
  if (given.resume != nullptr) {
    read.resume = [resume = given.resume, user = given.user] { resume(user); };
  }
  return read;
}

absl::StatusOr<TensorTarget> ReadTarget(const kedge_target& given,
                                        std::string where) {
  TensorTarget read;
  KEDGE_ASSIGN_OR_RETURN(read.name,
                         ReadText(given.name, absl::StrCat(where, ".name")));
  absl::StrAppend(&where, " (", read.name, ")");
  KEDGE_ASSIGN_OR_RETURN(read.dtype, ReadDType(given.dtype, where));
  KEDGE_RETURN_IF_ERROR(CheckDimensions(given.dimensions, where));
  KEDGE_ASSIGN_OR_RETURN(
      read.shape,
      ReadPerDimension(given.shape, given.dimensions, false, where, "shape"));
  if ((given.begin == nullptr) != (given.extent == nullptr)) {
    return absl::InvalidArgumentError(absl::StrCat(
        where, ": begin and extent: expected both or none, found ",
        given.begin == nullptr ? "begin" : "extent", " null alone"));
  }
  KEDGE_ASSIGN_OR_RETURN(
      read.begin,
      ReadPerDimension(given.begin, given.dimensions, true, where, "begin"));
  KEDGE_ASSIGN_OR_RETURN(
      read.extent,
      ReadPerDimension(given.extent, given.dimensions, true, where, "extent"));
  read.data = given.data;
  KEDGE_ASSIGN_OR_RETURN(read.strides_bytes,
                         ReadPerDimension(given.strides_bytes, given.dimensions,
                                          true, where, "strides_bytes"));
  return read;
}

absl::StatusOr<std::vector<std::unique_ptr<WeightSet>>> ReadSets(
    const kedge_weight_set* sets, std::size_t count) {
  KEDGE_ASSIGN_OR_RETURN(const std::vector<kedge_weight_set> given,
                         ReadArray(sets, count, kMaxSets, "sets"));
  std::vector<std::unique_ptr<WeightSet>> read;
  for (std::size_t s = 0; s < given.size(); ++s) {
    const std::string where = absl::StrCat("sets[", s, "].targets");
    KEDGE_ASSIGN_OR_RETURN(
        const std::vector<kedge_target> targets,
        ReadArray(given[s].targets, given[s].target_count, kMaxTargets, where));
    read.push_back(given[s].name == nullptr
                       ? std::make_unique<WeightSet>()
                       : std::make_unique<WeightSet>(given[s].name));
    for (std::size_t t = 0; t < targets.size(); ++t) {
      KEDGE_ASSIGN_OR_RETURN(
          TensorTarget target,
          ReadTarget(targets[t], absl::StrCat(where, "[", t, "]")));
      KEDGE_RETURN_IF_ERROR(read.back()->Add(std::move(target)));
    }
  }
  return read;
}

void TakeUpdate(UpdateResult result, Texts* warnings, kedge_update_result* to) {
  warnings->Set(std::move(result.warnings));
  kedge_update_result filled = {};
  filled.version = ToC(result.version);
  filled.changed = result.changed ? 1 : 0;
  filled.joined = result.joined ? 1 : 0;
  filled.deltas = result.deltas;
  filled.bytes_read = result.bytes_read;
  filled.nnz = result.nnz;
  filled.units_written = result.units_written;
  filled.records = result.records;
  filled.tensors_verified = result.tensors_verified;
  filled.elements_verified = result.elements_verified;
  filled.bytes_verified = result.bytes_verified;
  filled.read_seconds = result.read_seconds;
  filled.pause_seconds = result.pause_seconds;
  filled.apply_seconds = result.apply_seconds;
  filled.verify_seconds = result.verify_seconds;
  filled.warnings = warnings->data();
  filled.warning_count = warnings->size();
  WriteResult(filled, to);
}

// Runs `update`, a call of the reader's follower, and fills `result`.
template <class Update>
kedge_status RunUpdate(kedge_reader* reader, kedge_update_result* result,
                       kedge_error** error, const Update& update) noexcept {
  return Guarded(error, [&]() -> absl::Status {
    KEDGE_RETURN_IF_ERROR(NotNull(reader, "reader"));
    KEDGE_RETURN_IF_ERROR(CheckResult(result, "result"));
    KEDGE_ASSIGN_OR_RETURN(UpdateResult updated, update(*reader->follower));
    TakeUpdate(std::move(updated), &reader->warnings, result);
    return absl::OkStatus();
  });
}

}  // namespace
}  // namespace kedge::capi

using kedge::capi::Guarded;
using kedge::capi::NotNull;

extern "C" {

kedge_status kedge_reader_options_init(kedge_reader_options* options,
                                       std::size_t struct_size,
                                       kedge_error** error) {
  return kedge::capi::InitStruct(options, struct_size,
                                 kedge::capi::DefaultReaderOptions(),
                                 "reader options", error);
}

kedge_status kedge_reader_open(const kedge_reader_options* options,
                               const kedge_weight_set* sets,
                               std::size_t set_count, kedge_reader** reader,
                               kedge_error** error) {
  return Guarded(error, [&]() -> absl::Status {
    KEDGE_RETURN_IF_ERROR(NotNull(reader, "reader"));
    *reader = nullptr;
    KEDGE_ASSIGN_OR_RETURN(const kedge_reader_options given,
                           kedge::capi::ReadStruct(options, "reader options"));
    KEDGE_ASSIGN_OR_RETURN(kedge::FollowerOptions read,
                           kedge::capi::ReadReaderOptions(given));
    auto made = std::make_unique<kedge_reader>();
    KEDGE_ASSIGN_OR_RETURN(made->sets, kedge::capi::ReadSets(sets, set_count));
    if (given.device != nullptr) made->device = given.device->device;
    std::vector<const kedge::WeightSet*> held;
    for (const auto& set : made->sets) held.push_back(set.get());
    KEDGE_ASSIGN_OR_RETURN(
        made->follower,
        kedge::Follower::Open(std::move(read), std::move(held)));
    *reader = made.release();
    return absl::OkStatus();
  });
}

kedge_status kedge_reader_verify_held(kedge_reader* reader, std::uint64_t step,
                                      kedge_error** error) {
  return Guarded(error, [&]() -> absl::Status {
    KEDGE_RETURN_IF_ERROR(NotNull(reader, "reader"));
    return reader->follower->VerifyHeld(step);
  });
}

kedge_status kedge_reader_join(kedge_reader* reader,
                               kedge_update_result* result,
                               kedge_error** error) {
  return kedge::capi::RunUpdate(
      reader, result, error,
      [](kedge::Follower& follower) { return follower.Join(); });
}

kedge_status kedge_reader_join_step(kedge_reader* reader, std::uint64_t step,
                                    kedge_update_result* result,
                                    kedge_error** error) {
  return kedge::capi::RunUpdate(
      reader, result, error,
      [&](kedge::Follower& follower) { return follower.JoinStep(step); });
}

kedge_status kedge_reader_prefetch(kedge_reader* reader, std::int32_t* found,
                                   kedge_version_id* version,
                                   kedge_error** error) {
  return Guarded(error, [&]() -> absl::Status {
    KEDGE_RETURN_IF_ERROR(NotNull(found, "found"));
    *found = 0;
    KEDGE_RETURN_IF_ERROR(NotNull(reader, "reader"));
    KEDGE_ASSIGN_OR_RETURN(const std::optional<kedge::VersionId> newer,
                           reader->follower->Prefetch());
    if (!newer.has_value()) return absl::OkStatus();
    *found = 1;
    if (version != nullptr) *version = kedge::capi::ToC(*newer);
    return absl::OkStatus();
  });
}

kedge_status kedge_reader_update(kedge_reader* reader,
                                 kedge_update_result* result,
                                 kedge_error** error) {
  return kedge::capi::RunUpdate(
      reader, result, error,
      [](kedge::Follower& follower) { return follower.Update(); });
}

kedge_status kedge_reader_wait_for_update(kedge_reader* reader,
                                          std::uint64_t timeout_ms,
                                          kedge_update_result* result,
                                          kedge_error** error) {
  return kedge::capi::RunUpdate(
      reader, result, error, [&](kedge::Follower& follower) {
        return follower.WaitForUpdate(kedge::capi::Milliseconds(timeout_ms));
      });
}

kedge_reader_state kedge_reader_get_state(const kedge_reader* reader) {
  if (reader == nullptr) return KEDGE_READER_EMPTY;
  return static_cast<kedge_reader_state>(reader->follower->state());
}

kedge_status kedge_reader_held(const kedge_reader* reader,
                               kedge_version_id* version, kedge_error** error) {
  return Guarded(error, [&]() -> absl::Status {
    KEDGE_RETURN_IF_ERROR(NotNull(reader, "reader"));
    KEDGE_RETURN_IF_ERROR(NotNull(version, "version"));
    const std::optional<kedge::VersionId> held = reader->follower->held();
    if (!held.has_value()) {
      return absl::FailedPreconditionError(
          absl::StrCat("the reader holds no version: it is ",
                       kedge::ToString(reader->follower->state())));
    }
    *version = kedge::capi::ToC(*held);
    return absl::OkStatus();
  });
}

kedge_status kedge_reader_unverified(kedge_reader* reader,
                                     const char* const** names,
                                     std::size_t* name_count,
                                     kedge_error** error) {
  return Guarded(error, [&]() -> absl::Status {
    KEDGE_RETURN_IF_ERROR(NotNull(names, "names"));
    *names = nullptr;
    KEDGE_RETURN_IF_ERROR(NotNull(name_count, "name_count"));
    *name_count = 0;
    KEDGE_RETURN_IF_ERROR(NotNull(reader, "reader"));
    reader->unverified.Set(reader->follower->unverified_tensors());
    *names = reader->unverified.data();
    *name_count = reader->unverified.size();
    return absl::OkStatus();
  });
}

void kedge_reader_free(kedge_reader* reader) { delete reader; }

}  // extern "C"
