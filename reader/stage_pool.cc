#include "kedge/reader/stage_pool.h"

#include <algorithm>
#include <utility>

#include "kedge/format/status.h"

namespace kedge {
namespace {

constexpr std::uint64_t kAlignment = 256;
// Small deltas share an allocation.
constexpr std::uint64_t kSlabBytes = std::uint64_t{32} << 20;

}  // namespace

std::uint64_t StagePool::Rounded(std::uint64_t bytes) {
  return (std::max<std::uint64_t>(bytes, 1) + kAlignment - 1) / kAlignment *
         kAlignment;
}

std::uint64_t StagePool::held_bytes(bool live_only) const {
  std::uint64_t bytes = 0;
  for (const auto& slab : slabs_) {
    if (!live_only || slab->live > 0) bytes += slab->memory.bytes();
  }
  return bytes;
}

bool StagePool::empty() const { return held_bytes(/*live_only=*/true) == 0; }

StagePool::Slab* StagePool::FindRoom(std::uint64_t bytes) {
  Slab* best = nullptr;
  for (const auto& slab : slabs_) {
    if (slab->live == 0) slab->used = 0;
    if (bytes > slab->memory.bytes() - slab->used) continue;
    if (best == nullptr || slab->memory.bytes() < best->memory.bytes()) {
      best = slab.get();
    }
  }
  return best;
}

bool StagePool::HasRoom(std::uint64_t bytes) const {
  const std::uint64_t rounded = Rounded(bytes);
  const std::uint64_t live = held_bytes(/*live_only=*/true);
  if (rounded <= limit_bytes_ && live <= limit_bytes_ - rounded) return true;
  return std::any_of(slabs_.begin(), slabs_.end(), [&](const auto& slab) {
    const std::uint64_t used = slab->live == 0 ? 0 : slab->used;
    return rounded <= slab->memory.bytes() - used;
  });
}

absl::StatusOr<std::optional<StagePool::Block>> StagePool::Take(
    std::uint64_t bytes) {
  if (!HasRoom(bytes)) return std::optional<Block>();
  const std::uint64_t rounded = Rounded(bytes);
  Slab* slab = FindRoom(rounded);
  if (slab == nullptr) {
    // Those that are out of use and too small make place for a larger one.
    if (held_bytes(/*live_only=*/false) > limit_bytes_ - rounded) {
      std::erase_if(slabs_, [](const auto& s) { return s->live == 0; });
    }
    const std::uint64_t left = limit_bytes_ - held_bytes(/*live_only=*/false);
    // A little more than asked for: steps are not quite even.
    const std::uint64_t wanted =
        std::min(std::max(rounded + rounded / 8, kSlabBytes), left);
    auto memory = device_->Allocate(MemoryKind::kDevice, wanted);
    if (absl::IsResourceExhausted(memory.status())) {
      std::erase_if(slabs_, [](const auto& s) { return s->live == 0; });
      memory = device_->Allocate(MemoryKind::kDevice, rounded);
      if (absl::IsResourceExhausted(memory.status()) && !slabs_.empty()) {
        return std::optional<Block>();
      }
    }
    if (!memory.ok()) return memory.status();
    auto made = std::make_unique<Slab>();
    made->memory = *std::move(memory);
    slab = made.get();
    slabs_.push_back(std::move(made));
  }
  Block block;
  block.data_ = slab->memory.data() + slab->used;
  block.live_ = &slab->live;
  slab->used += rounded;
  ++slab->live;
  return std::optional<Block>(std::move(block));
}

}  // namespace kedge
