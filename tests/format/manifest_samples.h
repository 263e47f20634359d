#ifndef KEDGE_TESTS_FORMAT_MANIFEST_SAMPLES_H_
#define KEDGE_TESTS_FORMAT_MANIFEST_SAMPLES_H_

// Valid tables, manifests and fragments, small fixed ones and random ones, and
// how the tests of their files break and compare them.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "flatbuffers/flatbuffers.h"
#include "kedge/format/anchor_layout.h"
#include "kedge/format/manifest.h"
#include "kedge/format/tensor_table.h"

namespace kedge::samples {

using Rng = std::mt19937_64;

std::uint64_t Below(Rng& rng, std::uint64_t bound);  // in [0, bound)
Bytes16 RandomBytes16(Rng& rng);

// Ordinals: 0 "a" bf16 [300, 256], 1 "b" f32 [10], 2 "c" bf16 tied to "a",
// 3 "d" i64 [7], 4 "e" u8 [0, 3], 5 "f" f8_e4m3 [5, 5].
TensorTable SmallTable();
TensorTable RandomTable(Rng& rng, std::size_t tensor_count);

// S of every tensor: random, equal for ties, 0 for empty ones.
std::vector<std::uint64_t> RandomL61(Rng& rng, const TensorTable& table);

// Step 18 on SmallTable: two ranks, three files, five records, one of them of
// tensor "a", which has a tie, another one of "d" in whole elements.
StepManifest SmallStep(const TensorTable& table);
StepManifest SmallRoot(const TensorTable& table);
AnchorManifest SmallAnchor(const TensorTable& table);
// Rank 1 of two.
RankFragment SmallFragment(const TensorTable& table);

// One fragment a rank: tensors cut at random places, records for some of the
// slices, in files in random order.
std::vector<RankFragment> RandomFragments(Rng& rng, const TensorTable& table,
                                          std::uint32_t world_size,
                                          std::uint64_t changed_percent = 50);

// An anchor along a layout, with random hashes.
AnchorManifest MakeAnchor(Rng& rng, const TensorTable& table,
                          const AnchorLayoutOptions& options);

// Lays records into their files one after another in the order given, and sets
// the files' sizes, piece hashes and hashes.
void Fill(Rng& rng, std::vector<DataFile>& files,
          const std::vector<DeltaRecord*>& order);

// Field by field.
void ExpectSame(const StepManifest& a, const StepManifest& b);
void ExpectSame(const AnchorManifest& a, const AnchorManifest& b);
void ExpectSame(const RankFragment& a, const RankFragment& b);

// `bytes` with `mutate` applied to its fields by FlatBuffers' object API, which
// knows none of the rules. Root is kedge::fbs::StepManifest or the like.
template <class Root>
std::vector<std::byte> Mutated(
    std::span<const std::byte> bytes, const char* identifier,
    const std::function<void(typename Root::NativeTableType&)>& mutate) {
  typename Root::NativeTableType fields;
  flatbuffers::GetRoot<Root>(bytes.data())->UnPackTo(&fields);
  mutate(fields);
  flatbuffers::FlatBufferBuilder builder;
  builder.Finish(Root::Pack(builder, &fields), identifier);
  const auto* data =
      reinterpret_cast<const std::byte*>(builder.GetBufferPointer());
  return {data, data + builder.GetSize()};
}

// Every prefix of `bytes` and every bit of it flipped, and `rounds` random
// changes of several bytes. `judge` gets each and the words to print with a
// failure.
void ForEachDamage(std::span<const std::byte> bytes, int rounds,
                   const std::function<void(std::span<const std::byte>,
                                            const std::string&)>& judge);

// Status has this code and says this.
testing::AssertionResult Says(const absl::Status& status, absl::StatusCode code,
                              const std::string& text);

}  // namespace kedge::samples

#endif  // KEDGE_TESTS_FORMAT_MANIFEST_SAMPLES_H_
