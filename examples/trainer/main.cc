// A trainer that publishes every step: a small language model learns real text,
// and after a warm-up its weights are v0 of a store. What an inference engine
// sees of it is that store alone.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <numbers>
#include <string>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "kedge/examples/model/model.h"
#include "kedge/examples/model/text.h"
#include "kedge/examples/model/trainer.h"
#include "kedge/examples/run/measurement.h"
#include "kedge/examples/run/progress.h"
#include "kedge/examples/run/rank_group.h"
#include "kedge/examples/run/report.h"
#include "kedge/examples/run/run_description.h"
#include "kedge/examples/trainer/step_statistics.h"
#include "kedge/format/hash.h"
#include "kedge/format/status.h"
#include "kedge/writer/file_coordinator.h"
#include "kedge/writer/snapshot_writer.h"

namespace kedge::example {
namespace {

using Clock = std::chrono::steady_clock;

struct Options {
  std::string store;
  std::vector<std::string> text;
  std::string optimizer = "adamw";
  std::uint64_t steps = 20;
  std::uint64_t anchor_every = 3;
  std::uint64_t warmup = 200;
  double warmup_rate = 1e-3;
  double rate = 1e-6;
  TrainerConfig training;
  std::string report;
  std::string progress;
  std::vector<std::string> wait_for;
  std::int64_t timeout_seconds = 240;
  std::uint32_t ranks = 1;
};

double MillisecondsSince(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start)
      .count();
}

// Up over the first tenth, then down to a tenth of the peak along a cosine.
double WarmUpRate(std::uint64_t step, std::uint64_t steps, double peak) {
  const auto ramp = std::max(1.0, static_cast<double>(steps) / 10);
  const auto at = static_cast<double>(step);
  if (at <= ramp) return peak * at / ramp;
  const double rest = static_cast<double>(steps) - ramp;
  const double cosine = std::cos(std::numbers::pi * (at - ramp) / rest);
  return peak * (0.55 + 0.45 * cosine);
}

absl::Status WarmUp(const Options& options, Trainer& trainer) {
  const Clock::time_point start = Clock::now();
  for (std::uint64_t step = 1; step <= options.warmup; ++step) {
    KEDGE_ASSIGN_OR_RETURN(
        const StepResult result,
        trainer.Step(Optimizer::kAdamW,
                     WarmUpRate(step, options.warmup, options.warmup_rate)));
    if (step % 20 == 0 || step == options.warmup) {
      std::printf("warm-up %llu of %llu: loss %.4f, %.1f s\n",
                  static_cast<unsigned long long>(step),
                  static_cast<unsigned long long>(options.warmup), result.loss,
                  MillisecondsSince(start) / 1000);
      std::fflush(stdout);
    }
  }
  // A run that starts from a checkpoint knows no moments.
  trainer.ResetOptimizer();
  return absl::OkStatus();
}

// What rank `rank` publishes of a tensor: whole rows, as sharded optimizers have
// it, one part for rank 0, two for rank 1, and so on.
ElementRange ShardOf(const TensorSpec& spec, std::uint32_t rank,
                     std::uint32_t ranks) {
  const bool vector = spec.shape.size() == 1;
  const auto rows =
      static_cast<std::uint64_t>(vector ? spec.cols() : spec.rows());
  const auto row = static_cast<std::uint64_t>(vector ? 1 : spec.cols());
  const auto end = [&](std::uint64_t of) {
    const std::uint64_t all = std::uint64_t{ranks} * (ranks + 1) / 2;
    return rows * (of * (of + 1) / 2) / all * row;
  };
  return {end(rank), end(rank + 1)};
}

std::vector<TrainerTensor> TensorsOf(const Trainer& trainer,
                                     const RankGroup& ranks) {
  std::vector<TrainerTensor> tensors;
  for (std::size_t i = 0; i < trainer.tensors().size(); ++i) {
    const TensorSpec& spec = trainer.tensors()[i];
    TrainerTensor tensor;
    tensor.name = spec.name;
    tensor.shape.assign(spec.shape.begin(), spec.shape.end());
    tensor.data = trainer.bf16(i).data();
    if (ranks.size() > 1) {
      tensor.shard = ShardOf(spec, ranks.rank(), ranks.size());
      tensor.data = trainer.bf16(i).data() + tensor.shard->begin;
    }
    tensors.push_back(std::move(tensor));
  }
  return tensors;
}

std::vector<std::vector<std::uint16_t>> CopyOf(const Trainer& trainer) {
  std::vector<std::vector<std::uint16_t>> copy;
  for (std::size_t i = 0; i < trainer.tensors().size(); ++i) {
    copy.push_back(trainer.bf16(i));
  }
  return copy;
}

Json LineOf(const VersionId& version, const Measurement& measurement) {
  Json line;
  line["step"] = version.step;
  line["manifest_hash"] = ToHex(version.manifest_hash);
  AddTo(measurement, line);
  return line;
}

void AddSizes(const StepStatistics& statistics, const PublishResult& published,
              Json& line) {
  const auto changed = static_cast<double>(statistics.changed());
  const auto bits = 8 * static_cast<double>(published.bytes);
  line["elements"] = statistics.elements();
  line["nnz"] = statistics.changed();
  line["density"] = changed / static_cast<double>(statistics.elements());
  line["bytes"] = published.bytes;
  line["manifest_bytes"] = published.manifest_bytes;
  line["anchor_bytes"] = published.anchor_bytes;
  if (statistics.changed() == 0) return;
  line["bits_per_change"] = bits / changed;
  line["entropy_bits_per_change"] = statistics.entropy_bits() / changed;
  line["bytes_to_entropy"] = bits / statistics.entropy_bits();
}

absl::Status Train(const Options& options) {
  std::vector<AwaitedEngine> engines;
  for (const std::string& text : options.wait_for) {
    KEDGE_ASSIGN_OR_RETURN(AwaitedEngine engine, ParseAwaitedEngine(text));
    engines.push_back(std::move(engine));
  }
  const std::chrono::milliseconds timeout =
      std::chrono::seconds(options.timeout_seconds);
  KEDGE_ASSIGN_OR_RETURN(
      Text text,
      Text::Load(options.text.empty() ? Text::DefaultPaths() : options.text));
  const ModelConfig& shape = options.training.model;
  KEDGE_ASSIGN_OR_RETURN(const Batch evaluation,
                         text.EvaluationBatch(shape.batch, shape.context));
  KEDGE_ASSIGN_OR_RETURN(const std::unique_ptr<Trainer> trainer,
                         Trainer::Create(options.training, std::move(text)));
  KEDGE_RETURN_IF_ERROR(WarmUp(options, *trainer));

  // From here on each rank computes the same steps, as replicas of one batch
  // do, and publishes its shard of the weights. Rank 0 speaks for all.
  KEDGE_ASSIGN_OR_RETURN(const std::unique_ptr<RankGroup> ranks,
                         RankGroup::Fork(options.ranks, timeout));
  const bool speaks = ranks->rank() == 0;
  if (!speaks) engines.clear();
  KEDGE_ASSIGN_OR_RETURN(const std::unique_ptr<Report> report,
                         Report::Create(speaks ? options.report : ""));
  const auto measure = [&] {
    return Measure(trainer->model(), trainer->view(), evaluation);
  };

  WriterOptions writer_options;
  writer_options.store_path = options.store;
  std::unique_ptr<FileCoordinator> coordinator;
  if (ranks->size() > 1) {
    FileCoordinatorOptions meeting;
    meeting.store_path = options.store;
    meeting.rank = ranks->rank();
    meeting.world_size = ranks->size();
    meeting.deadline = timeout;
    KEDGE_ASSIGN_OR_RETURN(coordinator, FileCoordinator::Open(meeting));
    writer_options.coordinator = coordinator.get();
  }
  InitOptions init;
  init.metadata = ToMetadata(Describe(shape, evaluation));
  KEDGE_ASSIGN_OR_RETURN(const std::unique_ptr<SnapshotWriter> writer,
                         SnapshotWriter::Create(writer_options, init,
                                                TensorsOf(*trainer, *ranks)));
  KEDGE_ASSIGN_OR_RETURN(Measurement measurement, measure());
  KEDGE_RETURN_IF_ERROR(report->Append(LineOf(writer->held(), measurement)));
  if (speaks) std::printf("v0: loss %.6f\n", measurement.loss);
  std::fflush(stdout);
  KEDGE_RETURN_IF_ERROR(WaitForEngines(timeout, options.progress, engines, 0));

  const Optimizer optimizer =
      options.optimizer == "adamw" ? Optimizer::kAdamW : Optimizer::kSignSgd;
  for (std::uint64_t step = 1; step <= options.steps; ++step) {
    const std::vector<std::vector<std::uint16_t>> before = CopyOf(*trainer);
    KEDGE_RETURN_IF_ERROR(trainer->Step(optimizer, options.rate).status());
    const Clock::time_point start = Clock::now();
    KEDGE_ASSIGN_OR_RETURN(
        const PublishResult published,
        writer->Publish(step, {.anchor = step % options.anchor_every == 0}));
    const double publish_ms = MillisecondsSince(start);
    KEDGE_RETURN_IF_ERROR(published.anchor_status);
    for (const std::string& warning : published.warnings) {
      std::fprintf(stderr, "warning: %s\n", warning.c_str());
    }

    if (!speaks) continue;

    StepStatistics statistics;
    for (std::size_t i = 0; i < before.size(); ++i) {
      statistics.Add(before[i], trainer->bf16(i));
    }
    if (statistics.changed() != published.nnz) {
      return absl::InternalError(absl::StrCat(
          "v", step, ": changed elements: expected ", statistics.changed(),
          ", counted in memory, found ", published.nnz, " published"));
    }
    KEDGE_ASSIGN_OR_RETURN(measurement, measure());
    Json line = LineOf(published.version, measurement);
    AddSizes(statistics, published, line);
    line["encode_ms"] = 1000 * published.encode_seconds;
    line["commit_ms"] = 1000 * published.commit_seconds;
    line["anchor_ms"] = 1000 * published.anchor_seconds;
    line["publish_ms"] = publish_ms;  // all of the call
    KEDGE_RETURN_IF_ERROR(report->Append(line));
    std::printf("v%llu: loss %.6f, %llu changes in %llu bytes%s\n",
                static_cast<unsigned long long>(step), measurement.loss,
                static_cast<unsigned long long>(published.nnz),
                static_cast<unsigned long long>(published.bytes),
                published.anchor_bytes > 0 ? ", anchor" : "");
    std::fflush(stdout);
    KEDGE_RETURN_IF_ERROR(
        WaitForEngines(timeout, options.progress, engines, step));
  }
  return ranks->Finish();
}

int Main(int argc, char** argv) {
  Options options;
  CLI::App app(
      "Trains a small byte-level language model and publishes its weights: "
      "v0 after a warm-up, then a version each step.",
      "kedge_example_trainer");
  app.add_option("--store", options.store, "Store to create")->required();
  app.add_option("--text", options.text,
                 "Files to learn from (default: the licences Debian ships)");
  app.add_option("--optimizer", options.optimizer,
                 "Of the published steps; the warm-up always uses adamw")
      ->check(CLI::IsMember({"adamw", "sign_sgd"}))
      ->capture_default_str();
  const auto number = [&app](const char* name, auto& value, const char* what,
                             auto min, auto max) {
    app.add_option(name, value, what)
        ->check(CLI::Range(min, max))
        ->capture_default_str();
  };
  number("--steps", options.steps, "Steps to publish", 0, 1'000'000);
  number("--anchor-every", options.anchor_every, "Steps from anchor to anchor",
         1, 1'000'000);
  number("--warmup", options.warmup, "Steps before v0", 0, 1'000'000);
  number("--warmup-rate", options.warmup_rate,
         "Highest learning rate of the warm-up", 1e-12, 1.0);
  number("--rate", options.rate, "Learning rate of the published steps", 1e-12,
         1.0);
  app.add_option("--seed", options.training.seed,
                 "Of the first weights and of the batches")
      ->capture_default_str();
  ModelConfig& model = options.training.model;
  app.add_option("--layers", model.layers, "Layers")->capture_default_str();
  app.add_option("--d-model", model.d_model, "Width")->capture_default_str();
  app.add_option("--heads", model.heads, "Heads")->capture_default_str();
  app.add_option("--d-ff", model.d_ff, "MLP width")->capture_default_str();
  app.add_option("--context", model.context, "Bytes in a sequence")
      ->capture_default_str();
  app.add_option("--batch", model.batch, "Sequences in a batch")
      ->capture_default_str();
  app.add_option("--threads", model.threads, "1 or 2; no result depends on it")
      ->capture_default_str();
  app.add_option("--ranks", options.ranks,
                 "Processes that publish a shard of the weights each")
      ->check(CLI::Range(1, 16))
      ->capture_default_str();
  app.add_option("--report", options.report,
                 "File for a JSON line about each version");
  CLI::Option* const progress =
      app.add_option("--progress", options.progress,
                     "Directory in which inference engines say what they hold");
  app.add_option("--wait-for", options.wait_for,
                 "NAME or NAME@VERSION (repeatable): before each next step, "
                 "wait until this engine holds the last version (from VERSION "
                 "on)")
      ->needs(progress);
  number("--timeout", options.timeout_seconds, "Seconds that a wait may take",
         1, 86'400);
  CLI11_PARSE(app, argc, argv);

  const absl::Status status = Train(options);
  if (status.ok()) return 0;
  std::fprintf(stderr, "kedge_example_trainer: %s\n",
               std::string(status.message()).c_str());
  return 1;
}

}  // namespace
}  // namespace kedge::example

int main(int argc, char** argv) { return kedge::example::Main(argc, argv); }
