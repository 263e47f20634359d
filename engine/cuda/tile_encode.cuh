#ifndef KEDGE_ENGINE_CUDA_TILE_ENCODE_CUH_
#define KEDGE_ENGINE_CUDA_TILE_ENCODE_CUH_

// The bodies of the diff + encode kernels. Written against a *block* of
// threads: on a GPU that is the thread block (tile_encode.cu); in
// tests/engine/cuda a block of fibers that g++ compiles, so that every line
// here is tested where there is no GPU.
//
// Two kernels. FastEncodeTile takes every tile of the batch, one block each,
// and finishes those with few changes, which is nearly all. What it does not
// finish (more changes than its lists hold, more than a quarter of the units,
// a payload above its buffer) it puts on a list, the batch's scratch, which
// EncodeTotals::heavy_tiles counts; HeavyEncodeTile takes those.
//
// How the fast one works. A warp owns a contiguous part of the tile and reads
// it in vectors of 16 bytes, 32 of them a step, one a lane. Vectors that differ
// go into a queue in shared memory; whenever 32 wait there each lane takes one,
// finds its changes, and a warp scan gives each change its place in the warp's
// list. The order of lanes and steps is the order of units, so nothing has to
// be sorted. The list is parted into A (|d| = 1) and B; then the block adds up
// counts and quotients, and each lane places the bits of consecutive changes.
//
// What limits it, at a few percent of changes, is how many instructions a tile
// takes: two warps a tile, and not four, halve what each warp does once a tile.
//
// `Block`: see block.cuh.

#include <cstddef>
#include <cstdint>

#include "kedge/engine/cuda/block.cuh"
#include "kedge/engine/device/kernel_tasks.h"
#include "kedge/format/l61.h"
#include "kedge/format/limits.h"
#include "kedge/format/record_layout.h"
#include "kedge/format/tile_grid.h"

namespace kedge::tile_encode {

inline constexpr std::uint32_t kFastWarps = 2;
inline constexpr std::uint32_t kFastThreads = 32 * kFastWarps;
inline constexpr std::uint32_t kHeavyWarps = 16;
inline constexpr std::uint32_t kHeavyThreads = 32 * kHeavyWarps;
// Consecutive units of a tile that one thread of the heavy kernel owns.
inline constexpr std::uint32_t kHeavyRun = kTileUnits / kHeavyThreads;

// A queue takes up to 31 vectors that wait and two steps of 32.
inline constexpr std::uint32_t kQueueVectors = 96;
inline constexpr std::uint32_t kListBytes = 3072;  // of one warp, both lists
inline constexpr std::uint32_t kOutWords = 1536;
// A tile of more than kFewChanges changes keeps its rows' weights B, if it has
// no more than kWeightRows rows.
inline constexpr std::uint32_t kFewChanges = 96;
inline constexpr std::uint32_t kWeightRows = 128;

// What one warp found. `next_*` is the index after that of the last change of
// the list, 0 if it is empty.
struct WarpChanges {
  std::uint32_t a;
  std::uint32_t b;
  std::uint32_t next_a;
  std::uint32_t next_b;
};
inline constexpr std::uint32_t kTooMany = 0xffffffffu;  // WarpChanges::a

// What a warp's changes take in planes whose sizes follow from no count.
struct WarpSums {
  std::uint32_t quotients_a;
  std::uint32_t quotients_b;
  std::uint32_t exponents;
};

// A weight B modulo p as high * 2^30 + low: |low| <= 2^29, |high| <= 2^30.
struct SplitWeight {
  std::int32_t low;
  std::int32_t high;
};

struct FastShared {
  struct Queue {
    Bytes16 before[kFastWarps][kQueueVectors];
    Bytes16 after[kFastWarps][kQueueVectors];
    std::uint16_t number[kFastWarps][kQueueVectors];
  };
  struct Late {
    union {
      alignas(16) std::uint32_t out[kOutWords];
      alignas(16) Bytes16 out_vectors[kOutWords / 4];
    };
    alignas(8) SplitWeight weights[kWeightRows];
  };
  union {
    Queue queue;  // until all changes are found
    Late late;    // then
  };
  alignas(8) std::uint64_t lists[kFastWarps][kListBytes / 8];
  std::uint64_t l61[kFastWarps];
  WarpChanges changes[kFastWarps];
  WarpSums sums[kFastWarps];
  std::uint32_t payload;
};

struct HeavyShared {
  std::uint64_t l61[kHeavyWarps];
  std::uint32_t scan[2][kHeavyWarps];
  std::uint32_t dense_bits[34];
  std::uint32_t dense_escapes[34];
  std::uint32_t payload;
};

// ------------------------------------------------------------------- numbers

// RiceParameter of format/record_layout.h without its loop; 0 for no position.
KEDGE_KERNEL_INLINE std::uint32_t ListParameter(std::uint32_t count,
                                                std::uint32_t units) {
  if (count == 0) return 0;
  const std::uint32_t q = (77 * (2 * units - count)) / (160 * count);
  return q == 0 ? 0 : FloorLog2(q);
}

KEDGE_KERNEL_INLINE std::uint32_t Min(std::uint32_t a, std::uint32_t b) {
  return a < b ? a : b;
}

// --------------------------------------------------------------- where units
// lie

// A tile of a slice.
struct Place {
  const EncodeSlice* slice;
  std::uint64_t tile;  // in the batch
  TileBox box;
  std::uint64_t flat;  // index of its first unit in the tensor
  std::uint32_t units;
  std::uint32_t row_shift;  // width = 1 << row_shift, or kNotAPower
  bool whole;               // the slice holds all of the tile
  bool apart;               // and none of it, as far as flat indices tell
};
inline constexpr std::uint32_t kNotAPower = 32;

KEDGE_KERNEL_INLINE std::uint32_t RowOf(const Place& place,
                                        std::uint32_t index) {
  return place.row_shift == kNotAPower ? index / place.box.width
                                       : index >> place.row_shift;
}

// a / b. A GPU takes about a hundred instructions for it, and twenty where both
// fit in 32 bits.
KEDGE_KERNEL_INLINE std::uint64_t Quotient(std::uint64_t a, std::uint64_t b) {
  if (((a | b) >> 32) == 0) {
    return static_cast<std::uint32_t>(a) / static_cast<std::uint32_t>(b);
  }
  return a / b;
}

// TileGrid::Box, with Quotient.
KEDGE_KERNEL_INLINE TileBox BoxOf(const TileGrid& grid, std::uint64_t tile) {
  const std::uint64_t band = Quotient(tile, grid.tiles_per_band);
  TileBox box;
  box.row = band * grid.tile_rows;
  box.col = (tile - band * grid.tiles_per_band) * grid.tile_cols;
  box.height = grid.rows - box.row < grid.tile_rows
                   ? static_cast<std::uint32_t>(grid.rows - box.row)
                   : grid.tile_rows;
  box.width = grid.cols - box.col < grid.tile_cols
                  ? static_cast<std::uint32_t>(grid.cols - box.col)
                  : grid.tile_cols;
  return box;
}

// All lanes of a warp call it together.
template <typename Block>
KEDGE_KERNEL_INLINE Place FindPlace(Block& block, const EncodeBatch& batch,
                                    std::uint64_t tile) {
  Place place;
  place.slice =
      batch.slices + FindLast(block, batch.slice_count, [&](std::uint32_t s) {
        return batch.slices[s].first_tile <= tile;
      });
  place.tile = tile;
  // Copies, so that all of it is on its way at once.
  const TileGrid grid = place.slice->grid;
  const UnitRange slice = place.slice->slice;
  const std::uint64_t before = tile - place.slice->first_tile;
  const std::uint64_t first =
      slice.begin == 0 ? 0
                       : Quotient(slice.begin, grid.cols * grid.tile_rows) *
                             grid.tiles_per_band;
  place.box = BoxOf(grid, first + before);
  place.units = place.box.unit_count();
  const std::uint32_t width = place.box.width;
  place.row_shift = (width & (width - 1)) == 0 ? FloorLog2(width) : kNotAPower;
  const std::uint64_t begin = place.box.row * grid.cols + place.box.col;
  const std::uint64_t end =
      begin + (place.box.height - 1) * grid.cols + place.box.width;
  place.flat = begin;
  place.whole = (slice.begin <= begin) & (end <= slice.end);
  place.apart = (end <= slice.begin) | (slice.end <= begin);
  return place;
}

// StridedUnits::At without a division.
KEDGE_KERNEL_INLINE const std::byte* AddressOf(const StridedUnits& units,
                                               std::uint64_t row,
                                               std::uint64_t col) {
  const std::byte* at =
      units.base +
      static_cast<std::int64_t>(row - units.first_row) * units.row_stride_bytes;
  if (units.units_per_element == 1) {
    return at + static_cast<std::int64_t>(col) * units.col_stride_bytes;
  }
  return at + static_cast<std::int64_t>(col >> 1) * units.col_stride_bytes +
         static_cast<std::int64_t>((col & 1) * units.unit_bytes);
}

// The rows of a tile, if the units of each follow each other.
struct Rows {
  const std::byte* first;
  std::int64_t stride_bytes;
  bool in_vectors;  // they do, in 16-byte vectors that start where rows do
};
template <typename Unit>
KEDGE_KERNEL_INLINE Rows RowsOf(const StridedUnits& units, const Place& place) {
  constexpr std::int64_t kBytes = sizeof(Unit);
  Rows rows;
  rows.stride_bytes = units.row_stride_bytes;
  rows.first = units.base +
               static_cast<std::int64_t>(place.box.row - units.first_row) *
                   rows.stride_bytes +
               static_cast<std::int64_t>(place.box.col) * kBytes;
  const auto at = reinterpret_cast<std::uintptr_t>(rows.first);
  rows.in_vectors =
      (units.col_stride_bytes == units.units_per_element * kBytes) &
      ((at | place.box.width * kBytes) % 16 == 0) &
      ((place.box.height == 1) | (rows.stride_bytes % 16 == 0));
  return rows;
}

// The unit at tile-local `index` before and after; two equal ones if it does
// not belong to the slice.
template <typename Unit, typename Block>
KEDGE_KERNEL_INLINE void LoadUnit(Block& block, const Place& place,
                                  std::uint32_t index, Unit* before,
                                  Unit* after) {
  const std::uint32_t r = RowOf(place, index);
  const std::uint64_t row = place.box.row + r;
  const std::uint64_t col = place.box.col + (index - r * place.box.width);
  *before = 0;
  *after = 0;
  // Even where place.whole says that it does: this is inlined many times, and
  // nvcc would bring that bit along for each, on the way of every tile.
  const std::uint64_t flat = row * place.slice->grid.cols + col;
  if (flat < place.slice->slice.begin || flat >= place.slice->slice.end) return;
  *before =
      block.template Load<Unit>(AddressOf(place.slice->old_units, row, col));
  *after =
      block.template Load<Unit>(AddressOf(place.slice->new_units, row, col));
}

// Gives a lane its vector of each step: numbers `first + lane`, then every 32nd
// below `end`; zeros from there on. This form is for tiles whose rows are a
// power of two of vectors, at most 32, or follow each other without a gap:
// addresses then move on by a constant. It must not be asked beyond the end.
struct SteadyVectors {
  const std::byte* before;
  const std::byte* after;
  std::int64_t before_step;
  std::int64_t after_step;
  std::uint32_t number;

  template <typename Block>
  KEDGE_KERNEL_INLINE void Next(Block& block, Bytes16* old_vector,
                                Bytes16* new_vector) {
    *old_vector = block.Load16(before);
    *new_vector = block.Load16(after);
    before += before_step;
    after += after_step;
  }
};

// The same for any tile.
template <typename Unit>
struct AnyVectors {
  const Place* place;
  bool in_vectors;
  std::uint32_t number;
  std::uint32_t end;

  template <typename Block>
  KEDGE_KERNEL_INLINE void Next(Block& block, Bytes16* old_vector,
                                Bytes16* new_vector) {
    constexpr std::uint32_t kUnits = 16 / sizeof(Unit);
    *old_vector = Bytes16{{0, 0, 0, 0}};
    *new_vector = Bytes16{{0, 0, 0, 0}};
    if (number < end) {
      const std::uint32_t index = number * kUnits;
      bool whole = in_vectors;
      if (whole) {
        const std::uint32_t r = RowOf(*place, index);
        const std::uint64_t row = place->box.row + r;
        const std::uint64_t col =
            place->box.col + (index - r * place->box.width);
        const std::uint64_t flat = row * place->slice->grid.cols + col;
        whole = flat >= place->slice->slice.begin &&
                flat + kUnits <= place->slice->slice.end;
        if (whole) {
          *old_vector =
              block.Load16(AddressOf(place->slice->old_units, row, col));
          *new_vector =
              block.Load16(AddressOf(place->slice->new_units, row, col));
        }
      }
      if (!whole) {
        KEDGE_UNROLL
        for (std::uint32_t word = 0; word < 4; ++word) {
          std::uint32_t before_word = 0;
          std::uint32_t after_word = 0;
          KEDGE_NO_UNROLL
          for (std::uint32_t j = 0; j < 4 / sizeof(Unit); ++j) {
            const std::uint32_t unit =
                index + word * (4 / static_cast<std::uint32_t>(sizeof(Unit))) +
                j;
            if (unit >= place->units) break;
            Unit before;
            Unit after;
            LoadUnit<Unit>(block, *place, unit, &before, &after);
            before_word |= std::uint32_t{before} << (8 * sizeof(Unit) * j);
            after_word |= std::uint32_t{after} << (8 * sizeof(Unit) * j);
          }
          old_vector->words[word] = before_word;
          new_vector->words[word] = after_word;
        }
      }
    }
    number += 32;
  }
};

// ------------------------------------------------------------------ the lists

// A change as it waits in a list: index 14 bits, sign 1, |d| - 1 above. Units
// of 4 bytes take a word of 8.
template <typename Unit>
struct EntryOf {
  using Type = std::uint32_t;
};
template <>
struct EntryOf<std::uint32_t> {
  using Type = std::uint64_t;
};

// The lists of one warp: A from the bottom up, B from the top down.
template <typename Unit>
struct Lists {
  using Entry = typename EntryOf<Unit>::Type;
  static constexpr std::uint32_t kCapacity = kListBytes / sizeof(Entry);
  Entry* entries;

  KEDGE_KERNEL_INLINE Entry& A(std::uint32_t i) const { return entries[i]; }
  KEDGE_KERNEL_INLINE Entry& B(std::uint32_t i) const {
    return entries[kCapacity - 1 - i];
  }
};
template <typename Entry>
KEDGE_KERNEL_INLINE std::uint32_t IndexOf(Entry entry) {
  return static_cast<std::uint32_t>(entry) & (kTileUnits - 1);
}
template <typename Entry>
KEDGE_KERNEL_INLINE std::uint32_t SignOf(Entry entry) {
  return static_cast<std::uint32_t>(entry) >> 14 & 1;
}
template <typename Entry>
KEDGE_KERNEL_INLINE std::uint32_t BelowMagnitude(Entry entry) {  // |d| - 1
  return static_cast<std::uint32_t>(entry >> 15);
}

template <typename Unit>
KEDGE_KERNEL_INLINE Lists<Unit> ListsOf(FastShared& shared,
                                        std::uint32_t warp) {
  return {
      reinterpret_cast<typename Lists<Unit>::Entry*>(&shared.lists[warp][0])};
}

// The part of a warp's `count` changes of one list that a lane has.
struct RunOf {
  KEDGE_KERNEL_INLINE RunOf(std::uint32_t count, std::uint32_t lane) {
    const std::uint32_t most = (count + 31) / 32;
    begin = Min(lane * most, count);
    end = Min(begin + most, count);
  }
  std::uint32_t begin;
  std::uint32_t end;
};

// The least index that the first change of a run could have; `next` is that of
// the warp's first one.
template <typename Unit>
KEDGE_KERNEL_INLINE std::uint32_t NextInA(const Lists<Unit>& lists, RunOf run,
                                          std::uint32_t next) {
  return run.begin == 0 ? next : IndexOf(lists.A(run.begin - 1)) + 1;
}
template <typename Unit>
KEDGE_KERNEL_INLINE std::uint32_t NextInB(const Lists<Unit>& lists, RunOf run,
                                          std::uint32_t next) {
  return run.begin == 0 ? next : IndexOf(lists.B(run.begin - 1)) + 1;
}

template <typename Unit>
KEDGE_KERNEL_INLINE std::uint32_t UnitOf(const Bytes16& vector,
                                         std::uint32_t j) {
  if constexpr (sizeof(Unit) == 4) {
    return vector.words[j];
  } else {
    constexpr std::uint32_t kPerWord = 4 / sizeof(Unit);
    return static_cast<Unit>(vector.words[j / kPerWord] >>
                             (8 * sizeof(Unit) * (j % kPerWord)));
  }
}

// Which units of two vectors differ, a bit each.
template <typename Unit>
KEDGE_KERNEL_INLINE std::uint32_t UnitsThatDiffer(const Bytes16& before,
                                                  const Bytes16& after) {
  std::uint32_t units = 0;
  KEDGE_UNROLL
  for (std::uint32_t word = 0; word < 4; ++word) {
    const std::uint32_t x = before.words[word] ^ after.words[word];
    if constexpr (sizeof(Unit) == 4) {
      if (x != 0) units |= 1u << word;
    } else if constexpr (sizeof(Unit) == 2) {
      // The high bit of each half that is not 0: bits 2 * word and 16 above.
      const std::uint32_t high =
          (((x & 0x7fff7fffu) + 0x7fff7fffu) | x) & 0x80008000u;
      units |= high >> (15 - 2 * word);
    } else {
      // The high bit of each byte that is not 0, then the four side by side.
      const std::uint32_t high =
          (((x & 0x7f7f7f7fu) + 0x7f7f7f7fu) | x) & 0x80808080u;
      units |= ((high >> 7) * 0x10204080u >> 28) << (4 * word);
    }
  }
  if constexpr (sizeof(Unit) == 2) units = (units | units >> 15) & 0xff;
  return units;
}

// Takes the first `take` vectors of the warp's queue, from slot `head` on, into
// its list, which has `*count` changes. False if there is no room.
template <typename Unit, typename Block>
KEDGE_KERNEL_INLINE bool TakeFromQueue(Block& block, FastShared& shared,
                                       std::uint32_t head, std::uint32_t take,
                                       std::uint32_t* count) {
  constexpr std::uint32_t kUnits = 16 / sizeof(Unit);
  const std::uint32_t warp = block.Warp();
  const std::uint32_t slot = head + block.Lane();
  std::uint32_t left = 0;
  std::uint32_t first_index = 0;
  if (block.Lane() < take) {
    left = UnitsThatDiffer<Unit>(shared.queue.before[warp][slot],
                                 shared.queue.after[warp][slot]);
    first_index = shared.queue.number[warp][slot] * kUnits;
  }
  const std::uint32_t own = CountOnes(left);
  const std::uint32_t up_to = block.ScanAdd(own);
  const std::uint32_t rank = *count + up_to - own;
  *count += block.Shuffle(up_to, 31);
  if (*count > Lists<Unit>::kCapacity) return false;

  using Entry = typename Lists<Unit>::Entry;
  const Lists<Unit> lists = ListsOf<Unit>(shared, warp);
  Entry* to = lists.entries + rank;
  const auto* const units_before =
      reinterpret_cast<const Unit*>(&shared.queue.before[warp][slot]);
  const auto* const units_after =
      reinterpret_cast<const Unit*>(&shared.queue.after[warp][slot]);
  while (left != 0) {
    const std::uint32_t j = LowestOne(left);
    left &= left - 1;
    const std::uint32_t before = units_before[j];
    const std::uint32_t after = units_after[j];
    if constexpr (sizeof(Unit) < 4) {
      const auto d = static_cast<std::int32_t>(after - before);
      const std::int32_t sign = d >> 31;
      const auto magnitude = static_cast<std::uint32_t>((d ^ sign) - sign);
      *to++ =
          (magnitude << 15) + (first_index + j - (1u << 15) +
                               (static_cast<std::uint32_t>(sign) & (1u << 14)));
    } else {
      const bool negative = after < before;
      const std::uint32_t magnitude =
          negative ? before - after : after - before;
      *to++ =
          static_cast<Entry>((first_index + j) | (negative ? 1u : 0u) << 14) |
          static_cast<Entry>(magnitude - 1) << 15;
    }
  }
  return true;
}

// Parts the warp's list of `count` changes into A, which moves down, and `*b`
// of B, which grow down from the top. False if they would meet what is not
// parted yet.
template <typename Unit, typename Block>
KEDGE_KERNEL_INLINE bool PartList(Block& block, FastShared& shared,
                                  std::uint32_t count, std::uint32_t* b) {
  using Entry = typename Lists<Unit>::Entry;
  const Lists<Unit> lists = ListsOf<Unit>(shared, block.Warp());
  const std::uint32_t below = (1u << block.Lane()) - 1;
  KEDGE_NO_UNROLL
  for (std::uint32_t begin = 0; begin < count; begin += 32) {
    const std::uint32_t i = begin + block.Lane();
    const Entry entry = i < count ? lists.entries[i] : 0;
    const bool is_b = BelowMagnitude(entry) != 0;
    const std::uint32_t all_b = block.Ballot(is_b);  // all have read
    block.SyncWarp();
    // Of the i changes before this one, those of B.
    const std::uint32_t rank_b = *b + CountOnes(all_b & below);
    *b += CountOnes(all_b);
    if (*b > Lists<Unit>::kCapacity - count) return false;
    const std::uint32_t to =
        is_b ? Lists<Unit>::kCapacity - 1 - rank_b : i - rank_b;
    if (i < count) lists.entries[to] = entry;
  }
  return true;
}

// Reads this warp's part of the tile, `steps` steps of 32 vectors, into its
// lists, and says in shared.changes what there is.
template <typename Unit, typename Block, typename Vectors>
KEDGE_KERNEL_INLINE void FindChanges(Block& block, FastShared& shared,
                                     std::uint32_t steps, Vectors vectors) {
  const std::uint32_t warp = block.Warp();
  const std::uint32_t lane = block.Lane();
  const std::uint32_t below = (1u << lane) - 1;
  std::uint32_t head = 0;  // 0, 32 or 64
  std::uint32_t waiting = 0;
  std::uint32_t count = 0;  // changes in the list
  bool room = true;

  Bytes16 before[2];
  Bytes16 after[2];
  std::uint32_t number = vectors.number;
  vectors.Next(block, &before[0], &after[0]);
  vectors.Next(block, &before[1], &after[1]);
  KEDGE_NO_UNROLL
  for (std::uint32_t step = 0; step < steps && room; step += 2) {
    KEDGE_UNROLL
    for (int s = 0; s < 2; ++s) {
      std::uint32_t differs = 0;
      KEDGE_UNROLL
      for (int word = 0; word < 4; ++word) {
        differs |= before[s].words[word] ^ after[s].words[word];
      }
      const std::uint32_t who = block.Ballot(differs != 0);
      if (differs != 0) {
        std::uint32_t slot = head + waiting + CountOnes(who & below);
        if (slot >= kQueueVectors) slot -= kQueueVectors;
        shared.queue.before[warp][slot] = before[s];
        shared.queue.after[warp][slot] = after[s];
        shared.queue.number[warp][slot] = static_cast<std::uint16_t>(number);
      }
      waiting += CountOnes(who);
      number += 32;
      // The registers are free again: two steps are always under way.
      if (step + 2 < steps) vectors.Next(block, &before[s], &after[s]);
    }
    const bool last = step + 2 >= steps;
    KEDGE_NO_UNROLL
    while (room && (waiting >= 32 || (last && waiting > 0))) {
      block.SyncWarp();  // the queue is written
      const std::uint32_t take = Min(waiting, 32);
      room = TakeFromQueue<Unit>(block, shared, head, take, &count);
      block.SyncWarp();  // and read
      waiting -= take;
      head = head == 64 ? 0 : head + 32;
    }
  }
  block.SyncWarp();  // the list is written
  std::uint32_t b = 0;
  room = room && PartList<Unit>(block, shared, count, &b);
  const std::uint32_t a = count - b;
  block.SyncWarp();  // the lists are written
  if (lane == 0) {
    const Lists<Unit> lists = ListsOf<Unit>(shared, warp);
    WarpChanges changes = {kTooMany, 0, 0, 0};
    if (room) {
      changes = {a, b, a > 0 ? IndexOf(lists.A(a - 1)) + 1 : 0,
                 b > 0 ? IndexOf(lists.B(b - 1)) + 1 : 0};
    }
    shared.changes[warp] = changes;
  }
}

// ----------------------------------------------------------------- the payload

// ORs a value of at most 32 bits to bit `at` of `words`.
template <typename Block>
KEDGE_KERNEL_INLINE void PutBits(Block& block, std::uint32_t* words,
                                 std::uint32_t at, std::uint32_t value) {
  const std::uint64_t bits = std::uint64_t{value} << (at & 31);
  const auto low = static_cast<std::uint32_t>(bits);
  const auto high = static_cast<std::uint32_t>(bits >> 32);
  if (low != 0) block.AtomicOr(&words[at >> 5], low);
  if (high != 0) block.AtomicOr(&words[(at >> 5) + 1], high);
}

// The same for a value that is seldom 0 and whose bits end inside `words`.
template <typename Block>
KEDGE_KERNEL_INLINE void PutField(Block& block, std::uint32_t* words,
                                  std::uint32_t at, std::uint32_t value) {
  const std::uint64_t bits = std::uint64_t{value} << (at & 31);
  const auto high = static_cast<std::uint32_t>(bits >> 32);
  block.AtomicOr(&words[at >> 5], static_cast<std::uint32_t>(bits));
  if (high != 0) block.AtomicOr(&words[(at >> 5) + 1], high);
}

// The same for up to 64 bits.
template <typename Block>
KEDGE_KERNEL_INLINE void PutLongField(Block& block, std::uint32_t* words,
                                      std::uint32_t at, std::uint64_t value) {
  const std::uint64_t bits = value << (at & 31);
  const auto middle = static_cast<std::uint32_t>(bits >> 32);
  const auto high =
      static_cast<std::uint32_t>((value >> 32) << (at & 31) >> 32);
  block.AtomicOr(&words[at >> 5], static_cast<std::uint32_t>(bits));
  if (middle != 0) block.AtomicOr(&words[(at >> 5) + 1], middle);
  if (high != 0) block.AtomicOr(&words[(at >> 5) + 2], high);
}

// Sets bit `at` of `words`.
template <typename Block>
KEDGE_KERNEL_INLINE void PutOne(Block& block, std::uint32_t* words,
                                std::uint32_t at) {
  block.AtomicOr(&words[at >> 5], 1u << (at & 31));
}

// a * b mod p for a < 2^58, b < 2^32: two multiplications, where L61Mul takes
// four and their carries.
KEDGE_KERNEL_INLINE std::uint64_t MulShort(std::uint64_t a, std::uint32_t b) {
  const std::uint64_t low =
      std::uint64_t{static_cast<std::uint32_t>(a)} * b;  // times 1
  const std::uint64_t high =
      std::uint64_t{static_cast<std::uint32_t>(a >> 32)} * b;  // times 2^32
  // 2^61 is 1: what of `high` is shifted beyond it comes in below.
  return L61Reduce((low & kL61Prime) + (low >> 61) + (high >> 29) +
                   ((high & ((1u << 29) - 1)) << 32));
}

// L61OfChange with A from the table. A's product with the shifted |d|, which is
// below 2^32, costs less than A's with B.
template <typename Unit>
KEDGE_KERNEL_INLINE std::uint64_t ResidueOfChange(
    const DeviceL61& l61, const Place& place, std::uint64_t cols,
    std::uint32_t index, std::uint32_t magnitude, bool negative) {
  const std::uint32_t r = RowOf(place, index);
  const std::uint64_t flat =
      place.flat + r * cols + (index - r * place.box.width);
  const std::uint64_t offset = flat * sizeof(Unit);
  const std::uint64_t word = offset >> 2;
  const std::uint32_t shifted = magnitude
                                << (8 * static_cast<std::uint32_t>(offset & 3));
  const std::uint64_t a = l61.a[word & (kL61TileWords - 1)];
  const std::uint64_t term =
      L61Mul(MulShort(a, shifted), l61.key.B(word / kL61TileWords));
  return negative ? L61Sub(0, term) : term;
}

// b in [0, p).
KEDGE_KERNEL_INLINE SplitWeight SplitOf(std::uint64_t b) {
  const std::int64_t balanced =
      static_cast<std::int64_t>(b) -
      static_cast<std::int64_t>(b > kL61Prime / 2 ? kL61Prime : 0);
  const std::int64_t low =
      ((balanced + (1 << 29)) & ((std::int64_t{1} << 30) - 1)) - (1 << 29);
  return {static_cast<std::int32_t>(low),
          static_cast<std::int32_t>((balanced - low) >> 30)};
}
KEDGE_KERNEL_INLINE std::uint64_t WeightOf(SplitWeight split) {
  const std::int64_t b =
      std::int64_t{split.high} * (std::int64_t{1} << 30) + split.low;
  return static_cast<std::uint64_t>(b) + (b < 0 ? kL61Prime : 0);
}

// A sum of products of A (below 2^58, either sign) and B. Carries wait: a
// product adds at most 2^60 + 2^57 to the middle, so that 7 are safe.
inline constexpr std::uint32_t kMostProducts = 7;
struct ProductSum {
  std::int64_t low = 0;     // times 1
  std::int64_t middle = 0;  // times 2^30
  std::int64_t high = 0;    // times 2^60

  KEDGE_KERNEL_INLINE void Add(std::int32_t a_low, std::int32_t a_high,
                               SplitWeight b) {
    low = MultiplyAdd(a_low, b.low, low);
    middle = MultiplyAdd(a_low, b.high, middle);
    middle = MultiplyAdd(a_high, b.low, middle);
    high = MultiplyAdd(a_high, b.high, high);
  }
  KEDGE_KERNEL_INLINE __int128 Value() const {
    return low + static_cast<__int128>(middle) * (1 << 30) +
           static_cast<__int128>(high) * (std::int64_t{1} << 60);
  }
};
// A number equal to `x` modulo p and, for |x| < 2^121, in [-2^60, 2^62).
KEDGE_KERNEL_INLINE std::int64_t FoldSigned(__int128 x) {
  return static_cast<std::int64_t>(static_cast<std::uint64_t>(x) & kL61Prime) +
         static_cast<std::int64_t>(x >> 61);
}
// Its residue.
KEDGE_KERNEL_INLINE std::uint64_t ResidueOf(std::int64_t folded) {
  return L61Reduce(static_cast<std::uint64_t>(folded) + kL61Prime);
}

// Whether each row of the tile lies in one of the checksum's tiles.
template <typename Unit>
KEDGE_KERNEL_INLINE bool RowsHaveWeights(const Place& place,
                                         std::uint64_t cols) {
  const std::uint32_t width = place.box.width;
  return place.row_shift != kNotAPower && place.box.height <= kWeightRows &&
         width <= 4 * kL61TileWords / sizeof(Unit) &&
         ((place.flat | cols) & (width - 1)) == 0;
}

// ResidueOfChange with the weight of the change's row.
template <typename Unit>
KEDGE_KERNEL_INLINE std::uint64_t ResidueInRow(
    const DeviceL61& l61, const Place& place, std::uint32_t cols,
    const SplitWeight* weights, std::uint32_t index, std::uint32_t magnitude,
    bool negative) {
  const std::uint32_t r = index >> place.row_shift;
  const std::uint32_t offset = (static_cast<std::uint32_t>(place.flat) + index +
                                r * (cols - place.box.width)) *
                               static_cast<std::uint32_t>(sizeof(Unit));
  const std::uint64_t a = l61.a[(offset >> 2) & (kL61TileWords - 1)];
  const std::uint64_t term = L61Mul(
      MulShort(a, magnitude << (8 * (offset & 3))), WeightOf(weights[r]));
  return negative ? L61Sub(0, term) : term;
}

// Reserves `bytes` of the arena; returns EncodedTile::payload. One thread.
template <typename Block>
KEDGE_KERNEL_INLINE std::uint32_t Reserve(Block& block,
                                          const EncodeBatch& batch,
                                          std::uint32_t bytes) {
  const std::uint64_t size =
      (bytes + kArenaAlignment - 1) / kArenaAlignment * kArenaAlignment;
  const std::uint64_t at = block.AtomicAdd(&batch.totals->arena_bytes, size);
  if (size > batch.arena_bytes || at > batch.arena_bytes - size ||
      at / kArenaAlignment >= kNoPayload) {
    return kNoPayload;
  }
  return static_cast<std::uint32_t>(at / kArenaAlignment);
}

// Leaves a tile to the heavy kernel. One thread.
template <typename Block>
KEDGE_KERNEL_INLINE void LeaveToHeavy(Block& block, const EncodeBatch& batch,
                                      std::uint64_t tile) {
  const std::uint32_t at = block.AtomicAdd(&batch.totals->heavy_tiles, 1u);
  batch.scratch[at] = static_cast<std::uint32_t>(tile);
}

template <typename Unit, typename Block>
KEDGE_KERNEL_INLINE void FastEncodeUnits(Block& block, FastShared& shared,
                                         const EncodeBatch& batch,
                                         const Place& place) {
  constexpr std::uint32_t kUnits = 16 / sizeof(Unit);
  const std::uint32_t warp = block.Warp();
  const std::uint32_t lane = block.Lane();
  const std::uint32_t units = place.units;

  {  // Find the changes.
    const std::uint32_t vectors = (units + kUnits - 1) / kUnits;
    const std::uint32_t steps =
        (vectors + 32 * kFastWarps - 1) / (32 * kFastWarps);
    const std::uint32_t first = warp * 32 * steps;
    const std::uint32_t end = Min(vectors, first + 32 * steps);
    const Rows old_rows = RowsOf<Unit>(place.slice->old_units, place);
    const Rows new_rows = RowsOf<Unit>(place.slice->new_units, place);
    const bool in_vectors = old_rows.in_vectors & new_rows.in_vectors;
    const std::uint32_t row_vectors = place.box.width / kUnits;
    const std::int64_t row_bytes =
        static_cast<std::int64_t>(place.box.width) * sizeof(Unit);
    const bool gapless =
        (place.box.height == 1) | ((old_rows.stride_bytes == row_bytes) &
                                   (new_rows.stride_bytes == row_bytes));
    // Every warp then has a whole, even number of steps.
    if (in_vectors && place.whole && vectors % (64 * kFastWarps) == 0 &&
        (gapless || (place.row_shift != kNotAPower && row_vectors <= 32))) {
      const std::uint32_t number = first + lane;
      // Without gaps the tile is one long row.
      const std::uint32_t row =
          gapless ? 0 : number * kUnits >> place.row_shift;
      const std::uint32_t in_row = number - row * row_vectors;
      const std::int64_t step_rows = gapless ? 0 : 32 >> FloorLog2(row_vectors);
      FindChanges<Unit>(
          block, shared, steps,
          SteadyVectors{old_rows.first + row * old_rows.stride_bytes +
                            std::uint64_t{in_row} * 16,
                        new_rows.first + row * new_rows.stride_bytes +
                            std::uint64_t{in_row} * 16,
                        gapless ? 512 : step_rows * old_rows.stride_bytes,
                        gapless ? 512 : step_rows * new_rows.stride_bytes,
                        number});
    } else {
      Place anywhere = place;
      anywhere.slice = Hidden(place.slice);
      FindChanges<Unit>(
          block, shared, steps,
          AnyVectors<Unit>{&anywhere, in_vectors, first + lane, end});
    }
  }
  block.Sync();

  // Add up the warps.
  std::uint32_t a = 0;
  std::uint32_t b = 0;
  std::uint32_t rank_a = 0;  // of this warp's first change
  std::uint32_t rank_b = 0;
  std::uint32_t next_a = 0;  // the least index that it could have
  std::uint32_t next_b = 0;
  bool too_many = false;
  KEDGE_UNROLL
  for (std::uint32_t w = 0; w < kFastWarps; ++w) {
    const WarpChanges changes = shared.changes[w];
    too_many = too_many || changes.a == kTooMany;
    if (w == warp) {
      rank_a = a;
      rank_b = b;
    }
    if (w < warp) {
      if (changes.a > 0) next_a = changes.next_a;
      if (changes.b > 0) next_b = changes.next_b;
    }
    a += changes.a;
    b += changes.b;
  }
  if (too_many || a + b > units / 4) {
    if (block.Thread() == 0) LeaveToHeavy(block, batch, place.tile);
    return;
  }
  if (a + b == 0) {
    if (block.Thread() == 0) batch.tiles[place.tile] = EncodedTile{};
    return;
  }
  const std::uint32_t own_a = shared.changes[warp].a;
  const std::uint32_t own_b = shared.changes[warp].b;
  const Lists<Unit> lists = ListsOf<Unit>(shared, warp);
  const std::uint32_t ka = ListParameter(a, units);
  const std::uint32_t kb = ListParameter(b, units);
  const std::uint64_t cols = place.slice->grid.cols;
  const bool by_row = a + b > kFewChanges && RowsHaveWeights<Unit>(place, cols);

  // Each lane has consecutive changes of a list: one scan says where the bits
  // of the first one go, and each of them where those of the next.
  const RunOf run_a(own_a, lane);
  const RunOf run_b(own_b, lane);
  std::uint32_t lane_quotients = 0;  // of A, and of B from bit 16 on
  std::uint32_t lane_exponents = 0;

  {  // What the changes take in the unary planes.
    std::uint32_t next = NextInA<Unit>(lists, run_a, next_a);
    KEDGE_NO_UNROLL
    for (std::uint32_t i = run_a.begin; i < run_a.end; ++i) {
      const std::uint32_t index = IndexOf(lists.A(i));
      lane_quotients += (index - next) >> ka;
      next = index + 1;
    }
    next = NextInB<Unit>(lists, run_b, next_b);
    KEDGE_NO_UNROLL
    for (std::uint32_t i = run_b.begin; i < run_b.end; ++i) {
      const auto entry = lists.B(i);
      lane_quotients += (IndexOf(entry) - next) >> kb << 16;
      lane_exponents += FloorLog2(BelowMagnitude(entry));
      next = IndexOf(entry) + 1;
    }
    // A list's quotients stay below 2^14.
    const std::uint32_t quotients = block.ScanAdd(lane_quotients);
    const std::uint32_t exponents = block.ScanAdd(lane_exponents);
    if (lane == 31) {
      shared.sums[warp] =
          WarpSums{quotients & 0xffff, quotients >> 16, exponents};
    }
    lane_quotients = quotients - lane_quotients;  // of the lanes before
    lane_exponents = exponents - lane_exponents;
    if (by_row) {
      for (std::uint32_t r = block.Thread(); r < place.box.height;
           r += kFastThreads) {
        const std::uint64_t offset = (place.flat + r * cols) * sizeof(Unit);
        shared.late.weights[r] =
            SplitOf(batch.l61.key.B((offset >> 2) / kL61TileWords));
      }
    }
    for (std::uint32_t i = block.Thread(); i < kOutWords / 4;
         i += kFastThreads) {
      shared.late.out_vectors[i] = Bytes16{{0, 0, 0, 0}};
    }
  }
  block.Sync();

  // Where the planes begin, and this warp's part of each.
  std::uint32_t unary_a = a * (ka + 1) + b * (kb + 1);
  std::uint32_t quotients_a = 0;
  std::uint32_t quotients_b = 0;
  std::uint32_t exponents = 0;
  std::uint32_t before_a = 0;
  std::uint32_t before_b = 0;
  std::uint32_t before_e = 0;
  KEDGE_UNROLL
  for (std::uint32_t w = 0; w < kFastWarps; ++w) {
    if (w == warp) {
      before_a = quotients_a;
      before_b = quotients_b;
      before_e = exponents;
    }
    quotients_a += shared.sums[w].quotients_a;
    quotients_b += shared.sums[w].quotients_b;
    exponents += shared.sums[w].exponents;
  }
  const std::uint32_t unary_b = unary_a + quotients_a + a;
  const std::uint32_t unary_e = unary_b + quotients_b + b;
  const std::uint32_t mantissas = unary_e + exponents + b;
  const std::uint32_t bytes = (mantissas + exponents + 7) / 8;
  if (bytes > 4 * kOutWords) {
    if (block.Thread() == 0) LeaveToHeavy(block, batch, place.tile);
    return;
  }
  // The answer arrives while bits are placed.
  if (block.Thread() == 0) shared.payload = Reserve(block, batch, bytes);

  std::uint64_t l61 = 0;
  std::uint32_t next = NextInA<Unit>(lists, run_a, next_a);
  // Of the next change in the unary plane.
  std::uint32_t unary =
      unary_a + before_a + (lane_quotients & 0xffff) + rank_a + run_a.begin;
  KEDGE_NO_UNROLL
  for (std::uint32_t i = run_a.begin; i < run_a.end;) {
    // Sums of +-A * B of all changes and, for units of 2 bytes, of those in the
    // upper half of a word: these count another 2^16 - 1 times.
    constexpr std::uint32_t kSums = sizeof(Unit) == 2 ? 2 : 1;
    ProductSum sums[kSums];
    // Fields gather here: 64 bits are enough, because where a lane has two
    // changes the tile has more than 32, and ka is at most 8.
    static_assert(kMostProducts * 9 <= 64);
    const std::uint32_t fields_at = (rank_a + i) * (ka + 1);
    std::uint64_t fields = 0;
    std::uint32_t fields_bits = 0;
    const std::uint32_t end = Min(run_a.end, i + kMostProducts);
    KEDGE_NO_UNROLL
    for (; i < end; ++i) {
      const auto entry = lists.A(i);
      const std::uint32_t index = IndexOf(entry);
      const std::uint32_t sign = SignOf(entry);
      const std::uint32_t gap = index - next;
      next = index + 1;
      fields |= std::uint64_t{(gap & ((1u << ka) - 1)) | sign << ka}
                << fields_bits;
      fields_bits += ka + 1;
      unary += gap >> ka;
      PutOne(block, shared.late.out, unary);
      ++unary;
      if (!by_row) {
        l61 = L61Add(l61, ResidueOfChange<Unit>(batch.l61, place, cols, index,
                                                1, sign != 0));
      } else if constexpr (sizeof(Unit) == 1) {
        l61 =
            L61Add(l61, ResidueInRow<Unit>(
                            batch.l61, place, static_cast<std::uint32_t>(cols),
                            shared.late.weights, index, 1, sign != 0));
      } else {
        const std::uint32_t r = index >> place.row_shift;
        const std::uint32_t unit =
            static_cast<std::uint32_t>(place.flat) + index +
            r * (static_cast<std::uint32_t>(cols) - place.box.width);
        const std::uint64_t weight =
            batch.l61.a[unit / (4 / sizeof(Unit)) & (kL61TileWords - 1)];
        const std::int32_t d = 1 - 2 * static_cast<std::int32_t>(sign);
        const std::int32_t a_low =
            d * static_cast<std::int32_t>(weight & ((1u << 30) - 1));
        const std::int32_t a_high = d * static_cast<std::int32_t>(weight >> 30);
        const SplitWeight b_of_row = shared.late.weights[r];
        sums[0].Add(a_low, a_high, b_of_row);
        if constexpr (kSums == 2) {
          const std::int32_t upper = -static_cast<std::int32_t>(unit & 1);
          sums[1].Add(a_low & upper, a_high & upper, b_of_row);
        }
      }
    }
    PutLongField(block, shared.late.out, fields_at, fields);
    if (sizeof(Unit) > 1 && by_row) {
      __int128 sum = sums[0].Value();
      if constexpr (kSums == 2) {
        sum += static_cast<__int128>(FoldSigned(sums[1].Value())) * 0xffff;
      }
      l61 = L61Add(l61, ResidueOf(FoldSigned(sum)));
    }
  }
  const std::uint32_t fields_b = a * (ka + 1);
  next = NextInB<Unit>(lists, run_b, next_b);
  unary = unary_b + before_b + (lane_quotients >> 16) + rank_b + run_b.begin;
  before_e += lane_exponents;
  KEDGE_NO_UNROLL
  for (std::uint32_t i = run_b.begin; i < run_b.end; ++i) {
    const auto entry = lists.B(i);
    const std::uint32_t index = IndexOf(entry);
    const std::uint32_t sign = SignOf(entry);
    const std::uint32_t m = BelowMagnitude(entry);  // |d| - 1
    const std::uint32_t gap = index - next;
    next = index + 1;
    const std::uint32_t rank = rank_b + i;
    PutField(block, shared.late.out, fields_b + rank * (kb + 1),
             (gap & ((1u << kb) - 1)) | sign << kb);
    unary += gap >> kb;
    PutOne(block, shared.late.out, unary);
    ++unary;
    const std::uint32_t e = FloorLog2(m);
    PutBits(block, shared.late.out, mantissas + before_e, m ^ (1u << e));
    before_e += e;
    PutOne(block, shared.late.out, unary_e + before_e + rank);
    l61 = L61Add(
        l61, by_row ? ResidueInRow<Unit>(
                          batch.l61, place, static_cast<std::uint32_t>(cols),
                          shared.late.weights, index, m + 1, sign != 0)
                    : ResidueOfChange<Unit>(batch.l61, place, cols, index,
                                            m + 1, sign != 0));
  }
  l61 = block.AddResidues(l61);
  if (lane == 0) shared.l61[warp] = l61;
  block.Sync();

  const std::uint32_t payload = shared.payload;
  if (payload != kNoPayload) {
    auto* to = reinterpret_cast<std::uint64_t*>(
        batch.arena + std::uint64_t{payload} * kArenaAlignment);
    for (std::uint32_t i = block.Thread(); i < (bytes + 7) / 8;
         i += kFastThreads) {
      to[i] = shared.late.out[2 * i] | std::uint64_t{shared.late.out[2 * i + 1]}
                                           << 32;
    }
  }
  if (block.Thread() == 0) {
    EncodedTile tile;
    a = 0;  // once more: to keep them takes registers
    b = 0;
    for (std::uint32_t w = 0; w < kFastWarps; ++w) {
      tile.l61 = L61Add(tile.l61, shared.l61[w]);
      a += shared.changes[w].a;
      b += shared.changes[w].b;
    }
    tile.payload = payload;
    tile.bytes = bytes;
    tile.nnz = a + b;
    tile.a = static_cast<std::uint16_t>(a);
    tile.b = static_cast<std::uint16_t>(b);
    tile.mode = static_cast<std::uint32_t>(TileMode::kSparse);
    batch.tiles[place.tile] = tile;
    block.AtomicAdd(&batch.totals->nnz, std::uint64_t{a + b});
    block.AtomicAdd(&batch.totals->changed_tiles, 1u);
  }
}

// Encodes tile `tile` of the batch, or leaves it to HeavyEncodeTile. A block of
// kFastThreads; shared memory holds nothing yet.
template <typename Block>
KEDGE_KERNEL_INLINE void FastEncodeTile(Block& block, FastShared& shared,
                                        const EncodeBatch& batch,
                                        std::uint64_t tile) {
  const Place place = FindPlace(block, batch, tile);
  if (place.apart) {  // a band of a long row has many of these
    if (block.Thread() == 0) batch.tiles[tile] = EncodedTile{};
    return;
  }
  switch (place.slice->old_units.unit_bytes) {
    case 1:
      FastEncodeUnits<std::uint8_t>(block, shared, batch, place);
      break;
    case 2:
      FastEncodeUnits<std::uint16_t>(block, shared, batch, place);
      break;
    default:
      FastEncodeUnits<std::uint32_t>(block, shared, batch, place);
      break;
  }
}

// ----------------------------------------------------------- the heavy kernel

// Bits of consecutive fields, ORed into zeroed words.
template <typename Block>
struct BitAppender {
  Block* block;
  std::uint32_t* words;
  std::uint32_t at;           // of the next bit
  std::uint64_t pending = 0;  // of the word that `at` lies in

  KEDGE_KERNEL_INLINE void Put(std::uint64_t value, std::uint32_t width) {
    while (width > 0) {  // at most 32 bits at a time
      const std::uint32_t take = Min(width, 32);
      const std::uint32_t part =
          static_cast<std::uint32_t>(value & ((std::uint64_t{1} << take) - 1));
      pending |= std::uint64_t{part} << (at & 31);
      const std::uint32_t word = at >> 5;
      at += take;
      if (at >> 5 != word) {
        Flush(word);
        pending >>= 32;
      }
      value >>= take;
      width -= take;
    }
  }
  KEDGE_KERNEL_INLINE void PutUnary(std::uint32_t zeros) {
    for (; zeros >= 32; zeros -= 32) Put(0, 32);
    Put(std::uint64_t{1} << zeros, zeros + 1);
  }
  KEDGE_KERNEL_INLINE void Finish() {
    if (at & 31) Flush(at >> 5);
  }
  KEDGE_KERNEL_INLINE void Flush(std::uint32_t word) {
    const auto low = static_cast<std::uint32_t>(pending);
    if (low != 0) block->AtomicOr(&words[word], low);
  }
};

// The sum of `value` over the threads before this one; *all over all of them.
template <typename Block>
KEDGE_KERNEL_INLINE std::uint32_t SumBefore(Block& block, HeavyShared& shared,
                                            std::uint32_t value,
                                            std::uint32_t* all) {
  const std::uint32_t up_to = block.ScanAdd(value);
  if (block.Lane() == 31) shared.scan[0][block.Warp()] = up_to;
  block.Sync();
  std::uint32_t before = up_to - value;
  *all = 0;
  for (std::uint32_t w = 0; w < kHeavyWarps; ++w) {
    if (w == block.Warp()) before += *all;
    *all += shared.scan[0][w];
  }
  block.Sync();
  return before;
}
// The largest `value` of the threads before this one, or 0.
template <typename Block>
KEDGE_KERNEL_INLINE std::uint32_t MaxBefore(Block& block, HeavyShared& shared,
                                            std::uint32_t value) {
  const std::uint32_t up_to = block.ScanMax(value);
  if (block.Lane() == 31) shared.scan[1][block.Warp()] = up_to;
  block.Sync();
  std::uint32_t before = block.Shuffle(up_to, (block.Lane() + 31) % 32);
  if (block.Lane() == 0) before = 0;
  for (std::uint32_t w = 0; w < block.Warp(); ++w) {
    if (shared.scan[1][w] > before) before = shared.scan[1][w];
  }
  block.Sync();
  return before;
}

// The zigzags of a thread's run of units: 0 where nothing changed or where the
// tile or the run ends. On a GPU they lie in local memory.
template <typename Unit>
struct Run {
  using Zigzags = typename EntryOf<Unit>::Type;  // 33 bits of 4-byte units
  Zigzags z[kHeavyRun];
  std::uint32_t first;  // index of z[0]
  std::uint32_t count;
};

template <typename Unit>
KEDGE_KERNEL_INLINE std::uint32_t MagnitudeOf(typename Run<Unit>::Zigzags z) {
  return static_cast<std::uint32_t>((z >> 1) + (z & 1));
}

template <typename Unit, typename Block>
KEDGE_KERNEL_INLINE void EncodeDense(Block& block, const Run<Unit>& run,
                                     std::uint32_t units, std::uint32_t k,
                                     std::uint32_t unary_before,
                                     std::uint32_t escapes_before,
                                     std::uint32_t unary_all,
                                     std::uint32_t* words) {
  constexpr std::uint32_t kBits = 8 * sizeof(Unit);
  if (k > 0) {
    BitAppender<Block> lows{&block, words, run.first * k};
    KEDGE_NO_UNROLL
    for (std::uint32_t j = 0; j < kHeavyRun; ++j) {
      if (j < run.count) lows.Put(run.z[j], k);
    }
    lows.Finish();
  }
  if (k == kBits + 1) return;
  BitAppender<Block> unary{&block, words, units * k + unary_before};
  BitAppender<Block> escapes{
      &block, words, units * k + unary_all + escapes_before * (kBits + 1)};
  KEDGE_NO_UNROLL
  for (std::uint32_t j = 0; j < kHeavyRun; ++j) {
    if (j < run.count) {
      const std::uint64_t q = std::uint64_t{run.z[j]} >> k;
      if (q >= kDenseEscapeQuotient) {
        unary.PutUnary(kDenseEscapeQuotient);
        escapes.Put(run.z[j], kBits + 1);
      } else {
        unary.PutUnary(static_cast<std::uint32_t>(q));
      }
    }
  }
  unary.Finish();
  escapes.Finish();
}

template <typename Unit, typename Block>
KEDGE_KERNEL_INLINE void HeavyEncodeUnits(Block& block, HeavyShared& shared,
                                          const EncodeBatch& batch,
                                          const Place& place) {
  constexpr std::uint32_t kBits = 8 * sizeof(Unit);
  const std::uint32_t units = place.units;
  const std::uint32_t stride = (units + kHeavyThreads - 1) / kHeavyThreads;
  const std::uint64_t cols = place.slice->grid.cols;
  const std::uint32_t thread = block.Thread();
  Run<Unit> run;
  run.first = Min(units, thread * stride);
  run.count = Min(stride, units - run.first);

  // The changes, and their counts.
  std::uint32_t own_a = 0;
  std::uint32_t own_b = 0;
  std::uint32_t last_a = 0;  // index + 1
  std::uint32_t last_b = 0;
  std::uint64_t l61 = 0;
  KEDGE_NO_UNROLL
  for (std::uint32_t j = 0; j < kHeavyRun; ++j) {
    run.z[j] = 0;
    if (j < run.count) {
      Unit before;
      Unit after;
      LoadUnit<Unit>(block, place, run.first + j, &before, &after);
      if (before != after) {
        const bool negative = after < before;
        const std::uint32_t magnitude =
            negative ? before - after : after - before;
        run.z[j] = 2 * static_cast<typename Run<Unit>::Zigzags>(magnitude) -
                   (negative ? 1 : 0);
        if (magnitude == 1) {
          ++own_a;
          last_a = run.first + j + 1;
        } else {
          ++own_b;
          last_b = run.first + j + 1;
        }
        l61 = L61Add(
            l61, ResidueOfChange<Unit>(batch.l61, place, cols, run.first + j,
                                       magnitude, negative));
      }
    }
  }
  l61 = block.AddResidues(l61);
  if (block.Lane() == 0) shared.l61[block.Warp()] = l61;
  std::uint32_t a;
  std::uint32_t b;
  const std::uint32_t rank_a = SumBefore(block, shared, own_a, &a);
  const std::uint32_t rank_b = SumBefore(block, shared, own_b, &b);
  const std::uint32_t next_a = MaxBefore(block, shared, last_a);
  const std::uint32_t next_b = MaxBefore(block, shared, last_b);
  const std::uint32_t ka = ListParameter(a, units);
  const std::uint32_t kb = ListParameter(b, units);

  // The sizes of the sparse payload's planes.
  std::uint32_t own_qa = 0;
  std::uint32_t own_qb = 0;
  std::uint32_t own_e = 0;
  {
    std::uint32_t after_a = next_a;
    std::uint32_t after_b = next_b;
    KEDGE_NO_UNROLL
    for (std::uint32_t j = 0; j < kHeavyRun; ++j) {
      if (run.z[j] != 0) {
        const std::uint32_t index = run.first + j;
        if (run.z[j] <= 2) {
          own_qa += (index - after_a) >> ka;
          after_a = index + 1;
        } else {
          own_qb += (index - after_b) >> kb;
          after_b = index + 1;
          own_e += FloorLog2(MagnitudeOf<Unit>(run.z[j]) - 1);
        }
      }
    }
  }
  std::uint32_t all_qa;
  std::uint32_t all_qb;
  std::uint32_t all_e;
  const std::uint32_t before_qa = SumBefore(block, shared, own_qa, &all_qa);
  const std::uint32_t before_qb = SumBefore(block, shared, own_qb, &all_qb);
  const std::uint32_t before_e = SumBefore(block, shared, own_e, &all_e);
  const std::uint32_t fields_b = a * (ka + 1);
  const std::uint32_t unary_a = fields_b + b * (kb + 1);
  const std::uint32_t unary_b = unary_a + all_qa + a;
  const std::uint32_t unary_e = unary_b + all_qb + b;
  const std::uint32_t mantissas = unary_e + all_e + b;
  std::uint32_t bytes = (mantissas + all_e + 7) / 8;

  // The dense payload's length for every parameter.
  bool dense = false;
  std::uint32_t dense_k = 0;
  if (a + b > units / 4) {
    for (std::uint32_t k = thread; k <= kBits; k += kHeavyThreads) {
      shared.dense_bits[k] = 0;
      shared.dense_escapes[k] = 0;
    }
    block.Sync();
    KEDGE_NO_UNROLL
    for (std::uint32_t k = 0; k <= kBits; ++k) {
      std::uint32_t unary = 0;
      std::uint32_t escapes = 0;
      KEDGE_NO_UNROLL
      for (std::uint32_t j = 0; j < kHeavyRun; ++j) {
        const std::uint64_t q = std::uint64_t{run.z[j]} >> k;
        if (q >= kDenseEscapeQuotient) {
          unary += kDenseEscapeQuotient;
          ++escapes;
        } else {
          unary += static_cast<std::uint32_t>(q);
        }
      }
      // Of a warp's 1,024 units: at most 15 * 1,024 and 1,024.
      const std::uint32_t both = block.ReduceAdd(unary | escapes << 16);
      if (block.Lane() == 0) {
        block.AtomicAdd(&shared.dense_bits[k], both & 0xffff);
        block.AtomicAdd(&shared.dense_escapes[k], both >> 16);
      }
    }
    block.Sync();
    std::uint32_t best = units * (kBits + 1);
    dense_k = kBits + 1;
    for (std::uint32_t k = kBits + 1; k-- > 0;) {  // the smallest of equals
      const std::uint32_t bits = units * (k + 1) + shared.dense_bits[k] +
                                 shared.dense_escapes[k] * (kBits + 1);
      if (bits <= best) {
        best = bits;
        dense_k = k;
      }
    }
    dense = (best + 7) / 8 < bytes;
    if (dense) bytes = (best + 7) / 8;
  }
  std::uint32_t own_unary = 0;
  std::uint32_t own_escapes = 0;
  if (dense && dense_k <= kBits) {
    KEDGE_NO_UNROLL
    for (std::uint32_t j = 0; j < kHeavyRun; ++j) {
      if (j < run.count) {
        const std::uint64_t q = std::uint64_t{run.z[j]} >> dense_k;
        const bool escape = q >= kDenseEscapeQuotient;
        own_unary +=
            1 + (escape ? kDenseEscapeQuotient : static_cast<std::uint32_t>(q));
        if (escape) ++own_escapes;
      }
    }
  }
  std::uint32_t all_unary;
  std::uint32_t all_escapes;
  const std::uint32_t before_unary =
      SumBefore(block, shared, own_unary, &all_unary);
  const std::uint32_t before_escapes =
      SumBefore(block, shared, own_escapes, &all_escapes);

  if (thread == 0) {
    const std::uint32_t payload = Reserve(block, batch, bytes);
    shared.payload = payload;
    EncodedTile tile;
    for (std::uint32_t w = 0; w < kHeavyWarps; ++w) {
      tile.l61 = L61Add(tile.l61, shared.l61[w]);
    }
    tile.payload = payload;
    tile.bytes = bytes;
    tile.nnz = a + b;
    tile.a = static_cast<std::uint16_t>(dense ? dense_k : a);
    tile.b = static_cast<std::uint16_t>(dense ? all_escapes : b);
    tile.mode = static_cast<std::uint32_t>(dense ? TileMode::kDense
                                                 : TileMode::kSparse);
    batch.tiles[place.tile] = tile;
    block.AtomicAdd(&batch.totals->nnz, std::uint64_t{a + b});
    block.AtomicAdd(&batch.totals->changed_tiles, 1u);
  }
  block.Sync();
  const std::uint32_t payload = shared.payload;
  if (payload == kNoPayload) return;
  auto* words = reinterpret_cast<std::uint32_t*>(
      batch.arena + std::uint64_t{payload} * kArenaAlignment);
  for (std::uint32_t i = thread; i < (bytes + 7) / 8 * 2; i += kHeavyThreads) {
    words[i] = 0;
  }
  block.Sync();

  if (dense) {
    EncodeDense<Unit>(block, run, units, dense_k, before_unary, before_escapes,
                      all_unary, words);
    return;
  }
  BitAppender<Block> low_a{&block, words, rank_a * (ka + 1)};
  BitAppender<Block> low_b{&block, words, fields_b + rank_b * (kb + 1)};
  BitAppender<Block> quotient_a{&block, words, unary_a + before_qa + rank_a};
  BitAppender<Block> quotient_b{&block, words, unary_b + before_qb + rank_b};
  BitAppender<Block> exponent{&block, words, unary_e + before_e + rank_b};
  BitAppender<Block> mantissa{&block, words, mantissas + before_e};
  std::uint32_t after_a = next_a;
  std::uint32_t after_b = next_b;
  KEDGE_NO_UNROLL
  for (std::uint32_t j = 0; j < kHeavyRun; ++j) {
    if (run.z[j] != 0) {
      const std::uint32_t index = run.first + j;
      const std::uint32_t sign = static_cast<std::uint32_t>(run.z[j] & 1);
      if (run.z[j] <= 2) {
        const std::uint32_t gap = index - after_a;
        after_a = index + 1;
        low_a.Put((gap & ((1u << ka) - 1)) | sign << ka, ka + 1);
        quotient_a.PutUnary(gap >> ka);
      } else {
        const std::uint32_t gap = index - after_b;
        after_b = index + 1;
        low_b.Put((gap & ((1u << kb) - 1)) | sign << kb, kb + 1);
        quotient_b.PutUnary(gap >> kb);
        const std::uint32_t m = MagnitudeOf<Unit>(run.z[j]) - 1;
        const std::uint32_t e = FloorLog2(m);
        exponent.PutUnary(e);
        mantissa.Put(m, e);
      }
    }
  }
  low_a.Finish();
  low_b.Finish();
  quotient_a.Finish();
  quotient_b.Finish();
  exponent.Finish();
  mantissa.Finish();
}

// Encodes a tile that FastEncodeTile left, whatever it holds. A block of
// kHeavyThreads. Shared memory may be used again after a Sync().
template <typename Block>
KEDGE_KERNEL_INLINE void HeavyEncodeTile(Block& block, HeavyShared& shared,
                                         const EncodeBatch& batch,
                                         std::uint64_t tile) {
  const Place place = FindPlace(block, batch, tile);
  switch (place.slice->old_units.unit_bytes) {
    case 1:
      HeavyEncodeUnits<std::uint8_t>(block, shared, batch, place);
      break;
    case 2:
      HeavyEncodeUnits<std::uint16_t>(block, shared, batch, place);
      break;
    default:
      HeavyEncodeUnits<std::uint32_t>(block, shared, batch, place);
      break;
  }
}

}  // namespace kedge::tile_encode

#endif  // KEDGE_ENGINE_CUDA_TILE_ENCODE_CUH_
