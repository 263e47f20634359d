#ifndef KEDGE_TESTS_SUPPORT_TEST_MODEL_H_
#define KEDGE_TESTS_SUPPORT_TEST_MODEL_H_

// A small model in memory that tests train, publish and compare: every dtype,
// odd shapes, a tie, a strided view.

#include <cstddef>
#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kedge/engine/io/store.h"
#include "kedge/writer/tensor_source.h"

namespace kedge {

// Bytes of every tensor by name, row-major.
using ModelBytes = std::map<std::string, std::vector<std::byte>>;

class TestModel {
 public:
  // `scale` multiplies the larger tensors' rows.
  explicit TestModel(std::uint64_t seed, std::uint64_t scale = 1);

  // Moves about `fraction` of the units of every tensor by small signed
  // differences, some by anything, and first and last unit always.
  void Step(double fraction);
  // Changes one unit of one tensor by one.
  void StepOne(const std::string& name, std::uint64_t byte);

  std::vector<TrainerTensor> Tensors() const;
  ModelBytes Bytes() const;  // a copy, ties included

 private:
  struct Tensor {
    std::string name;
    DType dtype;
    std::vector<std::uint64_t> shape;
    std::string tied_to;
    std::vector<std::byte> bytes;
    std::uint64_t pitch = 0;  // bytes between rows, for the strided one
  };
  std::mt19937_64 random_;
  std::vector<Tensor> tensors_;
};

// Every tensor of a version, rebuilt with the plain code of format/ alone: file
// hashes are checked, and S of every tensor against the manifests.
absl::StatusOr<ModelBytes> ReadModel(
    const Store& store, const std::shared_ptr<const PublishedStep>& step);

}  // namespace kedge

#endif  // KEDGE_TESTS_SUPPORT_TEST_MODEL_H_
