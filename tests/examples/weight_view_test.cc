// Goal: a view either yields every element of a tensor once or says what is
// wrong. Method: boxes that leave, miss, overlap and scatter a small tensor.

#include "kedge/examples/model/weight_view.h"

#include <cstdint>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kedge/examples/model/bf16.h"

namespace kedge::example {
namespace {

using testing::HasSubstr;

const TensorSpec kSpec = {"t", {4, 6}};

class WeightViewTest : public testing::Test {
 protected:
  WeightViewTest() : memory_(100), out_(24) {
    for (std::size_t i = 0; i < memory_.size(); ++i) {
      memory_[i] = FloatToBf16(static_cast<float>(i));
    }
  }

  absl::Status Gather() { return view_.Gather(kSpec, out_); }

  std::string Refused(absl::StatusCode code) {
    const absl::Status status = Gather();
    EXPECT_EQ(status.code(), code) << status;
    return std::string(status.message());
  }

  std::vector<std::uint16_t> memory_;
  std::vector<float> out_;
  WeightView view_;
};

TEST_F(WeightViewTest, BoxesWithStridesLandWhereTheyBelong) {
  // Rows 0 and 1 from a padded buffer, rows 2 and 3 from a transposed one.
  view_.Add("t", {.data = &memory_[0],
                  .row_begin = 0,
                  .row_end = 2,
                  .col_begin = 0,
                  .col_end = 6,
                  .row_stride = 10});
  view_.Add("t", {.data = &memory_[40],
                  .row_begin = 2,
                  .row_end = 4,
                  .col_begin = 0,
                  .col_end = 6,
                  .row_stride = 1,
                  .col_stride = 2});
  ASSERT_TRUE(Gather().ok()) << Gather();
  EXPECT_EQ(out_, (std::vector<float>{0,  1,  2,  3,  4,  5,   //
                                      10, 11, 12, 13, 14, 15,  //
                                      40, 42, 44, 46, 48, 50,  //
                                      41, 43, 45, 47, 49, 51}));
}

TEST_F(WeightViewTest, MissingElementsAreCounted) {
  view_.Add("t",
            {.data = &memory_[0], .row_end = 4, .col_end = 5, .row_stride = 5});
  EXPECT_THAT(Refused(absl::StatusCode::kInvalidArgument),
              HasSubstr("cover 20 elements, expected 24"));
}

TEST_F(WeightViewTest, OverlapIsRefusedEvenWhenTheCountIsRight) {
  view_.Add("t",
            {.data = &memory_[0], .row_end = 3, .col_end = 6, .row_stride = 6});
  view_.Add("t", {.data = &memory_[0],
                  .row_begin = 2,
                  .row_end = 3,
                  .col_end = 6,
                  .row_stride = 6});
  EXPECT_THAT(Refused(absl::StatusCode::kInvalidArgument),
              HasSubstr("overlap"));
}

TEST_F(WeightViewTest, BoxOutsideTheTensorIsRefused) {
  view_.Add("t",
            {.data = &memory_[0], .row_end = 5, .col_end = 6, .row_stride = 6});
  EXPECT_THAT(Refused(absl::StatusCode::kInvalidArgument),
              HasSubstr("expected inside 4 x 6"));
}

TEST_F(WeightViewTest, EmptyBoxAndNullMemoryAreRefused) {
  view_.Add("t",
            {.data = &memory_[0], .row_begin = 2, .row_end = 2, .col_end = 6});
  EXPECT_THAT(Refused(absl::StatusCode::kInvalidArgument), HasSubstr("box 0"));
  view_ = WeightView();
  view_.AddWhole(kSpec, nullptr);
  EXPECT_THAT(Refused(absl::StatusCode::kInvalidArgument),
              HasSubstr("no memory"));
}

TEST_F(WeightViewTest, UnknownTensorAndWrongRoomAreRefused) {
  EXPECT_THAT(Refused(absl::StatusCode::kNotFound), HasSubstr("t: "));
  view_.AddWhole(kSpec, memory_.data());
  out_.resize(23);
  EXPECT_THAT(Refused(absl::StatusCode::kInvalidArgument),
              HasSubstr("expected room for 24"));
}

}  // namespace
}  // namespace kedge::example
