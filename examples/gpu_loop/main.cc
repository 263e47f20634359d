// The whole loop on the devices of one host: a trainer whose optimizer lives in
// host memory and whose hook publishes every step, and a tensor-parallel
// inference engine of two ranks that follows version by version, in place. Each
// version is verified by both ranks before the trainer takes its next step. At
// the end every weight of both ranks is compared with the trainer's own
// masters, a fresh engine joins late and is compared likewise, and the store is
// judged by fsck, every byte of it.

#include <stdlib.h>
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/base/thread_annotations.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "kedge/engine/io/file_system.h"
#include "kedge/examples/gpu_loop/engine_rank.h"
#include "kedge/examples/gpu_loop/nccl_sum.h"
#include "kedge/examples/gpu_loop/thread_sum.h"
#include "kedge/examples/offload_trainer/moe_model.h"
#include "kedge/examples/offload_trainer/open_device.h"
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
using Reduce = std::function<absl::Status(std::span<std::uint64_t>)>;

constexpr std::uint32_t kEngineRanks = 2;

struct Options {
  std::string store;  // empty: a directory that is removed
  std::string device = "cpu";
  std::vector<std::string> engine_devices;  // empty: the trainer's
  std::uint64_t parameters = 100'000'000;
  std::uint64_t steps = 20;
  std::uint64_t anchor_every = 3;
  std::string optimizer = "adamw";
  int fp8 = 0;
  std::uint64_t seed = 1;
  RankOptions rank;
  std::string nccl = "auto";
  std::string nccl_library = "libnccl.so.2";
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

// What an engine rank did, seen by the trainer's thread.
class EngineProgress {
 public:
  void Add(std::uint32_t rank, const UpdateResult& result) {
    const std::lock_guard<std::mutex> lock(mutex_);
    results_[rank].push_back(result);
    changed_.notify_all();
  }
  void Fail(std::uint32_t rank, const absl::Status& status) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (failure_.ok()) {
      failure_ = Annotate(status, absl::StrCat("engine rank ", rank));
    }
    changed_.notify_all();
  }
  // Until both ranks hold `step`, or one has failed.
  absl::Status WaitFor(std::uint64_t step, std::chrono::seconds timeout) {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto there = [&] {
      return std::all_of(results_.begin(), results_.end(), [&](const auto& r) {
        return !r.empty() && r.back().version.step >= step;
      });
    };
    if (!changed_.wait_for(lock, timeout,
                           [&] { return !failure_.ok() || there(); })) {
      return absl::DeadlineExceededError(
          absl::StrCat("waited ", timeout.count(),
                       " s until both engine ranks hold v", step));
    }
    return failure_;
  }
  std::vector<UpdateResult> ResultsOf(std::uint32_t rank) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return results_[rank];
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::vector<UpdateResult>> results_ ABSL_GUARDED_BY(mutex_){
      kEngineRanks};
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
};

// Runs `body(rank)` on a thread for each engine rank; the first error.
template <typename Body>
absl::Status OnRanks(Body&& body) {
  std::vector<absl::Status> outcomes(kEngineRanks);
  std::vector<std::thread> threads;
  for (std::uint32_t r = 0; r < kEngineRanks; ++r) {
    threads.emplace_back([&, r] { outcomes[r] = body(r); });
  }
  for (std::thread& thread : threads) thread.join();
  for (std::uint32_t r = 0; r < kEngineRanks; ++r) {
    KEDGE_RETURN_IF_ERROR(
        Annotate(outcomes[r], absl::StrCat("engine rank ", r)));
  }
  return absl::OkStatus();
}

// The devices of the run, and how engine ranks add up over them.
struct Host {
  std::unique_ptr<Device> trainer;
  std::vector<std::unique_ptr<Device>> others;
  std::vector<Device*> engines;  // of each rank
  std::vector<std::string> engine_names;
  std::unique_ptr<ThreadSum> thread_sum;
  std::unique_ptr<NcclSum> nccl;
  std::string reducer;

  Reduce ReduceOf(std::uint32_t rank) {
    return nccl != nullptr ? nccl->ForRank(rank) : thread_sum->ForRank(rank);
  }
};

absl::Status OpenHost(const Options& options, Host* host) {
  const std::chrono::seconds timeout(options.timeout_seconds);
  KEDGE_ASSIGN_OR_RETURN(host->trainer, OpenDevice(options.device));
  std::vector<std::string> opened = {options.device};
  std::vector<Device*> devices = {host->trainer.get()};
  for (std::uint32_t r = 0; r < kEngineRanks; ++r) {
    const std::string name =
        options.engine_devices.empty()
            ? options.device
            : options.engine_devices[r % options.engine_devices.size()];
    auto at = std::find(opened.begin(), opened.end(), name);
    if (at == opened.end()) {
      KEDGE_ASSIGN_OR_RETURN(std::unique_ptr<Device> device, OpenDevice(name));
      devices.push_back(device.get());
      host->others.push_back(std::move(device));
      opened.push_back(name);
      at = std::prev(opened.end());
    }
    host->engines.push_back(
        devices[static_cast<std::size_t>(at - opened.begin())]);
    host->engine_names.push_back(name);
  }
  host->thread_sum = std::make_unique<ThreadSum>(kEngineRanks, timeout);
  host->reducer = "in process";
  std::vector<int> ordinals;
  for (const std::string& name : host->engine_names) {
    absl::string_view rest = name;
    int ordinal = 0;
    if (absl::ConsumePrefix(&rest, "cuda:") &&
        absl::SimpleAtoi(rest, &ordinal)) {
      ordinals.push_back(ordinal);
    }
  }
  // NCCL wants a GPU of its own for each rank.
  const bool possible =
      ordinals.size() == kEngineRanks && ordinals[0] != ordinals[1];
  if (options.nccl == "off" || (options.nccl == "auto" && !possible)) {
    return absl::OkStatus();
  }
  absl::StatusOr<std::unique_ptr<NcclSum>> nccl =
      NcclSum::Open(options.nccl_library, host->engines, ordinals, timeout);
  if (nccl.ok()) {
    host->nccl = *std::move(nccl);
    host->reducer = absl::StrCat("NCCL ", host->nccl->version());
    return absl::OkStatus();
  }
  if (options.nccl == "on") return nccl.status();
  std::printf("%s; ranks add up in process\n",
              std::string(nccl.status().message()).c_str());
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::unique_ptr<EngineRank>>> MakeEngine(
    const Options& options, Host& host, const TensorTable& table) {
  std::vector<std::unique_ptr<EngineRank>> engine(kEngineRanks);
  KEDGE_RETURN_IF_ERROR(OnRanks([&](std::uint32_t r) -> absl::Status {
    FollowerOptions follower;
    follower.store_path = options.store;
    follower.every_version = true;
    follower.lease_id = "gpu-loop";
    follower.group.rank = r;
    follower.group.size = kEngineRanks;
    follower.group.name = "tp";
    follower.group.reduce = host.ReduceOf(r);
    KEDGE_ASSIGN_OR_RETURN(engine[r], EngineRank::Create(table, host.engines[r],
                                                         std::move(follower)));
    return absl::OkStatus();
  }));
  return engine;
}

// An engine rank's thread: follows until it holds `last`. A version that does
// not verify counts as a divergence, which ends the run.
void Follow(EngineRank& engine, std::uint32_t rank, std::uint64_t last,
            std::chrono::seconds timeout, EngineProgress& progress) {
  std::uint64_t held = 0;
  while (held < last) {
    const absl::StatusOr<UpdateResult> result =
        engine.follower().WaitForUpdate(timeout);
    if (!result.ok()) {
      progress.Fail(rank, result.status());
      return;
    }
    held = result->version.step;
    progress.Add(rank, *result);
  }
}

struct StepLine {
  StepReport trainer;
  double step_seconds = 0;   // the trainer's: all of it
  double ready_seconds = 0;  // from published to held by both ranks
  // The slower rank's.
  double prefetch_seconds = 0;
  double apply_seconds = 0;
  double verify_seconds = 0;
  double pause_seconds = 0;
};

// What both ranks did for `step`; nothing if an update passed over it.
void AddEngines(EngineProgress& progress, std::uint64_t step, StepLine* line) {
  for (std::uint32_t r = 0; r < kEngineRanks; ++r) {
    for (const UpdateResult& result : progress.ResultsOf(r)) {
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

// The trainer's steps, the engine following on threads of its own.
absl::StatusOr<std::vector<StepLine>> RunSteps(
    const Options& options, TrainerRank& trainer,
    std::vector<std::unique_ptr<EngineRank>>& engine, EngineProgress& progress,
    std::uint64_t elements) {
  const std::chrono::seconds timeout(options.timeout_seconds);
  std::vector<std::thread> threads;
  for (std::uint32_t r = 0; r < kEngineRanks; ++r) {
    threads.emplace_back(
        [&, r] { Follow(*engine[r], r, options.steps, timeout, progress); });
  }
  std::vector<StepLine> lines;
  absl::Status failed;
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
    failed = progress.WaitFor(step, timeout);
    line.ready_seconds = SecondsSince(start);
    AddEngines(progress, step, &line);
    Print(step, line, elements);
    lines.push_back(std::move(line));
  }
  if (!failed.ok()) {
    std::fprintf(stderr, "%s\n", std::string(failed.message()).c_str());
    std::fprintf(stderr, "waiting for the engine to notice\n");
  }
  for (std::thread& thread : threads) thread.join();
  KEDGE_RETURN_IF_ERROR(failed);
  return lines;
}

absl::Status RunLoop(const Options& options, Json* report) {
  Host host;
  KEDGE_RETURN_IF_ERROR(OpenHost(options, &host));
  const MoeModel model = MakeMoeModel(ChooseDims(options.parameters));
  const SyntheticGradient gradient(options.seed);
  KEDGE_ASSIGN_OR_RETURN(const std::unique_ptr<TrainerRank> trainer,
                         TrainerRank::Create(options.rank, &model, &gradient,
                                             host.trainer.get(), nullptr));
  const TensorTable& table = trainer->hook().store_writer().table();
  KEDGE_ASSIGN_OR_RETURN(std::vector<std::unique_ptr<EngineRank>> engine,
                         MakeEngine(options, host, table));
  const HookMemory& memory = trainer->hook().memory();
  std::printf(
      "%s%s, %llu parameters in %zu tensors, %llu steps, anchors every %llu\n"
      "trainer on %s; engine ranks on %s and %s, %.3f and %.3f GB, sums %s\n"
      "the hook holds %.1f MiB of device memory, %.1f MiB pinned, %.1f MiB of "
      "residual snapshots\n",
      options.optimizer.c_str(), options.fp8 != 0 ? ", fp8 engines" : ", bf16",
      static_cast<unsigned long long>(model.elements()), table.size(),
      static_cast<unsigned long long>(options.steps),
      static_cast<unsigned long long>(options.anchor_every),
      host.trainer->name().c_str(), host.engines[0]->name().c_str(),
      host.engines[1]->name().c_str(),
      static_cast<double>(engine[0]->weight_bytes()) / 1e9,
      static_cast<double>(engine[1]->weight_bytes()) / 1e9,
      host.reducer.c_str(),
      static_cast<double>(memory.device_bytes) / (1 << 20),
      static_cast<double>(memory.pinned_bytes) / (1 << 20),
      static_cast<double>(memory.residual_bytes) / (1 << 20));
  std::fflush(stdout);

  // The engine boots: v0's anchor.
  KEDGE_RETURN_IF_ERROR(OnRanks(
      [&](std::uint32_t r) { return engine[r]->follower().Join().status(); }));
  EngineProgress progress;
  KEDGE_ASSIGN_OR_RETURN(
      const std::vector<StepLine> lines,
      RunSteps(options, *trainer, engine, progress, model.elements()));

  // Every update has verified all tensors, or it would have failed.
  std::uint64_t verified = 0;
  for (std::uint32_t r = 0; r < kEngineRanks; ++r) {
    std::uint64_t last = 0;
    for (const UpdateResult& result : progress.ResultsOf(r)) {
      if (result.joined || result.tensors_verified != table.size() ||
          result.version.step != last + result.deltas) {
        return absl::InternalError(absl::StrCat(
            "engine rank ", r, ": v", result.version.step, " after v", last,
            ": ", result.deltas, " deltas, ", result.tensors_verified, " of ",
            table.size(), " tensors verified"));
      }
      last = result.version.step;
      verified += result.deltas;
    }
  }
  std::printf("%llu of %llu deltas verified\n",
              static_cast<unsigned long long>(verified),
              static_cast<unsigned long long>(options.steps * kEngineRanks));
  if (verified != options.steps * kEngineRanks) {
    return absl::InternalError("not every delta was verified by both ranks");
  }

  KEDGE_RETURN_IF_ERROR(trainer->CheckLiveWeights());
  ReferenceState reference(/*keep_bytes=*/true);
  trainer->AddTo(&reference);
  const auto compare = [&](const char* whose) -> absl::Status {
    KEDGE_RETURN_IF_ERROR(OnRanks(
        [&](std::uint32_t r) { return engine[r]->CompareWith(reference); }));
    std::printf("%s: every weight of both ranks is the trainer's, %llu bytes\n",
                whose,
                static_cast<unsigned long long>(engine[0]->weight_bytes() +
                                                engine[1]->weight_bytes()));
    return absl::OkStatus();
  };
  KEDGE_RETURN_IF_ERROR(compare("the engine"));

  // Another engine, late: its memory held nothing.
  engine.clear();
  KEDGE_ASSIGN_OR_RETURN(engine, MakeEngine(options, host, table));
  std::vector<UpdateResult> joined(kEngineRanks);
  const Clock::time_point start = Clock::now();
  KEDGE_RETURN_IF_ERROR(OnRanks([&](std::uint32_t r) -> absl::Status {
    KEDGE_ASSIGN_OR_RETURN(joined[r], engine[r]->follower().Join());
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
  KEDGE_RETURN_IF_ERROR(compare("the late engine"));

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

  const auto median = [&](auto value) {
    std::vector<double> values;
    for (std::size_t i = 2; i < lines.size(); ++i) {  // from v3 on
      values.push_back(value(lines[i]));
    }
    return Median(std::move(values));
  };
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  *report = {
      {"example", "gpu_loop"},
      {"trainer_device", host.trainer->name()},
      {"engine_devices", {host.engines[0]->name(), host.engines[1]->name()}},
      {"reducer", host.reducer},
      {"commit", options.commit},
      {"optimizer", options.optimizer},
      {"fp8", options.fp8 != 0},
      {"parameters", model.elements()},
      {"tensors", table.size()},
      {"steps", options.steps},
      {"anchor_every", options.anchor_every},
      {"deltas_verified", verified},
      {"deltas_expected", options.steps * kEngineRanks},
      {"weights_compared_bytes",
       2 * (engine[0]->weight_bytes() + engine[1]->weight_bytes())},
      {"late_join_seconds", join_seconds},
      {"late_join_deltas", joined[0].deltas},
      {"fsck_deep_clean", fsck.clean()},
      {"fsck_records", fsck.records_checked},
      {"fsck_bytes", fsck.bytes_checked},
      {"hook_device_bytes", memory.device_bytes},
      {"hook_pinned_bytes", memory.pinned_bytes},
      {"hook_residual_bytes", memory.residual_bytes},
      {"host_memory_max_kib", usage.ru_maxrss},
      {"medians_from_v3",
       {{"pass_seconds",
         median([](const StepLine& l) { return l.trainer.pass_seconds; })},
        {"drain_seconds", median([](const StepLine& l) {
           return l.trainer.hook.drain_seconds;
         })},
        {"guard_seconds", median([](const StepLine& l) {
           return l.trainer.hook.guard_seconds;
         })},
        {"commit_seconds", median([](const StepLine& l) {
           return l.trainer.hook.commit_seconds;
         })},
        {"engine_prefetch_seconds",
         median([](const StepLine& l) { return l.prefetch_seconds; })},
        {"engine_apply_seconds",
         median([](const StepLine& l) { return l.apply_seconds; })},
        {"engine_verify_seconds",
         median([](const StepLine& l) { return l.verify_seconds; })},
        {"engine_pause_seconds",
         median([](const StepLine& l) { return l.pause_seconds; })},
        {"published_to_ready_seconds",
         median([](const StepLine& l) { return l.ready_seconds; })}}}};
  Json steps = Json::array();
  for (std::size_t i = 0; i < lines.size(); ++i) {
    steps.push_back(JsonOf(i + 1, lines[i]));
  }
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
      "A trainer with the optimizer hook and a tensor-parallel inference "
      "engine of two ranks, on the devices of one host, version by version.",
      "kedge_example_gpu_loop");
  app.add_option("--device", options.device, "The trainer's: cpu or cuda:N")
      ->capture_default_str();
  app.add_option("--engine-device", options.engine_devices,
                 "An engine rank's (repeatable); by default the trainer's");
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
  app.add_option("--nccl", options.nccl,
                 "How engine ranks add up: auto, if they have a GPU each and "
                 "the library is there")
      ->check(CLI::IsMember({"auto", "on", "off"}))
      ->capture_default_str();
  app.add_option("--nccl-library", options.nccl_library)->capture_default_str();
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
