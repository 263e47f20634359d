#ifndef KEDGE_EXAMPLES_GPU_LOOP_ENGINES_H_
#define KEDGE_EXAMPLES_GPU_LOOP_ENGINES_H_

// The inference engines of a run: their ranks, a thread for each, and what the
// trainer's thread sees of them. Ranks are numbered by place, see host.h.

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kedge/examples/gpu_loop/engine_rank.h"
#include "kedge/examples/gpu_loop/host.h"
#include "kedge/format/tensor_table.h"
#include "kedge/reader/follower.h"

namespace kedge::example {

using EngineRanks = std::vector<std::unique_ptr<EngineRank>>;

// Runs `body(place)` on a thread for each of the first `places`; the first
// error, with the place's name.
absl::Status OnPlaces(const Host& host, std::size_t places,
                      const std::function<absl::Status(std::size_t)>& body);

// The ranks of the first `engines` engines. Each engine is a group, and has a
// lease, of its own; `common` is what all ranks are opened with besides.
absl::StatusOr<EngineRanks> MakeEngines(Host& host, std::uint32_t engines,
                                        const FollowerOptions& common,
                                        const TensorTable& table);

// The bytes of the weights of engine `engine`, all ranks together.
std::uint64_t WeightBytes(const Host& host, const EngineRanks& ranks,
                          std::uint32_t engine);

// What the ranks have done so far.
//
// Thread safety: all methods, from any thread.
class EngineProgress {
 public:
  explicit EngineProgress(std::size_t places) : results_(places) {}

  void Add(std::size_t place, const UpdateResult& result);
  // The first one counts.
  void Fail(const absl::Status& status);
  // Until every rank of every engine holds `step`, or one has failed.
  absl::Status WaitFor(std::uint64_t step, std::chrono::seconds timeout);
  std::vector<UpdateResult> ResultsOf(std::size_t place);

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::vector<UpdateResult>> results_ ABSL_GUARDED_BY(mutex_);
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
};

// A rank's thread: follows until it holds `last`. A version that does not
// verify counts as a divergence, which ends the run.
void Follow(const Host& host, EngineRank& rank, std::size_t place,
            std::uint64_t last, EngineProgress& progress);

}  // namespace kedge::example

#endif  // KEDGE_EXAMPLES_GPU_LOOP_ENGINES_H_
