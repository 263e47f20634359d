#include "kedge/reader/reader_lease.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace kedge {

ReaderLease::ReaderLease(const Store* store, std::string reader_id,
                         std::chrono::milliseconds renewal)
    : store_(store), reader_id_(std::move(reader_id)), renewal_(renewal) {}

ReaderLease::~ReaderLease() {
  if (lease_ != nullptr) lease_->Remove().IgnoreError();
}

bool ReaderLease::IsYoung() const {
  return Clock::now() - written_at_ < renewal_;
}

bool ReaderLease::Pin(std::uint64_t oldest_step,
                      const std::optional<VersionId>& held) {
  if (reader_id_.empty()) return false;
  if (oldest_step_ && *oldest_step_ <= oldest_step && held_ == held &&
      IsYoung()) {
    return false;
  }
  Write(oldest_step, held);
  return oldest_step_.has_value();
}

void ReaderLease::Replace(std::uint64_t oldest_step,
                          const std::optional<VersionId>& held) {
  if (reader_id_.empty()) return;
  if (oldest_step_ == oldest_step && held_ == held && IsYoung()) return;
  Write(oldest_step, held);
}

void ReaderLease::RenewIfDue() {
  if (!oldest_step_ || IsYoung()) return;
  Write(*oldest_step_, held_);
}

void ReaderLease::Write(std::uint64_t oldest_step,
                        const std::optional<VersionId>& held) {
  // A mount that is read-only now is so in a moment, too.
  if (failed_at_ && Clock::now() - *failed_at_ < renewal_) return;
  absl::Status status;
  if (lease_ == nullptr) {
    auto lease = Lease::Create(store_->fs(), store_->path(), reader_id_,
                               store_->info().run);
    status = lease.status();
    if (lease.ok()) lease_ = *std::move(lease);
  }
  if (status.ok()) status = lease_->Set(oldest_step, held);
  if (status.ok()) {
    oldest_step_ = oldest_step;
    held_ = held;
    written_at_ = Clock::now();
    failed_at_.reset();
    warned_ = false;
    return;
  }
  oldest_step_.reset();
  failed_at_ = Clock::now();
  if (warned_) return;
  warned_ = true;
  warning_ = absl::StrCat(
      "lease ", reader_id_, ": ", status.message(),
      "; following goes on without it, and gc may prune what is being read");
}

std::optional<std::string> ReaderLease::TakeWarning() {
  return std::exchange(warning_, std::nullopt);
}

}  // namespace kedge
