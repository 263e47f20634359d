#include "kedge/reader/version_reader.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <list>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "kedge/engine/cpu/record_apply.h"
#include "kedge/format/limits.h"
#include "kedge/format/status.h"
#include "kedge/reader/anchor_load.h"
#include "kedge/reader/data_files.h"
#include "kedge/reader/read_context.h"

namespace kedge {
namespace {

// Deltas whose files stay open between reads.
constexpr std::size_t kSourcesKeptOpen = 64;

// A hashed piece; kRecordSlackBytes zeros follow it.
struct CachedPiece {
  std::unique_ptr<std::byte[]> buffer;
  std::uint64_t bytes = 0;
};

// The pieces used last.
//
// Thread safety: all methods may run concurrently.
class PieceCache {
 public:
  // Source (0: anchor, k: k-th delta), file, piece number.
  using Key = std::tuple<std::size_t, std::uint32_t, std::uint32_t>;

  explicit PieceCache(std::uint64_t limit_bytes) : limit_bytes_(limit_bytes) {}

  std::shared_ptr<const CachedPiece> Find(const Key& key) {
    const std::lock_guard lock(mutex_);
    const auto found = by_key_.find(key);
    if (found == by_key_.end()) return nullptr;
    by_use_.splice(by_use_.begin(), by_use_, found->second);
    return found->second->second;
  }

  void Add(const Key& key, std::shared_ptr<const CachedPiece> piece) {
    const std::lock_guard lock(mutex_);
    if (by_key_.contains(key)) return;  // another thread read it too
    held_bytes_ += piece->bytes;
    by_use_.emplace_front(key, std::move(piece));
    by_key_[key] = by_use_.begin();
    // The newest stays whatever its size: its reader has it anyhow.
    while (held_bytes_ > limit_bytes_ && by_use_.size() > 1) {
      held_bytes_ -= by_use_.back().second->bytes;
      by_key_.erase(by_use_.back().first);
      by_use_.pop_back();
    }
  }

 private:
  using Entry = std::pair<Key, std::shared_ptr<const CachedPiece>>;
  const std::uint64_t limit_bytes_;
  std::mutex mutex_;
  std::list<Entry> by_use_ ABSL_GUARDED_BY(mutex_);
  std::map<Key, std::list<Entry>::iterator> by_key_ ABSL_GUARDED_BY(mutex_);
  std::uint64_t held_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
};

// A flat range of a tensor, contiguous at `data`, as boxes of its matrix: at
// most a part of a row, whole rows, and a part of a row.
std::vector<BoxTarget> BoxesOfRange(const TileGrid& grid,
                                    const UnitRange& range,
                                    std::uint32_t unit_bytes, std::byte* data) {
  std::vector<BoxTarget> boxes;
  std::uint64_t at = range.begin;
  while (at < range.end) {
    BoxTarget box;
    box.data = data + (at - range.begin) * unit_bytes;
    box.unit_bytes = unit_bytes;
    // Contiguous words of an 8-byte element are units like any others.
    box.units_per_element = 1;
    box.col_stride_bytes = unit_bytes;
    box.row_stride_bytes = static_cast<std::int64_t>(grid.cols * unit_bytes);
    box.row_begin = at / grid.cols;
    box.col_begin = at % grid.cols;
    const std::uint64_t whole_rows =
        box.col_begin == 0 ? (range.end - at) / grid.cols : 0;
    if (whole_rows > 0) {
      box.row_end = box.row_begin + whole_rows;
      box.col_end = grid.cols;
    } else {
      box.row_end = box.row_begin + 1;
      box.col_end = std::min(grid.cols, box.col_begin + (range.end - at));
    }
    at += box.unit_count();
    boxes.push_back(box);
  }
  return boxes;
}

}  // namespace

// One way to the version: an anchor and the deltas after it.
struct VersionReader::Plan {
  explicit Plan(std::uint64_t cache_bytes) : cache(cache_bytes) {}

  Chain chain;
  std::vector<AnchorPiece> pieces;  // ascending by (tensor, units.begin)
  // A source is the anchor or a delta; files open when first read.
  std::vector<std::unique_ptr<DataFiles>> sources;
  struct Record {
    std::size_t source = 0;
    const DeltaRecord* info = nullptr;
  };
  std::vector<Record> records;  // ascending by (tensor, source, slice.begin)
  PieceCache cache;

  static absl::StatusOr<std::shared_ptr<Plan>> Make(
      const ReadContext& context,
      const std::shared_ptr<const PublishedStep>& step,
      std::uint64_t cache_bytes,
      const std::vector<std::uint64_t>& passed_over_anchors);

  absl::StatusOr<std::shared_ptr<const CachedPiece>> Piece(
      std::size_t source, std::uint32_t file, std::uint32_t number,
      std::uint64_t offset, std::uint64_t bytes) {
    const PieceCache::Key key{source, file, number};
    if (auto found = cache.Find(key)) return found;
    auto piece = std::make_shared<CachedPiece>();
    piece->bytes = bytes;
    piece->buffer =
        std::make_unique_for_overwrite<std::byte[]>(bytes + kRecordSlackBytes);
    std::memset(piece->buffer.get() + bytes, 0, kRecordSlackBytes);
    KEDGE_ASSIGN_OR_RETURN(
        const std::span<const std::byte> fetched,
        sources[source]->Fetch(file, offset, bytes, piece->buffer.get()));
    KEDGE_RETURN_IF_ERROR(
        sources[source]->CheckPiece(file, number, offset, fetched));
    // A chain may have more files than a process may have open.
    if (source != 0 && sources.size() > kSourcesKeptOpen) {
      sources[source]->CloseFiles();
    }
    cache.Add(key, piece);
    return std::shared_ptr<const CachedPiece>(std::move(piece));
  }

  // `anchor_failed`: whether an error is of the anchor's bytes.
  absl::Status Read(std::uint32_t ordinal, const TensorSpec& spec,
                    std::uint64_t byte_begin, std::span<std::byte> out,
                    bool* anchor_failed);

  // Adds one record into `boxes`.
  absl::Status Apply(const Record& record, const TileGrid& grid,
                     std::uint32_t unit_bytes,
                     const std::vector<BoxTarget>& boxes) {
    const DeltaRecord& info = *record.info;
    const StepManifest& manifest = chain.deltas[record.source - 1]->manifest;
    const std::uint64_t file_bytes = manifest.files[info.file].bytes;
    if (info.offset > file_bytes || info.bytes > file_bytes - info.offset) {
      return DataLoss({.where = sources[record.source]->PathOf(info.file),
                       .what = "a record ends outside the file",
                       .expected = absl::StrCat("at most ", file_bytes),
                       .found = absl::StrCat(info.offset, " + ", info.bytes),
                       .advice = "run `kedge fsck`"});
    }
    const std::uint64_t end = info.offset + info.bytes;
    std::shared_ptr<const CachedPiece> piece;
    std::vector<std::byte> joined;  // of a record that spans pieces
    std::span<const std::byte> bytes;
    for (std::uint64_t at = info.offset; at < end;) {
      const std::uint64_t number = at / kPieceBytes;
      const std::uint64_t offset = number * kPieceBytes;
      const std::uint64_t size = std::min(kPieceBytes, file_bytes - offset);
      KEDGE_ASSIGN_OR_RETURN(
          piece, Piece(record.source, info.file,
                       static_cast<std::uint32_t>(number), offset, size));
      const std::uint64_t take = std::min(end, offset + size) - at;
      const std::byte* from = piece->buffer.get() + (at - offset);
      if (take == info.bytes) {
        bytes = {from, info.bytes};
      } else {
        if (joined.empty()) joined.reserve(info.bytes + kRecordSlackBytes);
        joined.insert(joined.end(), from, from + take);
      }
      at += take;
    }
    if (!joined.empty()) {
      joined.resize(info.bytes + kRecordSlackBytes);
      bytes = {joined.data(), info.bytes};
    }
    RecordHeader header;  // a record has at least these bytes: manifest rules
    std::memcpy(&header, bytes.data(), sizeof(header));
    if (header.nnz != info.nnz) {
      return DataLoss(
          {.where = absl::StrCat(sources[record.source]->PathOf(info.file),
                                 ": offset ", info.offset),
           .what = "nnz of the record",
           .expected = absl::StrCat(info.nnz),
           .found = absl::StrCat(header.nnz),
           .advice = "run `kedge fsck`"});
    }
    const auto applied =
        ApplyRecord(bytes, grid, info.slice, unit_bytes, boxes);
    if (applied.ok()) return absl::OkStatus();
    return Annotate(applied.status(),
                    absl::StrCat(sources[record.source]->PathOf(info.file),
                                 ": offset ", info.offset));
  }
};

absl::StatusOr<std::shared_ptr<VersionReader::Plan>> VersionReader::Plan::Make(
    const ReadContext& context,
    const std::shared_ptr<const PublishedStep>& step, std::uint64_t cache_bytes,
    const std::vector<std::uint64_t>& passed_over_anchors) {
  auto plan = std::make_shared<Plan>(cache_bytes);
  KEDGE_ASSIGN_OR_RETURN(plan->chain, context.store->FindChain(
                                          step, nullptr, passed_over_anchors));
  const PublishedAnchor& anchor = *plan->chain.anchor;
  if (anchor.table->hash() != step->table->hash()) {
    return DataLoss({.where = anchor.path,
                     .what = "tensor table",
                     .expected = ToHex(step->table->hash()),
                     .found = ToHex(anchor.table->hash()),
                     .advice = "run `kedge fsck`"});
  }
  KEDGE_ASSIGN_OR_RETURN(plan->pieces, PiecesOf(anchor));
  std::sort(plan->pieces.begin(), plan->pieces.end(),
            [](const AnchorPiece& a, const AnchorPiece& b) {
              return std::tie(a.tensor, a.units.begin) <
                     std::tie(b.tensor, b.units.begin);
            });
  plan->sources.push_back(std::make_unique<DataFiles>(
      &context, anchor.path, anchor.version.step, &anchor.manifest.files));
  for (const auto& delta : plan->chain.deltas) {
    plan->sources.push_back(std::make_unique<DataFiles>(
        &context, delta->path, delta->id.step, &delta->manifest.files));
    for (const DeltaRecord& record : delta->manifest.records) {
      plan->records.push_back({plan->sources.size() - 1, &record});
    }
  }
  std::sort(plan->records.begin(), plan->records.end(),
            [](const Record& a, const Record& b) {
              return std::tie(a.info->tensor, a.source, a.info->slice.begin) <
                     std::tie(b.info->tensor, b.source, b.info->slice.begin);
            });
  return plan;
}

struct VersionReader::Impl {
  std::atomic<std::uint64_t> bytes_read{0};
  ReadContext context;
  std::shared_ptr<const PublishedStep> step;
  std::uint64_t cache_bytes = 0;
  VersionState state;

  std::mutex mutex;
  std::shared_ptr<Plan> plan ABSL_GUARDED_BY(mutex);
  std::vector<std::uint64_t> passed_over ABSL_GUARDED_BY(mutex);

  std::shared_ptr<Plan> CurrentPlan() {
    const std::lock_guard<std::mutex> lock(mutex);
    return plan;
  }

  // Goes on without the anchor of `failed`; the error that its bytes gave is
  // the answer if no other anchor leads to the version.
  absl::Status PassOver(const std::shared_ptr<Plan>& failed,
                        const absl::Status& error) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (plan != failed) return absl::OkStatus();  // another thread did
    passed_over.push_back(failed->chain.anchor->version.step);
    auto next = Plan::Make(context, step, cache_bytes, passed_over);
    if (!next.ok()) {
      return absl::Status(
          error.code(),
          absl::StrCat(error.message(), "; and no older anchor leads to ",
                       ToString(step->id)));
    }
    plan = *std::move(next);
    return absl::OkStatus();
  }
};

VersionReader::VersionReader(std::unique_ptr<Impl> impl)
    : impl_(std::move(impl)) {}
VersionReader::~VersionReader() = default;

absl::StatusOr<std::unique_ptr<VersionReader>> VersionReader::Open(
    const Store* store, const std::shared_ptr<const PublishedStep>& step,
    std::uint64_t cache_bytes) {
  auto impl = std::make_unique<Impl>();
  impl->context.store = store;
  impl->context.bytes_read = &impl->bytes_read;
  impl->step = step;
  impl->cache_bytes = cache_bytes;
  KEDGE_ASSIGN_OR_RETURN(auto plan,
                         Plan::Make(impl->context, step, cache_bytes, {}));
  KEDGE_ASSIGN_OR_RETURN(impl->state, store->StateAt(step));
  {
    const std::lock_guard<std::mutex> lock(impl->mutex);
    impl->plan = std::move(plan);
  }
  return std::unique_ptr<VersionReader>(new VersionReader(std::move(impl)));
}

const TensorTable& VersionReader::table() const { return *impl_->state.table; }

const VersionState& VersionReader::state() const { return impl_->state; }

absl::Status VersionReader::Read(std::uint32_t ordinal,
                                 std::uint64_t byte_begin,
                                 std::span<std::byte> out) {
  if (ordinal >= table().size()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "tensor ordinal ", ordinal, ": the table has ", table().size()));
  }
  if (table()[ordinal].tied_to != kNotTied) ordinal = table()[ordinal].tied_to;
  const TensorSpec& spec = table()[ordinal];
  const std::uint32_t unit_bytes = UnitBytes(spec.dtype);
  const std::uint64_t tensor_bytes = spec.byte_count();
  if (byte_begin > tensor_bytes || out.size() > tensor_bytes - byte_begin ||
      byte_begin % unit_bytes != 0 || out.size() % unit_bytes != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("tensor ", spec.name, ": the range of ", out.size(),
                     " bytes from byte ", byte_begin,
                     " is not of whole units within ", tensor_bytes, " bytes"));
  }
  if (out.empty()) return absl::OkStatus();
  while (true) {
    const std::shared_ptr<Plan> plan = impl_->CurrentPlan();
    bool anchor_failed = false;
    const absl::Status status =
        plan->Read(ordinal, spec, byte_begin, out, &anchor_failed);
    if (status.ok() || !anchor_failed) return status;
    KEDGE_RETURN_IF_ERROR(impl_->PassOver(plan, status));
  }
}

absl::Status VersionReader::Plan::Read(std::uint32_t ordinal,
                                       const TensorSpec& spec,
                                       std::uint64_t byte_begin,
                                       std::span<std::byte> out,
                                       bool* anchor_failed) {
  const std::uint32_t unit_bytes = UnitBytes(spec.dtype);
  const UnitRange range{byte_begin / unit_bytes,
                        (byte_begin + out.size()) / unit_bytes};

  // The anchor's pieces of a tensor lie side by side and cover it.
  auto piece = std::upper_bound(
      pieces.begin(), pieces.end(), std::make_tuple(ordinal, range.begin),
      [](const auto& key, const AnchorPiece& candidate) {
        return key < std::make_tuple(candidate.tensor, candidate.units.begin);
      });
  KEDGE_CHECK(piece != pieces.begin());
  --piece;
  for (std::uint64_t at = range.begin; at < range.end; ++piece) {
    KEDGE_CHECK(piece != pieces.end() && piece->tensor == ordinal &&
                piece->units.begin <= at && at < piece->units.end);
    const auto found =
        Piece(0, piece->file, piece->number, piece->offset, piece->bytes);
    if (!found.ok()) {
      *anchor_failed = true;
      return found.status();
    }
    const std::shared_ptr<const CachedPiece>& bytes = *found;
    const std::uint64_t end = std::min(range.end, piece->units.end);
    std::memcpy(out.data() + (at - range.begin) * unit_bytes,
                bytes->buffer.get() + (at - piece->units.begin) * unit_bytes,
                (end - at) * unit_bytes);
    at = end;
  }

  const TileGrid grid = spec.grid();
  const std::vector<BoxTarget> boxes =
      BoxesOfRange(grid, range, unit_bytes, out.data());
  auto record =
      std::lower_bound(records.begin(), records.end(), ordinal,
                       [](const Record& candidate, std::uint32_t tensor) {
                         return candidate.info->tensor < tensor;
                       });
  for (; record != records.end() && record->info->tensor == ordinal; ++record) {
    const UnitRange& slice = record->info->slice;
    if (slice.begin >= range.end || range.begin >= slice.end) continue;
    KEDGE_RETURN_IF_ERROR(Apply(*record, grid, unit_bytes, boxes));
  }
  return absl::OkStatus();
}

}  // namespace kedge
