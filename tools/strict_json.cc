#include "kedge/tools/strict_json.h"

#include <cstddef>
#include <iterator>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace kedge {
namespace {

using Json = nlohmann::json;

// Reads characters and tells how far it has come: the parser itself reports a
// position only for syntax errors.
class CountingIterator {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  CountingIterator(const char* at, const char** farthest)
      : at_(at), farthest_(farthest) {}
  reference operator*() const { return *at_; }
  CountingIterator& operator++() {
    *farthest_ = ++at_;
    return *this;
  }
  CountingIterator operator++(int) {
    CountingIterator before = *this;
    ++*this;
    return before;
  }
  bool operator==(const CountingIterator& other) const {
    return at_ == other.at_;
  }
  bool operator!=(const CountingIterator& other) const {
    return at_ != other.at_;
  }

 private:
  const char* at_;
  const char** farthest_;
};

class Handler final : public nlohmann::json_sax<Json> {
 public:
  Handler(absl::string_view path, std::uint64_t text_offset,
          absl::string_view text, int max_depth, StrictJsonVisitor& visitor)
      : path_(path),
        text_offset_(text_offset),
        begin_(text.data()),
        farthest_(text.data()),
        max_depth_(max_depth),
        visitor_(visitor) {}

  const char** farthest() { return &farthest_; }
  const absl::Status& status() const { return status_; }

  bool null() override { return Other("null"); }
  bool boolean(bool value) override { return Other(value ? "true" : "false"); }
  bool number_integer(number_integer_t value) override {
    return Other(absl::StrCat("the signed number ", value));
  }
  bool number_unsigned(number_unsigned_t value) override {
    return Pass(Here().OnUnsigned(value));
  }
  bool number_float(number_float_t /*value*/, const string_t& token) override {
    return Other(
        absl::StrCat("the number ", absl::string_view(token).substr(0, 40)));
  }
  bool string(string_t& value) override {
    return Pass(Here().OnString(std::move(value)));
  }
  bool binary(binary_t& /*value*/) override { return Other("binary"); }
  bool start_object(std::size_t /*elements*/) override {
    if (!Deeper()) return false;
    keys_[depth_ - 1].clear();
    return Pass(Here().OnObjectBegin());
  }
  bool key(string_t& value) override {
    if (!keys_[depth_ - 1].insert(value).second) {
      return Fail(absl::StrCat(
          "key ", QuoteForMessage(value),
          ": expected once in its object, found again; readers disagree on "
          "which one counts: save the file again with each key once"));
    }
    return Pass(Here().OnKey(std::move(value)));
  }
  bool end_object() override {
    --depth_;
    return Pass(Here().OnObjectEnd());
  }
  bool start_array(std::size_t /*elements*/) override {
    if (!Deeper()) return false;
    return Pass(Here().OnArrayBegin());
  }
  bool end_array() override {
    --depth_;
    return Pass(Here().OnArrayEnd());
  }
  bool parse_error(std::size_t /*position*/, const std::string& last_token,
                   const nlohmann::detail::exception& /*error*/) override {
    return Fail(absl::StrCat("JSON: expected valid JSON in UTF-8, found ",
                             QuoteForMessage(last_token),
                             " where it breaks off; the file is damaged: fetch "
                             "or save it again"));
  }

 private:
  StrictJsonVisitor& Here() {
    visitor_.offset = Offset();
    return visitor_;
  }
  std::uint64_t Offset() const {
    return text_offset_ + static_cast<std::uint64_t>(farthest_ - begin_);
  }
  bool Pass(absl::Status status) {
    status_ = std::move(status);
    return status_.ok();
  }
  bool Other(absl::string_view text) { return Pass(Here().OnOther(text)); }
  bool Fail(absl::string_view what) {
    return Pass(absl::DataLossError(
        absl::StrCat(path_, ": offset ", Offset(), ": ", what)));
  }
  bool Deeper() {
    if (depth_ == max_depth_) {
      return Fail(absl::StrCat("JSON nesting: expected at most ", max_depth_,
                               " levels, found more; the file is damaged or no "
                               "checkpoint: fetch or save it again"));
    }
    ++depth_;
    if (keys_.size() < static_cast<std::size_t>(depth_)) keys_.emplace_back();
    return true;
  }

  const absl::string_view path_;
  const std::uint64_t text_offset_;
  const char* const begin_;
  const char* farthest_;
  const int max_depth_;
  StrictJsonVisitor& visitor_;
  int depth_ = 0;
  std::vector<absl::flat_hash_set<std::string>> keys_;  // one set per level
  absl::Status status_;
};

}  // namespace

absl::Status ParseStrictJson(absl::string_view path, std::uint64_t text_offset,
                             absl::string_view text, int max_depth,
                             StrictJsonVisitor& visitor) {
  // The parser takes a NUL for the end and skips a byte order mark; neither is
  // JSON.
  const std::size_t nul = text.find('\0');
  if (nul != absl::string_view::npos) {
    return absl::DataLossError(
        absl::StrCat(path, ": offset ", text_offset + nul,
                     ": JSON: expected text, found a NUL byte; the file is "
                     "damaged: fetch or save it again"));
  }
  if (absl::StartsWith(text, "\xef\xbb\xbf")) {
    return absl::DataLossError(
        absl::StrCat(path, ": offset ", text_offset,
                     ": JSON: expected a value, found a byte order mark; save "
                     "the file again without it"));
  }
  Handler handler(path, text_offset, text, max_depth, visitor);
  const bool parsed = Json::sax_parse(
      CountingIterator(text.data(), handler.farthest()),
      CountingIterator(text.data() + text.size(), handler.farthest()),
      &handler);
  if (parsed || !handler.status().ok()) return handler.status();
  return absl::InternalError(
      absl::StrCat(path,
                   ": the JSON parser stopped without a reason; please "
                   "report this as a bug in kedge"));
}

bool IsUtf8(absl::string_view text) {
  std::size_t i = 0;
  while (i < text.size()) {
    const auto byte = [&](std::size_t k) {
      return i + k < text.size() ? static_cast<unsigned char>(text[i + k]) : 0u;
    };
    const auto follows = [&](std::size_t k) {
      return (byte(k) & 0xc0) == 0x80;
    };
    const unsigned lead = byte(0);
    if (lead < 0x80) {
      i += 1;
    } else if (lead >= 0xc2 && lead <= 0xdf && follows(1)) {
      i += 2;
    } else if ((lead & 0xf0) == 0xe0 && follows(1) && follows(2) &&
               !(lead == 0xe0 && byte(1) < 0xa0) &&
               !(lead == 0xed && byte(1) > 0x9f)) {
      i += 3;
    } else if (lead >= 0xf0 && lead <= 0xf4 && follows(1) && follows(2) &&
               follows(3) && !(lead == 0xf0 && byte(1) < 0x90) &&
               !(lead == 0xf4 && byte(1) > 0x8f)) {
      i += 4;
    } else {
      return false;
    }
  }
  return true;
}

std::string QuoteForMessage(absl::string_view text) {
  // Every byte outside ASCII is escaped as well: names may hold control and
  // direction characters, and bytes that broke a parse need not be UTF-8.
  constexpr std::size_t kShown = 100;
  if (text.size() <= kShown) {
    return absl::StrCat("\"", absl::CHexEscape(text), "\"");
  }
  return absl::StrCat("\"", absl::CHexEscape(text.substr(0, kShown)), "...\" (",
                      text.size(), " bytes)");
}

}  // namespace kedge
