#include <atomic>
#include <mutex>
#include <span>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "kedge/engine/cpu/l61_sum.h"
#include "kedge/engine/cpu/record_apply.h"
#include "kedge/engine/io/io_pool.h"
#include "kedge/format/limits.h"
#include "kedge/format/status.h"
#include "kedge/reader/parallel.h"
#include "kedge/reader/weight_backend.h"

namespace kedge {
namespace {

// Buffers of a piece each, reused by whichever thread reads next.
class BufferStack {
 public:
  using Buffer = std::unique_ptr<std::byte[]>;

  Buffer Take() {
    {
      const std::lock_guard lock(mutex_);
      if (!buffers_.empty()) {
        Buffer buffer = std::move(buffers_.back());
        buffers_.pop_back();
        return buffer;
      }
    }
    return std::make_unique_for_overwrite<std::byte[]>(kPieceBytes);
  }
  void Give(Buffer buffer) {
    const std::lock_guard lock(mutex_);
    buffers_.push_back(std::move(buffer));
  }

 private:
  std::mutex mutex_;
  std::vector<Buffer> buffers_ ABSL_GUARDED_BY(mutex_);
};

class HostBackend : public WeightBackend {
 public:
  HostBackend(const BackendOptions& options, const ReadContext* context,
              const L61Key& key)
      : context_(context),
        check_records_(options.check_records),
        summer_(key),
        pool_(options.apply_threads) {}

  // A pointer says nothing about what it points to.
  absl::Status CheckTargets(
      const std::vector<const WeightSet*>&) const override {
    return absl::OkStatus();
  }

  absl::Status Prepare(const SharedBinding&) override {
    return absl::OkStatus();
  }

  // Reads it, too: memory is taken as it comes.
  absl::StatusOr<std::unique_ptr<StagedDelta>> Stage(
      const SharedBinding& binding, const TensorMask& mask,
      std::shared_ptr<const PublishedStep> step) override {
    KEDGE_ASSIGN_OR_RETURN(
        std::unique_ptr<LoadedDelta> delta,
        LoadedDelta::Load(context_, *binding, mask, std::move(step)));
    if (check_records_) {
      KEDGE_RETURN_IF_ERROR(
          CheckRecords(&pool_, *binding, summer_.key(), *delta));
    }
    return std::unique_ptr<StagedDelta>(std::move(delta));
  }

  absl::Status Read(StagedDelta*) override { return absl::OkStatus(); }

  absl::StatusOr<std::unique_ptr<AnchorLoad>> OpenAnchor(
      const Binding& binding, const TensorMask& mask,
      const PublishedAnchor& anchor) override {
    return AnchorLoad::Open(context_, binding, mask, anchor);
  }

  // Memory: one piece for each I/O thread, unless files are mapped.
  absl::Status WriteAnchor(const Binding& binding, AnchorLoad* load,
                           std::uint64_t* units_written) override {
    BufferStack buffers;
    std::atomic<std::uint64_t> written{0};
    const auto threads =
        static_cast<std::size_t>(context_->io_pool->thread_count());
    const absl::Status status = ParallelFor(
        context_->io_pool, load->read_count(),
        [&](std::size_t i) -> absl::Status {
          const std::span<const AnchorPiece> pieces = load->pieces(i);
          const std::uint64_t begin = pieces.front().offset;
          const std::uint64_t bytes =
              pieces.back().offset + pieces.back().bytes - begin;
          // While this is hashed and copied, storage works on what comes next.
          load->Expect(i + threads);
          BufferStack::Buffer buffer;
          if (!load->files().mapped()) buffer = buffers.Take();
          KEDGE_ASSIGN_OR_RETURN(const std::span<const std::byte> fetched,
                                 load->files().Fetch(pieces.front().file, begin,
                                                     bytes, buffer.get()));
          for (const AnchorPiece& piece : pieces) {
            const std::span<const std::byte> part =
                fetched.subspan(piece.offset - begin, piece.bytes);
            if (absl::Status checked = load->files().CheckPiece(
                    piece.file, piece.number, piece.offset, part);
                !checked.ok()) {
              return Annotate(
                  checked,
                  absl::StrCat("tensor ", binding.table()[piece.tensor].name));
            }
            std::uint64_t units = 0;
            for (const BoxTarget& box :
                 binding.weights().tensors[piece.tensor].boxes) {
              if (!Touches(binding.grid(piece.tensor), piece.units, box)) {
                continue;
              }
              units += CopySliceToBox(part.data(), binding.grid(piece.tensor),
                                      piece.units, box);
            }
            written.fetch_add(units, std::memory_order_relaxed);
          }
          if (buffer != nullptr) buffers.Give(std::move(buffer));
          return absl::OkStatus();
        });
    *units_written += written.load();
    return status;
  }

  absl::Status Apply(const Binding& binding, const Deltas& deltas,
                     ApplyCounts* counts) override {
    std::vector<const LoadedDelta*> loaded;
    loaded.reserve(deltas.size());
    for (const auto& delta : deltas) loaded.push_back(&Loaded(*delta));
    return ApplyDeltas(&pool_, binding, loaded, counts);
  }

  absl::Status Sum(const SharedBinding& binding, Binding::Sums* sums) override {
    binding->Sum(&pool_, summer_, sums);
    return absl::OkStatus();
  }

  absl::StatusOr<std::shared_ptr<const LoadedDelta>> Records(
      const Binding&, const StagedDelta& delta, const TensorMask&) override {
    // Borrowed: it is here already.
    return std::shared_ptr<const LoadedDelta>(std::shared_ptr<void>(),
                                              &Loaded(delta));
  }

 private:
  static const LoadedDelta& Loaded(const StagedDelta& delta) {
    return static_cast<const LoadedDelta&>(delta);
  }

  const ReadContext* context_;
  const bool check_records_;
  const L61Summer summer_;
  IoPool pool_;
};

}  // namespace

std::unique_ptr<WeightBackend> MakeHostBackend(const BackendOptions& options,
                                               const ReadContext* context,
                                               const L61Key& key) {
  return std::make_unique<HostBackend>(options, context, key);
}

}  // namespace kedge
