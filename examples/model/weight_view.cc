#include "kedge/examples/model/weight_view.h"

#include <cstddef>

#include "absl/strings/str_cat.h"
#include "kedge/examples/model/bf16.h"

namespace kedge::example {
namespace {

std::string Describe(const WeightBox& box) {
  return absl::StrCat("rows ", box.row_begin, " to ", box.row_end, ", columns ",
                      box.col_begin, " to ", box.col_end);
}

bool Overlap(const WeightBox& a, const WeightBox& b) {
  return a.row_begin < b.row_end && b.row_begin < a.row_end &&
         a.col_begin < b.col_end && b.col_begin < a.col_end;
}

// Boxes inside the tensor that do not overlap cover it exactly if their areas
// add up to its own.
absl::Status CheckCover(const TensorSpec& spec,
                        const std::vector<WeightBox>& boxes) {
  std::int64_t covered = 0;
  for (std::size_t i = 0; i < boxes.size(); ++i) {
    const WeightBox& box = boxes[i];
    if (box.data == nullptr || box.row_begin < 0 || box.col_begin < 0 ||
        box.row_begin >= box.row_end || box.col_begin >= box.col_end ||
        box.row_end > spec.rows() || box.col_end > spec.cols()) {
      return absl::InvalidArgumentError(absl::StrCat(
          spec.name, ": box ", i, " (", Describe(box),
          box.data == nullptr ? ", no memory" : "", "): expected inside ",
          spec.rows(), " x ", spec.cols(), "; describe the box again"));
    }
    for (std::size_t j = 0; j < i; ++j) {
      if (Overlap(box, boxes[j])) {
        return absl::InvalidArgumentError(absl::StrCat(
            spec.name, ": box ", i, " (", Describe(box), ") and box ", j, " (",
            Describe(boxes[j]), ") overlap; add each element once"));
      }
    }
    covered += (box.row_end - box.row_begin) * (box.col_end - box.col_begin);
  }
  if (covered != spec.elements()) {
    return absl::InvalidArgumentError(absl::StrCat(
        spec.name, ": boxes cover ", covered, " elements, expected ",
        spec.elements(), "; add the missing slices"));
  }
  return absl::OkStatus();
}

}  // namespace

void WeightView::Add(absl::string_view name, const WeightBox& box) {
  boxes_[std::string(name)].push_back(box);
}

void WeightView::AddWhole(const TensorSpec& spec, const std::uint16_t* data) {
  Add(spec.name, {.data = data,
                  .row_begin = 0,
                  .row_end = spec.rows(),
                  .col_begin = 0,
                  .col_end = spec.cols(),
                  .row_stride = spec.cols(),
                  .col_stride = 1});
}

absl::Status WeightView::Gather(const TensorSpec& spec,
                                std::span<float> out) const {
  const auto found = boxes_.find(spec.name);
  if (found == boxes_.end()) {
    return absl::NotFoundError(absl::StrCat(
        spec.name, ": the view has no box of this tensor; add one"));
  }
  if (out.size() != static_cast<std::size_t>(spec.elements())) {
    return absl::InvalidArgumentError(
        absl::StrCat(spec.name, ": expected room for ", spec.elements(),
                     " elements, found ", out.size()));
  }
  if (absl::Status status = CheckCover(spec, found->second); !status.ok()) {
    return status;
  }
  for (const WeightBox& box : found->second) {
    const std::int64_t cols = box.col_end - box.col_begin;
    for (std::int64_t r = box.row_begin; r < box.row_end; ++r) {
      const std::uint16_t* from =
          box.data + (r - box.row_begin) * box.row_stride;
      float* to = out.data() + r * spec.cols() + box.col_begin;
      if (box.col_stride == 1) {
        for (std::int64_t c = 0; c < cols; ++c) to[c] = Bf16ToFloat(from[c]);
      } else {
        for (std::int64_t c = 0; c < cols; ++c) {
          to[c] = Bf16ToFloat(from[c * box.col_stride]);
        }
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace kedge::example
