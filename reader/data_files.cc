#include "kedge/reader/data_files.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kedge/engine/io/piece_io.h"
#include "kedge/format/hash.h"
#include "kedge/format/layout.h"
#include "kedge/format/status.h"
#include "kedge/reader/parallel.h"

namespace kedge {

DataFiles::DataFiles(const ReadContext* context, std::string directory,
                     std::uint64_t step, const std::vector<DataFile>* files)
    : context_(context),
      directory_(std::move(directory)),
      step_(step),
      files_(files),
      slots_(files->size()) {}

std::string DataFiles::PathOf(std::uint32_t file) const {
  return JoinPath(directory_, DataFileName((*files_)[file].id));
}

absl::StatusOr<std::shared_ptr<File>> DataFiles::OpenOnce(
    std::uint32_t file) const {
  const std::string path = PathOf(file);
  KEDGE_ASSIGN_OR_RETURN(std::unique_ptr<File> opened,
                         context_->fs().OpenForRead(path));
  KEDGE_ASSIGN_OR_RETURN(const std::uint64_t bytes, opened->Size());
  const std::uint64_t expected = (*files_)[file].bytes;
  if (bytes == expected) return std::shared_ptr<File>(std::move(opened));
  const std::string text = Describe({.where = path,
                                     .what = "file size in bytes",
                                     .expected = absl::StrCat(expected),
                                     .found = absl::StrCat(bytes),
                                     .advice = "run `kedge fsck`, or rejoin"});
  // A published file never grows; a short one may be one that this client does
  // not see in full yet.
  return bytes > expected ? absl::DataLossError(text)
                          : absl::UnavailableError(text);
}

absl::Status DataFiles::Open(const std::vector<bool>& wanted) {
  std::vector<std::uint32_t> todo;
  for (std::uint32_t f = 0; f < wanted.size(); ++f) {
    if (wanted[f]) todo.push_back(f);
  }
  KEDGE_RETURN_IF_ERROR(
      ParallelFor(context_->io_pool, todo.size(), [&](std::size_t i) {
        return RetryReads(*context_, step_, PathOf(todo[i]), true,
                          [&] { return Current(todo[i]).status(); });
      }));
  if (!context_->map) return absl::OkStatus();
  for (const std::uint32_t f : todo) {
    const absl::Status status =
        RetryReads(*context_, step_, PathOf(f), true, [&]() -> absl::Status {
          KEDGE_ASSIGN_OR_RETURN(const std::shared_ptr<File> file, Current(f));
          auto mapping = file->Map((*files_)[f].bytes);
          if (!mapping.ok()) {
            Forget(f, file);
            return mapping.status();
          }
          slots_[f].mapping = *std::move(mapping);
          return absl::OkStatus();
        });
    if (absl::IsUnimplemented(status)) {
      for (Slot& slot : slots_) slot.mapping.reset();
      return absl::OkStatus();  // explicit reads work everywhere
    }
    KEDGE_RETURN_IF_ERROR(status);
  }
  mapped_ = true;
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<File>> DataFiles::Current(std::uint32_t file) {
  {
    const std::lock_guard lock(mutex_);
    if (slots_[file].file != nullptr) return slots_[file].file;
  }
  KEDGE_ASSIGN_OR_RETURN(std::shared_ptr<File> opened, OpenOnce(file));
  const std::lock_guard lock(mutex_);
  if (slots_[file].file == nullptr) slots_[file].file = std::move(opened);
  return slots_[file].file;
}

void DataFiles::Forget(std::uint32_t file,
                       const std::shared_ptr<File>& failed) {
  const std::lock_guard lock(mutex_);
  if (slots_[file].file == failed) slots_[file].file = nullptr;
}

void DataFiles::CloseFiles() {
  const std::lock_guard lock(mutex_);
  for (Slot& slot : slots_) slot.file = nullptr;
}

std::span<const std::byte> DataFiles::Mapping(std::uint32_t file) const {
  KEDGE_CHECK(slots_[file].mapping != nullptr);
  return slots_[file].mapping->bytes();
}

void DataFiles::Expect(std::uint32_t file, std::uint64_t offset,
                       std::uint64_t bytes) {
  std::shared_ptr<File> opened;
  {
    const std::lock_guard lock(mutex_);
    opened = slots_[file].file;
  }
  if (opened != nullptr) opened->WillRead(offset, bytes);
}

absl::StatusOr<std::span<const std::byte>> DataFiles::Fetch(
    std::uint32_t file, std::uint64_t offset, std::uint64_t bytes,
    std::byte* buffer) {
  if (mapped_) {
    // Without it the kernel brings in a mapped file a few pages at a time.
    Expect(file, offset, bytes);
    context_->bytes_read->fetch_add(bytes, std::memory_order_relaxed);
    return Mapping(file).subspan(offset, bytes);
  }
  const std::span<std::byte> out(buffer, bytes);
  KEDGE_RETURN_IF_ERROR(
      RetryReads(*context_, step_, PathOf(file), true, [&]() -> absl::Status {
        KEDGE_ASSIGN_OR_RETURN(const std::shared_ptr<File> opened,
                               Current(file));
        const absl::Status status = ReadAll(*opened, offset, out);
        if (status.ok()) return status;
        Forget(file, opened);
        // The file had the right size when it was opened: an early end means
        // that what is read now is not what was published.
        return absl::IsDataLoss(status)
                   ? absl::UnavailableError(status.message())
                   : status;
      }));
  context_->bytes_read->fetch_add(bytes, std::memory_order_relaxed);
  return out;
}

absl::Status DataFiles::FetchChecked(std::uint32_t file,
                                     std::span<const PieceSpan> pieces,
                                     std::byte* buffer, std::size_t* bad) {
  return FetchParts(
      file, pieces, ~std::uint64_t{0},
      [&](std::uint64_t, std::uint64_t) -> absl::StatusOr<std::byte*> {
        return buffer;
      },
      [](std::uint64_t, std::uint64_t) { return absl::OkStatus(); }, bad);
}

absl::Status DataFiles::FetchParts(std::uint32_t file,
                                   std::span<const PieceSpan> pieces,
                                   std::uint64_t part_bytes, Place place,
                                   Arrived arrived, std::size_t* bad) {
  const DataFile& described = (*files_)[file];
  const std::uint64_t begin = pieces.front().offset;
  const std::uint64_t end = pieces.back().offset + pieces.back().bytes;
  const RunId& run = context_->store->info().run;
  // `fill` gets the offset and place of each block.
  const auto fetch = [&](auto fill) -> absl::Status {
    std::size_t next = 0;
    std::optional<PieceHasher> hasher;  // of pieces[next]
    const auto hash = [&](std::uint64_t at,
                          std::span<const std::byte> block) -> absl::Status {
      const std::uint64_t block_end = at + block.size();
      while (next < pieces.size() && pieces[next].offset < block_end) {
        const PieceSpan& piece = pieces[next];
        const PieceKey key = {run, step_, described.id, piece.number};
        if (!hasher) hasher.emplace(key.run, key.step, key.file, key.piece);
        const std::uint64_t from = std::max(at, piece.offset);
        const std::uint64_t to =
            std::min(block_end, piece.offset + piece.bytes);
        hasher->Update(block.subspan(from - at, to - from));
        if (to < piece.offset + piece.bytes) break;
        const auto expected = PieceHash(file, piece.number);
        const std::uint64_t found = hasher->Finish();
        if (!expected.ok() || found != *expected) {
          *bad = next;
          KEDGE_RETURN_IF_ERROR(expected.status());
          return CheckPieceHash(PathOf(file), piece.offset, piece.bytes,
                                *expected, key, found);
        }
        hasher.reset();
        ++next;
      }
      return absl::OkStatus();
    };
    for (std::uint64_t part = begin; part < end;) {
      const std::uint64_t part_end = part + std::min(end - part, part_bytes);
      KEDGE_ASSIGN_OR_RETURN(std::byte* const buffer, place(part, part_end));
      for (std::uint64_t at = part; at < part_end;) {
        const std::span<std::byte> block(
            buffer + (at - part),
            std::min<std::uint64_t>(part_end - at, kHashBlockBytes));
        KEDGE_RETURN_IF_ERROR(fill(at, block));
        KEDGE_RETURN_IF_ERROR(hash(at, block));
        at += block.size();
      }
      KEDGE_RETURN_IF_ERROR(arrived(part, part_end));
      part = part_end;
    }
    return absl::OkStatus();
  };
  if (mapped_) {
    const std::span<const std::byte> mapping = Mapping(file);
    KEDGE_RETURN_IF_ERROR(
        fetch([&](std::uint64_t at, std::span<std::byte> out) {
          std::memcpy(out.data(), mapping.data() + at, out.size());
          return absl::OkStatus();
        }));
  } else {
    KEDGE_RETURN_IF_ERROR(
        RetryReads(*context_, step_, PathOf(file), true, [&]() -> absl::Status {
          KEDGE_ASSIGN_OR_RETURN(const std::shared_ptr<File> opened,
                                 Current(file));
          return fetch(
              [&](std::uint64_t at, std::span<std::byte> out) -> absl::Status {
                const absl::Status status = ReadAll(*opened, at, out);
                if (status.ok()) return status;
                Forget(file, opened);
                return absl::IsDataLoss(status)  // see Fetch
                           ? absl::UnavailableError(status.message())
                           : status;
              });
        }));
  }
  context_->bytes_read->fetch_add(end - begin, std::memory_order_relaxed);
  return absl::OkStatus();
}

absl::StatusOr<std::uint64_t> DataFiles::PieceHash(std::uint32_t file,
                                                   std::uint32_t piece) const {
  const DataFile& described = (*files_)[file];
  if (piece < described.piece_hashes.size()) {
    return described.piece_hashes[piece];
  }
  return DataLoss(
      {.where = PathOf(file),
       .what = "piece number",
       .expected = absl::StrCat("below ", described.piece_hashes.size()),
       .found = absl::StrCat(piece),
       .advice = "run `kedge fsck`"});
}

absl::Status DataFiles::CheckPiece(std::uint32_t file, std::uint32_t piece,
                                   std::uint64_t offset,
                                   std::span<const std::byte> bytes) const {
  KEDGE_ASSIGN_OR_RETURN(const std::uint64_t expected, PieceHash(file, piece));
  return kedge::CheckPiece(PathOf(file), offset, expected,
                           {.run = context_->store->info().run,
                            .step = step_,
                            .file = (*files_)[file].id,
                            .piece = piece},
                           bytes);
}

}  // namespace kedge
