// Goal: what kernels share with host code compiles for the device, without
// Abseil. Method: compiled, where CUDA is there; nothing runs.

#include "kedge/format/l61.h"
#include "kedge/format/record_layout.h"
#include "kedge/format/tile_grid.h"

namespace kedge {
namespace {

__global__ void UseAll(TileGrid grid, L61Key key, std::uint64_t* out) {
  const TileBox box = grid.Box(blockIdx.x);
  const std::uint64_t unit = grid.FlatIndex(box, threadIdx.x);
  const TileRange tiles = grid.TilesOf({unit, unit + 1});
  const std::int64_t difference = Unzigzag(Zigzag(-3));
  out[unit] = L61OfChange(key, unit, 2, difference) +
              RiceParameter(threadIdx.x + 1, box.unit_count()) + tiles.first;
}

}  // namespace

// Keeps the kernel.
void LaunchUseAll(TileGrid grid, L61Key key, std::uint64_t* out) {
  UseAll<<<1, 1>>>(grid, key, out);
}

}  // namespace kedge
