#ifndef KEDGE_EXAMPLES_MODEL_MODEL_H_
#define KEDGE_EXAMPLES_MODEL_MODEL_H_

// A small decoder-only transformer over bytes, with its own backward pass.
//
// Layers are RMSNorm, causal attention with rotary positions, RMSNorm and a
// gated MLP, as in the Llama family; the head is not tied to the embedding.
// Weights are bf16, all arithmetic is f32.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kedge/examples/model/kernels.h"
#include "kedge/examples/model/text.h"
#include "kedge/examples/model/weight_view.h"

namespace kedge::example {

inline constexpr int kVocabulary = 256;  // one token a byte

struct ModelConfig {
  int layers = 4;
  int d_model = 256;
  int heads = 4;
  int d_ff = 704;
  int context = 128;  // tokens in a sequence
  int batch = 8;      // sequences in a batch
  // 1 or 2. The work is always cut in two halves of the batch whose sums are
  // added in a fixed order, so the number never changes a result.
  int threads = 2;
};

// Zeroed floats at a 64-byte boundary.
class FloatBuffer {
 public:
  FloatBuffer() = default;
  explicit FloatBuffer(std::int64_t size);

  float* data() { return data_.get(); }
  const float* data() const { return data_.get(); }
  std::int64_t size() const { return size_; }
  void Clear();

 private:
  struct Free {
    void operator()(float* data) const;
  };
  std::unique_ptr<float[], Free> data_;
  std::int64_t size_ = 0;
};

// The model's arithmetic and its scratch memory; the weights are the caller's.
//
// Thread safety: none; calls use the same scratch.
class Model {
 public:
  // kInvalidArgument if the configuration is impossible or far from small.
  // `kernels` is for tests that compare instruction sets.
  static absl::StatusOr<std::unique_ptr<Model>> Create(
      const ModelConfig& config, const Kernels& kernels = BestKernels());

  ~Model();
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  const ModelConfig& config() const { return config_; }

  // Every tensor the model reads, in the order of use.
  const std::vector<TensorSpec>& tensors() const { return tensors_; }

  // Gradients are one array in the order of tensors(), in which tensor i
  // starts at gradient_index(i). The gaps between them are zero.
  std::int64_t gradient_index(std::size_t tensor) const {
    return indices_[tensor];
  }
  std::int64_t gradient_elements() const { return gradient_elements_; }

  // Mean cross-entropy over the batch, in nats per byte. The trainer and every
  // inference engine call this one routine: equal weights give equal bits,
  // however the view cuts them.
  //
  // Errors: those of WeightView::Gather; kInvalidArgument if the batch has not
  // the configured size.
  absl::StatusOr<double> Loss(const WeightView& weights, const Batch& batch);

  // Also writes the gradient with respect to the bf16 weights; gradient.size()
  // must be gradient_elements(), the memory 64-byte aligned. Costs about three
  // times Loss().
  absl::StatusOr<double> LossAndGradient(const WeightView& weights,
                                         const Batch& batch,
                                         std::span<float> gradient);

  const Kernels& kernels() const { return kernels_; }

 private:
  struct Lane;

  Model(const ModelConfig& config, const Kernels& kernels);

  absl::Status Prepare(const WeightView& weights, const Batch& batch);
  double Forward(Lane& lane, const Batch& batch, bool keep);
  void Backward(Lane& lane, const Batch& batch, float* gradient);

  const ModelConfig config_;
  const Kernels& kernels_;
  std::vector<TensorSpec> tensors_;
  std::vector<std::int64_t> indices_;
  std::int64_t gradient_elements_ = 0;
  FloatBuffer weights_;  // gathered, laid out as a gradient is
  FloatBuffer cosine_;   // [context, head_dim / 2]
  FloatBuffer sine_;
  std::unique_ptr<Lane> lanes_[2];
};

}  // namespace kedge::example

#endif  // KEDGE_EXAMPLES_MODEL_MODEL_H_
