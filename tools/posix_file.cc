#include "kedge/tools/posix_file.h"

#include <string.h>
#include <unistd.h>

#include <cerrno>

#include "absl/strings/str_cat.h"

namespace kedge {

Descriptor::~Descriptor() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

int OpenDescriptor(const std::string& path, int flags, mode_t mode) {
  int descriptor;
  do {
    descriptor = ::open(path.c_str(), flags | O_CLOEXEC, mode);
  } while (descriptor < 0 && errno == EINTR);
  return descriptor;
}

int OpenUntrusted(const std::string& path) {
  return OpenDescriptor(path, O_RDONLY | O_NOCTTY | O_NONBLOCK);
}

absl::Status SystemError(int error, absl::string_view path,
                         absl::string_view what) {
  const char* const name = strerrorname_np(error);
  const char* const text = strerrordesc_np(error);
  return absl::Status(
      absl::ErrnoToStatusCode(error),
      absl::StrCat(path, ": ", what, ": ", name == nullptr ? "errno" : name,
                   " (", text == nullptr ? "unknown" : text, ")"));
}

}  // namespace kedge
