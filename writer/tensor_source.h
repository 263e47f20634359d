#ifndef KEDGE_WRITER_TENSOR_SOURCE_H_
#define KEDGE_WRITER_TENSOR_SOURCE_H_

// Where the writer takes weights from: a trainer's memory, a mapped checkpoint,
// a version rebuilt from a store.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kedge/format/dtype.h"
#include "kedge/format/tensor_table.h"

namespace kedge {

// The bytes of every tensor of a table, by ordinal.
//
// Thread safety: Read may run concurrently, each call with its own scratch.
class TensorSource {
 public:
  virtual ~TensorSource() = default;

  // The bytes [byte_begin, byte_begin + byte_count) of tensor `ordinal`,
  // row-major and contiguous: in place where the source holds them so, else in
  // `scratch`, which it resizes. Valid until `scratch` is used again.
  virtual absl::StatusOr<std::span<const std::byte>> Read(
      std::uint32_t ordinal, std::uint64_t byte_begin, std::uint64_t byte_count,
      std::vector<std::byte>* scratch) = 0;
};

// One tensor in a trainer's memory.
struct TrainerTensor {
  std::string name;
  DType dtype = DType::kBf16;
  std::vector<std::uint64_t> shape;
  const void* data = nullptr;
  // Bytes between neighbours along each dimension, for a tensor that is a view
  // of a packed parameter. Empty: row-major and contiguous.
  std::vector<std::int64_t> strides_bytes;
  // The name of the tensor whose storage this one shares, if the model declares
  // a tie; never guessed from addresses.
  std::string tied_to;
};

// The table of `tensors`. kInvalidArgument names the tensor.
absl::StatusOr<TensorTable> MakeTable(std::span<const TrainerTensor> tensors);

// Reads trainer tensors in place; views are gathered. Borrows their memory,
// which must not change while a publish reads it.
class MemorySource : public TensorSource {
 public:
  // Binds `tensors`, in any order, to `table`. kFailedPrecondition names every
  // tensor that is missing, extra, or of another dtype or shape (the first few;
  // all are counted).
  static absl::StatusOr<MemorySource> Bind(
      const TensorTable& table, std::span<const TrainerTensor> tensors);

  absl::StatusOr<std::span<const std::byte>> Read(
      std::uint32_t ordinal, std::uint64_t byte_begin, std::uint64_t byte_count,
      std::vector<std::byte>* scratch) override;

 private:
  struct Bound {
    const std::byte* data = nullptr;
    std::vector<std::uint64_t> shape;
    std::vector<std::int64_t> strides_bytes;  // empty: contiguous
    std::uint32_t element_bytes = 0;
  };
  std::vector<Bound> tensors_;  // by ordinal
};

// A table's slices for parallel reading: every unit of every untied tensor
// once, in pieces of at most `max_units`, cut where tiles end when a band fits.
struct TensorSlice {
  std::uint32_t tensor = 0;
  UnitRange units;
};
std::vector<TensorSlice> SplitTable(const TensorTable& table,
                                    std::uint64_t max_units);

}  // namespace kedge

#endif  // KEDGE_WRITER_TENSOR_SOURCE_H_
