#include "kedge/examples/gpu_loop/host.h"

#include <algorithm>
#include <cstdio>
#include <iterator>
#include <optional>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "kedge/examples/offload_trainer/open_device.h"
#include "kedge/format/status.h"

namespace kedge::example {
namespace {

std::optional<int> OrdinalOf(absl::string_view device) {
  int ordinal = 0;
  if (!absl::ConsumePrefix(&device, "cuda:") ||
      !absl::SimpleAtoi(device, &ordinal)) {
    return std::nullopt;
  }
  return ordinal;
}

}  // namespace

std::vector<std::string> DeviceNames(const HostOptions& options) {
  std::vector<std::string> names(options.places(), options.device);
  for (std::size_t p = 0; p < names.size() && !options.engine_devices.empty();
       ++p) {
    names[p] = options.engine_devices[p % options.engine_devices.size()];
  }
  return names;
}

std::string PlaceName(const HostOptions& options, std::size_t place) {
  const std::size_t rank = place % options.tp;
  if (options.engines == 1) return absl::StrCat("engine rank ", rank);
  return absl::StrCat("engine ", place / options.tp, " rank ", rank);
}

absl::StatusOr<std::vector<int>> OwnGpus(const HostOptions& options,
                                         std::uint32_t engine) {
  const std::vector<std::string> names = DeviceNames(options);
  std::vector<int> ordinals;
  for (std::uint32_t r = 0; r < options.tp; ++r) {
    const std::size_t place = std::size_t{engine} * options.tp + r;
    const std::optional<int> ordinal = OrdinalOf(names[place]);
    const auto lacks = [&](const std::string& found) {
      return absl::InvalidArgumentError(
          Describe({.where = PlaceName(options, place),
                    .what = "NCCL",
                    .expected = "a GPU that no other engine rank has",
                    .found = found,
                    .advice = "name as many GPUs with --engine-device, or take "
                              "--nccl auto"}));
    };
    if (!ordinal) return lacks(names[place]);
    for (std::size_t other = 0; other < names.size(); ++other) {
      if (other == place || OrdinalOf(names[other]) != ordinal) continue;
      return lacks(absl::StrCat(names[place], ", which ",
                                PlaceName(options, other), " has too"));
    }
    ordinals.push_back(*ordinal);
  }
  return ordinals;
}

absl::StatusOr<std::unique_ptr<Host>> Host::Open(HostOptions options) {
  if (options.engines < 1 || options.engines > 8 || options.tp < 1 ||
      options.tp > 8) {
    return absl::InvalidArgumentError(
        Describe({.where = "inference engines",
                  .what = "their number",
                  .expected = "1 to 8, of 1 to 8 ranks",
                  .found = absl::StrCat(options.engines, " of ", options.tp)}));
  }
  if (options.nccl == "on") {  // before a device is opened
    for (std::uint32_t e = 0; e < options.engines; ++e) {
      KEDGE_RETURN_IF_ERROR(OwnGpus(options, e).status());
    }
  }
  std::unique_ptr<Host> host(new Host(std::move(options)));
  KEDGE_RETURN_IF_ERROR(host->OpenDevices());
  host->sums_.resize(host->options_.engines);
  for (std::uint32_t e = 0; e < host->options_.engines; ++e) {
    KEDGE_RETURN_IF_ERROR(host->OpenSum(e));
  }
  return host;
}

absl::Status Host::OpenDevices() {
  std::vector<std::string> opened = {options_.device};
  KEDGE_ASSIGN_OR_RETURN(std::unique_ptr<Device> trainer,
                         OpenDevice(options_.device));
  devices_.push_back(std::move(trainer));
  for (const std::string& name : DeviceNames(options_)) {
    auto at = std::find(opened.begin(), opened.end(), name);
    if (at == opened.end()) {
      KEDGE_ASSIGN_OR_RETURN(std::unique_ptr<Device> device, OpenDevice(name));
      devices_.push_back(std::move(device));
      opened.push_back(name);
      at = std::prev(opened.end());
    }
    of_place_.push_back(
        devices_[static_cast<std::size_t>(at - opened.begin())].get());
  }
  return absl::OkStatus();
}

absl::Status Host::OpenSum(std::uint32_t engine) {
  Sum& sum = sums_[engine];
  sum.threads = std::make_unique<ThreadSum>(options_.tp, options_.timeout);
  sum.name = options_.tp == 1 ? "none" : "in process";
  if (options_.nccl == "off") return absl::OkStatus();
  const absl::StatusOr<std::vector<int>> gpus = OwnGpus(options_, engine);
  if (options_.nccl == "auto" && (!gpus.ok() || options_.tp == 1)) {
    return absl::OkStatus();
  }
  KEDGE_RETURN_IF_ERROR(gpus.status());
  const auto first = of_place_.begin() + static_cast<std::ptrdiff_t>(
                                             std::size_t{engine} * options_.tp);
  absl::StatusOr<std::unique_ptr<NcclSum>> nccl =
      NcclSum::Open(options_.nccl_library, {first, first + options_.tp}, *gpus,
                    options_.timeout);
  if (nccl.ok()) {
    sum.nccl = *std::move(nccl);
    sum.name = absl::StrCat("NCCL ", sum.nccl->version());
    return absl::OkStatus();
  }
  if (options_.nccl == "on") return nccl.status();
  std::printf("%s; ranks add up in process\n",
              std::string(nccl.status().message()).c_str());
  return absl::OkStatus();
}

std::function<absl::Status(std::span<std::uint64_t>)> Host::ReduceOf(
    std::size_t place) {
  Sum& sum = sums_[place / options_.tp];
  const auto rank = static_cast<std::uint32_t>(place % options_.tp);
  return sum.nccl != nullptr ? sum.nccl->ForRank(rank)
                             : sum.threads->ForRank(rank);
}

}  // namespace kedge::example
