#ifndef KEDGE_ENGINE_CPU_BATCH_RUNNER_H_
#define KEDGE_ENGINE_CPU_BATCH_RUNNER_H_

// What kedge's kernels do, done by one core on host memory: the twin that
// CpuDevice runs and that kernels are compared with. The words are those of
// engine/device/kernel_tasks.h.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kedge/engine/cpu/slice_encoder.h"
#include "kedge/engine/device/kernel_tasks.h"
#include "kedge/format/codec.h"

namespace kedge {

// Decodes one tile of `units` units; false-proof: whatever the bytes say, it
// reads at most 16 bytes beyond the payload and writes within its scratch.
// Refuses exactly what DecodeTile (format/codec.h) refuses, and names the rule.
//
// Thread safety: none; about 400 KiB of scratch, no allocation once made.
class TileDecoder {
 public:
  TileDecoder();

  // Fills changes(); in no particular order.
  TileFault Decode(const ApplyTile& tile, const std::byte* payload,
                   std::uint32_t units, std::uint32_t unit_bytes);
  std::span<const Change> changes() const { return {changes_.data(), count_}; }

 private:
  class Bits;
  TileFault DecodeSparse(const ApplyTile& tile, Bits bits, std::uint32_t units,
                         std::uint32_t unit_bits);
  TileFault DecodeDense(const ApplyTile& tile, Bits bits, std::uint32_t units,
                        std::uint32_t unit_bits);

  std::vector<Change> changes_;  // [kTileUnits]
  std::uint32_t count_ = 0;
  std::vector<std::uint64_t> numbers_;  // [kTileUnits] lows, then zigzags
  std::vector<std::uint64_t> marks_;    // a bit for each unit
};

// Thread safety: none; one runner a stream. No allocation in steady state.
class BatchRunner {
 public:
  BatchRunner();

  void Encode(const EncodeBatch& batch);
  void Apply(const ApplyBatch& batch);

 private:
  void EncodeOne(const EncodeBatch& batch, const EncodeSlice& slice,
                 std::uint64_t tile, EncodedTile* out);

  SliceEncoder encoder_;
  std::vector<std::byte> old_tile_;  // one tile, its units in order
  std::vector<std::byte> new_tile_;
  std::vector<std::byte> record_;
  TileDecoder decoder_;
};

}  // namespace kedge

#endif  // KEDGE_ENGINE_CPU_BATCH_RUNNER_H_
