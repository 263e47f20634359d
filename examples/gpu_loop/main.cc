// The whole loop on the devices of one host: a trainer whose optimizer lives in
// host memory and whose hook publishes every step, and tensor-parallel
// inference engines that follow version by version, in place, each on its own.
// Each version is verified by every rank of every engine before the trainer
// takes its next step. At the end every weight of all of them is compared with
// the trainer's own masters, a fresh engine joins late and is compared
// likewise, and the store is judged by fsck, every byte of it.

#include <stdlib.h>
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kedge/engine/io/file_system.h"
#include "kedge/examples/gpu_loop/engine_rank.h"
#include "kedge/examples/gpu_loop/engines.h"
#include "kedge/examples/gpu_loop/host.h"
#include "kedge/examples/offload_trainer/moe_model.h"
#include "kedge/examples/offload_trainer/reference_state.h"
#include "kedge/examples/offload_trainer/synthetic_gradient.h"
#include "kedge/examples/offload_trainer/trainer_rank.h"
#include "kedge/format/status.h"
#include "kedge/reader/fsck.h"
#include "nlohmann/json.hpp"

namespace kedge::example {
namespace {

using Clock = std::chrono::steady_clock;
using Json = nlohmann::ordered_json;

struct Options {
  std::string store;  // empty: a directory that is removed
  HostOptions host;
  int io_threads = FollowerOptions().io_threads;
  std::uint64_t parameters = 100'000'000;
  std::uint64_t steps = 20;
  std::uint64_t anchor_every = 3;
  std::string optimizer = "adamw";
  int fp8 = 0;
  std::uint64_t seed = 1;
  RankOptions rank;
  std::int64_t timeout_seconds = 300;
  std::string json;
  std::string commit;
};

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

double Median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const std::size_t n = values.size();
  return n % 2 == 1 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

// "a", "a and b", "a, b and c".
std::string List(const std::vector<std::string>& items) {
  std::string text;
  for (std::size_t i = 0; i < items.size(); ++i) {
    absl::StrAppend(&text,
                    i == 0                  ? ""
                    : i + 1 == items.size() ? " and "
                                            : ", ",
                    items[i]);
  }
  return text;
}

// The names that an engine's devices have themselves.
std::vector<std::string> DeviceNamesOf(const Host& host, std::uint32_t engine) {
  std::vector<std::string> names;
  const std::uint32_t tp = host.options().tp;
  for (std::uint32_t r = 0; r < tp; ++r) {
    names.push_back(host.device(std::size_t{engine} * tp + r)->name());
  }
  return names;
}

// "ranks on cpu and cpu, 0.001 and 0.001 GB, sums in process"
std::string DescribeEngine(const Host& host, const EngineRanks& ranks,
                           std::uint32_t engine) {
  const std::uint32_t tp = host.options().tp;
  std::vector<std::string> sizes;
  for (std::uint32_t r = 0; r < tp; ++r) {
    const EngineRank& rank = *ranks[std::size_t{engine} * tp + r];
    sizes.push_back(absl::StrFormat(
        "%.3f", static_cast<double>(rank.weight_bytes()) / 1e9));
  }
  return absl::StrCat(tp == 1 ? "rank on " : "ranks on ",
                      List(DeviceNamesOf(host, engine)), ", ", List(sizes),
                      " GB, sums ", host.reducer(engine));
}

struct StepLine {
  StepReport trainer;
  double step_seconds = 0;   // the trainer's: all of it
  double ready_seconds = 0;  // from published to held by every engine rank
  // The slowest rank's, of all engines.
  double prefetch_seconds = 0;
  double apply_seconds = 0;
  double verify_seconds = 0;
  double pause_seconds = 0;
};

// What the ranks did for `step`; nothing if an update passed over it.
void AddEngines(EngineProgress& progress, std::size_t places,
                std::uint64_t step, StepLine* line) {
  for (std::size_t p = 0; p < places; ++p) {
    for (const UpdateResult& result : progress.ResultsOf(p)) {
      if (result.version.step != step) continue;
      const auto raise = [](double* value, double to) {
        *value = std::max(*value, to);
      };
      raise(&line->prefetch_seconds, result.read_seconds);
      raise(&line->apply_seconds, result.apply_seconds);
      raise(&line->verify_seconds, result.verify_seconds);
      raise(&line->pause_seconds, result.pause_seconds);
    }
  }
}

constexpr char kHeader[] =
    "  step  | changed %  delta MiB anchor MiB |   wait    pass   drain   "
    "guard "
    " commit    step | prefetch   apply  verify   pause   ready |  ms\n";

void Print(std::uint64_t step, const StepLine& line, std::uint64_t elements) {
  const HookResult& hook = line.trainer.hook;
  const auto mib = [](std::uint64_t bytes) {
    return static_cast<double>(bytes) / (1 << 20);
  };
  std::printf(
      "  v%-5llu | %9.3f %10.3f %10.1f | %6.1f %7.1f %7.1f %7.1f %7.1f %7.1f | "
      "%8.1f %7.2f %7.2f %7.2f %7.1f |\n",
      static_cast<unsigned long long>(step),
      100 * static_cast<double>(hook.publish.nnz) /
          static_cast<double>(elements),
      mib(hook.publish.bytes), mib(hook.publish.anchor_bytes),
      1e3 * line.trainer.begin_seconds, 1e3 * line.trainer.pass_seconds,
      1e3 * hook.drain_seconds, 1e3 * hook.guard_seconds,
      1e3 * hook.commit_seconds, 1e3 * line.step_seconds,
      1e3 * line.prefetch_seconds, 1e3 * line.apply_seconds,
      1e3 * line.verify_seconds, 1e3 * line.pause_seconds,
      1e3 * line.ready_seconds);
  std::fflush(stdout);
}

Json JsonOf(std::uint64_t step, const StepLine& line) {
  const HookResult& hook = line.trainer.hook;
  return {{"step", step},
          {"nnz", hook.publish.nnz},
          {"delta_bytes", hook.publish.bytes},
          {"anchor_bytes", hook.publish.anchor_bytes},
          {"begin_wait_seconds", line.trainer.begin_seconds},
          {"pass_seconds", line.trainer.pass_seconds},
          {"drain_seconds", hook.drain_seconds},
          {"guard_seconds", hook.guard_seconds},
          {"commit_seconds", hook.commit_seconds},
          {"step_seconds", line.step_seconds},
          {"engine_prefetch_seconds", line.prefetch_seconds},
          {"engine_apply_seconds", line.apply_seconds},
          {"engine_verify_seconds", line.verify_seconds},
          {"engine_pause_seconds", line.pause_seconds},
          {"published_to_ready_seconds", line.ready_seconds}};
}

// The trainer's steps, the engines following on threads of their own.
absl::StatusOr<std::vector<StepLine>> RunSteps(const Options& options,
                                               const Host& host,
                                               TrainerRank& trainer,
                                               const EngineRanks& ranks,
                                               EngineProgress& progress,
                                               std::uint64_t elements) {
  std::vector<std::thread> threads;
  for (std::size_t p = 0; p < ranks.size(); ++p) {
    threads.emplace_back(
        [&, p] { Follow(host, *ranks[p], p, options.steps, progress); });
  }
  std::vector<StepLine> lines;
  absl::Status failed;
  if (options.host.engines > 1) {
    std::printf("engines' times are the slowest rank's, of all engines\n");
  }
  std::printf("%s", kHeader);
  for (std::uint64_t step = 1; step <= options.steps && failed.ok(); ++step) {
    StepLine line;
    Clock::time_point start = Clock::now();
    absl::StatusOr<StepReport> report =
        trainer.Step(step, step % options.anchor_every == 0);
    if (!report.ok()) {
      failed = report.status();
      break;
    }
    line.step_seconds = SecondsSince(start);
    line.trainer = *std::move(report);
    for (const std::string& warning : line.trainer.hook.publish.warnings) {
      std::fprintf(stderr, "warning: %s\n", warning.c_str());
    }
    failed = line.trainer.hook.publish.anchor_status;
    if (!failed.ok()) break;
    start = Clock::now();
    failed = progress.WaitFor(step, options.host.timeout);
    line.ready_seconds = SecondsSince(start);
    AddEngines(progress, ranks.size(), step, &line);
    Print(step, line, elements);
    lines.push_back(std::move(line));
  }
  if (!failed.ok()) {
    std::fprintf(stderr, "%s\n", std::string(failed.message()).c_str());
    std::fprintf(stderr, "waiting for the %s to notice\n",
                 options.host.engines == 1 ? "engine" : "engines");
  }
  for (std::thread& thread : threads) thread.join();
  KEDGE_RETURN_IF_ERROR(failed);
  return lines;
}

absl::Status RunLoop(const Options& options, Json* report) {
  KEDGE_ASSIGN_OR_RETURN(const std::unique_ptr<Host> opened,
                         Host::Open(options.host));
  Host& host = *opened;
  const std::uint32_t engines = options.host.engines;
  const std::uint32_t tp = options.host.tp;
  const MoeModel model = MakeMoeModel(ChooseDims(options.parameters));
  const SyntheticGradient gradient(options.seed);
  KEDGE_ASSIGN_OR_RETURN(const std::unique_ptr<TrainerRank> trainer,
                         TrainerRank::Create(options.rank, &model, &gradient,
                                             host.trainer(), nullptr));
  const TensorTable& table = trainer->hook().store_writer().table();
  FollowerOptions follower;
  follower.store_path = options.store;
  follower.every_version = true;
  follower.io_threads = options.io_threads;
  KEDGE_ASSIGN_OR_RETURN(EngineRanks ranks,
                         MakeEngines(host, engines, follower, table));
  const HookMemory& memory = trainer->hook().memory();
  std::printf(
      "%s%s, %llu parameters in %zu tensors, %llu steps, anchors every %llu\n"
      "trainer on %s",
      options.optimizer.c_str(), options.fp8 != 0 ? ", fp8 engines" : ", bf16",
      static_cast<unsigned long long>(model.elements()), table.size(),
      static_cast<unsigned long long>(options.steps),
      static_cast<unsigned long long>(options.anchor_every),
      host.trainer()->name().c_str());
  for (std::uint32_t e = 0; e < engines; ++e) {
    std::printf("%s%s", engines == 1 ? "; engine " : "\n",
                engines == 1 ? "" : absl::StrCat("engine ", e, ": ").c_str());
    std::printf("%s", DescribeEngine(host, ranks, e).c_str());
  }
  std::printf(
      "\nthe hook holds %.1f MiB of device memory, %.1f MiB pinned, "
      "%.1f MiB of residual snapshots\n",
      static_cast<double>(memory.device_bytes) / (1 << 20),
      static_cast<double>(memory.pinned_bytes) / (1 << 20),
      static_cast<double>(memory.residual_bytes) / (1 << 20));
  std::fflush(stdout);

  // The engines boot: v0's anchor.
  KEDGE_RETURN_IF_ERROR(OnPlaces(host, ranks.size(), [&](std::size_t p) {
    return ranks[p]->follower().Join().status();
  }));
  EngineProgress progress(ranks.size());
  KEDGE_ASSIGN_OR_RETURN(
      const std::vector<StepLine> lines,
      RunSteps(options, host, *trainer, ranks, progress, model.elements()));

  // Every update has verified all tensors, or it would have failed.
  std::uint64_t verified = 0;
  for (std::size_t p = 0; p < ranks.size(); ++p) {
    std::uint64_t last = 0;
    for (const UpdateResult& result : progress.ResultsOf(p)) {
      if (result.joined || result.tensors_verified != table.size() ||
          result.version.step != last + result.deltas) {
        return absl::InternalError(absl::StrCat(
            PlaceName(options.host, p), ": v", result.version.step, " after v",
            last, ": ", result.deltas, " deltas, ", result.tensors_verified,
            " of ", table.size(), " tensors verified"));
      }
      last = result.version.step;
      verified += result.deltas;
    }
  }
  const std::uint64_t expected = options.steps * ranks.size();
  std::printf("%llu of %llu deltas verified\n",
              static_cast<unsigned long long>(verified),
              static_cast<unsigned long long>(expected));
  if (verified != expected) {
    return absl::InternalError("not every delta was verified by every rank");
  }

  KEDGE_RETURN_IF_ERROR(trainer->CheckLiveWeights());
  ReferenceState reference(/*keep_bytes=*/true);
  trainer->AddTo(&reference);
  const std::string all = tp == 1   ? "its rank"
                          : tp == 2 ? "both ranks"
                                    : absl::StrCat("all ", tp, " ranks");
  std::uint64_t compared_bytes = 0;
  const auto compare = [&](std::uint32_t count,
                           const char* whose) -> absl::Status {
    KEDGE_RETURN_IF_ERROR(OnPlaces(host, ranks.size(), [&](std::size_t p) {
      return ranks[p]->CompareWith(reference);
    }));
    for (std::uint32_t e = 0; e < count; ++e) {
      const std::uint64_t bytes = WeightBytes(host, ranks, e);
      std::printf("%s: every weight of %s is the trainer's, %llu bytes\n",
                  count == 1 ? whose : absl::StrCat("engine ", e).c_str(),
                  all.c_str(), static_cast<unsigned long long>(bytes));
      compared_bytes += bytes;
    }
    return absl::OkStatus();
  };
  KEDGE_RETURN_IF_ERROR(compare(engines, "the engine"));

  // Another engine, late, where engine 0 was: its memory held nothing.
  ranks.clear();
  KEDGE_ASSIGN_OR_RETURN(ranks, MakeEngines(host, 1, follower, table));
  std::vector<UpdateResult> joined(tp);
  const Clock::time_point start = Clock::now();
  KEDGE_RETURN_IF_ERROR(OnPlaces(host, tp, [&](std::size_t p) -> absl::Status {
    KEDGE_ASSIGN_OR_RETURN(joined[p], ranks[p]->follower().Join());
    return absl::OkStatus();
  }));
  const double join_seconds = SecondsSince(start);
  if (joined[0].version.step != options.steps) {
    return absl::InternalError(
        absl::StrCat("the late engine joined v", joined[0].version.step));
  }
  std::printf(
      "a late engine joined v%llu from an anchor and %llu deltas in "
      "%.3f s\n",
      static_cast<unsigned long long>(joined[0].version.step),
      static_cast<unsigned long long>(joined[0].deltas), join_seconds);
  KEDGE_RETURN_IF_ERROR(compare(1, "the late engine"));

  FsckOptions fsck_options;
  fsck_options.store_path = options.store;
  fsck_options.deep = true;
  KEDGE_ASSIGN_OR_RETURN(const FsckReport fsck, Fsck(fsck_options));
  std::printf(
      "fsck --deep: %s",
      fsck.clean()
          ? absl::StrFormat(
                "clean, %u steps, %u anchors, %u "
                "records, %.3f GB in %.1f s\n",
                fsck.steps_checked, fsck.anchors_checked, fsck.records_checked,
                static_cast<double>(fsck.bytes_checked) / 1e9, fsck.seconds)
                .c_str()
          : FormatFsckReport(fsck).c_str());
  if (!fsck.clean()) return absl::DataLossError("fsck has findings");

  Json steps = Json::array();
  for (std::size_t i = 0; i < lines.size(); ++i) {
    steps.push_back(JsonOf(i + 1, lines[i]));
  }
  Json medians = Json::object();
  for (const char* name :
       {"pass_seconds", "drain_seconds", "guard_seconds", "commit_seconds",
        "engine_prefetch_seconds", "engine_apply_seconds",
        "engine_verify_seconds", "engine_pause_seconds",
        "published_to_ready_seconds"}) {
    std::vector<double> values;
    for (std::size_t i = 2; i < steps.size(); ++i) {  // from v3 on
      values.push_back(steps[i].at(name).get<double>());
    }
    medians[name] = Median(std::move(values));
  }
  Json engine_devices = Json::array();
  Json reducers = Json::array();
  for (std::uint32_t e = 0; e < engines; ++e) {
    engine_devices.push_back(DeviceNamesOf(host, e));
    reducers.push_back(host.reducer(e));
  }
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  *report = {{"example", "gpu_loop"},
             {"trainer_device", host.trainer()->name()},
             {"engines", engines},
             {"tp", tp},
             {"engine_devices", engine_devices},  // of each engine's ranks
             {"reducers", reducers},              // of each engine
             {"commit", options.commit},
             {"optimizer", options.optimizer},
             {"fp8", options.fp8 != 0},
             {"parameters", model.elements()},
             {"tensors", table.size()},
             {"steps", options.steps},
             {"anchor_every", options.anchor_every},
             {"deltas_verified", verified},
             {"deltas_expected", expected},
             {"weights_compared_bytes", compared_bytes},
             {"late_join_seconds", join_seconds},
             {"late_join_deltas", joined[0].deltas},
             {"fsck_deep_clean", fsck.clean()},
             {"fsck_records", fsck.records_checked},
             {"fsck_bytes", fsck.bytes_checked},
             {"hook_device_bytes", memory.device_bytes},
             {"hook_pinned_bytes", memory.pinned_bytes},
             {"hook_residual_bytes", memory.residual_bytes},
             {"host_memory_max_kib", usage.ru_maxrss},
             {"medians_from_v3", medians}};
  (*report)["per_step"] = std::move(steps);
  return absl::OkStatus();
}

absl::Status Run(Options& options, const std::string& command) {
  std::string scratch;
  if (options.store.empty()) {
    const char* parent = std::getenv("TMPDIR");
    scratch =
        JoinPath(parent == nullptr ? "/tmp" : parent, "kedge-gpu-loop-XXXXXX");
    if (mkdtemp(scratch.data()) == nullptr) {
      return absl::UnavailableError(
          absl::StrCat(scratch, ": ", std::strerror(errno)));
    }
    options.store = JoinPath(scratch, "store");
  }
  options.rank.writer.store_path = options.store;
  options.rank.fp8 = options.fp8 != 0;
  options.rank.optimizer.rule =
      options.optimizer == "adamw" ? UpdateRule::kAdamW : UpdateRule::kSignSgd;
  if (options.rank.optimizer.threads == 0) {
    options.rank.optimizer.threads =
        static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  }
  options.rank.deadline = std::chrono::seconds(options.timeout_seconds);
  options.host.timeout = std::chrono::seconds(options.timeout_seconds);
  Json report;
  absl::Status status = RunLoop(options, &report);
  if (!scratch.empty()) {
    const absl::Status removed = RemoveTree(*PosixFileSystem(), scratch);
    if (status.ok()) status = removed;
  }
  KEDGE_RETURN_IF_ERROR(status);
  if (options.json.empty()) return absl::OkStatus();
  report["command"] = command;
  std::ofstream file(options.json, std::ios::trunc);
  file << report.dump(1) << "\n";
  file.close();
  if (file) return absl::OkStatus();
  return absl::UnavailableError(
      absl::StrCat(options.json, ": cannot be written"));
}

int Main(int argc, char** argv) {
  Options options;
  options.rank.optimizer.threads = 0;
  CLI::App app(
      "A trainer with the optimizer hook and tensor-parallel inference "
      "engines, on the devices of one host, version by version. The table "
      "shows the slowest rank of all engines.",
      "kedge_example_gpu_loop");
  app.add_option("--device", options.host.device,
                 "The trainer's: cpu or cuda:N")
      ->capture_default_str();
  app.add_option("--engines", options.host.engines,
                 "How many inference engines follow, each on its own")
      ->check(CLI::Range(1, 8))
      ->capture_default_str();
  app.add_option("--tp", options.host.tp, "Ranks of each engine")
      ->check(CLI::Range(1, 8))
      ->capture_default_str();
  app.add_option("--engine-device", options.host.engine_devices,
                 "An engine rank's (repeatable), in turns: engine 0 rank 0, "
                 "engine 0 rank 1, ..., engine 1 rank 0, ...; by default the "
                 "trainer's");
  app.add_option("--io-threads", options.io_threads,
                 "That read files, of each engine rank; each pins 16 MiB")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  app.add_option("--store", options.store,
                 "Store to create; by default one that is removed at the end");
  app.add_option("--params", options.parameters, "About how many parameters")
      ->capture_default_str();
  app.add_option("--steps", options.steps)
      ->check(CLI::Range(1, 1'000'000))
      ->capture_default_str();
  app.add_option("--anchor-every", options.anchor_every)
      ->check(CLI::Range(1, 1'000'000))
      ->capture_default_str();
  app.add_option("--optimizer", options.optimizer)
      ->check(CLI::IsMember({"adamw", "sign_sgd"}))
      ->capture_default_str();
  app.add_option("--fp8", options.fp8,
                 "1: projections as f8_e4m3 with scales of 128x128 blocks")
      ->check(CLI::Range(0, 1))
      ->capture_default_str();
  app.add_option("--rate", options.rank.optimizer.rate, "Learning rate")
      ->capture_default_str();
  app.add_option("--threads", options.rank.optimizer.threads,
                 "Of the optimizer; 0: one per core")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
  app.add_option("--chunk-elements", options.rank.optimizer.chunk_elements,
                 "Elements of a pinned slot")
      ->check(CLI::Range(128, 1 << 30))
      ->capture_default_str();
  app.add_option("--seed", options.seed, "Of weights and gradients")
      ->capture_default_str();
  app.add_option("--nccl", options.host.nccl,
                 "How an engine's ranks add up; auto: with NCCL if they have "
                 "GPUs that no other engine rank has, and the library is there")
      ->check(CLI::IsMember({"auto", "on", "off"}))
      ->capture_default_str();
  app.add_option("--nccl-library", options.host.nccl_library)
      ->capture_default_str();
  app.add_option("--timeout", options.timeout_seconds,
                 "Seconds that a wait may take")
      ->check(CLI::Range(1, 86'400))
      ->capture_default_str();
  app.add_option("--json", options.json, "File for the report");
  app.add_option("--commit", options.commit, "Of this program, for the report");
  CLI11_PARSE(app, argc, argv);

  std::string command;
  for (int i = 0; i < argc; ++i) {
    absl::StrAppend(&command, i == 0 ? "" : " ", argv[i]);
  }
  const absl::Status status = Run(options, command);
  if (status.ok()) return 0;
  std::fprintf(stderr, "kedge_example_gpu_loop: %s\n",
               std::string(status.message()).c_str());
  return 1;
}

}  // namespace
}  // namespace kedge::example

int main(int argc, char** argv) { return kedge::example::Main(argc, argv); }
