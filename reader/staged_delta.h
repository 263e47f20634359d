#ifndef KEDGE_READER_STAGED_DELTA_H_
#define KEDGE_READER_STAGED_DELTA_H_

// What follower and backends say to each other about deltas.

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "kedge/engine/io/store.h"

namespace kedge {

// Which owners take part, by ordinal: those that a join has to write. Empty:
// all.
using TensorMask = std::vector<bool>;

// The records of one step that held boxes need, and where they are applied
// from. Of one backend, which outlives it.
class StagedDelta {
 public:
  explicit StagedDelta(std::shared_ptr<const PublishedStep> step)
      : step_(std::move(step)) {}
  virtual ~StagedDelta() = default;
  StagedDelta(const StagedDelta&) = delete;
  StagedDelta& operator=(const StagedDelta&) = delete;

  const PublishedStep& step() const { return *step_; }
  const std::shared_ptr<const PublishedStep>& shared_step() const {
    return step_;
  }

 private:
  std::shared_ptr<const PublishedStep> step_;
};

struct ApplyCounts {
  std::uint64_t records = 0;
  std::uint64_t nnz = 0;            // of these, by the manifests
  std::uint64_t units_written = 0;  // a unit in two boxes counts twice
};

}  // namespace kedge

#endif  // KEDGE_READER_STAGED_DELTA_H_
