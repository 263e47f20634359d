#include "kedge/reader/fsck_data.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kedge/engine/cpu/record_apply.h"
#include "kedge/format/fixed_files.h"
#include "kedge/format/layout.h"
#include "kedge/format/limits.h"
#include "kedge/format/status.h"

namespace kedge::fsck {
namespace {

// A record that takes more memory than this is read by one thread at a time.
constexpr std::uint64_t kLargeBytes = std::uint64_t{64} << 20;

constexpr std::uint64_t RoundUp(std::uint64_t value, std::uint64_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

// Memory that is not zeroed before it is read into.
struct Buffer {
  std::unique_ptr<std::byte[]> data;
  std::uint64_t bytes = 0;

  explicit Buffer(std::uint64_t size)
      : data(new std::byte[size + kRecordSlackBytes]), bytes(size) {
    std::memset(data.get() + size, 0, kRecordSlackBytes);
  }
  std::span<std::byte> span() { return {data.get(), bytes}; }
};

std::string TensorText(const TensorTable& table, std::uint32_t tensor) {
  return absl::StrCat("tensor \"", Shown(table[tensor].name), "\"");
}

// One file of a directory, open while tasks read it.
struct OpenFile {
  std::string name;  // relative to the store
  std::shared_ptr<File> file;
  const DataFile* entry = nullptr;
};

class Checker {
 public:
  Checker(DataContext* context, const DataDirectory* directory,
          FindingList* findings)
      : context_(*context), directory_(*directory), findings_(*findings) {}

  // Nothing if it could not be opened, which is then a finding.
  absl::StatusOr<std::shared_ptr<OpenFile>> Open(const DataFile& entry) {
    auto open = std::make_shared<OpenFile>();
    const std::string base = DataFileName(entry.id);
    open->name = absl::StrCat(directory_.name, "/", base);
    open->entry = &entry;
    const std::string path = JoinPath(directory_.path, base);
    auto file = context_.fs->OpenForRead(path);
    if (!file.ok()) {
      if (absl::IsResourceExhausted(file.status())) return file.status();
      findings_.Add(FromStatus(Id::kDataFileNotRegular, open->name, path,
                               file.status(), Id::kDataFileMissing));
      return std::shared_ptr<OpenFile>();
    }
    open->file = *std::move(file);
    return open;
  }

  // Whether all of `out` could be read; else there is a finding.
  absl::StatusOr<bool> Read(const OpenFile& open, std::uint64_t offset,
                            std::span<std::byte> out) {
    const absl::Status status = ReadAll(*open.file, offset, out);
    if (status.ok()) return true;
    if (absl::IsResourceExhausted(status)) return status;
    findings_.Add(FromStatus(Id::kDataFileSize, open.name, open.file->path(),
                             status, Id::kDataFileMissing));
    return false;
  }

  // Whether the piece is the one published; else there is a finding. `what`
  // says what it holds.
  bool CheckHash(const OpenFile& open, std::uint32_t piece,
                 std::uint64_t offset, std::span<const std::byte> bytes,
                 const std::function<std::string()>& what) {
    const std::uint64_t expected = open.entry->piece_hashes[piece];
    const std::uint64_t found =
        HashPiece(context_.run, directory_.step, open.entry->id, piece, bytes);
    if (expected == found) return true;
    findings_.Add(
        MakeFinding(Id::kPieceHash, open.name,
                    absl::StrCat("hash of piece ", piece, " (", bytes.size(),
                                 " bytes", what(), "): expected ",
                                 Hex64(expected), ", found ", Hex64(found)),
                    static_cast<std::int64_t>(offset)));
    return false;
  }

  // `bytes` stand at `offset` and must be zero.
  void CheckZero(const OpenFile& open, std::uint64_t offset,
                 std::span<const std::byte> bytes, absl::string_view what) {
    const auto bad = std::find_if(bytes.begin(), bytes.end(),
                                  [](std::byte b) { return b != std::byte{}; });
    if (bad == bytes.end()) return;
    findings_.Add(MakeFinding(
        Id::kPaddingNotZero, open.name,
        absl::StrCat(what, ": expected 0, found ", std::to_integer<int>(*bad)),
        static_cast<std::int64_t>(offset) + (bad - bytes.begin())));
  }

  DataContext& context() { return context_; }
  FindingList& findings() { return findings_; }

 private:
  DataContext& context_;
  const DataDirectory& directory_;
  FindingList& findings_;
};

// One piece of a segment and the records that begin in it.
struct SegmentTask {
  std::uint32_t piece = 0;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  std::uint64_t payload_end = 0;
  // Of the file's records in offset order: those whose bytes or padding touch
  // the piece.
  std::vector<const DeltaRecord*> records;
};

absl::Status CheckSegmentPiece(Checker& checker, const OpenFile& open,
                               const SegmentTask& task,
                               const TensorTable& table) {
  DataContext& context = checker.context();
  const std::uint64_t piece_bytes = task.end - task.begin;
  std::uint64_t wanted = piece_bytes;
  for (const DeltaRecord* record : task.records) {
    if (record->offset >= task.begin) {
      wanted = std::max(wanted, record->offset + record->bytes - task.begin);
    }
  }
  std::unique_lock<std::mutex> large(context.large_record, std::defer_lock);
  if (wanted > kLargeBytes) large.lock();
  Buffer buffer(wanted);
  KEDGE_ASSIGN_OR_RETURN(
      const bool read,
      checker.Read(open, task.begin, buffer.span().first(piece_bytes)));
  context.advance(piece_bytes);
  if (!read) return absl::OkStatus();
  if (!checker.CheckHash(open, task.piece, task.begin,
                         buffer.span().first(piece_bytes),
                         [] { return std::string(); })) {
    return absl::OkStatus();  // what is in it is not worth a word
  }
  if (wanted > piece_bytes) {
    // The piece that this record ends in is hashed by its own task.
    KEDGE_ASSIGN_OR_RETURN(
        const bool rest,
        checker.Read(open, task.end, buffer.span().subspan(piece_bytes)));
    if (!rest) return absl::OkStatus();
  }
  const auto zero = [&](std::uint64_t begin, std::uint64_t end,
                        absl::string_view what) {
    begin = std::max(begin, task.begin);
    end = std::min(end, task.end);
    if (begin >= end) return;
    checker.CheckZero(open, begin,
                      buffer.span().subspan(begin - task.begin, end - begin),
                      what);
  };
  for (const DeltaRecord* record : task.records) {
    const std::uint64_t record_end = record->offset + record->bytes;
    zero(record_end, RoundUp(record_end, kRecordAlignment), "record padding");
    if (record->offset < task.begin) continue;
    const TensorSpec& spec = table[record->tensor];
    const auto bytes =
        buffer.span().subspan(record->offset - task.begin, record->bytes);
    const auto summary =
        CheckRecord(bytes, spec.grid(), record->slice, UnitBytes(spec.dtype),
                    context.summer->key());
    context.records.fetch_add(1, std::memory_order_relaxed);
    const auto where = [&] {
      return absl::StrCat(TensorText(table, record->tensor), ", units [",
                          record->slice.begin, ", ", record->slice.end, "): ");
    };
    const auto add = [&](Id id, const std::string& what) {
      checker.findings().Add(
          MakeFinding(id, open.name, absl::StrCat(where(), what),
                      static_cast<std::int64_t>(record->offset)));
    };
    if (!summary.ok()) {
      const absl::string_view message = summary.status().message();
      add(Id::kRecordBad, std::string(message));
      continue;
    }
    if (summary->nnz != record->nnz) {
      add(Id::kRecordNnz, absl::StrCat("changed units: expected ", record->nnz,
                                       ", found ", summary->nnz));
    }
    if (summary->l61 != record->l61) {
      add(Id::kRecordL61, absl::StrCat("L61: expected ", Hex64(record->l61),
                                       ", found ", Hex64(summary->l61)));
    }
  }
  zero(task.payload_end, open.entry->bytes, "tail");
  return absl::OkStatus();
}

// One slice's piece of an anchor file.
struct AnchorPiece {
  std::uint32_t piece = 0;
  std::uint32_t tensor = 0;
  std::uint64_t offset = 0;         // in the file
  std::uint64_t tensor_offset = 0;  // in the tensor, bytes
  std::uint64_t bytes = 0;
};

// Pieces that are read together, and everything before the next ones.
struct AnchorTask {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  std::vector<AnchorPiece> pieces;
};

// What an anchor's bytes sum to.
struct AnchorSums {
  std::mutex mutex;
  std::vector<std::uint64_t> l61 ABSL_GUARDED_BY(mutex);
  std::vector<bool> incomplete ABSL_GUARDED_BY(mutex);  // some bytes are bad

  void Add(std::uint32_t tensor, std::uint64_t sum) {
    const std::lock_guard<std::mutex> lock(mutex);
    l61[tensor] = L61Add(l61[tensor], sum);
  }
  void MarkIncomplete(std::uint32_t tensor) {
    const std::lock_guard<std::mutex> lock(mutex);
    incomplete[tensor] = true;
  }
};

absl::Status CheckAnchorRun(Checker& checker, const OpenFile& open,
                            const AnchorTask& task, const TensorTable& table,
                            AnchorSums& sums) {
  DataContext& context = checker.context();
  Buffer buffer(task.end - task.begin);
  KEDGE_ASSIGN_OR_RETURN(const bool read,
                         checker.Read(open, task.begin, buffer.span()));
  context.advance(task.end - task.begin);
  if (!read) {
    for (const AnchorPiece& piece : task.pieces) {
      sums.MarkIncomplete(piece.tensor);
    }
    return absl::OkStatus();
  }
  std::uint64_t at = task.begin;
  if (at == 0) at = kDataFileHeaderBytes;  // the header is checked elsewhere
  for (const AnchorPiece& piece : task.pieces) {
    checker.CheckZero(
        open, at, buffer.span().subspan(at - task.begin, piece.offset - at),
        at == kDataFileHeaderBytes ? "header block" : "slice padding");
    at = piece.offset + piece.bytes;
    const auto bytes =
        buffer.span().subspan(piece.offset - task.begin, piece.bytes);
    if (checker.CheckHash(open, piece.piece, piece.offset, bytes, [&] {
          return absl::StrCat(", of ", TensorText(table, piece.tensor));
        })) {
      sums.Add(piece.tensor, context.summer->Sum(piece.tensor_offset, bytes));
    } else {
      sums.MarkIncomplete(piece.tensor);
    }
  }
  checker.CheckZero(open, at, buffer.span().subspan(at - task.begin),
                    "slice padding");
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckSegments(DataContext& context, const DataDirectory& directory,
                           const StepManifest& manifest,
                           const TensorTable& table, FindingList* findings) {
  Checker checker(&context, &directory, findings);
  std::vector<const DeltaRecord*> order;
  order.reserve(manifest.records.size());
  for (const DeltaRecord& record : manifest.records) order.push_back(&record);
  std::sort(order.begin(), order.end(),
            [](const DeltaRecord* a, const DeltaRecord* b) {
              return a->file != b->file ? a->file < b->file
                                        : a->offset < b->offset;
            });
  IoPool::Batch batch(context.pool);
  batch.set_max_in_flight(2 * context.pool->thread_count());
  std::size_t next = 0;  // the file's first record in `order`
  for (std::uint32_t f = 0; f < manifest.files.size(); ++f) {
    std::size_t last = next;
    while (last < order.size() && order[last]->file == f) ++last;
    const std::span<const DeltaRecord* const> records(order.data() + next,
                                                      last - next);
    next = last;
    if (!directory.usable[f]) continue;
    const DataFile& entry = manifest.files[f];
    KEDGE_ASSIGN_OR_RETURN(const std::shared_ptr<OpenFile> open,
                           checker.Open(entry));
    if (open == nullptr) continue;
    const std::uint64_t payload_end =
        records.empty()
            ? kDataFileHeaderBytes
            : RoundUp(records.back()->offset + records.back()->bytes,
                      kRecordAlignment);
    std::size_t first = 0;  // touches the piece, or comes after it
    for (std::uint64_t begin = 0; begin < entry.bytes; begin += kPieceBytes) {
      auto task = std::make_shared<SegmentTask>();
      task->piece = static_cast<std::uint32_t>(begin / kPieceBytes);
      task->begin = begin;
      task->end = std::min(entry.bytes, begin + kPieceBytes);
      task->payload_end = payload_end;
      const auto end_of = [&](std::size_t i) {
        return RoundUp(records[i]->offset + records[i]->bytes,
                       kRecordAlignment);
      };
      while (first < records.size() && end_of(first) <= task->begin) ++first;
      for (std::size_t i = first;
           i < records.size() && records[i]->offset < task->end; ++i) {
        task->records.push_back(records[i]);
      }
      batch.Submit([&checker, &table, open, task] {
        return CheckSegmentPiece(checker, *open, *task, table);
      });
    }
  }
  return batch.Wait();
}

absl::Status CheckAnchorFiles(DataContext& context,
                              const DataDirectory& directory,
                              const AnchorManifest& manifest,
                              const TensorTable& table, FindingList* findings) {
  Checker checker(&context, &directory, findings);
  // Within a file slices stand in the order of the manifest.
  std::vector<std::vector<std::uint32_t>> slices_of(manifest.files.size());
  AnchorSums sums;
  {
    const std::lock_guard<std::mutex> lock(sums.mutex);
    sums.l61.assign(table.size(), 0);
    sums.incomplete.assign(table.size(), false);
    for (std::uint32_t i = 0; i < manifest.slices.size(); ++i) {
      const AnchorSlice& slice = manifest.slices[i];
      slices_of[slice.file].push_back(i);
      if (!directory.usable[slice.file]) sums.incomplete[slice.tensor] = true;
    }
  }
  IoPool::Batch batch(context.pool);
  batch.set_max_in_flight(2 * context.pool->thread_count());
  for (std::uint32_t f = 0; f < manifest.files.size(); ++f) {
    if (!directory.usable[f]) continue;
    const DataFile& entry = manifest.files[f];
    KEDGE_ASSIGN_OR_RETURN(const std::shared_ptr<OpenFile> open,
                           checker.Open(entry));
    if (open == nullptr) {
      for (const std::uint32_t s : slices_of[f]) {
        sums.MarkIncomplete(manifest.slices[s].tensor);
      }
      continue;
    }
    auto task = std::make_shared<AnchorTask>();
    const auto submit = [&](std::uint64_t end) {
      task->end = end;
      batch.Submit([&checker, &table, &sums, open, task] {
        return CheckAnchorRun(checker, *open, *task, table, sums);
      });
      task = std::make_shared<AnchorTask>();
      task->begin = end;
    };
    std::uint32_t piece = 0;
    for (const std::uint32_t s : slices_of[f]) {
      const AnchorSlice& slice = manifest.slices[s];
      const std::uint32_t unit_bytes = UnitBytes(table[slice.tensor].dtype);
      const std::uint64_t bytes = slice.slice.count() * unit_bytes;
      for (std::uint64_t at = 0; at < bytes; at += kPieceBytes) {
        AnchorPiece next;
        next.piece = piece++;
        next.tensor = slice.tensor;
        next.offset = slice.offset + at;
        next.tensor_offset = slice.slice.begin * unit_bytes + at;
        next.bytes = std::min(kPieceBytes, bytes - at);
        if (!task->pieces.empty() &&
            next.offset + next.bytes - task->begin > kPieceBytes) {
          submit(next.offset);
        }
        task->pieces.push_back(next);
      }
    }
    submit(entry.bytes);
  }
  KEDGE_RETURN_IF_ERROR(batch.Wait());
  const std::lock_guard<std::mutex> lock(sums.mutex);
  for (std::uint32_t i = 0; i < table.size(); ++i) {
    if (table[i].tied_to != kNotTied || sums.incomplete[i] ||
        sums.l61[i] == manifest.l61[i]) {
      continue;
    }
    findings->Add(MakeFinding(
        Id::kAnchorL61, absl::StrCat(directory.name, "/", kManifestFileName),
        absl::StrCat(TensorText(table, i), ": L61: expected ",
                     Hex64(manifest.l61[i]), ", found ", Hex64(sums.l61[i]),
                     " in the anchor's bytes")));
  }
  return absl::OkStatus();
}

}  // namespace kedge::fsck
