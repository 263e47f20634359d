// Goal: no bytes make the reader of rank fragments crash, read beyond them, or
// accept what a rank would not write; and no fragments that it accepts make the
// merge crash or give a manifest that breaks a rule. Input: up to four times a
// u16 length and that many bytes of a fragment of FuzzTable().

#include "kedge/tests/fuzz/fuzz_table.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data,
                                      std::size_t size) {
  using namespace kedge;        // NOLINT: the whole file is one function
  using namespace kedge::fuzz;  // NOLINT
  Input input(data, size);
  std::vector<RankFragment> fragments;
  for (int i = 0; i < 4 && input.size() > 0; ++i) {
    const auto taken = input.TakeBytes(input.Take<std::uint16_t>());
    const std::vector<std::byte> bytes(taken.begin(), taken.end());
    auto fragment = ParseRankFragment("fragment", bytes);
    if (!fragment.ok()) {
      RequireRefusal(fragment.status());
      continue;
    }
    Sink sink;
    const RankFragment& f = *fragment;
    sink.AddBytes(f.run.bytes);
    sink.AddBytes(f.table_hash.bytes);
    sink.AddBytes(f.base.manifest_hash.bytes);
    sink.Add(f.epoch + f.step + f.attempt + f.rank + f.world_size +
             f.base.step);
    for (const DataFile& file : f.files) Touch(file, sink);
    for (const DeltaRecord& record : f.records) {
      KEDGE_CHECK(record.file < f.files.size());
      Touch(record, sink);
    }
    for (const auto& owned : f.owned) {
      sink.Add(owned.tensor + owned.slice.begin + owned.slice.end);
    }
    const auto written = SerializeRankFragment(f, FuzzTable());
    if (written.ok()) {
      const auto again = ParseRankFragment("fragment", *written);
      Require(again.status(), "parse what was serialized");
      const auto twice = SerializeRankFragment(*again, FuzzTable());
      Require(twice.status(), "serialize again");
      KEDGE_CHECK(*twice == *written);
    } else {
      KEDGE_CHECK(absl::IsInvalidArgument(written.status()));
    }
    fragments.push_back(*std::move(fragment));
  }

  const std::vector<std::uint64_t> l61_before(FuzzTable().size());
  const auto merged = MergeFragments(fragments, FuzzTable(), l61_before);
  if (!merged.ok()) {
    // They disagree, or one of them does not fit the table.
    KEDGE_CHECK(absl::IsFailedPrecondition(merged.status()) ||
                absl::IsDataLoss(merged.status()));
    return 0;
  }
  const auto manifest = SerializeStepManifest(*merged, FuzzTable());
  Require(manifest.status(), "serialize what was merged");
  const auto parsed = ParseStepManifest("MANIFEST", *manifest);
  Require(parsed.status(), "parse what was merged");
  Require(CheckStepManifest("MANIFEST", *parsed, FuzzTable()),
          "check what was merged");
  return 0;
}
