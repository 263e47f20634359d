#include "kedge/capi/boundary.h"

#include <iterator>
#include <utility>

#include "kedge/format/dtype.h"

namespace kedge::capi {
namespace {

struct StatusName {
  absl::StatusCode code;
  const char* name;
};
// By kedge_status.
constexpr StatusName kStatusNames[] = {
    {absl::StatusCode::kOk, "KEDGE_OK"},
    {absl::StatusCode::kCancelled, "KEDGE_CANCELLED"},
    {absl::StatusCode::kUnknown, "KEDGE_UNKNOWN"},
    {absl::StatusCode::kInvalidArgument, "KEDGE_INVALID_ARGUMENT"},
    {absl::StatusCode::kDeadlineExceeded, "KEDGE_DEADLINE_EXCEEDED"},
    {absl::StatusCode::kNotFound, "KEDGE_NOT_FOUND"},
    {absl::StatusCode::kAlreadyExists, "KEDGE_ALREADY_EXISTS"},
    {absl::StatusCode::kPermissionDenied, "KEDGE_PERMISSION_DENIED"},
    {absl::StatusCode::kResourceExhausted, "KEDGE_RESOURCE_EXHAUSTED"},
    {absl::StatusCode::kFailedPrecondition, "KEDGE_FAILED_PRECONDITION"},
    {absl::StatusCode::kAborted, "KEDGE_ABORTED"},
    {absl::StatusCode::kOutOfRange, "KEDGE_OUT_OF_RANGE"},
    {absl::StatusCode::kUnimplemented, "KEDGE_UNIMPLEMENTED"},
    {absl::StatusCode::kInternal, "KEDGE_INTERNAL"},
    {absl::StatusCode::kUnavailable, "KEDGE_UNAVAILABLE"},
    {absl::StatusCode::kDataLoss, "KEDGE_DATA_LOSS"},
};
static_assert(std::size(kStatusNames) == KEDGE_DATA_LOSS + 1);

bool IsStatus(kedge_status status) {
  return status >= 0 && status < std::ssize(kStatusNames);
}

}  // namespace

kedge_status ToNumber(absl::StatusCode code) {
  for (std::size_t i = 0; i < std::size(kStatusNames); ++i) {
    if (kStatusNames[i].code == code) return static_cast<kedge_status>(i);
  }
  return KEDGE_UNKNOWN;
}

absl::Status FromCallback(absl::string_view callback, kedge_status status) {
  if (status == KEDGE_OK) return absl::OkStatus();
  if (!IsStatus(status)) {
    return absl::UnknownError(absl::StrCat("the ", callback,
                                           " callback returned ", status,
                                           ", which is no kedge_status"));
  }
  return absl::Status(kStatusNames[status].code,
                      absl::StrCat("the ", callback, " callback returned ",
                                   kStatusNames[status].name));
}

kedge_status Report(const absl::Status& status, kedge_error** error) noexcept {
  const kedge_status number = ToNumber(status.code());
  if (number == KEDGE_OK || error == nullptr) return number;
  try {
    *error = new kedge_error{number, std::string(status.message())};
  } catch (...) {
    *error = nullptr;
  }
  return number;
}

absl::Status NotNull(const void* pointer, absl::string_view what) {
  if (pointer != nullptr) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(what, ": expected a pointer, found null"));
}

absl::StatusOr<std::string> ReadText(const char* text, absl::string_view what) {
  if (text != nullptr) return std::string(text);
  return absl::InvalidArgumentError(
      absl::StrCat(what, ": expected text, found null"));
}

std::string TextOrEmpty(const char* text) {
  return text == nullptr ? std::string() : std::string(text);
}

absl::Status CheckSize(std::size_t size, std::size_t first, std::size_t now,
                       absl::string_view what) {
  if (size >= first && size <= now && size % alignof(std::uint64_t) == 0) {
    return absl::OkStatus();
  }
  const std::string expected =
      first == now ? absl::StrCat(now) : absl::StrCat(first, " to ", now);
  return absl::InvalidArgumentError(absl::StrCat(
      what, ".struct_size: expected ", expected, ", found ", size,
      size > now ? "; this kedge is older than the kedge.h of the program"
                 : "; set it to sizeof the struct"));
}

absl::Status InRange(std::int64_t value, std::int64_t low, std::int64_t high,
                     absl::string_view what) {
  if (value >= low && value <= high) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(what, ": expected ", low, " to ", high, ", found ", value));
}

kedge_version_id ToC(const VersionId& version) {
  kedge_version_id id;
  static_assert(sizeof(id.manifest_hash) == sizeof(version.manifest_hash));
  id.step = version.step;
  std::memcpy(id.manifest_hash, version.manifest_hash.bytes.data(),
              sizeof(id.manifest_hash));
  return id;
}

void Texts::Set(std::vector<std::string> texts) {
  texts_ = std::move(texts);
  pointers_.clear();
  for (const std::string& text : texts_) pointers_.push_back(text.c_str());
}

}  // namespace kedge::capi

extern "C" {

std::uint32_t kedge_abi_version(void) { return KEDGE_ABI_VERSION; }

const char* kedge_version(void) { return KEDGE_VERSION_TEXT; }

const char* kedge_status_name(kedge_status status) {
  return kedge::capi::IsStatus(status) ? kedge::capi::kStatusNames[status].name
                                       : "?";
}

const char* kedge_error_message(const kedge_error* error) {
  return error == nullptr ? "" : error->message.c_str();
}

kedge_status kedge_error_status(const kedge_error* error) {
  return error == nullptr ? KEDGE_OK : error->status;
}

void kedge_error_free(kedge_error* error) { delete error; }

}  // extern "C"
