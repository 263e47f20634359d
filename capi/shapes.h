#ifndef KEDGE_CAPI_SHAPES_H_
#define KEDGE_CAPI_SHAPES_H_

// What tensors and targets have in common: names, dtypes, arrays with one
// number a dimension.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "kedge/capi/boundary.h"
#include "kedge/format/dtype.h"
#include "kedge/format/limits.h"

namespace kedge::capi {

inline absl::StatusOr<DType> ReadDType(kedge_dtype dtype,
                                       absl::string_view what) {
  if (dtype < 1 || dtype > kMaxDType) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, ".dtype: expected a kedge_dtype of 1 to ",
                     static_cast<int>(kMaxDType), ", found ", dtype));
  }
  return static_cast<DType>(dtype);
}

// How many arrays of one element of a tensor may be: what is above is refused
// before an array is read.
inline absl::Status CheckDimensions(std::uint32_t dimensions,
                                    absl::string_view what) {
  if (dimensions <= kMaxRank) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(what, ".dimensions: expected at most ", kMaxRank, ", found ",
                   dimensions));
}

// [dimensions] numbers; null gives none, which only `optional` allows (or a
// scalar).
template <class T>
absl::StatusOr<std::vector<T>> ReadPerDimension(const T* from,
                                                std::uint32_t dimensions,
                                                bool optional,
                                                absl::string_view what,
                                                absl::string_view member) {
  if (from == nullptr) {
    if (optional || dimensions == 0) return std::vector<T>();
    return NotNull(from, absl::StrCat(what, ".", member));
  }
  return std::vector<T>(from, from + dimensions);
}

}  // namespace kedge::capi

#endif  // KEDGE_CAPI_SHAPES_H_
