#ifndef KEDGE_READER_STAGE_POOL_H_
#define KEDGE_READER_STAGE_POOL_H_

// Device memory for deltas between the time when they are read and the time
// when they are applied.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "kedge/engine/device/device.h"

namespace kedge {

// Hands out blocks of large allocations, which it keeps: following a run of
// even steps allocates in the first one alone.
//
// Thread safety: one thread at a time.
class StagePool {
 public:
  // A block of device memory, given back when destroyed; the pool outlives it.
  // Whoever destroys it has waited for all work that uses it.
  class Block {
   public:
    Block() = default;
    Block(Block&& other) noexcept { *this = std::move(other); }
    Block& operator=(Block&& other) noexcept {
      std::swap(data_, other.data_);
      std::swap(live_, other.live_);
      return *this;
    }
    ~Block() {
      if (live_ != nullptr) --*live_;
    }
    std::byte* data() const { return data_; }

   private:
    friend class StagePool;
    std::byte* data_ = nullptr;
    std::uint32_t* live_ = nullptr;
  };

  // `device` outlives the pool, which never holds more than `limit_bytes`.
  StagePool(Device* device, std::uint64_t limit_bytes)
      : device_(device), limit_bytes_(limit_bytes) {}

  // Whether Take(bytes) would stay below the limit.
  bool HasRoom(std::uint64_t bytes) const;
  // Whether no block is out.
  bool empty() const;
  // Aligned to 256 bytes. Nothing if there is no room beside blocks that are
  // out. kResourceExhausted if the device has no memory and no block is out.
  absl::StatusOr<std::optional<Block>> Take(std::uint64_t bytes);

 private:
  struct Slab {
    DeviceMemory memory;
    std::uint64_t used = 0;  // handed out since it was last empty
    std::uint32_t live = 0;  // blocks
  };
  static std::uint64_t Rounded(std::uint64_t bytes);
  Slab* FindRoom(std::uint64_t bytes);
  std::uint64_t held_bytes(bool live_only) const;

  Device* device_;
  std::uint64_t limit_bytes_;
  std::vector<std::unique_ptr<Slab>> slabs_;
};

}  // namespace kedge

#endif  // KEDGE_READER_STAGE_POOL_H_
