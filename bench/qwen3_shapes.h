#ifndef KEDGE_BENCH_QWEN3_SHAPES_H_
#define KEDGE_BENCH_QWEN3_SHAPES_H_

// Names, shapes and the tensor-parallel layout of a model like Qwen3-30B-A3B:
// what a checkpoint lists, and what one rank of an inference engine holds of
// it.

#include <cstdint>
#include <string>
#include <vector>

#include "kedge/format/dtype.h"

namespace kedge {

// The defaults are Qwen3-30B-A3B's: 30.5 G parameters.
struct Qwen3Dims {
  std::uint64_t layers = 48;
  std::uint64_t hidden = 2048;
  std::uint64_t heads = 32;
  std::uint64_t kv_heads = 4;
  std::uint64_t head_dim = 128;
  std::uint64_t experts = 128;
  std::uint64_t expert_hidden = 768;
  std::uint64_t vocab = 151936;
};

// About `scale` of the parameters: fewer layers, a smaller vocabulary and,
// where less than one layer is asked for, fewer experts and narrower ones. In
// (0, 1].
Qwen3Dims ScaledQwen3(double scale);

// What a rank of a tensor-parallel group holds of a tensor.
enum class Qwen3Cut {
  kNone,     // all of it: norms, the router
  kRows,     // q, k, v, gate, up, embeddings
  kColumns,  // o, down
};

struct Qwen3Tensor {
  std::string name;
  DType dtype = DType::kBf16;
  std::vector<std::uint64_t> shape;  // of the whole tensor
  Qwen3Cut cut = Qwen3Cut::kNone;
  // Tensors with the same buffer follow each other in one allocation: packed
  // q/k/v, the gate_up and down stacks of a layer's experts.
  std::string buffer;
  std::uint32_t layer = 0;

  std::uint64_t element_count() const;
};

enum class Qwen3Format {
  kBf16,
  // Projections as f8_e4m3 with an f32 "_scale_inv" for each 128 x 128 block;
  // the rest as before.
  kFp8,
};

// In the order in which buffers hold them.
std::vector<Qwen3Tensor> Qwen3Tensors(const Qwen3Dims& dims,
                                      Qwen3Format format);

// Where rank `rank` of `size` keeps a tensor: the box, contiguous and row-major
// at a byte offset of a buffer.
struct Qwen3Place {
  std::vector<std::uint64_t> begin;
  std::vector<std::uint64_t> extent;
  std::uint32_t buffer = 0;
  std::uint64_t offset = 0;  // bytes; a multiple of 256 where a buffer is one
                             // tensor
  std::uint64_t bytes = 0;
};

struct Qwen3Layout {
  std::vector<Qwen3Place> places;           // as the tensors
  std::vector<std::uint64_t> buffer_bytes;  // one allocation each
  std::uint64_t bytes = 0;                  // of all
};
Qwen3Layout LayOutQwen3(const std::vector<Qwen3Tensor>& tensors,
                        std::uint32_t rank, std::uint32_t size);

}  // namespace kedge

#endif  // KEDGE_BENCH_QWEN3_SHAPES_H_
