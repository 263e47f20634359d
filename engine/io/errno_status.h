#ifndef KEDGE_ENGINE_IO_ERRNO_STATUS_H_
#define KEDGE_ENGINE_IO_ERRNO_STATUS_H_

// How a failed system call becomes a Status. The codes are listed in
// file_system.h.

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace kedge {

// "path: operation: ENOSPC (No space left on device); free some space there".
// `error` is an errno value and not 0.
absl::Status ErrnoStatus(int error, absl::string_view operation,
                         absl::string_view path);

}  // namespace kedge

#endif  // KEDGE_ENGINE_IO_ERRNO_STATUS_H_
