#include <cstdint>
#include <memory>
#include <utility>

#include "kedge/capi/boundary.h"
#include "kedge/capi/handles.h"
#include "kedge/capi/writer_arguments.h"
#include "kedge/writer/file_coordinator.h"

namespace kedge::capi {
namespace {

kedge_coordinator_options DefaultCoordinatorOptions() {
  kedge_coordinator_options options = {};
  options.deadline_ms =
      static_cast<std::uint64_t>(FileCoordinatorOptions{}.deadline.count());
  return options;
}

absl::StatusOr<FileCoordinatorOptions> ReadCoordinatorOptions(
    const kedge_coordinator_options* options) {
  KEDGE_ASSIGN_OR_RETURN(const kedge_coordinator_options given,
                         ReadStruct(options, "coordinator options"));
  FileCoordinatorOptions read;
  KEDGE_ASSIGN_OR_RETURN(
      read.store_path,
      ReadText(given.store_path, "coordinator options.store_path"));
  read.rank = given.rank;
  read.world_size = given.world_size;
  read.run = ReadRunId(given.run_id);
  read.deadline =
      Milliseconds(given.deadline_ms, DefaultCoordinatorOptions().deadline_ms);
  return read;
}

}  // namespace
}  // namespace kedge::capi

extern "C" {

kedge_status kedge_coordinator_options_init(kedge_coordinator_options* options,
                                            std::size_t struct_size,
                                            kedge_error** error) {
  return kedge::capi::InitStruct(options, struct_size,
                                 kedge::capi::DefaultCoordinatorOptions(),
                                 "coordinator options", error);
}

kedge_status kedge_coordinator_open_files(
    const kedge_coordinator_options* options, kedge_coordinator** coordinator,
    kedge_error** error) {
  return kedge::capi::Guarded(error, [&]() -> absl::Status {
    KEDGE_RETURN_IF_ERROR(kedge::capi::NotNull(coordinator, "coordinator"));
    *coordinator = nullptr;
    KEDGE_ASSIGN_OR_RETURN(const kedge::FileCoordinatorOptions read,
                           kedge::capi::ReadCoordinatorOptions(options));
    KEDGE_ASSIGN_OR_RETURN(std::unique_ptr<kedge::FileCoordinator> opened,
                           kedge::FileCoordinator::Open(read));
    *coordinator = new kedge_coordinator{std::move(opened)};
    return absl::OkStatus();
  });
}

void kedge_coordinator_free(kedge_coordinator* coordinator) {
  delete coordinator;
}

}  // extern "C"
