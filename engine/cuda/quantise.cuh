#ifndef KEDGE_ENGINE_CUDA_QUANTISE_CUH_
#define KEDGE_ENGINE_CUDA_QUANTISE_CUH_

// The body of the fp8 quantiser's kernel: a block of threads reads a block of
// 128 x 128 once, keeps it in registers, reduces amax, converts. `Block`: see
// block.cuh.

#include <cstddef>
#include <cstdint>

#include "kedge/engine/cuda/block.cuh"
#include "kedge/engine/device/kernel_tasks.h"
#include "kedge/format/fp8.h"

namespace kedge::quantise {

inline constexpr std::uint32_t kWarps = 8;
inline constexpr std::uint32_t kThreads = 32 * kWarps;
// Vectors of 8 units across a block, and those that a thread has: one in every
// kRowStep-th row.
inline constexpr std::uint32_t kVectorsAcross = kFp8BlockExtent / 8;
inline constexpr std::uint32_t kRowStep = kThreads / kVectorsAcross;
inline constexpr std::uint32_t kVectorsOfThread = kFp8BlockExtent / kRowStep;

struct Shared {
  std::uint32_t largest[kWarps];
};

// Two values from the two bf16 of a word, in the low 16 bits.
KEDGE_KERNEL_INLINE std::uint32_t ConvertPair(std::uint32_t word, float scale) {
  const float low = FloatOfBits(word << 16);
  const float high = FloatOfBits(word & 0xffff0000u);
  return Fp8OfFloat(DivideIeee(low, scale)) |
         std::uint32_t{Fp8OfFloat(DivideIeee(high, scale))} << 8;
}

// Quantises block `index` of the batch. A block of kThreads.
template <typename Block>
KEDGE_KERNEL_INLINE void QuantiseBlock(Block& block, Shared& shared,
                                       const QuantiseBatch& batch,
                                       std::uint64_t index) {
  const QuantiseTask task =
      batch.tasks[FindLast(block, batch.task_count, [&](std::uint32_t t) {
        return batch.tasks[t].first_block <= index;
      })];
  const std::uint64_t own = index - task.first_block;
  const std::uint64_t across =
      (task.cols + kFp8BlockExtent - 1) / kFp8BlockExtent;
  const std::uint64_t block_row = own / across;
  const std::uint64_t first_row =
      block_row * kFp8BlockExtent + block.Thread() / kVectorsAcross;
  const std::uint64_t col = (own - block_row * across) * kFp8BlockExtent +
                            block.Thread() % kVectorsAcross * 8;
  const std::uint32_t units =  // of this thread's vectors
      col >= task.cols ? 0
                       : static_cast<std::uint32_t>(
                             task.cols - col < 8 ? task.cols - col : 8);
  const std::byte* const source =
      task.source +
      static_cast<std::int64_t>(first_row) * task.source_row_stride_bytes +
      static_cast<std::int64_t>(col * 2);
  std::byte* const values = task.values + first_row * task.cols + col;
  const bool in_vectors =
      units == 8 && reinterpret_cast<std::uintptr_t>(source) % 16 == 0 &&
      task.source_row_stride_bytes % 16 == 0 &&
      reinterpret_cast<std::uintptr_t>(values) % 8 == 0 && task.cols % 8 == 0;

  Bytes16 vectors[kVectorsOfThread];
  std::uint32_t largest = 0;
  KEDGE_UNROLL
  for (std::uint32_t i = 0; i < kVectorsOfThread; ++i) {
    Bytes16& vector = vectors[i];
    vector = Bytes16{{0, 0, 0, 0}};
    if (first_row + i * kRowStep < task.rows) {
      const std::byte* const from =
          source + static_cast<std::int64_t>(i * kRowStep) *
                       task.source_row_stride_bytes;
      if (in_vectors) {
        vector = block.Load16(from);
      } else {
        KEDGE_UNROLL
        for (std::uint32_t j = 0; j < 8; ++j) {
          if (j < units) {
            vector.words[j / 2] |=
                std::uint32_t{block.template Load<std::uint16_t>(from + 2 * j)}
                << (16 * (j % 2));
          }
        }
      }
    }
  }
  KEDGE_UNROLL
  for (std::uint32_t i = 0; i < kVectorsOfThread; ++i) {
    KEDGE_UNROLL
    for (std::uint32_t w = 0; w < 4; ++w) {
      const std::uint32_t low = vectors[i].words[w] & kBf16Magnitude;
      const std::uint32_t high = vectors[i].words[w] >> 16 & kBf16Magnitude;
      largest = largest > low ? largest : low;
      largest = largest > high ? largest : high;
    }
  }
  largest = block.ReduceMax(largest);
  if (block.Lane() == 0) shared.largest[block.Warp()] = largest;
  block.Sync();
  KEDGE_UNROLL
  for (std::uint32_t w = 0; w < kWarps; ++w) {
    if (shared.largest[w] > largest) largest = shared.largest[w];
  }
  const float amax = FloatOfBf16(static_cast<std::uint16_t>(largest));
  const float scale = batch.scale_kind == ScaleKind::kExact
                          ? Fp8ExactScale(amax, batch.floor)
                          : Fp8PowerOfTwoScale(amax, batch.floor);
  if (block.Thread() == 0) {
    task.scales[own] = scale;
    if (largest >= kBf16NotFinite) {
      block.AtomicMin(batch.first_bad_block, index);
    }
  }

  KEDGE_UNROLL
  for (std::uint32_t i = 0; i < kVectorsOfThread; ++i) {
    if (first_row + i * kRowStep < task.rows) {
      const std::uint32_t* const words = vectors[i].words;
      const std::uint32_t low =
          ConvertPair(words[0], scale) | ConvertPair(words[1], scale) << 16;
      const std::uint32_t high =
          ConvertPair(words[2], scale) | ConvertPair(words[3], scale) << 16;
      std::byte* const to = values + std::uint64_t{i * kRowStep} * task.cols;
      if (in_vectors) {
        *reinterpret_cast<std::uint64_t*>(to) = low | std::uint64_t{high} << 32;
      } else {
        KEDGE_UNROLL
        for (std::uint32_t j = 0; j < 8; ++j) {
          if (j < units) {
            to[j] =
                static_cast<std::byte>((j < 4 ? low : high) >> (8 * (j % 4)));
          }
        }
      }
    }
  }
}

}  // namespace kedge::quantise

#endif  // KEDGE_ENGINE_CUDA_QUANTISE_CUH_
