#ifndef KEDGE_TESTS_GOLDEN_GOLDEN_MODEL_H_
#define KEDGE_TESTS_GOLDEN_GOLDEN_MODEL_H_

// The small run whose store is tests/golden/v1: what the weights are at each
// version, and how the writer turns them into the store. Everything is a
// function of fixed seeds, so that the same code makes the same bytes.

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "kedge/format/dtype.h"
#include "kedge/format/manifest.h"
#include "kedge/writer/tensor_source.h"

namespace kedge {

struct GoldenTensor {
  DType dtype = DType::kU8;
  std::vector<std::uint64_t> shape;
  std::string tied_to;           // then `bytes` is empty
  std::vector<std::byte> bytes;  // row-major
};

struct GoldenVersion {
  std::uint64_t step = 0;
  std::uint32_t epoch = 0;
  bool root = false;    // other tensors than at the version before
  bool anchor = false;  // has one
  std::map<std::string, GoldenTensor> tensors;
  Metadata metadata;
};

// All versions, ascending.
std::vector<GoldenVersion> GoldenVersions();

// Writes the store. `path` does not exist or is empty.
absl::Status WriteGoldenStore(const std::string& path);

// What the store holds, as text: a line for each version, tensor and metadata
// pair. It is kept beside the store and does not depend on the format's reader.
std::string GoldenText();

}  // namespace kedge

#endif  // KEDGE_TESTS_GOLDEN_GOLDEN_MODEL_H_
