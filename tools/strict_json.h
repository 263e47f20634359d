#ifndef KEDGE_TOOLS_STRICT_JSON_H_
#define KEDGE_TOOLS_STRICT_JSON_H_

// JSON from untrusted files, as a stream of events. Plain JSON parsers keep
// the last of two equal keys, stop at a NUL byte, or nest without end; each of
// these lets two programs read different things from the same bytes.

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace kedge {

// Receives the events of ParseStrictJson in document order. A status that is
// not OK ends the parse and is returned by it unchanged.
class StrictJsonVisitor {
 public:
  virtual ~StrictJsonVisitor() = default;

  virtual absl::Status OnObjectBegin() = 0;
  virtual absl::Status OnObjectEnd() = 0;
  virtual absl::Status OnArrayBegin() = 0;
  virtual absl::Status OnArrayEnd() = 0;
  virtual absl::Status OnKey(std::string key) = 0;
  virtual absl::Status OnString(std::string value) = 0;
  // A number without sign, fraction or exponent that fits 64 bits.
  virtual absl::Status OnUnsigned(std::uint64_t value) = 0;
  // null, true, false and every other number; `text` describes it for messages.
  virtual absl::Status OnOther(absl::string_view text) = 0;

  // File offset just behind the event's last byte (behind one more byte for
  // numbers), kept up to date by ParseStrictJson, for messages.
  std::uint64_t offset = 0;
};

// Parses `text`, which lies at `text_offset` of the file `path` (both for
// messages alone), as one JSON value followed by nothing but whitespace.
//
// Rejects with kDataLoss: anything RFC 8259 forbids, invalid UTF-8, lone
// surrogates, NUL bytes, a byte order mark, equal keys in one object, nesting
// deeper than `max_depth`. Memory: the keys of the open objects.
absl::Status ParseStrictJson(absl::string_view path, std::uint64_t text_offset,
                             absl::string_view text, int max_depth,
                             StrictJsonVisitor& visitor);

// Whether `text` is well-formed UTF-8: no overlong forms, no surrogates.
bool IsUtf8(absl::string_view text);

// `text` in double quotes, all but printable ASCII escaped, cut after 100
// bytes: fit for a message whatever the file holds.
std::string QuoteForMessage(absl::string_view text);

}  // namespace kedge

#endif  // KEDGE_TOOLS_STRICT_JSON_H_
