#include "kedge/examples/offload_trainer/moe_model.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace kedge::example {
namespace {

constexpr std::uint64_t kHeadDim = 128;
constexpr std::uint64_t kScaleBlock = 128;

std::uint64_t AttentionElements(const MoeDims& d) {
  return (d.q_rows + 2 * d.kv_rows) * d.hidden + d.hidden * d.q_rows +
         2 * d.hidden + 2 * kHeadDim;
}
std::uint64_t DenseElements(const MoeDims& d) {
  return 3 * d.dense_hidden * d.hidden;
}
std::uint64_t ExpertElements(const MoeDims& d) {
  return d.experts * (3 * d.expert_hidden + 1) * d.hidden;
}

class Builder {
 public:
  explicit Builder(const MoeDims& dims) : d_(dims) {}

  MoeModel Build() {
    Matrix("model.embed_tokens.weight", d_.vocabulary, d_.hidden);
    for (std::uint64_t i = 0; i < d_.layers; ++i) Layer(i);
    Norm("model.norm.weight", d_.hidden);
    Matrix("lm_head.weight", d_.vocabulary, d_.hidden);
    model_.buffers.push_back({"model.rotary_emb.inv_freq", kHeadDim / 2});
    return std::move(model_);
  }

 private:
  std::uint32_t Parameter(std::string name, std::uint64_t rows,
                          std::uint64_t row_elements, bool norm = false) {
    MoeParameter parameter;
    parameter.name = std::move(name);
    parameter.rows = rows;
    parameter.row_elements = row_elements;
    parameter.norm = norm;
    model_.parameters.push_back(std::move(parameter));
    return static_cast<std::uint32_t>(model_.parameters.size() - 1);
  }

  // [rows, cols] of a parameter from row `first_row` on, `offset` elements into
  // each row.
  void Rows(std::string name, std::uint32_t parameter, std::uint64_t first_row,
            std::uint64_t rows, std::uint64_t cols, std::uint64_t offset,
            bool projection) {
    MoeTensor tensor;
    tensor.name = std::move(name);
    tensor.shape = {rows, cols};
    tensor.strides = {model_.parameters[parameter].row_elements, 1};
    tensor.parameter = parameter;
    tensor.first_row = first_row;
    tensor.offset = offset;
    tensor.projection = projection;
    model_.tensors.push_back(std::move(tensor));
  }

  void Matrix(std::string name, std::uint64_t rows, std::uint64_t cols,
              bool projection = false) {
    const std::uint32_t parameter = Parameter(name, rows, cols);
    Rows(std::move(name), parameter, 0, rows, cols, 0, projection);
  }

  void Norm(std::string name, std::uint64_t elements) {
    MoeTensor tensor;
    tensor.name = name;
    tensor.shape = {elements};
    tensor.strides = {1};
    tensor.parameter = Parameter(std::move(name), elements, 1, true);
    model_.tensors.push_back(std::move(tensor));
  }

  void Layer(std::uint64_t index) {
    const std::string layer = absl::StrCat("model.layers.", index, ".");
    Norm(layer + "input_layernorm.weight", d_.hidden);
    // One parameter for the three projections; the checkpoint names each.
    const std::uint32_t qkv = Parameter(layer + "self_attn.qkv_proj.weight",
                                        d_.q_rows + 2 * d_.kv_rows, d_.hidden);
    Rows(layer + "self_attn.q_proj.weight", qkv, 0, d_.q_rows, d_.hidden, 0,
         true);
    Rows(layer + "self_attn.k_proj.weight", qkv, d_.q_rows, d_.kv_rows,
         d_.hidden, 0, true);
    Rows(layer + "self_attn.v_proj.weight", qkv, d_.q_rows + d_.kv_rows,
         d_.kv_rows, d_.hidden, 0, true);
    Norm(layer + "self_attn.q_norm.weight", kHeadDim);
    Norm(layer + "self_attn.k_norm.weight", kHeadDim);
    Matrix(layer + "self_attn.o_proj.weight", d_.hidden, d_.q_rows, true);
    Norm(layer + "post_attention_layernorm.weight", d_.hidden);
    if (index == 0) {
      Dense(layer);
      return;
    }
    Matrix(layer + "mlp.gate.weight", d_.experts, d_.hidden);
    model_.buffers.push_back(
        {layer + "mlp.gate.e_score_correction_bias", d_.experts});
    // [experts, 2, expert_hidden, hidden] and [experts, hidden, expert_hidden].
    const std::uint64_t half = d_.expert_hidden * d_.hidden;
    const std::uint32_t gate_up =
        Parameter(layer + "mlp.experts.gate_up_proj", d_.experts, 2 * half);
    const std::uint32_t down =
        Parameter(layer + "mlp.experts.down_proj", d_.experts, half);
    for (const std::uint32_t parameter : {gate_up, down}) {
      model_.parameters[parameter].stack = true;
    }
    // There are checkpoints of both kinds: every other layer names its experts,
    // the others list stacks.
    if (index % 2 == 1) {
      for (std::uint64_t e = 0; e < d_.experts; ++e) {
        const std::string expert = absl::StrCat(layer, "mlp.experts.", e, ".");
        Expert(expert + "gate_proj.weight", gate_up, e, 0, d_.expert_hidden,
               d_.hidden);
        Expert(expert + "up_proj.weight", gate_up, e, half, d_.expert_hidden,
               d_.hidden);
        Expert(expert + "down_proj.weight", down, e, 0, d_.hidden,
               d_.expert_hidden);
      }
    } else {
      Stack(layer + "mlp.experts.gate_proj", gate_up, 0, d_.expert_hidden,
            d_.hidden);
      Stack(layer + "mlp.experts.up_proj", gate_up, half, d_.expert_hidden,
            d_.hidden);
      Stack(layer + "mlp.experts.down_proj", down, 0, d_.hidden,
            d_.expert_hidden);
    }
  }

  // Rows of gate and up in turn, as fused kernels like them. They stay bf16:
  // the hook quantises contiguous rows alone.
  void Dense(const std::string& layer) {
    const std::uint32_t gate_up = Parameter(layer + "mlp.gate_up_proj.weight",
                                            d_.dense_hidden, 2 * d_.hidden);
    Rows(layer + "mlp.gate_proj.weight", gate_up, 0, d_.dense_hidden, d_.hidden,
         0, false);
    Rows(layer + "mlp.up_proj.weight", gate_up, 0, d_.dense_hidden, d_.hidden,
         d_.hidden, false);
    Matrix(layer + "mlp.down_proj.weight", d_.hidden, d_.dense_hidden, true);
  }

  // [rows, cols] of one expert.
  void Expert(std::string name, std::uint32_t parameter, std::uint64_t expert,
              std::uint64_t offset, std::uint64_t rows, std::uint64_t cols) {
    MoeTensor tensor;
    tensor.name = std::move(name);
    tensor.shape = {rows, cols};
    tensor.strides = {cols, 1};
    tensor.parameter = parameter;
    tensor.first_row = expert;
    tensor.offset = offset;
    tensor.one_row = true;
    tensor.projection = true;
    model_.tensors.push_back(std::move(tensor));
  }

  // [experts, rows, cols]: gate and up are halves of each expert's part.
  void Stack(std::string name, std::uint32_t parameter, std::uint64_t offset,
             std::uint64_t rows, std::uint64_t cols) {
    MoeTensor tensor;
    tensor.name = std::move(name);
    tensor.shape = {d_.experts, rows, cols};
    tensor.strides = {model_.parameters[parameter].row_elements, cols, 1};
    tensor.parameter = parameter;
    tensor.offset = offset;
    model_.tensors.push_back(std::move(tensor));
  }

  const MoeDims d_;
  MoeModel model_;
};

}  // namespace

std::uint64_t MoeTensor::elements() const {
  std::uint64_t count = 1;
  for (const std::uint64_t extent : shape) count *= extent;
  return count;
}

std::uint64_t MoeModel::elements() const {
  std::uint64_t count = 0;
  for (const MoeParameter& parameter : parameters) {
    count += parameter.elements();
  }
  return count;
}

MoeDims ChooseDims(std::uint64_t parameters) {
  MoeDims d;
  d.hidden = 2048;
  d.experts = 128;
  if (parameters < 8'000'000'000) d.hidden = 1024, d.experts = 64;
  if (parameters < 1'000'000'000) d.hidden = 512, d.experts = 32;
  if (parameters < 60'000'000) d.hidden = 256, d.experts = 16;
  if (parameters < 4'000'000) d.hidden = 128, d.experts = 8;
  d.q_rows = 2 * d.hidden;
  d.kv_rows = std::max<std::uint64_t>(kHeadDim, d.hidden / 4);
  d.expert_hidden = 3 * d.hidden / 8;
  d.dense_hidden = 3 * d.hidden;
  const std::uint64_t least_vocabulary = 256;
  const std::uint64_t fixed = AttentionElements(d) + DenseElements(d) +
                              d.hidden + 2 * least_vocabulary * d.hidden;
  const std::uint64_t layer = AttentionElements(d) + ExpertElements(d);
  // One layer of each kind at least.
  const std::uint64_t moe_layers = std::max<std::uint64_t>(
      2, parameters > fixed ? (parameters - fixed) / layer : 0);
  d.layers = 1 + moe_layers;
  const std::uint64_t without = fixed + moe_layers * layer;
  d.vocabulary = least_vocabulary;
  if (parameters > without) {
    d.vocabulary += (parameters - without) / (2 * d.hidden);
  }
  return d;
}

MoeModel MakeMoeModel(const MoeDims& dims) { return Builder(dims).Build(); }

RowRange ShardOf(const MoeParameter& parameter, std::uint32_t rank,
                 std::uint32_t ranks, bool whole_blocks) {
  const bool blocks = whole_blocks && !parameter.norm && !parameter.stack;
  const std::uint64_t unit = blocks ? kScaleBlock : 1;
  const std::uint64_t units = (parameter.rows + unit - 1) / unit;
  const auto cut = [&](std::uint64_t of) {
    const std::uint64_t all = std::uint64_t{ranks} * (ranks + 1) / 2;
    return std::min(parameter.rows, units * (of * (of + 1) / 2) / all * unit);
  };
  return {cut(rank), cut(std::uint64_t{rank} + 1)};
}

std::optional<TrainerTensor> PartOf(const MoeTensor& tensor,
                                    const MoeParameter& parameter,
                                    RowRange held, const std::byte* data) {
  TrainerTensor part;
  part.name = tensor.name;
  part.dtype = DType::kBf16;
  part.shape = tensor.shape;
  for (const std::uint64_t stride : tensor.strides) {
    part.strides_bytes.push_back(static_cast<std::int64_t>(2 * stride));
  }
  // The rows of the parameter that the tensor covers.
  const std::uint64_t rows = tensor.one_row ? 1 : tensor.shape.front();
  const std::uint64_t begin = std::max(tensor.first_row, held.begin);
  const std::uint64_t end = std::min(tensor.first_row + rows, held.end);
  if (begin >= end) return std::nullopt;
  part.data = data + 2 * ((begin - held.begin) * parameter.row_elements +
                          tensor.offset);
  if (end - begin < rows) {
    const std::uint64_t row = tensor.elements() / rows;
    part.shard = ElementRange{(begin - tensor.first_row) * row,
                              (end - tensor.first_row) * row};
  }
  return part;
}

}  // namespace kedge::example
