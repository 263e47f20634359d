#ifndef KEDGE_CAPI_WRITER_ARGUMENTS_H_
#define KEDGE_CAPI_WRITER_ARGUMENTS_H_

// What writer and hook are both given, and both give back.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kedge/capi/boundary.h"
#include "kedge/capi/handles.h"
#include "kedge/format/manifest.h"
#include "kedge/writer/store_writer.h"
#include "kedge/writer/tensor_source.h"

namespace kedge::capi {

// A time of the caller's; 0: `standard`. Ten years at most, which can be added
// to a clock.
std::chrono::milliseconds Milliseconds(std::uint64_t milliseconds,
                                       std::uint64_t standard = 0);

absl::StatusOr<std::vector<TrainerTensor>> ReadTensors(
    const kedge_tensor* tensors, std::size_t count, absl::string_view what);

absl::StatusOr<Metadata> ReadMetadata(const kedge_metadata* metadata,
                                      std::size_t count);

// WriterOptions with the coordinator that they borrow.
struct OwnedWriterOptions {
  WriterOptions options;
  std::shared_ptr<Coordinator> coordinator;
};
absl::StatusOr<OwnedWriterOptions> ReadWriterOptions(
    const kedge_writer_options* options);

// Null: the defaults.
absl::StatusOr<InitOptions> ReadStoreOptions(
    const kedge_store_options* options);

// Null: no anchor, metadata as before.
struct PublishArguments {
  bool anchor = false;
  std::optional<Metadata> metadata;
};
absl::StatusOr<PublishArguments> ReadPublishOptions(
    const kedge_publish_options* options);

// [16] bytes, or nothing for null.
std::optional<RunId> ReadRunId(const std::uint8_t* run_id);

// What a kedge_publish_result points to.
class PublishTexts {
 public:
  // Keeps the texts of `result` and fills `to`, unless it is null.
  void Take(PublishResult result, std::uint32_t epoch,
            kedge_publish_result* to);

 private:
  Texts warnings_;
  std::string anchor_message_;
};

}  // namespace kedge::capi

#endif  // KEDGE_CAPI_WRITER_ARGUMENTS_H_
