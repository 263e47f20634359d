#ifndef KEDGE_BENCH_SYNTHETIC_SOURCE_H_
#define KEDGE_BENCH_SYNTHETIC_SOURCE_H_

// Stores of models that nobody holds in memory: every byte is computed when it
// is read.

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kedge/bench/synthetic_weights.h"
#include "kedge/format/tensor_table.h"
#include "kedge/writer/tensor_source.h"

namespace kedge {

// The synthetic tensor called `name`. `density` is the share of elements that
// an odd version changes.
SyntheticTensor SyntheticOf(absl::string_view name, DType dtype,
                            double density);

// All tensors of `table`, which outlives it, at `version`.
class SyntheticSource : public TensorSource {
 public:
  SyntheticSource(const TensorTable* table, double density,
                  std::uint64_t version);
  absl::StatusOr<std::span<const std::byte>> Read(
      std::uint32_t ordinal, std::uint64_t byte_begin, std::uint64_t byte_count,
      std::vector<std::byte>* scratch) override;

 private:
  std::vector<SyntheticTensor> tensors_;
  std::uint64_t version_;
};

struct SyntheticStoreOptions {
  std::string path;
  std::vector<TensorSpec> tensors;
  double density = 0.008;
  std::uint64_t steps = 1;  // deltas after v0
  bool anchor = true;       // of v0; else readers have v0 already
  int threads = 0;          // 0: one per core
};
// Creates the store.
absl::Status WriteSyntheticStore(const SyntheticStoreOptions& options);

}  // namespace kedge

#endif  // KEDGE_BENCH_SYNTHETIC_SOURCE_H_
