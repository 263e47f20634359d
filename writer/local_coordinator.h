#ifndef KEDGE_WRITER_LOCAL_COORDINATOR_H_
#define KEDGE_WRITER_LOCAL_COORDINATOR_H_

// Ranks that are threads of one process.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kedge/writer/coordinator.h"

namespace kedge {

// Thread safety: each rank's object belongs to one thread at a time; the
// objects of one group may be used side by side.
class LocalCoordinator final : public Coordinator {
 public:
  // One object a rank, in rank order. Each call waits at most `deadline`.
  static std::vector<std::unique_ptr<LocalCoordinator>> MakeGroup(
      std::uint32_t world_size, std::chrono::milliseconds deadline);
  ~LocalCoordinator() override;

  std::uint32_t rank() const override { return rank_; }
  std::uint32_t world_size() const override;
  absl::StatusOr<std::vector<std::vector<std::byte>>> Gather(
      absl::string_view what, std::span<const std::byte> bytes) override;
  absl::StatusOr<std::vector<std::byte>> Broadcast(
      absl::string_view what, std::span<const std::byte> bytes) override;

 private:
  struct Group;

  LocalCoordinator(std::shared_ptr<Group> group, std::uint32_t rank);

  std::shared_ptr<Group> group_;
  std::uint32_t rank_;
  std::uint64_t round_ = 0;  // of the last Gather
};

}  // namespace kedge

#endif  // KEDGE_WRITER_LOCAL_COORDINATOR_H_
