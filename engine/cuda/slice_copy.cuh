#ifndef KEDGE_ENGINE_CUDA_SLICE_COPY_CUH_
#define KEDGE_ENGINE_CUDA_SLICE_COPY_CUH_

// Copies the part of a contiguous slice that lies in a box: the bodies of the
// kernels of slice_copy.cu (phased_group.cuh says what a body is).

#include <cstddef>
#include <cstdint>
#ifndef __CUDACC__
#include <cstdlib>
#endif

#include "kedge/engine/cuda/phased_group.cuh"
#include "kedge/format/box_target.h"
#include "kedge/format/tile_grid.h"

namespace kedge::internal {

struct SliceCopyTask {
  const std::byte* from = nullptr;  // unit slice.begin
  UnitRange slice;
  std::uint64_t cols = 0;  // of the tensor's grid
  BoxTarget box;
  // Rows that slice and box share; their first and last may do so in part.
  std::uint64_t row_begin = 0;
  std::uint64_t row_end = 0;

  // Whether a unit from row_begin and the box's first column on lies in both.
  KEDGE_BODY bool Shares(std::uint64_t row, std::uint64_t col) const {
    const std::uint64_t unit = row * cols + col;
    return row < row_end && col < box.col_end && unit >= slice.begin &&
           unit < slice.end;
  }
};

// The rows that slice and box share. They have none if row_begin >= row_end.
inline SliceCopyTask MakeSliceCopyTask(const std::byte* from,
                                       const TileGrid& grid,
                                       const UnitRange& slice,
                                       const BoxTarget& box) {
  SliceCopyTask task;
  task.from = from;
  task.slice = slice;
  task.cols = grid.cols;
  task.box = box;
  if (slice.begin >= slice.end || grid.cols == 0 ||
      box.col_begin >= box.col_end) {
    return task;
  }
  const std::uint64_t first = slice.begin / grid.cols;
  const std::uint64_t end = (slice.end - 1) / grid.cols + 1;
  task.row_begin = first > box.row_begin ? first : box.row_begin;
  task.row_end = end < box.row_end ? end : box.row_end;
  return task;
}

// ----------------------------------------------------- rows that are
// contiguous

// What a warp copies at a time of a row.
inline constexpr std::uint64_t kCopyChunkBytes = 4096;

inline std::uint64_t CopyChunksOfRow(const SliceCopyTask& task) {
  return ((task.box.col_end - task.box.col_begin) * task.box.unit_bytes - 1) /
             kCopyChunkBytes +
         1;
}

struct alignas(16) CopyVector {
  std::uint32_t words[4];
};

template <typename T>
KEDGE_BODY void CopyOne(std::uintptr_t to, std::uintptr_t from) {
#ifdef __CUDACC__
  *reinterpret_cast<T*>(to) = *reinterpret_cast<const T*>(from);
#else
  if (to % alignof(T) != 0 || from % alignof(T) != 0) std::abort();
  std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from),
              sizeof(T));
#endif
}

// Copies `bytes`, a multiple of sizeof(T), from lane `lane` on.
template <typename T, std::uint32_t lanes>
KEDGE_BODY void CopyByLanes(std::uintptr_t to, std::uintptr_t from,
                            std::uint64_t bytes, std::uint32_t lane) {
  for (std::uint64_t at = lane * sizeof(T); at < bytes;
       at += lanes * sizeof(T)) {
    CopyOne<T>(to + at, from + at);
  }
}

template <typename Group>
KEDGE_BODY void CopyRun(Group& group, std::uintptr_t to, std::uintptr_t from,
                        std::uint64_t bytes) {
  constexpr std::uint32_t kLanes = Group::kThreads;
  group.Phase([&](std::uint32_t t) {
    if ((to - from) % 16 == 0) {
      const std::uint64_t to_vectors = (0 - to) % 16;
      const std::uint64_t head = to_vectors < bytes ? to_vectors : bytes;
      const std::uint64_t middle = (bytes - head) / 16 * 16;
      CopyByLanes<std::uint8_t, kLanes>(to, from, head, t);
      CopyByLanes<CopyVector, kLanes>(to + head, from + head, middle, t);
      CopyByLanes<std::uint8_t, kLanes>(
          to + head + middle, from + head + middle, bytes - head - middle, t);
    } else if ((to | from | bytes) % 4 == 0) {
      CopyByLanes<std::uint32_t, kLanes>(to, from, bytes, t);
    } else if ((to | from | bytes) % 2 == 0) {
      CopyByLanes<std::uint16_t, kLanes>(to, from, bytes, t);
    } else {
      CopyByLanes<std::uint8_t, kLanes>(to, from, bytes, t);
    }
  });
}

// Every group_count-th chunk of the shared rows from `group_index` on.
template <typename Group>
KEDGE_BODY void CopyRowChunks(Group& group, const SliceCopyTask& task,
                              std::uint64_t chunks_of_row,
                              std::uint64_t group_index,
                              std::uint64_t group_count) {
  const std::uint64_t chunks = (task.row_end - task.row_begin) * chunks_of_row;
  const std::uint64_t chunk_units = kCopyChunkBytes / task.box.unit_bytes;
  for (std::uint64_t chunk = group_index; chunk < chunks;
       chunk += group_count) {
    const std::uint64_t row = task.row_begin + chunk / chunks_of_row;
    const std::uint64_t first = row * task.cols;
    std::uint64_t begin =
        task.box.col_begin + chunk % chunks_of_row * chunk_units;
    std::uint64_t end = begin + chunk_units;
    if (end > task.box.col_end) end = task.box.col_end;
    if (first + begin < task.slice.begin) begin = task.slice.begin - first;
    if (first + end > task.slice.end) {
      if (first >= task.slice.end) continue;
      end = task.slice.end - first;
    }
    if (begin >= end) continue;
    CopyRun(group, reinterpret_cast<std::uintptr_t>(task.box.At(row, begin)),
            reinterpret_cast<std::uintptr_t>(
                task.from +
                (first + begin - task.slice.begin) * task.box.unit_bytes),
            (end - begin) * task.box.unit_bytes);
  }
}

// ----------------------------------------------------------------- any strides

inline constexpr std::uint32_t kCopyTileThreads = 256;
inline constexpr std::uint32_t kCopyTile = 64;  // units a side

struct CopyShared {
  // The odd pitch lets rows and columns pass without bank conflicts.
  std::uint32_t units[kCopyTile][kCopyTile + 1];
};

inline std::uint64_t CopyTilesOfRow(const SliceCopyTask& task) {
  return (task.box.col_end - task.box.col_begin - 1) / kCopyTile + 1;
}
inline std::uint64_t CopyTileCount(const SliceCopyTask& task) {
  return ((task.row_end - task.row_begin - 1) / kCopyTile + 1) *
         CopyTilesOfRow(task);
}

// Every group_count-th tile of the shared rows and the box's columns: read
// along rows, as the slice lies, and written along the box's smaller stride.
template <typename Unit, typename Group>
KEDGE_BODY void CopyTiles(Group& group, const SliceCopyTask& task,
                          std::uint64_t tile_count, std::uint64_t tiles_of_row,
                          std::uint64_t group_index, std::uint64_t group_count,
                          CopyShared* shared) {
  static_assert(Group::kThreads == kCopyTileThreads);
  const BoxTarget& box = task.box;
  const bool down =
      (box.row_stride_bytes < 0 ? -box.row_stride_bytes
                                : box.row_stride_bytes) <
      (box.col_stride_bytes < 0 ? -box.col_stride_bytes : box.col_stride_bytes);
  for (std::uint64_t tile = group_index; tile < tile_count;
       tile += group_count) {
    const std::uint64_t row0 = task.row_begin + tile / tiles_of_row * kCopyTile;
    const std::uint64_t col0 = box.col_begin + tile % tiles_of_row * kCopyTile;
    group.Phase([&](std::uint32_t t) {
      for (std::uint32_t i = t; i < kCopyTile * kCopyTile;
           i += kCopyTileThreads) {
        const std::uint32_t r = i / kCopyTile;
        const std::uint32_t c = i % kCopyTile;
        if (!task.Shares(row0 + r, col0 + c)) continue;
        shared->units[r][c] = *reinterpret_cast<const Unit*>(
            task.from + ((row0 + r) * task.cols + col0 + c - task.slice.begin) *
                            sizeof(Unit));
      }
    });
    group.Phase([&](std::uint32_t t) {
      for (std::uint32_t i = t; i < kCopyTile * kCopyTile;
           i += kCopyTileThreads) {
        const std::uint32_t r = down ? i % kCopyTile : i / kCopyTile;
        const std::uint32_t c = down ? i / kCopyTile : i % kCopyTile;
        if (!task.Shares(row0 + r, col0 + c)) continue;
        *reinterpret_cast<Unit*>(box.At(row0 + r, col0 + c)) =
            static_cast<Unit>(shared->units[r][c]);
      }
    });
  }
}

}  // namespace kedge::internal

#endif  // KEDGE_ENGINE_CUDA_SLICE_COPY_CUH_
