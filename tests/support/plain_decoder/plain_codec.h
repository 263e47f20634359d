#ifndef KEDGE_TESTS_SUPPORT_PLAIN_DECODER_PLAIN_CODEC_H_
#define KEDGE_TESTS_SUPPORT_PLAIN_DECODER_PLAIN_CODEC_H_

// The codec and the checksum of spec/segment.md and spec/l61.md, written from
// these pages alone: slow, plain, and without any header of kedge. The
// reference of property tests, and proof that the pages suffice.
//
// Everything throws std::runtime_error, with a message, on any violation.

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace kedge_plain {

using Bytes = std::vector<std::uint8_t>;

// spec/tensor_table.md: bytes of an element, and the name, of dtype 1 to 16.
std::uint32_t ElementBytes(std::uint8_t dtype);
std::string DTypeName(std::uint8_t dtype);

// spec/segment.md, "Tiles".
struct Grid {
  std::uint64_t rows = 0;
  std::uint64_t cols = 0;
  std::uint64_t tile_rows = 0;
  std::uint64_t tile_cols = 0;
  std::uint64_t tiles_per_band = 0;
  std::uint64_t bands = 0;
};
Grid GridOf(const std::vector<std::uint64_t>& shape,
            std::uint32_t element_bytes);

// A changed unit: its flat index in the tensor, and new - old of its raw bits.
using FlatChange = std::pair<std::uint64_t, std::int64_t>;

// The changes of a record of codec 1 in ascending order of the flat index.
// `record` has no padding; the slice is [begin, end) in units.
std::vector<FlatChange> DecodeRecord(const Bytes& record,
                                     const std::vector<std::uint64_t>& shape,
                                     std::uint32_t element_bytes,
                                     std::uint64_t begin, std::uint64_t end);

// The record of these changes (ascending, not empty, inside the slice), as the
// page says that every writer makes it.
Bytes EncodeRecord(const std::vector<FlatChange>& changes,
                   const std::vector<std::uint64_t>& shape,
                   std::uint32_t element_bytes, std::uint64_t begin,
                   std::uint64_t end);

// Adds the changes to a tensor's bytes.
void Apply(const std::vector<FlatChange>& changes, std::uint32_t element_bytes,
           Bytes* tensor);
// The changes that make `after` of `before`.
std::vector<FlatChange> Difference(const Bytes& before, const Bytes& after,
                                   std::uint32_t element_bytes);

// spec/l61.md. S of the bytes at byte `offset` of a tensor; L of changes.
std::uint64_t L61(std::uint64_t seed, const Bytes& bytes,
                  std::uint64_t offset = 0);
std::uint64_t L61OfChanges(std::uint64_t seed,
                           const std::vector<FlatChange>& changes,
                           std::uint32_t element_bytes);
std::uint64_t L61Sum(std::uint64_t a, std::uint64_t b);

}  // namespace kedge_plain

#endif  // KEDGE_TESTS_SUPPORT_PLAIN_DECODER_PLAIN_CODEC_H_
