// Merging the fragments of one attempt into the manifest of a step.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kedge/format/anchor_layout.h"
#include "kedge/format/l61.h"
#include "kedge/format/manifest.h"
#include "kedge/format/manifest_rules.h"
#include "kedge/format/status.h"

namespace kedge {
namespace {

using rules::RangeText;
using rules::TensorText;

constexpr absl::string_view kAdvice =
    "publish the step again from all ranks, with one plan of who owns what";

absl::Status Disagree(absl::string_view where, absl::string_view what,
                      absl::string_view expected, absl::string_view found) {
  return absl::FailedPreconditionError(
      Describe({where, what, expected, found, kAdvice}));
}

std::string RankText(std::uint32_t rank) {
  return absl::StrCat("fragment of rank ", rank);
}

// One attempt, each of its ranks once.
absl::Status CheckAgreement(std::span<const RankFragment> fragments) {
  if (fragments.empty()) {
    return Disagree("fragments", "count", "one a rank", "none");
  }
  const RankFragment& first = fragments.front();
  const std::string as_first =
      absl::StrCat(" as in the ", RankText(first.rank));
  for (const RankFragment& fragment : fragments) {
    const auto differ = [&](absl::string_view what, absl::string_view expected,
                            absl::string_view found) {
      return Disagree(RankText(fragment.rank), what,
                      absl::StrCat(expected, as_first), found);
    };
    if (fragment.run != first.run) {
      return differ("run", ToHex(first.run), ToHex(fragment.run));
    }
    if (fragment.step != first.step) {
      return differ("step", absl::StrCat(first.step),
                    absl::StrCat(fragment.step));
    }
    if (fragment.epoch != first.epoch) {
      return differ("epoch", absl::StrCat(first.epoch),
                    absl::StrCat(fragment.epoch));
    }
    if (fragment.attempt != first.attempt) {
      return differ("attempt", absl::StrCat(first.attempt),
                    absl::StrCat(fragment.attempt));
    }
    if (fragment.world_size != first.world_size) {
      return differ("world size", absl::StrCat(first.world_size),
                    absl::StrCat(fragment.world_size));
    }
    if (fragment.table_hash != first.table_hash) {
      return differ("tensor table", ToHex(first.table_hash),
                    ToHex(fragment.table_hash));
    }
    if (fragment.base != first.base) {
      return differ("base", ToString(first.base), ToString(fragment.base));
    }
  }

  // Each rank of the world once.
  std::vector<std::uint32_t> ranks;
  for (const RankFragment& fragment : fragments) {
    ranks.push_back(fragment.rank);
  }
  std::sort(ranks.begin(), ranks.end());
  const std::string world = absl::StrCat("world size ", first.world_size);
  for (std::size_t i = 1; i < ranks.size(); ++i) {
    if (ranks[i] == ranks[i - 1]) {
      return Disagree(world, absl::StrCat("rank ", ranks[i]), "one fragment",
                      "two");
    }
  }
  if (ranks.back() >= first.world_size) {
    return Disagree(world, "ranks", absl::StrCat("below ", first.world_size),
                    absl::StrCat(ranks.back()));
  }
  for (std::uint32_t rank = 0; rank < first.world_size; ++rank) {
    if (rank >= ranks.size() || ranks[rank] != rank) {
      return Disagree(world, absl::StrCat("rank ", rank), "one fragment",
                      "none");
    }
  }
  return absl::OkStatus();
}

// A rank's fragment that breaks a rule by itself: that rank is at fault, and
// the step can be published again.
absl::Status CheckFragment(const RankFragment& fragment,
                           const TensorTable& table) {
  const std::string where = RankText(fragment.rank);
  absl::Status status = rules::CheckFragmentLayout(where, fragment);
  if (status.ok()) status = rules::CheckFragmentTable(where, fragment, table);
  if (!status.ok()) {
    return absl::FailedPreconditionError(
        absl::StrCat(status.message(), "; ", kAdvice));
  }
  if (const auto outside = rules::FirstRecordOutside(fragment)) {
    const DeltaRecord& record = fragment.records[*outside];
    return Disagree(
        TensorText(table, record.tensor), "record",
        absl::StrCat("within a range that rank ", fragment.rank, " owns"),
        RangeText(record.slice));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<StepManifest> MergeFragments(
    std::span<const RankFragment> fragments, const TensorTable& table,
    std::span<const std::uint64_t> l61_before) {
  if (l61_before.size() != table.size()) {
    return absl::InvalidArgumentError(
        Describe({"base", "S", absl::StrCat(table.size(), ", one a tensor"),
                  absl::StrCat(l61_before.size())}));
  }
  for (std::uint32_t i = 0; i < table.size(); ++i) {
    if (l61_before[i] >= kL61Prime) {
      return absl::InvalidArgumentError(
          Describe({TensorText(table, i), "S at the base",
                    "a residue below 2^61 - 1", Hex64(l61_before[i])}));
    }
  }
  KEDGE_RETURN_IF_ERROR(CheckAgreement(fragments));
  if (fragments.front().table_hash != table.hash()) {
    return Disagree("fragments", "tensor table", ToHex(table.hash()),
                    ToHex(fragments.front().table_hash));
  }
  // In the order of their ranks, whatever order they came in.
  std::vector<const RankFragment*> by_rank(fragments.size());
  for (const RankFragment& fragment : fragments) {
    by_rank[fragment.rank] = &fragment;
  }
  std::vector<std::vector<OwnedSlice>> owned(fragments.size());
  for (const RankFragment* fragment : by_rank) {
    KEDGE_RETURN_IF_ERROR(CheckFragment(*fragment, table));
    for (const RankFragment::Owned& range : fragment->owned) {
      owned[fragment->rank].push_back({range.tensor, range.slice});
    }
  }
  KEDGE_RETURN_IF_ERROR(CheckOwnership(owned, table));

  StepManifest manifest;
  const RankFragment& first = fragments.front();
  manifest.run = first.run;
  manifest.epoch = first.epoch;
  manifest.step = first.step;
  manifest.kind = StepKind::kDelta;
  manifest.table_hash = table.hash();
  manifest.base = first.base;
  for (const RankFragment* fragment : by_rank) {
    const auto first_file = static_cast<std::uint32_t>(manifest.files.size());
    manifest.files.insert(manifest.files.end(), fragment->files.begin(),
                          fragment->files.end());
    for (DeltaRecord record : fragment->records) {
      record.file += first_file;
      manifest.records.push_back(record);
    }
  }
  std::sort(manifest.records.begin(), manifest.records.end(),
            [](const DeltaRecord& a, const DeltaRecord& b) {
              return a.tensor != b.tensor ? a.tensor < b.tensor
                                          : a.slice.begin < b.slice.begin;
            });

  std::vector<std::uint64_t> l61_after(l61_before.begin(), l61_before.end());
  std::vector<bool> changed(table.size());
  for (const DeltaRecord& record : manifest.records) {
    l61_after[record.tensor] = L61Add(l61_after[record.tensor], record.l61);
    changed[record.tensor] = true;
  }
  for (std::uint32_t i = 0; i < table.size(); ++i) {
    const std::uint32_t tied_to = table[i].tied_to;
    if (tied_to != kNotTied) {
      if (l61_before[i] != l61_before[tied_to]) {
        return absl::InvalidArgumentError(Describe(
            {TensorText(table, i), "S at the base",
             absl::StrCat(Hex64(l61_before[tied_to]), " as for ",
                          TensorText(table, tied_to), ", to which it is tied"),
             Hex64(l61_before[i])}));
      }
      l61_after[i] = l61_after[tied_to];
    }
    if (changed[tied_to == kNotTied ? i : tied_to]) {
      manifest.states.push_back({i, l61_before[i], l61_after[i]});
    }
  }
  manifest.digest_before = table.StateDigest(l61_before);
  manifest.digest_after = table.StateDigest(l61_after);
  return manifest;
}

}  // namespace kedge
