#ifndef KEDGE_EXAMPLES_OFFLOAD_TRAINER_MOE_MODEL_H_
#define KEDGE_EXAMPLES_OFFLOAD_TRAINER_MOE_MODEL_H_

// Names and shapes of a mixture-of-experts transformer like Qwen3-30B-A3B at
// any size, as a trainer stores it: parameters, of which the checkpoint's
// tensors are views, and how rows of them are shared out among ranks.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kedge/writer/tensor_source.h"

namespace kedge::example {

struct MoeDims {
  std::uint64_t layers = 0;  // the first one is dense
  std::uint64_t hidden = 0;
  std::uint64_t q_rows = 0;
  std::uint64_t kv_rows = 0;
  std::uint64_t experts = 0;
  std::uint64_t expert_hidden = 0;
  std::uint64_t dense_hidden = 0;
  std::uint64_t vocabulary = 0;
};

// A model of about `parameters` elements, at least some 800,000.
MoeDims ChooseDims(std::uint64_t parameters);

// bf16 storage that the optimizer updates as one: [rows, row_elements].
struct MoeParameter {
  std::string name;
  std::uint64_t rows = 0;
  std::uint64_t row_elements = 0;
  bool norm = false;   // starts at one; no weight decay
  bool stack = false;  // a row is an expert's matrix, or two

  std::uint64_t elements() const { return rows * row_elements; }
};

// A tensor of the checkpoint, a view of one parameter.
struct MoeTensor {
  std::string name;
  std::vector<std::uint64_t> shape;
  std::vector<std::uint64_t> strides;  // in elements, one a dimension
  std::uint32_t parameter = 0;
  // The row of the parameter where it begins, and how far behind that row's
  // first element.
  std::uint64_t first_row = 0;
  std::uint64_t offset = 0;
  // It lies in that one row; else index i of the first dimension is row
  // first_row + i.
  bool one_row = false;
  bool projection = false;  // what fp8 engines hold in fp8

  std::uint64_t elements() const;
};

// An f32 buffer: state of the model, but nothing that the optimizer writes.
struct MoeBuffer {
  std::string name;
  std::uint64_t elements = 0;
};

struct MoeModel {
  std::vector<MoeParameter> parameters;  // in the order of the forward pass
  std::vector<MoeTensor> tensors;
  std::vector<MoeBuffer> buffers;

  std::uint64_t elements() const;  // of all parameters
};
MoeModel MakeMoeModel(const MoeDims& dims);

// Rows of a parameter.
struct RowRange {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;

  bool empty() const { return begin == end; }
};

// What rank `rank` holds of it: one part for rank 0, two for rank 1, and so on.
// `whole_blocks`: shards begin at multiples of 128 rows, so that no block of
// an fp8 scale is cut.
RowRange ShardOf(const MoeParameter& parameter, std::uint32_t rank,
                 std::uint32_t ranks, bool whole_blocks);

// The part of `tensor` within the rows `held` of its parameter, which lie at
// `data`; not there if it has none.
std::optional<TrainerTensor> PartOf(const MoeTensor& tensor,
                                    const MoeParameter& parameter,
                                    RowRange held, const std::byte* data);

}  // namespace kedge::example

#endif  // KEDGE_EXAMPLES_OFFLOAD_TRAINER_MOE_MODEL_H_
