#include "kedge/format/tensor_table.h"

#include <algorithm>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kedge/format/flat_columns.h"
#include "kedge/format/limits.h"
#include "kedge/format/status.h"
#include "tensor_table_generated.h"

namespace kedge {
namespace {

constexpr char kIdentifier[] = "KDTT";

// For messages: a name may be long and may hold anything.
std::string Quoted(absl::string_view name) {
  constexpr std::size_t kShown = 200;
  return absl::StrCat("\"", absl::CHexEscape(name.substr(0, kShown)),
                      name.size() > kShown ? "..." : "", "\"");
}

std::string ShapeText(const TensorSpec& tensor) {
  return absl::StrCat(DTypeName(tensor.dtype), " [",
                      absl::StrJoin(tensor.shape, ", "), "]");
}

// What is wrong with one tensor by itself; `what` is empty if nothing is.
struct Finding {
  std::string what;
  std::string expected;
  std::string found;
};

Finding CheckTensor(const TensorSpec& tensor) {
  if (tensor.name.empty() || tensor.name.size() > kMaxNameBytes) {
    return {"name", absl::StrCat("1 to ", kMaxNameBytes, " bytes"),
            absl::StrCat(tensor.name.size())};
  }
  if (tensor.name.find('\0') != std::string::npos) {
    return {"name", "no NUL", Quoted(tensor.name)};
  }
  if (!flat::IsUtf8(tensor.name)) {
    return {"name", "UTF-8", Quoted(tensor.name)};
  }
  if (!IsValidDType(static_cast<std::uint8_t>(tensor.dtype))) {
    return {"dtype", absl::StrCat("1 to ", kMaxDType),
            absl::StrCat(static_cast<int>(tensor.dtype))};
  }
  if (tensor.shape.size() > kMaxRank) {
    return {"shape", absl::StrCat("at most ", kMaxRank, " dimensions"),
            absl::StrCat(tensor.shape.size())};
  }
  const bool empty = std::find(tensor.shape.begin(), tensor.shape.end(), 0u) !=
                     tensor.shape.end();
  std::uint64_t bytes = ElementBytes(tensor.dtype);
  for (const std::uint64_t extent : tensor.shape) {
    if (extent > kMaxTensorBytes) {
      return {"shape", absl::StrCat("dimensions of at most ", kMaxTensorBytes),
              absl::StrCat(extent)};
    }
    if (empty) continue;
    if (extent > kMaxTensorBytes / bytes) {
      return {"shape", absl::StrCat("at most ", kMaxTensorBytes, " bytes"),
              absl::StrCat(ShapeText(tensor), ", which is more")};
    }
    bytes *= extent;
  }
  return {};
}

// What is wrong with a tie.
Finding CheckTie(std::span<const TensorSpec> tensors, std::size_t ordinal) {
  const TensorSpec& tensor = tensors[ordinal];
  if (tensor.tied_to == kNotTied) return {};
  if (tensor.tied_to >= tensors.size()) {
    return {"tied_to", absl::StrCat("below ", tensors.size()),
            absl::StrCat(tensor.tied_to)};
  }
  const TensorSpec& owner = tensors[tensor.tied_to];
  if (owner.tied_to != kNotTied) {
    return {"tied_to", "a tensor that has its own storage",
            absl::StrCat(Quoted(owner.name), ", which is tied itself")};
  }
  if (owner.dtype != tensor.dtype || owner.shape != tensor.shape) {
    return {"tied_to",
            absl::StrCat("an owner with ", ShapeText(tensor), " like this one"),
            absl::StrCat(Quoted(owner.name), " with ", ShapeText(owner))};
  }
  return {};
}

// Bytes of all tensors, ties once. Each is within kMaxTensorBytes.
std::uint64_t TotalBytes(std::span<const TensorSpec> tensors) {
  std::uint64_t total = 0;
  for (const TensorSpec& tensor : tensors) {
    if (tensor.tied_to == kNotTied) total += tensor.byte_count();
    if (total > kMaxModelBytes) break;  // long before it could wrap
  }
  return total;
}

std::vector<std::byte> Serialize(std::span<const TensorSpec> tensors) {
  std::vector<std::uint32_t> name_end;
  std::vector<std::uint8_t> names;
  std::vector<std::uint8_t> dtype;
  std::vector<std::uint8_t> rank;
  std::vector<std::uint64_t> shape;
  std::vector<std::uint32_t> tied_to;
  bool any_tied = false;
  for (const TensorSpec& tensor : tensors) {
    names.insert(names.end(), tensor.name.begin(), tensor.name.end());
    name_end.push_back(static_cast<std::uint32_t>(names.size()));
    dtype.push_back(static_cast<std::uint8_t>(tensor.dtype));
    rank.push_back(static_cast<std::uint8_t>(tensor.shape.size()));
    shape.insert(shape.end(), tensor.shape.begin(), tensor.shape.end());
    tied_to.push_back(tensor.tied_to);
    any_tied = any_tied || tensor.tied_to != kNotTied;
  }
  if (!any_tied) tied_to.clear();

  flatbuffers::FlatBufferBuilder builder;
  const auto names_at = flat::Put(builder, names);
  const auto name_end_at = flat::Put(builder, name_end);
  const auto dtype_at = flat::Put(builder, dtype);
  const auto rank_at = flat::Put(builder, rank);
  const auto shape_at = flat::Put(builder, shape);
  const auto tied_to_at = flat::Put(builder, tied_to);
  fbs::TensorTableBuilder table(builder);
  table.add_name_end(name_end_at);
  table.add_names(names_at);
  table.add_dtype(dtype_at);
  table.add_rank(rank_at);
  table.add_shape(shape_at);
  table.add_tied_to(tied_to_at);
  table.add_min_reader(kFormatVersion);
  table.add_writer(kFormatVersion);
  builder.Finish(table.Finish(), kIdentifier);
  return flat::Take(builder);
}

absl::Status Invalid(absl::string_view name, const Finding& finding) {
  return absl::InvalidArgumentError(
      Describe({absl::StrCat("tensor ", Quoted(name)), finding.what,
                finding.expected, finding.found}));
}

}  // namespace

std::uint64_t TensorSpec::element_count() const {
  std::uint64_t count = 1;
  for (const std::uint64_t extent : shape) count *= extent;
  return count;
}
std::uint64_t TensorSpec::unit_count() const {
  return element_count() * UnitsPerElement(dtype);
}
std::uint64_t TensorSpec::byte_count() const {
  return element_count() * ElementBytes(dtype);
}
TileGrid TensorSpec::grid() const {
  return MakeTileGrid(shape, UnitsPerElement(dtype));
}

absl::StatusOr<TensorTable> TensorTable::Create(
    std::vector<TensorSpec> tensors,
    std::span<const std::pair<std::string, std::string>> ties) {
  if (tensors.size() > kMaxTensorCount) {
    return absl::InvalidArgumentError(Describe(
        {"tensor table", "tensors", absl::StrCat("at most ", kMaxTensorCount),
         absl::StrCat(tensors.size())}));
  }
  std::uint64_t estimate = 256;
  for (const TensorSpec& tensor : tensors) {
    if (tensor.tied_to != kNotTied) {
      return Invalid(tensor.name, {"tied_to", "none (ties are given by name)",
                                   absl::StrCat("ordinal ", tensor.tied_to)});
    }
    const Finding finding = CheckTensor(tensor);
    if (!finding.what.empty()) return Invalid(tensor.name, finding);
    estimate += tensor.name.size() + 8 * tensor.shape.size() + 10;
  }
  if (estimate > kMaxFlatBufferBytes) {
    return absl::InvalidArgumentError(
        Describe({"tensor table", "bytes of all names and shapes",
                  absl::StrCat("at most ", kMaxFlatBufferBytes),
                  absl::StrCat("about ", estimate)}));
  }
  std::sort(
      tensors.begin(), tensors.end(),
      [](const TensorSpec& a, const TensorSpec& b) { return a.name < b.name; });
  for (std::size_t i = 1; i < tensors.size(); ++i) {
    if (tensors[i].name == tensors[i - 1].name) {
      return Invalid(tensors[i].name, {"name", "once", "twice"});
    }
  }

  TensorTable table;
  table.tensors_ = std::move(tensors);
  for (const auto& [alias, owner] : ties) {
    const auto alias_ordinal = table.Find(alias);
    const auto owner_ordinal = table.Find(owner);
    if (!alias_ordinal.ok() || !owner_ordinal.ok()) {
      const bool is_alias = !alias_ordinal.ok();
      return Invalid(
          is_alias ? alias : owner,
          {absl::StrCat("tie of ", Quoted(alias), " to ", Quoted(owner)),
           "two tensors of the table",
           absl::StrCat("no ", is_alias ? "alias" : "owner", " of that name")});
    }
    if (*alias_ordinal == *owner_ordinal) {
      return Invalid(alias, {"tie", "another tensor", "the tensor itself"});
    }
    std::uint32_t& tied_to = table.tensors_[*alias_ordinal].tied_to;
    if (tied_to != kNotTied && tied_to != *owner_ordinal) {
      return Invalid(alias, {"tie", "one owner",
                             absl::StrCat(Quoted(table.tensors_[tied_to].name),
                                          " and ", Quoted(owner))});
    }
    tied_to = *owner_ordinal;
  }
  for (std::size_t i = 0; i < table.size(); ++i) {
    const Finding finding = CheckTie(table.tensors_, i);
    if (!finding.what.empty()) return Invalid(table[i].name, finding);
  }
  table.total_bytes_ = TotalBytes(table.tensors_);
  if (table.total_bytes_ > kMaxModelBytes) {
    return absl::InvalidArgumentError(
        Describe({"tensor table", "bytes of all tensors",
                  absl::StrCat("at most ", kMaxModelBytes), "more"}));
  }
  table.bytes_ = Serialize(table.tensors_);
  KEDGE_CHECK(table.bytes_.size() <= kMaxFlatBufferBytes);
  table.hash_ = HashBytes128(table.bytes_);
  return table;
}

absl::StatusOr<TensorTable> TensorTable::Parse(
    absl::string_view where, std::span<const std::byte> bytes) {
  using flat::Bad;
  using flat::Row;
  KEDGE_ASSIGN_OR_RETURN(const auto root, flat::Opened<fbs::TensorTable>::Open(
                                              where, bytes, kIdentifier));
  const auto name_end = flat::Column(root->name_end());
  const auto names = flat::Column(root->names());
  const auto dtype = flat::Column(root->dtype());
  const auto rank = flat::Column(root->rank());
  const auto shape = flat::Column(root->shape());
  const auto tied_to = flat::Column(root->tied_to());

  const std::size_t count = name_end.size();
  if (count > kMaxTensorCount) {
    return Bad(where, "name_end",
               absl::StrCat("at most ", kMaxTensorCount, " rows"),
               absl::StrCat(count));
  }
  KEDGE_RETURN_IF_ERROR(flat::CheckRows(where, "dtype", dtype.size(), count));
  KEDGE_RETURN_IF_ERROR(flat::CheckRows(where, "rank", rank.size(), count));
  if (!tied_to.empty()) {
    KEDGE_RETURN_IF_ERROR(
        flat::CheckRows(where, "tied_to", tied_to.size(), count));
  }
  std::uint64_t dimensions = 0;
  for (std::size_t i = 0; i < count; ++i) dimensions += rank[i];
  KEDGE_RETURN_IF_ERROR(
      flat::CheckRows(where, "shape", shape.size(), dimensions));

  TensorTable table;
  table.tensors_.resize(count);
  std::uint32_t name_begin = 0;
  std::size_t shape_begin = 0;
  for (std::size_t i = 0; i < count; ++i) {
    if (name_end[i] < name_begin || name_end[i] > names.size()) {
      return Bad(where, Row("name_end", i),
                 absl::StrCat(name_begin, " to ", names.size()),
                 absl::StrCat(name_end[i]));
    }
    // Before the name is copied: overlong names cost memory.
    if (name_end[i] - name_begin > kMaxNameBytes) {
      return Bad(where, Row("tensors", i, "name"),
                 absl::StrCat("1 to ", kMaxNameBytes, " bytes"),
                 absl::StrCat(name_end[i] - name_begin));
    }
    TensorSpec& tensor = table.tensors_[i];
    tensor.name = names.Text(name_begin, name_end[i] - name_begin);
    name_begin = name_end[i];
    tensor.dtype = static_cast<DType>(dtype[i]);
    tensor.shape = shape.Rows(shape_begin, rank[i]);
    shape_begin += rank[i];
    if (!tied_to.empty()) tensor.tied_to = tied_to[i];
    const Finding finding = CheckTensor(tensor);
    if (!finding.what.empty()) {
      return Bad(where, Row("tensors", i, finding.what), finding.expected,
                 finding.found);
    }
    if (i > 0 && tensor.name <= table.tensors_[i - 1].name) {
      return Bad(
          where, Row("tensors", i, "name"),
          absl::StrCat("a name above ", Quoted(table.tensors_[i - 1].name)),
          Quoted(tensor.name));
    }
  }
  if (name_begin != names.size()) {
    return Bad(where, "names", absl::StrCat(name_begin, " bytes"),
               absl::StrCat(names.size()));
  }
  for (std::size_t i = 0; i < count; ++i) {
    const Finding finding = CheckTie(table.tensors_, i);
    if (!finding.what.empty()) {
      return Bad(where, Row("tensors", i, finding.what), finding.expected,
                 finding.found);
    }
  }
  table.total_bytes_ = TotalBytes(table.tensors_);
  if (table.total_bytes_ > kMaxModelBytes) {
    return Bad(where, "bytes of all tensors",
               absl::StrCat("at most ", kMaxModelBytes), "more");
  }
  table.bytes_.assign(bytes.begin(), bytes.end());
  table.hash_ = HashBytes128(bytes);
  return table;
}

absl::StatusOr<std::uint32_t> TensorTable::Find(absl::string_view name) const {
  const auto at =
      std::lower_bound(tensors_.begin(), tensors_.end(), name,
                       [](const TensorSpec& tensor, absl::string_view wanted) {
                         return absl::string_view(tensor.name) < wanted;
                       });
  if (at == tensors_.end() || at->name != name) {
    return absl::NotFoundError(
        absl::StrCat("tensor ", Quoted(name), ": not one of the ",
                     tensors_.size(), " in the tensor table"));
  }
  return static_cast<std::uint32_t>(at - tensors_.begin());
}

Hash128 TensorTable::StateDigest(std::span<const std::uint64_t> l61) const {
  KEDGE_CHECK(l61.size() == tensors_.size());
  // Hashed in one go: even a million tensors are small beside their weights.
  std::vector<std::byte> input;
  const auto append = [&input](const void* data, std::size_t size) {
    const auto* bytes = static_cast<const std::byte*>(data);
    input.insert(input.end(), bytes, bytes + size);
  };
  std::size_t size = 0;
  for (const TensorSpec& tensor : tensors_) size += tensor.name.size() + 21;
  input.reserve(size);
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    const TensorSpec& tensor = tensors_[i];
    const auto name_bytes = static_cast<std::uint32_t>(tensor.name.size());
    const std::uint64_t byte_count = tensor.byte_count();
    append(&name_bytes, 4);
    append(tensor.name.data(), name_bytes);
    append(&tensor.dtype, 1);
    append(&byte_count, 8);
    append(&l61[i], 8);
  }
  return HashBytes128(input);
}

}  // namespace kedge
