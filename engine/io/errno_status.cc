#include "kedge/engine/io/errno_status.h"

#include <cerrno>
#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"
#include "kedge/format/status.h"

namespace kedge {
namespace {

absl::StatusCode CodeOf(int error) {
  switch (error) {
    case ENOENT:
    case ENOTDIR:
      return absl::StatusCode::kNotFound;
    case EEXIST:
    case ENOTEMPTY:
      return absl::StatusCode::kAlreadyExists;
    case ENOSPC:
    case EDQUOT:
    case EMFILE:
    case ENFILE:
    case ENOMEM:
      return absl::StatusCode::kResourceExhausted;
    case EACCES:
    case EPERM:
    case EROFS:
      return absl::StatusCode::kPermissionDenied;
    case ENOTSUP:  // on Linux the same number as EOPNOTSUPP
    case ENODEV:
      return absl::StatusCode::kUnimplemented;
    case ELOOP:
      return absl::StatusCode::kDataLoss;
    default:
      return absl::StatusCode::kUnavailable;
  }
}

absl::string_view AdviceOn(int error) {
  switch (error) {
    case ENOSPC:
      return "free some space on that file system, then try again";
    case EDQUOT:
      return "the quota is used up: free some space or raise it";
    case EMFILE:
      return "raise the limit of open files (ulimit -n)";
    case ENFILE:
      return "the machine has too many open files";
    case EROFS:
      return "the file system is mounted read-only";
    case ELOOP:
      return "kedge follows no symbolic link where it expects a file";
    case ESTALE:
      return "the file was replaced or removed by another machine: open its "
             "directory again";
    case EIO:
      return "the storage failed: look at the machine's kernel log";
    default:
      return "";
  }
}

}  // namespace

absl::Status ErrnoStatus(int error, absl::string_view operation,
                         absl::string_view path) {
  const char* name = strerrorname_np(error);
  const char* text = strerrordesc_np(error);
  const std::string what = absl::StrCat(
      operation, ": ",
      name != nullptr ? std::string(name) : absl::StrCat("errno ", error), " (",
      text != nullptr ? text : "unknown error", ")");
  Problem problem;
  problem.where = path;
  problem.what = what;
  problem.advice = AdviceOn(error);
  return absl::Status(CodeOf(error), Describe(problem));
}

}  // namespace kedge
