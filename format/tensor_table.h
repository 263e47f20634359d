#ifndef KEDGE_FORMAT_TENSOR_TABLE_H_
#define KEDGE_FORMAT_TENSOR_TABLE_H_

// The tensors of a model: names, dtypes, shapes, declared ties. Stored once a
// run as tensors-<hash>.kdt and named by every manifest. See
// spec/tensor_table.md.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kedge/format/dtype.h"
#include "kedge/format/hash.h"
#include "kedge/format/tile_grid.h"

namespace kedge {

inline constexpr std::uint32_t kNotTied = 0xffffffff;

struct TensorSpec {
  std::string name;  // non-empty UTF-8 without NUL, at most kMaxNameBytes
  DType dtype = DType::kU8;
  std::vector<std::uint64_t> shape;
  // The ordinal of the tensor whose storage this one shares; kNotTied if it has
  // its own. The owner is not itself tied and has the same dtype and shape.
  std::uint32_t tied_to = kNotTied;

  std::uint64_t element_count() const;
  std::uint64_t unit_count() const;
  std::uint64_t byte_count() const;
  TileGrid grid() const;

  friend bool operator==(const TensorSpec&, const TensorSpec&) = default;
};

// Tensors in ascending bytewise order of their names; a tensor's place is its
// *ordinal*. Immutable once made.
//
// Thread safety: const methods may run concurrently.
class TensorTable {
 public:
  // Sorts the tensors, checks them and the limits, and computes bytes and hash.
  // Ties are given by name: (alias, owner). kInvalidArgument names the tensor.
  static absl::StatusOr<TensorTable> Create(
      std::vector<TensorSpec> tensors,
      std::span<const std::pair<std::string, std::string>> ties = {});
  // Verifies untrusted bytes of a .kdt file; kDataLoss or kUnimplemented.
  static absl::StatusOr<TensorTable> Parse(absl::string_view where,
                                           std::span<const std::byte> bytes);

  std::span<const TensorSpec> tensors() const { return tensors_; }
  const TensorSpec& operator[](std::size_t ordinal) const {
    return tensors_[ordinal];
  }
  std::size_t size() const { return tensors_.size(); }
  // The ordinal of `name`; kNotFound.
  absl::StatusOr<std::uint32_t> Find(absl::string_view name) const;

  std::span<const std::byte> bytes() const { return bytes_; }
  const Hash128& hash() const { return hash_; }  // XXH3-128 of bytes()
  std::uint64_t total_bytes() const { return total_bytes_; }  // ties once

  // XXH3-128 over (name, dtype, byte count, S) of all tensors in order: a model
  // state in 16 bytes. `l61` has size() entries.
  Hash128 StateDigest(std::span<const std::uint64_t> l61) const;

 private:
  std::vector<TensorSpec> tensors_;
  std::vector<std::byte> bytes_;
  Hash128 hash_;
  std::uint64_t total_bytes_ = 0;
};

}  // namespace kedge

#endif  // KEDGE_FORMAT_TENSOR_TABLE_H_
