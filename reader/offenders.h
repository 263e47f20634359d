#ifndef KEDGE_READER_OFFENDERS_H_
#define KEDGE_READER_OFFENDERS_H_

// A count of everything that is wrong, and the first few by name: a model has
// thousands of tensors, and an error message has one line.

#include <cstddef>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace kedge {

class Offenders {
 public:
  void Add(absl::string_view text) {
    if (count_ < kNamed) {
      absl::StrAppend(&text_, count_ == 0 ? "" : "; ", text);
    }
    ++count_;
  }
  bool empty() const { return count_ == 0; }
  std::size_t count() const { return count_; }
  // "a; b; c; d and 17 more"
  std::string Text() const {
    return count_ <= kNamed
               ? text_
               : absl::StrCat(text_, " and ", count_ - kNamed, " more");
  }

 private:
  static constexpr std::size_t kNamed = 4;
  std::size_t count_ = 0;
  std::string text_;
};

}  // namespace kedge

#endif  // KEDGE_READER_OFFENDERS_H_
