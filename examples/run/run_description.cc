#include "kedge/examples/run/run_description.h"

#include <span>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "kedge/examples/model/kernels.h"
#include "kedge/format/hash.h"
#include "kedge/format/status.h"

namespace kedge::example {
namespace {

constexpr char kEvaluationHash[] = "example.evaluation_hash";
constexpr char kKernelLevel[] = "example.kernel_level";

struct Number {
  const char* key;
  int ModelConfig::*member;
};
constexpr Number kNumbers[] = {
    {"example.layers", &ModelConfig::layers},
    {"example.d_model", &ModelConfig::d_model},
    {"example.heads", &ModelConfig::heads},
    {"example.d_ff", &ModelConfig::d_ff},
    {"example.context", &ModelConfig::context},
    {"example.batch", &ModelConfig::batch},
};

std::string HashOf(const Batch& batch) {
  Hasher128 hasher;
  hasher.Update(std::as_bytes(std::span(batch.inputs)));
  hasher.Update(std::as_bytes(std::span(batch.targets)));
  return ToHex(hasher.Finish());
}

absl::StatusOr<std::string> Value(const Metadata& metadata, const char* key) {
  const auto found = metadata.find(key);
  if (found != metadata.end()) return found->second;
  return absl::FailedPreconditionError(
      absl::StrCat("metadata of the store: ", key,
                   ": missing; use a store that kedge_example_trainer made"));
}

}  // namespace

RunDescription Describe(const ModelConfig& model, const Batch& evaluation) {
  return {.model = model,
          .evaluation_hash = HashOf(evaluation),
          .kernel_level = BestKernels().level};
}

Metadata ToMetadata(const RunDescription& run) {
  Metadata metadata;
  for (const Number& number : kNumbers) {
    metadata[number.key] = absl::StrCat(run.model.*number.member);
  }
  metadata[kEvaluationHash] = run.evaluation_hash;
  metadata[kKernelLevel] = run.kernel_level;
  return metadata;
}

absl::StatusOr<RunDescription> FromMetadata(const Metadata& metadata) {
  RunDescription run;
  for (const Number& number : kNumbers) {
    KEDGE_ASSIGN_OR_RETURN(const std::string text, Value(metadata, number.key));
    if (!absl::SimpleAtoi(text, &(run.model.*number.member))) {
      return absl::FailedPreconditionError(
          absl::StrCat("metadata of the store: ", number.key,
                       ": expected a whole number, found ", text,
                       "; use a store that kedge_example_trainer made"));
    }
  }
  KEDGE_ASSIGN_OR_RETURN(run.evaluation_hash, Value(metadata, kEvaluationHash));
  KEDGE_ASSIGN_OR_RETURN(run.kernel_level, Value(metadata, kKernelLevel));
  return run;
}

absl::Status CheckComparable(const RunDescription& trainer,
                             const Batch& evaluation) {
  const RunDescription own = Describe(trainer.model, evaluation);
  if (own.evaluation_hash != trainer.evaluation_hash) {
    return absl::FailedPreconditionError(
        absl::StrCat("evaluation text: expected the trainer's, of hash ",
                     trainer.evaluation_hash, ", found ", own.evaluation_hash,
                     "; give --text the same files in the same order"));
  }
  if (own.kernel_level != trainer.kernel_level) {
    return absl::FailedPreconditionError(absl::StrCat(
        "instruction set: expected the trainer's, ", trainer.kernel_level,
        ", found ", own.kernel_level,
        ": losses would differ in their last bits; run both on one kind of "
        "CPU"));
  }
  return absl::OkStatus();
}

}  // namespace kedge::example
