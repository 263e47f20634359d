#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kedge/capi/boundary.h"
#include "kedge/capi/handles.h"
#include "kedge/capi/writer_arguments.h"
#include "kedge/format/limits.h"
#include "kedge/writer/optimizer_hook.h"

struct kedge_hook {
  // Borrowed by the hook, which is destroyed first.
  std::shared_ptr<kedge::Device> device;
  std::shared_ptr<kedge::Coordinator> coordinator;
  std::unique_ptr<kedge::OptimizerHook> hook;
  kedge::capi::PublishTexts texts;
  std::vector<kedge_named_bytes> residual;  // points into hook->memory()
};

namespace kedge::capi {
namespace {

constexpr std::size_t kMaxParameters = kMaxTensorCount;
constexpr std::size_t kMaxReplicas = 1000;

kedge_hook_options DefaultHookOptions() {
  const HookOptions defaults;
  kedge_hook_options options = {};
  options.chunk_bytes = defaults.chunk_bytes;
  options.ring_bytes = defaults.ring_bytes;
  options.deadline_ms = static_cast<std::uint64_t>(defaults.deadline.count());
  return options;
}

absl::StatusOr<std::vector<HookedParameter>> ReadParameters(
    const kedge_parameter* parameters, std::size_t count) {
  KEDGE_ASSIGN_OR_RETURN(
      const std::vector<kedge_parameter> given,
      ReadArray(parameters, count, kMaxParameters, "parameters"));
  std::vector<HookedParameter> read(given.size());
  for (std::size_t i = 0; i < given.size(); ++i) {
    const kedge_parameter& from = given[i];
    HookedParameter& to = read[i];
    const std::string where = absl::StrCat("parameters[", i, "]");
    KEDGE_ASSIGN_OR_RETURN(to.name,
                           ReadText(from.name, absl::StrCat(where, ".name")));
    to.data = from.data;
    to.bytes = from.bytes;
    to.frozen = from.frozen != 0;
    KEDGE_RETURN_IF_ERROR(
        InRange(from.reserved, 0, 0, absl::StrCat(where, ".reserved")));
    if (from.bytes != 0) {
      KEDGE_RETURN_IF_ERROR(
          NotNull(from.data, absl::StrCat(where, " (", to.name, ").data")));
    }
    if (from.replica_count == 0) continue;
    const std::string replicas =
        absl::StrCat(where, " (", to.name, ").replicas");
    KEDGE_RETURN_IF_ERROR(NotNull(from.replicas, replicas));
    if (from.replica_count > kMaxReplicas) {
      return absl::InvalidArgumentError(
          absl::StrCat(replicas, ": expected at most ", kMaxReplicas,
                       ", found ", from.replica_count));
    }
    to.replicas.assign(from.replicas, from.replicas + from.replica_count);
    for (const void* const replica : to.replicas) {
      KEDGE_RETURN_IF_ERROR(NotNull(replica, replicas));
    }
  }
  return read;
}

absl::StatusOr<std::vector<QuantisedTensor>> ReadQuantised(
    const kedge_quantised_tensor* quantised, std::size_t count) {
  KEDGE_ASSIGN_OR_RETURN(
      const std::vector<kedge_quantised_tensor> given,
      ReadArray(quantised, count, kMaxTensorCount, "quantised"));
  std::vector<QuantisedTensor> read(given.size());
  for (std::size_t i = 0; i < given.size(); ++i) {
    const kedge_quantised_tensor& from = given[i];
    QuantisedTensor& to = read[i];
    const std::string where = absl::StrCat("quantised[", i, "]");
    KEDGE_ASSIGN_OR_RETURN(
        to.tensor, ReadText(from.tensor, absl::StrCat(where, ".tensor")));
    KEDGE_ASSIGN_OR_RETURN(
        to.scales, ReadText(from.scales, absl::StrCat(where, ".scales")));
    KEDGE_RETURN_IF_ERROR(InRange(from.scale_kind, KEDGE_SCALE_EXACT,
                                  KEDGE_SCALE_POWER_OF_TWO,
                                  absl::StrCat(where, ".scale_kind")));
    to.scale_kind = static_cast<ScaleKind>(from.scale_kind);
    if (!(from.floor >= 0)) {  // NaN, too
      return absl::InvalidArgumentError(absl::StrCat(
          where, ".floor: expected at least 0, found ", from.floor));
    }
    to.floor = OrDefault(from.floor, QuantisedTensor{}.floor);
  }
  return read;
}

absl::StatusOr<HookOptions> ReadHookOptions(const kedge_hook_options& given) {
  const kedge_hook_options defaults = DefaultHookOptions();
  HookOptions read;
  KEDGE_RETURN_IF_ERROR(NotNull(given.device, "hook options.device"));
  read.device = given.device->device.get();
  KEDGE_ASSIGN_OR_RETURN(
      read.parameters, ReadParameters(given.parameters, given.parameter_count));
  KEDGE_ASSIGN_OR_RETURN(
      read.tensors, ReadTensors(given.tensors, given.tensor_count, "tensors"));
  KEDGE_ASSIGN_OR_RETURN(
      read.residual,
      ReadTensors(given.residual, given.residual_count, "residual"));
  KEDGE_ASSIGN_OR_RETURN(read.quantised,
                         ReadQuantised(given.quantised, given.quantised_count));
  read.chunk_bytes = OrDefault(given.chunk_bytes, defaults.chunk_bytes);
  read.ring_bytes = OrDefault(given.ring_bytes, defaults.ring_bytes);
  read.deadline = Milliseconds(given.deadline_ms, defaults.deadline_ms);
  return read;
}

// Opens a hook by `open`, which is given the options of both sides.
template <class Open>
kedge_status OpenHook(const kedge_writer_options* writer,
                      const kedge_hook_options* options, kedge_hook** hook,
                      kedge_error** error, const Open& open) noexcept {
  return Guarded(error, [&]() -> absl::Status {
    KEDGE_RETURN_IF_ERROR(NotNull(hook, "hook"));
    *hook = nullptr;
    KEDGE_ASSIGN_OR_RETURN(const OwnedWriterOptions writer_options,
                           ReadWriterOptions(writer));
    KEDGE_ASSIGN_OR_RETURN(const kedge_hook_options given,
                           ReadStruct(options, "hook options"));
    KEDGE_ASSIGN_OR_RETURN(HookOptions read, ReadHookOptions(given));
    auto made = std::make_unique<kedge_hook>();
    made->device = given.device->device;
    made->coordinator = writer_options.coordinator;
    KEDGE_ASSIGN_OR_RETURN(made->hook,
                           open(writer_options.options, std::move(read)));
    for (const auto& [name, bytes] : made->hook->memory().residual) {
      made->residual.push_back({name.c_str(), bytes});
    }
    *hook = made.release();
    return absl::OkStatus();
  });
}

}  // namespace
}  // namespace kedge::capi

using kedge::capi::CheckResult;
using kedge::capi::Guarded;
using kedge::capi::NotNull;

extern "C" {

kedge_status kedge_hook_options_init(kedge_hook_options* options,
                                     std::size_t struct_size,
                                     kedge_error** error) {
  return kedge::capi::InitStruct(options, struct_size,
                                 kedge::capi::DefaultHookOptions(),
                                 "hook options", error);
}

kedge_status kedge_hook_create(const kedge_writer_options* writer,
                               const kedge_store_options* store,
                               const kedge_hook_options* options,
                               kedge_hook** hook, kedge_error** error) {
  using Made = absl::StatusOr<std::unique_ptr<kedge::OptimizerHook>>;
  return kedge::capi::OpenHook(
      writer, options, hook, error,
      [&](const kedge::WriterOptions& read, kedge::HookOptions hooked) -> Made {
        KEDGE_ASSIGN_OR_RETURN(const kedge::InitOptions init,
                               kedge::capi::ReadStoreOptions(store));
        return kedge::OptimizerHook::Create(read, init, std::move(hooked));
      });
}

kedge_status kedge_hook_open(const kedge_writer_options* writer,
                             const kedge_hook_options* options,
                             const std::uint64_t* resume_step,
                             kedge_hook** hook, kedge_error** error) {
  return kedge::capi::OpenHook(
      writer, options, hook, error,
      [&](const kedge::WriterOptions& read, kedge::HookOptions hooked) {
        std::optional<std::uint64_t> step;
        if (resume_step != nullptr) step = *resume_step;
        return kedge::OptimizerHook::Open(read, std::move(hooked), step);
      });
}

kedge_status kedge_hook_begin_step(kedge_hook* hook, std::uint64_t step,
                                   std::int32_t anchor, kedge_error** error) {
  return Guarded(error, [&]() -> absl::Status {
    KEDGE_RETURN_IF_ERROR(NotNull(hook, "hook"));
    return hook->hook->BeginStep(step, anchor != 0);
  });
}

kedge_status kedge_hook_on_update(kedge_hook* hook, std::uint32_t parameter,
                                  std::uint64_t begin, std::uint64_t bytes,
                                  const void* pinned_source, void* stream,
                                  std::uint64_t* ticket, kedge_error** error) {
  return Guarded(error, [&]() -> absl::Status {
    KEDGE_RETURN_IF_ERROR(NotNull(ticket, "ticket"));
    *ticket = 0;
    KEDGE_RETURN_IF_ERROR(NotNull(hook, "hook"));
    if (bytes != 0) {
      KEDGE_RETURN_IF_ERROR(NotNull(pinned_source, "pinned_source"));
    }
    KEDGE_ASSIGN_OR_RETURN(
        const kedge::OptimizerHook::Ticket taken,
        hook->hook->OnUpdate(parameter, begin, bytes, pinned_source, stream));
    *ticket = taken.number;
    return absl::OkStatus();
  });
}

kedge_status kedge_hook_has_passed(const kedge_hook* hook, std::uint64_t ticket,
                                   std::int32_t* passed, kedge_error** error) {
  return Guarded(error, [&]() -> absl::Status {
    KEDGE_RETURN_IF_ERROR(NotNull(passed, "passed"));
    *passed = 0;
    KEDGE_RETURN_IF_ERROR(NotNull(hook, "hook"));
    KEDGE_ASSIGN_OR_RETURN(const bool has_passed,
                           hook->hook->HasPassed({ticket}));
    *passed = has_passed ? 1 : 0;
    return absl::OkStatus();
  });
}

kedge_status kedge_hook_wait_for(const kedge_hook* hook, std::uint64_t ticket,
                                 kedge_error** error) {
  return Guarded(error, [&]() -> absl::Status {
    KEDGE_RETURN_IF_ERROR(NotNull(hook, "hook"));
    return hook->hook->WaitFor({ticket});
  });
}

kedge_status kedge_hook_end_step(kedge_hook* hook, kedge_error** error) {
  return Guarded(error, [&]() -> absl::Status {
    KEDGE_RETURN_IF_ERROR(NotNull(hook, "hook"));
    return hook->hook->EndStep();
  });
}

kedge_status kedge_hook_publish(kedge_hook* hook,
                                const kedge_publish_options* options,
                                kedge_publish_result* result,
                                kedge_hook_result* hook_result,
                                kedge_error** error) {
  return Guarded(error, [&]() -> absl::Status {
    KEDGE_RETURN_IF_ERROR(NotNull(hook, "hook"));
    KEDGE_RETURN_IF_ERROR(CheckResult(result, "result"));
    KEDGE_RETURN_IF_ERROR(CheckResult(hook_result, "hook result"));
    KEDGE_ASSIGN_OR_RETURN(const kedge::capi::PublishArguments read,
                           kedge::capi::ReadPublishOptions(options));
    KEDGE_ASSIGN_OR_RETURN(
        kedge::HookResult published,
        hook->hook->Publish(read.metadata.has_value() ? &*read.metadata
                                                      : nullptr));
    kedge_hook_result filled = {};
    filled.wait_seconds = published.wait_seconds;
    filled.drain_seconds = published.drain_seconds;
    filled.guard_seconds = published.guard_seconds;
    filled.commit_seconds = published.commit_seconds;
    filled.early_drains = published.early_drains;
    filled.guard_bytes = published.guard_bytes;
    kedge::capi::WriteResult(filled, hook_result);
    hook->texts.Take(std::move(published.publish),
                     hook->hook->store_writer().epoch(), result);
    return absl::OkStatus();
  });
}

kedge_status kedge_hook_held(const kedge_hook* hook, kedge_version_id* version,
                             kedge_error** error) {
  return Guarded(error, [&]() -> absl::Status {
    KEDGE_RETURN_IF_ERROR(NotNull(hook, "hook"));
    KEDGE_RETURN_IF_ERROR(NotNull(version, "version"));
    *version = kedge::capi::ToC(hook->hook->held());
    return absl::OkStatus();
  });
}

kedge_status kedge_hook_get_memory(const kedge_hook* hook,
                                   kedge_hook_memory* memory,
                                   kedge_error** error) {
  return Guarded(error, [&]() -> absl::Status {
    KEDGE_RETURN_IF_ERROR(NotNull(hook, "hook"));
    KEDGE_RETURN_IF_ERROR(NotNull(memory, "memory"));
    KEDGE_RETURN_IF_ERROR(CheckResult(memory, "memory"));
    const kedge::HookMemory& held = hook->hook->memory();
    kedge_hook_memory filled = {};
    filled.device_bytes = held.device_bytes;
    filled.pinned_bytes = held.pinned_bytes;
    filled.residual_bytes = held.residual_bytes;
    filled.residual = hook->residual.empty() ? nullptr : hook->residual.data();
    filled.residual_count = hook->residual.size();
    kedge::capi::WriteResult(filled, memory);
    return absl::OkStatus();
  });
}

void kedge_hook_free(kedge_hook* hook) { delete hook; }

}  // extern "C"
