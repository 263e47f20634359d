#ifndef KEDGE_TESTS_FUZZ_FUZZ_INPUT_H_
#define KEDGE_TESTS_FUZZ_FUZZ_INPUT_H_

// What all fuzz targets share: taking an input apart, and stopping when what
// must hold does not. A target is one function, LLVMFuzzerTestOneInput, which
// either libFuzzer or replay_main.cc calls; a find is a process that stops.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "absl/status/status.h"
#include "kedge/format/status.h"

// The name is libFuzzer's. Returns 0; stops the process if anything is wrong.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data,
                                      std::size_t size);

namespace kedge::fuzz {

// Reads an input from front to back. Past its end every number is 0, so that
// each input means something.
class Input {
 public:
  Input(const std::uint8_t* data, std::size_t size)
      : bytes_(reinterpret_cast<const std::byte*>(data), size) {}

  std::size_t size() const { return bytes_.size(); }

  template <class T>
  T Take() {
    static_assert(std::is_integral_v<T>);
    T value = 0;
    const std::size_t take = std::min(sizeof(T), bytes_.size());
    if (take != 0) std::memcpy(&value, bytes_.data(), take);
    bytes_ = bytes_.subspan(take);
    return value;
  }
  // A number in [least, most].
  template <class T>
  std::uint64_t TakeBetween(std::uint64_t least, std::uint64_t most) {
    return least + Take<T>() % (most - least + 1);
  }
  std::span<const std::byte> TakeBytes(std::size_t count) {
    const auto taken = bytes_.first(std::min(count, bytes_.size()));
    bytes_ = bytes_.subspan(taken.size());
    return taken;
  }
  // A copy of its own, so that a sanitizer sees the first byte read beyond it.
  std::vector<std::byte> TakeRest() {
    std::vector<std::byte> rest(bytes_.begin(), bytes_.end());
    rest.shrink_to_fit();
    bytes_ = {};
    return rest;
  }

 private:
  std::span<const std::byte> bytes_;
};

// Stops with the status's text unless it is OK.
inline void Require(const absl::Status& status, const char* what) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s: %s\n", what, status.ToString().c_str());
  std::abort();
}

// The only ways in which bytes may be refused.
inline void RequireRefusal(const absl::Status& status) {
  if (absl::IsDataLoss(status) || absl::IsUnimplemented(status)) return;
  Require(status, "refused with a code that says something else");
}

// Has every field read, and not optimised away.
class Sink {
 public:
  ~Sink() {
    static volatile std::uint64_t all = 0;
    all = all + sum_;
  }
  void Add(std::uint64_t value) { sum_ += value; }
  template <class Bytes>
  void AddBytes(const Bytes& bytes) {
    for (const auto byte : bytes) sum_ += static_cast<std::uint64_t>(byte);
  }

 private:
  std::uint64_t sum_ = 0;
};

}  // namespace kedge::fuzz

#endif  // KEDGE_TESTS_FUZZ_FUZZ_INPUT_H_
