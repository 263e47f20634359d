#ifndef KEDGE_WRITER_QUANTISED_SOURCE_H_
#define KEDGE_WRITER_QUANTISED_SOURCE_H_

// The fp8 form of bf16 weights that lie on the device, made when it is asked
// for. Private to writer/. See spec/fp8.md.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kedge/engine/device/device.h"
#include "kedge/writer/device_source.h"
#include "kedge/writer/tensor_source.h"

namespace kedge {

// A part of a bf16 tensor: whole blocks of 128 rows of it, contiguous.
struct QuantisedPart {
  std::string name;
  const std::byte* data = nullptr;  // device memory
  std::uint64_t first_row = 0;      // of the tensor; a multiple of 128
  std::uint64_t rows = 0;
  std::uint64_t cols = 0;
  std::uint32_t values = 0;  // ordinals
  std::uint32_t scales = 0;
  ScaleKind scale_kind = ScaleKind::kExact;
  float floor = 0;

  std::uint64_t block_cols() const;
  std::uint64_t block_rows() const;
};

// kFailedPrecondition from Read names a tensor with a NaN or an infinity.
class QuantisedSource : public TensorSource {
 public:
  static absl::StatusOr<std::unique_ptr<QuantisedSource>> Create(
      Device* device, DeviceReader* reader, std::vector<QuantisedPart> parts);

  std::optional<std::vector<UnitRange>> Owned(
      std::uint32_t ordinal) const override;
  // One call at a time; others wait.
  absl::StatusOr<std::span<const std::byte>> Read(
      std::uint32_t ordinal, std::uint64_t byte_begin, std::uint64_t byte_count,
      std::vector<std::byte>* scratch) override;

  std::uint64_t device_bytes() const {
    return values_.bytes() + scales_.bytes() + task_.bytes() + bad_.bytes();
  }
  std::uint64_t pinned_bytes() const { return pinned_.bytes(); }

 private:
  struct Pinned {
    QuantiseTask task;
    std::uint64_t bad_block;
  };
  QuantisedSource(Device* device, DeviceReader* reader,
                  std::vector<QuantisedPart> parts)
      : device_(device), reader_(reader), parts_(std::move(parts)) {}
  // Rows [begin, begin + count) of `part`, begin a multiple of 128, into
  // values_ and scales_.
  absl::Status Quantise(const QuantisedPart& part, std::uint64_t begin,
                        std::uint64_t count);

  Device* device_;
  DeviceReader* reader_;
  std::vector<QuantisedPart> parts_;  // ascending by (values, first_row)
  std::mutex mutex_;
  DeviceMemory values_;
  DeviceMemory scales_;
  DeviceMemory task_;
  DeviceMemory bad_;
  DeviceMemory pinned_;
  OwnedStream stream_;
};

}  // namespace kedge

#endif  // KEDGE_WRITER_QUANTISED_SOURCE_H_
