#ifndef KEDGE_WRITER_COORDINATOR_H_
#define KEDGE_WRITER_COORDINATOR_H_

// How the ranks of one trainer meet. See docs/protocol.md, "Publish".

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace kedge {

// Two collective calls that every rank makes in turn: Gather, Broadcast,
// Gather, ... A *round* is one of each. They map onto gather_object and
// broadcast_object_list of torch.distributed; FileCoordinator needs nothing but
// the store's own file system, LocalCoordinator is for threads.
//
// A rank that failed still takes part: that it failed, and why, travels in
// `bytes`, which an implementation passes on as they are.
//
// Deadlines: each call returns within the time that the implementation was
// given when it was made. Running out is kUnavailable; the message says what
// was waited for and which ranks are missing. After any error the caller still
// makes the other call of the round, so that ranks stay in step: rank 0 tells
// in Broadcast that its Gather failed.
//
// Thread safety: none; one thread at a time.
class Coordinator {
 public:
  virtual ~Coordinator() = default;

  virtual std::uint32_t rank() const = 0;
  virtual std::uint32_t world_size() const = 0;

  // Every rank's bytes, in rank order, at rank 0; empty elsewhere. `what` is
  // for messages ("fragments of v19").
  virtual absl::StatusOr<std::vector<std::vector<std::byte>>> Gather(
      absl::string_view what, std::span<const std::byte> bytes) = 0;

  // Rank 0's bytes at every rank; those of the others are not looked at.
  virtual absl::StatusOr<std::vector<std::byte>> Broadcast(
      absl::string_view what, std::span<const std::byte> bytes) = 0;
};

}  // namespace kedge

#endif  // KEDGE_WRITER_COORDINATOR_H_
