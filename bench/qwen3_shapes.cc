#include "kedge/bench/qwen3_shapes.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"

namespace kedge {
namespace {

constexpr std::uint64_t kScaleBlock = 128;

// `value` times `factor`, a multiple of `step`, at least one of them.
std::uint64_t Scaled(std::uint64_t value, double factor, std::uint64_t step) {
  const double steps =
      static_cast<double>(value) * factor / static_cast<double>(step);
  return std::max<std::uint64_t>(
             1, static_cast<std::uint64_t>(std::llround(steps))) *
         step;
}

}  // namespace

Qwen3Dims ScaledQwen3(double scale) {
  Qwen3Dims dims;
  if (scale == 1) return dims;
  const double layers = static_cast<double>(dims.layers) * scale;
  dims.layers = Scaled(dims.layers, scale, 1);
  dims.vocab = Scaled(dims.vocab, scale, 256);
  if (layers < 1) {
    dims.experts = Scaled(dims.experts, layers, 2);
    // Half of it, cut into scale blocks.
    dims.hidden = Scaled(dims.hidden, std::sqrt(layers), 256);
    dims.heads = Scaled(dims.heads, std::sqrt(layers), 4);
    dims.kv_heads = 2;
    dims.expert_hidden = 256;
  }
  return dims;
}

std::uint64_t Qwen3Tensor::element_count() const {
  std::uint64_t count = 1;
  for (const std::uint64_t extent : shape) count *= extent;
  return count;
}

std::vector<Qwen3Tensor> Qwen3Tensors(const Qwen3Dims& dims,
                                      Qwen3Format format) {
  std::vector<Qwen3Tensor> tensors;
  const auto add = [&](std::string name, std::vector<std::uint64_t> shape,
                       Qwen3Cut cut, std::string buffer, std::uint64_t layer) {
    tensors.push_back({std::move(name), DType::kBf16, std::move(shape), cut,
                       std::move(buffer), static_cast<std::uint32_t>(layer)});
  };
  const auto add_projection =
      [&](const std::string& name, std::vector<std::uint64_t> shape,
          Qwen3Cut cut, const std::string& buffer, std::uint64_t layer) {
        add(name, shape, cut, buffer, layer);
        if (format != Qwen3Format::kFp8) return;
        tensors.back().dtype = DType::kF8E4M3;
        for (std::uint64_t& extent : shape) {
          extent = (extent + kScaleBlock - 1) / kScaleBlock;
        }
        add(absl::StrCat(name, "_scale_inv"), shape, cut,
            absl::StrCat(buffer, ".scale_inv"), layer);
        tensors.back().dtype = DType::kF32;
      };

  add("model.embed_tokens.weight", {dims.vocab, dims.hidden}, Qwen3Cut::kRows,
      "embed_tokens", 0);
  for (std::uint64_t l = 0; l < dims.layers; ++l) {
    const std::string at = absl::StrCat("model.layers.", l, ".");
    const std::string attention = at + "self_attn.";
    const std::string qkv = attention + "qkv_proj";
    add_projection(attention + "q_proj.weight",
                   {dims.heads * dims.head_dim, dims.hidden}, Qwen3Cut::kRows,
                   qkv, l);
    for (const char* const name : {"k_proj.weight", "v_proj.weight"}) {
      add_projection(attention + name,
                     {dims.kv_heads * dims.head_dim, dims.hidden},
                     Qwen3Cut::kRows, qkv, l);
    }
    add_projection(attention + "o_proj.weight",
                   {dims.hidden, dims.heads * dims.head_dim},
                   Qwen3Cut::kColumns, attention + "o_proj", l);
    for (const char* const name : {"q_norm.weight", "k_norm.weight"}) {
      add(attention + name, {dims.head_dim}, Qwen3Cut::kNone, attention + name,
          l);
    }
    for (const char* const name :
         {"input_layernorm.weight", "post_attention_layernorm.weight"}) {
      add(at + name, {dims.hidden}, Qwen3Cut::kNone, at + name, l);
    }
    add(at + "mlp.gate.weight", {dims.experts, dims.hidden}, Qwen3Cut::kNone,
        at + "mlp.gate", l);
    for (std::uint64_t e = 0; e < dims.experts; ++e) {
      const std::string expert = absl::StrCat(at, "mlp.experts.", e, ".");
      for (const char* const name : {"gate_proj.weight", "up_proj.weight"}) {
        add_projection(expert + name, {dims.expert_hidden, dims.hidden},
                       Qwen3Cut::kRows, at + "mlp.experts.gate_up", l);
      }
      add_projection(expert + "down_proj.weight",
                     {dims.hidden, dims.expert_hidden}, Qwen3Cut::kColumns,
                     at + "mlp.experts.down", l);
    }
  }
  add("model.norm.weight", {dims.hidden}, Qwen3Cut::kNone, "norm",
      dims.layers - 1);
  add("lm_head.weight", {dims.vocab, dims.hidden}, Qwen3Cut::kRows, "lm_head",
      dims.layers - 1);
  return tensors;
}

Qwen3Layout LayOutQwen3(const std::vector<Qwen3Tensor>& tensors,
                        std::uint32_t rank, std::uint32_t size) {
  Qwen3Layout layout;
  std::map<std::string, std::uint32_t> buffers;
  for (const Qwen3Tensor& tensor : tensors) {
    Qwen3Place place;
    place.begin.assign(tensor.shape.size(), 0);
    place.extent = tensor.shape;
    if (tensor.cut != Qwen3Cut::kNone) {
      const std::size_t d = tensor.cut == Qwen3Cut::kRows ? 0 : 1;
      const std::uint64_t extent = tensor.shape[d];
      place.begin[d] = extent * rank / size;
      place.extent[d] = extent * (rank + 1) / size - place.begin[d];
    }
    place.bytes = ElementBytes(tensor.dtype);
    for (const std::uint64_t extent : place.extent) place.bytes *= extent;
    const auto [at, added] = buffers.emplace(
        tensor.buffer, static_cast<std::uint32_t>(layout.buffer_bytes.size()));
    if (added) layout.buffer_bytes.push_back(0);
    place.buffer = at->second;
    place.offset = layout.buffer_bytes[place.buffer];
    layout.buffer_bytes[place.buffer] += place.bytes;
    layout.bytes += place.bytes;
    layout.places.push_back(std::move(place));
  }
  return layout;
}

}  // namespace kedge
