#ifndef KEDGE_EXAMPLES_MODEL_WEIGHT_VIEW_H_
#define KEDGE_EXAMPLES_MODEL_WEIGHT_VIEW_H_

// Where a model's bf16 weights lie in this process.
//
// A trainer holds each tensor whole. An inference engine may hold it in
// parts: row or column slices of tensor-parallel ranks, or q, k and v packed
// into one buffer. Both describe what they hold as boxes; the model copies
// those into whole f32 matrices first and computes on them, so that the
// layout can never change a bit of the result.

#include <cstdint>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace kedge::example {

// A tensor the model reads. A vector of n elements has shape {n} and counts
// as one row of n columns.
struct TensorSpec {
  std::string name;                 // as Hugging Face names it
  std::vector<std::int64_t> shape;  // one or two dimensions

  std::int64_t rows() const { return shape.size() == 1 ? 1 : shape[0]; }
  std::int64_t cols() const { return shape.back(); }
  std::int64_t elements() const { return rows() * cols(); }
};

// The part of a tensor that is at one place in memory: element (r, c) of the
// tensor is at data[(r - row_begin) * row_stride + (c - col_begin) *
// col_stride]. Strides are in elements.
struct WeightBox {
  const std::uint16_t* data = nullptr;  // bf16 bits of (row_begin, col_begin)
  std::int64_t row_begin = 0;
  std::int64_t row_end = 0;
  std::int64_t col_begin = 0;
  std::int64_t col_end = 0;
  std::int64_t row_stride = 0;
  std::int64_t col_stride = 1;
};

// The boxes of every tensor.
//
// Ownership: borrows the weights, which outlive the view and may change
// between two calls that read it, never during one.
// Thread safety: const methods may run concurrently.
class WeightView {
 public:
  // Adds a part of tensor `name`.
  void Add(absl::string_view name, const WeightBox& box);

  // Adds a tensor held whole and contiguous.
  void AddWhole(const TensorSpec& spec, const std::uint16_t* data);

  // Copies the tensor into `out`, row-major f32, exactly spec.elements() long.
  //
  // Errors:
  //   kNotFound         no box of that name
  //   kInvalidArgument  a box leaves the tensor, two boxes overlap, elements
  //                     are missing, or `out` has the wrong length
  absl::Status Gather(const TensorSpec& spec, std::span<float> out) const;

 private:
  std::unordered_map<std::string, std::vector<WeightBox>> boxes_;
};

}  // namespace kedge::example

#endif  // KEDGE_EXAMPLES_MODEL_WEIGHT_VIEW_H_
