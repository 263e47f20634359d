#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "kedge/capi/boundary.h"
#include "kedge/capi/writer_arguments.h"
#include "kedge/writer/snapshot_writer.h"

struct kedge_writer {
  // Borrowed by the writer, which is destroyed first.
  std::shared_ptr<kedge::Coordinator> coordinator;
  std::unique_ptr<kedge::SnapshotWriter> writer;
  kedge::capi::PublishTexts texts;
};

using kedge::capi::CheckResult;
using kedge::capi::Guarded;
using kedge::capi::NotNull;

extern "C" {

kedge_status kedge_writer_create(const kedge_writer_options* options,
                                 const kedge_store_options* store,
                                 const kedge_tensor* tensors,
                                 std::size_t tensor_count,
                                 kedge_writer** writer, kedge_error** error) {
  return Guarded(error, [&]() -> absl::Status {
    KEDGE_RETURN_IF_ERROR(NotNull(writer, "writer"));
    *writer = nullptr;
    KEDGE_ASSIGN_OR_RETURN(const kedge::capi::OwnedWriterOptions read,
                           kedge::capi::ReadWriterOptions(options));
    KEDGE_ASSIGN_OR_RETURN(const kedge::InitOptions init,
                           kedge::capi::ReadStoreOptions(store));
    KEDGE_ASSIGN_OR_RETURN(
        std::vector<kedge::TrainerTensor> held,
        kedge::capi::ReadTensors(tensors, tensor_count, "tensors"));
    auto made = std::make_unique<kedge_writer>();
    made->coordinator = read.coordinator;
    KEDGE_ASSIGN_OR_RETURN(
        made->writer,
        kedge::SnapshotWriter::Create(read.options, init, std::move(held)));
    *writer = made.release();
    return absl::OkStatus();
  });
}

kedge_status kedge_writer_open(const kedge_writer_options* options,
                               const kedge_tensor* tensors,
                               std::size_t tensor_count,
                               const std::uint64_t* resume_step,
                               kedge_writer** writer, kedge_error** error) {
  return Guarded(error, [&]() -> absl::Status {
    KEDGE_RETURN_IF_ERROR(NotNull(writer, "writer"));
    *writer = nullptr;
    KEDGE_ASSIGN_OR_RETURN(const kedge::capi::OwnedWriterOptions read,
                           kedge::capi::ReadWriterOptions(options));
    KEDGE_ASSIGN_OR_RETURN(
        std::vector<kedge::TrainerTensor> held,
        kedge::capi::ReadTensors(tensors, tensor_count, "tensors"));
    std::optional<std::uint64_t> step;
    if (resume_step != nullptr) step = *resume_step;
    auto made = std::make_unique<kedge_writer>();
    made->coordinator = read.coordinator;
    KEDGE_ASSIGN_OR_RETURN(
        made->writer,
        kedge::SnapshotWriter::Open(read.options, std::move(held), step));
    *writer = made.release();
    return absl::OkStatus();
  });
}

kedge_status kedge_writer_publish(kedge_writer* writer, std::uint64_t step,
                                  const kedge_publish_options* options,
                                  kedge_publish_result* result,
                                  kedge_error** error) {
  return Guarded(error, [&]() -> absl::Status {
    KEDGE_RETURN_IF_ERROR(NotNull(writer, "writer"));
    KEDGE_RETURN_IF_ERROR(CheckResult(result, "result"));
    KEDGE_ASSIGN_OR_RETURN(const kedge::capi::PublishArguments read,
                           kedge::capi::ReadPublishOptions(options));
    kedge::PublishOptions publish;
    publish.anchor = read.anchor;
    if (read.metadata.has_value()) publish.metadata = &*read.metadata;
    KEDGE_ASSIGN_OR_RETURN(kedge::PublishResult published,
                           writer->writer->Publish(step, publish));
    writer->texts.Take(std::move(published),
                       writer->writer->store_writer().epoch(), result);
    return absl::OkStatus();
  });
}

kedge_status kedge_writer_replace_tensors(
    kedge_writer* writer, std::uint64_t step, const kedge_tensor* tensors,
    std::size_t tensor_count, const kedge_metadata* metadata,
    std::size_t metadata_count, kedge_publish_result* result,
    kedge_error** error) {
  return Guarded(error, [&]() -> absl::Status {
    KEDGE_RETURN_IF_ERROR(NotNull(writer, "writer"));
    KEDGE_RETURN_IF_ERROR(CheckResult(result, "result"));
    KEDGE_ASSIGN_OR_RETURN(
        std::vector<kedge::TrainerTensor> held,
        kedge::capi::ReadTensors(tensors, tensor_count, "tensors"));
    KEDGE_ASSIGN_OR_RETURN(const kedge::Metadata texts,
                           kedge::capi::ReadMetadata(metadata, metadata_count));
    KEDGE_ASSIGN_OR_RETURN(
        kedge::PublishResult published,
        writer->writer->ReplaceTensors(step, std::move(held), texts));
    writer->texts.Take(std::move(published),
                       writer->writer->store_writer().epoch(), result);
    return absl::OkStatus();
  });
}

kedge_status kedge_writer_held(const kedge_writer* writer,
                               kedge_version_id* version, kedge_error** error) {
  return Guarded(error, [&]() -> absl::Status {
    KEDGE_RETURN_IF_ERROR(NotNull(writer, "writer"));
    KEDGE_RETURN_IF_ERROR(NotNull(version, "version"));
    *version = kedge::capi::ToC(writer->writer->held());
    return absl::OkStatus();
  });
}

std::uint64_t kedge_writer_snapshot_bytes(const kedge_writer* writer) {
  return writer == nullptr ? 0 : writer->writer->snapshot_bytes();
}

void kedge_writer_free(kedge_writer* writer) { delete writer; }

}  // extern "C"
