#include "kedge/reader/weight_set.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <map>
#include <queue>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kedge/format/status.h"
#include "kedge/format/tile_grid.h"
#include "kedge/reader/offenders.h"

namespace kedge {
namespace {

// A view that folds into more boxes than this is refused: applying a record
// looks at every box of its tensor.
constexpr std::uint64_t kMaxBoxesPerTarget = std::uint64_t{1} << 16;
// Replicas that are cut differently and cover a tensor only in part are
// compared pairwise; more boxes than this are refused.
constexpr std::size_t kMaxPairwiseBoxes = 4096;

std::string ShapeText(const std::vector<std::uint64_t>& shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

bool IsEmptyBox(const TensorTarget& target) {
  const std::vector<std::uint64_t>& extent =
      target.extent.empty() ? target.shape : target.extent;
  return std::find(extent.begin(), extent.end(), 0u) != extent.end();
}

// Whether no two elements of a box share an address. Sufficient, not necessary:
// each stride must step over all that the smaller strides span.
bool ElementsAreApart(const std::vector<std::uint64_t>& extent,
                      const std::vector<std::int64_t>& strides,
                      std::uint32_t element_bytes) {
  std::vector<std::pair<unsigned __int128, std::uint64_t>> axes;
  for (std::size_t d = 0; d < extent.size(); ++d) {
    if (extent[d] <= 1) continue;
    const __int128 stride = strides[d];
    axes.emplace_back(
        static_cast<unsigned __int128>(stride < 0 ? -stride : stride),
        extent[d]);
  }
  std::sort(axes.begin(), axes.end());
  constexpr auto kAddressSpace =
      static_cast<unsigned __int128>(std::numeric_limits<std::int64_t>::max());
  unsigned __int128 span = element_bytes;
  for (const auto& [stride, count] : axes) {
    if (stride < span) return false;
    span += stride * (count - 1);
    if (span > kAddressSpace) return false;
  }
  return true;
}

std::vector<std::int64_t> RowMajorStrides(
    const std::vector<std::uint64_t>& extent, std::uint32_t element_bytes) {
  std::vector<std::int64_t> strides(extent.size());
  std::uint64_t bytes = element_bytes;
  for (std::size_t d = extent.size(); d-- > 0;) {
    strides[d] = static_cast<std::int64_t>(bytes);
    bytes *= extent[d];
  }
  return strides;
}

// One dimension of a box within the rows or the columns of the matrix.
struct Axis {
  std::uint64_t extent = 1;
  std::uint64_t multiplier = 1;  // index steps between neighbours
  std::int64_t stride = 0;       // bytes between neighbours
};

// The dimensions that fold into rows (or into columns): an inner run of
// consecutive indices with one stride, and what is left outside of it.
struct FoldedAxis {
  Axis run;
  std::vector<Axis> outer;
};

FoldedAxis Fold(const std::vector<Axis>& axes) {
  FoldedAxis folded;
  bool merging = true;
  for (auto axis = axes.rbegin(); axis != axes.rend(); ++axis) {
    if (axis->extent == 1) continue;
    Axis& run = folded.run;
    merging = merging && axis->multiplier == run.extent &&
              (run.extent == 1 || static_cast<__int128>(axis->stride) ==
                                      static_cast<__int128>(run.stride) *
                                          static_cast<__int128>(run.extent));
    if (!merging) {
      folded.outer.push_back(*axis);
      continue;
    }
    if (run.extent == 1) run.stride = axis->stride;
    run.extent *= axis->extent;
  }
  return folded;
}

// Appends a target's boxes. The target matches `spec` and is not empty.
absl::Status AppendBoxes(const TensorTarget& target, const TensorSpec& spec,
                         std::vector<BoxTarget>* boxes) {
  const std::size_t rank = spec.shape.size();
  const TileGrid grid = spec.grid();
  const std::uint32_t units_per_element = UnitsPerElement(spec.dtype);
  std::vector<std::uint64_t> begin = target.begin;
  std::vector<std::uint64_t> extent = target.extent;
  if (extent.empty()) {
    begin.assign(rank, 0);
    extent = spec.shape;
  }
  const std::vector<std::int64_t> strides =
      target.strides_bytes.empty()
          ? RowMajorStrides(extent, ElementBytes(spec.dtype))
          : target.strides_bytes;

  // The last dimensions whose product is the matrix's width are its columns.
  std::size_t row_dims = rank;
  for (std::uint64_t width = units_per_element; width != grid.cols;) {
    KEDGE_CHECK(row_dims > 0);
    width *= spec.shape[--row_dims];
  }
  std::uint64_t origin[2] = {0, 0};  // row, column in elements
  std::vector<Axis> axes[2];
  std::uint64_t multiplier = 1;
  for (std::size_t d = rank; d-- > 0;) {
    if (d + 1 == row_dims) multiplier = 1;
    const int side = d < row_dims ? 0 : 1;
    origin[side] += begin[d] * multiplier;
    axes[side].insert(axes[side].begin(), {extent[d], multiplier, strides[d]});
    multiplier *= spec.shape[d];
  }
  const FoldedAxis rows = Fold(axes[0]);
  const FoldedAxis cols = Fold(axes[1]);

  // What neither run covers is enumerated: one box for each combination.
  std::vector<std::pair<int, Axis>> outer;
  std::uint64_t count = 1;
  for (int side = 0; side < 2; ++side) {
    for (const Axis& axis : (side == 0 ? rows : cols).outer) {
      outer.emplace_back(side, axis);
      if (axis.extent > kMaxBoxesPerTarget / count) {
        return absl::InvalidArgumentError(absl::StrCat(
            "tensor ", target.name, ": the view falls into more than ",
            kMaxBoxesPerTarget,
            " strided boxes of the tensor's matrix; lay it out with fewer "
            "breaks, or keep a contiguous copy"));
      }
      count *= axis.extent;
    }
  }
  std::vector<std::uint64_t> at(outer.size(), 0);
  for (std::uint64_t i = 0; i < count; ++i) {
    std::uint64_t index[2] = {origin[0], origin[1]};
    std::int64_t offset = 0;
    for (std::size_t a = 0; a < outer.size(); ++a) {
      const auto& [side, axis] = outer[a];
      index[side] += at[a] * axis.multiplier;
      offset += static_cast<std::int64_t>(at[a]) * axis.stride;
    }
    BoxTarget box;
    box.data = static_cast<std::byte*>(target.data) + offset;
    box.row_begin = index[0];
    box.row_end = index[0] + rows.run.extent;
    box.col_begin = index[1] * units_per_element;
    box.col_end = (index[1] + cols.run.extent) * units_per_element;
    box.unit_bytes = UnitBytes(spec.dtype);
    box.units_per_element = units_per_element;
    box.col_stride_bytes = cols.run.extent > 1
                               ? cols.run.stride
                               : std::int64_t{ElementBytes(spec.dtype)};
    box.row_stride_bytes =
        rows.run.extent > 1
            ? rows.run.stride
            : box.col_stride_bytes * static_cast<std::int64_t>(cols.run.extent);
    boxes->push_back(box);
    for (std::size_t a = 0; a < at.size(); ++a) {
      if (++at[a] < outer[a].second.extent) break;
      at[a] = 0;
    }
  }
  return absl::OkStatus();
}

// ------------------------------------------------------------------- coverage

auto BoxKey(const BoxTarget& box) {
  return std::make_tuple(box.data, box.row_begin, box.row_end, box.col_begin,
                         box.col_end, box.row_stride_bytes,
                         box.col_stride_bytes);
}

// Keeps what `keep` marks, one entry for each element.
template <typename T>
void KeepMarked(const std::vector<bool>& keep, std::vector<T>* values) {
  std::size_t kept = 0;
  for (std::size_t i = 0; i < keep.size(); ++i) {
    if (!keep[i]) continue;
    if (kept != i) (*values)[kept] = std::move((*values)[i]);
    ++kept;
  }
  values->resize(kept);
}

// The rank that holds each box of a tensor, while `boxes` has those of all.
using RankOfBox = std::vector<std::uint32_t>;

// Drops boxes that another target has declared already: the same memory must
// get each change once.
void DropRepeatedBoxes(BoundTensor* tensor, RankOfBox* rank_of_box) {
  const std::size_t count = tensor->boxes.size();
  std::vector<std::size_t> order(count);
  for (std::size_t i = 0; i < count; ++i) order[i] = i;
  // Each rank has addresses of its own.
  const auto key = [&](std::size_t i) {
    return std::make_pair((*rank_of_box)[i], BoxKey(tensor->boxes[i]));
  };
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return std::make_pair(key(a), a) < std::make_pair(key(b), b);
  });
  std::vector<bool> keep(count, true);
  for (std::size_t i = 1; i < count; ++i) {
    keep[order[i]] = key(order[i]) != key(order[i - 1]);
  }
  KeepMarked(keep, &tensor->boxes);
  KeepMarked(keep, &tensor->set_of_box);
  KeepMarked(keep, &tensor->name_of_box);
  KeepMarked(keep, rank_of_box);
}

// Leaves of boxes and covers what `rank` holds, and says who has the rest.
void KeepOwnPart(const RankOfBox& rank_of_box, std::uint32_t rank,
                 BoundTensor* tensor) {
  std::vector<bool> own(rank_of_box.size());
  std::vector<std::uint32_t> own_index(rank_of_box.size(), 0);
  std::uint32_t count = 0;
  for (std::size_t i = 0; i < rank_of_box.size(); ++i) {
    own[i] = rank_of_box[i] == rank;
    if (own[i]) own_index[i] = count++;
  }
  for (BoundTensor::Cover& cover : tensor->covers) {
    std::vector<bool> keep(cover.origin.size());
    for (std::size_t i = 0; i < cover.origin.size(); ++i) {
      cover.ranks.push_back(rank_of_box[cover.origin[i]]);
      keep[i] = own[cover.origin[i]];
      cover.origin[i] = own_index[cover.origin[i]];
    }
    std::sort(cover.ranks.begin(), cover.ranks.end());
    cover.ranks.erase(std::unique(cover.ranks.begin(), cover.ranks.end()),
                      cover.ranks.end());
    KeepMarked(keep, &cover.boxes);
    KeepMarked(keep, &cover.origin);
  }
  KeepMarked(own, &tensor->boxes);
  KeepMarked(own, &tensor->set_of_box);
  KeepMarked(own, &tensor->name_of_box);
}
// Boxes of one tensor that do not overlap, filled in ascending order of rows.
struct Layer {
  std::vector<std::uint32_t> members;
  std::uint64_t units = 0;
  // Those that reach down to the current row: column range by its begin, and
  // the order in which they end.
  std::map<std::uint64_t, std::uint64_t> active;
  std::priority_queue<std::pair<std::uint64_t, std::uint64_t>,
                      std::vector<std::pair<std::uint64_t, std::uint64_t>>,
                      std::greater<>>
      ends;

  bool TryAdd(std::uint32_t index, const BoxTarget& box) {
    while (!ends.empty() && ends.top().first <= box.row_begin) {
      active.erase(ends.top().second);
      ends.pop();
    }
    const auto next = active.lower_bound(box.col_begin);
    if (next != active.end() && next->first < box.col_end) return false;
    if (next != active.begin() && std::prev(next)->second > box.col_begin) {
      return false;
    }
    active.emplace(box.col_begin, box.col_end);
    ends.emplace(box.row_end, box.col_begin);
    members.push_back(index);
    units += box.unit_count();
    return true;
  }
};

std::vector<Layer> DisjointLayers(const std::vector<BoxTarget>& boxes) {
  std::vector<std::uint32_t> order(boxes.size());
  for (std::uint32_t i = 0; i < order.size(); ++i) order[i] = i;
  std::sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) {
    return std::make_tuple(boxes[a].row_begin, boxes[a].col_begin, a) <
           std::make_tuple(boxes[b].row_begin, boxes[b].col_begin, b);
  });
  std::vector<Layer> layers;
  for (const std::uint32_t index : order) {
    const bool placed = std::any_of(
        layers.begin(), layers.end(),
        [&](Layer& layer) { return layer.TryAdd(index, boxes[index]); });
    if (!placed) layers.emplace_back().TryAdd(index, boxes[index]);
  }
  return layers;
}

// The part [r0, r1) x [c0, c1) of a box, whole elements.
BoxTarget Clip(const BoxTarget& box, std::uint64_t r0, std::uint64_t r1,
               std::uint64_t c0, std::uint64_t c1) {
  BoxTarget part = box;
  part.data = box.At(r0, c0);
  part.row_begin = r0;
  part.row_end = r1;
  part.col_begin = c0;
  part.col_end = c1;
  return part;
}

// Appends to `out` the up to four parts of `box` that `hole` leaves.
void Subtract(const BoxTarget& box, const BoxTarget& hole,
              std::vector<BoxTarget>* out) {
  const std::uint64_t r0 = std::max(box.row_begin, hole.row_begin);
  const std::uint64_t r1 = std::min(box.row_end, hole.row_end);
  const std::uint64_t c0 = std::max(box.col_begin, hole.col_begin);
  const std::uint64_t c1 = std::min(box.col_end, hole.col_end);
  if (r0 >= r1 || c0 >= c1) {
    out->push_back(box);
    return;
  }
  const auto add = [&](std::uint64_t top, std::uint64_t bottom,
                       std::uint64_t left, std::uint64_t right) {
    if (top < bottom && left < right) {
      out->push_back(Clip(box, top, bottom, left, right));
    }
  };
  add(box.row_begin, r0, box.col_begin, box.col_end);
  add(r1, box.row_end, box.col_begin, box.col_end);
  add(r0, r1, box.col_begin, c0);
  add(r0, r1, c1, box.col_end);
}

// Completes a layer with the parts of other boxes that it lacks.
void Complete(const std::vector<BoxTarget>& boxes, BoundTensor::Cover* cover) {
  std::vector<BoxTarget> parts;
  std::vector<BoxTarget> rest;
  for (std::uint32_t i = 0; i < boxes.size(); ++i) {
    parts.assign(1, boxes[i]);
    for (std::size_t h = 0; h < cover->boxes.size() && !parts.empty(); ++h) {
      rest.clear();
      for (const BoxTarget& part : parts) {
        Subtract(part, cover->boxes[h], &rest);
      }
      parts.swap(rest);
    }
    cover->boxes.insert(cover->boxes.end(), parts.begin(), parts.end());
    cover->origin.insert(cover->origin.end(), parts.size(), i);
  }
}

std::uint64_t UnitsOf(const BoundTensor::Cover& cover) {
  std::uint64_t units = 0;
  for (const BoxTarget& box : cover.boxes) units += box.unit_count();
  return units;
}

absl::Status CountCoverage(const TensorSpec& spec, BoundTensor* tensor) {
  const std::uint64_t all_units = spec.unit_count();
  const std::vector<Layer> layers = DisjointLayers(tensor->boxes);
  std::uint64_t widest = 0;
  for (const Layer& layer : layers) widest = std::max(widest, layer.units);
  for (const Layer& layer : layers) {
    BoundTensor::Cover cover;
    for (const std::uint32_t index : layer.members) {
      cover.boxes.push_back(tensor->boxes[index]);
      cover.origin.push_back(index);
    }
    if (layers.size() > 1 && layer.units < all_units) {
      if (tensor->boxes.size() > kMaxPairwiseBoxes) {
        return absl::InvalidArgumentError(absl::StrCat(
            "tensor ", spec.name, ": ", tensor->boxes.size(),
            " overlapping boxes of unequal cut; at most ", kMaxPairwiseBoxes,
            " are supported: cut the replicas alike"));
      }
      Complete(tensor->boxes, &cover);
    }
    widest = std::max(widest, UnitsOf(cover));
    tensor->covers.push_back(std::move(cover));
  }
  tensor->covered_units = widest;
  tensor->fully_covered = widest == all_units;
  return absl::OkStatus();
}

// --------------------------------------------------------------------- memory

// Memory that is held without gaps, to find targets that overlap.
struct DenseRange {
  std::uintptr_t begin = 0;
  std::uintptr_t end = 0;
  std::uint32_t set = 0;
  std::uint32_t name = 0;
};

bool IsDense(const BoxTarget& box) {
  const auto row_bytes =
      static_cast<std::int64_t>((box.col_end - box.col_begin) * box.unit_bytes);
  return box.rows_are_contiguous() && (box.row_end - box.row_begin == 1 ||
                                       box.row_stride_bytes == row_bytes);
}

// Of one rank, whose sets these are.
void FindOverlaps(const std::vector<const WeightSet*>& sets, std::uint32_t rank,
                  bool grouped, const BoundWeights& bound,
                  const std::vector<RankOfBox>& rank_of_box,
                  Offenders* offenders) {
  std::vector<DenseRange> ranges;
  for (std::size_t t = 0; t < bound.tensors.size(); ++t) {
    const BoundTensor& tensor = bound.tensors[t];
    for (std::size_t i = 0; i < tensor.boxes.size(); ++i) {
      const BoxTarget& box = tensor.boxes[i];
      if (rank_of_box[t][i] != rank || !IsDense(box)) continue;
      const auto begin = reinterpret_cast<std::uintptr_t>(box.data);
      ranges.push_back({begin, begin + box.unit_count() * box.unit_bytes,
                        tensor.set_of_box[i], tensor.name_of_box[i]});
    }
  }
  std::sort(ranges.begin(), ranges.end(),
            [](const DenseRange& a, const DenseRange& b) {
              return std::tie(a.begin, a.end, a.set, a.name) <
                     std::tie(b.begin, b.end, b.set, b.name);
            });
  const auto describe = [&](const DenseRange& range) {
    return absl::StrCat((*bound.table)[range.name].name, " of ",
                        sets[range.set]->name(),
                        grouped ? absl::StrCat(" of rank ", rank) : "");
  };
  const DenseRange* farthest = nullptr;
  for (const DenseRange& range : ranges) {
    if (farthest != nullptr && range.begin < farthest->end) {
      offenders->Add(absl::StrCat(describe(*farthest), " and ", describe(range),
                                  " overlap in memory"));
    }
    if (farthest == nullptr || range.end > farthest->end) farthest = &range;
  }
}

}  // namespace

WeightSet::WeightSet(std::string name) : name_(std::move(name)) {}

absl::Status WeightSet::Add(TensorTarget target) {
  const auto invalid = [&](const std::string& what) {
    return absl::InvalidArgumentError(
        absl::StrCat(name_, ": tensor ", target.name, ": ", what));
  };
  const std::size_t rank = target.shape.size();
  if (target.name.empty()) return invalid("the name is empty");
  if (!IsValidDType(static_cast<std::uint8_t>(target.dtype))) {
    return invalid("the dtype is none of kedge's");
  }
  if (target.begin.size() != target.extent.size() ||
      (!target.begin.empty() && target.begin.size() != rank)) {
    return invalid(absl::StrCat(
        "begin and extent must both be empty or have one entry for each of ",
        rank, " dimensions; found ", target.begin.size(), " and ",
        target.extent.size()));
  }
  for (std::size_t d = 0; d < target.begin.size(); ++d) {
    if (target.begin[d] > target.shape[d] ||
        target.extent[d] > target.shape[d] - target.begin[d]) {
      return invalid(absl::StrCat("the box at ", ShapeText(target.begin),
                                  " of extent ", ShapeText(target.extent),
                                  " lies outside the shape ",
                                  ShapeText(target.shape)));
    }
  }
  if (!target.strides_bytes.empty() && target.strides_bytes.size() != rank) {
    return invalid(absl::StrCat("strides_bytes has ",
                                target.strides_bytes.size(), " entries for ",
                                rank, " dimensions"));
  }
  if (!IsEmptyBox(target)) {
    if (target.data == nullptr) return invalid("data is null");
    if (!target.strides_bytes.empty() &&
        !ElementsAreApart(target.extent.empty() ? target.shape : target.extent,
                          target.strides_bytes, ElementBytes(target.dtype))) {
      return invalid(absl::StrCat("strides of [",
                                  absl::StrJoin(target.strides_bytes, ", "),
                                  "] bytes let elements overlap"));
    }
  }
  targets_.push_back(std::move(target));
  return absl::OkStatus();
}

absl::StatusOr<BoundWeights> BindWeights(
    const std::vector<const WeightSet*>& sets,
    std::shared_ptr<const TensorTable> table, bool allow_partial) {
  return BindGroupWeights({sets}, 0, std::move(table), allow_partial);
}

absl::StatusOr<BoundWeights> BindGroupWeights(
    const std::vector<std::vector<const WeightSet*>>& sets_of_rank,
    std::uint32_t rank, std::shared_ptr<const TensorTable> table,
    bool allow_partial) {
  BoundWeights bound;
  bound.table = std::move(table);
  const TensorTable& tensors = *bound.table;
  bound.tensors.resize(tensors.size());
  std::vector<RankOfBox> rank_of_box(tensors.size());
  const bool grouped = sets_of_rank.size() > 1;
  const auto owner_of = [&](std::uint32_t ordinal) {
    const std::uint32_t owner = tensors[ordinal].tied_to;
    return owner == kNotTied ? ordinal : owner;
  };

  Offenders offenders;
  for (std::uint32_t r = 0; r < sets_of_rank.size(); ++r) {
    for (std::uint32_t s = 0; s < sets_of_rank[r].size(); ++s) {
      const WeightSet& set = *sets_of_rank[r][s];
      for (const TensorTarget& target : set.targets()) {
        const auto where = [&] {
          return absl::StrCat(target.name, " of ", set.name(),
                              grouped ? absl::StrCat(" of rank ", r) : "");
        };
        const auto ordinal = tensors.Find(target.name);
        if (!ordinal.ok()) {
          offenders.Add(
              absl::StrCat(where(), ": the store has no such tensor"));
          continue;
        }
        const TensorSpec& spec = tensors[*ordinal];
        if (spec.dtype != target.dtype) {
          offenders.Add(absl::StrCat(where(), ": dtype: expected ",
                                     DTypeName(spec.dtype), ", found ",
                                     DTypeName(target.dtype)));
          continue;
        }
        if (spec.shape != target.shape) {
          offenders.Add(absl::StrCat(where(), ": shape: expected ",
                                     ShapeText(spec.shape), ", found ",
                                     ShapeText(target.shape)));
          continue;
        }
        if (IsEmptyBox(target)) continue;
        const std::uint32_t owner = owner_of(*ordinal);
        BoundTensor& tensor = bound.tensors[owner];
        KEDGE_RETURN_IF_ERROR(AppendBoxes(target, spec, &tensor.boxes));
        tensor.set_of_box.resize(tensor.boxes.size(), s);
        tensor.name_of_box.resize(tensor.boxes.size(), *ordinal);
        rank_of_box[owner].resize(tensor.boxes.size(), r);
      }
    }
  }
  for (std::uint32_t t = 0; t < tensors.size(); ++t) {
    BoundTensor& tensor = bound.tensors[t];
    if (owner_of(t) != t) continue;
    DropRepeatedBoxes(&tensor, &rank_of_box[t]);
    KEDGE_RETURN_IF_ERROR(CountCoverage(tensors[t], &tensor));
  }
  for (std::uint32_t t = 0; t < tensors.size(); ++t) {
    const BoundTensor& owner = bound.tensors[owner_of(t)];
    bound.tensors[t].covered_units = owner.covered_units;
    bound.tensors[t].fully_covered = owner.fully_covered;
    if (owner.covered_units > 0 || owner.fully_covered) ++bound.held_tensors;
    if (owner_of(t) != t || owner.fully_covered || allow_partial) continue;
    offenders.Add(absl::StrCat(
        tensors[t].name, ": ",
        owner.covered_units == 0
            ? std::string("no weight set holds it")
            : absl::StrCat("weight sets hold ", owner.covered_units, " of ",
                           tensors[t].unit_count(), " units")));
  }
  for (std::uint32_t r = 0; r < sets_of_rank.size(); ++r) {
    FindOverlaps(sets_of_rank[r], r, grouped, bound, rank_of_box, &offenders);
  }
  for (std::uint32_t t = 0; t < tensors.size(); ++t) {
    BoundTensor& tensor = bound.tensors[t];
    if (owner_of(t) == t) KeepOwnPart(rank_of_box[t], rank, &tensor);
    for (const BoxTarget& box : tensor.boxes) {
      bound.held_bytes += box.unit_count() * box.unit_bytes;
    }
  }
  if (!offenders.empty()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "weight sets do not fit the store's tensor table (", tensors.size(),
        " tensors): ", offenders.Text(),
        "; serve the model that the trainer publishes, or follow its store"));
  }
  return bound;
}

}  // namespace kedge
