#include <algorithm>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kedge/engine/cpu/slice_encoder.h"
#include "kedge/format/fp8.h"
#include "kedge/format/limits.h"
#include "kedge/format/status.h"
#include "kedge/writer/device_boxes.h"
#include "kedge/writer/hook_impl.h"
#include "kedge/writer/table_agreement.h"

namespace kedge {
namespace {

using hook::BytesText;
using hook::CreationSource;
using hook::kAnchorJobs;
using hook::kCarries;
using hook::kMaxSlices;
using hook::kMinChunkBytes;
using hook::kMinRingBytes;
using hook::kNoIndex;
using hook::kReadBytes;

std::vector<OwnedSlice> MergeOwned(std::vector<OwnedSlice> a,
                                   const std::vector<OwnedSlice>& b) {
  a.insert(a.end(), b.begin(), b.end());
  std::sort(a.begin(), a.end(), [](const OwnedSlice& x, const OwnedSlice& y) {
    return std::tie(x.tensor, x.slice.begin) <
           std::tie(y.tensor, y.slice.begin);
  });
  return a;
}

}  // namespace

absl::Status OptimizerHook::Impl::CheckOptions() const {
  if (device == nullptr) {
    return absl::InvalidArgumentError("HookOptions::device is null");
  }
  if (options.chunk_bytes < kMinChunkBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("HookOptions::chunk_bytes: expected at least ",
                     kMinChunkBytes, ", found ", options.chunk_bytes));
  }
  if (options.ring_bytes < kMinRingBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("HookOptions::ring_bytes: expected at least ",
                     kMinRingBytes, ", found ", options.ring_bytes));
  }
  const auto check_memory = [&](const HookedParameter& parameter,
                                absl::string_view what,
                                const void* data) -> absl::Status {
    // A kernel that met other memory would end the process.
    const auto* const bytes = static_cast<const std::byte*>(data);
    if (parameter.bytes == 0 ||
        (bytes != nullptr && device->IsDeviceMemory(bytes) &&
         device->IsDeviceMemory(bytes + (parameter.bytes - 1)))) {
      return absl::OkStatus();
    }
    return absl::InvalidArgumentError(absl::StrCat(
        "parameter \"", parameter.name, "\": ", what,
        bytes == nullptr
            ? " is null"
            : absl::StrCat(": its ", parameter.bytes,
                           " bytes are not all in the device's memory"),
        "; expected memory of ", device->name()));
  };
  for (const HookedParameter& parameter : options.parameters) {
    KEDGE_RETURN_IF_ERROR(check_memory(parameter, "data", parameter.data));
    for (std::size_t r = 0; r < parameter.replicas.size(); ++r) {
      KEDGE_RETURN_IF_ERROR(check_memory(parameter, absl::StrCat("replica ", r),
                                         parameter.replicas[r]));
    }
  }
  return absl::OkStatus();
}

absl::Status OptimizerHook::Impl::MapTensors() {
  KEDGE_RETURN_IF_ERROR(CheckOptions());
  KEDGE_RETURN_IF_ERROR(CheckTensors(options.tensors));
  KEDGE_RETURN_IF_ERROR(CheckTensors(options.residual));
  for (const HookedParameter& parameter : options.parameters) {
    spans.push_back({parameter.name,
                     static_cast<const std::byte*>(parameter.data),
                     parameter.bytes});
  }
  KEDGE_ASSIGN_OR_RETURN(map, ParameterMap::Make(spans, options.tensors));
  for (const MappedPart& mapped : map->parts()) {
    KEDGE_RETURN_IF_ERROR(CheckAligned(mapped));
  }
  for (const QuantisedTensor& quantised_tensor : options.quantised) {
    KEDGE_RETURN_IF_ERROR(CheckQuantised(quantised_tensor));
  }
  return absl::OkStatus();
}

absl::Status OptimizerHook::Impl::CheckAligned(const MappedPart& mapped) const {
  const HookedParameter& parameter = options.parameters[mapped.parameter];
  const TrainerTensor& tensor = options.tensors[mapped.tensor];
  const auto check = [&](absl::string_view where,
                         const void* data) -> absl::Status {
    if (mapped.part.AlignedAt(static_cast<const std::byte*>(data) +
                              mapped.begin)) {
      return absl::OkStatus();
    }
    return absl::InvalidArgumentError(absl::StrCat(
        "tensor \"", tensor.name, "\" (parameter \"", parameter.name, "\"",
        where, "): its elements do not lie at multiples of ",
        UnitBytes(tensor.dtype),
        " bytes, which a kernel cannot read; move it, or give it as a residual "
        "tensor"));
  };
  KEDGE_RETURN_IF_ERROR(check("", parameter.data));
  for (std::size_t r = 0; r < parameter.replicas.size(); ++r) {
    KEDGE_RETURN_IF_ERROR(
        check(absl::StrCat(", replica ", r), parameter.replicas[r]));
  }
  return absl::OkStatus();
}

const QuantisedTensor* OptimizerHook::Impl::QuantisedOf(
    const std::string& name) const {
  for (const QuantisedTensor& one : options.quantised) {
    if (one.tensor == name) return &one;
  }
  return nullptr;
}

absl::Status OptimizerHook::Impl::CheckQuantised(
    const QuantisedTensor& one) const {
  const auto refuse = [&](absl::string_view what) {
    return absl::InvalidArgumentError(
        absl::StrCat("quantised tensor \"", one.tensor, "\": ", what));
  };
  if (QuantisedOf(one.tensor) != &one) return refuse("given twice");
  if (!(one.floor >= kFp8LeastFloor && one.floor <= kFp8GreatestFloor)) {
    return refuse(absl::StrCat("floor: expected ", kFp8LeastFloor, " to ",
                               kFp8GreatestFloor, ", found ", one.floor));
  }
  bool found = false;
  for (const TrainerTensor& tensor : options.tensors) {
    if (tensor.tied_to == one.tensor) {
      return refuse(absl::StrCat("tensor \"", tensor.name,
                                 "\" is tied to it; give that one's fp8 form "
                                 "as residual tensors, or untie it"));
    }
    if (tensor.name != one.tensor) continue;
    found = true;
    if (tensor.dtype != DType::kBf16 || tensor.shape.size() != 2) {
      return refuse("expected bf16 of two dimensions");
    }
    // What a chunk makes whole is one slice.
    const std::uint64_t row_limit = kMaxSliceUnits / kFp8BlockExtent;
    if (tensor.shape[1] > row_limit ||
        options.chunk_bytes / 2 >
            kMaxSliceUnits - tensor.shape[1] * kFp8BlockExtent) {
      return refuse(absl::StrCat(
          "HookOptions::chunk_bytes: expected at most ",
          tensor.shape[1] > row_limit
              ? 0
              : 2 * (kMaxSliceUnits - tensor.shape[1] * kFp8BlockExtent),
          " with rows of ", tensor.shape[1], " elements, found ",
          options.chunk_bytes));
    }
    if (!tensor.tied_to.empty()) return refuse("it is tied to another tensor");
    if (!tensor.shard || tensor.shard->begin == tensor.shard->end) continue;
    const std::uint64_t block_row = tensor.shape[1] * kFp8BlockExtent;
    const std::uint64_t all = tensor.shape[0] * tensor.shape[1];
    if (tensor.shard->begin % block_row != 0 ||
        (tensor.shard->end % block_row != 0 && tensor.shard->end != all)) {
      return refuse(absl::StrCat(
          "shard: expected whole blocks of ", kFp8BlockExtent, " rows of ",
          tensor.shape[1], " elements, found elements ",
          BytesText(tensor.shard->begin, tensor.shard->end),
          "; cut shards between blocks, or quantise this one in the trainer "
          "and give its values and scales as residual tensors"));
    }
  }
  if (!found) return refuse("it is none of HookOptions::tensors");
  for (const MappedPart& mapped : map->parts()) {
    if (options.tensors[mapped.tensor].name == one.tensor &&
        !mapped.part.contiguous()) {
      return refuse(
          "its rows are not contiguous; quantise it in the trainer and give "
          "its values and scales as residual tensors");
    }
  }
  return absl::OkStatus();
}

std::vector<TrainerTensor> OptimizerHook::Impl::TableTensors() const {
  std::vector<TrainerTensor> all;
  for (const TrainerTensor& tensor : options.tensors) {
    const QuantisedTensor* const one = QuantisedOf(tensor.name);
    all.push_back(tensor);
    if (one == nullptr) continue;
    TrainerTensor& values = all.back();
    values.dtype = DType::kF8E4M3;
    values.strides_bytes.clear();
    TrainerTensor scales = values;
    scales.name = one->scales;
    scales.dtype = DType::kF32;
    for (std::uint64_t& extent : scales.shape) {
      extent = (extent + kFp8BlockExtent - 1) / kFp8BlockExtent;
    }
    if (tensor.shard && tensor.shape[1] > 0) {
      const auto blocks = [&](std::uint64_t element) {
        return (element / tensor.shape[1] + kFp8BlockExtent - 1) /
               kFp8BlockExtent * scales.shape[1];
      };
      scales.shard =
          ElementRange{blocks(tensor.shard->begin), blocks(tensor.shard->end)};
    }
    all.push_back(std::move(scales));
  }
  all.insert(all.end(), options.residual.begin(), options.residual.end());
  return all;
}

absl::Status OptimizerHook::Impl::PlanQuantised(const TensorTable& table) {
  has_quantised.assign(options.parameters.size(), false);
  for (const MappedPart& mapped : map->parts()) {
    const TrainerTensor& tensor = options.tensors[mapped.tensor];
    const QuantisedTensor* const one = QuantisedOf(tensor.name);
    if (one == nullptr) continue;
    QuantisedPart part;
    part.name = tensor.name;
    part.data = spans[mapped.parameter].data + mapped.begin;
    part.cols = tensor.shape[1];
    part.first_row = mapped.part.units().begin / part.cols;
    part.rows = mapped.part.element_count() / part.cols;
    KEDGE_ASSIGN_OR_RETURN(part.values, table.Find(one->tensor));
    KEDGE_ASSIGN_OR_RETURN(part.scales, table.Find(one->scales));
    part.scale_kind = one->scale_kind;
    part.floor = one->floor;
    quantised.push_back(std::move(part));
    has_quantised[mapped.parameter] = true;
  }
  return absl::OkStatus();
}

absl::Status OptimizerHook::Impl::Allocate(const WriterOptions& writer_options,
                                           const L61Key& key) {
  DeviceDeltaOptions delta_options;
  delta_options.device = device;
  delta_options.chunk_bytes = options.chunk_bytes;
  delta_options.ring_bytes = options.ring_bytes;
  delta_options.max_slices = kMaxSlices;
  delta_options.max_tiles =
      4 * (options.chunk_bytes / kTileUnits) + 2 * kMaxSlices;
  bool gathers = false;
  for (const MappedPart& mapped : map->parts()) {
    // One row of the widest tensor must fit.
    delta_options.max_tiles =
        std::max(delta_options.max_tiles, mapped.part.grid().tiles_per_band);
    gathers = gathers || !mapped.part.contiguous();
  }
  delta_options.key = key;
  delta_options.sum_count = map->parts().size() + 2 * quantised.size();
  if (!quantised.empty()) {
    std::uint64_t cols = 0;
    for (const QuantisedPart& part : quantised)
      cols = std::max(cols, part.cols);
    // A row of blocks is one chunk's at the least.
    const std::uint64_t least = 2 * cols * kFp8BlockExtent + kMinRingBytes;
    if (options.ring_bytes < least) {
      return absl::InvalidArgumentError(
          absl::StrCat("HookOptions::ring_bytes: expected at least ", least,
                       " with fp8 tensors of ", cols, " columns, found ",
                       options.ring_bytes));
    }
    // A chunk with a row of blocks begun before, and blocks that edges cut.
    const std::uint64_t block_row = cols * kFp8BlockExtent;
    fp8_values = options.chunk_bytes / 2 + block_row;
    fp8_scales =
        fp8_values / kFp8BlockExtent + 2 * (cols / kFp8BlockExtent + 1);
    delta_options.max_quantise_tasks = kMaxSlices;
    delta_options.quantised_values = fp8_values;
    delta_options.quantised_scales = fp8_scales;
    delta_options.carry_count = kCarries;
    carry_half = 2 * block_row;
    delta_options.carry_bytes = 2 * carry_half;
    delta_options.max_tiles += 4 * (fp8_values / kTileUnits);
  }
  delta_options.deadline = options.deadline;
  KEDGE_ASSIGN_OR_RETURN(delta, DeviceDelta::Create(delta_options));
  feed = std::make_unique<AnchorFeed>(writer_options.io_threads, kAnchorJobs,
                                      gathers, options.deadline);
  memory.device_bytes += delta->device_bytes() + fp8->device_bytes();
  memory.pinned_bytes +=
      delta->pinned_bytes() + reader->pinned_bytes() + fp8->pinned_bytes();
  written.resize(options.parameters.size());
  pending.resize(options.parameters.size());
  return absl::OkStatus();
}

absl::Status OptimizerHook::Impl::SumLive(std::vector<std::uint64_t>* out) {
  out->assign(guarded.size(), 0);
  if (guarded.empty()) return absl::OkStatus();
  KEDGE_RETURN_IF_ERROR(
      WaitOut(device, guard_stream.get(), sums->Enqueue(guard_stream.get())));
  const std::span<const std::uint64_t> found = sums->residues();
  out->assign(found.begin(), found.end());
  return absl::OkStatus();
}

absl::StatusOr<CreationSource> OptimizerHook::Impl::SourceOfCreation(
    const WriterOptions& writer_options, const TensorTable& table) {
  KEDGE_RETURN_IF_ERROR(PlanQuantised(table));
  // Whatever is missing or extra is found here, once for all.
  KEDGE_RETURN_IF_ERROR(MemorySource::Bind(table, TableTensors(),
                                           OthersOf(writer_options.coordinator))
                            .status());
  std::vector<TrainerTensor> plain;
  for (const TrainerTensor& tensor : options.tensors) {
    if (QuantisedOf(tensor.name) == nullptr) plain.push_back(tensor);
  }
  plain.insert(plain.end(), options.residual.begin(), options.residual.end());
  KEDGE_ASSIGN_OR_RETURN(auto device_reader,
                         DeviceReader::Create(device, kReadBytes));
  KEDGE_ASSIGN_OR_RETURN(
      DeviceSource source,
      DeviceSource::Bind(table, plain, MemorySource::Others::kHoldTheRest,
                         *device, device_reader.get()));
  KEDGE_ASSIGN_OR_RETURN(
      auto fp8_source,
      QuantisedSource::Create(device, device_reader.get(), quantised));
  return CreationSource(std::move(device_reader), std::move(source),
                        std::move(fp8_source));
}

absl::StatusOr<StoreWriter::HeldPart> OptimizerHook::Impl::Bind(
    const WriterOptions& writer_options, const VersionState& version,
    const L61Summer& summer) {
  const TensorTable& table = *version.table;
  KEDGE_RETURN_IF_ERROR(MapTensors());
  // Says what is missing or extra; each source by itself has but a part.
  KEDGE_RETURN_IF_ERROR(MemorySource::Bind(table, TableTensors(),
                                           OthersOf(writer_options.coordinator))
                            .status());
  constexpr auto kPart = MemorySource::Others::kHoldTheRest;
  KEDGE_RETURN_IF_ERROR(PlanQuantised(table));
  std::vector<TrainerTensor> plain;
  for (const TrainerTensor& tensor : options.tensors) {
    if (QuantisedOf(tensor.name) == nullptr) plain.push_back(tensor);
  }
  KEDGE_ASSIGN_OR_RETURN(reader, DeviceReader::Create(device, kReadBytes));
  KEDGE_ASSIGN_OR_RETURN(
      hooked, DeviceSource::Bind(table, plain, kPart, *device, reader.get()));
  KEDGE_ASSIGN_OR_RETURN(
      residual, DeviceSource::Bind(table, options.residual, kPart, *device,
                                   reader.get()));
  KEDGE_ASSIGN_OR_RETURN(
      fp8, QuantisedSource::Create(device, reader.get(), quantised));
  owned = MergeOwned(OwnedOf(table, *hooked), OwnedOf(table, *residual));
  owned = MergeOwned(std::move(owned), OwnedOf(table, *fp8));

  KEDGE_ASSIGN_OR_RETURN(guard_stream, device->CreateStream());
  std::vector<SumBox> boxes;
  std::uint32_t next_quantised = 0;  // in PlanQuantised's order
  for (std::uint32_t p = 0; p < map->parts().size(); ++p) {
    const MappedPart& mapped = map->parts()[p];
    const HookedParameter& parameter = options.parameters[mapped.parameter];
    PartState part;
    KEDGE_ASSIGN_OR_RETURN(part.tensor,
                           table.Find(options.tensors[mapped.tensor].name));
    part.frozen = parameter.frozen;
    if (QuantisedOf(options.tensors[mapped.tensor].name) != nullptr) {
      part.quantised = next_quantised++;
    }
    parts.push_back(part);
    AddBoxes(mapped.part, spans[mapped.parameter].data + mapped.begin,
             static_cast<std::uint32_t>(guarded.size()), &boxes);
    guarded.push_back({p, std::nullopt});
    for (std::size_t r = 0; r < parameter.replicas.size(); ++r) {
      AddBoxes(
          mapped.part,
          static_cast<const std::byte*>(parameter.replicas[r]) + mapped.begin,
          static_cast<std::uint32_t>(guarded.size()), &boxes);
      guarded.push_back({p, r});
    }
  }
  if (!guarded.empty()) {
    KEDGE_ASSIGN_OR_RETURN(
        sums,
        device->PrepareSums(boxes, static_cast<std::uint32_t>(guarded.size()),
                            summer.key()));
  }
  residues.reserve(guarded.size());
  KEDGE_RETURN_IF_ERROR(SumLive(&residues));

  StoreWriter::HeldPart held;
  KEDGE_ASSIGN_OR_RETURN(
      snapshot, SnapshotSource::Copy(table, *residual, &summer, &held));
  for (std::size_t g = 0; g < guarded.size(); ++g) {
    if (guarded[g].replica) continue;
    PartState& part = parts[guarded[g].part];
    part.l61 = residues[g];
    if (part.quantised != kNoIndex) continue;  // the table has its fp8 form
    held.l61[part.tensor] = L61Add(held.l61[part.tensor], part.l61);
  }
  std::vector<std::byte> scratch;
  for (const TensorSlice& slice :
       SplitOwned(table, OwnedOf(table, *fp8), kReadBytes)) {
    const std::uint32_t unit_bytes = UnitBytes(table[slice.tensor].dtype);
    KEDGE_ASSIGN_OR_RETURN(
        const auto bytes,
        fp8->Read(slice.tensor, slice.units.begin * unit_bytes,
                  slice.units.count() * unit_bytes, &scratch));
    std::uint64_t& sum = held.l61[slice.tensor];
    sum = L61Add(sum, summer.Sum(slice.units.begin * unit_bytes, bytes));
  }
  held.owned = owned;
  memory.residual_bytes = snapshot->total_bytes();
  for (std::uint32_t i = 0; i < table.size(); ++i) {
    const std::uint64_t bytes = snapshot->BytesOf(i);
    if (bytes > 0) memory.residual.emplace_back(table[i].name, bytes);
  }
  KEDGE_RETURN_IF_ERROR(Allocate(writer_options, summer.key()));
  return held;
}

OptimizerHook::OptimizerHook(std::unique_ptr<Impl> impl)
    : impl_(std::move(impl)) {}

OptimizerHook::~OptimizerHook() = default;

absl::StatusOr<std::unique_ptr<OptimizerHook>> OptimizerHook::Create(
    const WriterOptions& writer, const InitOptions& init, HookOptions options) {
  {
    Impl plan(writer, options);
    const absl::Status mapped = plan.MapTensors();
    const std::vector<TrainerTensor> all =
        mapped.ok() ? plan.TableTensors() : std::vector<TrainerTensor>();
    KEDGE_ASSIGN_OR_RETURN(const TensorTable table,
                           AgreeOnTable(writer.coordinator, all, mapped));
    if (table.size() == 0) {
      return absl::InvalidArgumentError(
          absl::StrCat(writer.store_path,
                       ": expected the tensors of a model, found none; pass "
                       "the trainer's tensors"));
    }
    auto source = plan.SourceOfCreation(writer, table);
    KEDGE_RETURN_IF_ERROR(AgreeThatAllCould(
        writer.coordinator, "reading v0's weights", source.status()));
    KEDGE_RETURN_IF_ERROR(InitStore(writer, init, table, *source));
  }
  return Open(writer, std::move(options));
}

absl::StatusOr<std::unique_ptr<OptimizerHook>> OptimizerHook::Open(
    const WriterOptions& writer, HookOptions options,
    std::optional<std::uint64_t> resume_step) {
  auto impl = std::make_unique<Impl>(writer, std::move(options));
  KEDGE_ASSIGN_OR_RETURN(
      impl->writer,
      StoreWriter::Open(
          writer, resume_step,
          [&](const VersionState& state, const L61Summer& summer) {
            return impl->Bind(writer, state, summer);
          }));
  return std::unique_ptr<OptimizerHook>(new OptimizerHook(std::move(impl)));
}

const VersionId& OptimizerHook::held() const { return impl_->writer->held(); }
const StoreWriter& OptimizerHook::store_writer() const {
  return *impl_->writer;
}
const HookMemory& OptimizerHook::memory() const { return impl_->memory; }

}  // namespace kedge
