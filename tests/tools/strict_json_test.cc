// Goal: what StrictJsonVisitor sees is what the bytes say, and bytes that two
// parsers could read differently are refused. Method: a visitor that writes the
// events down; texts by hand.

#include "kedge/tools/strict_json.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "absl/strings/str_cat.h"

namespace kedge {
namespace {

using ::testing::HasSubstr;

class Recorder final : public StrictJsonVisitor {
 public:
  std::string events;

  absl::Status OnObjectBegin() override { return Add("{"); }
  absl::Status OnObjectEnd() override { return Add("}"); }
  absl::Status OnArrayBegin() override { return Add("["); }
  absl::Status OnArrayEnd() override { return Add("]"); }
  absl::Status OnKey(std::string key) override {
    return Add(absl::StrCat("k:", key));
  }
  absl::Status OnString(std::string value) override {
    return Add(absl::StrCat("s:", value));
  }
  absl::Status OnUnsigned(std::uint64_t value) override {
    return Add(absl::StrCat("u:", value));
  }
  absl::Status OnOther(absl::string_view text) override {
    return Add(absl::StrCat("o:", text));
  }

 private:
  absl::Status Add(absl::string_view event) {
    absl::StrAppend(&events, event, " ");
    return absl::OkStatus();
  }
};

absl::Status Parse(absl::string_view text, int max_depth = 4) {
  Recorder recorder;
  return ParseStrictJson("f.json", 100, text, max_depth, recorder);
}

TEST(StrictJsonTest, ReportsEventsInDocumentOrder) {
  Recorder recorder;
  ASSERT_TRUE(
      ParseStrictJson("f.json", 0,
                      R"( {"a":[1,18446744073709551615,-1,1.5,1e3,null,true],)"
                      R"("b\u00e4":{"c":"d\n"}} )",
                      3, recorder)
          .ok());
  EXPECT_EQ(recorder.events,
            "{ k:a [ u:1 u:18446744073709551615 o:the signed number -1 "
            "o:the number 1.5 o:the number 1e3 o:null o:true ] k:b\xc3\xa4 { "
            "k:c s:d\n } } ");
}

TEST(StrictJsonTest, NumberBeyond64BitsIsNotUnsigned) {
  Recorder recorder;
  ASSERT_TRUE(
      ParseStrictJson("f.json", 0, "18446744073709551616", 3, recorder).ok());
  EXPECT_EQ(recorder.events, "o:the number 18446744073709551616 ");
}

TEST(StrictJsonTest, RejectsEqualKeysAtEveryLevel) {
  for (const char* text : {R"({"a":1,"b":2,"a":1})", R"({"x":{"a":1,"a":2}})",
                           R"([[{"a":1,"a":2}]])", R"({"a":1,"\u0061":2})"}) {
    const absl::Status status = Parse(text);
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << text;
    EXPECT_THAT(std::string(status.message()), HasSubstr("key \"a\"")) << text;
  }
  EXPECT_TRUE(Parse(R"([{"a":1},{"a":2},{"b":{"a":1}}])").ok());
}

TEST(StrictJsonTest, RejectsNestingBeyondTheLimit) {
  EXPECT_TRUE(Parse("[[[[]]]]", 4).ok());
  const absl::Status status = Parse("[[[[[]]]]]", 4);
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()), HasSubstr("at most 4 levels"));
  EXPECT_FALSE(Parse(std::string(5'000'000, '['), 4).ok());
  EXPECT_FALSE(Parse(std::string(5'000'000, '['), 10'000'000).ok());
}

TEST(StrictJsonTest, RejectsWhatJsonDoesNotAllow) {
  const std::string nul_end("{}\0{}", 5);
  for (const std::string& text :
       std::initializer_list<std::string>{"",
                                          " ",
                                          "{",
                                          "}",
                                          "{}{}",
                                          "{\"a\":1,}",
                                          "[1,]",
                                          "{a:1}",
                                          "{'a':1}",
                                          "// c\n{}",
                                          "{}/**/",
                                          "NaN",
                                          "[Infinity]",
                                          "[01]",
                                          "[+1]",
                                          "[.5]",
                                          "\"\\x41\"",
                                          "\"\t\"",
                                          "\"\\ud800\"",
                                          "\"\\udc00\\ud800\"",
                                          "\"\xff\"",
                                          "\"\xc0\xaf\"",
                                          "\"\xed\xa0\x80\"",
                                          "\"\xf4\x90\x80\x80\"",
                                          "\xef\xbb\xbf{}",
                                          nul_end,
                                          "[1e999]"}) {
    const absl::Status status = Parse(text);
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << text;
    EXPECT_THAT(std::string(status.message()), HasSubstr("f.json: offset 1"))
        << text;
  }
}

TEST(StrictJsonTest, MessagesHoldNoBytesOfTheFileUnescaped) {
  const absl::Status status = Parse("{\"\x1b[2J\xff");
  for (const char c : status.message()) {
    EXPECT_TRUE(c >= 0x20 && c < 0x7f) << status;
  }
}

TEST(StrictJsonTest, LongTextIsCutInMessages) {
  EXPECT_LT(QuoteForMessage(std::string(1'000'000, 'x')).size(), 150u);
  EXPECT_EQ(QuoteForMessage("a\"\n\xe2\x80\xae"),
            "\"a\\\"\\n\\xe2\\x80\\xae\"");
}

TEST(StrictJsonTest, Utf8IsJudgedByTheBook) {
  for (const char* good : {"", "a", "\xc2\x80", "\xdf\xbf", "\xe0\xa0\x80",
                           "\xed\x9f\xbf", "\xee\x80\x80", "\xef\xbf\xbf",
                           "\xf0\x90\x80\x80", "\xf4\x8f\xbf\xbf"}) {
    EXPECT_TRUE(IsUtf8(good)) << QuoteForMessage(good);
  }
  for (const char* bad :
       {"\x80", "\xbf", "\xc0\x80", "\xc1\xbf", "\xc2", "\xc2z", "\xe0\x9f\xbf",
        "\xe1\x80", "\xed\xa0\x80", "\xed\xbf\xbf", "\xf0\x8f\xbf\xbf",
        "\xf1\x80\x80", "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "\xff",
        "a\xfe"}) {
    EXPECT_FALSE(IsUtf8(bad)) << QuoteForMessage(bad);
  }
}

}  // namespace
}  // namespace kedge
