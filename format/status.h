#ifndef KEDGE_FORMAT_STATUS_H_
#define KEDGE_FORMAT_STATUS_H_

// How kedge reports errors: Status macros, the one shape of an error text, and
// checks for bugs in kedge itself.

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace kedge {

// "where: what: expected E, found F; advice". Empty members are left out.
struct Problem {
  absl::string_view where = {};  // file and offset, or tensor and index range
  absl::string_view what = {};   // the field or rule that failed
  absl::string_view expected = {};  // what the rule asks for
  absl::string_view found = {};     // what is there
  absl::string_view advice = {};    // what to do about it
};
std::string Describe(const Problem& problem);

inline absl::Status DataLoss(const Problem& problem) {
  return absl::DataLossError(Describe(problem));
}

// "0x06cd851eea3e7e17"
inline std::string Hex64(std::uint64_t value) {
  return absl::StrCat("0x", absl::Hex(value, absl::kZeroPad16));
}

// `status` with `context` and ": " put before its message; code and payloads
// stay.
absl::Status Annotate(const absl::Status& status, absl::string_view context);

namespace internal {
[[noreturn]] void CheckFailed(const char* file, int line, const char* what);
}  // namespace internal

}  // namespace kedge

#define KEDGE_STATUS_CONCAT_(a, b) a##b
#define KEDGE_STATUS_CONCAT(a, b) KEDGE_STATUS_CONCAT_(a, b)

// Returns from the enclosing function if `expression` is not OK.
#define KEDGE_RETURN_IF_ERROR(expression)                                 \
  do {                                                                    \
    if (absl::Status kedge_status_ = (expression); !kedge_status_.ok()) { \
      return kedge_status_;                                               \
    }                                                                     \
  } while (false)

// KEDGE_ASSIGN_OR_RETURN(auto value, MakeValue());
#define KEDGE_ASSIGN_OR_RETURN(declaration, expression)                        \
  KEDGE_ASSIGN_OR_RETURN_IMPL_(KEDGE_STATUS_CONCAT(kedge_statusor_, __LINE__), \
                               declaration, expression)
#define KEDGE_ASSIGN_OR_RETURN_IMPL_(statusor, declaration, expression) \
  auto statusor = (expression);                                         \
  if (!statusor.ok()) return std::move(statusor).status();              \
  declaration = *std::move(statusor)

// A bug in kedge is no Status: stops the process, in every build.
#define KEDGE_CHECK(condition)  \
  (static_cast<bool>(condition) \
       ? static_cast<void>(0)   \
       : ::kedge::internal::CheckFailed(__FILE__, __LINE__, #condition))

#ifdef NDEBUG
#define KEDGE_DCHECK(condition) static_cast<void>(0)
#else
#define KEDGE_DCHECK(condition) KEDGE_CHECK(condition)
#endif

#endif  // KEDGE_FORMAT_STATUS_H_
