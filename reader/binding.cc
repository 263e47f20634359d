#include "kedge/reader/binding.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kedge/format/l61.h"
#include "kedge/format/status.h"
#include "kedge/reader/offenders.h"
#include "kedge/reader/parallel.h"

namespace kedge {
namespace {

// One verification job sums about this many units.
constexpr std::uint64_t kJobUnits = std::uint64_t{1} << 21;

}  // namespace

bool Touches(const TileGrid& grid, const UnitRange& range,
             const BoxTarget& box) {
  if (range.begin >= range.end) return false;
  const std::uint64_t first_row = range.begin / grid.cols;
  const std::uint64_t last_row = (range.end - 1) / grid.cols;
  const std::uint64_t top = std::max(first_row, box.row_begin);
  const std::uint64_t bottom = std::min(last_row + 1, box.row_end);
  if (top >= bottom) return false;
  // Rows strictly between the first and the last are whole.
  if (top + (top == first_row ? 1 : 0) <
      bottom - (bottom == last_row + 1 ? 1 : 0)) {
    return true;
  }
  const auto row_touches = [&](std::uint64_t row) {
    const std::uint64_t left =
        row == first_row ? range.begin - row * grid.cols : 0;
    const std::uint64_t right =
        row == last_row ? range.end - row * grid.cols : grid.cols;
    return left < box.col_end && box.col_begin < right;
  };
  return row_touches(top) || row_touches(bottom - 1);
}

Binding::Binding(BoundWeights weights,
                 const std::vector<const WeightSet*>* sets, bool grouped)
    : weights_(std::move(weights)), sets_(sets), grouped_(grouped) {
  const TensorTable& tensors = *weights_.table;
  grids_.reserve(tensors.size());
  tie_counts_.assign(tensors.size(), 1);
  for (const TensorSpec& spec : tensors.tensors()) {
    grids_.push_back(spec.grid());
    if (spec.tied_to != kNotTied) ++tie_counts_[spec.tied_to];
  }
  for (std::uint32_t t = 0; t < tensors.size(); ++t) {
    const BoundTensor& tensor = weights_.tensors[t];
    if (!tensor.fully_covered) continue;
    if (tensors[t].tied_to == kNotTied) verifiable_tensors_ += tie_counts_[t];
    for (std::uint32_t c = 0; c < tensor.covers.size(); ++c) {
      const auto residue = static_cast<std::uint32_t>(residues_.size());
      residues_.push_back({t, c});
      for (const BoxTarget& box : tensor.covers[c].boxes) {
        summed_elements_ +=
            box.unit_count() * box.unit_bytes / ElementBytes(tensors[t].dtype);
        const std::uint64_t rows = box.row_end - box.row_begin;
        const std::uint64_t cols = box.col_end - box.col_begin;
        const std::uint64_t job_cols = std::min(cols, kJobUnits);
        const std::uint64_t job_rows =
            std::clamp<std::uint64_t>(kJobUnits / job_cols, 1, rows);
        for (std::uint64_t r = 0; r < rows; r += job_rows) {
          for (std::uint64_t k = 0; k < cols; k += job_cols) {
            BoxTarget part = box;
            part.row_begin = box.row_begin + r;
            part.row_end = std::min(part.row_begin + job_rows, box.row_end);
            part.col_begin = box.col_begin + k;
            part.col_end = std::min(part.col_begin + job_cols, box.col_end);
            part.data = box.At(part.row_begin, part.col_begin);
            jobs_.push_back({t, residue, part});
          }
        }
      }
    }
  }
}

std::vector<BoxTarget> Binding::BoxesFor(std::uint32_t ordinal,
                                         const UnitRange& range) const {
  std::vector<BoxTarget> boxes;
  for (const BoxTarget& box : weights_.tensors[ordinal].boxes) {
    if (Touches(grids_[ordinal], range, box)) boxes.push_back(box);
  }
  return boxes;
}

std::vector<std::string> Binding::UnverifiedNames() const {
  std::vector<std::string> names;
  for (std::uint32_t t = 0; t < weights_.tensors.size(); ++t) {
    if (!weights_.tensors[t].fully_covered) names.push_back(table()[t].name);
  }
  return names;
}

void Binding::Sum(IoPool* pool, const L61Summer& summer, Sums* sums) const {
  std::vector<std::uint64_t>& parts = sums->parts;
  parts.assign(jobs_.size(), 0);
  const absl::Status summed =
      ParallelFor(pool, jobs_.size(), [&](std::size_t i) {
        parts[i] = summer.SumBox(grids_[jobs_[i].tensor], jobs_[i].box);
        return absl::OkStatus();
      });
  KEDGE_CHECK(summed.ok());  // summing cannot fail
  sums->residues.assign(residues_.size(), 0);
  sums->bytes = 0;
  for (std::size_t i = 0; i < jobs_.size(); ++i) {
    std::uint64_t& residue = sums->residues[jobs_[i].residue];
    residue = L61Add(residue, parts[i]);
    sums->bytes += jobs_[i].box.unit_count() * jobs_[i].box.unit_bytes;
  }
}

std::vector<Binding::Mismatch> Binding::Judge(
    std::span<const std::uint64_t> residues,
    std::span<const std::uint64_t> l61) const {
  KEDGE_CHECK(residues.size() == residues_.size());
  std::vector<Mismatch> mismatches;
  for (std::uint32_t i = 0; i < residues_.size(); ++i) {
    const Residue& at = residues_[i];
    if (residues[i] != l61[at.tensor]) {
      mismatches.push_back({at.tensor, at.cover, i, residues[i]});
    }
  }
  return mismatches;
}

std::string Binding::Describe(const std::vector<Mismatch>& mismatches,
                              std::span<const std::uint64_t> l61) const {
  Offenders offenders;
  for (const Mismatch& mismatch : mismatches) {
    const BoundTensor& tensor = weights_.tensors[mismatch.tensor];
    const BoundTensor::Cover& cover = tensor.covers[mismatch.cover];
    // A replica's own name and set say more than the owner's.
    std::string name = table()[mismatch.tensor].name;
    std::string where;
    if (!cover.origin.empty()) {
      name = table()[tensor.name_of_box[cover.origin.front()]].name;
    }
    if (grouped_) {
      absl::StrAppend(&where,
                      cover.ranks.size() == 1 ? " in rank " : " in ranks ",
                      absl::StrJoin(cover.ranks, ", "));
    } else {
      std::vector<std::uint32_t> named;
      for (const std::uint32_t box : cover.origin) {
        const std::uint32_t set = tensor.set_of_box[box];
        if (std::find(named.begin(), named.end(), set) != named.end()) continue;
        named.push_back(set);
        absl::StrAppend(&where, where.empty() ? " in " : ", ",
                        (*sets_)[set]->name());
      }
    }
    offenders.Add(absl::StrCat("tensor ", name, where, ": L61: expected ",
                               Hex64(l61[mismatch.tensor]), ", found ",
                               Hex64(mismatch.found)));
  }
  return absl::StrCat(offenders.count(),
                      offenders.count() == 1 ? " tensor does" : " tensors do",
                      " not verify: ", offenders.Text());
}

}  // namespace kedge
