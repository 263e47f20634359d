#include "kedge/tools/safetensors.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <limits>
#include <tuple>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "kedge/format/limits.h"
#include "kedge/format/status.h"
#include "kedge/tools/posix_file.h"
#include "kedge/tools/strict_json.h"

namespace kedge {
namespace {

constexpr absl::string_view kFetchAgain =
    "the file is damaged or no safetensors file: fetch or save it again";
constexpr std::uint64_t kLengthBytes = 8;  // of the header's length
constexpr std::size_t kWriteBufferBytes = std::size_t{1} << 20;

struct DTypeNames {
  absl::string_view file;
  DType dtype;
};
constexpr DTypeNames kDTypes[] = {
    {"F64", DType::kF64},        {"F32", DType::kF32},
    {"F16", DType::kF16},        {"BF16", DType::kBf16},
    {"F8_E4M3", DType::kF8E4M3}, {"F8_E5M2", DType::kF8E5M2},
    {"F8_E8M0", DType::kF8E8M0}, {"I64", DType::kI64},
    {"I32", DType::kI32},        {"I16", DType::kI16},
    {"I8", DType::kI8},          {"U64", DType::kU64},
    {"U32", DType::kU32},        {"U16", DType::kU16},
    {"U8", DType::kU8},          {"BOOL", DType::kBool},
};

// Types that safetensors defines and kedge carries as opaque bytes. Their size
// is known, so it is checked all the same.
struct OpaqueBits {
  absl::string_view file;
  std::uint32_t bits;  // of one element
};
constexpr OpaqueBits kOpaqueBits[] = {
    {"F4", 4},          {"F6_E2M3", 6},     {"F6_E3M2", 6},
    {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}, {"C64", 64},
};

// Bits of one element, 0 if the type is one that nobody here has heard of.
std::uint32_t ElementBits(absl::string_view file_dtype) {
  if (const auto dtype = DTypeFromSafetensors(file_dtype)) {
    return ElementBytes(*dtype) * 8;
  }
  for (const OpaqueBits& opaque : kOpaqueBits) {
    if (opaque.file == file_dtype) return opaque.bits;
  }
  return 0;
}

bool Multiply(std::uint64_t a, std::uint64_t b, std::uint64_t* product) {
  return !__builtin_mul_overflow(a, b, product);
}

// The product of all dimensions, or nullopt if that of the dimensions that are
// not zero overflows: whether [2^63, 2^63, 0] is sound must not depend on the
// order in which a reader multiplies.
std::optional<std::uint64_t> ElementCount(
    std::span<const std::uint64_t> shape) {
  std::uint64_t count = 1;
  bool empty = false;
  for (const std::uint64_t dimension : shape) {
    if (dimension == 0) {
      empty = true;
    } else if (!Multiply(count, dimension, &count)) {
      return std::nullopt;
    }
  }
  return empty ? 0 : count;
}

std::string ShapeText(std::span<const std::uint64_t> shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ","), "]");
}

// Follows the header's only legal structure and collects what it says.
class HeaderVisitor final : public StrictJsonVisitor {
 public:
  explicit HeaderVisitor(absl::string_view path) : path_(path) {}

  SafetensorsHeader& header() { return header_; }

  absl::Status OnObjectBegin() override {
    switch (place_) {
      case Place::kStart:
        place_ = Place::kTop;
        return absl::OkStatus();
      case Place::kTensor:
        place_ = Place::kEntry;
        return absl::OkStatus();
      case Place::kMetadata:
        place_ = Place::kMetadataEntries;
        return absl::OkStatus();
      default:
        return Unexpected("an object");
    }
  }

  absl::Status OnObjectEnd() override {
    switch (place_) {
      case Place::kEntry:
        place_ = Place::kTop;
        return FinishEntry();
      case Place::kMetadataEntries:
        place_ = Place::kTop;
        return absl::OkStatus();
      default:
        place_ = Place::kEnd;
        return absl::OkStatus();
    }
  }

  absl::Status OnArrayBegin() override {
    switch (place_) {
      case Place::kShape:
        place_ = Place::kShapeElements;
        return absl::OkStatus();
      case Place::kOffsets:
        place_ = Place::kOffsetElements;
        return absl::OkStatus();
      default:
        return Unexpected("an array");
    }
  }

  absl::Status OnArrayEnd() override {
    if (place_ == Place::kOffsetElements && offset_count_ != 2) {
      return Reject("data_offsets", "2 numbers", absl::StrCat(offset_count_));
    }
    place_ = Place::kEntry;
    return absl::OkStatus();
  }

  absl::Status OnKey(std::string key) override {
    switch (place_) {
      case Place::kTop:
        return OnTopKey(std::move(key));
      case Place::kMetadataEntries:
        if (header_.metadata.size() == kMaxSafetensorsMetadataEntries) {
          return Reject("__metadata__",
                        absl::StrCat("at most ", kMaxSafetensorsMetadataEntries,
                                     " entries"),
                        "more");
        }
        header_.metadata.emplace_back(std::move(key), std::string());
        place_ = Place::kMetadataValue;
        return absl::OkStatus();
      default:
        return OnField(key);
    }
  }

  absl::Status OnString(std::string value) override {
    switch (place_) {
      case Place::kDType:
        place_ = Place::kEntry;
        return OnDType(std::move(value));
      case Place::kMetadataValue:
        header_.metadata.back().second = std::move(value);
        place_ = Place::kMetadataEntries;
        return absl::OkStatus();
      default:
        return Unexpected(absl::StrCat("the string ", QuoteForMessage(value)));
    }
  }

  absl::Status OnUnsigned(std::uint64_t value) override {
    switch (place_) {
      case Place::kShapeElements:
        if (tensor_.shape.size() == kMaxRank) {
          return Reject("shape",
                        absl::StrCat("at most ", kMaxRank, " dimensions"),
                        "more");
        }
        tensor_.shape.push_back(value);
        return absl::OkStatus();
      case Place::kOffsetElements:
        if (offset_count_ == 2) {
          return Reject("data_offsets", "2 numbers", "more");
        }
        offsets_[offset_count_++] = value;
        return absl::OkStatus();
      default:
        return Unexpected(absl::StrCat("the number ", value));
    }
  }

  absl::Status OnOther(absl::string_view text) override {
    return Unexpected(text);
  }

 private:
  enum class Place {
    kStart,
    kTop,     // between tensors
    kTensor,  // behind a tensor's name
    kEntry,   // between a tensor's fields
    kDType,   // behind each field's name
    kShape,
    kOffsets,
    kShapeElements,
    kOffsetElements,
    kMetadata,  // behind "__metadata__"
    kMetadataEntries,
    kMetadataValue,
    kEnd,
  };

  absl::string_view ExpectedHere() const {
    switch (place_) {
      case Place::kStart:
        return "an object";
      case Place::kTensor:
        return "an object with dtype, shape and data_offsets";
      case Place::kDType:
        return "dtype as a string";
      case Place::kShape:
      case Place::kShapeElements:
        return "shape as an array of unsigned 64-bit integers";
      case Place::kOffsets:
      case Place::kOffsetElements:
        return "data_offsets as an array of 2 unsigned 64-bit integers";
      case Place::kMetadata:
        return "__metadata__ as an object of strings";
      case Place::kMetadataValue:
        return "a string as metadata";
      default:
        return "nothing";  // the parser gives only keys or ends here
    }
  }

  std::string Where() const {
    std::string where = absl::StrCat(path_, ": offset ", offset);
    if (!tensor_.name.empty()) {
      absl::StrAppend(&where, ": tensor ", QuoteForMessage(tensor_.name));
    }
    return where;
  }

  absl::Status Reject(absl::string_view what, absl::string_view expected,
                      absl::string_view found) const {
    return DataLoss({Where(), what, expected, found, kFetchAgain});
  }

  absl::Status Unexpected(absl::string_view found) const {
    return Reject("header", ExpectedHere(), found);
  }

  absl::Status OnTopKey(std::string key) {
    tensor_ = SafetensorsTensor();
    fields_ = 0;
    offset_count_ = 0;
    if (key == "__metadata__") {
      place_ = Place::kMetadata;
      return absl::OkStatus();
    }
    if (header_.tensors.size() == kMaxTensorCount) {
      return Reject("header",
                    absl::StrCat("at most ", kMaxTensorCount, " tensors"),
                    "more");
    }
    if (key.empty()) {
      return Reject("tensor name", "at least 1 byte", "an empty name");
    }
    if (key.size() > kMaxNameBytes) {
      return Reject("tensor name",
                    absl::StrCat("at most ", kMaxNameBytes, " bytes"),
                    QuoteForMessage(key));
    }
    if (key.find('\0') != std::string::npos) {
      return Reject("tensor name", "no NUL character", QuoteForMessage(key));
    }
    tensor_.name = std::move(key);
    place_ = Place::kTensor;
    return absl::OkStatus();
  }

  absl::Status OnField(absl::string_view key) {
    if (key == "dtype") {
      fields_ |= 1;
      place_ = Place::kDType;
    } else if (key == "shape") {
      fields_ |= 2;
      place_ = Place::kShape;
    } else if (key == "data_offsets") {
      fields_ |= 4;
      place_ = Place::kOffsets;
    } else {
      return Reject("field", "dtype, shape and data_offsets alone",
                    QuoteForMessage(key));
    }
    return absl::OkStatus();
  }

  absl::Status OnDType(std::string value) {
    const bool sound =
        !value.empty() && value.size() <= kMaxSafetensorsDTypeBytes &&
        std::all_of(value.begin(), value.end(), [](char c) {
          return (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') ||
                 (c >= '0' && c <= '9') || c == '_';
        });
    if (!sound) {
      return Reject("dtype",
                    absl::StrCat("1 to ", kMaxSafetensorsDTypeBytes,
                                 " letters, digits and underscores"),
                    QuoteForMessage(value));
    }
    tensor_.file_dtype = std::move(value);
    return absl::OkStatus();
  }

  // Checks one entry by itself; how tensors lie to each other comes later.
  absl::Status FinishEntry() {
    if (fields_ != 7) {
      std::vector<absl::string_view> missing;
      if ((fields_ & 1) == 0) missing.push_back("dtype");
      if ((fields_ & 2) == 0) missing.push_back("shape");
      if ((fields_ & 4) == 0) missing.push_back("data_offsets");
      return Reject("fields", "dtype, shape and data_offsets",
                    absl::StrCat("no ", absl::StrJoin(missing, ", no ")));
    }
    if (offsets_[0] > offsets_[1]) {
      return Reject("data_offsets", "begin at most end",
                    absl::StrCat("[", offsets_[0], ",", offsets_[1], "]"));
    }
    tensor_.data_offset = offsets_[0];
    tensor_.byte_size = offsets_[1] - offsets_[0];
    if (tensor_.byte_size > kMaxTensorBytes) {
      return Reject("data_offsets",
                    absl::StrCat("at most ", kMaxTensorBytes, " bytes"),
                    absl::StrCat(tensor_.byte_size, " bytes"));
    }
    const std::optional<std::uint64_t> count = ElementCount(tensor_.shape);
    if (!count.has_value()) {
      return Reject("shape", "fewer than 2^64 elements",
                    ShapeText(tensor_.shape));
    }
    const std::uint32_t element_bits = ElementBits(tensor_.file_dtype);
    if (element_bits != 0) {
      std::uint64_t bits = 0;
      if (!Multiply(*count, element_bits, &bits)) {
        return Reject(
            "shape", "fewer than 2^64 bits",
            absl::StrCat(tensor_.file_dtype, " ", ShapeText(tensor_.shape)));
      }
      if (bits % 8 != 0) {
        return Reject("shape", "a whole number of bytes",
                      absl::StrCat(bits, " bits of ", tensor_.file_dtype, " ",
                                   ShapeText(tensor_.shape)));
      }
      if (bits / 8 != tensor_.byte_size) {
        return Reject("data_offsets",
                      absl::StrCat(bits / 8, " bytes for ", tensor_.file_dtype,
                                   " ", ShapeText(tensor_.shape)),
                      absl::StrCat(tensor_.byte_size, " bytes in [",
                                   offsets_[0], ",", offsets_[1], "]"));
      }
    }
    if (const auto dtype = DTypeFromSafetensors(tensor_.file_dtype)) {
      tensor_.dtype = *dtype;
    } else {
      tensor_.dtype = DType::kU8;
      tensor_.shape = {tensor_.byte_size};
      tensor_.opaque = true;
    }
    header_.tensors.push_back(std::move(tensor_));
    tensor_ = SafetensorsTensor();
    return absl::OkStatus();
  }

  const absl::string_view path_;
  Place place_ = Place::kStart;
  SafetensorsHeader header_;
  SafetensorsTensor tensor_;  // the one being read
  int fields_ = 0;            // bits: dtype, shape, data_offsets seen
  int offset_count_ = 0;
  std::uint64_t offsets_[2] = {};
};

std::string ParentDirectory(const std::string& path) {
  const std::size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

void AppendJsonString(absl::string_view text, std::string* json) {
  json->push_back('"');
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      json->push_back('\\');
      json->push_back(c);
    } else if (static_cast<unsigned char>(c) < 0x20) {
      absl::StrAppend(
          json, "\\u",
          absl::Hex(static_cast<unsigned char>(c), absl::kZeroPad4));
    } else {
      json->push_back(c);
    }
  }
  json->push_back('"');
}

}  // namespace

std::optional<DType> DTypeFromSafetensors(absl::string_view file_dtype) {
  for (const DTypeNames& names : kDTypes) {
    if (names.file == file_dtype) return names.dtype;
  }
  return std::nullopt;
}

absl::string_view SafetensorsDTypeName(DType dtype) {
  for (const DTypeNames& names : kDTypes) {
    if (names.dtype == dtype) return names.file;
  }
  return "?";
}

absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(
    absl::string_view path, absl::string_view json,
    std::optional<std::uint64_t> data_bytes) {
  const std::string start = absl::StrCat(path, ": offset ", kLengthBytes);
  if (json.size() > kMaxSafetensorsHeaderBytes) {
    return DataLoss(
        {start, "header",
         absl::StrCat("at most ", kMaxSafetensorsHeaderBytes, " bytes"),
         absl::StrCat(json.size()), kFetchAgain});
  }
  if (json.empty() || json[0] != '{') {
    return DataLoss(
        {start, "header", "'{' as its first byte",
         json.empty() ? "no byte at all" : QuoteForMessage(json.substr(0, 1)),
         kFetchAgain});
  }
  absl::string_view object = json;
  while (absl::ConsumeSuffix(&object, " ")) {
  }
  if (object.back() != '}') {
    return DataLoss(
        {absl::StrCat(path, ": offset ", kLengthBytes + object.size() - 1),
         "header", "'}' as its last byte before padding with spaces",
         QuoteForMessage(object.substr(object.size() - 1)), kFetchAgain});
  }

  HeaderVisitor visitor(path);
  constexpr int kMaxDepth = 3;  // header, entry, shape
  KEDGE_RETURN_IF_ERROR(
      ParseStrictJson(path, kLengthBytes, object, kMaxDepth, visitor));
  SafetensorsHeader header = std::move(visitor.header());

  std::sort(header.tensors.begin(), header.tensors.end(),
            [](const SafetensorsTensor& a, const SafetensorsTensor& b) {
              return std::tie(a.data_offset, a.byte_size, a.name) <
                     std::tie(b.data_offset, b.byte_size, b.name);
            });
  std::uint64_t end = 0;
  for (std::size_t i = 0; i < header.tensors.size(); ++i) {
    const SafetensorsTensor& tensor = header.tensors[i];
    if (tensor.data_offset != end) {
      const std::string where =
          absl::StrCat(path, ": tensor ", QuoteForMessage(tensor.name));
      const bool overlaps = tensor.data_offset < end;
      std::string expected = absl::StrCat("data from offset ", end, ", where ");
      if (i == 0) {
        absl::StrAppend(&expected, "the data starts");
      } else {
        absl::StrAppend(&expected, "tensor ",
                        QuoteForMessage(header.tensors[i - 1].name), " ends");
      }
      return DataLoss(
          {where,
           overlaps ? "data_offsets overlap" : "data_offsets leave a hole",
           expected, absl::StrCat("offset ", tensor.data_offset), kFetchAgain});
    }
    end += tensor.byte_size;  // = the entry's own end offset: no overflow
  }
  header.data_bytes = end;
  if (data_bytes.has_value() && *data_bytes != end) {
    return DataLoss({path, "data",
                     absl::StrCat(end, " bytes, the sum of the header's ",
                                  header.tensors.size(), " tensors"),
                     absl::StrCat(*data_bytes, " bytes behind the header"),
                     *data_bytes < end
                         ? "the file is truncated: fetch or save it again"
                         : "something was appended to the file: fetch or save "
                           "it again"});
  }
  return header;
}

// ---------------------------------------------------------------- reading

absl::StatusOr<SafetensorsFile> SafetensorsFile::Open(
    absl::string_view path_text) {
  SafetensorsFile file;
  file.path_ = std::string(path_text);
  const std::string& path = file.path_;
  if (path.find('\0') != std::string::npos) {
    return absl::InvalidArgumentError(
        absl::StrCat(QuoteForMessage(path), ": path: expected no NUL"));
  }
  const Descriptor descriptor(OpenUntrusted(path));
  if (descriptor.get() < 0) return SystemError(errno, path, "open");
  struct stat status;
  if (::fstat(descriptor.get(), &status) != 0) {
    return SystemError(errno, path, "fstat");
  }
  if (!S_ISREG(status.st_mode)) {
    return absl::InvalidArgumentError(Describe(
        {path, "file type", "a regular file",
         S_ISDIR(status.st_mode) ? "a directory" : "a device, pipe or socket",
         "pass a .safetensors file"}));
  }
  const auto size = static_cast<std::uint64_t>(status.st_size);
  if (size < kLengthBytes + 2) {
    return DataLoss({path, "size", "at least 10 bytes",
                     absl::StrCat(size, " bytes"), kFetchAgain});
  }
  if (size > std::numeric_limits<std::size_t>::max()) {
    return absl::InvalidArgumentError(
        Describe({path, "size", "a file that fits the address space",
                  absl::StrCat(size, " bytes"), "use a 64-bit machine"}));
  }
  // Shared and never writable: private pages would be copied on touch by some
  // device drivers and count as our own memory.
  void* const mapped =
      ::mmap(nullptr, size, PROT_READ, MAP_SHARED, descriptor.get(), 0);
  if (mapped == MAP_FAILED) return SystemError(errno, path, "mmap");
  file.mapping_ = {static_cast<const std::byte*>(mapped),
                   static_cast<std::size_t>(size)};
  file.device_ = status.st_dev;
  file.inode_ = status.st_ino;
  file.modified_seconds_ = status.st_mtim.tv_sec;
  file.modified_nanoseconds_ = status.st_mtim.tv_nsec;

  for (std::uint64_t i = 0; i < kLengthBytes; ++i) {
    file.header_json_bytes_ |= std::to_integer<std::uint64_t>(file.mapping_[i])
                               << (8 * i);
  }
  const std::uint64_t most =
      std::min(size - kLengthBytes, kMaxSafetensorsHeaderBytes);
  if (file.header_json_bytes_ > most) {
    const std::uint64_t found = file.header_json_bytes_;
    file.header_json_bytes_ = 0;
    return DataLoss(
        {absl::StrCat(path, ": offset 0"), "header length",
         absl::StrCat("at most ", most, " in a file of ", size, " bytes"),
         absl::StrCat(found), kFetchAgain});
  }
  KEDGE_ASSIGN_OR_RETURN(
      file.header_,
      ParseSafetensorsHeader(path, file.header_json(),
                             size - kLengthBytes - file.header_json_bytes_));
  return file;
}

SafetensorsFile::SafetensorsFile(SafetensorsFile&& other) noexcept {
  *this = std::move(other);
}

SafetensorsFile& SafetensorsFile::operator=(SafetensorsFile&& other) noexcept {
  if (this == &other) return *this;
  std::swap(path_, other.path_);
  std::swap(mapping_, other.mapping_);
  std::swap(header_json_bytes_, other.header_json_bytes_);
  std::swap(header_, other.header_);
  std::swap(device_, other.device_);
  std::swap(inode_, other.inode_);
  std::swap(modified_seconds_, other.modified_seconds_);
  std::swap(modified_nanoseconds_, other.modified_nanoseconds_);
  return *this;
}

SafetensorsFile::~SafetensorsFile() {
  if (!mapping_.empty()) {
    ::munmap(const_cast<std::byte*>(mapping_.data()), mapping_.size());
  }
}

absl::string_view SafetensorsFile::header_json() const {
  return absl::string_view(
      reinterpret_cast<const char*>(mapping_.data()) + kLengthBytes,
      header_json_bytes_);
}

std::span<const std::byte> SafetensorsFile::Bytes(
    const SafetensorsTensor& tensor) const {
  KEDGE_CHECK(tensor.data_offset <= header_.data_bytes &&
              tensor.byte_size <= header_.data_bytes - tensor.data_offset);
  return mapping_.subspan(data_offset() + tensor.data_offset, tensor.byte_size);
}

absl::Status SafetensorsFile::CheckUnchanged() const {
  struct stat status;
  if (::stat(path_.c_str(), &status) != 0) {
    return SystemError(errno, path_, "stat");
  }
  if (status.st_dev == device_ && status.st_ino == inode_ &&
      static_cast<std::uint64_t>(status.st_size) == mapping_.size() &&
      status.st_mtim.tv_sec == modified_seconds_ &&
      status.st_mtim.tv_nsec == modified_nanoseconds_) {
    return absl::OkStatus();
  }
  return DataLoss({path_, "file", "the one that was opened",
                   "another one, or one that was written to since",
                   "what was read may be a mix of old and new: repeat it when "
                   "nothing writes the checkpoint"});
}

// ---------------------------------------------------------------- writing

absl::StatusOr<SafetensorsWriter> SafetensorsWriter::Create(
    absl::string_view path, absl::string_view header_json,
    SafetensorsWriterOptions options) {
  SafetensorsWriter writer;
  writer.path_ = std::string(path);
  writer.options_ = options;
  KEDGE_ASSIGN_OR_RETURN(
      writer.header_, ParseSafetensorsHeader(path, header_json, std::nullopt));
  if (!options.replace_existing) {
    // Finish() is what guarantees it; this saves writing a model for nothing.
    struct stat status;
    if (::lstat(writer.path_.c_str(), &status) == 0) {
      return absl::AlreadyExistsError(
          Describe({path, "file", "no such file", "one that exists",
                    "remove it or choose another place"}));
    }
  }
  static std::atomic<std::uint64_t> next_number{0};
  const std::string directory = ParentDirectory(writer.path_);
  constexpr int kAttempts = 100;  // names a crashed process of our pid left
  for (int attempt = 0; writer.descriptor_ < 0; ++attempt) {
    std::string temporary =
        absl::StrCat(directory, "/.kedge-tmp-", ::getpid(), "-",
                     next_number.fetch_add(1, std::memory_order_relaxed));
    writer.descriptor_ = OpenDescriptor(
        temporary, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW, 0666);
    if (writer.descriptor_ >= 0) {
      writer.temporary_path_ = std::move(temporary);
    } else if (errno != EEXIST || attempt == kAttempts) {
      return SystemError(errno, temporary, "create");
    }
  }
  writer.buffer_.reserve(kWriteBufferBytes);
  std::byte length[kLengthBytes];
  for (std::uint64_t i = 0; i < kLengthBytes; ++i) {
    length[i] = static_cast<std::byte>(header_json.size() >> (8 * i));
  }
  writer.buffer_.assign(length, length + kLengthBytes);
  KEDGE_RETURN_IF_ERROR(writer.Flush());
  KEDGE_RETURN_IF_ERROR(writer.WriteAll(
      std::as_bytes(std::span(header_json.data(), header_json.size()))));
  return writer;
}

SafetensorsWriter::SafetensorsWriter(SafetensorsWriter&& other) noexcept {
  *this = std::move(other);
}

SafetensorsWriter& SafetensorsWriter::operator=(
    SafetensorsWriter&& other) noexcept {
  if (this == &other) return *this;
  std::swap(path_, other.path_);
  std::swap(temporary_path_, other.temporary_path_);
  std::swap(descriptor_, other.descriptor_);
  std::swap(options_, other.options_);
  std::swap(header_, other.header_);
  std::swap(appended_bytes_, other.appended_bytes_);
  std::swap(buffer_, other.buffer_);
  return *this;
}

SafetensorsWriter::~SafetensorsWriter() { Discard(); }

absl::Status SafetensorsWriter::Append(std::span<const std::byte> bytes) {
  if (descriptor_ < 0) {
    return absl::FailedPreconditionError(
        absl::StrCat(path_,
                     ": append: expected an open file, found one that "
                     "is finished or failed; create it again"));
  }
  if (bytes.size() > header_.data_bytes - appended_bytes_) {
    return absl::InvalidArgumentError(Describe(
        {path_, "data",
         absl::StrCat("at most ", header_.data_bytes - appended_bytes_,
                      " more of the header's ", header_.data_bytes, " bytes"),
         absl::StrCat(bytes.size(), " more"), "append each tensor once"}));
  }
  appended_bytes_ += bytes.size();
  if (bytes.size() > kWriteBufferBytes - buffer_.size()) {
    KEDGE_RETURN_IF_ERROR(Flush());
    if (bytes.size() >= kWriteBufferBytes) return WriteAll(bytes);
  }
  buffer_.insert(buffer_.end(), bytes.begin(), bytes.end());
  return absl::OkStatus();
}

absl::Status SafetensorsWriter::Finish() {
  if (descriptor_ < 0) {
    return absl::FailedPreconditionError(
        absl::StrCat(path_,
                     ": finish: expected an open file, found one that "
                     "is finished or failed; create it again"));
  }
  if (appended_bytes_ != header_.data_bytes) {
    return absl::FailedPreconditionError(Describe(
        {path_, "data", absl::StrCat(header_.data_bytes, " bytes"),
         absl::StrCat(appended_bytes_), "append every tensor of the header"}));
  }
  KEDGE_RETURN_IF_ERROR(Flush());
  if (::fsync(descriptor_) != 0) {
    return SystemError(errno, temporary_path_, "fsync");
  }
  const int descriptor = descriptor_;
  descriptor_ = -1;
  if (::close(descriptor) != 0) {
    return SystemError(errno, temporary_path_, "close");
  }

  if (options_.replace_existing) {
    if (::rename(temporary_path_.c_str(), path_.c_str()) != 0) {
      return SystemError(errno, path_, "rename");
    }
  } else if (::renameat2(AT_FDCWD, temporary_path_.c_str(), AT_FDCWD,
                         path_.c_str(), RENAME_NOREPLACE) != 0) {
    const int error = errno;
    if (error == EEXIST) {
      return absl::AlreadyExistsError(
          Describe({path_, "file", "no such file",
                    "one that appeared while this one was written",
                    "remove it or choose another place"}));
    }
    // Network file systems know no such rename; a hard link refuses likewise.
    if (error != EINVAL && error != ENOSYS && error != EOPNOTSUPP) {
      return SystemError(error, path_, "rename");
    }
    if (::link(temporary_path_.c_str(), path_.c_str()) != 0) {
      return SystemError(errno, path_, "link");
    }
    ::unlink(temporary_path_.c_str());
  }
  temporary_path_.clear();

  const std::string directory = ParentDirectory(path_);
  const Descriptor parent(OpenDescriptor(directory, O_RDONLY | O_DIRECTORY));
  if (parent.get() < 0) return SystemError(errno, directory, "open");
  if (::fsync(parent.get()) != 0) {
    return SystemError(errno, directory, "fsync");
  }
  return absl::OkStatus();
}

absl::Status SafetensorsWriter::Flush() {
  KEDGE_RETURN_IF_ERROR(WriteAll(buffer_));
  buffer_.clear();
  return absl::OkStatus();
}

absl::Status SafetensorsWriter::WriteAll(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    // Linux writes at most about 2 GiB a call; stay aligned below that.
    constexpr std::size_t kMost = std::size_t{1} << 30;
    const ssize_t written =
        ::write(descriptor_, bytes.data(), std::min(bytes.size(), kMost));
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) {
      const int error = written < 0 ? errno : EIO;
      const absl::Status status = SystemError(error, temporary_path_, "write");
      Discard();
      return status;
    }
    bytes = bytes.subspan(static_cast<std::size_t>(written));
  }
  return absl::OkStatus();
}

void SafetensorsWriter::Discard() {
  if (descriptor_ >= 0) ::close(descriptor_);
  descriptor_ = -1;
  if (!temporary_path_.empty()) ::unlink(temporary_path_.c_str());
  temporary_path_.clear();
}

absl::StatusOr<std::string> BuildSafetensorsHeader(
    std::span<const SafetensorsEntry> entries,
    std::span<const std::pair<std::string, std::string>> metadata) {
  std::string json = "{";
  if (!metadata.empty()) {
    json += "\"__metadata__\":{";
    for (std::size_t i = 0; i < metadata.size(); ++i) {
      if (i != 0) json.push_back(',');
      AppendJsonString(metadata[i].first, &json);
      json.push_back(':');
      AppendJsonString(metadata[i].second, &json);
    }
    json.push_back('}');
  }
  std::uint64_t end = 0;
  for (const SafetensorsEntry& entry : entries) {
    const std::uint64_t begin = end;
    std::uint64_t bytes = entry.opaque_bytes;
    if (entry.file_dtype.empty()) {
      const std::optional<std::uint64_t> count = ElementCount(entry.shape);
      if (!count.has_value() ||
          !Multiply(*count, ElementBytes(entry.dtype), &bytes)) {
        return absl::InvalidArgumentError(
            Describe({absl::StrCat("tensor ", QuoteForMessage(entry.name)),
                      "shape", "fewer than 2^64 bytes", ShapeText(entry.shape),
                      "pass the shape of real data"}));
      }
    }
    if (__builtin_add_overflow(begin, bytes, &end)) {
      return absl::InvalidArgumentError(Describe(
          {absl::StrCat("tensor ", QuoteForMessage(entry.name)), "end of data",
           "below 2^64", "more", "pass the shapes of real data"}));
    }
    if (json.size() > 1) json.push_back(',');
    AppendJsonString(entry.name, &json);
    json += ":{\"dtype\":";
    AppendJsonString(entry.file_dtype.empty()
                         ? SafetensorsDTypeName(entry.dtype)
                         : absl::string_view(entry.file_dtype),
                     &json);
    absl::StrAppend(&json, ",\"shape\":", ShapeText(entry.shape),
                    ",\"data_offsets\":[", begin, ",", end, "]}");
  }
  json.push_back('}');
  json.append((8 - json.size() % 8) % 8, ' ');
  const auto parsed = ParseSafetensorsHeader("(new header)", json, end);
  if (!parsed.ok()) return parsed.status();
  return json;
}

}  // namespace kedge
