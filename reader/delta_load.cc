#include "kedge/reader/delta_load.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kedge/engine/cpu/record_apply.h"
#include "kedge/format/layout.h"
#include "kedge/format/limits.h"
#include "kedge/format/status.h"
#include "kedge/reader/parallel.h"

namespace kedge {
namespace {

bool IsNeeded(const Binding& binding, const TensorMask& mask,
              const DeltaRecord& record) {
  if (!mask.empty() && !mask[record.tensor]) return false;
  const std::vector<BoxTarget>& boxes =
      binding.weights().tensors[record.tensor].boxes;
  return std::any_of(boxes.begin(), boxes.end(), [&](const BoxTarget& box) {
    return Touches(binding.grid(record.tensor), record.slice, box);
  });
}

}  // namespace

absl::StatusOr<DeltaReads> PlanReads(const Binding& binding,
                                     const TensorMask& mask,
                                     const PublishedStep& step) {
  const StepManifest& manifest = step.manifest;
  DeltaReads reads;
  reads.pieces.resize(manifest.files.size());
  reads.wanted.assign(manifest.files.size(), false);
  for (std::uint32_t i = 0; i < manifest.records.size(); ++i) {
    const DeltaRecord& record = manifest.records[i];
    if (!IsNeeded(binding, mask, record)) continue;
    const std::uint64_t file_bytes = manifest.files[record.file].bytes;
    if (record.offset > file_bytes ||
        record.bytes > file_bytes - record.offset || record.bytes == 0) {
      return DataLoss(
          {.where = JoinPath(step.path,
                             DataFileName(manifest.files[record.file].id)),
           .what = "a record ends outside the file",
           .expected = absl::StrCat("at most ", file_bytes),
           .found = absl::StrCat(record.offset, " + ", record.bytes),
           .advice = "run `kedge fsck`"});
    }
    reads.records.push_back(i);
    reads.wanted[record.file] = true;
    std::vector<bool>& marks = reads.pieces[record.file];
    if (marks.empty()) marks.resize(PieceCount(file_bytes));
    const std::uint64_t last = record.offset + record.bytes - 1;
    for (std::uint64_t p = record.offset / kPieceBytes; p <= last / kPieceBytes;
         ++p) {
      marks[p] = true;
    }
  }
  return reads;
}

std::string WhereOf(const PublishedStep& step, const DeltaRecord& record) {
  return absl::StrCat(
      JoinPath(step.path, DataFileName(step.manifest.files[record.file].id)),
      ": offset ", record.offset, ": tensor ",
      (*step.table)[record.tensor].name, " units [", record.slice.begin, ", ",
      record.slice.end, ")");
}

LoadedDelta::LoadedDelta(const ReadContext* context,
                         std::shared_ptr<const PublishedStep> loaded)
    : StagedDelta(std::move(loaded)),
      files_(context, step().path, step().id.step, &step().manifest.files) {}

absl::StatusOr<std::unique_ptr<LoadedDelta>> LoadedDelta::Load(
    const ReadContext* context, const Binding& binding, const TensorMask& mask,
    std::shared_ptr<const PublishedStep> step) {
  std::unique_ptr<LoadedDelta> delta(new LoadedDelta(context, std::move(step)));
  const StepManifest& manifest = delta->step().manifest;
  KEDGE_ASSIGN_OR_RETURN(const DeltaReads reads,
                         PlanReads(binding, mask, delta->step()));
  const std::vector<std::vector<bool>>& pieces = reads.pieces;
  for (const std::uint32_t index : reads.records) {
    delta->records_.push_back({index, {}});
  }
  KEDGE_RETURN_IF_ERROR(delta->files_.Open(reads.wanted));

  // The size of every file is proven now, so that a manifest cannot ask for
  // more memory than the store holds.
  struct Piece {
    std::uint32_t file;
    std::uint32_t number;
    std::byte* buffer;  // null if mapped
  };
  std::vector<Piece> todo;
  for (std::uint32_t f = 0; f < pieces.size(); ++f) {
    const std::uint64_t file_bytes = manifest.files[f].bytes;
    for (std::uint32_t p = 0; p < pieces[f].size();) {
      if (!pieces[f][p]) {
        ++p;
        continue;
      }
      const std::uint32_t first = p;
      while (p < pieces[f].size() && pieces[f][p]) ++p;
      Run run;
      if (!delta->files_.mapped()) {
        run.file = f;
        run.offset = first * kPieceBytes;
        run.bytes = std::min(p * kPieceBytes, file_bytes) - run.offset;
        run.buffer.reset(new (std::nothrow)
                             std::byte[run.bytes + kRecordSlackBytes]);
        if (run.buffer == nullptr) {
          return absl::ResourceExhaustedError(absl::StrCat(
              delta->files_.PathOf(f), ": no memory for ", run.bytes,
              " bytes of records; map files (ReadMode::kMap), or join from a "
              "newer anchor"));
        }
        std::memset(run.buffer.get() + run.bytes, 0, kRecordSlackBytes);
      }
      for (std::uint32_t q = first; q < p; ++q) {
        todo.push_back({f, q,
                        run.buffer == nullptr
                            ? nullptr
                            : run.buffer.get() + (q - first) * kPieceBytes});
      }
      if (run.buffer != nullptr) delta->runs_.push_back(std::move(run));
    }
  }
  // Neighbouring reads go to different files: one file alone is slower.
  std::stable_sort(
      todo.begin(), todo.end(),
      [](const Piece& a, const Piece& b) { return a.number < b.number; });
  KEDGE_RETURN_IF_ERROR(ParallelFor(
      context->io_pool, todo.size(), [&](std::size_t i) -> absl::Status {
        const Piece& piece = todo[i];
        const std::uint64_t offset = piece.number * kPieceBytes;
        const std::uint64_t bytes =
            std::min(kPieceBytes, manifest.files[piece.file].bytes - offset);
        KEDGE_ASSIGN_OR_RETURN(
            const std::span<const std::byte> fetched,
            delta->files_.Fetch(piece.file, offset, bytes, piece.buffer));
        return delta->files_.CheckPiece(piece.file, piece.number, offset,
                                        fetched);
      }));
  // A chain may have more files than a process may have open.
  delta->files_.CloseFiles();

  for (Record& record : delta->records_) {
    const DeltaRecord& info = manifest.records[record.index];
    if (delta->files_.mapped()) {
      record.bytes =
          delta->files_.Mapping(info.file).subspan(info.offset, info.bytes);
      continue;
    }
    const auto run = std::prev(
        std::upper_bound(delta->runs_.begin(), delta->runs_.end(), info,
                         [](const DeltaRecord& r, const Run& candidate) {
                           return std::tie(r.file, r.offset) <
                                  std::tie(candidate.file, candidate.offset);
                         }));
    record.bytes = {run->buffer.get() + (info.offset - run->offset),
                    info.bytes};
  }
  return delta;
}

absl::Status CheckRecords(IoPool* pool, const Binding& binding,
                          const L61Key& key, const LoadedDelta& delta) {
  return ParallelFor(
      pool, delta.records().size(), [&](std::size_t i) -> absl::Status {
        const LoadedDelta::Record& record = delta.records()[i];
        const DeltaRecord& info = delta.info(record);
        const auto summary =
            CheckRecord(record.bytes, binding.grid(info.tensor), info.slice,
                        UnitBytes(binding.table()[info.tensor].dtype), key);
        if (!summary.ok()) {
          return Annotate(summary.status(), delta.Where(record));
        }
        if (summary->nnz != info.nnz) {
          return DataLoss(
              {.where = delta.Where(record),
               .what = "nnz",
               .expected = absl::StrCat(info.nnz),
               .found = absl::StrCat(summary->nnz),
               .advice = "run `kedge fsck`, or join from an anchor"});
        }
        if (summary->l61 != info.l61) {
          return DataLoss(
              {.where = delta.Where(record),
               .what = "L(record)",
               .expected = Hex64(info.l61),
               .found = Hex64(summary->l61),
               .advice = "run `kedge fsck`, or join from an anchor"});
        }
        return absl::OkStatus();
      });
}

absl::Status ApplyDeltas(IoPool* pool, const Binding& binding,
                         std::span<const LoadedDelta* const> deltas,
                         ApplyCounts* counts) {
  struct Entry {
    const LoadedDelta* delta;
    const LoadedDelta::Record* record;
    const DeltaRecord* info;
    std::size_t order;
  };
  std::vector<Entry> entries;
  for (std::size_t d = 0; d < deltas.size(); ++d) {
    for (const LoadedDelta::Record& record : deltas[d]->records()) {
      entries.push_back({deltas[d], &record, &deltas[d]->info(record), d});
      ++counts->records;
      counts->nnz += entries.back().info->nnz;
    }
  }
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return std::make_tuple(a.info->tensor, a.info->slice.begin, a.order) <
           std::make_tuple(b.info->tensor, b.info->slice.begin, b.order);
  });

  // Records that share units, directly or through others, form one group.
  struct Group {
    std::size_t begin;
    std::size_t end;
    std::uint64_t bytes;
  };
  std::vector<Group> groups;
  std::uint64_t reach = 0;  // end of the group's slices
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const DeltaRecord& info = *entries[i].info;
    const bool joins = i > 0 && entries[i - 1].info->tensor == info.tensor &&
                       info.slice.begin < reach;
    if (!joins) {
      groups.push_back({i, i, 0});
      reach = 0;
    }
    groups.back().end = i + 1;
    groups.back().bytes += info.bytes;
    reach = std::max(reach, info.slice.end);
  }
  for (const Group& group : groups) {
    std::stable_sort(
        entries.begin() + static_cast<std::ptrdiff_t>(group.begin),
        entries.begin() + static_cast<std::ptrdiff_t>(group.end),
        [](const Entry& a, const Entry& b) { return a.order < b.order; });
  }
  // Large ones first, so that no thread is left alone with one at the end.
  std::stable_sort(
      groups.begin(), groups.end(),
      [](const Group& a, const Group& b) { return a.bytes > b.bytes; });

  std::atomic<std::uint64_t> units_written{0};
  const absl::Status status =
      ParallelFor(pool, groups.size(), [&](std::size_t g) -> absl::Status {
        std::uint64_t written = 0;
        for (std::size_t i = groups[g].begin; i < groups[g].end; ++i) {
          const Entry& entry = entries[i];
          const std::uint32_t tensor = entry.info->tensor;
          const auto units = ApplyRecord(
              entry.record->bytes, binding.grid(tensor), entry.info->slice,
              UnitBytes(binding.table()[tensor].dtype),
              binding.BoxesFor(tensor, entry.info->slice));
          if (!units.ok()) {
            return Annotate(units.status(), entry.delta->Where(*entry.record));
          }
          written += *units;
        }
        units_written.fetch_add(written, std::memory_order_relaxed);
        return absl::OkStatus();
      });
  counts->units_written += units_written.load();
  return status;
}

}  // namespace kedge
