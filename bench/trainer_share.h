#ifndef KEDGE_BENCH_TRAINER_SHARE_H_
#define KEDGE_BENCH_TRAINER_SHARE_H_

// What one of six trainer ranks holds of a model like Qwen3-30B-A3B, at any
// size: packed parameters, the checkpoint's tensors as views of them, and the
// chunks in which an offloaded optimizer sends new weights to the device.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kedge/writer/tensor_source.h"

namespace kedge {

struct ShareParameter {
  std::string name;
  std::uint64_t elements = 0;
  std::uint64_t first = 0;  // in the block that holds all parameters
};

struct ShareTensor {
  std::string name;
  std::vector<std::uint64_t> shape;
  std::vector<std::uint64_t> strides;  // in elements; empty: contiguous
  std::uint64_t first = 0;             // in that block
};

struct TrainerShare {
  std::vector<ShareParameter> parameters;
  std::vector<ShareTensor> tensors;
  std::uint64_t block_elements = 0;  // parameters begin at multiples of 128
  std::uint64_t elements = 0;        // of all parameters

  // As the writer wants it, in a block at `data`.
  std::vector<TrainerTensor> TensorsAt(const void* data) const;
};

// About `parameters` elements; 5.1e9 is a sixth of the model: 48 layers with 21
// of 128 experts each. Less has fewer layers, then narrower ones.
TrainerShare MakeTrainerShare(std::uint64_t parameters);

// A range of one parameter that is sent at once.
struct SharePiece {
  std::uint32_t parameter = 0;
  std::uint64_t begin = 0;  // in it
  std::uint64_t count = 0;
};
// What fills one pinned slot of `chunk_elements` after another, from the last
// parameter to the first.
std::vector<std::vector<SharePiece>> CutIntoChunks(
    const TrainerShare& share, std::uint64_t chunk_elements);

}  // namespace kedge

#endif  // KEDGE_BENCH_TRAINER_SHARE_H_
