#include "kedge/examples/inference_engine/engine_weights.h"

#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "kedge/format/status.h"

namespace kedge::example {
namespace {

constexpr std::uint16_t kNan = 0x7fc0;
constexpr std::int64_t kElementBytes = sizeof(std::uint16_t);

bool IsSplitByColumns(absl::string_view name) {
  return absl::EndsWith(name, ".o_proj.weight") ||
         absl::EndsWith(name, ".down_proj.weight");
}

// The parameter that a rank packs the tensor into.
std::string PackedName(absl::string_view name) {
  return absl::StrReplaceAll(name, {{".q_proj.", ".qkv_proj."},
                                    {".k_proj.", ".qkv_proj."},
                                    {".v_proj.", ".qkv_proj."},
                                    {".gate_proj.", ".gate_up_proj."},
                                    {".up_proj.", ".gate_up_proj."}});
}

}  // namespace

std::vector<EngineWeights::Place> EngineWeights::PlacesOf(
    const TensorSpec& spec, WeightLayout layout) {
  const std::int64_t rows = spec.rows();
  const std::int64_t cols = spec.cols();
  if (layout == WeightLayout::kWhole || spec.shape.size() == 1) {
    return {{.rank = 0, .buffer = spec.name, .row_end = rows, .col_end = cols}};
  }
  if (IsSplitByColumns(spec.name)) {
    return {
        {.rank = 0, .buffer = spec.name, .row_end = rows, .col_end = cols / 2},
        {.rank = 1,
         .buffer = spec.name,
         .row_end = rows,
         .col_begin = cols / 2,
         .col_end = cols}};
  }
  const std::string buffer = PackedName(spec.name);
  return {{.rank = 0, .buffer = buffer, .row_end = rows / 2, .col_end = cols},
          {.rank = 1,
           .buffer = buffer,
           .row_begin = rows / 2,
           .row_end = rows,
           .col_end = cols}};
}

absl::StatusOr<std::unique_ptr<EngineWeights>> EngineWeights::Create(
    const std::vector<TensorSpec>& tensors, WeightLayout layout) {
  std::unique_ptr<EngineWeights> weights(new EngineWeights());
  if (layout == WeightLayout::kWhole) {
    weights->ranks_.push_back(std::make_unique<Rank>("whole"));
  } else {
    weights->ranks_.push_back(std::make_unique<Rank>("tp0"));
    weights->ranks_.push_back(std::make_unique<Rank>("tp1"));
  }
  const auto elements = [](const Place& place) {
    return static_cast<std::size_t>((place.row_end - place.row_begin) *
                                    (place.col_end - place.col_begin));
  };
  const auto buffer = [&](const Place& place) -> Buffer& {
    return weights->ranks_[place.rank]->buffers[place.buffer];
  };
  // Buffers get their full size first: addresses must not move afterwards.
  for (const TensorSpec& spec : tensors) {
    for (const Place& place : PlacesOf(spec, layout)) {
      buffer(place).resize(buffer(place).size() + elements(place), kNan);
    }
  }
  std::map<std::pair<std::size_t, std::string>, std::size_t> used;
  for (const TensorSpec& spec : tensors) {
    for (const Place& place : PlacesOf(spec, layout)) {
      if (elements(place) == 0) continue;
      std::size_t& at = used[{place.rank, place.buffer}];
      KEDGE_RETURN_IF_ERROR(
          weights->Add(spec, place, buffer(place).data() + at));
      at += elements(place);
    }
  }
  return weights;
}

absl::Status EngineWeights::Add(const TensorSpec& spec, const Place& place,
                                std::uint16_t* data) {
  const std::int64_t rows = place.row_end - place.row_begin;
  const std::int64_t cols = place.col_end - place.col_begin;
  view_.Add(spec.name, {.data = data,
                        .row_begin = place.row_begin,
                        .row_end = place.row_end,
                        .col_begin = place.col_begin,
                        .col_end = place.col_end,
                        .row_stride = cols});
  TensorTarget target;
  target.name = spec.name;
  target.shape.assign(spec.shape.begin(), spec.shape.end());
  target.data = data;
  if (spec.shape.size() == 2) {
    target.begin.push_back(static_cast<std::uint64_t>(place.row_begin));
    target.extent.push_back(static_cast<std::uint64_t>(rows));
    target.strides_bytes.push_back(cols * kElementBytes);
  }
  target.begin.push_back(static_cast<std::uint64_t>(place.col_begin));
  target.extent.push_back(static_cast<std::uint64_t>(cols));
  target.strides_bytes.push_back(kElementBytes);
  return ranks_[place.rank]->set.Add(std::move(target));
}

std::vector<const WeightSet*> EngineWeights::sets() const {
  std::vector<const WeightSet*> sets;
  for (const auto& rank : ranks_) sets.push_back(&rank->set);
  return sets;
}

}  // namespace kedge::example
