#ifndef KEDGE_READER_DATA_FILES_H_
#define KEDGE_READER_DATA_FILES_H_

// The data files of one published directory: opened, sized, mapped or read,
// checked piece by piece.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kedge/engine/io/file_system.h"
#include "kedge/format/manifest.h"
#include "kedge/reader/read_context.h"

namespace kedge {

// Without Open, files open when they are first fetched, and are never mapped.
//
// Thread safety: Fetch and CheckPiece may run concurrently, after Open.
class DataFiles {
 public:
  // `files` is the manifest's list of `directory`, which belongs to `step`;
  // both it and `context` outlive this object.
  DataFiles(const ReadContext* context, std::string directory,
            std::uint64_t step, const std::vector<DataFile>* files);

  // Opens those files of the list that `wanted` marks (one entry a file), and
  // maps them in map mode. Each must have exactly the manifest's size; one that
  // is shorter is waited for like one that is missing.
  //
  // Errors: kDataLoss a file is larger; kNotFound "pruned"; kUnavailable it
  // stayed missing or short until the deadline.
  absl::Status Open(const std::vector<bool>& wanted);

  // Whether Fetch hands out the mapping. False also where the file system
  // refused to map.
  bool mapped() const { return mapped_; }

  // Says that the range of an open file will be fetched soon, so that storage
  // works on it meanwhile.
  void Expect(std::uint32_t file, std::uint64_t offset, std::uint64_t bytes);

  // The bytes [offset, offset + bytes) of a file that is open: read into
  // `buffer`, or, if mapped(), in place (`buffer` is not used). The range lies
  // in the file.
  absl::StatusOr<std::span<const std::byte>> Fetch(std::uint32_t file,
                                                   std::uint64_t offset,
                                                   std::uint64_t bytes,
                                                   std::byte* buffer);
  // One piece of a file.
  struct PieceSpan {
    std::uint32_t number = 0;
    std::uint64_t offset = 0;
    std::uint64_t bytes = 0;
  };
  // Fetch into `buffer`, mapped or not, of the range from the first to the end
  // of the last of `pieces` (ascending, not empty), and CheckPiece of each, in
  // blocks that stay in a core's cache between the two. Best after Expect.
  // kDataLoss about a piece also sets `*bad`, its index.
  absl::Status FetchChecked(std::uint32_t file,
                            std::span<const PieceSpan> pieces,
                            std::byte* buffer, std::size_t* bad);
  // The same in parts of at most `part_bytes`, in order: `place` says where
  // [begin, end) of the file goes, `arrived` hears when it is there. Its piece
  // may turn out to be bad afterwards, and a read that is retried begins again
  // with the first part.
  using Place = absl::FunctionRef<absl::StatusOr<std::byte*>(
      std::uint64_t begin, std::uint64_t end)>;
  using Arrived =
      absl::FunctionRef<absl::Status(std::uint64_t begin, std::uint64_t end)>;
  absl::Status FetchParts(std::uint32_t file, std::span<const PieceSpan> pieces,
                          std::uint64_t part_bytes, Place place,
                          Arrived arrived, std::size_t* bad);

  // Gives back the descriptors. Mappings stay, and what is fetched otherwise
  // opens its file again.
  void CloseFiles();

  // Only if mapped(): the whole file.
  std::span<const std::byte> Mapping(std::uint32_t file) const;

  // Compares `bytes`, the piece number `piece` of the file, which begins at
  // `offset`, with the manifest's hash. kDataLoss names file and piece.
  absl::Status CheckPiece(std::uint32_t file, std::uint32_t piece,
                          std::uint64_t offset,
                          std::span<const std::byte> bytes) const;

  std::string PathOf(std::uint32_t file) const;

 private:
  struct Slot {
    std::shared_ptr<File> file;
    std::unique_ptr<MappedRegion> mapping;
  };
  absl::StatusOr<std::uint64_t> PieceHash(std::uint32_t file,
                                          std::uint32_t piece) const;
  absl::StatusOr<std::shared_ptr<File>> OpenOnce(std::uint32_t file) const;
  absl::StatusOr<std::shared_ptr<File>> Current(std::uint32_t file);
  void Forget(std::uint32_t file, const std::shared_ptr<File>& failed);

  const ReadContext* context_;
  std::string directory_;
  std::uint64_t step_;
  const std::vector<DataFile>* files_;
  bool mapped_ = false;
  std::mutex mutex_;
  // Only the `file` members change after Open.
  std::vector<Slot> slots_;
};

}  // namespace kedge

#endif  // KEDGE_READER_DATA_FILES_H_
