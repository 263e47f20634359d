#ifndef KEDGE_TESTS_SUPPORT_TEMP_DIRECTORY_H_
#define KEDGE_TESTS_SUPPORT_TEMP_DIRECTORY_H_

// A directory that lives as long as a test.

#include <string>

#include "absl/strings/string_view.h"

namespace kedge {

// Made empty under $TMPDIR (or /tmp); removed with all it holds.
class TempDirectory {
 public:
  TempDirectory();
  ~TempDirectory();
  TempDirectory(const TempDirectory&) = delete;
  TempDirectory& operator=(const TempDirectory&) = delete;

  const std::string& path() const { return path_; }
  // path() + "/" + `name`.
  std::string Join(absl::string_view name) const;

 private:
  std::string path_;
};

}  // namespace kedge

#endif  // KEDGE_TESTS_SUPPORT_TEMP_DIRECTORY_H_
