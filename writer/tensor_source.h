#ifndef KEDGE_WRITER_TENSOR_SOURCE_H_
#define KEDGE_WRITER_TENSOR_SOURCE_H_

// Where the writer takes weights from: a trainer's memory, a mapped checkpoint,
// a version rebuilt from a store.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kedge/format/anchor_layout.h"
#include "kedge/format/dtype.h"
#include "kedge/format/tensor_table.h"

namespace kedge {

// The bytes of every tensor of a table, by ordinal, or of this rank's part of
// them.
//
// Thread safety: Read and Owned may run concurrently, each call of Read with
// its own scratch.
class TensorSource {
 public:
  virtual ~TensorSource() = default;

  // What of tensor `ordinal` is here: ranges of units, ascending, not empty,
  // whole elements, without overlap. Nothing given: everything.
  virtual std::optional<std::vector<UnitRange>> Owned(
      std::uint32_t /*ordinal*/) const {
    return std::nullopt;
  }

  // The bytes [byte_begin, byte_begin + byte_count) of tensor `ordinal`,
  // row-major and contiguous: in place where the source holds them so, else in
  // `scratch`, which it resizes. Valid until `scratch` is used again. They lie
  // within one range of Owned.
  virtual absl::StatusOr<std::span<const std::byte>> Read(
      std::uint32_t ordinal, std::uint64_t byte_begin, std::uint64_t byte_count,
      std::vector<std::byte>* scratch) = 0;
};

// A flat, half-open range of elements of one tensor, in row-major order.
struct ElementRange {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
};

// One tensor in a trainer's memory, or a rank's shard of one. Shards may begin
// and end anywhere; a rank may have several of one tensor, as entries with the
// same name, and may lack tensors that other ranks have.
struct TrainerTensor {
  std::string name;
  DType dtype = DType::kBf16;
  std::vector<std::uint64_t> shape;  // of the whole tensor, at every rank
  const void* data = nullptr;        // the first element, of the shard if any
  // Bytes between neighbours along each dimension, for a tensor that is a view
  // of a packed parameter. Empty: row-major and contiguous. A shard of a view
  // is whole rows of the first dimension.
  std::vector<std::int64_t> strides_bytes;
  // The name of the tensor whose storage this one shares, if the model declares
  // a tie; never guessed from addresses.
  std::string tied_to;
  // What of the tensor `data` holds. Default: everything; may be empty.
  std::optional<ElementRange> shard;
};

// The table of `tensors`. kInvalidArgument names the tensor.
absl::StatusOr<TensorTable> MakeTable(std::span<const TrainerTensor> tensors);

// What can be said of a rank's tensors by themselves: data that is null,
// strides and shards that do not fit the shape, shards that overlap, entries of
// one name that contradict each other. kFailedPrecondition names the tensors
// (the first few; all are counted).
absl::Status CheckTensors(std::span<const TrainerTensor> tensors);

// Reads trainer tensors in place; views are gathered. Borrows their memory,
// which must not change while a publish reads it.
class MemorySource : public TensorSource {
 public:
  // Whether other ranks hold what this one does not.
  enum class Others { kNone, kHoldTheRest };

  // Binds `tensors`, in any order, to `table`. kFailedPrecondition names every
  // tensor that is missing (unless others may hold it), extra, or of another
  // dtype or shape (the first few; all are counted), and what CheckTensors
  // finds.
  static absl::StatusOr<MemorySource> Bind(
      const TensorTable& table, std::span<const TrainerTensor> tensors,
      Others others = Others::kNone);

  std::optional<std::vector<UnitRange>> Owned(
      std::uint32_t ordinal) const override;
  absl::StatusOr<std::span<const std::byte>> Read(
      std::uint32_t ordinal, std::uint64_t byte_begin, std::uint64_t byte_count,
      std::vector<std::byte>* scratch) override;

 private:
  struct Part {
    std::uint64_t byte_begin = 0;  // within the tensor
    std::uint64_t byte_end = 0;
    const std::byte* data = nullptr;
    std::vector<std::int64_t> strides_bytes;  // empty: contiguous
  };
  struct Bound {
    std::vector<Part> parts;  // ascending, not empty
    std::vector<std::uint64_t> shape;
    std::uint32_t element_bytes = 0;
    std::uint32_t unit_bytes = 0;
  };
  std::vector<Bound> tensors_;  // by ordinal
};

// What `source` holds of the untied tensors of `table`, ascending.
std::vector<OwnedSlice> OwnedOf(const TensorTable& table,
                                const TensorSource& source);

// A table's slices for parallel reading: every unit of every untied tensor
// once, in pieces of at most `max_units`, cut where tiles end when a band fits.
struct TensorSlice {
  std::uint32_t tensor = 0;
  UnitRange units;
};
std::vector<TensorSlice> SplitTable(const TensorTable& table,
                                    std::uint64_t max_units);
// The same of `owned`, which is ascending: no slice goes over the end of a
// range.
std::vector<TensorSlice> SplitOwned(const TensorTable& table,
                                    std::span<const OwnedSlice> owned,
                                    std::uint64_t max_units);

}  // namespace kedge

#endif  // KEDGE_WRITER_TENSOR_SOURCE_H_
