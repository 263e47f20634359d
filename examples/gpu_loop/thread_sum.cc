#include "kedge/examples/gpu_loop/thread_sum.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kedge/format/l61.h"

namespace kedge::example {

std::function<absl::Status(std::span<std::uint64_t>)> ThreadSum::ForRank(
    std::uint32_t rank) {
  return [this, rank](std::span<std::uint64_t> values) {
    return Add(rank, values);
  };
}

absl::Status ThreadSum::Add(std::uint32_t rank,
                            std::span<std::uint64_t> values) {
  std::unique_lock<std::mutex> lock(mutex_);
  const std::shared_ptr<Round> round = round_;
  const auto end = [&](absl::Status outcome) {
    round->outcome = std::move(outcome);
    round->ended = true;
    round_ = NewRound();
    changed_.notify_all();
  };
  if (round->arrived++ == 0) round->sum.assign(values.size(), 0);
  if (round->sum.size() != values.size()) {
    end(absl::UnavailableError(
        absl::StrCat("rank ", rank, " comes with ", values.size(),
                     " values, another rank with ", round->sum.size())));
    return round->outcome;
  }
  for (std::size_t i = 0; i < values.size(); ++i) {
    round->sum[i] = L61Add(round->sum[i], values[i]);
  }
  if (round->arrived == ranks_) {
    end(absl::OkStatus());
  } else if (!changed_.wait_for(lock, deadline_,
                                [&] { return round->ended; })) {
    end(absl::DeadlineExceededError(
        absl::StrCat("rank ", rank, " waited ", deadline_.count(), " ms: only ",
                     round->arrived, " of ", ranks_, " ranks came")));
  }
  if (round->outcome.ok()) {
    std::copy(round->sum.begin(), round->sum.end(), values.begin());
  }
  return round->outcome;
}

}  // namespace kedge::example
