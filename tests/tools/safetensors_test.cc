// Goal: every sound safetensors file is read as it is and written again byte
// for byte; every other one is refused with a message that names the file, the
// place and what was expected. Method: files put together by hand, one fault
// each; a table of faults over one sound header.

#include "kedge/tools/safetensors.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "kedge/format/limits.h"
#include "kedge/tests/tools/checkpoint_files.h"

namespace kedge {
namespace {

using ::kedge::testing::Bytes;
using ::kedge::testing::EntryJson;
using ::kedge::testing::FileBytes;
using ::kedge::testing::LengthPrefix;
using ::kedge::testing::ReadFile;
using ::kedge::testing::TemporaryDirectory;
using ::kedge::testing::Text;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::string Message(const absl::Status& status) {
  return std::string(status.message());
}

// What Open() says about a file of these bytes.
absl::Status OpenStatus(const std::string& bytes) {
  const TemporaryDirectory directory;
  const std::string path = directory.Write("f.safetensors", bytes);
  const auto file = SafetensorsFile::Open(path);
  return file.ok() ? absl::OkStatus() : file.status();
}

absl::Status HeaderStatus(const std::string& header, std::size_t data_bytes) {
  return OpenStatus(FileBytes(header, std::string(data_bytes, 'd')));
}

void ExpectRejected(const std::string& header, std::size_t data_bytes,
                    const std::string& says) {
  const absl::Status status = HeaderStatus(header, data_bytes);
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss)
      << header.substr(0, 300) << "\n"
      << status;
  EXPECT_THAT(Message(status), HasSubstr(says)) << header.substr(0, 300);
  EXPECT_THAT(Message(status), HasSubstr("f.safetensors"));
  EXPECT_THAT(Message(status), HasSubstr("expected "));
  EXPECT_THAT(Message(status), HasSubstr("found "));
  EXPECT_THAT(Message(status), HasSubstr("again"));  // what to do
  EXPECT_LT(Message(status).size(), 1200u);
}

// Writes the file again from what was read of it.
void ExpectRewritesIdentically(const TemporaryDirectory& directory,
                               const std::string& path) {
  const auto file = SafetensorsFile::Open(path);
  ASSERT_TRUE(file.ok()) << file.status();
  const std::string copy = directory.Path("copy");
  auto writer = SafetensorsWriter::Create(copy, file->header_json(), {true});
  ASSERT_TRUE(writer.ok()) << writer.status();
  ASSERT_EQ(writer->header().tensors.size(), file->tensors().size());
  for (const SafetensorsTensor& tensor : file->tensors()) {
    const absl::Status status = writer->Append(file->Bytes(tensor));
    ASSERT_TRUE(status.ok()) << status;
  }
  const absl::Status status = writer->Finish();
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(ReadFile(copy), ReadFile(path));
}

TEST(SafetensorsFileTest, OpensTensorsWithTheirBytes) {
  const TemporaryDirectory directory;
  // Header order is not data order; padding behind, spaces inside.
  const std::string header =
      "{ \"b\" : {\"shape\":[2,2],\"dtype\":\"BF16\","
      "\"data_offsets\":[4,12]},\n" +
      EntryJson("a", "F32", "[]", 0, 4) +
      ",\"__metadata__\":{\"format\":\"pt\",\"n\":\"\"}}"
      "   ";
  const std::string path =
      directory.Write("f.safetensors", FileBytes(header, "aaaabbbbbbbb"));
  const auto file = SafetensorsFile::Open(path);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->path(), path);
  EXPECT_EQ(file->header_json(), header);
  EXPECT_EQ(file->data_offset(), 8 + header.size());
  EXPECT_EQ(file->file_bytes(), 8 + header.size() + 12);
  ASSERT_EQ(file->tensors().size(), 2u);
  const SafetensorsTensor& a = file->tensors()[0];
  const SafetensorsTensor& b = file->tensors()[1];
  EXPECT_EQ(a.name, "a");
  EXPECT_EQ(a.dtype, DType::kF32);
  EXPECT_THAT(a.shape, IsEmpty());
  EXPECT_FALSE(a.opaque);
  EXPECT_EQ(Text(file->Bytes(a)), "aaaa");
  EXPECT_EQ(b.name, "b");
  EXPECT_EQ(b.file_dtype, "BF16");
  EXPECT_THAT(b.shape, ElementsAre(2, 2));
  EXPECT_EQ(Text(file->Bytes(b)), "bbbbbbbb");
  EXPECT_THAT(file->metadata(),
              ElementsAre(std::pair("format", "pt"), std::pair("n", "")));
  ExpectRewritesIdentically(directory, path);
}

TEST(SafetensorsFileTest, KnowsEveryDType) {
  for (std::uint8_t value = 1; value <= kMaxDType; ++value) {
    const auto dtype = static_cast<DType>(value);
    const std::string name(SafetensorsDTypeName(dtype));
    EXPECT_EQ(DTypeFromSafetensors(name), dtype) << name;
    const std::uint64_t bytes = 3 * ElementBytes(dtype);
    EXPECT_TRUE(
        HeaderStatus(
            absl::StrCat("{", EntryJson("t", name, "[3]", 0, bytes), "}"),
            bytes)
            .ok())
        << name;
    ExpectRejected(
        absl::StrCat("{", EntryJson("t", name, "[3]", 0, bytes + 1), "}"),
        bytes + 1, "bytes for " + name + " [3]");
  }
  EXPECT_EQ(DTypeFromSafetensors("bf16"), std::nullopt);
}

// User report 39: zero-element tensors were forbidden, unsaveable, unloadable.
TEST(SafetensorsFileTest, ZeroSizeTensorsAndScalarsAreOrdinary) {
  const TemporaryDirectory directory;
  const std::string header = "{" + EntryJson("z0", "F32", "[0]", 0, 0) + "," +
                             EntryJson("s", "F32", "[]", 0, 4) + "," +
                             EntryJson("z1", "BF16", "[2,0]", 4, 4) + "," +
                             EntryJson("z2", "I64", "[0,3]", 4, 4) + "," +
                             EntryJson("v", "U8", "[1]", 4, 5) + "," +
                             EntryJson("z3", "F4", "[0]", 5, 5) + "}";
  const std::string path =
      directory.Write("f.safetensors", FileBytes(header, "ssssv"));
  const auto file = SafetensorsFile::Open(path);
  ASSERT_TRUE(file.ok()) << file.status();
  ASSERT_EQ(file->tensors().size(), 6u);
  EXPECT_EQ(file->tensors()[2].name, "z1");
  EXPECT_THAT(file->tensors()[2].shape, ElementsAre(2, 0));
  EXPECT_TRUE(file->Bytes(file->tensors()[2]).empty());
  ExpectRewritesIdentically(directory, path);
}

TEST(SafetensorsFileTest, ZeroSizeTensorMustLieBetweenTensors) {
  ExpectRejected("{" + EntryJson("a", "U8", "[4]", 0, 4) + "," +
                     EntryJson("z", "U8", "[0]", 2, 2) + "}",
                 4, "tensor \"z\": data_offsets overlap");
  ExpectRejected("{" + EntryJson("a", "U8", "[4]", 0, 4) + "," +
                     EntryJson("z", "U8", "[0]", 5, 5) + "}",
                 5, "tensor \"z\": data_offsets leave a hole");
}

TEST(SafetensorsFileTest, FileWithoutTensorsIsSound) {
  for (const std::string header : {"{}", "{}      ", "{\"__metadata__\":{}}"}) {
    const TemporaryDirectory directory;
    const std::string path = directory.Write("f", FileBytes(header, ""));
    ExpectRewritesIdentically(directory, path);
  }
}

// User report 26: types are mixed in one model. 27: NaN payloads, both zeros
// and infinities are bits like all others.
TEST(SafetensorsFileTest, MixedDTypesAndSpecialFloatsSurviveByteForByte) {
  const std::uint32_t floats[] = {0x7fc00001, 0xffc12345, 0x7f800001,
                                  0x00000000, 0x80000000, 0x7f800000,
                                  0xff800000, 0x00000001};
  const std::uint16_t halves[] = {0x7fc1, 0xffc1, 0x7f81, 0x8000,
                                  0x0000, 0x7f80, 0xff80, 0x0001};
  std::string data(reinterpret_cast<const char*>(floats), sizeof(floats));
  data.append(reinterpret_cast<const char*>(halves), sizeof(halves));
  data += "\x7f\xff\x80";
  const std::vector<SafetensorsEntry> entries = {
      {"router.bias", DType::kF32, {8}},
      {"layer.weight", DType::kBf16, {2, 4}},
      {"buffer", DType::kU8, {3}}};
  const auto header = BuildSafetensorsHeader(entries, {});
  ASSERT_TRUE(header.ok()) << header.status();
  const TemporaryDirectory directory;
  const std::string path =
      directory.Write("f.safetensors", FileBytes(*header, data));
  const auto file = SafetensorsFile::Open(path);
  ASSERT_TRUE(file.ok()) << file.status();
  std::vector<DType> dtypes;
  for (const auto& tensor : file->tensors()) dtypes.push_back(tensor.dtype);
  EXPECT_THAT(dtypes, ElementsAre(DType::kF32, DType::kBf16, DType::kU8));
  EXPECT_EQ(std::memcmp(file->Bytes(file->tensors()[0]).data(), floats,
                        sizeof(floats)),
            0);
  ExpectRewritesIdentically(directory, path);
}

TEST(SafetensorsFileTest, UnknownDTypesAreOpaqueBytes) {
  const TemporaryDirectory directory;
  const std::string header = "{" + EntryJson("f4", "F4", "[3,2]", 0, 3) + "," +
                             EntryJson("f6", "F6_E2M3", "[4]", 3, 6) + "," +
                             EntryJson("c", "C64", "[1]", 6, 14) + "," +
                             EntryJson("fnuz", "F8_E4M3FNUZ", "[2]", 14, 16) +
                             "," + EntryJson("new", "Int_3", "[99,7]", 16, 19) +
                             "," + EntryJson("none", "Int_3", "[99]", 19, 19) +
                             "}";
  const std::string path =
      directory.Write("f.safetensors", FileBytes(header, std::string(19, 'x')));
  const auto file = SafetensorsFile::Open(path);
  ASSERT_TRUE(file.ok()) << file.status();
  for (const SafetensorsTensor& tensor : file->tensors()) {
    EXPECT_TRUE(tensor.opaque) << tensor.name;
    EXPECT_EQ(tensor.dtype, DType::kU8) << tensor.name;
    EXPECT_THAT(tensor.shape, ElementsAre(tensor.byte_size)) << tensor.name;
  }
  EXPECT_EQ(file->tensors()[0].file_dtype, "F4");
  ExpectRewritesIdentically(directory, path);
}

TEST(SafetensorsFileTest, SizesOfKnownOpaqueDTypesAreChecked) {
  ExpectRejected("{" + EntryJson("t", "F4", "[3]", 0, 2) + "}", 2,
                 "a whole number of bytes");
  ExpectRejected("{" + EntryJson("t", "F4", "[4]", 0, 4) + "}", 4,
                 "2 bytes for F4 [4]");
  ExpectRejected("{" + EntryJson("t", "F6_E3M2", "[2]", 0, 2) + "}", 2,
                 "12 bits of F6_E3M2");
  ExpectRejected("{" + EntryJson("t", "C64", "[1]", 0, 4) + "}", 4,
                 "8 bytes for C64 [1]");
}

TEST(SafetensorsFileTest, RejectsFilesTooShortForAHeader) {
  for (std::size_t size = 0; size < 10; ++size) {
    const absl::Status status = OpenStatus(std::string(size, '\0'));
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << size;
    EXPECT_THAT(Message(status), HasSubstr("at least 10 bytes")) << size;
  }
}

TEST(SafetensorsFileTest, RejectsHeaderLengthsBeyondFileOrLimit) {
  const std::string rest = "{}" + std::string(30, ' ');
  for (const std::uint64_t length :
       {std::uint64_t{33}, std::uint64_t{34}, kMaxSafetensorsHeaderBytes,
        kMaxSafetensorsHeaderBytes + 1, std::uint64_t{1} << 32,
        std::uint64_t{1} << 63, ~std::uint64_t{0}, ~std::uint64_t{0} - 7}) {
    const absl::Status status = OpenStatus(LengthPrefix(length) + rest);
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << length;
    EXPECT_THAT(Message(status),
                HasSubstr(absl::StrCat("offset 0: header length: expected at "
                                       "most 32 in a file of 40 bytes, found ",
                                       length)));
  }
  EXPECT_TRUE(OpenStatus(LengthPrefix(32) + rest).ok());
  for (const std::uint64_t length : {0, 1}) {
    EXPECT_FALSE(OpenStatus(LengthPrefix(length) + rest).ok()) << length;
  }
}

TEST(SafetensorsFileTest, RejectsHeaderBeyondTheLimitInALargeFile) {
  const TemporaryDirectory directory;
  const std::string path =
      directory.Write("f", LengthPrefix(kMaxSafetensorsHeaderBytes + 1) + "{}");
  ASSERT_EQ(::truncate(path.c_str(), 200'000'000), 0);
  const auto file = SafetensorsFile::Open(path);
  EXPECT_THAT(Message(file.status()), HasSubstr("at most 100000000"));
}

TEST(SafetensorsFileTest, RejectsTruncatedAndExtendedData) {
  const std::string header = "{" + EntryJson("t", "U8", "[8]", 0, 8) + "}";
  EXPECT_TRUE(HeaderStatus(header, 8).ok());
  ExpectRejected(header, 7, "the file is truncated");
  ExpectRejected(header, 0,
                 "8 bytes, the sum of the header's 1 tensors, found 0");
  ExpectRejected(header, 9, "something was appended");
  ExpectRejected("{}", 1, "something was appended");
}

TEST(SafetensorsFileTest, EveryTruncationOfASoundFileIsRejected) {
  const std::string bytes =
      FileBytes("{" + EntryJson("a", "U8", "[8]", 0, 8) + "," +
                    EntryJson("b", "F32", "[1]", 8, 12) + "}",
                std::string(12, 'd'));
  ASSERT_TRUE(OpenStatus(bytes).ok());
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_EQ(OpenStatus(bytes.substr(0, size)).code(),
              absl::StatusCode::kDataLoss)
        << size;
  }
}

TEST(SafetensorsFileTest, RejectsHolesAndOverlapsByName) {
  const auto two = [](std::uint64_t b0, std::uint64_t e0, std::uint64_t b1,
                      std::uint64_t e1) {
    return "{" +
           EntryJson("a", "U8", "[" + std::to_string(e0 - b0) + "]", b0, e0) +
           "," +
           EntryJson("b", "U8", "[" + std::to_string(e1 - b1) + "]", b1, e1) +
           "}";
  };
  EXPECT_TRUE(HeaderStatus(two(4, 8, 0, 4), 8).ok());
  ExpectRejected(two(0, 4, 5, 8), 8,
                 "tensor \"b\": data_offsets leave a hole: expected data from "
                 "offset 4, where tensor \"a\" ends, found offset 5");
  ExpectRejected(two(0, 4, 3, 8), 8, "tensor \"b\": data_offsets overlap");
  ExpectRejected(two(0, 4, 0, 4), 4, "tensor \"b\": data_offsets overlap");
  ExpectRejected(two(0, 8, 2, 4), 8, "tensor \"b\": data_offsets overlap");
  ExpectRejected(two(1, 4, 4, 8), 8, "where the data starts, found offset 1");
}

TEST(SafetensorsFileTest, RejectsOffsetsThatRunBackwardsOrOverflow) {
  const std::uint64_t max = std::numeric_limits<std::uint64_t>::max();
  ExpectRejected("{" + EntryJson("t", "U8", "[4]", 8, 4) + "}", 8,
                 "begin at most end");
  ExpectRejected("{" + EntryJson("t", "X", "[4]", 0, max) + "}", 8,
                 "at most 35184372088832 bytes");
  ExpectRejected("{" + EntryJson("t", "U8", "[0]", max, max) + "}", 8,
                 "leave a hole");
  ExpectRejected("{" + EntryJson("a", "U8", "[8]", 0, 8) + "," +
                     EntryJson("b", "X", "[1]", max - 8, max) + "}",
                 8, "leave a hole");
}

TEST(SafetensorsFileTest, RejectsShapesWhoseProductOverflows) {
  for (const char* shape :
       {"[4294967296,4294967296]", "[18446744073709551615,2]",
        "[9223372036854775808,2,0]", "[0,9223372036854775808,2]"}) {
    ExpectRejected("{" + EntryJson("t", "U8", shape, 0, 0) + "}", 0,
                   "fewer than 2^64 elements");
  }
  // 2^62 elements of 8 bytes wrap to zero bytes.
  ExpectRejected(
      "{" + EntryJson("t", "F64", "[4611686018427387904]", 0, 0) + "}", 0,
      "fewer than 2^64 bits");
  ExpectRejected(
      "{" + EntryJson("t", "F64", "[4294967296,2147483648]", 0, 0) + "}", 0,
      "fewer than 2^64 bits");
}

TEST(SafetensorsFileTest, RejectsAnyOtherStructure) {
  const std::string shape = "\"shape\":[4]";
  const std::string dtype = "\"dtype\":\"U8\"";
  const std::string offsets = "\"data_offsets\":[0,4]";
  const auto entry = [](std::initializer_list<std::string> fields) {
    std::string json = "{\"t\":{";
    for (const std::string& field : fields) {
      if (json.back() != '{') json += ",";
      json += field;
    }
    return json + "}}";
  };
  ASSERT_TRUE(HeaderStatus(entry({offsets, shape, dtype}), 4).ok());
  const struct {
    std::string header;
    std::string says;
  } cases[] = {
      {entry({dtype, shape}), "found no data_offsets"},
      {entry({dtype, offsets}), "found no shape"},
      {entry({shape, offsets}), "found no dtype"},
      {"{\"t\":{}}", "found no dtype, no shape, no data_offsets"},
      {entry({dtype, shape, offsets, "\"x\":1"}), "found \"x\""},
      {entry({dtype, shape, offsets, dtype}), "key \"dtype\""},
      {entry({dtype, shape, offsets, "\"dtype\":\"F32\""}), "key \"dtype\""},
      {entry({"\"dtype\":8", shape, offsets}), "dtype as a string"},
      {entry({"\"dtype\":null", shape, offsets}), "dtype as a string"},
      {entry({"\"dtype\":\"\"", shape, offsets}), "dtype: expected 1 to 64"},
      {entry({"\"dtype\":\"U8 \"", shape, offsets}), "dtype: expected 1 to 64"},
      {entry({"\"dtype\":\"" + std::string(65, 'A') + "\"", shape, offsets}),
       "dtype: expected 1 to 64"},
      {entry({dtype, "\"shape\":4", offsets}), "found the number 4"},
      {entry({dtype, "\"shape\":[[4]]", offsets}), "at most 3 levels"},
      {entry({dtype, "\"shape\":{}", offsets}), "found an object"},
      {entry({dtype, "\"shape\":[4.0]", offsets}), "found the number 4.0"},
      {entry({dtype, "\"shape\":[4e0]", offsets}), "found the number 4e0"},
      {entry({dtype, "\"shape\":[-4]", offsets}), "the signed number -4"},
      {entry({dtype, "\"shape\":[-0]", offsets}), "the signed number 0"},
      {entry({dtype, "\"shape\":[\"4\"]", offsets}), "the string \"4\""},
      {entry({dtype, "\"shape\":[true]", offsets}), "found true"},
      {entry({dtype, "\"shape\":[18446744073709551616]", offsets}),
       "found the number 18446744073709551616"},
      {entry({dtype, shape, "\"data_offsets\":[0]"}), "2 numbers, found 1"},
      {entry({dtype, shape, "\"data_offsets\":[]"}), "2 numbers, found 0"},
      {entry({dtype, shape, "\"data_offsets\":[0,4,4]"}), "2 numbers"},
      {entry({dtype, shape, "\"data_offsets\":[0,-4]"}), "signed number -4"},
      {entry({dtype, shape, "\"data_offsets\":[0,4.5]"}), "the number 4.5"},
      {"{\"t\":4}", "tensor \"t\""},
      {"{\"t\":[]}", "found an array"},
      {"{\"t\":null}", "found null"},
      {"{\"__metadata__\":[]}", "__metadata__ as an object of strings"},
      {"{\"__metadata__\":\"x\"}", "__metadata__ as an object of strings"},
      {"{\"__metadata__\":{\"a\":1}}", "a string as metadata"},
      {"{\"__metadata__\":{\"a\":{}}}", "a string as metadata"},
      {"{\"__metadata__\":{\"a\":null}}", "a string as metadata"},
      {"{\"__metadata__\":{\"a\":\"\",\"a\":\"\"}}", "key \"a\""},
      {"{\"__metadata__\":{},\"__metadata__\":{}}", "key \"__metadata__\""},
      {" {}", "'{' as its first byte"},
      {"[]", "'{' as its first byte"},
      {"\xef\xbb\xbf{}", "'{' as its first byte"},
      {"{}\n", "'}' as its last byte"},
      {"{}\t ", "'}' as its last byte"},
      {"{}  x}", "valid JSON"},
      {"{}{}", "valid JSON"},
      {std::string("{}\0  ", 5), "'}' as its last byte"},
      {std::string("{}\0{}", 5), "NUL byte"},
      {"{ ", "'}' as its last byte"},
      {"{\"t\":{" + dtype + "," + shape + "," + offsets + "}", "valid JSON"},
  };
  for (const auto& c : cases) ExpectRejected(c.header, 4, c.says);
}

TEST(SafetensorsFileTest, RejectsTheSameTensorTwice) {
  ExpectRejected("{" + EntryJson("t", "U8", "[2]", 0, 2) + "," +
                     EntryJson("u", "U8", "[2]", 2, 4) + "," +
                     EntryJson("t", "U8", "[2]", 4, 6) + "}",
                 6, "key \"t\"");
  ExpectRejected("{" + EntryJson("t", "U8", "[2]", 0, 2) + "," +
                     EntryJson("\\u0074", "U8", "[2]", 2, 4) + "}",
                 4, "key \"t\"");
}

TEST(SafetensorsFileTest, ChecksNames) {
  const auto named = [](const std::string& name) {
    return "{" + EntryJson(name, "U8", "[2]", 0, 2) + "}";
  };
  EXPECT_TRUE(HeaderStatus(named(std::string(kMaxNameBytes, 'n')), 2).ok());
  EXPECT_TRUE(
      HeaderStatus(named("\\\"\\/ \xe5\xb1\x82 \\ud83d\\ude00"), 2).ok());
  ExpectRejected(named(""), 2, "at least 1 byte");
  ExpectRejected(named(std::string(kMaxNameBytes + 1, 'n')), 2,
                 "at most 4096 bytes");
  ExpectRejected(named("a\\u0000b"), 2, "no NUL character");
  ExpectRejected(named("\xff"), 2, "valid JSON in UTF-8");
  ExpectRejected(named("\xc0\x80"), 2, "valid JSON in UTF-8");
  ExpectRejected(named("\\ud800"), 2, "valid JSON in UTF-8");
}

TEST(SafetensorsFileTest, ChecksRank) {
  std::string shape = "[1";
  for (std::uint32_t i = 1; i < kMaxRank; ++i) shape += ",1";
  EXPECT_TRUE(
      HeaderStatus("{" + EntryJson("t", "U8", shape + "]", 0, 1) + "}", 1)
          .ok());
  ExpectRejected("{" + EntryJson("t", "U8", shape + ",1]", 0, 1) + "}", 1,
                 "at most 32 dimensions");
}

TEST(SafetensorsHeaderTest, ChecksTensorAndMetadataCounts) {
  std::string many = "{";
  std::size_t before_last = 0;
  for (std::uint64_t i = 0; i <= kMaxTensorCount; ++i) {
    before_last = many.size();
    absl::StrAppend(&many, i == 0 ? "" : ",", "\"", i,
                    R"(":{"dtype":"X","shape":[],"data_offsets":[0,0]})");
  }
  // Rejected at the name of the one too many, so those before it passed.
  const std::size_t name_end = 8 + before_last + std::strlen(",\"1000000\"");
  EXPECT_THAT(
      Message(ParseSafetensorsHeader("f", many + "}", 0).status()),
      HasSubstr(absl::StrCat("f: offset ", name_end,
                             ": header: expected at most 1000000 tensors")));

  std::string json = "{\"__metadata__\":{\"x\":\"\"";
  for (std::size_t i = 0; i < kMaxSafetensorsMetadataEntries; ++i) {
    absl::StrAppend(&json, ",\"", i, "\":\"\"");
  }
  EXPECT_THAT(Message(ParseSafetensorsHeader("f", json + "}}", 0).status()),
              HasSubstr("at most 100000 entries"));
}

TEST(SafetensorsFileTest, TensorBeyond4GiElementsOpens) {
  const TemporaryDirectory directory;
  const std::uint64_t elements = (std::uint64_t{1} << 32) + 7;
  const std::string header =
      "{" +
      EntryJson("big", "BF16", "[" + std::to_string(elements) + "]", 0,
                2 * elements) +
      "," + EntryJson("tail", "U8", "[3]", 2 * elements, 2 * elements + 3) +
      "}";
  const std::string path = directory.Write("f", FileBytes(header, ""));
  ASSERT_EQ(::truncate(path.c_str(), static_cast<off_t>(8 + header.size() +
                                                        2 * elements + 3)),
            0);
  const auto file = SafetensorsFile::Open(path);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->tensors()[0].byte_size, 2 * elements);
  EXPECT_EQ(Text(file->Bytes(file->tensors()[1])), std::string(3, '\0'));
}

TEST(SafetensorsFileTest, FollowsLinksAndRefusesWhatIsNoFile) {
  const TemporaryDirectory directory;
  const std::string path = directory.Write("f", FileBytes("{}", ""));
  ASSERT_EQ(::symlink("f", directory.Path("link").c_str()), 0);
  EXPECT_TRUE(SafetensorsFile::Open(directory.Path("link")).ok());

  ASSERT_EQ(::mkfifo(directory.Path("fifo").c_str(), 0600), 0);
  for (const std::string& other :
       {directory.path(), directory.Path("fifo"), std::string("/dev/zero")}) {
    const absl::Status status = SafetensorsFile::Open(other).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << other;
    EXPECT_THAT(Message(status), HasSubstr("a regular file")) << other;
  }
  const absl::Status missing =
      SafetensorsFile::Open(directory.Path("none")).status();
  EXPECT_EQ(missing.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(Message(missing), HasSubstr("ENOENT"));
  EXPECT_EQ(SafetensorsFile::Open(absl::string_view("a\0b", 3)).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(SafetensorsFileTest, MovesKeepBytesAndDescriptions) {
  const TemporaryDirectory directory;
  const std::string header = "{" + EntryJson("t", "U8", "[3]", 0, 3) + "}";
  auto opened =
      SafetensorsFile::Open(directory.Write("f", FileBytes(header, "abc")));
  ASSERT_TRUE(opened.ok());
  const SafetensorsTensor* const tensor = opened->tensors().data();
  SafetensorsFile moved = *std::move(opened);
  std::vector<SafetensorsFile> files;
  files.push_back(std::move(moved));
  EXPECT_EQ(files[0].tensors().data(), tensor);
  EXPECT_EQ(Text(files[0].Bytes(*tensor)), "abc");
}

// User report 42: a file saved over while its tensors are mapped.
TEST(SafetensorsFileTest, CheckUnchangedSeesWritesReplacementsAndRemoval) {
  const TemporaryDirectory directory;
  const std::string header = "{" + EntryJson("t", "U8", "[3]", 0, 3) + "}";
  const std::string path = directory.Write("f", FileBytes(header, "abc"));
  const auto file = SafetensorsFile::Open(path);
  ASSERT_TRUE(file.ok());
  EXPECT_TRUE(file->CheckUnchanged().ok());

  struct timespec times[2] = {{1'000'000'000, 5}, {1'000'000'000, 5}};
  ASSERT_EQ(::utimensat(AT_FDCWD, path.c_str(), times, 0), 0);
  EXPECT_EQ(file->CheckUnchanged().code(), absl::StatusCode::kDataLoss);

  const auto again = SafetensorsFile::Open(path);
  ASSERT_TRUE(again.ok());
  EXPECT_TRUE(again->CheckUnchanged().ok());
  const std::string other = directory.Write("g", FileBytes(header, "abd"));
  ASSERT_EQ(::utimensat(AT_FDCWD, other.c_str(), times, 0), 0);
  ASSERT_EQ(::rename(other.c_str(), path.c_str()), 0);
  EXPECT_EQ(again->CheckUnchanged().code(), absl::StatusCode::kDataLoss);
  ASSERT_EQ(::unlink(path.c_str()), 0);
  EXPECT_EQ(again->CheckUnchanged().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(Text(again->Bytes(again->tensors()[0])), "abc");  // still mapped
}

// ---------------------------------------------------------------- writer

TEST(SafetensorsWriterTest, WritesPiecesOfAnySize) {
  const TemporaryDirectory directory;
  // More than the buffer, in pieces below, at and above its size.
  std::string data(5'500'000, '\0');
  for (std::size_t i = 0; i < data.size(); ++i) {
    data[i] = static_cast<char>(i * 2654435761u >> 13);
  }
  const std::vector<SafetensorsEntry> entries = {
      {"t", DType::kU8, {data.size()}}};
  const auto header = BuildSafetensorsHeader(entries, {});
  ASSERT_TRUE(header.ok()) << header.status();
  auto writer = SafetensorsWriter::Create(directory.Path("f"), *header);
  ASSERT_TRUE(writer.ok()) << writer.status();
  const std::size_t pieces[] = {
      0, 1, 7, 100'000, 1 << 20, 3, 1 << 21, (1 << 20) - 3, 1, 999'999};
  std::size_t done = 0;
  for (const std::size_t piece : pieces) {
    const std::size_t size = std::min(piece, data.size() - done);
    ASSERT_TRUE(writer->Append(Bytes(data).subspan(done, size)).ok());
    done += size;
  }
  ASSERT_TRUE(writer->Append(Bytes(data).subspan(done)).ok());
  ASSERT_TRUE(writer->Finish().ok());
  EXPECT_EQ(ReadFile(directory.Path("f")), FileBytes(*header, data));
  EXPECT_THAT(directory.List(), ElementsAre("f"));
}

TEST(SafetensorsWriterTest, FileAppearsOnlyWhenFinished) {
  const TemporaryDirectory directory;
  const std::string header = "{" + EntryJson("t", "U8", "[3]", 0, 3) + "}";
  {
    auto writer = SafetensorsWriter::Create(directory.Path("f"), header);
    ASSERT_TRUE(writer.ok()) << writer.status();
    ASSERT_TRUE(writer->Append(Bytes("ab")).ok());
    EXPECT_THAT(directory.List(), ElementsAre(HasSubstr(".kedge-tmp-")));
    const absl::Status early = writer->Finish();
    EXPECT_EQ(early.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(Message(early), HasSubstr("expected 3 bytes, found 2"));
    EXPECT_EQ(writer->Append(Bytes("cd")).code(),
              absl::StatusCode::kInvalidArgument);
    SafetensorsWriter moved = *std::move(writer);
    EXPECT_EQ(directory.List().size(), 1u);
  }
  EXPECT_THAT(directory.List(), IsEmpty());
}

TEST(SafetensorsWriterTest, NeverReplacesAFileUnasked) {
  const TemporaryDirectory directory;
  directory.Write("f", "mine");
  const auto refused = SafetensorsWriter::Create(directory.Path("f"), "{}");
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kAlreadyExists);

  auto late = SafetensorsWriter::Create(directory.Path("g"), "{}");
  ASSERT_TRUE(late.ok());
  directory.Write("g", "mine");
  EXPECT_EQ(late->Finish().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(ReadFile(directory.Path("g")), "mine");

  auto asked = SafetensorsWriter::Create(directory.Path("f"), "{}", {true});
  ASSERT_TRUE(asked.ok());
  ASSERT_TRUE(asked->Finish().ok());
  EXPECT_EQ(ReadFile(directory.Path("f")), FileBytes("{}", ""));
  EXPECT_EQ(asked->Finish().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(asked->Append({}).code(), absl::StatusCode::kFailedPrecondition);
}

TEST(SafetensorsWriterTest, RefusesUnsoundHeadersAndMissingDirectories) {
  const TemporaryDirectory directory;
  EXPECT_EQ(
      SafetensorsWriter::Create(directory.Path("f"),
                                "{" + EntryJson("t", "U8", "[3]", 1, 4) + "}")
          .status()
          .code(),
      absl::StatusCode::kDataLoss);
  EXPECT_EQ(
      SafetensorsWriter::Create(directory.Path("no/f"), "{}").status().code(),
      absl::StatusCode::kNotFound);
  EXPECT_THAT(directory.List(), IsEmpty());
}

TEST(SafetensorsWriterTest, FailedWriteNamesTheErrorAndLeavesNothing) {
  // The limit on file sizes, in a process of its own, plays the full disk.
  const TemporaryDirectory directory;
  const std::string header =
      "{" + EntryJson("t", "U8", "[3000000]", 0, 3'000'000) + "}";
  const auto child = [&] {
    ::signal(SIGXFSZ, SIG_IGN);
    struct rlimit limit;
    limit.rlim_cur = limit.rlim_max = 2'000'000;
    ::setrlimit(RLIMIT_FSIZE, &limit);
    auto writer = SafetensorsWriter::Create(directory.Path("f"), header);
    if (!writer.ok()) ::_exit(1);
    const std::string data(3'000'000, 'x');
    const absl::Status status = writer->Append(Bytes(data));
    if (status.ok() || !absl::StrContains(status.message(), "EFBIG")) {
      ::_exit(2);
    }
    ::_exit(directory.List().empty() && !writer->Finish().ok() ? 0 : 3);
  };
  EXPECT_EXIT(child(), ::testing::ExitedWithCode(0), "");
}

TEST(BuildSafetensorsHeaderTest, GivesASoundPaddedHeader) {
  const std::vector<SafetensorsEntry> entries = {
      {"a\"\\\n\xc3\xa4", DType::kF16, {2, 3}},
      {"empty", DType::kF64, {0, 5}},
      {"scalar", DType::kBool, {}},
      {"four", DType::kU8, {3, 2}, "F4", 3}};
  const std::vector<std::pair<std::string, std::string>> metadata = {
      {"format", "pt"}, {"x\x01", "\"y\""}};
  const auto header = BuildSafetensorsHeader(entries, metadata);
  ASSERT_TRUE(header.ok()) << header.status();
  EXPECT_EQ(header->size() % 8, 0u);
  const auto parsed = ParseSafetensorsHeader("h", *header, 16);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->metadata, metadata);
  ASSERT_EQ(parsed->tensors.size(), 4u);
  EXPECT_EQ(parsed->tensors[0].name, entries[0].name);
  EXPECT_EQ(parsed->tensors[3].file_dtype, "F4");
}

TEST(BuildSafetensorsHeaderTest, RefusesWhatTheParserRefuses) {
  const auto build = [](std::vector<SafetensorsEntry> entries) {
    return BuildSafetensorsHeader(entries, {}).status().code();
  };
  EXPECT_EQ(build({{"", DType::kU8, {1}}}), absl::StatusCode::kDataLoss);
  EXPECT_EQ(build({{"\xff", DType::kU8, {1}}}), absl::StatusCode::kDataLoss);
  EXPECT_EQ(build({{"a", DType::kU8, {1}}, {"a", DType::kU8, {1}}}),
            absl::StatusCode::kDataLoss);
  EXPECT_EQ(build({{"a", DType::kF64, {std::uint64_t{1} << 61}}}),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace kedge
