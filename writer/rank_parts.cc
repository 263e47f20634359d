#include "kedge/writer/rank_parts.h"

#include <map>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kedge/format/l61.h"
#include "kedge/format/limits.h"
#include "kedge/format/status.h"
#include "kedge/writer/wire.h"

namespace kedge {
namespace {

absl::Status Broken(absl::string_view where, absl::string_view what) {
  return absl::DataLossError(
      absl::StrCat(where, ": the message is broken: ", what,
                   "; all ranks must run the same version of kedge"));
}

void PutMetadata(const Metadata& metadata, WireWriter* out) {
  out->U64(metadata.size());
  for (const auto& [key, value] : metadata) {
    out->Text(key);
    out->Text(value);
  }
}

Metadata GetMetadata(WireReader* in) {
  Metadata metadata;
  for (std::size_t rows = in->Rows(16); rows > 0; --rows) {
    std::string key = in->Text();
    metadata[std::move(key)] = in->Text();
  }
  return metadata;
}

std::string SpecText(const DeclaredTensor& tensor) {
  return absl::StrCat(
      DTypeName(tensor.dtype), " [", absl::StrJoin(tensor.shape, ", "), "]",
      tensor.tied_to.empty() ? "" : " tied to ", tensor.tied_to);
}

}  // namespace

std::vector<std::byte> SerializeAnchorPart(const AnchorPart& part,
                                           const TensorTable& table) {
  WireWriter out;
  out.Hash(table.hash());
  out.U64(part.owned.size());
  for (const OwnedSlice& owned : part.owned) {
    out.U32(owned.tensor);
    out.U64(owned.slice.begin);
    out.U64(owned.slice.end);
  }
  out.U64(part.files.size());
  for (const DataFile& file : part.files) {
    out.U32(static_cast<std::uint32_t>(file.id.kind));
    out.U32(file.id.rank);
    out.U32(file.id.number);
    out.U64(file.bytes);
    out.Hash(file.hash);
    out.Bytes(std::as_bytes(std::span(file.piece_hashes)));
  }
  out.U64(part.slices.size());
  for (const AnchorSlice& slice : part.slices) {
    out.U32(slice.tensor);
    out.U64(slice.slice.begin);
    out.U64(slice.slice.end);
    out.U32(slice.file);
    out.U64(slice.offset);
  }
  // Sparse: a rank of many holds few of many tensors.
  std::size_t sums = 0;
  for (const std::uint64_t sum : part.l61) sums += sum != 0;
  out.U64(sums);
  for (std::size_t i = 0; i < part.l61.size(); ++i) {
    if (part.l61[i] == 0) continue;
    out.U32(static_cast<std::uint32_t>(i));
    out.U64(part.l61[i]);
  }
  return out.Take();
}

absl::StatusOr<AnchorPart> ParseAnchorPart(absl::string_view where,
                                           std::span<const std::byte> bytes,
                                           const TensorTable& table) {
  WireReader in(bytes);
  const Hash128 hash = in.Hash();
  if (!in.failed() && hash != table.hash()) {
    return absl::FailedPreconditionError(
        absl::StrCat(where, ": tensor table: expected ", ToHex(table.hash()),
                     " as at rank 0, found ", ToHex(hash),
                     "; give all ranks the same model"));
  }
  AnchorPart part;
  part.owned.resize(in.Rows(20));
  for (OwnedSlice& owned : part.owned) {
    owned.tensor = in.U32();
    owned.slice.begin = in.U64();
    owned.slice.end = in.U64();
  }
  part.files.resize(in.Rows(44));
  for (DataFile& file : part.files) {
    file.id.kind = static_cast<FileKind>(in.U32());
    file.id.rank = in.U32();
    file.id.number = in.U32();
    file.bytes = in.U64();
    file.hash = in.Hash();
    const std::span<const std::byte> hashes = in.Bytes();
    if (hashes.size() % 8 != 0) return Broken(where, "piece hashes");
    file.piece_hashes.resize(hashes.size() / 8);
    if (!hashes.empty()) {
      std::memcpy(file.piece_hashes.data(), hashes.data(), hashes.size());
    }
  }
  part.slices.resize(in.Rows(32));
  for (AnchorSlice& slice : part.slices) {
    slice.tensor = in.U32();
    slice.slice.begin = in.U64();
    slice.slice.end = in.U64();
    slice.file = in.U32();
    slice.offset = in.U64();
    if (slice.file >= part.files.size()) return Broken(where, "slices");
  }
  part.l61.assign(table.size(), 0);
  for (std::size_t rows = in.Rows(12); rows > 0; --rows) {
    const std::uint32_t tensor = in.U32();
    const std::uint64_t sum = in.U64();
    if (tensor >= table.size() || sum >= kL61Prime) {
      return Broken(where, "sums");
    }
    part.l61[tensor] = sum;
  }
  KEDGE_RETURN_IF_ERROR(in.Finish(where));
  return part;
}

std::vector<std::byte> SerializeSharedState(const SharedState& shared) {
  const VersionState& state = shared.state;
  WireWriter out;
  out.Hash(shared.run);
  out.U64(state.id.step);
  out.Hash(state.id.manifest_hash);
  out.Bytes(state.table->bytes());
  out.Bytes(std::as_bytes(std::span(state.l61)));
  PutMetadata(state.metadata, &out);
  return out.Take();
}

absl::StatusOr<SharedState> ParseSharedState(absl::string_view where,
                                             std::span<const std::byte> bytes) {
  WireReader in(bytes);
  SharedState shared;
  shared.run = in.Hash();
  shared.state.id.step = in.U64();
  shared.state.id.manifest_hash = in.Hash();
  const std::span<const std::byte> table_bytes = in.Bytes();
  const std::span<const std::byte> l61 = in.Bytes();
  shared.state.metadata = GetMetadata(&in);
  KEDGE_RETURN_IF_ERROR(in.Finish(where));
  KEDGE_ASSIGN_OR_RETURN(TensorTable table,
                         TensorTable::Parse(where, table_bytes));
  if (l61.size() != table.size() * sizeof(std::uint64_t)) {
    return Broken(where, "sums");
  }
  shared.state.l61.resize(table.size());
  if (!l61.empty())
    std::memcpy(shared.state.l61.data(), l61.data(), l61.size());
  shared.state.table = std::make_shared<const TensorTable>(std::move(table));
  return shared;
}

std::vector<std::byte> SerializeStepOutcome(const StepOutcome& outcome) {
  WireWriter out;
  out.U64(outcome.version.step);
  out.Hash(outcome.version.manifest_hash);
  out.U64(outcome.nnz);
  out.U64(outcome.records);
  out.U64(outcome.bytes);
  out.U64(outcome.manifest_bytes);
  out.U64(outcome.anchor_bytes);
  out.U64(outcome.warnings.size());
  for (const std::string& warning : outcome.warnings) out.Text(warning);
  out.U64(outcome.l61_tensors.size());
  for (std::size_t i = 0; i < outcome.l61_tensors.size(); ++i) {
    out.U64(outcome.l61_tensors[i]);
    out.U64(outcome.l61_after[i]);
  }
  out.U32(outcome.metadata_changed ? 1 : 0);
  PutMetadata(outcome.metadata, &out);
  return out.Take();
}

absl::StatusOr<StepOutcome> ParseStepOutcome(absl::string_view where,
                                             std::span<const std::byte> bytes,
                                             std::size_t tensor_count) {
  WireReader in(bytes);
  StepOutcome outcome;
  outcome.version.step = in.U64();
  outcome.version.manifest_hash = in.Hash();
  outcome.nnz = in.U64();
  outcome.records = in.U64();
  outcome.bytes = in.U64();
  outcome.manifest_bytes = in.U64();
  outcome.anchor_bytes = in.U64();
  outcome.warnings.resize(in.Rows(8));
  for (std::string& warning : outcome.warnings) warning = in.Text();
  const std::size_t sums = in.Rows(16);
  for (std::size_t i = 0; i < sums; ++i) {
    outcome.l61_tensors.push_back(in.U64());
    outcome.l61_after.push_back(in.U64());
    if (outcome.l61_tensors.back() >= tensor_count) {
      return Broken(where, "sums");
    }
  }
  outcome.metadata_changed = in.U32() != 0;
  outcome.metadata = GetMetadata(&in);
  KEDGE_RETURN_IF_ERROR(in.Finish(where));
  return outcome;
}

std::vector<DeclaredTensor> Declare(std::span<const TrainerTensor> tensors) {
  std::vector<DeclaredTensor> declared;
  std::map<absl::string_view, std::size_t> at;
  for (const TrainerTensor& tensor : tensors) {
    const auto [entry, fresh] = at.emplace(tensor.name, declared.size());
    if (fresh) {
      declared.push_back(
          {tensor.name, tensor.dtype, tensor.shape, tensor.tied_to, {}});
    }
    if (!tensor.tied_to.empty()) continue;
    std::uint64_t elements = 1;
    for (const std::uint64_t extent : tensor.shape) elements *= extent;
    const ElementRange range = tensor.shard.value_or(ElementRange{0, elements});
    if (range.begin >= range.end) continue;
    const std::uint64_t units = UnitsPerElement(tensor.dtype);
    declared[entry->second].owned.push_back(
        {range.begin * units, range.end * units});
  }
  return declared;
}

std::vector<std::byte> SerializeDeclared(
    std::span<const DeclaredTensor> tensors) {
  WireWriter out;
  out.U64(tensors.size());
  for (const DeclaredTensor& tensor : tensors) {
    out.Text(tensor.name);
    out.U32(static_cast<std::uint32_t>(tensor.dtype));
    out.U64(tensor.shape.size());
    for (const std::uint64_t extent : tensor.shape) out.U64(extent);
    out.Text(tensor.tied_to);
    out.U64(tensor.owned.size());
    for (const UnitRange& range : tensor.owned) {
      out.U64(range.begin);
      out.U64(range.end);
    }
  }
  return out.Take();
}

absl::StatusOr<std::vector<DeclaredTensor>> ParseDeclared(
    absl::string_view where, std::span<const std::byte> bytes) {
  WireReader in(bytes);
  std::vector<DeclaredTensor> tensors(in.Rows(36));
  for (DeclaredTensor& tensor : tensors) {
    tensor.name = in.Text();
    const std::uint32_t dtype = in.U32();
    if (dtype < 1 || dtype > kMaxDType) return Broken(where, "dtype");
    tensor.dtype = static_cast<DType>(dtype);
    tensor.shape.resize(in.Rows(8));
    for (std::uint64_t& extent : tensor.shape) extent = in.U64();
    tensor.tied_to = in.Text();
    tensor.owned.resize(in.Rows(16));
    for (UnitRange& range : tensor.owned) {
      range.begin = in.U64();
      range.end = in.U64();
    }
    if (in.failed()) break;
  }
  KEDGE_RETURN_IF_ERROR(in.Finish(where));
  return tensors;
}

absl::StatusOr<TensorTable> UniteTables(
    std::span<const std::vector<DeclaredTensor>> by_rank) {
  struct First {
    const DeclaredTensor* tensor;
    std::uint32_t rank;
  };
  std::map<absl::string_view, First> firsts;
  std::vector<TensorSpec> specs;
  std::vector<std::pair<std::string, std::string>> ties;
  for (std::uint32_t rank = 0; rank < by_rank.size(); ++rank) {
    for (const DeclaredTensor& tensor : by_rank[rank]) {
      const auto [at, fresh] =
          firsts.emplace(tensor.name, First{&tensor, rank});
      const DeclaredTensor& first = *at->second.tensor;
      if (!fresh &&
          (tensor.dtype != first.dtype || tensor.shape != first.shape ||
           tensor.tied_to != first.tied_to)) {
        return absl::FailedPreconditionError(absl::StrCat(
            "tensor \"", tensor.name, "\": expected ", SpecText(first),
            " as at rank ", at->second.rank, ", found ", SpecText(tensor),
            " at rank ", rank, "; give all ranks the same model"));
      }
      if (!fresh) continue;
      TensorSpec spec;
      spec.name = tensor.name;
      spec.dtype = tensor.dtype;
      spec.shape = tensor.shape;
      specs.push_back(std::move(spec));
      if (!tensor.tied_to.empty()) {
        ties.emplace_back(tensor.name, tensor.tied_to);
      }
    }
  }
  KEDGE_ASSIGN_OR_RETURN(TensorTable table,
                         TensorTable::Create(std::move(specs), ties));
  std::vector<std::vector<OwnedSlice>> owned(by_rank.size());
  for (std::size_t rank = 0; rank < by_rank.size(); ++rank) {
    for (const DeclaredTensor& tensor : by_rank[rank]) {
      KEDGE_ASSIGN_OR_RETURN(const std::uint32_t ordinal,
                             table.Find(tensor.name));
      for (const UnitRange& range : tensor.owned) {
        owned[rank].push_back({ordinal, range});
      }
    }
  }
  KEDGE_RETURN_IF_ERROR(CheckOwnership(owned, table));
  return table;
}

}  // namespace kedge
