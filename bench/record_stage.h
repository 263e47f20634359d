#ifndef KEDGE_BENCH_RECORD_STAGE_H_
#define KEDGE_BENCH_RECORD_STAGE_H_

// A published step's records on a device, ready to be applied to boxes, with
// nothing of the reader around them: for timing kernels by themselves.

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kedge/bench/bench_tasks.h"
#include "kedge/engine/device/device.h"
#include "kedge/engine/io/store.h"

namespace kedge {

// A box of a tensor in device memory.
struct BenchTarget {
  std::uint32_t tensor = 0;  // ordinal
  BoxTarget box;
};

class RecordStage {
 public:
  // Reads the segment files of `step` whole, keeps the records of tensors that
  // some target holds, and of them the tiles that touch a box. Waits.
  static absl::StatusOr<RecordStage> Make(Device* device,
                                          const PublishedStep& step,
                                          const L61Key& key,
                                          std::span<const BenchTarget> targets,
                                          DeviceStream stream);

  absl::Status Apply(Device* device, DeviceStream stream) const;
  // What Apply came to. Waits.
  absl::StatusOr<ApplyOutcome> ReadOutcome(Device* device,
                                           DeviceStream stream) const;
  // Runs the check kernel and compares nnz and L of every record with the
  // manifest. Tiles that touch no box are left out of Apply but not of this, so
  // that it wants targets that hold whole tensors. Waits.
  absl::Status Check(Device* device, const PublishedStep& step,
                     DeviceStream stream) const;

  std::uint64_t record_count() const { return record_of_.size(); }
  std::uint64_t tile_count() const { return tile_count_; }
  std::uint64_t payload_bytes() const { return payload_bytes_; }  // of tiles
  std::uint64_t nnz() const { return nnz_; }  // of the records

  // The same changes, decoded, where the boxes hold them.
  struct Decoded {
    DeviceMemory runs;
    DeviceMemory offsets;
    DeviceMemory values;
    ScatterBatch batch;
    std::uint64_t count = 0;
  };
  absl::StatusOr<Decoded> Decode(Device* device, DeviceStream stream) const;

 private:
  ApplyBatch BatchOf() const;

  std::vector<std::byte> bytes_;  // of all segment files, one after the other
  std::vector<ApplyTile> tiles_;
  std::vector<ApplyRecord> records_;
  std::vector<BoxTarget> boxes_;
  std::vector<std::uint32_t> record_of_;  // in the manifest
  std::uint64_t tile_count_ = 0;
  std::uint64_t payload_bytes_ = 0;
  std::uint64_t nnz_ = 0;
  L61Key key_;
  DeviceMemory device_bytes_;
  DeviceMemory device_tiles_;
  DeviceMemory device_records_;
  DeviceMemory device_boxes_;
  DeviceMemory device_l61_;
  DeviceMemory device_sums_;
  DeviceMemory outcome_;
};

// Calls `body(i)` for every i below `count` on all cores; the first error.
absl::Status OnAllCores(std::uint64_t count,
                        const std::function<absl::Status(std::uint64_t)>& body);

}  // namespace kedge

#endif  // KEDGE_BENCH_RECORD_STAGE_H_
