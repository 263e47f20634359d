#ifndef KEDGE_TOOLS_POSIX_FILE_H_
#define KEDGE_TOOLS_POSIX_FILE_H_

// The few system calls that the checkpoint code shares: opening, closing, and
// errors that name the path and the errno.

#include <fcntl.h>
#include <sys/types.h>

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace kedge {

// Closes a file descriptor, if there is one, on every path out.
class Descriptor {
 public:
  explicit Descriptor(int descriptor) : descriptor_(descriptor) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor();
  int get() const { return descriptor_; }

 private:
  const int descriptor_;
};

// open(2) with O_CLOEXEC, repeated while a signal interrupts it. Below 0 and
// errno as open(2) on failure; the caller closes the result.
int OpenDescriptor(const std::string& path, int flags, mode_t mode = 0);

// Opens for reading what is meant to be a regular file: never waits for a
// FIFO's other end and never takes a terminal. As OpenDescriptor otherwise.
int OpenUntrusted(const std::string& path);

// "path: what: ENOSPC (No space left on device)".
absl::Status SystemError(int error, absl::string_view path,
                         absl::string_view what);

}  // namespace kedge

#endif  // KEDGE_TOOLS_POSIX_FILE_H_
