#include "kedge/format/anchor_layout.h"

#include <algorithm>
#include <functional>
#include <queue>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kedge/format/limits.h"
#include "kedge/format/manifest_rules.h"
#include "kedge/format/status.h"

namespace kedge {
namespace {

std::uint64_t RoundUp(std::uint64_t value, std::uint64_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

absl::Status Invalid(absl::string_view where, absl::string_view what,
                     absl::string_view expected, absl::string_view found) {
  return absl::InvalidArgumentError(Describe({where, what, expected, found}));
}

// What the rank holds, ascending and checked, without empty ranges.
absl::StatusOr<std::vector<OwnedSlice>> Owned(
    const TensorTable& table, const std::vector<OwnedSlice>& owned) {
  std::vector<OwnedSlice> result;
  for (const OwnedSlice& slice : owned) {
    if (slice.tensor >= table.size()) {
      return Invalid("owned slices", "tensor",
                     absl::StrCat("below ", table.size()),
                     absl::StrCat(slice.tensor));
    }
    const std::string where = rules::TensorText(table, slice.tensor);
    const TensorSpec& tensor = table[slice.tensor];
    if (tensor.tied_to != kNotTied) {
      return Invalid(
          where, "owned slice", "a tensor with its own storage",
          absl::StrCat("a tie to ", rules::TensorText(table, tensor.tied_to)));
    }
    const std::uint32_t step = UnitsPerElement(tensor.dtype);
    if (slice.slice.begin > slice.slice.end ||
        slice.slice.end > tensor.unit_count() ||
        slice.slice.begin % step != 0 || slice.slice.end % step != 0) {
      return Invalid(where, "owned slice",
                     absl::StrCat("whole elements within its ",
                                  tensor.unit_count(), " units"),
                     rules::RangeText(slice.slice));
    }
    if (slice.slice.begin < slice.slice.end) result.push_back(slice);
  }
  std::sort(result.begin(), result.end(),
            [](const OwnedSlice& a, const OwnedSlice& b) {
              return a.tensor != b.tensor ? a.tensor < b.tensor
                                          : a.slice.begin < b.slice.begin;
            });
  for (std::size_t i = 1; i < result.size(); ++i) {
    if (result[i].tensor == result[i - 1].tensor &&
        result[i].slice.begin < result[i - 1].slice.end) {
      return Invalid(rules::TensorText(table, result[i].tensor), "owned slices",
                     "no overlap",
                     absl::StrCat(rules::RangeText(result[i - 1].slice),
                                  " and ", rules::RangeText(result[i].slice)));
    }
  }
  return result;
}

}  // namespace

absl::Status CheckOwnership(std::span<const std::vector<OwnedSlice>> by_rank,
                            const TensorTable& table) {
  struct Claim {
    std::uint32_t tensor;
    std::uint32_t rank;
    UnitRange slice;
  };
  const auto refuse = [&](std::uint32_t tensor, absl::string_view expected,
                          absl::string_view found) {
    return absl::FailedPreconditionError(Describe(
        {rules::TensorText(table, tensor), "owned ranges", expected, found,
         "give all ranks one plan of who owns what, then publish again"}));
  };
  const auto claim_text = [](const Claim& claim) {
    return absl::StrCat("rank ", claim.rank, " with ",
                        rules::RangeText(claim.slice));
  };
  std::vector<Claim> claims;
  for (std::uint32_t rank = 0; rank < by_rank.size(); ++rank) {
    for (const OwnedSlice& owned : by_rank[rank]) {
      const Claim claim{owned.tensor, rank, owned.slice};
      if (owned.tensor >= table.size()) {
        return absl::FailedPreconditionError(
            Describe({absl::StrCat("rank ", rank), "owned tensor",
                      absl::StrCat("below ", table.size()),
                      absl::StrCat(owned.tensor)}));
      }
      if (table[owned.tensor].tied_to != kNotTied) {
        return refuse(owned.tensor, "none, the tensor is tied",
                      claim_text(claim));
      }
      if (owned.slice.begin >= owned.slice.end ||
          owned.slice.end > table[owned.tensor].unit_count()) {
        return refuse(owned.tensor,
                      absl::StrCat("ranges within its ",
                                   table[owned.tensor].unit_count(), " units"),
                      claim_text(claim));
      }
      claims.push_back(claim);
    }
  }
  std::sort(claims.begin(), claims.end(), [](const Claim& a, const Claim& b) {
    if (a.tensor != b.tensor) return a.tensor < b.tensor;
    if (a.slice.begin != b.slice.begin) return a.slice.begin < b.slice.begin;
    return a.rank < b.rank;
  });
  std::size_t next = 0;
  for (std::uint32_t i = 0; i < table.size(); ++i) {
    if (table[i].tied_to != kNotTied) continue;
    const std::uint64_t units = table[i].unit_count();
    std::uint64_t covered = 0;
    const Claim* before = nullptr;
    while (true) {
      const Claim* claim = next < claims.size() && claims[next].tensor == i
                               ? &claims[next]
                               : nullptr;
      const std::uint64_t begin = claim != nullptr ? claim->slice.begin : units;
      if (claim != nullptr && begin < covered) {
        return refuse(
            i, "no unit owned twice",
            absl::StrCat(claim_text(*before), " and ", claim_text(*claim)));
      }
      if (begin > covered) {
        std::string neighbours;
        if (before != nullptr) {
          absl::StrAppend(&neighbours, ", after ", claim_text(*before));
        }
        if (claim != nullptr) {
          absl::StrAppend(&neighbours, ", before ", claim_text(*claim));
        }
        return refuse(
            i, absl::StrCat("all of its ", units, " units owned"),
            absl::StrCat("no owner of ", rules::RangeText({covered, begin}),
                         " among ", by_rank.size(), " ranks", neighbours));
      }
      if (claim == nullptr) break;
      covered = claim->slice.end;
      before = claim;
      ++next;
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<AnchorLayout> PlanAnchor(const TensorTable& table,
                                        const AnchorLayoutOptions& options,
                                        const std::vector<OwnedSlice>& owned) {
  if (options.rank >= kMaxRanks) {
    return Invalid("anchor layout", "rank", absl::StrCat("below ", kMaxRanks),
                   absl::StrCat(options.rank));
  }
  if (options.anchor_file_bytes == 0 ||
      options.anchor_file_bytes > kMaxFileBytes / 2) {
    return Invalid("anchor layout", "anchor_file_bytes",
                   absl::StrCat("1 to ", kMaxFileBytes / 2),
                   absl::StrCat(options.anchor_file_bytes));
  }
  constexpr std::uint64_t kWidestElement = 8;
  if (options.slice_bytes < kWidestElement ||
      options.slice_bytes > kMaxFileBytes / 4) {
    return Invalid("anchor layout", "slice_bytes",
                   absl::StrCat(kWidestElement, " to ", kMaxFileBytes / 4),
                   absl::StrCat(options.slice_bytes));
  }
  KEDGE_ASSIGN_OR_RETURN(const std::vector<OwnedSlice> ranges,
                         Owned(table, owned));

  AnchorLayout layout;
  std::uint64_t total = 0;  // padding included
  for (const OwnedSlice& range : ranges) {
    const TensorSpec& tensor = table[range.tensor];
    const std::uint64_t most = options.slice_bytes /
                               ElementBytes(tensor.dtype) *
                               UnitsPerElement(tensor.dtype);
    if ((range.slice.count() - 1) / most + 1 >
        kMaxSlicesPerAnchor - layout.slices.size()) {
      return Invalid(
          "anchor layout", "slices",
          absl::StrCat("at most ", kMaxSlicesPerAnchor),
          absl::StrCat("more with slice_bytes of ", options.slice_bytes));
    }
    for (std::uint64_t begin = range.slice.begin; begin < range.slice.end;) {
      const std::uint64_t end = begin + std::min(most, range.slice.end - begin);
      layout.slices.push_back({range.tensor, {begin, end}});
      total +=
          RoundUp((end - begin) * UnitBytes(tensor.dtype), kSliceAlignment);
      begin = end;
    }
  }

  const std::uint64_t file_count = std::min<std::uint64_t>(
      layout.slices.size(),
      (total + options.anchor_file_bytes - 1) / options.anchor_file_bytes);
  if (file_count > kMaxFilesPerRank) {
    return Invalid(
        "anchor layout", "files", absl::StrCat("at most ", kMaxFilesPerRank),
        absl::StrCat(file_count, " with anchor_file_bytes of ",
                     options.anchor_file_bytes, "; choose larger files"));
  }
  layout.files.resize(file_count);
  // (bytes so far, file): the emptiest file comes first.
  using Fill = std::pair<std::uint64_t, std::uint32_t>;
  std::priority_queue<Fill, std::vector<Fill>, std::greater<>> emptiest;
  for (std::uint32_t i = 0; i < file_count; ++i) {
    layout.files[i].id = {FileKind::kAnchor, options.rank, i};
    layout.files[i].bytes = kSliceAlignment;
    emptiest.push({kSliceAlignment, i});
  }
  layout.first_piece.reserve(layout.slices.size());
  for (AnchorSlice& slice : layout.slices) {
    const Fill fill = emptiest.top();
    emptiest.pop();
    AnchorLayout::PlannedFile& file = layout.files[fill.second];
    const std::uint64_t bytes =
        slice.slice.count() * UnitBytes(table[slice.tensor].dtype);
    slice.file = fill.second;
    slice.offset = fill.first;
    layout.first_piece.push_back(file.piece_count);
    file.bytes = slice.offset + bytes;
    file.slice_count += 1;
    file.piece_count += static_cast<std::uint32_t>(PieceCount(bytes));
    emptiest.push({RoundUp(file.bytes, kSliceAlignment), fill.second});
  }
  return layout;
}

absl::StatusOr<AnchorLayout> PlanAnchor(const TensorTable& table,
                                        const AnchorLayoutOptions& options) {
  std::vector<OwnedSlice> everything;
  for (std::uint32_t i = 0; i < table.size(); ++i) {
    if (table[i].tied_to != kNotTied || table[i].unit_count() == 0) continue;
    everything.push_back({i, {0, table[i].unit_count()}});
  }
  return PlanAnchor(table, options, everything);
}

}  // namespace kedge
