#include "kedge/format/dtype.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace kedge {
namespace {

constexpr absl::string_view kNames[kMaxDType + 1] = {
    "?",   "f64", "f32", "f16", "bf16", "f8_e4m3", "f8_e5m2", "f8_e8m0", "i64",
    "i32", "i16", "i8",  "u64", "u32",  "u16",     "u8",      "bool"};

}  // namespace

absl::string_view DTypeName(DType dtype) {
  const auto value = static_cast<std::uint8_t>(dtype);
  return IsValidDType(value) ? kNames[value] : kNames[0];
}

absl::StatusOr<DType> ParseDType(absl::string_view name) {
  for (std::uint8_t value = 1; value <= kMaxDType; ++value) {
    if (kNames[value] == name) return static_cast<DType>(value);
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "dtype: expected one of f64 f32 f16 bf16 f8_e4m3 f8_e5m2 f8_e8m0 i64 i32 "
      "i16 i8 u64 u32 u16 u8 bool, found \"",
      name, "\"; pass other types as u8"));
}

}  // namespace kedge
