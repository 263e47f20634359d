#ifndef KEDGE_READER_READER_LEASE_H_
#define KEDGE_READER_READER_LEASE_H_

// A follower's lease: written when it must be, renewed when it is old, and
// never in the way of an update.

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "kedge/engine/io/lease.h"
#include "kedge/engine/io/store.h"
#include "kedge/format/manifest.h"

namespace kedge {

// Thread safety: one thread at a time.
class ReaderLease {
 public:
  using Clock = std::chrono::steady_clock;

  // Without `reader_id` there is none, and no method does anything. `store`
  // outlives this object.
  ReaderLease(const Store* store, std::string reader_id,
              std::chrono::milliseconds renewal);
  ~ReaderLease();  // takes it away, if the storage lets it
  ReaderLease(const ReaderLease&) = delete;
  ReaderLease& operator=(const ReaderLease&) = delete;

  // Makes sure that `oldest_step` and what comes after it are asked for: deltas
  // alone by a reader that goes on from what it holds, anchors too by one that
  // joins, which says that it holds nothing.
  // Returns whether that was not so before (or the lease may have expired): the
  // caller then looks whether what it wants to read is still there.
  bool Pin(std::uint64_t oldest_step, const std::optional<VersionId>& held);
  // Says what is held and asks for no more than `oldest_step` and later ones.
  void Replace(std::uint64_t oldest_step, const std::optional<VersionId>& held);
  // Writes it again if it is old.
  void RenewIfDue();
  // Why it cannot be written, once.
  std::optional<std::string> TakeWarning();

 private:
  void Write(std::uint64_t oldest_step, const std::optional<VersionId>& held);
  bool IsYoung() const;

  const Store* store_;
  std::string reader_id_;
  std::chrono::milliseconds renewal_;
  std::unique_ptr<Lease> lease_;
  std::optional<std::uint64_t> oldest_step_;  // as written
  std::optional<VersionId> held_;
  Clock::time_point written_at_;
  std::optional<Clock::time_point> failed_at_;
  bool warned_ = false;
  std::optional<std::string> warning_;
};

}  // namespace kedge

#endif  // KEDGE_READER_READER_LEASE_H_
