#ifndef KEDGE_WRITER_DEVICE_DELTA_H_
#define KEDGE_WRITER_DEVICE_DELTA_H_

// Differences taken on the device, chunk by chunk, while a step goes on: memory
// for chunks on their way, a ring for what the encoder makes of them, a thread
// that keeps it all moving, and the way into segments. Private to writer/. See
// docs/hook.md.

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kedge/engine/device/device.h"
#include "kedge/engine/io/io_pool.h"
#include "kedge/format/codec.h"
#include "kedge/writer/store_writer.h"

namespace kedge {

struct DeviceDeltaOptions {
  Device* device = nullptr;
  std::uint64_t chunk_bytes = 0;  // at most, of one chunk
  std::uint64_t ring_bytes = 0;
  std::uint32_t max_slices = 0;  // of one chunk
  std::uint64_t max_tiles = 0;   // of one chunk's slices together
  // For fp8: tasks of one chunk, scratch for the values and scales of old (and
  // as much for new), rows that wait for their block to be whole.
  std::uint32_t max_quantise_tasks = 0;
  std::uint64_t quantised_values = 0;
  std::uint64_t quantised_scales = 0;
  std::uint32_t carry_count = 0;
  std::uint64_t carry_bytes = 0;  // of each
  L61Key key;
  // Sums that slices may add to (DeviceDelta::Slice::sum).
  std::size_t sum_count = 0;
  std::chrono::milliseconds deadline{};
};

// All memory comes at Create. Between BeginStep and WaitForAll nothing is
// allocated, but by the first step, one with more changed tiles than any
// before, and by an early drain.
//
// Thread safety: one thread at a time calls what is not said to be callable
// from any.
class DeviceDelta {
 public:
  // Chunks on their way at once. Their bytes share the memory of kFullSlots of
  // chunk_bytes, so that small ones do not hold the large ones up. With fewer
  // the bus rests: a chunk that does not fit behind the one before leaves a
  // gap.
  static constexpr std::uint32_t kSlots = 8;
  static constexpr std::uint32_t kFullSlots = 4;
  struct Slice {
    std::uint32_t tensor = 0;  // ordinal of the record
    std::uint32_t sum = 0;     // which sum its L adds to
  };

  // A chunk on its way. What comes first: OnUpdate fills it.
  struct Slot {
    // Device memory, as many bytes as were asked for.
    std::byte* bytes = nullptr;
    // Slices of which records are made, then those that are only summed.
    EncodeSlice* slices = nullptr;  // pinned, [max_slices]
    Slice* about = nullptr;         // [max_slices]
    std::uint32_t slice_count = 0;
    std::uint32_t kept_slices = 0;
    std::uint64_t kept_tiles = 0;
    std::uint64_t tile_count = 0;
    std::uint64_t payload_bound = 0;  // of the kept ones
    // Work before the diff: fp8 forms of old and new.
    QuantiseTask* quantise = nullptr;       // pinned, [max_quantise_tasks]
    const char** quantise_names = nullptr;  // likewise, for messages
    std::uint32_t quantise_count = 0;
    std::uint64_t quantise_blocks = 0;
    ScaleKind scale_kind = ScaleKind::kExact;
    float floor = 0;
    // Before that, and after it, of old and of new.
    struct DeviceCopy {
      std::byte* to = nullptr;
      const std::byte* from = nullptr;
      std::uint64_t bytes = 0;
    };
    DeviceCopy before[2];
    DeviceCopy after[2];
    // What is done when all of the above has read what is there, and whatever
    // becomes of it: the parameter gets its new bytes.
    DeviceCopy update;
    // Recorded on the caller's stream: the bytes are here, and what they come
    // from is free.
    DeviceEvent arrived = nullptr;

    void Clear() {
      slice_count = 0;
      kept_slices = 0;
      kept_tiles = 0;
      tile_count = 0;
      payload_bound = 0;
      quantise_count = 0;
      quantise_blocks = 0;
      for (int i = 0; i < 2; ++i) before[i] = after[i] = {};
      update = {};
    }

   private:
    friend class DeviceDelta;
    bool filled = false;
    absl::Status status;  // of the step, as far as the caller knows
    // What it takes of the chunks' memory.
    std::uint64_t memory_begin = 0;
    std::uint64_t memory_end = 0;
    EncodeSlice* device_slices = nullptr;
    QuantiseTask* device_quantise = nullptr;
    OwnedEvent arrived_event;
  };

  static absl::StatusOr<std::unique_ptr<DeviceDelta>> Create(
      const DeviceDeltaOptions& options);
  ~DeviceDelta();

  // When idle. Drops what is there. Early drains go into `attempt`, which
  // outlives the step's diffs; null: records are not kept, only sums.
  void BeginStep(StoreWriter::DeltaAttempt* attempt, IoPool* assemble_pool);
  // When idle: later early drains go into another attempt, if there was one.
  void ReplaceAttempt(StoreWriter::DeltaAttempt* attempt) {
    attempt_ = attempt;
  }
  // The slot of the next chunk, of at most `bytes` <= chunk_bytes, when those
  // whose memory it takes are diffed. Its bytes lie in 16-byte vectors as those
  // at `like` do. kUnavailable after the deadline.
  absl::StatusOr<Slot*> WaitForSlot(std::uint64_t bytes, const void* like);
  // Adds units to a slot: kept ones first, of which records are made, then
  // those that are only summed. False: it is too much for one chunk, whose
  // parts never take more than the ring; a slice of one element always fits
  // into an empty slot.
  bool AddSlice(const TileGrid& grid, const UnitRange& units,
                const StridedUnits& old_units, const StridedUnits& new_units,
                Slice about, bool kept, Slot* slot) const;
  // What the kernels are told of the slot's slices, enqueued ahead of its
  // bytes: on `stream`, in which they follow. (A copy to the device waits for
  // those enqueued before it, also on other streams.)
  absl::Status Upload(const Slot& slot, DeviceStream stream);
  // Hands the slot on. `status` not OK: the step's delta is lost. Not `filled`,
  // which is a reason for that: the caller has seen to the update. Returns the
  // chunk's number, from 1.
  std::uint64_t Submit(bool filled, const absl::Status& status);
  // Waits until every chunk is diffed or given up, and its update done.
  // kUnavailable after the deadline: what the chunks use is then still in use.
  absl::Status WaitUntilIdle();
  // The same, and the first error of any chunk since BeginStep.
  absl::Status WaitForAll();

  // After WaitUntilIdle: not OK if a chunk's new bytes are not where they
  // belong, which is worse than a delta that is lost.
  absl::Status arrival() const;

  // Whether the source of chunk `number` is free. As arrival() says once a
  // chunk's bytes did not arrive: the device may read a source still. From any
  // thread.
  absl::StatusOr<bool> HasPassed(std::uint64_t number) const;
  absl::Status WaitFor(std::uint64_t number) const;

  // After WaitForAll. What the step's changes add to each sum.
  std::span<const std::uint64_t> sums() const { return sums_; }
  // Parts that went into the attempt before the step was over.
  std::uint64_t early_drains() const { return early_drains_; }
  // Brings every part that is still in the ring into `attempt`; they stay.
  absl::Status Drain(StoreWriter::DeltaAttempt* attempt);

  // Device memory for fp8: old or new values and scales of one chunk; carries.
  std::byte* quantised_values(bool is_new) const { return values_[is_new]; }
  float* quantised_scales(bool is_new) const { return scales_[is_new]; }
  std::byte* carry(std::uint32_t i) const { return carries_[i]; }

  std::uint64_t device_bytes() const { return device_bytes_; }
  std::uint64_t pinned_bytes() const { return pinned_bytes_; }

 private:
  // A changed tile of a slice.
  struct Tile {
    std::uint32_t tile = 0;  // counted from the slice's first
    std::uint32_t payload = 0;
    std::uint32_t bytes = 0;
    std::uint32_t nnz = 0;
    std::uint16_t a = 0;
    std::uint16_t b = 0;
    std::uint32_t mode = 0;
  };
  // A slice with changes.
  struct Part {
    std::uint32_t tensor = 0;
    UnitRange units;
    TileRange tiles;
    std::size_t first_tile = 0;  // in tiles_
    std::size_t tile_count = 0;
    std::uint64_t nnz = 0;
    std::uint64_t l61 = 0;
    std::uint64_t payload = 0;  // in the ring: of its chunk
  };
  // Parts that several threads make records of.
  struct Assembly {
    std::span<const Part> parts;
    const std::byte* bytes = nullptr;  // the ring's, from `begin` on
    std::uint64_t begin = 0;
    StoreWriter::DeltaAttempt* attempt = nullptr;
    std::atomic<std::size_t> next{0};
    std::optional<IoPool::Batch> batch;
  };
  // What a thread needs for that; kept from step to step.
  struct Scratch {
    RecordBuilder builder;
    std::vector<std::byte> record;
  };
  // What a chunk left in the ring.
  struct Chunk {
    std::uint64_t begin = 0;  // in the ring
    std::uint64_t bytes = 0;
    std::size_t first_part = 0;
    std::size_t part_count = 0;
  };

  explicit DeviceDelta(const DeviceDeltaOptions& options)
      : options_(options), device_(options.device) {}

  absl::StatusOr<std::byte*> Take(MemoryKind kind, std::uint64_t bytes);
  void Work();
  // Enqueues the update too.
  absl::Status Diff(Slot& slot);
  // After a Diff that failed or was not made.
  absl::Status UpdateAnyway(const Slot& slot);
  absl::Status CopyOnDevice(const Slot::DeviceCopy& what);
  absl::Status Quantise(Slot& slot);
  absl::Status DiffOnce(Slot& slot, std::uint32_t first_slice,
                        std::uint32_t slice_count, std::uint64_t first_tile,
                        std::uint64_t tile_count, std::byte* arena,
                        std::uint64_t arena_bytes);
  void Note(const Slot& slot);
  absl::Status DrainEarly();
  absl::Status Assemble(Assembly* assembly);
  absl::Status AssembleWith(Assembly* assembly, Scratch* scratch);
  void DropParts();

  DeviceDeltaOptions options_;
  Device* device_;
  std::vector<DeviceMemory> memory_;
  std::uint64_t device_bytes_ = 0;
  std::uint64_t pinned_bytes_ = 0;
  OwnedStream encode_stream_;
  OwnedStream drain_stream_;
  OwnedEvent diffed_;
  OwnedEvent drained_[2];
  DeviceMemory l61_table_;
  std::byte* ring_ = nullptr;
  std::byte* bounce_[2] = {};  // pinned, [bounce_bytes_]
  std::uint64_t bounce_bytes_ = 0;
  EncodedTile* device_tiles_ = nullptr;
  EncodedTile* tiles_out_ = nullptr;  // pinned
  EncodeTotals* device_totals_ = nullptr;
  EncodeTotals* totals_out_ = nullptr;  // pinned
  std::uint32_t* scratch_ = nullptr;
  std::uint64_t* device_bad_block_ = nullptr;
  std::uint64_t* bad_block_out_ = nullptr;  // pinned
  std::byte* values_[2] = {};
  float* scales_[2] = {};
  std::vector<std::byte*> carries_;
  std::vector<Slice> abouts_;
  std::vector<const char*> quantise_names_;
  Slot slots_[kSlots];
  // Of chunks on their way.
  std::byte* memory_of_chunks_ = nullptr;  // [chunk_memory_]
  std::uint64_t chunk_memory_ = 0;
  std::uint64_t chunk_memory_end_ = 0;  // of the last one submitted

  // Of the step; the worker's until WaitForAll.
  StoreWriter::DeltaAttempt* attempt_ = nullptr;
  IoPool* pool_ = nullptr;
  std::uint64_t ring_end_ = 0;  // bytes in use
  std::uint64_t early_drains_ = 0;
  std::vector<std::uint64_t> sums_;
  std::vector<Chunk> chunks_;
  std::vector<Part> parts_;
  std::vector<Tile> tiles_;
  std::mutex scratch_mutex_;
  std::vector<std::unique_ptr<Scratch>> scratches_
      ABSL_GUARDED_BY(scratch_mutex_);

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::uint64_t submitted_ ABSL_GUARDED_BY(mutex_) = 0;
  std::uint64_t diffed_count_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);   // of the step
  absl::Status arrival_ ABSL_GUARDED_BY(mutex_);  // likewise
  std::thread worker_;
};

}  // namespace kedge

#endif  // KEDGE_WRITER_DEVICE_DELTA_H_
