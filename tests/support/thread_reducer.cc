#include "kedge/tests/support/thread_reducer.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kedge/format/l61.h"

namespace kedge {

ThreadReducer::ThreadReducer(std::uint32_t size,
                             std::chrono::milliseconds deadline)
    : size_(size), deadline_(deadline), calls_(size), round_(NewRound()) {}

std::shared_ptr<ThreadReducer::Round> ThreadReducer::NewRound() const {
  auto round = std::make_shared<Round>();
  round->given.resize(size_);
  round->here.resize(size_, false);
  return round;
}

std::function<absl::Status(std::span<std::uint64_t>)> ThreadReducer::ForRank(
    std::uint32_t rank) {
  return [this, rank](std::span<std::uint64_t> values) {
    return Reduce(rank, values);
  };
}

void ThreadReducer::set_script(Script script) {
  const std::lock_guard lock(mutex_);
  script_ = std::move(script);
}

void ThreadReducer::Reset() {
  const std::lock_guard lock(mutex_);
  script_ = nullptr;
  std::fill(calls_.begin(), calls_.end(), 0);
  broken_ = false;
  round_ = NewRound();
  most_values_ = 0;
}

std::int64_t ThreadReducer::calls(std::uint32_t rank) const {
  const std::lock_guard lock(mutex_);
  return calls_[rank];
}

std::size_t ThreadReducer::most_values() const {
  const std::lock_guard lock(mutex_);
  return most_values_;
}

void ThreadReducer::set_plain(bool plain) {
  const std::lock_guard lock(mutex_);
  plain_ = plain;
}

absl::Status ThreadReducer::Reduce(std::uint32_t rank,
                                   std::span<std::uint64_t> values) {
  std::unique_lock lock(mutex_);
  const std::int64_t call = ++calls_[rank];
  most_values_ = std::max(most_values_, values.size());
  const Fault fault = script_ ? script_(rank, call) : Fault::kNone;
  const absl::Status broken = absl::UnavailableError(
      absl::StrCat("rank ", rank, " lost its connection in call ", call));
  const std::shared_ptr<Round> round = round_;
  const auto end_round = [&](absl::Status outcome) {
    round_->outcome = std::move(outcome);
    round_->ended = true;
    round_ = NewRound();
    changed_.notify_all();
  };
  if (broken_ || fault == Fault::kAbsent) return broken;
  if (fault == Fault::kAbort) {
    broken_ = true;
    end_round(broken);
    return broken;
  }
  for (const std::uint64_t value : values) {
    if (value >= kL61Prime) {
      return absl::InternalError("a value handed in is not below 2^61 - 1");
    }
  }

  round->given[rank].assign(values.begin(), values.end());
  round->here[rank] = true;
  if (std::count(round->here.begin(), round->here.end(), true) == size_) {
    absl::Status outcome;
    round->sum.assign(values.size(), 0);
    for (std::uint32_t r = 0; r < size_ && outcome.ok(); ++r) {
      const std::vector<std::uint64_t>& given = round->given[r];
      if (given.size() != values.size()) {
        outcome = absl::UnavailableError(
            absl::StrCat("rank ", rank, " comes with ", values.size(),
                         " values, rank ", r, " with ", given.size()));
        break;
      }
      for (std::size_t i = 0; i < given.size(); ++i) {
        round->sum[i] =
            plain_ ? round->sum[i] + given[i] : L61Add(round->sum[i], given[i]);
      }
    }
    end_round(std::move(outcome));
  } else if (!changed_.wait_for(lock, deadline_,
                                [&] { return round->ended; })) {
    round->here[rank] = false;
    return absl::DeadlineExceededError(
        absl::StrCat("waited ", deadline_.count(), " ms for the other ranks"));
  }
  if (fault == Fault::kLate) {
    broken_ = true;
    end_round(broken);  // of those who wait in the next one already
    return broken;
  }
  if (!round->outcome.ok()) return round->outcome;
  std::copy(round->sum.begin(), round->sum.end(), values.begin());
  return absl::OkStatus();
}

}  // namespace kedge
