#ifndef KEDGE_READER_VERSION_READER_H_
#define KEDGE_READER_VERSION_READER_H_

// Any range of any tensor at one version, from anchor and deltas, in bounded
// memory and without weights of one's own: for tools.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "kedge/engine/io/store.h"

namespace kedge {

// Opens the chain once (manifests, files), then reads ranges on demand. Every
// piece that is read is hashed; bytes are rebuilt as anchor plus differences.
// Holds open files (few, however long the chain), and at most `cache_bytes` of
// pieces. An anchor whose bytes prove damaged is passed over for an older one,
// if one leads to the version. `store` outlives the reader. S is not checked:
// callers that need it sum what they read.
//
// Thread safety: Read may run concurrently.
class VersionReader {
 public:
  static absl::StatusOr<std::unique_ptr<VersionReader>> Open(
      const Store* store, const std::shared_ptr<const PublishedStep>& step,
      std::uint64_t cache_bytes = std::uint64_t{64} << 20);
  ~VersionReader();

  const TensorTable& table() const;
  const VersionState& state() const;

  // Fills `out` with the bytes [byte_begin, byte_begin + out.size()) of tensor
  // `ordinal` (a tied one reads its owner), whole units. kDataLoss names file
  // and piece.
  absl::Status Read(std::uint32_t ordinal, std::uint64_t byte_begin,
                    std::span<std::byte> out);

 private:
  struct Plan;
  struct Impl;
  explicit VersionReader(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace kedge

#endif  // KEDGE_READER_VERSION_READER_H_
