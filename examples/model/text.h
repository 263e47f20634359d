#ifndef KEDGE_EXAMPLES_MODEL_TEXT_H_
#define KEDGE_EXAMPLES_MODEL_TEXT_H_

// Bytes to learn from, cut into batches that depend on a seed alone.

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace kedge::example {

// Windows of text: byte i of a target follows byte i of its input.
struct Batch {
  int sequences = 0;
  int tokens = 0;                     // per sequence
  std::vector<std::uint8_t> inputs;   // [sequences, tokens]
  std::vector<std::uint8_t> targets;  // [sequences, tokens]
};

// A splitmix64 sequence: the same numbers with every standard library, which
// the distributions of <random> do not promise.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}

  std::uint64_t Bits();
  std::uint64_t Below(std::uint64_t bound);  // bound > 0
  double Uniform();                          // in (0, 1)
  double Normal();                           // mean 0, variance 1

 private:
  std::uint64_t state_;
};

// A text, of which the last tenth is kept for evaluation.
//
// Thread safety: immutable.
class Text {
 public:
  // The licence texts every Debian system has, in name order.
  static std::vector<std::string> DefaultPaths();

  // Reads the files one after the other. Errors: kNotFound (a file cannot be
  // read, or no path is given), kInvalidArgument (over 1 GiB together).
  static absl::StatusOr<Text> Load(const std::vector<std::string>& paths);

  explicit Text(std::string bytes);

  std::int64_t size_bytes() const {
    return static_cast<std::int64_t>(bytes_.size());
  }

  // The batch of training step `step`: random windows of the first nine
  // tenths. kInvalidArgument if the text is too short for one window.
  absl::StatusOr<Batch> TrainingBatch(int sequences, int tokens,
                                      std::uint64_t seed,
                                      std::int64_t step) const;

  // Evenly spaced windows of the last tenth, the same on every call.
  absl::StatusOr<Batch> EvaluationBatch(int sequences, int tokens) const;

 private:
  void Cut(std::int64_t at, Batch& batch) const;

  std::string bytes_;
  std::int64_t training_bytes_ = 0;
};

}  // namespace kedge::example

#endif  // KEDGE_EXAMPLES_MODEL_TEXT_H_
