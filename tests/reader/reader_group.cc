#include "kedge/tests/reader/reader_group.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace kedge {

std::string SplitName(Split split) {
  switch (split) {
    case Split::kRows:
      return "Rows";
    case Split::kColumns:
      return "Columns";
    case Split::kUneven:
      return "Uneven";
    case Split::kReplicas:
      return "Replicas";
    case Split::kUnalike:
      return "Unalike";
    case Split::kPacked:
      return "Packed";
    case Split::kScattered:
      return "Scattered";
  }
  return "?";
}

std::vector<EngineMemory::Part> PartsOf(const TensorTable& table, Split split,
                                        std::uint32_t rank,
                                        std::uint32_t size) {
  std::vector<EngineMemory::Part> parts;
  for (std::uint32_t t = 0; t < table.size(); ++t) {
    const TensorSpec& spec = table[t];
    EngineMemory::Part part;
    part.name = spec.name;
    part.begin.assign(spec.shape.size(), 0);
    part.extent = spec.shape;
    if (spec.shape.empty()) {
      parts.push_back(std::move(part));
      continue;
    }
    if (split == Split::kScattered) {
      if (t % size == rank) parts.push_back(std::move(part));
      continue;
    }
    const std::size_t d = split == Split::kColumns ? spec.shape.size() - 1 : 0;
    const std::uint64_t whole = spec.shape[d];
    std::uint64_t begin = whole * rank / size;
    std::uint64_t end = whole * (rank + 1) / size;
    if (split == Split::kUneven) {
      const std::uint64_t all = std::uint64_t{size} * size;
      begin = whole * rank * rank / all;
      end = whole * (rank + 1) * (rank + 1) / all;
    }
    if (split == Split::kReplicas) {
      const std::uint64_t groups = std::max(1u, size / 2);
      const std::uint64_t group = rank * groups / size;
      begin = whole * group / groups;
      end = whole * (group + 1) / groups;
    }
    if (split == Split::kUnalike && size > 1) {
      // Even ranks hold the tensor together, odd ranks hold parts of it again.
      const std::uint64_t even = (size + 1) / 2;
      const std::uint64_t place = rank / 2;
      begin = whole * place / even;
      end = whole * (place + 1) / even;
      if (rank % 2 == 1) {
        begin = whole * (2 * place + 1) / (2 * even + 1);
        end = whole * (2 * place + 3) / (2 * even + 1);
      }
    }
    part.begin[d] = begin;
    part.extent[d] = end - begin;
    if (split == Split::kPacked && spec.shape.size() == 2) {
      const std::uint64_t element = ElementBytes(spec.dtype);
      const std::uint64_t row = spec.shape[1] * element;
      part.strides_bytes = {static_cast<std::int64_t>(2 * row),
                            static_cast<std::int64_t>(element)};
      // The table is sorted by name: gate stands right before up.
      if (spec.name == "mlp.up.weight") part.bytes_after_previous = row;
    }
    parts.push_back(std::move(part));
  }
  return parts;
}

ReaderGroup::ReaderGroup(const PublishedRun& run, Split split,
                         std::uint32_t size, const Adjust& adjust,
                         std::chrono::milliseconds reduce_deadline,
                         std::vector<Device*> devices)
    : run_(run),
      size_(size),
      adjust_(adjust),
      devices_(std::move(devices)),
      reducer_(size, reduce_deadline) {
  if (devices_.empty()) devices_.assign(size, DefaultTestDevice());
  for (std::uint32_t r = 0; r < size; ++r) {
    memories_.push_back(std::make_unique<EngineMemory>(
        run.table(), PartsOf(run.table(), split, r, size), "w", devices_[r]));
    faults_.push_back(std::make_unique<FaultFileSystem>());
  }
  followers_.resize(size);
  results_.resize(size);
}

std::vector<absl::Status> ReaderGroup::OnAll(
    const std::function<absl::Status(std::uint32_t)>& call) {
  std::vector<absl::Status> statuses(size_);
  std::vector<std::thread> threads;
  for (std::uint32_t r = 0; r < size_; ++r) {
    threads.emplace_back([&, r] { statuses[r] = call(r); });
  }
  for (std::thread& thread : threads) thread.join();
  return statuses;
}

std::vector<absl::Status> ReaderGroup::Open() {
  for (auto& follower : followers_) follower.reset();
  return OnAll([&](std::uint32_t r) {
    FollowerOptions options = run_.Options();
    options.fs = faults_[r].get();
    options.device = devices_[r];
    options.io_threads = 1;
    options.apply_threads = 1;
    options.group.rank = r;
    options.group.size = size_;
    options.group.name = "tp";
    if (size_ > 1) options.group.reduce = reducer_.ForRank(r);
    if (adjust_) adjust_(r, &options);
    auto opened = Follower::Open(options, memories_[r]->sets());
    if (opened.ok()) followers_[r] = *std::move(opened);
    return opened.status();
  });
}

std::vector<absl::Status> ReaderGroup::Update() {
  return OnAll([&](std::uint32_t r) {
    auto result = followers_[r]->Update();
    if (result.ok()) results_[r] = *result;
    return result.status();
  });
}

std::vector<absl::Status> ReaderGroup::Join() {
  return OnAll([&](std::uint32_t r) {
    auto result = followers_[r]->Join();
    if (result.ok()) results_[r] = *result;
    return result.status();
  });
}

std::vector<absl::Status> ReaderGroup::JoinStep(std::uint64_t step) {
  return OnAll([&](std::uint32_t r) {
    auto result = followers_[r]->JoinStep(step);
    if (result.ok()) results_[r] = *result;
    return result.status();
  });
}

std::vector<absl::Status> ReaderGroup::VerifyHeld(std::uint64_t step) {
  return OnAll(
      [&](std::uint32_t r) { return followers_[r]->VerifyHeld(step); });
}

void ReaderGroup::Hold(std::uint64_t step) {
  Reset();
  for (auto& memory : memories_) memory->Load(run_.at(step));
  ASSERT_EQ(ErrorsOf(Open()), "");
  ASSERT_EQ(ErrorsOf(VerifyHeld(step)), "");
  Reset();
}

void ReaderGroup::Reset() {
  reducer_.Reset();
  for (auto& faults : faults_) faults->Reset();
}

std::string ReaderGroup::Trouble() {
  const FollowerState state = followers_[0]->state();
  const auto held = followers_[0]->held();
  for (std::uint32_t r = 0; r < size_; ++r) {
    const Follower& follower = *followers_[r];
    if (follower.state() != state || follower.held() != held) {
      return absl::StrCat(
          "rank 0 is ", ToString(state), " with ",
          held ? ToString(*held) : "nothing", ", rank ", r, " is ",
          ToString(follower.state()), " with ",
          follower.held() ? ToString(*follower.held()) : "nothing");
    }
    const bool holds =
        state == FollowerState::kReady || state == FollowerState::kSuperseded;
    if (holds != held.has_value()) {
      return absl::StrCat(ToString(state), " and holds ",
                          held ? "something" : "nothing");
    }
    if (!holds || run_.id(held->step) != *held) continue;
    const std::string difference =
        memories_[r]->Difference(run_.at(held->step));
    if (!difference.empty()) {
      return absl::StrCat("rank ", r, " at ", ToString(*held), ": ",
                          difference);
    }
  }
  return "";
}

std::string ReaderGroup::TroubleAt(std::uint64_t step) {
  if (state() != FollowerState::kReady) {
    return absl::StrCat("rank 0 is ", ToString(state()));
  }
  if (followers_[0]->held() != run_.id(step)) {
    return absl::StrCat("rank 0 holds ", ToString(*followers_[0]->held()));
  }
  return Trouble();
}

std::string ErrorsOf(const std::vector<absl::Status>& statuses) {
  std::string text;
  for (std::size_t r = 0; r < statuses.size(); ++r) {
    if (!statuses[r].ok()) {
      absl::StrAppend(&text, "rank ", r, ": ", statuses[r].ToString(), "\n");
    }
  }
  return text;
}

}  // namespace kedge
