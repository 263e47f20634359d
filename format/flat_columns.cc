#include "kedge/format/flat_columns.h"

namespace kedge::flat {

bool IsUtf8(absl::string_view text) {
  std::size_t i = 0;
  while (i < text.size()) {
    const auto lead = static_cast<unsigned char>(text[i]);
    // How many bytes follow, and the range of the first of them: it is what
    // rules out overlong forms, surrogates and values above U+10FFFF.
    std::size_t follow = 0;
    unsigned char least = 0x80;
    unsigned char most = 0xbf;
    if (lead < 0x80) {
      ++i;
      continue;
    }
    if (lead >= 0xc2 && lead <= 0xdf) {
      follow = 1;
    } else if (lead >= 0xe0 && lead <= 0xef) {
      follow = 2;
      if (lead == 0xe0) least = 0xa0;
      if (lead == 0xed) most = 0x9f;
    } else if (lead >= 0xf0 && lead <= 0xf4) {
      follow = 3;
      if (lead == 0xf0) least = 0x90;
      if (lead == 0xf4) most = 0x8f;
    } else {
      return false;
    }
    if (follow > text.size() - i - 1) return false;
    for (std::size_t k = 1; k <= follow; ++k) {
      const auto byte = static_cast<unsigned char>(text[i + k]);
      if (byte < least || byte > most) return false;
      least = 0x80;
      most = 0xbf;
    }
    i += follow + 1;
  }
  return true;
}

}  // namespace kedge::flat
