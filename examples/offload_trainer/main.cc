// A trainer with full CPU offload that publishes every step through kedge's
// optimizer hook. The model is synthetic, so that any size can be run and every
// byte that is published can be checked: at the end the device's weights and
// the store's checksums are compared with the ranks' own f32 masters.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "kedge/examples/offload_trainer/moe_model.h"
#include "kedge/examples/offload_trainer/offload_optimizer.h"
#include "kedge/examples/offload_trainer/open_device.h"
#include "kedge/examples/offload_trainer/reference_state.h"
#include "kedge/examples/offload_trainer/synthetic_gradient.h"
#include "kedge/examples/offload_trainer/trainer_rank.h"
#include "kedge/examples/run/progress.h"
#include "kedge/examples/run/report.h"
#include "kedge/format/hash.h"
#include "kedge/format/status.h"
#include "kedge/writer/local_coordinator.h"
#include "kedge/writer/retention.h"

namespace kedge::example {
namespace {

struct Options {
  std::string store;
  std::string devices = "cpu";
  std::uint64_t parameters = 100'000'000;
  std::uint64_t steps = 20;
  std::uint64_t anchor_every = 3;
  std::uint32_t keep_anchors = 0;
  std::string optimizer = "adamw";
  std::uint32_t ranks = 1;
  std::uint64_t seed = 1;
  RankOptions rank;
  std::string report;
  std::string checkpoint;
  std::string progress;
  std::vector<std::string> wait_for;
  std::int64_t timeout_seconds = 600;
};

// What the ranks of this process share.
struct Run {
  explicit Run(const Options& given)
      : options(given),
        model(MakeMoeModel(ChooseDims(given.parameters))),
        gradient(given.seed),
        reference(!given.checkpoint.empty()) {}

  const Options& options;
  const MoeModel model;
  const SyntheticGradient gradient;
  std::vector<std::unique_ptr<Device>> devices;
  std::vector<std::unique_ptr<LocalCoordinator>> coordinators;
  std::vector<AwaitedEngine> engines;
  std::unique_ptr<Report> report;
  ReferenceState reference;
  // Of rank 0, after the last step.
  std::unique_ptr<TensorTable> table;
  std::vector<std::uint64_t> l61;
  VersionId version;
};

Json LineOf(const StepReport& step, std::uint64_t elements) {
  const PublishResult& published = step.hook.publish;
  Json line;
  line["step"] = published.version.step;
  line["manifest_hash"] = ToHex(published.version.manifest_hash);
  line["nnz"] = published.nnz;
  line["bytes"] = published.bytes;
  line["bits_per_parameter"] =
      8 * static_cast<double>(published.bytes) / static_cast<double>(elements);
  line["anchor_bytes"] = published.anchor_bytes;
  line["accumulate_ms"] = 1000 * step.accumulate_seconds;
  line["begin_ms"] = 1000 * step.begin_seconds;
  line["pass_ms"] = 1000 * step.pass_seconds;
  line["drain_ms"] = 1000 * step.hook.drain_seconds;
  line["guard_ms"] = 1000 * step.hook.guard_seconds;
  line["guard_bytes"] = step.hook.guard_bytes;
  line["publish_ms"] = 1000 * step.hook.commit_seconds;
  line["early_drains"] = step.hook.early_drains;
  return line;
}

Json MemoryOf(const TrainerRank& rank) {
  const HookMemory& memory = rank.hook().memory();
  Json line;
  line["step"] = 0;
  line["manifest_hash"] = ToHex(rank.hook().held().manifest_hash);
  line["trainer_host_bytes"] = rank.optimizer().host_bytes();
  line["trainer_pinned_bytes"] = rank.optimizer().pinned_bytes();
  line["hook_device_bytes"] = memory.device_bytes;
  line["hook_pinned_bytes"] = memory.pinned_bytes;
  line["hook_residual_bytes"] = memory.residual_bytes;
  for (const auto& [name, bytes] : memory.residual) {
    line["hook_residual"][name] = bytes;
  }
  return line;
}

absl::Status TrainRank(Run& run, std::uint32_t number) {
  const Options& options = run.options;
  const bool speaks = number == 0;
  const std::chrono::milliseconds timeout =
      std::chrono::seconds(options.timeout_seconds);
  Device* const device = run.devices[number % run.devices.size()].get();
  KEDGE_ASSIGN_OR_RETURN(
      const std::unique_ptr<TrainerRank> rank,
      TrainerRank::Create(
          options.rank, &run.model, &run.gradient, device,
          options.ranks > 1 ? run.coordinators[number].get() : nullptr));
  if (speaks) {
    KEDGE_RETURN_IF_ERROR(run.report->Append(MemoryOf(*rank)));
    std::printf("v0: %llu parameters, %zu tensors, %u ranks on %s\n",
                static_cast<unsigned long long>(run.model.elements()),
                rank->hook().store_writer().table().size(), options.ranks,
                options.devices.c_str());
    std::fflush(stdout);
    KEDGE_RETURN_IF_ERROR(
        WaitForEngines(timeout, options.progress, run.engines, 0));
  }
  for (std::uint64_t step = 1; step <= options.steps; ++step) {
    KEDGE_ASSIGN_OR_RETURN(const StepReport report,
                           rank->Step(step, step % options.anchor_every == 0));
    const PublishResult& published = report.hook.publish;
    KEDGE_RETURN_IF_ERROR(published.anchor_status);
    for (const std::string& warning : published.warnings) {
      std::fprintf(stderr, "warning: %s\n", warning.c_str());
    }
    if (!speaks) continue;
    KEDGE_RETURN_IF_ERROR(
        run.report->Append(LineOf(report, run.model.elements())));
    std::printf(
        "v%llu: %llu changes in %llu bytes, pass %.1f ms, guard %.1f ms, "
        "publish %.1f ms%s\n",
        static_cast<unsigned long long>(step),
        static_cast<unsigned long long>(published.nnz),
        static_cast<unsigned long long>(published.bytes),
        1000 * report.pass_seconds, 1000 * report.hook.guard_seconds,
        1000 * report.hook.commit_seconds,
        published.anchor_bytes > 0 ? ", anchor" : "");
    std::fflush(stdout);
    KEDGE_RETURN_IF_ERROR(
        WaitForEngines(timeout, options.progress, run.engines, step));
  }
  KEDGE_RETURN_IF_ERROR(rank->CheckLiveWeights());
  rank->AddTo(&run.reference);
  if (speaks) {
    const StoreWriter& writer = rank->hook().store_writer();
    run.table = std::make_unique<TensorTable>(writer.table());
    run.l61.assign(writer.l61().begin(), writer.l61().end());
    run.version = writer.held();
  }
  return absl::OkStatus();
}

absl::Status Train(Options& options) {
  const std::chrono::milliseconds timeout =
      std::chrono::seconds(options.timeout_seconds);
  options.rank.optimizer.rule =
      options.optimizer == "adamw" ? UpdateRule::kAdamW : UpdateRule::kSignSgd;
  options.rank.writer.store_path = options.store;
  options.rank.deadline = timeout;
  if (options.keep_anchors > 0) {
    options.rank.writer.retention = RetentionOptions();
    options.rank.writer.retention->keep_anchors = options.keep_anchors;
  }
  if (options.rank.optimizer.threads == 0) {
    const unsigned cores = std::max(1u, std::thread::hardware_concurrency());
    options.rank.optimizer.threads =
        static_cast<int>(std::max(1u, cores / options.ranks));
  }
  Run run(options);
  for (const std::string& text : options.wait_for) {
    KEDGE_ASSIGN_OR_RETURN(AwaitedEngine engine, ParseAwaitedEngine(text));
    run.engines.push_back(std::move(engine));
  }
  for (const absl::string_view name : absl::StrSplit(options.devices, ',')) {
    KEDGE_ASSIGN_OR_RETURN(std::unique_ptr<Device> device,
                           OpenDevice(std::string(name)));
    run.devices.push_back(std::move(device));
  }
  KEDGE_ASSIGN_OR_RETURN(run.report, Report::Create(options.report));
  run.coordinators = LocalCoordinator::MakeGroup(options.ranks, timeout);

  std::vector<absl::Status> outcomes(options.ranks);
  std::vector<std::thread> others;
  for (std::uint32_t r = 1; r < options.ranks; ++r) {
    others.emplace_back([&, r] { outcomes[r] = TrainRank(run, r); });
  }
  outcomes[0] = TrainRank(run, 0);
  for (std::thread& other : others) other.join();
  // Ranks that only waited for another in vain speak last.
  absl::Status failed;
  for (std::uint32_t r = 0; r < options.ranks; ++r) {
    if (outcomes[r].ok()) continue;
    if (failed.ok() || absl::IsUnavailable(failed)) {
      failed = Annotate(outcomes[r], absl::StrCat("rank ", r));
    }
  }
  KEDGE_RETURN_IF_ERROR(failed);

  KEDGE_RETURN_IF_ERROR(run.reference.CompareWith(*run.table, run.l61));
  if (!options.checkpoint.empty()) {
    KEDGE_RETURN_IF_ERROR(run.reference.WriteCheckpoint(options.checkpoint));
  }
  Json line;
  line["verified_step"] = run.version.step;
  line["manifest_hash"] = ToHex(run.version.manifest_hash);
  line["tensors_verified"] = run.table->size();
  line["bytes_verified"] = run.reference.total_bytes();
  line["state_digest"] = ToHex(run.table->StateDigest(run.l61));
  KEDGE_RETURN_IF_ERROR(run.report->Append(line));
  std::printf(
      "v%llu verified: the devices and the store hold what the masters say, "
      "%zu tensors, %llu bytes\n",
      static_cast<unsigned long long>(run.version.step), run.table->size(),
      static_cast<unsigned long long>(run.reference.total_bytes()));
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  Options options;
  CLI::App app(
      "Trains a synthetic mixture-of-experts model with its optimizer in host "
      "memory and publishes every step through the optimizer hook.",
      "kedge_example_offload_trainer");
  const auto number = [&app](const char* name, auto& value, const char* what,
                             auto min, auto max) {
    app.add_option(name, value, what)
        ->check(CLI::Range(static_cast<double>(min), static_cast<double>(max)))
        ->capture_default_str();
  };
  OffloadConfig& optimizer = options.rank.optimizer;
  optimizer.threads = 0;
  app.add_option("--store", options.store, "Store to create")->required();
  app.add_option("--device", options.devices,
                 "cpu or cuda:N; a list with commas gives rank r the r-th")
      ->capture_default_str();
  number("--params", options.parameters, "About how many parameters", 1,
         400'000'000'000);
  number("--steps", options.steps, "Steps to publish", 0, 1'000'000);
  number("--anchor-every", options.anchor_every, "Steps from anchor to anchor",
         1, 1'000'000);
  number("--keep-anchors", options.keep_anchors,
         "Drop what is older than this many anchors; 0 keeps all", 0, 1000);
  app.add_option("--optimizer", options.optimizer)
      ->check(CLI::IsMember({"adamw", "sign_sgd"}))
      ->capture_default_str();
  number("--rate", optimizer.rate, "Learning rate", 1e-12, 1.0);
  number("--micro-batches", optimizer.micro_batches,
         "Whose gradients are summed for a step", 1, 1000);
  app.add_flag("--fp8", options.rank.fp8,
               "Publish projections as f8_e4m3 with scales of 128x128 blocks");
  app.add_flag("--freeze-embedding", options.rank.freeze_embedding,
               "Never update the embedding");
  number("--ranks", options.ranks, "Ranks, a thread each, with a shard each", 1,
         64);
  number("--threads", optimizer.threads,
         "Threads of a rank's optimizer; 0: its share of the cores", 0, 1024);
  number("--chunk-elements", optimizer.chunk_elements,
         "Elements of a pinned slot", 128, 1 << 30);
  number("--slots", optimizer.slots, "Pinned slots", 1, 64);
  number("--ring-bytes", options.rank.ring_bytes,
         "Device memory for encoded parts", 1 << 16, std::uint64_t{1} << 40);
  app.add_option("--seed", options.seed, "Of weights and gradients")
      ->capture_default_str();
  app.add_option("--json", options.report,
                 "File for a JSON line about each version");
  app.add_option("--checkpoint", options.checkpoint,
                 "Directory for model.safetensors of the last version, from "
                 "the masters");
  CLI::Option* const progress =
      app.add_option("--progress", options.progress,
                     "Directory in which inference engines say what they hold");
  app.add_option("--wait-for", options.wait_for,
                 "NAME or NAME@VERSION (repeatable): before each next step, "
                 "wait until this engine holds the last version")
      ->needs(progress);
  number("--timeout", options.timeout_seconds, "Seconds that a wait may take",
         1, 86'400);
  CLI11_PARSE(app, argc, argv);

  const absl::Status status = Train(options);
  if (status.ok()) return 0;
  std::fprintf(stderr, "kedge_example_offload_trainer: %s\n",
               std::string(status.message()).c_str());
  return 1;
}

}  // namespace
}  // namespace kedge::example

int main(int argc, char** argv) { return kedge::example::Main(argc, argv); }
