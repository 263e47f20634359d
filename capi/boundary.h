#ifndef KEDGE_CAPI_BOUNDARY_H_
#define KEDGE_CAPI_BOUNDARY_H_

// What every function of kedge.h does alike: no exception leaves it, a Status
// becomes a number and a message, arguments are looked at before they are used.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <new>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "kedge/capi/kedge.h"
#include "kedge/capi/layout.h"
#include "kedge/format/manifest.h"
#include "kedge/format/status.h"

struct kedge_error {
  kedge_status status = KEDGE_OK;
  std::string message;
};

namespace kedge::capi {

// ----------------------------------------------------------------- statuses

kedge_status ToNumber(absl::StatusCode code);
// What a callback of the caller's returned; a number that is none becomes
// kUnknown.
absl::Status FromCallback(absl::string_view callback, kedge_status status);

// `status` as a number, and its message as *error. Without memory for the
// message *error is null.
kedge_status Report(const absl::Status& status, kedge_error** error) noexcept;

// Runs `body`, which returns a Status, and reports what comes of it.
template <class Body>
kedge_status Guarded(kedge_error** error, const Body& body) noexcept {
  if (error != nullptr) *error = nullptr;
  try {
    return Report(body(), error);
  } catch (const std::bad_alloc&) {
    return Report(absl::ResourceExhaustedError("out of host memory"), error);
  } catch (const std::exception& exception) {
    try {
      return Report(absl::InternalError(exception.what()), error);
    } catch (...) {
      return KEDGE_INTERNAL;
    }
  } catch (...) {
    return KEDGE_INTERNAL;
  }
}

// ---------------------------------------------------------------- arguments

absl::Status NotNull(const void* pointer, absl::string_view what);
// `text`, which is not null, as a string.
absl::StatusOr<std::string> ReadText(const char* text, absl::string_view what);
// "" for null.
std::string TextOrEmpty(const char* text);

// The size that a caller's struct begins with is one that it had in some
// version of kedge.h up to this one.
absl::Status CheckSize(std::size_t size, std::size_t first, std::size_t now,
                       absl::string_view what);

// A copy of the caller's struct, members that it does not have yet zero.
template <class T>
absl::StatusOr<T> ReadStruct(const T* from, absl::string_view what) {
  static_assert(kFirstSize<T> != 0);
  KEDGE_RETURN_IF_ERROR(NotNull(from, what));
  std::size_t size = 0;
  std::memcpy(&size, from, sizeof(size));
  KEDGE_RETURN_IF_ERROR(CheckSize(size, kFirstSize<T>, sizeof(T), what));
  T value;
  std::memset(&value, 0, sizeof(value));
  std::memcpy(&value, from, size);
  return value;
}

// Likewise an array, whose elements lie as far apart as the caller's struct is
// large. At most `max` elements: what kedge takes anyway, so that a count that
// is garbage is no long walk through memory.
template <class T>
absl::StatusOr<std::vector<T>> ReadArray(const T* from, std::size_t count,
                                         std::size_t max,
                                         absl::string_view what) {
  std::vector<T> values;
  if (count == 0) return values;
  KEDGE_RETURN_IF_ERROR(NotNull(from, what));
  if (count > max) {
    return absl::InvalidArgumentError(absl::StrCat(
        what, ": expected at most ", max, " elements, found ", count));
  }
  std::size_t stride = 0;
  std::memcpy(&stride, from, sizeof(stride));
  values.reserve(count);
  const char* element = reinterpret_cast<const char*>(from);
  for (std::size_t i = 0; i < count; ++i, element += stride) {
    const std::string name = absl::StrCat(what, "[", i, "]");
    KEDGE_ASSIGN_OR_RETURN(
        values.emplace_back(),
        ReadStruct(reinterpret_cast<const T*>(element), name));
    if (values.back().struct_size != stride) {
      return absl::InvalidArgumentError(absl::StrCat(
          name, ".struct_size: expected ", stride,
          ", as in the first element, found ", values.back().struct_size));
    }
  }
  return values;
}

// Whether `to` is null or can be filled.
template <class T>
absl::Status CheckResult(const T* to, absl::string_view what) {
  if (to == nullptr) return absl::OkStatus();
  return ReadStruct(to, what).status();
}
// Fills what the caller's struct has of `value`; CheckResult was OK.
template <class T>
void WriteResult(T value, T* to) {
  if (to == nullptr) return;
  std::size_t size = 0;
  std::memcpy(&size, to, sizeof(size));
  value.struct_size = size;
  std::memcpy(to, &value, size);
}

// The body of kedge_X_init: `defaults` as far as `struct_size` goes.
template <class T>
kedge_status InitStruct(T* to, std::size_t struct_size, const T& defaults,
                        absl::string_view what, kedge_error** error) noexcept {
  return Guarded(error, [&]() -> absl::Status {
    KEDGE_RETURN_IF_ERROR(NotNull(to, what));
    KEDGE_RETURN_IF_ERROR(
        CheckSize(struct_size, kFirstSize<T>, sizeof(T), what));
    to->struct_size = struct_size;
    WriteResult(defaults, to);
    return absl::OkStatus();
  });
}

// `value`, or `standard` for 0.
template <class T>
T OrDefault(T value, T standard) {
  return value == 0 ? standard : value;
}
absl::Status InRange(std::int64_t value, std::int64_t low, std::int64_t high,
                     absl::string_view what);

// ------------------------------------------------------------------- values

kedge_version_id ToC(const VersionId& version);

// Texts that a result points to, as long as their handle stands and fills no
// other result.
class Texts {
 public:
  void Set(std::vector<std::string> texts);
  const char* const* data() const {
    return pointers_.empty() ? nullptr : pointers_.data();
  }
  std::size_t size() const { return pointers_.size(); }

 private:
  std::vector<std::string> texts_;
  std::vector<const char*> pointers_;
};

}  // namespace kedge::capi

#endif  // KEDGE_CAPI_BOUNDARY_H_
