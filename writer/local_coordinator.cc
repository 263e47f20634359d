#include "kedge/writer/local_coordinator.h"

#include <condition_variable>
#include <mutex>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kedge/format/status.h"

namespace kedge {

struct LocalCoordinator::Group {
  struct Said {
    std::uint64_t round = 0;
    std::vector<std::byte> bytes;
  };

  std::chrono::milliseconds deadline;
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<Said> gathered ABSL_GUARDED_BY(mutex);  // by rank
  Said broadcast ABSL_GUARDED_BY(mutex);
};

LocalCoordinator::LocalCoordinator(std::shared_ptr<Group> group,
                                   std::uint32_t rank)
    : group_(std::move(group)), rank_(rank) {}

LocalCoordinator::~LocalCoordinator() = default;

std::vector<std::unique_ptr<LocalCoordinator>> LocalCoordinator::MakeGroup(
    std::uint32_t world_size, std::chrono::milliseconds deadline) {
  auto group = std::make_shared<Group>();
  group->deadline = deadline;
  {
    const std::lock_guard<std::mutex> lock(group->mutex);
    group->gathered.resize(world_size);
  }
  std::vector<std::unique_ptr<LocalCoordinator>> ranks;
  for (std::uint32_t rank = 0; rank < world_size; ++rank) {
    ranks.push_back(
        std::unique_ptr<LocalCoordinator>(new LocalCoordinator(group, rank)));
  }
  return ranks;
}

std::uint32_t LocalCoordinator::world_size() const {
  const std::lock_guard<std::mutex> lock(group_->mutex);
  return static_cast<std::uint32_t>(group_->gathered.size());
}

absl::StatusOr<std::vector<std::vector<std::byte>>> LocalCoordinator::Gather(
    absl::string_view what, std::span<const std::byte> bytes) {
  ++round_;
  Group& group = *group_;
  std::unique_lock<std::mutex> lock(group.mutex);
  Group::Said& mine = group.gathered[rank_];
  mine.round = round_;
  mine.bytes.assign(bytes.begin(), bytes.end());
  group.changed.notify_all();
  if (rank_ != 0) return std::vector<std::vector<std::byte>>();
  const auto missing = [&] {
    std::vector<std::size_t> ranks;
    for (std::size_t r = 0; r < group.gathered.size(); ++r) {
      if (group.gathered[r].round != round_) ranks.push_back(r);
    }
    return ranks;
  };
  if (!group.changed.wait_for(lock, group.deadline,
                              [&] { return missing().empty(); })) {
    return absl::UnavailableError(absl::StrCat(
        "gather of ", what, ": waited ", group.deadline.count(),
        " ms for ranks ", absl::StrJoin(missing(), ", "), " of ",
        group.gathered.size(), "; look whether these threads still run"));
  }
  std::vector<std::vector<std::byte>> pieces;
  for (Group::Said& said : group.gathered) {
    pieces.push_back(std::exchange(said.bytes, {}));
  }
  return pieces;
}

absl::StatusOr<std::vector<std::byte>> LocalCoordinator::Broadcast(
    absl::string_view what, std::span<const std::byte> bytes) {
  Group& group = *group_;
  std::unique_lock<std::mutex> lock(group.mutex);
  if (rank_ == 0) {
    group.broadcast.round = round_;
    group.broadcast.bytes.assign(bytes.begin(), bytes.end());
    group.changed.notify_all();
    return group.broadcast.bytes;
  }
  if (!group.changed.wait_for(lock, group.deadline, [&] {
        return group.broadcast.round >= round_;
      })) {
    return absl::UnavailableError(absl::StrCat(
        "broadcast of ", what, ": rank ", rank_, " waited ",
        group.deadline.count(), " ms for rank 0; look whether it still runs"));
  }
  if (group.broadcast.round != round_) {
    return absl::UnavailableError(absl::StrCat(
        "broadcast of ", what, ": rank ", rank_, " is at round ", round_,
        ", rank 0 has gone on to round ", group.broadcast.round,
        " without it; open again on all ranks"));
  }
  return group.broadcast.bytes;
}

}  // namespace kedge
