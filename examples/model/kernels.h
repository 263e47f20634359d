#ifndef KEDGE_EXAMPLES_MODEL_KERNELS_H_
#define KEDGE_EXAMPLES_MODEL_KERNELS_H_

// The arithmetic of the example model, built once per instruction set from
// kernels.inc and chosen at run time, so that no build needs -march=native.
//
// Every kernel is single-threaded and adds in an order that depends on the
// shapes alone. The same level therefore gives the same bits in every process;
// two levels may differ in the last bits, because not all of them have a fused
// multiply-add. All matrices are f32 and row-major.

#include <cstdint>
#include <vector>

namespace kedge::example {

// C[m,n] = A[m,k] * B[k,n], or C += A * B.
struct Gemm {
  int m = 0;
  int n = 0;
  int k = 0;
  const float* a = nullptr;  // [m,k], or [k,m] if a_transposed
  int a_stride = 0;          // elements from one stored row to the next
  bool a_transposed = false;
  const float* b = nullptr;  // [k,n], or [n,k] if b_transposed
  int b_stride = 0;
  bool b_transposed = false;
  float* c = nullptr;  // [m,n]; overlaps neither A nor B
  int c_stride = 0;
  bool accumulate = false;
  float* scratch = nullptr;  // GemmScratchFloats(m) floats, 64-byte aligned
};

// Depth of one block of a Gemm, and the widest panel of B that is packed.
inline constexpr int kGemmDepth = 256;
inline constexpr int kGemmPanel = 32;

constexpr std::int64_t GemmScratchFloats(std::int64_t m) {
  return std::int64_t{kGemmDepth} * (kGemmPanel + m);
}

// One step of AdamW over n elements. The gradient is multiplied by
// gradient_scale first; the corrections are 1 / (1 - beta^step).
struct AdamWStep {
  float rate = 0;
  float beta1 = 0;
  float beta2 = 0;
  float correction1 = 0;
  float correction2 = 0;
  float epsilon = 0;
  float weight_decay = 0;
  float gradient_scale = 0;
};

struct Kernels {
  const char* level;  // "x86-64-v4", "x86-64-v3" or "baseline"

  void (*multiply)(const Gemm& gemm);

  // y = x * inverse * weight per row, where inverse[row] = 1 / rms(x).
  void (*rms_norm)(const float* x, const float* weight, float epsilon, int rows,
                   int cols, float* y, float* inverse);
  // Adds to dx [rows, cols] and to dweight [cols].
  void (*rms_norm_backward)(const float* x, const float* weight,
                            const float* inverse, const float* dy, int rows,
                            int cols, float* dx, float* dweight);

  // Rotates the pairs (i, i + head_dim / 2) of each head in place. x is
  // [sequences * tokens, heads * head_dim], the tables are
  // [tokens, head_dim / 2]; direction -1 undoes direction +1.
  void (*rotate)(float* x, const float* cosine, const float* sine,
                 int sequences, int tokens, int heads, int head_dim,
                 float direction);

  // Row i of scores [tokens, tokens] becomes softmax(scale * scores[0..i]),
  // then zeros.
  void (*causal_softmax)(float* scores, int tokens, float scale);
  // dprobability becomes the gradient of the unscaled scores.
  void (*causal_softmax_backward)(const float* probability, float* dprobability,
                                  int tokens, float scale);

  // out = gate * sigmoid(gate) * up.
  void (*gated)(const float* gate, const float* up, std::int64_t n, float* out);
  void (*gated_backward)(const float* gate, const float* up, const float* dout,
                         std::int64_t n, float* dgate, float* dup);

  // Sum over the rows of -log softmax(logits)[target], in row order. With
  // gradient_scale != 0 the logits become gradient_scale * their gradient.
  double (*cross_entropy)(float* logits, const std::uint8_t* targets, int rows,
                          int classes, float gradient_scale);

  void (*add)(float* sum, const float* x, std::int64_t n);
  double (*sum_of_squares)(const float* x, std::int64_t n);

  // Update the masters and round them to bf16.
  void (*adamw)(const AdamWStep& step, const float* gradient, std::int64_t n,
                float* moment1, float* moment2, float* master,
                std::uint16_t* bf16);
  void (*sign_sgd)(float rate, const float* gradient, std::int64_t n,
                   float* master, std::uint16_t* bf16);
};

// The best level this CPU runs. Always the same within one process.
const Kernels& BestKernels();

// Every level this CPU runs, the best one first.
std::vector<const Kernels*> SupportedKernels();

}  // namespace kedge::example

#endif  // KEDGE_EXAMPLES_MODEL_KERNELS_H_
