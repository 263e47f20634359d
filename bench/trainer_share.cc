#include "kedge/bench/trainer_share.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace kedge {
namespace {

constexpr std::uint64_t kAlign = 128;

struct Dims {
  std::uint64_t layers = 48;
  std::uint64_t hidden = 2048;
  std::uint64_t experts = 21;  // of this rank
  std::uint64_t expert_hidden = 768;
  std::uint64_t qkv_rows = 853;  // a sixth of 5120
  std::uint64_t o_rows = 341;    // of 2048, of 4096 columns
  std::uint64_t vocabulary = 0;  // rows of this rank

  std::uint64_t LayerElements() const {
    return experts * 3 * expert_hidden * hidden + qkv_rows * hidden +
           o_rows * 2 * hidden + 21 * hidden + 2 * hidden;
  }
};

class Builder {
 public:
  TrainerShare Build(const Dims& d) {
    Matrix("model.embed_tokens.weight", d.vocabulary, d.hidden);
    for (std::uint64_t i = 0; i < d.layers; ++i) {
      const std::string layer = absl::StrCat("model.layers.", i, ".");
      Vector(layer + "input_layernorm.weight", d.hidden);
      Matrix(layer + "self_attn.qkv_proj.weight", d.qkv_rows, d.hidden);
      Matrix(layer + "self_attn.o_proj.weight", d.o_rows, 2 * d.hidden);
      Vector(layer + "post_attention_layernorm.weight", d.hidden);
      Matrix(layer + "mlp.gate.weight", 21, d.hidden);
      const std::uint64_t half = d.expert_hidden * d.hidden;
      const std::uint64_t gate_up =
          Parameter(layer + "mlp.experts.gate_up_proj", d.experts * 2 * half);
      for (const bool up : {false, true}) {
        ShareTensor tensor;
        tensor.name =
            absl::StrCat(layer, "mlp.experts.", up ? "up" : "gate", "_proj");
        tensor.shape = {d.experts, d.expert_hidden, d.hidden};
        tensor.strides = {2 * half, d.hidden, 1};
        tensor.first = gate_up + (up ? half : 0);
        share_.tensors.push_back(std::move(tensor));
      }
      Tensor(layer + "mlp.experts.down_proj",
             {d.experts, d.hidden, d.expert_hidden});
    }
    Vector("model.norm.weight", d.hidden);
    Matrix("lm_head.weight", d.vocabulary, d.hidden);
    return std::move(share_);
  }

 private:
  std::uint64_t Parameter(std::string name, std::uint64_t elements) {
    const std::uint64_t first = share_.block_elements;
    share_.parameters.push_back({std::move(name), elements, first});
    share_.elements += elements;
    share_.block_elements += (elements + kAlign - 1) / kAlign * kAlign;
    return first;
  }
  void Tensor(std::string name, std::vector<std::uint64_t> shape) {
    std::uint64_t elements = 1;
    for (const std::uint64_t extent : shape) elements *= extent;
    ShareTensor tensor;
    tensor.name = name;
    tensor.shape = std::move(shape);
    tensor.first = Parameter(std::move(name), elements);
    share_.tensors.push_back(std::move(tensor));
  }
  void Matrix(std::string name, std::uint64_t rows, std::uint64_t cols) {
    Tensor(std::move(name), {rows, cols});
  }
  void Vector(std::string name, std::uint64_t elements) {
    Tensor(std::move(name), {elements});
  }

  TrainerShare share_;
};

}  // namespace

std::vector<TrainerTensor> TrainerShare::TensorsAt(const void* data) const {
  std::vector<TrainerTensor> made;
  for (const ShareTensor& tensor : tensors) {
    TrainerTensor& at = made.emplace_back();
    at.name = tensor.name;
    at.dtype = DType::kBf16;
    at.shape = tensor.shape;
    at.data = static_cast<const std::byte*>(data) + 2 * tensor.first;
    for (const std::uint64_t stride : tensor.strides) {
      at.strides_bytes.push_back(static_cast<std::int64_t>(2 * stride));
    }
  }
  return made;
}

TrainerShare MakeTrainerShare(std::uint64_t parameters) {
  Dims d;
  if (parameters < 500'000'000) {
    d.hidden = 512;
    d.expert_hidden = 192;
    d.qkv_rows = 213;
    d.o_rows = 85;
  }
  if (parameters < 20'000'000) {
    d.hidden = 128;
    d.expert_hidden = 48;
    d.qkv_rows = 53;
    d.o_rows = 21;
    d.experts = 5;
  }
  // About 2 % are embedding and head, as in the model.
  const std::uint64_t in_layers = parameters / 50 * 49;
  d.layers =
      std::clamp<std::uint64_t>(in_layers / d.LayerElements(), 1, 100'000);
  const std::uint64_t done = d.layers * d.LayerElements() + d.hidden;
  d.vocabulary = std::max<std::uint64_t>(
      1, parameters > done ? (parameters - done) / (2 * d.hidden) : 0);
  return Builder().Build(d);
}

std::vector<std::vector<SharePiece>> CutIntoChunks(
    const TrainerShare& share, std::uint64_t chunk_elements) {
  std::vector<std::vector<SharePiece>> chunks;
  std::uint64_t used = chunk_elements;
  for (std::size_t p = share.parameters.size(); p-- > 0;) {
    const std::uint64_t elements = share.parameters[p].elements;
    for (std::uint64_t begin = 0; begin < elements;) {
      if (used >= chunk_elements) {
        chunks.emplace_back();
        used = 0;
      }
      const std::uint64_t count =
          std::min(elements - begin, chunk_elements - used);
      chunks.back().push_back({static_cast<std::uint32_t>(p), begin, count});
      begin += count;
      used += (count + kAlign - 1) / kAlign * kAlign;
    }
  }
  return chunks;
}

}  // namespace kedge
