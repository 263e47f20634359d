#ifndef KEDGE_ENGINE_IO_PIECE_IO_H_
#define KEDGE_ENGINE_IO_PIECE_IO_H_

// Moves one piece between memory and a file and hashes it on the same thread,
// in blocks that stay in that core's cache: the bytes come from memory once for
// both, and as many pieces are hashed at once as are moved.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kedge/engine/io/file_system.h"
#include "kedge/format/hash.h"

namespace kedge {

// Where a piece stands in a run: everything its hash is seeded with.
struct PieceKey {
  RunId run;
  std::uint64_t step = 0;
  FileId file;
  std::uint32_t piece = 0;  // from 0, in offset order within the file
};

// What a piece is written, read and hashed in: a fraction of a core's L2 cache.
inline constexpr std::size_t kHashBlockBytes = std::size_t{256} << 10;

// Writes `bytes` at `offset` and returns their piece hash (HashPiece). May run
// for several pieces of one file at once. `also`, if given, sees each block,
// which starts `at` bytes into the piece, while the cache holds it.
using BlockVisitor =
    std::function<void(std::uint64_t at, std::span<const std::byte> block)>;
absl::StatusOr<std::uint64_t> WritePiece(File& file, std::uint64_t offset,
                                         std::span<const std::byte> bytes,
                                         const PieceKey& key,
                                         const BlockVisitor& also = nullptr);

// Fills `out` from `offset` and checks it. Announces the whole piece to the
// file system first, so that its blocks are one large read for the storage.
//
// Errors: kDataLoss if the file ends before or the hash is another one; `out`
// then holds bytes that must not be used.
absl::Status ReadPiece(File& file, std::uint64_t offset,
                       std::uint64_t expected_hash, const PieceKey& key,
                       std::span<std::byte> out);

// Checks a piece that is in memory already, for example mapped. `path` and
// `offset` are for the message.
absl::Status CheckPiece(absl::string_view path, std::uint64_t offset,
                        std::uint64_t expected_hash, const PieceKey& key,
                        std::span<const std::byte> bytes);
// The same of `bytes` bytes whose hash is known.
absl::Status CheckPieceHash(absl::string_view path, std::uint64_t offset,
                            std::uint64_t bytes, std::uint64_t expected_hash,
                            const PieceKey& key, std::uint64_t found);

}  // namespace kedge

#endif  // KEDGE_ENGINE_IO_PIECE_IO_H_
