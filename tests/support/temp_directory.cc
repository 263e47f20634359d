#include "kedge/tests/support/temp_directory.h"

#include <cstdlib>
#include <filesystem>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "kedge/format/status.h"

namespace kedge {

TempDirectory::TempDirectory() {
  const char* const parent = std::getenv("TMPDIR");
  path_ = absl::StrCat(parent != nullptr && *parent != '\0' ? parent : "/tmp",
                       "/kedge-test-XXXXXX");
  KEDGE_CHECK(mkdtemp(path_.data()) != nullptr);
}

TempDirectory::~TempDirectory() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

std::string TempDirectory::Join(absl::string_view name) const {
  return absl::StrCat(path_, "/", name);
}

}  // namespace kedge
