// Goal: no bytes make the readers of the fixed-size files crash or read beyond
// them, and what they accept is written again as the same bytes. Input: a byte
// that says which file (bit 7: its hash is set right first, or nothing would
// ever come behind that check), then the file.

#include <span>
#include <vector>

#include "kedge/format/fixed_files.h"
#include "kedge/format/hash.h"
#include "kedge/tests/fuzz/fuzz_input.h"

namespace kedge::fuzz {
namespace {

void Seal(std::span<std::byte> bytes) {
  if (bytes.size() < 8) return;
  const std::uint64_t hash = HashBytes64(bytes.first(bytes.size() - 8));
  std::memcpy(bytes.data() + bytes.size() - 8, &hash, 8);
}

template <class Parse, class Serialize>
void Check(std::span<const std::byte> bytes, const Parse& parse,
           const Serialize& serialize) {
  const auto value = parse(bytes);
  if (!value.ok()) return RequireRefusal(value.status());
  const auto again = serialize(*value);
  // All but the version that wrote it, which is for messages alone.
  std::vector<std::byte> expected(bytes.begin(), bytes.end());
  std::copy_n(again.begin() + 6, 2, expected.begin() + 6);
  Seal(expected);
  KEDGE_CHECK(
      std::equal(again.begin(), again.end(), expected.begin(), expected.end()));
  const auto same = parse(again);
  Require(same.status(), "parse what was serialized");
  KEDGE_CHECK(*same == *value);
}

}  // namespace
}  // namespace kedge::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data,
                                      std::size_t size) {
  using namespace kedge;        // NOLINT: the whole file is one function
  using namespace kedge::fuzz;  // NOLINT
  Input input(data, size);
  const auto kind = input.Take<std::uint8_t>();
  std::vector<std::byte> bytes = input.TakeRest();
  if ((kind & 0x80) != 0) Seal(bytes);
  using Bytes = std::span<const std::byte>;
  switch ((kind & 0x7f) % 7) {
    case 0:
      Check(
          bytes, [](Bytes b) { return ParseCommit("COMMIT", b); },
          SerializeCommit);
      break;
    case 1:
      Check(
          bytes, [](Bytes b) { return ParseHead("HEAD", b); }, SerializeHead);
      break;
    case 2:
      Check(
          bytes, [](Bytes b) { return ParseStore("STORE", b); },
          SerializeStore);
      break;
    case 3:
      Check(
          bytes, [](Bytes b) { return ParseEpoch("epoch", b); },
          SerializeEpoch);
      break;
    case 4:
      Check(
          bytes,
          [](Bytes b) {
            return ParseDataFileHeader("segment", FileKind::kSegment, b);
          },
          SerializeDataFileHeader);
      break;
    case 6:
      Check(
          bytes, [](Bytes b) { return ParseLease("lease", b); },
          SerializeLease);
      break;
    default:
      Check(
          bytes,
          [](Bytes b) {
            return ParseDataFileHeader("anchor", FileKind::kAnchor, b);
          },
          SerializeDataFileHeader);
      break;
  }
  return 0;
}
