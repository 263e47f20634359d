#ifndef KEDGE_WRITER_WIRE_H_
#define KEDGE_WRITER_WIRE_H_

// Little-endian numbers and byte strings, one after another: what ranks of one
// version of kedge say to each other. Private to writer/.

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "kedge/format/hash.h"

namespace kedge {

static_assert(std::endian::native == std::endian::little);

class WireWriter {
 public:
  void U32(std::uint32_t value) { Raw(&value, sizeof(value)); }
  void U64(std::uint64_t value) { Raw(&value, sizeof(value)); }
  void Hash(const Bytes16& value) { Raw(value.bytes.data(), 16); }
  void Bytes(std::span<const std::byte> bytes) {
    U64(bytes.size());
    Raw(bytes.data(), bytes.size());
  }
  void Text(absl::string_view text) {
    U64(text.size());
    Raw(text.data(), text.size());
  }
  std::vector<std::byte> Take() { return std::move(bytes_); }

 private:
  void Raw(const void* data, std::size_t size) {
    const auto* from = static_cast<const std::byte*>(data);
    bytes_.insert(bytes_.end(), from, from + size);
  }

  std::vector<std::byte> bytes_;
};

// Reads past the end give zeros and are reported by Finish.
class WireReader {
 public:
  explicit WireReader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  std::uint32_t U32() { return Number<std::uint32_t>(); }
  std::uint64_t U64() { return Number<std::uint64_t>(); }
  Bytes16 Hash() { return Number<Bytes16>(); }
  std::span<const std::byte> Bytes() { return Take(U64()); }
  std::string Text() {
    const std::span<const std::byte> bytes = Bytes();
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }
  // How many rows of at least `row_bytes` follow: never more than there are
  // bytes for, so that nothing is allocated for rows that cannot be there.
  std::size_t Rows(std::size_t row_bytes) {
    const std::uint64_t rows = U64();
    if (rows <= bytes_.size() / row_bytes) return rows;
    failed_ = true;
    return 0;
  }
  bool failed() const { return failed_; }

  // kDataLoss if the bytes were too few, or some are left.
  absl::Status Finish(absl::string_view where) const {
    if (!failed_ && bytes_.empty()) return absl::OkStatus();
    return absl::DataLossError(absl::StrCat(
        where, ": the message ", failed_ ? "is too short" : "is too long",
        "; all ranks must run the same version of kedge"));
  }

 private:
  template <class T>
  T Number() {
    T value{};
    const std::span<const std::byte> bytes = Take(sizeof(T));
    if (bytes.size() == sizeof(T)) std::memcpy(&value, bytes.data(), sizeof(T));
    return value;
  }
  std::span<const std::byte> Take(std::uint64_t size) {
    if (size > bytes_.size()) {
      failed_ = true;
      bytes_ = {};
      return {};
    }
    const std::span<const std::byte> taken = bytes_.first(size);
    bytes_ = bytes_.subspan(size);
    return taken;
  }

  std::span<const std::byte> bytes_;
  bool failed_ = false;
};

}  // namespace kedge

#endif  // KEDGE_WRITER_WIRE_H_
