#ifndef KEDGE_TESTS_FUZZ_STORE_EDITS_H_
#define KEDGE_TESTS_FUZZ_STORE_EDITS_H_

// What an input of the store target says: which sound store, what is done to
// its files, and how much of the rest is then made to agree.

#include <cstdint>

namespace kedge::fuzz {

// The first byte: 0 is a small store of one epoch, 1 one with two epochs and
// no anchor of v0, 2 tests/golden/v1/store; modulo 3.
//
// The second byte: what is made to agree with the edits; modulo 4.
enum class Seal : std::uint8_t {
  kNothing = 0,
  kOwnHash = 1,   // a changed file's hash of itself
  kManifest = 2,  // and piece hashes in manifests, and manifests in COMMIT
  kChain = 3,     // and later manifests, anchors, epochs and HEAD
};

// Then up to eight edits: u8 file (in the order of names, modulo their number),
// u8 kind (modulo 8), u16 offset (modulo the size + 1), u8 count, and what the
// kind needs.
enum class Edit : std::uint8_t {
  kOverwrite = 0,  // `count` bytes that follow
  kFlip = 1,       // the byte there is xored with `count`
  kTruncate = 2,
  kInsert = 3,     // `count` bytes that follow
  kRemove = 4,     // the file
  kReplace = 5,    // by the contents of file number `count`
  kZero = 6,       // 16 * `count` bytes
  kAddNumber = 7,  // i8 to the u32 there, modulo 2^32; `count` is the i8
};

}  // namespace kedge::fuzz

#endif  // KEDGE_TESTS_FUZZ_STORE_EDITS_H_
