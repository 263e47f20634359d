#ifndef KEDGE_FORMAT_FLAT_COLUMNS_H_
#define KEDGE_FORMAT_FLAT_COLUMNS_H_

// What the FlatBuffer files share: opening untrusted bytes, and columns of
// scalars as spans. Private to format/: it drags in FlatBuffers.

#include <flatbuffers/flatbuffers.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "common_generated.h"
#include "kedge/format/hash.h"
#include "kedge/format/limits.h"
#include "kedge/format/status.h"

namespace kedge::flat {

// Columns are read as they stand in memory.
static_assert(std::endian::native == std::endian::little);
static_assert(sizeof(fbs::Bytes16) == 16 && alignof(fbs::Bytes16) == 1);

inline constexpr absl::string_view kFsckAdvice = "run `kedge fsck`";

inline absl::Status Bad(absl::string_view where, absl::string_view what,
                        absl::string_view expected, absl::string_view found) {
  return DataLoss({where, what, expected, found, kFsckAdvice});
}

// "records[5].slice"
inline std::string Row(absl::string_view column, std::size_t row,
                       absl::string_view field = {}) {
  return absl::StrCat(column, "[", row, "]", field.empty() ? "" : ".", field);
}

// --- Reading -----------------------------------------------------------------

// Verified bytes and their root table. Points into the bytes given, or into a
// copy of them if those are not aligned.
template <class Root>
class Opened {
 public:
  const Root* operator->() const { return root_; }
  const Root& operator*() const { return *root_; }

  // `identifier` is the four letters at offset 4.
  static absl::StatusOr<Opened> Open(absl::string_view where,
                                     std::span<const std::byte> bytes,
                                     const char* identifier) {
    Opened opened;
    if (bytes.size() > kMaxFlatBufferBytes) {
      return Bad(where, "size", absl::StrCat("at most ", kMaxFlatBufferBytes),
                 absl::StrCat(bytes.size(), " bytes"));
    }
    if (bytes.size() < 8) {
      return Bad(where, "size", "at least 8 bytes",
                 absl::StrCat(bytes.size(), " bytes"));
    }
    if (reinterpret_cast<std::uintptr_t>(bytes.data()) % 8 != 0) {
      opened.aligned_.resize((bytes.size() + 7) / 8);
      std::memcpy(opened.aligned_.data(), bytes.data(), bytes.size());
      bytes = std::as_bytes(std::span(opened.aligned_)).first(bytes.size());
    }
    const auto* data = reinterpret_cast<const std::uint8_t*>(bytes.data());
    if (!flatbuffers::BufferHasIdentifier(data, identifier)) {
      return Bad(absl::StrCat(where, ": offset 4"), "file identifier",
                 absl::StrCat("\"", identifier, "\""), "other bytes");
    }
    // One table, no depth: see schema/common.fbs.
    flatbuffers::Verifier verifier(data, bytes.size(), /*max_depth=*/1,
                                   /*max_tables=*/1);
    if (!verifier.VerifyBuffer<Root>(identifier)) {
      return Bad(where, "FlatBuffer structure",
                 "every offset and vector inside the file's bytes",
                 "one that is not");
    }
    opened.root_ = flatbuffers::GetRoot<Root>(data);
    const std::uint16_t min_reader = opened.root_->min_reader();
    if (min_reader == 0) return Bad(where, "min_reader", "1 or more", "0");
    if (min_reader > kFormatVersion) {
      return absl::UnimplementedError(
          Describe({where, "min_reader",
                    absl::StrCat("at most ", kFormatVersion,
                                 ", the newest format version of this reader"),
                    absl::StrCat(min_reader, ", written by version ",
                                 opened.root_->writer()),
                    "update kedge"}));
    }
    return opened;
  }

 private:
  std::vector<std::uint64_t> aligned_;
  const Root* root_ = nullptr;
};

// A vector of the file. The verifier has checked that its elements lie inside,
// but not that those of 8 bytes are aligned, so that they are copied out.
template <class T>
class ColumnView {
 public:
  ColumnView() = default;
  ColumnView(const void* data, std::size_t size)
      : data_(static_cast<const std::byte*>(data)), size_(size) {}

  std::size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  T operator[](std::size_t row) const {
    T value;
    std::memcpy(&value, data_ + row * sizeof(T), sizeof(T));
    return value;
  }
  // Rows [first, first + count), which are there.
  std::vector<T> Rows(std::size_t first, std::size_t count) const {
    std::vector<T> rows(count);
    if (count != 0) {
      std::memcpy(rows.data(), data_ + first * sizeof(T), count * sizeof(T));
    }
    return rows;
  }
  std::vector<T> Rows() const { return Rows(0, size_); }
  // Of a column of bytes: rows [first, first + count) as text.
  std::string Text(std::size_t first, std::size_t count) const {
    static_assert(sizeof(T) == 1);
    if (count == 0) return {};
    return std::string(reinterpret_cast<const char*>(data_) + first, count);
  }

 private:
  const std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

template <class T>
ColumnView<T> Column(const flatbuffers::Vector<T>* vector) {
  if (vector == nullptr) return {};
  return {vector->Data(), vector->size()};
}
inline ColumnView<Bytes16> Column(
    const flatbuffers::Vector<const fbs::Bytes16*>* vector) {
  if (vector == nullptr) return {};
  return {vector->Data(), vector->size()};
}

inline Bytes16 ToBytes16(const fbs::Bytes16& value) {
  Bytes16 result;
  std::memcpy(result.bytes.data(), &value, 16);
  return result;
}
inline fbs::Bytes16 FromBytes16(const Bytes16& value) {
  return fbs::Bytes16(flatbuffers::span<const std::uint8_t, 16>(value.bytes));
}

// A column that stands in one of two widths, or nowhere.
template <class Narrow, class Wide>
struct EitherColumn {
  ColumnView<Narrow> narrow;
  ColumnView<Wide> wide;
  Wide absent = 0;  // every row's value where both are empty

  Wide operator[](std::size_t row) const {
    if (!narrow.empty()) return narrow[row];
    return wide.empty() ? absent : wide[row];
  }

  // Both empty is allowed if `may_be_absent`.
  absl::Status Check(absl::string_view where, absl::string_view field,
                     std::size_t rows, bool may_be_absent) const {
    if (!narrow.empty() && !wide.empty()) {
      return Bad(where, field, "one width",
                 absl::StrCat(narrow.size(), " narrow and ", wide.size(),
                              " wide rows"));
    }
    const std::size_t found = narrow.size() + wide.size();
    if (found == rows || (found == 0 && may_be_absent)) return {};
    return Bad(where, field, absl::StrCat(rows, " rows"), absl::StrCat(found));
  }
};

template <class Narrow, class Wide>
EitherColumn<Narrow, Wide> Either(const flatbuffers::Vector<Narrow>* narrow,
                                  const flatbuffers::Vector<Wide>* wide) {
  return {Column(narrow), Column(wide)};
}

inline absl::Status CheckRows(absl::string_view where, absl::string_view field,
                              std::size_t found, std::size_t expected) {
  if (found == expected) return absl::OkStatus();
  return Bad(where, field, absl::StrCat(expected, " rows"),
             absl::StrCat(found));
}

// --- Writing -----------------------------------------------------------------

template <class T>
flatbuffers::Offset<flatbuffers::Vector<T>> Put(
    flatbuffers::FlatBufferBuilder& builder, const std::vector<T>& column) {
  if (column.empty()) return 0;
  return builder.CreateVector(column.data(), column.size());
}

// Byte 0 of an offset of 0 means "absent": nothing is written for it.
template <class Narrow, class Wide>
struct EitherOffset {
  flatbuffers::Offset<flatbuffers::Vector<Narrow>> narrow = 0;
  flatbuffers::Offset<flatbuffers::Vector<Wide>> wide = 0;
};

// One value of each row. `optional`: nothing is written if all are 0.
template <class Narrow, class Wide, class Rows, class Get>
EitherOffset<Narrow, Wide> PutEither(flatbuffers::FlatBufferBuilder& builder,
                                     const Rows& rows, bool optional,
                                     const Get& get) {
  EitherOffset<Narrow, Wide> offset;
  Wide most = 0;
  for (const auto& row : rows) most = std::max<Wide>(most, get(row));
  if (rows.empty() || (optional && most == 0)) return offset;
  if (most <= std::numeric_limits<Narrow>::max()) {
    std::vector<Narrow> column;
    column.reserve(rows.size());
    for (const auto& row : rows)
      column.push_back(static_cast<Narrow>(get(row)));
    offset.narrow = Put(builder, column);
  } else {
    std::vector<Wide> column;
    column.reserve(rows.size());
    for (const auto& row : rows) column.push_back(get(row));
    offset.wide = Put(builder, column);
  }
  return offset;
}

template <class T, class Rows, class Get>
flatbuffers::Offset<flatbuffers::Vector<T>> PutColumn(
    flatbuffers::FlatBufferBuilder& builder, const Rows& rows, const Get& get) {
  std::vector<T> column;
  column.reserve(rows.size());
  for (const auto& row : rows) column.push_back(static_cast<T>(get(row)));
  return Put(builder, column);
}

inline std::vector<std::byte> Take(
    const flatbuffers::FlatBufferBuilder& builder) {
  const auto* data =
      reinterpret_cast<const std::byte*>(builder.GetBufferPointer());
  return {data, data + builder.GetSize()};
}

// --- Text --------------------------------------------------------------------

// Whether `text` is well-formed UTF-8 (no overlong forms, no surrogates).
bool IsUtf8(absl::string_view text);

}  // namespace kedge::flat

#endif  // KEDGE_FORMAT_FLAT_COLUMNS_H_
