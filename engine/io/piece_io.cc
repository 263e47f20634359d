#include "kedge/engine/io/piece_io.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "kedge/format/status.h"

namespace kedge {

absl::StatusOr<std::uint64_t> WritePiece(File& file, std::uint64_t offset,
                                         std::span<const std::byte> bytes,
                                         const PieceKey& key,
                                         const BlockVisitor& also) {
  PieceHasher hasher(key.run, key.step, key.file, key.piece);
  for (std::size_t at = 0; at < bytes.size();) {
    const std::span<const std::byte> block =
        bytes.subspan(at, std::min(bytes.size() - at, kHashBlockBytes));
    hasher.Update(block);
    if (also) also(at, block);
    KEDGE_RETURN_IF_ERROR(WriteAll(file, offset + at, block));
    at += block.size();
  }
  return hasher.Finish();
}

absl::Status ReadPiece(File& file, std::uint64_t offset,
                       std::uint64_t expected_hash, const PieceKey& key,
                       std::span<std::byte> out) {
  if (out.size() > kHashBlockBytes) file.WillRead(offset, out.size());
  PieceHasher hasher(key.run, key.step, key.file, key.piece);
  for (std::size_t done = 0; done < out.size();) {
    const std::span<std::byte> block =
        out.subspan(done, std::min(out.size() - done, kHashBlockBytes));
    KEDGE_RETURN_IF_ERROR(ReadAll(file, offset + done, block));
    hasher.Update(block);
    done += block.size();
  }
  return CheckPieceHash(file.path(), offset, out.size(), expected_hash, key,
                        hasher.Finish());
}

absl::Status CheckPiece(absl::string_view path, std::uint64_t offset,
                        std::uint64_t expected_hash, const PieceKey& key,
                        std::span<const std::byte> bytes) {
  return CheckPieceHash(
      path, offset, bytes.size(), expected_hash, key,
      HashPiece(key.run, key.step, key.file, key.piece, bytes));
}

absl::Status CheckPieceHash(absl::string_view path, std::uint64_t offset,
                            std::uint64_t bytes, std::uint64_t expected_hash,
                            const PieceKey& key, std::uint64_t found) {
  if (found == expected_hash) return absl::OkStatus();
  const std::string where = absl::StrCat(path, ": offset ", offset);
  const std::string what =
      absl::StrCat("hash of piece ", key.piece, " (", bytes, " bytes)");
  const std::string expected_text = Hex64(expected_hash);
  const std::string found_text = Hex64(found);
  Problem problem;
  problem.where = where;
  problem.what = what;
  problem.expected = expected_text;
  problem.found = found_text;
  problem.advice = "run `kedge fsck`";
  return DataLoss(problem);
}

}  // namespace kedge
