#ifndef KEDGE_ENGINE_CPU_L61_SUM_H_
#define KEDGE_ENGINE_CPU_L61_SUM_H_

// L61 of weights in memory at memory speed (format/l61.h has the definition).

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "kedge/format/box_target.h"
#include "kedge/format/l61.h"
#include "kedge/format/tile_grid.h"

namespace kedge {

// The run's weights A in the form that the SIMD code wants (32-64 KiB).
// Thread safety: immutable; const methods may run concurrently.
class L61Summer {
 public:
  explicit L61Summer(const L61Key& key);
  ~L61Summer();
  L61Summer(const L61Summer&) = delete;
  L61Summer& operator=(const L61Summer&) = delete;

  const L61Key& key() const;

  // The part of S that `bytes`, standing at byte `offset` of the tensor, makes
  // up. Any offset, length and alignment. Equal to L61SumScalar.
  std::uint64_t Sum(std::uint64_t offset,
                    std::span<const std::byte> bytes) const;

  // The part of S that a box of a tensor with `grid` makes up.
  std::uint64_t SumBox(const TileGrid& grid, const BoxTarget& box) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kedge

#endif  // KEDGE_ENGINE_CPU_L61_SUM_H_
