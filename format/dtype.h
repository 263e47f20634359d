#ifndef KEDGE_FORMAT_DTYPE_H_
#define KEDGE_FORMAT_DTYPE_H_

// Element types as the tensor table stores them. See spec/tensor_table.md.

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace kedge {

// Numbers are on disk and never reused. A type that is not here travels as
// opaque kU8.
enum class DType : std::uint8_t {
  kF64 = 1,
  kF32 = 2,
  kF16 = 3,
  kBf16 = 4,
  kF8E4M3 = 5,  // OCP e4m3fn
  kF8E5M2 = 6,
  kF8E8M0 = 7,
  kI64 = 8,
  kI32 = 9,
  kI16 = 10,
  kI8 = 11,
  kU64 = 12,
  kU32 = 13,
  kU16 = 14,
  kU8 = 15,
  kBool = 16,
};

inline constexpr std::uint8_t kMaxDType = 16;

constexpr bool IsValidDType(std::uint8_t value) {
  return value >= 1 && value <= kMaxDType;
}

// Bytes of one element: 1, 2, 4 or 8.
constexpr std::uint32_t ElementBytes(DType dtype) {
  switch (dtype) {
    case DType::kF64:
    case DType::kI64:
    case DType::kU64:
      return 8;
    case DType::kF32:
    case DType::kI32:
    case DType::kU32:
      return 4;
    case DType::kF16:
    case DType::kBf16:
    case DType::kI16:
    case DType::kU16:
      return 2;
    default:
      return 1;
  }
}

// The codec works on *units*: an element of 1, 2 or 4 bytes is one unit, one of
// 8 bytes is two 32-bit units, the low word first.
constexpr std::uint32_t UnitsPerElement(DType dtype) {
  return ElementBytes(dtype) == 8 ? 2 : 1;
}
constexpr std::uint32_t UnitBytes(DType dtype) {
  return ElementBytes(dtype) == 8 ? 4 : ElementBytes(dtype);
}

// "bf16", "f8_e4m3", ...; "?" for a value that is no DType.
absl::string_view DTypeName(DType dtype);

// The inverse of DTypeName. kInvalidArgument if no dtype has that name.
absl::StatusOr<DType> ParseDType(absl::string_view name);

}  // namespace kedge

#endif  // KEDGE_FORMAT_DTYPE_H_
