// An inference engine that follows a trainer: joins a store with no weights of
// its own, passes through every version, and computes each one's loss from the
// memory that kedge keeps up to date.

#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "kedge/engine/io/store.h"
#include "kedge/examples/inference_engine/engine_weights.h"
#include "kedge/examples/model/model.h"
#include "kedge/examples/model/text.h"
#include "kedge/examples/run/measurement.h"
#include "kedge/examples/run/progress.h"
#include "kedge/examples/run/rank_group.h"
#include "kedge/examples/run/report.h"
#include "kedge/examples/run/run_description.h"
#include "kedge/format/hash.h"
#include "kedge/format/status.h"
#include "kedge/reader/follower.h"

namespace kedge::example {
namespace {

using Clock = std::chrono::steady_clock;

struct Options {
  std::string store;
  std::string name = "engine";
  std::string weights = "whole";
  std::string join = "boot";
  std::uint64_t join_after = 0;
  std::uint64_t until = 20;
  std::uint32_t processes = 1;
  std::uint64_t kill_at = 0;  // 0: never
  std::vector<std::string> text;
  int threads = 1;
  std::string report;
  std::string progress;
  std::int64_t timeout_seconds = 240;
};

// A version that stood in memory, verified.
struct Seen {
  VersionId version;
  Measurement measurement;
};

class InferenceEngine {
 public:
  explicit InferenceEngine(const Options& options)
      : options_(options),
        timeout_(std::chrono::seconds(options.timeout_seconds)) {}

  absl::Status Run() {
    KEDGE_RETURN_IF_ERROR(LearnRun());
    KEDGE_ASSIGN_OR_RETURN(group_,
                           RankGroup::Fork(options_.processes, timeout_));
    KEDGE_ASSIGN_OR_RETURN(
        report_, Report::Create(group_->rank() == 0 ? options_.report : ""));
    KEDGE_RETURN_IF_ERROR(Join());
    while (follower_->held()->step < options_.until) {
      KEDGE_ASSIGN_OR_RETURN(const UpdateResult result,
                             follower_->WaitForUpdate(timeout_));
      KEDGE_RETURN_IF_ERROR(Tell(result));
    }
    return group_->Finish();
  }

 private:
  // Takes from the store what the model needs beside weights.
  absl::Status LearnRun() {
    KEDGE_RETURN_IF_ERROR(
        WaitUntil(timeout_, absl::StrCat("a store at ", options_.store),
                  [this]() -> absl::StatusOr<bool> {
                    auto store = Store::Open(PosixFileSystem(), options_.store);
                    if (absl::IsNotFound(store.status())) return false;
                    KEDGE_ASSIGN_OR_RETURN(store_, std::move(store));
                    return true;
                  }));
    KEDGE_ASSIGN_OR_RETURN(const auto newest, store_->Newest());
    KEDGE_ASSIGN_OR_RETURN(const VersionState state, store_->StateAt(newest));
    KEDGE_ASSIGN_OR_RETURN(RunDescription run, FromMetadata(state.metadata));
    KEDGE_ASSIGN_OR_RETURN(
        const Text text, Text::Load(options_.text.empty() ? Text::DefaultPaths()
                                                          : options_.text));
    KEDGE_ASSIGN_OR_RETURN(
        evaluation_, text.EvaluationBatch(run.model.batch, run.model.context));
    KEDGE_RETURN_IF_ERROR(CheckComparable(run, evaluation_));
    run.model.threads = options_.threads;
    KEDGE_ASSIGN_OR_RETURN(model_, Model::Create(run.model));
    KEDGE_ASSIGN_OR_RETURN(
        weights_, EngineWeights::Create(model_->tensors(),
                                        options_.weights == "whole"
                                            ? WeightLayout::kWhole
                                            : WeightLayout::kTensorParallel2));
    return absl::OkStatus();
  }

  absl::Status Join() {
    if (options_.join == "late") {
      KEDGE_RETURN_IF_ERROR(WaitUntil(
          timeout_, absl::StrCat(options_.store, ": v", options_.join_after),
          [this]() -> absl::StatusOr<bool> {
            KEDGE_ASSIGN_OR_RETURN(const Head head, store_->ReadHead());
            return head.step >= options_.join_after;
          }));
    }
    FollowerOptions options;
    options.store_path = options_.store;
    options.apply_threads = options_.threads;
    options.every_version = true;
    // Called while paused, once for each version. An engine that serves would
    // drop what it has cached here; this one has to see the versions that an
    // update passes through as well.
    options.commit = [this](const VersionId& version) { OnCommit(version); };
    if (group_->size() > 1) {
      options.group.rank = group_->rank();
      options.group.size = group_->size();
      options.group.reduce = [this](std::span<std::uint64_t> values) {
        return group_->AllReduce(values);
      };
    }
    options.lease_id = absl::StrCat(options_.name, ".", group_->rank());
    KEDGE_ASSIGN_OR_RETURN(
        follower_,
        Follower::Open(std::move(options), group_->size() > 1
                                               ? weights_->sets(group_->rank())
                                               : weights_->sets()));
    KEDGE_ASSIGN_OR_RETURN(
        const UpdateResult result,
        options_.join == "late" ? follower_->Join() : follower_->JoinStep(0));
    return Tell(result);
  }

  void OnCommit(const VersionId& version) {
    if (options_.kill_at != 0 && version.step == options_.kill_at) {
      std::raise(SIGKILL);
    }
    // One rank reads all ranks' weights: a loss in one fixed order.
    if (group_->rank() != 0) return;
    const Clock::time_point start = Clock::now();
    absl::StatusOr<Measurement> measurement =
        Measure(*model_, weights_->view(), evaluation_);
    measure_status_.Update(measurement.status());
    if (measurement.ok()) seen_.push_back({version, *measurement});
    measure_seconds_ +=
        std::chrono::duration<double>(Clock::now() - start).count();
  }

  // Reports what the last update did. One update may have passed through
  // several versions; its figures then stand with the last one.
  absl::Status Tell(const UpdateResult& result) {
    if (group_->rank() != 0) return absl::OkStatus();
    KEDGE_RETURN_IF_ERROR(measure_status_);
    if (follower_->state() != FollowerState::kReady || seen_.empty() ||
        seen_.back().version != result.version) {
      return absl::InternalError(absl::StrCat(
          "after an update: expected ready and holding ",
          ToString(result.version), ", found ", ToString(follower_->state()),
          seen_.empty() ? ""
                        : ", committed " + ToString(seen_.back().version)));
    }
    for (std::size_t i = 0; i < seen_.size(); ++i) {
      Json line;
      line["engine"] = options_.name;
      line["weights"] = options_.weights;
      line["version"] = seen_[i].version.step;
      line["manifest_hash"] = ToHex(seen_[i].version.manifest_hash);
      AddTo(seen_[i].measurement, line);
      if (i + 1 == seen_.size()) {
        line["joined"] = result.joined;
        line["versions"] = seen_.size();
        line["deltas"] = result.deltas;
        line["nnz"] = result.nnz;
        line["bytes_read"] = result.bytes_read;
        line["read_ms"] = 1000 * result.read_seconds;
        line["apply_ms"] = 1000 * result.apply_seconds;
        line["verify_ms"] = 1000 * result.verify_seconds;
        // Without the losses computed in it.
        line["pause_ms"] = 1000 * (result.pause_seconds - measure_seconds_);
      }
      KEDGE_RETURN_IF_ERROR(report_->Append(line));
      std::printf("v%llu%s: loss %.6f\n",
                  static_cast<unsigned long long>(seen_[i].version.step),
                  result.joined ? " (joined)" : "", seen_[i].measurement.loss);
    }
    std::fflush(stdout);
    seen_.clear();
    measure_seconds_ = 0;
    if (options_.progress.empty()) return absl::OkStatus();
    return WriteProgress(options_.progress, options_.name, result.version.step);
  }

  const Options options_;
  const std::chrono::milliseconds timeout_;
  std::unique_ptr<Report> report_;
  std::unique_ptr<Store> store_;
  Batch evaluation_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<EngineWeights> weights_;
  std::unique_ptr<RankGroup> group_;
  std::unique_ptr<Follower> follower_;
  // Filled by commit, emptied by Tell.
  std::vector<Seen> seen_;
  double measure_seconds_ = 0;
  absl::Status measure_status_;
};

int Main(int argc, char** argv) {
  Options options;
  CLI::App app(
      "Follows the store of kedge_example_trainer and computes the loss of "
      "every version from the weights it holds.",
      "kedge_example_engine");
  app.add_option("--store", options.store, "Store to follow")->required();
  app.add_option("--name", options.name, "Name in reports and progress files")
      ->capture_default_str();
  app.add_option("--weights", options.weights,
                 "whole, or tp2: two tensor-parallel weight sets with packed "
                 "projections")
      ->check(CLI::IsMember({"whole", "tp2"}))
      ->capture_default_str();
  app.add_option("--join", options.join,
                 "boot: with v0; late: with the newest version there is")
      ->check(CLI::IsMember({"boot", "late"}))
      ->capture_default_str();
  app.add_option("--join-after", options.join_after,
                 "With --join late: wait until this version is published")
      ->capture_default_str();
  app.add_option("--until", options.until, "Version to stop at")
      ->capture_default_str();
  app.add_option("--processes", options.processes,
                 "With --weights tp2: 1 or 2, a process for each rank")
      ->check(CLI::Range(1, 2))
      ->capture_default_str();
  app.add_option("--kill-at", options.kill_at,
                 "Dies by SIGKILL in the pause in which this version, above 0, "
                 "comes");
  app.add_option("--text", options.text,
                 "The trainer's files (default: the licences Debian ships)");
  app.add_option("--threads", options.threads,
                 "1 or 2; no result depends on it")
      ->check(CLI::Range(1, 2))
      ->capture_default_str();
  app.add_option("--report", options.report,
                 "File for a JSON line about each version");
  app.add_option("--progress", options.progress,
                 "Directory in which to say what this engine holds");
  app.add_option("--timeout", options.timeout_seconds,
                 "Seconds that a wait may take")
      ->check(CLI::Range(1, 86'400))
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  if (options.processes > 1 && options.weights != "tp2") {
    std::fprintf(stderr,
                 "kedge_example_engine: --processes %u: expected --weights "
                 "tp2, found %s\n",
                 options.processes, options.weights.c_str());
    return 2;
  }

  const absl::Status status = InferenceEngine(options).Run();
  if (status.ok()) return 0;
  std::fprintf(stderr, "kedge_example_engine %s: %s\n", options.name.c_str(),
               std::string(status.message()).c_str());
  return 1;
}

}  // namespace
}  // namespace kedge::example

int main(int argc, char** argv) { return kedge::example::Main(argc, argv); }
