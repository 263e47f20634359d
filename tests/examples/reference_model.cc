#include "kedge/tests/examples/reference_model.h"

#include <cmath>
#include <cstddef>

namespace kedge::example {
namespace {

using Row = std::vector<double>;

Row Project(const Row& weight, const Row& x) {
  Row y(weight.size() / x.size());
  for (std::size_t o = 0; o < y.size(); ++o) {
    for (std::size_t i = 0; i < x.size(); ++i) {
      y[o] += weight[o * x.size() + i] * x[i];
    }
  }
  return y;
}

Row Normalize(const Row& weight, const Row& x) {
  double squares = 0;
  for (const double v : x) squares += v * v;
  const double scale =
      1 / std::sqrt(squares / static_cast<double>(x.size()) + 1e-5);
  Row y(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) y[i] = x[i] * scale * weight[i];
  return y;
}

void AddTo(Row& x, const Row& y) {
  for (std::size_t i = 0; i < x.size(); ++i) x[i] += y[i];
}

Row Rotated(const Row& x, std::size_t position, std::size_t heads) {
  Row y(x.size());
  const std::size_t width = x.size() / heads;
  const std::size_t half = width / 2;
  for (std::size_t h = 0; h < heads; ++h) {
    for (std::size_t i = 0; i < half; ++i) {
      const double angle = static_cast<double>(position) *
                           std::pow(10000.0, -2.0 * static_cast<double>(i) /
                                                 static_cast<double>(width));
      const double a = x[h * width + i];
      const double b = x[h * width + i + half];
      y[h * width + i] = a * std::cos(angle) - b * std::sin(angle);
      y[h * width + i + half] = b * std::cos(angle) + a * std::sin(angle);
    }
  }
  return y;
}

// What the last of `keys` attends to.
Row Attend(const Row& query, const std::vector<Row>& keys,
           const std::vector<Row>& values, std::size_t heads) {
  Row out(query.size());
  const std::size_t width = query.size() / heads;
  for (std::size_t h = 0; h < heads; ++h) {
    Row score(keys.size());
    double sum = 0;
    for (std::size_t t = 0; t < keys.size(); ++t) {
      for (std::size_t i = h * width; i < (h + 1) * width; ++i) {
        score[t] += query[i] * keys[t][i];
      }
      score[t] = std::exp(score[t] / std::sqrt(static_cast<double>(width)));
      sum += score[t];
    }
    for (std::size_t t = 0; t < keys.size(); ++t) {
      for (std::size_t i = h * width; i < (h + 1) * width; ++i) {
        out[i] += score[t] / sum * values[t][i];
      }
    }
  }
  return out;
}

}  // namespace

double ReferenceLoss(const ModelConfig& config, const ReferenceWeights& weights,
                     const Batch& batch) {
  const auto d = static_cast<std::size_t>(config.d_model);
  const auto heads = static_cast<std::size_t>(config.heads);
  const auto tokens = static_cast<std::size_t>(batch.tokens);
  double loss = 0;
  for (std::size_t s = 0; s < static_cast<std::size_t>(batch.sequences); ++s) {
    std::vector<std::vector<Row>> keys(config.layers);
    std::vector<std::vector<Row>> values(config.layers);
    for (std::size_t t = 0; t < tokens; ++t) {
      const auto row =
          weights.at("model.embed_tokens.weight").begin() +
          static_cast<std::ptrdiff_t>(batch.inputs[s * tokens + t] * d);
      Row x(row, row + static_cast<std::ptrdiff_t>(d));
      for (int i = 0; i < config.layers; ++i) {
        const auto weight = [&](const char* name) -> const Row& {
          return weights.at("model.layers." + std::to_string(i) + "." + name +
                            ".weight");
        };
        Row n = Normalize(weight("input_layernorm"), x);
        keys[i].push_back(
            Rotated(Project(weight("self_attn.k_proj"), n), t, heads));
        values[i].push_back(Project(weight("self_attn.v_proj"), n));
        AddTo(x, Project(weight("self_attn.o_proj"),
                         Attend(Rotated(Project(weight("self_attn.q_proj"), n),
                                        t, heads),
                                keys[i], values[i], heads)));
        n = Normalize(weight("post_attention_layernorm"), x);
        Row gate = Project(weight("mlp.gate_proj"), n);
        const Row up = Project(weight("mlp.up_proj"), n);
        for (std::size_t j = 0; j < gate.size(); ++j) {
          gate[j] = gate[j] / (1 + std::exp(-gate[j])) * up[j];
        }
        AddTo(x, Project(weight("mlp.down_proj"), gate));
      }
      const Row logits = Project(weights.at("lm_head.weight"),
                                 Normalize(weights.at("model.norm.weight"), x));
      double sum = 0;
      for (const double v : logits) sum += std::exp(v);
      loss += std::log(sum) - logits[batch.targets[s * tokens + t]];
    }
  }
  return loss / static_cast<double>(batch.inputs.size());
}

}  // namespace kedge::example
