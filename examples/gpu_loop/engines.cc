#include "kedge/examples/gpu_loop/engines.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kedge/format/status.h"

namespace kedge::example {

absl::Status OnPlaces(const Host& host, std::size_t places,
                      const std::function<absl::Status(std::size_t)>& body) {
  std::vector<absl::Status> outcomes(places);
  std::vector<std::thread> threads;
  for (std::size_t p = 0; p < places; ++p) {
    threads.emplace_back([&, p] { outcomes[p] = body(p); });
  }
  for (std::thread& thread : threads) thread.join();
  for (std::size_t p = 0; p < places; ++p) {
    KEDGE_RETURN_IF_ERROR(Annotate(outcomes[p], PlaceName(host.options(), p)));
  }
  return absl::OkStatus();
}

absl::StatusOr<EngineRanks> MakeEngines(Host& host, std::uint32_t engines,
                                        const FollowerOptions& common,
                                        const TensorTable& table) {
  const std::uint32_t tp = host.options().tp;
  EngineRanks ranks(std::size_t{engines} * tp);
  KEDGE_RETURN_IF_ERROR(
      OnPlaces(host, ranks.size(), [&](std::size_t p) -> absl::Status {
        FollowerOptions follower = common;
        follower.lease_id = "gpu-loop";
        follower.group.name = "tp";
        if (host.options().engines > 1) {
          absl::StrAppend(&follower.lease_id, "-e", p / tp);
          absl::StrAppend(&follower.group.name, " of engine ", p / tp);
        }
        follower.group.rank = static_cast<std::uint32_t>(p % tp);
        follower.group.size = tp;
        follower.group.reduce = host.ReduceOf(p);
        KEDGE_ASSIGN_OR_RETURN(
            ranks[p],
            EngineRank::Create(table, host.device(p), std::move(follower)));
        return absl::OkStatus();
      }));
  return ranks;
}

std::uint64_t WeightBytes(const Host& host, const EngineRanks& ranks,
                          std::uint32_t engine) {
  const std::uint32_t tp = host.options().tp;
  std::uint64_t bytes = 0;
  for (std::uint32_t r = 0; r < tp; ++r) {
    bytes += ranks[std::size_t{engine} * tp + r]->weight_bytes();
  }
  return bytes;
}

void EngineProgress::Add(std::size_t place, const UpdateResult& result) {
  const std::lock_guard<std::mutex> lock(mutex_);
  results_[place].push_back(result);
  changed_.notify_all();
}

void EngineProgress::Fail(const absl::Status& status) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (failure_.ok()) failure_ = status;
  changed_.notify_all();
}

absl::Status EngineProgress::WaitFor(std::uint64_t step,
                                     std::chrono::seconds timeout) {
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
                     " s until every engine rank holds v", step));
  }
  return failure_;
}

std::vector<UpdateResult> EngineProgress::ResultsOf(std::size_t place) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return results_[place];
}

void Follow(const Host& host, EngineRank& rank, std::size_t place,
            std::uint64_t last, EngineProgress& progress) {
  std::uint64_t held = 0;
  while (held < last) {
    const absl::StatusOr<UpdateResult> result =
        rank.follower().WaitForUpdate(host.options().timeout);
    if (!result.ok()) {
      progress.Fail(
          Annotate(result.status(), PlaceName(host.options(), place)));
      return;
    }
    held = result->version.step;
    progress.Add(place, *result);
  }
}

}  // namespace kedge::example
