// Goal: a publish needs at most 256 MiB beside the mapped checkpoint, also when
// every element changed and the version before is itself an anchor plus such a
// delta. Method: a checkpoint larger than that, and a look at the program's own
// memory every millisecond.

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "kedge/tests/tools/checkpoint_files.h"
#include "kedge/tests/tools/program_runner.h"

namespace kedge::testing {
namespace {

constexpr std::uint64_t kLimitBytes = std::uint64_t{256} << 20;
constexpr std::uint64_t kTensorBytes = 100'000'000;

// bf16, f32 and f64 tensors of kTensorBytes each; `round` changes every unit.
void WriteCheckpoint(const std::string& path, std::uint64_t round) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  const std::string header =
      "{" + EntryJson("a", "BF16", "[50000000]", 0, kTensorBytes) + "," +
      EntryJson("b", "F32", "[25000,1000]", kTensorBytes, 2 * kTensorBytes) +
      "," +
      EntryJson("c", "F64", "[12500000]", 2 * kTensorBytes, 3 * kTensorBytes) +
      "}";
  file << LengthPrefix(header.size()) << header;
  std::vector<std::uint64_t> block(12'500);
  std::uint64_t state = 1;
  for (std::uint64_t at = 0; at < 3 * kTensorBytes; at += 8 * block.size()) {
    for (std::uint64_t& word : block) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      // A multiplier that is odd and high in every 16-bit field.
      word = (state ^ (state >> 29)) + round * 0x9e3779b97f4a7c15u;
    }
    file.write(reinterpret_cast<const char*>(block.data()),
               static_cast<std::streamsize>(8 * block.size()));
  }
  ASSERT_TRUE(file.good()) << path;
}

TEST(KedgeProgramMemoryTest, PublishStaysBelow256MiBBesideTheMappedFile) {
  const TemporaryDirectory temporary;
  const std::string store = temporary.Path("store");
  const std::string checkpoint = temporary.Path("c.safetensors");
  WriteCheckpoint(checkpoint, 0);
  ASSERT_EQ(RunKedge({"init", store, checkpoint}).exit_status, 0);
  for (const std::string step : {"1", "2"}) {
    WriteCheckpoint(checkpoint, std::stoull(step));
    std::vector<std::string> arguments{"publish", store, checkpoint, "--step",
                                       step};
    if (step == "2") arguments.push_back("--anchor");
    const ProgramResult result = RunKedge(arguments);
    ASSERT_EQ(result.exit_status, 0) << result.err;
    std::printf(
        "v%s: %llu MiB\n%s", step.c_str(),
        static_cast<unsigned long long>(result.peak_private_bytes >> 20),
        result.out.c_str());
    EXPECT_LT(result.peak_private_bytes, kLimitBytes) << "v" << step;
    // The canary: the sampling saw the program at work.
    EXPECT_GT(result.peak_private_bytes, kLimitBytes / 16);
  }
}

}  // namespace
}  // namespace kedge::testing
