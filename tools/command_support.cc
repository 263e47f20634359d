// What several subcommands share.

#include <algorithm>
#include <thread>

#include "absl/strings/str_cat.h"
#include "kedge/engine/io/store.h"
#include "kedge/format/dtype.h"
#include "kedge/tools/commands.h"

namespace kedge {

WriterOptions ToolWriterOptions(const std::string& store,
                                const TensorTable& table) {
  // Measured in tests/tools/kedge_program_test.cc. A thread holds an old and a
  // new slice, a record, and a piece of an old record; a segment file up to
  // two pieces; the writes in flight eight.
  constexpr std::uint64_t kSliceBytes = std::uint64_t{4} << 20;
  constexpr int kMaxEncodeThreads = 4;
  std::uint32_t unit_bytes = 1;
  for (const TensorSpec& spec : table.tensors()) {
    unit_bytes = std::max(unit_bytes, UnitBytes(spec.dtype));
  }
  WriterOptions options;
  options.store_path = store;
  options.encode_threads =
      std::clamp(static_cast<int>(std::thread::hardware_concurrency()), 1,
                 kMaxEncodeThreads);
  options.segment_files = 2;
  options.slice_units = kSliceBytes / unit_bytes;
  return options;
}

std::uint64_t UnitCount(const TensorTable& table) {
  std::uint64_t units = 0;
  for (const TensorSpec& spec : table.tensors()) {
    if (spec.tied_to == kNotTied) units += spec.unit_count();
  }
  return units;
}

std::string DescribeLease(const LeaseInfo& lease) {
  return absl::StrCat(lease.held ? absl::StrCat("holds v", lease.held->step)
                                 : std::string("holds nothing"),
                      ", needs v", lease.oldest_step, " and later");
}

absl::StatusOr<std::shared_ptr<const PublishedStep>> FindStep(
    const Store& store, std::uint64_t step) {
  auto found = store.ReadStep(step);
  if (!absl::IsNotFound(found.status())) return found;
  const auto steps = store.ListSteps();
  std::string present = "none";
  if (steps.ok() && !steps->empty()) {
    present = steps->size() == 1
                  ? absl::StrCat("v", steps->front())
                  : absl::StrCat(steps->size(), " from v", steps->front(),
                                 " to v", steps->back());
  }
  return absl::NotFoundError(absl::StrCat(store.path(), ": v", step,
                                          ": expected a published step, found ",
                                          present, "; `kedge ls` lists them"));
}

}  // namespace kedge
