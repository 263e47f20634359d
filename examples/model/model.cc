#include "kedge/examples/model/model.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kedge/examples/model/halves.h"

namespace kedge::example {
namespace {

constexpr float kNormEpsilon = 1e-5f;
constexpr double kRotaryBase = 10000.0;

// Tensors of one layer, as offsets from its first.
enum LayerTensor : std::size_t {
  kInputNorm,
  kQuery,
  kKey,
  kValue,
  kOutput,
  kMlpNorm,
  kGate,
  kUp,
  kDown,
  kLayerTensors
};

std::vector<TensorSpec> ListTensors(const ModelConfig& c) {
  const std::int64_t d = c.d_model;
  const std::int64_t ff = c.d_ff;
  std::vector<TensorSpec> tensors;
  tensors.push_back({"model.embed_tokens.weight", {kVocabulary, d}});
  for (int i = 0; i < c.layers; ++i) {
    const std::string layer = absl::StrCat("model.layers.", i, ".");
    // In the order of LayerTensor.
    tensors.push_back({layer + "input_layernorm.weight", {d}});
    tensors.push_back({layer + "self_attn.q_proj.weight", {d, d}});
    tensors.push_back({layer + "self_attn.k_proj.weight", {d, d}});
    tensors.push_back({layer + "self_attn.v_proj.weight", {d, d}});
    tensors.push_back({layer + "self_attn.o_proj.weight", {d, d}});
    tensors.push_back({layer + "post_attention_layernorm.weight", {d}});
    tensors.push_back({layer + "mlp.gate_proj.weight", {ff, d}});
    tensors.push_back({layer + "mlp.up_proj.weight", {ff, d}});
    tensors.push_back({layer + "mlp.down_proj.weight", {d, ff}});
  }
  tensors.push_back({"model.norm.weight", {d}});
  tensors.push_back({"lm_head.weight", {kVocabulary, d}});
  return tensors;
}

absl::Status CheckRange(absl::string_view name, int value, int min, int max) {
  if (value >= min && value <= max) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("model configuration: ", name,
                                                 ": expected ", min, " to ",
                                                 max, ", found ", value));
}

absl::Status CheckConfig(const ModelConfig& c) {
  // Within these maxima no index product overflows.
  for (const absl::Status& status : {
           CheckRange("layers", c.layers, 1, 64),
           CheckRange("d_model", c.d_model, 2, 4096),
           CheckRange("heads", c.heads, 1, 64),
           CheckRange("d_ff", c.d_ff, 1, 16384),
           CheckRange("context", c.context, 1, 2048),
           CheckRange("batch", c.batch, 1, 256),
           CheckRange("threads", c.threads, 1, 2),
       }) {
    if (!status.ok()) return status;
  }
  if (c.d_model % (2 * c.heads) != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "model configuration: expected d_model to be a multiple of 2 x heads, "
        "so that heads are even for the rotation; found ",
        c.d_model, " and ", c.heads, " heads"));
  }
  // Training keeps about this much of every token, attention included.
  const std::int64_t per_token =
      std::int64_t{c.layers} *
      (8 * c.d_model + 3 * c.d_ff + std::int64_t{c.heads} * c.context);
  const std::int64_t bytes =
      per_token * c.batch * c.context * std::int64_t{sizeof(float)};
  constexpr std::int64_t kMaxBytes = std::int64_t{16} << 30;
  if (bytes > kMaxBytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "model configuration: training memory: expected at most ", kMaxBytes,
        " bytes, found ", bytes, "; choose a smaller batch or model"));
  }
  return absl::OkStatus();
}

}  // namespace

FloatBuffer::FloatBuffer(std::int64_t size) : size_(size) {
  constexpr std::size_t kAlignment = 64;
  const std::size_t bytes = static_cast<std::size_t>(size) * sizeof(float);
  const std::size_t rounded =
      std::max(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
  auto* data = static_cast<float*>(std::aligned_alloc(kAlignment, rounded));
  if (data == nullptr) throw std::bad_alloc();
  data_.reset(data);
  Clear();
}

void FloatBuffer::Clear() {
  std::memset(data_.get(), 0, static_cast<std::size_t>(size_) * sizeof(float));
}

void FloatBuffer::Free::operator()(float* data) const { std::free(data); }

// One half of the batch and everything computed for it. Rows are the tokens of
// its sequences, one after the other.
struct Model::Lane {
  // What the backward pass needs of one layer.
  struct Layer {
    FloatBuffer inverse1, norm1;    // [rows], [rows, d]
    FloatBuffer query, key, value;  // [rows, d], rotated
    FloatBuffer probability;        // [sequences, heads, tokens, tokens]
    FloatBuffer attention;          // [rows, d]
    FloatBuffer middle;             // [rows, d], the residual stream
    FloatBuffer inverse2, norm2;    // [rows], [rows, d]
    FloatBuffer gate, up, gated;    // [rows, d_ff]
  };

  Lane(const ModelConfig& config, int begin, int end)
      : first_sequence(begin), sequences(end - begin) {
    const std::int64_t d = config.d_model;
    rows = sequences * config.context;
    stream.emplace_back(rows * d);
    stream.emplace_back(rows * d);
    layers.push_back(NewLayer(config));
    final_inverse = FloatBuffer(rows);
    final_norm = FloatBuffer(rows * d);
    logits = FloatBuffer(std::int64_t{rows} * kVocabulary);
    const std::int64_t longest = std::max<std::int64_t>(
        {config.d_model, config.d_ff, config.context, kVocabulary, rows});
    gemm_scratch = FloatBuffer(GemmScratchFloats(longest));
  }

  Layer NewLayer(const ModelConfig& config) const {
    const std::int64_t d = config.d_model;
    const std::int64_t ff = config.d_ff;
    const std::int64_t square = std::int64_t{config.context} * config.context;
    return {.inverse1 = FloatBuffer(rows),
            .norm1 = FloatBuffer(rows * d),
            .query = FloatBuffer(rows * d),
            .key = FloatBuffer(rows * d),
            .value = FloatBuffer(rows * d),
            .probability = FloatBuffer(sequences * config.heads * square),
            .attention = FloatBuffer(rows * d),
            .middle = FloatBuffer(rows * d),
            .inverse2 = FloatBuffer(rows),
            .norm2 = FloatBuffer(rows * d),
            .gate = FloatBuffer(rows * ff),
            .up = FloatBuffer(rows * ff),
            .gated = FloatBuffer(rows * ff)};
  }

  // Evaluation reuses one layer's memory; training keeps them all. The second
  // gradient exists for lane 1 alone, lane 0 writes into the caller's.
  void PrepareTraining(const ModelConfig& config, bool own_gradient,
                       std::int64_t gradient_elements) {
    if (static_cast<int>(layers.size()) == config.layers &&
        dstream.size() != 0) {
      return;
    }
    const std::int64_t d = config.d_model;
    const std::int64_t ff = config.d_ff;
    while (static_cast<int>(stream.size()) < config.layers + 1) {
      stream.emplace_back(rows * d);
    }
    while (static_cast<int>(layers.size()) < config.layers) {
      layers.push_back(NewLayer(config));
    }
    dstream = FloatBuffer(rows * d);
    dnorm = FloatBuffer(rows * d);
    dquery = FloatBuffer(rows * d);
    dkey = FloatBuffer(rows * d);
    dvalue = FloatBuffer(rows * d);
    dattention = FloatBuffer(rows * d);
    dprobability = FloatBuffer(std::int64_t{config.context} * config.context);
    dgated = FloatBuffer(rows * ff);
    dgate = FloatBuffer(rows * ff);
    dup = FloatBuffer(rows * ff);
    if (own_gradient) gradient = FloatBuffer(gradient_elements);
  }

  int first_sequence;
  int sequences;
  std::int64_t rows = 0;
  std::vector<FloatBuffer>
      stream;  // [rows, d] before each layer and at the end
  std::vector<Layer> layers;
  FloatBuffer final_inverse, final_norm, logits;
  FloatBuffer gemm_scratch;
  // Backward only.
  FloatBuffer dstream, dnorm, dquery, dkey, dvalue, dattention, dprobability;
  FloatBuffer dgated, dgate, dup;
  FloatBuffer gradient;
};

absl::StatusOr<std::unique_ptr<Model>> Model::Create(const ModelConfig& config,
                                                     const Kernels& kernels) {
  if (absl::Status status = CheckConfig(config); !status.ok()) return status;
  return std::unique_ptr<Model>(new Model(config, kernels));
}

Model::Model(const ModelConfig& config, const Kernels& kernels)
    : config_(config), kernels_(kernels), tensors_(ListTensors(config)) {
  for (const TensorSpec& spec : tensors_) {
    // Every tensor starts on its own cache line.
    indices_.push_back(gradient_elements_);
    gradient_elements_ += (spec.elements() + 15) / 16 * 16;
  }
  weights_ = FloatBuffer(gradient_elements_);

  const int half = config.d_model / config.heads / 2;
  cosine_ = FloatBuffer(std::int64_t{config.context} * half);
  sine_ = FloatBuffer(std::int64_t{config.context} * half);
  for (int t = 0; t < config.context; ++t) {
    for (int i = 0; i < half; ++i) {
      const double angle =
          t * std::pow(kRotaryBase, -static_cast<double>(i) / half);
      cosine_.data()[t * half + i] = static_cast<float>(std::cos(angle));
      sine_.data()[t * half + i] = static_cast<float>(std::sin(angle));
    }
  }

  const int middle = (config.batch + 1) / 2;
  lanes_[0] = std::make_unique<Lane>(config, 0, middle);
  lanes_[1] = std::make_unique<Lane>(config, middle, config.batch);
}

Model::~Model() = default;

absl::Status Model::Prepare(const WeightView& weights, const Batch& batch) {
  const std::size_t expected =
      static_cast<std::size_t>(config_.batch) * config_.context;
  if (batch.sequences != config_.batch || batch.tokens != config_.context ||
      batch.inputs.size() != expected || batch.targets.size() != expected) {
    return absl::InvalidArgumentError(absl::StrCat(
        "batch: expected ", config_.batch, " sequences of ", config_.context,
        " bytes, found ", batch.sequences, " of ", batch.tokens, " (",
        batch.inputs.size(), " inputs, ", batch.targets.size(),
        " targets); cut it with the model's configuration"));
  }
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    const absl::Status status = weights.Gather(
        tensors_[i], {weights_.data() + indices_[i],
                      static_cast<std::size_t>(tensors_[i].elements())});
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::StatusOr<double> Model::Loss(const WeightView& weights,
                                   const Batch& batch) {
  if (absl::Status status = Prepare(weights, batch); !status.ok()) {
    return status;
  }
  double sum[2];
  RunHalves(config_.threads, [&](int half) {
    sum[half] = Forward(*lanes_[half], batch, /*keep=*/false);
  });
  return (sum[0] + sum[1]) / static_cast<double>(batch.inputs.size());
}

absl::StatusOr<double> Model::LossAndGradient(const WeightView& weights,
                                              const Batch& batch,
                                              std::span<float> gradient) {
  if (gradient.size() != static_cast<std::size_t>(gradient_elements_)) {
    return absl::InvalidArgumentError(
        absl::StrCat("gradient: expected ", gradient_elements_,
                     " elements, found ", gradient.size()));
  }
  if (absl::Status status = Prepare(weights, batch); !status.ok()) {
    return status;
  }
  double sum[2];
  RunHalves(config_.threads, [&](int half) {
    Lane& lane = *lanes_[half];
    lane.PrepareTraining(config_, half == 1, gradient_elements_);
    sum[half] = Forward(lane, batch, /*keep=*/true);
    Backward(lane, batch, half == 0 ? gradient.data() : lane.gradient.data());
  });
  const std::int64_t middle = gradient_elements_ / 2;
  RunHalves(config_.threads, [&](int half) {
    const std::int64_t begin = half == 0 ? 0 : middle;
    const std::int64_t end = half == 0 ? middle : gradient_elements_;
    kernels_.add(gradient.data() + begin, lanes_[1]->gradient.data() + begin,
                 end - begin);
  });
  return (sum[0] + sum[1]) / static_cast<double>(batch.inputs.size());
}

double Model::Forward(Lane& lane, const Batch& batch, bool keep) {
  const int rows = static_cast<int>(lane.rows);
  const int d = config_.d_model;
  const int ff = config_.d_ff;
  const int tokens = config_.context;
  const int head_dim = d / config_.heads;
  const float scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
  const std::int64_t first = std::int64_t{lane.first_sequence} * tokens;
  const auto weight = [this](std::size_t tensor) {
    return weights_.data() + indices_[tensor];
  };
  // y [rows, out] = x [rows, in] * w [out, in] transposed.
  const auto project = [&](const FloatBuffer& x, int in, std::size_t tensor,
                           int out, bool accumulate, FloatBuffer& y) {
    kernels_.multiply({.m = rows,
                       .n = out,
                       .k = in,
                       .a = x.data(),
                       .a_stride = in,
                       .b = weight(tensor),
                       .b_stride = in,
                       .b_transposed = true,
                       .c = y.data(),
                       .c_stride = out,
                       .accumulate = accumulate,
                       .scratch = lane.gemm_scratch.data()});
  };

  for (int r = 0; r < rows; ++r) {
    const float* row = weight(0) + std::int64_t{batch.inputs[first + r]} * d;
    std::copy(row, row + d, lane.stream[0].data() + std::int64_t{r} * d);
  }

  for (int i = 0; i < config_.layers; ++i) {
    const std::size_t tensor = 1 + static_cast<std::size_t>(i) * kLayerTensors;
    const FloatBuffer& in = lane.stream[keep ? i : i % 2];
    FloatBuffer& out = lane.stream[keep ? i + 1 : (i + 1) % 2];
    Lane::Layer& layer = lane.layers[keep ? i : 0];

    kernels_.rms_norm(in.data(), weight(tensor + kInputNorm), kNormEpsilon,
                      rows, d, layer.norm1.data(), layer.inverse1.data());
    project(layer.norm1, d, tensor + kQuery, d, false, layer.query);
    project(layer.norm1, d, tensor + kKey, d, false, layer.key);
    project(layer.norm1, d, tensor + kValue, d, false, layer.value);
    for (FloatBuffer* x : {&layer.query, &layer.key}) {
      kernels_.rotate(x->data(), cosine_.data(), sine_.data(), lane.sequences,
                      tokens, config_.heads, head_dim, 1.0f);
    }
    for (int s = 0; s < lane.sequences; ++s) {
      for (int h = 0; h < config_.heads; ++h) {
        const std::int64_t at = std::int64_t{s} * tokens * d + h * head_dim;
        float* probability =
            layer.probability.data() +
            (std::int64_t{s} * config_.heads + h) * tokens * tokens;
        kernels_.multiply({.m = tokens,
                           .n = tokens,
                           .k = head_dim,
                           .a = layer.query.data() + at,
                           .a_stride = d,
                           .b = layer.key.data() + at,
                           .b_stride = d,
                           .b_transposed = true,
                           .c = probability,
                           .c_stride = tokens,
                           .scratch = lane.gemm_scratch.data()});
        kernels_.causal_softmax(probability, tokens, scale);
        kernels_.multiply({.m = tokens,
                           .n = head_dim,
                           .k = tokens,
                           .a = probability,
                           .a_stride = tokens,
                           .b = layer.value.data() + at,
                           .b_stride = d,
                           .c = layer.attention.data() + at,
                           .c_stride = d,
                           .scratch = lane.gemm_scratch.data()});
      }
    }
    std::copy(in.data(), in.data() + in.size(), layer.middle.data());
    project(layer.attention, d, tensor + kOutput, d, true, layer.middle);

    kernels_.rms_norm(layer.middle.data(), weight(tensor + kMlpNorm),
                      kNormEpsilon, rows, d, layer.norm2.data(),
                      layer.inverse2.data());
    project(layer.norm2, d, tensor + kGate, ff, false, layer.gate);
    project(layer.norm2, d, tensor + kUp, ff, false, layer.up);
    kernels_.gated(layer.gate.data(), layer.up.data(), layer.gate.size(),
                   layer.gated.data());
    std::copy(layer.middle.data(), layer.middle.data() + layer.middle.size(),
              out.data());
    project(layer.gated, ff, tensor + kDown, d, true, out);
  }

  const std::size_t norm = tensors_.size() - 2;
  const FloatBuffer& last =
      lane.stream[keep ? config_.layers : config_.layers % 2];
  kernels_.rms_norm(last.data(), weight(norm), kNormEpsilon, rows, d,
                    lane.final_norm.data(), lane.final_inverse.data());
  project(lane.final_norm, d, norm + 1, kVocabulary, false, lane.logits);
  const float gradient_scale =
      keep ? 1.0f / static_cast<float>(batch.inputs.size()) : 0.0f;
  return kernels_.cross_entropy(lane.logits.data(),
                                batch.targets.data() + first, rows, kVocabulary,
                                gradient_scale);
}

// Follows Forward() backwards. Every matrix gradient is written whole; only
// the embedding's and the norms' are added to, and start at zero.
void Model::Backward(Lane& lane, const Batch& batch, float* gradient) {
  const int rows = static_cast<int>(lane.rows);
  const int d = config_.d_model;
  const int ff = config_.d_ff;
  const int tokens = config_.context;
  const int head_dim = d / config_.heads;
  const float scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
  const std::int64_t first = std::int64_t{lane.first_sequence} * tokens;
  const auto dweight = [&](std::size_t tensor) {
    return gradient + indices_[tensor];
  };
  const auto weight = [this](std::size_t tensor) {
    return weights_.data() + indices_[tensor];
  };
  const auto zeroed = [&](std::size_t tensor) {
    std::fill_n(dweight(tensor), tensors_[tensor].elements(), 0.0f);
    return dweight(tensor);
  };
  // For y = x * w transposed: dw [out, in] = dy transposed * x, and
  // dx [rows, in] = dy * w.
  const auto project_back =
      [&](const FloatBuffer& dy, int out, const FloatBuffer& x, int in,
          std::size_t tensor, bool accumulate, FloatBuffer& dx) {
        kernels_.multiply({.m = out,
                           .n = in,
                           .k = rows,
                           .a = dy.data(),
                           .a_stride = out,
                           .a_transposed = true,
                           .b = x.data(),
                           .b_stride = in,
                           .c = dweight(tensor),
                           .c_stride = in,
                           .scratch = lane.gemm_scratch.data()});
        kernels_.multiply({.m = rows,
                           .n = in,
                           .k = out,
                           .a = dy.data(),
                           .a_stride = out,
                           .b = weight(tensor),
                           .b_stride = in,
                           .c = dx.data(),
                           .c_stride = in,
                           .accumulate = accumulate,
                           .scratch = lane.gemm_scratch.data()});
      };
  // One head's products; every operand is a [tokens, *] block.
  const auto multiply_head = [&](int n, int k, const float* a, int a_stride,
                                 bool a_transposed, const float* b,
                                 bool b_transposed, float* c, int c_stride) {
    kernels_.multiply({.m = tokens,
                       .n = n,
                       .k = k,
                       .a = a,
                       .a_stride = a_stride,
                       .a_transposed = a_transposed,
                       .b = b,
                       .b_stride = d,
                       .b_transposed = b_transposed,
                       .c = c,
                       .c_stride = c_stride,
                       .scratch = lane.gemm_scratch.data()});
  };

  if (rows == 0) {
    std::fill_n(gradient, gradient_elements_, 0.0f);
    return;
  }

  const std::size_t norm = tensors_.size() - 2;
  project_back(lane.logits, kVocabulary, lane.final_norm, d, norm + 1, false,
               lane.dnorm);
  lane.dstream.Clear();
  kernels_.rms_norm_backward(lane.stream[config_.layers].data(), weight(norm),
                             lane.final_inverse.data(), lane.dnorm.data(), rows,
                             d, lane.dstream.data(), zeroed(norm));

  for (int i = config_.layers - 1; i >= 0; --i) {
    const std::size_t tensor = 1 + static_cast<std::size_t>(i) * kLayerTensors;
    const Lane::Layer& layer = lane.layers[i];

    project_back(lane.dstream, d, layer.gated, ff, tensor + kDown, false,
                 lane.dgated);
    kernels_.gated_backward(layer.gate.data(), layer.up.data(),
                            lane.dgated.data(), layer.gate.size(),
                            lane.dgate.data(), lane.dup.data());
    project_back(lane.dgate, ff, layer.norm2, d, tensor + kGate, false,
                 lane.dnorm);
    project_back(lane.dup, ff, layer.norm2, d, tensor + kUp, true, lane.dnorm);
    kernels_.rms_norm_backward(layer.middle.data(), weight(tensor + kMlpNorm),
                               layer.inverse2.data(), lane.dnorm.data(), rows,
                               d, lane.dstream.data(),
                               zeroed(tensor + kMlpNorm));

    project_back(lane.dstream, d, layer.attention, d, tensor + kOutput, false,
                 lane.dattention);
    for (int s = 0; s < lane.sequences; ++s) {
      for (int h = 0; h < config_.heads; ++h) {
        const std::int64_t at = std::int64_t{s} * tokens * d + h * head_dim;
        const float* probability =
            layer.probability.data() +
            (std::int64_t{s} * config_.heads + h) * tokens * tokens;
        float* dscores = lane.dprobability.data();
        multiply_head(tokens, head_dim, lane.dattention.data() + at, d, false,
                      layer.value.data() + at, true, dscores, tokens);
        multiply_head(head_dim, tokens, probability, tokens, true,
                      lane.dattention.data() + at, false,
                      lane.dvalue.data() + at, d);
        kernels_.causal_softmax_backward(probability, dscores, tokens, scale);
        multiply_head(head_dim, tokens, dscores, tokens, false,
                      layer.key.data() + at, false, lane.dquery.data() + at, d);
        multiply_head(head_dim, tokens, dscores, tokens, true,
                      layer.query.data() + at, false, lane.dkey.data() + at, d);
      }
    }
    for (FloatBuffer* x : {&lane.dquery, &lane.dkey}) {
      kernels_.rotate(x->data(), cosine_.data(), sine_.data(), lane.sequences,
                      tokens, config_.heads, head_dim, -1.0f);
    }
    project_back(lane.dquery, d, layer.norm1, d, tensor + kQuery, false,
                 lane.dnorm);
    project_back(lane.dkey, d, layer.norm1, d, tensor + kKey, true, lane.dnorm);
    project_back(lane.dvalue, d, layer.norm1, d, tensor + kValue, true,
                 lane.dnorm);
    kernels_.rms_norm_backward(
        lane.stream[i].data(), weight(tensor + kInputNorm),
        layer.inverse1.data(), lane.dnorm.data(), rows, d, lane.dstream.data(),
        zeroed(tensor + kInputNorm));
  }

  float* embedding = zeroed(0);
  for (int r = 0; r < rows; ++r) {
    kernels_.add(embedding + std::int64_t{batch.inputs[first + r]} * d,
                 lane.dstream.data() + std::int64_t{r} * d, d);
  }
}

}  // namespace kedge::example
