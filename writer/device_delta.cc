#include "kedge/writer/device_delta.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kedge/format/codec.h"
#include "kedge/format/limits.h"
#include "kedge/format/status.h"

namespace kedge {
namespace {

// Chunks begin on this boundary in the ring.
constexpr std::uint64_t kRingAlignment = 256;
// What is copied from the ring at once.
constexpr std::uint64_t kBounceBytes = std::uint64_t{8} << 20;

// Chunks keep their place within this many bytes, so that kernels may read
// vectors where they could in the parameter.
constexpr std::uint64_t kVectorBytes = 16;

// At most what the parts of `slice` take in the arena. A change costs at most
// 14 + 1 bits of gap and sign, 5 of unary code (a list of n gaps has n ones and
// below 2.5 n zeros more), and 2 w of its difference; a dense tile is never
// longer than the sparse form.
std::uint64_t PayloadBound(const TileGrid& grid, const UnitRange& units,
                           std::uint32_t unit_bytes) {
  const std::uint64_t first_row = units.begin / grid.cols;
  const std::uint64_t last_row = (units.end - 1) / grid.cols;
  std::uint64_t tiles;
  if (first_row == last_row) {
    tiles = (units.end - 1) % grid.cols / grid.tile_cols -
            units.begin % grid.cols / grid.tile_cols + 1;
  } else {
    tiles = grid.TilesOf(units).count;
  }
  const std::uint64_t per_change_bits = 20 + 16 * unit_bytes;
  return std::min(
      tiles * MaxTilePayload(grid.tile_rows * grid.tile_cols, unit_bytes),
      units.count() * per_change_bits / 8 + 16 * tiles);
}

std::uint64_t AlignUp(std::uint64_t value) {
  return (value + kRingAlignment - 1) / kRingAlignment * kRingAlignment;
}

}  // namespace

absl::StatusOr<std::byte*> DeviceDelta::Take(MemoryKind kind,
                                             std::uint64_t bytes) {
  if (bytes == 0) return nullptr;
  KEDGE_ASSIGN_OR_RETURN(DeviceMemory memory, device_->Allocate(kind, bytes));
  (kind == MemoryKind::kDevice ? device_bytes_ : pinned_bytes_) += bytes;
  memory_.push_back(std::move(memory));
  return memory_.back().data();
}

absl::StatusOr<std::unique_ptr<DeviceDelta>> DeviceDelta::Create(
    const DeviceDeltaOptions& options) {
  auto delta = std::unique_ptr<DeviceDelta>(new DeviceDelta(options));
  Device& device = *options.device;
  const auto take = [&](MemoryKind kind, std::uint64_t bytes,
                        auto** to) -> absl::Status {
    KEDGE_ASSIGN_OR_RETURN(std::byte* const memory, delta->Take(kind, bytes));
    *to = reinterpret_cast<std::remove_reference_t<decltype(*to)>>(memory);
    return absl::OkStatus();
  };
  KEDGE_ASSIGN_OR_RETURN(delta->encode_stream_, device.CreateStream());
  KEDGE_ASSIGN_OR_RETURN(delta->drain_stream_, device.CreateStream());
  KEDGE_ASSIGN_OR_RETURN(delta->diffed_, device.CreateEvent());
  for (OwnedEvent& event : delta->drained_) {
    KEDGE_ASSIGN_OR_RETURN(event, device.CreateEvent());
  }
  KEDGE_ASSIGN_OR_RETURN(delta->l61_table_, device.MakeL61Table(options.key));
  delta->device_bytes_ += delta->l61_table_.bytes();

  constexpr auto kDevice = MemoryKind::kDevice;
  constexpr auto kPinned = MemoryKind::kPinned;
  delta->abouts_.resize(std::size_t{kSlots} * options.max_slices);
  delta->quantise_names_.resize(std::size_t{kSlots} *
                                options.max_quantise_tasks);
  for (int i = 0; i < 2; ++i) {
    KEDGE_RETURN_IF_ERROR(
        take(kDevice, options.quantised_values, &delta->values_[i]));
    KEDGE_RETURN_IF_ERROR(take(
        kDevice, options.quantised_scales * sizeof(float), &delta->scales_[i]));
  }
  delta->carries_.resize(options.carry_count);
  for (std::byte*& carry : delta->carries_) {
    KEDGE_RETURN_IF_ERROR(take(kDevice, options.carry_bytes, &carry));
  }
  delta->chunk_memory_ =
      kFullSlots * (AlignUp(options.chunk_bytes) + kVectorBytes);
  KEDGE_RETURN_IF_ERROR(
      take(kDevice, delta->chunk_memory_, &delta->memory_of_chunks_));
  for (std::uint32_t i = 0; i < kSlots; ++i) {
    Slot& slot = delta->slots_[i];
    KEDGE_RETURN_IF_ERROR(
        take(kPinned, options.max_slices * sizeof(EncodeSlice), &slot.slices));
    KEDGE_RETURN_IF_ERROR(take(kDevice,
                               options.max_slices * sizeof(EncodeSlice),
                               &slot.device_slices));
    KEDGE_RETURN_IF_ERROR(
        take(kPinned, options.max_quantise_tasks * sizeof(QuantiseTask),
             &slot.quantise));
    KEDGE_RETURN_IF_ERROR(
        take(kDevice, options.max_quantise_tasks * sizeof(QuantiseTask),
             &slot.device_quantise));
    slot.quantise_names = delta->quantise_names_.data() +
                          std::size_t{i} * options.max_quantise_tasks;
    slot.about = delta->abouts_.data() + std::size_t{i} * options.max_slices;
    KEDGE_ASSIGN_OR_RETURN(slot.arrived_event, device.CreateEvent());
    slot.arrived = slot.arrived_event.get();
  }
  KEDGE_RETURN_IF_ERROR(take(kDevice, options.ring_bytes, &delta->ring_));
  delta->bounce_bytes_ = std::min(kBounceBytes, AlignUp(options.ring_bytes));
  for (auto& bounce : delta->bounce_) {
    KEDGE_RETURN_IF_ERROR(take(kPinned, delta->bounce_bytes_, &bounce));
  }
  KEDGE_RETURN_IF_ERROR(take(kDevice, options.max_tiles * sizeof(EncodedTile),
                             &delta->device_tiles_));
  KEDGE_RETURN_IF_ERROR(take(kPinned, options.max_tiles * sizeof(EncodedTile),
                             &delta->tiles_out_));
  KEDGE_RETURN_IF_ERROR(
      take(kDevice, sizeof(EncodeTotals), &delta->device_totals_));
  KEDGE_RETURN_IF_ERROR(
      take(kPinned, sizeof(EncodeTotals), &delta->totals_out_));
  KEDGE_RETURN_IF_ERROR(take(kDevice, options.max_tiles * sizeof(std::uint32_t),
                             &delta->scratch_));
  KEDGE_RETURN_IF_ERROR(
      take(kDevice, sizeof(std::uint64_t), &delta->device_bad_block_));
  KEDGE_RETURN_IF_ERROR(
      take(kPinned, sizeof(std::uint64_t), &delta->bad_block_out_));
  delta->sums_.assign(options.sum_count, 0);
  delta->worker_ = std::thread([self = delta.get()] { self->Work(); });
  return delta;
}

DeviceDelta::~DeviceDelta() {
  if (!worker_.joinable()) return;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  worker_.join();
}

void DeviceDelta::DropParts() {
  chunks_.clear();
  parts_.clear();
  tiles_.clear();
  ring_end_ = 0;
}

void DeviceDelta::BeginStep(StoreWriter::DeltaAttempt* attempt,
                            IoPool* assemble_pool) {
  attempt_ = attempt;
  pool_ = assemble_pool;
  early_drains_ = 0;
  std::fill(sums_.begin(), sums_.end(), 0);
  DropParts();
  const std::lock_guard<std::mutex> lock(mutex_);
  status_ = absl::OkStatus();
  arrival_ = absl::OkStatus();
}

absl::StatusOr<DeviceDelta::Slot*> DeviceDelta::WaitForSlot(std::uint64_t bytes,
                                                            const void* like) {
  KEDGE_CHECK(bytes <= options_.chunk_bytes);
  const std::uint64_t taken = AlignUp(bytes) + kVectorBytes;
  std::unique_lock<std::mutex> lock(mutex_);
  // Behind the chunk before, or from the start again.
  const std::uint64_t begin =
      taken <= chunk_memory_ - chunk_memory_end_ ? chunk_memory_end_ : 0;
  const std::uint64_t end = begin + taken;
  const auto is_free = [&] {
    if (submitted_ - diffed_count_ == kSlots) return false;
    for (std::uint64_t n = diffed_count_; n < submitted_; ++n) {
      const Slot& other = slots_[n % kSlots];
      if (begin < other.memory_end && other.memory_begin < end) return false;
    }
    return true;
  };
  if (!changed_.wait_for(lock, options_.deadline, is_free)) {
    return absl::UnavailableError(absl::StrCat(
        device_->name(), ": no chunk was diffed in ", options_.deadline.count(),
        " ms; the device or the storage hangs"));
  }
  Slot& slot = slots_[submitted_ % kSlots];
  slot.Clear();
  slot.memory_begin = begin;
  slot.memory_end = end;
  const std::uint64_t phase =
      reinterpret_cast<std::uintptr_t>(like) % kVectorBytes;
  slot.bytes = memory_of_chunks_ + begin + phase;
  return &slot;
}

bool DeviceDelta::AddSlice(const TileGrid& grid, const UnitRange& units,
                           const StridedUnits& old_units,
                           const StridedUnits& new_units, Slice about,
                           bool kept, Slot* slot) const {
  KEDGE_DCHECK(!kept || slot->kept_slices == slot->slice_count);
  const std::uint64_t tiles = grid.TilesOf(units).count;
  const std::uint64_t bound =
      kept ? PayloadBound(grid, units, old_units.unit_bytes) : 0;
  if (slot->slice_count == options_.max_slices ||
      tiles > options_.max_tiles - slot->tile_count ||
      bound > options_.ring_bytes - slot->payload_bound) {
    return false;
  }
  EncodeSlice& slice = slot->slices[slot->slice_count];
  slice.grid = grid;
  slice.slice = units;
  slice.old_units = old_units;
  slice.new_units = new_units;
  // Both kinds are batches of their own.
  slice.first_tile =
      kept ? slot->kept_tiles : slot->tile_count - slot->kept_tiles;
  slot->about[slot->slice_count] = about;
  ++slot->slice_count;
  slot->tile_count += tiles;
  slot->payload_bound += bound;
  if (kept) {
    ++slot->kept_slices;
    slot->kept_tiles += tiles;
  }
  return true;
}

absl::Status DeviceDelta::Upload(const Slot& slot, DeviceStream stream) {
  KEDGE_RETURN_IF_ERROR(device_->Copy(slot.device_slices, slot.slices,
                                      slot.slice_count * sizeof(EncodeSlice),
                                      stream));
  return device_->Copy(slot.device_quantise, slot.quantise,
                       slot.quantise_count * sizeof(QuantiseTask), stream);
}

std::uint64_t DeviceDelta::Submit(bool filled, const absl::Status& status) {
  KEDGE_DCHECK(filled || !status.ok());
  std::uint64_t number;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    Slot& slot = slots_[submitted_ % kSlots];
    slot.filled = filled;
    slot.status = status;
    chunk_memory_end_ = slot.memory_end;
    number = ++submitted_;
  }
  changed_.notify_all();
  return number;
}

absl::Status DeviceDelta::WaitUntilIdle() {
  std::unique_lock<std::mutex> lock(mutex_);
  if (!changed_.wait_for(lock, options_.deadline,
                         [this] { return submitted_ == diffed_count_; })) {
    return absl::UnavailableError(
        absl::StrCat(device_->name(), ": ", submitted_ - diffed_count_,
                     " chunks were not diffed in ", options_.deadline.count(),
                     " ms, and their parameters may not have the new weights "
                     "yet; the device or the storage hangs"));
  }
  return absl::OkStatus();
}

absl::Status DeviceDelta::WaitForAll() {
  KEDGE_RETURN_IF_ERROR(WaitUntilIdle());
  const std::lock_guard<std::mutex> lock(mutex_);
  return status_;
}

absl::Status DeviceDelta::arrival() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return arrival_;
}

absl::StatusOr<bool> DeviceDelta::HasPassed(std::uint64_t number) const {
  // The chunk before has a slot of its own, and perhaps another stream.
  for (std::uint64_t n = number < kSlots ? 1 : number - kSlots + 1; n <= number;
       ++n) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      KEDGE_RETURN_IF_ERROR(arrival_);
      if (n <= diffed_count_) continue;
    }
    KEDGE_ASSIGN_OR_RETURN(
        const bool passed,
        device_->HasPassed(slots_[(n - 1) % kSlots].arrived));
    if (!passed) return false;
  }
  return true;
}

absl::Status DeviceDelta::WaitFor(std::uint64_t number) const {
  for (std::uint64_t n = number < kSlots ? 1 : number - kSlots + 1; n <= number;
       ++n) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      KEDGE_RETURN_IF_ERROR(arrival_);
      if (n <= diffed_count_) continue;
    }
    KEDGE_RETURN_IF_ERROR(
        device_->WaitForEvent(slots_[(n - 1) % kSlots].arrived));
  }
  return absl::OkStatus();
}

void DeviceDelta::Work() {
  for (;;) {
    Slot* slot;
    absl::Status status;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock,
                    [this] { return stopping_ || submitted_ > diffed_count_; });
      if (submitted_ == diffed_count_) return;
      slot = &slots_[diffed_count_ % kSlots];
      status = status_.ok() ? slot->status : status_;
    }
    if (status.ok()) status = Diff(*slot);
    absl::Status arrived;
    if (!status.ok()) arrived = UpdateAnyway(*slot);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      status_.Update(status);
      arrival_.Update(arrived);
      ++diffed_count_;
    }
    changed_.notify_all();
  }
}

// Whatever still reads or writes the slot is over when this returns. A failure
// that passes does not keep weights from arriving: each call is tried again.
absl::Status DeviceDelta::UpdateAnyway(const Slot& slot) {
  const auto twice = [](auto call) {
    const absl::Status status = call();
    return status.ok() ? status : call();
  };
  const auto wait = [&] {
    return device_->WaitForStream(encode_stream_.get());
  };
  absl::Status updated =
      twice([&] { return device_->WaitForEvent(slot.arrived); });
  updated.Update(twice(wait));
  if (!slot.filled) return absl::OkStatus();
  if (updated.ok()) {
    updated = twice([&] { return CopyOnDevice(slot.update); });
    updated.Update(twice(wait));
  }
  if (updated.ok()) return updated;
  return Annotate(
      updated,
      absl::StrCat(slot.update.bytes, " bytes of new weights did not arrive"));
}

absl::Status DeviceDelta::CopyOnDevice(const Slot::DeviceCopy& what) {
  if (what.bytes == 0) return absl::OkStatus();
  return device_->Copy(what.to, what.from, what.bytes, encode_stream_.get());
}

absl::Status DeviceDelta::Quantise(Slot& slot) {
  const DeviceStream stream = encode_stream_.get();
  QuantiseBatch batch;
  batch.tasks = slot.device_quantise;
  batch.task_count = slot.quantise_count;
  batch.block_count = slot.quantise_blocks;
  batch.scale_kind = slot.scale_kind;
  batch.floor = slot.floor;
  batch.first_bad_block = device_bad_block_;
  KEDGE_RETURN_IF_ERROR(device_->Quantise(batch, stream));
  return device_->Copy(bad_block_out_, device_bad_block_, sizeof(std::uint64_t),
                       stream);
}

absl::Status DeviceDelta::DiffOnce(Slot& slot, std::uint32_t first_slice,
                                   std::uint32_t slice_count,
                                   std::uint64_t first_tile,
                                   std::uint64_t tile_count, std::byte* arena,
                                   std::uint64_t arena_bytes) {
  const DeviceStream stream = encode_stream_.get();
  EncodeBatch batch;
  batch.slices = slot.device_slices + first_slice;
  batch.slice_count = slice_count;
  batch.tile_count = tile_count;
  batch.tiles = device_tiles_ + first_tile;
  batch.arena = arena;
  batch.arena_bytes = arena_bytes;
  batch.totals = device_totals_;
  batch.scratch = scratch_;
  batch.l61.a = l61_table_.as<std::uint64_t>();
  batch.l61.key = options_.key;
  KEDGE_RETURN_IF_ERROR(device_->Encode(batch, stream));
  KEDGE_RETURN_IF_ERROR(
      device_->Copy(tiles_out_ + first_tile, device_tiles_ + first_tile,
                    tile_count * sizeof(EncodedTile), stream));
  return device_->Copy(totals_out_, device_totals_, sizeof(EncodeTotals),
                       stream);
}

absl::Status DeviceDelta::Diff(Slot& slot) {
  const DeviceStream stream = encode_stream_.get();
  const bool keeps = attempt_ != nullptr;
  // Before anything is enqueued, so that what follows never has to be done
  // again: the update takes the old bytes away.
  if (keeps && options_.ring_bytes - ring_end_ < slot.payload_bound) {
    KEDGE_RETURN_IF_ERROR(DrainEarly());
  }
  KEDGE_RETURN_IF_ERROR(device_->StreamWait(stream, slot.arrived));
  for (const auto& copy : slot.before) {
    KEDGE_RETURN_IF_ERROR(CopyOnDevice(copy));
  }
  if (slot.quantise_count > 0) KEDGE_RETURN_IF_ERROR(Quantise(slot));
  for (const auto& copy : slot.after) {
    KEDGE_RETURN_IF_ERROR(CopyOnDevice(copy));
  }
  const std::uint32_t sum_slices = slot.slice_count - slot.kept_slices;
  if (sum_slices > 0) {
    KEDGE_RETURN_IF_ERROR(
        DiffOnce(slot, slot.kept_slices, sum_slices, slot.kept_tiles,
                 slot.tile_count - slot.kept_tiles, ring_, 0));
  }
  const std::uint64_t room = keeps ? options_.ring_bytes - ring_end_ : 0;
  if (slot.kept_slices > 0) {
    KEDGE_RETURN_IF_ERROR(DiffOnce(slot, 0, slot.kept_slices, 0,
                                   slot.kept_tiles, ring_ + ring_end_, room));
  }
  KEDGE_RETURN_IF_ERROR(CopyOnDevice(slot.update));
  KEDGE_RETURN_IF_ERROR(device_->Record(diffed_.get(), stream));
  KEDGE_RETURN_IF_ERROR(device_->WaitForEvent(diffed_.get()));

  const std::uint64_t used =
      keeps && slot.kept_slices > 0 ? totals_out_->arena_bytes : 0;
  if (used > slot.payload_bound || used > room) {
    return absl::InternalError(absl::StrCat(
        device_->name(), ": parts of a chunk: expected at most ",
        slot.payload_bound, " bytes, found ", used,
        "; this is a defect of kedge; begin the next step with an anchor"));
  }
  if (slot.quantise_count > 0 && *bad_block_out_ != ~std::uint64_t{0}) {
    std::uint32_t task = 0;
    while (task + 1 < slot.quantise_count &&
           slot.quantise[task + 1].first_block <= *bad_block_out_) {
      ++task;
    }
    return absl::FailedPreconditionError(absl::StrCat(
        "tensor \"", slot.quantise_names[task],
        "\": a NaN or an infinity among its weights, which an fp8 scale cannot "
        "express; look at the optimizer, then begin a step with an anchor"));
  }
  Note(slot);
  if (used > 0) {
    ring_end_ = std::min(options_.ring_bytes, AlignUp(ring_end_ + used));
  }
  return absl::OkStatus();
}

void DeviceDelta::Note(const Slot& slot) {
  const bool keeps = attempt_ != nullptr;
  Chunk chunk;
  chunk.begin = ring_end_;
  chunk.bytes = 0;
  chunk.first_part = parts_.size();
  for (std::uint32_t s = 0; s < slot.slice_count; ++s) {
    const EncodeSlice& slice = slot.slices[s];
    const bool kept = s < slot.kept_slices;
    const std::uint64_t base = slice.first_tile + (kept ? 0 : slot.kept_tiles);
    Part part;
    part.tensor = slot.about[s].tensor;
    part.units = slice.slice;
    part.tiles = slice.grid.TilesOf(slice.slice);
    part.first_tile = tiles_.size();
    part.payload = ring_end_;
    for (std::uint64_t t = 0; t < part.tiles.count; ++t) {
      const EncodedTile& tile = tiles_out_[base + t];
      if (tile.bytes == 0) continue;
      part.nnz += tile.nnz;
      part.l61 = L61Add(part.l61, tile.l61);
      if (!kept || !keeps) continue;
      tiles_.push_back({static_cast<std::uint32_t>(t), tile.payload, tile.bytes,
                        tile.nnz, tile.a, tile.b, tile.mode});
      chunk.bytes =
          std::max(chunk.bytes, tile.payload * kArenaAlignment + tile.bytes);
    }
    std::uint64_t& sum = sums_[slot.about[s].sum];
    sum = L61Add(sum, part.l61);
    part.tile_count = tiles_.size() - part.first_tile;
    if (part.tile_count > 0) parts_.push_back(part);
  }
  chunk.part_count = parts_.size() - chunk.first_part;
  if (chunk.part_count > 0) chunks_.push_back(chunk);
}

absl::Status DeviceDelta::DrainEarly() {
  if (chunks_.empty()) return absl::OkStatus();
  KEDGE_RETURN_IF_ERROR(Drain(attempt_));
  ++early_drains_;
  DropParts();
  return absl::OkStatus();
}

absl::Status DeviceDelta::Drain(StoreWriter::DeltaAttempt* attempt) {
  // Chunks that fit into a bounce buffer together come in one copy, the next
  // ones while the last are assembled.
  struct Group {
    std::size_t first = 0;
    std::size_t end = 0;
    std::uint64_t begin = 0;  // in the ring
    std::uint64_t bytes = 0;
  };
  const auto group_from = [&](std::size_t first) {
    Group group{first, first, chunks_[first].begin, 0};
    while (group.end < chunks_.size()) {
      const Chunk& chunk = chunks_[group.end];
      const std::uint64_t bytes = chunk.begin + chunk.bytes - group.begin;
      if (group.end > first && bytes > bounce_bytes_) break;
      group.bytes = bytes;
      ++group.end;
    }
    return group;
  };
  const auto parts_of = [&](const Group& group) {
    const std::size_t first = chunks_[group.first].first_part;
    const Chunk& last = chunks_[group.end - 1];
    return std::span<const Part>(parts_).subspan(
        first, last.first_part + last.part_count - first);
  };
  const DeviceStream stream = drain_stream_.get();
  const auto fetch = [&](const Group& group, int to) -> absl::Status {
    // One that fits into no buffer is fetched when its turn comes.
    if (group.bytes > bounce_bytes_) return absl::OkStatus();
    KEDGE_RETURN_IF_ERROR(
        device_->Copy(bounce_[to], ring_ + group.begin, group.bytes, stream));
    return device_->Record(drained_[to].get(), stream);
  };

  // A buffer's parts on their way into the attempt.
  Assembly assemblies[2];
  const auto settle = [&](int i) -> absl::Status {
    if (!assemblies[i].batch) return absl::OkStatus();
    const absl::Status status = assemblies[i].batch->Wait();
    assemblies[i].batch.reset();
    return status;
  };
  const auto assemble = [&](int i, const Group& group, const std::byte* bytes) {
    Assembly& assembly = assemblies[i];
    assembly.parts = parts_of(group);
    assembly.bytes = bytes;
    assembly.begin = group.begin;
    assembly.next = 0;
    assembly.attempt = attempt;
    assembly.batch.emplace(pool_);
    const std::size_t tasks = std::min<std::size_t>(
        static_cast<std::size_t>(pool_->thread_count()), assembly.parts.size());
    for (std::size_t t = 0; t < tasks; ++t) {
      assembly.batch->Submit([this, &assembly] { return Assemble(&assembly); });
    }
  };

  absl::Status drained = [&]() -> absl::Status {
    if (chunks_.empty()) return absl::OkStatus();
    Group group = group_from(0);
    KEDGE_RETURN_IF_ERROR(fetch(group, 0));
    for (int at = 0;; at ^= 1) {
      const bool last = group.end == chunks_.size();
      const Group next = last ? Group{} : group_from(group.end);
      if (group.bytes <= bounce_bytes_) {
        KEDGE_RETURN_IF_ERROR(device_->WaitForEvent(drained_[at].get()));
        assemble(at, group, bounce_[at]);
      }
      // The other buffer is free when what came before is assembled; threads
      // are at work on this one meanwhile.
      KEDGE_RETURN_IF_ERROR(settle(at ^ 1));
      if (!last) KEDGE_RETURN_IF_ERROR(fetch(next, at ^ 1));
      if (group.bytes > bounce_bytes_) {
        std::vector<std::byte> whole(group.bytes);
        for (std::uint64_t done = 0; done < group.bytes;) {
          const std::uint64_t take =
              std::min(bounce_bytes_, group.bytes - done);
          KEDGE_RETURN_IF_ERROR(device_->Copy(
              bounce_[at], ring_ + group.begin + done, take, stream));
          KEDGE_RETURN_IF_ERROR(device_->WaitForStream(stream));
          std::memcpy(whole.data() + done, bounce_[at], take);
          done += take;
        }
        assemble(at, group, whole.data());
        KEDGE_RETURN_IF_ERROR(settle(at));
      }
      if (last) return settle(at);
      group = next;
    }
  }();
  for (const int i : {0, 1}) drained.Update(settle(i));
  // No copy goes on into a buffer that is used again.
  if (!drained.ok()) WaitOut(device_, stream).IgnoreError();
  return drained;
}

// One of several that share the parts of an assembly.
absl::Status DeviceDelta::Assemble(Assembly* assembly) {
  std::unique_ptr<Scratch> scratch;
  {
    const std::lock_guard<std::mutex> lock(scratch_mutex_);
    if (!scratches_.empty()) {
      scratch = std::move(scratches_.back());
      scratches_.pop_back();
    }
  }
  if (scratch == nullptr) scratch = std::make_unique<Scratch>();
  const absl::Status status = AssembleWith(assembly, scratch.get());
  const std::lock_guard<std::mutex> lock(scratch_mutex_);
  scratches_.push_back(std::move(scratch));
  return status;
}

absl::Status DeviceDelta::AssembleWith(Assembly* assembly, Scratch* scratch) {
  RecordBuilder& builder = scratch->builder;
  std::vector<std::byte>& record = scratch->record;
  for (;;) {
    const std::size_t i =
        assembly->next.fetch_add(1, std::memory_order_relaxed);
    if (i >= assembly->parts.size()) return absl::OkStatus();
    const Part& part = assembly->parts[i];
    builder.Start(part.tiles);
    for (std::size_t t = part.first_tile; t < part.first_tile + part.tile_count;
         ++t) {
      const Tile& tile = tiles_[t];
      const std::byte* const payload = assembly->bytes +
                                       (part.payload - assembly->begin) +
                                       tile.payload * kArenaAlignment;
      builder.payload()->insert(builder.payload()->end(), payload,
                                payload + tile.bytes);
      TileHeader header;
      header.mode = static_cast<TileMode>(tile.mode);
      header.a = tile.a;
      header.b = tile.b;
      header.bytes = tile.bytes;
      builder.AddTile(part.tiles.first + tile.tile, header, tile.nnz);
    }
    record.clear();
    DeltaRecord entry;
    entry.bytes = static_cast<std::uint32_t>(builder.Finish(&record));
    entry.tensor = part.tensor;
    entry.slice = part.units;
    entry.nnz = part.nnz;
    entry.l61 = part.l61;
    KEDGE_RETURN_IF_ERROR(assembly->attempt->Add(entry, record));
  }
}

}  // namespace kedge
